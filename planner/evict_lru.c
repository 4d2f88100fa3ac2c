/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/evict_lru.h"

#define BLOCK 32u /* slots dismissed at once */

/* Experts are ascending. */
static bool is_active(const struct ft_layer_in *in, uint32_t expert)
{
    uint32_t low = 0, high = in->active_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (in->expert[middle] < expert)
            low = middle + 1;
        else
            high = middle;
    }
    return low < in->active_count && in->expert[low] == expert;
}

static void consider(const struct ft_layer_in *in, struct ft_pick *pick, uint32_t s)
{
    const struct ft_slot_view *slots = &in->slots;
    bool empty = slots->expert[s] == FT_NONE;
    /* Rank 0 is "free"; a step number is moved up by one, and the highest two share a rank. */
    uint32_t used = slots->last_used[s], rank = empty ? 0 : used + (used != UINT32_MAX);
    if (!ft_pick_wants(pick, rank) || slots->busy[s])
        return;
    if (!empty && slots->layer[s] == in->layer && is_active(in, slots->expert[s]))
        return;
    ft_pick_push(pick, rank, s);
}

/* Once the pick is full, nearly every slot is too young. A whole block is dismissed at once, in a loop
 * without branches that the compiler turns into vector compares. Equal ranks lose to the lower index that is
 * already in. */
static bool is_block_too_young(const struct ft_slot_view *slots, uint32_t first, uint32_t rank_worst)
{
    uint32_t wanted = 0;
    for (uint32_t s = first; s < first + BLOCK; s++)
        wanted |= (uint32_t)(slots->last_used[s] + 1 < rank_worst) | (uint32_t)(slots->expert[s] == FT_NONE) |
                  (uint32_t)(slots->last_used[s] == UINT32_MAX);
    return !wanted;
}

uint32_t ft_evict_lru_find(const struct ft_layer_in *in, uint32_t wanted, struct ft_pick *pick)
{
    const struct ft_slot_view *slots = &in->slots;
    pick->room = FT_MIN(wanted, slots->end - slots->begin);
    pick->count = 0;
    for (uint32_t s = slots->begin; s < slots->end && pick->room;) {
        bool full = pick->count == pick->room, block = full && slots->end - s >= BLOCK;
        uint32_t rank_worst = full ? (uint32_t)(pick->keys[0] >> 32) : 0, end = s + (block ? BLOCK : 1);
        if (full && rank_worst == 0)
            break; /* all free: no better ones exist */
        if (block && is_block_too_young(slots, s, rank_worst))
            s = end;
        for (; s < end; s++)
            consider(in, pick, s);
    }
    ft_pick_sort(pick);
    return pick->count;
}
