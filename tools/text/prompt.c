/* prompt.c - see prompt.h for what it is and for the contracts.
 *
 *   1. The file     prefix, suffix, wordings, names: untrusted
 *   2. Asking       a prompt
 *   3. Looking      at what came back
 */
#include "tools/text/prompt.h"
#include "tools/text/spans.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

typedef enum kind { PLAIN, TERMS, CONTEXT, STYLE, DELIMITERS, STRUCTURED, KINDS } kind;
typedef enum wording_language { ENGLISH, CHINESE, LANGUAGES } wording_language;

enum { LONGEST_PIECE = 1 << 14, MOST_LANGUAGES = 1024, MOST_TERMS = 64 };

static const char *const kind_names[] = { "plain", "terms", "context", "style", "delimiters", "structured" };
static const char TEXT[] = "{source_text}", TARGET[] = "{target_lang}", STYLE_[] = "{target_style}",
                  BACKGROUND[] = "{background_text}", FORMAT[] = "{format_type}", TERM[] = "{term}",
                  TRANSLATION[] = "{translation}";

struct text_prompt {
    text_ids prefix, suffix;
    moe_span wordings[KINDS][LANGUAGES]; /* length 0: there is none */
    moe_span *names[LANGUAGES];          /* [languages] */
    unsigned char *chinese;              /* [languages] asked in Chinese, on either side */
    size_t languages, extra;
    char name[64];
};

/* ---- 1. The file --------------------------------------------------------------------------------------- */

static moe_span meta_text(const moe_model *m, const char *key) {
    const ptrdiff_t i = moe_model_meta_find(m, key);
    return i < 0 || moe_model_meta_kind(m, (size_t)i) != MOE_META_TEXT ? (moe_span){ NULL, 0 }
                                                                       : moe_model_meta_text(m, (size_t)i, 0);
}

static int span_is(moe_span a, moe_span b) { return a.length == b.length && memcmp(a.data, b.data, a.length) == 0; }

static moe_span span_of(const char *s) { return (moe_span){ s ? s : "", s ? strlen(s) : 0 }; }

/* The first place of `of` at or after `from`; the length of `in`: none. */
static size_t find_span(moe_span in, size_t from, moe_span of) {
    for (size_t at = from; at + of.length <= in.length; at++)
        if (memcmp(in.data + at, of.data, of.length) == 0) return at;
    return in.length;
}

static size_t find_mark(moe_span s, size_t from, const char *mark) { return find_span(s, from, span_of(mark)); }

static size_t occurrences(moe_span in, moe_span of) {
    size_t n = 0;
    for (size_t at = 0; of.length && (at = find_span(in, at, of)) < in.length; at += of.length) n++;
    return n;
}

static moe_status take_piece(const text_front *front, const char *key, text_ids *ids, moe_error *error) {
    const moe_span piece = meta_text(front->model, key);
    if (piece.length > LONGEST_PIECE)
        return text_fail(error, MOE_ERROR_FORMAT, key, "it has %zu bytes, at most %d are allowed", piece.length,
                         (int)LONGEST_PIECE);
    return piece.length ? text_encode_template(front, piece.data, piece.length, ids, error) : MOE_OK;
}

static moe_status take_wordings(const moe_model *m, text_prompt *p, moe_error *error) {
    char key[64];
    for (int k = 0; k < KINDS; k++)
        for (int l = 0; l < LANGUAGES; l++) {
            snprintf(key, sizeof key, "prompt.%s.%s", kind_names[k], l == CHINESE ? "zh" : "en");
            const moe_span s = p->wordings[k][l] = meta_text(m, key);
            if (s.length && (s.length > LONGEST_PIECE || occurrences(s, span_of(TEXT)) != 1))
                return text_fail(error, MOE_ERROR_FORMAT, key, "it has not %s once, or more than %d bytes", TEXT,
                                 (int)LONGEST_PIECE);
        }
    if (p->wordings[PLAIN][ENGLISH].length || p->wordings[PLAIN][CHINESE].length) return MOE_OK;
    return text_fail(error, MOE_ERROR_FORMAT, "prompt.plain.en", "there is a prompt, but no wording of it");
}

static moe_status take_names(const moe_model *m, text_prompt *p, moe_error *error) {
    static const char *const keys[] = { "languages.english", "languages.chinese" };
    const ptrdiff_t chinese = moe_model_meta_find(m, "prompt.chinese");
    const size_t n = p->languages = moe_model_language_count(m);
    if (!n || n > MOST_LANGUAGES)
        return text_fail(error, MOE_ERROR_FORMAT, "languages.codes", "a model that is prompted needs 1 to %d languages",
                         (int)MOST_LANGUAGES);
    p->chinese = calloc(n, 1);
    for (int l = 0; l < LANGUAGES; l++) {
        const ptrdiff_t i = moe_model_meta_find(m, keys[l]);
        if (i < 0 || moe_model_meta_kind(m, (size_t)i) != MOE_META_TEXTS || moe_model_meta_length(m, (size_t)i) != n)
            return text_fail(error, MOE_ERROR_FORMAT, keys[l], "it is not a list of %zu names, one for each language",
                             n);
        p->names[l] = calloc(n, sizeof **p->names);
        if (!p->names[l] || !p->chinese) return text_out_of_memory(error);
        moe_model_meta_texts(m, (size_t)i, p->names[l], n);
    }
    for (size_t i = 0; i < n; i++) {
        if (moe_model_language_tag_at(m, i) != (int32_t)i)
            return text_fail(error, MOE_ERROR_FORMAT, "languages.tags", "they are not 0, 1, 2 and so on");
        for (size_t k = 0; chinese >= 0 && k < moe_model_meta_length(m, (size_t)chinese); k++)
            if (span_is(moe_model_language(m, i), moe_model_meta_text(m, (size_t)chinese, k))) p->chinese[i] = 1;
    }
    return MOE_OK;
}

static moe_status measure(const text_front *front, text_prompt *p, moe_error *error);

moe_status text_prompt_new(const text_front *front, text_prompt **out, moe_error *error) {
    *out = NULL;
    if (!moe_model_prompted(front->model) || !front->bpe || moe_model_meta_find(front->model, "prompt.prefix") < 0)
        return MOE_OK;
    text_prompt *p = calloc(1, sizeof *p);
    if (!p) return text_out_of_memory(error);
    const moe_span name = meta_text(front->model, "prompt.name");
    if (name.length) snprintf(p->name, sizeof p->name, "%.*s", (int)(name.length < 63 ? name.length : 63), name.data);
    moe_status status = take_piece(front, "prompt.prefix", &p->prefix, error);
    if (!status) status = take_piece(front, "prompt.suffix", &p->suffix, error);
    if (!status) status = take_wordings(front->model, p, error);
    if (!status) status = take_names(front->model, p, error);
    if (!status) status = measure(front, p, error);
    if (status) return text_prompt_free(p), status;
    *out = p;
    return MOE_OK;
}

void text_prompt_free(text_prompt *p) {
    if (!p) return;
    text_ids_free(&p->prefix);
    text_ids_free(&p->suffix);
    for (int l = 0; l < LANGUAGES; l++) free(p->names[l]);
    free(p->chinese);
    free(p);
}

size_t text_prompt_extra(const text_prompt *p) { return p->extra; }
const char *text_prompt_name(const text_prompt *p) { return p->name; }

/* ---- 2. Asking ----------------------------------------------------------------------------------------- */

/* Terms of the glossary in a text, each once. */
typedef struct found_terms {
    moe_span sources[MOST_TERMS];
    const char *targets[MOST_TERMS];
    size_t n;
} found_terms;

static void find_terms(const text_asked *a, found_terms *found) {
    size_t bytes, word = 0;
    int inflected;
    found->n = 0;
    for (size_t at = 0; a->glossary && at < a->text.length && found->n < MOST_TERMS; at += bytes) {
        const char *text = a->text.data;
        const int unspaced = text_is_unspaced(text, a->text.length, at);
        const text_term *term = at >= word || unspaced
                                    ? text_glossary_find(a->glossary, text, a->text.length, at, &bytes, &inflected)
                                    : NULL;
        if (!term) {
            if (at >= word) word = at + text_word_length(text, a->text.length, at);
            for (bytes = 1; at + bytes < a->text.length && ((unsigned char)text[at + bytes] & 0xC0) == 0x80; bytes++) {}
            continue;
        }
        const moe_span source = { text + at, bytes };
        int known = 0;
        for (size_t i = 0; i < found->n; i++) known |= span_is(found->sources[i], source);
        if (known) continue;
        found->sources[found->n] = source;
        found->targets[found->n++] = term->target;
    }
}

/* What stands for a mark; `data` NULL: it is no mark that is known here. */
typedef struct values {
    moe_span text, target, style, context, format, term, translation;
} values;


/* Append a wording with its marks replaced. What takes a mark's place is not looked at: a text may spell one. */
static void put_wording(moe_span wording, const values *v, text_bytes *out) {
    const struct {
        const char *mark;
        const moe_span *value;
    } marks[] = {
        { TEXT, &v->text },     { TARGET, &v->target }, { STYLE_, &v->style },           { BACKGROUND, &v->context },
        { FORMAT, &v->format }, { TERM, &v->term },     { TRANSLATION, &v->translation }
    };
    for (size_t at = 0; at < wording.length;) {
        size_t bytes = 0;
        for (size_t i = 0; wording.data[at] == '{' && i < sizeof marks / sizeof *marks && !bytes; i++) {
            const size_t n = strlen(marks[i].mark);
            if (n > wording.length - at || memcmp(wording.data + at, marks[i].mark, n) != 0) continue;
            text_append(out, marks[i].value->data, marks[i].value->length);
            bytes = n;
        }
        if (!bytes) text_append(out, wording.data + at, 1), bytes = 1;
        at += bytes;
    }
}

/* The lines of the wording for terms that come before its last part: the one with {term} repeats. */
static void put_terms(moe_span wording, const found_terms *terms, values *v, text_bytes *out) {
    const size_t term = find_mark(wording, 0, TERM);
    size_t begin = term, end = find_mark(wording, term, TRANSLATION);
    if (end == wording.length) return;
    while (begin && wording.data[begin - 1] != '\n') begin--;
    while (end < wording.length && wording.data[end] != '\n') end++;
    put_wording((moe_span){ wording.data, begin }, v, out);
    for (size_t i = 0; i < terms->n; i++) {
        v->term = terms->sources[i];
        v->translation = span_of(terms->targets[i]);
        put_wording((moe_span){ wording.data + begin, end - begin }, v, out);
        text_append(out, "\n", 1);
    }
    size_t after = end + (end < wording.length);
    while (after < wording.length && wording.data[after] == '\n') text_append(out, "\n", 1), after++;
}

/* The part of the wording for terms behind those lines. */
static moe_span behind_terms(moe_span wording) {
    size_t at = find_mark(wording, 0, TRANSLATION);
    while (at < wording.length && wording.data[at] != '\n') at++;
    while (at < wording.length && wording.data[at] == '\n') at++;
    return (moe_span){ wording.data + at, wording.length - at };
}

/* A wording in this language, or in the other one, which *language becomes; length 0: there is none. */
static moe_span wording_of(const text_prompt *p, kind k, wording_language *language) {
    if (!p->wordings[k][*language].length) *language = *language == CHINESE ? ENGLISH : CHINESE;
    return p->wordings[k][*language];
}

/* Whether most letters of a text are Chinese ones, and none is Japanese. */
static int is_chinese(moe_span text) {
    size_t han = 0, others = 0;
    utf8proc_int32_t c;
    for (size_t at = 0; at < text.length;) {
        const utf8proc_ssize_t n =
            utf8proc_iterate((const utf8proc_uint8_t *)text.data + at, (utf8proc_ssize_t)(text.length - at), &c);
        at += n > 0 ? (size_t)n : 1;
        if (n < 1) continue;
        if (c >= 0x3040 && c <= 0x30FF) return 0;
        if ((c >= 0x3400 && c <= 0x9FFF) || (c >= 0x20000 && c <= 0x3FFFF)) han++;
        else others += utf8proc_category(c) >= UTF8PROC_CATEGORY_LU && utf8proc_category(c) <= UTF8PROC_CATEGORY_LO;
    }
    return han > others;
}

static int knows(const text_prompt *p, int32_t language) { return language >= 0 && (size_t)language < p->languages; }

static wording_language language_for(const text_prompt *p, const text_asked *a) {
    const int chinese = p->chinese[a->target] || (knows(p, a->source) ? p->chinese[a->source] : is_chinese(a->text));
    return chinese ? CHINESE : ENGLISH;
}

/* The kind that a wording of the model is called, "structured:JSON"; KINDS: it is one's own. */
static kind kind_called(const char *wording) {
    const size_t n = strcspn(wording, ":");
    for (int k = DELIMITERS; k < KINDS; k++)
        if (strlen(kind_names[k]) == n && memcmp(kind_names[k], wording, n) == 0) return (kind)k;
    return KINDS;
}

static int given(const char *s) { return s && *s; }

/* The user's turn. */
static moe_status put_turn(const text_prompt *p, const text_wishes *w, const text_asked *a, const found_terms *terms,
                           moe_span context, text_bytes *out, moe_error *error) {
    wording_language language = language_for(p, a), of_terms = language;
    const kind own = given(w->wording) ? kind_called(w->wording) : KINDS;
    const kind wanted = a->strictly && p->wordings[DELIMITERS][ENGLISH].length ? DELIMITERS
                        : own != KINDS                                         ? own
                        : context.length                                       ? CONTEXT
                        : given(w->style)                                      ? STYLE
                                                                               : PLAIN;
    moe_span wording = given(w->wording) && own == KINDS && wanted != DELIMITERS ? span_of(w->wording)
                                                                                 : wording_of(p, wanted, &language);
    if (!wording.length) wording = wording_of(p, PLAIN, &language);
    const moe_span before = terms->n ? wording_of(p, TERMS, &of_terms) : (moe_span){ NULL, 0 };
    if (before.length && wanted == PLAIN && !given(w->wording)) wording = behind_terms(before), language = of_terms;
    while (context.length && context.data[context.length - 1] == '\n') context.length--;
    const char *format = given(w->wording) ? strchr(w->wording, ':') : NULL;
    values v = { .text = a->text,
                 .target = p->names[language][a->target],
                 .style = span_of(w->style),
                 .context = context,
                 .format = span_of(own == KINDS || !format ? "JSON" : format + 1),
                 .term = { "", 0 },
                 .translation = { "", 0 } };
    if (before.length) put_terms(before, terms, &v, out);
    put_wording(wording, &v, out);
    return out->failed ? text_out_of_memory(error) : MOE_OK;
}

static moe_status join_ids(const text_front *front, const text_prompt *p, const text_bytes *turn, text_ids *out,
                           moe_error *error) {
    text_ids ids = { 0 };
    moe_status status = text_encode(front, turn->data ? turn->data : "", turn->length, &ids, error);
    if (!status) status = text_ids_set(out, p->prefix.data, p->prefix.length, error);
    if (!status) status = text_ids_append(out, ids.data, ids.length, error);
    if (!status) status = text_ids_append(out, p->suffix.data, p->suffix.length, error);
    text_ids_free(&ids);
    return status;
}

moe_status text_prompt_ids(const text_front *front, const text_wishes *wishes, const text_asked *asked, size_t room,
                           text_ids *out, moe_error *error) {
    static const text_wishes none = { 0 };
    const text_prompt *p = front->prompt;
    found_terms terms;
    text_bytes turn = { 0 };
    moe_span context = asked->context;
    moe_status status = MOE_OK;
    if (!knows(p, asked->target))
        return text_fail(error, MOE_ERROR_ARGUMENT, "target", "no language to translate into");
    find_terms(asked, &terms);
    for (;;) {
        text_clear(&turn);
        status = put_turn(p, wishes ? wishes : &none, asked, &terms, context, &turn, error);
        if (!status) status = join_ids(front, p, &turn, out, error);
        if (status || out->length <= room || (!context.length && !terms.n)) break;
        const char *line = context.length ? memchr(context.data, '\n', context.length) : NULL;
        if (line) context.length -= (size_t)(line + 1 - context.data), context.data = line + 1;
        else if (context.length) context.length = 0;
        else terms.n--;
    }
    text_bytes_free(&turn);
    return status;
}

/* The tokens around a text, of the longest name. */
static moe_status measure(const text_front *front, text_prompt *p, moe_error *error) {
    text_ids ids = { 0 };
    moe_status status = MOE_OK;
    for (int l = 0; l < LANGUAGES && !status && p->names[l]; l++) {
        text_bytes turn = { 0 };
        size_t longest = 0;
        for (size_t i = 1; i < p->languages; i++)
            if (p->names[l][i].length > p->names[l][longest].length) longest = i;
        const values v = { .target = p->names[l][longest],
                           .text = { "", 0 },
                           .style = { "", 0 },
                           .context = { "", 0 },
                           .format = { "", 0 },
                           .term = { "", 0 },
                           .translation = { "", 0 } };
        put_wording(p->wordings[PLAIN][l], &v, &turn);
        status = turn.failed ? text_out_of_memory(error) : join_ids(front, p, &turn, &ids, error);
        if (ids.length > p->extra) p->extra = ids.length;
        text_bytes_free(&turn);
    }
    text_ids_free(&ids);
    return status;
}

moe_status text_prompt_check(const text_prompt *p, const text_wishes *w, moe_error *error) {
    const int style = given(w->style), own = given(w->wording);
    if (!style && !own && !w->context) return MOE_OK;
    const char *name = own ? "prompt" : style ? "style" : "context";
    if (!p)
        return text_fail(error, MOE_ERROR_UNSUPPORTED, name,
                         "%s is for models that are asked in words: the file of this one has no prompt", name);
    const kind called = own ? kind_called(w->wording) : style ? STYLE : CONTEXT;
    if (called != KINDS && !p->wordings[called][ENGLISH].length && !p->wordings[called][CHINESE].length)
        return text_fail(error, MOE_ERROR_UNSUPPORTED, name, "this model has no wording '%s'", kind_names[called]);
    if (style && w->context && !own)
        return text_fail(error, MOE_ERROR_ARGUMENT, "style",
                         "no wording has both style and context; prompt takes one of your own");
    if (called == KINDS && occurrences(span_of(w->wording), span_of(TEXT)) != 1)
        return text_fail(error, MOE_ERROR_ARGUMENT, "prompt",
                         "a wording needs %s once; or it is delimiters, structured", TEXT);
    return MOE_OK;
}

/* ---- 3. Looking ---------------------------------------------------------------------------------------- */

int text_prompt_speaks(const char *data, size_t length) {
    text_scan scan = text_scan_begin(data, length);
    size_t bytes;
    for (size_t at = 0; at < length; at += bytes) {
        utf8proc_int32_t c;
        if (text_span_next(&scan, at, &bytes) != TEXT_SPAN_NONE) continue;
        if (utf8proc_iterate((const utf8proc_uint8_t *)data + at, (utf8proc_ssize_t)(length - at), &c) < 1) continue;
        const utf8proc_category_t category = utf8proc_category(c);
        if (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) return 1;
    }
    return 0;
}

enum { MOST_LOOKED_AT = 256 }; /* spans of a text: one with more is no sentence */

moe_span text_prompt_lost(moe_span source, moe_span target) {
    text_scan scan = text_scan_begin(source.data, source.length);
    size_t bytes, looked = 0;
    for (size_t at = 0; at < source.length && looked < MOST_LOOKED_AT; at += bytes) {
        const text_span_kind found = text_span_next(&scan, at, &bytes);
        const moe_span span = { source.data + at, bytes };
        if (found == TEXT_SPAN_NONE || found == TEXT_SPAN_NUMBER || found == TEXT_SPAN_HYPHEN) continue;
        looked++;
        if (occurrences(target, span) < occurrences(source, span)) return span;
    }
    return (moe_span){ source.data, 0 };
}

typedef struct writing {
    size_t letters, characters;
    size_t kinds[6];
} writing;

enum { LATIN, CYRILLIC, ARABIC, HAN, KANA, OTHER };

/* A letter's writing; -1: it is no letter. */
static int writing_of(utf8proc_int32_t c) {
    const utf8proc_category_t category = utf8proc_category(c);
    if (category < UTF8PROC_CATEGORY_LU || category > UTF8PROC_CATEGORY_LO) return -1;
    if (c < 0x250 || (c >= 0x1E00 && c < 0x1F00)) return LATIN;
    if (c >= 0x400 && c < 0x530) return CYRILLIC;
    if ((c >= 0x600 && c < 0x780) || (c >= 0xFB50 && c < 0xFF00)) return ARABIC;
    if (c >= 0x3040 && c <= 0x30FF) return KANA;
    return (c >= 0x3400 && c <= 0x9FFF) || (c >= 0x20000 && c <= 0x3FFFF) ? HAN : OTHER;
}

static writing look(moe_span s) {
    writing w = { 0 };
    utf8proc_int32_t c;
    for (size_t at = 0; at < s.length;) {
        const utf8proc_ssize_t n =
            utf8proc_iterate((const utf8proc_uint8_t *)s.data + at, (utf8proc_ssize_t)(s.length - at), &c);
        at += n > 0 ? (size_t)n : 1;
        w.characters++;
        const int found = n > 0 ? writing_of(c) : -1;
        if (found >= 0) w.letters++, w.kinds[found]++;
    }
    return w;
}

/* The writings of a language, a bit each; those that are not listed are written in Latin letters, or not known: 0. */
static unsigned writings_of(moe_span code) {
    static const struct {
        const char *codes;
        unsigned bits;
    } rows[] = { { " en fr pt es tr it de vi ms id tl pl cs nl ", 1u << LATIN },
                 { " ru uk ", 1u << CYRILLIC },
                 { " kk mn ", 1u << CYRILLIC | 1u << OTHER },
                 { " ar fa ur ug ", 1u << ARABIC },
                 { " zh zh-Hant yue ", 1u << HAN },
                 { " ja ", 1u << HAN | 1u << KANA },
                 { " ko th hi km my gu te mr he bn ta bo ", 1u << OTHER } };
    char padded[32];
    snprintf(padded, sizeof padded, " %.*s ", (int)(code.length < 24 ? code.length : 24), code.data);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strstr(rows[i].codes, padded)) return rows[i].bits;
    return 0;
}

/* What a writing says in as many characters as Latin letters would take, about. */
static size_t weight(const writing *w) { return w->characters + 2 * (w->kinds[HAN] + w->kinds[KANA]); }

enum { FEW = 40, SOME = 8, TIMES = 4 };

const char *text_prompt_doubt(const text_front *front, int32_t language, moe_span source, moe_span target) {
    const writing from = look(source), to = look(target);
    if (!from.letters) return NULL;
    if (!to.characters) return "the translation is empty";
    if (weight(&to) > TIMES * weight(&from) + FEW) return "the translation is far longer than the text";
    if (TIMES * weight(&to) + FEW < weight(&from)) return "the translation is far shorter than the text";
    if (from.letters >= FEW && span_is(source, target)) return "the translation is the text itself";
    const unsigned wanted = language < 0 ? 0 : writings_of(moe_model_language(front->model, (size_t)language));
    size_t fits = 0;
    for (int k = LATIN; k <= OTHER; k++) fits += wanted >> k & 1 ? to.kinds[k] : 0;
    if (wanted && to.letters >= SOME && 3 * fits < to.letters)
        return "the translation is not written as its language is";
    return NULL;
}
