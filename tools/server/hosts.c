/* hosts.c - decide which host names and web pages may use the server.
 *
 * Any web page can make a browser send requests to this machine or its network. Two checks prevent this. The Host
 * header must name this server: after DNS rebinding it contains the attacker's name. Requests from pages of other
 * origins are refused unless --allow-origin names the origin, even though the page could not read the answer. Such
 * pages may link to the server's page, but neither show it in a frame nor make it translate.
 */
#define _GNU_SOURCE      /* strncasecmp on Linux */
#define _DARWIN_C_SOURCE /* strncasecmp on macOS */

#include "tools/server/server.h"

#include <string.h>
#include <strings.h>

static const char *header(const request *req, const char *name) {
    return MHD_lookup_connection_value(req->connection, MHD_HEADER_KIND, name);
}

static int same_word(const char *word, size_t length, const char *other) {
    return strlen(other) == length && strncasecmp(word, other, length) == 0;
}

/* Return the host in "HOST", "HOST:PORT" or "[IPV6]:PORT", without brackets and a final dot, and set its length. */
static const char *host_of(const char *text, size_t *length) {
    const int bracket = text[0] == '[';
    *length = bracket ? strcspn(++text, "]") : strcspn(text, ":");
    if (!bracket && *length > 1 && text[*length - 1] == '.') --*length;
    return text;
}

static int is_named(const server *s, const char *host, size_t length) {
    for (size_t i = 0; i < s->setup->options.names.n; i++)
        if (strcmp(s->setup->options.names.at[i], "*") == 0 || same_word(host, length, s->setup->options.names.at[i]))
            return 1;
    return 0;
}

/* Return 1 if a Host header may name this server. Addresses, `localhost` and names without dots, which public DNS
 * lacks, cannot be rebound. */
static int serves_host(const server *s, const request *req, const char *text) {
    size_t length;
    address found;
    const char *host = host_of(text, &length);
    const int local = address_is_loopback(&req->peer), strict = local || s->setup->options.names.n;
    if (is_named(s, host, length)) return 1;
    if (address_read(host, length, &found)) return !local || address_is_loopback(&found);
    if (length > 10 && same_word(host + length - 10, 10, ".localhost")) return 1;
    return !strict || !memchr(host, '.', length);
}

/* Return the origin in --allow-origin that admits a page, or NULL. */
static const char *allowed_origin(const server *s, const char *origin) {
    for (size_t i = 0; i < s->setup->options.origins.n; i++) {
        const char *allowed = s->setup->options.origins.at[i];
        if (strcmp(allowed, "*") == 0 || (origin && strcasecmp(allowed, origin) == 0)) return allowed;
    }
    return NULL;
}

/* Return 1 if --allow-origin names the origin or it is the server's own, even behind a proxy that changes Host. Pages
 * cannot set these headers. */
static int admits_page(const server *s, const request *req, const char *origin) {
    const char *site = header(req, "Sec-Fetch-Site"), *host = header(req, MHD_HTTP_HEADER_HOST);
    const char *scheme = strstr(origin, "://"), *own = scheme ? scheme + 3 : "";
    size_t length;
    if (allowed_origin(s, origin)) return 1;
    if (site) return strcmp(site, "same-origin") == 0 || strcmp(site, "none") == 0;
    if (host && *own && strcasecmp(own, host) == 0) return 1;
    own = host_of(own, &length);
    return length && s->setup->options.names.n && is_named(s, own, length);
}

int hosts_is_foreign(const request *req) {
    const char *site = header(req, "Sec-Fetch-Site");
    return site && strcmp(site, "same-origin") != 0 && strcmp(site, "none") != 0;
}

/* Return 1 if a request without an Origin header may be answered. Pages of other origins send such requests for links,
 * which are allowed, and for images, frames etc., which need --allow-origin (see add_frames). */
static int admits_silent(const server *s, const request *req) {
    const char *use = header(req, "Sec-Fetch-Dest");
    return !hosts_is_foreign(req) || s->setup->options.origins.n || (use && strcmp(use, "document") == 0);
}

unsigned hosts_check(const server *s, request *req, const char *method) {
    const char *host = header(req, MHD_HTTP_HEADER_HOST), *origin = header(req, MHD_HTTP_HEADER_ORIGIN);
    if (host && !serves_host(s, req, host)) {
        req->refused = "unknown host name in the Host header; add it with --server-name NAME";
        return MHD_HTTP_MISDIRECTED_REQUEST;
    }
    if (strcmp(method, "OPTIONS") == 0 || (origin ? admits_page(s, req, origin) : admits_silent(s, req))) return 0;
    req->refused = "requests from other origins are not allowed; add the page's origin with --allow-origin URL";
    return MHD_HTTP_FORBIDDEN;
}

/* Name the origins of pages that may embed this server's page in a frame. */
static void add_frames(const server *s, struct MHD_Response *r) {
    text_bytes value = { 0 };
    text_append_string(&value, "frame-ancestors 'self'");
    for (size_t i = 0; i < s->setup->options.origins.n; i++)
        text_printf(&value, " %s", s->setup->options.origins.at[i]);
    if (!value.failed) MHD_add_response_header(r, "Content-Security-Policy", value.data);
    text_bytes_free(&value);
}

void hosts_answer(const server *s, const request *req, struct MHD_Response *r) {
    if (req->route && strcmp(req->route->path, "/") == 0) add_frames(s, r);
    const char *allowed = allowed_origin(s, header(req, MHD_HTTP_HEADER_ORIGIN));
    if (s->setup->options.origins.n > 1) MHD_add_response_header(r, MHD_HTTP_HEADER_VARY, MHD_HTTP_HEADER_ORIGIN);
    if (!allowed) return;
    MHD_add_response_header(r, MHD_HTTP_HEADER_ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
    MHD_add_response_header(r, "Access-Control-Expose-Headers", "X-Untranslated");
    if (!req->route) MHD_add_response_header(r, "Access-Control-Allow-Headers", "Content-Type, Authorization");
}
