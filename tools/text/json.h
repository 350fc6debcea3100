/* json.h - writes JSON.
 *
 * A value is added to the object or list that was opened last. `key` is its name in an object, NULL in a list and at
 * the top level. Numbers that are not finite are written as null. out->failed is set if memory runs out.
 */
#ifndef TEXT_JSON_H
#define TEXT_JSON_H

#include "tools/text/bytes.h"

typedef struct json {
    text_bytes *out;
    int pretty; /* write each member of an object on its own line, indented with TABs */
    int script; /* strings are safe inside <script>: no <, no &, no JavaScript line separator */
    int depth, more, line;
} json;

void json_open(json *j, const char *key, char bracket); /* { or [ */
void json_close(json *j, char bracket);                 /* } or ] */
void json_break(json *j);                               /* start a new line before the next value */

void json_null(json *j, const char *key);
void json_bool(json *j, const char *key, int value);
void json_whole(json *j, const char *key, int64_t value);
void json_float(json *j, const char *key, float value); /* the shortest decimal that parses to this float */
void json_digits(json *j, const char *key, double value, int digits);  /* rounded to `digits` digits */
void json_fixed(json *j, const char *key, double value, int decimals); /* rounded to `decimals` decimals */
void json_ids(json *j, const char *key, const int32_t *ids, size_t n);
void json_string(json *j, const char *key, const char *data, size_t length); /* valid UTF-8 */
void json_text(json *j, const char *key, const char *text);                  /* NUL-terminated */
void json_clean(json *j, const char *key, const char *data, size_t length);  /* made safe by text_append_clean */

#endif
