#include "moe.h"
#include <stdio.h>
int main(int argc, char **argv) {
    static const int32_t pieces[] = { 1964, 1587, 3734, 266, 576, 3042, 264 };
    int32_t ids[512];
    size_t n;
    moe_error e = { 0 };
    moe_model *m;
    moe_session *s;
    if (argc < 3) return fprintf(stderr, "usage: app MODEL LANGUAGE\n"), 2;
    if (moe_model_open(argv[1], NULL, &m, &e)) return fprintf(stderr, "%s\n", e.message), 1;
    moe_session_params p = moe_session_params_default(m);
    p.target_tag = moe_model_language_tag(m, argv[2]);
    if (moe_session_new(m, &p, &s, &e) || moe_translate_ids(s, pieces, 7, ids, 512, &n, &e))
        return fprintf(stderr, "%s\n", e.message), 1;
    for (size_t i = 0; i < n; i++) printf("%d ", (int)ids[i]);
    moe_session_free(s), moe_model_close(m);
}
