/* letters.h - a tokeniser with single-character tokens, for tests without a model. */
#ifndef TESTS_LETTERS_H
#define TESTS_LETTERS_H

#include "tools/text/bytes.h"
#include "tools/text/spm.h"

static inline void add_piece(text_bytes *model, const char *text, size_t length, int type) {
    const char piece[] = { 0x0A, (char)(length + 4), 0x0A, (char)length }, kind[] = { 0x18, (char)type };
    text_append(model, piece, sizeof piece);
    text_append(model, text, length);
    text_append(model, kind, sizeof kind);
}

/* Return a tokeniser of the space mark, U+FFFD and printable ASCII except `missing`. */
static inline spm *letters_without(char missing) {
    enum { NORMAL = 1, UNKNOWN = 2 };
    char why[200] = "";
    text_bytes model = { 0 };
    add_piece(&model, "<unk>", 5, UNKNOWN);
    add_piece(&model, "\xE2\x96\x81", 3, NORMAL);
    add_piece(&model, "\xEF\xBF\xBD", 3, NORMAL);
    for (char c = '!'; c <= '~'; c++)
        if (c != missing) add_piece(&model, &c, 1, NORMAL);
    spm *made = spm_new(model.data, model.length, why, sizeof why);
    if (!made) fail_msg("%s", why);
    text_bytes_free(&model);
    return made;
}

static inline spm *letters(void) { return letters_without(0); }

#endif
