/* words.c - naive Bayes over words. The probability of a listed word is its frequency. The probability of any other
 * word is the product of the probabilities of its characters, each given up to three preceding characters, as learned
 * from the list (Witten-Bell smoothing). */
#include "tools/text/words.h"
#include "tools/text/bytes.h"
#include "tools/text/text.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* ORDER: characters per n-gram. LONGEST: characters per word; longer words are truncated. */
enum { ORDER = 4, LONGEST = 40 };

/* Tuned on sentences that are not in tests/bench/detect_short.py. */
static const double unseen = 1.0 / 200; /* probability of a character without statistics */
static const double foreign = 1.0 / 25; /* probability of a character in an unknown language */
static const double borrowed = 0.2;     /* weight of the mean over all languages for unlisted words */
static const double least_rest = 0.02;  /* minimum share of unlisted words */

static const struct {
    char language[3];
    unsigned char rarity; /* -10 log10 of the frequency */
    const char *words;
} lists[] = {
#include "tools/text/words.inc"
};

static const char *const common[] = {
#include "tools/text/common.inc"
};

enum { N_LISTS = sizeof lists / sizeof *lists, N_COMMON = sizeof common / sizeof *common };

/* Statistics of a word or a character sequence in one language. */
typedef union {
    float frequency; /* frequency of a word */
    struct {
        uint16_t count;        /* number of occurrences of the sequence */
        uint16_t total, types; /* count of following characters; count of distinct following characters */
    } seen;
} known;

typedef struct {
    size_t offset, length; /* position of the key in `keys` */
} key;

struct text_words {
    size_t n;     /* number of languages */
    double *rest; /* [n] share of unlisted words */
    double *sums; /* [3 * n + 1] log-probabilities of the current text, and scratch memory */
    double sum;   /* logarithm of the sum of probabilities */
    text_index index;
    text_bytes keys;
    key *entries;
    known *values;                                /* [n] values of each entry */
    size_t count, entry_capacity, value_capacity; /* entries */
};

/* A word as "= word ", with a space at either end and a mark that distinguishes words from other keys. */
typedef struct {
    char bytes[4 * LONGEST + 4];
    size_t at[LONGEST + 3], n; /* offsets of `n` characters, and of their end */
} spelling;

static void spell(spelling *word, utf8proc_int32_t c) {
    const size_t at = word->at[word->n++];
    word->at[word->n] = at + (size_t)utf8proc_encode_char(c, (utf8proc_uint8_t *)word->bytes + at);
}

/* Read the next run of letters in lower case; return 0 at the end of the text. */
static int next_word(const char **text, const char *end, spelling *word) {
    *word = (spelling){ .bytes = "=", .at = { 1 } };
    spell(word, ' ');
    while (*text < end && word->n <= LONGEST) {
        utf8proc_int32_t c;
        const utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)*text, end - *text, &c);
        const utf8proc_category_t category = n > 0 ? utf8proc_category(c) : UTF8PROC_CATEGORY_CN;
        const int letter = category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_MC;
        if (!letter && word->n > 1) break;
        *text += n > 0 ? n : 1;
        if (letter) spell(word, utf8proc_tolower(c));
    }
    spell(word, ' ');
    return word->n > 2;
}

/* ---- Statistics ------- */

static known *find(const text_words *words, const char *bytes, size_t length) {
    const uint32_t hash = text_hash(bytes, length);
    uint32_t entry;
    for (size_t at = 0; (entry = text_index_next(&words->index, hash, &at)) != TEXT_NONE;) {
        const key *k = &words->entries[entry];
        if (k->length == length && memcmp(words->keys.data + k->offset, bytes, length) == 0)
            return words->values + entry * words->n;
    }
    return NULL;
}

/* Find an entry, or add it if missing. Return NULL if out of memory. Invalidates earlier pointers. */
static known *find_or_add(text_words *words, const char *bytes, size_t length) {
    known *found = find(words, bytes, length);
    if (found) return found;
    const size_t n = words->count + 1, size = words->n * sizeof *found;
    if (text_reserve(&words->entries, &words->entry_capacity, n, sizeof *words->entries, NULL)) return NULL;
    if (text_reserve(&words->values, &words->value_capacity, n, size, NULL)) return NULL;
    words->entries[words->count] = (key){ words->keys.length, length };
    text_append(&words->keys, bytes, length);
    if (words->keys.failed || !text_index_add(&words->index, text_hash(bytes, length), words->count)) return NULL;
    found = words->values + words->count++ * words->n;
    memset(found, 0, size);
    return found;
}

static int learn(text_words *words, size_t language, const spelling *word, float frequency) {
    known *whole = find_or_add(words, word->bytes, word->at[word->n]);
    if (!whole) return 0;
    whole[language].frequency += frequency;
    for (size_t i = 1; i < word->n; i++)
        for (size_t before = 0; before < ORDER && before <= i; before++) {
            const char *first = word->bytes + word->at[i - before];
            const size_t behind = word->at[i] - word->at[i - before];
            known *these = find_or_add(words, first, word->at[i + 1] - word->at[i - before]);
            const int is_new = these && ++these[language].seen.count == 1;
            known *context = these ? find_or_add(words, first, behind) : NULL;
            if (!context) return 0;
            context[language].seen.total++;
            if (is_new) context[language].seen.types++;
        }
    return 1;
}

static int learn_list(text_words *words, size_t language, size_t list) {
    const float frequency = (float)pow(10, -0.1 * lists[list].rarity);
    const char *at = lists[list].words, *end = at + strlen(at);
    spelling word;
    while (next_word(&at, end, &word)) {
        if (!learn(words, language, &word, frequency)) return 0;
        words->rest[language] -= (double)frequency;
    }
    return 1;
}

const char *text_words_known(const char *language) {
    for (size_t i = 0; i < N_LISTS; i++)
        if (strcmp(lists[i].language, language) == 0) return lists[i].language;
    return NULL;
}

text_words *text_words_open(const char *const *languages, size_t n) {
    text_words *words = calloc(1, sizeof *words);
    if (words) {
        words->n = n;
        words->rest = calloc(n + 1, sizeof *words->rest);
        words->sums = calloc(3 * n + 1, sizeof *words->sums);
    }
    int fine = words && words->rest && words->sums;
    for (size_t l = 0; fine && l < n; l++) {
        words->rest[l] = 1;
        for (size_t i = 0; fine && i < N_LISTS; i++)
            if (strcmp(lists[i].language, languages[l]) == 0) fine = learn_list(words, l, i);
        if (words->rest[l] < least_rest) words->rest[l] = least_rest;
    }
    if (fine) return words;
    text_words_close(words);
    return NULL;
}

void text_words_close(text_words *words) {
    if (!words) return;
    text_index_free(&words->index);
    text_bytes_free(&words->keys);
    free(words->entries), free(words->values), free(words->rest), free(words->sums);
    free(words);
}

/* ---- Detection ---- */

/* Set of[n] to the probability of a character after its predecessors in each language, with back-off to shorter
 * contexts. */
static void character(const text_words *words, const spelling *word, size_t i, double *of) {
    for (size_t l = 0; l < words->n; l++) of[l] = unseen;
    for (size_t before = 0; before < ORDER && before <= i; before++) {
        const char *first = word->bytes + word->at[i - before];
        const known *context = find(words, first, word->at[i] - word->at[i - before]);
        if (!context) return;
        const known *these = find(words, first, word->at[i + 1] - word->at[i - before]);
        for (size_t l = 0; l < words->n; l++) {
            const double count = these ? these[l].seen.count : 0, types = context[l].seen.types;
            if (types > 0) of[l] = (count + types * of[l]) / (context[l].seen.total + types);
        }
    }
}

/* Add a word's log-probability to sums[n + 1], whose last element is for an unknown language. `spelled` and `of` are
 * scratch memory. */
static void add_word(const text_words *words, const spelling *word, double *sums, double *spelled, double *of) {
    double mean = 0;
    for (size_t l = 0; l < words->n; l++) spelled[l] = 1;
    for (size_t i = 1; i < word->n; i++) {
        character(words, word, i, of);
        for (size_t l = 0; l < words->n; l++) spelled[l] *= of[l];
    }
    for (size_t l = 0; l < words->n; l++) mean += spelled[l] / (double)words->n;
    const known *whole = find(words, word->bytes, word->at[word->n]);
    for (size_t l = 0; l < words->n; l++) {
        const double listed = whole ? (double)whole[l].frequency : 0;
        sums[l] += log(listed + words->rest[l] * ((1 - borrowed) * spelled[l] + borrowed * mean));
    }
    sums[words->n] += (double)(word->n - 1) * log(foreign);
}

ptrdiff_t text_words_detect(text_words *words, const char *text, size_t length, float *confidence) {
    const char *end = text + length;
    const size_t n = words->n;
    double *sums = memset(words->sums, 0, (n + 1) * sizeof *sums);
    size_t best = 0, seen = 0;
    spelling word;
    *confidence = 0;
    for (; next_word(&text, end, &word); seen++) add_word(words, &word, sums, sums + n + 1, sums + 2 * n + 1);
    for (size_t l = 1; l < n && seen; l++)
        if (sums[l] > sums[best]) best = l;
    double all = 0;
    for (size_t l = 0; l <= n && seen; l++) all += exp(sums[l] - sums[best]);
    if (seen) *confidence = (float)(1 / all);
    words->sum = sums[best] + log(all);
    return seen && n ? (ptrdiff_t)best : -1;
}

float text_words_confidence(const text_words *words, size_t language) {
    return (float)exp(words->sums[language] - words->sum);
}

/* ---- Words that are language ---- */

static int compare(const void *word, const void *listed) { return strcmp(word, *(const char *const *)listed); }

int text_word_is_common(const char *word, size_t length) {
    utf8proc_int32_t letters[LONGEST];
    char small[4 * LONGEST + 1];
    const size_t count = text_composed(word, length, letters, LONGEST);
    size_t n = 0;
    if (!count) return 0;
    for (size_t i = 0; i < count; i++) {
        if (letters[i] == 0xDF) small[n++] = 's', small[n++] = 's'; /* as spelled in the list */
        else n += (size_t)utf8proc_encode_char(utf8proc_tolower(letters[i]), (utf8proc_uint8_t *)small + n);
    }
    small[n] = 0;
    return bsearch(small, common, N_COMMON, sizeof *common, compare) != NULL;
}

/* ---- Titles ---- */

/* COMMON: a bit for a word that is as frequent in a language as "new" or "sea" in English. */
enum { TITLE = 100 /* maximum bytes of a title */, RARITY = 33, COMMON = 1 << 7 };

/* Return 1 if a list contains a word, given as `spaced`, a space and the word. strstr searches these long lists
 * faster than text_is_listed. */
static int is_in(const char *list, const char *spaced, size_t length) {
    if (strncmp(list, spaced + 1, length) == 0 && (!list[length] || list[length] == ' ')) return 1;
    while ((list = strstr(list, spaced)) && list[length + 1] && list[length + 1] != ' ') list++;
    return list != NULL;
}

/* Return a bit set of the languages whose lists contain a word, and COMMON. The first bit is German. */
static unsigned languages_of(const char *word, size_t length) {
    static const char order[] = "de en es fr it nl pt";
    char spaced[LONGEST + 2] = " ";
    unsigned found = 0;
    if (length > LONGEST) return 0;
    memcpy(spaced + 1, word, length), spaced[length + 1] = '\0';
    text_lower_first(spaced + 1, length);
    for (size_t i = 0; i < N_LISTS; i++)
        if (is_in(lists[i].words, spaced, length))
            found |= 1u << (strstr(order, lists[i].language) - order) / 3 | (lists[i].rarity <= RARITY ? COMMON : 0);
    return found;
}

/* Find the next word of a text at or after *at. Return 0 at the end, 1 for a word without capitals, 2 for a capitalised
 * word, 3 for other words such as NATO and X1. */
static int title_word(const char *text, size_t length, size_t *at, size_t *begin) {
    size_t bytes;
    while (*at < length && !text_is_letter(text_character(text, length, *at, &bytes))) *at += bytes;
    *begin = *at;
    size_t letters = 0, small = 0, capital = 0;
    for (; *at < length; *at += bytes, letters++) {
        const int32_t c = text_character(text, length, *at, &bytes);
        const utf8proc_category_t category = utf8proc_category(c);
        if (!text_is_letter(c) && !strchr("-'0123456789", c < 0x80 && c ? (int)c : ' ')) break;
        small += category == UTF8PROC_CATEGORY_LL;
        capital += !letters && category == UTF8PROC_CATEGORY_LU;
    }
    return !letters ? 0 : !capital ? 1 : small + 1 == letters ? 2 : 3;
}

/* Return 1 for a word that is not a name: short and common, or in the lists of few languages but not German. Names are
 * in the lists of many languages. */
static int is_no_name(unsigned languages, size_t length) {
    size_t n = 0;
    for (unsigned l = languages & (COMMON - 1); l; l >>= 1) n += l & 1;
    return length <= 3 ? n == 1 || languages & COMMON : n && n <= 2 && !(languages & 1);
}

int text_is_title(const char *text, size_t length) {
    size_t words = 0, capitals = 0, plain = 0, frequent = 0;
    if (length > TITLE) return 0;
    for (size_t at = 0, begin, kind; (kind = (size_t)title_word(text, length, &at, &begin)); words++) {
        if (kind == 1 && at - begin > 3) return 0;
        if (kind != 2 || !words) continue;
        const unsigned languages = languages_of(text + begin, at - begin);
        if ((languages & (COMMON - 1)) == 1) return 0;
        capitals++;
        if (!is_no_name(languages, at - begin)) continue;
        plain++, frequent += (languages & COMMON) > 0;
    }
    return words >= 3 && frequent && 2 * plain >= capitals;
}

void text_lower_title(char *text, size_t length) {
    int name = 0; /* 1 after the first name of a person */
    for (size_t at = 0, begin, words = 0, kind; (kind = (size_t)title_word(text, length, &at, &begin)); words++) {
        const size_t bytes = at - begin;
        const unsigned languages = kind == 2 ? languages_of(text + begin, bytes) : 0;
        if (words && !name && is_no_name(languages, bytes)) text_lower_first(text + begin, bytes);
        name = words && kind == 2 && !languages;
    }
}
