/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPU lane end to end: every fixture and the demo model, every strategy and handshake. Built twice: against the CUDA
 * double with emulated kernels (everywhere), and against a real GPU (label gpu; skipped without one unless
 * FT_REQUIRE_GPU=1).
 */
#include "jobs/lane_cuda.h"
#include "tests/fixture_session.h"
#include "tests/gpu_needed.h"

#ifdef FT_FAKE_CUDA
#include "tests/fake_cuda.h"
#define STRATEGY_FIXTURES 1u /* emulated kernels take their time */
#define PROMPTS_TRIED 2u
#define TOKENS_TRIED 6u
#else
#define STRATEGY_FIXTURES 2u
#define PROMPTS_TRIED 64u
#define TOKENS_TRIED 256u
#endif

#define TOLERANCE 1e-4
#define TOLERANCE_PREFILL 2e-2 /* chunks of more rows than a decode batch: products of bf16 pieces */

static const char *const fixtures[] = {"qwen3_moe-bf16",     "qwen3_moe-nvfp4-compressed_tensors",
                                       "qwen3_moe-fp8_block", "qwen4_exp-bf16",
                                       "qwen4_exp-nvfp4-modelopt", "qwen3_5_moe-bf16",
                                       "gpt_oss-mxfp4",       "qwen3_moe-dense-layers",
                                       "qwen3_moe-bf16-sharded-tied", "qwen3_moe-mixed-formats"};

static void begin_gpus(int count)
{
    (void)count;
#ifdef FT_FAKE_CUDA
    struct fake_cuda_options options = {.device_count = count,
                                        .driver_version = 13000,
                                        .major = 9,
                                        .memory_bytes = 2ull << 30,
                                        .pinned_bytes = 2ull << 30,
                                        .seed = 1};
    fake_cuda_init(&options);
#endif
}

static void begin(void)
{
    begin_gpus(1);
}

struct reference {
    struct ft_arrays arrays;
    const struct ft_array *logits, *topk, *greedy;
    uint32_t tokens, vocab, *prompt;
};

static bool reference_open(struct reference *ref, const char *dir)
{
    struct ft_error err;
    char path[4200];
    snprintf(path, sizeof path, "%s/reference.safetensors", dir);
    if (ft_safetensors_read(&ref->arrays, path, 1u << 30, &err) != FT_OK) {
        CHECK_OK(err.code, &err);
        return false;
    }
    const struct ft_array *ids = ft_arrays_find(&ref->arrays, "input_ids");
    ref->logits = ft_arrays_find(&ref->arrays, "logits");
    ref->topk = ft_arrays_find(&ref->arrays, "router_topk");
    ref->greedy = ft_arrays_find(&ref->arrays, "greedy");
    ref->tokens = (uint32_t)ids->shape[0];
    ref->vocab = (uint32_t)ref->logits->shape[1];
    ref->prompt = malloc(ref->tokens * sizeof *ref->prompt);
    memcpy(ref->prompt, ids->data, ref->tokens * sizeof *ref->prompt);
    return true;
}

static void reference_close(struct reference *ref)
{
    free(ref->prompt);
    ft_arrays_fini(&ref->arrays);
}

/* Greedy choices that the reference itself made by a hair may differ: a token must be at most this far below the best. */
static bool is_near_best(const float *logits, uint32_t vocab, uint32_t token)
{
    float best = logits[0], scale = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        best = fmaxf(best, logits[i]);
        scale = fmaxf(scale, fabsf(logits[i]));
    }
    return logits[token] >= best - (float)TOLERANCE * scale;
}

/* Prefill with captured logits, then greedy steps; the decode steps of the fixtures begin at their prompt's end. */
static void check_fixture(const char *name, const struct fixture_config *config)
{
    char dir[4096], what[300];
    struct reference ref;
    struct ft_error err;
    struct ft_engine engine;
    snprintf(dir, sizeof dir, "%s/fixtures/%s", FT_DATA_DIR, name);
    snprintf(what, sizeof what, "%s, strategy %d, handshake %d, chunk %u, %u GPUs", name, (int)config->strategy,
             (int)config->handshake, config->chunk, config->gpus);
    REQUIRE(reference_open(&ref, dir));
    int status = fixture_open(&engine, dir, config, &err);
    if (status != FT_OK)
        fprintf(stderr, "%s\n", what);
    CHECK_OK(status, &err);
    if (status != FT_OK) {
        reference_close(&ref);
        return;
    }
    const struct ft_model *m = engine.model;
    uint64_t wide = (uint64_t)ref.tokens * m->hc_count * m->hidden;
    float *logits = calloc((size_t)ref.tokens * ref.vocab, sizeof *logits);
    float *hidden = calloc((m->layer_count + 1) * wide, sizeof *hidden);
    int32_t *topk = calloc((size_t)m->layer_count * ref.tokens * m->topk, sizeof *topk);
    struct ft_capture capture = {.row_count = ref.tokens, .logits = logits, .hidden = hidden, .topk = topk};
    uint32_t greedy = (uint32_t)ref.greedy->shape[0], sequence, tokens[FT_SEQUENCES_MAX][256] = {{0}};
    uint32_t counts[FT_SEQUENCES_MAX] = {0};
    struct ft_request request = {.prompt = ref.prompt,
                                 .prompt_count = ref.tokens,
                                 .max_tokens = 1,
                                 .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1},
                                 .capture = &capture};
    CHECK_OK(ft_session_submit(engine.session, &request, &sequence, &err), &err);
    CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
    double tolerance = config->chunk > 16 ? TOLERANCE_PREFILL : TOLERANCE;
    double error = fixture_error(logits, ref.logits->data, (uint64_t)ref.tokens * ref.vocab);
    for (uint32_t i = 0; i <= m->layer_count && !(error <= tolerance); i++) {
        char array[32];
        snprintf(array, sizeof array, "hidden.%u", i);
        const struct ft_array *want = ft_arrays_find(&ref.arrays, array);
        fprintf(stderr, "%s: %s departs by %.2e\n", what, array,
                fixture_error(hidden + i * wide, want->data, i < m->layer_count ? wide : (uint64_t)ref.tokens * m->hidden));
    }
    if (!(error <= tolerance))
        fprintf(stderr, "%s: logits depart by %.2e\n", what, error);
    CHECK(error <= tolerance);
    ft_session_release(engine.session, sequence);
    /* Without a capture decode steps are captured graphs. */
    request.capture = NULL;
    request.max_tokens = FT_MIN(greedy, TOKENS_TRIED);
    memset(counts, 0, sizeof counts);
    CHECK_OK(ft_session_submit(engine.session, &request, &sequence, &err), &err);
    CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
    CHECK_EQ(counts[sequence], request.max_tokens);
    CHECK(is_near_best((const float *)ref.logits->data + (uint64_t)(ref.tokens - 1) * ref.vocab, ref.vocab, tokens[sequence][0]));
    bool same = memcmp(tokens[sequence], ref.greedy->data, request.max_tokens * 4) == 0;
    if (!same)
        fprintf(stderr, "%s: other greedy tokens\n", what);
    CHECK(same);
    free(logits);
    free(hidden);
    free(topk);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    reference_close(&ref);
}

static struct fixture_config config_of(enum ft_strategy strategy, enum ft_handshake handshake, uint32_t chunk)
{
    return (struct fixture_config){.strategy = strategy,
                                   .device = FT_DEVICE_CUDA,
                                   .workers = 1,
                                   .chunk = chunk,
                                   .slots = strategy == FT_STRATEGY_FUSED ? 0 : 24,
                                   .sequences = 4,
                                   .share = 0.5,
                                   .all_logits = true,
                                   .deterministic = true,
                                   .handshake = handshake};
}

static void every_fixture_agrees_with_its_reference(void)
{
    for (size_t i = 0; i < sizeof fixtures / sizeof *fixtures; i++) {
        begin();
        struct fixture_config config = config_of(FT_STRATEGY_HYBRID, FT_HANDSHAKE_AUTO, 16);
        check_fixture(fixtures[i], &config);
    }
}

static void every_strategy_and_handshake_gives_the_same_text(void)
{
    static const char *const some[] = {"qwen4_exp-nvfp4-modelopt", "gpt_oss-mxfp4"};
    for (size_t f = 0; f < STRATEGY_FIXTURES; f++)
        for (int s = FT_STRATEGY_AUTO; s < FT_STRATEGY_COUNT; s++)
            for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++) {
                begin();
                struct fixture_config config = config_of((enum ft_strategy)s, (enum ft_handshake)h, h == FT_HANDSHAKE_LAUNCH ? 7 : 64);
                check_fixture(some[f], &config);
            }
}

/* How many GPUs there are to split a model over. */
static uint32_t gpus_here(void)
{
#ifdef FT_FAKE_CUDA
    return 3;
#else
    struct ft_gpu_info info;
    struct ft_error err;
    return ft_lane_cuda_find(0, &info, &err) == FT_OK ? info.count : 0;
#endif
}

/* Layers split over GPUs: every fixture on two, every strategy and handshake on two or three. */
static void several_gpus_give_the_same_text(void)
{
    uint32_t here = gpus_here(), turn = 0;
    if (here < 2) {
        fprintf(stderr, "skipped: %u GPU, two are needed\n", here);
        return;
    }
    for (size_t i = 0; i < sizeof fixtures / sizeof *fixtures; i++) {
        begin_gpus(2);
        struct fixture_config config = config_of(FT_STRATEGY_HYBRID, FT_HANDSHAKE_AUTO, 16);
        config.gpus = 2;
        check_fixture(fixtures[i], &config);
    }
    static const char *const some[] = {"qwen4_exp-nvfp4-modelopt", "gpt_oss-mxfp4"};
    for (size_t f = 0; f < STRATEGY_FIXTURES; f++)
        for (int s = FT_STRATEGY_AUTO; s < FT_STRATEGY_COUNT; s++)
            for (int h = FT_HANDSHAKE_MEMOP; h < FT_HANDSHAKE_COUNT; h++) {
                struct fixture_config config = config_of((enum ft_strategy)s, (enum ft_handshake)h, h == FT_HANDSHAKE_LAUNCH ? 7 : 64);
                config.gpus = 2 + (here > 2 ? turn++ % 2 : 0);
                begin_gpus((int)config.gpus);
                check_fixture(some[f], &config);
            }
}

static void the_demo_model_answers_alone_and_batched(void)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    static uint32_t tokens[FT_SEQUENCES_MAX][256];
    uint32_t counts[FT_SEQUENCES_MAX] = {0}, handles[PROMPTS_MAX];
    begin();
    REQUIRE(prompts_read(&p));
    struct fixture_config config = config_of(FT_STRATEGY_HYBRID, FT_HANDSHAKE_AUTO, 64);
    config.slots = 128;
    config.all_logits = false;
    int status = fixture_open(&engine, TINY_DIR, &config, &err);
    CHECK_OK(status, &err);
    uint32_t wanted = FT_MIN(p.count, PROMPTS_TRIED), matched = 0;
    for (uint32_t first = 0; status == FT_OK && first < wanted; first += 4) {
        uint32_t some = FT_MIN(wanted - first, 4u);
        memset(counts, 0, sizeof counts);
        for (uint32_t i = 0; i < some; i++) {
            struct ft_request request = prompts_request(&p, first + i);
            request.max_tokens = FT_MIN(request.max_tokens, TOKENS_TRIED);
            CHECK_OK(ft_session_submit(engine.session, &request, &handles[i], &err), &err);
        }
        CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
        for (uint32_t i = 0; i < some; i++) {
            uint32_t count = FT_MIN(p.want_count[first + i], TOKENS_TRIED);
            CHECK_EQ(counts[handles[i]], count);
            matched += memcmp(tokens[handles[i]], p.want[first + i], count * 4) == 0;
            ft_session_release(engine.session, handles[i]);
        }
    }
    fprintf(stderr, "%u of %u demo texts equal\n", matched, wanted);
    CHECK(matched * 10 >= wanted * 9); /* the others have top-1 margins below bf16's error */
    if (status == FT_OK)
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    prompts_free(&p);
}

#ifdef FT_FAKE_CUDA
#define RUN_FAKE RUN(nothing_is_left_behind)
static void nothing_is_left_behind(void)
{
    struct fake_cuda_live live;
    begin();
    struct fixture_config config = config_of(FT_STRATEGY_OFFLOAD, FT_HANDSHAKE_AUTO, 64);
    check_fixture("qwen3_moe-bf16", &config);
    config = config_of(FT_STRATEGY_AUTO, FT_HANDSHAKE_AUTO, 64);
    config.deterministic = false; /* measured at start: the mover pins the banks before the session does */
    check_fixture("qwen3_moe-bf16", &config);
    fake_cuda_live(&live);
    CHECK_EQ(live.device_bytes, 0);
    CHECK_EQ(live.pinned_bytes, 0);
    CHECK_EQ(live.registered, 0);
    CHECK_EQ(live.streams, 0);
    CHECK_EQ(live.events, 0);
    CHECK_EQ(live.graphs, 0);
}
#else
#define RUN_FAKE
#endif

TEST_MAIN(need_gpu(); RUN(every_fixture_agrees_with_its_reference) RUN(every_strategy_and_handshake_gives_the_same_text)
              RUN(several_gpus_give_the_same_text) RUN(the_demo_model_answers_alone_and_batched) RUN_FAKE)
