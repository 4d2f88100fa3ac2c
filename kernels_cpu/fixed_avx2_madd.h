/* SPDX-License-Identifier: Apache-2.0 */
/* The byte multiply of fixed_body.h on every AVX2 core: pairs in 16 bits, then in 32. */
#ifndef FT_FIXED_AVX2_MADD_H
#define FT_FIXED_AVX2_MADD_H

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
    return _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w, x));
}
static inline vi vfixed_end(vi pairs, vi offset)
{
    return _mm256_add_epi32(offset, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#endif
