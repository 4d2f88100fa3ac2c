/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scalar decoding of the number formats, exact. Sources: OCP 8-bit floating point (e4m3: no infinities, 0x7f
 * and 0xff are NaN), OCP microscaling formats (e2m1, e8m0), IEEE 754 binary16.
 */
#include "kernels_cpu/kernels_internal.h"

#include <string.h>

/* Normal: (8 + m) / 8 * 2^(e-7); subnormal: m / 8 * 2^-6. Both over a common 1024, so every value is exact. */
#define E4M3_MAGNITUDE(b)                                                                                    \
    ((float)(((b) >> 3 & 15) ? (8 + ((b)&7)) << ((b) >> 3 & 15) : ((b)&7) << 1) / 1024.0f)
#define E4M3(b) (((b)&127) == 127 ? __builtin_nanf("") : (b) < 128 ? E4M3_MAGNITUDE(b) : -E4M3_MAGNITUDE(b))
#define E4M3_4(b) E4M3(b), E4M3((b) + 1), E4M3((b) + 2), E4M3((b) + 3)
#define E4M3_16(b) E4M3_4(b), E4M3_4((b) + 4), E4M3_4((b) + 8), E4M3_4((b) + 12)
#define E4M3_64(b) E4M3_16(b), E4M3_16((b) + 16), E4M3_16((b) + 32), E4M3_16((b) + 48)
const float ft_e4m3_values[256] = {E4M3_64(0), E4M3_64(64), E4M3_64(128), E4M3_64(192)};

const float ft_e2m1_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float ft_bf16_to_f32(uint16_t bits)
{
    return from_bits((uint32_t)bits << 16);
}

uint16_t ft_f32_to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    /* A NaN whose payload lies in the lower half must not round to infinity. */
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float ft_f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
    if (exponent == 31)
        return from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent)
        return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float magnitude = (float)mantissa * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

float ft_e4m3_to_f32(uint8_t bits)
{
    return ft_e4m3_values[bits];
}

float ft_e8m0_to_f32(uint8_t bits)
{
    if (bits == 255)
        return __builtin_nanf("");
    return from_bits(bits ? (uint32_t)bits << 23 : 0x00400000u);
}

float ft_e2m1_to_f32(uint8_t nibble)
{
    return ft_e2m1_values[nibble & 15];
}

static double e2m1_element(const struct ft_matrix *w, size_t at)
{
    uint8_t pair = ((const uint8_t *)w->data)[at / 2];
    return (double)ft_e2m1_values[at % 2 ? pair >> 4 : pair & 15];
}

double ft_matrix_element(const struct ft_matrix *w, uint32_t o, uint32_t i)
{
    size_t at = (size_t)o * w->in + i;
    const uint8_t *scale = w->scale;
    switch (w->format) {
    case FT_FORMAT_F32:
        return (double)((const float *)w->data)[at];
    case FT_FORMAT_BF16:
        return (double)ft_bf16_to_f32(((const uint16_t *)w->data)[at]);
    case FT_FORMAT_NVFP4:
        return e2m1_element(w, at) * (double)ft_e4m3_values[scale[at / 16]] * (double)w->global;
    case FT_FORMAT_MXFP4:
    case FT_FORMAT_DS_FP4:
        return e2m1_element(w, at) * (double)ft_e8m0_to_f32(scale[at / 32]);
    case FT_FORMAT_FP8_BLOCK: {
        size_t blocks = ft_div_up(w->in, w->block_in), block = o / w->block_out * blocks + i / w->block_in;
        return (double)ft_e4m3_values[((const uint8_t *)w->data)[at]] *
               (double)((const float *)w->scale)[block];
    }
    default:
        FT_ASSERT_LT(w->format, FT_FORMAT_COUNT);
        return 0;
    }
}
