/* stuck.c - put before moe-server by LD_PRELOAD: whoever asks for the small letter of U+1E9E never comes back, as if a
 * scanner had met a text that takes it hours; and epoll is slow to let a listening socket go, slower in libmicrohttpd's
 * threads than in the main one, so that they do it after the main thread. */
#include <stdint.h>
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
