/* SPDX-License-Identifier: Apache-2.0 */
/* The quantiser against its definition: the nearest of all 127 codes, found by search. */
#include "io/quantise.h"
#include "kernels_cpu/kernels_cpu.h"
#include "tests/test.h"

#include <float.h>

#define BLOCK FT_QUANTISE_BLOCK

static uint64_t seed = 88172645463325252u;

static uint32_t random_bits(void)
{
    /* xorshift64: Marsaglia, "Xorshift RNGs", 2003 */
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 32);
}

/* [-1, 1) with many small values among them */
static float random_weight(void)
{
    float value = (float)(int32_t)random_bits() * 0x1p-31f;
    return ldexpf(value, -(int)(random_bits() % 20));
}

/* The code whose value is nearest to |value| / scale; of two the one with an even mantissa. */
static uint8_t nearest_code(float value, float scale)
{
    double wanted = fabs((double)(value / scale)), best = INFINITY;
    uint8_t code = 0;
    for (uint32_t c = 0; c <= 0x7e; c++) {
        double error = fabs((double)ft_e4m3_to_f32((uint8_t)c) - wanted);
        if (error < best || (error == best && c % 2 == 0)) {
            best = error;
            code = (uint8_t)c;
        }
    }
    return (uint8_t)(code | (signbit(value) ? 0x80 : 0));
}

struct quantised {
    uint32_t rows, columns;
    float *source;
    uint8_t *data;
    float *scale;
    uint32_t scale_count;
};

static void quantised_init(struct quantised *q, uint32_t rows, uint32_t columns)
{
    uint32_t blocks = (uint32_t)(ft_div_up(rows, BLOCK) * ft_div_up(columns, BLOCK));
    *q = (struct quantised){.rows = rows, .columns = columns, .scale_count = blocks};
    /* exact sizes: the address sanitizer sees every byte beyond */
    q->source = malloc((size_t)rows * columns * sizeof *q->source);
    q->data = malloc((size_t)rows * columns);
    q->scale = malloc(blocks * sizeof *q->scale);
    for (size_t i = 0; i < (size_t)rows * columns; i++)
        q->source[i] = random_weight();
}

static void quantised_fini(struct quantised *q)
{
    free(q->source);
    free(q->data);
    free(q->scale);
}

static float scale_at(const struct quantised *q, uint32_t row, uint32_t column)
{
    return q->scale[row / BLOCK * ft_div_up(q->columns, BLOCK) + column / BLOCK];
}

/* Every code, every scale; returns how many are not as defined. */
static uint32_t count_wrong(const struct quantised *q)
{
    uint32_t wrong = 0;
    for (uint32_t top = 0; top < q->rows; top += BLOCK)
        for (uint32_t left = 0; left < q->columns; left += BLOCK) {
            float most = 0, scale;
            for (uint32_t r = top; r < FT_MIN(top + BLOCK, q->rows); r++)
                for (uint32_t c = left; c < FT_MIN(left + BLOCK, q->columns); c++)
                    most = fmaxf(most, fabsf(q->source[(size_t)r * q->columns + c]));
            scale = most == 0 ? 1 : fmaxf(most / 448.0f, FLT_MIN);
            wrong += scale_at(q, top, left) != scale;
            for (uint32_t r = top; r < FT_MIN(top + BLOCK, q->rows); r++)
                for (uint32_t c = left; c < FT_MIN(left + BLOCK, q->columns); c++) {
                    size_t at = (size_t)r * q->columns + c;
                    wrong += q->data[at] != nearest_code(q->source[at], scale);
                }
        }
    return wrong;
}

TEST(codes_are_the_nearest_ones_in_whole_and_partial_blocks)
{
    static const uint32_t shapes[][2] = {{1, 1},     {1, 127},   {127, 1}, {128, 128}, {129, 128},
                                         {128, 129}, {130, 257}, {3, 300}, {300, 5},   {256, 384}};
    for (uint32_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct quantised q;
        quantised_init(&q, shapes[i][0], shapes[i][1]);
        CHECK(ft_quantise_fp8(q.source, FT_FORMAT_F32, q.rows, q.columns, q.data, q.scale));
        CHECK_EQ(count_wrong(&q), 0);
        quantised_fini(&q);
    }
}

TEST(weights_come_back_within_a_sixteenth_of_themselves)
{
    struct quantised q;
    double worst = 0;
    quantised_init(&q, 200, 300);
    CHECK(ft_quantise_fp8(q.source, FT_FORMAT_F32, q.rows, q.columns, q.data, q.scale));
    for (uint32_t r = 0; r < q.rows; r++)
        for (uint32_t c = 0; c < q.columns; c++) {
            size_t at = (size_t)r * q.columns + c;
            double scale = (double)scale_at(&q, r, c), back = (double)ft_e4m3_to_f32(q.data[at]) * scale;
            double value = (double)q.source[at], room = fmax(fabs(value) / 16, scale / 1024);
            worst = fmax(worst, fabs(back - value) / room);
        }
    CHECK(worst <= 1 + 1e-6);
    CHECK(worst > 0.5); /* something was rounded */
    quantised_fini(&q);
}

TEST(ties_go_to_the_even_code)
{
    /* scale 1: the block's largest is 448. Halfway between neighbours, normal and subnormal, and next to it. */
    static const struct {
        float value;
        uint8_t code;
    } cases[] = {{448, 0x7e},       {-448, 0xfe},      {432, 0x7e},        {431.99997f, 0x7d},
                 {17, 0x58},        {19, 0x5a},        {17.000002f, 0x59}, {0x1p-6f, 0x08},
                 {0x1p-9f, 0x01},   {0x1p-10f, 0x00},  {0x3p-10f, 0x02},   {0x1.000002p-10f, 0x01},
                 {-0x1p-10f, 0x80}, {0x0.fp-6f, 0x08}, {0.0f, 0x00},       {-0.0f, 0x80}};
    enum { COUNT = sizeof cases / sizeof *cases };
    float source[COUNT], scale;
    uint8_t data[COUNT];
    for (uint32_t i = 0; i < COUNT; i++)
        source[i] = cases[i].value;
    CHECK(ft_quantise_fp8(source, FT_FORMAT_F32, 1, COUNT, data, &scale));
    CHECK(scale == 1);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK_EQ(data[i], cases[i].code);
}

TEST(bf16_gives_what_the_same_numbers_give_in_f32)
{
    struct quantised q;
    quantised_init(&q, 150, 200);
    uint32_t count = q.rows * q.columns;
    uint16_t *half = malloc(count * sizeof *half);
    uint8_t *data = malloc(count);
    float *scale = malloc(q.scale_count * sizeof *scale);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &q.source[i], sizeof bits);
        half[i] = (uint16_t)(bits >> 16);
        bits &= 0xffff0000u;
        memcpy(&q.source[i], &bits, sizeof bits);
    }
    CHECK(ft_quantise_fp8(q.source, FT_FORMAT_F32, q.rows, q.columns, q.data, q.scale));
    CHECK(ft_quantise_fp8(half, FT_FORMAT_BF16, q.rows, q.columns, data, scale));
    CHECK(memcmp(data, q.data, count) == 0);
    CHECK(memcmp(scale, q.scale, q.scale_count * sizeof *scale) == 0);
    CHECK_EQ(count_wrong(&q), 0);
    free(half);
    free(data);
    free(scale);
    quantised_fini(&q);
}

TEST(zero_blocks_are_exact)
{
    struct quantised q;
    quantised_init(&q, 130, 260);
    for (uint32_t r = 0; r < BLOCK; r++)
        for (uint32_t c = BLOCK; c < 2 * BLOCK; c++)
            q.source[r * q.columns + c] = c % 2 ? 0.0f : -0.0f;
    CHECK(ft_quantise_fp8(q.source, FT_FORMAT_F32, q.rows, q.columns, q.data, q.scale));
    CHECK(q.scale[1] == 1);
    uint32_t wrong = 0;
    for (uint32_t r = 0; r < BLOCK; r++)
        for (uint32_t c = BLOCK; c < 2 * BLOCK; c++)
            wrong += q.data[r * q.columns + c] != (c % 2 ? 0 : 0x80);
    CHECK_EQ(wrong, 0);
    CHECK_EQ(count_wrong(&q), 0); /* its neighbours */
    quantised_fini(&q);
}

TEST(extreme_scales_stay_finite_and_nearest)
{
    static const float factors[] = {FLT_MAX, 1e30f, 1e-30f, FLT_MIN, 448 * FLT_MIN, 1e-40f, 0x1p-149f};
    for (uint32_t i = 0; i < sizeof factors / sizeof *factors; i++) {
        struct quantised q;
        quantised_init(&q, 20, 30);
        for (uint32_t n = 0; n < q.rows * q.columns; n++)
            q.source[n] *= factors[i];
        q.source[7] = factors[i];
        CHECK(ft_quantise_fp8(q.source, FT_FORMAT_F32, q.rows, q.columns, q.data, q.scale));
        CHECK_EQ(count_wrong(&q), 0);
        CHECK(isfinite(q.scale[0]) && q.scale[0] >= FLT_MIN);
        float back = ft_e4m3_to_f32(q.data[7]) * q.scale[0];
        CHECK(isfinite(back) || factors[i] == FLT_MAX);
        quantised_fini(&q);
    }
}

TEST(what_is_not_a_number_is_refused)
{
    static const uint32_t bad[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00001u};
    for (uint32_t i = 0; i < 4; i++) {
        struct quantised q;
        quantised_init(&q, 140, 140);
        memcpy(&q.source[139 * 140 + 139], &bad[i], sizeof(float)); /* the smallest block */
        CHECK(!ft_quantise_fp8(q.source, FT_FORMAT_F32, q.rows, q.columns, q.data, q.scale));
        quantised_fini(&q);
    }
    uint16_t half[2] = {0x3f80, 0x7f80};
    uint8_t data[2];
    float scale;
    CHECK(!ft_quantise_fp8(half, FT_FORMAT_BF16, 1, 2, data, &scale));
}

TEST_MAIN(RUN(codes_are_the_nearest_ones_in_whole_and_partial_blocks)
              RUN(weights_come_back_within_a_sixteenth_of_themselves) RUN(ties_go_to_the_even_code)
                  RUN(bf16_gives_what_the_same_numbers_give_in_f32) RUN(zero_blocks_are_exact)
                      RUN(extreme_scales_stay_finite_and_nearest) RUN(what_is_not_a_number_is_refused))
