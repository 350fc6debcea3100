/* prompt.c - see prompt.h. */
#define _GNU_SOURCE /* memmem */

#include "tools/text/prompt.h"
#include "tools/text/lost.h"
#include "tools/text/spans.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum kind { PLAIN, TERMS, CONTEXT, STYLE, DELIMITERS, STRUCTURED, KINDS } kind;
typedef enum wording_language { ENGLISH, CHINESE, LANGUAGES } wording_language;

enum { LONGEST_PIECE = 1 << 14, MOST_LANGUAGES = 1024, TOKEN = 16 /* usual maximum length of a token in bytes */ };

static const char *const kind_names[] = { "plain", "terms", "context", "style", "delimiters", "structured" };

/* Marks in a wording, which are replaced by values. */
typedef enum mark {
    TEXT,
    TARGET,
    TARGET_STYLE,
    BACKGROUND,
    FORMAT,
    TERM,
    TRANSLATION,
    SOURCE,
    SOURCE_CODE,
    TARGET_CODE,
    MARKS
} mark;
static const char *const marks[] = { "{source_text}", "{target_lang}", "{target_style}", "{background_text}",
                                     "{format_type}", "{term}",        "{translation}",  "{source_lang}",
                                     "{source_code}", "{target_code}" };

/* A piece of the template: its ids from the first to the last added token, and the text around them, which is tokenised
 * together with the messages, as in transformers. Without an added token, all of it is `before`. */
typedef struct piece {
    moe_span before, after;
    text_ids ids;
} piece;

struct text_prompt {
    piece prefix, suffix;
    piece system[2], answer[2];          /* before and after a system message, and before and after an answer */
    int has_system, has_answer;          /* 1 if the template has a place for these messages */
    moe_span wordings[KINDS][LANGUAGES]; /* empty if missing */
    moe_span *names[LANGUAGES];          /* [languages] */
    moe_span *codes;                     /* [languages] */
    unsigned char *chinese;              /* [languages] 1 if prompts with this source or target are in Chinese */
    size_t languages, extra;
};

/* ---- 1. The file, untrusted ---------------------------------------------------------------------------- */

static moe_span meta_text(const moe_model *m, const char *key) {
    const ptrdiff_t i = moe_model_meta_find(m, key);
    return i < 0 || moe_model_meta_kind(m, (size_t)i) != MOE_META_TEXT ? (moe_span){ NULL, 0 }
                                                                       : moe_model_meta_text(m, (size_t)i, 0);
}

static moe_span span_of(const char *s) { return (moe_span){ s ? s : "", s ? strlen(s) : 0 }; }

/* Return the offset of the first `of` in `in` at or after `from`; the length of `in` if there is none. */
static size_t find_span(moe_span in, size_t from, moe_span of) {
    const char *found = from < in.length ? memmem(in.data + from, in.length - from, of.data, of.length) : NULL;
    return found ? (size_t)(found - in.data) : in.length;
}

static size_t find_mark(moe_span s, size_t from, mark m) { return find_span(s, from, span_of(marks[m])); }

static size_t occurrences(moe_span in, moe_span of) {
    size_t n = 0;
    for (size_t at = 0; of.length && (at = find_span(in, at, of)) < in.length; at += of.length) n++;
    return n;
}

static moe_status take_piece(const text_front *front, const char *key, piece *out, moe_error *error) {
    const moe_span text = meta_text(front->model, key);
    size_t begin, end;
    if (text.length > LONGEST_PIECE)
        return text_fail(error, MOE_ERROR_FORMAT, key, "is too long: %zu bytes; the limit is %d", text.length,
                         (int)LONGEST_PIECE);
    if (!text.length) return MOE_OK;
    bpe_find_added(front->bpe, text.data, text.length, &begin, &end);
    out->before = (moe_span){ text.data, begin };
    out->after = (moe_span){ text.data + end, text.length - end };
    return begin < end ? text_encode_as(front, BPE_ADDED, text.data + begin, end - begin, &out->ids, error) : MOE_OK;
}

/* Read the pieces around a system message or an answer. */
static moe_status take_pair(const text_front *front, const char *of, piece pair[2], int *has, moe_error *error) {
    static const char *const ends[] = { "prefix", "suffix" };
    moe_status status = MOE_OK;
    char key[64];
    int n = 0;
    for (int i = 0; i < 2 && !status; i++) {
        snprintf(key, sizeof key, "prompt.%s.%s", of, ends[i]);
        n += moe_model_meta_find(front->model, key) >= 0;
        status = take_piece(front, key, &pair[i], error);
    }
    *has = n == 2;
    return !status && n == 1 ? text_fail(error, MOE_ERROR_FORMAT, key, "prefix or suffix is missing") : status;
}

/* Return a wording of the file; `key` receives its name. */
static moe_span wording_in(const moe_model *m, int k, int l, char key[64]) {
    snprintf(key, 64, "prompt.%s.%s", kind_names[k], l == CHINESE ? "zh" : "en");
    return meta_text(m, key);
}

static moe_status take_wordings(const moe_model *m, text_prompt *p, moe_error *error) {
    char key[64];
    for (int k = 0; k < KINDS; k++)
        for (int l = 0; l < LANGUAGES; l++) {
            const moe_span s = p->wordings[k][l] = wording_in(m, k, l, key);
            if (s.length && (s.length > LONGEST_PIECE || occurrences(s, span_of(marks[TEXT])) != 1))
                return text_fail(error, MOE_ERROR_FORMAT, key,
                                 "must contain %s exactly once and be at most %d bytes long", marks[TEXT],
                                 (int)LONGEST_PIECE);
        }
    if (p->wordings[PLAIN][ENGLISH].length || p->wordings[PLAIN][CHINESE].length) return MOE_OK;
    return text_fail(error, MOE_ERROR_FORMAT, "prompt.plain.en", "the model has no plain prompt");
}

static moe_status take_names(const moe_model *m, text_prompt *p, moe_error *error) {
    static const char *const keys[] = { "languages.english", "languages.chinese" };
    const ptrdiff_t chinese = moe_model_meta_find(m, "prompt.chinese");
    const size_t n = p->languages = moe_model_language_count(m);
    if (!n || n > MOST_LANGUAGES)
        return text_fail(error, MOE_ERROR_FORMAT, "languages.codes", "a prompted model needs 1 to %d languages",
                         (int)MOST_LANGUAGES);
    p->chinese = calloc(n, 1);
    p->codes = calloc(n, sizeof *p->codes);
    for (int l = 0; l < LANGUAGES; l++) {
        const ptrdiff_t i = moe_model_meta_find(m, keys[l]);
        if (i < 0 || moe_model_meta_kind(m, (size_t)i) != MOE_META_TEXTS || moe_model_meta_length(m, (size_t)i) != n)
            return text_fail(error, MOE_ERROR_FORMAT, keys[l], "must be a list of %zu names, one per language", n);
        p->names[l] = calloc(n, sizeof **p->names);
        if (!p->names[l] || !p->chinese || !p->codes) return text_out_of_memory(error);
        moe_model_meta_texts(m, (size_t)i, p->names[l], n);
    }
    for (size_t i = 0; i < n; i++) {
        if (moe_model_language_tag_at(m, i) != (int32_t)i)
            return text_fail(error, MOE_ERROR_FORMAT, "languages.tags", "must be consecutive integers from 0");
        p->codes[i] = moe_model_language(m, i);
        for (size_t k = 0; chinese >= 0 && k < moe_model_meta_length(m, (size_t)chinese); k++)
            if (text_same(moe_model_language(m, i), moe_model_meta_text(m, (size_t)chinese, k))) p->chinese[i] = 1;
    }
    return MOE_OK;
}

/* ---- 2. Prompts ---------------------------------------------------------------------------------------- */

/* A glossary term that occurs in a text. Each term is stored once. */
typedef struct found_term {
    moe_span source;
    const char *target;
    size_t end; /* end of the term's line in the user's turn */
} found_term;

typedef struct found_terms {
    found_term *each; /* [n] */
    size_t n, capacity, bytes;
    size_t begin; /* start of the terms' lines in the turn; SIZE_MAX if it has no terms */
    text_index index;
} found_terms;

/* Add a term unless it is already stored. Return 0 if out of memory. */
static int add_term(found_terms *found, moe_span source, const char *target) {
    const uint32_t hash = text_hash(source.data, source.length);
    uint32_t i;
    for (size_t at = 0; found->each && (i = text_index_next(&found->index, hash, &at)) != TEXT_NONE;)
        if (text_same(found->each[i].source, source)) return 1;
    const found_term term = { source, target, 0 };
    found->bytes += source.length + strlen(target);
    return text_index_add(&found->index, hash, found->n) &&
           !text_add(&found->each, &found->n, &found->capacity, &term, 1, sizeof term, NULL);
}

static moe_status find_terms(const text_prompt_request *a, found_terms *found, moe_error *error) {
    size_t bytes, word = 0;
    int inflected;
    if (a->example[0] && a->example[1] && !add_term(found, span_of(a->example[0]), a->example[1]))
        return text_out_of_memory(error);
    for (size_t at = 0; a->glossary && at < a->original.length; at += bytes) {
        const char *text = a->original.data;
        const int unspaced = text_is_unspaced(text, a->original.length, at);
        const text_term *term = at >= word || unspaced
                                    ? text_glossary_find(a->glossary, text, a->original.length, at, &bytes, &inflected)
                                    : NULL;
        if (!term) {
            if (at >= word) word = at + text_word_length(text, a->original.length, at);
            bytes = text_utf8_next(text, a->original.length, at) - at;
            continue;
        }
        if (!add_term(found, (moe_span){ text + at, bytes }, term->target)) return text_out_of_memory(error);
    }
    return MOE_OK;
}

/* The user's turn. */
typedef struct turn {
    text_bytes text;
    size_t context; /* offset of the context; SIZE_MAX if there is none */
} turn;

/* Append a wording with its marks replaced. Values are not searched for marks, because a text may spell a mark. */
static void put_wording(moe_span wording, const moe_span values[MARKS], turn *out) {
    for (size_t at = 0, bytes; at < wording.length; at += bytes) {
        mark m = TEXT;
        while (m < MARKS && !text_begins_with(wording.data + at, wording.length - at, marks[m])) m++;
        bytes = m < MARKS ? strlen(marks[m]) : 1;
        if (m == BACKGROUND) out->context = out->text.length;
        if (m < MARKS) text_append(&out->text, values[m].data, values[m].length);
        else text_append(&out->text, wording.data + at, 1);
    }
}

/* Append all but the last part of the wording for terms, repeating the line with {term} for each term. */
static void put_terms(moe_span wording, found_terms *terms, moe_span values[MARKS], turn *out) {
    const size_t term = find_mark(wording, 0, TERM);
    size_t begin = term, end = find_mark(wording, term, TRANSLATION);
    if (end == wording.length) return;
    while (begin && wording.data[begin - 1] != '\n') begin--;
    while (end < wording.length && wording.data[end] != '\n') end++;
    put_wording((moe_span){ wording.data, begin }, values, out);
    terms->begin = out->text.length;
    for (size_t i = 0; i < terms->n; i++) {
        values[TERM] = terms->each[i].source;
        values[TRANSLATION] = span_of(terms->each[i].target);
        put_wording((moe_span){ wording.data + begin, end - begin }, values, out);
        text_append(&out->text, "\n", 1);
        terms->each[i].end = out->text.length;
    }
    size_t after = end + (end < wording.length);
    while (after < wording.length && wording.data[after] == '\n') text_append(&out->text, "\n", 1), after++;
}

/* Return the part of a wording after the lines of terms. */
static moe_span behind_terms(moe_span wording) {
    size_t at = find_mark(wording, 0, TRANSLATION);
    while (at < wording.length && wording.data[at] != '\n') at++;
    while (at < wording.length && wording.data[at] == '\n') at++;
    return (moe_span){ wording.data + at, wording.length - at };
}

/* Return a wording in *language, or if missing, in the other language, to which *language is set. It may be empty. */
static moe_span wording_of(const text_prompt *p, kind k, wording_language *language) {
    if (!p->wordings[k][*language].length) *language = *language == CHINESE ? ENGLISH : CHINESE;
    return p->wordings[k][*language];
}

/* Return 1 if most letters are Chinese and none is kana. */
static int is_chinese(moe_span text) {
    size_t han = 0, others = 0;
    for (size_t at = 0, bytes; at < text.length; at += bytes) {
        const int32_t c = text_character(text.data, text.length, at, &bytes);
        if (c >= 0x3040 && c <= 0x30FF) return 0;
        if ((c >= 0x3400 && c <= 0x9FFF) || (c >= 0x20000 && c <= 0x3FFFF)) han++;
        else others += (size_t)text_is_letter(c);
    }
    return han > others;
}

static int knows(const text_prompt *p, int32_t language) { return language >= 0 && (size_t)language < p->languages; }

static wording_language language_for(const text_prompt *p, const text_prompt_request *a) {
    const int chinese = p->chinese[a->target] || (knows(p, a->source) ? p->chinese[a->source] : is_chinese(a->text));
    return chinese ? CHINESE : ENGLISH;
}

/* Return the kind that a name such as "structured:JSON" selects, or KINDS for the user's own wording. */
static kind kind_called(const char *wording) {
    const size_t n = strcspn(wording, ":");
    for (int k = DELIMITERS; k < KINDS; k++)
        if (text_is(wording, n, kind_names[k])) return (kind)k;
    return KINDS;
}

static const text_prompt_options nothing = { 0 };

static int given(const char *s) { return s && *s; }

/* Choose the wording for the options; if `strictly` is 1, prefer the wording that insists on markup. */
static moe_span wording_for(const text_prompt *p, const text_prompt_options *w, int strictly, int context,
                            wording_language *language) {
    const kind own = given(w->wording) ? kind_called(w->wording) : KINDS;
    const int delimiters = strictly && p->wordings[DELIMITERS][ENGLISH].length;
    if (given(w->wording) && own == KINDS && !delimiters) return span_of(w->wording);
    const moe_span found = wording_of(p,
                                      delimiters        ? DELIMITERS
                                      : own != KINDS    ? own
                                      : context         ? CONTEXT
                                      : given(w->style) ? STYLE
                                                        : PLAIN,
                                      language);
    return found.length ? found : wording_of(p, PLAIN, language);
}

static int names_source(moe_span wording) {
    return find_mark(wording, 0, SOURCE) < wording.length || find_mark(wording, 0, SOURCE_CODE) < wording.length;
}

int text_prompt_names_source(const moe_model *m, const text_prompt_options *w) {
    char key[64];
    int named = 0;
    if (!moe_model_prompted(m) || moe_model_meta_find(m, "prompt.prefix") < 0) return 0;
    if (w && given(w->wording) && kind_called(w->wording) == KINDS) return names_source(span_of(w->wording));
    for (int k = 0; k < KINDS; k++)
        for (int l = 0; l < LANGUAGES; l++) named |= names_source(wording_in(m, k, l, key));
    return named;
}

/* Set the values that do not depend on the text. An unknown source is -1. */
static void set_values(moe_span values[MARKS], const text_prompt *p, const text_prompt_options *w,
                       wording_language language, int32_t source, int32_t target) {
    const char *format = given(w->wording) && kind_called(w->wording) != KINDS ? strchr(w->wording, ':') : NULL;
    values[TARGET] = p->names[language][target];
    values[TARGET_CODE] = p->codes[target];
    if (knows(p, source)) values[SOURCE] = p->names[language][source], values[SOURCE_CODE] = p->codes[source];
    values[TARGET_STYLE] = span_of(w->style);
    values[FORMAT] = span_of(format ? format + 1 : "JSON");
}

static moe_status put_turn(const text_prompt *p, const text_prompt_options *w, const text_prompt_request *a,
                           moe_span context, found_terms *terms, turn *out, moe_error *error) {
    wording_language language = language_for(p, a), of_terms = language;
    const int strictly = a->strictly && p->wordings[DELIMITERS][ENGLISH].length, own = given(w->wording);
    const moe_span before = terms->n ? wording_of(p, TERMS, &of_terms) : (moe_span){ NULL, 0 };
    moe_span wording = wording_for(p, w, strictly, context.length > 0, &language);
    if (before.length && !strictly && !own && !context.length && !given(w->style))
        wording = behind_terms(before), language = of_terms;
    while (context.length && context.data[context.length - 1] == '\n') context.length--;
    if (!knows(p, a->source) && (names_source(wording) || (before.length && names_source(before))))
        return text_fail(error, MOE_ERROR_ARGUMENT, "source",
                         "the prompt names the source language: set the option source, or give one with the text");
    moe_span values[MARKS] = { [TEXT] = a->text, [BACKGROUND] = context };
    set_values(values, p, w, language, a->source, a->target);
    text_clear(&out->text);
    out->context = terms->begin = SIZE_MAX;
    if (before.length) put_terms(before, terms, values, out);
    put_wording(wording, values, out);
    return out->text.failed ? text_out_of_memory(error) : MOE_OK;
}

/* The ids of a prompt in the making. */
typedef struct draft {
    const text_front *front;
    text_ids *ids;
    text_bytes text; /* text after the last added token */
    moe_status status;
    moe_error *error;
} draft;

static draft draft_begin(const text_front *front, text_ids *ids, moe_error *error) {
    ids->length = 0;
    return (draft){ .front = front, .ids = ids, .error = error };
}

static void put_ids(draft *d, const text_ids *ids) {
    if (!d->status) d->status = text_ids_append(d->ids, ids->data, ids->length, d->error);
}

static void put_text(draft *d, const char *text, size_t length) { text_append(&d->text, text, length); }

static void encode_text(draft *d) {
    text_ids ids = { 0 };
    put_text(d, "", 0);
    if (!d->status && d->text.failed) d->status = text_out_of_memory(d->error);
    if (!d->status)
        d->status =
            text_encode_as(d->front, d->ids->length ? BPE_LATER : 0, d->text.data, d->text.length, &ids, d->error);
    put_ids(d, &ids);
    text_clear(&d->text);
    text_ids_free(&ids);
}

static void put_piece(draft *d, const piece *p) {
    put_text(d, p->before.data, p->before.length);
    if (!p->ids.length) return;
    encode_text(d);
    put_ids(d, &p->ids);
    put_text(d, p->after.data, p->after.length);
}

static moe_status draft_end(draft *d) {
    encode_text(d);
    text_bytes_free(&d->text);
    return d->status;
}

/* Join the user's turn, after the example's turn and the answer `answer` if that is not NULL. */
static moe_status join_ids(const text_front *front, const text_prompt *p, const turn *example, const char *answer,
                           const turn *said, text_ids *out, moe_error *error) {
    draft d = draft_begin(front, out, error);
    put_piece(&d, &p->prefix);
    if (answer) {
        put_text(&d, example->text.data, example->text.length);
        put_piece(&d, &p->answer[0]);
        put_text(&d, answer, strlen(answer));
        put_piece(&d, &p->answer[1]);
    }
    put_text(&d, said->text.data, said->text.length);
    put_piece(&d, &p->suffix);
    return draft_end(&d);
}

size_t text_prompt_first(size_t n, size_t context) {
    const size_t step = context / 2 + 1;
    return n > context ? (n - context + step - 1) / step * step : 0;
}

/* Drop the first lines of the context, then the last terms, until the turn is about `over` tokens shorter. */
static moe_status shorten(const text_front *front, const turn *said, size_t over, moe_span *context, found_terms *terms,
                          moe_error *error) {
    text_offsets begins = { 0 };
    size_t token = 0, saved = 0, at = said->context;
    const moe_status status = text_encode_begins(front, said->text.data, said->text.length, &begins, error);
    if (at == SIZE_MAX) context->length = 0;
    while (!status && token < begins.length && begins.data[token] < at) token++;
    while (!status && context->length && saved < over) {
        const char *line = memchr(context->data, '\n', context->length);
        const size_t bytes = line ? (size_t)(line + 1 - context->data) : context->length;
        context->data += bytes, context->length -= bytes;
        for (at += bytes; token < begins.length && begins.data[token] < at; token++) saved++;
    }
    if (terms->begin == SIZE_MAX) terms->n = 0;
    for (token = begins.length; !status && terms->n && saved < over; terms->n--) {
        const size_t begin = terms->n > 1 ? terms->each[terms->n - 2].end : terms->begin;
        while (token && begins.data[token - 1] >= terms->each[terms->n - 1].end) token--;
        for (; token && begins.data[token - 1] >= begin; token--) saved++;
    }
    free(begins.data);
    return status;
}

/* Build the ids of a prompt. *fits is 0 if they need more than `room` tokens. */
static moe_status prompt_ids(const text_front *front, const text_prompt_options *wishes,
                             const text_prompt_request *asked, size_t room, text_ids *out, size_t *left, int *fits,
                             moe_error *error) {
    const text_prompt *p = front->prompt;
    found_terms terms = { .n = 0 }, none = { .n = 0 };
    turn said = { .context = SIZE_MAX }, earlier = { .context = SIZE_MAX };
    moe_span context = asked->context;
    const char *answer = p->has_answer ? asked->example[1] : NULL;
    text_prompt_request own = *asked, other = { .source = asked->source, .target = asked->target };
    if (answer) own.example[0] = NULL, other.text = span_of(asked->example[0]);
    if (!knows(p, asked->target))
        return text_fail(error, MOE_ERROR_ARGUMENT, "target", "no language to translate into");
    moe_status status = find_terms(&own, &terms, error);
    if (!status && answer)
        status = put_turn(p, wishes ? wishes : &nothing, &other, (moe_span){ "", 0 }, &none, &earlier, error);
    const size_t found = terms.n;
    for (; terms.n && terms.bytes > TOKEN * room; terms.n--)
        terms.bytes -= terms.each[terms.n - 1].source.length + strlen(terms.each[terms.n - 1].target);
    while (!status) {
        status = put_turn(p, wishes ? wishes : &nothing, asked, context, &terms, &said, error);
        if (!status) status = join_ids(front, p, &earlier, answer, &said, out, error);
        *fits = out->length <= room;
        if (status || *fits || asked->example[0] || (!context.length && !terms.n)) break;
        status = shorten(front, &said, out->length - room, &context, &terms, error);
    }
    *left = terms.n && terms.begin == SIZE_MAX ? 0 : found - terms.n; /* a wording may have no place for terms */
    text_bytes_free(&said.text);
    text_bytes_free(&earlier.text);
    text_index_free(&terms.index);
    free(terms.each);
    return status;
}

moe_status text_prompt_ids(const text_front *front, const text_prompt_options *wishes, const text_prompt_request *asked,
                           size_t room, text_ids *out, size_t *left, moe_error *error) {
    text_prompt_request own = *asked;
    int fits = 0, language = ENGLISH;
    while (language < LANGUAGES && !front->prompt->wordings[TERMS][language].length) language++;
    if (!front->prompt->has_answer && language == LANGUAGES) own.example[0] = NULL; /* no place for it */
    moe_status status = MOE_OK;
    if (own.example[0]) status = prompt_ids(front, wishes, &own, room, out, left, &fits, error);
    if (status || fits) return status;
    own.example[0] = own.example[1] = NULL;
    return prompt_ids(front, wishes, &own, room, out, left, &fits, error);
}

/* Return the reason why messages cannot be continued, or NULL. */
static const char *no_talk(const moetext_message *m, size_t n) {
    const size_t first = n && m->role == MOETEXT_SYSTEM;
    for (size_t i = 0; i < n; i++) {
        const moetext_role wanted = i < first ? MOETEXT_SYSTEM : (i - first) % 2 ? MOETEXT_ASSISTANT : MOETEXT_USER;
        if (m[i].role != wanted && m[i].role == MOETEXT_SYSTEM) return "only the first message may be a system message";
        if (m[i].role != wanted) return "user and assistant messages must alternate, starting with the user";
        if (text_utf8_valid(m[i].text, m[i].length) < m[i].length) return "a message is not valid UTF-8";
    }
    return n <= first ? "missing user message" : (n - first) % 2 ? NULL : "the last message must be the user's";
}

moe_status text_prompt_answer(const text_front *front, const moetext_message *m, size_t n, text_ids *out,
                              moe_error *error) {
    const text_prompt *p = front->prompt;
    const char *why = no_talk(m, n);
    if (why) return text_fail(error, MOE_ERROR_ARGUMENT, "messages", "%s", why);
    const size_t first = m->role == MOETEXT_SYSTEM;
    const int placed = first && p->has_system;
    if (n > first + 1 && !p->has_answer)
        return text_fail(error, MOE_ERROR_UNSUPPORTED, "messages",
                         "this model's template has no place for earlier messages: send only the last message");
    draft d = draft_begin(front, out, error);
    put_piece(&d, placed ? &p->system[0] : &p->prefix);
    if (first) put_text(&d, m->text, m->length);
    if (placed) put_piece(&d, &p->system[1]);
    else if (first) put_text(&d, "\n\n", 2); /* the template has no place for a system message */
    for (size_t i = first; i < n; i++) {
        if (i > first) put_piece(&d, &p->answer[(i - first - 1) % 2]);
        put_text(&d, m[i].text, m[i].length);
    }
    put_piece(&d, &p->suffix);
    return draft_end(&d);
}

/* Find the maximum number of tokens around a text over all language names, wording languages and strict wordings. */
static moe_status measure(const text_front *front, const text_prompt *p, const text_prompt_options *w, size_t *extra,
                          moe_error *error) {
    turn said = { .context = SIZE_MAX };
    text_ids ids = { 0 };
    moe_status status = MOE_OK;
    *extra = 0;
    for (int i = 0; i < 2 * LANGUAGES && !status; i++) {
        wording_language l = i / 2 ? CHINESE : ENGLISH;
        const moe_span wording = wording_for(p, w, i % 2, 0, &l);
        int32_t longest = 0;
        size_t code = 0;
        for (size_t k = 1; k < p->languages; k++) {
            if (p->names[l][k].length > p->names[l][longest].length) longest = (int32_t)k;
            if (p->codes[k].length > p->codes[code].length) code = k;
        }
        moe_span values[MARKS] = { { NULL, 0 } };
        set_values(values, p, w, l, longest, longest);
        values[SOURCE_CODE] = values[TARGET_CODE] = p->codes[code];
        text_clear(&said.text);
        put_wording(wording, values, &said);
        status = said.text.failed ? text_out_of_memory(error) : join_ids(front, p, NULL, NULL, &said, &ids, error);
        if (ids.length > *extra) *extra = ids.length;
    }
    text_bytes_free(&said.text);
    text_ids_free(&ids);
    return status;
}

moe_status text_prompt_new(const text_front *front, text_prompt **out, moe_error *error) {
    *out = NULL;
    if (!moe_model_prompted(front->model) || !front->bpe || moe_model_meta_find(front->model, "prompt.prefix") < 0)
        return MOE_OK;
    text_prompt *p = calloc(1, sizeof *p);
    if (!p) return text_out_of_memory(error);
    moe_status status = take_piece(front, "prompt.prefix", &p->prefix, error);
    if (!status) status = take_piece(front, "prompt.suffix", &p->suffix, error);
    if (!status) status = take_pair(front, "system", p->system, &p->has_system, error);
    if (!status) status = take_pair(front, "answer", p->answer, &p->has_answer, error);
    if (!status) status = take_wordings(front->model, p, error);
    if (!status) status = take_names(front->model, p, error);
    if (!status) status = measure(front, p, &nothing, &p->extra, error);
    if (status) return text_prompt_free(p), status;
    return *out = p, MOE_OK;
}

void text_prompt_free(text_prompt *p) {
    if (!p) return;
    text_ids_free(&p->prefix.ids);
    text_ids_free(&p->suffix.ids);
    for (int i = 0; i < 2; i++) text_ids_free(&p->system[i].ids), text_ids_free(&p->answer[i].ids);
    for (int l = 0; l < LANGUAGES; l++) free(p->names[l]);
    free(p->codes);
    free(p->chinese);
    free(p);
}

size_t text_prompt_extra(const text_prompt *p) { return p->extra; }

/* Return 1 if a wording lacks a mark in any of its languages. */
static int lacks(const text_prompt *p, kind called, moe_span own, mark m) {
    int lacking = called == KINDS && find_mark(own, 0, m) == own.length;
    for (int l = 0; l < LANGUAGES && called != KINDS; l++) {
        const moe_span s = p->wordings[called][l];
        lacking |= s.length && find_mark(s, 0, m) == s.length;
    }
    return lacking;
}

moe_status text_prompt_check(const text_front *front, text_prompt_options *w, int plain, moe_error *error) {
    const text_prompt *p = front->prompt;
    const int style = given(w->style), own = given(w->wording), wished = style || own || w->context;
    const char *name = own ? "prompt" : style ? "style" : "context";
    if (wished && plain)
        return text_fail(error, MOE_ERROR_ARGUMENT, name,
                         "%s requires text: ids and pieces contain the complete prompt", name);
    if (wished && !p)
        return text_fail(error, MOE_ERROR_UNSUPPORTED, name, "%s requires a prompted model: this file has no prompt",
                         name);
    if (!p) return MOE_OK;
    const kind called = own ? kind_called(w->wording) : style ? STYLE : w->context ? CONTEXT : PLAIN;
    if (wished && called != KINDS && !p->wordings[called][ENGLISH].length && !p->wordings[called][CHINESE].length)
        return text_fail(error, MOE_ERROR_UNSUPPORTED, name, "this model has no prompt '%s'", kind_names[called]);
    if (style && w->context && !own)
        return text_fail(error, MOE_ERROR_ARGUMENT, "style",
                         "no prompt of the model has both style and context; pass your own with option prompt");
    if (called == KINDS && occurrences(span_of(w->wording), span_of(marks[TEXT])) != 1)
        return text_fail(error, MOE_ERROR_ARGUMENT, "prompt",
                         "must contain %s exactly once, or be delimiters or structured", marks[TEXT]);
    if (style && lacks(p, called, span_of(w->wording), TARGET_STYLE))
        return text_fail(error, MOE_ERROR_ARGUMENT, "style", "the prompt has no place for style: missing %s",
                         marks[TARGET_STYLE]);
    if (w->context && lacks(p, called, span_of(w->wording), BACKGROUND))
        return text_fail(error, MOE_ERROR_ARGUMENT, "context", "the prompt has no place for context: missing %s",
                         marks[BACKGROUND]);
    return measure(front, p, w, &w->extra, error);
}

/* ---- 3. Spans and numbers of answers ------------------------------------------------------------------- */

int text_has_language(const char *data, size_t length) {
    text_scan scan = text_scan_begin(data, length);
    size_t bytes, unused;
    for (size_t at = 0; at < length; at += bytes)
        if (text_span_next(&scan, at, &bytes) == TEXT_SPAN_NONE &&
            text_is_letter(text_character(data, length, at, &unused)))
            return 1;
    return 0;
}

enum { MOST_LOOKED_AT = 256, MOST_OPEN = 32, TOLD_BY = 3 };
/* MOST_LOOKED_AT: most distinct spans in a text. MOST_OPEN: deepest nesting of tags. TOLD_BY: fewest digits of a
 * number that is checked; shorter numbers may be spelled out, or are times and days. */

/* Return 1 if tags are properly nested and all of them are closed. */
static int is_nested(moe_span s) {
    text_scan scan = text_scan_begin(s.data, s.length);
    moe_span open[MOST_OPEN];
    size_t bytes, n = 0;
    for (size_t at = 0; at < s.length; at += bytes) {
        const text_span_kind found = text_span_next(&scan, at, &bytes);
        moe_span name;
        if (found != TEXT_SPAN_OPEN && found != TEXT_SPAN_CLOSE) continue;
        if (!(name.length = text_tag_name(s.data + at, bytes, &name.data))) continue;
        if (found == TEXT_SPAN_CLOSE ? !n || !text_same(open[--n], name) : n == MOST_OPEN) return 0;
        if (found == TEXT_SPAN_OPEN) open[n++] = name;
    }
    return !n;
}

moe_span text_prompt_missing(moe_span source, moe_span target) {
    text_scan scan = text_scan_begin(source.data, source.length);
    moe_span looked_at[MOST_LOOKED_AT], markup = { source.data, 0 };
    size_t bytes, n = 0;
    for (size_t at = 0, same; at < source.length && n < MOST_LOOKED_AT; at += bytes) {
        const text_span_kind found = text_span_next(&scan, at, &bytes);
        const moe_span span = { source.data + at, bytes };
        if (found == TEXT_SPAN_NONE || found == TEXT_SPAN_NUMBER || found == TEXT_SPAN_HYPHEN) continue;
        if (found == TEXT_SPAN_CLOSE) markup = span;
        for (same = 0; same < n && !text_same(looked_at[same], span); same++) {}
        if (same < n) continue;
        looked_at[n++] = span;
        if (occurrences(target, span) < occurrences(source, span)) return span;
    }
    if (markup.length && is_nested(source) && !is_nested(target)) return markup;
    return (moe_span){ source.data, 0 };
}

/* Return the length of a separator between two digits of one number, or 0. */
static size_t separator(moe_span s, size_t at, int spaces) {
    static const char *const all[] = { ".",        ",",        "'", "\xC2\xA0", "\xE2\x80\xAF", "\xE2\x80\x99",
                                       "\xD9\xAB", "\xD9\xAC", " " };
    size_t bytes;
    for (size_t i = 0; i < sizeof all / sizeof *all - (size_t)!spaces; i++) {
        const size_t n = strlen(all[i]);
        if (at + n < s.length && memcmp(s.data + at, all[i], n) == 0 && text_digit(s, at + n, &bytes) >= 0) return n;
    }
    return 0;
}

/* Append the digits of the number at `at`, and return the number's length in bytes. */
static size_t put_digits(moe_span s, size_t at, int spaces, text_bytes *out) {
    size_t end = at, bytes;
    for (int digit; end < s.length; end += bytes) {
        if ((digit = text_digit(s, end, &bytes)) >= 0) text_append(out, &"0123456789"[digit], 1);
        else if (end == at || !(bytes = separator(s, end, spaces))) break;
    }
    return end - at;
}

/* Return 1 if a neighbouring sign makes a number part of a word, a time, a date or a range. */
static int is_joined(moe_span s, size_t begin, size_t end) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_", signs[] = ":/-";
    size_t bytes;
    if (begin && strchr(letters, s.data[begin - 1])) return 1;
    if (end < s.length && strchr(letters, s.data[end])) return 1;
    if (begin > 1 && strchr(signs, s.data[begin - 1]) && strchr("0123456789", s.data[begin - 2])) return 1;
    return end + 1 < s.length && strchr(signs, s.data[end]) && text_digit(s, end + 1, &bytes) >= 0;
}

/* Find the next number to check at or after *at, and its digits without outer zeros. Return 0 if no number follows. */
static int next_number(text_scan *scan, size_t *at, moe_span *number, text_bytes *digits) {
    const moe_span s = { scan->data, scan->length };
    size_t span = 0, end = *at; /* end of the current number span; only number spans are examined */
    for (; *at < s.length; *at += span) {
        if (*at >= end) {
            const text_span_kind found = text_span_next(scan, *at, &span);
            end = *at + span;
            if (found != TEXT_SPAN_NONE && found != TEXT_SPAN_NUMBER) continue;
        }
        if (text_digit(s, *at, &span) < 0) continue;
        text_clear(digits);
        const size_t begin = *at, bytes = put_digits(s, begin, 0, digits);
        *at += bytes, span = 0;
        size_t first = 0, last = digits->length;
        if (digits->failed) return 0;
        while (first < last && digits->data[first] == '0') first++;
        while (last > first && digits->data[last - 1] == '0') last--;
        if (digits->length < TOLD_BY || last - first < 2 || is_joined(s, begin, begin + bytes)) continue;
        memmove(digits->data, digits->data + first, last - first);
        digits->length = last - first;
        *number = (moe_span){ s.data + begin, bytes };
        return 1;
    }
    return 0;
}

/* Append the digits of all numbers in a text, with separators. */
static void put_numbers(moe_span s, text_bytes *out) {
    for (size_t at = 0, bytes; at < s.length; at += bytes) {
        if (text_digit(s, at, &bytes) < 0) continue;
        bytes = put_digits(s, at, 1, out);
        text_append(out, "|", 1);
    }
}

moe_status text_prompt_missing_number(moe_span source, moe_span target, moe_span *lost, moe_error *error) {
    text_scan scan = text_scan_begin(source.data, source.length);
    text_bytes there = { 0 }, digits = { 0 };
    moe_span number;
    size_t at = 0, n = 0;
    *lost = (moe_span){ source.data, 0 };
    put_numbers(target, &there);
    while (!lost->length && n++ < MOST_LOOKED_AT && next_number(&scan, &at, &number, &digits))
        if (!occurrences((moe_span){ there.data, there.length }, (moe_span){ digits.data, digits.length }))
            *lost = number;
    const int failed = there.failed || digits.failed;
    text_bytes_free(&there);
    text_bytes_free(&digits);
    return failed ? text_out_of_memory(error) : MOE_OK;
}

/* Add a constraint for a span. A preceding space is part of its first token. */
static moe_status bind_span(const text_front *front, moe_span source, moe_span span, int spaced, size_t room,
                            text_constraints *bound, moe_error *error) {
    const size_t begin = (size_t)(span.data - source.data);
    text_bytes text = { 0 };
    text_ids ids = { 0 };
    if (bound->n == MOE_MAX_CONSTRAINTS) return MOE_OK;
    if (spaced && (!begin || strchr(" \t\n", source.data[begin - 1]))) text_append(&text, " ", 1);
    text_append(&text, span.data, span.length);
    moe_status status =
        text.failed ? text_out_of_memory(error) : text_encode_as(front, BPE_BARE, text.data, text.length, &ids, error);
    if (!status && ids.length && bound->ids.length + ids.length <= room) {
        bound->each[bound->n++] = (moe_constraint){ .n_ids = ids.length, .once = 1 };
        status = text_ids_append(&bound->ids, ids.data, ids.length, error);
    }
    text_bytes_free(&text);
    text_ids_free(&ids);
    return status;
}

moe_status text_prompt_bind(const text_front *front, moe_span source, moe_span target, size_t room,
                            text_constraints *bound, moe_error *error) {
    text_scan scan = text_scan_begin(source.data, source.length);
    text_bytes there = { 0 }, digits = { 0 };
    moe_status status = MOE_OK;
    moe_span number;
    int spaced = 1;
    for (size_t at = 0; at < target.length && spaced; at++)
        spaced = ((unsigned char)target.data[at] & 0xC0) == 0x80 || !text_is_unspaced(target.data, target.length, at);
    bound->n = bound->ids.length = 0;
    for (size_t at = 0, bytes; at < source.length && !status; at += bytes) {
        const text_span_kind found = text_span_next(&scan, at, &bytes);
        if (found == TEXT_SPAN_NONE || found == TEXT_SPAN_NUMBER || found == TEXT_SPAN_HYPHEN) continue;
        status = bind_span(front, source, (moe_span){ source.data + at, bytes }, spaced, room, bound, error);
    }
    put_numbers(target, &there);
    scan = text_scan_begin(source.data, source.length);
    for (size_t at = 0, n = 0; !status && n++ < MOST_LOOKED_AT && next_number(&scan, &at, &number, &digits);)
        if (!occurrences((moe_span){ there.data, there.length }, (moe_span){ digits.data, digits.length }))
            status = bind_span(front, source, number, spaced, room, bound, error);
    if (!status && (there.failed || digits.failed)) status = text_out_of_memory(error);
    for (size_t i = 0, at = 0; i < bound->n; at += bound->each[i++].n_ids) bound->each[i].ids = bound->ids.data + at;
    text_bytes_free(&there);
    text_bytes_free(&digits);
    return status;
}
