/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels of a layer's experts are given; decode (expert.cu) and prefill (expert_gemm.cu). */
#ifndef FT_KERNELS_CUDA_EXPERT_ARGS_CUH
#define FT_KERNELS_CUDA_EXPERT_ARGS_CUH

#include "kernels_cuda/expert_weights.cuh"
#include "kernels_cuda/kernels_cuda.h"

struct ft_expert_args {
    struct ft_expert_layout layout;
    struct ft_cuda_list list;
    const float *x; /* [rows, hidden] */
    float *h;       /* [pairs, width] in the order of the list */
    float *y;       /* [rows * k, hidden] at pair_out */
    uint64_t *stamp;
};

/* expert_gemm.cu: batches whose groups have more rows than a decode step. pairs_bound: limit of all pairs. */
int ft_expert_gemm(const struct ft_expert_args *a, uint32_t groups_bound, uint32_t pairs_bound, void *stream);

#endif
