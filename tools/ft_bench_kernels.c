/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/topology.h"
#include "kernels_cpu/bench_kernels.h"
#include "tools/command.h"
#include "tools/ft_bench.h"
#include "tools/ft_bench_step.h"
#include "tools/interrupt.h"
#include "tools/json_out.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define RESULTS_MAX 1024u
#define BANK_BYTES_MIN (256ull << 20)
#define BANK_BYTES_MAX (4ull << 30)

struct options {
    const char *isa, *op, *format;
    uint32_t threads, hidden, width, rounds, rows;
    uint64_t bank_bytes;
    bool reference, step, json;
    struct ft_bench_step_options step_options;
};

#define FIELD(name) offsetof(struct options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"threads", "N", "threads", "one per usable core", FT_OPTION_U32, FIELD(threads), 1, FT_WORKERS_MAX},
    {"hidden", "N", "hidden size of the experts", NULL, FT_OPTION_U32, FIELD(hidden), 128, 65536},
    {"width", "N", "width of the experts", NULL, FT_OPTION_U32, FIELD(width), 128, 65536},
    {"bank", "BYTES", "memory to read from", "8 times the last-level caches", FT_OPTION_BYTES,
     FIELD(bank_bytes), 0, 0},
    {"rounds", "N", "rounds; the best counts", NULL, FT_OPTION_U32, FIELD(rounds), 1, 1000},
    {"isa", "NAME", "only these instruction sets: names with commas", "all that this core has",
     FT_OPTION_STRING, FIELD(isa), 0, 0},
    {"op", "NAME", "only these ops", "all", FT_OPTION_STRING, FIELD(op), 0, 0},
    {"format", "NAME", "only these formats", "all", FT_OPTION_STRING, FIELD(format), 0, 0},
    {"rows", "N", "only 1 row and this many: 1, 2, 4, 8, 16, 32, 64", "all", FT_OPTION_U32, FIELD(rows), 1,
     64},
    {"reference", NULL, "measure the readable references too (slow)", NULL, FT_OPTION_FLAG, FIELD(reference),
     0, 0},
    {"json", NULL, "report as JSON", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};
static const struct ft_option step_table[] = {
    {"step", NULL, "the ops of one decode step of a model instead", NULL, FT_OPTION_FLAG, FIELD(step), 0, 0},
    {"model", "DIR", "the model", "the demo model", FT_OPTION_STRING, FIELD(step_options.model), 0, 0},
    {"shape", "NAME|FILE",
     "random weights of this shape instead; experts in --format, else in their checkpoint's", NULL,
     FT_OPTION_STRING, FIELD(step_options.shape), 0, 0},
    {"steps", "N", "decode steps; lower quartiles count", NULL, FT_OPTION_U32, FIELD(step_options.steps), 4,
     4000},
};

struct report {
    struct ft_bench_roof roof;
    struct ft_bench_pages_result pages;
    uint32_t count;
    struct ft_bench_kernels_result results[RESULTS_MAX];
};

static void print_roof_json(struct ft_json *json, const struct ft_bench_roof *roof)
{
    ft_json_f64(json, "ceiling_gbs", roof->ceiling_gbs);
    ft_json_u64(json, "ceiling_threads", roof->ceiling_threads);
    ft_json_open(json, '[', "read_sweep");
    for (uint32_t i = 0; i < roof->point_count; i++) {
        ft_json_open(json, '{', NULL);
        ft_json_u64(json, "threads", roof->point_threads[i]);
        ft_json_f64(json, "gbs", roof->point_gbs[i]);
        ft_json_close(json, '}');
    }
    ft_json_close(json, ']');
    ft_json_open(json, '{', "fma_peak_gflops");
    for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++)
        if (roof->peak_gflops[isa] > 0)
            ft_json_f64(json, ft_isa_name(isa), roof->peak_gflops[isa]);
    ft_json_close(json, '}');
}

static void print_pages_json(struct ft_json *json, const struct ft_bench_pages_result *pages)
{
    ft_json_open(json, '{', "pages");
    ft_json_text(json, "isa", ft_isa_name(pages->isa));
    ft_json_f64(json, "small_gbs", pages->small_gbs);
    ft_json_f64(json, "huge_gbs", pages->huge_gbs);
    ft_json_f64(json, "small_bank_in_huge_pages", pages->small_share);
    ft_json_f64(json, "huge_bank_in_huge_pages", pages->huge_share);
    ft_json_bool(json, "hugetlb", pages->hugetlb);
    ft_json_close(json, '}');
}

static void print_json(const struct report *report)
{
    struct ft_json json;
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    print_roof_json(&json, &report->roof);
    print_pages_json(&json, &report->pages);
    ft_json_open(&json, '[', "kernels");
    for (uint32_t i = 0; i < report->count; i++) {
        const struct ft_bench_kernels_result *r = &report->results[i];
        ft_json_open(&json, '{', NULL);
        ft_json_text(&json, "op", ft_bench_op_name(r->op));
        ft_json_text(&json, "format", ft_format_name(r->format));
        ft_json_text(&json, "isa", ft_isa_name(r->isa));
        ft_json_u64(&json, "rows", r->rows);
        ft_json_f64(&json, "gbs", r->gbs);
        ft_json_f64(&json, "ceiling_gbs", r->ceiling_gbs);
        ft_json_f64(&json, "ceiling_fraction", r->ceiling_fraction);
        ft_json_f64(&json, "max_error", r->max_error);
        ft_json_f64(&json, "gflops", r->gflops);
        ft_json_f64(&json, "peak_fraction", r->peak_fraction);
        ft_json_f64(&json, "times_one_row", r->times_one_row);
        ft_json_u64(&json, "threads", r->threads);
        ft_json_close(&json, '}');
    }
    ft_json_close(&json, ']');
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

static void print_pages(const struct ft_bench_pages_result *pages)
{
    printf(
        "pages: one row through nvfp4 experts (%s, one thread), small pages %.2f GB/s, huge pages %.2f GB/s "
        "(%+.0f%%); in "
        "huge pages lie %.0f%% and %.0f%% of the banks; reserved huge pages: %s\n",
        ft_isa_name(pages->isa), pages->small_gbs, pages->huge_gbs,
        100 * (pages->huge_gbs / pages->small_gbs - 1), 100 * pages->small_share, 100 * pages->huge_share,
        pages->hugetlb ? "yes" : "none");
}

static bool print_roof(void *context, const struct ft_bench_roof *roof)
{
    (void)context;
    printf("read sweep");
    for (uint32_t i = 0; i < roof->point_count; i++)
        printf("  %u: %.2f", roof->point_threads[i], roof->point_gbs[i]);
    printf("  GB/s by threads; ceiling %.2f GB/s with %u threads\n", roof->ceiling_gbs,
           roof->ceiling_threads);
    printf("f32 multiply-add peak");
    for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++)
        if (roof->peak_gflops[isa] > 0)
            printf("  %s: %.0f", ft_isa_name(isa), roof->peak_gflops[isa]);
    printf("  GFLOP/s\n"
           "read GB/s: the best plain read between a kernel's rounds; ceiling: rounds over the reads just "
           "before and "
           "after, median\n");
    printf("%-12s %-10s %-15s %5s %8s %9s %8s %9s %7s %8s %10s\n", "op", "format", "isa", "rows", "GB/s",
           "read GB/s", "ceiling", "GFLOP/s", "peak", "x 1 row", "max error");
    return fflush(stdout) == 0;
}

/* Lines come as they are measured: who stops early has them. */
static bool print_result(void *context, const struct ft_bench_kernels_result *r)
{
    (void)context;
    printf("%-12s %-10s %-15s %5u %8.2f %9.2f %7.0f%% %9.1f %6.0f%% %8.2f %10.1e\n", ft_bench_op_name(r->op),
           ft_format_name(r->format), ft_isa_name(r->isa), r->rows, r->gbs, r->ceiling_gbs,
           100 * r->ceiling_fraction, r->gflops, 100 * r->peak_fraction, r->times_one_row, r->max_error);
    return fflush(stdout) == 0;
}

static void pin_worker(void *context, uint32_t worker)
{
    const struct ft_topology *topology = context;
    ft_topology_bind(topology, worker % topology->core_count);
}

static int measure_kernels(const struct ft_bench_kernels_options *bench, struct report *report,
                           struct ft_error *err)
{
    int status =
        ft_bench_kernels_run(bench, &report->roof, report->results, RESULTS_MAX, &report->count, err);
    return status == FT_OK ? ft_bench_kernels_pages(bench, &report->pages, err) : status;
}

/* Of one cache, as the kernel shows it; the C library asks the processor, which tells of the whole host to a
 * virtual machine. */
static uint64_t last_level_bytes(void)
{
    FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r");
    long known = sysconf(_SC_LEVEL3_CACHE_SIZE);
    unsigned long long kib = 0;
    if (file) {
        if (fscanf(file, "%lluK", &kib) != 1)
            kib = 0;
        fclose(file);
    }
    return kib ? (uint64_t)kib << 10 : known > 0 ? (uint64_t)known : 0;
}

/* Eight times the last-level caches, so that even the quarter that is read with many rows comes from memory. */
static uint64_t default_bank(const struct ft_topology *topology)
{
    uint64_t wanted = 8 * last_level_bytes() * FT_MAX(topology->l3_domain_count, 1u);
    return FT_MIN(FT_MAX(wanted, BANK_BYTES_MIN), BANK_BYTES_MAX);
}

/* Options that would mean nothing beside --step. */
static int check_step(const struct options *options, struct ft_error *err)
{
    const char *other = options->op          ? "--op"
                        : options->rows      ? "--rows"
                        : options->reference ? "--reference"
                                             : NULL;
    if (other)
        return ft_error_set(err, FT_USAGE, "%s means nothing with --step, which measures a whole decode step",
                            other);
    if (options->format && !options->step_options.shape)
        return ft_error_set(err, FT_USAGE,
                            "--format is for --shape: a model has its experts in their own format");
    if (options->step_options.model && options->step_options.shape)
        return ft_error_set(err, FT_USAGE, "--model and --shape: name one of them");
    return FT_OK;
}

static int measure(const struct options *options, struct report *report, struct ft_error *err)
{
    struct ft_topology topology;
    struct ft_bench_kernels_options bench = {.bank_bytes = options->bank_bytes,
                                             .hidden = options->hidden,
                                             .width = options->width,
                                             .rounds = options->rounds,
                                             .reference = options->reference,
                                             .isa = options->isa,
                                             .op = options->op,
                                             .format = options->format,
                                             .rows = options->rows,
                                             .tell = options->json ? NULL : print_result,
                                             .tell_roof = options->json ? NULL : print_roof,
                                             .pin = pin_worker,
                                             .pin_context = &topology};
    uint32_t rows = options->rows; /* of those that are measured: powers of two up to 64 */
    if (rows & (rows - 1))
        return ft_error_set(err, FT_USAGE, "--rows %u: wanted 1, 2, 4, 8, 16, 32 or 64", rows);
    int status = options->step ? check_step(options, err) : ft_bench_kernels_check(&bench, err);
    if (status == FT_OK)
        status = ft_topology_open(&topology, NULL, err);
    if (status != FT_OK)
        return status;
    if (!bench.bank_bytes)
        bench.bank_bytes = default_bank(&topology);
    status = ft_topology_workers(&topology, false, options->threads, &bench.threads, err);
    if (status == FT_OK && options->step) {
        struct ft_bench_step_options step = options->step_options;
        step.workers = options->threads;
        step.isa = options->isa;
        step.format = options->format;
        step.json = options->json;
        status = ft_bench_step(&step, &bench, err);
    } else if (status == FT_OK) {
        status = measure_kernels(&bench, report, err);
    }
    ft_topology_close(&topology);
    return status;
}

int ft_command_bench_kernels(int argc, char **argv)
{
    struct options options = {.hidden = 2560, .width = 640, .rounds = 5, .step_options = {.steps = 40}};
    const struct ft_option_group groups[] = {{"Kernels", table, FT_COUNT_OF(table), &options},
                                             {"Steps", step_table, FT_COUNT_OF(step_table), &options}};
    const struct ft_option_set set = {"ft bench kernels",
                                      "[options]",
                                      "Measures every CPU kernel, format and instruction set of this core, "
                                      "and their errors against the references; or the ops of a decode step.",
                                      groups,
                                      2,
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
    if (status == FT_OK && !options.step && options.json)
        print_json(report);
    else if (status == FT_OK && !options.step)
        print_pages(&report->pages);
    free(report);
    return status == FT_OK ? ft_command_finish(FT_EXIT_OK) : ft_command_fail(&err);
}
