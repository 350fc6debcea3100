/* bpe.h - byte-level BPE, the tokeniser of decoder-only models: text to ids and back, as Hugging Face's `tokenizers`.
 *
 * What a model file keeps of it (tools/convert/byte_bpe.py writes it), numbers little-endian:
 *
 *   "MOE-BPE\0", then u32: version 1; 1 for NFC, else 0; how many expressions, tokens, merges and added tokens follow
 *   expressions   u16 length, text        PCRE2; each cuts the pieces of the one before
 *   tokens        u16 length, text        by id; bytes as GPT-2's stand-ins ("Ġ" is a space); length 0: no such token
 *                 bytes of control characters and those above F0 may lack theirs: texts lose them
 *   merges        u32 left, right, both   ids; the first is joined first
 *   added tokens  u32 id, u32 flags, u16 length, text     flags 1: special, 2: is looked for in the normalised text
 *
 * A text of a user never becomes an added token, even where it spells one: only what is encoded with `added` does.
 *
 * A bpe is immutable after bpe_new: any number of threads may use it at once. Answers, buffers and `error` are those of
 * spm.h.
 */
#ifndef BPE_H
#define BPE_H

#include "tools/text/bytes.h"
#include "tools/text/spm.h" /* SPM_NO_MEMORY, SPM_MAX_TEXT */

enum {
    BPE_MAX_MODEL = 64 << 20,  /* bytes that bpe_new accepts */
    BPE_MAX_TOKENS = 1 << 20,  /* ids, and merges            */
    BPE_MAX_ADDED = 4096,      /* added tokens               */
    BPE_MAX_PIECE = 1024,      /* bytes of a token as it is written */
    BPE_MAX_EXPRESSIONS = 16,  /* expressions                */
    BPE_MAX_EXPRESSION = 4096, /* bytes of one of them       */
    BPE_MAX_TEXT = SPM_MAX_TEXT
};

typedef struct bpe bpe;

/* The bytes are untrusted input. They are not copied and must outlive the bpe. NULL on failure, with a line in `error`;
 * errno is ENOMEM where memory ran out, else EINVAL. */
bpe *bpe_new(const void *bytes, size_t size, char *error, size_t error_size);
void bpe_free(bpe *tokeniser); /* NULL is fine */

int32_t bpe_size(const bpe *tokeniser); /* ids are 0 .. size-1; not each of them is a token */

/* Text to ids, and with `begins` (or NULL) where each of them begins in the normalised text: *begins is a buffer like
 * *ids, with *count elements, too. `added`: added tokens in the text are tokens, as in a template. What is no UTF-8
 * becomes U+FFFD; NUL bytes are text. Takes time in proportion to the text with the published expressions. One
 * that goes back too often at one place is an error; one that looks far ahead at every place takes the square. */
typedef struct bpe_begins {
    uint32_t *data;
    size_t capacity;
} bpe_begins;
int bpe_encode(const bpe *tokeniser, const char *text, size_t length, int added, int32_t **ids, size_t *capacity,
               size_t *count, bpe_begins *begins, char *error, size_t error_size);

/* Ids to text as they come. A token may end inside a character: its bytes are held back until the character is whole or
 * cannot become so; what is no UTF-8 is then U+FFFD. All zero: the beginning of a text. Put together this is what one
 * call gives for all ids. An id that is no token gives nothing. */
typedef struct bpe_stream {
    unsigned char held[4], n, wanted; /* bytes of an unfinished character, and how many are missing */
    unsigned char least, most;        /* what its next byte may be */
} bpe_stream;
void bpe_decode(const bpe *tokeniser, bpe_stream *stream, const int32_t *ids, size_t count, text_bytes *out);
void bpe_decode_end(bpe_stream *stream, text_bytes *out);

/* Bytes of the text that an id gives. */
size_t bpe_token_bytes(const bpe *tokeniser, int32_t id);
/* How an id is written: stand-ins, or its text, where that has a sign which is none. It lies in the bytes that the
 * tokeniser was made of, not ended by a NUL. NULL: no such token. */
const char *bpe_piece(const bpe *tokeniser, int32_t id, size_t *length);
/* The id of what is written so; -1: there is none. It takes a look at every token. */
int32_t bpe_id(const bpe *tokeniser, const char *piece, size_t length);
/* Whether the text of an id begins inside a character. */
int bpe_continues(const bpe *tokeniser, int32_t id);
int bpe_is_special(const bpe *tokeniser, int32_t id); /* an added token that is no text */

#endif
