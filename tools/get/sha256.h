/* sha256.h - SHA-256 of a stream (FIPS 180-4). */
#ifndef GET_SHA256_H
#define GET_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { SHA256_TEXT = 65 }; /* bytes of a hash in hexadecimal, with its NUL */

typedef struct sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
} sha256;

void sha256_begin(sha256 *s);
void sha256_add(sha256 *s, const void *data, size_t length);
void sha256_end(sha256 *s, char out[SHA256_TEXT]); /* lower-case hexadecimal */

#endif
