/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing a session: every pool is sized by the plan in one arena, then the lanes start. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jobs/lane_cuda.h"
#include "jobs/session_internal.h"

#define BLOBS_PER_LANDING 16u /* of the pool */
#define RING_ENTRIES 1024u
#define TRACE_RECORDS_MAX (1u << 17)
#define SPIN_NS 50000u
#define SPIN_GPU_NS                                                                                          \
    1000000u /* workers of a GPU step that has CPU experts wait out the dense part of a layer */
#define IO_AHEAD_NS 50000u
#define IO_SPIN_NS 100000u
#define LINK_PENDING_MIN 64u

static uint32_t thread_count_of(const struct ft_plan *plan)
{
    return plan->workers + FT_STEP_THREADS;
}

static uint32_t round_up_pow2(uint32_t value)
{
    uint32_t power = 1;
    while (power < value)
        power *= 2;
    return power;
}

/* A bucket of shapes shares a graph: powers of two, cut at the largest that a step can have. */
static uint32_t bucket(uint32_t value, uint32_t max)
{
    return value ? FT_MIN(round_up_pow2(value), max) : 0;
}

static int build_graph(struct ft_session *session, const struct ft_shape *shape, struct ft_graph_entry *entry,
                       struct ft_error *err)
{
    int status = ft_graph_create(&entry->graph, &entry->arena, session->options.model, shape,
                                 &session->plan.tiling, err);
    if (status == FT_OK && (entry->graph.static_count > session->static_max ||
                            entry->graph.reserved_count > session->reserved_max))
        status = ft_error_set(err, FT_INTERNAL,
                              "a step of %u rows has %u + %u jobs, more than the %u + %u provided for",
                              shape->rows, entry->graph.static_count, entry->graph.reserved_count,
                              session->static_max, session->reserved_max);
    if (status != FT_OK)
        ft_arena_fini(&entry->arena);
    return status;
}

/* Member by member: the padding behind prefill may hold anything. */
static bool shapes_equal(const struct ft_shape *a, const struct ft_shape *b)
{
    return a->rows == b->rows && a->sequences == b->sequences && a->logit_rows == b->logit_rows &&
           a->prefill == b->prefill && a->layer_begin == b->layer_begin && a->layer_end == b->layer_end;
}

int ft_session_graph(struct ft_session *session, const struct ft_batch *batch, const struct ft_graph **graph,
                     struct ft_error *err)
{
    struct ft_shape shape = {.rows = bucket(batch->rows, session->rows_max),
                             .prefill = batch->prefill,
                             .layer_begin = batch->layer_begin,
                             .layer_end = batch->layer_end};
    if (batch->layer_end == session->options.model->layer_count)
        shape.logit_rows = bucket(batch->logit_rows, session->plan.logit_rows_max);
    shape.sequences = FT_MIN(bucket(batch->sequence_count, session->plan.sequences_max), shape.rows);
    shape.logit_rows = FT_MIN(shape.logit_rows, shape.rows);
    struct ft_graph_entry *oldest = &session->graphs[0];
    for (uint32_t i = 0; i < FT_GRAPH_CACHE; i++) {
        struct ft_graph_entry *entry = &session->graphs[i];
        if (entry->last_used && shapes_equal(&entry->graph.shape, &shape)) {
            entry->last_used = ++session->graph_clock;
            *graph = &entry->graph;
            return FT_OK;
        }
        if (entry->last_used < oldest->last_used)
            oldest = entry;
    }
    ft_arena_fini(&oldest->arena);
    oldest->last_used = 0;
    int status = build_graph(session, &shape, oldest, err);
    if (status != FT_OK)
        return status;
    oldest->last_used = ++session->graph_clock;
    *graph = &oldest->graph;
    return FT_OK;
}

/* ---- pools ---- */

/* Where a pool's memory comes from; one and the same arena unless there is a GPU. Several GPUs: slots and staging
 * buffers from each, and KV pages and states from addresses that stand for their parts. */
struct ft_pools {
    struct ft_arena *host, *pinned /* both sides address it */, *device[FT_GPUS_MAX], *spread;
};

static uint32_t gpu_count_of(const struct ft_plan *plan)
{
    return FT_MAX(plan->gpu_count, 1u);
}

static const struct ft_memory *memory_of(const struct ft_session *session)
{
    return session->cuda ? ft_lane_cuda_memory(session->cuda) : &ft_memory_host;
}

static int push_active(struct ft_active *a, struct ft_arena *arena, const struct ft_model *model,
                       uint32_t rows, struct ft_error *err)
{
    uint32_t experts = FT_MAX(model->expert_count, 1u);
    uint64_t pairs = (uint64_t)rows * model->topk;
    int status = FT_ARENA_PUSH(arena, experts, &a->expert, err);
#define PUSH(count, pointer)                                                                                 \
    if (status == FT_OK)                                                                                     \
    status = FT_ARENA_PUSH(arena, count, pointer, err)
    PUSH(experts, &a->rows);
    PUSH(experts + 1, &a->pair_begin);
    PUSH(pairs, &a->pair_row);
    PUSH(pairs, &a->pair_out);
    PUSH(experts, &a->slot);
    PUSH(experts, &a->last_used);
    PUSH(experts, &a->place);
    PUSH(experts, &a->reason);
    PUSH(experts, &a->victim);
    PUSH(experts, &a->evicted);
    PUSH(experts, &a->predicted_ns);
    PUSH(experts, &a->blob);
    PUSH(experts, &a->awaited);
    PUSH(experts, &a->ahead);
    PUSH(experts, &a->group);
    return status;
}

static int push_execute(struct ft_session *session, struct ft_pools *pools, struct ft_error *err)
{
    struct ft_arena *arena = pools->host;
    struct ft_execute *x = &session->step.x;
    const struct ft_model *model = session->options.model;
    uint32_t threads = thread_count_of(&session->plan);
    uint32_t tokens = session->plan.page_count * session->plan.page_tokens;
    x->scratch_count = ft_execute_scratch_count(model, tokens);
    int status = FT_ARENA_PUSH(pools->pinned, x->sets[FT_SET_PREFILL].space.count,
                               &x->sets[FT_SET_PREFILL].buffer, err);
    if (status == FT_OK && ft_plan_decode_rows(&session->plan))
        status = FT_ARENA_PUSH(pools->pinned, x->sets[FT_SET_DECODE].space.count,
                               &x->sets[FT_SET_DECODE].buffer, err);
    else
        x->sets[FT_SET_DECODE] = x->sets[FT_SET_PREFILL];
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, FT_MAX(model->rotary_dim / 2, 1u), &x->frequencies, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, threads, &x->scratch, err);
    for (uint32_t i = 0; status == FT_OK && i < threads; i++) {
        float *scratch;
        status = FT_ARENA_PUSH(arena, x->scratch_count, &scratch, err);
        if (status == FT_OK && !ft_arena_is_counting(arena))
            x->scratch[i] = scratch;
    }
    if (status == FT_OK)
        status = push_active(&x->active, arena, model, session->rows_max, err);
    return status;
}

static int push_step(struct ft_session *session, struct ft_pools *pools, struct ft_error *err)
{
    struct ft_arena *arena = pools->host;
    struct ft_step *step = &session->step;
    const struct ft_model *model = session->options.model;
    uint32_t threads = thread_count_of(&session->plan);
    uint64_t stride = step->staging_stride;
    step->link_max = FT_MAX(session->reserved_max, LINK_PENDING_MIN);
    step->todo_max = session->reserved_max + 8 * session->plan.tiling.tiles_max + 64;
    uint64_t wants = 0;
    for (uint32_t p = 0; p < model->ple_count; p++)
        wants += (uint64_t)model->ple[p].head_count * session->rows_max;
    int status = FT_OK;
    uint32_t trace_records = (uint32_t)FT_MIN(
        session->static_max + (uint64_t)model->layer_count * (session->reserved_max + model->expert_count) +
            1024,
        TRACE_RECORDS_MAX);
#define PUSH(count, pointer)                                                                                 \
    if (status == FT_OK)                                                                                     \
    status = FT_ARENA_PUSH(arena, count, pointer, err)
    PUSH(session->static_max + session->reserved_max, &step->counter);
    PUSH(session->reserved_max, &step->dynamic);
    PUSH(step->link_max, &step->link_jobs);
    PUSH((uint64_t)threads * step->todo_max, &step->todo);
    PUSH(threads, &step->traces);
    PUSH(threads, &step->traces_done);
    PUSH(threads, &step->pending);
    PUSH(wants, &step->wants);
    PUSH(model->layer_count, &step->layer_hits);
    PUSH(model->layer_count, &step->layer_misses);
#undef PUSH
    /* With a GPU two sets: one is read while the next step fills the other. */
    uint32_t sets = session->cuda ? 2 : 1;
    for (uint32_t i = 0; status == FT_OK && i < sets * threads; i++) {
        struct ft_trace_record *records;
        status = FT_ARENA_PUSH(arena, trace_records, &records, err);
        if (status == FT_OK && !ft_arena_is_counting(arena)) {
            struct ft_trace_ring ring = {.records = records, .capacity = trace_records};
            *(i < threads ? &step->traces[i] : &step->traces_done[i - threads]) = ring;
        }
    }
    if (!session->cuda)
        step->traces_done = step->traces;
    session->record_max = (uint64_t)trace_records * threads;
    if (status == FT_OK && session->options.trace)
        status = FT_ARENA_PUSH(arena, session->record_max, &session->records, err);
    uint32_t buffers = session->plan.device != FT_DEVICE_NONE ? 2 * gpu_count_of(&session->plan) : 0;
    for (uint32_t i = 0; status == FT_OK && i < buffers; i++)
        status = ft_arena_push(pools->device[i / 2], session->plan.staging_experts, stride,
                               (void **)&step->staging[i / 2][i % 2], err);
    return status;
}

static bool may_look_ahead(const struct ft_session *session)
{
    const struct ft_session_options *o = &session->options;
    return o->policy->looks_ahead && !o->policy_params.no_look_ahead &&
           session->plan.device != FT_DEVICE_NONE && session->plan.strategy != FT_STRATEGY_FUSED;
}

/* Landing buffers of a part with so many blobs for the layers [layer_begin, layer_end): a small share of them, and none
 * where nothing will ever miss. */
static uint32_t landing_count(const struct ft_session *session, uint32_t blobs, uint32_t layer_begin,
                              uint32_t layer_end)
{
    const struct ft_session_options *o = &session->options;
    uint64_t experts = 0;
    for (uint32_t i = layer_begin; i < layer_end; i++)
        experts += o->model->layers[i].dense ? 0 : o->model->expert_count;
    bool wanted = may_look_ahead(session) && o->policy->look_ahead && blobs < experts;
    return wanted ? FT_MIN(FT_LANDINGS_MAX, blobs / BLOBS_PER_LANDING) : 0;
}

static int push_slots(struct ft_session *session, struct ft_pools *pools, struct ft_error *err)
{
    const struct ft_model *model = session->options.model;
    const struct ft_plan *plan = &session->plan;
    struct ft_step *step = &session->step;
    struct ft_slots_part parts[FT_GPUS_MAX] = {0};
    uint32_t count = gpu_count_of(plan), slot = 0, layer = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t end = count > 1 ? plan->gpus[i].layer_end : model->layer_count;
        uint32_t blobs = count > 1                        ? plan->gpus[i].slot_end - plan->gpus[i].slot_begin
                         : plan->device == FT_DEVICE_NONE ? 0
                                                          : plan->slot_count;
        uint32_t landings = landing_count(session, blobs, layer, end);
        parts[i] = (struct ft_slots_part){
            .layer_end = end, .begin = slot, .end = slot + blobs - landings, .landing_count = landings};
        slot = parts[i].end;
        layer = end;
    }
    int status =
        ft_slots_init_parts(&step->slots, pools->host, pools->device, parts, count, step->staging_stride,
                            model->layer_count, FT_MAX(model->expert_count, 1u), err);
    return status == FT_OK ? ft_look_ahead_init(step, pools->host, may_look_ahead(session),
                                                plan->sequences_max * FT_MAX(model->topk, 1u), err)
                           : status;
}

static int push_batch(struct ft_batch *batch, uint32_t rows, uint32_t sequences, struct ft_arena *arena,
                      struct ft_error *err)
{
    int status = FT_ARENA_PUSH(arena, rows, &batch->token, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, rows, &batch->position, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, rows, &batch->row_sequence, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, rows, &batch->logit_row, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, sequences, &batch->sequences, err);
    return status;
}

static int push_batches(struct ft_session *session, struct ft_arena *arena, struct ft_error *err)
{
    uint32_t sequences = session->plan.sequences_max;
    int status = push_batch(&session->chunk.batch, session->rows_max, sequences, arena, err);
    if (status == FT_OK)
        status = push_batch(&session->decode, sequences, sequences, arena, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, sequences + 1, &session->pace.alone, err);
    return status;
}

/* Everything of the session's lifetime; run once to count, once to fill. */
static int push_all(struct ft_session *session, struct ft_pools *pools, struct ft_error *err)
{
    struct ft_arena *arena = pools->host;
    const struct ft_model *model = session->options.model;
    const struct ft_plan *plan = &session->plan;
    struct ft_step *step = &session->step;
    uint64_t state_count = step->x.state.count;
    int status = push_execute(session, pools, err);
    if (status == FT_OK)
        status = push_step(session, pools, err);
    if (status == FT_OK)
        status = push_batches(session, arena, err);
    if (status == FT_OK)
        status = push_slots(session, pools, err);
    if (status == FT_OK)
        status =
            ft_kv_init(&session->kv, arena, pools->spread, memory_of(session), model, plan->page_count, err);
    if (status == FT_OK)
        status = ft_snapshots_init(&session->snapshots, arena, plan->snapshot_bytes, state_count,
                                   plan->page_count * plan->page_tokens, plan->page_tokens, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, plan->sequences_max, &session->sequences, err);
    for (uint32_t i = 0; status == FT_OK && i < plan->sequences_max; i++) {
        float *state;
        status = FT_ARENA_PUSH(pools->spread, state_count, &state, err);
        if (status == FT_OK && !ft_arena_is_counting(arena))
            session->sequences[i].state = state;
    }
    if (status == FT_OK)
        status =
            ft_arena_push(arena, 1, session->options.policy->state_bytes(&session->options.policy_params),
                          &step->policy_state, err);
    return status;
}

/* Sizes that the arena passes need: jobs of the largest step. */
static int measure(struct ft_session *session, struct ft_error *err)
{
    const struct ft_model *model = session->options.model;
    struct ft_arena counting;
    struct ft_graph graph;
    struct ft_shape shape = {.rows = session->rows_max,
                             .sequences = FT_MIN(session->plan.sequences_max, session->rows_max),
                             .logit_rows = FT_MIN(session->plan.logit_rows_max, session->rows_max),
                             .prefill = true};
    ft_arena_count(&counting, "graph");
    int status = ft_graph_build(&graph, &counting, model, &shape, &session->plan.tiling, err);
    session->static_max = graph.static_count;
    session->reserved_max = graph.reserved_count;
    return status;
}

/* With a GPU the CPU computes experts of decode rows alone. */
static void init_sets(struct ft_session *session)
{
    const struct ft_plan *plan = &session->plan;
    const struct ft_model *model = session->options.model;
    struct ft_activations *sets = session->step.x.sets;
    uint32_t rows = ft_plan_decode_rows(plan);
    if (plan->device == FT_DEVICE_CUDA)
        ft_workspace_init_host(&sets[FT_SET_PREFILL].space, model, session->rows_max, rows ? 0 : 1);
    else
        ft_workspace_init(&sets[FT_SET_PREFILL].space, model, session->rows_max, plan->sequences_max,
                          plan->logit_rows_max);
    if (plan->device == FT_DEVICE_CUDA && rows)
        ft_workspace_init_host(&sets[FT_SET_DECODE].space, model, rows, rows);
    else if (rows)
        ft_workspace_init(&sets[FT_SET_DECODE].space, model, rows, rows, FT_MIN(rows, plan->logit_rows_max));
}

static void init_execute(struct ft_session *session)
{
    struct ft_execute *x = &session->step.x;
    const struct ft_session_options *o = &session->options;
    x->model = o->model;
    x->weights = o->weights;
    x->kernels = &session->kernels;
    x->routing = o->routing;
    ft_state_layout_init(&x->state, o->model);
    ft_kv_layout_init(&x->kv, o->model);
    init_sets(session);
    for (uint32_t p = 0; o->ple && p < o->model->ple_count; p++) {
        x->ple_dtype[p] = ft_row_table_dtype(o->ple, p);
        x->ple_scale[p] = ft_row_table_scale(o->ple, p);
    }
    uint64_t stride = 0;
    for (uint32_t i = 0; i < o->model->layer_count; i++) {
        if (!o->model->layers[i].dense)
            stride = FT_MAX(stride, o->weights->layers[i].expert_layout.stride);
    }
    session->step.staging_stride = FT_MAX(stride, 64u);
}

static void init_step(struct ft_session *session)
{
    struct ft_step *step = &session->step;
    const struct ft_session_options *o = &session->options;
    step->plan = &session->plan;
    step->model = o->model;
    step->weights = o->weights;
    step->policy = o->policy;
    step->workers = session->plan.workers;
    step->thread_count = thread_count_of(&session->plan);
    step->link_bytes_per_s = o->link_bytes_per_s;
    step->link_delay_ns_max = o->link_delay_ns_max;
    step->link_random = o->seed * 2 + 1; /* xorshift must not start at 0 */
    step->ple = o->model->ple_count ? o->ple : NULL;
    uint64_t rows_max = 0;
    for (uint32_t p = 0; p < o->model->ple_count; p++)
        rows_max += (uint64_t)o->model->ple[p].head_count * session->rows_max;
    step->row_options = (struct ft_row_reader_options){
        .backend = session->plan.ple_in_ram ? FT_ROWS_RAM : FT_ROWS_DISK,
        .io_backend = o->ple_io,
        .rows_max = (uint32_t)rows_max,
    };
    step->io_timeout_ns = 30000000000ull;
    /* With a core for each worker and one more it may spin while workers work. */
    uint32_t cores = o->topology ? o->topology->core_count : 1;
    step->io_ahead_ns = cores > 1 ? IO_AHEAD_NS : 0;
    step->io_spin_ns = cores > step->workers ? IO_SPIN_NS : 0;
    step->spins_for_end = step->cuda && cores > step->workers + 1; /* the GPU's driver has the other one */
    ft_clock_init(&step->clock);
    ft_park_init(&step->session_park);
    ft_park_init(&step->device.park);
    ft_park_init(&step->link.park);
    ft_park_init(&step->io.park);
}

static int start_gpu(struct ft_session *session, struct ft_error *err)
{
    const struct ft_session_options *o = &session->options;
    struct ft_lane_cuda_options options = {.weights = o->weights,
                                           .rows_max = session->rows_max,
                                           .sequences_max = session->plan.sequences_max,
                                           .logit_rows_max = session->plan.logit_rows_max,
                                           .pages_max = session->plan.page_count,
                                           .handshake = o->handshake,
                                           .link_bytes_per_s = o->link_bytes_per_s,
                                           .topology = o->pin ? o->topology : NULL};
    return ft_lane_cuda_start(session->cuda, &session->step, &options, err);
}

static int open_lanes(struct ft_session *session, struct ft_error *err)
{
    struct ft_step *step = &session->step;
    struct ft_lane_cpu_options cpu = {.topology = session->options.pin ? session->options.topology : NULL,
                                      .clock = &step->clock,
                                      .workers = step->workers,
                                      .producers = FT_STEP_THREADS,
                                      .ring_entries = RING_ENTRIES,
                                      .backlog_entries = step->todo_max,
                                      .spin_ns = session->cuda ? SPIN_GPU_NS : SPIN_NS,
                                      .producers_first = session->plan.device != FT_DEVICE_NONE,
                                      .run = ft_step_run_cpu,
                                      .idle = ft_step_idle_cpu,
                                      .spare = ft_step_spare_cpu,
                                      .room = ft_step_room_cpu,
                                      .ctx = step};
    int status = ft_lane_cpu_open(&step->cpu, &cpu, err);
    if (status == FT_OK)
        status = ft_lane_io_open(step, err);
    if (status == FT_OK)
        status = ft_lane_host_open(step, err);
    if (status == FT_OK && session->cuda)
        status = start_gpu(session, err);
    if (status != FT_OK)
        return status;
    const char *rows = step->rows ? ft_row_reader_note(step->rows) : "";
    const char *gpu = session->cuda ? ft_lane_cuda_note(session->cuda) : "";
    snprintf(session->note, sizeof session->note, "%s%s%s", rows, rows[0] && gpu[0] ? "; " : "", gpu);
    return FT_OK;
}

static int check_routing(const struct ft_routing *routing, const struct ft_model *model, struct ft_error *err)
{
    if (routing->layer_count != model->layer_count || routing->topk != model->topk || !routing->step_count ||
        !routing->row_count)
        return ft_error_set(
            err, FT_USAGE,
            "the given routing has %u steps, %u layers, %u rows and %u experts a row; the model "
            "has %u layers and %u experts a row",
            routing->step_count, routing->layer_count, routing->row_count, routing->topk, model->layer_count,
            model->topk);
    uint64_t rows = (uint64_t)routing->step_count * routing->layer_count * routing->row_count;
    for (uint64_t r = 0; r < rows; r++) {
        const uint16_t *ids = routing->ids + r * routing->topk;
        for (uint32_t j = 0; j < routing->topk; j++) {
            bool repeated = false;
            for (uint32_t i = 0; i < j; i++)
                repeated |= ids[i] == ids[j];
            if (repeated || ids[j] >= model->expert_count)
                return ft_error_set(
                    err, FT_USAGE, "row %llu of the given routing has expert %u %s; the model has %u",
                    (unsigned long long)r, ids[j], repeated ? "twice" : "too", model->expert_count);
        }
    }
    return FT_OK;
}

static int check_options(const struct ft_session_options *o, struct ft_error *err)
{
    if (o->model->ple_count && !o->ple)
        return ft_error_set(err, FT_USAGE, "the model has PLE tables and none were given to the session");
    if (o->policy->abi != FT_POLICY_ABI)
        return ft_error_set(err, FT_USAGE, "policy %s has ABI %u, this engine wants %u", o->policy->name,
                            o->policy->abi, FT_POLICY_ABI);
    int status = o->routing ? check_routing(o->routing, o->model, err) : FT_OK;
    return status == FT_OK ? ft_plan_check(o->plan, o->model, err) : status;
}

/* Several GPUs: where the parts of KV pages and states lie. */
static int spread_pools(struct ft_session *session, struct ft_error *err)
{
    const struct ft_model *model = session->options.model;
    const struct ft_plan *plan = &session->plan;
    uint64_t kv_bytes[FT_GPUS_MAX], state_bytes[FT_GPUS_MAX];
    for (uint32_t i = 0; i < plan->gpu_count; i++) {
        struct ft_state_layout state;
        struct ft_kv_layout kv;
        ft_state_layout_init_layers(&state, model, plan->gpus[i].layer_begin, plan->gpus[i].layer_end);
        ft_kv_layout_init_layers(&kv, model, plan->gpus[i].layer_begin, plan->gpus[i].layer_end);
        state_bytes[i] = state.count * sizeof(float);
        kv_bytes[i] = kv.count * sizeof(float);
    }
    int status =
        ft_lane_cuda_spread(session->cuda, FT_CUDA_SPREAD_KV, session->kv.memory,
                            session->kv.layout.count * sizeof(float), plan->page_count, kv_bytes, err);
    /* one after the other: a state's size is a multiple of what arenas align to */
    return status != FT_OK
               ? status
               : ft_lane_cuda_spread(session->cuda, FT_CUDA_SPREAD_STATE, session->sequences[0].state,
                                     session->step.x.state.count * sizeof(float), plan->sequences_max,
                                     state_bytes, err);
}

static int take_gpu_arenas(struct ft_session *session, const struct ft_pools *counted, struct ft_error *err)
{
    bool spread = session->plan.gpu_count > 1;
    int status =
        ft_lane_cuda_arena(session->cuda, 0, &session->pinned, FT_TIER_RAM, counted->pinned->used, err);
    for (uint32_t i = 0; status == FT_OK && i < gpu_count_of(&session->plan); i++)
        status = ft_lane_cuda_arena(session->cuda, i, &session->device[i], FT_TIER_DEVICE,
                                    counted->device[i]->used, err);
    return status == FT_OK && spread
               ? ft_lane_cuda_reserve(session->cuda, &session->spread, counted->spread->used, err)
               : status;
}

/* One arena for all pools, or some with a GPU: counted, then filled. */
static int make_pools(struct ft_session *session, struct ft_error *err)
{
    bool gpu = session->cuda != NULL, spread = session->plan.gpu_count > 1;
    struct ft_arena host, pinned, devices[FT_GPUS_MAX], addresses;
    ft_arena_count(&host, "session");
    ft_arena_count(&pinned, "pinned");
    ft_arena_count(&addresses, "spread");
    struct ft_pools counting = {.host = &host, .pinned = gpu ? &pinned : &host},
                    pools = {.host = &session->arena, .pinned = gpu ? &session->pinned : &session->arena};
    for (uint32_t i = 0; i < gpu_count_of(&session->plan); i++) {
        ft_arena_count(&devices[i], "device");
        counting.device[i] = gpu ? &devices[i] : &host;
        pools.device[i] = gpu ? &session->device[i] : &session->arena;
    }
    counting.spread = spread ? &addresses : counting.device[0];
    pools.spread = spread ? &session->spread : pools.device[0];
    int status = push_all(session, &counting, err);
    if (status == FT_OK)
        status = ft_arena_init(&session->arena, "session", host.used, err);
    if (status == FT_OK && gpu)
        status = take_gpu_arenas(session, &counting, err);
    if (status == FT_OK)
        status = push_all(session, &pools, err);
    if (status == FT_OK && spread)
        status = spread_pools(session, err);
    session->step.slots.is_device = gpu;
    return status;
}

static int open_gpus(struct ft_session *session, struct ft_error *err)
{
    const struct ft_plan *plan = &session->plan;
    if (plan->gpu_count <= 1)
        return ft_lane_cuda_open(&session->cuda, session->options.gpu, err);
    int status = ft_lane_cuda_open(&session->cuda, plan->gpus[0].id, err);
    for (uint32_t i = 1; status == FT_OK && i < plan->gpu_count; i++)
        status = ft_lane_cuda_join(session->cuda, plan->gpus[i].id, err);
    return status;
}

static int open_parts(struct ft_session *session, struct ft_error *err)
{
    const struct ft_session_options *o = &session->options;
    session->rows_max = ft_plan_rows_max(o->plan);
    int status = ft_kernels_init(&session->kernels, o->isa, err);
    if (status == FT_OK && o->plan->device == FT_DEVICE_CUDA)
        status = open_gpus(session, err);
    if (status != FT_OK)
        return status;
    session->step.cuda = session->cuda;
    /* Counted and told to the policy while the next step computes its first layer; a trace is written before. */
    if (session->cuda && !o->trace) {
        session->step.meanwhile = ft_session_collect_records;
        session->step.meanwhile_context = session;
        session->step.meanwhile_learns = o->policy->observe || o->policy->step_end;
    }
    init_execute(session);
    status = measure(session, err);
    if (status == FT_OK)
        status = make_pools(session, err);
    if (status != FT_OK)
        return status;
    ft_execute_use(&session->step.x, FT_SET_DECODE);
    ft_model_rotary(o->model, session->step.x.frequencies, &session->step.x.rotary_scale);
    init_step(session);
    if (o->policy->init)
        status = o->policy->init(session->step.policy_state, &o->policy_params, err);
    return status == FT_OK ? open_lanes(session, err) : status;
}

int ft_session_open(struct ft_session **out, const struct ft_session_options *options, struct ft_error *err)
{
    *out = NULL;
    struct ft_session *session = NULL;
    if (posix_memalign((void **)&session, 64, sizeof *session))
        return ft_error_set(err, FT_MEMORY, "no memory for a session");
    memset(session, 0, sizeof *session);
    session->options = *options;
    session->plan = *options->plan;
    session->weights = *options->weights;
    session->options.weights = &session->weights;
    if (!session->options.policy)
        session->options.policy = &ft_policy_safe;
    int status = check_options(&session->options, err);
    if (status == FT_OK)
        status = open_parts(session, err);
    if (status != FT_OK) {
        ft_session_close(session);
        return status;
    }
    *out = session;
    return FT_OK;
}

bool ft_session_close(struct ft_session *session)
{
    if (!session)
        return true;
    if (session->arena.base) {
        ft_lane_host_close(&session->step);
        if (session->cuda)
            ft_lane_cuda_stop(session->cuda);
        ft_lane_io_close(&session->step);
        /* A lane that is stuck may still touch the session's memory: leaving it behind is the lesser evil. */
        bool stuck = session->step.device.started || session->step.link.started || session->step.io.started;
        if (stuck || session->broken)
            return false;
        ft_lane_cpu_close(session->step.cpu);
    }
    for (uint32_t i = 0; session->sequences && i < session->plan.sequences_max; i++) {
        free(session->sequences[i].tokens);
        free(session->sequences[i].pages);
        free(session->sequences[i].page_data);
    }
    for (uint32_t i = 0; i < FT_GRAPH_CACHE; i++)
        if (session->graphs[i].arena.base)
            ft_arena_fini(&session->graphs[i].arena);
    ft_arena_fini(&session->arena);
    if (session->cuda)
        ft_lane_cuda_close(session->cuda);
    free(session);
    return true;
}

void ft_session_trace_header(const struct ft_session *session, struct ft_trace_header *header)
{
    const struct ft_plan *plan = &session->plan;
    const struct ft_model *model = session->options.model;
    static const char *const names[FT_STEP_THREADS] = {"session", "device", "link", "io"};
    memset(header, 0, sizeof *header);
    snprintf(header->model, sizeof header->model, "%s", model->name);
    snprintf(header->strategy, sizeof header->strategy, "%s", ft_strategy_name(plan->strategy));
    snprintf(header->device, sizeof header->device, "%s", ft_device_name(plan->device));
    snprintf(header->isa, sizeof header->isa, "%s", ft_isa_name(session->kernels.isa));
    header->layer_count = model->layer_count;
    header->expert_count = model->expert_count;
    header->topk = model->topk;
    header->workers = plan->workers;
    header->slot_count = session->step.slots.count;
    header->expert_bytes = session->step.staging_stride;
    /* Several GPUs: a row for what each of them says, the first one's where one alone has its. */
    uint32_t threads = session->step.thread_count, gpus = plan->gpu_count,
             link = ft_step_thread(&session->step, FT_STEP_LINK);
    header->thread_count = FT_MIN(threads + (gpus > 1 ? gpus - 1 : 0), FT_TRACE_THREADS_MAX);
    for (uint32_t i = 0; i < header->thread_count; i++) {
        if (i < plan->workers)
            snprintf(header->thread_names[i], sizeof header->thread_names[i], "cpu %u", i);
        else if (gpus > 1 && (i == link || i >= threads))
            snprintf(header->thread_names[i], sizeof header->thread_names[i], "gpu %u",
                     plan->gpus[i == link ? 0 : i - threads + 1].id);
        else
            snprintf(header->thread_names[i], sizeof header->thread_names[i], "%s", names[i - plan->workers]);
    }
}
