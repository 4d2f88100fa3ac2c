/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill that uses nearly all experts: whole layers are streamed through the staging buffers, ahead of the router. */
#include "jobs/lane_cuda_drive.h"

#define AHEAD_PIECES 64u /* of a layer that is streamed behind a slice */

/* Experts [first, end) of a layer, none of them in a slot, into the next places of its buffer. */
static void stage(struct ft_drive *d, uint32_t layer, uint32_t first, uint32_t end)
{
    struct ft_lane_cuda *lane = d->lane;
    const struct ft_layer_weights *w = &lane->options.weights->layers[layer];
    uint32_t buffer = layer % 2, place = lane->staged_places[buffer];
    uint64_t stride = w->expert_layout.stride;
    for (uint32_t e = first; e < end; e++)
        lane->staged_at[(uint64_t)buffer * d->step->model->expert_count + e] = lane->staged_places[buffer]++;
    (void)ft_drive_try(d,
                       ft_drive_copy_in(lane, ft_step_staging(d->step, layer)[buffer] + stride * place,
                                        w->experts + stride * first, stride * (end - first)),
                       "streaming a layer's experts to the GPU");
}

/* Copies the next of a layer's experts, `count` at most, neighbours together, once the experts that read the
 * buffer last have run. */
static void stream_experts(struct ft_drive *d, uint32_t layer, uint32_t count)
{
    struct ft_lane_cuda *lane = d->lane;
    const struct ft_slots *slots = &d->step->slots;
    uint32_t buffer = layer % 2, experts = d->step->model->expert_count, *next = &lane->staged_next[buffer];
    uint32_t *at = lane->staged_at + (uint64_t)buffer * experts;
    if (lane->staged_layer[buffer] != layer) {
        lane->staged_layer[buffer] = layer;
        *next = lane->staged_places[buffer] = 0;
        (void)ft_drive_try(d, (int)cudaStreamWaitEvent(lane->copy, lane->grouped[buffer], 0),
                           "ordering copies behind experts");
    }
    while (*next < experts && count && !ft_drive_is_broken(d)) {
        uint32_t first = *next;
        for (; *next < experts && count && ft_slots_find(slots, layer, *next) == FT_NONE; count--)
            ++*next;
        if (*next > first)
            stage(d, layer, first, *next);
        else
            at[(*next)++] = FT_NONE;
    }
}

/* Copies what the slots do not hold of a layer of this GPU into its staging buffer. Part of it may be there since the slice
 * before; decode steps have changed the slots since then. */
void ft_drive_stream_layer(struct ft_drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    const struct ft_model *m = d->step->model;
    uint32_t buffer = layer % 2;
    d->streams_ahead |= layer == d->layer_end && layer < lane->layer_end;
    if (layer >= d->layer_end || layer >= lane->layer_end || m->layers[layer].dense || ft_drive_is_broken(d))
        return;
    const uint32_t *at = lane->staged_at + (uint64_t)buffer * m->expert_count;
    if (lane->staged_layer[buffer] == layer)
        for (uint32_t e = 0; e < lane->staged_next[buffer] && !ft_drive_is_broken(d); e++)
            if (at[e] == FT_NONE && ft_slots_find(&d->step->slots, layer, e) == FT_NONE)
                stage(d, layer, e, e + 1);
    stream_experts(d, layer, UINT32_MAX);
    if (!ft_drive_is_broken(d))
        (void)ft_drive_try(d, (int)cudaEventRecord(lane->staged[buffer], lane->copy),
                           "marking the copies' end");
}

/* While the GPU computes the last layer of a slice the link would stand still: it takes pieces of the next layer, if
 * that is the same GPU's, two at a time, so that the decode step behind this slice waits for little. */
void ft_drive_stream_ahead(struct ft_drive *d)
{
    struct ft_lane_cuda *lane = d->lane;
    uint32_t layer = d->layer_end, buffer = layer % 2, experts = d->step->model->expert_count;
    if (ft_drive_is_broken(d) || layer < lane->layer_begin || layer >= lane->layer_end ||
        d->step->model->layers[layer].dense ||
        (lane->staged_layer[buffer] == layer && lane->staged_next[buffer] == experts))
        return;
    cudaEvent_t older = lane->ahead[lane->ahead_count % 2];
    cudaError_t state = cudaEventQuery(older);
    if (state == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return;
    }
    stream_experts(d, layer, FT_MAX(experts / AHEAD_PIECES, 1u));
    lane->ahead_count++;
    if (!ft_drive_is_broken(d) && ft_drive_try(d, (int)state, "streaming ahead"))
        (void)ft_drive_try(d, (int)cudaEventRecord(older, lane->copy), "marking the copies' end");
}

const char *ft_drive_staged_blob(const struct ft_drive *d, uint32_t layer, uint32_t expert)
{
    const struct ft_step *step = d->step;
    uint32_t at = d->lane->staged_at[(uint64_t)(layer % 2) * step->model->expert_count + expert];
    return ft_step_staging(step, layer)[layer % 2] +
           (uint64_t)d->lane->options.weights->layers[layer].expert_layout.stride * at;
}
