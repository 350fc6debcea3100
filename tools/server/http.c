/* http.c - handle connections: limits, keys, replies.
 *
 * Contents
 *   1. Limits     check rates, keys and quotas
 *   2. Replies
 *   3. Requests   receive requests in libmicrohttpd callbacks
 *   4. Connections   accept and close connections
 */
#define _GNU_SOURCE      /* getaddrinfo on Linux */
#define _DARWIN_C_SOURCE /* getaddrinfo on macOS */

#include "tools/server/server.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#ifdef __APPLE__
#include <sys/random.h> /* getentropy */
#endif
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* ==== 1. Limits ========================================================================================= */

static address peer_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    return address_of(info ? info->client_addr : NULL);
}

static int is_proxy(const server *s, const address *a) {
    return network_has(s->setup->options.proxies, s->setup->options.n_proxies, a);
}

/* Join the values of all X-Forwarded-For headers into one list. */
static enum MHD_Result take_forwarded(void *closure, enum MHD_ValueKind kind, const char *name, const char *value) {
    text_bytes *list = closure;
    (void)kind;
    if (!value || strcasecmp(name, "X-Forwarded-For") != 0) return MHD_YES;
    text_append(list, ",", 1);
    text_append_string(list, value);
    return MHD_YES;
}

/* Return the client's address: the forwarded address if the peer is a trusted proxy, else the peer's address. */
static address address_of_client(const server *s, struct MHD_Connection *connection, address found) {
    if (!is_proxy(s, &found)) return found;
    text_bytes list = { 0 };
    MHD_get_connection_values(connection, MHD_HEADER_KIND, take_forwarded, &list);
    if (!list.failed && list.length)
        found =
            address_forwarded(s->setup->options.proxies, s->setup->options.n_proxies, &found, list.data, list.length);
    text_bytes_free(&list);
    return found;
}

int http_is_proxied(const server *s, const request *req) { return is_proxy(s, &req->peer); }

/* Return the set of counters for an address. The salt prevents clients from choosing addresses that collide. */
static rate *rates_of(server *s, uint64_t key) {
    uint64_t h = key ^ s->salt; /* hash with two rounds of splitmix64's finaliser */
    for (int i = 0; i < 2; i++) {
        h = (h ^ h >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        h = (h ^ h >> 27) * UINT64_C(0x94d049bb133111eb);
        h ^= h >> 31 ^ s->salt;
    }
    return s->rates[h % RATES];
}

/* Count a request. Return 1 if its address exceeds the rate limit. An address that lost its counter to another address
 * is counted from 0 again, so no client can use up another client's rate. */
static int is_too_often(server *s, const request *req) {
    if (!s->setup->options.rate) return 0;
    const uint64_t key = address_key(&req->address);
    const int64_t minute = (int64_t)(program_seconds() / 60);
    pthread_mutex_lock(&s->lock);
    if (s->minute != minute) memset(s->rates, 0, sizeof s->rates), s->minute = minute;
    rate *all = rates_of(s, key), *mine = all;
    for (rate *r = all; r < all + RATE_WAYS && !(mine->n && mine->key == key); r++)
        if ((r->n && r->key == key) || r->n < mine->n) mine = r;
    if (mine->key != key) *mine = (rate){ .key = key };
    const int over = mine->n >= s->setup->options.rate;
    mine->n += !over;
    pthread_mutex_unlock(&s->lock);
    return over;
}

/* Count the connections of an address (connections_lock held). */
static int count_of(const server *s, uint64_t key) {
    int n = 0;
    for (const http_connection *c = s->connections; c; c = c->next) n += c->client == key;
    return n;
}

/* Compare a key in constant time. Return 1 if the keys are equal. */
static int same_key(const text_bytes *key, const char *given) {
    size_t length = strlen(given);
    unsigned char differs = length != key->length;
    for (size_t i = 0; i < key->length; i++) differs |= (unsigned char)(key->data[i] ^ given[length ? i % length : 0]);
    return !differs;
}

/* Return the key, or NULL if unknown. Compare all keys so that timing reveals nothing. */
static const api_key *find_key(const setup *u, const char *given) {
    const api_key *found = NULL;
    for (size_t i = 0; i < u->n_keys; i++)
        if (same_key(&u->keys[i].text, given)) found = &u->keys[i];
    return found;
}

#define UNLIMITED UINT64_C(1000000000000) /* limit to report for keys without a limit, in characters */

void quota_of(server *s, const request *req, uint64_t *characters, uint64_t *limit) {
    pthread_mutex_lock(&s->lock);
    const api_key *key = req->account;
    *characters = key ? key->usage->characters : s->characters;
    *limit = key && key->limit ? key->limit : UNLIMITED;
    pthread_mutex_unlock(&s->lock);
}

int quota_take(server *s, request *req) {
    uint64_t n = text_utf8_count(req->context.data, req->context.length);
    for (size_t i = 0; i < req->n_items; i++) n += text_utf8_count(req->items[i].text, req->items[i].length);
    pthread_mutex_lock(&s->lock);
    const api_key *key = req->account;
    const uint64_t used = key ? key->usage->characters : 0;
    const int fits = !key || !key->limit || (used <= key->limit && n <= key->limit - used);
    req->characters = fits ? n : 0;
    s->characters += req->characters;
    if (key) key->usage->characters += req->characters;
    pthread_mutex_unlock(&s->lock);
    return fits;
}

void quota_add(server *s, request *req, uint64_t n) {
    pthread_mutex_lock(&s->lock);
    req->characters += n, s->characters += n;
    if (req->account) req->account->usage->characters += n;
    pthread_mutex_unlock(&s->lock);
}

void quota_give_back(server *s, request *req) {
    pthread_mutex_lock(&s->lock);
    s->characters -= req->characters;
    if (req->account) req->account->usage->characters -= req->characters;
    req->characters = 0;
    pthread_mutex_unlock(&s->lock);
}

/* Parse "TAB LIMIT" or "TAB LIMIT TAB NAME" after a key, where LIMIT is a number of characters or "-". Return 0 if
 * invalid. */
static int read_limit(const char *text, api_key *key) {
    if (!*text) return 1;
    const size_t digits = strspn(text + 1, "0123456789");
    const char *end = text + 1 + (text[1] == '-' ? 1 : digits);
    key->limit = digits ? strtoull(text + 1, NULL, 10) : 0;
    if (text[1] != '-' && (!digits || !key->limit)) return 0;
    if (*end == '\t' && end[1] && !strchr(end + 1, '\t')) text_append_string(&key->name, end + 1);
    return !*end || key->name.length;
}

static int key_error(const setup *u, size_t line, const char *message) {
    program_error("%s: line %zu: %s", u->options.keys, line, message);
    return EXIT_USAGE;
}

/* Return the key's usage from an earlier setup, or a new struct; NULL if out of memory. */
static key_usage *usage_of(const setup *u, api_key *key) {
    for (u = u->previous; u; u = u->previous)
        for (size_t i = 0; i < u->n_keys; i++)
            if (same_key(&u->keys[i].text, key->text.data)) return u->keys[i].usage;
    key->first = 1;
    return calloc(1, sizeof(key_usage));
}

/* Add the key on a line. Skip comments and empty lines: an empty key would admit everyone. Return -1, or an exit
 * status after an error message. */
static int take_key(setup *u, char *line, size_t size, size_t number) {
    if (memchr(line, 0, size)) return key_error(u, number, "contains a NUL byte");
    line[strcspn(line, "\r\n")] = 0;
    if (number == 1 && strncmp(line, "\xEF\xBB\xBF", 3) == 0) line += 3; /* byte order mark */
    const size_t length = strcspn(line, "\t"), blanks = strspn(line, " \t");
    if (!line[blanks] || line[blanks] == '#') return -1;
    if (length >= sizeof((request *)0)->key) return key_error(u, number, "key longer than 131 bytes");
    if (!length || memchr(line, ' ', length))
        return key_error(u, number, "keys cannot contain spaces; separate the limit with a TAB");
    api_key key = { .line = number }, *more = realloc(u->keys, (u->n_keys + 1) * sizeof *more);
    if (more) u->keys = more;
    text_append(&key.text, line, length);
    const int good = read_limit(line + length, &key);
    if (!key.name.length) text_printf(&key.name, "line %zu", number);
    if (more && !key.text.failed && !key.name.failed) key.usage = usage_of(u, &key);
    if (!key.usage) {
        text_bytes_free(&key.text), text_bytes_free(&key.name);
        return program_error("%s: out of memory", u->options.keys), EXIT_MODEL;
    }
    for (size_t i = 0; i < u->n_keys; i++)
        if (same_key(&u->keys[i].text, key.text.data)) key.line = u->keys[i].line;
    u->keys[u->n_keys++] = key;
    if (!good) return key_error(u, number, "expected KEY TAB LIMIT TAB NAME, where LIMIT is a number of characters");
    if (key.line == number) return -1;
    return program_error("%s: line %zu: the key is already on line %zu", u->options.keys, number, key.line), EXIT_USAGE;
}

int http_read_keys(setup *u) {
    if (!u->options.keys) return -1;
    FILE *file = fopen(u->options.keys, "r");
    if (!file) return program_error("%s: %s", u->options.keys, strerror(errno)), EXIT_INPUT_OUTPUT;
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    int status = -1;
    for (size_t number = 1; status < 0 && (length = getline(&line, &capacity, file)) >= 0; number++)
        status = take_key(u, line, (size_t)length, number);
    if (status < 0 && !feof(file)) { /* I/O error or out of memory */
        program_error("%s: %s", u->options.keys, strerror(errno));
        status = EXIT_INPUT_OUTPUT;
    }
    free(line);
    fclose(file);
    if (status >= 0 || u->n_keys) return status;
    return program_error("%s: the file contains no keys", u->options.keys), EXIT_USAGE;
}

/* ==== 2. Replies ======================================================================================== */

enum { LISTED_TEXTS = 100 }; /* maximum number of texts in X-Untranslated */

/* Add the number of untranslated texts or segments and the indices of their texts, e.g. `2; texts="0,5"`. */
static void add_untranslated(const request *req, struct MHD_Response *r) {
    text_bytes value = { 0 };
    size_t n_listed = 0, previous = 0;
    text_printf(&value, "%zu; texts=\"", req->untranslated);
    for (size_t i = 0; i < req->n_items && n_listed < LISTED_TEXTS; i++) {
        const size_t at = req->markup ? req->items[i].page : i;
        if (!req->items[i].untranslated || (n_listed && at == previous)) continue;
        text_printf(&value, n_listed++ ? ",%zu" : "%zu", previous = at);
    }
    text_append_string(&value, "\"");
    if (!value.failed) MHD_add_response_header(r, "X-Untranslated", value.data);
    text_bytes_free(&value);
}

enum MHD_Result send_response(server *s, request *req, unsigned status, const char *type, struct MHD_Response *r) {
    char version[64];
    if (!r) return MHD_NO;
    MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    snprintf(version, sizeof version, "moe-server/%s", moetext_version());
    MHD_add_response_header(r, MHD_HTTP_HEADER_SERVER, version);
    hosts_answer(s, req, r);
    if (!req->route && req->allow) MHD_add_response_header(r, MHD_HTTP_HEADER_ALLOW, req->allow);
    if (req->redirect && status == MHD_HTTP_PERMANENT_REDIRECT) {
        text_bytes to = { 0 };
        text_printf(&to, "%s/", s->setup->options.prefix);
        if (!to.failed) MHD_add_response_header(r, MHD_HTTP_HEADER_LOCATION, to.data);
        text_bytes_free(&to);
    }
    if (req->refused || s->draining) /* the start of the next request is unknown, or another server takes over */
        MHD_add_response_header(r, MHD_HTTP_HEADER_CONNECTION, "close");
    if (status == MHD_HTTP_OK && !req->stream && req->untranslated) add_untranslated(req, r);
    if (status == MHD_HTTP_TOO_MANY_REQUESTS) MHD_add_response_header(r, MHD_HTTP_HEADER_RETRY_AFTER, "5");
    enum MHD_Result result = MHD_queue_response(req->connection, status, r);
    MHD_destroy_response(r);
    double seconds = program_seconds() - req->begin;
    req->status = status;
    pthread_mutex_lock(&s->lock);
    s->responses[status < 600 ? status : 599]++;
    static const double bounds[] = { 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30 };
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) s->seconds_below[i] += seconds <= bounds[i];
    s->seconds_count++, s->seconds_sum += seconds;
    pthread_mutex_unlock(&s->lock);
    return result;
}

enum MHD_Result send_bytes(server *s, request *req, unsigned status, const char *type) {
    const text_bytes bytes = req->out;
    if (bytes.failed) return MHD_NO;
    req->out = (text_bytes){ 0 };
    req->sent = bytes.length;
    http_answered(s, req, bytes.length);
    return send_response(s, req, status, type,
                         MHD_create_response_from_buffer(bytes.length, bytes.data, MHD_RESPMEM_MUST_FREE));
}

enum MHD_Result send_json(server *s, request *req) {
    text_append(&req->out, "\n", 1);
    return send_bytes(s, req, MHD_HTTP_OK, "application/json");
}

enum MHD_Result send_error(server *s, request *req, unsigned status, const char *message) {
    json j = { .out = &req->out };
    const dialect *d = req->errors;
    text_clear(&req->out);
    json_open(&j, NULL, '{');
    if (d && d->put_error) d->put_error(req, &j, message, status);
    else json_clean(&j, d && d->error ? d->error : "error", message, strlen(message));
    if (d && d->put_finished && req->cut == MHD_HTTP_GATEWAY_TIMEOUT) d->put_finished(req, &j);
    json_close(&j, '}');
    text_append(&req->out, "\n", 1);
    return send_bytes(s, req, status, "application/json");
}

/* ==== 3. Requests ======================================================================================= */

/* Return 1 if a route handles a path. */
static int leads_to(const route *r, const char *path) {
    const size_t n = strlen(r->path);
    return n > 1 && r->path[n - 1] == '/' ? strncmp(path, r->path, n) == 0 : strcmp(path, r->path) == 0;
}

/* Return the route of a request, or NULL after setting *allow to the path's methods (NULL if the path is unknown). */
static const route *find_route(const server *s, const char *method, const char *path, const char **allow) {
    static const char *const methods[] = { NULL, "GET, HEAD, OPTIONS", "POST, OPTIONS", "GET, HEAD, POST, OPTIONS" };
    unsigned known = 0;
    if (strcmp(method, "HEAD") == 0) method = "GET";
    for (const route *const *table = s->interfaces; *table; table++)
        for (const route *r = *table; r->method; r++) {
            if (!leads_to(r, path)) continue;
            if (strcmp(method, r->method) == 0) return r;
            known |= strcmp(r->method, "GET") == 0 ? 1 : 2;
        }
    *allow = methods[known];
    return NULL;
}

/* Return the error format for a path: that of the first route in the same folder, such as /v1/. */
static const dialect *errors_of(const server *s, const char *path) {
    if (!path[0]) return NULL;
    const size_t n = strcspn(path + 1, "/") + 2;
    for (const route *const *table = s->interfaces; *table; table++)
        for (const route *r = *table; r->method; r++)
            if (strncmp(path, r->path, n) == 0 && r->path[n - 1] == '/') return r->dialect;
    return NULL;
}

/* Explain why a path is not found. */
static const char *why_unknown(const char *path) {
    static const char *const missing[][2] = {
        { "/v1/", "not found: of OpenAI's API, this server supports POST /v1/chat/completions and GET /v1/models" },
        { "/api/", "not found: of Ollama's API, this server supports chat, generate, tags, show and version" },
        { "/v2/document", "documents are not supported: use moe-documents, or POST /translate_file for text and HTML" },
        { "/v2/glossar", "glossaries are not stored: send terms as the object glossary, or use --set glossary=FILE" },
        { "/v3/glossar", "glossaries are not stored: send terms as the object glossary, or use --set glossary=FILE" },
        { "/v2/", "not found: of DeepL's API, this server supports translate, languages and usage" },
    };
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++)
        if (strncmp(path, missing[i][0], strlen(missing[i][0])) == 0) return missing[i][1];
    return "not found";
}

/* Remove --url-prefix from a path, unless a proxy already has. */
static const char *local_path(const server *s, const char *url) {
    const size_t n = strlen(s->setup->options.prefix);
    return strncmp(url, s->setup->options.prefix, n) == 0 && (!url[n] || url[n] == '/') ? url + n : url;
}

/* Return 1 for libmicrohttpd 0.9.75 and 0.9.76, which unfold lines, accept a lone LF as a line end and truncate
 * values at a NUL even in strict mode (Debian 12). They split a request in place, so the addresses of its parts show
 * whether anything other than CR LF separated the parts. Later versions refuse such requests. */
static int cut_in_place(void) {
    const char *version = MHD_get_version();
    return strcmp(version, "0.9.75") == 0 || strcmp(version, "0.9.76") == 0;
}

/* Counts of headers that determine a request's end and host; `next` is the next header's expected address or NULL. */
typedef struct framing {
    int hosts, lengths, codings, unknown;
    const char *next;
} framing;

static enum MHD_Result take_header(void *closure, enum MHD_ValueKind kind, const char *name, const char *value) {
    framing *f = closure;
    (void)kind;
    f->unknown |= strpbrk(name, " \t") || (value && strchr(value, '\r')); /* for example "Host : x" */
    if (f->next && value) {
        f->unknown |= name != f->next;
        f->next = value + strlen(value) + 2;
    }
    f->hosts += strcasecmp(name, MHD_HTTP_HEADER_HOST) == 0;
    f->lengths += strcasecmp(name, MHD_HTTP_HEADER_CONTENT_LENGTH) == 0;
    if (strcasecmp(name, MHD_HTTP_HEADER_TRANSFER_ENCODING) != 0) return MHD_YES;
    f->codings++;
    f->unknown |= !value || strcasecmp(value, "chunked") != 0;
    return MHD_YES;
}

/* Return why another server might parse these headers as a different request, or NULL. libmicrohttpd's strict mode does
 * not cover all cases. */
static const char *ambiguous(struct MHD_Connection *connection, const char *url, const char *method,
                             const char *version) {
    framing f = { .next = cut_in_place() ? version + strlen(version) + 2 : NULL };
    MHD_get_connection_values(connection, MHD_HEADER_KIND, take_header, &f);
    if (f.next) {
        const union MHD_ConnectionInfo *i =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
        f.unknown |= method + strlen(method) + 1 != url || (i && f.next + 2 != method + i->header_size);
    }
    if (f.hosts > 1 || (!f.hosts && strcmp(version, MHD_HTTP_VERSION_1_0) != 0))
        return "exactly one Host header is required";
    if (f.lengths > 1) return "multiple Content-Length headers";
    if (f.lengths && f.codings) return "both Content-Length and Transfer-Encoding";
    if (f.codings > 1 || f.unknown) return "malformed header";
    if (f.codings && strcmp(version, MHD_HTTP_VERSION_1_0) == 0) return "Transfer-Encoding requires HTTP/1.1";
    return NULL;
}

static http_connection *connection_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

/* Set the deadline for receiving a request. During the request, a trusted proxy's connection counts for the client that
 * the proxy names. Return 0 if this client has too many connections. */
static int connection_receives(server *s, const request *req) {
    http_connection *c = connection_of(req->connection);
    if (!c) return 1;
    pthread_mutex_lock(&s->connections_lock);
    c->until = req->begin + s->setup->options.read_timeout, c->idle = 0;
    const uint64_t key = address_key(&req->address);
    const int proxy = c->peer == ADDRESS_NOBODY, full = proxy && count_of(s, key) >= s->setup->options.max_address;
    if (proxy) c->client = key;
    pthread_mutex_unlock(&s->connections_lock);
    return !full;
}

/* Clear a received request's deadline or, if `done` is 1, set the next one. Return 1 if the deadline was missed. */
static int connection_received(server *s, struct MHD_Connection *connection, int done) {
    http_connection *c = connection_of(connection);
    if (!c) return 0;
    pthread_mutex_lock(&s->connections_lock);
    c->until = done ? program_seconds() + s->setup->options.read_timeout : 0;
    if (done) c->client = c->peer, c->idle = 1;
    const int slow = c->slow;
    pthread_mutex_unlock(&s->connections_lock);
    return slow;
}

void http_answered(server *s, const request *req, size_t bytes) {
    http_connection *c = connection_of(req->connection);
    if (!c) return;
    pthread_mutex_lock(&s->connections_lock);
    if (c->until <= 0) c->until = program_seconds() + s->setup->options.read_timeout * (1 + (double)(bytes >> 20));
    pthread_mutex_unlock(&s->connections_lock);
}

size_t http_connections(server *s, int busy) {
    size_t n = 0;
    pthread_mutex_lock(&s->connections_lock);
    for (const http_connection *c = s->connections; c; c = c->next) n += !busy || !c->idle;
    pthread_mutex_unlock(&s->connections_lock);
    return n;
}

/* Count the memory of a body before it is allocated. Return 0 if all bodies would exceed the limit, or if this client's
 * bodies would exceed the memory left free. k greedy clients get 1/(k + 1) of the limit each; the rest remains free. */
static int body_count(server *s, request *req, size_t bytes) {
    const size_t most = 1024 * (size_t)s->setup->options.max_bodies;
    const uint64_t key = address_key(&req->address);
    http_connection *mine = connection_of(req->connection);
    pthread_mutex_lock(&s->connections_lock);
    size_t own = bytes;
    const size_t all = s->body_bytes - req->counted + bytes;
    for (const http_connection *c = bytes > req->counted ? s->connections : NULL; c; c = c->next)
        if (c->client == key && c != mine) own += c->body;
    const int fits = bytes <= req->counted || (all <= most && own <= most - all);
    if (fits) {
        s->body_bytes = all, req->counted = bytes;
        if (mine) mine->body = bytes;
    }
    pthread_mutex_unlock(&s->connections_lock);
    return fits;
}

/* Free the body of a request and subtract its memory from the total. */
static void body_drop(server *s, request *req) {
    text_bytes_free(&req->body);
    req->body = (text_bytes){ 0 };
    body_count(s, req, 0);
}

/* Return the size limit of a body in bytes. */
static size_t largest_body(const options *o) {
    const size_t one = 1024 * (size_t)o->max_body, share = 512 * (size_t)o->max_bodies - 1;
    return one < share ? one : share;
}

/* Grow the body to at least `bytes`, counting the memory first. */
static void body_grow(server *s, request *req, size_t bytes) {
    const size_t wanted = req->body.capacity + req->body.capacity / 2, most = largest_body(&s->setup->options) + 1;
    const size_t size = wanted > most ? most : wanted > bytes ? wanted : bytes + 1;
    if (size <= req->body.capacity || req->body.failed) return;
    req->too_many = !body_count(s, req, size);
    if (req->too_many) return;
    char *data = realloc(req->body.data, size);
    req->body.failed = !data;
    if (data) req->body.data = data, req->body.capacity = size;
}

static void take_body(server *s, request *req, const char *data, size_t size) {
    req->read += size;
    if (!req->route || req->too_large || req->too_many || req->body.failed) return;
    req->too_large = req->body.length + size > largest_body(&s->setup->options);
    if (!req->too_large && req->body.length + size >= req->body.capacity) body_grow(s, req, req->body.length + size);
    if (req->too_large || req->too_many) body_drop(s, req);
    else text_append(&req->body, data, size);
}

/* Read the key from "Authorization: Bearer KEY" or "DeepL-Auth-Key KEY" unless the body contains a key. */
static void take_authorization(request *req) {
    static const char *const schemes[] = { "Bearer ", "DeepL-Auth-Key " };
    const char *given = MHD_lookup_connection_value(req->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
    for (size_t i = 0; given && !req->key[0] && i < sizeof schemes / sizeof *schemes; i++) {
        const size_t n = strlen(schemes[i]);
        if (strncasecmp(given, schemes[i], n) == 0) take_word(req->key, sizeof req->key, given + n, strlen(given + n));
    }
}

/* Answer a complete request. */
static enum MHD_Result answer_whole(server *s, request *req) {
    const route *to = req->route;
    if (!(to->flags & ALWAYS) && is_too_often(s, req))
        return send_error(s, req, MHD_HTTP_TOO_MANY_REQUESTS, "too many requests; wait a minute");
    if (to->flags & NEEDS_BODY) read_body(req);
    body_drop(s, req);
    take_authorization(req);
    pthread_mutex_lock(&s->lock);
    req->backend = s->backend, req->backend->holders++;
    pthread_mutex_unlock(&s->lock);
    const setup *u = s->setup;
    req->account = find_key(u, req->key);
    if (req->account) {
        pthread_mutex_lock(&s->lock);
        req->account->usage->requests++;
        pthread_mutex_unlock(&s->lock);
    }
    if (!req->refusal && (to->flags & NEEDS_KEY) && u->n_keys && !req->account)
        refuse(req, to->dialect && to->dialect->denied ? to->dialect->denied : MHD_HTTP_FORBIDDEN, "Invalid API key");
    return req->refusal ? send_error(s, req, req->refusal, req->why) : to->answer(s, req);
}

/* Create a request before libmicrohttpd parses its URL. Version 0.9.75 ends the path at %00 and never answers a URL
 * with arguments that exceed the memory of a connection, so cut such arguments off. */
static void *on_url(void *closure, const char *url, struct MHD_Connection *connection) {
    enum { MOST_ARGUMENTS = 500 };
    char *query = url ? strchr((char *)(uintptr_t)url, '?') : NULL;
    size_t n = query != NULL;
    request *req = calloc(1, sizeof *req);
    (void)closure, (void)connection;
    if (!req) return NULL;
    for (const char *at = query; at && (at = strchr(at, '&')); at++) n++;
    if (url && strstr(url, "%00")) req->refused = "the URL contains %00";
    if (n <= MOST_ARGUMENTS) return req;
    req->refused = "the URL has more than 500 arguments; send them in the body";
    return query[1] = 0, req;
}

/* Check the headers of a new request. */
static enum MHD_Result begin_request(server *s, request *req, const char *url, const char *method,
                                     const char *version) {
    req->begin = program_seconds();
    req->peer = peer_of(req->connection);
    req->address = address_of_client(s, req->connection, req->peer);
    const char *path = local_path(s, url);
    req->redirect = !path[0];
    req->route = find_route(s, method, path, &req->allow);
    req->errors = req->route ? req->route->dialect : errors_of(s, path);
    if (req->route) { /* the request's path may be longer than the route's */
        const char *rest = path + strlen(req->route->path);
        take_word(req->fetched, sizeof req->fetched, rest, strlen(rest));
    }
    if (s->log) { /* log neither file names nor more than 200 bytes */
        req->path = strndup(req->route ? req->route->path : path, 200);
        snprintf(req->method, sizeof req->method, "%s", method);
    }
    const int welcome = connection_receives(s, req);
    const char *why = ambiguous(req->connection, url, method, version);
    if (!req->refused) req->refused = why;
    const unsigned status = req->refused ? MHD_HTTP_BAD_REQUEST : hosts_check(s, req, method);
    if (status) return send_error(s, req, status, req->refused);
    if (welcome || (req->route && req->route->flags & ALWAYS)) return MHD_YES;
    req->refused = "too many connections from this address";
    return send_error(s, req, MHD_HTTP_TOO_MANY_REQUESTS, req->refused);
}

static enum MHD_Result on_request(void *closure, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *data, size_t *size, void **mine) {
    server *s = closure;
    request *req = *mine;
    if (!req) return MHD_NO; /* on_url ran out of memory */
    if (!req->server) {
        req->server = s, req->connection = connection;
        return begin_request(s, req, url, method, version);
    }
    if (*size) {
        take_body(s, req, data, *size);
        *size = 0;
        return MHD_YES;
    }
    connection_received(s, connection, 0);
    if (!req->route && req->allow && strcmp(method, "OPTIONS") == 0) {
        text_append(&req->out, "", 0);
        return send_bytes(s, req, MHD_HTTP_NO_CONTENT, "text/plain");
    }
    if (!req->route && req->allow) return send_error(s, req, MHD_HTTP_METHOD_NOT_ALLOWED, "method not allowed");
    if (req->redirect) {
        text_append(&req->out, "", 0);
        return send_bytes(s, req, MHD_HTTP_PERMANENT_REDIRECT, "text/plain");
    }
    if (!req->route) return send_error(s, req, MHD_HTTP_NOT_FOUND, why_unknown(local_path(s, url)));
    if (req->body.failed) return send_error(s, req, MHD_HTTP_SERVICE_UNAVAILABLE, "out of memory; try again");
    if (req->too_large) return send_error(s, req, MHD_HTTP_CONTENT_TOO_LARGE, "the request is too large");
    if (req->too_many)
        return send_error(s, req, MHD_HTTP_SERVICE_UNAVAILABLE, "too many concurrent requests; try again");
    return req->state == REQUEST_READING ? answer_whole(s, req) : req->route->answer(s, req);
}

/* Return the status that explains why the answer to a request is incomplete, or 0. */
static unsigned why_cut(const request *req, enum MHD_RequestTerminationCode why, int slow) {
    const unsigned cut = req->cut;
    if (cut) return cut;
    switch (why) {
    case MHD_REQUEST_TERMINATED_COMPLETED_OK: return 0;
    case MHD_REQUEST_TERMINATED_TIMEOUT_REACHED: return MHD_HTTP_REQUEST_TIMEOUT;
    case MHD_REQUEST_TERMINATED_DAEMON_SHUTDOWN: return MHD_HTTP_SERVICE_UNAVAILABLE;
    default: return slow ? MHD_HTTP_REQUEST_TIMEOUT : CLIENT_GONE;
    }
}

/* Callback: a request is done, or its connection was closed. */
static void on_end(void *closure, struct MHD_Connection *connection, void **mine, enum MHD_RequestTerminationCode why) {
    server *s = closure;
    const int slow = connection_received(s, connection, 1);
    request *req = *mine;
    *mine = NULL;
    if (!req || !req->server) { /* libmicrohttpd refused the headers */
        free(req);
        return;
    }
    body_count(s, req, 0);
    log_write(s, req, why_cut(req, why, slow));
    free(req->path);
    req->path = NULL;
    requests_leave(s, req);
}

/* ==== 4. Connections =========================================================================================== */

/* Use the strictest level that accepts every conforming client. */
#if MHD_VERSION >= 0x00097701
#define STRICT MHD_OPTION_CLIENT_DISCIPLINE_LVL, 2
#else
#define STRICT MHD_OPTION_STRICT_FOR_CLIENT, 1
#endif

/* Limit the connections per address, except for trusted proxies. */
static enum MHD_Result on_accept(void *closure, const struct sockaddr *from, socklen_t size) {
    server *s = closure;
    const address peer = address_of(from);
    (void)size;
    if (is_proxy(s, &peer)) return MHD_YES;
    pthread_mutex_lock(&s->connections_lock);
    const int n = count_of(s, address_key(&peer));
    pthread_mutex_unlock(&s->connections_lock);
    return n >= s->setup->options.max_address ? MHD_NO : MHD_YES;
}

static void on_connection(void *closure, struct MHD_Connection *connection, void **mine,
                          enum MHD_ConnectionNotificationCode code) {
    server *s = closure;
    http_connection *c = code == MHD_CONNECTION_NOTIFY_STARTED ? calloc(1, sizeof *c) : *mine;
    if (!c) return;
    pthread_mutex_lock(&s->connections_lock);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const address peer = peer_of(connection);
        c->peer = c->client = is_proxy(s, &peer) ? ADDRESS_NOBODY : address_key(&peer);
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        c->socket = info ? info->connect_fd : MHD_INVALID_SOCKET;
        c->until = program_seconds() + s->setup->options.read_timeout;
        c->next = s->connections;
        if (c->next) c->next->previous = c;
        s->connections = c, s->n_connections++;
        *mine = c;
    } else {
        s->n_connections--;
        if (c->previous) c->previous->next = c->next;
        else s->connections = c->next;
        if (c->next) c->next->previous = c->previous;
        *mine = NULL;
    }
    pthread_mutex_unlock(&s->connections_lock);
    if (code != MHD_CONNECTION_NOTIFY_STARTED) free(c);
}

/* libmicrohttpd's own timeout restarts with every byte, so a slow sender would never reach it. */
void http_end_slow(server *s) {
    const double now = program_seconds();
    pthread_mutex_lock(&s->connections_lock);
    for (http_connection *c = s->connections; c; c = c->next)
        if (c->until > 0 && now > c->until) shutdown(c->socket, SHUT_RDWR), c->until = 0, c->slow = 1;
    pthread_mutex_unlock(&s->connections_lock);
}

/* Return a random salt, or one that is at least hard for clients to guess. */
static uint64_t new_salt(void) {
    uint64_t salt = 0;
    struct timespec now = { 0 };
    if (!getentropy(&salt, sizeof salt)) return salt;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_nsec << 32 ^ (uint64_t)now.tv_sec ^ (uint64_t)getpid() << 48 ^ (uintptr_t)&salt;
}

struct MHD_Daemon *http_start(server *s) {
    s->salt = new_salt();
    if (!listen_open(s)) return NULL;
    errno = 0;
    struct MHD_Daemon *daemon =
        MHD_start_daemon(MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD | MHD_ALLOW_SUSPEND_RESUME |
                             MHD_USE_NO_LISTEN_SOCKET,
                         0, on_accept, s, on_request, s, MHD_OPTION_NOTIFY_COMPLETED, on_end, s,
                         MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)30, MHD_OPTION_THREAD_POOL_SIZE, (unsigned)2,
                         MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)(64 << 10), STRICT, MHD_OPTION_CONNECTION_LIMIT,
                         (unsigned)s->setup->options.max_connections + 64, MHD_OPTION_NOTIFY_CONNECTION, on_connection,
                         s, MHD_OPTION_URI_LOG_CALLBACK, on_url, s, MHD_OPTION_END);
    if (!daemon) program_error("cannot serve HTTP: %s", errno ? strerror(errno) : "out of threads or memory");
    if (daemon && listen_start(s, daemon)) return daemon;
    if (daemon) MHD_stop_daemon(daemon);
    listen_stop(s);
    return NULL;
}
