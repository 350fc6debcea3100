/* fetch.c - see fetch.h. */
#define _POSIX_C_SOURCE 200809L
#define _DARWIN_C_SOURCE

#include "tools/get/fetch.h"
#include "tools/text/system.h"

#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <zlib.h>

enum {
    MOST_REDIRECTS = 10,
    MOST_ATTEMPTS = 200, /* for one file, even if each makes progress */
    MOST_WAIT = 300,     /* seconds that a server may ask to wait */
    SLOW = 1024,         /* bytes per second; below, a connection has stalled */
    CHUNK = 65536,
    HEADER = 512,
    PATH_BYTES = 4096
};
static const uint64_t unknown_limit = (uint64_t)256 << 20; /* for files without an announced size */

/* Headers of the last response. */
typedef struct headers {
    char etag[HEADER], modified[HEADER], range[HEADER];
} headers;

/* The destination of a body: memory (`text`) or a file. */
typedef struct sink {
    text_bytes *text;
    const source_file *file;
    int fd;
    char partial[PATH_BYTES], etag[PATH_BYTES];
    uint64_t at;    /* bytes written, or in `text` */
    uint64_t most;  /* maximum number of bytes */
    int partly;     /* 1: only the first `most` bytes are wanted */
    uint64_t start; /* bytes of an earlier call, which were kept */
    sha256 hash;
    z_stream unpacker;
    int packed, ended; /* content is gzip; it has ended */
    uint64_t unpacked;
    moe_status failed;
} sink;

struct fetch {
    CURL *curl;
    fetch_settings settings;
    char reason[CURL_ERROR_SIZE];
    headers got;
    sink *to;
    const fetch_from *from;
    int begun;        /* the body of the current response is wanted */
    int to_end;       /* the current response continues to the end of the file */
    int wrong_range;  /* the response has another range */
    uint64_t ignored; /* bytes of an error's body */
    moe_error *error;
    int reached; /* 1 after the first response of any server */
    long status; /* of the last response, or 0 */
};

/* ---- 1. Addresses -------------------------------------------------------------------------------------- */

int fetch_content_range(const char *value, uint64_t *first, uint64_t *last, uint64_t *all) {
    uint64_t *const numbers[] = { first, last, all };
    static const char ends[] = "-/";
    if (strncasecmp(value, "bytes ", 6) != 0) return 0;
    value += 6;
    for (int i = 0; i < 3; i++) {
        const size_t digits = strspn(value, "0123456789");
        if (i == 2 && strcmp(value, "*") == 0) return *all = SOURCE_UNKNOWN, *first <= *last;
        if (!digits || digits > 18 || value[digits] != ends[i]) return 0;
        *numbers[i] = strtoull(value, NULL, 10);
        value += digits + (i < 2);
    }
    return *first <= *last && *last < *all;
}

/* Set the scheme, host and port of an address; the caller frees them with curl_free. Return 0 if it is invalid. */
static int parse_origin(const char *url, char *parts[3]) {
    static const CURLUPart kinds[] = { CURLUPART_SCHEME, CURLUPART_HOST, CURLUPART_PORT };
    CURLU *parsed = curl_url();
    int valid = parsed && !curl_url_set(parsed, CURLUPART_URL, url, 0);
    for (int i = 0; i < 3; i++) parts[i] = NULL;
    for (int i = 0; i < 3 && valid; i++) valid = !curl_url_get(parsed, kinds[i], &parts[i], CURLU_DEFAULT_PORT);
    curl_url_cleanup(parsed);
    return valid;
}

int fetch_same_origin(const char *first, const char *second) {
    char *a[3], *b[3];
    int same = parse_origin(first, a) & parse_origin(second, b);
    for (int i = 0; i < 3; i++) {
        same = same && strcasecmp(a[i], b[i]) == 0;
        curl_free(a[i]), curl_free(b[i]);
    }
    return same;
}

static void host_of(const char *url, char out[128]) {
    char *parts[3];
    snprintf(out, 128, "%s", parse_origin(url, parts) ? parts[1] : "the server");
    for (int i = 0; i < 3; i++) curl_free(parts[i]);
}

/* ---- 2. Bodies ----------------------------------------------------------------------------------------- */

static moe_status sink_fail(fetch *f, moe_status status) { return f->to->failed = status; }

/* Return the most bytes that a file may have. */
static uint64_t most_bytes(const source_file *file, int packed) {
    uint64_t most = file->packed && !packed ? file->unpacked : file->bytes;
    if (most == SOURCE_UNKNOWN && packed && file->unpacked < SOURCE_UNKNOWN / 2)
        most = file->unpacked + file->unpacked / 100 + CHUNK; /* gzip adds less to data that it cannot compress */
    return most == SOURCE_UNKNOWN ? unknown_limit : most;
}

/* Start again with an empty file or text. */
static moe_status sink_reset(fetch *f) {
    sink *s = f->to;
    if (s->text) text_clear(s->text);
    s->at = s->unpacked = s->start = 0;
    s->ended = 0;
    if (s->text) return MOE_OK;
    sha256_begin(&s->hash);
    s->packed = s->file->packed;
    s->most = most_bytes(s->file, s->packed);
    if (s->packed && inflateReset(&s->unpacker) != Z_OK) return sink_fail(f, text_out_of_memory(f->error));
    if (ftruncate(s->fd, 0) == 0 && lseek(s->fd, 0, SEEK_SET) == 0) return MOE_OK;
    return sink_fail(f, text_fail(f->error, MOE_ERROR_IO, "write",
                                  "cannot write %.160s: %s; XDG_DATA_HOME names another folder", s->partial,
                                  strerror(errno)));
}

/* Hash a packed file's content, which must not exceed the announced size. */
static moe_status sink_unpack(fetch *f, const void *data, size_t length) {
    sink *s = f->to;
    unsigned char out[CHUNK];
    const uint64_t most = s->file->unpacked != SOURCE_UNKNOWN ? s->file->unpacked : unknown_limit;
    s->unpacker.next_in = (unsigned char *)(uintptr_t)data; /* not written to */
    s->unpacker.avail_in = (uInt)length;
    while (s->unpacker.avail_in || !s->unpacker.avail_out) {
        if (s->ended)
            return text_fail(f->error, MOE_ERROR_FORMAT, "unpack",
                             "%.100s has data after its end: deleted; try again later", s->file->name);
        s->unpacker.next_out = out, s->unpacker.avail_out = CHUNK;
        const int result = inflate(&s->unpacker, Z_NO_FLUSH);
        const size_t n = CHUNK - s->unpacker.avail_out;
        if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR)
            return text_fail(f->error, MOE_ERROR_FORMAT, "unpack",
                             "%.100s is not valid gzip data: deleted; try again later", s->file->name);
        if (n > most - s->unpacked)
            return text_fail(f->error, MOE_ERROR_FORMAT, "unpack",
                             "%.100s unpacks to more than the announced %llu bytes: deleted; try again later",
                             s->file->name, (unsigned long long)most);
        sha256_add(&s->hash, out, n);
        s->unpacked += n;
        s->ended = result == Z_STREAM_END;
        if (s->ended) s->unpacker.avail_out = 1; /* nothing is left in the unpacker */
        if (result == Z_BUF_ERROR) break;
    }
    return MOE_OK;
}

/* Check and hash bytes that follow those before. */
static moe_status sink_hash(fetch *f, const char *data, size_t length) {
    sink *s = f->to;
    if (!s->at && length && s->packed && (unsigned char)*data != 0x1f) {
        if (!*s->file->sha256 && s->file->unpacked == SOURCE_UNKNOWN)
            return text_fail(f->error, MOE_ERROR_FORMAT, "unpack",
                             "%.100s is not gzip data; is this network's log-in page in the way?", s->file->name);
        s->packed = 0; /* the server has unpacked the file */
        s->most = most_bytes(s->file, 0);
    }
    if (length > s->most - s->at)
        return text_fail(f->error, MOE_ERROR_FORMAT, "size",
                         "%.100s is larger than the announced %llu bytes; try again later",
                         s->text ? f->from->what : s->file->name, (unsigned long long)s->most);
    if (s->text) return MOE_OK;
    moe_status status = MOE_OK;
    if (s->packed) status = sink_unpack(f, data, length);
    else sha256_add(&s->hash, data, length);
    s->unpacker.next_in = NULL; /* data belongs to the caller */
    return status;
}

static moe_status sink_write(fetch *f, const char *data, size_t length) {
    sink *s = f->to;
    if (s->partly && length > s->most - s->at) length = (size_t)(s->most - s->at);
    moe_status status = sink_hash(f, data, length);
    if (status) return sink_fail(f, status);
    s->at += length;
    if (s->text) {
        text_append(s->text, data, length);
        return s->text->failed ? sink_fail(f, text_out_of_memory(f->error)) : MOE_OK;
    }
    while (length) {
        const ssize_t n = write(s->fd, data, length);
        if (n > 0) data += n, length -= (size_t)n;
        else if (n == 0 || errno != EINTR) break;
    }
    if (!length) return MOE_OK;
    return sink_fail(f, text_fail(f->error, MOE_ERROR_IO, "write",
                                  "cannot write %.150s: %s; the same command continues once there is space", s->partial,
                                  strerror(errno ? errno : ENOSPC)));
}

/* Remember which version of the file the server has. */
static void save_validator(const sink *s, const headers *got) {
    const char *value = *got->etag && strncmp(got->etag, "W/", 2) != 0 ? got->etag : got->modified;
    if (!*value) {
        unlink(s->etag);
        return;
    }
    const int fd = open(s->etag, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0666);
    const size_t n = strlen(value);
    if (fd < 0) return;
    if (write(fd, value, n) != (ssize_t)n) unlink(s->etag);
    close(fd);
}

static void load_validator(const sink *s, char out[HEADER]) {
    const int fd = open(s->etag, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    const ssize_t n = fd < 0 ? 0 : read(fd, out, HEADER - 1);
    out[n > 0 ? n : 0] = 0;
    for (char *at = out; *at; at++)
        if ((unsigned char)*at < 0x20 || *at == 0x7f) out[0] = 0;
    if (fd >= 0) close(fd);
}

/* ---- 3. libcurl's callbacks ---------------------------------------------------------------------------- */

static void take_header(const char *line, size_t length, const char *name, char out[HEADER]) {
    const size_t n = strlen(name);
    if (length < n || strncasecmp(line, name, n) != 0) return;
    line += n, length -= n;
    while (length && (*line == ' ' || *line == '\t')) line++, length--;
    while (length && (line[length - 1] == '\r' || line[length - 1] == '\n' || line[length - 1] == ' ')) length--;
    if (length >= HEADER) length = 0;
    memcpy(out, line, length), out[length] = 0;
}

static size_t on_header(char *line, size_t size, size_t n, void *user) {
    fetch *f = user;
    const size_t length = size * n;
    if (text_begins_with(line, length, "HTTP/")) memset(&f->got, 0, sizeof f->got);
    take_header(line, length, "etag:", f->got.etag);
    take_header(line, length, "last-modified:", f->got.modified);
    take_header(line, length, "content-range:", f->got.range);
    f->reached = 1;
    return length;
}

/* Prepare for the body of a response: continue, start again, or ignore it. Return 0 to end the transfer. */
static int begin_body(fetch *f) {
    long code = 0;
    uint64_t first = 0, last = 0, all = 0;
    curl_easy_getinfo(f->curl, CURLINFO_RESPONSE_CODE, &code);
    f->begun = code == 200 || code == 206;
    f->to_end = code == 200;
    if (code == 200) {
        if (f->to->at && sink_reset(f)) return 0;
        if (!f->to->text) save_validator(f->to, &f->got);
    } else if (code == 206) {
        const uint64_t bytes = f->to->file ? f->to->file->bytes : SOURCE_UNKNOWN;
        f->wrong_range = !fetch_content_range(f->got.range, &first, &last, &all) || first != f->to->at ||
                         (bytes != SOURCE_UNKNOWN && all != SOURCE_UNKNOWN && all != bytes && f->to->packed == 0);
        if (f->wrong_range) return 0;
        f->to_end = last + 1 == all;
    }
    return 1;
}

static int has_enough(const sink *s) { return s->partly && s->at == s->most; }

static size_t on_body(char *data, size_t size, size_t n, void *user) {
    fetch *f = user;
    const size_t length = size * n;
    if (!f->begun && !f->ignored && !begin_body(f)) return 0;
    if (f->begun) return sink_write(f, data, length) || has_enough(f->to) ? 0 : length;
    f->ignored += length;
    return f->ignored > 1 << 20 ? 0 : length;
}

static int on_progress(void *user, curl_off_t all, curl_off_t now, curl_off_t up_all, curl_off_t up) {
    fetch *f = user;
    (void)up_all, (void)up;
    if (f->settings.stop && *f->settings.stop) return 1;
    if (!f->settings.progress || !f->to->file) return 0;
    uint64_t bytes = f->to->file->bytes;
    if (bytes == SOURCE_UNKNOWN && f->begun && all > 0 && now >= 0 && f->to->at >= (uint64_t)now)
        bytes = f->to->at - (uint64_t)now + (uint64_t)all;
    f->settings.progress(f->settings.user, f->to->file->name, f->to->at, bytes);
    return 0;
}

/* ---- 4. One request ------------------------------------------------------------------------------------ */

typedef enum outcome { DONE, FAILED, AGAIN, AGAIN_FROM_START } outcome;

static outcome fail(fetch *f, moe_status code, const char *format, const char *host) {
    char message[200];
    snprintf(message, sizeof message, format, host, f->from->what);
    text_fail(f->error, code, "network", "%s", message);
    return FAILED;
}

/* What to do about a status code, for the message. */
static const struct {
    long code;
    moe_status status;
    const char *message; /* host, what */
} answers[] = {
    { 401, MOE_ERROR_ARGUMENT, "%.60s refuses %.70s (401): check the name; a gated model needs HF_TOKEN" },
    { 403, MOE_ERROR_IO, "%.60s refuses %.70s (403); if it is gated, accept its terms on its page, and set HF_TOKEN" },
    { 404, MOE_ERROR_ARGUMENT, "%.60s does not have %.100s (404): check the name" },
    { 407, MOE_ERROR_IO, "the proxy requires a password (407): set https_proxy to http://USER:PASSWORD@HOST:PORT" },
    { 410, MOE_ERROR_ARGUMENT, "%.60s no longer has %.100s (410)" },
};

static int is_temporary(long code) { return code == 408 || code == 429 || (code >= 500 && code != 501 && code != 505); }

/* Judge a response's status code. */
static outcome judge(fetch *f, long code, const char *host) {
    if (code == 200 || code == 206) return DONE;
    if (code == 416) return AGAIN_FROM_START;
    if (is_temporary(code)) {
        text_fail(f->error, MOE_ERROR_IO, "network", "%.60s is busy (%ld) and does not send %.100s; try again later",
                  host, code, f->from->what);
        return AGAIN;
    }
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
        if (answers[i].code == code) return fail(f, answers[i].status, answers[i].message, host);
    text_fail(f->error, MOE_ERROR_IO, "network", "%.60s answers %ld for %.100s; check the address and the proxy", host,
              code, f->from->what);
    return FAILED;
}

static void invalid_address(fetch *f, const char *reason) {
    char *url = source_shown_url(f->from->url);
    text_fail(f->error, MOE_ERROR_IO, "network",
              "invalid address or answer for %.70s: '%.70s' (%.50s); check HF_ENDPOINT and MOE_FIREFOX_INDEX",
              f->from->what, url ? url : "", reason);
    free(url);
}

/* Judge an error of libcurl. */
static outcome judge_error(fetch *f, CURLcode code, const char *host) {
    const char *reason = *f->reason ? f->reason : curl_easy_strerror(code);
    switch (code) {
    case CURLE_ABORTED_BY_CALLBACK:
        text_fail(f->error, MOE_ERROR_CANCELLED, "network", "stopped; the same command continues");
        return FAILED;
    case CURLE_PEER_FAILED_VERIFICATION:
        text_fail(f->error, MOE_ERROR_IO, "network",
                  "the certificate of %.60s is not valid (%.90s); install ca-certificates, or set SSL_CERT_FILE for an "
                  "authority of your own",
                  host, reason);
        return FAILED;
    case CURLE_SSL_CACERT_BADFILE:
        text_fail(f->error, MOE_ERROR_IO, "network",
                  "cannot read the certificate authorities (%.90s); check SSL_CERT_FILE, or install ca-certificates",
                  reason);
        return FAILED;
    case CURLE_COULDNT_RESOLVE_PROXY:
        text_fail(f->error, MOE_ERROR_IO, "network", "cannot find the proxy (%.100s); check https_proxy", reason);
        return FAILED;
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_URL_MALFORMAT: invalid_address(f, reason); return FAILED;
    case CURLE_OUT_OF_MEMORY: text_out_of_memory(f->error); return FAILED;
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
        text_fail(f->error, MOE_ERROR_IO, "network",
                  "cannot connect to %.60s (%.90s); check the network and https_proxy", host, reason);
        return f->reached ? AGAIN : FAILED;
    default:
        text_fail(f->error, MOE_ERROR_IO, "network", "the connection to %.60s broke (%.90s); try again", host, reason);
        return AGAIN;
    }
}

/* Set the headers of a request for the rest of a file. */
static struct curl_slist *request_headers(fetch *f, const char *url) {
    struct curl_slist *list = NULL;
    char line[HEADER + 64], validator[HEADER] = "";
    const sink *s = f->to;
    if (f->from->token && fetch_same_origin(f->from->url, url)) {
        snprintf(line, sizeof line, "Authorization: Bearer %s", f->from->token);
        list = curl_slist_append(list, line);
    }
    if (s->file && s->file->packed) list = curl_slist_append(list, "Accept-Encoding: gzip"); /* do not unpack it */
    if (s->at) load_validator(s, validator);
    if (*validator) {
        snprintf(line, sizeof line, "If-Range: %s", validator);
        list = curl_slist_append(list, line);
    }
    return list;
}

/* Request one address. Set *next to the target of a redirect, which the caller frees. */
static outcome request(fetch *f, const char *url, char **next) {
    char range[32], host[128], *target = NULL;
    long code = 0;
    struct curl_slist *list = request_headers(f, url);
    host_of(url, host);
    f->begun = f->to_end = f->wrong_range = 0, f->ignored = 0, f->reason[0] = 0;
    memset(&f->got, 0, sizeof f->got);
    if (f->to->partly) snprintf(range, sizeof range, "0-%llu", (unsigned long long)f->to->most - 1);
    else snprintf(range, sizeof range, "%llu-", (unsigned long long)f->to->at);
    curl_easy_setopt(f->curl, CURLOPT_URL, url);
    curl_easy_setopt(f->curl, CURLOPT_HTTPHEADER, list);
    curl_easy_setopt(f->curl, CURLOPT_RANGE, f->to->at || f->to->partly ? range : NULL);
    CURLcode result = curl_easy_perform(f->curl);
    curl_easy_setopt(f->curl, CURLOPT_HTTPHEADER, NULL);
    curl_slist_free_all(list);
    curl_easy_getinfo(f->curl, CURLINFO_RESPONSE_CODE, &code);
    curl_easy_getinfo(f->curl, CURLINFO_REDIRECT_URL, &target);
    f->status = code;
    if (f->to->failed) return FAILED;
    if (f->wrong_range) return AGAIN_FROM_START;
    if (result == CURLE_WRITE_ERROR && (f->ignored || has_enough(f->to))) result = CURLE_OK; /* an endless error page */
    if (result != CURLE_OK) return judge_error(f, result, host);
    if (code >= 300 && code < 400 && target) {
        if (!source_allowed_url(target, source_allowed_url(url, 1)))
            return fail(f, MOE_ERROR_IO,
                        "%.60s redirects %.70s to an address without HTTPS: refused; try another mirror", host);
        return (*next = text_copy(target, strlen(target))) ? DONE : (text_out_of_memory(f->error), FAILED);
    }
    const outcome judged = judge(f, code, host);
    if (judged == DONE && !f->begun && !begin_body(f)) return f->to->failed ? FAILED : AGAIN_FROM_START; /* no body */
    return judged;
}

/* Request an address, and follow redirects. */
static outcome request_all(fetch *f) {
    char *at = text_copy(f->from->url, strlen(f->from->url)), *next = NULL;
    outcome result = at ? DONE : (text_out_of_memory(f->error), FAILED);
    if (at && !source_allowed_url(at, 0)) result = judge_error(f, CURLE_URL_MALFORMAT, "");
    for (int i = 0; at && result == DONE; i++) {
        next = NULL;
        result = request(f, at, &next);
        free(at);
        at = next;
        if (i == MOST_REDIRECTS && next) {
            char host[128];
            host_of(next, host);
            result = fail(f, MOE_ERROR_IO, "%.60s redirects %.90s in a circle; check the address", host);
        }
    }
    free(at);
    return result;
}

/* ---- 5. Attempts --------------------------------------------------------------------------------------- */

/* Wait, unless stopped. */
static int wait_for(fetch *f, double seconds) {
    const struct timespec tenth = { 0, 100000000 };
    for (int tenths = (int)(10 * seconds); tenths > 0; tenths--) {
        if (f->settings.stop && *f->settings.stop) return 0;
        nanosleep(&tenth, NULL);
    }
    return 1;
}

/* Wait before the next attempt: as long as the server asks, or twice as long each time. Return 0 to give up. */
static int wait_before(fetch *f, int attempt) {
    curl_off_t asked = 0;
    char line[400];
    curl_easy_getinfo(f->curl, CURLINFO_RETRY_AFTER, &asked);
    if (asked > MOST_WAIT) {
        char message[256];
        snprintf(message, sizeof message, "%.150s", f->error->message);
        text_fail(f->error, MOE_ERROR_IO, "network", "%s (in %ld s)", message, (long)asked);
        return 0;
    }
    const double seconds = asked > 0 ? (double)asked : 0.5 * (1 << (attempt < 6 ? attempt : 6));
    const char *advice = strrchr(f->error->message, ';');
    const size_t length = advice ? (size_t)(advice - f->error->message) : strlen(f->error->message);
    snprintf(line, sizeof line, "%.*s; retrying in %.3g s", (int)length, f->error->message, seconds);
    if (f->settings.note) f->settings.note(f->settings.user, line);
    if (wait_for(f, seconds)) return 1;
    text_fail(f->error, MOE_ERROR_CANCELLED, "network", "stopped; the same command continues");
    return 0;
}

static int is_complete(const sink *s) {
    if (s->text) return 1;
    if (s->packed) return s->ended;
    const uint64_t all = s->file->packed ? s->file->unpacked : s->file->bytes;
    return all == SOURCE_UNKNOWN || s->at == all;
}

/* Return 1 if the server has sent a file of known size to its end. */
static int is_at_end(fetch *f) {
    curl_off_t length = -1;
    curl_easy_getinfo(f->curl, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
    return f->to_end && length >= 0;
}

/* Fetch the rest of a body. The caller verifies it. */
static moe_status fetch_rest(fetch *f) {
    int idle = 0, restarts = 0;
    uint64_t most = f->to->at; /* progress is what exceeds it */
    for (int attempt = 0; attempt < MOST_ATTEMPTS; attempt++) {
        if (f->to->text && sink_reset(f)) return f->to->failed;
        const outcome result = request_all(f);
        if (f->to->failed) return f->to->failed;
        if (result == DONE && (is_complete(f->to) || is_at_end(f))) return MOE_OK;
        if (result == FAILED) return f->error->code;
        if (result == AGAIN_FROM_START) {
            if (sink_reset(f)) return f->to->failed;
            if (!restarts++) continue;
        }
        if (result == DONE) text_fail(f->error, MOE_ERROR_IO, "network", "the connection broke; try again");
        if (result == AGAIN_FROM_START)
            text_fail(f->error, MOE_ERROR_IO, "network",
                      "the server sends other parts of %.90s than requested; try again", f->from->what);
        idle = f->to->at > most && !f->to->text ? 0 : idle + 1;
        if (f->to->at > most) most = f->to->at;
        if (idle > f->settings.retries || !wait_before(f, idle)) break;
    }
    return f->error->code;
}

static void begin_fetch(fetch *f, const fetch_from *from, sink *to, moe_error *error) {
    f->from = from, f->to = to, f->error = error;
    text_fail(error, MOE_ERROR_IO, "network", "%.100s was interrupted too often; try again", from->what);
}

static moe_status fetch_to_memory(fetch *f, const fetch_from *from, sink to, moe_error *error) {
    moe_error own;
    begin_fetch(f, from, &to, error ? error : &own);
    return fetch_rest(f);
}

moe_status fetch_text(fetch *f, const fetch_from *from, size_t most, text_bytes *out, moe_error *error) {
    return fetch_to_memory(f, from, (sink){ .text = out, .fd = -1, .most = most }, error);
}

moe_status fetch_begin(fetch *f, const fetch_from *from, size_t most, text_bytes *out, moe_error *error) {
    return fetch_to_memory(f, from, (sink){ .text = out, .fd = -1, .most = most, .partly = 1 }, error);
}

/* ---- 6. Files ------------------------------------------------------------------------------------------ */

static moe_status file_error(moe_error *error, const char *path) {
    return text_fail(error, MOE_ERROR_IO, "write", "cannot write %.160s: %s; XDG_DATA_HOME names another folder", path,
                     strerror(errno));
}

/* Hash the bytes that the file has. */
static moe_status hash_existing(fetch *f) {
    sink *s = f->to;
    char data[CHUNK / 2];
    ssize_t n;
    while ((n = read(s->fd, data, sizeof data)) > 0 || (n < 0 && errno == EINTR)) {
        if (n < 0) continue;
        const moe_status status = sink_hash(f, data, (size_t)n);
        if (status) return status;
        s->at += (uint64_t)n;
        if (f->settings.stop && *f->settings.stop)
            return text_fail(f->error, MOE_ERROR_CANCELLED, "read", "stopped; the same command continues");
    }
    s->start = s->at;
    return n < 0 ? file_error(f->error, s->partial) : MOE_OK;
}

/* Compare a complete file with what the source has published. */
static moe_status verify(fetch *f, char hash[SHA256_TEXT]) {
    const sink *s = f->to;
    sha256 copy = s->hash;
    sha256_end(&copy, hash);
    if (!is_complete(s) || (s->packed && s->file->unpacked != SOURCE_UNKNOWN && s->unpacked != s->file->unpacked))
        return text_fail(f->error, MOE_ERROR_FORMAT, "size",
                         "%.80s has another size than the source has announced: deleted; try again later",
                         s->file->name);
    if (*s->file->sha256 && strcmp(s->file->sha256, hash) != 0)
        return text_fail(f->error, MOE_ERROR_FORMAT, "hash",
                         "the SHA-256 of %.80s differs from the published one: deleted; try again, or another mirror",
                         s->file->name);
    return MOE_OK;
}

/* Join a folder and a name. Return 0 if they are too long. */
static int joined(char out[PATH_BYTES], const char *folder, const char *name, const char *end) {
    return snprintf(out, PATH_BYTES, "%s/%s%s", folder, name, end) < PATH_BYTES;
}

/* Return the file's name: without .gz if its content is not packed. */
static void final_name(const sink *s, char out[SOURCE_NAME]) {
    snprintf(out, SOURCE_NAME, "%s", s->file->name);
    if (s->file->packed && !s->packed) out[strlen(out) - 3] = 0;
}

/* Return 1 if a file with its final name exists and is valid. An invalid one is deleted. */
static int is_present(fetch *f, const char *folder, const char *name, char hash[SHA256_TEXT]) {
    char path[PATH_BYTES];
    sink *s = f->to;
    if (!joined(path, folder, name, "")) return 0;
    s->fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK); /* does not wait for the writer of a pipe */
    if (s->fd < 0) return 0;
    const moe_status status = hash_existing(f);
    const int valid = !status && !verify(f, hash);
    close(s->fd);
    s->fd = -1;
    if (!valid && status != MOE_ERROR_CANCELLED) unlink(path);
    return valid;
}

static moe_status open_partial(fetch *f, const char *folder) {
    sink *s = f->to;
    struct stat there;
    if (!joined(s->partial, folder, s->file->name, ".partial") || !joined(s->etag, folder, s->file->name, ".etag"))
        return text_fail(f->error, MOE_ERROR_IO, "write", "the path of %.150s is too long", s->file->name);
    s->fd = open(s->partial, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (s->fd < 0) return file_error(f->error, s->partial);
    if (fstat(s->fd, &there) != 0) return file_error(f->error, s->partial);
    if (!S_ISREG(there.st_mode)) return errno = EEXIST, file_error(f->error, s->partial);
    return MOE_OK;
}

/* Continue with the bytes of an earlier call if they can be checked, else start again. */
static moe_status continue_partial(fetch *f) {
    char validator[HEADER];
    load_validator(f->to, validator);
    const moe_status status = hash_existing(f);
    if (status && status != MOE_ERROR_FORMAT) return status;
    if (status || (!*validator && !*f->to->file->sha256)) return sink_reset(f);
    return MOE_OK;
}

/* Give a verified file its final name. */
static moe_status finish(fetch *f, const char *folder, char name[SOURCE_NAME]) {
    char path[PATH_BYTES];
    const sink *s = f->to;
    final_name(s, name);
    if (!joined(path, folder, name, "")) return errno = ENAMETOOLONG, file_error(f->error, name);
    if (fsync(s->fd) != 0 && errno != EINVAL && errno != ENOTSUP) return file_error(f->error, path);
    if (rename(s->partial, path) != 0) return file_error(f->error, path);
    unlink(s->etag);
    return MOE_OK;
}

static void init_sink(sink *s, const source_file *file) {
    s->file = file;
    s->fd = -1;
    s->packed = file->packed;
    s->most = most_bytes(file, file->packed);
    s->at = s->unpacked = s->start = 0;
    s->ended = 0;
    sha256_begin(&s->hash);
}

/* Fetch to the partial file and verify it. If bytes of an earlier call may be the reason of a failure, start again. */
static moe_status fetch_verified(fetch *f, char hash[SHA256_TEXT]) {
    moe_status status = continue_partial(f);
    if (status) return status;
    for (int again = 0; again < 2; again++) {
        const int resumed = f->to->start > 0;
        if (!f->to->at || !is_complete(f->to) || (f->to->file->bytes == SOURCE_UNKNOWN && !f->to->packed))
            status = fetch_rest(f);
        if (!status) status = verify(f, hash);
        if (status != MOE_ERROR_FORMAT || !resumed) break;
        f->to->failed = MOE_OK;
        if ((status = sink_reset(f))) break;
    }
    return status;
}

moe_status fetch_file(fetch *f, const fetch_from *from, const source_file *file, const char *folder,
                      char name[SOURCE_NAME], char hash[SHA256_TEXT], moe_error *error) {
    moe_error own;
    sink to = { 0 };
    begin_fetch(f, from, &to, error ? error : &own);
    if (inflateInit2(&to.unpacker, 15 + 16) != Z_OK) return text_out_of_memory(error); /* 16: gzip */
    for (int i = 0; i < (file->packed ? 2 : 1); i++) {
        init_sink(&to, file);
        inflateReset(&to.unpacker);
        snprintf(name, SOURCE_NAME, "%.*s", (int)strlen(file->name) - 3 * i, file->name);
        if (is_present(f, folder, name, hash)) return inflateEnd(&to.unpacker), MOE_OK;
    }
    begin_fetch(f, from, &to, f->error);
    init_sink(&to, file);
    inflateReset(&to.unpacker);
    moe_status status = open_partial(f, folder);
    if (!status) status = fetch_verified(f, hash);
    if (!status) status = finish(f, folder, name);
    if (to.fd >= 0 && (status == MOE_ERROR_FORMAT || (status && !to.at))) unlink(to.partial), unlink(to.etag);
    if (to.fd >= 0) close(to.fd);
    inflateEnd(&to.unpacker);
    return status;
}

/* ---- 7. Opening ---------------------------------------------------------------------------------------- */

/* Select the certificate authorities of SSL_CERT_FILE and SSL_CERT_DIR, else those that libcurl was built with. A
 * libcurl of tools/dist has none, because the system is unknown: use the first file of a usual name. */
static void set_authorities(CURL *c) {
    static const char *const usual[] = {
        "/etc/ssl/certs/ca-certificates.crt",                /* Debian, Ubuntu, Arch, Alpine */
        "/etc/pki/tls/certs/ca-bundle.crt",                  /* Fedora, RHEL */
        "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", /* RHEL */
        "/etc/ssl/ca-bundle.pem",                            /* openSUSE */
        "/etc/ssl/cert.pem",                                 /* Alpine, OpenBSD, macOS */
    };
    const char *file = getenv("SSL_CERT_FILE"), *folder = getenv("SSL_CERT_DIR");
#if LIBCURL_VERSION_NUM >= 0x074600
    const curl_version_info_data *about = curl_version_info(CURLVERSION_NOW);
    const int none = !SYSTEM_IS_WINDOWS && !about->cainfo && !about->capath;
#else
    const int none = 0;
#endif
    if (!(file && *file) && !(folder && *folder))
        for (size_t i = 0; none && i < sizeof usual / sizeof *usual && !(file && *file); i++)
            if (access(usual[i], R_OK) == 0) file = usual[i];
    if (file && *file) curl_easy_setopt(c, CURLOPT_CAINFO, file);
    if (folder && *folder) curl_easy_setopt(c, CURLOPT_CAPATH, folder);
}

static void set_options(fetch *f) {
    CURL *c = f->curl;
#if LIBCURL_VERSION_NUM >= 0x075500
    curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
#else
    curl_easy_setopt(c, CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
    curl_easy_setopt(c, CURLOPT_FOLLOWLOCATION, 0L); /* request_all checks each redirect */
    curl_easy_setopt(c, CURLOPT_SSL_VERIFYPEER, 1L);
    curl_easy_setopt(c, CURLOPT_SSL_VERIFYHOST, 2L);
    curl_easy_setopt(c, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    set_authorities(c);
    curl_easy_setopt(c, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
    curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(c, CURLOPT_USERAGENT, "moe/" MOE_VERSION);
    curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT, (long)f->settings.timeout);
    curl_easy_setopt(c, CURLOPT_LOW_SPEED_LIMIT, (long)SLOW);
    curl_easy_setopt(c, CURLOPT_LOW_SPEED_TIME, (long)f->settings.timeout);
    curl_easy_setopt(c, CURLOPT_ERRORBUFFER, f->reason);
    curl_easy_setopt(c, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(c, CURLOPT_HEADERDATA, f);
    curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(c, CURLOPT_WRITEDATA, f);
    curl_easy_setopt(c, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(c, CURLOPT_XFERINFOFUNCTION, on_progress);
    curl_easy_setopt(c, CURLOPT_XFERINFODATA, f);
}

moe_status fetch_open(const fetch_settings *settings, fetch **out, moe_error *error) {
    fetch *f = calloc(1, sizeof *f);
    if (!f) return text_out_of_memory(error);
    f->settings = *settings;
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK || !(f->curl = curl_easy_init()))
        return free(f), text_fail(error, MOE_ERROR_MEMORY, "network", "cannot initialise libcurl");
    set_options(f);
    return *out = f, MOE_OK;
}

long fetch_status(const fetch *f) { return f->status; }

void fetch_close(fetch *f) {
    if (!f) return;
    curl_easy_cleanup(f->curl);
    curl_global_cleanup();
    free(f);
}
