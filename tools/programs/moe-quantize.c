/* moe-quantize - write a model in other number formats, and measure what that costs: see usage() below, or --help.
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "moe.h"
#include "tools/programs/measure.h"
#include "tools/programs/program.h"
#include "tools/text/text.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>

static void usage(FILE *to) {
    fputs("Usage: moe-quantize [OPTION]... IN OUT TYPE\n"
          "Writes the model IN to OUT with its matrices in another number format.\n"
          "\n"
          "  TYPE: f32   4 bytes a weight\n"
          "        f16   2 bytes, 11 bits of precision\n"
          "        bf16  2 bytes, 8 bits of precision and the range of f32\n"
          "        q8    1 byte, one scale per row\n"
          "        q8b   3 % more than q8, with a scale for every 64 weights\n"
          "        q4    a little over half a byte, one scale for every 32 weights\n"
          "        q4m   a tenth more than q4, with a middle too for every 32 weights: what\n"
          "              had a scale and a minimum before (Q4_1, Q4_K) keeps its codes\n"
          "\n"
          "      --experts TYPE   another type for the experts, which have most weights.\n"
          "                       Usual is --experts q4 with q8 for all else, which loses\n"
          "                       hardly any quality\n"
          "      --measure FILE   compare OUT with IN on a sample and write the loss into\n"
          "                       OUT, where moe-info shows it. Lines of FILE: source\n"
          "                       language TAB target language TAB source TAB target; for a\n"
          "                       language model only text\n"
          "      --ids            texts of FILE are token ids\n"
          "  -h, --help           this text\n"
          "  -V, --version        version\n"
          "\n"
          "Gates, thresholds and biases stay f32. OUT appears whole under its name or not\n"
          "at all. Rounding cannot be undone, so quantise from the f32 file. If a type\n"
          "changes, OUT does not have the golden sentences of IN; tools/convert/convert.py\n"
          "--golden makes new ones.\n"
          "\n"
          "Exit status: 0 done, 2 usage, 3 IN is missing or not a model, or memory ran\n"
          "out, 4 another file could not be read or written.\n",
          to);
}

/* Bytes of a model file. Opening it checks that the written file can be read. */
static moe_status size_of(const char *path, uint64_t *bytes, moe_error *e) {
    moe_model *m;
    moe_status status = moe_model_open(path, NULL, &m, e);
    if (status) return status;
    *bytes = moe_model_file_bytes(m);
    moe_model_close(m);
    return MOE_OK;
}

static int parse_type(const char *name, moe_type *type) {
    if (moe_type_parse(name, type)) return 1;
    program_usage_error("'%s' is not a number format; there are f32, f16, bf16, q8, q8b, q4 and q4m", name);
    return 0;
}

int main(int argc, char **argv) {
    enum { EXPERTS = 256, MEASURE, IDS };
    static const struct option known[] = { { "experts", required_argument, NULL, EXPERTS },
                                           { "measure", required_argument, NULL, MEASURE },
                                           { "ids", no_argument, NULL, IDS },
                                           { "help", no_argument, NULL, 'h' },
                                           { "version", no_argument, NULL, 'V' },
                                           { NULL, 0, NULL, 0 } };
    const char *experts = NULL, *sample_path = NULL;
    int ids = 0, begun = program_begin("moe-quantize");
    if (begun >= 0) return begun;
    uint64_t given = 0;
    for (int c; (c = program_next_option(argc, argv, "hV", known, NULL, &given)) != -1;) {
        switch (c) {
        case EXPERTS: experts = optarg; break;
        case MEASURE: sample_path = optarg; break;
        case IDS: ids = 1; break;
        case 'h': usage(stdout); return program_printed();
        case 'V': printf("moe-quantize %s\n", moe_version()); return program_printed();
        default: fputs("Try moe-quantize --help\n", stderr); return EXIT_USAGE;
        }
    }
    if (optind + 3 != argc) return program_usage_error("expects IN OUT TYPE");
    const char *in = argv[optind], *out = argv[optind + 1];
    moe_save_params params = { .type = MOE_TYPE_F32 };
    if (!parse_type(argv[optind + 2], &params.type) ||
        !parse_type(experts ? experts : argv[optind + 2], &params.experts))
        return EXIT_USAGE;
    if (strcmp(in, out) == 0 || program_same_file(in, out))
        return program_usage_error("%s and %s are the same file; write to another name", in, out);
    /* The weights are about to be rounded and saved under fresh checksums, so damage must be found now or never. */
    text_front front;
    moe_error e;
    if (text_open(in, sample_path && !ids ? TEXT_REQUIRED : TEXT_IDS_ONLY, &(moe_model_params){ .verify = 1 }, &front,
                  &e))
        return program_file_error(in, &e), EXIT_MODEL;
    if (sample_path && moe_model_get_kind(front.model) == MOE_MODEL_CLASSIFIER) {
        text_close(&front);
        return program_usage_error("%s is a classifier: --measure is for models that read text", in);
    }
    uint64_t before = moe_model_file_bytes(front.model), after = 0;
    moe_status status = moe_model_save(front.model, out, &params, &e);
    if (!status && sample_path) status = measure_loss(&front, out, sample_path, ids, &e);
    text_close(&front);
    if (!status) status = size_of(out, &after, &e);
    if (status) return program_file_error(sample_path && status == MOE_ERROR_ARGUMENT ? sample_path : out, &e);
    fprintf(stderr, "%s: %.1f MiB -> %s: %.1f MiB (%s%s%s)\n", in, (double)before / 1048576, out,
            (double)after / 1048576, moe_type_name(params.type), experts ? ", experts " : "",
            experts ? moe_type_name(params.experts) : "");
    return EXIT_DONE;
}
