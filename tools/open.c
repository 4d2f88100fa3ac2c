/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/open.h"

#include "jobs/gpu_mover.h"
#include "planner/plan_make.h"
#include "planner/policies.h"
#include "tools/interrupt.h"
#include "tools/machine_probe.h"
#include "tools/measure_start.h"
#include "tools/replay_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What the plan maker chooses by itself; only beyond it do prompts change the plan. */
#define KV_TOKENS_DEFAULT 8192u
#define SEQUENCES_DEFAULT 8u
#define KV_PAGE_SPARE 64u

#define FIELD(name) offsetof(struct ft_open_options, name), FT_OPTION_NO_FIELD
#define GIVEN(name, flag) offsetof(struct ft_open_options, name), offsetof(struct ft_open_options, flag)

_Static_assert(FT_STRATEGY_HYBRID == 4 && FT_DEVICE_HOST == 1 && FT_IO_PREAD == 2 && FT_ROWS_RAM == 1 &&
                   FT_DENSE_TO_FP8 == 1 && FT_DENSE_AUTO == 2,
               "choices below are in the order of their enums");

const struct ft_option ft_open_option_table[FT_OPEN_OPTION_COUNT] = {
    {"model", "DIR", "checkpoint directory", "the demo model", FT_OPTION_STRING, FIELD(model), 0, 0},
    {"strategy", "auto|fused|offload|cpu|hybrid", "where experts run", NULL, FT_OPTION_CHOICE,
     FIELD(strategy), 0, 0},
    {"device", "none|host|cuda", "host: play a GPU with slots, fetches and a link", "a GPU if there is one",
     FT_OPTION_CHOICE, GIVEN(device, device_given), 0, 0},
    {"gpus", "N,N..",
     "which GPUs, as the CUDA runtime counts them; the layers are split over them in this order", "0",
     FT_OPTION_U32_LIST, FIELD(gpus), 0, 1023},
    {"gpu", "N", "the same as --gpus N", "0", FT_OPTION_U32_LIST, FIELD(gpus), 0, 1023},
    {"handshake", "auto|memop|kernel|launch", "how a GPU step and its driver meet", NULL, FT_OPTION_CHOICE,
     FIELD(handshake), 0, 0},
    {"workers", "N", "CPU workers", "one per usable core, less one for a device", FT_OPTION_U32,
     FIELD(plan.workers), 1, FT_WORKERS_MAX},
    {"moe-cache-size", "N", "expert slots over all layers", "what fits", FT_OPTION_U32,
     FIELD(plan.slot_count), 1, 1e9},
    {"moe-cache-rate", "X", "slots as a share of all experts, 0 .. 1", "not given", FT_OPTION_F64,
     FIELD(plan.slot_rate), 0, 1},
    {"hybrid-share", "X", "hybrid: share of the misses to fetch, 0 .. 1", "as measured, else 0.5",
     FT_OPTION_F64, FIELD(plan.fetch_share), 0, 1},
    {"moe-cache-auto", NULL, "as many expert slots as the device has room for",
     "on, unless a size or rate is given", FT_OPTION_FLAG, FIELD(cache_auto), 0, 0},
    {"kv-reserve-tokens", "N", "the same as --kv-tokens", NULL, FT_OPTION_U32, FIELD(plan.kv_tokens), 1,
     FT_KV_TOKENS_MAX},
    {"kv-tokens", "N", "tokens in the KV pool, all sequences together",
     "up to 8192, more when prompts need it", FT_OPTION_U32, FIELD(plan.kv_tokens), 1, FT_KV_TOKENS_MAX},
    {"sequences", "N", "sequences decoded together", "8, or the number of prompts", FT_OPTION_U32,
     FIELD(plan.sequences_max), 1, FT_SEQUENCES_MAX},
    {"chunk", "N", "rows of one prefill step", "128", FT_OPTION_U32, FIELD(plan.chunk_rows), 1, 65536},
    {"snapshot-bytes", "BYTES", "RAM for snapshots of recurrent state", "8 states, at most 64 MiB",
     FT_OPTION_BYTES, GIVEN(plan.snapshot_bytes, snapshot_given), 0, 0},
    {"vram", "BYTES,..", "limit of device memory: of every GPU, or one by one (12G,24G); 0 = none",
     "what the machine has", FT_OPTION_BYTES_LIST, FIELD(vram), 0, 0},
    {"ram", "BYTES", "limit of memory", "0, what is available", FT_OPTION_BYTES, FIELD(plan.ram_bytes), 0, 0},
    {"ple-backend", "disk|ram", "where PLE tables are read from", NULL, FT_OPTION_CHOICE, FIELD(ple_backend),
     0, 0},
    {"dense", "bf16|fp8|auto",
     "dense weights: as stored, or fp8 (half the memory), which is planned but not accurate enough to run",
     NULL, FT_OPTION_CHOICE, FIELD(dense), 0, 0},
    {"io", "auto|uring|pread", "how files are read", NULL, FT_OPTION_CHOICE, FIELD(io), 0, 0},
    {"deterministic", NULL, "same bits every time: nothing depends on measured time", NULL, FT_OPTION_FLAG,
     FIELD(plan.deterministic), 0, 0},
    {"replay", "TRACE", "repeat the placements recorded in a trace", NULL, FT_OPTION_STRING, FIELD(replay), 0,
     0},
    {"trace", "FILE", "write a trace (ft-graph reads it)", NULL, FT_OPTION_STRING, FIELD(trace), 0, 0},
    {"link-gbs", "X", "host device: bandwidth of the link, GB/s", "as fast as memory", FT_OPTION_F64,
     FIELD(link_gbs), 0.001, 1e6},
    {"link-delay-us", "X", "host device: random delay per fetch, at most", "0", FT_OPTION_F64,
     FIELD(link_delay_us), 0, 1e6},
    {"isa", "NAME",
     "kernels: ref, avx2, avx2vnni, avx512, avx512vnni, avx512amx (for many rows); less exact: "
     "avx512vnni-int16, avx2-int8, avx2vnni-int8, avx512vnni-int8 (also $FT_ISA)",
     "the best of this core", FT_OPTION_STRING, FIELD(isa), 0, 0},
    {"look-ahead", "auto|on|off",
     "copy experts that the next layer's router will probably choose while the link idles; auto: as far as "
     "it pays",
     NULL, FT_OPTION_CHOICE, FIELD(look_ahead), 0, 0},
    {"prefetch", "auto|on|off",
     "strategy auto: copy experts ahead while the link idles; auto: not on a GPU, nor with --trace", NULL,
     FT_OPTION_CHOICE, FIELD(prefetch), 0, 0},
    {"no-pin", NULL, "do not pin workers to cores", NULL, FT_OPTION_CLEAR, FIELD(pin), 0, 0},
    {"quiet", NULL, "no progress, notes or summary on stderr", NULL, FT_OPTION_FLAG, FIELD(quiet), 0, 0},
};

void ft_open_options_init(struct ft_open_options *options)
{
    memset(options, 0, sizeof *options);
    options->plan.slot_rate = -1;
    options->plan.fetch_share = -1;
    options->pin = true;
}

struct ft_option_group ft_open_option_group(struct ft_open_options *options)
{
    return (struct ft_option_group){"Engine", ft_open_option_table, FT_OPEN_OPTION_COUNT, options};
}

/* ---- the directory ---- */

static bool has_config(const char *dir)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/config.json", dir);
    return access(path, R_OK) == 0;
}

static bool find_demo(char *dir, size_t cap)
{
    static const char *const places[] = {"../../tests/data/ft-tiny", "../tests/data/ft-tiny",
                                         "../share/ft/ft-tiny", "tests/data/ft-tiny"};
    char self[3072];
    const char *wish = getenv("FT_DEMO_MODEL");
    if (wish && wish[0]) {
        snprintf(dir, cap, "%s", wish);
        return true; /* what the user named is used, or refused by name */
    }
    ssize_t bytes = readlink("/proc/self/exe", self, sizeof self - 1);
    if (bytes <= 0)
        return false;
    self[bytes] = '\0';
    *strrchr(self, '/') = '\0';
    for (uint32_t i = 0; i < FT_COUNT_OF(places); i++) {
        char place[4096];
        snprintf(place, sizeof place, "%s/%s", self, places[i]);
        char *clean = has_config(place) ? realpath(place, NULL) : NULL;
        if (!clean)
            continue;
        snprintf(dir, cap, "%s", clean);
        free(clean);
        return true;
    }
    return false;
}

static int check_dir(const char *dir, struct ft_error *err)
{
    struct stat info;
    if (stat(dir, &info) != 0)
        return ft_error_set(err, FT_IO, "model directory %s: %s", dir, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return ft_error_set(
            err, FT_IO, "%s: is not a directory; a model is a directory with config.json and *.safetensors",
            dir);
    return FT_OK;
}

int ft_engine_find_dir(const struct ft_open_options *options, char *dir, size_t cap, struct ft_error *err)
{
    if (options->model) {
        if (strlen(options->model) >= cap)
            return ft_error_set(err, FT_USAGE, "--model: the path is longer than %zu bytes", cap - 1);
        snprintf(dir, cap, "%s", options->model);
        return check_dir(dir, err);
    }
    if (!find_demo(dir, cap))
        return ft_error_set(
            err, FT_USAGE,
            "no model: name a checkpoint directory with --model DIR (the demo model was not found "
            "next to the program; $FT_DEMO_MODEL can name it)");
    if (!options->quiet)
        fprintf(stderr, "ft: no --model given, using the demo model %s\n", dir);
    return check_dir(dir, err);
}

/* ---- the plan ---- */

void ft_open_options_want_kv(struct ft_open_options *options, uint64_t tokens_each, uint32_t sequences)
{
    /* A page or more of each sequence stays partly empty; the planner rounds up. */
    uint64_t wanted = (tokens_each + KV_PAGE_SPARE) * sequences;
    if (!options->plan.sequences_max && sequences > SEQUENCES_DEFAULT)
        options->plan.sequences_max = FT_MIN(sequences, FT_SEQUENCES_MAX);
    if (!options->plan.kv_tokens && wanted > KV_TOKENS_DEFAULT)
        options->plan.kv_tokens = (uint32_t)FT_MIN(wanted, (uint64_t)FT_KV_TOKENS_MAX);
}

static void resolve_options(const struct ft_open_options *options, struct ft_plan_options *plan)
{
    *plan = options->plan;
    plan->strategy = (enum ft_strategy)options->strategy;
    plan->device = (enum ft_device)options->device;
    plan->device_given = options->device_given;
    plan->snapshot_given = options->snapshot_given;
    plan->ple_in_ram = options->ple_backend == FT_ROWS_RAM;
    if (options->gpus.count && !options->device_given) { /* who names GPUs wants them */
        plan->device = FT_DEVICE_CUDA;
        plan->device_given = true;
    }
    if (options->vram.count == 1)
        plan->device_bytes = options->vram.items[0];
    if (options->vram.count > 1) {
        plan->gpu_limit_count = FT_MIN(options->vram.count, (uint32_t)FT_GPUS_MAX); /* more: check_gpus */
        memcpy(plan->gpu_bytes, options->vram.items, plan->gpu_limit_count * sizeof *plan->gpu_bytes);
    }
}

/* What contradicts itself is said, not silently resolved. */
static int check_contradictions(const struct ft_open_options *options, const struct ft_plan *plan,
                                struct ft_error *err)
{
    bool size = options->plan.slot_count > 0, rate = options->plan.slot_rate >= 0;
    if (size && rate)
        return ft_error_set(err, FT_USAGE,
                            "--moe-cache-size and --moe-cache-rate say the same thing: give one of them");
    if ((size || rate) && options->cache_auto)
        return ft_error_set(
            err, FT_USAGE,
            "--moe-cache-auto leaves the number of slots to the plan: do not give --moe-cache-%s too",
            size ? "size" : "rate");
    if (options->vram.count && plan->device == FT_DEVICE_NONE)
        return ft_error_set(
            err, FT_USAGE,
            "--vram: there is no device whose memory could be limited; give --device cuda (for "
            "ft plan it need not be here), --device host, or --strategy offload or hybrid");
    if ((size || rate) && plan->device == FT_DEVICE_NONE)
        return ft_error_set(err, FT_USAGE,
                            "--moe-cache-%s: there is no device that could have slots; give --device host or "
                            "--strategy offload or hybrid",
                            size ? "size" : "rate");
    if (options->gpus.count && plan->device != FT_DEVICE_CUDA)
        return ft_error_set(err, FT_USAGE, "--gpus names GPUs and --device %s needs none: give one of them",
                            ft_device_name(plan->device));
    if (options->handshake && plan->device != FT_DEVICE_CUDA)
        return ft_error_set(
            err, FT_USAGE,
            "--handshake is how a GPU step and its driver meet, and this plan has no GPU (--device "
            "%s): leave it out",
            ft_device_name(plan->device));
    if (options->plan.slot_rate == 0 && plan->strategy != FT_STRATEGY_CPU && plan->device != FT_DEVICE_NONE)
        return ft_error_set(
            err, FT_USAGE,
            "--moe-cache-rate 0: experts are fetched into slots, so at least one is needed; give a "
            "larger rate, or --strategy cpu");
    const char *never = options->plan.deterministic           ? "--deterministic: it depends on measured time"
                        : options->replay                     ? "--replay: what was recorded is repeated"
                        : plan->device == FT_DEVICE_NONE      ? "--device none: nothing is copied there"
                        : plan->strategy == FT_STRATEGY_FUSED ? "--strategy fused: nothing is missing"
                                                              : NULL;
    if (options->look_ahead == FT_PREFETCH_ON && never)
        return ft_error_set(err, FT_USAGE, "--look-ahead on does not go with %s; leave one of them out",
                            never);
    if (options->plan.fetch_share >= 0 && plan->strategy != FT_STRATEGY_HYBRID)
        return ft_error_set(err, FT_USAGE,
                            "--hybrid-share is the share of the misses that strategy hybrid fetches, and the "
                            "strategy is %s: give --strategy hybrid, or leave it out",
                            ft_strategy_name(plan->strategy));
    return FT_OK;
}

static bool fp8_is_accepted(void)
{
    return (FT_FP8_USES & ~FT_FP8_USES_ACCEPTED) == 0;
}

/* auto: as stored when everything fits as wished, else fp8 (where that is accurate enough to be chosen). */
static int plan_dense(struct ft_engine *engine, enum ft_dense dense, const struct ft_plan_options *wishes,
                      struct ft_error *err)
{
    struct ft_plan *plan = &engine->plan;
    if (dense == FT_DENSE_AUTO && !fp8_is_accepted())
        dense = FT_DENSE_AS_STORED;
    engine->sizes = engine->dense_sizes[dense == FT_DENSE_TO_FP8];
    int status = ft_plan_make(engine->model, &engine->sizes, &engine->machine, wishes, plan, err);
    if (status != FT_OK || dense != FT_DENSE_AUTO || (plan->fits && !plan->lowered))
        return status;
    engine->sizes = engine->dense_sizes[FT_DENSE_TO_FP8];
    return ft_plan_make(engine->model, &engine->sizes, &engine->machine, wishes, plan, err);
}

static int check_gpus(const struct ft_option_numbers *gpus, const struct ft_option_numbers *vram,
                      struct ft_error *err)
{
    if (gpus->count > FT_GPUS_MAX)
        return ft_error_set(err, FT_USAGE, "--gpus names %u GPUs, at most %d are possible", gpus->count,
                            FT_GPUS_MAX);
    if (vram->count > FT_GPUS_MAX)
        return ft_error_set(err, FT_USAGE, "--vram names %u limits, at most %d GPUs are possible",
                            vram->count, FT_GPUS_MAX);
    for (uint32_t i = 0; i < gpus->count; i++)
        for (uint32_t j = 0; j < i; j++)
            if (gpus->items[i] == gpus->items[j])
                return ft_error_set(err, FT_USAGE, "--gpus names GPU %u twice", (uint32_t)gpus->items[i]);
    return FT_OK;
}

/* GPUs that need not be here, each of the memory that --vram says. */
static void assume_gpus(struct ft_machine *machine, const struct ft_open_options *options)
{
    machine->device = FT_DEVICE_CUDA;
    machine->device_memory_bytes = options->vram.items[0];
    machine->gpu_count = options->gpus.count ? options->gpus.count : options->vram.count; /* check_gpus */
    for (uint32_t i = 0; i < machine->gpu_count; i++) {
        machine->gpu_id[i] = i < options->gpus.count ? (uint32_t)options->gpus.items[i] : i;
        machine->gpu_memory_bytes[i] = options->vram.items[i < options->vram.count ? i : 0];
    }
}

/* machine: NULL = this one, as it is now. */
static int make_plan(struct ft_engine *engine, const struct ft_open_options *options,
                     const struct ft_machine *machine, struct ft_error *err)
{
    struct ft_plan_options wishes;
    resolve_options(options, &wishes);
    int listed = check_gpus(&options->gpus, &options->vram, err);
    if (listed != FT_OK)
        return listed;
    if (machine)
        engine->machine = *machine;
    else
        ft_machine_probe(&engine->machine, &engine->topology, NULL);
    if (!wishes.device_given || wishes.device == FT_DEVICE_CUDA) {
        int found = ft_machine_probe_gpus(&engine->machine, &options->gpus, err);
        if (found != FT_OK && wishes.device_given) {
            if (!options->assume_gpu || !options->vram.count)
                return found;
            assume_gpus(&engine->machine, options);
        }
    }
    if (options->link_gbs > 0)
        engine->machine.link_bytes_per_s = options->link_gbs * 1e9;
    int status =
        plan_dense(engine, options->fp8_uses ? FT_DENSE_TO_FP8 : (enum ft_dense)options->dense, &wishes, err);
    return status == FT_OK ? check_contradictions(options, &engine->plan, err) : status;
}

static const char *wanted_isa(const struct ft_open_options *options)
{
    const char *isa = options->isa ? options->isa : getenv("FT_ISA");
    return isa && isa[0] ? isa : NULL;
}

/* A plan may be for a machine whose kernels cannot run here, but a name that nobody knows is a mistake anywhere. */
static int check_isa(const struct ft_open_options *options, struct ft_error *err)
{
    struct ft_kernels kernels;
    if (options->isa && !options->isa[0])
        return ft_error_set(
            err, FT_USAGE,
            "--isa: the name is empty; name CPU kernels (ref, avx2, .., see --help), or leave "
            "it out");
    int status = ft_kernels_init(&kernels, wanted_isa(options), err);
    return status == FT_USAGE ? status : FT_OK;
}

/* Topology and plan of a model that is known; closes the engine on failure. */
static int plan_model(struct ft_engine *engine, const struct ft_open_options *options,
                      const struct ft_machine *machine, struct ft_error *err)
{
    int status = ft_topology_open(&engine->topology, NULL, err);
    engine->has_topology = status == FT_OK;
    if (status == FT_OK)
        status = make_plan(engine, options, machine, err);
    return status;
}

static int close_failed(struct ft_engine *engine, int status)
{
    struct ft_error ignored;
    if (status != FT_OK)
        ft_engine_close(engine, &ignored);
    return status;
}

static uint32_t fp8_uses(const struct ft_open_options *options)
{
    return options->fp8_uses ? options->fp8_uses : FT_FP8_USES;
}

int ft_engine_plan(struct ft_engine *engine, const struct ft_open_options *options, struct ft_error *err)
{
    memset(engine, 0, sizeof *engine);
    int status = check_isa(options, err);
    if (status == FT_OK)
        status = ft_engine_find_dir(options, engine->dir, sizeof engine->dir, err);
    if (status == FT_OK)
        status = ft_checkpoint_open(&engine->checkpoint, engine->dir, err);
    if (status == FT_OK) {
        engine->model = ft_checkpoint_model(engine->checkpoint);
        for (uint32_t dense = 0; dense < 2 && status == FT_OK; dense++)
            status = ft_load_sizes(engine->checkpoint, dense ? fp8_uses(options) : 0,
                                   &engine->dense_sizes[dense], err);
    }
    if (status == FT_OK)
        status = plan_model(engine, options, NULL, err);
    return close_failed(engine, status);
}

int ft_engine_plan_parts(struct ft_engine *engine, const struct ft_open_options *options,
                         const struct ft_engine_parts *parts, struct ft_error *err)
{
    memset(engine, 0, sizeof *engine);
    engine->model = parts->model;
    engine->dense_sizes[FT_DENSE_AS_STORED] = *parts->sizes;
    engine->dense_sizes[FT_DENSE_TO_FP8] = parts->fp8_sizes ? *parts->fp8_sizes : *parts->sizes;
    engine->weights = parts->weights;
    engine->tables = parts->tables;
    engine->routing = parts->routing;
    int status = check_isa(options, err);
    if (status == FT_OK)
        status = plan_model(engine, options, parts->machine, err);
    return close_failed(engine, status);
}

/* ---- the load ---- */

static bool show_progress(void *context, uint64_t done, uint64_t total)
{
    static const char bar[] = "########################################";
    int *shown = context;
    int percent = total ? (int)((double)done * 100 / (double)total) : 100;
    if (*shown >= 0 && percent != *shown) {
        *shown = percent;
        fprintf(stderr, "\rloading [%-40.*s] %3d%%", percent * 40 / 100, bar, percent);
    }
    return !ft_interrupt_signal();
}

static int load_weights(struct ft_engine *engine, const struct ft_open_options *options, struct ft_error *err)
{
    int shown = !options->quiet && isatty(STDERR_FILENO) ? 0 : -1; /* -1: show nothing */
    struct ft_load_options load = {.backend = (enum ft_io_backend)options->io,
                                   .fp8_uses = engine->plan.dense == FT_DENSE_TO_FP8 ? fp8_uses(options) : 0,
                                   .progress = show_progress,
                                   .progress_context = &shown};
    int status = ft_load(engine->checkpoint, &load, &engine->loaded, &engine->load, err);
    if (shown >= 0)
        fputs("\r\033[K", stderr);
    engine->is_loaded = status == FT_OK;
    engine->weights = &engine->loaded.weights;
    if (engine->is_loaded && engine->load.note[0] && !options->quiet)
        fprintf(stderr, "ft: note: %s\n", engine->load.note);
    return status;
}

/* ---- what strategy auto decides by ---- */

/* Without the figures auto begins with defaults, so a failure is only said. */
static int measure(struct ft_engine *engine, const struct ft_open_options *options, struct ft_error *err)
{
    struct ft_plan_options wishes;
    struct ft_error failure;
    if (options->replay || !ft_measure_wanted(&engine->plan, &engine->machine))
        return FT_OK;
    const struct ft_measure_options measure = {.model = engine->model,
                                               .weights = engine->weights,
                                               .topology = &engine->topology,
                                               .plan = &engine->plan,
                                               .format = engine->sizes.expert_format,
                                               .isa = wanted_isa(options),
                                               .link_bytes_per_s = options->link_gbs * 1e9,
                                               .gpu = engine->machine.gpu_id[0],
                                               .pin = options->pin};
    int status = ft_measure_start(&measure, &engine->machine, &engine->mover, &failure);
    if (status != FT_OK) {
        if (!options->quiet)
            fprintf(stderr, "ft: note: link and CPU could not be measured, auto begins with defaults: %s\n",
                    failure.message);
        return FT_OK;
    }
    /* The same sizes again: only the reason is another. */
    resolve_options(options, &wishes);
    status = ft_plan_make(engine->model, &engine->sizes, &engine->machine, &wishes, &engine->plan, err);
    if (status == FT_OK && !options->quiet)
        fprintf(stderr, "ft: auto: measured link %.1f, CPU %.1f, together %.1f + %.1f GB/s of experts\n",
                engine->machine.link_bytes_per_s / 1e9,
                engine->machine.cpu_expert_bytes_per_s[measure.format] / 1e9,
                engine->machine.link_overlap_bytes_per_s / 1e9,
                engine->machine.cpu_overlap_bytes_per_s / 1e9);
    return status;
}

/* ---- the session ---- */

/* Copies ahead are not recorded, so a trace, which may be replayed, has none unless they are asked for. An H200 lost 16%
 * by them: its small reads and writes of the host's memory wait behind them. */
static bool wants_prefetch(const struct ft_open_options *options, const struct ft_plan *plan)
{
    return options->prefetch == FT_PREFETCH_ON ||
           (options->prefetch == FT_PREFETCH_AUTO && plan->device != FT_DEVICE_CUDA && !options->trace);
}

static int open_session(struct ft_engine *engine, const struct ft_open_options *options, struct ft_error *err)
{
    struct ft_session_options session = {
        .model = engine->model,
        .weights = engine->weights,
        .ple = engine->tables,
        .plan = &engine->plan,
        .policy = engine->policy,
        .topology = &engine->topology,
        .isa = wanted_isa(options),
        .ple_io = (enum ft_io_backend)options->io,
        .pin = options->pin,
        .link_bytes_per_s = options->link_gbs * 1e9,
        .link_delay_ns_max = (uint64_t)(options->link_delay_us * 1e3),
        .seed = 1,
        .gpu = engine->machine.gpu_id[0],
        .handshake = (enum ft_handshake)options->handshake,
        .routing = engine->routing,
        .policy_params = {.model = engine->model,
                          .machine = &engine->machine,
                          .fetch_share = engine->plan.fetch_share,
                          .slot_count = engine->plan.slot_count,
                          .deterministic = engine->plan.deterministic,
                          .no_prefetch = !wants_prefetch(options, &engine->plan),
                          .no_look_ahead = options->look_ahead == FT_PREFETCH_OFF,
                          .always_looks = options->look_ahead == FT_PREFETCH_ON,
                          .extra = options->replay ? &engine->replay : NULL},
    };
    if (options->trace) {
        session.trace = ft_trace_file_step;
        session.trace_context = &engine->trace;
    }
    int status = ft_session_open(&engine->session, &session, err);
    if (status != FT_OK)
        return status;
    if (options->trace) {
        struct ft_trace_header *header = calloc(1, sizeof *header);
        if (!header)
            return ft_error_set(err, FT_MEMORY, "no memory for the trace's header");
        ft_session_trace_header(engine->session, header);
        ft_trace_file_begin(&engine->trace, header);
        free(header);
    }
    const char *note = ft_session_note(engine->session);
    if (note[0] && strcmp(note, engine->load.note) && !options->quiet) /* the load has said it already */
        fprintf(stderr, "ft: note: %s\n", note);
    ft_interrupt_watch(engine->session);
    return FT_OK;
}

static int open_rest(struct ft_engine *engine, const struct ft_open_options *options, struct ft_error *err)
{
    if (!engine->plan.fits)
        return ft_error_set(err, FT_MEMORY, "the model does not fit: %s", engine->plan.advice);
    if (engine->checkpoint && engine->plan.dense == FT_DENSE_TO_FP8 && !options->fp8_uses &&
        !fp8_is_accepted())
        return ft_error_set(
            err, FT_UNSUPPORTED,
            "--dense fp8: would change logits by more than 2%% of the largest (e4m3 has 3 bits of "
            "mantissa, a noise of 2.6%% in every product), so it can be planned and benchmarked, "
            "but not run: leave --dense out");
    int status = ft_policies_find_for(&engine->policy, engine->plan.strategy, err);
    /* What may be refused comes before the load, which can take minutes. */
    struct ft_kernels kernels;
    if (status == FT_OK)
        status = ft_kernels_init(&kernels, wanted_isa(options), err);
    if (status == FT_OK && options->replay) {
        status = ft_replay_file_read(&engine->replay, options->replay, engine->model, err);
        engine->policy = &ft_policy_replay;
    }
    if (status == FT_OK && options->trace)
        status = ft_trace_file_open(&engine->trace, options->trace, err);
    if (status == FT_OK && engine->checkpoint && engine->model->ple_count) {
        status = ft_row_tables_open(&engine->tables, engine->checkpoint, err);
        engine->owns_tables = status == FT_OK;
    }
    if (status == FT_OK && engine->checkpoint)
        status = load_weights(engine, options, err);
    if (status == FT_OK)
        status = measure(engine, options, err);
    if (status == FT_OK)
        status = open_session(engine, options, err);
    return status;
}

int ft_engine_open(struct ft_engine *engine, const struct ft_open_options *options, struct ft_error *err)
{
    int status = ft_engine_plan(engine, options, err);
    if (status != FT_OK)
        return status;
    return close_failed(engine, open_rest(engine, options, err));
}

int ft_engine_open_parts(struct ft_engine *engine, const struct ft_open_options *options,
                         const struct ft_engine_parts *parts, struct ft_error *err)
{
    int status = ft_engine_plan_parts(engine, options, parts, err);
    return status == FT_OK ? close_failed(engine, open_rest(engine, options, err)) : status;
}

int ft_engine_close(struct ft_engine *engine, struct ft_error *err)
{
    ft_interrupt_watch(NULL);
    bool closed = ft_session_close(engine->session);
    int status = ft_trace_file_close(&engine->trace, err);
    if (!closed) {
        /* A lane that is stuck may still read weights and tables: they go with the process. */
        memset(engine, 0, sizeof *engine);
        return status;
    }
    ft_gpu_mover_close(engine->mover);
    if (engine->is_loaded)
        ft_loaded_fini(&engine->loaded);
    if (engine->owns_tables)
        ft_row_tables_close(engine->tables);
    ft_replay_file_fini(&engine->replay);
    if (engine->has_topology)
        ft_topology_close(&engine->topology);
    if (engine->checkpoint)
        ft_checkpoint_close(engine->checkpoint);
    memset(engine, 0, sizeof *engine);
    return status;
}
