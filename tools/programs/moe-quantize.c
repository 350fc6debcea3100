/* moe-quantize - convert the weights of a model to other number formats and measure the quality loss. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/measure.h"
#include "tools/programs/program.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct options {
    const char *experts, *types, *sample;
    int ids, no_cache;
} options;

static const option_row own_rows[] = {
    { "experts", "TYPE", "type of the experts, which contain most of the weights", .group = "Quantisation",
      OPTION_MEMBER(ROW_WORD, experts),
      .more = ". A common choice is --experts q4 with type q8, which loses hardly any quality" },
    { "types", "LIST", "types of single mixtures, e.g. encoder.2=q2,decoder.1=q3", .group = "Quantisation",
      OPTION_MEMBER(ROW_WORD, types),
      .more = ": the layer's name and the type of its experts. Other experts have the type of --experts" },
    { "measure", "FILE", "compare OUT with IN on a sample and store the loss in OUT, for moe-info",
      .group = "Quantisation", OPTION_MEMBER(ROW_WORD, sample),
      .more =
          ". Lines contain source language TAB target language TAB source TAB target, or text for a language model" },
    { "ids", NULL, "lines of the --measure file contain token ids", .group = "Quantisation", OPTION_FLAG(ids) },
    OPTION_NO_CACHE(OPTION_FLAG(no_cache)),
    { 0 },
};

static const option_program program = {
    .name = "moe-quantize",
    .usage = "[OPTION]... IN OUT TYPE",
    .about = "Write the model IN to OUT with its matrices in another number format.\n"
             "\n"
             "TYPE:\n"
             "  f32   4 bytes per weight\n"
             "  f16   2 bytes, 11 bits of precision\n"
             "  bf16  2 bytes, 8 bits of precision and the range of f32\n"
             "  q8    1 byte, one scale per row\n"
             "  q8b   3% larger than q8, one scale per 64 weights\n"
             "  q4    a little over half a byte, one scale per 32 weights\n"
             "  q4m   10% larger than q4, with a centre per 32 weights: preserves the codes\n"
             "        of formats with a scale and a minimum (Q4_1, Q4_K)\n"
             "  q3    3.3 bits, one scale per 32 weights\n"
             "  q2    2.3 bits, one scale per 32 weights. For experts only: all other weights\n"
             "        lose far more",
    OPTION_LISTS(OPTION_OWN),
    .notes = "Gates, thresholds and biases remain f32. OUT is created only when complete. Rounding cannot be undone, "
             "so quantise from the f32 file. If any type changes, OUT does not contain the golden sentences of IN; "
             "tools/convert/convert.py --golden makes new ones.\n"
             "\n"
             "Exit status: 0 done, 2 usage error, 3 IN is missing or not a model, or out of memory, 4 input or output "
             "error.\n",
    .examples = "  moe-quantize f32.bin small.bin q8 --experts q4 --measure sample.tsv\n",
    .least = 3,
    .most = 3,
};

static int parse_type(const char *name, moe_type *type) {
    if (moe_type_parse(name, type)) return 1;
    program_usage_error("unknown number format '%s'; available: " MOE_TYPE_NAMES, name);
    return 0;
}

/* Parse --types. `text` receives the names; `entries` has room for one entry per comma and one more. */
static int parse_types(const char *list, char *text, moe_types_entry *entries, size_t *n) {
    for (const char *at = list, *end; *at; at = *end ? end + 1 : end) {
        const char *equals = strchr(at, '=');
        end = at + strcspn(at, ",");
        char type[16];
        if (!equals || equals >= end || end - equals > (ptrdiff_t)sizeof type)
            return program_usage_error("invalid --types '%s': expected LAYER=TYPE,...", list), 0;
        snprintf(type, sizeof type, "%.*s", (int)(end - equals - 1), equals + 1);
        if (!parse_type(type, &entries[*n].type)) return 0;
        entries[(*n)++].name = text;
        text += sprintf(text, "%.*s.experts", (int)(equals - at), at) + 1;
    }
    return 1;
}

int main(int argc, char **argv) {
    options o = { 0 };
    int begun = program_begin("moe-quantize");
    if (begun < 0) begun = option_parse(&program, argc, argv, &o);
    if (begun >= 0) return begun;
    const char *in = argv[optind], *out = argv[optind + 1];
    moe_save_params params = { .type = MOE_TYPE_F32 };
    if (!parse_type(argv[optind + 2], &params.type) ||
        !parse_type(o.experts ? o.experts : argv[optind + 2], &params.experts))
        return EXIT_USAGE;
    const size_t length = o.types ? strlen(o.types) : 0; /* at least 4 bytes per entry, such as a=q2 */
    moe_types_entry *types = calloc(length + 1, sizeof *types);
    char *names = calloc(length + 1, sizeof ".experts");
    if (!types || !names) return program_error("out of memory"), EXIT_MODEL;
    if (o.types && !parse_types(o.types, names, types, &params.n_types)) return EXIT_USAGE;
    params.types = types;
    if ((begun = program_check_copy(in, out)) >= 0) return begun;
    /* Verify the checksums first: saving computes new checksums even for damaged weights. */
    text_front front;
    moe_error e;
    const int level = (o.sample && !o.ids ? TEXT_REQUIRED : TEXT_IDS_ONLY) | (o.no_cache ? TEXT_NO_CACHE : 0);
    if (text_open(in, level, &(moe_model_params){ .verify = 1 }, &front, &e)) return program_model_error(in, &e);
    if (o.sample && moe_model_kind(front.model) == MOE_MODEL_CLASSIFIER) {
        text_close(&front);
        return program_usage_error("--measure requires a text model; %s is a classifier", in);
    }
    const uint64_t before = moe_model_file_bytes(front.model);
    moe_model *written;
    moe_status status = moe_model_save(front.model, out, &params, &e);
    if (!status && o.sample) status = measure_loss(&front, out, o.sample, o.ids, &e);
    text_close(&front);
    if (!status) status = moe_model_open(out, NULL, &written, &e); /* check that OUT is readable */
    if (status) return program_file_error(o.sample && status == MOE_ERROR_ARGUMENT ? o.sample : out, &e);
    fprintf(stderr, "%s: %.1f MiB -> %s: %.1f MiB (%s%s%s)\n", in, (double)before / 1048576, out,
            (double)moe_model_file_bytes(written) / 1048576, moe_type_name(params.type), o.experts ? ", experts " : "",
            o.experts ? moe_type_name(params.experts) : "");
    moe_model_close(written);
    free(types), free(names);
    return EXIT_DONE;
}
