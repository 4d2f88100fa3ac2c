/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The `room` smallest of a stream of keys, in ascending order, without allocation: a binary heap with its
 * largest key on top, sorted at the end. Keys are (rank << 32 | index), so equal ranks go to the lower index.
 * Ownership: `keys` [room] is the caller's. Threads: pure. Source: heap selection, any textbook.
 */
#ifndef FT_PLANNER_PICK_H
#define FT_PLANNER_PICK_H

#include "graph/types.h"

struct ft_pick {
    uint64_t *keys; /* [room] */
    uint32_t room, count;
};

void ft_pick_push(struct ft_pick *pick, uint32_t rank, uint32_t index);
/* Sorts ascending; afterwards ft_pick_index(i) is the i-th smallest. No push after it. */
void ft_pick_sort(struct ft_pick *pick);
static inline uint32_t ft_pick_index(const struct ft_pick *pick, uint32_t i)
{
    return (uint32_t)pick->keys[i];
}
/* Would this rank still be taken? A cheap test before the caller does anything dear. */
static inline bool ft_pick_wants(const struct ft_pick *pick, uint32_t rank)
{
    return pick->count < pick->room || (pick->room && rank <= (uint32_t)(pick->keys[0] >> 32));
}

#endif
