/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan: what was decided before any weight is loaded. Sizes of every pool, lane of every op, strategy, and the memory
 * table with reasons. planner/plan_make.c writes it, jobs/ obeys it, tools/ print it. Plain data.
 */
#ifndef FT_GRAPH_PLAN_H
#define FT_GRAPH_PLAN_H

#include "graph/graph.h"
#include "graph/machine.h"
#include "graph/model.h"
#include "graph/policy.h"
#include "graph/weights.h"

/* What the user asked for; 0 / negative = choose for me. */
struct ft_plan_options {
    enum ft_strategy strategy;
    enum ft_device device;   /* NONE: host device is used where the strategy needs a device */
    bool device_given;       /* the user named the device: do not change it */
    uint32_t workers;        /* CPU workers */
    uint32_t slot_count;     /* --moe-cache-size: expert slots over all layers */
    double slot_rate;        /* --moe-cache-rate: share of all experts; < 0 = not given */
    double fetch_share;      /* hybrid: share of misses fetched; < 0 = default 0.5 */
    uint32_t kv_tokens;      /* total tokens in the KV pool */
    uint32_t sequences_max;
    uint32_t chunk_rows;     /* prefill chunk */
    bool all_logits;         /* every row goes through the head (ft logits) */
    uint64_t snapshot_bytes; /* host RAM for snapshots */
    bool snapshot_given;
    uint64_t device_bytes, ram_bytes; /* limits; 0 = what the machine has; device_bytes: of every GPU */
    uint32_t gpu_limit_count;
    uint64_t gpu_bytes[FT_GPUS_MAX]; /* [gpu_limit_count]: limits of several GPUs, one by one */
    bool deterministic;
    bool ple_in_ram;
};

enum ft_plan_pool {
    FT_POOL_DENSE,     /* dense weights */
    FT_POOL_EMBED,     /* token embedding */
    FT_POOL_HEAD,
    FT_POOL_BANK,      /* all experts in RAM */
    FT_POOL_SLOTS,     /* expert slots on the device */
    FT_POOL_STAGING,   /* two buffers for experts fetched in prefill */
    FT_POOL_KV,
    FT_POOL_STATE,     /* recurrent state of the running sequences */
    FT_POOL_SNAPSHOTS,
    FT_POOL_WORKSPACE, /* activations of one step */
    FT_POOL_PLE,       /* PLE tables (disk, or RAM with --ple-backend ram) */
    FT_POOL_COUNT
};
const char *ft_plan_pool_name(enum ft_plan_pool pool);

struct ft_plan_term {
    uint8_t pool; /* enum ft_plan_pool */
    uint8_t tier; /* enum ft_tier */
    uint64_t bytes;
    char reason[128]; /* "256 slots of 2764864 B: --moe-cache-rate 0.152" */
};

/* One GPU of several: consecutive layers, and what it holds for them. */
struct ft_plan_gpu {
    uint32_t id; /* as the CUDA runtime counts them */
    uint32_t layer_begin, layer_end, slot_begin, slot_end;
    uint64_t pool_bytes[FT_POOL_COUNT], used_bytes, limit_bytes; /* limit 0 = unknown */
};

struct ft_plan {
    enum ft_strategy strategy;
    char strategy_reason[160];
    enum ft_device device;
    uint32_t workers;
    double fetch_share;
    uint32_t slot_count;
    uint32_t staging_experts; /* experts in one of the two staging buffers */
    uint32_t page_tokens, page_count;
    uint32_t sequences_max, chunk_rows;
    uint32_t logit_rows_max;
    uint64_t snapshot_bytes;
    bool deterministic, ple_in_ram;
    struct ft_tiling tiling;              /* lane of every op */
    uint8_t reason_of_op[FT_OP_COUNT];    /* enum ft_reason */
    enum ft_dense dense;                  /* AS_STORED or TO_FP8: how the loader holds dense matrices */
    uint32_t gpu_count; /* 0 or 1: the device has every layer and every slot */
    struct ft_plan_gpu gpus[FT_GPUS_MAX]; /* [gpu_count] of several */
    bool lowered; /* fits only with less KV or fewer sequences than the defaults, or fewer slots than a step uses */
    uint32_t term_count;
    struct ft_plan_term terms[FT_POOL_COUNT];
    uint64_t used_bytes[FT_TIER_COUNT], limit_bytes[FT_TIER_COUNT]; /* limit 0 = unknown */
    bool fits;
    char advice[1000]; /* when it does not fit: which term to lower, and to what */
};

/* Rows of the largest step, which the workspace is sized for: a prefill chunk, or one row of every sequence. */
static inline uint32_t ft_plan_rows_max(const struct ft_plan *plan)
{
    return FT_MAX(plan->chunk_rows, plan->sequences_max);
}

/* Tokens that the KV pool is for: it has one page more for each further sequence, which may end in a page of its own. */
static inline uint32_t ft_plan_kv_tokens(const struct ft_plan *plan)
{
    uint32_t spare = FT_MAX(plan->sequences_max, 1u) - 1;
    return plan->page_count > spare ? (plan->page_count - spare) * plan->page_tokens : 0;
}

/* Rows of the second set of activations: a prefill pauses between layers while other sequences decode, so these
 * have a place of their own. 0: there is one sequence, which does one after the other. */
static inline uint32_t ft_plan_decode_rows(const struct ft_plan *plan)
{
    return plan->sequences_max > 1 ? plan->sequences_max : 0;
}

/* Consistency of a plan with its model: pools non-zero where needed, sums right, lanes legal; several GPUs: their layers
 * and slots follow each other without a gap. */
int ft_plan_check(const struct ft_plan *plan, const struct ft_model *model, struct ft_error *err);

#endif
