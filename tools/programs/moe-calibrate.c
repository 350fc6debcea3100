/* moe-calibrate - thresholds for the gates of a model, from a text: see usage() below, or --help.
 *
 * Contents
 *   1. Options    the command line
 *   2. Levels     every gate with its new thresholds, and the largest probabilities that decide them
 *   3. Mixtures   selections before and after
 *   4. Passes     the text through the model
 *   5. Saving     OUT
 *   6. Table      the changes
 *   7. Main
 *
 * The closed form. An expert that competes with n-1 others for k places should get m = k X / n of X rows (rounded down,
 * at least 1): the rows with its m largest probabilities. These lie above its (m+1)-th largest probability, which
 * therefore is its threshold, and eq 18 becomes eq 19. Where the m-th and the (m+1)-th are equal, neither is selected.
 * With two levels each group has an X of its own: the rows that selected the group.
 *
 * Memory. Every expert keeps m + 1 probabilities: k X + n numbers for a gate, however many experts there are. m must be
 * known before. With one level the lengths of the lines tell the rows; with groups a pass of its own counts them.
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "moe.h"
#include "tools/programs/program.h"
#include "tools/text/text.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ==== 1. Options ======================================================================================== */

typedef struct options {
    program_common common;
    const char *text;
    int k; /* -1: not given */
} options;

static void usage(FILE *to) {
    fputs("Usage: moe-calibrate -m IN -o OUT --text FILE [OPTION]...\n"
          "Writes the model IN, which may have any gates, to OUT with threshold gates.\n"
          "Each mixture gets thresholds that distribute the tokens of a text equally over\n"
          "its experts, k of n experts per token on average. All else stays as it is.\n"
          "\n"
          "  -m, --model IN            the model: a translation model or a language model\n"
          "  -o, --output OUT          the file to write; it appears whole or not at all\n"
          "      --text FILE           the text to measure with; a few thousand lines are\n"
          "                            enough. For a translation model as for\n"
          "                            moe-quantize --measure: source language TAB target\n"
          "                            language TAB source TAB target. If the target is\n"
          "                            missing, IN translates first. For a language\n"
          "                            model: lines of text\n"
          "      --k N                 experts per token, for softmax gates, which have\n"
          "                            no such number (with two levels: per level of this\n"
          "                            kind)\n"
          "      --ids                 texts are token ids with spaces between them\n"
          "      --pretokenized        texts are pieces of the model's vocabulary with\n"
          "                            spaces between them\n"
          "      --max-len N           leave out lines with more tokens than this\n"
          "  -v, --verbose             report kernels, GPU and memory on standard error\n"
          "  -q, --quiet               no progress and no table\n"
          "\n",
          to);
    fputs(PROGRAM_HELP_SPEED("lines measured"), to);
    fputs("\n"
          "IN is measured with its own gates; its decoder reads the given targets. The\n"
          "threshold of an expert is the (m+1)-th largest of its probabilities, where m = k\n"
          "x tokens / n. Inside a group only the tokens that selected the group count.\n"
          "The table on standard output compares OUT with IN on the same text: experts\n"
          "per token, empty masks, variation of the experts' loads, and the share of\n"
          "equal (token, expert) pairs.\n"
          "\n"
          "OUT has neither the golden sentences nor the measured quality of IN, which are\n"
          "not valid for it. tools/convert/convert.py --golden and moe-quantize --measure\n"
          "make new ones. Memory in addition to the model: 8 bytes per selected (token,\n"
          "expert) pair.\n"
          "\n"
          "Exit status: 0 done, 2 usage, 3 a file is not a model or memory ran out, 4 a\n"
          "file could not be read or written.\n",
          to);
}

static int parse_options(int argc, char **argv, options *o) {
    enum { TEXT = 256, K };
    static const struct option known[] = { PROGRAM_OPTIONS,
                                           { "text", required_argument, NULL, TEXT },
                                           { "k", required_argument, NULL, K },
                                           { "ids", no_argument, NULL, PROGRAM_IDS },
                                           { "pretokenized", no_argument, NULL, PROGRAM_PRETOKENIZED },
                                           { "max-len", required_argument, NULL, PROGRAM_MAX_LEN },
                                           { NULL, 0, NULL, 0 } };
    *o = (options){ .common = { .usage = usage, .threads = -1, .batch = -1, .max_len = -1 }, .k = -1 };
    int c, status = -1;
    uint64_t given = 0;
    while (status < 0 && (c = program_next_option(argc, argv, PROGRAM_SHORT, known, NULL, &given)) != -1) {
        switch (c) {
        case TEXT: o->text = optarg; break;
        case K: status = program_int("k", optarg, 1, 1 << 20, &o->k); break;
        default: status = program_option(&o->common, c); break;
        }
    }
    if (status >= 0) return status;
    if (optind < argc) return program_usage_error("'%s' is one word too many", argv[optind]);
    if (!o->common.model || !o->common.output || !o->text)
        return program_usage_error("expects -m IN, -o OUT and --text FILE");
    if (o->common.ids && o->common.pretokenized)
        return program_usage_error("--ids and --pretokenized do not go together");
    if (strcmp(o->common.model, o->common.output) == 0 || program_same_file(o->common.model, o->common.output))
        return program_usage_error("%s and %s are the same file; write to another name", o->common.model,
                                   o->common.output);
    return -1;
}

static moe_status fail(moe_error *e, moe_status code, const char *message) {
    *e = (moe_error){ .code = code };
    snprintf(e->message, sizeof e->message, "%s", message);
    return code;
}

static moe_status no_memory(moe_error *e) { return fail(e, MOE_ERROR_MEMORY, "out of memory"); }

/* ==== 2. Levels ========================================================================================= */

/* One gate: that over the experts of a mixture, or that over its groups. */
typedef struct level {
    char name[40];          /* "encoder.2.gate", "encoder.2.parent": of the threshold tensor without its end */
    char probabilities[56]; /* as the trace calls them */
    char k_key[40];         /* "encoder.2.k", "encoder.2.parent.k" */
    size_t n, compete, k;   /* in all; of which so many compete, `blocks` times; wanted */
    size_t blocks;
    int k_given;           /* the file does not say k, or too much: it must be written */
    uint64_t *rows, *seen; /* [blocks] that competed: as assumed, and in this pass */
    size_t *first;         /* [n + 1] */
    size_t *count;         /* [n] */
    float *kept;           /* of expert i the m + 1 largest at first[i]: a heap, the least one on top */
    float *threshold;      /* [n] */
    float *old;            /* [n] or NULL */
    size_t unseen;         /* experts that never competed */
} level;

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

/* How many of `rows` rows an expert should get. */
static uint64_t places(const level *l, uint64_t rows) {
    uint64_t m = l->k * rows / l->compete;
    return m ? m : 1;
}

/* Ready for a pass over l->rows. */
static int level_begin(level *l) {
    size_t total = 0;
    for (size_t i = 0; i < l->n; i++) {
        l->first[i] = total;
        uint64_t rows = l->rows[i / l->compete], m = places(l, rows);
        total += (size_t)(m < rows ? m + 1 : 0); /* else all of them are selected, and nothing has to be kept */
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

/* Probabilities of one row: of each block 0 everywhere, or a softmax, of which some are not 0. */
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

/* Set the thresholds that the pass found. An expert that never competed keeps its own, or gets the mean of the others'
 * known so far. */
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

/* The thresholds that the file has: a vector of floats where its directory says. */
static moe_status read_old(const char *path, const moe_model *m, level *l, moe_error *e) {
    char name[64];
    snprintf(name, sizeof name, "%s.threshold", l->name);
    for (size_t i = 0; i < moe_model_tensor_count(m); i++) {
        moe_tensor_info t = moe_model_tensor(m, i);
        if (t.name.length != strlen(name) || memcmp(t.name.data, name, t.name.length) != 0) continue;
        size_t bytes = l->n * sizeof *l->old;
        if (!(l->old = malloc(bytes))) return no_memory(e);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t got = fd < 0 ? -1 : pread(fd, l->old, bytes, (off_t)t.offset);
        if (fd >= 0) close(fd);
        if (t.bytes != bytes || got != (ssize_t)bytes)
            return fail(e, MOE_ERROR_IO, "the thresholds of IN cannot be read again");
    }
    return MOE_OK;
}

/* ==== 3. Mixtures ======================================================================================= */

/* The experts of one line in one mixture: for each token, how many and which. */
typedef struct picks {
    uint32_t *data;
    size_t length, capacity, read;
} picks;

typedef struct tally {
    uint64_t rows, pairs, empty;
    uint64_t *load; /* [experts] */
} tally;

typedef struct mixture {
    moe_mixture about;
    level *gate, *parent; /* NULL: no groups */
    tally of[2];          /* IN, OUT */
    uint64_t same;        /* pairs of OUT that IN has too */
} mixture;

typedef struct calibration {
    const options *options;
    const moe_model *model;
    text_sample sample;
    char *left_out; /* [lines] the model cannot score them */
    mixture *mixtures;
    size_t n_mixtures;
    level *levels;
    size_t n_levels;
    picks *picks; /* [lines, mixtures] of IN, but for softmax gates, which pick everybody */
    const char *verb;
    int which; /* 0 IN, 1 OUT */
    int translating;
    size_t next;
    moe_error trouble;
} calibration;

static picks *picks_of(calibration *c, size_t line, size_t x) { return &c->picks[line * c->n_mixtures + x]; }

static int picks_add(picks *p, const moe_routing *r) {
    if (p->length + r->n + 1 > p->capacity) {
        size_t more = p->capacity * 2 + r->n + 16;
        uint32_t *grown = realloc(p->data, more * sizeof *grown);
        if (!grown) return 0;
        p->data = grown;
        p->capacity = more;
    }
    p->data[p->length++] = (uint32_t)r->n;
    if (r->n) memcpy(p->data + p->length, r->experts, r->n * sizeof *r->experts);
    p->length += r->n;
    return 1;
}

/* How many experts of the next token are in both; both lists ascend. */
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

static int everybody(const mixture *x) {
    return program_gate_is_dense(x->about.gate) && (!x->parent || program_gate_is_dense(x->about.parent_gate));
}

static void see_routing(void *user, const moe_routing *r) {
    calibration *c = user;
    size_t line = (size_t)((text_pair *)r->user - c->sample.pairs), i = 0;
    while (strcmp(c->mixtures[i].about.layer, r->layer) != 0) i++;
    mixture *x = &c->mixtures[i];
    tally *t = &x->of[c->which];
    t->rows++;
    t->pairs += r->n;
    t->empty += (uint64_t)(r->empty != 0);
    for (size_t j = 0; j < r->n; j++) t->load[r->experts[j]]++;
    if (everybody(x)) x->same += c->which ? r->n : 0;
    else if (c->which) x->same += picks_same(picks_of(c, line, i), r);
    else if (!picks_add(picks_of(c, line, i), r)) no_memory(&c->trouble);
}

static void see_trace(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    calibration *c = user;
    for (size_t i = 0; i < c->n_levels; i++) {
        if (strcmp(c->levels[i].probabilities, name) != 0 || cols != c->levels[i].n) continue;
        for (size_t r = 0; r < rows; r++) level_see(&c->levels[i], data + r * stride);
    }
}

/* Fill in a level and the number that it wants. */
static moe_status add_level(calibration *c, const mixture *x, const char *part, size_t n, size_t compete, size_t k,
                            level **out, moe_error *e) {
    level *l = &c->levels[c->n_levels++];
    *l = (level){ .n = n, .compete = compete, .blocks = n / compete, .k = k };
    snprintf(l->name, sizeof l->name, "%s.%s", x->about.layer, part);
    snprintf(l->probabilities, sizeof l->probabilities, "%s.probabilities", l->name);
    snprintf(l->k_key, sizeof l->k_key, strcmp(part, "gate") == 0 ? "%s.k" : "%s.parent.k", x->about.layer);
    if (!k && c->options->k < 0) {
        e->code = MOE_ERROR_ARGUMENT;
        snprintf(e->where, sizeof e->where, "%s", l->name);
        snprintf(e->message, sizeof e->message,
                 "a softmax gate that does not say how many experts are wanted; say it with --k");
        return e->code;
    }
    if (!k) l->k = (size_t)c->options->k;
    if (l->k > compete) l->k = compete;
    l->k_given = l->k != k;
    *out = l;
    if (!level_allocate(l)) return no_memory(e);
    return read_old(c->options->common.model, c->model, l, e);
}

static moe_status find_mixtures(calibration *c, moe_error *e) {
    size_t n = moe_model_mixture_count(c->model);
    if (!n) return fail(e, MOE_ERROR_ARGUMENT, "it has no mixtures, so there is nothing to calibrate");
    c->mixtures = calloc(n, sizeof *c->mixtures);
    c->levels = calloc(2 * n, sizeof *c->levels);
    if (!c->mixtures || !c->levels) return no_memory(e);
    moe_status status = MOE_OK;
    for (; c->n_mixtures < n && !status; c->n_mixtures++) {
        mixture *x = &c->mixtures[c->n_mixtures];
        x->about = moe_model_mixture(c->model, c->n_mixtures);
        const moe_mixture *a = &x->about;
        if (a->groups) status = add_level(c, x, "parent", a->groups, a->groups, a->parent_k, &x->parent, e);
        if (!status)
            status =
                add_level(c, x, "gate", a->experts, a->groups ? a->experts / a->groups : a->experts, a->k, &x->gate, e);
        for (int i = 0; i < 2 && !status; i++)
            if (!(x->of[i].load = calloc(a->experts, sizeof *x->of[i].load))) status = no_memory(e);
    }
    return status;
}

static void free_calibration(calibration *c) {
    for (size_t i = 0; c->picks && i < c->sample.count * c->n_mixtures; i++) free(c->picks[i].data);
    for (size_t i = 0; i < c->n_mixtures; i++) free(c->mixtures[i].of[0].load), free(c->mixtures[i].of[1].load);
    for (size_t i = 0; i < c->n_levels; i++) level_free(&c->levels[i]);
    free(c->picks), free(c->mixtures), free(c->levels), free(c->left_out);
    text_sample_free(&c->sample);
}

/* ==== 4. Passes ========================================================================================= */

static int pull(void *user, int wait, moe_request *request) {
    static const int32_t nothing[1] = { 0 };
    calibration *c = user;
    (void)wait;
    if (c->trouble.code) return MOE_PULL_CANCEL;
    while (c->next < c->sample.count &&
           (c->left_out[c->next] || (c->translating && c->sample.pairs[c->next].has_target)))
        c->next++;
    if (c->next == c->sample.count) return MOE_PULL_END;
    text_pair *p = &c->sample.pairs[c->next++];
    request->source = p->source.data ? p->source.data : nothing;
    request->n_source = p->source.length;
    request->target_tag = p->tag;
    request->user = p;
    if (!c->translating) {
        request->target = p->target.data ? p->target.data : nothing;
        request->n_target = p->target.length;
    }
    if (!c->options->common.quiet && isatty(STDERR_FILENO) && c->next % 16 == 0)
        fprintf(stderr, "\r%s: %zu of %zu\033[K", c->verb, c->next, c->sample.count);
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *result) {
    calibration *c = user;
    text_pair *p = result->user;
    if (result->status == MOE_ERROR_LIMIT || result->status == MOE_ERROR_ARGUMENT) c->left_out[p - c->sample.pairs] = 1;
    else if (result->status) fail(&c->trouble, result->status, result->message);
    else if (c->translating)
        text_ids_set(&p->target, result->hypotheses[0].ids, result->hypotheses[0].n_ids, &c->trouble);
}

/* All lines through a model. */
static moe_status pass(calibration *c, const moe_model *model, const char *verb, int look, moe_error *e) {
    moe_session_params p = moe_session_params_default(model);
    moe_session *session;
    program_apply(&c->options->common, &p);
    p.device = "cpu";
    if (!c->translating) {
        p.beam = p.nbest = 1;
        p.max_target++; /* a translation may have been cut where it was as long as can be */
        p.rules = MOE_RULES_PAPER;
        p.prune = p.coverage_penalty = 0;
        p.routing = see_routing;
        p.routing_user = c;
        p.trace = look ? see_trace : NULL;
        p.trace_user = c;
    }
    moe_status status = moe_session_new(model, &p, &session, e);
    if (status) return status;
    c->next = 0;
    c->verb = verb;
    status = moe_translate(session, pull, done, c, e);
    if (!c->options->common.quiet && isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
    moe_session_free(session);
    if (c->trouble.code) *e = c->trouble;
    return c->trouble.code ? c->trouble.code : status;
}

/* How many rows a pass will have, from the lengths of the lines; 0 where a parent gate decides. */
static void assume_rows(calibration *c, size_t source_extra) {
    uint64_t encoder = 0, decoder = 0;
    for (size_t i = 0; i < c->sample.count; i++) {
        if (c->left_out[i]) continue;
        encoder += c->sample.pairs[i].source.length + source_extra;
        decoder += c->sample.pairs[i].target.length + 1;
    }
    for (size_t i = 0; i < c->n_levels; i++)
        if (c->levels[i].blocks == 1)
            c->levels[i].rows[0] = strncmp(c->levels[i].name, "encoder.", 8) == 0 ? encoder : decoder;
}

/* Run the pass that collects; once more if the number of rows was not the assumed one, which is known then. */
static moe_status collect(calibration *c, moe_error *e) {
    for (int again = 1; again;) {
        for (size_t i = 0; i < c->n_levels; i++)
            if (!level_begin(&c->levels[i])) return no_memory(e);
        for (size_t i = 0; i < c->n_mixtures; i++) {
            tally *t = &c->mixtures[i].of[0];
            t->rows = t->pairs = t->empty = 0;
            memset(t->load, 0, c->mixtures[i].about.experts * sizeof *t->load);
        }
        for (size_t i = 0; i < c->sample.count * c->n_mixtures; i++) c->picks[i].length = 0;
        moe_status status = pass(c, c->model, "measuring", 1, e);
        if (status) return status;
        again = 0;
        for (size_t i = 0; i < c->n_levels; i++) {
            level *l = &c->levels[i];
            again |= memcmp(l->rows, l->seen, l->blocks * sizeof *l->rows) != 0;
            memcpy(l->rows, l->seen, l->blocks * sizeof *l->rows);
        }
    }
    if (!c->mixtures[0].of[0].rows) return fail(e, MOE_ERROR_ARGUMENT, "the model can score none of the lines");
    for (size_t i = 0; i < c->n_levels; i++) level_end(&c->levels[i]);
    return MOE_OK;
}

static moe_status measure(calibration *c, const text_front *front, moe_error *e) {
    const program_common *o = &c->options->common;
    const text_options how = { .ids = o->ids, .pretokenized = o->pretokenized };
    moe_status status = text_sample_read(front, &how, c->options->text, 0, &c->sample, e);
    if (status) return status;
    c->left_out = calloc(c->sample.count, 1);
    c->picks = calloc(c->sample.count * c->n_mixtures, sizeof *c->picks);
    if (!c->left_out || !c->picks) return no_memory(e);
    for (size_t i = 0; i < c->sample.count; i++) c->translating |= !c->sample.pairs[i].has_target;
    if (c->translating) status = pass(c, c->model, "translating", 0, e);
    c->translating = 0;
    if (status) return status;
    assume_rows(c, front->source_extra);
    return collect(c, e);
}

/* ==== 5. Saving ========================================================================================= */

/* The one type that all matrices have, or all experts; a file with several is not written by any of the programs. */
static moe_status types_of(const moe_model *m, moe_save_params *params, moe_error *e) {
    int known[2] = { 0, 0 };
    for (size_t i = 0; i < moe_model_tensor_count(m); i++) {
        moe_tensor_info t = moe_model_tensor(m, i);
        moe_type *type = t.experts ? &params->experts : &params->type;
        char name[256];
        snprintf(name, sizeof name, "%.*s", (int)(t.name.length < 255 ? t.name.length : 255), t.name.data);
        if (t.n_dims == 1 || strstr(name, ".gate.") || strstr(name, ".parent.")) continue;
        if (known[t.experts > 0]++ && *type != t.type)
            return fail(e, MOE_ERROR_UNSUPPORTED,
                        "its matrices have several number formats; let moe-quantize write it in one");
        *type = t.type;
    }
    return MOE_OK;
}

static moe_status save(calibration *c, moe_error *e) {
    static const char threshold[] = "threshold";
    const moe_span word = { threshold, sizeof threshold - 1 };
    moe_meta_entry *entries = calloc(2 * c->n_levels, sizeof *entries);
    moe_vector_entry *vectors = calloc(c->n_levels, sizeof *vectors);
    char (*names)[2][56] = calloc(c->n_levels, sizeof *names);
    moe_save_params params = { .entries = entries, .vectors = vectors };
    moe_status status = entries && vectors && names ? types_of(c->model, &params, e) : no_memory(e);
    for (size_t i = 0; i < c->n_levels && !status; i++) {
        const level *l = &c->levels[i];
        const char *stem =
            strrchr(l->name, '.'); /* "encoder.2.gate" is a key, "encoder.2.parent" is "encoder.2.parent.gate" */
        snprintf(names[i][0], sizeof names[i][0], strcmp(stem, ".gate") == 0 ? "%s" : "%s.gate", l->name);
        snprintf(names[i][1], sizeof names[i][1], "%s.threshold", l->name);
        entries[params.n_entries++] = (moe_meta_entry){ .key = names[i][0], .kind = MOE_META_TEXT, .text = word };
        if (l->k_given)
            entries[params.n_entries++] =
                (moe_meta_entry){ .key = l->k_key, .kind = MOE_META_INT, .integer = (int64_t)l->k };
        vectors[params.n_vectors++] = (moe_vector_entry){ names[i][1], l->threshold, l->n };
    }
    if (!status) status = moe_model_save(c->model, c->options->common.output, &params, e);
    free(entries), free(vectors), free(names);
    return status;
}

/* ==== 6. Table ========================================================================================== */

static double variation(const tally *t, size_t n) {
    double sum = 0, square = 0;
    for (size_t i = 0; i < n; i++) sum += (double)t->load[i];
    double mean = sum / (double)n;
    for (size_t i = 0; i < n; i++) square += ((double)t->load[i] - mean) * ((double)t->load[i] - mean);
    return mean > 0 ? sqrt(square / (double)n) / mean : 0;
}

static double share(uint64_t part, uint64_t of) { return of ? (double)part / (double)of : 0; }

static void print_level(const level *l) {
    double sum = 0, change = 0;
    float low = l->threshold[0], high = low;
    for (size_t i = 0; i < l->n; i++) {
        sum += (double)l->threshold[i];
        if (l->threshold[i] < low) low = l->threshold[i];
        if (l->threshold[i] > high) high = l->threshold[i];
        if (l->old) change += fabs((double)l->threshold[i] - (double)l->old[i]);
    }
    printf("%-18s thresholds %.4g to %.4g, mean %.4g", l->name, (double)low, (double)high, sum / (double)l->n);
    if (l->old) printf("; mean absolute difference to those before %.4g", change / (double)l->n);
    if (l->unseen) printf("; %zu of %zu never competed", l->unseen, l->n);
    putchar('\n');
}

static void print_table(const calibration *c) {
    size_t left_out = 0;
    for (size_t i = 0; i < c->sample.count; i++) left_out += (size_t)c->left_out[i];
    printf("%zu lines", c->sample.count - left_out);
    if (left_out) printf(", %zu more left out that the model cannot score", left_out);
    printf("; before -> after\n\n%-12s %9s %7s %18s %20s %18s %12s\n", "mixture", "tokens", "wanted", "experts a token",
           "empty masks %", "CV(load)", "same pairs");
    for (size_t i = 0; i < c->n_mixtures; i++) {
        const mixture *x = &c->mixtures[i];
        const tally *a = &x->of[0], *b = &x->of[1];
        printf("%-12s %9llu %7zu %7.3f -> %7.3f %8.3f -> %8.3f %7.3f -> %7.3f %10.2f %%\n", x->about.layer,
               (unsigned long long)a->rows, x->gate->k * (x->parent ? x->parent->k : 1), share(a->pairs, a->rows),
               share(b->pairs, b->rows), 100 * share(a->empty, a->rows), 100 * share(b->empty, b->rows),
               variation(a, x->about.experts), variation(b, x->about.experts), 100 * share(x->same, a->pairs));
    }
    putchar('\n');
    for (size_t i = 0; i < c->n_levels; i++) print_level(&c->levels[i]);
}

/* ==== 7. Main =========================================================================================== */

/* Run OUT over the same text. */
static moe_status measure_out(calibration *c, moe_error *e) {
    moe_model *after;
    moe_status status =
        moe_model_open(c->options->common.output, &(moe_model_params){ .copy = c->options->common.no_mmap }, &after, e);
    if (status) return status;
    c->which = 1;
    status = pass(c, after, "comparing", 0, e);
    moe_model_close(after);
    return status;
}

int main(int argc, char **argv) {
    options o;
    int status = program_begin("moe-calibrate");
    if (status < 0) status = parse_options(argc, argv, &o);
    if (status >= 0) return status;

    /* The weights are about to be saved under fresh checksums, so damage must be found now or never. */
    const moe_model_params params = { .verify = o.common.no_verify ? -1 : 1, .copy = o.common.no_mmap };
    text_front front;
    moe_error e = { .code = MOE_OK };
    if (text_open(o.common.model, TEXT_IDS_ONLY, &params, &front, &e))
        return program_file_error(o.common.model, &e), EXIT_MODEL;
    calibration c = { .options = &o, .model = front.model };
    const char *file = o.common.model;
    moe_status got = MOE_OK;
    status = EXIT_DONE;
    if (moe_model_get_kind(front.model) == MOE_MODEL_CLASSIFIER) {
        program_complain("%s is a classifier, which reads no text: moe-calibrate cannot measure it", file);
        status = EXIT_USAGE;
    } else {
        got = text_open_tokeniser(&front, program_level(&o.common), &e);
        if (!got) got = find_mixtures(&c, &e);
        if (!got) file = o.text, got = measure(&c, &front, &e);
    }
    if (!got && !status) file = o.common.output, got = save(&c, &e);
    if (!got && !status) got = measure_out(&c, &e);
    if (got) status = program_file_error(file, &e);
    if (got == MOE_ERROR_ARGUMENT && file == o.common.model) status = EXIT_USAGE; /* nothing is wrong with it */
    if (!status && !o.common.quiet) print_table(&c);
    if (!status) status = program_printed();
    free_calibration(&c);
    text_close(&front);
    return status;
}
