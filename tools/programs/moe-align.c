/* moe-align - align the words of parallel text.
 *
 * Contents
 *   1. Options   the command line
 *   2. Pairs     split lines into words and ids
 *   3. Looking   collect the attention of one or both directions
 *   4. Links     align words
 *   5. Lexicon   count the translations of tokens over all lines
 *   6. Lines     read, align and write lines
 *   7. Main
 */
#define _POSIX_C_SOURCE 200809L /* sigset_t */

#include "tools/programs/program.h"
#include "tools/text/align.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ==== 1. Options ======================================================================================== */

typedef struct options {
    program_common common;
    const char *source, *target;
    float share;
    int lexicon, pairs; /* pairs: maximum number of distinct token pairs in the lexicon */
} options;

static const option_row own_rows[] = {
    { "source", "LANG", "source language, e.g. en", .letter = 's', .group = GROUP_LANGUAGES,
      OPTION_MEMBER(ROW_WORD, source) },
    { "target", "LANG", "target language", .letter = 't', .group = GROUP_LANGUAGES, OPTION_MEMBER(ROW_WORD, target),
      .more = ". Models without language tags need neither -s nor -t" },
    { "share", "X", "link two words if their weight is at least X times the largest weight of each word (default: 0.7)",
      .group = "Alignment", OPTION_MEMBER(ROW_FLOAT, share), .high = 1,
      .more = ". 1 links only words that are each other's best match; lower values give more links" },
    { "max-len", "N", "maximum source or target length in tokens", .group = "Alignment",
      OPTION_INT(common.settings.max_len, 4, 1 << 16) },
    { "lexicon", NULL, "write a lexical shortlist for convert.py --shortlist instead of links", .group = "Shortlist",
      OPTION_FLAG(lexicon) },
    { "pairs", "N", "maximum number of token pairs to count, 64 bytes each (default: 4194304, 256 MiB)",
      .group = "Shortlist", OPTION_INT(pairs, 16, 1 << 28), .more = ". Above this limit the rarest pairs are dropped" },
    { 0 },
};

static const option_program program = {
    .name = "moe-align",
    .usage = "[-m MODEL] -s LANG -t LANG [OPTION]...",
    .about =
        "Align the words of texts and their translations.\n"
        "\n"
        "Each line on standard input contains source TAB translation in UTF-8 and gives one line of output, in the "
        "same order. Output has the format of Moses: 0-0 1-2 links source word 0 to target word 0 and source word 1 "
        "to target word 2. Words are separated by spaces; with --ids or --pretokenized each token is a word.",
    OPTION_LISTS(PROGRAM_ROWS("model input output ids pretokenized"), OPTION_OWN, PROGRAM_MEMORY_ROWS,
                 PROGRAM_SPEED_ROWS, PROGRAM_ROWS("verbose quiet")),
    .notes =
        "The weight of two words is the attention to the source word while the model generates the word of the "
        "translation. If the model translates in both directions, the weights of both directions are multiplied.\n"
        "\n"
        "With --lexicon, output lines contain a target token, a source token and a probability. Tokens are pieces of "
        "the vocabulary, or ids if the model has none; each target token counts for the source tokens that the model "
        "attends to. The output contains the 100 most probable targets of each source token and is written at the "
        "end. Use text that the model itself translated, because its shortlist preserves the translations best. Words "
        "missing from the text get no entries, so 25,000 lines are far too few.\n"
        "\n"
        "A line that cannot be aligned gives an empty line and an error message.\n"
        "\n" PROGRAM_HELP_EXIT("all lines aligned", "some lines failed"),
    .examples = "  paste in.en out.de | moe-align -m models/en-de-fr-es.bin -s en -t de\n"
                "  moe-align -m en-pt.bin --lexicon -i pairs.tsv -o lex.txt\n",
    OPTION_EXCLUSIONS("ids pretokenized", "lexicon share"),
    .version = program_version,
};

/* ==== 2. Pairs ========================================================================================== */

/* One side of a line. */
typedef struct side {
    text_ids ids;
    text_ids word; /* [ids] index of the word that contains each id */
    size_t words;
} side;

typedef struct pair {
    uint64_t line;
    side sides[2]; /* [0] source, [1] translation */
    struct look {
        struct pair *pair;
        float *weights; /* [ids of the generated side, ids of the other side] */
        size_t capacity;
    } looks[2];  /* [0] attention to the source, [1] attention to the translation */
    int waiting; /* requests in progress */
    int failed;
    char note[256];
} pair;

static void refuse(pair *p, const char *why) {
    if (!p->failed) snprintf(p->note, sizeof p->note, "%s", why);
    p->failed = 1;
}

/* Split `text` into words and token ids; no token contains a space. For a lexicon, the whole text is one word with the
 * same tokens as in moe-translate. Refuse more than `most` ids. */
static moe_status read_side(const text_front *front, const options *all, const char *text, size_t length, size_t most,
                            side *s, pair *p, moe_error *error) {
    const program_common *o = &all->common;
    text_ids ids = { 0 };
    moe_status status = MOE_OK;
    for (size_t at = 0, end; !status && !p->failed && at < length; at = end) {
        moe_error why;
        for (; at < length && text[at] == ' '; at++) {}
        for (end = at; end < length && (all->lexicon || text[end] != ' '); end++) {}
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
        snprintf(p->note, sizeof p->note, "one side has %zu tokens, but the limit is %zu; --max-len raises it",
                 s->ids.length, most);
    }
    return status;
}

/* Read the pair of a line. An invalid line only sets p->failed; the only error is MOE_ERROR_MEMORY. */
static moe_status read_pair(const text_front *front, const options *o, const text_line *line, size_t most, pair *p,
                            moe_error *error) {
    const char *tab = memchr(line->data, '\t', line->length);
    const size_t source = tab ? (size_t)(tab - line->data) : line->length;
    char why[128];
    p->line = line->number;
    p->failed = p->waiting = 0;
    for (int i = 0; i < 2; i++) p->sides[i].ids.length = p->sides[i].word.length = p->sides[i].words = 0;
    text_line_usable(line, why, sizeof why);
    if (*why) refuse(p, why);
    else if (!tab && line->length) refuse(p, "expected source TAB translation: missing TAB");
    if (p->failed || !tab) return MOE_OK;
    moe_status status = read_side(front, o, line->data, source, most, &p->sides[0], p, error);
    const text_front targets = text_front_of_targets(front);
    return status ? status : read_side(&targets, o, tab + 1, line->length - source - 1, most, &p->sides[1], p, error);
}

/* ==== 3. Looking ======================================================================================== */

enum { LINES = 256 }; /* maximum number of lines in one run of the model */

/* How often a source token and a target token were aligned. */
typedef struct met {
    uint64_t count; /* 0 if the slot is free */
    int32_t source, target;
} met;

typedef struct lexicon {
    met *places;       /* hash table, at most half full */
    size_t size, used; /* number of slots, a power of two or 0; number of used slots */
    uint64_t *totals;  /* [source tokens] counts of source tokens, including dropped pairs */
    uint64_t forgotten;
} lexicon;

typedef struct app {
    const options *options;
    text_front front;
    moe_session *session;
    int32_t tags[2]; /* language tags; -1 if the model has none */
    int directions;  /* 2 if the model also translates in the reverse direction, else 1 */
    size_t most;     /* maximum number of tokens of a text that the model supports as both source and target */
    pair pairs[LINES];
    size_t n, next; /* number of pairs; index of the next request */
    text_aligner aligner;
    lexicon lexicon;
    text_bytes block;
    program_output out;
    program_progress progress;
    moe_error trouble;
} app;

/* Request the score of the translation given the source, then of the source given the translation. */
static int pull(void *user, int wait, moe_request *request) {
    app *a = user;
    (void)wait;
    for (; a->next < a->n * (size_t)a->directions; a->next++) {
        pair *p = &a->pairs[a->next / (size_t)a->directions];
        const size_t at = a->next % (size_t)a->directions;
        const text_ids *read = &p->sides[at].ids, *written = &p->sides[1 - at].ids;
        if (program_signal || a->trouble.code) return MOE_PULL_CANCEL;
        if (p->failed || !read->length || !written->length) continue;
        struct look *l = &p->looks[at];
        if (text_reserve(&l->weights, &l->capacity, read->length * written->length, sizeof *l->weights, &a->trouble))
            return MOE_PULL_CANCEL;
        l->pair = p;
        request->source = read->data; /* the session has set the other members to their defaults */
        request->n_source = read->length;
        request->target = written->data;
        request->n_target = written->length;
        request->target_tag = a->tags[1 - at];
        request->source_tag = a->tags[at];
        request->user = l;
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
    if (attention->position < written) /* the end token is not part of a word */
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

static moe_status write_link(void *user, size_t source, size_t target, moe_error *error) {
    text_bytes *out = user;
    (void)error;
    text_printf(out, "%s%zu-%zu", out->length && out->data[out->length - 1] != '\n' ? " " : "", source, target);
    return MOE_OK;
}

/* Append the links of a pair to the block. */
static moe_status link_words(app *a, const pair *p, moe_error *error) {
    text_side sides[2];
    for (int i = 0; i < 2; i++)
        sides[i] = (text_side){ p->sides[i].word.data, p->sides[i].ids.length, p->sides[i].words };
    if (!sides[0].tokens || !sides[1].tokens) return MOE_OK;
    return text_align(&a->aligner, &sides[0], &sides[1], p->looks[0].weights,
                      a->directions == 2 ? p->looks[1].weights : NULL, a->options->share, write_link, &a->block, error);
}

/* ==== 5. Lexicon ======================================================================================== */

/* A target token splits UNIT shares among the source tokens it attends to. Pairs below LEAST shares are ignored. */
enum { UNIT = 64, LEAST = UNIT / 8, LISTED = 100 /* maximum number of targets per source token */ };

static met *place_of(const lexicon *l, int32_t source, int32_t target) {
    const uint64_t key = ((uint64_t)(uint32_t)source << 32 | (uint32_t)target) * 0x9E3779B97F4A7C15u;
    size_t at = (size_t)(key ^ key >> 29) & (l->size - 1);
    while (l->places[at].count && (l->places[at].source != source || l->places[at].target != target))
        at = (at + 1) & (l->size - 1);
    return &l->places[at];
}

/* Double the capacity, or drop the rarer half of the pairs if `most` pairs are stored. */
static moe_status make_room(lexicon *l, size_t most, moe_error *error) {
    lexicon grown = { .size = !l->size ? 1 << 12 : l->used >= most ? l->size : 2 * l->size, .totals = l->totals };
    uint64_t over = 0;
    for (size_t left = l->used; l->used >= most && left > most / 2;) {
        over = over ? 2 * over : UNIT;
        left = 0;
        for (size_t i = 0; i < l->size; i++) left += l->places[i].count > over;
    }
    grown.forgotten = over > l->forgotten ? over : l->forgotten;
    if (!(grown.places = calloc(grown.size, sizeof *grown.places))) return text_out_of_memory(error);
    for (size_t i = 0; i < l->size; i++) {
        const met *m = &l->places[i];
        if (m->count <= over) continue;
        *place_of(&grown, m->source, m->target) = *m;
        grown.used++;
    }
    free(l->places);
    *l = grown;
    return MOE_OK;
}

static moe_status count(lexicon *l, size_t most, int32_t source, int32_t target, uint64_t shares, moe_error *error) {
    moe_status status = l->used >= most || 2 * l->used >= l->size ? make_room(l, most, error) : MOE_OK;
    if (status) return status;
    met *m = place_of(l, source, target);
    l->used += !m->count;
    *m = (met){ m->count + shares, source, target };
    l->totals[source] += shares;
    return MOE_OK;
}

/* Count each pair of a target token and a source token it attends to; with both directions, attention must be mutual.
 * Always count the pair with the largest weight (the first if several are equal). */
static moe_status count_tokens(app *a, const pair *p, moe_error *error) {
    const text_ids *source = &p->sides[0].ids, *target = &p->sides[1].ids;
    moe_status status = MOE_OK;
    for (size_t j = 0; j < target->length && !status && source->length; j++) {
        float *weights = p->looks[0].weights + j * source->length, sum = 0.0f;
        size_t best = 0;
        for (size_t i = 0; i < source->length; i++) {
            if (a->directions == 2) weights[i] *= p->looks[1].weights[i * target->length + j];
            if (weights[i] > weights[best]) best = i;
            sum += weights[i];
        }
        for (size_t i = 0; i < source->length && !status && sum > 0.0f; i++) {
            const int shares = (int)(weights[i] / sum * (float)UNIT + 0.5f);
            if (shares >= LEAST || i == best)
                status = count(&a->lexicon, (size_t)a->options->pairs, source->data[i], target->data[j],
                               (uint64_t)(shares ? shares : 1), error);
        }
    }
    return status;
}

/* Order by source token, then by descending count. */
static int by_source(const void *x, const void *y) {
    const met *a = x, *b = y;
    if (a->source != b->source) return a->source < b->source ? -1 : 1;
    if (a->count != b->count) return a->count > b->count ? -1 : 1;
    return (a->target > b->target) - (a->target < b->target);
}

/* Append the text of a token, or its id if the model has no texts. Return 0 if the format cannot express the text. */
static int append_token(const app *a, moe_span piece, int32_t id, text_bytes *out) {
    if (!a->front.tokeniser && !a->front.vocabulary.count) return text_printf(out, "%d", (int)id), 1;
    if (!piece.data || !piece.length || text_utf8_valid(piece.data, piece.length) < piece.length) return 0;
    for (size_t i = 0; i < piece.length; i++)
        if (piece.data[i] == ' ' || piece.data[i] == '\t' || piece.data[i] == '\n') return 0;
    text_append(out, piece.data, piece.length);
    return 1;
}

static void append_met(const app *a, const text_front *targets, const met *m, text_bytes *out) {
    const size_t begin = out->length;
    int named = append_token(a, text_piece(targets, m->target), m->target, out);
    text_append(out, " ", 1);
    named = append_token(a, text_source_piece(&a->front, m->source), m->source, out) && named;
    text_append(out, " ", 1);
    text_append_float(out, (float)((double)m->count / (double)a->lexicon.totals[m->source]));
    text_append(out, "\n", 1);
    if (!named && !out->failed) out->length = begin;
}

/* Write the block. Return -1, or an exit status after an error message. */
static int put_block(app *a) {
    moe_error e;
    if (a->block.failed) return program_error("out of memory"), EXIT_MODEL;
    if (a->out.whole && output_write(a->out.whole, a->block.data, a->block.length, &e))
        return program_file_error(a->options->common.output, &e);
    if (!a->out.whole) program_write(&a->out, a->block.data, a->block.length);
    if (a->out.error) return program_error("%s: %s", a->out.name, strerror(a->out.error)), EXIT_INPUT_OUTPUT;
    a->block.length = 0;
    return -1;
}

/* Write the lexicon. Return -1 or an exit status. */
static int write_lexicon(app *a) {
    enum { BLOCK = 1 << 16 };
    const text_front targets = text_front_of_targets(&a->front);
    lexicon *l = &a->lexicon;
    size_t n = 0, listed = 0;
    for (size_t i = 0; i < l->size; i++)
        if (l->places[i].count) l->places[n++] = l->places[i];
    if (!n) return program_error("cannot build a lexicon: no line has tokens in both languages"), EXIT_INPUT_OUTPUT;
    qsort(l->places, n, sizeof *l->places, by_source);
    a->block.length = 0;
    for (size_t i = 0; i < n; i++) {
        listed = i && l->places[i].source == l->places[i - 1].source ? listed + 1 : 0;
        if (listed < LISTED) append_met(a, &targets, &l->places[i], &a->block);
        const int status = a->block.length >= BLOCK || i + 1 == n || a->block.failed ? put_block(a) : -1;
        if (status >= 0) return status;
        if (program_signal) return program_stopped(&a->options->common, &a->out);
    }
    if (l->forgotten && !a->options->common.quiet)
        program_error("pairs seen up to %llu times were dropped; use --pairs to raise the limit",
                      (unsigned long long)(l->forgotten / UNIT));
    return -1;
}

/* ==== 6. Lines ========================================================================================== */

/* Read the available lines: wait for the first one, then read up to LINES in all. */
static text_read read_lines(app *a, text_reader *reader) {
    text_read state = TEXT_READ_LINE;
    text_line line;
    for (a->n = 0; a->n < LINES; a->n++) {
        state = text_reader_next(reader, a->n == 0, &line);
        if (state != TEXT_READ_LINE || read_pair(&a->front, a->options, &line, a->most, &a->pairs[a->n], &a->trouble))
            break;
    }
    return state;
}

/* Write the lines before the first unfinished line; a signal may have stopped the model. */
static void write_lines(app *a) {
    a->block.length = 0;
    for (size_t k = 0; k < a->n && !a->trouble.code; k++) {
        pair *p = &a->pairs[k];
        if (p->waiting || (k + 1) * (size_t)a->directions > a->next) break;
        if (p->failed) program_error("line %llu: %s", (unsigned long long)p->line, p->note);
        else if (a->options->lexicon ? count_tokens(a, p, &a->trouble) : link_words(a, p, &a->trouble)) return;
        if (!a->options->lexicon) text_append(&a->block, "\n", 1);
        a->progress.lines++;
        a->progress.failed += (uint64_t)p->failed;
    }
    if (a->block.failed) text_out_of_memory(&a->trouble);
    else program_write(&a->out, a->block.data, a->block.length);
    program_progress_show(&a->progress);
}

/* Align all lines of the input; return the exit status. */
static int align(app *a, int in) {
    const program_common *o = &a->options->common;
    text_reader reader;
    text_read state = TEXT_READ_LINE;
    moe_error e;
    int problem = 0; /* errno of a failed read */
    moe_status status = MOE_OK;
    text_reader_init(&reader, in, &program_signal, program_wake);
    a->progress.on = !o->quiet && isatty(STDERR_FILENO) && (!isatty(a->out.fd) || a->options->lexicon) && !isatty(in);
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
    if (a->out.error) return program_error("%s: %s", a->out.name, strerror(a->out.error)), EXIT_INPUT_OUTPUT;
    if (problem)
        return program_error("%s: %s", o->input ? o->input : "standard input", strerror(problem)), EXIT_INPUT_OUTPUT;
    if (program_signal) return program_stopped(o, &a->out);
    if (a->trouble.code) return program_failed(&a->trouble);
    const int written = a->options->lexicon ? write_lexicon(a) : -1;
    if (written >= 0) return written;
    if (a->progress.failed)
        program_error("%llu of %llu lines could not be aligned", (unsigned long long)a->progress.failed,
                      (unsigned long long)a->progress.lines);
    return a->progress.failed ? EXIT_SOME_LINES : EXIT_DONE;
}

/* ==== 7. Main =========================================================================================== */

/* Set the language tags, if the model has any. */
static int choose_languages(app *a) {
    const char *const codes[2] = { a->options->source, a->options->target };
    moe_error e;
    a->tags[0] = a->tags[1] = -1;
    a->directions = moe_model_language_count(a->front.model) > 1 ? 2 : 1;
    for (int i = 0; i < 2; i++) {
        if (codes[i] && text_language(&a->front, codes[i], i, &a->tags[i], &e))
            return program_error("-%c: %s", "st"[i], e.message), EXIT_USAGE;
        if (!codes[i] && moe_model_language_count(a->front.model) > (size_t)(1 - i))
            return program_ask_language(&a->front, "-s LANG and -t LANG (languages of the two sides)");
    }
    return -1;
}

/* Choose a model for the languages if none is named. */
static int choose_model(options *o) {
    moetext_choice *choice = NULL; /* never freed: it owns the path */
    const text_settings *s = &o->common.settings;
    const int status = program_choose(&o->common.model, s->source, s->target, &choice);
    if (status >= 0 || !choice || choice->n_paths == 1) return status;
    return program_usage_error("alignment needs one model, not %s: name one with -m FILE", choice->name);
}

int main(int argc, char **argv) {
    static app a;
    options o = { .common = program_common_none(), .share = 0.7f };
    int in, status = program_begin("moe-align");
    if (status < 0) status = option_parse(&program, argc, argv, &o);
    if (status < 0) status = choose_model(&o);
    if (status < 0 && o.pairs && !o.lexicon) status = program_usage_error("--pairs requires --lexicon");
    if (status >= 0) return status;

    if (!o.pairs) o.pairs = 1 << 22;
    a.options = &o;
    const text_level level =
        o.lexicon && o.common.ids ? TEXT_IF_THERE : program_level(&o.common); /* a lexicon has token texts */
    status = program_open(&o.common, MOE_MODEL_TRANSLATION, level, &a.front);
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
    if (status < 0) status = program_session(&o.common, &a.front, &params, "an alignment", &a.session);
    const size_t sources = o.lexicon ? (size_t)moe_model_source_vocabulary(a.front.model) : 0;
    if (status < 0 && !(a.lexicon.totals = calloc(sources + 1, sizeof *a.lexicon.totals)))
        status = (program_error("out of memory"), EXIT_MODEL);
    if (status < 0) {
        status = (o.lexicon ? program_open_whole : program_open_streams)(&o.common, &in, &a.out);
        if (status < 0) status = align(&a, in);
        status = program_close_streams(&o.common, in, &a.out, status);
    }
    for (size_t k = 0; k < LINES; k++)
        for (int i = 0; i < 2; i++) {
            text_ids_free(&a.pairs[k].sides[i].ids), text_ids_free(&a.pairs[k].sides[i].word);
            free(a.pairs[k].looks[i].weights);
        }
    text_aligner_free(&a.aligner);
    free(a.lexicon.places), free(a.lexicon.totals);
    text_bytes_free(&a.block);
    program_session_free(a.session);
    text_close(&a.front);
    return status;
}
