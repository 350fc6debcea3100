/* unigram.c - see unigram.h. */
#include "tools/text/unigram.h"

#include <errno.h>
#include <float.h>
#include <stdlib.h>
#include <string.h>

#define SPACE "\xE2\x96\x81" /* U+2581 */
#define REPLACEMENT "\xEF\xBF\xBD"

/* The trie of all pieces is a hash table of edges with linear probing. A model that needs more than MOST_PROBES for an
 * edge, made on purpose, is left to SentencePiece; building therefore takes time proportional to the bytes of the
 * pieces. */
enum { MOST_NODES = 1 << 24, MOST_PROBES = 512 };

struct unigram {
    char *texts;      /* of all pieces, each with a NUL */
    uint32_t *starts; /* [n + 1] in texts */
    float *scores;    /* [n] */
    uint8_t *kinds;   /* [n] unigram_kind */
    int32_t n, unknown;
    int32_t bytes[256]; /* ids of byte pieces, or -1 */

    uint64_t *edges; /* [1 << bits] parent node << 32 | byte << 24 | child node; 0: free. Node 0 is the root */
    unsigned bits;
    int32_t *ids; /* [max_nodes] the id of the piece that ends at a node, or -1 */
    size_t n_nodes, max_nodes;
    uint8_t begins_symbol[256]; /* 1: a user-defined piece begins with this byte */

    uint32_t *map; /* [n_units] double array of the normaliser, or NULL */
    char *replacements;
    char *unknown_text;
    size_t unknown_bytes;
    int prefix, collapse, escape, fallback;
    float unknown_score, best_score;
};

/* ---- 1. The trie ---------------------------------------------------------------------------------------- */

/* Return the slot where the search for an edge begins. */
static size_t first_slot(const unigram *u, uint64_t key) {
    return (size_t)((key * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - u->bits));
}

/* Return the slot of an edge, or the free slot where it belongs. Set *probes to the slots read. */
static size_t find_slot(const unigram *u, uint64_t key, unsigned *probes) {
    const size_t mask = ((size_t)1 << u->bits) - 1;
    size_t slot = first_slot(u, key);
    for (*probes = 1; u->edges[slot] && u->edges[slot] >> 24 != key; ++*probes) slot = (slot + 1) & mask;
    return slot;
}

/* Return the child of a node for a byte, or 0. */
static uint32_t child_of(const unigram *u, uint32_t node, char byte) {
    unsigned probes;
    return (uint32_t)u->edges[find_slot(u, (uint64_t)node << 8 | (unsigned char)byte, &probes)] & 0xFFFFFF;
}

/* Double the table of edges, which must be at most half full, and the array of nodes. Return 0 if out of memory. */
static int grow_trie(unigram *u) {
    const size_t size = u->edges ? (size_t)1 << u->bits : 0;
    uint64_t *old = u->edges;
    uint64_t *edges = calloc((size_t)2 << u->bits, sizeof *edges);
    int32_t *ids = realloc(u->ids, ((size_t)1 << u->bits) * sizeof *ids);
    unsigned probes;
    if (ids) u->ids = ids;
    if (!edges || !ids) {
        free(edges);
        return 0;
    }
    u->edges = edges;
    u->max_nodes = (size_t)1 << u->bits++;
    for (size_t i = 0; i < size; i++)
        if (old[i]) edges[find_slot(u, old[i] >> 24, &probes)] = old[i];
    free(old);
    return 1;
}

/* Add a piece. Return 0 with errno if out of memory, or if the piece exists or the trie is too large or too slow. */
static int add_piece(unigram *u, const unigram_piece *piece, int32_t id) {
    uint32_t node = 0;
    for (size_t i = 0; i < piece->length; i++) {
        unsigned probes;
        const uint64_t key = (uint64_t)node << 8 | (unsigned char)piece->text[i];
        size_t slot = find_slot(u, key, &probes);
        if (!u->edges[slot]) {
            if (u->n_nodes == u->max_nodes) {
                if (!grow_trie(u)) return errno = ENOMEM, 0;
                slot = find_slot(u, key, &probes);
            }
            u->ids[u->n_nodes] = -1;
            u->edges[slot] = key << 24 | u->n_nodes++;
        }
        if (probes > MOST_PROBES || u->n_nodes > MOST_NODES) return errno = EINVAL, 0;
        node = (uint32_t)u->edges[slot] & 0xFFFFFF;
    }
    if (u->ids[node] >= 0) return errno = EINVAL, 0;
    u->ids[node] = id;
    return 1;
}

/* ---- 2. Creating and freeing ---------------------------------------------------------------------------- */

/* Return the byte of a piece spelled <0xHH>. */
static unsigned byte_of(const unigram_piece *piece) { return (unsigned)strtoul(piece->text + 3, NULL, 16) & 255; }

/* Copy the pieces. Return 0 with errno. */
static int copy_pieces(unigram *u, const unigram_model *m) {
    float least = FLT_MAX, most = FLT_MIN; /* as in SentencePiece */
    char *to = u->texts;
    int found = 0; /* 1: texts can contain one of the pieces */
    for (size_t i = 0; i < m->n_pieces; i++) {
        const unigram_piece *piece = &m->pieces[i];
        if (piece->kind < UNIGRAM_NORMAL || piece->kind > UNIGRAM_BYTE) return errno = EINVAL, 0;
        if (!add_piece(u, piece, (int32_t)i)) return 0;
        u->starts[i] = (uint32_t)(to - u->texts);
        memcpy(to, piece->text, piece->length);
        to += piece->length;
        *to++ = '\0';
        u->scores[i] = piece->score;
        u->kinds[i] = (uint8_t)piece->kind;
        found |= piece->kind == UNIGRAM_NORMAL || piece->kind == UNIGRAM_USER_DEFINED || piece->kind == UNIGRAM_UNUSED;
        switch (piece->kind) {
        case UNIGRAM_NORMAL:
            if (piece->score < least) least = piece->score;
            if (piece->score > most) most = piece->score;
            break;
        case UNIGRAM_UNKNOWN:
            if (u->unknown >= 0) return errno = EINVAL, 0;
            u->unknown = (int32_t)i;
            break;
        case UNIGRAM_USER_DEFINED: u->begins_symbol[(unsigned char)piece->text[0]] = 1; break;
        case UNIGRAM_BYTE: u->bytes[byte_of(piece)] = (int32_t)i; break;
        default: break;
        }
    }
    u->starts[m->n_pieces] = (uint32_t)(to - u->texts);
    u->unknown_score = least - 10.0f;
    u->best_score = most;
    for (unsigned i = 0; i < 256; i++)
        if ((u->bytes[i] >= 0) != (u->fallback != 0)) return errno = EINVAL, 0;
    return found && u->unknown >= 0 ? 1 : (errno = EINVAL, 0);
}

/* Copy the character map: the bytes of a trie (32 bits), the trie, the replacements. */
static int copy_map(unigram *u, const unigram_model *m) {
    uint32_t bytes;
    if (!m->map_bytes) return 1;
    memcpy(&bytes, m->map, sizeof bytes);
    u->map = malloc(bytes);
    u->replacements = text_copy(m->map + 4 + bytes, m->map_bytes - 4 - bytes);
    if (!u->map || !u->replacements) return errno = ENOMEM, 0;
    memcpy(u->map, m->map + 4, bytes);
    return 1;
}

unigram *unigram_new(const unigram_model *m) {
    size_t bytes = 1;
    unigram *u = calloc(1, sizeof *u);
    if (!u) return errno = ENOMEM, NULL;
    u->n = (int32_t)m->n_pieces;
    u->unknown = -1;
    memset(u->bytes, 0xFF, sizeof u->bytes);
    u->prefix = m->prefix;
    u->collapse = m->collapse;
    u->escape = m->escape;
    u->fallback = m->fallback;
    for (size_t i = 0; i < m->n_pieces; i++) bytes += m->pieces[i].length + 1;
    u->texts = malloc(bytes);
    u->starts = malloc((m->n_pieces + 1) * sizeof *u->starts);
    u->scores = malloc((m->n_pieces + 1) * sizeof *u->scores);
    u->kinds = malloc(m->n_pieces + 1);
    u->unknown_text = text_copy(m->unknown, m->unknown_bytes);
    u->unknown_bytes = m->unknown_bytes;
    for (u->bits = 8; (size_t)2 << u->bits < 4 * m->n_pieces;) u->bits++;
    errno = ENOMEM;
    if (u->texts && u->starts && u->scores && u->kinds && u->unknown_text && grow_trie(u)) {
        u->n_nodes = 1;
        u->ids[0] = -1;
        if (copy_map(u, m) && copy_pieces(u, m)) return u;
    }
    const int code = errno;
    unigram_free(u);
    return errno = code, NULL;
}

void unigram_free(unigram *u) {
    if (!u) return;
    free(u->texts);
    free(u->starts);
    free(u->scores);
    free(u->kinds);
    free(u->edges);
    free(u->ids);
    free(u->map);
    free(u->replacements);
    free(u->unknown_text);
    free(u);
}

int32_t unigram_size(const unigram *u) { return u->n; }
int32_t unigram_unknown(const unigram *u) { return u->unknown; }
unigram_kind unigram_kind_of(const unigram *u, int32_t id) { return (unigram_kind)u->kinds[id]; }

const char *unigram_text(const unigram *u, int32_t id, size_t *length) {
    *length = u->starts[id + 1] - u->starts[id] - 1;
    return u->texts + u->starts[id];
}

int32_t unigram_id(const unigram *u, const char *piece, size_t length) {
    uint32_t node = 0;
    for (size_t i = 0; i < length; i++)
        if (!(node = child_of(u, node, piece[i]))) return -1;
    return u->ids[node];
}

/* ---- 3. Normalisation ----------------------------------------------------------------------------------- */

/* A normalised text, and for each of its bytes the offset of its character in the original text. */
typedef struct normal {
    text_bytes text;
    text_offsets from;
    int traced; /* 1: fill `from` */
} normal;

static void put(normal *to, const char *data, size_t length, size_t from) {
    text_append(&to->text, data, length);
    if (!to->traced || to->text.failed) return;
    uint32_t *grown = text_grown(to->from.data, &to->from.capacity, to->text.length, sizeof *grown);
    if (!grown) {
        to->text.failed = 1;
        return;
    }
    to->from.data = grown;
    while (to->from.length < to->text.length) grown[to->from.length++] = (uint32_t)from;
}

static void put_space(const unigram *u, normal *to, size_t from) {
    put(to, u->escape ? SPACE : " ", u->escape ? sizeof SPACE - 1 : 1, from);
}

/* Return the length of the longest user-defined piece at the beginning of a text, or 0. */
static size_t symbol_at(const unigram *u, const char *text, size_t length) {
    size_t found = 0;
    if (!u->begins_symbol[(unsigned char)text[0]]) return 0;
    for (size_t i = 0, node = 0; i < length && (node = child_of(u, (uint32_t)node, text[i])); i++)
        if (u->ids[node] >= 0 && u->kinds[u->ids[node]] == UNIGRAM_USER_DEFINED) found = i + 1;
    return found;
}

/* The child of unit i for byte c is unit (i ^ offset(i) ^ c) of the map, if its label is c. Child 0 of a unit with the
 * leaf bit contains its value, an offset in the replacements. */
static uint32_t unit_offset(uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); }

/* Return the length of the longest rule at the beginning of a text, or 0; set *value to its replacement. */
static size_t rule_at(const unigram *u, const char *text, size_t length, uint32_t *value) {
    size_t found = 0;
    if (!u->map) return 0;
    uint32_t node = unit_offset(u->map[0]);
    for (size_t i = 0; i < length; i++) {
        node ^= (unsigned char)text[i];
        const uint32_t unit = u->map[node];
        if ((unit & 0x800000FFu) != (unsigned char)text[i]) break;
        node ^= unit_offset(unit);
        if (!(unit >> 8 & 1)) continue;
        *value = u->map[node] & 0x7FFFFFFFu;
        found = i + 1;
    }
    return found;
}

/* Return the number of bytes at the beginning of a text that have a replacement; set *to and *bytes to it. */
static size_t replaced(const unigram *u, const char *text, size_t length, const char **to, size_t *bytes) {
    uint32_t value = 0;
    size_t n = symbol_at(u, text, length);
    *to = text;
    if (!n && (n = rule_at(u, text, length, &value))) {
        *to = u->replacements + value;
        *bytes = strlen(*to);
        return n;
    }
    if (!n) {
        unsigned char low, high;
        const int more = text_utf8_lead((unsigned char)text[0], &low, &high);
        if (more < 0 || text_utf8_valid(text, (size_t)more < length ? (size_t)more + 1 : length) != (size_t)more + 1) {
            *to = REPLACEMENT;
            *bytes = sizeof REPLACEMENT - 1;
            return 1;
        }
        n = (size_t)more + 1;
    }
    return *bytes = n;
}

/* Normalise a text to *out, which is empty. */
static void normalise(const unigram *u, const char *text, size_t length, normal *out) {
    const char *to;
    size_t at = 0, n, bytes;
    while (u->collapse && at < length) {
        n = replaced(u, text + at, length - at, &to, &bytes);
        if (bytes != 1 || *to != ' ') break;
        at += n;
    }
    if (at == length) return;
    if (u->prefix) put_space(u, out, at);
    for (int after_space = u->collapse; at < length; at += n) {
        n = replaced(u, text + at, length - at, &to, &bytes);
        for (; after_space && bytes && *to == ' '; bytes--) to++;
        if (!bytes) continue;
        for (size_t i = 0, end; i < bytes; i = end) {
            for (end = i; end < bytes && to[end] != ' ';) end++;
            if (end > i) put(out, to + i, end - i, at);
            else put_space(u, out, at), end++;
        }
        after_space = u->collapse && to[bytes - 1] == ' ';
    }
    const char *space = u->escape ? SPACE : " ";
    const size_t width = strlen(space);
    while (u->collapse && out->text.length >= width &&
           memcmp(out->text.data + out->text.length - width, space, width) == 0)
        out->text.length -= width;
}

/* ---- 4. Segmentation ------------------------------------------------------------------------------------ */

/* The last token of the best segmentation of a beginning of the text. */
typedef struct path {
    float score;
    uint32_t begin; /* UINT32_MAX: no segmentation yet */
    int32_t id;
    uint32_t next; /* on the best path: the end of the token that begins here */
} path;

/* Find the best segmentation of a text, the first one if scores are equal. The precision of sums is SentencePiece's,
 * where a score that is not yet stored is a double. */
static void find_paths(const unigram *u, const char *text, size_t n, path *paths) {
    for (size_t i = 0; i <= n; i++) paths[i] = (path){ .begin = UINT32_MAX };
    for (size_t begin = 0, width; begin < n; begin += width) {
        const double so_far = (double)paths[begin].score;
        static const char widths[] = "\1\1\1\1\1\1\1\1\1\1\1\1\2\2\3\4";
        int covered = 0; /* 1: a piece covers the first character */
        uint32_t node = 0;
        width = (size_t)widths[(unsigned char)text[begin] >> 4];
        if (width > n - begin) width = n - begin;
        for (size_t end = begin; end < n && (node = child_of(u, node, text[end]));) {
            const int32_t id = u->ids[node];
            end++;
            if (id < 0 || (u->kinds[id] != UNIGRAM_NORMAL && u->kinds[id] != UNIGRAM_USER_DEFINED)) continue;
            const double score = u->kinds[id] == UNIGRAM_NORMAL ? (double)u->scores[id]
                                                                : (double)((float)(end - begin) * u->best_score) - 0.1;
            path *to = &paths[end];
            if (to->begin == UINT32_MAX || score + so_far > (double)to->score)
                *to = (path){ .score = (float)(score + so_far), .begin = (uint32_t)begin, .id = id };
            covered |= end - begin == width;
        }
        const float unknown = u->unknown_score + paths[begin].score;
        path *to = &paths[begin + width];
        if (!covered && (to->begin == UINT32_MAX || unknown > to->score))
            *to = (path){ .score = unknown, .begin = (uint32_t)begin, .id = u->unknown };
    }
    for (uint32_t end = (uint32_t)n; end > 0; end = paths[end].begin) paths[paths[end].begin].next = end;
}

/* Add a token with the text piece[length], which begins at offset `from`. Return 0 if out of memory. */
static int give(const unigram_tokens *out, size_t *n, int32_t id, const char *piece, size_t length, uint32_t from) {
    if (out->ids) {
        int32_t *ids = text_grown(out->ids->data, &out->ids->capacity, *n + 1, sizeof *ids);
        if (!ids) return 0;
        (out->ids->data = ids)[(*n)] = id;
    }
    if (out->begins) {
        uint32_t *begins = text_grown(out->begins->data, &out->begins->capacity, *n + 1, sizeof *begins);
        if (!begins) return 0;
        (out->begins->data = begins)[(*n)] = from;
    }
    if (out->pieces) text_append(out->pieces, piece, length), text_append(out->pieces, "", 1);
    ++*n;
    return !out->pieces || !out->pieces->failed;
}

/* Add the tokens of a segmentation. Adjacent unknown characters are one token. Return 0 if out of memory. */
static int give_all(const unigram *u, const normal *text, const path *paths, const unigram_tokens *out, size_t *count) {
    const char *data = text->text.data;
    for (size_t begin = 0, n = text->text.length, end; begin < n; begin = end) {
        const uint32_t from = text->traced ? text->from.data[begin] : 0;
        end = paths[begin].next;
        const int32_t id = paths[end].id;
        if (id != u->unknown || !u->fallback) {
            while (id == u->unknown && end < n && paths[paths[end].next].id == id) end = paths[end].next;
            if (!give(out, count, id, data + begin, end - begin, from)) return 0;
            continue;
        }
        for (size_t i = begin; i < end; i++) {
            size_t length;
            const int32_t byte = u->bytes[(unsigned char)data[i]];
            const char *piece = unigram_text(u, byte, &length);
            if (!give(out, count, byte, piece, length, from)) return 0;
        }
    }
    return 1;
}

int unigram_encode(const unigram *u, const char *text, size_t length, const unigram_tokens *out) {
    normal normalised = { .traced = out->begins != NULL };
    size_t count = 0;
    if (out->pieces) text_clear(out->pieces);
    normalise(u, text, length, &normalised);
    const size_t n = normalised.text.length;
    path *paths = normalised.text.failed ? NULL : malloc((n + 1) * sizeof *paths);
    int made = paths != NULL;
    if (made && n) {
        find_paths(u, normalised.text.data, n, paths);
        made = give_all(u, &normalised, paths, out, &count);
    }
    if (out->ids) out->ids->length = made ? count : 0;
    if (out->begins) out->begins->length = made ? count : 0;
    free(paths);
    text_bytes_free(&normalised.text);
    free(normalised.from.data);
    return made;
}

/* ---- 5. Decoding ---------------------------------------------------------------------------------------- */

/* Append the bytes of tokens from `first` on; each byte outside valid UTF-8 becomes U+FFFD. All bytes of a character
 * begin where it begins. */
static void put_bytes(const text_bytes *bytes, size_t first, text_bytes *text, uint32_t *begins) {
    for (size_t i = 0, n; i < bytes->length; i += n) {
        unsigned char low, high;
        const int more = text_utf8_lead((unsigned char)bytes->data[i], &low, &high);
        const size_t left = bytes->length - i;
        n = (size_t)(more < 0 ? 0 : more) + 1;
        const int valid = more >= 0 && n <= left && text_utf8_valid(bytes->data + i, n) == n;
        if (!valid) n = 1;
        for (size_t j = 0; begins && j < n; j++) begins[first + i + j] = (uint32_t)text->length;
        text_append(text, valid ? bytes->data + i : REPLACEMENT, valid ? n : sizeof REPLACEMENT - 1);
    }
}

/* Append a piece, with spaces for U+2581. */
static void put_piece(const char *piece, size_t length, text_bytes *text) {
    static const char space[] = SPACE;
    for (size_t i = 0, end; i < length; i = end) {
        const size_t width = sizeof space - 1;
        for (end = i; end < length && (length - end < width || memcmp(piece + end, space, width) != 0);) end++;
        text_append(text, piece + i, end - i);
        if (end < length) text_append(text, " ", 1), end += width;
    }
}

int unigram_decode(const unigram *u, const int32_t *ids, const char *pieces, size_t n, text_bytes *text,
                   text_offsets *begins) {
    text_bytes run = { 0 };   /* the byte tokens before token i */
    int first = 1, found = 0; /* 1: drop a space at the beginning; 1: the last token had one */
    text_clear(text);
    text_append(text, "", 0); /* the final NUL of an empty text */
    if (begins) {
        uint32_t *grown = text_grown(begins->data, &begins->capacity, n, sizeof *grown);
        begins->length = 0;
        if (!grown) return 0;
        begins->data = grown;
        begins->length = n;
    }
    uint32_t *offsets = begins ? begins->data : NULL;
    for (size_t i = 0; i < n && !text->failed && !run.failed; i++) {
        size_t length = pieces ? strlen(pieces) : 0;
        const char *piece = pieces;
        const int32_t known = pieces ? unigram_id(u, pieces, length) : ids[i], id = known < 0 ? u->unknown : known;
        const unigram_kind kind = (unigram_kind)u->kinds[id];
        if (pieces) pieces += length + 1;
        else piece = unigram_text(u, id, &length);
        if (kind == UNIGRAM_BYTE) {
            const char byte = (char)strtoul(piece + 3, NULL, 16);
            text_append(&run, &byte, 1);
            continue;
        }
        put_bytes(&run, i - run.length, text, offsets);
        text_clear(&run);
        if (found || text->length) first = 0;
        found = 0;
        if (offsets) offsets[i] = (uint32_t)text->length;
        if (kind == UNIGRAM_CONTROL) continue;
        if (kind == UNIGRAM_UNKNOWN) {
            if (known >= 0) text_append(text, u->unknown_text, u->unknown_bytes);
            else text_append(text, piece, length);
            continue;
        }
        if (first && (u->prefix || u->collapse) && text_begins_with(piece, length, SPACE)) {
            piece += sizeof SPACE - 1;
            length -= sizeof SPACE - 1;
            found = !u->collapse;
        }
        put_piece(piece, length, text);
    }
    put_bytes(&run, n - run.length, text, offsets);
    const int made = !text->failed && !run.failed;
    text_bytes_free(&run);
    return made;
}
