/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Norms and hyper-connection mixers. Decode rows with streams: two kernels.
 *
 *   down   block = 8 outputs of (W_down; W_inject) x one share of the columns: norms the share's streams on
 * the way in and leaves partial sums; the blocks of the first outputs store u, too up     block = 8 hidden
 * values, one warp a stream: adds the partial sums up to t = silu(W_down u / n), then x = mean over streams
 * of sigmoid(W_up t) u; block 0 stores t and s
 *
 * Partial sums lie in c->scratch, f32 [shares, rows, lowrank + n].
 */
#include "kernels_cuda/dense.cuh"
#include "kernels_cuda/gemm.cuh"
#include "kernels_cuda/kernels_cuda.h"

#define WARPS 8u
#define THREADS (32u * WARPS)
#define SHARED_MAX (96u * 1024)
#define UP_AHEAD 3 /* units of W_up on their way before t is known */

/* Rows of residual, and their norm. */
struct mix_norm {
    const float *residual, *weight; /* [rows, streams, hidden], [streams, hidden] */
    const uint32_t *index;          /* row r is residual row index[r]; NULL: r */
    float *normed;                  /* u [rows, streams, hidden] */
    uint32_t rows, streams, hidden;
    float eps, one; /* one: 1 when the norm scales by 1 + w */
};

struct down_args {
    struct mix_norm norm;
    struct ft_matrix down, inject; /* inject.out 0: the top mixer has none */
    float *partial;
    uint32_t width, tiles_down,
        units; /* outputs of a row of partial; block tiles of down; units of a share */
    uint32_t columns, row_words, x_words;
    uint64_t *stamp;
};

static __device__ __forceinline__ const float *mix_row(const struct mix_norm *norm, uint32_t row)
{
    uint64_t from = norm->index ? norm->index[row] : row;
    return norm->residual + from * norm->streams * norm->hidden;
}

/*
 * inverse[row][stream] = 1 / rms for streams [first, last]. A stream is summed in WARPS parts whatever the
 * number of rows, so that a row's bits do not depend on the others. part: [rows, streams, WARPS]. Ends with
 * __syncthreads.
 */
static __device__ __forceinline__ void mix_inverses(const struct mix_norm *norm, uint32_t first,
                                                    uint32_t last, float *part, float *inverse)
{
    uint32_t lane = threadIdx.x & 31, streams = last - first + 1, warps = blockDim.x >> 5;
    uint32_t part_columns = (norm->hidden + WARPS * 4 - 1) / (WARPS * 4) * 4;
    for (uint32_t i = threadIdx.x >> 5; i < norm->rows * streams * WARPS; i += warps) {
        uint32_t p = i % WARPS, stream = first + i / WARPS % streams, row = i / WARPS / streams;
        uint32_t begin = p * part_columns, end = min(begin + part_columns, norm->hidden);
        const float *from = mix_row(norm, row) + (uint64_t)stream * norm->hidden;
        float sum = 0;
        if (((uintptr_t)from & 15) == 0 && norm->hidden % 4 == 0) {
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
            part[(row * norm->streams + stream) * WARPS + p] = sum;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < norm->rows * streams; i += blockDim.x) {
        uint32_t at = i / streams * norm->streams + first + i % streams;
        float sum = 0;
        for (uint32_t p = 0; p < WARPS; p++)
            sum += part[at * WARPS + p];
        inverse[at] = 1.0f / sqrtf(sum / (float)norm->hidden + norm->eps);
    }
    __syncthreads();
}

/* u, 8 at a time. */
struct norm_source {
    const struct mix_norm *norm;
    const float *inverse;
    __device__ void operator()(uint32_t row, uint32_t column, float v[8]) const
    {
        uint32_t wide = norm->streams * norm->hidden;
        struct ft_dense_rows_source x = {mix_row(norm, row), 0, wide, NULL},
                                    weight = {norm->weight, 0, wide, NULL};
        float w[8];
        x(0, column, v);
        weight(0, column, w);
        uint32_t stream = column / norm->hidden, next = (stream + 1) * norm->hidden;
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            while (column + i >= next && column + i < wide) {
                stream++;
                next += norm->hidden;
            }
            v[i] =
                column + i < wide ? v[i] * inverse[row * norm->streams + stream] * (norm->one + w[i]) : 0.0f;
        }
    }
};

/* Shared memory: activations [x_words], sums [WARPS, 8, 16], parts [rows, streams, WARPS], inverses [rows,
 * streams]. */
template <int kind, bool wide>
__global__ void __launch_bounds__(THREADS, 2) down_kernel(const __grid_constant__ struct down_args args)
{
    FT_SHARED_DYNAMIC(uint4, words);
    float *put = (float *)(words + args.x_words), *part = put + WARPS * FT_DENSE_PUT_COUNT;
    float *inverse = part + args.norm.rows * args.norm.streams * WARPS;
    uint32_t tile = blockIdx.x, share = blockIdx.y, warp = threadIdx.x >> 5,
             in = args.norm.streams * args.norm.hidden;
    uint32_t begin = share * args.units * FT_DENSE_UNIT, end = min(begin + args.units * FT_DENSE_UNIT, in);
    if (args.stamp && tile == 0 && share == 0 && threadIdx.x == 0)
        *args.stamp = ft_global_timer();
    const struct ft_matrix *matrix = tile < args.tiles_down ? &args.down : &args.inject;
    uint32_t first = (tile < args.tiles_down ? tile : tile - args.tiles_down) * 8;
    struct ft_dense_weights<1> w;
    struct ft_dense_raw<kind, 1> raw;
    struct ft_dense_sums<kind, 1> sums;
    ft_dense_aim<kind, 1>(&w, 0, matrix, first);
    ft_dense_load<kind, 1>(&raw, &w, ft_dense_first(begin, warp, WARPS));
    ft_dense_clear<kind, 1>(&sums);
    mix_inverses(&args.norm, begin / args.norm.hidden, (end - 1) / args.norm.hidden, part, inverse);
    struct norm_source source = {&args.norm, inverse};
    struct ft_dense_x x = {words, args.row_words, args.norm.rows, begin, end};
    for (; x.begin < end; x.begin = x.end) {
        x.end = min(x.begin + args.columns, end);
        if (x.begin > begin)
            __syncthreads();
        ft_dense_stage<kind>(&x, in, source);
        __syncthreads();
        ft_dense_walk<kind, 1, wide>(&sums, &raw, &w, &x, warp, WARPS);
    }
    ft_dense_put<kind, 1, wide>(&sums, &w, put);
    __syncthreads();
    uint32_t place = tile < args.tiles_down ? first : args.down.out + first;
    for (uint32_t i = threadIdx.x; i < 8 * args.norm.rows; i += blockDim.x)
        if (first + i % 8 < matrix->out)
            args.partial[((uint64_t)share * args.norm.rows + i / 8) * args.width + place + i % 8] =
                ft_dense_total(put, 1, 0, WARPS, 0, i % 8, i / 8);
    if (tile > 0)
        return;
    for (uint32_t row = 0; row < args.norm.rows; row++) {
        const float *from = mix_row(&args.norm, row);
        for (uint32_t c = begin + threadIdx.x; c < end; c += blockDim.x)
            args.norm.normed[(uint64_t)row * in + c] =
                from[c] * inverse[row * args.norm.streams + c / args.norm.hidden] *
                (args.norm.one + args.norm.weight[c]);
    }
}

struct up_args {
    struct ft_matrix up;
    const float *partial, *normed;
    float *mixed, *x; /* [rows, width], [rows, hidden] */
    uint32_t shares, rows, streams, hidden, width, lowrank;
    uint32_t row_words, x_words;
    bool has_inject;
};

static __device__ __forceinline__ float up_partial(const struct up_args *args, uint32_t row, uint32_t k)
{
    float sum = 0;
    for (uint32_t i = 0; i < args->shares; i++)
        sum += args->partial[((uint64_t)i * args->rows + row) * args->width + k];
    return sum * (1.0f / (float)args->streams);
}

/* Shared memory: t as pieces [x_words], sums [streams, 8, 16], t [rows, lowrank rounded up to 8], u [rows,
 * streams, 8]. blockDim = 32 streams. */
template <int kind, bool wide>
__global__ void __launch_bounds__(32 * FT_HC_MAX) up_kernel(const __grid_constant__ struct up_args args)
{
    FT_SHARED_DYNAMIC(uint4, words);
    uint32_t t_stride = (args.lowrank + 7) / 8 * 8;
    float *put = (float *)(words + args.x_words), *t = put + args.streams * FT_DENSE_PUT_COUNT;
    float *u = t + args.rows * t_stride;
    uint32_t stream = threadIdx.x >> 5, h0 = blockIdx.x * 8;
    struct ft_dense_weights<1> w;
    struct ft_dense_raw<kind, 1> raw[UP_AHEAD];
    struct ft_dense_sums<kind, 1> sums;
    ft_dense_aim<kind, 1>(&w, 0, &args.up, stream * args.hidden + h0);
#pragma unroll
    for (int i = 0; i < UP_AHEAD; i++)
        ft_dense_load<kind, 1>(&raw[i], &w, (uint32_t)i);
    ft_dense_clear<kind, 1>(&sums);
    for (uint32_t i = threadIdx.x; i < args.rows * args.streams * 8; i += blockDim.x) {
        uint64_t at = (uint64_t)(i / 8) * args.hidden + h0 + i % 8; /* row and stream, as in normed */
        u[i] = h0 + i % 8 < args.hidden ? args.normed[at] : 0.0f;
    }
    for (uint32_t row = 0; row < args.rows; row++)
        for (uint32_t k = threadIdx.x; k < t_stride; k += blockDim.x)
            t[row * t_stride + k] = k < args.lowrank ? ft_silu_device(up_partial(&args, row, k)) : 0.0f;
    __syncthreads();
    if (blockIdx.x == 0)
        for (uint32_t i = threadIdx.x; i < args.rows * args.width; i += blockDim.x) {
            uint32_t row = i / args.width, k = i % args.width;
            if (k < args.lowrank)
                args.mixed[i] = t[row * t_stride + k];
            else if (args.has_inject)
                args.mixed[i] = 2.0f * ft_sigmoid_device(up_partial(&args, row, k));
        }
    struct ft_dense_x x = {words, args.row_words, args.rows, 0, args.lowrank};
    struct ft_dense_rows_source source = {t, t_stride, t_stride, NULL};
    ft_dense_stage<kind>(&x, args.lowrank, source);
    __syncthreads();
    uint32_t units = (args.lowrank + FT_DENSE_UNIT - 1) / FT_DENSE_UNIT;
    if constexpr (kind == FT_DENSE_ANY) {
        ft_dense_walk<kind, 1, wide>(&sums, &raw[0], &w, &x, 0, 1);
    } else {
#pragma unroll
        for (int i = 0; i < UP_AHEAD; i++)
            if ((uint32_t)i < units)
                ft_dense_multiply<kind, 1, wide>(sums.sum, &raw[i], &x, (uint32_t)i);
        for (uint32_t unit = UP_AHEAD; unit < units; unit++) {
            ft_dense_load<kind, 1>(&raw[0], &w, unit);
            ft_dense_multiply<kind, 1, wide>(sums.sum, &raw[0], &x, unit);
        }
    }
    ft_dense_put<kind, 1, wide>(&sums, &w, put);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 8 * args.rows; i += blockDim.x) {
        uint32_t h = i % 8, row = i / 8;
        float sum = 0;
        for (uint32_t n = 0; n < args.streams; n++)
            sum += ft_sigmoid_device(ft_dense_total(put, 1, n, 1, 0, h, row)) *
                   u[(row * args.streams + n) * 8 + h];
        if (h0 + h < args.hidden)
            args.x[(uint64_t)row * args.hidden + h0 + h] = sum / (float)args.streams;
    }
}

/* One block a row and stream: u, and its bf16 copy when `to` (columns as ft_gemm_rows). */
__global__ void __launch_bounds__(THREADS)
    norm_kernel(const __grid_constant__ struct mix_norm norm, uint16_t *to, uint32_t columns, uint64_t *stamp)
{
    FT_SHARED(float, scratch, 33);
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
        float u = x[h] * inverse * (norm.one + norm.weight[at]);
        norm.normed[(uint64_t)row * wide + at] = u;
        if (to)
            to[(uint64_t)row * columns + at] = (uint16_t)ft_to_bf16(u);
    }
    if (to && stream == 0)
        for (uint32_t c = wide + threadIdx.x; c < columns; c += blockDim.x)
            to[(uint64_t)row * columns + c] = 0;
}

/* Prefill: mixed holds W_down u and W_inject u -> t and s; t in bf16 to `to`. One block a row. */
__global__ void __launch_bounds__(THREADS) activate_kernel(float *mixed, uint32_t lowrank, uint32_t streams,
                                                           bool has_inject, uint16_t *to, uint32_t columns)
{
    uint32_t width = lowrank + streams;
    float *row = mixed + (uint64_t)blockIdx.x * width;
    for (uint32_t k = threadIdx.x; k < columns; k += blockDim.x) {
        float t = 0;
        if (k < lowrank)
            row[k] = t = ft_silu_device(row[k] * (1.0f / (float)streams));
        to[(uint64_t)blockIdx.x * columns + k] = (uint16_t)ft_to_bf16(t);
    }
    if (has_inject && threadIdx.x < streams)
        row[lowrank + threadIdx.x] =
            2.0f * ft_sigmoid_device(row[lowrank + threadIdx.x] * (1.0f / (float)streams));
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

static uint32_t shares_max(const struct ft_model *m)
{
    static_assert(FT_GPU_UNIT == FT_DENSE_UNIT && FT_GPU_WARPS == WARPS, "what the scratch is counted with");
    return ft_gpu_mix_shares_max(m);
}

template <int kind, bool wide>
static int mix_few_as(const struct ft_cuda *c, struct down_args *down, struct up_args *up, void *stream)
{
    uint32_t rows = up->rows, room = FT_MIN(ft_shared_max(), SHARED_MAX),
             tiles_inject = (down->inject.out + 7) / 8;
    uint32_t rest = (WARPS * FT_DENSE_PUT_COUNT + rows * up->streams * (WARPS + 1)) * (uint32_t)sizeof(float);
    /* A share is a whole number of units; there are enough shares to fill the GPU, and at most a unit a warp.
     */
    uint32_t units = (uint32_t)ft_div_up((uint64_t)up->streams * up->hidden, FT_DENSE_UNIT);
    down->tiles_down = (down->down.out + 7) / 8;
    uint32_t shares = 2 * c->multiprocessors / (down->tiles_down + tiles_inject);
    shares = FT_MAX(1u, FT_MIN(shares, shares_max(c->model)));
    down->units = (uint32_t)ft_div_up(units, shares);
    up->shares = (uint32_t)ft_div_up(units, down->units);
    down->columns = down->units * FT_DENSE_UNIT;
    while (rows * ft_dense_row_words(kind, down->columns) * sizeof(uint4) + rest > room &&
           down->columns > FT_DENSE_UNIT)
        down->columns = (uint32_t)ft_round_up(down->columns / 2, FT_DENSE_UNIT);
    down->row_words = ft_dense_row_words(kind, down->columns);
    down->x_words = rows * down->row_words;
    uint32_t shared = down->x_words * (uint32_t)sizeof(uint4) + rest;
    int status = shared > 48 * 1024 ? FT_SHARED_LIMIT((down_kernel<kind, wide>), shared) : 0;
    if (status == 0)
        status = FT_LAUNCH((down_kernel<kind, wide>), dim3(down->tiles_down + tiles_inject, up->shares),
                           dim3(THREADS), shared, stream, *down);
    return status;
}

template <int kind, bool wide> static int mix_up_as(struct up_args *up, void *stream)
{
    uint32_t rows = up->rows;
    up->row_words = ft_dense_row_words(kind, (uint32_t)ft_round_up(up->lowrank, FT_DENSE_UNIT));
    up->x_words = rows * up->row_words;
    uint32_t floats = up->streams * FT_DENSE_PUT_COUNT + rows * ((up->lowrank + 7) / 8 * 8 + up->streams * 8);
    uint32_t shared = up->x_words * (uint32_t)sizeof(uint4) + floats * (uint32_t)sizeof(float);
    int status = shared > 48 * 1024 ? FT_SHARED_LIMIT((up_kernel<kind, wide>), shared) : 0;
    if (status)
        return status;
    return FT_LAUNCH((up_kernel<kind, wide>), dim3((up->hidden + 7) / 8), dim3(32 * up->streams), shared,
                     stream, *up);
}

/* The formats that mixers come in have kernels of their own; others are read element by element. */
static int mix_few(const struct ft_cuda *c, struct down_args *down, struct up_args *up, void *stream)
{
    bool wide = up->rows > 8,
         alike = down->inject.out == 0 || ft_dense_kind_of(&down->inject) == FT_DENSE_BF16;
    int status;
    if (ft_dense_kind_of(&down->down) != FT_DENSE_BF16 || !alike)
        status = mix_few_as<FT_DENSE_ANY, true>(c, down, up, stream);
    else
        status = wide ? mix_few_as<FT_DENSE_BF16, true>(c, down, up, stream)
                      : mix_few_as<FT_DENSE_BF16, false>(c, down, up, stream);
    if (status)
        return status;
    if (ft_dense_kind_of(&up->up) != FT_DENSE_BF16)
        return mix_up_as<FT_DENSE_ANY, true>(up, stream);
    return wide ? mix_up_as<FT_DENSE_BF16, true>(up, stream) : mix_up_as<FT_DENSE_BF16, false>(up, stream);
}

static int mix_many(const struct ft_cuda *c, const struct down_args *down, const struct up_args *up,
                    void *stream)
{
    uint32_t rows = up->rows, wide = up->streams * up->hidden;
    struct ft_gemm_rows in = ft_gemm_activations(c, rows, wide),
                        t = ft_gemm_activations(c, rows, up->lowrank);
    float *m = ft_gemm_scratch_rows(c);
    int status = FT_LAUNCH(norm_kernel, dim3(rows, up->streams), dim3(THREADS), 0, stream, down->norm, in.x,
                           in.columns, down->stamp);
    if (status == 0)
        status = ft_gemm_multiply(c, &in, &down->down, NULL, up->mixed, up->width, stream);
    if (status == 0 && up->has_inject)
        status = ft_gemm_multiply(c, &in, &down->inject, NULL, up->mixed + up->lowrank, up->width, stream);
    if (status == 0)
        status = FT_LAUNCH(activate_kernel, dim3(rows), dim3(THREADS), 0, stream, up->mixed, up->lowrank,
                           up->streams, up->has_inject, t.x, t.columns);
    for (uint32_t i = 0; i < up->streams && status == 0; i++) {
        status =
            ft_gemm_multiply_part(c, &t, &up->up, i * up->hidden, up->hidden, NULL, m, up->hidden, stream);
        if (status == 0)
            status = FT_LAUNCH(mean_kernel, dim3((uint32_t)ft_div_up(up->hidden, THREADS), rows),
                               dim3(THREADS), 0, stream, m, up->normed, up->x, i, up->streams, up->hidden);
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
        return FT_LAUNCH(norm_kernel, dim3(norm.rows), dim3(THREADS), 0, stream, norm, (uint16_t *)NULL, 0u,
                         stamp);
    }
    const struct ft_mix_weights *mix = head                          ? &c->weights->top_mix
                                       : phase == FT_PHASE_ATTENTION ? &w->attention_mix
                                                                     : &w->mlp_mix;
    struct down_args down = {};
    down.norm = norm_of(c, phase, mix->norm, c->base + c->space.normed);
    down.down = mix->down;
    if (!head)
        down.inject = mix->inject;
    down.partial = (float *)c->scratch;
    down.width = m->hc_lowrank + m->hc_count;
    down.stamp = stamp;
    struct up_args up = {};
    up.up = mix->up;
    up.partial = down.partial;
    up.normed = down.norm.normed;
    up.mixed = c->base + c->space.mixed;
    up.x = x;
    up.rows = down.norm.rows;
    up.streams = m->hc_count;
    up.hidden = m->hidden;
    up.width = down.width;
    up.lowrank = m->hc_lowrank;
    up.has_inject = !head;
    return up.rows > FT_CUDA_DECODE_ROWS ? mix_many(c, &down, &up, stream) : mix_few(c, &down, &up, stream);
}

/* Also of gemm.cuh's buffers: the widest input, the widest f32 row, a slice of weights. */
uint64_t ft_cuda_scratch_bytes(const struct ft_model *m, uint32_t rows)
{
    return ft_workspace_gpu_dense_bytes(m, rows);
}
