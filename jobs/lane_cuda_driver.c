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

#include "jobs/lane_cuda_drive.h"
#include "jobs/session.h"
#include "jobs/topology.h"

#define LOOK_EVERY 1024u /* polls between two looks at the clock */
#define SPIN_NS 2000000u /* of polling before short sleeps */
#define SLEEP_NS 50000
#define QUERY_NS 1000000u  /* between two questions whether the GPU still lives */
#define STREAM_FROM 2u     /* picks per expert from which on nearly all experts of a layer are used */
#define WARM_JOBS 160u     /* dynamic jobs of one layer of a decode step, about */
#define BETWEEN_NS 200000u /* of looking for the next step before the driver sleeps */
/* A longer gap between two looks is time in which this process was stopped, and proves nothing about the GPU. */
#define LOOK_NS_MAX 200000000ull

/* release: whoever polls on the device sees it and gives up. Like every flag it holds the step's epoch. */
static void give_up(struct ft_drive *d)
{
    for (struct ft_lane_cuda *lane = d->first; lane; lane = lane->next)
        __atomic_store_n(lane->host.abort, d->epoch, __ATOMIC_RELEASE);
}

static void fail_on(struct ft_drive *d, struct ft_lane_cuda *lane, int error, const char *what)
{
    if (!ft_cuda_is_broken(lane))
        ft_step_fail(d->step, FT_SYSTEM, "GPU %d: %s: %s (%s)", lane->gpu, what,
                     cudaGetErrorString((cudaError_t)error), cudaGetErrorName((cudaError_t)error));
    ft_cuda_break(lane, error, what);
    give_up(d);
}

static void fail(struct ft_drive *d, int error, const char *what)
{
    fail_on(d, d->lane, error, what);
}

bool ft_drive_try(struct ft_drive *d, int error, const char *what)
{
    if (error && !ft_drive_is_broken(d))
        fail(d, error, what);
    return !ft_drive_is_broken(d);
}

/* The GPU at hand is now this one. */
void ft_drive_use(struct ft_drive *d, struct ft_lane_cuda *lane)
{
    if (d->lane == lane)
        return;
    d->lane = lane;
    d->c = &lane->running;
    if (!ft_drive_is_broken(d))
        (void)ft_drive_try(d, ft_cuda_use(lane), "choosing it");
}

static struct ft_lane_cuda *lane_of(const struct ft_drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    if (layer >= lane->layer_begin && layer < lane->layer_end)
        return lane;
    for (lane = d->first; lane->next && layer >= lane->layer_end;)
        lane = lane->next;
    return lane;
}

static void use_layer(struct ft_drive *d, uint32_t layer)
{
    ft_drive_use(d, lane_of(d, layer));
}

/* A GPU whose work has failed lets those behind it wait for ever. True: all is well. */
static bool ask_all(struct ft_drive *d, const char *what)
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
static void see_end(struct ft_drive *d)
{
    if (d->before && !d->before->done_ns && ft_drive_is_raised(d->before->c.exchange.done, d->epoch))
        d->before->done_ns = ft_clock_ns(&d->step->clock);
}

/* Polls a flag of the GPU, then sleeps between polls; asks now and then whether the GPU still lives. */
bool ft_drive_wait_flag(struct ft_drive *d, const uint32_t *flag, const char *what)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_clock *clock = &d->step->clock;
    uint64_t start = ft_clock_ns(clock), asked = start, looked = start, waited = 0;
    if (ft_drive_is_broken(d))
        return false;
    for (uint32_t polls = 1; !ft_drive_is_raised(flag, d->epoch); polls++) {
        ft_park_pause();
        see_end(d);
        if (polls % LOOK_EVERY)
            continue;
        uint64_t now = ft_clock_ns(clock);
        if (d->streams_ahead)
            ft_drive_stream_ahead(d);
        if (now - asked > QUERY_NS) {
            asked = now;
            if (!ask_all(d, what))
                return false;
            if (cudaStreamQuery(lane->compute) == cudaSuccess && !ft_drive_is_raised(flag, d->epoch)) {
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

/* ---- after the router ---- */

int ft_drive_copy_expert(struct ft_lane_cuda *lane, const struct ft_dynamic *d)
{
    const struct ft_layer_weights *w = &lane->options.weights->layers[d->layer];
    const char *from =
        w->experts + (uint64_t)w->expert_layout.stride * lane->step->x.active.expert[d->active];
    return ft_drive_copy_in(lane, d->destination, from, d->bytes);
}

/* Records and completes a fetch or a group: the GPU keeps their order by itself. */
void ft_drive_complete_link(struct ft_drive *d, uint32_t index, uint64_t start)
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
        record->flags = ft_drive_is_broken(d) ? 2 : 0;
    }
    uint32_t *todo = ft_step_todo(step, d->thread);
    ft_step_hand_over(step, d->thread, todo, ft_step_complete(step, d->thread, job, todo, 0));
}

/* What the GPU's map holds for a slot. */
static uint32_t blob_of(const struct ft_step *step, uint32_t slot)
{
    return slot == FT_NONE ? FT_NONE : step->slots.blob[slot];
}

static uint32_t add_moves(const struct ft_step *step, struct ft_cuda_move *moves, uint32_t at,
                          const struct ft_prefetch_move *more, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        moves[at + i] =
            (struct ft_cuda_move){more[i].layer, more[i].expert, blob_of(step, more[i].slot), FT_NONE};
    return at + count;
}

/* Behind the layer's own copies and its flag: nobody waits for these before a later layer's flag. */
static void copy_ahead(struct ft_drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_step *step = d->step;
    for (struct ft_prefetch *e; (e = ft_prefetch_next(step, layer));) {
        const struct ft_layer_weights *w = &lane->options.weights->layers[e->layer];
        const char *from = w->experts + (uint64_t)w->expert_layout.stride * e->expert;
        e->start_ns = ft_clock_ns(&step->clock);
        if (!ft_drive_is_broken(d))
            (void)ft_drive_try(
                d,
                ft_drive_copy_in(lane, ft_slots_memory(&step->slots, e->slot), from, w->expert_layout.bytes),
                "copying an expert to the GPU ahead");
        e->end_ns = ft_clock_ns(&step->clock);
        ft_prefetch_queued(step, layer, d->thread);
    }
}

/* The layer's fetches of a captured step: moves first, then copies, then the flag behind them. */
static void fetch_captured(struct ft_drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_step *step = d->step;
    struct ft_cuda_move *moves = lane->host.moves + (uint64_t)layer * lane->c.exchange.moves_max;
    uint32_t end = ft_drive_published(step), count = 0;
    for (uint32_t i = d->link_taken; i != end; i++) {
        const struct ft_dynamic *f = &step->dynamic[step->link_jobs[i % step->link_max]];
        moves[count++] = (struct ft_cuda_move){f->layer, step->x.active.expert[f->active],
                                               blob_of(step, f->slot), f->victim};
    }
    struct ft_prefetch_move more[FT_PREFETCH_MAX];
    uint32_t moved = add_moves(step, moves, count, more, ft_prefetch_victims(step, layer, more));
    if (count)
        moved = add_moves(step, moves, moved, more, ft_prefetch_arrive(step, layer, more));
    lane->host.move_count[layer] = moved;
    uint32_t *flag = ft_drive_flag(lane->host.fetched, layer);
    if (!count)
        ft_drive_raise(flag, d->epoch);
    for (; d->link_taken != end; d->link_taken++) {
        uint32_t index = step->link_jobs[d->link_taken % step->link_max];
        uint64_t start = ft_clock_ns(&step->clock);
        if (!ft_drive_is_broken(d) && !step->dynamic[index].awaits)
            (void)ft_drive_try(d, ft_drive_copy_expert(lane, &step->dynamic[index]),
                               "copying an expert to the GPU");
        ft_drive_complete_link(d, index, start);
    }
    if (count && !ft_drive_is_broken(d))
        (void)ft_drive_try(d, ft_cuda_raise_behind_copies(lane, flag, d->epoch),
                           "raising the flag behind the copies");
    copy_ahead(d, layer);
}

/* Behind all of these: what the next layer with experts will probably ask for. */
static void look_ahead(struct ft_drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_step *step = d->step;
    const struct ft_cuda_exchange *e = &d->c->exchange;
    uint32_t target = ft_look_ahead_target(step, layer), decode = FT_MIN(e->rows_max, FT_CUDA_DECODE_ROWS);
    const uint32_t *ids = e->foreseen_ids + (uint64_t)layer * decode * step->model->topk;
    if (target == FT_NONE ||
        !ft_drive_wait_flag(d, ft_drive_flag(e->foreseen, layer), "waiting for the router look-ahead"))
        return;
    if (step->x.routing) {
        ft_execute_foresee_given(&step->x, target, step->foresight.ids);
        ids = step->foresight.ids;
    }
    ft_look_ahead_order(step, layer, ids);
    for (struct ft_landing_order *o; (o = ft_look_ahead_next(step, layer));) {
        const struct ft_layer_weights *w = &lane->options.weights->layers[o->layer];
        o->start_ns = ft_clock_ns(&step->clock);
        if (!ft_drive_is_broken(d))
            (void)ft_drive_try(d,
                               ft_drive_copy_in(lane, o->destination,
                                                w->experts + (uint64_t)w->expert_layout.stride * o->expert,
                                                w->expert_layout.bytes),
                               "copying an expert to the GPU ahead of its layer");
        o->end_ns = ft_clock_ns(&step->clock);
        ft_look_ahead_queued(step, layer, d->thread);
    }
}

static void mark_failed_rows(struct ft_drive *d)
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
static void invent_ids(struct ft_drive *d, uint32_t *ids)
{
    for (uint32_t i = 0; i < d->batch->rows * d->step->model->topk; i++)
        ids[i] = i % d->step->model->topk;
}

/* While the GPU is busy with the dense part of a layer: takes the lines that the expansion will write, which
 * the workers read for the layer before, each of them some 100 ns away. */
static void warm_expansion(const struct ft_drive *d)
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

static void drive_router(struct ft_drive *d, uint32_t job, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    struct ft_step *step = d->step;
    const struct ft_cuda_exchange *e = &d->c->exchange;
    uint32_t *ids = e->ids + (uint64_t)layer * e->rows_max * step->model->topk;
    if (!d->captured && !ft_drive_is_broken(d))
        ft_drive_launch_front(d, layer);
    if (d->captured)
        warm_expansion(d);
    if (ft_drive_begins_gpu(d, layer))
        d->before = ft_drive_lane_before(d, lane);
    if (!ft_drive_wait_flag(d, ft_drive_flag(e->routed, layer), "waiting for the router"))
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
                ft_drive_complete_link(d, i, ft_clock_ns(&step->clock));
        if (step->looks_ahead)
            look_ahead(d, layer);
        if (step->policy->prepare && step->wave_count) { /* copies and CPU take longer than this */
            struct ft_slot_view view;
            ft_slots_view(&step->slots, layer + 1 < step->model->layer_count ? layer + 1 : 0, &view);
            step->policy->prepare(step->policy_state, &view, step->step_number);
        }
    } else {
        ft_drive_run_waves(d, layer);
    }
}

/* ---- the walk ---- */

static void drive_combine(struct ft_drive *d, uint32_t layer)
{
    struct ft_lane_cuda *lane = d->lane;
    if (d->captured) {
        ft_drive_raise(ft_drive_flag(lane->host.computed, layer), d->epoch);
        return;
    }
    const struct ft_active *a = &d->step->x.active;
    uint32_t pairs = d->batch->rows * d->step->model->topk;
    if (d->layer_on_cpu && !ft_drive_is_broken(d)) {
        memset(lane->lists.on_cpu, 0, pairs * 4ull);
        for (uint32_t i = 0; i < a->count; i++)
            for (uint32_t p = a->pair_begin[i]; p < a->pair_begin[i + 1] && a->place[i] == FT_PLACE_CPU; p++)
                lane->lists.on_cpu[a->pair_out[p]] = 1;
        (void)ft_drive_try(d,
                           (int)cudaMemcpyAsync(lane->c.exchange.on_cpu, lane->lists.on_cpu, pairs * 4ull,
                                                cudaMemcpyHostToDevice, lane->compute),
                           "copying the experts' places");
    }
    if (!ft_drive_is_broken(d))
        (void)ft_drive_try(d, ft_cuda_combine(d->c, layer, d->layer_on_cpu, lane->compute),
                           "launching combine");
    if (ft_drive_wants_capture(d->batch)) {
        ft_drive_capture_topk(d, layer);
        if (layer + 1 < d->step->model->layer_count)
            ft_drive_capture_residual(d, layer + 1);
    }
}

/* Dense layers of a launched step have no router that would launch them. */
static void drive_dense(struct ft_drive *d, uint32_t layer)
{
    if (!d->captured && !ft_drive_is_broken(d))
        ft_drive_launch_front(d, layer);
    if (ft_drive_begins_gpu(d, layer))
        d->before = ft_drive_lane_before(d, d->lane);
    if (d->captured || ft_drive_is_broken(d))
        return;
    if (d->streaming) /* the layers take turns at this, those without experts, too */
        ft_drive_stream_layer(d, layer + 2);
    if (ft_drive_wants_capture(d->batch)) {
        ft_drive_capture_topk(d, layer);
        if (layer + 1 < d->step->model->layer_count)
            ft_drive_capture_residual(d, layer + 1);
    }
}

/* The step's GPUs before its last, which were done long before it, are so for the host, too. */
static bool end_others(struct ft_drive *d)
{
    struct ft_lane_cuda *last = d->lane;
    bool ended = true;
    for (struct ft_lane_cuda *lane = lane_of(d, d->layer_begin); lane != last && ended; lane = lane->next) {
        ft_drive_use(d, lane);
        ended = ft_drive_wait_flag(d, lane->c.exchange.done, "waiting for the end of its layers");
        if (!lane->done_ns)
            lane->done_ns = ft_clock_ns(&d->step->clock);
    }
    ft_drive_use(d, last);
    return ended;
}

static void drive_end(struct ft_drive *d)
{
    struct ft_lane_cuda *lane = lane_of(d, d->layer_end - 1), *behind = lane->next;
    ft_drive_use(d, lane);
    if (!d->captured && !ft_drive_is_broken(d)) {
        (void)ft_drive_try(d, ft_cuda_launch_head(d->c, lane->compute), "launching the head");
        if (ft_drive_wants_capture(d->batch))
            ft_drive_capture_head(d);
    }
    if (!ft_drive_wait_flag(d, lane->c.exchange.done, "waiting for the step's end"))
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

static void count_step(const struct ft_drive *d, struct ft_lane_cuda *lane)
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

static void begin_launched(struct ft_drive *d)
{
    const struct ft_model *m = d->step->model;
    bool fused = d->step->plan->strategy == FT_STRATEGY_FUSED;
    d->streaming = d->batch->prefill && d->step->plan->staging_experts >= m->expert_count && !fused &&
                   (uint64_t)d->batch->rows * m->topk >= STREAM_FROM * (uint64_t)m->expert_count;
    for (struct ft_lane_cuda *lane = d->first; lane; lane = lane->next) {
        ft_drive_use(d, lane);
        if (ft_drive_is_broken(d) ||
            !ft_drive_try(d, ft_cuda_fill_inputs(lane, d->batch, d->epoch), "copying the recent tokens") ||
            !ft_drive_try(d, ft_cuda_copy_inputs(lane), "copying the step's inputs"))
            break;
        if (!d->layer_begin && !ft_drive_try(d, ft_cuda_launch_begin(lane, d->c), "launching the embedding"))
            break;
        if (!d->layer_begin && lane == d->first && ft_drive_wants_capture(d->batch))
            ft_drive_capture_residual(d, 0);
        if (d->batch->prefill && !d->layer_begin)
            lane->staged_layer[0] = lane->staged_layer[1] = FT_NONE;
        uint32_t begin = FT_MAX(lane->layer_begin, d->layer_begin),
                 end = FT_MIN(lane->layer_end, d->layer_end);
        for (uint32_t i = 0; i < 2 && d->streaming && begin < end; i++)
            ft_drive_stream_layer(d, begin + i);
    }
    ft_drive_use(d, d->first);
}

static void begin_step(struct ft_drive *d)
{
    for (struct ft_lane_cuda *lane = d->first; lane; lane = lane->next)
        count_step(d, lane);
    d->captured = ft_drive_is_captured(d);
    d->step->single_wave = d->captured;
    d->streaming = false;
    d->before = d->launched = NULL;
    ft_drive_use(d, d->first);
    if (ft_drive_is_broken(d)) {
        ft_step_fail(d->step, FT_SYSTEM, "GPU %d failed before (%s): the session cannot go on, open it again",
                     d->first->broken_gpu, d->first->broken_by);
        return;
    }
    if (d->captured)
        ft_drive_begin_captured(d);
    else
        begin_launched(d);
}

static bool drive_job(struct ft_drive *d, uint32_t job)
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
        ft_drive_launch_captured(d);
    if (op == FT_OP_ROUTER) {
        drive_router(d, job, layer);
        return true;
    }
    if (op == FT_OP_PLE_PROJECT)
        ft_drive_raise(ft_drive_flag(d->lane->host.ple, step->model->layers[layer].ple), d->epoch);
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
    struct ft_drive d = {.first = lane,
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
