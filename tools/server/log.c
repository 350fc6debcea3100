/* log.c - write a JSON line for each request that ended, without texts, keys or query strings. */
#define _GNU_SOURCE      /* strerror and O_CLOEXEC on Linux */
#define _DARWIN_C_SOURCE /* strerror and O_CLOEXEC on macOS */

#include "tools/server/server.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int log_open(server *s, const char *path) {
    const int to_stderr = path && strcmp(path, "-") == 0;
    if (!path || to_stderr) {
        s->log = to_stderr ? STDERR_FILENO : 0;
        return -1;
    }
    const int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0640);
    if (file < 0) return program_error("--log %s: %s", path, strerror(errno)), EXIT_INPUT_OUTPUT;
    if (!s->log_file) s->log_file = file;
    else { /* keep the descriptor, because threads may be writing to it */
        if (dup2(file, s->log_file) < 0) program_error("--log %s: %s", path, strerror(errno));
        close(file);
    }
    s->log = s->log_file;
    s->log_torn = s->log_failed = 0;
    return -1;
}

static void put_time(json *j) {
    struct timespec now;
    struct tm parts;
    char text[40];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    const size_t length = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
    snprintf(text + length, sizeof text - length, ".%03dZ", (int)(now.tv_nsec / 1000000));
    json_text(j, "time", text);
}

static void put_line(const request *req, unsigned cut, json *j) {
    char text[ADDRESS_TEXT];
    address_write(&req->address, text);
    const unsigned status = req->status ? req->status : cut;
    const char *path = req->path ? req->path : "";
    json_open(j, NULL, '{');
    put_time(j);
    json_text(j, "client", text);
    json_clean(j, "method", req->method, strlen(req->method));
    json_clean(j, "path", path, strlen(path));
    json_whole(j, "status", (int64_t)status);
    if (cut && cut != status) json_whole(j, "cut", (int64_t)cut);
    json_whole(j, "in", (int64_t)req->read);
    json_whole(j, "out", strcmp(req->method, "HEAD") == 0 ? 0 : (int64_t)req->sent);
    json_fixed(j, "ms", 1000 * (program_seconds() - req->begin), 1);
    json_whole(j, "texts", (int64_t)(req->markup ? req->n_pages : req->n_items));
    if (!cut && status == 200 && req->untranslated) json_whole(j, "untranslated", (int64_t)req->untranslated);
    json_close(j, '}');
    text_append(j->out, "\n", 1);
}

void log_write(server *s, const request *req, unsigned cut) {
    if (!s->log) return;
    text_bytes line = { 0 };
    json j = { .out = &line };
    if (atomic_exchange(&s->log_torn, 0)) text_append(&line, "\n", 1);
    put_line(req, cut, &j);
    /* A single write keeps lines from different threads apart. If the write fails, requests are still answered. */
    if (line.failed || write(s->log, line.data, line.length) != (ssize_t)line.length) {
        s->log_torn = 1;
        if (!atomic_exchange(&s->log_failed, 1))
            program_error("--log %s: %s; some requests are not logged", s->setup->options.log,
                          line.failed ? "out of memory" : strerror(errno));
    }
    text_bytes_free(&line);
}
