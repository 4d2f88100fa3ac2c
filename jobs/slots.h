/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pool of expert slots, over all layers. Several GPUs have a part each, of consecutive slots, for a range
 * of layers: an expert is only ever held by its layer's part.
 *
 *     free -> filling -> resident -> leased (step) -> resident -> ... -> evicted (generation + 1)
 *
 * A slot is leased by a step from the moment its expert is placed until the layer's last expert job is done;
 * the policy may take a slot that is free or resident and not leased, or, inside one layer, a slot whose
 * earlier use in that layer will have finished (waves, jobs/expand.c). Handle = index + generation; no
 * reader keeps a handle beyond its layer yet.
 *
 * Threads: one at a time (whoever expands a layer; the graph orders layers), except the memory itself, which
 * the link lane writes and the device reads as the jobs' order allows.
 */
#ifndef FT_JOBS_SLOTS_H
#define FT_JOBS_SLOTS_H

#include "graph/arena.h"
#include "graph/policy.h"

#define FT_LANDINGS_MAX 16u /* of one part */

/* What one GPU has of the pool. */
struct ft_slots_part {
    uint32_t layer_end;  /* its layers: from the end of the part before */
    uint32_t begin, end; /* its slots */
    uint32_t landing_count; /* blobs without a slot (jobs/look_ahead.h) */
    char *memory; /* [end - begin + landing_count] blobs, slot_bytes apart, 64-byte aligned */
};

struct ft_slots {
    uint32_t count, layer_count, expert_count;
    uint64_t slot_bytes;
    uint32_t part_count;
    struct ft_slots_part parts[FT_GPUS_MAX];
    bool is_device;                       /* the host must not touch the parts' memory */
    uint32_t *layer, *expert, *last_used; /* [count] */
    uint32_t *blob;                       /* [count] where it lies: index of a blob of its part */
    uint32_t *generation;                 /* [count] */
    uint8_t *busy;                        /* [count] leased in the running step's layer */
    uint32_t *filled_step;                /* [count] step whose fetch filled it */
    uint8_t *prefetched;                  /* [count] copied ahead and not used yet */
    _Atomic uint32_t *filling;  /* [count] ticket of the prefetch on its way, 0 = none (jobs/prefetch.h) */
    uint64_t prefetches_wasted; /* evicted before their first use */
    uint32_t *map;              /* [layer_count, expert_count] slot or FT_NONE */
    uint32_t *used_step;        /* [layer_count, expert_count] step of the expert's last use, 0 = never */
};

/* Counting arenas welcome. slot_count may be 0. The blobs come from `blobs` (the same arena, or a device's). */
int ft_slots_init(struct ft_slots *slots, struct ft_arena *arena, struct ft_arena *blobs, uint32_t slot_count,
                  uint64_t slot_bytes, uint32_t layer_count, uint32_t expert_count, struct ft_error *err);
/* The same in parts [part_count], whose memory is filled in; blobs [part_count]. */
int ft_slots_init_parts(struct ft_slots *slots, struct ft_arena *arena, struct ft_arena *const *blobs,
                        const struct ft_slots_part *parts, uint32_t part_count, uint64_t slot_bytes,
                        uint32_t layer_count, uint32_t expert_count, struct ft_error *err);
/* Which part is the layer's. */
static inline uint32_t ft_slots_part_of(const struct ft_slots *slots, uint32_t layer)
{
    uint32_t part = 0;
    while (part + 1 < slots->part_count && layer >= slots->parts[part].layer_end)
        part++;
    return part;
}
static inline uint32_t ft_slots_find(const struct ft_slots *slots, uint32_t layer, uint32_t expert)
{
    return slots->count ? slots->map[(uint64_t)layer * slots->expert_count + expert] : FT_NONE;
}
static inline char *ft_slots_blob(const struct ft_slots *slots, uint32_t part, uint32_t blob)
{
    return slots->parts[part].memory + slots->slot_bytes * blob;
}
static inline char *ft_slots_memory(const struct ft_slots *slots, uint32_t slot)
{
    uint32_t part = 0;
    while (slot >= slots->parts[part].end)
        part++;
    return ft_slots_blob(slots, part, slots->blob[slot]);
}
/* What the slot holds: layer * expert_count + expert, or FT_NONE. */
static inline uint32_t ft_slots_holder(const struct ft_slots *slots, uint32_t slot)
{
    return slots->expert[slot] == FT_NONE ? FT_NONE
                                          : slots->layer[slot] * slots->expert_count + slots->expert[slot];
}
/* Notes that the expert is used by `step`, wherever it is computed; returns the step of its use before. */
uint32_t ft_slots_touch(struct ft_slots *slots, uint32_t layer, uint32_t expert, uint32_t step);
/* The step of its last use; nothing is noted. */
uint32_t ft_slots_last_use(const struct ft_slots *slots, uint32_t layer, uint32_t expert);
/* Leases a resident slot. */
void ft_slots_lease(struct ft_slots *slots, uint32_t slot, uint32_t step);
/* Leases a resident slot and leaves its age: a prompt uses nearly all experts, which says nothing about the ones
 * that decode steps will need. */
void ft_slots_borrow(struct ft_slots *slots, uint32_t slot);
/* Gives the slot to (layer, expert): evicts what it held, leases it. Checked builds poison its memory with
 * NaN when `poison`. */
void ft_slots_take(struct ft_slots *slots, uint32_t slot, uint32_t layer, uint32_t expert, uint32_t step,
                   bool poison);
/* Evicts what the slot holds; it then holds nothing and is busy, for a copy that nobody may read yet. */
void ft_slots_empty(struct ft_slots *slots, uint32_t slot);
/* Ends all leases of a layer's answer. slot_list [count] may repeat slots. */
void ft_slots_release(struct ft_slots *slots, const uint32_t *slot_list, uint32_t count);
/* After a failed step: what its fetches were to fill is not to be trusted. Ends every lease. */
void ft_slots_forget_step(struct ft_slots *slots, uint32_t step);
/* As a policy sees the pool for this layer. */
void ft_slots_view(const struct ft_slots *slots, uint32_t layer, struct ft_slot_view *view);

#endif
