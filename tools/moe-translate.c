/* moe-translate - translate lines of text: see usage() below, or --help.
 *
 * Contents
 *   1. Options      the command line
 *   2. Messages     stderr: complaints about lines, progress
 *   3. Output       stdout or -o: whole lines, in order
 *   4. Lines        a result as text, as ids, as JSON
 *   5. Flow         what moe_translate pulls and hands over
 *   6. Self-test    the golden sentences inside the model
 *   7. Main
 *
 * How it flows: moe_translate pulls requests whenever it has room for another sentence. Each pull reads a line and
 * queues a job; a finished job waits in the queue until those before it are finished, then leaves at once. A line that
 * cannot be used is a job that is finished from the start, so it keeps its place.
 */
#define _GNU_SOURCE         /* getopt_long on Linux */
#define _DARWIN_C_SOURCE    /* and on macOS         */

#include "moe.h"
#include "tools/spm.h"
#include "tools/text.h"

#include <cjson/cJSON.h>

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_DONE = 0, EXIT_SOME_LINES = 1, EXIT_USAGE = 2, EXIT_MODEL = 3, EXIT_INPUT_OUTPUT = 4 };

static volatile sig_atomic_t stop_signal; /* the only global: a signal handler can reach nothing else */

static void on_signal(int number) { stop_signal = number; }

/* ==== 1. Options ======================================================================================== */

typedef struct options {
    const char *model, *target, *source, *input, *output, *isa, *device;
    int beam, nbest, threads, batch, batch_tokens, max_len, gpu_memory; /* -1: not given */
    float length_penalty, coverage_penalty, prune; /* NaN: not given */
    const char *preset;
    int ids, pretokenized, score, json, stats, self_test, truncate, quiet, verbose, no_mmap;
} options;

static void usage(FILE *to) {
    fputs("Usage: moe-translate -m MODEL -t LANG [OPTION]...\n"
          "Translates UTF-8 lines from standard input, one line out for each line in, in order.\n"
          "\n"
          "Files and languages\n"
          "  -m, --model FILE          the model\n"
          "  -t, --target LANG         language to translate into, such as de\n"
          "  -s, --source LANG         language of the input; checked, but the model finds it out by itself\n"
          "  -i, --input FILE          read this instead of standard input\n"
          "  -o, --output FILE         write this instead of standard output; after a failure or ^C it holds the\n"
          "                            lines that were finished, whole\n"
          "\n"
          "Search\n"
          "      --preset NAME         search as the engine of a checkpoint does: paper, nvidia, tf or mlperf (default: what\n"
          "                            the model says); the options below change parts of it\n"
          "      --beam N              hypotheses kept at each step; 1 is greedy (default: the model's)\n"
          "      --nbest N             give the N best translations, separated by TABs (in --json: a list)\n"
          "      --length-penalty A    alpha of the GNMT length penalty; 0 is none\n"
          "      --coverage-penalty B  beta of the GNMT coverage penalty; 0 is none\n"
          "      --prune MARGIN        drop hypotheses this much worse than the best (natural log); 0 is never\n"
          "      --max-len N           longest line and longest translation, in tokens\n"
          "      --truncate            cut a line at the first thing that cannot be used, rather than leave it out\n"
          "\n"
          "Input and output\n"
          "      --ids                 lines are token ids separated by spaces, in and out\n"
          "      --pretokenized        lines are pieces of the model's vocabulary separated by spaces, in and out; unknown\n"
          "                            ones become the unknown token (tools/moses-bpe.py makes them for Moses + BPE)\n"
          "      --score               lines are source TAB target; gives the target's log-probability TAB tokens\n"
          "      --json                one JSON object per line: source, translation, score, ids, token_logprobs,\n"
          "                            nbest; error where a line could not be translated\n"
          "      --stats               tokens, seconds and memory to standard error at the end\n"
          "  -v, --verbose             say on standard error what is used: kernels or GPU, memory\n"
          "  -q, --quiet               no progress and no warnings; lines that fail are still reported\n"
          "\n"
          "Speed (none of these changes a single byte of the output)\n"
          "      --threads N           threads that compute (default: one per processor)\n"
          "      --batch N             sentences decoded at once\n"
          "      --batch-tokens N      source tokens decoded at once, about: many short sentences or few long ones\n"
          "      --no-mmap             read the model into memory of its own: a tenth faster, slower to start\n"
          "      --isa NAME            kernels to use (default: MOE_ISA, else the best this machine has)\n"
          "      --device NAME         cpu, cuda or cuda:N; without it a GPU where this build and machine have one that\n"
          "                            works (default: MOE_DEVICE)\n"
          "      --gpu-memory MB       memory of the GPU to take at most (default: whatever is free)\n"
          "\n"
          "      --self-test           translate the sentences stored in the model and compare; needs only -m\n"
          "  -h, --help                this text\n"
          "  -V, --version             versions of moe and SentencePiece, and the kernels in this build\n"
          "\n"
          "An empty line gives an empty line. A line that cannot be translated gives an empty line too, and standard\n"
          "error says which and why. CRLF line ends are read, LF is written.\n"
          "\n"
          "Exit status: 0 all translated, 1 some lines were not (or the self-test failed), 2 usage, 3 model or memory,\n"
          "4 input or output, 128 + N stopped by signal N.\n"
          "\n"
          "Example: echo 'Good morning!' | moe-translate -m models/en-de-fr-es.bin -t de\n",
          to);
}

static int usage_error(const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 1, 2)))
#endif
    ;

static int usage_error(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("moe-translate: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("; see moe-translate --help\n", stderr);
    va_end(arguments);
    return EXIT_USAGE;
}

static int parse_int(const char *name, const char *text, int low, int high, int *out) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (end == text || *end || errno || value < low || value > high)
        return usage_error("--%s wants a whole number from %d to %d, not '%s'", name, low, high, text);
    *out = (int)value;
    return 0;
}

static int parse_float(const char *name, const char *text, float *out) {
    char *end;
    float value = strtof(text, &end);
    if (end == text || *end || !isfinite(value) || value < 0.0f)
        return usage_error("--%s wants a number that is not negative, not '%s'", name, text);
    *out = value;
    return 0;
}

/* -1: go on; else the exit status. */
static int parse_options(int argc, char **argv, options *o) {
    enum {
        BEAM = 256, NBEST, THREADS, BATCH, BATCH_TOKENS, NO_MMAP, MAX_LEN, LENGTH_PENALTY, COVERAGE_PENALTY, PRUNE,
        PRESET, IDS, PRETOKENIZED, SCORE, JSON, STATS, ISA, SELF_TEST, TRUNCATE, DEVICE, GPU_MEMORY
    };
    static const struct option known[] = {
        { "model", required_argument, NULL, 'm' },        { "target", required_argument, NULL, 't' },
        { "source", required_argument, NULL, 's' },       { "input", required_argument, NULL, 'i' },
        { "output", required_argument, NULL, 'o' },       { "beam", required_argument, NULL, BEAM },
        { "nbest", required_argument, NULL, NBEST },      { "threads", required_argument, NULL, THREADS },
        { "batch", required_argument, NULL, BATCH },      { "batch-tokens", required_argument, NULL, BATCH_TOKENS },
        { "max-len", required_argument, NULL, MAX_LEN }, { "no-mmap", no_argument, NULL, NO_MMAP },
        { "length-penalty", required_argument, NULL, LENGTH_PENALTY },
        { "coverage-penalty", required_argument, NULL, COVERAGE_PENALTY },
        { "prune", required_argument, NULL, PRUNE },      { "ids", no_argument, NULL, IDS },
        { "preset", required_argument, NULL, PRESET },    { "pretokenized", no_argument, NULL, PRETOKENIZED },
        { "score", no_argument, NULL, SCORE },            { "json", no_argument, NULL, JSON },
        { "stats", no_argument, NULL, STATS },            { "isa", required_argument, NULL, ISA },
        { "self-test", no_argument, NULL, SELF_TEST },    { "truncate", no_argument, NULL, TRUNCATE },
        { "device", required_argument, NULL, DEVICE },    { "gpu-memory", required_argument, NULL, GPU_MEMORY },
        { "verbose", no_argument, NULL, 'v' },
        { "quiet", no_argument, NULL, 'q' },              { "help", no_argument, NULL, 'h' },
        { "version", no_argument, NULL, 'V' },            { NULL, 0, NULL, 0 }
    };
    *o = (options){ .beam = -1, .nbest = -1, .threads = -1, .batch = -1, .batch_tokens = -1, .max_len = -1, .gpu_memory = -1,
                    .length_penalty = NAN, .coverage_penalty = NAN, .prune = NAN };
    int c, bad = 0;
    while (!bad && (c = getopt_long(argc, argv, "m:t:s:i:o:vqhV", known, NULL)) != -1) {
        switch (c) {
        case 'm': o->model = optarg; break;
        case 't': o->target = optarg; break;
        case 's': o->source = optarg; break;
        case 'i': o->input = optarg; break;
        case 'o': o->output = optarg; break;
        case 'q': o->quiet = 1; break;
        case 'v': o->verbose = 1; break;
        case BEAM: bad = parse_int("beam", optarg, 1, MOE_MAX_BEAM, &o->beam); break;
        case NBEST: bad = parse_int("nbest", optarg, 1, MOE_MAX_BEAM, &o->nbest); break;
        case THREADS: bad = parse_int("threads", optarg, 1, MOE_MAX_THREADS, &o->threads); break;
        case BATCH: bad = parse_int("batch", optarg, 1, 4096, &o->batch); break;
        case BATCH_TOKENS: bad = parse_int("batch-tokens", optarg, 1, 1 << 24, &o->batch_tokens); break;
        case NO_MMAP: o->no_mmap = 1; break;
        case MAX_LEN: bad = parse_int("max-len", optarg, 4, 1 << 16, &o->max_len); break;
        case LENGTH_PENALTY: bad = parse_float("length-penalty", optarg, &o->length_penalty); break;
        case COVERAGE_PENALTY: bad = parse_float("coverage-penalty", optarg, &o->coverage_penalty); break;
        case PRUNE: bad = parse_float("prune", optarg, &o->prune); break;
        case PRESET: o->preset = optarg; break;
        case IDS: o->ids = 1; break;
        case PRETOKENIZED: o->pretokenized = 1; break;
        case SCORE: o->score = 1; break;
        case JSON: o->json = 1; break;
        case STATS: o->stats = 1; break;
        case ISA: o->isa = optarg; break;
        case DEVICE: o->device = optarg; break;
        case GPU_MEMORY: bad = parse_int("gpu-memory", optarg, 1, 1 << 30, &o->gpu_memory); break;
        case SELF_TEST: o->self_test = 1; break;
        case TRUNCATE: o->truncate = 1; break;
        case 'h':
            usage(stdout);
            return fflush(stdout) ? EXIT_INPUT_OUTPUT : EXIT_DONE;
        case 'V':
            printf("moe-translate %s (SentencePiece %s; kernels: %s)\n", moe_version(), spm_library_version(), moe_isa_names());
            return fflush(stdout) ? EXIT_INPUT_OUTPUT : EXIT_DONE;
        default: fputs("Try moe-translate --help\n", stderr); return EXIT_USAGE; /* getopt said why */
        }
    }
    if (bad) return bad;
    if (optind < argc) return usage_error("'%s' is one word too many: text comes from standard input or -i", argv[optind]);
    if (!o->model) return usage_error("say which model with -m");
    if (o->beam > 0 && o->nbest > o->beam) return usage_error("--nbest %d is more than --beam %d keeps", o->nbest, o->beam);
    moe_session_params preset = { 0 };
    if (o->preset && !moe_session_params_preset(&preset, o->preset))
        return usage_error("--preset is paper, nvidia, tf or mlperf, not '%s'", o->preset);
    if (o->ids && o->pretokenized) return usage_error("--ids and --pretokenized do not go together");
    if (o->score && o->nbest > 0) return usage_error("--score and --nbest do not go together");
    if (o->self_test && (o->score || o->ids || o->pretokenized || o->json || o->input || o->output))
        return usage_error("--self-test reads and writes nothing else");
    return -1;
}

static void log_line(void *user, const char *message) {
    (void)user;
    fprintf(stderr, "moe-translate: %s\n", message);
}

static void apply_options(const options *o, moe_session_params *p) {
    if (o->threads > 0) p->threads = o->threads;
    if (o->batch_tokens > 0) { /* short sentences have about eight tokens */
        p->batch_tokens = o->batch_tokens;
        p->batch = o->batch_tokens < 8 ? 1 : o->batch_tokens / 8 > 4096 ? 4096 : o->batch_tokens / 8;
    }
    if (o->batch > 0) p->batch = o->batch;
    if (o->isa) p->isa = o->isa;
    if (o->device) p->device = o->device;
    if (o->gpu_memory > 0) p->device_memory = (size_t)o->gpu_memory << 20;
    if (o->verbose) p->log = log_line;
    if (o->self_test) return; /* the stored sentences were made with the model's own settings */
    if (o->preset) moe_session_params_preset(p, o->preset);
    if (o->max_len > 0) p->max_source = p->max_target = o->max_len;
    if (o->nbest > 0) p->nbest = o->nbest;
    if (o->beam > 0) p->beam = o->beam;
    else if (p->beam < p->nbest) p->beam = p->nbest;
    if (p->nbest > p->beam) p->nbest = p->beam; /* the model's default, with a narrower beam */
    if (!isnan(o->length_penalty)) p->length_penalty = o->length_penalty;
    if (!isnan(o->coverage_penalty)) p->coverage_penalty = o->coverage_penalty;
    if (!isnan(o->prune)) p->prune = o->prune;
}

/* ==== 2. Messages ======================================================================================= */

typedef struct progress {
    int on, shown;
    double begin, last;
    uint64_t lines, failed, tokens;
} progress;

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void progress_hide(progress *p) {
    if (p->shown) fputs("\r\033[K", stderr);
    p->shown = 0;
}

static void progress_show(progress *p) {
    if (!p->on) return;
    double now = seconds();
    if (now - p->last < 0.2) return;
    p->last = now;
    fprintf(stderr, "\r%llu lines, %.0f tokens/s\033[K", (unsigned long long)p->lines,
            (double)p->tokens / (now - p->begin > 1e-3 ? now - p->begin : 1e-3));
    fflush(stderr);
    p->shown = 1;
}

static void complain(progress *p, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 2, 3)))
#endif
    ;

static void complain(progress *p, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (p) progress_hide(p);
    fputs("moe-translate: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

static void complain_model(const char *file, const moe_error *e) {
    char line[512];
    complain(NULL, "%s", text_file_error(file, e, line, sizeof line));
}

/* ==== 3. Output ========================================================================================= */

typedef struct output {
    int fd;
    const char *name;
    int ours;       /* opened for -o, a regular file: a partial line can be taken back */
    off_t good;     /* bytes up to the end of the last whole line                      */
    uint64_t lines; /* whole lines written                                             */
    int error;      /* errno of the failure that ended output                          */
} output;

/* All or an error. `data` is whole lines. */
static void output_write(output *out, const char *data, size_t length) {
    size_t done = 0;
    while (done < length && !out->error) {
        ssize_t n = write(out->fd, data + done, length - done);
        if (n >= 0) {
            done += (size_t)n;
        } else if (errno == EAGAIN) { /* someone made the pipe non-blocking */
            struct pollfd room = { .fd = out->fd, .events = POLLOUT };
            poll(&room, 1, -1);
        } else if (errno != EINTR) {
            out->error = errno;
        }
    }
    size_t whole = done;
    while (whole && data[whole - 1] != '\n') whole--;
    for (size_t i = 0; i < whole; i++) out->lines += data[i] == '\n';
    out->good += (off_t)whole;
    if (whole < done && out->ours && ftruncate(out->fd, out->good)) { /* it stays, then; the exit status tells */ }
}

static int same_file(int a, int b) {
    struct stat x, y;
    return !fstat(a, &x) && !fstat(b, &y) && S_ISREG(x.st_mode) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* ==== 4. Lines ========================================================================================== */

/* What a hypothesis says: text, or ids with --ids, or pieces with --pretokenized. */
static moe_status append_translation(const text_front *front, const options *o, const moe_hypothesis *h, text_bytes *out,
                                     moe_error *error) {
    if (o->pretokenized) return text_join_pieces(front, h->ids, h->n_ids, out, error);
    if (!o->ids) return text_decode(front, h->ids, h->n_ids, out, error);
    text_append_ids(out, h->ids, h->n_ids);
    return MOE_OK;
}

static cJSON *json_float(float value) {
    if (!isfinite(value)) return cJSON_CreateNull(); /* the probability of an id that is never generated is 0 */
    text_bytes digits = { 0 };
    text_append_float(&digits, value);
    cJSON *number = digits.failed ? NULL : cJSON_CreateRaw(digits.data);
    text_bytes_free(&digits);
    return number;
}

static cJSON *json_ids(const int32_t *ids, size_t n) {
    cJSON *list = cJSON_CreateArray();
    for (size_t i = 0; list && i < n; i++) cJSON_AddItemToArray(list, cJSON_CreateNumber(ids[i]));
    return list;
}

/* Add what a hypothesis has to an object. The keys are documented in README.md: later programs depend on them. */
static moe_status json_hypothesis(const text_front *front, const options *o, const moe_hypothesis *h, cJSON *object,
                                  moe_error *error) {
    if (!o->score) {
        text_bytes text = { 0 };
        moe_status status = append_translation(front, o, h, &text, error);
        if (!status && !text.failed) cJSON_AddStringToObject(object, "translation", text.data);
        text_bytes_free(&text);
        if (status) return status;
    }
    cJSON_AddItemToObject(object, "score", json_float(h->score));
    cJSON_AddItemToObject(object, "logprob", json_float(h->logprob));
    if (!o->score) cJSON_AddBoolToObject(object, "finished", h->finished);
    else cJSON_AddNumberToObject(object, "tokens", (double)(h->n_ids + (h->finished != 0)));
    cJSON_AddItemToObject(object, "ids", json_ids(h->ids, h->n_ids));
    cJSON *list = cJSON_AddArrayToObject(object, "token_logprobs");
    for (size_t i = 0; i < h->n_ids + (h->finished != 0); i++) cJSON_AddItemToArray(list, json_float(h->token_logprobs[i]));
    return MOE_OK;
}

/* The line for a job as JSON; result NULL where there is none. */
static moe_status json_line(const text_front *front, const options *o, text_job *job, const moe_result *result,
                            moe_error *error) {
    cJSON *object = cJSON_CreateObject();
    cJSON_AddNumberToObject(object, "line", (double)job->line);
    if (job->failed && !job->source.length) cJSON_AddNullToObject(object, "source");
    else cJSON_AddStringToObject(object, "source", job->source.length ? job->source.data : "");
    if (o->score) cJSON_AddStringToObject(object, "target", job->target.length ? job->target.data : "");
    cJSON_AddItemToObject(object, "source_ids", json_ids(job->source_ids.data, job->failed ? 0 : job->source_ids.length));
    moe_status status = MOE_OK;
    if (result && result->n_hypotheses) {
        status = json_hypothesis(front, o, &result->hypotheses[0], object, error);
        cJSON *list = o->nbest > 0 ? cJSON_AddArrayToObject(object, "nbest") : NULL;
        for (size_t i = 0; list && !status && i < result->n_hypotheses; i++) {
            cJSON *one = cJSON_CreateObject();
            cJSON_AddItemToArray(list, one);
            status = json_hypothesis(front, o, &result->hypotheses[i], one, error);
        }
    } else if (!o->score) {
        cJSON_AddStringToObject(object, "translation", "");
    }
    if (job->failed) cJSON_AddStringToObject(object, "error", job->note);
    else if (job->cut) cJSON_AddStringToObject(object, "cut", job->note);
    if (!status) {
        char *text = cJSON_PrintUnformatted(object);
        if (text) text_append_string(&job->output, text);
        else job->output.failed = 1; /* cJSON passes NULL along when memory runs out */
        cJSON_free(text);
    }
    cJSON_Delete(object);
    return status;
}

/* The line for a job as text. */
static moe_status plain_line(const text_front *front, const options *o, text_job *job, const moe_result *result,
                             moe_error *error) {
    if (!result || !result->n_hypotheses) return MOE_OK;
    if (o->score) {
        const moe_hypothesis *h = &result->hypotheses[0];
        text_append_float(&job->output, h->logprob);
        text_printf(&job->output, "\t%zu", h->n_ids + (h->finished != 0));
        return MOE_OK;
    }
    for (size_t i = 0; i < result->n_hypotheses; i++) {
        if (i) text_append(&job->output, "\t", 1);
        moe_status status = append_translation(front, o, &result->hypotheses[i], &job->output, error);
        if (status) return status;
    }
    return MOE_OK;
}

/* ==== 5. Flow =========================================================================================== */

typedef struct app {
    const options *options;
    const text_front *front;
    text_options line_options;
    text_reader reader;
    text_queue queue;
    text_bytes block; /* lines on their way to one write */
    output out;
    progress progress;
    uint64_t source_pieces, unknown_pieces;
    int read_error;     /* errno */
    moe_error trouble;  /* code set: memory ran out, or worse */
} app;

static int app_must_stop(const app *a) { return stop_signal || a->out.error || a->read_error || a->trouble.code; }

/* Everything that is final leaves now, in one write. */
static void app_drain(app *a) {
    a->block.length = 0;
    for (text_job *job; (job = text_queue_first(&a->queue)); text_queue_remove(&a->queue)) {
        if (job->failed) {
            a->progress.failed++;
            complain(&a->progress, "line %llu: %s", (unsigned long long)job->line, job->note);
        } else if (job->cut && !a->options->quiet) {
            complain(&a->progress, "line %llu: %s", (unsigned long long)job->line, job->note);
        }
        a->progress.lines++;
        text_append(&a->block, job->output.data, job->output.length);
        text_append(&a->block, "\n", 1);
    }
    if (a->block.failed) {
        a->trouble = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
        return;
    }
    if (a->block.length) output_write(&a->out, a->block.data, a->block.length);
    progress_show(&a->progress);
}

static void app_finish(app *a, text_job *job, const moe_result *result) {
    moe_error e = { .code = MOE_OK };
    moe_status status = a->options->json ? json_line(a->front, a->options, job, result, &e)
                                         : plain_line(a->front, a->options, job, result, &e);
    if (status || job->output.failed) {
        if (!status) e = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
        a->trouble = e;
        return;
    }
    job->finished = 1;
    app_drain(a);
}

static int app_pull(void *user, int wait, moe_request *request) {
    static const int32_t nothing[1] = { 0 }; /* ids of an empty text: a target is told from none by its pointer */
    app *a = user;
    for (;;) {
        if (app_must_stop(a)) return MOE_PULL_CANCEL;
        text_line line;
        switch (text_reader_next(&a->reader, wait, &line)) {
        case TEXT_READ_LINE: break;
        case TEXT_READ_LATER: return MOE_PULL_LATER;
        case TEXT_READ_END: return MOE_PULL_END;
        case TEXT_READ_STOP: return MOE_PULL_CANCEL;
        default: a->read_error = errno; return MOE_PULL_CANCEL;
        }
        text_job *job = text_queue_add(&a->queue);
        if (!job) {
            a->trouble = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
            return MOE_PULL_CANCEL;
        }
        if (text_job_prepare(a->front, &a->line_options, &line, job, &a->trouble)) return MOE_PULL_CANCEL;
        if (job->failed || job->blank) {
            app_finish(a, job, NULL);
            continue;
        }
        a->source_pieces += job->source_ids.length;
        for (size_t i = 0; i < job->source_ids.length; i++)
            a->unknown_pieces += (uint64_t)text_is_unknown(a->front, job->source_ids.data[i]);
        request->source = job->source_ids.data ? job->source_ids.data : nothing;
        request->n_source = job->source_ids.length;
        if (a->options->score) {
            request->target = job->target_ids.data ? job->target_ids.data : nothing;
            request->n_target = job->target_ids.length;
        }
        request->user = job;
        return MOE_PULL_REQUEST;
    }
}

static void app_done(void *user, const moe_result *result) {
    app *a = user;
    text_job *job = result->user;
    if (app_must_stop(a)) return;
    if (result->status) {
        job->failed = 1;
        snprintf(job->note, sizeof job->note, "%s", result->message);
    } else if (result->n_hypotheses) {
        const moe_hypothesis *best = &result->hypotheses[0];
        a->progress.tokens += best->n_ids + (best->finished != 0);
        if (!best->finished && !job->cut && !a->options->score) { /* cut text is never passed off as whole */
            job->cut = 1;
            snprintf(job->note, sizeof job->note, "the translation was cut after %zu tokens", best->n_ids);
        }
    }
    app_finish(a, job, result);
}

static void print_stats(const app *a, moe_session *session, double elapsed) {
    moe_stats s = moe_session_stats(session);
    struct rusage use;
    double resident = 0;
    if (!getrusage(RUSAGE_SELF, &use)) {
#ifdef __APPLE__
        resident = (double)use.ru_maxrss / 1048576.0; /* bytes there, KiB elsewhere */
#else
        resident = (double)use.ru_maxrss / 1024.0;
#endif
    }
    fprintf(stderr,
            "lines            %llu, %llu of them failed\n"
            "source tokens    %llu (tag and end included); %llu of %llu pieces unknown to the vocabulary\n"
            "target tokens    %llu (end included)\n"
            "seconds          %.3f\n"
            "target tokens/s  %.1f\n"
            "decoder steps    %llu, %.1f rows each\n"
            "peak memory      %.1f MiB resident, %.1f MiB of it the session's\n"
            "kernels          %s\n"
            "device           %s\n",
            (unsigned long long)a->progress.lines, (unsigned long long)a->progress.failed,
            (unsigned long long)s.source_tokens, (unsigned long long)a->unknown_pieces,
            (unsigned long long)a->source_pieces, (unsigned long long)s.target_tokens, elapsed,
            elapsed > 0 ? (double)s.target_tokens / elapsed : 0.0, (unsigned long long)s.steps,
            s.steps ? (double)s.rows / (double)s.steps : 0.0, resident, (double)s.bytes / 1048576.0, s.isa ? s.isa : "?",
            s.device ? s.device : "?");
    if (s.device_bytes) fprintf(stderr, "device memory    %.1f MiB\n", (double)s.device_bytes / 1048576.0);
}

/* Translate everything; the exit status. */
static int translate(app *a, moe_session *session) {
    const options *o = a->options;
    if (!o->quiet && isatty(a->reader.fd) && isatty(STDERR_FILENO))
        fputs("One sentence per line; end with ^D.\n", stderr);
    a->progress.on = !o->quiet && isatty(STDERR_FILENO) && !isatty(a->out.fd) && !isatty(a->reader.fd);
    a->progress.begin = seconds();

    moe_error e = { .code = MOE_OK };
    moe_status status = moe_translate(session, app_pull, app_done, a, &e);
    double elapsed = seconds() - a->progress.begin;
    progress_hide(&a->progress);

    if (a->out.error) {
        complain(NULL, "%s: %s; %llu whole lines were written", a->out.name, strerror(a->out.error),
                 (unsigned long long)a->out.lines);
        return EXIT_INPUT_OUTPUT;
    }
    if (a->read_error) {
        complain(NULL, "%s: %s, after line %llu", o->input ? o->input : "standard input", strerror(a->read_error),
                 (unsigned long long)a->reader.lines);
        return EXIT_INPUT_OUTPUT;
    }
    if (a->trouble.code) return complain(NULL, "%s", a->trouble.message), EXIT_MODEL;
    if (stop_signal) {
        if (!o->quiet) complain(NULL, "stopped by signal %d; %llu whole lines were written", (int)stop_signal,
                                (unsigned long long)a->out.lines);
        return 128 + (int)stop_signal;
    }
    if (status) return complain(NULL, "%s", e.message), EXIT_MODEL;
    if (o->stats) print_stats(a, session, elapsed);
    if (a->progress.failed)
        complain(NULL, "%llu of %llu lines could not be translated", (unsigned long long)a->progress.failed,
                 (unsigned long long)a->progress.lines);
    return a->progress.failed ? EXIT_SOME_LINES : EXIT_DONE;
}

/* ==== 6. Self-test ====================================================================================== */

typedef struct golden {
    text_bytes got;     /* ids, as in golden.target_ids */
    text_bytes message; /* empty, or why there are none */
} golden;

typedef struct self_test {
    const text_front *front;
    size_t n, next;
    size_t source_ids, target_ids, language; /* metadata entries */
    text_ids ids;
    golden *results;
    moe_error trouble;
} self_test;

static int self_test_pull(void *user, int wait, moe_request *request) {
    self_test *t = user;
    (void)wait;
    if (stop_signal) return MOE_PULL_CANCEL;
    if (t->next == t->n) return MOE_PULL_END;
    golden *g = &t->results[t->next];
    moe_span ids = moe_model_meta_text(t->front->model, t->source_ids, t->next);
    moe_span language = moe_model_meta_text(t->front->model, t->language, t->next);
    char code[32];
    snprintf(code, sizeof code, "%.*s", language.length < 31 ? (int)language.length : 31, language.data ? language.data : "");
    if (text_parse_ids(t->front, ids.data, ids.length, &t->ids, &t->trouble)) return MOE_PULL_CANCEL;
    if (code[0] && text_language(t->front, code, &request->target_tag, &t->trouble)) return MOE_PULL_CANCEL;
    static const int32_t nothing[1] = { 0 };
    request->source = t->ids.data ? t->ids.data : nothing;
    request->n_source = t->ids.length;
    request->user = g;
    t->next++;
    return MOE_PULL_REQUEST;
}

static void self_test_done(void *user, const moe_result *result) {
    (void)user;
    golden *g = result->user;
    if (result->status) text_append_string(&g->message, result->message);
    else if (result->n_hypotheses) text_append_ids(&g->got, result->hypotheses[0].ids, result->hypotheses[0].n_ids);
}

static int span_is(moe_span s, const text_bytes *b) {
    return s.length == b->length && (!s.length || memcmp(s.data, b->data, s.length) == 0);
}

/* Text level: the tokeniser gives the stored ids for the stored source, and the stored text for the stored ids. */
static const char *self_test_text(self_test *t, ptrdiff_t source, ptrdiff_t target, size_t i) {
    const char *verdict = NULL;
    moe_error e;
    text_bytes out = { 0 };
    moe_span text = moe_model_meta_text(t->front->model, (size_t)source, i);
    moe_span ids = moe_model_meta_text(t->front->model, t->source_ids, i);
    if (text_encode(t->front, text.data, text.length, &t->ids, &e)) return "SentencePiece refuses the source";
    text_append_ids(&out, t->ids.data, t->ids.length);
    if (!span_is(ids, &out)) verdict = "this version of SentencePiece cuts the source into other pieces";
    if (!verdict) {
        out.length = 0;
        ids = moe_model_meta_text(t->front->model, t->target_ids, i);
        if (text_parse_ids(t->front, ids.data, ids.length, &t->ids, &e) ||
            text_decode(t->front, t->ids.data, t->ids.length, &out, &e) ||
            !span_is(moe_model_meta_text(t->front->model, (size_t)target, i), &out))
            verdict = "this version of SentencePiece joins the translation differently";
    }
    text_bytes_free(&out);
    return verdict;
}

/* Verdict lines on stdout; the exit status. */
static int run_self_test(const text_front *front, moe_session *session, const char *model) {
    const moe_model *m = front->model;
    ptrdiff_t source_ids = moe_model_meta_find(m, "golden.source_ids"), target_ids = moe_model_meta_find(m, "golden.target_ids");
    ptrdiff_t language = moe_model_meta_find(m, "golden.language"), source_language = moe_model_meta_find(m, "golden.source_language");
    ptrdiff_t source = moe_model_meta_find(m, "golden.source"), target = moe_model_meta_find(m, "golden.target");
    size_t n = source_ids < 0 ? 0 : moe_model_meta_length(m, (size_t)source_ids);
    if (!n || target_ids < 0 || language < 0 || moe_model_meta_length(m, (size_t)target_ids) != n ||
        moe_model_meta_length(m, (size_t)language) != n) {
        complain(NULL, "%s: this model holds no sentences to test with (golden.*)", model);
        return EXIT_MODEL;
    }
    self_test t = { .front = front, .n = n, .source_ids = (size_t)source_ids, .target_ids = (size_t)target_ids,
                    .language = (size_t)language, .results = calloc(n, sizeof(golden)) };
    if (!t.results) return complain(NULL, "out of memory"), EXIT_MODEL;
    int status = EXIT_DONE;
    size_t failed = 0;
    moe_error e;
    if (moe_translate(session, self_test_pull, self_test_done, &t, &e)) {
        if (!stop_signal) complain_model(model, t.trouble.code ? &t.trouble : &e);
        status = stop_signal ? 128 + (int)stop_signal : EXIT_MODEL;
    }
    for (size_t i = 0; i < n && !status; i++) {
        golden *g = &t.results[i];
        moe_span wanted = moe_model_meta_text(m, t.target_ids, i), to = moe_model_meta_text(m, t.language, i);
        moe_span from = source_language < 0 ? (moe_span){ "?", 1 } : moe_model_meta_text(m, (size_t)source_language, i);
        const char *why = g->message.length ? g->message.data : span_is(wanted, &g->got) ? NULL : "the translation differs";
        if (!why && front->tokeniser && source >= 0 && target >= 0) why = self_test_text(&t, source, target, i);
        text_bytes line = { 0 };
        text_printf(&line, "%s %3zu  ", why ? "FAIL" : "ok  ", i + 1);
        text_append_clean(&line, from.data, from.length);
        text_append(&line, "-", 1);
        text_append_clean(&line, to.data, to.length);
        if (why) text_printf(&line, "  %s", why);
        if (why && !g->message.length && !span_is(wanted, &g->got)) {
            text_append_string(&line, "\n          wanted ");
            text_append_clean(&line, wanted.data, wanted.length);
            text_append_string(&line, "\n          got    ");
            text_append(&line, g->got.data, g->got.length);
        }
        if (!line.failed) puts(line.data);
        text_bytes_free(&line);
        failed += why != NULL;
    }
    if (!status) {
        moe_stats s = moe_session_stats(session);
        printf("%zu sentences: %zu passed, %zu failed (kernels %s, SentencePiece %s)\n", n, n - failed, failed,
               s.isa ? s.isa : "?", front->tokeniser ? spm_library_version() : "not used");
        status = fflush(stdout) || ferror(stdout) ? EXIT_INPUT_OUTPUT : failed ? EXIT_SOME_LINES : EXIT_DONE;
        if (status == EXIT_INPUT_OUTPUT) complain(NULL, "standard output: %s", strerror(errno));
    }
    for (size_t i = 0; i < n; i++) text_bytes_free(&t.results[i].got), text_bytes_free(&t.results[i].message);
    free(t.results);
    text_ids_free(&t.ids);
    return status;
}

/* ==== 7. Main =========================================================================================== */

/* A standard stream that is closed would lend its number to the next file opened: a model at descriptor 1 would be
 * written to. So fill the gap; *closed remembers it. */
static int hold_descriptor(int fd, int *closed) {
    *closed = fcntl(fd, F_GETFD) < 0 && errno == EBADF;
    return !*closed || open("/dev/null", O_RDWR) == fd;
}

static void handle_signals(void) {
    struct sigaction stop = { 0 }, ignore = { 0 };
    stop.sa_handler = on_signal;
    stop.sa_flags = SA_RESTART | (int)SA_RESETHAND; /* the second ^C ends a run that is stuck in a write */
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    ignore.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &ignore, NULL); /* a closed pipe is an error of write() with a message */
}

/* Files and the loop, once model and session stand. */
static int run(const options *o, const text_front *front, moe_session *session, const moe_session_params *params,
               const int closed[3]) {
    app a = { .options = o, .front = front };
    a.line_options = (text_options){ .ids = o->ids, .pretokenized = o->pretokenized, .score = o->score, .truncate = o->truncate,
                                     .max_source = (size_t)params->max_source, .max_target = (size_t)params->max_target };
    int in = STDIN_FILENO, status = EXIT_INPUT_OUTPUT;
    a.out = (output){ .fd = STDOUT_FILENO, .name = "standard output" };
    if (o->input && (in = open(o->input, O_RDONLY)) < 0) return complain(NULL, "%s: %s", o->input, strerror(errno)), status;
    if (!o->input && closed[0]) return complain(NULL, "standard input is closed; use -i FILE"), status;
    if (!o->output && closed[1]) return complain(NULL, "standard output is closed; use -o FILE"), status;
    text_reader_init(&a.reader, in, &stop_signal);
    if (o->output) {
        a.out.name = o->output;
        a.out.fd = open(o->output, O_WRONLY | O_CREAT, 0666); /* not yet emptied: it may be the input or the model */
        int model = a.out.fd < 0 ? -1 : open(o->model, O_RDONLY);
        struct stat kind;
        if (a.out.fd < 0) {
            complain(NULL, "%s: %s", o->output, strerror(errno));
        } else if (same_file(a.out.fd, in) || (model >= 0 && same_file(a.out.fd, model))) {
            complain(NULL, "%s: this is the %s, and would be overwritten", o->output,
                     same_file(a.out.fd, in) ? "input" : "model");
            status = EXIT_USAGE;
        } else if (fstat(a.out.fd, &kind) || (S_ISREG(kind.st_mode) && ftruncate(a.out.fd, 0))) {
            complain(NULL, "%s: %s", o->output, strerror(errno));
        } else {
            a.out.ours = S_ISREG(kind.st_mode);
            status = EXIT_DONE;
        }
        if (model >= 0) close(model);
    } else {
        status = EXIT_DONE;
    }
    if (!status) status = translate(&a, session);
    if (o->output && a.out.fd >= 0 && close(a.out.fd) && (!status || status == EXIT_SOME_LINES)) {
        complain(NULL, "%s: %s", o->output, strerror(errno)); /* network file systems report a full disk here */
        status = EXIT_INPUT_OUTPUT;
    }
    if (o->input) close(in);
    text_reader_free(&a.reader);
    text_queue_free(&a.queue);
    text_bytes_free(&a.block);
    return status;
}

/* The language tag that the options name. */
static int choose_language(const options *o, const text_front *front, moe_session_params *params) {
    moe_error e;
    int32_t ignored;
    if (o->source && text_language(front, o->source, &ignored, &e)) return complain(NULL, "-s: %s", e.message), EXIT_USAGE;
    if (o->target && text_language(front, o->target, &params->target_tag, &e))
        return complain(NULL, "-t: %s", e.message), EXIT_USAGE;
    if (!o->target && !o->self_test && moe_model_language_count(front->model)) {
        text_bytes known = { 0 };
        text_languages(front, &known);
        complain(NULL, "say with -t which language to translate into; this model knows: %s", known.failed ? "" : known.data);
        text_bytes_free(&known);
        return EXIT_USAGE;
    }
    return 0;
}

int main(int argc, char **argv) {
    int closed[3];
    for (int fd = 0; fd < 3; fd++)
        if (!hold_descriptor(fd, &closed[fd])) return EXIT_INPUT_OUTPUT;
    options o;
    int status = parse_options(argc, argv, &o);
    if (status >= 0) return status;
    handle_signals();

    text_front front;
    moe_error e;
    text_level level = o.self_test ? TEXT_IF_THERE : o.ids ? TEXT_IDS_ONLY : o.pretokenized ? TEXT_PIECES : TEXT_REQUIRED;
    if (text_open(o.model, level, &(moe_model_params){ .copy = o.no_mmap }, &front, &e)) return complain_model(o.model, &e), EXIT_MODEL;
    moe_session_params params = moe_session_params_default(front.model);
    apply_options(&o, &params);
    status = choose_language(&o, &front, &params);
    if (!status) {
        moe_session *session;
        moe_status made = moe_session_new(front.model, &params, &session, &e);
        if (made) {
            complain(NULL, "%s", e.message);
            status = made == MOE_ERROR_ARGUMENT || made == MOE_ERROR_UNSUPPORTED ? EXIT_USAGE : EXIT_MODEL;
        } else {
            status = o.self_test ? run_self_test(&front, session, o.model) : run(&o, &front, session, &params, closed);
            moe_session_free(session);
        }
    }
    text_close(&front);
    return status;
}
