/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/place.h"

#include "planner/evict_lru.h"

static uint32_t key_capacity(const struct ft_policy_params *params)
{
    return params->model ? FT_MAX(params->model->expert_count, 1u) : FT_EXPERTS_MAX;
}

static uint64_t key_bytes(const struct ft_policy_params *params)
{
    return 2ull * key_capacity(params) * sizeof(uint64_t);
}

uint64_t ft_place_state_bytes(const struct ft_policy_params *params)
{
    return sizeof(struct ft_place_state) + key_bytes(params);
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
    state->ahead_count = 0;
    out->prefetch_count = 0;
    for (uint32_t i = 0; i < in->active_count; i++) {
        bool resident = in->has_device && in->slot[i] != FT_NONE;
        out->place[i] = resident ? FT_PLACE_DEVICE : FT_PLACE_CPU;
        out->reason[i] = (uint8_t)(resident         ? FT_REASON_RESIDENT
                                   : in->has_device ? miss_reason
                                                    : FT_REASON_NO_DEVICE);
        out->victim[i] = FT_NONE;
        out->predicted_ns[i] = 0;
        if (resident || !in->has_device)
            continue;
        state->ahead_count += ft_layer_is_ahead(in, i);
        ft_pick_push(misses, UINT32_MAX - in->last_used[i], i);
    }
    ft_pick_sort(misses);
    return misses->count;
}

void ft_place_put_ahead_first(struct ft_place_state *state, const struct ft_layer_in *in)
{
    struct ft_pick *misses = &state->misses;
    if (!state->ahead_count)
        return;
    misses->count = 0;
    for (uint32_t i = 0; i < in->active_count; i++)
        if (in->slot[i] == FT_NONE)
            ft_pick_push(misses, in->ahead[i] ? 0 : UINT32_MAX - in->last_used[i], i);
    ft_pick_sort(misses);
}

/* Is the i-th slot of the list still as old as it was, and free to be taken by this layer? */
static bool may_take_ahead(const struct ft_place_ahead *ahead, const struct ft_layer_in *in, uint32_t i,
                           bool *stale)
{
    const struct ft_slot_view *slots = &in->slots;
    uint32_t s = ahead->slot[i];
    *stale = s < slots->begin || s >= slots->end || slots->last_used[s] != ahead->last_used[i] ||
             slots->expert[s] != ahead->expert[i];
    bool wanted = false; /* by this very layer */
    for (uint32_t j = 0; j < in->active_count && !*stale; j++)
        wanted |= in->slot[j] == s;
    return !*stale && !wanted && !slots->busy[s];
}

/* Keeps the first FT_PLACE_AHEAD of state->victims, oldest first. */
static void keep_ahead(struct ft_place_state *state, const struct ft_slot_view *slots, uint32_t found,
                       uint32_t step)
{
    struct ft_place_ahead *ahead = &state->ahead;
    ahead->at = ahead->count = 0;
    ahead->begin = slots->begin;
    ahead->end = slots->end;
    for (uint32_t i = 0; i < found && ahead->count < FT_PLACE_AHEAD; i++) {
        uint32_t s = ft_evict_lru_victim(&state->victims, i);
        if (slots->last_used[s] >=
            step) /* others may become as old as this one yet: the order is not final */
            break;
        uint32_t n = ahead->count++;
        ahead->slot[n] = s;
        ahead->last_used[n] = slots->last_used[s];
        ahead->expert[n] = slots->expert[s];
    }
}

void ft_place_prepare(void *state, const struct ft_slot_view *slots, uint32_t step)
{
    struct ft_place_state *place = state;
    const struct ft_layer_in in = {.step = step, .layer = FT_NONE, .slots = *slots};
    bool same = place->ahead.begin == slots->begin && place->ahead.end == slots->end;
    if (same && place->ahead.count - place->ahead.at >= FT_PLACE_AHEAD_LOW)
        return;
    keep_ahead(place, slots, ft_evict_lru_find(&in, FT_MIN(FT_PLACE_AHEAD, place->capacity), &place->victims),
               step);
}

/* Up to `count` victims into state->victims, least recently used first. A scan looks further than it must,
 * and what it finds beyond is kept for the layers that follow. */
static uint32_t find_victims(struct ft_place_state *state, const struct ft_layer_in *in, uint32_t count)
{
    struct ft_place_ahead *ahead = &state->ahead;
    struct ft_pick *victims = &state->victims;
    uint32_t found = 0;
    bool stale;
    if (ahead->begin != in->slots.begin || ahead->end != in->slots.end)
        ahead->at = ahead->count = 0;
    while (ahead->at < ahead->count && !may_take_ahead(ahead, in, ahead->at, &stale) && stale)
        ahead->at++;
    for (uint32_t i = ahead->at; i < ahead->count && found < count; i++)
        if (may_take_ahead(ahead, in, i, &stale))
            victims->keys[found++] = ahead->slot[i];
    victims->count = found;
    if (found == count)
        return found;
    uint32_t more = FT_MIN(count + FT_PLACE_AHEAD, state->capacity);
    found = ft_evict_lru_find(in, more, victims);
    keep_ahead(state, &in->slots, found, in->step);
    return FT_MIN(found, count);
}

void ft_place_fetch(struct ft_place_state *state, const struct ft_layer_in *in, struct ft_layer_out *out,
                    uint32_t count, enum ft_reason reason, bool reuse)
{
    count = in->prefill && in->no_staging ? 0 : FT_MIN(count, state->misses.count);
    uint32_t found = in->prefill || !count ? 0 : find_victims(state, in, count);
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

static bool is_taken(const struct ft_layer_in *in, const struct ft_layer_out *out, uint32_t slot)
{
    bool taken = false;
    for (uint32_t i = 0; i < in->active_count && !taken; i++)
        taken = out->place[i] == FT_PLACE_FETCH && out->victim[i] == slot;
    return taken;
}

void ft_place_keep(struct ft_place_state *state, const struct ft_layer_in *in, struct ft_layer_out *out,
                   uint32_t first, uint32_t count)
{
    count = FT_MIN(count, out->prefetch_max);
    if (in->prefill || !count || first >= state->misses.count)
        return;
    uint32_t found = find_victims(state, in, FT_MIN(first + count, state->capacity)), next = 0;
    for (uint32_t j = first; j < state->misses.count && out->prefetch_count < count; j++) {
        uint32_t i = ft_pick_index(&state->misses, j);
        if (out->place[i] != FT_PLACE_CPU)
            continue;
        while (next < found && is_taken(in, out, ft_evict_lru_victim(&state->victims, next)))
            next++;
        if (next == found)
            return;
        uint32_t slot = ft_evict_lru_victim(&state->victims, next++), n = out->prefetch_count;
        if (in->slots.expert[slot] != FT_NONE && in->slots.last_used[slot] >= in->step)
            return;
        out->prefetch_layer[n] = in->layer;
        out->prefetch_expert[n] = in->expert[i];
        out->prefetch_victim[n] = slot;
        out->prefetch_count = n + 1;
    }
}

/* ---- with look-ahead ---- */

uint64_t ft_place_looking_bytes(const struct ft_policy_params *params)
{
    return sizeof(struct ft_place_looking) + key_bytes(params) +
           ft_ahead_layers(params) * sizeof(struct ft_ahead_layer);
}

int ft_place_looking_init(void *state, const struct ft_policy_params *params, struct ft_error *err)
{
    struct ft_place_looking *looking = state;
    int status = ft_place_init(&looking->place, params, err);
    looking->place.misses.keys = (uint64_t *)(looking + 1); /* not behind place: it is embedded */
    looking->place.victims.keys = looking->place.misses.keys + looking->place.capacity;
    ft_ahead_init(&looking->ahead, params,
                  (struct ft_ahead_layer *)((char *)(looking + 1) + key_bytes(params)));
    return status;
}

void ft_place_looking_observe(void *state, const struct ft_observation *observation)
{
    ft_ahead_observe(&((struct ft_place_looking *)state)->ahead, observation);
}

void ft_place_looking_step_end(void *state, const struct ft_step_summary *summary)
{
    ft_ahead_step_end(&((struct ft_place_looking *)state)->ahead, summary);
}

bool ft_place_looks_ahead(const void *state)
{
    return ft_ahead_looks(&((const struct ft_place_looking *)state)->ahead);
}

uint32_t ft_place_look_ahead(void *state, const struct ft_foreseen *foreseen, uint32_t *chosen)
{
    return ft_ahead_choose(&((struct ft_place_looking *)state)->ahead, foreseen, chosen);
}
