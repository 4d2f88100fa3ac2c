/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every fixture against its reference: logits, router choices, hidden states and greedy continuation, for
 * every strategy, number of workers and chunk size, alone and batched. Every configuration must also give the
 * same bits.
 */
#include "tests/fixture.h"

#include <unistd.h>

#define TOLERANCE 1e-4

static const char *const fixtures[] = {FIXTURE_NAMES};
#define FIXTURE_COUNT (sizeof fixtures / sizeof *fixtures)

struct reference {
    struct ft_arrays arrays;
    const struct ft_array *ids, *logits, *topk, *greedy;
    uint32_t tokens, vocab;
    uint32_t *prompt;
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
    ref->ids = ft_arrays_find(&ref->arrays, "input_ids");
    ref->logits = ft_arrays_find(&ref->arrays, "logits");
    ref->topk = ft_arrays_find(&ref->arrays, "router_topk");
    ref->greedy = ft_arrays_find(&ref->arrays, "greedy");
    ref->tokens = (uint32_t)ref->ids->shape[0];
    ref->vocab = (uint32_t)ref->logits->shape[1];
    ref->prompt = malloc(ref->tokens * sizeof *ref->prompt);
    memcpy(ref->prompt, ref->ids->data, ref->tokens * sizeof *ref->prompt);
    return true;
}

static void reference_close(struct reference *ref)
{
    free(ref->prompt);
    ft_arrays_fini(&ref->arrays);
}

struct outputs {
    float *logits, *hidden;
    int32_t *topk;
};

static void outputs_alloc(struct outputs *out, const struct ft_model *m, uint32_t tokens)
{
    out->logits = calloc((size_t)tokens * m->vocab, sizeof(float));
    out->hidden = calloc((size_t)(m->layer_count + 1) * tokens * m->hc_count * m->hidden, sizeof(float));
    out->topk = calloc((size_t)m->layer_count * tokens * m->topk, sizeof(int32_t));
}

static void outputs_free(struct outputs *out)
{
    free(out->logits);
    free(out->hidden);
    free(out->topk);
}

static void check_hidden(const struct reference *ref, const struct ft_model *m, const struct outputs *out,
                         const char *what)
{
    uint64_t wide = (uint64_t)ref->tokens * m->hc_count * m->hidden;
    for (uint32_t i = 0; i <= m->layer_count; i++) {
        char name[32];
        snprintf(name, sizeof name, "hidden.%u", i);
        const struct ft_array *want = ft_arrays_find(&ref->arrays, name);
        uint64_t count = i < m->layer_count ? wide : (uint64_t)ref->tokens * m->hidden;
        REQUIRE(want != NULL);
        double error = fixture_error(out->hidden + i * wide, want->data, count);
        if (!(error <= TOLERANCE)) {
            fprintf(stderr, "%s: %s departs: %.2e\n", what, name, error);
            CHECK(error <= TOLERANCE);
            return;
        }
    }
}

/* Router choices of every layer that has a router. */
static void check_topk(const struct reference *ref, const struct ft_model *m, const struct outputs *out,
                       const char *what)
{
    size_t count = (size_t)ref->tokens * m->topk;
    const int32_t *want = ref->topk->data;
    for (uint32_t i = 0; i < m->layer_count; i++) {
        bool same =
            m->layers[i].dense || memcmp(out->topk + i * count, want + i * count, count * sizeof *want) == 0;
        if (!same)
            fprintf(stderr, "%s: layer %u chose other experts\n", what, i);
        CHECK(same);
    }
}

/* Prefill with captures, then the greedy continuation. `bits` keeps the first configuration's logits. */
static void check_alone(const char *dir, const struct reference *ref, const struct fixture_config *config,
                        float *bits, const char *what)
{
    struct ft_error err;
    struct ft_engine engine;
    int status = fixture_open(&engine, dir, config, &err);
    if (status != FT_OK)
        fprintf(stderr, "%s\n", what);
    CHECK_OK(status, &err);
    if (status != FT_OK)
        return;
    const struct ft_model *m = engine.model;
    struct outputs out;
    outputs_alloc(&out, m, ref->tokens);
    struct ft_capture capture = {
        .row_count = ref->tokens, .logits = out.logits, .hidden = out.hidden, .topk = out.topk};
    uint32_t greedy = (uint32_t)ref->greedy->shape[0], sequence, tokens[FT_SEQUENCES_MAX][256] = {{0}};
    uint32_t counts[FT_SEQUENCES_MAX] = {0};
    struct ft_request request = {.prompt = ref->prompt,
                                 .prompt_count = ref->tokens,
                                 .max_tokens = greedy,
                                 .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1},
                                 .capture = &capture};
    CHECK_OK(ft_session_submit(engine.session, &request, &sequence, &err), &err);
    CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
    double error = fixture_error(out.logits, ref->logits->data, (uint64_t)ref->tokens * ref->vocab);
    if (!(error <= TOLERANCE))
        fprintf(stderr, "%s: logits depart: %.2e\n", what, error);
    CHECK(error <= TOLERANCE);
    check_hidden(ref, m, &out, what);
    check_topk(ref, m, &out, what);
    CHECK_EQ(counts[sequence], greedy);
    CHECK(memcmp(tokens[sequence], ref->greedy->data, greedy * 4) == 0);
    if (bits[0] == 0)
        memcpy(bits, out.logits, (size_t)ref->tokens * ref->vocab * sizeof *bits);
    bool equal = memcmp(bits, out.logits, (size_t)ref->tokens * ref->vocab * sizeof *bits) == 0;
    if (!equal)
        fprintf(stderr, "%s: other bits than the first configuration\n", what);
    CHECK(equal);
    outputs_free(&out);
    ft_session_release(engine.session, sequence);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
}

/* The reference prompt beside three other sequences. */
static void check_batched(const char *dir, const struct reference *ref, const struct fixture_config *config,
                          const char *what)
{
    struct ft_error err;
    struct ft_engine engine;
    struct fixture_config batched = *config;
    batched.all_logits = false;
    int status = fixture_open(&engine, dir, &batched, &err);
    CHECK_OK(status, &err);
    if (status != FT_OK)
        return;
    uint32_t greedy = (uint32_t)ref->greedy->shape[0], handles[4], tokens[FT_SEQUENCES_MAX][256] = {{0}};
    uint32_t counts[FT_SEQUENCES_MAX] = {0};
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t skip = (i + 2) % 4 * 5; /* the third is the whole prompt */
        struct ft_request request = {.prompt = ref->prompt + skip,
                                     .prompt_count = ref->tokens - skip - (skip ? 3 * i : 0),
                                     .max_tokens = greedy + (skip ? i : 0),
                                     .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1}};
        CHECK_OK(ft_session_submit(engine.session, &request, &handles[i], &err), &err);
    }
    CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
    CHECK_EQ(counts[handles[2]], greedy);
    bool same = memcmp(tokens[handles[2]], ref->greedy->data, greedy * 4) == 0;
    if (!same)
        fprintf(stderr, "%s: batched text departs\n", what);
    CHECK(same);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
}

/* ThreadSanitizer is a hundred times slower: the whole prompt at once, and the odd chunk with random delays. */
#ifdef __SANITIZE_THREAD__
#define CHUNK_STEP 2u
#else
#define CHUNK_STEP 1u
#endif

static void check_fixture(const char *name)
{
    char dir[4096], what[256];
    struct reference ref;
    snprintf(dir, sizeof dir, "%s/fixtures/%s", FT_DATA_DIR, name);
    REQUIRE(reference_open(&ref, dir));
    float *bits = calloc((size_t)ref.tokens * ref.vocab, sizeof *bits);
    static const struct {
        enum ft_strategy strategy;
        enum ft_device device;
    } ways[] = {{FT_STRATEGY_CPU, FT_DEVICE_NONE},
                {FT_STRATEGY_CPU, FT_DEVICE_HOST},
                {FT_STRATEGY_FUSED, FT_DEVICE_HOST},
                {FT_STRATEGY_OFFLOAD, FT_DEVICE_HOST},
                {FT_STRATEGY_HYBRID, FT_DEVICE_HOST},
                {FT_STRATEGY_AUTO, FT_DEVICE_HOST}};
    static const uint32_t chunks[] = {128, 1, 7, 16};
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    for (uint32_t w = 0; w < sizeof ways / sizeof *ways; w++)
        for (uint32_t workers = 1; workers <= (uint32_t)FT_MIN(cores, 2); workers++)
            for (uint32_t c = 0; c < 4; c += CHUNK_STEP) {
                struct fixture_config config = {.strategy = ways[w].strategy,
                                                .device = ways[w].device,
                                                .workers = workers,
                                                .chunk = chunks[c],
                                                .sequences = 4,
                                                .share = 0.5,
                                                .all_logits = true,
                                                .link_delay_us = c == 2 ? 50 : 0};
                snprintf(what, sizeof what, "%s %s device %s workers %u chunk %u", name,
                         ft_strategy_name(config.strategy), ft_device_name(config.device), workers,
                         chunks[c]);
                check_alone(dir, &ref, &config, bits, what);
                check_batched(dir, &ref, &config, what);
            }
    free(bits);
    reference_close(&ref);
}

TEST(every_fixture_equals_its_reference_in_every_configuration)
{
    for (uint32_t i = 0; i < FIXTURE_COUNT; i++) {
        int before = test_failures_;
        check_fixture(fixtures[i]);
        printf("     %s %s\n", test_failures_ == before ? "ok" : "FAIL", fixtures[i]);
        fflush(stdout);
    }
}

TEST_MAIN(RUN(every_fixture_equals_its_reference_in_every_configuration))
