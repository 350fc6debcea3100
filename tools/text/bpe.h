/* bpe.h - BPE, the tokeniser of decoder-only models: text to ids and back, like Hugging Face's `tokenizers`. It merges
 * bytes (GPT-2's kind), or characters with tokens for single bytes (SentencePiece's kind: Llama 2, Mistral, Gemma).
 *
 * Format of a tokeniser in a model file (written by tools/convert/byte_bpe.py), numbers little-endian:
 *
 *   "MOE-BPE\0", then u32: version 1; flags; counts of expressions, tokens, merges and added tokens
 *   flags         1 NFC; 2 a piece that is a token needs no merges; 4 characters: spaces are "▁", and a character
 *                 without a token becomes a token <0xHH> per byte; 8 "▁" precedes each text between added tokens;
 *                 16 "▁" precedes a text at the beginning; 32 but not if it begins with a space; 64 a space at the
 *                 beginning of a decoded text is dropped
 *   expressions   u16 length, text        PCRE2; each splits the pieces of the previous one
 *   tokens        u16 length, text        by id; bytes in GPT-2's alphabet ("Ġ" is a space), or characters; length 0
 *                 for an unused id. GPT-2's tokens of control characters and of bytes above F0 may be missing; texts
 *                 lose these bytes
 *   merges        u32 left, right, both   ids; earlier merges have priority
 *   added tokens  u32 id, u32 flags, u16 length, text     flags 1: special, 2: matched in the normalised text,
 *                 4: matched in all texts
 *
 * A user's text never yields other added tokens, even if it spells one; only text encoded with BPE_ADDED does.
 *
 * A bpe is immutable after bpe_new, so threads may share it. Results, buffers and `error` are as in spm.h.
 */
#ifndef BPE_H
#define BPE_H

#include "tools/text/bytes.h"
#include "tools/text/spm.h" /* SPM_NO_MEMORY, SPM_MAX_TEXT */

enum {
    BPE_MAX_MODEL = 64 << 20,  /* maximum bytes that bpe_new accepts */
    BPE_MAX_TOKENS = 1 << 20,  /* maximum number of ids, and of merges */
    BPE_MAX_ADDED = 16384,     /* maximum number of added tokens */
    BPE_MAX_PIECE = 1024,      /* maximum bytes of a token as spelled in the file */
    BPE_MAX_EXPRESSIONS = 16,  /* expressions */
    BPE_MAX_EXPRESSION = 4096, /* maximum bytes per expression */
    BPE_MAX_TEXT = SPM_MAX_TEXT
};

/* Flags of a tokeniser, in the order of the format above. */
enum {
    BPE_NFC = 1,
    BPE_WHOLE = 2,
    BPE_CHARACTERS = 4,
    BPE_PREFIX = 8,
    BPE_FIRST = 16,
    BPE_UNLESS = 32,
    BPE_TRIMMED = 64
};

typedef struct bpe bpe;

/* Create a tokeniser from untrusted bytes, which must outlive the tokeniser. On failure, return NULL, write a line to
 * `error` and set errno to ENOMEM or EINVAL. */
bpe *bpe_new(const void *bytes, size_t size, char *error, size_t error_size);
void bpe_free(bpe *tokeniser); /* may be NULL */

int32_t bpe_size(const bpe *tokeniser); /* ids are 0 .. size-1; some may be unused */

/* How to encode: recognise added tokens, as in a template; the text follows another one; it gets no space before it. */
enum { BPE_ADDED = 1, BPE_LATER = 2, BPE_BARE = 4 };

/* Encode a text. `begins` (may be NULL) receives the offset of each id in the text after NFC. Invalid UTF-8 becomes
 * U+FFFD; NUL bytes are text. The expressions of published models take linear time. An expression that backtracks too
 * often at one place is an error; one that looks far ahead everywhere takes quadratic time. */
int bpe_encode(const bpe *tokeniser, const char *text, size_t length, int how, text_ids *ids, text_offsets *begins,
               char *error, size_t error_size);

/* Find the added tokens in a template: set *begin to the start of the first one and *end to the end of the last one.
 * Without any, set both to `length`. */
void bpe_find_added(const bpe *tokeniser, const char *text, size_t length, size_t *begin, size_t *end);

/* Decode ids as they arrive. If a token ends inside a character, its bytes are held back until the character is
 * complete, or invalid and replaced by U+FFFD. The state must be all zero at the beginning of a text. The concatenated
 * results of several calls equal the result of a single call. Unused ids have no text. */
typedef struct bpe_stream {
    unsigned char held[4], n, wanted; /* bytes of an incomplete character, and how many are missing */
    unsigned char least, most;        /* range of the next byte */
    unsigned char begun;              /* 1 after the first byte */
} bpe_stream;
void bpe_decode(const bpe *tokeniser, bpe_stream *stream, const int32_t *ids, size_t count, text_bytes *out);
void bpe_decode_end(bpe_stream *stream, text_bytes *out);

/* Return 1 if the space at the beginning of this id's text is dropped if the id is the first one. */
int bpe_is_trimmed(const bpe *tokeniser, int32_t id);
/* Return the length of an id's text in bytes. */
size_t bpe_token_bytes(const bpe *tokeniser, int32_t id);
/* Return the spelling of an id in the file, without a final NUL; NULL if unused. In a tokeniser of bytes the spelling
 * uses GPT-2's alphabet unless it contains other characters. */
const char *bpe_piece(const bpe *tokeniser, int32_t id, size_t *length);
/* Return the id with this spelling, or -1. Searches all tokens. */
int32_t bpe_id(const bpe *tokeniser, const char *piece, size_t length);
/* Return 1 if the text of an id starts inside a character. */
int bpe_continues(const bpe *tokeniser, int32_t id);
int bpe_is_special(const bpe *tokeniser, int32_t id); /* 1 for an added token that is special */

#endif
