/* moe-calibrate - thresholds for the gates of a model, from a text: see usage() below, or --help; calibration.h has the
 * formula.
 *
 * Contents
 *   1. Options   the command line
 *   2. Table     the changes
 *   3. Main
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "moe.h"
#include "tools/programs/calibration.h"
#include "tools/programs/program.h"
#include "tools/text/text.h"

#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ==== 1. Options ======================================================================================== */

typedef struct options {
    program_common common;
    const char *text;
    int k; /* -1: not given */
    int loads;
} options;

static void usage(FILE *to) {
    fputs("Usage: moe-calibrate -m IN -o OUT --text FILE [OPTION]...\n"
          "Writes the model IN, which may have any gates, to OUT with threshold gates;\n"
          "or, with --loads, with its own gates and a note of which experts are busy.\n"
          "Each mixture gets thresholds that distribute the tokens of a text equally over\n"
          "its experts, k of n experts per token on average. All else stays as it is.\n"
          "\n"
          "  -m, --model IN            the model: a translation model or a language model\n"
          "  -o, --output OUT          the file to write; it appears whole or not at all\n"
          "      --text FILE           the text to measure with; a few thousand lines are\n"
          "                            enough. For a translation model as for\n"
          "                            moe-quantize --measure: source language TAB target\n"
          "                            language TAB source TAB target. If the target is\n"
          "                            missing, IN translates first. For a language\n"
          "                            model: lines of text\n"
          "      --k N                 experts per token, for softmax gates, which have\n"
          "                            no such number (with two levels: per level of this\n"
          "                            kind)\n"
          "      --loads               leave the gates as they are, and write into OUT how\n"
          "                            many tokens of the text went to each expert:\n"
          "                            processes that mpirun starts then share the busy\n"
          "                            experts out, so that none waits for another\n"
          "      --ids                 texts are token ids with spaces between them\n"
          "      --pretokenized        texts are pieces of the model's vocabulary with\n"
          "                            spaces between them\n"
          "      --max-len N           leave out lines with more tokens than this\n"
          "  -v, --verbose             report kernels, GPU and memory on standard error\n"
          "  -q, --quiet               no progress and no table\n"
          "\n",
          to);
    fputs(PROGRAM_HELP_SPEED("lines measured"), to);
    fputs("\n"
          "IN is measured with its own gates; its decoder reads the given targets. The\n"
          "threshold of an expert is the (m+1)-th largest of its probabilities, where m = k\n"
          "x tokens / n. Inside a group only the tokens that selected the group count.\n"
          "The table on standard output compares OUT with IN on the same text: experts\n"
          "per token, empty masks, variation of the experts' loads, and the share of\n"
          "equal (token, expert) pairs.\n"
          "\n"
          "OUT has neither the golden sentences nor the measured quality of IN, which are\n"
          "not valid for it. tools/convert/convert.py --golden and moe-quantize --measure\n"
          "make new ones. Memory in addition to the model: 8 bytes per selected (token,\n"
          "expert) pair.\n"
          "\n"
          "Exit status: 0 done, 2 usage, 3 a file is not a model or memory ran out, 4 a\n"
          "file could not be read or written.\n",
          to);
}

static int parse_options(int argc, char **argv, options *o) {
    enum { TEXT = 256, K, LOADS };
    static const struct option known[] = { PROGRAM_OPTIONS,
                                           { "text", required_argument, NULL, TEXT },
                                           { "k", required_argument, NULL, K },
                                           { "loads", no_argument, NULL, LOADS },
                                           { "ids", no_argument, NULL, PROGRAM_IDS },
                                           { "pretokenized", no_argument, NULL, PROGRAM_PRETOKENIZED },
                                           { "max-len", required_argument, NULL, PROGRAM_MAX_LEN },
                                           { NULL, 0, NULL, 0 } };
    *o = (options){ .common = { .usage = usage, .threads = -1, .batch = -1, .max_len = -1 }, .k = -1 };
    int c, status = -1;
    uint64_t given = 0;
    while (status < 0 && (c = program_next_option(argc, argv, PROGRAM_SHORT, known, NULL, &given)) != -1) {
        switch (c) {
        case TEXT: o->text = optarg; break;
        case LOADS: o->loads = 1; break;
        case K: status = program_int("k", optarg, 1, 1 << 20, &o->k); break;
        default: status = program_option(&o->common, c); break;
        }
    }
    if (status >= 0) return status;
    if (optind < argc) return program_usage_error("'%s' is one word too many", argv[optind]);
    if (!o->common.model || !o->common.output || !o->text)
        return program_usage_error("expects -m IN, -o OUT and --text FILE");
    if (o->common.ids && o->common.pretokenized)
        return program_usage_error("--ids and --pretokenized do not go together");
    if (o->loads && o->k >= 0) return program_usage_error("--loads changes no gate: --k does not go with it");
    if (strcmp(o->common.model, o->common.output) == 0 || program_same_file(o->common.model, o->common.output))
        return program_usage_error("%s and %s are the same file; write to another name", o->common.model,
                                   o->common.output);
    return -1;
}

/* ==== 2. Table ========================================================================================== */

static double variation(const tally *t, size_t n) {
    double sum = 0, square = 0;
    for (size_t i = 0; i < n; i++) sum += (double)t->load[i];
    double mean = sum / (double)n;
    for (size_t i = 0; i < n; i++) square += ((double)t->load[i] - mean) * ((double)t->load[i] - mean);
    return mean > 0 ? sqrt(square / (double)n) / mean : 0;
}

static double share(uint64_t part, uint64_t of) { return of ? (double)part / (double)of : 0; }

static void print_level(const level *l) {
    double sum = 0, change = 0;
    float low = l->threshold[0], high = low;
    for (size_t i = 0; i < l->n; i++) {
        sum += (double)l->threshold[i];
        if (l->threshold[i] < low) low = l->threshold[i];
        if (l->threshold[i] > high) high = l->threshold[i];
        if (l->old) change += fabs((double)l->threshold[i] - (double)l->old[i]);
    }
    printf("%-18s thresholds %.4g to %.4g, mean %.4g", l->name, (double)low, (double)high, sum / (double)l->n);
    if (l->old) printf("; mean absolute difference to those before %.4g", change / (double)l->n);
    if (l->unseen) printf("; %zu of %zu never competed", l->unseen, l->n);
    putchar('\n');
}

static void print_table(const calibration *c) {
    const size_t left_out = passes_left_out(&c->text);
    printf("%zu lines", c->text.sample.count - left_out);
    if (left_out) printf(", %zu more left out that the model cannot score", left_out);
    printf("; before -> after\n\n%-12s %9s %7s %18s %20s %18s %12s\n", "mixture", "tokens", "wanted", "experts a token",
           "empty masks %", "CV(load)", "same pairs");
    for (size_t i = 0; i < c->n_mixtures; i++) {
        const calibrated *x = &c->mixtures[i];
        const tally *a = &x->of[0], *b = &x->of[1];
        printf("%-12s %9llu %7zu %7.3f -> %7.3f %8.3f -> %8.3f %7.3f -> %7.3f %10.2f %%\n", x->about.layer,
               (unsigned long long)a->rows, x->gate->k * (x->parent ? x->parent->k : 1), share(a->pairs, a->rows),
               share(b->pairs, b->rows), 100 * share(a->empty, a->rows), 100 * share(b->empty, b->rows),
               variation(a, x->about.experts), variation(b, x->about.experts), 100 * share(x->same, a->pairs));
    }
    putchar('\n');
    for (size_t i = 0; i < c->n_levels; i++) print_level(&c->levels[i]);
}

/* How unequal the loads are. */
static void print_loads(const calibration *c) {
    printf("%-12s %9s %9s %20s %10s\n", "mixture", "experts", "tokens", "busiest / mean load", "no token");
    for (size_t i = 0; i < c->n_mixtures; i++) {
        const calibrated *x = &c->mixtures[i];
        const tally *t = &x->of[0];
        uint64_t most = 0;
        size_t none = 0;
        if (!calibration_shares(c->model, &x->about)) continue;
        for (size_t j = 0; j < x->about.experts; j++) {
            if (t->load[j] > most) most = t->load[j];
            none += t->load[j] == 0;
        }
        printf("%-12s %9zu %9llu %20.2f %10zu\n", x->about.layer, x->about.experts, (unsigned long long)t->rows,
               share(most, t->pairs) * (double)x->about.experts, none);
    }
}

/* ==== 3. Main =========================================================================================== */

/* Run OUT over the same text. */
static moe_status measure_out(const options *o, calibration *c, moe_error *e) {
    moe_model *after;
    moe_status status = moe_model_open(o->common.output, &(moe_model_params){ .copy = o->common.no_mmap }, &after, e);
    if (status) return status;
    status = calibration_compare(c, after, e);
    moe_model_close(after);
    return status;
}

static moe_status find(const options *o, calibration *c, moe_error *e) {
    const int file = open(o->common.model, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        *e = (moe_error){ .code = MOE_ERROR_IO, .message = "IN cannot be opened again" };
        return e->code;
    }
    const moe_status status = calibration_find(c, file, e);
    close(file);
    return status;
}

int main(int argc, char **argv) {
    options o;
    int status = program_begin("moe-calibrate");
    if (status < 0) status = parse_options(argc, argv, &o);
    if (status >= 0) return status;

    /* The weights are about to be saved under fresh checksums, so damage must be found now or never. */
    const moe_model_params params = { .verify = o.common.no_verify ? -1 : 1, .copy = o.common.no_mmap };
    text_front front;
    moe_error e = { .code = MOE_OK };
    if (text_open(o.common.model, TEXT_IDS_ONLY, &params, &front, &e))
        return program_file_error(o.common.model, &e), EXIT_MODEL;
    calibration c = { .common = &o.common,
                      .model = front.model,
                      .k = o.k,
                      .loads = o.loads,
                      .text = { .common = &o.common } };
    const char *file = o.common.model;
    moe_status got = MOE_OK;
    status = EXIT_DONE;
    if (moe_model_get_kind(front.model) == MOE_MODEL_CLASSIFIER) {
        program_complain("%s is a classifier, which reads no text: moe-calibrate cannot measure it", file);
        status = EXIT_USAGE;
    } else {
        got = text_open_tokeniser(&front, program_level(&o.common), &e);
        if (!got) got = find(&o, &c, &e);
        if (!got) file = o.text, got = passes_read(&c.text, &front, o.text, &e);
        if (!got) got = calibration_measure(&c, front.source_extra, &e);
    }
    if (!got && !status) file = o.common.output, got = calibration_save(&c, o.common.output, &e);
    if (!got && !status && !o.loads) got = measure_out(&o, &c, &e);
    if (got) status = program_file_error(file, &e);
    if (got == MOE_ERROR_ARGUMENT && file == o.common.model) status = EXIT_USAGE; /* nothing is wrong with it */
    if (!status && !o.common.quiet) (o.loads ? print_loads : print_table)(&c);
    if (!status) status = program_printed();
    calibration_free(&c);
    text_close(&front);
    return status;
}
