/* several.c - see several.h. */
#include "tools/text/several.h"
#include "tools/text/align.h"
#include "tools/text/detect.h"
#include "tools/text/glossary.h"
#include "tools/text/text.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A text in progress. */
typedef struct item {
    struct item *next;           /* next in a queue */
    struct item *after, *before; /* neighbours among all items */
    moetext_request request;     /* the caller's request */
    text_bytes text, given;      /* text and given target for the next leg */
    text_bytes context;          /* context for the first leg */
    text_way way;
    size_t hop; /* number of files that have translated the text */
    void *place;

    /* results of the first model if two are needed */
    moe_status status;
    unsigned flags;
    text_bytes message;
    moetext_link *links;
    size_t n_links, link_capacity;
    text_notes notes; /* notes of both models */
} item;

typedef struct queue {
    item *first, **end; /* `end` is valid only if the queue is not empty */
} queue;

typedef struct leg {
    text_several *several;
    size_t file;
    queue fresh; /* texts that this leg has not begun */
    moetext *translator;
    const moetext_model *model;
    size_t bytes;             /* memory of the file and the session; 0 if closed */
    uint64_t opened, used;    /* number of times the model was opened; time of the last use */
    moetext_glossary *copied; /* copies translations in the option's glossary; NULL if empty or not needed */
} leg;

struct text_several {
    text_set *set;
    text_settings settings;  /* settings of legs */
    text_bytes terms;        /* content of the glossary file, read once because the file may change */
    text_term_count *counts; /* [n_counts] of its terms, in legs that were closed */
    size_t n_counts, counts_capacity;
    ptrdiff_t source, target; /* languages that the options set; -1 if not set */
    int auto_source;
    int one_way;             /* 1 if all texts are translated by the files in `only`, as with token ids */
    text_way only;           /* files that translate between the languages of the options */
    text_detector *detector; /* detects all languages; NULL until needed */
    leg *legs;               /* [n] legs by file */
    moetext_memory *memory;  /* of the options; may be NULL */
    size_t n, next;          /* `next` is the leg to check first */
    uint64_t clock;
    size_t bytes;                    /* memory of all open legs */
    moe_stats before;                /* statistics of closed legs */
    uint64_t pieces, unknown_pieces; /* counts (text_translator_pieces) of closed legs */

    leg *at;       /* the running leg */
    item *turn;    /* the text of the last part passed to the running leg */
    queue begun;   /* texts with remaining parts */
    int alternate; /* 1 if the next part is taken from `begun` */
    size_t given;  /* texts begun since the leg started to run */
    item *items;   /* [pending] all texts in progress */
    size_t pending;
    size_t most; /* limit of pending texts; a leg begins a quarter of it if other legs have texts */
    int ended;   /* 1 if the caller has no more texts */
    moetext_pull_fn pull;
    moetext_done_fn done;
    void *user;
    text_bytes message;
    moetext_hypothesis *hypotheses; /* hypotheses of a result from two models */
    size_t hypothesis_capacity;
    text_links links;

    _Atomic(moetext *) running; /* the translator to cancel; may be NULL */
    atomic_int cancelled, cancelling;
};

/* ---- 1. Terms ------------------------------------------------------------------------------------------ */

/* Glossaries of a leg: [0] translates terms, for a first model; [1] copies translated terms, for a second. */
typedef struct leaf {
    uint64_t opened; /* leg.opened when the glossaries were made */
    moetext_glossary *glossary[2];
} leaf;

struct text_glossaries {
    char **terms; /* [2 * n] sources, then translations */
    size_t n, n_leaves;
    leaf *leaves; /* [n_leaves] by leg */
};

static void leaf_clear(leaf *l) {
    moetext_glossary_free(l->glossary[0]);
    moetext_glossary_free(l->glossary[1]);
    *l = (leaf){ .opened = 0 };
}

static void glossaries_free(text_glossaries *t) {
    if (!t) return;
    for (size_t i = 0; t->terms && i < 2 * t->n; i++) free(t->terms[i]);
    for (size_t i = 0; t->leaves && i < t->n_leaves; i++) leaf_clear(&t->leaves[i]);
    free(t->terms);
    free(t->leaves);
    free(t);
}

static moe_status glossaries_new(const text_several *s, const char *const *sources, const char *const *translations,
                                 size_t n, text_glossaries **out, moe_error *error) {
    text_glossaries *t = calloc(1, sizeof *t);
    if (!t) return text_out_of_memory(error);
    *t = (text_glossaries){ calloc(2 * n + 1, sizeof(char *)), n, s->n, calloc(s->n, sizeof(leaf)) };
    int fine = t->terms && t->leaves;
    for (size_t i = 0; i < 2 * n && fine; i++) {
        const char *term = i < n ? sources[i] : translations[i - n];
        fine = (t->terms[i] = text_copy(term, strlen(term))) != NULL;
    }
    if (!fine) return glossaries_free(t), text_out_of_memory(error);
    *out = t;
    return MOE_OK;
}

/* Set *out to a text's own glossary for a leg, or to NULL if the leg's glossary applies. */
static moe_status glossary_of(leg *l, const item *x, const moetext_glossary **out, moe_error *error) {
    const size_t second = x->hop;
    moe_status status = MOE_OK;
    *out = NULL;
    if (x->request.task != MOETEXT_TRANSLATE && !(x->way.n == 2 && !x->hop)) return MOE_OK;
    if (!x->request.glossary) {
        if (!second) return MOE_OK;
        if (!l->copied) status = text_leg_glossary(l->translator, &l->copied, error);
        return *out = l->copied, status;
    }
    text_glossaries *t = text_glossaries_of(x->request.glossary);
    leaf *f = &t->leaves[l->file];
    if (f->opened != l->opened) leaf_clear(f), f->opened = l->opened;
    const char *const *sources = (const char *const *)t->terms, *const *translations = sources + t->n;
    if (!f->glossary[second])
        status = moetext_glossary_new(l->translator, second ? translations : sources, translations, t->n,
                                      &f->glossary[second], error);
    return *out = f->glossary[second], status;
}

/* ---- 2. Legs ------------------------------------------------------------------------------------------- */

void text_add_stats(moe_stats *sum, const moe_stats *s, int closed) {
    const moe_stat *x;
    for (size_t i = 0; (x = moe_stat_at(i)); i++) {
        void *to = (char *)sum + x->offset;
        const void *from = (const char *)s + x->offset;
        if (x->text && *(const char *const *)from) *(const char **)to = *(const char *const *)from;
        else if (!x->text && (x->sum || !closed)) *(uint64_t *)to += *(const uint64_t *)from;
    }
}

static void add_pieces(const moetext *t, uint64_t *pieces, uint64_t *unknown) {
    uint64_t more, more_unknown;
    text_translator_pieces(t, &more, &more_unknown);
    *pieces += more, *unknown += more_unknown;
}

/* Return term `i` as a leg counted it. Terms that were copied by another leg but lost by this one are not kept. */
static moetext_term leg_term(const leg *l, size_t i) {
    moetext_term term = { 0 };
    if (l->translator) term = moetext_term_at(l->translator, i);
    if (!l->copied) return term;
    const moetext_term copied = text_glossary_term_at(l->copied, i);
    term.kept += copied.kept - copied.asked; /* the sum of all legs is not negative */
    return term;
}

/* Keep the counts of a leg; they are lost if memory runs out. */
static void keep_counts(text_several *s, const leg *l) {
    for (size_t i = 0; l->translator; i++) {
        const moetext_term term = leg_term(l, i);
        const text_term_count none = { 0, 0 };
        if (!term.source) return;
        if (i >= s->n_counts && text_add(&s->counts, &s->n_counts, &s->counts_capacity, &none, 1, sizeof none, NULL))
            return;
        s->counts[i].asked += term.asked, s->counts[i].kept += term.kept;
    }
}

static void leg_close(leg *l) {
    text_several *s = l->several;
    moe_error e;
    keep_counts(s, l);
    if (l->translator) {
        if (moetext_save_prompts(l->translator, &e) && s->settings.warn) s->settings.warn(NULL, e.message);
        const moe_stats stats = moetext_stats(l->translator);
        text_add_stats(&s->before, &stats, 1);
        add_pieces(l->translator, &s->pieces, &s->unknown_pieces);
    }
    moetext_glossary_free(l->copied);
    moetext_free(l->translator);
    if (l->model) text_set_release(s->set, l->file);
    s->bytes -= l->bytes;
    l->copied = NULL, l->translator = NULL, l->model = NULL, l->bytes = 0;
}

/* Reserve more bytes for a leg. If the limit requires it, close the least recently used legs. */
static moe_status make_room(void *user, size_t bytes, moe_error *error) {
    leg *l = user;
    text_several *s = l->several;
    const size_t limit = s->settings.models_memory;
    while (limit && s->bytes + bytes > limit) {
        leg *oldest = NULL;
        for (size_t i = 0; i < s->n; i++)
            if (s->legs[i].bytes && &s->legs[i] != l && (!oldest || s->legs[i].used < oldest->used))
                oldest = &s->legs[i];
        if (!oldest)
            return text_fail(error, MOE_ERROR_MEMORY, "models-memory",
                             "this model and its session need %.1f MiB, which is more than models-memory allows "
                             "(%.1f MiB)",
                             (double)(s->bytes + bytes) / 0x1p20, (double)limit / 0x1p20);
        leg_close(oldest);
    }
    s->bytes += bytes, l->bytes += bytes;
    return MOE_OK;
}

/* Return the settings of a leg. With token ids, the first model reads ids, and the last one writes ids. */
static text_settings settings_of(const text_several *s, const leg *l) {
    text_settings settings = s->settings;
    if (!s->one_way || !s->only.n) return settings;
    const int first = l->file == s->only.files[0], last = l->file == s->only.files[s->only.n - 1];
    settings.writes = 1 + (last ? settings.form : (int)TEXT_FORM_TEXT);
    if (!first) settings.form = TEXT_FORM_TEXT;
    if (!last) settings.force = -1;
    return settings;
}

/* Open the model and the session of a leg, with alignment if the model supports it. */
static moe_status leg_open(leg *l, moe_error *error) {
    text_several *s = l->several;
    l->used = ++s->clock;
    if (l->translator) return MOE_OK;
    const uint64_t bytes = text_set_bytes(s->set, l->file);
    const size_t file = bytes > SIZE_MAX / 2 ? SIZE_MAX / 2 : (size_t)bytes;
    moe_error e = { .code = MOE_OK };
    moe_status status = make_room(l, file, &e);
    if (!status) status = text_set_acquire(s->set, l->file, &l->model, &e);
    status = text_in_step(s->settings.wire, status, &e);
    l->opened += !status;
    text_settings settings = settings_of(s, l);
    if (!status && !moe_model_prompted(moetext_model_engine(l->model))) settings.prompt_cache[0] = '\0';
    if (!status) status = text_leg_new(l->model, &settings, make_room, l, &l->translator, &e);
    if (settings.alignment > 0 && (status == MOE_ERROR_UNSUPPORTED || status == MOE_ERROR_ARGUMENT)) {
        settings.alignment = 0;
        s->bytes -= l->bytes - file, l->bytes = file; /* the session was not created */
        status = text_leg_new(l->model, &settings, make_room, l, &l->translator, &e);
    }
    if (!status) return MOE_OK;
    leg_close(l);
    text_fail(error, status, text_set_path(s->set, l->file), "%.80s: %.40s%s%.120s", text_set_path(s->set, l->file),
              e.where, e.where[0] ? ": " : "", e.message);
    return status;
}

/* ---- 3. Texts ------------------------------------------------------------------------------------------ */

static void queue_add(queue *q, item *x) {
    x->next = NULL;
    if (!q->first) q->end = &q->first;
    *q->end = x;
    q->end = &x->next;
}

static item *queue_take(queue *q) {
    item *x = q->first;
    if (x) q->first = x->next;
    return x;
}

static void item_free(item *x) {
    text_bytes_free_all((text_bytes *[]){ &x->text, &x->given, &x->message, &x->context }, 4);
    text_notes_free(&x->notes);
    free(x->links);
    free(x);
}

static void refuse(const text_several *s, const moetext_request *q, moe_status status, const char *message) {
    const moetext_result r = { .user = q->user, .status = status, .message = message };
    s->done(s->user, &r);
}

/* Remove and free a text. */
static void item_leave(text_several *s, item *x) {
    if (s->turn == x) s->turn = NULL;
    if (x->after) x->after->before = x->before;
    *(x->before ? &x->before->after : &s->items) = x->after;
    s->pending--;
    item_free(x);
}

/* Append the message of a leg after its languages. */
static void append_message(const text_several *s, const item *x, const char *message, text_bytes *out) {
    size_t n;
    const char *const *codes = text_set_languages(s->set, &n);
    text_printf(out, "%s to %s: ", codes[x->way.languages[x->hop]], codes[x->way.languages[x->hop + 1]]);
    text_append_string(out, message);
}

/* Return the message of a leg, after its languages if the text needs two legs. */
static const char *message_of(text_several *s, const item *x, const char *message) {
    if (x->way.n < 2 || !*message) return message;
    text_clear(&s->message);
    append_message(s, x, message, &s->message);
    return s->message.failed ? message : s->message.data;
}

static void item_refuse(text_several *s, item *x, moe_status status, const char *message) {
    refuse(s, &x->request, status, message_of(s, x, message));
    item_leave(s, x);
}

/* Find the source language of a text. */
static moe_status find_source(text_several *s, const moetext_request *q, size_t target, size_t *source,
                              moe_error *error) {
    size_t n;
    const char *const *codes = text_set_languages(s->set, &n);
    const int named = q->source && strcmp(q->source, "auto") != 0;
    const ptrdiff_t only = text_set_only_source(s->set, target);
    if (named) return text_set_find(s->set, q->source, source, error);
    if (!q->source && s->source >= 0) return *source = (size_t)s->source, MOE_OK;
    if (only >= 0) return *source = (size_t)only, MOE_OK;
    if (!q->source && !s->auto_source)
        return text_fail(error, MOE_ERROR_ARGUMENT, "source",
                         "these models require a source language: set the option source, or give one with the text");
    moe_status status = s->detector ? MOE_OK : text_detector_open(codes, n, &s->detector, error);
    if (status) return status;
    float confidence;
    const ptrdiff_t found =
        text_detect(s->detector, q->text ? q->text : "", text_utf8_valid(q->text, q->length), &confidence);
    if (found == TEXT_DETECT_MEMORY) return text_out_of_memory(error);
    *source = found < 0 ? target : (size_t)found; /* text without letters is copied */
    return MOE_OK;
}

/* Find the models that translate a text (way->n is 0 if both languages are the same). */
static moe_status way_of(text_several *s, const moetext_request *q, text_way *way, moe_error *error) {
    size_t target = (size_t)s->target, source = 0;
    moe_status status = q->target ? text_set_find(s->set, q->target, &target, error) : MOE_OK;
    if (!status && !q->target && s->target < 0)
        return text_fail(error, MOE_ERROR_ARGUMENT, "target",
                         "no target language: set the option target, or give one with the text");
    if (!status) status = find_source(s, q, target, &source, error);
    *way = (text_way){ 0, { 0, 0 }, { source, target, 0 } };
    return status || source == target ? status : text_set_way(s->set, source, target, way, error);
}

/* Deliver the translation of a text that no model translates; `match` is its match in a memory, or NULL. */
static void deliver_text(const text_several *s, const moetext_request *q, const text_bytes *text,
                         const moetext_match *match) {
    static const size_t no_end[1] = { 0 };
    const moetext_hypothesis h = { .text = text->data, .length = text->length, .finished = 1, .part_ends = no_end };
    const moetext_result r = { .user = q->user,
                               .message = "",
                               .n_parts = 1,
                               .part_ends = no_end,
                               .n_hypotheses = 1,
                               .hypotheses = &h,
                               .n_matches = match != NULL,
                               .matches = match };
    s->done(s->user, &r);
}

/* Deliver a text with equal source and target languages. */
static void deliver_same(const text_several *s, const moetext_request *q) {
    text_bytes copy = { 0 };
    text_append(&copy, q->text ? q->text : "", q->length);
    if (copy.failed) refuse(s, q, MOE_ERROR_MEMORY, "out of memory");
    else deliver_text(s, q, &copy, NULL);
    text_bytes_free(&copy);
}

/* Deliver a text between two models that a memory translates. Return 0 if it does not. One model searches the memory
 * itself, also for lines and sentences. */
static int recall(const text_several *s, const moetext_request *q, const text_way *way) {
    moetext_memory *const memories[] = { q->memory, s->memory };
    text_bytes text = { 0 };
    text_match found;
    moe_error e;
    size_t n;
    const char *const *codes = text_set_languages(s->set, &n);
    if (way->n != 2 || q->task || !q->text || (!q->memory && !s->memory)) return 0;
    const moe_status status = text_memories_find(memories, (moe_span){ q->text, q->length }, codes[way->languages[0]],
                                                 codes[way->languages[2]], &found, &text, &e);
    const moetext_match match = { 0, (moetext_recall)found.kind, found.similarity, found.source, found.target };
    if (status) refuse(s, q, status, e.message);
    else if (found.kind >= TEXT_MATCH_ADAPTED) deliver_text(s, q, &text, &match);
    text_bytes_free(&text);
    return status || found.kind >= TEXT_MATCH_ADAPTED;
}

/* Queue a text of the caller for its first leg, or finish it. */
static void begin_text(text_several *s, const moetext_request *q) {
    text_way way = { 0 };
    moe_error e;
    item *x = NULL;
    if (moe_request_dropped(q->drop)) refuse(s, q, MOE_ERROR_CANCELLED, "cancelled by the caller");
    else if (q->task == MOETEXT_ANSWER)
        refuse(s, q, MOE_ERROR_UNSUPPORTED, "prompts are not supported with several models");
    else if ((unsigned)q->task > MOETEXT_ANSWER) refuse(s, q, MOE_ERROR_ARGUMENT, "unknown task");
    else if (q->routing) refuse(s, q, MOE_ERROR_UNSUPPORTED, "routing is not supported with several models");
    else if (way_of(s, q, &way, &e)) refuse(s, q, e.code, e.message);
    else if (s->one_way && memcmp(&way, &s->only, sizeof way) != 0)
        refuse(s, q, MOE_ERROR_ARGUMENT, "token ids require that the options set the languages");
    else if (!way.n && q->task == MOETEXT_TRANSLATE && text_utf8_valid(q->text, q->length) == q->length)
        deliver_same(s, q);
    else if (!way.n) refuse(s, q, MOE_ERROR_ARGUMENT, "the text is already in the target language");
    else if (way.n == 2 && q->task == MOETEXT_SCORE)
        refuse(s, q, MOE_ERROR_UNSUPPORTED, "a translation through a pivot language has no probability");
    else if (recall(s, q, &way)) return;
    else if (!(x = calloc(1, sizeof *x))) refuse(s, q, MOE_ERROR_MEMORY, "out of memory");
    if (!x) return;
    x->request = *q, x->way = way;
    if ((x->after = s->items)) s->items->before = x;
    s->items = x;
    text_append(&x->text, q->text ? q->text : "", q->length);
    if (q->task) text_append(&x->given, q->given ? q->given : "", q->given_length);
    if (q->context_length) text_append(&x->context, q->context, q->context_length);
    s->pending++;
    if (x->text.failed || x->given.failed || x->context.failed) item_refuse(s, x, MOE_ERROR_MEMORY, "out of memory");
    else queue_add(&s->legs[way.files[0]].fresh, x);
}

/* Take a text from the caller. Return the result of the pull function. */
static int take(text_several *s, int wait) {
    moetext_request q = { 0 };
    if (atomic_load(&s->cancelled)) return MOE_PULL_CANCEL;
    const int answer = s->pull(s->user, wait, &q);
    if (answer == MOE_PULL_REQUEST) begin_text(s, &q);
    if (answer == MOE_PULL_END) s->ended = 1;
    return answer;
}

/* Copy the hypotheses of a result; their links start at the caller's text instead of the intermediate text. */
static moe_status link_through(text_several *s, const item *x, moetext_result *r) {
    const size_t n = r->n_hypotheses;
    moe_status status = text_reserve(&s->hypotheses, &s->hypothesis_capacity, n, sizeof *s->hypotheses, NULL);
    moetext_hypothesis *all = s->hypotheses;
    s->links.n = 0;
    for (size_t i = 0; i < n && !status; i++) {
        const moetext_hypothesis *h = &r->hypotheses[i];
        const size_t before = s->links.n;
        all[i] = *h;
        status = text_links_through(x->links, x->n_links, h->links, h->n_links, &s->links, NULL);
        all[i].n_links = s->links.n - before;
    }
    for (size_t i = 0, at = 0; i < n && !status; at += all[i++].n_links) all[i].links = s->links.data + at;
    r->hypotheses = all;
    return status;
}

/* Keep the notes of a leg. */
static moe_status keep_notes(const text_several *s, item *x, const moetext_result *r) {
    moe_status status = MOE_OK;
    for (size_t i = 0; i < r->n_notes && !status; i++) {
        append_message(s, x, r->notes[i].message, &x->notes.messages);
        status = text_notes_add(&x->notes, r->notes[i].part, r->notes[i].status);
    }
    return status;
}

/* Deliver the result of the last leg. */
static void deliver(text_several *s, item *x, const moetext_result *result) {
    moetext_result r = *result;
    int failed = 0;
    size_t n;
    r.user = x->request.user;
    r.model = s->at->model, r.model_path = text_set_path(s->set, x->way.files[x->way.n - 1]);
    r.message = message_of(s, x, result->message);
    if (x->way.n == 2) {
        r.n_terms = 0; /* the second model keeps the terms of the first, which are words of its source */
        r.between = x->text.data, r.between_length = x->text.length;
        r.between_language = text_set_languages(s->set, &n)[x->way.languages[1]];
        r.between_path = text_set_path(s->set, x->way.files[0]);
        r.flags |= x->flags & ~(unsigned)MOETEXT_BLANK;
        if (x->status || !*r.message) {
            r.status = x->status ? x->status : r.status;
            r.message = x->message.data;
        }
        if (r.status && r.n_hypotheses) r.flags |= MOETEXT_INCOMPLETE;
        failed = keep_notes(s, x, result) || link_through(s, x, &r);
        text_notes_give(&x->notes, &r);
    }
    if (failed) refuse(s, &x->request, MOE_ERROR_MEMORY, message_of(s, x, "out of memory"));
    else s->done(s->user, &r);
    item_leave(s, x);
}

/* Queue the first model's translation as a text for the second model. */
static void go_on(text_several *s, item *x, const moetext_result *r) {
    const moetext_hypothesis *h = &r->hypotheses[0];
    x->status = r->status, x->flags = r->flags;
    text_append_string(&x->message, message_of(s, x, r->message));
    text_clear(&x->text);
    text_append(&x->text, h->text, h->length);
    if (text_add(&x->links, &x->n_links, &x->link_capacity, h->links, h->n_links, sizeof *h->links, NULL) ||
        x->message.failed || x->text.failed || keep_notes(s, x, r)) {
        item_refuse(s, x, MOE_ERROR_MEMORY, "out of memory");
        return;
    }
    x->place = NULL;
    x->hop = 1;
    if (s->turn == x) s->turn = NULL;
    queue_add(&s->legs[x->way.files[1]].fresh, x);
}

/* ---- 4. Running ---------------------------------------------------------------------------------------- */

/* Return 1 if another leg has texts to begin. */
static int others_wait(const text_several *s, const leg *l) {
    for (size_t i = 0; i < s->n; i++)
        if (&s->legs[i] != l && s->legs[i].fresh.first) return 1;
    return 0;
}

/* Choose the text of the next part, or NULL. Begin at most `most` / 4 texts if other legs have texts. */
static item *next_item(text_several *s, leg *l) {
    if (s->turn && s->turn->place) queue_add(&s->begun, s->turn);
    s->turn = NULL;
    const int is_over = s->given >= s->most / 4 && others_wait(s, l);
    item *x = NULL;
    s->alternate = !s->alternate;
    if (s->alternate) x = queue_take(&s->begun);
    if (!x && !is_over && (x = queue_take(&l->fresh))) s->given++;
    return x ? x : queue_take(&s->begun);
}

static void leg_partial(void *user, const moetext_partial *partial) {
    const item *x = partial->user;
    moetext_partial own = *partial;
    own.user = x->request.user;
    x->request.partial(((text_several *)user)->user, &own);
}

/* Fill the request of a text for a leg. */
static moe_status fill(text_several *s, leg *l, item *x, moetext_request *q, moe_error *error) {
    const int last = x->hop + 1 == x->way.n;
    const moetext_glossary *glossary = NULL;
    const moe_status status = x->place ? MOE_OK : glossary_of(l, x, &glossary, error);
    q->text = x->text.data, q->length = x->text.length;
    q->source = text_set_spelling(s->set, l->model, x->way.languages[x->hop]);
    q->target = text_set_spelling(s->set, l->model, x->way.languages[x->hop + 1]);
    q->task = last ? x->request.task : MOETEXT_TRANSLATE;
    if (q->task) q->given = x->given.data, q->given_length = x->given.length;
    q->glossary = glossary;
    q->memory = x->way.n > 1 ? &text_no_memory : x->request.memory;
    if (!x->hop) q->context = x->context.data, q->context_length = x->context.length;
    q->quick = x->request.quick;
    q->user = x;
    q->place = &x->place;
    q->drop = x->request.drop;
    if (last && x->request.partial) q->partial = leg_partial;
    return status;
}

static int leg_pull(void *user, int wait, moetext_request *request) {
    text_several *s = user;
    leg *l = s->at;
    int answer = MOE_PULL_REQUEST;
    for (;;) {
        if (atomic_load(&s->cancelled)) return MOE_PULL_CANCEL;
        const int idle = wait && !l->fresh.first && !s->begun.first && !(s->turn && s->turn->place);
        while (!s->ended && answer == MOE_PULL_REQUEST && s->pending < s->most)
            answer = take(s, idle && !l->fresh.first && !others_wait(s, l));
        if (answer == MOE_PULL_CANCEL) return answer;
        item *x = next_item(s, l);
        if (!x) break;
        moe_error e;
        if (!fill(s, l, x, request, &e)) return s->turn = x, MOE_PULL_REQUEST;
        *request = (moetext_request){ 0 };
        item_refuse(s, x, e.code, e.message);
    }
    return s->ended || wait || others_wait(s, l) ? MOE_PULL_END : MOE_PULL_LATER;
}

static void leg_done(void *user, const moetext_result *result) {
    text_several *s = user;
    item *x = result->user;
    if (x->hop + 1 == x->way.n) deliver(s, x, result);
    else if (result->n_hypotheses && result->status != MOE_ERROR_CANCELLED) go_on(s, x, result);
    else item_refuse(s, x, result->status, result->message);
}

/* Set the translator that several_cancel cancels from other threads and signal handlers. Do not free it meanwhile. */
static void set_running(text_several *s, moetext *t) {
    if (t) moetext_uncancel(t);
    atomic_store(&s->running, t);
    while (!t && atomic_load(&s->cancelling)) sched_yield();
    if (t && atomic_load(&s->cancelled)) moetext_cancel(t);
}

static moe_status run_leg(text_several *s, leg *l, moe_error *error) {
    moe_error e;
    if (leg_open(l, &e)) {
        for (item *x; (x = queue_take(&l->fresh));) {
            refuse(s, &x->request, e.code, e.message);
            item_leave(s, x);
        }
        return MOE_OK;
    }
    s->at = l, s->given = 0, s->turn = NULL;
    set_running(s, l->translator);
    const moe_status status = moetext_translate(l->translator, leg_pull, leg_done, s, error);
    set_running(s, NULL);
    l->used = ++s->clock;
    s->at = NULL, s->turn = NULL;
    return status;
}

/* Set *out to the next leg that has texts to begin, in round-robin order, or to NULL if no texts are left. */
static moe_status next_leg(text_several *s, leg **out) {
    for (;;) {
        if (atomic_load(&s->cancelled)) return MOE_ERROR_CANCELLED;
        for (size_t i = 0; i < s->n; i++) {
            leg *l = &s->legs[(s->next + i) % s->n];
            if (l->fresh.first) return s->next = l->file + 1, *out = l, MOE_OK;
        }
        if (s->ended) return *out = NULL, MOE_OK;
        if (take(s, 1) == MOE_PULL_CANCEL) return MOE_ERROR_CANCELLED;
    }
}

/* Take all texts. Then set *out to the first leg for which any rank has texts, so that all ranks run the same legs. */
static moe_status next_leg_in_step(text_several *s, leg **out, moe_error *error) {
    const moe_wire *wire = s->settings.wire;
    int64_t *waits = calloc(s->n + 1, sizeof *waits);
    *out = NULL;
    while (!s->ended && take(s, 1) == MOE_PULL_REQUEST) {}
    moe_status status = waits ? MOE_OK : text_out_of_memory(error);
    if (!status && !s->ended) status = text_fail(error, MOE_ERROR_CANCELLED, "", "cancelled");
    status = text_in_step(wire, status, error);
    if (!waits || status) return free(waits), status;
    for (size_t i = 0; i < s->n; i++) waits[i] = s->legs[i].fresh.first != NULL;
    status = wire->agree(wire->user, waits, s->n, error);
    for (size_t i = s->n; i-- && !status;)
        if (waits[i]) *out = &s->legs[i];
    free(waits);
    return status;
}

static moe_status several_translate(text_several *s, moetext_pull_fn pull, moetext_done_fn done, void *user,
                                    moe_error *error) {
    leg *l = NULL;
    moe_status status;
    s->pull = pull, s->done = done, s->user = user;
    s->ended = 0;
    do {
        status = s->settings.wire ? next_leg_in_step(s, &l, error) : next_leg(s, &l);
        if (!status && l) status = run_leg(s, l, error);
    } while (!status && l);
    for (item *x = s->items, *next; x; x = next) next = x->after, item_leave(s, x);
    s->begun.first = NULL;
    for (size_t i = 0; i < s->n; i++) s->legs[i].fresh.first = NULL;
    if (status == MOE_ERROR_CANCELLED) {
        text_fail(error, status, "", "cancelled");
        atomic_store(&s->cancelled, 0);
    }
    return status;
}

/* ---- 5. Translators ------------------------------------------------------------------------------------ */

static moe_status several_check(text_several *s, const char *source, const char *target, moe_error *error) {
    text_way way;
    const moetext_request q = { .text = "", .source = source, .target = target };
    return way_of(s, &q, &way, error);
}

/* Find the language of an option; -1 if the option is not given. */
static moe_status option_language(const text_set *set, const char *name, const char *code, ptrdiff_t *language,
                                  moe_error *error) {
    size_t found;
    *language = -1;
    const moe_status status = *code ? text_set_find(set, code, &found, error) : MOE_OK;
    if (!status && *code) *language = (ptrdiff_t)found;
    if (status && error) snprintf(error->where, sizeof error->where, "%s", name);
    return status;
}

static void several_free(text_several *s) {
    if (!s) return;
    for (size_t i = 0; s->legs && i < s->n; i++) leg_close(&s->legs[i]);
    free(s->legs);
    text_detector_close(s->detector);
    text_bytes_free(&s->terms);
    free(s->counts);
    text_bytes_free(&s->message);
    free(s->hypotheses);
    free(s->links.data);
    free(s);
}

static moe_status several_new(text_set *set, const text_settings *settings, text_several **out, moe_error *error) {
    text_several *s = calloc(1, sizeof *s);
    if (!s) return text_out_of_memory(error);
    s->set = set;
    s->settings = *settings;
    s->n = text_set_count(set);
    s->most = 16 * (size_t)(settings->batch > 0 ? settings->batch : 32);
    s->auto_source = strcmp(settings->source, "auto") == 0;
    s->settings.source[0] = s->settings.target[0] = '\0'; /* each leg gets its own languages */
    s->settings.memory[0] = '\0';                         /* the translator opens it once for all legs */
    atomic_init(&s->running, NULL);
    atomic_init(&s->cancelled, 0);
    atomic_init(&s->cancelling, 0);
    s->legs = calloc(s->n, sizeof *s->legs);
    moe_status status = s->legs ? MOE_OK : text_out_of_memory(error);
    for (size_t i = 0; i < s->n && s->legs; i++) s->legs[i].several = s, s->legs[i].file = i;
    if (!status && settings->glossary[0]) {
        status = text_glossary_load(settings->glossary, &s->terms, error);
        s->settings.terms = &s->terms;
    }
    if (!status) status = option_language(set, "source", s->auto_source ? "" : settings->source, &s->source, error);
    if (!status) status = option_language(set, "target", settings->target, &s->target, error);
    if (!status && s->target >= 0 && s->source >= 0 && s->source != s->target)
        status = text_set_way(set, (size_t)s->source, (size_t)s->target, &s->only, error);
    if (!status && settings->form >= 0 && settings->form != text_set_form(set))
        status = text_fail(error, MOE_ERROR_ARGUMENT, "form", "option form differs from that of the models");
    if (!status && settings->draft[0])
        status = text_fail(error, MOE_ERROR_UNSUPPORTED, "draft", "a draft requires a single model");
    s->settings.form = text_set_form(set);
    s->one_way = s->settings.form > 0 || settings->force >= 0;
    if (!status && s->one_way && s->auto_source)
        status = text_fail(error, MOE_ERROR_ARGUMENT, "source",
                           "option %s requires a source language, which cannot be detected",
                           s->settings.form > 0 ? "form" : "force");
    if (!status && s->one_way) status = way_of(s, &(moetext_request){ .text = "" }, &s->only, error);
    if (status) return several_free(s), status;
    *out = s;
    return MOE_OK;
}

static void several_cancel(text_several *s, int on) {
    atomic_fetch_add(&s->cancelling, 1);
    atomic_store(&s->cancelled, on);
    moetext *running = atomic_load(&s->running);
    if (running && on) moetext_cancel(running);
    atomic_fetch_sub(&s->cancelling, 1);
}

static moe_stats several_stats(const text_several *s) {
    moe_stats sum = s->before;
    for (size_t i = 0; i < s->n; i++) {
        if (!s->legs[i].translator) continue;
        const moe_stats stats = moetext_stats(s->legs[i].translator);
        text_add_stats(&sum, &stats, 0);
    }
    return sum;
}

static void several_pieces(const text_several *s, uint64_t *pieces, uint64_t *unknown) {
    *pieces = s->pieces, *unknown = s->unknown_pieces;
    for (size_t i = 0; i < s->n; i++)
        if (s->legs[i].translator) add_pieces(s->legs[i].translator, pieces, unknown);
}

static size_t several_under_way(const text_several *s) {
    const size_t parts = s->at ? moetext_under_way(s->at->translator) : 0;
    return parts > s->pending ? parts : s->pending;
}

static moetext_term several_term(const text_several *s, size_t i) {
    moetext_term sum = { 0 };
    if (i < s->n_counts) sum.asked = s->counts[i].asked, sum.kept = s->counts[i].kept;
    for (size_t k = 0; k < s->n; k++) {
        const moetext_term term = leg_term(&s->legs[k], i);
        if (!term.source) continue;
        sum.source = term.source, sum.target = term.target;
        sum.asked += term.asked, sum.kept += term.kept;
    }
    return sum;
}

/* All legs search the memory, except for texts between two models. */
static void several_recall(text_several *s, moetext_memory *memory) { s->memory = s->settings.recalled = memory; }

static const char *several_heading(const text_several *s) {
    for (size_t i = 0; i < s->n; i++)
        if (s->legs[i].translator) return moetext_glossary_heading(s->legs[i].translator);
    return "";
}

static moe_status several_save_prompts(text_several *s, moe_error *error) {
    moe_status status = MOE_OK;
    for (size_t i = 0; i < s->n && !status; i++)
        if (s->legs[i].translator) status = moetext_save_prompts(s->legs[i].translator, error);
    return status;
}

static const text_several_ops several_ops = { .close = text_set_close,
                                              .languages = text_set_languages,
                                              .language = text_set_language,
                                              .hops = text_set_hops,
                                              .needs_source = text_set_needs_source,
                                              .create = several_new,
                                              .free = several_free,
                                              .translate = several_translate,
                                              .check = several_check,
                                              .cancel = several_cancel,
                                              .stats = several_stats,
                                              .under_way = several_under_way,
                                              .pieces = several_pieces,
                                              .terms_new = glossaries_new,
                                              .terms_free = glossaries_free,
                                              .term = several_term,
                                              .heading = several_heading,
                                              .save_prompts = several_save_prompts,
                                              .recall = several_recall };

moe_status text_models_open(const char *const *paths, size_t n, const text_settings *settings, moetext_model **out,
                            moe_error *error) {
    text_set *set = NULL;
    moe_status status = text_set_open(paths, n, settings, &set, error);
    if (!status) status = text_model_of_set(set, &several_ops, out, error);
    if (status) text_set_close(set);
    return status;
}

moe_status moetext_models_open(const char *const *paths, size_t n, const char *options, moetext_model **out,
                               moe_error *error) {
    text_settings settings = text_settings_none();
    const moe_status status = text_settings_parse(&settings, options, error);
    return status ? status : text_models_open(paths, n, &settings, out, error);
}

moe_status text_translator_way(moetext *t, text_way *way, moe_error *error) {
    const moetext_request q = { .text = "" };
    return way_of(text_several_of(t), &q, way, error);
}

moe_status text_translator_open(moetext *t, size_t file, int *opened, moe_error *error) {
    leg *l = &text_several_of(t)->legs[file];
    const moe_status status = leg_open(l, error);
    *opened = l->opened > 0;
    return status;
}
