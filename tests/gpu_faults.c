/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults of the CUDA runtime and of the GPU, against the CUDA double: every call of opening and of a step
 * fails once, memory runs out at every allocation, kernels and copies fail or stall as they run. Whatever
 * happens is told with its cause, ends in bounded time, leaves nothing behind, and a session opened
 * afterwards works. On a real GPU: small shapes only (a fault would cost the process its context).
 */
#include "tests/ahead_policies.h"
#include "tests/gpu_session.h"

#include <sys/wait.h>
#include <unistd.h>

/* One row, one token, one sequence: nothing may depend on there being more. */
TEST(smallest_shapes_work)
{
    static const char *const fixtures[] = {"qwen3_moe-bf16", "qwen4_exp-bf16"};
    struct ft_error err;
    for (uint32_t f = 0; f < FT_COUNT_OF(fixtures); f++) {
        struct ft_engine engine;
        begin_gpu();
        CHECK_OK(engine_open(&engine, fixtures[f], FT_STRATEGY_OFFLOAD, FT_DEVICE_CUDA, 4, &err), &err);
        REQUIRE(engine.session != NULL);
        engine.plan.chunk_rows = engine.plan.sequences_max = engine.plan.logit_rows_max = 1;
        for (int h = FT_HANDSHAKE_AUTO; h < FT_HANDSHAKE_COUNT; h++) {
            CHECK_OK(reopen(&engine, &(struct change){.handshake = (enum ft_handshake)h}, &err), &err);
            REQUIRE(engine.session != NULL);
            memset(&said, 0, sizeof said);
            uint32_t handle = submit(engine.session, 0, 2);
            drain(engine.session);
            CHECK_EQ(said.count[handle], 2);
            CHECK_EQ(said.failed, 0);
            ft_session_release(engine.session, handle);
            handle = submit(engine.session, 1, 0); /* prefill only: no row asks for a token */
            drain(engine.session);
            CHECK_EQ(said.count[handle], 0);
            CHECK_EQ(said.failed, 0);
        }
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
}

#ifdef FT_FAKE_CUDA

static struct ft_engine hybrid;                  /* qwen3_moe-bf16, loaded once for all tests below */
static const struct ft_policy *policy_in_faults; /* NULL = the engine's */

static bool load(void)
{
    struct ft_error err;
    if (hybrid.session)
        return true;
    if (hybrid.model) {
        CHECK_OK(reopen(&hybrid, &(struct change){.handshake = FT_HANDSHAKE_LAUNCH}, &err), &err);
        return hybrid.session != NULL;
    }
    begin_gpu();
    CHECK_OK(engine_open(&hybrid, "qwen3_moe-bf16", FT_STRATEGY_HYBRID, FT_DEVICE_CUDA, 24, &err), &err);
    if (hybrid.session)
        learn(hybrid.session);
    return hybrid.session != NULL;
}

static void unload(void)
{
    CHECK(ft_session_close(hybrid.session));
    hybrid.session = NULL;
    begin_gpu();
}

static void end_all(void)
{
    struct ft_error err;
    CHECK_OK(ft_engine_close(&hybrid, &err), &err);
    check_nothing_is_left();
}

/* A session opened now works. */
static void check_reopens(void)
{
    struct ft_error err;
    CHECK_OK(reopen(&hybrid, &(struct change){0}, &err), &err);
    REQUIRE(hybrid.session != NULL);
    check_texts(hybrid.session, 1, 2);
    unload();
}

/* ---- machines ---- */

TEST(machines_without_a_gpu_that_works_are_refused_with_the_way_out)
{
    static const struct {
        struct fake_cuda_options machine;
        const char *call; /* that fails with `error` */
        int error;
        uint32_t gpu;
        int status;
        const char *text;
    } cases[] = {
        {{.device_count = 1}, NULL, 0, 0, FT_UNSUPPORTED, "no NVIDIA driver answers"},
        {{.device_count = 1, .driver_version = 13000},
         "cudaDriverGetVersion",
         999,
         0,
         FT_UNSUPPORTED,
         "--device host"},
        {{.device_count = 1, .driver_version = 11040},
         "cudaGetDeviceCount",
         35,
         0,
         FT_UNSUPPORTED,
         "supports CUDA 11.4"},
        {{.driver_version = 13000}, NULL, 0, 0, FT_UNSUPPORTED, "no GPU"},
        {{.device_count = 1, .driver_version = 13000, .major = 7}, NULL, 0, 0, FT_UNSUPPORTED, "needs 7.5"},
        {{.device_count = 2, .driver_version = 13000, .major = 9},
         NULL,
         0,
         2,
         FT_USAGE,
         "--gpus 2: there are 2 GPUs"},
        {{.device_count = 1, .driver_version = 13000, .major = 9},
         "cudaGetDeviceProperties",
         999,
         0,
         FT_SYSTEM,
         "properties"},
        {{.device_count = 1, .driver_version = 13000, .major = 9},
         "cudaSetDevice",
         999,
         0,
         FT_UNSUPPORTED,
         "cannot be used"},
        {{.device_count = 1, .driver_version = 13000, .major = 9},
         "cudaMemGetInfo",
         2,
         0,
         FT_UNSUPPORTED,
         "cannot be used"},
    };
    struct ft_error err;
    struct ft_gpu_info info;
    REQUIRE(load());
    unload();
    for (uint32_t i = 0; i < FT_COUNT_OF(cases); i++) {
        for (uint32_t session = 0; session < 2; session++) {
            fake_cuda_init(&cases[i].machine);
            fake_cuda_fail(cases[i].call, 1, cases[i].error);
            struct change change = {.gpu = cases[i].gpu};
            int status =
                session ? reopen(&hybrid, &change, &err) : ft_lane_cuda_find(cases[i].gpu, &info, &err);
            CHECK_FAILS(status, cases[i].status, cases[i].text, &err);
            CHECK(hybrid.session == NULL);
            check_nothing_is_left();
        }
    }
    fake_cuda_init(&good_gpu);
    check_reopens();
}

/* ---- opening ---- */

TEST(memory_that_runs_out_at_any_allocation_is_told_and_leaves_nothing)
{
    static const char *const calls[] = {"cudaMalloc", "cudaHostAlloc"};
    struct ft_error err;
    REQUIRE(load());
    for (uint32_t c = 0; c < FT_COUNT_OF(calls); c++) {
        uint32_t n = 1;
        for (bool opened = false; !opened && n < 100; n++) {
            unload();
            fake_cuda_fail(calls[c], n, cudaErrorMemoryAllocation);
            int status = reopen(&hybrid, &(struct change){.handshake = FT_HANDSHAKE_LAUNCH}, &err);
            opened = status == FT_OK;
            if (opened)
                break;
            CHECK_EQ(status, FT_MEMORY);
            CHECK(strstr(err.message, "--vram") || strstr(err.message, "ulimit -l"));
            CHECK(strstr(err.message, " for ") ||
                  strstr(err.message, "a pinned buffer")); /* what it was for */
        }
        printf("     %s: %u allocations\n", calls[c], n - 1);
        CHECK(n > 6);
        CHECK(hybrid.session != NULL);
        unload(); /* the call that was not made */
        check_reopens();
    }
    /* Not an injected error: a GPU that is too small. */
    struct fake_cuda_options small = good_gpu;
    small.memory_bytes = 200000;
    fake_cuda_init(&small);
    CHECK_FAILS(reopen(&hybrid, &(struct change){0}, &err), FT_MEMORY, "--moe-cache-size", &err);
    unload();
    check_reopens();
}

TEST(banks_that_cannot_be_pinned_are_copied_from_pageable_memory_and_a_note_says_so)
{
    struct ft_error err;
    REQUIRE(load());
    uint32_t n = 1, noted = 0;
    for (bool made = true; made && n < 50; n++) {
        unload();
        fake_cuda_fail("cudaHostRegister", n, cudaErrorMemoryAllocation);
        CHECK_OK(reopen(&hybrid, &(struct change){.handshake = FT_HANDSHAKE_KERNEL}, &err), &err);
        REQUIRE(hybrid.session != NULL);
        noted += strstr(ft_session_note(hybrid.session), "could not be pinned") != NULL;
        made = fake_cuda_calls("cudaHostRegister") >= n;
        check_texts(hybrid.session, 2, 2);
    }
    CHECK_EQ(n - 2, hybrid.model->layer_count + 1); /* the embedding and a bank per layer */
    CHECK_EQ(noted, hybrid.model->layer_count);
    /* Pinned by somebody else: as good. */
    unload();
    fake_cuda_fail("cudaHostRegister", 2, cudaErrorHostMemoryAlreadyRegistered);
    CHECK_OK(reopen(&hybrid, &(struct change){.handshake = FT_HANDSHAKE_LAUNCH}, &err), &err);
    REQUIRE(hybrid.session != NULL);
    CHECK(!strstr(ft_session_note(hybrid.session), "pinned"));
    unload();
}

TEST(any_other_call_of_opening_may_fail)
{
    static const char *const calls[] = {"cudaStreamCreateWithFlags",
                                        "cudaEventCreateWithFlags",
                                        "cudaMemset",
                                        "cudaMemcpy",
                                        "cudaDeviceSynchronize",
                                        "cudaSetDevice",
                                        "cudaMemGetInfo"};
    struct ft_error err;
    REQUIRE(load());
    for (uint32_t c = 0; c < FT_COUNT_OF(calls); c++)
        for (uint32_t n = 1; n < 400; n++) {
            unload();
            fake_cuda_fail(calls[c], n, cudaErrorUnknown);
            int status = reopen(&hybrid, &(struct change){.handshake = FT_HANDSHAKE_LAUNCH}, &err);
            if (status == FT_OK)
                break;
            CHECK(strstr(err.message, "GPU 0") != NULL);
            CHECK(status == FT_SYSTEM || status == FT_UNSUPPORTED);
        }
    unload();
    check_reopens();
}

static const char *handshake_after(const char *call, uint32_t nth, enum ft_handshake wanted,
                                   struct ft_error *err)
{
    unload();
    fake_cuda_fail(call, nth, cudaErrorUnknown);
    int status = reopen(&hybrid, &(struct change){.handshake = wanted}, err);
    if (status == FT_OK)
        check_texts(hybrid.session, 1, 1);
    return status == FT_OK ? ft_session_note(hybrid.session) : NULL;
}

TEST(a_handshake_that_fails_its_litmus_test_is_not_chosen)
{
    static const char *const litmus[] = {"cuStreamWriteValue32", "cudaLaunchKernel", "cudaMemsetAsync",
                                         "cudaStreamSynchronize", "cudaMemcpyAsync"};
    struct ft_error err;
    const char *note;
    REQUIRE(load());
    note = handshake_after("cudaGetDriverEntryPointByVersion", 1, FT_HANDSHAKE_AUTO, &err);
    CHECK(note && strstr(note, "flag kernel"));
    note = handshake_after("cuStreamWriteValue32", 7, FT_HANDSHAKE_AUTO, &err);
    CHECK(note && strstr(note, "flag kernel"));
    CHECK(handshake_after("cuStreamWriteValue32", 3, FT_HANDSHAKE_MEMOP, &err) == NULL);
    CHECK(strstr(err.message, "--handshake auto") != NULL);
    CHECK(handshake_after("cudaLaunchKernel", 5, FT_HANDSHAKE_KERNEL, &err) == NULL);
    CHECK(strstr(err.message, "--handshake auto") != NULL);
    for (uint32_t i = 0; i < FT_COUNT_OF(litmus); i++) /* whichever is left, it works */
        CHECK(handshake_after(litmus[i], 2, FT_HANDSHAKE_AUTO, &err) != NULL);
    unload();
    struct fake_cuda_options machine = good_gpu;
    machine.no_memops = 1;
    fake_cuda_init(&machine);
    CHECK_OK(reopen(&hybrid, &(struct change){0}, &err), &err);
    REQUIRE(hybrid.session != NULL);
    CHECK(strstr(ft_session_note(hybrid.session), "flag kernel") != NULL);
    unload();
    fake_cuda_init(&machine);
    CHECK_FAILS(reopen(&hybrid, &(struct change){.handshake = FT_HANDSHAKE_MEMOP}, &err), FT_UNSUPPORTED,
                "--handshake", &err);
    unload();
}

/* ---- a step ---- */

/* The session's GPU is gone: its sequences have failed with a cause; what comes after fails, too, and says
 * why; close leaves nothing. */
static void check_broken(const char *what)
{
    struct ft_error err;
    if (!strstr(said.message, "GPU 0"))
        fprintf(stderr, "%s: message \"%s\"\n", what, said.message);
    CHECK(strstr(said.message, "GPU 0") != NULL);
    for (uint32_t h = 0; h < SEQUENCES; h++)
        if (said.failed_handle[h])
            CHECK_OK(ft_session_resume(hybrid.session, h, &err), &err); /* may be asked, does not help */
    uint32_t before = said.failed;
    drain(hybrid.session);
    CHECK_EQ(said.failed, 2 * before);
    CHECK(strstr(said.message, "open it again") != NULL);
    uint32_t handle = submit(hybrid.session, 0, 1);
    drain(hybrid.session);
    CHECK(said.failed_handle[handle]);
    unload(); /* checks that nothing is left */
}

/* True: the call was made and failed. */
static bool fail_in_step(enum ft_handshake handshake, const char *call, uint32_t nth, int error)
{
    struct ft_error err;
    char what[128];
    snprintf(what, sizeof what, "handshake %d, %s %u", (int)handshake, call, nth);
    struct change change = {.handshake = handshake, .watchdog_ns = 20000000000u, .policy = policy_in_faults};
    CHECK_OK(reopen(&hybrid, &change, &err), &err);
    if (!hybrid.session)
        return false;
    memset(&said, 0, sizeof said);
    uint32_t handles[2] = {submit(hybrid.session, 2, NEW), submit(hybrid.session, 3, NEW)};
    fake_cuda_fail(call, nth, error);
    double begin = seconds();
    drain(hybrid.session);
    CHECK(seconds() - begin < 15);
    if (!said.failed) { /* never called so often, or it did not matter */
        CHECK(is_text(handles[0], 2, NEW) && is_text(handles[1], 3, NEW));
        unload();
        return false;
    }
    check_broken(what);
    return true;
}

TEST(any_call_of_a_step_may_fail_and_breaks_the_session_only)
{
    static const struct {
        const char *call;
        uint32_t nth, last; /* every nth up to last is tried */
        bool in_launch, in_captured;
    } calls[] = {
        {"cudaStreamBeginCapture", 1, 1, false, true}, {"cudaStreamEndCapture", 1, 1, false, true},
        {"cudaGraphGetNodes", 1, 1, false, true},      {"cudaGraphInstantiate", 1, 1, false, true},
        {"cudaGraphUpload", 1, 1, false, true},        {"cudaGraphLaunch", 1, 3, false, true},
        {"cudaMemcpyAsync", 1, 6, true, true},         {"cudaLaunchKernel", 1, 60, true, true},
        {"cudaEventRecord", 1, 4, true, true},         {"cudaStreamWaitEvent", 1, 4, true, true},
    };
    struct ft_error err;
    REQUIRE(load());
    unload();
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++)
        for (uint32_t i = 0; i < FT_COUNT_OF(calls); i++) {
            uint32_t nth = calls[i].nth, step = FT_MAX((calls[i].last - nth) / 2, 1u);
            bool launch = h == FT_HANDSHAKE_LAUNCH;
            for (; nth <= calls[i].last; nth += step) {
                bool failed = fail_in_step((enum ft_handshake)h, calls[i].call, nth, cudaErrorUnknown);
                if (failed != (launch ? calls[i].in_launch : calls[i].in_captured))
                    fprintf(stderr, "handshake %d, %s %u: failed %d\n", h, calls[i].call, nth, failed);
                CHECK_EQ(failed, launch ? calls[i].in_launch : calls[i].in_captured);
            }
        }
    CHECK(fail_in_step(FT_HANDSHAKE_MEMOP, "cuStreamWriteValue32", 1, cudaErrorUnknown));
    CHECK(fail_in_step(FT_HANDSHAKE_MEMOP, "cudaGraphInstantiate", 1, cudaErrorMemoryAllocation));
    (void)err;
    check_reopens();
}

TEST(a_kernel_or_a_copy_that_fails_on_the_gpu_breaks_the_session_only)
{
    REQUIRE(load());
    unload();
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++)
        for (uint32_t nth = 1; nth <= 200; nth += nth < 40 ? 13 : 67) {
            CHECK(fail_in_step((enum ft_handshake)h, "kernel", nth, cudaErrorIllegalAddress));
            if (nth <= 40)
                CHECK(fail_in_step((enum ft_handshake)h, "copy", nth, cudaErrorIllegalAddress));
        }
    check_reopens();
}

/* Clearing a new sequence's state is not part of a step, but a step that went on with it would be wrong. */
TEST(state_that_cannot_be_cleared_or_copied_fails_the_next_step)
{
    static const char *const calls[] = {"cudaMemsetAsync", "cudaStreamSynchronize", "cudaSetDevice"};
    struct ft_error err;
    struct ft_engine engine;
    REQUIRE(load());
    unload();
    for (uint32_t i = 0; i < FT_COUNT_OF(calls); i++) {
        CHECK_OK(engine_open(&engine, "qwen4_exp-bf16", FT_STRATEGY_OFFLOAD, FT_DEVICE_CUDA, 24, &err), &err);
        REQUIRE(engine.session != NULL);
        memset(&said, 0, sizeof said);
        fake_cuda_fail(calls[i], 1, cudaErrorUnknown);
        (void)submit(engine.session, 1, 2);
        drain(engine.session);
        CHECK_EQ(said.failed, 1);
        CHECK(strstr(said.message, "clearing state") != NULL);
        CHECK_OK(ft_engine_close(&engine, &err), &err);
        begin_gpu();
    }
}

/* ---- copies ahead ---- */

static struct ft_session_stats run_keeping(enum ft_handshake handshake)
{
    struct ft_error err;
    struct ft_session_stats stats = {0};
    CHECK_OK(reopen(&hybrid, &(struct change){.handshake = handshake, .policy = &keeping}, &err), &err);
    if (hybrid.session) {
        check_steps(hybrid.session, check_maps);
        check_texts(hybrid.session, 0, 4); /* together: several rows a step */
        ft_session_stats(hybrid.session, &stats);
    }
    return stats;
}

TEST(experts_copied_ahead_become_resident_behind_their_copies)
{
    REQUIRE(load());
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++) {
        unload();
        struct ft_session_stats stats = run_keeping((enum ft_handshake)h);
        printf("handshake %d: %llu ahead, %llu used, %llu wasted, %llu fetched, %llu on the CPU\n", h,
               (unsigned long long)stats.prefetches, (unsigned long long)stats.prefetches_used,
               (unsigned long long)stats.prefetches_wasted, (unsigned long long)stats.fetches,
               (unsigned long long)stats.cpu_experts);
        CHECK_EQ(stats.policy_repairs, 0);
        if (h == FT_HANDSHAKE_LAUNCH) {
            CHECK_EQ(stats.prefetches, 0);
            continue;
        }
        CHECK(stats.prefetches > 20);
        CHECK(stats.prefetches_used > 5);
        CHECK(stats.prefetches_used + stats.prefetches_wasted <= stats.prefetches);
        CHECK(stats.prefetches - stats.prefetches_used - stats.prefetches_wasted <= hybrid.plan.slot_count);
    }
    unload();
}

TEST(a_copy_ahead_may_fail_or_stall)
{
    struct ft_error err;
    REQUIRE(load());
    unload();
    policy_in_faults = &keeping;
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_LAUNCH; h++)
        for (uint32_t nth = 1; nth <= 40; nth += 13) {
            (void)fail_in_step((enum ft_handshake)h, "copy", nth, cudaErrorIllegalAddress);
            (void)fail_in_step((enum ft_handshake)h, "cudaMemcpyAsync", nth, cudaErrorUnknown);
        }
    policy_in_faults = NULL;
    for (uint32_t nth = 10; nth <= 14; nth += 2) {
        CHECK_OK(reopen(&hybrid, &(struct change){.policy = &keeping}, &err), &err);
        REQUIRE(hybrid.session != NULL);
        fake_cuda_stall("copy", nth, 500000000u);
        check_texts(hybrid.session, 2, 2);
        unload();
    }
    check_reopens();
}

/* ---- stalls ---- */

TEST(a_copy_or_kernel_that_takes_seconds_changes_no_text)
{
    static const char *const what[] = {"copy", "kernel"};
    struct ft_error err;
    REQUIRE(load());
    for (uint32_t i = 0; i < 2; i++)
        for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++) {
            unload();
            CHECK_OK(reopen(&hybrid, &(struct change){.handshake = (enum ft_handshake)h}, &err), &err);
            REQUIRE(hybrid.session != NULL);
            fake_cuda_stall(what[i], 12, 1500000000u);
            double begin = seconds();
            check_texts(hybrid.session, 2, 2);
            CHECK(seconds() - begin > 1.4);
        }
    unload();
}

TEST(a_gpu_that_does_not_answer_is_given_up_after_the_watchdog)
{
    struct ft_error err;
    REQUIRE(load());
    unload();
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++)
        for (uint32_t i = 0; i < 2; i++) {
            struct change change = {.handshake = (enum ft_handshake)h, .watchdog_ns = 300000000u};
            CHECK_OK(reopen(&hybrid, &change, &err), &err);
            REQUIRE(hybrid.session != NULL);
            memset(&said, 0, sizeof said);
            (void)submit(hybrid.session, 3, NEW);
            fake_cuda_stall(i ? "copy" : "kernel", 45, 2000000000u);
            double begin = seconds();
            while (!said.failed && !ft_session_is_idle(hybrid.session) && seconds() - begin < 15)
                CHECK_OK(step_once(hybrid.session, &err), &err);
            CHECK(seconds() - begin < 15);
            CHECK_EQ(said.failed, 1);
            CHECK(strstr(said.message, "GPU 0: waiting for") != NULL);
            check_broken("a stall"); /* which ends while the session is closed */
        }
    check_reopens();
}

/* A kernel that never ends: the session cannot be freed, but close comes back and says so. In a child: what
 * is left behind dies with it. */
static int hang_for_ever(enum ft_handshake handshake)
{
    struct ft_error err;
    struct change change = {.handshake = handshake, .watchdog_ns = 300000000u};
    if (reopen(&hybrid, &change, &err) != FT_OK)
        return 2;
    memset(&said, 0, sizeof said);
    (void)submit(hybrid.session, 3, NEW);
    fake_cuda_stall("kernel", 70, UINT64_MAX);
    double begin = seconds();
    drain(hybrid.session);
    if (said.failed != 1 || !strstr(said.message, "GPU 0") || seconds() - begin > 20)
        return 3;
    if (ft_session_resume(hybrid.session, 0, &err) != FT_OK) /* clears state: must not wait for the stream */
        return 4;
    drain(hybrid.session);
    bool closed = ft_session_close(hybrid.session);
    return !closed && seconds() - begin < 40 ? 0 : 5;
}

TEST(a_kernel_that_never_ends_fails_its_step_and_close_comes_back)
{
    REQUIRE(load());
    unload();
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h += 2) {
        int state = 0;
        fflush(stdout);
        pid_t child = fork();
        if (!child) {
            alarm(120);
            _exit(hang_for_ever((enum ft_handshake)h));
        }
        CHECK(child > 0 && waitpid(child, &state, 0) == child);
        CHECK_EQ(WIFEXITED(state) ? WEXITSTATUS(state) : 1000 + WTERMSIG(state), 0);
    }
    check_reopens();
}

#define RUN_FAKE                                                                                             \
    RUN(machines_without_a_gpu_that_works_are_refused_with_the_way_out)                                      \
    RUN(memory_that_runs_out_at_any_allocation_is_told_and_leaves_nothing)                                   \
    RUN(banks_that_cannot_be_pinned_are_copied_from_pageable_memory_and_a_note_says_so)                      \
    RUN(any_other_call_of_opening_may_fail)                                                                  \
    RUN(a_handshake_that_fails_its_litmus_test_is_not_chosen)                                                \
    RUN(any_call_of_a_step_may_fail_and_breaks_the_session_only)                                             \
    RUN(a_kernel_or_a_copy_that_fails_on_the_gpu_breaks_the_session_only)                                    \
    RUN(state_that_cannot_be_cleared_or_copied_fails_the_next_step)                                          \
    RUN(experts_copied_ahead_become_resident_behind_their_copies)                                            \
    RUN(a_copy_ahead_may_fail_or_stall)                                                                      \
    RUN(a_copy_or_kernel_that_takes_seconds_changes_no_text)                                                 \
    RUN(a_gpu_that_does_not_answer_is_given_up_after_the_watchdog)                                           \
    RUN(a_kernel_that_never_ends_fails_its_step_and_close_comes_back) end_all();
#else
#define RUN_FAKE
#endif

TEST_MAIN(CHECK(can_run()); RUN(smallest_shapes_work) RUN_FAKE)
