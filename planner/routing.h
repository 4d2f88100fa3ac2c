/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Router choices of many decode steps: made up with the locality of real traffic, and what a cache of expert
 * slots would make of them.
 *
 * The generator. Each row (an independent sequence) keeps, per layer, all experts ordered by last use: an LRU
 * stack. A step draws topk distinct depths of that stack and moves the experts found there to the top. An LRU
 * cache of C slots per layer hits exactly the depths below C, so the distribution of depths *is* the curve of
 * hit rates; no popularity needs to be guessed. Source: Mattson, Gecsei, Slutz and Traiger, "Evaluation
 * techniques for storage hierarchies", 1970.
 *
 * The curve that the depths were fitted to, one row, 512 experts, 10 a token (other expert counts: the same
 * share of the experts; other topk: the same depths):
 *
 *   slots per layer   11    78    93   186   279   372
 *   LRU hits         13%   39%   43%   62%   72%   79%
 *
 * The first value is the middle of the 8 - 18% that 11 slots have shown, the others are the target. Between
 * two of them depths are equally likely. What the model leaves out: experts that are popular all the time (a
 * static placement is worth only its share of the experts here), and anything that rows have in common (a
 * batch overlaps only by chance).
 *
 * The counters see what the engine sees: the distinct experts of a (step, layer), resident or not when its
 * router has run. One pool over all layers.
 *
 * Ownership: the caller's, but for ids made by ft_routing_generate (ft_routing_free). Threads: pure. Errors:
 * FT_MEMORY, FT_USAGE.
 */
#ifndef FT_PLANNER_ROUTING_H
#define FT_PLANNER_ROUTING_H

#include "graph/error.h"
#include "graph/routing.h"

#define FT_ROUTING_SEED 1u /* the committed seed */

struct ft_routing_options {
    uint32_t step_count, layer_count, row_count, topk, expert_count;
    uint64_t seed;
};

/* Experts in slots before the first step, those used longest ago first. */
struct ft_routing_warm {
    uint32_t count;
    uint32_t *layer, *expert; /* [count] */
};

int ft_routing_generate(const struct ft_routing_options *options, struct ft_routing *routing,
                        struct ft_error *err);
/* The top of the stacks before step 0 of the same options: the same number in every layer, rows taking turns.
 * layer and expert are the caller's, with room for slot_count entries. */
int ft_routing_list_warm(const struct ft_routing_options *options, uint32_t slot_count,
                         struct ft_routing_warm *warm, struct ft_error *err);
void ft_routing_free(struct ft_routing *routing);

struct ft_routing_count {
    uint64_t active; /* distinct experts, summed over steps and layers */
    uint64_t misses; /* of these, not resident */
};

/* Distinct experts of [first, first + steps) only; misses stay 0. */
void ft_routing_count_active(const struct ft_routing *routing, uint32_t first, uint32_t steps,
                             struct ft_routing_count *count);
/*
 * Steps 0 .. first + steps - 1 are replayed, [first, first + steps) are counted; entries repeat as in the
 * engine. expert_count: of a layer. warm may be NULL.
 *
 *   lru     every miss is fetched, the slots of planner/evict_lru.h are taken: what `offload` does
 *   belady  after each layer the slots keep the experts that are needed again soonest, whether they were fetched
 *           or not: no policy, with any knowledge of the future, has fewer misses over the replayed steps. Source:
 *           Belady, "A study of replacement algorithms for a virtual-storage computer", 1966
 */
int ft_routing_lru(const struct ft_routing *routing, uint32_t expert_count, uint32_t slot_count,
                   const struct ft_routing_warm *warm, uint32_t first, uint32_t steps,
                   struct ft_routing_count *count, struct ft_error *err);
int ft_routing_belady(const struct ft_routing *routing, uint32_t expert_count, uint32_t slot_count,
                      const struct ft_routing_warm *warm, uint32_t first, uint32_t steps,
                      struct ft_routing_count *count, struct ft_error *err);

#endif
