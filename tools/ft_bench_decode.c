/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ft bench decode: how fast a model of this shape decodes here, and how fast it could.
 *
 *   shape -> plan (fits?) -> random weights -> ceilings -> per strategy: session, warm slots, steps -> bounds
 *
 * No checkpoint is needed: the weights are random (tools/synthetic.h), the router's choices are given
 * (planner/routing.h), so that the expert slots see the hit rate of real traffic, and the context is taken as
 * computed. --prefill reads a prompt, too: before the decode steps and beside them. Everything else is the engine: the same plan, session, lanes and
 * kernels as ft run.
 */
#include "io/bench_io.h"
#include "jobs/gpu_mover.h"
#include "planner/routing.h"
#include "tools/command.h"
#include "tools/decode_report.h"
#include "tools/ft_bench.h"
#include "tools/interrupt.h"
#include "tools/machine_probe.h"
#include "tools/open.h"
#include "tools/routing_file.h"
#include "tools/shapes.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK_ROWS_SMALL 8u   /* otherwise no step has more rows than the batch */
#define KV_ELEMENT_BYTES 4u   /* the engine keeps keys, values and state in f32 */
#define ROUTING_REPEATS 4096u /* generated steps; a longer run repeats them */

struct options {
    const char *shape, *routing, *ple_file, *trace, *isa;
    struct ft_shape_cuts cuts;
    uint32_t chunk, prompt, beside, format, dense, strategy, device, slots, batch, context, steps, warmup,
        workers, io;
    double cache_rate, link_gbs, share, ceiling_seconds, device_gbs;
    uint64_t seed, ple_bytes;
    bool device_given, chunk_given, beside_given, compare, prefill, json, pin;
    uint32_t prefetch, look_ahead; /* enum ft_prefetch_wish */
    double foresight;
    struct ft_option_numbers gpus;
};

static const enum ft_strategy compared[] = {FT_STRATEGY_OFFLOAD, FT_STRATEGY_CPU, FT_STRATEGY_HYBRID,
                                            FT_STRATEGY_AUTO};

_Static_assert(FT_STRATEGY_HYBRID == 4 && FT_DEVICE_CUDA == 2 && FT_IO_PREAD == 2 && FT_DENSE_TO_FP8 == 1,
               "choices below are in the order of their enums");

#define FIELD(name) offsetof(struct options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"shape", "NAME|FILE", "a published shape, a config.json, or FILE#NAME", NULL, FT_OPTION_STRING,
     FIELD(shape), 0, 0},
    {"format", FT_SHAPE_FORMATS, "of the experts; model: of the shape's checkpoint", NULL, FT_OPTION_CHOICE,
     FIELD(format), 0, 0},
    {"dense", "bf16|fp8", "of the dense weights", NULL, FT_OPTION_CHOICE, FIELD(dense), 0, 0},
    {"layers", "N", "the first N layers only", "all", FT_OPTION_U32, FIELD(cuts.layers), 1, FT_LAYERS_MAX},
    {"experts", "N", "experts of a layer", "all", FT_OPTION_U32, FIELD(cuts.experts), 1, FT_EXPERTS_MAX},
    {"vocab", "N", "tokens of the vocabulary", "all", FT_OPTION_U32, FIELD(cuts.vocab), 16, 1e9},
    {"strategy", "auto|fused|offload|cpu|hybrid", "where experts run", NULL, FT_OPTION_CHOICE,
     FIELD(strategy), 0, 0},
    {"compare", NULL, "a row each for offload, cpu, hybrid and auto", NULL, FT_OPTION_FLAG, FIELD(compare), 0,
     0},
    {"device", "none|host|cuda", "what the dense layers and the slots are on", "as the strategy needs",
     FT_OPTION_CHOICE, offsetof(struct options, device), offsetof(struct options, device_given), 0, 0},
    {"gpus", "N,N..",
     "which GPUs, as the CUDA runtime counts them; the layers are split over them in this order", "0",
     FT_OPTION_U32_LIST, FIELD(gpus), 0, 1023},
    {"workers", "N", "CPU workers", "one per usable core, less one for a device", FT_OPTION_U32,
     FIELD(workers), 1, FT_WORKERS_MAX},
    {"moe-cache-size", "N", "expert slots over all layers", "what fits", FT_OPTION_U32, FIELD(slots), 1, 1e9},
    {"moe-cache-rate", "X", "slots as a share of all experts, 0 .. 1", "not given", FT_OPTION_F64,
     FIELD(cache_rate), 0, 1},
    {"hybrid-share", "X", "hybrid: share of the misses to fetch, 0 .. 1", "as measured in this run",
     FT_OPTION_F64, FIELD(share), 0, 1},
    {"batch", "N", "sequences decoded together", NULL, FT_OPTION_U32, FIELD(batch), 1, FT_SEQUENCES_MAX},
    {"context", "N", "tokens before the first one that is timed", NULL, FT_OPTION_U32, FIELD(context), 1,
     1e7},
    {"steps", "N", "steps that are timed", NULL, FT_OPTION_U32, FIELD(steps), 1, 1e6},
    {"warmup", "N", "steps before them", NULL, FT_OPTION_U32, FIELD(warmup), 0, 1e6},
    {"prefill", NULL, "read a prompt, too: alone, and beside the sequences that decode", NULL, FT_OPTION_FLAG,
     FIELD(prefill), 0, 0},
    {"prompt", "N", "tokens of that prompt, with --prefill", "the context", FT_OPTION_U32, FIELD(prompt), 2,
     1e7},
    {"chunk", "N", "rows of one prefill step, with --prefill", NULL, FT_OPTION_U32,
     offsetof(struct options, chunk), offsetof(struct options, chunk_given), 1, 65536},
    {"beside", "N", "decode steps beside the prompt, at most, with --prefill", NULL, FT_OPTION_U32,
     offsetof(struct options, beside), offsetof(struct options, beside_given), 1, 1e6},
    {"routing", "FILE", "recorded routing (trace.<i> of a safetensors file)",
     "generated, see planner/routing.h", FT_OPTION_STRING, FIELD(routing), 0, 0},
    {"foresight", "X",
     "probability with which an expert of the next layer is foreseen; 0.7 is what the demo model's routers "
     "reach",
     "0.7", FT_OPTION_F64, FIELD(foresight), 0, 1},
    {"ple-file", "F", "PLE table to read rows from", "the model runs without PLE", FT_OPTION_STRING,
     FIELD(ple_file), 0, 0},
    {"ple-bytes", "BYTES", "size of the PLE table, which is made when it is absent", NULL, FT_OPTION_BYTES,
     FIELD(ple_bytes), 0, 0},
    {"io", "auto|uring|pread", "how the table is read", NULL, FT_OPTION_CHOICE, FIELD(io), 0, 0},
    {"link-gbs", "X", "host device: bandwidth of the link, GB/s", "as fast as memory", FT_OPTION_F64,
     FIELD(link_gbs), 0, 1e6},
    {"device-gbs", "X", "read bandwidth of the device for the bounds, GB/s", "as measured", FT_OPTION_F64,
     FIELD(device_gbs), 0, 1e6},
    {"ceiling-seconds", "X", "time for each round of the ceilings", NULL, FT_OPTION_F64,
     FIELD(ceiling_seconds), 0.001, 60},
    {"seed", "N", "of weights and routing", NULL, FT_OPTION_U64, FIELD(seed), 0, 0},
    {"isa", "NAME", "kernels: as in ft run", "the best of this core", FT_OPTION_STRING, FIELD(isa), 0, 0},
    {"no-pin", NULL, "do not pin workers to cores", NULL, FT_OPTION_CLEAR, FIELD(pin), 0, 0},
    {"look-ahead", "auto|on|off",
     "copy experts that the next layer's router will probably choose while the link idles; auto: as far as "
     "it pays",
     NULL, FT_OPTION_CHOICE, FIELD(look_ahead), 0, 0},
    {"prefetch", "auto|on|off",
     "strategy auto: copy experts ahead while the link idles; auto: not on a GPU, nor with --trace", NULL,
     FT_OPTION_CHOICE, FIELD(prefetch), 0, 0},
    {"trace", "FILE", "write a trace of a single strategy", NULL, FT_OPTION_STRING, FIELD(trace), 0, 0},
    {"json", NULL, "report as JSON", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};

struct bench {
    const struct options *options;
    struct ft_model model;
    enum ft_format format; /* of the experts */
    struct ft_weight_sizes sizes;
    struct ft_machine machine; /* before the weights took memory; then with what was measured */
    enum ft_device device;     /* of --compare, when none is asked for */
    struct ft_topology topology;
    bool has_topology;
    struct ft_gpu_mover *gpu; /* NULL without a GPU; keeps the banks pinned from session to session */
    bool abandoned;           /* steps failed: weights, routing and table stay for a lane that may be stuck */
    struct ft_row_tables *tables; /* NULL without PLE */
    struct ft_loaded loaded;
    struct ft_routing routing;
    struct ft_routing_options generator; /* step_count 0: the routing is recorded */
    double *step_s;                      /* [steps] */
    struct ft_event *events;             /* [2 FT_SEQUENCES_MAX] */
    struct ft_decode_report report;
};

static bool go_on(void)
{
    return !ft_interrupt_signal();
}

static bool show(void *context, uint64_t done, uint64_t total)
{
    (void)context;
    (void)done;
    (void)total;
    return go_on();
}

/* ---- the engine of a row ---- */

/* Tokens that a sequence may generate: with --prefill also beside the prompt and after it. */
static uint32_t max_tokens(const struct options *o)
{
    return o->warmup + o->steps + (o->prefill ? o->beside + o->steps : 0) + 2;
}

static uint32_t prompt_tokens(const struct options *o)
{
    return o->prompt ? o->prompt : FT_MAX(o->context, 2u);
}

static void make_open_options(const struct bench *bench, enum ft_strategy strategy,
                              struct ft_open_options *open)
{
    const struct options *o = bench->options;
    struct ft_kv_layout kv;
    ft_kv_layout_init(&kv, &bench->model);
    uint64_t tokens = ft_round_up((uint64_t)o->context + max_tokens(o), kv.page_tokens) * o->batch;
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

static struct ft_engine_parts parts_of(const struct bench *bench, bool measured)
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
static int list_warm(const struct bench *bench, uint32_t slot_count, struct ft_routing_warm *warm,
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

static int submit(struct bench *bench, struct ft_session *session, struct ft_error *err)
{
    const struct options *o = bench->options;
    uint32_t handle, *prompt = malloc(o->context * sizeof *prompt);
    int status =
        prompt ? FT_OK : ft_error_set(err, FT_MEMORY, "no memory for a prompt of %u tokens", o->context);
    for (uint32_t s = 0; status == FT_OK && s < o->batch; s++) {
        for (uint64_t i = 0; i < o->context; i++) /* any tokens do; no two sequences alike */
            prompt[i] = (uint32_t)((i * 2654435761u + s * 40503u + o->seed) % bench->model.vocab);
        const struct ft_request request = {.prompt = prompt,
                                           .prompt_count = o->context,
                                           .max_tokens = max_tokens(o),
                                           .sampling = {.top_p = 1, .repetition_penalty = 1},
                                           .assumed_count = o->context - 1};
        status = ft_session_submit(session, &request, &handle, err);
    }
    free(prompt);
    return status;
}

/* One step; *tokens new ones came. */
static int step_once(struct bench *bench, struct ft_session *session, uint32_t *tokens, struct ft_error *err)
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

static int warm_up(struct bench *bench, struct ft_session *session, struct ft_error *err)
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

static int time_steps(struct bench *bench, struct ft_session *session, struct ft_decode_row *row,
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

static struct ft_decode_bound bound_with(const struct bench *bench, const struct ft_decode_row *row,
                                         double active, double misses, struct ft_decode_traffic *traffic)
{
    ft_decode_traffic_experts(traffic, bench->report.expert_bytes, active / row->steps, misses / row->steps);
    return ft_decode_bound(traffic, &bench->report.ceilings, row->plan.strategy, row->plan.device);
}

/* Replays the routing with as many slots; a model with dense layers has rows in it that nobody routes. */
static int replay(const struct bench *bench, struct ft_decode_row *row, const struct ft_routing_warm *warm,
                  uint32_t first, struct ft_error *err)
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

static int find_bounds(const struct bench *bench, struct ft_decode_row *row,
                       const struct ft_routing_warm *warm, uint32_t first, struct ft_error *err)
{
    const struct options *o = bench->options;
    uint64_t active, misses;
    double context = (double)o->context + o->warmup + o->steps / 2.0;
    ft_decode_traffic_init(&row->traffic, &bench->model, &bench->sizes, o->batch, context, KV_ELEMENT_BYTES);
    int status = replay(bench, row, warm, first, err);
    ft_decode_row_experts(row, &active, &misses);
    row->bound = bound_with(bench, row, (double)active, (double)misses, &row->traffic);
    return status;
}

static int measure_row(struct bench *bench, struct ft_engine *engine, struct ft_decode_row *row,
                       struct ft_error *err)
{
    struct ft_routing_warm warm;
    uint32_t first = 0;
    const struct options *o = bench->options;
    const struct ft_bench_prefill_options prefill = {.prompt_tokens = prompt_tokens(o),
                                                     .vocab = bench->model.vocab,
                                                     .batch = o->batch,
                                                     .steps_max = o->beside,
                                                     .steps = o->steps,
                                                     .seed = o->seed,
                                                     .go_on = go_on};
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

static int run_row(struct bench *bench, enum ft_strategy strategy, struct ft_decode_row *row,
                   struct ft_error *err)
{
    const struct options *o = bench->options;
    struct ft_open_options open;
    struct ft_engine engine;
    struct ft_error closing;
    const struct ft_engine_parts parts = parts_of(bench, true);
    make_open_options(bench, strategy, &open);
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

/* ---- before the rows ---- */

static int open_table(struct bench *bench, struct ft_error *err)
{
    const struct options *o = bench->options;
    bool none = !bench->model.ple_count;
    snprintf(bench->report.ple, sizeof bench->report.ple, "%s", none ? "off" : o->ple_file);
    if (none)
        return FT_OK;
    uint32_t row_bytes = bench->model.ple[0].row_width;
    if (access(o->ple_file, F_OK) != 0) {
        struct ft_bench_ple made;
        const struct ft_bench_ple_options options = {.path = o->ple_file,
                                                     .file_bytes = o->ple_bytes,
                                                     .row_bytes = row_bytes,
                                                     .steps = 1,
                                                     .backend = (enum ft_io_backend)o->io,
                                                     .keep = true,
                                                     .progress = show};
        int status = ft_bench_ple(&options, &made, err);
        if (status != FT_OK)
            return status;
    }
    int status = ft_row_tables_open_file(&bench->tables, o->ple_file, row_bytes, err);
    return status == FT_OK ? ft_shapes_fit_ple(&bench->model, ft_row_table_row_count(bench->tables, 0), err)
                           : status;
}

static int get_routing(struct bench *bench, struct ft_error *err)
{
    const struct options *o = bench->options;
    const struct ft_model *m = &bench->model;
    char ahead[96] = "";
    int status;
    if (o->look_ahead != FT_PREFETCH_OFF)
        snprintf(ahead, sizeof ahead, "; look-ahead: %.2f of what is foreseen of the next layer comes",
                 o->foresight);
    if (o->routing) {
        snprintf(bench->report.routing, sizeof bench->report.routing, "recorded: %.150s%s", o->routing,
                 ahead);
        status = ft_routing_file_read(o->routing, m, o->batch, &bench->routing, err);
        bench->routing.foresight = (float)o->foresight;
        return status;
    }
    snprintf(bench->report.routing, sizeof bench->report.routing, "generated, seed %llu%s",
             (unsigned long long)o->seed, ahead);
    bench->generator = (struct ft_routing_options){.step_count = FT_MIN(max_tokens(o), ROUTING_REPEATS),
                                                   .layer_count = m->layer_count,
                                                   .row_count = o->batch,
                                                   .topk = m->topk,
                                                   .expert_count = m->expert_count,
                                                   .seed = o->seed};
    status = ft_routing_generate(&bench->generator, &bench->routing, err);
    bench->routing.foresight = (float)o->foresight;
    return status;
}

/* Whether every row will fit, before minutes are spent on weights. */
static int check_plans(struct bench *bench, const enum ft_strategy *strategies, uint32_t count,
                       uint32_t *workers, enum ft_device *device, struct ft_error *err)
{
    const struct ft_engine_parts parts = parts_of(bench, false);
    int status = FT_OK;
    for (uint32_t i = 0; status == FT_OK && i < count; i++) {
        struct ft_open_options open;
        struct ft_engine engine;
        struct ft_error ignored;
        make_open_options(bench, strategies[i], &open);
        status = ft_engine_plan_parts(&engine, &open, &parts, err);
        if (status != FT_OK)
            return status;
        if (!engine.plan.fits)
            status = ft_error_set(err, FT_MEMORY, "strategy %s does not fit: %s",
                                  ft_strategy_name(strategies[i]), engine.plan.advice);
        bench->machine = engine.machine;
        *workers = engine.plan.workers;
        *device = engine.plan.device;
        ft_engine_close(&engine, &ignored);
    }
    return status;
}

static int make_weights(struct bench *bench, struct ft_error *err)
{
    const struct options *o = bench->options;
    const struct ft_synthetic_options options = {.format = bench->format,
                                                 .dense = (enum ft_dense)o->dense,
                                                 .seed = o->seed,
                                                 .topology = &bench->topology,
                                                 .go_on = go_on};
    int status = ft_synthetic_make(&bench->model, &options, &bench->loaded, &bench->report.made, err);
    for (uint32_t i = 0; status == FT_OK && i < bench->model.layer_count; i++)
        if (!bench->model.layers[i].dense)
            bench->report.expert_bytes = bench->loaded.weights.layers[i].expert_layout.bytes;
    return status;
}

/* What was measured goes into the machine too: hybrid and auto decide by it. */
static int measure_ceilings(struct bench *bench, uint32_t workers, enum ft_device device,
                            struct ft_error *err)
{
    const struct options *o = bench->options;
    struct ft_ceilings *c = &bench->report.ceilings;
    struct ft_machine *machine = &bench->machine;
    struct ft_mover mover = {0};
    double linear = 0;
    if (device == FT_DEVICE_CUDA) {
        int opened = ft_gpu_mover_open(&bench->gpu, machine->gpu_id[0], &bench->model, &bench->loaded.weights,
                                       o->link_gbs * 1e9, err);
        if (opened == FT_OK)
            opened = ft_gpu_mover_measure(bench->gpu, &machine->device_read_bytes_per_s, &linear, err);
        if (opened != FT_OK)
            return opened;
        mover = (struct ft_mover){bench->gpu, ft_gpu_mover_copy, ft_gpu_mover_drain};
    }
    const struct ft_ceilings_options options = {.model = &bench->model,
                                                .weights = &bench->loaded.weights,
                                                .topology = &bench->topology,
                                                .isa = o->isa,
                                                .device = device,
                                                .workers = workers,
                                                .pin = o->pin,
                                                .seconds = o->ceiling_seconds,
                                                .link_bytes_per_s = o->link_gbs * 1e9,
                                                .device_read_bytes_per_s = machine->device_read_bytes_per_s,
                                                .mover = bench->gpu ? &mover : NULL};
    int status = ft_ceilings_measure(&options, c, err);
    if (status != FT_OK)
        return status;
    c->link_linear_bytes_per_s = linear;
    if (o->device_gbs > 0)
        c->device_read_bytes_per_s = o->device_gbs * 1e9;
    if (!(c->link_bytes_per_s > 0))
        c->link_bytes_per_s = machine->link_bytes_per_s;
    machine->cpu_read_bytes_per_s = c->cpu_read_bytes_per_s;
    machine->cpu_expert_bytes_per_s[bench->format] = c->cpu_expert_bytes_per_s;
    machine->device_read_bytes_per_s = c->device_read_bytes_per_s;
    machine->link_bytes_per_s = c->link_bytes_per_s;
    machine->cpu_overlap_bytes_per_s = c->both_cpu_bytes_per_s;
    machine->link_overlap_bytes_per_s = c->both_link_bytes_per_s;
    return FT_OK;
}

static int prepare(struct bench *bench, struct ft_error *err)
{
    const struct options *o = bench->options;
    struct ft_decode_report *r = &bench->report;
    struct ft_shape_cuts cuts = o->cuts;
    cuts.no_ple = !o->ple_file;
    int status = ft_shapes_read(o->shape, &cuts, &bench->model, r->shape, sizeof r->shape, err);
    if (status == FT_OK)
        status = ft_shapes_find_format(o->shape, o->format, &bench->format, err);
    if (status == FT_OK)
        status =
            ft_synthetic_sizes(&bench->model, bench->format, (enum ft_dense)o->dense, &bench->sizes, err);
    if (status == FT_OK && !bench->sizes.moe_layer_count)
        status = ft_error_set(err, FT_UNSUPPORTED, "%s has no experts", r->shape);
    if (status == FT_OK)
        status = ft_topology_open(&bench->topology, NULL, err);
    bench->has_topology = status == FT_OK;
    if (status == FT_OK)
        status = open_table(bench, err);
    if (status == FT_OK)
        status = get_routing(bench, err);
    r->format = bench->format;
    r->layer_count = bench->model.layer_count;
    r->expert_count = bench->model.expert_count;
    r->topk = bench->model.topk;
    r->seed = o->seed;
    return status;
}

/* As soon as it is known: a strategy that fails later takes nothing with it. */
static void print_row(const struct ft_decode_report *r, uint32_t row)
{
    if (row == 0)
        ft_decode_report_print_head(r, stdout);
    ft_decode_report_print_row(r, &r->rows[row], stdout);
    fflush(stdout);
}

static int check_use(const struct options *o, struct ft_error *err)
{
    const char *alone = o->prompt         ? "--prompt"
                        : o->chunk_given  ? "--chunk"
                        : o->beside_given ? "--beside"
                                          : NULL;
    if (alone && !o->prefill)
        return ft_error_set(err, FT_USAGE, "%s is about the prompt that --prefill reads: give --prefill, too",
                            alone);
    if (o->compare && o->trace)
        return ft_error_set(err, FT_USAGE, "--trace takes one strategy, --compare runs several");
    return FT_OK;
}

static int run(struct bench *bench, struct ft_error *err)
{
    const struct options *o = bench->options;
    const enum ft_strategy one = (enum ft_strategy)o->strategy, *strategies = o->compare ? compared : &one;
    uint32_t count = o->compare ? FT_COUNT_OF(compared) : 1, workers = 1;
    enum ft_device device = FT_DEVICE_NONE;
    struct ft_decode_report *r = &bench->report;
    int status = check_use(o, err);
    if (status != FT_OK)
        return status;
    bench->step_s = calloc(o->steps, sizeof *bench->step_s);
    bench->events = calloc(2 * FT_SEQUENCES_MAX, sizeof *bench->events);
    r->rows = calloc(count, sizeof *r->rows);
    if (!bench->step_s || !bench->events || !r->rows)
        return ft_error_set(err, FT_MEMORY, "no memory for the results of %u steps", o->steps);
    status = prepare(bench, err);
    if (status == FT_OK && o->compare && !o->device_given) { /* the rows differ in the strategy alone */
        struct ft_error none;
        bool found = ft_machine_probe_gpus(&bench->machine, &o->gpus, &none) == FT_OK;
        bench->device = found ? FT_DEVICE_CUDA : FT_DEVICE_HOST;
    }
    if (status == FT_OK)
        status = check_plans(bench, strategies, count, &workers, &device, err);
    if (status == FT_OK)
        status = make_weights(bench, err);
    if (status == FT_OK)
        status = measure_ceilings(bench, workers, device, err);
    for (; status == FT_OK && r->row_count < count; r->row_count += status == FT_OK) {
        status = run_row(bench, strategies[r->row_count], &r->rows[r->row_count], err);
        if (status == FT_OK && !o->json)
            print_row(r, r->row_count);
    }
    return status;
}

static void fini(struct bench *bench)
{
    if (!bench->abandoned)
        ft_gpu_mover_close(bench->gpu);
    if (!bench->abandoned) {
        ft_routing_free(&bench->routing);
        ft_loaded_fini(&bench->loaded);
        ft_row_tables_close(bench->tables);
    }
    if (bench->has_topology)
        ft_topology_close(&bench->topology);
    free(bench->step_s);
    free(bench->events);
    free(bench->report.rows);
    if (!bench->abandoned)
        free(bench);
}

int ft_command_bench_decode(int argc, char **argv)
{
    struct options options = {.shape = "qwen3.8-flash-next",
                              .cache_rate = -1,
                              .share = -1,
                              .batch = 1,
                              .context = 256,
                              .chunk = 128,
                              .beside = 1024,
                              .steps = 64,
                              .warmup = 16,
                              .ceiling_seconds = 0.2,
                              .seed = FT_ROUTING_SEED,
                              .foresight = FT_FORESIGHT,
                              .ple_bytes = 8ull << 30,
                              .pin = true};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options}};
    const struct ft_option_set set = {"ft bench decode",
                                      "[--shape NAME] [options]",
                                      "Decodes with synthetic weights of a model's shape, and says how near "
                                      "it came to what the machine can do.",
                                      groups,
                                      1,
                                      0};
    struct ft_option_rest rest;
    struct ft_error err;
    int exit_code;
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    struct bench *bench = calloc(1, sizeof *bench);
    if (!bench) {
        ft_error_set(&err, FT_MEMORY, "no memory for a benchmark");
        return ft_command_fail(&err);
    }
    bench->options = &options;
    ft_decode_report_init(&bench->report, argc, argv);
    int status = run(bench, &err);
    if (status == FT_OK && options.json)
        ft_decode_report_write_json(&bench->report, stdout);
    fini(bench);
    return status == FT_OK ? ft_command_finish(FT_EXIT_OK) : ft_command_fail(&err);
}
