/* moe-quantize - write a model with its matrices in another number format: see usage() below, or --help. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "moe.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { EXIT_DONE = 0, EXIT_USAGE = 2, EXIT_MODEL = 3, EXIT_INPUT_OUTPUT = 4 };

static void usage(FILE *to) {
    fputs("Usage: moe-quantize IN OUT TYPE\n"
          "Writes the model IN to OUT with its matrices in another number format.\n"
          "\n"
          "  TYPE: f32   4 bytes a weight\n"
          "        f16   2 bytes, 11 bits of precision\n"
          "        bf16  2 bytes, 8 bits of precision and the range of f32\n"
          "        q8    1 byte, one scale per row; the fastest\n"
          "\n"
          "Gates, thresholds and biases stay f32. OUT appears whole under its name or not at all. What a file has lost\n"
          "by rounding does not come back: quantise from the f32 file.\n"
          "\n"
          "  -h, --help      this text\n"
          "  -V, --version   version\n"
          "\n"
          "Exit status: 0 done, 2 usage, 3 IN is not a model or memory ran out, 4 OUT could not be written.\n",
          to);
}

static int report(const char *path, const moe_error *e) {
    if (e->code == MOE_ERROR_IO) fprintf(stderr, "moe-quantize: %s\n", e->message); /* names the file itself */
    else fprintf(stderr, "moe-quantize: %s: %s%s%s\n", path, e->where, e->where[0] ? ": " : "", e->message);
    return EXIT_MODEL;
}

static int same_file(const char *a, const char *b) {
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Bytes of a model file; checks that it opens, which says that what was written can be read. */
static moe_status size_of(const char *path, uint64_t *bytes, moe_error *e) {
    moe_model *m;
    moe_status status = moe_model_open(path, NULL, &m, e);
    if (status) return status;
    *bytes = moe_model_file_bytes(m);
    moe_model_close(m);
    return MOE_OK;
}

int main(int argc, char **argv) {
    static const struct option known[] = {
        { "help", no_argument, NULL, 'h' }, { "version", no_argument, NULL, 'V' }, { NULL, 0, NULL, 0 }
    };
    for (int c; (c = getopt_long(argc, argv, "hV", known, NULL)) != -1;) {
        switch (c) {
        case 'h': usage(stdout); return fflush(stdout) ? EXIT_INPUT_OUTPUT : EXIT_DONE;
        case 'V': printf("moe-quantize %s\n", moe_version()); return fflush(stdout) ? EXIT_INPUT_OUTPUT : EXIT_DONE;
        default: fputs("Try moe-quantize --help\n", stderr); return EXIT_USAGE;
        }
    }
    if (optind + 3 != argc) return fputs("moe-quantize: wants IN OUT TYPE; see moe-quantize --help\n", stderr), EXIT_USAGE;
    const char *in = argv[optind], *out = argv[optind + 1], *name = argv[optind + 2];
    moe_type type;
    if (!moe_type_parse(name, &type) || type > MOE_TYPE_Q8) {
        fprintf(stderr, "moe-quantize: '%s' is not a number format; there are f32, f16, bf16 and q8\n", name);
        return EXIT_USAGE;
    }
    if (strcmp(in, out) == 0 || same_file(in, out)) {
        fprintf(stderr, "moe-quantize: %s and %s are the same file; write to another name\n", in, out);
        return EXIT_USAGE;
    }
    /* The weights are about to be rounded and saved under fresh checksums, so damage must be found now or never. */
    moe_model_params params = { .verify = 1 };
    moe_model *m;
    moe_error e;
    if (moe_model_open(in, &params, &m, &e)) return report(in, &e);
    uint64_t before = moe_model_file_bytes(m), after = 0;
    moe_status status = moe_model_save(m, out, type, &e);
    moe_model_close(m);
    if (status) {
        report(out, &e);
        return status == MOE_ERROR_IO ? EXIT_INPUT_OUTPUT : EXIT_MODEL;
    }
    if (size_of(out, &after, &e)) return report(out, &e);
    fprintf(stderr, "%s: %.1f MiB -> %s: %.1f MiB (%s)\n", in, (double)before / 1048576, out, (double)after / 1048576,
            moe_type_name(type));
    return EXIT_DONE;
}
