/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes and models of random weights: sizes, bits, and what the engine makes of them. */
#include "planner/routing.h"
#include "tools/open.h"
#include "tools/shapes.h"
#include "tools/synthetic.h"

#include "tests/test.h"

#include <sys/stat.h>
#include <unistd.h>

#define TINY_SHAPE FT_DATA_DIR "/fixtures/qwen4_exp-bf16/config.json"
#define STEPS 12u
#define PROMPT 40u

static const struct ft_shape_cuts whole = {0};
static const enum ft_format formats[] = {FT_FORMAT_NVFP4, FT_FORMAT_MXFP4, FT_FORMAT_FP8_BLOCK,
                                         FT_FORMAT_BF16, FT_FORMAT_DS_FP4};

/* ---- shapes ---- */

TEST(built_in_shapes_are_the_published_ones)
{
    static struct ft_model ours, theirs;
    struct ft_error err;
    char label[128], from[512];
    CHECK_EQ(ft_shapes_count(), 4);
    for (uint32_t i = 0; i < ft_shapes_count(); i++) {
        struct ft_weight_sizes a = {0}, b = {0};
        snprintf(from, sizeof from, FT_DATA_DIR "/cases/shapes.json#%s", ft_shapes_name(i));
        CHECK_OK(ft_shapes_read(ft_shapes_name(i), &whole, &ours, label, sizeof label, &err), &err);
        CHECK(!strcmp(label, ft_shapes_name(i)));
        CHECK_OK(ft_shapes_read(from, &whole, &theirs, label, sizeof label, &err), &err);
        CHECK_OK(ft_synthetic_sizes(&ours, FT_FORMAT_MXFP4, FT_DENSE_AS_STORED, &a, &err), &err);
        CHECK_OK(ft_synthetic_sizes(&theirs, FT_FORMAT_MXFP4, FT_DENSE_AS_STORED, &b, &err), &err);
        CHECK_EQ(a.dense_bytes, b.dense_bytes);
        CHECK_EQ(a.expert_total_bytes, b.expert_total_bytes);
        CHECK_EQ(ours.layer_count, theirs.layer_count);
        CHECK_EQ(ours.topk, theirs.topk);
        CHECK_EQ(ours.ple_count, theirs.ple_count);
        CHECK_NEAR(ours.rotary_theta, theirs.rotary_theta, 0);
        CHECK_NEAR(ours.rms_eps, theirs.rms_eps, 0);
    }
}

TEST(a_shape_has_the_format_of_its_checkpoint)
{
    static const struct {
        const char *shape;
        enum ft_format format;
    } cases[] = {{"gpt-oss-120b", FT_FORMAT_MXFP4},
                 {"qwen3.8-flash-next", FT_FORMAT_NVFP4},
                 {"qwen3-30b-a3b", FT_FORMAT_BF16},
                 {FT_DATA_DIR "/cases/shapes.json#gpt-oss-120b", FT_FORMAT_MXFP4},
                 {FT_DATA_DIR "/fixtures/qwen3_moe-fp8_block/config.json", FT_FORMAT_FP8_BLOCK},
                 {FT_DATA_DIR "/fixtures/qwen4_exp-nvfp4-modelopt/config.json", FT_FORMAT_NVFP4},
                 {TINY_SHAPE, FT_FORMAT_BF16}};
    static struct ft_model model;
    struct ft_weight_sizes sizes;
    struct ft_error err;
    enum ft_format format;
    char label[128];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_OK(ft_shapes_find_format(cases[i].shape, 0, &format, &err), &err);
        CHECK_EQ(format, cases[i].format);
        CHECK_OK(ft_shapes_find_format(cases[i].shape, 5, &format, &err), &err);
        CHECK_EQ(format, FT_FORMAT_DS_FP4);
    }
    CHECK_FAILS(ft_shapes_find_format("./none.json", 0, &format, &err), FT_IO, "none.json", &err);
    /* 128 experts of 36 layers: 1.59375 H I bytes and f32 biases, as published */
    CHECK_OK(ft_shapes_read("gpt-oss-120b", &whole, &model, label, sizeof label, &err), &err);
    CHECK_OK(ft_synthetic_sizes(&model, FT_FORMAT_MXFP4, FT_DENSE_AS_STORED, &sizes, &err), &err);
    CHECK_NEAR((double)sizes.expert_total_bytes, 36 * 128.0 * (1.59375 * 2880 * 2880 + 3 * 2880 * 4),
               36 * 128 * 512.0);
}

TEST(the_main_model_weighs_what_its_checkpoint_weighs)
{
    static struct ft_model model;
    struct ft_weight_sizes sizes;
    struct ft_error err;
    char label[64];
    CHECK_OK(ft_shapes_read("qwen3.8-flash-next", &whole, &model, label, sizeof label, &err), &err);
    CHECK_OK(ft_synthetic_sizes(&model, FT_FORMAT_NVFP4, FT_DENSE_AS_STORED, &sizes, &err), &err);
    CHECK_EQ(sizes.moe_layer_count, 48);
    CHECK_EQ(sizes.expert_bytes_max, 2764864); /* 2,764,812 rounded up to 64 */
    CHECK_EQ(sizes.expert_total_bytes, 24576ull * 2764864);
    CHECK_EQ(sizes.head_bytes, 248320ull * 2560 * 2);
    CHECK_NEAR((double)(sizes.dense_bytes + sizes.head_bytes), 8.5e9, 0.15e9); /* what a step reads */
}

TEST(fp8_halves_what_a_step_reads)
{
    static struct ft_model model;
    struct ft_weight_sizes stored, fp8;
    struct ft_error err;
    char label[64];
    CHECK_OK(ft_shapes_read("qwen3.8-flash-next", &whole, &model, label, sizeof label, &err), &err);
    CHECK_OK(ft_synthetic_sizes(&model, FT_FORMAT_NVFP4, FT_DENSE_AS_STORED, &stored, &err), &err);
    CHECK_OK(ft_synthetic_sizes(&model, FT_FORMAT_NVFP4, FT_DENSE_TO_FP8, &fp8, &err), &err);
    CHECK_EQ(fp8.dense, FT_DENSE_TO_FP8);
    CHECK_EQ(fp8.head_bytes, 248320ull * 2560 + 1940 * 20 * 4);
    CHECK_EQ(fp8.embed_bytes, stored.embed_bytes);
    CHECK_EQ(fp8.expert_total_bytes, stored.expert_total_bytes);
    CHECK_NEAR((double)fp8.dense_bytes / (double)stored.dense_bytes, 0.51, 0.02);
}

TEST(shapes_can_be_cut)
{
    static struct ft_model model;
    const struct ft_shape_cuts cuts = {.layers = 1, .experts = 64, .vocab = 1000};
    struct ft_error err;
    char label[128];
    CHECK_OK(ft_shapes_read("qwen3.8-flash-next", &cuts, &model, label, sizeof label, &err), &err);
    CHECK_EQ(model.layer_count, 1);
    CHECK_EQ(model.expert_count, 64);
    CHECK_EQ(model.vocab, 1000);
    CHECK_EQ(model.ple_count, 0); /* it stands at the second layer */
    CHECK(!strcmp(label, "qwen3.8-flash-next (1 layers, 64 experts, vocabulary 1000)"));
    CHECK_OK(
        ft_shapes_read(TINY_SHAPE, &(struct ft_shape_cuts){.layers = 3}, &model, label, sizeof label, &err),
        &err);
    CHECK_EQ(model.layer_count, 3);
    CHECK_EQ(model.ple_count, 1);
}

TEST(unknown_shapes_are_refused_by_name)
{
    static struct ft_model model;
    struct ft_error err;
    char label[64];
    CHECK_FAILS(ft_shapes_read("qwen4", &whole, &model, label, sizeof label, &err), FT_USAGE,
                "qwen3.8-flash-next, ", &err);
    CHECK_FAILS(ft_shapes_read(FT_DATA_DIR "/cases/shapes.json#x", &whole, &model, label, sizeof label, &err),
                FT_USAGE, "it has qwen3.8-flash-next", &err);
    CHECK_FAILS(ft_shapes_read("./none.json", &whole, &model, label, sizeof label, &err), FT_IO, "none.json",
                &err);
    CHECK_FAILS(ft_shapes_read(FT_DATA_DIR "/cases/shapes.json", &whole, &model, label, sizeof label, &err),
                FT_FORMAT, "model_type", &err);
    char fifo[] = "/tmp/ft-test-shape-XXXXXX";
    REQUIRE(mkdtemp(fifo) != NULL);
    CHECK_FAILS(ft_shapes_read(fifo, &whole, &model, label, sizeof label, &err), FT_IO, "is a directory",
                &err);
    CHECK_EQ(rmdir(fifo), 0);
    CHECK_EQ(mkfifo(fifo, 0600), 0); /* nobody writes: opened, it would wait for ever */
    CHECK_FAILS(ft_shapes_read(fifo, &whole, &model, label, sizeof label, &err), FT_IO, "is a pipe", &err);
    CHECK_EQ(unlink(fifo), 0);
    CHECK_FAILS(ft_shapes_read("/dev/zero", &whole, &model, label, sizeof label, &err), FT_IO, "is a device",
                &err);
}

/* ---- bits ---- */

static bool make(struct ft_model *model, enum ft_format format, uint32_t threads, struct ft_loaded *loaded)
{
    const struct ft_shape_cuts cuts = {.no_ple = true};
    const struct ft_synthetic_options options = {.format = format, .seed = 5, .threads = threads};
    struct ft_synthetic_stats stats;
    struct ft_error err;
    char label[512];
    int status = ft_shapes_read(TINY_SHAPE, &cuts, model, label, sizeof label, &err);
    if (status == FT_OK)
        status = ft_synthetic_make(model, &options, loaded, &stats, &err);
    if (status != FT_OK)
        fprintf(stderr, "%s\n", err.message);
    CHECK_EQ(status, FT_OK);
    return status == FT_OK;
}

static void check_matrix(const struct ft_matrix *w)
{
    struct ft_kernels kernels;
    static float row[4096];
    double sum = 0;
    struct ft_error err;
    CHECK_OK(ft_kernels_init(&kernels, "ref", &err), &err);
    for (uint32_t o = 0; o < w->out; o++) {
        kernels.row_decode(w, o, row);
        for (uint32_t i = 0; i < w->in; i++)
            sum += (double)row[i] * (double)row[i];
    }
    CHECK(sum / w->out > 0.2 && sum / w->out < 5); /* rows of norm about 1, and no NaN */
}

TEST(numbers_are_valid_and_scaled_in_every_format)
{
    static struct ft_model model;
    struct ft_loaded loaded;
    for (uint32_t f = 0; f < FT_COUNT_OF(formats); f++) {
        if (!make(&model, formats[f], 2, &loaded))
            return;
        for (uint32_t layer = 0; layer < model.layer_count; layer++)
            for (uint32_t e = 0; e < model.expert_count; e++) {
                const struct ft_layer_weights *w = &loaded.weights.layers[layer];
                struct ft_expert expert;
                ft_expert_view(&w->expert_layout, w->experts + (uint64_t)e * w->expert_layout.stride,
                               &expert);
                check_matrix(&expert.gate);
                check_matrix(&expert.up);
                check_matrix(&expert.down);
            }
        check_matrix(&loaded.weights.embed);
        check_matrix(&loaded.weights.layers[0].linear.qkv);
        check_matrix(&loaded.weights.layers[3].attention.o);
        CHECK_EQ((uintptr_t)loaded.weights.layers[1].experts % 4096, 0);
        ft_loaded_fini(&loaded);
    }
}

TEST(the_numbers_do_not_depend_on_the_threads)
{
    static struct ft_model model;
    struct ft_loaded one, three;
    if (!make(&model, FT_FORMAT_NVFP4, 1, &one) || !make(&model, FT_FORMAT_NVFP4, 3, &three))
        return;
    uint64_t bank = (uint64_t)one.weights.layers[0].expert_layout.stride * model.expert_count;
    for (uint32_t layer = 0; layer < model.layer_count; layer++)
        CHECK(!memcmp(one.weights.layers[layer].experts, three.weights.layers[layer].experts, bank));
    CHECK(!memcmp(one.weights.head.data, three.weights.head.data, one.sizes.head_bytes));
    ft_loaded_fini(&one);
    ft_loaded_fini(&three);
}

TEST(experts_are_all_different)
{
    static struct ft_model model;
    struct ft_loaded loaded;
    if (!make(&model, FT_FORMAT_NVFP4, 2, &loaded))
        return;
    const struct ft_layer_weights *a = &loaded.weights.layers[0], *b = &loaded.weights.layers[1];
    for (uint32_t e = 1; e < model.expert_count; e++)
        CHECK(memcmp(a->experts, a->experts + (uint64_t)e * a->expert_layout.stride, 256));
    CHECK(memcmp(a->experts, b->experts, 256));
    ft_loaded_fini(&loaded);
}

/* ---- in the engine ---- */

struct run {
    enum ft_strategy strategy;
    uint32_t slots, assumed, sequences;
    const struct ft_routing *routing;
    const struct ft_routing_warm *warm;
    int32_t *topk; /* capture of sequence 0, [layer, PROMPT + STEPS, k] */
    uint32_t tokens[4][STEPS];
    struct ft_session_stats stats;
};

static int run_all(struct ft_engine *engine, struct run *run, struct ft_error *err)
{
    static uint32_t prompts[4][PROMPT];
    struct ft_event events[16];
    uint32_t handle, count, done[4] = {0};
    const struct ft_capture capture = {.row_count = PROMPT + STEPS, .topk = run->topk};
    int status = FT_OK;
    for (uint32_t s = 0; status == FT_OK && s < run->sequences; s++) {
        for (uint32_t i = 0; i < PROMPT; i++)
            prompts[s][i] = (7 * i + 13 * s + 5) % engine->model->vocab;
        const struct ft_request request = {.prompt = prompts[s],
                                           .prompt_count = PROMPT,
                                           .max_tokens = STEPS,
                                           .sampling = {.top_p = 1, .repetition_penalty = 1},
                                           .capture = run->topk && !s ? &capture : NULL,
                                           .assumed_count = run->assumed};
        status = ft_session_submit(engine->session, &request, &handle, err);
    }
    while (status == FT_OK && !ft_session_is_idle(engine->session)) {
        status = ft_session_step(engine->session, events, 16, &count, err);
        for (uint32_t i = 0; status == FT_OK && i < count; i++) {
            if (events[i].kind == FT_EVENT_FAILED)
                status = ft_error_set(err, FT_NUMERIC, "%s", events[i].message);
            if (events[i].kind == FT_EVENT_TOKEN)
                run->tokens[events[i].sequence][done[events[i].sequence]++] = events[i].token;
        }
    }
    ft_session_stats(engine->session, &run->stats);
    return status;
}

static bool run_engine(const struct ft_model *model, const struct ft_loaded *loaded, struct run *run)
{
    struct ft_open_options options;
    struct ft_engine engine;
    struct ft_error err, ignored;
    const struct ft_engine_parts parts = {
        .model = model, .sizes = &loaded->sizes, .weights = &loaded->weights, .routing = run->routing};
    ft_open_options_init(&options);
    options.quiet = true;
    options.pin = false;
    options.strategy = run->strategy;
    options.plan.slot_count = run->slots;
    options.plan.sequences_max = 4;
    options.plan.kv_tokens = 4 * 128;
    options.plan.workers = 1;
    options.look_ahead = FT_PREFETCH_OFF; /* every slot is the cache's */
    int status = ft_engine_open_parts(&engine, &options, &parts, &err);
    uint32_t filled = 0;
    if (status == FT_OK && run->warm)
        status = ft_session_warm_slots(engine.session, run->warm->layer, run->warm->expert, run->warm->count,
                                       &filled, &err);
    if (status == FT_OK)
        CHECK_EQ(filled, run->warm ? run->warm->count : 0);
    if (status == FT_OK)
        status = run_all(&engine, run, &err);
    if (status != FT_OK)
        fprintf(stderr, "%s\n", err.message);
    CHECK_EQ(status, FT_OK);
    ft_engine_close(&engine, &ignored);
    return status == FT_OK;
}

TEST(every_strategy_and_format_gives_the_same_tokens)
{
    static struct ft_model model;
    static const enum ft_strategy strategies[] = {FT_STRATEGY_CPU, FT_STRATEGY_OFFLOAD, FT_STRATEGY_HYBRID,
                                                  FT_STRATEGY_FUSED};
    struct ft_loaded loaded;
    for (uint32_t f = 0; f < FT_COUNT_OF(formats); f++) {
        static struct run runs[4];
        if (!make(&model, formats[f], 2, &loaded))
            return;
        for (uint32_t s = 0; s < 4; s++) {
            runs[s] =
                (struct run){.strategy = strategies[s], .slots = s == 1 || s == 2 ? 20 : 0, .sequences = 2};
            if (run_engine(&model, &loaded, &runs[s]))
                CHECK(!memcmp(runs[s].tokens, runs[0].tokens, sizeof runs[0].tokens));
        }
        CHECK(runs[0].stats.decode_rows > 0);
        CHECK(memcmp(runs[0].tokens[0], runs[0].tokens[1], sizeof runs[0].tokens[0]));
        ft_loaded_fini(&loaded);
    }
}

TEST(given_routing_is_obeyed_in_decode_steps_and_lru_predicts_its_misses)
{
    static struct ft_model model;
    static int32_t topk[4 * (PROMPT + STEPS) * 4];
    struct ft_loaded loaded;
    struct ft_error err;
    if (!make(&model, FT_FORMAT_NVFP4, 2, &loaded))
        return;
    const struct ft_routing_options options = {STEPS,      model.layer_count,  2,
                                               model.topk, model.expert_count, 3};
    uint32_t layer[24], expert[24];
    struct ft_routing_warm warm = {.layer = layer, .expert = expert};
    struct ft_routing routing;
    CHECK_OK(ft_routing_generate(&options, &routing, &err), &err);
    CHECK_OK(ft_routing_list_warm(&options, 24, &warm, &err), &err);
    struct run run = {.strategy = FT_STRATEGY_OFFLOAD,
                      .slots = 24,
                      .sequences = 2,
                      .assumed = PROMPT - 1,
                      .routing = &routing,
                      .warm = &warm,
                      .topk = topk};
    if (run_engine(&model, &loaded, &run)) {
        struct ft_routing_count count;
        CHECK_EQ(run.stats.prefill_steps, 0);
        CHECK_EQ(run.stats.steps, STEPS);
        CHECK_OK(ft_routing_lru(&routing, model.expert_count, 24, &warm, 0, STEPS, &count, &err), &err);
        CHECK_EQ(run.stats.hits + run.stats.misses, count.active);
        CHECK_EQ(run.stats.misses, count.misses);
        for (uint32_t l = 0; l < model.layer_count; l++)
            for (uint32_t step = 0; step < STEPS; step++) {
                const uint16_t *want = ft_routing_row(&routing, step, l, 0);
                const int32_t *got = topk + ((uint64_t)l * (PROMPT + STEPS) + PROMPT - 1 + step) * model.topk;
                for (uint32_t j = 0; j < model.topk; j++) {
                    bool found = false;
                    for (uint32_t i = 0; i < model.topk; i++)
                        found |= got[i] == (int32_t)want[j];
                    CHECK(found);
                }
            }
    }
    ft_routing_free(&routing);
    ft_loaded_fini(&loaded);
}

TEST(given_routing_gives_the_same_tokens_with_every_strategy)
{
    static struct ft_model model;
    struct ft_loaded loaded;
    struct ft_error err;
    if (!make(&model, FT_FORMAT_NVFP4, 2, &loaded))
        return;
    const struct ft_routing_options options = {STEPS,      model.layer_count,  3,
                                               model.topk, model.expert_count, 3};
    struct ft_routing routing;
    CHECK_OK(ft_routing_generate(&options, &routing, &err), &err);
    static const enum ft_strategy strategies[] = {FT_STRATEGY_CPU, FT_STRATEGY_OFFLOAD, FT_STRATEGY_HYBRID};
    static struct run runs[3], free_run;
    for (uint32_t s = 0; s < 3; s++) {
        runs[s] = (struct run){.strategy = strategies[s],
                               .slots = s ? 30 : 0,
                               .sequences = 3,
                               .assumed = PROMPT - 1,
                               .routing = &routing};
        if (run_engine(&model, &loaded, &runs[s]))
            CHECK(!memcmp(runs[s].tokens, runs[0].tokens, sizeof runs[0].tokens));
    }
    free_run = (struct run){.strategy = FT_STRATEGY_CPU, .sequences = 3, .assumed = PROMPT - 1};
    if (run_engine(&model, &loaded, &free_run))
        CHECK(memcmp(free_run.tokens, runs[0].tokens, sizeof runs[0].tokens)); /* it does change something */
    ft_routing_free(&routing);
    ft_loaded_fini(&loaded);
}

TEST(wrong_routing_and_requests_are_refused)
{
    static struct ft_model model;
    struct ft_loaded loaded;
    struct ft_open_options options;
    struct ft_engine engine;
    struct ft_error err;
    if (!make(&model, FT_FORMAT_NVFP4, 2, &loaded))
        return;
    uint16_t ids[4 * 4] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 2};
    struct ft_routing routing = {1, 3, 1, 4, ids, 0};
    const struct ft_engine_parts parts = {
        .model = &model, .sizes = &loaded.sizes, .weights = &loaded.weights, .routing = &routing};
    ft_open_options_init(&options);
    options.quiet = true;
    CHECK_FAILS(ft_engine_open_parts(&engine, &options, &parts, &err), FT_USAGE, "3 layers", &err);
    routing.layer_count = 4;
    CHECK_FAILS(ft_engine_open_parts(&engine, &options, &parts, &err), FT_USAGE, "expert 2 twice", &err);
    ids[15] = 16;
    CHECK_FAILS(ft_engine_open_parts(&engine, &options, &parts, &err), FT_USAGE, "expert 16 too", &err);
    ids[15] = 3;
    CHECK_OK(ft_engine_open_parts(&engine, &options, &parts, &err), &err);
    const uint32_t prompt[] = {1, 2}, layer = 0, expert = 16;
    uint32_t handle, filled;
    struct ft_request request = {.prompt = prompt, .prompt_count = 2, .max_tokens = 1, .assumed_count = 2};
    CHECK_FAILS(ft_session_submit(engine.session, &request, &handle, &err), FT_USAGE, "taken as computed",
                &err);
    CHECK_FAILS(ft_session_warm_slots(engine.session, &layer, &expert, 1, &filled, &err), FT_USAGE,
                "no expert 16", &err);
    ft_engine_close(&engine, &err);
    ft_loaded_fini(&loaded);
}

TEST_MAIN(RUN(built_in_shapes_are_the_published_ones) RUN(a_shape_has_the_format_of_its_checkpoint)
              RUN(the_main_model_weighs_what_its_checkpoint_weighs) RUN(fp8_halves_what_a_step_reads)
                  RUN(shapes_can_be_cut) RUN(unknown_shapes_are_refused_by_name)
                      RUN(numbers_are_valid_and_scaled_in_every_format)
                          RUN(the_numbers_do_not_depend_on_the_threads) RUN(experts_are_all_different)
                              RUN(every_strategy_and_format_gives_the_same_tokens)
                                  RUN(given_routing_is_obeyed_in_decode_steps_and_lru_predicts_its_misses)
                                      RUN(given_routing_gives_the_same_tokens_with_every_strategy)
                                          RUN(wrong_routing_and_requests_are_refused))
