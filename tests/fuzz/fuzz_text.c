/* fuzz_text.c - fuzzes SentencePiece models, alone and in model files with vocabularies and id maps. The input is a
 * SentencePiece .model file; texts and metadata are derived from its bytes.
 *
 * Checks: errors have a one-line message; ids are in range; encoded texts can be decoded; unigram.c computes what
 * SentencePiece computes; output contains neither line breaks nor TABs; each line that cannot be prepared has a note.
 */
#define _GNU_SOURCE

#include "moe.h"
#include "tools/text/open.h"
#include "tools/text/spm.h"
#include "tools/text/strategy.h"

#include "tests/engine/model_writer.h"
#include "tests/fuzz/fuzz.h"

enum { MOST_TOKENS = 4000, DEEPEST = 3 };

/* ---- Mutation of protocol buffers by field ---- */

typedef struct field {
    size_t at, body, end; /* offsets: start of the key, start and end of the contents */
    unsigned wire;
} field;

/* Read the number at *at and advance *at, to `size` if the number is incomplete. Return the number. */
static uint64_t varint(const uint8_t *data, size_t size, size_t *at) {
    uint64_t v = 0;
    for (unsigned shift = 0; *at < size && shift < 64; shift += 7) {
        const uint8_t byte = data[(*at)++];
        v |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) return v;
    }
    *at = size;
    return 0;
}

/* Find the fields of a message. Return the number of fields, or 0 if the message is invalid. */
static size_t split(const uint8_t *data, size_t size, field *fields, size_t most) {
    size_t n = 0;
    for (size_t at = 0; at < size && n < most; n++) {
        field *f = &fields[n];
        f->at = at;
        f->wire = (unsigned)(varint(data, size, &at) & 7);
        f->body = at;
        if (f->wire == 0) varint(data, size, &at);
        else if (f->wire == 1) at += 8;
        else if (f->wire == 5) at += 4;
        else if (f->wire == 2) {
            const uint64_t length = varint(data, size, &at);
            f->body = at;
            if (length > size - at) return 0;
            at += (size_t)length;
        } else return 0;
        if (at > size) return 0;
        f->end = at;
    }
    return n;
}

static size_t put_varint(uint8_t *out, uint64_t v) {
    size_t n = 0;
    for (; v > 127; v >>= 7) out[n++] = (uint8_t)(v | 128);
    out[n++] = (uint8_t)v;
    return n;
}

/* Write a random piece (field 1 of the model): text, score, type. */
static size_t some_piece(uint8_t *out, uint64_t *r) {
    static const char *const texts[] = { "a",
                                         "\xE2\x96\x81",
                                         ("\xE2\x96\x81"
                                          "ab"),
                                         "<0x41>",
                                         "<0xff>",
                                         "<unk>",
                                         "</s>",
                                         "b\xC3\xA9",
                                         "\xFF",
                                         "aaaaaaaaaaaaaaaa",
                                         "" };
    const char *text = texts[fuzz_below(r, sizeof texts / sizeof *texts)];
    uint8_t body[80];
    size_t n = 0, length = strlen(text);
    const float score = fuzz_one_in(r, 8) ? 1e38f : -(float)fuzz_below(r, 20);
    body[n++] = 0x0a;
    body[n++] = (uint8_t)length;
    memcpy(body + n, text, length), n += length;
    body[n++] = 0x15;
    memcpy(body + n, &score, 4), n += 4;
    if (fuzz_one_in(r, 2)) body[n++] = 0x18, body[n++] = (uint8_t)fuzz_below(r, 8);
    out[0] = 0x0a;
    out[1] = (uint8_t)n;
    memcpy(out + 2, body, n);
    return n + 2;
}

static size_t mutate_message(uint8_t *data, size_t size, size_t most, int depth, uint64_t *r);

/* Mutate the contents of a length-delimited field, as a message or as bytes. Return the new size of `data`. */
static size_t mutate_body(uint8_t *data, size_t size, size_t most, const field *f, int depth, uint64_t *r) {
    const size_t length = f->end - f->body, room = length + 64;
    uint8_t *body = malloc(room + 16), head[16];
    field inner[4];
    size_t n, key = f->at;
    if (!body) abort();
    memcpy(body, data + f->body, length);
    if (depth < DEEPEST && split(body, length, inner, 4) && fuzz_below(r, 4))
        n = mutate_message(body, length, room, depth + 1, r);
    else n = LLVMFuzzerMutate(body, length, room);
    varint(data, size, &key); /* skip the key */
    const size_t head_bytes = put_varint(head, n);
    if (size - (f->end - key) + head_bytes + n <= most) {
        size = fuzz_splice(data, size, most, key, f->end, body, n);
        size = fuzz_splice(data, size, most, key, key, head, head_bytes);
    }
    free(body);
    return size;
}

static size_t mutate_message(uint8_t *data, size_t size, size_t most, int depth, uint64_t *r) {
    static field fields[DEEPEST + 1][1024];
    const size_t n = split(data, size, fields[depth], 1024);
    const field *f = &fields[depth][fuzz_below(r, n)], *g = &fields[depth][fuzz_below(r, n)];
    uint8_t copy[256];
    size_t bytes;
    if (!n) return LLVMFuzzerMutate(data, size, most);
    switch (fuzz_below(r, 8)) {
    case 0: return fuzz_splice(data, size, most, f->at, f->end, NULL, 0);
    case 1:
    case 2:
        bytes = g->end - g->at;
        if (bytes > sizeof copy) break;
        memcpy(copy, data + g->at, bytes);
        return fuzz_splice(data, size, most, f->at, fuzz_one_in(r, 2) ? f->end : f->at, copy, bytes);
    case 3:
        if (depth) break;
        bytes = some_piece(copy, r);
        return fuzz_splice(data, size, most, f->at, f->at, copy, bytes);
    default: break;
    }
    if (f->wire == 2) return mutate_body(data, size, most, f, depth, r);
    if (f->wire == 0) {
        bytes = put_varint(copy, fuzz_one_in(r, 3) ? fuzz_next(r) : fuzz_below(r, 300));
        return fuzz_splice(data, size, most, f->body, f->end, copy, bytes);
    }
    LLVMFuzzerMutate(data + f->body, f->end - f->body, f->end - f->body);
    return size;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    uint64_t r = seed;
    if (fuzz_one_in(&r, 20)) return LLVMFuzzerMutate(data, size, max_size);
    for (size_t n = 1 + fuzz_below(&r, 3); n; n--) size = mutate_message(data, size, max_size, 0, &r);
    return size;
}

/* ---- Texts ---- */

/* Write random text made of words in several scripts and pieces of the input. Return its length. */
static size_t some_text(const uint8_t *data, size_t size, uint64_t *r, char *out, size_t most) {
    static const char *const words[] = { "where",        " ",   "Bahnhof",      "caf\xC3\xA9",
                                         "\xE2\x96\x81", "ABC", "\xEF\xBC\xA1", "\xF0\x9F\x98\x80",
                                         "<ab>",         "\t",  "1999",         "\xCC\x81",
                                         "aaaa" };
    return fuzz_text(words, sizeof words / sizeof *words, 12, data, size, r, out, most);
}

static void check_line(const char *why) { FUZZ_CHECK(why[0] && !strchr(why, '\n'), "failed without a valid message"); }

/* ---- The tokeniser itself ---- */

static void use_tokeniser(const spm *t, const uint8_t *data, size_t size, uint64_t *r) {
    const int32_t n_pieces = spm_size(t), odd[] = { -1, 0, 1, n_pieces - 1, n_pieces, INT32_MAX, INT32_MIN };
    char text[256], why[200] = "";
    text_bytes pieces = { 0 }, back = { 0 };
    text_ids ids = { 0 };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        const int32_t id = odd[i];
        const char *piece = spm_piece(t, id);
        FUZZ_CHECK((id >= 0 && id < n_pieces) || (!piece[0] && !spm_is_unknown(t, id) && !spm_is_control(t, id)),
                   "out-of-range id %d of %d has properties", (int)id, (int)n_pieces);
        FUZZ_CHECK(spm_id(t, piece) < n_pieces, "the id of a piece is too large");
        if (spm_decode(t, &id, 1, &back, why, sizeof why)) check_line(why);
        else
            FUZZ_CHECK(id >= 0 && id < n_pieces && strlen(back.data) <= back.length, "id %d of %d was decoded", (int)id,
                       (int)n_pieces);
    }
    for (int round = 0; round < 6; round++) {
        const size_t n = some_text(data, size, r, text, sizeof text);
        if (spm_encode(t, text, n, &ids, why, sizeof why)) {
            check_line(why);
            continue;
        }
        for (size_t i = 0; i < ids.length; i++)
            FUZZ_CHECK(ids.data[i] >= 0 && ids.data[i] < n_pieces, "id %d of %d", (int)ids.data[i], (int)n_pieces);
        FUZZ_CHECK(spm_decode(t, ids.data, ids.length, &back, why, sizeof why) == 0, "cannot decode: %s", why);
        FUZZ_CHECK(spm_encode_pieces(t, text, n, &pieces, why, sizeof why) == 0, "cannot encode as pieces: %s", why);
        FUZZ_CHECK(spm_decode_pieces(t, pieces.data, pieces.length, &back, why, sizeof why) == 0,
                   "cannot decode pieces: %s", why);
    }
    FUZZ_CHECK(spm_unk(t) < n_pieces, "the unknown id is too large");
    free(ids.data), text_bytes_free(&pieces), text_bytes_free(&back);
}

static int same_bytes(const text_bytes *a, const text_bytes *b) {
    return a->length == b->length && (!a->length || memcmp(a->data, b->data, a->length) == 0);
}

/* Compare unigram.c with SentencePiece. */
static void compare_with_library(const spm *t, const uint8_t *data, size_t size, uint64_t *r) {
    char text[256], why[200] = "";
    text_bytes pieces = { 0 }, wanted = { 0 }, back = { 0 };
    spm *library = spm_new_by_library(data, size, why, sizeof why);
    FUZZ_CHECK(library, "SentencePiece rejects a tokeniser that was accepted: %s", why);
    for (int round = 0; round < 6; round++) {
        const size_t n = some_text(data, size, r, text, sizeof text);
        const int failed = spm_encode_pieces(t, text, n, &pieces, why, sizeof why);
        FUZZ_CHECK(failed == spm_encode_pieces(library, text, n, &wanted, why, sizeof why), "%s", why);
        FUZZ_CHECK(same_bytes(&pieces, &wanted), "pieces differ from SentencePiece's");
        if (failed) continue;
        spm_decode_pieces(t, pieces.data ? pieces.data : "", pieces.length, &back, why, sizeof why);
        spm_decode_pieces(library, pieces.data ? pieces.data : "", pieces.length, &wanted, why, sizeof why);
        FUZZ_CHECK(same_bytes(&back, &wanted), "decoded texts differ from SentencePiece's");
    }
    text_bytes_free(&pieces), text_bytes_free(&wanted), text_bytes_free(&back);
    spm_free(library);
}

/* ---- In a model file ---- */

/* Return a minimal language model that has the tokeniser and random vocabularies and ids. */
static mw_image wrap(const uint8_t *data, size_t size, int32_t n_pieces, uint64_t *r) {
    mw_model *m = mw_zeros(sizeof *m);
    const size_t vocabulary = n_pieces > 1 && n_pieces < MOST_TOKENS ? (size_t)n_pieces + fuzz_below(r, 3) : 8;
    mw_image image;
    m->random = fuzz_next(r);
    mw_text(m, "general.architecture", "moe-lm");
    mw_int(m, "vocab.size", (int64_t)vocabulary);
    mw_int(m, "model.width", 1);
    mw_int(m, "token.bos", 0);
    mw_int(m, "token.eos", 1);
    mw_int(m, "decoder.layers", 1);
    mw_lstm(m, "decoder.0.", 1, 1, 0, 0);
    mw_random_matrix(m, "embedding.weight", MW_F32, vocabulary, 1, 1);
    if (fuzz_below(r, 8)) mw_text(m, "tokenizer.kind", "sentencepiece");
    if (fuzz_below(r, 8)) mw_blob(m, "tokenizer.model", MW_BYTES, data, size);
    if (fuzz_one_in(r, 6))
        mw_blob(m, "tokenizer.target_model", fuzz_one_in(r, 8) ? MW_TEXT : MW_BYTES, data,
                size - size / 2 * (size_t)fuzz_one_in(r, 2));
    if (fuzz_one_in(r, 2)) mw_int(m, "token.unk", (int64_t)fuzz_below(r, vocabulary + 1) - 1);
    if (fuzz_one_in(r, 2)) mw_int(m, "token.pad", 2);
    if (fuzz_one_in(r, 3)) {
        char (*words)[16] = mw_zeros(vocabulary * sizeof *words);
        const char **list = mw_zeros(vocabulary * sizeof *list);
        for (size_t i = 0; i < vocabulary; i++) {
            const size_t n = some_text(data, size, r, words[i], 12), keep = text_utf8_valid(words[i], n);
            words[i][keep] = 0;
            list[i] = words[i];
        }
        mw_texts(m, "vocabulary.pieces", list, fuzz_one_in(r, 8) ? vocabulary - 1 : vocabulary);
        free(words), free(list);
    }
    if (fuzz_one_in(r, 3)) {
        const size_t n = n_pieces > 0 && n_pieces < MOST_TOKENS ? (size_t)n_pieces : 3;
        int64_t *ids = mw_zeros(n * sizeof *ids);
        for (size_t i = 0; i < n; i++) ids[i] = (int64_t)fuzz_below(r, vocabulary + 1) - 1;
        if (fuzz_one_in(r, 8)) ids[0] = (int64_t)fuzz_next(r);
        mw_ints(m, "tokenizer.ids", ids, fuzz_one_in(r, 8) ? n - 1 : n);
        free(ids);
    }
    image = mw_build(m);
    mw_free(m);
    return image;
}

static void check_status(moe_status status, const moe_error *e) {
    if (status == MOE_OK) return;
    FUZZ_CHECK(status == e->code && status != MOE_ERROR_MEMORY, "status %d: %s", (int)status, e->message);
    check_line(e->message);
}

static void check_ids(const text_front *front, const text_ids *ids) {
    for (size_t i = 0; i < ids->length; i++)
        FUZZ_CHECK(ids->data[i] >= 0 && ids->data[i] < moe_model_vocabulary(front->model), "id %d", (int)ids->data[i]);
}

static void check_text(const text_bytes *t) {
    for (size_t i = 0; i < t->length; i++) FUZZ_CHECK(!strchr("\n\r\t", t->data[i]), "byte %d in output", t->data[i]);
}

static void use_front(const text_front *front, const uint8_t *data, size_t size, uint64_t *r) {
    const int pieces = front->vocabulary.count > 0, texts = front->tokeniser != NULL;
    char text[256];
    moe_error e = { MOE_OK, "", "" };
    text_ids ids = { 0 };
    text_bytes out = { 0 };
    for (int round = 0; round < 4; round++) {
        const text_line line = { .data = text,
                                 .length = some_text(data, size, r, text, sizeof text),
                                 .number = 1,
                                 .too_long = fuzz_one_in(r, 16),
                                 .given = text,
                                 .given_length = fuzz_below(r, sizeof text),
                                 .kept = fuzz_one_in(r, 16) };
        text_options options = { .ids = !pieces && !texts ? 1 : fuzz_one_in(r, 5),
                                 .pretokenized = !texts || fuzz_one_in(r, 5),
                                 .truncate = fuzz_one_in(r, 2),
                                 .lower_case = fuzz_one_in(r, 2),
                                 .pairs = fuzz_one_in(r, 4),
                                 .max_source = 1 + fuzz_below(r, 20),
                                 .max_target = 1 + fuzz_below(r, 20) };
        options.target_ids = options.ids, options.target_pieces = options.pretokenized;
        text_job job = { 0 };
        options.strategy = text_strategy_of(front, &options);
        check_status(text_job_prepare(front, &options, &line, &job, &e), &e);
        if (!job.failed) check_ids(front, &job.source_ids), check_ids(front, &job.target_ids);
        FUZZ_CHECK(!job.failed || job.note[0], "a line failed without a note");
        FUZZ_CHECK(job.failed || job.source_ids.length <= options.max_source, "%zu ids, limit %zu",
                   job.source_ids.length, options.max_source);
        text_bytes_free(&job.source), text_bytes_free(&job.target);
        text_ids_free(&job.source_ids), text_ids_free(&job.target_ids);
        if (texts) {
            const moe_status status = text_encode(front, text, line.length, &ids, &e);
            check_status(status, &e);
            if (status == MOE_OK) {
                check_ids(front, &ids);
                check_status(text_decode(front, ids.data, ids.length, &out, &e), &e);
            }
        }
        if (texts || pieces) {
            const moe_status status = text_parse_pieces(front, text, line.length, &ids, &e);
            check_status(status, &e);
            if (status == MOE_OK) check_ids(front, &ids);
            if (status == MOE_OK) check_status(text_join_pieces(front, ids.data, ids.length, &out, &e), &e);
        }
        check_text(&out);
    }
    for (int32_t id = -1; id < 12; id++) {
        const moe_span piece = text_piece(front, id);
        fuzz_read(piece.data, piece.length);
        text_is_unknown(front, id);
        if (texts) check_status(text_decode(front, &id, 1, &out, &e), &e);
    }
    check_text(&out);
    text_ids_free(&ids);
    text_bytes_free(&out);
}

/* ---- One input ---- */

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    fuzz_make_folder();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const text_level levels[] = { TEXT_IDS_ONLY, TEXT_REQUIRED, TEXT_PIECES, TEXT_IF_THERE };
    uint64_t r = fuzz_hash(size, data, size);
    char why[200] = "";
    text_front front;
    moe_error e = { MOE_OK, "", "" };
    spm *t = spm_new(data, size, why, sizeof why);
    const int32_t n_pieces = t ? spm_size(t) : 0;
    if (t) use_tokeniser(t, data, size, &r), compare_with_library(t, data, size, &r);
    else check_line(why);
    spm_free(t);
    if (!t && fuzz_below(&r, 8)) return 0;
    const mw_image image = wrap(data, size, n_pieces, &r);
    fuzz_write(fuzz_path("model.bin"), image.data, image.bytes);
    free(image.data);
    const moe_status status = text_open(fuzz_path("model.bin"), (int)levels[fuzz_below(&r, 4)], NULL, &front, &e);
    check_status(status, &e);
    if (status == MOE_OK) use_front(&front, data, size, &r);
    if (status == MOE_OK) text_close(&front);
    return 0;
}
