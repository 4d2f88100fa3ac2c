/* SPDX-License-Identifier: Apache-2.0 */
/* The cases of the kernel benchmark: how a bank is cut for an op, what one unit of it computes, how far off
 * it is. */
#include "graph/graph.h"
#include "kernels_cpu/bench_internal.h"
#include "kernels_cpu/kernels_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TILE_ROWS 128 /* output rows per call of a dense matrix */
#define EXPERTS 10 /* of a layer on the CPU: experts are cut as a decode step on all threads cuts so many */
#define BLOCK 128  /* fp8_block */
#define MATRIX_ROWS 512 /* of one dense matrix */
#define STREAMS 4       /* of the mixers; their low rank: */
#define LOWRANK 320
#define HEAD_DIM 256 /* attention: a group of query heads on one KV head, over pages of a context */
#define GROUP 12
#define PAGE_TOKENS 64
#define PAGES 16
#define INDEX_HEADS 4 /* indexer: heads and blocks of raw keys */
#define INDEX_DIM 128
#define INDEX_PAGE_BLOCKS 16
#define INDEX_PAGES 256
#define KEY_HEADS 16 /* delta rule: states of one layer */
#define VALUE_HEADS 32
#define STATE_DIM 128
#define SAMPLE 512 /* outputs compared with the reference, of all rows together */

static const struct {
    enum ft_bench_op op;
    enum ft_format format;
} cases[] = {
    {FT_BENCH_EXPERT, FT_FORMAT_NVFP4},     {FT_BENCH_EXPERT, FT_FORMAT_BF16},
    {FT_BENCH_EXPERT, FT_FORMAT_FP8_BLOCK}, {FT_BENCH_EXPERT, FT_FORMAT_MXFP4},
    {FT_BENCH_EXPERT, FT_FORMAT_DS_FP4},    {FT_BENCH_MATMUL, FT_FORMAT_BF16},
    {FT_BENCH_MATMUL, FT_FORMAT_F32},       {FT_BENCH_MATMUL, FT_FORMAT_FP8_BLOCK},
    {FT_BENCH_MIX_UP, FT_FORMAT_BF16},      {FT_BENCH_ATTENTION, FT_FORMAT_F32},
    {FT_BENCH_SCORES, FT_FORMAT_F32},       {FT_BENCH_DELTA, FT_FORMAT_F32},
};

uint32_t ft_bench_case_count(void)
{
    return sizeof cases / sizeof cases[0];
}

void ft_bench_case_get(uint32_t index, enum ft_bench_op *op, enum ft_format *format)
{
    *op = cases[index].op;
    *format = cases[index].format;
}

bool ft_bench_op_has_rows(enum ft_bench_op op)
{
    return op == FT_BENCH_EXPERT || op == FT_BENCH_MATMUL || op == FT_BENCH_MIX_UP;
}

const char *ft_bench_op_name(enum ft_bench_op op)
{
    static const char *const names[FT_BENCH_OP_COUNT] = {
#define FT_BENCH_OP_NAME(name, text) text,
        FT_BENCH_OPS(FT_BENCH_OP_NAME)
#undef FT_BENCH_OP_NAME
    };
    return (unsigned)op < FT_BENCH_OP_COUNT ? names[op] : "?";
}

static uint64_t widest_row(uint32_t hidden, uint32_t width)
{
    uint64_t delta = (2ull * KEY_HEADS + VALUE_HEADS) * STATE_DIM;
    return FT_MAX(FT_MAX((uint64_t)STREAMS * hidden + LOWRANK, width), delta + VALUE_HEADS * (STATE_DIM + 2));
}

uint64_t ft_bench_case_x_count(const struct ft_bench_kernels_options *options)
{
    return FT_BENCH_ROWS_MAX * widest_row(options->hidden, options->width);
}

uint64_t ft_bench_case_scratch_count(const struct ft_bench_kernels_options *options)
{
    uint64_t rows = FT_BENCH_ROWS_MAX * ((uint64_t)options->hidden + options->width + TILE_ROWS);
    uint64_t other = VALUE_HEADS * STATE_DIM + INDEX_PAGES * INDEX_PAGE_BLOCKS + GROUP * HEAD_DIM;
    return ft_round_up(FT_MAX(rows, other) + 64, 64);
}

/* ---- data ---- */

/* Weights of magnitude 2^-7 .. 2, never zero or NaN where the format can say so. */
static void fill_weights(enum ft_format format, void *data, uint64_t bytes, uint64_t seed)
{
    switch (format) {
    case FT_FORMAT_F32:
        ft_bench_fill(data, bytes, 0x83ffffff83ffffffu, 0x3c0000003c000000u, seed);
        break;
    case FT_FORMAT_BF16:
        ft_bench_fill(data, bytes, 0x83ff83ff83ff83ffu, 0x3c003c003c003c00u, seed);
        break;
    case FT_FORMAT_FP8_BLOCK:
        ft_bench_fill(data, bytes, 0xb7b7b7b7b7b7b7b7u, 0x0808080808080808u, seed);
        break;
    default: /* every pair of e2m1 codes is a pair of numbers */
        ft_bench_fill(data, bytes, UINT64_MAX, 0, seed);
    }
}

static void fill_scales(enum ft_format format, void *scale, uint64_t bytes, uint64_t seed)
{
    if (format == FT_FORMAT_NVFP4)
        ft_bench_fill(scale, bytes, 0x0f0f0f0f0f0f0f0fu, 0x3030303030303030u, seed);
    else if (format == FT_FORMAT_FP8_BLOCK)
        ft_bench_fill(scale, bytes, 0x007fffff007fffffu, 0x3c0000003c000000u, seed);
    else
        ft_bench_fill(scale, bytes, 0x0707070707070707u, 0x7878787878787878u, seed);
}

static void fill_expert(const struct ft_expert_layout *layout, uint8_t *blob, uint64_t seed)
{
    const float globals[3] = {0.02f, 0.02f, 0.02f};
    uint32_t scale_end = layout->global_offset == FT_NONE ? layout->bytes : layout->global_offset;
    bool scaled = layout->gate_scale_offset != FT_NONE;
    fill_weights(layout->format, blob, scaled ? layout->gate_scale_offset : layout->bytes, seed);
    if (scaled)
        fill_scales(layout->format, blob + layout->gate_scale_offset, scale_end - layout->gate_scale_offset,
                    seed);
    if (layout->global_offset != FT_NONE)
        memcpy(blob + layout->global_offset, globals, sizeof globals);
}

static uint8_t *unit_at(const struct ft_bench_case *c, uint32_t unit)
{
    return c->bank->data + unit * c->unit_stride;
}

/* One dense matrix: data, then scales. */
static struct ft_matrix matrix_at(const struct ft_bench_case *c, uint32_t unit)
{
    uint64_t data, scale;
    bool mix = c->op == FT_BENCH_MIX_UP, fp8 = c->format == FT_FORMAT_FP8_BLOCK;
    struct ft_matrix m = {.data = unit_at(c, unit),
                          .out = mix ? STREAMS * c->hidden : MATRIX_ROWS,
                          .in = mix ? LOWRANK : c->hidden,
                          .format = c->format,
                          .global = 1.0f,
                          .block_out = fp8 ? BLOCK : 0,
                          .block_in = fp8 ? BLOCK : 0};
    (void)ft_matrix_bytes(c->format, m.out, m.in, m.block_out, m.block_in, &data, &scale);
    m.scale = scale ? unit_at(c, unit) + ft_round_up(data, 64) : NULL;
    return m;
}

int ft_bench_case_size(struct ft_bench_case *c, struct ft_error *err)
{
    uint64_t data = 0, scale = 0;
    uint16_t block = c->format == FT_FORMAT_FP8_BLOCK ? BLOCK : 0;
    struct ft_matrix m;
    switch (c->op) {
    case FT_BENCH_EXPERT: {
        int status = ft_expert_layout_init(&c->layout, c->format, c->hidden, c->width, block, block, false,
                                           FT_ACTIVATION_SILU, 0, err);
        c->unit_bytes = c->layout.bytes;
        c->unit_stride = c->layout.stride;
        c->unit_macs = 3.0 * c->hidden * c->width;
        if (status == FT_OK) {
            struct ft_tiling tiling = ft_graph_tiling_of(c->threads);
            ft_graph_expert_tiles(&tiling, &c->layout, EXPERTS, false, &c->ups, &c->downs);
        }
        return status;
    }
    case FT_BENCH_MATMUL:
    case FT_BENCH_MIX_UP:
        m = matrix_at(c, 0);
        if (!ft_matrix_bytes(c->format, m.out, m.in, block, block, &data, &scale))
            return ft_error_set(err, FT_UNSUPPORTED, "rows of %u cannot be held as %s", m.in,
                                ft_format_name(c->format));
        c->unit_bytes = data + scale;
        c->unit_stride = ft_round_up(data, 64) + ft_round_up(scale, 64);
        c->unit_macs = (double)m.out * m.in;
        return FT_OK;
    case FT_BENCH_ATTENTION:
        c->unit_bytes = c->unit_stride = 8ull * PAGES * PAGE_TOKENS * HEAD_DIM;
        c->unit_macs = 2.0 * GROUP * PAGES * PAGE_TOKENS * HEAD_DIM;
        return FT_OK;
    case FT_BENCH_SCORES:
        c->unit_bytes = c->unit_stride = 4ull * INDEX_PAGES * INDEX_PAGE_BLOCKS * INDEX_DIM;
        c->unit_macs = (double)INDEX_HEADS * INDEX_PAGES * INDEX_PAGE_BLOCKS * INDEX_DIM;
        return FT_OK;
    default:
        c->unit_stride = 4ull * VALUE_HEADS * STATE_DIM * STATE_DIM;
        c->unit_bytes = 2 * c->unit_stride; /* read and written */
        c->unit_macs = 3.0 * VALUE_HEADS * STATE_DIM * STATE_DIM;
        return FT_OK;
    }
}

int ft_bench_case_prepare(struct ft_bench_case *c, uint64_t seed, struct ft_error *err)
{
    int status = ft_bench_case_size(c, err);
    if (status != FT_OK)
        return status;
    c->unit_count = (uint32_t)FT_MIN(c->bank->bytes / c->unit_stride, 1u << 24);
    if (!c->unit_count)
        return ft_error_set(err, FT_LIMIT, "a bank of %llu bytes is too small for %s, which takes %llu",
                            (unsigned long long)c->bank->bytes, ft_bench_op_name(c->op),
                            (unsigned long long)c->unit_stride);
    c->order = malloc(c->unit_count * sizeof *c->order);
    c->regions = malloc(c->unit_count * sizeof *c->regions);
    if (!c->order || !c->regions)
        return ft_error_set(err, FT_MEMORY, "no memory for an order of %u units", c->unit_count);
    for (uint32_t i = 0; i < c->unit_count; i++) {
        uint64_t word;
        if (c->op == FT_BENCH_EXPERT) {
            fill_expert(&c->layout, unit_at(c, i), seed + i);
        } else {
            struct ft_matrix m = {0};
            if (ft_bench_op_has_rows(c->op))
                m = matrix_at(c, i);
            fill_weights(c->format, unit_at(c, i), c->unit_stride, seed + i);
            if (m.scale)
                fill_scales(c->format, (void *)(uintptr_t)m.scale,
                            c->unit_stride - (uint64_t)((const uint8_t *)m.scale - unit_at(c, i)), seed + i);
        }
        ft_bench_fill(&word, sizeof word, UINT64_MAX, 0, seed + i);
        uint32_t j = (uint32_t)(word % (i + 1)); /* Fisher and Yates, from the front */
        c->order[i] = c->order[j];
        c->order[j] = i;
    }
    for (uint32_t i = 0; i < c->unit_count; i++)
        c->regions[i] = (struct ft_bench_region){unit_at(c, c->order[i]), c->unit_stride};
    return FT_OK;
}

void ft_bench_case_fini(struct ft_bench_case *c)
{
    free(c->order);
    free(c->regions);
}

/* ---- one unit ---- */

static struct ft_rows rows_of(const struct ft_bench_case *c, const float *x, uint32_t stride)
{
    return (struct ft_rows){.x = x, .stride = stride, .count = c->rows};
}

static void run_expert(const struct ft_bench_case *c, const struct ft_kernels *k, uint32_t unit, float *h)
{
    struct ft_expert expert;
    float *y = h + (size_t)FT_BENCH_ROWS_MAX * c->width;
    uint32_t begin, end;
    ft_expert_view(&c->layout, unit_at(c, unit), &expert);
    for (uint32_t t = 0; t < c->ups; t++) {
        ft_graph_tile_range(c->width, c->ups, t, &begin, &end);
        k->expert_up(&expert, begin, end, rows_of(c, c->x, c->hidden), h, c->width);
    }
    for (uint32_t t = 0; t < c->downs; t++) {
        ft_graph_tile_range(c->hidden, c->downs, t, &begin, &end);
        k->expert_down(&expert, begin, end, rows_of(c, h, c->width), NULL, y, c->hidden);
    }
}

static void run_matmul(const struct ft_bench_case *c, const struct ft_kernels *k, uint32_t unit, float *y)
{
    struct ft_matrix m = matrix_at(c, unit);
    for (uint32_t o = 0; o < m.out; o += TILE_ROWS) /* into a window of TILE_ROWS columns */
        k->matmul(&m, o, o + TILE_ROWS, rows_of(c, c->x, c->hidden), NULL, y, TILE_ROWS);
}

static void run_mix_up(const struct ft_bench_case *c, const struct ft_kernels *k, uint32_t unit, float *y)
{
    struct ft_matrix m = matrix_at(c, unit);
    const float *t = c->x + (size_t)FT_BENCH_ROWS_MAX * STREAMS * c->hidden;
    k->mix_up(&m, STREAMS, c->hidden, 0, c->hidden, t, LOWRANK, c->x, (size_t)STREAMS * c->hidden, c->rows, y,
              c->hidden);
}

static void run_attention(const struct ft_bench_case *c, const struct ft_kernels *k, uint32_t unit, float *y)
{
    float *pages[PAGES], *data = (float *)(void *)unit_at(c, unit);
    for (uint32_t p = 0; p < PAGES; p++)
        pages[p] = data + (size_t)p * 2 * PAGE_TOKENS * HEAD_DIM;
    struct ft_attention_row row = {
        .kv = {pages, 0, PAGE_TOKENS * HEAD_DIM, PAGE_TOKENS, 1, HEAD_DIM},
        .q = c->x,
        .out = y,
        .position = PAGES * PAGE_TOKENS - 1,
        .group = GROUP,
        .scale = 1.0f / 16,
    };
    k->attention_row(&row);
}

static void run_scores(const struct ft_bench_case *c, const struct ft_kernels *k, uint32_t unit, float *y)
{
    float *pages[INDEX_PAGES], *data = (float *)(void *)unit_at(c, unit);
    for (uint32_t p = 0; p < INDEX_PAGES; p++)
        pages[p] = data + (size_t)p * INDEX_PAGE_BLOCKS * INDEX_DIM;
    k->index_scores(c->x, INDEX_HEADS, INDEX_DIM, pages, 0, INDEX_PAGE_BLOCKS,
                    INDEX_PAGES * INDEX_PAGE_BLOCKS, y);
}

static void run_delta(const struct ft_bench_case *c, const struct ft_kernels *k, float *state, float *y)
{
    const uint32_t channels = (2 * KEY_HEADS + VALUE_HEADS) * STATE_DIM, values = VALUE_HEADS * STATE_DIM;
    const float *z = c->x + channels;
    struct ft_delta_args args = {
        .qkv = c->x,
        .z = z,
        .b = z + values,
        .a = z + values + VALUE_HEADS,
        .a_log = c->x,
        .dt_bias = c->x,
        .norm = c->x,
        .state = state,
        .out = y,
        .rows = 1,
        .head_end = VALUE_HEADS,
        .key_heads = KEY_HEADS,
        .value_heads = VALUE_HEADS,
        .key_dim = STATE_DIM,
        .value_dim = STATE_DIM,
        .eps = 1e-6f,
        .gate = FT_ACTIVATION_SILU,
    };
    k->delta_rule(&args);
}

static void run_unit(const struct ft_bench_case *c, const struct ft_kernels *k, uint32_t unit, float *scratch)
{
    switch (c->op) {
    case FT_BENCH_EXPERT:
        run_expert(c, k, unit, scratch);
        break;
    case FT_BENCH_MATMUL:
        run_matmul(c, k, unit, scratch);
        break;
    case FT_BENCH_MIX_UP:
        run_mix_up(c, k, unit, scratch);
        break;
    case FT_BENCH_ATTENTION:
        run_attention(c, k, unit, scratch);
        break;
    case FT_BENCH_SCORES:
        run_scores(c, k, unit, scratch);
        break;
    default:
        run_delta(c, k, (float *)(void *)unit_at(c, unit), scratch);
    }
}

void ft_bench_case_pass(void *context, uint32_t number, uint32_t count)
{
    const struct ft_bench_case *c = context;
    float *scratch = c->scratch + number * c->scratch_stride;
    uint32_t begin = (uint32_t)((uint64_t)c->pass_units * number / count);
    uint32_t end = (uint32_t)((uint64_t)c->pass_units * (number + 1) / count);
    for (uint32_t i = begin; i < end; i++)
        run_unit(c, c->kernels, c->order[i], scratch);
}

/* ---- errors ---- */

struct error {
    double largest, error; /* |reference|, |result - reference| */
};

/* Compares `count` outputs of one row. */
static void compare(struct error *e, const float *got, const float *want, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        double distance = fabs((double)got[i] - (double)want[i]);
        e->largest = fmax(e->largest, fabs((double)want[i]));
        if (isnan(distance) || distance > e->error)
            e->error = distance; /* nothing is larger than NaN: it stays */
    }
}

static double error_of(const struct error *e)
{
    return e->largest > 0 ? e->error / e->largest : e->error;
}

/* How many of `outputs` are compared in each row. */
static uint32_t sample_of(const struct ft_bench_case *c, uint32_t outputs)
{
    return FT_MIN(outputs, SAMPLE / c->rows);
}

/* The unit as it is timed. Down is compared on the h of this version, so that one error is not fed into the other. */
static double expert_error(const struct ft_bench_case *c, const struct ft_kernels *ref)
{
    struct ft_expert expert;
    struct error up = {0}, down = {0};
    float want[SAMPLE], *h = c->scratch, *y = h + (size_t)FT_BENCH_ROWS_MAX * c->width;
    uint32_t ups = sample_of(c, c->width), downs = sample_of(c, c->hidden);
    ft_expert_view(&c->layout, unit_at(c, 0), &expert);
    run_expert(c, c->kernels, 0, c->scratch);
    for (uint32_t r = 0; r < c->rows; r++) {
        struct ft_rows x_row = {.x = c->x + (size_t)r * c->hidden, .count = 1};
        struct ft_rows h_row = {.x = h + (size_t)r * c->width, .count = 1};
        ref->expert_up(&expert, 0, ups, x_row, want, 0);
        compare(&up, h_row.x, want, ups);
        ref->expert_down(&expert, 0, downs, h_row, NULL, want, 0);
        compare(&down, y + (size_t)r * c->hidden, want, downs);
    }
    double up_error = error_of(&up), down_error = error_of(&down);
    return isnan(up_error) || up_error > down_error ? up_error : down_error; /* fmax would drop a NaN */
}

/* In the last tile, over which run_matmul writes no other. */
static double matmul_error(const struct ft_bench_case *c, const struct ft_kernels *ref)
{
    struct error error = {0};
    float want[MATRIX_ROWS];
    struct ft_matrix m = matrix_at(c, 0);
    uint32_t begin = m.out - TILE_ROWS, count = sample_of(c, TILE_ROWS);
    run_matmul(c, c->kernels, 0, c->scratch);
    for (uint32_t r = 0; r < c->rows; r++) {
        struct ft_rows row = {.x = c->x + (size_t)r * c->hidden, .count = 1};
        ref->matmul(&m, begin, begin + count, row, NULL, want, 0);
        compare(&error, c->scratch + (size_t)r * TILE_ROWS + begin, want + begin, count);
    }
    return error_of(&error);
}

static double mix_up_error(const struct ft_bench_case *c, const struct ft_kernels *ref)
{
    struct error error = {0};
    float want[SAMPLE];
    struct ft_matrix m = matrix_at(c, 0);
    uint32_t count = sample_of(c, c->hidden);
    const size_t stride = (size_t)STREAMS * c->hidden;
    const float *t = c->x + FT_BENCH_ROWS_MAX * stride;
    run_mix_up(c, c->kernels, 0, c->scratch);
    for (uint32_t r = 0; r < c->rows; r++) {
        ref->mix_up(&m, STREAMS, c->hidden, 0, count, t + r * LOWRANK, 0, c->x + r * stride, 0, 1, want, 0);
        compare(&error, c->scratch + (size_t)r * c->hidden, want, count);
    }
    return error_of(&error);
}

/* All outputs of an op of one row. */
static int whole_error(const struct ft_bench_case *c, const struct ft_kernels *ref, double *error,
                       struct ft_error *err)
{
    static const uint32_t counts[FT_BENCH_OP_COUNT] = {
        [FT_BENCH_ATTENTION] = GROUP * HEAD_DIM,
        [FT_BENCH_SCORES] = INDEX_PAGES * INDEX_PAGE_BLOCKS,
        [FT_BENCH_DELTA] = VALUE_HEADS * STATE_DIM,
    };
    struct error difference = {0};
    float *want = malloc(c->scratch_stride * sizeof *want);
    float *state = malloc(c->unit_stride);
    if (!want || !state) {
        free(want);
        free(state);
        return ft_error_set(err, FT_MEMORY, "no memory to compare with the reference");
    }
    if (c->op == FT_BENCH_DELTA) { /* the state changes: both start from the same */
        memcpy(state, unit_at(c, 0), c->unit_stride);
        run_delta(c, ref, state, want);
    } else {
        run_unit(c, ref, 0, want);
    }
    run_unit(c, c->kernels, 0, c->scratch);
    compare(&difference, c->scratch, want, counts[c->op]);
    *error = error_of(&difference);
    free(want);
    free(state);
    return FT_OK;
}

int ft_bench_case_error(const struct ft_bench_case *c, double *error, struct ft_error *err)
{
    struct ft_kernels ref;
    ft_kernels_fill_ref(&ref);
    if (c->op == FT_BENCH_EXPERT)
        *error = expert_error(c, &ref);
    else if (c->op == FT_BENCH_MATMUL)
        *error = matmul_error(c, &ref);
    else if (c->op == FT_BENCH_MIX_UP)
        *error = mix_up_error(c, &ref);
    else
        return whole_error(c, &ref, error, err);
    return FT_OK;
}
