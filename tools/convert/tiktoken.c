/* tiktoken.c - see tiktoken.h */
#include "tools/convert/tiktoken.h"
#include "tools/convert/conf.h"
#include "tools/convert/packed.h"
#include "tools/text/bpe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_STEPS = 1 << 27 }; /* limit of the sum of squared token lengths */

typedef struct ranks {
    making *m;
    pack_parts *parts;
    moe_span *tokens; /* [n] by rank, as bytes */
    size_t n, capacity, steps;
    text_index index; /* of the tokens */
} ranks;

/* Decode base64; returns the number of bytes, 0 if invalid. */
static size_t decode(const char *text, size_t length, char *out) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t n = 0, padding = 0;
    uint32_t bits = 0;
    while (padding < 2 && padding < length && text[length - 1 - padding] == '=') padding++;
    if (length % 4) return 0;
    for (size_t i = 0; i < length; i++) {
        const char *digit = i < length - padding ? strchr(digits, text[i]) : digits;
        if (!digit || !*digit) return 0;
        bits = bits << 6 | (uint32_t)(digit - digits);
        for (int shift = 16; shift >= 0 && i % 4 == 3; shift -= 8) out[n++] = (char)(bits >> shift & 0xff);
    }
    return n - padding;
}

/* Return the rank of a token, or the number of tokens if there is none of these bytes. */
static size_t rank_of(const ranks *r, const char *data, size_t length) {
    size_t at = 0;
    for (uint32_t i, hash = text_hash(data, length);
         r->tokens && (i = text_index_next(&r->index, hash, &at)) != TEXT_NONE;)
        if (r->tokens[i].length == length && memcmp(r->tokens[i].data, data, length) == 0) return i;
    return r->n;
}

/* Read the line "BASE64 RANK" of the next token, whose bytes are written to `out`. The Python converter accepts ranks
 * in any order; the last line may be cut. */
static int read_line(ranks *r, const char *line, size_t length, int last, char *out) {
    const char *space = memchr(line, ' ', length), *end = line + length;
    const size_t first = space ? (size_t)(space - line) : 0;
    const moe_span token = { out, decode(line, first, out) };
    char rank[24];
    snprintf(rank, sizeof rank, "%zu", r->n);
    int whole = space && token.length && token.length <= BPE_MAX_PIECE && r->n < PACK_MAX_TOKENS && space + 1 < end;
    for (const char *p = space; whole && ++p < end;) whole = *p >= '0' && *p <= '9';
    const int in_order = whole && text_is(space + 1, (size_t)(end - space) - 1, rank);
    if (!whole || (last && !in_order))
        return making_refuse(r->m, r->parts->file,
                             "line %zu is not a base64 token of at most %d bytes followed by its rank, %s: damaged",
                             r->n + 1, BPE_MAX_PIECE, rank);
    if (!in_order) return making_unsupported(r->m, r->parts->file, "the rank in line %zu is not %s", r->n + 1, rank);
    r->steps += token.length * token.length;
    if (rank_of(r, out, token.length) < r->n)
        return making_refuse(r->m, r->parts->file, "line %zu contains a duplicate token", r->n + 1);
    return making_failed(r->m, text_add(&r->tokens, &r->n, &r->capacity, &token, 1, sizeof token, r->m->error)) &&
           (text_index_add(&r->index, text_hash(out, token.length), r->n - 1) || making_no_memory(r->m));
}

/* Return the length of the first of the two tokens that merge into the token `rank`, found by applying all merges of
 * lower rank to its bytes; 0 if these leave more tokens. */
static size_t left_of(const ranks *r, size_t rank) {
    const moe_span t = r->tokens[rank];
    size_t starts[BPE_MAX_PIECE + 1], n = t.length;
    for (size_t i = 0; i <= n; i++) starts[i] = i;
    for (; n > 2; n--) {
        size_t best = 0, lowest = r->n;
        for (size_t i = 0; i + 2 <= n; i++) {
            const size_t found = rank_of(r, t.data + starts[i], starts[i + 2] - starts[i]);
            if (found < lowest) lowest = found, best = i;
        }
        if (lowest >= rank) return 0;
        memmove(starts + best + 1, starts + best + 2, (n - best - 1) * sizeof *starts);
    }
    const int known =
        rank_of(r, t.data, starts[1]) < r->n && rank_of(r, t.data + starts[1], t.length - starts[1]) < r->n;
    return known ? starts[1] : 0;
}

/* Write bytes in GPT-2's alphabet; returns the end. */
static char *write_bytes(const char *bytes, size_t n, char *out) {
    for (size_t i = 0; i < n; i++) {
        const unsigned byte = (unsigned char)bytes[i], c = byte < 0x21                   ? 0x100 + byte
                                                           : byte > 0x7e && byte <= 0xa0 ? 0xa2 + byte
                                                           : byte == 0xad                ? 0x143
                                                                                         : byte;
        if (c >= 0x80) *out++ = (char)(0xc0 | c >> 6);
        *out++ = (char)(c < 0x80 ? c : 0x80 | (c & 63));
    }
    return out;
}

/* Set the tokens and merges. `out` has room for two bytes per byte of the tokens. */
static int put_tokens(ranks *r, char *out) {
    pack_parts *parts = r->parts;
    parts->tokens = making_keep(r->m, NULL, (r->n + 1) * sizeof *parts->tokens);
    parts->merges = making_keep(r->m, NULL, (r->n + 1) * sizeof *parts->merges);
    if (!parts->tokens || !parts->merges) return 0;
    for (size_t i = 0; r->tokens && i < r->n; i++) {
        const moe_span t = r->tokens[i];
        const size_t left = t.length > 1 ? left_of(r, i) : 0;
        char *begin = out, *middle = write_bytes(t.data, left, out);
        out = write_bytes(t.data + left, t.length - left, middle);
        if (t.length > 1 && !left)
            return making_refuse(r->m, parts->file, "merges of lower rank do not produce the token of line %zu", i + 1);
        parts->tokens[parts->n_tokens++] = (moe_span){ begin, (size_t)(out - begin) };
        if (left)
            parts->merges[parts->n_merges++] =
                (pack_merge){ { begin, (size_t)(middle - begin) }, { middle, (size_t)(out - middle) } };
    }
    return 1;
}

/* Add the special tokens of Tencent's tokenization_hy.py. */
static int put_specials(ranks *r) {
    static const char *const names[] = { "endoftext", "startoftext", "bos", "eos", "pad" };
    enum { NAMES = sizeof names / sizeof *names, EXTRAS = 205 };
    pack_parts *parts = r->parts;
    for (size_t i = 0; i < NAMES + EXTRAS; i++) {
        char text[32] = "";
        const int n = i < NAMES ? snprintf(text, sizeof text, "<|%s|>", names[i])
                                : snprintf(text, sizeof text, "<|extra_%zu|>", i - NAMES);
        const pack_added a = { (int64_t)(r->n + i), { making_keep(r->m, text, (size_t)n), (size_t)n }, .special = 1 };
        if (!a.content.data || !making_failed(r->m, text_add(&parts->added, &parts->n_added, &parts->added_capacity, &a,
                                                             1, sizeof a, r->m->error)))
            return 0;
    }
    return 1;
}

int tiktoken_read(making *m, const char *path, pack_parts *parts) {
    ranks r = { .m = m, .parts = parts };
    packed_file file = { 0 };
    int good = making_failed(m, packed_open(path, CONF_LARGEST, "a tiktoken file", m->out, &file, m->error));
    char *bytes = good ? making_keep(m, NULL, 3 * file.size + 1) : NULL, *out = bytes;
    good = bytes != NULL;
    for (size_t at = 0, length; at < file.size && good; at += length + 1) {
        const char *line = (const char *)file.data + at, *end = memchr(line, '\n', file.size - at);
        length = end ? (size_t)(end - line) : file.size - at;
        good = read_line(&r, line, length - (length && line[length - 1] == '\r'), !end, out);
        if (good && r.tokens) out += r.tokens[r.n - 1].length;
    }
    parts->flags = BPE_NFC;
    parts->expressions[parts->n_expressions++] = pack_expression("hy", 2);
    if (good && r.steps > MOST_STEPS) good = making_refuse(m, parts->file, "tokens are too long");
    good = good && put_tokens(&r, out) && put_specials(&r);
    packed_close(&file);
    text_index_free(&r.index);
    free(r.tokens);
    return good;
}
