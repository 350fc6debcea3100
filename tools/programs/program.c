/* program.c - user interface of all programs; documented in program.h, which has the same sections. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/program.h"
#include "tools/text/memory.h"

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

volatile sig_atomic_t program_signal; /* global for the signal handler */
int program_wake = -1;
static int waker = -1; /* the write end of program_wake's pipe */

static char temporary[4096]; /* name of the file being written, or "" */

/* Session and translator to stop after a signal. Only the main thread, which frees them, receives signals. */
static moe_session *volatile stoppable;
static moetext *volatile stoppable_translator;

static void on_signal(int number) {
    if (program_signal) { /* the second signal ends the program even if it is stuck, for example in a write */
        if (*temporary) unlink(temporary);
        signal(number, SIG_DFL);
        raise(number);
    }
    program_signal = number;
    const int before = errno;
    if (waker >= 0 && write(waker, "", 1) < 0) { /* the pipe is full, so it is readable */
    }
    errno = before;
    if (stoppable) moe_session_cancel(stoppable);
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
    signal(SIGPIPE, SIG_IGN); /* makes write() fail if the pipe is closed */
}

double program_resident(void) {
    struct rusage use;
    if (getrusage(RUSAGE_SELF, &use)) return 0;
#ifdef __APPLE__
    return (double)use.ru_maxrss / 1048576.0; /* macOS counts bytes, other systems KiB */
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
    const moe_stat *x;
    const char *before = "counts           ";
    for (size_t i = 0; (x = moe_stat_at(i)); i++) {
        const uint64_t *value = (const void *)((const char *)s + x->offset);
        if (x->text || !*value) continue;
        fprintf(stderr, "%s%s %llu", before, x->name, (unsigned long long)*value);
        before = ", ";
    }
    fprintf(stderr, "\n");
}

/* ---- 2. Options ---------------------------------------------------------------------------------------- */

#define ROW(kind_, field) .kind = (kind_), .at = offsetof(program_common, field)
#define FLAG(field) ROW(ROW_FLAG, field), .low = 1

const option_row program_rows[] = {
    { "model", "FILE", "model file (default: MOE_MODEL, else fetched models, else the installed model)", .letter = 'm',
      .group = GROUP_MODEL, ROW(ROW_WORD, model) },
    { "no-verify", NULL, "do not check the model for damage", .group = GROUP_MODEL, FLAG(no_verify),
      .more = ". Models of up to 64 MiB are checked unless this option is given; moe-info --check checks larger ones" },
    OPTION_NO_CACHE(FLAG(no_cache)),
    { "input", "FILE", "read FILE instead of standard input (-)", .letter = 'i', .group = GROUP_FILES,
      ROW(ROW_PATH, input) },
    { "output", "FILE", "write to FILE instead of standard output (-)", .letter = 'o', .group = GROUP_FILES,
      ROW(ROW_PATH, output), .more = ". After an error or ^C, FILE contains the complete lines written so far" },
    { "ids", NULL, "lines contain token ids separated by spaces", .group = GROUP_FILES, FLAG(ids) },
    { "pretokenized", NULL,
      "lines contain vocabulary pieces separated by spaces; unknown pieces become the unknown token",
      .group = GROUP_FILES, FLAG(pretokenized) },
    { "routing", "FILE", "write the experts and weights of every token or row as JSON lines, for moe-routing",
      .group = GROUP_GATES, ROW(ROW_WORD, routing),
      .more = ". FILE is created only when complete; a pipe receives each line immediately" },
    { "dry-run", NULL, "print the required memory and exit", .group = GROUP_MEMORY, FLAG(dry_run) },
    { "no-mmap", NULL,
      "read the model into private memory instead of mapping it: about 10% faster, but slower to start",
      .group = GROUP_SPEED, FLAG(no_mmap) },
    { "stats", NULL, "print time and memory statistics to standard error at the end", .group = GROUP_OTHER,
      FLAG(stats) },
    { "verbose", NULL, "print kernels, GPU and memory use to standard error", .letter = 'v', .group = GROUP_OTHER,
      FLAG(verbose) },
    { "quiet", NULL, "print only errors, not progress or warnings", .letter = 'q', .group = GROUP_OTHER, FLAG(quiet) },
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
    if (moe_model_kind(model) == kind) return -1;
    return program_error("%s is %s", path, words[moe_model_kind(model)]), EXIT_USAGE;
}

int program_check_copy(const char *in, const char *out) {
    if (strcmp(in, out) != 0 && !program_same_file(in, out)) return -1;
    return program_usage_error("%s and %s are the same file: choose a different output file", in, out);
}

int program_words(program_common *o, int count, char *const *words) {
    static text_bytes text; /* never freed */
    if (!count) return -1;
    if (o->input) return program_usage_error("unexpected argument '%s': -i already specifies the input", words[0]);
    for (int i = 0; i < count; i++) {
        if (i) text_append(&text, " ", 1);
        text_append_string(&text, words[i]);
    }
    if (!text.length || text.data[text.length - 1] != '\n') text_append(&text, "\n", 1);
    if (text.failed) return program_error("out of memory"), EXIT_MODEL;
    o->text = text.data;
    struct stat file;
    if (count == 1 && stat(words[0], &file) == 0 && S_ISREG(file.st_mode))
        program_error("'%s' is a file, but the argument is translated as text; use -i %s to read the file", words[0],
                      words[0]);
    return -1;
}

int program_open(const program_common *o, moe_kind kind, text_level level, text_front *front) {
    moe_model_params params = { .copy = o->no_mmap, .verify = o->no_verify ? -1 : 2, .stream = o->stream };
    moe_error e;
    if (o->settings.max_memory) params.allocator = text_memory_allocator();
    if (text_open(o->model, TEXT_IDS_ONLY | (o->no_cache ? TEXT_NO_CACHE : 0), &params, front, &e))
        return program_model_error(o->model, &e);
    int status = program_check_kind(o->model, front->model, kind);
    /* Verify the model here, while a thread loads the tokeniser, instead of when it is opened. */
    if (status < 0 && (text_begin_tokeniser(front, level, &e) ||
                       (!o->no_verify && moe_model_file_bytes(front->model) <= MOE_VERIFY_BYTES &&
                        moe_model_verify(front->model, &e))))
        status = program_file_error(o->model, &e);
    if (status >= 0) text_close(front);
    return status;
}

int program_ask_language(const text_front *front, const char *what) {
    text_bytes known = { 0 };
    text_languages(front, &known);
    program_error("missing %s; languages of this model: %s", what, known.failed ? "" : known.data);
    text_bytes_free(&known);
    return EXIT_USAGE;
}

int program_gate_is_dense(moe_gate gate) { return gate == MOE_GATE_SOFTMAX || gate == MOE_GATE_SIGMOID; }

text_level program_level(const program_common *o) {
    if (o->ids) return o->routing ? TEXT_IF_THERE : TEXT_IDS_ONLY; /* --routing writes the texts of tokens */
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
    if (o->verbose) p->log = program_log;
}

void program_hold_signals(sigset_t *before) {
    sigset_t stops;
    sigemptyset(&stops);
    sigaddset(&stops, SIGHUP);
    sigaddset(&stops, SIGINT);
    sigaddset(&stops, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &stops, before);
}

void program_release_signals(const sigset_t *before) { pthread_sigmask(SIG_SETMASK, before, NULL); }

/* Create a session that a signal stops; moe_translate and moe_classify then return MOE_ERROR_CANCELLED. */
static moe_status new_session(const moe_model *model, const moe_session_params *params, moe_session **session,
                              moe_error *error) {
    sigset_t before;
    program_hold_signals(&before);
    const moe_status status = moe_session_new(model, params, session, error);
    if (!status) stoppable = *session;
    if (!status && program_signal) moe_session_cancel(*session);
    program_release_signals(&before);
    return status;
}

void program_session_free(moe_session *session) {
    sigset_t before;
    program_hold_signals(&before); /* on Windows a handler runs in a thread of its own */
    stoppable = NULL;
    program_release_signals(&before);
    moe_session_free(session);
}

void program_stoppable(moetext *translator) {
    sigset_t before;
    program_hold_signals(&before);
    stoppable_translator = translator;
    program_release_signals(&before);
    if (translator && program_signal) moetext_cancel(translator);
}

/* Return the resident memory of this process in bytes, excluding mapped pages of the file at `path`. */
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
        if (*line >= 'A' && *line <= 'Z') continue; /* header line: addresses, rights, offset, device, inode */
        for (int field = 0; field < 4; field++) at += strcspn(at, " "), at += strspn(at, " ");
        counts = strtoull(at, NULL, 10) != (unsigned long long)file.st_ino;
    }
    fclose(maps);
    return kib << 10;
}

size_t program_memory(const program_common *o, const moe_model *model) {
    const size_t now = resident_beside(o->model), copied = (size_t)moe_model_held_bytes(model);
    return (o->no_mmap || o->stream) && copied > now ? copied : now;
}

int program_report_memory(const program_common *o, const moe_model *model, size_t sessions) {
    const double mib = 1048576.0;
    const int private = o->no_mmap || o->stream;
    const size_t weights = (size_t)moe_model_held_bytes(model);
    if (o->silent) return EXIT_DONE;
    const size_t rest = program_memory(o, model) - (private ? weights : 0);
    printf("weights          %.1f MiB%s\nsession          %.1f MiB\nprogram          %.1f MiB, with the tokeniser\n"
           "peak             %.1f MiB\n",
           (double)weights / mib,
           o->stream ? ", without experts: those are in the session"
           : private ? ""
                     : ", mapped from the file",
           (double)sessions / mib, (double)rest / mib, (double)(weights + sessions + rest) / mib);
    return program_printed();
}

/* Handle --dry-run and --max-memory. Return -1, or the exit status after a message. */
static int check_memory(const program_common *o, text_front *front, const moe_session_params *params) {
    moe_error e;
    if (!o->dry_run && !o->settings.max_memory) return -1;
    if (text_wait_tokeniser(front, &e)) return program_file_error(o->model, &e);
    text_memory memory = { .limit = o->settings.max_memory,
                           .beside = program_memory(o, front->model),
                           .as_arguments = 1 };
    if (text_memory_check(front->model, params, 1, &memory, &e))
        return program_error("%s", e.message), program_session_status(e.code);
    return o->dry_run ? program_report_memory(o, front->model, memory.sessions) : -1;
}

int program_session_status(moe_status status) {
    if (status == MOE_ERROR_IO) return EXIT_INPUT_OUTPUT;
    return status == MOE_ERROR_ARGUMENT || status == MOE_ERROR_UNSUPPORTED ? EXIT_USAGE : EXIT_MODEL;
}

void program_warn_of_gating(const program_common *o, const char *unit) {
    if (!o->quiet && !o->silent && strcmp(o->settings.gating, moe_gate_name(MOE_GATE_BATCHWISE)) == 0)
        program_error("batchwise gating: %s depends on the other lines in its batch", unit);
}

int program_session(const program_common *o, text_front *front, const moe_session_params *params, const char *unit,
                    moe_session **session) {
    const int checked = check_memory(o, front, params);
    moe_error e;
    if (checked >= 0) return checked;
    const moe_status made = new_session(front->model, params, session, &e);
    if (made) return program_error("%s", e.message), program_session_status(made);
    if (text_wait_tokeniser(front, &e)) return program_file_error(o->model, &e);
    program_warn_of_gating(o, unit);
    return -1;
}

/* ---- 3. Input and output ------------------------------------------------------------------------------- */

void program_write(program_output *out, const char *data, size_t length) {
    size_t done = 0;
    while (done < length && !out->error) {
        ssize_t n = write(out->fd, data + done, length - done);
        if (n >= 0) {
            done += (size_t)n;
        } else if (errno == EAGAIN) { /* another process has made the pipe non-blocking */
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
    if (whole < done && out->ours && ftruncate(out->fd, out->good)) { /* out->error is already set */
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

/* Return 1 after an error message if the output file `path` is the input or the model. */
static int overwrites(const program_common *o, const char *path, int in) {
    const char *victim = program_is_open_file(in, path) ? "input" : program_same_file(path, o->model) ? "model" : NULL;
    if (victim) program_error("%s: this file is the %s and would be overwritten", path, victim);
    return victim != NULL;
}

/* Report errno for a file; return the exit status. */
static int failed(const char *path) {
    program_error("%s: %s", path, strerror(errno));
    return EXIT_INPUT_OUTPUT;
}

static int is_directory(const char *path, const char *option) {
    program_error("%s: this is a directory, but %s expects a file", path, option);
    return EXIT_INPUT_OUTPUT;
}

/* Open and truncate the -o file. Refuse a file that is the input or the model, or that another program is writing.
 */
static int open_output(const program_common *o, int in, program_output *out) {
    char reason[OUTPUT_REASON];
    struct stat kind;
    out->name = o->output;
    out->fd = open(o->output, O_WRONLY | O_CREAT, 0666);
    if (out->fd < 0 && errno == EISDIR) return is_directory(o->output, "-o");
    if (out->fd < 0) {
        output_reason(o->output, errno, reason);
        return program_error("%s: %s", o->output, reason), EXIT_INPUT_OUTPUT;
    }
    if (overwrites(o, o->output, in)) return EXIT_USAGE;
    out->ours = !fstat(out->fd, &kind) && S_ISREG(kind.st_mode);
    if (out->ours && flock(out->fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        return program_error("%s: another program is writing to it", o->output), EXIT_INPUT_OUTPUT;
    return out->ours && ftruncate(out->fd, 0) ? failed(o->output) : -1;
}

/* Open the input, and set the output to standard output, which -o may replace later. */
int program_open_input(const program_common *o, int *in, program_output *out) {
    struct stat kind;
    *in = o->text ? -1 : STDIN_FILENO;
    *out = (program_output){ .fd = STDOUT_FILENO, .name = "standard output" };
    if (o->input && (*in = open(o->input, O_RDONLY)) < 0) return failed(o->input);
    if (o->input && !fstat(*in, &kind) && S_ISDIR(kind.st_mode)) return is_directory(o->input, "-i");
    if (!o->input && !o->text && program_closed(0))
        return program_error("standard input is closed; use -i FILE"), EXIT_INPUT_OUTPUT;
    if (!o->output && program_closed(1))
        return program_error("standard output is closed; use -o FILE"), EXIT_INPUT_OUTPUT;
    return -1;
}

int program_open_output(const program_common *o, int in, program_output *out) {
    if (o->routing && overwrites(o, o->routing, in)) return EXIT_USAGE;
    const int status = o->output ? open_output(o, in, out) : -1;
    if (status < 0 && program_same_file(o->output, o->routing))
        return program_error("%s: --routing requires a separate file", o->routing), EXIT_USAGE;
    return status;
}

int program_open_streams(const program_common *o, int *in, program_output *out) {
    const int status = program_open_input(o, in, out);
    return status < 0 ? program_open_output(o, *in, out) : status;
}

int program_stopped(const program_common *o, const program_output *out) {
    if (!o->quiet)
        program_error("stopped by signal %d; %llu complete lines were written", (int)program_signal,
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

/* Set the temporary file to remove at a second signal; NULL for none. */
static void remember_temporary(const output_file *file) {
    const char *name = file ? output_temporary(file) : NULL;
    snprintf(temporary, sizeof temporary, "%s", name ? name : "");
}

int program_open_whole(const program_common *o, int *in, program_output *out) {
    moe_error e;
    const int status = program_open_input(o, in, out);
    if (status >= 0 || !o->output) return status;
    if (overwrites(o, o->output, *in)) return EXIT_USAGE;
    if (output_open(o->output, &out->whole, &e)) return program_file_error(o->output, &e);
    remember_temporary(out->whole);
    return -1;
}

static int is_fine(int status) { return status == EXIT_DONE || status == EXIT_SOME_LINES; }

int program_close_streams(const program_common *o, int in, program_output *out, int status) {
    moe_error e;
    if (out->whole) {
        if (output_close(out->whole, is_fine(status), &e) && is_fine(status))
            status = program_file_error(o->output, &e);
        remember_temporary(NULL);
    } else if (o->output && out->fd >= 0 && close(out->fd) && is_fine(status)) {
        status = failed(o->output); /* network file systems may report a full disk only here */
    }
    if (o->input && in >= 0) close(in);
    return status;
}

int program_routing_open(const program_common *o, const text_front *front, const char *const languages[2],
                         routing_file *file) {
    moe_error e;
    if (!o->routing) return -1;
    const char *gating = o->settings.gating[0] ? o->settings.gating : NULL;
    if (routing_open(file, front, o->silent ? NULL : o->routing, gating, languages, &e))
        return program_file_error(o->routing, &e);
    if (file->out) remember_temporary(file->out);
    return -1;
}

int program_routing_close(routing_file *file, int status) {
    moe_error e;
    const moe_status closing = routing_close(file, is_fine(status), &e);
    remember_temporary(NULL);
    return closing && is_fine(status) ? program_failed(&e) : status;
}
