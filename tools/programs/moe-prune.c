/* moe-prune - remove experts from a model.
 *
 * Contents
 *   1. Options      the command line
 *   2. Plan         store the remaining experts
 *   3. Directions   choose the language pairs of OUT
 *   4. Lists        keep experts listed in a file
 *   5. Importance   keep the most important experts for a text
 *   6. Cut          select router rows, experts and metadata of OUT
 *   7. Main
 *
 * Pruning. The router rows (weights, noise, biases, thresholds) of removed experts are removed as well, so a softmax
 * runs over the remaining experts. Groups that lose all experts are removed. All other bytes are unchanged.
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/calibration.h"
#include "tools/programs/measure.h"
#include "tools/programs/ranking.h"
#include "tools/text/system.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ==== 1. Options ======================================================================================== */

enum { MOST_PAIRS = 256, CODE = 32, LONGEST_LIST = 1 << 30 };

typedef struct options {
    program_common common;
    const char *experts, *languages, *sample, *measure;
    float keep, ratio[2]; /* share of experts to keep, 0 if not given; ratio of encoder to decoder */
    int rank;             /* -1 if not given */
    int unbiased;
    const char *pairs[MOST_PAIRS];
    size_t n_pairs;
} options;

static int take_keep(void *user, const option_row *row, const char *text) {
    char *end;
    const float percent = strtof(text, &end);
    if (end == text || (strcmp(end, "%") != 0 && *end) || !(percent > 0 && percent <= 100))
        return program_usage_error("invalid value '%s' for --%s: expected a percentage above 0 and up to 100", text,
                                   row->name);
    ((options *)user)->keep = percent / 100;
    return -1;
}

static int take_ratio(void *user, const option_row *row, const char *text) {
    float *out = ((options *)user)->ratio;
    char *end, *last;
    out[0] = strtof(text, &end);
    out[1] = *end == ':' ? strtof(end + 1, &last) : 0;
    if (end == text || *end != ':' || last == end + 1 || *last || !(out[0] > 0 && out[0] < 1e6f) ||
        !(out[1] > 0 && out[1] < 1e6f))
        return program_usage_error("invalid value '%s' for --%s: expected two numbers such as 3:1", text, row->name);
    return -1;
}

static int take_pair(void *user, const option_row *row, const char *text) {
    options *o = user;
    if (o->n_pairs == MOST_PAIRS) return program_usage_error("more than %d --%s options", (int)MOST_PAIRS, row->name);
    o->pairs[o->n_pairs++] = text;
    return -1;
}

#define CHOICE "Choice of experts"
#define CHANGES "Other changes"

static const option_row own_rows[] = {
    { "model", "IN", "input model", .letter = 'm', .group = GROUP_FILES, OPTION_MEMBER(ROW_WORD, common.model) },
    { "output", "OUT", "output model; created only when complete", .letter = 'o', .group = GROUP_FILES,
      OPTION_MEMBER(ROW_WORD, common.output) },
    { "max-len", "N", "skip lines with more than N tokens", .group = GROUP_FILES,
      OPTION_INT(common.settings.max_len, 4, 1 << 16) },
    { "experts", "FILE", "keep the experts listed in a JSON file", .group = CHOICE, OPTION_MEMBER(ROW_WORD, experts),
      .more =
          ": a list of indices, or an object with one list per direction (\"eng_Latn-deu_Latn\") or language. Indices "
          "are consecutive across mixtures, encoder first: mixture x experts per mixture + expert. If there is a list "
          "per language, encoder experts apply to source languages and decoder experts to target languages" },
    { "sample", "FILE", "keep the experts that are most important for a text; a few hundred lines suffice",
      .group = CHOICE, OPTION_MEMBER(ROW_WORD, sample),
      .more = ". Lines contain source language TAB target language TAB source TAB target; if the target is missing, IN "
              "translates the source first. For a language model, lines contain text" },
    { "keep", "N%", "percentage of experts to keep with --sample", .group = CHOICE, .kind = ROW_CALL, .take = take_keep,
      .more = ". It applies to each source language in every encoder mixture and to each target language in every "
              "decoder mixture. No mixture keeps fewer experts than a token uses" },
    { "ratio", "A:B", "keep encoder and decoder experts in the ratio A:B (default: 1:1)", .group = CHOICE,
      .kind = ROW_CALL, .take = take_ratio },
    { "rank", "NAME", "measure of importance: first, mass or output", .group = CHOICE, OPTION_INT(rank, 0, RANKS - 1),
      .names = rank_names, .values = "first, mass or output",
      .more = " (default: mass for decoder-only models, otherwise first). first is the share of tokens that rank the "
              "expert first, times exp(its mean weight for these tokens) (Koishekenov et al. 2023). mass is the sum of "
              "the expert's weights. output is the mean of weight times output norm over the expert's tokens (Lasby et "
              "al. 2025); lines are then processed one at a time" },
    { "pair", "SRC-TGT", "translation direction to support; may be repeated (default: the sample's)", .group = CHOICE,
      .kind = ROW_CALL, .take = take_pair, .repeated = 1 },
    { "languages", "A,B,...", "support all directions between these languages", .group = CHOICE,
      OPTION_MEMBER(ROW_WORD, languages) },
    { "no-choice-bias", NULL,
      "set the choice bias of sigmoid gates to 0, because it was trained to balance all experts of IN",
      .group = CHANGES, OPTION_FLAG(unbiased) },
    { "measure", "FILE",
      "compare OUT with IN on a sample; print and store the loss and the share of identical translations",
      .group = CHANGES, OPTION_MEMBER(ROW_WORD, measure),
      .more = ". Lines have the same format as for --sample, with targets" },
    { 0 },
};

static const option_program program = {
    .name = "moe-prune",
    .usage = "-m IN -o OUT --experts FILE [OPTION]...\n-m IN -o OUT --sample FILE --keep N% [OPTION]...",
    .about =
        "Remove experts from a model, for example those that some languages do not need.\n"
        "\n"
        "The other experts and their router rows are removed; all other weights are unchanged. For a few languages "
        "a fraction of the experts does nearly all of the work, but translations change. OUT knows its languages "
        "and rejects others; moe-info lists the remaining experts.",
    OPTION_LISTS(OPTION_OWN, PROGRAM_ROWS("ids pretokenized verbose quiet"), PROGRAM_SPEED_ROWS),
    .notes =
        "An expert is kept if any direction needs it. If --sample is given, also together with --experts, gate "
        "thresholds are recomputed for the remaining experts as by moe-calibrate; otherwise they are unchanged. With "
        "two levels of gates, groups that lose all experts are removed, and all other groups keep equal numbers of "
        "experts. OUT contains neither the golden sentences nor the measured quality of IN. If OUT cannot translate "
        "back, it reranks only on request.\n"
        "\n"
        "Exit status: 0 done, 2 usage error, 3 model, expert list or memory error, 4 input or output error.\n",
    .examples = "  moe-prune -m in.bin -o en-de.bin --experts list.json --pair en-de\n"
                "  moe-prune -m in.bin -o en-de.bin --sample sample.tsv --keep 25%\n",
    .required = "model output",
    OPTION_EXCLUSIONS("experts keep rank", "ids pretokenized", "pair languages"),
    .version = program_version,
};

static int parse_options(int argc, char **argv, options *o) {
    *o = (options){ .common = program_common_none(), .ratio = { 1, 1 }, .rank = -1 };
    const int status = option_parse(&program, argc, argv, o);
    if (status >= 0) return status;
    if (!o->experts && !(o->sample && o->keep > 0))
        return program_usage_error("missing --experts FILE, or --sample FILE and --keep N%%");
    return program_check_copy(o->common.model, o->common.output);
}

/* ==== 2. Plan =========================================================================================== */

/* The remaining experts of a mixture. */
typedef struct mixture {
    moe_mixture about;
    size_t first;           /* index of the mixture's first expert in lists of experts */
    char *remains;          /* [experts] */
    uint32_t *kept, *group; /* [n] remaining experts, [n_groups] remaining groups; ascending */
    size_t n, n_groups;
    int decodes;
} mixture;

/* A translation direction, with language codes as the model spells them, or as given if the model has no languages. */
typedef struct direction {
    char code[2][CODE];
} direction;

typedef struct plan {
    const options *options;
    const moe_model *model;
    const text_front *front;
    mixture *mixtures;
    size_t n_mixtures, experts, kept, encoders; /* total experts; experts kept; experts of the encoder */
    int biased;                                 /* 1 if a gate has a choice bias */
    direction *pairs;                           /* [n_pairs] */
    size_t n_pairs;
    passes text;     /* the text of --sample */
    size_t unscored; /* lines that the model cannot score */
    text_bytes by;   /* description of the criterion for the metadata */
} plan;

static moe_status find_mixtures(plan *p, moe_error *e) {
    const size_t n = moe_model_mixture_count(p->model);
    if (!n) return text_fail(e, MOE_ERROR_ARGUMENT, "", "the model has no experts");
    if (!(p->mixtures = calloc(n, sizeof *p->mixtures))) return text_out_of_memory(e);
    for (; p->n_mixtures < n; p->n_mixtures++) {
        mixture *x = &p->mixtures[p->n_mixtures];
        x->about = moe_model_mixture(p->model, p->n_mixtures);
        x->first = p->experts;
        x->decodes = strncmp(x->about.layer, "encoder.", 8) != 0;
        p->experts += x->about.experts;
        if (!x->decodes) p->encoders = p->experts;
        x->remains = calloc(x->about.experts, 1);
        x->kept = calloc(x->about.experts, sizeof *x->kept);
        x->group = calloc(x->about.groups + 1, sizeof *x->group);
        if (!x->remains || !x->kept || !x->group) return text_out_of_memory(e);
    }
    return MOE_OK;
}

/* Return an error if --no-choice-bias is given and no gate has a choice bias. */
static moe_status find_bias(plan *p, moe_error *e) {
    for (size_t i = 0; i < moe_model_tensor_count(p->model); i++) {
        const moe_span name = moe_model_tensor(p->model, i).name;
        p->biased |= text_ends_with(name.data, name.length, ".gate.choice");
    }
    if (p->biased || !p->options->unbiased) return MOE_OK;
    return text_fail(e, MOE_ERROR_ARGUMENT, "", "--no-choice-bias: no gate of the model has a choice bias");
}

static void free_plan(plan *p) {
    for (size_t i = 0; i < p->n_mixtures; i++)
        free(p->mixtures[i].remains), free(p->mixtures[i].kept), free(p->mixtures[i].group);
    free(p->mixtures), free(p->pairs);
    passes_free(&p->text);
    text_bytes_free(&p->by);
}

/* Check that a gate can select `k` of `n` experts or groups. */
static moe_status enough(const mixture *x, moe_gate gate, size_t k, size_t n, const char *what, moe_error *e) {
    if (n && (gate != MOE_GATE_TOPK || n >= k)) return MOE_OK;
    return text_fail(e, MOE_ERROR_ARGUMENT, "", "only %zu %s of %s would remain, but a token uses %zu", n, what,
                     x->about.layer, k ? k : 1);
}

/* List the remaining experts of a mixture and check that its gate can use them. */
static moe_status settle(plan *p, mixture *x, moe_error *e) {
    const moe_mixture *a = &x->about;
    const size_t each = a->groups ? a->experts / a->groups : a->experts;
    size_t in_group = 0;
    x->n = x->n_groups = 0;
    for (size_t i = 0; i < a->experts; i++)
        if (x->remains[i]) x->kept[x->n++] = (uint32_t)i;
    p->kept += x->n;
    for (size_t g = 0; g < a->groups; g++) {
        size_t n = 0;
        for (size_t i = 0; i < each; i++) n += (size_t)(x->remains[g * each + i] != 0);
        if (!n) continue;
        if (x->n_groups && n != in_group)
            return text_fail(
                e, MOE_ERROR_UNSUPPORTED, "",
                "%zu experts of group %zu of %s would remain, but %zu of another group: groups must have equal sizes",
                n, g, a->layer, in_group);
        in_group = n;
        x->group[x->n_groups++] = (uint32_t)g;
    }
    if (!a->groups) return enough(x, a->gate, a->k, x->n, "experts", e);
    const moe_status status = enough(x, a->parent_gate, a->parent_k, x->n_groups, "groups", e);
    return status ? status : enough(x, a->gate, a->k, in_group, "experts of a group", e);
}

/* ==== 3. Directions ===================================================================================== */

/* Copy a language code as the model spells it, or as given if the model has no languages. */
static moe_status spell(const plan *p, const char *code, int target, char out[CODE], moe_error *e) {
    const moe_span known = text_language_spelled(p->model, code, target);
    int32_t tag;
    if (known.data) return snprintf(out, CODE, "%.*s", (int)known.length, known.data), MOE_OK;
    if (!text_languages_of(p->model, target).n) return snprintf(out, CODE, "%s", code), MOE_OK;
    return text_language(p->front, code, target, &tag, e); /* the error message lists the languages */
}

/* Return the index of a direction, or n_pairs if the user did not give the direction. */
static size_t find_pair(const plan *p, const char *source, const char *target) {
    size_t i = 0;
    while (i < p->n_pairs && (strcmp(p->pairs[i].code[0], source) != 0 || strcmp(p->pairs[i].code[1], target) != 0))
        i++;
    return i;
}

static moe_status add_pair(plan *p, const char *source, const char *target, moe_error *e) {
    direction found, *more = realloc(p->pairs, (p->n_pairs + 1) * sizeof *more);
    if (!more) return text_out_of_memory(e);
    p->pairs = more;
    moe_status status = spell(p, source, 0, found.code[0], e);
    if (!status) status = spell(p, target, 1, found.code[1], e);
    if (!status && find_pair(p, found.code[0], found.code[1]) == p->n_pairs) p->pairs[p->n_pairs++] = found;
    return status;
}

/* Add a direction like "eng_Latn-deu_Latn"; codes may contain dashes. */
static moe_status add_named_pair(plan *p, const char *pair, moe_error *e) {
    moe_status status = MOE_ERROR_ARGUMENT;
    text_fail(e, status, "", "'%.80s' is not a pair of languages such as eng_Latn-deu_Latn", pair);
    for (const char *dash = strchr(pair, '-'); dash && status == MOE_ERROR_ARGUMENT; dash = strchr(dash + 1, '-')) {
        char source[CODE];
        if (dash == pair || !dash[1] || dash - pair >= CODE || strlen(dash + 1) >= CODE) continue;
        snprintf(source, sizeof source, "%.*s", (int)(dash - pair), pair);
        status = add_pair(p, source, dash + 1, e);
    }
    return status;
}

static moe_status add_languages(plan *p, const char *list, moe_error *e) {
    char codes[64][CODE];
    size_t n = 0;
    moe_status status = MOE_OK;
    for (const char *at = list; *at; at += *at == ',') {
        const size_t length = strcspn(at, ",");
        if (!length || length >= CODE || n == 64)
            return text_fail(e, MOE_ERROR_ARGUMENT, "", "--languages expects up to 64 codes separated by commas");
        snprintf(codes[n++], CODE, "%.*s", (int)length, at);
        at += length;
    }
    if (n < 2) return text_fail(e, MOE_ERROR_ARGUMENT, "", "--languages expects two languages or more");
    for (size_t a = 0; a < n && !status; a++)
        for (size_t b = 0; b < n && !status; b++)
            if (a != b) status = add_pair(p, codes[a], codes[b], e);
    return status;
}

/* ==== 4. Lists ========================================================================================== */

/* Keep the listed experts from `least` to `most` - 1 and ignore other experts. Indices that do not exist in the model
 * are an error. */
static moe_status keep_listed(plan *p, const cJSON *list, size_t least, size_t most, moe_error *e) {
    const cJSON *item;
    if (!cJSON_IsArray(list)) return text_fail(e, MOE_ERROR_FORMAT, "", "expected a list of expert indices");
    cJSON_ArrayForEach(item, list) {
        const double number = cJSON_IsNumber(item) ? item->valuedouble : -1;
        if (!(number >= 0 && number < (double)p->experts) || number != (double)(size_t)number) {
            if (!cJSON_IsNumber(item)) return text_fail(e, MOE_ERROR_FORMAT, "", "expected a list of expert indices");
            return text_fail(e, MOE_ERROR_FORMAT, "", "expert %.10g is out of range: the model has 0 to %zu", number,
                             p->experts - 1);
        }
        const size_t id = (size_t)number;
        size_t i = 0;
        while (i + 1 < p->n_mixtures && id >= p->mixtures[i + 1].first) i++;
        if (id >= least && id < most) p->mixtures[i].remains[id - p->mixtures[i].first] = 1;
    }
    return MOE_OK;
}

/* Find the list of a language by any spelling of the language's code. Set *out to NULL if the language has no list. */
static moe_status list_of(const cJSON *lists, const char *code, const cJSON **out, moe_error *e) {
    size_t n = 0;
    const cJSON *item;
    const char **keys = calloc((size_t)cJSON_GetArraySize(lists) + 1, sizeof *keys);
    if (!keys) return text_out_of_memory(e);
    cJSON_ArrayForEach(item, lists) keys[n++] = item->string ? item->string : "";
    const ptrdiff_t found = text_language_among(keys, n, code, 0);
    *out = found < 0 ? NULL : cJSON_GetArrayItem(lists, (int)found);
    free(keys);
    return MOE_OK;
}

static moe_status keep_of_pair(plan *p, const cJSON *lists, const direction *pair, moe_error *e) {
    char key[2 * CODE + 1];
    snprintf(key, sizeof key, "%s-%s", pair->code[0], pair->code[1]);
    const cJSON *whole = cJSON_GetObjectItemCaseSensitive(lists, key);
    moe_status status = whole ? keep_listed(p, whole, 0, p->experts, e) : MOE_OK;
    for (int side = 0; side < 2 && !whole && !status; side++) {
        const cJSON *list = NULL;
        status = list_of(lists, pair->code[side], &list, e);
        if (!status && !list)
            status = text_fail(e, MOE_ERROR_ARGUMENT, "", "neither the pair %s nor the language %s is listed", key,
                               pair->code[side]);
        if (!status) status = keep_listed(p, list, side ? p->encoders : 0, side ? p->experts : p->encoders, e);
    }
    return status;
}

/* Read a file; *out is NUL-terminated. */
static moe_status read_file(const char *path, text_bytes *out, moe_error *e) {
    char block[1 << 16];
    FILE *in = fopen(path, "rb");
    if (!in) return text_fail(e, MOE_ERROR_IO, "", "cannot open %s: %s", path, strerror(errno));
    size_t n;
    while (out->length <= LONGEST_LIST && !out->failed && (n = fread(block, 1, sizeof block, in)) > 0)
        text_append(out, block, n);
    const int broken = ferror(in);
    text_append(out, "", 1);
    fclose(in);
    if (broken) return text_fail(e, MOE_ERROR_IO, "", "cannot read %s: %s", path, strerror(errno));
    if (out->failed) return text_out_of_memory(e);
    return out->length > LONGEST_LIST ? text_fail(e, MOE_ERROR_FORMAT, "", "longer than 1 GiB") : MOE_OK;
}

static moe_status keep_by_list(plan *p, const char *path, moe_error *e) {
    text_bytes text = { 0 };
    moe_status status = read_file(path, &text, e);
    cJSON *lists = status ? NULL : cJSON_ParseWithLengthOpts(text.data, text.length, NULL, 1);
    text_bytes_free(&text);
    if (status) return status;
    if (cJSON_IsArray(lists)) status = keep_listed(p, lists, 0, p->experts, e);
    else if (!cJSON_IsObject(lists))
        status = text_fail(e, MOE_ERROR_FORMAT, "", "expected a JSON list or an object of lists");
    else if (!p->n_pairs)
        status = text_fail(e, MOE_ERROR_ARGUMENT, "", "the file has lists by language: use --pair or --languages");
    for (size_t i = 0; i < p->n_pairs && cJSON_IsObject(lists) && !status; i++)
        status = keep_of_pair(p, lists, &p->pairs[i], e);
    cJSON_Delete(lists);
    const char *base = system_name(path);
    text_append_string(&p->by, "list ");
    text_append_clean(&p->by, base, strlen(base));
    return status;
}

/* ==== 5. Importance ===================================================================================== */

/* Use of a mixture's experts by each language. Languages are identified by their tags. */
typedef struct uses {
    expert_use *each; /* [n] */
    int32_t *tags;
    size_t n;
} uses;

typedef struct survey {
    plan *plan;
    uses *of;       /* [mixtures] */
    float *weights; /* [rows, experts] weights of the last traced gate */
} survey;

static void free_survey(survey *v) {
    for (size_t m = 0; v->of && m < v->plan->n_mixtures; m++) {
        for (size_t i = 0; i < v->of[m].n; i++) expert_use_end(&v->of[m].each[i]);
        free(v->of[m].each), free(v->of[m].tags);
    }
    free(v->of), free(v->weights);
}

/* Return the statistics of a language, or NULL if out of memory. */
static expert_use *use_of(uses *all, int32_t tag, size_t experts) {
    for (size_t i = 0; i < all->n; i++)
        if (all->tags[i] == tag) return &all->each[i];
    expert_use *more = realloc(all->each, (all->n + 1) * sizeof *more);
    if (more) all->each = more;
    int32_t *tags = realloc(all->tags, (all->n + 1) * sizeof *tags);
    if (tags) all->tags = tags;
    if (!more || !tags || !expert_use_begin(&more[all->n], experts)) return NULL;
    tags[all->n] = tag;
    return &more[all->n++];
}

static int32_t language_of(const mixture *x, const text_pair *line) {
    return x->decodes ? line->tag : line->source_tag;
}

static void see_routing(void *user, const moe_routing *r) {
    survey *v = user;
    size_t m = 0, best = 0;
    while (strcmp(v->plan->mixtures[m].about.layer, r->layer) != 0) m++;
    const mixture *x = &v->plan->mixtures[m];
    expert_use *u = use_of(&v->of[m], language_of(x, r->user), x->about.experts);
    if (!u) text_out_of_memory(&v->plan->text.trouble);
    for (size_t i = 0; u && i < r->n; i++) {
        u->sum[r->experts[i]] += (double)r->weights[i];
        if (r->weights[i] > r->weights[best]) best = i;
    }
    if (!u || !r->n) return;
    u->first[r->experts[best]]++;
    u->weight[r->experts[best]] += (double)r->weights[best];
}

/* Trace callback: store a gate's weights, then add the norms of its experts' weighted outputs. */
static void see_sizes(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    survey *v = user;
    const text_pair *line = &v->plan->text.sample.pairs[v->plan->text.next - 1];
    for (size_t m = 0; m < v->plan->n_mixtures; m++) {
        const mixture *x = &v->plan->mixtures[m];
        const size_t length = strlen(x->about.layer), n = x->about.experts;
        if (strncmp(name, x->about.layer, length) != 0 || cols != n) continue;
        if (strcmp(name + length, ".gate") == 0) {
            float *more = realloc(v->weights, (rows * n + 1) * sizeof *more);
            if (!more) text_out_of_memory(&v->plan->text.trouble);
            if (more) v->weights = more;
            for (size_t r = 0; more && r < rows; r++) memcpy(more + r * n, data + r * stride, n * sizeof *more);
        }
        if (strcmp(name + length, ".experts.sizes") != 0 || v->plan->text.trouble.code) continue;
        expert_use *u = use_of(&v->of[m], language_of(x, line), n);
        if (!u) text_out_of_memory(&v->plan->text.trouble);
        for (size_t r = 0; u && r < rows; r++)
            for (size_t i = 0; i < n; i++) {
                if (!(data[r * stride + i] > 0)) continue;
                u->output[i] += (double)v->weights[r * n + i] * (double)data[r * stride + i];
                u->measured[i]++;
            }
    }
}

/* Return the minimum number of experts (per group) or groups that a gate needs. */
static size_t least_inside(const moe_mixture *a) { return a->gate == MOE_GATE_TOPK ? a->k : 1; }
static size_t least_groups(const moe_mixture *a) {
    return a->groups && a->parent_gate == MOE_GATE_TOPK ? a->parent_k : 1;
}

/* Return the importance of the best `groups` groups with their best `inside` experts each. Mark these experts in
 * `remains` unless it is NULL. The experts of each group must be sorted. */
static double best_groups(const ranked_expert *all, const moe_mixture *a, size_t groups, size_t inside,
                          ranked_expert *order, char *remains) {
    const size_t of = a->groups ? a->groups : 1, each = a->experts / of;
    double sum = 0;
    for (size_t g = 0; g < of; g++) {
        order[g] = (ranked_expert){ .expert = g };
        for (size_t i = 0; i < inside; i++) {
            order[g].importance += all[g * each + i].importance;
            order[g].sum += all[g * each + i].sum;
        }
    }
    rank_sort(order, of);
    for (size_t g = 0; g < groups; g++) {
        sum += order[g].importance;
        for (size_t i = 0; remains && i < inside; i++) remains[all[order[g].expert * each + i].expert] = 1;
    }
    return sum;
}

/* Keep the n most important experts of a mixture. In a mixture with groups, keep the same number of experts in each
 * remaining group, at most n in all, and choose the number of groups that maximises the total importance. */
static moe_status keep_best(mixture *x, const expert_use *u, expert_rank by, size_t n, moe_error *e) {
    const moe_mixture *a = &x->about;
    const size_t of = a->groups ? a->groups : 1, each = a->experts / of;
    ranked_expert *all = calloc(a->experts, sizeof *all), *order = calloc(of, sizeof *order);
    if (!all || !order) return free(all), free(order), text_out_of_memory(e);
    for (size_t i = 0; i < a->experts; i++) all[i] = rank_expert(u, by, i);
    for (size_t g = 0; g < of; g++) rank_sort(all + g * each, each);
    size_t inside = least_inside(a), groups = least_groups(a);
    double best = -1;
    for (size_t some = inside ? inside : 1; some <= each; some++) {
        const size_t many = n / some < of ? n / some : of;
        if (many < least_groups(a)) continue;
        const double found = best_groups(all, a, many, some, order, NULL);
        if (found >= best) best = found, inside = some, groups = many;
    }
    best_groups(all, a, groups, inside, order, x->remains);
    free(all), free(order);
    return MOE_OK;
}

/* Return the number of experts to keep in a mixture according to --keep and --ratio. If --ratio assigns more experts to
 * the encoder or decoder than it has, the other side gets the surplus. */
static size_t share_of(const plan *p, const mixture *x) {
    const double all = (double)p->experts, n[2] = { (double)p->encoders, all - (double)p->encoders };
    const float *ratio = p->options->ratio;
    const double keep = (double)p->options->keep,
                 unit = keep * all / ((double)ratio[0] * n[0] + (double)ratio[1] * n[1]);
    double share[2] = { unit * (double)ratio[0], unit * (double)ratio[1] };
    for (int side = 0; side < 2; side++)
        if (share[side] > 1 && n[!side] > 0) share[!side] = (keep * all - n[side]) / n[!side], share[side] = 1;
    const double wanted = floor(share[x->decodes] * (double)x->about.experts + 0.5);
    const size_t least = least_groups(&x->about) * least_inside(&x->about);
    const size_t most = x->about.experts, some = wanted < (double)most ? (size_t)wanted : most;
    return some > least ? some : least;
}

/* Return the code of the language with tag `tag`, or NULL if no language has this tag. */
static const char *code_of(const plan *p, int32_t tag, char out[CODE]) {
    for (size_t i = 0; i < moe_model_language_count(p->model); i++) {
        const moe_span code = moe_model_language(p->model, i);
        if (moe_model_language_tag_at(p->model, i) != tag) continue;
        snprintf(out, CODE, "%.*s", (int)(code.length < CODE ? code.length : CODE - 1), code.data);
        return out;
    }
    return NULL;
}

/* Drop lines in directions that were not given. If no direction was given, use the directions of the lines. */
static moe_status choose_lines(plan *p, moe_error *e) {
    const int given = p->n_pairs > 0;
    moe_status status = MOE_OK;
    for (size_t i = 0; i < p->text.sample.count && !status; i++) {
        const text_pair *line = &p->text.sample.pairs[i];
        char source[CODE], target[CODE];
        if (!code_of(p, line->source_tag, source) || !code_of(p, line->tag, target)) continue;
        if (!given) status = add_pair(p, source, target, e);
        else p->text.left_out[i] |= find_pair(p, source, target) == p->n_pairs;
    }
    if (given && passes_left_out(&p->text) == p->text.sample.count)
        return text_fail(e, MOE_ERROR_ARGUMENT, "", "no line has one of these directions");
    return status;
}

static int measured(const expert_use *u, const mixture *x) {
    for (size_t i = 0; i < x->about.experts; i++)
        if (u->measured[i]) return 1;
    return 0;
}

static moe_status keep_by_sample(plan *p, moe_error *e) {
    survey v = { .plan = p, .of = calloc(p->n_mixtures + 1, sizeof *v.of) };
    const expert_rank by = p->options->rank >= 0 ? (expert_rank)p->options->rank : rank_default(p->encoders > 0);
    if (!v.of) return text_out_of_memory(e);
    p->text.routing = see_routing;
    p->text.user = &v;
    p->text.trace = by == RANK_OUTPUT ? see_sizes : NULL;
    p->text.alone = by == RANK_OUTPUT;
    const size_t others = passes_left_out(&p->text); /* lines in directions that OUT lacks */
    moe_status status = passes_run(&p->text, p->model, "measuring", e);
    p->unscored = passes_left_out(&p->text) - others;
    if (!status && passes_left_out(&p->text) == p->text.sample.count)
        status = text_fail(e, MOE_ERROR_ARGUMENT, "", "the model cannot score any line");
    for (size_t m = 0; m < p->n_mixtures && !status; m++)
        for (size_t i = 0; i < v.of[m].n && !status; i++)
            if (by == RANK_OUTPUT && !measured(&v.of[m].each[i], &p->mixtures[m]))
                status = text_fail(e, MOE_ERROR_UNSUPPORTED, "", "cannot measure the outputs of %s: use --rank mass",
                                   p->mixtures[m].about.layer);
            else status = keep_best(&p->mixtures[m], &v.of[m].each[i], by, share_of(p, &p->mixtures[m]), e);
    free_survey(&v);
    const char *path = p->options->sample, *base = system_name(path);
    static const char *const words[RANKS] = { "first choices", "sum of weights", "weight times size of output" };
    text_printf(&p->by, "%s in %zu lines of ", words[by], p->text.sample.count - passes_left_out(&p->text));
    text_append_clean(&p->by, base, strlen(base));
    return status;
}

/* ==== 6. Cut ============================================================================================ */

enum { KEY = 96 };

/* Changes to apply to OUT, including the storage for their keys and texts. */
typedef struct cut {
    moe_meta_entry *entries;
    moe_rows_entry *rows;
    char (*keys)[KEY];         /* [n_entries] */
    char (*names)[256];        /* [n_rows + n_vectors] */
    moe_vector_entry *vectors; /* [n_vectors] */
    float *zeros;
    size_t n_entries, n_rows, n_vectors;
    text_bytes kept, pairs, sides[2];
} cut;

static void free_cut(cut *c) {
    for (size_t i = 0; i < c->n_rows; i++) free((uint32_t *)(uintptr_t)c->rows[i].rows);
    free(c->entries), free(c->rows), free(c->keys), free(c->names), free(c->vectors), free(c->zeros);
    text_bytes_free(&c->kept), text_bytes_free(&c->pairs);
    for (int side = 0; side < 2; side++) text_bytes_free(&c->sides[side]);
}

static void put_number(cut *c, const char *layer, const char *key, size_t value) {
    char *name = c->keys[c->n_entries];
    snprintf(name, KEY, "%s.%s", layer, key);
    c->entries[c->n_entries++] = (moe_meta_entry){ .key = name, .kind = MOE_META_INT, .integer = (int64_t)value };
}

static void put_text(cut *c, const char *key, moe_meta_kind kind, const text_bytes *text) {
    if (!text->length) return;
    c->entries[c->n_entries++] = (moe_meta_entry){ .key = key, .kind = kind, .text = { text->data, text->length } };
}

/* Add metadata with the sizes of a mixture. Limit the nominal k of a threshold gate to the remaining experts. */
static void put_sizes(cut *c, const mixture *x) {
    const moe_mixture *a = &x->about;
    const size_t compete = a->groups ? x->n / x->n_groups : x->n;
    put_number(c, a->layer, "experts", x->n);
    if (a->k > compete) put_number(c, a->layer, "k", compete);
    if (!a->groups) return;
    put_number(c, a->layer, "groups", x->n_groups);
    if (a->parent_k > x->n_groups) put_number(c, a->layer, "parent.k", x->n_groups);
    else if (a->k > compete) put_number(c, a->layer, "parent.k", a->parent_k); /* parent.k defaults to k */
}

/* Add a tensor of a mixture if the tensor has the same number of rows for each expert or group. */
static moe_status put_tensor(cut *c, const mixture *x, const moe_tensor_info *t, int unbiased, moe_error *e) {
    const size_t length = strlen(x->about.layer);
    char *name = c->names[c->n_rows + c->n_vectors];
    snprintf(name, sizeof *c->names, "%.*s", (int)t->name.length, t->name.data);
    if (strncmp(name, x->about.layer, length) != 0 || name[length] != '.') return MOE_OK;
    const char *part = name + length + 1;
    const int parent = strncmp(part, "parent.", 7) == 0;
    if (!parent && strcmp(part, "experts") != 0 && strncmp(part, "experts.", 8) != 0 &&
        (strncmp(part, "gate.", 5) != 0 || strncmp(part, "gate.hidden.", 12) == 0))
        return MOE_OK;
    const size_t of = parent ? x->about.groups : x->about.experts, n = parent ? x->n_groups : x->n;
    const size_t each = (size_t)t->dims[0] / of;
    if (unbiased && strcmp(part, "gate.choice") == 0) {
        c->vectors[c->n_vectors++] = (moe_vector_entry){ name, c->zeros, n };
        return MOE_OK;
    }
    const uint32_t *kept = parent ? x->group : x->kept;
    uint32_t *rows = calloc(n * each + 1, sizeof *rows);
    if (!rows) return text_out_of_memory(e);
    for (size_t i = 0; i < n; i++)
        for (size_t r = 0; r < each; r++) rows[i * each + r] = (uint32_t)(kept[i] * each + r);
    c->rows[c->n_rows++] = (moe_rows_entry){ name, rows, n * each };
    return MOE_OK;
}

/* Append "encoder.7: 36 of 128: 0 2-4 9 ...", one line per mixture. */
static void say_kept(const plan *p, text_bytes *out) {
    for (size_t m = 0; m < p->n_mixtures; m++) {
        const mixture *x = &p->mixtures[m];
        text_printf(out, "%s%s: %zu of %zu:", m ? "\n" : "", x->about.layer, x->n, x->about.experts);
        for (size_t i = 0, end; i < x->n; i = end) {
            for (end = i + 1; end < x->n && x->kept[end] == x->kept[end - 1] + 1;) end++;
            text_printf(out, end - i > 1 ? " %u-%u" : " %u", x->kept[i], x->kept[end - 1]);
        }
    }
}

/* Append the language codes of one side, each once, one per line. */
static void say_side(const plan *p, int side, text_bytes *out) {
    for (size_t i = 0; i < p->n_pairs; i++) {
        size_t before = 0;
        while (strcmp(p->pairs[before].code[side], p->pairs[i].code[side]) != 0) before++;
        if (before == i) text_printf(out, "%s%s", out->length ? "\n" : "", p->pairs[i].code[side]);
    }
}

/* Return 1 if OUT has the reverse of every direction, which reranking needs. */
static int goes_back(const plan *p) {
    size_t i = 0;
    while (i < p->n_pairs && find_pair(p, p->pairs[i].code[1], p->pairs[i].code[0]) < p->n_pairs) i++;
    return i == p->n_pairs;
}

static moe_status put_words(const plan *p, cut *c, moe_error *e) {
    say_kept(p, &c->kept);
    for (size_t i = 0; i < p->n_pairs; i++)
        text_printf(&c->pairs, "%s%s-%s", i ? "\n" : "", p->pairs[i].code[0], p->pairs[i].code[1]);
    for (int side = 0; side < 2; side++) say_side(p, side, &c->sides[side]);
    if (c->kept.failed || c->pairs.failed || c->sides[0].failed || c->sides[1].failed || p->by.failed)
        return text_out_of_memory(e);
    put_text(c, "prune.by", MOE_META_TEXT, &p->by);
    put_text(c, "prune.kept", MOE_META_TEXTS, &c->kept);
    put_text(c, "prune.directions", MOE_META_TEXTS, &c->pairs);
    for (int side = 0; side < 2; side++)
        if (text_languages_of(p->model, side).n)
            put_text(c, side ? "languages.targets" : "languages.sources", MOE_META_TEXTS, &c->sides[side]);
    if (moe_model_meta_find(p->model, "decode.rerank") >= 0 && !goes_back(p))
        c->entries[c->n_entries++] = (moe_meta_entry){ .key = "decode.rerank", .kind = MOE_META_REAL, .real = 0 };
    return MOE_OK;
}

static moe_status save(const plan *p, const char *path, moe_error *e) {
    const size_t most = 4 * p->n_mixtures + 8, tensors = moe_model_tensor_count(p->model);
    cut c = { .entries = calloc(most, sizeof *c.entries),
              .keys = calloc(most, sizeof *c.keys),
              .rows = calloc(tensors + 1, sizeof *c.rows),
              .names = calloc(tensors + 1, sizeof *c.names),
              .vectors = calloc(p->n_mixtures + 1, sizeof *c.vectors),
              .zeros = calloc(p->experts + 1, sizeof *c.zeros) };
    const int memory = c.entries && c.keys && c.rows && c.names && c.vectors && c.zeros;
    moe_status status = memory ? put_words(p, &c, e) : text_out_of_memory(e);
    for (size_t m = 0; m < p->n_mixtures && !status; m++) {
        put_sizes(&c, &p->mixtures[m]);
        for (size_t i = 0; i < tensors && !status; i++) {
            const moe_tensor_info t = moe_model_tensor(p->model, i);
            status = put_tensor(&c, &p->mixtures[m], &t, p->options->unbiased, e);
        }
    }
    moe_save_params params = { .type = MOE_TYPE_KEEP, .experts = MOE_TYPE_KEEP };
    params.entries = c.entries, params.n_entries = c.n_entries;
    params.vectors = c.vectors, params.n_vectors = c.n_vectors;
    params.rows = c.rows, params.n_rows = c.n_rows;
    if (!status) status = moe_model_save(p->model, path, &params, e);
    free_cut(&c);
    return status;
}

/* ==== 7. Main =========================================================================================== */

/* Compute thresholds by running the text through the pruned model, which is an unnamed temporary file. */
static moe_status calibrate(const plan *p, calibration *c, moe_error *e) {
    char path[4096];
    moe_model *model = NULL;
    const int length = snprintf(path, sizeof path, "%s.moe-prune-%ld", p->options->common.output, (long)getpid());
    if (length >= (int)sizeof path) return text_fail(e, MOE_ERROR_IO, "", "the name of OUT is too long");
    moe_status status = save(p, path, e);
    if (status) return status;
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    status = file < 0 ? text_fail(e, MOE_ERROR_IO, "", "cannot open the pruned model: %s", strerror(errno))
                      : moe_model_open(path, &(moe_model_params){ .verify = -1 }, &model, e);
    unlink(path);
    c->model = model;
    if (!status) status = calibration_find(c, file, e);
    if (!status) status = calibration_measure(c, p->front->source_extra, e);
    if (!status) status = calibration_save(c, p->options->common.output, e);
    if (file >= 0) close(file);
    moe_model_close(model);
    return status;
}

/* Write OUT, with new thresholds if a text was given, else with the thresholds of IN. */
static moe_status write_out(plan *p, moe_error *e) {
    int masks = 0;
    for (size_t m = 0; m < p->n_mixtures; m++) {
        const moe_mixture *a = &p->mixtures[m].about;
        masks |= a->gate == MOE_GATE_THRESHOLD || (a->groups && a->parent_gate == MOE_GATE_THRESHOLD);
    }
    if (!masks || !p->options->sample) return save(p, p->options->common.output, e);
    calibration c = { .common = &p->options->common, .k = -1, .masks = 1, .text = p->text };
    p->text = (passes){ 0 }; /* calibration_free frees the text */
    const moe_status status = calibrate(p, &c, e);
    calibration_free(&c);
    return status;
}

/* Print the table, and open OUT to check that it is a valid model. */
static moe_status report(const plan *p, moe_error *e) {
    moe_model *out;
    const moe_status status = moe_model_open(p->options->common.output, NULL, &out, e);
    if (status) return status;
    if (!p->options->common.quiet) {
        for (size_t i = 0; i < p->n_pairs; i++)
            printf("%s%s-%s%s", i ? " " : "for ", p->pairs[i].code[0], p->pairs[i].code[1],
                   i + 1 == p->n_pairs ? "\n" : "");
        for (size_t m = 0; m < p->n_mixtures; m++) {
            const mixture *x = &p->mixtures[m];
            printf("%-14s %zu of %zu experts", x->about.layer, x->n, x->about.experts);
            if (x->about.groups) printf(", %zu of %zu groups", x->n_groups, x->about.groups);
            putchar('\n');
        }
        if (p->unscored) printf("%zu lines skipped that the model cannot score\n", p->unscored);
        if (p->biased) printf("the choice bias %s\n", p->options->unbiased ? "is 0" : "is unchanged");
        printf("%zu of %zu experts kept: %.1f MiB -> %.1f MiB\n", p->kept, p->experts,
               (double)moe_model_file_bytes(p->model) / 1048576, (double)moe_model_file_bytes(out) / 1048576);
    }
    moe_model_close(out);
    return MOE_OK;
}

int main(int argc, char **argv) {
    options o;
    int status = program_begin("moe-prune");
    if (status < 0) status = parse_options(argc, argv, &o);
    if (status >= 0) return status;

    /* Verify the checksums first: saving computes new checksums even for damaged weights. */
    const moe_model_params params = { .verify = o.common.no_verify ? -1 : 2, .copy = o.common.no_mmap };
    text_front front;
    moe_error e = { .code = MOE_OK };
    if (text_open(o.common.model, TEXT_IDS_ONLY | (o.common.no_cache ? TEXT_NO_CACHE : 0), &params, &front, &e))
        return program_model_error(o.common.model, &e);
    plan p = { .options = &o, .model = front.model, .front = &front, .text = { .common = &o.common } };
    const char *file = o.common.model;
    moe_status got = find_mixtures(&p, &e);
    if (!got) got = find_bias(&p, &e);
    if (!got && (o.sample || o.measure))
        got = moe_model_kind(front.model) == MOE_MODEL_CLASSIFIER
                  ? text_fail(&e, MOE_ERROR_ARGUMENT, "", "a classifier does not read text: use --experts only")
                  : text_open_tokeniser(&front, program_level(&o.common), &e);
    for (size_t i = 0; i < o.n_pairs && !got; i++) got = add_named_pair(&p, o.pairs[i], &e);
    if (!got && o.languages) got = add_languages(&p, o.languages, &e);
    if (!got && o.sample) file = o.sample, got = passes_read(&p.text, &front, o.sample, &e);
    if (!got && o.sample) got = choose_lines(&p, &e);
    if (!got && o.experts) file = o.experts, got = keep_by_list(&p, o.experts, &e);
    if (!got && !o.experts) got = keep_by_sample(&p, &e);
    for (size_t m = 0; m < p.n_mixtures && !got; m++) got = settle(&p, &p.mixtures[m], &e);
    if (o.unbiased) text_append_string(&p.by, ", without the choice bias");
    if (!got) file = o.common.output, got = write_out(&p, &e);
    if (!got && o.measure) file = o.measure, got = measure_loss(&front, o.common.output, o.measure, o.common.ids, &e);
    if (!got) file = o.common.output, got = report(&p, &e);
    status = got ? program_file_error(file, &e) : program_printed();
    /* the cause is an invalid option, not the model or the list */
    if (got == MOE_ERROR_ARGUMENT && file != o.sample && file != o.measure) status = EXIT_USAGE;
    free_plan(&p);
    text_close(&front);
    return status;
}
