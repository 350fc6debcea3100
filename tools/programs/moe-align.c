/* moe-align - link the words of parallel text that belong together: see usage() below, or --help.
 *
 * Contents
 *   1. Options   the command line
 *   2. Pairs     a line as words and ids
 *   3. Looking   the attention of a model that translates both ways
 *   4. Links     which words belong together
 *   5. Lines     in, through the model, out
 *   6. Main
 */
#define _GNU_SOURCE      /* getopt_long on Linux */
#define _DARWIN_C_SOURCE /* and on macOS         */

#include "moe.h"
#include "tools/programs/program.h"
#include "tools/text/align.h"
#include "tools/text/text.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ==== 1. Options ======================================================================================== */

typedef struct options {
    program_common common;
    const char *source, *target;
    float share;
} options;

static void usage(FILE *to) {
    fputs("Usage: moe-align [-m MODEL] -s LANG -t LANG [OPTION]...\n"
          "Aligns the words of a text and its translation. Lines of standard input are\n"
          "source TAB translation, in UTF-8. Each gives one line such as 0-0 1-2 2-1, in\n"
          "the same order (the format of Moses): the number of a word of the source, and\n"
          "of a word of the translation, both from 0. Spaces separate words.\n"
          "\n" PROGRAM_HELP_MODEL "  -s, --source LANG         language of the source, such as en\n"
          "  -t, --target LANG         language of the translation. A model without\n"
          "                            language tags needs neither -s nor -t\n"
          "  -i, --input FILE          read this file instead of standard input\n"
          "  -o, --output FILE         write to this file instead of standard output; after\n"
          "                            a failure or ^C it holds the whole lines that were\n"
          "                            finished\n"
          "      --share X             link two words if each has at least X times the\n"
          "                            largest weight of the other. 1 links only pairs of\n"
          "                            words with each other's largest weight; less gives\n"
          "                            more links (default: 0.7)\n"
          "      --ids                 lines are token ids with spaces between them; each\n"
          "                            is a word\n"
          "      --pretokenized        lines are pieces of the model's vocabulary with\n"
          "                            spaces between them; each is a word\n"
          "      --max-len N           longest source and longest translation, in tokens\n"
          "  -v, --verbose             report kernels, GPU and memory on standard error\n"
          "  -q, --quiet               no progress; a line that fails is still reported\n"
          "\n"
          "The weight of two words is the attention on the source word when the model\n"
          "writes the word of the translation. If the model has both languages, it scores\n"
          "both directions, and the product of both weights counts.\n"
          "\n",
          to);
    fputs(PROGRAM_HELP_MEMORY "\n" PROGRAM_HELP_SPEED("lines aligned"), to);
    fputs("\n"
          "A line that cannot be aligned gives an empty line, and standard error names\n"
          "the line and the reason.\n"
          "\n",
          to);
    fputs(PROGRAM_HELP_EXIT("all aligned", "some lines were not"), to);
    fputs("\n"
          "Example: paste in.en out.de | moe-align -m models/en-de-fr-es.bin -s en -t de\n",
          to);
}

/* -1: go on; else the exit status. */
static int parse_options(int argc, char **argv, options *o) {
    enum { SHARE = 256 };
    static const struct option known[] = { PROGRAM_OPTIONS,
                                           PROGRAM_MEMORY_OPTIONS,
                                           { "input", required_argument, NULL, 'i' },
                                           { "source", required_argument, NULL, 's' },
                                           { "target", required_argument, NULL, 't' },
                                           { "share", required_argument, NULL, SHARE },
                                           { "ids", no_argument, NULL, PROGRAM_IDS },
                                           { "pretokenized", no_argument, NULL, PROGRAM_PRETOKENIZED },
                                           { "max-len", required_argument, NULL, PROGRAM_MAX_LEN },
                                           { NULL, 0, NULL, 0 } };
    *o = (options){ .common = { .usage = usage, .threads = -1, .batch = -1, .max_len = -1 }, .share = 0.7f };
    int c, status = -1;
    uint64_t given = 0;
    while (status < 0 && (c = program_next_option(argc, argv, PROGRAM_SHORT "i:s:t:", known, NULL, &given)) != -1) {
        switch (c) {
        case 's': o->source = optarg; break;
        case 't': o->target = optarg; break;
        case SHARE: status = program_float("share", optarg, &o->share); break;
        default: status = program_option(&o->common, c); break;
        }
    }
    if (status >= 0) return status;
    if (optind < argc)
        return program_usage_error("'%s' is one word too many: text comes from standard input or -i", argv[optind]);
    if ((status = program_default_model(&o->common.model)) >= 0) return status;
    if (o->common.ids && o->common.pretokenized)
        return program_usage_error("--ids and --pretokenized do not go together");
    if (o->share > 1.0f) return program_usage_error("--share is at most 1");
    return -1;
}

/* ==== 2. Pairs ========================================================================================== */

/* One side of a line. */
typedef struct side {
    text_ids ids;
    text_ids word; /* [ids] which word each belongs to */
    size_t words;
} side;

typedef struct pair {
    uint64_t line;
    side sides[2]; /* source, translation */
    struct look {
        struct pair *pair;
        float *weights; /* [ids of the side that is written, ids of the side that is looked at] */
        size_t capacity;
    } looks[2];  /* at the source, at the translation */
    int waiting; /* requests under way */
    int failed;
    char note[256];
} pair;

static void refuse(pair *p, const char *why) {
    if (!p->failed) snprintf(p->note, sizeof p->note, "%s", why);
    p->failed = 1;
}

/* The words of `text`, each as ids: pieces never reach over a space. More than `most` in all are refused. */
static moe_status read_side(const text_front *front, const program_common *o, const char *text, size_t length,
                            size_t most, side *s, pair *p, moe_error *error) {
    text_ids ids = { 0 };
    moe_status status = MOE_OK;
    s->ids.length = s->word.length = s->words = 0;
    for (size_t at = 0, end; !status && !p->failed && at < length; at = end) {
        moe_error why;
        for (; at < length && text[at] == ' '; at++) {}
        for (end = at; end < length && text[end] != ' '; end++) {}
        if (end == at) break;
        status = o->ids            ? text_parse_ids(front, text + at, end - at, &ids, &why)
                 : o->pretokenized ? text_parse_pieces(front, text + at, end - at, &ids, &why)
                                   : text_encode(front, text + at, end - at, &ids, &why);
        if (status == MOE_ERROR_MEMORY) *error = why;
        else if (status) refuse(p, why.message), status = MOE_OK;
        const int32_t word = (int32_t)s->words++;
        if (!status && !p->failed) status = text_ids_append(&s->ids, ids.data, ids.length, error);
        for (size_t i = 0; !status && !p->failed && i < ids.length; i++)
            status = text_ids_append(&s->word, &word, 1, error);
    }
    text_ids_free(&ids);
    if (s->ids.length > most && !p->failed) {
        p->failed = 1;
        snprintf(p->note, sizeof p->note, "one side has %zu tokens, at most %zu fit; --max-len allows more",
                 s->ids.length, most);
    }
    return status;
}

/* Errors: MOE_ERROR_MEMORY; a line that is no pair fails for itself. */
static moe_status read_pair(const text_front *front, const program_common *o, const text_line *line, size_t most,
                            pair *p, moe_error *error) {
    const char *tab = memchr(line->data, '\t', line->length);
    const size_t source = tab ? (size_t)(tab - line->data) : line->length;
    char why[128];
    p->line = line->number;
    p->failed = p->waiting = 0;
    for (int i = 0; i < 2; i++) p->sides[i].ids.length = p->sides[i].word.length = p->sides[i].words = 0;
    text_line_usable(line, why, sizeof why);
    if (*why) refuse(p, why);
    else if (!tab && line->length) refuse(p, "it is not source TAB translation: there is no TAB");
    if (p->failed || !tab) return MOE_OK;
    moe_status status = read_side(front, o, line->data, source, most, &p->sides[0], p, error);
    const text_front targets = text_front_of_targets(front);
    return status ? status : read_side(&targets, o, tab + 1, line->length - source - 1, most, &p->sides[1], p, error);
}

/* ==== 3. Looking ======================================================================================== */

enum { LINES = 256 }; /* most lines that go through the model together */

typedef struct app {
    const options *options;
    text_front front;
    moe_session *session;
    int32_t tags[2]; /* of the languages; -1: the model knows none */
    int directions;  /* 2: the model translates back too */
    size_t most;     /* tokens of a side that can be a source and a target */
    pair pairs[LINES];
    size_t n, next; /* pairs; requests made of them */
    text_aligner aligner;
    text_bytes block;
    program_output out;
    program_progress progress;
    moe_error trouble;
} app;

static moe_status grow(float **numbers, size_t *capacity, size_t n, moe_error *error) {
    if (n <= *capacity) return MOE_OK;
    float *grown = n > SIZE_MAX / sizeof *grown ? NULL : realloc(*numbers, n * sizeof *grown);
    if (!grown) return *error = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" }, MOE_ERROR_MEMORY;
    *numbers = grown;
    *capacity = n;
    return MOE_OK;
}

/* Of every pair the translation given the source, then the source given the translation. */
static int pull(void *user, int wait, moe_request *request) {
    app *a = user;
    (void)wait;
    for (; a->next < a->n * (size_t)a->directions; a->next++) {
        pair *p = &a->pairs[a->next / (size_t)a->directions];
        const size_t at = a->next % (size_t)a->directions;
        const side *read = &p->sides[at], *written = &p->sides[1 - at];
        if (program_signal || a->trouble.code) return MOE_PULL_CANCEL;
        if (p->failed || !read->ids.length || !written->ids.length) continue;
        if (grow(&p->looks[at].weights, &p->looks[at].capacity, read->ids.length * written->ids.length, &a->trouble))
            return MOE_PULL_CANCEL;
        p->looks[at].pair = p;
        request->source = read->ids.data; /* the session has set the other fields; force is not 0 */
        request->n_source = read->ids.length;
        request->target = written->ids.data;
        request->n_target = written->ids.length;
        request->target_tag = a->tags[1 - at];
        request->source_tag = a->tags[at];
        request->user = &p->looks[at];
        a->next++;
        p->waiting++;
        return MOE_PULL_REQUEST;
    }
    return MOE_PULL_END;
}

static void look(void *user, const moe_attention *attention) {
    const struct look *l = attention->user;
    const size_t written = l->pair->sides[l == &l->pair->looks[0]].ids.length;
    (void)user;
    if (attention->position < written) /* the end belongs to no word */
        memcpy(l->weights + attention->position * attention->n, attention->weights,
               attention->n * sizeof *attention->weights);
}

static void done(void *user, const moe_result *result) {
    app *a = user;
    const struct look *l = result->user;
    l->pair->waiting--;
    if (result->status) refuse(l->pair, result->message);
    else a->progress.tokens += result->hypotheses[0].n_ids;
}

/* ==== 4. Links ========================================================================================== */

typedef struct linked {
    text_bytes *out;
    const char *between;
} linked;

static moe_status write_link(void *user, size_t source, size_t target, moe_error *error) {
    linked *l = user;
    (void)error;
    text_printf(l->out, "%s%zu-%zu", l->between, source, target);
    l->between = " ";
    return MOE_OK;
}

/* Append the links of a pair to `out`. */
static moe_status link_words(app *a, const pair *p, text_bytes *out, moe_error *error) {
    text_side sides[2];
    linked l = { out, "" };
    for (int i = 0; i < 2; i++)
        sides[i] = (text_side){ p->sides[i].word.data, p->sides[i].ids.length, p->sides[i].words };
    if (!sides[0].tokens || !sides[1].tokens) return MOE_OK;
    return text_align(&a->aligner, &sides[0], &sides[1], p->looks[0].weights,
                      a->directions == 2 ? p->looks[1].weights : NULL, a->options->share, write_link, &l, error);
}

/* ==== 5. Lines ========================================================================================== */

/* Read the lines that are available now: at least one, at most LINES. */
static text_read read_lines(app *a, text_reader *reader) {
    text_read state = TEXT_READ_LINE;
    text_line line;
    for (a->n = 0; a->n < LINES; a->n++) {
        state = text_reader_next(reader, a->n == 0, &line);
        if (state != TEXT_READ_LINE ||
            read_pair(&a->front, &a->options->common, &line, a->most, &a->pairs[a->n], &a->trouble))
            break;
    }
    return state;
}

/* Up to the first line that is not finished: a signal may have come. */
static void write_lines(app *a) {
    a->block.length = 0;
    for (size_t k = 0; k < a->n && !a->trouble.code; k++) {
        pair *p = &a->pairs[k];
        if (p->waiting || (k + 1) * (size_t)a->directions > a->next) break;
        if (p->failed) program_complain("line %llu: %s", (unsigned long long)p->line, p->note);
        else if (link_words(a, p, &a->block, &a->trouble)) return;
        text_append(&a->block, "\n", 1);
        a->progress.lines++;
        a->progress.failed += (uint64_t)p->failed;
    }
    if (a->block.failed) a->trouble = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
    else program_write(&a->out, a->block.data, a->block.length);
    program_progress_show(&a->progress);
}

/* The exit status. */
static int align(app *a, int in) {
    const program_common *o = &a->options->common;
    text_reader reader;
    text_read state = TEXT_READ_LINE;
    moe_error e;
    int problem = 0; /* errno of reading */
    moe_status status = MOE_OK;
    text_reader_init(&reader, in, &program_signal, program_wake);
    a->progress.on = !o->quiet && isatty(STDERR_FILENO) && !isatty(a->out.fd) && !isatty(in);
    a->progress.begin = program_seconds();
    while (!status && !a->trouble.code && !a->out.error && (state == TEXT_READ_LINE || state == TEXT_READ_LATER)) {
        state = read_lines(a, &reader);
        if (state == TEXT_READ_ERROR) problem = errno;
        a->next = 0;
        if (a->trouble.code) break;
        status = moe_translate(a->session, pull, done, a, &e);
        if (!status || status == MOE_ERROR_CANCELLED) write_lines(a);
        if (status && !a->trouble.code) a->trouble = e;
    }
    program_progress_hide();
    text_reader_free(&reader);
    if (a->out.error) return program_complain("%s: %s", a->out.name, strerror(a->out.error)), EXIT_INPUT_OUTPUT;
    if (problem)
        return program_complain("%s: %s", o->input ? o->input : "standard input", strerror(problem)), EXIT_INPUT_OUTPUT;
    if (program_signal) return program_stopped(o, &a->out);
    if (a->trouble.code) return program_complain("%s", a->trouble.message), EXIT_MODEL;
    if (a->progress.failed)
        program_complain("%llu of %llu lines could not be aligned", (unsigned long long)a->progress.failed,
                         (unsigned long long)a->progress.lines);
    return a->progress.failed ? EXIT_SOME_LINES : EXIT_DONE;
}

/* ==== 6. Main =========================================================================================== */

/* The tags of the languages, where the model has some. */
static int choose_languages(app *a) {
    const char *const codes[2] = { a->options->source, a->options->target };
    moe_error e;
    a->tags[0] = a->tags[1] = -1;
    a->directions = moe_model_language_count(a->front.model) > 1 ? 2 : 1;
    for (int i = 0; i < 2; i++) {
        if (codes[i] && text_language(&a->front, codes[i], i, &a->tags[i], &e))
            return program_complain("-%c: %s", "st"[i], e.message), EXIT_USAGE;
        if (!codes[i] && moe_model_language_count(a->front.model) > (size_t)(1 - i))
            return program_ask_language(&a->front, "-s and -t which languages the two sides are in");
    }
    return -1;
}

int main(int argc, char **argv) {
    static app a;
    options o;
    int in, status = program_begin("moe-align");
    if (status < 0) status = parse_options(argc, argv, &o);
    if (status >= 0) return status;

    a.options = &o;
    status = program_open(&o.common, MOE_MODEL_TRANSLATION, program_level(&o.common), &a.front);
    if (status >= 0) return status;
    program_handle_signals();
    moe_session_params params = moe_session_params_default(a.front.model);
    program_apply(&o.common, &params);
    params.beam = params.nbest = 1;
    params.prune = params.coverage_penalty = params.rerank = 0;
    params.rules = MOE_RULES_PAPER;
    params.device = "cpu";
    params.attention = look;
    const size_t room = (size_t)params.max_source, end = (size_t)params.max_target - 1;
    a.most = room < a.front.source_extra ? 0 : room - a.front.source_extra < end ? room - a.front.source_extra : end;
    status = choose_languages(&a);
    if (status < 0) status = program_session(&o.common, &a.front, &params, NULL, "an alignment", &a.session);
    if (status < 0) {
        status = program_open_streams(&o.common, &in, &a.out);
        if (status < 0) status = align(&a, in);
        status = program_close_streams(&o.common, in, &a.out, status);
    }
    for (size_t k = 0; k < LINES; k++)
        for (int i = 0; i < 2; i++) {
            text_ids_free(&a.pairs[k].sides[i].ids);
            text_ids_free(&a.pairs[k].sides[i].word);
            free(a.pairs[k].looks[i].weights);
        }
    text_aligner_free(&a.aligner);
    text_bytes_free(&a.block);
    program_session_free(a.session);
    text_close(&a.front);
    return status;
}
