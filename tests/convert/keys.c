/* The table of the keys of layers as the engine has it, for test_keys.py: a line for each kind of layer, then one for
 * each key: layer, key, kind, range or names, default ("required", or "as KEY"), between tabs. */
#include "../../moe.c"

static void print_default(const moe_key *k) {
    if (k->inherits) {
        for (size_t i = 0; i < MOE_COUNT(moe_keys); i++)
            if (moe_keys[i].layer == k->layer && moe_keys[i].at == k->inherits) printf("as %s", moe_keys[i].key);
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
    for (size_t i = 0; moe_layer_kinds[i]; i++) printf("%s\n", moe_layer_kinds[i]);
    for (size_t i = 0; i < MOE_COUNT(moe_keys); i++) {
        const moe_key *k = &moe_keys[i];
        printf("%s\t%s\t%s\t", moe_layer_kinds[k->layer], k->key, kinds[k->kind]);
        if (k->kind != MOE_KEY_NAME) printf("%.17g %.17g", k->low, k->high);
        for (size_t n = 0; k->kind == MOE_KEY_NAME && k->names[n]; n++) printf("%s%s", n ? " " : "", k->names[n]);
        printf("\t");
        print_default(k);
        printf("\n");
    }
    return 0;
}
