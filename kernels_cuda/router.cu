/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which experts a row goes to, and who computes them.
 *
 * Decode form, one kernel: warps compute router logits, the shared expert's hidden values and its gate; the
 * block that ends last picks every row's top k, looks the experts up in the slot map, groups those that are
 * resident and tells the driver. Prefill form: logits and shared projections by ft_cuda_project, then the
 * same choice by a block per row.
 */
#include <math.h>

#include "kernels_cuda/grouping.cuh"
#include "kernels_cuda/rows_dot.cuh"

#define ROUTE_THREADS 256u
#define ROUTE_WARPS (ROUTE_THREADS / 32)
#define ROUTE_COUNTER 32u /* index of the "last block" counter */
#define CHOOSE_HELD 16u   /* logits that a lane holds in registers */

struct route_args {
    struct ft_matrix router, gate, up, shared_gate;
    const float *router_bias;
    struct ft_rows_x x;
    uint32_t layer, experts, topk, hidden, shared_width, rows_max;
    bool renormalise, softmax_chosen, resolve;
    float *logits, *weights, *shared_h, *gate_value;
    uint32_t *ids;
    const uint32_t *forced; /* [rows, k] or NULL */
    uint32_t *failed;       /* mapped [rows] */
    const uint32_t *epoch;
    struct ft_group_args group;
    uint32_t *ids_out, *missing_out, *routed; /* mapped, of the layer */
    float *host_x;                            /* mapped */
    uint32_t *counter;
    uint64_t *stamp;
};

/* ---- choice ---- */

/* Unsigned keys in the order of the floats; -0 and +0 are one key. No NaN here. */
static __device__ __forceinline__ uint32_t order_key(float value)
{
    uint32_t bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
static __device__ __forceinline__ float key_value(uint32_t key)
{
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/* Keys of a row in the lanes of a warp: lane l has experts l, l + 32, ... Those beyond `held` are read again.
 */
struct row_keys {
    uint32_t key[CHOOSE_HELD]; /* 0 = taken, or no such expert: below every number's key */
    const float *logits;
    uint32_t experts;
    uint32_t last_key, last_id; /* the pick before: what is not held is taken when it stands before this */
};

static __device__ __forceinline__ void best_of_lane(const struct row_keys *k, uint32_t *key, uint32_t *id)
{
    uint32_t lane = threadIdx.x & 31;
    *key = 0;
    *id = FT_NONE;
#pragma unroll
    for (uint32_t i = 0; i < CHOOSE_HELD; i++)
        if (k->key[i] > *key) { /* ascending ids: the first among equals stays */
            *key = k->key[i];
            *id = i * 32 + lane;
        }
    for (uint32_t e = CHOOSE_HELD * 32 + lane; e < k->experts; e += 32) {
        uint32_t other = order_key(k->logits[e]);
        bool taken = other > k->last_key || (other == k->last_key && e <= k->last_id);
        if (!taken && other > *key) {
            *key = other;
            *id = e;
        }
    }
}

/* Reads a row; false for a NaN, or a maximum that is not finite (the softmax would be NaN). */
static __device__ __forceinline__ bool load_keys(struct row_keys *k, const float *logits, uint32_t experts)
{
    uint32_t lane = threadIdx.x & 31, top = 0;
    bool nan = false;
    k->logits = logits;
    k->experts = experts;
    k->last_key = k->last_id = FT_NONE;
#pragma unroll
    for (uint32_t i = 0; i < CHOOSE_HELD; i++) {
        bool exists = i * 32 + lane < experts;
        float value = exists ? __ldcg(logits + i * 32 + lane) : 0.0f;
        nan = nan || isnan(value);
        k->key[i] = exists ? order_key(value) : 0;
        top = max(top, k->key[i]);
    }
    for (uint32_t e = CHOOSE_HELD * 32 + lane; e < experts; e += 32) {
        float value = __ldcg(logits + e);
        nan = nan || isnan(value);
        top = max(top, order_key(value));
    }
    if (__any_sync(0xffffffffu, nan))
        return false;
    return isfinite(key_value(ft_warp_max_u32(top)));
}

/* Sum over all experts of exp(logit - max): the softmax that is not renormalised. */
static __device__ float sum_of_all(const float *logits, uint32_t experts, float largest)
{
    float sum = 0.0f;
    for (uint32_t e = threadIdx.x & 31; e < experts; e += 32)
        sum += expf(__ldcg(logits + e) - largest);
    return ft_warp_sum(sum);
}

/* Weights of a row whose ids stand in place j of lane j, 32 at a time; `logit` of a forced choice is looked
 * up. */
static __device__ void weigh(const struct route_args *a, const float *logits, uint32_t *ids, float *weights,
                             const uint32_t *forced)
{
    uint32_t lane = threadIdx.x & 31;
    float largest = -INFINITY, chosen = 0.0f;
    for (uint32_t j = lane; j < a->topk; j += 32) {
        if (forced)
            ids[j] = forced[j];
        largest = fmaxf(largest, __ldcg(logits + ids[j]));
    }
    largest = ft_warp_max(largest);
    /* In the order of the list by one lane: as the CPU adds them. */
    for (uint32_t j = 0; j < a->topk; j += 32) {
        float weight = j + lane < a->topk ? expf(__ldcg(logits + ids[j + lane]) - largest) : 0.0f;
        for (uint32_t i = 0; i < min(a->topk - j, 32u); i++)
            chosen += __shfl_sync(0xffffffffu, weight, (int)i);
    }
    if (!forced && !a->renormalise && !a->softmax_chosen)
        chosen = sum_of_all(logits, a->experts, largest);
    for (uint32_t j = lane; j < a->topk; j += 32)
        weights[j] = expf(__ldcg(logits + ids[j]) - largest) / chosen;
}

/* One warp chooses for one row: ids in descending order of logit, the lower id first among equals. */
static __device__ void choose_row(const struct route_args *a, uint32_t row)
{
    uint32_t lane = threadIdx.x & 31;
    const float *logits = a->logits + (uint64_t)row * a->experts;
    uint32_t *ids = a->ids + row * a->topk;
    float *weights = a->weights + row * a->topk;
    struct row_keys keys;
    if (!load_keys(&keys, logits, a->experts)) {
        for (uint32_t j = lane; j < a->topk; j += 32) {
            ids[j] = j;
            weights[j] = 0.0f;
        }
        if (lane == 0 && a->failed[row] == 0)
            a->failed[row] = 1 + a->layer;
        return;
    }
    if (!a->forced) {
        uint32_t key, id;
        best_of_lane(&keys, &key, &id);
        for (uint32_t j = 0; j < a->topk; j++) {
            uint32_t top = ft_warp_max_u32(key), winner = ft_warp_min_u32(key == top ? id : FT_NONE);
            if (lane == 0)
                ids[j] = winner;
            keys.last_key = top;
            keys.last_id = winner;
            if (winner % 32 == lane || a->experts > CHOOSE_HELD * 32) {
#pragma unroll
                for (uint32_t i = 0; i < CHOOSE_HELD; i++)
                    if (i * 32 + lane == winner)
                        keys.key[i] = 0;
                best_of_lane(&keys, &key, &id);
            }
        }
        __syncwarp();
    }
    weigh(a, logits, ids, weights, a->forced ? a->forced + row * a->topk : NULL);
}

/* ---- what the driver is told ---- */

/* All threads of one block, after every row was chosen. */
static __device__ void tell_driver(const struct route_args *a, struct ft_grouping *grouping)
{
    uint32_t rows = a->x.rows, pairs = rows * a->topk;
    for (uint32_t p = threadIdx.x; p < pairs; p += blockDim.x)
        a->ids_out[p] = a->ids[p];
    if (a->resolve) {
        ft_group_pairs(&a->group, grouping);
        if (grouping->missing)
            for (uint32_t i = threadIdx.x; i < rows * a->hidden; i += blockDim.x)
                a->host_x[i] = a->x.x[i];
        if (threadIdx.x == 0)
            *a->missing_out = grouping->missing;
    }
    __threadfence_system(); /* by every writer, before the one store that announces it all */
    __syncthreads();
    if (threadIdx.x == 0)
        ft_store_release_system(a->routed, *a->epoch); /* pairs with the driver's acquire load */
}

/* ---- decode form ---- */

template <int rows>
static __device__ __forceinline__ void route_router(const struct route_args *a, uint32_t task)
{
    constexpr int outs = rows >= 8 ? 4 : 2;
    uint32_t lane = threadIdx.x & 31, row[outs];
    const struct ft_matrix *w[outs];
    float sum[outs][rows];
#pragma unroll
    for (int o = 0; o < outs; o++) {
        w[o] = &a->router;
        row[o] = min(task * outs + o, a->experts - 1);
    }
    ft_rows_dot<rows, outs>(sum, w, row, &a->x);
#pragma unroll
    for (int o = 0; o < outs; o++)
#pragma unroll
        for (int r = 0; r < rows; r++)
            if (lane == 0 && r < (int)a->x.rows && task * outs + o < a->experts) {
                uint32_t e = task * outs + o;
                a->logits[(uint64_t)r * a->experts + e] =
                    sum[o][r] + (a->router_bias ? a->router_bias[e] : 0.0f);
            }
}

template <int rows>
static __device__ __forceinline__ void route_shared(const struct route_args *a, uint32_t task)
{
    constexpr int units = rows >= 8 ? 2 : 1;
    uint32_t lane = threadIdx.x & 31, row[2 * units];
    const struct ft_matrix *w[2 * units];
    float sum[2 * units][rows];
#pragma unroll
    for (int u = 0; u < units; u++) {
        w[2 * u] = &a->gate;
        w[2 * u + 1] = &a->up;
        row[2 * u] = row[2 * u + 1] = min(task * units + u, a->shared_width - 1);
    }
    ft_rows_dot<rows, 2 * units>(sum, w, row, &a->x);
#pragma unroll
    for (int u = 0; u < units; u++)
#pragma unroll
        for (int r = 0; r < rows; r++)
            if (lane == 0 && r < (int)a->x.rows && task * units + u < a->shared_width)
                a->shared_h[(uint64_t)r * a->shared_width + task * units + u] =
                    ft_silu_device(sum[2 * u][r]) * sum[2 * u + 1][r];
}

template <int rows> static __device__ __forceinline__ void route_gate(const struct route_args *a)
{
    const struct ft_matrix *w[1] = {&a->shared_gate};
    uint32_t row[1] = {0};
    float sum[1][rows];
    ft_rows_dot<rows, 1>(sum, w, row, &a->x);
#pragma unroll
    for (int r = 0; r < rows; r++)
        if ((threadIdx.x & 31) == 0 && r < (int)a->x.rows)
            a->gate_value[r] = sum[0][r];
}

/* Tasks of the warps of a launch: router outputs, hidden units of the shared expert, its gate. */
struct route_tasks {
    uint32_t router, shared, gate;
};

template <int rows>
static __global__ void __launch_bounds__(ROUTE_THREADS, rows <= 4 ? 2 : 1)
    route_kernel(struct route_args a, struct route_tasks tasks)
{
    FT_SHARED(struct ft_grouping, grouping, 1);
    FT_SHARED(uint32_t, is_last, 1);
    if (a.stamp && blockIdx.x == 0 && threadIdx.x == 0)
        *a.stamp = ft_global_timer();
    uint32_t warp = threadIdx.x >> 5, task = blockIdx.x * ROUTE_WARPS + warp;
    if (task < tasks.router)
        route_router<rows>(&a, task);
    else if (task - tasks.router < tasks.shared)
        route_shared<rows>(&a, task - tasks.router);
    else if (task - tasks.router - tasks.shared < tasks.gate)
        route_gate<rows>(&a);
    __threadfence(); /* the logits, before the count that hands them to the last block */
    __syncthreads();
    if (threadIdx.x == 0) {
        *is_last = atomicAdd(a.counter, 1u) == gridDim.x - 1;
        if (*is_last)
            *a.counter = 0;
    }
    __syncthreads();
    if (!*is_last)
        return;
    __threadfence();
    for (uint32_t row = warp; row < a.x.rows; row += ROUTE_WARPS)
        choose_row(&a, row);
    __syncthreads();
    tell_driver(&a, grouping);
}

static int launch_decode(const struct route_args *a, void *stream)
{
    uint32_t outs = a->x.rows > 4 ? 4 : 2;
    struct route_tasks tasks = {(a->experts + outs - 1) / outs, 0, 0};
    if (a->shared_width) {
        tasks.shared = (a->shared_width + outs / 2 - 1) / (outs / 2);
        tasks.gate = 1;
    }
    dim3 grid((tasks.router + tasks.shared + tasks.gate + ROUTE_WARPS - 1) / ROUTE_WARPS),
        block(ROUTE_THREADS);
    if (a->x.rows <= 1)
        return FT_LAUNCH(route_kernel<1>, grid, block, 0, stream, *a, tasks);
    if (a->x.rows <= 2)
        return FT_LAUNCH(route_kernel<2>, grid, block, 0, stream, *a, tasks);
    if (a->x.rows <= 4)
        return FT_LAUNCH(route_kernel<4>, grid, block, 0, stream, *a, tasks);
    if (a->x.rows <= 8)
        return FT_LAUNCH(route_kernel<8>, grid, block, 0, stream, *a, tasks);
    return FT_LAUNCH(route_kernel<16>, grid, block, 0, stream, *a, tasks);
}

/* ---- prefill form ---- */

static __global__ void __launch_bounds__(ROUTE_THREADS) choose_kernel(struct route_args a)
{
    uint32_t row = blockIdx.x * ROUTE_WARPS + (threadIdx.x >> 5);
    if (row < a.x.rows)
        choose_row(&a, row);
}

static __global__ void __launch_bounds__(1024) tell_kernel(struct route_args a)
{
    FT_SHARED(struct ft_grouping, grouping, 1);
    tell_driver(&a, grouping);
}

/* projected: row r at r * stride: gate [width] | up [width] | gate of the shared expert [1] */
static __global__ void __launch_bounds__(ROUTE_THREADS)
    activate_kernel(const float *projected, uint64_t stride, uint32_t width, float *h, float *gate_value)
{
    uint32_t i = blockIdx.x * ROUTE_THREADS + threadIdx.x;
    const float *from = projected + blockIdx.y * stride;
    if (i < width)
        h[(uint64_t)blockIdx.y * width + i] = ft_silu_device(from[i]) * from[width + i];
    if (i == 0)
        gate_value[blockIdx.y] = from[2 * width];
}

/* The shared expert's projections stand in expert_y meanwhile, which the experts fill later. */
static int launch_shared(const struct ft_cuda *c, const struct route_args *a, void *stream)
{
    struct ft_cuda_segment segments[3] = {{&a->gate, NULL}, {&a->up, NULL}, {&a->shared_gate, NULL}};
    float *projected = c->base + c->space.expert_y;
    uint64_t stride = ft_round_up(2ull * a->shared_width + 1, 4);
    if (stride > (uint64_t)a->topk * a->hidden)
        return 1; /* cudaErrorInvalidValue: no model is so */
    int error =
        ft_cuda_project(c, segments, 3, a->x.x, a->x.stride, a->x.rows, projected, stride, NULL, stream);
    dim3 grid((a->shared_width + ROUTE_THREADS - 1) / ROUTE_THREADS, a->x.rows);
    return error ? error
                 : FT_LAUNCH(activate_kernel, grid, dim3(ROUTE_THREADS), 0, stream, (const float *)projected,
                             stride, a->shared_width, a->shared_h, a->gate_value);
}

static int launch_prefill(const struct ft_cuda *c, const struct route_args *a, void *stream)
{
    struct ft_cuda_segment segment = {&a->router, a->router_bias};
    int error = ft_cuda_project(c, &segment, 1, a->x.x, a->x.stride, a->x.rows, a->logits, a->experts,
                                a->stamp, stream);
    if (!error && a->shared_width)
        error = launch_shared(c, a, stream);
    if (!error)
        error = FT_LAUNCH(choose_kernel, dim3((a->x.rows + ROUTE_WARPS - 1) / ROUTE_WARPS),
                          dim3(ROUTE_THREADS), 0, stream, *a);
    return error ? error : FT_LAUNCH(tell_kernel, dim3(1), dim3(1024), 0, stream, *a);
}

static void fill_exchange(struct route_args *a, const struct ft_cuda *c, uint32_t layer, bool resolve)
{
    const struct ft_cuda_exchange *x = &c->exchange;
    a->resolve = resolve;
    a->epoch = c->step.epoch;
    a->failed = c->step.failed;
    a->group = ft_group_args_of(c, layer, FT_GROUP_RESIDENT);
    a->ids_out = x->ids + (uint64_t)layer * x->rows_max * a->topk;
    a->missing_out = x->missing + layer;
    a->routed = x->routed + (uint64_t)layer * FT_CUDA_FLAG_STRIDE;
    a->host_x = x->host_x;
    a->counter = x->counters + ROUTE_COUNTER;
    if (x->forced_ids)
        a->forced = x->forced_ids + (uint64_t)layer * c->step.rows * a->topk;
}

extern "C" int ft_cuda_route(const struct ft_cuda *c, uint32_t layer, bool resolve, void *stream)
{
    const struct ft_model *m = c->model;
    const struct ft_layer_weights *w = &c->weights->layers[layer];
    struct route_args a = {};
    if (!c->step.rows)
        return 0;
    a.router = w->router;
    a.router_bias = w->router_bias;
    a.shared_width = m->shared_width;
    if (m->shared_width) {
        a.gate = w->shared.gate;
        a.up = w->shared.up;
        a.shared_gate = w->shared_gate;
    }
    a.x.x = c->base + c->space.x;
    a.x.stride = m->hidden;
    a.x.rows = c->step.rows;
    a.layer = layer;
    a.experts = m->expert_count;
    a.topk = m->topk;
    a.hidden = m->hidden;
    a.renormalise = m->topk_renormalise;
    a.softmax_chosen = m->router_softmax_chosen;
    a.logits = c->base + c->space.logits_router;
    a.weights = c->base + c->space.topk_weights;
    a.ids = (uint32_t *)(c->base + c->space.topk_ids);
    a.shared_h = c->base + c->space.shared_h;
    a.gate_value = c->base + c->space.shared_gate;
    a.stamp = ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_ROUTE);
    fill_exchange(&a, c, layer, resolve);
    return c->step.rows <= FT_CUDA_DECODE_ROWS ? launch_decode(&a, stream) : launch_prefill(c, &a, stream);
}
