/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prefill form of dense products: many rows, bf16 operands on the matrix units, f32 sums. Host functions
 * shared by dense.cu and mix.cu, and where their buffers lie in c->scratch:
 *
 *   | weights of other formats as bf16, a slice at a time | f32 rows [R, widest] |
 *   | activations bf16 [2, R, in rounded up] |
 *
 * One bf16 is too little for an activation: the router's choices would differ from those of decode steps. So
 * it is the sum of two, high and low, whose products are both added: the error of a product is then 2^-17 of
 * it. Weights that one bf16 does not hold (f32, fp8 with block scales) are decoded in two pieces as well.
 *
 * Decode forms use the front of the scratch for partial sums.
 */
#ifndef FT_KERNELS_CUDA_GEMM_CUH
#define FT_KERNELS_CUDA_GEMM_CUH

#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

#define FT_GEMM_DEPTH FT_GPU_DEPTH /* columns of a tile; activations are padded to a multiple with zeros */
#define FT_GEMM_WEIGHT_BYTES FT_GPU_WEIGHT_BYTES /* slice of decoded weights */

/* bf16 activations [rows, columns], columns = in rounded up to FT_GEMM_DEPTH: the high pieces, then the low ones. */
struct ft_gemm_rows {
    uint16_t *x;
    uint32_t rows, columns;
};

#if defined(__CUDACC__) || defined(FT_CUDA_EMULATED)
/* value = high + low but for 2^-18 of it; what is not finite stands in `high` alone. */
static __device__ __forceinline__ void ft_gemm_split(float value, uint32_t *high, uint32_t *low)
{
    uint32_t bits = ft_to_bf16(value);
    *high = bits;
    *low = (bits & 0x7f80u) == 0x7f80u ? 0 : ft_to_bf16(value - ft_bf16((uint16_t)bits));
}
/* A pair of neighbours at element `at` (even) of `to`, low pieces `apart` elements behind. */
static __device__ __forceinline__ void ft_gemm_store(uint16_t *to, uint64_t at, uint64_t apart, float first,
                                                     float second)
{
    uint32_t high[2], low[2];
    ft_gemm_split(first, &high[0], &low[0]);
    ft_gemm_split(second, &high[1], &low[1]);
    *(uint32_t *)(to + at) = high[0] | high[1] << 16;
    *(uint32_t *)(to + at + apart) = low[0] | low[1] << 16;
}
#endif

/* Widest f32 row of the scratch: one stream, or the hidden values of a dense MLP. */
static inline uint64_t ft_gemm_wide(const struct ft_model *model)
{
    return ft_gpu_widest_row(model);
}
static inline float *ft_gemm_scratch_rows(const struct ft_cuda *c)
{
    return (float *)(c->scratch + FT_GEMM_WEIGHT_BYTES);
}
/* Where activations of `in` columns go. */
static inline struct ft_gemm_rows ft_gemm_activations(const struct ft_cuda *c, uint32_t rows, uint32_t in)
{
    uint64_t wide = ft_round_up(rows * ft_gemm_wide(c->model), 64);
    struct ft_gemm_rows to = {(uint16_t *)(ft_gemm_scratch_rows(c) + wide), rows,
                              (uint32_t)ft_round_up(in, FT_GEMM_DEPTH)};
    return to;
}

/* x rows [rows, in] (stride x_stride) -> bf16 activations. */
int ft_gemm_convert(const struct ft_gemm_rows *to, const float *x, uint64_t x_stride, uint32_t in,
                    uint64_t *stamp, void *stream);
/* y[r][o] = W x_r (+ bias[o]), row r at y + r * y_stride. */
int ft_gemm_multiply(const struct ft_cuda *c, const struct ft_gemm_rows *x, const struct ft_matrix *w,
                     const float *bias, float *y, uint64_t y_stride, void *stream);
/* The same for outputs [begin, begin + count) alone; y and bias of output `begin` come first. */
int ft_gemm_multiply_part(const struct ft_cuda *c, const struct ft_gemm_rows *x, const struct ft_matrix *w,
                          uint32_t begin, uint32_t count, const float *bias, float *y, uint64_t y_stride,
                          void *stream);
/* One product of bf16 operands: y (+)= scale W x (+ bias). */
struct ft_gemm_product {
    const uint16_t *x, *w; /* [2, rows, columns] high and low pieces, [out, columns] */
    const float *bias;     /* [out] or NULL */
    float *y;
    uint64_t y_stride;
    uint32_t rows, out, columns;
    float scale;
    bool add;
};
/* By the open library (c->blas), no bias; false: it would not, and y is as before. */
bool ft_gemm_blas(const struct ft_cuda *c, const struct ft_gemm_product *p, void *stream);
/* residual[r][i] += s[r][i] y[r] for all streams; y rows [rows, hidden]. */
int ft_gemm_add_residual(const struct ft_cuda *c, const float *y, void *stream);

#endif
