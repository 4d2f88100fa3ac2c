/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed e2m1 times activations in integers, over the words of vec_*.h and fixed_*.h.
 *
 * Weights are small whole numbers (2 * e2m1, at most 12). Activations become fixed point once per call, with
 * a unit of its own for every 16 columns, cut into DIGITS signed digits of 8 bits for the byte multiplies:
 *
 *     DIGITS 3   23 bits below the largest of the 16: as good as f32
 *     DIGITS 2   15 bits: errors of 1e-5, for who asks
 *     DIGITS 1   7 bits: int8 activations, only for who asks
 *
 * Units of 3 digits are powers of two, so that scaling is exact: 127 * (65536 + 256 + 1) is a little less
 * than 2^23, so sizes just below a power of two take the next one; and they stay normal. A unit is NaN when
 * one of the 16 is not finite.
 *
 * Byte multiplies want one side unsigned: weights come as 2 * e2m1 + 12, and 12 times the sum of the digits
 * is taken off in `offset`. All sums wrap at 32 bits and the result fits, so they are exact in any order.
 *
 * A chunk is VF blocks of 16 columns, one to a lane, in the order that costs no crossing of 128-bit parts:
 * part k of a vector holds blocks 2k, 2k + 1, VF / 2 + 2k, VF / 2 + 2k + 1. A lane's 16 columns take 4
 * dwords: even columns of the first 8, odd ones, even columns of the last 8, odd ones. A lane never leaves
 * its scale.
 */
#ifndef FT_FIXED_BODY_H
#define FT_FIXED_BODY_H

#define VFIX_CHUNK (16 * VF)
#define VFIX_GROUPS 4
/* Loops over registers: a counter that is not a constant would put them on the stack. */
#if defined(__clang__)
#define VFIX_UNROLL _Pragma("unroll")
#else
#define VFIX_UNROLL _Pragma("GCC unroll 8")
#endif

/* The activations of a chunk. */
struct vfixed {
    _Alignas(4 * VF) int8_t digit[DIGITS][VFIX_GROUPS][4 * VF]; /* low digit first */
    int32_t offset[VF];                                         /* minus 12 times the lane's sum */
    float unit[VF];                                             /* half the value of 1 */
};

/* Codes c with c - less > largest (modulo 256) among `count`: those of scales that the vectors do not decode. One
 * look at whole rows: maxima kept beside the multiplies of many rows would live on the stack. */
static inline bool vfixed_odd(const uint8_t *codes, uint32_t count, uint8_t less, uint8_t largest)
{
    const __m256i shift = _mm256_set1_epi8((char)less), most = _mm256_set1_epi8((char)largest);
    __m256i seen = most;
    uint32_t i = 0;
    for (; i + 128 <= count; i += 128)
        for (uint32_t j = i; j < i + 128; j += 32)
            seen = _mm256_max_epu8(
                seen, _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(const void *)(codes + j)), shift));
    for (; i + 32 <= count; i += 32)
        seen = _mm256_max_epu8(
            seen, _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(const void *)(codes + i)), shift));
    bool odd = false;
    for (; i + 8 <= count; i += 8) {
        __m128i part = _mm_loadl_epi64((const __m128i *)(const void *)(codes + i));
        part = _mm_sub_epi8(_mm_unpacklo_epi64(part, part), _mm256_castsi256_si128(shift));
        seen = _mm256_max_epu8(seen, _mm256_broadcastsi128_si256(part));
    }
    for (; i < count; i++)
        odd |= (uint8_t)(codes[i] - less) > largest;
    return odd || _mm256_movemask_epi8(_mm256_cmpeq_epi8(seen, most)) != -1;
}

/* The first `columns` columns of a chunk; the weights after them are zero. */
static inline __attribute__((always_inline)) void vfixed_decode(const uint8_t *p, uint32_t columns,
                                                                struct vfixed_weights *out)
{
    vi raw[2];
    vfixed_load(p, columns / 2, raw);
    vfixed_lookup(raw, out->w);
}

/* t[r][j] = sums of w[j] x over the 16 columns of each lane, exact up to the fixed point and one rounding,
 * for 1 or 2 weight rows, which share the loads, and `rows` <= VFIX_ROWS rows of activations, `stride` bytes
 * apart. */
static inline __attribute__((always_inline)) void vfixed_dot(int outs, int rows,
                                                             const struct vfixed_weights *const *w,
                                                             const uint8_t *first, size_t stride, vf (*t)[2])
{
    vi sum[VFIX_ROWS][DIGITS][2];
    VFIX_UNROLL for (int r = 0; r < rows; r++)
    {
        const struct vfixed *x = (const struct vfixed *)(const void *)(first + (size_t)r * stride);
        VFIX_UNROLL for (int d = 0; d < DIGITS; d++) sum[r][d][0] = sum[r][d][1] =
            vfixed_begin(d ? vi_zero() : vi_load(x->offset));
    }
    VFIX_UNROLL for (int g = 0; g < VFIX_GROUPS; g++) VFIX_UNROLL for (int r = 0; r < rows; r++)
        VFIX_UNROLL for (int d = 0; d < DIGITS; d++)
    {
        const struct vfixed *x = (const struct vfixed *)(const void *)(first + (size_t)r * stride);
        vi v = vi_load(x->digit[d][g]);
        if (outs > 1)
            VF_KEEP(v);
        VFIX_UNROLL for (int j = 0; j < outs; j++) sum[r][d][j] = vfixed_add(sum[r][d][j], w[j]->w[g], v);
    }
    VFIX_UNROLL for (int r = 0; r < rows; r++) VFIX_UNROLL for (int j = 0; j < outs; j++)
    {
        const struct vfixed *x = (const struct vfixed *)(const void *)(first + (size_t)r * stride);
        vi total = vfixed_end(sum[r][0][j], vi_load(x->offset));
        VFIX_UNROLL for (int d = 1; d < DIGITS; d++) total =
            vi_add(total, vi_shift(vfixed_end(sum[r][d][j], vi_zero()), 8 * d));
        t[r][j] = vf_mul(vi_to_vf(total), vf_load(x->unit));
    }
}

#define VFIX_AT_ONCE                                                                                         \
    4 /* chunks that go through the steps together: each step alone would wait for the last */

/* `count` <= VFIX_AT_ONCE chunks of activations into the form of vfixed_dot. */
static void vfixed_pack(const float *const *x, uint32_t count, struct vfixed *const *to)
{
    vf inverse[VFIX_AT_ONCE];
    for (uint32_t c = 0; c < count; c++)
        inverse[c] = vfixed_units(x[c], to[c]->unit);
    for (uint32_t c = 0; c < count; c++)
        vfixed_digits(x[c], inverse[c], to[c]->digit);
    for (uint32_t c = 0; c < count; c++) {
        vi sum = vi_zero();
        for (int d = DIGITS - 1; d >= 0; d--) {
            vi digit = vfixed_begin(vi_zero());
            for (int g = 0; g < VFIX_GROUPS; g++)
                digit = vfixed_add(digit, vi_set1_u8(12), vi_load(to[c]->digit[d][g]));
            sum = vi_add(vi_shift(sum, 8), vfixed_end(digit, vi_zero()));
        }
        vi_store(to[c]->offset, vi_sub(vi_zero(), sum));
    }
}

#endif
