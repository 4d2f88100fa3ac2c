/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products of every version at the edges: many rows, tiles, activations of extreme sizes, one outlier
 * among small ones, and what is not a number. The everyday shapes are in test_kernels_cpu_ops.c.
 */
#include "kernels_cpu/kernels_internal.h"
#include "tests/amx_twin.h"
#include "tests/test.h"

#include <float.h>

static uint64_t random_state = 7;

static uint32_t random_u32(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_float(void)
{
    return (float)random_u32() * 0x1p-31f - 1.0f;
}

static const struct {
    enum ft_format format;
    uint32_t out, in;
    uint16_t block;
} shapes[] = {
    {FT_FORMAT_F32, 19, 131, 0},
    {FT_FORMAT_BF16, 37, 77, 0},
    {FT_FORMAT_BF16, 18, 4231, 0},
    {FT_FORMAT_NVFP4, 35, 16, 0},
    {FT_FORMAT_NVFP4, 37, 400, 0},
    {FT_FORMAT_NVFP4, 17, 4336, 0},
    {FT_FORMAT_NVFP4, 140, 640, 0},
    {FT_FORMAT_MXFP4, 33, 32, 0},
    {FT_FORMAT_MXFP4, 37, 992, 0},
    {FT_FORMAT_DS_FP4, 21, 288, 0},
    {FT_FORMAT_FP8_BLOCK, 37, 261, 128},
    {FT_FORMAT_FP8_BLOCK, 31, 90, 40},
    {FT_FORMAT_FP8_BLOCK, 35, 4300, 256},
    {FT_FORMAT_FP8_BLOCK, 18, 6500, 640},
    /* longer than a panel of a single row */
    {FT_FORMAT_BF16, 5, 33100, 0},
    {FT_FORMAT_NVFP4, 3, 33344, 0},
};
#define SHAPE_COUNT (sizeof shapes / sizeof shapes[0])
#define ROWS_MOST 64

struct setting {
    struct ft_matrix w;
    uint8_t *data, *scale;
    float *x, *y, *want; /* [ROWS_MOST, in], [ROWS_MOST, out] twice */
};

/* Random finite weights and activations in [-1, 1). */
static struct setting setting_make(size_t shape)
{
    uint64_t data_bytes = 0, scale_bytes = 0;
    struct setting s = {.w = {.out = shapes[shape].out,
                              .in = shapes[shape].in,
                              .format = shapes[shape].format,
                              .global = shapes[shape].format == FT_FORMAT_NVFP4 ? 0.3f : 1.0f,
                              .block_out = shapes[shape].block,
                              .block_in = shapes[shape].block}};
    CHECK(
        ft_matrix_bytes(s.w.format, s.w.out, s.w.in, s.w.block_out, s.w.block_in, &data_bytes, &scale_bytes));
    s.data = malloc(data_bytes);
    s.scale = malloc(scale_bytes + 1);
    for (uint64_t i = 0; i < data_bytes; i++) {
        s.data[i] = (uint8_t)random_u32();
        if (s.w.format == FT_FORMAT_FP8_BLOCK && (s.data[i] & 127) == 127)
            s.data[i] = 3; /* a subnormal */
    }
    for (uint64_t i = 0; s.w.format == FT_FORMAT_F32 && i < data_bytes / 4; i++)
        ((float *)(void *)s.data)[i] = random_float();
    for (uint64_t i = 0; s.w.format == FT_FORMAT_BF16 && i < data_bytes / 2; i++)
        ((uint16_t *)(void *)s.data)[i] = ft_f32_to_bf16(random_float());
    for (uint64_t i = 0; i < scale_bytes; i++) /* e4m3 1.0 .. 1.875, e8m0 2^-7 .. 1 */
        s.scale[i] = (uint8_t)((s.w.format == FT_FORMAT_NVFP4 ? 56 : 120) + random_u32() % 8);
    for (uint64_t i = 0; s.w.format == FT_FORMAT_FP8_BLOCK && i < scale_bytes / 4; i++)
        ((float *)(void *)s.scale)[i] = 0.01f * random_float();
    s.w.data = s.data;
    s.w.scale = scale_bytes ? s.scale : NULL;
    s.x = malloc((size_t)ROWS_MOST * s.w.in * sizeof(float));
    s.y = malloc((size_t)ROWS_MOST * s.w.out * sizeof(float));
    s.want = malloc((size_t)ROWS_MOST * s.w.out * sizeof(float));
    for (size_t i = 0; i < (size_t)ROWS_MOST * s.w.in; i++)
        s.x[i] = random_float();
    return s;
}

static void setting_free(struct setting *s)
{
    free(s->data);
    free(s->scale);
    free(s->x);
    free(s->y);
    free(s->want);
}

static bool is_packed(enum ft_format format)
{
    return format == FT_FORMAT_NVFP4 || format == FT_FORMAT_MXFP4 || format == FT_FORMAT_DS_FP4;
}

/*
 * How far a dot product may be off: a few roundings of sum |w x|, more where one sum runs through all columns
 * (AMX); and for packed formats half a step of the fixed point, whose steps are 2^-22 (int8: 1/127, int16: 1/32639) of the
 * largest of 16 columns and never below 2^-126.
 */
static double bound(enum ft_isa isa, const struct ft_matrix *w, uint32_t o, const float *x)
{
    bool fixed = is_packed(w->format) && isa != FT_ISA_REF;
    double sum = 0, largest = 0, weights = 0;
    for (uint32_t i = 0; i < w->in; i++) {
        double element = fabs(ft_matrix_element(w, o, i));
        for (uint32_t j = i; fixed && i % 16 == 0 && j < i + 16; j++)
            largest = fmax(j == i ? 0 : largest, fabs((double)x[j]));
        sum += element * fabs((double)x[i]) * (isa == FT_ISA_AVX512AMX ? 8e-7 : 4e-7) +
               element * largest * (0.502 / ft_isa_fixed_steps(isa));
        weights += element;
    }
    return sum + weights * (fixed ? ft_isa_rounds(isa) ? 4e-33 : 0x1p-126 : 0) + FLT_MIN;
}

static bool isa_start(struct ft_kernels *kernels, enum ft_isa isa)
{
    struct ft_error err;
    if (isa == FT_ISA_AVX512AMX) /* in C where the core has no AMX */
        return amx_twin_init(kernels, &err);
    if (!ft_isa_is_available(isa))
        return false;
    CHECK_OK(ft_kernels_init(kernels, ft_isa_name(isa), &err), &err);
    return true;
}

static void compare(const struct setting *s, enum ft_isa isa, const struct ft_rows *rows, const char *what)
{
    int shown = 0;
    for (uint32_t r = 0; r < rows->count; r++)
        for (uint32_t o = 0; o < s->w.out; o++) {
            float got = s->y[(size_t)r * s->w.out + o], want = s->want[(size_t)r * s->w.out + o];
            double limit = bound(isa, &s->w, o, ft_rows_get(rows, r));
            test_checks_++;
            if (isfinite(want) ? fabs((double)got - (double)want) <= limit : !isfinite(got))
                continue;
            test_failures_++;
            if (!shown++)
                fprintf(stderr, "%s, %s, %s: row %u output %u is %.9g, wanted %.9g within %.3g\n", what,
                        ft_isa_name(isa), ft_format_name(s->w.format), r, o, (double)got, (double)want,
                        limit);
        }
}

TEST(many_rows_equal_the_reference_and_the_bits_of_each_row_alone)
{
    static const uint32_t counts[] = {0, 1, 2, 3, 5, 6, 10, 11, 16, 17, 21, 27, 32, 33, 64};
    struct ft_kernels kernels, ref;
    ft_kernels_fill_ref(&ref);
    for (size_t i = 0; i < SHAPE_COUNT; i++) {
        struct setting s = setting_make(i);
        uint32_t out = s.w.out, in = s.w.in;
        struct ft_rows all = {.x = s.x, .stride = in, .count = ROWS_MOST};
        float *alone = malloc((size_t)ROWS_MOST * out * sizeof(float));
        ref.matmul(&s.w, 0, out, all, NULL, s.want, out);
        for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++) {
            if (!isa_start(&kernels, isa))
                continue;
            for (uint32_t r = 0; r < ROWS_MOST; r++) { /* alone, in tiles of 11 */
                struct ft_rows row = {.x = s.x + (size_t)r * in, .stride = in, .count = 1};
                for (uint32_t o = 0; o < out; o += 11)
                    kernels.matmul(&s.w, o, FT_MIN(o + 11, out), row, NULL, alone + (size_t)r * out, out);
            }
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                struct ft_rows rows = {.x = s.x, .stride = in, .count = counts[c]};
                memset(s.y, 0x7f, (size_t)ROWS_MOST * out * sizeof(float));
                kernels.matmul(&s.w, 0, out, rows, NULL, s.y, out);
                CHECK(memcmp(s.y, alone, (size_t)counts[c] * out * sizeof(float)) == 0);
                if (counts[c] == ROWS_MOST)
                    compare(&s, isa, &rows, "many rows");
            }
        }
        free(alone);
        setting_free(&s);
    }
}

TEST(activations_of_extreme_sizes_equal_the_reference)
{
    struct ft_kernels kernels, ref;
    ft_kernels_fill_ref(&ref);
    for (size_t i = 0; i < SHAPE_COUNT; i++) {
        struct setting s = setting_make(i);
        uint32_t out = s.w.out, in = s.w.in;
        struct ft_rows rows = {.x = s.x, .stride = in, .count = 5};
        for (uint32_t c = 0; c < in; c++) {
            s.x[c] *= 1e-41f;                     /* subnormal */
            s.x[in + c] *= 1e34f;                 /* huge */
            s.x[2 * in + c] *= c % 97 ? 1 : 3e3f; /* outliers */
            s.x[3 * in + c] = 0;
            s.x[4 * in + c] = c % 16 < 8 ? 1e-20f * s.x[4 * in + c] : 1e-30f * s.x[4 * in + c];
        }
        ref.matmul(&s.w, 0, out, rows, NULL, s.want, out);
        for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++) {
            if (!isa_start(&kernels, isa))
                continue;
            kernels.matmul(&s.w, 0, out, rows, NULL, s.y, out);
            compare(&s, isa, &rows, "extreme activations");
            for (uint32_t o = 0; o < out; o++)
                CHECK(s.y[3 * (size_t)out + o] == 0);
        }
        setting_free(&s);
    }
}

/* Scales that a fast look-up does not know: zero, negative, subnormal, the largest. */
TEST(extreme_scales_equal_the_reference_and_the_bits_of_each_row_alone)
{
    static const uint8_t e4m3[] = {0x00, 0x01, 0x07, 0x80, 0x81, 0xb8, 0x7e, 0xfe};
    static const uint8_t e8m0[] = {0, 1, 2, 100, 200, 215, 0, 127};
    struct ft_kernels kernels, ref;
    ft_kernels_fill_ref(&ref);
    for (size_t i = 0; i < SHAPE_COUNT; i++) {
        if (!is_packed(shapes[i].format))
            continue;
        struct setting s = setting_make(i);
        struct ft_rows rows = {.x = s.x, .stride = s.w.in, .count = 20}; /* two full panels and some */
        bool nvfp4 = s.w.format == FT_FORMAT_NVFP4;
        uint32_t blocks = s.w.in / (nvfp4 ? 16 : 32);
        for (uint32_t o = 0; o < s.w.out; o += 2) /* every second row: its neighbours must not change */
            for (uint32_t b = 0; b < blocks; b++)
                s.scale[(size_t)o * blocks + b] = (nvfp4 ? e4m3 : e8m0)[random_u32() % 8];
        ref.matmul(&s.w, 0, s.w.out, rows, NULL, s.want, s.w.out);
        float *alone = malloc(s.w.out * sizeof *alone);
        for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++) {
            if (!isa_start(&kernels, isa))
                continue;
            kernels.matmul(&s.w, 0, s.w.out, rows, NULL, s.y, s.w.out);
            compare(&s, isa, &rows, "extreme scales");
            for (uint32_t r = 0; r < rows.count; r++) {
                struct ft_rows row = {.x = ft_rows_get(&rows, r), .stride = s.w.in, .count = 1};
                kernels.matmul(&s.w, 0, s.w.out, row, NULL, alone, s.w.out);
                CHECK(memcmp(alone, s.y + (size_t)r * s.w.out, s.w.out * sizeof(float)) == 0);
            }
        }
        free(alone);
        setting_free(&s);
    }
}

TEST(what_is_no_number_reaches_its_row_and_no_other)
{
    static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    struct ft_kernels kernels;
    for (size_t i = 0; i < SHAPE_COUNT; i++) {
        struct setting s = setting_make(i);
        uint32_t out = s.w.out, in = s.w.in;
        struct ft_rows rows = {.x = s.x, .stride = in, .count = 7};
        for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++) {
            if (!isa_start(&kernels, isa))
                continue;
            for (uint32_t where = 0; where < 8; where++) {
                float *at = s.x + (size_t)3 * in + (where % 2 ? in - 1 : random_u32() % in), keep = *at;
                *at = bad[where / 2];
                kernels.matmul(&s.w, 0, out, rows, NULL, s.y, out);
                for (uint32_t r = 0; r < rows.count; r++)
                    for (uint32_t o = 0; o < out; o++) {
                        float y = s.y[(size_t)r * out + o];
                        CHECK(r != 3 ? isfinite(y) : where < 4 ? isnan(y) : !isfinite(y));
                    }
                *at = keep;
            }
        }
        setting_free(&s);
    }
}

TEST_MAIN(RUN(many_rows_equal_the_reference_and_the_bits_of_each_row_alone)
              RUN(activations_of_extreme_sizes_equal_the_reference)
                  RUN(extreme_scales_equal_the_reference_and_the_bits_of_each_row_alone)
                      RUN(what_is_no_number_reaches_its_row_and_no_other))
