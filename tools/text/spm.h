/* spm.h - SentencePiece for C.
 *
 * Wraps the part of the C++ library that a translation front end needs: text to piece ids and back. The functions throw
 * no exceptions.
 *
 * An spm is immutable after spm_new, so threads may share it.
 *
 * Ordinary Unigram models use unigram.c, which gives the same ids on every machine; other models use the library.
 * SentencePiece 0.1.97 and 0.2.3 split about one line in 4,000 differently, with equal scores.
 */
#ifndef SPM_H
#define SPM_H

#ifdef __cplusplus
extern "C" {
#endif

#include "tools/text/bytes.h"

enum {
    SPM_MAX_MODEL = 32 << 20, /* maximum bytes per model */
    SPM_MAX_PIECES = 1 << 20, /* maximum pieces per model */
    SPM_MAX_PIECE = 1024,     /* maximum bytes per piece */
    SPM_MAX_TEXT = 16 << 20   /* maximum bytes per text, and ids per sequence */
};

/* Returned if memory runs out; other failures return -1. The failed call has no effects and may succeed later. */
enum { SPM_NO_MEMORY = -2 };

typedef struct spm spm;

/* Create a tokeniser from the bytes of a .model file, which are copied. They are untrusted, and this function checks
 * what the library uses unchecked (normalisation trie, byte pieces). Return NULL on failure, with a message in
 * error[error_size] (may be NULL); errno is ENOMEM or EINVAL. SentencePiece crashes if an allocation fails. Therefore
 * all functions first allocate a block as large as they may need, and return an error if that fails. The first call
 * sets the new-handler of the process; it calls the previous handler. */
spm *spm_new(const void *bytes, size_t size, char *error, size_t error_size);
/* Like spm_new, but always use SentencePiece; for tests. */
spm *spm_new_by_library(const void *bytes, size_t size, char *error, size_t error_size);
void spm_free(spm *tokeniser); /* may be NULL */

int32_t spm_size(const spm *tokeniser); /* ids are 0 .. size-1 */

/* Encode a text without NUL bytes; add no begin or end token. Invalid UTF-8 becomes U+FFFD. Return 0, or -1 or
 * SPM_NO_MEMORY with a one-line message in error and no ids. */
int spm_encode(const spm *tokeniser, const char *text, size_t length, text_ids *ids, char *error, size_t error_size);

/* Decode ids. Errors are as in spm_encode; an id out of range is an error. Control tokens have no text, unknown ones
 * are " \u2047 ". */
int spm_decode(const spm *tokeniser, const int32_t *ids, size_t n, text_bytes *text, char *error, size_t error_size);

/* Find the offset of each id in the normalised text of spm_encode, or in the text of spm_decode. */
int spm_encode_begins(const spm *tokeniser, const char *text, size_t length, text_offsets *begins, char *error,
                      size_t error_size);
int spm_decode_begins(const spm *tokeniser, const int32_t *ids, size_t n, text_offsets *begins, char *error,
                      size_t error_size);

/* Encode to and decode from NUL-terminated pieces, for models with their own ids. Unknown text becomes a piece, too. */
int spm_encode_pieces(const spm *tokeniser, const char *text, size_t length, text_bytes *pieces, char *error,
                      size_t error_size);
int spm_decode_pieces(const spm *tokeniser, const char *pieces, size_t bytes, text_bytes *text, char *error,
                      size_t error_size);

/* Return the piece of an id, NUL-terminated and valid as long as the tokeniser; "" for unknown ids. */
const char *spm_piece(const spm *tokeniser, int32_t id);
/* Return the id of a piece, -1 if unknown, or SPM_NO_MEMORY. */
int32_t spm_id(const spm *tokeniser, const char *piece);

/* Return 1 if an id has this kind; return 0 for ids out of range. */
int spm_is_unknown(const spm *tokeniser, int32_t id);
int spm_is_control(const spm *tokeniser, int32_t id);
int spm_is_byte(const spm *tokeniser, int32_t id); /* 1 for a single byte */

int32_t spm_unk(const spm *tokeniser); /* id of the unknown token, or -1 */

/* Return the SentencePiece version at build time, such as "0.1.97", or "unknown". */
const char *spm_library_version(void);

#ifdef __cplusplus
}
#endif
#endif /* SPM_H */
