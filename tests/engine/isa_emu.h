/* isa_emu.h - emulates instructions that moe.c uses but few machines have, following volume 2 of Intel's manual: AMX
 * tiles (palette 1) in plain C, and vpdpbusd of AVX-VNNI in AVX2. Included before moe.c (by -include in the Makefile,
 * for test_NAME-emulated), this file enables the AMX kernels on any x86-64 machine and the AVX-VNNI kernels on
 * machines with AVX2. Instructions that would fault on a processor end the program: they are bugs even if the results
 * are correct. */
#ifndef ISA_EMU_H
#define ISA_EMU_H

/* Define the feature test macros of moe.c and the tests before the first system header. */
#if !defined(_WIN32) && !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE
#endif
#if defined(__APPLE__) && !defined(_DARWIN_C_SOURCE)
#define _DARWIN_C_SOURCE
#endif

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- AVX-VNNI ---- */

#define MOE_AVXVNNI_TARGET "avx2,f16c"
#define MOE_DPBUSD(sum, u, s) avxvnni_dpbusd(sum, u, s)

static inline int moe_avxvnni_available(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
}

/* Return sum[n] + sum over i of u[4 n + i] * s[4 n + i], unsigned by signed, modulo 2^32. */
__attribute__((target("avx2"))) static inline __m256i avxvnni_dpbusd(__m256i sum, __m256i u, __m256i s) {
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i even =
        _mm256_mullo_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, ones), _mm256_madd_epi16(odd, ones)));
}

/* ---- AMX ---- */

/* Without a target attribute the code around the tiles runs on any machine. All other AMX kernels are portable. */
#define MOE_AMX_TARGET
#define MOE_AMX_REST portable

/* Replace the intrinsics, which are macros or functions of <immintrin.h>. */
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig(config) amx_loadconfig(config)
#define _tile_release() amx_release()
#define _tile_zero(tile) amx_zero(tile)
#define _tile_loadd(tile, base, stride) amx_loadd(tile, base, stride)
#define _tile_stored(tile, base, stride) amx_stored(tile, base, stride)
#define _tile_dpbssd(c, a, b) amx_dpbssd(c, a, b)
#define MOE_AMX_WIDEN(to, from)                                     \
    for (int lane = 0; lane < 16; lane++) (to)[lane] = (from)[lane]
#define MOE_AMX_PARTS(to, low)                                                \
    for (int lane = 0; lane < 16; lane++) (to)[lane] = moe_part((low) + lane)

static inline int moe_amx_available(void) { return 1; }

enum { AMX_TILES = 8, AMX_ROWS = 16, AMX_ROW_BYTES = 64 };

/* State of the tile registers, one per thread. */
typedef struct amx_state {
    int palette; /* 0 if not configured */
    uint8_t rows[AMX_TILES], colsb[AMX_TILES];
    uint8_t tile[AMX_TILES][AMX_ROWS][AMX_ROW_BYTES];
    size_t configurations, products;
    int expect_fault; /* tests of the emulator set this to count faults and continue */
    size_t faults;
} amx_state;

static _Thread_local amx_state amx;

/* Report a fault. Return 1 if the caller must skip the instruction, because a test expects the fault. */
static inline int amx_fault(const char *instruction, const char *why) {
    amx.faults++;
    if (amx.expect_fault) return 1;
    fprintf(stderr, "isa_emu: %s: %s\n", instruction, why);
    abort();
}
#define AMX_REFUSE(condition, instruction, why)            \
    if ((condition) && amx_fault(instruction, why)) return

static inline int amx_configured(int t) { return t >= 0 && t < AMX_TILES && amx.palette == 1 && amx.rows[t] > 0; }

static inline void amx_release(void) {
    amx.palette = 0;
    memset(amx.rows, 0, sizeof amx.rows);
    memset(amx.colsb, 0, sizeof amx.colsb);
    memset(amx.tile, 0, sizeof amx.tile);
}

/* Load a configuration of 64 bytes: palette, start row, 14 reserved, 16 x uint16 bytes per row, 16 x uint8 rows. */
static inline void amx_loadconfig(const void *config) {
    uint8_t bytes[64];
    uint16_t colsb[16];
    memcpy(bytes, config, sizeof bytes);
    memcpy(colsb, bytes + 16, sizeof colsb);
    AMX_REFUSE(bytes[0] > 1, "ldtilecfg", "unknown palette");
    if (bytes[0] == 0) {
        amx_release();
        return;
    }
    AMX_REFUSE(bytes[1] != 0, "ldtilecfg", "nonzero start row");
    for (int i = 2; i < 16; i++) AMX_REFUSE(bytes[i], "ldtilecfg", "reserved bytes are not zero");
    for (int t = 0; t < 16; t++) {
        const int rows = bytes[48 + t];
        AMX_REFUSE(t >= AMX_TILES && (rows || colsb[t]), "ldtilecfg", "more than eight tiles");
        AMX_REFUSE(rows > AMX_ROWS, "ldtilecfg", "more than 16 rows");
        AMX_REFUSE(colsb[t] > AMX_ROW_BYTES, "ldtilecfg", "rows of more than 64 bytes");
        AMX_REFUSE((rows == 0) != (colsb[t] == 0), "ldtilecfg", "rows without columns or columns without rows");
    }
    amx_release();
    amx.palette = 1;
    amx.configurations++;
    for (int t = 0; t < AMX_TILES; t++) {
        amx.rows[t] = bytes[48 + t];
        amx.colsb[t] = (uint8_t)colsb[t];
    }
}

static inline void amx_zero(int t) {
    AMX_REFUSE(!amx_configured(t), "tilezero", "tile is not configured");
    memset(amx.tile[t], 0, sizeof amx.tile[t]);
}

/* Load a tile; set bytes outside its configured rows and columns to zero. */
static inline void amx_loadd(int t, const void *base, size_t stride) {
    AMX_REFUSE(!amx_configured(t), "tileloadd", "tile is not configured");
    memset(amx.tile[t], 0, sizeof amx.tile[t]);
    for (size_t r = 0; r < amx.rows[t]; r++) memcpy(amx.tile[t][r], (const char *)base + r * stride, amx.colsb[t]);
}

static inline void amx_stored(int t, void *base, size_t stride) {
    AMX_REFUSE(!amx_configured(t), "tilestored", "tile is not configured");
    for (size_t r = 0; r < amx.rows[t]; r++) memcpy((char *)base + r * stride, amx.tile[t][r], amx.colsb[t]);
}

/* Compute c[m][n] += sum over k and i of a[m][4 k + i] * b[k][4 n + i], modulo 2^32. */
static inline void amx_dpbssd(int c, int a, int b) {
    AMX_REFUSE(!amx_configured(a) || !amx_configured(b) || !amx_configured(c), "tdpbssd", "a tile is not configured");
    AMX_REFUSE(a == b || a == c || b == c, "tdpbssd", "a tile is used twice");
    AMX_REFUSE(amx.colsb[a] % 4 || amx.colsb[b] % 4 || amx.colsb[c] % 4, "tdpbssd",
               "row size is not a multiple of 4 bytes");
    AMX_REFUSE(amx.rows[a] != amx.rows[c], "tdpbssd", "A and C differ in rows");
    AMX_REFUSE(amx.colsb[a] / 4 != amx.rows[b], "tdpbssd", "the columns of A are not the rows of B");
    AMX_REFUSE(amx.colsb[b] != amx.colsb[c], "tdpbssd", "B and C differ in columns");
    amx.products++;
    for (size_t m = 0; m < amx.rows[c]; m++)
        for (size_t k = 0; k < amx.rows[b]; k++) {
            const int8_t *x = (const int8_t *)&amx.tile[a][m][4 * k], *w = (const int8_t *)amx.tile[b][k];
            if (!(x[0] | x[1] | x[2] | x[3])) continue; /* padding makes zeros common */
            for (size_t n = 0; n < amx.colsb[c] / 4u; n++, w += 4) {
                uint32_t sum;
                memcpy(&sum, &amx.tile[c][m][4 * n], 4);
                sum += (uint32_t)(x[0] * w[0] + x[1] * w[1] + x[2] * w[2] + x[3] * w[3]);
                memcpy(&amx.tile[c][m][4 * n], &sum, 4);
            }
        }
}

#endif
