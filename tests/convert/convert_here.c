/* convert_here.c - runs convert_model for tests: convert_here [--resume] [--ids-only] TYPE EXPERTS [PATH OUT]...
 * TYPE and EXPERTS may be - for the default. Prints one line per pair: "ok", or the status and the message. Notes
 * precede it. */
#include "tools/convert/convert.h"

#include <stdio.h>
#include <string.h>

static void print_note(void *user, const char *message) {
    (void)user;
    printf("note: %s\n", message);
}

static int parse(const char *text, moe_type *type) {
    *type = MOE_TYPE_KEEP;
    return strcmp(text, "-") == 0 || moe_type_parse(text, type);
}

int main(int argc, char **argv) {
    moe_type type, experts;
    const int resume = argc > 1 && strcmp(argv[1], "--resume") == 0;
    argc -= resume, argv += resume;
    const int ids_only = argc > 1 && strcmp(argv[1], "--ids-only") == 0;
    argc -= ids_only, argv += ids_only;
    if (argc < 3 || !parse(argv[1], &type) || !parse(argv[2], &experts))
        return fprintf(stderr, "usage: convert_here TYPE EXPERTS PATH OUT\n"), 2;
    for (int i = 3; i + 1 < argc; i += 2) {
        const convert_options options = { .path = argv[i],
                                          .type = type,
                                          .experts = experts,
                                          .note = print_note,
                                          .resume = resume,
                                          .ids_only = ids_only };
        moe_error e;
        const moe_status status = convert_model(&options, argv[i + 1], &e);
        if (status) printf("%s: %s\n", moe_status_name(status), e.message);
        else printf("ok\n");
    }
    return 0;
}
