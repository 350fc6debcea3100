/* files.c - files that are translated, and kept in memory until they are fetched.
 *
 * Contents
 *   1. Keeping    the newest, for some minutes
 *   2. Names      that nobody guesses
 *   3. Answers    an upload, and what came of it
 *
 * LibreTranslate answers a file with the address of its translation, which anybody who knows it may fetch: the name has
 * 128 random bits. The newest are kept, as many as there are places and bytes for, for some minutes.
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
    MOST_STEM = 64 /* bytes of the name that a file came with */
};

const char *const file_endings[] = { ".txt", ".htm", ".html", NULL };

/* ==== 1. Keeping ======================================================================================== */

/* With the lock held. */
static void drop(server *s, kept_file *f) {
    s->file_bytes -= f->data.length;
    text_bytes_free(&f->data);
    *f = (kept_file){ 0 };
}

void files_drop_old(server *s) {
    const double now = program_seconds();
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < KEPT_FILES; i++)
        if (s->files[i].name[0] && now - s->files[i].since > KEPT_SECONDS) drop(s, &s->files[i]);
    pthread_mutex_unlock(&s->lock);
}

void files_free(server *s) {
    for (size_t i = 0; i < KEPT_FILES; i++) drop(s, &s->files[i]);
}

/* Takes over what `data` holds, in the place of the oldest where there is no room. */
static void keep(server *s, const char *name, text_bytes *data) {
    pthread_mutex_lock(&s->lock);
    for (;;) {
        kept_file *oldest = NULL, *free_one = NULL;
        for (kept_file *f = s->files; f < s->files + KEPT_FILES; f++) {
            if (!f->name[0]) free_one = f;
            else if (!oldest || f->since < oldest->since) oldest = f;
        }
        if (free_one && (!oldest || s->file_bytes + data->length <= KEPT_BYTES)) {
            take_word(free_one->name, sizeof free_one->name, name, strlen(name));
            free_one->data = *data, free_one->since = program_seconds();
            s->file_bytes += data->length;
            break;
        }
        drop(s, oldest);
    }
    pthread_mutex_unlock(&s->lock);
    *data = (text_bytes){ 0 };
}

/* ==== 2. Names ========================================================================================== */

/* The ending of a file that can be translated, from the dot on; NULL: it is another. */
static const char *ending_of(const text_bytes *name) {
    const char *dot = name->length ? strrchr(name->data, '.') : NULL;
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

/* HEX.STEM_TARGET.ENDING: "../My letter.txt" in German is "5f0e...a1.My_letter_de.txt". 0: there are no random bytes,
 * or no memory. */
static int make_name(const ask *a, text_bytes *out) {
    unsigned char random[16];
    if (getentropy(random, sizeof random)) return 0;
    for (size_t i = 0; i < sizeof random; i++) text_printf(out, "%02x", random[i]);
    const char *end = strrchr(a->file.data, '.'), *stem = end;
    while (stem > a->file.data && stem[-1] != '/' && stem[-1] != '\\' && end - stem < MOST_STEM) stem--;
    text_append_string(out, ".");
    put_plain(out, stem, (size_t)(end - stem));
    text_append_string(out, "_");
    put_plain(out, a->target, strlen(a->target));
    text_append_string(out, ending_of(&a->file));
    return !out->failed;
}

/* ==== 3. Answers ======================================================================================== */

/* A file has no parameters of its own. */
static void take_nothing(ask *a, const char *name, const char *value, size_t length, refusal *r) {
    (void)a, (void)name, (void)value, (void)length, (void)r;
}

static void check_file(const server *s, ask *a, refusal *r) {
    const text_item *text = &a->items[0];
    const char *ending = ending_of(&a->file);
    (void)s;
    if (a->n_items != 1 || !a->file.length)
        refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: send one %s, as multipart/form-data with its name", "file");
    else if (!ending)
        refuse(r, MHD_HTTP_BAD_REQUEST,
               "Invalid request: file format not supported: text and HTML are; "
               "%s translates others",
               "moe-documents");
    else if (!text->length) refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: empty %s", "file");
    else if (memchr(text->text, 0, text->length))
        refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: the %s holds a NUL byte", "file");
    else a->html = is_html(ending);
}

/* The address of a translated file, as the client reached this server. */
static void put_address(const ask *a, const char *name, text_bytes *out) {
    const char *host = MHD_lookup_connection_value(a->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);
    const char *scheme = MHD_lookup_connection_value(a->connection, MHD_HEADER_KIND, "X-Forwarded-Proto");
    text_append_string(out, scheme && strcmp(scheme, "https") == 0 ? "https://" : "http://");
    text_append_string(out, host ? host : "localhost");
    text_append_string(out, "/download_file/");
    text_append_string(out, name);
}

static enum MHD_Result send_address(server *s, ask *a) {
    text_bytes name = { 0 }, whole = { 0 }, copy = { 0 }, url = { 0 }, out = { 0 };
    const text_bytes *text = ask_translation(a, 0, &whole);
    text_append(&copy, text->data ? text->data : "", text->length);
    copy.failed |= whole.failed;
    text_bytes_free(&whole);
    const int good = !copy.failed && make_name(a, &name);
    if (good) {
        keep(s, name.data, &copy);
        put_address(a, name.data, &url);
        json j = { .out = &out };
        json_open(&j, NULL, '{');
        json_clean(&j, "translatedFileUrl", url.data ? url.data : "", url.length);
        json_close(&j, '}');
        text_append(&out, "\n", 1);
        out.failed |= url.failed;
    }
    text_bytes_free(&name);
    text_bytes_free(&copy);
    text_bytes_free(&url);
    return good ? send_bytes(s, a, MHD_HTTP_OK, "application/json", &out)
                : send_error(s, a, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory, or of random bytes");
}

const dialect file_texts = { "file",       "source",   "target",    "error", MHD_HTTP_TOO_MANY_REQUESTS,
                             take_nothing, check_file, send_address };

/* A translated file by its name, as one to be saved, whatever is in it. */
enum MHD_Result answer_file(server *s, ask *a) {
    struct MHD_Response *response = NULL;
    pthread_mutex_lock(&s->lock);
    for (kept_file *f = s->files; a->fetched[0] && !response && f < s->files + KEPT_FILES; f++)
        if (strcmp(f->name, a->fetched) == 0)
            response = MHD_create_response_from_buffer(f->data.length, f->data.data, MHD_RESPMEM_MUST_COPY);
    pthread_mutex_unlock(&s->lock);
    if (!response)
        return send_error(s, a, MHD_HTTP_NOT_FOUND, "there is no such file; they are kept for ten minutes at most");
    const char *name = strchr(a->fetched, '.') + 1;
    char disposition[FETCHED + 32];
    snprintf(disposition, sizeof disposition, "attachment; filename=\"%s\"", name);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_DISPOSITION, disposition);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    const text_bytes ended = { .data = a->fetched, .length = strlen(a->fetched) };
    return send_response(s, a, MHD_HTTP_OK,
                         is_html(ending_of(&ended)) ? "text/html; charset=utf-8" : "text/plain; charset=utf-8",
                         response);
}
