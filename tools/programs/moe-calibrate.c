/* moe-calibrate - compute the gate thresholds of a model from a text; calibration.h explains the formula. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/calibration.h"
#include "tools/programs/reliability.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

/* ---- 1. Options ---------------------------------------------------------------------------------------- */

typedef struct options {
    program_common common;
    const char *text, *confidence;
    int k; /* -1 if not given */
    int loads;
} options;

static const option_row own_rows[] = {
    { "model", "IN", "input model: a translation model or a language model", .letter = 'm', .group = GROUP_FILES,
      OPTION_MEMBER(ROW_WORD, common.model) },
    { "output", "OUT", "output model; created only when complete", .letter = 'o', .group = GROUP_FILES,
      OPTION_MEMBER(ROW_WORD, common.output) },
    { "text", "FILE", "text to calibrate with; a few thousand lines suffice", .group = GROUP_FILES,
      OPTION_MEMBER(ROW_WORD, text),
      .more = ". For a translation model, lines contain source language TAB target language TAB source TAB target, as "
              "for moe-quantize --measure; if the target is missing, IN translates the source first" },
    { "confidence", "PAIRS", "keep the gates and store a table of probabilities that a translation is right",
      .group = GROUP_FILES, OPTION_MEMBER(ROW_WORD, confidence),
      .more = ". PAIRS has lines of source language TAB target language TAB source TAB reference: at least 400, better "
              "2,000 per direction, which the model has not been trained on" },
    { "max-len", "N", "skip lines with more than N tokens", .group = GROUP_FILES,
      OPTION_INT(common.settings.max_len, 4, 1 << 16) },
    { "k", "N", "experts per token for softmax gates; with two levels of gates, N applies to each softmax level",
      .group = "Calibration", OPTION_INT(k, 1, 1 << 20) },
    { "loads", NULL, "keep the gates and record how many tokens of the text each expert received",
      .group = "Calibration", OPTION_FLAG(loads),
      .more = ". Processes started by mpirun then share the busy experts evenly" },
    { 0 },
};

static const option_program program = {
    .name = "moe-calibrate",
    .usage = "-m IN -o OUT --text FILE [OPTION]...\n       moe-calibrate -m IN -o OUT --confidence PAIRS",
    .about = "Replace the gates of a model with threshold gates that balance its experts on a text.\n"
             "\n"
             "Each mixture gets thresholds that distribute the tokens of the text equally over its experts, k of n "
             "experts per token on average. Everything else is unchanged. With --loads the gates are unchanged and "
             "OUT records which experts are busy.\n"
             "\n"
             "With --confidence only a table is added, from which programs print the probability that a translation is "
             "right: that its chrF against a reference is at least 60.",
    OPTION_LISTS(OPTION_OWN, PROGRAM_ROWS("ids pretokenized verbose quiet"), PROGRAM_SPEED_ROWS),
    .notes =
        "IN is measured with its own gates; its decoder reads the given targets. The threshold of an expert is the "
        "(m+1)-th largest of its probabilities, where m = k x tokens / n. Inside a group only the tokens that "
        "selected the group count. The table on standard output compares OUT with IN on the same text: experts per "
        "token, empty masks, variation of the experts' loads, and the share of equal (token, expert) pairs.\n"
        "\n"
        "OUT contains neither the golden sentences nor the measured quality of IN, which do not apply to it. "
        "tools/convert/convert.py --golden and moe-quantize --measure make new ones. Memory in addition to the model: "
        "8 bytes per selected (token, expert) pair.\n"
        "\n"
        "--confidence fits the table on every other line, and prints on the remaining ones: lines, right translations, "
        "mean probability, expected calibration error over ten bins, and the probability that a right translation gets "
        "a higher value than a wrong one (AUC). Both errors and quality depend on the kind of text.\n"
        "\n"
        "Exit status: 0 done, 2 usage error, 3 model or memory error, 4 input or output error.\n",
    .examples = "  moe-calibrate -m topk.bin -o thresholds.bin --text sample.tsv\n"
                "  moe-calibrate -m model.bin -o sure.bin --confidence dev.tsv\n",
    .required = "model output",
    OPTION_EXCLUSIONS("ids pretokenized", "loads k", "text confidence", "loads confidence", "k confidence",
                      "ids confidence", "pretokenized confidence"),
    .version = program_version,
};

/* ---- 2. Table ------------------------------------------------------------------------------------------ */

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
    if (l->old) printf("; mean absolute change %.4g", change / (double)l->n);
    if (l->unseen) printf("; %zu of %zu never competed", l->unseen, l->n);
    putchar('\n');
}

static void print_table(const calibration *c) {
    const size_t left_out = passes_left_out(&c->text);
    printf("%zu lines", c->text.sample.count - left_out);
    if (left_out) printf(", %zu more skipped that the model cannot score", left_out);
    printf("; before -> after\n\n%-12s %9s %7s %18s %20s %18s %12s\n", "mixture", "tokens", "wanted", "experts/token",
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

/* Print how unevenly the rows are distributed over the experts. */
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

/* ---- 3. Main ------------------------------------------------------------------------------------------- */

/* Run OUT on the calibration text to compare its experts with those of IN. */
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
    if (file < 0) return text_fail(e, MOE_ERROR_IO, "", "cannot open IN again");
    const moe_status status = calibration_find(c, file, e);
    close(file);
    return status;
}

int main(int argc, char **argv) {
    options o = { .common = program_common_none(), .k = -1 };
    int status = program_begin("moe-calibrate");
    if (status < 0) status = option_parse(&program, argc, argv, &o);
    if (status < 0) status = program_check_copy(o.common.model, o.common.output);
    if (status >= 0) return status;
    if (o.confidence) return reliability_fit(&o.common, o.confidence);
    if (!o.text) return program_usage_error("missing --text or --confidence");

    /* Verify the checksums first: saving computes new checksums even for damaged weights. */
    const moe_model_params params = { .verify = o.common.no_verify ? -1 : 1, .copy = o.common.no_mmap };
    text_front front;
    moe_error e = { .code = MOE_OK };
    if (text_open(o.common.model, TEXT_IDS_ONLY | (o.common.no_cache ? TEXT_NO_CACHE : 0), &params, &front, &e))
        return program_model_error(o.common.model, &e);
    if (moe_model_kind(front.model) == MOE_MODEL_CLASSIFIER) {
        text_close(&front);
        return program_error("%s is a classifier; calibration requires a text model", o.common.model), EXIT_USAGE;
    }
    calibration c = { .common = &o.common,
                      .model = front.model,
                      .k = o.k,
                      .loads = o.loads,
                      .text = { .common = &o.common } };
    const char *file = o.common.model;
    moe_status got = text_open_tokeniser(&front, program_level(&o.common), &e);
    if (!got) got = find(&o, &c, &e);
    if (!got) file = o.text, got = passes_read(&c.text, &front, o.text, &e);
    if (!got) got = calibration_measure(&c, front.source_extra, &e);
    if (!got) file = o.common.output, got = calibration_save(&c, o.common.output, &e);
    if (!got && !o.loads) got = measure_out(&o, &c, &e);
    status = got ? program_file_error(file, &e) : EXIT_DONE;
    if (got == MOE_ERROR_ARGUMENT && file == o.common.model) status = EXIT_USAGE; /* the model is valid */
    if (!status && !o.common.quiet) (o.loads ? print_loads : print_table)(&c);
    if (!status) status = program_printed();
    calibration_free(&c);
    text_close(&front);
    return status;
}
