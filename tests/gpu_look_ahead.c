/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Router look-ahead on a GPU: texts stay what they were, slots hold what their maps say, and what cannot be done is not.
 */
#include "tests/ahead_policies.h"
#include "tests/gpu_session.h"

#define SLOTS 40u /* two landing buffers */

static struct ft_engine engine;
static bool is_loaded;

static bool load(void)
{
    struct ft_error err;
    if (is_loaded)
        return true;
    if (!can_run())
        return false;
    CHECK_OK(engine_open(&engine, "qwen4_exp-bf16", FT_STRATEGY_HYBRID, FT_DEVICE_CUDA, SLOTS, &err), &err);
    is_loaded = engine.session != NULL;
    if (is_loaded)
        learn(engine.session);
    return is_loaded;
}

static void unload(void)
{
    CHECK(ft_session_close(engine.session));
    engine.session = NULL;
    begin_gpu();
}

/* Maps, and that every blob belongs to one slot or landing buffer. */
static void check_pool(const struct ft_session *session)
{
    check_maps(session);
    const struct ft_slots *slots = &session->step.slots;
    const struct ft_landings *l = &session->step.landings[0];
    uint32_t all = slots->count + l->count, seen[256] = {0};
    REQUIRE(all <= 256);
    for (uint32_t i = 0; i < slots->count; i++)
        seen[slots->blob[i]]++;
    for (uint32_t i = 0; i < l->count; i++)
        seen[l->landing[i].blob]++;
    for (uint32_t i = 0; i < all; i++)
        CHECK_EQ(seen[i], 1);
}

static struct ft_session_stats run(enum ft_handshake handshake, const struct ft_policy *policy)
{
    struct ft_error err;
    struct ft_session_stats stats = {0};
    CHECK_OK(reopen(&engine, &(struct change){.handshake = handshake, .policy = policy, .timed = true}, &err),
             &err);
    if (engine.session) {
        check_steps(engine.session, check_pool);
        check_texts(engine.session, 0, 4); /* together: several rows a step */
        ft_session_stats(engine.session, &stats);
    }
    return stats;
}

TEST(what_the_next_router_would_choose_is_copied_ahead_and_used)
{
    REQUIRE(load());
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++) {
        unload();
        struct ft_session_stats stats = run((enum ft_handshake)h, &foreseeing);
        printf("handshake %d: %llu foreseen, %llu right, %llu copied, %llu used; %llu fetched, %llu on the "
               "CPU\n",
               h, (unsigned long long)stats.foreseen, (unsigned long long)stats.foreseen_right,
               (unsigned long long)stats.copied_ahead, (unsigned long long)stats.copied_ahead_used,
               (unsigned long long)stats.fetches, (unsigned long long)stats.cpu_experts);
        CHECK_EQ(stats.policy_repairs, 0);
        if (h == FT_HANDSHAKE_LAUNCH) {
            CHECK_EQ(stats.foreseen, 0);
            continue;
        }
        CHECK(stats.foreseen_right > stats.foreseen / 8 && stats.foreseen_right < stats.foreseen);
        CHECK(stats.copied_ahead > 50 && stats.copied_ahead_used > 10);
        CHECK(stats.copied_ahead_used <= FT_MIN(stats.copied_ahead, stats.fetches));
    }
    unload();
}

TEST(the_gpu_foresees_what_the_host_foresees)
{
    struct ft_session_stats gpu, host = {0};
    struct ft_engine other;
    struct ft_error err;
    REQUIRE(load());
    unload();
    gpu = run(FT_HANDSHAKE_AUTO, &foreseeing);
    unload();
    CHECK_OK(engine_open(&other, "qwen4_exp-bf16", FT_STRATEGY_HYBRID, FT_DEVICE_HOST, SLOTS, &err), &err);
    CHECK_OK(reopen(&other, &(struct change){.policy = &foreseeing, .timed = true}, &err), &err);
    for (uint32_t p = 0; p < PROMPTS && other.session; p++)
        check_texts(other.session, p, 1);
    if (other.session) {
        check_texts(other.session, 0, 4);
        ft_session_stats(other.session, &host);
    }
    CHECK_EQ(gpu.foreseen, host.foreseen);
    CHECK_EQ(gpu.foreseen_right, host.foreseen_right);
    CHECK_OK(ft_engine_close(&other, &err), &err);
}

TEST(a_policy_that_asks_for_nonsense_changes_no_text)
{
    REQUIRE(load());
    unload();
    struct ft_session_stats stats = run(FT_HANDSHAKE_AUTO, &wild);
    CHECK(stats.policy_repairs > 20);
    CHECK(stats.copied_ahead > 20);
    unload();
}

#ifdef FT_FAKE_CUDA
TEST(a_copy_ahead_may_fail_or_stall)
{
    struct ft_error err;
    REQUIRE(load());
    unload();
    for (uint32_t nth = 1; nth <= 60; nth += 6) {
        CHECK_OK(reopen(&engine, &(struct change){.policy = &foreseeing, .timed = true}, &err), &err);
        REQUIRE(engine.session != NULL);
        memset(&said, 0, sizeof said);
        uint32_t handle = submit(engine.session, 2, NEW);
        fake_cuda_fail(nth % 12 < 6 ? "copy" : "cudaMemcpyAsync", nth, cudaErrorIllegalAddress);
        drain(engine.session);
        CHECK(said.failed || is_text(handle, 2, NEW));
        unload(); /* checks that nothing is left */
    }
    for (uint32_t nth = 10; nth <= 14; nth += 2) {
        CHECK_OK(reopen(&engine, &(struct change){.policy = &foreseeing, .timed = true}, &err), &err);
        REQUIRE(engine.session != NULL);
        fake_cuda_stall("copy", nth, 300000000u);
        check_texts(engine.session, 2, 2);
        unload();
    }
}
#define RUN_FAULTS RUN(a_copy_ahead_may_fail_or_stall)
#else
#define RUN_FAULTS
#endif

TEST(everything_is_given_back)
{
    struct ft_error err;
    if (is_loaded)
        CHECK_OK(ft_engine_close(&engine, &err), &err);
}

TEST_MAIN(RUN(what_the_next_router_would_choose_is_copied_ahead_and_used)
              RUN(the_gpu_foresees_what_the_host_foresees)
                  RUN(a_policy_that_asks_for_nonsense_changes_no_text)
                      RUN_FAULTS RUN(everything_is_given_back))
