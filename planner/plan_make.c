/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/plan_make.h"
#include "planner/plan_make_internal.h"

#include <stdio.h>
#include <string.h>

#define SEQUENCES_DEFAULT 8u
#define KV_TOKENS_DEFAULT 8192u
#define CHUNK_ROWS_DEFAULT 128u
#define CHUNK_ROWS_GPU 2048u
#define SNAPSHOTS_DEFAULT 8u
#define SNAPSHOT_BYTES_DEFAULT (UINT64_C(64) << 20)
#define HOST_SLOT_DIVISOR 4u
#define SERVICE_CORES_FROM 8u
#define CHUNK_ROWS_SMALLEST 8u
#define SMALLEST_ROUNDS 64u

static bool needs_device(enum ft_strategy strategy)
{
    return strategy == FT_STRATEGY_FUSED || strategy == FT_STRATEGY_OFFLOAD || strategy == FT_STRATEGY_HYBRID;
}

static int check_options(const struct ft_plan_options *options, struct ft_error *err)
{
    if (options->strategy >= FT_STRATEGY_COUNT || options->device >= FT_DEVICE_COUNT)
        return ft_error_set(err, FT_INTERNAL, "plan: strategy %d or device %d does not exist",
                            (int)options->strategy, (int)options->device);
    if (!(options->slot_rate <= 1))
        return ft_error_set(err, FT_USAGE, "--moe-cache-rate %g is not a share of the experts: give 0 to 1",
                            options->slot_rate);
    if (!(options->fetch_share <= 1))
        return ft_error_set(err, FT_USAGE, "the share of misses to fetch is %g: give 0 to 1",
                            options->fetch_share);
    if (options->sequences_max > FT_SEQUENCES_MAX)
        return ft_error_set(err, FT_USAGE, "%u sequences at once were asked for, at most %u are possible",
                            options->sequences_max, FT_SEQUENCES_MAX);
    return FT_OK;
}

static int choose_device(struct ft_plan_draft *draft, struct ft_error *err)
{
    const struct ft_plan_options *options = draft->options;
    bool gpu = draft->machine->device == FT_DEVICE_CUDA;
    if (options->device_given) {
        if (options->device == FT_DEVICE_CUDA && !gpu)
            return ft_error_set(err, FT_UNSUPPORTED,
                                "--device cuda: this machine has no usable GPU; --device host runs "
                                "the same plan on a core");
        if (options->device == FT_DEVICE_NONE && needs_device(options->strategy))
            return ft_error_set(err, FT_USAGE,
                                "strategy %s needs a device: give --device host, or --strategy cpu",
                                ft_strategy_name(options->strategy));
        draft->plan->device = options->device;
        return FT_OK;
    }
    draft->plan->device = gpu                               ? FT_DEVICE_CUDA
                          : needs_device(options->strategy) ? FT_DEVICE_HOST
                                                            : FT_DEVICE_NONE;
    return FT_OK;
}

static int choose_workers(struct ft_plan_draft *draft, struct ft_error *err)
{
    uint32_t usable = FT_MIN(FT_MAX(draft->machine->cores_usable, 1u), (uint32_t)FT_WORKERS_MAX);
    uint32_t wanted = draft->options->workers;
    if (wanted > usable)
        return ft_error_set(err, FT_USAGE,
                            "%u CPU workers were asked for, but %u cores are usable (affinity, quota, one "
                            "thread per core): more would only wait for each other; give at most %u",
                            wanted, usable, usable);
    /* One core for the device's driver; on a large machine with a GPU another for the session and io threads,
     * which would else push a worker aside in every step. */
    uint32_t spare = draft->plan->device == FT_DEVICE_NONE || usable <= 2                    ? 0
                     : draft->plan->device == FT_DEVICE_CUDA && usable >= SERVICE_CORES_FROM ? 2
                                                                                             : 1;
    draft->plan->workers = wanted ? wanted : usable - spare;
    return FT_OK;
}

/* 0 GPUs: one, or none. */
static int choose_gpus(struct ft_plan_draft *draft, struct ft_error *err)
{
    const struct ft_plan_options *options = draft->options;
    uint32_t count = draft->plan->device == FT_DEVICE_CUDA ? draft->machine->gpu_count : 1,
             layers = draft->model->layer_count;
    if (options->gpu_limit_count > 1 && draft->plan->device != FT_DEVICE_CUDA)
        return ft_error_set(err, FT_USAGE,
                            "--vram names %u limits, for as many GPUs, but the plan is for --device %s: give "
                            "one limit, or --device cuda",
                            options->gpu_limit_count, ft_device_name(draft->plan->device));
    if (options->gpu_limit_count > 1 && options->gpu_limit_count != count)
        return ft_error_set(err, FT_USAGE,
                            "--vram names %u limits for %u GPUs: give one for each, or one for all",
                            options->gpu_limit_count, FT_MAX(count, 1u));
    if (count > FT_MIN((uint32_t)FT_GPUS_MAX, layers))
        return ft_error_set(
            err, FT_USAGE,
            "--gpus names %u GPUs and the model has %u layers, which are split over them: name at "
            "most %u",
            count, layers, FT_MIN((uint32_t)FT_GPUS_MAX, layers));
    draft->plan->gpu_count = count > 1 ? count : 0;
    return FT_OK;
}

/* Lanes of ops that never change: the rest follows the dense weights. */
static void choose_lanes(struct ft_plan *plan)
{
    bool device = plan->device != FT_DEVICE_NONE;
    plan->tiling = ft_graph_tiling_of(plan->workers);
    for (uint32_t op = 0; op < FT_OP_COUNT; op++) {
        enum ft_lane lane = device ? FT_LANE_DEVICE : FT_LANE_CPU;
        enum ft_reason reason = device ? FT_REASON_FIXED_LANE : FT_REASON_NO_DEVICE;
        switch ((enum ft_op)op) {
        case FT_OP_PLE_READ:
            lane = FT_LANE_IO;
            reason = FT_REASON_FIXED_LANE;
            break;
        case FT_OP_EXPERT_UP:
        case FT_OP_EXPERT_DOWN:
            lane = FT_LANE_CPU;
            reason = FT_REASON_FIXED_LANE;
            break;
        case FT_OP_FETCH: /* without a device never used: inline costs nothing */
            lane = device ? FT_LANE_LINK : FT_LANE_INLINE;
            break;
        case FT_OP_EXPERT_DEVICE:
            lane = device ? FT_LANE_DEVICE : FT_LANE_INLINE;
            break;
        case FT_OP_JOIN:
        case FT_OP_END:
        case FT_OP_RESERVED:
            lane = FT_LANE_INLINE;
            reason = FT_REASON_FIXED_LANE;
            break;
        default:
            break;
        }
        plan->tiling.lane_of_op[op] = (uint8_t)lane;
        plan->reason_of_op[op] = (uint8_t)reason;
    }
}

static void set_knob(struct ft_plan_draft *draft, enum ft_plan_knob knob, uint64_t given, uint64_t standard,
                     uint64_t floor)
{
    draft->given[knob] = given != 0;
    draft->knob[knob] = given ? given : standard;
    draft->floor[knob] = FT_MIN(floor, draft->knob[knob]);
}

static uint64_t default_snapshot_bytes(const struct ft_plan_draft *draft)
{
    if (!ft_model_is_recurrent(draft->model))
        return 0;
    uint64_t most = FT_MAX(SNAPSHOT_BYTES_DEFAULT, ft_plan_times(2, draft->state_bytes));
    return FT_MIN(ft_plan_times(SNAPSHOTS_DEFAULT, draft->state_bytes), most);
}

/* What does not depend on the strategy. */
static void choose_sizes(struct ft_plan_draft *draft)
{
    const struct ft_plan_options *options = draft->options;
    uint32_t positions = draft->model->position_max ? draft->model->position_max : KV_TOKENS_DEFAULT;
    set_knob(draft, FT_KNOB_SEQUENCES, options->sequences_max, SEQUENCES_DEFAULT, 1);
    set_knob(draft, FT_KNOB_KV, options->kv_tokens, FT_MIN(positions, KV_TOKENS_DEFAULT),
             draft->plan->page_tokens);
    set_knob(draft, FT_KNOB_CHUNK, options->chunk_rows,
             draft->plan->device == FT_DEVICE_CUDA ? CHUNK_ROWS_GPU : CHUNK_ROWS_DEFAULT, 1);
    draft->given[FT_KNOB_SNAPSHOTS] = options->snapshot_given;
    draft->knob[FT_KNOB_SNAPSHOTS] =
        options->snapshot_given ? options->snapshot_bytes : default_snapshot_bytes(draft);
}

static uint64_t default_slots(const struct ft_plan_draft *draft)
{
    uint64_t busy = ft_plan_times(draft->model->topk, draft->knob[FT_KNOB_SEQUENCES]);
    uint64_t wanted = FT_MAX(draft->expert_count / HOST_SLOT_DIVISOR, busy);
    return FT_MIN(FT_MIN(draft->expert_count, wanted), (uint64_t)FT_SLOTS_DEFAULT_MAX);
}

/* Slots of a strategy that is settled. */
static void choose_slots(struct ft_plan_draft *draft)
{
    const struct ft_plan_options *options = draft->options;
    const struct ft_plan *plan = draft->plan;
    uint64_t given = options->slot_count;
    if (!given && options->slot_rate > 0)
        given = FT_MAX((uint64_t)(options->slot_rate * (double)draft->expert_count + 0.5), UINT64_C(1));
    given = FT_MIN(given, draft->expert_count);
    if (plan->device == FT_DEVICE_NONE)
        set_knob(draft, FT_KNOB_SLOTS, 0, 0, 0);
    else if (plan->strategy == FT_STRATEGY_FUSED)
        set_knob(draft, FT_KNOB_SLOTS, draft->expert_count, 0, draft->expert_count);
    else if (plan->strategy == FT_STRATEGY_CPU)
        set_knob(draft, FT_KNOB_SLOTS, given, 0, 0);
    else
        set_knob(draft, FT_KNOB_SLOTS, given, default_slots(draft), FT_MAX(plan->gpu_count, 1u));
}

static double measured_share(const struct ft_machine *machine)
{
    double both = machine->link_overlap_bytes_per_s + machine->cpu_overlap_bytes_per_s;
    return both > 0 && machine->link_overlap_bytes_per_s > 0 ? machine->link_overlap_bytes_per_s / both : -1;
}

static void resolve_auto(struct ft_plan_draft *draft)
{
    struct ft_plan *plan = draft->plan;
    size_t room = sizeof plan->strategy_reason;
    if (plan->device == FT_DEVICE_NONE) {
        plan->strategy = FT_STRATEGY_CPU;
        snprintf(plan->strategy_reason, room, "auto: there is no device, every expert runs on the CPU");
        return;
    }
    plan->strategy = FT_STRATEGY_FUSED;
    choose_slots(draft);
    ft_plan_draft_derive(draft);
    if (plan->fits && !draft->options->slot_count && !(draft->options->slot_rate > 0)) {
        snprintf(plan->strategy_reason, room, "auto: all %llu experts fit the device",
                 (unsigned long long)draft->expert_count);
        return;
    }
    plan->strategy = FT_STRATEGY_AUTO; /* its policy chooses per layer */
    if (measured_share(draft->machine) > 0)
        snprintf(plan->strategy_reason, room,
                 "what ends first, layer by layer; link and CPU together were measured at %.1f + %.1f GB/s",
                 draft->machine->link_overlap_bytes_per_s / 1e9,
                 draft->machine->cpu_overlap_bytes_per_s / 1e9);
    else
        snprintf(plan->strategy_reason, room,
                 "what ends first, layer by layer; link and CPU were not measured%s",
                 draft->options->deterministic ? " (--deterministic): defaults stay" : " yet");
}

static void choose_strategy(struct ft_plan_draft *draft)
{
    struct ft_plan *plan = draft->plan;
    plan->strategy = draft->options->strategy;
    snprintf(plan->strategy_reason, sizeof plan->strategy_reason, "--strategy %s",
             ft_strategy_name(plan->strategy));
    plan->fetch_share = 0;
    if (plan->strategy == FT_STRATEGY_AUTO)
        resolve_auto(draft);
    if (plan->strategy == FT_STRATEGY_OFFLOAD || plan->strategy == FT_STRATEGY_FUSED)
        plan->fetch_share = 1;
    if (plan->strategy == FT_STRATEGY_HYBRID) {
        double measured = measured_share(draft->machine);
        plan->fetch_share = draft->options->fetch_share >= 0 ? draft->options->fetch_share
                            : measured > 0                   ? measured
                                                             : 0.5;
    }
}

static void begin_draft(struct ft_plan_draft *draft)
{
    struct ft_state_layout state;
    struct ft_kv_layout kv;
    ft_state_layout_init(&state, draft->model);
    ft_kv_layout_init(&kv, draft->model);
    draft->expert_count = (uint64_t)draft->sizes->moe_layer_count * draft->model->expert_count;
    draft->state_bytes = ft_plan_times(state.count, sizeof(float));
    draft->page_bytes = ft_plan_times(kv.count, sizeof(float));
    memset(draft->plan, 0, sizeof *draft->plan);
    draft->plan->page_tokens = kv.page_tokens;
    draft->plan->deterministic = draft->options->deterministic;
    draft->plan->dense = draft->sizes->dense;
    draft->plan->ple_in_ram = draft->options->ple_in_ram;
}

/* The plan, but for the advice. */
static int make_draft(struct ft_plan_draft *draft, struct ft_error *err)
{
    struct ft_plan *plan = draft->plan;
    int status = check_options(draft->options, err);
    if (status != FT_OK)
        return status;
    begin_draft(draft);
    status = choose_device(draft, err);
    if (status == FT_OK)
        status = choose_workers(draft, err);
    if (status == FT_OK)
        status = choose_gpus(draft, err);
    if (status != FT_OK)
        return status;
    choose_lanes(plan);
    choose_sizes(draft);
    if (plan->gpu_count)
        ft_plan_draft_split_layers(draft);
    choose_strategy(draft);
    choose_slots(draft);
    ft_plan_draft_settle(draft);
    for (uint32_t tier = 0; tier < FT_TIER_COUNT; tier++)
        if (plan->used_bytes[tier] == UINT64_MAX)
            return ft_error_set(err, FT_LIMIT,
                                "plan: the %s sizes of this model and these options overflow 64 bits",
                                ft_tier_name((enum ft_tier)tier));
    return FT_OK;
}

#define SWAP(type, a, b)                                                                                     \
    do {                                                                                                     \
        type kept = (a);                                                                                     \
        (a) = (b);                                                                                           \
        (b) = kept;                                                                                          \
    } while (0)

/* The head is on the last GPU, and a GPU has at least one layer: a small GPU may do in front only. */
static void advise_order(const struct ft_plan_draft *draft)
{
    uint32_t last = draft->plan->gpu_count - 1;
    for (uint32_t i = 0; draft->plan->gpu_count && i < last; i++) {
        struct ft_machine machine = *draft->machine;
        struct ft_plan_options options = *draft->options;
        struct ft_plan plan;
        struct ft_plan_draft trial = *draft;
        struct ft_error ignored;
        SWAP(uint32_t, machine.gpu_id[i], machine.gpu_id[last]);
        SWAP(uint64_t, machine.gpu_memory_bytes[i], machine.gpu_memory_bytes[last]);
        SWAP(uint64_t, options.gpu_bytes[i], options.gpu_bytes[last]);
        trial.machine = &machine;
        trial.options = &options;
        trial.plan = &plan;
        if (make_draft(&trial, &ignored) == FT_OK && plan.fits) {
            ft_plan_draft_advise_order(draft, &machine);
            return;
        }
    }
}

int ft_plan_make(const struct ft_model *model, const struct ft_weight_sizes *sizes,
                 const struct ft_machine *machine, const struct ft_plan_options *options,
                 struct ft_plan *plan, struct ft_error *err)
{
    struct ft_plan_draft draft = {
        .model = model, .sizes = sizes, .machine = machine, .options = options, .plan = plan};
    int status = make_draft(&draft, err);
    if (status != FT_OK)
        return status;
    if (!plan->fits) {
        ft_plan_draft_advise(&draft);
        advise_order(&draft);
    }
    return ft_plan_check(plan, model, err);
}

int ft_plan_smallest_gpu(const struct ft_model *model, const struct ft_weight_sizes *sizes,
                         const struct ft_machine *machine, const struct ft_plan_options *options,
                         struct ft_plan *plan, struct ft_error *err)
{
    struct ft_machine gpu = *machine;
    struct ft_plan_options wishes = *options;
    gpu.device = FT_DEVICE_CUDA;
    gpu.ram_bytes = gpu.device_memory_bytes = gpu.gpu_count = 0;
    wishes.gpu_limit_count = 0;
    wishes.strategy = FT_STRATEGY_OFFLOAD;
    wishes.device = FT_DEVICE_CUDA;
    wishes.device_given = true;
    wishes.sequences_max = FT_MAX(wishes.sequences_max, 1u);
    wishes.chunk_rows = wishes.chunk_rows ? wishes.chunk_rows : CHUNK_ROWS_SMALLEST;
    wishes.kv_tokens = wishes.kv_tokens
                           ? wishes.kv_tokens
                           : (uint32_t)FT_MIN(model->position_max ? model->position_max : KV_TOKENS_DEFAULT,
                                              KV_TOKENS_DEFAULT);
    wishes.slot_count = FT_MAX(model->topk * wishes.sequences_max, 1u);
    wishes.slot_rate = -1;
    wishes.ram_bytes = 0;
    wishes.device_bytes = 0;
    /* Staging is a share of the GPU's memory: the least that suffices is where need and memory meet. */
    for (uint32_t i = 0; i < SMALLEST_ROUNDS; i++) {
        int status = ft_plan_make(model, sizes, &gpu, &wishes, plan, err);
        uint64_t used = plan->used_bytes[FT_TIER_DEVICE];
        if (status != FT_OK || (wishes.device_bytes && plan->fits))
            return status;
        wishes.device_bytes = used;
    }
    return ft_error_set(err, FT_INTERNAL, "plan: no smallest GPU was found in %u rounds", SMALLEST_ROUNDS);
}
