/* pieces.h - the vocabulary of one side of a Marian model: a SentencePiece model, or a mapping of pieces to ids */
#ifndef CONVERT_PIECES_H
#define CONVERT_PIECES_H

#include "tools/convert/packed.h"
#include "tools/convert/yaml.h"

typedef struct pieces {
    packed_file file; /* contains the bytes of a SentencePiece model */
    yaml_map map;
    moe_span *names; /* [n] by id; data NULL for unused ids */
    size_t n;
    int32_t eos, unk;
} pieces;

/* Read a .spm or .yml file with ids below `n`. `name`: the file's name, which must remain valid. Errors as in packed.h.
 */
moe_status pieces_read(const char *path, const char *name, size_t n, const char *beside, pieces *p, moe_error *error);
/* A SentencePiece model of type BPE. */
enum { PIECE_NORMAL = 1, PIECE_UNKNOWN, PIECE_CONTROL, PIECE_USER, PIECE_UNUSED, PIECE_BYTE };
typedef struct piece_of_bpe {
    moe_span text;
    float score;
    uint64_t kind;
} piece_of_bpe;
typedef struct pieces_bpe {
    packed_file file;  /* contains the texts */
    piece_of_bpe *all; /* [n] by id */
    size_t n, capacity;
    int spaced; /* 1 if a space precedes texts */
} pieces_bpe;
/* Read the pieces of any model, whose bytes `data` must remain valid. On failure `p` is freed. */
moe_status pieces_list(const void *data, size_t size, const char *name, pieces_bpe *p, moe_error *error);
/* Read a model that normalises no texts. On failure `p` is freed. */
moe_status pieces_read_bpe(const char *path, const char *beside, pieces_bpe *p, moe_error *error);
void pieces_free_bpe(pieces_bpe *p);

/* Map a SentencePiece model and check it, without reading its pieces. */
moe_status pieces_open_spm(const char *path, const char *beside, packed_file *file, moe_error *error);
void pieces_free(pieces *p);

int pieces_is_spm(const char *path); /* 1 for .spm and .spm.gz */

#endif
