/* SPDX-License-Identifier: Apache-2.0 */
/* Look-up and multiply for fixed_body.h, and e4m3, on cores with AVX-512 VNNI and VBMI. After fixed_avx512.h. */
#ifndef FT_FIXED_AVX512_VNNI_H
#define FT_FIXED_AVX512_VNNI_H

static inline __attribute__((always_inline)) void vfixed_lookup(const vi raw[2], vi w[4])
{
    /* The byte permute reads 6 bits; four copies of the table make it read 4. */
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    vi half[2];
    vfixed_halves(raw, half);
    for (int h = 0; h < 2; h++) {
        w[2 * h] = _mm512_permutexvar_epi8(half[h], table);
        w[2 * h + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(half[h], 4), table);
    }
}
/* Rows of activations that go through vfixed_dot together: chains of multiplies side by side, because one is
 * too long to hide, as far as there are registers. */
#define VFIX_ROWS (DIGITS == 1 ? 4 : 2)

/* A sum of 16 products of a lane: begins, takes four products, ends. */
static inline vi vfixed_begin(vi offset)
{
    return offset;
}
static inline vi vfixed_add(vi sum, vi w, vi x)
{
    return _mm512_dpbusd_epi32(sum, w, x);
}
static inline vi vfixed_end(vi sum, vi offset)
{
    (void)offset;
    return sum;
}

/* Codes of e4m3 in the order of the lanes -> f16 of 2^-8 times their value. */
static inline __m256i vfixed_scale_halves(__m128i bytes)
{
    const __m256i order = _mm256_setr_epi8(0, 0, 0, 1, 0, 8, 0, 9, 0, 2, 0, 3, 0, 10, 0, 11, 0, 4, 0, 5, 0,
                                           12, 0, 13, 0, 6, 0, 7, 0, 14, 0, 15);
    __m256i high = _mm256_maskz_permutexvar_epi8(0xaaaaaaaau, order, _mm256_castsi128_si256(bytes));
    return _mm256_srli_epi16(high, 1);
}
/* Byte d of the 16 numbers to part d, even and odd columns of each eight apart. */
static inline __m512i vfixed_by_digit(__m512i number)
{
    const __m512i first =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 16, 24, 4, 12, 20, 28, 32, 40, 48, 56, 36, 44, 52, 60));
    const __m512i digit =
        _mm512_inserti32x4(_mm512_inserti32x4(_mm512_inserti32x4(_mm512_setzero_si512(), _mm_set1_epi8(1), 1),
                                              _mm_set1_epi8(2), 2),
                           _mm_set1_epi8(3), 3);
    return _mm512_permutexvar_epi8(_mm512_add_epi8(first, digit), number);
}

/* Low and high byte of the bf16 of each magnitude code; 0x7f is NaN. */
struct vf_e4m3_table {
    uint8_t low[128], high[128];
};
#define E4M3_BITS(c)                                                                                         \
    ((c) == 127 ? 0x7fc0u                                                                                    \
     : (c) >= 8 ? ((c) + 960u) << 4                                                                          \
     : (c) >= 4 ? 0x3c00u + (((c)-4u) << 5) /* subnormals: c * 2^-9 */                                       \
     : (c) >= 2 ? 0x3b80u + (((c)-2u) << 6)                                                                  \
     : (c) == 1 ? 0x3b00u                                                                                    \
                : 0u)
#define E4M3_8(f, c) f(c), f((c) + 1), f((c) + 2), f((c) + 3), f((c) + 4), f((c) + 5), f((c) + 6), f((c) + 7)
#define E4M3_32(f, c) E4M3_8(f, c), E4M3_8(f, (c) + 8), E4M3_8(f, (c) + 16), E4M3_8(f, (c) + 24)
#define E4M3_LOW(c) (uint8_t)(E4M3_BITS(c) & 255u)
#define E4M3_HIGH(c) (uint8_t)(E4M3_BITS(c) >> 8)
static const struct vf_e4m3_table vf_e4m3 = {
    {E4M3_32(E4M3_LOW, 0), E4M3_32(E4M3_LOW, 32), E4M3_32(E4M3_LOW, 64), E4M3_32(E4M3_LOW, 96)},
    {E4M3_32(E4M3_HIGH, 0), E4M3_32(E4M3_HIGH, 32), E4M3_32(E4M3_HIGH, 64), E4M3_32(E4M3_HIGH, 96)}};

/* Low and high bytes of the bf16 of 64 codes. */
static inline __attribute__((always_inline)) void vf_e4m3_to_bf16(__m512i codes, __m512i *low, __m512i *high)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80); /* the look-up does not read it */
    *low = _mm512_permutex2var_epi8(vi_load(vf_e4m3.low), codes, vi_load(vf_e4m3.low + 64));
    *high = _mm512_permutex2var_epi8(vi_load(vf_e4m3.high), codes, vi_load(vf_e4m3.high + 64));
    *high = _mm512_ternarylogic_epi32(*high, codes, sign, 0xf8); /* high | (codes & sign) */
}

/* A chunk of 128 values in the order of vf_pack_e4m3. */
static inline __attribute__((always_inline)) void vf_load_e4m3(const uint8_t *p, vf w[8], vcodes *seen)
{
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000u);
    (void)seen; /* NaN is in the table */
    for (int j = 0; j < 8; j += 4) {
        __m512i codes = vi_load(p + 16 * j), low, high;
        vf_e4m3_to_bf16(codes, &low, &high);
        __m512i a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
        w[j] = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
        w[j + 1] = _mm512_castsi512_ps(_mm512_and_si512(a, odd));
        w[j + 2] = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
        w[j + 3] = _mm512_castsi512_ps(_mm512_and_si512(b, odd));
    }
}
#define VF_E4M3_FACTOR 1.0f
/* Of each 16 columns: even ones of the first 8, odd ones, even ones of the last 8, odd ones. */
static inline void vf_pack_e4m3(const float *x, float *out)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 16, 18, 20, 22, 8, 10, 12, 14, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 17, 19, 21, 23, 9, 11, 13, 15, 25, 27, 29, 31);
    for (int j = 0; j < 128; j += 64) {
        vf a = vf_load(x + j), b = vf_load(x + j + 16), c = vf_load(x + j + 32), d = vf_load(x + j + 48);
        vf e0 = _mm512_permutex2var_ps(a, even, b), e1 = _mm512_permutex2var_ps(c, even, d);
        vf o0 = _mm512_permutex2var_ps(a, odd, b), o1 = _mm512_permutex2var_ps(c, odd, d);
        vf_store(out + j, _mm512_shuffle_f32x4(e0, e1, 0x44));
        vf_store(out + j + 16, _mm512_shuffle_f32x4(o0, o1, 0x44));
        vf_store(out + j + 32, _mm512_shuffle_f32x4(e0, e1, 0xee));
        vf_store(out + j + 48, _mm512_shuffle_f32x4(o0, o1, 0xee));
    }
}

#endif
