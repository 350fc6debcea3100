/* listen.c - open the listening socket and accept connections.
 *
 * libmicrohttpd 0.9.75 can abort when it stops listening, because two threads remove the socket from the same epoll
 * set. A thread of this file accepts connections instead.
 */
#define _GNU_SOURCE      /* getaddrinfo on Linux */
#define _DARWIN_C_SOURCE /* getaddrinfo on macOS */

#include "tools/server/server.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/filter.h>
#endif

/* ---- Sockets ------------------------------------------------------------------------------------------- */

/* Return 1 if the file is a socket on which no program listens. */
static int is_left_over(const struct sockaddr_un *at) {
    struct stat found;
    if (lstat(at->sun_path, &found) || !S_ISSOCK(found.st_mode)) return 0;
    const int probe = socket(AF_UNIX, SOCK_STREAM, 0);
    const int refused =
        probe >= 0 && connect(probe, (const struct sockaddr *)(const void *)at, sizeof *at) && errno == ECONNREFUSED;
    if (probe >= 0) close(probe);
    return refused;
}

/* Open the --listen socket. Return -1 after an error message. */
static int open_path(server *s, const char *path) {
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    struct stat made;
    memcpy(at.sun_path, path, strlen(path)); /* take_path has checked the length */
    if (is_left_over(&at)) unlink(at.sun_path);
    const int made_socket = socket(AF_UNIX, SOCK_STREAM, 0);
    const mode_t before = umask(0117); /* bind() must not create a socket that others can access */
    const int failed = made_socket < 0 || bind(made_socket, (const struct sockaddr *)(const void *)&at, sizeof at) ||
                       listen(made_socket, 1024);
    const int why = errno;
    umask(before);
    if (failed) {
        program_error("--listen unix:%s: %s", path, strerror(why));
        if (made_socket >= 0) close(made_socket);
        return -1;
    }
    if (!stat(at.sun_path, &made)) s->listening.device = made.st_dev, s->listening.inode = made.st_ino;
    return made_socket;
}

/* Direct new connections to one of two sockets that share a port (--reuse-port): 0 for the older, 1 for the newer,
 * -1 for both. */
static void steer(int socket, int to) {
#ifdef SO_DETACH_REUSEPORT_BPF
    struct sock_filter code[] = { { BPF_RET | BPF_K, 0, 0, (uint32_t)to } };
    const struct sock_fprog program = { 1, code };
    if (to < 0) setsockopt(socket, SOL_SOCKET, SO_DETACH_REUSEPORT_BPF, NULL, 0);
    else setsockopt(socket, SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &program, sizeof program);
#else
    (void)socket, (void)to;
#endif
}

/* Listen on an address. Return -1 and set errno on failure. */
static int open_address(const struct addrinfo *at, int reuse) {
    const int one = 1, made = socket(at->ai_family, SOCK_STREAM, 0);
    if (made < 0) return -1;
    setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (at->ai_family == AF_INET6) setsockopt(made, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
    if (!(reuse && setsockopt(made, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one)) &&
        !bind(made, at->ai_addr, at->ai_addrlen) && !listen(made, 1024)) {
        if (reuse) steer(made, -1);
        return made;
    }
    const int why = errno;
    close(made);
    errno = why;
    return -1;
}

/* Listen on --host and --port. Return -1 after an error message. */
static int open_port(const options *o) {
    struct addrinfo wanted = { .ai_flags = AI_PASSIVE | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM }, *found = NULL;
    char port[8];
    snprintf(port, sizeof port, "%d", o->port);
    const int failed = getaddrinfo(o->host, port, &wanted, &found);
    if (failed) return program_error("--host %s: %s", o->host, gai_strerror(failed)), -1;
    const int made = open_address(found, o->reuse_port);
    if (made < 0) program_error("cannot listen on %s port %d: %s", o->host, o->port, strerror(errno));
    freeaddrinfo(found);
    return made;
}

/* Return the socket opened by systemd, or a program with the same protocol, as descriptor 3. Return 0 if
 * there is none, or -1 after an error message. */
static int given_socket(void) {
    const char *pid = getenv("LISTEN_PID"), *n = getenv("LISTEN_FDS");
    int listens = 0;
    socklen_t size = sizeof listens;
    if (!pid || !n || strtol(pid, NULL, 10) != (long)getpid()) return 0;
    if (strcmp(n, "1") != 0) return program_error("LISTEN_FDS=%s: expected one socket", n), -1;
    if (getsockopt(3, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) || !listens)
        return program_error("LISTEN_FDS: descriptor 3 is not a listening socket"), -1;
    fcntl(3, F_SETFD, FD_CLOEXEC);
    return 3;
}

int listen_open(server *s) {
    const options *o = &s->setup->options;
    const int given = given_socket();
    s->listening.shared = given > 0 || o->reuse_port;
    s->listening.socket = given ? given : o->path ? open_path(s, o->path) : open_port(o);
    if (s->listening.socket < 0) return 0;
    if (!fcntl(s->listening.socket, F_SETFL, fcntl(s->listening.socket, F_GETFL) | O_NONBLOCK)) return 1;
    return program_error("cannot prepare the socket: %s", strerror(errno)), 0;
}

static address own_address(const server *s, int *port) {
    union {
        struct sockaddr any;
        struct sockaddr_in four;
        struct sockaddr_in6 six;
        struct sockaddr_storage all;
    } at = { 0 };
    socklen_t size = sizeof at;
    const int failed = getsockname(s->listening.socket, &at.any, &size);
    *port = failed ? 0 : ntohs(at.any.sa_family == AF_INET6 ? at.six.sin6_port : at.four.sin_port);
    if (at.any.sa_family != AF_INET && at.any.sa_family != AF_INET6) *port = -1;
    return address_of(&at.any);
}

const char *listen_address(const server *s, char *out, size_t size) {
    const options *o = &s->setup->options;
    int port;
    char text[ADDRESS_TEXT];
    const address own = own_address(s, &port);
    const int six = strchr(o->host, ':') != NULL;
    address_write(&own, text);
    if (o->path) snprintf(out, size, "unix:%s", o->path);
    else if (port < 0) snprintf(out, size, "the Unix socket of LISTEN_FDS");
    else if (s->listening.socket == 3 && getenv("LISTEN_FDS")) snprintf(out, size, "http://%s:%d/", text, port);
    else snprintf(out, size, "http://%s%s%s:%d/", six ? "[" : "", o->host, six ? "]" : "", port);
    return out;
}

int listen_port(const server *s) {
    int port;
    own_address(s, &port);
    return port;
}

int listen_is_loopback(const server *s) {
    int port;
    const address own = own_address(s, &port);
    return port < 0 || address_is_loopback(&own);
}

/* ---- Connections --------------------------------------------------------------------------------------- */

/* Accept a connection. Return 0 if none is pending, or -1 to try again later. */
static int accept_one(server *s) {
    struct sockaddr_storage from;
    socklen_t size = sizeof from;
    const int made = accept(s->listening.socket, (struct sockaddr *)(void *)&from, &size);
    if (made < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno == EINTR || errno == ECONNABORTED ? 1 : -1;
    MHD_add_connection(s->listening.daemon, made, (struct sockaddr *)(void *)&from, size); /* closes it on failure */
    return 1;
}

/* Accept pending connections, which closing the socket would drop. The other server gets new ones. */
static void accept_rest(server *s) {
    const struct timespec pause = { .tv_nsec = 20000000 };
    for (int to = s->setup->options.reuse_port; to >= 0; to--) {
        int n = 0;
        if (s->setup->options.reuse_port) steer(s->listening.socket, to);
        for (int i = 0; i < 5; i++, nanosleep(&pause, NULL)) /* handshakes in progress may add some */
            for (n = 0; accept_one(s) > 0;) n++;
        if (!n) return;
    }
}

static void *accept_all(void *closure) {
    server *s = closure;
    struct pollfd wait[2] = { { .fd = s->listening.wake[0], .events = POLLIN },
                              { .fd = s->listening.socket, .events = POLLIN } };
    const struct timespec pause = { .tv_nsec = 20000000 };
    while (poll(wait, 2, -1) < 0 || !wait[0].revents) {
        const int full = s->n_connections >= (size_t)s->setup->options.max_connections;
        if (full || accept_one(s) < 0) nanosleep(&pause, NULL); /* connections wait in the backlog */
    }
    if (s->setup->options.reuse_port && s->listening.shared) accept_rest(s);
    return NULL;
}

int listen_start(server *s, struct MHD_Daemon *daemon) {
    s->listening.daemon = daemon;
    if (!pipe(s->listening.wake) && !pthread_create(&s->listening.thread, NULL, accept_all, s)) return 1;
    s->listening.daemon = NULL;
    return program_error("cannot start a thread: %s", strerror(errno)), 0;
}

void listen_stop(server *s) {
    const char *path = s->setup->options.path;
    struct stat found;
    if (s->listening.daemon) {
        if (write(s->listening.wake[1], "", 1) == 1) pthread_join(s->listening.thread, NULL);
        close(s->listening.wake[0]), close(s->listening.wake[1]);
    }
    close(s->listening.socket);
    if (path && !lstat(path, &found) && found.st_dev == s->listening.device && found.st_ino == s->listening.inode)
        unlink(path); /* unless another server has replaced it */
}
