/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A prefill that pauses between layers on a GPU: launched slices beside captured decode steps, whole layers streamed
 * ahead of the router and ahead of the next slice. Built twice, as gpu_lane.c.
 */
#ifdef FT_FAKE_CUDA
#define A_TOKENS 24u /* emulated kernels take their time */
#endif

#include "jobs/lane_cuda_internal.h"
#include "tests/gpu_needed.h"
#include "tests/sliced_session.h"

#ifdef FT_FAKE_CUDA
#include "tests/fake_cuda.h"
#endif

static const char *const fixtures[] = {"qwen4_exp-nvfp4-modelopt", "qwen3_moe-dense-layers", "gpt_oss-mxfp4",
                                       "qwen3_moe-bf16"};
#ifdef FT_FAKE_CUDA
#define STRATEGIES_OF 1u /* the first fixtures get all strategies */
#else
#define STRATEGIES_OF 4u
#endif

static struct sliced_prompt prompt;
static struct sliced_run run, other;
static float *alone, *beside;
static double worst;

/* Between launches of other forms. On tensor cores as far as gpu_lane.c allows, which compares with the reference. */
#ifdef FT_FAKE_CUDA
#define TOLERANCE 1e-4
#else
#define TOLERANCE 2e-2
#endif

static void begin(void)
{
#ifdef FT_FAKE_CUDA
    struct fake_cuda_options options = {.device_count = 1,
                                        .driver_version = 13000,
                                        .major = 9,
                                        .memory_bytes = 2ull << 30,
                                        .pinned_bytes = 2ull << 30,
                                        .seed = 1};
    fake_cuda_init(&options);
#endif
}

static bool open_fixture(struct ft_engine *engine, const char *name, enum ft_strategy strategy,
                         enum ft_handshake handshake, uint32_t chunk)
{
    char dir[4096];
    struct ft_error err;
    struct fixture_config config = {.strategy = strategy,
                                    .device = FT_DEVICE_CUDA,
                                    .workers = 1,
                                    .chunk = chunk,
                                    .slots = strategy == FT_STRATEGY_FUSED ? 0 : 19,
                                    .sequences = 3,
                                    .share = 0.5,
                                    .all_logits = true,
                                    .deterministic = true,
                                    .handshake = handshake};
    begin();
    snprintf(dir, sizeof dir, "%s/fixtures/%s", FT_DATA_DIR, name);
    int status = fixture_open(engine, dir, &config, &err);
    CHECK_OK(status, &err);
    return status == FT_OK && sliced_prompt_read(&prompt, dir);
}

static bool same_text(const struct sliced_run *x, uint32_t i, const struct sliced_run *y, uint32_t j)
{
    return x->counts[i] == y->counts[j] && !memcmp(x->tokens[i], y->tokens[j], x->counts[i] * 4);
}

/* B alone with its logits, A alone, then A with B beside it; plain_too: all without logits before, so that B's decode
 * steps are captured graphs. Prompt rows are the GPU's whatever happens; where A's experts run depends on its own
 * slots, which B leaves alone. */
static void check(const char *name, enum ft_strategy strategy, enum ft_handshake handshake, uint32_t chunk,
                  bool plain_too)
{
    struct ft_engine engine;
    struct ft_error err;
    int before = test_failures_;
    for (uint32_t captures = !plain_too; captures < 2; captures++) {
        if (!open_fixture(&engine, name, strategy, handshake, chunk))
            return;
        size_t count = (size_t)prompt.count * prompt.vocab;
        alone = calloc(count, sizeof *alone);
        beside = calloc(count, sizeof *beside);
        struct ft_capture of_alone = {.row_count = prompt.count, .logits = alone},
                          of_beside = {.row_count = prompt.count, .logits = beside};
        memset(&other, 0, sizeof other);
        sliced_come(engine.session, &prompt, &other, 3, captures ? &of_alone : NULL);
        sliced_drain(engine.session, &other);
        CHECK_EQ(sliced_check(&other, engine.model->layer_count), 0);
        uint32_t b = other.b, b_tokens[3];
        CHECK_EQ(other.counts[b], 3);
        memcpy(b_tokens, other.tokens[b], sizeof b_tokens);
        ft_session_release(engine.session, b);
        CHECK_OK(ft_engine_close(&engine, &err), &err);
        REQUIRE(open_fixture(&engine, name, strategy, handshake, chunk));
        sliced_begin(engine.session, &prompt, &other);
        sliced_drain(engine.session, &other);
        CHECK_OK(ft_engine_close(&engine, &err), &err);
        REQUIRE(open_fixture(&engine, name, strategy, handshake, chunk));
        sliced_begin(engine.session, &prompt, &run);
        sliced_come(engine.session, &prompt, &run, 3, captures ? &of_beside : NULL);
        sliced_drain(engine.session, &run);
        CHECK(sliced_check(&run, engine.model->layer_count) >= 1);
        CHECK_EQ(run.counts[run.b], 3);
        /* the first token follows from the prompt alone; later ones share decode steps with A */
        CHECK_EQ(run.tokens[run.b][0], b_tokens[0]);
        if (strategy != FT_STRATEGY_HYBRID && strategy != FT_STRATEGY_AUTO) {
            CHECK(!memcmp(run.tokens[run.b], b_tokens, sizeof b_tokens));
            CHECK(same_text(&run, run.a, &other, other.a));
        }
        /* Which experts share a launch, and so its form, follows from the slots: the same bits only where these do not
         * change. */
        double error =
            captures ? fixture_error(beside, alone, (prompt.count - 2u) * (uint64_t)prompt.vocab) : 0;
        CHECK(error <= TOLERANCE);
        CHECK(error == 0 || (strategy != FT_STRATEGY_FUSED && strategy != FT_STRATEGY_CPU));
        worst = fmax(worst, error);
        free(alone);
        free(beside);
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
    if (test_failures_ != before)
        fprintf(stderr, "%s, strategy %s, handshake %d, chunk %u\n", name, ft_strategy_name(strategy),
                (int)handshake, chunk);
}

TEST(a_sliced_prefill_has_the_bits_of_a_whole_one)
{
    for (uint32_t f = 0; f < FT_COUNT_OF(fixtures); f++) {
        check(fixtures[f], FT_STRATEGY_OFFLOAD, FT_HANDSHAKE_AUTO, 128, f == 0);
        if (f >= STRATEGIES_OF)
            continue;
        check(fixtures[f], FT_STRATEGY_OFFLOAD, FT_HANDSHAKE_LAUNCH, 128, false);
        check(fixtures[f], FT_STRATEGY_OFFLOAD, FT_HANDSHAKE_AUTO, 16, false);
        check(fixtures[f], FT_STRATEGY_FUSED, FT_HANDSHAKE_AUTO, 128, false);
        check(fixtures[f], FT_STRATEGY_HYBRID, FT_HANDSHAKE_AUTO, 128, false);
        check(fixtures[f], FT_STRATEGY_CPU, FT_HANDSHAKE_AUTO, 128, false);
        check(fixtures[f], FT_STRATEGY_AUTO, FT_HANDSHAKE_AUTO, 128, false);
    }
    fprintf(stderr, "logits depart by %.1e at most\n", worst);
}

/* The link takes pieces of the next layer while the GPU computes a slice; decode steps in between change which
 * experts have slots, and what was left out for its slot is copied after all. */
TEST(a_layer_streamed_ahead_is_completed_when_slots_have_changed)
{
    struct ft_engine engine;
    struct ft_error err;
    uint32_t ahead = 0, changed = 0;
    REQUIRE(open_fixture(&engine, "qwen3_moe-bf16", FT_STRATEGY_OFFLOAD, FT_HANDSHAKE_AUTO, 128));
    uint32_t want = prompt.greedy[0];
    struct ft_lane_cuda *lane = engine.session->cuda;
    uint32_t experts = engine.model->expert_count;
    sliced_begin(engine.session, &prompt, &run);
    for (uint32_t round = 0; round < 6; round++) {
        sliced_come(engine.session, &prompt, &run, 1, NULL);
        run.counts[run.b] = 0;
        run.ended[run.b] = false;
        while (!run.ended[run.b] && run.step_count < SLICED_STEPS_MAX) {
            sliced_step(engine.session, &run);
            if (!engine.session->chunk.active)
                continue;
            uint32_t layer = engine.session->chunk.next_layer, buffer = layer % 2;
            if (lane->staged_layer[buffer] != layer)
                continue;
            const uint32_t *at = lane->staged_at + (size_t)buffer * experts;
            ahead += lane->staged_next[buffer] > 0;
            for (uint32_t e = 0; e < lane->staged_next[buffer]; e++)
                changed +=
                    at[e] == FT_NONE && ft_slots_find(&engine.session->step.slots, layer, e) == FT_NONE;
        }
        CHECK_EQ(run.tokens[run.b][0], want);
        ft_session_release(engine.session, run.b);
    }
    fprintf(stderr, "%u times part of a layer was there ahead, %u experts had lost their slots\n", ahead,
            changed);
#ifdef FT_FAKE_CUDA /* a real GPU is done with so small a layer before the link has looked for work */
    CHECK(ahead > 0 && changed > 0);
#endif
    sliced_drain(engine.session, &run);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
}

TEST(prompts_are_cancelled_between_slices_and_the_texts_of_the_others_stay)
{
    struct ft_engine engine;
    struct ft_error err;
    uint32_t c;
    REQUIRE(open_fixture(&engine, "qwen4_exp-nvfp4-modelopt", FT_STRATEGY_OFFLOAD, FT_HANDSHAKE_AUTO, 128));
    sliced_begin(engine.session, &prompt, &other);
    sliced_drain(engine.session, &other);
    ft_session_release(engine.session, other.a);
    sliced_begin(engine.session, &prompt, &run);
    sliced_come(engine.session, &prompt, &run, 2, NULL);
    REQUIRE(sliced_pause(engine.session, &run));
    ft_session_release(engine.session, run.b);
    CHECK(!engine.session->chunk.active);
    sliced_come(engine.session, &prompt, &run, 2, NULL);
    struct ft_request request = sliced_request(prompt.ids, prompt.count, 2);
    CHECK_OK(ft_session_submit(engine.session, &request, &c, &err), &err);
    REQUIRE(sliced_pause(engine.session, &run));
    ft_session_cancel(engine.session, run.b);
    sliced_drain(engine.session, &run);
    CHECK_EQ(run.finish[run.b], FT_FINISH_CANCELLED);
    CHECK_EQ(run.counts[c], 2);
    CHECK(!memcmp(run.tokens[c], prompt.greedy, 2 * 4));
    CHECK(same_text(&run, run.a, &other, other.a));
    CHECK_OK(ft_engine_close(&engine, &err), &err);
}

TEST_MAIN(need_gpu(); RUN(a_sliced_prefill_has_the_bits_of_a_whole_one)
              RUN(a_layer_streamed_ahead_is_completed_when_slots_have_changed)
                  RUN(prompts_are_cancelled_between_slices_and_the_texts_of_the_others_stay))
