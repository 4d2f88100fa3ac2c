/* SPDX-License-Identifier: Apache-2.0 */
/* Words of fixed_body.h for 256-bit vectors, but for the multiply (fixed_avx2_*.h). After vec_avx2.h. */
#ifndef FT_FIXED_AVX2_H
#define FT_FIXED_AVX2_H

typedef __m256i vi;

/* 2 * e2m1 + 12 of a chunk, as unsigned bytes. */
struct vfixed_weights {
    vi w[4];
};

static inline vi vi_load(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}
static inline void vi_store(void *p, vi v)
{
    _mm256_storeu_si256((__m256i *)p, v);
}
static inline vi vi_zero(void)
{
    return _mm256_setzero_si256();
}
static inline vi vi_set1_u8(int value)
{
    return _mm256_set1_epi8((char)value);
}
static inline vi vi_add(vi a, vi b)
{
    return _mm256_add_epi32(a, b);
}
static inline vi vi_sub(vi a, vi b)
{
    return _mm256_sub_epi32(a, b);
}
static inline vi vi_shift(vi a, int bits)
{
    return _mm256_slli_epi32(a, bits);
}
static inline vf vi_to_vf(vi a)
{
    return _mm256_cvtepi32_ps(a);
}

/* Lane of a block of 16 columns. */
static inline uint32_t vfixed_lane(uint32_t block)
{
    uint32_t in_half = block % (4);
    return in_half / 2 * 4 + in_half % 2 + (block >= 4 ? 2 : 0);
}

/* The first `bytes` packed bytes of a chunk, zeros after them. */
static inline __attribute__((always_inline)) void vfixed_load(const uint8_t *p, uint32_t bytes, vi raw[2])
{
    uint8_t copy[64];
    if (bytes < 64) {
        memset(copy, 0, sizeof copy);
        p = memcpy(copy, p, bytes);
    }
    raw[0] = vi_load(p);
    raw[1] = vi_load(p + 32);
}
/* First and second dword of every lane's block, then their nibbles. */
static inline __attribute__((always_inline)) void vfixed_lookup(const vi raw[2], vi w[4])
{
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    __m256 a = _mm256_castsi256_ps(raw[0]), b = _mm256_castsi256_ps(raw[1]);
    vi half[2] = {_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                  _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd))};
    for (int h = 0; h < 2; h++) {
        w[2 * h] = _mm256_shuffle_epi8(table, _mm256_and_si256(half[h], nibble));
        w[2 * h + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(half[h], 4), nibble));
    }
}

/* Codes of a chunk's scales, those after `count` are harmless. */
static inline __m128i vfixed_codes_nvfp4(const uint8_t *scale, uint32_t count)
{
    int64_t eight = 0;
    memcpy(&eight, scale, count == 8 ? 8 : count);
    return _mm_cvtsi64_si128(eight);
}
static inline __m128i vfixed_codes_mxfp4(const uint8_t *scale, uint32_t count)
{
    int32_t four = 0x7f7f7f7f;
    memcpy(&four, scale, count == 4 ? 4 : count);
    return _mm_cvtsi32_si128(four);
}
/* Scales / 2^8 of the 8 blocks of 16 in a chunk, for codes below 0x7f; others are found by vfixed_odd. */
static inline vf vfixed_scales_nvfp4(__m128i codes)
{
    const __m128i order = _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 2, -1, 3, -1, 6, -1, 7);
    return _mm256_cvtph_ps(_mm_srli_epi16(_mm_shuffle_epi8(codes, order), 1));
}
/* Scales of the 4 blocks of 32 in a chunk, for codes 1 .. 254. */
static inline vf vfixed_scales_mxfp4(__m128i codes)
{
    const __m256i order = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 2, -1, -1, -1, 2, -1, -1,
                                           -1, 1, -1, -1, -1, 1, -1, -1, -1, 3, -1, -1, -1, 3);
    __m256i bytes = _mm256_broadcastsi128_si256(codes);
    return _mm256_castsi256_ps(_mm256_srli_epi32(_mm256_shuffle_epi8(bytes, order), 1));
}

#define VFIX_HALF 0 /* columns of two weight rows never share a chunk */

/* Largest |x| of 16; NaN is above all. */
static inline float vfixed_largest(const float *x)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i both = _mm256_max_epi32(_mm256_and_si256(vi_load(x), magnitude),
                                    _mm256_and_si256(vi_load(x + 8), magnitude));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(m));
}
/* Digit d of 16 numbers goes to `to + d * stride`. */
static inline void vfixed_store_digits(const float *x, float inverse, int digits, int8_t *to, size_t stride)
{
    const __m256i gather =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1));
    /* Adding 128 to each digit and taking it away again turns plain bytes into digits of -128 .. 127. */
    const __m256i middle = _mm256_set1_epi32(digits == 3 ? 0x00808080 : digits == 2 ? 0x8080 : 0x80);
    __m128i part[4];
    for (int i = 0; i < 2; i++) {
        __m256i number = _mm256_cvtps_epi32(_mm256_mul_ps(vf_load(x + 8 * i), vf_set1(inverse)));
        number = _mm256_shuffle_epi8(_mm256_xor_si256(_mm256_add_epi32(number, middle), middle), gather);
        part[2 * i] = _mm256_castsi256_si128(number);
        part[2 * i + 1] = _mm256_extracti128_si256(number, 1);
    }
    __m128i low = _mm_unpacklo_epi32(part[0], part[1]), low2 = _mm_unpacklo_epi32(part[2], part[3]);
    _mm_storeu_si128((__m128i *)(void *)to, _mm_unpacklo_epi64(low, low2));
    if (digits > 1)
        _mm_storeu_si128((__m128i *)(void *)(to + stride), _mm_unpackhi_epi64(low, low2));
    if (digits > 2) {
        __m128i high = _mm_unpackhi_epi32(part[0], part[1]), high2 = _mm_unpackhi_epi32(part[2], part[3]);
        _mm_storeu_si128((__m128i *)(void *)(to + 2 * stride), _mm_unpacklo_epi64(high, high2));
    }
}
/* 4 vectors of blocks of 16 bytes -> 4 vectors of their dwords, even and odd columns apart. */
static inline void vfixed_transpose(const int8_t *from, int8_t (*to)[32])
{
    const __m256i apart =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    vi z[4];
    for (int i = 0; i < 4; i++)
        z[i] = _mm256_shuffle_epi8(vi_load(from + 32 * i), apart);
    vi a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpacklo_epi32(z[2], z[3]);
    vi c = _mm256_unpackhi_epi32(z[0], z[1]), d = _mm256_unpackhi_epi32(z[2], z[3]);
    vi_store(to[0], _mm256_unpacklo_epi64(a, b));
    vi_store(to[1], _mm256_unpackhi_epi64(a, b));
    vi_store(to[2], _mm256_unpacklo_epi64(c, d));
    vi_store(to[3], _mm256_unpackhi_epi64(c, d));
}

/* Unit and its inverse for 16 columns whose largest |x| is given (NaN when one of them is): fixed_body.h. */
static inline void vfixed_unit(float largest, float *unit, float *inverse)
{
    if (DIGITS == 3) {
        float raised = largest * 1.0041f;
        uint32_t exponent, broken, unit_bits, inverse_bits;
        memcpy(&exponent, &raised, sizeof exponent);
        exponent >>= 23;
        broken = exponent == 255 ? 0x7fc00000u : 0;
        exponent = exponent > 24 ? exponent : 24;
        unit_bits = (exponent - 23) << 23 | broken;
        inverse_bits = (276 - exponent) << 23;
        memcpy(unit, &unit_bits, sizeof unit_bits);
        memcpy(inverse, &inverse_bits, sizeof inverse_bits);
        return;
    }
    const float limit = DIGITS == 1 ? 127.0f : 127.0f * 257.0f;
    float size = largest < 1e-30f ? 1e-30f : largest;
    *unit = size < 3e38f ? size * (0.5f / limit) : __builtin_nanf("");
    *inverse = size < 3e38f ? limit / size : 0.0f;
}

/* Units of a chunk, by lane; returns their inverses. */
static inline vf vfixed_units(const float *x, float *unit)
{
    float largest[8], inverse[8];
    for (uint32_t b = 0; b < 8; b++)
        largest[vfixed_lane(b)] = vfixed_largest(x + 16 * b);
    for (uint32_t lane = 0; lane < 8; lane++)
        vfixed_unit(largest[lane], &unit[lane], &inverse[lane]);
    return vf_load(inverse);
}
static inline void vfixed_digits(const float *x, vf inverses, int8_t (*digit)[4][32])
{
    /* Vector j, part k: what goes to lane 4k + j. */
    _Alignas(64) int8_t bytes[DIGITS][8][16];
    float inverse[8];
    vf_store(inverse, inverses);
    for (uint32_t b = 0; b < 8; b++) {
        uint32_t lane = vfixed_lane(b);
        vfixed_store_digits(x + 16 * b, inverse[lane], DIGITS, bytes[0][lane % 4 * 2 + lane / 4],
                            sizeof bytes[0]);
    }
    for (uint32_t d = 0; d < DIGITS; d++)
        vfixed_transpose(bytes[d][0], digit[d]);
}

#endif
