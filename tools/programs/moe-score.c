/* moe-score - log-probability and perplexity of lines of text by a language model.
 *
 * Contents
 *   1. Options    the command line
 *   2. Lines      a result as text, as JSON
 *   3. Flow       a line's request and result, for program.h
 *   4. Totals     the figures at the end
 *   5. Main
 */
#include "moe.h"
#include "tools/programs/program.h"
#include "tools/programs/routing.h"
#include "tools/text/json.h"
#include "tools/text/text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ==== 1. Options ======================================================================================== */

typedef program_common options;

static const option_row own_rows[] = {
    { "model", "FILE", "model file", .letter = 'm', .group = GROUP_MODEL, OPTION_MEMBER(ROW_WORD, model) },
    { "json", NULL,
      "one JSON object per line: text, logprob, tokens, perplexity, ids, token_logprobs; error on failure",
      .group = GROUP_FILES, OPTION_FLAG(json) },
    { 0 },
};

static const option_list all_rows[] = {
    { own_rows, 0, NULL }, PROGRAM_ROWS("input output ids pretokenized stats verbose quiet"),
    PROGRAM_GATE_ROWS,     PROGRAM_SETTINGS("max-len truncate"),
    PROGRAM_MEMORY_ROWS,   PROGRAM_SPEED_ROWS,
};

static const char *const exclusions[] = { "ids pretokenized", NULL };

static const option_program program = {
    .name = "moe-score",
    .usage = "-m MODEL [OPTION]...",
    .about =
        "Score lines of text with a language model: log-probability TAB tokens TAB perplexity.\n"
        "\n"
        "Each line of UTF-8 text on standard input gives one line of output, in the same order. The log-probability "
        "is natural; the end of a line counts as a token. Totals are printed to standard error: perplexity is "
        "exp(nats / count), and counts of words or characters include the end of each line as one.",
    OPTION_LISTS(all_rows),
    .notes =
        "An empty line is scored by its end token alone. A line that cannot be scored, for example because it is too "
        "long, gives an empty line and an error message. moe-translate --score scores translations.\n"
        "\n" PROGRAM_HELP_EXIT("all lines scored", "some lines failed"),
    .examples = "  echo 'Good morning!' | moe-score -m models/lm-en.bin\n",
    .required = "model",
    .exclusions = exclusions,
    .version = program_version,
};

/* ==== 2. Lines ========================================================================================== */

static size_t tokens_of(const moe_hypothesis *h) { return h->n_ids + 1; }
static double perplexity(double nats, double count) { return exp(nats / count); }

static void plain_line(text_job *job, const moe_hypothesis *h) {
    text_append_float(&job->output, h->logprob);
    text_printf(&job->output, "\t%zu\t%.6g", tokens_of(h), perplexity(-(double)h->logprob, (double)tokens_of(h)));
}

/* Write the line of a job as JSON; h is NULL without a result. */
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
    program_common o = program_common_none();
    int status = program_begin("moe-score");
    if (status < 0) status = option_parse(&program, argc, argv, &o);
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
                                            .truncate = o.settings.truncate > 0,
                                            .max_source = (size_t)params.max_target,
                                            .max_target = (size_t)params.max_target };
    status = program_session(&o, &front, &params, NULL, "a line's score", &session);
    if (status < 0) status = program_routing_open(&o, &front, (const char *const[2]){ NULL }, &a.routing);
    if (status < 0) status = program_routing_close(&a.routing, program_flow_run(&a.flow, session));
    program_session_free(session);
    text_close(&front);
    return status;
}
