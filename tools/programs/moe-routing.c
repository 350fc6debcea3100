/* moe-routing - make a web page that shows which experts the tokens went to: see usage() below, or --help.
 *
 * Contents
 *   1. Options     the command line
 *   2. State       counts and tokens, all of them in `routing`
 *   3. Counting    sentences come in, counts remain
 *   4. Reading     JSON lines, every field checked
 *   5. Text out    JSON and HTML, with nothing in it that a browser could take for markup
 *   6. Summary     the numbers of a layer
 *   7. Tokens      the tokens that an expert prefers
 *   8. Page        tools/programs/routing.html with the data in it
 *   9. Main
 *
 * The input is a file that --routing of moe-translate, moe-score or moe-classify wrote: a header, then a line for every
 * token and layer; layer by layer in a sentence, sentences in order. The program holds one layer of one sentence, to
 * know the words around a token; then it counts and forgets them. The counts take 88 to 96 bytes for each pair of an
 * expert and a distinct token that occurred. The sentences that the page shows are kept too.
 *
 * The page only draws. Every number in it was computed here and stands in it as JSON (<script id="data">):
 *
 *   title, model, made_by        texts
 *   sentences, tokens_routed     counts over the input
 *   layers[]                     in the header's order
 *     layer, gate, experts, groups, k
 *     tokens, pairs              tokens seen; (token, expert) pairs
 *     experts_per_token          mean, with histogram [[experts, tokens], ...]
 *     empty, empty_share         tokens whose mask was empty
 *     load[], importance[]       by expert: tokens that it got, sum of its weights; group_load, group_importance: sums
 *     cv_load, cv_importance     population standard deviation / mean, over experts; null where there is nothing
 *     max_over_mean_load         of experts
 *     dead                       experts without a token
 *   and not with --json:
 *   top, min_count               the options
 *   layers[].preferred[]         for the experts with the largest loads, by number:
 *     expert
 *     weight[]                   tokens by the largest weight that they got here: t (an index into `tokens`), n times
 *                                here, w largest weight, sum of weights, and where w was: line, before[], after[]
 *     lift[]                     tokens by lift: t, n, all (times in this layer), lift = (n / load) / (all / tokens)
 *   text[]                       sentences: line, layers[] of { layer (index), tokens[] of
 *                                [t, empty, experts in all, expert, weight, expert, weight, ... largest first] }
 *   tokens[]                     [text or null, id or null]; both null: a classifier's input, which is no token
 */
#define _GNU_SOURCE      /* getopt_long on Linux */
#define _DARWIN_C_SOURCE /* and on macOS         */

#include "moe.h"
#include "tools/programs/program.h"

#include "routing-html.inc" /* routing_html[]: the lines of tools/programs/routing.html, made by the Makefile */

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ==== 1. Options ======================================================================================== */

typedef struct options {
    const char *input, *output, *title;
    int top, min_count, experts, sentences, json;
} options;

static void usage(FILE *to) {
    fputs(
        "Usage: moe-routing FILE -o PAGE.html [OPTION]...\n"
        "Makes one self-contained web page of what moe-translate --routing wrote: load and importance of every expert, dead\n"
        "experts, empty masks, the tokens that each expert prefers, and sentences coloured by expert.\n"
        "\n"
        "  FILE                  routing, as JSON lines; - for standard input\n"
        "  -o, --output PAGE     the page; - for standard output. It appears whole or not at all\n"
        "      --title TEXT      title of the page (default: Routing of MODEL)\n"
        "      --top N           tokens listed for an expert, by weight and by lift (default 12); 0 counts no tokens\n"
        "      --min-count N     tokens that an expert got less often are not ranked by lift (default 5)\n"
        "      --experts N       experts in each layer whose tokens are listed, those with the largest loads (default 1024)\n"
        "      --sentences N     sentences that the page can show, the first ones (default 500); counts are of all\n"
        "      --json            the summary as one JSON object instead of the page, to standard output without -o\n"
        "  -h, --help            this text\n"
        "  -V, --version         version\n"
        "\n"
        "Load is the number of tokens that an expert got, importance the sum of their weights, CV the population standard\n"
        "deviation over experts divided by the mean. Lift is a token's share among the tokens of an expert divided by its\n"
        "share among those of the layer.\n"
        "\n"
        "Memory grows with the pairs of an expert and a distinct token that occur (about 100 bytes each), with --sentences,\n"
        "and with the longest sentence; not with the number of lines.\n"
        "\n"
        "Exit status: 0 done, 2 usage, 3 the input is not a routing file (or memory ran out), 4 input or output failed.\n"
        "\n"
        "Example: moe-translate -m models/en-de-fr-es.bin -t de --routing r.jsonl < text && moe-routing r.jsonl -o r.html\n",
        to);
}

/* -1: go on; else the exit status. */
static int parse_options(int argc, char **argv, options *o) {
    enum { TITLE = 256, TOP, MIN_COUNT, EXPERTS, SENTENCES, JSON };
    static const struct option known[] = { { "output", required_argument, NULL, 'o' },
                                           { "title", required_argument, NULL, TITLE },
                                           { "top", required_argument, NULL, TOP },
                                           { "min-count", required_argument, NULL, MIN_COUNT },
                                           { "experts", required_argument, NULL, EXPERTS },
                                           { "sentences", required_argument, NULL, SENTENCES },
                                           { "json", no_argument, NULL, JSON },
                                           { "help", no_argument, NULL, 'h' },
                                           { "version", no_argument, NULL, 'V' },
                                           { NULL, 0, NULL, 0 } };
    *o = (options){ .top = 12, .min_count = 5, .experts = 1024, .sentences = 500 };
    int bad = -1;
    for (int c; bad < 0 && (c = getopt_long(argc, argv, "o:hV", known, NULL)) != -1;) {
        switch (c) {
        case 'o': o->output = optarg; break;
        case TITLE: o->title = optarg; break;
        case TOP: bad = program_int("top", optarg, 0, 10000, &o->top); break;
        case MIN_COUNT: bad = program_int("min-count", optarg, 1, 1 << 30, &o->min_count); break;
        case EXPERTS: bad = program_int("experts", optarg, 0, 1 << 24, &o->experts); break;
        case SENTENCES: bad = program_int("sentences", optarg, 0, 1 << 24, &o->sentences); break;
        case JSON: o->json = 1; break;
        case 'h': usage(stdout); return fflush(stdout) ? EXIT_INPUT_OUTPUT : EXIT_DONE;
        case 'V': printf("moe-routing %s\n", moe_version()); return fflush(stdout) ? EXIT_INPUT_OUTPUT : EXIT_DONE;
        default: fputs("Try moe-routing --help\n", stderr); return EXIT_USAGE; /* getopt said why */
        }
    }
    if (bad >= 0) return bad;
    if (optind + 1 != argc) return program_usage_error("name one routing file, or - for standard input");
    o->input = argv[optind];
    if (!o->output && !o->json) return program_usage_error("say with -o where the page goes");
    if (!o->output) o->output = "-";
    if (o->json) o->top = o->sentences = 0; /* neither is in the summary */
    return -1;
}

/* ==== 2. State ========================================================================================== */

enum {
    MAX_LINE = 1 << 28, /* bytes: 131,072 experts with a weight each are 3 MB               */
    MAX_LAYERS = 2 * MOE_MAX_LAYERS,
    MAX_EXPERTS = 1 << 24, /* of all layers together                                           */
    MAX_TOKEN = 1024,      /* bytes of a token, and of the names in the header                 */
    CONTEXT = 6,           /* tokens of context on each side                                   */
    SHOWN = 8              /* experts that a sentence names for one token: those with the largest weights */
};

#define NO_TOKEN UINT32_MAX
static const int64_t max_whole = INT64_C(9007199254740991); /* what a JSON number holds exactly */

/* A distinct token: id and text together, since the input could give one id two texts. */
typedef struct token {
    size_t text, length; /* in routing.texts; length 0: it has no text */
    int64_t id;          /* -1: it has none */
    uint32_t page;       /* its number in the page, NO_TOKEN: it is not in there */
} token;

/* A token that an expert got. */
typedef struct pair {
    uint32_t expert, token;
    uint64_t count;
    double sum;                   /* of weights */
    float best;                   /* the largest one, and where it was first */
    uint32_t around[2 * CONTEXT]; /* tokens before and after, NO_TOKEN: the sentence has none there */
    int64_t line;
} pair;

typedef struct layer {
    char *name;
    const char *gate;
    int64_t experts, groups, k;
    uint64_t tokens, empty;
    uint64_t *load;      /* [experts]     */
    double *importance;  /* [experts]     */
    uint64_t *histogram; /* [experts + 1] tokens by how many experts they got */
    uint64_t *seen;      /* [seen_capacity] times that a token came here, by its number */
    size_t seen_capacity;
    pair *pairs;
    size_t n_pairs, pairs_capacity;
    uint32_t *table; /* [table_size] index + 1 of a pair, 0: free; a power of two or 0 */
    size_t table_size;
} layer;

/* One token in one layer, while its sentence is read; experts and weights lie at `first`. */
typedef struct row {
    uint32_t token;
    size_t first, n;
    int64_t position;
    int empty;
} row;

/* The same in a sentence that the page shows. */
typedef struct shown_row {
    int64_t line;
    uint32_t layer, token, n, kept;
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
    uint32_t *table; /* as in a layer */
    size_t table_size;
    text_bytes texts;

    int64_t line;   /* of the sentence that is being read; 0: none yet */
    size_t current; /* its layer */
    row *rows;
    uint32_t *experts;
    double *weights;
    size_t n_rows, rows_capacity, n_weights, experts_capacity, weights_capacity;
    uint64_t sentences;

    shown_row *shown;
    shown_weight *shown_weights;
    size_t n_shown, shown_capacity, n_shown_weights, shown_weights_capacity;

    uint64_t number;    /* of the line of the input, from 1 */
    text_bytes trouble; /* what is wrong with it */
} routing;

static int fail(routing *r, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 2, 3)))
#endif
    ;

/* Always EXIT_MODEL, the status for a bad input. What the message quotes of the input must be quoted by `quoted`. */
static int fail(routing *r, const char *format, ...) {
    char line[700];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    text_bytes_free(&r->trouble);
    text_append_string(&r->trouble, line);
    return EXIT_MODEL;
}

static int no_memory(routing *r) { return fail(r, "out of memory"); }

/* Text from the input, fit for a terminal, cut after 60 bytes or so. */
typedef struct quote {
    char text[80];
} quote;

static quote quoted(const char *data) {
    quote q;
    text_bytes clean = { 0 };
    size_t length = strlen(data), keep = text_utf8_cut(data, length, 60);
    text_append_clean(&clean, data, keep);
    snprintf(q.text, sizeof q.text, "%s%s", clean.failed ? "?" : clean.data, keep < length ? "..." : "");
    text_bytes_free(&clean);
    return q;
}

/* Room for `need` elements; new ones are zero. */
static int room(void *array, size_t *capacity, size_t need, size_t element) {
    void *old, *grown;
    if (need <= *capacity) return 1;
    size_t wanted = *capacity + *capacity / 2 + 16;
    if (wanted < need) wanted = need;
    if (wanted > SIZE_MAX / element) return 0;
    memcpy(&old, array, sizeof old);
    if (!(grown = realloc(old, wanted * element))) return 0;
    memset((char *)grown + *capacity * element, 0, (wanted - *capacity) * element);
    memcpy(array, &grown, sizeof grown);
    *capacity = wanted;
    return 1;
}

static void routing_free(routing *r) {
    for (size_t i = 0; i < r->n_layers; i++) {
        layer *l = &r->layers[i];
        free(l->name), free(l->load), free(l->importance), free(l->histogram), free(l->seen), free(l->pairs),
            free(l->table);
    }
    free(r->model), free(r->layers), free(r->tokens), free(r->table), free(r->rows), free(r->experts), free(r->weights);
    free(r->shown), free(r->shown_weights);
    text_bytes_free(&r->texts);
    text_bytes_free(&r->trouble);
}

/* ==== 3. Counting ======================================================================================= */

static uint64_t mix(uint64_t x) { /* the finaliser of splitmix64 */
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static uint64_t hash_token(int64_t id, const char *text, size_t length) {
    uint64_t h = mix((uint64_t)id + length);
    for (size_t i = 0; i < length; i++) h = (h ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return mix(h);
}

static uint64_t hash_pair(uint32_t expert, uint32_t token_number) {
    return mix(((uint64_t)expert << 32 | token_number) + 1);
}

/* A table with more than half of its slots taken is made anew, empty, with twice as many. 1: as it was, 2: anew, 0: no
 * memory. */
static int table_room(uint32_t **table, size_t *size, size_t entries) {
    if (entries * 2 < *size) return 1;
    if (entries >= UINT32_MAX / 2 - 1) return 0;
    size_t wanted = *size ? *size * 2 : 64;
    uint32_t *fresh = calloc(wanted, sizeof *fresh);
    if (!fresh) return 0;
    free(*table);
    *table = fresh;
    *size = wanted;
    return 2;
}

static void table_put(uint32_t *table, size_t size, uint64_t hash, size_t entry) {
    size_t at = (size_t)hash & (size - 1);
    while (table[at]) at = (at + 1) & (size - 1);
    table[at] = (uint32_t)entry + 1;
}

/* The number of a token, a new one if need be; NO_TOKEN if memory ran out. */
static uint32_t intern(routing *r, int64_t id, const char *text, size_t length) {
    int made = table_room(&r->table, &r->table_size, r->n_tokens + 1);
    if (!made) return NO_TOKEN;
    for (size_t i = 0; made == 2 && i < r->n_tokens; i++) {
        const token *t = &r->tokens[i];
        table_put(r->table, r->table_size, hash_token(t->id, r->texts.data + t->text, t->length), i);
    }
    size_t at = (size_t)hash_token(id, text, length) & (r->table_size - 1);
    for (; r->table[at]; at = (at + 1) & (r->table_size - 1)) {
        const token *t = &r->tokens[r->table[at] - 1];
        if (t->id == id && t->length == length && memcmp(r->texts.data + t->text, text, length) == 0)
            return r->table[at] - 1;
    }
    size_t begin = r->texts.length;
    text_append(&r->texts, text, length);
    if (r->texts.failed || !room(&r->tokens, &r->tokens_capacity, r->n_tokens + 1, sizeof *r->tokens)) return NO_TOKEN;
    r->tokens[r->n_tokens] = (token){ .text = begin, .length = length, .id = id, .page = NO_TOKEN };
    r->table[at] = (uint32_t)++r->n_tokens;
    return (uint32_t)(r->n_tokens - 1);
}

static pair *find_pair(layer *l, uint32_t expert, uint32_t token_number) {
    int made = table_room(&l->table, &l->table_size, l->n_pairs + 1);
    if (!made) return NULL;
    for (size_t i = 0; made == 2 && i < l->n_pairs; i++)
        table_put(l->table, l->table_size, hash_pair(l->pairs[i].expert, l->pairs[i].token), i);
    size_t at = (size_t)hash_pair(expert, token_number) & (l->table_size - 1);
    for (; l->table[at]; at = (at + 1) & (l->table_size - 1)) {
        pair *p = &l->pairs[l->table[at] - 1];
        if (p->expert == expert && p->token == token_number) return p;
    }
    if (!room(&l->pairs, &l->pairs_capacity, l->n_pairs + 1, sizeof *l->pairs)) return NULL;
    l->pairs[l->n_pairs] = (pair){ .expert = expert, .token = token_number, .best = -1 };
    l->table[at] = (uint32_t)++l->n_pairs;
    return &l->pairs[l->n_pairs - 1];
}

/* Count row i of the sentence at hand in the pairs of its layer. */
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

/* Keep row i of the sentence at hand for the page: its experts with the largest weights, largest first. */
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
    r->shown[r->n_shown++] = (shown_row){ .line = r->line,
                                          .layer = (uint32_t)r->current,
                                          .token = w->token,
                                          .n = (uint32_t)w->n,
                                          .kept = (uint32_t)kept,
                                          .empty = w->empty,
                                          .first = r->n_shown_weights };
    r->n_shown_weights += kept;
    return 0;
}

/* Count a layer of a sentence, which is complete. */
static int count_rows(routing *r) {
    int status = 0;
    layer *l = &r->layers[r->current];
    for (size_t i = 0; i < r->n_rows && !status; i++) {
        const row *w = &r->rows[i];
        l->tokens++;
        l->empty += (uint64_t)w->empty;
        l->histogram[w->n]++;
        for (size_t j = w->first; j < w->first + w->n; j++) {
            l->load[r->experts[j]]++;
            l->importance[r->experts[j]] += r->weights[j];
        }
        if (r->options->top) status = count_pairs(r, l, i);
        if (!status && r->sentences <= (uint64_t)r->options->sentences) status = keep_row(r, i);
    }
    r->n_rows = r->n_weights = 0;
    return status;
}

/* ==== 4. Reading ======================================================================================== */

/* Find the named fields of an object, each at most once, and ignore others. found[i] is NULL where there is none. */
static int fields(routing *r, const cJSON *object, const char *const names[], const cJSON *found[], size_t n) {
    for (size_t i = 0; i < n; i++) found[i] = NULL;
    for (const cJSON *c = object->child; c; c = c->next)
        for (size_t i = 0; i < n; i++) {
            if (!c->string || strcmp(c->string, names[i]) != 0) continue;
            if (found[i]) return fail(r, "%s: is there twice", names[i]);
            found[i] = c;
        }
    return 0;
}

static int whole(routing *r, const char *name, const cJSON *from, int64_t low, int64_t high, int64_t *out) {
    if (!from) return fail(r, "%s: is missing", name);
    double v = from->valuedouble;
    if (!cJSON_IsNumber(from) || !(v >= (double)low && v <= (double)high) || floor(v) != v)
        return fail(r, "%s: must be a whole number from %lld to %lld", name, (long long)low, (long long)high);
    *out = (int64_t)v;
    return 0;
}

static int string(routing *r, const char *name, const cJSON *from, const char **out) {
    if (!from) return fail(r, "%s: is missing", name);
    if (!cJSON_IsString(from)) return fail(r, "%s: must be a text", name);
    if (strlen(from->valuestring) > MAX_TOKEN) return fail(r, "%s: is longer than %d bytes", name, MAX_TOKEN);
    *out = from->valuestring;
    return 0;
}

static const char *known_gate(const char *name) {
    static const char *const gates[] = { "softmax", "topk", "threshold", "batchwise" };
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++)
        if (strcmp(name, gates[i]) == 0) return gates[i];
    return NULL;
}

/* {"layer":"encoder.2","experts":32,"groups":0,"k":2,"gate":"threshold"} into the next layer. *total: experts so far.
 */
static int read_layer(routing *r, const cJSON *from, int64_t *total) {
    static const char *const names[] = { "layer", "experts", "groups", "k", "gate" };
    const cJSON *f[5];
    const char *name = "", *gate = "";
    int status;
    layer *l = &r->layers[r->n_layers];
    if (!cJSON_IsObject(from)) return fail(r, "layers: must be a list of objects");
    if ((status = fields(r, from, names, f, 5)) || (status = string(r, "layer", f[0], &name)) ||
        (status = whole(r, "experts", f[1], 1, MAX_EXPERTS, &l->experts)) ||
        (status = whole(r, "groups", f[2], 0, l->experts, &l->groups)) ||
        (status = whole(r, "k", f[3], 0, l->experts, &l->k)) || (status = string(r, "gate", f[4], &gate)))
        return status;
    if (!*name) return fail(r, "layer: is empty");
    for (size_t i = 0; i < r->n_layers; i++)
        if (strcmp(r->layers[i].name, name) == 0) return fail(r, "layer: '%s' is there twice", quoted(name).text);
    if (!(l->gate = known_gate(gate)))
        return fail(r, "gate: must be softmax, topk, threshold or batchwise, not '%s'", quoted(gate).text);
    if (l->groups && l->experts % l->groups)
        return fail(r, "groups: %lld does not divide %lld experts", (long long)l->groups, (long long)l->experts);
    if ((*total += l->experts) > MAX_EXPERTS) return fail(r, "experts: more than %d in all layers", MAX_EXPERTS);
    size_t n = (size_t)l->experts;
    r->n_layers++; /* from here on routing_free knows it */
    l->name = malloc(strlen(name) + 1);
    l->load = calloc(n, sizeof *l->load);
    l->importance = calloc(n, sizeof *l->importance);
    l->histogram = calloc(n + 1, sizeof *l->histogram);
    if (!l->name || !l->load || !l->importance || !l->histogram) return no_memory(r);
    memcpy(l->name, name, strlen(name) + 1);
    return 0;
}

static int read_header(routing *r, const cJSON *from) {
    static const char *const names[] = { "model", "layers" };
    const cJSON *f[2];
    const char *model = "";
    int64_t total = 0;
    int status;
    if ((status = fields(r, from, names, f, 2)) || (status = string(r, "model", f[0], &model))) return status;
    if (!f[1]) return fail(r, "layers: is missing: this line is no header");
    int n = cJSON_IsArray(f[1]) ? cJSON_GetArraySize(f[1]) : 0;
    if (n < 1 || n > MAX_LAYERS) return fail(r, "layers: must be a list of 1 to %d layers", MAX_LAYERS);
    r->model = malloc(strlen(model) + 1);
    r->layers = calloc((size_t)n, sizeof *r->layers);
    if (!r->model || !r->layers) return no_memory(r);
    memcpy(r->model, model, strlen(model) + 1);
    for (const cJSON *c = f[1]->child; c && !status; c = c->next) status = read_layer(r, c, &total);
    return status;
}

/* "experts":[3,17],"weights":[0.61,0.39] onto the end of r->experts and r->weights */
static int read_weights(routing *r, const layer *l, const cJSON *experts, const cJSON *weights, size_t *n) {
    if (!experts) return fail(r, "experts: is missing");
    if (!weights) return fail(r, "weights: is missing");
    if (!cJSON_IsArray(experts)) return fail(r, "experts: must be a list");
    if (!cJSON_IsArray(weights)) return fail(r, "weights: must be a list");
    const cJSON *w = weights->child;
    int64_t last = -1, expert = -1;
    *n = 0;
    for (const cJSON *e = experts->child; e; e = e->next, w = w->next, ++*n) {
        int status = whole(r, "experts", e, 0, l->experts - 1, &expert);
        if (status) return status;
        if (expert <= last)
            return fail(r, "experts: must ascend, and %lld comes after %lld", (long long)expert, (long long)last);
        if (!w) return fail(r, "weights: there are fewer than experts");
        /* products of softmaxes: 1 at most, but for rounding */
        if (!cJSON_IsNumber(w) || !(w->valuedouble >= 0 && w->valuedouble <= 1.001))
            return fail(r, "weights: must be from 0 to 1");
        size_t at = r->n_weights + *n;
        if (!room(&r->experts, &r->experts_capacity, at + 1, sizeof *r->experts) ||
            !room(&r->weights, &r->weights_capacity, at + 1, sizeof *r->weights))
            return no_memory(r);
        r->experts[at] = (uint32_t)expert;
        r->weights[at] = w->valuedouble;
        last = expert;
    }
    return w ? fail(r, "weights: there are more than experts") : 0;
}

/* Sentences, layers in a sentence and positions in a layer come in order. */
static int in_order(routing *r, int64_t line, size_t index, int64_t position) {
    if (line < r->line)
        return fail(r, "line: %lld comes after %lld; sentences must be in order", (long long)line, (long long)r->line);
    if (line == r->line && index < r->current)
        return fail(r, "layer: '%s' comes after '%s' in a sentence; layers must be in the header's order",
                    quoted(r->layers[index].name).text, quoted(r->layers[r->current].name).text);
    if (line == r->line && index == r->current && r->n_rows && position <= r->rows[r->n_rows - 1].position)
        return fail(r, "position: %lld comes after %lld", (long long)position,
                    (long long)r->rows[r->n_rows - 1].position);
    return 0;
}

static int find_layer(const routing *r, const char *name, size_t *index) {
    if (strcmp(r->layers[*index].name, name) == 0) return 1; /* nearly always the one before */
    for (*index = 0; *index < r->n_layers; ++*index)
        if (strcmp(r->layers[*index].name, name) == 0) return 1;
    return 0;
}

static int read_token(routing *r, const cJSON *from) {
    static const char *const names[] = { "line", "layer", "position", "id", "token", "experts", "weights", "empty" };
    const cJSON *f[8];
    const char *name = "", *text = "";
    int64_t line = 0, position = 0, id = -1;
    size_t index = r->current, n = 0;
    int status;
    if ((status = fields(r, from, names, f, 8)) || (status = whole(r, "line", f[0], 1, max_whole, &line)) ||
        (status = string(r, "layer", f[1], &name)) || (status = whole(r, "position", f[2], 0, INT32_MAX, &position)) ||
        (f[3] && (status = whole(r, "id", f[3], 0, INT32_MAX, &id))) ||
        (f[4] && (status = string(r, "token", f[4], &text))))
        return status;
    if (!find_layer(r, name, &index)) return fail(r, "layer: '%s' is not in the header", quoted(name).text);
    if ((status = in_order(r, line, index, position))) return status;
    if (!f[7]) return fail(r, "empty: is missing");
    if (!cJSON_IsBool(f[7])) return fail(r, "empty: must be true or false");
    if (line != r->line || index != r->current) {
        if ((status = count_rows(r))) return status;
        r->sentences += line != r->line;
        r->line = line;
        r->current = index;
    }
    if ((status = read_weights(r, &r->layers[index], f[5], f[6], &n))) return status;
    if (!n && !cJSON_IsTrue(f[7])) return fail(r, "experts: there are none, though empty is false");
    uint32_t number = intern(r, id, text, strlen(text));
    if (number == NO_TOKEN || !room(&r->rows, &r->rows_capacity, r->n_rows + 1, sizeof *r->rows)) return no_memory(r);
    r->rows[r->n_rows++] =
        (row){ .token = number, .first = r->n_weights, .n = n, .position = position, .empty = cJSON_IsTrue(f[7]) };
    r->n_weights += n;
    return 0;
}

/* cJSON would end a string at \u0000. */
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
    size_t blank = strspn(data, " \t\r");
    if (blank == length) return fail(r, r->number == 1 ? "the header is missing" : "is blank");
    if (text_utf8_valid(data, length) != length)
        return fail(r, "byte %zu is not UTF-8", text_utf8_valid(data, length) + 1);
    if (has_nul(data, length)) return fail(r, "holds a NUL character");
    const char *end = data;
    cJSON *json = cJSON_ParseWithLengthOpts(data, length + 1, &end, 1);
    if (!json) return fail(r, "is not JSON, at byte %zu", (size_t)(end - data) + 1);
    int status = !cJSON_IsObject(json) ? fail(r, "is not a JSON object")
                 : r->number == 1      ? read_header(r, json)
                                       : read_token(r, json);
    cJSON_Delete(json);
    return status;
}

static const char *input_name(const routing *r) {
    return strcmp(r->options->input, "-") == 0 ? "standard input" : r->options->input;
}

static int input_error(const routing *r) {
    fprintf(stderr, "moe-routing: %s: %s, after line %llu\n", input_name(r), strerror(errno),
            (unsigned long long)r->number);
    return EXIT_INPUT_OUTPUT;
}

/* Read the whole input; gives the exit status. */
static int read_all(routing *r, FILE *in) {
    static char block[1 << 16];
    text_bytes line = { 0 };
    int status = 0;
    for (size_t got; !status && (errno = 0, got = fread(block, 1, sizeof block, in)) > 0;) {
        for (size_t at = 0; at < got && !status;) {
            const char *end = memchr(block + at, '\n', got - at);
            size_t take = end ? (size_t)(end - block) - at : got - at;
            if (!line.length) r->number++;
            text_append(&line, block + at, take);
            at += take + (end != NULL);
            if (line.failed) status = no_memory(r);
            else if (line.length > MAX_LINE) status = fail(r, "is longer than %d bytes", MAX_LINE);
            else if (end) status = read_line(r, line.data, line.length), line.length = 0;
        }
    }
    if (!status && ferror(in)) {
        text_bytes_free(&line);
        return input_error(r);
    }
    if (!status && line.length) status = read_line(r, line.data, line.length);
    if (!status && !r->number) r->number = 1, status = fail(r, "the header is missing");
    if (!status) status = count_rows(r);
    text_bytes_free(&line);
    if (status)
        fprintf(stderr, "moe-routing: %s: line %llu: %s\n", input_name(r), (unsigned long long)r->number,
                r->trouble.failed || !r->trouble.data ? "out of memory" : r->trouble.data);
    return status;
}

/* ==== 5. Text out ======================================================================================= */

/* Valid UTF-8 as a JSON string that is safe inside <script> as well: no <, no &, no line separator of JavaScript. */
static void put_string(text_bytes *out, const char *data, size_t length) {
    text_append_string(out, "\"");
    for (size_t i = 0, begin = 0; i <= length; i++) {
        unsigned char c = i < length ? (unsigned char)data[i] : 0;
        int separator = c == 0xE2 && length - i >= 3 && (unsigned char)data[i + 1] == 0x80 &&
                        ((unsigned char)data[i + 2] & 0xFE) == 0xA8;
        if (i < length && c >= 0x20 && c != 0x7F && !separator && !strchr("\"\\<>&'", c)) continue;
        text_append(out, data + begin, i - begin);
        if (i == length) break;
        if (separator) {
            text_append_string(out, (unsigned char)data[i + 2] == 0xA8 ? "\\u2028" : "\\u2029");
            i += 2;
        } else {
            text_printf(out, "\\u%04x", (unsigned)c);
        }
        begin = i + 1;
    }
    text_append_string(out, "\"");
}

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

static void put_number(text_bytes *out, double value) {
    if (isfinite(value)) text_printf(out, "%.12g", value);
    else text_append_string(out, "null");
}

static void put_count(text_bytes *out, uint64_t value) { text_printf(out, "%llu", (unsigned long long)value); }

/* ==== 6. Summary ======================================================================================== */

typedef struct spread {
    double sum, cv, max_over_mean; /* the last two NaN where the sum is 0 */
} spread;

/* Of n values: either counts or sums. */
static spread spread_of(const uint64_t *counts, const double *sums, size_t n) {
    double sum = 0, squares = 0, most = 0;
    for (size_t i = 0; i < n; i++) sum += counts ? (double)counts[i] : sums[i];
    double mean = sum / (double)n;
    for (size_t i = 0; i < n; i++) {
        double v = counts ? (double)counts[i] : sums[i];
        squares += (v - mean) * (v - mean);
        most = v > most ? v : most;
    }
    if (!(mean > 0)) return (spread){ sum, NAN, NAN };
    return (spread){ sum, sqrt(squares / (double)n) / mean, most / mean };
}

static void put_groups(const layer *l, text_bytes *out) {
    size_t groups = (size_t)l->groups, each = groups ? (size_t)l->experts / groups : 0;
    text_append_string(out, ",\"group_load\":[");
    for (size_t g = 0; g < groups; g++) {
        uint64_t load = 0;
        for (size_t i = 0; i < each; i++) load += l->load[g * each + i];
        if (g) text_append_string(out, ",");
        put_count(out, load);
    }
    text_append_string(out, "],\"group_importance\":[");
    for (size_t g = 0; g < groups; g++) {
        double importance = 0;
        for (size_t i = 0; i < each; i++) importance += l->importance[g * each + i];
        if (g) text_append_string(out, ",");
        put_number(out, importance);
    }
    text_append_string(out, "]");
}

/* The members of a layer's object, without its braces. */
static void put_layer(const layer *l, text_bytes *out) {
    size_t n = (size_t)l->experts;
    spread load = spread_of(l->load, NULL, n), importance = spread_of(NULL, l->importance, n);
    uint64_t dead = 0;
    for (size_t i = 0; i < n; i++) dead += l->load[i] == 0;
    text_append_string(out, "\"layer\":");
    put_string(out, l->name, strlen(l->name));
    text_printf(out, ",\"gate\":\"%s\",\"experts\":%lld,\"groups\":%lld,\"k\":%lld,\"tokens\":%llu,", l->gate,
                (long long)l->experts, (long long)l->groups, (long long)l->k, (unsigned long long)l->tokens);
    text_printf(out, "\"pairs\":%.0f,\"experts_per_token\":", load.sum);
    put_number(out, load.sum / (double)l->tokens);
    text_append_string(out, ",\"histogram\":[");
    for (size_t i = 0, any = 0; i <= n; i++)
        if (l->histogram[i]) text_printf(out, "%s[%zu,%llu]", any++ ? "," : "", i, (unsigned long long)l->histogram[i]);
    text_printf(out, "],\"empty\":%llu,\"empty_share\":", (unsigned long long)l->empty);
    put_number(out, (double)l->empty / (double)l->tokens);
    text_append_string(out, ",\"cv_importance\":");
    put_number(out, importance.cv);
    text_append_string(out, ",\"cv_load\":");
    put_number(out, load.cv);
    text_append_string(out, ",\"max_over_mean_load\":");
    put_number(out, load.max_over_mean);
    text_printf(out, ",\"dead\":%llu,\n\"load\":[", (unsigned long long)dead);
    for (size_t i = 0; i < n; i++) {
        if (i) text_append_string(out, ",");
        put_count(out, l->load[i]);
    }
    text_append_string(out, "],\n\"importance\":[");
    for (size_t i = 0; i < n; i++) {
        if (i) text_append_string(out, ",");
        put_number(out, l->importance[i]);
    }
    text_append_string(out, "]");
    put_groups(l, out);
}

/* The beginning of --json's object and of the page's. */
static void put_head(const routing *r, const char *title, text_bytes *out) {
    uint64_t routed = 0;
    for (size_t i = 0; i < r->n_layers; i++) routed += r->layers[i].tokens;
    text_append_string(out, "{\"title\":");
    put_string(out, title, strlen(title));
    text_append_string(out, ",\"model\":");
    put_string(out, r->model, strlen(r->model));
    text_printf(out, ",\"made_by\":\"moe-routing %s\",\"sentences\":%llu,\"tokens_routed\":%llu,\"layers\":[\n",
                moe_version(), (unsigned long long)r->sentences, (unsigned long long)routed);
}

static void put_summary(const routing *r, const char *title, text_bytes *out) {
    put_head(r, title, out);
    for (size_t i = 0; i < r->n_layers; i++) {
        text_append_string(out, i ? ",\n{" : "{");
        put_layer(&r->layers[i], out);
        text_append_string(out, "}");
    }
    text_append_string(out, "]}\n");
}

/* ==== 7. Tokens ========================================================================================= */

/* Candidates for a list, the best first: by key, then by second, then in the order of their first appearance. */
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

typedef struct loaded {
    uint64_t load;
    size_t expert;
} loaded;

static int by_load(const void *a, const void *b) {
    const loaded *x = a, *y = b;
    if (x->load != y->load) return x->load > y->load ? -1 : 1;
    return x->expert < y->expert ? -1 : x->expert > y->expert;
}

/* A token's number in the page. They are given in the order in which the page names them; `order` remembers it. */
static void put_token(routing *r, uint32_t number, uint32_t *order, size_t *n_order, text_bytes *out) {
    token *t = &r->tokens[number];
    if (t->page == NO_TOKEN) {
        t->page = (uint32_t)*n_order;
        order[(*n_order)++] = number;
    }
    put_count(out, t->page);
}

static void put_around(routing *r, const uint32_t *around, uint32_t *order, size_t *n_order, text_bytes *out) {
    for (size_t i = 0, any = 0; i < CONTEXT; i++) {
        if (around[i] == NO_TOKEN) continue;
        if (any++) text_append_string(out, ",");
        put_token(r, around[i], order, n_order, out);
    }
}

/* One expert; `p` are its n > 0 pairs, `c` has room for as many. */
static void put_expert(routing *r, const layer *l, const pair *p, size_t n, candidate *c, uint32_t *order,
                       size_t *n_order, text_bytes *out) {
    size_t top = (size_t)r->options->top, ranked = 0;
    double load = (double)l->load[p->expert];
    for (size_t i = 0; i < n; i++) c[i] = (candidate){ (double)p[i].best, p[i].sum, &p[i] };
    qsort(c, n, sizeof *c, better);
    text_printf(out, "{\"expert\":%lu,\"weight\":[", (unsigned long)p->expert);
    for (size_t i = 0; i < n && i < top; i++) {
        const pair *q = c[i].pair;
        text_append_string(out, i ? ",{\"t\":" : "{\"t\":");
        put_token(r, q->token, order, n_order, out);
        text_printf(out, ",\"n\":%llu,\"w\":", (unsigned long long)q->count);
        text_append_float(out, q->best);
        text_append_string(out, ",\"sum\":");
        put_number(out, q->sum);
        text_printf(out, ",\"line\":%lld,\"before\":[", (long long)q->line);
        put_around(r, q->around, order, n_order, out);
        text_append_string(out, "],\"after\":[");
        put_around(r, q->around + CONTEXT, order, n_order, out);
        text_append_string(out, "]}");
    }
    text_append_string(out, "],\"lift\":[");
    for (size_t i = 0; i < n; i++)
        if (p[i].count >= (uint64_t)r->options->min_count)
            c[ranked++] = (candidate){ (double)p[i].count / load * (double)l->tokens / (double)l->seen[p[i].token],
                                       (double)p[i].count, &p[i] };
    qsort(c, ranked, sizeof *c, better);
    for (size_t i = 0; i < ranked && i < top; i++) {
        const pair *q = c[i].pair;
        text_append_string(out, i ? ",{\"t\":" : "{\"t\":");
        put_token(r, q->token, order, n_order, out);
        text_printf(out, ",\"n\":%llu,\"all\":%llu,\"lift\":", (unsigned long long)q->count,
                    (unsigned long long)l->seen[q->token]);
        put_number(out, c[i].key);
        text_append_string(out, "}");
    }
    text_append_string(out, "]}");
}

/* The experts of a layer with the largest loads. The layer's table is useless afterwards: its pairs are sorted. */
static int put_preferred(routing *r, layer *l, uint32_t *order, size_t *n_order, text_bytes *out) {
    size_t n = (size_t)l->experts, listed = (size_t)r->options->experts < n ? (size_t)r->options->experts : n, most = 1;
    int any = 0;
    free(l->table);
    l->table = NULL;
    l->table_size = 0;
    if (l->n_pairs) qsort(l->pairs, l->n_pairs, sizeof *l->pairs, by_expert);
    for (size_t i = 0, end; i < l->n_pairs; i = end) {
        for (end = i; end < l->n_pairs && l->pairs[end].expert == l->pairs[i].expert;) end++;
        if (end - i > most) most = end - i;
    }
    loaded *rank = malloc(n * sizeof *rank);
    char *wanted = calloc(n, 1);
    candidate *c = malloc(most * sizeof *c);
    if (rank && wanted && c) {
        for (size_t i = 0; i < n; i++) rank[i] = (loaded){ l->load[i], i };
        qsort(rank, n, sizeof *rank, by_load);
        for (size_t i = 0; i < listed; i++) wanted[rank[i].expert] = 1;
        for (size_t i = 0, end; i < l->n_pairs; i = end) {
            for (end = i; end < l->n_pairs && l->pairs[end].expert == l->pairs[i].expert;) end++;
            if (!wanted[l->pairs[i].expert]) continue;
            if (any++) text_append_string(out, ",\n");
            put_expert(r, l, l->pairs + i, end - i, c, order, n_order, out);
        }
    }
    int status = rank && wanted && c ? 0 : EXIT_MODEL;
    free(rank), free(wanted), free(c);
    return status;
}

/* ==== 8. Page =========================================================================================== */

static void put_sentences(routing *r, uint32_t *order, size_t *n_order, text_bytes *out) {
    for (size_t i = 0; i < r->n_shown; i++) {
        const shown_row *s = &r->shown[i], *before = i ? s - 1 : NULL;
        int line = !before || before->line != s->line, first = line || before->layer != s->layer;
        if (first && before) text_append_string(out, "]}");
        if (line) text_printf(out, "%s{\"line\":%lld,\"layers\":[", before ? "]},\n" : "", (long long)s->line);
        if (first) text_printf(out, "%s{\"layer\":%lu,\"tokens\":[", line ? "" : ",", (unsigned long)s->layer);
        text_append_string(out, first ? "[" : ",[");
        put_token(r, s->token, order, n_order, out);
        text_printf(out, ",%d,%lu", s->empty, (unsigned long)s->n);
        for (size_t k = 0; k < s->kept; k++) {
            text_printf(out, ",%lu,", (unsigned long)r->shown_weights[s->first + k].expert);
            text_append_float(out, r->shown_weights[s->first + k].weight);
        }
        text_append_string(out, "]");
    }
    if (r->n_shown) text_append_string(out, "]}]}");
}

static int put_data(routing *r, const char *title, text_bytes *out) {
    uint32_t *order = malloc((r->n_tokens + 1) * sizeof *order);
    size_t n_order = 0;
    int status = order ? 0 : EXIT_MODEL;
    put_head(r, title, out);
    for (size_t i = 0; i < r->n_layers && !status; i++) {
        text_append_string(out, i ? ",\n{" : "{");
        put_layer(&r->layers[i], out);
        text_append_string(out, ",\n\"preferred\":[");
        status = put_preferred(r, &r->layers[i], order, &n_order, out);
        text_append_string(out, "]}");
    }
    text_printf(out, "],\n\"top\":%d,\"min_count\":%d,\"text\":[", r->options->top, r->options->min_count);
    if (!status) put_sentences(r, order, &n_order, out);
    text_append_string(out, "],\n\"tokens\":[");
    for (size_t i = 0; i < n_order; i++) {
        const token *t = &r->tokens[order[i]];
        text_append_string(out, i ? ",[" : "[");
        if (t->length) put_string(out, r->texts.data + t->text, t->length);
        else text_append_string(out, "null");
        if (t->id < 0) text_append_string(out, ",null]");
        else text_printf(out, ",%lld]", (long long)t->id);
    }
    text_append_string(out, "]}");
    free(order);
    return status;
}

/* tools/programs/routing.html with @TITLE@ and @DATA@ replaced. */
static int put_page(routing *r, const char *title, text_bytes *out) {
    int status = 0;
    for (size_t i = 0; i < sizeof routing_html / sizeof *routing_html && !status; i++) {
        const char *line = routing_html[i], *at = strchr(line, '@');
        for (; at; at = strchr(at + 1, '@')) {
            size_t skip = 0;
            if (strncmp(at, "@TITLE@", 7) == 0) skip = 7;
            if (strncmp(at, "@DATA@", 6) == 0) skip = 6;
            if (!skip) continue;
            text_append(out, line, (size_t)(at - line));
            if (skip == 7) put_html(out, title);
            else status = put_data(r, title, out);
            line = at + skip;
            at = line - 1;
        }
        text_append_string(out, line);
    }
    return status;
}

/* ==== 9. Main =========================================================================================== */

static int output_error(const char *name, int number) {
    fprintf(stderr, "moe-routing: %s: %s\n", name, strerror(number ? number : EIO));
    return EXIT_INPUT_OUTPUT;
}

static int write_stream(FILE *to, const text_bytes *page) {
    errno = 0;
    return fwrite(page->data, 1, page->length, to) == page->length && fflush(to) == 0;
}

static int run(const options *o, FILE *in) {
    routing r = { .options = o };
    text_bytes title = { 0 }, page = { 0 };
    int status = read_all(&r, in);
    if (!status) {
        text_append_string(&title, o->title ? "" : "Routing of ");
        text_append_clean(&title, o->title ? o->title : r.model, strlen(o->title ? o->title : r.model));
        if (title.failed) page.failed = 1;
        else if (o->json) put_summary(&r, title.data, &page);
        else status = put_page(&r, title.data, &page);
        if (status || page.failed) {
            fputs("moe-routing: out of memory\n", stderr);
            status = EXIT_MODEL;
        }
    }
    if (!status && strcmp(o->output, "-") == 0) {
        if (!write_stream(stdout, &page)) status = output_error("standard output", errno);
    } else if (!status) {
        status = program_save(o->output, page.data, page.length);
    }
    text_bytes_free(&title);
    text_bytes_free(&page);
    routing_free(&r);
    return status;
}

int main(int argc, char **argv) {
    options o;
    int status = program_begin("moe-routing");
    if (status < 0) status = parse_options(argc, argv, &o);
    if (status >= 0) return status;
    FILE *in = strcmp(o.input, "-") == 0 ? stdin : fopen(o.input, "rb");
    if (!in) return output_error(o.input, errno);
    if (strcmp(o.output, "-") != 0 && program_is_open_file(fileno(in), o.output))
        status = program_usage_error("%s is the input, and would be overwritten", o.output);
    else status = run(&o, in);
    if (in != stdin) fclose(in);
    return status;
}
