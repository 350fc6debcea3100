/* moetext.c - the text library: moetext.h says what this is and has the contracts.
 *
 * Contents
 *   1. Models     a model file, its tokeniser, what can be asked about it
 *   2. Parts      a text on its way: the lines and sentences that it is translated in
 *   3. Words      links between the words of a part and its translation
 *   4. Results    parts joined and handed over
 *   5. Stream     texts in, for stream.h
 *   6. Rows       many texts at once
 *   7. Translators  life
 */
#include "tools/text/align.h"
#include "tools/text/detect.h"
#include "tools/text/memory.h"
#include "tools/text/moetext.h"
#include "tools/text/protect.h"
#include "tools/text/settings.h"
#include "tools/text/stream.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static moe_status fail(moe_error *error, moe_status code, const char *where, const char *message) {
    if (!error) return code;
    error->code = code;
    snprintf(error->where, sizeof error->where, "%s", where);
    snprintf(error->message, sizeof error->message, "%s", message);
    return code;
}

static moe_status out_of_memory(moe_error *error) { return fail(error, MOE_ERROR_MEMORY, "", "out of memory"); }

/* Append floats to numbers [*n], with room for *capacity. */
static moe_status append_floats(float **numbers, size_t *n, size_t *capacity, const float *from, size_t count,
                                moe_error *error) {
    float *larger = text_grown(*numbers, capacity, *n + count, sizeof **numbers);
    if (!larger) return out_of_memory(error);
    *numbers = larger;
    if (count) memcpy(larger + *n, from, count * sizeof *larger);
    *n += count;
    return MOE_OK;
}

/* ==== 1. Models ========================================================================================= */

struct moetext_model {
    text_front front;
    text_form form;
    size_t copied; /* bytes of the file in memory of its own */
    size_t n_languages;
    char **languages; /* [n_languages] */
    int32_t *tags;    /* [n_languages] */
    char **texts;     /* [entries of metadata] NULL where one is no text */
};

const char *moetext_version(void) { return MOE_VERSION; }

const char *moetext_tokeniser_version(void) { return spm_library_version(); }

/* A copy that ends in NUL; NULL: no memory. */
static char *copy_span(moe_span s) {
    char *copy = malloc(s.length + 1);
    if (!copy) return NULL;
    if (s.length) memcpy(copy, s.data, s.length);
    copy[s.length] = '\0';
    return copy;
}

static moe_status copy_texts(moetext_model *m, moe_error *error) {
    const moe_model *engine = m->front.model;
    const size_t entries = moe_model_meta_count(engine), n = moe_model_language_count(engine);
    m->languages = calloc(n + 1, sizeof *m->languages);
    m->tags = calloc(n + 1, sizeof *m->tags);
    m->texts = calloc(entries + 1, sizeof *m->texts);
    if (!m->languages || !m->tags || !m->texts) return out_of_memory(error);
    for (; m->n_languages < n; m->n_languages++) {
        char *code = copy_span(moe_model_language(engine, m->n_languages));
        if (!code) return out_of_memory(error);
        m->languages[m->n_languages] = code;
        m->tags[m->n_languages] = moe_model_language_tag(engine, code);
    }
    for (size_t i = 0; i < entries; i++)
        if (moe_model_meta_kind(engine, i) == MOE_META_TEXT &&
            !(m->texts[i] = copy_span(moe_model_meta_text(engine, i, 0))))
            return out_of_memory(error);
    return MOE_OK;
}

moe_status moetext_model_open(const char *path, const char *options, moetext_model **out, moe_error *error) {
    static const text_level levels
        [] = { [TEXT_FORM_TEXT] = TEXT_REQUIRED, [TEXT_FORM_PIECES] = TEXT_PIECES, [TEXT_FORM_IDS] = TEXT_IF_THERE };
    const moe_allocator none = { 0 };
    text_settings settings = text_settings_none();
    char default_path[4096];
    moe_error e = { .code = MOE_OK };
    moe_status status = text_settings_parse(&settings, options, error);
    if (!status && !path) status = moetext_default_model(default_path, sizeof default_path, error);
    if (status) return status;
    if (!path) path = default_path;
    const moe_model_params params = { .copy = settings.copy > 0,
                                      .verify = settings.verify < 0 ? 0
                                                : settings.verify   ? 1
                                                                    : -1,
                                      .allocator = settings.max_memory ? text_memory_allocator() : none };
    moetext_model *m = calloc(1, sizeof *m);
    if (!m) return out_of_memory(error);
    m->form = settings.form < 0 ? TEXT_FORM_TEXT : (text_form)settings.form;
    status = text_open(path, TEXT_IDS_ONLY, &params, &m->front, &e);
    if (!status && moe_model_get_kind(m->front.model) != MOE_MODEL_TRANSLATION)
        status = fail(&e, MOE_ERROR_UNSUPPORTED, "model", "this is no translation model");
    if (!status) status = text_open_tokeniser(&m->front, levels[m->form], &e);
    if (status == MOE_ERROR_UNSUPPORTED && strcmp(e.where, "tokenizer.kind") == 0)
        fail(&e, status, "form",
             m->front.vocabulary.count ? "this model has no tokeniser but a list of pieces: open it with form=pieces"
                                       : "this model has no tokeniser: open it with form=ids");
    if (!status) status = copy_texts(m, &e);
    if (!status && params.copy) m->copied = (size_t)moe_model_file_bytes(m->front.model);
    if (!status) return *out = m, MOE_OK;
    moetext_model_close(m);
    if (error) *error = e;
    return status;
}

void moetext_model_close(moetext_model *m) {
    if (!m) return;
    for (size_t i = 0; i < m->n_languages; i++) free(m->languages[i]);
    if (m->front.model)
        for (size_t i = 0; m->texts && i < moe_model_meta_count(m->front.model); i++) free(m->texts[i]);
    free(m->languages);
    free(m->tags);
    free(m->texts);
    text_close(&m->front);
    free(m);
}

const moe_model *moetext_model_engine(const moetext_model *m) { return m->front.model; }

const char *moetext_model_meta(const moetext_model *m, const char *key) {
    const ptrdiff_t i = moe_model_meta_find(m->front.model, key);
    return i >= 0 && m->texts[i] ? m->texts[i] : "";
}

size_t moetext_model_language_count(const moetext_model *m) { return m->n_languages; }

const char *moetext_model_language(const moetext_model *m, size_t i) {
    return i < m->n_languages ? m->languages[i] : NULL;
}

ptrdiff_t moetext_model_language_find(const moetext_model *m, const char *code) {
    int32_t tag;
    for (size_t i = 0; i < m->n_languages; i++)
        if (strcmp(m->languages[i], code) == 0) return (ptrdiff_t)i;
    if (text_language(&m->front, code, &tag, NULL)) return -1;
    for (size_t i = 0; i < m->n_languages; i++)
        if (m->tags[i] == tag) return (ptrdiff_t)i;
    return -1;
}

int moetext_model_needs_source(const moetext_model *m) {
    const ptrdiff_t i = moe_model_meta_find(m->front.model, "source.tag");
    return i >= 0 && moe_model_meta_int(m->front.model, (size_t)i, 0) == 2;
}

const char *moetext_model_piece(const moetext_model *m, int32_t id, size_t *length) {
    const moe_span piece = text_piece(&m->front, id);
    *length = piece.length;
    return piece.data ? piece.data : "";
}

/* ==== 2. Parts ========================================================================================== */

/* A hypothesis of a part; its text, ids and logarithms lie in the part, behind those of the one before. */
typedef struct found {
    float score, logprob, reverse;
    int finished;
    size_t length, n_ids, n_logprobs, n_links;
} found;

/* A line of a text, or a sentence of a line. */
typedef struct part {
    text_job job; /* first, because stream.h hands it back */
    struct unit *unit;
    struct part *next;
    const char *joint; /* what stands between the part before and this one */
    size_t begin;      /* of the part in the text */
    found *found;      /* [n] best first */
    size_t n, found_capacity;
    text_bytes text;
    text_ids ids;
    float *logprobs;
    size_t n_logprobs, logprob_capacity;
    moetext_link *links; /* of the target, from the beginning of the hypothesis */
    size_t n_links, link_capacity;
} part;

/* A text on its way. */
typedef struct unit {
    struct unit *next;
    part *first, *last;
    size_t parts, pending; /* all so far; those that are not finished */
    int closed;            /* no more parts follow */
    struct unit *next_to_link;
    moetext_task task;
    int32_t source_tag, target_tag;
    void *user;
} unit;

/* A row of the output. */
typedef struct row {
    size_t begin, length, message; /* of `text`; of `messages` */
    float score;
    uint8_t status;
} row;

/* Of moetext_translate_rows. */
typedef struct rows {
    const char *bytes; /* of the texts; NULL: they are strings */
    const int64_t *offsets;
    const uint8_t *valid;
    const char *const *texts;
    const char *source, *target;
    size_t n, next;
    text_bytes text, messages; /* as results come */
    text_bytes bytes_out, string_bytes;
    void *block; /* of the arrays below, [n] */
    size_t capacity;
    row *rows;
    int64_t *offsets_out; /* [n + 1] */
    const char **messages_out, **strings_out;
    float *scores_out;
    uint8_t *statuses_out;
} rows;

/* Where the model looks while it writes one side of a hypothesis. */
typedef struct look {
    part *part;
    size_t first, n_ids; /* of the hypothesis in part->ids */
    int back;            /* it writes the source */
    int failed;
    float *weights; /* [tokens written, tokens read] */
    size_t capacity;
} look;

/* The words of a text, and which of them each token belongs to. */
typedef struct words {
    uint32_t *begins; /* [tokens] */
    size_t begin_capacity, tokens;
    int32_t *word; /* [tokens] */
    size_t word_capacity;
    uint32_t *edges; /* [2 * n] where each word begins and ends */
    size_t edge_capacity, n;
} words;

struct moetext {
    text_stream stream; /* first, because its functions get a pointer to it */
    const moetext_model *model;
    text_settings settings;
    moe_session *session;
    text_rules *rules;              /* NULL: nothing is kept */
    int32_t source_tag, target_tag; /* of texts that name no languages; -1: none */
    int auto_source;                /* theirs is to be found out */
    text_detector *detector;        /* NULL: nothing was to be found out yet */
    size_t split;
    atomic_int cancelled;
    moetext_pull_fn pull;
    moetext_done_fn done;
    void *user;

    moetext_request request;        /* the text at hand */
    unit *unit;                     /* it; NULL: there is none */
    size_t at;                      /* of it the next line */
    int last_line;                  /* the one before it was the last */
    const char *joint, *next_joint; /* before the next part; before the next line */
    unit *units, *spare_units;      /* on their way; blank */
    part *spare_parts;

    /* with the option alignment */
    moe_session *second;                         /* scores the hypotheses, and shows where it looks; NULL: without */
    unit *first_to_link, *last_to_link;          /* texts that wait for it */
    size_t waiting, second_batch;                /* their hypotheses; how many are enough */
    look *looks;                                 /* [waiting * 2] */
    size_t look_capacity, looks_made, next_look; /* looks_made: those that own a buffer */
    text_aligner aligner;
    words source_words, target_words;
    text_bytes calm;

    /* the result that is handed over */
    moetext_hypothesis *hypotheses;
    size_t hypothesis_capacity;
    text_bytes text, message;
    text_ids source_ids, ids;
    float *logprobs;
    size_t n_logprobs, logprob_capacity;
    moetext_link *links;
    size_t n_links, link_capacity;
    size_t *ends; /* of parts: in the source, then in each hypothesis */
    size_t n_ends, end_capacity;
    rows rows;
};

static unit *unit_new(moetext *t) {
    unit *u = t->spare_units;
    if (u) t->spare_units = u->next;
    else if (!(u = malloc(sizeof *u))) return NULL;
    *u = (unit){ .next = t->units };
    return t->units = u;
}

/* The parts and the unit wait for the next text. */
static void unit_reuse(moetext *t, unit *u) {
    unit **at = &t->units;
    while (*at != u) at = &(*at)->next;
    *at = u->next;
    if (u->last) {
        u->last->next = t->spare_parts;
        t->spare_parts = u->first;
    }
    u->next = t->spare_units;
    t->spare_units = u;
}

static part *part_new(moetext *t, unit *u, part *before) {
    part *p = t->spare_parts;
    if (p) t->spare_parts = p->next;
    else if (!(p = calloc(1, sizeof *p))) return NULL;
    text_job_clear(&p->job);
    p->unit = u;
    p->next = before ? before->next : NULL;
    p->n = p->n_logprobs = p->n_links = p->ids.length = p->text.length = 0;
    p->text.failed = 0;
    if (before) before->next = p;
    else u->first = p;
    if (!p->next) u->last = p;
    u->parts++;
    u->pending++;
    return p;
}

static void part_free(part *p) {
    text_job_free(&p->job);
    text_bytes_free(&p->text);
    text_ids_free(&p->ids);
    free(p->logprobs);
    free(p->links);
    free(p->found);
    free(p);
}

/* Keep the hypotheses of a result. */
static moe_status part_keep(const moetext *t, part *p, const moe_result *result, moe_error *error) {
    found *larger = text_grown(p->found, &p->found_capacity, result->n_hypotheses, sizeof *larger);
    moe_status status = larger ? MOE_OK : out_of_memory(error);
    if (larger) p->found = larger;
    for (size_t k = 0; !status && k < result->n_hypotheses; k++) {
        const moe_hypothesis *h = &result->hypotheses[k];
        const size_t n = h->n_ids + (size_t)(h->finished != 0), before = p->text.length;
        text_options form = t->stream.options; /* those of the text at hand, which may be another one */
        form.rules = p->unit->task ? NULL : t->rules;
        status = text_job_write(t->stream.front, &form, &p->job, h, &p->text, error);
        if (!status) status = text_ids_append(&p->ids, h->ids, h->n_ids, error);
        if (!status)
            status = append_floats(&p->logprobs, &p->n_logprobs, &p->logprob_capacity, h->token_logprobs, n, error);
        p->found[p->n++] =
            (found){ h->score, h->logprob, h->reverse, h->finished, p->text.length - before, h->n_ids, n, 0 };
    }
    return status;
}

/* A part that is no language is its own translation. */
static moe_status part_keep_source(part *p, moe_error *error) {
    found *larger = text_grown(p->found, &p->found_capacity, 1, sizeof *larger);
    if (!larger) return out_of_memory(error);
    p->found = larger;
    p->found[p->n++] = (found){ .finished = 1, .length = p->job.source.length };
    text_append(&p->text, p->job.source.data, p->job.source.length);
    return p->text.failed ? out_of_memory(error) : MOE_OK;
}

/* ==== 3. Words ========================================================================================== */

static int32_t *ids_or_nothing(const text_ids *ids) {
    static int32_t nothing[1]; /* ids of an empty text: a target is told from none by its pointer */
    return ids->data ? ids->data : nothing;
}

/* The words of text[length], between spaces, and of each token, from its first byte that is no space, the word. */
static moe_status find_words(words *w, const char *text, size_t length, moe_error *error) {
    int32_t *word = text_grown(w->word, &w->word_capacity, w->tokens, sizeof *word);
    size_t token = 0;
    if (!word) return out_of_memory(error);
    w->word = word;
    w->n = 0;
    for (size_t at = 0, end; at < length; at = end) {
        for (; at < length && (text[at] == ' ' || text[at] == '\t'); at++) {}
        for (end = at; end < length && text[end] != ' ' && text[end] != '\t'; end++) {}
        if (end == at) break;
        uint32_t *edges = text_grown(w->edges, &w->edge_capacity, 2 * w->n + 2, sizeof *edges);
        if (!edges) return out_of_memory(error);
        w->edges = edges;
        edges[2 * w->n] = (uint32_t)at;
        edges[2 * w->n + 1] = (uint32_t)end;
        for (; token < w->tokens && w->begins[token] < end; token++) word[token] = (int32_t)w->n;
        w->n++;
    }
    for (; token < w->tokens; token++) word[token] = -1;
    return MOE_OK;
}

/* The tokens that `ids` are of a text. 0: it cannot be told which bytes they are. */
static int find_begins(const moetext *t, words *w, const char *text, size_t length, const int32_t *ids, size_t n) {
    const text_front *f = t->stream.front;
    const spm *joiner = f->joiner ? f->joiner : f->tokeniser;
    char why[128];
    const int failed =
        ids ? spm_decode_begins(joiner, ids, n, &w->begins, &w->begin_capacity, &w->tokens, why, sizeof why)
            : spm_encode_begins(f->tokeniser, text, length, &w->begins, &w->begin_capacity, &w->tokens, why,
                                sizeof why);
    for (size_t i = 1; !failed && i < w->tokens; i++)
        if (w->begins[i] < w->begins[i - 1]) return 0;
    return !failed && w->tokens == n;
}

typedef struct linking {
    const moetext *t;
    part *part;
    size_t before; /* bytes of white space before both sides */
} linking;

static moe_status keep_link(void *user, size_t source, size_t target, moe_error *error) {
    const linking *l = user;
    part *p = l->part;
    moetext_link *larger = text_grown(p->links, &p->link_capacity, p->n_links + 1, sizeof *larger);
    if (!larger) return out_of_memory(error);
    p->links = larger;
    const uint32_t *from = l->t->source_words.edges + 2 * source, *to = l->t->target_words.edges + 2 * target;
    larger[p->n_links++] = (moetext_link){ p->begin + l->before + from[0], p->begin + l->before + from[1],
                                           l->before + to[0], l->before + to[1] };
    return MOE_OK;
}

/* Link hypothesis k of a part. The weights of a side that could not be scored are left out. */
static moe_status link_words(moetext *t, part *p, size_t k, const look *forward, const look *back, moe_error *error) {
    const text_job *job = &p->job;
    size_t begin = 0;
    for (size_t i = 0; i < k; i++) begin += p->found[i].length;
    const size_t before = job->verbatim || job->stays ? SIZE_MAX : text_guard_plain(job->guard);
    if (before == SIZE_MAX || before > p->found[k].length) return MOE_OK; /* markup and the like: no words but others */
    const char *text = p->text.data + begin + before;
    const size_t length = p->found[k].length - before;
    words *source = &t->source_words, *target = &t->target_words;
    const text_bytes *read = &job->source;
    if (job->shouted) { /* its tokens are those of small letters, which lie in the same bytes */
        t->calm.length = 0;
        text_append(&t->calm, read->data, read->length);
        if (t->calm.failed) return out_of_memory(error);
        text_calm(t->calm.data, t->calm.length);
        read = &t->calm;
    }
    if (forward->failed || !job->source_ids.length || !forward->n_ids ||
        !find_begins(t, source, read->data + before, read->length - before, NULL, job->source_ids.length) ||
        !find_begins(t, target, text, length, p->ids.data + forward->first, forward->n_ids))
        return MOE_OK;
    moe_status status = find_words(source, job->source.data + before, job->source.length - before, error);
    if (!status) status = find_words(target, text, length, error);
    if (status) return status;
    const text_side sides[2] = { { source->word, source->tokens, source->n },
                                 { target->word, target->tokens, target->n } };
    const size_t links = p->n_links;
    linking l = { t, p, before };
    status = text_align(&t->aligner, &sides[0], &sides[1], forward->weights, back->failed ? NULL : back->weights,
                        t->settings.share >= 0 ? t->settings.share : 0.7f, keep_link, &l, error);
    p->found[k].n_links = p->n_links - links;
    return status;
}

static int second_pull(void *user, int wait, moe_request *request) {
    moetext *t = user;
    (void)wait;
    for (; t->next_look < 2 * t->waiting; t->next_look++) {
        look *l = &t->looks[t->next_look];
        const unit *u = l->part->unit;
        const text_job *job = &l->part->job;
        if (l->failed) continue;
        request->source = l->back ? l->part->ids.data + l->first : ids_or_nothing(&job->source_ids);
        request->n_source = l->back ? l->n_ids : job->source_ids.length;
        request->target = l->back ? ids_or_nothing(&job->source_ids) : l->part->ids.data + l->first;
        request->n_target = l->back ? job->source_ids.length : l->n_ids;
        request->target_tag = l->back ? u->source_tag : u->target_tag;
        request->source_tag = -1;
        request->user = l;
        t->next_look++;
        return MOE_PULL_REQUEST;
    }
    return MOE_PULL_END;
}

static void second_look(void *user, const moe_attention *attention) {
    const look *l = attention->user;
    const size_t written = l->back ? l->part->job.source_ids.length : l->n_ids;
    (void)user;
    if (attention->position < written) /* the end belongs to no word */
        memcpy(l->weights + attention->position * attention->n, attention->weights,
               attention->n * sizeof *attention->weights);
}

static void second_done(void *user, const moe_result *result) {
    look *l = result->user;
    (void)user;
    if (result->status) l->failed = 1;
}

/* A pair of looks for each hypothesis that waits. */
static moe_status make_looks(moetext *t, moe_error *error) {
    look *larger = text_grown(t->looks, &t->look_capacity, 2 * t->waiting, sizeof *larger);
    if (!larger) return out_of_memory(error);
    t->looks = larger;
    for (; t->looks_made < t->look_capacity; t->looks_made++) larger[t->looks_made] = (look){ .failed = 1 };
    look *l = larger;
    for (const unit *u = t->first_to_link; u; u = u->next_to_link)
        for (part *p = u->first; p; p = p->next)
            for (size_t k = 0, first = 0; k < p->n; first += p->found[k++].n_ids)
                for (int back = 0; back < 2; back++, l++) {
                    const size_t n = p->job.source_ids.length * p->found[k].n_ids;
                    float *weights = text_grown(l->weights, &l->capacity, n, sizeof *weights);
                    if (!weights) return out_of_memory(error);
                    *l = (look){ p, first, p->found[k].n_ids, back, 0, weights, l->capacity };
                    l->failed = !n || (back && u->source_tag < 0);
                }
    return MOE_OK;
}

static moe_status deliver(moetext *t, unit *u, moe_error *error);

/* Link the words of the texts that wait, and hand them over. */
static moe_status link_waiting(moetext *t, moe_error *error) {
    if (!t->first_to_link) return MOE_OK;
    t->next_look = 0;
    moe_status status = make_looks(t, error);
    if (!status) status = moe_translate(t->second, second_pull, second_done, t, error);
    const look *l = t->looks;
    while (!status && t->first_to_link) {
        unit *u = t->first_to_link;
        for (part *p = u->first; p && !status; p = p->next)
            for (size_t k = 0; k < p->n && !status; k++, l += 2) status = link_words(t, p, k, l, l + 1, error);
        t->first_to_link = u->next_to_link;
        if (!status) status = deliver(t, u, error);
    }
    t->waiting = 0;
    return status;
}

/* All parts of a text are finished: it is handed over, or waits for its links. */
static moe_status unit_done(moetext *t, unit *u, moe_error *error) {
    if (!t->second) return deliver(t, u, error);
    if (t->first_to_link) t->last_to_link->next_to_link = u;
    else t->first_to_link = u;
    t->last_to_link = u;
    for (const part *p = u->first; p; p = p->next) t->waiting += p->n;
    return t->waiting < t->second_batch ? MOE_OK : link_waiting(t, error);
}

/* ==== 4. Results ======================================================================================== */

/* The links of hypothesis k of a part, whose text begins at byte `begin` of the translation. */
static moe_status join_links(moetext *t, const part *p, size_t k, size_t begin, moe_error *error) {
    size_t first = 0;
    for (size_t i = 0; i < k; i++) first += p->found[i].n_links;
    moetext_link *larger = text_grown(t->links, &t->link_capacity, t->n_links + p->found[k].n_links, sizeof *larger);
    if (!larger) return out_of_memory(error);
    t->links = larger;
    for (size_t i = 0; i < p->found[k].n_links; i++) {
        moetext_link link = p->links[first + i];
        link.target_begin += begin;
        link.target_end += begin;
        larger[t->n_links++] = link;
    }
    return MOE_OK;
}

/* A part of a list of tokens ends behind `end` of them. */
static moe_status add_end(moetext *t, size_t end, moe_error *error) {
    size_t *larger = text_grown(t->ends, &t->end_capacity, t->n_ends + 1, sizeof *larger);
    if (!larger) return out_of_memory(error);
    t->ends = larger;
    larger[t->n_ends++] = end;
    return MOE_OK;
}

/* Hypothesis k of a part behind what the result has, from byte `begin` on: its last one where it has fewer. */
static moe_status join_part(moetext *t, const part *p, size_t k, size_t begin, moetext_hypothesis *h,
                            moe_error *error) {
    size_t text = 0, ids = 0, logprobs = 0;
    if (!p->n) return MOE_OK;
    if (k >= p->n) k = p->n - 1;
    for (size_t i = 0; i < k; i++)
        text += p->found[i].length, ids += p->found[i].n_ids, logprobs += p->found[i].n_logprobs;
    const found *f = &p->found[k];
    h->score += f->score;
    h->logprob += f->logprob;
    h->reverse += f->reverse;
    h->finished &= f->finished;
    h->n_ids += f->n_ids;
    h->n_logprobs += f->n_logprobs;
    moe_status status = join_links(t, p, k, t->text.length - begin, error);
    h->n_links += f->n_links;
    text_append(&t->text, p->text.data + text, f->length);
    if (!status) status = text_ids_append(&t->ids, p->ids.data + ids, f->n_ids, error);
    return status ? status
                  : append_floats(&t->logprobs, &t->n_logprobs, &t->logprob_capacity, p->logprobs + logprobs,
                                  f->n_logprobs, error);
}

/* Hypothesis k of a text, whose pointers are set later: what they point to still moves. */
static moe_status join_parts(moetext *t, const unit *u, size_t k, moe_error *error) {
    moetext_hypothesis *h = &t->hypotheses[k];
    const size_t begin = t->text.length;
    size_t line = begin; /* of the translation, where its last line begins */
    moe_status status = MOE_OK;
    *h = (moetext_hypothesis){ .finished = 1 };
    for (const part *p = u->first, *before = p; p && !status; before = p, p = p->next) {
        if (*p->joint == ' ') {
            if (t->text.length > line && p->text.length) text_stream_join(&before->job, &t->text);
        } else {
            text_append_string(&t->text, p->joint);
            line = t->text.length;
        }
        status = join_part(t, p, k, begin, h, error);
        if (!status) status = add_end(t, h->n_ids, error);
    }
    h->length = t->text.length - begin;
    text_append(&t->text, "", 1); /* the NUL behind it */
    return t->text.failed ? out_of_memory(error) : status;
}

static void set_pointers(moetext *t, size_t n, size_t parts) {
    size_t text = 0, ids = 0, logprobs = 0, links = 0;
    for (size_t k = 0; k < n; k++) {
        moetext_hypothesis *h = &t->hypotheses[k];
        h->links = t->links + links;
        links += h->n_links;
        h->text = t->text.data + text;
        h->ids = t->ids.data + ids;
        h->part_ends = t->ends + parts * (k + 1);
        h->token_logprobs = t->logprobs + logprobs;
        text += h->length + 1;
        ids += h->n_ids;
        logprobs += h->n_logprobs;
    }
}

/* The words and flags of a result, and its status. */
static void describe(moetext *t, const unit *u, moetext_result *r) {
    size_t number = 1, translated = 0, blank = 0, cut = 0;
    const char *note = NULL;
    char where[48] = "";
    for (const part *p = u->first; p; p = p->next, number++) {
        const int failed = p->job.failed && !r->status;
        if (p->job.failed && failed) r->status = p->job.status;
        if (failed || ((p->job.cut || p->job.divided) && !note)) {
            note = p->job.note;
            if (u->parts > 1) snprintf(where, sizeof where, "part %zu of %zu: ", number, u->parts);
        }
        if (p->job.cut) r->flags |= MOETEXT_TRUNCATED;
        if (p->n && !p->found[0].finished && u->task != MOETEXT_SCORE)
            r->flags |= MOETEXT_CUT, cut += p->found[0].n_ids;
        translated += p->n > 0 && !p->job.blank;
        blank += (size_t)(p->job.blank && (!p->n || p->job.verbatim));
    }
    if (u->parts > 1) r->flags |= MOETEXT_SPLIT;
    if (r->status && translated) r->flags |= MOETEXT_INCOMPLETE;
    if (blank == u->parts) r->flags |= MOETEXT_BLANK;
    t->message.length = 0;
    if (note) text_append_string(&t->message, where), text_append_string(&t->message, note);
    else if (r->flags & MOETEXT_CUT) text_printf(&t->message, "the translation was cut after %zu tokens", cut);
    else text_append(&t->message, "", 0);
}

/* Hand over the result of a text whose parts are all finished. */
static moe_status deliver(moetext *t, unit *u, moe_error *error) {
    moetext_result r = { .user = u->user, .n_parts = u->parts };
    moe_status status = MOE_OK;
    size_t n = 0;
    describe(t, u, &r);
    for (const part *p = u->first; p; p = p->next)
        if (p->n > n) n = p->n;
    if (r.flags & MOETEXT_BLANK) n = 1;
    moetext_hypothesis *larger = text_grown(t->hypotheses, &t->hypothesis_capacity, n, sizeof *larger);
    if (!larger || t->message.failed) return out_of_memory(error);
    t->hypotheses = larger;
    t->text.length = t->ids.length = t->source_ids.length = t->n_logprobs = t->n_links = t->n_ends = 0;
    for (const part *p = u->first; p && !status; p = p->next) {
        const text_ids *ids = &p->job.source_ids;
        status = text_ids_append(&t->source_ids, ids->data, p->job.failed ? 0 : ids->length, error);
        if (!status) status = add_end(t, t->source_ids.length, error);
    }
    for (size_t k = 0; k < n && !status; k++) status = join_parts(t, u, k, error);
    if (status) return status;
    set_pointers(t, n, u->parts);
    r.message = t->message.data;
    r.source_ids = t->source_ids.data;
    r.n_source_ids = t->source_ids.length;
    r.part_ends = t->ends;
    r.hypotheses = t->hypotheses;
    r.n_hypotheses = n;
    t->done(t->user, &r);
    unit_reuse(t, u);
    return MOE_OK;
}

static void refuse(const moetext *t, const moetext_request *q, moe_status status, const char *message) {
    const moetext_result r = { .user = q->user, .status = status, .message = message };
    t->done(t->user, &r);
}

/* ==== 5. Stream ========================================================================================= */

static moetext *translator_of(text_stream *stream) { return (moetext *)(void *)stream; }

static const char AUTO[] = "auto"; /* the source language that is to be found out */

/* The language of a text, for a model that reads it. Others know better what they learned: they are told nothing. */
static moe_status find_source(moetext *t, const moetext_request *q, int32_t *tag, moe_error *error) {
    if (!moetext_model_needs_source(t->model)) return MOE_OK;
    moe_status status = t->detector ? MOE_OK : text_detector_of_model(t->model->front.model, &t->detector, error);
    if (!status) *tag = text_detect_tag(t->detector, q->text, q->length);
    return status;
}

/* The tags of the languages that a text names, or those of the options. */
static moe_status tags_of(moetext *t, const moetext_request *q, int32_t *source_tag, int32_t *target_tag,
                          moe_error *error) {
    const int find = q->source ? strcmp(q->source, AUTO) == 0 : t->auto_source;
    moe_status status = MOE_OK;
    *source_tag = find ? -1 : t->source_tag;
    *target_tag = t->target_tag;
    if (find) status = find_source(t, q, source_tag, error);
    else if (q->source) status = text_language(t->stream.front, q->source, source_tag, error);
    if (!status && q->target) status = text_language(t->stream.front, q->target, target_tag, error);
    if (status || !t->model->n_languages) return status;
    if (*target_tag < 0)
        return fail(error, MOE_ERROR_ARGUMENT, "target",
                    "no language to translate into: set the option target, or name it with the text");
    if (*source_tag < 0 && moetext_model_needs_source(t->model))
        return fail(error, MOE_ERROR_ARGUMENT, "source",
                    "this model wants to know the language of a text: set the option source, or name it with the text");
    return MOE_OK;
}

/* Pull a text that can be begun. */
static int next_text(moetext *t, int wait) {
    for (;;) {
        moe_error e;
        if (atomic_load(&t->cancelled)) return MOE_PULL_CANCEL;
        if (wait && link_waiting(t, &t->stream.trouble)) return MOE_PULL_CANCEL;
        t->request = (moetext_request){ 0 };
        const int answer = t->pull(t->user, wait, &t->request);
        const moetext_request *q = &t->request;
        int32_t source_tag, target_tag;
        if (answer != MOE_PULL_REQUEST) return answer;
        if (tags_of(t, q, &source_tag, &target_tag, &e)) {
            refuse(t, q, e.code, e.message);
            continue;
        }
        if ((unsigned)q->task > MOETEXT_SCORE) {
            refuse(t, q, MOE_ERROR_ARGUMENT, "this is no task");
            continue;
        }
        unit *u = unit_new(t);
        if (!u) return out_of_memory(&t->stream.trouble), MOE_PULL_CANCEL;
        u->task = q->task;
        u->source_tag = source_tag;
        u->target_tag = target_tag;
        u->user = q->user;
        t->unit = u;
        t->at = 0;
        t->joint = "";
        t->stream.split = u->task ? 0 : t->split;
        t->stream.options.pairs = u->task ? "given" : NULL;
        t->stream.options.rules = u->task ? NULL : t->rules;
        t->stream.options.calm = !u->task && t->model->form == TEXT_FORM_TEXT && t->settings.capitals != 0;
        return MOE_PULL_REQUEST;
    }
}

/* The next line of the text at hand, or the first of another one. A text that is not only translated stays whole. */
static int stream_next(text_stream *stream, int wait, text_line *line) {
    moetext *t = translator_of(stream);
    const int answer = t->unit ? MOE_PULL_REQUEST : next_text(t, wait);
    if (answer != MOE_PULL_REQUEST) return answer;
    const moetext_request *q = &t->request;
    const char *begin = q->text ? q->text + t->at : "";
    size_t length = q->length - t->at;
    const char *end = length && !t->unit->task ? memchr(begin, '\n', length) : NULL;
    if (end) length = (size_t)(end - begin);
    const int carriage = end && length && begin[length - 1] == '\r';
    *line = (text_line){ .data = begin, .length = length - (size_t)carriage };
    line->too_long = line->length > TEXT_MAX_LINE;
    if (line->too_long) line->length = TEXT_MAX_LINE;
    if (t->unit->task) {
        line->given = q->given ? q->given : "";
        line->given_length = q->given ? q->given_length : 0;
    }
    t->at += length + (size_t)(end != NULL);
    t->last_line = !end;
    t->next_joint = !end ? "" : carriage ? "\r\n" : "\n";
    return MOE_PULL_REQUEST;
}

static text_job *stream_add(text_stream *stream, const text_line *line, int more) {
    moetext *t = translator_of(stream);
    unit *u = t->unit;
    part *p = part_new(t, u, u->last);
    if (!p) return NULL;
    p->joint = t->joint;
    p->begin = (size_t)(line->data - (t->request.text ? t->request.text : line->data));
    p->job.more = more;
    t->joint = more ? " " : t->next_joint;
    if (!more && t->last_line) u->closed = 1, t->unit = NULL;
    return &p->job;
}

static text_job *stream_insert(text_stream *stream, text_job *before, size_t at) {
    part *first = (part *)(void *)before, *p = part_new(translator_of(stream), first->unit, first);
    if (!p) return NULL;
    p->joint = " ";
    p->begin = first->begin + at;
    return &p->job;
}

static void stream_ask(text_stream *stream, text_job *job, moe_request *request) {
    const unit *u = ((const part *)(const void *)job)->unit;
    (void)stream;
    request->source = ids_or_nothing(&job->source_ids);
    request->n_source = job->source_ids.length;
    request->source_tag = u->source_tag;
    request->target_tag = u->target_tag;
    if (!u->task) return;
    request->target = ids_or_nothing(&job->target_ids);
    request->n_target = job->target_ids.length;
    request->prefix = u->task == MOETEXT_PREFIX;
}

static void stream_finish(text_stream *stream, text_job *job, const moe_result *result) {
    moetext *t = translator_of(stream);
    part *p = (part *)(void *)job;
    unit *u = p->unit;
    moe_error *trouble = &stream->trouble;
    if (result ? part_keep(t, p, result, trouble) : job->verbatim ? part_keep_source(p, trouble) : MOE_OK) return;
    if (--u->pending == 0 && u->closed) unit_done(t, u, trouble);
}

moe_status moetext_translate(moetext *t, moetext_pull_fn pull, moetext_done_fn done, void *user, moe_error *error) {
    t->pull = pull;
    t->done = done;
    t->user = user;
    t->unit = NULL;
    t->stream.trouble.code = MOE_OK;
    moe_status status = text_stream_run(&t->stream, t->session, error);
    if (!status) status = link_waiting(t, error);
    t->first_to_link = NULL;
    t->waiting = 0;
    while (t->units) unit_reuse(t, t->units); /* those that were under way */
    if (status == MOE_ERROR_CANCELLED) moetext_forgive(t);
    return status;
}

/* ==== 6. Rows =========================================================================================== */

static int rows_pull(void *user, int wait, moetext_request *request) {
    rows *r = user;
    (void)wait;
    for (; r->next < r->n; r->next++) {
        const size_t i = r->next;
        if (r->valid && !(r->valid[i / 8] >> i % 8 & 1)) continue;
        request->text = r->texts ? r->texts[i] : r->bytes + r->offsets[i];
        request->length = r->texts ? strlen(r->texts[i]) : (size_t)(r->offsets[i + 1] - r->offsets[i]);
        request->source = r->source;
        request->target = r->target;
        request->user = &r->rows[i];
        r->next++;
        return MOE_PULL_REQUEST;
    }
    return MOE_PULL_END;
}

static void rows_done(void *user, const moetext_result *result) {
    rows *r = user;
    row *at = result->user;
    *at = (row){ .begin = r->text.length, .status = (uint8_t)result->status };
    if (result->n_hypotheses) {
        at->score = result->hypotheses[0].score;
        at->length = result->hypotheses[0].length;
        text_append(&r->text, result->hypotheses[0].text, at->length);
    }
    if (*result->message) {
        at->message = r->messages.length;
        text_append(&r->messages, result->message, strlen(result->message) + 1);
    }
}

/* Lay out the arrays of `n` rows in one block, which is used again. */
static int rows_reserve(rows *r, size_t n) {
    const size_t each = sizeof(int64_t) + sizeof(row) + 2 * sizeof(char *) + sizeof(float) + 1;
    if (n > SIZE_MAX / each - 1) return 0;
    char *at = text_grown(r->block, &r->capacity, (n + 1) * each, 1);
    if (!at) return 0;
    r->block = at;
    r->offsets_out = (int64_t *)(void *)at, at += (n + 1) * sizeof(int64_t);
    r->rows = (row *)(void *)at, at += n * sizeof(row);
    r->messages_out = (const char **)(void *)at, at += n * sizeof(char *);
    r->strings_out = (const char **)(void *)at, at += n * sizeof(char *);
    r->scores_out = (float *)(void *)at, at += n * sizeof(float);
    r->statuses_out = (uint8_t *)at;
    return 1;
}

/* The rows in order. */
static moe_status rows_collect(rows *r, moetext_rows *out, moe_error *error) {
    size_t strings = 0;
    r->bytes_out.length = r->string_bytes.length = 0;
    for (size_t i = 0; i < r->n; i++) {
        r->offsets_out[i] = (int64_t)r->bytes_out.length;
        text_append(&r->bytes_out, r->text.data + r->rows[i].begin, r->rows[i].length);
        if (r->texts) text_append(&r->string_bytes, r->text.data + r->rows[i].begin, r->rows[i].length);
        if (r->texts) text_append(&r->string_bytes, "", 1);
    }
    text_append(&r->bytes_out, "", 0);
    if (r->bytes_out.failed || r->string_bytes.failed || r->text.failed || r->messages.failed)
        return out_of_memory(error);
    r->offsets_out[r->n] = (int64_t)r->bytes_out.length;
    for (size_t i = 0; i < r->n; i++) {
        const row *at = &r->rows[i];
        r->messages_out[i] = r->messages.data + at->message;
        r->strings_out[i] = r->texts ? r->string_bytes.data + strings : NULL;
        r->scores_out[i] = at->score;
        r->statuses_out[i] = at->status;
        strings += at->length + 1;
    }
    *out = (moetext_rows){ r->n,
                           r->bytes_out.data,
                           r->offsets_out,
                           r->statuses_out,
                           r->messages_out,
                           r->scores_out,
                           r->texts ? r->strings_out : NULL };
    return MOE_OK;
}

/* What is in `given`, translated. */
static moe_status rows_translate(moetext *t, const rows *given, moetext_rows *out, moe_error *error) {
    rows *r = &t->rows;
    moe_error e = { .code = MOE_OK };
    int32_t tags[2];
    const moetext_request first = { .text = "", .source = given->source, .target = given->target };
    moe_status status = tags_of(t, &first, &tags[0], &tags[1], error);
    if (status) return status;
    r->bytes = given->bytes, r->offsets = given->offsets, r->valid = given->valid, r->texts = given->texts;
    r->source = given->source, r->target = given->target;
    r->n = given->n, r->next = 0;
    r->text.length = r->messages.length = 0;
    r->text.failed = r->messages.failed = r->bytes_out.failed = r->string_bytes.failed = 0;
    if (!rows_reserve(r, r->n)) return out_of_memory(error);
    text_append_string(&r->text, "");
    text_append(&r->messages, "\0cancelled", sizeof "\0cancelled"); /* message 0 is empty, message 1 that */
    for (size_t i = 0; i < r->n; i++) {
        const int passed = r->valid && !(r->valid[i / 8] >> i % 8 & 1);
        r->rows[i] = (row){ .status = passed ? MOE_OK : MOE_ERROR_CANCELLED, .message = passed ? 0 : 1 };
    }
    status = moetext_translate(t, rows_pull, rows_done, r, &e);
    if (!status || status == MOE_ERROR_CANCELLED) {
        const moe_status collected = rows_collect(r, out, &e);
        if (collected) status = collected;
    }
    if (status && error) *error = e;
    return status;
}

moe_status moetext_translate_rows(moetext *t, const char *bytes, const int64_t *offsets, size_t n, const uint8_t *valid,
                                  const char *source, const char *target, moetext_rows *out, moe_error *error) {
    for (size_t i = 0; i < n; i++)
        if (offsets[i] < 0 || offsets[i + 1] < offsets[i])
            return fail(error, MOE_ERROR_ARGUMENT, "offsets", "the offsets of the texts fall or are negative");
    const rows given = { .bytes = bytes,
                         .offsets = offsets,
                         .valid = valid,
                         .source = source,
                         .target = target,
                         .n = n };
    return rows_translate(t, &given, out, error);
}

moe_status moetext_translate_strings(moetext *t, const char *const *texts, size_t n, const char *source,
                                     const char *target, moetext_rows *out, moe_error *error) {
    static const char *const none[1] = { "" };
    const rows given = { .texts = texts ? texts : none, .source = source, .target = target, .n = n };
    return rows_translate(t, &given, out, error);
}

static void rows_free(rows *r) {
    free(r->block);
    text_bytes_free(&r->text);
    text_bytes_free(&r->messages);
    text_bytes_free(&r->bytes_out);
    text_bytes_free(&r->string_bytes);
}

/* ==== 7. Translators ==================================================================================== */

/* The parameters of the session that scores what the other one wrote. */
static moe_status describe_second(const moetext *t, const moe_session_params *params, moe_session_params *second,
                                  moe_error *error) {
    moe_session_params p = *params;
    if (t->model->form != TEXT_FORM_TEXT)
        return fail(error, MOE_ERROR_ARGUMENT, "alignment", "option alignment needs text: it goes with form=text");
    if (t->model->front.vocabulary.count || t->model->front.map.ids)
        return fail(error, MOE_ERROR_UNSUPPORTED, "alignment", "this model has no attention that links words");
    p.beam = p.nbest = 1;
    p.prune = p.coverage_penalty = p.rerank = 0;
    p.rules = MOE_RULES_PAPER;
    p.device = "cpu";
    p.attention = second_look;
    p.max_constraints = 0;
    *second = p;
    return MOE_OK;
}

/* The sessions, one or two, within the limit on memory. */
static moe_status open_sessions(moetext *t, const moe_session_params *params, moe_error *error) {
    const moe_model *engine = t->model->front.model;
    const size_t n = t->settings.alignment > 0 ? 2 : 1;
    moe_session_params both[2] = { *params };
    text_memory memory = { .limit = t->settings.max_memory, .beside = t->model->copied };
    moe_status status = n == 2 ? describe_second(t, params, &both[1], error) : MOE_OK;
    if (!status && memory.limit) status = text_memory_check(engine, both, n, &memory, error);
    if (!status) status = moe_session_new(engine, &both[0], &t->session, error);
    if (!status && n == 2) {
        t->second_batch = (size_t)both[1].batch;
        status = moe_session_new(engine, &both[1], &t->second, error);
    }
    return status;
}

/* What is kept, where the search knows constraints; *params gets room for them. */
static moe_status open_rules(moetext *t, moe_session_params *params, moe_error *error) {
    const text_settings *s = &t->settings;
    const int protect = s->protect != 0, glossary = s->glossary[0] != 0;
    if (t->model->form != TEXT_FORM_TEXT || (!protect && !glossary) ||
        (params->rules != MOE_RULES_PAPER && params->rules != MOE_RULES_HF))
        return MOE_OK;
    params->max_constraints = MOE_MAX_CONSTRAINTS;
    return text_rules_new(&t->model->front, protect, glossary ? s->glossary : NULL, &t->rules, error);
}

static void words_free(words *w) {
    free(w->begins);
    free(w->word);
    free(w->edges);
}

static void set_stream(moetext *t, const moe_session_params *p) {
    t->stream = (text_stream){ .front = &t->model->front,
                               .next = stream_next,
                               .add = stream_add,
                               .insert = stream_insert,
                               .ask = stream_ask,
                               .finish = stream_finish };
    t->stream.options = (text_options){ .option = "option ",
                                        .ids = t->model->form == TEXT_FORM_IDS,
                                        .pretokenized = t->model->form == TEXT_FORM_PIECES,
                                        .truncate = t->settings.truncate > 0,
                                        .max_source = (size_t)p->max_source,
                                        .max_target = (size_t)p->max_target };
    t->split = t->model->form != TEXT_FORM_TEXT ? 0 : t->settings.split < 0 ? TEXT_SPLIT : (size_t)t->settings.split;
}

/* The tag of the language that an option names; -1: it names none. */
static moe_status option_tag(const moetext_model *m, const char *name, const char *code, int32_t *tag,
                             moe_error *error) {
    *tag = -1;
    const moe_status status = *code ? text_language(&m->front, code, tag, error) : MOE_OK;
    if (status && error) snprintf(error->where, sizeof error->where, "%s", name);
    return status;
}

moe_status moetext_new(const moetext_model *m, const char *options, moetext **out, moe_error *error) {
    moetext *t = calloc(1, sizeof *t);
    if (!t) return out_of_memory(error);
    t->model = m;
    t->settings = text_settings_none();
    atomic_init(&t->cancelled, 0);
    moe_status status = text_settings_parse(&t->settings, options, error);
    if (!status && t->settings.form >= 0 && (text_form)t->settings.form != m->form)
        status = fail(error, MOE_ERROR_ARGUMENT, "form", "option form: the model was opened with another one");
    t->auto_source = strcmp(t->settings.source, AUTO) == 0;
    t->source_tag = -1;
    if (!status && !t->auto_source) status = option_tag(m, "source", t->settings.source, &t->source_tag, error);
    if (!status) status = option_tag(m, "target", t->settings.target, &t->target_tag, error);
    moe_session_params params = moe_session_params_default(m->front.model);
    text_settings_apply(&t->settings, &params);
    if (!status) status = open_rules(t, &params, error);
    if (!status) status = open_sessions(t, &params, error);
    if (status) return moetext_free(t), status;
    set_stream(t, &params);
    *out = t;
    return MOE_OK;
}

void moetext_free(moetext *t) {
    if (!t) return;
    for (part *p = t->spare_parts, *next; p; p = next) next = p->next, part_free(p);
    for (unit *u = t->spare_units, *next; u; u = next) next = u->next, free(u);
    rows_free(&t->rows);
    for (size_t i = 0; i < t->looks_made; i++) free(t->looks[i].weights);
    words_free(&t->source_words);
    words_free(&t->target_words);
    text_bytes_free(&t->calm);
    text_aligner_free(&t->aligner);
    free(t->looks);
    free(t->links);
    text_detector_close(t->detector);
    free(t->hypotheses);
    free(t->ends);
    free(t->logprobs);
    text_bytes_free(&t->text);
    text_bytes_free(&t->message);
    text_ids_free(&t->source_ids);
    text_ids_free(&t->ids);
    text_rules_free(t->rules);
    moe_session_free(t->session);
    moe_session_free(t->second);
    free(t);
}

void moetext_cancel(moetext *t) {
    atomic_store(&t->cancelled, 1);
    moe_session_cancel(t->session);
    if (t->second) moe_session_cancel(t->second);
}

static int pull_nothing(void *user, int wait, moe_request *request) {
    (void)user, (void)wait, (void)request;
    return MOE_PULL_END;
}

void moetext_forgive(moetext *t) {
    /* A session forgets a cancel once a call has heard of it. */
    atomic_store(&t->cancelled, 0);
    moe_translate(t->session, pull_nothing, NULL, NULL, NULL);
    if (t->second) moe_translate(t->second, pull_nothing, NULL, NULL, NULL);
}

moe_stats moetext_stats(const moetext *t) { return moe_session_stats(t->session); }
