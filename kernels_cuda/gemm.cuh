/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prefill form of dense products: many rows, bf16 operands on the matrix units, f32 sums. Host functions
 * shared by dense.cu and mix.cu, and where their buffers lie in c->scratch:
 *
 *   | weights of other formats as bf16, a slice at a time | f32 rows [R, widest] | activations bf16 [R, in
 * rounded up] |
 *
 * Decode forms use the front of the scratch for partial sums.
 */
#ifndef FT_KERNELS_CUDA_GEMM_CUH
#define FT_KERNELS_CUDA_GEMM_CUH

#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

#define FT_GEMM_DEPTH FT_GPU_DEPTH /* columns of a tile; activations are padded to a multiple with zeros */
#define FT_GEMM_WEIGHT_BYTES FT_GPU_WEIGHT_BYTES /* slice of decoded weights */

/* bf16 activations [rows, columns], columns = in rounded up to FT_GEMM_DEPTH. */
struct ft_gemm_rows {
    uint16_t *x;
    uint32_t rows, columns;
};

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
/* y = W x by the open library (c->blas), bf16 operands [out, columns] and [rows, columns]; false: it would
 * not. */
bool ft_gemm_blas(const struct ft_cuda *c, const uint16_t *x, const uint16_t *w, uint32_t rows, uint32_t out,
                  uint32_t columns, float *y, uint64_t y_stride, void *stream);
/* residual[r][i] += s[r][i] y[r] for all streams; y rows [rows, hidden]. */
int ft_gemm_add_residual(const struct ft_cuda *c, const float *y, void *stream);

#endif
