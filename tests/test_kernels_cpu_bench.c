/* SPDX-License-Identifier: Apache-2.0 */
/* The measuring code on a small bank; with arguments "full THREADS MIB ROUNDS" it prints a table of this machine. */
#include "kernels_cpu/bench_internal.h"
#include "tests/test.h"

#include <errno.h>
#include <math.h>

#define RESULTS 1024

static void print_table(const struct ft_bench_kernels_result *results, uint32_t count,
                        const struct ft_bench_roof *roof)
{
    printf("read ceiling %.2f GB/s with %u threads\n", roof->ceiling_gbs, roof->ceiling_threads);
    for (uint32_t i = 0; i < count; i++)
        printf("%-12s %-10s %-8s rows %2u threads %u %7.2f GB/s %8.2f Gflop/s %5.1f%% of reads up to %.2f "
               "GB/s, error %.2e\n",
               ft_bench_op_name(results[i].op), ft_format_name(results[i].format),
               ft_isa_name(results[i].isa), results[i].rows, results[i].threads, results[i].gbs,
               results[i].gflops, 100 * results[i].ceiling_fraction, results[i].ceiling_gbs,
               results[i].max_error);
}

static double tolerance_of(enum ft_isa isa)
{
    return ft_isa_is_int8(isa) ? 5e-2 : isa == FT_ISA_AVX512VNNI_INT16 ? 2e-4 : 1e-5;
}

/* A single round: its fraction is of the mean of two reads, of which the result names the better one. */
static void check_fraction(const struct ft_bench_kernels_result *result, uint32_t rounds)
{
    double of_best = result->gbs / result->ceiling_gbs;
    CHECK(result->ceiling_gbs > 0 && result->ceiling_fraction > 0);
    if (rounds == 1)
        CHECK(result->ceiling_fraction >= 0.999 * of_best && result->ceiling_fraction <= 2.001 * of_best);
}

static void measure(const struct ft_bench_kernels_options *options, bool print)
{
    struct ft_error err;
    struct ft_bench_kernels_result *results = calloc(RESULTS, sizeof *results);
    struct ft_bench_roof roof;
    uint32_t count = 0;
    CHECK_OK(ft_bench_kernels_run(options, &roof, results, RESULTS, &count, &err), &err);
    CHECK(roof.ceiling_gbs > 0 && roof.ceiling_threads >= 1 && roof.ceiling_threads <= options->threads);
    CHECK_EQ(roof.point_threads[roof.point_count - 1], options->threads);
    CHECK(count > 0);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(results[i].gbs > 0 && results[i].gflops > 0 && results[i].times_one_row > 0);
        CHECK(results[i].max_error <= tolerance_of(results[i].isa));
        check_fraction(&results[i], options->rounds);
    }
    if (print)
        print_table(results, count, &roof);
    free(results);
}

static const struct ft_bench_kernels_options small = {
    .threads = 2, .bank_bytes = 4 << 20, .hidden = 128, .width = 64, .rounds = 1, .reference = true};

TEST(small_bank_gives_a_result_for_every_format_and_isa)
{
    struct ft_bench_kernels_result results[2];
    struct ft_bench_kernels_options options = small;
    struct ft_bench_roof roof;
    struct ft_error err;
    uint32_t count;
    measure(&small, false);
    CHECK_FAILS(ft_bench_kernels_run(&options, &roof, results, 2, &count, &err), FT_LIMIT, "2 results", &err);
    options.hidden = 100;
    CHECK_FAILS(ft_bench_kernels_run(&options, &roof, results, 2, &count, &err), FT_UNSUPPORTED, "nvfp4",
                &err);
    options.hidden = small.hidden;
    options.bank_bytes = UINT64_MAX / 4;
    CHECK_FAILS(ft_bench_kernels_run(&options, &roof, results, 2, &count, &err), FT_MEMORY, "bank", &err);
}

/* Every ISA of the dispatch table that this core has is measured, with every number of rows. */
TEST(filters_choose_and_isas_come_from_the_dispatch_table)
{
    struct ft_bench_kernels_options options = small;
    struct ft_bench_kernels_result *results = calloc(RESULTS, sizeof *results);
    struct ft_bench_roof roof;
    struct ft_error err;
    uint32_t count, available = 0, largest = 0;
    options.op = "expert";
    options.format = "ds_fp4";
    for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++)
        available += ft_isa_is_available(isa);
    CHECK_OK(ft_bench_kernels_run(&options, &roof, results, RESULTS, &count, &err), &err);
    CHECK_EQ(count, available * 7);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(results[i].op == FT_BENCH_EXPERT && results[i].format == FT_FORMAT_DS_FP4);
        largest = FT_MAX(largest, results[i].rows);
    }
    CHECK_EQ(largest, 64);
    options.format = "nvfp4,bf16"; /* lists; one number of rows beside 1 */
    options.isa = "avx512,ref";
    options.rows = 4;
    CHECK_OK(ft_bench_kernels_run(&options, &roof, results, RESULTS, &count, &err), &err);
    CHECK_EQ(count, 2 * 2 * (1 + (uint32_t)ft_isa_is_available(FT_ISA_AVX512)));
    CHECK(results[0].rows == 1 && results[1].rows == 4 && results[count - 1].format == FT_FORMAT_BF16);
    options.isa = NULL;
    options.rows = 0;
    options.format = "f32"; /* no expert is measured in it */
    CHECK_FAILS(ft_bench_kernels_run(&options, &roof, results, RESULTS, &count, &err), FT_USAGE, "format f32",
                &err);
    options.format = "nvfp4,fp4"; /* the first is known, the second is not */
    CHECK_FAILS(ft_bench_kernels_check(&options, &err), FT_USAGE, "no format is called \"fp4\"", &err);
    options.format = NULL;
    options.isa = "avx9";
    CHECK_FAILS(ft_bench_kernels_check(&options, &err), FT_USAGE, "no ISA is called \"avx9\"", &err);
    free(results);
}

static bool tell_two(void *context, const struct ft_bench_kernels_result *result)
{
    (void)result;
    errno = EPIPE;
    return ++*(int *)context < 2;
}

TEST(a_measurement_ends_when_nobody_hears_it)
{
    struct ft_bench_kernels_options options = small;
    struct ft_bench_kernels_result *results = calloc(RESULTS, sizeof *results);
    struct ft_bench_roof roof;
    struct ft_error err;
    uint32_t count;
    int told = 0;
    options.tell = tell_two;
    options.tell_context = &told;
    CHECK_FAILS(ft_bench_kernels_run(&options, &roof, results, RESULTS, &count, &err), FT_SYSTEM,
                "cannot be written", &err);
    CHECK_EQ(told, 2);
    for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++) {
        options.isa = ft_isa_name(isa);
        if (!ft_isa_is_available(isa))
            CHECK_FAILS(ft_bench_kernels_check(&options, &err), FT_UNSUPPORTED, "this core has no", &err);
    }
    free(results);
}

/* Memory that doubles its speed after the second round; a kernel that reaches half of it all the time. */
TEST(a_fraction_is_that_of_the_moment)
{
    const double reads[] = {60, 60, 60, 120, 120}, once[] = {60, 0, 0, 0, 120}, rounds[] = {30, 30, 45, 60};
    double gbs[4];
    memcpy(gbs, rounds, sizeof gbs);
    CHECK(fabs(ft_bench_ceiling_fraction(gbs, reads, 4, true) - 0.5) < 1e-12);
    memcpy(gbs, rounds, sizeof gbs); /* of the mean 90: 1/3, 1/3, 1/2, 2/3; two in the middle */
    CHECK(fabs(ft_bench_ceiling_fraction(gbs, once, 4, false) - 5.0 / 12) < 1e-12);
    memcpy(gbs, rounds, sizeof gbs);
    gbs[1] = 3; /* one disturbed round of three */
    CHECK(fabs(ft_bench_ceiling_fraction(gbs, reads, 3, true) - 0.5) < 1e-12);
    gbs[0] = 30;
    CHECK(fabs(ft_bench_ceiling_fraction(gbs, reads, 1, true) - 0.5) < 1e-12);
}

/* Reads what it is given and no more, however it is cut and aligned: sanitizers see a byte beyond it. */
TEST(a_plain_read_takes_regions_of_any_size)
{
    const uint32_t sizes[] = {1, 63, 1023, 5000, 70001, 1 << 20};
    struct ft_bench_roof roof = {.ceiling_threads = 2};
    struct ft_bench_region regions[6];
    struct ft_bench_crew *crew;
    struct ft_error err;
    double gbs;
    for (uint32_t i = 0; i < 6; i++) {
        uint8_t *data = malloc(sizes[i]);
        memset(data, (int)i, sizes[i]);
        regions[i] = (struct ft_bench_region){data, sizes[i]};
    }
    CHECK_OK(ft_bench_crew_open(&crew, &small, &err), &err);
    for (; roof.ceiling_pattern < FT_ROOF_PATTERN_COUNT; roof.ceiling_pattern++) {
        CHECK_OK(ft_bench_read(crew, &roof, regions, 6, &gbs, &err), &err);
        CHECK(gbs > 0);
        CHECK_OK(ft_bench_read(crew, &roof, regions, 2, &gbs, &err), &err);
        CHECK(gbs == 0); /* no whole 1024 bytes */
    }
    ft_bench_crew_close(crew);
    for (uint32_t i = 0; i < 6; i++)
        free((void *)(uintptr_t)regions[i].data);
}

/* Wrong in the last of several rows; one row alone is right. */
static struct ft_kernels right;
static void spoil_up(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows x, float *h,
                     size_t h_stride)
{
    right.expert_up(expert, begin, end, x, h, h_stride);
    if (begin == 0 && x.count > 1)
        h[(x.count - 1) * h_stride] *= 2;
}

static void spoil_down(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows h,
                       const uint32_t *out_index, float *y, size_t y_stride)
{
    right.expert_down(expert, begin, end, h, out_index, y, y_stride);
    if (begin == 0 && h.count > 1)
        y[(h.count - 1) * y_stride + 1] = NAN;
}

static void spoil_matmul(const struct ft_matrix *w, uint32_t begin, uint32_t end, struct ft_rows x,
                         const float *bias, float *y, size_t y_stride)
{
    right.matmul(w, begin, end, x, bias, y, y_stride);
    if (x.count > 1)
        y[(x.count - 1) * y_stride + begin] = NAN;
}

static double error_of(enum ft_bench_op op, const struct ft_kernels *kernels, uint32_t rows)
{
    struct ft_bench_bank bank;
    struct ft_error err;
    uint64_t x_count = ft_bench_case_x_count(&small), scratch_count = ft_bench_case_scratch_count(&small);
    float *x = aligned_alloc(64, ft_round_up(x_count * sizeof *x, 64));
    float *scratch = aligned_alloc(64, scratch_count * sizeof *scratch);
    double error = -1;
    ft_bench_fill(x, x_count * sizeof *x, 0x83ffffff83ffffffu, 0x3c0000003c000000u, 7);
    CHECK_OK(ft_bench_bank_open(&bank, small.bank_bytes, FT_BENCH_PAGES_SMALL, &err), &err);
    struct ft_bench_case c = {.op = op,
                              .format = FT_FORMAT_BF16,
                              .kernels = kernels,
                              .bank = &bank,
                              .hidden = small.hidden,
                              .width = small.width,
                              .rows = rows,
                              .threads = 1,
                              .x = x,
                              .scratch = scratch,
                              .scratch_stride = scratch_count};
    CHECK_OK(ft_bench_case_prepare(&c, 1, &err), &err);
    CHECK_OK(ft_bench_case_error(&c, &error, &err), &err);
    ft_bench_case_fini(&c);
    ft_bench_bank_close(&bank);
    free(x);
    free(scratch);
    return error;
}

TEST(an_error_in_one_row_of_many_is_seen)
{
    struct ft_kernels up, other;
    struct ft_error err;
    CHECK_OK(ft_kernels_init(&right, "ref", &err), &err);
    up = other = right;
    up.expert_up = spoil_up;
    other.expert_down = spoil_down;
    other.matmul = spoil_matmul;
    for (uint32_t rows = 1; rows <= 64; rows *= 2) {
        CHECK(error_of(FT_BENCH_EXPERT, &right, rows) == 0 && error_of(FT_BENCH_MATMUL, &right, rows) == 0);
        CHECK((error_of(FT_BENCH_EXPERT, &up, rows) > 0) == (rows > 1));
        CHECK(!isnan(error_of(FT_BENCH_EXPERT, &other, rows)) == (rows == 1));
        CHECK(!isnan(error_of(FT_BENCH_MATMUL, &other, rows)) == (rows == 1));
    }
}

TEST(the_ceiling_of_given_memory_is_measured_there_unless_it_is_small)
{
    static uint8_t first[2 << 20], second[3 << 20];
    const struct ft_bench_region regions[] = {{first + 1, sizeof first - 1}, {second, sizeof second}};
    struct ft_bench_kernels_options options = small;
    struct ft_error err;
    double gbs = 0;
    memset(first, 1, sizeof first);
    memset(second, 2, sizeof second);
    CHECK_OK(ft_bench_read_ceiling(&options, regions, 2, &gbs, &err), &err);
    CHECK(gbs > 0);
    options.bank_bytes = 1ull << 50; /* what is given is smaller, and this cannot be had */
    CHECK_FAILS(ft_bench_read_ceiling(&options, regions, 2, &gbs, &err), FT_MEMORY, "cannot be mapped", &err);
}

TEST(pages_are_measured_in_turn)
{
    struct ft_bench_pages_result result;
    struct ft_error err;
    CHECK_OK(ft_bench_kernels_pages(&small, &result, &err), &err);
    CHECK(result.small_gbs > 0 && result.huge_gbs > 0);
    if (result.small_share >= 0) /* the kernel tells: no huge page where none was wanted */
        CHECK(result.small_share == 0 && result.huge_share >= 0);
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
        RUN(filters_choose_and_isas_come_from_the_dispatch_table)
        RUN(a_measurement_ends_when_nobody_hears_it)
        RUN(a_fraction_is_that_of_the_moment)
        RUN(a_plain_read_takes_regions_of_any_size)
        RUN(an_error_in_one_row_of_many_is_seen)
        RUN(the_ceiling_of_given_memory_is_measured_there_unless_it_is_small)
        RUN(pages_are_measured_in_turn)
    }
    printf("%d checks, %d failed\n", test_checks_, test_failures_);
    return test_failures_ || !test_checks_ ? 1 : 0;
}
