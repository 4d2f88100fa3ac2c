/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The litmus test of the flags by which a GPU and its driver thread meet, with the code that raises them
 * (jobs/lane_cuda_flags.c): ten million rounds of each handshake on a real GPU, a few against the CUDA
 * double. Half of the rounds have their payload copied to the device in front of the flag, as an expert is.
 */
#include "jobs/lane_cuda_internal.h"
#include "tests/gpu_needed.h"
#include "tests/test.h"

#ifdef FT_FAKE_CUDA
#include "tests/fake_cuda.h"
#define ROUNDS 400u
#else
#define ROUNDS 10000000u
#endif
#define ROUNDS_AT_ONCE 100000u /* one kernel: a GPU that also draws a screen has a limit of seconds */

static bool open_gpu(struct ft_lane_cuda **lane, struct ft_cuda_litmus *litmus)
{
    struct ft_error err;
#ifdef FT_FAKE_CUDA
    struct fake_cuda_options options = {.device_count = 1,
                                        .driver_version = 13000,
                                        .major = 9,
                                        .memory_bytes = 1u << 20,
                                        .pinned_bytes = 1u << 20,
                                        .copy_delay_ns_max = 20000,
                                        .seed = 1};
    fake_cuda_init(&options);
#endif
    need_gpu();
    int status = ft_lane_cuda_open(lane, 0, &err);
    if (status == FT_OK)
        status = ft_cuda_litmus_open(*lane, litmus, &err);
    CHECK_OK(status, &err);
    return status == FT_OK;
}

static void try_rounds(struct ft_lane_cuda *lane, const struct ft_cuda_litmus *litmus,
                       enum ft_handshake handshake, const char *name)
{
    if (handshake == FT_HANDSHAKE_MEMOP && !lane->write_32) {
        printf("     %s: not offered by this driver\n", name);
        return;
    }
    for (int copies = 0; copies < 2; copies++) {
        double sum = 0, least = 0;
        uint32_t done = 0, batches = 0, half = ROUNDS / 2;
        while (done < half) {
            uint32_t some = FT_MIN(half - done, ROUNDS_AT_ONCE);
            double us = ft_cuda_litmus_run(lane, litmus, handshake, copies, some);
            CHECK(us > 0);
            if (us <= 0)
                break;
            done += some;
            sum += us;
            least = batches++ && least < us ? least : us;
        }
        CHECK_EQ(done, half);
        printf("     %s%s: %u rounds, %.2f us each, %.2f in the best batch\n", name,
               copies ? " behind copies" : "", done, batches ? sum / batches : 0, least);
    }
}

TEST(a_raised_flag_shows_what_was_written_before_it_both_ways)
{
    struct ft_lane_cuda *lane = NULL;
    struct ft_cuda_litmus litmus;
    if (open_gpu(&lane, &litmus)) {
        try_rounds(lane, &litmus, FT_HANDSHAKE_MEMOP, "stream memory operation");
        try_rounds(lane, &litmus, FT_HANDSHAKE_KERNEL, "flag kernel");
    }
    if (lane)
        ft_lane_cuda_close(lane);
}

#ifdef FT_FAKE_CUDA
/* The test itself: a flag that overtakes its copy must show. */
TEST(a_flag_without_its_payload_is_found)
{
    struct ft_lane_cuda *lane = NULL;
    struct ft_cuda_litmus litmus;
    REQUIRE(open_gpu(&lane, &litmus));
    for (int h = FT_HANDSHAKE_MEMOP; h <= FT_HANDSHAKE_KERNEL; h++) {
        enum ft_handshake handshake = (enum ft_handshake)h;
        CHECK(ft_cuda_litmus_run(lane, &litmus, handshake, true, 20) > 0);
        fake_cuda_fail("lost copy", 5, 0);
        CHECK(ft_cuda_litmus_run(lane, &litmus, handshake, true, 20) < 0);
        CHECK(ft_cuda_litmus_run(lane, &litmus, handshake, true, 20) > 0);
    }
    fake_cuda_fail("cudaMemcpyAsync", 5, cudaErrorUnknown);
    CHECK(ft_cuda_litmus_run(lane, &litmus, FT_HANDSHAKE_KERNEL, true, 20) < 0);
    ft_lane_cuda_close(lane);
}
#define RUN_FAKE RUN(a_flag_without_its_payload_is_found)
#else
#define RUN_FAKE
#endif

TEST_MAIN(RUN(a_raised_flag_shows_what_was_written_before_it_both_ways) RUN_FAKE)
