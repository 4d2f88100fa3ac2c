/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts of a decode step: few rows per expert, so the weights are what moves, and each is read once for its
 * rows.
 *
 * Two kernels. Up: a block computes 8 hidden units of one expert, each warp a quarter of the columns; the
 * upper half of its tile are rows of the gate, the lower half those of the up projection. Down: a warp
 * computes 16 outputs. Blocks of groups that do not exist end after one read. Weights are asked for before
 * the activations are waited for; the down kernel's before the up kernel has ended.
 *
 * A step of one row has its own up kernel: all groups meet the same activations there, so a block keeps them
 * and takes tile after tile of whatever groups there are. With a block for each tile of each group that may
 * exist, 800 blocks of the main model copied the row, 16 KB each, and read the list, 6400 requests to one
 * line: half of them had found after 2.5 us what to do, the last after 11 (H200, four groups of ten).
 *
 * Tiles and their arithmetic: expert_tile.cuh.
 */
#include "kernels_cuda/expert_tile.cuh"
#include "kernels_cuda/rows_dot.cuh"

#define UP_THREADS 128u
#define UP_PARTS 4u /* warps that share a tile's columns */
#define UP_UNITS (TILE / 2)
/* How pieces reach the up kernel of several rows. Through shared memory, a share per warp, two rows at a time,
 * where groups of more are rare; else they are read where route put them. */
enum way { WAY_TWO, WAY_MANY };
#define UP_BLOCKS 5     /* that a multiprocessor holds at once */
#define UP_ROW_BLOCKS 4 /* the same, of the kernel for one row */
#define UP_ROW_GROUPS 32u
#define UP_FLIGHT 4 /* units whose loads are under way per warp */
#define DOWN_FLIGHT 5
#define DOWN_THREADS 128u
#define DOWN_BLOCKS 5
#define SHARED_OUTS 4 /* of the shared expert, per warp: all blocks of the main model fit at once */
#define DOWN_WARPS (DOWN_THREADS / 32)
#define ROWS_AT_ONCE 5u /* 15 pieces in two tiles of 8 */
#define SHARED_PREFERRED (40u * 1024)
#define SHARED_MAX (60u * 1024) /* with static memory within what sm_75 has */

/* The rows of group `group` of the list: [begin, end) of its pairs; false: no such group. A list of one row
 * has one pair a group. The address comes with the count, not behind it. */
static __device__ __forceinline__ bool find_group(const struct ft_expert_args *a, uint32_t group,
                                                  uint32_t *begin, uint32_t *end, const char **blob)
{
    uint32_t count = __ldcg(a->list.group_count);
    *begin = group;
    *end = group + 1;
    *blob = group < a->list.groups_max
                ? (const char *)__ldcg((const unsigned long long *)(a->list.blob + group))
                : NULL;
    if (group >= count)
        return false;
    if (!a->one_row) {
        *begin = __ldcg(a->list.pair_begin + group);
        *end = __ldcg(a->list.pair_begin + group + 1);
    }
    return true;
}

/* A block's results: hidden units unit0 .. unit0 + 7 of `rows` pairs from `first` on. A warp per row, lane =
 * 8 part + unit. */
template <int kind, int tiles>
static __device__ __forceinline__ void finish_up(const struct ft_expert_args *a, const float *put,
                                                 const char *blob, uint32_t unit0, uint32_t first,
                                                 uint32_t rows, float gate_factor, float up_factor)
{
    static_assert(UP_PARTS == 4 && TILE == 16, "a lane per part and unit");
    uint32_t lane = threadIdx.x & 31, unit = unit0 + lane % 8;
    const float *gate_bias = ft_expert_bias(&a->layout, blob, 0),
                *up_bias = ft_expert_bias(&a->layout, blob, 1);
    bool exists = lane < 8 && unit < a->layout.width;
    put += lane / 8 * (TILE * 8 * tiles);
    for (uint32_t r = threadIdx.x >> 5; r < rows; r += UP_PARTS) {
        float gate = take_sum<kind, tiles>(put, lane % 8, r),
              up = take_sum<kind, tiles>(put, lane % 8 + 8, r);
#pragma unroll
        for (int step = 8; step < 32; step *= 2) {
            gate += __shfl_xor_sync(0xffffffffu, gate, step);
            up += __shfl_xor_sync(0xffffffffu, up, step);
        }
        if (!exists)
            continue;
        gate = fmaf(gate, gate_factor, gate_bias ? gate_bias[unit] : 0.0f);
        up = fmaf(up, up_factor, up_bias ? up_bias[unit] : 0.0f);
        a->h[(uint64_t)(first + r) * a->layout.width + unit] = ft_expert_activate(&a->layout, gate, up);
    }
}

/* Whether the kernels for few rows take multiply_short. */
template <int kind> static __host__ __device__ __forceinline__ constexpr bool is_short()
{
    return kind == FT_EXPERT_NVFP4 || kind == FT_EXPERT_MXFP4;
}
static __host__ __device__ __forceinline__ uint32_t up_share(uint32_t units)
{
    return (units + UP_PARTS - 1) / UP_PARTS;
}

/* Units of a warp's share that the ways through shared memory have room for. */
template <int kind> static __host__ __device__ __forceinline__ constexpr uint32_t share_max()
{
    return is_short<kind>() ? UP_FLIGHT + 1 : 192u / ft_expert_run<kind>();
}
/* u32 that a warp copies for its share, and has in shared memory. */
template <int kind> static __host__ __device__ __forceinline__ constexpr uint32_t share_words()
{
    return (share_max<kind>() * ft_stage_unit_words<kind>() + 127) / 128 * 128;
}
/* A warp's share of a staged row to shared memory, and what stands behind it: comparing would cost more than
 * copying too much (ft_workspace_staged_words leaves room). All loads are under way at return. */
template <uint32_t words>
static __device__ __forceinline__ void copy_share(uint32_t *to, const uint32_t *from)
{
    static_assert(words <= FT_WORKSPACE_STAGED_SLACK, "room behind the last row");
    uint32_t lane = threadIdx.x & 31;
    to += lane * 4;
    from += lane * 4;
#pragma unroll
    for (uint32_t i = 0; i < words; i += 128)
        ft_copy_async16(to + i, from + i);
    ft_copy_async_commit();
}

/* Up of a step of one row: group i is pair i. Blocks take turns at the tiles of all groups. Shared memory:
 * pieces [warp][share]. */
template <int kind>
static __global__ void __launch_bounds__(UP_THREADS, UP_ROW_BLOCKS)
    up_row_kernel(const __grid_constant__ struct ft_expert_args a)
{
    FT_SHARED_DYNAMIC(uint32_t, pieces);
    FT_SHARED(float, put, 2 * UP_PARTS * TILE * 8); /* a turn's sums are read while the next one's are made */
    FT_SHARED(const char *, blobs, UP_ROW_GROUPS);
    FT_SHARED(uint32_t, count, 1);
    constexpr uint32_t run = ft_expert_run<kind>(), put_words = UP_PARTS * TILE * 8;
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    uint32_t per_group = (a.layout.width + UP_UNITS - 1) / UP_UNITS;
    uint32_t units = ft_stage_units(a.layout.hidden, run), share = up_share(units);
    uint32_t unit_begin = min(warp * share, units), unit_end = min(unit_begin + share, units);
    uint32_t *mine = pieces + warp * share_words<kind>();
    struct tile_columns<1> columns;
    aim_columns<kind, 1>(&columns, 1, [&](uint32_t) { return mine; });
    ft_wait_previous();
    ft_begin_next();
    if (a.stamp && blockIdx.x == 0 && threadIdx.x == 0)
        *a.stamp = ft_global_timer();
    if (warp == 0) {
        uint32_t groups = __ldcg(a.list.group_count);
        unsigned long long blob =
            lane < a.list.groups_max ? __ldcg((const unsigned long long *)(a.list.blob + lane)) : 0;
        blobs[lane] = (const char *)blob;
        if (lane == 0)
            *count = groups;
    }
    copy_share<share_words<kind>()>(mine, a.staged + unit_begin * ft_stage_unit_words<kind>());
    __syncthreads();
    uint32_t tasks = *count * per_group, turn = 0;
    for (uint32_t task = blockIdx.x; task < tasks; task += gridDim.x, turn ^= 1) {
        uint32_t group = task / per_group, unit0 = task % per_group * UP_UNITS;
        uint32_t row = min(unit0 + (lane >> 2), a.layout.width - 1);
        const char *blob = blobs[group];
        struct ft_expert_matrix gate = ft_expert_matrix_of<kind>(&a.layout, blob, 0);
        struct ft_expert_matrix up = ft_expert_matrix_of<kind>(&a.layout, blob, 1);
        struct ft_expert_raw raw[UP_FLIGHT][2];
        struct tile_rows w;
        struct tile_columns<1> b = columns;
        float sum[1][4] = {}, *sums = put + turn * put_words;
        aim<kind>(&w, 0, &a.layout, &gate, row, unit_begin, unit_end);
        aim<kind>(&w, 1, &a.layout, &up, row, unit_begin, unit_end);
        ask<kind, UP_FLIGHT>(raw, &w);
        ft_copy_async_wait<0>(); /* of the warp's own share: nobody else reads it */
        __syncwarp();
        if constexpr (is_short<kind>())
            multiply_short<kind, 1, UP_FLIGHT, UP_FLIGHT + 1>(sum, raw, &w, unit_end - unit_begin, &b);
        else
            multiply<kind, 1, UP_FLIGHT>(sum, raw, &w, unit_end - unit_begin, &b);
        put_sums<1>(sums + warp * (TILE * 8), sum);
        __syncthreads();
        finish_up<kind, 1>(&a, sums, blob, unit0, group, 1, gate.factor * tile_factor<kind>(),
                           up.factor * tile_factor<kind>());
    }
    ft_copy_async_wait<0>();
}

template <int kind, int tiles, int way>
static __global__ void __launch_bounds__(UP_THREADS, UP_BLOCKS)
    up_kernel(const __grid_constant__ struct ft_expert_args a, uint32_t rows_at_once)
{
    FT_SHARED_DYNAMIC(uint32_t, pieces); /* [warp][rows at once][share] units */
    FT_SHARED(float, put, UP_PARTS *TILE * 8 * tiles);
    constexpr uint32_t run = ft_expert_run<kind>(), unit_words = ft_stage_unit_words<kind>();
    uint32_t begin, end, warp = threadIdx.x >> 5, unit0 = blockIdx.x * UP_UNITS;
    uint32_t words = ft_stage_words<kind>(a.layout.hidden), units = ft_stage_units(a.layout.hidden, run);
    uint32_t share = up_share(units), unit_begin = min(warp * share, units);
    uint32_t unit_end = min(unit_begin + share, units);
    const char *blob;
    ft_wait_previous();
    ft_begin_next();
    if (a.stamp && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *a.stamp = ft_global_timer();
    uint32_t *mine = pieces + warp * rows_at_once * share_words<kind>();
    if (!find_group(&a, blockIdx.y, &begin, &end, &blob))
        return;
    struct ft_expert_raw raw[UP_FLIGHT][2];
    struct tile_rows w;
    uint32_t row = min(unit0 + (threadIdx.x >> 2 & 7), a.layout.width - 1);
    struct ft_expert_matrix gate = ft_expert_matrix_of<kind>(&a.layout, blob, 0);
    struct ft_expert_matrix up = ft_expert_matrix_of<kind>(&a.layout, blob, 1);
    aim<kind>(&w, 0, &a.layout, &gate, row, unit_begin, unit_end);
    aim<kind>(&w, 1, &a.layout, &up, row, unit_begin, unit_end);
    for (uint32_t first = begin; first < end; first += rows_at_once) {
        uint32_t rows = min(end - first, rows_at_once);
        struct tile_rows at = w;
        ask<kind, UP_FLIGHT>(raw, &at);
        struct tile_columns<tiles> b;
        float sum[tiles][4] = {};
        auto staged = [&](uint32_t r) {
            return a.staged + (uint64_t)__ldcg(a.list.pair_row + first + r) * words + unit_begin * unit_words;
        };
        if constexpr (way == WAY_MANY) {
            aim_columns<kind, tiles>(&b, rows, staged);
        } else {
            __syncwarp(); /* the pass before has read its pieces */
            for (uint32_t r = 0; r < rows; r++)
                copy_share<share_words<kind>()>(mine + r * share_words<kind>(), staged(r));
            aim_columns<kind, tiles>(&b, rows, [&](uint32_t r) { return mine + r * share_words<kind>(); });
            ft_copy_async_wait<0>();
            __syncwarp();
        }
        if constexpr (way != WAY_MANY && is_short<kind>())
            multiply_short<kind, tiles, UP_FLIGHT, UP_FLIGHT + 1>(sum, raw, &at, unit_end - unit_begin, &b);
        else
            multiply<kind, tiles, UP_FLIGHT>(sum, raw, &at, unit_end - unit_begin, &b);
        if (first != begin)
            __syncthreads(); /* the pass before has read its sums */
        put_sums<tiles>(put + warp * (TILE * 8 * tiles), sum);
        __syncthreads();
        finish_up<kind, tiles>(&a, put, blob, unit0, first, rows, gate.factor * tile_factor<kind>(),
                               up.factor * tile_factor<kind>());
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
            ft_rows_dot<1, SHARED_OUTS, 2>(one, w, row, &h, [] {});
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

/* brief: a row is no longer than what is under way at once. */
template <int kind, int tiles, bool brief>
static __global__ void __launch_bounds__(DOWN_THREADS, DOWN_BLOCKS)
    down_kernel(const __grid_constant__ struct ft_expert_args a, const __grid_constant__ struct shared_args s,
                uint32_t blocks_per_group, uint32_t rows_at_once)
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
    if (!find_group(&a, group, &begin, &end,
                    &blob)) { /* the list was there before the kernel in front began */
        ft_wait_previous();
        return;
    }
    struct ft_expert_raw raw[DOWN_FLIGHT][2];
    struct tile_rows w;
    uint32_t units = ft_stage_units(a.layout.width, run), words = ft_stage_words<kind>(a.layout.width);
    uint32_t lane = threadIdx.x & 31;
    uint32_t row0 = (block % blocks_per_group * DOWN_WARPS + warp) * TILE;
    struct ft_expert_matrix m = ft_expert_matrix_of<kind>(&a.layout, blob, 2);
    aim<kind>(&w, 0, &a.layout, &m, min(row0 + (lane >> 2), a.layout.hidden - 1), 0, units);
    aim<kind>(&w, 1, &a.layout, &m, min(row0 + (lane >> 2) + 8, a.layout.hidden - 1), 0, units);
    const float *bias = ft_expert_bias(&a.layout, blob, 2);
    for (uint32_t first = begin; first < end; first += rows_at_once) {
        uint32_t rows = min(end - first, rows_at_once);
        struct tile_rows at = w;
        ask<kind, DOWN_FLIGHT>(raw, &at);
        if (first == begin)
            ft_wait_previous();
        else
            __syncthreads(); /* the pass before has read its pieces */
        for (uint32_t r = 0; r < rows; r++)
            ft_stage_row<kind>(pieces + r * words, a.h + (uint64_t)(first + r) * a.layout.width,
                               a.layout.width);
        __syncthreads();
        struct tile_columns<tiles> b;
        aim_columns<kind, tiles>(&b, rows, [&](uint32_t r) { return pieces + r * words; });
        float sum[tiles][4] = {};
        if constexpr (brief)
            multiply_short<kind, tiles, DOWN_FLIGHT, DOWN_FLIGHT>(sum, raw, &at, units, &b);
        else
            multiply<kind, tiles, DOWN_FLIGHT>(sum, raw, &at, units, &b);
        float *mine = put + warp * (TILE * 8 * tiles);
        put_sums<tiles>(mine, sum);
        __syncwarp();
        for (uint32_t i = lane; i < TILE * rows; i += 32) {
            uint32_t r = i / TILE, out = row0 + i % TILE;
            if (out < a.layout.hidden)
                a.y[(uint64_t)__ldcg(a.list.pair_out + first + r) * a.layout.hidden + out] =
                    fmaf(take_sum<kind, tiles>(mine, i % TILE, r), m.factor * tile_factor<kind>(),
                         bias ? bias[out] : 0.0f);
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

/* Rows of h staged at once in shared memory: as many as fit, `words` each. 0: not even one. */
static uint32_t rows_that_fit(uint32_t words, uint32_t rows_wanted)
{
    uint32_t bytes = 4 * words, rows = FT_MIN(rows_wanted, SHARED_PREFERRED / bytes);
    return rows ? rows : bytes <= SHARED_MAX ? 1 : 0;
}

template <int kind, int tiles, int way>
static int launch_up(const struct ft_expert_args *a, uint32_t groups, uint32_t rows, void *stream)
{
    uint32_t shared = way == WAY_MANY ? 0 : rows * UP_PARTS * share_words<kind>() * 4;
    return FT_LAUNCH_NEXT((up_kernel<kind, tiles, way>), dim3(div_up(a->layout.width, UP_UNITS), groups),
                          dim3(UP_THREADS), shared, stream, *a, rows);
}

/* As many rounds as the tiles of all groups that may exist take, all of them full. */
template <int kind> static int launch_up_row(const struct ft_expert_args *a, uint32_t groups, void *stream)
{
    uint32_t tasks = div_up(a->layout.width, UP_UNITS) * groups;
    uint32_t rounds = div_up(tasks, UP_ROW_BLOCKS * a->multiprocessors);
    return FT_LAUNCH_NEXT(up_row_kernel<kind>, dim3(div_up(tasks, rounds)), dim3(UP_THREADS),
                          UP_PARTS * share_words<kind>() * 4, stream, *a);
}

template <int kind, int tiles, bool brief>
static int launch_down(const struct ft_expert_args *a, const struct shared_args *s, uint32_t groups,
                       uint32_t rows, void *stream)
{
    uint32_t shared = rows * 4 * ft_stage_words<kind>(a->layout.width);
    uint32_t per_group = div_up(a->layout.hidden, TILE * DOWN_WARPS);
    int error = 0;
    if (shared > SHARED_PREFERRED)
        error = FT_SHARED_LIMIT((down_kernel<kind, tiles, brief>), shared);
    return error ? error
                 : FT_LAUNCH_NEXT((down_kernel<kind, tiles, brief>), dim3(s->blocks + per_group * groups),
                                  dim3(DOWN_THREADS), shared, stream, *a, *s, per_group, rows);
}

static int launch_slow(const struct ft_expert_args *a, const struct shared_args *s, uint32_t groups,
                       void *stream)
{
    uint32_t per_group = div_up(a->layout.hidden, DOWN_WARPS);
    int error = FT_LAUNCH_NEXT(slow_up_kernel, dim3(div_up(a->layout.width, DOWN_WARPS), groups),
                               dim3(DOWN_THREADS), 0, stream, *a);
    return error ? error
                 : FT_LAUNCH_NEXT(slow_down_kernel, dim3(s->blocks + per_group * groups), dim3(DOWN_THREADS),
                                  0, stream, *a, *s, per_group);
}

/* rows_at_once: activation rows of a group that a pass takes; weights are read again for each pass. */
template <int kind>
static int launch_kind(const struct ft_expert_args *a, const struct shared_args *s, uint32_t groups,
                       uint32_t rows_at_once, void *stream)
{
    constexpr uint32_t run = ft_expert_run<kind>();
    bool shares = up_share(ft_stage_units(a->layout.hidden, run)) <= share_max<kind>();
    uint32_t down_rows = rows_that_fit(ft_stage_words<kind>(a->layout.width), rows_at_once);
    if (!down_rows)
        return launch_slow(a, s, groups, stream);
    bool row = a->one_row && shares && groups <= UP_ROW_GROUPS;
    int error = row                           ? launch_up_row<kind>(a, groups, stream)
                : rows_at_once <= 2 && shares ? launch_up<kind, 1, WAY_TWO>(a, groups, rows_at_once, stream)
                : rows_at_once <= 2           ? launch_up<kind, 1, WAY_MANY>(a, groups, rows_at_once, stream)
                                              : launch_up<kind, 2, WAY_MANY>(a, groups, rows_at_once, stream);
    if (error)
        return error;
    if (down_rows > 2)
        return launch_down<kind, 2, false>(a, s, groups, down_rows, stream);
    if constexpr (is_short<kind>())
        if (ft_stage_units(a->layout.width, run) <= DOWN_FLIGHT)
            return launch_down<kind, 1, true>(a, s, groups, down_rows, stream);
    return launch_down<kind, 1, false>(a, s, groups, down_rows, stream);
}

static int launch_decode(const struct ft_expert_args *a, const struct shared_args *s, uint32_t groups,
                         uint32_t rows_at_once, void *stream)
{
    switch (ft_expert_kind_of(&a->layout)) {
    case FT_EXPERT_BF16:
        return launch_kind<FT_EXPERT_BF16>(a, s, groups, rows_at_once, stream);
    case FT_EXPERT_FP8:
        return launch_kind<FT_EXPERT_FP8>(a, s, groups, rows_at_once, stream);
    case FT_EXPERT_NVFP4:
        return launch_kind<FT_EXPERT_NVFP4>(a, s, groups, rows_at_once, stream);
    case FT_EXPERT_MXFP4:
        return launch_kind<FT_EXPERT_MXFP4>(a, s, groups, rows_at_once, stream);
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
    a.staged = (const uint32_t *)(c->base + c->space.staged);
    a.h = c->base + c->space.expert_h;
    a.y = c->base + c->space.expert_y;
    a.stamp = stamp;
    a.one_row = c->step.rows == 1;
    a.multiprocessors = c->multiprocessors;
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
    a.scale = (struct ft_gemm_scale *)c->scratch; /* whatever lies there is done with */
    if (!decode && ft_expert_kind_of(&a.layout) != FT_EXPERT_SLOW)
        return ft_expert_gemm(&a, c->step.rows, groups_bound, FT_MIN(list->pairs_max, c->step.rows * m->topk),
                              stream);
    if (!decode)
        return launch_slow(&a, &s, groups_bound, stream);
    /* Fewer pairs than experts: most groups are one row, and what suits it matters more than a second pass. */
    uint32_t at_once = c->step.rows * m->topk <= m->expert_count ? 2 : ROWS_AT_ONCE;
    at_once = FT_MIN(at_once, FT_MAX(rows_bound, 1u));
    /* No group at all, but the shared expert: a grid must have a block, and one group that does not exist. */
    return launch_decode(&a, &s, FT_MAX(groups_bound, 1u), at_once, stream);
}
