/* http.c - connections: addresses, limits, keys, what is sent.
 *
 * Contents
 *   1. Guards     keys, rates
 *   2. Replies    what is sent, and counted
 *   3. Requests   as libmicrohttpd hands them over
 *   4. The port
 */
#define _GNU_SOURCE      /* getaddrinfo on Linux */
#define _DARWIN_C_SOURCE /* and on macOS         */

#include "tools/server/server.h"

#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#ifdef __APPLE__
#include <sys/random.h> /* getentropy */
#endif
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static server *the_server(void *closure) { return closure; }

/* ==== 1. Guards ========================================================================================= */

static address peer_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    return address_of(info ? info->client_addr : NULL);
}

static int is_proxy(const server *s, const address *a) {
    return network_has(s->options.proxies, s->options.n_proxies, a);
}

/* Header fields of one name are one list. */
static enum MHD_Result take_forwarded(void *closure, enum MHD_ValueKind kind, const char *name, const char *value) {
    text_bytes *list = closure;
    (void)kind;
    if (!value || strcasecmp(name, "X-Forwarded-For") != 0) return MHD_YES;
    text_append(list, ",", 1);
    text_append_string(list, value);
    return MHD_YES;
}

/* Who asks: the other side, or whom it asks for. */
static address client_of(const server *s, struct MHD_Connection *connection) {
    address client = peer_of(connection);
    if (!is_proxy(s, &client)) return client;
    text_bytes list = { 0 };
    MHD_get_connection_values(connection, MHD_HEADER_KIND, take_forwarded, &list);
    if (!list.failed && list.length)
        client = address_forwarded(s->options.proxies, s->options.n_proxies, &client, list.data, list.length);
    text_bytes_free(&list);
    return client;
}

/* Where those are that the count of an address may be among: nobody can choose addresses that share it with another. */
static rate *rates_of(server *s, uint64_t key) {
    uint64_t h = key ^ s->salt; /* splitmix64's end, twice */
    for (int i = 0; i < 2; i++) {
        h = (h ^ h >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        h = (h ^ h >> 27) * UINT64_C(0x94d049bb133111eb);
        h ^= h >> 31 ^ s->salt;
    }
    return s->rates[h % RATES];
}

/* 1 if this client has asked often enough in this minute. An address whose place is needed by another starts anew: what
 * others do never makes it too often. */
static int too_often(server *s, const ask *a) {
    if (!s->options.rate) return 0;
    const uint64_t key = address_key(&a->client);
    const int64_t minute = (int64_t)(program_seconds() / 60);
    pthread_mutex_lock(&s->lock);
    if (s->minute != minute) memset(s->rates, 0, sizeof s->rates), s->minute = minute;
    rate *all = rates_of(s, key), *mine = all;
    for (rate *r = all; r < all + RATE_WAYS; r++) {
        if (r->n && r->key == key) {
            mine = r;
            break;
        }
        if (r->n < mine->n) mine = r;
    }
    if (mine->key != key) *mine = (rate){ .key = key };
    const int over = mine->n >= s->options.rate;
    mine->n += !over;
    pthread_mutex_unlock(&s->lock);
    return over;
}

/* With the doors locked: connections that are held by or for an address. */
static int count_of(const server *s, uint64_t key) {
    int n = 0;
    for (const visitor *v = s->visitors; v; v = v->next) n += v->client == key;
    return n;
}

/* Compares without telling by its time how much of a key is right. */
static int same_key(const text_bytes *key, const char *given) {
    size_t length = strlen(given);
    unsigned char differs = length != key->length;
    for (size_t i = 0; i < key->length; i++) differs |= (unsigned char)(key->data[i] ^ given[length ? i % length : 0]);
    return !differs;
}

/* Which key it is, from 1; 0: none. All are looked at. */
static size_t key_number(const server *s, const char *given) {
    size_t number = 0;
    for (size_t i = 0; i < s->n_keys; i++)
        if (same_key(&s->keys[i].text, given)) number = i + 1;
    return number;
}

enum { QUOTA_NONE = 1000000000 }; /* thousands of characters: what is said where there is no limit */

void quota_of(server *s, const ask *a, uint64_t *characters, uint64_t *limit) {
    pthread_mutex_lock(&s->lock);
    const api_key *key = a->known ? &s->keys[a->known - 1] : NULL;
    *characters = key ? key->characters : s->characters;
    *limit = key && key->limit ? key->limit : (uint64_t)1000 * QUOTA_NONE;
    pthread_mutex_unlock(&s->lock);
}

int quota_take(server *s, ask *a) {
    uint64_t n = 0;
    for (size_t i = 0; i < a->n_items; i++) n += text_utf8_count(a->items[i].text, a->items[i].length);
    pthread_mutex_lock(&s->lock);
    api_key *key = a->known ? &s->keys[a->known - 1] : NULL;
    const int goes = !key || !key->limit || n <= key->limit - key->characters;
    a->characters = goes ? n : 0;
    s->characters += a->characters;
    if (key) key->characters += a->characters;
    pthread_mutex_unlock(&s->lock);
    return goes;
}

void quota_give_back(server *s, ask *a) {
    pthread_mutex_lock(&s->lock);
    s->characters -= a->characters;
    if (a->known) s->keys[a->known - 1].characters -= a->characters;
    pthread_mutex_unlock(&s->lock);
    a->characters = 0;
}

/* "KEY" or "KEY TAB CHARACTERS" into *key, whose text is set; 0: the number is none. */
static int read_limit(const char *line, size_t length, api_key *key) {
    const char *tab = memchr(line, '\t', length);
    char *end;
    if (!tab) return 1;
    key->text.length = (size_t)(tab - line);
    key->limit = strtoull(tab + 1, &end, 10);
    return tab > line && tab[1] >= '0' && tab[1] <= '9' && end == line + length && key->limit;
}

/* A line of the file of keys, its `number`th: -1, or a complaint and the exit status. A key that is not there as a
 * whole would be another one, and an empty one would let everybody in. */
static int take_key(server *s, const char *line, size_t size, size_t number) {
    const size_t length = strcspn(line, "\r\n");
    if (memchr(line, 0, size)) {
        program_complain("%s: line %zu: there is a NUL in it", s->options.keys, number);
        return EXIT_USAGE;
    }
    if (!length) return -1;
    if (strcspn(line, "\t\r\n") >= sizeof((ask *)0)->key) {
        program_complain("%s: line %zu: a key longer than 131 bytes", s->options.keys, number);
        return EXIT_USAGE;
    }
    api_key key = { 0 }, *more = realloc(s->keys, (s->n_keys + 1) * sizeof *more);
    if (more) s->keys = more;
    text_append(&key.text, line, length);
    if (!more || key.text.failed) {
        text_bytes_free(&key.text);
        program_complain("%s: out of memory", s->options.keys);
        return EXIT_MODEL;
    }
    const int good = read_limit(line, length, &key);
    s->keys[s->n_keys++] = key;
    if (good) return -1;
    program_complain("%s: line %zu: behind the TAB is how many characters it may have translated", s->options.keys,
                     number);
    return EXIT_USAGE;
}

int http_read_keys(server *s) {
    if (!s->options.keys) return -1;
    FILE *file = fopen(s->options.keys, "r");
    if (!file) {
        program_complain("%s: %s", s->options.keys, strerror(errno));
        return EXIT_INPUT_OUTPUT;
    }
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    int status = -1;
    for (size_t number = 1; status < 0 && (length = getline(&line, &room, file)) >= 0; number++)
        status = take_key(s, line, (size_t)length, number);
    if (status < 0 && !feof(file)) { /* or out of memory */
        program_complain("%s: %s", s->options.keys, strerror(errno));
        status = EXIT_INPUT_OUTPUT;
    }
    free(line);
    fclose(file);
    if (status < 0 && !s->n_keys) {
        program_complain("%s: there is no key in it", s->options.keys);
        status = EXIT_USAGE;
    }
    return status;
}

/* ==== 2. Replies ======================================================================================== */

enum MHD_Result send_response(server *s, ask *a, unsigned status, const char *type, struct MHD_Response *r) {
    if (!r) return MHD_NO;
    MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (s->options.origin) MHD_add_response_header(r, MHD_HTTP_HEADER_ACCESS_CONTROL_ALLOW_ORIGIN, s->options.origin);
    if (s->options.origin && a->route < 0)
        MHD_add_response_header(r, "Access-Control-Allow-Headers", "Content-Type, Authorization");
    if (a->route == -1 && a->allow) MHD_add_response_header(r, MHD_HTTP_HEADER_ALLOW, a->allow);
    if (a->refused) MHD_add_response_header(r, MHD_HTTP_HEADER_CONNECTION, "close"); /* who knows what follows */
    if (status == MHD_HTTP_TOO_MANY_REQUESTS) MHD_add_response_header(r, MHD_HTTP_HEADER_RETRY_AFTER, "5");
    enum MHD_Result result = MHD_queue_response(a->connection, status, r);
    MHD_destroy_response(r);
    double seconds = program_seconds() - a->begin;
    a->status = status;
    pthread_mutex_lock(&s->lock);
    s->requests[status / 100 < 6 ? status / 100 : 5]++;
    static const double bounds[] = { 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30 };
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) s->seconds_below[i] += seconds <= bounds[i];
    s->seconds_count++, s->seconds_sum += seconds;
    pthread_mutex_unlock(&s->lock);
    return result;
}

/* Takes over what `bytes` holds. */
enum MHD_Result send_bytes(server *s, ask *a, unsigned status, const char *type, text_bytes *bytes) {
    if (bytes->failed) {
        text_bytes_free(bytes);
        return MHD_NO;
    }
    a->sent = bytes->length;
    http_answered(s, a, bytes->length);
    return send_response(s, a, status, type,
                         MHD_create_response_from_buffer(bytes->length, bytes->data, MHD_RESPMEM_MUST_FREE));
}

enum MHD_Result send_error(server *s, ask *a, unsigned status, const char *message) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    const dialect *d = a->route >= 0 ? api_routes[a->route].speaks : NULL;
    json_open(&j, NULL, '{');
    if (d && d->put_error) d->put_error(a, &j, message, status);
    else json_clean(&j, api_error_name(a), message, strlen(message));
    json_close(&j, '}');
    text_append(&out, "\n", 1);
    return send_bytes(s, a, status, "application/json", &out);
}

/* ==== 3. Requests ======================================================================================= */

/* Whether a route is the one of a path; one that ends in / is the one of all that is in it. */
static int leads_to(const route *r, const char *path) {
    const size_t n = strlen(r->path);
    return n > 1 && r->path[n - 1] == '/' ? strncmp(path, r->path, n) == 0 : strcmp(path, r->path) == 0;
}

/* The number of the route; -1: the path is known, with other methods, which *allow names; -2: it is not. */
static int find_route(const char *method, const char *path, const char **allow) {
    static const char *const methods[] = { NULL, "GET, HEAD, OPTIONS", "POST, OPTIONS", "GET, HEAD, POST, OPTIONS" };
    unsigned known = 0;
    if (strcmp(method, "HEAD") == 0) method = "GET";
    for (int i = 0; i < (int)api_route_count; i++) {
        if (!leads_to(&api_routes[i], path)) continue;
        if (strcmp(method, api_routes[i].method) == 0) return i;
        known |= strcmp(api_routes[i].method, "GET") == 0 ? 1 : 2;
    }
    *allow = methods[known];
    return known ? -1 : -2;
}

/* libmicrohttpd 0.9.75 and 0.9.76 (Debian 12's) unfold lines, take LF for their end and what is before a NUL for a
 * value even where they are strict. They cut a request where it lies, so that the places of its parts tell whether
 * anything but CR LF was between them. Versions after them refuse all of that themselves. */
static int cut_in_place(void) {
    const char *version = MHD_get_version();
    return strcmp(version, "0.9.75") == 0 || strcmp(version, "0.9.76") == 0;
}

/* What the headers say about where a request ends, and whom it is for; where the next one has to begin, if known. */
typedef struct framing {
    int hosts, lengths, codings, unknown;
    const char *next;
} framing;

static enum MHD_Result take_header(void *closure, enum MHD_ValueKind kind, const char *name, const char *value) {
    framing *f = closure;
    (void)kind;
    f->unknown |= strpbrk(name, " \t") || (value && strchr(value, '\r')); /* "Host : x" */
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

/* Why another server might see another request in these headers; NULL: all see the same. libmicrohttpd's strict level
 * leaves some of it to us, in older versions more of it. */
static const char *ambiguous(struct MHD_Connection *connection, const char *url, const char *method,
                             const char *version) {
    framing f = { .next = cut_in_place() ? version + strlen(version) + 2 : NULL };
    MHD_get_connection_values(connection, MHD_HEADER_KIND, take_header, &f);
    if (f.next) {
        const union MHD_ConnectionInfo *i =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
        f.unknown |= method + strlen(method) + 1 != url || (i && f.next + 2 != method + i->header_size);
    }
    if (f.hosts > 1 || (!f.hosts && strcmp(version, MHD_HTTP_VERSION_1_0) != 0)) return "a request has one Host";
    if (f.lengths > 1) return "a request has one Content-Length";
    if (f.lengths && f.codings) return "a request has either Content-Length or Transfer-Encoding";
    if (f.codings > 1 || f.unknown) return "a header is not as it should be";
    return NULL;
}

static visitor *visitor_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

/* A connection has begun to send a request. A trusted proxy's is its client's for as long as that lasts: 0 if it holds
 * as many already as it may. */
static int visitor_asks(server *s, const ask *a) {
    visitor *v = visitor_of(a->connection);
    if (!v) return 1;
    pthread_mutex_lock(&s->doors);
    v->until = a->begin + s->options.read_timeout;
    const uint64_t key = address_key(&a->client);
    const int proxy = v->peer == ADDRESS_NOBODY, full = proxy && count_of(s, key) >= s->options.max_address;
    if (proxy) v->client = key;
    pthread_mutex_unlock(&s->doors);
    return !full;
}

/* It has sent it to its end; or is done with it, and may send another one. Whether it had been closed as too slow. */
static int visitor_waits(server *s, struct MHD_Connection *connection, int done) {
    visitor *v = visitor_of(connection);
    if (!v) return 0;
    pthread_mutex_lock(&s->doors);
    v->until = done ? program_seconds() + s->options.read_timeout : 0;
    if (done) v->client = v->peer;
    const int slow = v->slow;
    pthread_mutex_unlock(&s->doors);
    return slow;
}

void http_answered(server *s, const ask *a, size_t bytes) {
    visitor *v = visitor_of(a->connection);
    if (!v) return;
    pthread_mutex_lock(&s->doors);
    if (v->until <= 0) v->until = program_seconds() + s->options.read_timeout * (1 + (double)(bytes >> 20));
    pthread_mutex_unlock(&s->doors);
}

/* Counts the memory that the body of a request is going to take. 0: there would be too much of all, or more of this
 * client than is left over for others: so k clients that take all they get have a part in k + 1 each, and one part is
 * free for whoever comes. */
static int body_count(server *s, ask *a, size_t bytes) {
    const size_t most = 1024 * (size_t)s->options.max_bodies;
    const uint64_t key = address_key(&a->client);
    visitor *mine = visitor_of(a->connection);
    pthread_mutex_lock(&s->doors);
    size_t own = bytes;
    const size_t all = s->body_bytes - a->counted + bytes;
    for (const visitor *v = bytes > a->counted ? s->visitors : NULL; v; v = v->next)
        if (v->client == key && v != mine) own += v->body;
    const int goes = bytes <= a->counted || (all <= most && own <= most - all);
    if (goes) {
        s->body_bytes = all, a->counted = bytes;
        if (mine) mine->body = bytes;
    }
    pthread_mutex_unlock(&s->doors);
    return goes;
}

/* The body is in memory no longer. */
static void body_drop(server *s, ask *a) {
    text_bytes_free(&a->body);
    a->body = (text_bytes){ 0 };
    body_count(s, a, 0);
}

/* The largest body that is ever taken. */
static size_t largest_body(const options *o) {
    const size_t one = 1024 * (size_t)o->max_body, share = 512 * (size_t)o->max_bodies - 1;
    return one < share ? one : share;
}

/* Memory for a body of so many bytes, which is counted before there is any. */
static void body_grow(server *s, ask *a, size_t bytes) {
    const size_t wanted = a->body.capacity + a->body.capacity / 2, most = largest_body(&s->options) + 1;
    const size_t room = wanted > most ? most : wanted > bytes ? wanted : bytes + 1;
    if (room <= a->body.capacity || a->body.failed) return;
    if (!body_count(s, a, room)) {
        a->too_many = 1;
        return;
    }
    char *data = realloc(a->body.data, room);
    a->body.failed = !data;
    if (data) a->body.data = data, a->body.capacity = room;
}

static void take_body(server *s, ask *a, const char *data, size_t size) {
    a->read += size;
    if (a->route < 0 || a->too_large || a->too_many || a->body.failed) return;
    a->too_large = a->body.length + size > largest_body(&s->options);
    if (!a->too_large && a->body.length + size >= a->body.capacity) body_grow(s, a, a->body.length + size);
    if (a->too_large || a->too_many) body_drop(s, a);
    else text_append(&a->body, data, size);
}

/* Where the body names no key: "Authorization: Bearer KEY", as Prometheus sends it, or DeepL-Auth-Key KEY. */
static void find_key(ask *a) {
    static const char *const schemes[] = { "Bearer ", "DeepL-Auth-Key " };
    const char *given = MHD_lookup_connection_value(a->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
    for (size_t i = 0; given && !a->key[0] && i < sizeof schemes / sizeof *schemes; i++) {
        const size_t n = strlen(schemes[i]);
        if (strncasecmp(given, schemes[i], n) == 0) take_word(a->key, sizeof a->key, given + n, strlen(given + n));
    }
}

/* A request is here as a whole. */
static enum MHD_Result answer_whole(server *s, ask *a) {
    const route *to = &api_routes[a->route];
    refusal r = { 0 };
    if (!(to->flags & ALWAYS) && too_often(s, a))
        return send_error(s, a, MHD_HTTP_TOO_MANY_REQUESTS, "too many requests; wait a minute");
    if (to->flags & NEEDS_BODY) read_body(a, (size_t)s->options.max_texts, &r);
    body_count(s, a, 0);
    find_key(a);
    a->known = key_number(s, a->key);
    if (!r.status && (to->flags & NEEDS_KEY) && s->n_keys && !a->known)
        refuse(&r, to->speaks && to->speaks->put_error ? MHD_HTTP_UNAUTHORIZED : MHD_HTTP_FORBIDDEN,
               "Invalid API key%s", "");
    return r.status ? send_error(s, a, r.status, r.message) : to->answer(s, a);
}

/* Its headers are here. */
static enum MHD_Result begin_request(server *s, ask *a, const char *url, const char *method, const char *version) {
    a->begin = program_seconds();
    a->client = client_of(s, a->connection);
    a->route = find_route(method, url, &a->allow);
    if (a->route >= 0 && strlen(url) >= strlen(api_routes[a->route].path)) { /* a file's name stands behind it */
        const char *behind = url + strlen(api_routes[a->route].path);
        take_word(a->fetched, sizeof a->fetched, behind, strlen(behind));
    }
    if (s->log) { /* no file's name; of what is too long the beginning says enough */
        a->path = strndup(a->route >= 0 ? api_routes[a->route].path : url, 200);
        snprintf(a->method, sizeof a->method, "%s", method);
    }
    const int welcome = visitor_asks(s, a);
    a->refused = ambiguous(a->connection, url, method, version);
    if (a->refused) return send_error(s, a, MHD_HTTP_BAD_REQUEST, a->refused);
    if (welcome || (a->route >= 0 && api_routes[a->route].flags & ALWAYS)) return MHD_YES;
    a->refused = "too many connections of this address";
    return send_error(s, a, MHD_HTTP_TOO_MANY_REQUESTS, a->refused);
}

static enum MHD_Result on_request(void *closure, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *data, size_t *size, void **mine) {
    server *s = the_server(closure);
    ask *a = *mine;
    if (!a) {
        a = *mine = calloc(1, sizeof *a);
        if (!a) return MHD_NO;
        a->connection = connection;
        return begin_request(s, a, url, method, version);
    }
    if (*size) {
        take_body(s, a, data, *size);
        *size = 0;
        return MHD_YES;
    }
    visitor_waits(s, connection, 0);
    if (a->route == -1 && strcmp(method, "OPTIONS") == 0) {
        text_bytes none = { 0 };
        text_append(&none, "", 0);
        return send_bytes(s, a, MHD_HTTP_NO_CONTENT, "text/plain", &none);
    }
    if (a->route == -1) return send_error(s, a, MHD_HTTP_METHOD_NOT_ALLOWED, "this address has another method");
    if (a->route < 0) return send_error(s, a, MHD_HTTP_NOT_FOUND, "there is nothing at this address");
    if (a->body.failed) return send_error(s, a, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory");
    if (a->too_large) return send_error(s, a, MHD_HTTP_CONTENT_TOO_LARGE, "the request is too large");
    if (a->too_many)
        return send_error(s, a, MHD_HTTP_SERVICE_UNAVAILABLE, "too many requests are coming in; try again");
    if (a->state == ASK_WAITING && !a->stream) return MHD_YES;
    return a->state == ASK_WAITING || a->state == ASK_DONE ? api_routes[a->route].answer(s, a) : answer_whole(s, a);
}

/* The status that says why a request has no answer, or not all of it; 0: it has. */
static unsigned why_cut(server *s, const ask *a, enum MHD_RequestTerminationCode why, int slow) {
    pthread_mutex_lock(&s->lock);
    const unsigned cut = a->cut;
    pthread_mutex_unlock(&s->lock);
    if (cut) return cut;
    switch (why) {
    case MHD_REQUEST_TERMINATED_COMPLETED_OK: return 0;
    case MHD_REQUEST_TERMINATED_TIMEOUT_REACHED: return MHD_HTTP_REQUEST_TIMEOUT;
    case MHD_REQUEST_TERMINATED_DAEMON_SHUTDOWN: return MHD_HTTP_SERVICE_UNAVAILABLE;
    default: return slow ? MHD_HTTP_REQUEST_TIMEOUT : CLIENT_GONE;
    }
}

/* The connection is done with a request, or gone. */
static void on_end(void *closure, struct MHD_Connection *connection, void **mine, enum MHD_RequestTerminationCode why) {
    server *s = the_server(closure);
    const int slow = visitor_waits(s, connection, 1);
    ask *a = *mine;
    *mine = NULL;
    if (!a) return;
    body_count(s, a, 0);
    log_write(s, a, why_cut(s, a, why, slow));
    free(a->path);
    a->path = NULL;
    requests_leave(s, a);
}

/* ==== 4. The port ======================================================================================= */

/* As strict as a client that does what HTTP says it must can bear. */
#if MHD_VERSION >= 0x00097701
#define STRICT MHD_OPTION_CLIENT_DISCIPLINE_LVL, 2
#else
#define STRICT MHD_OPTION_STRICT_FOR_CLIENT, 1
#endif

/* Whether one more connection of this address is taken: as many as it likes of a trusted proxy. */
static enum MHD_Result on_accept(void *closure, const struct sockaddr *from, socklen_t size) {
    server *s = the_server(closure);
    const address peer = address_of(from);
    (void)size;
    if (is_proxy(s, &peer)) return MHD_YES;
    pthread_mutex_lock(&s->doors);
    const int n = count_of(s, address_key(&peer));
    pthread_mutex_unlock(&s->doors);
    return n >= s->options.max_address ? MHD_NO : MHD_YES;
}

static void on_connection(void *closure, struct MHD_Connection *connection, void **mine,
                          enum MHD_ConnectionNotificationCode code) {
    server *s = the_server(closure);
    visitor *v = code == MHD_CONNECTION_NOTIFY_STARTED ? calloc(1, sizeof *v) : *mine;
    if (!v) return;
    pthread_mutex_lock(&s->doors);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const address peer = peer_of(connection);
        v->peer = v->client = is_proxy(s, &peer) ? ADDRESS_NOBODY : address_key(&peer);
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        v->socket = info ? info->connect_fd : MHD_INVALID_SOCKET;
        v->until = program_seconds() + s->options.read_timeout;
        v->next = s->visitors;
        if (v->next) v->next->before = v;
        s->visitors = v;
        *mine = v;
    } else {
        if (v->before) v->before->next = v->next;
        else s->visitors = v->next;
        if (v->next) v->next->before = v->before;
        *mine = NULL;
    }
    pthread_mutex_unlock(&s->doors);
    if (code != MHD_CONNECTION_NOTIFY_STARTED) free(v);
}

/* libmicrohttpd's own limit counts from the last byte, so that one that sends a byte now and then stays for ever. */
void http_end_slow(server *s) {
    const double now = program_seconds();
    pthread_mutex_lock(&s->doors);
    for (visitor *v = s->visitors; v; v = v->next)
        if (v->until > 0 && now > v->until) shutdown(v->socket, SHUT_RDWR), v->until = 0, v->slow = 1;
    pthread_mutex_unlock(&s->doors);
}

/* Where there are no random bytes, what nobody outside can know well. */
static uint64_t new_salt(void) {
    uint64_t salt = 0;
    struct timespec now = { 0 };
    if (!getentropy(&salt, sizeof salt)) return salt;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_nsec << 32 ^ (uint64_t)now.tv_sec ^ (uint64_t)getpid() << 48 ^ (uintptr_t)&salt;
}

/* Whether a socket's file is one that no program listens at any more. */
static int is_left_over(const struct sockaddr_un *at) {
    struct stat found;
    if (lstat(at->sun_path, &found) || !S_ISSOCK(found.st_mode)) return 0;
    const int probe = socket(AF_UNIX, SOCK_STREAM, 0);
    const int refused =
        probe >= 0 && connect(probe, (const struct sockaddr *)(const void *)at, sizeof *at) && errno == ECONNREFUSED;
    if (probe >= 0) close(probe);
    return refused;
}

/* The socket of --listen; -1: it was said why it cannot be had. */
static int listen_at_path(server *s) {
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    struct stat made;
    memcpy(at.sun_path, s->options.path, strlen(s->options.path)); /* it fits (take_path) */
    if (is_left_over(&at)) unlink(at.sun_path);
    const int listening = socket(AF_UNIX, SOCK_STREAM, 0);
    const mode_t before = umask(0117); /* never for others, not even for a moment */
    const int failed = listening < 0 || bind(listening, (const struct sockaddr *)(const void *)&at, sizeof at) ||
                       listen(listening, 1024);
    const int why = errno;
    umask(before);
    if (failed) {
        program_complain("--listen unix:%s: %s", s->options.path, strerror(why));
        if (listening >= 0) close(listening);
        return -1;
    }
    if (!stat(at.sun_path, &made)) s->device = made.st_dev, s->inode = made.st_ino;
    return listening;
}

void http_unlink(const server *s) {
    struct stat found;
    if (s->options.path && !lstat(s->options.path, &found) && found.st_dev == s->device && found.st_ino == s->inode)
        unlink(s->options.path);
}

/* At a socket that listens, or -1: at an address. */
static struct MHD_Daemon *start(server *s, unsigned flags, int listening, const struct sockaddr *at) {
    flags |= MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD | MHD_ALLOW_SUSPEND_RESUME;
    const struct MHD_OptionItem where[] = { { listening < 0 ? MHD_OPTION_SOCK_ADDR : MHD_OPTION_LISTEN_SOCKET,
                                              listening, (void *)(uintptr_t)at },
                                            { MHD_OPTION_END, 0, NULL } };
    return MHD_start_daemon(flags, (uint16_t)s->options.port, on_accept, s, on_request, s, MHD_OPTION_ARRAY, where,
                            MHD_OPTION_NOTIFY_COMPLETED, on_end, s, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)30,
                            MHD_OPTION_THREAD_POOL_SIZE, (unsigned)2, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                            (size_t)(64 << 10), STRICT, MHD_OPTION_CONNECTION_LIMIT,
                            (unsigned)(s->options.max_connections ? s->options.max_connections : 1000),
                            MHD_OPTION_NOTIFY_CONNECTION, on_connection, s, MHD_OPTION_END);
}

static struct MHD_Daemon *start_at_path(server *s) {
    const int listening = listen_at_path(s);
    if (listening < 0) return NULL;
    errno = 0;
    struct MHD_Daemon *daemon = start(s, 0, listening, NULL);
    if (daemon) return daemon;
    program_complain("--listen unix:%s: %s", s->options.path, errno ? strerror(errno) : "no thread, or no memory");
    close(listening);
    http_unlink(s);
    return NULL;
}

struct MHD_Daemon *http_listen(server *s) {
    struct addrinfo wanted = { .ai_flags = AI_PASSIVE | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM }, *found = NULL;
    char port[8];
    s->salt = new_salt();
    if (s->options.path) return start_at_path(s);
    snprintf(port, sizeof port, "%d", s->options.port);
    int failed = getaddrinfo(s->options.host, port, &wanted, &found);
    if (failed) {
        program_complain("--host %s: %s", s->options.host, gai_strerror(failed));
        return NULL;
    }
    errno = 0;
    struct MHD_Daemon *daemon = start(s, found->ai_family == AF_INET6 ? MHD_USE_IPv6 : 0, -1, found->ai_addr);
    freeaddrinfo(found);
    if (!daemon)
        program_complain("port %d of %s cannot be had: %s", s->options.port, s->options.host,
                         errno ? strerror(errno) : "another program may have it");
    return daemon;
}
