/* yaml.h - the subset of YAML that Marian's programs write: a mapping of texts to texts or lists of texts.
 *
 * Values are texts, as a YAML 1.1 parser would convert pieces such as `y`, `null` or `1.0` to other types.
 */
#ifndef CONVERT_YAML_H
#define CONVERT_YAML_H

#include "tools/text/bytes.h"

typedef struct yaml_entry {
    moe_span key;
    size_t first, count; /* its texts in yaml_map */
    int list;            /* 0: one text */
    int asked;           /* 1: read by the caller, see yaml_reject_rest */
} yaml_entry;

/* All zero if empty. Texts are UTF-8 and may contain NUL. */
typedef struct yaml_map {
    const char *where; /* what the text is, for messages; valid as long as the map */
    yaml_entry *entries;
    moe_span *texts;
    size_t n, entry_capacity, n_texts, text_capacity;
    text_index index;
    char *bytes; /* contents of keys and texts */
    size_t used;
    const char *at, *end; /* the rest of the line being parsed */
} yaml_map;

/* Parse a text. Errors: MOE_ERROR_FORMAT with the number of the line, MOE_ERROR_MEMORY. */
moe_status yaml_parse(yaml_map *map, const void *data, size_t length, const char *where, moe_error *error);
void yaml_free(yaml_map *map);

yaml_entry *yaml_find(const yaml_map *map, const char *key); /* mark the entry as asked; NULL if absent */
/* Find the text of a key, or `otherwise`. Errors: the key is absent and `otherwise` NULL, or its value is a list. */
moe_status yaml_text(const yaml_map *map, const char *key, const char *otherwise, moe_span *text, moe_error *error);
/* Read a number from `least` to `most`. */
moe_status yaml_whole(const yaml_map *map, const char *key, const char *otherwise, int64_t least, int64_t most,
                      int64_t *value, moe_error *error);
moe_status yaml_real(const yaml_map *map, const char *key, const char *otherwise, double least, double most,
                     double *value, moe_error *error);
/* Set *value to the index of a key's text in `choices`, words separated by spaces; the first is the default. */
moe_status yaml_choice(const yaml_map *map, const char *key, const char *choices, int *value, moe_error *error);
void yaml_ignore(const yaml_map *map, const char *keys);            /* mark keys as asked; * matches any characters */
moe_status yaml_reject_rest(const yaml_map *map, moe_error *error); /* error if a key was not asked */
moe_status yaml_refuse(const yaml_map *map, const char *key, moe_error *error); /* "KEY VALUE is not supported" */

/* Write a text of a file for a message to out[size]: shortened, without control characters. Return out. */
const char *yaml_short(moe_span text, char *out, size_t size);

#endif
