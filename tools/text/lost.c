/* lost.c - see lost.h. */
#include "tools/text/lost.h"
#include "tools/text/quotes.h"
#include "tools/text/sentences.h"
#include "tools/text/spans.h"
#include "tools/text/text.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* ---- 1. Loops ------------------------------------------------------------------------------------------ */

/* WIDEST: maximum bytes of a repeated unit. FEWEST, SHORTEST: minimum repetitions and bytes of a loop. INSIDE: minimum
 * repetitions inside a word. LIST: minimum items of a list. */
enum { WIDEST = 128, FEWEST = 5, INSIDE = 4, SHORTEST = 16, LIST = 4 };

/* Maximum number of consecutive occurrences of any unit, and of units inside a word; 1 if nothing repeats. */
typedef struct repeats {
    size_t any, inside;
} repeats;

static int is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (unsigned char)c >= 0x80; }
static size_t greater(size_t a, size_t b) { return a > b ? a : b; }

/* Count repetitions in runs of at least `least` bytes. Numbers below `fewest` may be too small. */
static repeats repeats_of(moe_span text, size_t least, size_t fewest) {
    repeats most = { 1, 1 };
    for (size_t unit = 1; unit <= WIDEST && fewest * unit <= text.length; unit++) {
        size_t run = 0, longest = 0, inside = 0, word = 0; /* `word` is the length of the current word */
        for (size_t i = 0; i < text.length; i++) {
            word = text.data[i] == ' ' ? 0 : word + 1;
            if (i < unit) continue;
            run = text.data[i] == text.data[i - unit] ? run + 1 : 0;
            const size_t whole = run ? run + unit : 0;
            longest = greater(longest, whole);
            if (is_letter(text.data[i])) inside = greater(inside, whole < word ? whole : word * (run > 0));
        }
        if (longest >= least) most.any = greater(most.any, (longest + (unit > 2)) / unit); /* the last has no space */
        if (inside >= least) most.inside = greater(most.inside, inside / unit);
    }
    return most;
}

static int is_more(size_t written, size_t read) { return written > read + read / 2 + 2; }

/* Return 1 if a text may have no spaces: it contains characters of three or more bytes other than punctuation. */
static int is_unspaced(moe_span text) {
    for (size_t i = 0; i < text.length; i++)
        if ((unsigned char)text.data[i] > 0xE2) return 1;
    return 0;
}

int text_loops(moe_span source, moe_span target) {
    if (target.length < SHORTEST) return 0;
    const repeats written = repeats_of(target, SHORTEST, INSIDE);
    if (written.any < FEWEST && written.inside < INSIDE) return 0;
    const repeats read = repeats_of(source, 0, 2);
    if (written.any >= FEWEST && is_more(written.any, read.any)) return 1;
    if (written.inside >= INSIDE && written.inside > read.inside + greater(1, read.inside / 2) && !is_unspaced(target))
        return 1;
    return read.any >= FEWEST && target.length > 2 * source.length + SHORTEST;
}

/* ---- 2. Names ------------------------------------------------------------------------------------------ */

/* Return the next word at or after *at, or an empty one at the end. *commas is the number of commas after the word. */
static moe_span next_word(moe_span text, size_t *at, size_t *commas) {
    static const char signs[] = " \t,;.";
    while (*at < text.length && strchr(signs, text.data[*at])) (*at)++;
    const size_t begin = *at;
    while (*at < text.length && !strchr(signs, text.data[*at])) (*at)++;
    const size_t end = *at;
    for (*commas = 0; *at < text.length && strchr(signs, text.data[*at]); (*at)++)
        *commas += text.data[*at] == ',' || text.data[*at] == ';';
    return (moe_span){ text.data + begin, end - begin };
}

static int is_capital(moe_span word) {
    utf8proc_int32_t c;
    return utf8proc_iterate((const utf8proc_uint8_t *)word.data, (utf8proc_ssize_t)word.length, &c) > 0 &&
           utf8proc_category(c) == UTF8PROC_CATEGORY_LU;
}

static int compare(const void *a, const void *b) {
    const moe_span *x = a, *y = b;
    const int order = memcmp(x->data, y->data, x->length < y->length ? x->length : y->length);
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

/* Return the *n words of a text, malloc'ed; NULL if out of memory. Count the commas before the last word. */
static moe_span *words_of(moe_span text, size_t *n, size_t *commas) {
    moe_span *words = malloc((text.length / 2 + 1) * sizeof *words);
    *n = *commas = 0;
    for (size_t at = 0, behind; words;) {
        const moe_span word = next_word(text, &at, &behind);
        if (!word.length) break;
        words[(*n)++] = word;
        if (at < text.length) *commas += behind;
    }
    return words;
}

/* Return 1 if a text is a list. The check ends at the first word without a capital. */
static int is_list(moe_span text) {
    size_t n = 0, items = 1, behind;
    for (size_t at = 0; at < text.length;) {
        const moe_span word = next_word(text, &at, &behind);
        if (!word.length) break;
        if (!is_capital(word)) return 0;
        n++;
        if (at < text.length) items += behind;
    }
    return n == 1 || (items >= 2 && n <= 3 * items);
}

text_names text_names_kept(moe_span source, moe_span target) {
    size_t n_source, n_target, source_commas, target_commas, kept = 0;
    if (!is_list(source)) return TEXT_NO_NAMES;
    moe_span *wanted = words_of(source, &n_source, &source_commas);
    moe_span *there = words_of(target, &n_target, &target_commas);
    text_names answer = TEXT_NAMES_MEMORY;
    if (wanted && there) {
        qsort(there, n_target, sizeof *there, compare);
        for (size_t i = 0; i < n_source; i++)
            kept += bsearch(&wanted[i], there, n_target, sizeof *there, compare) != NULL;
        answer = kept == n_source                                              ? TEXT_NAMES
                 : 2 * kept >= n_source && n_source >= LIST                    ? TEXT_NAMES_LOST
                 : source_commas + 1 >= LIST && source_commas != target_commas ? TEXT_NAMES_COUNT
                                                                               : TEXT_NO_NAMES;
    }
    free(wanted);
    free(there);
    return answer;
}

/* ---- 3. Signs ------------------------------------------------------------------------------------------ */

static size_t signs_of(moe_span text) {
    size_t n = 0, bytes;
    text_scan scan = text_scan_begin(text.data, text.length);
    for (size_t at = 0; (at = text_sign(&scan, at, &bytes)) < text.length; at += bytes) n++;
    return n;
}

int text_signs_kept(moe_span source, moe_span target) {
    const size_t wanted = signs_of(source);
    if (!wanted) return 1;
    size_t n = signs_of(target);
    for (size_t i = 1; i + 1 < target.length; i++)
        n += target.data[i] == '/' && target.data[i - 1] != ' ' && target.data[i + 1] != ' ';
    return n >= wanted;
}

int text_joints_kept(moe_span target, const size_t joints[2]) {
    size_t dashes = 0, slashes = 0;
    for (size_t at = 0; at < target.length && (dashes < joints[0] || slashes < joints[1]); at++) {
        slashes += target.data[at] == '/';
        dashes += text_prefix("\xE2\x80\x93 \xE2\x80\x94 \xE2\x80\x95", target.data + at, target.length - at) > 0 ||
                  text_begins_with(target.data + at, target.length - at, "--") ||
                  text_begins_with(target.data + at, target.length - at, " - ");
    }
    return dashes >= joints[0] && slashes >= joints[1];
}

enum { LETTERS = 4 /* minimum letters of a word that a translation cannot leave out */ };

/* Return 1 if a text has a word of at least `least` letters outside spans. */
static int has_word(moe_span text, size_t least) {
    text_scan scan = text_scan_begin(text.data, text.length);
    for (size_t at = 0, letters = 0, bytes; at < text.length; at += bytes) {
        size_t unused;
        const int outside = text_span_next(&scan, at, &bytes) == TEXT_SPAN_NONE;
        letters = outside && text_is_letter(text_character(text.data, text.length, at, &unused)) ? letters + 1 : 0;
        if (letters >= least) return 1;
    }
    return 0;
}

int text_words_kept(moe_span source, moe_span target) {
    return !target.length || has_word(target, 1) || !has_word(source, LETTERS);
}

/* ---- 4. Brackets, quotation marks and signs ------------------------------------------------------------ */

enum { BRACKETS = 3 };

static const char *const opening[BRACKETS] = { "( \xEF\xBC\x88", "[ \xEF\xBC\xBB \xE3\x80\x90", "{ \xEF\xBD\x9B" },
                         *const closing[BRACKETS] = { ") \xEF\xBC\x89", "] \xEF\xBC\xBD \xE3\x80\x91",
                                                      "} \xEF\xBD\x9D" };

typedef struct brackets {
    size_t opened, closed, unpaired; /* `unpaired` counts both kinds */
    size_t tight;                    /* brackets that adjoin a word on their outer side */
} brackets;

static size_t brackets_of(moe_span text, brackets all[BRACKETS]) {
    size_t open[BRACKETS] = { 0 }, n_quotes = 0;
    for (size_t at = 0, bytes; at < text.length; at++) {
        if ((unsigned char)text.data[at] < 0x80 && !strchr("()[]{}\"", text.data[at])) continue;
        n_quotes += text_quote(text.data + at, text.length - at) > 0;
        for (size_t i = 0; i < BRACKETS; i++) {
            brackets *b = &all[i];
            if (text_prefix(opening[i], text.data + at, text.length - at)) {
                b->opened++, open[i]++;
                b->tight += (size_t)text_is_wordlike_before(text.data, text.length, at);
            } else if ((bytes = text_prefix(closing[i], text.data + at, text.length - at))) {
                b->closed++, b->unpaired += !open[i];
                open[i] -= open[i] > 0;
                b->tight += (size_t)text_is_wordlike(text.data, text.length, at + bytes);
            }
        }
    }
    for (size_t i = 0; i < BRACKETS; i++) all[i].unpaired += open[i];
    return n_quotes;
}

/* Count single quotation marks that are not apostrophes inside words. */
static size_t single_quotes_of(moe_span text, size_t *begins) {
    size_t n = 0, bytes;
    *begins = 0;
    for (size_t at = 0; at < text.length; at++) {
        bytes = text_prefix("\xE2\x80\x98 \xE2\x80\x99 \xE2\x80\x9A \xE2\x80\xB9 \xE2\x80\xBA", text.data + at,
                            text.length - at);
        if (!bytes) continue;
        const int after = text_is_wordlike(text.data, text.length, at + bytes);
        if (text_is_wordlike_before(text.data, text.length, at) && after) continue;
        n++, *begins += (size_t)after;
    }
    return n;
}

int text_brackets_kept(moe_span source, moe_span target) {
    size_t begins, unused;
    if (single_quotes_of(source, &begins) % 2 == 0 && begins && single_quotes_of(target, &unused) % 2) return 0;
    brackets read[BRACKETS] = { { 0 } }, written[BRACKETS] = { { 0 } };
    const size_t n = brackets_of(source, read), m = brackets_of(target, written);
    for (size_t i = 0; i < BRACKETS; i++)
        if (written[i].unpaired != read[i].unpaired || written[i].opened > read[i].opened ||
            written[i].closed > read[i].closed || written[i].opened + read[i].tight < read[i].opened ||
            written[i].closed + read[i].tight < read[i].closed)
            return 0;
    return n % 2 == m % 2;
}

int text_signs_added(moe_span source, moe_span target) {
    static const char signs[] = "*_^|\\@~<>$#"; /* $ and # may translate words */
    size_t read[sizeof signs] = { 0 }, written[sizeof signs] = { 0 };
    const char *sign;
    for (size_t i = 0; i < source.length; i++)
        if (source.data[i] && (sign = strchr(signs, source.data[i]))) read[sign - signs]++;
    for (size_t i = 0; i < target.length; i++)
        if (target.data[i] && (sign = strchr(signs, target.data[i]))) written[sign - signs]++;
    for (size_t i = 0; signs[i]; i++)
        if (written[i] > read[i] && (read[i] || !strchr("$#", signs[i]))) return 1;
    return 0;
}

/* ---- 5. Numbers ---------------------------------------------------------------------------------------- */

/* A number: a run of digits without leading zeros, or groups of three digits such as 10,000. */
typedef struct figure {
    uint64_t value;
    int loose;    /* 1 if a translation may spell it or leave it out: 3rd, 1990s, 00 in 6:00 */
    int joined;   /* 1 if a number and a sign precede it (3 in 1:3), or letters follow it (198 in 198Y) */
    int compound; /* 1 if a hyphen and a word follow it (2-clause) */
} figure;

/* LEFT: maximum number of different numbers that may have another form. LARGE: numbers from here on that a source has
 * neither in digits nor in words were not in it. */
enum { LEFT = 32, LARGE = 100 };

int text_digit(moe_span s, size_t at, size_t *bytes) {
    static const int32_t zeros[] = { 0x660, 0x6F0, 0x966, 0x9E6,  0xA66,  0xAE6,  0xBE6, 0xC66,
                                     0xE50, 0xED0, 0xF20, 0x1040, 0x17E0, 0x1810, 0xFF10 };
    const unsigned char first = (unsigned char)s.data[at];
    *bytes = 1;
    if (first < 0x80) return first >= '0' && first <= '9' ? first - '0' : -1;
    const int32_t c = text_character(s.data, s.length, at, bytes);
    for (size_t i = 0; i < sizeof zeros / sizeof *zeros; i++)
        if (c >= zeros[i] && c < zeros[i] + 10) return (int)(c - zeros[i]);
    return -1;
}

/* Append the digits starting at *at to a value. Return their number. */
static size_t read_digits(moe_span s, size_t *at, uint64_t *value) {
    size_t n = 0, bytes;
    for (int digit; *at < s.length && (digit = text_digit(s, *at, &bytes)) >= 0; *at += bytes, n++)
        *value = 10 * *value + (uint64_t)digit;
    return n;
}

/* Read the number starting at *at, with its groups of three digits if `grouped` is 1. */
static uint64_t read_number(moe_span s, size_t *at, int grouped) {
    static const char separators[] = ", . ' \xC2\xA0 \xE2\x80\xAF \xE2\x80\x89 \xE2\x80\x99 \xD9\xAC";
    uint64_t value = 0;
    for (size_t n = read_digits(s, at, &value); grouped && n <= 3;) {
        size_t sign = text_prefix(separators, s.data + *at, s.length - *at);
        if (!sign && *at < s.length) sign = s.data[*at] == ' ';
        size_t end = *at + sign;
        uint64_t more = value;
        if (!sign || read_digits(s, &end, &more) != 3) break;
        *at = end, value = more;
    }
    return value;
}

/* Return 1 if the number at [begin, end) is an ordinal, a decade, or the minutes of a full hour. */
static int is_loose(moe_span s, size_t begin, size_t end, uint64_t value) {
    static const char endings[] = "st nd rd th s er ers \xC3\xA8re re nd nde e es \xC3\xA8me eme o a os as "
                                  "te ten ter tes tem ste sten ster stes stem",
                      signs[] = "\xC2\xBA \xC2\xAA";
    const size_t letters = text_word_end(s.data, s.length, end) - end;
    if (letters) return text_is_listed(endings, s.data + end, letters);
    if (text_prefix(signs, s.data + end, s.length - end)) return 1;
    return !value && begin && strchr(":.,hH", s.data[begin - 1]);
}

/* Return 1 if a digit and one of :.,/ precede the number at `begin`. */
static int is_joined(moe_span s, size_t begin) {
    return begin > 1 && strchr(":.,/", s.data[begin - 1]) && s.data[begin - 2] >= '0' && s.data[begin - 2] <= '9';
}

static int compare_figures(const void *a, const void *b) {
    const figure *x = a, *y = b;
    return x->value != y->value ? (x->value > y->value) - (x->value < y->value) : x->loose - y->loose;
}

/* Return the *n numbers of a text, malloc'ed and sorted; NULL if out of memory. */
static figure *figures_of(moe_span s, int grouped, size_t *n) {
    figure *all = NULL;
    size_t capacity = 0;
    *n = 0;
    if (text_reserve(&all, &capacity, 1, sizeof *all, NULL)) return NULL;
    for (size_t at = 0, bytes; at < s.length;) {
        if (text_digit(s, at, &bytes) < 0) {
            at += bytes;
            continue;
        }
        const size_t begin = at;
        figure f = { .value = read_number(s, &at, grouped) };
        f.loose = is_loose(s, begin, at, f.value);
        f.joined = f.value && (is_joined(s, begin) || (!f.loose && text_is_wordlike(s.data, s.length, at)));
        f.compound = at < s.length && s.data[at] == '-' && text_is_wordlike(s.data, s.length, at + 1);
        if (text_add(&all, n, &capacity, &f, 1, sizeof f, NULL)) return free(all), NULL;
    }
    qsort(all, *n, sizeof *all, compare_figures);
    return all;
}

/* Return 1 if a translation may write number b for a: an hour after noon, or a decade. */
static int may_become(const figure *a, uint64_t b) {
    if (a->value <= 12) return b == a->value + 12 || (a->value == 12 && !b);
    return a->loose && (a->value % 100 == b || b % 100 == a->value);
}

/* Return 1 if a text has a word for a number, which a translation may write in digits. */
static int has_number_word(moe_span s) {
    static const char words[] =
        "one two three four five six seven eight nine ten eleven twelve twenty thirty fifty hundred half quarter once "
        "twice noon midnight eins zwei drei vier f\xC3\xBC"
        "nf sechs sieben acht neun zehn elf zw\xC3\xB6lf zwanzig hundert halb "
        "mittag mitternacht deux trois quatre cinq sept huit neuf dix onze douze vingt cent demi midi minuit dos tres "
        "cuatro cinco seis siete ocho nueve diez once doce veinte cien medio dois quatro oito nove dez due tre quattro "
        "cinque sei sette otto nove dieci twee drie vijf zes zeven negen tien thousand thousands hundreds tausend "
        "mille mil mila million millions millionen billion dozen dutzend";
    for (size_t at = 0, end; at < s.length; at = end) {
        char word[16];
        end = text_word_end(s.data, s.length, at);
        if (end > at && end - at < sizeof word) {
            memcpy(word, s.data + at, end - at);
            text_lower_first(word, end - at);
            if (text_is_listed(words, word, end - at)) return 1;
        }
        if (end == at) end = text_utf8_next(s.data, s.length, at);
    }
    return 0;
}

static int has_digits_of(uint64_t value, unsigned digits) {
    do
        if (!(digits >> value % 10 & 1)) return 0;
    while (value /= 10);
    return 1;
}

static text_figures compare_all(moe_span source, const figure *read, size_t n, const figure *written, size_t m,
                                unsigned digits) {
    const figure *missing[LEFT], *added[LEFT];
    size_t n_missing = 0, n_added = 0, lost = 0;
    int joined = 0, compounds = 0;
    for (size_t i = 0, j = 0; i < n || j < m;) {
        int order = i == n ? 1 : -1;
        if (i < n && j < m) order = (read[i].value > written[j].value) - (read[i].value < written[j].value);
        if ((order < 0 && n_missing == LEFT) || (order > 0 && n_added == LEFT)) return TEXT_FIGURES_LOST;
        if (order < 0) missing[n_missing++] = &read[i];
        if (order > 0) added[n_added++] = &written[j];
        if (order > 0 && i && read[i - 1].value == written[j].value) return TEXT_FIGURES_LOST;
        i += order <= 0, j += order >= 0;
    }
    for (size_t i = 0; i < n_missing; i++) {
        size_t k = 0;
        while (k < n_added && !may_become(missing[i], added[k]->value)) k++;
        if (k < n_added) added[k] = added[--n_added];
        else if (!missing[i]->loose || n_added) lost++;
    }
    for (size_t k = 0; k < n_added; k++)
        if (has_digits_of(added[k]->value, digits)) return TEXT_FIGURES_ADDED;
    if (lost) return TEXT_FIGURES_LOST;
    for (size_t i = 0; i < n; i++) compounds |= read[i].compound;
    for (size_t k = 0; k < n_added; k++)
        joined |= added[k]->joined || (compounds && added[k]->compound) || (n && added[k]->value >= LARGE);
    if (!n_added || !(digits || joined) || has_number_word(source)) return TEXT_FIGURES_KEPT;
    return digits ? TEXT_FIGURES_ADDED : TEXT_FIGURES_LOST;
}

moe_status text_figures_compare(moe_span source, moe_span target, unsigned digits, text_figures *result,
                                moe_error *error) {
    *result = TEXT_FIGURES_LOST;
    for (int grouped = 1; grouped >= 0 && *result; grouped--) {
        size_t n, m;
        figure *read = figures_of(source, grouped, &n), *written = figures_of(target, grouped, &m);
        const int failed = !read || !written;
        if (!failed) *result = compare_all(source, read, n, written, m, digits);
        free(read);
        free(written);
        if (failed) return text_out_of_memory(error);
    }
    return MOE_OK;
}
