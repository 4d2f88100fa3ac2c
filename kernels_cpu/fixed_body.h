/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed e2m1 times activations in integers, over the words of vec_*.h and fixed_*.h.
 *
 * Weights are small whole numbers (2 * e2m1, at most 12). Activations become fixed point once per call, with
 * a unit of its own for every 16 columns, cut into DIGITS signed digits of 8 bits for the byte multiplies:
 *
 *     DIGITS 3   23 bits below the largest of the 16: as good as f32
 *     DIGITS 1   7 bits: int8 activations, only for who asks
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

/* The activations of a chunk. */
struct vfixed {
    _Alignas(4 * VF) int8_t digit[DIGITS][VFIX_GROUPS][4 * VF]; /* low digit first */
    int32_t offset[VF];                                         /* minus 12 times the lane's sum */
    float unit[VF]; /* half the value of 1; NaN when the lane is not finite */
};

/* The first `columns` columns of a chunk; the weights after them are zero. */
static inline __attribute__((always_inline)) void vfixed_decode(const uint8_t *p, uint32_t columns,
                                                                struct vfixed_weights *out)
{
    vi raw[2];
    vfixed_load(p, columns / 2, raw);
    vfixed_lookup(raw, out->w);
}

/* Lane of a block of 16 columns. */
static inline uint32_t vfixed_lane(uint32_t block)
{
    uint32_t in_half = block % (VF / 2);
    return in_half / 2 * 4 + in_half % 2 + (block >= VF / 2 ? 2 : 0);
}

/* Sums of the lanes before conversion for 1 or 2 weight rows, which share the loads. The digits are summed
 * side by side: one chain of multiplies would be too long to hide. */
static inline __attribute__((always_inline)) void vfixed_sum(int outs, const struct vfixed_weights *const *w,
                                                             const struct vfixed *x, vi offset, vi *sum)
{
    vi digit[DIGITS][2];
    for (int d = 0; d < DIGITS; d++) {
        digit[d][0] = digit[d][1] = d ? vi_zero() : offset;
        vfixed_digit(outs, w, x->digit[d], digit[d]);
    }
    for (int j = 0; j < outs; j++) {
        sum[j] = digit[0][j];
        for (int d = 1; d < DIGITS; d++)
            sum[j] = vi_add(sum[j], vi_shift(digit[d][j], 8 * d));
    }
}

/* t[j] = sums of w[j] x over the 16 columns of each lane, exact up to the fixed point and one rounding. */
static inline __attribute__((always_inline)) void vfixed_dot(int outs, const struct vfixed_weights *const *w,
                                                             const struct vfixed *x, vf *t)
{
    vi sum[2];
    vfixed_sum(outs, w, x, vi_load(x->offset), sum);
    for (int j = 0; j < outs; j++)
        t[j] = vf_mul(vi_to_vf(sum[j]), vf_load(x->unit));
}

/* Unit and its inverse for 16 columns whose largest |x| is given (NaN when one of them is). */
static inline void vfixed_unit(float largest, float *unit, float *inverse)
{
    if (DIGITS == 3) {
        /* Powers of two, so that scaling is exact. 127 * (65536 + 256 + 1) is a little less than 2^23: sizes
         * just below a power of two take the next one. The unit stays normal. */
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

#define VFIX_AT_ONCE                                                                                         \
    4 /* chunks that go through the steps together: each step alone would wait for the last */

/* Chunks of activations into the form of vfixed_dot. */
static void vfixed_pack(const float *x, uint32_t count, struct vfixed *out)
{
    float largest[VFIX_AT_ONCE][VF], inverse[VFIX_AT_ONCE][VF];
    /* Vector j, part k: what goes to lane 4k + j. */
    _Alignas(64) int8_t bytes[VFIX_AT_ONCE][DIGITS][VF][16];
    struct vfixed_weights weights;
    const struct vfixed_weights *twelve = &weights;
    for (int g = 0; g < VFIX_GROUPS; g++)
        weights.w[g] = vi_set1_u8(12);
    for (uint32_t c = 0; c < count; c++)
        for (uint32_t b = 0; b < VF; b++)
            largest[c][vfixed_lane(b)] = vfixed_largest(x + VFIX_CHUNK * c + 16 * b);
    for (uint32_t c = 0; c < count; c++)
        for (uint32_t l = 0; l < VF; l++)
            vfixed_unit(largest[c][l], &out[c].unit[l], &inverse[c][l]);
    for (uint32_t c = 0; c < count; c++)
        for (uint32_t b = 0; b < VF; b++) {
            uint32_t lane = vfixed_lane(b);
            vfixed_store_digits(x + VFIX_CHUNK * c + 16 * b, inverse[c][lane], DIGITS,
                                bytes[c][0][lane % 4 * (VF / 4) + lane / 4], sizeof bytes[0][0]);
        }
    for (uint32_t c = 0; c < count; c++)
        for (uint32_t d = 0; d < DIGITS; d++)
            vfixed_transpose(bytes[c][d][0], out[c].digit[d]);
    for (uint32_t c = 0; c < count; c++) {
        vi sum;
        vfixed_sum(1, &twelve, &out[c], vi_zero(), &sum);
        vi_store(out[c].offset, vi_sub(vi_zero(), sum));
    }
}

#endif
