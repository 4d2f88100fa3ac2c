/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver thread, one for all GPUs: walks the device's jobs of a step in graph order, as the host device does, but the GPU
 * computes them. Only some of them mean work for the driver: the PLE projection (rows are in memory), the
 * router (ids, policy, copies), combine (the CPU's experts are done), the end. Work of a layer goes to the GPU
 * that has it; where the next GPU's layers begin, the residual streams are handed over.
 *
 * Every wait for the GPU is bounded by the watchdog. After an error the walk goes on without the GPU, so that
 * the step ends: the step's sequences fail, and the session with them.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "jobs/capture.h"
#include "jobs/lane_cuda_internal.h"
#include "jobs/session.h"
#include "jobs/topology.h"

#define LOOK_EVERY 1024u /* polls between two looks at the clock */
#define SPIN_NS 2000000u /* of polling before short sleeps */
#define SLEEP_NS 50000
#define QUERY_NS 1000000u  /* between two questions whether the GPU still lives */
#define STREAM_FROM 2u     /* picks per expert from which on nearly all experts of a layer are used */
#define AHEAD_PIECES 64u   /* of a layer that is streamed behind a slice */
#define WARM_JOBS 160u     /* dynamic jobs of one layer of a decode step, about */
#define BETWEEN_NS 200000u /* of looking for the next step before the driver sleeps */
/* A longer gap between two looks is time in which this process was stopped, and proves nothing about the GPU. */
#define LOOK_NS_MAX 200000000ull

/* One step as the driver sees it. */
struct drive {
    struct ft_lane_cuda *first, *lane; /* lane: the GPU at hand, this thread's current one */
    struct ft_lane_cuda *before;       /* of a step that has gone on to another GPU: the one before it */
    struct ft_lane_cuda *launched;     /* of a captured step: the last GPU that has its graph */
    struct ft_step *step;
    struct ft_batch *batch;
    struct ft_cuda *c; /* lane->running */
    uint32_t thread, epoch, tokens, link_taken;
    bool captured;
    /* Prefill that uses nearly all experts streams whole layers through the staging pairs, ahead of the router. */
    bool streaming;
    uint32_t layer_begin, layer_end; /* of this step */
    bool streams_ahead;              /* the link has nothing to do but the layer behind this slice */
    uint32_t waves;                  /* of the layer at hand, launch path */
    bool layer_on_cpu;               /* the layer at hand has experts on the CPU */
};

/* release: whoever polls on the device sees it and gives up. Like every flag it holds the step's epoch. */
static void give_up(struct drive *d)
{
    for (struct ft_lane_cuda *lane = d->first; lane; lane = lane->next)
        __atomic_store_n(lane->host.abort, d->epoch, __ATOMIC_RELEASE);
}

static void fail_on(struct drive *d, struct ft_lane_cuda *lane, int error, const char *what)
{
    if (!ft_cuda_is_broken(lane))
        ft_step_fail(d->step, FT_SYSTEM, "GPU %d: %s: %s (%s)", lane->gpu, what,
                     cudaGetErrorString((cudaError_t)error), cudaGetErrorName((cudaError_t)error));
    ft_cuda_break(lane, error, what);
    give_up(d);
}

static void fail(struct drive *d, int error, const char *what)
{
    fail_on(d, d->lane, error, what);
}

static bool is_broken(const struct drive *d)
{
    return ft_cuda_is_broken(d->first);
}

static bool try_(struct drive *d, int error, const char *what)
{
    if (error && !is_broken(d))
        fail(d, error, what);
    return !is_broken(d);
}

/* The GPU at hand is now this one. */
static void use(struct drive *d, struct ft_lane_cuda *lane)
{
    if (d->lane == lane)
        return;
    d->lane = lane;
    d->c = &lane->running;
    if (!is_broken(d))
        (void)try_(d, ft_cuda_use(lane), "choosing it");
}

static struct ft_lane_cuda *lane_of(const struct drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    if (layer >= lane->layer_begin && layer < lane->layer_end)
        return lane;
    for (lane = d->first; lane->next && layer >= lane->layer_end;)
        lane = lane->next;
    return lane;
}

static void use_layer(struct drive *d, uint32_t layer)
{
    use(d, lane_of(d, layer));
}

static bool is_raised(const uint32_t *flag, uint32_t epoch)
{
    /* acquire: pairs with the GPU's st.release.sys; what the flag announces may be read */
    return (int32_t)(__atomic_load_n(flag, __ATOMIC_ACQUIRE) - epoch) >= 0;
}

/* A GPU whose work has failed lets those behind it wait for ever. True: all is well. */
static bool ask_all(struct drive *d, const char *what)
{
    for (struct ft_lane_cuda *lane = d->first; lane; lane = lane->next) {
        cudaError_t state = cudaStreamQuery(lane->compute);
        if (state == cudaSuccess || state == cudaErrorNotReady)
            continue;
        fail_on(d, lane, (int)state, what);
        return false;
    }
    return true;
}

/* While the next GPU computes: when the one before was done, for the clocks. */
static void see_end(struct drive *d)
{
    if (d->before && !d->before->done_ns && is_raised(d->before->c.exchange.done, d->epoch))
        d->before->done_ns = ft_clock_ns(&d->step->clock);
}

static void stream_ahead(struct drive *d);

/* Polls a flag of the GPU, then sleeps between polls; asks now and then whether the GPU still lives. */
static bool wait_flag(struct drive *d, const uint32_t *flag, const char *what)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_clock *clock = &d->step->clock;
    uint64_t start = ft_clock_ns(clock), asked = start, looked = start, waited = 0;
    if (is_broken(d))
        return false;
    for (uint32_t polls = 1; !is_raised(flag, d->epoch); polls++) {
        ft_park_pause();
        see_end(d);
        if (polls % LOOK_EVERY)
            continue;
        uint64_t now = ft_clock_ns(clock);
        if (d->streams_ahead)
            stream_ahead(d);
        if (now - asked > QUERY_NS) {
            asked = now;
            if (!ask_all(d, what))
                return false;
            if (cudaStreamQuery(lane->compute) == cudaSuccess && !is_raised(flag, d->epoch)) {
                fail(d, cudaErrorUnknown, "the step ended without its flags");
                return false;
            }
        }
        waited += FT_MIN(now - looked, LOOK_NS_MAX);
        looked = now;
        if (waited > d->first->watchdog_ns || atomic_load_explicit(&d->step->stop, memory_order_acquire)) {
            fail(d, cudaErrorLaunchTimeout, what);
            return false;
        }
        if (now - start > SPIN_NS) {
            struct timespec nap = {0, SLEEP_NS};
            nanosleep(&nap, NULL);
        }
    }
    return true;
}

static void raise_flag(uint32_t *flag, uint32_t value)
{
    /* release: pairs with ld.acquire.sys on the GPU */
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

/* ---- after the router ---- */

static uint32_t *flag_of(uint32_t *flags, uint32_t index)
{
    return flags + (uint64_t)index * FT_CUDA_FLAG_STRIDE;
}

static int copy_in(struct ft_lane_cuda *lane, void *to, const void *from, uint64_t bytes)
{
    return ft_cuda_copy_throttled(lane, lane->throttle, lane->options.link_bytes_per_s, to, from, bytes);
}

static int copy_expert(struct ft_lane_cuda *lane, const struct ft_dynamic *d)
{
    const struct ft_layer_weights *w = &lane->options.weights->layers[d->layer];
    const char *from =
        w->experts + (uint64_t)w->expert_layout.stride * lane->step->x.active.expert[d->active];
    return copy_in(lane, d->destination, from, d->bytes);
}

/* Records and completes a fetch or a group: the GPU keeps their order by itself. */
static void complete_link(struct drive *d, uint32_t index, uint64_t start)
{
    struct ft_step *step = d->step;
    const struct ft_dynamic dynamic = step->dynamic[index];
    uint32_t job = step->graph->static_count + index;
    struct ft_trace_record *record =
        ft_step_record(step, d->thread, FT_RECORD_JOB, start, ft_clock_ns(&step->clock));
    if (record) {
        record->job = job + dynamic.layer * step->graph->reserved_count;
        record->op = dynamic.op;
        record->lane = dynamic.lane;
        record->layer = dynamic.layer;
        record->bytes = dynamic.bytes;
        if (dynamic.active != FT_NONE) {
            record->expert = step->x.active.expert[dynamic.active];
            record->rows = (uint16_t)FT_MIN(step->x.active.rows[dynamic.active], UINT16_MAX);
            record->detail = step->x.active.reason[dynamic.active];
        }
        record->slot = dynamic.slot;
        record->flags = is_broken(d) ? 2 : 0;
    }
    uint32_t *todo = ft_step_todo(step, d->thread);
    ft_step_hand_over(step, d->thread, todo, ft_step_complete(step, d->thread, job, todo, 0));
}

static uint32_t published(const struct ft_step *step)
{
    return atomic_load_explicit(&step->link_published, memory_order_acquire);
}

static uint32_t add_moves(struct ft_cuda_move *moves, uint32_t at, const struct ft_prefetch_move *more,
                          uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        moves[at + i] = (struct ft_cuda_move){more[i].layer, more[i].expert, more[i].slot, FT_NONE};
    return at + count;
}

/* Behind the layer's own copies and its flag: nobody waits for these before a later layer's flag. */
static void copy_ahead(struct drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_step *step = d->step;
    for (struct ft_prefetch *e; (e = ft_prefetch_next(step, layer));) {
        const struct ft_layer_weights *w = &lane->options.weights->layers[e->layer];
        const char *from = w->experts + (uint64_t)w->expert_layout.stride * e->expert;
        e->start_ns = ft_clock_ns(&step->clock);
        if (!is_broken(d))
            (void)try_(d, copy_in(lane, ft_slots_memory(&step->slots, e->slot), from, w->expert_layout.bytes),
                       "copying an expert to the GPU ahead");
        e->end_ns = ft_clock_ns(&step->clock);
        ft_prefetch_queued(step, layer, d->thread);
    }
}

/* The layer's fetches of a captured step: moves first, then copies, then the flag behind them. */
static void fetch_captured(struct drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_step *step = d->step;
    struct ft_cuda_move *moves = lane->host.moves + (uint64_t)layer * lane->c.exchange.moves_max;
    uint32_t end = published(step), count = 0;
    for (uint32_t i = d->link_taken; i != end; i++) {
        const struct ft_dynamic *f = &step->dynamic[step->link_jobs[i % step->link_max]];
        moves[count++] =
            (struct ft_cuda_move){f->layer, step->x.active.expert[f->active], f->slot, f->victim};
    }
    struct ft_prefetch_move more[FT_PREFETCH_MAX];
    uint32_t moved = add_moves(moves, count, more, ft_prefetch_victims(step, layer, more));
    if (count)
        moved = add_moves(moves, moved, more, ft_prefetch_arrive(step, layer, more));
    lane->host.move_count[layer] = moved;
    uint32_t *flag = flag_of(lane->host.fetched, layer);
    if (!count)
        raise_flag(flag, d->epoch);
    for (; d->link_taken != end; d->link_taken++) {
        uint32_t index = step->link_jobs[d->link_taken % step->link_max];
        uint64_t start = ft_clock_ns(&step->clock);
        if (!is_broken(d))
            (void)try_(d, copy_expert(lane, &step->dynamic[index]), "copying an expert to the GPU");
        complete_link(d, index, start);
    }
    if (count && !is_broken(d))
        (void)try_(d, ft_cuda_raise_behind_copies(lane, flag, d->epoch),
                   "raising the flag behind the copies");
    copy_ahead(d, layer);
}

/* ---- prefill: whole layers, ahead of the router ---- */

/* Experts [first, end) of a layer, none of them in a slot, into the next places of its buffer. */
static void stage(struct drive *d, uint32_t layer, uint32_t first, uint32_t end)
{
    struct ft_lane_cuda *lane = d->lane;
    const struct ft_layer_weights *w = &lane->options.weights->layers[layer];
    uint32_t buffer = layer % 2, place = lane->staged_places[buffer];
    uint64_t stride = w->expert_layout.stride;
    for (uint32_t e = first; e < end; e++)
        lane->staged_at[(uint64_t)buffer * d->step->model->expert_count + e] = lane->staged_places[buffer]++;
    (void)try_(d,
               copy_in(lane, ft_step_staging(d->step, layer)[buffer] + stride * place,
                       w->experts + stride * first, stride * (end - first)),
               "streaming a layer's experts to the GPU");
}

/* Copies the next of a layer's experts, `count` at most, neighbours together, once the experts that read the
 * buffer last have run. */
static void stream_experts(struct drive *d, uint32_t layer, uint32_t count)
{
    struct ft_lane_cuda *lane = d->lane;
    const struct ft_slots *slots = &d->step->slots;
    uint32_t buffer = layer % 2, experts = d->step->model->expert_count, *next = &lane->staged_next[buffer];
    uint32_t *at = lane->staged_at + (uint64_t)buffer * experts;
    if (lane->staged_layer[buffer] != layer) {
        lane->staged_layer[buffer] = layer;
        *next = lane->staged_places[buffer] = 0;
        (void)try_(d, (int)cudaStreamWaitEvent(lane->copy, lane->grouped[buffer], 0),
                   "ordering copies behind experts");
    }
    while (*next < experts && count && !is_broken(d)) {
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
static void stream_layer(struct drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    const struct ft_model *m = d->step->model;
    uint32_t buffer = layer % 2;
    d->streams_ahead |= layer == d->layer_end && layer < lane->layer_end;
    if (layer >= d->layer_end || layer >= lane->layer_end || m->layers[layer].dense || is_broken(d))
        return;
    const uint32_t *at = lane->staged_at + (uint64_t)buffer * m->expert_count;
    if (lane->staged_layer[buffer] == layer)
        for (uint32_t e = 0; e < lane->staged_next[buffer] && !is_broken(d); e++)
            if (at[e] == FT_NONE && ft_slots_find(&d->step->slots, layer, e) == FT_NONE)
                stage(d, layer, e, e + 1);
    stream_experts(d, layer, UINT32_MAX);
    if (!is_broken(d))
        (void)try_(d, (int)cudaEventRecord(lane->staged[buffer], lane->copy), "marking the copies' end");
}

/* While the GPU computes the last layer of a slice the link would stand still: it takes pieces of the next layer, if
 * that is the same GPU's, two at a time, so that the decode step behind this slice waits for little. */
static void stream_ahead(struct drive *d)
{
    struct ft_lane_cuda *lane = d->lane;
    uint32_t layer = d->layer_end, buffer = layer % 2, experts = d->step->model->expert_count;
    if (is_broken(d) || layer < lane->layer_begin || layer >= lane->layer_end ||
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
    if (!is_broken(d) && try_(d, (int)state, "streaming ahead"))
        (void)try_(d, (int)cudaEventRecord(older, lane->copy), "marking the copies' end");
}

static const char *staged_blob(const struct drive *d, uint32_t layer, uint32_t expert)
{
    const struct ft_step *step = d->step;
    uint32_t at = d->lane->staged_at[(uint64_t)(layer % 2) * step->model->expert_count + expert];
    return ft_step_staging(step, layer)[layer % 2] +
           (uint64_t)d->lane->options.weights->layers[layer].expert_layout.stride * at;
}

/* ---- launch path: groups of experts ---- */

/* The layer's device experts, in the order of the groups, into the lists that the kernels read. */
static int upload_lists(struct drive *d, uint32_t layer)
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
                                   ? staged_blob(d, layer, a->expert[active])
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

static int launch_group(struct drive *d, uint32_t layer, uint32_t wave, const struct ft_dynamic *group,
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
static int launch_shared(struct drive *d, uint32_t layer)
{
    struct ft_cuda_list list = d->lane->lists.device;
    int error = (int)cudaMemsetAsync(list.group_count, 0, 4, d->lane->compute);
    return error ? error
                 : ft_cuda_experts(d->c, layer, &list, 1, 1, true,
                                   ft_cuda_stamp_of(d->c, layer, FT_CUDA_STAMP_RESIDENT), d->lane->compute);
}

/* One wave's copies: into memory that an earlier group may still read. Staging: the group that used the same
 * buffer. Slots: whatever was launched last. */
static void fetch_launched(struct drive *d, const struct ft_dynamic *f, bool first)
{
    struct ft_lane_cuda *lane = d->lane;
    if (d->streaming) /* it is on its way since before the router ran */
        return;
    cudaEvent_t before = d->batch->prefill ? lane->grouped[lane->staging_wave % 2] : lane->last_group;
    if (first && !is_broken(d))
        (void)try_(d, (int)cudaStreamWaitEvent(lane->copy, before, 0), "ordering copies behind experts");
    if (!is_broken(d))
        (void)try_(d, copy_expert(lane, f), "copying an expert to the GPU");
}

/* A group of experts, behind its copies. */
static void group_launched(struct drive *d, uint32_t layer, uint32_t wave, const struct ft_dynamic *group,
                           bool fetched)
{
    struct ft_lane_cuda *lane = d->lane;
    uint32_t buffer = d->streaming ? layer % 2 : lane->staging_wave % 2;
    if (fetched && !is_broken(d)) {
        if (!d->streaming)
            (void)try_(d, (int)cudaEventRecord(lane->staged[buffer], lane->copy), "marking the copies' end");
        (void)try_(d, (int)cudaStreamWaitEvent(lane->compute, lane->staged[buffer], 0), "waiting for copies");
    }
    if (!is_broken(d))
        (void)try_(d, launch_group(d, layer, wave, group, d->step->model->shared_width && wave == 0),
                   "launching experts");
    if (!is_broken(d))
        (void)try_(d, (int)cudaEventRecord(lane->last_group, lane->compute), "marking the experts' end");
    if (!is_broken(d) && fetched) {
        (void)try_(d, (int)cudaEventRecord(lane->grouped[buffer], lane->compute), "marking the experts' end");
        lane->staging_wave++;
    }
}

/* Fetches and groups in the order in which they were made. */
static void run_waves(struct drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_step *step = d->step;
    uint32_t wave = 0, copied = 0;
    /* add_waves begins with staging buffer 0 in every layer */
    lane->staging_wave = 0;
    if (step->wave_count && !is_broken(d) && try_(d, upload_lists(d, layer), "copying the lists of experts"))
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
        complete_link(d, i, start);
    }
    d->link_taken = published(step);
    if (d->streaming)
        stream_layer(d, layer + 2);
    if (!wave && step->model->shared_width && !is_broken(d))
        (void)try_(d, launch_shared(d, layer), "launching the shared expert");
}

static void mark_failed_rows(struct drive *d)
{
    for (uint32_t r = 0; r < d->batch->rows; r++) {
        uint32_t at = 0;
        for (struct ft_lane_cuda *lane = d->first; lane && !at; lane = lane->next)
            at = __atomic_load_n(&lane->running.step.failed[r], __ATOMIC_RELAXED);
        if (at)
            ft_execute_fail_row(&d->step->x, r, at - 1);
    }
}

/* Without the GPU's answer any valid ids do: nothing is computed any more. */
static void invent_ids(struct drive *d, uint32_t *ids)
{
    for (uint32_t i = 0; i < d->batch->rows * d->step->model->topk; i++)
        ids[i] = i % d->step->model->topk;
}

/* While the GPU is busy with the dense part of a layer: takes the lines that the expansion will write, which
 * the workers read for the layer before, each of them some 100 ns away. */
static void warm_expansion(const struct drive *d)
{
    const struct ft_step *step = d->step;
    const struct ft_active *a = &step->x.active;
    uint32_t jobs = FT_MIN(step->graph->reserved_count, WARM_JOBS);
    const char *dynamic = (const char *)step->dynamic,
               *counter = (const char *)&step->counter[step->graph->static_count];
    for (uint64_t at = 0; at < jobs * sizeof *step->dynamic; at += 64)
        __builtin_prefetch(dynamic + at, 1);
    for (uint64_t at = 0; at < jobs * sizeof *step->counter; at += 64)
        __builtin_prefetch(counter + at, 1);
    const void *arrays[] = {a->expert, a->rows, a->pair_begin, a->pair_row, a->pair_out, a->blob};
    for (uint32_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        __builtin_prefetch(arrays[i], 1);
}

/* ---- from GPU to GPU ---- */

/* The residual streams to the next GPU, behind everything that was queued for this one, which then says that it is
 * done. What is queued for the next one from here on waits for them. */
static void hand_over(struct drive *d, struct ft_lane_cuda *from, struct ft_lane_cuda *to)
{
    const struct ft_model *m = d->step->model;
    const struct ft_cuda *a = &from->running, *b = &to->running;
    uint64_t bytes = (uint64_t)d->batch->rows * m->hc_count * m->hidden * sizeof(float);
    use(d, from);
    if (is_broken(d))
        return;
    int error = (int)cudaMemcpyPeerAsync(b->base + b->space.residual, to->gpu, a->base + a->space.residual,
                                         from->gpu, bytes, from->compute);
    if (!error)
        error = (int)cudaEventRecord(from->handed, from->compute);
    if (try_(d, error, "handing activations to the next GPU"))
        (void)try_(d, ft_cuda_end(a, from->compute), "launching the end of its layers");
    use(d, to);
    if (!is_broken(d))
        (void)try_(d, (int)cudaStreamWaitEvent(to->compute, from->handed, 0),
                   "waiting for activations of the GPU before it");
}

static struct ft_lane_cuda *lane_before(const struct drive *d, const struct ft_lane_cuda *lane)
{
    struct ft_lane_cuda *before = d->first;
    while (before->next != lane)
        before = before->next;
    return before;
}

static bool begins_gpu(const struct drive *d, uint32_t layer)
{
    return d->lane != d->first && layer == d->lane->layer_begin;
}

static void launch_front(struct drive *d, uint32_t layer)
{
    if (begins_gpu(d, layer))
        hand_over(d, lane_before(d, d->lane), d->lane);
    if (!is_broken(d))
        (void)try_(d, ft_cuda_launch_front(d->c, layer, d->tokens, false, d->lane->compute),
                   "launching a layer");
}

static void drive_router(struct drive *d, uint32_t job, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_step *step = d->step;
    const struct ft_cuda_exchange *e = &d->c->exchange;
    uint32_t *ids = e->ids + (uint64_t)layer * e->rows_max * step->model->topk;
    if (!d->captured && !is_broken(d))
        launch_front(d, layer);
    if (d->captured)
        warm_expansion(d);
    if (begins_gpu(d, layer))
        d->before = lane_before(d, lane);
    if (!wait_flag(d, flag_of(e->routed, layer), "waiting for the router"))
        invent_ids(d, ids);
    step->router_ids = ids;
    uint32_t *todo = ft_step_todo(step, d->thread);
    uint32_t ready = ft_step_complete(step, d->thread, job, todo, 0);
    d->layer_on_cpu = ready != 0;
    ft_step_hand_over(step, d->thread, todo, ready);
    if (d->captured) {
        fetch_captured(d, layer);
        for (uint32_t i = step->wave_first; i < step->wave_first + step->wave_count; i++)
            if (step->dynamic[i].op == FT_OP_EXPERT_DEVICE)
                complete_link(d, i, ft_clock_ns(&step->clock));
        if (step->policy->prepare && step->wave_count) { /* copies and CPU take longer than this */
            struct ft_slot_view view;
            ft_slots_view(&step->slots, layer + 1 < step->model->layer_count ? layer + 1 : 0, &view);
            step->policy->prepare(step->policy_state, &view, step->step_number);
        }
    } else {
        run_waves(d, layer);
    }
}

/* ---- captures of what callers want to see (ft verify, ft logits): launch path only ---- */

static void copy_rows(struct drive *d, float *to, const float *from, uint64_t count)
{
    if (is_broken(d))
        return;
    (void)try_(d,
               (int)cudaMemcpyAsync(to, from, count * sizeof *to, cudaMemcpyDeviceToHost, d->lane->compute),
               "copying activations from the GPU");
    if (!is_broken(d))
        (void)try_(d, (int)cudaStreamSynchronize(d->lane->compute), "copying activations from the GPU");
}

/* Residual before layer `block`. */
static void capture_residual(struct drive *d, uint32_t block)
{
    const struct ft_model *m = d->step->model;
    uint64_t wide = (uint64_t)m->hc_count * m->hidden;
    for (uint32_t r = 0; r < d->batch->rows; r++) {
        float *to = ft_capture_residual(m, d->batch, r, block);
        if (to)
            copy_rows(d, to, d->c->base + d->c->space.residual + r * wide, wide);
    }
}

static void capture_topk(struct drive *d, uint32_t layer)
{
    const struct ft_cuda_exchange *e = &d->c->exchange;
    const struct ft_model *m = d->step->model;
    for (uint32_t r = 0; r < d->batch->rows; r++)
        ft_capture_topk(m, d->batch, r, layer,
                        m->layers[layer].dense ? NULL
                                               : e->ids + ((uint64_t)layer * e->rows_max + r) * m->topk);
}

static void capture_head(struct drive *d)
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

static bool wants_capture(const struct ft_batch *batch)
{
    for (uint32_t s = 0; s < batch->sequence_count; s++)
        if (batch->sequences[s].capture)
            return true;
    return false;
}

/* ---- the walk ---- */

static void drive_combine(struct drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    if (d->captured) {
        raise_flag(flag_of(lane->host.computed, layer), d->epoch);
        return;
    }
    const struct ft_active *a = &d->step->x.active;
    uint32_t pairs = d->batch->rows * d->step->model->topk;
    if (d->layer_on_cpu && !is_broken(d)) {
        memset(lane->lists.on_cpu, 0, pairs * 4ull);
        for (uint32_t i = 0; i < a->count; i++)
            for (uint32_t p = a->pair_begin[i]; p < a->pair_begin[i + 1] && a->place[i] == FT_PLACE_CPU; p++)
                lane->lists.on_cpu[a->pair_out[p]] = 1;
        (void)try_(d,
                   (int)cudaMemcpyAsync(lane->c.exchange.on_cpu, lane->lists.on_cpu, pairs * 4ull,
                                        cudaMemcpyHostToDevice, lane->compute),
                   "copying the experts' places");
    }
    if (!is_broken(d))
        (void)try_(d, ft_cuda_combine(d->c, layer, d->layer_on_cpu, lane->compute), "launching combine");
    if (wants_capture(d->batch)) {
        capture_topk(d, layer);
        if (layer + 1 < d->step->model->layer_count)
            capture_residual(d, layer + 1);
    }
}

/* Dense layers of a launched step have no router that would launch them. */
static void drive_dense(struct drive *d, uint32_t layer)
{
    if (!d->captured && !is_broken(d))
        launch_front(d, layer);
    if (begins_gpu(d, layer))
        d->before = lane_before(d, d->lane);
    if (d->captured || is_broken(d))
        return;
    if (d->streaming) /* the layers take turns at this, those without experts, too */
        stream_layer(d, layer + 2);
    if (wants_capture(d->batch)) {
        capture_topk(d, layer);
        if (layer + 1 < d->step->model->layer_count)
            capture_residual(d, layer + 1);
    }
}

/* The step's GPUs before its last, which were done long before it, are so for the host, too. */
static bool end_others(struct drive *d)
{
    struct ft_lane_cuda *last = d->lane;
    bool ended = true;
    for (struct ft_lane_cuda *lane = lane_of(d, d->layer_begin); lane != last && ended; lane = lane->next) {
        use(d, lane);
        ended = wait_flag(d, lane->c.exchange.done, "waiting for the end of its layers");
        if (!lane->done_ns)
            lane->done_ns = ft_clock_ns(&d->step->clock);
    }
    use(d, last);
    return ended;
}

static void drive_end(struct drive *d)
{
    struct ft_lane_cuda *lane = lane_of(d, d->layer_end - 1), *behind = lane->next;
    use(d, lane);
    if (!d->captured && !is_broken(d)) {
        (void)try_(d, ft_cuda_launch_head(d->c, lane->compute), "launching the head");
        if (wants_capture(d->batch))
            capture_head(d);
    }
    if (!wait_flag(d, lane->c.exchange.done, "waiting for the step's end"))
        return;
    lane->done_ns = ft_clock_ns(&d->step->clock);
    if (!end_others(d))
        return;
    mark_failed_rows(d);
    for (uint32_t l = 0; l < d->c->step.logit_rows; l++) {
        uint32_t row = d->batch->logit_row[l];
        struct ft_batch_sequence *s = &d->batch->sequences[d->batch->row_sequence[row]];
        if (d->batch->position[row] + 1 != s->token_count)
            continue;
        s->sampled = __atomic_load_n(&d->c->step.sampled[l], __ATOMIC_RELAXED);
        if (s->sampled == FT_NONE)
            ft_execute_fail_row(&d->step->x, row, d->step->model->layer_count);
    }
    for (lane = lane_of(d, d->layer_begin); lane != behind; lane = lane->next)
        ft_cuda_record_stamps(lane, lane->done_ns);
}

static int upload_map(struct ft_lane_cuda *lane)
{
    const struct ft_slots *slots = &lane->step->slots;
    uint64_t bytes = (uint64_t)slots->layer_count * slots->expert_count * 4;
    int error = (int)cudaMemcpyAsync(lane->c.exchange.slot_of, slots->map, bytes, cudaMemcpyHostToDevice,
                                     lane->compute);
    lane->map_dirty = error != 0;
    return error;
}

/* Every fetch of a layer of a captured step needs a slot of its own. */
static bool has_room(const struct drive *d)
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

static bool is_captured(const struct drive *d)
{
    bool captured = !d->batch->prefill && d->batch->rows <= FT_CUDA_DECODE_ROWS &&
                    d->batch->sequence_count == d->batch->rows && has_room(d) && !wants_capture(d->batch);
    for (const struct ft_lane_cuda *lane = d->first; lane; lane = lane->next)
        captured = captured && lane->handshake != FT_HANDSHAKE_LAUNCH;
    return captured;
}

static void count_step(const struct drive *d, struct ft_lane_cuda *lane)
{
    struct ft_cuda *c = &lane->running;
    lane->done_ns = 0;
    *c = lane->c;
    c->step.rows = d->batch->rows;
    c->step.sequences = d->batch->sequence_count;
    c->step.logit_rows = d->layer_end == d->step->model->layer_count ? d->batch->logit_rows : 0;
    if (d->batch->prefill) /* no expert runs on the CPU */
        c->exchange.host_x = NULL;
    if (d->batch->prefill || d->batch->rows > FT_CUDA_DECODE_ROWS)
        c->exchange.forced_ids = NULL; /* given routing is for decode steps */
}

/* A capture takes long and allocates: all of them are there before the first GPU has work that waits for others. */
static bool find_captures(struct drive *d)
{
    struct ft_cuda_capture *capture = NULL;
    struct ft_error err;
    for (struct ft_lane_cuda *lane = d->first; lane; lane = lane->next) {
        use(d, lane);
        if (is_broken(d))
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
static void launch_captured(struct drive *d)
{
    struct ft_lane_cuda *lane = d->lane;
    if (is_broken(d))
        return;
    if (d->launched)
        hand_over(d, d->launched, lane);
    d->launched = lane;
    if (!is_broken(d))
        (void)try_(d, (int)cudaGraphLaunch(lane->capture->exec, lane->compute), "launching a decode step");
}

/* What GPUs behind the first need besides their graphs is queued now: there is time for it. */
static bool prepare_captured(struct drive *d)
{
    struct ft_lane_cuda *lane = d->lane;
    if (is_broken(d) || !try_(d, ft_cuda_fill_inputs(lane, d->batch, d->epoch), "copying the recent tokens"))
        return false;
    if (lane->map_dirty && !try_(d, upload_map(lane), "copying the slot map"))
        return false;
    return lane == d->first || (try_(d, ft_cuda_copy_inputs(lane), "copying the step's inputs") &&
                                try_(d, ft_cuda_launch_begin(lane, d->c), "launching the rotary angles"));
}

static void begin_captured(struct drive *d)
{
    bool good = find_captures(d);
    for (struct ft_lane_cuda *lane = d->first; lane && good; lane = lane->next) {
        use(d, lane);
        good = prepare_captured(d);
        if (good && lane == d->first)
            launch_captured(d);
    }
    use(d, d->first);
}

static void begin_launched(struct drive *d)
{
    const struct ft_model *m = d->step->model;
    bool fused = d->step->plan->strategy == FT_STRATEGY_FUSED;
    d->streaming = d->batch->prefill && d->step->plan->staging_experts >= m->expert_count && !fused &&
                   (uint64_t)d->batch->rows * m->topk >= STREAM_FROM * (uint64_t)m->expert_count;
    for (struct ft_lane_cuda *lane = d->first; lane; lane = lane->next) {
        use(d, lane);
        if (is_broken(d) ||
            !try_(d, ft_cuda_fill_inputs(lane, d->batch, d->epoch), "copying the recent tokens") ||
            !try_(d, ft_cuda_copy_inputs(lane), "copying the step's inputs"))
            break;
        if (!d->layer_begin && !try_(d, ft_cuda_launch_begin(lane, d->c), "launching the embedding"))
            break;
        if (!d->layer_begin && lane == d->first && wants_capture(d->batch))
            capture_residual(d, 0);
        if (d->batch->prefill && !d->layer_begin)
            lane->staged_layer[0] = lane->staged_layer[1] = FT_NONE;
        uint32_t begin = FT_MAX(lane->layer_begin, d->layer_begin),
                 end = FT_MIN(lane->layer_end, d->layer_end);
        for (uint32_t i = 0; i < 2 && d->streaming && begin < end; i++)
            stream_layer(d, begin + i);
    }
    use(d, d->first);
}

static void begin_step(struct drive *d)
{
    for (struct ft_lane_cuda *lane = d->first; lane; lane = lane->next)
        count_step(d, lane);
    d->captured = is_captured(d);
    d->step->single_wave = d->captured;
    d->streaming = false;
    d->before = d->launched = NULL;
    use(d, d->first);
    if (is_broken(d)) {
        ft_step_fail(d->step, FT_SYSTEM, "GPU %d failed before (%s): the session cannot go on, open it again",
                     d->first->broken_gpu, d->first->broken_by);
        return;
    }
    if (d->captured)
        begin_captured(d);
    else
        begin_launched(d);
}

static bool drive_job(struct drive *d, uint32_t job)
{
    struct ft_step *step = d->step;
    const struct ft_graph *graph = step->graph;
    enum ft_op op = graph->op[job];
    uint32_t layer = graph->layer[job];
    enum ft_wait cause = op == FT_OP_PLE_PROJECT ? FT_WAIT_IO : FT_WAIT_CPU;
    if (!ft_step_wait_job(step, d->thread, &step->device, job, cause))
        return false;
    if (layer != FT_GRAPH_NO_LAYER)
        use_layer(d, layer);
    if (d->captured && d->lane != d->launched && layer != FT_GRAPH_NO_LAYER)
        launch_captured(d);
    if (op == FT_OP_ROUTER) {
        drive_router(d, job, layer);
        return true;
    }
    if (op == FT_OP_PLE_PROJECT)
        raise_flag(flag_of(d->lane->host.ple, step->model->layers[layer].ple), d->epoch);
    else if (op == FT_OP_COMBINE)
        drive_combine(d, layer);
    else if (op == FT_OP_DENSE_DOWN)
        drive_dense(d, layer);
    bool last = job == graph->device_jobs[graph->device_count - 1];
    if (last)
        drive_end(d);
    uint32_t *todo = ft_step_todo(step, d->thread);
    ft_step_hand_over(step, d->thread, todo, ft_step_complete(step, d->thread, job, todo, 0));
    return true;
}

/* The driver polls: on a core that it shares with a worker each would wait for the other's time slice. */
static void take_core(const struct ft_lane_cuda *lane)
{
    const struct ft_topology *topology = lane->options.topology;
    if (!topology)
        return;
    uint32_t core = ft_topology_service_core(topology, lane->step->workers, 0);
    if (core != FT_NONE)
        (void)ft_topology_bind(topology, core);
}

void *ft_cuda_drive(void *context)
{
    struct ft_lane_cuda *lane = context;
    struct ft_step *step = lane->step;
    struct drive d = {.first = lane,
                      .lane = lane,
                      .c = &lane->running,
                      .step = step,
                      .thread = ft_step_thread(step, FT_STEP_DEVICE)};
    uint32_t seen = 0;
    (void)cudaSetDevice(lane->gpu);
    take_core(lane);
    while (ft_step_wait_epoch(step, d.thread, &step->device, BETWEEN_NS, BETWEEN_NS, &seen)) {
        const struct ft_graph *graph = step->graph;
        uint32_t count = graph->device_count;
        d.batch = step->x.batch;
        d.epoch = seen;
        d.layer_begin = graph->shape.layer_begin;
        d.layer_end = graph->shape.layer_end;
        d.streams_ahead = false;
        for (struct ft_lane_cuda *gpu = lane; gpu; gpu = gpu->next)
            ft_cuda_use_set(gpu, ft_execute_set_of(d.batch));
        d.tokens = ft_cuda_tokens_bound(d.batch);
        begin_step(&d);
        for (uint32_t i = 0; i < count; i++)
            if (!drive_job(&d, graph->device_jobs[i])) {
                give_up(&d); /* or what waits on the GPU waits for ever */
                return NULL;
            }
    }
    return NULL;
}
