/* stuck.c - LD_PRELOAD library for moe-server. Converting U+1E9E to lower case never returns, like a slow detector.
 * epoll_ctl removes listening sockets slowly, and in libmicrohttpd's threads only after the main thread has removed
 * them. At exit, the number of bytes that memmove moved is written to the file $MOE_MOVED. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int32_t utf8proc_tolower(int32_t c);
int32_t utf8proc_tolower(int32_t c) {
    while (c == 0x1e9e) pause();
    return c;
}

int epoll_ctl(int epoll, int what, int fd, struct epoll_event *event) {
    int listens = 0;
    socklen_t size = sizeof listens;
    if (what == EPOLL_CTL_DEL && !getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) && listens)
        usleep(syscall(SYS_gettid) == getpid() ? 100000 : 300000);
    return (int)syscall(SYS_epoll_ctl, epoll, what, fd, event);
}

static size_t moved;

void *memmove(void *to, const void *from, size_t n) {
    volatile char *out = to; /* otherwise the compiler may turn the loops into calls to memmove */
    const volatile char *in = from;
    __atomic_fetch_add(&moved, n, __ATOMIC_RELAXED);
    if ((uintptr_t)out < (uintptr_t)in)
        for (size_t i = 0; i < n; i++) out[i] = in[i];
    else
        for (size_t i = n; i > 0; i--) out[i - 1] = in[i - 1];
    return to;
}

void *__memmove_chk(void *to, const void *from, size_t n, size_t room);
void *__memmove_chk(void *to, const void *from, size_t n, size_t room) {
    return n <= room ? memmove(to, from, n) : NULL;
}

__attribute__((destructor)) static void tell(void) {
    FILE *file = getenv("MOE_MOVED") ? fopen(getenv("MOE_MOVED"), "w") : NULL;
    if (file) fprintf(file, "%zu", moved), fclose(file);
}
