/* schema.c - see schema.h. */
#include "tools/server/schema.h"

#include <math.h>
#include <string.h>

enum { DEEPEST = 64 };

static const cJSON *member(const cJSON *object, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

/* Follow "$ref": "#/$defs/name". NULL if it leads nowhere. */
static const cJSON *resolved(const cJSON *root, const cJSON *schema) {
    for (int i = 0; i < DEEPEST; i++) {
        const cJSON *ref = member(schema, "$ref");
        if (!cJSON_IsString(ref)) return schema;
        const char *at = ref->valuestring;
        if (*at++ != '#') return NULL;
        for (schema = root; schema && *at == '/';) {
            char name[128];
            const size_t n = strcspn(++at, "/");
            if (n >= sizeof name) return NULL;
            memcpy(name, at, n), name[n] = 0;
            schema = member(schema, name), at += n;
        }
        if (!schema || *at) return NULL;
    }
    return NULL;
}

static int has_type(const cJSON *value, const char *type) {
    switch (type[0]) {
    case 's': return cJSON_IsString(value);
    case 'o': return cJSON_IsObject(value);
    case 'a': return cJSON_IsArray(value);
    case 'b': return cJSON_IsBool(value);
    case 'i': return cJSON_IsNumber(value) && floor(value->valuedouble) == value->valuedouble;
    default: return type[1] == 'u' && type[2] == 'm' ? cJSON_IsNumber(value) : cJSON_IsNull(value);
    }
}

static int fits(const cJSON *root, const cJSON *schema, const cJSON *value, int depth);

static int fits_any(const cJSON *root, const cJSON *schemas, const cJSON *value, int depth) {
    const cJSON *one;
    cJSON_ArrayForEach(one, schemas) if (fits(root, one, value, depth)) return 1;
    return !schemas;
}

static int fits_type(const cJSON *type, const cJSON *value) {
    const cJSON *one;
    if (cJSON_IsString(type)) return has_type(value, type->valuestring);
    cJSON_ArrayForEach(one, type) if (cJSON_IsString(one) && has_type(value, one->valuestring)) return 1;
    return !type;
}

static int fits_object(const cJSON *root, const cJSON *schema, const cJSON *value, int depth) {
    const cJSON *properties = member(schema, "properties"), *others = member(schema, "additionalProperties"), *one;
    cJSON_ArrayForEach(one, member(schema, "required")) if (cJSON_IsString(one) &&
                                                            !member(value, one->valuestring)) return 0;
    cJSON_ArrayForEach(one, value) {
        const cJSON *own = member(properties, one->string);
        if (!own && cJSON_IsFalse(others)) return 0;
        if (!own) own = others;
        if (own && !fits(root, own, one, depth)) return 0;
    }
    return 1;
}

static int fits_array(const cJSON *root, const cJSON *schema, const cJSON *value, int depth) {
    const cJSON *items = member(schema, "items"), *least = member(schema, "minItems"),
                *most = member(schema, "maxItems"), *one;
    const int n = cJSON_GetArraySize(value);
    if (cJSON_IsNumber(least) && n < least->valuedouble) return 0;
    if (cJSON_IsNumber(most) && n > most->valuedouble) return 0;
    cJSON_ArrayForEach(one, value) if (items && !fits(root, items, one, depth)) return 0;
    return 1;
}

static int fits(const cJSON *root, const cJSON *schema, const cJSON *value, int depth) {
    schema = depth < DEEPEST ? resolved(root, schema) : NULL;
    if (!cJSON_IsObject(schema)) return cJSON_IsTrue(schema);
    const cJSON *all = member(schema, "enum"), *same = member(schema, "const"), *one;
    if (member(schema, "pattern") || !fits_type(member(schema, "type"), value)) return 0;
    int listed = !all;
    cJSON_ArrayForEach(one, all) listed |= cJSON_Compare(one, value, 1);
    if (!listed || (same && !cJSON_Compare(same, value, 1))) return 0;
    if (!fits_any(root, member(schema, "anyOf"), value, depth + 1) ||
        !fits_any(root, member(schema, "oneOf"), value, depth + 1))
        return 0;
    cJSON_ArrayForEach(one, member(schema, "allOf")) if (!fits(root, one, value, depth + 1)) return 0;
    if (cJSON_IsObject(value)) return fits_object(root, schema, value, depth + 1);
    return !cJSON_IsArray(value) || fits_array(root, schema, value, depth + 1);
}

int schema_fits(const cJSON *schema, const cJSON *value, const char **key) {
    *key = NULL;
    if (cJSON_IsTrue(schema)) return cJSON_IsObject(value);
    if (fits(schema, schema, value, 0)) return 1;
    const cJSON *properties = member(resolved(schema, schema), "properties");
    if (cJSON_GetArraySize(properties) != 1 || !fits(schema, properties->child, value, 1)) return 0;
    *key = properties->child->string;
    return 1;
}
