/* SPDX-License-Identifier: Apache-2.0 */
/* The byte multiply of fixed_body.h on every AVX2 core: pairs in 16 bits, then in 32. */
#ifndef FT_FIXED_AVX2_MADD_H
#define FT_FIXED_AVX2_MADD_H

static inline __attribute__((always_inline)) void
vfixed_digit(int outs, const struct vfixed_weights *const *w, const int8_t (*x)[32], vi *sum)
{
    vi pairs[2] = {vi_zero(), vi_zero()}; /* at most 4 * 2 * 24 * 128 in 16 bits */
    for (int g = 0; g < 4; g++) {
        vi v = vi_load(x[g]);
        if (outs > 1)
            VF_KEEP(v);
        for (int j = 0; j < outs; j++)
            pairs[j] = _mm256_add_epi16(pairs[j], _mm256_maddubs_epi16(w[j]->w[g], v));
    }
    for (int j = 0; j < outs; j++)
        sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(pairs[j], _mm256_set1_epi16(1)));
}

#endif
