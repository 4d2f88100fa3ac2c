/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Joins a layer's experts: sum over the top-k list, in its order, of weight times result, plus the gated
 * shared expert, added to the residual streams. A thread per element of the hidden state. Weights and streams
 * are read before the kernel in front has ended (expert_args.cuh).
 */
#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

#define COMBINE_THREADS 64u
#define COMBINE_FLIGHT 10  /* results under way per thread */
#define COMBINE_STREAMS 4u /* streams read ahead of the results */

struct combine_args {
    const float *weights, *expert_y, *host_y, *shared_y, *shared_gate, *mixed;
    const uint32_t *on_cpu; /* NULL: no pair was computed on the CPU */
    float *residual;
    uint32_t hidden, topk, streams, lowrank;
    uint64_t *stamp;
};

static __global__ void __launch_bounds__(COMBINE_THREADS) combine_kernel(struct combine_args a)
{
    uint64_t row = blockIdx.y;
    uint32_t h = blockIdx.x * COMBINE_THREADS + threadIdx.x, at = min(h, a.hidden - 1);
    const float *weights = a.weights + row * a.topk, *s = a.mixed + row * (a.lowrank + a.streams) + a.lowrank;
    float *residual = a.residual + row * a.streams * a.hidden + at, held[COMBINE_STREAMS],
          scale[COMBINE_STREAMS];
    if (!a.on_cpu)
        ft_begin_next();
#pragma unroll
    for (uint32_t i = 0; i < COMBINE_STREAMS; i++) {
        held[i] = i < a.streams ? __ldcg(residual + (uint64_t)i * a.hidden) : 0.0f;
        scale[i] = i < a.streams && a.streams > 1 ? __ldcg(s + i) : 1.0f;
    }
    float gate = a.shared_y ? ft_sigmoid_device(__ldcg(a.shared_gate + row)) : 0.0f, sum = 0.0f;
    for (uint32_t first = 0; first < a.topk; first += COMBINE_FLIGHT) {
        float y[COMBINE_FLIGHT], weight[COMBINE_FLIGHT];
        const float *from[COMBINE_FLIGHT];
#pragma unroll
        for (uint32_t i = 0; i < COMBINE_FLIGHT; i++) {
            uint64_t pair = row * a.topk + min(first + i, a.topk - 1);
            weight[i] = __ldcg(weights + min(first + i, a.topk - 1));
            from[i] = (a.on_cpu && __ldcg(a.on_cpu + pair) ? a.host_y : a.expert_y) + pair * a.hidden + at;
        }
        if (first == 0) {
            ft_wait_previous();
            if (a.on_cpu) /* not before: this kernel waits beside the one that waits for the host */
                ft_begin_next();
            if (a.stamp && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
                *a.stamp = ft_global_timer();
        }
#pragma unroll
        for (uint32_t i = 0; i < COMBINE_FLIGHT; i++)
            y[i] = first + i < a.topk ? __ldcg(from[i]) : 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < COMBINE_FLIGHT; i++)
            if (first + i < a.topk)
                sum = fmaf(weight[i], y[i], sum);
    }
    if (a.shared_y)
        sum = fmaf(gate, __ldcg(a.shared_y + row * a.hidden + at), sum);
    if (h >= a.hidden)
        return;
    if (a.streams == 1) {
        *residual = held[0] + sum;
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < COMBINE_STREAMS; i++)
        if (i < a.streams)
            residual[(uint64_t)i * a.hidden] = fmaf(scale[i], sum, held[i]);
    for (uint32_t i = COMBINE_STREAMS; i < a.streams; i++)
        residual[(uint64_t)i * a.hidden] = fmaf(s[i], sum, residual[(uint64_t)i * a.hidden]);
}

extern "C" int ft_cuda_combine(const struct ft_cuda *c, uint32_t layer, bool any_cpu, void *stream)
{
    const struct ft_model *m = c->model;
    struct combine_args a = {};
    a.weights = c->base + c->space.topk_weights;
    a.expert_y = c->base + c->space.expert_y;
    a.host_y = c->exchange.host_y;
    a.on_cpu = any_cpu ? c->exchange.on_cpu : NULL;
    a.shared_y = m->shared_width ? c->base + c->space.shared_y : NULL;
    a.shared_gate = c->base + c->space.shared_gate;
    a.mixed = c->base + c->space.mixed;
    a.residual = c->base + c->space.residual;
    a.hidden = m->hidden;
    a.topk = m->topk;
    a.streams = m->hc_count > 1 ? m->hc_count : 1;
    a.lowrank = m->hc_lowrank;
    a.stamp = ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_COMBINE);
    if (!c->step.rows)
        return 0;
    dim3 grid((m->hidden + COMBINE_THREADS - 1) / COMBINE_THREADS, c->step.rows);
    return FT_LAUNCH_NEXT(combine_kernel, grid, dim3(COMBINE_THREADS), 0, stream, a);
}
