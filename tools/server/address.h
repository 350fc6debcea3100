/* address.h - addresses of clients, and which proxies may say for whom they ask. */
#ifndef SERVER_ADDRESS_H
#define SERVER_ADDRESS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

typedef struct address { /* of IPv6, and of IPv4 as ::ffff:a.b.c.d */
    unsigned char bytes[16];
} address;

typedef struct network { /* addresses that begin with the same bits */
    address first;
    unsigned bits;
} network;

enum { ADDRESS_TEXT = 46 }; /* bytes that any address takes, with its NUL */

/* Who is counted together: an address of IPv4, the first 64 bits of IPv6, which one customer has. ADDRESS_NOBODY is
 * the key of none. */
#define ADDRESS_NOBODY UINT64_MAX
uint64_t address_key(const address *a);

/* Of a socket; what is neither IPv4 nor IPv6 has the address "::", which none of them has, and which is written "unix".
 */
address address_of(const struct sockaddr *from);
/* "192.0.2.1", "2001:db8::1"; with a port "192.0.2.1:80", "[2001:db8::1]:80"; in brackets alone. 0: it is none. */
int address_read(const char *text, size_t length, address *out);
void address_write(const address *a, char out[ADDRESS_TEXT]);

/* ADDRESS or ADDRESS/BITS, or "unix". 0: it is none. */
int network_read(const char *text, network *out);
int network_has(const network *networks, size_t n, const address *a);

/* Whose request it is that came from `peer` with `list`, X-Forwarded-For of all its headers, separated by commas. Each
 * proxy adds the address that asked it at the end. So from the end: the first that is not trusted; or, where what comes
 * then is no address, the last before. What the client itself put in front is never looked at. */
address address_forwarded(const network *trusted, size_t n, const address *peer, const char *list, size_t length);

#endif
