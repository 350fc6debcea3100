/* moe-translate - translate lines of text.
 *
 * Contents
 *   1. Options      the command line
 *   2. Lines        write a result as text or JSON
 *   3. One model
 *   4. Self-test    translate the golden sentences stored in a model
 *   5. Several models
 *   6. Main
 */
#define _POSIX_C_SOURCE 200809L /* sigset_t */

#include "tools/programs/live_lines.h"
#include "tools/programs/ranks.h"
#include "tools/text/choice.h"
#include "tools/text/json.h"
#include "tools/text/several.h"
#include "tools/text/spm.h"

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
    program_common common;          /* common.settings holds preset, parameters, languages and more */
    const char *given[MOST_MODELS]; /* arguments of -m and --models */
    const char *const *models;      /* [n_models] these, or the files of the choice */
    size_t n_models;
    moetext_choice *choice; /* NULL if -m, --models or MOE_MODEL names the model; never freed */
    int several;            /* 1 to open all models as one translator */
    int nbest;              /* -1 if not given */
    int score, prefix, self_test, paragraphs, no_protect, live;
    int raw;
} options;

static int add_model(void *user, const option_row *row, const char *path) {
    options *o = user;
    if (o->n_models == MOST_MODELS) return program_usage_error("more than %d models: use --models DIR", MOST_MODELS);
    if (!o->n_models) o->common.model = path;
    o->given[o->n_models++] = path;
    o->models = o->given;
    o->several |= o->n_models > 1 || !row->letter;
    return -1;
}

static const option_row own_rows[] = {
    { "model", "FILE", "model file (default: MOE_MODEL, else fetched models, else the installed model)",
      .more = ". moe-get fetches models. If repeated, each line uses the model that translates from -s to -t, or two "
              "models with a pivot language between them",
      .letter = 'm', .group = GROUP_MODEL, .kind = ROW_CALL, .take = add_model, .repeated = 1 },
    { "models", "DIR", "use all models (*.bin) in a directory", .group = GROUP_MODEL, .kind = ROW_CALL,
      .take = add_model, .repeated = 1 },
    { "raw-ids", NULL,
      "like --ids, but input lines contain language and end tokens, and output lines all generated tokens",
      .group = GROUP_FILES, OPTION_FLAG(raw), .more = ". The same applies to the targets of --score and --prefix" },
    { "paragraphs", NULL, "join lines up to the next blank line; each paragraph becomes one line", .group = GROUP_FILES,
      OPTION_FLAG(paragraphs) },
    { "score", NULL, "lines contain source TAB target; print the target's log-probability TAB number of tokens",
      .group = GROUP_FILES, OPTION_FLAG(score) },
    { "prefix", NULL, "lines contain source TAB target prefix; print the whole translation",
      .more = ". The last word of a prefix may be incomplete unless a space follows it", .group = GROUP_FILES,
      OPTION_FLAG(prefix) },
    { "live", NULL, "translate lines while they grow, such as captions of speech", .group = GROUP_FILES,
      .more =
          ". A carriage return starts the line again, a line break ends it. Output to a pipe has the same form; with "
          "--json, one object for each change: line, translation, stable (its beginning that will hardly change), "
          "final. Subtitles (SubRip, WebVTT) keep their times",
      OPTION_FLAG(live) },
    { "json", NULL,
      "write one JSON object per line: source, prefix, model, translation, score, ids, token_logprobs, nbest",
      .more = "; error on failure", .group = GROUP_FILES, OPTION_FLAG(common.json) },
    { "as-text", NULL, "translate the lines of a document, e.g. of .html or .po, as plain text", .group = GROUP_FILES,
      OPTION_FLAG(common.as_text),
      .more = ". Without this option documents are refused: moe-documents translates them" },
    { "no-protect", NULL, "disable the protection of markup and placeholders", .group = GROUP_TEXT,
      OPTION_FLAG(no_protect),
      .more = ". By default markup moves with the words it encloses, and placeholders ({name}, %s, ${x}), URLs, email "
              "addresses, paths, numbers, emoji, surrounding white space and TABs between cells are copied unchanged" },
    { "self-test", NULL, "translate the golden sentences stored in the model and compare the results",
      .group = GROUP_OTHER, OPTION_FLAG(self_test) },
    { 0 },
};

static const option_program program = {
    .name = "moe-translate",
    .usage = "[-m MODEL] -t LANG [OPTION]... [TEXT]...",
    .about = "Translate TEXT, or lines of UTF-8 text from standard input, line by line.",
    OPTION_LISTS(OPTION_OWN, PROGRAM_ROWS("no-verify no-cache input output ids pretokenized"), PROGRAM_SETTINGS(NULL),
                 PROGRAM_ROWS("routing dry-run no-mmap stats verbose quiet")),
    .notes =
        "Text in capitals is translated as lower case and the translation is capitalised. Unless --no-protect is "
        "given, a line of a few words without final punctuation is translated in several variants, and the best "
        "translation is used. White space is copied. A line that cannot be translated gives an empty line, and an "
        "error message names the line and the reason; if a line was split, only the sentences that fail are left out. "
        "A line, or a sentence of a split line, whose markup or placeholders would be lost is copied, with a message. "
        "Input lines may end with CRLF; output lines end with LF.\n"
        "\n"
        "If a line is translated through a pivot language, its ids and pieces are those of the first model, the "
        "output's those of the second. Several models do not support --routing (its file contains the layers of one "
        "model), --max-memory and --dry-run (a model is opened when a line needs it; use --models-memory).\n"
        "\n"
        "In a build with MPI=1, mpirun -n 4 moe-translate ... starts processes, also on several machines, each of "
        "which reads only its share of the experts. The first process reads and writes the lines. Several processes "
        "do not support --expert-memory (each already holds its share), --device (experts are exchanged in host "
        "memory) and --gating batchwise (processes have different batches).\n"
        "\n" PROGRAM_HELP_EXIT("all lines translated", "some lines failed or were copied (or the self-test failed)"),
    .examples = "  moe-translate -t de 'Good morning!'\n"
                "  moe-translate -m models/en-de-fr-es.bin -t de < in.txt > out.txt\n",
    OPTION_EXCLUSIONS("ids pretokenized", "raw-ids pretokenized", "score prefix nbest force",
                      "paragraphs score prefix ids raw-ids pretokenized",
                      "memory score prefix ids raw-ids pretokenized",
                      "live score prefix nbest ids raw-ids pretokenized paragraphs routing context self-test",
                      "self-test score prefix ids raw-ids pretokenized json input output routing gating noise"),
    .most = INT32_MAX,
    .version = program_version,
};

static int is_auto(const options *o) { return strcmp(o->common.settings.source, "auto") == 0; }

/* Refuse a document: translating its lines would destroy its structure. Return -1, or an exit status after an
 * error message. */
static int refuse_document(const options *o, const char *path) {
    static const char archives[] = ".docx .docm .dotx .pptx .pptm .potx .ppsx .xlsx .xlsm .xltx .odt .ott .odp .otp "
                                   ".ods .epub";
    static const char documents[] =
        ".po .pot .xliff .xlf .sdlxliff .mqxliff .mxliff .html .htm .xhtml .xml .json .jsonl "
        ".arb .yaml .yml .properties .ts .srt .vtt .sbv .ass .ssa .csv .md .markdown";
    const char *dot = path ? strrchr(path, '.') : NULL;
    char ending[16];
    if (!dot || o->common.as_text) return -1;
    const size_t length = (size_t)snprintf(ending, sizeof ending, "%s", dot);
    for (size_t i = 0; ending[i]; i++)
        if (ending[i] >= 'A' && ending[i] <= 'Z') ending[i] = (char)(ending[i] + 32);
    const int archive = text_is_listed(archives, ending, length);
    if (!archive && !text_is_listed(documents, ending, length)) return -1;
    if (path == o->common.output && o->common.json && text_is_listed(".json .jsonl", ending, length)) return -1;
    if (archive) return program_usage_error("%s is a document: translate it with moe-documents FILE -o OUTPUT", path);
    return program_usage_error("%s is a document: translate it with moe-documents, or its lines with --as-text", path);
}

/* Check rules that option rows cannot express. Return -1, or an exit status after an error message. */
static int check_options(options *o) {
    program_common *common = &o->common;
    text_settings *settings = &common->settings;
    const int whole = (common->json && !o->live) || o->nbest > 0 || o->score || o->prefix || common->routing ||
                      common->ids || common->pretokenized;
    if (whole && settings->split > 0)
        return program_usage_error("--split cannot be combined with --json, --nbest, --score, --prefix, --routing, "
                                   "--ids or --pretokenized");
    if (settings->split < 0) settings->split = whole ? 0 : TEXT_SPLIT;
    if (o->self_test && common->text) return program_usage_error("--self-test cannot be combined with a text argument");
    if (o->live && common->text) return program_usage_error("--live reads standard input; it takes no text argument");
    if (is_auto(o) && (common->routing || common->ids || common->pretokenized))
        return program_usage_error("-s auto cannot be combined with --routing, --ids, --raw-ids or --pretokenized");
    if (settings->models_memory && !o->several) return program_usage_error("--models-memory requires several models");
    if (o->several && common->routing)
        return program_usage_error("--routing cannot be combined with several models: "
                                   "the routing file describes the layers of one model");
    if (o->several && (settings->max_memory || common->dry_run))
        return program_usage_error("--%s cannot be combined with several models, which are opened on demand; "
                                   "use --models-memory",
                                   common->dry_run ? "dry-run" : "max-memory");
    return -1;
}

/* Choose models for the languages if none is named. */
static int choose_models(options *o) {
    const int status =
        program_choose(&o->common.model, o->common.settings.source, o->common.settings.target, &o->choice);
    if (status >= 0 || !o->choice) return status;
    o->models = o->choice->paths, o->n_models = o->choice->n_paths;
    o->several = o->n_models > 1;
    return -1;
}

static int parse_options(int argc, char **argv, options *o) {
    program_common *common = &o->common;
    moe_error e;
    *o = (options){ .common = program_common_none(), .nbest = -1 };
    int status = option_parse(&program, argc, argv, o);
    if (status < 0) status = program_words(common, argc - optind, argv + optind);
    if (status < 0) status = refuse_document(o, common->input);
    if (status < 0) status = refuse_document(o, common->output);
    if (status < 0) status = choose_models(o);
    if (status >= 0) return status;
    if (text_settings_check(&common->settings, "--", &e)) return program_usage_error("%s", e.message);
    common->ids |= o->raw;
    common->stream = !isnan(text_settings_param(&common->settings, "expert-memory"));
    if (text_settings_param(&common->settings, "nbest") > 0)
        o->nbest = (int)text_settings_param(&common->settings, "nbest");
    return check_options(o);
}

/* Convert the options to settings for libmoetext. */
static text_settings describe(const options *o) {
    const program_common *c = &o->common;
    /* Do not protect markup in ids, pieces and given translations, except in translations through several models. */
    const int plain = c->ids || c->pretokenized || ((o->score || o->prefix) && !o->several);
    text_settings s = program_settings(c);
    if (plain) s.glossary[0] = '\0';
    if (o->raw) s.form = TEXT_FORM_RAW_IDS;
    s.scores = o->score;
    s.protect = !o->no_protect && !plain;
    s.wire = ranks_wire();
    return s;
}

/* ==== 2. Lines ========================================================================================== */

/* Write the fields of a hypothesis into the open object. The keys are documented in README.md of this folder. */
static void json_hypothesis(const options *o, const moetext_result *r, const moetext_hypothesis *h, json *j) {
    const moe_model *model = moetext_model_engine(r->model);
    const ptrdiff_t end = o->raw ? moe_model_meta_find(model, "token.eos") : -1;
    if (!o->score) json_text(j, "translation", h->text);
    json_float(j, "score", h->score);
    json_float(j, "logprob", h->logprob);
    if (h->reverse != 0.0f) json_float(j, "reverse", h->reverse);
    if (!o->score) json_bool(j, "finished", h->finished);
    else json_whole(j, "tokens", (int64_t)h->n_logprobs);
    if (h->looped) json_bool(j, "looped", 1);
    json_open(j, "ids", '[');
    for (size_t i = 0; i < h->n_ids; i++) json_whole(j, NULL, h->ids[i]);
    if (h->finished && end >= 0) json_whole(j, NULL, moe_model_meta_int(model, (size_t)end, 0));
    json_close(j, ']');
    json_open(j, "token_logprobs", '[');
    for (size_t i = 0; i < h->n_logprobs; i++) json_float(j, NULL, h->token_logprobs[i]);
    json_close(j, ']');
}

/* Return 1 for a result that the model generated or scored, 0 for a copy of the text. */
static int is_translated(const options *o, const moetext_result *r) {
    return r->n_hypotheses && !(r->flags & MOETEXT_BLANK) && (o->score || r->hypotheses[0].n_logprobs);
}

/* Write the hash of the translation memory and the matches of the line's parts. */
static void json_memory(const moetext_memory *memory, const moetext_result *r, json *j) {
    static const char *const uses[] = { [MOETEXT_FUZZY] = "fuzzy",
                                        [MOETEXT_REPAIRED] = "repaired",
                                        [MOETEXT_ADAPTED] = "adapted",
                                        [MOETEXT_EXACT] = "exact" };
    if (!memory) return;
    json_text(j, "memory", moetext_memory_hash(memory));
    if (r->n_matches) json_open(j, "matches", '[');
    for (size_t i = 0; i < r->n_matches; i++) {
        const moetext_match *m = &r->matches[i];
        json_open(j, NULL, '{');
        json_whole(j, "part", (int64_t)m->part);
        json_text(j, "match", uses[m->recall]);
        json_float(j, "similarity", m->similarity);
        json_text(j, "source", m->source);
        json_text(j, "target", m->target);
        json_close(j, '}');
    }
    if (r->n_matches) json_close(j, ']');
}

/* Write the terms of the glossary that occur in the line. */
static void json_terms(const moetext_result *r, json *j) {
    if (r->n_terms) json_open(j, "terms", '[');
    for (size_t i = 0; i < r->n_terms; i++) {
        json_open(j, NULL, '{');
        json_whole(j, "part", (int64_t)r->terms[i].part);
        json_text(j, "source", r->terms[i].source);
        json_text(j, "target", r->terms[i].target);
        json_bool(j, "kept", r->terms[i].kept);
        json_close(j, '}');
    }
    if (r->n_terms) json_close(j, ']');
}

static void json_line(const options *o, program_line *line, const moetext_result *r, const moetext_memory *memory) {
    json j = { .out = &line->output };
    char name[512];
    json_open(&j, NULL, '{');
    json_whole(&j, "line", (int64_t)line->number);
    if (line->failed && !line->source.length) json_null(&j, "source");
    else json_text(&j, "source", line->source.length ? line->source.data : "");
    if (o->score || o->prefix)
        json_text(&j, o->score ? "target" : "prefix", line->given.length ? line->given.data : "");
    if (r->model_path) json_text(&j, "model", text_model_name(r->model_path, name, sizeof name));
    if (r->between) json_text(&j, "between", r->between);
    if (r->between_path) json_text(&j, "between_model", text_model_name(r->between_path, name, sizeof name));
    json_ids(&j, "source_ids", r->source_ids, r->n_source_ids);
    if (is_translated(o, r)) {
        const double confidence = o->score ? -1 : moetext_confidence(r);
        if (confidence >= 0) json_digits(&j, "confidence", confidence, 3);
        json_hypothesis(o, r, &r->hypotheses[0], &j);
        if (o->nbest > 0) json_open(&j, "nbest", '[');
        for (size_t i = 0; o->nbest > 0 && i < r->n_hypotheses; i++) {
            json_open(&j, NULL, '{');
            json_hypothesis(o, r, &r->hypotheses[i], &j);
            json_close(&j, '}');
        }
        if (o->nbest > 0) json_close(&j, ']');
    } else if (!o->score) {
        json_text(&j, "translation", r->n_hypotheses ? r->hypotheses[0].text : "");
    }
    json_memory(memory, r, &j);
    json_terms(r, &j);
    const int cut = line->cut || r->flags & (MOETEXT_CUT | MOETEXT_TRUNCATED);
    if (line->failed) json_text(&j, "error", r->message);
    else if (*program_line_note(line, r)) json_text(&j, cut ? "cut" : "note", program_line_note(line, r));
    json_close(&j, '}');
}

static void plain_line(const options *o, program_line *line, const moetext_result *r) {
    if (o->score) {
        if (r->status || !is_translated(o, r)) return;
        text_append_float(&line->output, r->hypotheses[0].logprob);
        text_printf(&line->output, "\t%zu", r->hypotheses[0].n_logprobs);
        return;
    }
    for (size_t i = 0; i < r->n_hypotheses; i++) {
        if (i) text_append(&line->output, "\t", 1);
        text_append(&line->output, r->hypotheses[i].text, r->hypotheses[i].length);
    }
}

static void app_write(program_lines *lines, program_line *line, const moetext_result *result) {
    const options *o = (const void *)lines->options; /* `common` is the first member of `options` */
    if (o->common.json) json_line(o, line, result, moetext_memory_of(lines->translator));
    else plain_line(o, line, result);
}

/* Print how many texts the translation memory has. */
static void tell_memory(const options *o, const moetext *translator) {
    const moetext_memory *memory = moetext_memory_of(translator);
    if (memory && o->common.verbose)
        program_error("%s: %zu pairs", o->common.settings.memory, moetext_memory_count(memory));
}

static void app_stats(const program_lines *l, const program_totals *t) {
    const moe_stats *s = &t->stats;
    fprintf(stderr,
            "lines            %llu, %llu of them failed\n"
            "source tokens    %llu (tag and end included); %llu of %llu pieces unknown to the vocabulary\n"
            "target tokens    %llu (end included)\n"
            "seconds          %.3f\n"
            "target tokens/s  %.1f\n"
            "decoder steps    %llu, %.1f rows each\n"
            "peak memory      %.1f MiB resident, %.1f MiB of it the session's\n"
            "kernels          %s\n"
            "device           %s\n",
            (unsigned long long)l->progress.lines, (unsigned long long)l->progress.failed,
            (unsigned long long)s->source_tokens, (unsigned long long)t->unknown_pieces, (unsigned long long)t->pieces,
            (unsigned long long)s->target_tokens, t->seconds,
            t->seconds > 0 ? (double)s->target_tokens / t->seconds : 0.0, (unsigned long long)s->steps,
            s->steps ? (double)s->rows / (double)s->steps : 0.0, t->resident, (double)s->bytes / 1048576.0,
            s->isa ? s->isa : "?", s->device ? s->device : "?");
    if (s->shared_rows)
        fprintf(stderr, "prompt tokens    %llu computed before, %llu of them from --prompt-cache\n",
                (unsigned long long)s->shared_rows, (unsigned long long)s->loaded_rows);
    if (s->device_bytes) fprintf(stderr, "device memory    %.1f MiB\n", (double)s->device_bytes / 1048576.0);
    program_expert_stats(s);
}

static void tell_heading(const options *o, const moetext *translator) {
    const char *heading = moetext_glossary_heading(translator);
    if (*heading && !o->common.quiet && !o->common.silent)
        program_error("%s: the first line names the columns and was ignored: %s", o->common.settings.glossary, heading);
}

/* Print how often the terms of the glossary occurred and were kept; with --verbose also those that did not occur. */
static void tell_terms(const options *o, const moetext *translator) {
    moetext_term term;
    if (!o->common.stats && !o->common.verbose) return;
    for (size_t i = 0; (term = moetext_term_at(translator, i)).source; i++)
        if (term.asked)
            fprintf(stderr, "term             %llu of %llu kept: %s = %s\n", (unsigned long long)term.kept,
                    (unsigned long long)term.asked, term.source, term.target);
        else if (o->common.verbose)
            fprintf(stderr, "term             does not occur: %s = %s\n", term.source, term.target);
}

/* Write the file of --prompt-cache. Return `status`, or the exit status of an error. */
static int save_prompts(moetext *translator, int status) {
    moe_error e;
    if (status > EXIT_SOME_LINES || !moetext_save_prompts(translator, &e)) return status;
    return program_error("%s", e.message), EXIT_INPUT_OUTPUT;
}

static int run_lines(const options *o, moetext *translator, routing_file *routing) {
    const program_common *c = &o->common;
    const text_settings *s = &c->settings;
    program_lines lines = { .options = c,
                            .translator = translator,
                            .done_word = "translated",
                            .task = o->score    ? MOETEXT_SCORE
                                    : o->prefix ? MOETEXT_PREFIX
                                                : MOETEXT_TRANSLATE,
                            .pairs = o->score    ? "--score"
                                     : o->prefix ? "--prefix"
                                                 : NULL,
                            .keeps = c->json,
                            .messages = !o->score && !o->prefix && text_translator_keeps_spans(translator),
                            .splits = s->split > 0,
                            .paragraphs = o->paragraphs,
                            .context = s->context > 0 ? (size_t)s->context : 0,
                            .grows = !c->json && !o->score && o->nbest <= 1,
                            .routing = routing,
                            .write = app_write,
                            .stats = c->stats ? app_stats : NULL };
    if (o->live) return program_live_run(c, translator);
    if (ranks_wire()) return ranks_translate(&lines, 8 * text_translator_batch(translator));
    const int status = program_lines_run(&lines);
    tell_terms(o, translator);
    return status;
}

/* ==== 3. One model ====================================================================================== */

/* Open a model file and start loading the tokeniser. Return -1, or the exit status after an error message. */
static int open_model(const options *o, const text_settings *settings, text_level level, moetext_model **model) {
    moe_error e;
    if (text_model_begin(o->common.model, settings, level, model, &e)) return program_model_error(o->common.model, &e);
    return program_check_kind(o->common.model, moetext_model_engine(*model), MOE_MODEL_TRANSLATION);
}

/* Report a missing target, with the directions of all models if several may be chosen. */
static int ask_target(const options *o, const moetext_model *model) {
    static const char what[] = "-t LANG (target language)";
    text_bytes ways = { 0 };
    if (!o->choice || o->choice->n_local < 2) return program_ask_language(text_front_of(model), what);
    for (size_t i = 0; i < o->choice->n_local; i++) {
        text_append_string(&ways, i ? "; " : "");
        text_append_string(&ways, o->choice->local[i]->ways);
    }
    program_error("missing %s; models translate %s", what, ways.failed ? "" : ways.data);
    text_bytes_free(&ways);
    return EXIT_USAGE;
}

/* Check that the required languages are given. Return -1, or the exit status after an error message. */
static int check_languages(const options *o, const moetext_model *model) {
    const moe_model *engine = moetext_model_engine(model);
    const int whole = o->raw || (o->common.ids && moe_model_prompted(engine)); /* 1 if lines are complete prompts */
    if (whole || !moe_model_language_count(engine)) return -1;
    if (!*o->common.settings.target) return ask_target(o, model);
    if (moetext_model_needs_source(model) && !*o->common.settings.source)
        return program_ask_language(text_front_of(model), "-s LANG (source language)");
    return -1;
}

static int run_one(const options *o) {
    static moetext_model *model; /* static, because closing a model with a list of pieces would take 3 ms at exit */
    const program_common *c = &o->common;
    const char *const languages[] = { *c->settings.source ? c->settings.source : NULL,
                                      *c->settings.target ? c->settings.target : NULL };
    text_settings settings = describe(o);
    routing_file routing = { 0 };
    moetext *translator = NULL;
    moe_error e;
    int status = open_model(o, &settings, program_level(c), &model);
    if ((status = ranks_status(status)) >= 0) return status;
    program_handle_signals();
    status = ranks_status(check_languages(o, model));
    if (status < 0) status = program_translator(c, &settings, model, "a translation", &translator);
    if (status < 0 && is_auto(o) && text_translator_detects(translator, &e))
        status = (program_error("-s auto: %s", e.message), EXIT_MODEL);
    if (status < 0 && *settings.glossary && c->verbose)
        program_error("%s: %zu terms", settings.glossary, text_translator_terms(translator));
    if (status < 0) tell_heading(o, translator), tell_memory(o, translator);
    status = ranks_status(status);
    if (status < 0) status = ranks_status(program_routing_open(c, text_front_of(model), languages, &routing));
    if (status < 0) {
        status = program_routing_close(&routing, run_lines(o, translator, c->routing ? &routing : NULL));
        status = save_prompts(translator, status);
    }
    moetext_free(translator);
    return status;
}

/* ==== 4. Self-test ====================================================================================== */

typedef struct golden {
    text_bytes got;     /* ids of the translation, written as in golden.target_ids */
    text_bytes message; /* reason for a failure, or empty */
    char source[32], target[32];
} golden;

typedef struct self_test {
    const moetext_model *model;
    const text_front *front;
    size_t n, next;
    size_t source_ids, target_ids, language; /* metadata entries */
    ptrdiff_t source_language;               /* -1 if absent */
    text_ids ids;
    golden *results;
} self_test;

/* Return the language code of a sentence, or NULL. */
static const char *code_of(const self_test *t, ptrdiff_t entry, char code[32]) {
    const moe_span s = entry < 0 ? (moe_span){ "", 0 } : moe_model_meta_text(t->front->model, (size_t)entry, t->next);
    snprintf(code, 32, "%.*s", s.length < 31 ? (int)s.length : 31, s.data ? s.data : "");
    return *code ? code : NULL;
}

static int self_test_pull(void *user, int wait, moetext_request *request) {
    self_test *t = user;
    (void)wait;
    if (program_signal) return MOE_PULL_CANCEL;
    if (t->next == t->n) return MOE_PULL_END;
    golden *g = &t->results[t->next];
    const moe_span ids = moe_model_meta_text(t->front->model, t->source_ids, t->next);
    *request = (moetext_request){ .text = ids.data, .length = ids.length, .user = g };
    request->target = code_of(t, (ptrdiff_t)t->language, g->target);
    if (moetext_model_needs_source(t->model)) request->source = code_of(t, t->source_language, g->source);
    t->next++;
    return MOE_PULL_REQUEST;
}

static void self_test_done(void *user, const moetext_result *result) {
    golden *g = result->user;
    (void)user;
    if (result->status) text_append_string(&g->message, result->message);
    else if (result->n_hypotheses) text_append_ids(&g->got, result->hypotheses[0].ids, result->hypotheses[0].n_ids);
}

static int span_is(moe_span s, const text_bytes *b) {
    return s.length == b->length && (!s.length || memcmp(s.data, b->data, s.length) == 0);
}

/* Check that the tokeniser converts the stored source to the stored ids, and the stored target ids to the stored text.
 * Return a description of the error, or NULL. */
static const char *self_test_text(self_test *t, ptrdiff_t source, ptrdiff_t target, size_t i) {
    const moe_model *m = t->front->model;
    const moe_span text = moe_model_meta_text(m, (size_t)source, i), ids = moe_model_meta_text(m, t->target_ids, i);
    const text_front targets = text_front_of_targets(t->front);
    const char *verdict = NULL;
    moe_error e;
    text_bytes cut = { 0 }, joined = { 0 };
    if (text_encode(t->front, text.data, text.length, &t->ids, &e)) return "the tokeniser rejects the source";
    text_append_ids(&cut, t->ids.data, t->ids.length);
    if (!span_is(moe_model_meta_text(m, t->source_ids, i), &cut))
        verdict = "the tokeniser splits the source into different pieces";
    else if (text_parse_ids(&targets, ids.data, ids.length, &t->ids, &e) ||
             text_decode(t->front, t->ids.data, t->ids.length, &joined, &e) ||
             !span_is(moe_model_meta_text(m, (size_t)target, i), &joined))
        verdict = "the tokeniser joins the translation differently";
    text_bytes_free(&cut), text_bytes_free(&joined);
    return verdict;
}

/* Find the metadata of the golden sentences. Return 0 if the model has none. */
static int find_golden(self_test *t) {
    const moe_model *m = t->front->model;
    const ptrdiff_t source_ids = moe_model_meta_find(m, "golden.source_ids"),
                    target_ids = moe_model_meta_find(m, "golden.target_ids"),
                    language = moe_model_meta_find(m, "golden.language");
    t->n = source_ids < 0 ? 0 : moe_model_meta_length(m, (size_t)source_ids);
    if (!t->n || target_ids < 0 || language < 0 || moe_model_meta_length(m, (size_t)target_ids) != t->n ||
        moe_model_meta_length(m, (size_t)language) != t->n)
        return 0;
    t->source_ids = (size_t)source_ids, t->target_ids = (size_t)target_ids, t->language = (size_t)language;
    t->source_language = moe_model_meta_find(m, "golden.source_language");
    return 1;
}

/* Print whether each sentence passed, then the totals; return the exit status. */
static int print_verdicts(self_test *t, const moe_stats *s) {
    const moe_model *m = t->front->model;
    const ptrdiff_t source = moe_model_meta_find(m, "golden.source"), target = moe_model_meta_find(m, "golden.target");
    size_t failed = 0;
    for (size_t i = 0; i < t->n; i++) {
        const golden *g = &t->results[i];
        const moe_span wanted = moe_model_meta_text(m, t->target_ids, i), to = moe_model_meta_text(m, t->language, i),
                       from = t->source_language < 0 ? (moe_span){ "?", 1 }
                                                     : moe_model_meta_text(m, (size_t)t->source_language, i);
        const char *why = g->message.length          ? g->message.data
                          : span_is(wanted, &g->got) ? NULL
                                                     : "the translation differs";
        if (!why && text_cuts(t->front) && source >= 0 && target >= 0) why = self_test_text(t, source, target, i);
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
    printf("%zu sentences: %zu passed, %zu failed (kernels %s, SentencePiece %s)\n", t->n, t->n - failed, failed,
           s->isa ? s->isa : "?", t->front->tokeniser ? spm_library_version() : "not used");
    const int status = program_printed();
    return !status && failed ? EXIT_SOME_LINES : status;
}

/* Translate the golden sentences of a model with the model's own settings; return the exit status. */
static int test_translator(const options *o, const moetext_model *model, moetext *translator) {
    self_test t = { .model = model, .front = text_front_of(model) };
    const char *path = o->common.model;
    moe_error e;
    if (!find_golden(&t))
        return program_error("%s: this model contains no test sentences (golden.*)", path), EXIT_MODEL;
    if (!(t.results = calloc(t.n, sizeof(golden)))) return program_error("out of memory"), EXIT_MODEL;
    program_stoppable(translator);
    const moe_status translated = moetext_translate(translator, self_test_pull, self_test_done, &t, &e);
    program_stoppable(NULL);
    int status = 128 + (int)program_signal;
    const moe_stats stats = moetext_stats(translator);
    if (!translated) status = o->common.silent ? EXIT_DONE : print_verdicts(&t, &stats);
    else if (!program_signal) status = program_file_error(path, &e);
    for (size_t i = 0; i < t.n; i++) text_bytes_free(&t.results[i].got), text_bytes_free(&t.results[i].message);
    free(t.results);
    text_ids_free(&t.ids);
    return status;
}

/* Return the options for a self-test. Search options are dropped: golden sentences need the model's own settings. */
static options for_self_test(const options *o, const char *path) {
    const text_settings *given = &o->common.settings;
    options own = *o;
    text_settings *s = &own.common.settings;
    *s = text_settings_none();
    s->threads = given->threads, s->batch = given->batch, s->batch_tokens = given->batch_tokens;
    s->gpu_memory = given->gpu_memory, s->max_memory = given->max_memory;
    for (size_t i = 0; moe_param_at(i); i++)
        if (strcmp(moe_param_at(i)->name, "expert-memory") == 0) s->params[i] = given->params[i];
    memcpy(s->isa, given->isa, sizeof s->isa);
    memcpy(s->device, given->device, sizeof s->device);
    own.common.model = path;
    own.common.ids = 1;
    return own;
}

static int self_test_one(const options *o, const char *path) {
    const options own = for_self_test(o, path);
    text_settings settings = describe(&own);
    moetext_model *model = NULL;
    moetext *translator = NULL;
    int status = ranks_status(open_model(&own, &settings, TEXT_IF_THERE, &model));
    program_handle_signals();
    if (status < 0) status = program_translator(&own.common, &settings, model, "a translation", &translator);
    if (status < 0 && o->several && !o->common.silent) printf("%s\n", path);
    if (status < 0) status = test_translator(&own, model, translator);
    moetext_free(translator);
    moetext_model_close(model);
    return ranks_status(status);
}

/* Test each file; return the worst exit status. */
static int self_test_several(const options *o) {
    const text_settings settings = text_settings_none();
    text_set *set = NULL;
    moe_error e;
    int worst = -1;
    if (text_set_open(o->models, o->n_models, &settings, &set, &e)) worst = program_model_error(NULL, &e);
    worst = ranks_status(worst); /* all processes must know of a failure before they test a model together */
    for (size_t i = 0; worst <= EXIT_SOME_LINES && i < text_set_count(set); i++) {
        const int status = self_test_one(o, text_set_path(set, i));
        if (status > worst) worst = status;
    }
    text_set_close(set);
    return worst;
}

/* ==== 5. Several models ================================================================================= */

/* Open the models that translate from the given source language to the target language. */
static int open_way(const options *o, moetext *translator) {
    text_way way;
    moe_error e;
    int opened;
    const text_set *set = text_set_of(translator);
    const text_settings *settings = &o->common.settings;
    const char *missing = !*settings->target ? "-t LANG (target language)"
                          : !*settings->source && text_translator_way(translator, &way, &e)
                              ? "-s LANG (source language)"
                              : NULL;
    if (missing) return program_error("missing %s; available: %s", missing, text_set_ways(set)), EXIT_USAGE;
    if (is_auto(o)) return -1;
    if (text_translator_way(translator, &way, &e)) return program_error("%s", e.message), EXIT_USAGE;
    for (size_t i = 0; i < way.n; i++) {
        if (text_translator_open(translator, way.files[i], &opened, &e))
            return program_error("%s", e.message), opened ? program_session_status(e.code) : EXIT_MODEL;
        if (o->common.verbose) program_error("%s", text_set_path(set, way.files[i]));
    }
    return -1;
}

/* Refuse to overwrite one of the models. */
static int keep_models(const options *o, const text_set *set) {
    for (size_t i = 0; i < text_set_count(set); i++)
        if (program_same_file(o->common.output, text_set_path(set, i)))
            return program_error("%s: this file is a model and would be overwritten", o->common.output), EXIT_USAGE;
    return -1;
}

static int run_several(const options *o) {
    const text_settings settings = describe(o);
    moetext_model *models = NULL;
    moetext *translator = NULL;
    moe_error e;
    int status = -1;
    if (o->choice ? text_choice_open(o->choice, 0, &settings, &models, &e)
                  : text_models_open(o->models, o->n_models, &settings, &models, &e))
        status = program_model_error(NULL, &e);
    else if (text_translator_new(models, &settings, &translator, &e))
        status = e.code == MOE_ERROR_ARGUMENT ? (program_error("%s", e.message), EXIT_USAGE) : program_failed(&e);
    if (status < 0) status = keep_models(o, text_set_of(translator));
    status = ranks_status(status);
    if (status < 0) status = ranks_status(open_way(o, translator));
    if (status < 0) tell_heading(o, translator);
    if (status < 0) status = save_prompts(translator, run_lines(o, translator, NULL));
    moetext_free(translator);
    moetext_model_close(models);
    return status;
}

/* ==== 6. Main =========================================================================================== */

/* Let all threads use the main heap: a thread's own arena in glibc would grow by only one page per system call. */
static void share_memory(void) {
#ifdef __GLIBC__
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_TOP_PAD, 8 << 20);
#endif
}

/* Refuse options that ranks do not support. Return -1, or the exit status after an error message. */
static int check_ranks(const options *o) {
    const program_common *c = &o->common;
    static const char with[] = "cannot be combined with several processes (mpirun)";
    const char *option = NULL, *why = NULL;
    if (o->live) option = "--live", why = "its lines are translated one at a time";
    else if (c->stream) option = "--expert-memory", why = "each process already holds its share of the experts";
    else if (strcmp(c->settings.gating, "batchwise") == 0)
        option = "--gating batchwise", why = "lines of different processes have different batches";
    else if (*c->settings.device && strcmp(c->settings.device, "cpu") != 0)
        option = "--device", why = "experts are exchanged in host memory";
    if (why) return program_usage_error("%s %s: %s", option, with, why);
    const int same = ranks_agree((int64_t[]){ o->several, o->self_test, c->routing != NULL, c->stats, c->dry_run,
                                              o->score + 2 * o->prefix, c->settings.context, o->raw + 2 * c->ids },
                                 8);
    return same ? -1 : program_usage_error("all mpirun processes must have the same options");
}

/* Say which models were chosen: always if the choice has changed, otherwise with --verbose. */
static void tell_choice(const options *o) {
    char line[1024];
    if (!o->choice || o->common.silent) return;
    text_choice_changed(o->choice, o->common.settings.source, o->common.settings.target, line, sizeof line);
    if (*line && !o->common.quiet) program_error("%s", line);
    if (o->common.verbose) program_error("model: %s", o->choice->name);
}

static int translate(const options *o) {
    tell_choice(o);
    if (o->several) program_handle_signals();
    if (o->self_test) return o->several ? self_test_several(o) : self_test_one(o, o->common.model);
    return o->several ? run_several(o) : run_one(o);
}

int main(int argc, char **argv) {
    options o;
    share_memory();
    int status = program_begin("moe-translate");
    if (status < 0) status = parse_options(argc, argv, &o);
    if (status >= 0) return status;
    const int ranks = ranks_begin();
    if (ranks > 1) status = ranks_status(check_ranks(&o));
    o.common.silent = ranks > 1 && ranks_wire()->rank > 0;
    if (ranks < 1) status = EXIT_USAGE;
    if (status < 0) status = translate(&o);
    ranks_end();
    return status;
}
