/* fingerprints.c - let libexttextcat read its fingerprints from memory.
 *
 * tools/dist/libraries compiles the library with fopen, fgets and fclose replaced by these functions. The name of a
 * list is its text, which starts with '\n'; the name of a fingerprint is TEXTCAT_CONTAINED and the name of its file. */
#include "fingerprints.h"
#include "textcat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
    const char *at;
} reader;

static const char *text_of(const char *name) {
    for (const moe_fingerprint *f = moe_fingerprints; f->name; f++)
        if (strcmp(f->name, name) == 0) return f->text;
    return NULL;
}

int textcat_contains(const char *name) { return text_of(name) != NULL; }

FILE *moe_fingerprint_open(const char *name, const char *mode) {
    const size_t prefix = strlen(TEXTCAT_CONTAINED);
    const int contained = strncmp(name, TEXTCAT_CONTAINED, prefix) == 0;
    const char *text = *name == '\n' ? name : contained ? text_of(name + prefix) : NULL;
    reader *r = text ? malloc(sizeof *r) : NULL;
    (void)mode;
    if (r) r->at = text;
    return (FILE *)(void *)r;
}

char *moe_fingerprint_line(char *line, int size, FILE *file) {
    reader *r = (reader *)(void *)file;
    size_t n = strcspn(r->at, "\n");
    n += r->at[n] == '\n';
    if (!n) return NULL;
    if (n >= (size_t)size) n = (size_t)size - 1;
    memcpy(line, r->at, n), line[n] = '\0';
    r->at += n;
    return line;
}

int moe_fingerprint_close(FILE *file) {
    free(file);
    return 0;
}
