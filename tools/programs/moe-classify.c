/* moe-classify - classify images or rows of numbers.
 *
 * Contents
 *   1. Options    the command line
 *   2. Rows       a batch of rows, read but not yet written
 *   3. Lines      write a result as text or JSON
 *   4. Batches    classify and write rows
 *   5. Images     read IDX files and place images in the model's input
 *   6. Numbers    rows of text
 *   7. Labels     compare results with the correct classes
 *   8. Main
 */

#define _GNU_SOURCE /* O_CLOEXEC */
#define _DARWIN_C_SOURCE

#include "tools/programs/program.h"
#include "tools/text/json.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ==== 1. Options ======================================================================================== */

typedef struct options {
    program_common common;
    const char *labels;
    char **files;           /* [n_files] */
    int n_files, top, x, y; /* x, y: -1 if not given */
} options;

static int take_offset(void *user, const option_row *row, const char *text) {
    options *o = user;
    char *comma, *end = NULL;
    const long x = strtol(text, &comma, 10), y = comma > text && *comma == ',' ? strtol(comma + 1, &end, 10) : -1;
    if (!end || end == comma + 1 || *end || x < 0 || x > INT_MAX || y < 0 || y > INT_MAX)
        return program_usage_error("invalid value '%s' for --%s: expected X,Y", text, row->name);
    o->x = (int)x, o->y = (int)y;
    return -1;
}

static const option_row own_rows[] = {
    { "model", "FILE", "model file", .letter = 'm', .group = GROUP_MODEL, OPTION_MEMBER(ROW_WORD, common.model) },
    { "top", "N", "print the N most probable classes: CLASS TAB PROBABILITY TAB CLASS ... (default: 1)",
      .group = GROUP_FILES, OPTION_INT(top, 1, MOE_MAX_BEAM) },
    { "offset", "X,Y", "position of a smaller image in the model's square input: left column, top row",
      .more = " (default: centred)", .group = GROUP_FILES, .kind = ROW_CALL, .take = take_offset },
    { "labels", "FILE", "compare with the correct classes in FILE (IDX, unsigned bytes)",
      .more = "; print the accuracy to standard error", .group = GROUP_FILES, OPTION_MEMBER(ROW_WORD, labels) },
    { "json", NULL, "write one JSON object per row: class, name, probability, logprob, top, label; error on failure",
      .group = GROUP_FILES, OPTION_FLAG(common.json) },
    { 0 },
};

static const option_program program = {
    .name = "moe-classify",
    .usage = "-m MODEL [OPTION]... [FILE]...",
    .about =
        "Print the most probable class of each row of FILEs or standard input: CLASS TAB PROBABILITY.\n"
        "\n"
        "A FILE contains either images in the IDX format of MNIST, whose pixels are scaled to 0..1 (decompress .gz "
        "files with gzip -dc first), or text: one row of numbers per line, separated by spaces, TABs or commas. Each "
        "row gives one line of output, in the same order.",
    OPTION_LISTS(OPTION_OWN, PROGRAM_ROWS("output stats verbose quiet"), PROGRAM_GATE_ROWS, PROGRAM_MEMORY_ROWS,
                 PROGRAM_SPEED_ROWS),
    .notes = "An empty line gives an empty line. A row that cannot be classified gives an empty line and an error "
             "message.\n"
             "\n" PROGRAM_HELP_EXIT("all rows classified", "some rows failed or had no label"),
    .examples = "  moe-classify -m models/digits.bin --labels t10k-labels-idx1-ubyte \\\n"
                "      t10k-images-idx3-ubyte\n",
    .required = "model",
    .most = INT_MAX,
    .version = program_version,
};

/* Parse the command line. Return -1 to continue, or an exit status. */
static int parse_options(int argc, char **argv, options *o) {
    program_common *common = &o->common;
    *o = (options){ .common = program_common_none(), .top = 1, .x = -1, .y = -1 };
    const int status = option_parse(&program, argc, argv, o);
    if (status >= 0) return status;
    o->files = argv + optind;
    o->n_files = argc - optind;
    if (o->n_files) common->input = o->files[0];
    for (int i = 0; i <= o->n_files; i++) {
        const char *file = i < o->n_files ? o->files[i] : o->labels;
        if (program_same_file(file, common->output) || program_same_file(file, common->routing))
            return program_error("%s is an input and would be overwritten", file), EXIT_USAGE;
    }
    return -1;
}

/* ==== 2. Rows =========================================================================================== */

enum { NO_LABEL = -1 };

typedef struct row {
    uint64_t number;        /* number of the row across all files, from 1 */
    int classified, failed; /* both 0 for an empty line */
    size_t input;           /* index of the row's numbers in app.inputs, if any */
    routing_sentence *routing;
    char note[200]; /* reason of a failure */
} row;

typedef struct app {
    const options *options;
    const moe_model *model;
    moe_session *session;
    size_t width, classes, top, batch;
    ptrdiff_t names;                      /* metadata entry, or -1 */
    row *rows;                            /* [batch] */
    float *inputs;                        /* [batch, width] rows to classify */
    row **owners;                         /* [batch] row of each input */
    int32_t *best;                        /* [batch, top] */
    float *logprobs;                      /* [batch, top] */
    size_t n_rows, n_inputs, first_input; /* first_input: index of the first input of the current moe_classify call */
    text_bytes block;
    program_output out;
    routing_file routing;
    text_bytes labels;
    uint64_t seen, failed, labelled, right;
    const char *file; /* name of the current input */
    int status;       /* -1 or an exit status */
} app;

static int app_allocate(app *a) {
    a->rows = calloc(a->batch, sizeof *a->rows);
    a->inputs = calloc(a->batch * a->width, sizeof *a->inputs);
    a->owners = calloc(a->batch, sizeof *a->owners);
    a->best = calloc(a->batch * a->top, sizeof *a->best);
    a->logprobs = calloc(a->batch * a->top, sizeof *a->logprobs);
    return a->rows && a->inputs && a->owners && a->best && a->logprobs;
}

static void app_free(app *a) {
    free(a->rows), free(a->inputs), free(a->owners), free(a->best), free(a->logprobs);
    text_bytes_free(&a->block);
    text_bytes_free(&a->labels);
}

/* End the run with an exit status, unless it has already ended. Return the exit status of the run. */
static int stop(app *a, int status) {
    if (a->status < 0) a->status = status;
    return a->status;
}

static int out_of_memory(app *a) {
    if (a->status < 0) program_error("out of memory");
    return stop(a, EXIT_MODEL);
}

/* Return 1 unless an error or a signal has ended the run. */
static int goes_on(app *a) {
    if (program_signal && a->status < 0) a->status = program_stopped(&a->options->common, &a->out);
    return a->status < 0;
}

/* Add a row to the batch, which must have room. */
static row *add_row(app *a) {
    row *r = &a->rows[a->n_rows++];
    *r = (row){ .number = ++a->seen };
    return r;
}

/* Return the buffer for the numbers of a new row; add_input then adds the row to the inputs. */
static float *next_input(app *a) { return a->inputs + a->n_inputs * a->width; }

static void add_input(app *a, row *r) {
    r->classified = 1;
    r->input = a->n_inputs;
    a->owners[a->n_inputs++] = r;
}

PROGRAM_PRINTF(2, 3) static void fail_row(row *r, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->note, sizeof r->note, format, arguments);
    va_end(arguments);
    r->failed = 1;
    r->classified = 0;
}

/* ==== 3. Lines ========================================================================================== */

static int label_at(const app *a, size_t i) { return (unsigned char)a->labels.data[i]; }

static int label_of(const app *a, const row *r) {
    return r->number <= a->labels.length ? label_at(a, (size_t)r->number - 1) : NO_LABEL;
}

static void append_class(const app *a, int32_t class, text_bytes *out) {
    moe_span name = a->names < 0 ? (moe_span){ "", 0 } : moe_model_meta_text(a->model, (size_t)a->names, (size_t)class);
    if (name.length) text_append_clean(out, name.data, name.length);
    else text_printf(out, "%d", (int)class);
}

static float probability(float logprob) { return (float)exp((double)logprob); }

static void plain_line(app *a, const row *r) {
    for (size_t i = 0; r->classified && i < a->top; i++) {
        if (i) text_append(&a->block, "\t", 1);
        append_class(a, a->best[r->input * a->top + i], &a->block);
        text_append(&a->block, "\t", 1);
        text_append_float(&a->block, probability(a->logprobs[r->input * a->top + i]));
    }
}

static void json_class(app *a, size_t at, json *j) {
    json_whole(j, "class", a->best[at]);
    if (a->names >= 0) {
        text_bytes name = { 0 };
        append_class(a, a->best[at], &name);
        a->block.failed |= name.failed;
        if (!name.failed) json_text(j, "name", name.data);
        text_bytes_free(&name);
    }
    json_float(j, "probability", probability(a->logprobs[at]));
    json_float(j, "logprob", a->logprobs[at]);
}

static void json_line(app *a, const row *r) {
    json j = { .out = &a->block };
    json_open(&j, NULL, '{');
    json_whole(&j, "line", (int64_t)r->number);
    if (r->classified) json_class(a, r->input * a->top, &j);
    if (r->classified && a->options->top > 1) {
        json_open(&j, "top", '[');
        for (size_t i = 0; i < a->top; i++) {
            json_open(&j, NULL, '{');
            json_class(a, r->input * a->top + i, &j);
            json_close(&j, '}');
        }
        json_close(&j, ']');
    }
    if (label_of(a, r) != NO_LABEL) json_whole(&j, "label", label_of(a, r));
    if (r->failed) json_text(&j, "error", r->note);
    json_close(&j, '}');
}

/* ==== 4. Batches ======================================================================================== */

static void see_routing(void *user, const moe_routing *routing) {
    app *a = user;
    moe_routing one = *routing;
    row *r = a->owners[a->first_input + routing->position];
    one.position = 0;
    if (r->routing) routing_keep(r->routing, &one);
}

/* Classify inputs first .. first + n - 1. If a call fails because a row yields NaN, classify each row separately. */
static void classify(app *a, size_t first, size_t n) {
    moe_error e;
    a->first_input = first;
    for (size_t i = first; i < first + n; i++)
        if (a->owners[i]->routing) a->owners[i]->routing->n_entries = a->owners[i]->routing->n = 0;
    moe_status status = moe_classify(a->session, a->inputs + first * a->width, n, a->best + first * a->top,
                                     a->logprobs + first * a->top, &e);
    if (status == MOE_ERROR_NUMERIC && n > 1) {
        for (size_t i = 0; i < n; i++) classify(a, first + i, 1);
    } else if (status == MOE_ERROR_NUMERIC) {
        if (a->owners[first]->routing) a->owners[first]->routing->n_entries = 0;
        fail_row(a->owners[first],
                 "the result is NaN: the row's numbers are too large, or the model's weights are damaged");
    } else if (status == MOE_ERROR_CANCELLED) {
        stop(a, program_stopped(&a->options->common, &a->out));
    } else if (status) {
        stop(a, program_failed(&e));
    }
}

/* Classify and write the rows of the batch. */
static void flush_rows(app *a) {
    const program_common *o = &a->options->common;
    moe_error e;
    for (size_t i = 0; o->routing && i < a->n_inputs && a->status < 0; i++)
        if (!(a->owners[i]->routing = routing_begin(&a->routing, a->owners[i]->number))) out_of_memory(a);
    if (a->n_inputs && a->status < 0) classify(a, 0, a->n_inputs);
    a->block.length = 0;
    for (size_t i = 0; i < a->n_rows && a->status < 0; i++) {
        row *r = &a->rows[i];
        const int label = label_of(a, r);
        if (r->failed) program_error("%s: row %llu: %s", a->file, (unsigned long long)r->number, r->note);
        a->failed += (uint64_t)(r->failed != 0);
        a->labelled += (uint64_t)(r->classified && label != NO_LABEL);
        a->right += (uint64_t)(r->classified && a->best[r->input * a->top] == label);
        if (o->json) json_line(a, r);
        else plain_line(a, r);
        text_append(&a->block, "\n", 1);
        if (r->routing && routing_put(&a->routing, r->routing, &e)) stop(a, program_failed(&e));
    }
    if (a->block.failed) out_of_memory(a);
    if (a->status < 0 && a->block.length) program_write(&a->out, a->block.data, a->block.length);
    if (a->out.error && a->status < 0) {
        program_error("%s: %s; %llu complete lines were written", a->out.name, strerror(a->out.error),
                      (unsigned long long)a->out.lines);
        stop(a, EXIT_INPUT_OUTPUT);
    }
    a->n_rows = a->n_inputs = 0;
}

/* ==== 5. Images ========================================================================================= */

PROGRAM_PRINTF(2, 3) static int input_error(app *a, const char *format, ...) {
    char line[300];
    va_list arguments;
    if (!goes_on(a)) return a->status;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    program_error("%s: %s", a->file, line);
    return stop(a, EXIT_INPUT_OUTPUT);
}

/* Read n bytes, or fewer at the end of the file or after an error or a signal. Return the number of bytes read. */
static size_t read_bytes(app *a, int fd, unsigned char *out, size_t n) {
    size_t got = 0;
    while (got < n && goes_on(a)) {
        struct pollfd ready = { .fd = fd, .events = POLLIN };
        if (poll(&ready, 1, 200) <= 0) continue; /* check for signals every 200 ms */
        ssize_t more = read(fd, out + got, n - got);
        if (more < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (more < 0) input_error(a, "%s", strerror(errno));
        if (more <= 0) break;
        got += (size_t)more;
    }
    return got;
}

static size_t big_endian(const unsigned char *p) {
    return (size_t)p[0] << 24 | (size_t)p[1] << 16 | (size_t)p[2] << 8 | p[3];
}

typedef struct placement {
    size_t rows, cols; /* size of an image */
    size_t side, x, y; /* width of the model's input; position of the image */
} placement;

static size_t square_side(size_t n) {
    size_t side = 1;
    while (side * side < n) side++;
    return side * side == n ? side : 0;
}

/* Place images in the model's input. Return 0 after an error message if they do not fit. */
static int place(app *a, placement *p) {
    const options *o = a->options;
    const int sane = p->rows && p->cols && p->rows <= a->width && p->cols <= a->width;
    p->side = square_side(a->width);
    if (sane && p->rows * p->cols == a->width && o->x < 0) return p->side = p->cols, p->x = p->y = 0, 1;
    p->x = o->x < 0 ? (p->side - p->cols) / 2 : (size_t)o->x;
    p->y = o->y < 0 ? (p->side - p->rows) / 2 : (size_t)o->y;
    if (!sane || !p->side)
        program_error("%s: %zu x %zu images do not match the model's %zu inputs", a->file, p->cols, p->rows, a->width);
    else if (p->rows > p->side || p->cols > p->side)
        program_error("%s: %zu x %zu images are larger than the model's %zu x %zu input", a->file, p->cols, p->rows,
                      p->side, p->side);
    else if (p->x > p->side - p->cols || p->y > p->side - p->rows)
        program_error("--offset %zu,%zu: %zu x %zu images extend beyond the model's %zu x %zu input", p->x, p->y,
                      p->cols, p->rows, p->side, p->side);
    else return 1;
    return 0;
}

/* Read the rest of an IDX file after the magic number. */
static int read_images(app *a, int fd) {
    unsigned char head[12], more;
    if (read_bytes(a, fd, head, sizeof head) != sizeof head) return input_error(a, "ends inside its header");
    const size_t count = big_endian(head);
    placement p = { .rows = big_endian(head + 4), .cols = big_endian(head + 8) };
    if (!place(a, &p)) return stop(a, EXIT_USAGE);
    unsigned char *pixels = calloc(p.rows, p.cols);
    if (!pixels) return out_of_memory(a);
    for (size_t i = 0; i < count && a->status < 0; i++) {
        if (read_bytes(a, fd, pixels, p.rows * p.cols) < p.rows * p.cols) {
            flush_rows(a);
            input_error(a, "ends after %zu of %zu images", i, count);
            break;
        }
        float *x = next_input(a);
        memset(x, 0, a->width * sizeof *x);
        for (size_t r = 0; r < p.rows; r++)
            for (size_t c = 0; c < p.cols; c++)
                x[(p.y + r) * p.side + p.x + c] = (float)pixels[r * p.cols + c] / 255.0f;
        add_input(a, add_row(a));
        if (a->n_rows == a->batch) flush_rows(a);
    }
    free(pixels);
    if (a->status >= 0 || !read_bytes(a, fd, &more, 1)) return a->status;
    flush_rows(a);
    return input_error(a, "contains data after its %zu images", count);
}

/* ==== 6. Numbers ======================================================================================== */

static int is_separator(char c) { return c == ' ' || c == '\t' || c == ','; }

/* Read a line of numbers into the next input. */
static void parse_row(app *a, row *r, const text_line *line) {
    float *x = next_input(a);
    size_t n = 0;
    char number[64];
    if (line->too_long) {
        fail_row(r, "longer than %d bytes", (int)TEXT_MAX_LINE);
        return;
    }
    for (size_t i = 0;;) {
        while (i < line->length && is_separator(line->data[i])) i++;
        if (i == line->length) break;
        size_t begin = i;
        while (i < line->length && !is_separator(line->data[i])) i++;
        size_t length = i - begin;
        char *end = number;
        float value = 0;
        if (length < sizeof number) {
            memcpy(number, line->data + begin, length);
            number[length] = '\0';
            value = strtof(number, &end);
        }
        if (length >= sizeof number || end != number + length || !isfinite(value)) {
            text_bytes word = { 0 };
            text_append_clean(&word, line->data + begin, length < 20 ? length : 20);
            fail_row(r, "'%s' is not a number", word.failed ? "?" : word.data);
            text_bytes_free(&word);
            return;
        }
        if (n < a->width) x[n] = value;
        n++;
    }
    if (n == a->width) add_input(a, r);
    else if (n) fail_row(r, "%zu numbers, but the model expects %zu", n, a->width);
}

static void read_numbers(app *a, int fd, const unsigned char *begun, size_t n_begun) {
    text_reader reader;
    text_line line;
    text_read got = TEXT_READ_LINE;
    text_reader_init(&reader, fd, &program_signal, program_wake);
    text_append(&reader.buffer, (const char *)begun, n_begun);
    while (a->status < 0 && (got == TEXT_READ_LINE || got == TEXT_READ_LATER)) {
        got = text_reader_next(&reader, a->n_rows == 0, &line);
        if (got == TEXT_READ_LINE) parse_row(a, add_row(a), &line);
        if (got == TEXT_READ_LATER || a->n_rows == a->batch) flush_rows(a);
        if (got == TEXT_READ_ERROR) input_error(a, "%s", strerror(errno));
    }
    text_reader_free(&reader);
}

/* Read an input file: images or lines of numbers. */
static void read_input(app *a, int fd) {
    unsigned char head[4];
    size_t n = read_bytes(a, fd, head, 1);
    if (n && (head[0] == 0 || head[0] == 0x1F)) n += read_bytes(a, fd, head + 1, 3);
    if (!goes_on(a)) return;
    if (n == 4 && big_endian(head) == 0x00000803) read_images(a, fd);
    else if (n >= 2 && head[0] == 0x1F && head[1] == 0x8B)
        input_error(a, "compressed: use gzip -dc %s | moe-classify ...", a->options->n_files ? a->file : "FILE");
    else if (n && head[0] == 0) input_error(a, "neither text nor an IDX file of images (bytes, three dimensions)");
    else read_numbers(a, fd, head, n);
    if (goes_on(a)) flush_rows(a);
}

/* ==== 7. Labels ========================================================================================= */

/* Read the labels. Allocate only for the bytes actually read, because the header may be wrong. */
static int read_labels(app *a) {
    unsigned char head[8] = { 0 }, more;
    a->file = a->options->labels;
    const int fd = open(a->file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return input_error(a, "%s", strerror(errno));
    if (read_bytes(a, fd, head, sizeof head) != sizeof head || big_endian(head) != 0x00000801)
        input_error(a, head[0] == 0x1F ? "compressed: run gzip -dc first"
                                       : "not an IDX file of labels (bytes, one dimension)");
    const size_t count = big_endian(head + 4);
    for (size_t got = 1; got && a->status < 0 && a->labels.length < count; a->labels.length += got) {
        const size_t left = count - a->labels.length, some = left < 4096 ? left : 4096;
        const int room = text_room(&a->labels, some);
        got = room ? read_bytes(a, fd, (unsigned char *)a->labels.data + a->labels.length, some) : 0;
    }
    if (a->labels.failed) out_of_memory(a);
    if (a->status < 0 && (a->labels.length != count || read_bytes(a, fd, &more, 1)))
        input_error(a, "fewer than %zu labels", count);
    for (size_t i = 0; i < a->labels.length && a->status < 0; i++)
        if (label_at(a, i) >= (int)a->classes) {
            program_error("%s: label %zu is %d, but the model has %zu classes", a->file, i + 1, label_at(a, i),
                          a->classes);
            stop(a, EXIT_USAGE);
        }
    close(fd);
    return a->status;
}

/* Print the accuracy; return the exit status. The number of rows must equal the number of labels. */
static int report_labels(const app *a) {
    if (!a->options->labels) return EXIT_DONE;
    fprintf(stderr, "accuracy         %.4f (%llu of %llu)\n",
            a->labelled ? (double)a->right / (double)a->labelled : 0.0, (unsigned long long)a->right,
            (unsigned long long)a->labelled);
    if (a->seen == a->labels.length) return EXIT_DONE;
    program_error("%s: %zu labels for %llu rows", a->options->labels, a->labels.length, (unsigned long long)a->seen);
    return EXIT_SOME_LINES;
}

/* ==== 8. Main =========================================================================================== */

static void report_stats(const app *a, double elapsed) {
    moe_stats s = moe_session_stats(a->session);
    fprintf(stderr,
            "rows             %llu, %llu of them failed\nseconds          %.3f\nrows/s           %.1f\n"
            "peak memory      %.1f MiB resident, %.1f MiB of it the session's\nkernels          %s\n",
            (unsigned long long)a->seen, (unsigned long long)a->failed, elapsed,
            elapsed > 0 ? (double)a->seen / elapsed : 0.0, program_resident(), (double)s.bytes / 1048576.0,
            s.isa ? s.isa : "?");
    program_expert_stats(&s);
}

/* Read and classify all inputs, starting with `in`. Return the exit status. */
static int run(app *a, int in) {
    const options *o = a->options;
    const double begin = program_seconds();
    if (o->labels) read_labels(a);
    for (int i = 0; i < (o->n_files ? o->n_files : 1) && goes_on(a); i++) {
        a->file = o->n_files ? o->files[i] : "standard input";
        const int fd = i ? open(o->files[i], O_RDONLY | O_CLOEXEC) : in;
        if (fd < 0) input_error(a, "%s", strerror(errno));
        else read_input(a, fd);
        if (i && fd >= 0) close(fd);
    }
    if (!goes_on(a)) return a->status;
    if (o->common.stats) report_stats(a, program_seconds() - begin);
    const int status = report_labels(a);
    if (!a->failed) return status;
    program_error("%llu of %llu rows could not be classified", (unsigned long long)a->failed,
                  (unsigned long long)a->seen);
    return EXIT_SOME_LINES;
}

int main(int argc, char **argv) {
    options o;
    int in, status = program_begin("moe-classify");
    if (status < 0) status = parse_options(argc, argv, &o);
    if (status >= 0) return status;

    const program_common *c = &o.common;
    text_front front;
    status = program_open(c, MOE_MODEL_CLASSIFIER, TEXT_IDS_ONLY, &front);
    if (status >= 0) return status;
    program_handle_signals();
    moe_session_params params = moe_session_params_default(front.model);
    app a = { .options = &o,
              .model = front.model,
              .width = moe_model_width(front.model),
              .classes = (size_t)moe_model_vocabulary(front.model),
              .names = moe_model_meta_find(front.model, "classes.names"),
              .status = -1 };
    program_apply(c, &params);
    a.top = (size_t)o.top < a.classes ? (size_t)o.top : a.classes;
    params.beam = params.nbest = (int)a.top;
    a.batch = (size_t)params.batch;
    if (c->routing) params.routing = see_routing, params.routing_user = &a;
    status = program_session(c, &front, &params, "a row's class", &a.session);
    if (status < 0 && !app_allocate(&a)) out_of_memory(&a), status = a.status;
    if (status < 0) {
        status = program_open_streams(c, &in, &a.out);
        if (status < 0) status = program_routing_open(c, &front, (const char *const[2]){ NULL }, &a.routing);
        if (status < 0) status = program_routing_close(&a.routing, run(&a, in));
        status = program_close_streams(c, in, &a.out, status);
    }
    app_free(&a);
    program_session_free(a.session);
    text_close(&front);
    return status;
}
