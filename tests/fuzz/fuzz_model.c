/* fuzz_model.c - opens the input as a model file, then inspects, runs and saves the model.
 *
 * Checks beyond the sanitizers: failures have a status and a message, and leak nothing; opening a model allocates
 * little more than its file size; every request gets exactly one result; ids and log-probabilities are in range;
 * session sizes equal moe_session_bytes; results do not depend on kernels, threads or batches; saved files can be
 * opened. All random choices are derived from the input. */
#include "moe.c"

#define MW_CRC(p, n) moe_crc32(0, p, n)
#include "tests/engine/model_writer.h"
#include "tests/fuzz/fuzz.h"

#include "tests/fuzz/model_mutator.h"

enum { REQUESTS = 5, LONGEST = 24, ALIKE = 17, SESSION_BYTES = 1 << 25 };

/* ---- Mutation ---- */

static size_t give_image(mw_model *m, mw_image image, uint8_t *out, size_t max_size) {
    const size_t bytes = image.bytes <= max_size ? image.bytes : 0;
    if (bytes) memcpy(out, image.data, bytes);
    free(image.data);
    mw_free(m);
    return bytes;
}

/* Change bytes of the header; usually correct the checksum. */
static void damage_header(mw_image image, uint64_t *r) {
    const size_t header = (size_t)mw_get64(image.data + 16);
    for (size_t n = 1 + fuzz_below(r, 3); n && header > 16; n--) {
        const size_t at = 8 + fuzz_below(r, header - 8);
        if (fuzz_one_in(r, 2)) image.data[at] = (unsigned char)fuzz_next(r);
        else if (at + 8 <= header) mw_put64(image.data + at / 8 * 8, (uint64_t)mm_integer(r));
    }
    if (fuzz_below(r, 8)) mw_seal(image);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    uint64_t r = seed;
    mw_model *m = fuzz_one_in(&r, 16) ? NULL : mm_decode(data, size);
    mw_image image;
    size_t bytes;
    if (!m) return LLVMFuzzerMutate(data, size, max_size);
    mm_mutate(m, &r);
    image = fuzz_below(&r, 8) ? mm_open(m, &r) : mw_build(m);
    if (fuzz_one_in(&r, 8)) damage_header(image, &r);
    bytes = give_image(m, image, data, max_size);
    return bytes ? bytes : LLVMFuzzerMutate(data, size, max_size);
}

/* Copy layers and tensors of the second model into the first one, then repair it. */
size_t LLVMFuzzerCustomCrossOver(const uint8_t *data1, size_t size1, const uint8_t *data2, size_t size2, uint8_t *out,
                                 size_t max_out, unsigned seed) {
    uint64_t r = seed;
    mw_model *a = fuzz_one_in(&r, 4) ? mm_decode(data1, size1) : NULL, *b = a ? mm_decode(data2, size2) : NULL;
    char name[32] = "";
    size_t bytes = 0;
    if (b) mm_layer_name(b, &r, name, sizeof name);
    for (size_t i = 0; a && b && i < b->n_meta && a->n_meta < MOE_COUNT(a->meta); i++)
        if (strncmp(b->meta[i].key, name, strlen(name)) == 0 || fuzz_one_in(&r, 16))
            mw_set(a, b->meta[i].key, b->meta[i].kind, b->meta[i].value, b->meta[i].bytes);
    for (size_t i = 0; a && b && i < b->n_tensors && a->n_tensors < MOE_COUNT(a->tensors); i++) {
        mw_tensor *t = &b->tensors[i], *mine = mw_find_tensor(a, t->name);
        if (strncmp(t->name, name, strlen(name)) != 0) continue;
        if (!mine) mine = &a->tensors[a->n_tensors++];
        free(mine->data);
        *mine = *t;
        t->data = NULL;
    }
    if (a && b) bytes = give_image(a, mm_open(a, &r), out, max_out);
    else if (a) mw_free(a);
    if (b) mw_free(b);
    return bytes;
}

/* ---- Inspection ---- */

static void check_error(moe_status status, const moe_error *e) {
    FUZZ_CHECK(status == e->code, "status %d, but error code %d", (int)status, (int)e->code);
    FUZZ_CHECK(status != MOE_ERROR_MEMORY, "out of memory: %s", e->message);
    FUZZ_CHECK(e->message[0] && e->where[0] && !strchr(e->message, '\n'), "failed without a valid message");
    FUZZ_CHECK(moe_utf8_valid(e->message, strnlen(e->message, sizeof e->message - 4)) || strchr(e->message, '%'),
               "a message is invalid UTF-8: %s", e->message);
}

/* Read all properties, including indices past the end. */
static void inspect(const moe_model *model) {
    static const size_t behind[] = { 0, 1, SIZE_MAX / 2, SIZE_MAX };
    moe_span texts[20];
    double sum = 0;
    const size_t n_meta = moe_model_meta_count(model), n_layers = moe_model_layer_count(model),
                 n_mixtures = moe_model_mixture_count(model), n_tensors = moe_model_tensor_count(model);
    for (size_t i = 0; i < n_meta; i++) {
        const moe_span key = moe_model_meta_key(model, i);
        for (size_t k = 0; k < moe_model_meta_length(model, i) + 1 && k < 20; k++) {
            const moe_span s = moe_model_meta_text(model, i, k);
            sum += (double)moe_model_meta_int(model, i, k) + moe_model_meta_real(model, i, k);
            fuzz_read(s.data, s.length);
        }
        FUZZ_CHECK(key.length && moe_model_meta_kind(model, i) >= MOE_META_INT, "metadata %zu has no key or kind", i);
        for (size_t k = moe_model_meta_texts(model, i, texts, MOE_COUNT(texts)); k--;)
            FUZZ_CHECK(texts[k].data == moe_model_meta_text(model, i, k).data, "text %zu of metadata %zu", k, i);
    }
    for (size_t i = 0; i < n_layers; i++) {
        FUZZ_CHECK(moe_model_layer(model, i).name && moe_model_layer(model, i).kind, "layer %zu has no name", i);
        for (size_t k = 0; moe_model_layer_setting(model, i, k).key; k++)
            sum += moe_model_layer_setting(model, i, k).number;
    }
    for (size_t i = 0; i < n_mixtures; i++) {
        const moe_mixture x = moe_model_mixture(model, i);
        FUZZ_CHECK(x.layer && x.experts && x.hidden && moe_gate_name(x.gate)[0] != '?', "mixture %zu is empty", i);
    }
    for (size_t i = 0; i < n_tensors; i++) {
        const moe_tensor_info t = moe_model_tensor(model, i);
        FUZZ_CHECK(t.offset + t.bytes <= moe_model_file_bytes(model) && t.parameters, "tensor %zu is outside the file",
                   i);
    }
    for (size_t i = 0; i < MOE_COUNT(behind); i++) {
        FUZZ_CHECK(!moe_model_layer(model, n_layers + behind[i] >= n_layers ? n_layers + behind[i] : SIZE_MAX).name,
                   "layer past the end");
        FUZZ_CHECK(!moe_model_layer_setting(model, SIZE_MAX - behind[i] / 4, 0).key, "setting past the end");
        FUZZ_CHECK(!moe_model_mixture(model, SIZE_MAX - behind[i] / 4).layer, "mixture past the end");
        FUZZ_CHECK(!moe_model_tensor(model, SIZE_MAX - behind[i] / 4).bytes, "tensor past the end");
        FUZZ_CHECK(!moe_model_meta_text(model, SIZE_MAX - behind[i] / 4, 0).length, "text past the end");
        sum += (double)moe_model_language(model, behind[i]).length;
    }
    for (size_t i = 0; i < moe_model_language_count(model) && i < 20; i++) {
        char code[16];
        const moe_span s = moe_model_language(model, i);
        snprintf(code, sizeof code, "%.*s", (int)moe_min(s.length, 15), s.data);
        sum += moe_model_language_tag(model, code);
    }
    sum += moe_model_meta_find(model, "vocab.size") < 0;
    fuzz_read(&sum, sizeof sum);
    FUZZ_CHECK(moe_model_vocabulary(model) > 1 && moe_model_width(model) > 0 && moe_model_kind(model) <= 2,
               "invalid properties of a model");
}

/* ---- Translation ---- */

typedef struct plan {
    const moe_model *model;
    moe_session_params params;
    moe_request requests[REQUESTS];
    int32_t ids[REQUESTS][2][LONGEST];
    size_t n, stop_after; /* stop_after: number of results before cancelling; 0 to never cancel */
    int damaged;          /* 1 if the model may be damaged and format errors are allowed */
    int how;              /* 0 to cancel in the pull function, 1 to call moe_session_cancel */
} plan;

typedef struct outcome {
    const plan *plan;
    moe_session *session;
    size_t sent, done;
    int seen[REQUESTS];
    uint64_t hash[REQUESTS], routed;
    moe_status status;
} outcome;

static int stopped(const outcome *o) { return o->plan->stop_after && o->done >= o->plan->stop_after; }

static int pull(void *user, int wait, moe_request *r) {
    outcome *o = user;
    if (stopped(o) && !o->plan->how) return MOE_PULL_CANCEL;
    if (o->sent == o->plan->n) return MOE_PULL_END;
    if (!wait && o->plan->params.batch_tokens % 3 == 1) return MOE_PULL_LATER;
    *r = o->plan->requests[o->sent];
    r->user = &o->seen[o->sent++];
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    outcome *o = user;
    const size_t i = (size_t)((int *)r->user - o->seen);
    const moe_session_params *p = &o->plan->params;
    const int32_t vocabulary = moe_model_vocabulary(o->plan->model);
    FUZZ_CHECK(i < o->sent && !o->seen[i]++, "request %zu returned twice or was never sent", i);
    FUZZ_CHECK((r->status == MOE_OK) == (r->n_hypotheses > 0) && !r->message[0] == !r->status,
               "status %d, '%s', %zu hypotheses", (int)r->status, r->message, r->n_hypotheses);
    FUZZ_CHECK(r->n_hypotheses <= (size_t)p->nbest, "%zu hypotheses, limit %d", r->n_hypotheses, p->nbest);
    uint64_t hash = fuzz_hash(14695981039346656037u, &r->status, sizeof r->status);
    for (size_t h = 0; h < r->n_hypotheses; h++) {
        const moe_hypothesis *y = &r->hypotheses[h];
        const size_t n = y->n_ids + (size_t)(y->finished != 0);
        FUZZ_CHECK(n <= (size_t)p->max_target, "%zu tokens, limit %d", n, p->max_target);
        for (size_t k = 0; k < y->n_ids; k++)
            FUZZ_CHECK(y->ids[k] >= 0 && y->ids[k] < vocabulary, "token %d of %d", (int)y->ids[k], (int)vocabulary);
        for (size_t k = 0; y->token_logprobs && k < n; k++)
            FUZZ_CHECK(y->token_logprobs[k] <= 0, "log-probability %g", (double)y->token_logprobs[k]);
        FUZZ_CHECK(y->logprob <= 0, "hypothesis with log-probability %g", (double)y->logprob);
        hash = fuzz_hash(hash, y->ids, y->n_ids * sizeof *y->ids);
        if (y->token_logprobs) hash = fuzz_hash(hash, y->token_logprobs, n * sizeof *y->token_logprobs);
        hash = fuzz_hash(fuzz_hash(hash, &y->logprob, 4), &y->score, 4);
    }
    o->hash[i] = hash;
    o->done++;
    if (stopped(o) && o->plan->how) moe_session_cancel(o->session);
}

static void see_routing(void *user, const moe_routing *x) {
    outcome *o = user;
    for (size_t i = 0; i < x->n; i++)
        FUZZ_CHECK(x->experts[i] < 1u << 24 && (!i || x->experts[i] > x->experts[i - 1]), "experts out of order");
    o->routed += 1 + x->n;
}

static void see_attention(void *user, const moe_attention *x) {
    fuzz_read(x->weights, x->n * sizeof *x->weights);
    ((outcome *)user)->routed++;
}

static void see_values(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    for (size_t i = 0; i < rows; i++) fuzz_read(data + i * stride, cols * sizeof *data);
    ((outcome *)user)->routed += name[0] != 0;
}

/* Choose small sizes; other settings are random and sometimes invalid. */
static void plan_session(plan *p, uint64_t *r) {
    static const char *const gatings[] = { "softmax", "topk", "threshold", "sigmoid", "batchwise", "none" };
    static const char *const presets[] = { "paper", "nvidia", "tf", "mlperf", "hf", "marian" };
    moe_session_params *s = &p->params;
    const int32_t vocabulary = moe_model_vocabulary(p->model);
    *s = moe_session_params_default(p->model);
    if (fuzz_one_in(r, 3)) moe_session_params_preset(s, presets[fuzz_below(r, 6)]);
    s->threads = 1, s->batch = 1 + (int)fuzz_below(r, 4), s->batch_tokens = (int)fuzz_below(r, 40);
    s->max_source = 2 + (int)fuzz_below(r, 10), s->max_target = 2 + (int)fuzz_below(r, 8);
    s->beam = 1 + (int)fuzz_below(r, 4), s->nbest = 1 + (int)fuzz_below(r, (size_t)s->beam);
    if (s->max_len_offset > 30) s->max_len_offset = 8;
    if (moe_model_prompted(p->model) && fuzz_one_in(r, 2))
        s->max_source = LONGEST, s->context_memory = fuzz_one_in(r, 3);
    if (fuzz_one_in(r, 4)) s->min_target = (int)fuzz_below(r, 4);
    if (fuzz_one_in(r, 4)) s->length_penalty = (float)fuzz_below(r, 5);
    if (fuzz_one_in(r, 6)) s->coverage_penalty = 0.25f;
    if (fuzz_one_in(r, 6)) s->prune = mm_float(r);
    if (fuzz_one_in(r, 6)) s->rerank = (float)fuzz_below(r, 3);
    if (fuzz_one_in(r, 16)) s->max_len_factor = mm_float(r);
    if (fuzz_one_in(r, 6)) s->shortlist = !s->shortlist;
    if (fuzz_one_in(r, 6)) s->gating = gatings[fuzz_below(r, 5)];
    if (fuzz_one_in(r, 6)) s->noise = 1, s->noise_seed = fuzz_next(r);
    s->target_tag = (int32_t)fuzz_below(r, (size_t)moe_min((size_t)vocabulary, 40));
    s->source_tag = (int32_t)fuzz_below(r, (size_t)moe_min((size_t)vocabulary, 40)) - 1;
    s->early_stopping = fuzz_one_in(r, 2);
    s->device = "cpu";
    if (fuzz_one_in(r, 4)) s->routing = see_routing;
    if (fuzz_one_in(r, 8)) s->attention = see_attention;
    if (fuzz_one_in(r, 8)) s->trace = see_values;
    if (fuzz_one_in(r, 8)) p->stop_after = 1 + fuzz_below(r, 3), p->how = fuzz_one_in(r, 2);
}

static void plan_requests(plan *p, uint64_t *r) {
    const size_t vocabulary = (size_t)moe_model_vocabulary(p->model);
    const int language = moe_model_kind(p->model) == MOE_MODEL_LANGUAGE;
    const int alike = p->params.max_source == LONGEST; /* prompts share their first page */
    p->n = 1 + fuzz_below(r, REQUESTS);
    for (size_t i = 0; i < p->n; i++) {
        moe_request *q = &p->requests[i];
        *q = (moe_request){ .target_tag = p->params.target_tag, .source_tag = p->params.source_tag, .force = -1 };
        for (int side = 0; side < 2; side++)
            for (size_t k = 0; k < (alike && !side ? LONGEST : 8); k++)
                p->ids[i][side][k] = (int32_t)fuzz_below(r, fuzz_one_in(r, 40) ? vocabulary + 2 : vocabulary);
        if (alike) memcpy(p->ids[i][0], p->ids[0][0], ALIKE * sizeof p->ids[0][0][0]);
        if (!language || fuzz_one_in(r, 8))
            q->source = p->ids[i][0], q->n_source = alike ? ALIKE + fuzz_below(r, LONGEST - ALIKE) : fuzz_below(r, 8);
        if (language || fuzz_one_in(r, 3)) q->target = p->ids[i][1], q->n_target = fuzz_below(r, 6);
        q->prefix = fuzz_one_in(r, language ? 20 : 2);
        if (fuzz_one_in(r, 8)) q->force = (int32_t)fuzz_below(r, vocabulary);
        if (fuzz_one_in(r, 8)) q->raw = 1;
        if (fuzz_one_in(r, 16)) q->target_tag = (int32_t)fuzz_below(r, vocabulary + 2) - 1;
        if (fuzz_one_in(r, 16)) q->source_tag = (int32_t)fuzz_below(r, vocabulary + 3) - 2;
    }
}

/* Run the requests of a plan in a new session. Return 1 if the session was created. */
static int run_plan(const plan *p, const moe_session_params *params, outcome *o) {
    moe_session_params s = *params;
    moe_session *session = NULL;
    moe_error e = { MOE_OK, "", "" };
    size_t bytes = 0;
    moe_status status;
    *o = (outcome){ .plan = p };
    s.routing_user = s.attention_user = s.trace_user = o;
    status = moe_session_bytes(p->model, &s, &bytes, &e);
    if (status == MOE_OK && bytes > SESSION_BYTES) return 0;
    const moe_status made = moe_session_new(p->model, &s, &session, &e);
    FUZZ_CHECK(made == status || (p->damaged && made == MOE_ERROR_FORMAT),
               "moe_session_bytes: %zu, moe_session_new: %s", bytes, e.message);
    status = made;
    if (status != MOE_OK) check_error(status, &e);
    if (status != MOE_OK) return 0;
    FUZZ_CHECK(moe_session_stats(session).bytes == bytes, "moe_session_bytes: %zu, used: %llu", bytes,
               (unsigned long long)moe_session_stats(session).bytes);
    o->session = session;
    if (moe_model_kind(p->model) == MOE_MODEL_CLASSIFIER) {
        const size_t width = moe_model_width(p->model), rows = p->n;
        float *inputs = mw_zeros(rows * width * sizeof *inputs), logprobs[REQUESTS * 4] = { 0 };
        int32_t classes[REQUESTS * 4];
        uint64_t r = p->params.noise_seed + 1;
        for (size_t i = 0; i < rows * width; i++) inputs[i] = mw_uniform(&r, -2, 2);
        o->status = moe_classify(session, inputs, rows, classes, logprobs, &e);
        for (size_t i = 0; o->status == MOE_OK && i < rows * (size_t)s.nbest; i++)
            FUZZ_CHECK(classes[i] >= -1 && classes[i] < moe_model_vocabulary(p->model) && logprobs[i] <= 0,
                       "class %d with log-probability %g", (int)classes[i], (double)logprobs[i]);
        if (o->status == MOE_OK)
            o->hash[0] =
                fuzz_hash(fuzz_hash(1, logprobs, rows * (size_t)s.nbest * 4), classes, rows * (size_t)s.nbest * 4);
        free(inputs);
        FUZZ_CHECK(moe_translate(session, pull, done, o, &e) == MOE_ERROR_ARGUMENT, "a classifier translates");
    } else {
        o->status = moe_translate(session, pull, done, o, &e);
        FUZZ_CHECK(o->status == MOE_OK || (o->status == MOE_ERROR_CANCELLED && p->stop_after) ||
                       (o->status == MOE_ERROR_FORMAT && p->damaged),
                   "translating: %s", e.message);
        FUZZ_CHECK(o->status || o->done == p->n, "%zu of %zu requests returned", o->done, p->n);
        FUZZ_CHECK(moe_classify(session, NULL, 0, NULL, NULL, &e) == MOE_ERROR_ARGUMENT, "a translator classifies");
    }
    moe_session_free(session);
    return 1;
}

/* ---- Independence of kernels, threads and batches ---- */

static int matrix_is_sound(const moe_matrix *m) {
    const int32_t *sums = (const int32_t *)(const void *)(m->scales + moe_round_up(m->rows, MOE_Q8_ROWS));
    for (size_t i = 0; i < moe_round_up(m->rows, MOE_Q8_ROWS); i++) {
        int64_t sum = 0;
        for (size_t c = 0; c < m->cols_padded; c++) {
            const int32_t code = moe_matrix_code(m, i, c);
            if (code < -127 || code > 127 || (code && (i >= m->rows || c >= m->cols))) return 0;
            sum += code;
        }
        if (i < m->rows && sum != sums[i]) return 0;
    }
    return 1;
}

/* Return 1 if all quantised matrices are valid. Invalid matrices must not crash kernels but may change results. */
static int is_sound(const moe_model *model) {
    for (size_t i = 0; i < model->file.n_tensors; i++) {
        const moe_tensor_info *t = &model->file.tensors[i];
        const char *data = model->file.data + t->offset;
        uint64_t down = 0;
        const uint64_t stride = t->experts ? moe_slab_bytes(t->type, t->experts, t->dims[1], t->dims[2], &down) : 0;
        if (!moe_type_quantised(t->type)) continue;
        for (size_t e = 0; e < (t->experts ? t->dims[0] : 1); e++) {
            const size_t high = (size_t)t->dims[t->experts ? 1 : 0], wide = (size_t)t->dims[t->experts ? 2 : 1];
            const moe_matrix up = moe_matrix_view(t->type, high, wide, data + e * stride),
                             low = moe_matrix_view(t->type, wide, high, data + e * stride + down);
            if (!matrix_is_sound(&up) || (t->experts && !matrix_is_sound(&low))) return 0;
        }
    }
    return 1;
}

static void use(const moe_model *model, uint64_t *r) {
    plan p = { .model = model };
    outcome first, again;
    moe_session_params other;
    size_t bytes;
    moe_error e = { MOE_OK, "", "" };
    const moe_session_params plain = moe_session_params_default(model);
    const moe_status status = moe_session_bytes(model, &plain, &bytes, &e);
    if (status != MOE_OK) check_error(status, &e);
    plan_session(&p, r);
    plan_requests(&p, r);
    if (!run_plan(&p, &p.params, &first)) return;
    if ((p.params.gating && strcmp(p.params.gating, "batchwise") == 0) || p.stop_after || !is_sound(model)) return;
    other = p.params;
    other.isa = fuzz_one_in(r, 2) ? "portable" : fuzz_one_in(r, 2) ? "avx2" : NULL;
    if (other.isa && !moe_isa_available(other.isa)) other.isa = NULL;
    other.threads = 1 + (int)fuzz_below(r, 3);
    other.batch = 1 + (int)fuzz_below(r, 6);
    other.batch_tokens = 0;
    if (!run_plan(&p, &other, &again)) return;
    FUZZ_CHECK(first.status == again.status, "status %d, then %d", (int)first.status, (int)again.status);
    for (size_t i = 0; i < REQUESTS; i++)
        FUZZ_CHECK(first.hash[i] == again.hash[i], "request %zu: different result with %s, %d threads, batch %d", i,
                   other.isa ? other.isa : "default kernels", other.threads, other.batch);
    FUZZ_CHECK(first.routed == again.routed || p.params.trace, "routing reported different rows");
}

static int was_verified(const moe_file *f, const moe_tensor_info *t) {
    for (size_t i = 0; i < moe_pieces_of(t); i++)
        if (!moe_piece_checked(f, t, i)) return 0;
    return 1;
}

/* Damage an unverified tensor of an open model. The run must fail or give the result of the undamaged model. */
static void use_damaged(unsigned char *image, size_t size, uint64_t *r) {
    plan p = { .damaged = 1 };
    outcome whole, o;
    moe_model *model[2] = { NULL, NULL };
    for (int i = 0; i < 2; i++) {
        const moe_model_params params = { .verify = 1 + i }; /* verify tensors on opening (1), then on first use (2) */
        if (moe_model_open_memory(image, size, &params, &model[i], NULL) != MOE_OK) return;
    }
    p.model = model[0];
    plan_session(&p, r);
    plan_requests(&p, r);
    p.stop_after = 0;
    const moe_file *file = &model[1]->file;
    const moe_tensor_info *t = &file->tensors[fuzz_below(r, file->n_tensors)];
    if (run_plan(&p, &p.params, &whole) && !was_verified(file, t)) {
        image[t->offset + fuzz_below(r, (size_t)t->bytes)] ^= (unsigned char)(1u << fuzz_below(r, 8));
        p.model = model[1];
        if (run_plan(&p, &p.params, &o) && whole.status == MOE_OK && o.status == MOE_OK)
            FUZZ_CHECK(memcmp(o.hash, whole.hash, sizeof o.hash) == 0, "damage in %.*s changed a result",
                       (int)t->name.length, t->name.data);
    }
    moe_model_close(model[1]);
    moe_model_close(model[0]);
}

/* ---- Writing ---- */

/* Return a path that is new, exists, is a link, is not writable, or is too long. */
static const char *some_path(uint64_t *r) {
    static char name[5000];
    switch (fuzz_below(r, 12)) {
    case 0: return fuzz_path("no/folder/model.bin");
    case 1: return fuzz_path("loop");
    case 2: return fuzz_path("link");
    case 3: return fuzz_path("far");
    case 4: return "/dev/full";
    case 5: return fuzz_folder;
    case 6: return fuzz_path("pipe");
    case 7: memset(name, 'x', sizeof name - 1); return fuzz_one_in(r, 2) ? name : name + sizeof name - 1 - 300;
    default: return fuzz_path("saved.bin");
    }
}

static void save(const moe_model *model, int verified, uint64_t *r) {
    static const float numbers[4] = { 1, 2, 3, 4 };
    const moe_vector_entry vector = { fuzz_one_in(r, 2) ? "output.bias" : "extra", numbers, 1 + fuzz_below(r, 4) };
    const moe_meta_entry entries[] = { { "general.name", MOE_META_TEXT, 0, 0, { "fuzzed", 6 } },
                                       { fuzz_one_in(r, 8) ? "Wrong" : "number", MOE_META_INT, 7, 0, { NULL, 0 } },
                                       { "real", MOE_META_REAL, 0, 0.5, { NULL, 0 } } };
    const moe_save_params params = { .type = (moe_type)fuzz_below(r, 6 - (fuzz_below(r, 8) > 0)),
                                     .experts = (moe_type)fuzz_below(r, 5),
                                     .entries = entries,
                                     .n_entries = fuzz_below(r, 4),
                                     .vectors = &vector,
                                     .n_vectors = (size_t)fuzz_one_in(r, 6) };
    const moe_model_params again = { .verify = 1, .copy = fuzz_one_in(r, 2) };
    const char *path = some_path(r);
    moe_model *saved = NULL;
    moe_error e = { MOE_OK, "", "" };
    const moe_status status = moe_model_save(model, path, &params, &e);
    if (status != MOE_OK) {
        check_error(status, &e);
        return;
    }
    /* Opening may fail if added vectors do not fit the layers, or if unverified scales are invalid. */
    FUZZ_CHECK(moe_model_open(path, &again, &saved, &e) == MOE_OK || params.n_vectors || !verified,
               "cannot open the saved file: %s", e.message);
    moe_model_close(saved);
}

static void fill_row(void *user, size_t tensor, size_t piece, size_t row, float *out, size_t cols) {
    for (size_t i = 0; i < cols; i++) out[i] = fuzz_one_in(user, 500) ? mm_float(user) : (float)(tensor + piece + row);
}

/* Write a model file of random, possibly invalid tensors. */
static void write_new(uint64_t *r) {
    static const char *const names[] = { "a", "b.c", "", "A", "experts", "x" };
    moe_tensor_spec specs[4];
    const moe_meta_entry entry = { "key", (moe_meta_kind)(1 + fuzz_below(r, 4)), 1, 0.5, { "text", 4 } };
    moe_write_params params = { .entries = &entry,
                                .n_entries = fuzz_below(r, 2),
                                .tensors = specs,
                                .n_tensors = fuzz_below(r, 5),
                                .fill = fill_row,
                                .user = r };
    moe_model *model = NULL;
    moe_error e = { MOE_OK, "", "" };
    for (size_t i = 0; i < 4; i++) {
        specs[i] = (moe_tensor_spec){ names[fuzz_below(r, fuzz_one_in(r, 4) ? 6 : 2)],
                                      (moe_type)fuzz_below(r, MOE_TYPE_COUNT + 1),
                                      (uint32_t)fuzz_below(r, 5),
                                      { 0 } };
        for (size_t d = 0; d < 3; d++)
            specs[i].dims[d] = fuzz_one_in(r, 20) ? (uint64_t)mm_integer(r) % 5000 : 1 + fuzz_below(r, 20);
        if (specs[i].n_dims == 1) specs[i].type = MOE_TYPE_F32;
    }
    if (moe_model_write(some_path(r), &params, &e) != MOE_OK) check_error(e.code, &e);
    else if (moe_model_open(fuzz_path("saved.bin"), NULL, &model, &e) == MOE_OK) moe_model_close(model);
}

/* ---- One input ---- */

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    uint64_t r = 1;
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    mw_image image;
    moe_model *model = NULL;
    (void)argc, (void)argv;
    fuzz_make_folder();
    if (symlink("loop", fuzz_path("loop")) != 0 || symlink("saved.bin", fuzz_path("link")) != 0 ||
        symlink(fuzz_path("link"), fuzz_path("far")) != 0 || mkfifo(fuzz_path("pipe"), 0600) != 0)
        abort();
    mw_int(m, "decoder.0.hidden", 24); /* make errors that mm_open must repair */
    mw_drop_tensor(m, "decoder.1.experts");
    mw_drop(m, "attention.kind");
    image = mm_open(m, &r);
    FUZZ_CHECK(moe_model_open_memory(image.data, image.bytes, NULL, &model, NULL) == MOE_OK,
               "update the messages of moe.c in model_mutator.h");
    moe_model_close(model);
    free(image.data);
    mw_free(m);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint64_t r = fuzz_hash(size, data, moe_min(size, 64));
    mw_heap heap = { .fail_at = 0 };
    const int verify = (int)fuzz_below(&r, 3) - 1;
    const moe_model_params params = { .allocator = { mw_heap_allocate, mw_heap_reallocate, mw_heap_release, &heap },
                                      .verify = verify,
                                      .copy = fuzz_one_in(&r, 2) };
    moe_model *model = NULL;
    moe_error e = { MOE_OK, "", "" };
    moe_status status;
    void *image = NULL;
    FUZZ_CHECK(moe_crc32(0, data, size) == ~moe_crc_portable(~0u, data, size), "different checksums of %zu bytes",
               size);
    if (posix_memalign(&image, MOE_ALIGN, size ? size : 1) != 0) abort();
    if (size) memcpy(image, data, size);
    if (fuzz_one_in(&r, 8)) {
        fuzz_write(fuzz_path("model.bin"), data, size);
        status = moe_model_open(fuzz_path("model.bin"), &params, &model, &e);
    } else {
        status = moe_model_open_memory(image, size, &params, &model, &e);
    }
    FUZZ_CHECK(heap.peak <= 16 * size + (1 << 20), "%zu bytes allocated to open %zu", heap.peak, size);
    if (status == MOE_OK) {
        inspect(model);
        for (int i = 0; i < 3; i++) use(model, &r);
        if (fuzz_one_in(&r, 4)) save(model, verify >= 0, &r);
        if (fuzz_one_in(&r, 64)) write_new(&r);
        moe_model_close(model);
        if (fuzz_one_in(&r, 4)) use_damaged(image, size, &r);
    } else {
        check_error(status, &e);
    }
    FUZZ_CHECK(!heap.blocks && !heap.wrong_sizes, "%zu blocks leak, %zu have wrong sizes", heap.blocks,
               heap.wrong_sizes);
    free(image);
    return 0;
}
