/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the kernels of a layer's experts are given; decode (expert.cu) and prefill (expert_gemm.cu).
 *
 * How the kernels from route to combine follow each other: each is launched to begin early (FT_LAUNCH_NEXT),
 * and those that write what a kernel further down needs say ft_begin_next only behind their ft_wait_previous.
 * So a kernel that has begun knows, even before its own ft_wait_previous, that what stands in front of its
 * predecessor is complete: down sees the list and shared_h (route's, or wait_fetched's list, in front of up);
 * wait_fetched sees on_cpu (route's); combine sees everything but the results of down. A kernel that waits
 * for the host says ft_begin_next behind that wait: blocks that wait beside it would keep the copy stream's
 * kernels from the multiprocessors.
 */
#ifndef FT_KERNELS_CUDA_EXPERT_ARGS_CUH
#define FT_KERNELS_CUDA_EXPERT_ARGS_CUH

#include "kernels_cuda/expert_weights.cuh"
#include "kernels_cuda/gemm.cuh"
#include "kernels_cuda/kernels_cuda.h"

struct ft_expert_args {
    struct ft_expert_layout layout;
    struct ft_cuda_list list;
    const float *x;              /* [rows, hidden] */
    const uint32_t *staged;      /* decode: x as route staged it (expert_stage.cuh) */
    struct ft_gemm_scale *scale; /* prefill: of x, and of h in w_top[0] */
    float *h;                    /* [pairs, width] in the order of the list */
    float *y;                    /* [rows * k, hidden] at pair_out */
    uint64_t *stamp;
    uint32_t multiprocessors;
    bool one_row; /* the step has one row: group i is pair i of row 0 */
};

/* expert_gemm.cu: batches whose groups have more rows than a decode step. rows: of x; pairs_bound: limit of all pairs. */
int ft_expert_gemm(const struct ft_expert_args *a, uint32_t rows, uint32_t groups_bound, uint32_t pairs_bound,
                   void *stream);

#endif
