/* stuck.c - put before moe-server by LD_PRELOAD: whoever asks for the small letter of U+1E9E never comes back, as if a
 * scanner had met a text that takes it hours. */
#include <stdint.h>
#include <unistd.h>

int32_t utf8proc_tolower(int32_t c);
int32_t utf8proc_tolower(int32_t c) {
    while (c == 0x1e9e) pause();
    return c;
}
