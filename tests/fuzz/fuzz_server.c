/* fuzz_server.c - runs moe-server's daemon and decoder in this process. The input is all that a client sends over one
 * connection before it shuts down its sending side.
 *
 * Checks: replies have one of the server's statuses; JSON replies are valid; the reply to a fixed request never
 * changes. */
#define main moe_server_main
#include "tools/server/moe-server.c"
#undef main

#include "tests/fuzz/fuzz.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

enum { QUIET = 20, PATIENCE = 15000, REPLIES = 8 << 20 }; /* milliseconds per poll, in total; bytes of all replies */

static const char morning[] = "POST /translate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                              "Content-Length: 60\r\n\r\n"
                              "{\"q\":\"Good morning! How are you?\",\"source\":\"en\",\"target\":\"de\"}";

/* ---- Mutation of request lines, headers and values, with a valid length of the body ---- */

static size_t find(const uint8_t *data, size_t size, size_t from, const char *word) {
    const void *at = from < size ? memmem(data + from, size - from, word, strlen(word)) : NULL;
    return at ? (size_t)((const uint8_t *)at - data) : size;
}

/* Correct the last Content-Length. */
static size_t fix_length(uint8_t *data, size_t size, size_t most) {
    static const char name[] = "Content-Length: ";
    size_t at = size, body;
    char number[24];
    for (size_t next = find(data, size, 0, name); next < size; next = find(data, size, next + 1, name)) at = next;
    body = find(data, size, at, "\r\n\r\n");
    if (body >= size) return size;
    at += sizeof name - 1;
    snprintf(number, sizeof number, "%zu", size - body - 4);
    return fuzz_splice(data, size, most, at, find(data, size, at, "\r\n"), number, strlen(number));
}

/* Find the value [*from, *to) after the `skip`th separator. Return 0 if there is none. */
static int value_at(const uint8_t *data, size_t size, size_t skip, const char *begin, const char *end, size_t *from,
                    size_t *to) {
    size_t at = 0, n = 0;
    for (size_t i = 0; i < size; i++) n += data[i] && strchr(begin, data[i]);
    if (!n) return 0;
    for (skip %= n; at < size; at++)
        if (data[at] && strchr(begin, data[at]) && !skip--) break;
    for (*from = *to = at + 1; *to < size && !(data[*to] && strchr(end, data[*to]));) ++*to;
    return 1;
}

/* Return the path of a route. */
static const char *path_at(size_t number) {
    size_t n = 0;
    for (const route *const *table = interfaces; *table; table++)
        for (const route *at = *table; at->method; at++) n++;
    number %= n;
    for (const route *const *table = interfaces;; table++)
        for (const route *at = *table; at->method; at++)
            if (!number--) return at->path;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static const char *const values[] = { "0",
                                          "-1",
                                          "1e999",
                                          "4294967296",
                                          "true",
                                          "null",
                                          "\"\"",
                                          "[]",
                                          "{}",
                                          "[\"a\",1]",
                                          "\"\\u0000b\"",
                                          "\"\\ud800\"",
                                          "\"html\"",
                                          "\"xml\"",
                                          "{\"book\":\"Werk\",\"#\":\"\"}",
                                          "\"de\"",
                                          "\"auto\"",
                                          "[[\"a\"]]",
                                          "%00",
                                          "%",
                                          "\"<b>a</b>\"",
                                          "\"<\"",
                                          "\"\\n\\t\"",
                                          "\"{x} %s https://a.b/c\"" };
    static const char *const words[] = { "POST",
                                         "GET",
                                         "HEAD",
                                         "OPTIONS",
                                         "messages",
                                         "stop",
                                         "max_tokens",
                                         "chunked",
                                         "application/json",
                                         "multipart/form-data; boundary=b",
                                         "application/x-www-form-urlencoded",
                                         "q",
                                         "source",
                                         "target",
                                         "format",
                                         "stream",
                                         "experts",
                                         "details",
                                         "alternatives",
                                         "api_key",
                                         "glossary",
                                         "text",
                                         "text_list",
                                         "source_lang",
                                         "target_lang",
                                         "tag_handling",
                                         "formality",
                                         "file\"; filename=\"a.html",
                                         "Authorization: DeepL-Auth-Key x\r\n",
                                         "Expect: 100-continue\r\n",
                                         "Connection: close\r\n",
                                         "Content-Length: 5\r\n",
                                         "\xFF",
                                         "\xC2" };
    uint64_t r = seed;
    size_t from, to;
    const char *word =
        fuzz_one_in(&r, 3) ? path_at((size_t)fuzz_next(&r)) : words[fuzz_below(&r, sizeof words / sizeof *words)];
    const char *value = values[fuzz_below(&r, sizeof values / sizeof *values)];
    switch (fuzz_below(&r, 6)) {
    case 0: size = LLVMFuzzerMutate(data, size, max_size); break;
    case 1: /* mutate only the body */
        from = find(data, size, 0, "\r\n\r\n");
        if (from + 4 < size) size = from + 4 + LLVMFuzzerMutate(data + from + 4, size - from - 4, max_size - from - 4);
        break;
    case 2:
    case 3: /* replace a JSON value */
        if (value_at(data, size, (size_t)fuzz_next(&r), ":,[", ",]}\r", &from, &to))
            size = fuzz_splice(data, size, max_size, from, to, value, strlen(value));
        break;
    case 4: /* replace or insert a word of the header or a form */
        if (value_at(data, size, (size_t)fuzz_next(&r), " \n&=\"", " \r&=\"", &from, &to))
            size = fuzz_splice(data, size, max_size, from, fuzz_one_in(&r, 3) ? from : to, word, strlen(word));
        break;
    default: /* duplicate a piece */
        from = fuzz_below(&r, size + 1), to = from + fuzz_below(&r, size - from + 1);
        if (to - from <= 2048) {
            char piece[2048];
            memcpy(piece, data + from, to - from);
            size = fuzz_splice(data, size, max_size, to, to, piece, to - from);
        }
    }
    return fuzz_below(&r, 8) ? fix_length(data, size, max_size) : size;
}

/* ---- A client ---- */

static server fuzzed = { .interfaces = interfaces,
                         .lock = PTHREAD_MUTEX_INITIALIZER,
                         .connections_lock = PTHREAD_MUTEX_INITIALIZER,
                         .detecting = PTHREAD_MUTEX_INITIALIZER };
static struct MHD_Daemon *fuzzed_daemon;

static int is_translating(void) {
    pthread_mutex_lock(&fuzzed.lock);
    const int busy = fuzzed.backend->waiting != NULL;
    pthread_mutex_unlock(&fuzzed.lock);
    return busy;
}

/* Send all data and receive all replies. If `whole` is 0, the request may be incomplete and libmicrohttpd may wait. */
static void exchange(const void *data, size_t size, int whole, text_bytes *replies) {
    const struct sockaddr_in from = { .sin_family = AF_INET };
    int ends[2];
    replies->length = 0;
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "cannot create sockets: %s",
               strerror(errno));
    FUZZ_CHECK(MHD_add_connection(fuzzed_daemon, ends[1], (const struct sockaddr *)&from, sizeof from) == MHD_YES,
               "cannot add connection: %s", strerror(errno));
    if (!size) shutdown(ends[0], SHUT_WR);
    for (size_t sent = 0, waited = 0; sent <= size;) {
        struct pollfd wait = { ends[0], (short)(POLLIN | (sent < size ? POLLOUT : 0)), 0 };
        if (!poll(&wait, 1, QUIET)) {
            FUZZ_CHECK((waited += QUIET) < PATIENCE, "no reply");
            if (!whole && sent == size && !is_translating()) break;
            continue;
        }
        waited = 0;
        if (wait.revents & (POLLIN | POLLHUP | POLLERR)) {
            FUZZ_CHECK(text_room(replies, 65536) && replies->length < REPLIES, "replies are too long");
            const ssize_t got = recv(ends[0], replies->data + replies->length, 65536, 0);
            if (got <= 0) break;
            replies->length += (size_t)got;
        } else {
            const ssize_t n = send(ends[0], (const char *)data + sent, size - sent, MSG_NOSIGNAL);
            if (n <= 0) sent = size;
            else sent += (size_t)n;
            if (sent == size) shutdown(ends[0], SHUT_WR);
        }
    }
    close(ends[0]);
    text_append(replies, "", 0);
}

/* Check the HTTP/1.1 reply at `at`. Return the end of the reply. */
static size_t check_reply(const text_bytes *all, size_t at) {
    static const int meant[] = { 100, 200, 204, 400, 403, 404, 405, 411, 413, 414, 415, 421, 429, 431, 501, 505 };
    const uint8_t *data = (const uint8_t *)all->data;
    const size_t head = find(data, all->length, at, "\r\n\r\n") + 4;
    int status = 0, known = 0;
    FUZZ_CHECK(sscanf(all->data + at, "HTTP/1.%*1[01] %d ", &status) == 1, "invalid reply: %.40s", all->data + at);
    for (size_t i = 0; i < sizeof meant / sizeof *meant; i++) known |= status == meant[i];
    FUZZ_CHECK(known && head <= all->length, "status %d", status);
    if (status == 100 || status == 204) return head;
    const size_t length_at = find(data, head, at, "Content-Length: ");
    if (length_at == head) return all->length; /* the reply is streamed, or it is the last one */
    const size_t length = (size_t)strtoul(all->data + length_at + 16, NULL, 10);
    if (length > all->length - head) return all->length; /* a reply to HEAD, or the connection is closed */
    if (find(data, head, at, "Content-Type: application/json") < head && data[head] != 'H') {
        cJSON *reply = cJSON_ParseWithLength(all->data + head, length);
        FUZZ_CHECK(reply, "invalid JSON: %.*s", (int)length, all->data + head);
        cJSON_Delete(reply);
        return head + length;
    }
    return memcmp(data + head, "HTTP/", length < 5 ? length : 5) == 0 && length ? head : head + length; /* HEAD */
}

/* ---- One input ---- */

static void end_fuzzed(void) {
    listen_stop(&fuzzed);
    MHD_stop_daemon(fuzzed_daemon);
    requests_end(&fuzzed);
    backends_end(&fuzzed);
    backend_free(fuzzed.backend);
    setup_free(fuzzed.setup);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    static const char *const words[] = { "moe-server", "-m",    "models/en-de-fr-es.bin",
                                         "--port",     "0",     "--threads",
                                         "1",          "--set", "beam=2;rerank=0",
                                         "--max-body", "4",     "--max-texts",
                                         "6",          "-q" };
    enum { N = sizeof words / sizeof *words };
    char *arguments[N + 1] = { NULL };
    (void)argc, (void)argv;
    for (int i = 0; i < N; i++) arguments[i] = fuzz_word(words[i]);
    setup *u = NULL;
    reading_begin();
    if (program_begin("moe-server") >= 0 || setup_read(NULL, N, arguments, &u) >= 0) abort();
    fuzzed.setup = u;
    if (backend_open(&fuzzed, &u->options, &fuzzed.backend) >= 0) abort();
    if (!(fuzzed_daemon = http_start(&fuzzed)) || backend_start(fuzzed.backend) >= 0) abort();
    atexit(end_fuzzed);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static text_bytes replies, first, again;
    uint64_t r = fuzz_hash(size, data, size);
    if (!first.length) exchange(morning, sizeof morning - 1, 1, &first);
    exchange(data, size, 0, &replies);
    for (size_t at = 0; at < replies.length;) at = check_reply(&replies, at);
    if (!fuzz_one_in(&r, 16)) return 0;
    exchange(morning, sizeof morning - 1, 1, &again);
    const size_t body = find((const uint8_t *)first.data, first.length, 0, "\r\n\r\n");
    FUZZ_CHECK(again.length == first.length && memcmp(again.data + body, first.data + body, first.length - body) == 0,
               "the reply was %s, now is %s", first.data, again.data);
    return 0;
}
