/* socket.h - the functions of sockets that tools/server uses, for Windows; see posix.h. */
#ifndef MOE_SOCKET_H
#define MOE_SOCKET_H

#include "tools/windows/posix.h"

#undef pollfd
#undef poll
#undef POLLIN
#undef POLLOUT
#undef POLLERR
#undef POLLHUP
#undef POLLNVAL
#include <winsock2.h>
#include <ws2tcpip.h>
#define pollfd posix_pollfd
#define poll posix_poll
#undef far
#undef near
#undef small
#undef interface
#undef STRICT

enum { SHUT_RDWR = SD_BOTH, SOCKET_MARK = 1 << 30, MSG_DONTWAIT = 1 << 20 };
struct sockaddr_un {
    unsigned short sun_family;
    char sun_path[108];
};
#define SO_REUSEPORT (-1) /* not supported */
#define socket posix_socket
#define bind posix_bind
#define listen posix_listen
#define accept posix_accept
#define connect posix_connect
#define shutdown posix_shutdown
#define recv posix_recv
#define sendto posix_sendto
#define getsockname posix_getsockname
#define getsockopt posix_getsockopt
#define setsockopt posix_setsockopt
#define getaddrinfo posix_getaddrinfo
#undef gai_strerror
#define gai_strerror posix_gai_strerror
SOCKET posix_raw(int fd);
int socket(int family, int type, int protocol);
int bind(int fd, const struct sockaddr *address, size_t size);
int listen(int fd, int backlog);
int accept(int fd, struct sockaddr *address, socklen_t *size);
int connect(int fd, const struct sockaddr *address, size_t size);
int posix_shutdown(uint64_t fd, int how);
ssize_t recv(int fd, void *data, size_t bytes, int flags);
ssize_t sendto(int fd, const void *data, size_t bytes, int flags, const struct sockaddr *to, socklen_t size);
int getsockname(int fd, struct sockaddr *address, socklen_t *size);
int getsockopt(int fd, int level, int name, void *value, socklen_t *size);
int setsockopt(int fd, int level, int name, const void *value, socklen_t size);
int getaddrinfo(const char *host, const char *port, const struct addrinfo *wanted, struct addrinfo **out);
const char *gai_strerror(int code);

#endif
