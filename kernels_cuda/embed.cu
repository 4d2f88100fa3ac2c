/* SPDX-License-Identifier: Apache-2.0 */
/* The step's first kernel: token embeddings to all residual streams, rotary angles of every row. */
#include "kernels_cuda/dense.cuh"
#include "kernels_cuda/kernels_cuda.h"

#define THREADS 256u

struct embed_args {
    struct ft_matrix embed;
    const uint32_t *token, *position;
    const double *frequencies;
    float *residual, *rotary;
    float rotary_scale;
    uint32_t streams, hidden, rotary_dim;
    uint64_t *stamp;
};

/* Grid (rows, 1 + slices of the embedding): the first block of a row does its rotary angles. */
__global__ void __launch_bounds__(THREADS) embed_kernel(const __grid_constant__ struct embed_args args)
{
    ft_begin_next();
    ft_wait_previous();
    uint32_t row = blockIdx.x;
    if (args.stamp && row == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *args.stamp = ft_global_timer();
    if (blockIdx.y > 0) {
        uint32_t h = (blockIdx.y - 1) * THREADS + threadIdx.x;
        float *residual = args.residual + (uint64_t)row * args.streams * args.hidden + h;
        if (h >= args.hidden)
            return;
        float value = ft_dense_element(&args.embed, args.token[row], h);
        for (uint32_t i = 0; i < args.streams; i++)
            residual[(uint64_t)i * args.hidden] = value;
        return;
    }
    float *rotary = args.rotary + (uint64_t)row * args.rotary_dim;
    uint32_t half = args.rotary_dim / 2;
    for (uint32_t i = threadIdx.x; i < half; i += blockDim.x) {
        double angle = args.position[row] * args.frequencies[i]; /* in double: positions may be large */
        rotary[i] = (float)(cos(angle) * (double)args.rotary_scale);
        rotary[half + i] = (float)(sin(angle) * (double)args.rotary_scale);
    }
}

int ft_cuda_embed(const struct ft_cuda *c, void *stream)
{
    const struct ft_model *m = c->model;
    struct embed_args args = {c->weights->embed,
                              c->step.token,
                              c->step.position,
                              c->frequencies,
                              c->base + c->space.residual,
                              c->base + c->space.rotary,
                              c->rotary_scale,
                              m->hc_count,
                              m->hidden,
                              m->rotary_dim,
                              c->stamps ? ft_cuda_stamp_of(c, m->layer_count, FT_CUDA_STAMP_BEGIN) : NULL};
    return FT_LAUNCH_NEXT(embed_kernel, dim3(c->step.rows, 1 + (m->hidden + THREADS - 1) / THREADS),
                          dim3(THREADS), 0, stream, args);
}
