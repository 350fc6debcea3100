#include "moe.h"
#include <stdio.h>
static int next(void *user, int wait, moe_request *r) {
    static const int32_t pieces[] = { 1964, 1587, 3734, 266, 576, 3042, 264 };
    (void)wait;
    r->source = pieces, r->n_source = sizeof pieces / sizeof *pieces;
    return (*(int *)user)++ ? MOE_PULL_END : MOE_PULL_REQUEST;
}
static void done(void *user, const moe_result *r) {
    (void)user;
    if (r->status) fprintf(stderr, "not translated: %s\n", r->message);
    for (size_t i = 0; r->n_hypotheses && i < r->hypotheses[0].n_ids; i++) printf("%d ", (int)r->hypotheses[0].ids[i]);
}
int main(int argc, char **argv) {
    moe_error e = { 0 };
    moe_model *m;
    moe_session *s;
    int sent = 0;
    if (argc < 3) return fprintf(stderr, "usage: app MODEL LANGUAGE\n"), 2;
    if (moe_model_open(argv[1], NULL, &m, &e)) return fprintf(stderr, "%s\n", e.message), 1;
    moe_session_params p = moe_session_params_default(m);
    p.target_tag = moe_model_language_tag(m, argv[2]);
    if (moe_session_new(m, &p, &s, &e) || moe_translate(s, next, done, &sent, &e))
        return fprintf(stderr, "%s\n", e.message), 1;
    moe_session_free(s), moe_model_close(m);
}
