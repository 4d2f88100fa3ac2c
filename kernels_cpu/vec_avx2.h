/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vectors of the AVX2 kernels: 8 floats. The bodies (*_body.h) are written once over these words and over
 * those of vec_avx512.h. Included only by *_avx2.c and *_avxvnni.c.
 */
#ifndef FT_VEC_AVX2_H
#define FT_VEC_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifndef VEC /* versions for more than AVX2 name themselves */
#define VEC(name) name##_avx2
#endif
#define VF 8
#define VF_CHUNK (8 * VF)
#define VF_ROWS 4 /* activation rows that share decoded weights */
typedef __m256 vf;
typedef __m256i vcodes; /* largest codes seen: finds NaN codes without a branch per chunk */

static inline vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
/* A value for several multiplies stays in a register: compilers would read it from memory again for each. */
#define VF_KEEP(v) __asm__("" : "+x"(v))
/* The first `bytes` bytes at p (more than a vector has counts as all), zeros after them. */
static inline vf vf_load_part(const uint8_t *p, uint32_t bytes)
{
    uint8_t copy[32];
    if (bytes >= 32)
        return _mm256_loadu_ps((const float *)(const void *)p);
    if (!bytes)
        return _mm256_setzero_ps();
    memset(copy, 0, sizeof copy);
    for (uint32_t i = 0; i < bytes; i++)
        copy[i] = p[i];
    return _mm256_loadu_ps((const float *)(const void *)copy);
}
static inline void vf_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v);
}
static inline vf vf_set1(float s)
{
    return _mm256_set1_ps(s);
}
static inline vf vf_zero(void)
{
    return _mm256_setzero_ps();
}
static inline vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
static inline vf vf_fnma(vf a, vf b, vf c)
{
    return _mm256_fnmadd_ps(a, b, c);
}
/* The second operand wins when one is NaN. */
static inline vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}
static inline vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
static inline vf vf_round(vf a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* v * 2^n for whole n in [-252, 254], in two steps so that it overflows and underflows as it should. */
static inline vf vf_scale_pow2(vf v, vf n)
{
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
    __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(v, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}
static inline float vf_sum(vf v)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
/* Sum of the lanes of each of 8 vectors, each added in the order of vf_sum. */
static inline __attribute__((always_inline)) vf vf_sums(const vf *v, size_t stride)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
    vf half[4], pair[2];
    for (int i = 0; i < 4; i++) {
        vf a = v[(size_t)i * 2 * stride], b = v[((size_t)i * 2 + 1) * stride];
        half[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int i = 0; i < 2; i++) {
        vf a = half[i], b = half[i + 2];
        pair[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    }
    vf sum =
        _mm256_add_ps(_mm256_shuffle_ps(pair[0], pair[1], 0x88), _mm256_shuffle_ps(pair[0], pair[1], 0xdd));
    return _mm256_permutevar8x32_ps(sum, order);
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* 16 values: even ones, then odd ones; and f32 activations in the same order. */
static inline void vf_bf16_pair(vf raw, vf w[2])
{
    __m256i both = _mm256_castps_si256(raw);
    w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    w[1] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000u)));
}
static inline void vf_pack_pair(const float *x, float *out)
{
    /* Even ones of x, even ones of x + 8, by 64 bits: 0 2 | 8 10 | 4 6 | 12 14 -> natural order. */
    vf a = vf_load(x), b = vf_load(x + VF);
    vf even = _mm256_shuffle_ps(a, b, 0x88), odd = _mm256_shuffle_ps(a, b, 0xdd);
    vf_store(out, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8)));
    vf_store(out + VF, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8)));
}

/* e4m3 codes in the high bytes of words -> f16 of 2^-8 times the value: sign, one zero, then exponent and mantissa. */
static inline __m256i e4m3_to_f16(__m256i high)
{
    return _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbfff));
}
#define VF_E4M3_FACTOR 256.0f
static inline void vf_pack_e4m3(const float *x, float *out)
{
    memcpy(out, x, VF_CHUNK * sizeof *x);
}
/* A chunk of 64 values / 2^8, natural order; NaN codes come out as +-480 / 2^8 and are found by vcodes. */
static inline void vf_load_e4m3(const uint8_t *p, vf w[8], vcodes *seen)
{
    for (int j = 0; j < 8; j += 4) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)(p + 8 * j)),
                zero = _mm256_setzero_si256();
        __m256i low = e4m3_to_f16(_mm256_unpacklo_epi8(zero, bytes)),
                high = e4m3_to_f16(_mm256_unpackhi_epi8(zero, bytes));
        *seen = _mm256_max_epu8(*seen, _mm256_and_si256(bytes, _mm256_set1_epi8(127)));
        w[j] = _mm256_cvtph_ps(_mm256_castsi256_si128(low));
        w[j + 1] = _mm256_cvtph_ps(_mm256_castsi256_si128(high));
        w[j + 2] = _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1));
        w[j + 3] = _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1));
    }
}
static inline vcodes vcodes_none(void)
{
    return _mm256_setzero_si256();
}
static inline int vcodes_have_nan(vcodes seen)
{
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(seen, _mm256_set1_epi8(127))) != 0;
}

#endif
