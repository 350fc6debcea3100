/* reliability.c - see reliability.h.
 *
 * Contents
 *   1. chrF
 *   2. Translation of the pairs
 *   3. Fit          logistic regression, rising table
 *   4. Reliability  on the lines that were not fitted
 *   5. Main
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/reliability.h"
#include "tools/programs/lines.h"
#include "tools/text/confidence.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <utf8proc.h>

enum {
    FEATURES = TEXT_CONFIDENCE_FEATURES,
    GROUPS = 24, /* points of the table before neighbours are pooled */
    LEAST = 400, /* translations */
    RIGHT = 60,  /* minimum chrF */
    BINS = 10,   /* of the printed table and the calibration error */
    ORDER = 6,   /* of chrF */
    ROWS = 2
};

/* ---- 1. chrF ------------------------------------------------------------------------------------------- */

static int by_number(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Store the characters except white space. Return their number. */
static size_t characters_of(const char *text, size_t length, uint32_t *out) {
    size_t n = 0;
    for (size_t at = 0, bytes; at < length; at += bytes) {
        const utf8proc_int32_t c = text_character(text, length, at, &bytes);
        const utf8proc_category_t kind = utf8proc_category(c);
        if (kind == UTF8PROC_CATEGORY_ZS || kind == UTF8PROC_CATEGORY_ZL || kind == UTF8PROC_CATEGORY_ZP ||
            (c >= 9 && c <= 13) || (c >= 28 && c <= 31) || c == 0x85)
            continue;
        out[n++] = (uint32_t)c;
    }
    return n;
}

/* Store the sorted hashes of the sequences of `order` characters. Return their number. */
static size_t sequences_of(const uint32_t *characters, size_t n, size_t order, uint64_t *out) {
    size_t found = 0;
    for (size_t i = 0; i + order <= n; i++) {
        uint64_t hash = 0xcbf29ce484222325u;
        for (size_t k = 0; k < order; k++) {
            hash = (hash ^ characters[i + k]) * 0x9e3779b97f4a7c15u;
            hash ^= hash >> 29;
        }
        out[found++] = hash;
    }
    qsort(out, found, sizeof *out, by_number);
    return found;
}

static size_t common_of(const uint64_t *a, size_t n, const uint64_t *b, size_t m) {
    size_t found = 0;
    for (size_t i = 0, k = 0; i < n && k < m;) {
        found += a[i] == b[k];
        if (a[i] == b[k]) i++, k++;
        else if (a[i] < b[k]) i++;
        else k++;
    }
    return found;
}

double reliability_chrf(const char *text, size_t length, const char *reference, size_t reference_length) {
    const size_t most = length > reference_length ? length : reference_length;
    uint32_t *characters = malloc((2 * most + 1) * sizeof *characters);
    uint64_t *sequences = malloc((2 * most + 1) * sizeof *sequences);
    double precision = 0, recall = 0, orders = 0;
    if (!characters || !sequences) return free(characters), free(sequences), -1;
    const size_t n = characters_of(text, length, characters),
                 m = characters_of(reference, reference_length, characters + most);
    for (size_t order = 1; order <= ORDER; order++) {
        const size_t a = sequences_of(characters, n, order, sequences),
                     b = sequences_of(characters + most, m, order, sequences + most);
        if (!a || !b) continue;
        const double same = (double)common_of(sequences, a, sequences + most, b);
        precision += same / (double)a, recall += same / (double)b, orders++;
    }
    free(characters), free(sequences);
    if (!(precision > 0) || !(recall > 0)) return 0;
    precision /= orders, recall /= orders;
    return 100 * 5 * precision * recall / (4 * precision + recall);
}

/* ---- 2. Translation of the pairs ----------------------------------------------------------------------- */

typedef struct pair {
    char *line; /* source language, target language, source and reference, each NUL-terminated */
    const char *cell[4];
    int64_t features[FEATURES];
    int row; /* result of text_confidence_features */
    int right;
    size_t direction; /* number of the first pair with the same languages */
    int64_t value;    /* of the linear function */
    double p;         /* confidence */
} pair;

typedef struct pairs {
    pair *each;
    size_t n, capacity, next;
    text_index directions; /* first pair of each direction */
    moe_error trouble;
} pairs;

static void pairs_free(pairs *all) {
    for (size_t i = 0; i < all->n; i++) free(all->each[i].line);
    free(all->each);
    text_index_free(&all->directions);
}

/* Set the direction of the next pair. Return 0 if out of memory. */
static int find_direction(pairs *all, pair *p) {
    const uint32_t hash = text_hash(p->cell[0], (size_t)(p->cell[2] - p->cell[0]));
    uint32_t i;
    for (size_t at = 0; all->each && (i = text_index_next(&all->directions, hash, &at)) != TEXT_NONE;)
        if (!strcmp(all->each[i].cell[0], p->cell[0]) && !strcmp(all->each[i].cell[1], p->cell[1]))
            return p->direction = i, 1;
    return p->direction = all->n, text_index_add(&all->directions, hash, all->n);
}

static moe_status add_line(pairs *all, const char *path, const text_line *line, moe_error *e) {
    char why[128];
    pair p = { .line = malloc(line->length + 1), .cell = { "", "", "", "" } };
    size_t cells = 0;
    if (!p.line) return text_out_of_memory(e);
    memcpy(p.line, line->data, line->length);
    p.line[line->length] = '\0';
    for (char *at = p.line; at && cells < 4; cells++) {
        p.cell[cells] = at;
        if ((at = strchr(at, '\t'))) *at++ = '\0';
        if (at && cells == 3) cells = 4;
    }
    moe_status status = MOE_OK;
    if (line->too_long || text_line_usable(line, why, sizeof why) < line->length || cells != 4 || !*p.cell[2] ||
        !*p.cell[3])
        status = text_fail(e, MOE_ERROR_ARGUMENT, "",
                           "%s: line %llu: expected source language TAB target language TAB source TAB reference", path,
                           (unsigned long long)line->number);
    if (!status && !find_direction(all, &p)) status = text_out_of_memory(e);
    if (!status) status = text_add(&all->each, &all->n, &all->capacity, &p, 1, sizeof p, e);
    if (status) free(p.line);
    return status;
}

static moe_status read_pairs(pairs *all, const char *path, moe_error *e) {
    text_reader reader;
    text_line line;
    text_read got = TEXT_READ_END;
    moe_status status = MOE_OK;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return text_fail(e, MOE_ERROR_IO, "open", "cannot open %s: %s", path, strerror(errno));
    text_reader_init(&reader, fd, NULL, -1);
    while (!status && (got = text_reader_next(&reader, 1, &line)) == TEXT_READ_LINE)
        if (line.length) status = add_line(all, path, &line, e);
    if (!status && got != TEXT_READ_END) status = text_fail(e, MOE_ERROR_IO, "read", "%s: %s", path, strerror(errno));
    text_reader_free(&reader);
    close(fd);
    return status;
}

static int pull(void *user, int wait, moetext_request *request) {
    pairs *all = user;
    (void)wait;
    if (all->trouble.code || program_signal) return MOE_PULL_CANCEL;
    if (all->next == all->n) return MOE_PULL_END;
    pair *p = &all->each[all->next++];
    request->source = p->cell[0], request->target = p->cell[1];
    request->text = p->cell[2];
    request->length = strlen(p->cell[2]);
    request->user = p;
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moetext_result *r) {
    pairs *all = user;
    pair *p = r->user;
    if (r->status == MOE_ERROR_ARGUMENT || r->status == MOE_ERROR_MEMORY) /* such as an unknown language */
        text_fail(&all->trouble, r->status, "", "%s", r->message);
    if (r->between) return;
    p->row = text_confidence_features(r, p->features);
    if (!p->row) return;
    const moetext_hypothesis *h = r->hypotheses;
    const double chrf = reliability_chrf(h->text, h->length, p->cell[3], strlen(p->cell[3]));
    if (chrf < 0) text_out_of_memory(&all->trouble);
    p->right = chrf >= (double)RIGHT;
}

/* ---- 3. Fit -------------------------------------------------------------------------------------------- */

static int is_fitted(const pairs *all, size_t i) { return i % 2 == 0 && all->each[i].row; }

/* Solve a system of equations by elimination; `a` is positive definite. */
static void solve(double a[FEATURES][FEATURES], double b[FEATURES]) {
    for (size_t i = 0; i < FEATURES; i++)
        for (size_t k = i + 1; k < FEATURES; k++) {
            const double times = a[k][i] / a[i][i];
            for (size_t l = i; l < FEATURES; l++) a[k][l] -= times * a[i][l];
            b[k] -= times * b[i];
        }
    for (size_t i = FEATURES; i-- > 0;) {
        for (size_t k = i + 1; k < FEATURES; k++) b[i] -= a[i][k] * b[k];
        b[i] /= a[i][i];
    }
}

/* Write the feature in standard form to `out`: mean 0 and deviation 1, except for the constant, or 0 if it is not used
 * (features of the reverse score in row 1) or does not vary. */
typedef struct scales {
    double mean[FEATURES], times[FEATURES];
} scales;

static scales scales_of(const pairs *all, size_t row) {
    scales s = { .times = { 1e-6 } };
    for (size_t f = 1; f < FEATURES; f++) {
        double n = 0, sum = 0, square = 0;
        for (size_t i = 0; i < all->n; i++) {
            if (!is_fitted(all, i)) continue;
            const double x = (double)all->each[i].features[f];
            n++, sum += x, square += x * x;
        }
        const double variance = square / n - sum / n * sum / n;
        s.mean[f] = sum / n;
        s.times[f] = (row && (f == 2 || f == 4)) || !(variance > 1) ? 0 : 1 / sqrt(variance);
    }
    return s;
}

/* Fit the weights of a row by Newton's method with a small penalty. `offsets` has a number for each direction. */
static void fit_weights(const pairs *all, size_t row, const double *offsets, int64_t weights[FEATURES]) {
    enum { STEPS = 30 };
    const scales s = scales_of(all, row);
    double w[FEATURES] = { 0 };
    for (int step = 0; step < STEPS; step++) {
        double h[FEATURES][FEATURES] = { { 0 } }, g[FEATURES];
        for (size_t f = 0; f < FEATURES; f++) h[f][f] = 1, g[f] = -w[f];
        for (size_t i = 0; i < all->n; i++) {
            double x[FEATURES], z = 0;
            if (!is_fitted(all, i)) continue;
            for (size_t f = 0; f < FEATURES; f++) {
                x[f] = ((double)all->each[i].features[f] - s.mean[f]) * s.times[f];
                z += w[f] * x[f];
            }
            z += offsets[all->each[i].direction];
            const double p = 1 / (1 + exp(-z));
            for (size_t f = 0; f < FEATURES; f++) {
                g[f] += x[f] * (all->each[i].right - p);
                for (size_t k = 0; k < FEATURES; k++) h[f][k] += x[f] * x[k] * p * (1 - p);
            }
        }
        solve(h, g);
        for (size_t f = 0; f < FEATURES; f++) w[f] += g[f];
    }
    double constant = w[0];
    for (size_t f = 1; f < FEATURES; f++) {
        weights[f] = (int64_t)(w[f] * s.times[f] * 1e12);
        constant -= w[f] * s.times[f] * s.mean[f];
    }
    weights[0] = (int64_t)(constant * 1e6);
}

/* Fit the number that is added for each direction, which is small for directions with few lines. */
static void fit_offsets(const pairs *all, const int64_t weights[FEATURES], double *offsets) {
    enum { STEPS = 10, PENALTY = 2 };
    for (size_t d = 0; d < all->n; d++) {
        for (int step = 0; step < STEPS && all->each[d].direction == d; step++) {
            double g = -PENALTY * offsets[d], h = PENALTY;
            for (size_t i = d; i < all->n; i++) {
                if (!is_fitted(all, i) || all->each[i].direction != d) continue;
                const double z = 1e-6 * (double)text_confidence_value(weights, all->each[i].features) + offsets[d],
                             p = 1 / (1 + exp(-z));
                g += all->each[i].right - p, h += p * (1 - p);
            }
            offsets[d] += g / h;
        }
    }
}

static int by_value(const void *a, const void *b) {
    const pair *x = *(const pair *const *)a, *y = *(const pair *const *)b;
    return (x->value > y->value) - (x->value < y->value);
}

typedef struct table {
    size_t n;
    int64_t weights[FEATURES], values[GROUPS], probabilities[GROUPS];
    double *offsets; /* [pairs] of the directions; 0 for pairs that are not the first of a direction */
} table;

static int64_t value_of(const table *t, const pair *p) {
    return text_confidence_value(t->weights, p->features) + (int64_t)(1e6 * t->offsets[p->direction]);
}

/* Fit the rising table of a row; `sorted` has room for all pairs. */
static void fit_table(pairs *all, const pair **sorted, table *t) {
    double value[GROUPS], right[GROUPS], count[GROUPS];
    size_t n = 0;
    for (size_t i = 0; i < all->n; i++) {
        all->each[i].value = value_of(t, &all->each[i]);
        if (is_fitted(all, i)) sorted[n++] = &all->each[i];
    }
    qsort(sorted, n, sizeof *sorted, by_value);
    t->n = 0;
    for (size_t g = 0; g < GROUPS; g++) {
        const size_t begin = g * n / GROUPS, end = (g + 1) * n / GROUPS;
        double *v = &value[t->n], *r = &right[t->n], *c = &count[t->n];
        *v = *r = 0, *c = (double)(end - begin);
        for (size_t i = begin; i < end; i++) *v += (double)sorted[i]->value, *r += sorted[i]->right;
        t->n++;
        while (t->n > 1 && right[t->n - 2] / count[t->n - 2] >= right[t->n - 1] / count[t->n - 1]) {
            t->n--;
            value[t->n - 1] += value[t->n], right[t->n - 1] += right[t->n], count[t->n - 1] += count[t->n];
        }
    }
    for (size_t i = 0; i < t->n; i++) {
        t->values[i] = (int64_t)(value[i] / count[i]);
        t->probabilities[i] = (int64_t)(1e6 * (right[i] + 0.5) / (count[i] + 1));
    }
}

/* ---- 4. Reliability ------------------------------------------------------------------------------------ */

static int is_held(const pairs *all, size_t i, size_t direction) {
    const pair *p = &all->each[i];
    return i % 2 && p->row && (direction == SIZE_MAX || p->direction == direction);
}

static int by_confidence(const void *a, const void *b) {
    const pair *x = *(const pair *const *)a, *y = *(const pair *const *)b;
    return (x->p > y->p) - (x->p < y->p);
}

/* Return how many couples of a right and a wrong line the confidences order correctly; equal ones count half. */
static double couples_won(const pair **held, size_t n) {
    double won = 0, below = 0; /* wrong lines with less confidence */
    qsort(held, n, sizeof *held, by_confidence);
    for (size_t begin = 0, end; begin < n; begin = end) {
        double right = 0, wrong = 0;
        for (end = begin; end < n && !by_confidence(&held[begin], &held[end]); end++)
            right += held[end]->right, wrong += !held[end]->right;
        won += right * (below + wrong / 2);
        below += wrong;
    }
    return won;
}

/* Print the measures of a direction, or of all lines; `held` has room for all pairs. */
static void print_direction(const pairs *all, const pair **held, size_t direction) {
    double n[BINS] = { 0 }, right[BINS] = { 0 }, sum[BINS] = { 0 }, lines = 0, rights = 0, sums = 0, error = 0;
    size_t n_held = 0;
    char name[48] = "all";
    for (size_t i = 0; i < all->n; i++) {
        const pair *p = &all->each[i];
        if (!is_held(all, i, direction)) continue;
        const size_t bin = p->p < 1 ? (size_t)(p->p * (double)BINS) : BINS - 1;
        n[bin]++, right[bin] += p->right, sum[bin] += p->p;
        held[n_held++] = p;
    }
    for (size_t b = 0; b < BINS; b++)
        lines += n[b], rights += right[b], sums += sum[b], error += fabs(sum[b] - right[b]);
    if (!(lines > 0)) return;
    if (direction != SIZE_MAX)
        snprintf(name, sizeof name, "%.20s-%.20s", all->each[direction].cell[0], all->each[direction].cell[1]);
    printf("%-12s %7.0f %7.1f %% %10.1f %% %12.3f ", name, lines, 100 * rights / lines, 100 * sums / lines,
           error / lines);
    if (rights > 0 && rights < lines) printf("%6.3f\n", couples_won(held, n_held) / rights / (lines - rights));
    else printf("%6s\n", "-");
    if (direction != SIZE_MAX) return;
    printf("\n%-12s %7s %9s\n", "confidence", "lines", "right");
    for (size_t b = 0; b < BINS; b++)
        if (n[b] > 0)
            printf("%.1f to %.1f   %7.0f %7.1f %%\n", (double)b / (double)BINS, (double)(b + 1) / (double)BINS, n[b],
                   100 * right[b] / n[b]);
}

static void print_reliability(pairs *all, const pair **held, const table *t) {
    for (size_t i = 0; i < all->n; i++) {
        pair *p = &all->each[i];
        const table *x = p->row ? &t[p->row - 1] : t;
        const int64_t value = value_of(x, p);
        p->p = (double)text_confidence_at(x->values, x->probabilities, x->n, value) / (double)TEXT_CONFIDENCE_ONE;
    }
    printf("%-12s %7s %9s %12s %12s %6s\n", "held out", "lines", "right", "confidence", "error (ECE)", "AUC");
    for (size_t i = 0; i < all->n; i++)
        if (all->each[i].direction == i) print_direction(all, held, i);
    print_direction(all, held, SIZE_MAX);
}

/* ---- 5. Main ------------------------------------------------------------------------------------------- */

/* Write the model with the table. */
static moe_status save(const moe_model *model, const char *path, const pairs *of, const table *t, moe_error *e) {
    const size_t n = t[0].n > t[1].n ? t[0].n : t[1].n;
    int64_t *all = malloc((2 + ROWS * (FEATURES + 2 * GROUPS + of->n)) * sizeof *all);
    text_bytes names = { 0 };
    size_t at = 0;
    if (!all) return text_out_of_memory(e);
    all[at++] = TEXT_CONFIDENCE_FORM, all[at++] = (int64_t)n;
    for (size_t row = 0; row < ROWS; row++) {
        const table *x = &t[row];
        const size_t last = x->n - 1;
        for (size_t f = 0; f < FEATURES; f++) all[at++] = x->weights[f];
        for (size_t i = 0; i < n; i++) all[at++] = i < x->n ? x->values[i] : x->values[last] + (int64_t)(i - last);
        for (size_t i = 0; i < n; i++) all[at++] = x->probabilities[i < x->n ? i : last];
        for (size_t i = 0; i < of->n; i++) {
            const pair *p = &of->each[i];
            if (p->direction != i) continue;
            all[at++] = (int64_t)(1e6 * x->offsets[i]);
            if (!row) text_printf(&names, "%s%s-%s", names.length ? "\n" : "", p->cell[0], p->cell[1]);
        }
    }
    const moe_meta_entry entries[] = {
        { .key = TEXT_CONFIDENCE_KEY, .kind = MOE_META_INTS, .text = { (const char *)all, at * sizeof *all } },
        { .key = TEXT_CONFIDENCE_DIRECTIONS, .kind = MOE_META_TEXTS, .text = { names.data, names.length } }
    };
    const moe_save_params params = { .type = MOE_TYPE_KEEP,
                                     .experts = MOE_TYPE_KEEP,
                                     .entries = entries,
                                     .n_entries = sizeof entries / sizeof *entries };
    const moe_status status = names.failed ? text_out_of_memory(e) : moe_model_save(model, path, &params, e);
    text_bytes_free(&names);
    free(all);
    return status;
}

/* Fit both rows. Return 0 after a message if the pairs do not suffice. */
static int fit(pairs *all, const pair **sorted, table t[ROWS]) {
    enum { TURNS = 4 };
    size_t n = 0, right = 0;
    for (size_t i = 0; i < all->n; i++) n += all->each[i].row > 0, right += all->each[i].row && all->each[i].right;
    if (n < LEAST || right < LEAST / 20 || n - right < LEAST / 20) {
        program_error("%zu translations, of which %zu are right (chrF of at least %d), are too few to calibrate with: "
                      "give at least %d lines that the model translates, right ones and wrong ones",
                      n, right, RIGHT, LEAST);
        return 0;
    }
    for (size_t row = 0; row < ROWS; row++) {
        for (int turn = 0; turn < TURNS; turn++) {
            fit_weights(all, row, t[row].offsets, t[row].weights);
            fit_offsets(all, t[row].weights, t[row].offsets);
        }
        fit_table(all, sorted, &t[row]);
        if (t[row].n < 2) return program_error("no feature tells right translations from wrong ones"), 0;
    }
    return 1;
}

int reliability_fit(program_common *o, const char *path) {
    pairs all = { 0 };
    moetext_model *model = NULL;
    moetext *translator = NULL;
    const pair **sorted = NULL;
    table t[ROWS] = { { 0 } };
    moe_error e = { .code = MOE_OK };
    if (read_pairs(&all, path, &e)) return pairs_free(&all), program_failed(&e);
    if (moetext_model_open(o->model, NULL, &model, &e)) return pairs_free(&all), program_model_error(o->model, &e);
    text_settings settings = program_settings(o);
    int status = program_translator(o, &settings, model, "a translation", &translator);
    if (status < 0) {
        program_stoppable(translator);
        moe_status got = moetext_translate(translator, pull, done, &all, &e);
        program_stoppable(NULL);
        if (all.trouble.code) e = all.trouble, got = e.code;
        status = got ? program_failed(&e) : EXIT_DONE;
    }
    if (!status) {
        sorted = malloc((all.n + 1) * sizeof *sorted);
        for (size_t row = 0; row < ROWS; row++) t[row].offsets = calloc(all.n + 1, sizeof *t[row].offsets);
        if (!sorted || !t[0].offsets || !t[1].offsets) text_out_of_memory(&e), status = program_failed(&e);
    }
    if (!status && !fit(&all, sorted, t)) status = EXIT_USAGE;
    if (!status && save(moetext_model_engine(model), o->output, &all, t, &e))
        status = program_file_error(o->output, &e);
    if (!status && !o->quiet) print_reliability(&all, sorted, t);
    if (!status) status = program_printed();
    free(sorted), free(t[0].offsets), free(t[1].offsets);
    moetext_free(translator);
    moetext_model_close(model);
    pairs_free(&all);
    return status;
}
