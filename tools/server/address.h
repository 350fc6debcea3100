/* address.h - addresses of clients and trusted proxies. */
#ifndef SERVER_ADDRESS_H
#define SERVER_ADDRESS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

typedef struct address { /* an IPv6 address, or an IPv4 address as ::ffff:a.b.c.d */
    unsigned char bytes[16];
} address;

typedef struct network { /* all addresses whose first `bits` bits equal those of `first` */
    address first;
    unsigned bits;
} network;

enum { ADDRESS_TEXT = 46 }; /* bytes of the longest address, with its NUL */

/* Return the key for limits per address: the IPv4 address, or the first 64 bits of an IPv6 address, because providers
 * assign 64-bit prefixes to customers. ADDRESS_NOBODY is not the key of any address. */
#define ADDRESS_NOBODY UINT64_MAX
uint64_t address_key(const address *a);
int address_is_loopback(const address *a); /* 1 for 127.0.0.0/8 and ::1 */

/* Return the address of a socket. Families other than IPv4 and IPv6 become "::", written as "unix" by address_write. */
address address_of(const struct sockaddr *from);
/* Parse "192.0.2.1", "2001:db8::1" or "[2001:db8::1]", or an address with a port: "192.0.2.1:80", "[2001:db8::1]:80".
 * Return 0 if the text is invalid. */
int address_read(const char *text, size_t length, address *out);
void address_write(const address *a, char out[ADDRESS_TEXT]);

/* Parse ADDRESS, ADDRESS/BITS or "unix". Return 0 if the text is invalid. */
int network_read(const char *text, network *out);
int network_has(const network *networks, size_t n, const address *a);

/* Find the client of a request from `peer`. `list` contains the request's X-Forwarded-For headers, joined by commas.
 * Each proxy appends the address that the request came from, so the client is the last untrusted address, or the
 * address after the last invalid entry. Preceding entries may be forged by the client and are never used. */
address address_forwarded(const network *trusted, size_t n, const address *peer, const char *list, size_t length);

#endif
