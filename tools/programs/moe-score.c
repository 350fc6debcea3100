/* moe-score - log-probability and perplexity of lines of text by a language model: see usage() below, or --help.
 *
 * Contents
 *   1. Options    the command line
 *   2. Lines      a result as text, as JSON
 *   3. Flow       a line's request and result, for program.h
 *   4. Totals     the figures at the end
 *   5. Main
 */
#define _GNU_SOURCE      /* getopt_long on Linux */
#define _DARWIN_C_SOURCE /* and on macOS         */

#include "moe.h"
#include "tools/programs/program.h"
#include "tools/programs/routing.h"
#include "tools/text/json.h"
#include "tools/text/text.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ==== 1. Options ======================================================================================== */

static void usage(FILE *to) {
    fputs("Usage: moe-score -m MODEL [OPTION]...\n"
          "Scores lines of UTF-8 text from standard input with a language model. Each\n"
          "input line gives one output line, in the same order: the natural logarithm of\n"
          "its probability TAB tokens TAB perplexity. The end of a line is a token too.\n"
          "Standard error gets the totals; perplexity is exp(nats / count). Counts of\n"
          "words or characters include the end of a line as one.\n"
          "\n"
          "  -m, --model FILE          the model\n"
          "  -i, --input FILE          read this file instead of standard input\n"
          "  -o, --output FILE         write to this file instead of standard output; after\n"
          "                            a failure or ^C it holds the whole lines that were\n"
          "                            finished\n"
          "      --ids                 lines are token ids with spaces between them\n"
          "      --pretokenized        lines are pieces of the model's vocabulary with\n"
          "                            spaces between them; other pieces become the unknown\n"
          "                            token\n"
          "      --json                one JSON object per line: text, logprob, tokens,\n"
          "                            perplexity, ids, token_logprobs; error if a line\n"
          "                            could not be scored\n"
          "      --max-len N           longest line, in tokens, its end included\n"
          "      --truncate            cut a line at its first unusable part; without\n"
          "                            this option such a line fails\n"
          "      --stats               report seconds and memory on standard error at the\n"
          "                            end\n"
          "  -v, --verbose             report kernels, GPU and memory on standard error\n"
          "  -q, --quiet               no progress, no warnings and no totals; a line that\n"
          "                            fails is still reported\n"
          "\n",
          to);
    fputs(PROGRAM_HELP_GATES("token") "\n" PROGRAM_HELP_MEMORY "\n" PROGRAM_HELP_SPEED("lines scored"), to);
    fputs("\n"
          "An empty line is scored as well: only its end. A line that is too long cannot\n"
          "be scored. It gives an empty line, and standard error names the line and the\n"
          "reason.\n"
          "moe-translate --score scores translations.\n"
          "\n",
          to);
    fputs(PROGRAM_HELP_EXIT("all scored", "some lines were not"), to);
    fputs("\n"
          "Example: echo 'Good morning!' | moe-score -m models/lm-en.bin\n",
          to);
}

/* -1: go on; else the exit status. */
static int parse_options(int argc, char **argv, program_common *o) {
    static const struct option known[] = { PROGRAM_OPTIONS,      PROGRAM_GATE_OPTIONS,   PROGRAM_STREAM_OPTIONS,
                                           PROGRAM_LINE_OPTIONS, PROGRAM_MEMORY_OPTIONS, { NULL, 0, NULL, 0 } };
    *o = (program_common){ .usage = usage, .threads = -1, .batch = -1, .max_len = -1 };
    int c, status = -1;
    uint64_t given = 0;
    while (status < 0 && (c = program_next_option(argc, argv, PROGRAM_SHORT "i:", known, NULL, &given)) != -1)
        status = program_option(o, c);
    if (status >= 0) return status;
    if (optind < argc)
        return program_usage_error("'%s' is one word too many: text comes from standard input or -i", argv[optind]);
    if (!o->model) return program_usage_error("say which model with -m");
    if (o->ids && o->pretokenized) return program_usage_error("--ids and --pretokenized do not go together");
    return -1;
}

/* ==== 2. Lines ========================================================================================== */

static size_t tokens_of(const moe_hypothesis *h) { return h->n_ids + 1; }
static double perplexity(double nats, double count) { return exp(nats / count); }

static void plain_line(text_job *job, const moe_hypothesis *h) {
    text_append_float(&job->output, h->logprob);
    text_printf(&job->output, "\t%zu\t%.6g", tokens_of(h), perplexity(-(double)h->logprob, (double)tokens_of(h)));
}

/* The line for a job as JSON; h NULL where there is no result. */
static void json_line(text_job *job, const moe_hypothesis *h) {
    json j = { .out = &job->output };
    json_open(&j, NULL, '{');
    json_whole(&j, "line", (int64_t)job->line);
    if (job->failed && !job->source.length) json_null(&j, "text");
    else json_text(&j, "text", job->source.length ? job->source.data : "");
    if (h) {
        json_float(&j, "logprob", h->logprob);
        json_whole(&j, "tokens", (int64_t)tokens_of(h));
        json_float(&j, "perplexity", (float)perplexity(-(double)h->logprob, (double)tokens_of(h)));
        json_ids(&j, "ids", h->ids, h->n_ids);
        json_open(&j, "token_logprobs", '[');
        for (size_t i = 0; i < tokens_of(h); i++) json_float(&j, NULL, h->token_logprobs[i]);
        json_close(&j, ']');
    }
    if (job->failed) json_text(&j, "error", job->note);
    else if (job->cut) json_text(&j, "cut", job->note);
    json_close(&j, '}');
}

/* ==== 3. Flow =========================================================================================== */

typedef struct app {
    program_flow flow; /* first, because callbacks get a pointer to it */
    routing_file routing;
    uint64_t tokens;
    double nats;
    uint64_t words, characters; /* of text that was scored whole, ends of lines included */
    double text_nats;
} app;

static app *app_of(const program_flow *flow) { return (app *)(uintptr_t)flow; }

static void app_ask(text_stream *stream, text_job *job, moe_request *request) {
    static const int32_t nothing[1] = { 0 }; /* non-NULL pointer for an empty target (NULL means "no target") */
    app *a = (app *)(void *)stream;
    request->target = job->source_ids.data ? job->source_ids.data : nothing;
    request->n_target = job->source_ids.length;
    if (a->flow.options->routing && !(job->extra = routing_begin(&a->routing, job->line)))
        stream->trouble = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
}

static void app_see(program_flow *flow, text_job *job, const moe_result *result) {
    app *a = app_of(flow);
    const moe_hypothesis *h = &result->hypotheses[0];
    a->tokens += tokens_of(h);
    a->nats -= (double)h->logprob;
    if (job->cut || flow->options->ids || flow->options->pretokenized) return;
    const char *s = job->source.data;
    a->text_nats -= (double)h->logprob;
    a->words++;
    a->characters++;
    for (size_t i = 0; i < job->source.length; i++) {
        int blank = s[i] == ' ' || s[i] == '\t';
        a->words += (uint64_t)(!blank && (!i || s[i - 1] == ' ' || s[i - 1] == '\t'));
        a->characters += (uint64_t)(((unsigned char)s[i] & 0xC0) != 0x80);
    }
}

static moe_status app_line(program_flow *flow, text_job *job, const moe_result *result, moe_error *error) {
    const moe_hypothesis *h = result && result->n_hypotheses ? &result->hypotheses[0] : NULL;
    (void)error;
    if (flow->options->json) json_line(job, h);
    else if (h) plain_line(job, h);
    return MOE_OK;
}

static moe_status app_leave(program_flow *flow, text_job *job, moe_error *error) {
    routing_sentence *sentence = job->extra;
    if (!sentence) return MOE_OK;
    if (job->failed) sentence->n_entries = 0; /* a failed line has no routing */
    return routing_put(&app_of(flow)->routing, sentence, error);
}

/* ==== 4. Totals ========================================================================================= */

static void app_totals(const program_flow *flow, const moe_stats *s, double elapsed) {
    const app *a = app_of(flow);
    if (!flow->options->quiet) {
        fprintf(stderr, "lines            %llu, %llu of them failed\ntokens           %llu (ends of lines included)\n",
                (unsigned long long)flow->progress.lines, (unsigned long long)flow->progress.failed,
                (unsigned long long)a->tokens);
        if (a->tokens)
            fprintf(stderr, "nats per token   %.6f\nperplexity       %.6g per token\n", a->nats / (double)a->tokens,
                    perplexity(a->nats, (double)a->tokens));
        if (a->words)
            fprintf(stderr, "                 %.6g per word (%llu), %.6g per character (%llu)\n",
                    perplexity(a->text_nats, (double)a->words), (unsigned long long)a->words,
                    perplexity(a->text_nats, (double)a->characters), (unsigned long long)a->characters);
        if (flow->stream.unknown_pieces)
            fprintf(stderr, "unknown pieces   %llu of %llu\n", (unsigned long long)flow->stream.unknown_pieces,
                    (unsigned long long)flow->stream.pieces);
    }
    if (flow->options->stats) {
        fprintf(stderr,
                "seconds          %.3f\ntokens/s         %.1f\n"
                "peak memory      %.1f MiB resident, %.1f MiB of it the session's\n"
                "kernels          %s\n",
                elapsed, elapsed > 0 ? (double)a->tokens / elapsed : 0.0, program_resident(),
                (double)s->bytes / 1048576.0, s->isa ? s->isa : "?");
        program_expert_stats(s);
    }
}

/* ==== 5. Main =========================================================================================== */

int main(int argc, char **argv) {
    program_common o;
    int status = program_begin("moe-score");
    if (status < 0) status = parse_options(argc, argv, &o);
    if (status >= 0) return status;

    text_front front;
    status = program_open(&o, MOE_MODEL_LANGUAGE, program_level(&o), &front);
    if (status >= 0) return status;
    program_handle_signals();
    app a = { .flow = { .stream = { .front = &front, .blank_too = 1, .ask = app_ask },
                        .options = &o,
                        .done_word = "scored",
                        .see = app_see,
                        .line = app_line,
                        .leave = app_leave,
                        .stats = app_totals } };
    moe_session_params params = moe_session_params_default(front.model);
    moe_session *session = NULL;
    params.batch = PROGRAM_SCORED_AT_ONCE;
    program_apply(&o, &params);
    params.beam = params.nbest = 1;
    if (o.routing) params.routing = routing_keep_of_job;
    a.flow.stream.options = (text_options){ .ids = o.ids,
                                            .pretokenized = o.pretokenized,
                                            .truncate = o.truncate,
                                            .max_source = (size_t)params.max_target,
                                            .max_target = (size_t)params.max_target };
    status = program_session(&o, &front, &params, NULL, "a line's score", &session);
    if (status < 0) status = program_routing_open(&o, &front, (const char *const[2]){ NULL }, &a.routing);
    if (status < 0) status = program_routing_close(&a.routing, program_flow_run(&a.flow, session));
    program_session_free(session);
    text_close(&front);
    return status;
}
