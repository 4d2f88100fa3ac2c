/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/place.h"

#include "planner/evict_lru.h"

static uint32_t key_capacity(const struct ft_policy_params *params)
{
    return params->model ? FT_MAX(params->model->expert_count, 1u) : FT_EXPERTS_MAX;
}

uint64_t ft_place_state_bytes(const struct ft_policy_params *params)
{
    return sizeof(struct ft_place_state) + 2ull * key_capacity(params) * sizeof(uint64_t);
}

int ft_place_init(void *state, const struct ft_policy_params *params, struct ft_error *err)
{
    struct ft_place_state *place = state;
    (void)err;
    place->params = *params;
    place->capacity = key_capacity(params);
    place->misses.keys = (uint64_t *)(place + 1);
    place->victims.keys = place->misses.keys + place->capacity;
    return FT_OK;
}

uint32_t ft_place_begin(struct ft_place_state *state, const struct ft_layer_in *in, struct ft_layer_out *out,
                        enum ft_reason miss_reason)
{
    struct ft_pick *misses = &state->misses;
    misses->room = FT_MIN(in->active_count, state->capacity);
    misses->count = 0;
    out->prefetch_count = 0;
    for (uint32_t i = 0; i < in->active_count; i++) {
        bool resident = in->has_device && in->slot[i] != FT_NONE;
        out->place[i] = resident ? FT_PLACE_DEVICE : FT_PLACE_CPU;
        out->reason[i] = (uint8_t)(resident         ? FT_REASON_RESIDENT
                                   : in->has_device ? miss_reason
                                                    : FT_REASON_NO_DEVICE);
        out->victim[i] = FT_NONE;
        out->predicted_ns[i] = 0;
        if (!resident && in->has_device)
            ft_pick_push(misses, UINT32_MAX - in->last_used[i], i);
    }
    ft_pick_sort(misses);
    return misses->count;
}

void ft_place_fetch(struct ft_place_state *state, const struct ft_layer_in *in, struct ft_layer_out *out,
                    uint32_t count, enum ft_reason reason, bool reuse)
{
    count = FT_MIN(count, state->misses.count);
    uint32_t found = in->prefill || !count ? 0 : ft_evict_lru_find(in, count, &state->victims);
    for (uint32_t j = 0; j < count; j++) {
        uint32_t i = ft_pick_index(&state->misses, j);
        if (!in->prefill && (found == 0 || (j >= found && !reuse))) {
            out->reason[i] = FT_REASON_NO_SLOT;
            continue;
        }
        out->place[i] = FT_PLACE_FETCH;
        out->reason[i] = (uint8_t)(in->prefill ? FT_REASON_STAGED : reason);
        out->victim[i] = in->prefill ? FT_NONE : ft_evict_lru_victim(&state->victims, j % found);
    }
}
