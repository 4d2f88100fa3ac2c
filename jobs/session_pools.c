/* SPDX-License-Identifier: Apache-2.0 */
/* What a session holds: every pool is sized by the plan, counted in one pass and filled in a second one. */
#include <string.h>

#include "jobs/lane_cuda.h"
#include "jobs/session_internal.h"

#define BLOBS_PER_LANDING 16u /* of the pool */
#define TRACE_RECORDS_MAX (1u << 17)
#define LINK_PENDING_MIN 64u

static uint32_t thread_count_of(const struct ft_plan *plan)
{
    return plan->workers + FT_STEP_THREADS;
}

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
    return o->policy->looks_ahead && !o->policy_params.no_look_ahead && !o->policy_params.deterministic &&
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
int ft_session_make_pools(struct ft_session *session, struct ft_error *err)
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
