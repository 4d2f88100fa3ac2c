/* SPDX-License-Identifier: Apache-2.0 */
/* The measuring code on a small bank; with arguments "full THREADS MIB ROUNDS" it prints a table of this
 * machine. */
#include "kernels_cpu/bench_kernels.h"
#include "tests/test.h"

#define RESULTS 512
static void print_table(const struct ft_bench_kernels_result *results, uint32_t count, double ceiling,
                        uint32_t threads)
{
    printf("read ceiling %.2f GB/s with %u threads\n", ceiling, threads);
    for (uint32_t i = 0; i < count; i++)
        printf(
            "%-7s %-10s %-7s rows %2u threads %u %7.2f GB/s %8.2f Gflop/s %5.1f%% of ceiling, error %.2e\n",
            ft_bench_op_name(results[i].op), ft_format_name(results[i].format), ft_isa_name(results[i].isa),
            results[i].rows, results[i].threads, results[i].gbs, results[i].gflops,
            100 * results[i].ceiling_fraction, results[i].max_error);
}

static void measure(const struct ft_bench_kernels_options *options, bool print)
{
    struct ft_error err;
    struct ft_bench_kernels_result results[RESULTS];
    double ceiling = 0;
    uint32_t threads = 0, count = 0;
    CHECK_OK(ft_bench_kernels_ceiling(options, &ceiling, &threads, &err), &err);
    CHECK(ceiling > 0 && threads >= 1 && threads <= options->threads);
    CHECK_OK(ft_bench_kernels_run(options, ceiling, results, RESULTS, &count, &err), &err);
    CHECK(count > 0);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(results[i].gbs > 0 && results[i].gflops > 0);
        CHECK(results[i].max_error < (ft_isa_is_int8(results[i].isa) ? 5e-2 : 1e-5));
    }
    if (print)
        print_table(results, count, ceiling, threads);
}

TEST(small_bank_gives_a_result_for_every_format_and_isa)
{
    struct ft_bench_kernels_options options = {
        .threads = 2, .bank_bytes = 4 << 20, .hidden = 128, .width = 64, .rounds = 1, .reference = true};
    struct ft_bench_kernels_result results[2];
    struct ft_error err;
    uint32_t count;
    measure(&options, false);
    CHECK_FAILS(ft_bench_kernels_run(&options, 1, results, 2, &count, &err), FT_LIMIT, "2 results", &err);
    options.hidden = 100;
    CHECK_FAILS(ft_bench_kernels_run(&options, 1, results, 2, &count, &err), FT_UNSUPPORTED, "nvfp4", &err);
    options.bank_bytes = UINT64_MAX / 4;
    CHECK_FAILS(ft_bench_kernels_run(&options, 1, results, 2, &count, &err), FT_MEMORY, "bank", &err);
}

int main(int argc, char **argv)
{
    if (argc > 4 && strcmp(argv[1], "full") == 0) {
        struct ft_bench_kernels_options options = {.threads = (uint32_t)atoi(argv[2]),
                                                   .bank_bytes = (uint64_t)atoi(argv[3]) << 20,
                                                   .rounds = (uint32_t)atoi(argv[4]),
                                                   .hidden = 2560,
                                                   .width = 640};
        measure(&options, true);
    } else {
        RUN(small_bank_gives_a_result_for_every_format_and_isa)
    }
    printf("%d checks, %d failed\n", test_checks_, test_failures_);
    return test_failures_ || !test_checks_ ? 1 : 0;
}
