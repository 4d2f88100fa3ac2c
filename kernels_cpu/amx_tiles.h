/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The words of tiles_amx.h that need AMX and AVX512-FP16: tile registers 0 to 7, and a product of f16.
 * (Tests have a twin in plain C.) Numbers of tiles are literals. The compilers' own intrinsics do not say
 * that loads read memory.
 */
#ifndef FT_AMX_TILES_H
#define FT_AMX_TILES_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

/* Tile registers of 16 rows: tile 6 has rows of 64 bytes, the others of `bytes`. Tiles lose what they hold. */
static inline void amx_begin(uint32_t bytes)
{
    struct {
        uint8_t palette, start_row, zero[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = (uint16_t)(t == 6 ? 64 : bytes);
        config.rows[t] = 16;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
/* Nothing is left to save when the thread is switched. */
static inline void amx_end(void)
{
    __asm__ volatile("tilerelease");
}
#define AMX_TEXT(x) #x
#define AMX_ZERO(t) __asm__ volatile("tilezero %%tmm" AMX_TEXT(t)::)
#define AMX_LOAD(t, p, stride)                                                                               \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" AMX_TEXT(t) : : "r"(p), "r"((size_t)(stride)) : "memory")
#define AMX_STORE(t, p, stride)                                                                              \
    __asm__ volatile("tilestored %%tmm" AMX_TEXT(t) ", (%0,%1,1)"                                            \
                     :                                                                                       \
                     : "r"(p), "r"((size_t)(stride))                                                         \
                     : "memory")
/* c[m][n] += sum over k of a[m][k] b[k][n], pairs of bf16. */
#define AMX_DP(c, a, b)                                                                                      \
    __asm__ volatile("tdpbf16ps %%tmm" AMX_TEXT(b) ", %%tmm" AMX_TEXT(a) ", %%tmm" AMX_TEXT(c)::)

/* Products of 32 numbers in f16. */
static inline __m512i amx_mul_f16(__m512i a, __m512i b)
{
    return _mm512_castph_si512(_mm512_mul_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b)));
}

#endif
