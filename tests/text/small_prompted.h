/* small_prompted.h - writes a random prompted model with the tokeniser of small_bpe.h. Its answers are noise and depend
 * only on the last token. For test_memory.c and test_linear.c.
 */
#ifndef SMALL_PROMPTED_H
#define SMALL_PROMPTED_H

#include "tests/engine/model_writer.h"
#include "tests/text/small_bpe.h"

#include <stdio.h>

static inline void write_prompted(const char *path) {
    static const char *const codes[] = { "de", "en" }, *const english[] = { "German", "English" };
    static const int64_t tags[] = { 0, 1 };
    const recipe r = usual();
    text_bytes b = made_of(&r);
    mw_model *m = mw_zeros(sizeof *m);
    m->random = 7;
    mw_text(m, "general.architecture", "decoder");
    mw_int(m, "vocab.size", IDS);
    mw_int(m, "model.width", 16);
    mw_int(m, "token.bos", 0);
    mw_int(m, "token.eos", END);
    mw_text(m, "decode.rules", "hf");
    mw_int(m, "decode.max_new", 8);
    mw_int(m, "limit.source", 100);
    mw_int(m, "limit.target", 8);
    mw_int(m, "source.tag", 0);
    mw_int(m, "decoder.layers", 1);
    mw_text(m, "decoder.0.kind", "norm");
    mw_text(m, "decoder.0.norm.kind", "rms");
    mw_random_matrix(m, "embedding.weight", MW_F32, IDS, 16, 1);
    mw_random_vector(m, "decoder.0.norm.weight", 16, 0.5f, 1.5f);
    mw_text(m, "tokenizer.kind", "byte-bpe");
    mw_blob(m, "tokenizer.model", MW_BYTES, b.data, b.length);
    mw_text(m, "prompt.prefix", "<end>");
    mw_text(m, "prompt.suffix", "<end>");
    mw_text(m, "prompt.plain.en", "{target_lang}: {source_text}");
    mw_text(m, "prompt.terms.en", "{term}={translation}\n\n{target_lang}: {source_text}");
    mw_text(m, "prompt.context.en", "{background_text}\n{target_lang}: {source_text}");
    mw_texts(m, "languages.codes", codes, 2);
    mw_ints(m, "languages.tags", tags, 2);
    mw_texts(m, "languages.english", english, 2);
    mw_texts(m, "languages.chinese", english, 2);
    const mw_image image = mw_build(m);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(image.data, 1, image.bytes, file) != image.bytes || fclose(file)) abort();
    free(image.data);
    mw_free(m);
    text_bytes_free(&b);
}

#endif
