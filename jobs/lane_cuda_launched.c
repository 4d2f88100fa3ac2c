/* SPDX-License-Identifier: Apache-2.0 */
/* Steps that are launched kernel by kernel: prefill, and decode steps that nothing was captured for. */
#include <string.h>

#include "jobs/capture.h"
#include "jobs/lane_cuda_drive.h"

void ft_drive_launch_front(struct ft_drive *d, uint32_t layer)
{
    if (ft_drive_begins_gpu(d, layer))
        ft_drive_hand_over(d, ft_drive_lane_before(d, d->lane), d->lane);
    if (!ft_drive_is_broken(d))
        (void)ft_drive_try(d, ft_cuda_launch_front(d->c, layer, d->tokens, false, d->lane->compute),
                           "launching a layer");
}

/* ---- launch path: groups of experts ---- */

/* The layer's device experts, in the order of the groups, into the lists that the kernels read. */
static int upload_lists(struct ft_drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_step *step = d->step;
    const struct ft_active *a = &step->x.active;
    struct ft_cuda_host_lists *h = &lane->lists;
    uint32_t members = 0, pairs = 0;
    d->waves = 0;
    for (uint32_t i = step->wave_first; i < step->wave_first + step->wave_count; i++) {
        const struct ft_dynamic *group = &step->dynamic[i];
        if (group->op != FT_OP_EXPERT_DEVICE)
            continue;
        h->counts[d->waves++] = group->end - group->begin;
        for (; members < group->end; members++) {
            uint32_t active = a->group[members];
            h->blob[members] = d->streaming && a->place[active] == FT_PLACE_FETCH
                                   ? ft_drive_staged_blob(d, layer, a->expert[active])
                                   : a->blob[active];
            h->pair_begin[members] = pairs;
            memcpy(h->pair_row + pairs, a->pair_row + a->pair_begin[active], a->rows[active] * 4ull);
            memcpy(h->pair_out + pairs, a->pair_out + a->pair_begin[active], a->rows[active] * 4ull);
            pairs += a->rows[active];
        }
    }
    h->pair_begin[members] = pairs;
    const struct ft_cuda_list *to = &h->device;
    struct {
        const void *from;
        void *to;
        uint64_t bytes;
    } copies[] = {{h->blob, to->blob, members * sizeof *h->blob},
                  {h->pair_begin, to->pair_begin, (members + 1) * 4ull},
                  {h->pair_row, to->pair_row, pairs * 4ull},
                  {h->pair_out, to->pair_out, pairs * 4ull},
                  {h->counts, h->device_counts, d->waves * 4ull}};
    int error = 0;
    for (uint32_t i = 0; i < sizeof copies / sizeof *copies && !error; i++)
        if (copies[i].bytes)
            error = (int)cudaMemcpyAsync((void *)(uintptr_t)copies[i].to, copies[i].from, copies[i].bytes,
                                         cudaMemcpyHostToDevice, lane->compute);
    return error;
}

static uint32_t rows_bound(const struct ft_active *a, uint32_t begin, uint32_t end)
{
    uint32_t most = 1;
    for (uint32_t i = begin; i < end; i++)
        most = FT_MAX(most, a->rows[a->group[i]]);
    return most;
}

static int launch_group(struct ft_drive *d, uint32_t layer, uint32_t wave, const struct ft_dynamic *group,
                        bool with_shared)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_cuda_list list = lane->lists.device;
    list.group_count = lane->lists.device_counts + wave;
    list.blob += group->begin;
    list.pair_begin += group->begin;
    /* One row, one pair a group: kernels count pairs by groups and do not look at pair_begin. */
    if (d->c->step.rows == 1) {
        list.pair_row += group->begin;
        list.pair_out += group->begin;
    }
    return ft_cuda_experts(
        d->c, layer, &list, group->end - group->begin,
        rows_bound(&d->step->x.active, group->begin, group->end), with_shared,
        ft_cuda_stamp_of(d->c, layer, wave ? FT_CUDA_STAMP_FETCHED : FT_CUDA_STAMP_RESIDENT), lane->compute);
}

/* No group at all, but a shared expert: an empty list carries it. */
static int launch_shared(struct ft_drive *d, uint32_t layer)
{
    struct ft_cuda_list list = d->lane->lists.device;
    int error = (int)cudaMemsetAsync(list.group_count, 0, 4, d->lane->compute);
    return error ? error
                 : ft_cuda_experts(d->c, layer, &list, 1, 1, true,
                                   ft_cuda_stamp_of(d->c, layer, FT_CUDA_STAMP_RESIDENT), d->lane->compute);
}

/* One wave's copies: into memory that an earlier group may still read. Staging: the group that used the same
 * buffer. Slots: whatever was launched last. */
static void fetch_launched(struct ft_drive *d, const struct ft_dynamic *f, bool first)
{
    struct ft_lane_cuda *lane = d->lane;
    if (d->streaming) /* it is on its way since before the router ran */
        return;
    cudaEvent_t before = d->batch->prefill ? lane->grouped[lane->staging_wave % 2] : lane->last_group;
    if (first && !ft_drive_is_broken(d))
        (void)ft_drive_try(d, (int)cudaStreamWaitEvent(lane->copy, before, 0),
                           "ordering copies behind experts");
    if (!ft_drive_is_broken(d))
        (void)ft_drive_try(d, ft_drive_copy_expert(lane, f), "copying an expert to the GPU");
}

/* A group of experts, behind its copies. */
static void group_launched(struct ft_drive *d, uint32_t layer, uint32_t wave, const struct ft_dynamic *group,
                           bool fetched)
{
    struct ft_lane_cuda *lane = d->lane;
    uint32_t buffer = d->streaming ? layer % 2 : lane->staging_wave % 2;
    if (fetched && !ft_drive_is_broken(d)) {
        if (!d->streaming)
            (void)ft_drive_try(d, (int)cudaEventRecord(lane->staged[buffer], lane->copy),
                               "marking the copies' end");
        (void)ft_drive_try(d, (int)cudaStreamWaitEvent(lane->compute, lane->staged[buffer], 0),
                           "waiting for copies");
    }
    if (!ft_drive_is_broken(d))
        (void)ft_drive_try(d, launch_group(d, layer, wave, group, d->step->model->shared_width && wave == 0),
                           "launching experts");
    if (!ft_drive_is_broken(d))
        (void)ft_drive_try(d, (int)cudaEventRecord(lane->last_group, lane->compute),
                           "marking the experts' end");
    if (!ft_drive_is_broken(d) && fetched) {
        (void)ft_drive_try(d, (int)cudaEventRecord(lane->grouped[buffer], lane->compute),
                           "marking the experts' end");
        lane->staging_wave++;
    }
}

/* Fetches and groups in the order in which they were made. */
void ft_drive_run_waves(struct ft_drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_step *step = d->step;
    uint32_t wave = 0, copied = 0;
    /* add_waves begins with staging buffer 0 in every layer */
    lane->staging_wave = 0;
    if (step->wave_count && !ft_drive_is_broken(d) &&
        ft_drive_try(d, upload_lists(d, layer), "copying the lists of experts"))
        lane->map_dirty = true;
    for (uint32_t i = step->wave_first; i < step->wave_first + step->wave_count; i++) {
        struct ft_dynamic f = step->dynamic[i];
        uint64_t start = ft_clock_ns(&step->clock);
        if (f.op == FT_OP_FETCH) {
            fetch_launched(d, &f, copied++ == 0);
        } else {
            group_launched(d, layer, wave++, &f, copied != 0);
            copied = 0;
        }
        ft_drive_complete_link(d, i, start);
    }
    d->link_taken = ft_drive_published(step);
    if (d->streaming)
        ft_drive_stream_layer(d, layer + 2);
    if (!wave && step->model->shared_width && !ft_drive_is_broken(d))
        (void)ft_drive_try(d, launch_shared(d, layer), "launching the shared expert");
}

/* ---- captures of what callers want to see (ft verify, ft logits): launch path only ---- */

static void copy_rows(struct ft_drive *d, float *to, const float *from, uint64_t count)
{
    if (ft_drive_is_broken(d))
        return;
    (void)ft_drive_try(
        d, (int)cudaMemcpyAsync(to, from, count * sizeof *to, cudaMemcpyDeviceToHost, d->lane->compute),
        "copying activations from the GPU");
    if (!ft_drive_is_broken(d))
        (void)ft_drive_try(d, (int)cudaStreamSynchronize(d->lane->compute),
                           "copying activations from the GPU");
}

/* Residual before layer `block`. */
void ft_drive_capture_residual(struct ft_drive *d, uint32_t block)
{
    const struct ft_model *m = d->step->model;
    uint64_t wide = (uint64_t)m->hc_count * m->hidden;
    for (uint32_t r = 0; r < d->batch->rows; r++) {
        float *to = ft_capture_residual(m, d->batch, r, block);
        if (to)
            copy_rows(d, to, d->c->base + d->c->space.residual + r * wide, wide);
    }
}

void ft_drive_capture_topk(struct ft_drive *d, uint32_t layer)
{
    const struct ft_cuda_exchange *e = &d->c->exchange;
    const struct ft_model *m = d->step->model;
    for (uint32_t r = 0; r < d->batch->rows; r++)
        ft_capture_topk(m, d->batch, r, layer,
                        m->layers[layer].dense ? NULL
                                               : e->ids + ((uint64_t)layer * e->rows_max + r) * m->topk);
}

void ft_drive_capture_head(struct ft_drive *d)
{
    const struct ft_model *m = d->step->model;
    for (uint32_t l = 0; l < d->c->step.logit_rows; l++) {
        float *hidden = ft_capture_final(m, d->batch, d->batch->logit_row[l]),
              *logits = ft_capture_logits(m, d->batch, d->batch->logit_row[l]);
        if (hidden)
            copy_rows(d, hidden, d->c->base + d->c->space.head_x + (uint64_t)l * m->hidden, m->hidden);
        if (logits)
            copy_rows(d, logits, d->c->base + d->c->space.logits + (uint64_t)l * m->vocab, m->vocab);
    }
}

bool ft_drive_wants_capture(const struct ft_batch *batch)
{
    for (uint32_t s = 0; s < batch->sequence_count; s++)
        if (batch->sequences[s].capture)
            return true;
    return false;
}
