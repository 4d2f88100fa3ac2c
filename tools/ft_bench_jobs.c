/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/bench_jobs.h"
#include "tools/bench_trace_share.h"
#include "tools/command.h"
#include "tools/ft_bench.h"
#include "tools/interrupt.h"
#include "tools/json_out.h"

#include <stddef.h>

struct options {
    uint32_t workers, layers, serials, tiles, steps, rounds, trace_steps;
    bool trace_share, json;
};

#define FIELD(name) offsetof(struct options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"workers", "N", "threads", "one per usable core", FT_OPTION_U32, FIELD(workers), 1, FT_WORKERS_MAX},
    {"layers", "N", "layers of the synthetic step", NULL, FT_OPTION_U32, FIELD(layers), 1, 1000},
    {"serials", "N", "serial jobs of a layer", NULL, FT_OPTION_U32, FIELD(serials), 1, 1000},
    {"tiles", "N", "jobs of a layer that fan out", NULL, FT_OPTION_U32, FIELD(tiles), 1, 1000},
    {"steps", "N", "steps of a round", NULL, FT_OPTION_U32, FIELD(steps), 1, 1e6},
    {"rounds", "N", "rounds; the best counts", NULL, FT_OPTION_U32, FIELD(rounds), 1, 1e6},
    {"trace-share", NULL,
     "also decode with a synthetic model of --layers layers: what tracing takes of a step", NULL,
     FT_OPTION_FLAG, FIELD(trace_share), 0, 0},
    {"trace-steps", "N", "its steps without records, with them, and with a file: N each", NULL, FT_OPTION_U32,
     FIELD(trace_steps), 1, 10000},
    {"json", NULL, "report as JSON", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};

static void write_share(struct ft_json *json, const struct ft_trace_share *share)
{
    ft_json_open(json, '{', "trace_share");
    ft_json_f64(json, "step_bare_ns", share->step_ns[FT_TRACE_BARE]);
    ft_json_f64(json, "step_records_ns", share->step_ns[FT_TRACE_RECORDS]);
    ft_json_f64(json, "step_file_ns", share->step_ns[FT_TRACE_FILE]);
    ft_json_f64(json, "records_per_step", share->records_per_step);
    ft_json_f64(json, "file_ns", share->file_ns);
    ft_json_f64(json, "records_share", share->records_share);
    ft_json_f64(json, "file_share", share->file_share);
    ft_json_f64(json, "measured_share", share->measured_share);
    ft_json_close(json, '}');
}

static void print_share(const struct options *options, const struct ft_trace_share *share)
{
    printf("a step of %u small layers, medians of %u: %.2f ms bare, %.2f ms with records, %.2f ms with a "
           "trace file\n",
           options->layers, options->trace_steps, share->step_ns[FT_TRACE_BARE] / 1e6,
           share->step_ns[FT_TRACE_RECORDS] / 1e6, share->step_ns[FT_TRACE_FILE] / 1e6);
    printf("trace  %8.2f %% of the step by account: %.0f records, %.2f %%; the file, %.1f us, %.2f %%\n",
           100 * (share->records_share + share->file_share), share->records_per_step,
           100 * share->records_share, share->file_ns / 1e3, 100 * share->file_share);
    printf("       %8.2f %% by difference (other load is part of it)\n", 100 * share->measured_share);
}

static void print_json(const struct options *options, const struct ft_bench_jobs_result *result,
                       const struct ft_trace_share *share)
{
    struct ft_json json;
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    ft_json_f64(&json, "ns_per_job", result->ns_per_job);
    ft_json_f64(&json, "ns_per_steal", result->ns_per_steal);
    ft_json_u64(&json, "workers", options->workers);
    ft_json_u64(&json, "jobs_per_step", result->job_count);
    ft_json_f64(&json, "steal_fraction", result->steal_fraction);
    ft_json_f64(&json, "wake_ns_min", result->wake_ns_min);
    ft_json_f64(&json, "wake_ns_median", result->wake_ns_median);
    ft_json_f64(&json, "trace_ns_per_job", result->trace_ns_per_job);
    if (options->trace_share)
        write_share(&json, share);
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

static void print_text(const struct options *options, const struct ft_bench_jobs_result *result,
                       const struct ft_trace_share *share)
{
    printf("%u workers, %u jobs a step\n", options->workers, result->job_count);
    printf("job    %8.1f ns (%.0f%% stolen)\n", result->ns_per_job, 100 * result->steal_fraction);
    printf("steal  %8.1f ns\n", result->ns_per_steal);
    printf("wake   %8.0f ns (best %.0f)\n", result->wake_ns_median, result->wake_ns_min);
    printf("trace  %8.1f ns a job\n", result->trace_ns_per_job);
    if (options->trace_share)
        print_share(options, share);
}

static int measure(struct options *options, struct ft_bench_jobs_result *result, struct ft_trace_share *share,
                   struct ft_error *err)
{
    struct ft_topology topology;
    struct ft_clock clock;
    int status = ft_topology_open(&topology, NULL, err);
    if (status != FT_OK)
        return status;
    status = ft_topology_workers(&topology, false, options->workers, &options->workers, err);
    if (status == FT_OK) {
        ft_clock_init(&clock);
        struct ft_bench_jobs_options bench = {.topology = &topology,
                                              .clock = &clock,
                                              .workers = options->workers,
                                              .layers = options->layers,
                                              .serials = options->serials,
                                              .tiles = options->tiles,
                                              .steps = options->steps,
                                              .rounds = options->rounds};
        status = ft_bench_jobs_run(&bench, result, err);
    }
    if (status == FT_OK && options->trace_share) {
        struct ft_trace_share_options o = {.topology = &topology,
                                           .workers = options->workers,
                                           .layers = options->layers,
                                           .steps = options->trace_steps,
                                           .ns_per_record = result->trace_ns_per_job};
        status =
            options->layers <= FT_LAYERS_MAX
                ? ft_bench_trace_share(&o, share, err)
                : ft_error_set(err, FT_USAGE, "--trace-share: a model has at most %u layers", FT_LAYERS_MAX);
    }
    ft_topology_close(&topology);
    return status;
}

int ft_command_bench_jobs(int argc, char **argv)
{
    struct options options = {
        .layers = 48, .serials = 4, .tiles = 32, .steps = 50, .rounds = 20, .trace_steps = 100};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options}};
    const struct ft_option_set set = {
        "ft bench jobs",
        "[options]",
        "Runs steps of empty jobs through the real lanes and rings: counters, rings, steals "
        "and waiting are counted.",
        groups,
        1,
        0};
    struct ft_bench_jobs_result result;
    struct ft_trace_share share = {0};
    struct ft_option_rest rest;
    struct ft_error err;
    int exit_code;
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    ft_interrupt_end();
    if (measure(&options, &result, &share, &err) != FT_OK)
        return ft_command_fail(&err);
    (options.json ? print_json : print_text)(&options, &result, &share);
    return ft_command_finish(FT_EXIT_OK);
}
