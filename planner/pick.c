/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/pick.h"

static void swap_keys(uint64_t *keys, uint32_t a, uint32_t b)
{
    uint64_t kept = keys[a];
    keys[a] = keys[b];
    keys[b] = kept;
}

static void sift_down(uint64_t *keys, uint32_t count, uint32_t at)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= count)
            return;
        if (child + 1 < count && keys[child + 1] > keys[child])
            child++;
        if (keys[child] <= keys[at])
            return;
        swap_keys(keys, child, at);
        at = child;
    }
}

void ft_pick_push(struct ft_pick *pick, uint32_t rank, uint32_t index)
{
    uint64_t key = (uint64_t)rank << 32 | index;
    if (pick->count < pick->room) {
        uint32_t at = pick->count++;
        pick->keys[at] = key;
        for (; at && pick->keys[(at - 1) / 2] < pick->keys[at]; at = (at - 1) / 2)
            swap_keys(pick->keys, at, (at - 1) / 2);
    } else if (pick->room && key < pick->keys[0]) {
        pick->keys[0] = key;
        sift_down(pick->keys, pick->count, 0);
    }
}

void ft_pick_sort(struct ft_pick *pick)
{
    for (uint32_t left = pick->count; left > 1; left--) {
        swap_keys(pick->keys, 0, left - 1);
        sift_down(pick->keys, left - 1, 0);
    }
}
