/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/bench_jobs.h"
#include "tools/command.h"
#include "tools/ft_bench.h"
#include "tools/interrupt.h"
#include "tools/json_out.h"

#include <stddef.h>

struct options {
    uint32_t workers, layers, serials, tiles, steps, rounds;
    bool json;
};

#define FIELD(name) offsetof(struct options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"workers", "N", "threads", "one per usable core", FT_OPTION_U32, FIELD(workers), 1, FT_WORKERS_MAX},
    {"layers", "N", "layers of the synthetic step", NULL, FT_OPTION_U32, FIELD(layers), 1, 1000},
    {"serials", "N", "serial jobs of a layer", NULL, FT_OPTION_U32, FIELD(serials), 1, 1000},
    {"tiles", "N", "jobs of a layer that fan out", NULL, FT_OPTION_U32, FIELD(tiles), 1, 1000},
    {"steps", "N", "steps of a round", NULL, FT_OPTION_U32, FIELD(steps), 1, 1e6},
    {"rounds", "N", "rounds; the best counts", NULL, FT_OPTION_U32, FIELD(rounds), 1, 1e6},
    {"json", NULL, "report as JSON", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};

static void print_json(const struct options *options, const struct ft_bench_jobs_result *result)
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
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

static void print_text(const struct options *options, const struct ft_bench_jobs_result *result)
{
    printf("%u workers, %u jobs a step\n", options->workers, result->job_count);
    printf("job    %8.1f ns (%.0f%% stolen)\n", result->ns_per_job, 100 * result->steal_fraction);
    printf("steal  %8.1f ns\n", result->ns_per_steal);
    printf("wake   %8.0f ns (best %.0f)\n", result->wake_ns_median, result->wake_ns_min);
    printf("trace  %8.1f ns a job\n", result->trace_ns_per_job);
}

static int measure(struct options *options, struct ft_bench_jobs_result *result, struct ft_error *err)
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
    ft_topology_close(&topology);
    return status;
}

int ft_command_bench_jobs(int argc, char **argv)
{
    struct options options = {.layers = 48, .serials = 4, .tiles = 32, .steps = 50, .rounds = 20};
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
    struct ft_option_rest rest;
    struct ft_error err;
    int exit_code;
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    ft_interrupt_end();
    if (measure(&options, &result, &err) != FT_OK)
        return ft_command_fail(&err);
    (options.json ? print_json : print_text)(&options, &result);
    return ft_command_finish(FT_EXIT_OK);
}
