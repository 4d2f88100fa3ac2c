/* SPDX-License-Identifier: Apache-2.0 */
/* Words of fixed_body.h for 512-bit vectors, but for the multiply and the look-up (fixed_avx512_*.h). After
 * vec_avx512.h. */
#ifndef FT_FIXED_AVX512_H
#define FT_FIXED_AVX512_H

typedef __m512i vi;

/* 2 * e2m1 + 12 of a chunk, as unsigned bytes. */
struct vfixed_weights {
    vi w[4];
};

static inline vi vi_load(const void *p)
{
    return _mm512_loadu_si512(p);
}
static inline void vi_store(void *p, vi v)
{
    _mm512_storeu_si512(p, v);
}
static inline vi vi_zero(void)
{
    return _mm512_setzero_si512();
}
static inline vi vi_set1_u8(int value)
{
    return _mm512_set1_epi8((char)value);
}
static inline vi vi_add(vi a, vi b)
{
    return _mm512_add_epi32(a, b);
}
static inline vi vi_sub(vi a, vi b)
{
    return _mm512_sub_epi32(a, b);
}
static inline vi vi_shift(vi a, int bits)
{
    return _mm512_slli_epi32(a, (unsigned)bits);
}
static inline vf vi_to_vf(vi a)
{
    return _mm512_cvtepi32_ps(a);
}
/* n bits of a mask, n <= 64 */
static inline uint64_t vi_first(uint32_t n)
{
    return n >= 64 ? UINT64_MAX : (UINT64_C(1) << n) - 1;
}

/* The first `bytes` packed bytes of a chunk, zeros after them. */
static inline __attribute__((always_inline)) void vfixed_load(const uint8_t *p, uint32_t bytes, vi raw[2])
{
    if (bytes == 128) {
        raw[0] = vi_load(p);
        raw[1] = vi_load(p + 64);
        return;
    }
    raw[0] = _mm512_maskz_loadu_epi8(vi_first(bytes), p);
    raw[1] = bytes > 64 ? _mm512_maskz_loadu_epi8(vi_first(bytes - 64), p + 64) : vi_zero();
}
/* First and second dword of every lane's block. */
static inline __attribute__((always_inline)) void vfixed_halves(const vi raw[2], vi half[2])
{
    __m512 a = _mm512_castsi512_ps(raw[0]), b = _mm512_castsi512_ps(raw[1]);
    half[0] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
    half[1] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
}

/* Scales / 2^8 of the 16 blocks of 16 in a chunk, for codes below 0x7f; others are found by vcodes_have_odd.
 */
static inline __attribute__((always_inline)) vf vfixed_scales_nvfp4(const uint8_t *scale, uint32_t count,
                                                                    vcodes *seen)
{
    const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    __m128i bytes = count == 16 ? _mm_loadu_si128((const __m128i *)(const void *)scale)
                                : _mm_maskz_loadu_epi8((__mmask16)vi_first(count), scale);
    *seen = _mm256_max_epu8(*seen, _mm256_zextsi128_si256(bytes));
    __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_shuffle_epi8(bytes, order)), 7);
    return _mm512_cvtph_ps(half);
}
/* Scales of the 8 blocks of 32 in a chunk, for codes 1 .. 254. */
static inline __attribute__((always_inline)) vf vfixed_scales_mxfp4(const uint8_t *scale, uint32_t count,
                                                                    vcodes *seen)
{
    const __m128i order = _mm_setr_epi8(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7);
    __m128i bytes = count == 8 ? _mm_loadl_epi64((const __m128i *)(const void *)scale)
                               : _mm_mask_loadu_epi8(_mm_set1_epi8(127), (__mmask16)vi_first(count), scale);
    bytes = _mm_shuffle_epi8(bytes, order);
    *seen = _mm256_max_epu8(*seen, _mm256_zextsi128_si256(_mm_sub_epi8(bytes, _mm_set1_epi8(1))));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
}
/* Was a code seen that the two above do not decode? */
static inline int vcodes_have_odd(vcodes seen, uint8_t largest)
{
    __m128i s = _mm_max_epu8(_mm256_castsi256_si128(seen), _mm_set1_epi8((char)largest));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(s, _mm_set1_epi8((char)largest))) != 0xffff;
}

/* Largest |x| of 16; NaN is above all. */
static inline float vfixed_largest(const float *x)
{
    __m512i bits = _mm512_and_si512(vi_load(x), _mm512_set1_epi32(0x7fffffff));
    __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(m));
}
/* Digit d of 16 numbers goes to `to + d * stride`. */
static inline void vfixed_store_digits(const float *x, float inverse, int digits, int8_t *to, size_t stride)
{
    /* Adding 128 to each digit and taking it away again turns plain bytes into digits of -128 .. 127. */
    const __m512i middle = _mm512_set1_epi32(digits == 3 ? 0x00808080 : digits == 2 ? 0x8080 : 0x80);
    __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(vf_load(x), vf_set1(inverse)));
    number = _mm512_xor_si512(_mm512_add_epi32(number, middle), middle);
    _mm_storeu_si128((__m128i *)(void *)to, _mm512_cvtepi32_epi8(number));
    if (digits > 1)
        _mm_storeu_si128((__m128i *)(void *)(to + stride),
                         _mm512_cvtepi32_epi8(_mm512_srli_epi32(number, 8)));
    if (digits > 2)
        _mm_storeu_si128((__m128i *)(void *)(to + 2 * stride),
                         _mm512_cvtepi32_epi8(_mm512_srli_epi32(number, 16)));
}
/* 4 vectors of blocks of 16 bytes -> 4 vectors of their dwords, even and odd columns apart. */
static inline void vfixed_transpose(const int8_t *from, int8_t (*to)[64])
{
    const __m512i apart =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    vi z[4];
    for (int i = 0; i < 4; i++)
        z[i] = _mm512_shuffle_epi8(vi_load(from + 64 * i), apart);
    vi a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
    vi c = _mm512_unpackhi_epi32(z[0], z[1]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    vi_store(to[0], _mm512_unpacklo_epi64(a, b));
    vi_store(to[1], _mm512_unpackhi_epi64(a, b));
    vi_store(to[2], _mm512_unpacklo_epi64(c, d));
    vi_store(to[3], _mm512_unpackhi_epi64(c, d));
}

#endif
