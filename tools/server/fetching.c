/* fetching.c - list local and available models, and fetch models if --allow-get is given.
 *
 * moe-get does the work in a process of its own, one at a time, and uses the network. The main thread collects its
 * output; after a model was fetched, the server reloads.
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/server/server.h"
#include "tools/text/places.h"
#include "tools/text/system.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_OUTPUT = 8 << 20, MOST_MESSAGES = 1 << 16, FRESH = 3600 };

typedef enum job_state { JOB_NONE, JOB_RUNNING, JOB_DONE, JOB_FAILED } job_state;

struct fetching {
    job_state state;
    int lists; /* 1 to list available models, 0 to fetch one */
    char model[FETCHED];
    pid_t process;
    int pipes[2];         /* standard output and standard error of moe-get */
    text_bytes said[2];   /* what was read from them */
    text_bytes available; /* a list in JSON; empty before the first one */
    double listed;        /* time of the list */
};

/* ---- The process --------------------------------------------------------------------------------------- */

#ifndef SYSTEM_START /* Windows has no fork */

/* Run moe-get in the child of fork(), where only system calls are safe. */
static void run_child(const char *path, char *const *words, int out, int err, long files) {
    const int none = open("/dev/null", O_RDONLY);
    dup2(none, 0), dup2(out, 1), dup2(err, 2);
    for (int fd = 3; fd < files; fd++) close(fd);
    signal(SIGPIPE, SIG_DFL);
    execv(path, words);
    _exit(127);
}

/* Start a program without input. Return -1 on failure. */
static pid_t start_program(const char *path, char *const *words, int out, int err) {
    const long most = sysconf(_SC_OPEN_MAX);
    const pid_t process = fork();
    if (!process) run_child(path, words, out, err, most > 0 && most < 65536 ? most : 65536);
    return process;
}
#define SYSTEM_START start_program
#endif

/* Start moe-get. Return 0 on failure. */
static int start(fetching *f, char *const *words) {
    char path[4096];
    int out[2], err[2];
    if (!text_place_of_program("moe-get", path, sizeof path) || pipe(out)) return 0;
    if (pipe(err)) return close(out[0]), close(out[1]), 0;
    f->process = SYSTEM_START(path, words, out[1], err[1]);
    close(out[1]), close(err[1]);
    if (f->process < 0) return close(out[0]), close(err[0]), 0;
    f->pipes[0] = out[0], f->pipes[1] = err[0];
    for (int i = 0; i < 2; i++) {
        fcntl(f->pipes[i], F_SETFL, O_NONBLOCK), fcntl(f->pipes[i], F_SETFD, FD_CLOEXEC);
        text_clear(&f->said[i]);
    }
    f->state = JOB_RUNNING;
    return 1;
}

/* Read what moe-get has written. It is ended if it writes too much. */
static void collect(fetching *f) {
    static const size_t most[] = { MOST_OUTPUT, MOST_MESSAGES };
    char data[4096];
    for (int i = 0; i < 2; i++)
        for (ssize_t n; (n = read(f->pipes[i], data, sizeof data)) > 0;) {
            text_append(&f->said[i], data, (size_t)n);
            if (f->said[i].failed || f->said[i].length > most[i]) kill(f->process, SIGKILL), text_clear(&f->said[i]);
        }
}

static void take_list(fetching *f) {
    cJSON *list = cJSON_ParseWithLength(f->said[0].data ? f->said[0].data : "", f->said[0].length);
    if (!cJSON_IsArray(list)) f->state = JOB_FAILED;
    cJSON_Delete(list);
    if (f->state == JOB_FAILED) return;
    text_bytes_free(&f->available);
    f->available = f->said[0], f->said[0] = (text_bytes){ 0 };
    f->listed = program_seconds();
}

void fetching_look(server *s) {
    int status;
    pthread_mutex_lock(&s->lock);
    fetching *f = s->fetching;
    if (f && f->state == JOB_RUNNING) {
        collect(f);
        if (waitpid(f->process, &status, WNOHANG) == f->process) {
            collect(f);
            close(f->pipes[0]), close(f->pipes[1]);
            f->state = WIFEXITED(status) && WEXITSTATUS(status) == 0 ? JOB_DONE : JOB_FAILED;
            if (f->lists && f->state == JOB_DONE) take_list(f);
            s->wants_reload |= !f->lists && f->state == JOB_DONE;
        }
    }
    pthread_mutex_unlock(&s->lock);
}

void fetching_end(server *s) {
    fetching *f = s->fetching;
    if (!f) return;
    if (f->state == JOB_RUNNING) kill(f->process, SIGTERM), waitpid(f->process, NULL, 0);
    text_bytes_free(&f->said[0]), text_bytes_free(&f->said[1]), text_bytes_free(&f->available);
    free(f);
}

/* ---- Answers ------------------------------------------------------------------------------------------- */

static fetching *fetching_of(server *s) {
    if (!s->fetching) s->fetching = calloc(1, sizeof *s->fetching);
    return s->fetching;
}

/* Write the state of the job (lock held). */
static void put_job(json *j, const fetching *f) {
    static const char *const states[] = { "none", "running", "done", "failed" };
    const text_bytes *said = &f->said[1];
    size_t end = said->length, begin;
    while (end && said->data[end - 1] == '\n') end--;
    for (begin = end; begin && said->data[begin - 1] != '\n';) begin--;
    json_open(j, "job", '{');
    json_text(j, "state", states[f->state]);
    if (!f->lists) json_clean(j, "model", f->model, strlen(f->model));
    json_clean(j, "message", end ? said->data + begin : "", end - begin); /* the last line */
    json_close(j, '}');
}

static enum MHD_Result send_job(server *s, request *req, unsigned status) {
    json j = { .out = &req->out };
    pthread_mutex_lock(&s->lock);
    json_open(&j, NULL, '{');
    put_job(&j, s->fetching);
    json_close(&j, '}');
    pthread_mutex_unlock(&s->lock);
    text_append(&req->out, "\n", 1);
    return send_bytes(s, req, status, "application/json");
}

static enum MHD_Result answer_local(server *s, request *req) {
    moetext_choice *choice = NULL;
    moe_error e = { .message = "" };
    json j = { .out = &req->out };
    if (moetext_choose(NULL, NULL, &choice, &e) && e.code != MOE_ERROR_IO)
        return send_error(s, req, MHD_HTTP_SERVICE_UNAVAILABLE, e.message);
    json_open(&j, NULL, '{');
    json_open(&j, "local", '[');
    for (size_t i = 0; choice && i < choice->n_local; i++) {
        const moetext_local *m = choice->local[i];
        json_open(&j, NULL, '{');
        json_clean(&j, "name", m->name, strlen(m->name));
        json_clean(&j, "directions", m->ways, strlen(m->ways));
        json_whole(&j, "bytes", (int64_t)m->bytes);
        if (m->comet >= 0) json_digits(&j, "comet", m->comet, 6);
        if (m->bleu >= 0) json_digits(&j, "bleu", m->bleu, 6);
        json_bool(&j, "shipped", m->shipped);
        json_close(&j, '}');
    }
    json_close(&j, ']');
    moetext_choice_free(choice);
    json_bool(&j, "can_fetch", s->setup->options.allow_get);
    pthread_mutex_lock(&s->lock);
    if (s->fetching) put_job(&j, s->fetching);
    pthread_mutex_unlock(&s->lock);
    json_close(&j, '}');
    return send_json(s, req);
}

static enum MHD_Result refuse_network(server *s, request *req) {
    return send_error(s, req, MHD_HTTP_FORBIDDEN, "this server does not use the network: start it with --allow-get");
}

static enum MHD_Result answer_available(server *s, request *req) {
    static char program[] = "moe-get", search[] = "--search=", form[] = "--json";
    char *const words[] = { program, search, form, NULL };
    json j = { .out = &req->out };
    int started = 1;
    if (!s->setup->options.allow_get) return refuse_network(s, req);
    pthread_mutex_lock(&s->lock);
    fetching *f = fetching_of(s);
    const int fresh = f && f->available.length && program_seconds() - f->listed < (double)FRESH,
              failed = f && f->lists && f->state == JOB_FAILED;
    if (fresh) {
        json_open(&j, NULL, '{');
        text_append_string(&req->out, "\"available\":");
        text_append(&req->out, f->available.data, f->available.length);
        text_append_string(&req->out, "}");
    } else if (f && f->state != JOB_RUNNING && !failed) {
        f->lists = 1, f->model[0] = '\0';
        started = start(f, words);
    }
    pthread_mutex_unlock(&s->lock);
    if (fresh) return send_json(s, req);
    if (!f) return send_error(s, req, MHD_HTTP_SERVICE_UNAVAILABLE, "out of memory; try again");
    if (!started) return send_error(s, req, MHD_HTTP_INTERNAL_SERVER_ERROR, "cannot start moe-get: is it installed?");
    const enum MHD_Result result = send_job(s, req, failed ? MHD_HTTP_BAD_GATEWAY : MHD_HTTP_ACCEPTED);
    pthread_mutex_lock(&s->lock);
    if (failed && f->lists && f->state == JOB_FAILED) f->state = JOB_NONE; /* the next request tries again */
    pthread_mutex_unlock(&s->lock);
    return result;
}

static enum MHD_Result answer_fetch(server *s, request *req) {
    static char program[] = "moe-get", accept[] = "--accept-licence", end[] = "--";
    char *words[5] = { program };
    size_t n = 1;
    int busy = 0, started = 0;
    if (!s->setup->options.allow_get) return refuse_network(s, req);
    if (!req->fetched[0]) return send_error(s, req, MHD_HTTP_BAD_REQUEST, "Invalid request: missing model parameter");
    if (req->details) words[n++] = accept;
    words[n++] = end;
    words[n] = req->fetched;
    pthread_mutex_lock(&s->lock);
    fetching *f = fetching_of(s);
    busy = f && f->state == JOB_RUNNING;
    if (f && !busy) {
        f->lists = 0;
        snprintf(f->model, sizeof f->model, "%s", req->fetched);
        started = start(f, words);
    }
    pthread_mutex_unlock(&s->lock);
    if (busy) return send_error(s, req, MHD_HTTP_CONFLICT, "moe-get is running: GET /models shows its state");
    if (!started) return send_error(s, req, MHD_HTTP_INTERNAL_SERVER_ERROR, "cannot start moe-get: is it installed?");
    return send_job(s, req, MHD_HTTP_ACCEPTED);
}

/* Read the parameters of POST /models/fetch. */
static void take_fetch(request *req, const char *name, const char *value, size_t length) {
    char word[FETCHED];
    take_word(word, sizeof word, value, length);
    if (strcmp(name, "model") == 0) snprintf(req->fetched, sizeof req->fetched, "%s", word);
    else if (strcmp(name, "accept_licence") == 0) req->details = strcmp(word, "true") == 0 || strcmp(word, "1") == 0;
}

static const dialect fetches = { .take = take_fetch }, lists = { .error = NULL };

const route fetching_routes[] = {
    { "GET", "/models", NEEDS_KEY, answer_local, &lists },
    { "GET", "/models/available", NEEDS_KEY, answer_available, &lists },
    { "POST", "/models/fetch", NEEDS_BODY | NEEDS_KEY, answer_fetch, &fetches },
    { 0 },
};
