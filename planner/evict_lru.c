/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/evict_lru.h"

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

uint32_t ft_evict_lru_find(const struct ft_layer_in *in, uint32_t wanted, struct ft_pick *pick)
{
    const struct ft_slot_view *slots = &in->slots;
    pick->room = FT_MIN(wanted, slots->count);
    pick->count = 0;
    for (uint32_t s = 0; s < slots->count; s++) {
        bool empty = slots->expert[s] == FT_NONE;
        /* Rank 0 is "free"; a step number is moved up by one, and the highest two share a rank. */
        uint32_t used = slots->last_used[s], rank = empty ? 0 : used + (used != UINT32_MAX);
        if (!ft_pick_wants(pick, rank) || slots->busy[s])
            continue;
        if (!empty && slots->layer[s] == in->layer && is_active(in, slots->expert[s]))
            continue;
        ft_pick_push(pick, rank, s);
    }
    ft_pick_sort(pick);
    return pick->count;
}
