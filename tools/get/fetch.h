/* fetch.h - fetches files over HTTP and HTTPS, with libcurl.
 *
 *   - Certificates are always verified (SSL_CERT_FILE and SSL_CERT_DIR replace the system's authorities). A redirect
 *     from HTTPS to HTTP is refused. A token is sent only to the scheme, host and port of the first address.
 *   - A broken connection, a stalled one, and the answers 408, 429 and 5xx are retried with increasing delays, or after
 *     the delay that the server asks for.
 *   - A file is written as NAME.partial, and renamed to NAME after its size and SHA-256 were verified. A later call
 *     continues a partial file if the server still has the same version (NAME.etag); its bytes are hashed again.
 *   - Memory does not depend on sizes that a server chooses. Nothing is ever read beyond an announced size.
 * Proxies are those of libcurl: https_proxy, http_proxy, all_proxy, no_proxy.
 *
 * Errors: MOE_ERROR_ARGUMENT (the server does not have the file: 401, 404, 410), MOE_ERROR_IO (network or disk),
 * MOE_ERROR_FORMAT (other content than announced), MOE_ERROR_CANCELLED, MOE_ERROR_MEMORY.
 */
#ifndef GET_FETCH_H
#define GET_FETCH_H

#include "moe.h"
#include "tools/get/sources.h"
#include "tools/text/bytes.h"

#include <signal.h>

typedef struct fetch fetch;

typedef struct fetch_settings {
    int timeout;                       /* seconds without data before a connection is given up */
    int retries;                       /* attempts without progress before an error */
    const volatile sig_atomic_t *stop; /* nonzero to stop */
    void (*progress)(void *user, const char *name, uint64_t bytes, uint64_t all); /* all may be SOURCE_UNKNOWN */
    void (*note)(void *user, const char *message); /* for example, the reason of a retry */
    void *user;
} fetch_settings;

/* What to fetch from where. */
typedef struct fetch_from {
    const char *url;
    const char *token; /* bearer token; NULL for none */
    const char *what;  /* for messages, such as "the index of Firefox's models" */
} fetch_from;

moe_status fetch_open(const fetch_settings *settings, fetch **out, moe_error *error);
void fetch_close(fetch *f);        /* may be NULL */
long fetch_status(const fetch *f); /* status code of the last response, or 0 */

/* Replace `out` with a body of at most `most` bytes. */
moe_status fetch_text(fetch *f, const fetch_from *from, size_t most, text_bytes *out, moe_error *error);
/* Replace `out` with the first `most` bytes of a body, or with a shorter body. */
moe_status fetch_begin(fetch *f, const fetch_from *from, size_t most, text_bytes *out, moe_error *error);
/* Fetch a file to a folder. `name` receives its name there: without .gz if the server has unpacked it. `hash` receives
 * its SHA-256, unpacked. */
moe_status fetch_file(fetch *f, const fetch_from *from, const source_file *file, const char *folder,
                      char name[SOURCE_NAME], char hash[SHA256_TEXT], moe_error *error);

/* Parse "bytes FIRST-LAST/ALL"; *all is SOURCE_UNKNOWN for "*". Return 0 if it is not valid. */
int fetch_content_range(const char *value, uint64_t *first, uint64_t *last, uint64_t *all);
/* Return 1 if a token sent to `first` may be sent to `second`: scheme, host and port are equal. */
int fetch_same_origin(const char *first, const char *second);

#endif
