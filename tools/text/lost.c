/* lost.c - see lost.h. */
#include "tools/text/lost.h"
#include "tools/text/sentences.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* ---- 1. Loops ------------------------------------------------------------------------------------------ */

/* WIDEST: maximum bytes of a repeated unit. FEWEST, SHORTEST: minimum repetitions and bytes of a
 * loop. LIST: minimum items of a list. */
enum { WIDEST = 128, FEWEST = 5, SHORTEST = 16, LIST = 4 };

/* Maximum number of consecutive occurrences of any unit, and of units inside a word; 1 if nothing repeats. */
typedef struct repeats {
    size_t any, inside;
} repeats;

static size_t greater(size_t a, size_t b) { return a > b ? a : b; }

/* Count repetitions in runs of at least `least` bytes. */
static repeats repeats_of(moe_span text, size_t least) {
    repeats most = { 1, 1 };
    for (size_t unit = 1; unit <= WIDEST && 2 * unit <= text.length; unit++) {
        size_t run = 0, longest = 0, inside = 0, word = 0; /* `word` is the length of the current word */
        for (size_t i = 0; i < text.length; i++) {
            word = text.data[i] == ' ' ? 0 : word + 1;
            if (i < unit) continue;
            run = text.data[i] == text.data[i - unit] ? run + 1 : 0;
            const size_t whole = run ? run + unit : 0;
            longest = greater(longest, whole);
            inside = greater(inside, whole < word ? whole : word * (run > 0));
        }
        if (longest >= least) most.any = greater(most.any, longest / unit);
        if (inside >= least) most.inside = greater(most.inside, inside / unit);
    }
    return most;
}

static int is_more(size_t written, size_t read) { return written >= FEWEST && written > read + read / 2 + 2; }

/* Return 1 if a text may have no spaces: it contains characters of three or more bytes other than punctuation. */
static int is_unspaced(moe_span text) {
    for (size_t i = 0; i < text.length; i++)
        if ((unsigned char)text.data[i] > 0xE2) return 1;
    return 0;
}

int text_loops(moe_span source, moe_span target) {
    if (target.length < SHORTEST) return 0;
    const repeats written = repeats_of(target, SHORTEST);
    if (written.any < FEWEST) return 0;
    const repeats read = repeats_of(source, 0);
    if (is_more(written.any, read.any)) return 1;
    if (is_more(written.inside, read.inside) && !is_unspaced(target)) return 1;
    return read.any >= FEWEST && target.length > 2 * source.length + SHORTEST;
}

/* ---- 2. Names ------------------------------------------------------------------------------------------ */

/* Return the next word from *at on, or an empty one at the end. *commas is the number of commas after the word. */
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
