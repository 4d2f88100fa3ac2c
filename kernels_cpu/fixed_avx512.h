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

/* Of fixed_avx512_vnni.h or fixed_avx512_madd.h. */
static inline __m256i vfixed_scale_halves(__m128i bytes);
static inline vi vfixed_by_digit(vi number);
static inline void vfixed_lookup(const vi raw[2], vi w[4]);

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

/* Codes of a chunk's scales, those after `count` are harmless. */
static inline __attribute__((always_inline)) __m128i vfixed_codes_nvfp4(const uint8_t *scale, uint32_t count)
{
    return count == 16 ? _mm_loadu_si128((const __m128i *)(const void *)scale)
                       : _mm_maskz_loadu_epi8((__mmask16)vi_first(count), scale);
}
static inline __attribute__((always_inline)) __m128i vfixed_codes_mxfp4(const uint8_t *scale, uint32_t count)
{
    int64_t eight;
    if (count < 8)
        return _mm_mask_loadu_epi8(_mm_set1_epi8(127), (__mmask16)vi_first(count), scale);
    memcpy(&eight, scale, sizeof eight);
    return _mm_cvtsi64_si128(eight);
}
/* Scales / 2^8 of the 16 blocks of 16 in a chunk, for codes below 0x7f; others are found by vfixed_odd. */
static inline __attribute__((always_inline)) vf vfixed_scales_nvfp4(__m128i codes)
{
    return _mm512_cvtph_ps(vfixed_scale_halves(codes));
}
/* Scales of the 8 blocks of 32 in a chunk, for codes 1 .. 254. */
static inline __attribute__((always_inline)) vf vfixed_scales_mxfp4(__m128i codes)
{
    const __m128i order = _mm_setr_epi8(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7);
    __m512i wide = _mm512_cvtepu8_epi32(_mm_shuffle_epi8(codes, order));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 23));
}

/*
 * Half chunks: the last 128 columns (or fewer) of two weight rows go through the multiplies as one chunk, the
 * second row in the place of the last 128 columns. That is lanes 2 and 3 of every four; lanes 0 and 1 are
 * where a chunk of one row has its first 128 columns, so a row's sums are the same whether it has company or
 * not.
 */
#define VFIX_HALF (8 * VF) /* of VFIX_CHUNK, 16 VF */
static inline __attribute__((always_inline)) void vfixed_decode_halves(const uint8_t *first,
                                                                       const uint8_t *second,
                                                                       uint32_t columns,
                                                                       struct vfixed_weights *out)
{
    vi raw[2] = {vi_zero(), vi_zero()};
    if (columns == VFIX_HALF) {
        raw[0] = vi_load(first);
        if (second)
            raw[1] = vi_load(second);
    } else {
        raw[0] = _mm512_maskz_loadu_epi8(vi_first(columns / 2), first);
        if (second)
            raw[1] = _mm512_maskz_loadu_epi8(vi_first(columns / 2), second);
    }
    vfixed_lookup(raw, out->w);
}
/* Of codes of two rows (`count` each) those of one chunk. */
static inline __attribute__((always_inline)) __m128i vfixed_codes_halves(__m128i first, __m128i second,
                                                                         int nvfp4)
{
    return nvfp4 ? _mm_unpacklo_epi64(first, second) : _mm_unpacklo_epi32(first, second);
}
/* sum + t * scale in the lanes of the first row. */
static inline __attribute__((always_inline)) vf vfixed_add_half(vf t, vf scale, vf sum)
{
    return _mm512_mask3_fmadd_ps(t, scale, sum, 0x3333);
}
/* The second row's lanes to where those of the first are. */
static inline __attribute__((always_inline)) vf vfixed_second(vf t)
{
    return _mm512_permute_ps(t, 0x4e);
}

/* Lane of a block of 16 columns. */
static inline uint32_t vfixed_lane(uint32_t block)
{
    uint32_t in_half = block % 8;
    return in_half / 2 * 4 + in_half % 2 + (block >= 8 ? 2 : 0);
}
/* Columns of a lane's block begin here. */
static inline uint32_t vfixed_block(uint32_t lane)
{
    return 16 * (lane / 4 * 2 + lane % 2 + (lane % 4 >= 2 ? 8 : 0));
}
static inline __m512i vfixed_magnitude(const float *x)
{
    return _mm512_and_si512(vi_load(x), _mm512_set1_epi32(0x7fffffff));
}
/* Largest |x| of each lane's 16 columns, by halves, quarters and so on of all of them together, as vf_sums
 * adds; NaN is above all. */
static inline vf vfixed_largest(const float *x)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7, 8, 12, 10, 14, 9, 13, 11, 15);
    vi half[8], quarter[4], pair[2];
    for (uint32_t i = 0; i < 8; i++) {
        vi a = vfixed_magnitude(x + vfixed_block(2 * i)), b = vfixed_magnitude(x + vfixed_block(2 * i + 1));
        half[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
    }
    for (uint32_t i = 0; i < 4; i++) {
        vi a = half[i], b = half[i + 4];
        quarter[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    }
    for (uint32_t i = 0; i < 2; i++) {
        vi a = quarter[i], b = quarter[i + 2];
        pair[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    vf a = _mm512_castsi512_ps(pair[0]), b = _mm512_castsi512_ps(pair[1]);
    vi even = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
    vi odd = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
    return _mm512_castsi512_ps(_mm512_permutexvar_epi32(order, _mm512_max_epi32(even, odd)));
}
/* Units of a chunk, by lane; returns their inverses. */
static inline vf vfixed_units(const float *x, float *unit)
{
    const vf nan = vf_set1(__builtin_nanf(""));
    vf largest = vfixed_largest(x);
    if (DIGITS == 3) {
        vi exponent = _mm512_srli_epi32(_mm512_castps_si512(vf_mul(largest, vf_set1(1.0041f))), 23);
        __mmask16 broken = _mm512_cmpeq_epi32_mask(exponent, _mm512_set1_epi32(255));
        exponent = _mm512_max_epi32(exponent, _mm512_set1_epi32(24));
        vi bits = _mm512_slli_epi32(vi_sub(exponent, _mm512_set1_epi32(23)), 23);
        vf_store(unit, _mm512_mask_mov_ps(_mm512_castsi512_ps(bits), broken, nan));
        return _mm512_castsi512_ps(_mm512_slli_epi32(vi_sub(_mm512_set1_epi32(276), exponent), 23));
    }
    const float limit = DIGITS == 1 ? 127.0f : 127.0f * 257.0f;
    vf size = vf_max(vf_set1(1e-30f), largest);
    __mmask16 whole = _mm512_cmp_ps_mask(size, vf_set1(3e38f), _CMP_LT_OQ);
    vf_store(unit, _mm512_mask_mul_ps(nan, whole, size, vf_set1(0.5f / limit)));
    return _mm512_maskz_div_ps(whole, vf_set1(limit), size);
}
/* 16 numbers as digits: part d holds the bytes of digit d, even and odd columns of each eight apart. */
static inline vi vfixed_spread(const float *x, vf inverse)
{
    /* Adding 128 to each digit and taking it away again turns plain bytes into digits of -128 .. 127. */
    const vi middle = _mm512_set1_epi32(DIGITS == 3 ? 0x00808080 : DIGITS == 2 ? 0x8080 : 0);
    vi number = _mm512_cvtps_epi32(vf_mul(vf_load(x), inverse));
    return vfixed_by_digit(_mm512_xor_si512(_mm512_add_epi32(number, middle), middle));
}
static inline void vfixed_digits(const float *x, vf inverse, int8_t (*digit)[4][64])
{
    vi four[4][4]; /* [k][g]: part d holds dwords g of digit d of lanes 4k .. 4k + 3 */
    for (uint32_t k = 0; k < 4; k++) {
        vi z[4];
        for (uint32_t i = 0; i < 4; i++)
            z[i] = vfixed_spread(x + vfixed_block(4 * k + i),
                                 _mm512_permutexvar_ps(_mm512_set1_epi32((int)(4 * k + i)), inverse));
        vi a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
        vi c = _mm512_unpackhi_epi32(z[0], z[1]), d = _mm512_unpackhi_epi32(z[2], z[3]);
        four[k][0] = _mm512_unpacklo_epi64(a, b);
        four[k][1] = _mm512_unpackhi_epi64(a, b);
        four[k][2] = _mm512_unpacklo_epi64(c, d);
        four[k][3] = _mm512_unpackhi_epi64(c, d);
    }
    for (uint32_t g = 0; g < 4; g++) {
        vi a = _mm512_shuffle_i32x4(four[0][g], four[1][g], 0x44);
        vi b = _mm512_shuffle_i32x4(four[2][g], four[3][g], 0x44);
        vi_store(digit[0][g], _mm512_shuffle_i32x4(a, b, 0x88));
        if (DIGITS > 1)
            vi_store(digit[DIGITS > 1][g], _mm512_shuffle_i32x4(a, b, 0xdd));
        if (DIGITS > 2) {
            a = _mm512_shuffle_i32x4(four[0][g], four[1][g], 0xee);
            b = _mm512_shuffle_i32x4(four[2][g], four[3][g], 0xee);
            vi_store(digit[DIGITS > 2 ? 2 : 0][g], _mm512_shuffle_i32x4(a, b, 0x88));
        }
    }
}

#endif
