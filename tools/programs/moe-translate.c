/* moe-translate - translate lines of text.
 *
 * Contents
 *   1. Options      the command line
 *   2. Lines        a result as text, as ids, as JSON
 *   3. Flow         a line's request and result, for program.h
 *   4. Routing      the same translations once more, with a look at the gates
 *   5. Self-test    the golden sentences inside the model
 *   6. Several models
 *   7. Main
 */
#include "moe.h"
#include "tools/programs/program.h"
#include "tools/programs/ranks.h"
#include "tools/programs/routing.h"
#include "tools/text/detect.h"
#include "tools/text/json.h"
#include "tools/text/prompt.h"
#include "tools/text/protect.h"
#include "tools/text/settings.h"
#include "tools/text/several.h"
#include "tools/text/spm.h"
#include "tools/text/text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

/* ==== 1. Options ======================================================================================== */

enum { MOST_MODELS = 64 };

typedef struct options {
    program_common common;           /* its settings have the preset, the parameters, the languages and more */
    const char *models[MOST_MODELS]; /* [n_models] of -m and --models */
    size_t n_models;
    int several; /* they are a translator of several */
    int nbest;   /* -1: not given */
    int score, prefix, self_test, paragraphs, no_protect;
    text_rules *rules; /* NULL: nothing is kept */
    text_prompt_options wishes;
    int raw, force; /* force: -1 if not given */
    int32_t end;    /* the model's end token, for --raw-ids */
    int longest;    /* target that it can write at all; 0: it does not say */
} options;

static int add_model(void *user, const option_row *row, const char *path) {
    options *o = user;
    if (o->n_models == MOST_MODELS) return program_usage_error("more than %d models: use --models DIR", MOST_MODELS);
    if (!o->n_models) o->common.model = path;
    o->models[o->n_models++] = path;
    o->several |= o->n_models > 1 || !row->letter;
    return -1;
}

static const option_row own_rows[] = {
    { "model", "FILE", "model file (default: MOE_MODEL, else the installed model, else the one in the repository)",
      .more = ". If repeated, each line uses the model that translates from -s to -t, or two models with a pivot "
              "language between them",
      .letter = 'm', .group = GROUP_MODEL, .kind = ROW_CALL, .take = add_model, .repeated = 1 },
    { "models", "DIR", "use all models (*.bin) in a directory", .group = GROUP_MODEL, .kind = ROW_CALL,
      .take = add_model, .repeated = 1 },
    { "raw-ids", NULL, "like --ids, with language and end tokens in input lines and all generated tokens in the output",
      .group = GROUP_FILES, OPTION_FLAG(raw), .more = ". This includes the targets of --score and --prefix" },
    { "paragraphs", NULL, "join lines up to the next blank line; each paragraph gives one line", .group = GROUP_FILES,
      OPTION_FLAG(paragraphs) },
    { "score", NULL, "lines are source TAB target; print the target's log-probability TAB its number of tokens",
      .group = GROUP_FILES, OPTION_FLAG(score) },
    { "prefix", NULL, "lines are source TAB the first words of a translation; print the whole translation",
      .group = GROUP_FILES, OPTION_FLAG(prefix) },
    { "json", NULL,
      "one JSON object per line: source, prefix, translation, score, ids, token_logprobs, nbest; error on failure",
      .group = GROUP_FILES, OPTION_FLAG(common.json) },
    { "force", "ID", "force the first token of every translation; its log-probability is 0", .group = GROUP_SEARCH,
      OPTION_INT(force, 0, INT32_MAX) },
    { "no-protect", NULL, "do not protect parts of the text", .group = GROUP_TEXT, OPTION_FLAG(no_protect),
      .more = ". By default markup moves with the words it encloses, and placeholders ({name}, %s, ${x}), web and mail "
              "addresses, paths, numbers, emoji, surrounding white space and TABs between cells are copied" },
    { "self-test", NULL, "translate the golden sentences stored in the model and compare", .group = GROUP_OTHER,
      OPTION_FLAG(self_test) },
    { 0 },
};

static const option_list all_rows[] = {
    { own_rows, 0, NULL },
    PROGRAM_ROWS("no-verify input output ids pretokenized"),
    PROGRAM_SETTINGS(NULL),
    PROGRAM_ROWS("routing dry-run no-mmap stats verbose quiet"),
};

static const char *const exclusions[] = {
    "ids pretokenized",
    "raw-ids pretokenized",
    "score prefix nbest force",
    "paragraphs score prefix ids raw-ids pretokenized",
    "self-test score prefix ids raw-ids pretokenized json input output routing gating noise",
    NULL,
};

static const option_program program = {
    .name = "moe-translate",
    .usage = "[-m MODEL] -t LANG [OPTION]... [TEXT]...",
    .about = "Translate TEXT, or lines of UTF-8 text from standard input, line by line.",
    OPTION_LISTS(all_rows),
    .notes =
        "Text in capitals is translated as lower case and the translation is capitalised. Unless --no-protect is "
        "given, a line of a few words without final punctuation is translated in several variants, and the best "
        "translation is used. White space is copied. A line that cannot be translated gives an empty line, and an "
        "error message names the line and the reason; of a split line only the sentences that fail are left out. CRLF "
        "line ends are accepted, LF is written.\n"
        "\n"
        "In a build with MPI=1, mpirun -n 4 moe-translate ... starts processes, also on several machines, each of "
        "which reads only its share of the experts. The first process reads and writes the lines.\n"
        "\n" PROGRAM_HELP_EXIT("all lines translated", "some lines failed (or the self-test did)"),
    .examples = "  moe-translate -t de 'Good morning!'\n"
                "  moe-translate -m models/en-de-fr-es.bin -t de < in.txt > out.txt\n",
    .exclusions = exclusions,
    .most = INT32_MAX,
    .version = program_version,
};

static int is_auto(const options *o) { return strcmp(o->common.settings.source, "auto") == 0; }

/* What the rows cannot say: -1, or an exit status. */
static int check_options(options *o) {
    program_common *common = &o->common;
    text_settings *settings = &common->settings;
    const int whole =
        common->json || o->nbest > 0 || o->score || o->prefix || common->routing || common->ids || common->pretokenized;
    if (whole && settings->split > 0)
        return program_usage_error("--split cannot be combined with --json, --nbest, --score, --prefix, --routing, "
                                   "--ids or --pretokenized");
    if (settings->split < 0) settings->split = whole ? 0 : TEXT_SPLIT;
    if (o->self_test && common->text) return program_usage_error("--self-test does not translate other text");
    if (is_auto(o) && (common->routing || common->ids || common->pretokenized))
        return program_usage_error("-s auto cannot be combined with --routing, --ids, --raw-ids or --pretokenized");
    if (settings->models_memory && !o->several) return program_usage_error("--models-memory requires several models");
    if (o->several && (whole || o->force >= 0 || o->self_test || settings->max_memory || common->dry_run))
        return program_usage_error("several models cannot be combined with --json, --nbest, --score, --prefix, --ids, "
                                   "--raw-ids, --pretokenized, --routing, --force, --self-test, --max-memory or "
                                   "--dry-run");
    return -1;
}

/* -1: go on; else the exit status. */
static int parse_options(int argc, char **argv, options *o) {
    program_common *common = &o->common;
    moe_error e;
    *o = (options){ .common = program_common_none(), .nbest = -1, .force = -1 };
    int status = option_parse(&program, argc, argv, o);
    if (status < 0) status = program_words(common, argc - optind, argv + optind);
    if (status < 0) status = program_default_model(&common->model);
    if (status >= 0) return status;
    if (text_settings_check(&common->settings, "--", &e)) return program_usage_error("%s", e.message);
    common->ids |= o->raw;
    common->stream = !isnan(text_settings_param(&common->settings, "expert-memory"));
    if (text_settings_param(&common->settings, "nbest") > 0)
        o->nbest = (int)text_settings_param(&common->settings, "nbest");
    return check_options(o);
}

static void apply_options(const options *o, moe_session_params *p) {
    const text_settings *settings = &o->common.settings;
    const int max_source = p->max_source, max_target = p->max_target;
    if (settings->batch_tokens > 0) { /* short sentences have about eight tokens */
        p->batch_tokens = settings->batch_tokens;
        p->batch = settings->batch_tokens < 8          ? 1
                   : settings->batch_tokens / 8 > 4096 ? 4096
                                                       : settings->batch_tokens / 8;
    }
    program_apply(&o->common, p);
    if (o->self_test) {
        p->max_source = max_source, p->max_target = max_target;
    } else if (settings->max_len > 0 && p->rules == MOE_RULES_HF) { /* counts what is generated */
        p->max_source = max_source;
        p->max_len_factor = 0;
        p->max_len_offset = settings->max_len;
    }
    if (settings->device[0]) p->device = settings->device;
    if (settings->gpu_memory > 0) p->device_memory = text_mebibytes(settings->gpu_memory);
    if (o->self_test) return; /* the stored sentences were made with the model's own settings */
    text_settings_search(settings, p);
    if (!o->score) return;
    p->beam = p->nbest = 1; /* nothing is chosen */
    p->rerank = 0;
    if (settings->batch < 0 && settings->batch_tokens < 0) p->batch = PROGRAM_SCORED_AT_ONCE;
}

/* ==== 2. Lines ========================================================================================== */

static int64_t meta_int(const moe_model *model, const char *key) {
    ptrdiff_t i = moe_model_meta_find(model, key);
    return i < 0 ? 0 : moe_model_meta_int(model, (size_t)i, 0);
}

/* With --raw-ids everything that was generated is shown. */
static int shows_end(const options *o, const moe_hypothesis *h) { return o->raw && h->finished; }

static int ends_raw(const options *o, const text_ids *target) {
    return o->raw && target->length && target->data[target->length - 1] == o->end;
}

/* The result of scoring, without the end token if the target of --raw-ids has none. */
static moe_hypothesis scored(const options *o, const text_job *job, const moe_result *result) {
    moe_hypothesis h = result->hypotheses[0];
    if (!o->raw || !o->score || ends_raw(o, &job->target_ids)) return h;
    h.finished = 0;
    h.logprob = 0;
    h.score = NAN; /* only whole translations have one */
    for (size_t i = 0; i < h.n_ids; i++) h.logprob = h.logprob + h.token_logprobs[i];
    return h;
}

/* A hypothesis as text, as ids (--ids) or as pieces (--pretokenized). */
static moe_status append_translation(const text_front *front, const options *o, const text_job *job,
                                     const moe_hypothesis *h, text_bytes *out, moe_error *error) {
    moe_status status = text_job_write(front, job, h, out, error);
    if (!status && shows_end(o, h)) text_printf(out, h->n_ids ? " %d" : "%d", (int)o->end);
    return status;
}

/* Write the fields of a hypothesis into the open object. Other programs depend on the keys: README.md here has them. */
static moe_status json_hypothesis(const text_front *front, const options *o, const text_job *job,
                                  const moe_hypothesis *h, json *j, moe_error *error) {
    const size_t tokens = h->n_ids + (h->finished != 0);
    if (!o->score) {
        text_bytes text = { 0 };
        moe_status status = append_translation(front, o, job, h, &text, error);
        j->out->failed |= text.failed;
        if (!status && !text.failed) json_text(j, "translation", text.data);
        text_bytes_free(&text);
        if (status) return status;
    }
    json_float(j, "score", h->score);
    json_float(j, "logprob", h->logprob);
    if (h->reverse != 0.0f) json_float(j, "reverse", h->reverse);
    if (!o->score) json_bool(j, "finished", h->finished);
    else json_whole(j, "tokens", (int64_t)tokens);
    if (h->looped) json_bool(j, "looped", 1);
    json_open(j, "ids", '[');
    for (size_t i = 0; i < h->n_ids; i++) json_whole(j, NULL, h->ids[i]);
    if (shows_end(o, h)) json_whole(j, NULL, o->end);
    json_close(j, ']');
    json_open(j, "token_logprobs", '[');
    for (size_t i = 0; i < tokens; i++) json_float(j, NULL, h->token_logprobs[i]);
    json_close(j, ']');
    return MOE_OK;
}

/* The line for a job as JSON; result NULL where there is none. */
static moe_status json_line(const text_front *front, const options *o, text_job *job, const moe_result *result,
                            moe_error *error) {
    json j = { .out = &job->output };
    const size_t length = job->output.length;
    moe_status status = MOE_OK;
    json_open(&j, NULL, '{');
    json_whole(&j, "line", (int64_t)job->line);
    if (job->failed && !job->source.length) json_null(&j, "source");
    else json_text(&j, "source", job->source.length ? job->source.data : "");
    if (o->score || o->prefix)
        json_text(&j, o->score ? "target" : "prefix", job->target.length ? job->target.data : "");
    json_ids(&j, "source_ids", job->source_ids.data, job->failed ? 0 : job->source_ids.length);
    if (result && result->n_hypotheses) {
        const moe_hypothesis best = scored(o, job, result);
        status = json_hypothesis(front, o, job, &best, &j, error);
        if (o->nbest > 0) json_open(&j, "nbest", '[');
        for (size_t i = 0; o->nbest > 0 && !status && i < result->n_hypotheses; i++) {
            json_open(&j, NULL, '{');
            status = json_hypothesis(front, o, job, &result->hypotheses[i], &j, error);
            json_close(&j, '}');
        }
        if (o->nbest > 0) json_close(&j, ']');
    } else if (!o->score) {
        json_text(&j, "translation", job->verbatim ? job->source.data : "");
    }
    if (job->failed) json_text(&j, "error", job->note);
    else if (job->cut || job->noted) json_text(&j, job->cut ? "cut" : "note", job->note);
    json_close(&j, '}');
    if (status) job->output.length = length;
    return status;
}

/* The line for a job as text. */
static moe_status plain_line(const text_front *front, const options *o, text_job *job, const moe_result *result,
                             moe_error *error) {
    if (job->verbatim) text_append(&job->output, job->source.data, job->source.length);
    if (!result || !result->n_hypotheses || job->failed) return MOE_OK;
    if (o->score) {
        const moe_hypothesis h = scored(o, job, result);
        text_append_float(&job->output, h.logprob);
        text_printf(&job->output, "\t%zu", h.n_ids + (h.finished != 0));
        return MOE_OK;
    }
    for (size_t i = 0; i < result->n_hypotheses; i++) {
        if (i) text_append(&job->output, "\t", 1);
        moe_status status = append_translation(front, o, job, &result->hypotheses[i], &job->output, error);
        if (status) return status;
    }
    return MOE_OK;
}

/* ==== 3. Flow =========================================================================================== */

typedef struct app {
    program_flow flow; /* first, because callbacks get a pointer to it */
    const options *options;
    routing_file routing;  /* of --routing */
    moe_session *second;   /* scores what was translated; NULL without --routing */
    text_queue translated; /* jobs that wait for that, in order */
    size_t waiting, second_batch;
    text_job *next;    /* of those the first that was not pulled yet */
    moe_error trouble; /* of the second session */

    text_detector *detector; /* of -s auto; NULL: the source language is given, or none is wanted */
    int32_t source_tag;      /* of the line at hand, by the detector */
} app;

static const int32_t nothing[1] = { 0 }; /* non-NULL pointer for an empty target (NULL means "no target") */

static const int32_t *ids_of(const text_ids *ids) { return ids->data ? ids->data : nothing; }

/* A target that says itself what comes first, and perhaps its end, which the session adds. */
static void raw_target(const options *o, const text_ids *target, moe_request *request) {
    request->n_target -= (size_t)ends_raw(o, target);
    request->raw = 1;
    request->force = request->target_tag = -1;
}

/* -s auto: the language of a whole line; its target, if it has one, does not count. */
static void app_seen(text_stream *stream, const text_line *line) {
    app *a = (app *)(void *)stream;
    const char *tab = a->options->score || a->options->prefix ? memchr(line->data, '\t', line->length) : NULL;
    a->source_tag = text_detect_tag(a->detector, line->data, tab ? (size_t)(tab - line->data) : line->length);
}

static void app_ask(text_stream *stream, text_job *job, moe_request *request) {
    app *a = (app *)(void *)stream;
    request->source = ids_of(&job->source_ids);
    request->n_source = job->source_ids.length;
    request->raw = a->options->raw;
    request->force = a->options->force;
    if (a->flow.grows) request->partial = text_stream_grow;
    if (a->detector && !job->tagged) job->tagged = 1, job->tag = a->source_tag;
    if (a->detector) request->source_tag = job->tag; /* of a second try as well */
    if (!a->options->score && !a->options->prefix) return;
    request->target = ids_of(&job->target_ids);
    request->n_target = job->target_ids.length;
    request->prefix = a->options->prefix;
    if (a->options->raw) raw_target(a->options, &job->target_ids, request);
}

static void app_see(program_flow *flow, text_job *job, const moe_result *result) {
    app *a = (app *)(void *)flow;
    const moe_hypothesis *best = &result->hypotheses[0];
    if (!best->finished && !job->cut && !a->options->score) { /* cut text is never passed off as whole */
        job->cut = 1;
        const size_t said = job->noted ? strlen(job->note) : 0;
        snprintf(job->note + said, sizeof job->note - said, "%sthe translation was cut after %zu tokens",
                 said ? "; " : "", best->n_ids);
    }
    if (!a->second) return;
    const size_t given = job->prompt.length ? job->prompt.length : job->source_ids.length;
    const size_t prompt = moe_model_prompted(flow->stream.front->model) && given
                              ? given - 1
                              : 0; /* steps before the first one of the translation */
    routing_sentence *sentence = routing_begin(&a->routing, job->line);
    if (!sentence) flow->stream.trouble = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
    else if (!best->finished) sentence->steps = best->n_ids + prompt; /* the end was never asked for */
    job->extra = sentence;
    if (!a->options->score) text_ids_set(&job->target_ids, best->ids, best->n_ids, &flow->stream.trouble);
}

static moe_status app_line(program_flow *flow, text_job *job, const moe_result *result, moe_error *error) {
    app *a = (app *)(void *)flow;
    return a->options->common.json ? json_line(flow->stream.front, a->options, job, result, error)
                                   : plain_line(flow->stream.front, a->options, job, result, error);
}

static void app_stats(const program_flow *f, const moe_stats *s, double elapsed) {
    fprintf(stderr,
            "lines            %llu, %llu of them failed\n"
            "source tokens    %llu (tag and end included)",
            (unsigned long long)f->progress.lines, (unsigned long long)f->progress.failed,
            (unsigned long long)s->source_tokens);
    if (!f->several)
        fprintf(stderr, "; %llu of %llu pieces unknown to the vocabulary", (unsigned long long)f->stream.unknown_pieces,
                (unsigned long long)f->stream.pieces);
    fprintf(stderr,
            "\n"
            "target tokens    %llu (end included)\n"
            "seconds          %.3f\n"
            "target tokens/s  %.1f\n"
            "decoder steps    %llu, %.1f rows each\n"
            "peak memory      %.1f MiB resident, %.1f MiB of it the session's\n"
            "kernels          %s\n"
            "device           %s\n",
            (unsigned long long)s->target_tokens, elapsed, elapsed > 0 ? (double)s->target_tokens / elapsed : 0.0,
            (unsigned long long)s->steps, s->steps ? (double)s->rows / (double)s->steps : 0.0, program_resident(),
            (double)s->bytes / 1048576.0, s->isa ? s->isa : "?", s->device ? s->device : "?");
    if (s->device_bytes) fprintf(stderr, "device memory    %.1f MiB\n", (double)s->device_bytes / 1048576.0);
    program_expert_stats(s);
}

/* ==== 4. Routing ======================================================================================== */

static int second_pull(void *user, int wait, moe_request *request) {
    app *a = user;
    (void)wait;
    if (program_signal || a->trouble.code) return MOE_PULL_CANCEL;
    text_job *job = a->next;
    if (!job) return MOE_PULL_END;
    a->next = job->next;
    const text_ids *source = job->prompt.length ? &job->prompt : &job->source_ids;
    request->source = ids_of(source);
    request->n_source = source->length;
    request->target = ids_of(&job->target_ids);
    request->n_target = job->target_ids.length;
    request->user = job;
    if (a->options->raw) raw_target(a->options, &job->target_ids, request);
    return MOE_PULL_REQUEST;
}

static void second_done(void *user, const moe_result *result) {
    app *a = user;
    text_job *job = result->user;
    if (a->trouble.code) return;
    job->finished = 1;
    if (result->status) {
        a->trouble.code = result->status;
        snprintf(a->trouble.message, sizeof a->trouble.message, "line %llu has no routing: %.200s",
                 (unsigned long long)job->line, result->message);
    }
    for (; !a->trouble.code && (job = text_queue_first(&a->translated)); text_queue_remove(&a->translated))
        routing_put(&a->routing, job->extra, &a->trouble);
}

/* Score the translations that wait and write their routing. */
static moe_status route_waiting(app *a, moe_error *error) {
    a->next = a->translated.first;
    a->waiting = 0;
    moe_status status = moe_translate(a->second, second_pull, second_done, a, error);
    if (a->trouble.code) *error = a->trouble;
    if (program_signal) error->code = MOE_OK; /* that is said elsewhere */
    return a->trouble.code ? a->trouble.code : program_signal ? MOE_OK : status;
}

/* A line is written: its ids join the translations that wait for their routing. */
static moe_status app_leave(program_flow *flow, text_job *job, moe_error *error) {
    app *a = (app *)(void *)flow;
    if (!job->extra) return MOE_OK;
    text_job *waits = text_queue_add(&a->translated);
    if (!waits) {
        *error = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
        return error->code;
    }
    text_ids source = waits->source_ids, target = waits->target_ids, prompt = waits->prompt;
    waits->line = job->line;
    waits->extra = job->extra;
    waits->source_ids = job->source_ids, job->source_ids = source;
    waits->target_ids = job->target_ids, job->target_ids = target;
    waits->prompt = job->prompt, job->prompt = prompt;
    return ++a->waiting < a->second_batch ? MOE_OK : route_waiting(a, error);
}

/* The parameters of the session that scores, from those of the one that translates. */
static moe_session_params scoring_params(const options *o, const moe_session_params *params) {
    moe_session_params p = *params;
    p.device = "cpu";
    p.beam = p.nbest = 1;
    if (!o->score && p.max_target != o->longest) p.max_target++; /* for the end of what was cut */
    p.rules = MOE_RULES_PAPER;
    p.prune = p.coverage_penalty = p.rerank = 0;
    p.min_target = 0;
    p.max_constraints = 0;
    p.log = NULL;
    p.routing = routing_keep_of_job;
    return p;
}

/* Make the session that scores with the settings of `params`, and open the file. */
static int begin_routing(app *a, const moe_session_params *params) {
    const program_common *o = &a->options->common;
    const moe_session_params p = scoring_params(a->options, params);
    const text_settings *settings = &o->settings;
    const char *const languages[2] = { settings->source[0] ? settings->source : NULL,
                                       settings->target[0] ? settings->target : NULL };
    moe_error e;
    a->second_batch = (size_t)p.batch;
    if (program_session_new(a->flow.stream.front->model, &p, &a->second, &e))
        return program_complain("%s", e.message), EXIT_MODEL;
    return program_routing_open(o, a->flow.stream.front, languages, &a->routing);
}

/* Write the rest of the routing if all went well; else remove the file. */
static int end_routing(app *a, int status) {
    moe_error e = { .code = MOE_OK };
    if ((status == EXIT_DONE || status == EXIT_SOME_LINES) && a->translated.first) {
        route_waiting(a, &e);
        if (e.code) program_complain("%s", e.message);
        if (e.code) status = e.code == MOE_ERROR_IO ? EXIT_INPUT_OUTPUT : EXIT_MODEL;
        else if (program_signal) status = 128 + (int)program_signal;
    }
    status = program_routing_close(&a->routing, status);
    text_queue_free(&a->translated);
    program_session_free(a->second);
    return status;
}

/* ==== 5. Self-test ====================================================================================== */

typedef struct golden {
    text_bytes got;     /* ids, as in golden.target_ids */
    text_bytes message; /* empty, or why there are none */
} golden;

typedef struct self_test {
    const text_front *front;
    size_t n, next;
    size_t source_ids, target_ids, language; /* metadata entries */
    text_ids ids;
    golden *results;
    moe_error trouble;
} self_test;

static int self_test_pull(void *user, int wait, moe_request *request) {
    self_test *t = user;
    (void)wait;
    if (program_signal) return MOE_PULL_CANCEL;
    if (t->next == t->n) return MOE_PULL_END;
    golden *g = &t->results[t->next];
    moe_span ids = moe_model_meta_text(t->front->model, t->source_ids, t->next);
    moe_span language = moe_model_meta_text(t->front->model, t->language, t->next);
    char code[32];
    snprintf(code, sizeof code, "%.*s", language.length < 31 ? (int)language.length : 31,
             language.data ? language.data : "");
    if (text_parse_ids(t->front, ids.data, ids.length, &t->ids, &t->trouble)) return MOE_PULL_CANCEL;
    if (code[0] && text_language(t->front, code, 1, &request->target_tag, &t->trouble)) return MOE_PULL_CANCEL;
    request->source = ids_of(&t->ids);
    request->n_source = t->ids.length;
    request->user = g;
    t->next++;
    return MOE_PULL_REQUEST;
}

static void self_test_done(void *user, const moe_result *result) {
    (void)user;
    golden *g = result->user;
    if (result->status) text_append_string(&g->message, result->message);
    else if (result->n_hypotheses) text_append_ids(&g->got, result->hypotheses[0].ids, result->hypotheses[0].n_ids);
}

static int span_is(moe_span s, const text_bytes *b) {
    return s.length == b->length && (!s.length || memcmp(s.data, b->data, s.length) == 0);
}

/* Text level: the tokeniser gives the stored ids for the stored source, and the stored text for the stored ids. */
static const char *self_test_text(self_test *t, ptrdiff_t source, ptrdiff_t target, size_t i) {
    const char *verdict = NULL;
    moe_error e;
    text_bytes out = { 0 };
    moe_span text = moe_model_meta_text(t->front->model, (size_t)source, i);
    moe_span ids = moe_model_meta_text(t->front->model, t->source_ids, i);
    if (text_encode(t->front, text.data, text.length, &t->ids, &e)) return "the tokeniser refuses the source";
    text_append_ids(&out, t->ids.data, t->ids.length);
    if (!span_is(ids, &out)) verdict = "the tokeniser cuts the source into other pieces";
    if (!verdict) {
        out.length = 0;
        ids = moe_model_meta_text(t->front->model, t->target_ids, i);
        const text_front targets = text_front_of_targets(t->front);
        if (text_parse_ids(&targets, ids.data, ids.length, &t->ids, &e) ||
            text_decode(t->front, t->ids.data, t->ids.length, &out, &e) ||
            !span_is(moe_model_meta_text(t->front->model, (size_t)target, i), &out))
            verdict = "the tokeniser joins the translation differently";
    }
    text_bytes_free(&out);
    return verdict;
}

/* Verdict lines on stdout; the exit status. */
static int run_self_test(const text_front *front, moe_session *session, const char *model) {
    const moe_model *m = front->model;
    ptrdiff_t source_ids = moe_model_meta_find(m, "golden.source_ids"),
              target_ids = moe_model_meta_find(m, "golden.target_ids");
    ptrdiff_t language = moe_model_meta_find(m, "golden.language"),
              source_language = moe_model_meta_find(m, "golden.source_language");
    ptrdiff_t source = moe_model_meta_find(m, "golden.source"), target = moe_model_meta_find(m, "golden.target");
    size_t n = source_ids < 0 ? 0 : moe_model_meta_length(m, (size_t)source_ids);
    if (!n || target_ids < 0 || language < 0 || moe_model_meta_length(m, (size_t)target_ids) != n ||
        moe_model_meta_length(m, (size_t)language) != n) {
        program_complain("%s: this model holds no sentences to test with (golden.*)", model);
        return EXIT_MODEL;
    }
    self_test t = { .front = front,
                    .n = n,
                    .source_ids = (size_t)source_ids,
                    .target_ids = (size_t)target_ids,
                    .language = (size_t)language,
                    .results = calloc(n, sizeof(golden)) };
    if (!t.results) return program_complain("out of memory"), EXIT_MODEL;
    int status = EXIT_DONE;
    size_t failed = 0;
    moe_error e;
    if (moe_translate(session, self_test_pull, self_test_done, &t, &e)) {
        if (!program_signal) program_file_error(model, t.trouble.code ? &t.trouble : &e);
        status = program_signal ? 128 + (int)program_signal : EXIT_MODEL;
    }
    for (size_t i = 0; i < n && !status; i++) {
        golden *g = &t.results[i];
        moe_span wanted = moe_model_meta_text(m, t.target_ids, i), to = moe_model_meta_text(m, t.language, i);
        moe_span from = source_language < 0 ? (moe_span){ "?", 1 } : moe_model_meta_text(m, (size_t)source_language, i);
        const char *why = g->message.length          ? g->message.data
                          : span_is(wanted, &g->got) ? NULL
                                                     : "the translation differs";
        if (!why && text_cuts(front) && source >= 0 && target >= 0) why = self_test_text(&t, source, target, i);
        text_bytes line = { 0 };
        text_printf(&line, "%s %3zu  ", why ? "FAIL" : "ok  ", i + 1);
        text_append_clean(&line, from.data, from.length);
        text_append(&line, "-", 1);
        text_append_clean(&line, to.data, to.length);
        if (why) text_printf(&line, "  %s", why);
        if (why && !g->message.length && !span_is(wanted, &g->got)) {
            text_append_string(&line, "\n          wanted ");
            text_append_clean(&line, wanted.data, wanted.length);
            text_append_string(&line, "\n          got    ");
            text_append(&line, g->got.data, g->got.length);
        }
        if (!line.failed) puts(line.data);
        text_bytes_free(&line);
        failed += why != NULL;
    }
    if (!status) {
        moe_stats s = moe_session_stats(session);
        printf("%zu sentences: %zu passed, %zu failed (kernels %s, SentencePiece %s)\n", n, n - failed, failed,
               s.isa ? s.isa : "?", front->tokeniser ? spm_library_version() : "not used");
        status = program_printed();
        if (!status && failed) status = EXIT_SOME_LINES;
    }
    for (size_t i = 0; i < n; i++) text_bytes_free(&t.results[i].got), text_bytes_free(&t.results[i].message);
    free(t.results);
    text_ids_free(&t.ids);
    return status;
}

/* ==== 6. Several models ================================================================================= */

/* The way between the languages that are named, its models opened. -1, or a complaint and the exit status. */
static int open_way(const options *o, moetext *translator) {
    text_way way;
    moe_error e;
    const text_set *set = text_set_of(translator);
    const text_settings *settings = &o->common.settings;
    if (!settings->target[0] || (!settings->source[0] && text_translator_way(translator, &way, &e))) {
        program_complain("say with %s; %s",
                         settings->target[0] ? "-s which language the lines are in"
                                             : "-t which language to "
                                               "translate into",
                         text_set_says(set));
        return EXIT_USAGE;
    }
    if (is_auto(o)) return -1;
    if (text_translator_way(translator, &way, &e)) return program_complain("%s", e.message), EXIT_USAGE;
    for (size_t i = 0; i < way.n; i++) {
        if (text_translator_open(translator, way.files[i], &e)) return program_complain("%s", e.message), EXIT_MODEL;
        if (o->common.verbose) program_complain("%s", text_set_path(set, way.files[i]));
    }
    return -1;
}

/* -1, or a complaint and the exit status: the output is one of the models. */
static int keep_models(const options *o, const text_set *set) {
    for (size_t i = 0; o->common.output && i < text_set_count(set); i++)
        if (program_same_file(o->common.output, text_set_path(set, i))) {
            program_complain("%s: this is the model, and would be overwritten", o->common.output);
            return EXIT_USAGE;
        }
    return -1;
}

static int run_several(const options *o) {
    text_settings settings = o->common.settings;
    moetext_model *models = NULL;
    moetext *translator = NULL;
    moe_error e;
    int status = -1;
    settings.copy = o->common.no_mmap;
    settings.verify = o->common.no_verify ? 0 : -1;
    settings.protect = !o->no_protect;
    if (text_models_open(o->models, o->n_models, &settings, &models, &e)) {
        program_file_error(o->models[0], &e);
        status = EXIT_MODEL;
    }
    if (status < 0 && text_translator_new(models, &settings, &translator, &e)) {
        program_complain("%s", e.message);
        status = e.code == MOE_ERROR_ARGUMENT ? EXIT_USAGE : e.code == MOE_ERROR_IO ? EXIT_INPUT_OUTPUT : EXIT_MODEL;
    }
    if (status < 0) status = keep_models(o, text_set_of(translator));
    if (status < 0) status = open_way(o, translator);
    if (status < 0) {
        program_flow flow = { .stream = { .split = (size_t)o->common.settings.split },
                              .options = &o->common,
                              .done_word = "translated",
                              .several = translator,
                              .messages = !o->no_protect,
                              .paragraphs = o->paragraphs,
                              .stats = o->common.stats ? app_stats : NULL };
        program_stoppable(translator);
        status = program_flow_run(&flow, NULL);
        program_stoppable(NULL);
    }
    moetext_free(translator);
    moetext_model_close(models);
    return status;
}

/* ==== 7. Main =========================================================================================== */

/* The work, once model and session are there. */
static int run(const options *o, const text_front *front, moe_session *session, const moe_session_params *params,
               ranks_part *part) {
    const program_common *c = &o->common;
    app a = { .options = o,
              .flow = { .stream = { .front = front, .split = (size_t)o->common.settings.split, .ask = app_ask },
                        .options = c,
                        .done_word = "translated",
                        .paragraphs = o->paragraphs,
                        .grows = !c->json && !o->score && o->nbest <= 1,
                        .see = app_see,
                        .line = app_line,
                        .part = part != NULL,
                        .earlier = part ? part->before : 0,
                        .stats = c->stats ? app_stats : NULL } };
    const int brief = o->rules && text_rules_spans(o->rules) && params->rules == MOE_RULES_PAPER;
    a.flow.stream.options = (text_options){ .ids = c->ids,
                                            .pretokenized = c->pretokenized,
                                            .truncate = c->settings.truncate > 0,
                                            .rules = o->rules,
                                            .pairs = o->score    ? "--score"
                                                     : o->prefix ? "--prefix"
                                                                 : NULL,
                                            .variants = brief,
                                            .prompt = &o->wishes,
                                            .lower_case = !c->ids && !c->pretokenized && !o->score && !o->prefix,
                                            .max_source = (size_t)params->max_source,
                                            .max_target = (size_t)params->max_target + (size_t)(o->raw != 0) };
    int status = -1;
    if (is_auto(o) && moe_model_needs_source(front->model)) {
        moe_error e;
        a.flow.stream.seen = app_seen;
        if (text_detector_of_model(front->model, &a.detector, &e))
            return program_complain("-s auto: %s", e.message), EXIT_MODEL;
    }
    if (c->routing) {
        a.flow.leave = app_leave;
        status = begin_routing(&a, params);
    }
    if (status < 0) status = program_flow_run(&a.flow, session);
    if (part) part->lines = a.flow.progress.lines, part->failed = a.flow.progress.failed;
    text_detector_close(a.detector);
    return c->routing ? end_routing(&a, status) : status;
}

/* The language tags that the options name. */
static int choose_language(const options *o, const text_front *front, moe_session_params *params) {
    const int source_too = moe_model_needs_source(front->model);
    const text_settings *settings = &o->common.settings;
    moe_error e;
    if (settings->source[0] && !is_auto(o) && text_language(front, settings->source, 0, &params->source_tag, &e))
        return program_complain("-s: %s", e.message), EXIT_USAGE;
    if (settings->target[0] && text_language(front, settings->target, 1, &params->target_tag, &e))
        return program_complain("-t: %s", e.message), EXIT_USAGE;
    const int whole = o->raw || (o->common.ids && moe_model_prompted(front->model)); /* lines are complete */
    if (whole || o->self_test || !moe_model_language_count(front->model)) return 0;
    if (!settings->target[0]) return program_ask_language(front, "-t which language to translate into");
    if (source_too && !settings->source[0]) return program_ask_language(front, "-s which language the lines are in");
    return 0;
}

/* Whether something is kept: of text that is translated freely, by a search that knows constraints. */
static int keeps(const options *o, const text_front *front, const moe_session_params *params) {
    return (!moe_model_prompted(front->model) || moe_model_meta_find(front->model, "prompt.prefix") >= 0) &&
           (!o->no_protect || o->common.settings.glossary[0]) && !o->score && !o->prefix && !o->self_test &&
           !o->common.ids && !o->common.pretokenized &&
           (params->rules == MOE_RULES_PAPER || params->rules >= MOE_RULES_HF);
}

/* -1, or a complaint and the exit status. */
static int open_rules(options *o, const text_front *front) {
    const char *glossary = o->common.settings.glossary[0] ? o->common.settings.glossary : NULL;
    moe_error e;
    if (!text_rules_new(front, !o->no_protect, glossary, &o->rules, &e)) {
        if (glossary && o->common.verbose) program_complain("%s: %zu terms", glossary, text_rules_terms(o->rules));
        return -1;
    }
    if (e.code == MOE_ERROR_IO) return program_complain("%s", e.message), EXIT_INPUT_OUTPUT;
    if (e.code == MOE_ERROR_MEMORY) return program_complain("%s", e.message), EXIT_MODEL;
    return program_complain("%s: %s: %s", glossary, e.where, e.message), EXIT_USAGE;
}

/* The tokeniser is loaded by a thread. What glibc gives threads grows a page, and a system call, at a time. */
static void share_memory(void) {
#ifdef __GLIBC__
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_TOP_PAD, 8 << 20);
#endif
}

/* A part of the lines of ranks. */
typedef struct rank_work {
    const options *o;
    const text_front *front;
    moe_session *session;
    const moe_session_params *params;
} rank_work;

static int translate_part(void *user, ranks_part *part) {
    const rank_work *w = user;
    options o = *w->o;
    o.common.input = o.common.output = NULL;
    o.common.text = NULL;
    return run(&o, w->front, w->session, w->params, part);
}

/* -1, or a complaint and the exit status: ranks cannot do this. */
static int check_ranks(const options *o) {
    const program_common *c = &o->common;
    const char *what = o->several                                                        ? "several models"
                       : o->paragraphs                                                   ? "--paragraphs"
                       : o->self_test                                                    ? "--self-test"
                       : text_settings_prompt(&o->common.settings).context               ? "--context"
                       : c->routing                                                      ? "--routing"
                       : c->stats                                                        ? "--stats"
                       : c->dry_run                                                      ? "--dry-run"
                       : c->settings.max_memory                                          ? "--max-memory"
                       : c->stream                                                       ? "--expert-memory"
                       : strcmp(c->settings.gating, "batchwise") == 0                    ? "--gating batchwise"
                       : c->settings.device[0] && strcmp(c->settings.device, "cpu") != 0 ? "a GPU (--device)"
                                                                                         : NULL;
    return what ? program_usage_error("%s: not with several processes (mpirun)", what) : -1;
}

/* What the options ask for: by this process, or as one of several ranks. */
static int translate(options *o, int ranks) {
    if (o->several) {
        program_handle_signals();
        return run_several(o);
    }
    static text_front front; /* what the end leaves to the system can be reached from here */
    const program_common *c = &o->common;
    int status = program_open(c, MOE_MODEL_TRANSLATION, o->self_test ? TEXT_IF_THERE : program_level(c), &front);
    if ((status = ranks_status(status)) >= 0) return status;
    program_handle_signals();
    moe_session_params params = moe_session_params_default(front.model);
    moe_session *session = NULL;
    apply_options(o, &params);
    params.wire = ranks_wire();
    o->end = (int32_t)meta_int(front.model, "token.eos");
    if (o->raw) front.source_extra = 0; /* lines are complete */
    o->longest = (int)meta_int(front.model, "limit.target");
    if (o->score && c->settings.max_len < 0 && o->longest > params.max_target)
        params.max_target = o->longest; /* which may be longer than what is translated by itself */
    status = ranks_status(choose_language(o, &front, &params));
    const int kept = !status && keeps(o, &front, &params);
    if (kept) params.max_constraints = MOE_MAX_CONSTRAINTS;
    const moe_session_params later = scoring_params(o, &params);
    if (!status) status = program_session(c, &front, &params, c->routing ? &later : NULL, "a translation", &session);
    if (status < 0 && kept) status = open_rules(o, &front);
    o->wishes = text_settings_prompt(&o->common.settings);
    moe_error e;
    if (status < 0 && text_prompt_check(&front, &o->wishes, c->ids || c->pretokenized, &e))
        status = e.code == MOE_ERROR_MEMORY ? (program_complain("%s", e.message), EXIT_MODEL)
                                            : program_usage_error("%s", e.message);
    status = ranks_status(status);
    ranks_part part = { .translate = translate_part, .user = &(rank_work){ o, &front, session, &params } };
    if (status < 0 && ranks > 1) status = ranks_translate(c, 8 * (size_t)params.batch, &part);
    else if (status < 0)
        status = o->self_test ? run_self_test(&front, session, c->model) : run(o, &front, session, &params, NULL);
    program_session_free(session);
    text_rules_free(o->rules);
    text_wait_tokeniser(&front, NULL); /* no text_close: the pieces of a vocabulary take 3 ms to free one by one */
    return status;
}

int main(int argc, char **argv) {
    options o;
    share_memory();
    int status = program_begin("moe-translate");
    if (status < 0) status = parse_options(argc, argv, &o);
    if (status >= 0) return status;
    const int ranks = ranks_begin();
    if (ranks > 1) status = ranks_status(check_ranks(&o));
    if (ranks < 1) status = EXIT_USAGE;
    if (status < 0) status = translate(&o, ranks);
    ranks_end();
    return status;
}
