/* json.h - JSON, written as it comes, by all programs that write any.
 *
 * A value goes into the object or list that was opened last. `key` names it in an object and is NULL in a list and at
 * the top. Numbers that are not finite are null. Memory that ran out shows in out->failed.
 */
#ifndef TEXT_JSON_H
#define TEXT_JSON_H

#include "tools/text/bytes.h"

typedef struct json {
    text_bytes *out;
    int pretty; /* every member of an object in a line of its own, with TABs */
    int script; /* strings may stand inside <script>: no <, no &, no line separator of JavaScript */
    int depth, more, line;
} json;

void json_open(json *j, const char *key, char bracket); /* { or [ */
void json_close(json *j, char bracket);                 /* } or ] */
void json_break(json *j);                               /* the next value begins a line */

void json_null(json *j, const char *key);
void json_bool(json *j, const char *key, int value);
void json_whole(json *j, const char *key, int64_t value);
void json_float(json *j, const char *key, float value);                /* the shortest decimal that reads back */
void json_digits(json *j, const char *key, double value, int digits);  /* rounded to so many digits */
void json_fixed(json *j, const char *key, double value, int decimals); /* with so many decimals */
void json_ids(json *j, const char *key, const int32_t *ids, size_t n);
void json_string(json *j, const char *key, const char *data, size_t length); /* valid UTF-8 */
void json_text(json *j, const char *key, const char *text);                  /* the same, ended by a NUL */
void json_clean(json *j, const char *key, const char *data, size_t length);  /* what text_append_clean makes of it */

#endif
