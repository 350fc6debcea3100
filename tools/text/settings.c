/* settings.c - see settings.h. moetext_option returns the rows of the table. */
#include "tools/text/settings.h"
#include "tools/text/prompt.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- 1. The table -------------------------------------------------------------------------------------- */

#define AT(field) .at = offsetof(text_settings, field)
#define WHOLE_OF(field, least, most, shown) AT(field), .kind = ROW_INT, .low = (least), .high = (most), .values = shown
#define SWITCH_OF(field) WHOLE_OF(field, 0, 1, "0 or 1"), .optional = 1
#define SIZE_OF(field) AT(field), .kind = ROW_SIZE, .values = "a size such as 512M or 2G"
#define TEXT_OF(field, shown) AT(field), .kind = ROW_TEXT, .size = sizeof((text_settings *)0)->field, .values = shown

static const char *const forms[] = { "text", "pieces", "ids", "raw-ids", NULL };
static const char *const kinds[] = { "translation", "language", NULL };

static int is_preset(const char *name) {
    moe_session_params params = { .size = sizeof params };
    return moe_session_params_preset(&params, name);
}

static int is_gate(const char *name) {
    moe_gate gate;
    return moe_gate_parse(name, &gate);
}

/* Rows with a group are also options of the programs. */
static const option_row table[] = {
    { "verify", NULL, "check the model for damage when opening it (default: 1 for files of up to 64 MiB)",
      SWITCH_OF(verify), .of_model = 1 },
    { "copy", NULL,
      "read the model into private memory instead of mapping it: faster, but slower to start (default: 0)",
      SWITCH_OF(copy), .of_model = 1 },
    { "cache", NULL, "keep the conversion of a published model, such as a GGUF file, for the next run (default: 1)",
      SWITCH_OF(cache), .of_model = 1 },
    { "form", NULL, "input and output as text, pieces, token ids, or ids with language and end tokens (default: text)",
      WHOLE_OF(form, 0, 3, "text, pieces, ids or raw-ids"), .of_model = 1, .names = forms },
    { "kind", NULL, "required kind of model; a language model only scores texts (default: translation)",
      WHOLE_OF(kind, 0, 1, "translation or language"), .of_model = 1, .names = kinds },
    { "target", "LANG", "language to translate into, e.g. de", .letter = 't', .group = GROUP_LANGUAGES,
      TEXT_OF(target, "a language of the model") },
    { "source", "LANG", "source language; auto detects it for each text",
      .more = ". NLLB and M2M-100 require it; other models use it only for --rerank", .letter = 's',
      .group = GROUP_LANGUAGES, TEXT_OF(source, "auto or a language of the model") },
    { "preset", "NAME", "search rules: paper, nvidia, tf, mlperf, hf or marian (default: the model's)",
      .more = ". Other search options override them", .group = GROUP_SEARCH,
      TEXT_OF(preset, "paper, nvidia, tf, mlperf, hf or marian"), .valid = is_preset },
    { "max-len", "N", "maximum length of a text and of its translation in tokens",
      .more = ". For Transformers it limits only the translation", .group = GROUP_SEARCH,
      WHOLE_OF(max_len, 4, 1 << 16, "4 to 65536") },
    { "split", "N", "split texts longer than N characters into sentences; 0 disables (default: 1)",
      .more = ". The default is 0 with options that report whole lines: --json, --nbest, --score, --prefix, --routing, "
              "--ids and --pretokenized",
      .group = GROUP_TEXT, WHOLE_OF(split, 0, 1 << 20, "0 to 1048576") },
    { "truncate", NULL,
      "cut a text at the length limit or at its first invalid byte instead of rejecting it (default: 0)",
      .group = GROUP_TEXT, SWITCH_OF(truncate) },
    { "capitals", NULL, "translate text in capitals as lower case, then restore capitals (default: 1)",
      SWITCH_OF(capitals) },
    { "protect", NULL, "preserve markup, placeholders, addresses, numbers and white space (default: 1)",
      SWITCH_OF(protect) },
    { "glossary", "FILE",
      "glossary file: source TAB target on each line, or CSV; a source alone (not in CSV) is copied",
      .more =
          ". Terms also match their capitalised and regularly inflected forms; the longest match wins. Prompted models "
          "receive the terms in the prompt and may ignore them",
      .group = GROUP_TEXT, TEXT_OF(glossary, "a file") },
    { "memory", "FILE", "translation memory: a TMX, XLIFF or PO file, or lines of source TAB translation",
      .more =
          ". A line or sentence in it gets its translation; one that differs only in numbers, placeholders or the "
          "final mark gets an adapted one; a similar one is repaired or guides the model. --json reports the matches",
      .group = GROUP_TEXT, TEXT_OF(memory, "a file") },
    { "style", "WORDS", "style for prompted models, e.g. formal", .group = GROUP_PROMPT,
      TEXT_OF(style, "a few words") },
    { "context", "N", "add up to N previous lines to the prompt, without their translations (default: 0)",
      .group = GROUP_PROMPT, WHOLE_OF(context, 0, TEXT_PROMPT_CONTEXT, "0 to 16") },
    { "prompt", "TEXT", "prompt template with {source_text} and usually {target_lang}",
      .more = ", {source_lang}, {target_code}, {source_code}. The values delimiters and structured:FORMAT, e.g. "
              "structured:JSON, select one of the model's prompts",
      .group = GROUP_PROMPT, TEXT_OF(prompt, "a prompt") },
    { "prompt-cache", "PATH", "load prompts that earlier runs computed, and save them at the end",
      .more = ". In a folder, each model has its own file. A file of another model, version, --kv-bits or --gating is "
              "replaced, with a warning. Files contain the prompts as token ids",
      .group = GROUP_PROMPT, TEXT_OF(prompt_cache, "a file or folder") },
    { "alignment", NULL, "align the words of text and translation, which takes more time and memory (default: 0)",
      SWITCH_OF(alignment) },
    { "share", NULL,
      "link two words if their weight is at least this share of the largest weight of each (default: 0.7)", AT(share),
      .kind = ROW_FLOAT, .high = 1, .values = "0 to 1" },
    { "force", "ID", "start every translation with this token id; its log-probability counts as 0",
      .group = GROUP_SEARCH, WHOLE_OF(force, 0, INT32_MAX, "0 or more") },
    { "routing", NULL, "let texts request the experts of their tokens, which takes a second pass (default: 0)",
      SWITCH_OF(routing) },
    { "draft", "MODEL", "fast model whose translations a slower one verifies; changes no byte",
      .more = ". Requires a beam of 1", .group = GROUP_SPEED, TEXT_OF(draft, "a model file") },
    { "threads", "N", "number of threads (default: one per available processor)", .group = GROUP_SPEED,
      WHOLE_OF(threads, 1, MOE_MAX_THREADS, "1 to 256") },
    { "batch", "N", "sentences, lines or rows per batch (default: 32; 128 for scoring)", .group = GROUP_SPEED,
      WHOLE_OF(batch, 1, 4096, "1 to 4096") },
    { "batch-tokens", "N", "limit batches to about N source tokens: many short sentences or a few long ones",
      .group = GROUP_SPEED, WHOLE_OF(batch_tokens, 1, 1 << 24, "1 to 16777216") },
    { "gating", "NAME", "replace all gates with softmax, topk, threshold, sigmoid or batchwise gates",
      .more = ". With batchwise gates, a result depends on the other lines in its batch", .group = GROUP_GATES,
      TEXT_OF(gating, "softmax, topk, threshold, sigmoid or batchwise"), .valid = is_gate },
    { "noise", "SEED", "add noise to the gate logits, as in training (default: no noise)",
      .more = ". The noise depends on SEED and the text, not on the batch", .group = GROUP_GATES, AT(noise),
      .kind = ROW_SEED, .values = "a seed, 0 or more" },
    { "isa", "NAME", "kernel instruction set (default: MOE_ISA, else the best one available)", .group = GROUP_SPEED,
      TEXT_OF(isa, "a name of moe_isa_names") },
    { "device", "NAME", "cpu, cuda or cuda:N (default: MOE_DEVICE, else a working GPU, else cpu)", .group = GROUP_SPEED,
      TEXT_OF(device, "cpu, cuda or cuda:N") },
    { "gpu-memory", "MB", "limit GPU memory (default: all free memory)",
      .more = ". Experts that do not fit are fetched from host memory when needed, which is slower",
      .group = GROUP_SPEED, WHOLE_OF(gpu_memory, 1, 1 << 30, "1 or more") },
    { "max-memory", "SIZE", "limit memory, e.g. 512M: fail if more is needed, otherwise allocate all memory at startup",
      .more = ". A mapped model does not count, because the system can reclaim its pages", .group = GROUP_MEMORY,
      SIZE_OF(max_memory) },
    { "models-memory", "SIZE", "limit memory for open models, e.g. 512M; the least recently used is closed first",
      .group = GROUP_MEMORY, SIZE_OF(models_memory) },
};

enum { OPTIONS = sizeof table / sizeof *table };

int text_settings_row(size_t i, option_row *row) {
    static const char *const arguments[] = { "N", "X", "SIZE" }; /* indexed by moe_param.real */
    static const row_kind row_kinds[] = { ROW_WHOLE, ROW_PARAM, ROW_BYTES };
    const moe_param *p = i < OPTIONS ? NULL : moe_param_at(i - OPTIONS);
    if (i < OPTIONS) return *row = table[i], 1;
    if (!p || i - OPTIONS >= TEXT_PARAMS) return 0;
    const int is_switch = !p->real && p->least == 0 && p->most == 1, bytes = p->real == 2;
    const int samples = p->sampling || strcmp(p->option, "sample") == 0;
    *row = (option_row){ .name = p->option,
                         .argument = is_switch ? NULL : arguments[p->real],
                         .help = p->help,
                         .group = bytes     ? GROUP_MEMORY
                                  : samples ? GROUP_SAMPLING
                                            : GROUP_SEARCH,
                         .kind = row_kinds[p->real],
                         .optional = is_switch,
                         .at = offsetof(text_settings, params) + (i - OPTIONS) * sizeof(double),
                         .low = p->least,
                         .high = p->most,
                         .values = p->values };
    return 1;
}

moetext_option_info moetext_option(size_t i) {
    option_row row;
    if (!text_settings_row(i, &row)) return (moetext_option_info){ 0 };
    return (moetext_option_info){ row.name, row.values, row.help, row.of_model };
}

/* ---- 2. Setting ---------------------------------------------------------------------------------------- */

text_settings text_settings_none(void) {
    text_settings s = { 0 };
    for (size_t i = 0; i < OPTIONS; i++) {
        void *at = (char *)&s + table[i].at;
        if (table[i].kind == ROW_INT) *(int *)at = -1;
        if (table[i].kind == ROW_SEED) *(int64_t *)at = -1;
        if (table[i].kind == ROW_FLOAT) *(float *)at = NAN;
    }
    for (size_t i = 0; i < TEXT_PARAMS; i++) s.params[i] = NAN;
    return s;
}

/* Return 1 if two names are equal; '_' is equivalent to '-'. */
static int same_name(const char *a, const char *b) {
    for (; *a && *b; a++, b++)
        if ((*a == '_' ? '-' : *a) != (*b == '_' ? '-' : *b)) return 0;
    return *a == *b;
}

/* Set *row to the option with a name. Return its index, or SIZE_MAX if it is unknown. */
static size_t find(const char *name, option_row *row) {
    for (size_t i = 0; text_settings_row(i, row); i++)
        if (same_name(row->name, name)) return i;
    return SIZE_MAX;
}

static moe_status set_option(text_settings *s, const option_row *row, const char *value, moe_error *error) {
    char message[sizeof error->message];
    const row_result result = option_row_set(row, s, value);
    if (result == ROW_OK) return MOE_OK;
    option_row_error(row, result, "option ", value, message, sizeof message);
    return text_fail(error, MOE_ERROR_ARGUMENT, row->name, "%s", message);
}

double text_settings_param(const text_settings *s, const char *name) {
    option_row row;
    const size_t at = find(name, &row);
    return at >= OPTIONS && at != SIZE_MAX ? s->params[at - OPTIONS] : (double)NAN;
}

moe_status text_settings_check(const text_settings *s, const char *before, moe_error *error) {
    const double beam = text_settings_param(s, "beam"), nbest = text_settings_param(s, "nbest");
    if (!(nbest > beam)) return MOE_OK;
    return text_fail(error, MOE_ERROR_ARGUMENT, "nbest", "%snbest %.0f is more than %sbeam %.0f keeps", before, nbest,
                     before[0] == '-' ? before : "", beam);
}

enum { LONGEST = 1024 };

/* Copy a text, trimming spaces at both ends. Return 0 if it is too long. */
static int copy_trimmed(const char *begin, const char *end, char *out) {
    while (begin < end && strchr(" \t\n", *begin)) begin++;
    while (begin < end && strchr(" \t\n", end[-1])) end--;
    if (end - begin >= LONGEST) return 0;
    memcpy(out, begin, (size_t)(end - begin));
    out[end - begin] = '\0';
    return 1;
}

/* Set an option from "name=value". given[i] is 1 if option i is already set. */
static moe_status parse_part(text_settings *s, const char *part, const char *end, unsigned char *given,
                             moe_error *error) {
    const char *equals = memchr(part, '=', (size_t)(end - part));
    char name[LONGEST], value[LONGEST];
    option_row row;
    if (!copy_trimmed(part, equals ? equals : end, name) || !copy_trimmed(equals ? equals + 1 : end, end, value))
        return text_fail(error, MOE_ERROR_ARGUMENT, "options", "an option is longer than %d bytes", LONGEST - 1);
    if (!equals && !*name) return MOE_OK;
    if (!equals) return text_fail(error, MOE_ERROR_ARGUMENT, name, "missing value for '%.60s': use name=value", name);
    const size_t at = find(name, &row);
    if (at == SIZE_MAX) return text_fail(error, MOE_ERROR_ARGUMENT, name, "unknown option '%.60s'", name);
    if (given[at]) return text_fail(error, MOE_ERROR_ARGUMENT, row.name, "option %s is given twice", row.name);
    given[at] = 1;
    return set_option(s, &row, value, error);
}

moe_status text_settings_parse(text_settings *s, const char *options, moe_error *error) {
    unsigned char given[OPTIONS + TEXT_PARAMS] = { 0 };
    moe_status status = MOE_OK;
    for (const char *at = options ? options : ""; *at && !status;) {
        const char *end = at + strcspn(at, ";");
        status = parse_part(s, at, end, given, error);
        at = end + (*end == ';');
    }
    return status ? status : text_settings_check(s, "option ", error);
}

/* ---- 3. Applying --------------------------------------------------------------------------------------- */

void text_settings_search(const text_settings *s, moe_session_params *p) {
    if (s->preset[0]) moe_session_params_preset(p, s->preset);
    const int automatic = isnan(text_settings_param(s, "sample")); /* any sampling parameter enables sampling */
    for (size_t i = 0; i < TEXT_PARAMS; i++) {
        if (isnan(s->params[i])) continue;
        moe_param_set(p, i, s->params[i]);
        if (automatic && moe_param_at(i)->sampling) p->sample = 1;
    }
    if (isnan(text_settings_param(s, "beam")) && p->sample && p->temperature > 0) p->beam = 1;
    if (isnan(text_settings_param(s, "beam")) && p->beam < p->nbest) p->beam = p->nbest;
    if (p->nbest > p->beam) p->nbest = p->beam; /* the model's default can exceed a narrower beam */
}

size_t text_mebibytes(int n) { return (size_t)n > SIZE_MAX >> 20 ? SIZE_MAX : (size_t)n << 20; }

/* Set up scoring. A sentence takes one row instead of a whole beam, so the batch can have more sentences. */
static void apply_scoring(const text_settings *s, moe_session_params *p) {
    p->beam = p->nbest = 1;
    p->rerank = 0;
    if (s->batch < 0 && s->batch_tokens < 0) p->batch = 128;
}

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
        else p->max_len_factor = 0, p->max_len_offset = s->max_len; /* in generated tokens */
    }
    text_settings_search(s, p);
    if (s->isa[0]) p->isa = s->isa;
    if (s->device[0]) p->device = s->device;
    if (s->gpu_memory > 0) p->device_memory = text_mebibytes(s->gpu_memory);
    if (s->gating[0]) p->gating = s->gating;
    if (s->noise >= 0) p->noise = 1, p->noise_seed = (uint64_t)s->noise;
    if (s->scores) apply_scoring(s, p);
    p->log = s->log;
    p->wire = s->wire;
}

text_prompt_options text_settings_prompt(const text_settings *s) {
    return (text_prompt_options){ .style = s->style,
                                  .wording = s->prompt,
                                  .context = s->context > 0 ? (size_t)s->context : 0 };
}
