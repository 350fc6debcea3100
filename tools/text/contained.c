/* contained.c - see contained.h. */
#define _XOPEN_SOURCE 700 /* pread */

#include "tools/text/contained.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TRAILER = 64, NAME = 24 };

static uint64_t number_at(const unsigned char *p) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | p[i];
    return value;
}

int text_find_contained(const char *path, text_contained *out) {
    unsigned char end[TRAILER];
    struct stat about;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* not waiting for the writer of a pipe */
    if (fd < 0) return 0;
    const int whole = fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > TRAILER &&
                      pread(fd, end, TRAILER, about.st_size - TRAILER) == TRAILER;
    close(fd);
    if (!whole || memcmp(end, TEXT_CONTAINED, sizeof TEXT_CONTAINED - 1) != 0 || end[TRAILER - 1]) return 0;
    out->offset = number_at(end + 8), out->bytes = number_at(end + 16);
    memcpy(out->name, end + NAME, sizeof out->name);
    const uint64_t rest = (uint64_t)about.st_size - TRAILER;
    return out->bytes && out->offset % 64 == 0 && out->offset < rest && out->bytes <= rest - out->offset;
}
