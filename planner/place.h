/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces that placement policies are made of, so that a policy reads as its rule and nothing else.
 * Threads: pure. Ownership: scratch arrays live in the policy's state, sized by ft_place_state_bytes.
 */
#ifndef FT_PLANNER_PLACE_H
#define FT_PLANNER_PLACE_H

#include "graph/policy.h"
#include "planner/ahead.h"
#include "planner/pick.h"

#define FT_PLACE_AHEAD 96u
#define FT_PLACE_AHEAD_LOW 24u /* left: the next pause is used to look for more */

/*
 * The slots that LRU will take next, oldest first, found by one scan for many layers: a slot only ever grows
 * younger, so what is still as old as it was is still among the oldest. Slots that were freed since are taken
 * at the next scan. It is a list of one GPU's slots, thrown away where the layers of the next GPU begin.
 */
struct ft_place_ahead {
    uint32_t begin, end; /* the slots that it was made of */
    uint32_t slot[FT_PLACE_AHEAD], last_used[FT_PLACE_AHEAD], expert[FT_PLACE_AHEAD];
    uint32_t at, count;
};

/* State of every policy here: two scratch arrays behind the struct. */
struct ft_place_state {
    struct ft_place_ahead ahead;
    struct ft_policy_params params;
    struct ft_pick misses, victims; /* room for one layer's active experts each */
    uint32_t ahead_count; /* of the misses: those that were copied ahead */
    uint32_t capacity; /* keys behind each pick: experts of a layer */
};

uint64_t ft_place_state_bytes(const struct ft_policy_params *params);
int ft_place_init(void *state, const struct ft_policy_params *params, struct ft_error *err);

/* Places what is resident on the device and everything else on the CPU with `miss_reason`; without a device
 * all is CPU with NO_DEVICE. Then collects the misses: misses.keys ascending by (last use, most recent first;
 * expert), so that index i is the position in the input arrays of the i-th most recently used miss. Returns
 * their number, 0 without a device. */
uint32_t ft_place_begin(struct ft_place_state *state, const struct ft_layer_in *in, struct ft_layer_out *out,
                        enum ft_reason miss_reason);
/* Then: the collected misses that were copied ahead stand in front of the others. */
void ft_place_put_ahead_first(struct ft_place_state *state, const struct ft_layer_in *in);
/* Makes FETCH of the first `count` collected misses. In prefill they are staged; else each takes a slot, the
 * least recently used first. What finds no slot: reuse = true gives it a slot of this answer again (a wave,
 * evict_lru.h), else it stays on the CPU with NO_SLOT. */
void ft_place_fetch(struct ft_place_state *state, const struct ft_layer_in *in, struct ft_layer_out *out,
                    uint32_t count, enum ft_reason reason, bool reuse);
/* A policy's `prepare` whose state begins with struct ft_place_state: finds the next victims when few are left. */
void ft_place_prepare(void *state, const struct ft_slot_view *slots, uint32_t step);
/* After ft_place_fetch: asks for copies ahead of up to `count` of the collected misses from `first` on that
 * the CPU computes now, so that they are resident at their next use. They take the slots that LRU would take
 * next, but none that was used in this step. */
void ft_place_keep(struct ft_place_state *state, const struct ft_layer_in *in, struct ft_layer_out *out,
                   uint32_t first, uint32_t count);

/* State and calls of a policy that looks ahead and has nothing else to remember. The picks' keys and the layers' notes
 * stand behind the struct. */
struct ft_place_looking {
    struct ft_place_state place;
    struct ft_ahead ahead;
};
uint64_t ft_place_looking_bytes(const struct ft_policy_params *params);
int ft_place_looking_init(void *state, const struct ft_policy_params *params, struct ft_error *err);
void ft_place_looking_observe(void *state, const struct ft_observation *observation);
void ft_place_looking_step_end(void *state, const struct ft_step_summary *summary);
bool ft_place_looks_ahead(const void *state);
uint32_t ft_place_look_ahead(void *state, const struct ft_foreseen *foreseen, uint32_t *chosen);

#endif
