/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A GPU session that is disturbed: random delays of copies and kernels, random batches, workers that stop for
 * seconds, interrupts, cancels, sequences that fail, hardly any slots, snapshots, failed steps that are
 * resumed. Whatever comes out is what the undisturbed session says. Runs on the CUDA double and on a real
 * GPU, where the delays are the machine's own.
 */
#include "tests/gpu_session.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define RANDOM_STEPS 6u
#elif defined(FT_FAKE_CUDA)
#define RANDOM_STEPS 30u
#else
#define RANDOM_STEPS 2000u
#endif

static const enum ft_strategy strategies[] = {FT_STRATEGY_FUSED, FT_STRATEGY_OFFLOAD, FT_STRATEGY_CPU,
                                              FT_STRATEGY_HYBRID};

/* An engine on a GPU without disturbances, and what it says. */
static bool open_and_learn(struct ft_engine *engine, const char *fixture, enum ft_strategy strategy,
                           uint32_t slots)
{
    struct ft_error err;
    begin_gpu();
    int status = engine_open(engine, fixture, strategy, FT_DEVICE_CUDA, slots, &err);
    CHECK_OK(status, &err);
    if (status == FT_OK)
        learn(engine->session);
    return status == FT_OK;
}

static void close_engine(struct ft_engine *engine)
{
    struct ft_error err;
    CHECK_OK(ft_engine_close(engine, &err), &err);
}

/* ---- delays ---- */

static void delay(uint64_t seed)
{
#ifdef FT_FAKE_CUDA
    struct fake_cuda_options slow = good_gpu;
    slow.copy_delay_ns_max = 300000;
    slow.kernel_delay_ns_max = 30000;
    slow.seed = seed;
    fake_cuda_init(&slow);
#else
    (void)seed;
#endif
}

/* Sequences come and go at random; each says what it said alone. */
static void random_steps(struct ft_session *session, uint64_t seed, uint32_t steps)
{
    uint64_t random = seed * 2 + 1;
    uint32_t prompt_of[SEQUENCES], wanted[SEQUENCES], texts = 0;
    struct ft_error err;
    for (uint32_t h = 0; h < SEQUENCES; h++)
        prompt_of[h] = FT_NONE;
    memset(&said, 0, sizeof said);
    for (uint32_t s = 0; s < steps || !ft_session_is_idle(session); s++) {
        while (s < steps && random_below(&random, 3) == 0) {
            uint32_t handle = 0, prompt = random_below(&random, PROMPTS);
            struct ft_request request = request_of(prompt, 1 + random_below(&random, NEW));
            request.reuse_prefix = random_below(&random, 2);
            if (ft_session_submit(session, &request, &handle, &err) != FT_OK)
                break; /* all handles are taken */
            prompt_of[handle] = prompt;
            wanted[handle] = request.max_tokens;
            said.count[handle] = 0;
        }
        int status = step_once(session, &err);
        CHECK_OK(status, &err);
        if (status != FT_OK)
            return;
        for (uint32_t h = 0; h < SEQUENCES; h++) {
            if (prompt_of[h] == FT_NONE || (said.count[h] < wanted[h] && !said.failed_handle[h]))
                continue;
            CHECK(is_text(h, prompt_of[h], wanted[h]));
            ft_session_release(session, h);
            prompt_of[h] = FT_NONE;
            texts++;
        }
    }
    CHECK_EQ(said.failed, 0);
    CHECK(texts >= steps / 20);
}

static void disturb_every_way(const char *fixture, uint32_t steps)
{
    struct ft_error err;
    for (uint32_t s = 0; s < FT_COUNT_OF(strategies); s++) {
        struct ft_engine engine;
        if (!open_and_learn(&engine, fixture, strategies[s], 34))
            continue;
        for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++) {
            CHECK_OK(reopen(&engine, &(struct change){.handshake = (enum ft_handshake)h}, &err), &err);
            if (!engine.session)
                continue;
            delay((uint64_t)h * 10 + s);
            int before = test_failures_;
            random_steps(engine.session, (uint64_t)h * 10 + s, steps);
            if (test_failures_ != before)
                fprintf(stderr, "%s, strategy %d, handshake %d\n", fixture, (int)strategies[s], h);
        }
        close_engine(&engine);
    }
}

TEST(delays_and_random_batches_change_no_text)
{
    disturb_every_way("qwen3_moe-bf16", RANDOM_STEPS);
}

TEST(delays_and_random_batches_change_no_text_with_state_tables_and_sparse_attention)
{
    disturb_every_way("qwen4_exp-bf16", FT_MAX(RANDOM_STEPS / 3, 4u));
}

/* ---- slots ---- */

TEST(hardly_any_slots_and_no_slots_change_no_text)
{
    static const uint32_t slots[] = {1, 3, 4, 7, 9};
    struct ft_engine engine;
    struct ft_session_stats stats;
    for (uint32_t i = 0; i < FT_COUNT_OF(slots); i++) {
        enum ft_strategy strategy = i % 2 ? FT_STRATEGY_HYBRID : FT_STRATEGY_OFFLOAD;
        if (!open_and_learn(&engine, "qwen3_moe-bf16", strategy, slots[i]))
            continue;
        delay(i);
        check_texts(engine.session, 0, 3);
        check_texts(engine.session, 3, 3);
        ft_session_stats(engine.session, &stats);
        CHECK(stats.fetches > 0);
        CHECK_EQ(stats.policy_repairs, 0);
        close_engine(&engine);
    }
    if (open_and_learn(&engine, "qwen3_moe-bf16", FT_STRATEGY_CPU, 0)) {
        delay(99);
        check_texts(engine.session, 0, PROMPTS);
        ft_session_stats(engine.session, &stats);
        CHECK(stats.cpu_experts > 0);
        close_engine(&engine);
    }
}

/* ---- workers that stop ---- */

static void (*expert_up_before)(const struct ft_expert *expert, uint32_t begin, uint32_t end,
                                struct ft_rows x, float *h, size_t h_stride);
static _Atomic int32_t tiles_until_stop;
static _Atomic uint32_t stops, stop_seconds;

/* The nth tile of an expert, and the one after it, sleep: both workers. */
static void stop_and_compute(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows x,
                             float *h, size_t h_stride)
{
    struct timespec t = {.tv_sec = stop_seconds};
    int32_t left = tiles_until_stop--;
    if (left == 1 || left == 2) {
        stops++;
        nanosleep(&t, NULL);
    }
    expert_up_before(expert, begin, end, x, h, h_stride);
}

static void stop_workers(struct ft_session *session, int32_t tiles, uint32_t for_seconds)
{
    stops = 0;
    stop_seconds = for_seconds;
    tiles_until_stop = tiles;
    if (session->kernels.expert_up != stop_and_compute)
        expert_up_before = session->kernels.expert_up;
    session->kernels.expert_up = stop_and_compute;
}

TEST(workers_that_stop_for_two_seconds_delay_a_step_and_change_no_text)
{
    struct ft_error err;
    for (uint32_t s = 2; s < 4; s++) { /* cpu, hybrid: the GPU waits for them */
        struct ft_engine engine;
        if (!open_and_learn(&engine, "qwen3_moe-bf16", strategies[s], 24))
            continue;
        for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++) {
            CHECK_OK(reopen(&engine, &(struct change){.handshake = (enum ft_handshake)h}, &err), &err);
            REQUIRE(engine.session != NULL);
            stop_workers(engine.session, 10, 2);
            double begin = seconds();
            check_texts(engine.session, 2, 2);
            CHECK(stops >= 1 && seconds() - begin > 1.9);
            CHECK(seconds() - begin < 30);
        }
        close_engine(&engine);
    }
}

#ifdef FT_FAKE_CUDA
/* Longer than the step's watchdog: the request fails with the cause, the GPU is let go, close comes back. */
static int stop_longer_than_the_watchdog(struct ft_engine *engine)
{
    struct ft_error err;
    memset(&said, 0, sizeof said);
    if (reopen(engine, &(struct change){.handshake = FT_HANDSHAKE_KERNEL, .step_timeout_ns = 1000000000u},
               &err) != FT_OK)
        return 2;
    (void)submit(engine->session, 0, NEW);
    stop_workers(engine->session, 10, 15);
    double begin = seconds();
    while (!said.failed && !ft_session_is_idle(engine->session) && seconds() - begin < 10)
        (void)step_once(engine->session, &err);
    if (!said.failed || !strstr(said.message, "a lane is stuck") || seconds() - begin > 10)
        return 4;
    if (step_once(engine->session, &err) != FT_TIMEOUT)
        return 5;
    cudaStream_t compute = engine->session->cuda->compute;
    if (ft_session_close(engine->session))
        return 6;
    /* The kernels that waited for the workers have given up. */
    return cudaStreamQuery(compute) == cudaSuccess && seconds() - begin < 30 ? 0 : 7;
}

TEST(workers_that_stop_for_longer_than_a_step_may_take_end_in_an_error)
{
    struct ft_engine engine;
    REQUIRE(open_and_learn(&engine, "qwen3_moe-bf16", FT_STRATEGY_CPU, 0));
    CHECK(ft_session_close(engine.session)); /* no thread lives in a process that forks */
    engine.session = NULL;
    int state = 0;
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        alarm(120);
        _exit(stop_longer_than_the_watchdog(&engine));
    }
    CHECK(child > 0 && waitpid(child, &state, 0) == child);
    CHECK_EQ(WIFEXITED(state) ? WEXITSTATUS(state) : 1000 + WTERMSIG(state), 0);
    close_engine(&engine);
}
#endif

/* ---- interrupts, cancels, releases ---- */

static void *interrupt_later(void *session)
{
    struct timespec pause = {.tv_nsec = 30000000};
    nanosleep(&pause, NULL);
    ft_session_interrupt(session);
    return NULL;
}

TEST(an_interrupt_in_the_middle_stops_between_steps_and_the_text_goes_on)
{
    struct ft_engine engine;
    struct ft_error err;
    REQUIRE(open_and_learn(&engine, "qwen3_moe-bf16", FT_STRATEGY_HYBRID, 24));
    delay(5);
    uint32_t interrupts = 0;
    for (uint32_t round = 0; round < 4; round++) {
        pthread_t thread;
        memset(&said, 0, sizeof said);
        uint32_t handles[2] = {submit(engine.session, 4, NEW), submit(engine.session, 5, NEW)};
        CHECK_EQ(pthread_create(&thread, NULL, interrupt_later, engine.session), 0);
        for (uint32_t steps = 0; !ft_session_is_idle(engine.session) && steps < 100; steps++) {
            int status = step_once(engine.session, &err);
            CHECK(status == FT_OK || status == FT_CANCELLED);
            interrupts += status == FT_CANCELLED;
            if (status == FT_CANCELLED)
                ft_session_clear_interrupt(engine.session);
        }
        pthread_join(thread, NULL);
        ft_session_clear_interrupt(engine.session);
        for (uint32_t i = 0; i < 2; i++) {
            CHECK(is_text(handles[i], 4 + i, NEW));
            ft_session_release(engine.session, handles[i]);
        }
    }
    CHECK(interrupts <= 4);
    close_engine(&engine);
}

TEST(sequences_cancelled_and_released_midway_leave_the_others_alone)
{
    struct ft_engine engine;
    struct ft_error err;
    REQUIRE(open_and_learn(&engine, "qwen4_exp-bf16", FT_STRATEGY_OFFLOAD, 40));
    delay(6);
    for (uint32_t round = 0; round < 2; round++) {
        memset(&said, 0, sizeof said);
        uint32_t handles[3];
        bool released = false;
        for (uint32_t i = 0; i < 3; i++)
            handles[i] = submit(engine.session, 2 + i, NEW);
        for (uint32_t steps = 0; !ft_session_is_idle(engine.session) && steps < 100; steps++) {
            if (said.count[handles[0]] == 2)
                ft_session_cancel(engine.session, handles[0]);
            if (said.count[handles[1]] == 3 && !released) {
                ft_session_release(engine.session, handles[1]);
                released = true;
            }
            CHECK_OK(step_once(engine.session, &err), &err);
        }
        CHECK_EQ(said.cancelled, 1);
        CHECK(is_text(handles[0], 2, 2) && is_text(handles[1], 3, 3) && is_text(handles[2], 4, NEW));
        ft_session_release(engine.session, handles[0]);
        ft_session_release(engine.session, handles[2]);
        check_texts(engine.session, 0, PROMPTS); /* in the pages and state that became free */
    }
    close_engine(&engine);
}

/* ---- sequences that fail alone ---- */

TEST(only_the_sequence_that_meets_numbers_that_are_none_fails)
{
    static const uint32_t damaged_token = 317; /* of no prompt */
    struct ft_engine engine;
    struct ft_error err;
    for (int h = FT_HANDSHAKE_KERNEL; h < FT_HANDSHAKE_COUNT; h++) {
        REQUIRE(open_and_learn(&engine, "qwen3_moe-bf16", FT_STRATEGY_HYBRID, 34));
        REQUIRE(engine.loaded.weights.embed.format == FT_FORMAT_BF16);
        uint16_t *row =
            (uint16_t *)(uintptr_t)engine.loaded.weights.embed.data + damaged_token * engine.model->hidden;
        uint16_t before = row[3];
        row[3] = 0x7fc0;
        CHECK_OK(reopen(&engine, &(struct change){.handshake = (enum ft_handshake)h}, &err), &err);
        for (uint32_t at = 0; at < 9; at += 4) { /* first, in the middle, alone in a decode step */
            uint32_t ids[9], bad = 0;
            memcpy(ids, prompt_ids[3], sizeof ids);
            ids[at] = damaged_token;
            struct ft_request request = request_of(3, NEW);
            request.prompt = ids;
            request.prompt_count = 9;
            memset(&said, 0, sizeof said);
            uint32_t good = submit(engine.session, 2, NEW);
            CHECK_OK(ft_session_submit(engine.session, &request, &bad, &err), &err);
            uint32_t other = submit(engine.session, 4, NEW);
            drain(engine.session);
            CHECK_EQ(said.failed, 1);
            CHECK(said.failed_handle[bad] && strstr(said.message, "not numbers"));
            CHECK(is_text(good, 2, NEW) && is_text(other, 4, NEW));
            /* Its pages and state are clean for the next one. */
            for (uint32_t i = 0; i < SEQUENCES; i++)
                ft_session_release(engine.session, i);
            check_texts(engine.session, 1, 3);
        }
        row[3] = before;
        close_engine(&engine);
    }
}

/* A step that fails for a reason that is not the GPU's, in the middle: between two layers. */
static struct ft_policy failing;
static void (*decide_before)(void *, const struct ft_layer_in *, struct ft_layer_out *);
static struct ft_session *fail_session;
static _Atomic uint32_t fail_layer, fail_countdown;

static void decide_and_fail(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    decide_before(state, in, out);
    if (in->layer == fail_layer && fail_countdown && --fail_countdown == 0)
        ft_step_fail(&fail_session->step, FT_IO, "a fault made by the test");
}

TEST(a_failed_step_is_resumed)
{
    struct ft_engine engine;
    struct ft_error err;
    static const char *const fixtures[] = {"qwen3_moe-bf16", "qwen4_exp-bf16"};
    for (uint32_t f = 0; f < 2; f++) {
        REQUIRE(open_and_learn(&engine, fixtures[f], FT_STRATEGY_OFFLOAD, 10));
        failing = *engine.policy;
        decide_before = failing.decide_layer;
        failing.decide_layer = decide_and_fail;
        for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++) {
            struct change change = {.handshake = (enum ft_handshake)h, .policy = &failing};
            CHECK_OK(reopen(&engine, &change, &err), &err);
            REQUIRE(engine.session != NULL);
            fail_session = engine.session;
            for (uint32_t round = 0; round < 4; round++) {
                memset(&said, 0, sizeof said);
                uint32_t handle = submit(engine.session, round + 1, NEW);
                fail_layer = round % engine.model->layer_count;
                fail_countdown = 2 + round;
                drain(engine.session);
                CHECK_EQ(said.failed, 1);
                CHECK(strstr(said.message, "a fault made by the test") != NULL);
                CHECK_OK(ft_session_resume(engine.session, handle, &err), &err);
                drain(engine.session);
                CHECK_EQ(said.failed, 1);
                struct ft_sequence_info info;
                ft_session_sequence_info(engine.session, handle, &info);
                CHECK_EQ(info.token_count, prompt_count[round + 1] + NEW);
                CHECK(memcmp(info.tokens + info.prompt_count, want[round + 1], NEW * 4) == 0);
                ft_session_release(engine.session, handle);
                check_texts(engine.session, 0, 2);
            }
        }
        close_engine(&engine);
    }
}

/* One token of a prompt: a captured step from the first row on, so that nothing uploads the device's map by
 * the way. */
static uint32_t submit_token(struct ft_session *session, uint32_t token)
{
    struct ft_error err;
    struct ft_request request = request_of(0, NEW);
    uint32_t handle = 0;
    request.prompt = &token;
    CHECK_OK(ft_session_submit(session, &request, &handle, &err), &err);
    said.count[handle] = 0;
    return handle;
}

TEST(the_map_of_the_device_forgets_what_a_failed_captured_step_had_fetched)
{
    enum { TOKENS = 8 };
    static uint32_t expected[TOKENS][NEW];
    struct ft_engine engine;
    struct ft_error err;
    REQUIRE(open_and_learn(&engine, "qwen3_moe-bf16", FT_STRATEGY_OFFLOAD, 14));
    memset(&said, 0, sizeof said);
    for (uint32_t t = 0; t < TOKENS; t++) {
        uint32_t handle = submit_token(engine.session, prompt_ids[5][t]);
        drain(engine.session);
        memcpy(expected[t], said.tokens[handle], sizeof expected[t]);
        ft_session_release(engine.session, handle);
    }
    failing = *engine.policy;
    decide_before = failing.decide_layer;
    failing.decide_layer = decide_and_fail;
    for (int h = FT_HANDSHAKE_MEMOP; h <= FT_HANDSHAKE_KERNEL; h++) {
        struct change change = {.handshake = (enum ft_handshake)h, .policy = &failing};
        CHECK_OK(reopen(&engine, &change, &err), &err);
        REQUIRE(engine.session != NULL);
        fail_session = engine.session;
        memset(&said, 0, sizeof said);
        for (uint32_t t = 0; t < TOKENS; t++) {
            uint32_t other = (t + 3) % TOKENS, handle = submit_token(engine.session, prompt_ids[5][t]);
            fail_layer = engine.model->layer_count - 1;
            fail_countdown = 1;
            drain(engine.session);
            CHECK_EQ(said.failed, t + 1);
            uint32_t between = submit_token(engine.session, prompt_ids[5][other]);
            drain(engine.session);
            CHECK(memcmp(said.tokens[between], expected[other], sizeof expected[other]) == 0);
            CHECK_OK(ft_session_resume(engine.session, handle, &err), &err);
            drain(engine.session);
            CHECK_EQ(said.count[handle], NEW);
            CHECK(memcmp(said.tokens[handle], expected[t], sizeof expected[t]) == 0);
            ft_session_release(engine.session, handle);
            ft_session_release(engine.session, between);
        }
    }
    close_engine(&engine);
}

/* ---- snapshots ---- */

TEST(prefixes_in_device_memory_are_used_again)
{
    static const char *const fixtures[] = {"qwen3_moe-bf16", "qwen4_exp-bf16"};
    struct ft_error err;
    for (uint32_t f = 0; f < 2; f++) {
        struct ft_engine engine;
        uint32_t prompt[100], expected[NEW] = {0};
        REQUIRE(open_and_learn(&engine, fixtures[f], FT_STRATEGY_OFFLOAD, 40));
        uint32_t length = FT_MIN(engine.plan.page_tokens + 5, 100u);
        for (uint32_t i = 0; i < length; i++)
            prompt[i] = prompt_ids[i % PROMPTS][i % prompt_count[i % PROMPTS]];
        for (uint32_t round = 0; round < 3; round++) {
            struct ft_request request = request_of(0, NEW);
            struct ft_sequence_info info;
            uint32_t handle = 0;
            request.prompt = prompt;
            request.prompt_count = length;
            request.reuse_prefix = round > 0;
            memset(&said, 0, sizeof said);
            CHECK_OK(ft_session_submit(engine.session, &request, &handle, &err), &err);
            ft_session_sequence_info(engine.session, handle, &info);
            CHECK_EQ(info.reused_count,
                     round ? length / engine.plan.page_tokens * engine.plan.page_tokens : 0);
            drain(engine.session);
            CHECK_EQ(said.count[handle], NEW);
            if (!round)
                memcpy(expected, said.tokens[handle], sizeof expected);
            CHECK(memcmp(expected, said.tokens[handle], sizeof expected) == 0);
            ft_session_release(engine.session, handle);
        }
        close_engine(&engine);
    }
}

/* ---- sampling ---- */

static const struct ft_sampling samplings[] = {
    {.temperature = 0.8f, .top_p = 1, .repetition_penalty = 1, .seed = 1},
    {.temperature = 1.5f, .top_k = 5, .top_p = 1, .repetition_penalty = 1, .seed = 2},
    {.temperature = 1, .top_p = 0.7f, .repetition_penalty = 1, .seed = 3},
    {.temperature = 1, .top_p = 1, .min_p = 0.1f, .repetition_penalty = 1, .seed = 4},
    {.temperature = 0, .top_p = 1, .repetition_penalty = 1.3f, .seed = 5},
    {.temperature = 0.9f, .top_k = 40, .top_p = 0.9f, .min_p = 0.02f, .repetition_penalty = 1.1f, .seed = 6},
};
#define SAMPLINGS FT_COUNT_OF(samplings)

static void sample_all(struct ft_session *session, uint32_t vocab, uint32_t got[SAMPLINGS][NEW])
{
    struct ft_error err;
    uint32_t handles[SAMPLINGS] = {0};
    memset(&said, 0, sizeof said);
    for (uint32_t i = 0; i < SAMPLINGS; i++) {
        struct ft_request request = request_of(i % PROMPTS, NEW);
        uint32_t ids[PROMPT_MAX];
        for (uint32_t t = 0; t < request.prompt_count; t++)
            ids[t] = request.prompt[t] % vocab;
        request.prompt = ids;
        request.sampling = samplings[i];
        CHECK_OK(ft_session_submit(session, &request, &handles[i], &err), &err);
    }
    drain(session);
    CHECK_EQ(said.failed, 0);
    for (uint32_t i = 0; i < SAMPLINGS; i++) {
        memcpy(got[i], said.tokens[handles[i]], sizeof got[i]);
        ft_session_release(session, handles[i]);
    }
}

/* Layers without experts between those with: what runs ahead of the router must not lose count of them. */
TEST(sampled_texts_are_those_of_the_cpu)
{
    static const char *const fixtures[] = {"qwen3_moe-bf16", "qwen3_moe-dense-layers"};
    struct ft_engine engine;
    struct ft_error err;
    uint32_t on_cpu[SAMPLINGS][NEW], on_gpu[SAMPLINGS][NEW];
    for (uint32_t f = 0; f < 2; f++) {
        begin_gpu();
        CHECK_OK(engine_open(&engine, fixtures[f], FT_STRATEGY_CPU, FT_DEVICE_NONE, 0, &err), &err);
        REQUIRE(engine.session != NULL);
        sample_all(engine.session, engine.model->vocab, on_cpu);
        close_engine(&engine);
        CHECK_OK(engine_open(&engine, fixtures[f], FT_STRATEGY_HYBRID, FT_DEVICE_CUDA, f ? 6 : 34, &err),
                 &err);
        REQUIRE(engine.session != NULL);
        for (int h = FT_HANDSHAKE_KERNEL; h < FT_HANDSHAKE_COUNT; h++) {
            CHECK_OK(reopen(&engine, &(struct change){.handshake = (enum ft_handshake)h}, &err), &err);
            sample_all(engine.session, engine.model->vocab, on_gpu);
            for (uint32_t i = 0; i < SAMPLINGS; i++) {
                bool same = memcmp(on_cpu[i], on_gpu[i], sizeof on_cpu[i]) == 0;
                for (uint32_t t = 0; t < NEW && !same; t++)
                    fprintf(stderr, "%s, sampling %u, token %u: %u on the CPU, %u on the GPU\n", fixtures[f],
                            i, t, on_cpu[i][t], on_gpu[i][t]);
                CHECK(same);
            }
        }
        close_engine(&engine);
    }
}

#ifdef FT_FAKE_CUDA
#define RUN_FAKE                                                                                             \
    RUN(workers_that_stop_for_longer_than_a_step_may_take_end_in_an_error) check_nothing_is_left();
#else
#define RUN_FAKE
#endif

TEST_MAIN(
    CHECK(can_run()); RUN(delays_and_random_batches_change_no_text)
        RUN(delays_and_random_batches_change_no_text_with_state_tables_and_sparse_attention)
            RUN(hardly_any_slots_and_no_slots_change_no_text)
                RUN(workers_that_stop_for_two_seconds_delay_a_step_and_change_no_text)
                    RUN(an_interrupt_in_the_middle_stops_between_steps_and_the_text_goes_on)
                        RUN(sequences_cancelled_and_released_midway_leave_the_others_alone)
                            RUN(only_the_sequence_that_meets_numbers_that_are_none_fails)
                                RUN(a_failed_step_is_resumed)
                                    RUN(the_map_of_the_device_forgets_what_a_failed_captured_step_had_fetched)
                                        RUN(prefixes_in_device_memory_are_used_again)
                                            RUN(sampled_texts_are_those_of_the_cpu) RUN_FAKE)
