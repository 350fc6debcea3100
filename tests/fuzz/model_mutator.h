/* model_mutator.h - changes metadata, layers and tensors of model files and corrects their checksums. Then it opens the
 * model and repairs the errors that moe.c reports, so that most mutated models open and have unusual shapes. Include it
 * after moe.c and model_writer.h. */
#ifndef MODEL_MUTATOR_H
#define MODEL_MUTATOR_H

enum { MM_REPAIRS = 60, MM_TENSOR_BYTES = 1 << 16, MM_MOST_TOKENS = 1 << 11 };

/* ---- Decoding ---- */

/* Return the size of a value in bytes without padding, or 0 if the value is incomplete. */
static size_t mm_value_bytes(uint32_t kind, const uint8_t *p, size_t left) {
    const uint64_t n = left >= 8 ? mw_get64(p) : 0;
    size_t at = 8;
    if (left < 8) return 0;
    if (kind == MW_INT || kind == MW_REAL) return 8;
    if (n > left) return 0;
    if (kind == MW_TEXT || kind == MW_BYTES) at += (size_t)n;
    else if (kind == MW_INTS || kind == MW_REALS) at += 8 * (size_t)n;
    else
        for (uint64_t i = 0; i < n; i++) {
            if (at + 8 > left || mw_get64(p + at) > left) return 0;
            at += 8 + mw_up((size_t)mw_get64(p + at), 8);
        }
    return at <= left ? at : 0;
}

static int mm_decode_meta(mw_model *m, const uint8_t *data, size_t header, size_t *at) {
    const size_t left = header - *at;
    const uint32_t kind = left >= 8 ? mw_get32(data + *at) : 0, length = left >= 8 ? mw_get32(data + *at + 4) : 0;
    const size_t value = *at + mw_up(8 + (size_t)length, 8);
    char key[64] = "";
    size_t bytes;
    if (left < 8 || length >= sizeof key || value > header) return 0;
    bytes = mm_value_bytes(kind, data + value, header - value);
    if (!bytes || m->n_meta == MOE_COUNT(m->meta)) return 0;
    memcpy(key, data + *at + 8, length);
    if (!mw_find_meta(m, key)) mw_set(m, key, kind, data + value, bytes);
    *at = mw_up(value + bytes, 8);
    return *at <= header;
}

static int mm_decode_tensor(mw_model *m, const uint8_t *data, size_t size, size_t header, size_t *at) {
    const size_t left = header - *at;
    const uint32_t n_dims = left >= 40 ? mw_get32(data + *at + 8) : 0,
                   length = left >= 40 ? mw_get32(data + *at + 12) : 0;
    const size_t behind = *at + 16 + 8 * (size_t)n_dims;
    mw_tensor *t;
    uint64_t offset, bytes;
    if (left < 40 || n_dims < 1 || n_dims > 3 || length > 63 || behind + 24 + length > header) return 0;
    offset = mw_get64(data + behind), bytes = mw_get64(data + behind + 8);
    if (offset > size || bytes > size - offset || m->n_tensors == MOE_COUNT(m->tensors)) return 0;
    t = mw_add_tensor(m, "", mw_get32(data + *at), mw_get32(data + *at + 4), (size_t)bytes);
    memcpy(t->name, data + behind + 24, length);
    t->n_dims = n_dims;
    for (uint32_t d = 0; d < n_dims; d++) t->dims[d] = mw_get64(data + *at + 16 + 8 * d);
    if (bytes) memcpy(t->data, data + offset, (size_t)bytes);
    *at = mw_up(behind + 24 + length, 8);
    return *at <= header;
}

/* Decode as much of the file as possible. Return NULL if it has no metadata. */
static mw_model *mm_decode(const uint8_t *data, size_t size) {
    const size_t header = size >= 64 && mw_get64(data + 16) <= size ? (size_t)mw_get64(data + 16) : 0;
    mw_model *m = mw_zeros(sizeof *m);
    size_t at = 64;
    int whole = header >= 64;
    for (uint32_t i = 0; whole && i < mw_get32(data + 32); i++) whole = mm_decode_meta(m, data, header, &at);
    for (uint32_t i = 0; whole && i < mw_get32(data + 36); i++) whole = mm_decode_tensor(m, data, size, header, &at);
    if (m->n_meta) return m;
    mw_free(m);
    return NULL;
}

/* ---- Values ---- */

enum { MM_KINDS = 4, MM_END_OF_KINDS = 13 }; /* end of the architectures and of the layer kinds in mm_words */
static const char *const mm_words[] = {
    "gnmt-moe", "moe-lm", "deep-moe", "transformer", "lstm",      "moe",     "attention", "cross",  "ffn",
    "norm",     "ssru",   "average",  "delta",       "rms",       "layer",   "none",      "before", "after",
    "relu",     "gelu",   "swish",    "softmax",     "topk",      "top1",    "zero",      "concat", "sum",
    "mlp",      "linear", "additive", "threshold",   "batchwise", "product", "state",     "output", "query",
    "paper",    "nvidia", "previous", "current",     "sigmoid",   "tf",      "encoder",   "mlperf", "hf",
    "",         "\xff",   "marian",   "decoder",     "gated",     "chosen",  "all",       "both",   "gelu_tanh",
};
static const char *const mm_keys[] = {
    "vocab.size",
    "model.width",
    "embedding.scale",
    "token.bos",
    "token.eos",
    "token.pad",
    "token.unk",
    "token.never",
    "token.ends",
    "token.suppressed",
    "languages.codes",
    "languages.tags",
    "source.tag",
    "source.bos",
    "source.eos",
    "target.tag",
    "decoder.init",
    "align.layer",
    "align.heads",
    "decode.rules",
    "decode.beam",
    "decode.rerank",
    "decode.length_penalty",
    "decode.prune",
    "decode.max_len_factor",
    "decode.max_len_offset",
    "decode.coverage_penalty",
    "decode.force_end",
    "decode.early_stopping",
    "shortlist.entries",
    "shortlist.first",
    "shortlist.shared",
    "shortlist.multiple",
    "decode.max_new",
    "decode.length_constant",
    "limit.source",
    "limit.target",
    "encoder.layers",
    "decoder.layers",
    "network.layers",
    "activation.block",
    "general.architecture",
    "golden.0",
    "quality.bleu",
};

static int64_t mm_integer(uint64_t *r) {
    static const int64_t odd[] = {
        0,     1,       2,       3,         7,         16,         17, 63,        64,        255,           256,   4096,
        65536, 1 << 20, 1 << 30, INT32_MAX, INT32_MIN, UINT32_MAX, -1, INT64_MAX, INT64_MIN, INT64_MAX / 8, 131072
    };
    return fuzz_one_in(r, 3) ? odd[fuzz_below(r, MOE_COUNT(odd))] : (int64_t)fuzz_below(r, 24);
}

static double mm_real(uint64_t *r) {
    static const double odd[] = { 0, -1, 1, 0.5, 1e-300, 1e6, 1e300, 1e38, 4e38, -0.0 };
    const size_t roll = fuzz_below(r, 16);
    if (roll == 0) return (double)NAN;
    if (roll == 1) return (double)INFINITY;
    return roll < 8 ? odd[fuzz_below(r, MOE_COUNT(odd))] : (double)fuzz_below(r, 1000) / 100;
}

static float mm_float(uint64_t *r) {
    static const uint32_t odd[] = { 0,           0x80000000u, 1,           0x007fffffu, 0x00800000u, 0x7f7fffffu,
                                    0xff7fffffu, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0x3f800000u };
    return fuzz_one_in(r, 2) ? moe_from_bits(odd[fuzz_below(r, MOE_COUNT(odd))]) : mw_uniform(r, -9, 9);
}

/* Set a layer setting to a random value of the right type. */
static void mm_set_setting(mw_model *m, const char *name, const moe_key *k, uint64_t *r) {
    size_t words = 0;
    char key[64];
    snprintf(key, sizeof key, "%s.%s", name, k->key);
    for (; k->names && k->names[words]; words++) {}
    if (k->kind == MOE_KEY_NAME) mw_text(m, key, k->names[fuzz_below(r, words)]);
    else if (k->kind == MOE_KEY_REAL) mw_real(m, key, (double)fuzz_below(r, 8) / 4);
    else mw_int(m, key, (int64_t)fuzz_below(r, k->kind == MOE_KEY_FLAG ? 2 : 20));
}

/* Choose the name of a random layer, or "decoder.0" if the model has no layers. */
static void mm_layer_name(const mw_model *m, uint64_t *r, char *name, size_t size) {
    size_t n = 0;
    snprintf(name, size, "decoder.0");
    for (size_t i = 0; i < m->n_meta; i++) {
        const char *end = strstr(m->meta[i].key, ".kind");
        if (end && !end[5] && fuzz_one_in(r, ++n))
            snprintf(name, size, "%.*s", (int)(end - m->meta[i].key), m->meta[i].key);
    }
}

static void mm_mutate_value(mw_meta *e, uint64_t *r) {
    const int64_t integer = mm_integer(r);
    const double real = mm_real(r);
    if (fuzz_one_in(r, 12)) e->kind = (uint32_t)fuzz_below(r, 9);
    else if (e->kind == MW_INT && e->bytes == 8) memcpy(e->value, &integer, 8);
    else if (e->kind == MW_REAL && e->bytes == 8) memcpy(e->value, &real, 8);
    else if (e->kind == MW_INTS && e->bytes > 8 && fuzz_one_in(r, 2))
        memcpy(e->value + 8 + 8 * fuzz_below(r, e->bytes / 8 - 1), &integer, 8);
    else if (e->bytes) LLVMFuzzerMutate(e->value, e->bytes, e->bytes);
}

static const moe_key *mm_any_key(uint64_t *r) {
    const moe_layer_type *type = moe_layer_types[fuzz_below(r, MOE_COUNT(moe_layer_types))];
    return &type->keys[fuzz_below(r, type->n_keys)];
}

static void mm_mutate_meta(mw_model *m, uint64_t *r) {
    mw_meta *e = &m->meta[fuzz_below(r, m->n_meta)];
    char name[32], key[64];
    if (!m->n_meta || m->n_meta + 4 > MOE_COUNT(m->meta)) return;
    mm_layer_name(m, r, name, sizeof name);
    switch (fuzz_below(r, 8)) {
    case 0: mw_drop(m, snprintf(key, sizeof key, "%s", e->key) > 0 ? key : ""); break;
    case 1: mm_set_setting(m, name, mm_any_key(r), r); break;
    case 2: mw_int(m, mm_keys[fuzz_below(r, MOE_COUNT(mm_keys))], mm_integer(r)); break;
    case 3: mw_real(m, mm_keys[fuzz_below(r, MOE_COUNT(mm_keys))], mm_real(r)); break;
    case 4:
        if (e->kind == MW_TEXT)
            mw_text(m, snprintf(key, sizeof key, "%s", e->key) > 0 ? key : "",
                    mm_words[fuzz_below(r, MOE_COUNT(mm_words))]);
        break;
    case 5: {
        int64_t ids[4];
        for (size_t i = 0; i < 4; i++) ids[i] = fuzz_one_in(r, 8) ? mm_integer(r) : (int64_t)fuzz_below(r, 12);
        mw_ints(m,
                fuzz_one_in(r, 2)   ? "token.never"
                : fuzz_one_in(r, 2) ? "token.suppressed"
                                    : "languages.tags",
                ids, fuzz_below(r, 5));
        break;
    }
    default: mm_mutate_value(e, r);
    }
}

/* ---- Tensors ---- */

static uint64_t mm_tensor_bytes(const mw_tensor *t) {
    moe_tensor_info info = { .type = (moe_type)t->type, .n_dims = t->n_dims, .experts = (int)t->layout };
    uint64_t count = 1;
    if (t->type >= MOE_TYPE_COUNT || t->n_dims < 1 || t->n_dims > 3) return 0;
    for (uint32_t d = 0; d < t->n_dims; d++) {
        info.dims[d] = t->dims[d];
        if (!t->dims[d] || !moe_multiply(count, t->dims[d], &count) || count > MM_TENSOR_BYTES) return 0;
    }
    if ((info.experts != 0) != (t->n_dims == 3)) return 0;
    return moe_tensor_bytes(&info);
}

static void mm_pack(uint32_t type, size_t rows, size_t cols, unsigned char *out, uint64_t *r) {
    const size_t padded = moe_round_up(cols, MOE_Q8_COLS);
    float *row = mw_zeros(cols * sizeof *row);
    int8_t *scratch = mw_zeros(3 * padded);
    const float amplitude = fuzz_one_in(r, 8) ? 1e20f : 1;
    for (size_t i = 0; i < rows; i++) {
        for (size_t c = 0; c < cols; c++) row[c] = mw_uniform(r, -amplitude, amplitude);
        moe_pack_row((moe_type)type, rows, cols, i, row, out, scratch);
    }
    free(row);
    free(scratch);
}

/* Fill a tensor with random data. Return 0 if its type or shape is invalid or its size too large. */
static int mm_fill(mw_tensor *t, uint64_t *r) {
    const uint64_t bytes = mm_tensor_bytes(t);
    if (!bytes || bytes > MM_TENSOR_BYTES) return 0;
    free(t->data);
    t->data = mw_zeros((size_t)bytes);
    t->bytes = (size_t)bytes;
    if (t->n_dims < 3) {
        mm_pack(t->type, t->n_dims == 2 ? (size_t)t->dims[0] : 1, (size_t)t->dims[t->n_dims - 1], t->data, r);
        return 1;
    }
    for (size_t e = 0; e < t->dims[0]; e++) {
        uint64_t down = 0;
        const size_t stride = (size_t)moe_slab_bytes((moe_type)t->type, (int)t->layout, t->dims[1], t->dims[2], &down);
        mm_pack(t->type, (size_t)t->dims[1], (size_t)t->dims[2], t->data + e * stride, r);
        mm_pack(t->type, (size_t)t->dims[2], (size_t)t->dims[1], t->data + e * stride + down, r);
    }
    return 1;
}

/* Set the shape of a tensor; add it if missing. */
static int mm_shape(mw_model *m, const char *name, uint32_t n_dims, const size_t *dims, uint64_t *r) {
    mw_tensor *t = mw_find_tensor(m, name);
    const int exact = n_dims == 1 || strstr(name, "gate.") || strstr(name, "parent.") || strstr(name, "positions.");
    if (!t && m->n_tensors == MOE_COUNT(m->tensors)) return 0;
    if (!t) t = mw_add_tensor(m, name, MW_F32, 0, 4);
    if (exact) t->type = MW_F32;
    else if (t->type >= MOE_TYPE_COUNT || fuzz_one_in(r, 2)) t->type = (uint32_t)fuzz_below(r, MOE_TYPE_COUNT);
    t->n_dims = n_dims;
    t->layout = n_dims == 3;
    for (uint32_t d = 0; d < n_dims; d++) t->dims[d] = dims[d];
    return mm_fill(t, r);
}

static void mm_damage(mw_tensor *t, uint64_t *r) {
    for (size_t n = 1 + fuzz_below(r, 4); n && t->bytes >= 8; n--) {
        const size_t at = fuzz_one_in(r, 2) ? fuzz_below(r, t->bytes / 4)
                                            : t->bytes / 4 - 1 - fuzz_below(r, moe_min(t->bytes / 4, 64));
        const float v = mm_float(r);
        if (fuzz_one_in(r, 3)) t->data[fuzz_below(r, t->bytes)] = (unsigned char)fuzz_next(r);
        else memcpy(t->data + at * 4, &v, 4);
    }
}

static void mm_mutate_tensor(mw_model *m, uint64_t *r) {
    mw_tensor *t = &m->tensors[fuzz_below(r, m->n_tensors)];
    char name[64];
    if (!m->n_tensors) return;
    switch (fuzz_below(r, 8)) {
    case 0: mw_drop_tensor(m, snprintf(name, sizeof name, "%s", t->name) > 0 ? name : ""); break;
    case 1:
        t->dims[fuzz_below(r, 3)] = (uint64_t)mm_integer(r);
        if (fuzz_one_in(r, 2)) mm_fill(t, r);
        break;
    case 2:
        t->type = (uint32_t)fuzz_below(r, MOE_TYPE_COUNT + 1);
        if (fuzz_below(r, 8)) mm_fill(t, r);
        break;
    case 3:
        if (fuzz_one_in(r, 4)) t->layout = (uint32_t)fuzz_below(r, 3), t->n_dims = (uint32_t)fuzz_below(r, 5);
        break;
    case 4:
        if (t->name[0]) t->name[fuzz_below(r, strlen(t->name))] = "abz019._-A\n"[fuzz_below(r, 11)];
        break;
    case 5: mm_fill(t, r); break;
    default: mm_damage(t, r);
    }
}

/* ---- Lexical shortlists ---- */

static size_t mm_tokens(mw_model *m, const char *key, size_t otherwise) {
    const mw_meta *e = mw_find_meta(m, key);
    int64_t n = 0;
    if (e && e->kind == MW_INT) memcpy(&n, e->value, 8);
    return n > 0 && n <= MM_MOST_TOKENS ? (size_t)n : otherwise;
}

/* Add a random shortlist that fits the model. */
static void mm_put_lists(mw_model *m, uint64_t *r) {
    static float offsets[MM_MOST_TOKENS + 1], ids[4 * MM_MOST_TOKENS];
    const size_t targets = mm_tokens(m, "vocab.size", 0), sources = mm_tokens(m, "source.vocab.size", targets);
    const size_t most = fuzz_below(r, 5), step = fuzz_one_in(r, 4) ? 1 : 1 + fuzz_below(r, 20);
    size_t n = 0;
    mw_drop_tensor(m, "shortlist.offsets"), mw_drop_tensor(m, "shortlist.ids");
    if (!targets || m->n_meta + 4 > MOE_COUNT(m->meta) || m->n_tensors + 2 > MOE_COUNT(m->tensors)) return;
    for (size_t t = 0; t < sources; t++) {
        offsets[t] = (float)n;
        for (size_t id = fuzz_below(r, 12), k = 0; k < most && id < targets; k++, id += 1 + fuzz_below(r, step))
            ids[n++] = (float)id;
    }
    offsets[sources] = (float)n;
    if (!n) return;
    mw_shortlist(m, sources, offsets, ids, n, (int)fuzz_below(r, fuzz_one_in(r, 4) ? targets + 1 : 4));
    mw_int(m, "shortlist.multiple", (int64_t)(fuzz_one_in(r, 2) ? 1 : 1 + fuzz_below(r, 64)));
    if (fuzz_one_in(r, 2)) mw_int(m, "shortlist.shared", 1);
    else mw_drop(m, "shortlist.shared");
}

/* Make a shortlist number off by one, out of range or fractional. */
static void mm_mutate_lists(mw_model *m, uint64_t *r) {
    mw_tensor *t = mw_find_tensor(m, fuzz_one_in(r, 2) ? "shortlist.ids" : "shortlist.offsets");
    if (!t || t->bytes < 8 || fuzz_one_in(r, 4)) {
        mm_put_lists(m, r);
        return;
    }
    const size_t at = 4 * fuzz_below(r, t->bytes / 4);
    float v;
    memcpy(&v, t->data + at, 4);
    switch (fuzz_below(r, 5)) {
    case 0: v += 1; break;
    case 1: v -= 1; break;
    case 2: v = (float)mm_tokens(m, "vocab.size", 1); break;
    case 3: v += 0.5f; break;
    default: v = mm_float(r);
    }
    memcpy(t->data + at, &v, 4);
}

/* ---- Layers ---- */

/* Add or remove a layer or change its kind. */
static void mm_mutate_layers(mw_model *m, uint64_t *r) {
    static const char *const sides[] = { "encoder.layers", "decoder.layers", "network.layers" };
    const char *side = sides[fuzz_below(r, 3)];
    mw_meta *count = mw_find_meta(m, side);
    char name[32], key[64];
    if (m->n_meta + 4 > MOE_COUNT(m->meta)) return;
    if (count && count->kind == MW_INT && fuzz_one_in(r, 2)) {
        int64_t n;
        memcpy(&n, count->value, 8);
        if (n >= 0 && n < 8) mw_int(m, side, n + (fuzz_one_in(r, 2) ? 1 : -1));
        return;
    }
    mm_layer_name(m, r, name, sizeof name);
    snprintf(key, sizeof key, "%s.kind", name);
    mw_text(m, key, mm_words[MM_KINDS + fuzz_below(r, MM_END_OF_KINDS - MM_KINDS)]);
}

static void mm_mutate(mw_model *m, uint64_t *r) {
    for (size_t n = 1 + fuzz_below(r, 4); n; n--) {
        const size_t roll = fuzz_below(r, 22);
        if (roll < 10) mm_mutate_meta(m, r);
        else if (roll < 16) mm_mutate_tensor(m, r);
        else if (roll < 18) mm_mutate_lists(m, r);
        else mm_mutate_layers(m, r);
    }
}

/* ---- Repair ---- */

static void mm_repair_missing_key(mw_model *m, const char *key, uint64_t *r) {
    char name[64];
    for (size_t i = 0; i < 200; i++) {
        const moe_key *k = mm_any_key(r);
        const size_t length = strlen(key), tail = strlen(k->key);
        if (length <= tail + 1 || strcmp(key + length - tail, k->key) != 0) continue;
        snprintf(name, sizeof name, "%.*s", (int)(length - tail - 1), key);
        mm_set_setting(m, name, k, r);
        return;
    }
    mw_int(m, key, (int64_t)fuzz_below(r, 4) + 1);
}

/* Repair a key. `message` is the part of moe.c's message after "metadata 'KEY' ". */
static void mm_repair_key(mw_model *m, const char *key, const char *message, uint64_t *r) {
    long long low, high;
    double least, most;
    char word[32];
    if (m->n_meta + 4 > MOE_COUNT(m->meta)) return;
    if (strcmp(key, "attention.kind") == 0) {
        mw_text(m, key, fuzz_one_in(r, 2) ? "additive" : "product");
    } else if (strncmp(message, "is missing", 10) == 0) {
        if (strstr(key, ".kind") || strstr(key, "architecture"))
            mw_text(m, key, mm_words[fuzz_below(r, MM_END_OF_KINDS)]);
        else mm_repair_missing_key(m, key, r);
    } else if (strncmp(message, "has an unknown value", 20) == 0 || strncmp(message, "is out of range", 15) == 0) {
        mw_text(m, key, mm_words[fuzz_below(r, MOE_COUNT(mm_words))]);
    } else if (sscanf(message, "is %*d, but must be %lld to %lld", &low, &high) == 2) {
        mw_int(m, key,
               high < low ? low : low + (long long)fuzz_below(r, (size_t)(high - low < 20 ? high - low + 1 : 20)));
    } else if (sscanf(message, "is %*f, but must be %lf to %lf", &least, &most) == 2) {
        mw_real(m, key, least + (most - least) / 2);
    } else if (sscanf(message, "must be \"%31[a-z0-9]\"", word) == 1) {
        mw_text(m, key, word);
    } else if (strncmp(message, "must be \"\"", 10) == 0 || strncmp(message, "must not be", 11) == 0) {
        mw_text(m, key, "none");
    } else if (strncmp(message, "is not an integer", 17) == 0 || strncmp(message, "must be 0", 9) == 0) {
        mw_int(m, key, 0);
    } else if (fuzz_one_in(r, 2)) {
        mw_drop(m, key);
    } else {
        mw_int(m, key, (int64_t)fuzz_below(r, 3));
    }
}

/* Repair the reported error. Return 0 if the error is unknown. */
static int mm_repair(mw_model *m, const moe_error *e, uint64_t *r) {
    char name[64] = "", key[64] = "";
    const char *needs = strstr(e->message, ", but the layer list needs ");
    size_t d[3] = { 1, 1, 1 };
    mw_tensor *t;
    int at = 0;
    if (sscanf(e->message, "metadata '%63[^']' %n", key, &at) == 1 && at) {
        mm_repair_key(m, key, e->message + at, r);
    } else if (strncmp(e->message, "tensor shortlist.", 17) == 0) {
        mm_put_lists(m, r);
    } else if (needs && sscanf(e->message, "tensor %63s is", name) == 1) {
        const int n = sscanf(needs + strcspn(needs, "["), "[%zu, %zu, %zu]", &d[0], &d[1], &d[2]);
        return n > 0 && mm_shape(m, name, (uint32_t)n, d, r);
    } else if (strstr(e->message, " is missing") && sscanf(e->message, "tensor %63s is", name) == 1) {
        return mm_shape(m, name, 1, d, r);
    } else if (sscanf(e->where, "tensor %63s", name) == 1) {
        if (!(t = mw_find_tensor(m, name))) return 0;
        if (strstr(e->message, "must be f32")) t->type = MW_F32;
        if (!mm_fill(t, r)) mw_drop_tensor(m, name);
    } else {
        return 0;
    }
    return 1;
}

/* Repair errors until the model opens or an error is unknown. Return the image of the file. */
static mw_image mm_open(mw_model *m, uint64_t *r) {
    const moe_model_params params = { .verify = 1 };
    mw_image image = mw_build(m);
    for (int i = 0; i < MM_REPAIRS; i++) {
        moe_model *model = NULL;
        moe_error e = { MOE_OK, "", "" };
        const moe_status status = moe_model_open_memory(image.data, image.bytes, &params, &model, &e);
        if (status == MOE_OK) moe_model_close(model);
        if (status == MOE_OK || !mm_repair(m, &e, r)) break;
        free(image.data);
        image = mw_build(m);
    }
    return image;
}

#endif /* MODEL_MUTATOR_H */
