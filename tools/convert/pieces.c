/* pieces.c - see pieces.h */
#include "tools/convert/pieces.h"
#include "tools/text/spm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST_TEXT = 1 << 24, MAX_PIECES = 1 << 20, BPE = 2 };

static int ends_in(const char *path, const char *extension) {
    size_t length = strlen(path);
    if (text_ends_with(path, length, ".gz")) length -= 3;
    else if (text_ends_with(path, length, ".zst")) length -= 4;
    return text_ends_with(path, length, extension);
}

int pieces_is_spm(const char *path) { return ends_in(path, ".spm"); }

/* ---- SentencePiece: Protocol Buffers ---- */

typedef struct fields {
    const uint8_t *at, *end;
} fields;

typedef struct field {
    uint64_t number, value; /* value: an integer, unless data is not NULL */
    const uint8_t *data;
    size_t length;
} field;

/* Read a varint; values above 64 bits become UINT64_MAX. Returns 0 if damaged. */
static int take_varint(fields *f, uint64_t *value) {
    *value = 0;
    for (int shift = 0; f->at < f->end && shift < 64; shift += 7) {
        const uint8_t byte = *f->at++;
        *value = shift == 63 && (byte & 127) > 1 ? UINT64_MAX : *value | (uint64_t)(byte & 127) << shift;
        if (byte < 128) return 1;
    }
    return 0;
}

/* Read the next field of a message. Returns 1, 0 at the end, or -1 if damaged. */
static int take_field(fields *f, field *out) {
    uint64_t key, size;
    if (f->at == f->end) return 0;
    if (!take_varint(f, &key)) return -1;
    *out = (field){ .number = key >> 3 };
    switch (key & 7) {
    case 0: return take_varint(f, &out->value) ? 1 : -1;
    case 1: size = 8; break;
    case 5: size = 4; break;
    case 2:
        if (!take_varint(f, &size)) return -1;
        break;
    default: return -1;
    }
    if (size > (uint64_t)(f->end - f->at)) return -1;
    out->data = f->at;
    out->length = (size_t)size;
    f->at += size;
    return 1;
}

/* Read a little-endian float of four bytes. */
static float float_at(const uint8_t *p) {
    const uint32_t bits = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Read a piece. Returns 0 if damaged. */
static int read_piece(const field *message, piece_of_bpe *out) {
    fields f = { message->data, message->data + message->length };
    field part;
    int more, named = 0, scored = 1;
    *out = (piece_of_bpe){ .kind = PIECE_NORMAL };
    while ((more = take_field(&f, &part)) > 0) {
        if (part.number == 1) {
            named = part.data != NULL;
            out->text = (moe_span){ (const char *)part.data, part.length };
        }
        if (part.number == 2) {
            scored = part.data && part.length == 4;
            out->score = scored ? float_at(part.data) : 0;
        }
        if (part.number == 3) out->kind = part.data ? 0 : part.value;
    }
    return more == 0 && named && scored && text_utf8_valid(out->text.data, out->text.length) == out->text.length;
}

/* The normaliser follows the pieces, so a model without one is the beginning of a file. */
enum { NORMALISER = 3 };
static const char truncated[] = "truncated: a SentencePiece model without its normaliser; download it again";

static moe_status damaged(const char *name, const char *problem, moe_error *error) {
    return text_fail(error, MOE_ERROR_FORMAT, name, "%.100s: %s", name, problem);
}

/* Return the id of a piece, or -1. */
static int32_t id_of(const pieces *p, const text_index *index, moe_span piece) {
    size_t at = 0;
    for (uint32_t i, hash = text_hash(piece.data, piece.length); (i = text_index_next(index, hash, &at)) != TEXT_NONE;)
        if (p->names[i].length == piece.length && memcmp(p->names[i].data, piece.data, piece.length) == 0)
            return (int32_t)i;
    return -1;
}

/* Read the pieces of p->file. */
static moe_status read_pieces(pieces *p, const char *name, text_index *index, moe_error *error) {
    static const moe_span end = { "</s>", 4 }, unknown = { "<unk>", 5 };
    fields f = { p->file.data, p->file.data + p->file.size };
    field message;
    int more, whole = 0;
    size_t n = 0;
    int32_t first = -1; /* the first unknown piece */
    while ((more = take_field(&f, &message)) > 0) {
        piece_of_bpe read;
        whole |= message.number == NORMALISER && message.data;
        if (message.number != 1 || !message.data) continue;
        if (!read_piece(&message, &read)) return damaged(name, "not a SentencePiece model, or damaged", error);
        if (n == p->n) {
            n++;
            break;
        }
        const moe_span piece = read.text;
        if (id_of(p, index, piece) >= 0) return damaged(name, "duplicate pieces", error);
        if (read.kind == PIECE_UNKNOWN && first < 0) first = (int32_t)n;
        p->names[n] = piece;
        if (!text_index_add(index, text_hash(piece.data, piece.length), n++)) return text_out_of_memory(error);
    }
    if (more < 0) return damaged(name, "not a SentencePiece model, or damaged", error);
    if (!whole && n <= p->n) return damaged(name, truncated, error);
    if (n != p->n)
        return text_fail(error, MOE_ERROR_FORMAT, name, "%.100s: %s%zu pieces do not match the model's %zu tokens",
                         name, n > p->n ? "at least " : "", n, p->n);
    p->eos = id_of(p, index, end);
    p->unk = id_of(p, index, unknown);
    if (p->eos < 0 || first < 0) return damaged(name, "</s> or the unknown piece is missing", error);
    if (p->unk < 0) p->names[p->unk = first] = unknown;
    return MOE_OK;
}

moe_status pieces_open_spm(const char *path, const char *beside, packed_file *file, moe_error *error) {
    const char *name = packed_base(path);
    char why[160];
    moe_status status = packed_open(path, SPM_MAX_MODEL, "a SentencePiece model", beside, file, error);
    if (status) return status;
    spm *tokeniser = spm_new(file->data ? (const char *)file->data : "", file->size, why, sizeof why);
    if (!tokeniser)
        status =
            text_fail(error, MOE_ERROR_FORMAT, name, "%.80s: not a SentencePiece model, or damaged: %s", name, why);
    spm_free(tokeniser);
    if (status) packed_close(file);
    return status;
}

/* The settings of a model, with SentencePiece's defaults. */
typedef struct spm_settings {
    uint64_t type, suffix, spaced, collapses, escapes;
    int rules;
} spm_settings;

/* Read the settings of training (message 2) or of the normaliser (3). Returns 0 if damaged. */
static int read_settings(const field *message, spm_settings *s) {
    fields f = { message->data, message->data + message->length };
    field part;
    int more;
    while ((more = take_field(&f, &part)) > 0) {
        const uint64_t value = part.data ? UINT64_MAX : part.value;
        if (message->number == 2 && part.number == 3) s->type = value;
        if (message->number == 2 && part.number == 24) s->suffix = value;
        if (message->number == 3 && part.number == 2) s->rules = !part.data || part.length;
        if (message->number == 3 && part.number == 3) s->spaced = value;
        if (message->number == 3 && part.number == 4) s->collapses = value;
        if (message->number == 3 && part.number == 5) s->escapes = value;
    }
    return more == 0;
}

/* Read all pieces, and the settings. */
static moe_status read_model(const void *data, size_t size, const char *name, pieces_bpe *p, spm_settings *s,
                             moe_error *error) {
    fields f = { data, (const uint8_t *)data + size };
    field message;
    int more, good = 1, whole = 0;
    while (good && (more = take_field(&f, &message)) > 0) {
        piece_of_bpe piece;
        whole |= message.number == NORMALISER && message.data;
        if (message.number < 1 || message.number > 3) continue;
        good = message.data && (message.number == 1 ? read_piece(&message, &piece) : read_settings(&message, s));
        if (!good || message.number != 1) continue;
        if (p->n == MAX_PIECES) return damaged(name, "too many pieces", error);
        const moe_status status = text_add(&p->all, &p->n, &p->capacity, &piece, 1, sizeof piece, error);
        if (status) return status;
    }
    if (!good || more < 0 || !p->n) return damaged(name, "not a SentencePiece model, or damaged", error);
    return whole ? MOE_OK : damaged(name, truncated, error);
}

moe_status pieces_list(const void *data, size_t size, const char *name, pieces_bpe *p, moe_error *error) {
    spm_settings s = { .type = 1 };
    *p = (pieces_bpe){ .n = 0 };
    const moe_status status = read_model(data, size, name, p, &s, error);
    if (status) pieces_free_bpe(p);
    return status;
}

static moe_status read_bpe(pieces_bpe *p, const char *name, moe_error *error) {
    static const char *const types[] = { "", "unigram", "bpe", "word", "char" };
    spm_settings s = { .type = 1, .spaced = 1, .collapses = 1, .escapes = 1 };
    const moe_status status = read_model(p->file.data, p->file.size, name, p, &s, error);
    if (status) return status;
    if (s.type != BPE)
        return text_fail(error, MOE_ERROR_FORMAT, name,
                         "%.100s: SentencePiece models of type %s are not supported for decoder-only models: expected "
                         "bpe",
                         name, s.type < sizeof types / sizeof *types ? types[s.type] : "unknown");
    for (size_t i = 0; i < p->n; i++) {
        const uint64_t kind = p->all[i].kind;
        if (kind < PIECE_NORMAL || kind > PIECE_BYTE || kind == PIECE_UNUSED || !isfinite(p->all[i].score))
            return text_fail(error, MOE_ERROR_FORMAT, name, "%.100s: the type or score of piece %zu is not supported",
                             name, i);
    }
    p->spaced = s.spaced != 0;
    return s.rules || s.collapses || !s.escapes || s.suffix
               ? damaged(name,
                         "this normaliser is not supported: expected identity, without removed or trailing spaces",
                         error)
               : MOE_OK;
}

moe_status pieces_read_bpe(const char *path, const char *beside, pieces_bpe *p, moe_error *error) {
    *p = (pieces_bpe){ .n = 0 };
    moe_status status = packed_open(path, SPM_MAX_MODEL, "a SentencePiece model", beside, &p->file, error);
    if (!status) status = read_bpe(p, packed_base(path), error);
    if (status) pieces_free_bpe(p);
    return status;
}

void pieces_free_bpe(pieces_bpe *p) {
    packed_close(&p->file);
    free(p->all);
    *p = (pieces_bpe){ .n = 0 };
}

/* ---- YAML ---- */

/* Return 1 if `piece` names the token `id`, 0 or 1, in Marian's or Nematus's vocabularies. */
static int is_special(int32_t id, moe_span piece) {
    static const char *const names[2][4] = { { "", "eos", "</s>", "</s>" }, { "", "UNK", "unk", "<unk>" } };
    for (size_t i = 0; i < 4; i++)
        if (text_is(piece.data, piece.length, names[id][i])) return 1;
    return 0;
}

/* Parse an id of up to nine digits. Returns -1 if it is not one. */
static int32_t parse_id(moe_span text) {
    int32_t id = 0;
    if (text.length < 1 || text.length > 9) return -1;
    for (size_t i = 0; i < text.length; i++) {
        if (text.data[i] < '0' || text.data[i] > '9') return -1;
        id = id * 10 + (text.data[i] - '0');
    }
    return id;
}

static moe_status read_map(pieces *p, const char *name, moe_error *error) {
    static const moe_span special[] = { { "</s>", 4 }, { "<unk>", 5 } };
    int32_t found[2] = { -1, -1 };
    unsigned char *seen = calloc(p->n + 1, 1);
    moe_status status = seen ? MOE_OK : text_out_of_memory(error);
    for (size_t i = 0; i < p->map.n && status == MOE_OK; i++) {
        const yaml_entry *e = &p->map.entries[i];
        const moe_span text = e->count ? p->map.texts[e->first] : (moe_span){ "[]", 2 };
        const int32_t id = e->list ? -1 : parse_id(text);
        moe_span piece = e->key;
        char word[64], key[64];
        if (id < 0 || (size_t)id >= p->n) {
            status = text_fail(error, MOE_ERROR_FORMAT, name, "%.60s: invalid id %s for %s: the model has %zu tokens",
                               name, yaml_short(text, word, sizeof word), yaml_short(piece, key, sizeof key), p->n);
        } else if (seen[id]) {
            status = text_fail(error, MOE_ERROR_FORMAT, name, "%.100s: duplicate id %d", name, (int)id);
        } else {
            seen[id] = 1;
            if (id < 2 && is_special(id, piece)) piece = special[id];
            for (int k = 0; k < 2; k++) {
                if (piece.length != special[k].length || memcmp(piece.data, special[k].data, piece.length) != 0)
                    continue;
                if (found[k] >= 0) p->names[found[k]] = (moe_span){ NULL, 0 };
                found[k] = id;
            }
            p->names[id] = piece;
        }
    }
    free(seen);
    for (int k = 0; k < 2 && status == MOE_OK; k++)
        if (found[k] < 0)
            status = text_fail(error, MOE_ERROR_FORMAT, name, "%.100s: %s is missing", name, special[k].data);
    p->eos = found[0];
    p->unk = found[1];
    return status;
}

/* ---- Vocabularies ---- */

moe_status pieces_read(const char *path, const char *name, size_t n, const char *beside, pieces *p, moe_error *error) {
    text_index index = { 0 };
    moe_status status;
    *p = (pieces){ .n = n };
    if (!(p->names = calloc(n + 1, sizeof *p->names))) return text_out_of_memory(error);
    if (pieces_is_spm(path)) {
        status = pieces_open_spm(path, beside, &p->file, error);
        if (status == MOE_OK) status = read_pieces(p, name, &index, error);
    } else if (!ends_in(path, ".json")) {
        status = packed_open(path, LARGEST_TEXT, "a vocabulary", beside, &p->file, error);
        if (status == MOE_OK) status = yaml_parse(&p->map, p->file.data, p->file.size, name, error);
        packed_close(&p->file);
        if (status == MOE_OK) status = read_map(p, name, error);
    } else {
        status = text_fail(error, MOE_ERROR_UNSUPPORTED, name, "%.80s: vocabularies in JSON have no reader in C", name);
    }
    text_index_free(&index);
    return status;
}

void pieces_free(pieces *p) {
    packed_close(&p->file);
    yaml_free(&p->map);
    free(p->names);
    *p = (pieces){ 0 };
}
