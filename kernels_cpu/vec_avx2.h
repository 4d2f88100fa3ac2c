/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vectors of the AVX2 kernels: 8 floats. The bodies (*_body.h) are written once over these words and over
 * those of vec_avx512.h. Included only by *_avx2.c.
 *
 * A chunk is 8 vectors = 64 columns. Packed e2m1 decodes into the columns in a fixed order of its own, which
 * the activations are put into once per call (vf_permute_e2m1): vector 4 h + c, lane 4 l + d of a chunk is
 * column 32 l + 16 (d / 2) + 8 h + 4 (d % 2) + c, so that a lane stays inside one scale block of 16 (pair of
 * lanes) or 32 (four lanes).
 */
#ifndef FT_VEC_AVX2_H
#define FT_VEC_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define VEC(name) name##_avx2
#define VF 8
#define VF_CHUNK (8 * VF)
typedef __m256 vf;
typedef __m256i vcodes; /* largest codes seen: finds NaN codes without a branch per chunk */

static inline vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
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
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* e4m3 codes in the high bytes of words -> f16 of 2^-8 times the value: sign, one zero, then exponent and
 * mantissa. */
static inline __m256i e4m3_to_f16(__m256i high)
{
    return _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbfff));
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

/* 64 packed columns -> 8 vectors. The bytes above bit 16 of an f32 come from two tables. */
static inline void vf_decode_e2m1(const uint8_t *p, vf w[8])
{
    const __m256i high = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf, (char)0xbf,
                      (char)0xbf, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0));
    const __m256i middle = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0, (char)0x80,
                      (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0));
    const __m256i nibble = _mm256_set1_epi8(15), upper = _mm256_set1_epi32((int)0xffff0000u);
    __m256i packed = _mm256_shuffle_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p), 0xd8);
    __m256i even = _mm256_and_si256(packed, nibble),
            odd = _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble);
    __m256i eh = _mm256_shuffle_epi8(high, even), em = _mm256_shuffle_epi8(middle, even);
    __m256i oh = _mm256_shuffle_epi8(high, odd), om = _mm256_shuffle_epi8(middle, odd);
    __m256i e0 = _mm256_unpacklo_epi8(em, eh), o0 = _mm256_unpacklo_epi8(om, oh);
    __m256i e1 = _mm256_unpackhi_epi8(em, eh), o1 = _mm256_unpackhi_epi8(om, oh);
    w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(e0, 16));
    w[1] = _mm256_castsi256_ps(_mm256_slli_epi32(o0, 16));
    w[2] = _mm256_castsi256_ps(_mm256_and_si256(e0, upper));
    w[3] = _mm256_castsi256_ps(_mm256_and_si256(o0, upper));
    w[4] = _mm256_castsi256_ps(_mm256_slli_epi32(e1, 16));
    w[5] = _mm256_castsi256_ps(_mm256_slli_epi32(o1, 16));
    w[6] = _mm256_castsi256_ps(_mm256_and_si256(e1, upper));
    w[7] = _mm256_castsi256_ps(_mm256_and_si256(o1, upper));
}
/* Natural order -> the order of vf_decode_e2m1: 4 x 4 transposes in each half. */
static inline void vf_permute_e2m1(const float *x, float *out)
{
    for (int h = 0; h < 2; h++) {
        __m256 row[4];
        for (int d = 0; d < 4; d++) {
            const float *from = x + 16 * (d / 2) + 8 * h + 4 * (d % 2);
            row[d] =
                _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), _mm_loadu_ps(from + 32), 1);
        }
        __m256 a = _mm256_unpacklo_ps(row[0], row[1]), b = _mm256_unpackhi_ps(row[0], row[1]);
        __m256 c = _mm256_unpacklo_ps(row[2], row[3]), d = _mm256_unpackhi_ps(row[2], row[3]);
        vf_store(out + (4 * h + 0) * VF, _mm256_shuffle_ps(a, c, 0x44));
        vf_store(out + (4 * h + 1) * VF, _mm256_shuffle_ps(a, c, 0xee));
        vf_store(out + (4 * h + 2) * VF, _mm256_shuffle_ps(b, d, 0x44));
        vf_store(out + (4 * h + 3) * VF, _mm256_shuffle_ps(b, d, 0xee));
    }
}
/* Scales / 2^8 of the 4 blocks of 16 in a chunk, each for its pair of lanes. */
static inline vf vf_scales_nvfp4(const uint8_t *scale, vcodes *seen)
{
    const __m128i spread = _mm_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3);
    int32_t four;
    memcpy(&four, scale, sizeof four);
    __m128i bytes = _mm_cvtsi32_si128(four);
    *seen = _mm256_max_epu8(*seen, _mm256_zextsi128_si256(_mm_and_si128(bytes, _mm_set1_epi8(127))));
    __m128i half = _mm_srai_epi16(_mm_shuffle_epi8(bytes, spread), 1);
    return _mm256_cvtph_ps(_mm_and_si128(half, _mm_set1_epi16((short)0xbfff)));
}
/* The same for codes below 0x7f. */
static inline vf vf_scales_nvfp4_plain(const uint8_t *scale)
{
    const __m128i spread = _mm_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3);
    int32_t four;
    memcpy(&four, scale, sizeof four);
    return _mm256_cvtph_ps(_mm_srli_epi16(_mm_shuffle_epi8(_mm_cvtsi32_si128(four), spread), 1));
}
/* Scales of the 2 blocks of 32 in a chunk, each for its four lanes. */
static inline vf vf_scales_mxfp4(const uint8_t *scale)
{
    __m256i exponent = _mm256_insertf128_si256(_mm256_castsi128_si256(_mm_set1_epi32(scale[0])),
                                               _mm_set1_epi32(scale[1]), 1);
    __m256i smallest = _mm256_and_si256(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()),
                                        _mm256_set1_epi32(0x00400000)); /* code 0 is 2^-127, a subnormal */
    __m256i nan = _mm256_cmpeq_epi32(exponent, _mm256_set1_epi32(255));
    exponent = _mm256_or_si256(_mm256_slli_epi32(exponent, 23), smallest);
    return _mm256_castsi256_ps(_mm256_or_si256(exponent, nan));
}
/* The same for codes 1 .. 254. */
static inline vf vf_scales_mxfp4_plain(const uint8_t *scale)
{
    const __m256i spread = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 0, -1,
                                            -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 1);
    int16_t two;
    memcpy(&two, scale, sizeof two);
    return _mm256_castsi256_ps(_mm256_srli_epi32(_mm256_shuffle_epi8(_mm256_set1_epi16(two), spread), 1));
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
