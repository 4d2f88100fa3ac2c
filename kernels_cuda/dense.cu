/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense projections. Decode (<= FT_CUDA_DECODE_ROWS rows): one kernel per op on the ground of dense.cuh; what
 * comes before (gated norm) happens while activations are staged, what comes after (bias, residual, SwiGLU)
 * when sums are stored. Prefill: conversion, gemm.cu, and a kernel for what comes after.
 */
#include "kernels_cuda/dense.cuh"
#include "kernels_cuda/gemm.cuh"
#include "kernels_cuda/kernels_cuda.h"
#include "kernels_cuda/linear.cuh"

#define WARPS 8u
#define THREADS (32u * WARPS)
#define SEGMENTS_MAX 4u
#define BLOCKS_PER_MULTIPROCESSOR 2u
#define SHARED_MAX (96u * 1024)  /* of a block: two fit into a multiprocessor of 227 KB */
#define SHARED_ALL (224u * 1024) /* of a multiprocessor */
#define TAIL_BLOCKS 16u          /* that move the convolution's tail beside the out projection */
/* Units of a warp on their way before the activations are there: FLIGHT in registers, the others into L2. */
#define AHEAD 4u
#define FLIGHT 2

enum dense_finish { FINISH_STORE, FINISH_RESIDUAL, FINISH_SWIGLU };

/* Gated norm of a linear layer: o / rms(o) * norm * act(z), per value head. */
struct dense_gate {
    const float *z, *norm; /* z NULL: none */
    uint64_t z_stride;
    uint32_t heads, dim;
    float eps;
    bool silu;
};

struct dense_args {
    struct ft_matrix w[SEGMENTS_MAX];
    const float *bias[SEGMENTS_MAX];
    uint32_t tile_end[SEGMENTS_MAX]; /* block tiles up to the end of the segment */
    uint32_t out_begin[SEGMENTS_MAX];
    uint32_t segments, tiles, blocks; /* tiles in all; blocks that compute */
    uint32_t rows, in, columns;       /* columns held in shared memory at a time */
    uint32_t row_words, x_words, warps_k, ahead;
    const float *x;
    uint64_t x_stride;
    struct dense_gate gate;
    enum dense_finish finish;
    float *y; /* or the residual [rows, streams, out] */
    uint64_t y_stride;
    const float *s;
    uint64_t s_stride;
    uint32_t streams;
    bool has_tail;
    struct ft_tail_args tail;
    uint64_t *stamp;
};

/* inverse[row][head] = 1 / rms(o): one warp a head. */
static __device__ __forceinline__ void gate_norms(const struct dense_gate *gate, const float *x,
                                                  uint64_t x_stride, uint32_t rows, float *inverse)
{
    uint32_t lane = threadIdx.x & 31;
    for (uint32_t i = threadIdx.x >> 5; i < rows * gate->heads; i += blockDim.x >> 5) {
        const float *o = x + i / gate->heads * x_stride + (uint64_t)(i % gate->heads) * gate->dim;
        float sum = 0;
        for (uint32_t j = lane; j < gate->dim; j += 32)
            sum += o[j] * o[j];
        sum = ft_warp_sum(sum);
        if (lane == 0)
            inverse[i] = 1.0f / sqrtf(sum / (float)gate->dim + gate->eps);
    }
}

/* 8 gated activations. */
struct gate_source {
    struct ft_dense_rows_source o, z;
    const struct dense_gate *gate;
    const float *inverse;
    __device__ void operator()(uint32_t row, uint32_t column, float v[8]) const
    {
        float g[8];
        o(row, column, v);
        z(row, column, g);
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            uint32_t at = min(column + i, o.in - 1), head = at / gate->dim;
            v[i] *= inverse[row * gate->heads + head] * gate->norm[at - head * gate->dim];
            v[i] *= gate->silu ? ft_silu_device(g[i]) : ft_sigmoid_device(g[i]);
        }
    }
};

/* The matrices' outputs of a block tile: their segment, and the first output in it. */
static __device__ __forceinline__ uint32_t dense_segment(const struct dense_args *args, uint32_t tile,
                                                         uint32_t *first_tile)
{
    uint32_t s = 0;
    *first_tile = 0;
    while (s + 1 < args->segments && tile >= args->tile_end[s])
        *first_tile = args->tile_end[s++];
    return s;
}

/* Outputs of one block tile. With SwiGLU column tile 0 is of the gate and column tile 1 of the up projection.
 */
template <int tiles> static __device__ __forceinline__ uint32_t dense_outputs(const struct dense_args *args)
{
    return WARPS / args->warps_k * (args->finish == FINISH_SWIGLU ? 8 : 8 * tiles);
}

template <int kind, int tiles>
static __device__ __forceinline__ void dense_aim(const struct dense_args *args, uint32_t tile,
                                                 struct ft_dense_weights<tiles> *w)
{
    uint32_t first_tile, segment = dense_segment(args, tile, &first_tile),
                         warp_n = (threadIdx.x >> 5) / args->warps_k;
    uint32_t first = (tile - first_tile) * dense_outputs<tiles>(args);
#pragma unroll
    for (int n = 0; n < tiles; n++) {
        if (args->finish == FINISH_SWIGLU)
            ft_dense_aim<kind, tiles>(w, n, &args->w[n], first + warp_n * 8);
        else
            ft_dense_aim<kind, tiles>(w, n, &args->w[segment], first + (warp_n * tiles + n) * 8);
    }
}

/* Item i of a block tile's results that are added to the residual: its output, stream and row. */
struct dense_item {
    uint32_t o, row;
    uint64_t y, s; /* elements of args->y and args->s */
    bool inside;
};
template <int tiles>
static __device__ __forceinline__ struct dense_item dense_item_of(const struct dense_args *args,
                                                                  uint32_t first, uint32_t i)
{
    uint32_t outputs = dense_outputs<tiles>(args), stream = i / outputs % args->streams;
    struct dense_item item;
    item.o = i % outputs;
    item.row = i / outputs / args->streams;
    item.y = ((uint64_t)item.row * args->streams + stream) * args->w[0].out + first + item.o;
    item.s = item.row * args->s_stride + stream;
    item.inside = item.row < args->rows && first + item.o < args->w[0].out;
    return item;
}

/* What a thread's first item is added to, asked for before the sums are known. */
struct dense_held {
    float y, s;
};
template <int tiles>
static __device__ __forceinline__ struct dense_held dense_hold(const struct dense_args *args, uint32_t tile)
{
    struct dense_held held = {0.0f, 1.0f};
    if (args->finish != FINISH_RESIDUAL)
        return held;
    struct dense_item item = dense_item_of<tiles>(args, tile * dense_outputs<tiles>(args), threadIdx.x);
    if (item.inside) {
        held.y = args->y[item.y];
        held.s = args->streams == 1 ? 1.0f : args->s[item.s];
    }
    return held;
}

template <int tiles>
static __device__ __forceinline__ float dense_sum(const struct dense_args *args, uint32_t segment,
                                                  uint32_t first, uint32_t o, uint32_t row, const float *put)
{
    uint32_t warps_k = args->warps_k;
    float value = ft_dense_total(put, tiles, o / (8 * tiles) * warps_k, warps_k, o / 8 % tiles, o % 8, row);
    return args->bias[segment] ? value + args->bias[segment][first + o] : value;
}

template <int tiles>
static __device__ __forceinline__ void dense_finish(const struct dense_args *args, uint32_t tile,
                                                    const float *put, struct dense_held held)
{
    uint32_t first_tile, segment = dense_segment(args, tile, &first_tile),
                         outputs = dense_outputs<tiles>(args);
    uint32_t first = (tile - first_tile) * outputs, warps_k = args->warps_k;
    if (args->finish == FINISH_RESIDUAL) {
        for (uint32_t i = threadIdx.x; i < outputs * args->rows * args->streams; i += blockDim.x) {
            struct dense_item item = dense_item_of<tiles>(args, first, i);
            if (!item.inside)
                continue;
            float value = dense_sum<tiles>(args, segment, first, item.o, item.row, put);
            if (i != threadIdx.x) {
                held.y = args->y[item.y];
                held.s = args->streams == 1 ? 1.0f : args->s[item.s];
            }
            args->y[item.y] = held.y + held.s * value;
        }
        return;
    }
    for (uint32_t i = threadIdx.x; i < outputs * args->rows; i += blockDim.x) {
        uint32_t o = i % outputs, row = i / outputs, out = first + o;
        if (out >= args->w[segment].out)
            continue;
        if (args->finish == FINISH_SWIGLU) {
            float gate = ft_dense_total(put, tiles, o / 8 * warps_k, warps_k, 0, o % 8, row);
            float up = ft_dense_total(put, tiles, o / 8 * warps_k, warps_k, tiles > 1 ? 1 : 0, o % 8, row);
            args->y[row * args->y_stride + out] = ft_silu_device(gate) * up;
            continue;
        }
        args->y[row * args->y_stride + args->out_begin[segment] + out] =
            dense_sum<tiles>(args, segment, first, o, row, put);
    }
}

/* Units of a warp in registers, beside the one that is multiplied. */
template <int tiles, bool wide> static __host__ __device__ constexpr int dense_flight()
{
    return tiles == 1 && !wide ? FLIGHT : 1;
}

/* Shared memory: activations [x_words], sums [WARPS, tiles, 8, 16], norms [rows, heads]. */
template <int kind, int tiles, bool wide>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    dense_kernel(const __grid_constant__ struct dense_args args)
{
    FT_SHARED_DYNAMIC(uint4, words);
    float *put = (float *)(words + args.x_words), *inverse = put + WARPS * tiles * FT_DENSE_PUT_COUNT;
    ft_begin_next();
    if (blockIdx.x >= args.blocks) {
        ft_wait_previous();
        ft_tail_move(args.tail, (blockIdx.x - args.blocks) * THREADS + threadIdx.x,
                     (gridDim.x - args.blocks) * THREADS);
        return;
    }
    uint32_t warp_k = (threadIdx.x >> 5) % args.warps_k, warps_k = args.warps_k;
    bool whole = args.columns >= args.in; /* then activations are staged once */
    struct ft_dense_x x = {words, args.row_words, args.rows, 0, min(args.columns, args.in)};
    struct ft_dense_rows_source rows = {args.x, args.x_stride, args.in, NULL};
    struct gate_source gated = {rows, {args.gate.z, args.gate.z_stride, args.in, NULL}, &args.gate, inverse};
    constexpr int flight = dense_flight<tiles, wide>();
    struct ft_dense_weights<tiles> w;
    struct ft_dense_raw<kind, tiles> raw[flight];
    uint32_t tile = blockIdx.x, units = (args.in + FT_DENSE_UNIT - 1) / FT_DENSE_UNIT;
    dense_aim<kind, tiles>(&args, tile, &w);
    ft_dense_load_all<kind, tiles, flight>(raw, &w, warp_k, warps_k, units);
    for (uint32_t i = flight; i < args.ahead; i++)
        ft_dense_prefetch<kind, tiles>(&w, warp_k + i * warps_k);
    ft_wait_previous();
    if (args.stamp && blockIdx.x == 0 && threadIdx.x == 0)
        *args.stamp = ft_global_timer();
    if (args.gate.z)
        gate_norms(&args.gate, args.x, args.x_stride, args.rows, inverse);
    for (bool staged = false; tile < args.tiles;) {
        struct ft_dense_sums<kind, tiles> sums;
        ft_dense_clear<kind, tiles>(&sums);
        struct dense_held held = dense_hold<tiles>(&args, tile);
        for (uint32_t begin = 0; begin < args.in; begin += args.columns) {
            if (!staged || !whole) {
                x.begin = begin;
                x.end = min(begin + args.columns, args.in);
                if (args.gate.z || begin > 0 || staged)
                    __syncthreads(); /* the columns before are no longer read; the norms are there */
                if (args.gate.z)
                    ft_dense_stage<kind>(&x, args.in, gated);
                else
                    ft_dense_stage<kind>(&x, args.in, rows);
                staged = true;
                __syncthreads();
            }
            if constexpr (flight > 1)
                ft_dense_walk_flight<kind, tiles, wide, flight>(&sums, raw, &w, &x, warp_k, warps_k, units);
            else
                ft_dense_walk<kind, tiles, wide>(&sums, raw, &w, &x, warp_k, warps_k);
        }
        ft_dense_put<kind, tiles, wide>(&sums, &w, put);
        uint32_t next = tile + args.blocks;
        if (next < args.tiles) { /* on their way while sums are stored */
            dense_aim<kind, tiles>(&args, next, &w);
            ft_dense_load_all<kind, tiles, flight>(raw, &w, warp_k, warps_k, units);
        }
        __syncthreads();
        dense_finish<tiles>(&args, tile, put, held);
        if (next < args.tiles)
            __syncthreads(); /* before the next sums */
        tile = next;
    }
}

/* ---- launching the decode form ---- */

/*
 * Warps that share the columns of a tile: as many as keep them evenly busy, more when there are too few
 * outputs to fill the GPU otherwise. Depends on the matrix alone, since it decides the order of sums.
 */
static uint32_t choose_warps_k(const struct ft_cuda *c, uint32_t in, uint32_t out)
{
    uint32_t units = (uint32_t)ft_div_up(in, FT_DENSE_UNIT), best = 1;
    double best_score = 0;
    for (uint32_t warps_k = 1; warps_k <= WARPS; warps_k *= 2) {
        double even = (double)units / (double)(ft_div_up(units, warps_k) * warps_k);
        double fill =
            (double)out / (8.0 * (WARPS / warps_k)) / (BLOCKS_PER_MULTIPROCESSOR * c->multiprocessors);
        double score = even * FT_MIN(fill, 1.0);
        if (score > best_score) {
            best_score = score;
            best = warps_k;
        }
    }
    return best;
}

/* Column tiles of a warp: more share the activations' reads, fewer fill the GPU. */
static uint32_t choose_tiles(const struct ft_cuda *c, const struct dense_args *args, uint32_t out)
{
    uint32_t tiles = args->rows > 8 ? 4 : 2;
    while (tiles > 1 &&
           out / (8 * WARPS / args->warps_k * tiles) < BLOCKS_PER_MULTIPROCESSOR * c->multiprocessors)
        tiles /= 2;
    return tiles;
}

template <int kind, int tiles, bool wide>
static int dense_launch_as(const struct ft_cuda *c, struct dense_args *args, void *stream)
{
    uint32_t outputs = WARPS / args->warps_k * (args->finish == FINISH_SWIGLU ? 8 : 8 * tiles),
             shared_max = ft_shared_max();
    uint32_t rest = WARPS * tiles * FT_DENSE_PUT_COUNT * sizeof(float);
    args->tiles = 0;
    for (uint32_t s = 0; s < (args->finish == FINISH_SWIGLU ? 1 : args->segments); s++)
        args->tile_end[s] = args->tiles += (uint32_t)ft_div_up(args->w[s].out, outputs);
    if (args->finish == FINISH_SWIGLU)
        args->segments = 1;
    if (args->gate.z)
        rest += args->rows * args->gate.heads * (uint32_t)sizeof(float);
    uint32_t room = FT_MIN(shared_max, SHARED_MAX) - rest;
    args->columns = (uint32_t)ft_round_up(args->in, FT_DENSE_UNIT);
    while (args->rows * ft_dense_row_words(kind, args->columns) * sizeof(uint4) > room &&
           args->columns > FT_DENSE_UNIT)
        args->columns = (uint32_t)ft_round_up(args->columns / 2, FT_DENSE_UNIT);
    args->row_words = ft_dense_row_words(kind, args->columns);
    args->x_words = args->rows * args->row_words;
    uint32_t shared = args->x_words * (uint32_t)sizeof(uint4) + rest;
    args->ahead = AHEAD;
    /* As many rounds as it takes, all of them full. */
    uint32_t residents = FT_MIN(BLOCKS_PER_MULTIPROCESSOR, SHARED_ALL / (shared + 1024));
    uint32_t rounds = (uint32_t)ft_div_up(args->tiles, FT_MAX(residents, 1u) * c->multiprocessors);
    args->blocks = (uint32_t)ft_div_up(args->tiles, rounds);
    if (shared > 48 * 1024) {
        int status = FT_SHARED_LIMIT((dense_kernel<kind, tiles, wide>), shared);
        if (status)
            return status;
    }
    return FT_LAUNCH_NEXT((dense_kernel<kind, tiles, wide>),
                          dim3(args->blocks + (args->has_tail ? TAIL_BLOCKS : 0)), dim3(THREADS), shared,
                          stream, *args);
}

template <int kind>
static int dense_launch_kind(const struct ft_cuda *c, struct dense_args *args, uint32_t tiles, void *stream)
{
    bool wide = args->rows > 8;
    if (tiles == 4 && wide)
        return dense_launch_as<kind, 4, true>(c, args, stream);
    if (tiles == 2)
        return wide ? dense_launch_as<kind, 2, true>(c, args, stream)
                    : dense_launch_as<kind, 2, false>(c, args, stream);
    return wide ? dense_launch_as<kind, 1, true>(c, args, stream)
                : dense_launch_as<kind, 1, false>(c, args, stream);
}

/* All segments of args are read as `kind`. */
static int dense_launch(const struct ft_cuda *c, struct dense_args *args, enum ft_dense_kind kind,
                        void *stream)
{
    uint32_t out = 0, tiles;
    for (uint32_t s = 0; s < args->segments; s++)
        out += args->w[s].out;
    args->warps_k = choose_warps_k(c, args->in, out);
    tiles = args->finish == FINISH_SWIGLU ? 2 : choose_tiles(c, args, out);
    switch (kind) {
    case FT_DENSE_BF16:
        return dense_launch_kind<FT_DENSE_BF16>(c, args, tiles, stream);
    case FT_DENSE_FP8:
        return dense_launch_kind<FT_DENSE_FP8>(c, args, tiles, stream);
    case FT_DENSE_NVFP4:
        return dense_launch_kind<FT_DENSE_NVFP4>(c, args, tiles, stream);
    case FT_DENSE_MXFP4:
        return dense_launch_kind<FT_DENSE_MXFP4>(c, args, tiles, stream);
    default:
        return args->finish == FINISH_SWIGLU ? dense_launch_as<FT_DENSE_ANY, 2, true>(c, args, stream)
                                             : dense_launch_as<FT_DENSE_ANY, 1, true>(c, args, stream);
    }
}

static struct dense_args dense_begin(const float *x, uint64_t x_stride, uint32_t rows, uint32_t in, float *y,
                                     uint64_t y_stride, uint64_t *stamp)
{
    struct dense_args args = {};
    args.x = x;
    args.x_stride = x_stride;
    args.rows = rows;
    args.in = in;
    args.y = y;
    args.y_stride = y_stride;
    args.stamp = stamp;
    return args;
}

static void dense_add(struct dense_args *args, const struct ft_matrix *w, const float *bias,
                      uint32_t out_begin)
{
    args->w[args->segments] = *w;
    args->bias[args->segments] = bias;
    args->out_begin[args->segments++] = out_begin;
}

/* ---- launchers ---- */

static int project_many(const struct ft_cuda *c, const struct ft_cuda_segment *segments, uint32_t count,
                        const float *x, uint64_t x_stride, uint32_t rows, float *y, uint64_t y_stride,
                        uint64_t *stamp, void *stream)
{
    struct ft_gemm_rows in = ft_gemm_activations(c, rows, segments[0].w->in);
    int status = ft_gemm_convert(&in, x, x_stride, segments[0].w->in, stamp, stream);
    for (uint32_t s = 0; s < count && status == 0; s++) {
        status = ft_gemm_multiply(c, &in, segments[s].w, segments[s].bias, y, y_stride, stream);
        y += segments[s].w->out;
    }
    return status;
}

int ft_cuda_project(const struct ft_cuda *c, const struct ft_cuda_segment *segments, uint32_t count,
                    const float *x, uint64_t x_stride, uint32_t rows, float *y, uint64_t y_stride,
                    uint64_t *stamp, void *stream)
{
    if (rows > FT_CUDA_DECODE_ROWS)
        return project_many(c, segments, count, x, x_stride, rows, y, y_stride, stamp, stream);
    int status = 0;
    uint32_t out = 0;
    for (uint32_t s = 0; s < count && status == 0;) { /* a launch takes neighbours that are read alike */
        enum ft_dense_kind kind = ft_dense_kind_of(segments[s].w);
        struct dense_args args = dense_begin(x, x_stride, rows, segments[s].w->in, y, y_stride, stamp);
        for (; s < count && args.segments < SEGMENTS_MAX && ft_dense_kind_of(segments[s].w) == kind; s++) {
            dense_add(&args, segments[s].w, segments[s].bias, out);
            out += segments[s].w->out;
        }
        status = dense_launch(c, &args, kind, stream);
        stamp = NULL;
    }
    return status;
}

int ft_cuda_attention_project(const struct ft_cuda *c, uint32_t layer, void *stream)
{
    const struct ft_attention_weights *a = &c->weights->layers[layer].attention;
    const struct ft_linear_weights *l = &c->weights->layers[layer].linear;
    bool linear = c->model->layers[layer].attention == FT_ATTENTION_LINEAR;
    struct ft_cuda_segment soft[4] = {
        {&a->q, a->q_bias}, {&a->k, a->k_bias}, {&a->v, a->v_bias}, {&a->index_qk, NULL}};
    struct ft_cuda_segment delta[4] = {{&l->qkv, NULL}, {&l->z, NULL}, {&l->b, NULL}, {&l->a, NULL}};
    uint32_t count = linear || c->model->layers[layer].attention == FT_ATTENTION_SPARSE ? 4 : 3;
    return ft_cuda_project(c, linear ? delta : soft, count, c->base + c->space.x, c->model->hidden,
                           c->step.rows, c->base + c->space.project, c->space.project_width,
                           ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_PROJECT), stream);
}

static struct dense_gate gate_of(const struct ft_cuda *c, uint32_t layer)
{
    const struct ft_model *m = c->model;
    struct dense_gate gate = {};
    if (FT_LINEAR_GATED || m->layers[layer].attention != FT_ATTENTION_LINEAR)
        return gate;
    gate.z = c->base + c->space.project + ft_model_conv_channels(m);
    gate.z_stride = c->space.project_width;
    gate.norm = c->weights->layers[layer].linear.norm;
    gate.heads = m->value_head_count;
    gate.dim = m->value_dim;
    gate.eps = m->rms_eps;
    gate.silu = m->output_gate == FT_ACTIVATION_SILU;
    return gate;
}

/* Prefill: one row a block, to bf16 in two pieces; norms [heads] in shared memory. */
__global__ void __launch_bounds__(THREADS)
    gate_kernel(const __grid_constant__ struct dense_gate gate, const float *x, uint64_t x_stride,
                uint32_t in, uint32_t columns, uint16_t *to, uint64_t *stamp)
{
    FT_SHARED_DYNAMIC(float, inverse);
    uint32_t row = blockIdx.x;
    if (stamp && row == 0 && threadIdx.x == 0)
        *stamp = ft_global_timer();
    gate_norms(&gate, x + row * x_stride, x_stride, 1, inverse);
    __syncthreads();
    struct gate_source source = {
        {x + row * x_stride, 0, in, NULL}, {gate.z + row * gate.z_stride, 0, in, NULL}, &gate, inverse};
    for (uint32_t column = threadIdx.x * 8; column < columns; column += blockDim.x * 8) {
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (column < in)
            source(0, column, v);
        for (uint32_t i = 0; i < 8; i += 2)
            ft_gemm_store(to, (uint64_t)row * columns + column + i, (uint64_t)gridDim.x * columns, v[i],
                          v[i + 1]);
    }
}

/* The result overwrites x, which the attention no longer needs, as on cores. */
static int attention_out_many(const struct ft_cuda *c, const struct ft_matrix *w, const float *bias,
                              const struct dense_gate *gate, uint32_t layer, void *stream)
{
    bool linear = c->model->layers[layer].attention == FT_ATTENTION_LINEAR;
    const float *x = c->base + c->space.attention;
    float *y = c->base + c->space.x;
    uint64_t *stamp = ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_OUT);
    struct ft_gemm_rows in = ft_gemm_activations(c, c->step.rows, w->in);
    int status = gate->z
                     ? FT_LAUNCH(gate_kernel, dim3(in.rows), dim3(THREADS), gate->heads * sizeof(float),
                                 stream, *gate, x, c->space.attention_width, w->in, in.columns, in.x, stamp)
                     : ft_gemm_convert(&in, x, c->space.attention_width, w->in, stamp, stream);
    if (status == 0 && linear)
        status = ft_cuda_linear_tail(c, layer, stream);
    if (status == 0)
        status = ft_gemm_multiply(c, &in, w, bias, y, c->model->hidden, stream);
    return status ? status : ft_gemm_add_residual(c, y, stream);
}

/* Makes a decode op add to the residual streams. */
static void add_to_residual(const struct ft_cuda *c, struct dense_args *args)
{
    const struct ft_model *m = c->model;
    args->finish = FINISH_RESIDUAL;
    args->y = c->base + c->space.residual;
    args->s = c->base + c->space.mixed + m->hc_lowrank;
    args->s_stride = m->hc_lowrank + m->hc_count;
    args->streams = m->hc_count;
}

int ft_cuda_attention_out(const struct ft_cuda *c, uint32_t layer, void *stream)
{
    const struct ft_layer_weights *w = &c->weights->layers[layer];
    struct dense_gate gate = gate_of(c, layer);
    bool linear = c->model->layers[layer].attention == FT_ATTENTION_LINEAR;
    const struct ft_matrix *out = linear ? &w->linear.out : &w->attention.o;
    const float *bias = linear ? NULL : w->attention.o_bias;
    if (c->step.rows > FT_CUDA_DECODE_ROWS)
        return attention_out_many(c, out, bias, &gate, layer, stream);
    struct dense_args args = dense_begin(c->base + c->space.attention, c->space.attention_width, c->step.rows,
                                         out->in, NULL, 0, ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_OUT));
    dense_add(&args, out, bias, 0);
    add_to_residual(c, &args);
    args.gate = gate;
    args.has_tail = linear;
    if (args.has_tail)
        args.tail = ft_tail_args_of(c, layer);
    return dense_launch(c, &args, ft_dense_kind_of(out), stream);
}

/* h = silu(gate) up, over the gate's rows. */
__global__ void __launch_bounds__(THREADS) swiglu_kernel(float *gate, const float *up, uint64_t count)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        gate[i] = ft_silu_device(gate[i]) * up[i];
}

static int dense_mlp_many(const struct ft_cuda *c, const struct ft_mlp_weights *mlp, uint64_t *stamp,
                          void *stream)
{
    uint32_t rows = c->step.rows, hidden = c->model->hidden, width = mlp->up.out;
    float *h = c->base + c->space.shared_h, *up = ft_gemm_scratch_rows(c), *y = c->base + c->space.shared_y;
    struct ft_gemm_rows in = ft_gemm_activations(c, rows, hidden);
    uint64_t count = (uint64_t)rows * width;
    int status = ft_gemm_convert(&in, c->base + c->space.x, hidden, hidden, stamp, stream);
    if (status == 0)
        status = ft_gemm_multiply(c, &in, &mlp->gate, NULL, h, width, stream);
    if (status == 0)
        status = ft_gemm_multiply(c, &in, &mlp->up, NULL, up, width, stream);
    if (status == 0)
        status = FT_LAUNCH(swiglu_kernel, dim3((uint32_t)ft_div_up(count, THREADS)), dim3(THREADS), 0, stream,
                           h, up, count);
    in = ft_gemm_activations(c, rows, width);
    if (status == 0)
        status = ft_gemm_convert(&in, h, width, width, NULL, stream);
    if (status == 0)
        status = ft_gemm_multiply(c, &in, &mlp->down, NULL, y, hidden, stream);
    return status ? status : ft_gemm_add_residual(c, y, stream);
}

int ft_cuda_dense_mlp(const struct ft_cuda *c, uint32_t layer, void *stream)
{
    const struct ft_mlp_weights *mlp = &c->weights->layers[layer].dense;
    uint32_t rows = c->step.rows, width = mlp->up.out;
    uint64_t *stamp = ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_RESIDENT);
    if (rows > FT_CUDA_DECODE_ROWS)
        return dense_mlp_many(c, mlp, stamp, stream);
    float *h = c->base + c->space.shared_h;
    enum ft_dense_kind kind = ft_dense_kind_of(&mlp->gate);
    struct dense_args up =
        dense_begin(c->base + c->space.x, c->model->hidden, rows, mlp->up.in, h, width, stamp);
    up.finish = FINISH_SWIGLU;
    dense_add(&up, &mlp->gate, NULL, 0);
    dense_add(&up, &mlp->up, NULL, 0);
    int status = dense_launch(c, &up, kind == ft_dense_kind_of(&mlp->up) ? kind : FT_DENSE_ANY, stream);
    if (status)
        return status;
    struct dense_args down = dense_begin(h, width, rows, mlp->down.in, NULL, 0, NULL);
    dense_add(&down, &mlp->down, NULL, 0);
    add_to_residual(c, &down);
    return dense_launch(c, &down, ft_dense_kind_of(&mlp->down), stream);
}

int ft_cuda_head(const struct ft_cuda *c, void *stream)
{
    struct ft_cuda_segment head = {&c->weights->head, NULL};
    return ft_cuda_project(c, &head, 1, c->base + c->space.head_x, c->model->hidden, c->step.logit_rows,
                           c->base + c->space.logits, c->model->vocab,
                           ft_cuda_stamp_of(c, c->model->layer_count, FT_CUDA_STAMP_HEAD), stream);
}
