/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The words of kernels_cpu/amx_tiles.h in plain C. TDPBF16PS as Intel's manual describes it: for every
 * element of C the products of even and of odd columns are summed apart by fused multiply-adds from zero,
 * then added to each other and to C; to nearest even, subnormal inputs and results are zeros.
 */
#ifndef FT_AMX_TWIN_TILES_H
#define FT_AMX_TWIN_TILES_H

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct twin_tile {
    uint8_t row[16][64];
};
static _Thread_local struct twin_tile twin_tiles[8];
static _Thread_local uint32_t twin_row_bytes; /* of all tiles but 6; 0: no configuration is loaded */

static inline void amx_begin(uint32_t bytes)
{
    twin_row_bytes = bytes;
    memset(twin_tiles, 0, sizeof twin_tiles);
}
static inline void amx_end(void)
{
    twin_row_bytes = 0;
}
static inline uint32_t twin_bytes(int t)
{
    if (!twin_row_bytes || twin_row_bytes > 64 || twin_row_bytes % 4)
        __builtin_trap(); /* as the instruction would */
    return t == 6 ? 64 : twin_row_bytes;
}
static inline void twin_load(int t, const void *p, size_t stride)
{
    memset(&twin_tiles[t], 0, sizeof twin_tiles[t]);
    for (size_t m = 0; m < 16; m++)
        memcpy(twin_tiles[t].row[m], (const uint8_t *)p + m * stride, twin_bytes(t));
}
static inline void twin_store(int t, void *p, size_t stride)
{
    for (size_t m = 0; m < 16; m++)
        memcpy((uint8_t *)p + m * stride, twin_tiles[t].row[m], twin_bytes(t));
}
static inline float twin_flush(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x;
}
static inline float twin_bf16(const uint8_t *p)
{
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return twin_flush(ft_bf16_to_f32(bits));
}
static inline void twin_dp(int c, int a, int b)
{
    for (uint32_t m = 0; m < 16; m++)
        for (uint32_t n = 0; n < twin_bytes(c) / 4; n++) {
            float sum[2] = {0, 0}, old;
            for (uint32_t k = 0; k < 16; k++)
                for (uint32_t i = 0; i < 2; i++)
                    sum[i] = twin_flush(fmaf(twin_bf16(twin_tiles[a].row[m] + 4 * k + 2 * i),
                                             twin_bf16(twin_tiles[b].row[k] + 4 * n + 2 * i), sum[i]));
            memcpy(&old, twin_tiles[c].row[m] + 4 * n, sizeof old);
            old = twin_flush(twin_flush(old) + twin_flush(sum[0] + sum[1]));
            memcpy(twin_tiles[c].row[m] + 4 * n, &old, sizeof old);
        }
}
#define AMX_ZERO(t) memset(&twin_tiles[t], 0, sizeof twin_tiles[t])
#define AMX_LOAD(t, p, stride) twin_load(t, p, stride)
#define AMX_STORE(t, p, stride) twin_store(t, p, stride)
#define AMX_DP(c, a, b) twin_dp(c, a, b)

static inline __m512i amx_mul_f16(__m512i a, __m512i b)
{
    __m512 low =
        _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(a)), _mm512_cvtph_ps(_mm512_castsi512_si256(b)));
    __m512 high = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(a, 1)),
                                _mm512_cvtph_ps(_mm512_extracti64x4_epi64(b, 1)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, 0)), _mm512_cvtps_ph(high, 0), 1);
}

#endif
