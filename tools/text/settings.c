/* settings.c - settings.h says what this is; moetext_option shows the table. */
#include "tools/text/settings.h"
#include "tools/text/memory.h"
#include "tools/text/prompt.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- 1. The table -------------------------------------------------------------------------------------- */

typedef enum kind { WHOLE, REAL, WORD, SIZE } kind;

typedef struct option {
    const char *name, *help;
    size_t offset; /* in text_settings */
    size_t size;   /* of a WORD */
    kind kind;
    int of_model, low, high;  /* of a WHOLE; of a REAL the largest value, 0: none */
    const char *const *words; /* names of 0, 1, ... of a WHOLE; NULL: it is a number */
    const char *values;
} option;

#define AT(field) .offset = offsetof(text_settings, field)
#define WHOLE_OF(field, least, most, shown) AT(field), .kind = WHOLE, .low = (least), .high = (most), .values = shown
#define REAL_OF(field, most, shown) AT(field), .kind = REAL, .high = (most), .values = shown
#define SIZE_OF(field, shown) AT(field), .kind = SIZE, .values = shown
#define WORD_OF(field, shown) AT(field), .kind = WORD, .size = sizeof((text_settings *)0)->field, .values = shown

static const char *const forms[] = { "text", "pieces", "ids", NULL };

static const option table[] = {
    { "verify", "check the model for damage at opening (default: 1 up to 64 MiB)", WHOLE_OF(verify, 0, 1, "0 or 1"),
      .of_model = 1 },
    { "copy", "read the model into private memory: faster, but slower to start (default: 0)",
      WHOLE_OF(copy, 0, 1, "0 or 1"), .of_model = 1 },
    { "form", "input and output: text, the model's pieces or its token ids (default: text)",
      WHOLE_OF(form, 0, 2, "text, pieces or ids"), .of_model = 1, .words = forms },
    { "target", "language to translate into, for texts that name none", WORD_OF(target, "a language of the model") },
    { "source", "language of texts that name none; auto: detected for each, if the model needs it",
      WORD_OF(source, "auto or a language of the model") },
    { "preset", "search rules of the paper or of another program (default: the model's)",
      WORD_OF(preset, "paper, nvidia, tf, mlperf, hf or marian") },
    { "max-len", "longest sentence and translation in tokens; with a Transformer only the translation",
      WHOLE_OF(max_len, 4, 1 << 16, "4 to 65536") },
    { "split", "lines of more characters are translated sentence by sentence; 0: never (default: 1)",
      WHOLE_OF(split, 0, 1 << 20, "0 to 1048576") },
    { "truncate", "cut a line at its first unusable part instead of refusing it (default: 0)",
      WHOLE_OF(truncate, 0, 1, "0 or 1") },
    { "capitals", "translate lines in capitals like small letters, and back into capitals (default: 1)",
      WHOLE_OF(capitals, 0, 1, "0 or 1") },
    { "protect", "keep markup, placeholders, addresses, numbers, white space (default: 1)",
      WHOLE_OF(protect, 0, 1, "0 or 1") },
    { "glossary", "a file of terms, source TAB target on a line, or CSV; a name alone on a line stays as it is",
      WORD_OF(glossary, "a file") },
    { "style", "how a model that is asked in words shall write, such as formal", WORD_OF(style, "a few words") },
    { "context", "earlier lines that a model that is asked in words is shown, never translations (default: 0)",
      WHOLE_OF(context, 0, TEXT_PROMPT_CONTEXT, "0 to 16") },
    { "prompt", "wording for such a model, with {target_lang}, {source_text}; or delimiters, structured:JSON",
      WORD_OF(prompt, "a wording") },
    { "alignment", "link the words of text and translation: more time and memory (default: 0)",
      WHOLE_OF(alignment, 0, 1, "0 or 1") },
    { "share", "link two words if each has at least share times the other's largest weight (default: 0.7)",
      REAL_OF(share, 1, "0 to 1") },
    { "threads", "threads that compute (default: one per processor)",
      WHOLE_OF(threads, 1, MOE_MAX_THREADS, "1 to 256") },
    { "batch", "sentences decoded at once (default: 32)", WHOLE_OF(batch, 1, 4096, "1 to 4096") },
    { "batch-tokens", "source tokens decoded at once, about: many short sentences or few long ones",
      WHOLE_OF(batch_tokens, 1, 1 << 24, "1 to 16777216") },
    { "gating", "use this gate in every mixture instead of the model's own",
      WORD_OF(gating, "softmax, topk, threshold, sigmoid or batchwise") },
    { "noise", "add noise to the gates' logits, as in training; a seed (default: no noise)",
      WHOLE_OF(noise, 0, INT32_MAX, "0 or more") },
    { "isa", "instruction set of the kernels (default: the best of this machine)",
      WORD_OF(isa, "a name of moe_isa_names") },
    { "device", "processor or GPU (default: a GPU if one works)", WORD_OF(device, "cpu, cuda or cuda:N") },
    { "gpu-memory", "MiB of the GPU's memory to use (default: all that is free)",
      WHOLE_OF(gpu_memory, 1, 1 << 30, "1 or more") },
    { "max-memory", "refuse a session that needs more, mapped weights not counted; allocate all of it at once",
      SIZE_OF(max_memory, "a size such as 512M or 2G") },
    { "models-memory", "of several models: those open at a time, with their sessions, take no more; others are closed",
      SIZE_OF(models_memory, "a size such as 512M or 2G") },
};

enum { OPTIONS = sizeof table / sizeof *table };

moetext_option_info moetext_option(size_t i) {
    const moe_param *p = i < OPTIONS ? NULL : moe_param_at(i - OPTIONS);
    if (i < OPTIONS) return (moetext_option_info){ table[i].name, table[i].values, table[i].help, table[i].of_model };
    return p ? (moetext_option_info){ p->option, p->values, p->help, 0 } : (moetext_option_info){ 0 };
}

/* ---- 2. Setting ---------------------------------------------------------------------------------------- */

text_settings text_settings_none(void) {
    text_settings s;
    memset(&s, 0, sizeof s);
    for (size_t i = 0; i < OPTIONS; i++) {
        void *at = (char *)&s + table[i].offset;
        if (table[i].kind == WHOLE) *(int *)at = -1;
        if (table[i].kind == REAL) *(float *)at = NAN;
    }
    for (size_t i = 0; i < TEXT_PARAMS; i++) s.params[i] = NAN;
    return s;
}

static moe_status refuse(moe_error *error, const char *name, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 3, 4)))
#endif
    ;

static moe_status refuse(moe_error *error, const char *name, const char *format, ...) {
    if (!error) return MOE_ERROR_ARGUMENT;
    va_list arguments;
    va_start(arguments, format);
    error->code = MOE_ERROR_ARGUMENT;
    vsnprintf(error->message, sizeof error->message, format, arguments);
    snprintf(error->where, sizeof error->where, "%s", name);
    va_end(arguments);
    return MOE_ERROR_ARGUMENT;
}

/* 1 if both are the same name; '_' is equivalent to '-'. */
static int same_name(const char *a, const char *b) {
    for (; *a && *b; a++, b++)
        if ((*a == '_' ? '-' : *a) != (*b == '_' ? '-' : *b)) return 0;
    return *a == *b;
}

/* The number of an option in moetext_option's order; SIZE_MAX: there is none. */
static size_t find(const char *name) {
    const moe_param *p;
    for (size_t i = 0; i < OPTIONS; i++)
        if (same_name(table[i].name, name)) return i;
    for (size_t i = 0; i < TEXT_PARAMS && (p = moe_param_at(i)); i++)
        if (same_name(p->option, name)) return OPTIONS + i;
    return SIZE_MAX;
}

/* Set an option. 0 if it does not allow `value`. */
static int take(text_settings *s, const option *o, const char *value) {
    void *at = (char *)s + o->offset;
    char *end;
    errno = 0;
    if (o->kind == WORD) {
        if (!*value || strlen(value) >= o->size) return 0;
        memcpy(at, value, strlen(value) + 1);
        return 1;
    }
    if (o->kind == SIZE) return text_parse_size(value, at);
    if (o->kind == REAL) {
        const float x = strtof(value, &end);
        if (end == value || *end || !isfinite(x) || x < 0 || (o->high && x > (float)o->high)) return 0;
        *(float *)at = x;
        return 1;
    }
    for (int i = 0; o->words && o->words[i]; i++)
        if (strcmp(o->words[i], value) == 0) return *(int *)at = i, 1;
    const long n = strtol(value, &end, 10);
    if (o->words || end == value || *end || errno || n < o->low || n > o->high) return 0;
    *(int *)at = (int)n;
    return 1;
}

/* The same for a parameter of the engine. */
static int take_param(text_settings *s, size_t i, const char *value) {
    const moe_param *p = moe_param_at(i);
    char *end;
    size_t bytes = SIZE_MAX;
    if (p->real == 2 && (strcmp(value, "auto") == 0 || text_parse_size(value, &bytes)))
        return s->params[i] = bytes < SIZE_MAX ? (double)bytes : p->most, 1;
    if (p->real == 2) return 0;
    errno = 0;
    const double x = p->real ? (double)strtof(value, &end) : (double)strtol(value, &end, 10);
    if (end == value || *end || errno == ERANGE || !(x >= p->least && x <= p->most)) return 0;
    s->params[i] = x;
    return 1;
}

moe_status text_settings_set(text_settings *s, const char *name, const char *value, const char *before,
                             moe_error *error) {
    const size_t at = find(name);
    moe_session_params preset = { .size = sizeof preset };
    moe_gate gate;
    if (at == SIZE_MAX) return refuse(error, name, "there is no option '%.60s'", name);
    const moetext_option_info o = moetext_option(at);
    if (at >= OPTIONS ? take_param(s, at - OPTIONS, value)
                      : take(s, &table[at], value) &&
                            (strcmp(o.name, "preset") != 0 || moe_session_params_preset(&preset, value)) &&
                            (strcmp(o.name, "gating") != 0 || moe_gate_parse(value, &gate)))
        return MOE_OK;
    return refuse(error, o.name, "%s%s expects %s, not '%.60s'", before, o.name, o.values, value);
}

double text_settings_param(const text_settings *s, const char *name) {
    const size_t at = find(name);
    return at >= OPTIONS && at != SIZE_MAX ? s->params[at - OPTIONS] : (double)NAN;
}

moe_status text_settings_check(const text_settings *s, const char *before, moe_error *error) {
    const double beam = text_settings_param(s, "beam"), nbest = text_settings_param(s, "nbest");
    if (!(nbest > beam)) return MOE_OK;
    return refuse(error, "nbest", "%snbest %.0f is more than %sbeam %.0f keeps", before, nbest,
                  before[0] == '-' ? before : "", beam);
}

/* data[*begin .. *end) without the spaces at both ends. */
static void trim(const char *data, size_t *begin, size_t *end) {
    while (*begin < *end && (data[*begin] == ' ' || data[*begin] == '\t' || data[*begin] == '\n')) ++*begin;
    while (*begin < *end && (data[*end - 1] == ' ' || data[*end - 1] == '\t' || data[*end - 1] == '\n')) --*end;
}

/* "name=value", [length]; *given has a bit for each option that was set before. */
static moe_status parse_part(text_settings *s, const char *part, size_t length, uint64_t *given, moe_error *error) {
    enum { LONGEST = 1024 };
    const char *equals = memchr(part, '=', length);
    size_t begin = 0, end = equals ? (size_t)(equals - part) : length;
    size_t value = end + 1, last = length;
    char name[LONGEST], text[LONGEST];
    trim(part, &begin, &end);
    if (equals) trim(part, &value, &last);
    if (end - begin >= LONGEST || (equals && last - value >= LONGEST))
        return refuse(error, "options", "an option is longer than %d bytes", LONGEST - 1);
    memcpy(name, part + begin, end - begin);
    name[end - begin] = '\0';
    if (!equals) return refuse(error, name, "option '%.60s' has no value: write it as name=value", name);
    memcpy(text, part + value, last - value);
    text[last - value] = '\0';
    const size_t at = find(name);
    const uint64_t bit = at == SIZE_MAX ? 0 : (uint64_t)1 << at;
    if (*given & bit)
        return refuse(error, moetext_option(at).name, "option %s is given twice", moetext_option(at).name);
    *given |= bit;
    return text_settings_set(s, name, text, "option ", error);
}

moe_status text_settings_parse(text_settings *s, const char *options, moe_error *error) {
    uint64_t given = 0;
    moe_status status = MOE_OK;
    _Static_assert(OPTIONS + TEXT_PARAMS <= 64, "a bit for each option");
    for (const char *at = options ? options : ""; *at && !status;) {
        size_t begin = 0, length = strcspn(at, ";"), end = length;
        trim(at, &begin, &end);
        if (begin < end) status = parse_part(s, at + begin, end - begin, &given, error);
        at += length + (at[length] == ';');
    }
    return status ? status : text_settings_check(s, "option ", error);
}

/* ---- 3. Applying --------------------------------------------------------------------------------------- */

/* Who gives one of these wants tokens to be drawn. */
static const char *const draws[] = { "temperature", "top_k", "top_p", "min_p", "seed" };

void text_settings_search(const text_settings *s, moe_session_params *p) {
    if (s->preset[0]) moe_session_params_preset(p, s->preset);
    for (size_t i = 0; i < TEXT_PARAMS; i++)
        if (!isnan(s->params[i])) moe_param_set(p, i, s->params[i]);
    for (size_t i = 0; i < sizeof draws / sizeof *draws && isnan(text_settings_param(s, "sample")); i++)
        if (!isnan(text_settings_param(s, draws[i]))) p->sample = 1;
    if (isnan(text_settings_param(s, "beam")) && p->sample && p->temperature > 0) p->beam = 1;
    if (isnan(text_settings_param(s, "beam")) && p->beam < p->nbest) p->beam = p->nbest;
    if (p->nbest > p->beam) p->nbest = p->beam; /* the model's default, with a narrower beam */
}

size_t text_mebibytes(int n) { return (size_t)n > SIZE_MAX >> 20 ? SIZE_MAX : (size_t)n << 20; }

void text_settings_apply(const text_settings *s, moe_session_params *p) {
    if (s->batch_tokens > 0) { /* short sentences have about eight tokens */
        p->batch_tokens = s->batch_tokens;
        p->batch = s->batch_tokens < 8 ? 1 : s->batch_tokens / 8 > 4096 ? 4096 : s->batch_tokens / 8;
    }
    if (s->threads > 0) p->threads = s->threads;
    if (s->batch > 0) p->batch = s->batch;
    if (s->max_len > 0) {
        p->max_target = s->max_len;
        if (p->rules != MOE_RULES_HF) p->max_source = s->max_len;
        else p->max_len_factor = 0, p->max_len_offset = s->max_len; /* counts what is generated */
    }
    text_settings_search(s, p);
    if (s->isa[0]) p->isa = s->isa;
    if (s->device[0]) p->device = s->device;
    if (s->gpu_memory > 0) p->device_memory = text_mebibytes(s->gpu_memory);
    if (s->gating[0]) p->gating = s->gating;
    if (s->noise >= 0) p->noise = 1, p->noise_seed = (uint64_t)s->noise;
}

text_wishes text_settings_wishes(const text_settings *s) {
    return (text_wishes){ .style = s->style, .wording = s->prompt, .context = s->context > 0 ? (size_t)s->context : 0 };
}
