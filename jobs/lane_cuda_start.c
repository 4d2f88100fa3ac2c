/* SPDX-License-Identifier: Apache-2.0 */
/* Starting and stopping the GPU lane: what each GPU holds, the handshake, the driver thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "jobs/lane_cuda_internal.h"

#define JOIN_NS 5000000000ull
#define DRAIN_LOOK_NS 1000000
#define WATCHDOG_NS 20000000000ull

/* fused: a captured step does not wait for fetches, so every expert is in its slot before the first one. */
static int fill_slots(struct ft_lane_cuda *first, struct ft_error *err)
{
    struct ft_lane_cuda *lane = first;
    struct ft_step *step = lane->step;
    const struct ft_model *m = step->model;
    uint32_t slot = 0;
    for (uint32_t layer = 0; layer < m->layer_count; layer++) {
        const struct ft_layer_weights *w = &lane->options.weights->layers[layer];
        while (layer >= lane->layer_end)
            lane = lane->next;
        int used = ft_cuda_check(lane, ft_cuda_use(lane), err, "choosing it");
        if (used != FT_OK)
            return used;
        for (uint32_t e = 0; e < m->expert_count && !m->layers[layer].dense; e++, slot++) {
            if (slot == step->slots.count)
                return ft_error_set(err, FT_INTERNAL, "fused: %u slots are too few for all experts", slot);
            ft_slots_take(&step->slots, slot, layer, e, 0, false);
            int status =
                FT_CUDA_TRY(lane,
                            cudaMemcpyAsync(ft_slots_memory(&step->slots, slot),
                                            w->experts + (uint64_t)w->expert_layout.stride * e,
                                            w->expert_layout.bytes, cudaMemcpyHostToDevice, lane->copy),
                            err, "copying the experts to the GPU");
            if (status != FT_OK)
                return status;
        }
    }
    for (uint32_t i = 0; i < slot; i++)
        step->slots.busy[i] = 0;
    int status = FT_OK;
    for (lane = first; lane && status == FT_OK; lane = lane->next)
        status = FT_CUDA_TRY(lane, cudaStreamSynchronize(lane->copy), err, "copying the experts to the GPU");
    return status;
}

/* Weights, buffers and handshake of one GPU. */
static int start_one(struct ft_lane_cuda *lane, struct ft_step *step,
                     const struct ft_lane_cuda_options *options, struct ft_error *err)
{
    lane->step = step;
    lane->options = *options;
    lane->layers = calloc(step->model->layer_count, sizeof *lane->layers);
    lane->staged_at = calloc(2ull * FT_MAX(step->model->expert_count, 1u), sizeof *lane->staged_at);
    if (!lane->layers || !lane->staged_at)
        return ft_error_set(err, FT_MEMORY, "no memory for the GPU's view of the weights");
    int status = ft_cuda_check(lane, ft_cuda_use(lane), err, "choosing it");
    if (status == FT_OK)
        status = ft_cuda_upload_weights(lane, err);
    if (status == FT_OK)
        status = ft_cuda_make_buffers(lane, err);
    if (status == FT_OK && lane->first == lane) /* for all GPUs */
        ft_cuda_pin_banks(lane, step->model, options->weights);
    return status;
}

static int choose_handshakes(struct ft_lane_cuda *first, struct ft_error *err)
{
    int status = FT_OK;
    for (struct ft_lane_cuda *lane = first; lane && status == FT_OK; lane = lane->next) {
        status = ft_cuda_check(lane, ft_cuda_use(lane), err, "choosing it");
        if (status == FT_OK)
            status = ft_cuda_choose_handshake(lane, err);
        if (status == FT_OK)
            status = FT_CUDA_TRY(lane, cudaDeviceSynchronize(), err, "getting ready");
        size_t used = strlen(first->notes);
        snprintf(first->notes + used, sizeof first->notes - used, "%s%s%s", used ? "; " : "", lane->note,
                 lane->next && !lane->peer ? "; activations go to the next GPU through the host" : "");
    }
    return status;
}

int ft_lane_cuda_start(struct ft_lane_cuda *first, struct ft_step *step,
                       const struct ft_lane_cuda_options *options, struct ft_error *err)
{
    const struct ft_plan *plan = step->plan;
    uint32_t at = 0;
    int status = FT_OK;
    first->watchdog_ns = options->watchdog_ns ? options->watchdog_ns : WATCHDOG_NS;
    for (struct ft_lane_cuda *lane = first; lane && status == FT_OK; lane = lane->next, at++) {
        lane->layer_begin = ft_cuda_is_chain(first) ? plan->gpus[at].layer_begin : 0;
        lane->layer_end = ft_cuda_is_chain(first) ? plan->gpus[at].layer_end : step->model->layer_count;
        status = start_one(lane, step, options, err);
    }
    if (status == FT_OK && plan->strategy == FT_STRATEGY_FUSED)
        status = fill_slots(first, err);
    if (status == FT_OK)
        status = choose_handshakes(first, err);
    return status == FT_OK ? ft_serial_start(&step->device, "ft-gpu", ft_cuda_drive, first, err) : status;
}

/* Whether the stream comes to its end, or is lost, in bounded time: a synchronize would wait for ever for a
 * kernel that hangs. */
static bool drains(cudaStream_t stream)
{
    struct timespec nap = {0, DRAIN_LOOK_NS};
    for (uint64_t waited = 0; cudaStreamQuery(stream) == cudaErrorNotReady; waited += DRAIN_LOOK_NS) {
        if (waited > JOIN_NS)
            return false;
        nanosleep(&nap, NULL);
    }
    (void)cudaGetLastError();
    return true;
}

void ft_lane_cuda_stop(struct ft_lane_cuda *lane)
{
    if (!lane->step)
        return;
    atomic_store_explicit(&lane->step->stop, true, memory_order_release);
    ft_park_wake_all(&lane->step->device.park);
    bool joined = ft_serial_join(&lane->step->device, JOIN_NS);
    for (const struct ft_lane_cuda *l = lane; l && joined; l = l->next)
        if (!(drains(l->compute) && drains(l->copy)))
            lane->step->device.started = true; /* the GPU still works on the session's memory: stuck, too */
}
