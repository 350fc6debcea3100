/* contained.h - a model at the end of another file, such as the program `moe` of `make dist`.
 *
 * The file ends with 64 bytes: TEXT_CONTAINED, the model's offset and size (64-bit little-endian), and its name, padded
 * with NUL. tools/dist/append writes them. */
#ifndef TEXT_CONTAINED_H
#define TEXT_CONTAINED_H

#include <stdint.h>

#define TEXT_CONTAINED "moe\nend\n"

typedef struct text_contained {
    uint64_t offset, bytes;
    char name[40];
} text_contained;

/* Find the model at the end of a file. Return 0 if there is none. */
int text_find_contained(const char *path, text_contained *out);

#endif
