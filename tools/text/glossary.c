/* glossary.c - see glossary.h. */
#define _POSIX_C_SOURCE 200809L
#include "tools/text/glossary.h"
#include "tools/text/heading.h"
#include "tools/text/plurals.h"
#include "tools/text/spans.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { MAX_TERM = 200, MAX_FILE = 64 << 20 }; /* maximum bytes per source or target, and per file */

/* The terms order[low .. high) have a common prefix, ignoring case. Those before order[ends] consist of this prefix. */
typedef struct branch {
    utf8proc_int32_t c;       /* last character of the prefix */
    uint32_t low, ends, high; /* a branch with one term has no further branches; compare the term's characters */
    uint32_t first, n;        /* branches [first, first + n), sorted by `c` */
} branch;

struct text_glossary {
    const text_front *targets;
    text_term *terms; /* [n_plurals + n_terms] plurals first, because the last of several matching terms is used */
    size_t n_terms, capacity, n_plurals;
    text_term_count *counts; /* [n_terms] */
    char heading[100];
    uint32_t *order;  /* [n_plurals + n_terms] sorted by lower-case letters; equal terms in order of addition */
    branch *branches; /* branches[0] is the root */
    size_t n_branches, branch_capacity;
};

/* ---- 1. Spellings of a term ---------------------------------------------------------------------------- */

size_t text_word_length(const char *text, size_t length, size_t at) {
    const size_t end = text_word_end(text, length, at);
    return (end > at ? end : text_utf8_next(text, length, at)) - at;
}

/* Compose a text of at most MAX_TERM bytes. Return the number of characters, 0 if the text is too long. */
static size_t characters(const char *text, size_t length, utf8proc_int32_t *out) {
    return length <= MAX_TERM ? text_composed(text, length, out, TEXT_TERM_CHARACTERS) : 0;
}

/* Return 1 if a text matches a term's characters. A capital in the text may match a lower-case letter in the term. */
static int is_written(const utf8proc_int32_t *text, const utf8proc_int32_t *term, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (text[i] != term[i] && utf8proc_tolower(text[i]) != term[i]) return 0;
    return 1;
}

/* Return 1 for a regular ending. If `noun` is 1, the word is capitalised and may be a German noun. */
static int is_ending(const utf8proc_int32_t *c, size_t n, int noun) {
    static const char *const endings[] = { "s", "es", "x", "'s", "e", "n", "en", "er", "ern", "em" };
    enum { ANY = 4, ALL = sizeof endings / sizeof *endings };
    for (size_t i = 0; i < (noun ? ALL : ANY); i++) {
        size_t k = 0;
        while (k < n && endings[i][k] && utf8proc_tolower(c[k] == 0x2019 ? '\'' : c[k]) == endings[i][k]) k++;
        if (k == n && !endings[i][k]) return 1;
    }
    return 0;
}

/* Return 1 if a term's last word can be inflected: three or more letters, none but the first a capital. */
static int is_inflected(const text_term *t) {
    size_t letters = 0;
    for (size_t i = t->n_characters; i-- > 0; letters++) {
        const utf8proc_category_t kind = utf8proc_category(t->characters[i]);
        if (kind == UTF8PROC_CATEGORY_LL) continue;
        if (kind == UTF8PROC_CATEGORY_LU && letters) letters++;
        else if (kind == UTF8PROC_CATEGORY_LU) return 0;
        if (kind == UTF8PROC_CATEGORY_LU && i && t->characters[i - 1] != ' ') return 0;
        break;
    }
    return letters >= 3;
}

static int is_noun(const text_term *t) {
    size_t first = t->n_characters;
    while (first && t->characters[first - 1] != ' ') first--;
    return utf8proc_category(t->characters[first]) == UTF8PROC_CATEGORY_LU;
}

/* ---- 2. Terms ------------------------------------------------------------------------------------------ */

static const char BLANKS[] = " \t\r";

static int is_term(moe_span s) {
    return s.length && s.length <= MAX_TERM && text_is_usable(s.data, s.length) && !memchr(s.data, '\n', s.length);
}

static moe_status add_term(text_glossary *g, moe_span source, moe_span target, moe_error *error) {
    utf8proc_int32_t c[TEXT_TERM_CHARACTERS];
    source = text_trimmed(source.data, source.length, BLANKS);
    target = text_trimmed(target.data, target.length, BLANKS);
    if (!is_term(source) || !is_term(target) || memchr(target.data, '\t', target.length))
        return text_fail(error, MOE_ERROR_ARGUMENT, "",
                         "a term must be a source and a target, or in a file without commas only a source, each valid "
                         "UTF-8 of at most 200 bytes; to copy a term, repeat it");
    moe_status status = text_add(&g->terms, &g->n_terms, &g->capacity, &(text_term){ 0 }, 1, sizeof *g->terms, error);
    if (status) return status;
    text_term *t = &g->terms[g->n_terms - 1];
    t->number = g->n_terms - 1;
    t->stays = text_same(source, target);
    t->source = strndup(source.data, source.length);
    t->target = strndup(target.data, target.length);
    t->n_characters = characters(source.data, source.length, c);
    t->characters = malloc((t->n_characters + 1) * sizeof *t->characters);
    if (!t->source || !t->target || !t->characters) return text_out_of_memory(error);
    memcpy(t->characters, c, t->n_characters * sizeof *c);
    if (!t->n_characters)
        return text_fail(error, MOE_ERROR_ARGUMENT, "", "the source of a term has too many characters");
    t->inflected = is_inflected(t);
    status = text_encode(g->targets, t->target, target.length, &t->ids, error);
    if (!status && !t->ids.length) return text_fail(error, MOE_ERROR_ARGUMENT, "", "the target of a term is blank");
    return status;
}

/* Put the plurals of all terms before the terms. */
static moe_status add_plurals(text_glossary *g, moe_error *error) {
    char plurals[TEXT_PLURALS][TEXT_PLURAL_BYTES];
    utf8proc_int32_t c[TEXT_TERM_CHARACTERS];
    text_term *all = NULL;
    size_t n = 0, capacity = 0;
    moe_status status = MOE_OK;
    for (size_t i = 0; i < g->n_terms && !status; i++) {
        text_term t = g->terms[i];
        t.plural = 1;
        const size_t end = t.inflected && !t.stays ? text_plurals(t.source, strlen(t.source), plurals) : 0;
        for (size_t k = 0; k < end && !status; k++) {
            t.n_characters = characters(plurals[k], strlen(plurals[k]), c);
            t.characters = malloc((t.n_characters + 1) * sizeof *c);
            if (!t.characters) status = text_out_of_memory(error);
            else if (memcpy(t.characters, c, t.n_characters * sizeof *c), t.n_characters)
                status = text_add(&all, &n, &capacity, &t, 1, sizeof t, error);
            if (status || !t.n_characters) free(t.characters);
        }
    }
    const size_t plural = n;
    if (!status) status = text_add(&all, &n, &capacity, g->terms, g->n_terms, sizeof *all, error);
    if (!status) {
        free(g->terms);
        g->terms = all, g->n_plurals = plural;
        return MOE_OK;
    }
    for (size_t i = 0; i < plural; i++) free(all[i].characters);
    free(all);
    return status;
}

/* ---- 3. Tree of all terms by their letters ------------------------------------------------------------- */

/* Return a character of a term in lower case, or -1 after the last character. */
static utf8proc_int32_t letter(const text_term *t, size_t depth) {
    return depth < t->n_characters ? utf8proc_tolower(t->characters[depth]) : -1;
}

typedef struct key {
    utf8proc_int32_t c;
    uint32_t term;
} key;

static int compare_keys(const void *a, const void *b) {
    const key *x = a, *y = b;
    if (x->c != y->c) return x->c < y->c ? -1 : 1;
    return x->term < y->term ? -1 : x->term > y->term;
}

/* Append the branches of terms that share `depth` characters. Sort the terms first, unless they are already in order.
 * Return 0 if out of memory. */
static int grow_branch(text_glossary *g, size_t at, size_t depth, key *keys) {
    branch *b = &g->branches[at];
    const uint32_t low = b->low, n = b->high - b->low;
    int sorted = 1;
    if (n < 2) return 1;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = (key){ letter(&g->terms[g->order[low + i]], depth), g->order[low + i] };
        sorted &= !i || keys[i - 1].c <= keys[i].c;
    }
    if (!sorted) qsort(keys, n, sizeof *keys, compare_keys);
    b->first = (uint32_t)g->n_branches;
    for (uint32_t i = 0; i < n; i++) {
        g->order[low + i] = keys[i].term;
        if (keys[i].c < 0) {
            b->ends++;
        } else if (i && keys[i].c == keys[i - 1].c) {
            g->branches[g->n_branches - 1].high++;
        } else {
            const branch new = { keys[i].c, low + i, low + i, low + i + 1, 0, 0 };
            if (g->n_branches == UINT32_MAX ||
                text_add(&g->branches, &g->n_branches, &g->branch_capacity, &new, 1, sizeof new, NULL))
                return 0;
            b = &g->branches[at], b->n++;
        }
    }
    return 1;
}

/* Build the tree level by level, in time linear in the characters of all terms. */
static moe_status grow_tree(text_glossary *g, moe_error *error) {
    const size_t n = g->n_plurals + g->n_terms;
    key *keys = n < UINT32_MAX ? malloc((n + 1) * sizeof *keys) : NULL;
    const branch root = { .high = (uint32_t)n };
    g->counts = calloc(g->n_terms + 1, sizeof *g->counts);
    int good = keys && g->counts && (g->order = malloc((n + 1) * sizeof *g->order)) != NULL &&
               !text_add(&g->branches, &g->n_branches, &g->branch_capacity, &root, 1, sizeof root, NULL);
    for (size_t i = 0; good && i < n; i++) g->order[i] = (uint32_t)i;
    for (size_t level = 0, depth = 0; good && level < g->n_branches; depth++)
        for (const size_t next = g->n_branches; good && level < next; level++)
            good = grow_branch(g, level, depth, keys);
    free(keys);
    return good ? MOE_OK : text_out_of_memory(error);
}

/* ---- 4. Reading lines, CSV, files ---------------------------------------------------------------------- */

/* Return the end of the line at `at`. */
static size_t line_end(const char *data, size_t length, size_t at) {
    const char *end = memchr(data + at, '\n', length - at);
    return end ? (size_t)(end - data) : length;
}

static int says_nothing(const char *line, size_t length) {
    const moe_span rest = text_trimmed(line, length, BLANKS);
    return !rest.length || *rest.data == '#';
}

/* Return the separator of a CSV file, or 0. A file is CSV if its name ends in .csv, or if no line has a TAB and every
 * line has one comma or every line has one semicolon. */
static char csv_sign(const char *name, const char *data, size_t length) {
    const char *const signs = ",;";
    const size_t n = strlen(name);
    const int named = n > 4 && text_is_listed(".csv .CSV", name + n - 4, 4);
    size_t lines = 0, with[2] = { 0, 0 };
    for (size_t at = 0, end; at < length; at = end + 1) {
        end = line_end(data, length, at);
        if (says_nothing(data + at, end - at)) continue;
        if (memchr(data + at, '\t', end - at)) return named ? '\t' : 0;
        lines++;
        for (size_t k = 0; k < 2; k++) {
            size_t count = 0;
            for (size_t i = at; i < end; i++) count += data[i] == signs[k];
            with[k] += named ? count > 0 : count == 1;
        }
    }
    if (lines && with[1] == lines && with[0] < lines) return ';';
    return named || (lines && with[0] == lines) ? ',' : 0;
}

/* Read a CSV field up to the separator or line end. Return 0 if a quote is not closed or is followed by text. */
static int csv_field(const char *data, size_t length, size_t *at, char sign, text_bytes *field) {
    field->length = 0;
    text_append(field, "", 0);
    while (*at < length && data[*at] == ' ') ++*at;
    if (*at == length || data[*at] != '"') {
        size_t begin = *at;
        while (*at < length && data[*at] != sign && data[*at] != '\n') ++*at;
        text_append(field, data + begin, *at - begin);
        return 1;
    }
    for (++*at; *at < length; ++*at) {
        if (data[*at] == '"' && (*at + 1 == length || data[*at + 1] != '"')) break;
        *at += data[*at] == '"';
        text_append(field, data + *at, 1);
    }
    if (*at == length) return 0;
    for (++*at; *at < length && strchr(BLANKS, data[*at]) && data[*at] && data[*at] != sign;) ++*at;
    return *at == length || data[*at] == sign || data[*at] == '\n';
}

/* Add a row of the file, unless it is a first row that names the columns. */
static moe_status add_row(text_glossary *g, moe_span source, moe_span target, moe_error *error) {
    const moe_span a = text_trimmed(source.data, source.length, BLANKS),
                   b = text_trimmed(target.data, target.length, BLANKS);
    if (g->n_terms || *g->heading || !text_is_heading(g->targets->model, a, b))
        return add_term(g, source, target, error);
    snprintf(g->heading, sizeof g->heading, "%.*s, %.*s", (int)text_utf8_cut(a.data, a.length, 48), a.data,
             (int)text_utf8_cut(b.data, b.length, 48), b.data);
    return MOE_OK;
}

static moe_status read_csv(text_glossary *g, const char *data, size_t length, char sign, size_t *number,
                           moe_error *error) {
    text_bytes source = { 0 }, target = { 0 };
    moe_status status = MOE_OK;
    for (size_t at = 0, begin; at < length && !status; at++) {
        ++*number;
        begin = at;
        if (says_nothing(data + at, line_end(data, length, at) - at)) {
            at = line_end(data, length, at);
            continue;
        }
        int good = csv_field(data, length, &at, sign, &source) && at < length && data[at] == sign;
        if (good) at++, good = csv_field(data, length, &at, sign, &target) && (at == length || data[at] == '\n');
        if (source.failed || target.failed) status = text_out_of_memory(error);
        else if (!good)
            status = text_fail(error, MOE_ERROR_ARGUMENT, "",
                               "a CSV line must be source,target: two columns, with balanced quotes (\"); to copy a "
                               "term, repeat it");
        else
            status =
                add_row(g, (moe_span){ source.data, source.length }, (moe_span){ target.data, target.length }, error);
        for (; begin < at && !status; begin++) *number += data[begin] == '\n';
    }
    text_bytes_free(&source);
    text_bytes_free(&target);
    return status;
}

static moe_status read_lines(text_glossary *g, const char *data, size_t length, size_t *number, moe_error *error) {
    moe_status status = MOE_OK;
    for (size_t at = 0, end; at < length && !status; at = end + 1) {
        end = line_end(data, length, at);
        ++*number;
        if (says_nothing(data + at, end - at)) continue;
        const moe_span line = { data + at, end - at };
        const char *tab = memchr(line.data, '\t', line.length);
        const moe_span source = { line.data, tab ? (size_t)(tab - line.data) : line.length };
        if (tab) status = add_row(g, source, (moe_span){ tab + 1, line.length - source.length - 1 }, error);
        else status = add_term(g, line, line, error);
    }
    return status;
}

/* Return a glossary of the added terms. On failure, free the terms and name term `number` in the error. */
static moe_status finish(text_glossary *g, moe_status status, const char *what, size_t number, text_glossary **out,
                         moe_error *error) {
    if (!status) status = add_plurals(g, error);
    if (!status) status = grow_tree(g, error);
    if (!status) return *out = g, MOE_OK;
    if (error) snprintf(error->where, sizeof error->where, "glossary, %s %zu", what, number);
    return text_glossary_free(g), status;
}

moe_status text_glossary_read(const text_front *targets, const char *name, const char *data, size_t length,
                              text_glossary **out, moe_error *error) {
    text_glossary *g = calloc(1, sizeof *g);
    size_t number = 0;
    if (!g) return text_out_of_memory(error);
    g->targets = targets;
    if (text_begins_with(data, length, "\xEF\xBB\xBF")) data += 3, length -= 3;
    const char sign = csv_sign(name, data, length);
    moe_status status = MOE_OK;
    const moe_span rest = text_trimmed(data, length, " \t\r\n");
    if (text_prefix("<?xml <tbx <mart", rest.data, rest.length)) {
        number = 1;
        status =
            text_fail(error, MOE_ERROR_ARGUMENT, "",
                      "TBX and other XML are not supported: save the terms as lines of source TAB target, or as CSV");
    } else {
        status = sign ? read_csv(g, data, length, sign, &number, error) : read_lines(g, data, length, &number, error);
    }
    if (!status && !g->n_terms)
        number = 1, status = text_fail(error, MOE_ERROR_ARGUMENT, "", "the glossary contains no terms");
    return finish(g, status, "line", number, out, error);
}

moe_status text_glossary_of(const text_front *targets, const char *const *sources, const char *const *translations,
                            size_t n, text_glossary **out, moe_error *error) {
    text_glossary *g = calloc(1, sizeof *g);
    if (!g) return text_out_of_memory(error);
    g->targets = targets;
    moe_status status = MOE_OK;
    size_t i = 0;
    for (; i < n && !status; i++)
        status = add_term(g, (moe_span){ sources[i], strlen(sources[i]) },
                          (moe_span){ translations[i], strlen(translations[i]) }, error);
    return finish(g, status, "term", i, out, error);
}

moe_status text_glossary_load(const char *path, text_bytes *data, moe_error *error) {
    FILE *file = fopen(path, "r");
    int reason = file ? 0 : errno;
    while (file && !reason && data->length <= MAX_FILE && text_room(data, 1 << 16)) {
        const size_t n = fread(data->data + data->length, 1, 1 << 16, file);
        if (ferror(file)) reason = errno;
        if (!n) break;
        data->length += n;
    }
    if (file) fclose(file);
    if (reason || data->length > MAX_FILE)
        return text_fail(error, MOE_ERROR_IO, "glossary", "cannot read %.100s: %.60s", path,
                         reason ? strerror(reason) : "larger than 64 MiB");
    return data->failed ? text_out_of_memory(error) : MOE_OK;
}

size_t text_glossary_count(const text_glossary *g) { return g ? g->n_terms : 0; }
const text_term *text_glossary_term(const text_glossary *g, size_t i) { return &g->terms[g->n_plurals + i]; }
text_term_count *text_glossary_counts(const text_glossary *g, size_t i) { return &g->counts[i]; }
const char *text_glossary_heading(const text_glossary *g) { return g ? g->heading : ""; }

void text_glossary_free(text_glossary *g) {
    if (!g) return;
    for (size_t i = 0; i < g->n_plurals + g->n_terms; i++) {
        text_term *t = &g->terms[i];
        free(t->characters);
        if (t->plural) continue;
        free(t->source);
        free(t->target);
        text_ids_free(&t->ids);
    }
    free(g->terms);
    free(g->counts);
    free(g->order);
    free(g->branches);
    free(g);
}

/* ---- 5. Finding in a text ------------------------------------------------------------------------------ */

/* The beginning of a text, to be compared with terms. */
typedef struct beginning {
    const char *text;
    size_t length, bytes, n;
    utf8proc_int32_t c[TEXT_TERM_CHARACTERS]; /* [n] characters of the first `bytes` bytes, composed */
} beginning;

static int is_mark(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class != 0; }

/* Append the next word or sign with its combining marks. Return 0 at the end of the text, or if no term is this long.
 */
static int take_one(beginning *b) {
    utf8proc_int32_t c[TEXT_TERM_CHARACTERS];
    if (b->bytes == b->length) return 0;
    size_t bytes = text_word_length(b->text, b->length, b->bytes), end, more;
    while ((end = b->bytes + bytes) < b->length && end <= MAX_TERM &&
           is_mark(text_character(b->text, b->length, end, &more)))
        bytes += more;
    const size_t n = end > MAX_TERM ? 0 : characters(b->text + b->bytes, bytes, c);
    if (!n || b->n + n > TEXT_TERM_CHARACTERS) return 0;
    memcpy(b->c + b->n, c, n * sizeof *c);
    b->n += n, b->bytes += bytes;
    return 1;
}

/* A path through the tree along the characters of a text. */
typedef struct way {
    const text_glossary *g;
    const branch *at; /* NULL if no term continues */
    size_t depth;
} way;

static void walk_on(way *w, utf8proc_int32_t c) {
    const branch *b = w->at;
    w->at = NULL;
    if (b->high - b->low == 1) {
        const text_term *t = &w->g->terms[w->g->order[b->low]];
        if (w->depth < t->n_characters && letter(t, w->depth) == c) w->at = b;
    } else {
        uint32_t low = b->first, high = b->first + b->n;
        while (low < high) {
            const uint32_t middle = low + (high - low) / 2;
            if (w->g->branches[middle].c < c) low = middle + 1;
            else high = middle;
        }
        if (low < b->first + b->n && w->g->branches[low].c == c) w->at = &w->g->branches[low];
    }
    w->depth++;
}

/* Return 1 + the index of the last term at or after `first` that matches c[n] and ends in this branch, or 0. Characters
 * beyond the depth must be an ending. The terms that end in a branch differ only in capitals. */
static size_t last_here(const way *w, const utf8proc_int32_t *c, size_t n, size_t first) {
    const branch *b = w->at;
    const text_glossary *g = w->g;
    if (!b) return 0;
    const uint32_t alone = b->high - b->low == 1 && g->terms[g->order[b->low]].n_characters == w->depth;
    for (uint32_t i = alone ? b->high : b->ends; i-- > b->low && g->order[i] >= first;) {
        const text_term *t = &g->terms[g->order[i]];
        if (is_written(c, t->characters, w->depth) &&
            (n == w->depth || (t->inflected && is_ending(c + w->depth, n - w->depth, is_noun(t)))))
            return g->order[i] + 1;
    }
    return 0;
}

int text_term_is_capitals(const text_term *t, const char *text, size_t length) {
    utf8proc_int32_t c[TEXT_TERM_CHARACTERS];
    const size_t n = characters(text, length, c);
    size_t raised = 0;
    for (size_t i = 0; i < n; i++) {
        if (utf8proc_category(c[i]) == UTF8PROC_CATEGORY_LL && i < t->n_characters) return 0;
        raised += i && i < t->n_characters && c[i] != t->characters[i];
    }
    return raised > 0;
}

void text_term_lower_case(const text_term *t, const char *text, size_t length, text_bytes *out) {
    utf8proc_int32_t c[TEXT_TERM_CHARACTERS];
    utf8proc_uint8_t bytes[4];
    const size_t n = characters(text, length, c);
    for (size_t i = 0; i < n; i++) {
        const utf8proc_int32_t small = i < t->n_characters ? t->characters[i] : utf8proc_tolower(c[i]);
        text_append(out, (const char *)bytes, (size_t)utf8proc_encode_char(small, bytes));
    }
}

int text_term_ends(const text_term *t, const char *ending, size_t length) {
    utf8proc_int32_t c[TEXT_TERM_CHARACTERS];
    const char *last = strrchr(t->target, ' '), *word = last ? last + 1 : t->target;
    const size_t n = characters(ending, length, c);
    size_t bytes;
    return n &&
           is_ending(c, n, utf8proc_category(text_character(word, strlen(word), 0, &bytes)) == UTF8PROC_CATEGORY_LU);
}

const text_term *text_glossary_find(const text_glossary *g, const char *text, size_t length, size_t at, size_t *bytes,
                                    int *inflected) {
    enum { ENDING = 3 }; /* characters of the longest ending */
    const text_term *best = NULL;
    if (!g) return NULL;
    beginning b;
    b.text = text + at, b.length = length - at, b.n = b.bytes = 0;
    for (way w = { g, g->branches, 0 }; w.at && take_one(&b);) {
        size_t found = 0, exact;
        for (const size_t end = b.n; w.at && w.depth < end;) { /* add a word */
            walk_on(&w, utf8proc_tolower(b.c[w.depth]));
            if (w.depth == end || end - w.depth > ENDING) continue;
            const size_t other = last_here(&w, b.c, end, found);
            if (other) found = other;
        }
        if ((exact = last_here(&w, b.c, b.n, 0))) found = exact;
        if (!found) continue;
        best = &g->terms[found - 1];
        *bytes = b.bytes;
        *inflected = !exact || best->plural;
    }
    return best;
}
