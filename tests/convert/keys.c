/* keys.c - prints moe.c's table of layer keys for test_keys.py. Each kind of layer has a line, followed by a line per
 * key with tab-separated layer, key, type, range or names, and default (or "required", or "as KEY"). */
#include "../../moe.c"

static void print_default(const moe_layer_type *type, const moe_key *k) {
    if (k->inherits) {
        for (size_t i = 0; i < type->n_keys; i++)
            if (type->keys[i].at == k->inherits) printf("as %s", type->keys[i].key);
    } else if (k->fallback < k->low) {
        printf("required");
    } else if (k->kind == MOE_KEY_NAME) {
        printf("%s", k->names[(int)k->fallback]);
    } else {
        printf("%.17g", k->fallback);
    }
}

int main(void) {
    static const char *const kinds[] = { "count", "flag", "real", "name" };
    for (size_t i = 0; i < MOE_COUNT(moe_layer_types); i++) {
        const moe_layer_type *type = moe_layer_types[i];
        printf("%s\n", type->name);
        for (const moe_key *k = type->keys; k < type->keys + type->n_keys; k++) {
            printf("%s\t%s\t%s\t", type->name, k->key, kinds[k->kind]);
            if (k->kind != MOE_KEY_NAME) printf("%.17g %.17g", k->low, k->high);
            for (size_t n = 0; k->kind == MOE_KEY_NAME && k->names[n]; n++) printf("%s%s", n ? " " : "", k->names[n]);
            printf("\t");
            print_default(type, k);
            printf("\n");
        }
    }
    return 0;
}
