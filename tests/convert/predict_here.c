/* predict_here.c - prints what a model's predictor of further tokens computes, for tests/convert/test_predictor.py.
 *
 *     predict_here MODEL PIECE    PIECE: rows per run, 0 for the default
 *
 * Each line of standard input is a prompt of ids, of which the model generates one further token. For each run of the
 * predictor, prints a line per row: position, id of the next token, and the predicted token with its log-probability,
 * or -1 and 0 where the session needs none, and the input of the output matrix. An empty line ends a prompt. */
#define _POSIX_C_SOURCE 200809L
#include "moe.c"

typedef struct feed {
    int32_t ids[1024];
    size_t n;
} feed;

static int pull(void *user, int wait, moe_request *q) {
    feed *f = user;
    if (!wait || !f->n) return f->n ? MOE_PULL_LATER : MOE_PULL_END;
    q->source = f->ids, q->n_source = f->n, q->limit = 2;
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    ((feed *)user)->n = 0;
    if (r->status) exit((fprintf(stderr, "%s\n", r->message), 3));
}

static void show(void *user, const moe_node *t, int after) {
    const moe_frame *f = &((const moe_session *)user)->frames[MOE_PREDICTOR];
    if (t->op != MOE_OP_OUTPUT || !after) return;
    for (size_t row = 0; row < f->rows; row++) {
        const int asked = f->beam.want[row] == -1;
        printf("%d %d %d %.9g", (int)f->positions[row], (int)f->ids[row], asked ? (int)f->beam.top_ids[row] : -1,
               asked ? (double)f->beam.top_logprobs[row] : 0.0);
        for (size_t i = 0; i < t->src[0]->cols; i++) printf(" %.9g", (double)moe_row_of(t->src[0], row)[i]);
        printf("\n");
    }
}

int main(int argc, char **argv) {
    feed f = { .n = 0 };
    moe_model *m;
    moe_session *s;
    moe_error e;
    char line[8192];
    if (argc != 3) return fputs("predict_here MODEL PIECE\n", stderr), 2;
    if (moe_model_open(argv[1], NULL, &m, &e)) return fprintf(stderr, "%s\n", e.message), 3;
    moe_session_params p = moe_session_params_default(m);
    p.threads = p.batch = p.beam = p.nbest = 1, p.min_target = 2, p.kv_bits = 32, p.piece = atoi(argv[2]);
    if (moe_session_new(m, &p, &s, &e)) return fprintf(stderr, "%s\n", e.message), 3;
    s->graphs[MOE_PREDICTOR].watch = show, s->graphs[MOE_PREDICTOR].watcher = s;
    while (fgets(line, sizeof line, stdin)) {
        char *at = line, *end;
        for (f.n = 0; f.n < 1024; at = end) {
            f.ids[f.n] = (int32_t)strtol(at, &end, 10);
            if (end == at) break;
            f.n++;
        }
        s->foreseen = 1, s->pays = 1, s->pace = s->predicting = (moe_pace){ .n = 0 };
        if (moe_translate(s, pull, done, &f, &e)) return fprintf(stderr, "%s\n", e.message), 3;
        printf("\n");
    }
    moe_session_free(s);
    moe_model_close(m);
    return 0;
}
