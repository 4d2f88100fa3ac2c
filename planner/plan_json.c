/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/plan_json.h"

#include <jansson.h>

/* json_object_set_new accepts NULL values as failures, so one flag is enough for the whole tree. */
static void put(json_t *object, const char *key, json_t *value, bool *good)
{
    *good = json_object_set_new(object, key, value) == 0 && *good;
}

static void put_number(json_t *object, const char *key, uint64_t value, bool *good)
{
    put(object, key, json_integer((json_int_t)FT_MIN(value, (uint64_t)INT64_MAX)), good);
}

static json_t *memory_table(const struct ft_plan *plan, bool *good)
{
    json_t *table = json_array();
    for (uint32_t i = 0; i < plan->term_count; i++) {
        const struct ft_plan_term *term = &plan->terms[i];
        json_t *row = json_object();
        put(row, "pool", json_string(ft_plan_pool_name((enum ft_plan_pool)term->pool)), good);
        put(row, "tier", json_string(ft_tier_name((enum ft_tier)term->tier)), good);
        put_number(row, "bytes", term->bytes, good);
        put(row, "reason", json_string(term->reason), good);
        *good = json_array_append_new(table, row) == 0 && *good;
    }
    return table;
}

static json_t *tier_table(const struct ft_plan *plan, bool *good)
{
    json_t *table = json_object();
    for (uint32_t tier = 0; tier < FT_TIER_COUNT; tier++) {
        json_t *row = json_object();
        put_number(row, "used_bytes", plan->used_bytes[tier], good);
        put(row, "limit_bytes",
            plan->limit_bytes[tier]
                ? json_integer((json_int_t)FT_MIN(plan->limit_bytes[tier], (uint64_t)INT64_MAX))
                : json_null(),
            good);
        put(table, ft_tier_name((enum ft_tier)tier), row, good);
    }
    return table;
}

static json_t *gpu_table(const struct ft_plan *plan, bool *good)
{
    json_t *table = json_array();
    for (uint32_t i = 0; i < plan->gpu_count; i++) {
        const struct ft_plan_gpu *gpu = &plan->gpus[i];
        json_t *row = json_object(), *pools = json_object();
        put_number(row, "gpu", gpu->id, good);
        put_number(row, "layer_begin", gpu->layer_begin, good);
        put_number(row, "layer_end", gpu->layer_end, good);
        put_number(row, "slot_count", gpu->slot_end - gpu->slot_begin, good);
        put_number(row, "used_bytes", gpu->used_bytes, good);
        put(row, "limit_bytes",
            gpu->limit_bytes ? json_integer((json_int_t)FT_MIN(gpu->limit_bytes, (uint64_t)INT64_MAX))
                             : json_null(),
            good);
        for (uint32_t p = 0; p < FT_POOL_COUNT; p++)
            if (gpu->pool_bytes[p])
                put_number(pools, ft_plan_pool_name((enum ft_plan_pool)p), gpu->pool_bytes[p], good);
        put(row, "pools", pools, good);
        *good = json_array_append_new(table, row) == 0 && *good;
    }
    return table;
}

static json_t *lane_table(const struct ft_plan *plan, bool *good)
{
    json_t *table = json_object();
    for (uint32_t op = 0; op < FT_OP_COUNT; op++) {
        json_t *row = json_object();
        put(row, "lane", json_string(ft_lane_name((enum ft_lane)plan->tiling.lane_of_op[op])), good);
        put(row, "reason", json_string(ft_reason_text((enum ft_reason)plan->reason_of_op[op])), good);
        put(table, ft_op_name((enum ft_op)op), row, good);
    }
    return table;
}

static json_t *smallest_table(const struct ft_plan *smallest, bool *good)
{
    json_t *table = json_object();
    for (uint32_t dense = 0; dense < 2; dense++) {
        const struct ft_plan *plan = &smallest[dense];
        json_t *row = json_object();
        put_number(row, "device_bytes", plan->limit_bytes[FT_TIER_DEVICE], good);
        put_number(row, "ram_bytes", plan->used_bytes[FT_TIER_RAM], good);
        put_number(row, "slot_count", plan->slot_count, good);
        put_number(row, "kv_tokens", ft_plan_kv_tokens(plan), good);
        put_number(row, "sequences_max", plan->sequences_max, good);
        put_number(row, "chunk_rows", plan->chunk_rows, good);
        put(row, "memory", memory_table(plan, good), good);
        put(row, "runs", json_boolean(dense != FT_DENSE_TO_FP8 || (FT_FP8_USES & ~FT_FP8_USES_ACCEPTED) == 0),
            good);
        put(table, dense == FT_DENSE_TO_FP8 ? "fp8" : "bf16", row, good);
    }
    return table;
}

int ft_plan_to_json(const struct ft_plan *plan, const struct ft_plan *smallest, char **text,
                    struct ft_error *err)
{
    bool good = true;
    json_t *root = json_object();
    *text = NULL;
    put(root, "strategy", json_string(ft_strategy_name(plan->strategy)), &good);
    put(root, "strategy_reason", json_string(plan->strategy_reason), &good);
    put(root, "dense", json_string(plan->dense == FT_DENSE_TO_FP8 ? "fp8" : "bf16"), &good);
    put(root, "device", json_string(ft_device_name(plan->device)), &good);
    put_number(root, "workers", plan->workers, &good);
    put(root, "fetch_share", json_real(plan->fetch_share), &good);
    put_number(root, "slot_count", plan->slot_count, &good);
    put_number(root, "staging_experts", plan->staging_experts, &good);
    put_number(root, "page_tokens", plan->page_tokens, &good);
    put_number(root, "page_count", plan->page_count, &good);
    put_number(root, "kv_tokens", ft_plan_kv_tokens(plan), &good);
    put_number(root, "sequences_max", plan->sequences_max, &good);
    put_number(root, "chunk_rows", plan->chunk_rows, &good);
    put_number(root, "logit_rows_max", plan->logit_rows_max, &good);
    put_number(root, "snapshot_bytes", plan->snapshot_bytes, &good);
    put(root, "deterministic", json_boolean(plan->deterministic), &good);
    put(root, "ple_in_ram", json_boolean(plan->ple_in_ram), &good);
    put_number(root, "tiles_max", plan->tiling.tiles_max, &good);
    put_number(root, "tile_bytes_min", plan->tiling.tile_bytes_min, &good);
    put(root, "fits", json_boolean(plan->fits), &good);
    put(root, "advice", json_string(plan->advice), &good);
    put(root, "tiers", tier_table(plan, &good), &good);
    put(root, "memory", memory_table(plan, &good), &good);
    if (plan->gpu_count > 1)
        put(root, "gpus", gpu_table(plan, &good), &good);
    if (smallest)
        put(root, "smallest_gpu", smallest_table(smallest, &good), &good);
    put(root, "ops", lane_table(plan, &good), &good);
    *text = good ? json_dumps(root, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(6)) : NULL;
    json_decref(root);
    return *text ? FT_OK : ft_error_set(err, FT_MEMORY, "plan: no memory for its JSON text");
}
