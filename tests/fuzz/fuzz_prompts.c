/* fuzz_prompts.c - loads the input as a file of prompts (moe_session_load_prompts).
 *
 * Checks in addition to the sanitizers': a failure has a status and a message, and leaves the session without prompts;
 * a session can save what it has loaded; translations succeed, or report invalid numbers. */
#include "moe.c"

#define MW_CRC(p, n) moe_crc32(0, p, n)
#include "tests/engine/model_writer.h"
#include "tests/fuzz/fuzz.h"

enum { LENGTH = 50, KINDS = 2 };

static moe_model *models[KINDS]; /* attention; attention and states */
static mw_image files[KINDS];

static moe_session *new_session(int kind) {
    moe_session *s;
    moe_session_params p = moe_session_params_default(models[kind]);
    p.threads = p.beam = p.nbest = 1, p.batch = 2, p.isa = "portable", p.kv_bits = 8, p.context_memory = 1;
    p.max_source = LENGTH, p.max_target = p.max_len_offset = 4;
    FUZZ_CHECK(moe_session_new(models[kind], &p, &s, NULL) == MOE_OK, "no session");
    return s;
}

static moe_status translate(moe_session *s, int32_t tail) {
    int32_t source[LENGTH - 1], out[8];
    size_t n;
    for (int32_t i = 0; i < LENGTH - 1; i++) source[i] = 8 + (i < 40 ? i : i + tail) % (MW_VOCABULARY - 8);
    return moe_translate_ids(s, source, LENGTH - 1 - moe_source_extra(s->model), out, 8, &n, NULL);
}

/* ---- Mutation ---- */

/* Correct the checksums of the head and of all records. */
static void seal(int kind, uint8_t *data, size_t size) {
    struct moe_prompts_head h;
    moe_session *s = new_session(kind);
    const uint64_t state = 8 + moe_carried_bytes(s, MOE_BY_STATE),
                   page = offsetof(moe_page, users) + MOE_PAGE * moe_carried_bytes(s, MOE_BY_TOKEN);
    moe_session_free(s);
    if (size < sizeof h) return;
    memcpy(&h, data, sizeof h);
    h.sum = moe_crc32(0, &h.model, sizeof h - offsetof(struct moe_prompts_head, model));
    memcpy(data, &h, sizeof h);
    uint64_t states = h.n_states;
    for (uint64_t at = sizeof h, bytes; at + (bytes = states ? state : page) + 4 <= size; at += bytes + 4) {
        const uint32_t sum = moe_crc32(moe_crc32(h.sum, &at, sizeof at), data + at, (size_t)bytes);
        memcpy(data + at + bytes, &sum, sizeof sum);
        states -= states > 0;
    }
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    uint64_t r = seed;
    const int kind = data[0] % KINDS;
    const size_t whole = files[kind].bytes + 1;
    if ((size < 100 || fuzz_one_in(&r, 50)) && whole <= max_size) {
        memcpy(data + 1, files[kind].data, whole - 1);
        size = whole;
    }
    for (size_t n = fuzz_below(&r, 3); n && size > 50; n--) /* numbers of the head, or of any place */
        memcpy(data + 1 + 4 * fuzz_below(&r, fuzz_one_in(&r, 2) ? 10 : (size - 5) / 4),
               (const uint32_t[1]){ (uint32_t)(fuzz_one_in(&r, 2) ? fuzz_below(&r, 9) - 2 : fuzz_next(&r)) }, 4);
    if (fuzz_one_in(&r, 2)) size = LLVMFuzzerMutate(data, size, max_size);
    if (size > 1 && !fuzz_one_in(&r, 8)) seal(data[0] % KINDS, data + 1, size - 1);
    return size;
}

/* ---- One input ---- */

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    fuzz_make_folder();
    for (int kind = 0; kind < KINDS; kind++) {
        mw_model *m = (kind ? mw_delta_decoder : mw_decoder)(MW_Q8, 3);
        const mw_image image = mw_build(m);
        const moe_model_params copy = { .copy = 1 };
        const char *path = fuzz_path("prompts");
        FUZZ_CHECK(moe_model_open_memory(image.data, image.bytes, &copy, &models[kind], NULL) == MOE_OK, "no model");
        moe_session *s = new_session(kind);
        for (int32_t tail = 0; tail < 3; tail++) translate(s, tail);
        FUZZ_CHECK(moe_session_save_prompts(s, path, NULL) == MOE_OK, "no file");
        FILE *in = fopen(path, "rb");
        files[kind].data = mw_zeros(1 << 20);
        files[kind].bytes = in ? fread(files[kind].data, 1, 1 << 20, in) : 0;
        FUZZ_CHECK(files[kind].bytes > sizeof(struct moe_prompts_head), "an empty file");
        if (in) fclose(in);
        moe_session_free(s);
        free(image.data), mw_free(m);
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    const char *path = fuzz_path("prompts");
    moe_session *s = new_session(data[0] % KINDS);
    moe_error e = { MOE_OK, "", "" };
    fuzz_write(path, data + 1, size - 1);
    const moe_status status = moe_session_load_prompts(s, path, &e);
    FUZZ_CHECK(!status || ((status == MOE_ERROR_FORMAT || status == MOE_ERROR_ARGUMENT) && e.code == status &&
                           *e.message && *e.where && !s->n_idle && !s->serials),
               "%d: %s", (int)status, e.message);
    for (size_t i = 0; status && i < s->n_kept; i++) FUZZ_CHECK(!s->kept[i].serial, "a state after an error");
    if (!status) FUZZ_CHECK(moe_session_save_prompts(s, path, NULL) == MOE_OK, "cannot save what was loaded");
    for (int32_t tail = 0; tail < 4; tail++) {
        const moe_status translated = translate(s, tail);
        FUZZ_CHECK(translated == MOE_OK || translated == MOE_ERROR_LIMIT ||
                       (!status && translated == MOE_ERROR_NUMERIC),
                   "status %d", (int)translated);
    }
    moe_session_free(s);
    return 0;
}
