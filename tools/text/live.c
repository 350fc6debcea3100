/* live.c - decides what of a growing text to translate, and what of the translation to show (moetext.h).
 *
 * A live text is a list of sentences. A finished sentence is translated once, like any text. The last one, as long as
 * it grows, gets quick translations (moetext_request.quick) after every few words. Two rules keep them calm: the last
 * words are not shown, because the next words of the source often change them, and shown words change only if two
 * quick translations in a row do not begin with them. The final translation is that of the whole text, so that it has
 * the bytes of any other translation.
 *
 * Contents
 *   1. Words
 *   2. Sentences  of a text, and their translations
 *   3. Live       the functions of moetext.h
 */
#include "tools/text/live.h"
#include "tools/text/sentences.h"
#include "tools/text/text.h"

#include <stdlib.h>
#include <string.h>

/* ==== 1. Words ========================================================================================== */

static int is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

size_t text_live_word(const char *data, size_t length, size_t at) {
    while (at < length && is_blank(data[at])) at++;
    if (at < length && text_is_unspaced(data, length, at)) return text_utf8_next(data, length, at);
    while (at < length && !is_blank(data[at]) && !text_is_unspaced(data, length, at))
        at = text_utf8_next(data, length, at);
    return at;
}

static size_t trimmed(const char *data, size_t length) {
    while (length && is_blank(data[length - 1])) length--;
    return length;
}

size_t text_live_words(const char *data, size_t length) {
    size_t n = 0;
    length = trimmed(data, length);
    for (size_t at = 0; at < length; at = text_live_word(data, length, at)) n++;
    return n;
}

/* Return the length of a text without its last `n` words. */
static size_t without_last(const char *data, size_t length, size_t n) {
    const size_t all = text_live_words(data, length);
    size_t end = 0;
    for (size_t i = n; i < all; i++) end = text_live_word(data, length, end);
    return end;
}

size_t text_live_common(const char *a, size_t a_length, const char *b, size_t b_length, size_t *words) {
    size_t at = 0, end;
    a_length = trimmed(a, a_length), b_length = trimmed(b, b_length);
    for (*words = 0; at < a_length && at < b_length; at = end, ++*words) {
        end = text_live_word(a, a_length, at);
        if (text_live_word(b, b_length, at) != end || memcmp(a + at, b + at, end - at) != 0) break;
    }
    return at;
}

int text_live_ended(const char *data, size_t length) {
    text_bytes longer = { 0 };
    text_append(&longer, data, length);
    text_append(&longer, " X", 2);
    const int ended = !longer.failed && text_sentence(longer.data, longer.length) < longer.length;
    text_bytes_free(&longer);
    return ended;
}

/* ==== 2. Sentences ====================================================================================== */

typedef struct sentence {
    text_bytes source;     /* without white space at its ends */
    text_bytes gap;        /* white space between it and the next sentence */
    text_bytes translated; /* the source of the last translation */
    text_bytes shown;      /* the visible part of its translations */
    text_bytes draft;      /* the last translation */
    int whole;             /* 1 if `shown` is the ordinary translation of `translated` */
    int doubted;           /* 1 if the last quick translation did not begin with the shown words */
    int finished;          /* 1 if the text continues after the sentence, or its end looks like one */
} sentence;

enum { NOTHING = -1, ALL = -2 }; /* instead of a sentence's index in moetext_live.asking */

struct moetext_live {
    text_bytes text, asked; /* the text, and the source of the last request */
    moetext_live_state state;
    sentence *sentences; /* [n] of `capacity`; all of them are initialised */
    size_t n, capacity;
    text_bytes lead; /* white space before the first sentence */
    ptrdiff_t asking;
    int quick;         /* the last request is for a quick translation */
    int typed;         /* the text grows by characters, so its last word can be incomplete */
    int done;          /* the text is final, and `out` its translation */
    text_bytes out;    /* the visible translation */
    size_t stable;     /* bytes of `out` in finished sentences */
    size_t characters; /* length of the text */
};

static int is_same(const text_bytes *a, const char *data, size_t length) {
    return a->length == length && (!length || memcmp(a->data, data, length) == 0);
}

static void set(text_bytes *b, const char *data, size_t length) {
    text_clear(b);
    text_append(b, data ? data : "", length);
}

static void sentence_clear(sentence *s) {
    text_bytes *const all[] = { &s->source, &s->gap, &s->translated, &s->shown, &s->draft };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) text_clear(all[i]);
    s->whole = s->doubted = s->finished = 0;
}

static void sentence_free(sentence *s) {
    text_bytes *const all[] = { &s->source, &s->gap, &s->translated, &s->shown, &s->draft };
    text_bytes_free_all(all, sizeof all / sizeof *all);
}

static void swap(sentence *a, sentence *b) {
    const sentence other = *a;
    *a = *b, *b = other;
}

/* Change the number of sentences to `n`: insert empty ones before the last `kept`, or delete those before them. */
static int resize(moetext_live *l, size_t n, size_t kept) {
    const size_t before = l->n, room = l->capacity;
    if (n > room) {
        sentence *grown = text_grown(l->sentences, &l->capacity, n, sizeof *grown);
        if (!grown) return 0;
        memset(grown + room, 0, (l->capacity - room) * sizeof *grown);
        l->sentences = grown;
    }
    for (size_t i = 1; n > before && i <= kept; i++) swap(&l->sentences[n - i], &l->sentences[before - i]);
    for (size_t i = kept; n < before && i; i--) swap(&l->sentences[n - i], &l->sentences[before - i]);
    for (size_t i = before - kept; i + kept < n; i++) sentence_clear(&l->sentences[i]);
    l->n = n;
    return 1;
}

/* A cut of a text into sentences. */
typedef struct cut {
    size_t begin, length, gap;
} cut;

/* Return the next sentence of a line of the text at `at`. */
static cut next_cut(const text_bytes *text, size_t at) {
    while (at < text->length && is_blank(text->data[at])) at++;
    const char *data = text->data + at, *line = memchr(data, '\n', text->length - at);
    const size_t rest = line ? (size_t)(line - data) : text->length - at;
    cut c = { .begin = at, .length = trimmed(data, rest ? text_sentence(data, rest) : 0) };
    for (at += c.length; at + c.gap < text->length && is_blank(text->data[at + c.gap]);) c.gap++;
    return c;
}

/* Return how many sentences from the first on are equal to those of the new text. Of the others, those before the last
 * `*kept` sentences take the new sources in order. */
static size_t equal_sentences(const moetext_live *l, const cut *cuts, size_t n, size_t *kept) {
    size_t first = 0, last = 0;
    const size_t most = n < l->n ? n : l->n;
    while (first < most && is_same(&l->sentences[first].source, l->text.data + cuts[first].begin, cuts[first].length))
        first++;
    while (last < most - first) {
        const cut *c = &cuts[n - 1 - last];
        if (!is_same(&l->sentences[l->n - 1 - last].source, l->text.data + c->begin, c->length)) break;
        last++;
    }
    *kept = last;
    return first;
}

/* Give the sentences their new sources. Sentences that did not change keep their translations. */
static int divide(moetext_live *l) {
    cut *cuts = NULL;
    size_t n = 0, capacity = 0, kept;
    for (size_t at = 0; at < l->text.length;) {
        const cut c = next_cut(&l->text, at);
        if (c.length && text_add(&cuts, &n, &capacity, &c, 1, sizeof c, NULL)) return free(cuts), 0;
        at = c.begin + c.length + c.gap;
    }
    const size_t equal = equal_sentences(l, cuts, n, &kept);
    if (!resize(l, n, kept)) return free(cuts), 0;
    set(&l->lead, l->text.data, n ? cuts[0].begin : 0);
    int fine = !l->lead.failed;
    for (size_t i = 0; i < n; i++) {
        sentence *s = &l->sentences[i];
        const char *data = l->text.data + cuts[i].begin;
        if (i >= equal && i < n - kept) set(&s->source, data, cuts[i].length);
        set(&s->gap, data + cuts[i].length, i + 1 < n ? cuts[i].gap : 0);
        s->finished = i + 1 < n || (l->state != MOETEXT_PAUSED && text_live_ended(s->source.data, s->source.length));
        fine &= !s->source.failed && !s->gap.failed;
    }
    free(cuts);
    return fine;
}

/* ==== 3. Live =========================================================================================== */

moe_status moetext_live_new(moetext_live **out, moe_error *error) {
    moetext_live *l = calloc(1, sizeof *l);
    if (!l) return text_out_of_memory(error);
    l->asking = NOTHING;
    *out = l;
    return MOE_OK;
}

void moetext_live_free(moetext_live *l) {
    if (!l) return;
    for (size_t i = 0; i < l->capacity; i++) sentence_free(&l->sentences[i]);
    free(l->sentences);
    text_bytes_free_all((text_bytes *[]){ &l->text, &l->asked, &l->lead, &l->out }, 4);
    free(l);
}

/* Join the shown translations. */
static moe_status join(moetext_live *l, moe_error *error) {
    int all_whole = 1;
    if (l->done) return MOE_OK;
    set(&l->out, l->lead.data, l->lead.length);
    l->stable = 0;
    for (size_t i = 0; i < l->n; i++) {
        const sentence *s = &l->sentences[i];
        if (s->shown.length) text_append(&l->out, s->shown.data, s->shown.length);
        all_whole &= s->whole && s->finished && is_same(&s->translated, s->source.data, s->source.length);
        if (all_whole) l->stable = l->out.length;
        if (!s->shown.length || i + 1 == l->n) continue;
        if (s->gap.length) text_append(&l->out, s->gap.data, s->gap.length);
        else if ((unsigned char)s->shown.data[s->shown.length - 1] < 0x80) text_append(&l->out, " ", 1);
    }
    l->done = l->state == MOETEXT_FINAL && l->n == 1 && all_whole &&
              is_same(&l->text, l->sentences[0].source.data, l->sentences[0].source.length);
    return l->out.failed ? text_out_of_memory(error) : MOE_OK;
}

moe_status moetext_live_give(moetext_live *l, const char *text, size_t length, moetext_live_state state,
                             moe_error *error) {
    if (!text_is_usable(text, length))
        return text_fail(error, MOE_ERROR_ARGUMENT, "text", "the text is not UTF-8, or contains a NUL");
    if (length > TEXT_MAX_LINE)
        return text_fail(error, MOE_ERROR_LIMIT, "text", "the text is longer than %d bytes", (int)TEXT_MAX_LINE);
    if (l->done && !is_same(&l->text, text, length)) l->done = 0;
    const size_t characters = text_utf8_count(text, length);
    if (characters > l->characters) l->typed = characters == l->characters + 1;
    l->characters = characters;
    set(&l->text, text, length);
    l->state = state;
    if (l->text.failed || !divide(l)) return text_out_of_memory(error);
    return join(l, error);
}

/* Return how much of an unfinished sentence to translate: all, or while someone types, its complete words. */
static size_t usable(const moetext_live *l, const sentence *s) {
    size_t length = s->source.length;
    if (l->state == MOETEXT_PAUSED || !l->typed || !length || is_blank(l->text.data[l->text.length - 1])) return length;
    while (length && !is_blank(s->source.data[length - 1])) length--;
    return trimmed(s->source.data, length);
}

/* Return 1 if enough words of an unfinished sentence are new, or gone, to translate it again. */
static int is_due(const moetext_live *l, const sentence *s, size_t length) {
    size_t common;
    if (is_same(&s->translated, s->source.data, length)) return 0;
    if (l->state == MOETEXT_PAUSED) return 1;
    text_live_common(s->source.data, length, s->translated.data, s->translated.length, &common);
    const size_t now = text_live_words(s->source.data, length),
                 before = text_live_words(s->translated.data, s->translated.length),
                 stride = now / TEXT_LIVE_SHARE > TEXT_LIVE_STRIDE ? now / TEXT_LIVE_SHARE : TEXT_LIVE_STRIDE;
    return now - common >= stride || before - common >= stride;
}

static int ask(moetext_live *l, ptrdiff_t index, const text_bytes *source, size_t length, const text_bytes *draft,
               moetext_request *request) {
    set(&l->asked, source->data, length);
    if (l->asked.failed) return 0;
    l->asking = index;
    request->text = l->asked.data, request->length = length;
    request->draft = draft->length ? draft->data : NULL, request->draft_length = draft->length;
    request->quick = l->quick;
    return 1;
}

int moetext_live_next(moetext_live *l, moetext_request *request) {
    l->asking = NOTHING, l->quick = 0;
    if (l->done) return 0;
    if (l->state == MOETEXT_FINAL) return ask(l, ALL, &l->text, l->text.length, &l->out, request);
    for (size_t i = 0; i < l->n; i++) {
        const sentence *s = &l->sentences[i];
        if (s->finished && !(s->whole && is_same(&s->translated, s->source.data, s->source.length)))
            return ask(l, (ptrdiff_t)i, &s->source, s->source.length, &s->draft, request);
        const size_t length = usable(l, s);
        l->quick = !s->finished && length && is_due(l, s, length);
        if (l->quick) return ask(l, (ptrdiff_t)i, &s->source, length, &s->draft, request);
    }
    return 0;
}

/* Show what a quick translation adds to the shown words. Changes of shown words wait for a second translation. */
static void show(const moetext_live *l, sentence *s, const char *text, size_t length) {
    size_t words;
    if (l->state != MOETEXT_PAUSED) length = without_last(text, length, TEXT_LIVE_MASK);
    const size_t common = text_live_common(text, length, s->shown.data, s->shown.length, &words);
    const int conflicts = common < s->shown.length && common < trimmed(text, length);
    if (common < s->shown.length && !conflicts && l->state != MOETEXT_PAUSED) s->doubted = 0;
    else if (conflicts && !s->doubted && l->state != MOETEXT_PAUSED) s->doubted = 1;
    else set(&s->shown, text, length), s->doubted = 0;
}

moe_status moetext_live_take(moetext_live *l, const char *text, size_t length, moe_error *error) {
    const ptrdiff_t asked = l->asking;
    l->asking = NOTHING;
    if (asked == ALL && l->state == MOETEXT_FINAL && is_same(&l->asked, l->text.data, l->text.length)) {
        set(&l->out, text, text ? length : 0);
        l->stable = l->out.length, l->done = 1;
        return l->out.failed ? text_out_of_memory(error) : MOE_OK;
    }
    if (asked < 0 || (size_t)asked >= l->n) return MOE_OK;
    sentence *s = &l->sentences[asked];
    size_t words;
    text_live_common(l->asked.data, l->asked.length, s->source.data, s->source.length, &words);
    if (l->quick ? !words : !is_same(&l->asked, s->source.data, s->source.length)) return MOE_OK; /* another sentence */
    set(&s->translated, l->asked.data, l->asked.length);
    s->whole = !l->quick;
    if (text && !l->quick) set(&s->shown, text, length), s->doubted = 0;
    else if (text) show(l, s, text, length);
    if (text) set(&s->draft, text, length);
    if (s->translated.failed || s->shown.failed || s->draft.failed) return text_out_of_memory(error);
    return join(l, error);
}

moetext_live_view moetext_live_shown(const moetext_live *l) {
    return (moetext_live_view){ l->out.length ? l->out.data : "", l->out.length, l->stable, l->done };
}
