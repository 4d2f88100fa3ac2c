/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/plan.h"

static const char *const pool_names[FT_POOL_COUNT] = {
    "dense", "embed", "head", "bank", "slots", "staging", "kv", "state", "snapshots", "workspace", "ple"};

const char *ft_plan_pool_name(enum ft_plan_pool pool)
{
    return pool < FT_POOL_COUNT ? pool_names[pool] : "?";
}

static bool has_experts(const struct ft_model *model)
{
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (!model->layers[i].dense)
            return true;
    return false;
}

static int check_numbers(const struct ft_plan *plan, const struct ft_model *model, struct ft_error *err)
{
    if (plan->strategy >= FT_STRATEGY_COUNT)
        return ft_error_set(err, FT_INTERNAL, "plan: strategy %d does not exist", (int)plan->strategy);
    if (plan->device >= FT_DEVICE_COUNT)
        return ft_error_set(err, FT_INTERNAL, "plan: device %d does not exist", (int)plan->device);
    if (plan->workers == 0 || plan->workers > FT_WORKERS_MAX)
        return ft_error_set(err, FT_INTERNAL, "plan: %u workers, wanted 1..%u", plan->workers,
                            FT_WORKERS_MAX);
    if (plan->sequences_max == 0 || plan->sequences_max > FT_SEQUENCES_MAX)
        return ft_error_set(err, FT_INTERNAL, "plan: %u sequences, wanted 1..%u", plan->sequences_max,
                            FT_SEQUENCES_MAX);
    if (plan->chunk_rows == 0 || plan->logit_rows_max == 0)
        return ft_error_set(err, FT_INTERNAL,
                            "plan: chunk of %u rows and %u logit rows, both must be at least 1",
                            plan->chunk_rows, plan->logit_rows_max);
    if (plan->page_tokens == 0 || plan->page_count < plan->sequences_max)
        return ft_error_set(err, FT_INTERNAL,
                            "plan: %u KV pages of %u tokens for %u sequences, wanted one each",
                            plan->page_count, plan->page_tokens, plan->sequences_max);
    if (!(plan->fetch_share >= 0 && plan->fetch_share <= 1))
        return ft_error_set(err, FT_INTERNAL, "plan: fetch share %g, wanted 0..1", plan->fetch_share);
    if (plan->device == FT_DEVICE_NONE && (plan->slot_count || plan->staging_experts))
        return ft_error_set(err, FT_INTERNAL, "plan: %u slots and %u staged experts without a device",
                            plan->slot_count, plan->staging_experts);
    if (plan->strategy != FT_STRATEGY_CPU && plan->device == FT_DEVICE_NONE)
        return ft_error_set(err, FT_INTERNAL, "plan: strategy %s without a device",
                            ft_strategy_name(plan->strategy));
    if (plan->strategy != FT_STRATEGY_CPU && has_experts(model) &&
        (!plan->slot_count || !plan->staging_experts))
        return ft_error_set(err, FT_INTERNAL,
                            "plan: strategy %s with %u slots and %u staged experts, wanted at least 1",
                            ft_strategy_name(plan->strategy), plan->slot_count, plan->staging_experts);
    return FT_OK;
}

static int check_lanes(const struct ft_plan *plan, struct ft_error *err)
{
    if (plan->tiling.tiles_max == 0 || plan->tiling.tile_bytes_min == 0)
        return ft_error_set(err, FT_INTERNAL,
                            "plan: tiles_max %u and tile_bytes_min %u, both must be at least 1",
                            plan->tiling.tiles_max, plan->tiling.tile_bytes_min);
    for (uint32_t op = 0; op < FT_OP_COUNT; op++) {
        uint8_t lane = plan->tiling.lane_of_op[op];
        if (lane >= FT_LANE_COUNT || plan->reason_of_op[op] >= FT_REASON_COUNT)
            return ft_error_set(err, FT_INTERNAL, "plan: op %s has lane %u and reason %u", ft_op_name(op),
                                lane, plan->reason_of_op[op]);
        if (plan->device == FT_DEVICE_NONE && (lane == FT_LANE_DEVICE || lane == FT_LANE_LINK))
            return ft_error_set(err, FT_INTERNAL, "plan: op %s has lane %s, but there is no device",
                                ft_op_name(op), ft_lane_name(lane));
    }
    if (plan->tiling.lane_of_op[FT_OP_PLE_READ] != FT_LANE_IO)
        return ft_error_set(err, FT_INTERNAL, "plan: ple_read has lane %s, wanted io",
                            ft_lane_name(plan->tiling.lane_of_op[FT_OP_PLE_READ]));
    return FT_OK;
}

static int check_gpus(const struct ft_plan *plan, const struct ft_model *model, struct ft_error *err)
{
    uint32_t layer = 0, slot = 0;
    if (plan->gpu_count > FT_GPUS_MAX || (plan->gpu_count > 1 && plan->device != FT_DEVICE_CUDA))
        return ft_error_set(err, FT_INTERNAL, "plan: %u GPUs with device %s, at most %d are possible",
                            plan->gpu_count, ft_device_name(plan->device), FT_GPUS_MAX);
    for (uint32_t i = 0; plan->gpu_count > 1 && i < plan->gpu_count; i++) {
        const struct ft_plan_gpu *gpu = &plan->gpus[i];
        if (gpu->layer_begin != layer || gpu->layer_end <= layer || gpu->slot_begin != slot ||
            gpu->slot_end < slot)
            return ft_error_set(
                err, FT_INTERNAL,
                "plan: GPU %u has layers %u to %u and slots %u to %u, wanted to go on at %u and %u", gpu->id,
                gpu->layer_begin, gpu->layer_end, gpu->slot_begin, gpu->slot_end, layer, slot);
        layer = gpu->layer_end;
        slot = gpu->slot_end;
    }
    if (plan->gpu_count > 1 && (layer != model->layer_count || slot != plan->slot_count))
        return ft_error_set(err, FT_INTERNAL, "plan: %u GPUs have %u of %u layers and %u of %u slots",
                            plan->gpu_count, layer, model->layer_count, slot, plan->slot_count);
    return FT_OK;
}

/* Sums of several GPUs; *fits: each has room. */
static int check_gpu_sums(const struct ft_plan *plan, bool *fits, struct ft_error *err)
{
    uint64_t used = 0;
    for (uint32_t i = 0; plan->gpu_count > 1 && i < plan->gpu_count; i++) {
        const struct ft_plan_gpu *gpu = &plan->gpus[i];
        uint64_t pools = 0;
        for (uint32_t p = 0; p < FT_POOL_COUNT; p++)
            if (!ft_add_u64(pools, gpu->pool_bytes[p], &pools))
                return ft_error_set(err, FT_INTERNAL, "plan: the pools of GPU %u overflow", gpu->id);
        if (pools != gpu->used_bytes || !ft_add_u64(used, pools, &used))
            return ft_error_set(err, FT_INTERNAL,
                                "plan: pools of GPU %u add up to %llu bytes, the plan says %llu", gpu->id,
                                (unsigned long long)pools, (unsigned long long)gpu->used_bytes);
        *fits = *fits && (!gpu->limit_bytes || pools <= gpu->limit_bytes);
    }
    if (plan->gpu_count > 1 && used != plan->used_bytes[FT_TIER_DEVICE])
        return ft_error_set(err, FT_INTERNAL, "plan: GPUs add up to %llu bytes, the plan says %llu",
                            (unsigned long long)used, (unsigned long long)plan->used_bytes[FT_TIER_DEVICE]);
    return FT_OK;
}

static int check_sums(const struct ft_plan *plan, struct ft_error *err)
{
    uint64_t used[FT_TIER_COUNT] = {0};
    bool seen[FT_POOL_COUNT] = {false}, fits = true;
    if (plan->term_count > FT_POOL_COUNT)
        return ft_error_set(err, FT_INTERNAL, "plan: %u terms, at most %d pools exist", plan->term_count,
                            (int)FT_POOL_COUNT);
    for (uint32_t i = 0; i < plan->term_count; i++) {
        const struct ft_plan_term *term = &plan->terms[i];
        if (term->pool >= FT_POOL_COUNT || term->tier >= FT_TIER_COUNT || seen[term->pool])
            return ft_error_set(err, FT_INTERNAL,
                                "plan: term %u (pool %u, tier %u) is out of range or doubled", i, term->pool,
                                term->tier);
        seen[term->pool] = true;
        if (!ft_add_u64(used[term->tier], term->bytes, &used[term->tier]))
            return ft_error_set(err, FT_INTERNAL, "plan: the %s terms overflow", ft_tier_name(term->tier));
    }
    /* the host device's memory is RAM */
    if (plan->device == FT_DEVICE_HOST &&
        !ft_add_u64(used[FT_TIER_RAM], used[FT_TIER_DEVICE], &used[FT_TIER_RAM]))
        return ft_error_set(err, FT_INTERNAL, "plan: the ram terms overflow");
    for (uint32_t tier = 0; tier < FT_TIER_COUNT; tier++) {
        if (used[tier] != plan->used_bytes[tier])
            return ft_error_set(err, FT_INTERNAL, "plan: %s terms add up to %llu bytes, the plan says %llu",
                                ft_tier_name(tier), (unsigned long long)used[tier],
                                (unsigned long long)plan->used_bytes[tier]);
        fits = fits && (!plan->limit_bytes[tier] || used[tier] <= plan->limit_bytes[tier]);
    }
    int status = check_gpu_sums(plan, &fits, err);
    if (status != FT_OK)
        return status;
    if (fits != plan->fits)
        return ft_error_set(err, FT_INTERNAL, "plan: says that it %s, its numbers say the opposite",
                            plan->fits ? "fits" : "does not fit");
    if (!fits && !plan->advice[0])
        return ft_error_set(err, FT_INTERNAL, "plan: does not fit and gives no advice");
    return FT_OK;
}

int ft_plan_check(const struct ft_plan *plan, const struct ft_model *model, struct ft_error *err)
{
    int status = check_numbers(plan, model, err);
    if (status == FT_OK)
        status = check_lanes(plan, err);
    if (status == FT_OK)
        status = check_gpus(plan, model, err);
    return status == FT_OK ? check_sums(plan, err) : status;
}
