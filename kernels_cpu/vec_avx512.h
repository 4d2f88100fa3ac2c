/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vectors of the AVX-512 kernels: 16 floats; the same words as vec_avx2.h. Included only by *_avx512*.c.
 */
#ifndef FT_VEC_AVX512_H
#define FT_VEC_AVX512_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifndef VEC /* versions for more than AVX-512 BW name themselves */
#define VEC(name) name##_avx512
#endif
#define VF 16
#define VF_CHUNK (8 * VF)
#define VF_ROWS 8 /* activation rows that share decoded weights */
typedef __m512 vf;
typedef __m256i vcodes; /* largest codes seen: finds NaN codes without a branch per chunk */

static inline vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
/* A value for several multiplies stays in a register: compilers would read it from memory again for each. */
#define VF_KEEP(v) __asm__("" : "+v"(v))
/* The first `bytes` bytes at p (more than a vector has counts as all), zeros after them. */
static inline vf vf_load_part(const uint8_t *p, uint32_t bytes)
{
    uint64_t first = bytes >= 64 ? UINT64_MAX : (UINT64_C(1) << bytes) - 1;
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi8(first, p));
}
static inline void vf_store(float *p, vf v)
{
    _mm512_storeu_ps(p, v);
}
static inline vf vf_set1(float s)
{
    return _mm512_set1_ps(s);
}
static inline vf vf_zero(void)
{
    return _mm512_setzero_ps();
}
static inline vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline vf vf_fnma(vf a, vf b, vf c)
{
    return _mm512_fnmadd_ps(a, b, c);
}
/* The second operand wins when one is NaN. */
static inline vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
static inline vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
/* Without optimisation gcc's headers are macros whose masks warn in our name. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"
static inline vf vf_round(vf a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#pragma GCC diagnostic pop
static inline vf vf_scale_pow2(vf v, vf n)
{
    return _mm512_scalef_ps(v, n);
}
static inline float vf_sum(vf v)
{
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
/*
 * Sums of lanes, 16 vectors at a time. First inside the 128-bit parts, because what does not cross them leaves the pipes
 * that multiply alone (Zen 5): lanes 0, 1 of each part of a and of b, plus lanes 2, 3 of each; vf_sums_end adds the rest.
 */
static inline vf vf_low_lanes(vf a, vf b)
{
    return _mm512_shuffle_ps(a, b, 0x44);
}
static inline vf vf_high_lanes(vf a, vf b)
{
    return _mm512_shuffle_ps(a, b, 0xee);
}
static inline __attribute__((always_inline)) vf vf_sums_end(const vf half[8])
{
    vf quarter[4], pair[2];
    for (int i = 0; i < 4; i++) {
        vf a = half[2 * i], b = half[2 * i + 1];
        quarter[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    }
    for (int i = 0; i < 2; i++) {
        vf a = quarter[2 * i], b = quarter[2 * i + 1];
        pair[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(pair[0], pair[1], 0x88),
                         _mm512_shuffle_f32x4(pair[0], pair[1], 0xdd));
}
/* Lane i is the sum of the lanes of v[i * stride], each added in the same order. */
static inline __attribute__((always_inline)) vf vf_sums(const vf *v, size_t stride)
{
    vf half[8];
    for (size_t i = 0; i < 8; i++) {
        vf a = v[i * 2 * stride], b = v[(i * 2 + 1) * stride];
        half[i] = _mm512_add_ps(vf_low_lanes(a, b), vf_high_lanes(a, b));
    }
    return vf_sums_end(half);
}
/* Of 8 vectors, v[i * stride], lanes 2 r and 2 r + 1 are numbers 2 i and 2 i + 1 of row r: times factor to
 * out + r * out_stride. */
static inline void vf_pairs_apart(const vf *v, size_t stride, vf factor, float *out, size_t out_stride)
{
    __m512d half[8], quarter[8];
    for (int i = 0; i < 8; i += 2) {
        __m512d a = _mm512_castps_pd(vf_mul(v[(size_t)i * stride], factor));
        __m512d b = _mm512_castps_pd(vf_mul(v[((size_t)i + 1) * stride], factor));
        half[i] = _mm512_unpacklo_pd(a, b); /* part p holds row 2p, of the other row 2p + 1 */
        half[i + 1] = _mm512_unpackhi_pd(a, b);
    }
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 4; i++) { /* rows of half of the parts */
            __m512d a = half[(i & 2) * 2 + (i & 1)], b = half[(i & 2) * 2 + 2 + (i & 1)];
            quarter[k * 4 + i] = k ? _mm512_shuffle_f64x2(a, b, 0xee) : _mm512_shuffle_f64x2(a, b, 0x44);
        }
    for (int k = 0; k < 2; k++)
        for (int odd = 0; odd < 2; odd++) {
            __m512d a = quarter[k * 4 + odd], b = quarter[k * 4 + 2 + odd];
            size_t row = (size_t)k * 4 + (size_t)odd;
            vf_store(out + row * out_stride, _mm512_castpd_ps(_mm512_shuffle_f64x2(a, b, 0x88)));
            vf_store(out + (row + 2) * out_stride, _mm512_castpd_ps(_mm512_shuffle_f64x2(a, b, 0xdd)));
        }
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* 32 values: even ones, then odd ones; and f32 activations in the same order. */
static inline void vf_bf16_pair(vf raw, vf w[2])
{
    __m512i both = _mm512_castps_si512(raw);
    w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    w[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000u)));
}
static inline void vf_pack_pair(const float *x, float *out)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    vf a = vf_load(x), b = vf_load(x + VF);
    vf_store(out, _mm512_permutex2var_ps(a, even, b));
    vf_store(out + VF, _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b));
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
