/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense projections. Decode (<= FT_CUDA_DECODE_ROWS rows): one kernel per op on the ground of dense.cuh; what
 * comes after (bias, residual, SwiGLU) happens when sums are stored. Prefill: conversion, gemm.cu, and a
 * kernel for what comes after.
 */
#include "kernels_cuda/dense.cuh"
#include "kernels_cuda/gemm.cuh"
#include "kernels_cuda/kernels_cuda.h"
#include "kernels_cuda/linear.cuh"

#define WARPS 8u
#define THREADS (32u * WARPS)
#define SEGMENTS_MAX 4u
#define BLOCKS_PER_MULTIPROCESSOR 2u
#define SHARED_MAX (112u * 1024)   /* of a block, so that two fit into a multiprocessor ... */
#define SHARED_ALL (226u * 1024)   /* ... of that much */
#define TAIL_BLOCKS 16u            /* that move the convolution's tail beside the out projection */
#define FLIGHT 2                   /* units of a warp on their way in registers */
#define PREFETCH_BYTES (24u << 20) /* of further units, into L2, before the activations are there */

enum dense_finish { FINISH_STORE, FINISH_RESIDUAL, FINISH_SWIGLU };

struct dense_args {
    struct ft_matrix w[SEGMENTS_MAX];
    const float *bias[SEGMENTS_MAX];
    uint32_t tile_end[SEGMENTS_MAX]; /* block tiles up to the end of the segment */
    uint32_t out_begin[SEGMENTS_MAX];
    uint32_t segments, tiles, blocks; /* tiles in all; blocks that compute */
    uint32_t rows, in, columns;       /* columns held in shared memory at a time */
    uint32_t row_words, x_words, warps_k;
    uint32_t ahead; /* units of a warp to prefetch */
    const float *x;
    uint64_t x_stride;
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

/* Outputs of one block tile. With SwiGLU the halves of a warp's tile are of the gate and of the up projection. */
static __host__ __device__ __forceinline__ uint32_t dense_outputs(const struct dense_args *args)
{
    return WARPS / args->warps_k * (args->finish == FINISH_SWIGLU ? FT_DENSE_TILE / 2 : FT_DENSE_TILE);
}

template <int kind>
static __device__ __forceinline__ void dense_aim(const struct dense_args *args, uint32_t tile,
                                                 struct ft_dense_weights *w)
{
    uint32_t first_tile, segment = dense_segment(args, tile, &first_tile),
                         warp_n = (threadIdx.x >> 5) / args->warps_k;
    uint32_t first = (tile - first_tile) * dense_outputs(args);
    if (args->finish == FINISH_SWIGLU) {
        ft_dense_aim_half<kind>(w, 0, &args->w[0], first + warp_n * (FT_DENSE_TILE / 2));
        ft_dense_aim_half<kind>(w, 1, &args->w[1], first + warp_n * (FT_DENSE_TILE / 2));
    } else {
        ft_dense_aim<kind>(w, &args->w[segment], first + warp_n * FT_DENSE_TILE);
    }
}

/* What a warp asks for next, block tile after block tile, while it multiplies what it asked for before. */
struct dense_ahead {
    struct ft_dense_weights w;
    uint32_t tile, unit;
};
template <int kind>
static __device__ __forceinline__ void dense_ask(const struct dense_args *args, struct dense_ahead *ahead,
                                                 struct ft_dense_raw<kind> *raw)
{
    if (kind == FT_DENSE_ANY || ahead->tile >= args->tiles)
        return;
    ft_dense_load<kind>(raw, &ahead->w, ahead->unit);
    ahead->unit += args->warps_k;
    if (ahead->unit * FT_DENSE_UNIT < args->in)
        return;
    ahead->unit = (threadIdx.x >> 5) % args->warps_k;
    ahead->tile += args->blocks;
    if (ahead->tile < args->tiles)
        dense_aim<kind>(args, ahead->tile, &ahead->w);
}
template <int kind>
static __device__ __forceinline__ void dense_begin_asking(const struct dense_args *args,
                                                          struct dense_ahead *ahead,
                                                          struct ft_dense_raw<kind> raw[FLIGHT])
{
    ahead->unit = (threadIdx.x >> 5) % args->warps_k;
    /* A warp beyond the last unit never has anything to do. */
    ahead->tile = ahead->unit * FT_DENSE_UNIT < args->in ? blockIdx.x : args->tiles;
    dense_aim<kind>(args, blockIdx.x, &ahead->w);
    if (ahead->tile == args->tiles)
        return;
#pragma unroll
    for (int i = 0; i < FLIGHT; i++)
        dense_ask<kind>(args, ahead, &raw[i]);
    for (uint32_t i = 0; i < args->ahead && ahead->tile == blockIdx.x; i++)
        ft_dense_prefetch<kind>(&ahead->w, ahead->unit + i * args->warps_k);
}

/* Adds up this warp's units among the columns that x holds; raw[turn] holds the first of them. */
template <int kind, int cols>
static __device__ __forceinline__ void
dense_walk(const struct dense_args *args, const struct ft_dense_x *x, struct dense_ahead *ahead,
           struct ft_dense_raw<kind> raw[FLIGHT], uint32_t *turn, struct ft_dense_sums<kind, cols> *sums)
{
    static_assert(FLIGHT == 2, "registers take turns by name");
    uint32_t end = (x->end + FT_DENSE_UNIT - 1) / FT_DENSE_UNIT;
    uint32_t unit = ft_dense_first(x->begin, (threadIdx.x >> 5) % args->warps_k, args->warps_k);
    for (; unit < end; unit += args->warps_k, *turn ^= 1) {
        if constexpr (kind == FT_DENSE_ANY) {
            ft_dense_multiply_any(sums->sum, &ahead->w, x, unit);
        } else if (*turn) {
            ft_dense_multiply<kind, cols>(sums->sum, &raw[1], x, unit);
            dense_ask<kind>(args, ahead, &raw[1]);
        } else {
            ft_dense_multiply<kind, cols>(sums->sum, &raw[0], x, unit);
            dense_ask<kind>(args, ahead, &raw[0]);
        }
    }
}

/* Item i of a block tile's results that are added to the residual: its output, stream and row. */
struct dense_item {
    uint32_t o, row;
    uint64_t y, s; /* elements of args->y and args->s */
    bool inside;
};
static __device__ __forceinline__ struct dense_item dense_item_of(const struct dense_args *args,
                                                                  uint32_t first, uint32_t i)
{
    uint32_t outputs = dense_outputs(args), stream = i / outputs % args->streams;
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
static __device__ __forceinline__ struct dense_held dense_hold(const struct dense_args *args, uint32_t tile)
{
    struct dense_held held = {0.0f, 1.0f};
    if (args->finish != FINISH_RESIDUAL)
        return held;
    struct dense_item item = dense_item_of(args, tile * dense_outputs(args), threadIdx.x);
    if (item.inside) {
        held.y = args->y[item.y];
        held.s = args->streams == 1 ? 1.0f : args->s[item.s];
    }
    return held;
}

template <int kind, int cols>
static __device__ __forceinline__ float dense_sum(const struct dense_args *args, uint32_t segment,
                                                  uint32_t first, uint32_t o, uint32_t row, const float *put)
{
    float value = ft_dense_total<kind, cols>(put, o / FT_DENSE_TILE * args->warps_k, args->warps_k,
                                             o % FT_DENSE_TILE, row);
    return args->bias[segment] ? value + args->bias[segment][first + o] : value;
}

template <int kind, int cols>
static __device__ __forceinline__ void dense_finish(const struct dense_args *args, uint32_t tile,
                                                    const float *put, struct dense_held held)
{
    uint32_t first_tile, segment = dense_segment(args, tile, &first_tile), outputs = dense_outputs(args);
    uint32_t first = (tile - first_tile) * outputs, warps_k = args->warps_k;
    if (args->finish == FINISH_RESIDUAL) {
        for (uint32_t i = threadIdx.x; i < outputs * args->rows * args->streams; i += blockDim.x) {
            struct dense_item item = dense_item_of(args, first, i);
            if (!item.inside)
                continue;
            float value = dense_sum<kind, cols>(args, segment, first, item.o, item.row, put);
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
            uint32_t warp = o / (FT_DENSE_TILE / 2) * warps_k, at = o % (FT_DENSE_TILE / 2);
            float gate = ft_dense_total<kind, cols>(put, warp, warps_k, at, row);
            float up = ft_dense_total<kind, cols>(put, warp, warps_k, at + FT_DENSE_TILE / 2, row);
            args->y[row * args->y_stride + out] = ft_silu_device(gate) * up;
            continue;
        }
        args->y[row * args->y_stride + args->out_begin[segment] + out] =
            dense_sum<kind, cols>(args, segment, first, o, row, put);
    }
}

/* Shared memory: activations [x_words], sums of the warps (ft_dense_put). */
template <int kind, int cols>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    dense_kernel(const __grid_constant__ struct dense_args args)
{
    FT_SHARED_DYNAMIC(uint4, words);
    float *put = (float *)(words + args.x_words);
    ft_begin_next();
    if (blockIdx.x >= args.blocks) {
        ft_wait_previous();
        ft_tail_move(args.tail, (blockIdx.x - args.blocks) * THREADS + threadIdx.x,
                     (gridDim.x - args.blocks) * THREADS);
        return;
    }
    bool whole = args.columns >= args.in, staged = false; /* whole: activations are staged once */
    struct ft_dense_x x = {
        words, args.row_words, args.row_words / 3, args.rows, 0, min(args.columns, args.in)};
    struct ft_dense_rows_source rows = {args.x, args.x_stride, args.in, NULL};
    struct dense_ahead ahead;
    struct ft_dense_raw<kind> raw[FLIGHT];
    uint32_t turn = 0;
    dense_begin_asking<kind>(&args, &ahead, raw);
    ft_wait_previous();
    if (args.stamp && blockIdx.x == 0 && threadIdx.x == 0)
        *args.stamp = ft_global_timer();
    for (uint32_t tile = blockIdx.x; tile < args.tiles; tile += args.blocks) {
        struct ft_dense_sums<kind, cols> sums;
        ft_dense_clear<kind, cols>(&sums);
        struct dense_held held = dense_hold(&args, tile);
        if (kind == FT_DENSE_ANY)
            dense_aim<kind>(&args, tile, &ahead.w);
        for (uint32_t begin = 0; begin < args.in; begin += args.columns) {
            if (!staged || !whole) {
                x.begin = begin;
                x.end = min(begin + args.columns, args.in);
                if (staged)
                    __syncthreads(); /* the columns before are no longer read */
                ft_dense_stage<kind>(&x, args.in, rows);
                staged = true;
                __syncthreads();
            }
            dense_walk<kind, cols>(&args, &x, &ahead, raw, &turn, &sums);
        }
        uint32_t first_tile, segment = dense_segment(&args, tile, &first_tile);
        float factor[2] = {ft_dense_factor<kind>(&args.w[segment]),
                           ft_dense_factor<kind>(&args.w[args.finish == FINISH_SWIGLU ? 1 : segment])};
        ft_dense_put<kind, cols>(&sums, factor, put);
        __syncthreads();
        dense_finish<kind, cols>(&args, tile, put, held);
        if (tile + args.blocks < args.tiles)
            __syncthreads(); /* before the next sums */
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
        double fill = (double)out / ((double)FT_DENSE_TILE * (WARPS / warps_k)) /
                      (BLOCKS_PER_MULTIPROCESSOR * c->multiprocessors);
        double score = even * FT_MIN(fill, 1.0);
        if (score > best_score) {
            best_score = score;
            best = warps_k;
        }
    }
    return best;
}

/* Columns of x in shared memory at a time: all, if they fit, even if but one block fits then; else what two
 * blocks have room for. `rest`: bytes that a block needs beside. */
static uint32_t choose_columns(int kind, uint32_t rows, uint32_t in, uint32_t rest)
{
    uint32_t columns = (uint32_t)ft_round_up(in, FT_DENSE_UNIT), most = ft_shared_max();
    if (rows * ft_dense_row_words(kind, columns) * sizeof(uint4) + rest <= most)
        return columns;
    while (rows * ft_dense_row_words(kind, columns) * sizeof(uint4) + rest > FT_MIN(most, SHARED_MAX) &&
           columns > FT_DENSE_UNIT)
        columns = (uint32_t)ft_round_up(columns / 2, FT_DENSE_UNIT);
    return columns;
}

template <int kind, int cols>
static int dense_launch_as(const struct ft_cuda *c, struct dense_args *args, void *stream)
{
    uint32_t outputs = dense_outputs(args);
    uint32_t rest = WARPS * ft_dense_put_count(kind, cols) * (uint32_t)sizeof(float);
    args->tiles = 0;
    for (uint32_t s = 0; s < (args->finish == FINISH_SWIGLU ? 1 : args->segments); s++)
        args->tile_end[s] = args->tiles += (uint32_t)ft_div_up(args->w[s].out, outputs);
    if (args->finish == FINISH_SWIGLU)
        args->segments = 1;
    args->columns = choose_columns(kind, args->rows, args->in, rest);
    args->row_words = ft_dense_row_words(kind, args->columns);
    args->x_words = args->rows * args->row_words;
    uint32_t shared = args->x_words * (uint32_t)sizeof(uint4) + rest;
    /* As many rounds as it takes, all of them full. */
    uint32_t residents = FT_MIN(BLOCKS_PER_MULTIPROCESSOR, SHARED_ALL / (shared + 1024));
    uint32_t rounds = (uint32_t)ft_div_up(args->tiles, FT_MAX(residents, 1u) * c->multiprocessors);
    args->blocks = (uint32_t)ft_div_up(args->tiles, rounds);
    if (ft_can_launch_next())
        args->ahead = PREFETCH_BYTES /
                      (args->blocks * WARPS * FT_DENSE_TILE * FT_DENSE_UNIT / ft_dense_run<kind>() * 16);
    if (shared > 48 * 1024) {
        int status = FT_SHARED_LIMIT((dense_kernel<kind, cols>), shared);
        if (status)
            return status;
    }
    return FT_LAUNCH_NEXT((dense_kernel<kind, cols>), dim3(args->blocks + (args->has_tail ? TAIL_BLOCKS : 0)),
                          dim3(THREADS), shared, stream, *args);
}

template <int kind>
static int dense_launch_kind(const struct ft_cuda *c, struct dense_args *args, void *stream)
{
    switch (ft_dense_columns(args->rows)) {
    case 1:
        return dense_launch_as<kind, 1>(c, args, stream);
    case 2:
        return dense_launch_as<kind, 2>(c, args, stream);
    case 3:
        return dense_launch_as<kind, 3>(c, args, stream);
    default:
        return dense_launch_as<kind, 6>(c, args, stream);
    }
}

/* All segments of args are read as `kind`. */
static int dense_launch(const struct ft_cuda *c, struct dense_args *args, enum ft_dense_kind kind,
                        void *stream)
{
    uint32_t out = 0;
    for (uint32_t s = 0; s < args->segments; s++)
        out += args->w[s].out;
    args->warps_k = choose_warps_k(c, args->in, out);
    switch (kind) {
    case FT_DENSE_BF16:
        return dense_launch_kind<FT_DENSE_BF16>(c, args, stream);
    case FT_DENSE_FP8:
        return dense_launch_kind<FT_DENSE_FP8>(c, args, stream);
    case FT_DENSE_NVFP4:
        return dense_launch_kind<FT_DENSE_NVFP4>(c, args, stream);
    case FT_DENSE_MXFP4:
        return dense_launch_kind<FT_DENSE_MXFP4>(c, args, stream);
    default:
        return dense_launch_as<FT_DENSE_ANY, 1>(c, args, stream);
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

/* The result overwrites x, which the attention no longer needs, as on cores. */
static int attention_out_many(const struct ft_cuda *c, const struct ft_matrix *w, const float *bias,
                              uint32_t layer, void *stream)
{
    bool linear = c->model->layers[layer].attention == FT_ATTENTION_LINEAR;
    const float *x = c->base + c->space.attention;
    float *y = c->base + c->space.x;
    uint64_t *stamp = ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_OUT);
    struct ft_gemm_rows in = ft_gemm_activations(c, c->step.rows, w->in);
    int status = ft_gemm_convert(&in, x, c->space.attention_width, w->in, stamp, stream);
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
    bool linear = c->model->layers[layer].attention == FT_ATTENTION_LINEAR;
    const struct ft_matrix *out = linear ? &w->linear.out : &w->attention.o;
    const float *bias = linear ? NULL : w->attention.o_bias;
    if (c->step.rows > FT_CUDA_DECODE_ROWS)
        return attention_out_many(c, out, bias, layer, stream);
    struct dense_args args = dense_begin(c->base + c->space.attention, c->space.attention_width, c->step.rows,
                                         out->in, NULL, 0, ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_OUT));
    dense_add(&args, out, bias, 0);
    add_to_residual(c, &args);
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
