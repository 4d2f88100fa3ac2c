/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A warp's product of a few weight rows with all activation rows of a decode step, by f32 multiplications:
 * for weights that are few and whose results must be as good as f32 gets (router) or ride along with
 * something larger (shared expert). bf16 weights come in 16-byte loads, several under way; every other format
 * element by element.
 *
 * Lane l of the warp takes columns 8 l .. 8 l + 7 of each 256. A row's sum has the same order in every
 * instance, so its bits do not depend on the rows beside it.
 */
#ifndef FT_KERNELS_CUDA_ROWS_DOT_CUH
#define FT_KERNELS_CUDA_ROWS_DOT_CUH

#include "kernels_cuda/dense.cuh"

struct ft_rows_x {
    const float *x; /* row r at x + r * stride */
    uint64_t stride;
    uint32_t rows;
};

static __device__ __forceinline__ bool ft_rows_is_fast(const struct ft_matrix *w, const struct ft_rows_x *x)
{
    return w->format == FT_FORMAT_BF16 && w->in % 8 == 0 && ((uintptr_t)w->data & 15) == 0 &&
           ((uintptr_t)x->x & 15) == 0 && x->stride % 4 == 0;
}

/* sum[r] += eight products of row r, lowest column first. */
template <int rows>
static __device__ __forceinline__ void ft_rows_add(float sum[rows], uint4 raw, const float4 low,
                                                   const float4 high, int r)
{
    float s = sum[r];
    s = fmaf(ft_bf16_low(raw.x), low.x, s);
    s = fmaf(ft_bf16_high(raw.x), low.y, s);
    s = fmaf(ft_bf16_low(raw.y), low.z, s);
    s = fmaf(ft_bf16_high(raw.y), low.w, s);
    s = fmaf(ft_bf16_low(raw.z), high.x, s);
    s = fmaf(ft_bf16_high(raw.z), high.y, s);
    s = fmaf(ft_bf16_low(raw.w), high.z, s);
    s = fmaf(ft_bf16_high(raw.w), high.w, s);
    sum[r] = s;
}

/* The loads of one round: columns begin + 256 i + 8 lane .. + 7 of every output's row. */
template <int outs, uint32_t flight> struct ft_rows_held {
    uint4 raw[flight][outs];
};
template <int outs, uint32_t flight>
static __device__ __forceinline__ void ft_rows_ask(struct ft_rows_held<outs, flight> *held,
                                                   const uint4 *const data[outs], uint32_t begin, uint32_t in)
{
#pragma unroll
    for (uint32_t i = 0; i < flight; i++)
#pragma unroll
        for (int o = 0; o < outs; o++)
            held->raw[i][o] =
                begin + i * 256 < in ? __ldcs(data[o] + (begin + i * 256) / 8) : make_uint4(0, 0, 0, 0);
}

/* sum[o][r] += products of this lane's columns; `held` has the loads from (lane * 8) on already. */
template <int rows, int outs, uint32_t flight>
static __device__ __forceinline__ void
ft_rows_walk_bf16(float sum[outs][rows], struct ft_rows_held<outs, flight> *held, const uint4 *const data[outs],
                  uint32_t in, const struct ft_rows_x *x)
{
    for (uint32_t begin = (threadIdx.x & 31) * 8; begin < in;) {
#pragma unroll
        for (uint32_t i = 0; i < flight; i++)
            if (begin + i * 256 < in)
#pragma unroll
                for (int r = 0; r < rows; r++) {
                    /* Rows that do not exist read the last one: what they add up is not looked at. */
                    const float4 *from =
                        (const float4 *)(x->x + min((uint32_t)r, x->rows - 1) * x->stride + begin + i * 256);
                    float4 low = from[0], high = from[1];
#pragma unroll
                    for (int o = 0; o < outs; o++)
                        ft_rows_add<rows>(sum[o], held->raw[i][o], low, high, r);
                }
        begin += flight * 256;
        if (begin < in)
            ft_rows_ask<outs, flight>(held, data, begin, in);
    }
}

/* The same for every format, element by element. */
template <int rows, int outs>
static __device__ __forceinline__ void ft_rows_walk_slow(float sum[outs][rows],
                                                         const struct ft_matrix *const w[outs],
                                                         const uint32_t row[outs], const struct ft_rows_x *x)
{
    for (uint32_t k = threadIdx.x & 31; k < w[0]->in; k += 32)
#pragma unroll
        for (int o = 0; o < outs; o++) {
            float weight = ft_dense_element(w[o], row[o], k);
#pragma unroll
            for (int r = 0; r < rows; r++)
                sum[o][r] = fmaf(weight, x->x[min((uint32_t)r, x->rows - 1) * x->stride + k], sum[o][r]);
        }
}

/*
 * sum[o][r] = W_o[row o] . x_r in every lane. w [outs]: the matrices (all of one format and `in`), row
 * [outs]: the rows of theirs. All lanes of the warp. between(): called once by every lane when weights have been
 * asked for and before x is read. flight: rounds of loads under way per lane.
 */
template <int rows, int outs, uint32_t flight, class Between>
static __device__ __forceinline__ void
ft_rows_dot(float sum[outs][rows], const struct ft_matrix *const w[outs], const uint32_t row[outs],
            const struct ft_rows_x *x, Between between)
{
    uint32_t in = w[0]->in;
#pragma unroll
    for (int o = 0; o < outs; o++)
#pragma unroll
        for (int r = 0; r < rows; r++)
            sum[o][r] = 0.0f;
    if (ft_rows_is_fast(w[0], x)) {
        struct ft_rows_held<outs, flight> held;
        const uint4 *data[outs];
#pragma unroll
        for (int o = 0; o < outs; o++)
            data[o] = (const uint4 *)w[o]->data + (uint64_t)row[o] * (in / 8);
        ft_rows_ask<outs, flight>(&held, data, (threadIdx.x & 31) * 8, in);
        between();
        ft_rows_walk_bf16<rows, outs, flight>(sum, &held, data, in, x);
    } else {
        between();
        ft_rows_walk_slow<rows, outs>(sum, w, row, x);
    }
#pragma unroll
    for (int o = 0; o < outs; o++)
#pragma unroll
        for (int r = 0; r < rows; r++)
            sum[o][r] = ft_warp_sum(sum[o][r]);
}

#endif
