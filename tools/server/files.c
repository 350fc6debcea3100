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
static void let_go(shared_data *d) {
    if (!d || --d->holders) return;
    d->of->file_bytes -= d->bytes.length;
    text_bytes_free(&d->bytes);
    free(d);
}

/* With the lock held. */
static void drop(kept_file *f) {
    let_go(f->data);
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

/* What one more file takes of the room there is: its bytes and its place. */
static size_t weight_of(const shared_data *d) { return d->bytes.length + KEPT_BYTES / KEPT_FILES; }

/* With the lock held: the file that makes room for `data` of `owner`: the oldest of the owner who has most. */
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

/* Takes over what `bytes` holds. 0: there is no memory, or what others are still fetching leaves no room. */
static int keep(server *s, const ask *a, const char *name, text_bytes *bytes) {
    shared_data *data = malloc(sizeof *data);
    const uint64_t owner = a->known ? a->known : address_key(&a->client);
    if (!data) return 0;
    *data = (shared_data){ s, 1, *bytes };
    pthread_mutex_lock(&s->lock);
    size_t droppable = 0;
    for (const kept_file *f = s->files; f < s->files + KEPT_FILES; f++)
        if (f->data && f->data->holders == 1) droppable += f->data->bytes.length;
    const int goes = s->file_bytes - droppable + bytes->length <= KEPT_BYTES;
    while (goes) {
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
    if (goes) *bytes = (text_bytes){ 0 };
    else free(data);
    return goes;
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

static void check_file(server *s, ask *a, refusal *r) {
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
    text_bytes name = { 0 }, copy = { 0 }, url = { 0 }, out = { 0 };
    size_t length;
    const char *text = ask_text(a, 0, 0, &length);
    text_append(&copy, text ? text : "", text ? length : 0);
    copy.failed |= !text;
    const int named = !copy.failed && make_name(a, &name), good = named && keep(s, a, name.data, &copy);
    if (good) {
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
    if (good) return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
    return named ? send_error(s, a, MHD_HTTP_SERVICE_UNAVAILABLE, "no memory is free for a file; try again")
                 : send_error(s, a, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory, or of random bytes");
}

const dialect file_texts = { .texts = "file",
                             .source = "source",
                             .target = "target",
                             .error = "error",
                             .beyond = MHD_HTTP_TOO_MANY_REQUESTS,
                             .take = take_nothing,
                             .check = check_file,
                             .send = send_address };

static void file_was_sent(void *closure) {
    shared_data *data = closure;
    server *s = data->of;
    pthread_mutex_lock(&s->lock);
    let_go(data);
    pthread_mutex_unlock(&s->lock);
}

/* A translated file by its name, as one to be saved, whatever is in it. It is not copied: however many fetch it as
 * slowly as they like, it takes its memory once. */
enum MHD_Result answer_file(server *s, ask *a) {
    shared_data *data = NULL;
    pthread_mutex_lock(&s->lock);
    for (kept_file *f = s->files; a->fetched[0] && !data && f < s->files + KEPT_FILES; f++)
        if (strcmp(f->name, a->fetched) == 0) data = f->data, data->holders++;
    pthread_mutex_unlock(&s->lock);
    struct MHD_Response *response =
        data ? MHD_create_response_from_buffer_with_free_callback_cls(data->bytes.length, data->bytes.data,
                                                                      file_was_sent, data)
             : NULL;
    if (data && !response) {
        file_was_sent(data);
        return MHD_NO;
    }
    if (data) a->sent = data->bytes.length, http_answered(s, a, a->sent);
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
