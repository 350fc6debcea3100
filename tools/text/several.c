/* several.c - several.h says what this is and has the contracts.
 *
 * Contents
 *   1. Terms       a glossary for each leg
 *   2. Legs        made when they are needed; memory
 *   3. Texts       from the caller, on their way, to the caller
 *   4. Running     a leg, and then the next
 *   5. Translators  life
 */
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

/* A note of a leg (moetext_note); `at` is the position of its message. */
typedef struct remark {
    size_t part, at;
    moe_status status;
} remark;

/* A text on its way. */
typedef struct item {
    struct item *next;           /* in a queue */
    struct item *after, *before; /* of all */
    moetext_request request;     /* the caller's; `text` and `given` are copies */
    text_bytes text, given;      /* what the next leg reads */
    text_bytes context;          /* what the first leg reads */
    text_way way;
    size_t hop; /* files that it is through */
    void *place;

    /* what the first of two models said */
    moe_status status;
    unsigned flags;
    text_bytes message;
    moetext_link *links;
    size_t n_links, link_capacity;

    /* what both said */
    text_bytes noted;
    remark *remarks;
    size_t n_remarks, remark_capacity;
} item;

typedef struct queue {
    item *first, **end; /* end NULL: it is empty */
} queue;

typedef struct leg {
    size_t file;
    queue fresh; /* texts that wait */
    moetext *translator;
    const moetext_model *model;
    size_t bytes;           /* of the file and the session; 0: it is not open */
    uint64_t opened, used;  /* how often; when last */
    moetext_glossary *stay; /* translations of the option's glossary, as they are; NULL: not made, or there is none */
} leg;

struct text_several {
    text_set *set;
    text_settings settings;   /* of legs */
    text_bytes terms;         /* of the option's glossary: its file may be gone when a leg is made */
    ptrdiff_t source, target; /* of texts that name none; -1: none */
    int auto_source;
    int one_way;             /* token ids mean something on one way only: */
    text_way only;           /* that of the options */
    text_detector *detector; /* of all languages; NULL: not needed yet */
    leg *legs;               /* [n] by file */
    size_t n, next;          /* next: the leg that is looked at first */
    uint64_t clock;
    size_t bytes;                    /* of all legs that are open */
    moe_stats before;                /* of legs that are closed */
    uint64_t pieces, unknown_pieces; /* the same */

    leg *at;        /* that runs */
    item *turn;     /* of which a part was given last */
    queue begun;    /* texts with parts left */
    int alternate;  /* one that is begun is next */
    size_t given;   /* texts that this run of it has begun */
    item *items;    /* all that are on their way, */
    size_t pending; /* so many */
    size_t most;    /* of those; a quarter is a turn of a leg that others wait for */
    int ended;      /* the caller has no more */
    moetext_pull_fn pull;
    moetext_done_fn done;
    void *user;
    text_bytes message;
    moetext_hypothesis *hypotheses; /* of a result with links through two models */
    size_t hypothesis_capacity;
    text_links links;
    moetext_note *notes; /* of a result through two models */
    size_t note_capacity;

    _Atomic(moetext *) running; /* what a call from anywhere has to cancel; NULL: nothing */
    atomic_int cancelled, cancelling;
};

/* ==== 1. Terms ========================================================================================== */

/* For a leg: the terms; or for the second of two their translations, which the first one has written, as they are. */
typedef struct leaf {
    uint64_t opened; /* leg.opened that it is of */
    moetext_glossary *glossary[2];
} leaf;

struct text_glossaries {
    char **sources, **translations;
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
    for (size_t i = 0; i < t->n; i++)
        free(t->sources ? t->sources[i] : NULL), free(t->translations ? t->translations[i] : NULL);
    for (size_t i = 0; t->leaves && i < t->n_leaves; i++) leaf_clear(&t->leaves[i]);
    free(t->sources);
    free(t->translations);
    free(t->leaves);
    free(t);
}

static moe_status glossaries_new(const text_several *s, const char *const *sources, const char *const *translations,
                                 size_t n, text_glossaries **out, moe_error *error) {
    text_glossaries *t = calloc(1, sizeof *t);
    if (!t) return text_out_of_memory(error);
    *t = (text_glossaries){ .sources = calloc(n + 1, sizeof(char *)),
                            .translations = calloc(n + 1, sizeof(char *)),
                            .n = n,
                            .n_leaves = s->n,
                            .leaves = calloc(s->n, sizeof(leaf)) };
    int fine = t->sources && t->translations && t->leaves;
    for (size_t i = 0; i < n && fine; i++)
        fine = (t->sources[i] = text_copy(sources[i], strlen(sources[i]))) &&
               (t->translations[i] = text_copy(translations[i], strlen(translations[i])));
    if (!fine) return glossaries_free(t), text_out_of_memory(error);
    *out = t;
    return MOE_OK;
}

/* The glossary of a text for the leg that runs; *out NULL: none but the leg's own. */
static moe_status glossary_of(leg *l, const item *x, const moetext_glossary **out, moe_error *error) {
    const size_t second = x->hop;
    moe_status status = MOE_OK;
    *out = NULL;
    if (x->request.task != MOETEXT_TRANSLATE && !(x->way.n == 2 && !x->hop)) return MOE_OK;
    if (!x->request.glossary) {
        if (!second) return MOE_OK;
        if (!l->stay) status = text_leg_glossary(l->translator, &l->stay, error);
        return *out = l->stay, status;
    }
    text_glossaries *t = text_glossaries_of(x->request.glossary);
    leaf *f = &t->leaves[l->file];
    if (f->opened != l->opened) leaf_clear(f), f->opened = l->opened;
    if (!f->glossary[second])
        status = moetext_glossary_new(l->translator, (const char *const *)(second ? t->translations : t->sources),
                                      (const char *const *)t->translations, t->n, &f->glossary[second], error);
    return *out = f->glossary[second], status;
}

/* ==== 2. Legs =========================================================================================== */

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

static void leg_close(text_several *s, leg *l) {
    if (l->translator) {
        const moe_stats stats = moetext_stats(l->translator);
        text_add_stats(&s->before, &stats, 1);
        add_pieces(l->translator, &s->pieces, &s->unknown_pieces);
    }
    moetext_glossary_free(l->stay);
    moetext_free(l->translator);
    if (l->model) text_set_release(s->set, l->file);
    s->bytes -= l->bytes;
    l->stay = NULL, l->translator = NULL, l->model = NULL, l->bytes = 0;
}

/* Room for more bytes of a leg, within the limit: legs that were not used for the longest time are closed. */
static moe_status make_room(text_several *s, leg *l, size_t bytes, moe_error *error) {
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
        leg_close(s, oldest);
    }
    s->bytes += bytes, l->bytes += bytes;
    return MOE_OK;
}

typedef struct guest {
    text_several *several;
    leg *leg;
} guest;

static moe_status room_for_session(void *user, size_t bytes, moe_error *error) {
    const guest *g = user;
    return make_room(g->several, g->leg, bytes, error);
}

/* Ids are read by the first model of a way and written by the last one, which also gets the token that is forced. */
static text_settings settings_of(const text_several *s, const leg *l) {
    text_settings settings = s->settings;
    if (!s->one_way || !s->only.n) return settings;
    const int first = l->file == s->only.files[0], last = l->file == s->only.files[s->only.n - 1];
    const int form = settings.form < 0 ? TEXT_FORM_TEXT : settings.form;
    settings.form = first ? form : TEXT_FORM_TEXT;
    settings.writes = 1 + (last ? form : (int)TEXT_FORM_TEXT);
    if (!last) settings.force = -1;
    return settings;
}

/* A leg whose model and session are there. Word links are for models that have them. */
static moe_status leg_open(text_several *s, leg *l, moe_error *error) {
    l->used = ++s->clock;
    if (l->translator) return MOE_OK;
    const uint64_t bytes = text_set_bytes(s->set, l->file);
    const size_t file = bytes > SIZE_MAX / 2 ? SIZE_MAX / 2 : (size_t)bytes;
    const guest g = { s, l };
    moe_error e = { .code = MOE_OK };
    moe_status status = make_room(s, l, file, &e);
    if (!status) status = text_set_acquire(s->set, l->file, &l->model, &e);
    status = text_in_step(s->settings.wire, status, &e);
    text_settings settings = settings_of(s, l);
    if (!status)
        status = text_leg_new(l->model, &settings, room_for_session, (void *)(uintptr_t)&g, &l->translator, &e);
    if (settings.alignment > 0 && (status == MOE_ERROR_UNSUPPORTED || status == MOE_ERROR_ARGUMENT)) {
        settings.alignment = 0;
        s->bytes -= l->bytes - file, l->bytes = file; /* a session that is not made */
        status = text_leg_new(l->model, &settings, room_for_session, (void *)(uintptr_t)&g, &l->translator, &e);
    }
    if (!status) return l->opened++, MOE_OK;
    leg_close(s, l);
    text_fail(error, status, text_set_path(s->set, l->file), "%.80s: %.40s%s%.120s", text_set_path(s->set, l->file),
              e.where, e.where[0] ? ": " : "", e.message);
    return status;
}

/* ==== 3. Texts ========================================================================================== */

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
    text_bytes_free(&x->text);
    text_bytes_free(&x->given);
    text_bytes_free(&x->message);
    text_bytes_free(&x->context);
    text_bytes_free(&x->noted);
    free(x->links);
    free(x->remarks);
    free(x);
}

static void refuse(const text_several *s, const moetext_request *q, moe_status status, const char *message) {
    const moetext_result r = { .user = q->user, .status = status, .message = message };
    s->done(s->user, &r);
}

/* A text of which nothing more is to come. */
static void item_leave(text_several *s, item *x) {
    if (s->turn == x) s->turn = NULL;
    if (x->after) x->after->before = x->before;
    *(x->before ? &x->before->after : &s->items) = x->after;
    s->pending--;
    item_free(x);
}

/* The message, which says where it went wrong if that was on the way. */
static const char *message_of(text_several *s, const item *x, const char *message) {
    if (x->way.n < 2 || !*message) return message;
    size_t n;
    const char *const *codes = text_set_languages(s->set, &n);
    text_clear(&s->message);
    text_printf(&s->message, "%s to %s: ", codes[x->way.languages[x->hop]], codes[x->way.languages[x->hop + 1]]);
    text_append_string(&s->message, message);
    return s->message.failed ? message : s->message.data;
}

static void item_refuse(text_several *s, item *x, moe_status status, const char *message) {
    refuse(s, &x->request, status, message_of(s, x, message));
    item_leave(s, x);
}

/* The language that a text is in. */
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
                         "these models need the language of a text: set the option source, or name it with the text");
    moe_status status = s->detector ? MOE_OK : text_detector_open(codes, n, &s->detector, error);
    if (status) return status;
    float confidence;
    const ptrdiff_t found =
        text_detect(s->detector, q->text ? q->text : "", text_utf8_valid(q->text, q->length), &confidence);
    *source = found < 0 ? target : (size_t)found; /* without letters: any way keeps it */
    return MOE_OK;
}

/* The way of a text; n 0: it is in the language that it is to be translated into. */
static moe_status way_of(text_several *s, const moetext_request *q, text_way *way, moe_error *error) {
    size_t target = (size_t)s->target, source = 0;
    moe_status status = q->target ? text_set_find(s->set, q->target, &target, error) : MOE_OK;
    if (!status && !q->target && s->target < 0)
        return text_fail(error, MOE_ERROR_ARGUMENT, "target",
                         "no language to translate into: set the option target, or name it with the text");
    if (!status) status = find_source(s, q, target, &source, error);
    *way = (text_way){ 0, { 0, 0 }, { source, target, 0 } };
    return status || source == target ? status : text_set_way(s->set, source, target, way, error);
}

/* A text as it is. */
static void deliver_same(const text_several *s, const moetext_request *q) {
    static const size_t no_end[1] = { 0 };
    text_bytes copy = { 0 };
    text_append(&copy, q->text ? q->text : "", q->length);
    const moetext_hypothesis h = { .text = copy.data, .length = copy.length, .finished = 1, .part_ends = no_end };
    const moetext_result r = { .user = q->user,
                               .message = "",
                               .n_parts = 1,
                               .part_ends = no_end,
                               .n_hypotheses = 1,
                               .hypotheses = &h };
    if (copy.failed) refuse(s, q, MOE_ERROR_MEMORY, "out of memory");
    else s->done(s->user, &r);
    text_bytes_free(&copy);
}


/* A text of the caller's joins those that wait for its first leg, or is done with. */
static void begin_text(text_several *s, const moetext_request *q) {
    text_way way = { 0 };
    moe_error e;
    item *x = NULL;
    if (moe_request_dropped(q->drop)) refuse(s, q, MOE_ERROR_CANCELLED, "dropped by the caller");
    else if (q->task == MOETEXT_ANSWER) refuse(s, q, MOE_ERROR_UNSUPPORTED, "several models do not answer prompts");
    else if ((unsigned)q->task > MOETEXT_ANSWER) refuse(s, q, MOE_ERROR_ARGUMENT, "this is no task");
    else if (q->routing) refuse(s, q, MOE_ERROR_UNSUPPORTED, "routing is of one model");
    else if (way_of(s, q, &way, &e)) refuse(s, q, e.code, e.message);
    else if (s->one_way && memcmp(&way, &s->only, sizeof way) != 0)
        refuse(s, q, MOE_ERROR_ARGUMENT, "token ids are for the languages of the options alone");
    else if (!way.n && q->task == MOETEXT_TRANSLATE && text_utf8_valid(q->text, q->length) == q->length)
        deliver_same(s, q);
    else if (!way.n) refuse(s, q, MOE_ERROR_ARGUMENT, "the text is in the language that it is to be translated into");
    else if (way.n == 2 && q->task == MOETEXT_SCORE)
        refuse(s, q, MOE_ERROR_UNSUPPORTED, "a translation through another language has no probability");
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

/* Take a text from the caller: what its pull function answered. */
static int take(text_several *s, int wait) {
    moetext_request q = { 0 };
    if (atomic_load(&s->cancelled)) return MOE_PULL_CANCEL;
    const int answer = s->pull(s->user, wait, &q);
    if (answer == MOE_PULL_REQUEST) begin_text(s, &q);
    if (answer == MOE_PULL_END) s->ended = 1;
    return answer;
}

/* The hypotheses of a result with links from the caller's text. */
static moe_status link_through(text_several *s, const item *x, const moetext_result *r) {
    moetext_hypothesis *larger = text_grown(s->hypotheses, &s->hypothesis_capacity, r->n_hypotheses, sizeof *larger);
    if (!larger) return MOE_ERROR_MEMORY;
    s->hypotheses = larger;
    s->links.n = 0;
    for (size_t i = 0; i < r->n_hypotheses; i++) {
        const moetext_hypothesis *h = &r->hypotheses[i];
        const size_t before = s->links.n;
        larger[i] = *h;
        if (text_links_through(x->links, x->n_links, h->links, h->n_links, &s->links, NULL)) return MOE_ERROR_MEMORY;
        larger[i].n_links = s->links.n - before;
    }
    for (size_t i = 0, at = 0; i < r->n_hypotheses; at += larger[i++].n_links) larger[i].links = s->links.data + at;
    return MOE_OK;
}

/* Keep the notes of a leg, with the languages between which it translates. 0: no memory. */
static int keep_notes(text_several *s, item *x, const moetext_result *r) {
    size_t n;
    const char *const *codes = text_set_languages(s->set, &n);
    remark *larger = text_grown(x->remarks, &x->remark_capacity, x->n_remarks + r->n_notes, sizeof *larger);
    if (!larger) return 0;
    x->remarks = larger;
    for (size_t i = 0; i < r->n_notes; i++) {
        larger[x->n_remarks++] = (remark){ r->notes[i].part, x->noted.length, r->notes[i].status };
        text_printf(&x->noted, "%s to %s: ", codes[x->way.languages[x->hop]], codes[x->way.languages[x->hop + 1]]);
        text_append(&x->noted, r->notes[i].message, strlen(r->notes[i].message) + 1);
    }
    return !x->noted.failed;
}

/* The notes of both legs as those of a result. 0: no memory. */
static int join_notes(text_several *s, const item *x, moetext_result *r) {
    moetext_note *larger = text_grown(s->notes, &s->note_capacity, x->n_remarks, sizeof *larger);
    if (!larger) return 0;
    s->notes = larger;
    for (size_t i = 0; i < x->n_remarks; i++)
        larger[i] = (moetext_note){ x->remarks[i].part, x->remarks[i].status, x->noted.data + x->remarks[i].at };
    r->notes = larger, r->n_notes = x->n_remarks;
    return 1;
}

/* A text is through its last model. */
static void deliver(text_several *s, item *x, const moetext_result *result) {
    moetext_result r = *result;
    size_t n;
    r.user = x->request.user;
    r.model = s->at->model;
    r.message = message_of(s, x, result->message);
    if (x->way.n == 2) {
        r.between = x->text.data, r.between_length = x->text.length;
        r.between_language = text_set_languages(s->set, &n)[x->way.languages[1]];
        r.flags |= x->flags & ~(unsigned)MOETEXT_BLANK;
        if (x->status || !*r.message) {
            r.status = x->status ? x->status : r.status;
            r.message = x->message.data;
        }
        if (r.status && r.n_hypotheses) r.flags |= MOETEXT_INCOMPLETE;
        if (!keep_notes(s, x, result) || !join_notes(s, x, &r) || link_through(s, x, &r)) {
            item_refuse(s, x, MOE_ERROR_MEMORY, "out of memory");
            return;
        }
        r.hypotheses = s->hypotheses;
    }
    s->done(s->user, &r);
    item_leave(s, x);
}

/* A text is through the first of two models: what came out is a text of the second. */
static void go_on(text_several *s, item *x, const moetext_result *r) {
    const moetext_hypothesis *h = &r->hypotheses[0];
    moetext_link *links = text_grown(x->links, &x->link_capacity, h->n_links, sizeof *links);
    x->status = r->status, x->flags = r->flags;
    text_clear(&x->message);
    text_append_string(&x->message, message_of(s, x, r->message));
    text_clear(&x->text);
    text_append(&x->text, h->text, h->length);
    if (!links || x->message.failed || x->text.failed || !keep_notes(s, x, r)) {
        if (links) x->links = links;
        item_refuse(s, x, MOE_ERROR_MEMORY, "out of memory");
        return;
    }
    x->links = links, x->n_links = h->n_links;
    if (h->n_links) memcpy(links, h->links, h->n_links * sizeof *links);
    x->place = NULL;
    x->hop = 1;
    if (s->turn == x) s->turn = NULL;
    queue_add(&s->legs[x->way.files[1]].fresh, x);
}

/* ==== 4. Running ======================================================================================== */

/* Whether texts wait for another leg than this one. */
static int others_wait(const text_several *s, const leg *l) {
    for (size_t i = 0; i < s->n; i++)
        if (&s->legs[i] != l && s->legs[i].fresh.first) return 1;
    return 0;
}

/* The text whose part is next; NULL: there is none. A leg that others wait for ends what it has begun, and stops. */
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

/* The last leg has something new of a text. */
static void leg_partial(void *user, const moetext_partial *partial) {
    const item *x = partial->user;
    moetext_partial own = *partial;
    own.user = x->request.user;
    x->request.partial(((text_several *)user)->user, &own);
}

/* Fill in what the leg is asked for. */
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
    if (!x->hop) q->context = x->context.data, q->context_length = x->context.length;
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

/* What a call from another thread, or a signal handler, would cancel: not freed while one is at it. */
static void set_running(text_several *s, moetext *t) {
    if (t) moetext_uncancel(t);
    atomic_store(&s->running, t);
    while (!t && atomic_load(&s->cancelling)) sched_yield();
    if (t && atomic_load(&s->cancelled)) moetext_cancel(t);
}

static moe_status run_leg(text_several *s, leg *l, moe_error *error) {
    moe_error e;
    if (leg_open(s, l, &e)) {
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

/* The next leg that texts wait for, in turns. */
static leg *next_leg(text_several *s) {
    for (size_t i = 0; i < s->n; i++) {
        leg *l = &s->legs[(s->next + i) % s->n];
        if (l->fresh.first) return s->next = l->file + 1, l;
    }
    return NULL;
}

/* The first leg that texts of any rank wait for, once each has taken all its texts: all ranks run the same legs. *out
 * NULL: there is none. */
static moe_status next_leg_in_step(text_several *s, leg **out, moe_error *error) {
    const moe_wire *wire = s->settings.wire;
    int64_t *waits = calloc(s->n + 1, sizeof *waits);
    *out = NULL;
    while (!s->ended && take(s, 1) == MOE_PULL_REQUEST) {}
    moe_status status = waits ? MOE_OK : text_out_of_memory(error);
    if (!status && !s->ended) status = text_fail(error, MOE_ERROR_CANCELLED, "", "cancelled");
    status = text_in_step(wire, status, error);
    for (size_t i = 0; i < s->n && !status; i++) waits[i] = s->legs[i].fresh.first != NULL;
    if (!status) status = wire->agree(wire->user, waits, s->n, error);
    for (size_t i = s->n; i-- && !status;)
        if (waits[i]) *out = &s->legs[i];
    free(waits);
    return status;
}

static moe_status translate_in_step(text_several *s, moe_error *error) {
    leg *l;
    moe_status status;
    while (!(status = next_leg_in_step(s, &l, error)) && l && !(status = run_leg(s, l, error))) {}
    return status;
}

static moe_status several_translate(text_several *s, moetext_pull_fn pull, moetext_done_fn done, void *user,
                                    moe_error *error) {
    moe_status status = MOE_OK;
    s->pull = pull, s->done = done, s->user = user;
    s->ended = 0;
    if (s->settings.wire) status = translate_in_step(s, error);
    while (!status && !s->settings.wire) {
        leg *l = next_leg(s);
        const int cancelled = atomic_load(&s->cancelled);
        if (!cancelled && l) status = run_leg(s, l, error);
        else if (!cancelled && s->ended) break;
        else if (cancelled || take(s, 1) == MOE_PULL_CANCEL) status = MOE_ERROR_CANCELLED;
    }
    for (item *x = s->items, *next; x; x = next) next = x->after, item_leave(s, x); /* those that were under way */
    s->begun.first = NULL;
    for (size_t i = 0; i < s->n; i++) s->legs[i].fresh.first = NULL;
    if (status == MOE_ERROR_CANCELLED) {
        text_fail(error, status, "", "cancelled");
        atomic_store(&s->cancelled, 0);
    }
    return status;
}

/* ==== 5. Translators ==================================================================================== */

static moe_status several_check(text_several *s, const char *source, const char *target, moe_error *error) {
    text_way way;
    const moetext_request q = { .text = "", .source = source, .target = target };
    return way_of(s, &q, &way, error);
}

/* The number of a language that an option names; -1: it names none. */
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
    for (size_t i = 0; s->legs && i < s->n; i++) leg_close(s, &s->legs[i]);
    free(s->legs);
    text_detector_close(s->detector);
    text_bytes_free(&s->terms);
    text_bytes_free(&s->message);
    free(s->hypotheses);
    free(s->links.data);
    free(s->notes);
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
    s->settings.source[0] = s->settings.target[0] = '\0'; /* each leg has its own */
    atomic_init(&s->running, NULL);
    atomic_init(&s->cancelled, 0);
    atomic_init(&s->cancelling, 0);
    s->legs = calloc(s->n, sizeof *s->legs);
    moe_status status = s->legs ? MOE_OK : text_out_of_memory(error);
    for (size_t i = 0; i < s->n && s->legs; i++) s->legs[i].file = i;
    if (!status && settings->glossary[0]) {
        status = text_glossary_load(settings->glossary, &s->terms, error);
        s->settings.terms = &s->terms;
    }
    if (!status) status = option_language(set, "source", s->auto_source ? "" : settings->source, &s->source, error);
    if (!status) status = option_language(set, "target", settings->target, &s->target, error);
    if (!status && s->target >= 0 && s->source >= 0 && s->source != s->target)
        status = text_set_way(set, (size_t)s->source, (size_t)s->target, &s->only, error);
    if (!status && settings->form >= 0 && settings->form != text_set_form(set))
        status = text_fail(error, MOE_ERROR_ARGUMENT, "form", "option form: the models were opened with another one");
    s->settings.form = text_set_form(set);
    s->one_way = s->settings.form > 0 || settings->force >= 0;
    if (!status && s->one_way && s->auto_source)
        status =
            text_fail(error, MOE_ERROR_ARGUMENT, "source", "token ids need the source language: it is not detected");
    if (!status && s->one_way) status = way_of(s, &(moetext_request){ .text = "" }, &s->only, error);
    if (status) return several_free(s), status;
    *out = s;
    return MOE_OK;
}

static void several_cancel(text_several *s) {
    atomic_fetch_add(&s->cancelling, 1);
    atomic_store(&s->cancelled, 1);
    moetext *running = atomic_load(&s->running);
    if (running) moetext_cancel(running);
    atomic_fetch_sub(&s->cancelling, 1);
}

static void several_uncancel(text_several *s) { atomic_store(&s->cancelled, 0); }

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
                                              .uncancel = several_uncancel,
                                              .stats = several_stats,
                                              .under_way = several_under_way,
                                              .pieces = several_pieces,
                                              .terms_new = glossaries_new,
                                              .terms_free = glossaries_free };

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

moe_status text_translator_open(moetext *t, size_t file, moe_error *error) {
    text_several *s = text_several_of(t);
    return leg_open(s, &s->legs[file], error);
}
