/* moe-score - compute the log-probability and perplexity of lines of text with a language model. */
#define _POSIX_C_SOURCE 200809L /* sigset_t */

#include "tools/programs/lines.h"
#include "tools/text/json.h"
#include "tools/text/models.h"
#include "tools/text/several.h"

#include <math.h>
#include <stdio.h>

/* ---- 1. Options ---------------------------------------------------------------------------------------- */

typedef program_common options;

static const option_row own_rows[] = {
    { "model", "FILE", "model file", .letter = 'm', .group = GROUP_MODEL, OPTION_MEMBER(ROW_WORD, model) },
    { "json", NULL,
      "write one JSON object per line: text, logprob, tokens, perplexity, ids, token_logprobs; error on failure",
      .group = GROUP_FILES, OPTION_FLAG(json) },
    { 0 },
};

static const option_program program = {
    .name = "moe-score",
    .usage = "-m MODEL [OPTION]...",
    .about =
        "Score lines of text with a language model: log-probability TAB tokens TAB perplexity.\n"
        "\n"
        "Each line of UTF-8 text on standard input gives one line of output, in the same order. Log-probabilities are "
        "natural logarithms; the end of a line counts as a token. Totals are printed to standard error: perplexity is "
        "exp(nats / count), and the end of each line also counts as a word and as a character.",
    OPTION_LISTS(OPTION_OWN, PROGRAM_ROWS("input output ids pretokenized stats verbose quiet"), PROGRAM_GATE_ROWS,
                 PROGRAM_SETTINGS("max-len truncate"), PROGRAM_MEMORY_ROWS, PROGRAM_SPEED_ROWS),
    .notes =
        "The score of an empty line is that of its end token. A line that cannot be scored, for example because it is "
        "too long, gives an empty line and an error message. moe-translate --score scores translations.\n"
        "\n" PROGRAM_HELP_EXIT("all lines scored", "some lines failed"),
    .examples = "  echo 'Good morning!' | moe-score -m models/lm-en.bin\n",
    .required = "model",
    OPTION_EXCLUSIONS("ids pretokenized"),
    .version = program_version,
};

/* ---- 2. Lines ------------------------------------------------------------------------------------------ */

typedef struct app {
    program_lines lines; /* first member, because callbacks cast its address to app */
    uint64_t tokens;
    double nats;
    uint64_t words, characters; /* counts for texts scored completely, including line ends */
    double text_nats;
} app;

static double perplexity(double nats, double count) { return exp(nats / count); }

static double perplexity_of(const moetext_hypothesis *h) {
    return perplexity(-(double)h->logprob, (double)h->n_logprobs);
}

static void plain_line(program_line *line, const moetext_hypothesis *h) {
    text_append_float(&line->output, h->logprob);
    text_printf(&line->output, "\t%zu\t%.6g", h->n_logprobs, perplexity_of(h));
}

/* Write a line as JSON; h is NULL if the line has no score. */
static void json_line(program_line *line, const moetext_result *r, const moetext_hypothesis *h) {
    json j = { .out = &line->output };
    json_open(&j, NULL, '{');
    json_whole(&j, "line", (int64_t)line->number);
    if (line->failed && !line->source.length) json_null(&j, "text");
    else json_text(&j, "text", line->source.length ? line->source.data : "");
    if (h) {
        json_float(&j, "logprob", h->logprob);
        json_whole(&j, "tokens", (int64_t)h->n_logprobs);
        json_float(&j, "perplexity", (float)perplexity_of(h));
        json_ids(&j, "ids", h->ids, h->n_ids);
        json_open(&j, "token_logprobs", '[');
        for (size_t i = 0; i < h->n_logprobs; i++) json_float(&j, NULL, h->token_logprobs[i]);
        json_close(&j, ']');
    }
    if (line->failed) json_text(&j, "error", r->message);
    else if (*program_line_note(line, r)) json_text(&j, "cut", program_line_note(line, r));
    json_close(&j, '}');
}

/* ---- 3. Totals ----------------------------------------------------------------------------------------- */

static void count(app *a, const program_line *line, const moetext_hypothesis *h, int is_text) {
    const char *s = line->source.data;
    a->tokens += h->n_logprobs;
    a->nats -= (double)h->logprob;
    if (!is_text) return;
    a->text_nats -= (double)h->logprob;
    a->words++;
    a->characters++;
    for (size_t i = 0; i < line->source.length; i++) {
        const int blank = s[i] == ' ' || s[i] == '\t';
        a->words += (uint64_t)(!blank && (!i || s[i - 1] == ' ' || s[i - 1] == '\t'));
        a->characters += (uint64_t)(((unsigned char)s[i] & 0xC0) != 0x80);
    }
}

static void app_write(program_lines *lines, program_line *line, const moetext_result *r) {
    const program_common *o = lines->options;
    const moetext_hypothesis *h = r->n_hypotheses && !r->status ? &r->hypotheses[0] : NULL;
    const int cut = line->cut || r->flags & MOETEXT_TRUNCATED;
    if (h) count((app *)(void *)lines, line, h, !cut && !o->ids && !o->pretokenized);
    if (o->json) json_line(line, r, h);
    else if (h) plain_line(line, h);
}

static void app_totals(const program_lines *lines, const program_totals *t) {
    const app *a = (const app *)(const void *)lines;
    if (!lines->options->quiet) {
        fprintf(stderr, "lines            %llu, %llu of them failed\ntokens           %llu (ends of lines included)\n",
                (unsigned long long)lines->progress.lines, (unsigned long long)lines->progress.failed,
                (unsigned long long)a->tokens);
        if (a->tokens)
            fprintf(stderr, "nats per token   %.6f\nperplexity       %.6g per token\n", a->nats / (double)a->tokens,
                    perplexity(a->nats, (double)a->tokens));
        if (a->words)
            fprintf(stderr, "                 %.6g per word (%llu), %.6g per character (%llu)\n",
                    perplexity(a->text_nats, (double)a->words), (unsigned long long)a->words,
                    perplexity(a->text_nats, (double)a->characters), (unsigned long long)a->characters);
        if (t->unknown_pieces)
            fprintf(stderr, "unknown pieces   %llu of %llu\n", (unsigned long long)t->unknown_pieces,
                    (unsigned long long)t->pieces);
    }
    if (lines->options->stats) {
        fprintf(stderr,
                "seconds          %.3f\ntokens/s         %.1f\n"
                "peak memory      %.1f MiB resident, %.1f MiB of it the session's\n"
                "kernels          %s\n",
                t->seconds, t->seconds > 0 ? (double)a->tokens / t->seconds : 0.0, t->resident,
                (double)t->stats.bytes / 1048576.0, t->stats.isa ? t->stats.isa : "?");
        program_expert_stats(&t->stats);
    }
}

/* ---- 4. Main ------------------------------------------------------------------------------------------- */

int main(int argc, char **argv) {
    static const char *const languages[2] = { NULL };
    program_common o = program_common_none();
    moetext_model *model = NULL;
    routing_file routing = { 0 };
    moe_error e;
    app a = { .lines = { .done_word = "scored", .task = MOETEXT_SCORE, .keeps = 1, .write = app_write } };
    int status = program_begin("moe-score");
    if (status < 0) status = option_parse(&program, argc, argv, &o);
    if (status >= 0) return status;
    text_settings settings = program_settings(&o);
    settings.kind = 1;
    settings.scores = 1;
    if (text_model_begin(o.model, &settings, program_level(&o), &model, &e)) return program_model_error(o.model, &e);
    status = program_check_kind(o.model, moetext_model_engine(model), MOE_MODEL_LANGUAGE);
    program_handle_signals();
    a.lines.options = &o, a.lines.stats = app_totals;
    if (status < 0) status = program_translator(&o, &settings, model, "a line's score", &a.lines.translator);
    if (status < 0) status = program_routing_open(&o, text_front_of(model), languages, &routing);
    if (status < 0) {
        a.lines.routing = o.routing ? &routing : NULL;
        status = program_routing_close(&routing, program_lines_run(&a.lines));
    }
    moetext_free(a.lines.translator);
    moetext_model_close(model);
    return status;
}
