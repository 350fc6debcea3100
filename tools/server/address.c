/* address.c - parse and compare addresses. */
#define _DEFAULT_SOURCE  /* in_addr on Linux */
#define _DARWIN_C_SOURCE /* in_addr on macOS */

#include "tools/server/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

static const unsigned char four[12] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff }; /* prefix of IPv4 in IPv6 */

static int is_four(const address *a) { return memcmp(a->bytes, four, sizeof four) == 0; }

static address from_four(const void *bytes) {
    address a;
    memcpy(a.bytes, four, sizeof four);
    memcpy(a.bytes + sizeof four, bytes, 4);
    return a;
}

uint64_t address_key(const address *a) {
    uint64_t key = 0;
    const unsigned char *at = is_four(a) ? a->bytes + 8 : a->bytes; /* no IPv6 address begins with 0000:ffff */
    for (int i = 0; i < 8; i++) key = key << 8 | at[i];
    return key;
}

address address_of(const struct sockaddr *from) {
    address a = { 0 };
    if (from && from->sa_family == AF_INET)
        return from_four(&((const struct sockaddr_in *)(const void *)from)->sin_addr);
    if (from && from->sa_family == AF_INET6)
        memcpy(a.bytes, &((const struct sockaddr_in6 *)(const void *)from)->sin6_addr, sizeof a.bytes);
    return a;
}

int address_is_loopback(const address *a) {
    static const address one = { { [15] = 1 } };
    return is_four(a) ? a->bytes[12] == 127 : memcmp(a, &one, sizeof one) == 0;
}

/* Return 1 if a text is a port number. */
static int is_port(const char *text, size_t length) {
    size_t digits = 0;
    while (digits < length && text[digits] >= '0' && text[digits] <= '9') digits++;
    return digits == length && length > 0 && length <= 5;
}

/* Parse an address without port or brackets. */
static int read_plain(const char *text, size_t length, address *out) {
    char plain[ADDRESS_TEXT];
    struct in_addr bytes;
    if (length >= sizeof plain || memchr(text, 0, length)) return 0;
    memcpy(plain, text, length);
    plain[length] = 0;
    if (strchr(plain, ':')) return inet_pton(AF_INET6, plain, out->bytes) == 1;
    if (inet_pton(AF_INET, plain, &bytes) != 1) return 0;
    *out = from_four(&bytes);
    return 1;
}

int address_read(const char *text, size_t length, address *out) {
    const char *colon = memchr(text, ':', length);
    if (length && text[0] == '[') {
        const char *closing = memchr(text, ']', length);
        if (!closing || !colon || colon > closing) return 0;
        const size_t rest = length - (size_t)(closing + 1 - text);
        if (rest && (closing[1] != ':' || !is_port(closing + 2, rest - 1))) return 0;
        return read_plain(text + 1, (size_t)(closing - text - 1), out);
    }
    const size_t behind = colon ? length - (size_t)(colon + 1 - text) : 0;
    if (!colon || memchr(colon + 1, ':', behind)) return read_plain(text, length, out);
    return is_port(colon + 1, behind) && read_plain(text, length - behind - 1, out);
}

void address_write(const address *a, char out[ADDRESS_TEXT]) {
    static const address nowhere;
    const int is4 = is_four(a);
    if (memcmp(a, &nowhere, sizeof *a) == 0) memcpy(out, "unix", sizeof "unix");
    else if (!inet_ntop(is4 ? AF_INET : AF_INET6, is4 ? a->bytes + sizeof four : a->bytes, out, ADDRESS_TEXT))
        out[0] = 0;
}

int network_read(const char *text, network *out) {
    const size_t length = strcspn(text, "/");
    if (strcmp(text, "unix") == 0) return *out = (network){ .bits = 128 }, 1;
    if (!read_plain(text, length, &out->first)) return 0;
    const int is4 = !memchr(text, ':', length);
    const unsigned long most = is4 ? 32 : 128;
    unsigned long bits = most;
    if (text[length]) {
        char *end = NULL;
        bits = strtoul(text + length + 1, &end, 10);
        if (text[length + 1] < '0' || text[length + 1] > '9' || *end || bits > most) return 0;
    }
    out->bits = (unsigned)bits + (is4 ? 96 : 0);
    return 1;
}

int network_has(const network *networks, size_t n, const address *a) {
    for (size_t i = 0; i < n; i++) {
        const unsigned whole = networks[i].bits / 8, rest = networks[i].bits % 8;
        const unsigned char differ = whole < 16 ? a->bytes[whole] ^ networks[i].first.bytes[whole] : 0;
        if (memcmp(a->bytes, networks[i].first.bytes, whole) == 0 && !(differ >> (8 - rest))) return 1;
    }
    return 0;
}

static int is_blank(char c) { return c == ' ' || c == '\t'; }

address address_forwarded(const network *trusted, size_t n, const address *peer, const char *list, size_t length) {
    address client = *peer;
    while (length && network_has(trusted, n, &client)) {
        size_t begin = length, end = length;
        while (begin && list[begin - 1] != ',') begin--;
        length = begin ? begin - 1 : 0;
        while (begin < end && is_blank(list[end - 1])) end--;
        while (begin < end && is_blank(list[begin])) begin++;
        if (begin == end) continue; /* HTTP allows empty list elements */
        address before;
        if (!address_read(list + begin, end - begin, &before)) break;
        client = before;
    }
    return client;
}
