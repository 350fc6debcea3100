/* program.c - program.h says what this is and has the contracts. The sections have the same numbers. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/program.h"
#include "tools/programs/output.h"
#include "tools/text/memory.h"
#include "tools/text/moetext.h"
#include "tools/text/protect.h"
#include "tools/text/spans.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- 1. Begin and end ---------------------------------------------------------------------------------- */

volatile sig_atomic_t program_signal; /* global: a signal handler can reach nothing else */
int program_wake = -1;
static int waker = -1; /* what is written there can be read from program_wake */

static char temporary[4096]; /* the name of a file that grows, "": there is none */

/* Sessions that a signal stops. Only the main thread takes signals, so they are there while the handler runs. */
static moe_session *volatile stoppable[4];
static moetext *volatile stoppable_translator; /* whose threads may take them */

static void on_signal(int number) {
    if (program_signal) { /* the second ends a run that is stuck, in a write for instance */
        if (*temporary) unlink(temporary);
        signal(number, SIG_DFL);
        raise(number);
    }
    program_signal = number;
    const int before = errno;
    if (waker >= 0 && write(waker, "", 1) < 0) { /* there is a byte already */
    }
    errno = before;
    for (size_t i = 0; i < sizeof stoppable / sizeof *stoppable; i++)
        if (stoppable[i]) moe_session_cancel(stoppable[i]);
    if (stoppable_translator) moetext_cancel(stoppable_translator);
}

void program_handle_signals(void) {
    struct sigaction stop = { 0 }, hangup;
    int ends[2];
    if (!pipe(ends)) {
        for (int i = 0; i < 2; i++) fcntl(ends[i], F_SETFD, FD_CLOEXEC), fcntl(ends[i], F_SETFL, O_NONBLOCK);
        program_wake = ends[0], waker = ends[1];
    }
    stop.sa_handler = on_signal;
    stop.sa_flags = SA_RESTART;
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    if (!sigaction(SIGHUP, NULL, &hangup) && hangup.sa_handler != SIG_IGN) sigaction(SIGHUP, &stop, NULL); /* nohup */
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error of write() with a message */
}

double program_resident(void) {
    struct rusage use;
    if (getrusage(RUSAGE_SELF, &use)) return 0;
#ifdef __APPLE__
    return (double)use.ru_maxrss / 1048576.0; /* bytes there, KiB elsewhere */
#else
    return (double)use.ru_maxrss / 1024.0;
#endif
}

void program_expert_stats(const moe_stats *s) {
    if (s->expert_visits)
        fprintf(stderr, "experts          %.2f tokens per visit (%llu pairs of a token and an expert, %llu visits)\n",
                (double)s->expert_pairs / (double)s->expert_visits, (unsigned long long)s->expert_pairs,
                (unsigned long long)s->expert_visits);
    if (s->experts)
        fprintf(stderr, "experts held     %llu of %llu\n", (unsigned long long)s->experts_held,
                (unsigned long long)s->experts);
    if (s->experts_held < s->experts)
        fprintf(stderr, "experts fetched  %llu times (%.1f MiB); %llu visits found theirs\n",
                (unsigned long long)s->expert_fetches, (double)s->expert_fetch_bytes / 1048576.0,
                (unsigned long long)s->expert_hits);
    if (s->expert_wait_ns)
        fprintf(stderr, "experts awaited  %.1f s, by all threads together; %llu of %llu read ahead were of use\n",
                (double)s->expert_wait_ns * 1e-9, (unsigned long long)s->expert_ahead_used,
                (unsigned long long)s->expert_ahead);
}

static const moe_error no_memory = { .code = MOE_ERROR_MEMORY, .message = "out of memory" };

static void log_line(void *user, const char *message) {
    (void)user;
    program_complain("%s", message);
}

/* ---- 3. Options ---------------------------------------------------------------------------------------- */

#define ROW(kind_, field) .kind = (kind_), .at = offsetof(program_common, field)
#define FLAG(field) ROW(ROW_FLAG, field), .low = 1

const option_row program_rows[] = {
    { "model", "FILE", "model file (default: MOE_MODEL, else the installed model, else the one in the repository)",
      .letter = 'm', .group = GROUP_MODEL, ROW(ROW_WORD, model) },
    { "no-verify", NULL, "do not check the model for damage", .group = GROUP_MODEL, FLAG(no_verify),
      .more = ". Models of up to 64 MiB are checked unless this option is given; moe-info --check checks larger ones" },
    { "input", "FILE", "read FILE instead of standard input (-)", .letter = 'i', .group = GROUP_FILES,
      ROW(ROW_PATH, input) },
    { "output", "FILE", "write to FILE instead of standard output (-)", .letter = 'o', .group = GROUP_FILES,
      ROW(ROW_PATH, output), .more = ". After an error or ^C it contains the complete lines written so far" },
    { "ids", NULL, "lines are token ids separated by spaces", .group = GROUP_FILES, FLAG(ids) },
    { "pretokenized", NULL, "lines are pieces of the model's vocabulary separated by spaces", .group = GROUP_FILES,
      FLAG(pretokenized), .more = ". Unknown pieces become the unknown token" },
    { "routing", "FILE", "write the experts of every token or row and their weights as JSON lines, for moe-routing",
      .group = GROUP_GATES, ROW(ROW_WORD, routing),
      .more = ". FILE appears when it is complete; a pipe receives each line at once" },
    { "dry-run", NULL, "print the memory needed and exit", .group = GROUP_MEMORY, FLAG(dry_run) },
    { "no-mmap", NULL, "read the model into private memory instead of mapping it: a tenth faster, slower to start",
      .group = GROUP_SPEED, FLAG(no_mmap) },
    { "stats", NULL, "print time and memory statistics to standard error at the end", .group = GROUP_OTHER,
      FLAG(stats) },
    { "verbose", NULL, "print kernels, GPU and memory use to standard error", .letter = 'v', .group = GROUP_OTHER,
      FLAG(verbose) },
    { "quiet", NULL, "print errors only, without progress or warnings", .letter = 'q', .group = GROUP_OTHER,
      FLAG(quiet) },
    { 0 },
};

program_common program_common_none(void) { return (program_common){ .settings = text_settings_none() }; }

const char *program_version(void) {
    static char text[512];
    snprintf(text, sizeof text, "%s (SentencePiece %s; kernels: %s)", moe_version(), spm_library_version(),
             moe_isa_names());
    return text;
}

int program_check_kind(const char *path, const moe_model *model, moe_kind kind) {
    static const char *const words[] = {
        [MOE_MODEL_TRANSLATION] = "a translation model; moe-translate reads it, and scores translations with --score",
        [MOE_MODEL_LANGUAGE] = "a language model; moe-score reads it",
        [MOE_MODEL_CLASSIFIER] = "a classifier; moe-classify reads it",
    };
    moe_kind is = moe_model_kind(model);
    if (is == kind) return -1;
    program_complain("%s is %s", path, words[is]);
    return EXIT_USAGE;
}

int program_check_copy(const char *in, const char *out) {
    if (strcmp(in, out) != 0 && !program_same_file(in, out)) return -1;
    return program_usage_error("%s and %s are the same file: write to another name", in, out);
}

int program_words(program_common *o, int count, char *const *words) {
    static text_bytes text; /* until the program ends */
    if (!count) return -1;
    if (o->input) return program_usage_error("unexpected argument '%s': -i names the input", words[0]);
    for (int i = 0; i < count; i++) {
        if (i) text_append(&text, " ", 1);
        text_append_string(&text, words[i]);
    }
    if (!text.length || text.data[text.length - 1] != '\n') text_append(&text, "\n", 1);
    if (text.failed) return program_complain("%s", no_memory.message), EXIT_MODEL;
    o->text = text.data;
    struct stat file;
    if (count == 1 && stat(words[0], &file) == 0 && S_ISREG(file.st_mode))
        program_complain("'%s' is a file, but its name is taken as the text; -i %s reads it", words[0], words[0]);
    return -1;
}

int program_open(const program_common *o, moe_kind kind, text_level level, text_front *front) {
    moe_model_params params = { .copy = o->no_mmap, .verify = o->no_verify ? -1 : 2, .stream = o->stream };
    moe_error e;
    if (o->settings.max_memory) params.allocator = text_memory_allocator();
    if (text_open(o->model, TEXT_IDS_ONLY, &params, front, &e)) {
        program_file_error(o->model, &e);
        return EXIT_MODEL;
    }
    int status = program_check_kind(o->model, front->model, kind);
    if (status < 0 &&
        (text_begin_tokeniser(front, level, &e) ||
         (!o->no_verify && moe_model_file_bytes(front->model) <= MOE_VERIFY_BYTES && /* as opening would, but */
          moe_model_verify(front->model, &e)))) {                                    /* beside the tokeniser  */
        program_file_error(o->model, &e);
        status = EXIT_MODEL;
    }
    if (status >= 0) text_close(front);
    return status;
}

int program_ask_language(const text_front *front, const char *what) {
    text_bytes known = { 0 };
    text_languages(front, &known);
    program_complain("say with %s; the languages of this model: %s", what, known.failed ? "" : known.data);
    text_bytes_free(&known);
    return EXIT_USAGE;
}

int program_gate_is_dense(moe_gate gate) { return gate == MOE_GATE_SOFTMAX || gate == MOE_GATE_SIGMOID; }

text_level program_level(const program_common *o) {
    if (o->ids) return o->routing ? TEXT_IF_THERE : TEXT_IDS_ONLY; /* routing names the tokens */
    return o->pretokenized ? TEXT_PIECES : TEXT_REQUIRED;
}

void program_apply(const program_common *o, moe_session_params *p) {
    const text_settings *s = &o->settings;
    if (s->threads > 0) p->threads = s->threads;
    if (s->batch > 0) p->batch = s->batch;
    if (s->max_len > 0) p->max_source = p->max_target = s->max_len;
    if (s->isa[0]) p->isa = s->isa;
    if (s->gating[0]) p->gating = s->gating;
    if (s->noise >= 0) p->noise = 1, p->noise_seed = (uint64_t)s->noise;
    if (o->verbose) p->log = log_line;
}

moe_status program_session_new(const moe_model *model, const moe_session_params *params, moe_session **session,
                               moe_error *error) {
    sigset_t stops, before;
    sigemptyset(&stops);
    sigaddset(&stops, SIGHUP);
    sigaddset(&stops, SIGINT);
    sigaddset(&stops, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &stops, &before); /* the session's threads inherit it */
    const moe_status status = moe_session_new(model, params, session, error);
    for (size_t i = 0; !status && i < sizeof stoppable / sizeof *stoppable; i++)
        if (!stoppable[i]) {
            stoppable[i] = *session;
            break;
        }
    if (!status && program_signal) moe_session_cancel(*session);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

void program_session_free(moe_session *session) {
    for (size_t i = 0; i < sizeof stoppable / sizeof *stoppable; i++)
        if (stoppable[i] == session) stoppable[i] = NULL;
    moe_session_free(session);
}

void program_stoppable(moetext *translator) { stoppable_translator = translator; }

/* Bytes of this process in memory now, without the pages of the file at `path`. */
static size_t resident_beside(const char *path) {
    size_t kib = 0;
    struct stat file;
    char line[4096];
    FILE *maps = fopen("/proc/self/smaps", "r");
    if (!maps) return (size_t)(program_resident() * 1048576.0);
    if (stat(path, &file)) file.st_ino = 0;
    for (int counts = 0; fgets(line, sizeof line, maps);) {
        const char *at = line;
        if (counts && strncmp(line, "Rss:", 4) == 0) kib += strtoul(line + 4, NULL, 10);
        if (*line >= 'A' && *line <= 'Z') continue; /* of the mapping before; else addresses, rights, offset, device */
        for (int field = 0; field < 4; field++) at += strcspn(at, " "), at += strspn(at, " ");
        counts = strtoull(at, NULL, 10) != (unsigned long long)file.st_ino;
    }
    fclose(maps);
    return kib << 10;
}

static void report_memory(const program_common *o, size_t weights, size_t sessions, size_t rest) {
    const double mib = 1048576.0;
    printf("weights          %.1f MiB%s\nsession          %.1f MiB\nprogram          %.1f MiB, with the tokeniser\n"
           "peak             %.1f MiB\n",
           (double)weights / mib,
           o->stream    ? ", without experts: those are in the session"
           : o->no_mmap ? ""
                        : ", mapped from the file",
           (double)sessions / mib, (double)rest / mib, (double)(weights + sessions + rest) / mib);
}

/* --dry-run and --max-memory: -1, or the exit status. */
static int check_memory(const program_common *o, text_front *front, const moe_session_params *params,
                        const moe_session_params *later) {
    const moe_session_params both[2] = { *params, later ? *later : *params };
    moe_error e;
    if (!o->dry_run && !o->settings.max_memory) return -1;
    if (text_wait_tokeniser(front, &e)) return program_file_error(o->model, &e), EXIT_MODEL;
    const size_t weights = (size_t)moe_model_held_bytes(front->model), copied = o->no_mmap || o->stream ? weights : 0;
    const size_t now = resident_beside(o->model), rest = now > copied ? now - copied : 0;
    text_memory memory = { .limit = o->settings.max_memory, .beside = rest + copied, .as_arguments = 1 };
    if (text_memory_check(front->model, both, later ? 2 : 1, &memory, &e))
        return program_complain("%s", e.message),
               e.code == MOE_ERROR_ARGUMENT || e.code == MOE_ERROR_UNSUPPORTED ? EXIT_USAGE : EXIT_MODEL;
    if (!o->dry_run) return -1;
    report_memory(o, weights, memory.sessions, rest);
    return program_printed();
}

int program_session(const program_common *o, text_front *front, const moe_session_params *params,
                    const moe_session_params *later, const char *unit, moe_session **session) {
    const int checked = check_memory(o, front, params, later);
    moe_error e;
    if (checked >= 0) return checked;
    moe_status made = program_session_new(front->model, params, session, &e);
    if (made)
        return program_complain("%s", e.message),
               made == MOE_ERROR_ARGUMENT || made == MOE_ERROR_UNSUPPORTED ? EXIT_USAGE : EXIT_MODEL;
    if (text_wait_tokeniser(front, &e)) return program_file_error(o->model, &e), EXIT_MODEL;
    if (!o->quiet && params->gating && strcmp(params->gating, moe_gate_name(MOE_GATE_BATCHWISE)) == 0)
        program_complain("batchwise gating: %s depends on what shares its batch", unit);
    return -1;
}

/* ---- 4. Input and output ------------------------------------------------------------------------------- */

void program_write(program_output *out, const char *data, size_t length) {
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
    if (whole < done && out->ours && ftruncate(out->fd, out->good)) { /* it stays, then; the exit status tells */
    }
}

static int same_file(const struct stat *x, const struct stat *y) {
    return S_ISREG(x->st_mode) && x->st_dev == y->st_dev && x->st_ino == y->st_ino;
}

int program_same_file(const char *a, const char *b) {
    struct stat x, y;
    return a && b && !stat(a, &x) && !stat(b, &y) && same_file(&x, &y);
}

int program_is_open_file(int fd, const char *path) {
    struct stat x, y;
    return !fstat(fd, &x) && !stat(path, &y) && same_file(&x, &y);
}

/* What `path` would overwrite, or NULL. */
static const char *would_overwrite(const program_common *o, const char *path, int in) {
    if (program_is_open_file(in, path)) return "input";
    if (program_same_file(path, o->model)) return "model";
    return NULL;
}

static int is_directory(const char *path, const char *option) {
    program_complain("%s: this is a directory, and %s expects a file", path, option);
    return EXIT_INPUT_OUTPUT;
}

/* 1, and a complaint: the file for -o is input or model. */
static int overwrites(const program_common *o, int in) {
    const char *victim = would_overwrite(o, o->output, in);
    if (victim) program_complain("%s: this is the %s, and would be overwritten", o->output, victim);
    return victim != NULL;
}

/* The file for -o, which is emptied once it is known to be neither input nor model, nor another program's output. */
static int open_output(const program_common *o, int in, program_output *out) {
    struct stat kind;
    out->name = o->output;
    out->fd = open(o->output, O_WRONLY | O_CREAT, 0666);
    if (out->fd < 0 && errno == EISDIR) return is_directory(o->output, "-o");
    if (out->fd < 0) return program_complain("%s: %s", o->output, strerror(errno)), EXIT_INPUT_OUTPUT;
    if (overwrites(o, in)) return EXIT_USAGE;
    out->ours = !fstat(out->fd, &kind) && S_ISREG(kind.st_mode);
    if (out->ours && flock(out->fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK) {
        program_complain("%s: another program is writing to it", o->output);
        return EXIT_INPUT_OUTPUT;
    }
    if (out->ours && ftruncate(out->fd, 0)) {
        program_complain("%s: %s", o->output, strerror(errno));
        return EXIT_INPUT_OUTPUT;
    }
    return -1;
}

/* The input, and standard output as long as there is no other: -1, or a complaint and the exit status. */
static int open_input(const program_common *o, int *in, program_output *out) {
    struct stat kind;
    *in = o->text ? -1 : STDIN_FILENO;
    *out = (program_output){ .fd = STDOUT_FILENO, .name = "standard output" };
    if (o->input && (*in = open(o->input, O_RDONLY)) < 0)
        return program_complain("%s: %s", o->input, strerror(errno)), EXIT_INPUT_OUTPUT;
    if (o->input && !fstat(*in, &kind) && S_ISDIR(kind.st_mode)) return is_directory(o->input, "-i");
    if (!o->input && !o->text && program_closed(0))
        return program_complain("standard input is closed; use -i FILE"), EXIT_INPUT_OUTPUT;
    if (!o->output && program_closed(1))
        return program_complain("standard output is closed; use -o FILE"), EXIT_INPUT_OUTPUT;
    return -1;
}

int program_open_streams(const program_common *o, int *in, program_output *out) {
    const char *victim;
    int status = open_input(o, in, out);
    if (status >= 0) return status;
    if (o->routing && (victim = would_overwrite(o, o->routing, *in))) {
        program_complain("%s: this is the %s, and would be overwritten", o->routing, victim);
        return EXIT_USAGE;
    }
    if (o->output) status = open_output(o, *in, out);
    if (status < 0 && o->output && o->routing && program_same_file(o->output, o->routing)) {
        program_complain("%s: --routing expects a file of its own", o->routing);
        status = EXIT_USAGE;
    }
    return status;
}

int program_close_streams(const program_common *o, int in, program_output *out, int status) {
    if (o->output && out->fd >= 0 && close(out->fd) && (!status || status == EXIT_SOME_LINES)) {
        program_complain("%s: %s", o->output, strerror(errno)); /* network file systems report a full disk here */
        status = EXIT_INPUT_OUTPUT;
    }
    if (o->input && in >= 0) close(in);
    return status;
}

int program_stopped(const program_common *o, const program_output *out) {
    if (!o->quiet)
        program_complain("stopped by signal %d; %llu whole lines were written", (int)program_signal,
                         (unsigned long long)out->lines);
    return 128 + (int)program_signal;
}

int program_save(const char *path, const char *data, size_t length) {
    output_file *out = NULL;
    moe_error e;
    moe_status status = output_open(path, &out, &e);
    if (!status && (status = output_write(out, data, length, &e))) output_close(out, 0, NULL);
    else if (!status) status = output_close(out, 1, &e);
    return status ? program_file_error(path, &e) : EXIT_DONE;
}

/* A file that grows, which a second signal removes. NULL: there is none any more. */
static void remember_temporary(const output_file *file) {
    const char *name = file ? output_temporary(file) : NULL;
    snprintf(temporary, sizeof temporary, "%s", name ? name : "");
}

int program_open_whole(const program_common *o, int *in, program_output *out, output_file **file) {
    moe_error e;
    const int status = open_input(o, in, out);
    *file = NULL;
    if (status >= 0 || !o->output) return status;
    if (overwrites(o, *in)) return EXIT_USAGE;
    if (output_open(o->output, file, &e)) return program_file_error(o->output, &e);
    remember_temporary(*file);
    return -1;
}

int program_close_whole(const program_common *o, int in, output_file *file, int status) {
    const int keep = status == EXIT_DONE || status == EXIT_SOME_LINES;
    moe_error e;
    if (output_close(file, keep, &e) && keep) status = program_file_error(o->output, &e);
    remember_temporary(NULL);
    if (o->input && in >= 0) close(in);
    return status;
}

int program_routing_open(const program_common *o, const text_front *front, const char *const languages[2],
                         routing_file *file) {
    moe_error e;
    if (!o->routing) return -1;
    const char *gating = o->settings.gating[0] ? o->settings.gating : NULL;
    if (routing_open(file, front, o->routing, gating, languages, &e)) return program_file_error(o->routing, &e);
    remember_temporary(file->out);
    return -1;
}

int program_routing_close(routing_file *file, int status) {
    int fine = status == EXIT_DONE || status == EXIT_SOME_LINES;
    moe_error e;
    const moe_status closing = routing_close(file, fine, &e);
    remember_temporary(NULL);
    if (!closing || !fine) return status;
    program_complain("%s", e.message);
    return e.code == MOE_ERROR_IO ? EXIT_INPUT_OUTPUT : EXIT_MODEL;
}

/* ---- 5. Flow ------------------------------------------------------------------------------------------- */

/* Write all lines that are final now, in one write. */
static void drain(program_flow *f) {
    text_bytes *block = &f->block;
    size_t whole = 0; /* bytes of whole lines */
    for (text_job *job; !f->stream.trouble.code && (job = text_queue_first(&f->queue)); text_queue_remove(&f->queue)) {
        if (job->failed || ((job->cut || job->noted) && !f->options->quiet))
            program_complain("line %llu: %s", (unsigned long long)job->line, job->note);
        if (block->length > whole && job->output.length) text_stream_join(&f->before, block);
        text_append(block, job->output.data, job->output.length);
        const text_bytes gap = f->before.gap;
        f->before.gap = job->gap, job->gap = gap;
        f->before.joined = job->joined;
        f->line_failed |= job->failed;
        if (!job->more) {
            text_append(block, "\n", 1);
            whole = block->length;
            f->progress.failed += (uint64_t)(f->line_failed != 0);
            f->progress.lines++;
            f->line_failed = 0;
        }
        if (f->leave && f->leave(f, job, &f->stream.trouble)) break;
    }
    if (block->failed) {
        f->stream.trouble = no_memory;
        return;
    }
    if (whole) {
        program_progress_hide();
        program_write(&f->out, block->data, whole);
        memmove(block->data, block->data + whole, block->length -= whole);
    }
    program_progress_show(&f->progress);
}

static program_flow *flow_of(text_stream *stream) { return (program_flow *)(void *)stream; }

/* A line joins the paragraph, without the white space at its ends. */
static void join_line(program_flow *f, const text_line *line) {
    if (!f->paragraph.length) f->number = line->number, f->too_long = 0;
    f->too_long |= line->too_long || f->paragraph.length + line->length > TEXT_MAX_LINE;
    if (f->too_long) return;
    if (f->paragraph.length) text_append(&f->paragraph, " ", 1);
    text_append(&f->paragraph, line->data, line->length);
}

/* The next paragraph, or the next blank line. */
static text_read next_paragraph(program_flow *f, int wait, text_line *line) {
    text_read state = TEXT_READ_LINE;
    if (f->over) f->paragraph.length = 0, f->over = 0;
    if (f->blank) {
        f->blank = 0;
        *line = (text_line){ .data = "", .number = f->number };
        return TEXT_READ_LINE;
    }
    while (!f->blank && (state = text_reader_next(&f->reader, wait, line)) == TEXT_READ_LINE) {
        while (line->length && strchr(" \t", line->data[line->length - 1])) line->length--;
        while (line->length && strchr(" \t", *line->data)) line->data++, line->length--;
        if (line->length) join_line(f, line);
        else if (f->paragraph.length) f->blank = 1;
        else return state;
    }
    if (f->paragraph.failed) return f->stream.trouble = no_memory, TEXT_READ_STOP;
    if (!f->blank && (state != TEXT_READ_END || !f->paragraph.length)) return state;
    f->over = 1;
    *line = (text_line){ .data = f->paragraph.data,
                         .length = f->paragraph.length,
                         .number = f->number,
                         .too_long = f->too_long };
    return TEXT_READ_LINE;
}

enum { LINES_AHEAD = 64 };

static void put_ahead(program_flow *f, const text_line *line) {
    if (!f->lines_ahead++) {
        text_clear(&f->ahead);
        f->begin = 0;
        f->number = line->number;
    } else {
        text_append(&f->ahead, "\n", 1);
    }
    text_append(&f->ahead, line->data, line->length);
    f->too_long = f->closed = line->too_long;
}

/* Of the lines ahead the first, or as many as a message goes over. */
static void take_ahead(program_flow *f, size_t bytes, text_line *line) {
    const char *data = f->ahead.data + f->begin;
    size_t lines = 1;
    for (const char *at = data; (at = memchr(at, '\n', bytes - (size_t)(at - data))); at++) lines++;
    f->lines_ahead -= lines;
    *line = (text_line){ .data = data,
                         .length = bytes,
                         .number = f->number,
                         .too_long = f->too_long && !f->lines_ahead,
                         .kept = f->kept_ahead > 0 };
    f->kept_ahead -= f->kept_ahead > 0;
    f->number += lines;
    f->begin += bytes + 1;
}

/* text_message_lines of the lines ahead; *first: the bytes of the first of them, which is kept where that is decided.
 */
static size_t lines_of_message(const program_flow *f, size_t *first, int *open) {
    const char *data = f->ahead.data + f->begin;
    const size_t length = f->ahead.failed ? 0 : f->ahead.length - f->begin;
    const char *end = length ? memchr(data, '\n', length) : NULL;
    *first = end ? (size_t)(end - data) : length;
    *open = 0;
    return f->kept_ahead || f->ahead.failed ? *first : text_message_lines(data, length, *first, open);
}

/* The next line, or all of an ICU message that goes over several; where lines are not cut, each of them by itself. */
static text_read next_line(program_flow *f, int wait, text_line *line) {
    const text_rules *rules = f->stream.options.rules;
    const int messages = f->several ? f->messages : rules && text_rules_spans(rules);
    text_read state = TEXT_READ_LINE;
    size_t first, bytes;
    int open;
    if (!f->lines_ahead) {
        state = text_reader_next(&f->reader, wait, line);
        if (state != TEXT_READ_LINE || line->too_long || !messages) return state;
        text_message_lines(line->data, line->length, line->length, &open);
        if (!open) return state;
        put_ahead(f, line);
    }
    while ((bytes = lines_of_message(f, &first, &open), open) && f->lines_ahead < LINES_AHEAD && !f->closed) {
        text_line more;
        do {
            state = text_reader_next(&f->reader, wait, &more);
            if (state == TEXT_READ_LATER || state == TEXT_READ_STOP) return state;
            if (state == TEXT_READ_LINE) put_ahead(f, &more);
            else f->closed = 1;
        } while (!f->closed && !memchr(more.data, '}', more.length) && f->lines_ahead < LINES_AHEAD);
    }
    if (f->ahead.failed) return f->stream.trouble = no_memory, TEXT_READ_STOP;
    if (bytes > first && (open || !f->stream.split || !text_message_is(f->ahead.data + f->begin, bytes))) {
        for (size_t at = 0; at < bytes; at++) f->kept_ahead += f->ahead.data[f->begin + at] == '\n';
        f->kept_ahead++;
    }
    take_ahead(f, f->kept_ahead ? first : bytes, line);
    return TEXT_READ_LINE;
}

static int flow_next(text_stream *stream, int wait, text_line *line) {
    program_flow *f = flow_of(stream);
    if (program_signal || f->out.error) return MOE_PULL_CANCEL;
    switch (f->paragraphs ? next_paragraph(f, wait, line) : next_line(f, wait, line)) {
    case TEXT_READ_LINE: return MOE_PULL_REQUEST;
    case TEXT_READ_LATER: return MOE_PULL_LATER;
    case TEXT_READ_END: return MOE_PULL_END;
    case TEXT_READ_ERROR: f->read_error = errno; return MOE_PULL_CANCEL;
    default: return MOE_PULL_CANCEL;
    }
}

static text_job *flow_add(text_stream *stream, const text_line *line, int more) {
    text_job *job = text_queue_add(&flow_of(stream)->queue);
    (void)line;
    if (job) job->more = more;
    return job;
}

static text_job *flow_insert(text_stream *stream, text_job *before, size_t at) {
    (void)at;
    return text_queue_insert(&flow_of(stream)->queue, before);
}

enum { SHOWN_A_SECOND = 20 }; /* times that a growing line is shown at most */

/* The line that comes next as it is now, up to the end of a part that is not finished. */
static void flow_grown(text_stream *stream, text_job *job) {
    program_flow *f = flow_of(stream);
    const double now = program_seconds();
    if (job != f->queue.first || now - f->shown < 1.0 / (double)SHOWN_A_SECOND) return;
    text_clear(&f->grown);
    text_append(&f->grown, f->block.data ? f->block.data : "", f->block.length);
    if (f->grown.length) text_stream_join(&f->before, &f->grown);
    text_job_show(stream->front, job, &f->grown);
    if (f->grown.failed || !f->grown.length) return;
    f->shown = now;
    program_show_line(f->grown.data, f->grown.length);
}

static void flow_finish(text_stream *stream, text_job *job, const moe_result *result) {
    program_flow *f = flow_of(stream);
    moe_error e = no_memory;
    if (program_signal || f->out.error) return;
    if (result && !result->status && result->n_hypotheses) {
        f->progress.tokens += result->hypotheses[0].n_ids + (result->hypotheses[0].finished != 0);
        f->see(f, job, result);
    }
    const moe_status status = f->stream.trouble.code ? f->stream.trouble.code : f->line(f, job, result, &e);
    if (status || job->output.failed) {
        if (!f->stream.trouble.code) f->stream.trouble = status ? e : no_memory;
        return;
    }
    job->finished = 1;
    drain(f);
}

/* The same for a translator of several models: a line is a text of it. */
static int several_pull(void *user, int wait, moetext_request *request) {
    program_flow *f = user;
    text_line line;
    for (;;) {
        const int answer = f->stream.trouble.code ? MOE_PULL_CANCEL : flow_next(&f->stream, wait, &line);
        if (answer != MOE_PULL_REQUEST) return answer;
        text_job *job = text_queue_add(&f->queue);
        if (!job) return f->stream.trouble = no_memory, MOE_PULL_CANCEL;
        job->line = line.number;
        text_append(line.kept ? &job->output : &job->source, line.data, line.length);
        if (line.too_long) text_append(&job->source, " ", 1); /* the translator says so as well */
        if (job->output.failed || job->source.failed) return f->stream.trouble = no_memory, MOE_PULL_CANCEL;
        if (!line.kept) {
            *request = (moetext_request){ .text = job->source.data, .length = job->source.length, .user = job };
            return MOE_PULL_REQUEST;
        }
        job->finished = 1;
        drain(f);
    }
}

static void several_done(void *user, const moetext_result *result) {
    program_flow *f = user;
    text_job *job = result->user;
    if (program_signal || f->out.error || f->stream.trouble.code) return;
    job->failed = result->status != MOE_OK;
    job->noted = !job->failed && *result->message;
    snprintf(job->note, sizeof job->note, "%s", result->message);
    if (result->n_hypotheses) {
        const moetext_hypothesis *best = &result->hypotheses[0];
        text_append(&job->output, best->text, best->length);
        f->progress.tokens += best->n_logprobs;
    }
    if (job->output.failed) f->stream.trouble = no_memory;
    job->finished = 1;
    drain(f);
}

static int flow_through(program_flow *f, moe_session *session) {
    const program_common *o = f->options;
    if (!o->quiet && isatty(f->reader.fd) && isatty(STDERR_FILENO))
        fputs("One sentence per line; end with ^D.\n", stderr);
    f->progress.on = !o->quiet && isatty(STDERR_FILENO) && !isatty(f->out.fd) && !isatty(f->reader.fd);
    f->progress.begin = program_seconds();
    f->grows = f->grows && !o->quiet && isatty(STDERR_FILENO) && isatty(f->out.fd);

    moe_error e = { .code = MOE_OK };
    moe_status status = session ? text_stream_run(&f->stream, session, &e)
                                : moetext_translate(f->several, several_pull, several_done, f, &e);
    double elapsed = program_seconds() - f->progress.begin;
    program_progress_hide();

    if (f->out.error) {
        program_complain("%s: %s; %llu whole lines were written", f->out.name, strerror(f->out.error),
                         (unsigned long long)f->out.lines);
        return EXIT_INPUT_OUTPUT;
    }
    if (f->read_error) {
        program_complain("%s: %s, after line %llu", o->input ? o->input : "standard input", strerror(f->read_error),
                         (unsigned long long)f->reader.lines);
        return EXIT_INPUT_OUTPUT;
    }
    if (f->stream.trouble.code)
        return program_complain("%s", f->stream.trouble.message),
               f->stream.trouble.code == MOE_ERROR_IO ? EXIT_INPUT_OUTPUT : EXIT_MODEL;
    if (program_signal) return f->part ? 128 + (int)program_signal : program_stopped(o, &f->out);
    if (status) return program_complain("%s", e.message), EXIT_MODEL;
    if (f->stats) {
        const moe_stats stats = session ? moe_session_stats(session) : moetext_stats(f->several);
        f->stats(f, &stats, elapsed);
    }
    if (f->progress.failed && !f->part)
        program_complain("%llu of %llu lines could not be %s", (unsigned long long)f->progress.failed,
                         (unsigned long long)f->progress.lines, f->done_word);
    return f->progress.failed ? EXIT_SOME_LINES : EXIT_DONE;
}

int program_flow_run(program_flow *f, moe_session *session) {
    int in, status = program_open_streams(f->options, &in, &f->out);
    text_reader_init(&f->reader, in, &program_signal, program_wake);
    f->reader.lines = f->earlier;
    if (status < 0 && f->options->text && !text_reader_take(&f->reader, f->options->text)) {
        program_complain("%s", no_memory.message);
        status = EXIT_MODEL;
    }
    f->stream.next = flow_next;
    f->stream.add = flow_add;
    f->stream.insert = flow_insert;
    f->stream.finish = flow_finish;
    f->stream.grown = flow_grown;
    if (status < 0) status = flow_through(f, session);
    status = program_close_streams(f->options, in, &f->out, status);
    text_stream_free(&f->stream);
    text_reader_free(&f->reader);
    text_queue_free(&f->queue);
    text_bytes_free(&f->block);
    text_bytes_free(&f->grown);
    text_bytes_free(&f->before.gap);
    text_bytes_free(&f->paragraph);
    text_bytes_free(&f->ahead);
    return status;
}
