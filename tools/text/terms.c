/* terms.c - see terms.h. */
#include "tools/text/terms.h"

#include <stdlib.h>
#include <string.h>

/* ---- 1. Plain text ------------------------------------------------------------------------------------- */

/* HTML and XLIFF elements inside a sentence. Documents name theirs x1, x2... */
static const char elements[] =
    "a abbr acronym b bdi bdo big br cite del dfn em font g i ins kbd label mark mrk nobr ph pc q s "
    "samp sc ec small span strike strong sub sup tt u var wbr x bx ex bpt ept it";

int text_is_hidden(const char *data, size_t at, text_span_kind kind, size_t bytes) {
    const char *name;
    if (kind == TEXT_SPAN_HYPHEN) return 1;
    if (kind != TEXT_SPAN_OPEN && kind != TEXT_SPAN_CLOSE && kind != TEXT_SPAN_LONE) return 0;
    if (data[at] != '<') return kind != TEXT_SPAN_LONE;
    const size_t n = text_tag_name(data + at, bytes, &name);
    return text_is_listed(elements, name, n) || (n > 1 && *name == 'x' && strspn(name + 1, "0123456789") + 1 >= n);
}

static void add_byte(text_plain *p, char byte, size_t from) {
    text_append(&p->text, &byte, 1);
    if (!p->text.failed) p->from[p->text.length - 1] = (uint32_t)from;
}

moe_status text_plain_set(text_plain *p, moe_span text, int spans, text_message_text message, moe_error *error) {
    text_scan scan = text_scan_begin(text.data, text.length);
    scan.message = message;
    text_clear(&p->text);
    text_append(&p->text, "", 0);
    if (text_reserve(&p->from, &p->capacity, text.length + 1, sizeof *p->from, error)) return MOE_ERROR_MEMORY;
    for (size_t at = 0, bytes = text.length; at < text.length; at += bytes) {
        const text_span_kind kind = spans ? text_span_next(&scan, at, &bytes) : TEXT_SPAN_NONE;
        if (text_is_hidden(text.data, at, kind, bytes)) {
            const int joint = kind == TEXT_SPAN_LONE && text_is_wordlike_before(text.data, text.length, at) &&
                              text_is_wordlike(text.data, text.length, at + bytes);
            if (joint) add_byte(p, ' ', at);
            continue;
        }
        for (size_t i = 0; i < bytes; i++) { /* markup may leave two spaces */
            const size_t n = p->text.length;
            if (!spans || !n || text.data[at + i] != ' ' || p->text.data[n - 1] != ' ')
                add_byte(p, text.data[at + i], at + i);
        }
    }
    return p->text.failed ? text_out_of_memory(error) : MOE_OK;
}

void text_plain_free(text_plain *p) {
    text_bytes_free(&p->text);
    free(p->from);
}

/* ---- 2. Terms of a text -------------------------------------------------------------------------------- */

const text_term *text_term_at(const text_glossary *g, const text_bytes *t, size_t at, text_span_kind kind,
                              size_t *bytes, int *inflected) {
    size_t found;
    if (!g || (kind != TEXT_SPAN_NONE && kind != TEXT_SPAN_NUMBER && kind != TEXT_SPAN_WORD)) return NULL;
    if (at && text_is_wordlike(t->data, t->length, at) && text_is_wordlike_before(t->data, t->length, at)) return NULL;
    const text_term *term = text_glossary_find(g, t->data, t->length, at, &found, inflected);
    if (!term || (kind != TEXT_SPAN_NONE && found < *bytes)) return NULL;
    *bytes = found;
    return term;
}

/* The terms of a text that have the same target. */
typedef struct use {
    const text_term *term; /* the first one */
    size_t asked, kept;
    int inflected;
} use;

typedef struct found_use {
    const text_term *term;
    size_t at, bytes; /* its position in the plain text */
} found_use;

typedef struct uses {
    use *each;
    size_t n, capacity;
    found_use *terms; /* [n_terms] in text order */
    size_t n_terms, terms_capacity;
} uses;

static use *use_of(const uses *u, const text_term *term) {
    for (size_t i = 0; i < u->n; i++)
        if (strcmp(u->each[i].term->target, term->target) == 0) return &u->each[i];
    return NULL;
}

static moe_status add_use(uses *u, found_use one, int inflected, moe_error *error) {
    const text_term *term = one.term;
    moe_status status = MOE_OK;
    use *found = use_of(u, term);
    if (!found) status = text_add(&u->each, &u->n, &u->capacity, &(use){ .term = term }, 1, sizeof *u->each, error);
    if (!status) status = text_add(&u->terms, &u->n_terms, &u->terms_capacity, &one, 1, sizeof one, error);
    if (status) return status;
    found = found ? found : &u->each[u->n - 1];
    found->asked++;
    found->inflected |= inflected;
    return MOE_OK;
}

static moe_status find_uses(const text_glossary *g, const text_bytes *plain, int spans, text_message_text message,
                            uses *u, moe_error *error) {
    text_scan scan = text_scan_begin(plain->data, plain->length);
    moe_status status = MOE_OK;
    scan.message = message;
    for (size_t at = 0, bytes; at < plain->length && !status; at += bytes) {
        int inflected = 0;
        text_span_kind kind = text_span_next(&scan, at, &bytes);
        if (!spans) kind = TEXT_SPAN_NONE, bytes = text_utf8_next(plain->data, plain->length, at) - at;
        const text_term *term = text_term_at(g, plain, at, kind, &bytes, &inflected);
        if (term) status = add_use(u, (found_use){ term, at, bytes }, inflected, error);
    }
    return status;
}

/* ---- 3. Terms of a translation ------------------------------------------------------------------------- */

/* Return 1 if a byte is inside a word of a script with spaces. */
static int is_inside_word(const text_bytes *t, size_t at) {
    return text_is_wordlike(t->data, t->length, at) && text_is_wordlike_before(t->data, t->length, at) &&
           !text_is_unspaced(t->data, t->length, at) &&
           !text_is_unspaced(t->data, t->length, text_utf8_cut(t->data, t->length, at - 1));
}

/* Return the length of a term's target at a byte, as it is, capitalised or in capitals, with a regular ending if
 * `inflected` is 1; 0 if it is not there as a separate word. */
static size_t target_at(const text_bytes *t, size_t at, const text_term *term, int inflected) {
    const size_t length = strlen(term->target), first = text_utf8_next(term->target, length, 0);
    char written[256];
    if (at + length > t->length || length >= sizeof written) return 0;
    if (is_inside_word(t, at)) return 0;
    memcpy(written, term->target, length);
    for (int i = 0; memcmp(t->data + at, written, length) != 0; i++) {
        if (i == 2) return 0;
        text_upper_case(written, i ? length : first);
    }
    const size_t end = at + length, rest = text_word_end(t->data, t->length, end) - end;
    if (!rest || !is_inside_word(t, end)) return length;
    return inflected && text_term_ends(term, t->data + end, rest) ? length + rest : 0;
}

/* Count the target of a term in a text. */
static size_t count_target(const text_bytes *t, const text_term *term, int inflected) {
    size_t n = 0;
    for (size_t at = 0, bytes; at < t->length; at += bytes) {
        bytes = target_at(t, at, term, inflected);
        n += bytes > 0;
        if (!bytes) bytes = text_utf8_next(t->data, t->length, at) - at;
    }
    return n;
}

static size_t count_in(moe_span text, const text_term *term) {
    text_bytes t = { .data = (char *)text.data, .length = text.length };
    return count_target(&t, term, 1);
}

/* Return how often the translation contains a target, excluding those inside other targets. */
static size_t count_alone(const uses *u, const use *x, const text_bytes *translation) {
    size_t n = count_target(translation, x->term, x->inflected), inside = 0;
    for (size_t i = 0; i < u->n; i++) {
        const char *other = u->each[i].term->target;
        if (&u->each[i] == x || strlen(other) <= strlen(x->term->target)) continue;
        const size_t each = count_in((moe_span){ other, strlen(other) }, x->term);
        if (each) inside += each * count_target(translation, u->each[i].term, u->each[i].inflected);
    }
    return n > inside ? n - inside : 0;
}

/* Append a message about a term. */
static void tell(text_bytes *message, const use *x, const char *format, const char *word) {
    text_append_string(message, message->length ? "; glossary: " : "glossary: ");
    text_printf(message, "'%.60s' for '%.60s' ", x->term->target, x->term->source);
    text_printf(message, format, word);
}

/* Count a word, which may be capitalised, in a text. */
static size_t count_word(moe_span text, moe_span word) {
    size_t n = 0;
    for (size_t at = 0, bytes; at < text.length; at += bytes) {
        char first[2][8] = { { 0 } };
        bytes = text_word_length(text.data, text.length, at);
        const size_t c = text_utf8_next(text.data, text.length, at) - at;
        if (bytes != word.length || c >= sizeof first[0] || memcmp(text.data + at + c, word.data + c, bytes - c) != 0)
            continue;
        memcpy(first[0], text.data + at, c), memcpy(first[1], word.data, c);
        text_lower_first(first[0], c), text_lower_first(first[1], c);
        n += memcmp(first[0], first[1], c) == 0;
    }
    return n;
}

/* Return 1 if a translation contains a word at least as often as `without`. */
static int is_left(moe_span translation, moe_span word, const text_terms_known *known) {
    return count_word(translation, word) >= count_word(known->without, word);
}

/* Return 1 for a short or common word, whose loss does not show that a term replaced it. */
static int is_function_word(moe_span word) {
    static const char words[] =
        "the and for was are has had der die das dem den des ein und mit von zum zur les une aux "
        "est los las una del con por que";
    return word.length < 3 || text_is_listed(words, word.data, word.length);
}

/* Return a word that the term should have replaced, "" if the term replaced no content word, or NULL. */
static const char *remaining(const use *x, moe_span translation, const text_terms_known *known) {
    const moe_span t = known->without;
    const char *word = known->old_word && t.length ? known->old_word(known->user, x->term, 0) : NULL;
    for (size_t n = 1; word; word = known->old_word(known->user, x->term, n++))
        if (is_left(translation, (moe_span){ word, strlen(word) }, known)) return word;
    if (!t.length || count_in(t, x->term) >= x->asked || (known->old_word && known->old_word(known->user, x->term, 0)))
        return NULL;
    for (size_t at = 0, bytes; at < t.length; at += bytes) {
        bytes = text_word_length(t.data, t.length, at);
        const moe_span one = { t.data + at, bytes };
        if (text_is_wordlike(t.data, t.length, at) && !is_function_word(one) && !is_left(translation, one, known))
            return NULL;
    }
    return "";
}

static void check_use(const uses *u, use *x, const text_bytes *translation, const text_terms_known *known,
                      text_bytes *message) {
    const size_t n = count_alone(u, x, translation), own = count_in(known->without, x->term);
    const char *old = remaining(x, (moe_span){ translation->data, translation->length }, known);
    x->kept = n < x->asked ? n : x->asked;
    if (n < x->asked) tell(message, x, "is missing", "");
    else if (old)
        x->kept--, tell(message, x, *old ? "is next to '%.60s', which it should replace" : "replaces no word%s", old);
    else if (known->without.length && n > x->asked + own) tell(message, x, "is repeated", "");
}

/* Find the terms of a source; set `plain` to the translation if there are any. */
static moe_status begin_check(const text_glossary *g, moe_span source, moe_span target, const text_terms_known *known,
                              text_plain *plain, uses *u, moe_error *error) {
    moe_status status = text_plain_set(plain, source, known->spans, known->message, error);
    if (!status) status = find_uses(g, &plain->text, known->spans, known->message, u, error);
    for (size_t i = 0; i < u->n; i++) u->each[i].inflected |= known->inflects;
    return status || !u->n ? status : text_plain_set(plain, target, known->spans, known->message, error);
}

static void free_uses(uses *u) {
    free(u->each);
    free(u->terms);
}

moe_status text_terms_check(const text_glossary *g, moe_span source, moe_span target, const text_terms_known *known,
                            text_ids *found, text_bytes *message, moe_error *error) {
    text_plain plain = { 0 };
    uses u = { 0 };
    moe_status status = begin_check(g, source, target, known, &plain, &u, error);
    for (size_t i = 0; i < u.n && !status; i++) check_use(&u, &u.each[i], &plain.text, known, message);
    for (size_t i = 0; i < u.n_terms && !status; i++) {
        text_term_count *count = text_glossary_counts(g, u.terms[i].term->number);
        use *x = use_of(&u, u.terms[i].term);
        const int32_t kept = x->kept > 0, one = 2 * (int32_t)u.terms[i].term->number + kept;
        count->asked++;
        if (kept) x->kept--, count->kept++;
        if (found) status = text_ids_append(found, &one, 1, error);
    }
    text_plain_free(&plain);
    free_uses(&u);
    return status || !message->failed ? status : text_out_of_memory(error);
}

moe_status text_terms_missing(const text_glossary *g, moe_span source, moe_span target, const text_terms_known *known,
                              const text_term **found, size_t most, size_t *n, moe_error *error) {
    text_plain plain = { 0 };
    uses u = { 0 };
    const moe_status status = begin_check(g, source, target, known, &plain, &u, error);
    *n = 0;
    for (size_t i = 0; i < u.n && !status; i++) u.each[i].kept = count_alone(&u, &u.each[i], &plain.text);
    for (size_t i = 0; i < u.n_terms && !status && *n < most; i++) {
        use *x = use_of(&u, u.terms[i].term);
        if (x->kept) x->kept--;
        else found[(*n)++] = u.terms[i].term;
    }
    text_plain_free(&plain);
    free_uses(&u);
    return status;
}

moe_status text_terms_write(const text_glossary *g, moe_span source, const text_terms_known *known,
                            const text_term *const *terms, size_t n, text_bytes *out, size_t *first, moe_error *error) {
    text_plain plain = { 0 };
    uses u = { 0 };
    size_t done = 0;
    moe_status status = text_plain_set(&plain, source, known->spans, known->message, error);
    if (!status) status = find_uses(g, &plain.text, known->spans, known->message, &u, error);
    for (size_t i = 0; i < u.n_terms && !status; i++) {
        const size_t at = u.terms[i].at, end = at + u.terms[i].bytes, begin = plain.from[at];
        size_t k = 0;
        while (k < n && terms[k] != u.terms[i].term) k++;
        if (k == n) continue;
        if (k == n - 1) *first = begin;
        text_append(out, source.data + done, begin - done);
        text_append_string(out, terms[k]->target);
        done = plain.from[end - 1] + 1;
        for (size_t byte = begin, next = at; byte < done; byte++) /* keep markup inside the term */
            if (next < end && plain.from[next] == byte) next++;
            else text_append(out, source.data + byte, 1);
    }
    text_append(out, source.data + done, source.length - done);
    text_append(out, "", 0);
    text_plain_free(&plain);
    free_uses(&u);
    return status || !out->failed ? status : text_out_of_memory(error);
}
