/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vectors of the AVX-512 kernels: 16 floats; the same words as vec_avx2.h. Included only by *_avx512.c.
 *
 * A chunk is 8 vectors = 128 columns. Packed e2m1: vector j, lane d of a chunk is column 8 d + j, so that a
 * pair of lanes shares a scale block of 16 and four lanes one of 32.
 */
#ifndef FT_VEC_AVX512_H
#define FT_VEC_AVX512_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define VEC(name) name##_avx512
#define VF 16
#define VF_CHUNK (8 * VF)
typedef __m512 vf;
typedef __m256i vcodes; /* largest codes seen: finds NaN codes without a branch per chunk */

static inline vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
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
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* A chunk of 128 values / 2^8, natural order; NaN codes come out as +-480 / 2^8 and are found by vcodes. */
static inline void vf_load_e4m3(const uint8_t *p, vf w[8], vcodes *seen)
{
    for (int j = 0; j < 8; j += 2) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)(p + 16 * j));
        __m512i half = _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
        half = _mm512_and_si512(_mm512_srai_epi16(half, 1), _mm512_set1_epi16((short)0xbfff));
        *seen = _mm256_max_epu8(*seen, _mm256_and_si256(bytes, _mm256_set1_epi8(127)));
        w[j] = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
        w[j + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
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

/* 128 packed columns -> 8 vectors: nibble j of every dword, looked up by its low 4 bits. */
struct vweights {
    vf w[8];
};
static inline void vf_decode_e2m1(const uint8_t *p, struct vweights *weights)
{
    const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                        -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    __m512i packed = _mm512_loadu_si512(p);
    vf *w = weights->w;
    w[0] = _mm512_permutexvar_ps(packed, table);
    w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 4), table);
    w[2] = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 8), table);
    w[3] = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 12), table);
    w[4] = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 16), table);
    w[5] = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 20), table);
    w[6] = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 24), table);
    w[7] = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 28), table);
}
/* Sums of w x over the 8 columns of each lane. */
static inline vf vf_packed_dot(const struct vweights *weights, const float *packed)
{
    const vf *w = weights->w;
    vf even = vf_mul(w[0], vf_load(packed)), odd = vf_mul(w[1], vf_load(packed + VF));
    for (int j = 2; j < 8; j += 2) {
        even = vf_fma(w[j], vf_load(packed + j * VF), even);
        odd = vf_fma(w[j + 1], vf_load(packed + (j + 1) * VF), odd);
    }
    return vf_add(even, odd);
}
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"
/* 128 activations -> the order of the decoder. */
static inline void vf_pack_e2m1(const float *x, float *out)
{
    const __m512i stride = _mm512_setr_epi32(0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120);
    for (int j = 0; j < 8; j++)
        vf_store(out + j * VF, _mm512_i32gather_ps(stride, x + j, 4));
}
#pragma GCC diagnostic pop
/* Scales / 2^8 of the 8 blocks of 16 in a chunk, each for its pair of lanes. */
static inline vf vf_scales_nvfp4(const uint8_t *scale, vcodes *seen)
{
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)scale);
    *seen = _mm256_max_epu8(*seen, _mm256_zextsi128_si256(_mm_and_si128(bytes, _mm_set1_epi8(127))));
    __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(bytes, bytes)), 8);
    half = _mm256_and_si256(_mm256_srai_epi16(half, 1), _mm256_set1_epi16((short)0xbfff));
    return _mm512_cvtph_ps(half);
}
/* The same for codes below 0x7f. */
static inline vf vf_scales_nvfp4_plain(const uint8_t *scale)
{
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)scale);
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(bytes, bytes)), 7));
}
/* Scales of the 4 blocks of 32 in a chunk, each for its four lanes. */
static inline vf vf_scales_mxfp4(const uint8_t *scale)
{
    const __m128i spread = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    int32_t four;
    memcpy(&four, scale, sizeof four);
    __m512i exponent = _mm512_cvtepu8_epi32(_mm_shuffle_epi8(_mm_cvtsi32_si128(four), spread));
    __mmask16 smallest = _mm512_cmpeq_epi32_mask(exponent, _mm512_setzero_si512());
    __mmask16 nan = _mm512_cmpeq_epi32_mask(exponent, _mm512_set1_epi32(255));
    __m512i bits = _mm512_slli_epi32(exponent, 23);
    bits = _mm512_mask_mov_epi32(bits, smallest, _mm512_set1_epi32(0x00400000)); /* code 0 is 2^-127 */
    bits = _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_castsi512_ps(bits);
}
/* The same for codes 1 .. 254. */
static inline vf vf_scales_mxfp4_plain(const uint8_t *scale)
{
    const __m128i spread = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    int32_t four;
    memcpy(&four, scale, sizeof four);
    __m512i exponent = _mm512_cvtepu8_epi32(_mm_shuffle_epi8(_mm_cvtsi32_si128(four), spread));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
/* Are all of n codes in [low, high]? */
static inline int vcodes_are_within(const uint8_t *codes, uint32_t n, uint8_t low, uint8_t high)
{
    __m128i least = _mm_set1_epi8((char)low), most = _mm_set1_epi8((char)high), bad = _mm_setzero_si128();
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(codes + i));
        bad = _mm_or_si128(bad, _mm_xor_si128(c, _mm_min_epu8(_mm_max_epu8(c, least), most)));
    }
    int outside = !_mm_testz_si128(bad, bad);
    for (; i < n; i++)
        outside |= codes[i] < low || codes[i] > high;
    return !outside;
}

#endif
