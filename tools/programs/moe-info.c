/* moe-info - print the contents of a model file.
 *
 * Contents
 *   1. Metadata   read key-value pairs
 *   2. Numbers    count parameters and bytes
 *   3. Words      describe each layer on one line
 *   4. Pages      write the text output
 *   5. JSON       write all information as JSON
 *   6. Main
 *
 * Model files are untrusted, so text_append_clean removes control sequences from printed text.
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/program.h"
#include "tools/text/json.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct options {
    int tensors, attribution, check, json, no_cache;
} options;

static const option_row own_rows[] = {
    { "tensors", NULL, "also list the tensors", .group = "Output", OPTION_FLAG(tensors) },
    { "attribution", NULL, "print only the licence and the sources of the training text, in full", .group = "Output",
      OPTION_FLAG(attribution) },
    { "json", NULL, "print everything as one JSON object, with all metadata and tensors", .group = "Output",
      OPTION_FLAG(json) },
    { "check", NULL, "read the whole file and verify checksums and expert scales", .group = "Output",
      OPTION_FLAG(check) },
    OPTION_NO_CACHE(OPTION_FLAG(no_cache)),
    { 0 },
};

static const option_program program = {
    .name = "moe-info",
    .usage = "[OPTION]... MODEL",
    .about = "Print the contents of a model file.",
    OPTION_LISTS(OPTION_OWN),
    .notes = "Exit status: 0 done, 2 usage error, 3 the file is missing, damaged or not a model, 4 output error.\n",
    .examples = "  moe-info --check models/en-de-fr-es.bin\n",
    .least = 1,
    .most = 1,
};

/* ==== 1. Metadata ======================================================================================= */

static int64_t get_int(const moe_model *m, const char *key, int64_t otherwise) {
    ptrdiff_t i = moe_model_meta_find(m, key);
    return i < 0 ? otherwise : moe_model_meta_int(m, (size_t)i, 0);
}

/* Return a metadata text. It is untrusted and may contain control characters. */
static moe_span get_text(const moe_model *m, const char *key, const char *otherwise) {
    ptrdiff_t i = moe_model_meta_find(m, key);
    return i < 0 ? (moe_span){ otherwise, strlen(otherwise) } : moe_model_meta_text(m, (size_t)i, 0);
}

static int span_begins(moe_span s, const char *prefix) {
    size_t n = strlen(prefix);
    return s.length >= n && memcmp(s.data, prefix, n) == 0;
}

/* ==== 2. Numbers ======================================================================================== */

typedef struct count {
    uint64_t parameters, active;    /* total number of parameters; number used per token */
    uint64_t expert_parameters;     /* number of expert parameters */
    uint64_t bytes[MOE_TYPE_COUNT]; /* bytes of tensors of each type */
    uint64_t tensors[MOE_TYPE_COUNT];
} count;

/* Return the mixture that contains a layer or tensor ("encoder.2.experts"), or a zeroed one if no mixture does. */
static moe_mixture mixture_of(const moe_model *m, moe_span name) {
    for (size_t i = 0; i < moe_model_mixture_count(m); i++) {
        moe_mixture x = moe_model_mixture(m, i);
        size_t n = strlen(x.layer);
        if (span_begins(name, x.layer) && (name.length == n || name.data[n] == '.')) return x;
    }
    return (moe_mixture){ .layer = NULL };
}

/* Return how many of `n` experts or groups a token uses, on average for threshold gates. */
static size_t selected(moe_gate gate, size_t k, size_t n) { return program_gate_is_dense(gate) || !k ? n : k; }

/* Return how many parameters of a tensor a token uses. Noise weights do not count, because only training uses them. */
static uint64_t used_of(const moe_model *m, const moe_tensor_info *t) {
    moe_mixture x = mixture_of(m, t->name);
    const char *part = x.layer ? t->name.data + strlen(x.layer) : "";
    size_t left = t->name.length - (size_t)(x.layer ? part - t->name.data : 0);
    moe_span rest = { part, x.layer ? left : 0 };
    if (!x.layer || !x.experts) return t->parameters;
    if (rest.length > 6 && memcmp(rest.data + rest.length - 6, ".noise", 6) == 0) return 0;
    size_t groups = x.groups ? selected(x.parent_gate, x.parent_k, x.groups) : 1, of = x.groups ? x.groups : 1;
    if (span_begins(rest, ".experts"))
        return t->parameters / x.experts * groups * selected(x.gate, x.k, x.experts / of);
    if (span_begins(rest, ".gate.") && !span_begins(rest, ".gate.hidden")) return t->parameters / of * groups;
    return t->parameters;
}

/* Return 1 for names like "network.0.experts.weight" and "network.0.experts.bias". */
static int is_linear_experts(const moe_model *m, moe_span name) {
    const char *layer = mixture_of(m, name).layer;
    size_t n = layer ? strlen(layer) : 0;
    return layer && span_begins((moe_span){ name.data + n, name.length - n }, ".experts.");
}

/* Return the total bytes of all experts that can be read on demand, and set *largest to the largest expert's bytes. */
static uint64_t expert_bytes(const moe_model *m, uint64_t *largest) {
    uint64_t all = 0;
    *largest = 0;
    for (size_t i = 0; i < moe_model_tensor_count(m); i++) {
        const moe_tensor_info t = moe_model_tensor(m, i);
        if (!t.experts) continue;
        all += t.bytes;
        if (t.bytes / t.dims[0] > *largest) *largest = t.bytes / t.dims[0];
    }
    return all;
}

static count count_all(const moe_model *m) {
    count c = { 0 };
    for (size_t i = 0; i < moe_model_tensor_count(m); i++) {
        moe_tensor_info t = moe_model_tensor(m, i);
        c.parameters += t.parameters;
        if ((unsigned)t.type < MOE_TYPE_COUNT) c.bytes[t.type] += t.bytes, c.tensors[t.type]++;
        if (t.experts || is_linear_experts(m, t.name)) c.expert_parameters += t.parameters;
        c.active += used_of(m, &t);
    }
    return c;
}

static const char *human_bytes(uint64_t n, char out[32]) {
    if (n < 10240) snprintf(out, 32, "%llu bytes", (unsigned long long)n);
    else if (n < 10u << 20) snprintf(out, 32, "%.1f KiB", (double)n / 1024);
    else snprintf(out, 32, "%.1f MiB", (double)n / 1048576);
    return out;
}

static const char *human_count(uint64_t n, char out[32]) {
    if (n < 100000) snprintf(out, 32, "%llu", (unsigned long long)n);
    else snprintf(out, 32, "%.2f million", (double)n / 1e6);
    return out;
}

/* ==== 3. Words ========================================================================================== */

/* Describe which experts or groups are used; `empty` is the policy for tokens that select no expert. */
static void describe_level(moe_gate gate, size_t k, const char *empty, text_bytes *out) {
    if (program_gate_is_dense(gate)) text_printf(out, "all used (%s gate)", moe_gate_name(gate));
    else if (gate == MOE_GATE_TOPK) text_printf(out, "the best %zu used for each token", k);
    else
        text_printf(out, "%zu used for a token on average (threshold gate), %s", k,
                    strcmp(empty, "zero") == 0 ? "none if all fail the threshold"
                                               : "the best if all fail the threshold");
}

/* Return an attribute of layer `at`, or the default if the attribute is absent. */
static moe_setting setting(const moe_model *m, size_t at, const char *key) {
    for (size_t i = 0;; i++) {
        const moe_setting found = moe_model_layer_setting(m, at, i);
        if (!found.key || strcmp(found.key, key) == 0) return found;
    }
}

static long long number(const moe_model *m, size_t at, const char *key) {
    return (long long)setting(m, at, key).number;
}

static const char *word(const moe_model *m, size_t at, const char *key) {
    const moe_setting found = setting(m, at, key);
    return found.text ? found.text : "?";
}

/* Append a description like "bidirectional LSTM, 2 x 512 cells, projected to 2 x 256". */
static void describe_lstm(const moe_model *m, size_t at, text_bytes *out) {
    const int both = number(m, at, "bidirectional") != 0;
    text_printf(out, "%sLSTM, %s%lld cells", both ? "bidirectional " : "", both ? "2 x " : "", number(m, at, "hidden"));
    if (number(m, at, "proj")) text_printf(out, ", projected to %s%lld", both ? "2 x " : "", number(m, at, "proj"));
    if (both) text_printf(out, ", joined by %s", word(m, at, "merge"));
    if (strcmp(word(m, at, "context"), "none") != 0) text_printf(out, ", reads the %s context", word(m, at, "context"));
}

/* Append "mixture of 32 experts of 512 hidden units, 2 used for a token on average (threshold gate), ...". */
static void describe_mixture(const moe_model *m, size_t at, const char *name, text_bytes *out) {
    const moe_mixture x = mixture_of(m, (moe_span){ name, strlen(name) });
    const int linear = strcmp(word(m, at, "expert"), "linear") == 0;
    text_printf(out,
                linear ? "mixture of %zu linear experts of %zu columns" : "mixture of %zu experts of %zu hidden units",
                x.experts, x.hidden);
    if (linear && strcmp(word(m, at, "activation"), "relu") == 0) text_append_string(out, " and relu");
    if (x.groups) {
        text_printf(out, ", in %zu groups of %zu: of the groups ", x.groups, x.experts / x.groups);
        describe_level(x.parent_gate, x.parent_k, word(m, at, "parent.empty"), out);
        text_append_string(out, "; inside them ");
    } else {
        text_append_string(out, ", ");
    }
    describe_level(x.gate, x.k, word(m, at, "empty"), out);
    if (number(m, at, "gate.hidden"))
        text_printf(out, ", gate with a hidden layer of %lld", number(m, at, "gate.hidden"));
    if (number(m, at, "gate.relu")) text_append_string(out, ", logits rectified");
    if (strcmp(word(m, at, "weights"), "chosen") != 0)
        text_printf(out, ", weights: %s", strcmp(word(m, at, "weights"), "all") == 0 ? "softmax of all" : "sigmoids");
    if (strcmp(word(m, at, "expert"), "gated") == 0) text_append_string(out, ", swish, gated");
    if (number(m, at, "shared")) text_printf(out, ", a shared expert of %lld hidden units", number(m, at, "shared"));
    if (x.noise) text_append_string(out, ", optional noise");
    if (strcmp(word(m, at, "output"), "none") != 0) text_printf(out, ", %s output", word(m, at, "output"));
}

static void describe_layer(const moe_model *m, size_t at, text_bytes *out) {
    const moe_layer_info layer = moe_model_layer(m, at);
    const char *norm = word(m, at, "norm");
    if (strcmp(layer.kind, "lstm") == 0) describe_lstm(m, at, out);
    else if (strcmp(layer.kind, "moe") == 0) describe_mixture(m, at, layer.name, out);
    else if (strcmp(layer.kind, "ffn") == 0)
        text_printf(out, "feed-forward, %lld hidden units, %s%s", number(m, at, "hidden"), word(m, at, "activation"),
                    number(m, at, "gated") ? ", gated" : "");
    else if (strcmp(layer.kind, "ssru") == 0) text_append_string(out, "simpler simple recurrent unit");
    else if (strcmp(layer.kind, "average") == 0)
        text_printf(out, "average attention, depth %lld, %lld hidden units, %s%s", number(m, at, "depth"),
                    number(m, at, "hidden"), word(m, at, "activation"), number(m, at, "gated") ? ", gated" : "");
    else if (strcmp(layer.kind, "delta") == 0)
        text_printf(out,
                    "Gated DeltaNet, %lld heads of %lld columns, %lld key heads of %lld, convolution of %lld tokens",
                    number(m, at, "heads"), number(m, at, "head.size"), number(m, at, "key_heads"),
                    number(m, at, "key.size"), number(m, at, "kernel"));
    else if (strcmp(layer.kind, "norm") == 0) text_printf(out, "%s norm", word(m, at, "norm.kind"));
    else
        text_printf(out, "%s, %lld heads%s", strcmp(layer.kind, "cross") == 0 ? "attention to the source" : "attention",
                    number(m, at, "heads"), number(m, at, "raw") ? ", keys and values without norm" : "");
    const int attends = strcmp(layer.kind, "attention") == 0;
    if (attends && number(m, at, "gated")) text_append_string(out, " with gates");
    if (strcmp(layer.kind, "delta") != 0 && number(m, at, "kv_heads") != number(m, at, "heads"))
        text_printf(out, " (%lld for keys)", number(m, at, "kv_heads"));
    if (number(m, at, "window")) text_printf(out, ", window of %lld tokens", number(m, at, "window"));
    if (number(m, at, "reach")) text_printf(out, ", relative positions up to %lld", number(m, at, "reach"));
    if (number(m, at, "rotary")) text_append_string(out, ", rotary positions");
    const int both = strcmp(norm, "both") == 0;
    if (both || strcmp(norm, "before") == 0 || strcmp(norm, "after") == 0)
        text_printf(out, ", %snorm %s", strcmp(word(m, at, "norm.kind"), "rms") == 0 ? "RMS " : "",
                    both ? "before and after" : norm);
    if (number(m, at, "residual")) text_append_string(out, ", residual");
}

/* Names of model kinds, for JSON and for the text output. */
static const char *const kinds[][2] = {
    [MOE_MODEL_TRANSLATION] = { "translation", "translation model: moe-translate" },
    [MOE_MODEL_LANGUAGE] = { "language", "language model: moe-score" },
    [MOE_MODEL_CLASSIFIER] = { "classifier", "classifier of rows of numbers: moe-classify" },
};

/* ==== 4. Pages ========================================================================================== */

static void put_layers(const moe_model *m, text_bytes *out) {
    for (size_t at = 0; at < moe_model_layer_count(m); at++) {
        const moe_layer_info layer = moe_model_layer(m, at);
        const char *dot = strchr(layer.name, '.');
        if (strcmp(layer.kind, "gnmt-attention") == 0) {
            text_printf(out, "  %-18s %s, size %lld, query from decoder %lld (%s)\n", "attention", word(m, at, "kind"),
                        number(m, at, "size"), number(m, at, "layer"), word(m, at, "query"));
            continue;
        }
        text_printf(out, "  %.*s %-10s ", (int)(dot - layer.name), layer.name, dot + 1);
        describe_layer(m, at, out);
        text_append(out, "\n", 1);
    }
}

/* Append a metadata value as text; append only the size of a byte array. */
static void append_value(const moe_model *m, size_t i, text_bytes *out) {
    const moe_meta_kind kind = moe_model_meta_kind(m, i);
    const size_t n = kind == MOE_META_BYTES ? 0 : moe_model_meta_length(m, i);
    if (kind == MOE_META_BYTES) text_printf(out, "%zu bytes", moe_model_meta_text(m, i, 0).length);
    for (size_t k = 0; k < n; k++) {
        if (k) text_append_string(out, kind == MOE_META_TEXTS ? "; " : " ");
        if (kind == MOE_META_INT || kind == MOE_META_INTS)
            text_printf(out, "%lld", (long long)moe_model_meta_int(m, i, k));
        else if (kind == MOE_META_REAL || kind == MOE_META_REALS)
            text_printf(out, "%.10g", moe_model_meta_real(m, i, k));
        else {
            const moe_span text = moe_model_meta_text(m, i, k);
            text_append_clean(out, text.data, text.length);
        }
    }
}

enum { LONGEST_VALUE = 160 }; /* maximum number of bytes shown per entry */

/* Append a line with a metadata entry; truncate a long value between characters. Return 1 unless the value is empty. */
static int put_value(moe_span label, const moe_model *m, size_t i, text_bytes *out) {
    text_printf(out, "  %-18.*s ", (int)label.length, label.data);
    const size_t begin = out->length;
    append_value(m, i, out);
    const size_t length = out->length - begin;
    if (length > LONGEST_VALUE) {
        out->length = begin + text_utf8_cut(out->data + begin, length, LONGEST_VALUE);
        text_printf(out, " ... (%zu bytes in total)", length);
    }
    text_append(out, "\n", 1);
    return length > 0;
}

/* Append the entries with keys that begin with `prefix`, without the prefix. */
static void put_entries(const moe_model *m, const char *title, const char *prefix, text_bytes *out) {
    const size_t skip = strlen(prefix);
    int any = 0;
    for (size_t i = 0; i < moe_model_meta_count(m); i++) {
        const moe_span key = moe_model_meta_key(m, i);
        if (!span_begins(key, prefix)) continue;
        if (!any++) text_printf(out, "\n%s\n", title);
        put_value((moe_span){ key.data + skip, key.length - skip }, m, i, out);
    }
}

static void put_text(const moe_model *m, const char *label, const char *key, text_bytes *out) {
    const ptrdiff_t i = moe_model_meta_find(m, key);
    const size_t begin = out->length;
    if (i >= 0 && !put_value((moe_span){ label, strlen(label) }, m, (size_t)i, out)) out->length = begin;
}

/* Append a text entry line by line. */
static void put_lines(const moe_model *m, const char *key, text_bytes *out) {
    const moe_span s = get_text(m, key, "");
    for (size_t at = 0, end; at < s.length; at = end + 1) {
        for (end = at; end < s.length && s.data[end] != '\n';) end++;
        text_append_clean(out, s.data + at, end - at);
        text_append(out, "\n", 1);
    }
}

static void put_attribution(const moe_model *m, text_bytes *out) {
    put_lines(m, "general.licence", out);
    text_append(out, "\n", 1);
    put_lines(m, "general.attribution", out);
}

static void put_tensors(const moe_model *m, text_bytes *out) {
    text_printf(out, "\nTensors\n  %-34s %-5s %-18s %12s %12s %8s\n", "name", "type", "shape", "offset", "bytes",
                "crc-32");
    for (size_t i = 0; i < moe_model_tensor_count(m); i++) {
        const moe_tensor_info t = moe_model_tensor(m, i);
        char shape[100] = "";
        for (uint32_t d = 0; d < t.n_dims && d < 4; d++) {
            size_t used = strlen(shape);
            snprintf(shape + used, sizeof shape - used, d ? " x %llu" : "%llu", (unsigned long long)t.dims[d]);
        }
        text_append(out, "  ", 2);
        const size_t end = out->length + 34;
        text_append_clean(out, t.name.data, t.name.length);
        text_printf(out, "%*s %-5s %-18s %12llu %12llu %08x\n", out->length < end ? (int)(end - out->length) : 0, "",
                    moe_type_name(t.type), shape, (unsigned long long)t.offset, (unsigned long long)t.bytes,
                    (unsigned)t.checksum);
    }
}


static void put_pages(const text_front *front, const char *path, int tensors, int checked, text_bytes *out) {
    const moe_model *m = front->model;
    const moe_span tokeniser = get_text(m, "tokenizer.kind", "none"),
                   architecture = get_text(m, "general.architecture", "?"), init = get_text(m, "decoder.init", "zero");
    char c[32], d[32], rest[32];
    count n = count_all(m);
    text_append_string(out, path);
    text_printf(out, ": %s, file version %u\n", human_bytes(moe_model_file_bytes(m), c),
                (unsigned)moe_model_file_version(m));
    if (checked) text_printf(out, "Checksums of all %zu tensors are correct.\n", moe_model_tensor_count(m));
    text_printf(out, "\nModel\n");
    put_text(m, "name", "general.name", out);
    put_text(m, "description", "general.description", out);
    put_text(m, "licence", "general.licence", out);
    put_text(m, "attribution", "general.attribution", out);
    text_printf(out, "  %-18s %s\n", "kind", kinds[moe_model_kind(m)][1]);
    if (moe_model_kind(m) == MOE_MODEL_CLASSIFIER) {
        text_printf(out, "  %-18s %zu\n  %-18s %d\n", "inputs", moe_model_width(m), "classes",
                    (int)moe_model_vocabulary(m));
        put_text(m, "names", "classes.names", out);
    } else {
        const size_t begin = out->length;
        text_printf(out, "  %-18s ", "languages");
        const size_t languages = out->length;
        text_languages(front, out);
        if (out->length > languages) text_append(out, "\n", 1);
        else if (moe_model_kind(m) == MOE_MODEL_TRANSLATION) text_append_string(out, "one direction only\n");
        else out->length = begin;
        put_text(m, "named by authors", "languages.named", out);
        text_printf(out, "  %-18s %d tokens, tokeniser: ", "vocabulary", (int)moe_model_vocabulary(m));
        text_append_clean(out, tokeniser.data, tokeniser.length);
        text_append_string(out, moe_model_meta_find(m, "vocabulary.pieces") < 0 ? "\n" : ", with a list of pieces\n");
        if (moe_model_meta_find(m, "source.vocab.size") >= 0)
            text_printf(out, "  %-18s %d separate tokens\n", "sources", (int)moe_model_source_vocabulary(m));
    }

    text_append_string(out, "\nArchitecture: ");
    text_append_clean(out, architecture.data, architecture.length);
    text_append(out, "\n", 1);
    if (moe_model_kind(m) != MOE_MODEL_CLASSIFIER)
        text_printf(out, "  %-18s width %lld\n", "embedding", (long long)get_int(m, "model.width", 0));
    put_layers(m, out);
    if (moe_model_meta_find(m, "decoder.init") >= 0 || moe_model_meta_find(m, "attention.kind") >= 0)
        text_printf(out, "  %-18s %s\n", "decoder begins",
                    span_begins(init, "encoder") ? "with the encoder's last states" : "with zeros");

    text_printf(out, "\nSize\n");
    text_printf(out, "  %-18s %s in total, %s of them in experts\n", "parameters", human_count(n.parameters, c),
                human_count(n.expert_parameters, d));
    text_printf(out, "  %-18s %s, with the average number of experts\n", "used per token", human_count(n.active, c));
    for (int type = 0; type < MOE_TYPE_COUNT; type++)
        if (n.tensors[type])
            text_printf(out, "  %-18s %llu tensors, %s\n", moe_type_name((moe_type)type),
                        (unsigned long long)n.tensors[type], human_bytes(n.bytes[type], c));
    uint64_t slab;
    const uint64_t experts = expert_bytes(m, &slab);
    if (experts)
        text_printf(out,
                    "  %-18s %s; with --expert-memory, at least %s of experts and %s of other weights are in memory\n",
                    "experts", human_bytes(experts, c), human_bytes(2 * slab, d),
                    human_bytes(moe_model_file_bytes(m) - experts, rest));
    moe_session_params p = moe_session_params_default(m);
    size_t bytes = 0;
    moe_error e;
    p.threads = 1; /* the default depends on the machine */
    const moe_status sized = moe_session_bytes(m, &p, &bytes, &e);
    out->failed |= sized == MOE_ERROR_MEMORY;
    if (sized) text_printf(out, "  %-18s unknown: %s\n", "a session", e.message);
    else if (moe_model_kind(m) != MOE_MODEL_TRANSLATION)
        text_printf(out, "  %-18s %s in addition to the file: batch %d, 1 thread\n", "a session", human_bytes(bytes, c),
                    p.batch);
    else
        text_printf(out,
                    "  %-18s %s in addition to the file: batch %d, beam %d, %d source and %d target tokens, 1 thread\n",
                    "a session", human_bytes(bytes, c), p.batch, p.beam, p.max_source, p.max_target);

    put_entries(m, "Experts kept from a larger model", "prune.", out);
    put_entries(m, "Decoding defaults", "decode.", out);
    put_entries(m, "Sampling defaults (--sample 1)", "sample.", out);
    put_entries(m, "Training", "training.", out);
    put_entries(m, "Data", "source.licences", out);
    put_entries(m, "Quality of this file, as measured by its maker", "quality.", out);
    ptrdiff_t golden = moe_model_meta_find(m, "golden.source_ids");
    size_t sentences = golden < 0 ? 0 : moe_model_meta_length(m, (size_t)golden);
    if (sentences) {
        text_printf(out, "\nThe file contains %zu test sentences: moe-translate -m ", sentences);
        text_append_string(out, path);
        text_append_string(out, " --self-test\n");
    }
    if (tensors) put_tensors(m, out);
}

/* ==== 5. JSON =========================================================================================== */

static void json_span(json *j, const char *key, moe_span s) { json_clean(j, key, s.data, s.length); }

/* Write a number with 15 digits if these represent it almost exactly, else with 17, which identify any double. */
static void json_real(json *j, const char *key, double value) {
    char digits[40];
    snprintf(digits, sizeof digits, "%.15g", value);
    json_digits(j, key, value, fabs(strtod(digits, NULL) - value) <= fabs(value) * DBL_EPSILON ? 15 : 17);
}

static void json_element(json *j, const char *key, const moe_model *m, size_t i, size_t k) {
    switch (moe_model_meta_kind(m, i)) {
    case MOE_META_INT:
    case MOE_META_INTS: json_whole(j, key, moe_model_meta_int(m, i, k)); break;
    case MOE_META_REAL:
    case MOE_META_REALS: json_real(j, key, moe_model_meta_real(m, i, k)); break;
    case MOE_META_BYTES:
        json_open(j, key, '{');
        json_whole(j, "bytes", (int64_t)moe_model_meta_text(m, i, 0).length);
        json_close(j, '}');
        break;
    default: json_span(j, key, moe_model_meta_text(m, i, k));
    }
}

static void json_metadata(json *j, const moe_model *m) {
    json_open(j, "metadata", '{');
    for (size_t i = 0; i < moe_model_meta_count(m); i++) {
        moe_span key = moe_model_meta_key(m, i);
        moe_meta_kind kind = moe_model_meta_kind(m, i);
        char name[256];
        snprintf(name, sizeof name, "%.*s", (int)(key.length < 255 ? key.length : 255), key.data);
        if (kind != MOE_META_INTS && kind != MOE_META_REALS && kind != MOE_META_TEXTS) {
            json_element(j, name, m, i, 0);
        } else {
            size_t n = moe_model_meta_length(m, i);
            moe_span *texts = kind == MOE_META_TEXTS ? malloc((n + !n) * sizeof *texts) : NULL;
            if (texts) n = moe_model_meta_texts(m, i, texts, n);
            json_open(j, name, '[');
            for (size_t k = 0; k < n; k++) {
                if (texts) json_span(j, NULL, texts[k]);
                else json_element(j, NULL, m, i, k);
            }
            json_close(j, ']');
            free(texts);
        }
    }
    json_close(j, '}');
}

static void json_tensors(json *j, const moe_model *m) {
    json_open(j, "tensors", '[');
    for (size_t i = 0; i < moe_model_tensor_count(m); i++) {
        moe_tensor_info t = moe_model_tensor(m, i);
        char crc[16];
        json_open(j, NULL, '{');
        json_span(j, "name", t.name);
        json_text(j, "type", moe_type_name(t.type));
        json_open(j, "shape", '[');
        for (uint32_t d = 0; d < t.n_dims && d < 4; d++) json_whole(j, NULL, (int64_t)t.dims[d]);
        json_close(j, ']');
        json_bool(j, "experts", t.experts);
        json_whole(j, "offset", (int64_t)t.offset);
        json_whole(j, "bytes", (int64_t)t.bytes);
        json_whole(j, "parameters", (int64_t)t.parameters);
        snprintf(crc, sizeof crc, "%08x", (unsigned)t.checksum);
        json_text(j, "crc32", crc);
        json_close(j, '}');
    }
    json_close(j, ']');
}


static void json_mixtures(json *j, const moe_model *m) {
    json_open(j, "mixtures", '[');
    for (size_t i = 0; i < moe_model_mixture_count(m); i++) {
        moe_mixture x = moe_model_mixture(m, i);
        char key[128];
        json_open(j, NULL, '{');
        json_text(j, "layer", x.layer);
        json_whole(j, "experts", (int64_t)x.experts);
        json_whole(j, "groups", (int64_t)x.groups);
        json_text(j, "gate", moe_gate_name(x.gate));
        json_whole(j, "k", (int64_t)x.k);
        if (x.groups) {
            json_text(j, "parent_gate", moe_gate_name(x.parent_gate));
            json_whole(j, "parent_k", (int64_t)x.parent_k);
        }
        snprintf(key, sizeof key, "%s.gate.hidden", x.layer);
        json_whole(j, "gate_hidden", get_int(m, key, 0));
        json_bool(j, "noise", x.noise);
        snprintf(key, sizeof key, "%s.expert", x.layer);
        json_span(j, "expert", get_text(m, key, "mlp"));
        json_whole(j, "hidden", (int64_t)x.hidden);
        json_close(j, '}');
    }
    json_close(j, ']');
}

static void json_layers(json *j, const moe_model *m) {
    static const char *const sides[] = { "encoder", "decoder", "network" };
    json_open(j, "layers", '{');
    for (size_t side = 0; side < sizeof sides / sizeof *sides; side++) {
        const size_t length = strlen(sides[side]);
        json_open(j, sides[side], '[');
        for (size_t at = 0; at < moe_model_layer_count(m); at++) {
            const char *name = moe_model_layer(m, at).name;
            if (strncmp(name, sides[side], length) != 0 || name[length] != '.') continue;
            text_bytes words = { 0 };
            describe_layer(m, at, &words);
            json_text(j, NULL, words.failed ? "?" : words.data);
            j->out->failed |= words.failed;
            text_bytes_free(&words);
        }
        json_close(j, ']');
    }
    json_close(j, '}');
}

/* Write the number and size of the tensors in each number format. */
static void json_types(json *j, const count *n) {
    json_open(j, "types", '{');
    for (int type = 0; type < MOE_TYPE_COUNT; type++) {
        if (!n->tensors[type]) continue;
        json_open(j, moe_type_name((moe_type)type), '{');
        json_whole(j, "tensors", (int64_t)n->tensors[type]);
        json_whole(j, "bytes", (int64_t)n->bytes[type]);
        json_close(j, '}');
    }
    json_close(j, '}');
}

static void put_json(const text_front *front, const char *path, int checked, text_bytes *out) {
    const moe_model *m = front->model;
    const count n = count_all(m);
    json j = { .out = out, .pretty = 1 };
    moe_session_params p = moe_session_params_default(m);
    size_t bytes = 0;
    p.threads = 1;
    json_open(&j, NULL, '{');
    json_clean(&j, "file", path, strlen(path));
    json_whole(&j, "file_bytes", (int64_t)moe_model_file_bytes(m));
    json_whole(&j, "file_version", moe_model_file_version(m));
    json_bool(&j, "checksums_verified", checked);
    json_text(&j, "kind", kinds[moe_model_kind(m)][0]);
    if (moe_model_kind(m) == MOE_MODEL_CLASSIFIER) {
        json_whole(&j, "inputs", (int64_t)moe_model_width(m));
        json_whole(&j, "classes", moe_model_vocabulary(m));
    }
    json_whole(&j, "vocabulary", moe_model_vocabulary(m));
    json_open(&j, "languages", '[');
    for (size_t i = 0; i < moe_model_language_count(m); i++) json_span(&j, NULL, moe_model_language(m, i));
    json_close(&j, ']');
    json_whole(&j, "parameters", (int64_t)n.parameters);
    json_whole(&j, "parameters_in_experts", (int64_t)n.expert_parameters);
    json_whole(&j, "parameters_per_token", (int64_t)n.active);
    json_types(&j, &n);
    uint64_t slab;
    json_whole(&j, "expert_bytes", (int64_t)expert_bytes(m, &slab));
    json_whole(&j, "largest_expert_bytes", (int64_t)slab);
    const moe_status sized = moe_session_bytes(m, &p, &bytes, NULL);
    out->failed |= sized == MOE_ERROR_MEMORY;
    if (sized) json_null(&j, "session_bytes");
    else json_whole(&j, "session_bytes", (int64_t)bytes);
    json_layers(&j, m);
    json_mixtures(&j, m);
    json_metadata(&j, m);
    json_tensors(&j, m);
    json_close(&j, '}');
    text_append(out, "\n", 1);
}

/* ==== 6. Main =========================================================================================== */

int main(int argc, char **argv) {
    options o = { 0 };
    int status = program_begin("moe-info");
    if (status < 0) status = option_parse(&program, argc, argv, &o);
    if (status >= 0) return status;
    const char *path = argv[optind];
    const moe_model_params params = { .verify = o.check ? 1 : -1 };
    text_front front;
    text_bytes out = { 0 };
    moe_error e;
    if (text_open(path, TEXT_IDS_ONLY | (o.no_cache ? TEXT_NO_CACHE : 0), &params, &front, &e))
        return program_model_error(path, &e);
    const int pages = !o.attribution && !o.json;
    if (o.attribution) put_attribution(front.model, &out);
    else if (o.json) put_json(&front, path, o.check, &out);
    else put_pages(&front, path, o.tensors, o.check, &out);
    if (out.failed) program_error("out of memory"), status = EXIT_MODEL;
    else
        (pages ? option_put(stdout, out.data, out.length) : fwrite(out.data, 1, out.length, stdout)),
            status = program_printed();
    text_bytes_free(&out);
    text_close(&front);
    return status;
}
