/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/slots.h"

#include <string.h>

int ft_slots_init(struct ft_slots *slots, struct ft_arena *arena, struct ft_arena *blobs, uint32_t slot_count,
                  uint64_t slot_bytes, uint32_t layer_count, uint32_t expert_count, struct ft_error *err)
{
    const struct ft_slots_part all = {.layer_end = layer_count, .end = slot_count};
    return ft_slots_init_parts(slots, arena, &blobs, &all, 1, slot_bytes, layer_count, expert_count, err);
}

int ft_slots_init_parts(struct ft_slots *slots, struct ft_arena *arena, struct ft_arena *const *blobs,
                        const struct ft_slots_part *parts, uint32_t part_count, uint64_t slot_bytes,
                        uint32_t layer_count, uint32_t expert_count, struct ft_error *err)
{
    uint32_t slot_count = parts[part_count - 1].end;
    *slots = (struct ft_slots){.count = slot_count,
                               .layer_count = layer_count,
                               .expert_count = expert_count,
                               .slot_bytes = ft_round_up(slot_bytes, 64),
                               .part_count = part_count};
    uint64_t experts = (uint64_t)layer_count * expert_count;
    int status = FT_OK;
    for (uint32_t i = 0; i < part_count && status == FT_OK; i++) {
        slots->parts[i] = parts[i];
        status = ft_arena_push(blobs[i], parts[i].end - parts[i].begin + parts[i].landing_count,
                               slots->slot_bytes, (void **)&slots->parts[i].memory, err);
    }
#define PUSH(count, pointer)                                                                                 \
    if (status == FT_OK)                                                                                     \
    status = FT_ARENA_PUSH(arena, count, pointer, err)
    PUSH(slot_count, &slots->layer);
    PUSH(slot_count, &slots->expert);
    PUSH(slot_count, &slots->last_used);
    PUSH(slot_count, &slots->blob);
    PUSH(slot_count, &slots->generation);
    PUSH(slot_count, &slots->busy);
    PUSH(slot_count, &slots->filled_step);
    PUSH(slot_count, &slots->prefetched);
    PUSH(slot_count, &slots->filling);
    PUSH(experts, &slots->map);
    PUSH(experts, &slots->used_step);
#undef PUSH
    if (status != FT_OK || ft_arena_is_counting(arena))
        return status;
    for (uint32_t i = 0; i < slot_count; i++)
        slots->layer[i] = slots->expert[i] = FT_NONE;
    for (uint32_t i = 0; i < part_count; i++)
        for (uint32_t slot = parts[i].begin; slot < parts[i].end; slot++)
            slots->blob[slot] = slot - parts[i].begin;
    memset(slots->map, 0xff, experts * sizeof *slots->map);
    return FT_OK;
}

uint32_t ft_slots_touch(struct ft_slots *slots, uint32_t layer, uint32_t expert, uint32_t step)
{
    uint32_t *used = &slots->used_step[(uint64_t)layer * slots->expert_count + expert];
    uint32_t before = *used;
    *used = step;
    return before;
}

uint32_t ft_slots_last_use(const struct ft_slots *slots, uint32_t layer, uint32_t expert)
{
    return slots->used_step[(uint64_t)layer * slots->expert_count + expert];
}

void ft_slots_borrow(struct ft_slots *slots, uint32_t slot)
{
    slots->busy[slot] = 1;
}

void ft_slots_lease(struct ft_slots *slots, uint32_t slot, uint32_t step)
{
    slots->busy[slot] = 1;
    slots->last_used[slot] = step;
}

static void evict(struct ft_slots *slots, uint32_t slot)
{
    if (slots->expert[slot] == FT_NONE)
        return;
    slots->map[(uint64_t)slots->layer[slot] * slots->expert_count + slots->expert[slot]] = FT_NONE;
    slots->layer[slot] = slots->expert[slot] = FT_NONE;
    slots->generation[slot]++;
    slots->prefetches_wasted += slots->prefetched[slot];
    slots->prefetched[slot] = 0;
}

void ft_slots_take(struct ft_slots *slots, uint32_t slot, uint32_t layer, uint32_t expert, uint32_t step,
                   bool poison)
{
    evict(slots, slot);
#ifdef FT_CHECKS
    if (poison && !slots->is_device) /* a job that still reads the old expert shows itself */
        memset(ft_slots_memory(slots, slot), 0xff, slots->slot_bytes);
#else
    (void)poison;
#endif
    slots->layer[slot] = layer;
    slots->expert[slot] = expert;
    slots->filled_step[slot] = step;
    slots->map[(uint64_t)layer * slots->expert_count + expert] = slot;
    ft_slots_lease(slots, slot, step);
}

void ft_slots_empty(struct ft_slots *slots, uint32_t slot)
{
    evict(slots, slot);
    slots->busy[slot] = 1;
}

void ft_slots_release(struct ft_slots *slots, const uint32_t *slot_list, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (slot_list[i] != FT_NONE)
            slots->busy[slot_list[i]] = 0;
}

void ft_slots_forget_step(struct ft_slots *slots, uint32_t step)
{
    for (uint32_t i = 0; i < slots->count; i++) {
        slots->busy[i] = 0;
        if (slots->expert[i] != FT_NONE && slots->filled_step[i] == step)
            evict(slots, i);
    }
}

void ft_slots_view(const struct ft_slots *slots, uint32_t layer, struct ft_slot_view *view)
{
    const struct ft_slots_part *part = &slots->parts[ft_slots_part_of(slots, layer)];
    *view = (struct ft_slot_view){.count = slots->count,
                                  .layer = slots->layer,
                                  .expert = slots->expert,
                                  .last_used = slots->last_used,
                                  .busy = slots->busy,
                                  .begin = part->begin,
                                  .end = part->end};
}
