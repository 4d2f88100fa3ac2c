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
#include "tools/command.h"
#include "tools/decode_bench.h"
#include "tools/ft_bench.h"
#include "tools/interrupt.h"
#include "tools/machine_probe.h"
#include "tools/routing_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROUTING_REPEATS 4096u /* generated steps; a longer run repeats them */

static const enum ft_strategy compared[] = {FT_STRATEGY_OFFLOAD, FT_STRATEGY_CPU, FT_STRATEGY_HYBRID,
                                            FT_STRATEGY_AUTO};

_Static_assert(FT_STRATEGY_HYBRID == 4 && FT_DEVICE_CUDA == 2 && FT_IO_PREAD == 2 && FT_DENSE_TO_FP8 == 1,
               "choices below are in the order of their enums");

#define FIELD(name) offsetof(struct ft_decode_options, name), FT_OPTION_NO_FIELD
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
     FT_OPTION_CHOICE, offsetof(struct ft_decode_options, device),
     offsetof(struct ft_decode_options, device_given), 0, 0},
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
     offsetof(struct ft_decode_options, chunk), offsetof(struct ft_decode_options, chunk_given), 1, 65536},
    {"beside", "N", "decode steps beside the prompt, at most, with --prefill", NULL, FT_OPTION_U32,
     offsetof(struct ft_decode_options, beside), offsetof(struct ft_decode_options, beside_given), 1, 1e6},
    {"routing", "FILE", "recorded routing (trace.<i> of a safetensors file)",
     "generated, see planner/routing.h", FT_OPTION_STRING, FIELD(routing), 0, 0},
    {"foresight", "X",
     "share of a next layer's experts that are foreseen, besides chance, and more of the likeliest; 0.7 is what "
     "the demo model's routers reach",
     "0.7", FT_OPTION_F64, FIELD(foresight), 0, 1},
    {"ple-file", "F", "PLE table to read rows from", "the model runs without PLE", FT_OPTION_STRING,
     FIELD(ple_file), 0, 0},
    {"ple-bytes", "BYTES", "size of the PLE table, which is made when it is absent", NULL, FT_OPTION_BYTES,
     FIELD(ple_bytes), 0, 0},
    {"io", "auto|uring|pread", "how the table is read", NULL, FT_OPTION_CHOICE, FIELD(io), 0, 0},
    {"link-gbs", "X", "host device: bandwidth of the link, GB/s", "as fast as memory", FT_OPTION_F64,
     FIELD(link_gbs), 0.001, 1e6},
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

static bool show(void *context, uint64_t done, uint64_t total)
{
    (void)context;
    (void)done;
    (void)total;
    return ft_decode_go_on();
}

/* ---- before the rows ---- */

static int open_table(struct ft_decode_bench *bench, struct ft_error *err)
{
    const struct ft_decode_options *o = bench->options;
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

static int get_routing(struct ft_decode_bench *bench, struct ft_error *err)
{
    const struct ft_decode_options *o = bench->options;
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
    bench->generator =
        (struct ft_routing_options){.step_count = FT_MIN(ft_decode_max_tokens(o), ROUTING_REPEATS),
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
static int check_plans(struct ft_decode_bench *bench, const enum ft_strategy *strategies, uint32_t count,
                       uint32_t *workers, enum ft_device *device, struct ft_error *err)
{
    const struct ft_engine_parts parts = ft_decode_parts(bench, false);
    int status = FT_OK;
    for (uint32_t i = 0; status == FT_OK && i < count; i++) {
        struct ft_open_options open;
        struct ft_engine engine;
        struct ft_error ignored;
        ft_decode_open_options(bench, strategies[i], &open);
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

static int make_weights(struct ft_decode_bench *bench, struct ft_error *err)
{
    const struct ft_decode_options *o = bench->options;
    const struct ft_synthetic_options options = {.format = bench->format,
                                                 .dense = (enum ft_dense)o->dense,
                                                 .seed = o->seed,
                                                 .topology = &bench->topology,
                                                 .go_on = ft_decode_go_on};
    int status = ft_synthetic_make(&bench->model, &options, &bench->loaded, &bench->report.made, err);
    for (uint32_t i = 0; status == FT_OK && i < bench->model.layer_count; i++)
        if (!bench->model.layers[i].dense)
            bench->report.expert_bytes = bench->loaded.weights.layers[i].expert_layout.bytes;
    return status;
}

/* What was measured goes into the machine too: hybrid and auto decide by it. */
static int measure_ceilings(struct ft_decode_bench *bench, uint32_t workers, enum ft_device device,
                            struct ft_error *err)
{
    const struct ft_decode_options *o = bench->options;
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

static int prepare(struct ft_decode_bench *bench, struct ft_error *err)
{
    const struct ft_decode_options *o = bench->options;
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
static int print_row(const struct ft_decode_report *r, uint32_t row, struct ft_error *err)
{
    if (row == 0)
        ft_decode_report_print_head(r, stdout);
    ft_decode_report_print_row(r, &r->rows[row], stdout);
    if (fflush(stdout) == 0 && !ferror(stdout))
        return FT_OK;
    return ft_error_set(err, FT_SYSTEM, "standard output: %s", strerror(errno));
}

static int check_use(const struct ft_decode_options *o, struct ft_error *err)
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

static int run(struct ft_decode_bench *bench, struct ft_error *err)
{
    const struct ft_decode_options *o = bench->options;
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
        status = ft_decode_run_row(bench, strategies[r->row_count], &r->rows[r->row_count], err);
        if (status == FT_OK && !o->json)
            status = print_row(r, r->row_count, err);
    }
    return status;
}

static void fini(struct ft_decode_bench *bench)
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
    struct ft_decode_options options = {.shape = "qwen3.8-flash-next",
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
    struct ft_decode_bench *bench = calloc(1, sizeof *bench);
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
