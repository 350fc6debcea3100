/* live_lines.c - see live_lines.h. */
#define _POSIX_C_SOURCE 200809L /* poll */

#include "tools/programs/live_lines.h"
#include "tools/programs/cues.h"
#include "tools/text/json.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PAUSE = 300, /* milliseconds without input after which all words are shown */
    CHUNK = 4096
};

typedef struct live_lines {
    const program_common *options;
    moetext *translator;
    moetext_live *live;
    int in, at_end, read_error;
    program_output out;
    char chunk[CHUNK];
    size_t n_chunk, used; /* bytes of the chunk; those taken */

    text_bytes line;
    uint64_t number, failed;
    int carriage; /* 1 after a carriage return that has had no effect yet */
    int escape;   /* 1 after ESC, 2 in a sequence that starts with ESC [ */
    int changed;  /* 1 if the line has changed since it was given to `live` */
    int paused;   /* 1 if it was given again after a pause */

    cue_stream cues;
    int partials, terminal;    /* 1 to write unfinished lines; 1 if the output is a terminal */
    text_bytes written, block; /* the unfinished line as written; bytes to write */
    text_bytes shown, message;
    moe_status status; /* of the final translation */
    moe_error error;   /* ends the run if its code is set */
} live_lines;

/* ---- Input ---- */

/* Wait for input. Return 0 at a pause, at the end, or after a signal. */
static int wait_for_input(live_lines *l, int wait) {
    struct pollfd ready[] = { { .fd = l->in, .events = POLLIN }, { .fd = program_wake, .events = POLLIN } };
    if (l->used < l->n_chunk || l->at_end || program_signal) return l->used < l->n_chunk && !program_signal;
    const int n = poll(ready, 2, wait);
    if (n < 0 && errno != EINTR) l->read_error = errno, l->at_end = 1;
    if (n <= 0 || !ready[0].revents || program_signal) return 0;
    const ssize_t got = read(l->in, l->chunk, CHUNK);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return 0;
    if (got < 0) l->read_error = errno;
    if (got <= 0) l->at_end = 1;
    l->n_chunk = got > 0 ? (size_t)got : 0, l->used = 0;
    return got > 0;
}

/* Ignore a byte of an escape sequence; return 0 for other bytes. */
static int is_escape(live_lines *l, char c) {
    if (c == '\033') return l->escape = 1;
    if (l->escape == 1 && c == '[') return l->escape = 2;
    if (!l->escape || c == '\n') return l->escape = 0;
    if (l->escape == 1 || (c >= '@' && c <= '~')) l->escape = 0;
    return 1;
}

static int is_same(const text_bytes *b, const char *data, size_t length) {
    return b->length == length && (!length || memcmp(b->data, data, length) == 0);
}

/* Add bytes of the input to the line. Return 1 after the line's end. */
static int take_input(live_lines *l) {
    while (l->used < l->n_chunk) {
        const char c = l->chunk[l->used++];
        if (is_escape(l, c)) continue;
        if (c == '\n') return 1;
        l->changed = 1, l->paused = 0;
        if (l->carriage) text_clear(&l->line);
        l->carriage = c == '\r';
        if (c == '\b')
            l->line.length = l->line.length ? text_utf8_cut(l->line.data, l->line.length, l->line.length - 1) : 0;
        else if (!l->carriage && l->line.length <= TEXT_MAX_LINE) text_append(&l->line, &c, 1);
        if (!l->number && is_same(&l->line, "\xEF\xBB\xBF", 3)) text_clear(&l->line); /* a byte order mark */
    }
    if (l->line.failed) text_out_of_memory(&l->error);
    return 0;
}

/* ---- Output ---- */

static void put_json(live_lines *l, const moetext_live_view *v) {
    json j = { .out = &l->block };
    json_open(&j, NULL, '{');
    json_whole(&j, "line", (int64_t)l->number + 1);
    json_string(&j, "translation", v->text, v->length);
    json_string(&j, "stable", v->text, v->stable);
    json_bool(&j, "final", v->final);
    if (v->final && l->status) json_text(&j, "error", l->message.length ? l->message.data : "");
    json_close(&j, '}');
    text_append(&l->block, "\n", 1);
}

/* Write the changes. */
static void put_text(live_lines *l, const moetext_live_view *v) {
    const size_t n = l->written.length;
    const int grows = v->length >= n && (!n || memcmp(v->text, l->written.data, n) == 0);
    if (!grows) text_append(&l->block, "\r", 1);
    text_append(&l->block, v->text + (grows ? n : 0), v->length - (grows ? n : 0));
    if (v->final) text_append(&l->block, "\n", 1);
}

static void put(live_lines *l, const moetext_live_view *v) {
    if (!v->final && (!l->partials || is_same(&l->written, v->text, v->length))) return;
    text_clear(&l->block);
    if (l->options->json) put_json(l, v);
    else if (l->terminal && !v->final) program_show_line(v->text, v->length);
    else if (l->terminal) program_progress_hide(), text_clear(&l->written), put_text(l, v);
    else put_text(l, v);
    text_clear(&l->written);
    if (!v->final) text_append(&l->written, v->text, v->length);
    if (l->block.failed || l->written.failed) text_out_of_memory(&l->error);
    else program_write(&l->out, l->block.data ? l->block.data : "", l->block.length);
}

/* ---- Translations ---- */

typedef struct one {
    live_lines *lines;
    const moetext_request *request; /* NULL once it was pulled */
} one;

static int pull(void *user, int wait, moetext_request *request) {
    one *x = user;
    (void)wait;
    if (program_signal) return MOE_PULL_CANCEL;
    if (!x->request) return MOE_PULL_END;
    request->text = x->request->text, request->length = x->request->length;
    request->draft = x->request->draft, request->draft_length = x->request->draft_length;
    request->quick = x->request->quick;
    x->request = NULL;
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moetext_result *r) {
    live_lines *l = ((one *)user)->lines;
    text_clear(&l->shown), text_clear(&l->message);
    l->status = r->status;
    if (r->n_hypotheses) text_append(&l->shown, r->hypotheses[0].text, r->hypotheses[0].length);
    text_append_string(&l->message, r->message);
}

static moe_status translate(live_lines *l, const moetext_request *request) {
    one x = { l, request };
    program_stoppable(l->translator);
    const moe_status status = moetext_translate(l->translator, pull, done, &x, &l->error);
    program_stoppable(NULL);
    if (!status && (l->shown.failed || l->message.failed)) return text_out_of_memory(&l->error);
    return status;
}

/* Translate the parts that are due, and show them. Between two translations of an unfinished line, look for newer
 * input. */
static void work(live_lines *l, moetext_live_state state) {
    moetext_request request = { 0 };
    while (!l->error.code && !l->out.error && moetext_live_next(l->live, &request)) {
        if (translate(l, &request) ||
            moetext_live_take(l->live, l->shown.data ? l->shown.data : "", l->shown.length, &l->error))
            return;
        const moetext_live_view v = moetext_live_shown(l->live);
        put(l, &v);
        if (v.final || (state != MOETEXT_FINAL && wait_for_input(l, 0))) return;
    }
}

static void update(live_lines *l, moetext_live_state state) {
    const size_t length = l->line.length ? text_utf8_valid(l->line.data, l->line.length) : 0;
    l->changed = 0, l->paused |= state == MOETEXT_PAUSED;
    if (l->cues.on > 0 || (!l->cues.on && (!length || !memchr(l->line.data, ' ', length))))
        return; /* may be subtitles */
    if (!l->partials || l->line.length > TEXT_MAX_LINE || l->line.length - length > 3) return;
    if (moetext_live_give(l->live, l->line.data, length, state, NULL)) return; /* a NUL; the final line reports it */
    const moetext_live_view v = moetext_live_shown(l->live);
    put(l, &v);
    work(l, state);
}

/* Report the message of a final line. */
static void tell(live_lines *l) {
    if (!l->message.length || (!l->status && l->options->quiet)) return;
    program_error("line %llu: %s", (unsigned long long)l->number, l->message.data);
}

/* Write what the cues have to copy. */
static void write_held(live_lines *l) {
    text_bytes *held = &l->cues.held;
    if (held->failed) text_out_of_memory(&l->error);
    else program_write(&l->out, held->length ? held->data : "", held->length);
    text_clear(held);
}

/* Translate the cues that are complete; words of the source remain if that fails. */
static void write_cues(live_lines *l) {
    const text_bytes *source = &l->cues.source;
    const moetext_request request = { .text = source->length ? source->data : "", .length = source->length };
    if (source->failed) text_out_of_memory(&l->error);
    if (l->error.code || translate(l, &request)) return;
    const text_bytes *words = l->shown.length ? &l->shown : source;
    l->failed += l->status != MOE_OK;
    tell(l);
    text_clear(&l->block);
    cues_write(&l->cues, words->length ? words->data : "", words->length, &l->block);
    if (l->block.failed) text_out_of_memory(&l->error);
    else program_write(&l->out, l->block.data, l->block.length);
}

/* Take a line of subtitles, or their end if `line` is NULL. Return 0 for a line that is not part of subtitles. */
static int take_cue(live_lines *l, const char *line, size_t length) {
    cue_step step = CUE_TAKEN;
    while (!program_signal && !l->error.code && !l->out.error &&
           (step = cues_take(&l->cues, line, length)) == CUE_TRANSLATE)
        write_cues(l);
    if (program_signal || l->error.code || l->out.error) return 1;
    if (step == CUE_COPY || step == CUE_OTHER) write_held(l);
    return step != CUE_OTHER;
}

/* Translate and write a whole line. */
static void finish(live_lines *l) {
    if (take_cue(l, l->line.length ? l->line.data : "", l->line.length)) {
        l->number++;
        text_clear(&l->line);
        l->carriage = l->changed = l->paused = 0;
        return;
    }
    const moetext_request whole = { .text = l->line.data ? l->line.data : "", .length = l->line.length };
    moetext_live_view v = { .final = 1 };
    text_clear(&l->message);
    l->status = MOE_OK;
    const int usable = !moetext_live_give(l->live, l->line.data, l->line.length, MOETEXT_FINAL, NULL);
    if (usable) {
        v = moetext_live_shown(l->live);
        if (v.final) put(l, &v);
        else work(l, MOETEXT_FINAL);
        if (!l->error.code && !moetext_live_shown(l->live).final) text_out_of_memory(&l->error);
    } else if (!translate(l, &whole)) { /* the library describes the problem */
        v.text = l->shown.data ? l->shown.data : "", v.length = v.stable = l->shown.length;
        put(l, &v);
    }
    if (l->error.code || l->out.error || program_signal) return;
    l->number++;
    l->failed += l->status != MOE_OK;
    tell(l);
    text_clear(&l->line);
    l->carriage = l->changed = l->paused = 0;
    moetext_live_give(l->live, "", 0, MOETEXT_GROWING, NULL);
}

static int outcome(const live_lines *l) {
    if (l->out.error)
        program_error("%s: %s; %llu complete lines were written", l->out.name, strerror(l->out.error),
                      (unsigned long long)l->out.lines);
    else if (l->read_error)
        program_error("%s: %s, after line %llu", l->options->input ? l->options->input : "standard input",
                      strerror(l->read_error), (unsigned long long)l->number);
    if (l->out.error || l->read_error) return EXIT_INPUT_OUTPUT;
    if (program_signal) return program_stopped(l->options, &l->out);
    if (l->error.code) return program_failed(&l->error);
    if (l->failed)
        program_error("%llu of %llu lines could not be translated", (unsigned long long)l->failed,
                      (unsigned long long)l->number);
    return l->failed ? EXIT_SOME_LINES : EXIT_DONE;
}

static void run(live_lines *l) {
    while (!l->error.code && !l->out.error && !program_signal) {
        if (take_input(l)) {
            finish(l);
        } else if (l->at_end) {
            if (l->line.length) finish(l);
            take_cue(l, NULL, 0);
            return;
        } else if (!wait_for_input(l, l->changed ? 0 : l->line.length && !l->paused ? PAUSE : -1) && !l->at_end) {
            if (l->changed) update(l, MOETEXT_GROWING);
            else if (l->line.length && !l->paused) update(l, MOETEXT_PAUSED);
        }
    }
}

int program_live_run(const program_common *o, moetext *translator) {
    live_lines l = { .options = o, .translator = translator };
    struct stat kind;
    int status = program_open_streams(o, &l.in, &l.out);
    if (status >= 0) return status;
    l.terminal = isatty(l.out.fd) && isatty(STDERR_FILENO) && !o->json;
    l.partials = !(fstat(l.out.fd, &kind) == 0 && S_ISREG(kind.st_mode)) || o->json;
    l.cues.on = o->json ? -1 : 0;
    if (moetext_live_new(&l.live, &l.error)) status = program_failed(&l.error);
    else run(&l), status = outcome(&l);
    moetext_live_free(l.live);
    cues_free(&l.cues);
    text_bytes_free_all((text_bytes *[]){ &l.line, &l.written, &l.block, &l.shown, &l.message }, 5);
    return program_close_streams(o, l.in, &l.out, status);
}
