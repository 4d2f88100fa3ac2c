/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/topology.h"
#include "kernels_cpu/bench_kernels.h"
#include "tools/command.h"
#include "tools/ft_bench.h"
#include "tools/interrupt.h"
#include "tools/json_out.h"

#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#define RESULTS_MAX 1024u
#define BANK_BYTES_MIN (256ull << 20)
#define BANK_BYTES_MAX (1ull << 30)

struct options {
    uint32_t threads, hidden, width, rounds;
    uint64_t bank_bytes;
    bool reference, json;
};

#define FIELD(name) offsetof(struct options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"threads", "N", "threads", "one per usable core", FT_OPTION_U32, FIELD(threads), 1, FT_WORKERS_MAX},
    {"hidden", "N", "hidden size of the experts", NULL, FT_OPTION_U32, FIELD(hidden), 128, 65536},
    {"width", "N", "width of the experts", NULL, FT_OPTION_U32, FIELD(width), 128, 65536},
    {"bank", "BYTES", "memory to read from: several times the last-level cache", NULL, FT_OPTION_BYTES,
     FIELD(bank_bytes), 0, 0},
    {"rounds", "N", "rounds; the best counts", NULL, FT_OPTION_U32, FIELD(rounds), 1, 1000},
    {"reference", NULL, "measure the readable references too (slow)", NULL, FT_OPTION_FLAG, FIELD(reference),
     0, 0},
    {"json", NULL, "report as JSON", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};

struct report {
    double ceiling_gbs;
    uint32_t ceiling_threads, count;
    struct ft_bench_kernels_result results[RESULTS_MAX];
};

static void print_json(const struct report *report)
{
    struct ft_json json;
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    ft_json_f64(&json, "ceiling_gbs", report->ceiling_gbs);
    ft_json_u64(&json, "ceiling_threads", report->ceiling_threads);
    ft_json_open(&json, '[', "kernels");
    for (uint32_t i = 0; i < report->count; i++) {
        const struct ft_bench_kernels_result *r = &report->results[i];
        ft_json_open(&json, '{', NULL);
        ft_json_text(&json, "op", ft_bench_op_name(r->op));
        ft_json_text(&json, "format", ft_format_name(r->format));
        ft_json_text(&json, "isa", ft_isa_name(r->isa));
        ft_json_u64(&json, "rows", r->rows);
        ft_json_f64(&json, "gbs", r->gbs);
        ft_json_f64(&json, "ceiling_fraction", r->ceiling_fraction);
        ft_json_f64(&json, "max_error", r->max_error);
        ft_json_f64(&json, "gflops", r->gflops);
        ft_json_u64(&json, "threads", r->threads);
        ft_json_close(&json, '}');
    }
    ft_json_close(&json, ']');
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

static void print_text(const struct report *report)
{
    printf("read ceiling %.2f GB/s with %u threads\n", report->ceiling_gbs, report->ceiling_threads);
    printf("%-8s %-10s %-8s %5s %9s %9s %9s %10s\n", "op", "format", "isa", "rows", "GB/s", "ceiling",
           "GFLOP/s", "max error");
    for (uint32_t i = 0; i < report->count; i++) {
        const struct ft_bench_kernels_result *r = &report->results[i];
        printf("%-8s %-10s %-8s %5u %9.2f %8.0f%% %9.2f %10.1e\n", ft_bench_op_name(r->op),
               ft_format_name(r->format), ft_isa_name(r->isa), r->rows, r->gbs, 100 * r->ceiling_fraction,
               r->gflops, r->max_error);
    }
}

static void pin_worker(void *context, uint32_t worker)
{
    const struct ft_topology *topology = context;
    ft_topology_bind(topology, worker % topology->core_count);
}

static int measure(const struct options *options, struct report *report, struct ft_error *err)
{
    struct ft_topology topology;
    struct ft_bench_kernels_options bench = {.bank_bytes = options->bank_bytes,
                                             .hidden = options->hidden,
                                             .width = options->width,
                                             .rounds = options->rounds,
                                             .reference = options->reference,
                                             .pin = pin_worker,
                                             .pin_context = &topology};
    int status = ft_topology_open(&topology, NULL, err);
    if (status != FT_OK)
        return status;
    status = ft_topology_workers(&topology, false, options->threads, &bench.threads, err);
    if (status == FT_OK)
        status = ft_bench_kernels_ceiling(&bench, &report->ceiling_gbs, &report->ceiling_threads, err);
    if (status == FT_OK)
        status = ft_bench_kernels_run(&bench, report->ceiling_gbs, report->results, RESULTS_MAX,
                                      &report->count, err);
    ft_topology_close(&topology);
    return status;
}

/* Four times the last-level cache, so that passes come from memory. */
static uint64_t default_bank(void)
{
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    uint64_t wanted = cache > 0 ? 4 * (uint64_t)cache : 0;
    return FT_MIN(FT_MAX(wanted, BANK_BYTES_MIN), BANK_BYTES_MAX);
}

int ft_command_bench_kernels(int argc, char **argv)
{
    struct options options = {.hidden = 2560, .width = 640, .rounds = 5, .bank_bytes = default_bank()};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options}};
    const struct ft_option_set set = {"ft bench kernels",
                                      "[options]",
                                      "Measures every CPU kernel, format and instruction set of this core, "
                                      "and their errors against the references.",
                                      groups,
                                      1,
                                      0};
    struct ft_option_rest rest;
    struct ft_error err;
    int exit_code;
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    ft_interrupt_end();
    struct report *report = calloc(1, sizeof *report);
    int status =
        report ? measure(&options, report, &err) : ft_error_set(&err, FT_MEMORY, "no memory for the results");
    if (status == FT_OK)
        (options.json ? print_json : print_text)(report);
    free(report);
    return status == FT_OK ? ft_command_finish(FT_EXIT_OK) : ft_command_fail(&err);
}
