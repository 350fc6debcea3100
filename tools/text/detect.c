#define _POSIX_C_SOURCE 200809L /* mkstemp, fdopen */

#include "tools/text/detect.h"
#include "tools/text/bytes.h"
#include "tools/text/places.h"
#include "tools/text/words.h"

#include <errno.h>
#include <libexttextcat/textcat.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ENOUGH = 1000, SHORT = 24 }; /* maximum number of bytes to examine; bytes of a text that is long enough */

/* Bytes that libexttextcat allocates to open a fingerprint and to classify a text, rounded up. It uses the results of
 * malloc unchecked and accepts no other allocator, so reserve the memory and release it right before the call: if
 * memory runs out, the reserve fails first. The library still crashes if another thread takes the released memory
 * meanwhile, or if a single allocation fails while memory is left. */
enum { OPENING = 16 << 10, CLASSIFYING = 512 << 10 };

static const char *const folders[] = { "/usr/share/libexttextcat/", "/usr/local/share/libexttextcat/",
                                       "/opt/homebrew/share/libexttextcat/" };

/* Three-letter codes of fingerprints that have two-letter names. */
static const char *const short_codes[][2] = {
    { "eng", "en" }, { "deu", "de" }, { "fra", "fr" }, { "spa", "es" }, { "ita", "it" }, { "por", "pt" },
    { "nld", "nl" }, { "pol", "pl" }, { "ces", "cs" }, { "rus", "ru" }, { "ukr", "uk" }, { "swe", "sv" },
    { "dan", "da" }, { "fin", "fi" }, { "hun", "hu" }, { "ron", "ro" }, { "bul", "bg" }, { "ell", "el" },
    { "tur", "tr" }, { "arb", "ar" }, { "heb", "he" }, { "hin", "hi" }, { "jpn", "ja" }, { "kor", "ko" },
    { "vie", "vi" }, { "tha", "th" }, { "cat", "ca" }, { "eus", "eu" }, { "glg", "gl" }, { "hrv", "hr" },
    { "slk", "sk" }, { "slv", "sl" }, { "lit", "lt" }, { "lvs", "lv" }, { "est", "et" },
};

struct moetext_detector {
    size_t n;          /* number of languages */
    text_words *words; /* NULL unless all languages have word lists, which are better for short texts */
    void *handle;      /* libexttextcat's handle if `words` is NULL */
    candidate_t *candidates;
    void *reserve; /* [CLASSIFYING] NULL if out of memory */
    int32_t *tags; /* tags of a model's languages; NULL if created from codes */
};

/* Find the name of a language, with two letters if possible. Return 0 if the code has none. */
static int language_name(const char *code, char name[4]) {
    size_t letters = strspn(code, "abcdefghijklmnopqrstuvwxyz");
    if (letters < 2 || letters > 3) return 0;
    snprintf(name, 4, "%.*s", (int)letters, code);
    for (size_t i = 0; letters == 3 && i < sizeof short_codes / sizeof *short_codes; i++)
        if (strcmp(name, short_codes[i][0]) == 0) snprintf(name, 4, "%s", short_codes[i][1]);
    return 1;
}

/* A libexttextcat of tools/dist/libraries contains the fingerprints, and takes the text of a list for its path. */
#ifndef TEXTCAT_CONTAINED
#define TEXTCAT_CONTAINED ""
static int textcat_contains(const char *name) { return (void)name, 0; }
#endif
enum { CONTAINED = sizeof TEXTCAT_CONTAINED > 1 };

/* Return 1 if `folder` contains a language's fingerprint, such as "de.lm". */
static int has_fingerprint(const char *folder, const char *code, char name[4]) {
    char path[4096 + 16], file[4 + sizeof ".lm"];
    if (!language_name(code, name)) return 0;
    snprintf(file, sizeof file, "%s.lm", name);
    if (CONTAINED) return textcat_contains(file);
    snprintf(path, sizeof path, "%s%s", folder, file);
    return access(path, R_OK) == 0;
}

/* Append libexttextcat's list of fingerprints, in which language i is called "i". Return their number. */
static int list_fingerprints(const char *folder, const char *const *codes, size_t n, text_bytes *list) {
    int found = 0;
    text_append(list, "\n", 1);
    for (size_t i = 0; i < n; i++) {
        char name[4];
        if (!has_fingerprint(folder, codes[i], name)) continue;
        text_printf(list, "%s.lm %zu\n", name, i);
        found++;
    }
    return found;
}

/* Write a list to a temporary file. Return 0 on failure. */
static int write_list(const text_bytes *list, char *path, size_t size) {
    snprintf(path, size, "%s/moe-detect-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    int fd = mkstemp(path);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
    int whole = file && fwrite(list->data, 1, list->length, file) == list->length;
    if (file) whole &= fclose(file) == 0;
    if (fd >= 0 && !whole) unlink(path);
    return whole;
}

/* Set `folder` to libexttextcat's data, with a slash, because it appends file names. Return 0 if there is none. */
static int find_fingerprints(char *folder, size_t size) {
    if (CONTAINED) return snprintf(folder, size, "%s", TEXTCAT_CONTAINED) > 0;
    if (text_place_of_data("libexttextcat/", folder, size - 1)) return memcpy(folder + strlen(folder), "/", 2), 1;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        if (access(folders[i], R_OK) == 0) return snprintf(folder, size, "%s", folders[i]) > 0;
    return 0;
}

/* Return 1 if `bytes` can be allocated. */
static int has_memory(size_t bytes) {
    char *volatile memory = malloc(bytes); /* volatile: compilers would remove both calls */
    const int has = memory != NULL;
    free(memory);
    return has;
}

static moe_status refuse(moe_error *error, moe_status code, const char *message) {
    text_fail(error, code, "language detection", "%s", message);
    return code;
}

/* Open the word lists; *out is NULL unless all languages have a list. */
static moe_status open_words(const char *const *codes, size_t n, text_detector **out, moe_error *error) {
    const char **lists = calloc(n + 1, sizeof *lists);
    text_detector *detector = calloc(1, sizeof *detector);
    size_t known = 0;
    char name[4];
    while (lists && known < n && language_name(codes[known], name) && (lists[known] = text_words_known(name))) known++;
    const int all = n && known == n;
    if (detector && all) detector->n = n, detector->words = text_words_open(lists, n);
    free(lists);
    if (detector && detector->words) return *out = detector, MOE_OK;
    free(detector);
    return !lists || !detector || all ? refuse(error, MOE_ERROR_MEMORY, "out of memory") : MOE_OK;
}

moe_status text_detector_open(const char *const *codes, size_t n, text_detector **out, moe_error *error) {
    *out = NULL;
    const moe_status status = open_words(codes, n, out, error);
    if (status || *out) return status;
    char folder[4096], path[4096];
    if (!find_fingerprints(folder, sizeof folder))
        return refuse(error, MOE_ERROR_UNSUPPORTED, "libexttextcat's data files are not installed");
    text_bytes list = { 0 };
    const int found = list_fingerprints(folder, codes, n, &list);
    const int written = !list.failed && (CONTAINED || write_list(&list, path, sizeof path));
    text_detector *detector = found && written ? calloc(1, sizeof *detector) : NULL;
    if (detector) detector->reserve = malloc(CLASSIFYING);
    if (detector && detector->reserve && has_memory(CLASSIFYING + (size_t)found * OPENING))
        detector->handle = special_textcat_Init(CONTAINED ? list.data : path, folder);
    if (detector && detector->handle) {
        textcat_SetProperty(detector->handle, TCPROP_UTF8AWARE, TC_TRUE);
        textcat_SetProperty(detector->handle, TCPROP_MINIMUM_DOCUMENT_SIZE, 1);
        detector->candidates = textcat_GetClassifyFullOutput(detector->handle);
    }
    const int failed = list.failed;
    text_bytes_free(&list);
    if (!CONTAINED && written) unlink(path);
    if (!written && !failed) return refuse(error, MOE_ERROR_IO, "cannot write a temporary file: check TMPDIR");
    if (!found) return refuse(error, MOE_ERROR_UNSUPPORTED, "no fingerprints for the model's languages are installed");
    if (!detector || !detector->candidates) {
        text_detector_close(detector);
        return refuse(error, MOE_ERROR_MEMORY, "out of memory");
    }
    detector->n = n;
    return *out = detector, MOE_OK;
}

moe_status text_detector_of_model(const moe_model *model, text_detector **out, moe_error *error) {
    const size_t n = moe_model_language_count(model);
    const size_t at = (size_t)moe_model_meta_find(model, "languages.tags"); /* exists if n > 0 */
    char (*texts)[32] = calloc(n + 1, sizeof *texts);
    const char **codes = calloc(n + 1, sizeof *codes);
    int32_t *tags = calloc(n + 1, sizeof *tags);
    text_detector *detector = NULL;
    moe_status status = MOE_OK;
    if (!texts || !codes || !tags) status = text_out_of_memory(error);
    for (size_t i = 0; i < n && !status; i++) {
        const moe_span code = moe_model_language(model, i);
        snprintf(texts[i], sizeof texts[i], "%.*s", (int)(code.length < 31 ? code.length : 31), code.data);
        codes[i] = texts[i];
        tags[i] = (int32_t)moe_model_meta_int(model, at, i);
    }
    if (!status) status = text_detector_open(codes, n, &detector, error);
    free(texts), free(codes);
    if (status) return free(tags), status;
    detector->tags = tags;
    return *out = detector, MOE_OK;
}

void text_detector_close(text_detector *detector) {
    if (!detector) return;
    text_words_close(detector->words);
    if (detector->candidates) textcat_ReleaseClassifyFullOutput(detector->handle, detector->candidates);
    if (detector->handle) textcat_Done(detector->handle);
    free(detector->reserve);
    free(detector->tags);
    free(detector);
}

static int has_letters(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c >= 0x80 || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return 1;
    }
    return 0;
}

ptrdiff_t text_detect(text_detector *detector, const char *text, size_t length, float *confidence) {
    *confidence = 0;
    length = text_utf8_cut(text, length, ENOUGH);
    if (detector->words) return text_words_detect(detector->words, text, length, confidence);
    if (!has_letters(text, length)) return -1;
    if (!detector->reserve && !has_memory(CLASSIFYING)) return TEXT_DETECT_MEMORY;
    free(detector->reserve);
    const int n = textcat_ClassifyFull(detector->handle, text, length, detector->candidates);
    detector->reserve = malloc(CLASSIFYING);
    const candidate_t *best = NULL, *second = NULL;
    for (int i = 0; i < n; i++) {
        const candidate_t *c = &detector->candidates[i];
        if (!best || c->score < best->score) second = best, best = c;
        else if (!second || c->score < second->score) second = c;
    }
    if (!best) return -1;
    /* Scores are distances. If the second smallest is 0.1 above the smallest, the result is nearly certain. */
    float gap =
        second ? ((float)second->score - (float)best->score) / (float)(second->score > 0 ? second->score : 1) : 1;
    *confidence = gap > 0.1f ? 1 : gap * 10;
    /* Fingerprints are unreliable for one or two words, regardless of the distance. */
    if (length < SHORT) *confidence *= (float)length / (float)SHORT;
    return (ptrdiff_t)strtol(best->name, NULL, 10);
}

ptrdiff_t text_detect_each(text_detector *detector, const char *text, size_t length, float *each) {
    float confidence;
    const ptrdiff_t best = text_detect(detector, text, length, &confidence);
    for (size_t i = 0; i < detector->n; i++)
        each[i] = (ptrdiff_t)i == best                ? confidence
                  : best >= 0 && detector->words != 0 ? text_words_confidence(detector->words, i)
                                                      : 0;
    return best;
}

int32_t text_detect_tag(text_detector *detector, const char *text, size_t length) {
    float confidence;
    length = text_utf8_valid(text, length < ENOUGH ? length : ENOUGH);
    const ptrdiff_t language = text_detect(detector, text, length, &confidence);
    return language == TEXT_DETECT_MEMORY ? -1 : detector->tags[language < 0 ? 0 : language];
}
