/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Least recently used eviction. Victims come in this order: free slots, then slots with the oldest last use;
 * ties go to the lower index. Never: a busy slot (leased or filling), or a slot that holds an expert which
 * this very layer uses.
 *
 * Waves. A layer may miss more experts than slots can be taken (tiny builds have one slot). A policy that
 * must fetch every miss then gives the same victim to several experts of one answer: victim of the j-th fetch
 * = victims[j % found]. It does so only when no other slot is left. The runner treats two fetches with the
 * same victim in one layer as consecutive waves, in array order: the second copy starts when the device has
 * computed the first expert. Policies that have the CPU as a way out do not reuse: what finds no slot is
 * computed there, with reason NO_SLOT. A slot whose *resident* expert the layer uses is never reused: when
 * only such slots exist, the miss goes to the CPU.
 *
 * Cost: one pass over the slots for a whole layer, and only in a layer that fetches. Measured for 10 victims:
 * 7 us with 3,741 slots, 30 us with 24,576 (SSE2 code, best of 200).
 */
#ifndef FT_PLANNER_EVICT_LRU_H
#define FT_PLANNER_EVICT_LRU_H

#include "graph/policy.h"
#include "planner/pick.h"

/* Finds up to `wanted` victims for the layer, best first; pick->keys has room for at least `wanted`. Returns
 * how many. */
uint32_t ft_evict_lru_find(const struct ft_layer_in *in, uint32_t wanted, struct ft_pick *pick);
static inline uint32_t ft_evict_lru_victim(const struct ft_pick *pick, uint32_t i)
{
    return ft_pick_index(pick, i);
}

#endif
