/* seeds.c - writes the initial inputs of fuzz_model: small models of every kind, in all number formats. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */

#include "moe.h"
#include "tests/engine/model_writer.h"

static void write_model(const char *folder, const char *name, mw_model *m) {
    static const moe_type types[] = { MOE_TYPE_F32, MOE_TYPE_F16, MOE_TYPE_Q8, MOE_TYPE_Q4,
                                      MOE_TYPE_Q8B, MOE_TYPE_Q3,  MOE_TYPE_Q2 };
    static unsigned number;
    mw_image image = mw_build(m);
    moe_model *model = NULL;
    moe_error e = { MOE_OK, "", "" };
    char path[512];
    const moe_save_params params = { .type = types[number % 7], .experts = types[(number + number / 7) % 7] };
    number++;
    snprintf(path, sizeof path, "%s/%s.bin", folder, name);
    if (moe_model_open_memory(image.data, image.bytes, NULL, &model, &e) || moe_model_save(model, path, &params, &e)) {
        fprintf(stderr, "%s: %s\n", path, e.message);
        exit(1);
    }
    moe_model_close(model);
    free(image.data);
    mw_free(m);
}

int main(int argc, char **argv) {
    char name[32];
    if (argc != 2) return fprintf(stderr, "usage: seeds FOLDER\n"), 2;
    for (int round = 0; round < 2; round++) {
        for (int v = 0; v < MW_VARIANTS; v++) {
            snprintf(name, sizeof name, "gnmt-%d-%d", v, round);
            write_model(argv[1], name, mw_small(v, MW_F32, 1));
        }
        for (int v = 0; v < MW_TRANSFORMERS; v++) {
            snprintf(name, sizeof name, "transformer-%d-%d", v, round);
            write_model(argv[1], name, mw_transformer(v, MW_F32, 1));
            mw_model *listed = mw_transformer(v, MW_F32, 2);
            mw_random_shortlist(listed);
            snprintf(name, sizeof name, "listed-%d-%d", v, round);
            write_model(argv[1], name, listed);
        }
        write_model(argv[1], round ? "hierarchy-1" : "hierarchy-0", mw_hierarchical(MW_F32, 1));
        write_model(argv[1], round ? "language-1" : "language-0", mw_language_model(MW_F32, 1));
        write_model(argv[1], round ? "decoder-1" : "decoder-0", mw_decoder(MW_F32, 1));
        write_model(argv[1], round ? "delta-1" : "delta-0", mw_delta_decoder(MW_F32, 1));
        write_model(argv[1], round ? "classifier-1" : "classifier-0", mw_classifier(MW_F32, 1));
    }
    return 0;
}
