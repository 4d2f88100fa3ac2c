/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which experts a row goes to, and who computes them.
 *
 * Decode form, one kernel: warps compute router logits, the shared expert's hidden values and its gate, with
 * the weights asked for before the kernel in front has ended; a block per row stages it for the experts; of
 * the blocks with logits the one that ends last picks every row's top k, looks the experts up in the slot
 * map, groups those that are resident and tells the driver. Look-ahead, where the step wants it: more warps give
 * the same rows to the router of the next layer with experts; the last of their blocks tells the driver what that
 * one would choose. Prefill form: logits and shared projections by
 * ft_cuda_project, then the same choice by a block per row.
 */
#include <math.h>

#include "kernels_cuda/expert_stage.cuh"
#include "kernels_cuda/grouping.cuh"
#include "kernels_cuda/rows_dot.cuh"

#define ROUTE_THREADS 128u
#define ROUTE_WARPS (ROUTE_THREADS / 32)
#define STAGED_ROWS 2u          /* rows of x that a block copies to shared memory */
#define STAGED_MAX (40u * 1024) /* bytes */
#define SCRATCH 64u             /* words of shared memory per choosing warp */
#define ROUTE_COUNTER 32u       /* index of the "last block" counter */
#define AHEAD_COUNTER 33u       /* the same, of the look-ahead's blocks */
#define CHOOSE_HELD 16u         /* logits that a lane holds in registers */

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
    struct {
        struct ft_matrix router; /* of the layer that is looked at */
        const float *bias;
        const uint32_t *wanted; /* NULL: no look-ahead in this session, or behind this layer */
        float *logits;
        uint32_t *ids_out, *foreseen; /* mapped, of this layer */
        uint32_t *counter;
    } ahead;
    uint32_t *staged; /* decode: the rows of x for the experts (expert_stage.cuh) */
    enum ft_expert_kind kind;
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

/* Keys of a row in the lanes of a warp: lane l has experts l, l + 32, ... Those beyond `held` are read again. */
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

/* The weight of list place j in lane j, whose logit is `value`: for lists no longer than a warp. */
static __device__ __forceinline__ float weigh_lane(const struct route_args *a, const float *logits,
                                                   float value, float *scratch)
{
    uint32_t lane = threadIdx.x & 31;
    bool listed = lane < a->topk;
    float largest = ft_warp_max(listed ? value : -INFINITY), chosen = 0.0f;
    float weight = listed ? expf(value - largest) : 0.0f;
    __syncwarp();
    scratch[lane] = weight;
    __syncwarp();
    for (uint32_t i = 0; i < a->topk; i++) /* in the order of the list: as the CPU adds them */
        chosen += scratch[i];
    if (!a->forced && !a->renormalise && !a->softmax_chosen)
        chosen = sum_of_all(logits, a->experts, largest);
    return weight / chosen;
}

/* Weights of a row whose ids stand in `ids`; `logit` of a forced choice is looked up. Lists of any length. */
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

/* How many lanes' keys stand before this one's; among equals the lower lane is first. */
static __device__ __forceinline__ uint32_t rank_of(uint32_t key)
{
    uint32_t lane = threadIdx.x & 31, rank = 0;
#pragma unroll 8
    for (uint32_t i = 0; i < 32; i++) { /* code that runs once is fetched from far: keep it short */
        uint32_t other = __shfl_sync(0xffffffffu, key, (int)i);
        rank += other > key || (other == key && i < lane);
    }
    return rank;
}

/*
 * The top k <= 32 of a row that the lanes hold, list place j in lane j. The k-th of the lanes' largest keys
 * is a bound: whatever is chosen reaches it. Those that reach it are few; each counts how many stand before
 * it. False: more than 32 do.
 */
static __device__ bool choose_ranked(const struct row_keys *k, uint32_t topk, uint32_t *scratch,
                                     uint32_t *key, uint32_t *id)
{
    uint32_t lane = threadIdx.x & 31, best = 0, count = 0;
#pragma unroll
    for (uint32_t i = 0; i < CHOOSE_HELD; i++)
        best = max(best, k->key[i]);
    uint32_t holder = __ballot_sync(0xffffffffu, rank_of(best) == topk - 1);
    uint32_t bound = __shfl_sync(0xffffffffu, best, __ffs((int)holder) - 1);
#pragma unroll
    for (uint32_t i = 0; i < CHOOSE_HELD; i++) { /* ascending ids */
        uint32_t takers = __ballot_sync(0xffffffffu, k->key[i] >= bound);
        uint32_t at = count + (uint32_t)__popc(takers & ((1u << lane) - 1));
        if (k->key[i] >= bound && at < 32) {
            scratch[at] = k->key[i];
            scratch[32 + at] = i * 32 + lane;
        }
        count += (uint32_t)__popc(takers);
    }
    if (count > 32)
        return false;
    __syncwarp();
    uint32_t mine = lane < count ? scratch[lane] : 0, expert = lane < count ? scratch[32 + lane] : 0;
    uint32_t rank = rank_of(mine);
    __syncwarp();
    scratch[rank] = mine;
    scratch[32 + rank] = expert;
    __syncwarp();
    *key = scratch[lane];
    *id = scratch[32 + lane];
    return true;
}

/* The same one by one; place j also goes to lane j. Rows of any length, lists of any length. */
static __device__ void choose_in_turn(struct row_keys *k, uint32_t topk, uint32_t *ids, uint32_t *key_of_lane,
                                      uint32_t *id_of_lane)
{
    uint32_t lane = threadIdx.x & 31, key, id;
    best_of_lane(k, &key, &id);
    for (uint32_t j = 0; j < topk; j++) {
        uint32_t top = ft_warp_max_u32(key), winner = ft_warp_min_u32(key == top ? id : FT_NONE);
        if (lane == 0)
            ids[j] = winner;
        if (lane == j) {
            *key_of_lane = top;
            *id_of_lane = winner;
        }
        k->last_key = top;
        k->last_id = winner;
        if (winner % 32 == lane || k->experts > CHOOSE_HELD * 32) {
#pragma unroll
            for (uint32_t i = 0; i < CHOOSE_HELD; i++)
                if (i * 32 + lane == winner)
                    k->key[i] = 0;
            best_of_lane(k, &key, &id);
        }
    }
    __syncwarp();
}

/* One warp chooses for one row: ids in descending order of logit, the lower id first among equals. Returns
 * the id at place j in lane j. scratch [SCRATCH] in shared memory, the warp's own. */
static __device__ uint32_t choose_row(const struct route_args *a, uint32_t row, uint32_t *scratch)
{
    uint32_t lane = threadIdx.x & 31, key = 0, id = 0;
    const float *logits = a->logits + (uint64_t)row * a->experts;
    const uint32_t *forced = a->forced ? a->forced + row * a->topk : NULL;
    uint32_t *ids = a->ids + row * a->topk;
    float *weights = a->weights + row * a->topk;
    struct row_keys keys;
    if (forced && lane < a->topk)
        id = forced[lane];
    if (!load_keys(&keys, logits, a->experts)) {
        for (uint32_t j = lane; j < a->topk; j += 32) {
            ids[j] = j;
            weights[j] = 0.0f;
        }
        if (lane == 0 && a->failed[row] == 0)
            a->failed[row] = 1 + a->layer;
        return lane;
    }
    if (!forced &&
        (a->topk > 32 || a->experts > CHOOSE_HELD * 32 || !choose_ranked(&keys, a->topk, scratch, &key, &id)))
        choose_in_turn(&keys, a->topk, ids, &key, &id);
    if (a->topk > 32) {
        weigh(a, logits, ids, weights, forced);
        return id;
    }
    float value = forced && lane < a->topk ? __ldcg(logits + id) : key_value(key);
    float weight = weigh_lane(a, logits, value, (float *)scratch);
    if (lane < a->topk) {
        ids[lane] = id;
        weights[lane] = weight;
    }
    return id;
}

/* What the other router would choose for a row, by a warp: ids alone. */
static __device__ void foresee_row(const struct route_args *a, uint32_t row, uint32_t *scratch)
{
    uint32_t lane = threadIdx.x & 31, key = 0, id = 0;
    uint32_t *ids = a->ahead.ids_out + row * a->topk;
    struct row_keys keys;
    if (!load_keys(&keys, a->ahead.logits + (uint64_t)row * a->experts, a->experts)) {
        for (uint32_t j = lane; j < a->topk; j += 32)
            ids[j] = FT_NONE;
        return;
    }
    if (a->topk > 32 || a->experts > CHOOSE_HELD * 32 || !choose_ranked(&keys, a->topk, scratch, &key, &id))
        choose_in_turn(&keys, a->topk, ids, &key, &id);
    else if (lane < a->topk)
        ids[lane] = id;
}

/* All threads of the look-ahead's last block. */
static __device__ void tell_foreseen(const struct route_args *a, uint32_t *scratch)
{
    uint32_t warp = threadIdx.x >> 5;
    for (uint32_t r = warp; r < a->x.rows; r += ROUTE_WARPS)
        foresee_row(a, r, scratch + warp * SCRATCH);
    __syncthreads();
    if (threadIdx.x == 0)
        ft_store_release_system(a->ahead.foreseen, *a->epoch); /* pairs with the driver's acquire load */
}

/* ---- what the driver is told ---- */

/* All threads of one block, after every row was chosen and a barrier. */
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
    __syncthreads(); /* what all have written stands before the one store that announces it */
    if (threadIdx.x == 0)
        ft_store_release_system(a->routed, *a->epoch); /* pairs with the driver's acquire load */
}

/* The same for a single row and a list no longer than a warp: one warp chooses, lists and tells. x: the row,
 * in shared or device memory; scratch [SCRATCH], missing [1] in shared memory. */
static __device__ void finish_one_row(const struct route_args *a, const float *x, uint32_t *scratch,
                                      uint32_t *missing)
{
    uint32_t epoch = threadIdx.x == 0 ? *a->epoch : 0;
    if (threadIdx.x < 32) {
        uint32_t id = choose_row(a, 0, scratch), without = 0;
        if (a->resolve)
            without = ft_group_one_row(&a->group, id, threadIdx.x < a->topk);
        if (threadIdx.x < a->topk)
            a->ids_out[threadIdx.x] = id;
        if (threadIdx.x == 0) {
            if (a->resolve)
                *a->missing_out = without;
            *missing = without;
        }
    }
    __syncthreads();
    if (*missing) {
        if (a->hidden % 4 == 0 && ((uintptr_t)x & 15) == 0 && ((uintptr_t)a->host_x & 15) == 0)
            for (uint32_t i = threadIdx.x; i < a->hidden / 4; i += ROUTE_THREADS)
                ((float4 *)a->host_x)[i] = ((const float4 *)x)[i];
        else
            for (uint32_t i = threadIdx.x; i < a->hidden; i += ROUTE_THREADS)
                a->host_x[i] = x[i];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        ft_store_release_system(a->routed, epoch); /* pairs with the driver's acquire load */
}

/* ---- decode form ---- */

/* Tasks of the warps of a launch: router outputs, in blocks of their own, then hidden units of the shared
 * expert and its gate. */
struct route_tasks {
    uint32_t router, router_blocks, shared, gate;
    uint32_t stage_blocks;              /* in front of the others */
    uint32_t ahead_block, ahead_blocks; /* the look-ahead's: the first, and how many */
};

enum task_kind { TASK_ROUTER, TASK_AHEAD, TASK_SHARED, TASK_GATE, TASK_NONE };

/* What the warp computes: `outs` router outputs, or outs / 2 units of the shared expert (gate and up of each
 * side by side). Sums of rows that do not exist are of the last one. */
template <int outs>
static __device__ __forceinline__ enum task_kind aim_task(const struct route_args *a,
                                                          const struct route_tasks *tasks, uint32_t *number,
                                                          const struct ft_matrix *w[outs], uint32_t row[outs])
{
    uint32_t block = blockIdx.x - tasks->stage_blocks, task = block * ROUTE_WARPS + (threadIdx.x >> 5);
    enum task_kind kind = task < tasks->router ? TASK_ROUTER : TASK_NONE;
    bool is_ahead = tasks->ahead_blocks && blockIdx.x >= tasks->ahead_block;
    if (is_ahead) {
        task = (blockIdx.x - tasks->ahead_block) * ROUTE_WARPS + (threadIdx.x >> 5);
        kind = task < tasks->router ? TASK_AHEAD : TASK_NONE;
    } else if (block >= tasks->router_blocks) {
        task -= tasks->router_blocks * ROUTE_WARPS;
        kind = task < tasks->shared                 ? TASK_SHARED
               : task - tasks->shared < tasks->gate ? TASK_GATE
                                                    : TASK_NONE;
    }
#pragma unroll
    for (int o = 0; o < outs; o++) {
        w[o] = kind == TASK_SHARED ? (o & 1 ? &a->up : &a->gate)
               : kind == TASK_GATE ? &a->shared_gate
               : is_ahead          ? &a->ahead.router
                                   : &a->router;
        row[o] = kind == TASK_SHARED ? min(task * (outs / 2) + o / 2, a->shared_width - 1)
                 : kind == TASK_ROUTER || kind == TASK_AHEAD ? min(task * outs + o, a->experts - 1)
                                                             : 0;
    }
    *number = task;
    return kind;
}

template <int rows, int outs>
static __device__ __forceinline__ void store_task(const struct route_args *a, enum task_kind kind,
                                                  uint32_t task, const float sum[outs][rows])
{
    if (threadIdx.x & 31)
        return;
#pragma unroll
    for (int o = 0; o < outs; o++)
#pragma unroll
        for (int r = 0; r < rows; r++) {
            if (r >= (int)a->x.rows)
                continue;
            uint32_t e = task * outs + o, unit = task * (outs / 2) + o / 2;
            if (kind == TASK_ROUTER && e < a->experts)
                a->logits[(uint64_t)r * a->experts + e] =
                    sum[o][r] + (a->router_bias ? a->router_bias[e] : 0.0f);
            if (kind == TASK_AHEAD && e < a->experts)
                a->ahead.logits[(uint64_t)r * a->experts + e] =
                    sum[o][r] + (a->ahead.bias ? a->ahead.bias[e] : 0.0f);
            if (kind == TASK_SHARED && !(o & 1) && unit < a->shared_width)
                a->shared_h[(uint64_t)r * a->shared_width + unit] = ft_silu_device(sum[o][r]) * sum[o | 1][r];
            if (kind == TASK_GATE && o == 0)
                a->gate_value[r] = sum[o][r];
        }
}

template <int kind>
static __device__ __forceinline__ void stage_to(const struct route_args *a, const float *x, uint32_t row)
{
    ft_stage_row<kind>(a->staged + (uint64_t)row * ft_stage_words<kind>(a->hidden), x, a->hidden);
}
/* A row of x for the experts, by a block. */
static __device__ void stage_x(const struct route_args *a, uint32_t row)
{
    const float *x = a->x.x + row * a->x.stride;
    switch (a->kind) {
    case FT_EXPERT_BF16:
        return stage_to<FT_EXPERT_BF16>(a, x, row);
    case FT_EXPERT_FP8:
        return stage_to<FT_EXPERT_FP8>(a, x, row);
    case FT_EXPERT_NVFP4:
        return stage_to<FT_EXPERT_NVFP4>(a, x, row);
    case FT_EXPERT_MXFP4:
        return stage_to<FT_EXPERT_MXFP4>(a, x, row);
    default:
        return;
    }
}

/* Counts the blocks with router outputs; true in all threads of the one that came last. `word` [1]. */
static __device__ __forceinline__ bool is_last_block(uint32_t *counter, uint32_t blocks, uint32_t *word)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        *word = ft_count_arrival(counter) ==
                blocks - 1; /* behind the block's logits: it hands them to the last one */
        if (*word)
            *counter = 0;
    }
    __syncthreads();
    return *word != 0;
}

template <int rows>
static __global__ void __launch_bounds__(ROUTE_THREADS, rows <= 4 ? 3 : 2)
    route_kernel(const __grid_constant__ struct route_args a,
                 const __grid_constant__ struct route_tasks tasks, uint32_t staged)
{
    constexpr int outs = rows >= 8 ? 4 : 2;
    FT_SHARED_DYNAMIC(float, x_staged);
    FT_SHARED(uint32_t, word, 2);
    FT_SHARED(uint32_t, scratch, ROUTE_WARPS * SCRATCH);
    const struct ft_matrix *w[outs];
    uint32_t row[outs], task, warp = threadIdx.x >> 5;
    float sum[outs][rows];
    if (blockIdx.x < tasks.stage_blocks) {
        ft_wait_previous();
        ft_begin_next();
        if (a.stamp && blockIdx.x == 0 && threadIdx.x == 0)
            *a.stamp = ft_global_timer();
        stage_x(&a, blockIdx.x);
        return;
    }
    bool is_ahead = tasks.ahead_blocks && blockIdx.x >= tasks.ahead_block;
    if (is_ahead && !__ldcg(a.ahead.wanted)) { /* an input of the step: written long before */
        ft_begin_next();
        ft_wait_previous(); /* no block ends before everything in front of it: the kernels behind count on it */
        return;
    }
    enum task_kind kind = aim_task<outs>(&a, &tasks, &task, w, row);
    struct ft_rows_x x = a.x;
    if (staged)
        x.x = x_staged;
    ft_rows_dot<rows, outs, (rows <= 2 ? 10 : 2)>(sum, w, row, &x, [&] {
        ft_wait_previous();
        ft_begin_next();
        if (a.stamp && blockIdx.x == 0 && threadIdx.x == 0)
            *a.stamp = ft_global_timer();
        if (staged)
            for (uint32_t i = threadIdx.x; i < a.x.rows * a.hidden / 4; i += ROUTE_THREADS)
                ft_copy_async16((float4 *)x_staged + i, (const float4 *)a.x.x + i);
        ft_copy_async_commit(); /* all of them under way at once */
        ft_copy_async_wait<0>();
        __syncthreads();
    });
    store_task<rows, outs>(&a, kind, task, sum);
    if (is_ahead) {
        if (is_last_block(a.ahead.counter, tasks.ahead_blocks, word))
            tell_foreseen(&a, scratch);
        return;
    }
    if (blockIdx.x - tasks.stage_blocks >= tasks.router_blocks ||
        !is_last_block(a.counter, tasks.router_blocks, word))
        return;
    if constexpr (rows == 1) {
        finish_one_row(&a, x.x, scratch, word + 1);
    } else {
        FT_SHARED(struct ft_grouping, grouping, 1);
        for (uint32_t r = warp; r < a.x.rows; r += ROUTE_WARPS)
            choose_row(&a, r, scratch + warp * SCRATCH);
        __syncthreads();
        tell_driver(&a, grouping);
    }
}

static int launch_decode(const struct route_args *a, void *stream)
{
    uint32_t outs = a->x.rows > 4 ? 4 : 2, bytes = a->x.rows * a->hidden * 4;
    struct route_tasks tasks = {};
    tasks.router = (a->experts + outs - 1) / outs;
    tasks.router_blocks = (tasks.router + ROUTE_WARPS - 1) / ROUTE_WARPS;
    if (a->shared_width) {
        tasks.shared = (a->shared_width + outs / 2 - 1) / (outs / 2);
        tasks.gate = 1;
    }
    uint32_t staged = a->x.rows <= STAGED_ROWS && bytes <= STAGED_MAX && a->hidden % 4 == 0 &&
                      a->x.stride == a->hidden && ((uintptr_t)a->x.x & 15) == 0;
    tasks.stage_blocks = a->kind == FT_EXPERT_SLOW ? 0 : a->x.rows;
    tasks.ahead_block = tasks.stage_blocks + tasks.router_blocks +
                        (tasks.shared + tasks.gate + ROUTE_WARPS - 1) / ROUTE_WARPS;
    tasks.ahead_blocks = a->ahead.wanted ? tasks.router_blocks : 0;
    dim3 grid(tasks.ahead_block + tasks.ahead_blocks), block(ROUTE_THREADS);
    bytes = staged ? bytes : 0;
    if (a->x.rows <= 1 && a->topk <= 32)
        return FT_LAUNCH_NEXT(route_kernel<1>, grid, block, bytes, stream, *a, tasks, staged);
    if (a->x.rows <= 2)
        return FT_LAUNCH_NEXT(route_kernel<2>, grid, block, bytes, stream, *a, tasks, staged);
    if (a->x.rows <= 4)
        return FT_LAUNCH_NEXT(route_kernel<4>, grid, block, bytes, stream, *a, tasks, staged);
    if (a->x.rows <= 8)
        return FT_LAUNCH_NEXT(route_kernel<8>, grid, block, bytes, stream, *a, tasks, staged);
    return FT_LAUNCH_NEXT(route_kernel<16>, grid, block, bytes, stream, *a, tasks, staged);
}

/* ---- prefill form ---- */

static __global__ void __launch_bounds__(ROUTE_THREADS) choose_kernel(struct route_args a)
{
    FT_SHARED(uint32_t, scratch, ROUTE_WARPS * SCRATCH);
    uint32_t warp = threadIdx.x >> 5, row = blockIdx.x * ROUTE_WARPS + warp;
    if (row < a.x.rows)
        choose_row(&a, row, scratch + warp * SCRATCH);
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

/* The router of the next layer with experts, on the same GPU. */
static void fill_ahead(struct route_args *a, const struct ft_cuda *c, uint32_t layer)
{
    const struct ft_cuda_exchange *x = &c->exchange;
    uint32_t target = x->foreseen ? ft_model_next_experts(c->model, layer, x->layer_end) : FT_NONE;
    if (target == FT_NONE)
        return;
    a->ahead.router = c->weights->layers[target].router;
    a->ahead.bias = c->weights->layers[target].router_bias;
    a->ahead.wanted = c->step.looks_ahead;
    a->ahead.logits = x->foreseen_logits;
    a->ahead.ids_out = x->foreseen_ids + (uint64_t)layer * FT_MIN(x->rows_max, FT_CUDA_DECODE_ROWS) * a->topk;
    a->ahead.foreseen = x->foreseen + (uint64_t)layer * FT_CUDA_FLAG_STRIDE;
    a->ahead.counter = x->counters + AHEAD_COUNTER;
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
    a.staged = (uint32_t *)(c->base + c->space.staged);
    a.kind = ft_expert_kind_of(&w->expert_layout);
    fill_exchange(&a, c, layer, resolve);
    if (resolve && c->step.rows <= FT_CUDA_DECODE_ROWS)
        fill_ahead(&a, c, layer);
    return c->step.rows <= FT_CUDA_DECODE_ROWS ? launch_decode(&a, stream) : launch_prefill(c, &a, stream);
}
