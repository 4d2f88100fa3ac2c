/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing a session: pools (session_pools.c), then the lanes start. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jobs/lane_cuda.h"
#include "jobs/session_internal.h"

#define RING_ENTRIES 1024u
#define SPIN_NS 50000u
#define SPIN_GPU_NS                                                                                          \
    1000000u /* workers of a GPU step that has CPU experts wait out the dense part of a layer */
#define IO_AHEAD_NS 50000u
#define IO_SPIN_NS 100000u

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
        status = ft_session_make_pools(session, err);
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
