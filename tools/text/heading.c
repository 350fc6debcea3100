/* heading.c - see heading.h. */
#include "tools/text/heading.h"
#include "tools/text/spans.h"
#include "tools/text/text.h"

#include <string.h>
#include <utf8proc.h>

/* A code, then names of the language in English, German, French, Spanish and the language itself. */
static const char *const languages[] = {
    "en english englisch anglais inglés inglese",
    "de german deutsch allemand alemán tedesco",
    "fr french französisch français francés francese",
    "es spanish spanisch espagnol español castellano castilian",
    "it italian italienisch italien italiano",
    "pt portuguese portugiesisch portugais portugués português",
    "nl dutch niederländisch holländisch néerlandais neerlandés holandés nederlands",
    "pl polish polnisch polonais polaco polski",
    "cs czech tschechisch tchèque checo čeština česky",
    "sk slovak slowakisch slovaque eslovaco slovenčina",
    "hu hungarian ungarisch hongrois húngaro magyar",
    "ro romanian rumänisch roumain rumano română",
    "bg bulgarian bulgarisch bulgare búlgaro български",
    "el greek griechisch grec griego ελληνικά",
    "sv swedish schwedisch suédois sueco svenska",
    "da danish dänisch danois danés dansk",
    "no nb norwegian norwegisch norvégien noruego norsk",
    "fi finnish finnisch finnois finlandés suomi",
    "et estonian estnisch estonien estonio eesti",
    "lv latvian lettisch letton letón latviešu",
    "lt lithuanian litauisch lituanien lituano lietuvių",
    "ru russian russisch russe ruso русский",
    "uk ukrainian ukrainisch ukrainien ucraniano українська",
    "tr turkish türkisch turc turco türkçe",
    "ar arabic arabisch arabe árabe العربية",
    "he hebrew hebräisch hébreu hebreo עברית",
    "fa persian persisch persan persa فارسی",
    "hi hindi हिन्दी",
    "ja japanese japanisch japonais japonés 日本語",
    "zh chinese chinesisch chinois chino 中文 汉语 漢語",
    "ko korean koreanisch coréen coreano 한국어",
    "vi vietnamese vietnamesisch vietnamien vietnamita",
    "th thai thailändisch thaï tailandés",
    "id indonesian indonesisch indonésien indonesio",
    "ca catalan katalanisch catalán català",
};
enum { LANGUAGES = sizeof languages / sizeof *languages };

enum { SOURCE = 1, TARGET = 2 };
static const char source_words[] =
    "source src original from quelle quellsprache quelltext ausgangssprache ausgangstext "
    "origine origen fuente";
static const char target_words[] =
    "target tgt translation translations to ziel zielsprache zieltext übersetzung traduction "
    "cible traducción destino";
static const char other_words[] = "term terms word words text texts language lang begriff wort sprache terme mot texte "
                                  "langue término palabra texto idioma";

/* What a cell says about its column. `language` is an index in `languages`, or -1. */
typedef struct column {
    int known, side, language;
} column;

/* Convert a word to lower case; return its length, 0 if it is too long. */
static size_t folded(const char *word, size_t length, char out[64]) {
    size_t n = 0;
    for (size_t at = 0, bytes; at < length && n + 4 < 64; at += bytes) {
        const int32_t c = text_character(word, length, at, &bytes);
        n += (size_t)utf8proc_encode_char(utf8proc_tolower(c), (utf8proc_uint8_t *)out + n);
    }
    return n + 4 < 64 ? n : 0;
}

const char *text_language_named(const char *word, size_t length) {
    char lower[64];
    const size_t n = folded(word, length, lower);
    for (int i = 0; i < LANGUAGES && n; i++)
        if (text_is_listed(languages[i] + 3, lower, n)) return languages[i];
    return NULL;
}

static int is_letters(const char *word, size_t n, char first, char last) {
    for (size_t i = 0; i < n; i++)
        if (word[i] < first || word[i] > last) return 0;
    return 1;
}

static int language_of(const moe_model *model, const char *word, size_t n) {
    char code[4] = "";
    for (int i = 0; i < LANGUAGES; i++) {
        const size_t codes = languages[i][2] == ' ' ? 3 : 0; /* names follow the code */
        if (text_is_listed(languages[i] + codes, word, n)) return i;
    }
    if (n < 2 || n > 3 || !is_letters(word, n, 'a', 'z')) return -1;
    memcpy(code, word, n);
    if (model && moe_model_language_count(model) && !text_language_spelled(model, code, 0).data &&
        !text_language_spelled(model, code, 1).data)
        return -1;
    for (int i = 0; i < LANGUAGES; i++) {
        const char two[3] = { languages[i][0], languages[i][1], 0 }, *const one[] = { two };
        if (text_language_among(one, 1, code, 1) == 0) return i;
    }
    return -1;
}

static void add_word(const moe_model *model, const char *word, size_t length, column *c) {
    char lower[64];
    const size_t n = folded(word, length, lower);
    const int region = length == 2 && is_letters(word, length, 'A', 'Z') && c->language >= 0;
    const int language = region ? -1 : language_of(model, lower, n);
    if (text_is_listed(source_words, lower, n)) c->side |= SOURCE;
    else if (text_is_listed(target_words, lower, n)) c->side |= TARGET;
    else if (language >= 0 && c->language < 0) c->language = language;
    else if (!region && !text_is_listed(other_words, lower, n)) c->known = 0;
}

/* Read a cell. A region in brackets after a language is ignored: English (United Kingdom). */
static column column_of(const moe_model *model, moe_span cell) {
    column c = { cell.length > 0, 0, -1 };
    for (size_t at = 0, end; at < cell.length && c.known; at = end) {
        const char *sign = memchr(cell.data + at, '_', cell.length - at); /* belongs to words: en_US, source_text */
        end = text_word_end(cell.data, sign ? (size_t)(sign - cell.data) : cell.length, at);
        if (end > at) add_word(model, cell.data + at, end - at, &c);
        else if (cell.data[at] == '(' && c.language >= 0) end = cell.length;
        else end = text_utf8_next(cell.data, cell.length, at);
    }
    return c;
}

int text_is_heading(const moe_model *model, moe_span source, moe_span target) {
    const column a = column_of(model, source), b = column_of(model, target);
    if (!a.known || !b.known || a.side == TARGET || b.side == SOURCE) return 0;
    if (a.language >= 0 && b.language >= 0) return a.language != b.language;
    return b.language >= 0 || b.side == TARGET;
}
