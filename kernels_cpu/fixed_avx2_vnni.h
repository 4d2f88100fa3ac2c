/* SPDX-License-Identifier: Apache-2.0 */
/* The byte multiply of fixed_body.h with AVX-VNNI: four products to a 32-bit sum. */
#ifndef FT_FIXED_AVX2_VNNI_H
#define FT_FIXED_AVX2_VNNI_H

static inline __attribute__((always_inline)) void
vfixed_digit(int outs, const struct vfixed_weights *const *w, const int8_t (*x)[32], vi *sum)
{
    for (int g = 0; g < 4; g++) {
        vi v = vi_load(x[g]);
        if (outs > 1)
            VF_KEEP(v);
        for (int j = 0; j < outs; j++)
            sum[j] = _mm256_dpbusd_avx_epi32(sum[j], w[j]->w[g], v);
    }
}

#endif
