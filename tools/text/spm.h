/* spm.h - SentencePiece for C.
 *
 * The part of the C++ library that a translation front end needs: text to piece ids and back. No exception leaves these
 * functions.
 *
 * An spm is immutable after spm_new, so threads may share it.
 *
 * Versions differ: SentencePiece 0.1.97 and 0.2.3 split about one line in four thousand differently (equal scores), so
 * equal text does not guarantee equal ids across machines. Equal ids give equal text.
 */
#ifndef SPM_H
#define SPM_H

#ifdef __cplusplus
extern "C" {
#endif

#include "tools/text/bytes.h"

enum {
    SPM_MAX_MODEL = 32 << 20, /* bytes of a model */
    SPM_MAX_PIECES = 1 << 20, /* pieces of a model                                                        */
    SPM_MAX_PIECE = 1024,     /* bytes of a piece                                                         */
    SPM_MAX_TEXT = 16 << 20   /* bytes of a text, ids of a sequence */
};

/* Returned if memory runs out; other failures are -1. Nothing has changed, and the same call may succeed later. */
enum { SPM_NO_MEMORY = -2 };

typedef struct spm spm;

/* Create a tokeniser from the bytes of a .model file, which are copied. They are untrusted input: whatever the library
 * would use unchecked (its normalisation trie, byte pieces) is checked here. Return NULL on failure, with a line in
 * error[error_size] (may be NULL); errno is ENOMEM or EINVAL. SentencePiece crashes if an allocation fails. Therefore
 * this call and those below first allocate a block as large as they may need; if that fails, they return an error
 * without effects. The first call sets the new-handler of the process, which calls the previous one. */
spm *spm_new(const void *bytes, size_t size, char *error, size_t error_size);
void spm_free(spm *tokeniser); /* NULL is fine */

int32_t spm_size(const spm *tokeniser); /* ids are 0 .. size-1 */

/* Encode a text, without NUL bytes, without begin and end tokens. Invalid UTF-8 becomes U+FFFD. Return 0, or -1 or
 * SPM_NO_MEMORY with a line in error and no ids. */
int spm_encode(const spm *tokeniser, const char *text, size_t length, text_ids *ids, char *error, size_t error_size);

/* Decode ids in the same way; an id out of range is an error. Control tokens give nothing, unknown ones " \u2047 ". */
int spm_decode(const spm *tokeniser, const int32_t *ids, size_t n, text_bytes *text, char *error, size_t error_size);

/* The offset of each id in the normalised text of spm_encode, or in the text of spm_decode. */
int spm_encode_begins(const spm *tokeniser, const char *text, size_t length, text_offsets *begins, char *error,
                      size_t error_size);
int spm_decode_begins(const spm *tokeniser, const int32_t *ids, size_t n, text_offsets *begins, char *error,
                      size_t error_size);

/* Encode to texts of pieces, and decode from them, each NUL-terminated: for models with ids of their own. Unknown text
 * is a piece by itself, in both directions. */
int spm_encode_pieces(const spm *tokeniser, const char *text, size_t length, text_bytes *pieces, char *error,
                      size_t error_size);
int spm_decode_pieces(const spm *tokeniser, const char *pieces, size_t bytes, text_bytes *text, char *error,
                      size_t error_size);

/* The piece of an id, NUL-terminated, valid as long as the tokeniser; "" for unknown ids. */
const char *spm_piece(const spm *tokeniser, int32_t id);
/* Return the id of a piece, -1 if unknown, or SPM_NO_MEMORY. */
int32_t spm_id(const spm *tokeniser, const char *piece);

/* 0 for ids out of range. */
int spm_is_unknown(const spm *tokeniser, int32_t id);
int spm_is_control(const spm *tokeniser, int32_t id);
int spm_is_byte(const spm *tokeniser, int32_t id); /* a single byte */

int32_t spm_unk(const spm *tokeniser); /* -1 if the model has none */

/* The version of SentencePiece at build time, "0.1.97", or "unknown". */
const char *spm_library_version(void);

#ifdef __cplusplus
}
#endif
#endif /* SPM_H */
