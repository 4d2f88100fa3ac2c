/* SPDX-License-Identifier: Apache-2.0 */
#include "io/bench_io.h"
#include "test.h"

#include <sys/stat.h>
#include <unistd.h>

TEST(loading_is_measured_against_plain_reads)
{
    struct ft_error err;
    struct ft_checkpoint *checkpoint;
    struct ft_bench_load result;
    CHECK_OK(ft_checkpoint_open(&checkpoint, FT_DATA_DIR "/ft-tiny", &err), &err);
    CHECK_OK(ft_bench_load(checkpoint, NULL, 2, &result, &err), &err);
    CHECK_EQ(result.plain_bytes, 11654238 + 8926452);
    CHECK(result.load_bytes > 0 && result.plain_bytes_per_s > 0 && result.load_bytes_per_s > 0);
    CHECK_NEAR(result.fraction, result.load_bytes_per_s / result.plain_bytes_per_s, 1e-9);
    ft_checkpoint_close(checkpoint);
}

TEST(rows_of_a_made_table_are_verified)
{
    struct ft_error err;
    struct ft_bench_ple result;
    char path[64];
    snprintf(path, sizeof path, "test_io_bench_io.%ld", (long)getpid());
    struct ft_bench_ple_options options = {.path = path, .file_bytes = 8u << 20, .steps = 50, .keep = true};
    for (int backend = FT_IO_AUTO; backend < FT_IO_BACKEND_COUNT; backend += 2) {
        options.backend = (enum ft_io_backend)backend;
        CHECK_OK(ft_bench_ple(&options, &result, &err), &err);
        CHECK_EQ(result.rows_verified, 50 * 16);
        CHECK_EQ(result.rows.rows_wanted, 50 * 16);
        CHECK(result.latency_p50_s > 0 && result.latency_p50_s <= result.latency_p99_s &&
              result.latency_p99_s <= result.latency_max_s);
        for (uint32_t i = 0; i < FT_BENCH_DEPTHS; i++)
            CHECK(result.curve_iops[i] > 0);
        CHECK(result.made == (backend == FT_IO_AUTO)); /* the second run found it */
    }
    CHECK_EQ(truncate(path, 1000), 0);
    CHECK_FAILS(ft_bench_ple(&options, &result, &err), FT_IO, "is not this table", &err);
    CHECK_EQ(access(path, F_OK), 0); /* a file that is not ours stays */
    unlink(path);
    options.file_bytes = 1ull << 60;
    CHECK_FAILS(ft_bench_ple(&options, &result, &err), FT_IO, "the disk has", &err);
    CHECK(access(path, F_OK) != 0);
    options.file_bytes = 1u << 20;
    options.keep = false;
    CHECK_OK(ft_bench_ple(&options, &result, &err), &err);
    CHECK(access(path, F_OK) != 0);
}

static bool cancel(void *context, uint64_t done_bytes, uint64_t total_bytes)
{
    (void)context;
    return done_bytes == total_bytes;
}

TEST(a_cancelled_table_is_removed)
{
    struct ft_error err;
    struct ft_bench_ple result;
    char path[64];
    snprintf(path, sizeof path, "test_io_bench_io.%ld", (long)getpid());
    struct ft_bench_ple_options options = {.path = path, .file_bytes = 16u << 20, .progress = cancel};
    CHECK_FAILS(ft_bench_ple(&options, &result, &err), FT_CANCELLED, "cancelled", &err);
    CHECK(access(path, F_OK) != 0);
}

TEST_MAIN(RUN(loading_is_measured_against_plain_reads) RUN(rows_of_a_made_table_are_verified)
              RUN(a_cancelled_table_is_removed))
