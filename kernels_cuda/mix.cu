/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Norms and hyper-connection mixers. Decode rows with streams: two kernels.
 *
 *   down   block = 16 outputs of (W_down; W_inject) x one share of the columns. A share lies in one stream, so
 *          that the stream's 1 / rms can be multiplied in later: partial sums of W (x (1 + w)), and by blocks of
 *          their own the sums of squares of x
 *   up     block = 16 hidden values, one warp a stream: adds the partial sums up to t = silu(W_down u / n), then
 *          x = mean over streams of sigmoid(W_up t) u; block 0 stores t and s
 *
 * Partial sums lie in c->scratch: f32 [shares, rows, stride], then squares f32 [rows, shares].
 */
#include "kernels_cuda/dense.cuh"
#include "kernels_cuda/gemm.cuh"
#include "kernels_cuda/kernels_cuda.h"

#define WARPS 8u
#define THREADS (32u * WARPS)
#define SHARED_MAX (96u * 1024)
#define SHARES_MAX FT_GPU_MIX_SHARES /* of a stream */
#define UP_AHEAD 3                   /* units of W_up on their way before t is known */

/* Rows of residual, and their norm. */
struct mix_norm {
    const float *residual, *weight; /* [rows, streams, hidden], [streams, hidden] */
    const uint32_t *index;          /* row r is residual row index[r]; NULL: r */
    float *normed;                  /* u [rows, streams, hidden] */
    uint32_t rows, streams, hidden;
    float eps, one; /* one: 1 when the norm scales by 1 + w */
};

/* How the columns are shared out: share i is columns [part * (i % per_stream) ...) of stream i / per_stream. */
struct mix_shares {
    float *sums, *squares; /* [shares, rows, stride], [rows, shares] */
    uint32_t count, per_stream, part, stride;
};

struct down_args {
    struct mix_norm norm;
    struct ft_matrix down, inject; /* inject.out 0: the top mixer has none */
    struct mix_shares shares;
    uint32_t tiles_down, tiles; /* block tiles of down, of both */
    uint32_t columns, row_words, x_words;
    uint64_t *stamp;
};

static __device__ __forceinline__ const float *mix_row(const struct mix_norm *norm, uint32_t row)
{
    uint64_t from = norm->index ? norm->index[row] : row;
    return norm->residual + from * norm->streams * norm->hidden;
}

/* x (1 + w) of one share, 8 at a time; zeros beside it. */
struct share_source {
    const struct mix_norm *norm;
    uint32_t begin, end;
    __device__ void operator()(uint32_t row, uint32_t column, float v[8]) const
    {
        uint32_t wide = norm->streams * norm->hidden;
        struct ft_dense_rows_source x = {mix_row(norm, row), 0, wide, NULL},
                                    weight = {norm->weight, 0, wide, NULL};
        float w[8];
        x(0, column, v);
        weight(0, column, w);
#pragma unroll
        for (unsigned i = 0; i < 8; i++)
            v[i] = column + i >= begin && column + i < end ? v[i] * (norm->one + w[i]) : 0.0f;
    }
};

/* Sums of squares of columns [begin, end): one warp a row, whatever the number of rows. */
static __device__ __forceinline__ void down_squares(const struct down_args *args, uint32_t share,
                                                    uint32_t begin, uint32_t end)
{
    uint32_t lane = threadIdx.x & 31;
    for (uint32_t row = threadIdx.x >> 5; row < args->norm.rows; row += blockDim.x >> 5) {
        const float *from = mix_row(&args->norm, row);
        float sum = 0;
        if (((uintptr_t)(from + begin) & 15) == 0 && (end - begin) % 4 == 0) {
#pragma unroll 10
            for (uint32_t c = begin + lane * 4; c < end; c += 128) {
                float4 v = *(const float4 *)(from + c);
                sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
            }
        } else {
            for (uint32_t c = begin + lane; c < end; c += 32)
                sum += from[c] * from[c];
        }
        sum = ft_warp_sum(sum);
        if (lane == 0)
            args->shares.squares[row * args->shares.count + share] = sum;
    }
}

/* Shared memory: activations [x_words], sums of the warps (ft_dense_put). */
template <int kind, int cols>
__global__ void __launch_bounds__(THREADS, cols > 2 ? 2 : 3)
    down_kernel(const __grid_constant__ struct down_args args)
{
    FT_SHARED_DYNAMIC(uint4, words);
    ft_begin_next();
    float *put = (float *)(words + args.x_words);
    uint32_t tile = blockIdx.x, share = blockIdx.y, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    uint32_t in = args.norm.streams * args.norm.hidden,
             stream_begin = share / args.shares.per_stream * args.norm.hidden;
    uint32_t begin = stream_begin + share % args.shares.per_stream * args.shares.part;
    uint32_t end = min(begin + args.shares.part, stream_begin + args.norm.hidden);
    if (tile == args.tiles) {
        ft_wait_previous();
        if (args.stamp && share == 0 && threadIdx.x == 0)
            *args.stamp = ft_global_timer();
        down_squares(&args, share, begin, end);
        return;
    }
    const struct ft_matrix *matrix = tile < args.tiles_down ? &args.down : &args.inject;
    uint32_t first = (tile < args.tiles_down ? tile : tile - args.tiles_down) * FT_DENSE_TILE;
    struct ft_dense_weights w;
    struct ft_dense_raw<kind> raw;
    struct ft_dense_sums<kind, cols> sums;
    struct ft_dense_x x = {
        words, args.row_words, args.row_words / 3, args.norm.rows, begin / FT_DENSE_UNIT * FT_DENSE_UNIT,
        end};
    uint32_t stop = (end + FT_DENSE_UNIT - 1) / FT_DENSE_UNIT, unit = ft_dense_first(x.begin, warp, warps);
    ft_dense_aim<kind>(&w, matrix, first);
    if (unit < stop)
        ft_dense_load<kind>(&raw, &w, unit);
    for (uint32_t i = unit + warps; i < stop; i += warps)
        ft_dense_prefetch<kind>(&w, i);
    for (uint32_t c = begin + threadIdx.x * 32; c < end; c += blockDim.x * 32)
        ft_prefetch_l2(args.norm.weight + c);
    ft_dense_clear<kind, cols>(&sums);
    struct share_source source = {&args.norm, begin, end};
    ft_wait_previous();
    for (bool again = false; x.begin < end; x.begin = x.end, again = true) {
        x.end = min(x.begin + args.columns, end);
        if (again)
            __syncthreads();
        ft_dense_stage<kind>(&x, in, source);
        __syncthreads();
        for (; unit < (x.end + FT_DENSE_UNIT - 1) / FT_DENSE_UNIT; unit += warps) {
            if constexpr (kind == FT_DENSE_ANY)
                ft_dense_multiply_any(sums.sum, &w, &x, unit);
            else
                ft_dense_multiply<kind, cols>(sums.sum, &raw, &x, unit);
            if (unit + warps < stop)
                ft_dense_load<kind>(&raw, &w, unit + warps);
        }
    }
    const float factor[2] = {ft_dense_factor<kind>(matrix), ft_dense_factor<kind>(matrix)};
    ft_dense_put<kind, cols>(&sums, factor, put);
    __syncthreads();
    uint32_t place = tile < args.tiles_down ? first : args.down.out + first;
    for (uint32_t i = threadIdx.x; i < FT_DENSE_TILE * args.norm.rows; i += blockDim.x) {
        uint32_t o = i % FT_DENSE_TILE, row = i / FT_DENSE_TILE;
        if (first + o < matrix->out)
            args.shares.sums[((uint64_t)share * args.norm.rows + row) * args.shares.stride + place + o] =
                ft_dense_total<kind, cols>(put, 0, warps, o, row);
    }
}

struct up_args {
    struct mix_norm norm;
    struct ft_matrix up;
    struct mix_shares shares;
    float *mixed, *x; /* [rows, width], [rows, hidden] */
    uint32_t width, lowrank;
    uint32_t row_words, x_words;
    bool has_inject;
};

/* 1 / rms of a stream. */
static __device__ __forceinline__ float up_inverse(const struct up_args *args, uint32_t row, uint32_t stream)
{
    const float *from = args->shares.squares + row * args->shares.count + stream * args->shares.per_stream;
    float sum = from[0];
#pragma unroll
    for (uint32_t i = 1; i < SHARES_MAX; i++)
        if (i < args->shares.per_stream)
            sum += from[i];
    return 1.0f / sqrtf(sum / (float)args->norm.hidden + args->norm.eps);
}

/* Four of (W_down; W_inject) u / n. */
static __device__ __forceinline__ float4 up_partial(const struct up_args *args, uint32_t row, uint32_t k)
{
    const float4 *from = (const float4 *)(args->shares.sums + row * args->shares.stride + k);
    uint32_t step = args->norm.rows * args->shares.stride / 4;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (uint32_t stream = 0; stream < args->norm.streams; stream++, from += args->shares.per_stream * step) {
        float4 v = from[0];
#pragma unroll
        for (uint32_t i = 1; i < SHARES_MAX; i++)
            if (i < args->shares.per_stream) {
                float4 other = from[i * step];
                v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
            }
        float inverse = up_inverse(args, row, stream);
        sum.x = fmaf(v.x, inverse, sum.x), sum.y = fmaf(v.y, inverse, sum.y);
        sum.z = fmaf(v.z, inverse, sum.z), sum.w = fmaf(v.w, inverse, sum.w);
    }
    float n = 1.0f / (float)args->norm.streams;
    return make_float4(sum.x * n, sum.y * n, sum.z * n, sum.w * n);
}

/* t to the words of the matrix units, t and s to `mixed`. columns: lowrank rounded up to a unit. */
template <int kind>
static __device__ __forceinline__ void up_stage(const struct up_args *args, uint4 *words, uint32_t columns)
{
    uint32_t fours = max(columns, args->shares.stride) / 4;
    for (uint32_t i = threadIdx.x; i < args->norm.rows * fours; i += blockDim.x) {
        uint32_t row = i / fours, k = i % fours * 4;
        float4 v = make_float4(0, 0, 0, 0);
        if (k < args->width)
            v = up_partial(args, row, k);
        float sum[4] = {v.x, v.y, v.z, v.w}, t[4];
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) {
            bool is_t = k + e < args->lowrank, is_s = !is_t && args->has_inject && k + e < args->width;
            t[e] = is_t ? ft_silu_device(sum[e]) : 0.0f;
            if (blockIdx.x == 0 && (is_t || is_s))
                args->mixed[row * args->width + k + e] = is_t ? t[e] : 2.0f * ft_sigmoid_device(sum[e]);
        }
        if (k < columns)
            ft_dense_store_half<kind>(words + row * args->row_words, args->row_words / 3, k / 8, k / 4 % 2,
                                      t);
    }
}

/* Shared memory: t as pieces [x_words], sums of the warps (ft_dense_put), u [rows, streams, 16]. blockDim =
 * 32 streams. */
template <int kind, int cols>
__global__ void __launch_bounds__(32 * FT_HC_MAX) up_kernel(const __grid_constant__ struct up_args args)
{
    FT_SHARED_DYNAMIC(uint4, words);
    ft_begin_next();
    uint32_t rows = args.norm.rows, streams = args.norm.streams, hidden = args.norm.hidden;
    float *put = (float *)(words + args.x_words), *u = put + streams * ft_dense_put_count(kind, cols);
    uint32_t stream = threadIdx.x >> 5, h0 = blockIdx.x * FT_DENSE_TILE;
    uint32_t units = (args.lowrank + FT_DENSE_UNIT - 1) / FT_DENSE_UNIT;
    struct ft_dense_weights w;
    struct ft_dense_raw<kind> raw[UP_AHEAD];
    struct ft_dense_sums<kind, cols> sums;
    /* Outputs of the stream behind h0 + 15 are read as they lie, those behind the matrix as its last. */
    ft_dense_aim<kind>(&w, &args.up, stream * hidden + h0);
#pragma unroll
    for (int i = 0; i < UP_AHEAD; i++)
        ft_dense_load<kind>(&raw[i], &w, (uint32_t)i);
    ft_dense_clear<kind, cols>(&sums);
    if (threadIdx.x < streams)
        ft_prefetch_l2(args.norm.weight + threadIdx.x * hidden + h0);
    ft_wait_previous();
    for (uint32_t i = blockDim.x - 1 - threadIdx.x; i < rows * streams * FT_DENSE_TILE; i += blockDim.x) {
        uint32_t h = h0 + i % FT_DENSE_TILE, n = i / FT_DENSE_TILE % streams,
                 row = i / FT_DENSE_TILE / streams;
        u[i] = 0.0f;
        if (h < hidden)
            u[i] = mix_row(&args.norm, row)[n * hidden + h] *
                   (args.norm.one + args.norm.weight[n * hidden + h]) * up_inverse(&args, row, n);
    }
    struct ft_dense_x x = {words, args.row_words, args.row_words / 3, rows, 0, args.lowrank};
    up_stage<kind>(&args, words, units * FT_DENSE_UNIT);
    __syncthreads();
    if constexpr (kind == FT_DENSE_ANY) {
        for (uint32_t unit = 0; unit < units; unit++)
            ft_dense_multiply_any(sums.sum, &w, &x, unit);
    } else {
#pragma unroll
        for (int i = 0; i < UP_AHEAD; i++)
            if ((uint32_t)i < units)
                ft_dense_multiply<kind, cols>(sums.sum, &raw[i], &x, (uint32_t)i);
        for (uint32_t unit = UP_AHEAD; unit < units; unit++) {
            ft_dense_load<kind>(&raw[0], &w, unit);
            ft_dense_multiply<kind, cols>(sums.sum, &raw[0], &x, unit);
        }
    }
    const float factor[2] = {ft_dense_factor<kind>(&args.up), ft_dense_factor<kind>(&args.up)};
    ft_dense_put<kind, cols>(&sums, factor, put);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < FT_DENSE_TILE * rows; i += blockDim.x) {
        uint32_t o = i % FT_DENSE_TILE, row = i / FT_DENSE_TILE;
        float sum = 0;
        for (uint32_t n = 0; n < streams; n++) {
            float value = u[(row * streams + n) * FT_DENSE_TILE + o];
            sum += ft_sigmoid_device(ft_dense_total<kind, cols>(put, n, 1, o, row)) * value;
            if (h0 + o < hidden)
                args.norm.normed[((uint64_t)row * streams + n) * hidden + h0 + o] = value;
        }
        if (h0 + o < hidden)
            args.x[(uint64_t)row * hidden + h0 + o] = sum / (float)streams;
    }
}

/* One block a row and stream: u. */
__global__ void __launch_bounds__(THREADS)
    norm_kernel(const __grid_constant__ struct mix_norm norm, uint64_t *stamp)
{
    FT_SHARED(float, scratch, 33);
    ft_begin_next();
    ft_wait_previous();
    uint32_t row = blockIdx.x, stream = blockIdx.y, wide = norm.streams * norm.hidden;
    if (stamp && row == 0 && stream == 0 && threadIdx.x == 0)
        *stamp = ft_global_timer();
    const float *x = mix_row(&norm, row) + (uint64_t)stream * norm.hidden;
    float sum = 0;
    for (uint32_t h = threadIdx.x; h < norm.hidden; h += blockDim.x)
        sum += x[h] * x[h];
    float inverse = 1.0f / sqrtf(ft_block_sum(sum, scratch) / (float)norm.hidden + norm.eps);
    for (uint32_t h = threadIdx.x; h < norm.hidden; h += blockDim.x) {
        uint32_t at = stream * norm.hidden + h;
        norm.normed[(uint64_t)row * wide + at] = x[h] * inverse * (norm.one + norm.weight[at]);
    }
}

/* Prefill: mixed holds W_down u and W_inject u -> t and s. One block a row. */
__global__ void __launch_bounds__(THREADS)
    activate_kernel(float *mixed, uint32_t lowrank, uint32_t streams, bool has_inject)
{
    float *row = mixed + (uint64_t)blockIdx.x * (lowrank + streams), share = 1.0f / (float)streams;
    for (uint32_t k = threadIdx.x; k < lowrank; k += blockDim.x)
        row[k] = ft_silu_device(row[k] * share);
    if (has_inject && threadIdx.x < streams)
        row[lowrank + threadIdx.x] = 2.0f * ft_sigmoid_device(row[lowrank + threadIdx.x] * share);
}

/* Prefill: x (+)= sigmoid(m) u / n of one stream. */
__global__ void __launch_bounds__(THREADS) mean_kernel(const float *m, const float *normed, float *x,
                                                       uint32_t stream, uint32_t streams, uint32_t hidden)
{
    uint32_t row = blockIdx.y, h = blockIdx.x * blockDim.x + threadIdx.x;
    if (h >= hidden)
        return;
    uint64_t at = (uint64_t)row * hidden + h;
    float part =
        ft_sigmoid_device(m[at]) * normed[((uint64_t)row * streams + stream) * hidden + h] / (float)streams;
    x[at] = stream ? x[at] + part : part;
}

/* ---- launchers ---- */

static uint32_t stream_units(const struct ft_model *m)
{
    static_assert(FT_GPU_UNIT == FT_DENSE_UNIT, "what the scratch is counted with");
    return (uint32_t)ft_div_up(m->hidden, FT_DENSE_UNIT);
}
/* f32 of a row of partial sums: 16-byte loads. */
static uint32_t share_stride(const struct ft_model *m)
{
    return ft_gpu_mix_stride(m);
}

/* Shares are whole units, enough of them to fill the GPU; the same for any number of rows. */
static struct mix_shares shares_of(const struct ft_cuda *c, uint32_t tiles, uint32_t rows)
{
    struct mix_shares shares = {};
    uint32_t units = stream_units(c->model), streams = c->model->hc_count;
    uint32_t wanted =
        FT_MAX(1u, FT_MIN(5 * c->multiprocessors / (2 * tiles * streams), FT_MIN(units, SHARES_MAX)));
    uint32_t each = (uint32_t)ft_div_up(units, wanted);
    shares.per_stream = (uint32_t)ft_div_up(units, each);
    shares.count = shares.per_stream * streams;
    shares.part = each * FT_DENSE_UNIT;
    shares.stride = share_stride(c->model);
    shares.sums = (float *)c->scratch;
    shares.squares = shares.sums + (uint64_t)shares.count * rows * shares.stride;
    return shares;
}

template <int kind, int cols> static int mix_down_as(struct down_args *down, void *stream)
{
    uint32_t rows = down->norm.rows, room = FT_MIN(ft_shared_max(), SHARED_MAX);
    /* A share may begin and end within a unit. Warps: as few as have no more units each. */
    uint32_t units = down->shares.part / FT_DENSE_UNIT + (down->norm.hidden % FT_DENSE_UNIT ? 1 : 0);
    uint32_t warps = (uint32_t)ft_div_up(units, ft_div_up(units, WARPS));
    uint32_t rest = warps * ft_dense_put_count(kind, cols) * (uint32_t)sizeof(float);
    down->columns = units * FT_DENSE_UNIT;
    while (rows * ft_dense_row_words(kind, down->columns) * sizeof(uint4) + rest > room &&
           down->columns > FT_DENSE_UNIT)
        down->columns = (uint32_t)ft_round_up(down->columns / 2, FT_DENSE_UNIT);
    down->row_words = ft_dense_row_words(kind, down->columns);
    down->x_words = rows * down->row_words;
    uint32_t shared = down->x_words * (uint32_t)sizeof(uint4) + rest;
    int status = shared > 48 * 1024 ? FT_SHARED_LIMIT((down_kernel<kind, cols>), shared) : 0;
    if (status)
        return status;
    return FT_LAUNCH_NEXT((down_kernel<kind, cols>), dim3(down->tiles + 1, down->shares.count),
                          dim3(32 * warps), shared, stream, *down);
}

template <int kind, int cols> static int mix_up_as(struct up_args *up, void *stream)
{
    uint32_t rows = up->norm.rows, streams = up->norm.streams;
    up->row_words = ft_dense_row_words(kind, (uint32_t)ft_round_up(up->lowrank, FT_DENSE_UNIT));
    up->x_words = rows * up->row_words;
    uint32_t floats = streams * (ft_dense_put_count(kind, cols) + rows * FT_DENSE_TILE);
    uint32_t shared = up->x_words * (uint32_t)sizeof(uint4) + floats * (uint32_t)sizeof(float);
    int status = shared > 48 * 1024 ? FT_SHARED_LIMIT((up_kernel<kind, cols>), shared) : 0;
    if (status)
        return status;
    return FT_LAUNCH_NEXT((up_kernel<kind, cols>), dim3((uint32_t)ft_div_up(up->norm.hidden, FT_DENSE_TILE)),
                          dim3(32 * streams), shared, stream, *up);
}

template <int cols>
static int mix_few_as(bool any_down, bool any_up, struct down_args *down, struct up_args *up, void *stream)
{
    int status = any_down ? mix_down_as<FT_DENSE_ANY, 1>(down, stream)
                          : mix_down_as<FT_DENSE_BF16, cols>(down, stream);
    if (status)
        return status;
    return any_up ? mix_up_as<FT_DENSE_ANY, 1>(up, stream) : mix_up_as<FT_DENSE_BF16, cols>(up, stream);
}

/* The formats that mixers come in have kernels of their own; others are read element by element. */
static int mix_few(const struct ft_cuda *c, struct down_args *down, struct up_args *up, void *stream)
{
    bool alike = down->inject.out == 0 || ft_dense_kind_of(&down->inject) == FT_DENSE_BF16;
    bool any_down = ft_dense_kind_of(&down->down) != FT_DENSE_BF16 || !alike;
    bool any_up = ft_dense_kind_of(&up->up) != FT_DENSE_BF16;
    down->tiles_down = (uint32_t)ft_div_up(down->down.out, FT_DENSE_TILE);
    down->tiles = down->tiles_down + (uint32_t)ft_div_up(down->inject.out, FT_DENSE_TILE);
    down->shares = up->shares = shares_of(c, down->tiles, up->norm.rows);
    switch (ft_dense_columns(up->norm.rows)) {
    case 1:
        return mix_few_as<1>(any_down, any_up, down, up, stream);
    case 2:
        return mix_few_as<2>(any_down, any_up, down, up, stream);
    case 3:
        return mix_few_as<3>(any_down, any_up, down, up, stream);
    default:
        return mix_few_as<6>(any_down, any_up, down, up, stream);
    }
}

static int mix_many(const struct ft_cuda *c, const struct down_args *down, const struct up_args *up,
                    void *stream)
{
    uint32_t rows = up->norm.rows, wide = up->norm.streams * up->norm.hidden;
    struct ft_gemm_rows in = ft_gemm_activations(c, rows, wide),
                        t = ft_gemm_activations(c, rows, up->lowrank);
    float *m = ft_gemm_scratch_rows(c);
    int status = FT_LAUNCH(norm_kernel, dim3(rows, up->norm.streams), dim3(THREADS), 0, stream, down->norm,
                           down->stamp);
    if (status == 0)
        status = ft_gemm_convert(&in, down->norm.normed, wide, wide, NULL, stream);
    if (status == 0)
        status = ft_gemm_multiply(c, &in, &down->down, NULL, up->mixed, up->width, stream);
    if (status == 0 && up->has_inject)
        status = ft_gemm_multiply(c, &in, &down->inject, NULL, up->mixed + up->lowrank, up->width, stream);
    if (status == 0)
        status = FT_LAUNCH(activate_kernel, dim3(rows), dim3(THREADS), 0, stream, up->mixed, up->lowrank,
                           up->norm.streams, up->has_inject);
    if (status == 0)
        status = ft_gemm_convert(&t, up->mixed, up->width, up->lowrank, NULL, stream);
    for (uint32_t i = 0; i < up->norm.streams && status == 0; i++) {
        status = ft_gemm_multiply_part(c, &t, &up->up, i * up->norm.hidden, up->norm.hidden, NULL, m,
                                       up->norm.hidden, stream);
        if (status == 0)
            status = FT_LAUNCH(mean_kernel, dim3((uint32_t)ft_div_up(up->norm.hidden, THREADS), rows),
                               dim3(THREADS), 0, stream, m, up->norm.normed, up->x, i, up->norm.streams,
                               up->norm.hidden);
    }
    return status;
}

static struct mix_norm norm_of(const struct ft_cuda *c, enum ft_phase phase, const float *weight,
                               float *normed)
{
    const struct ft_model *m = c->model;
    bool head = phase == FT_PHASE_HEAD;
    struct mix_norm norm = {c->base + c->space.residual,
                            weight,
                            head ? c->step.logit_row : NULL,
                            normed,
                            head ? c->step.logit_rows : c->step.rows,
                            m->hc_count,
                            m->hidden,
                            m->rms_eps,
                            m->norm_plus_one ? 1.0f : 0.0f};
    return norm;
}

int ft_cuda_mix(const struct ft_cuda *c, enum ft_phase phase, uint32_t layer, void *stream)
{
    const struct ft_model *m = c->model;
    bool head = phase == FT_PHASE_HEAD;
    const struct ft_layer_weights *w = head ? NULL : &c->weights->layers[layer];
    float *x = c->base + (head ? c->space.head_x : c->space.x);
    uint64_t *stamp =
        head ? NULL
             : ft_cuda_stamp_of(c, layer,
                                phase == FT_PHASE_ATTENTION ? FT_CUDA_STAMP_MIX : FT_CUDA_STAMP_MIX_MLP);
    if (m->hc_count == 1) {
        const float *weight = head                          ? c->weights->final_norm
                              : phase == FT_PHASE_ATTENTION ? w->attention_norm
                                                            : w->mlp_norm;
        struct mix_norm norm = norm_of(c, phase, weight, x);
        return FT_LAUNCH_NEXT(norm_kernel, dim3(norm.rows), dim3(THREADS), 0, stream, norm, stamp);
    }
    const struct ft_mix_weights *mix = head                          ? &c->weights->top_mix
                                       : phase == FT_PHASE_ATTENTION ? &w->attention_mix
                                                                     : &w->mlp_mix;
    struct down_args down = {};
    down.norm = norm_of(c, phase, mix->norm, c->base + c->space.normed);
    down.down = mix->down;
    if (!head)
        down.inject = mix->inject;
    down.stamp = stamp;
    struct up_args up = {};
    up.norm = down.norm;
    up.up = mix->up;
    up.mixed = c->base + c->space.mixed;
    up.x = x;
    up.width = m->hc_lowrank + m->hc_count;
    up.lowrank = m->hc_lowrank;
    up.has_inject = !head;
    return up.norm.rows > FT_CUDA_DECODE_ROWS ? mix_many(c, &down, &up, stream)
                                              : mix_few(c, &down, &up, stream);
}

/* Also of gemm.cuh's buffers: the widest input, the widest f32 row, a slice of weights. */
uint64_t ft_cuda_scratch_bytes(const struct ft_model *m, uint32_t rows)
{
    return ft_workspace_gpu_dense_bytes(m, rows);
}
