/* address.h - addresses of clients and trusted proxies. */
#ifndef SERVER_ADDRESS_H
#define SERVER_ADDRESS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

typedef struct address { /* IPv6; IPv4 as ::ffff:a.b.c.d */
    unsigned char bytes[16];
} address;

typedef struct network { /* addresses with the same leading bits */
    address first;
    unsigned bits;
} network;

enum { ADDRESS_TEXT = 46 }; /* bytes of the longest address, with its NUL */

/* The key under which an address is counted: an IPv4 address, or the first 64 bits of IPv6, which one customer has. No
 * address has the key ADDRESS_NOBODY. */
#define ADDRESS_NOBODY UINT64_MAX
uint64_t address_key(const address *a);

/* The address of a socket. One that is neither IPv4 nor IPv6 becomes "::", which is written "unix". */
address address_of(const struct sockaddr *from);
/* Parse "192.0.2.1", "2001:db8::1" or "[2001:db8::1]", the first and the last also with a port: "192.0.2.1:80". Return
 * 0 if the text is invalid. */
int address_read(const char *text, size_t length, address *out);
void address_write(const address *a, char out[ADDRESS_TEXT]);

/* Parse ADDRESS, ADDRESS/BITS or "unix". Return 0 if it is invalid. */
int network_read(const char *text, network *out);
int network_has(const network *networks, size_t n, const address *a);

/* Find the client of a request from `peer`. list: its X-Forwarded-For headers, joined by commas. Each proxy appends the
 * address that sent it the request, so the client is the last untrusted address, or the one that follows an invalid
 * entry. The client's own entries precede it and are never used. */
address address_forwarded(const network *trusted, size_t n, const address *peer, const char *list, size_t length);

#endif
