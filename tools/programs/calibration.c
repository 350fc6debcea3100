/* calibration.c - measure thresholds and loads; documented in calibration.h. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/calibration.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- 1. Levels ----------------------------------------------------------------------------------------- */

static void level_free(level *l) {
    free(l->rows), free(l->seen), free(l->first), free(l->count), free(l->kept), free(l->threshold), free(l->old);
}

static int level_allocate(level *l) {
    l->rows = calloc(l->blocks, sizeof *l->rows);
    l->seen = calloc(l->blocks, sizeof *l->seen);
    l->first = calloc(l->n + 1, sizeof *l->first);
    l->count = calloc(l->n, sizeof *l->count);
    l->threshold = calloc(l->n, sizeof *l->threshold);
    return l->rows && l->seen && l->first && l->count && l->threshold;
}

/* Return how many of `rows` rows an expert should get. */
static uint64_t places(const level *l, uint64_t rows) {
    uint64_t m = l->k * rows / l->compete;
    return m ? m : 1;
}

/* Allocate the heaps for a pass in which l->rows rows compete. */
static int level_begin(level *l) {
    size_t total = 0;
    for (size_t i = 0; i < l->n; i++) {
        l->first[i] = total;
        uint64_t rows = l->rows[i / l->compete], m = places(l, rows);
        total += (size_t)(m < rows ? m + 1 : 0); /* an expert that gets all rows needs no heap */
    }
    l->first[l->n] = total;
    memset(l->count, 0, l->n * sizeof *l->count);
    memset(l->seen, 0, l->blocks * sizeof *l->seen);
    free(l->kept);
    l->kept = malloc((total + 1) * sizeof *l->kept);
    return l->kept != NULL;
}

static void keep(level *l, size_t i, float p) {
    float *heap = l->kept + l->first[i];
    size_t capacity = l->first[i + 1] - l->first[i], at;
    if (l->count[i] < capacity) {
        for (at = l->count[i]++; at && heap[(at - 1) / 2] > p; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
        heap[at] = p;
        return;
    }
    if (!capacity || !(p > heap[0])) return;
    for (at = 0;;) {
        size_t child = 2 * at + 1;
        if (child + 1 < capacity && heap[child + 1] < heap[child]) child++;
        if (child >= capacity || !(heap[child] < p)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = p;
}

/* Add the probabilities of one row. Each block is a softmax, or all 0 if its group was not selected. */
static void level_see(level *l, const float *p) {
    for (size_t b = 0; b < l->blocks; b++) {
        const float *q = p + b * l->compete;
        size_t any = l->blocks == 1;
        for (size_t i = 0; !any && i < l->compete; i++) any = q[i] > 0.0f;
        if (!any) continue;
        l->seen[b]++;
        for (size_t i = 0; i < l->compete; i++) keep(l, b * l->compete + i, q[i]);
    }
}

/* Set the thresholds at the end of a pass. An expert that never competed keeps its old threshold; if it has none, it
 * gets the mean of the other experts' thresholds. */
static void level_end(level *l) {
    double sum = 0;
    size_t known = 0;
    l->unseen = 0;
    for (size_t i = 0; i < l->n; i++) {
        if (!l->rows[i / l->compete]) continue;
        l->threshold[i] = l->first[i + 1] > l->first[i] ? l->kept[l->first[i]] : 0;
        sum += (double)l->threshold[i];
        known++;
    }
    for (size_t i = 0; i < l->n; i++) {
        if (l->rows[i / l->compete]) continue;
        l->threshold[i] = l->old ? l->old[i] : known ? (float)(sum / (double)known) : 1.0f / (float)l->compete;
        l->unseen++;
    }
}

/* Return the tensor "STEM.END", or a tensor with an empty name if there is none. */
static moe_tensor_info find_tensor(const moe_model *m, const char *stem, const char *end) {
    char name[64];
    const size_t length = (size_t)snprintf(name, sizeof name, "%s.%s", stem, end), n = moe_model_tensor_count(m);
    for (size_t i = 0; i < n; i++) {
        const moe_tensor_info t = moe_model_tensor(m, i);
        if (t.name.length == length && memcmp(t.name.data, name, length) == 0) return t;
    }
    return moe_model_tensor(m, n);
}

/* Read the existing thresholds, a float vector, from the file. */
static moe_status read_old(int file, const moe_model *m, level *l, moe_error *e) {
    const moe_tensor_info t = find_tensor(m, l->name, "threshold");
    const size_t bytes = l->n * sizeof *l->old;
    if (!t.name.length) return MOE_OK;
    if (!(l->old = malloc(bytes))) return text_out_of_memory(e);
    if (t.bytes == bytes && pread(file, l->old, bytes, (off_t)t.offset) == (ssize_t)bytes) return MOE_OK;
    return text_fail(e, MOE_ERROR_IO, "", "cannot reread the thresholds of IN");
}

/* ---- 2. Mixtures --------------------------------------------------------------------------------------- */

static picks *picks_of(calibration *c, size_t line, size_t x) { return &c->picks[line * c->n_mixtures + x]; }

static int picks_add(picks *p, const moe_routing *r) {
    const uint32_t n = (uint32_t)r->n;
    return !text_add(&p->data, &p->length, &p->capacity, &n, 1, sizeof n, NULL) &&
           !text_add(&p->data, &p->length, &p->capacity, r->experts, r->n, sizeof n, NULL);
}

/* Count the experts of the next token in `p` that are also in `r`; both lists are ascending. */
static uint64_t picks_same(picks *p, const moe_routing *r) {
    uint64_t same = 0;
    if (p->read >= p->length) return 0;
    size_t n = p->data[p->read++], at = p->read;
    p->read += n;
    for (size_t i = 0; i < r->n; i++) {
        while (at < p->read && p->data[at] < r->experts[i]) at++;
        same += (uint64_t)(at < p->read && p->data[at] == r->experts[i]);
    }
    return same;
}

static int everybody(const calibrated *x) {
    return program_gate_is_dense(x->about.gate) && (!x->parent || program_gate_is_dense(x->about.parent_gate));
}

static void see_routing(void *user, const moe_routing *r) {
    calibration *c = user;
    size_t line = (size_t)((text_pair *)r->user - c->text.sample.pairs), i = 0;
    while (strcmp(c->mixtures[i].about.layer, r->layer) != 0) i++;
    calibrated *x = &c->mixtures[i];
    tally *t = &x->of[c->which];
    t->rows++;
    t->pairs += r->n;
    t->empty += (uint64_t)(r->empty != 0);
    for (size_t j = 0; j < r->n; j++) t->load[r->experts[j]]++;
    if (everybody(x)) x->same += c->which ? r->n : 0;
    else if (c->which) x->same += picks_same(picks_of(c, line, i), r);
    else if (!picks_add(picks_of(c, line, i), r)) text_out_of_memory(&c->text.trouble);
}

static void see_trace(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    calibration *c = user;
    for (size_t i = 0; i < c->n_levels; i++) {
        if (strcmp(c->levels[i].probabilities, name) != 0 || cols != c->levels[i].n) continue;
        for (size_t r = 0; r < rows; r++) level_see(&c->levels[i], data + r * stride);
    }
}

/* Add a gate and the number of experts that it selects. */
static moe_status add_level(calibration *c, int file, const calibrated *x, const char *part, size_t n, size_t compete,
                            size_t k, level **out, moe_error *e) {
    level *l = &c->levels[c->n_levels++];
    *l = (level){ .n = n, .compete = compete, .blocks = n / compete, .k = k };
    snprintf(l->name, sizeof l->name, "%s.%s", x->about.layer, part);
    snprintf(l->probabilities, sizeof l->probabilities, "%s.probabilities", l->name);
    snprintf(l->k_key, sizeof l->k_key, strcmp(part, "gate") == 0 ? "%s.k" : "%s.parent.k", x->about.layer);
    if (!k && c->k < 0)
        return text_fail(e, MOE_ERROR_ARGUMENT, l->name,
                         "a softmax gate does not define the number of experts: use --k");
    if (!k) l->k = (size_t)c->k;
    if (l->k > compete) l->k = compete;
    l->k_given = l->k != k;
    *out = l;
    if (!level_allocate(l)) return text_out_of_memory(e);
    return read_old(file, c->model, l, e);
}

static int is_wanted(const calibration *c, moe_gate gate) {
    return !c->loads && (!c->masks || gate == MOE_GATE_THRESHOLD);
}

int calibration_shares(const moe_model *m, const moe_mixture *x) {
    return find_tensor(m, x->layer, "experts").experts != 0;
}

moe_status calibration_find(calibration *c, int file, moe_error *e) {
    size_t n = moe_model_mixture_count(c->model);
    if (!n) return text_fail(e, MOE_ERROR_ARGUMENT, "", "the model has no mixtures to calibrate");
    c->mixtures = calloc(n, sizeof *c->mixtures);
    c->levels = calloc(2 * n, sizeof *c->levels);
    if (!c->mixtures || !c->levels) return text_out_of_memory(e);
    moe_status status = MOE_OK;
    for (; c->n_mixtures < n && !status; c->n_mixtures++) {
        calibrated *x = &c->mixtures[c->n_mixtures];
        x->about = moe_model_mixture(c->model, c->n_mixtures);
        const moe_mixture *a = &x->about;
        if (a->groups && is_wanted(c, a->parent_gate))
            status = add_level(c, file, x, "parent", a->groups, a->groups, a->parent_k, &x->parent, e);
        if (!status && is_wanted(c, a->gate))
            status = add_level(c, file, x, "gate", a->experts, a->groups ? a->experts / a->groups : a->experts, a->k,
                               &x->gate, e);
        for (int i = 0; i < 2 && !status; i++)
            if (!(x->of[i].load = calloc(a->experts, sizeof *x->of[i].load))) status = text_out_of_memory(e);
    }
    size_t shared = 0;
    for (size_t i = 0; i < c->n_mixtures && c->loads; i++)
        shared += (size_t)calibration_shares(c->model, &c->mixtures[i].about);
    if (!status && c->loads && !shared)
        status = text_fail(e, MOE_ERROR_ARGUMENT, "", "--loads: the model has no experts with separate matrices");
    return status;
}

void calibration_free(calibration *c) {
    for (size_t i = 0; c->picks && i < c->text.sample.count * c->n_mixtures; i++) free(c->picks[i].data);
    for (size_t i = 0; i < c->n_mixtures; i++) free(c->mixtures[i].of[0].load), free(c->mixtures[i].of[1].load);
    for (size_t i = 0; i < c->n_levels; i++) level_free(&c->levels[i]);
    free(c->picks), free(c->mixtures), free(c->levels);
    passes_free(&c->text);
}

/* ---- 3. Passes ----------------------------------------------------------------------------------------- */

/* Run all lines through a model. */
static moe_status run(calibration *c, const moe_model *model, const char *verb, int look, moe_error *e) {
    c->text.routing = see_routing;
    c->text.trace = look && c->n_levels ? see_trace : NULL;
    c->text.user = c;
    return passes_run(&c->text, model, verb, e);
}

/* Set the number of rows of a pass from the lengths of the lines, or to 0 if the number depends on a parent gate. */
static void assume_rows(calibration *c, size_t source_extra) {
    uint64_t encoder = 0, decoder = 0;
    for (size_t i = 0; i < c->text.sample.count; i++) {
        if (c->text.left_out[i]) continue;
        encoder += c->text.sample.pairs[i].source.length + source_extra;
        decoder += c->text.sample.pairs[i].target.length + 1;
    }
    for (size_t i = 0; i < c->n_levels; i++)
        if (c->levels[i].blocks == 1)
            c->levels[i].rows[0] = strncmp(c->levels[i].name, "encoder.", 8) == 0 ? encoder : decoder;
}

/* Run the collecting pass; repeat it if the assumed number of rows was wrong. */
static moe_status collect(calibration *c, moe_error *e) {
    for (int again = 1; again;) {
        for (size_t i = 0; i < c->n_levels; i++)
            if (!level_begin(&c->levels[i])) return text_out_of_memory(e);
        for (size_t i = 0; i < c->n_mixtures; i++) {
            tally *t = &c->mixtures[i].of[0];
            t->rows = t->pairs = t->empty = 0;
            memset(t->load, 0, c->mixtures[i].about.experts * sizeof *t->load);
        }
        for (size_t i = 0; i < c->text.sample.count * c->n_mixtures; i++) c->picks[i].length = 0;
        moe_status status = run(c, c->model, "measuring", 1, e);
        if (status) return status;
        again = 0;
        for (size_t i = 0; i < c->n_levels; i++) {
            level *l = &c->levels[i];
            again |= memcmp(l->rows, l->seen, l->blocks * sizeof *l->rows) != 0;
            memcpy(l->rows, l->seen, l->blocks * sizeof *l->rows);
        }
    }
    if (!c->mixtures[0].of[0].rows) return text_fail(e, MOE_ERROR_ARGUMENT, "", "the model cannot score any line");
    for (size_t i = 0; i < c->n_levels; i++) level_end(&c->levels[i]);
    return MOE_OK;
}

moe_status calibration_measure(calibration *c, size_t source_extra, moe_error *e) {
    c->picks = calloc(c->text.sample.count * c->n_mixtures + 1, sizeof *c->picks);
    if (!c->picks) return text_out_of_memory(e);
    assume_rows(c, source_extra);
    return collect(c, e);
}

moe_status calibration_compare(calibration *c, const moe_model *out, moe_error *e) {
    c->which = 1;
    return run(c, out, "comparing", 0, e);
}

/* ---- 4. Saving ----------------------------------------------------------------------------------------- */

/* Record the loads of mixtures with experts that can be distributed. */
static moe_status save_loads(const calibration *c, const char *path, moe_error *e) {
    size_t experts = 0, at = 0, n = 0;
    for (size_t i = 0; i < c->n_mixtures; i++) experts += c->mixtures[i].about.experts;
    moe_vector_entry *vectors = calloc(c->n_mixtures + 1, sizeof *vectors);
    char (*names)[56] = calloc(c->n_mixtures + 1, sizeof *names);
    float *loads = calloc(experts + 1, sizeof *loads);
    const int memory = vectors && names && loads;
    for (size_t i = 0; memory && i < c->n_mixtures; i++) {
        const calibrated *x = &c->mixtures[i];
        if (!calibration_shares(c->model, &x->about)) continue;
        snprintf(names[i], sizeof names[i], "%s.experts.load", x->about.layer);
        vectors[n++] = (moe_vector_entry){ names[i], loads + at, x->about.experts };
        for (size_t j = 0; j < x->about.experts; j++) loads[at++] = (float)x->of[0].load[j];
    }
    const moe_save_params params = { .type = MOE_TYPE_KEEP,
                                     .experts = MOE_TYPE_KEEP,
                                     .vectors = vectors,
                                     .n_vectors = n };
    const moe_status status = memory ? moe_model_save(c->model, path, &params, e) : text_out_of_memory(e);
    free(vectors), free(names), free(loads);
    return status;
}

moe_status calibration_save(const calibration *c, const char *path, moe_error *e) {
    if (c->loads) return save_loads(c, path, e);
    const moe_span word = { "threshold", 9 };
    moe_meta_entry *entries = calloc(2 * c->n_levels, sizeof *entries);
    moe_vector_entry *vectors = calloc(c->n_levels, sizeof *vectors);
    char (*names)[2][56] = calloc(c->n_levels, sizeof *names);
    moe_save_params params = { .type = MOE_TYPE_KEEP,
                               .experts = MOE_TYPE_KEEP,
                               .entries = entries,
                               .vectors = vectors };
    moe_status status = entries && vectors && names ? MOE_OK : text_out_of_memory(e);
    for (size_t i = 0; i < c->n_levels && !status; i++) {
        const level *l = &c->levels[i];
        /* the metadata keys are "encoder.2.gate" and, for groups, "encoder.2.parent.gate" */
        snprintf(names[i][0], sizeof names[i][0], strcmp(strrchr(l->name, '.'), ".gate") == 0 ? "%s" : "%s.gate",
                 l->name);
        snprintf(names[i][1], sizeof names[i][1], "%s.threshold", l->name);
        entries[params.n_entries++] = (moe_meta_entry){ .key = names[i][0], .kind = MOE_META_TEXT, .text = word };
        if (l->k_given)
            entries[params.n_entries++] =
                (moe_meta_entry){ .key = l->k_key, .kind = MOE_META_INT, .integer = (int64_t)l->k };
        vectors[params.n_vectors++] = (moe_vector_entry){ names[i][1], l->threshold, l->n };
    }
    if (!status) status = moe_model_save(c->model, path, &params, e);
    free(entries), free(vectors), free(names);
    return status;
}
