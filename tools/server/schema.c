/* schema.c - see schema.h.
 *
 * Contents
 *   1. Values     check a value
 *   2. Grammar    compile a schema
 *   3. Text       read JSON of the grammar byte by byte
 */
#include "tools/server/schema.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 64 };

/* ==== 1. Values ========================================================================================= */

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

/* ==== 2. Grammar ========================================================================================
 * The answer is compact JSON. An object has all its properties, in the order of the schema, or, without properties, any
 * members. */

typedef enum kind { STRING, INTEGER, NUMBER, ENUM, FREE, ARRAY, FIXED, CHOICE } kind;

typedef struct node {
    const cJSON *schema;
    kind kind;
    size_t links, n; /* children: links[links .. links + n). FREE and ARRAY have one; FIXED has one per property */
    size_t texts;    /* ENUM: its values are texts[texts .. texts + n]; FIXED: what precedes each property, and "}" */
    double least, most; /* items of an array */
} node;

struct grammar {
    cJSON *root;
    node *nodes;
    size_t n_nodes, nodes_capacity;
    size_t *links;
    size_t n_links, links_capacity;
    char **texts;
    size_t n_texts, texts_capacity;
    size_t any; /* node of any value, or 0 */
    const char *why;
    int no_memory;
};

enum { MOST_NODES = 2000, LONGEST_TEXT = 4096 };

static size_t compile(grammar *g, const cJSON *given, int depth);

/* Append a text, which then belongs to the schema. */
static size_t add_string(grammar *g, char *text) {
    if (!text || text_reserve(&g->texts, &g->texts_capacity, g->n_texts + 1, sizeof *g->texts, NULL)) {
        g->no_memory = 1, free(text);
        return 0;
    }
    g->texts[g->n_texts] = text;
    return g->n_texts++;
}

static size_t add_links(grammar *g, size_t n) {
    const size_t at = g->n_links;
    if (text_reserve(&g->links, &g->links_capacity, at + n, sizeof *g->links, NULL)) return g->no_memory = 1, 0;
    memset(g->links + at, 0, n * sizeof *g->links);
    g->n_links += n;
    return at;
}

static size_t add_node(grammar *g, const cJSON *of, kind k) {
    if (g->n_nodes == MOST_NODES) return g->why = "it has more than 2000 parts", 0;
    if (text_reserve(&g->nodes, &g->nodes_capacity, g->n_nodes + 1, sizeof *g->nodes, NULL)) return g->no_memory = 1, 0;
    g->nodes[g->n_nodes] = (node){ .schema = of, .kind = k, .most = 1e9 };
    return g->n_nodes++;
}

/* Add a value of an enumeration. */
static void add_value(grammar *g, size_t at, const cJSON *value) {
    char *text = cJSON_PrintUnformatted(value);
    const size_t i = add_string(g, text);
    if (g->no_memory) return;
    if (!g->nodes[at].n++) g->nodes[at].texts = i;
    if (strlen(text) > LONGEST_TEXT) g->why = "a value of an enum is too long";
}

static size_t add_values(grammar *g, const cJSON *of, const cJSON *values) {
    const size_t at = add_node(g, of, ENUM);
    const cJSON *one;
    cJSON_ArrayForEach(one, values) if (!g->why && !g->no_memory) add_value(g, at, one);
    return at;
}

/* Return the node of any value. */
static size_t any_value(grammar *g) {
    static const kind kinds[] = { STRING, NUMBER, ENUM, ARRAY, FREE };
    if (g->any || g->why || g->no_memory) return g->any;
    const size_t at = g->any = add_node(g, NULL, CHOICE), links = add_links(g, 5);
    cJSON *words = cJSON_Parse("[null,true,false]");
    g->no_memory |= !words;
    for (size_t i = 0; i < 5 && !g->why && !g->no_memory; i++) {
        const size_t child = kinds[i] == ENUM ? add_values(g, NULL, words) : add_node(g, NULL, kinds[i]);
        const size_t link = kinds[i] >= FREE ? add_links(g, 1) : 0;
        if (g->why || g->no_memory) break;
        if (kinds[i] >= FREE) g->nodes[child].links = link, g->links[link] = at, g->nodes[child].n = 1;
        g->links[links + i] = child;
    }
    cJSON_Delete(words);
    if (g->n_nodes > at) g->nodes[at].links = links, g->nodes[at].n = 5;
    return at;
}

/* Add the text before a property: `{"name":` or `,"name":`. */
static size_t add_lead(grammar *g, const char *name, int first) {
    text_bytes lead = { 0 };
    json j = { .out = &lead };
    text_append(&lead, first ? "{" : ",", 1);
    json_string(&j, NULL, name, strlen(name));
    text_append(&lead, ":", 1);
    if (lead.length > LONGEST_TEXT) g->why = "the name of a property is too long";
    return add_string(g, lead.failed ? (text_bytes_free(&lead), NULL) : lead.data);
}

static size_t compile_object(grammar *g, const cJSON *of, int depth) {
    const cJSON *properties = member(of, "properties"), *others = member(of, "additionalProperties"), *one;
    const size_t n = (size_t)cJSON_GetArraySize(properties),
                 at = add_node(g, of, n || cJSON_IsFalse(others) ? FIXED : FREE);
    const size_t links = add_links(g, n ? n : 1);
    size_t i = 0;
    if (g->why || g->no_memory) return at;
    g->nodes[at].links = links, g->nodes[at].n = n;
    cJSON_ArrayForEach(one, member(of, "required")) if (cJSON_IsString(one) && !member(properties, one->valuestring))
        g->why = "a required property is not listed";
    for (one = n ? properties->child : NULL; one && !g->why && !g->no_memory; one = one->next, i++) {
        const size_t text = add_lead(g, one->string, !i);
        if (!i && !g->no_memory) g->nodes[at].texts = text;
    }
    if (g->nodes[at].kind == FIXED) {
        const size_t text = add_string(g, text_copy(n ? "}" : "{}", n ? 1 : 2));
        if (!n && !g->no_memory) g->nodes[at].texts = text;
    } else {
        const size_t child = cJSON_IsObject(others) ? compile(g, others, depth) : any_value(g);
        if (!g->why && !g->no_memory) g->links[links] = child, g->nodes[at].n = 1;
    }
    for (one = n ? properties->child : NULL, i = 0; one && !g->why && !g->no_memory; one = one->next, i++) {
        const size_t child = compile(g, one, depth);
        if (!g->why && !g->no_memory) g->links[links + i] = child;
    }
    return at;
}

static size_t compile_array(grammar *g, const cJSON *of, int depth) {
    const cJSON *items = member(of, "items"), *least = member(of, "minItems"), *most = member(of, "maxItems");
    const size_t at = add_node(g, of, ARRAY), links = add_links(g, 1);
    if (g->why || g->no_memory) return at;
    g->nodes[at].links = links, g->nodes[at].n = 1;
    if (cJSON_IsNumber(least)) g->nodes[at].least = least->valuedouble;
    if (cJSON_IsNumber(most)) g->nodes[at].most = most->valuedouble;
    if (g->nodes[at].least > g->nodes[at].most || g->nodes[at].least > 1000) g->why = "minItems is too large";
    const size_t child = items ? compile(g, items, depth) : any_value(g);
    if (!g->why && !g->no_memory) g->links[links] = child;
    return at;
}

static size_t compile_type(grammar *g, const cJSON *of, const char *type, int depth) {
    if (strcmp(type, "object") == 0) return compile_object(g, of, depth);
    if (strcmp(type, "array") == 0) return compile_array(g, of, depth);
    if (strcmp(type, "string") == 0) return add_node(g, of, STRING);
    if (strcmp(type, "integer") == 0) return add_node(g, of, INTEGER);
    if (strcmp(type, "number") == 0) return add_node(g, of, NUMBER);
    cJSON *words = strcmp(type, "boolean") == 0 ? cJSON_Parse("[true,false]")
                   : strcmp(type, "null") == 0  ? cJSON_Parse("[null]")
                                                : NULL;
    const size_t at = words ? add_values(g, of, words) : 0;
    if (!words) g->why = "it has an unknown type";
    cJSON_Delete(words);
    return at;
}

/* Compile alternatives: schemas, or names of types of one schema. */
static size_t compile_choice(grammar *g, const cJSON *of, const cJSON *list, int depth) {
    const size_t n = (size_t)cJSON_GetArraySize(list), at = add_node(g, of, CHOICE), links = add_links(g, n);
    const cJSON *one;
    size_t i = 0;
    if (!n) g->why = "a list of alternatives is empty";
    if (g->why || g->no_memory) return at;
    g->nodes[at].links = links, g->nodes[at].n = n;
    cJSON_ArrayForEach(one, list) {
        if (g->why || g->no_memory) break;
        const size_t child =
            cJSON_IsString(one) ? compile_type(g, of, one->valuestring, depth) : compile(g, one, depth);
        if (!g->why && !g->no_memory) g->links[links + i++] = child;
    }
    return at;
}

/* Return the node of a schema. A recursive schema leads back to its node. */
static size_t compile(grammar *g, const cJSON *given, int depth) {
    static const char *const limits[] = {
        "pattern",          "minLength",         "maxLength",   "minimum",  "maximum",       "exclusiveMinimum",
        "exclusiveMaximum", "multipleOf",        "uniqueItems", "allOf",    "not",           "if",
        "prefixItems",      "patternProperties", "format",      "contains", "minProperties", "maxProperties"
    };
    const cJSON *of = depth < DEEPEST ? resolved(g->root, given) : NULL, *type = member(of, "type"),
                *same = member(of, "const"), *choice = member(of, "anyOf") ? member(of, "anyOf") : member(of, "oneOf");
    if (cJSON_IsTrue(of)) return any_value(g);
    if (!cJSON_IsObject(of)) g->why = "a part of it is not an object, or nests too deeply";
    for (size_t i = 0; i < sizeof limits / sizeof *limits && !g->why; i++)
        if (member(of, limits[i])) g->why = limits[i];
    if (g->why || g->no_memory) return 0;
    for (size_t i = 0; i < g->n_nodes; i++)
        if (g->nodes[i].schema == of && !cJSON_IsArray(type)) return i;
    if (member(of, "enum")) {
        if (!cJSON_GetArraySize(member(of, "enum"))) g->why = "an enum is empty";
        return add_values(g, of, member(of, "enum"));
    }
    if (same) {
        const size_t at = add_node(g, of, ENUM);
        if (!g->why && !g->no_memory) add_value(g, at, same);
        return at;
    }
    if (choice) return compile_choice(g, of, choice, depth + 1);
    if (cJSON_IsArray(type)) return compile_choice(g, of, type, depth + 1);
    if (!type && (member(of, "properties") || member(of, "additionalProperties")))
        return compile_object(g, of, depth + 1);
    if (!type && member(of, "items")) return compile_array(g, of, depth + 1);
    return cJSON_IsString(type) ? compile_type(g, of, type->valuestring, depth + 1) : any_value(g);
}

grammar *schema_new(const cJSON *root, const char **why) {
    grammar *g = calloc(1, sizeof *g);
    *why = NULL;
    if (!g) return NULL;
    g->root = cJSON_IsTrue(root) ? cJSON_Parse("{\"type\":\"object\"}") : cJSON_Duplicate(root, 1);
    g->no_memory = !g->root;
    add_node(g, NULL, STRING); /* node 0: the keys of objects with any members */
    const size_t first = g->no_memory ? 0 : compile(g, g->root, 0);
    if (!g->no_memory) g->nodes[0].n = first;
    schema_state s;
    text_bytes end = { 0 };
    if (!g->why && !g->no_memory && (schema_begin(g, &s), !schema_complete(g, &s, &end))) {
        g->no_memory = end.failed;
        g->why = "its shortest value is too long";
    }
    text_bytes_free(&end);
    if (!g->why && !g->no_memory) return g;
    *why = g->no_memory ? NULL : g->why;
    schema_free(g);
    return NULL;
}

void schema_free(grammar *g) {
    if (!g) return;
    for (size_t i = 0; i < g->n_texts; i++) free(g->texts[i]);
    free(g->texts), free(g->links), free(g->nodes);
    cJSON_Delete(g->root);
    free(g);
}

/* ==== 3. Text =========================================================================================== */

enum {
    INSIDE = 1,
    ESCAPE, /* in a string */
    SIGN = 1,
    ZERO,
    DIGITS,
    POINT,
    FRACTION,
    LETTER,
    EXPONENT_SIGN,
    EXPONENT, /* in a number */
    OPEN = 1,
    AFTER, /* in an array: after '[', after a value */
    KEY = 2,
    COLON,
    AFTER_MEMBER, /* in an object with any members: before a key, after a key, after a value */
    MOST_DIGITS = 15
};

static int push(schema_state *s, size_t at) {
    if (s->depth == SCHEMA_DEPTH) return 0;
    s->stack[s->depth++] = (schema_frame){ .node = (unsigned)at };
    return 1;
}

void schema_begin(const grammar *g, schema_state *s) {
    s->depth = 0;
    push(s, g->nodes[0].n);
}

/* End the innermost value. */
static void pop(const grammar *g, schema_state *s) {
    if (!--s->depth) return;
    schema_frame *f = &s->stack[s->depth - 1];
    const node *n = &g->nodes[f->node];
    if (n->kind == ARRAY) f->phase = AFTER, f->count++;
    else if (n->kind == FIXED) f->phase = 0, f->count++;
    else if (n->kind == FREE) f->phase = f->phase == COLON ? AFTER_MEMBER : COLON;
}

static int is_digit(unsigned char c) { return c >= '0' && c <= '9'; }

static int string_step(const grammar *g, schema_state *s, schema_frame *f, unsigned char c) {
    if (!f->phase) return f->phase = INSIDE, c == '"';
    if (f->phase == ESCAPE) return f->phase = INSIDE, c && strchr("\"\\/bfnrt", c) != NULL;
    if (c == '"') pop(g, s);
    else if (c == '\\') f->phase = ESCAPE;
    return c >= ' ';
}

/* Return 1 if the byte continues a number, 0 if not, -1 if the number may end before it. */
static int number_step(schema_frame *f, unsigned char c, int whole) {
    const int may_end = f->phase == ZERO || f->phase == DIGITS || f->phase == FRACTION || f->phase == EXPONENT;
    const unsigned phase = f->phase;
    if (is_digit(c) && f->count < MOST_DIGITS) {
        f->count++;
        if (phase <= SIGN) f->phase = c == '0' ? ZERO : DIGITS;
        else if (phase == POINT) f->phase = FRACTION;
        else if (phase == LETTER || phase == EXPONENT_SIGN) f->phase = EXPONENT, f->count = MOST_DIGITS - 1;
        if (phase != ZERO) return 1;
    } else if (c == '-' && !phase) return f->phase = SIGN, 1;
    else if (c == '.' && !whole && (phase == ZERO || phase == DIGITS) && f->count < MOST_DIGITS)
        return f->phase = POINT, 1;
    else if ((c == 'e' || c == 'E') && !whole && may_end && phase != EXPONENT)
        return f->phase = LETTER, f->count = 0, 1;
    else if ((c == '-' || c == '+') && phase == LETTER) return f->phase = EXPONENT_SIGN, 1;
    return may_end ? -1 : 0;
}

/* Read a byte of one of the values of an enumeration. `phase` is the index of a value that begins with the last `count`
 * bytes. */
static int enum_step(const grammar *g, schema_state *s, schema_frame *f, unsigned char c) {
    const node *n = &g->nodes[f->node];
    char *const *texts = g->texts + n->texts;
    for (unsigned i = 0; i < n->n; i++) {
        if (strncmp(texts[i], texts[f->phase], f->count) != 0 || (unsigned char)texts[i][f->count] != c || !c) continue;
        f->phase = i;
        if (!texts[i][++f->count]) pop(g, s);
        return 1;
    }
    return 0;
}

static int fixed_step(const grammar *g, schema_state *s, schema_frame *f, unsigned char c) {
    const node *n = &g->nodes[f->node];
    const char *text = g->texts[n->texts + f->count];
    if (!c || (unsigned char)text[f->phase] != c) return 0;
    if (text[++f->phase]) return 1;
    if (f->count < n->n) return push(s, g->links[n->links + f->count]);
    pop(g, s);
    return 1;
}

static int array_step(const grammar *g, schema_state *s, schema_frame *f, unsigned char c) {
    const node *n = &g->nodes[f->node];
    if (!f->phase) return f->phase = OPEN, c == '[';
    if (c == ']' && f->count >= n->least) return pop(g, s), 1;
    if (f->count >= n->most) return 0;
    if (f->phase == AFTER) return c == ',' && push(s, g->links[n->links]);
    return push(s, g->links[n->links]) && schema_step(g, s, c);
}

static int free_step(const grammar *g, schema_state *s, schema_frame *f, unsigned char c) {
    const node *n = &g->nodes[f->node];
    if (!f->phase) return f->phase = OPEN, c == '{';
    if (c == '}' && (f->phase == OPEN || f->phase == AFTER_MEMBER)) return pop(g, s), 1;
    if (f->phase == AFTER_MEMBER) return f->phase = KEY, c == ',';
    if (f->phase == COLON) return c == ':' && push(s, g->links[n->links]);
    f->phase = KEY;
    return push(s, 0) && schema_step(g, s, c);
}

static int choice_step(const grammar *g, schema_state *s, schema_frame *f, unsigned char c) {
    const node n = g->nodes[f->node];
    const schema_frame before = *f;
    const int depth = s->depth;
    for (size_t i = 0; i < n.n; i++) {
        s->depth = depth;
        *f = (schema_frame){ .node = (unsigned)g->links[n.links + i] };
        if (g->nodes[f->node].kind == CHOICE && before.count > 8) continue;
        f->count = g->nodes[f->node].kind == CHOICE ? before.count + 1 : 0;
        if (schema_step(g, s, c)) return 1;
    }
    return 0;
}

int schema_step(const grammar *g, schema_state *s, unsigned char c) {
    if (!s->depth) return 0;
    schema_frame *f = &s->stack[s->depth - 1];
    const kind k = g->nodes[f->node].kind;
    switch (k) {
    case STRING: return string_step(g, s, f, c);
    case ENUM: return enum_step(g, s, f, c);
    case FREE: return free_step(g, s, f, c);
    case ARRAY: return array_step(g, s, f, c);
    case FIXED: return fixed_step(g, s, f, c);
    case CHOICE: return choice_step(g, s, f, c);
    default: break;
    }
    const int step = number_step(f, c, k == INTEGER);
    if (step >= 0) return step;
    pop(g, s);
    return schema_step(g, s, c);
}

int schema_inside(const grammar *g, const schema_state *s) {
    const schema_frame *f = s->depth ? &s->stack[s->depth - 1] : NULL;
    return f && g->nodes[f->node].kind == STRING && f->phase == INSIDE;
}

/* Return the alternative with the shortest value, roughly. */
static size_t shortest(const grammar *g, const node *n) {
    size_t best = g->links[n->links];
    for (size_t i = 1; i < n->n; i++) {
        const size_t at = g->links[n->links + i];
        const node *a = &g->nodes[at], *b = &g->nodes[best];
        if (a->kind < b->kind || (a->kind == ARRAY && b->kind == ARRAY && a->least < b->least)) best = at;
    }
    return best;
}

/* Return the next byte of the shortest end, 0 after a change of the state without a byte, or -1. */
static int next_byte(const grammar *g, schema_state *s) {
    schema_frame *f = &s->stack[s->depth - 1];
    const node *n = &g->nodes[f->node];
    switch (n->kind) {
    case STRING: return f->phase == ESCAPE ? 'n' : '"';
    case ENUM: return g->texts[n->texts + f->phase][f->count];
    case FIXED: return g->texts[n->texts + f->count][f->phase];
    case FREE: return f->phase == 0 ? '{' : f->phase == KEY ? '"' : f->phase == COLON ? ':' : '}';
    case ARRAY:
        if (f->phase && f->count >= n->least) return ']';
        if (f->phase != OPEN) return f->phase ? ',' : '[';
        return push(s, g->links[n->links]) ? 0 : -1;
    case CHOICE: *f = (schema_frame){ .node = (unsigned)shortest(g, n) }; return 0;
    default: break;
    }
    const int ended = f->phase == ZERO || f->phase == DIGITS || f->phase == FRACTION || f->phase == EXPONENT;
    if (ended) pop(g, s);
    return ended ? 0 : '0';
}

int schema_complete(const grammar *g, schema_state *s, text_bytes *out) {
    enum { MOST = 1 << 16 };
    for (int steps = 0; s->depth; steps++) {
        const int c = steps < MOST ? next_byte(g, s) : -1;
        const char byte = (char)c;
        if (c < 0 || (c && !schema_step(g, s, (unsigned char)c))) return 0;
        if (c) text_append(out, &byte, 1);
    }
    return !out->failed;
}
