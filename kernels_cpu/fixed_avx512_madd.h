/* SPDX-License-Identifier: Apache-2.0 */
/* Look-up and multiply for fixed_body.h, and e4m3, on every core with AVX-512 BW. After fixed_avx512.h. */
#ifndef FT_FIXED_AVX512_MADD_H
#define FT_FIXED_AVX512_MADD_H

static inline __attribute__((always_inline)) void vfixed_lookup(const vi raw[2], vi w[4])
{
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    vi half[2];
    vfixed_halves(raw, half);
    for (int h = 0; h < 2; h++) {
        w[2 * h] = _mm512_shuffle_epi8(table, _mm512_and_si512(half[h], nibble));
        w[2 * h + 1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(half[h], 4), nibble));
    }
}
#define VFIX_ROWS 1 /* of activations that go through vfixed_dot together */

/* A sum of 16 products of a lane: begins, takes four products, ends. Pairs stay in 16 bits: at most
 * 4 * 2 * 24 * 128. */
static inline vi vfixed_begin(vi offset)
{
    (void)offset;
    return vi_zero();
}
static inline vi vfixed_add(vi pairs, vi w, vi x)
{
    return _mm512_add_epi16(pairs, _mm512_maddubs_epi16(w, x));
}
static inline vi vfixed_end(vi pairs, vi offset)
{
    return _mm512_add_epi32(offset, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}

/* Codes of e4m3 in the order of the lanes -> f16 of 2^-8 times their value. */
static inline __m256i vfixed_scale_halves(__m128i bytes)
{
    const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_shuffle_epi8(bytes, order)), 7);
}
/* Byte d of the 16 numbers to part d, even and odd columns of each eight apart. */
static inline __m512i vfixed_by_digit(__m512i number)
{
    const __m512i bytes =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i apart =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    const __m512i parts = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(parts, _mm512_shuffle_epi8(number, bytes)), apart);
}

/* A chunk of 128 values / 2^8, in the order of vf_pack_e4m3; NaN codes come out as +-480 / 2^8 and are found
 * by vcodes. */
static inline __attribute__((always_inline)) void vf_load_e4m3(const uint8_t *p, vf w[8], vcodes *seen)
{
    const __m512i keep = _mm512_set1_epi16((short)0xbfff), zero = _mm512_setzero_si512();
    for (int j = 0; j < 8; j += 4) {
        /* Codes in the high bytes of words -> f16 of 2^-8 times the value. */
        __m512i bytes = vi_load(p + 16 * j);
        __m512i low = _mm512_and_si512(_mm512_srai_epi16(_mm512_unpacklo_epi8(zero, bytes), 1), keep);
        __m512i high = _mm512_and_si512(_mm512_srai_epi16(_mm512_unpackhi_epi8(zero, bytes), 1), keep);
        __m512i magnitude = _mm512_and_si512(bytes, _mm512_set1_epi8(127));
        *seen = _mm256_max_epu8(*seen, _mm256_max_epu8(_mm512_castsi512_si256(magnitude),
                                                       _mm512_extracti64x4_epi64(magnitude, 1)));
        w[j] = _mm512_cvtph_ps(_mm512_castsi512_si256(low));
        w[j + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(low, 1));
        w[j + 2] = _mm512_cvtph_ps(_mm512_castsi512_si256(high));
        w[j + 3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(high, 1));
    }
}
#define VF_E4M3_FACTOR 256.0f
static inline void vf_pack_e4m3(const float *x, float *out)
{
    static const uint8_t order[8] = {0, 2, 4, 6, 1, 3, 5, 7}; /* of eights in 64 columns */
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < 8; i++)
            memcpy(out + 64 * j + 8 * i, x + 64 * j + 8 * order[i], 8 * sizeof *x);
}

#endif
