/* SPDX-License-Identifier: Apache-2.0 */
/* Every available version of every op against the reference, over one table of shapes; and that bits do not
 * depend on what else is in the call. */
#include "kernels_cpu/kernels_internal.h"
#include "tests/amx_twin.h"
#include "tests/test.h"

#include <float.h>

static uint64_t random_state = 1;

static uint32_t random_u32(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_float(void)
{
    return (float)random_u32() * 0x1p-31f - 1.0f;
}

static float *random_floats(size_t n)
{
    float *x = malloc((n ? n : 1) * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = random_float();
    return x;
}

/* A matrix of random codes without NaN. Scales are moderate unless `extreme`. */
static struct ft_matrix random_matrix(enum ft_format format, uint32_t out, uint32_t in, uint16_t block,
                                      bool extreme)
{
    uint64_t data_bytes = 0, scale_bytes = 0;
    struct ft_matrix w = {.out = out, .in = in, .format = format, .global = 1.0f};
    if (format == FT_FORMAT_FP8_BLOCK)
        w.block_out = w.block_in = block;
    CHECK(ft_matrix_bytes(format, out, in, w.block_out, w.block_in, &data_bytes, &scale_bytes));
    uint8_t *data = malloc(data_bytes), *scale = scale_bytes ? malloc(scale_bytes) : NULL;
    for (uint64_t i = 0; i < data_bytes; i++) {
        data[i] = (uint8_t)random_u32();
        if (format == FT_FORMAT_FP8_BLOCK && (data[i] & 127) == 127)
            data[i] = 1;
    }
    for (uint64_t i = 0; format == FT_FORMAT_F32 && i < data_bytes / 4; i++)
        ((float *)(void *)data)[i] = random_float();
    for (uint64_t i = 0; format == FT_FORMAT_BF16 && i < data_bytes / 2; i++)
        ((uint16_t *)(void *)data)[i] = ft_f32_to_bf16(random_float());
    for (uint64_t i = 0; format == FT_FORMAT_FP8_BLOCK && i < scale_bytes / 4; i++)
        ((float *)(void *)scale)[i] = random_float() * (extreme ? 1e30f : 0.01f);
    for (uint64_t i = 0; format != FT_FORMAT_FP8_BLOCK && i < scale_bytes; i++)
        scale[i] = (uint8_t)(format == FT_FORMAT_NVFP4 ? random_u32() % (extreme ? 127 : 80)
                             : extreme                 ? random_u32() % 60
                                                       : 120 + random_u32() % 8);
    if (format == FT_FORMAT_NVFP4)
        w.global = extreme ? 1e-30f : 0.37f;
    w.data = data;
    w.scale = scale;
    return w;
}

static void free_matrix(struct ft_matrix *w)
{
    free((void *)(uintptr_t)w->data);
    free((void *)(uintptr_t)w->scale);
}

/* sum |w x| of row o: what rounding errors are measured against. */
static double magnitude(const struct ft_matrix *w, uint32_t o, const float *x)
{
    double sum = 0;
    for (uint32_t i = 0; i < w->in; i++)
        sum += fabs(ft_matrix_element(w, o, i) * (double)x[i]);
    return sum;
}

static void check_close(float got, float want, double scale, double tolerance, const char *what)
{
    test_checks_++;
    if (isnan(want) ? isnan(got) : fabs((double)got - (double)want) <= scale * tolerance + 1e-44)
        return;
    if (!test_failures_++)
        fprintf(stderr, "%s: got %.9g, wanted %.9g within %.3g\n", what, (double)got, (double)want,
                scale * tolerance);
}

#define FOR_EACH_ISA(kernels)                                                                                \
    for (enum ft_isa isa_ = 0; isa_ < FT_ISA_COUNT; isa_++)                                                  \
        if (isa_start(&kernels, isa_))
static bool isa_start(struct ft_kernels *kernels, enum ft_isa isa)
{
    struct ft_error err;
    if (isa == FT_ISA_AVX512AMX) /* in C where the core has no AMX */
        return amx_twin_init(kernels, &err);
    if (!ft_isa_is_available(isa))
        return false;
    CHECK_OK(ft_kernels_init(kernels, ft_isa_name(isa), &err), &err);
    CHECK_EQ(kernels->isa, isa);
    return true;
}

/* What rounding activations to int8 or 16 bits adds: each errs by up to half a step of the largest of its 16. */
static double rounding_error(enum ft_isa isa, const struct ft_matrix *w, uint32_t o, const float *x)
{
    bool packed =
        w->format == FT_FORMAT_NVFP4 || w->format == FT_FORMAT_MXFP4 || w->format == FT_FORMAT_DS_FP4;
    double sum = 0, largest = 0;
    for (uint32_t i = 0; packed && ft_isa_rounds(isa) && i < w->in; i++) {
        for (uint32_t j = i; i % 16 == 0 && j < i + 16; j++)
            largest = fmax(j == i ? 0 : largest, fabs((double)x[j]));
        sum += fabs(ft_matrix_element(w, o, i)) * largest * 0.502 / ft_isa_fixed_steps(isa);
    }
    return sum;
}

static struct ft_kernels reference(void)
{
    struct ft_kernels kernels;
    ft_kernels_fill_ref(&kernels);
    return kernels;
}

static const struct {
    enum ft_format format;
    uint32_t out, in;
    uint16_t block;
    bool extreme;
} shapes[] = {
    {FT_FORMAT_F32, 5, 1, 0, false},           {FT_FORMAT_F32, 37, 67, 0, false},
    {FT_FORMAT_F32, 33, 256, 0, false},        {FT_FORMAT_BF16, 7, 3, 0, false},
    {FT_FORMAT_BF16, 40, 130, 0, false},       {FT_FORMAT_BF16, 65, 320, 0, false},
    {FT_FORMAT_NVFP4, 3, 16, 0, false},        {FT_FORMAT_NVFP4, 70, 80, 0, false},
    {FT_FORMAT_NVFP4, 33, 640, 0, false},      {FT_FORMAT_NVFP4, 9, 8208, 0, false},
    {FT_FORMAT_NVFP4, 32, 2560, 0, true},      {FT_FORMAT_MXFP4, 5, 32, 0, false},
    {FT_FORMAT_MXFP4, 66, 96, 0, false},       {FT_FORMAT_MXFP4, 33, 2880, 0, false},
    {FT_FORMAT_DS_FP4, 12, 4128, 0, true},     {FT_FORMAT_FP8_BLOCK, 300, 200, 128, false},
    {FT_FORMAT_FP8_BLOCK, 33, 129, 128, true}, {FT_FORMAT_FP8_BLOCK, 20, 50, 16, false},
    {FT_FORMAT_FP8_BLOCK, 20, 100, 24, false}, {FT_FORMAT_FP8_BLOCK, 64, 640, 256, false},
};
#define SHAPE_COUNT (sizeof shapes / sizeof shapes[0])

TEST(matmul_equals_reference_for_every_format_and_shape)
{
    struct ft_kernels kernels, ref = reference();
    for (size_t s = 0; s < SHAPE_COUNT; s++) {
        uint32_t out = shapes[s].out, in = shapes[s].in;
        struct ft_matrix w = random_matrix(shapes[s].format, out, in, shapes[s].block, shapes[s].extreme);
        static const uint32_t row_counts[] = {0, 1, 2, 3, 5, 16};
        float *x = random_floats((size_t)16 * (in + 3)), *bias = random_floats(out);
        float *y = random_floats((size_t)16 * (out + 1)), *want = random_floats((size_t)16 * (out + 1));
        for (size_t n = 0; n < sizeof row_counts / sizeof row_counts[0]; n++) {
            struct ft_rows rows = {.x = x, .stride = in + 3, .count = row_counts[n]};
            const float *b = n % 2 ? bias : NULL;
            ref.matmul(&w, 0, out, rows, b, want, out + 1);
            FOR_EACH_ISA(kernels)
            {
                y[(size_t)rows.count * (out + 1) - (rows.count ? 1 : 0)] = 77;
                kernels.matmul(&w, 0, out, rows, b, y, out + 1);
                for (uint32_t r = 0; r < rows.count; r++)
                    for (uint32_t o = 0; o < out; o++)
                        check_close(y[(size_t)r * (out + 1) + o], want[(size_t)r * (out + 1) + o],
                                    (magnitude(&w, o, ft_rows_get(&rows, r)) + (b ? 1 : 0)) * 4e-7 +
                                        rounding_error(isa_, &w, o, ft_rows_get(&rows, r)),
                                    1, ft_format_name(w.format));
                CHECK(y[(size_t)rows.count * (out + 1) - (rows.count ? 1 : 0)] == 77);
            }
        }
        free(x);
        free(bias);
        free(y);
        free(want);
        free_matrix(&w);
    }
}

TEST(matmul_bits_do_not_depend_on_grouping_or_tiling)
{
    struct ft_kernels kernels;
    for (size_t s = 0; s < SHAPE_COUNT; s++) {
        uint32_t out = shapes[s].out, in = shapes[s].in, index[11];
        struct ft_matrix w = random_matrix(shapes[s].format, out, in, shapes[s].block, shapes[s].extreme);
        float *x = random_floats((size_t)11 * in), *whole = malloc((size_t)11 * out * 4),
              *part = malloc((size_t)11 * out * 4);
        FOR_EACH_ISA(kernels)
        {
            kernels.matmul(&w, 0, out, (struct ft_rows){.x = x, .stride = in, .count = 11}, NULL, whole, out);
            for (uint32_t group = 1; group <= 4; group++) {
                memset(part, 0xff, (size_t)11 * out * 4);
                for (uint32_t o = 0; o < out; o += 13)
                    for (uint32_t r = 0; r < 11; r += group) {
                        uint32_t count = FT_MIN(group, 11 - r);
                        struct ft_rows rows = {.x = x, .index = index, .stride = in, .count = count};
                        for (uint32_t i = 0; i < count; i++)
                            index[i] = r + i;
                        kernels.matmul(&w, o, FT_MIN(o + 13, out), rows, NULL, part + (size_t)r * out, out);
                    }
                CHECK(memcmp(whole, part, (size_t)11 * out * 4) == 0);
            }
        }
        free(x);
        free(whole);
        free(part);
        free_matrix(&w);
    }
}

TEST(nan_in_weights_scales_and_activations_reaches_the_result)
{
    struct ft_kernels kernels;
    for (size_t s = 0; s < SHAPE_COUNT; s++) {
        uint32_t out = shapes[s].out, in = shapes[s].in;
        struct ft_matrix w = random_matrix(shapes[s].format, out, in, shapes[s].block, false);
        float *x = random_floats((size_t)2 * in), *y = malloc((size_t)2 * out * 4);
        struct ft_rows rows = {.x = x, .stride = in, .count = 2};
        FOR_EACH_ISA(kernels)
        {
            float keep = x[in + in / 2];
            x[in + in / 2] = NAN;
            kernels.matmul(&w, 0, out, rows, NULL, y, out);
            CHECK(!isnan(y[0]) && isnan(y[out]) && isnan(y[2 * out - 1]));
            x[in + in / 2] = INFINITY;
            kernels.matmul(&w, 0, out, rows, NULL, y, out);
            CHECK(isfinite(y[0]) && !isfinite(y[out]));
            x[in + in / 2] = keep;
            bool codes =
                w.scale && w.format != FT_FORMAT_FP8_BLOCK; /* scales that are codes can be NaN too */
            uint8_t *bytes = (uint8_t *)(uintptr_t)(codes ? w.scale : w.data), old[4];
            size_t size = w.format == FT_FORMAT_F32 ? 4 : w.format == FT_FORMAT_BF16 ? 2 : 1;
            memcpy(old, bytes, size);
            memset(bytes, 0xff, size); /* NaN in every one of the formats */
            kernels.matmul(&w, 0, out, rows, NULL, y, out);
            CHECK(isnan(y[0]) && isnan(y[out]) && !isnan(y[1]) && !isnan(y[2 * out - 1]));
            memcpy(bytes, old, size);
        }
        free(x);
        free(y);
        free_matrix(&w);
    }
}

struct test_expert {
    struct ft_expert_layout layout;
    struct ft_expert expert;
    char *blob;
};

static struct test_expert random_expert(enum ft_format format, uint32_t hidden, uint32_t width, bool oss)
{
    struct ft_error err;
    struct test_expert t;
    CHECK_OK(ft_expert_layout_init(&t.layout, format, hidden, width, 128, 128, oss,
                                   oss ? FT_ACTIVATION_SWIGLU_OSS : FT_ACTIVATION_SILU, oss ? 7.0f : 0.0f,
                                   &err),
             &err);
    if (format != FT_FORMAT_FP8_BLOCK)
        t.layout.block_out = t.layout.block_in = 0;
    t.blob = aligned_alloc(64, t.layout.stride);
    memset(t.blob, 0, t.layout.stride);
    const uint32_t data[3] = {t.layout.gate_offset, t.layout.up_offset, t.layout.down_offset};
    const uint32_t scale[3] = {t.layout.gate_scale_offset, t.layout.up_scale_offset,
                               t.layout.down_scale_offset};
    const uint32_t bias[3] = {t.layout.gate_bias_offset, t.layout.up_bias_offset, t.layout.down_bias_offset};
    for (int p = 0; p < 3; p++) {
        uint64_t data_bytes, scale_bytes;
        uint32_t out = p == 2 ? hidden : width, in = p == 2 ? width : hidden;
        struct ft_matrix w = random_matrix(format, out, in, 128, false);
        CHECK(ft_matrix_bytes(format, out, in, 128, 128, &data_bytes, &scale_bytes));
        memcpy(t.blob + data[p], w.data, data_bytes);
        if (scale_bytes)
            memcpy(t.blob + scale[p], w.scale, scale_bytes);
        if (t.layout.global_offset != FT_NONE)
            ((float *)(void *)(t.blob + t.layout.global_offset))[p] = 0.1f + 0.2f * (float)p;
        for (uint32_t i = 0; bias[p] != FT_NONE && i < out; i++)
            ((float *)(void *)(t.blob + bias[p]))[i] = random_float() * 4;
        free_matrix(&w);
    }
    ft_expert_view(&t.layout, t.blob, &t.expert);
    return t;
}

TEST(experts_equal_reference_and_bits_do_not_depend_on_grouping)
{
    static const struct {
        enum ft_format format;
        uint32_t hidden, width;
        bool oss;
    } table[] = {{FT_FORMAT_NVFP4, 256, 96, false},      {FT_FORMAT_NVFP4, 80, 48, false},
                 {FT_FORMAT_BF16, 100, 37, false},       {FT_FORMAT_F32, 64, 40, false},
                 {FT_FORMAT_FP8_BLOCK, 200, 150, false}, {FT_FORMAT_MXFP4, 96, 64, true},
                 {FT_FORMAT_BF16, 72, 33, true},         {FT_FORMAT_DS_FP4, 160, 32, false}};
    struct ft_kernels kernels, ref = reference();
    for (size_t s = 0; s < sizeof table / sizeof table[0]; s++) {
        uint32_t hidden = table[s].hidden, width = table[s].width, rows_count = 9;
        struct test_expert t = random_expert(table[s].format, hidden, width, table[s].oss);
        float *x = random_floats((size_t)rows_count * hidden), *h = malloc((size_t)rows_count * width * 4);
        float *want_h = malloc((size_t)rows_count * width * 4), *y = malloc((size_t)rows_count * hidden * 4);
        float *want_y = malloc((size_t)rows_count * hidden * 4),
              *alone = malloc((size_t)(hidden + width) * 4);
        uint32_t reverse[9];
        for (uint32_t r = 0; r < rows_count; r++)
            reverse[r] = rows_count - 1 - r;
        struct ft_rows rows = {.x = x, .index = reverse, .stride = hidden, .count = rows_count};
        ref.expert_up(&t.expert, 0, width, rows, want_h, width);
        FOR_EACH_ISA(kernels)
        {
            kernels.expert_up(&t.expert, 0, 5, rows, h, width);
            kernels.expert_up(&t.expert, 5, width, rows, h, width);
            struct ft_rows down_rows = {.x = h, .stride = width, .count = rows_count};
            kernels.expert_down(&t.expert, 0, hidden, down_rows, reverse, y, hidden);
            ref.expert_down(&t.expert, 0, hidden, down_rows, reverse, want_y, hidden);
            for (uint32_t r = 0; r < rows_count; r++) {
                const float *row = ft_rows_get(&rows, r);
                for (uint32_t i = 0; i < width; i++) {
                    double g = magnitude(&t.expert.gate, i, row) + 4, u = magnitude(&t.expert.up, i, row) + 4;
                    check_close(h[(size_t)r * width + i], want_h[(size_t)r * width + i],
                                g * u * 2e-6 + rounding_error(isa_, &t.expert.gate, i, row) * u +
                                    rounding_error(isa_, &t.expert.up, i, row) * g,
                                1, "expert_up");
                }
                for (uint32_t o = 0; o < hidden; o++)
                    check_close(y[(size_t)reverse[r] * hidden + o], want_y[(size_t)reverse[r] * hidden + o],
                                (magnitude(&t.expert.down, o, h + (size_t)r * width) + 4) * 1e-5 +
                                    rounding_error(isa_, &t.expert.down, o, h + (size_t)r * width),
                                1, "expert_down");
                kernels.expert_up(&t.expert, 0, width, (struct ft_rows){.x = row, .count = 1}, alone, width);
                CHECK(memcmp(alone, h + (size_t)r * width, width * 4) == 0);
                kernels.expert_down(&t.expert, 0, hidden, (struct ft_rows){.x = alone, .count = 1}, NULL,
                                    alone + width, 0);
                CHECK(memcmp(alone + width, y + (size_t)reverse[r] * hidden, hidden * 4) == 0);
            }
        }
        free(x);
        free(h);
        free(want_h);
        free(y);
        free(want_y);
        free(alone);
        free(t.blob);
    }
}

TEST(row_decode_mix_and_norm_equal_reference)
{
    struct ft_kernels kernels, ref = reference();
    for (size_t s = 0; s < SHAPE_COUNT; s++) {
        struct ft_matrix w =
            random_matrix(shapes[s].format, shapes[s].out, shapes[s].in, shapes[s].block, false);
        float *want = malloc(w.in * 4), *got = malloc(w.in * 4);
        ref.row_decode(&w, w.out - 1, want);
        FOR_EACH_ISA(kernels)
        {
            kernels.row_decode(&w, w.out - 1, got);
            CHECK(memcmp(want, got, w.in * 4) == 0);
        }
        free(want);
        free(got);
        free_matrix(&w);
    }
    static const uint32_t mixes[][3] = {{4, 70, 20}, {2, 32, 33}, {1, 5, 3}, {16, 40, 64}};
    for (size_t s = 0; s < sizeof mixes / sizeof mixes[0]; s++) {
        uint32_t n = mixes[s][0], hidden = mixes[s][1], rank = mixes[s][2], rows = 6;
        struct ft_matrix up =
            random_matrix(s % 2 ? FT_FORMAT_F32 : FT_FORMAT_BF16, n * hidden, rank, 0, false);
        float *t = random_floats((size_t)rows * rank), *u = random_floats((size_t)rows * n * hidden);
        float *want = malloc((size_t)rows * hidden * 4), *got = malloc((size_t)rows * hidden * 4);
        float *part = malloc((size_t)rows * hidden * 4);
        ref.mix_up(&up, n, hidden, 0, hidden, t, rank, u, (size_t)n * hidden, rows, want, hidden);
        FOR_EACH_ISA(kernels)
        {
            kernels.mix_up(&up, n, hidden, 0, hidden, t, rank, u, (size_t)n * hidden, rows, got, hidden);
            for (uint32_t i = 0; i < rows * hidden; i++)
                check_close(got[i], want[i], 1, 2e-6, "mix_up");
            for (uint32_t r = 0; r < rows; r++)
                for (uint32_t h = 0; h < hidden; h += 7)
                    kernels.mix_up(&up, n, hidden, h, FT_MIN(h + 7, hidden), t + (size_t)r * rank, rank,
                                   u + (size_t)r * n * hidden, 0, 1, part + (size_t)r * hidden, 0);
            CHECK(memcmp(got, part, (size_t)rows * hidden * 4) == 0);
        }
        free(t);
        free(u);
        free(want);
        free(got);
        free(part);
        free_matrix(&up);
    }
    static const uint32_t norms[][2] = {{1, 1}, {1, 64}, {3, 37}, {4, 256}, {2, 2560}};
    for (size_t s = 0; s < sizeof norms / sizeof norms[0]; s++)
        for (int flags = 0; flags < 8; flags++) {
            uint32_t groups = norms[s][0], n = norms[s][1];
            float *x = random_floats((size_t)groups * n), *w = random_floats((size_t)groups * n);
            float *want = malloc((size_t)groups * n * 4), *got = malloc((size_t)groups * n * 4);
            if (flags & 4)
                memset(x, 0, (size_t)n * 4);
            ref.rms_norm(x, w, flags & 1, flags & 2, 1e-6f, groups, n, want);
            FOR_EACH_ISA(kernels)
            {
                memcpy(got, x, (size_t)groups * n * 4);
                kernels.rms_norm(got, w, flags & 1, flags & 2, 1e-6f, groups, n, got); /* in place */
                for (uint32_t i = 0; i < groups * n; i++)
                    check_close(got[i], want[i], fabs((double)want[i]) + 1e-9, 1e-6, "rms_norm");
            }
            free(x);
            free(w);
            free(want);
            free(got);
        }
}

/* A KV cache of `tokens` tokens whose unused slots hold NaN. */
struct test_kv {
    struct ft_kv_view view;
    float **pages;
    uint32_t page_count;
};

static struct test_kv random_kv(uint32_t tokens, uint32_t page_tokens, uint32_t heads, uint32_t dim,
                                uint64_t seed)
{
    struct test_kv kv = {.page_count = (uint32_t)ft_div_up(tokens, page_tokens)};
    size_t half = (size_t)heads * page_tokens * dim;
    kv.pages = malloc(kv.page_count * sizeof *kv.pages);
    for (uint32_t p = 0; p < kv.page_count; p++) {
        kv.pages[p] = malloc((5 + 2 * half) * sizeof(float));
        for (size_t i = 0; i < 5 + 2 * half; i++)
            kv.pages[p][i] = NAN;
    }
    random_state = seed;
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t h = 0; h < heads; h++)
            for (uint32_t i = 0; i < dim; i++) {
                size_t at = ((size_t)h * page_tokens + t % page_tokens) * dim + i;
                kv.pages[t / page_tokens][5 + at] = random_float() * 2;
                kv.pages[t / page_tokens][5 + half + at] = random_float();
            }
    kv.view = (struct ft_kv_view){.pages = kv.pages,
                                  .k_offset = 5,
                                  .v_offset = 5 + half,
                                  .page_tokens = page_tokens,
                                  .kv_head_count = heads,
                                  .head_dim = dim};
    return kv;
}

static void free_kv(struct test_kv *kv)
{
    for (uint32_t p = 0; p < kv->page_count; p++)
        free(kv->pages[p]);
    free(kv->pages);
}

TEST(attention_equals_reference_and_does_not_depend_on_pages)
{
    static const struct {
        uint32_t tokens, page, dim, group, tail_begin, block_count;
        bool sinks;
    } table[] = {{1, 4, 16, 1, 0, 0, false},      {1, 4, 16, 2, 0, 0, true},
                 {70, 16, 64, 4, 0, 0, false},    {200, 64, 256, 12, 0, 0, false},
                 {200, 60, 32, 16, 150, 0, true}, {333, 16, 128, 17, 320, 40, false},
                 {333, 32, 40, 3, 333, 1, false}, {65, 8, 12, 5, 0, 0, true},
                 {129, 16, 8, 8, 1, 0, false},    {300, 256, 512, 3, 296, 70, false}};
    struct ft_kernels kernels, ref = reference();
    for (size_t s = 0; s < sizeof table / sizeof table[0]; s++) {
        uint32_t dim = table[s].dim, group = table[s].group, blocks[80];
        size_t n = (size_t)group * dim;
        struct test_kv kv = random_kv(table[s].tokens, table[s].page, 2, dim, 5 + s);
        struct test_kv other = random_kv(table[s].tokens, 4 * table[s].page + 4, 2, dim, 5 + s);
        float *q = random_floats(n), *sinks = random_floats(group), *want = malloc(n * 4),
              *got = malloc(n * 4);
        for (uint32_t b = 0; b < table[s].block_count; b++)
            blocks[b] = b == 0 ? 0 : blocks[b - 1] + 1 + (table[s].block_count < 60 ? random_u32() % 2 : 0);
        struct ft_attention_row args = {.kv = kv.view,
                                        .q = q,
                                        .out = want,
                                        .sinks = table[s].sinks ? sinks : NULL,
                                        .blocks = table[s].block_count ? blocks : NULL,
                                        .block_count = table[s].block_count,
                                        .block_tokens = 4,
                                        .tail_begin = table[s].tail_begin,
                                        .position = table[s].tokens - 1,
                                        .kv_head = 1,
                                        .group = group,
                                        .scale = 0.7f};
        ref.attention_row(&args);
        args.out = got;
        FOR_EACH_ISA(kernels)
        {
            float *again = malloc(n * 4);
            args.kv = kv.view;
            args.out = got;
            kernels.attention_row(&args);
            for (size_t i = 0; i < n; i++)
                check_close(got[i], want[i], 1, 3e-6, "attention");
            args.kv = other.view;
            args.out = again;
            kernels.attention_row(&args);
            CHECK(memcmp(got, again, n * 4) == 0);
            free(again);
        }
        free(q);
        free(sinks);
        free(want);
        free(got);
        free_kv(&kv);
        free_kv(&other);
    }
}

TEST(attention_with_large_scores_nan_and_nothing_visible)
{
    struct ft_kernels kernels;
    struct test_kv kv = random_kv(100, 16, 2, 16, 3);
    float q[16], out[16];
    for (int i = 0; i < 16; i++)
        q[i] = 1e4f;
    struct ft_attention_row args = {
        .kv = kv.view, .q = q, .out = out, .position = 99, .group = 1, .scale = 1};
    FOR_EACH_ISA(kernels)
    {
        args.tail_begin = 0;
        kernels.attention_row(&args);
        for (int i = 0; i < 16; i++)
            CHECK(isfinite(out[i]) && fabsf(out[i]) <= 1);
        args.tail_begin = 100;
        kernels.attention_row(&args);
        for (int i = 0; i < 16; i++)
            CHECK(out[i] == 0);
        args.tail_begin = 0;
        float keep = kv.pages[3][5];
        kv.pages[3][5] = NAN; /* the key of token 48 in head 0 */
        kernels.attention_row(&args);
        CHECK(isnan(out[0]) || isa_ == FT_ISA_REF);
        kv.pages[3][5] = keep;
    }
    free_kv(&kv);
}

TEST(index_scores_equal_reference)
{
    struct ft_kernels kernels, ref = reference();
    float *pages[3] = {random_floats(400), random_floats(400), random_floats(400)},
          *q = random_floats(4 * 24);
    float want[20], got[20];
    ref.index_scores(q, 4, 24, pages, 7, 8, 20, want);
    FOR_EACH_ISA(kernels)
    {
        kernels.index_scores(q, 4, 24, pages, 7, 8, 20, got);
        for (int b = 0; b < 20; b++)
            check_close(got[b], want[b], 4, 1e-6, "index_scores");
    }
    for (int p = 0; p < 3; p++)
        free(pages[p]);
    free(q);
}

TEST(convolution_equals_reference_in_place_and_in_pieces)
{
    static const struct {
        uint32_t channels, taps, dilation, rows;
    } table[] = {{20, 4, 1, 1}, {37, 4, 3, 2},  {16, 4, 3, 25}, {9, 1, 1, 3},
                 {40, 2, 8, 5}, {11, 8, 8, 70}, {24, 4, 1, 0}};
    struct ft_kernels kernels, ref = reference();
    for (size_t s = 0; s < sizeof table / sizeof table[0]; s++) {
        uint32_t c = table[s].channels, rows = table[s].rows, depth = (table[s].taps - 1) * table[s].dilation;
        size_t n = (size_t)rows * c, tail_n = (size_t)depth * c;
        float *x = random_floats(n), *w = random_floats((size_t)c * table[s].taps),
              *tail = random_floats(tail_n);
        float *want = malloc(n * 4 + 4), *want_tail = malloc(tail_n * 4 + 4), *got = malloc(n * 4 + 4),
              *got_tail = malloc(tail_n * 4 + 4);
        memcpy(want_tail, tail, tail_n * 4);
        ref.conv_silu(x, c, rows, 0, c, c, w, table[s].taps, table[s].dilation, want_tail, want, c);
        FOR_EACH_ISA(kernels)
        {
            memcpy(got, x, n * 4);
            memcpy(got_tail, tail, tail_n * 4);
            kernels.conv_silu(got, c, rows, 0, 5, c, w, table[s].taps, table[s].dilation, got_tail, got, c);
            kernels.conv_silu(got, c, rows, 5, c, c, w, table[s].taps, table[s].dilation, got_tail, got, c);
            for (size_t i = 0; i < n; i++)
                check_close(got[i], want[i], 4, 1e-6, "conv_silu");
            CHECK(memcmp(got_tail, want_tail, tail_n * 4) == 0);
            /* row by row gives the same bits */
            float *single = malloc(n * 4 + 4);
            memcpy(got_tail, tail, tail_n * 4);
            for (uint32_t r = 0; r < rows; r++)
                kernels.conv_silu(x + (size_t)r * c, c, 1, 0, c, c, w, table[s].taps, table[s].dilation,
                                  got_tail, single + (size_t)r * c, c);
            CHECK(memcmp(single, got, n * 4) == 0);
            CHECK(memcmp(got_tail, want_tail, tail_n * 4) == 0);
            free(single);
        }
        free(x);
        free(w);
        free(tail);
        free(want);
        free(want_tail);
        free(got);
        free(got_tail);
    }
}

TEST(delta_rule_equals_reference_and_continues_from_its_state)
{
    static const struct {
        uint32_t key_heads, value_heads, key_dim, value_dim, rows;
        enum ft_activation gate;
    } table[] = {{1, 1, 8, 16, 3, FT_ACTIVATION_SILU},
                 {2, 6, 32, 48, 9, FT_ACTIVATION_SIGMOID},
                 {2, 4, 128, 128, 70, FT_ACTIVATION_SILU},
                 {1, 2, 12, 10, 4, FT_ACTIVATION_SIGMOID},
                 {1, 1, 16, 16, 0, FT_ACTIVATION_SIGMOID}};
    struct ft_kernels kernels, ref = reference();
    for (size_t s = 0; s < sizeof table / sizeof table[0]; s++) {
        uint32_t vh = table[s].value_heads, kd = table[s].key_dim, vd = table[s].value_dim,
                 rows = table[s].rows;
        size_t qkv = 2 * (size_t)table[s].key_heads * kd + (size_t)vh * vd, out_n = (size_t)rows * vh * vd;
        size_t state_n = (size_t)vh * kd * vd;
        float *x = random_floats(rows * qkv), *z = random_floats(out_n),
              *ba = random_floats(2 * (size_t)rows * vh);
        float *heads = random_floats(2 * vh), *norm = random_floats(vd), *state = random_floats(state_n);
        float *want = malloc(out_n * 4 + 4), *want_state = malloc(state_n * 4), *got = malloc(out_n * 4 + 4),
              *got_state = malloc(state_n * 4);
        struct ft_delta_args args = {.qkv = x,
                                     .qkv_stride = qkv,
                                     .z = z,
                                     .b = ba,
                                     .a = ba + (size_t)rows * vh,
                                     .z_stride = (size_t)vh * vd,
                                     .b_stride = vh,
                                     .a_stride = vh,
                                     .a_log = heads,
                                     .dt_bias = heads + vh,
                                     .norm = norm,
                                     .state = want_state,
                                     .out = want,
                                     .out_stride = (size_t)vh * vd,
                                     .rows = rows,
                                     .head_begin = 0,
                                     .head_end = vh,
                                     .key_heads = table[s].key_heads,
                                     .value_heads = vh,
                                     .key_dim = kd,
                                     .value_dim = vd,
                                     .eps = 1e-6f,
                                     .gate = table[s].gate};
        memcpy(want_state, state, state_n * 4);
        ref.delta_rule(&args);
        FOR_EACH_ISA(kernels)
        {
            struct ft_delta_args part = args;
            part.state = got_state;
            part.out = got;
            memcpy(got_state, state, state_n * 4);
            for (uint32_t h = 0; h < vh; h++) {
                part.head_begin = h;
                part.head_end = h + 1;
                kernels.delta_rule(&part);
            }
            for (size_t i = 0; i < out_n; i++)
                check_close(got[i], want[i], fabs((double)want[i]) + 1, 1e-5, "delta_rule");
            for (size_t i = 0; i < state_n; i++)
                check_close(got_state[i], want_state[i], 1, 1e-5, "delta state");
            /* row by row gives the same bits */
            float *single = malloc(out_n * 4 + 4), *single_state = malloc(state_n * 4);
            memcpy(single_state, state, state_n * 4);
            for (uint32_t r = 0; r < rows; r++) {
                part = args;
                part.rows = 1;
                part.qkv += r * qkv;
                part.z += (size_t)r * vh * vd;
                part.b += (size_t)r * vh;
                part.a += (size_t)r * vh;
                part.out = single + (size_t)r * vh * vd;
                part.state = single_state;
                kernels.delta_rule(&part);
            }
            CHECK(memcmp(single, got, out_n * 4) == 0);
            CHECK(memcmp(single_state, got_state, state_n * 4) == 0);
            free(single);
            free(single_state);
        }
        free(x);
        free(z);
        free(ba);
        free(heads);
        free(norm);
        free(state);
        free(want);
        free(want_state);
        free(got);
        free(got_state);
    }
}

TEST(rotate_axpy_and_dot_equal_reference)
{
    struct ft_kernels kernels, ref = reference();
    for (uint32_t n = 0; n < 70; n = n * 2 + 1) {
        float *x = random_floats(2 * n), *cs = random_floats(n), *sn = random_floats(n);
        float *want = malloc(2 * n * 4 + 4), *got = malloc(2 * n * 4 + 4);
        memcpy(want, x, 2 * n * 4);
        ref.rotate(want, cs, sn, n);
        ref.axpy(0.3f, cs, want, n);
        FOR_EACH_ISA(kernels)
        {
            memcpy(got, x, 2 * n * 4);
            kernels.rotate(got, cs, sn, n);
            kernels.axpy(0.3f, cs, got, n);
            for (uint32_t i = 0; i < 2 * n; i++)
                check_close(got[i], want[i], 2, 2e-7, "rotate, axpy");
            check_close(kernels.dot(cs, sn, n), ref.dot(cs, sn, n), n, 2e-7, "dot");
        }
        free(x);
        free(cs);
        free(sn);
        free(want);
        free(got);
    }
}

TEST(gate_activations_are_accurate_over_their_whole_range)
{
    /* expert_up with unit weights turns x into silu(x) * 1: the vector exponential through its only door */
    struct ft_kernels kernels;
    float weight[2] = {1, 0}, x, bias = 1, h;
    struct ft_matrix gate = {.data = weight, .out = 1, .in = 1, .format = FT_FORMAT_F32, .global = 1},
                     up = gate;
    up.data = weight + 1;
    struct ft_expert expert = {.gate = gate, .up = up, .up_bias = &bias, .activation = FT_ACTIVATION_SILU};
    FOR_EACH_ISA(kernels)
    {
        for (float v = -120; v < 120; v += 0.37f) {
            x = v;
            kernels.expert_up(&expert, 0, 1, (struct ft_rows){.x = &x, .stride = 1, .count = 1}, &h, 1);
            double want = (double)v / (1 + exp(-(double)v));
            check_close(h, (float)want, fabs(want) + 1e-30, 5e-7,
                        "silu"); /* results below the normal range may be 0 */
        }
    }
}

TEST(unknown_isa_is_refused_and_automatic_choice_works)
{
    struct ft_kernels kernels;
    struct ft_error err;
    CHECK_FAILS(ft_kernels_init(&kernels, "mmx", &err), FT_USAGE, "\"mmx\"", &err);
    CHECK_OK(ft_kernels_init(&kernels, NULL, &err), &err);
    CHECK_OK(ft_kernels_init(&kernels, "", &err), &err);
    CHECK(ft_isa_is_available(kernels.isa));
    CHECK(ft_isa_is_available(FT_ISA_REF));
    CHECK(strcmp(ft_isa_name(FT_ISA_AVX2), "avx2") == 0);
}

TEST_MAIN(RUN(matmul_equals_reference_for_every_format_and_shape)
              RUN(matmul_bits_do_not_depend_on_grouping_or_tiling)
                  RUN(nan_in_weights_scales_and_activations_reaches_the_result)
                      RUN(experts_equal_reference_and_bits_do_not_depend_on_grouping)
                          RUN(row_decode_mix_and_norm_equal_reference)
                              RUN(attention_equals_reference_and_does_not_depend_on_pages)
                                  RUN(attention_with_large_scores_nan_and_nothing_visible)
                                      RUN(index_scores_equal_reference)
                                          RUN(convolution_equals_reference_in_place_and_in_pieces)
                                              RUN(delta_rule_equals_reference_and_continues_from_its_state)
                                                  RUN(rotate_axpy_and_dot_equal_reference) RUN(
                                                      gate_activations_are_accurate_over_their_whole_range)
                                                      RUN(unknown_isa_is_refused_and_automatic_choice_works))
