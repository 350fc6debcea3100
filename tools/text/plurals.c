/* plurals.c - see plurals.h. */
#include "tools/text/plurals.h"
#include "tools/text/bytes.h"

#include <stdio.h>
#include <string.h>

/* The end of a word in the singular and in the plural. */
typedef struct ending {
    const char *one, *many;
} ending;

static const ending words[] = { { "y", "ies" },   { "f", "ves" },   { "fe", "ves" },  { "man", "men" },
                                { "is", "es" },   { "al", "aux" },  { "z", "ces" },   { "ión", "iones" },
                                { "ón", "ones" }, { "án", "anes" }, { "és", "eses" }, { NULL, NULL } };
/* Of words before the last word of a term, where the glossary accepts no endings. */
static const ending inner[] = { { "", "s" }, { "", "es" }, { NULL, NULL } };
/* Of German nouns, without the plural's ending: Ergebniss(e), Häus(er), Väter. */
static const ending nouns[] = { { "nis", "niss" }, { "in", "innen" }, { "um", "en" }, { "a", "en" }, { NULL, NULL } };
static const ending vowels[] = { { "a", "ä" }, { "o", "ö" }, { "u", "ü" }, { "A", "Ä" }, { "O", "Ö" }, { "U", "Ü" } };
/* Of German adjectives. */
static const char *const adjectives[] = { "er", "es", "en", "em", "e" };
enum { ADJECTIVES = sizeof adjectives / sizeof *adjectives, VOWELS = sizeof vowels / sizeof *vowels };

typedef struct list {
    const char *term;
    size_t length, n;
    char (*out)[TEXT_PLURAL_BYTES];
} list;

/* Add a plural: the term with `middle` in place of bytes [begin, end). */
static void add(list *l, size_t begin, size_t end, const char *middle) {
    char *out = l->out[l->n];
    if (l->n == TEXT_PLURALS) return;
    snprintf(out, TEXT_PLURAL_BYTES, "%.*s%s%.*s", (int)begin, l->term, middle, (int)(l->length - end), l->term + end);
    for (size_t i = 0; i < l->n; i++)
        if (strcmp(l->out[i], out) == 0) return;
    l->n++;
}

static void add_endings(list *l, const ending *table, size_t begin, size_t end) {
    for (; table->one; table++) {
        const size_t n = strlen(table->one);
        if (end - begin > n + 1 && text_ends_with(l->term + begin, end - begin, table->one))
            add(l, end - n, end, table->many);
    }
}

/* Add the noun with an umlaut in place of its last a, o or u; au becomes äu. */
static void add_umlaut(list *l, size_t begin) {
    for (size_t at = l->length; at-- > begin;)
        for (size_t v = 0; v < VOWELS; v++) {
            if (l->term[at] != *vowels[v].one) continue;
            if (at > begin && l->term[at] == 'u' && (l->term[at - 1] == 'a' || l->term[at - 1] == 'A'))
                at--, v = l->term[at] == 'a' ? 0 : 3;
            else if (at > begin && l->term[at] == 'u' && l->term[at - 1] == 'e') return;
            add(l, at, at + 1, vowels[v].many);
            return;
        }
}

static int is_small(char c) { return c >= 'a' && c <= 'z'; }
static int is_capital(char c) { return c >= 'A' && c <= 'Z'; }

/* Add the forms of the first word as an adjective before a noun, each also with the noun's umlaut. */
static void add_adjective(list *l, size_t end) {
    for (size_t i = 0; i < ADJECTIVES; i++) {
        const size_t n = strlen(adjectives[i]);
        if (end < n + 3 || !text_ends_with(l->term, end, adjectives[i])) continue;
        for (size_t k = 0; k < ADJECTIVES; k++)
            if (k != i) add(l, end - n, end, adjectives[k]);
        return;
    }
}

size_t text_plurals(const char *term, size_t length, char out[TEXT_PLURALS][TEXT_PLURAL_BYTES]) {
    list l = { term, length, 0, out };
    size_t first = 0, last = length;
    while (first < length && term[first] != ' ') first++;
    while (last && term[last - 1] != ' ') last--;
    if (length - last < 3) return 0;
    add_endings(&l, words, last, length);
    if (is_capital(term[last]) && is_small(term[last + 1])) add_endings(&l, nouns, last, length), add_umlaut(&l, last);
    if (first == length || first < 3) return l.n;
    add_endings(&l, words, 0, first);
    add_endings(&l, inner, 0, first);
    if (is_small(term[0]) && is_capital(term[last])) add_adjective(&l, first);
    return l.n;
}
