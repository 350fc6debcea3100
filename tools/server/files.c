/* files.c - LibreTranslate's file translation. Translated files are stored in memory for download.
 *
 * Contents
 *   1. Storage    store the newest files for ten minutes
 *   2. Names
 *   3. Answers    answer uploads and downloads
 *
 * The answer to an upload is the URL of the translated file. Anyone who knows the URL may fetch the file, so the name
 * contains 128 random bits.
 */
#define _DEFAULT_SOURCE /* getentropy, strcasecmp */
#define _DARWIN_C_SOURCE
#include "tools/server/server.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>
#ifdef __APPLE__
#include <sys/random.h> /* getentropy */
#endif
#include <unistd.h>

enum {
    KEPT_SECONDS = 600,
    KEPT_BYTES = 64 << 20,
    MOST_STEM = 64 /* maximum number of bytes used from the uploaded file's name */
};

const char *const file_endings[] = { ".txt", ".htm", ".html", NULL };

/* ==== 1. Storage ======================================================================================== */

/* The functions of this section must be called with the lock held. */
static void release(shared_data *d) {
    if (!d || --d->holders) return;
    d->server->file_bytes -= d->bytes.length;
    text_bytes_free(&d->bytes);
    free(d);
}

static void drop(kept_file *f) {
    release(f->data);
    *f = (kept_file){ 0 };
}

void files_drop_old(server *s) {
    const double now = program_seconds();
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < KEPT_FILES; i++)
        if (s->files[i].name[0] && now - s->files[i].since > (double)KEPT_SECONDS) drop(&s->files[i]);
    pthread_mutex_unlock(&s->lock);
}

void files_free(server *s) {
    for (size_t i = 0; i < KEPT_FILES; i++) drop(&s->files[i]);
}

/* Return the bytes of a file plus the average bytes per slot, so that both memory and slots are shared fairly. */
static size_t weight_of(const shared_data *d) { return d->bytes.length + KEPT_BYTES / KEPT_FILES; }

/* Choose the file to drop when `owner` adds `data`: the oldest file of the owner with the largest share. */
static kept_file *file_to_drop(server *s, const shared_data *data, uint64_t owner) {
    kept_file *found = NULL;
    size_t most = 0;
    for (kept_file *f = s->files; f < s->files + KEPT_FILES; f++) {
        if (!f->data) continue;
        size_t weight = f->owner == owner ? weight_of(data) : 0;
        for (const kept_file *other = s->files; other < s->files + KEPT_FILES; other++)
            if (other->data && other->owner == f->owner) weight += weight_of(other->data);
        if (!found || weight > most || (weight == most && f->since < found->since)) found = f, most = weight;
    }
    return found;
}

/* Store a file and take over its bytes. Return 0 if out of memory, or if files being downloaded fill the storage. */
static int keep(server *s, const request *req, const char *name, text_bytes *bytes) {
    shared_data *data = malloc(sizeof *data);
    const uint64_t owner = req->account ? (uintptr_t)req->account->usage : address_key(&req->address);
    if (!data) return 0;
    *data = (shared_data){ s, 1, *bytes };
    pthread_mutex_lock(&s->lock);
    size_t droppable = 0;
    for (const kept_file *f = s->files; f < s->files + KEPT_FILES; f++)
        if (f->data && f->data->holders == 1) droppable += f->data->bytes.length;
    const int fits = s->file_bytes - droppable + bytes->length <= KEPT_BYTES;
    while (fits) {
        kept_file *place = s->files;
        while (place < s->files + KEPT_FILES && place->data) place++;
        if (place < s->files + KEPT_FILES && s->file_bytes + bytes->length <= KEPT_BYTES) {
            take_word(place->name, sizeof place->name, name, strlen(name));
            place->data = data, place->owner = owner, place->since = program_seconds();
            s->file_bytes += bytes->length;
            break;
        }
        drop(file_to_drop(s, data, owner));
    }
    pthread_mutex_unlock(&s->lock);
    if (fits) *bytes = (text_bytes){ 0 };
    else free(data);
    return fits;
}

/* ==== 2. Names ========================================================================================== */

/* Return the extension of a file name, including the dot, or NULL if the format is not supported. */
static const char *ending_of(const char *name) {
    const char *dot = name ? strrchr(name, '.') : NULL;
    for (size_t i = 0; dot && file_endings[i]; i++)
        if (strcasecmp(dot, file_endings[i]) == 0) return file_endings[i];
    return NULL;
}

static int is_html(const char *ending) { return strncmp(ending, ".htm", 4) == 0; }

static void put_plain(text_bytes *out, const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        const char c = text[i];
        const int plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-';
        text_append(out, plain ? &c : "_", 1);
    }
}

/* Make the name HEX.STEM_TARGET.EXTENSION: a German translation of "../My letter.txt" is "5f0e...a1.My_letter_de.txt".
 * Return 0 if random bytes or memory are not available. */
static int make_name(const request *req, text_bytes *out) {
    unsigned char random[16];
    if (getentropy(random, sizeof random)) return 0;
    for (size_t i = 0; i < sizeof random; i++) text_printf(out, "%02x", random[i]);
    const char *end = strrchr(req->file.data, '.'), *stem = end;
    while (stem > req->file.data && stem[-1] != '/' && stem[-1] != '\\' && end - stem < MOST_STEM) stem--;
    text_append_string(out, ".");
    put_plain(out, stem, (size_t)(end - stem));
    text_append_string(out, "_");
    put_plain(out, req->target, strlen(req->target));
    text_append_string(out, ending_of(req->file.data));
    return !out->failed;
}

/* ==== 3. Answers ======================================================================================== */

static void check_file(server *s, request *req) {
    const text_item *text = &req->items[0];
    const char *ending = ending_of(req->file.data);
    (void)s;
    if (req->n_items != 1 || !req->file.length)
        bad_request(req, "Invalid request: send one file, as multipart/form-data with its name");
    else if (!ending)
        bad_request(
            req,
            "Invalid request: file format not supported; send text or HTML, or use moe-documents for other formats");
    else if (!text->length) bad_request(req, "Invalid request: empty file");
    else if (memchr(text->text, 0, text->length)) bad_request(req, "Invalid request: the file contains a NUL byte");
    else req->markup = is_html(ending) ? MARKUP_HTML : MARKUP_NONE;
}

/* Write the URL of a translated file, with the host that the client used. */
static void put_address(const server *s, const request *req, const char *name, text_bytes *out) {
    const char *host = MHD_lookup_connection_value(req->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);
    const char *scheme = http_is_proxied(s, req)
                             ? MHD_lookup_connection_value(req->connection, MHD_HEADER_KIND, "X-Forwarded-Proto")
                             : NULL;
    text_append_string(out, scheme && strcmp(scheme, "https") == 0 ? "https://" : "http://");
    text_append_string(out, host ? host : "localhost");
    text_append_string(out, s->setup->options.prefix);
    text_append_string(out, "/download_file/");
    text_append_string(out, name);
}

static enum MHD_Result send_address(server *s, request *req) {
    text_bytes name = { 0 }, copy = { 0 }, url = { 0 };
    size_t length;
    const char *text = request_text(req, 0, 0, &length);
    text_append(&copy, text ? text : "", text ? length : 0);
    copy.failed |= !text;
    const int named = !copy.failed && make_name(req, &name), good = named && keep(s, req, name.data, &copy);
    if (good) {
        put_address(s, req, name.data, &url);
        json j = { .out = &req->out };
        json_open(&j, NULL, '{');
        json_clean(&j, "translatedFileUrl", url.data ? url.data : "", url.length);
        json_close(&j, '}');
        req->out.failed |= url.failed;
    }
    text_bytes_free(&name);
    text_bytes_free(&copy);
    text_bytes_free(&url);
    if (good) return send_json(s, req);
    return named ? send_error(s, req, MHD_HTTP_SERVICE_UNAVAILABLE, "the file storage is full; try again")
                 : send_error(s, req, MHD_HTTP_SERVICE_UNAVAILABLE, "cannot allocate memory or obtain random bytes");
}

static void file_was_sent(void *closure) {
    shared_data *data = closure;
    server *s = data->server;
    pthread_mutex_lock(&s->lock);
    release(data);
    pthread_mutex_unlock(&s->lock);
}

/* Send a translated file as a download. Concurrent downloads share its memory. */
static enum MHD_Result answer_file(server *s, request *req) {
    shared_data *data = NULL;
    pthread_mutex_lock(&s->lock);
    for (kept_file *f = s->files; req->fetched[0] && !data && f < s->files + KEPT_FILES; f++)
        if (strcmp(f->name, req->fetched) == 0) data = f->data, data->holders++;
    pthread_mutex_unlock(&s->lock);
    if (!data) return send_error(s, req, MHD_HTTP_NOT_FOUND, "file not found; files are kept for up to ten minutes");
    struct MHD_Response *response =
        MHD_create_response_from_buffer_with_free_callback_cls(data->bytes.length, data->bytes.data, file_was_sent,
                                                               data);
    if (!response) return file_was_sent(data), MHD_NO;
    req->sent = data->bytes.length, http_answered(s, req, req->sent);
    const char *name = strchr(req->fetched, '.') + 1;
    char disposition[FETCHED + 32];
    snprintf(disposition, sizeof disposition, "attachment; filename=\"%s\"", name);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_DISPOSITION, disposition);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    return send_response(s, req, MHD_HTTP_OK,
                         is_html(ending_of(req->fetched)) ? "text/html; charset=utf-8" : "text/plain; charset=utf-8",
                         response);
}

static const dialect file = { .texts = "file",
                              .source = "source",
                              .target = "target",
                              .check = check_file,
                              .send = send_address,
                              TRANSLATES };

const route file_routes[] = {
    { "POST", "/translate_file", NEEDS_BODY | NEEDS_KEY, answer_translate, &file },
    { "GET", "/download_file/", 0, answer_file, NULL },
    { 0 },
};
