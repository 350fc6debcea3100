/* sources.h - where published models are, and which of their files a model needs.
 *
 * The only place with addresses of services and names of models. Nothing here uses the network or writes files: the
 * caller fetches the index of Firefox's models, or Hugging Face's description of a repository, and passes it as JSON.
 * Everything in these answers is untrusted: names, sizes, hashes and addresses are checked before they are returned.
 *
 * Errors: MOE_ERROR_ARGUMENT if the source does not have the model; MOE_ERROR_FORMAT if an answer is damaged;
 * MOE_ERROR_UNSUPPORTED if the model has no usable files; MOE_ERROR_MEMORY.
 */
#ifndef GET_SOURCES_H
#define GET_SOURCES_H

#include "moe.h"
#include "tools/get/sha256.h"
#include "tools/text/bytes.h"

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

enum { SOURCE_NAME = 256, SOURCE_CANDIDATES = 3, SOURCE_FILES = 1024 };
#define SOURCE_UNKNOWN UINT64_MAX
#define SOURCE_JSON_BYTES ((size_t)8 << 20) /* maximum size of an index or a description */

typedef enum source_kind { SOURCE_FIREFOX, SOURCE_HUB } source_kind;

/* A model that a user's word may mean. */
typedef struct source_name {
    source_kind kind;
    char id[SOURCE_NAME]; /* "firefox/en-pt", "OWNER/NAME", "OWNER/NAME@REVISION" or "OWNER/NAME+FILE": its folder */
    char repository[SOURCE_NAME]; /* "OWNER/NAME" */
    char revision[SOURCE_NAME];   /* branch, tag or commit of a repository */
    char file[SOURCE_NAME];       /* the only file to fetch, such as a GGUF; "" for the whole model */
} source_name;

typedef struct source_file {
    char name[SOURCE_NAME]; /* without folders */
    char *url;
    char sha256[SHA256_TEXT]; /* of the unpacked content; "" if not published */
    uint64_t bytes;           /* size of the download; SOURCE_UNKNOWN if not published */
    uint64_t unpacked;        /* size of a .gz file's content; SOURCE_UNKNOWN if not published */
    int packed;               /* 1 for gzip */
} source_file;

/* All zero if empty. */
typedef struct source_model {
    source_name name;
    char version[SOURCE_NAME]; /* commit of a repository, or path of Firefox's model */
    char licence[64];          /* SPDX identifier or the publisher's name for it; "" if unknown */
    char variant[64];          /* Firefox: architecture and release status */
    double comet, bleu;        /* on FLORES-200; negative if not published */
    int has_card;              /* 1 if the repository has a README.md */
    source_file *files;
    size_t n, capacity;
} source_model;

/* Set the models that `word` may mean, in order of preference. */
moe_status source_parse(const char *word, source_name out[SOURCE_CANDIDATES], size_t *n, moe_error *error);

/* Return addresses, malloc'ed; NULL if out of memory. */
char *source_index_url(void);                     /* MOE_FIREFOX_INDEX replaces it */
char *source_hub_url(const source_name *name);    /* description of a repository; HF_ENDPOINT */
char *source_card_url(const source_model *model); /* the repository's README.md */
char *source_page_url(const source_name *name);   /* the page of a model, for messages */
char *source_shown_url(const char *url);          /* without user name and password, for messages and records */

/* Parse an index or a description. NULL if it is damaged or has too many values for the memory limit. */
cJSON *source_json(const char *data, size_t length);
/* Choose an entry of Firefox's index and its files: released ones first, then the best metric that all have (COMET,
 * BLEU), base-memory before tiny (`small`: tiny first), and the smallest file. `index_url` is the index's address. */
moe_status source_from_index(const cJSON *index, const char *index_url, const source_name *name, int small,
                             source_model *out, moe_error *error);
/* Write the pairs of Firefox's index that replace a missing pair, such as "de-en en-fr" for de-fr; "" if none do. */
void source_pivot(const cJSON *index, const source_name *name, char *out, size_t size);
/* Choose the files of a repository. */
moe_status source_from_hub(const cJSON *description, const source_name *name, source_model *out, moe_error *error);
void source_model_free(source_model *model);

/* Set `out` to the licence in a model card's front matter, or to "". */
void source_card_licence(const char *card, size_t length, char out[64]);
int source_is_restricted(const char *licence); /* 1 if commercial use is not permitted */
/* Return the total size, and set *least to 1 if some sizes are unknown. */
uint64_t source_bytes(const source_model *model, int *least);

/* Return the licence of a known model, for repositories that do not state one, or "". */
const char *source_known_licence(const source_name *name);
/* Return the command line of the Python converter for a fetched model: options before and after the input. */
const char *source_converter(const source_name *name, const char **options);
/* Return known models by name, for --search: NULL after the last one. */
const char *source_known(size_t i, const char **repository, const char **licence, const char **about);
/* Return 1 if `word` occurs in `text`, ignoring case and treating "_" as "-". */
int source_matches(const char *text, const char *word);

/* Return 1 if a name from the network can name a file: letters, digits and ._+-@=~, no "..", not hidden. */
int source_safe_name(const char *name);
/* Return 1 if `url` begins with https://, or with http:// unless `encrypted`. */
int source_allowed_url(const char *url, int encrypted);

#endif
