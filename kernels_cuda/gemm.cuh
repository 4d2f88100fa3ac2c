/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prefill form of dense products: many rows, f16 operands on the matrix units, f32 sums. Host functions
 * shared by dense.cu and mix.cu, and where their buffers lie in c->scratch:
 *
 *   | weights as f16, a slice at a time | f32 rows [R, widest] | activations f16 [R, in rounded up] | scales |
 *
 * f16 has three more bits than bf16: an operand is off by 2^-12 of itself, where one bf16 would be off by 2^-9 and flip
 * the choices of the routers behind (two bf16 pieces cost twice the products). What it lacks is reach, so all
 * activations of a product share a power of two, which brings the largest finite one below 2^15, and so do the weights
 * of a slice: down to 2^-29 of the largest nothing more is lost, and what is not finite stays what it is. Weights of
 * bf16 and fp4 are exact there.
 *
 * Decode forms use the front of the scratch for partial sums.
 */
#ifndef FT_KERNELS_CUDA_GEMM_CUH
#define FT_KERNELS_CUDA_GEMM_CUH

#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

#define FT_GEMM_DEPTH FT_GPU_DEPTH /* columns of a tile; activations are padded to a multiple with zeros */
#define FT_GEMM_WEIGHT_BYTES FT_GPU_WEIGHT_BYTES /* slice of decoded weights */

/* Of one product, in device memory. */
struct ft_gemm_scale {
    uint32_t x_top,
        w_top[2]; /* bits of the largest finite |x|; of the weights of this slice, and 0 for the next one */
    float alpha, zero; /* what sums are multiplied by */
};

/* f16 activations [rows, columns], columns = in rounded up to FT_GEMM_DEPTH. */
struct ft_gemm_rows {
    uint16_t *x;
    struct ft_gemm_scale *scale;
    uint32_t rows, columns, turn; /* turn: of w_top, changes with every slice */
};

#if defined(__CUDACC__) || defined(FT_CUDA_EMULATED)
/* The power of two for numbers whose largest is given by its bits, and its inverse. */
static __device__ __forceinline__ float ft_gemm_power(uint32_t top)
{
    return __uint_as_float((268u - max(top >> 23, 37u)) << 23);
}
static __device__ __forceinline__ float ft_gemm_unit(uint32_t top)
{
    return __uint_as_float((max(top >> 23, 37u) - 14u) << 23);
}
/* |value| as bits that compare like it; 0 when it is not finite. */
static __device__ __forceinline__ uint32_t ft_gemm_size(float value)
{
    uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
    return bits < 0x7f800000u ? bits : 0u;
}
/* The largest of a warp's sizes to *top; the whole warp. */
static __device__ __forceinline__ void ft_gemm_raise(uint32_t *top, uint32_t size)
{
    size = ft_warp_max_u32(size);
    if ((threadIdx.x & 31) == 0 && size)
        atomicMax(top, size);
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
    uint64_t wide = ft_round_up(rows * ft_gemm_wide(c->model), 64), columns = ft_round_up(in, FT_GEMM_DEPTH);
    struct ft_gemm_rows to = {(uint16_t *)(ft_gemm_scratch_rows(c) + wide), NULL, rows, (uint32_t)columns, 0};
    to.scale = (struct ft_gemm_scale *)(to.x + ft_round_up(rows * columns, 32));
    return to;
}

/* Clears *scale and sets its x_top for x rows [rows, in]. */
int ft_gemm_measure(const float *x, uint64_t x_stride, uint32_t rows, uint32_t in,
                    struct ft_gemm_scale *scale, uint64_t *stamp, void *stream);
/* x rows [rows, in] (stride x_stride) -> f16 activations and their power of two. */
int ft_gemm_convert(const struct ft_gemm_rows *to, const float *x, uint64_t x_stride, uint32_t in,
                    uint64_t *stamp, void *stream);
/* y[r][o] = W x_r (+ bias[o]), row r at y + r * y_stride. */
int ft_gemm_multiply(const struct ft_cuda *c, struct ft_gemm_rows *x, const struct ft_matrix *w,
                     const float *bias, float *y, uint64_t y_stride, void *stream);
/* The same for outputs [begin, begin + count) alone; y and bias of output `begin` come first. */
int ft_gemm_multiply_part(const struct ft_cuda *c, struct ft_gemm_rows *x, const struct ft_matrix *w,
                          uint32_t begin, uint32_t count, const float *bias, float *y, uint64_t y_stride,
                          void *stream);
/* One product of f16 operands: y = alpha W x (+ bias). */
struct ft_gemm_product {
    const uint16_t *x, *w; /* [rows, columns], [out, columns] */
    const struct ft_gemm_scale *scale;
    const float *bias; /* [out] or NULL */
    float *y;
    uint64_t y_stride;
    uint32_t rows, out, columns;
};
/* By the open library (c->blas), no bias; false: it would not, and y is as before. */
bool ft_gemm_blas(const struct ft_cuda *c, const struct ft_gemm_product *p, void *stream);
/* residual[r][i] += s[r][i] y[r] for all streams; y rows [rows, hidden]. */
int ft_gemm_add_residual(const struct ft_cuda *c, const float *y, void *stream);

#endif
