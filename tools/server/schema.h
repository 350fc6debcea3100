/* schema.h - answers in JSON of a schema (json-schema.org). */
#ifndef SERVER_SCHEMA_H
#define SERVER_SCHEMA_H

#include <cjson/cJSON.h>

/* Return 1 if a value with any strings of the same number fits a schema; `true` requires an object. If an object with
 * the value as its only member fits instead, set *key to the member's name, which is valid as long as the schema. */
int schema_fits(const cJSON *schema, const cJSON *value, const char **key);

#endif
