/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/decode_bench.h"

#include "tools/ft_bench.h"
#include "tools/interrupt.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK_ROWS_SMALL 8u /* otherwise no step has more rows than the batch */
#define KV_ELEMENT_BYTES 4u /* the engine keeps keys, values and state in f32 */

bool ft_decode_go_on(void)
{
    return !ft_interrupt_signal();
}

uint32_t ft_decode_max_tokens(const struct ft_decode_options *o)
{
    return o->warmup + o->steps + (o->prefill ? o->beside + o->steps : 0) + 2;
}

static uint32_t prompt_tokens(const struct ft_decode_options *o)
{
    return o->prompt ? o->prompt : FT_MAX(o->context, 2u);
}

void ft_decode_open_options(const struct ft_decode_bench *bench, enum ft_strategy strategy,
                            struct ft_open_options *open)
{
    const struct ft_decode_options *o = bench->options;
    struct ft_kv_layout kv;
    ft_kv_layout_init(&kv, &bench->model);
    uint64_t tokens = ft_round_up((uint64_t)o->context + ft_decode_max_tokens(o), kv.page_tokens) * o->batch;
    if (o->prefill)
        tokens += ft_round_up(prompt_tokens(o), kv.page_tokens);
    ft_open_options_init(open);
    open->strategy = strategy;
    open->device = o->device;
    open->device_given = o->device_given;
    if (o->compare && !o->device_given) {
        open->device = bench->device;
        open->device_given = true;
    }
    open->gpus = o->gpus;
    open->plan.workers = o->workers;
    open->plan.slot_count = o->slots;
    open->plan.slot_rate = o->cache_rate;
    open->plan.fetch_share = o->compare && strategy != FT_STRATEGY_HYBRID ? -1 : o->share;
    open->plan.sequences_max = o->batch + o->prefill;
    open->plan.kv_tokens = (uint32_t)FT_MIN(tokens, (uint64_t)UINT32_MAX);
    open->plan.chunk_rows = o->prefill ? o->chunk : CHUNK_ROWS_SMALL;
    open->snapshot_given = true; /* none: nothing is rolled back or reused */
    open->io = o->io;
    open->trace = o->trace;
    open->isa = o->isa;
    open->link_gbs = o->link_gbs;
    open->pin = o->pin;
    open->prefetch = o->prefetch;
    open->look_ahead = o->look_ahead;
    open->quiet = true;
}

struct ft_engine_parts ft_decode_parts(const struct ft_decode_bench *bench, bool measured)
{
    return (struct ft_engine_parts){.model = &bench->model,
                                    .sizes = &bench->sizes,
                                    .machine = measured ? &bench->machine : NULL,
                                    .weights = &bench->loaded.weights,
                                    .tables = bench->tables,
                                    .routing = &bench->routing};
}

/* ---- warm slots ---- */

static void list_all_experts(const struct ft_model *model, struct ft_routing_warm *warm)
{
    for (uint32_t layer = 0; layer < model->layer_count; layer++)
        for (uint32_t e = 0; e < model->expert_count && !model->layers[layer].dense; e++) {
            warm->layer[warm->count] = layer;
            warm->expert[warm->count++] = e;
        }
}

static void drop_dense_layers(const struct ft_model *model, struct ft_routing_warm *warm)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < warm->count; i++)
        if (!model->layers[warm->layer[i]].dense) {
            warm->layer[kept] = warm->layer[i];
            warm->expert[kept++] = warm->expert[i];
        }
    warm->count = kept;
}

/* What the slots hold before the first step: every expert where they all fit, else the top of the generator's
 * stacks. Recorded routing starts cold: the warm-up steps have to do. */
static int list_warm(const struct ft_decode_bench *bench, uint32_t slot_count, struct ft_routing_warm *warm,
                     struct ft_error *err)
{
    *warm = (struct ft_routing_warm){.layer = calloc(slot_count + 1ull, sizeof *warm->layer),
                                     .expert = calloc(slot_count + 1ull, sizeof *warm->expert)};
    if (!warm->layer || !warm->expert)
        return ft_error_set(err, FT_MEMORY, "no memory to list %u warm experts", slot_count);
    if (slot_count >= (uint64_t)bench->sizes.moe_layer_count * bench->model.expert_count)
        list_all_experts(&bench->model, warm);
    else if (bench->generator.step_count && slot_count)
        return ft_routing_list_warm(&bench->generator, slot_count, warm, err);
    return FT_OK;
}

/* ---- steps ---- */

static int submit(struct ft_decode_bench *bench, struct ft_session *session, struct ft_error *err)
{
    const struct ft_decode_options *o = bench->options;
    uint32_t handle, *prompt = malloc(o->context * sizeof *prompt);
    int status =
        prompt ? FT_OK : ft_error_set(err, FT_MEMORY, "no memory for a prompt of %u tokens", o->context);
    for (uint32_t s = 0; status == FT_OK && s < o->batch; s++) {
        for (uint64_t i = 0; i < o->context; i++) /* any tokens do; no two sequences alike */
            prompt[i] = (uint32_t)((i * 2654435761u + s * 40503u + o->seed) % bench->model.vocab);
        const struct ft_request request = {.prompt = prompt,
                                           .prompt_count = o->context,
                                           .max_tokens = ft_decode_max_tokens(o),
                                           .sampling = {.top_p = 1, .repetition_penalty = 1},
                                           .assumed_count = o->context - 1};
        status = ft_session_submit(session, &request, &handle, err);
    }
    free(prompt);
    return status;
}

/* One step; *tokens new ones came. */
static int step_once(struct ft_decode_bench *bench, struct ft_session *session, uint32_t *tokens,
                     struct ft_error *err)
{
    uint32_t count;
    int status = ft_session_step(session, bench->events, 2 * FT_SEQUENCES_MAX, &count, err);
    *tokens = 0;
    for (uint32_t i = 0; status == FT_OK && i < count; i++) {
        *tokens += bench->events[i].kind == FT_EVENT_TOKEN;
        if (bench->events[i].kind == FT_EVENT_FAILED)
            status = ft_error_set(err, FT_NUMERIC, "a step failed: %s", bench->events[i].message);
    }
    return status;
}

static int warm_up(struct ft_decode_bench *bench, struct ft_session *session, struct ft_error *err)
{
    uint32_t tokens;
    int status = FT_OK;
    for (uint32_t i = 0; status == FT_OK && i < bench->options->warmup; i++)
        status = step_once(bench, session, &tokens, err);
    return status;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int time_steps(struct ft_decode_bench *bench, struct ft_session *session, struct ft_decode_row *row,
                      uint32_t *first_decode_step, struct ft_error *err)
{
    struct ft_session_stats before;
    uint32_t steps = bench->options->steps, tokens;
    int status = FT_OK;
    ft_session_stats(session, &before);
    *first_decode_step = (uint32_t)(before.steps - before.prefill_steps);
    uint64_t begin = ft_session_now_ns(session), last = begin;
    for (uint32_t i = 0; status == FT_OK && i < steps; i++) {
        status = step_once(bench, session, &tokens, err);
        uint64_t now = ft_session_now_ns(session);
        bench->step_s[i] = (double)(now - last) * 1e-9;
        last = now;
        if (status == FT_OK && tokens != bench->options->batch)
            status = ft_error_set(err, FT_INTERNAL, "a step brought %u tokens, wanted %u", tokens,
                                  bench->options->batch);
    }
    if (status != FT_OK)
        return status;
    ft_session_stats(session, &row->stats);
    ft_decode_stats_subtract(&row->stats, &before);
    qsort(bench->step_s, steps, sizeof *bench->step_s, compare_doubles);
    row->mean_step_s = (double)(last - begin) * 1e-9 / steps;
    row->median_step_s = bench->step_s[steps / 2];
    row->min_step_s = bench->step_s[0];
    return FT_OK;
}

/* ---- bounds ---- */

static struct ft_decode_bound bound_with(const struct ft_decode_bench *bench, const struct ft_decode_row *row,
                                         double active, double misses, struct ft_decode_traffic *traffic)
{
    ft_decode_traffic_experts(traffic, bench->report.expert_bytes, active / row->steps, misses / row->steps);
    return ft_decode_bound(traffic, &bench->report.ceilings, row->plan.strategy, row->plan.device);
}

/* Replays the routing with as many slots; a model with dense layers has rows in it that nobody routes. */
static int replay(const struct ft_decode_bench *bench, struct ft_decode_row *row,
                  const struct ft_routing_warm *warm, uint32_t first, struct ft_error *err)
{
    struct ft_routing_count lru, belady;
    uint32_t experts = bench->model.expert_count, slots = row->slots;
    struct ft_decode_traffic traffic = row->traffic;
    if (row->plan.device == FT_DEVICE_NONE || bench->sizes.moe_layer_count != bench->model.layer_count)
        return FT_OK;
    int status = ft_routing_lru(&bench->routing, experts, slots, warm, first, row->steps, &lru, err);
    if (status == FT_OK)
        status = ft_routing_belady(&bench->routing, experts, slots, warm, first, row->steps, &belady, err);
    if (status != FT_OK)
        return status;
    row->active = lru.active;
    row->lru_misses = lru.misses;
    row->belady_misses = belady.misses;
    row->lru_bound = bound_with(bench, row, (double)lru.active, (double)lru.misses, &traffic);
    row->belady_bound = bound_with(bench, row, (double)lru.active, (double)belady.misses, &traffic);
    return FT_OK;
}

static int find_bounds(const struct ft_decode_bench *bench, struct ft_decode_row *row,
                       const struct ft_routing_warm *warm, uint32_t first, struct ft_error *err)
{
    const struct ft_decode_options *o = bench->options;
    uint64_t active, misses;
    double context = (double)o->context + o->warmup + o->steps / 2.0;
    ft_decode_traffic_init(&row->traffic, &bench->model, &bench->sizes, o->batch, context, KV_ELEMENT_BYTES);
    int status = replay(bench, row, warm, first, err);
    ft_decode_row_experts(row, &active, &misses);
    row->bound = bound_with(bench, row, (double)active, (double)misses, &row->traffic);
    return status;
}

static int measure_row(struct ft_decode_bench *bench, struct ft_engine *engine, struct ft_decode_row *row,
                       struct ft_error *err)
{
    struct ft_routing_warm warm;
    uint32_t first = 0;
    const struct ft_decode_options *o = bench->options;
    const struct ft_bench_prefill_options prefill = {.prompt_tokens = prompt_tokens(o),
                                                     .vocab = bench->model.vocab,
                                                     .batch = o->batch,
                                                     .steps_max = o->beside,
                                                     .steps = o->steps,
                                                     .seed = o->seed,
                                                     .go_on = ft_decode_go_on};
    row->slots = ft_session_slot_count(engine->session);
    int status = list_warm(bench, row->slots, &warm, err);
    if (status == FT_OK) {
        drop_dense_layers(&bench->model, &warm);
        status = ft_session_warm_slots(engine->session, warm.layer, warm.expert, warm.count, &row->warm_slots,
                                       err);
    }
    if (status == FT_OK && o->prefill)
        status = ft_bench_prefill_alone(engine->session, &prefill, &row->prefill, err);
    if (status == FT_OK)
        status = submit(bench, engine->session, err);
    if (status == FT_OK)
        status = warm_up(bench, engine->session, err);
    if (status == FT_OK)
        status = time_steps(bench, engine->session, row, &first, err);
    if (status == FT_OK && o->prefill)
        status = ft_bench_prefill_beside(engine->session, &prefill, &row->prefill, err);
    if (status == FT_OK)
        status = find_bounds(bench, row, &warm, first, err);
    free(warm.layer);
    free(warm.expert);
    return status;
}

int ft_decode_run_row(struct ft_decode_bench *bench, enum ft_strategy strategy, struct ft_decode_row *row,
                      struct ft_error *err)
{
    const struct ft_decode_options *o = bench->options;
    struct ft_open_options open;
    struct ft_engine engine;
    struct ft_error closing;
    const struct ft_engine_parts parts = ft_decode_parts(bench, true);
    ft_decode_open_options(bench, strategy, &open);
    int status = ft_engine_open_parts(&engine, &open, &parts, err);
    if (status != FT_OK)
        return ft_error_prepend(err, "strategy %s", ft_strategy_name(strategy));
    *row = (struct ft_decode_row){.wanted = strategy,
                                  .plan = engine.plan,
                                  .batch = o->batch,
                                  .context = o->context,
                                  .steps = o->steps,
                                  .warmup = o->warmup,
                                  .link_gbs = o->link_gbs};
    bench->report.isa = ft_isa_name(ft_session_isa(engine.session));
    status = measure_row(bench, &engine, row, err);
    bench->abandoned = status != FT_OK;
    if (status != FT_OK)
        ft_error_prepend(err, "strategy %s", ft_strategy_name(strategy));
    int closed = ft_engine_close(&engine, &closing);
    if (status == FT_OK && closed != FT_OK) {
        *err = closing;
        status = closed;
    }
    return status;
}
