/* SPDX-License-Identifier: Apache-2.0 */
/* A plan in the making: the numbers that may be lowered (knobs), and the memory that follows from them. */
#ifndef FT_PLANNER_PLAN_MAKE_INTERNAL_H
#define FT_PLANNER_PLAN_MAKE_INTERNAL_H

#include "planner/plan_make.h"

#ifdef FT_TINY
#define FT_SLOTS_DEFAULT_MAX 1u /* eviction, waves and NO_SLOT are run every day */
#else
#define FT_SLOTS_DEFAULT_MAX UINT32_MAX
#endif

/* In the order in which defaults are lowered and advice is tried. */
enum ft_plan_knob {
    FT_KNOB_SLOTS,
    FT_KNOB_SNAPSHOTS, /* bytes */
    FT_KNOB_KV,        /* tokens */
    FT_KNOB_CHUNK,     /* rows */
    FT_KNOB_SEQUENCES,
    FT_KNOB_COUNT
};

struct ft_plan_draft {
    const struct ft_model *model;
    const struct ft_weight_sizes *sizes;
    const struct ft_machine *machine;
    const struct ft_plan_options *options;
    struct ft_plan *plan;
    uint64_t expert_count;            /* of all layers */
    uint64_t state_bytes, page_bytes; /* of one sequence; of one KV page */
    uint64_t knob[FT_KNOB_COUNT], floor[FT_KNOB_COUNT];
    bool given[FT_KNOB_COUNT]; /* by the user: not ours to lower */
};

/* Recomputes everything that follows from the knobs: pools, pages, terms, sums, fits. */
void ft_plan_draft_derive(struct ft_plan_draft *draft);
/* Lowers defaults until the plan fits, then gives the rest of a GPU's memory to slots. */
void ft_plan_draft_settle(struct ft_plan_draft *draft);
/* Fills plan->advice of a plan that does not fit. */
void ft_plan_draft_advise(const struct ft_plan_draft *draft);
/* Adds that it would fit with the GPUs in the order that `machine` has them in. */
void ft_plan_draft_advise_order(const struct ft_plan_draft *draft, const struct ft_machine *machine);

/* Activations and kernels' scratch of one step on a GPU; `last`: the one that has the head. */
uint64_t ft_plan_draft_workspace(const struct ft_plan_draft *draft, bool last);
/* plan_gpus.c, several GPUs: memory of one of them, 0 = unknown; which layers each has (once, before the rest); what
 * each holds. */
uint64_t ft_plan_draft_gpu_limit(const struct ft_plan_draft *draft, uint32_t gpu);
void ft_plan_draft_split_layers(struct ft_plan_draft *draft);
void ft_plan_draft_fill_gpus(const struct ft_plan_draft *draft);

/* Sizes come from files: a sum or product that overflows becomes UINT64_MAX, which never fits. */
static inline uint64_t ft_plan_times(uint64_t a, uint64_t b)
{
    uint64_t product;
    return ft_mul_u64(a, b, &product) ? product : UINT64_MAX;
}

static inline uint64_t ft_plan_plus(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return ft_add_u64(a, b, &sum) ? sum : UINT64_MAX;
}

#endif
