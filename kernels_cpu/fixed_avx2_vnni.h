/* SPDX-License-Identifier: Apache-2.0 */
/* The byte multiply of fixed_body.h with AVX-VNNI: four products to a 32-bit sum. */
#ifndef FT_FIXED_AVX2_VNNI_H
#define FT_FIXED_AVX2_VNNI_H

#define VFIX_ROWS 1 /* of activations that go through vfixed_dot together */

/* A sum of 16 products of a lane: begins, takes four products, ends. */
static inline vi vfixed_begin(vi offset)
{
    return offset;
}
static inline vi vfixed_add(vi sum, vi w, vi x)
{
    return _mm256_dpbusd_avx_epi32(sum, w, x);
}
static inline vi vfixed_end(vi sum, vi offset)
{
    (void)offset;
    return sum;
}

#endif
