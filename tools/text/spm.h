/* spm.h - SentencePiece for C.
 *
 * SentencePiece itself speaks C++ only. This is the part of it that a translation front end needs, as plain C:
 * text to piece ids and back. No exception leaves these functions.
 *
 * An spm is immutable after spm_new: any number of threads may use it at once.
 *
 * Versions differ: about one line in four thousand is cut differently by SentencePiece 0.1.97 and 0.2.3 (a tie
 * between equal scores), so equal text does not promise equal ids across machines. Equal ids give equal text.
 */
#ifndef SPM_H
#define SPM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SPM_MAX_MODEL = 32 << 20, /* bytes of a model that spm_new accepts                                    */
    SPM_MAX_PIECES = 1 << 20, /* pieces of a model                                                        */
    SPM_MAX_PIECE = 1024,     /* bytes of a piece                                                         */
    SPM_MAX_TEXT = 16 << 20   /* bytes of one text to encode, ids of one sequence to decode               */
};

/* What a call answers where memory ran out; other failures are -1. Nothing else has happened, and the same call can
 * succeed later. */
enum { SPM_NO_MEMORY = -2 };

typedef struct spm spm;

/* Make a tokeniser from the bytes of a .model file, which are copied. They are untrusted input: what the library
 * would follow without looking (its normalisation trie, byte pieces) is checked here first.
 * NULL on failure, with one line in error[error_size] (which may be NULL); errno is ENOMEM where memory ran out, else
 * EINVAL.
 *
 * Memory: SentencePiece ends in a segmentation fault where an allocation fails. So this call and those below take a
 * block as large as all that they can need before they begin; where there is no such block, they fail, and nothing has
 * happened. The first call sets the new-handler of the process, which passes on to the one that was there. */
spm *spm_new(const void *bytes, size_t size, char *error, size_t error_size);
void spm_free(spm *tokeniser); /* NULL is fine */

int32_t spm_size(const spm *tokeniser); /* ids are 0 .. size-1 */

/* Text to ids. The text need not end in NUL and holds none; invalid UTF-8 becomes U+FFFD, so check before.
 * *ids is a malloc'ed buffer of *capacity ids, or NULL with capacity 0; it grows by realloc and stays the caller's to
 * free, as with getline(3). *count ids are written. Never adds begin or end tokens.
 * 0, or -1 or SPM_NO_MEMORY with one line in error; *count is 0 then. */
int spm_encode(const spm *tokeniser, const char *text, size_t length, int32_t **ids, size_t *capacity, size_t *count,
               char *error, size_t error_size);

/* Ids to text, into a malloc'ed buffer in the same way. A NUL follows the text and is not counted. Control tokens
 * give nothing; an unknown token gives " \xE2\x81\x87 " (U+2047). -1 if an id is not 0 .. size-1. */
int spm_decode(const spm *tokeniser, const int32_t *ids, size_t count, char **text, size_t *capacity, size_t *length,
               char *error, size_t error_size);

/* Where the piece of each id lies: from byte begins[i] on in the text that spm_encode cuts into ids, or in the text
 * that spm_decode makes of ids. *begins is a buffer like *ids above, with *count elements. */
int spm_encode_begins(const spm *tokeniser, const char *text, size_t length, uint32_t **begins, size_t *capacity,
                      size_t *count, char *error, size_t error_size);
int spm_decode_begins(const spm *tokeniser, const int32_t *ids, size_t n, uint32_t **begins, size_t *capacity,
                      size_t *count, char *error, size_t error_size);

/* Ids of text and text of ids where pieces are texts, each ended by a NUL, one behind the other: for models whose ids
 * are not SentencePiece's own. What the tokeniser has no piece for comes out as it is written, and joins in as it is.
 */
int spm_encode_pieces(const spm *tokeniser, const char *text, size_t length, char **pieces, size_t *capacity,
                      size_t *bytes, char *error, size_t error_size);
int spm_decode_pieces(const spm *tokeniser, const char *pieces, size_t bytes, char **text, size_t *capacity,
                      size_t *length, char *error, size_t error_size);

/* The piece of an id, valid while the tokeniser lives and NUL-terminated; "" if there is no such id. */
const char *spm_piece(const spm *tokeniser, int32_t id);
/* The id of a piece; -1 if there is no such piece, or SPM_NO_MEMORY. */
int32_t spm_id(const spm *tokeniser, const char *piece);

/* 1 or 0; 0 for an id out of range. */
int spm_is_unknown(const spm *tokeniser, int32_t id);
int spm_is_control(const spm *tokeniser, int32_t id);
int spm_is_byte(const spm *tokeniser, int32_t id); /* one byte of a character that has no piece of its own */

/* Special ids; -1 where the model has none. */
int32_t spm_unk(const spm *tokeniser);
int32_t spm_bos(const spm *tokeniser);
int32_t spm_eos(const spm *tokeniser);

/* The version of SentencePiece this was built with, "0.1.97", or "unknown". */
const char *spm_library_version(void);

#ifdef __cplusplus
}
#endif
#endif /* SPM_H */
