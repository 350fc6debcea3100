/* moe-routing - make a web page that shows the routing of tokens to experts.
 *
 * Contents
 *   1. Options     the command line
 *   2. State       struct routing with all counts and tokens
 *   3. Counting    count the experts of a sentence
 *   4. Reading     parse JSON lines and check every field
 *   5. Text out    write escaped JSON and HTML
 *   6. Summary     write the statistics of a layer
 *   7. Languages   write the experts used by a language
 *   8. Tokens      write the tokens preferred by an expert
 *   9. Page        insert the data into tools/programs/routing.html
 *  10. Table       write a CSV row for each expert
 *  11. Main
 *
 * The input files are written by moe-translate, moe-score or moe-classify with --routing. Headers may differ only in
 * the languages. A line for each token and layer follows, ordered by sentence, layer and token. The program stores the
 * sentences that the page shows and one layer of the current sentence, for the context of tokens. Counts take 88 to 96
 * bytes for each pair of an expert and a distinct token.
 *
 * The page only draws charts of the numbers in <script id="data">, whose JSON keys are documented in README.md.
 */
#define _POSIX_C_SOURCE 200809L /* fileno */

#include "tools/programs/program.h"
#include "tools/programs/ranking.h"
#include "tools/text/json.h"

#include "routing-html.inc" /* routing_html[]: the lines of tools/programs/routing.html, made by the Makefile */

#include <cjson/cJSON.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ==== 1. Options ======================================================================================== */

typedef struct options {
    char **inputs; /* [n_inputs] file names; "-" is standard input, or standard output for `output` */
    size_t n_inputs;
    const char *output, *title;
    int top, min_count, experts, sentences, json, csv;
} options;

static const option_row own_rows[] = {
    { "output", "PAGE", "output page, or - for standard output; created only when complete", .letter = 'o',
      .group = GROUP_FILES, OPTION_MEMBER(ROW_WORD, output) },
    { "json", NULL, "write the summary as one JSON object instead of a page; standard output is the default for -o",
      .group = GROUP_FILES, OPTION_FLAG(json) },
    { "csv", NULL, "write a CSV row for each expert instead of a page; standard output is the default for -o",
      .group = GROUP_FILES, OPTION_FLAG(csv) },
    { "title", "TEXT", "title of the page (default: Routing of MODEL)", .group = "Page",
      OPTION_MEMBER(ROW_WORD, title) },
    { "top", "N", "number of tokens listed per expert, by weight and by lift; 0 disables (default: 12)",
      .group = "Page", OPTION_INT(top, 0, 10000) },
    { "min-count", "N", "rank tokens by lift only if the expert received them at least N times (default: 5)",
      .group = "Page", OPTION_INT(min_count, 1, 1 << 30) },
    { "experts", "N", "list the tokens of the N busiest experts of each layer (default: 1024)", .group = "Page",
      OPTION_INT(experts, 0, 1 << 24) },
    { "sentences", "N", "show the first N sentences; the counts include all sentences (default: 500)", .group = "Page",
      OPTION_INT(sentences, 0, 1 << 24) },
    { 0 },
};

static const option_program program = {
    .name = "moe-routing",
    .usage = "FILE... -o PAGE.html [OPTION]...\nFILE... --json | --csv [-o FILE]",
    .about =
        "Make a self-contained web page from files of moe-translate --routing.\n"
        "\n"
        "The page shows load and importance of every expert, dead experts, empty masks, the experts that each "
        "language uses, the preferred tokens of each expert, and sentences coloured by expert. All FILEs must be of "
        "the same model, but may be of different languages; - is standard input.",
    OPTION_LISTS(OPTION_OWN),
    .notes =
        "Load is the number of tokens of an expert. Importance is the sum of its tokens' weights. CV is the population "
        "standard deviation over experts, divided by the mean. Lift is a token's share among the tokens of an "
        "expert, divided by its share among the tokens of the layer. Encoder experts count for the source language, "
        "decoder experts for the target language (moe-translate -s, -t); they are listed in the order in which "
        "moe-prune --sample would keep them.\n"
        "\n"
        "Memory grows with the number of different (expert, token) pairs (about 100 bytes each), with --sentences "
        "and with the longest sentence, not with the number of lines.\n"
        "\n"
        "Exit status: 0 done, 2 usage error, 3 not a routing file, or out of memory, 4 input or output error.\n",
    .examples = "  moe-translate -m models/en-de-fr-es.bin -t de --routing r.jsonl < text\n"
                "  moe-routing r.jsonl -o r.html\n",
    .least = 1,
    .most = INT_MAX,
};

/* Check that the output is not an input. Return -1 or an exit status. */
static int keep_inputs(const options *o) {
    for (size_t i = 0; i < o->n_inputs && strcmp(o->output, "-") != 0; i++)
        if (strcmp(o->inputs[i], "-") == 0 ? program_is_open_file(fileno(stdin), o->output)
                                           : program_same_file(o->inputs[i], o->output))
            return program_usage_error("%s is an input and would be overwritten", o->output);
    return -1;
}

/* Parse the command line. Return -1 to continue, or an exit status. */
static int parse_options(int argc, char **argv, options *o) {
    *o = (options){ .top = 12, .min_count = 5, .experts = 1024, .sentences = 500 };
    const int status = option_parse(&program, argc, argv, o);
    if (status >= 0) return status;
    o->inputs = argv + optind;
    o->n_inputs = (size_t)(argc - optind);
    if (o->json && o->csv) return program_usage_error("--json and --csv are mutually exclusive");
    if (!o->output && !o->json && !o->csv) return program_usage_error("missing --output PAGE");
    if (!o->output) o->output = "-";
    if (o->json || o->csv) o->top = o->sentences = 0; /* the summary contains neither tokens nor sentences */
    return keep_inputs(o);
}

/* ==== 2. State ========================================================================================== */

enum {
    MAX_LINE = 1 << 28, /* bytes; 131,072 experts with their weights take 3 MB              */
    MAX_LAYERS = 2 * MOE_MAX_LAYERS,
    MAX_EXPERTS = 1 << 24, /* number of experts in all layers                                  */
    MAX_TOKEN = 1024,      /* bytes of a token's text, or of a name in the header              */
    CONTEXT = 6,           /* tokens of context on each side                                   */
    SHOWN = 8              /* maximum number of experts listed for a token of a sentence, by weight */
};

#define NO_TOKEN UINT32_MAX
static const int64_t max_whole = INT64_C(9007199254740991); /* the largest exact integer in JSON */

/* A distinct token, identified by id and text, because the input may use several texts for one id. */
typedef struct token {
    size_t text, length; /* position in routing.texts; length 0 if the token has no text */
    int64_t id;          /* -1 if absent */
    uint32_t page;       /* index of the token in the page, or NO_TOKEN */
} token;

/* A token routed to an expert. */
typedef struct pair {
    uint32_t expert, token;
    uint64_t count;
    double sum;                   /* sum of weights */
    float best;                   /* largest weight, which first occurred in `line` */
    uint32_t around[2 * CONTEXT]; /* preceding and following tokens in `line`, or NO_TOKEN */
    int64_t line;
} pair;

/* Use of a layer's experts by one language. */
typedef struct use {
    uint64_t tokens;
    expert_use experts; /* its `output` is not used */
} use;

typedef struct layer {
    char *name;
    moe_gate gate;
    int64_t experts, groups, k;
    uint64_t tokens, empty;
    double *load;        /* [experts] number of tokens */
    double *importance;  /* [experts] sum of weights */
    uint64_t *histogram; /* [experts + 1] number of tokens with 0, 1, ... experts */
    use *uses;           /* [uses_capacity] use by each language */
    size_t uses_capacity;
    uint64_t *seen; /* [seen_capacity] occurrences of each token in this layer */
    size_t seen_capacity;
    pair *pairs;
    size_t n_pairs, pairs_capacity;
    text_index index; /* hash index of `pairs` */
} layer;

/* A token in the layer being read; its experts and weights start at `first`. */
typedef struct row {
    uint32_t token;
    size_t first, n;
    int64_t position;
    int empty;
} row;

/* A token in a layer of a sentence that the page shows. */
typedef struct shown_row {
    uint64_t sentence;
    int64_t line;
    uint32_t layer, token, n;
    int empty;
    size_t first;
} shown_row;

typedef struct shown_weight {
    uint32_t expert;
    float weight;
} shown_weight;

typedef struct routing {
    const options *options;
    char *model;
    layer *layers;
    size_t n_layers;

    token *tokens;
    size_t n_tokens, tokens_capacity;
    text_index index; /* hash index of `tokens` */
    text_bytes texts;

    char **languages; /* [n_languages] */
    size_t n_languages, languages_capacity;
    ptrdiff_t spoken[2]; /* source and target language of the current file; -1 if unknown */

    const char *input; /* name of the current file */
    size_t files;      /* number of files already read */
    uint64_t number;   /* current line of the file, from 1 */
    int status;        /* EXIT_DONE, or the exit status after a message */
    int64_t line;      /* line of the current sentence; 0 before the first */
    size_t current;    /* layer being read */
    row *rows;
    uint32_t *experts;
    double *weights;
    size_t n_rows, rows_capacity, n_weights, experts_capacity, weights_capacity;
    uint64_t sentences;

    shown_row *shown;
    shown_weight *shown_weights;
    size_t n_shown, shown_capacity, n_shown_weights, shown_weights_capacity;
    uint32_t *order; /* [n_order] tokens of the page */
    size_t n_order;
} routing;

/* Report an error in the current line, unless the run has already failed. Return the exit status. Parts of the input
 * must be quoted with `quoted`. */
PROGRAM_PRINTF(2, 3) static int fail(routing *r, const char *format, ...) {
    char line[700];
    va_list arguments;
    if (r->status) return r->status;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    program_error("%s: line %llu: %s", r->input, (unsigned long long)r->number, line);
    return r->status = EXIT_MODEL;
}

static int no_memory(routing *r) { return fail(r, "out of memory"); }

/* A quotation from the input, truncated after about 60 bytes. */
typedef struct quote {
    char text[80];
} quote;

static quote quoted(const char *data) {
    quote q;
    const size_t length = strlen(data), keep = text_utf8_cut(data, length, 60);
    snprintf(q.text, sizeof q.text, "%.*s%s", (int)keep, data, keep < length ? "..." : "");
    return q;
}

/* Grow an array to at least `need` elements and zero the new ones. */
static int room(void *array, size_t *capacity, size_t need, size_t element) {
    const size_t before = *capacity;
    char *grown;
    if (need && need <= before) return 1;
    if (text_reserve(array, capacity, need, element, NULL)) return 0;
    memcpy(&grown, array, sizeof grown);
    memset(grown + before * element, 0, (*capacity - before) * element);
    return 1;
}

static void routing_free(routing *r) {
    for (size_t i = 0; i < r->n_layers; i++) {
        layer *l = &r->layers[i];
        free(l->name), free(l->load), free(l->importance), free(l->histogram), free(l->seen), free(l->pairs);
        for (size_t u = 0; u < l->uses_capacity; u++) expert_use_end(&l->uses[u].experts);
        free(l->uses);
        text_index_free(&l->index);
    }
    for (size_t i = 0; i < r->n_languages; i++) free(r->languages[i]);
    free(r->languages), free(r->model), free(r->layers), free(r->tokens), free(r->rows), free(r->experts);
    free(r->weights), free(r->shown), free(r->shown_weights), free(r->order);
    text_index_free(&r->index);
    text_bytes_free(&r->texts);
}

/* ==== 3. Counting ======================================================================================= */

static uint32_t mix(uint64_t x) { /* the finaliser of splitmix64 */
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)(x ^ (x >> 31));
}

/* Return the index of a token, adding it if necessary; NO_TOKEN if out of memory. */
static uint32_t intern(routing *r, int64_t id, const char *text, size_t length) {
    const uint32_t hash = mix((uint64_t)id + text_hash(text, length));
    const size_t begin = r->texts.length;
    uint32_t found;
    for (size_t at = 0; (found = text_index_next(&r->index, hash, &at)) != TEXT_NONE;) {
        const token *t = &r->tokens[found];
        if (t->id == id && t->length == length && memcmp(r->texts.data + t->text, text, length) == 0) return found;
    }
    text_append(&r->texts, text, length);
    if (r->texts.failed || !room(&r->tokens, &r->tokens_capacity, r->n_tokens + 1, sizeof *r->tokens) ||
        !text_index_add(&r->index, hash, r->n_tokens))
        return NO_TOKEN;
    r->tokens[r->n_tokens] = (token){ .text = begin, .length = length, .id = id, .page = NO_TOKEN };
    return (uint32_t)r->n_tokens++;
}

static pair *find_pair(layer *l, uint32_t expert, uint32_t token_number) {
    const uint32_t hash = mix(((uint64_t)expert << 32 | token_number) + 1);
    uint32_t found;
    for (size_t at = 0; (found = text_index_next(&l->index, hash, &at)) != TEXT_NONE;)
        if (l->pairs[found].expert == expert && l->pairs[found].token == token_number) return &l->pairs[found];
    if (!room(&l->pairs, &l->pairs_capacity, l->n_pairs + 1, sizeof *l->pairs) ||
        !text_index_add(&l->index, hash, l->n_pairs))
        return NULL;
    l->pairs[l->n_pairs] = (pair){ .expert = expert, .token = token_number, .best = -1 };
    return &l->pairs[l->n_pairs++];
}

/* Add row i of the current sentence to the pairs of its layer. */
static int count_pairs(routing *r, layer *l, size_t i) {
    const row *w = &r->rows[i];
    if (!room(&l->seen, &l->seen_capacity, r->n_tokens, sizeof *l->seen)) return no_memory(r);
    l->seen[w->token]++;
    for (size_t j = 0; j < w->n; j++) {
        double weight = r->weights[w->first + j];
        pair *p = find_pair(l, r->experts[w->first + j], w->token);
        if (!p) return no_memory(r);
        p->count++;
        p->sum += weight;
        if ((float)weight <= p->best) continue;
        p->best = (float)weight;
        p->line = r->line;
        for (size_t k = 0; k < CONTEXT; k++) {
            p->around[k] = i + k >= CONTEXT ? r->rows[i + k - CONTEXT].token : NO_TOKEN;
            p->around[CONTEXT + k] = i + 1 + k < r->n_rows ? r->rows[i + 1 + k].token : NO_TOKEN;
        }
    }
    return 0;
}

/* Store row i of the current sentence for the page, with its experts in order of descending weight. */
static int keep_row(routing *r, size_t i) {
    const row *w = &r->rows[i];
    size_t kept = 0;
    if (!room(&r->shown, &r->shown_capacity, r->n_shown + 1, sizeof *r->shown) ||
        !room(&r->shown_weights, &r->shown_weights_capacity, r->n_shown_weights + SHOWN, sizeof *r->shown_weights))
        return no_memory(r);
    shown_weight *to = r->shown_weights + r->n_shown_weights;
    for (size_t j = 0; j < w->n; j++) {
        shown_weight one = { r->experts[w->first + j], (float)r->weights[w->first + j] };
        size_t at = kept;
        while (at && to[at - 1].weight < one.weight) at--;
        if (at == SHOWN) continue;
        if (kept < SHOWN) kept++;
        memmove(to + at + 1, to + at, (kept - at - 1) * sizeof *to);
        to[at] = one;
    }
    r->shown[r->n_shown++] = (shown_row){ .sentence = r->sentences,
                                          .line = r->line,
                                          .layer = (uint32_t)r->current,
                                          .token = w->token,
                                          .n = (uint32_t)w->n,
                                          .empty = w->empty,
                                          .first = r->n_shown_weights };
    r->n_shown_weights += kept;
    return 0;
}

/* Return 1 if a layer belongs to the encoder, judging by its name. */
static int encodes(const layer *l) { return strncmp(l->name, "encoder.", 8) == 0; }

/* Count the experts of the current sentence for its language, as moe-prune does. */
static int count_use(routing *r, layer *l) {
    const ptrdiff_t language = r->spoken[!encodes(l)];
    if (language < 0) return 0;
    if (!room(&l->uses, &l->uses_capacity, (size_t)language + 1, sizeof *l->uses)) return no_memory(r);
    use *u = &l->uses[language];
    if (!u->experts.first && !expert_use_begin(&u->experts, (size_t)l->experts)) return no_memory(r);
    u->tokens += r->n_rows;
    for (size_t i = 0; i < r->n_rows; i++) {
        const row *w = &r->rows[i];
        size_t best = w->first;
        for (size_t j = w->first; j < w->first + w->n; j++) {
            u->experts.sum[r->experts[j]] += (double)(float)r->weights[j];
            if (r->weights[j] > r->weights[best]) best = j;
        }
        if (!w->n) continue;
        u->experts.first[r->experts[best]]++;
        u->experts.weight[r->experts[best]] += (double)(float)r->weights[best];
    }
    return 0;
}

/* Count the rows of a complete layer of a sentence. */
static void count_rows(routing *r) {
    if (!r->n_rows) return; /* the file's first sentence has not been read */
    layer *l = &r->layers[r->current];
    count_use(r, l);
    for (size_t i = 0; i < r->n_rows && !r->status; i++) {
        const row *w = &r->rows[i];
        l->tokens++;
        l->empty += (uint64_t)w->empty;
        l->histogram[w->n]++;
        for (size_t j = w->first; j < w->first + w->n; j++) {
            l->load[r->experts[j]]++;
            l->importance[r->experts[j]] += r->weights[j];
        }
        if (r->options->top) count_pairs(r, l, i);
        if (r->sentences <= (uint64_t)r->options->sentences) keep_row(r, i);
    }
    r->n_rows = r->n_weights = 0;
}

/* ==== 4. Reading ======================================================================================== */

/* Find the named fields of an object and ignore others; a repeated field is an error. found[i] is NULL if absent. */
static void fields(routing *r, const cJSON *object, const char *const names[], const cJSON *found[], size_t n) {
    for (size_t i = 0; i < n; i++) found[i] = NULL;
    for (const cJSON *c = object->child; c; c = c->next)
        for (size_t i = 0; i < n; i++) {
            if (!c->string || strcmp(c->string, names[i]) != 0) continue;
            if (found[i]) fail(r, "%s: appears twice", names[i]);
            found[i] = c;
        }
}

static int64_t whole(routing *r, const char *name, const cJSON *from, int64_t low, int64_t high) {
    const double v = from ? from->valuedouble : 0;
    if (!from) fail(r, "%s: is missing", name);
    else if (!cJSON_IsNumber(from) || !(v >= (double)low && v <= (double)high) || floor(v) != v)
        fail(r, "%s: must be a whole number from %lld to %lld", name, (long long)low, (long long)high);
    return r->status ? low : (int64_t)v;
}

static const char *string(routing *r, const char *name, const cJSON *from) {
    if (!from) fail(r, "%s: is missing", name);
    else if (!cJSON_IsString(from)) fail(r, "%s: must be a string", name);
    else if (strlen(from->valuestring) > MAX_TOKEN) fail(r, "%s: longer than %d bytes", name, MAX_TOKEN);
    return r->status || !from ? "" : from->valuestring;
}

static const cJSON *array(routing *r, const char *name, const cJSON *from) {
    if (!from) fail(r, "%s: is missing", name);
    else if (!cJSON_IsArray(from)) fail(r, "%s: must be a list", name);
    return r->status || !from ? NULL : from->child;
}

/* Add a layer of the first file and zero its counts. */
static int add_layer(routing *r, const char *name, layer l) {
    const size_t n = (size_t)l.experts;
    l.name = text_copy(name, strlen(name));
    l.load = calloc(n + 1, sizeof *l.load);
    l.importance = calloc(n + 1, sizeof *l.importance);
    l.histogram = calloc(n + 1, sizeof *l.histogram);
    if (!l.name || !l.load || !l.importance || !l.histogram) no_memory(r);
    r->layers[r->n_layers++] = l;
    return r->status;
}

/* Read the header's description of layer `at`: {"layer":"encoder.2","experts":32,"groups":0,"k":2,"gate":"threshold"}.
 * Layers of later files must match those of the first. Add the number of experts to *total. */
static int read_layer(routing *r, const cJSON *from, size_t at, int64_t *total) {
    static const char *const names[] = { "layer", "experts", "groups", "k", "gate" };
    const cJSON *f[5];
    if (!cJSON_IsObject(from)) return fail(r, "layers: must be a list of objects");
    fields(r, from, names, f, 5);
    const char *name = string(r, "layer", f[0]);
    layer l = { .experts = whole(r, "experts", f[1], 1, MAX_EXPERTS) };
    l.groups = whole(r, "groups", f[2], 0, l.experts);
    l.k = whole(r, "k", f[3], 0, l.experts);
    const char *gate = string(r, "gate", f[4]);
    if (!*name) fail(r, "layer: is empty");
    for (size_t i = 0; i < at; i++)
        if (strcmp(r->layers[i].name, name) == 0) fail(r, "layer: '%s' appears twice", quoted(name).text);
    if (!moe_gate_parse(gate, &l.gate))
        fail(r, "gate: must be softmax, topk, threshold, sigmoid or batchwise, not '%s'", quoted(gate).text);
    if (l.groups && l.experts % l.groups)
        fail(r, "groups: %lld does not divide %lld experts", (long long)l.groups, (long long)l.experts);
    if ((*total += l.experts) > MAX_EXPERTS) fail(r, "experts: more than %d in total", MAX_EXPERTS);
    if (r->status) return r->status;
    if (!r->files) return add_layer(r, name, l);
    const layer *first = &r->layers[at];
    if (strcmp(name, first->name) != 0 || l.experts != first->experts || l.groups != first->groups || l.k != first->k ||
        l.gate != first->gate)
        fail(r, "layers: '%s' differs from the first file", quoted(name).text);
    return r->status;
}

/* Read the source or target language of a file. Return its index in r->languages, or -1 if unknown. */
static ptrdiff_t read_language(routing *r, const char *key, const cJSON *from) {
    if (!from) return -1;
    const char *code = string(r, key, from);
    for (size_t i = 0; i < r->n_languages; i++)
        if (strcmp(r->languages[i], code) == 0) return (ptrdiff_t)i;
    char *copy = text_copy(code, strlen(code));
    if (!copy || !room(&r->languages, &r->languages_capacity, r->n_languages + 1, sizeof *r->languages))
        return free(copy), no_memory(r), -1;
    r->languages[r->n_languages] = copy;
    return (ptrdiff_t)r->n_languages++;
}

/* Read a header. All files must be from the same model. */
static int read_header(routing *r, const cJSON *from) {
    static const char *const names[] = { "model", "layers", "source", "target" };
    const cJSON *f[4];
    int64_t total = 0;
    size_t at = 0;
    fields(r, from, names, f, 4);
    const char *model = string(r, "model", f[0]);
    if (!f[1]) return fail(r, "layers: missing from the header");
    const int n = cJSON_IsArray(f[1]) ? cJSON_GetArraySize(f[1]) : 0;
    if (n < 1 || n > MAX_LAYERS) return fail(r, "layers: must be a list of 1 to %d layers", MAX_LAYERS);
    if (r->status) return r->status;
    if (r->files && strcmp(model, r->model) != 0)
        return fail(r, "model: '%s', but '%s' in the first file", quoted(model).text, quoted(r->model).text);
    if (r->files && (size_t)n != r->n_layers) return fail(r, "layers: %d, but %zu in the first file", n, r->n_layers);
    if (!r->files) {
        r->model = text_copy(model, strlen(model));
        r->layers = calloc((size_t)n, sizeof *r->layers);
        if (!r->model || !r->layers) return no_memory(r);
    }
    for (const cJSON *c = f[1]->child; c && !r->status; c = c->next) read_layer(r, c, at++, &total);
    r->spoken[0] = read_language(r, "source", f[2]);
    r->spoken[1] = read_language(r, "target", f[3]);
    return r->status;
}

/* Append lists like "experts":[3,17] and "weights":[0.61,0.39] to r->experts and r->weights; return their length. */
static size_t read_weights(routing *r, const layer *l, const cJSON *experts, const cJSON *weights) {
    const cJSON *e = array(r, "experts", experts), *w = array(r, "weights", weights);
    int64_t last = -1;
    size_t n = 0;
    for (; e && !r->status; e = e->next, w = w ? w->next : NULL) {
        const int64_t expert = whole(r, "experts", e, 0, l->experts - 1);
        const size_t at = r->n_weights + n++;
        if (expert <= last) fail(r, "experts: must ascend, but %lld follows %lld", (long long)expert, (long long)last);
        if (!w) fail(r, "weights: fewer weights than experts");
        /* products of softmax values exceed 1 only by rounding errors */
        else if (!cJSON_IsNumber(w) || !(w->valuedouble >= 0 && w->valuedouble <= 1.001))
            fail(r, "weights: must be between 0 and 1");
        if (!room(&r->experts, &r->experts_capacity, at + 1, sizeof *r->experts) ||
            !room(&r->weights, &r->weights_capacity, at + 1, sizeof *r->weights))
            return no_memory(r), 0;
        r->experts[at] = (uint32_t)expert;
        r->weights[at] = w ? w->valuedouble : 0;
        last = expert;
    }
    if (w) fail(r, "weights: more weights than experts");
    return n;
}

/* Check that sentences, layers of a sentence and positions of a layer are in ascending order. */
static void check_order(routing *r, int64_t line, size_t index, int64_t position) {
    const int64_t before = r->n_rows ? r->rows[r->n_rows - 1].position : -1;
    if (line < r->line)
        fail(r, "line: %lld follows %lld; sentences must be in order", (long long)line, (long long)r->line);
    else if (line == r->line && index < r->current)
        fail(r, "layer: '%s' follows '%s' in a sentence; layers must be in the header's order",
             quoted(r->layers[index].name).text, quoted(r->layers[r->current].name).text);
    else if (line == r->line && index == r->current && position <= before)
        fail(r, "position: %lld follows %lld; positions must ascend", (long long)position, (long long)before);
}

/* Return the index of a layer, or r->n_layers if the name is unknown. */
static size_t find_layer(const routing *r, const char *name) {
    size_t i = r->current; /* usually the layer being read */
    if (strcmp(r->layers[i].name, name) == 0) return i;
    for (i = 0; i < r->n_layers && strcmp(r->layers[i].name, name) != 0;) i++;
    return i;
}

static int read_token(routing *r, const cJSON *from) {
    static const char *const names[] = { "line", "layer", "position", "id", "token", "experts", "weights", "empty" };
    const cJSON *f[8];
    fields(r, from, names, f, 8);
    const int64_t line = whole(r, "line", f[0], 1, max_whole);
    const char *name = string(r, "layer", f[1]);
    const int64_t position = whole(r, "position", f[2], 0, INT32_MAX),
                  id = f[3] ? whole(r, "id", f[3], 0, INT32_MAX) : -1;
    const char *text = f[4] ? string(r, "token", f[4]) : "";
    const size_t index = find_layer(r, name);
    if (index == r->n_layers) return fail(r, "layer: '%s' is not in the header", quoted(name).text);
    check_order(r, line, index, position);
    if (!f[7]) fail(r, "empty: is missing");
    else if (!cJSON_IsBool(f[7])) fail(r, "empty: must be true or false");
    if (!r->status && (line != r->line || index != r->current)) {
        count_rows(r);
        r->sentences += line != r->line;
        r->line = line;
        r->current = index;
    }
    const size_t n = read_weights(r, &r->layers[index], f[5], f[6]);
    if (!n && !cJSON_IsTrue(f[7])) fail(r, "experts: the list is empty, but empty is false");
    if (r->status) return r->status;
    const uint32_t number = intern(r, id, text, strlen(text));
    if (number == NO_TOKEN || !room(&r->rows, &r->rows_capacity, r->n_rows + 1, sizeof *r->rows)) return no_memory(r);
    r->rows[r->n_rows++] =
        (row){ .token = number, .first = r->n_weights, .n = n, .position = position, .empty = cJSON_IsTrue(f[7]) };
    r->n_weights += n;
    return 0;
}

/* Return 1 if JSON contains \u0000, where cJSON would truncate the string. */
static int has_nul(const char *data, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if (!data[i]) return 1;
        if (data[i] != '\\') continue;
        if (length - i > 5 && memcmp(data + i, "\\u0000", 6) == 0) return 1;
        i++;
    }
    return 0;
}

static int read_line(routing *r, const char *data, size_t length) { /* data[length] is 0 */
    const size_t valid = text_utf8_valid(data, length);
    const char *end = data;
    if (strspn(data, " \t\r") == length) return fail(r, r->number == 1 ? "the header is missing" : "blank line");
    if (valid != length) return fail(r, "byte %zu is not valid UTF-8", valid + 1);
    if (has_nul(data, length)) return fail(r, "contains a NUL character");
    cJSON *object = cJSON_ParseWithLengthOpts(data, length + 1, &end, 1);
    if (!object) fail(r, "invalid JSON at byte %zu", (size_t)(end - data) + 1);
    else if (!cJSON_IsObject(object)) fail(r, "not a JSON object");
    else (r->number == 1 ? read_header : read_token)(r, object);
    cJSON_Delete(object);
    return r->status;
}

static void read_all(routing *r, FILE *in) {
    static char block[1 << 16];
    text_bytes line = { 0 };
    r->number = 0;
    r->line = 0;
    r->current = 0;
    for (size_t got; !r->status && (got = fread(block, 1, sizeof block, in)) > 0;) {
        for (size_t at = 0; at < got && !r->status;) {
            const char *end = memchr(block + at, '\n', got - at);
            const size_t take = end ? (size_t)(end - block) - at : got - at;
            if (!line.length) r->number++;
            text_append(&line, block + at, take);
            at += take + (end != NULL);
            if (line.failed) no_memory(r);
            else if (line.length > MAX_LINE) fail(r, "longer than %d bytes", MAX_LINE);
            else if (end) read_line(r, line.data, line.length), line.length = 0;
        }
    }
    if (!r->status && ferror(in)) {
        program_error("%s: %s, after line %llu", r->input, strerror(errno), (unsigned long long)r->number);
        r->status = EXIT_INPUT_OUTPUT;
    }
    if (!r->status && line.length) read_line(r, line.data, line.length);
    if (!r->number) r->number = 1, fail(r, "the header is missing");
    if (!r->status) count_rows(r);
    r->files++;
    text_bytes_free(&line);
}

static void read_input(routing *r, const char *name) {
    const int is_stdin = strcmp(name, "-") == 0;
    FILE *in = is_stdin ? stdin : fopen(name, "rb");
    r->input = is_stdin ? "standard input" : name;
    if (in) read_all(r, in);
    else program_error("%s: %s", name, strerror(errno)), r->status = EXIT_INPUT_OUTPUT;
    if (in && !is_stdin) fclose(in);
}

/* ==== 5. Text out ======================================================================================= */

static void put_html(text_bytes *out, const char *data) {
    text_bytes clean = { 0 };
    text_append_clean(&clean, data, strlen(data));
    out->failed |= clean.failed;
    for (const char *c = clean.failed ? "" : clean.data; *c; c++) {
        switch (*c) {
        case '<': text_append_string(out, "&lt;"); break;
        case '>': text_append_string(out, "&gt;"); break;
        case '&': text_append_string(out, "&amp;"); break;
        case '"': text_append_string(out, "&quot;"); break;
        case '\'': text_append_string(out, "&#39;"); break;
        default: text_append(out, c, 1);
        }
    }
    text_bytes_free(&clean);
}

/* ==== 6. Summary ======================================================================================== */

typedef struct spread {
    double sum, cv, max_over_mean; /* cv, max_over_mean: NaN if the sum is 0 */
} spread;

static spread spread_of(const double *v, size_t n) {
    double sum = 0, squares = 0, most = 0;
    for (size_t i = 0; i < n; i++) sum += v[i];
    double mean = sum / (double)n;
    for (size_t i = 0; i < n; i++) {
        squares += (v[i] - mean) * (v[i] - mean);
        most = v[i] > most ? v[i] : most;
    }
    if (!(mean > 0)) return (spread){ sum, NAN, NAN };
    return (spread){ sum, sqrt(squares / (double)n) / mean, most / mean };
}

enum { DIGITS = 12 }; /* significant digits of sums and of values computed from sums */

/* Write the sum of each block of `each` values; v has n values. */
static void put_sums(json *j, const char *key, const double *v, size_t n, size_t each) {
    json_open(j, key, '[');
    for (size_t i = 0; i < n; i += each) {
        double sum = 0;
        for (size_t k = 0; k < each; k++) sum += v[i + k];
        json_digits(j, NULL, sum, DIGITS);
    }
    json_close(j, ']');
}

/* Write the histogram as pairs: a number of experts, and the number of tokens with that many experts. */
static void put_histogram(const layer *l, json *j) {
    json_open(j, "histogram", '[');
    for (size_t i = 0; i <= (size_t)l->experts; i++) {
        if (!l->histogram[i]) continue;
        json_open(j, NULL, '[');
        json_whole(j, NULL, (int64_t)i);
        json_whole(j, NULL, (int64_t)l->histogram[i]);
        json_close(j, ']');
    }
    json_close(j, ']');
}

/* Write the members of a layer into the open object. */
static void put_layer(const layer *l, json *j) {
    size_t n = (size_t)l->experts;
    const size_t grouped = l->groups ? n : 0, groups = l->groups ? (size_t)l->groups : 1;
    const spread load = spread_of(l->load, n), importance = spread_of(l->importance, n);
    uint64_t dead = 0;
    for (size_t i = 0; i < n; i++) dead += l->load[i] == 0;
    json_text(j, "layer", l->name);
    json_text(j, "gate", moe_gate_name(l->gate));
    json_whole(j, "experts", l->experts);
    json_whole(j, "groups", l->groups);
    json_whole(j, "k", l->k);
    json_whole(j, "tokens", (int64_t)l->tokens);
    json_fixed(j, "pairs", load.sum, 0);
    json_digits(j, "experts_per_token", load.sum / (double)l->tokens, DIGITS);
    put_histogram(l, j);
    json_whole(j, "empty", (int64_t)l->empty);
    json_digits(j, "empty_share", (double)l->empty / (double)l->tokens, DIGITS);
    json_digits(j, "cv_importance", importance.cv, DIGITS);
    json_digits(j, "cv_load", load.cv, DIGITS);
    json_digits(j, "max_over_mean_load", load.max_over_mean, DIGITS);
    json_whole(j, "dead", (int64_t)dead);
    json_break(j);
    put_sums(j, "load", l->load, n, 1);
    json_break(j);
    put_sums(j, "importance", l->importance, n, 1);
    put_sums(j, "group_load", l->load, grouped, grouped / groups);
    put_sums(j, "group_importance", l->importance, grouped, grouped / groups);
}

/* Return the ranking that moe-prune uses by default. */
static expert_rank rank_of(const routing *r) {
    int has_encoder = 0;
    for (size_t i = 0; i < r->n_layers; i++) has_encoder |= encodes(&r->layers[i]);
    return rank_default(has_encoder);
}

/* Write the JSON object of --json or of the page up to the opening bracket of its list of layers. */
static void put_head(const routing *r, const char *title, json *j) {
    char made_by[64];
    uint64_t routed = 0;
    for (size_t i = 0; i < r->n_layers; i++) routed += r->layers[i].tokens;
    snprintf(made_by, sizeof made_by, "moe-routing %s", moe_version());
    json_open(j, NULL, '{');
    json_text(j, "title", title);
    json_text(j, "model", r->model);
    json_text(j, "made_by", made_by);
    json_whole(j, "sentences", (int64_t)r->sentences);
    json_whole(j, "tokens_routed", (int64_t)routed);
    json_text(j, "rank", rank_names[rank_of(r)]);
    json_open(j, "layers", '[');
    json_break(j);
}

/* ==== 7. Languages ====================================================================================== */

static void put_use(const use *u, const char *language, size_t experts, expert_rank by, ranked_expert *order, json *j) {
    double all = 0, so_far = 0;
    for (size_t i = 0; i < experts; i++) {
        order[i] = rank_expert(&u->experts, by, i);
        all += order[i].sum;
    }
    rank_sort(order, experts);
    json_break(j);
    json_open(j, NULL, '{');
    json_text(j, "language", language);
    json_whole(j, "tokens", (int64_t)u->tokens);
    json_open(j, "experts", '[');
    for (size_t i = 0; i < experts; i++) {
        if (!(order[i].sum > 0)) continue;
        so_far += order[i].sum;
        json_open(j, NULL, '[');
        json_whole(j, NULL, (int64_t)order[i].expert);
        json_digits(j, NULL, order[i].sum / all, DIGITS);
        json_digits(j, NULL, so_far / all, DIGITS);
        json_close(j, ']');
    }
    json_close(j, ']');
    json_close(j, '}');
}

/* Write the use of a layer by each language, in the order of the input files. */
static void put_languages(const routing *r, const layer *l, json *j) {
    const size_t n = (size_t)l->experts;
    ranked_expert *order = malloc(n * sizeof *order);
    j->out->failed |= !order;
    json_break(j);
    json_open(j, "languages", '[');
    for (size_t i = 0; order && i < r->n_languages && i < l->uses_capacity; i++)
        if (l->uses[i].tokens) put_use(&l->uses[i], r->languages[i], n, rank_of(r), order, j);
    json_close(j, ']');
    free(order);
}

/* ==== 8. Tokens ========================================================================================= */

/* A token that may be listed for an expert, sorted by descending `key` and `second`, then by first occurrence. */
typedef struct candidate {
    double key, second;
    const pair *pair;
} candidate;

static int better(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->key != y->key) return x->key > y->key ? -1 : 1;
    if (x->second != y->second) return x->second > y->second ? -1 : 1;
    return x->pair->token < y->pair->token ? -1 : x->pair->token > y->pair->token;
}

static int by_expert(const void *a, const void *b) {
    const pair *x = a, *y = b;
    if (x->expert != y->expert) return x->expert < y->expert ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

/* Write the index of a token in the page. Indices are assigned in order of first use. */
static void put_token(routing *r, const char *key, uint32_t number, json *j) {
    token *t = &r->tokens[number];
    if (t->page == NO_TOKEN) {
        t->page = (uint32_t)r->n_order;
        r->order[r->n_order++] = number;
    }
    json_whole(j, key, t->page);
}

static void put_around(routing *r, const char *key, const uint32_t *around, json *j) {
    json_open(j, key, '[');
    for (size_t i = 0; i < CONTEXT; i++)
        if (around[i] != NO_TOKEN) put_token(r, NULL, around[i], j);
    json_close(j, ']');
}

/* Write an expert and its n > 0 pairs `p`; `c` has room for n candidates. */
static void put_expert(routing *r, const layer *l, const pair *p, size_t n, candidate *c, json *j) {
    size_t top = (size_t)r->options->top, ranked = 0;
    for (size_t i = 0; i < n; i++) c[i] = (candidate){ (double)p[i].best, p[i].sum, &p[i] };
    qsort(c, n, sizeof *c, better);
    json_open(j, NULL, '{');
    json_whole(j, "expert", p->expert);
    json_open(j, "weight", '[');
    for (size_t i = 0; i < n && i < top; i++) {
        const pair *q = c[i].pair;
        json_open(j, NULL, '{');
        put_token(r, "t", q->token, j);
        json_whole(j, "n", (int64_t)q->count);
        json_float(j, "w", q->best);
        json_digits(j, "sum", q->sum, DIGITS);
        json_whole(j, "line", q->line);
        put_around(r, "before", q->around, j);
        put_around(r, "after", q->around + CONTEXT, j);
        json_close(j, '}');
    }
    json_close(j, ']');
    json_open(j, "lift", '[');
    for (size_t i = 0; i < n; i++)
        if (p[i].count >= (uint64_t)r->options->min_count)
            c[ranked++] =
                (candidate){ (double)p[i].count / l->load[p->expert] * (double)l->tokens / (double)l->seen[p[i].token],
                             (double)p[i].count, &p[i] };
    qsort(c, ranked, sizeof *c, better);
    for (size_t i = 0; i < ranked && i < top; i++) {
        const pair *q = c[i].pair;
        json_open(j, NULL, '{');
        put_token(r, "t", q->token, j);
        json_whole(j, "n", (int64_t)q->count);
        json_whole(j, "all", (int64_t)l->seen[q->token]);
        json_digits(j, "lift", c[i].key, DIGITS);
        json_close(j, '}');
    }
    json_close(j, ']');
    json_close(j, '}');
}

/* Write the experts of a layer with the largest loads. Sort the pairs, which invalidates the layer's index. */
static void put_preferred(routing *r, layer *l, json *j) {
    const size_t n = (size_t)l->experts, listed = (size_t)r->options->experts < n ? (size_t)r->options->experts : n;
    ranked_expert *rank = malloc(n * sizeof *rank);
    char *wanted = calloc(n, 1);
    candidate *c = malloc((r->n_tokens + 1) * sizeof *c);
    j->out->failed |= !rank || !wanted || !c;
    for (size_t i = 0; !j->out->failed && i < n; i++)
        rank[i] = (ranked_expert){ .importance = l->load[i], .expert = i };
    if (!j->out->failed) rank_sort(rank, n);
    for (size_t i = 0; !j->out->failed && i < listed; i++) wanted[rank[i].expert] = 1;
    if (l->n_pairs) qsort(l->pairs, l->n_pairs, sizeof *l->pairs, by_expert);
    for (size_t i = 0, end; !j->out->failed && i < l->n_pairs; i = end) {
        for (end = i; end < l->n_pairs && l->pairs[end].expert == l->pairs[i].expert;) end++;
        if (!wanted[l->pairs[i].expert]) continue;
        if (j->more) json_break(j);
        put_expert(r, l, l->pairs + i, end - i, c, j);
    }
    free(rank), free(wanted), free(c);
}

/* ==== 9. Page =========================================================================================== */

static void put_row(routing *r, const shown_row *s, json *j) {
    json_open(j, NULL, '[');
    put_token(r, NULL, s->token, j);
    json_whole(j, NULL, s->empty);
    json_whole(j, NULL, s->n);
    for (size_t k = 0; k < s->n && k < SHOWN; k++) {
        json_whole(j, NULL, r->shown_weights[s->first + k].expert);
        json_float(j, NULL, r->shown_weights[s->first + k].weight);
    }
    json_close(j, ']');
}

static void put_sentences(routing *r, json *j) {
    json_open(j, "text", '[');
    for (size_t i = 0, end; i < r->n_shown; i = end) { /* sentences */
        const uint64_t sentence = r->shown[i].sentence;
        if (i) json_break(j);
        json_open(j, NULL, '{');
        json_whole(j, "line", r->shown[i].line);
        json_open(j, "layers", '[');
        for (end = i; end < r->n_shown && r->shown[end].sentence == sentence;) { /* layers of the sentence */
            const uint32_t number = r->shown[end].layer;
            json_open(j, NULL, '{');
            json_whole(j, "layer", number);
            json_open(j, "tokens", '[');
            for (; end < r->n_shown && r->shown[end].sentence == sentence && r->shown[end].layer == number; end++)
                put_row(r, &r->shown[end], j);
            json_close(j, ']');
            json_close(j, '}');
        }
        json_close(j, ']');
        json_close(j, '}');
    }
    json_close(j, ']');
}

/* Write the tokens of the page in order of their indices: text and id, or null. */
static void put_tokens(const routing *r, json *j) {
    json_open(j, "tokens", '[');
    for (size_t i = 0; i < r->n_order; i++) {
        const token *t = &r->tokens[r->order[i]];
        json_open(j, NULL, '[');
        if (t->length) json_string(j, NULL, r->texts.data + t->text, t->length);
        else json_null(j, NULL);
        if (t->id < 0) json_null(j, NULL);
        else json_whole(j, NULL, t->id);
        json_close(j, ']');
    }
    json_close(j, ']');
}

/* Write the JSON object of --json or of the page; the page's object has more members. */
static void put_data(routing *r, const char *title, text_bytes *out) {
    const int all = !r->options->json;
    json j = { .out = out, .script = 1 };
    r->order = malloc((r->n_tokens + 1) * sizeof *r->order);
    out->failed |= !r->order;
    put_head(r, title, &j);
    for (size_t i = 0; i < r->n_layers && !out->failed; i++) {
        json_break(&j);
        json_open(&j, NULL, '{');
        put_layer(&r->layers[i], &j);
        put_languages(r, &r->layers[i], &j);
        if (all) {
            json_break(&j);
            json_open(&j, "preferred", '[');
            put_preferred(r, &r->layers[i], &j);
            json_close(&j, ']');
        }
        json_close(&j, '}');
    }
    json_close(&j, ']');
    if (all && !out->failed) {
        json_break(&j);
        json_whole(&j, "top", r->options->top);
        json_whole(&j, "min_count", r->options->min_count);
        put_sentences(r, &j);
        json_break(&j);
        put_tokens(r, &j);
    }
    json_close(&j, '}');
}

/* Write tools/programs/routing.html with @TITLE@ and @DATA@ replaced. */
static void put_page(routing *r, const char *title, text_bytes *out) {
    for (size_t i = 0; i < sizeof routing_html / sizeof *routing_html; i++) {
        const char *line = routing_html[i];
        for (const char *at = line; (at = strchr(at, '@')); at++) {
            const size_t skip = strncmp(at, "@TITLE@", 7) == 0 ? 7 : strncmp(at, "@DATA@", 6) == 0 ? 6 : 0;
            if (!skip) continue;
            text_append(out, line, (size_t)(at - line));
            if (skip == 7) put_html(out, title);
            else put_data(r, title, out);
            line = at + skip;
            at = line - 1;
        }
        text_append_string(out, line);
    }
}

/* ==== 10. Table ========================================================================================= */

static void put_cell(text_bytes *out, const char *data) {
    text_bytes clean = { 0 };
    text_append_clean(&clean, data, strlen(data));
    out->failed |= clean.failed;
    const char *text = clean.failed ? "" : clean.data;
    const int quotes = strpbrk(text, ",\"\r\n") != NULL;
    if (quotes) text_append(out, "\"", 1);
    for (const char *c = text; *c; c++) text_append(out, "\"\"", *c == '"' ? 2 : 0), text_append(out, c, *c != '"');
    if (quotes) text_append(out, "\"", 1);
    text_bytes_free(&clean);
}

/* Write an expert's share of each language's weights, or nothing if the language does not use the layer. */
static void put_shares(const routing *r, const layer *l, size_t expert, text_bytes *out) {
    for (size_t i = 0; i < r->n_languages; i++) {
        const use *u = i < l->uses_capacity && l->uses[i].tokens ? &l->uses[i] : NULL;
        double all = 0;
        for (size_t e = 0; u && e < (size_t)l->experts; e++) all += u->experts.sum[e];
        text_append(out, ",", 1);
        if (u && all > 0) text_printf(out, "%.*g", DIGITS, u->experts.sum[expert] / all);
    }
}

static void put_table(const routing *r, text_bytes *out) {
    text_append_string(out, "layer,gate,k,tokens,expert,load,importance");
    for (size_t i = 0; i < r->n_languages; i++) text_append(out, ",", 1), put_cell(out, r->languages[i]);
    text_append(out, "\n", 1);
    for (size_t i = 0; i < r->n_layers && !out->failed; i++) {
        const layer *l = &r->layers[i];
        for (size_t e = 0; e < (size_t)l->experts && !out->failed; e++) {
            put_cell(out, l->name);
            text_printf(out, ",%s,%lld,%llu,%zu,%.*g,%.*g", moe_gate_name(l->gate), (long long)l->k,
                        (unsigned long long)l->tokens, e, DIGITS, l->load[e], DIGITS, l->importance[e]);
            put_shares(r, l, e, out);
            text_append(out, "\n", 1);
        }
    }
}

/* ==== 11. Main ========================================================================================== */

/* Write the page, the JSON summary or the table. */
static void put_output(routing *r, text_bytes *out) {
    const options *o = r->options;
    text_bytes title = { 0 };
    const char *name = o->title ? o->title : r->model ? r->model : "";
    text_append_string(&title, o->title ? "" : "Routing of ");
    text_append_clean(&title, name, strlen(name));
    out->failed = title.failed;
    if (!title.failed && o->csv) put_table(r, out);
    else if (!title.failed && o->json) put_data(r, title.data, out), text_append(out, "\n", 1);
    else if (!title.failed) put_page(r, title.data, out);
    text_bytes_free(&title);
    if (!out->failed) return;
    program_error("out of memory");
    r->status = EXIT_MODEL;
}

static int run(const options *o) {
    routing r = { .options = o };
    text_bytes page = { 0 };
    for (size_t i = 0; i < o->n_inputs && !r.status; i++) read_input(&r, o->inputs[i]);
    if (!r.status) put_output(&r, &page);
    if (!r.status && strcmp(o->output, "-") != 0) r.status = program_save(o->output, page.data, page.length);
    else if (!r.status) fwrite(page.data, 1, page.length, stdout), r.status = program_printed();
    text_bytes_free(&page);
    routing_free(&r);
    return r.status;
}

int main(int argc, char **argv) {
    options o;
    int status = program_begin("moe-routing");
    if (status < 0) status = parse_options(argc, argv, &o);
    return status < 0 ? run(&o) : status;
}
