/* SPDX-License-Identifier: Apache-2.0 */
/* Putting a session where a benchmark wants it: a context that was never computed, slots that are warm. */
#include <stdlib.h>

#include "jobs/lane_cuda.h"
#include "jobs/session_internal.h"

#define KEY_RANGE 1.0f      /* normed and rotated keys, values: of order 1 */
#define STATE_RANGE 0.0625f /* delta-rule state, convolution tails */

#define PIECE 65536u /* elements made at a time, when they go to a device */

/* Uniform in (-range, range). */
static void make_random(float *to, uint64_t first, uint64_t count, float range, uint64_t seed)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t z = ft_splitmix64(seed + (first + i) * FT_SPLITMIX_GAMMA);
        to[i] = ((float)(z >> 40) * 0x1p-23f - 1.0f) * range;
    }
}

/* Memory of a device is filled through a small buffer; without one it stays as it is (zeros or older numbers). */
static void fill_random(const struct ft_memory *place, float *to, uint64_t count, float range, uint64_t seed)
{
    float *piece = place->is_device ? malloc(PIECE * sizeof *piece) : NULL;
    if (!place->is_device)
        make_random(to, 0, count, range, seed);
    for (uint64_t i = 0; piece && i < count; i += PIECE) {
        uint64_t some = FT_MIN(count - i, (uint64_t)PIECE);
        make_random(piece, i, some, range, seed);
        place->copy(place->context, to + i, piece, some * sizeof *piece);
    }
    free(piece);
}

void ft_session_assume(struct ft_session *session, struct ft_sequence *sequence, uint32_t handle,
                       uint32_t count)
{
    uint64_t page_count = session->kv.layout.count;
    const struct ft_memory *place = session->kv.place;
    for (uint32_t i = 0; i < ft_kv_pages_for(&session->kv, count); i++) {
        ft_kv_clear_stale(&session->kv, sequence->pages[i]);
        fill_random(place, sequence->page_data[i], page_count, KEY_RANGE,
                    ((uint64_t)handle << 32) + 2 * i + 1);
    }
    fill_random(place, sequence->state, session->step.x.state.count, STATE_RANGE, (uint64_t)handle << 32);
    sequence->computed = count;
    sequence->assumed = true;
}

static int check_experts(const struct ft_session *session, const uint32_t *layer, const uint32_t *expert,
                         uint32_t count, struct ft_error *err)
{
    const struct ft_model *model = session->options.model;
    for (uint32_t i = 0; i < count; i++)
        if (layer[i] >= model->layer_count || model->layers[layer[i]].dense ||
            expert[i] >= model->expert_count)
            return ft_error_set(err, FT_USAGE, "the model has no expert %u in layer %u to warm a slot with",
                                expert[i], layer[i]);
    return FT_OK;
}

int ft_session_warm_slots(struct ft_session *session, const uint32_t *layer, const uint32_t *expert,
                          uint32_t count, uint32_t *filled, struct ft_error *err)
{
    struct ft_slots *slots = &session->step.slots;
    const struct ft_memory *place = session->kv.place;
    uint32_t next[FT_GPUS_MAX]; /* of each GPU's slots: the first that may be free */
    *filled = 0;
    for (uint32_t i = 0; i < slots->part_count; i++)
        next[i] = slots->parts[i].begin;
    int status = check_experts(session, layer, expert, count, err);
    if (status != FT_OK)
        return status;
    for (uint32_t i = 0; i < count; i++) {
        const struct ft_layer_weights *w = &session->weights.layers[layer[i]];
        if (ft_slots_find(slots, layer[i], expert[i]) != FT_NONE)
            continue;
        uint32_t part = ft_slots_part_of(slots, layer[i]), slot = next[part];
        while (slot < slots->parts[part].end && slots->expert[slot] != FT_NONE)
            slot++;
        next[part] = slot;
        if (slot == slots->parts[part].end)
            continue; /* others may have room */
        /* Used in "step 0": older than any step, and the lower slot is taken first. */
        ft_slots_take(slots, slot, layer[i], expert[i], 0, false);
        ft_slots_release(slots, &slot, 1);
        place->copy(place->context, ft_slots_memory(slots, slot),
                    w->experts + (uint64_t)w->expert_layout.stride * expert[i], w->expert_layout.bytes);
        ++*filled;
    }
    if (session->cuda)
        ft_lane_cuda_map_changed(session->cuda);
    return FT_OK;
}
