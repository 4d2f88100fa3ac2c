/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vectors of the AVX2 kernels: 8 floats. The bodies (*_body.h) are written once over these words and over
 * those of vec_avx512.h. Included only by *_avx2.c.
 *
 * A chunk is 8 vectors = 64 columns. Packed e2m1 is multiplied in integers, which this ISA does at half the
 * cost of decoding to floats: weights are small whole numbers (2 * e2m1), and activations become fixed point
 * once per call, with 23 bits and a unit of its own for every 8 columns (one lane): three digits of 8 bits
 * for the byte multiply. The sum of a lane is exact but for that rounding, which is below 2^-23 of the lane's
 * largest activation. A lane stays inside one scale block of 16 (pair of lanes) or 32 (four lanes).
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

/* 64 packed columns: 2 * e2m1 + 12 as unsigned bytes, even and odd columns apart. */
struct vweights {
    __m256i even, odd;
};
static inline void vf_decode_e2m1(const uint8_t *p, struct vweights *w)
{
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    __m256i packed = _mm256_loadu_si256((const __m256i *)(const void *)p);
    w->even = _mm256_shuffle_epi8(table, _mm256_and_si256(packed, nibble));
    w->odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
}

/* The activations of a chunk in fixed point, in the place of 64 floats: lane d holds columns 8 d .. 8 d + 7.
 */
struct vfixed {
    int8_t even[3][32], odd[3][32]; /* digits of base 256, low first; byte i is column 2 i or 2 i + 1 */
    int32_t offset[8];              /* 12 times the sum of the lane's fixed-point numbers */
    float unit[8];                  /* half the value of 1, a power of two; NaN when the lane is not finite */
};

/* Sums of w x over the 8 columns of each lane, exact up to the fixed point and one rounding. */
static inline vf vf_packed_dot(const struct vweights *w, const float *packed)
{
    const struct vfixed *x = (const struct vfixed *)(const void *)packed;
    __m256i digit[3];
    for (int i = 0; i < 3; i++) /* at most 2 * 2 * 24 * 128 in 16 bits */
        digit[i] = _mm256_add_epi16(
            _mm256_maddubs_epi16(w->even, _mm256_loadu_si256((const __m256i *)(const void *)x->even[i])),
            _mm256_maddubs_epi16(w->odd, _mm256_loadu_si256((const __m256i *)(const void *)x->odd[i])));
    __m256i high = _mm256_slli_epi32(_mm256_madd_epi16(digit[2], _mm256_set1_epi16(1)), 16);
    __m256i low = _mm256_add_epi32(_mm256_madd_epi16(digit[1], _mm256_set1_epi16(256)),
                                   _mm256_madd_epi16(digit[0], _mm256_set1_epi16(1)));
    __m256i sum = _mm256_sub_epi32(_mm256_add_epi32(high, low),
                                   _mm256_loadu_si256((const __m256i *)(const void *)x->offset));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(x->unit));
}

/* out lane d = row[d][0] op ... op row[d][7] */
#define VF_REDUCE_LANES(op, row, out)                                                                        \
    do {                                                                                                     \
        __m256i half_[2];                                                                                    \
        for (int i_ = 0; i_ < 2; i_++) {                                                                     \
            const __m256i *r_ = (row) + 4 * i_;                                                              \
            __m256i a_ = op(_mm256_unpacklo_epi32(r_[0], r_[1]), _mm256_unpackhi_epi32(r_[0], r_[1]));       \
            __m256i b_ = op(_mm256_unpacklo_epi32(r_[2], r_[3]), _mm256_unpackhi_epi32(r_[2], r_[3]));       \
            half_[i_] = op(_mm256_unpacklo_epi64(a_, b_), _mm256_unpackhi_epi64(a_, b_));                    \
        }                                                                                                    \
        (out) = op(_mm256_permute2x128_si256(half_[0], half_[1], 0x20),                                      \
                   _mm256_permute2x128_si256(half_[0], half_[1], 0x31));                                     \
    } while (0)

/* Unit and its inverse of each lane from the largest |x| of the lane (as bits): numbers stay within three
 * digits. */
static inline void vf_fixed_units(__m256i largest, float *unit, float *inverse)
{
    /* 127 * (65536 + 256 + 1) is a little less than 2^23: sizes just below a power of two take the next unit.
     */
    __m256 raised = _mm256_mul_ps(_mm256_castsi256_ps(largest), _mm256_set1_ps(1.0041f));
    __m256i exponent = _mm256_srli_epi32(_mm256_castps_si256(raised), 23);
    __m256i broken = _mm256_cmpeq_epi32(exponent, _mm256_set1_epi32(255));
    exponent = _mm256_max_epi32(exponent, _mm256_set1_epi32(24)); /* the unit stays normal */
    __m256i unit_bits = _mm256_slli_epi32(_mm256_sub_epi32(exponent, _mm256_set1_epi32(23)), 23);
    __m256i inverse_bits = _mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(276), exponent), 23);
    _mm256_storeu_ps(unit, _mm256_castsi256_ps(_mm256_or_si256(unit_bits, broken)));
    _mm256_storeu_ps(inverse, _mm256_castsi256_ps(inverse_bits));
}

/* Digits of 4 lanes, each 8 numbers of 3 digits in the low bytes, to their places from byte 4 * lane on. */
static inline void vf_fixed_digits(const __m256i *number, struct vfixed *out, int lane)
{
    const __m256i gather = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, -1, -1, -1, -1)); /* digit by digit, even then odd */
    __m128i a[4], b[4];
    for (int i = 0; i < 4; i++) {
        __m256i bytes = _mm256_shuffle_epi8(number[i], gather);
        __m128i first = _mm256_castsi256_si128(bytes), second = _mm256_extracti128_si256(bytes, 1);
        a[i] = _mm_unpacklo_epi16(first, second); /* even 0, odd 0, even 1, odd 1 */
        b[i] = _mm_unpackhi_epi16(first, second); /* even 2, odd 2 */
    }
    __m128i a01 = _mm_unpacklo_epi32(a[0], a[1]), a23 = _mm_unpacklo_epi32(a[2], a[3]);
    __m128i c01 = _mm_unpackhi_epi32(a[0], a[1]), c23 = _mm_unpackhi_epi32(a[2], a[3]);
    __m128i b01 = _mm_unpacklo_epi32(b[0], b[1]), b23 = _mm_unpacklo_epi32(b[2], b[3]);
    _mm_storeu_si128((__m128i *)(void *)(out->even[0] + 4 * lane), _mm_unpacklo_epi64(a01, a23));
    _mm_storeu_si128((__m128i *)(void *)(out->odd[0] + 4 * lane), _mm_unpackhi_epi64(a01, a23));
    _mm_storeu_si128((__m128i *)(void *)(out->even[1] + 4 * lane), _mm_unpacklo_epi64(c01, c23));
    _mm_storeu_si128((__m128i *)(void *)(out->odd[1] + 4 * lane), _mm_unpackhi_epi64(c01, c23));
    _mm_storeu_si128((__m128i *)(void *)(out->even[2] + 4 * lane), _mm_unpacklo_epi64(b01, b23));
    _mm_storeu_si128((__m128i *)(void *)(out->odd[2] + 4 * lane), _mm_unpackhi_epi64(b01, b23));
}

/* 64 activations -> the form of vf_packed_dot. */
static inline void vf_pack_e2m1(const float *x, float *packed)
{
    struct vfixed *out = (struct vfixed *)(void *)packed;
    const __m256i middle = _mm256_set1_epi32(0x00808080);
    __m256i row[8], largest, sum;
    float inverse[8];
    for (int d = 0; d < 8; d++) /* bits of |x| are in the order of |x|, and NaN is above all */
        row[d] = _mm256_and_si256(_mm256_castps_si256(vf_load(x + 8 * d)), _mm256_set1_epi32(0x7fffffff));
    VF_REDUCE_LANES(_mm256_max_epi32, row, largest);
    vf_fixed_units(largest, out->unit, inverse);
    for (int d = 0; d < 8; d++)
        row[d] = _mm256_cvtps_epi32(_mm256_mul_ps(vf_load(x + 8 * d), _mm256_broadcast_ss(inverse + d)));
    VF_REDUCE_LANES(_mm256_add_epi32, row, sum);
    _mm256_storeu_si256((__m256i *)(void *)out->offset, _mm256_mullo_epi32(sum, _mm256_set1_epi32(12)));
    /* Adding 128 to each digit and taking it away again turns plain bytes into digits of -128 .. 127. */
    for (int d = 0; d < 8; d++)
        row[d] = _mm256_xor_si256(_mm256_add_epi32(row[d], middle), middle);
    vf_fixed_digits(row, out, 0);
    vf_fixed_digits(row + 4, out, 4);
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
