/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Router choices as data: which experts each row of each decode step uses. Recorded from a model or generated
 * (planner/routing.h); the session obeys it instead of its own router (struct ft_session_options.routing), so
 * that a benchmark with random weights has the hit rate of real traffic.
 *
 * Decode step n since the session was opened uses entry n modulo step_count, row r of its batch entry r
 * modulo row_count. Steps with prefill rows are left alone. The router's own top k is computed all the same
 * (its cost is paid); the weights become the softmax of the router's logits over the given ids.
 *
 * What a router look-ahead would foresee is given as well: entry j of what is foreseen for a row is entry j of its ids
 * with probability f + 1.2 f (1 - f) (1 - (2 j + 1) / topk), f being `foresight`, else some other expert, by chance but
 * always the same one.
 *
 * Ownership: the ids are the caller's and outlive whoever was given the struct. Threads: read-only.
 */
#ifndef FT_GRAPH_ROUTING_H
#define FT_GRAPH_ROUTING_H

#include "graph/types.h"

struct ft_routing {
    uint32_t step_count, layer_count, row_count, topk;
    const uint16_t
        *ids; /* [step_count, layer_count, row_count, topk] distinct within a row, below the expert count */
    float foresight;
};

/* What the demo model's routers reach: 0.89 for the likeliest of four, 0.79, then 0.55 for the other two; 0.70 of all. */
#define FT_FORESIGHT 0.7f

/* The ids of one row, [topk]. */
static inline const uint16_t *ft_routing_row(const struct ft_routing *routing, uint32_t step, uint32_t layer,
                                             uint32_t row)
{
    uint64_t at = step % routing->step_count;
    at = at * routing->layer_count + layer;
    at = at * routing->row_count + row % routing->row_count;
    return routing->ids + at * routing->topk;
}

/* What is foreseen in place of entry j of a row's ids. */
static inline uint32_t ft_routing_foresee(const struct ft_routing *routing, uint32_t step, uint32_t layer, uint32_t row,
                                          uint32_t j, uint32_t expert_count)
{
    uint64_t key = ((uint64_t)step * routing->layer_count + layer) * 65536u + (row % routing->row_count) * 256u + j;
    uint64_t dice = ft_splitmix64(key);
    float f = routing->foresight, rank = 1 - (2 * (float)j + 1) / (float)routing->topk;
    float chance = f + 1.2f * f * (1 - f) * rank;
    bool right = (float)(dice >> 40) * 0x1p-24f < chance;
    return right ? ft_routing_row(routing, step, layer, row)[j] : (uint32_t)(dice & 0xffffffffu) % expert_count;
}

#endif
