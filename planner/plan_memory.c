/* SPDX-License-Identifier: Apache-2.0 */
/* The memory table of a plan in the making: pools from knobs, sums, what to lower when it does not fit. */
#include "graph/bytes.h"
#include "graph/workspace.h"
#include "planner/plan_make_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define KV_TOKENS_USEFUL 2048u /* fewer only when one sequence does not fit otherwise */
#define STAGING_BYTES_MAX (UINT64_C(64) << 20)
#define STAGING_SHARE_OF_GPU 32u
#define WORKSPACE_BYTES_MAX (UINT64_C(48) << 20)
#define WORKSPACE_SHARE_OF_GPU 64u
#define CHUNK_ROWS_MIN 8u
#define GPUS_SAID 3u /* named one by one in a refusal */

static const struct {
    const char *option, *unit;
} knob_texts[FT_KNOB_COUNT] = {[FT_KNOB_SLOTS] = {"--moe-cache-size", ""},
                               [FT_KNOB_SNAPSHOTS] = {"--snapshot-bytes", ""},
                               [FT_KNOB_KV] = {"--kv-tokens", ""},
                               [FT_KNOB_CHUNK] = {"--chunk", " rows"},
                               [FT_KNOB_SEQUENCES] = {"--sequences", ""}};

struct bytes_text {
    char text[FT_BYTES_TEXT];
};

/* A value, so that it can stand among the arguments of say(). */
static struct bytes_text size_of(uint64_t bytes)
{
    struct bytes_text size;
    ft_bytes_format(bytes, size.text, sizeof size.text);
    return size;
}

/* ---- pools ---- */

static uint64_t tier_limit(const struct ft_plan_draft *draft, enum ft_tier tier)
{
    const struct ft_plan_options *options = draft->options;
    if (tier == FT_TIER_RAM)
        return options->ram_bytes ? options->ram_bytes : draft->machine->ram_bytes;
    if (tier == FT_TIER_DISK || draft->plan->device == FT_DEVICE_NONE)
        return 0;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < draft->plan->gpu_count; i++) {
        uint64_t limit = ft_plan_draft_gpu_limit(draft, i);
        if (!limit)
            return 0;
        sum = ft_plan_plus(sum, limit);
    }
    if (sum)
        return sum;
    if (options->device_bytes)
        return options->device_bytes;
    /* a machine with a GPU may still be asked for the host device, which has no memory of its own */
    return draft->machine->device == draft->plan->device ? draft->machine->device_memory_bytes : 0;
}

/* Memory of the device, of several GPUs that of the smallest: what each of them must be able to hold. */
static uint64_t least_limit(const struct ft_plan_draft *draft)
{
    uint64_t least = tier_limit(draft, FT_TIER_DEVICE);
    for (uint32_t i = 0; i < draft->plan->gpu_count; i++)
        least = FT_MIN(least, ft_plan_draft_gpu_limit(draft, i));
    return least;
}

static uint64_t workspace_bytes(const struct ft_plan_draft *draft, uint32_t chunk)
{
    struct ft_workspace workspace;
    uint32_t sequences = (uint32_t)draft->knob[FT_KNOB_SEQUENCES], rows = FT_MAX(chunk, sequences);
    ft_workspace_init(&workspace, draft->model, rows, sequences,
                      draft->options->all_logits ? rows : sequences);
    return ft_plan_times(workspace.count, sizeof(float));
}

/* Decode rows' own: see ft_plan_decode_rows. */
static uint64_t decode_workspace_bytes(const struct ft_plan_draft *draft)
{
    struct ft_workspace workspace;
    uint32_t rows = ft_plan_decode_rows(draft->plan);
    if (!rows)
        return 0;
    ft_workspace_init(&workspace, draft->model, rows, rows, FT_MIN(rows, draft->plan->logit_rows_max));
    return ft_plan_times(workspace.count, sizeof(float));
}

/* The prefill forms of a GPU's kernels need more than the activations. */
static uint64_t scratch_bytes(const struct ft_plan_draft *draft)
{
    const struct ft_plan *plan = draft->plan;
    if (plan->device != FT_DEVICE_CUDA)
        return 0;
    return ft_workspace_gpu_bytes(draft->model, ft_plan_rows_max(plan),
                                  ft_plan_times(plan->page_count, plan->page_tokens));
}

/* The default chunk keeps the workspace small; a chunk that the user gave is only cut to the KV pool, which
 * it could never fill. */
static uint32_t chunk_rows(const struct ft_plan_draft *draft)
{
    uint32_t chunk = (uint32_t)FT_MIN(draft->knob[FT_KNOB_CHUNK], draft->knob[FT_KNOB_KV]);
    if (draft->given[FT_KNOB_CHUNK])
        return FT_MAX(chunk, 1u);
    uint64_t most = WORKSPACE_BYTES_MAX;
    if (draft->plan->device == FT_DEVICE_CUDA)
        most = FT_MAX(most, least_limit(draft) / WORKSPACE_SHARE_OF_GPU);
    while (chunk > CHUNK_ROWS_MIN && workspace_bytes(draft, chunk) > most)
        chunk -= chunk > 64 ? 16 : 1;
    return FT_MAX(chunk, 1u);
}

uint64_t ft_plan_draft_workspace(const struct ft_plan_draft *draft, bool last)
{
    struct ft_workspace workspace;
    const struct ft_plan *plan = draft->plan;
    uint32_t sequences = (uint32_t)draft->knob[FT_KNOB_SEQUENCES], chunk = chunk_rows(draft),
             rows = FT_MAX(chunk, sequences);
    uint64_t pages = ft_div_up(draft->knob[FT_KNOB_KV], plan->page_tokens) + sequences - 1;
    ft_workspace_init(&workspace, draft->model, rows, sequences,
                      !last                        ? 0
                      : draft->options->all_logits ? rows
                                                   : sequences);
    return ft_plan_plus(ft_plan_times(workspace.count, sizeof(float)),
                        ft_workspace_gpu_bytes(draft->model, rows, ft_plan_times(pages, plan->page_tokens)));
}

static uint32_t staging_experts(const struct ft_plan_draft *draft)
{
    const struct ft_plan *plan = draft->plan;
    bool gpu = plan->device == FT_DEVICE_CUDA;
    if (plan->device == FT_DEVICE_NONE || (plan->slot_count == 0 && !gpu))
        return 0;
    if (plan->strategy == FT_STRATEGY_FUSED)
        return 1;
    /* A large GPU holds whole layers in the two halves, which prefill then streams ahead of the routers. */
    uint64_t layer = ft_plan_times(draft->model->expert_count, draft->sizes->expert_bytes_max);
    bool whole = gpu && layer <= least_limit(draft) / STAGING_SHARE_OF_GPU;
    uint64_t most = whole ? layer : STAGING_BYTES_MAX;
    uint64_t fit = FT_MAX(most / FT_MAX(draft->sizes->expert_bytes_max, UINT64_C(1)), UINT64_C(1));
    uint64_t active = ft_plan_times(plan->chunk_rows, draft->model->topk);
    return (uint32_t)FT_MAX(FT_MIN(FT_MIN(fit, active), (uint64_t)draft->model->expert_count), UINT64_C(1));
}

static void derive_pools(struct ft_plan_draft *draft)
{
    struct ft_plan *plan = draft->plan;
    plan->sequences_max = (uint32_t)draft->knob[FT_KNOB_SEQUENCES];
    plan->chunk_rows = chunk_rows(draft);
    plan->logit_rows_max = draft->options->all_logits ? ft_plan_rows_max(plan) : plan->sequences_max;
    plan->slot_count = (uint32_t)draft->knob[FT_KNOB_SLOTS];
    plan->staging_experts = staging_experts(draft);
    plan->snapshot_bytes = draft->knob[FT_KNOB_SNAPSHOTS];
    uint64_t pages = ft_div_up(draft->knob[FT_KNOB_KV], plan->page_tokens) + plan->sequences_max - 1;
    plan->page_count = (uint32_t)FT_MIN(pages, (uint64_t)UINT32_MAX - 1);
}

/* ---- the table ---- */

__attribute__((format(printf, 5, 6))) static void add_term(struct ft_plan *plan, enum ft_plan_pool pool,
                                                           enum ft_tier tier, uint64_t bytes,
                                                           const char *format, ...)
{
    va_list args;
    if (!bytes)
        return;
    struct ft_plan_term *term = &plan->terms[plan->term_count++];
    term->pool = (uint8_t)pool;
    term->tier = (uint8_t)tier;
    term->bytes = bytes;
    if (tier == FT_TIER_DEVICE && plan->gpu_count) {
        term->bytes = 0;
        for (uint32_t i = 0; i < plan->gpu_count; i++)
            term->bytes = ft_plan_plus(term->bytes, plan->gpus[i].pool_bytes[pool]);
    }
    va_start(args, format);
    vsnprintf(term->reason, sizeof term->reason, format, args);
    va_end(args);
}

static const char *knob_origin(const struct ft_plan_draft *draft, enum ft_plan_knob knob)
{
    if (!draft->given[knob])
        return "default";
    if (knob == FT_KNOB_SLOTS && draft->plan->strategy == FT_STRATEGY_FUSED)
        return "fused: all experts";
    if (knob == FT_KNOB_SLOTS && !draft->options->slot_count)
        return "--moe-cache-rate";
    return knob_texts[knob].option;
}

static void add_weight_terms(struct ft_plan_draft *draft, enum ft_tier near)
{
    struct ft_plan *plan = draft->plan;
    const struct ft_weight_sizes *sizes = draft->sizes;
    bool tied = draft->model->tied;
    const char *how = sizes->dense == FT_DENSE_TO_FP8 ? ": fp8, quantised at load" : "";
    add_term(plan, FT_POOL_DENSE, near, sizes->dense_bytes, "all weights but experts, embedding and head%s",
             how);
    add_term(plan, FT_POOL_EMBED, tied ? near : FT_TIER_RAM, sizes->embed_bytes, "%s",
             tied ? "the head reads it too" : "single rows are read");
    add_term(plan, FT_POOL_HEAD, near, sizes->head_bytes, "read once a token%s", how);
    add_term(plan, FT_POOL_BANK, FT_TIER_RAM, sizes->expert_total_bytes, "%llu experts in %u layers, %s",
             (unsigned long long)draft->expert_count, sizes->moe_layer_count,
             ft_format_name(sizes->expert_format));
    add_term(plan, FT_POOL_SLOTS, FT_TIER_DEVICE, ft_plan_times(plan->slot_count, sizes->expert_bytes_max),
             "%u slots of %llu B (%.1f%% of all): %s", plan->slot_count,
             (unsigned long long)sizes->expert_bytes_max,
             100.0 * plan->slot_count / (double)FT_MAX(draft->expert_count, UINT64_C(1)),
             knob_origin(draft, FT_KNOB_SLOTS));
    add_term(plan, FT_POOL_STAGING, FT_TIER_DEVICE,
             ft_plan_times(2ull * plan->staging_experts, sizes->expert_bytes_max),
             "2 halves of %u experts for prefill", plan->staging_experts);
    add_term(plan, FT_POOL_PLE, plan->ple_in_ram ? FT_TIER_RAM : FT_TIER_DISK, sizes->ple_bytes, "%s",
             plan->ple_in_ram ? "asked for in RAM" : "rows are read in place from disk");
}

static void add_state_terms(struct ft_plan_draft *draft, enum ft_tier near)
{
    struct ft_plan *plan = draft->plan;
    add_term(plan, FT_POOL_KV, near, ft_plan_times(plan->page_count, draft->page_bytes),
             "%llu tokens in %u pages of %u: %s", (unsigned long long)draft->knob[FT_KNOB_KV],
             plan->page_count, plan->page_tokens, knob_origin(draft, FT_KNOB_KV));
    add_term(plan, FT_POOL_STATE, near, ft_plan_times(plan->sequences_max, draft->state_bytes),
             "%u sequences of %llu B: %s", plan->sequences_max, (unsigned long long)draft->state_bytes,
             knob_origin(draft, FT_KNOB_SEQUENCES));
    add_term(plan, FT_POOL_SNAPSHOTS, FT_TIER_RAM, plan->snapshot_bytes, "room for %llu states of %llu B: %s",
             (unsigned long long)(draft->state_bytes ? plan->snapshot_bytes / draft->state_bytes : 0),
             (unsigned long long)draft->state_bytes, knob_origin(draft, FT_KNOB_SNAPSHOTS));
    add_term(plan, FT_POOL_WORKSPACE, near,
             ft_plan_plus(ft_plan_plus(workspace_bytes(draft, plan->chunk_rows), scratch_bytes(draft)),
                          decode_workspace_bytes(draft)),
             "%u rows, %u rows of logits: %s", ft_plan_rows_max(plan) + ft_plan_decode_rows(plan),
             plan->logit_rows_max, knob_origin(draft, FT_KNOB_CHUNK));
}

static bool gpu_fits(const struct ft_plan_gpu *gpu)
{
    return !gpu->limit_bytes ? gpu->used_bytes != UINT64_MAX : gpu->used_bytes <= gpu->limit_bytes;
}

static bool tier_fits(const struct ft_plan *plan, enum ft_tier tier)
{
    for (uint32_t i = 0; tier == FT_TIER_DEVICE && i < plan->gpu_count; i++)
        if (!gpu_fits(&plan->gpus[i]))
            return false;
    return !plan->limit_bytes[tier] ? plan->used_bytes[tier] != UINT64_MAX
                                    : plan->used_bytes[tier] <= plan->limit_bytes[tier];
}

void ft_plan_draft_derive(struct ft_plan_draft *draft)
{
    struct ft_plan *plan = draft->plan;
    enum ft_tier near = plan->device == FT_DEVICE_NONE ? FT_TIER_RAM : FT_TIER_DEVICE;
    derive_pools(draft);
    plan->term_count = 0;
    memset(plan->terms, 0, sizeof plan->terms);
    memset(plan->used_bytes, 0, sizeof plan->used_bytes);
    if (plan->gpu_count)
        ft_plan_draft_fill_gpus(draft); /* may find fewer experts than slots */
    add_weight_terms(draft, near);
    add_state_terms(draft, near);
    for (uint32_t i = 0; i < plan->term_count; i++)
        plan->used_bytes[plan->terms[i].tier] =
            ft_plan_plus(plan->used_bytes[plan->terms[i].tier], plan->terms[i].bytes);
    if (plan->device == FT_DEVICE_HOST) /* its memory is RAM */
        plan->used_bytes[FT_TIER_RAM] =
            ft_plan_plus(plan->used_bytes[FT_TIER_RAM], plan->used_bytes[FT_TIER_DEVICE]);
    plan->fits = true;
    for (uint32_t tier = 0; tier < FT_TIER_COUNT; tier++) {
        plan->limit_bytes[tier] = tier_limit(draft, (enum ft_tier)tier);
        plan->fits = plan->fits && tier_fits(plan, (enum ft_tier)tier);
    }
}

/* ---- lowering ---- */

/* The largest value of the knob, at most `most`, with which the tier (or everything, FT_TIER_COUNT) fits;
 * false: none, and the draft is left at the knob's floor. Memory grows with every knob, so halving the
 * interval finds it. */
static bool lower_knob(struct ft_plan_draft *draft, enum ft_plan_knob knob, uint64_t most, enum ft_tier tier)
{
    uint64_t low = draft->floor[knob], high = most;
    draft->knob[knob] = low;
    ft_plan_draft_derive(draft);
    if (tier == FT_TIER_COUNT ? !draft->plan->fits : !tier_fits(draft->plan, tier))
        return false;
    while (low < high) {
        uint64_t middle = high - (high - low) / 2;
        draft->knob[knob] = middle;
        ft_plan_draft_derive(draft);
        if (tier == FT_TIER_COUNT ? draft->plan->fits : tier_fits(draft->plan, tier))
            low = middle;
        else
            high = middle - 1;
    }
    draft->knob[knob] = low;
    ft_plan_draft_derive(draft);
    return true;
}

/* Bytes beyond the limits, of all tiers. */
static uint64_t excess_bytes(const struct ft_plan *plan)
{
    uint64_t excess = 0;
    for (uint32_t i = 0; i < plan->gpu_count; i++)
        if (!gpu_fits(&plan->gpus[i]))
            excess = ft_plan_plus(excess, plan->gpus[i].used_bytes - plan->gpus[i].limit_bytes);
    for (uint32_t tier = plan->gpu_count ? FT_TIER_RAM : FT_TIER_DEVICE; tier < FT_TIER_COUNT; tier++)
        if (!tier_fits(plan, (enum ft_tier)tier))
            excess = ft_plan_plus(excess, plan->used_bytes[tier] - plan->limit_bytes[tier]);
    return excess;
}

/* Stops where halving does not help: snapshots in RAM do not relieve a full card. */
static void halve_until_fit(struct ft_plan_draft *draft, enum ft_plan_knob knob, uint64_t floor)
{
    while (!draft->plan->fits && !draft->given[knob] && draft->knob[knob] > floor) {
        uint64_t before = excess_bytes(draft->plan), kept = draft->knob[knob];
        draft->knob[knob] = FT_MAX(kept / 2, floor);
        ft_plan_draft_derive(draft);
        if (excess_bytes(draft->plan) >= before) {
            draft->knob[knob] = kept;
            ft_plan_draft_derive(draft);
            return;
        }
    }
}

void ft_plan_draft_settle(struct ft_plan_draft *draft)
{
    bool fill =
        draft->plan->device == FT_DEVICE_CUDA && !draft->given[FT_KNOB_SLOTS] && draft->knob[FT_KNOB_SLOTS];
    uint64_t wished[FT_KNOB_COUNT];
    memcpy(wished, draft->knob, sizeof wished);
    ft_plan_draft_derive(draft);
    /* Fewer slots than one token uses would fetch in waves: that comes last. */
    uint32_t gpus = FT_MAX(draft->plan->gpu_count, 1u);
    halve_until_fit(draft, FT_KNOB_SLOTS,
                    FT_MAX(draft->floor[FT_KNOB_SLOTS], (uint64_t)draft->model->topk * gpus));
    /* One sequence with some room for its text is of more use than several without. */
    static const struct {
        enum ft_plan_knob knob;
        uint64_t least;
    } order[] = {{FT_KNOB_SNAPSHOTS, 0},
                 {FT_KNOB_KV, KV_TOKENS_USEFUL},
                 {FT_KNOB_SEQUENCES, 0},
                 {FT_KNOB_KV, 0},
                 {FT_KNOB_SLOTS, 0}};
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++)
        halve_until_fit(draft, order[i].knob, FT_MAX(draft->floor[order[i].knob], order[i].least));
    if (fill && draft->plan->fits && draft->plan->limit_bytes[FT_TIER_DEVICE])
        lower_knob(draft, FT_KNOB_SLOTS, FT_MIN(draft->expert_count, (uint64_t)FT_SLOTS_DEFAULT_MAX),
                   FT_TIER_COUNT);
    uint64_t busy = ft_plan_times(draft->model->topk, ft_plan_times(wished[FT_KNOB_SEQUENCES], gpus));
    draft->plan->lowered = draft->knob[FT_KNOB_KV] < wished[FT_KNOB_KV] ||
                           draft->knob[FT_KNOB_SEQUENCES] < wished[FT_KNOB_SEQUENCES] ||
                           draft->knob[FT_KNOB_SLOTS] < FT_MIN(wished[FT_KNOB_SLOTS], busy);
}

/* ---- advice ---- */

__attribute__((format(printf, 2, 3))) static void say(struct ft_plan *plan, const char *format, ...)
{
    size_t used = strlen(plan->advice);
    va_list args;
    va_start(args, format);
    vsnprintf(plan->advice + used, sizeof plan->advice - used, format, args);
    va_end(args);
}

/* The largest pools first: what the memory is for. */
static void say_pools(struct ft_plan *plan, const uint64_t *pool_bytes)
{
    bool said[FT_POOL_COUNT] = {false};
    for (int i = 0; i < 3; i++) {
        uint32_t best = FT_POOL_COUNT;
        for (uint32_t p = 0; p < FT_POOL_COUNT; p++)
            if (!said[p] && pool_bytes[p] && (best == FT_POOL_COUNT || pool_bytes[p] > pool_bytes[best]))
                best = p;
        if (best == FT_POOL_COUNT)
            break;
        said[best] = true;
        say(plan, "%s%s %s", i ? ", " : "", ft_plan_pool_name((enum ft_plan_pool)best),
            size_of(pool_bytes[best]).text);
    }
}

static void say_terms(struct ft_plan *plan, enum ft_tier tier)
{
    uint64_t pool_bytes[FT_POOL_COUNT] = {0};
    for (uint32_t t = 0; t < plan->term_count; t++) {
        const struct ft_plan_term *term = &plan->terms[t];
        if (term->tier == tier ||
            (plan->device == FT_DEVICE_HOST && tier == FT_TIER_RAM && term->tier == FT_TIER_DEVICE))
            pool_bytes[term->pool] = term->bytes;
    }
    say_pools(plan, pool_bytes);
}

/* What `plan` uses of the tier beyond `less` (NULL: all of it): of several GPUs, each that is too small in `lacking`. */
static void say_bytes(struct ft_plan *refused, enum ft_tier tier, const struct ft_plan *lacking,
                      const struct ft_plan *plan, const struct ft_plan *less)
{
    uint32_t said = 0;
    for (uint32_t i = 0; tier == FT_TIER_DEVICE && i < lacking->gpu_count && said < GPUS_SAID; i++) {
        uint64_t rest = less ? FT_MIN(less->gpus[i].used_bytes, plan->gpus[i].used_bytes) : 0;
        if (!gpu_fits(&lacking->gpus[i]))
            say(refused, "%s%s of GPU %u", said++ ? " and " : "",
                size_of(plan->gpus[i].used_bytes - rest).text, plan->gpus[i].id);
    }
    if (!said)
        say(refused, "%s", size_of(plan->used_bytes[tier] - (less ? less->used_bytes[tier] : 0)).text);
}

/* What the plan has of a knob: its default chunk may be smaller than what it began with. */
static uint64_t knob_value(const struct ft_plan_draft *draft, enum ft_plan_knob knob)
{
    return knob == FT_KNOB_CHUNK ? draft->plan->chunk_rows : draft->knob[knob];
}

/* Tries every knob alone; true when one is enough. */
static bool advise_one_knob(const struct ft_plan_draft *draft, enum ft_tier tier)
{
    struct ft_plan_draft trial = *draft;
    struct ft_plan plan = *draft->plan;
    trial.plan = &plan;
    bool found = false;
    static const enum ft_plan_knob order[] = {FT_KNOB_KV, FT_KNOB_SLOTS, FT_KNOB_SNAPSHOTS, FT_KNOB_SEQUENCES,
                                              FT_KNOB_CHUNK};
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        enum ft_plan_knob knob = order[i];
        uint64_t value = knob_value(draft, knob);
        if (value <= draft->floor[knob])
            continue;
        memcpy(trial.knob, draft->knob, sizeof trial.knob);
        trial.given[FT_KNOB_CHUNK] = draft->given[FT_KNOB_CHUNK] || knob == FT_KNOB_CHUNK; /* as it will be */
        if (!lower_knob(&trial, knob, value, tier))
            continue;
        say(draft->plan, "%s%s %llu%s instead of %llu saves ", found ? "; or " : "", knob_texts[knob].option,
            (unsigned long long)trial.knob[knob], knob_texts[knob].unit, (unsigned long long)value);
        say_bytes(draft->plan, tier, draft->plan, draft->plan, &plan);
        found = true;
    }
    return found;
}

/* Everything at its smallest: either that fits, or no option helps. */
static bool advise_all_knobs(const struct ft_plan_draft *draft, enum ft_tier tier)
{
    struct ft_plan_draft trial = *draft;
    struct ft_plan plan = *draft->plan;
    trial.plan = &plan;
    memcpy(trial.knob, draft->floor, sizeof trial.knob);
    ft_plan_draft_derive(&trial);
    if (!tier_fits(&plan, tier)) {
        say(draft->plan, "no size option helps: the least possible is ");
        say_bytes(draft->plan, tier, &plan, &plan, NULL);
        return false;
    }
    say(draft->plan, "lower several together, at the least");
    for (uint32_t knob = 0; knob < FT_KNOB_COUNT; knob++)
        if (knob_value(draft, knob) > draft->floor[knob] &&
            (knob != FT_KNOB_SNAPSHOTS || tier == FT_TIER_RAM))
            say(draft->plan, " %s %llu", knob_texts[knob].option, (unsigned long long)draft->floor[knob]);
    say(draft->plan, " (");
    say_bytes(draft->plan, tier, draft->plan, &plan, NULL);
    say(draft->plan, ")");
    return true;
}

/* Another strategy that would fit, tried in the order of what it costs in speed. */
static void advise_strategy(const struct ft_plan_draft *draft)
{
    static const enum ft_strategy order[] = {FT_STRATEGY_OFFLOAD, FT_STRATEGY_CPU};
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        struct ft_plan_draft trial = *draft;
        struct ft_plan plan = *draft->plan;
        trial.plan = &plan;
        if (plan.strategy == order[i] && plan.device == FT_DEVICE_NONE)
            continue;
        bool cpu = order[i] == FT_STRATEGY_CPU;
        plan.strategy = order[i];
        plan.device = cpu ? FT_DEVICE_NONE : plan.device;
        plan.gpu_count = cpu ? 0 : plan.gpu_count;
        if (plan.device == FT_DEVICE_NONE && !cpu)
            continue;
        trial.floor[FT_KNOB_SLOTS] = cpu ? 0 : 1;
        trial.given[FT_KNOB_SLOTS] = false;
        if (lower_knob(&trial, FT_KNOB_SLOTS, cpu ? 0 : draft->expert_count, FT_TIER_COUNT)) {
            if (cpu)
                say(draft->plan, "; or --strategy cpu --device none (%s of RAM)",
                    size_of(plan.used_bytes[FT_TIER_RAM]).text);
            else if (draft->plan->strategy == FT_STRATEGY_FUSED)
                say(draft->plan, "; or --strategy offload --moe-cache-size %llu",
                    (unsigned long long)trial.knob[FT_KNOB_SLOTS]);
        }
    }
}

/* GPU by GPU, with the pools of each: sums over several say nothing about the one that is too small. */
static bool say_gpus(struct ft_plan *plan)
{
    uint32_t lacking = 0;
    for (uint32_t i = 0; i < plan->gpu_count; i++) {
        const struct ft_plan_gpu *gpu = &plan->gpus[i];
        if (gpu_fits(gpu) || lacking++ >= GPUS_SAID)
            continue;
        say(plan, "%sneeds %s of GPU %u (layers %u to %u) and %s are usable (", lacking > 1 ? "; " : "",
            size_of(gpu->used_bytes).text, gpu->id, gpu->layer_begin, gpu->layer_end - 1,
            size_of(gpu->limit_bytes).text);
        say_pools(plan, gpu->pool_bytes);
        say(plan, ")");
    }
    if (lacking > GPUS_SAID)
        say(plan, "; %u other GPUs lack memory, too", lacking - GPUS_SAID);
    return lacking > 0;
}

static void say_need(struct ft_plan *plan, enum ft_tier tier, const char *what)
{
    if (plan->advice[0])
        say(plan, ". Also ");
    if (tier == FT_TIER_DEVICE && say_gpus(plan))
        return;
    say(plan, "needs %s of %s and %s are usable (", size_of(plan->used_bytes[tier]).text, what,
        size_of(plan->limit_bytes[tier]).text);
    say_terms(plan, tier);
    say(plan, ")");
}

void ft_plan_draft_advise(const struct ft_plan_draft *draft)
{
    static const char *const tier_texts[FT_TIER_COUNT] = {"device memory", "RAM", "disk"};
    struct ft_plan *plan = draft->plan;
    plan->advice[0] = '\0';
    for (uint32_t t = 0; t < FT_TIER_COUNT; t++) {
        enum ft_tier tier = (enum ft_tier)t;
        if (tier_fits(plan, tier))
            continue;
        say_need(plan, tier, tier_texts[tier]);
        say(plan, ": ");
        if (tier == FT_TIER_RAM && plan->ple_in_ram &&
            plan->used_bytes[tier] - FT_MIN(plan->used_bytes[tier], draft->sizes->ple_bytes) <=
                plan->limit_bytes[tier])
            say(plan, "--ple-backend disk saves %s", size_of(draft->sizes->ple_bytes).text);
        else if (!advise_one_knob(draft, tier))
            advise_all_knobs(draft, tier);
    }
    advise_strategy(draft);
}

void ft_plan_draft_advise_order(const struct ft_plan_draft *draft, const struct ft_machine *machine)
{
    struct ft_plan *plan = draft->plan;
    uint32_t count = plan->gpu_count;
    say(plan, "; or GPU %u last, where the head is: --gpus ", machine->gpu_id[count - 1]);
    for (uint32_t i = 0; i < count; i++)
        say(plan, "%s%u", i ? "," : "", machine->gpu_id[i]);
    if (draft->options->gpu_limit_count > 1)
        say(plan, " with --vram in that order");
}
