/* test_search.c - compares beam search (rules of the paper and of Marian, with and without constraints), loop detection
 * and sampling with naive implementations, and tests the frequencies of samples. No model runs: log-probabilities and
 * attention are functions of the previous tokens. The engine stores a tree of tokens and counts; the reference stores
 * whole sentences and computes in double precision. */
#include "moe.c"

#include "tests/test.h"

#include "tests/engine/model_writer.h"

enum { BOS = 1, EOS = 2, TOKENS = 14, SOURCE = 9, LEAD = 1, LONGEST = 16, WIDEST = 5, CONSTRAINTS = 3 };

/* Return a uniform number in [0, 1), with more values than mw_uniform's 2^24, so that no two tokens are equal. */
static double uniform(uint64_t *state) { return (double)(mw_next(state) >> 11) / 9007199254740992.0; }

/* ---- The tasks ---- */

typedef struct task {
    uint64_t seed;
    int attends, beam, nbest;
    int marian; /* 1 for Marian's rules */
    size_t limit, n_constraints;
    double alpha, prune, sharp; /* sharp: range of the random logits */
    struct constraint {
        int32_t ids[3];
        size_t n, first, length; /* first, length: span in the source; length 0 if unknown */
        int once;
    } constraints[CONSTRAINTS];
} task;

typedef struct outlook {
    float logprobs[TOKENS], attention[SOURCE];
} outlook;

/* Return the decoder's output after n tokens. Tokens below 4 are begin, end etc.; the end becomes more probable. */
static outlook look(const task *t, const int32_t *tokens, size_t n) {
    uint64_t state = t->seed;
    double logits[TOKENS], weights[SOURCE], sum = 0, all = 0;
    outlook o;
    for (size_t i = 0; i < n; i++) state = moe_hash(state ^ (uint64_t)tokens[i]);
    for (size_t i = 0; i < TOKENS; i++) logits[i] = t->sharp * uniform(&state) - (i < 4 && i != EOS ? 30 : 0);
    logits[EOS] += 0.3 * (double)n - 1;
    for (size_t i = 0; i < SOURCE; i++) all += weights[i] = exp(8 * uniform(&state));
    for (size_t i = 0; i < TOKENS; i++) sum += exp(logits[i]);
    for (size_t i = 0; i < TOKENS; i++) o.logprobs[i] = (float)(logits[i] - log(sum));
    for (size_t i = 0; i < SOURCE; i++) o.attention[i] = (float)(weights[i] / all);
    return o;
}

static task random_task(uint64_t seed) {
    uint64_t r = seed;
    task t = { .seed = mw_next(&r), .attends = mw_below(&r, 4) > 0 };
    t.beam = 1 + (int)mw_below(&r, WIDEST);
    t.nbest = 1 + (int)mw_below(&r, (size_t)t.beam);
    t.n_constraints = mw_below(&r, CONSTRAINTS + 1);
    t.alpha = mw_below(&r, 2) ? 0.6 : 0;
    t.prune = mw_below(&r, 2) ? 3 : 0;
    t.sharp = 2 + 6 * uniform(&r);
    const int shared = !mw_below(&r, 4); /* 1 if constraints have tokens in common */
    size_t tokens = 0;
    for (size_t c = 0; c < t.n_constraints; c++) {
        struct constraint *k = &t.constraints[c];
        k->n = 1 + mw_below(&r, 3);
        for (size_t i = 0; i < k->n; i++)
            k->ids[i] = 4 + (int32_t)(shared ? mw_below(&r, 3) : c + CONSTRAINTS * mw_below(&r, 3));
        k->once = mw_below(&r, 2) > 0;
        k->length = mw_below(&r, 4) ? 1 + mw_below(&r, 3) : 0;
        k->first = k->length ? LEAD + mw_below(&r, SOURCE - LEAD - k->length) : 0;
        tokens += k->n;
    }
    t.limit = tokens + 2 + mw_below(&r, LONGEST - tokens - 2);
    t.marian = !mw_below(&r, 3);
    if (t.marian) t.prune = 0;
    return t;
}

/* ---- The reference ---- */

typedef struct sentence {
    int32_t tokens[LONGEST];
    size_t n;
    double logprob, rank, score;
    int met[CONSTRAINTS];
    size_t since; /* index after the last completed constraint */
    int writing;  /* the constraint to complete first; -1 if none */
    int finished;
} sentence;

/* Return 1 if the sentence ends with the constraint's first n tokens and all of these are at or after `since`. */
static int ends_with(const sentence *s, const struct constraint *k, size_t n, size_t since) {
    return n <= s->n - since && memcmp(s->tokens + s->n - n, k->ids, n * sizeof *k->ids) == 0;
}

static size_t begun(const sentence *s, const struct constraint *k) {
    size_t longest = 0;
    for (size_t n = 1; n < k->n; n++)
        if (ends_with(s, k, n, s->since)) longest = n;
    return longest;
}

static void append(const task *t, sentence *s, int32_t id, double logprob) {
    int met = -1;
    s->tokens[s->n++] = id;
    s->logprob += logprob;
    for (size_t c = 0; c < t->n_constraints; c++) {
        if (s->met[c] || !ends_with(s, &t->constraints[c], t->constraints[c].n, s->since)) continue;
        if (s->writing < 0 ? met < 0 || t->constraints[c].n > t->constraints[met].n : s->writing == (int)c)
            met = (int)c;
    }
    if (met < 0) return;
    s->met[met] = 1;
    s->since = s->n;
    s->writing = -1;
}

/* Return 1 if the token would repeat a constraint that may appear only once, and no other constraint requires it. */
static int repeats(const task *t, const sentence *s, int32_t id) {
    int again = 0;
    sentence longer = *s;
    longer.tokens[longer.n++] = id;
    for (size_t c = 0; c < t->n_constraints; c++) {
        if (!ends_with(&longer, &t->constraints[c], t->constraints[c].n, 0)) continue;
        if (!s->met[c]) return 0;
        again |= t->constraints[c].once;
    }
    return again;
}

typedef struct candidate {
    double rank, logprob;
    size_t parent;
    int32_t id;
    int writes; /* the constraint to complete next; -1 if none */
} candidate;

/* Store the candidates of a sentence, by See et al. 2017, eq 9: attention on a constraint is its copy probability. */
static size_t candidates_of(const task *t, const sentence *s, size_t parent, candidate *out) {
    const outlook o = look(t, s->tokens, s->n);
    size_t n = 0, missing = 0;
    const size_t left = (size_t)t->beam + 1;
    int32_t likeliest = 0;
    int next = -1; /* the next constraint, if any */
    double stay = 0;
    for (int32_t i = 1; i < TOKENS; i++)
        if (o.logprobs[i] > o.logprobs[likeliest]) likeliest = i;
    if (s->writing >= 0) { /* the next token is fixed and does not change the rank */
        const struct constraint *k = &t->constraints[s->writing];
        const int32_t id = k->ids[begun(s, k)];
        out[n++] = (candidate){ s->rank, o.logprobs[id], parent, id, s->writing };
        return n;
    }
    for (size_t c = 0; c < t->n_constraints; c++) {
        const struct constraint *k = &t->constraints[c];
        double weight = 0, rank, own, stays = 0;
        int commits;
        if (s->met[c]) continue;
        missing += k->n;
        const int32_t id = k->ids[begun(s, k)];
        for (size_t i = 0; i < k->length; i++) weight += o.attention[k->first + i];
        if (t->attends && k->length) {
            if (weight > 0.999) weight = 0.999;
            own = (1 - weight) * exp(o.logprobs[id]);
            rank = log(weight + own), stays = log(1 - weight), commits = weight >= own;
        } else {
            rank = fmin(0, o.logprobs[id] + 6), commits = o.logprobs[id] < -0.7;
        }
        if (n && !(s->rank + rank > out[0].rank)) continue;
        out[0] = (candidate){ s->rank + rank, o.logprobs[id], parent, id, commits ? (int)c : -1 };
        next = (int)c, stay = stays, n = 1;
    }
    if (n && (s->n + 1 + missing >= t->limit || likeliest == EOS)) {
        out[0].writes = next;
        return n;
    }
    for (int repeated = 0; !repeated || !n; repeated = 1) { /* repeat constraints only if there is no other token */
        float below_this = 1;
        for (size_t k = 0; k < left; k++) { /* find the most probable tokens one by one */
            int32_t id = -1;
            for (int32_t i = 0; i < TOKENS; i++)
                if (o.logprobs[i] < below_this && (id < 0 || o.logprobs[i] > o.logprobs[id])) id = i;
            below_this = o.logprobs[id];
            if ((next >= 0 && (id == EOS || id == out[0].id)) || (!repeated && repeats(t, s, id))) continue;
            out[n++] = (candidate){ s->rank + o.logprobs[id] + stay, o.logprobs[id], parent, id, -1 };
        }
    }
    return n;
}

static int by_rank(const void *a, const void *b) {
    const double x = ((const candidate *)a)->rank, y = ((const candidate *)b)->rank;
    return (x < y) - (x > y);
}

static int by_score(const void *a, const void *b) {
    const sentence *x = a, *y = b;
    if (x->finished != y->finished) return y->finished - x->finished;
    return (x->score < y->score) - (x->score > y->score);
}

/* Compare only scores, because Marian's rules rank truncated and finished hypotheses together. */
static int by_score_alone(const void *a, const void *b) {
    const double x = ((const sentence *)a)->score, y = ((const sentence *)b)->score;
    return (x < y) - (x > y);
}

/* Return the score of GNMT eq 14 without coverage; `length` includes the end token. */
static double score_of(const task *t, const sentence *s, size_t length) {
    return s->logprob / pow((5 + (double)length) / 6, t->alpha);
}

static void finish(const task *t, const sentence *s, double end, int finished, sentence *all, size_t *n) {
    all[*n] = *s;
    all[*n].logprob += end;
    all[*n].finished = finished;
    all[*n].score = score_of(t, &all[*n], s->n + (size_t)finished);
    ++*n;
}

/* Search without optimisations. Return the number of finished sentences, sorted from best to worst. */
static size_t search_naively(const task *t, sentence *finished) {
    sentence live[WIDEST] = { { .writing = -1 } }, next[WIDEST];
    size_t n_live = 1, n_finished = 0;
    for (size_t step = 1;; step++) {
        candidate all[WIDEST * (WIDEST + 2)];
        size_t n = 0, n_next = 0;
        double best = -DBL_MAX;
        for (size_t h = 0; h < n_live; h++) n += candidates_of(t, &live[h], h, all + n);
        qsort(all, n, sizeof *all, by_rank);
        const size_t places = (size_t)t->beam - (t->marian ? n_finished : 0);
        for (size_t i = 0; i < n && (t->marian ? i : n_next) < places; i++) {
            const candidate *c = &all[i];
            const sentence *from = &live[c->parent];
            if (t->prune > 0 && c->rank < all[0].rank - t->prune) break;
            if (c->id == EOS) {
                if (i < (size_t)t->beam) finish(t, from, c->logprob, 1, finished, &n_finished);
                continue;
            }
            next[n_next] = *from;
            next[n_next].rank = c->rank;
            next[n_next].writing = c->writes;
            append(t, &next[n_next++], c->id, c->logprob);
            if (t->marian && step == t->limit) finish(t, &next[--n_next], 0, 0, finished, &n_finished);
        }
        memcpy(live, next, sizeof live);
        n_live = n_next;
        qsort(finished, n_finished, sizeof *finished, t->marian ? by_score_alone : by_score);
        if (t->marian && n_live) continue;
        while (t->prune > 0 && n_finished && finished[n_finished - 1].score < finished[0].score - t->prune)
            n_finished--;
        if (n_finished >= (size_t)t->beam || !n_live) return n_finished;
        if (step >= t->limit) {
            for (size_t h = 0; h < n_live; h++) finish(t, &live[h], 0, 0, finished, &n_finished);
            qsort(finished, n_finished, sizeof *finished, by_score);
            return n_finished;
        }
        for (size_t h = 0; h < n_live; h++) best = fmax(best, live[h].logprob);
        if (n_finished >= (size_t)t->nbest && finished[0].score >= best / pow((5 + (double)t->limit) / 6, t->alpha))
            return n_finished;
    }
}

/* ---- The engine ---- */

/* Store the path of tokens that ends with token `last`; return its length. */
static size_t tokens_of(const moe_slot *slot, int32_t last, int32_t *out) {
    size_t n = 0, at;
    for (int32_t i = last; i >= 0; i = slot->tokens[i].parent) n++;
    at = n;
    for (int32_t i = last; i >= 0; i = slot->tokens[i].parent) out[--at] = slot->tokens[i].id;
    return n;
}

/* Store the `top` most probable tokens of a row and its other outputs. */
static void answer_row(const task *t, const moe_search *s, const moe_slot *slot, const moe_live *live, size_t top,
                       int32_t *ids, float *logprobs, float *want, float *attention, float *starts) {
    int32_t tokens[LONGEST], begin[CONSTRAINTS];
    const outlook o = look(t, tokens, tokens_of(slot, live->last, tokens));
    const moe_row row = moe_live_row(s, slot, live, slot->steps);
    for (size_t k = 0; k < top; k++) {
        ids[k] = -1;
        for (int32_t i = 0; i < TOKENS; i++)
            if ((!k || o.logprobs[i] < logprobs[k - 1]) && (ids[k] < 0 || o.logprobs[i] > o.logprobs[ids[k]]))
                ids[k] = i;
        logprobs[k] = o.logprobs[ids[k]];
    }
    *want = row.want >= 0 ? o.logprobs[row.want] : 0;
    memcpy(attention, o.attention, sizeof o.attention);
    moe_fill_starts(s, slot, live, begin);
    for (size_t c = 0; c < CONSTRAINTS; c++) starts[c] = begin[c] >= 0 ? o.logprobs[begin[c]] : 0;
}

static size_t search_with_engine(const task *t, moe_slot *slot) {
    const moe_search s = { .beam = t->beam,
                           .nbest = t->nbest,
                           .alpha = (float)t->alpha,
                           .constant = 5,
                           .prune = (float)t->prune,
                           .rules = moe_rule_sets[t->marian ? MOE_RULES_MARIAN : MOE_RULES_PAPER],
                           .eos = EOS,
                           .ends = { EOS },
                           .n_ends = 1,
                           .max_target = LONGEST,
                           .max_constraints = CONSTRAINTS,
                           .aligns = t->attends };
    const size_t top = (size_t)t->beam + 1;
    int32_t top_ids[WIDEST * (WIDEST + 1)];
    float top_logprobs[WIDEST * (WIDEST + 1)], want[WIDEST], attention[WIDEST * SOURCE], starts[WIDEST * CONSTRAINTS];
    moe_live next[WIDEST];
    const moe_beam a = { .top = top,
                         .top_ids = top_ids,
                         .top_logprobs = top_logprobs,
                         .want_logprob = want,
                         .attention_stride = SOURCE,
                         .attention = t->attends ? attention : NULL,
                         .start_logprobs = starts };
    slot->task = (moe_task){ .begin = BOS,
                             .length = SOURCE,
                             .limit = t->limit,
                             .beam = (size_t)t->beam,
                             .lead = LEAD,
                             .n_source = SOURCE - LEAD - 1,
                             .n_constraints = t->n_constraints };
    for (size_t c = 0, n = 0; c < t->n_constraints; c++) {
        const struct constraint *k = &t->constraints[c];
        slot->constraints[c] = (moe_constraint_state){ n, k->n, k->first, k->length, k->once };
        memcpy(slot->constraint_ids + n, k->ids, k->n * sizeof *k->ids);
        n += k->n;
    }
    moe_slot_begin(slot);
    do
        for (size_t h = 0; h < slot->n_live; h++) {
            slot->live[h].row = h;
            answer_row(t, &s, slot, &slot->live[h], top, top_ids + h * top, top_logprobs + h * top, &want[h],
                       attention + h * SOURCE, starts + h * CONSTRAINTS);
        }
    while (!moe_slot_step(&s, slot, 0, &a, next));
    return slot->n_finished;
}

/* ---- Comparison ---- */

static void compare(const task *t, uint64_t number, size_t *kept) {
    static moe_token tokens[LONGEST * WIDEST + 1];
    static moe_live live[WIDEST];
    static moe_live finished[WIDEST];
    static moe_constraint_state constraints[CONSTRAINTS];
    static int32_t constraint_ids[LONGEST];
    static sentence wanted[3 * WIDEST];
    moe_slot slot = { .tokens = tokens, .live = live, .finished = finished, .constraints = constraints };
    slot.constraint_ids = constraint_ids;
    const size_t all = search_naively(t, wanted), n = all < (size_t)t->beam ? all : (size_t)t->beam,
                 found = search_with_engine(t, &slot);
    CHECK(found == n && !slot.broken, "task %llu: %zu results, not %zu", (unsigned long long)number, found, n);
    for (size_t i = 0; i < n; i++) {
        int32_t ids[LONGEST];
        const size_t length = tokens_of(&slot, finished[i].last, ids);
        CHECK(length == wanted[i].n && memcmp(ids, wanted[i].tokens, length * sizeof *ids) == 0,
              "task %llu: result %zu has other tokens", (unsigned long long)number, i);
        CHECK(finished[i].ended == wanted[i].finished && fabs((double)finished[i].rank - wanted[i].score) < 1e-4,
              "task %llu: result %zu has score %g, not %g", (unsigned long long)number, i, (double)finished[i].rank,
              wanted[i].score);
        for (size_t c = 0; c < t->n_constraints; c++, ++*kept)
            CHECK(wanted[i].met[c], "task %llu: result %zu lacks constraint %zu", (unsigned long long)number, i, c);
    }
}

TEST(the_search_equals_the_reference) {
    size_t kept = 0;
    for (uint64_t number = 0; number < 20000; number++) {
        const task t = random_task(number);
        compare(&t, number, &kept);
    }
    CHECK(kept > 20000, "%zu constraints", kept);
}

/* ---- Loops ---- */

/* Return how many of the last tokens, excluding `given` tokens, equal the token one period earlier. Use the smallest
 * period that is a loop. */
static size_t loop_naively(const int32_t *prompt, size_t n_prompt, const int32_t *ids, size_t n, size_t given) {
    size_t prompts = 0;
    for (size_t p = 1; p <= 128; p++)
        for (size_t begin = p; begin < n_prompt; begin++) {
            size_t run = 0;
            while (begin + run < n_prompt && prompt[begin + run] == prompt[begin + run - p]) run++;
            prompts = run > prompts ? run : prompts;
        }
    for (size_t p = 1; p <= 128; p++) {
        size_t run = 0;
        while (run + p < n && run + given < n && ids[n - 1 - run] == ids[n - 1 - run - p]) run++;
        if (run + p >= 4 * p && run + p >= p + 60 && run > 2 * prompts) return run;
    }
    return 0;
}

/* After each token, check whether a loop is detected and which tokens of the translation remain. */
TEST(loops_equal_the_reference) {
    enum { TEXT = 700, PROMPT = 90 };
    static moe_token tokens[PROMPT + TEXT];
    int32_t ids[TEXT], prompt[PROMPT];
    size_t loops = 0, others = 0;
    for (uint64_t number = 0; number < 600; number++) {
        uint64_t r = number;
        const size_t unit = 1 + mw_below(&r, mw_below(&r, 2) ? 4 : 140), begin = mw_below(&r, 100),
                     times = mw_below(&r, 2) ? 3 : 1000, n_prompt = 1 + mw_below(&r, PROMPT - 1);
        const size_t same = mw_below(&r, 3) ? 0 : mw_below(&r, n_prompt); /* number of equal tokens in the prompt */
        const size_t given = mw_below(&r, 3) ? 0 : mw_below(&r, 150);
        for (size_t i = 0; i < n_prompt; i++) prompt[i] = i && i < same ? 1 : (int32_t)mw_below(&r, 50);
        for (size_t i = 0; i < TEXT; i++)
            ids[i] = i >= begin + unit && i < begin + unit * times ? ids[i - unit] : (int32_t)mw_below(&r, 1000);
        for (size_t i = 0; i < n_prompt; i++) tokens[i] = (moe_token){ prompt[i], (int32_t)i - 1, -1, 0 };
        for (size_t i = 0; i < TEXT; i++)
            tokens[n_prompt + i] = (moe_token){ ids[i], (int32_t)(n_prompt + i) - 1, -1, -0.5f };
        moe_live live = { .logprob = -7 }, finished;
        moe_slot slot = { .tokens = tokens, .live = &live, .finished = &finished, .target = prompt, .n_live = 1 };
        slot.task.prompt = n_prompt, slot.task.beam = 1;
        slot.task.repeats = moe_most_repeats(prompt, n_prompt);
        const moe_search s = { .beam = 1, .stops_loops = 1 };
        for (size_t n = 1 + given; n <= TEXT; n++) {
            const size_t wanted = loop_naively(prompt, n_prompt, ids, n, given);
            live.tokens = n, live.last = (int32_t)(n_prompt + n) - 1;
            const int cut = moe_cut_loop(&s, &slot, &(moe_beam){ .top = 1 });
            CHECK(cut == (wanted > 0), "%llu: %zu tokens, a run of %zu", (unsigned long long)number, n, wanted);
            others += !cut;
            if (!cut) continue;
            loops++;
            CHECK(slot.n_finished == 1 && finished.looped && !finished.ended && finished.tokens == n - wanted &&
                      finished.last == (int32_t)(n_prompt + n - wanted) - 1 &&
                      finished.logprob == -0.5f * (float)finished.tokens && finished.rank == finished.logprob,
                  "%llu: %zu of %zu tokens remain", (unsigned long long)number, finished.tokens, n);
            break;
        }
    }
    CHECK(loops > 100 && others > 100000, "%zu loops", loops);
}

/* ---- Sampling ---- */

enum { MOST = 3000 };

typedef struct weighed {
    uint32_t weight;
    size_t id;
} weighed;

static int by_weight(const void *a, const void *b) {
    const weighed *x = a, *y = b;
    if (x->weight != y->weight) return x->weight < y->weight ? 1 : -1;
    return x->id < y->id ? -1 : 1;
}

/* Store the tokens to sample from, in order, and the sum of their weights. Return their number. */
static size_t keep_naively(const moe_sampling *d, const float *logits, size_t n, weighed *out, uint64_t *sum) {
    float best = -INFINITY;
    uint64_t all = 0, before = 0;
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) best = fmaxf(best, logits[i]);
    for (size_t i = 0; i < n; i++) {
        const double share = (double)moe_expf((logits[i] - best) / d->temperature);
        out[i] = (weighed){ (uint32_t)floor(share * 1073741824), i };
    }
    qsort(out, n, sizeof *out, by_weight);
    if (d->top_k && d->top_k < n) n = d->top_k;
    for (size_t i = 0; i < n; i++) all += out[i].weight;
    for (; kept < n; before += out[kept++].weight)
        if ((kept && d->top_p < 1 && (double)before >= (double)d->top_p * (double)all) ||
            (double)out[kept].weight < (double)d->min_p * 1073741824)
            break;
    *sum = before;
    return kept;
}

static size_t draw_naively(const moe_sampling *d, const float *logits, size_t n, uint64_t bits) {
    static weighed kept[MOST];
    uint64_t sum, at, before = 0;
    keep_naively(d, logits, n, kept, &sum);
    at = (uint64_t)floor((double)(bits >> 11) / 9007199254740992.0 * (double)sum);
    for (size_t i = 0;; before += kept[i++].weight)
        if (at < before + kept[i].weight) return kept[i].id;
}

static moe_sampling random_drawing(uint64_t *r) {
    static const float temperatures[] = { 1, 0.7f, 0.1f, 1.6f, 100 };
    return (moe_sampling){ .temperature = temperatures[mw_below(r, 5)],
                           .top_k = mw_below(r, 2) ? 1 + mw_below(r, 60) : 0,
                           .top_p = mw_below(r, 2)   ? 1
                                    : mw_below(r, 3) ? (float)uniform(r)
                                                     : 0.25f * (float)mw_below(r, 4), /* a sum that ties can reach */
                           .min_p = mw_below(r, 3) ? 0 : (float)uniform(r) };
}

/* Fill in random logits. A few distinct values yield many ties; some tokens have no probability. */
static void random_logits(uint64_t *r, float *logits, size_t n) {
    const size_t values = mw_below(r, 2) ? 1 + mw_below(r, 9) : 0;
    for (size_t i = 0; i < n; i++) {
        logits[i] = values ? 0.5f * (float)mw_below(r, values) : (float)(16 * uniform(r) - 8);
        if (!mw_below(r, 20) && i) logits[i] = -INFINITY;
    }
}

TEST(samples_equal_the_reference) {
    static float logits[MOST];
    static uint32_t weights[MOST];
    for (uint64_t number = 0; number < 4000; number++) {
        uint64_t r = number;
        const size_t n = 1 + mw_below(&r, number % 10 ? 60 : MOST - 1);
        const moe_sampling d = random_drawing(&r);
        random_logits(&r, logits, n);
        for (int i = 0; i < 8; i++) {
            const uint64_t bits = i > 1 ? moe_hash(number + (uint64_t)i) : i ? 0 : UINT64_MAX;
            memcpy(weights, logits, n * sizeof *weights);
            const size_t found = moe_sample(&d, weights, n, bits), wanted = draw_naively(&d, logits, n, bits);
            CHECK(found == wanted, "%llu: token %zu, not %zu", (unsigned long long)number, found, wanted);
        }
    }
    for (size_t i = 0; i < 3; i++) logits[i] = NAN;
    memcpy(weights, logits, 3 * sizeof *weights);
    assert_int_equal(moe_sample(&(moe_sampling){ .temperature = 1, .top_p = 1 }, weights, 3, 7), 3); /* NaNs */
}

/* Sampled frequencies match the probabilities. By chance, chi square exceeds its 0.9999 quantile once in 10,000 cases,
 * but the seeds are fixed. The random numbers belong to one sentence with different seeds and steps. */
TEST(samples_have_the_right_frequencies) {
    static const moe_sampling drawings[] = { { 1, 0, 1, 0, 0 },
                                             { 0.7f, 0, 1, 0, 0 },
                                             { 1, 5, 1, 0, 0 },
                                             { 1.3f, 0, 0.8f, 0, 0 },
                                             { 1, 0, 1, 0.2f, 0 } };
    enum { N = 12, DRAWS = 40000 };
    float logits[N];
    uint32_t weights[N];
    weighed kept[N];
    uint64_t sum, r = 3;
    for (size_t i = 0; i < N; i++) logits[i] = (float)(3 * uniform(&r));
    for (size_t k = 0; k < MOE_COUNT(drawings); k++) {
        size_t counts[N] = { 0 };
        double chi = 0;
        const size_t n = keep_naively(&drawings[k], logits, N, kept, &sum);
        for (size_t i = 0; i < DRAWS; i++) {
            const moe_slot slot = { .task = { .key = 12345, .prompt = 7, .sampling = { .seed = i % 200 } } };
            memcpy(weights, logits, sizeof weights);
            counts[moe_sample(&drawings[k], weights, N, moe_sample_number(&slot, 7 + i / 200))]++;
        }
        for (size_t i = 0; i < n; i++) {
            const double wanted = DRAWS * (double)kept[i].weight / (double)sum,
                         off = (double)counts[kept[i].id] - wanted;
            chi += off * off / wanted;
            counts[kept[i].id] = 0;
        }
        for (size_t i = 0; i < N; i++) assert_int_equal(counts[i], 0); /* no other token was sampled */
        /* Wilson and Hilferty's approximation of the quantile */
        const double free = (double)n - 1, limit = free * pow(1 - 2 / (9 * free) + 3.719 * sqrt(2 / (9 * free)), 3);
        CHECK(chi < limit && n > 2, "case %zu: chi square %g of %zu tokens, at most %g", k, chi, n, limit);
    }
}

int main(void) { return run_all_tests(NULL, NULL); }
