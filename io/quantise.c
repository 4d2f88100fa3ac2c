/* SPDX-License-Identifier: Apache-2.0 */
#include "io/quantise.h"
#include "graph/error.h"

#include <float.h>
#include <string.h>

#define BLOCK FT_QUANTISE_BLOCK
#define E4M3_MAX 448.0f
#define E4M3_MAX_CODE 0x7eu
#define INFINITY_BITS 0x7f800000u
#define MAGNITUDE_BITS 0x7fffffffu

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Element i of a row as the bits of an f32. */
static inline uint32_t element(const void *row, bool is_f32, uint32_t i)
{
    return is_f32 ? ((const uint32_t *)row)[i] : (uint32_t)((const uint16_t *)row)[i] << 16;
}

/* |w| / scale rounded to e4m3; no branches, so that loops over it become vector code. */
static inline uint8_t encode(uint32_t bits, float scale)
{
    float value = float_of(bits & MAGNITUDE_BITS) / scale;
    uint32_t wide = bits_of(value);
    /* From 2^-6 on: 23 bits of mantissa become 3, the bias 127 becomes 7. */
    uint32_t normal = ((wide + 0x7ffffu + (wide >> 20 & 1u)) >> 20) - (120u << 3);
    /* Below: multiples of 2^-9, which is what the last bit of numbers next to 2^14 counts. */
    uint32_t subnormal = bits_of(value + 0x1p14f) - bits_of(0x1p14f);
    uint32_t code = wide < 121u << 23 ? subnormal : normal;
    code = code < E4M3_MAX_CODE ? code : E4M3_MAX_CODE; /* max / (max / 448) may be one rounding beyond 448 */
    return (uint8_t)(code | (bits >> 24 & 0x80u));
}

static inline float scale_of(uint32_t most)
{
    float scale = float_of(most) / E4M3_MAX;
    return most == 0 ? 1.0f : scale < FLT_MIN ? FLT_MIN : scale;
}

static inline __attribute__((always_inline)) bool quantise(const void *source, bool is_f32, uint32_t rows,
                                                           uint32_t columns, uint8_t *data, float *scale)
{
    uint64_t row_bytes = (uint64_t)columns * (is_f32 ? 4 : 2);
    for (uint32_t top = 0; top < rows; top += FT_MIN(BLOCK, rows - top))
        for (uint32_t left = 0; left < columns; left += FT_MIN(BLOCK, columns - left)) {
            uint32_t height = FT_MIN(BLOCK, rows - top), width = FT_MIN(BLOCK, columns - left), most = 0;
            const char *from = (const char *)source + top * row_bytes + left * (row_bytes / columns);
            uint8_t *to = data + (uint64_t)top * columns + left;
            for (uint32_t r = 0; r < height; r++)
                for (uint32_t i = 0; i < width; i++) {
                    uint32_t magnitude = element(from + r * row_bytes, is_f32, i) & MAGNITUDE_BITS;
                    most = most > magnitude ? most : magnitude;
                }
            if (most >= INFINITY_BITS)
                return false;
            float step = *scale++ = scale_of(most);
            for (uint32_t r = 0; r < height; r++)
                for (uint32_t i = 0; i < width; i++)
                    to[(uint64_t)r * columns + i] = encode(element(from + r * row_bytes, is_f32, i), step);
        }
    return true;
}

static bool quantise_plain(const void *source, bool is_f32, uint32_t rows, uint32_t columns, uint8_t *data,
                           float *scale)
{
    return is_f32 ? quantise(source, true, rows, columns, data, scale)
                  : quantise(source, false, rows, columns, data, scale);
}

#ifdef __x86_64__
/* The same loops with vectors twice as wide. */
static __attribute__((target("avx2"))) bool quantise_avx2(const void *source, bool is_f32, uint32_t rows,
                                                          uint32_t columns, uint8_t *data, float *scale)
{
    return is_f32 ? quantise(source, true, rows, columns, data, scale)
                  : quantise(source, false, rows, columns, data, scale);
}
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#else
#define quantise_avx2 quantise_plain
#define HAS_AVX2 false
#endif

bool ft_quantise_fp8(const void *source, enum ft_format format, uint32_t rows, uint32_t columns,
                     uint8_t *data, float *scale)
{
    FT_ASSERT_EQ(format == FT_FORMAT_F32 || format == FT_FORMAT_BF16, true);
    return (HAS_AVX2 ? quantise_avx2 : quantise_plain)(source, format == FT_FORMAT_F32, rows, columns, data,
                                                       scale);
}
