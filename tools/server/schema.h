/* schema.h - answers in JSON of a schema (json-schema.org).
 *
 * A schema has objects, arrays, strings, numbers, integers, Booleans, null, enum, const, anyOf, oneOf, $ref, minItems
 * and maxItems.
 */
#ifndef SERVER_SCHEMA_H
#define SERVER_SCHEMA_H

#include "tools/text/json.h"

#include <cjson/cJSON.h>

/* Return 1 if a value with any strings of the same number fits a schema; `true` requires an object. If an object with
 * the value as its only member fits instead, set *key to the member's name, which is valid as long as the schema. */
int schema_fits(const cJSON *schema, const cJSON *value, const char **key);

/* A grammar of the compact JSON of a schema. It never changes. */
typedef struct grammar grammar;

enum { SCHEMA_DEPTH = 32 }; /* maximum depth of nested values */

typedef struct schema_frame { /* a value that is being read */
    unsigned node, phase, count;
} schema_frame;

typedef struct schema_state { /* the position in an answer; depth 0 after its end */
    int depth;
    schema_frame stack[SCHEMA_DEPTH];
} schema_state;

/* Compile a schema; `true` is any object. Return NULL and set *why to what is not supported, or to NULL if out of
 * memory. */
grammar *schema_new(const cJSON *root, const char **why);
void schema_free(grammar *g); /* may be NULL */
void schema_begin(const grammar *g, schema_state *s);
/* Read a byte. Return 0, with an undefined state, if the schema forbids it. */
int schema_step(const grammar *g, schema_state *s, unsigned char c);
/* Return 1 inside a string, where all bytes from 0x20 except quotation marks and backslashes are allowed. */
int schema_inside(const grammar *g, const schema_state *s);
/* Append a short end of an unfinished answer. Return 0 if there is none, or out of memory. */
int schema_complete(const grammar *g, schema_state *s, text_bytes *out);

#endif
