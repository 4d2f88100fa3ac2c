/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model over several GPUs: the texts of one GPU, blocks of memory that lie in parts, snapshots and rollback,
 * copies ahead; against the CUDA double also GPUs that are absent, too small, too old, or lost. Built for real
 * GPUs, too, where two are needed.
 */
#include "tests/ahead_policies.h"
#include "tests/gpu_session.h"
#include "tools/ft_bench.h"

#include <fcntl.h>
#include <unistd.h>

#define LONG_PROMPT 80u /* longer than a page */

static uint32_t gpus_here(void)
{
#ifdef FT_FAKE_CUDA
    return 4;
#else
    struct ft_gpu_info info;
    struct ft_error err;
    return ft_lane_cuda_find(0, &info, &err) == FT_OK ? info.count : 0;
#endif
}

#ifdef FT_FAKE_CUDA
static void begin_gpus(uint32_t count)
{
    struct fake_cuda_options options = good_gpu;
    options.device_count = (int)count;
    check_nothing_is_left();
    fake_cuda_init(&options);
}
#else
static void begin_gpus(uint32_t count)
{
    (void)count;
}
#endif

static int open_slots(struct ft_engine *engine, const char *fixture, enum ft_strategy strategy,
                      uint32_t slot_count, uint32_t gpus, struct ft_error *err)
{
    bool slots =
        strategy == FT_STRATEGY_OFFLOAD || strategy == FT_STRATEGY_HYBRID || strategy == FT_STRATEGY_CPU;
    struct fixture_config config = {.strategy = strategy,
                                    .device = FT_DEVICE_CUDA,
                                    .workers = 2,
                                    .chunk = 8, /* prefill in pieces */
                                    .slots = slots ? slot_count : 0,
                                    .sequences = SEQUENCES,
                                    .share = 0.5,
                                    .deterministic = true,
                                    .gpus = gpus};
    char dir[4096];
    snprintf(dir, sizeof dir, "%s/fixtures/%s", FT_DATA_DIR, fixture);
    begin_gpus(FT_MAX(gpus, 1u));
    return fixture_open(engine, dir, &config, err);
}

static int open_on(struct ft_engine *engine, const char *fixture, enum ft_strategy strategy, uint32_t gpus,
                   struct ft_error *err)
{
    return open_slots(engine, fixture, strategy, 40, gpus, err);
}

static void close_engine(struct ft_engine *engine)
{
    struct ft_error err;
    CHECK_OK(ft_engine_close(engine, &err), &err);
    begin_gpus(1); /* checks that nothing is left */
}

/* ---- texts ---- */

TEST(prompts_in_pieces_and_batches_say_what_they_say_on_one_gpu)
{
    static const char *const fixtures[] = {"qwen3_moe-bf16", "qwen4_exp-bf16", "gpt_oss-mxfp4"};
    static const enum ft_strategy strategies[] = {FT_STRATEGY_OFFLOAD, FT_STRATEGY_HYBRID, FT_STRATEGY_CPU,
                                                  FT_STRATEGY_FUSED};
    struct ft_error err;
    struct ft_engine engine;
    for (uint32_t i = 0; i < FT_COUNT_OF(fixtures) * FT_COUNT_OF(strategies); i++) {
        const char *fixture = fixtures[i / FT_COUNT_OF(strategies)];
        enum ft_strategy strategy = strategies[i % FT_COUNT_OF(strategies)];
        CHECK_OK(open_on(&engine, fixture, strategy, 1, &err), &err);
        REQUIRE(engine.session != NULL);
        CHECK_EQ(engine.plan.gpu_count, 0);
        learn(engine.session);
        close_engine(&engine);
        for (uint32_t gpus = 2; gpus <= FT_MIN(gpus_here(), strategy == FT_STRATEGY_OFFLOAD ? 3u : 2u);
             gpus++) {
            CHECK_OK(open_on(&engine, fixture, strategy, gpus, &err), &err);
            REQUIRE(engine.session != NULL);
            CHECK_EQ(engine.plan.gpu_count, gpus);
            char wanted[64];
            snprintf(wanted, sizeof wanted, "layers %u to %u", engine.plan.gpus[1].layer_begin,
                     engine.plan.gpus[1].layer_end - 1);
            CHECK(strstr(ft_session_note(engine.session), "GPU 0 (") != NULL);
            CHECK(strstr(ft_session_note(engine.session), wanted) != NULL);
            check_texts(engine.session, 4, 2); /* long ones: pages and states of several chunks */
            check_texts(engine.session, 0, 4);
            close_engine(&engine);
        }
    }
}

/* ---- memory in parts ---- */

/* Writes and reads blocks in pieces that cross parts and blocks. */
static void check_blocks(const struct ft_memory *memory, char *base, uint64_t bytes)
{
    static const uint64_t cuts[] = {0, 1, 5, 64, 1000, 4096};
    char *pattern = malloc(bytes), *back = malloc(bytes);
    REQUIRE(pattern && back);
    for (uint64_t i = 0; i < bytes; i++)
        pattern[i] = (char)(i * 2654435761u >> 13);
    for (uint64_t at = 0, i = 0; at < bytes; i++) {
        uint64_t some = FT_MIN(bytes / 7 + cuts[i % 6], bytes - at);
        memory->copy(memory->context, base + at, pattern + at, some);
        at += some;
    }
    for (uint64_t at = 0, i = 0; at < bytes; i++) {
        uint64_t some = FT_MIN(bytes / 5 + cuts[i % 6], bytes - at);
        memory->copy(memory->context, back + at, base + at, some);
        at += some;
    }
    CHECK(memcmp(pattern, back, bytes) == 0);
    memory->zero(memory->context, base + bytes / 3, bytes / 3);
    memset(pattern + bytes / 3, 0, bytes / 3);
    memory->copy(memory->context, back, base, bytes);
    CHECK(memcmp(pattern, back, bytes) == 0);
    free(pattern);
    free(back);
}

TEST(states_and_pages_in_parts_are_copied_and_cleared_as_one)
{
    struct ft_error err;
    struct ft_engine engine;
    for (uint32_t gpus = 2; gpus <= FT_MIN(gpus_here(), 4u); gpus++) {
        CHECK_OK(open_on(&engine, "qwen4_exp-bf16", FT_STRATEGY_OFFLOAD, gpus, &err), &err);
        REQUIRE(engine.session != NULL);
        struct ft_session *s = engine.session;
        const struct ft_memory *memory = s->kv.place;
        check_blocks(memory, (char *)s->sequences[1].state, 3 * s->step.x.state.count * sizeof(float));
        check_blocks(memory, (char *)ft_kv_page(&s->kv, 2), 2 * s->kv.layout.count * sizeof(float));
        CHECK(!s->cuda->broken);
        close_engine(&engine);
    }
}

/* ---- snapshots ---- */

static uint32_t long_ids[LONG_PROMPT];

static uint32_t submit_long(struct ft_session *session, struct ft_error *err)
{
    uint32_t handle = 0;
    const struct ft_request request = {.prompt = long_ids,
                                       .prompt_count = LONG_PROMPT,
                                       .max_tokens = NEW,
                                       .reuse_prefix = true,
                                       .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1}};
    memset(&said, 0, sizeof said);
    CHECK_OK(ft_session_submit(session, &request, &handle, err), err);
    return handle;
}

TEST(a_snapshot_holds_all_parts_of_a_state_and_brings_them_back)
{
    struct ft_error err;
    struct ft_engine engine;
    struct ft_sequence_info info;
    uint32_t text[NEW];
    for (uint32_t i = 0; i < LONG_PROMPT; i++)
        long_ids[i] = 3 + (i * i * 7 + i * 13) % 300;
    for (uint32_t gpus = 1; gpus <= FT_MIN(gpus_here(), 3u); gpus++) {
        CHECK_OK(open_on(&engine, "qwen4_exp-bf16", FT_STRATEGY_OFFLOAD, gpus, &err), &err);
        REQUIRE(engine.session != NULL);
        uint32_t handle = submit_long(engine.session, &err);
        drain(engine.session);
        CHECK_EQ(said.count[handle], NEW);
        if (gpus == 1)
            memcpy(text, said.tokens[handle], sizeof text);
        CHECK(memcmp(text, said.tokens[handle], sizeof text) == 0);
        ft_session_release(engine.session, handle);
        handle = submit(engine.session, 5, NEW); /* something else in the states, whatever it says */
        drain(engine.session);
        ft_session_release(engine.session, handle);
        handle = submit_long(engine.session, &err);
        ft_session_sequence_info(engine.session, handle, &info);
        CHECK_EQ(info.reused_count, engine.plan.page_tokens);
        while (said.count[handle] < 2 && !ft_session_is_idle(engine.session))
            CHECK_OK(step_once(engine.session, &err), &err);
        /* a step that failed: back to the snapshot, and again */
        CHECK(ft_session_rollback(engine.session, &engine.session->sequences[handle]));
        drain(engine.session);
        CHECK_EQ(said.count[handle], NEW);
        CHECK(memcmp(text, said.tokens[handle], sizeof text) == 0);
        close_engine(&engine);
    }
}

/* ---- copies ahead ---- */

/* Texts and maps after every step of a policy that copies ahead. */
static struct ft_session_stats run_ahead(struct ft_engine *engine, enum ft_handshake handshake,
                                         const struct ft_policy *policy)
{
    struct ft_error err;
    struct ft_session_stats stats = {0};
    struct change change = {.handshake = handshake, .policy = policy, .timed = true};
    CHECK_OK(reopen(engine, &change, &err), &err);
    if (engine->session) {
        check_steps(engine->session, check_maps);
        ft_session_stats(engine->session, &stats);
    }
    CHECK_EQ(stats.policy_repairs, 0);
    return stats;
}

/* A session with two GPUs; what is to be said was learnt with one. */
static bool open_two(struct ft_engine *engine, const char *fixture, uint32_t slots)
{
    struct ft_error err;
    CHECK_OK(open_on(engine, fixture, FT_STRATEGY_HYBRID, 1, &err), &err);
    if (!engine->session)
        return false;
    learn(engine->session);
    close_engine(engine);
    CHECK_OK(open_slots(engine, fixture, FT_STRATEGY_HYBRID, slots, 2, &err), &err);
    return engine->session != NULL;
}

TEST(copies_ahead_stay_on_their_gpu)
{
    struct ft_engine engine;
    REQUIRE(open_two(&engine, "qwen3_moe-bf16", 24));
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++) {
        struct ft_session_stats stats = run_ahead(&engine, (enum ft_handshake)h, &keeping);
        printf("handshake %d: %llu ahead, %llu used, %llu wasted\n", h, (unsigned long long)stats.prefetches,
               (unsigned long long)stats.prefetches_used, (unsigned long long)stats.prefetches_wasted);
        CHECK(h == FT_HANDSHAKE_LAUNCH ? stats.prefetches == 0 : stats.prefetches_used > 5);
    }
    close_engine(&engine);
}

TEST(what_is_foreseen_lands_on_the_gpu_of_its_layer)
{
    struct ft_engine engine;
    REQUIRE(open_two(&engine, "qwen4_exp-bf16", 40));
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++) {
        struct ft_session_stats stats = run_ahead(&engine, (enum ft_handshake)h, &foreseeing);
        printf("handshake %d: %llu foreseen, %llu copied, %llu used\n", h, (unsigned long long)stats.foreseen,
               (unsigned long long)stats.copied_ahead, (unsigned long long)stats.copied_ahead_used);
        if (h == FT_HANDSHAKE_LAUNCH) {
            CHECK_EQ(stats.foreseen, 0);
            continue;
        }
        CHECK(engine.session->step.landings[0].count && engine.session->step.landings[1].count);
        CHECK(stats.copied_ahead_used > 10 && stats.copied_ahead_used <= stats.copied_ahead);
    }
    close_engine(&engine);
}

/* ---- what is shown ---- */

static char folder[] = "/tmp/ft-test-gpus-XXXXXX";

/* The whole file; malloc'ed. */
static char *read_all(const char *path, uint64_t *bytes)
{
    FILE *file = fopen(path, "rb");
    char *data = NULL;
    if (file && fseek(file, 0, SEEK_END) == 0) {
        long size = ftell(file);
        rewind(file);
        data = size > 0 ? calloc(1, (size_t)size + 1) : NULL;
        *bytes = data ? fread(data, 1, (size_t)size, file) : 0;
    }
    if (file)
        fclose(file);
    return data;
}

TEST(a_trace_has_a_row_for_each_gpu_with_its_layers)
{
    char path[256], dir[4096];
    struct ft_error err;
    struct ft_engine engine;
    snprintf(path, sizeof path, "%s/trace", folder);
    snprintf(dir, sizeof dir, "%s/fixtures/qwen4_exp-bf16", FT_DATA_DIR);
    struct fixture_config config = {.strategy = FT_STRATEGY_HYBRID,
                                    .device = FT_DEVICE_CUDA,
                                    .workers = 2,
                                    .chunk = 8,
                                    .slots = 40,
                                    .sequences = 2,
                                    .share = 0.5,
                                    .deterministic = true,
                                    .trace = path,
                                    .gpus = 2};
    begin_gpus(2);
    CHECK_OK(fixture_open(&engine, dir, &config, &err), &err);
    REQUIRE(engine.session != NULL);
    memset(&said, 0, sizeof said);
    (void)submit(engine.session, 2, NEW);
    drain(engine.session);
    uint32_t cut = engine.plan.gpus[0].layer_end, workers = engine.plan.workers;
    close_engine(&engine);
    uint64_t bytes = 0;
    char *data = read_all(path, &bytes);
    struct ft_trace_reader *reader = calloc(1, sizeof *reader);
    static struct ft_trace_record records[20000];
    struct ft_trace_step step;
    REQUIRE(data && reader);
    CHECK_OK(ft_trace_reader_open(reader, data, bytes, &err), &err);
    uint32_t link = workers + FT_STEP_LINK, second = workers + FT_STEP_THREADS, seen[2] = {0};
    CHECK_EQ(reader->header.thread_count, second + 1);
    CHECK(!strcmp(reader->header.thread_names[link], "gpu 0"));
    CHECK(!strcmp(reader->header.thread_names[second], "gpu 1"));
    for (bool more = true; more;) {
        int status = ft_trace_reader_next(reader, &step, records, FT_COUNT_OF(records), &more, &err);
        CHECK_OK(status, &err);
        for (uint32_t i = 0; status == FT_OK && more && i < step.record_count; i++) {
            const struct ft_trace_record *r = &step.records[i];
            if (r->layer == FT_GRAPH_NO_LAYER || (r->thread != link && r->thread != second))
                continue;
            CHECK_EQ(r->thread == second, r->layer >= cut);
            CHECK(r->start_ns >= step.begin_ns && r->end_ns >= r->start_ns);
            seen[r->thread == second]++;
        }
        more = more && status == FT_OK;
    }
    CHECK(seen[0] > 20 && seen[1] > 20);
    free(reader);
    free(data);
    (void)unlink(path);
}

TEST(bench_decode_runs_on_two_gpus)
{
    char path[256], shape[4096];
    snprintf(path, sizeof path, "%s/report", folder);
    snprintf(shape, sizeof shape, "%s/fixtures/qwen4_exp-bf16/config.json", FT_DATA_DIR);
    char *argv[] = {"--shape",
                    shape,
                    "--json",
                    "--gpus",
                    "0,1",
                    "--device",
                    "cuda",
                    "--strategy",
                    "hybrid",
                    "--moe-cache-rate",
                    "0.5",
                    "--context",
                    "40",
                    "--steps",
                    "6",
                    "--warmup",
                    "2",
                    "--no-pin",
                    "--workers",
                    "1",
                    "--ceiling-seconds",
                    "0.01",
                    NULL};
    begin_gpus(2);
    fflush(stdout);
    int kept = dup(1), file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    dup2(file, 1);
    int code = ft_command_bench_decode((int)FT_COUNT_OF(argv) - 1, argv);
    fflush(stdout);
    dup2(kept, 1);
    close(kept);
    close(file);
    CHECK_EQ(code, 0);
    uint64_t bytes = 0;
    char *text = read_all(path, &bytes);
    json_t *root = text ? json_loads(text, 0, NULL) : NULL,
           *row = json_array_get(json_object_get(root, "rows"), 0);
    CHECK(json_number_value(json_object_get(row, "slots")) == 32);
    CHECK(json_number_value(json_object_get(row, "warm_slots")) > 16);
    CHECK(json_number_value(json_object_get(row, "misses_per_step")) > 0);
    json_decref(root);
    free(text);
    (void)unlink(path);
    begin_gpus(1);
}

#ifdef FT_FAKE_CUDA

/* ---- GPUs that do not do ---- */

static int try_open(const struct fake_cuda_options *machine, uint32_t gpus, struct ft_error *err)
{
    struct ft_engine engine;
    struct fixture_config config = {.strategy = FT_STRATEGY_OFFLOAD,
                                    .device = FT_DEVICE_CUDA,
                                    .workers = 1,
                                    .chunk = 8,
                                    .slots = 40,
                                    .sequences = 2,
                                    .gpus = gpus};
    check_nothing_is_left();
    fake_cuda_init(machine);
    int status = fixture_open(&engine, FT_DATA_DIR "/fixtures/qwen3_moe-bf16", &config, err);
    if (status == FT_OK) {
        struct ft_error ignored;
        CHECK_OK(ft_engine_close(&engine, &ignored), &ignored);
    }
    check_nothing_is_left();
    return status;
}

TEST(a_second_gpu_that_is_absent_old_or_full_is_named)
{
    struct ft_error err;
    struct fake_cuda_options two = good_gpu;
    two.device_count = 2;
    CHECK_OK(try_open(&two, 2, &err), &err);
    CHECK_FAILS(try_open(&good_gpu, 2, &err), FT_USAGE, "--gpus 1: there are 1 GPUs", &err);
    CHECK_FAILS(try_open(&two, 3, &err), FT_USAGE, "--gpus 2: there are 2 GPUs", &err);
    struct fake_cuda_options machine = two;
    machine.major_of[1] = 7;
    CHECK_FAILS(try_open(&machine, 2, &err), FT_UNSUPPORTED, "GPU 1 (fake GPU) has compute capability 7.0",
                &err);
    machine = two;
    machine.memory_of[1] = 100 << 20;
    CHECK_FAILS(try_open(&machine, 2, &err), FT_MEMORY, "GPU 1 (fake GPU): only", &err);
    machine = two;
    machine.device_count = 8;
    CHECK_FAILS(try_open(&machine, 8, &err), FT_USAGE, "layers", &err); /* the fixture has fewer */
}

TEST(memory_that_runs_out_on_the_second_gpu_is_told_and_leaves_nothing)
{
    struct ft_error err;
    struct ft_engine engine;
    CHECK_OK(open_on(&engine, "qwen4_exp-bf16", FT_STRATEGY_OFFLOAD, 2, &err), &err);
    REQUIRE(engine.session != NULL);
    uint32_t n = 1;
    for (bool opened = false; !opened && n < 60; n += !opened) {
        CHECK(ft_session_close(engine.session));
        engine.session = NULL;
        begin_gpus(2);
        fake_cuda_fail("cudaMalloc@1", n, cudaErrorMemoryAllocation);
        int status = reopen(&engine, &(struct change){.handshake = FT_HANDSHAKE_LAUNCH}, &err);
        opened = status == FT_OK;
        if (opened)
            break;
        CHECK_EQ(status, FT_MEMORY);
        CHECK(strstr(err.message, "GPU 1: ") != NULL);
        CHECK(strstr(err.message, "--vram") != NULL);
        check_nothing_is_left();
    }
    printf("     %u allocations on the second GPU\n", n - 1);
    CHECK(n > 10);
    fake_cuda_fail(NULL, 0, 0);
    close_engine(&engine);
}

TEST(any_call_of_opening_on_the_second_gpu_may_fail)
{
    static const char *const calls[] = {"cudaStreamCreateWithFlags@1",
                                        "cudaEventCreateWithFlags@1",
                                        "cudaMemset@1",
                                        "cudaMemcpy@1",
                                        "cudaDeviceSynchronize@1",
                                        "cudaSetDevice@1",
                                        "cudaMemGetInfo@1",
                                        "cudaGetDeviceProperties"};
    struct ft_error err;
    struct ft_engine engine;
    CHECK_OK(open_on(&engine, "qwen4_exp-bf16", FT_STRATEGY_OFFLOAD, 2, &err), &err);
    REQUIRE(engine.session != NULL);
    for (uint32_t c = 0; c < FT_COUNT_OF(calls); c++)
        for (uint32_t n = 1; n < 400; n++) {
            CHECK(ft_session_close(engine.session));
            engine.session = NULL;
            begin_gpus(2);
            fake_cuda_fail(calls[c], n, cudaErrorUnknown);
            int status = reopen(&engine, &(struct change){.handshake = FT_HANDSHAKE_LAUNCH}, &err);
            if (status == FT_OK)
                break;
            CHECK(strstr(err.message, strchr(calls[c], '@') ? "GPU 1" : "GPU ") != NULL);
            CHECK(status == FT_SYSTEM || status == FT_UNSUPPORTED);
        }
    fake_cuda_fail(NULL, 0, 0);
    close_engine(&engine);
}

TEST(gpus_that_cannot_reach_each_other_go_through_the_host)
{
    struct ft_error err;
    struct ft_engine engine;
    CHECK_OK(open_on(&engine, "qwen4_exp-bf16", FT_STRATEGY_OFFLOAD, 2, &err), &err);
    REQUIRE(engine.session != NULL);
    CHECK(!strstr(ft_session_note(engine.session), "through the host"));
    learn(engine.session);
    CHECK(ft_session_close(engine.session));
    engine.session = NULL;
    struct fake_cuda_options machine = good_gpu;
    machine.device_count = 2;
    machine.no_peers = 1;
    fake_cuda_init(&machine);
    CHECK_OK(reopen(&engine, &(struct change){0}, &err), &err);
    REQUIRE(engine.session != NULL);
    CHECK(strstr(ft_session_note(engine.session), "through the host") != NULL);
    check_texts(engine.session, 1, 3);
    close_engine(&engine);
}

/* ---- a step ---- */

/* True: it failed, was told with the GPU's number, broke the session only. */
static bool fail_in_step(struct ft_engine *engine, enum ft_handshake handshake, const char *call,
                         uint32_t nth, int error, const char *gpu)
{
    struct ft_error err;
    CHECK_OK(reopen(engine, &(struct change){.handshake = handshake}, &err), &err);
    if (!engine->session)
        return false;
    memset(&said, 0, sizeof said);
    uint32_t handles[2] = {submit(engine->session, 2, NEW), submit(engine->session, 3, NEW)};
    fake_cuda_fail(call, nth, error);
    double begin = seconds();
    drain(engine->session);
    CHECK(seconds() - begin < 15);
    bool failed = said.failed != 0;
    if (failed) {
        if (!strstr(said.message, gpu))
            fprintf(stderr, "handshake %d, %s %u: \"%s\"\n", (int)handshake, call, nth, said.message);
        CHECK(strstr(said.message, gpu) != NULL);
        (void)submit(engine->session, 0, 1);
        drain(engine->session);
        CHECK(strstr(said.message, "open it again") != NULL);
        CHECK(strstr(said.message, gpu) != NULL);
    } else {
        CHECK(is_text(handles[0], 2, NEW) && is_text(handles[1], 3, NEW));
    }
    CHECK(ft_session_close(engine->session));
    engine->session = NULL;
    begin_gpus(2); /* nothing is left */
    return failed;
}

TEST(what_fails_on_one_of_two_gpus_is_told_with_its_number)
{
    static const struct {
        const char *call;
        uint32_t nth[2];
        int error;
        const char *gpu;
        bool in_launch, in_captured;
    } cases[] = {
        {"copy@1", {1, 12}, cudaErrorIllegalAddress, "GPU 1", true, true},
        {"copy@0", {2, 14}, cudaErrorIllegalAddress, "GPU 0", true, true},
        {"kernel@1", {1, 60}, cudaErrorIllegalAddress, "GPU 1", true, true},
        {"kernel@0", {3, 70}, cudaErrorIllegalAddress, "GPU 0", true, true},
        {"peer copy", {1, 3}, cudaErrorIllegalAddress, "GPU 0", true, true},
        {"cudaMemcpyPeerAsync", {1, 3}, cudaErrorUnknown, "GPU 0", true, true},
        {"cudaStreamWaitEvent@1", {1, 3}, cudaErrorUnknown, "GPU 1", true, true},
        {"cudaLaunchKernel@1", {1, 40}, cudaErrorUnknown, "GPU 1", true, true},
        {"cudaMemcpyAsync@1", {1, 6}, cudaErrorUnknown, "GPU 1", true, true},
        {"cudaGraphLaunch@1", {1, 3}, cudaErrorUnknown, "GPU 1", false, true},
        {"cudaSetDevice@1", {2, 6}, cudaErrorUnknown, "GPU 1", true, true},
    };
    struct ft_error err;
    struct ft_engine engine;
    CHECK_OK(open_on(&engine, "qwen3_moe-bf16", FT_STRATEGY_HYBRID, 2, &err), &err);
    REQUIRE(engine.session != NULL);
    learn(engine.session);
    CHECK(ft_session_close(engine.session));
    engine.session = NULL;
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h += 2)
        for (uint32_t i = 0; i < FT_COUNT_OF(cases); i++)
            for (uint32_t j = 0; j < 2; j++) {
                bool failed = fail_in_step(&engine, (enum ft_handshake)h, cases[i].call, cases[i].nth[j],
                                           cases[i].error, cases[i].gpu);
                if (failed != (h == FT_HANDSHAKE_LAUNCH ? cases[i].in_launch : cases[i].in_captured))
                    fprintf(stderr, "handshake %d, %s %u: failed %d\n", h, cases[i].call, cases[i].nth[j],
                            failed);
                CHECK_EQ(failed, h == FT_HANDSHAKE_LAUNCH ? cases[i].in_launch : cases[i].in_captured);
            }
    CHECK_OK(reopen(&engine, &(struct change){0}, &err), &err);
    REQUIRE(engine.session != NULL);
    check_texts(engine.session, 1, 2);
    close_engine(&engine);
}

TEST(a_gpu_that_stands_still_is_waited_for_or_given_up)
{
    static const char *const what[] = {"kernel@1", "copy@1", "peer copy"};
    struct ft_error err;
    struct ft_engine engine;
    CHECK_OK(open_on(&engine, "qwen3_moe-bf16", FT_STRATEGY_HYBRID, 2, &err), &err);
    REQUIRE(engine.session != NULL);
    learn(engine.session);
    for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h += 2)
        for (uint32_t i = 0; i < FT_COUNT_OF(what); i++) {
            CHECK_OK(reopen(&engine, &(struct change){.handshake = (enum ft_handshake)h}, &err), &err);
            REQUIRE(engine.session != NULL);
            fake_cuda_stall(what[i], 2, 500000000u);
            check_texts(engine.session, 2, 2);
            struct change impatient = {.handshake = (enum ft_handshake)h, .watchdog_ns = 200000000u};
            CHECK_OK(reopen(&engine, &impatient, &err), &err);
            REQUIRE(engine.session != NULL);
            memset(&said, 0, sizeof said);
            (void)submit(engine.session, 3, NEW);
            fake_cuda_stall(what[i], 2, 1500000000u);
            drain(engine.session);
            CHECK_EQ(said.failed, 1);
            CHECK(strstr(said.message, "GPU ") && strstr(said.message, "waiting for"));
            CHECK(ft_session_close(engine.session));
            engine.session = NULL;
            begin_gpus(2);
        }
    CHECK_OK(reopen(&engine, &(struct change){0}, &err), &err);
    close_engine(&engine);
}

#define RUN_FAKE                                                                                             \
    RUN(a_second_gpu_that_is_absent_old_or_full_is_named)                                                    \
    RUN(memory_that_runs_out_on_the_second_gpu_is_told_and_leaves_nothing)                                   \
    RUN(any_call_of_opening_on_the_second_gpu_may_fail)                                                      \
    RUN(gpus_that_cannot_reach_each_other_go_through_the_host)                                               \
    RUN(what_fails_on_one_of_two_gpus_is_told_with_its_number)                                               \
    RUN(a_gpu_that_stands_still_is_waited_for_or_given_up)
#else
#define RUN_FAKE
#endif

static bool are_enough(void)
{
    uint32_t here = can_run() ? gpus_here() : 0;
    if (here < 2) {
        fprintf(stderr, "skipped: %u GPU, two are needed\n", here);
        exit(77);
    }
    return mkdtemp(folder) != NULL;
}

TEST_MAIN(CHECK(are_enough()); RUN(prompts_in_pieces_and_batches_say_what_they_say_on_one_gpu)
              RUN(states_and_pages_in_parts_are_copied_and_cleared_as_one)
                  RUN(a_snapshot_holds_all_parts_of_a_state_and_brings_them_back)
                      RUN(copies_ahead_stay_on_their_gpu) RUN(what_is_foreseen_lands_on_the_gpu_of_its_layer)
                          RUN(a_trace_has_a_row_for_each_gpu_with_its_layers)
                              RUN(bench_decode_runs_on_two_gpus) RUN_FAKE(void) rmdir(folder);)
