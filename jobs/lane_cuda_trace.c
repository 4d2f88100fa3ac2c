/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GPU time stamps to trace records. Every kernel writes the GPU's clock when it begins; a part lasts until
 * the next part of the step begins. The offset between the clocks is the least of (host saw the end - GPU
 * stamped the end) over the steps so far: that difference is never negative, and smallest when the host
 * looked at once. Every GPU has a clock of its own.
 */
#include "jobs/lane_cuda_internal.h"

struct part {
    enum ft_op op;
    enum ft_record_kind kind;
    enum ft_wait cause;
};

static const struct part layer_parts[FT_CUDA_STAMP_LAYER_COUNT] = {
    [FT_CUDA_STAMP_PLE] = {FT_OP_PLE_INJECT, FT_RECORD_JOB, FT_WAIT_NONE},
    [FT_CUDA_STAMP_MIX] = {FT_OP_MIX_DOWN, FT_RECORD_JOB, FT_WAIT_NONE},
    [FT_CUDA_STAMP_PROJECT] = {FT_OP_ATTN_PROJECT, FT_RECORD_JOB, FT_WAIT_NONE},
    [FT_CUDA_STAMP_ATTEND] = {FT_OP_ATTN, FT_RECORD_JOB, FT_WAIT_NONE},
    [FT_CUDA_STAMP_OUT] = {FT_OP_ATTN_OUT, FT_RECORD_JOB, FT_WAIT_NONE},
    [FT_CUDA_STAMP_MIX_MLP] = {FT_OP_MIX_DOWN, FT_RECORD_JOB, FT_WAIT_NONE},
    [FT_CUDA_STAMP_ROUTE] = {FT_OP_ROUTER, FT_RECORD_JOB, FT_WAIT_NONE},
    [FT_CUDA_STAMP_RESIDENT] = {FT_OP_EXPERT_DEVICE, FT_RECORD_JOB, FT_WAIT_NONE},
    [FT_CUDA_STAMP_WAIT_FETCHED] = {FT_OP_EXPERT_DEVICE, FT_RECORD_WAIT, FT_WAIT_LINK},
    [FT_CUDA_STAMP_FETCHED] = {FT_OP_EXPERT_DEVICE, FT_RECORD_JOB, FT_WAIT_NONE},
    [FT_CUDA_STAMP_WAIT_COMPUTED] = {FT_OP_COMBINE, FT_RECORD_WAIT, FT_WAIT_CPU},
    [FT_CUDA_STAMP_COMBINE] = {FT_OP_COMBINE, FT_RECORD_JOB, FT_WAIT_NONE},
};

static enum ft_op op_of(const struct ft_model *m, uint32_t layer, uint32_t stamp)
{
    bool linear = m->layers[layer].attention == FT_ATTENTION_LINEAR;
    if (linear && stamp == FT_CUDA_STAMP_PROJECT)
        return FT_OP_LINEAR_PROJECT;
    if (linear && stamp == FT_CUDA_STAMP_ATTEND)
        return FT_OP_LINEAR_DELTA;
    if (m->hc_count == 1 && (stamp == FT_CUDA_STAMP_MIX || stamp == FT_CUDA_STAMP_MIX_MLP))
        return FT_OP_NORM;
    return layer_parts[stamp].op;
}

static void add(struct ft_lane_cuda *lane, uint64_t begin, uint64_t end, uint32_t layer, enum ft_op op,
                enum ft_record_kind kind, enum ft_wait cause)
{
    struct ft_step *step = lane->step;
    uint64_t from = (uint64_t)((int64_t)begin + lane->clock_offset_ns),
             to = (uint64_t)((int64_t)end + lane->clock_offset_ns);
    if (to < from || from < step->begin_ns)
        return;
    struct ft_trace_record *record = ft_step_record(step, ft_step_thread(step, FT_STEP_LINK), kind, from, to);
    if (!record)
        return;
    if (lane->first != lane) /* a row of its own */
        record->thread =
            (uint16_t)(step->thread_count + ft_slots_part_of(&step->slots, lane->layer_begin) - 1);
    record->op = (uint8_t)op;
    record->lane = FT_LANE_DEVICE;
    record->layer = (uint16_t)layer;
    record->rows = (uint16_t)FT_MIN(step->x.batch->rows, UINT16_MAX);
    record->detail = kind == FT_RECORD_WAIT ? (uint8_t)cause : (uint8_t)FT_REASON_FIXED_LANE;
}

void ft_cuda_record_stamps(struct ft_lane_cuda *lane, uint64_t done_ns)
{
    const struct ft_model *m = lane->step->model;
    const uint64_t *stamps = lane->c.host_stamps,
                   *last = stamps + (uint64_t)m->layer_count * FT_CUDA_STAMP_LAYER_COUNT;
    const struct ft_shape *shape = &lane->step->graph->shape;
    bool embeds = !shape->layer_begin; /* a later slice of a prefill does not */
    uint64_t begin = embeds ? last[FT_CUDA_STAMP_BEGIN] : lane->last_stamp, end = last[FT_CUDA_STAMP_END];
    int64_t offset = (int64_t)(done_ns - end);
    if (!begin || end < begin)
        return;
    lane->last_stamp = end;
    if (!lane->clock_known || offset < lane->clock_offset_ns)
        lane->clock_offset_ns = offset;
    lane->clock_known = true;
    /* Only stamps of this step count: what a kernel did not write is of an earlier one. */
    uint64_t at = begin;
    uint32_t at_layer = FT_GRAPH_NO_LAYER;
    struct part part = {FT_OP_EMBED, FT_RECORD_JOB, FT_WAIT_NONE};
    bool idle = lane->first != lane || !embeds; /* until the GPU before it hands over, or the slice begins */
    uint32_t first = FT_MAX(lane->layer_begin, shape->layer_begin),
             stop = FT_MIN(lane->layer_end, shape->layer_end);
    for (uint32_t layer = first; layer < stop; layer++)
        for (uint32_t s = 0; s < FT_CUDA_STAMP_LAYER_COUNT; s++) {
            uint64_t next = stamps[layer * FT_CUDA_STAMP_LAYER_COUNT + s];
            if (next < at || next > end)
                continue;
            if (!idle)
                add(lane, at, next, at_layer, part.op, part.kind, part.cause);
            idle = false;
            at = next;
            at_layer = layer;
            part = layer_parts[s];
            part.op = op_of(m, layer, s);
        }
    uint64_t head = last[FT_CUDA_STAMP_HEAD], sample = last[FT_CUDA_STAMP_SAMPLE];
    if (!lane->next && shape->layer_end == m->layer_count && head >= at && head <= end) {
        add(lane, at, head, at_layer, part.op, part.kind, part.cause);
        at = head;
        at_layer = FT_GRAPH_NO_LAYER;
        part = (struct part){FT_OP_HEAD, FT_RECORD_JOB, FT_WAIT_NONE};
    }
    if (!lane->next && shape->layer_end == m->layer_count && sample >= at && sample <= end) {
        add(lane, at, sample, at_layer, part.op, part.kind, part.cause);
        at = sample;
        part = (struct part){FT_OP_SAMPLE, FT_RECORD_JOB, FT_WAIT_NONE};
    }
    add(lane, at, end, FT_GRAPH_NO_LAYER, part.op, part.kind, part.cause);
}
