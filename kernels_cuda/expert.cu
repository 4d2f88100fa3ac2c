/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts of a decode step: few rows per expert, so the weights are what moves, and each is read once for its
 * rows.
 *
 * Two kernels. Up: a block computes 16 hidden units of one expert, each warp half of the columns of 8; the upper
 * half of its tile are rows of the gate, the lower half those of the up projection. Down: a warp computes 16
 * outputs. Blocks of groups that do not exist end after one read. Weights are asked for before the activations
 * are looked at; the down kernel's before the up kernel has ended.
 *
 * The matrix units multiply: A = 16 weight rows, decoded to bf16, which is exact (expert_weights.cuh); B =
 * activations, each the exact sum of three bf16 pieces that take a column each, so up to 2 rows fit the
 * unit's 8 columns and 5 rows
 * 16. A sum of a unit's columns (a quad's 16-byte loads side by side) is then added to an f32 register: the
 * matrix unit cuts bits off long sums, additions round. The order depends on the matrix alone: not on the
 * rows beside a row.
 *
 *   lane = 4 g + t: 16 bytes of weight rows g and g + 8 from column (unit * 4 + t) * run; piece column g of B
 */
#include "kernels_cuda/expert_args.cuh"
#include "kernels_cuda/rows_dot.cuh"

#define TILE 16u /* weight rows of a warp's tile */
#define UP_THREADS 128u
#define UP_PARTS 2u /* warps that share a tile's columns */
#define UP_TILES 2u /* of a block */
#define UP_UNITS (TILE / 2 * UP_TILES)
#define UP_BLOCKS 5 /* that a multiprocessor holds at once: 96 registers a thread */
#define DOWN_THREADS 128u
#define DOWN_BLOCKS 5
#define SHARED_OUTS 4 /* of the shared expert, per warp: all blocks of the main model fit at once */
#define DOWN_WARPS (DOWN_THREADS / 32)
#define FLIGHT 5u       /* units whose loads are under way per warp */
#define ROWS_AT_ONCE 5u /* 15 pieces in two tiles of 8 */
#define SHARED_PREFERRED (40u * 1024)
#define SHARED_MAX (60u * 1024) /* with static memory within what sm_75 has */

/* 4-byte words between two piece columns: units of 4 runs, and half the banks further from one to the next.
 */
static __host__ __device__ __forceinline__ uint32_t column_words(uint32_t in, uint32_t run)
{
    uint32_t words = (in + 4 * run - 1) / (4 * run) * (2 * run);
    return (words + 31) / 32 * 32 + 16;
}

/* ---- activations to shared memory ---- */

/*
 * Rows from[index[first + i]] (index NULL: first + i) as pieces: piece p of row i in column 3 i + p; within a
 * column unit by unit the pairs of all four lanes t, four pairs at a time: [unit][run / 8][t][4].
 */
template <int kind>
static __device__ void stage(uint32_t *pieces, const float *from, const uint32_t *index, uint32_t first,
                             uint32_t count, uint32_t in)
{
    constexpr uint32_t run = ft_expert_run<kind>(), parts = run / 8;
    uint32_t words = column_words(in, run), eights = (in + 4 * run - 1) / (4 * run) * (run / 2);
    for (uint32_t i = threadIdx.x; i < count * eights; i += blockDim.x) {
        uint32_t row = i / eights, eight = i % eights, k = eight * 8;
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (k < in) {
            const float *source = from + (uint64_t)(index ? index[first + row] : first + row) * in + k;
            if ((in & 3) == 0) {
                float4 low = __ldcg((const float4 *)source);
                float4 high = k + 4 < in ? __ldcg((const float4 *)source + 1) : make_float4(0, 0, 0, 0);
                v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
                v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
            } else {
                for (uint32_t j = 0; j < 8; j++)
                    v[j] = k + j < in ? __ldcg(source + j) : 0.0f;
            }
        }
        uint32_t out[3][4];
#pragma unroll
        for (uint32_t n = 0; n < 4; n++) {
            uint32_t low[3], high[3];
            ft_dense_split(v[ft_expert_first<kind>(n)], low);
            ft_dense_split(v[ft_expert_first<kind>(n) + ft_expert_step<kind>()], high);
#pragma unroll
            for (uint32_t p = 0; p < 3; p++)
                out[p][n] = __byte_perm(low[p], high[p], 0x7632);
        }
        uint32_t unit = k / (4 * run), t = k / run % 4, part = k % run / 8;
#pragma unroll
        for (uint32_t p = 0; p < 3; p++)
            *(uint4 *)(pieces + (row * 3 + p) * words + (unit * parts + part) * 16 + t * 4) =
                make_uint4(out[p][0], out[p][1], out[p][2], out[p][3]);
    }
}

/* ---- a warp's tile ---- */

/* Where the two halves of a warp's 16 weight rows lie: row g and row g + 8 of lane 4 g + t. */
struct tile_rows {
    struct ft_expert_matrix m[2];
    uint32_t row[2];
};

/* Asks for unit `unit` of both rows; from `end` on it is zero and unread. */
template <int kind>
static __device__ __forceinline__ void ask_unit(struct ft_expert_raw raw[2], const struct ft_expert_layout *layout,
                                                const struct tile_rows *w, uint32_t unit, uint32_t end)
{
    uint32_t k = unit < end ? (unit * 4 + (threadIdx.x & 3)) * ft_expert_run<kind>() : w->m[0].in;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++)
        raw[half] = ft_expert_load<kind>(layout, &w->m[half], w->row[half], k);
}
/* Asks for the first FLIGHT units from `begin`. */
template <int kind>
static __device__ __forceinline__ void ask(struct ft_expert_raw raw[FLIGHT][2],
                                           const struct ft_expert_layout *layout, const struct tile_rows *w,
                                           uint32_t begin, uint32_t end)
{
#pragma unroll
    for (uint32_t i = 0; i < FLIGHT; i++)
        ask_unit<kind>(raw[i], layout, w, begin + i, end);
}

/* Pairs of both halves of part `part` times the pieces in `column`, added to `unit`. */
template <int kind, int tiles>
static __device__ __forceinline__ void multiply_part(float unit[tiles][4], const struct ft_expert_raw raw[2],
                                                     uint32_t part, const uint32_t *const column[tiles],
                                                     uint32_t at)
{
    uint32_t a[2][4];
    ft_expert_pairs<kind>(&raw[0], part, a[0]);
    ft_expert_pairs<kind>(&raw[1], part, a[1]);
    uint32_t front[4] = {a[0][0], a[1][0], a[0][1], a[1][1]};
    uint32_t back[4] = {a[0][2], a[1][2], a[0][3], a[1][3]};
#pragma unroll
    for (int c = 0; c < tiles; c++) {
        uint4 b = *(const uint4 *)(column[c] + at);
        uint32_t b_front[2] = {b.x, b.y}, b_back[2] = {b.z, b.w};
        ft_mma_bf16(unit[c], front, b_front);
        ft_mma_bf16(unit[c], back, b_back);
    }
}

/* sum[c] += the tile's rows times the pieces, over units [begin, end); fragments of ft_mma_bf16. `raw` holds
 * the first FLIGHT units already. */
template <int kind, int tiles>
static __device__ __forceinline__ void
multiply(float sum[tiles][4], struct ft_expert_raw raw[FLIGHT][2], const struct ft_expert_layout *layout,
         const struct tile_rows *w, uint32_t begin, uint32_t end, const uint32_t *pieces, uint32_t columns)
{
    constexpr uint32_t run = ft_expert_run<kind>(), parts = run / 8;
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, words = column_words(w->m[0].in, run);
    const uint32_t *column[tiles];
#pragma unroll
    for (int c = 0; c < tiles;
         c++) /* columns that do not exist read the last one: their sums are not looked at */
        column[c] = pieces + min(c * 8 + g, columns - 1) * words + t * 4;
    for (uint32_t first = begin; first < end;) {
#pragma unroll
        for (uint32_t i = 0; i < FLIGHT; i++) {
            if (first + i >= end)
                break;
            float unit[tiles][4] = {};
#pragma unroll
            for (uint32_t part = 0; part < parts; part++)
                multiply_part<kind, tiles>(unit, raw[i], part, column, ((first + i) * parts + part) * 16);
            float scale[2] = {1.0f, 1.0f};
            if (kind == FT_EXPERT_FP8) { /* one block per unit: lane t 0 always lies inside the row */
                scale[0] = __uint_as_float(__shfl_sync(0xffffffffu, raw[i][0].scale, (int)(lane & ~3u)));
                scale[1] = __uint_as_float(__shfl_sync(0xffffffffu, raw[i][1].scale, (int)(lane & ~3u)));
            }
#pragma unroll
            for (int c = 0; c < tiles; c++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[c][j] = kind == FT_EXPERT_FP8 ? fmaf(unit[c][j], scale[j >> 1], sum[c][j])
                                                      : sum[c][j] + unit[c][j];
            if (first + i + FLIGHT < end)
                ask_unit<kind>(raw[i], layout, w, first + i + FLIGHT, end);
        }
        first += FLIGHT;
    }
}

/* A warp's sums to `put` [16 weight rows][8 tiles]. */
template <int tiles> static __device__ __forceinline__ void put_sums(float *put, const float sum[tiles][4])
{
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int c = 0; c < tiles; c++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            put[(g + (j >> 1) * 8) * (8 * tiles) + c * 8 + 2 * t + (j & 1)] = sum[c][j];
}
/* The three pieces of row r of weight row i, the smallest first. */
template <int tiles>
static __device__ __forceinline__ float take_sum(const float *put, uint32_t i, uint32_t r)
{
    const float *from = put + i * (8 * tiles) + 3 * r;
    return from[2] + from[1] + from[0];
}

/* The rows of group `group` of the list: [begin, end) of its pairs; false: no such group. A list of one row has
 * one pair a group. The address comes with the count, not behind it. */
static __device__ __forceinline__ bool find_group(const struct ft_expert_args *a, uint32_t group,
                                                  uint32_t *begin, uint32_t *end, const char **blob)
{
    uint32_t count = __ldcg(a->list.group_count);
    *begin = group;
    *end = group + 1;
    *blob = group < a->list.groups_max ? (const char *)__ldcg((const unsigned long long *)(a->list.blob + group)) : NULL;
    if (group >= count)
        return false;
    if (!a->one_row) {
        *begin = __ldcg(a->list.pair_begin + group);
        *end = __ldcg(a->list.pair_begin + group + 1);
    }
    return true;
}

/* A block's results: hidden units unit0 .. unit0 + 7 of `rows` pairs from `first` on. */
template <int tiles>
static __device__ __forceinline__ void finish_up(const struct ft_expert_args *a, const float *put,
                                                 const char *blob, uint32_t unit0, uint32_t first,
                                                 uint32_t rows, float gate_factor, float up_factor)
{
    for (uint32_t i = threadIdx.x; i < UP_UNITS * rows; i += UP_THREADS) {
        uint32_t r = i / UP_UNITS, unit = unit0 + i % UP_UNITS, at = i % (TILE / 2);
        const float *from = put + i % UP_UNITS / (TILE / 2) * UP_PARTS * (TILE * 8 * tiles);
        float value[2] = {0.0f, 0.0f};
#pragma unroll
        for (uint32_t w = 0; w < UP_PARTS; w++)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++)
                value[half] += take_sum<tiles>(from + w * (TILE * 8 * tiles), at + half * (TILE / 2), r);
        if (unit >= a->layout.width)
            continue;
        const float *gate_bias = ft_expert_bias(&a->layout, blob, 0),
                    *up_bias = ft_expert_bias(&a->layout, blob, 1);
        float gate = fmaf(value[0], gate_factor, gate_bias ? gate_bias[unit] : 0.0f);
        float up = fmaf(value[1], up_factor, up_bias ? up_bias[unit] : 0.0f);
        a->h[(uint64_t)(first + r) * a->layout.width + unit] = ft_expert_activate(&a->layout, gate, up);
    }
}

template <int kind, int tiles>
static __global__ void __launch_bounds__(UP_THREADS, UP_BLOCKS)
    up_kernel(struct ft_expert_args a, uint32_t rows_at_once)
{
    FT_SHARED_DYNAMIC(uint32_t, pieces);
    FT_SHARED(float, put, UP_TILES *UP_PARTS *TILE * 8 * tiles);
    constexpr uint32_t run = ft_expert_run<kind>();
    uint32_t begin, end, warp = threadIdx.x >> 5, part = warp % UP_PARTS, unit0 = blockIdx.x * UP_UNITS;
    const char *blob;
    if (a.one_row) /* x was there before the kernel in front began (expert_args.cuh) */
        stage<kind>(pieces, a.x, NULL, 0, 1, a.layout.hidden);
    ft_wait_previous();
    ft_begin_next();
    if (a.stamp && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *a.stamp = ft_global_timer();
    if (!find_group(&a, blockIdx.y, &begin, &end, &blob))
        return;
    struct ft_expert_raw raw[FLIGHT][2];
    struct tile_rows w;
    w.m[0] = ft_expert_matrix_of<kind>(&a.layout, blob, 0);
    w.m[1] = ft_expert_matrix_of<kind>(&a.layout, blob, 1);
    w.row[0] = w.row[1] =
        min(unit0 + warp / UP_PARTS * (TILE / 2) + (threadIdx.x >> 2 & 7), a.layout.width - 1);
    uint32_t units = (a.layout.hidden + 4 * run - 1) / (4 * run), share = (units + UP_PARTS - 1) / UP_PARTS;
    uint32_t unit_begin = part * share, unit_end = min(part * share + share, units);
    for (uint32_t first = begin; first < end; first += rows_at_once) {
        uint32_t rows = min(end - first, rows_at_once);
        ask<kind>(raw, &a.layout, &w, unit_begin, unit_end);
        if (!a.one_row) {
            __syncthreads(); /* the pass before has read its pieces */
            stage<kind>(pieces, a.x, a.list.pair_row, first, rows, a.layout.hidden);
        }
        __syncthreads();
        float sum[tiles][4] = {};
        multiply<kind, tiles>(sum, raw, &a.layout, &w, unit_begin, unit_end, pieces, rows * 3);
        put_sums<tiles>(put + warp * (TILE * 8 * tiles), sum);
        __syncthreads(); /* the next pass writes `put` behind two more barriers */
        finish_up<tiles>(&a, put, blob, unit0, first, rows, w.m[0].factor, w.m[1].factor);
    }
}

/* ---- down, and the shared expert's down beside it ---- */

struct shared_args {
    struct ft_matrix down;
    struct ft_rows_x h;
    float *y;
    uint32_t hidden, blocks; /* blocks of the grid in front of the experts'; 0: no shared expert */
};

/* SHARED_OUTS outputs per warp, all rows, four at a time. shared_h was there before the kernel in front began. */
static __device__ void shared_down(const struct shared_args *s)
{
    uint32_t lane = threadIdx.x & 31, row[SHARED_OUTS];
    uint32_t first = (blockIdx.x * DOWN_WARPS + (threadIdx.x >> 5)) * SHARED_OUTS;
    const struct ft_matrix *w[SHARED_OUTS];
    if (first >= s->hidden)
        return;
#pragma unroll
    for (uint32_t o = 0; o < SHARED_OUTS; o++) {
        w[o] = &s->down;
        row[o] = min(first + o, s->hidden - 1);
    }
    for (uint32_t at = 0; at < s->h.rows; at += 4) {
        struct ft_rows_x h = s->h;
        h.x += at * h.stride;
        h.rows -= at;
        float sum[SHARED_OUTS][4];
        if (h.rows == 1) {
            float one[SHARED_OUTS][1];
            ft_rows_dot<1, SHARED_OUTS, 3>(one, w, row, &h, [] {});
#pragma unroll
            for (uint32_t o = 0; o < SHARED_OUTS; o++)
                sum[o][0] = one[o][0];
        } else {
            ft_rows_dot<4, SHARED_OUTS, 1>(sum, w, row, &h, [] {});
        }
#pragma unroll
        for (uint32_t o = 0; o < SHARED_OUTS; o++)
#pragma unroll
            for (uint32_t r = 0; r < 4; r++)
                if (lane == o && r < h.rows && first + o < s->hidden)
                    s->y[(uint64_t)(at + r) * s->hidden + first + o] = sum[o][r];
    }
}

template <int kind, int tiles>
static __global__ void __launch_bounds__(DOWN_THREADS, DOWN_BLOCKS)
    down_kernel(struct ft_expert_args a, struct shared_args s, uint32_t blocks_per_group,
                uint32_t rows_at_once)
{
    FT_SHARED_DYNAMIC(uint32_t, pieces);
    FT_SHARED(float, put, DOWN_WARPS *TILE * 8 * tiles);
    constexpr uint32_t run = ft_expert_run<kind>();
    uint32_t block = blockIdx.x - s.blocks, begin, end, warp = threadIdx.x >> 5;
    const char *blob;
    ft_begin_next();
    if (blockIdx.x < s.blocks) {
        shared_down(&s);
        ft_wait_previous(); /* no block ends before everything in front of it: the kernels behind count on it */
        return;
    }
    uint32_t group = block / blocks_per_group;
    if (!find_group(&a, group, &begin, &end, &blob)) { /* the list was there before the kernel in front began */
        ft_wait_previous();
        return;
    }
    struct ft_expert_raw raw[FLIGHT][2];
    struct tile_rows w;
    uint32_t units = (a.layout.width + 4 * run - 1) / (4 * run), lane = threadIdx.x & 31;
    uint32_t row0 = (block % blocks_per_group * DOWN_WARPS + warp) * TILE;
    w.m[0] = w.m[1] = ft_expert_matrix_of<kind>(&a.layout, blob, 2);
    w.row[0] = min(row0 + (lane >> 2), a.layout.hidden - 1);
    w.row[1] = min(row0 + (lane >> 2) + 8, a.layout.hidden - 1);
    const float *bias = ft_expert_bias(&a.layout, blob, 2);
    for (uint32_t first = begin; first < end; first += rows_at_once) {
        uint32_t rows = min(end - first, rows_at_once);
        ask<kind>(raw, &a.layout, &w, 0, units);
        if (first == begin)
            ft_wait_previous();
        else
            __syncthreads(); /* the pass before has read its pieces */
        stage<kind>(pieces, a.h, NULL, first, rows, a.layout.width);
        __syncthreads();
        float sum[tiles][4] = {};
        multiply<kind, tiles>(sum, raw, &a.layout, &w, 0, units, pieces, rows * 3);
        float *mine = put + warp * (TILE * 8 * tiles);
        put_sums<tiles>(mine, sum);
        __syncwarp();
        for (uint32_t i = lane; i < TILE * rows; i += 32) {
            uint32_t r = i / TILE, out = row0 + i % TILE;
            if (out < a.layout.hidden)
                a.y[(uint64_t)__ldcg(a.list.pair_out + first + r) * a.layout.hidden + out] =
                    fmaf(take_sum<tiles>(mine, i % TILE, r), w.m[0].factor, bias ? bias[out] : 0.0f);
        }
        __syncwarp();
    }
}

/* ---- shapes that 16-byte loads do not fit: a warp per output, element by element ---- */

static __device__ float slow_dot(const struct ft_matrix *w, uint32_t row, const float *x)
{
    float sum = 0.0f;
    for (uint32_t k = threadIdx.x & 31; k < w->in; k += 32)
        sum = fmaf(ft_dense_element(w, row, k), x[k], sum);
    return ft_warp_sum(sum);
}

static __global__ void slow_up_kernel(struct ft_expert_args a)
{
    uint32_t begin, end, unit = blockIdx.x * DOWN_WARPS + (threadIdx.x >> 5);
    const char *blob;
    ft_wait_previous();
    ft_begin_next();
    if (a.stamp && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *a.stamp = ft_global_timer();
    if (!find_group(&a, blockIdx.y, &begin, &end, &blob) || unit >= a.layout.width)
        return;
    struct ft_matrix gate_w = ft_expert_view_device(&a.layout, blob, 0),
                     up_w = ft_expert_view_device(&a.layout, blob, 1);
    const float *gate_bias = ft_expert_bias(&a.layout, blob, 0),
                *up_bias = ft_expert_bias(&a.layout, blob, 1);
    for (uint32_t p = begin; p < end; p++) {
        const float *x = a.x + (uint64_t)a.list.pair_row[p] * gate_w.in;
        float gate = slow_dot(&gate_w, unit, x) + (gate_bias ? gate_bias[unit] : 0.0f);
        float up = slow_dot(&up_w, unit, x) + (up_bias ? up_bias[unit] : 0.0f);
        if ((threadIdx.x & 31) == 0)
            a.h[(uint64_t)p * a.layout.width + unit] = ft_expert_activate(&a.layout, gate, up);
    }
}

static __global__ void slow_down_kernel(struct ft_expert_args a, struct shared_args s,
                                        uint32_t blocks_per_group)
{
    ft_begin_next();
    ft_wait_previous();
    if (blockIdx.x < s.blocks) {
        shared_down(&s);
        return;
    }
    uint32_t block = blockIdx.x - s.blocks, group = block / blocks_per_group, begin, end;
    uint32_t out = block % blocks_per_group * DOWN_WARPS + (threadIdx.x >> 5);
    const char *blob;
    if (!find_group(&a, group, &begin, &end, &blob) || out >= a.layout.hidden)
        return;
    struct ft_matrix w = ft_expert_view_device(&a.layout, blob, 2);
    const float *bias = ft_expert_bias(&a.layout, blob, 2);
    for (uint32_t p = begin; p < end; p++) {
        float y = slow_dot(&w, out, a.h + (uint64_t)p * w.in) + (bias ? bias[out] : 0.0f);
        if ((threadIdx.x & 31) == 0)
            a.y[(uint64_t)a.list.pair_out[p] * w.out + out] = y;
    }
}

/* ---- launches ---- */

static uint32_t div_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* Rows staged at once so that their pieces take `in` columns each: as many as fit. 0: not even one. */
static uint32_t rows_that_fit(uint32_t in, uint32_t run, uint32_t rows_bound)
{
    uint32_t bytes = 3 * 4 * column_words(in, run),
             rows = FT_MIN(FT_MIN(rows_bound, ROWS_AT_ONCE), SHARED_PREFERRED / bytes);
    return rows ? rows : bytes <= SHARED_MAX ? 1 : 0;
}

template <int kind, int up_tiles, int down_tiles>
static int launch_fast(const struct ft_expert_args *a, const struct shared_args *s, uint32_t groups,
                       uint32_t up_rows, uint32_t down_rows, void *stream)
{
    constexpr uint32_t run = ft_expert_run<kind>();
    uint32_t up_shared = up_rows * 12 * column_words(a->layout.hidden, run);
    uint32_t down_shared = down_rows * 12 * column_words(a->layout.width, run);
    uint32_t per_group = div_up(a->layout.hidden, TILE * DOWN_WARPS);
    int error = 0;
    if (up_shared > SHARED_PREFERRED)
        error = FT_SHARED_LIMIT((up_kernel<kind, up_tiles>), up_shared);
    if (!error && down_shared > SHARED_PREFERRED)
        error = FT_SHARED_LIMIT((down_kernel<kind, down_tiles>), down_shared);
    if (!error)
        error = FT_LAUNCH_NEXT((up_kernel<kind, up_tiles>), dim3(div_up(a->layout.width, UP_UNITS), groups),
                               dim3(UP_THREADS), up_shared, stream, *a, up_rows);
    if (!error)
        error = FT_LAUNCH_NEXT((down_kernel<kind, down_tiles>), dim3(s->blocks + per_group * groups),
                               dim3(DOWN_THREADS), down_shared, stream, *a, *s, per_group, down_rows);
    return error;
}

template <int kind>
static int launch_kind(const struct ft_expert_args *a, const struct shared_args *s, uint32_t groups,
                       uint32_t up_rows, uint32_t down_rows, void *stream)
{
    bool up_wide = up_rows > 2, down_wide = down_rows > 2;
    return up_wide && down_wide ? launch_fast<kind, 2, 2>(a, s, groups, up_rows, down_rows, stream)
           : up_wide            ? launch_fast<kind, 2, 1>(a, s, groups, up_rows, down_rows, stream)
           : down_wide          ? launch_fast<kind, 1, 2>(a, s, groups, up_rows, down_rows, stream)
                                : launch_fast<kind, 1, 1>(a, s, groups, up_rows, down_rows, stream);
}

static int launch_slow(const struct ft_expert_args *a, const struct shared_args *s, uint32_t groups,
                       void *stream)
{
    uint32_t per_group = div_up(a->layout.hidden, DOWN_WARPS);
    int error = FT_LAUNCH_NEXT(slow_up_kernel, dim3(div_up(a->layout.width, DOWN_WARPS), groups),
                          dim3(DOWN_THREADS), 0, stream, *a);
    return error ? error
                 : FT_LAUNCH_NEXT(slow_down_kernel, dim3(s->blocks + per_group * groups), dim3(DOWN_THREADS), 0,
                             stream, *a, *s, per_group);
}

static int launch_decode(const struct ft_expert_args *a, const struct shared_args *s, uint32_t groups,
                         uint32_t rows_bound, void *stream)
{
    enum ft_expert_kind kind = ft_expert_kind_of(&a->layout);
    uint32_t run = kind == FT_EXPERT_BF16 ? 8 : kind == FT_EXPERT_FP8 ? 16 : 32;
    uint32_t up_rows = rows_that_fit(a->layout.hidden, run, rows_bound);
    uint32_t down_rows = rows_that_fit(a->layout.width, run, rows_bound);
    if (!up_rows || !down_rows)
        kind = FT_EXPERT_SLOW;
    switch (kind) {
    case FT_EXPERT_BF16:
        return launch_kind<FT_EXPERT_BF16>(a, s, groups, up_rows, down_rows, stream);
    case FT_EXPERT_FP8:
        return launch_kind<FT_EXPERT_FP8>(a, s, groups, up_rows, down_rows, stream);
    case FT_EXPERT_NVFP4:
        return launch_kind<FT_EXPERT_NVFP4>(a, s, groups, up_rows, down_rows, stream);
    case FT_EXPERT_MXFP4:
        return launch_kind<FT_EXPERT_MXFP4>(a, s, groups, up_rows, down_rows, stream);
    default:
        return launch_slow(a, s, groups, stream);
    }
}

static struct shared_args shared_args_of(const struct ft_cuda *c, uint32_t layer)
{
    const struct ft_model *m = c->model;
    struct shared_args s = {};
    s.down = c->weights->layers[layer].shared.down;
    s.h.x = c->base + c->space.shared_h;
    s.h.stride = m->shared_width;
    s.h.rows = c->step.rows;
    s.y = c->base + c->space.shared_y;
    s.hidden = m->hidden;
    s.blocks = div_up(m->hidden, SHARED_OUTS * DOWN_WARPS);
    return s;
}

extern "C" int ft_cuda_experts(const struct ft_cuda *c, uint32_t layer, const struct ft_cuda_list *list,
                               uint32_t groups_bound, uint32_t rows_bound, bool with_shared, uint64_t *stamp,
                               void *stream)
{
    const struct ft_model *m = c->model;
    struct ft_expert_args a;
    struct shared_args s = {};
    bool decode = c->step.rows <= FT_CUDA_DECODE_ROWS;
    if (!c->step.rows)
        return 0;
    a.layout = c->weights->layers[layer].expert_layout;
    a.list = *list;
    a.x = c->base + c->space.x;
    a.h = c->base + c->space.expert_h;
    a.y = c->base + c->space.expert_y;
    a.stamp = stamp;
    a.one_row = c->step.rows == 1;
    with_shared = with_shared && m->shared_width;
    if (with_shared && decode)
        s = shared_args_of(c, layer);
    if (with_shared && !decode) {
        struct ft_cuda_segment segment = {&c->weights->layers[layer].shared.down, NULL};
        int error = ft_cuda_project(c, &segment, 1, c->base + c->space.shared_h, m->shared_width,
                                    c->step.rows, c->base + c->space.shared_y, m->hidden, stamp, stream);
        if (error)
            return error;
        a.stamp = NULL;
    }
    if (!decode && !groups_bound)
        return 0;
    if (!decode && ft_expert_kind_of(&a.layout) != FT_EXPERT_SLOW)
        return ft_expert_gemm(&a, groups_bound, FT_MIN(list->pairs_max, c->step.rows * m->topk), stream);
    if (!decode)
        return launch_slow(&a, &s, groups_bound, stream);
    /* No group at all, but the shared expert: a grid must have a block, and one group that does not exist. */
    return launch_decode(&a, &s, FT_MAX(groups_bound, 1u), FT_MAX(rows_bound, 1u), stream);
}
