/* moe-quantize - write a model in other number formats, and measure what that costs: see usage() below, or --help.
 *
 * Contents
 *   1. Measure   log-probabilities and translations of a sample by one model
 *   2. Main
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "moe.h"
#include "tools/programs/program.h"
#include "tools/text/text.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void usage(FILE *to) {
    fputs("Usage: moe-quantize [OPTION]... IN OUT TYPE\n"
          "Writes the model IN to OUT with its matrices in another number format.\n"
          "\n"
          "  TYPE: f32   4 bytes a weight\n"
          "        f16   2 bytes, 11 bits of precision\n"
          "        bf16  2 bytes, 8 bits of precision and the range of f32\n"
          "        q8    1 byte, one scale per row\n"
          "        q4    a little over half a byte, one scale for every 32 weights\n"
          "\n"
          "      --experts TYPE   another type for the experts, which have most weights.\n"
          "                       Usual is --experts q4 with q8 for all else, which loses\n"
          "                       hardly any quality\n"
          "      --measure FILE   compare OUT with IN on a sample and write the loss into\n"
          "                       OUT, where moe-info shows it. Lines of FILE: source\n"
          "                       language TAB target language TAB source TAB target; for a\n"
          "                       language model only text\n"
          "      --ids            texts of FILE are token ids\n"
          "  -h, --help           this text\n"
          "  -V, --version        version\n"
          "\n"
          "Gates, thresholds and biases stay f32. OUT appears whole under its name or not\n"
          "at all. Rounding cannot be undone, so quantise from the f32 file. If a type\n"
          "changes, OUT does not have the golden sentences of IN; tools/convert/convert.py\n"
          "--golden makes new ones.\n"
          "\n"
          "Exit status: 0 done, 2 usage, 3 IN is missing or not a model, or memory ran\n"
          "out, 4 another file could not be read or written.\n",
          to);
}

/* ==== 1. Measure ======================================================================================== */

/* The outcome of a pair of the sample. */
typedef struct verdict {
    int left_out;      /* too long, or the target holds a piece that the model cannot generate */
    double logprob[2]; /* of the target by IN and OUT */
    text_ids output[2];
} verdict;

typedef struct sample {
    text_sample text;
    verdict *verdicts; /* [text.count] */
    int translates;    /* 1: the model translates. 0: a language model, which scores only */
} sample;

static moe_status read_sample(const char *path, int ids, const text_front *front, sample *s, moe_error *e) {
    moe_status status = text_sample_read(front, &(text_options){ .ids = ids }, path, 1, &s->text, e);
    if (status) return status;
    s->translates = moe_model_get_kind(front->model) == MOE_MODEL_TRANSLATION;
    s->verdicts = calloc(s->text.count, sizeof *s->verdicts);
    if (s->verdicts) return MOE_OK;
    *e = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "no memory for the sample" };
    return e->code;
}

static void free_sample(sample *s) {
    for (size_t i = 0; s->verdicts && i < s->text.count; i++)
        for (int k = 0; k < 2; k++) text_ids_free(&s->verdicts[i].output[k]);
    free(s->verdicts);
    text_sample_free(&s->text);
}

typedef struct walk {
    sample *s;
    size_t next;
    int which;   /* 0 IN, 1 OUT */
    int scoring; /* else translating */
    int show;
    const char *complaint;
} walk;

static int pull(void *user, int wait, moe_request *request) {
    static const int32_t nothing[1] = { 0 }; /* ids of an empty text */
    walk *w = user;
    (void)wait;
    if (w->complaint) return MOE_PULL_CANCEL;
    if (w->next == w->s->text.count) return MOE_PULL_END;
    const text_pair *p = &w->s->text.pairs[w->next];
    request->user = &w->s->verdicts[w->next++];
    request->source = p->source.data;
    request->n_source = p->source.length;
    if (w->scoring) {
        request->target = p->target.data ? p->target.data : nothing;
        request->n_target = p->target.length;
    }
    request->target_tag = p->tag;
    if (w->show && w->next % 16 == 0)
        fprintf(stderr, "\r%s: %s %zu of %zu ", w->which ? "after" : "before", w->scoring ? "scoring" : "translating",
                w->next, w->s->text.count);
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *result) {
    walk *w = user;
    verdict *p = result->user;
    moe_error e;
    if (result->status == MOE_ERROR_LIMIT || result->status == MOE_ERROR_ARGUMENT) {
        p->left_out = 1;
        return;
    }
    if (result->status || !result->n_hypotheses) {
        w->complaint = "the network's output is not a number: the model's weights are broken";
        return;
    }
    const moe_hypothesis *h = &result->hypotheses[0];
    if (w->scoring) {
        p->logprob[w->which] = (double)h->logprob;
    } else if (text_ids_set(&p->output[w->which], h->ids, h->n_ids, &e)) {
        w->complaint = "no memory for the translations";
    }
}

static moe_status measure_one(const moe_model *model, sample *s, int which, moe_error *e) {
    moe_session_params p = moe_session_params_default(model);
    moe_session *session;
    moe_status status = moe_session_new(model, &p, &session, e);
    if (status) return status;
    walk w = { .s = s, .which = which, .show = isatty(2) };
    for (w.scoring = 1; w.scoring >= !s->translates && !status; w.scoring--) {
        w.next = 0;
        status = moe_translate(session, pull, done, &w, e);
        if (w.complaint) {
            *e = (moe_error){ .code = status = MOE_ERROR_NUMERIC };
            snprintf(e->message, sizeof e->message, "%s", w.complaint);
        }
    }
    if (w.show) fputs("\r\033[K", stderr);
    moe_session_free(session);
    return status;
}

static const char *main_type(const moe_model *m) {
    uint64_t best = 0;
    const char *name = "?";
    for (size_t i = 0; i < moe_model_tensor_count(m); i++) {
        moe_tensor_info t = moe_model_tensor(m, i);
        if (t.bytes > best) best = t.bytes, name = moe_type_name(t.type);
    }
    return name;
}

/* Compare OUT with IN and write the result into OUT. */
static moe_status measure(const text_front *in, const char *out, const moe_save_params *params, const char *sample_path,
                          int ids, moe_error *e) {
    sample s = { .verdicts = NULL };
    text_front after;
    double tokens = 0, before_sum = 0, after_sum = 0, same = 0, count = 0;
    moe_status status = read_sample(sample_path, ids, in, &s, e);
    if (!status) status = text_open(out, TEXT_IDS_ONLY, NULL, &after, e);
    if (status) {
        free_sample(&s);
        return status;
    }
    status = measure_one(in->model, &s, 0, e);
    if (!status) status = measure_one(after.model, &s, 1, e);
    for (size_t i = 0; i < s.text.count; i++) {
        const verdict *p = &s.verdicts[i];
        if (p->left_out) continue;
        count++;
        tokens += (double)(s.text.pairs[i].target.length + 1);
        before_sum -= p->logprob[0];
        after_sum -= p->logprob[1];
        same += p->output[0].length == p->output[1].length &&
                (!p->output[0].length ||
                 !memcmp(p->output[0].data, p->output[1].data, p->output[0].length * sizeof(int32_t)));
    }
    const char *base = strrchr(sample_path, '/') ? strrchr(sample_path, '/') + 1 : sample_path,
               *type = main_type(in->model);
    const moe_meta_entry entries[] = {
        { .key = "quality.sample", .kind = MOE_META_TEXT, .text = { base, strlen(base) } },
        { .key = "quality.sentences", .kind = MOE_META_INT, .integer = (int64_t)count },
        { .key = "quality.compared_with", .kind = MOE_META_TEXT, .text = { type, strlen(type) } },
        { .key = "quality.nats_per_token", .kind = MOE_META_REAL, .real = after_sum / tokens },
        { .key = "quality.nats_per_token_before", .kind = MOE_META_REAL, .real = before_sum / tokens },
        { .key = "quality.same_translations", .kind = MOE_META_REAL, .real = same / count },
    };
    if (!status && count == 0) {
        *e = (moe_error){ .code = status = MOE_ERROR_ARGUMENT };
        snprintf(e->message, sizeof e->message, "no line of the sample can be scored by this model");
    }
    if (!status) {
        moe_save_params p = *params; /* the types that OUT already has: nothing is rounded again */
        p.entries = entries;
        p.n_entries = sizeof entries / sizeof *entries - !s.translates; /* the last is about translations */
        status = moe_model_save(after.model, out, &p, e);
        fprintf(stderr, "%s: %.4f nats per token before, %.4f after", base, before_sum / tokens, after_sum / tokens);
        if (s.translates) fprintf(stderr, "; %.1f %% of %.0f translations the same", 100 * same / count, count);
        if (count < (double)s.text.count)
            fprintf(stderr, "; %.0f lines left out that the model cannot score", (double)s.text.count - count);
        fputc('\n', stderr);
    }
    text_close(&after);
    free_sample(&s);
    return status;
}

/* ==== 2. Main =========================================================================================== */

/* Bytes of a model file. Opening it checks that the written file can be read. */
static moe_status size_of(const char *path, uint64_t *bytes, moe_error *e) {
    moe_model *m;
    moe_status status = moe_model_open(path, NULL, &m, e);
    if (status) return status;
    *bytes = moe_model_file_bytes(m);
    moe_model_close(m);
    return MOE_OK;
}

static int parse_type(const char *name, moe_type *type) {
    if (moe_type_parse(name, type)) return 1;
    program_usage_error("'%s' is not a number format; there are f32, f16, bf16, q8 and q4", name);
    return 0;
}

int main(int argc, char **argv) {
    enum { EXPERTS = 256, MEASURE, IDS };
    static const struct option known[] = { { "experts", required_argument, NULL, EXPERTS },
                                           { "measure", required_argument, NULL, MEASURE },
                                           { "ids", no_argument, NULL, IDS },
                                           { "help", no_argument, NULL, 'h' },
                                           { "version", no_argument, NULL, 'V' },
                                           { NULL, 0, NULL, 0 } };
    const char *experts = NULL, *sample_path = NULL;
    int ids = 0, begun = program_begin("moe-quantize");
    if (begun >= 0) return begun;
    uint64_t given = 0;
    for (int c; (c = program_next_option(argc, argv, "hV", known, NULL, &given)) != -1;) {
        switch (c) {
        case EXPERTS: experts = optarg; break;
        case MEASURE: sample_path = optarg; break;
        case IDS: ids = 1; break;
        case 'h': usage(stdout); return program_printed();
        case 'V': printf("moe-quantize %s\n", moe_version()); return program_printed();
        default: fputs("Try moe-quantize --help\n", stderr); return EXIT_USAGE;
        }
    }
    if (optind + 3 != argc) return program_usage_error("expects IN OUT TYPE");
    const char *in = argv[optind], *out = argv[optind + 1];
    moe_save_params params = { .type = MOE_TYPE_F32 };
    if (!parse_type(argv[optind + 2], &params.type) ||
        !parse_type(experts ? experts : argv[optind + 2], &params.experts))
        return EXIT_USAGE;
    if (strcmp(in, out) == 0 || program_same_file(in, out))
        return program_usage_error("%s and %s are the same file; write to another name", in, out);
    /* The weights are about to be rounded and saved under fresh checksums, so damage must be found now or never. */
    text_front front;
    moe_error e;
    if (text_open(in, sample_path && !ids ? TEXT_REQUIRED : TEXT_IDS_ONLY, &(moe_model_params){ .verify = 1 }, &front,
                  &e))
        return program_file_error(in, &e), EXIT_MODEL;
    if (sample_path && moe_model_get_kind(front.model) == MOE_MODEL_CLASSIFIER) {
        text_close(&front);
        return program_usage_error("%s is a classifier: --measure is for models that read text", in);
    }
    uint64_t before = moe_model_file_bytes(front.model), after = 0;
    moe_status status = moe_model_save(front.model, out, &params, &e);
    if (!status && sample_path) status = measure(&front, out, &params, sample_path, ids, &e);
    text_close(&front);
    if (!status) status = size_of(out, &after, &e);
    if (status) return program_file_error(sample_path && status == MOE_ERROR_ARGUMENT ? sample_path : out, &e);
    fprintf(stderr, "%s: %.1f MiB -> %s: %.1f MiB (%s%s%s)\n", in, (double)before / 1048576, out,
            (double)after / 1048576, moe_type_name(params.type), experts ? ", experts " : "",
            experts ? moe_type_name(params.experts) : "");
    return EXIT_DONE;
}
