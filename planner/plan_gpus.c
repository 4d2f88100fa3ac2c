/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plan for several GPUs: consecutive layers for each, in proportion to what the parts of fixed size (head,
 * activations, workspace) leave of its memory; then what each holds for its layers, and how the pool of slots
 * is dealt out: by layers with experts, but no GPU gets more than it has room or experts for.
 */
#include "planner/plan_make_internal.h"

#include <string.h>

uint64_t ft_plan_draft_gpu_limit(const struct ft_plan_draft *draft, uint32_t gpu)
{
    const struct ft_plan_options *options = draft->options;
    if (options->gpu_limit_count > 1)
        return options->gpu_bytes[gpu];
    return options->device_bytes ? options->device_bytes : draft->machine->gpu_memory_bytes[gpu];
}

static uint64_t minus(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* ---- layers ---- */

/* What does not grow with the layers. */
static uint64_t fixed_bytes(const struct ft_plan_draft *draft, bool last)
{
    const struct ft_weight_sizes *sizes = draft->sizes;
    uint64_t bytes = ft_plan_draft_workspace(draft, last);
    if (last)
        bytes = ft_plan_plus(bytes, draft->model->tied ? sizes->embed_bytes : sizes->head_bytes);
    return bytes;
}

void ft_plan_draft_split_layers(struct ft_plan_draft *draft)
{
    struct ft_plan *plan = draft->plan;
    uint32_t count = plan->gpu_count, layers = draft->model->layer_count;
    double weight[FT_GPUS_MAX], sum = 0, before = 0;
    bool known = true;
    for (uint32_t i = 0; i < count; i++)
        known = known && ft_plan_draft_gpu_limit(draft, i);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t left = minus(ft_plan_draft_gpu_limit(draft, i), fixed_bytes(draft, i + 1 == count));
        weight[i] = known ? (double)left : 1;
        sum += weight[i];
    }
    for (uint32_t i = 0, begin = 0; i < count; i++) {
        struct ft_plan_gpu *gpu = &plan->gpus[i];
        before += sum > 0 ? weight[i] / sum : 1.0 / count;
        uint32_t end = (uint32_t)(before * layers + 0.5);
        /* at least a layer for this one and for each that follows */
        end = FT_MIN(FT_MAX(end, begin + 1), layers - (count - 1 - i));
        *gpu = (struct ft_plan_gpu){.id = draft->machine->gpu_id[i],
                                    .layer_begin = begin,
                                    .layer_end = i + 1 == count ? layers : end};
        begin = end;
    }
}

/* ---- what each holds ---- */

static uint32_t moe_layers(const struct ft_plan_draft *draft, const struct ft_plan_gpu *gpu)
{
    uint32_t count = 0;
    for (uint32_t i = gpu->layer_begin; i < gpu->layer_end; i++)
        count += !draft->model->layers[i].dense;
    return count;
}

static uint64_t dense_bytes(const struct ft_plan_draft *draft, const struct ft_plan_gpu *gpu, bool last)
{
    const struct ft_weight_sizes *sizes = draft->sizes;
    uint64_t own = 0, all = 0, layers = draft->model->layer_count;
    for (uint32_t i = 0; i < layers; i++) {
        all = ft_plan_plus(all, sizes->layer_dense_bytes[i]);
        if (i >= gpu->layer_begin && i < gpu->layer_end)
            own = ft_plan_plus(own, sizes->layer_dense_bytes[i]);
    }
    if (!all) { /* not known */
        all = sizes->dense_bytes / layers * layers;
        own = sizes->dense_bytes / layers * (gpu->layer_end - gpu->layer_begin);
    }
    /* the norm or mixer in front of the head */
    return last ? ft_plan_plus(own, minus(sizes->dense_bytes, all)) : own;
}

/* All but the slots. */
static void fill_pools(const struct ft_plan_draft *draft, struct ft_plan_gpu *gpu, bool last)
{
    const struct ft_plan *plan = draft->plan;
    const struct ft_weight_sizes *sizes = draft->sizes;
    struct ft_state_layout state;
    struct ft_kv_layout kv;
    ft_state_layout_init_layers(&state, draft->model, gpu->layer_begin, gpu->layer_end);
    ft_kv_layout_init_layers(&kv, draft->model, gpu->layer_begin, gpu->layer_end);
    uint64_t *pool = gpu->pool_bytes;
    memset(pool, 0, sizeof gpu->pool_bytes);
    pool[FT_POOL_DENSE] = dense_bytes(draft, gpu, last);
    pool[FT_POOL_EMBED] = last && draft->model->tied ? sizes->embed_bytes : 0;
    pool[FT_POOL_HEAD] = last ? sizes->head_bytes : 0;
    pool[FT_POOL_STAGING] = ft_plan_times(2ull * plan->staging_experts, sizes->expert_bytes_max);
    pool[FT_POOL_KV] = ft_plan_times(plan->page_count, ft_plan_times(kv.count, sizeof(float)));
    pool[FT_POOL_STATE] = ft_plan_times(plan->sequences_max, ft_plan_times(state.count, sizeof(float)));
    pool[FT_POOL_WORKSPACE] = ft_plan_draft_workspace(draft, last);
    gpu->used_bytes = 0;
    for (uint32_t p = 0; p < FT_POOL_COUNT; p++)
        gpu->used_bytes = ft_plan_plus(gpu->used_bytes, pool[p]);
}

/* Deals `left` slots out, more where more layers have experts, at most cap[i] - slots[i] each; returns what
 * nobody could take. */
static uint64_t deal(uint64_t left, const uint64_t *moe, const uint64_t *cap, uint64_t *slots, uint32_t count)
{
    for (uint64_t open = 1; left && open;) {
        uint64_t pass = left;
        open = 0;
        for (uint32_t i = 0; i < count; i++)
            open += slots[i] < cap[i] ? moe[i] : 0;
        for (uint32_t i = 0; i < count && open; i++) {
            uint64_t share = FT_MAX((uint64_t)((double)pass * (double)moe[i] / (double)open), UINT64_C(1));
            uint64_t more = slots[i] < cap[i] ? FT_MIN(FT_MIN(share, cap[i] - slots[i]), left) : 0;
            slots[i] += more;
            left -= more;
        }
    }
    return left;
}

static void deal_slots(const struct ft_plan_draft *draft)
{
    struct ft_plan *plan = draft->plan;
    uint64_t bytes = FT_MAX(draft->sizes->expert_bytes_max, UINT64_C(1)), at = 0;
    uint64_t moe[FT_GPUS_MAX] = {0}, experts[FT_GPUS_MAX] = {0}, room[FT_GPUS_MAX] = {0},
             slots[FT_GPUS_MAX] = {0};
    for (uint32_t i = 0; i < plan->gpu_count; i++) {
        const struct ft_plan_gpu *gpu = &plan->gpus[i];
        moe[i] = moe_layers(draft, gpu);
        experts[i] = ft_plan_times(moe[i], draft->model->expert_count);
        room[i] = gpu->limit_bytes ? FT_MIN(minus(gpu->limit_bytes, gpu->used_bytes) / bytes, experts[i])
                                   : experts[i];
    }
    uint64_t left = deal(plan->slot_count, moe, room, slots, plan->gpu_count);
    left = deal(left, moe, experts, slots, plan->gpu_count); /* more than fit: the plan will say so */
    plan->slot_count -= (uint32_t)left;                      /* more than experts exist */
    for (uint32_t i = 0; i < plan->gpu_count; i++) {
        struct ft_plan_gpu *gpu = &plan->gpus[i];
        gpu->slot_begin = (uint32_t)at;
        at += slots[i];
        gpu->slot_end = (uint32_t)at;
        gpu->pool_bytes[FT_POOL_SLOTS] = ft_plan_times(slots[i], draft->sizes->expert_bytes_max);
        gpu->used_bytes = ft_plan_plus(gpu->used_bytes, gpu->pool_bytes[FT_POOL_SLOTS]);
    }
}

void ft_plan_draft_fill_gpus(const struct ft_plan_draft *draft)
{
    struct ft_plan *plan = draft->plan;
    for (uint32_t i = 0; i < plan->gpu_count; i++) {
        plan->gpus[i].limit_bytes = ft_plan_draft_gpu_limit(draft, i);
        fill_pools(draft, &plan->gpus[i], i + 1 == plan->gpu_count);
    }
    deal_slots(draft);
}
