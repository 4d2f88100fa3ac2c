/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What quantised dense matrices do to a model: the logits of every fixture beside those of the same weights
 * as stored, and the demo model's greedy texts. FT_FP8_USES_ACCEPTED must say what is measured here.
 */
#include "tests/fixture.h"
#include "tests/fixture_session.h"

#define BOUND 2e-2 /* of the largest |logit| */

static const char *const fixtures[] = {"qwen3_moe-bf16",
                                       "qwen3_moe-bf16-sharded-tied",
                                       "qwen3_moe-nvfp4-compressed_tensors",
                                       "qwen3_moe-fp8_block",
                                       "qwen4_exp-bf16",
                                       "qwen4_exp-nvfp4-modelopt",
                                       "qwen3_5_moe-bf16",
                                       "gpt_oss-mxfp4",
                                       "qwen3_5_moe-fused-bf16",
                                       "qwen3_5_moe-fused-fp8_block",
                                       "qwen3_moe-dense-layers",
                                       "qwen3_moe-mixed-formats",
                                       "qwen3_moe-fp8_block-edges",
                                       "gpt_oss-mxfp4-variant",
                                       "qwen4_exp-eos-list"};
static const char *const use_names[] = {"mix", "linear", "attention", "mlp", "ple", "head"};
#define FIXTURE_COUNT (sizeof fixtures / sizeof *fixtures)
#define USE_COUNT (sizeof use_names / sizeof *use_names)
#define ALL_LOGITS                                                                                           \
    {                                                                                                        \
        .strategy = FT_STRATEGY_CPU, .device = FT_DEVICE_NONE, .workers = 1, .sequences = 1                  \
    }

/* Logits of every token, [tokens, vocab], malloc'ed; NULL after a failed check. */
static float *run_logits(const char *dir, uint32_t fp8_uses, const uint32_t *prompt, uint32_t tokens,
                         uint64_t *count)
{
    struct ft_error err;
    struct ft_engine engine;
    struct fixture_config config = ALL_LOGITS;
    config.all_logits = true;
    config.fp8_uses = fp8_uses;
    int status = fixture_open(&engine, dir, &config, &err);
    CHECK_OK(status, &err);
    if (status != FT_OK)
        return NULL;
    CHECK_EQ(engine.plan.dense, fp8_uses ? FT_DENSE_TO_FP8 : FT_DENSE_AS_STORED);
    *count = (uint64_t)tokens * engine.model->vocab;
    float *logits = calloc(*count, sizeof *logits);
    struct ft_capture capture = {.row_count = tokens, .logits = logits};
    struct ft_request request = {.prompt = prompt,
                                 .prompt_count = tokens,
                                 .max_tokens = 1,
                                 .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1},
                                 .capture = &capture};
    uint32_t sequence;
    CHECK_OK(ft_session_submit(engine.session, &request, &sequence, &err), &err);
    CHECK_EQ(fixture_drain(engine.session, NULL, NULL), 0);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    return logits;
}

static void measure_fixture(const char *name, double *worst)
{
    struct ft_error err;
    struct ft_arrays arrays;
    char dir[4096], path[4200];
    snprintf(dir, sizeof dir, "%s/fixtures/%s", FT_DATA_DIR, name);
    snprintf(path, sizeof path, "%s/reference.safetensors", dir);
    CHECK_OK(ft_safetensors_read(&arrays, path, 1u << 30, &err), &err);
    const struct ft_array *ids = ft_arrays_find(&arrays, "input_ids");
    REQUIRE(ids != NULL);
    uint32_t tokens = (uint32_t)ids->shape[0];
    uint64_t count = 0;
    float *stored = run_logits(dir, 0, ids->data, tokens, &count);
    REQUIRE(stored != NULL);
    printf("     %-36s", name);
    for (uint32_t use = 0; use < USE_COUNT; use++) {
        float *fp8 = run_logits(dir, 1u << use, ids->data, tokens, &count);
        REQUIRE(fp8 != NULL);
        double error = fixture_error(fp8, stored, count);
        CHECK(error < 10); /* coarse, but numbers */
        worst[use] = fmax(worst[use], error);
        printf("  %s %.3f", use_names[use], error);
        free(fp8);
    }
    printf("\n");
    free(stored);
    ft_arrays_fini(&arrays);
}

TEST(a_use_is_accepted_exactly_if_no_fixture_leaves_the_bound)
{
    double worst[USE_COUNT] = {0};
    for (uint32_t i = 0; i < FIXTURE_COUNT; i++)
        measure_fixture(fixtures[i], worst);
    for (uint32_t use = 0; use < USE_COUNT; use++) {
        bool accepted = (FT_FP8_USES_ACCEPTED >> use & 1) != 0;
        if (accepted != (worst[use] <= BOUND))
            fprintf(stderr, "%s: worst error %.3e, bound %.1e, accepted: %d\n", use_names[use], worst[use],
                    BOUND, accepted);
        CHECK_EQ(accepted, worst[use] <= BOUND);
        CHECK(worst[use] > 0); /* it was quantised somewhere */
    }
}

static bool has_clear_margin(uint32_t index)
{
    json_error_t error;
    json_t *root = json_load_file(TINY_DIR "/reference.json", 0, &error);
    json_t *prompt = json_array_get(json_object_get(root, "prompts"), index);
    bool clear = json_is_true(json_object_get(prompt, "clear_margin"));
    json_decref(root);
    return clear;
}

TEST(texts_with_a_clear_margin_stay_equal_with_everything_quantised)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    struct fixture_config config = ALL_LOGITS;
    config.fp8_uses = FT_FP8_USES;
    uint32_t checked = 0;
    REQUIRE(prompts_read(&p));
    CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
    CHECK_EQ(engine.loaded.weights.head.format, FT_FORMAT_FP8_BLOCK);
    CHECK_EQ(engine.loaded.weights.embed.format, FT_FORMAT_BF16);
    CHECK_EQ(engine.loaded.weights.layers[0].router.format, FT_FORMAT_BF16);
    CHECK_EQ(engine.loaded.weights.layers[0].shared.up.format, FT_FORMAT_FP8_BLOCK);
    for (uint32_t i = 0; i < p.count; i++) {
        uint32_t tokens[FT_SEQUENCES_MAX][256] = {{0}}, counts[FT_SEQUENCES_MAX] = {0}, sequence;
        if (!has_clear_margin(i))
            continue;
        struct ft_request request = prompts_request(&p, i);
        CHECK_OK(ft_session_submit(engine.session, &request, &sequence, &err), &err);
        CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
        CHECK_EQ(counts[sequence], p.want_count[i]);
        CHECK(memcmp(tokens[sequence], p.want[i], p.want_count[i] * 4) == 0);
        ft_session_release(engine.session, sequence);
        checked++;
    }
    CHECK(checked >= 5);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    prompts_free(&p);
}

TEST(what_is_not_accepted_is_planned_but_not_run)
{
    struct ft_error err;
    struct ft_engine engine;
    struct ft_open_options options;
    ft_open_options_init(&options);
    options.model = TINY_DIR;
    options.quiet = true;
    options.dense = FT_DENSE_TO_FP8;
    CHECK_OK(ft_engine_plan(&engine, &options, &err), &err);
    CHECK_EQ(engine.plan.dense, FT_DENSE_TO_FP8);
    CHECK(engine.sizes.dense_bytes < engine.dense_sizes[FT_DENSE_AS_STORED].dense_bytes * 3 / 4);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    if (FT_FP8_USES & ~FT_FP8_USES_ACCEPTED) {
        CHECK_FAILS(ft_engine_open(&engine, &options, &err), FT_UNSUPPORTED, "--dense fp8", &err);
        options.dense = FT_DENSE_AUTO;
        options.plan.ram_bytes = 1; /* nothing fits: auto still does not take what is not accepted */
        CHECK_OK(ft_engine_plan(&engine, &options, &err), &err);
        CHECK_EQ(engine.plan.dense, FT_DENSE_AS_STORED);
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
}

TEST_MAIN(RUN(a_use_is_accepted_exactly_if_no_fixture_leaves_the_bound)
              RUN(texts_with_a_clear_margin_stay_equal_with_everything_quantised)
                  RUN(what_is_not_accepted_is_planned_but_not_run))
