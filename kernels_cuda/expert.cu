/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts of a decode step: few rows per expert, so the weights are what moves, and each is read once for its
 * rows.
 *
 * Two kernels. Up: a block computes 16 hidden units of one expert, four warps the gate and four the up
 * projection, each a quarter of the columns. Down: a warp computes 16 outputs. Blocks of groups that do not
 * exist end after one read.
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
#define UP_THREADS 256u
#define UP_PARTS 4u /* warps that share a projection's columns */
#define DOWN_THREADS 128u
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
                float4 low = ((const float4 *)source)[0];
                float4 high = k + 4 < in ? ((const float4 *)source)[1] : make_float4(0, 0, 0, 0);
                v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
                v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
            } else {
                for (uint32_t j = 0; j < 8; j++)
                    v[j] = k + j < in ? source[j] : 0.0f;
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

/* sum[c] += weight rows row0 .. row0 + 15 times the pieces, over units [begin, end); fragments of
 * ft_mma_bf16. */
template <int kind, int tiles>
static __device__ __forceinline__ void
multiply(float sum[tiles][4], const struct ft_expert_layout *layout, const struct ft_expert_matrix *m,
         uint32_t row0, uint32_t begin, uint32_t end, const uint32_t *pieces, uint32_t columns)
{
    constexpr uint32_t run = ft_expert_run<kind>(), parts = run / 8;
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, words = column_words(m->in, run);
    uint32_t top = min(row0 + g, m->out - 1), low = min(row0 + g + 8, m->out - 1);
    const uint32_t *column[tiles];
#pragma unroll
    for (int c = 0; c < tiles;
         c++) /* columns that do not exist read the last one: their sums are not looked at */
        column[c] = pieces + min(c * 8 + g, columns - 1) * words + t * 4;
    for (uint32_t first = begin; first < end; first += FLIGHT) {
        struct ft_expert_raw raw[FLIGHT][2];
#pragma unroll
        for (uint32_t i = 0; i < FLIGHT; i++) {
            uint32_t k =
                first + i < end ? ((first + i) * 4 + t) * run : m->in; /* behind the row: zero, unread */
            raw[i][0] = ft_expert_load<kind>(layout, m, top, k);
            raw[i][1] = ft_expert_load<kind>(layout, m, low, k);
        }
#pragma unroll
        for (uint32_t i = 0; i < FLIGHT; i++) {
            if (first + i >= end)
                break;
            float unit[tiles][4] = {};
#pragma unroll
            for (uint32_t part = 0; part < parts; part++) {
                uint32_t a[2][4];
                ft_expert_pairs<kind>(&raw[i][0], part, a[0]);
                ft_expert_pairs<kind>(&raw[i][1], part, a[1]);
                uint32_t front[4] = {a[0][0], a[1][0], a[0][1], a[1][1]};
                uint32_t back[4] = {a[0][2], a[1][2], a[0][3], a[1][3]};
#pragma unroll
                for (int c = 0; c < tiles; c++) {
                    uint4 b = *(const uint4 *)(column[c] + ((first + i) * parts + part) * 16);
                    uint32_t b_front[2] = {b.x, b.y}, b_back[2] = {b.z, b.w};
                    ft_mma_bf16(unit[c], front, b_front);
                    ft_mma_bf16(unit[c], back, b_back);
                }
            }
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
        }
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

/* The rows of group `group` of the list: [begin, end) of its pairs; false: no such group. */
static __device__ __forceinline__ bool find_group(const struct ft_cuda_list *list, uint32_t group,
                                                  uint32_t *begin, uint32_t *end)
{
    if (group >= __ldg(list->group_count))
        return false;
    *begin = list->pair_begin[group];
    *end = list->pair_begin[group + 1];
    return true;
}

template <int kind, int tiles>
static __global__ void __launch_bounds__(UP_THREADS, 2)
    up_kernel(struct ft_expert_args a, uint32_t rows_at_once)
{
    FT_SHARED_DYNAMIC(uint32_t, pieces);
    FT_SHARED(float, put, 2 * UP_PARTS * TILE * 8 * tiles);
    if (a.stamp && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *a.stamp = ft_global_timer();
    uint32_t begin, end, warp = threadIdx.x >> 5, row0 = blockIdx.x * TILE;
    if (!find_group(&a.list, blockIdx.y, &begin, &end))
        return;
    const char *blob = a.list.blob[blockIdx.y];
    struct ft_expert_matrix m = ft_expert_matrix_of<kind>(&a.layout, blob, warp >= UP_PARTS);
    uint32_t units = (m.in + 4 * ft_expert_run<kind>() - 1) / (4 * ft_expert_run<kind>()),
             part = warp % UP_PARTS;
    uint32_t share = (units + UP_PARTS - 1) / UP_PARTS;
    for (uint32_t first = begin; first < end; first += rows_at_once) {
        uint32_t rows = min(end - first, rows_at_once);
        __syncthreads(); /* the pass before has read its sums */
        stage<kind>(pieces, a.x, a.list.pair_row, first, rows, m.in);
        __syncthreads();
        float sum[tiles][4] = {};
        multiply<kind, tiles>(sum, &a.layout, &m, row0, part * share, min(part * share + share, units),
                              pieces, rows * 3);
        float *mine = put + warp * (TILE * 8 * tiles);
#pragma unroll
        for (int c = 0; c < tiles; c++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sum[c][j] *= m.factor;
        put_sums<tiles>(mine, sum);
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < TILE * rows; i += UP_THREADS) {
            uint32_t r = i / TILE, unit = row0 + i % TILE;
            float value[2] = {0.0f, 0.0f};
            for (uint32_t w = 0; w < 2 * UP_PARTS; w++)
                value[w / UP_PARTS] += take_sum<tiles>(put + w * (TILE * 8 * tiles), i % TILE, r);
            if (unit >= a.layout.width)
                continue;
            const float *gate_bias = ft_expert_bias(&a.layout, blob, 0),
                        *up_bias = ft_expert_bias(&a.layout, blob, 1);
            float gate = value[0] + (gate_bias ? gate_bias[unit] : 0.0f);
            float up = value[1] + (up_bias ? up_bias[unit] : 0.0f);
            a.h[(uint64_t)(first + r) * a.layout.width + unit] = ft_expert_activate(&a.layout, gate, up);
        }
    }
}

/* ---- down, and the shared expert's down beside it ---- */

struct shared_args {
    struct ft_matrix down;
    struct ft_rows_x h;
    float *y;
    uint32_t hidden, blocks; /* blocks of the grid in front of the experts'; 0: no shared expert */
};

/* Two outputs per warp, all rows, eight at a time. */
static __device__ void shared_down(const struct shared_args *s)
{
    uint32_t lane = threadIdx.x & 31, row[2];
    uint32_t first = (blockIdx.x * DOWN_WARPS + (threadIdx.x >> 5)) * 2;
    const struct ft_matrix *w[2] = {&s->down, &s->down};
    if (first >= s->hidden)
        return;
    row[0] = first;
    row[1] = min(first + 1, s->hidden - 1);
    for (uint32_t at = 0; at < s->h.rows;) {
        struct ft_rows_x h = s->h;
        h.x += at * h.stride;
        h.rows -= at;
        float sum[2][4];
        if (h.rows == 1) {
            float one[2][1];
            ft_rows_dot<1, 2>(one, w, row, &h);
            sum[0][0] = one[0][0];
            sum[1][0] = one[1][0];
        } else {
            ft_rows_dot<4, 2>(sum, w, row, &h);
        }
#pragma unroll
        for (uint32_t r = 0; r < 4; r++)
            if (lane < 2 && r < h.rows && first + lane < s->hidden)
                s->y[(uint64_t)(at + r) * s->hidden + first + lane] = lane ? sum[1][r] : sum[0][r];
        at += 4;
    }
}

template <int kind, int tiles>
static __global__ void __launch_bounds__(DOWN_THREADS, 4)
    down_kernel(struct ft_expert_args a, struct shared_args s, uint32_t blocks_per_group,
                uint32_t rows_at_once)
{
    FT_SHARED_DYNAMIC(uint32_t, pieces);
    FT_SHARED(float, put, DOWN_WARPS *TILE * 8 * tiles);
    if (blockIdx.x < s.blocks) {
        shared_down(&s);
        return;
    }
    uint32_t block = blockIdx.x - s.blocks, group = block / blocks_per_group, begin, end,
             warp = threadIdx.x >> 5;
    if (!find_group(&a.list, group, &begin, &end))
        return;
    const char *blob = a.list.blob[group];
    struct ft_expert_matrix m = ft_expert_matrix_of<kind>(&a.layout, blob, 2);
    const float *bias = ft_expert_bias(&a.layout, blob, 2);
    uint32_t units = (m.in + 4 * ft_expert_run<kind>() - 1) / (4 * ft_expert_run<kind>());
    uint32_t row0 = (block % blocks_per_group * DOWN_WARPS + warp) * TILE, lane = threadIdx.x & 31;
    for (uint32_t first = begin; first < end; first += rows_at_once) {
        uint32_t rows = min(end - first, rows_at_once);
        __syncthreads();
        stage<kind>(pieces, a.h, NULL, first, rows, m.in);
        __syncthreads();
        float sum[tiles][4] = {};
        multiply<kind, tiles>(sum, &a.layout, &m, row0, 0, units, pieces, rows * 3);
        float *mine = put + warp * (TILE * 8 * tiles);
        put_sums<tiles>(mine, sum);
        __syncwarp();
        for (uint32_t i = lane; i < TILE * rows; i += 32) {
            uint32_t r = i / TILE, out = row0 + i % TILE;
            if (out < m.out)
                a.y[(uint64_t)a.list.pair_out[first + r] * m.out + out] =
                    fmaf(take_sum<tiles>(mine, i % TILE, r), m.factor, bias ? bias[out] : 0.0f);
        }
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
    if (a.stamp && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *a.stamp = ft_global_timer();
    uint32_t begin, end, unit = blockIdx.x * DOWN_WARPS + (threadIdx.x >> 5);
    if (!find_group(&a.list, blockIdx.y, &begin, &end) || unit >= a.layout.width)
        return;
    const char *blob = a.list.blob[blockIdx.y];
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
    if (blockIdx.x < s.blocks) {
        shared_down(&s);
        return;
    }
    uint32_t block = blockIdx.x - s.blocks, group = block / blocks_per_group, begin, end;
    uint32_t out = block % blocks_per_group * DOWN_WARPS + (threadIdx.x >> 5);
    if (!find_group(&a.list, group, &begin, &end) || out >= a.layout.hidden)
        return;
    struct ft_matrix w = ft_expert_view_device(&a.layout, a.list.blob[group], 2);
    const float *bias = ft_expert_bias(&a.layout, a.list.blob[group], 2);
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
        error = FT_LAUNCH((up_kernel<kind, up_tiles>), dim3(div_up(a->layout.width, TILE), groups),
                          dim3(UP_THREADS), up_shared, stream, *a, up_rows);
    if (!error)
        error = FT_LAUNCH((down_kernel<kind, down_tiles>), dim3(s->blocks + per_group * groups),
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
    int error = FT_LAUNCH(slow_up_kernel, dim3(div_up(a->layout.width, DOWN_WARPS), groups),
                          dim3(DOWN_THREADS), 0, stream, *a);
    return error ? error
                 : FT_LAUNCH(slow_down_kernel, dim3(s->blocks + per_group * groups), dim3(DOWN_THREADS), 0,
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
    s.blocks = div_up(m->hidden, 2 * DOWN_WARPS);
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
    if (!decode)
        return groups_bound
                   ? ft_expert_gemm(&a, groups_bound, FT_MIN(list->pairs_max, c->step.rows * m->topk), stream)
                   : 0;
    /* No group at all, but the shared expert: a grid must have a block, and one group that does not exist. */
    return launch_decode(&a, &s, FT_MAX(groups_bound, 1u), FT_MAX(rows_bound, 1u), stream);
}
