/* convert_marian.c - runs marian_convert for test_marian_c.py: convert_marian TYPE [PATH OUT]...
 * Prints one line per pair: "ok", or the status and the message. Notes precede it. */
#include "tools/convert/marian.h"

#include <stdio.h>

static void print_note(void *user, const char *message) {
    (void)user;
    printf("note: %s\n", message);
}

int main(int argc, char **argv) {
    moe_type type;
    if (argc < 2 || !moe_type_parse(argv[1], &type)) return fprintf(stderr, "usage: convert_marian TYPE PATH OUT\n"), 2;
    for (int i = 2; i + 1 < argc; i += 2) {
        const marian_files files = { .path = argv[i], .type = type, .note = print_note };
        moe_error e;
        const moe_status status = marian_convert(&files, argv[i + 1], &e);
        if (status) printf("%s: %s\n", moe_status_name(status), e.message);
        else printf("ok\n");
    }
    return 0;
}
