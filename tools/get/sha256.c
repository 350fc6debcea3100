/* sha256.c - see sha256.h. */
#include "tools/get/sha256.h"

#include <string.h>

static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2
};

static uint32_t rotated(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void add_block(sha256 *s, const unsigned char *block) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
               block[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + (rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
               (rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10);
    uint32_t a = s->state[0], b = s->state[1], c = s->state[2], d = s->state[3], e = s->state[4], f = s->state[5],
             g = s->state[6], h = s->state[7];
    for (int i = 0; i < 64; i++) {
        const uint32_t t =
            h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + constants[i] + w[i];
        const uint32_t u = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t, d = c, c = b, b = a, a = t + u;
    }
    const uint32_t added[8] = { a, b, c, d, e, f, g, h };
    for (int i = 0; i < 8; i++) s->state[i] += added[i];
}

void sha256_begin(sha256 *s) {
    static const uint32_t start[8] = { 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19 };
    memcpy(s->state, start, sizeof start);
    s->bytes = 0;
}

void sha256_add(sha256 *s, const void *data, size_t length) {
    const unsigned char *p = data;
    while (length) {
        const size_t used = s->bytes % 64, free_bytes = 64 - used, n = length < free_bytes ? length : free_bytes;
        if (n == 64) add_block(s, p);
        else memcpy(s->block + used, p, n);
        if (n < 64 && n == free_bytes) add_block(s, s->block);
        s->bytes += n, p += n, length -= n;
    }
}

void sha256_end(sha256 *s, char out[SHA256_TEXT]) {
    static const unsigned char padding[64] = { 0x80 };
    const uint64_t bits = s->bytes * 8;
    unsigned char size[8];
    for (int i = 0; i < 8; i++) size[i] = (unsigned char)(bits >> (56 - 8 * i));
    sha256_add(s, padding, 64 - (s->bytes + 8) % 64);
    sha256_add(s, size, sizeof size);
    for (int i = 0; i < 32; i++) {
        static const char digits[] = "0123456789abcdef";
        const unsigned byte = s->state[i / 4] >> (24 - 8 * (i % 4)) & 255;
        out[2 * i] = digits[byte >> 4], out[2 * i + 1] = digits[byte & 15];
    }
    out[64] = 0;
}
