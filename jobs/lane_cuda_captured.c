/* SPDX-License-Identifier: Apache-2.0 */
/* Decode steps that are captured once and launched as one graph for each GPU, and the way from GPU to GPU. */
#include "jobs/lane_cuda_drive.h"

/* ---- from GPU to GPU ---- */

/* The residual streams to the next GPU, behind everything that was queued for this one, which then says that it is
 * done. What is queued for the next one from here on waits for them. */
void ft_drive_hand_over(struct ft_drive *d, struct ft_lane_cuda *from, struct ft_lane_cuda *to)
{
    const struct ft_model *m = d->step->model;
    const struct ft_cuda *a = &from->running, *b = &to->running;
    uint64_t bytes = (uint64_t)d->batch->rows * m->hc_count * m->hidden * sizeof(float);
    ft_drive_use(d, from);
    if (ft_drive_is_broken(d))
        return;
    int error = (int)cudaMemcpyPeerAsync(b->base + b->space.residual, to->gpu, a->base + a->space.residual,
                                         from->gpu, bytes, from->compute);
    if (!error)
        error = (int)cudaEventRecord(from->handed, from->compute);
    if (ft_drive_try(d, error, "handing activations to the next GPU"))
        (void)ft_drive_try(d, ft_cuda_end(a, from->compute), "launching the end of its layers");
    ft_drive_use(d, to);
    if (!ft_drive_is_broken(d))
        (void)ft_drive_try(d, (int)cudaStreamWaitEvent(to->compute, from->handed, 0),
                           "waiting for activations of the GPU before it");
}

struct ft_lane_cuda *ft_drive_lane_before(const struct ft_drive *d, const struct ft_lane_cuda *lane)
{
    struct ft_lane_cuda *before = d->first;
    while (before->next != lane)
        before = before->next;
    return before;
}

bool ft_drive_begins_gpu(const struct ft_drive *d, uint32_t layer)
{
    return d->lane != d->first && layer == d->lane->layer_begin;
}

/* ---- a captured step ---- */

static int upload_map(struct ft_lane_cuda *lane)
{
    const struct ft_slots *slots = &lane->step->slots;
    uint64_t experts = (uint64_t)slots->layer_count * slots->expert_count;
    for (uint64_t i = 0; i < experts; i++)
        lane->map_host[i] = slots->map[i] == FT_NONE ? FT_NONE : slots->blob[slots->map[i]];
    int error = (int)cudaMemcpyAsync(lane->c.exchange.slot_of, lane->map_host,
                                     experts * sizeof *lane->map_host, cudaMemcpyHostToDevice, lane->compute);
    lane->map_dirty = error != 0;
    return error;
}

/* Every fetch of a layer of a captured step needs a slot of its own. */
static bool has_room(const struct ft_drive *d)
{
    const struct ft_slots *slots = &d->step->slots;
    uint32_t wanted = d->batch->rows * d->step->model->topk;
    bool room = true;
    for (uint32_t i = 0; i < slots->part_count; i++) {
        uint32_t count = slots->parts[i].end - slots->parts[i].begin;
        room = room && (count >= wanted || !count);
    }
    return room || d->step->plan->strategy == FT_STRATEGY_FUSED;
}

bool ft_drive_is_captured(const struct ft_drive *d)
{
    bool captured = !d->batch->prefill && d->batch->rows <= FT_CUDA_DECODE_ROWS &&
                    d->batch->sequence_count == d->batch->rows && has_room(d) &&
                    !ft_drive_wants_capture(d->batch);
    for (const struct ft_lane_cuda *lane = d->first; lane; lane = lane->next)
        captured = captured && lane->handshake != FT_HANDSHAKE_LAUNCH;
    return captured;
}

/* A capture takes long and allocates: all of them are there before the first GPU has work that waits for others. */
static bool find_captures(struct ft_drive *d)
{
    struct ft_cuda_capture *capture = NULL;
    struct ft_error err;
    for (struct ft_lane_cuda *lane = d->first; lane; lane = lane->next) {
        ft_drive_use(d, lane);
        if (ft_drive_is_broken(d))
            return false;
        if (ft_cuda_find_capture(lane, d->batch->rows, d->batch->logit_rows, d->tokens, &capture, &err) ==
            FT_OK) {
            lane->capture = capture;
            continue;
        }
        ft_step_fail(d->step, err.code, "%s", err.message);
        ft_cuda_break(lane, 0, "capturing a decode step");
        return false;
    }
    return true;
}

/*
 * The graph of the GPU at hand. That of a GPU behind the first comes when the one before it has all its flags:
 * the copy from GPU to GPU waits for a graph that waits for the host, and nothing says that a copy engine takes
 * other work meanwhile. With all of it queued at the step's begin, a step that fetched experts hung on two H200s.
 */
void ft_drive_launch_captured(struct ft_drive *d)
{
    struct ft_lane_cuda *lane = d->lane;
    if (ft_drive_is_broken(d))
        return;
    if (d->launched)
        ft_drive_hand_over(d, d->launched, lane);
    d->launched = lane;
    if (!ft_drive_is_broken(d))
        (void)ft_drive_try(d, (int)cudaGraphLaunch(lane->capture->exec, lane->compute),
                           "launching a decode step");
}

/* What GPUs behind the first need besides their graphs is queued now: there is time for it. */
static bool prepare_captured(struct ft_drive *d)
{
    struct ft_lane_cuda *lane = d->lane;
    if (ft_drive_is_broken(d) ||
        !ft_drive_try(d, ft_cuda_fill_inputs(lane, d->batch, d->epoch), "copying the recent tokens"))
        return false;
    if (lane->map_dirty && !ft_drive_try(d, upload_map(lane), "copying the slot map"))
        return false;
    return lane == d->first ||
           (ft_drive_try(d, ft_cuda_copy_inputs(lane), "copying the step's inputs") &&
            ft_drive_try(d, ft_cuda_launch_begin(lane, d->c), "launching the rotary angles"));
}

void ft_drive_begin_captured(struct ft_drive *d)
{
    bool good = find_captures(d);
    for (struct ft_lane_cuda *lane = d->first; lane && good; lane = lane->next) {
        ft_drive_use(d, lane);
        good = prepare_captured(d);
        if (good && lane == d->first)
            ft_drive_launch_captured(d);
    }
    ft_drive_use(d, d->first);
}
