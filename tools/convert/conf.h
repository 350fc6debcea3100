/* conf.h - JSON files of a checkpoint, which are untrusted: config.json and others. */
#ifndef CONVERT_CONF_H
#define CONVERT_CONF_H

#include "tools/convert/making.h"

#include <cjson/cJSON.h>

#define CONF_NONE INT64_MIN /* a required integer; a required number is NaN */

enum { CONF_LARGEST = 1 << 26 };

/* Parse a text; NULL after an error: invalid JSON, duplicate keys, or far more values than its size suggests. */
cJSON *conf_parse(making *m, const char *file, const void *data, size_t length);
/* Read a file; the caller deletes the result. NULL after an error. `file` receives its name. */
cJSON *conf_read(making *m, const char *path, const char **file);

/* The members of an object. Members that were not read are rejected by conf_end. */
typedef struct conf {
    making *m;
    const char *file; /* for messages */
    const cJSON *object;
    const cJSON **asked;
    size_t n_asked, capacity;
} conf;

/* Begin to read an object; NULL is an empty object. */
int conf_begin(making *m, const char *file, const cJSON *object, conf *out);
void conf_free(conf *c);

const cJSON *conf_raw(conf *c, const char *key); /* NULL if the member is missing or null */
/* Return an integer, which is in [least, most] also after an error. */
int64_t conf_whole(conf *c, const char *key, int64_t otherwise, int64_t least, int64_t most);
double conf_real(conf *c, const char *key, double otherwise, double least, double most);
int conf_flag(conf *c, const char *key, int otherwise);
const char *conf_text(conf *c, const char *key); /* NULL if missing; an error if not a text */
/* Reject a member unless its value is in `values`, a JSON list; a missing or null one is accepted. */
int conf_only(conf *c, const char *key, const char *values);
int conf_is_listed(const cJSON *value, const char *values);
int conf_refuse(conf *c, const char *key, const cJSON *value, const char *more); /* "KEY is VALUE, which ..." */
/* Reject members with a value that were not read and of which `known` returns 0. */
int conf_end(conf *c, int (*known)(const void *user, const char *key), const void *user);

/* Write a value for a message. Return out. */
const char *conf_short(const cJSON *value, char *out, size_t size);

#endif
