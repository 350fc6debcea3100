/* bpe_lines.c - runs tools/text/bpe.h on texts, for tests/convert/test_byte_bpe.py and long_byte_bpe.py.
 *
 *     bpe_lines FILE TEXT|ADDED    FILE contains a packed tokeniser; ADDED parses added tokens
 *
 * Standard input has a u32 length and the bytes of each text. For each text, prints a u32 count and the ids (int32),
 * then a u32 length and the bytes of the text decoded id by id. Numbers have the machine's byte order. */
#include "tools/text/bpe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void put(uint32_t n, const void *data, size_t size) {
    if (fwrite(&n, sizeof n, 1, stdout) != 1 || (n && fwrite(data, size, n, stdout) != n)) exit(3);
}

int main(int argc, char **argv) {
    static char bytes[1 << 24], text[BPE_MAX_TEXT];
    FILE *file = argc == 3 ? fopen(argv[1], "rb") : NULL;
    if (!file) return fputs("bpe_lines FILE TEXT|ADDED\n", stderr), 2;
    char why[200];
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    bpe *t = bpe_new(bytes, size, why, sizeof why);
    fclose(file);
    if (!t) return fprintf(stderr, "%s\n", why), 3;
    text_ids ids = { 0 };
    text_bytes out = { 0 };
    for (uint32_t n; fread(&n, sizeof n, 1, stdin) == 1;) {
        bpe_stream stream = { 0 };
        text_clear(&out);
        if (n > sizeof text || fread(text, 1, n, stdin) != n) return 2;
        if (bpe_encode(t, text, n, strcmp(argv[2], "ADDED") == 0, &ids, NULL, why, sizeof why))
            return fprintf(stderr, "%s\n", why), 3;
        for (size_t i = 0; i < ids.length; i++) bpe_decode(t, &stream, &ids.data[i], 1, &out);
        bpe_decode_end(&stream, &out);
        put((uint32_t)ids.length, ids.data, sizeof *ids.data);
        put((uint32_t)out.length, out.data, 1);
    }
    free(ids.data);
    text_bytes_free(&out);
    bpe_free(t);
    return 0;
}
