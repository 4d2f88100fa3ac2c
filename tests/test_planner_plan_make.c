/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/plan_json.h"
#include "planner/plan_make.h"
#include "tests/test.h"

#include "graph/bytes.h"
#include "graph/workspace.h"

#include <jansson.h>

#define GIB (UINT64_C(1) << 30)

static struct ft_model model;
static struct ft_weight_sizes sizes;
static struct ft_machine machine;
static struct ft_plan_options options;
static struct ft_plan plan;
static struct ft_error err;

static void layers_every_fourth_sparse(void)
{
    for (uint32_t i = 0; i < model.layer_count; i++)
        model.layers[i] = (struct ft_layer_spec){
            .attention = (uint8_t)(i % 4 == 3 ? FT_ATTENTION_SPARSE : FT_ATTENTION_LINEAR),
            .ple = FT_PLE_NONE};
    model.layers[1].ple = 0;
}

/* Published shape and sizes of the main model (tests/data/cases/shapes.json). */
static void use_flash_next(void)
{
    model = (struct ft_model){.hidden = 2560,
                              .vocab = 248320,
                              .layer_count = 48,
                              .position_max = 262144,
                              .head_count = 24,
                              .kv_head_count = 2,
                              .head_dim = 256,
                              .attention_gate = true,
                              .rotary_dim = 64,
                              .indexer_head_count = 4,
                              .indexer_dim = 128,
                              .indexer_budget = 2048,
                              .indexer_ratio = 4,
                              .key_head_count = 16,
                              .value_head_count = 48,
                              .key_dim = 128,
                              .value_dim = 128,
                              .conv_taps = 4,
                              .expert_count = 512,
                              .topk = 10,
                              .expert_width = 640,
                              .shared_width = 640,
                              .hc_count = 4,
                              .hc_lowrank = 320,
                              .ple_count = 1,
                              .ple_embed_dim = 2560,
                              .ple_taps = 4,
                              .ngram_size = 3};
    layers_every_fourth_sparse();
    model.ple[0] = (struct ft_ple_spec){.layer = 1, .head_count = 16, .row_width = 160};
    sizes = (struct ft_weight_sizes){.dense_bytes = UINT64_C(5960000000),
                                     .embed_bytes = 248320ull * 2560 * 2,
                                     .head_bytes = 248320ull * 2560 * 2,
                                     .expert_bytes_max = 2764864,
                                     .expert_total_bytes = 24576ull * 2764864,
                                     .ple_bytes = UINT64_C(51217735680),
                                     .moe_layer_count = 48,
                                     .expert_format = FT_FORMAT_NVFP4};
}

/* The size of the small test model: everything fits everywhere. */
static void use_tiny(void)
{
    model = (struct ft_model){.hidden = 256,
                              .vocab = 4096,
                              .layer_count = 8,
                              .position_max = 2048,
                              .head_count = 4,
                              .kv_head_count = 2,
                              .head_dim = 64,
                              .attention_gate = true,
                              .rotary_dim = 16,
                              .indexer_head_count = 2,
                              .indexer_dim = 32,
                              .indexer_budget = 512,
                              .indexer_ratio = 4,
                              .key_head_count = 2,
                              .value_head_count = 4,
                              .key_dim = 32,
                              .value_dim = 32,
                              .conv_taps = 4,
                              .expert_count = 32,
                              .topk = 4,
                              .expert_width = 64,
                              .shared_width = 64,
                              .hc_count = 2,
                              .hc_lowrank = 32,
                              .ple_count = 1,
                              .ple_embed_dim = 64,
                              .ple_taps = 4,
                              .ngram_size = 3};
    layers_every_fourth_sparse();
    model.ple[0] = (struct ft_ple_spec){.layer = 1, .head_count = 4, .row_width = 16};
    sizes = (struct ft_weight_sizes){.dense_bytes = 6 << 20,
                                     .embed_bytes = 4096 * 256 * 2,
                                     .head_bytes = 4096 * 256 * 2,
                                     .expert_bytes_max = 27712,
                                     .expert_total_bytes = 8 * 32 * 27712,
                                     .ple_bytes = 1 << 20,
                                     .moe_layer_count = 8,
                                     .expert_format = FT_FORMAT_NVFP4};
}

static void use_machine(uint32_t cores, double ram_gib, double gpu_gib)
{
    machine = (struct ft_machine){.cores_usable = cores,
                                  .cores_visible = cores,
                                  .ram_bytes = (uint64_t)(ram_gib * (double)GIB),
                                  .device = gpu_gib > 0 ? FT_DEVICE_CUDA : FT_DEVICE_NONE,
                                  .device_memory_bytes = (uint64_t)(gpu_gib * (double)GIB)};
    options = (struct ft_plan_options){.slot_rate = -1, .fetch_share = -1};
}

static int make(void)
{
    return ft_plan_make(&model, &sizes, &machine, &options, &plan, &err);
}

static const struct ft_plan_term *term(enum ft_plan_pool pool)
{
    static const struct ft_plan_term none;
    for (uint32_t i = 0; i < plan.term_count; i++)
        if (plan.terms[i].pool == pool)
            return &plan.terms[i];
    return &none;
}

/* Decode rows have activations of their own, so that a prefill may pause. */
static uint64_t decode_elements(void)
{
    struct ft_workspace workspace;
    uint32_t rows = ft_plan_decode_rows(&plan);
    ft_workspace_init(&workspace, &model, rows, rows, FT_MIN(rows, plan.logit_rows_max));
    return rows ? workspace.count : 0;
}

TEST(a_cpu_only_machine_runs_everything_on_its_cores)
{
    use_tiny();
    use_machine(2, 4, 0);
    CHECK_OK(make(), &err);
    CHECK(plan.fits);
    CHECK_EQ(plan.strategy, FT_STRATEGY_CPU);
    CHECK_EQ(plan.device, FT_DEVICE_NONE);
    CHECK(strstr(plan.strategy_reason, "no device") != NULL);
    CHECK_EQ(plan.workers, 2);
    CHECK_EQ(plan.tiling.tiles_max, 4);
    CHECK_EQ(plan.slot_count + plan.staging_experts, 0);
    CHECK_EQ(plan.tiling.lane_of_op[FT_OP_ATTN], FT_LANE_CPU);
    CHECK_EQ(plan.tiling.lane_of_op[FT_OP_PLE_READ], FT_LANE_IO);
    CHECK_EQ(plan.reason_of_op[FT_OP_PLE_READ], FT_REASON_FIXED_LANE);
    CHECK_EQ(plan.tiling.lane_of_op[FT_OP_JOIN], FT_LANE_INLINE);
    CHECK_EQ(plan.used_bytes[FT_TIER_DEVICE], 0);
    CHECK_EQ(term(FT_POOL_PLE)->tier, FT_TIER_DISK);
    CHECK_EQ(plan.sequences_max, 8);
    CHECK_EQ(plan.chunk_rows, 128);
    CHECK_EQ(plan.logit_rows_max, 8);
    CHECK_EQ(plan.page_count, 2048 / plan.page_tokens + 7);
    struct ft_workspace workspace;
    ft_workspace_init(&workspace, &model, ft_plan_rows_max(&plan), plan.sequences_max, plan.logit_rows_max);
    CHECK_EQ(term(FT_POOL_WORKSPACE)->bytes, (workspace.count + decode_elements()) * 4);
    struct ft_state_layout state;
    ft_state_layout_init(&state, &model);
    CHECK_EQ(term(FT_POOL_STATE)->bytes, 8 * 4 * state.count);
    CHECK_EQ(plan.snapshot_bytes, 8 * 4 * state.count);
}

TEST(strategies_that_need_a_device_get_the_host_device)
{
    use_tiny();
    use_machine(4, 4, 0);
    options.strategy = FT_STRATEGY_OFFLOAD;
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.device, FT_DEVICE_HOST);
    CHECK_EQ(plan.workers, 3); /* it counts as a core */
    CHECK(plan.fetch_share == 1);
    CHECK_EQ(plan.tiling.lane_of_op[FT_OP_ATTN], FT_LANE_DEVICE);
    CHECK_EQ(plan.tiling.lane_of_op[FT_OP_FETCH], FT_LANE_LINK);
    CHECK_EQ(plan.tiling.lane_of_op[FT_OP_EXPERT_UP], FT_LANE_CPU);
#ifdef FT_TINY
    CHECK_EQ(plan.slot_count, 1);
#else
    CHECK_EQ(plan.slot_count, 64); /* a quarter of 8 x 32 */
#endif
    CHECK_EQ(plan.staging_experts, 32);
    CHECK_EQ(term(FT_POOL_SLOTS)->tier, FT_TIER_DEVICE);
    CHECK(plan.used_bytes[FT_TIER_RAM] > plan.used_bytes[FT_TIER_DEVICE]); /* counted against both */
    CHECK(plan.used_bytes[FT_TIER_RAM] >= sizes.expert_total_bytes + plan.used_bytes[FT_TIER_DEVICE]);
    options.slot_count = 7;
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.slot_count, 7);
    options.slot_count = 100000;
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.slot_count, 256);
    options.slot_count = 0;
    options.slot_rate = 0.152;
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.slot_count, 39);
    CHECK(strstr(term(FT_POOL_SLOTS)->reason, "--moe-cache-rate") != NULL);
    options.strategy = FT_STRATEGY_HYBRID;
    CHECK_OK(make(), &err);
    CHECK(plan.fetch_share == 0.5);
    options.fetch_share = 0;
    CHECK_OK(make(), &err);
    CHECK(plan.fetch_share == 0);
}

TEST(fused_has_a_slot_for_every_expert)
{
    use_tiny();
    use_machine(2, 4, 0);
    options.strategy = FT_STRATEGY_FUSED;
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.slot_count, 256);
    CHECK_EQ(plan.workers, 2); /* two cores: the driver floats */
    options.device_bytes = 12 << 20;
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    CHECK(strstr(plan.advice, "device memory") != NULL);
    CHECK(strstr(plan.advice, "--strategy cpu") != NULL);
}

TEST(host_device_with_cpu_strategy_keeps_experts_on_the_cores)
{
    use_tiny();
    use_machine(1, 4, 0);
    options = (struct ft_plan_options){.strategy = FT_STRATEGY_CPU,
                                       .device = FT_DEVICE_HOST,
                                       .device_given = true,
                                       .slot_rate = -1,
                                       .fetch_share = -1};
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.device, FT_DEVICE_HOST);
    CHECK_EQ(plan.slot_count, 0);
    CHECK_EQ(plan.staging_experts, 0);
    CHECK_EQ(plan.workers, 1);
    CHECK_EQ(plan.tiling.tiles_max, 1);
    options.slot_count = 5;
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.slot_count, 5);
    CHECK(plan.staging_experts >= 1);
}

TEST(contradicting_wishes_are_refused_by_name)
{
    use_tiny();
    use_machine(4, 4, 0);
    options.workers = 5;
    CHECK_FAILS(make(), FT_USAGE, "4 cores are usable", &err);
    use_machine(4, 4, 0);
    options.device_given = true;
    options.device = FT_DEVICE_CUDA;
    CHECK_FAILS(make(), FT_UNSUPPORTED, "no usable GPU", &err);
    options.device = FT_DEVICE_NONE;
    options.strategy = FT_STRATEGY_HYBRID;
    CHECK_FAILS(make(), FT_USAGE, "needs a device", &err);
    use_machine(4, 4, 0);
    options.slot_rate = 1.5;
    CHECK_FAILS(make(), FT_USAGE, "--moe-cache-rate 1.5", &err);
    use_machine(4, 4, 0);
    options.fetch_share = NAN;
    CHECK_FAILS(make(), FT_USAGE, "share of misses", &err);
    use_machine(4, 4, 0);
    options.sequences_max = 100000;
    CHECK_FAILS(make(), FT_USAGE, "100000 sequences", &err);
}

TEST(workers_follow_the_usable_cores)
{
    static const uint32_t cases[][3] = {
        /* usable, without device, with */ {0, 1, 1}, {1, 1, 1}, {2, 2, 2}, {3, 3, 2}, {16, 16, 15}};
    use_tiny();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        use_machine(cases[i][0], 4, 0);
        CHECK_OK(make(), &err);
        CHECK_EQ(plan.workers, cases[i][1]);
        options.strategy = FT_STRATEGY_OFFLOAD;
        CHECK_OK(make(), &err);
        CHECK_EQ(plan.workers, cases[i][2]);
    }
}

TEST(cards_get_as_many_slots_as_they_hold)
{
    use_flash_next();
    static const double cards[] = {12, 24, 40};
    uint32_t before = 0;
    for (int i = 0; i < 3; i++) {
        use_machine(16, 128, cards[i]);
        CHECK_OK(make(), &err);
        CHECK(plan.fits);
        CHECK_EQ(plan.device, FT_DEVICE_CUDA);
        CHECK_EQ(plan.strategy, FT_STRATEGY_AUTO);
        CHECK(strstr(plan.strategy_reason, "were not measured") != NULL);
        CHECK_EQ(plan.workers, 14);
#ifndef FT_TINY
        CHECK(plan.slot_count > before);
        before = plan.slot_count;
        uint64_t left = plan.limit_bytes[FT_TIER_DEVICE] - plan.used_bytes[FT_TIER_DEVICE];
        CHECK(left < sizes.expert_bytes_max); /* not one more would fit */
        CHECK_EQ(term(FT_POOL_SLOTS)->bytes, (uint64_t)plan.slot_count * 2764864);
#endif
        CHECK(plan.staging_experts >= 1 && plan.staging_experts * 2764864ull <= 64ull << 20);
        CHECK(term(FT_POOL_WORKSPACE)->bytes <= plan.limit_bytes[FT_TIER_DEVICE] / 12);
        CHECK_EQ(term(FT_POOL_EMBED)->tier, FT_TIER_RAM);
        CHECK_EQ(term(FT_POOL_HEAD)->tier, FT_TIER_DEVICE);
    }
    (void)before;
    /* the profile knows both rates at once: the published share */
    machine.cpu_overlap_bytes_per_s = 21.89e9;
    machine.link_overlap_bytes_per_s = 8.41e9;
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.strategy, FT_STRATEGY_AUTO);
    CHECK(strstr(plan.strategy_reason, "measured at 8.4 + 21.9 GB/s") != NULL);
    options.strategy = FT_STRATEGY_HYBRID;
    CHECK_OK(make(), &err);
    CHECK_NEAR(plan.fetch_share, 8.41 / (8.41 + 21.89), 1e-9);
    use_machine(16, 200, 96);
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.strategy, FT_STRATEGY_FUSED);
    CHECK_EQ(plan.slot_count, 24576);
}

TEST(defaults_shrink_before_a_plan_fails)
{
    use_flash_next();
    use_machine(16, 128, 8);
    CHECK_OK(make(), &err);
    CHECK(plan.fits);
    CHECK(plan.slot_count >= 1);
    CHECK(plan.sequences_max < 8 || plan.page_count < 8192 / plan.page_tokens + 7);
    options.sequences_max = 8; /* what the user asked for stays */
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.sequences_max, 8);
}

TEST(sequences_go_before_the_room_that_one_of_them_needs)
{
    uint32_t lowered = 0;
    for (double gib = 7.5; gib < 11; gib += 0.05) {
        use_flash_next();
        use_machine(16, 128, gib);
        CHECK_OK(make(), &err);
        if (!plan.fits)
            continue;
        lowered += plan.sequences_max < 8;
        CHECK(ft_plan_kv_tokens(&plan) >= 2048 || plan.sequences_max == 1);
    }
    CHECK(lowered > 3);
}

TEST(advice_names_the_option_and_a_value_that_works)
{
    use_flash_next();
    use_machine(16, 128, 12);
    options.kv_tokens = 262144;
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    const char *found = strstr(plan.advice, "--kv-tokens ");
    REQUIRE(found != NULL);
    CHECK(strstr(plan.advice, "of device memory and 12.00 GiB are usable") != NULL);
    CHECK(strstr(plan.advice, "instead of 262144 saves") != NULL);
    uint32_t tokens = (uint32_t)strtoul(found + 12, NULL, 10);
    CHECK(tokens > 0 && tokens < 262144);
    options.kv_tokens = tokens;
    CHECK_OK(make(), &err);
    CHECK(plan.fits);
    options.kv_tokens = tokens + 2 * plan.page_tokens;
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
}

TEST(too_many_slots_are_answered_with_the_number_that_fits)
{
    use_flash_next();
    use_machine(16, 128, 24);
    options.slot_count = 20000;
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    const char *found = strstr(plan.advice, "--moe-cache-size ");
    REQUIRE(found != NULL);
    options.slot_count = (uint32_t)strtoul(found + 17, NULL, 10);
    CHECK_OK(make(), &err);
    CHECK(plan.fits);
    options.slot_count = plan.slot_count + 1;
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
}

TEST(what_cannot_fit_says_the_least_possible)
{
    use_flash_next();
    use_machine(16, 24, 0);
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    CHECK(strstr(plan.advice, "of RAM and 24.00 GiB are usable (bank 63.28 GiB") != NULL);
    CHECK(strstr(plan.advice, "no size option helps") != NULL);
    use_machine(16, 128, 4);
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    CHECK(strstr(plan.advice, "--strategy cpu") != NULL);
    use_machine(16, 80, 0);
    options.ple_in_ram = true;
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    CHECK(strstr(plan.advice, "--ple-backend disk saves 47.70 GiB") != NULL);
}

/* Every "--option N .. instead of M" is lower than what the plan has, and enough. Returns how many there were. */
static uint32_t check_advice(const struct ft_plan *refused)
{
    static const struct {
        const char *option;
        uint32_t *field;
    } known[] = {{"--kv-tokens ", &options.kv_tokens},
                 {"--moe-cache-size ", &options.slot_count},
                 {"--sequences ", &options.sequences_max},
                 {"--chunk ", &options.chunk_rows}};
    const struct ft_plan_options asked = options;
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *found = strstr(refused->advice, known[i].option);
        const char *than = found ? strstr(found, " instead of ") : NULL;
        if (!than || strcspn(found, ";") < (size_t)(than - found))
            continue;
        uint32_t value = (uint32_t)strtoul(found + strlen(known[i].option), NULL, 10),
                 now = (uint32_t)strtoul(than + 12, NULL, 10);
        CHECK(value < now);
        if (known[i].field == &options.chunk_rows)
            CHECK_EQ(now, refused->chunk_rows);
        *known[i].field = value;
        CHECK_OK(make(), &err);
        CHECK(plan.fits);
        options = asked;
        count++;
    }
    return count;
}

TEST(advice_is_lower_than_what_the_plan_has)
{
    uint32_t chunks = 0, all = 0;
    use_flash_next();
    for (double gib = 8; gib < 12; gib += 0.02) {
        use_machine(16, 128, gib);
        options.sequences_max = (uint32_t)(gib * 100) % 3 * 8; /* not given, 8, 16 */
        options.kv_tokens = (uint32_t)(gib * 100) % 5 * 4096;
        CHECK_OK(make(), &err);
        struct ft_plan refused = plan;
        if (plan.fits)
            continue;
        all += check_advice(&refused);
        chunks += strstr(refused.advice, "--chunk ") != NULL;
    }
    CHECK(chunks > 2 && all > 2 * chunks);
}

TEST(kv_tokens_are_counted_without_the_spare_pages)
{
    use_flash_next();
    use_machine(16, 128, 24);
    options.sequences_max = 5;
    options.kv_tokens = 4096;
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.page_count, 4096 / plan.page_tokens + 4);
    CHECK_EQ(ft_plan_kv_tokens(&plan), 4096);
    char *text = NULL;
    CHECK_OK(ft_plan_to_json(&plan, NULL, &text, &err), &err);
    json_t *root = text ? json_loads(text, 0, NULL) : NULL;
    CHECK_EQ(json_integer_value(json_object_get(root, "kv_tokens")), 4096);
    json_decref(root);
    free(text);
}

TEST(sizes_of_a_refusal_have_the_unit_that_shows_them)
{
    use_tiny();
    use_machine(2, 4, 0);
    machine.ram_bytes = 10 << 20;
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    CHECK(strstr(plan.advice, " of RAM and 10.00 MiB are usable (bank 6.77 MiB") != NULL);
    CHECK(strstr(plan.advice, "GiB") == NULL);
    char text[FT_BYTES_TEXT];
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {{0, "0 B"},
                 {1023, "1023 B"},
                 {1024, "1.00 KiB"},
                 {100 << 20, "100.0 MiB"},
                 {3 * GIB / 2, "1.50 GiB"},
                 {5000 * GIB, "4.88 TiB"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK(strcmp(ft_bytes_format(cases[i].bytes, text, sizeof text), cases[i].text) == 0);
}

TEST(several_options_together_are_named)
{
    use_flash_next();
    use_machine(16, 128, 12);
    options.kv_tokens = 262144;
    options.sequences_max = 64;
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    CHECK(strstr(plan.advice, "lower several together") != NULL);
    CHECK(strstr(plan.advice, "--sequences 1") != NULL);
}

TEST(hostile_sizes_overflow_into_an_error)
{
    use_tiny();
    use_machine(2, 4, 0);
    sizes.dense_bytes = UINT64_MAX - 5;
    CHECK_FAILS(make(), FT_LIMIT, "overflow", &err);
    use_tiny();
    sizes.expert_bytes_max = UINT64_MAX / 3;
    options.strategy = FT_STRATEGY_FUSED;
    CHECK_FAILS(make(), FT_LIMIT, "overflow", &err);
}

TEST(all_logits_size_the_workspace_for_every_row)
{
    use_tiny();
    use_machine(2, 4, 0);
    options.all_logits = true;
    options.chunk_rows = 100;
    options.kv_tokens = 60;
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.chunk_rows, 60); /* a chunk larger than the pool could never be filled */
    CHECK_EQ(plan.logit_rows_max, 60);
}

TEST(plans_are_pure_and_json_is_stable)
{
    char *first = NULL, *second = NULL;
    json_error_t where;
    use_flash_next();
    use_machine(16, 128, 24);
    CHECK_OK(make(), &err);
    CHECK_OK(ft_plan_to_json(&plan, NULL, &first, &err), &err);
    struct ft_plan kept = plan;
    CHECK_OK(make(), &err);
    CHECK(memcmp(&kept, &plan, sizeof plan) == 0);
    CHECK_OK(ft_plan_to_json(&plan, NULL, &second, &err), &err);
    REQUIRE(first && second);
    CHECK(strcmp(first, second) == 0);
    json_t *root = json_loads(first, 0, &where);
    REQUIRE(root != NULL);
    CHECK(strcmp(json_string_value(json_object_get(root, "strategy")), "auto") == 0);
    CHECK_EQ(json_integer_value(json_object_get(root, "slot_count")), plan.slot_count);
    CHECK_EQ(json_array_size(json_object_get(root, "memory")), plan.term_count);
    CHECK_EQ(json_object_size(json_object_get(root, "ops")), FT_OP_COUNT);
    json_decref(root);
    free(first);
    free(second);
}

TEST(a_gpu_pays_for_the_scratch_of_its_kernels)
{
    use_flash_next();
    use_machine(16, 128, 24);
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.device, FT_DEVICE_CUDA);
    struct ft_workspace workspace;
    ft_workspace_init(&workspace, &model, ft_plan_rows_max(&plan), plan.sequences_max, plan.logit_rows_max);
    uint64_t scratch =
        ft_workspace_gpu_bytes(&model, ft_plan_rows_max(&plan), (uint64_t)plan.page_count * plan.page_tokens);
    CHECK(scratch > FT_GPU_WEIGHT_BYTES);
    CHECK_EQ(term(FT_POOL_WORKSPACE)->bytes, (workspace.count + decode_elements()) * 4 + scratch);
}

TEST(quantised_dense_weights_are_named_in_the_table)
{
    use_flash_next();
    use_machine(16, 128, 24);
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.dense, FT_DENSE_AS_STORED);
    CHECK(!strstr(term(FT_POOL_DENSE)->reason, "fp8"));
    sizes.dense = FT_DENSE_TO_FP8;
    CHECK_OK(make(), &err);
    CHECK_EQ(plan.dense, FT_DENSE_TO_FP8);
    CHECK(strstr(term(FT_POOL_DENSE)->reason, "fp8, quantised at load") != NULL);
    CHECK(strstr(term(FT_POOL_HEAD)->reason, "fp8, quantised at load") != NULL);
}

TEST(a_plan_says_when_it_gives_less_than_was_wished)
{
    use_flash_next();
    use_machine(16, 128, 24);
    CHECK_OK(make(), &err);
    CHECK(plan.fits && !plan.lowered);
    use_machine(16, 128, 8); /* KV and state of 8 sequences do not fit beside the weights */
    CHECK_OK(make(), &err);
    CHECK(plan.fits && plan.lowered);
}

TEST(the_smallest_gpu_is_just_large_enough)
{
    use_flash_next();
    use_machine(16, 128, 0); /* which machine asks does not matter */
    struct ft_plan smallest;
    CHECK_OK(ft_plan_smallest_gpu(&model, &sizes, &machine, &options, &smallest, &err), &err);
    uint64_t least = smallest.limit_bytes[FT_TIER_DEVICE];
    CHECK(smallest.fits && smallest.device == FT_DEVICE_CUDA && smallest.strategy == FT_STRATEGY_OFFLOAD);
    CHECK_EQ(smallest.slot_count, FT_MIN(model.topk, 24576u));
    CHECK_EQ(smallest.sequences_max, 1);
    CHECK_EQ(smallest.chunk_rows, 8);
    CHECK_EQ(ft_plan_kv_tokens(&smallest), 8192);
    CHECK(least < 12 * GIB);
    options.strategy = FT_STRATEGY_OFFLOAD;
    options.slot_count = smallest.slot_count;
    options.sequences_max = 1;
    options.chunk_rows = 8;
    options.kv_tokens = 8192;
    machine.device = FT_DEVICE_CUDA;
    machine.device_memory_bytes = least;
    CHECK_OK(make(), &err);
    CHECK(plan.fits);
    machine.device_memory_bytes = least - sizes.expert_bytes_max * 2;
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    /* fewer bytes, a smaller GPU; more tokens, a larger one */
    options = (struct ft_plan_options){.slot_rate = -1, .fetch_share = -1, .kv_tokens = 32768};
    CHECK_OK(ft_plan_smallest_gpu(&model, &sizes, &machine, &options, &smallest, &err), &err);
    CHECK(smallest.limit_bytes[FT_TIER_DEVICE] > least + 3 * 8192 * 12 * 1024);
    options.kv_tokens = 0;
    sizes.dense_bytes /= 2;
    CHECK_OK(ft_plan_smallest_gpu(&model, &sizes, &machine, &options, &smallest, &err), &err);
    CHECK(smallest.limit_bytes[FT_TIER_DEVICE] <= least - sizes.dense_bytes);
    char *text = NULL;
    struct ft_plan both[2] = {plan, smallest};
    json_error_t where;
    CHECK_OK(ft_plan_to_json(&plan, both, &text, &err), &err);
    json_t *root = text ? json_loads(text, 0, &where) : NULL;
    const json_t *fp8 = json_object_get(json_object_get(root, "smallest_gpu"), "fp8");
    CHECK_EQ(json_integer_value(json_object_get(fp8, "device_bytes")), smallest.limit_bytes[FT_TIER_DEVICE]);
    CHECK_EQ(json_integer_value(json_object_get(fp8, "kv_tokens")), ft_plan_kv_tokens(&smallest));
    CHECK_EQ(json_is_true(json_object_get(fp8, "runs")), (FT_FP8_USES & ~FT_FP8_USES_ACCEPTED) == 0);
    json_decref(root);
    free(text);
}

/* ---- several GPUs ---- */

static void use_gpus(uint32_t count, const double *gib)
{
    use_machine(16, 128, gib[0]);
    machine.gpu_count = count;
    for (uint32_t i = 0; i < count; i++) {
        machine.gpu_id[i] = i + 1;
        machine.gpu_memory_bytes[i] = (uint64_t)(gib[i] * (double)GIB);
    }
}

/* Nothing is lost between the GPUs, nobody holds more than it has. */
static void check_gpus(uint32_t count)
{
    uint64_t used = 0;
    CHECK_EQ(plan.gpu_count, count);
    CHECK_OK(ft_plan_check(&plan, &model, &err), &err);
    for (uint32_t i = 0; i < count; i++) {
        const struct ft_plan_gpu *gpu = &plan.gpus[i];
        CHECK_EQ(gpu->id, i + 1);
        CHECK(gpu->layer_end > gpu->layer_begin);
        CHECK(gpu->slot_end - gpu->slot_begin <= (gpu->layer_end - gpu->layer_begin) * model.expert_count);
        CHECK(!plan.fits || gpu->used_bytes <= gpu->limit_bytes);
        used += gpu->used_bytes;
    }
    CHECK_EQ(used, plan.used_bytes[FT_TIER_DEVICE]);
}

/* No room for two more experts, where the plan takes as many slots as fit. */
static bool is_full(const struct ft_plan_gpu *gpu)
{
#ifdef FT_TINY /* as few slots as possible */
    return gpu->used_bytes <= gpu->limit_bytes;
#else
    return gpu->limit_bytes - gpu->used_bytes < 2 * sizes.expert_bytes_max;
#endif
}

TEST(equal_gpus_share_layers_and_slots_alike)
{
    use_flash_next();
    use_gpus(2, (const double[]){24, 24});
    CHECK_OK(make(), &err);
    CHECK(plan.fits);
    check_gpus(2);
    CHECK(plan.gpus[0].layer_end >= 23 && plan.gpus[0].layer_end <= 26);
    /* the head's gigabyte makes a difference of a layer or two; every GPU is full */
    for (uint32_t i = 0; i < 2; i++)
        CHECK(is_full(&plan.gpus[i]));
    uint32_t both = plan.slot_count;
    struct ft_plan one;
    use_machine(16, 128, 24);
    CHECK_OK(ft_plan_make(&model, &sizes, &machine, &options, &one, &err), &err);
    CHECK_EQ(one.gpu_count, 0);
#ifdef FT_TINY
    CHECK(both >= one.slot_count);
#else
    CHECK(both > 2 * one.slot_count); /* dense weights, KV and state are halved, too */
#endif
}

TEST(unequal_gpus_are_filled_each)
{
    use_flash_next();
    use_gpus(3, (const double[]){8, 32, 16});
    CHECK_OK(make(), &err);
    CHECK(plan.fits);
    check_gpus(3);
    uint32_t layers[3];
    for (uint32_t i = 0; i < 3; i++) {
        layers[i] = plan.gpus[i].layer_end - plan.gpus[i].layer_begin;
        CHECK(is_full(&plan.gpus[i]));
    }
    CHECK(layers[1] > 2 * layers[0] && layers[1] > layers[2] && layers[2] > layers[0]);
    CHECK_EQ(layers[0] + layers[1] + layers[2], 48);
    char *text;
    CHECK_OK(ft_plan_to_json(&plan, NULL, &text, &err), &err);
    json_t *root = json_loads(text, 0, NULL), *gpus = json_object_get(root, "gpus");
    CHECK_EQ(json_array_size(gpus), 3);
    CHECK_EQ(json_integer_value(json_object_get(json_array_get(gpus, 1), "layer_begin")), layers[0]);
    json_decref(root);
    free(text);
}

TEST(limits_are_for_every_gpu_or_one_by_one)
{
    use_flash_next();
    use_gpus(2, (const double[]){80, 80});
    options.device_bytes = 12 * GIB;
    CHECK_OK(make(), &err);
    check_gpus(2);
    CHECK_EQ(plan.gpus[0].limit_bytes, 12 * GIB);
    CHECK_EQ(plan.gpus[1].limit_bytes, 12 * GIB);
    options.device_bytes = 0;
    options.gpu_limit_count = 2;
    options.gpu_bytes[0] = 24 * GIB;
    options.gpu_bytes[1] = 12 * GIB;
    CHECK_OK(make(), &err);
    check_gpus(2);
    CHECK_EQ(plan.limit_bytes[FT_TIER_DEVICE], 36 * GIB);
    CHECK(plan.gpus[0].layer_end > 28);
    options.gpu_limit_count = 3;
    CHECK_FAILS(make(), FT_USAGE, "--vram names 3 limits for 2 GPUs", &err);
}

TEST(each_gpu_must_fit_and_the_one_that_does_not_is_named)
{
    use_flash_next();
    use_gpus(2, (const double[]){80, 2});
    options.strategy = FT_STRATEGY_OFFLOAD;
    options.kv_tokens = 8192;
    options.sequences_max = 8;
    options.chunk_rows = 2048;
    options.slot_count = 5000;
    CHECK_OK(make(), &err);
    check_gpus(2);
    CHECK(!plan.fits);
    CHECK(strstr(plan.advice, "of GPU 2 (layers 47 to 47)") != NULL);
    CHECK(plan.used_bytes[FT_TIER_DEVICE] < plan.limit_bytes[FT_TIER_DEVICE]); /* the sum would */
}

static void use_two_limits(double first, double last)
{
    use_gpus(2, (const double[]){80, 80});
    options.gpu_limit_count = 2;
    options.gpu_bytes[0] = (uint64_t)(first * (double)GIB);
    options.gpu_bytes[1] = (uint64_t)(last * (double)GIB);
}

TEST(a_refusal_says_what_each_gpu_lacks)
{
    use_flash_next();
    use_two_limits(3, 3);
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    CHECK(strstr(plan.advice, " of GPU 1 (layers 0 to 29) and 3.00 GiB are usable (dense ") != NULL);
    CHECK(strstr(plan.advice, " of GPU 2 (layers 30 to 47) and 3.00 GiB are usable (dense ") != NULL);
    const char *least = strstr(plan.advice, "least possible is ");
    REQUIRE(least != NULL);
    CHECK(strstr(least, " of GPU 1 and ") != NULL && strstr(least, " of GPU 2;") != NULL);
    CHECK(strstr(plan.advice, "--gpus") == NULL); /* both lack the same: no order helps */
    /* the pools are those of the GPU, and what is saved is saved there */
    use_two_limits(6, 6);
    options.kv_tokens = 262144;
    options.slot_count = 100; /* else what is saved would go to slots */
    options.sequences_max = 1;
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    const struct ft_plan refused = plan;
    const char *saves = strstr(refused.advice, " instead of 262144 saves "),
               *found = strstr(refused.advice, "--kv-tokens ");
    REQUIRE(saves && found);
    options.kv_tokens = (uint32_t)strtoul(found + 12, NULL, 10);
    CHECK_OK(make(), &err);
    for (uint32_t i = 0; i < 2; i++) {
        char text[FT_BYTES_TEXT], wanted[64];
        ft_bytes_format(refused.gpus[i].pool_bytes[FT_POOL_KV], text, sizeof text);
        snprintf(wanted, sizeof wanted, "kv %s", text);
        CHECK(strstr(refused.advice, wanted) != NULL);
        CHECK(plan.gpus[i].layer_begin == refused.gpus[i].layer_begin);
        ft_bytes_format(refused.gpus[i].used_bytes - plan.gpus[i].used_bytes, text, sizeof text);
        snprintf(wanted, sizeof wanted, "%s of GPU %u", text, i + 1);
        CHECK(strstr(saves, wanted) != NULL);
    }
}

TEST(the_order_of_gpus_that_would_fit_is_named)
{
    use_flash_next();
    use_two_limits(24, 1.37); /* the last one has the head: 1.18 GiB */
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    CHECK(strstr(plan.advice, "or GPU 1 last, where the head is: --gpus 2,1 with --vram in that order") !=
          NULL);
    use_two_limits(1.37, 24);
    CHECK_OK(make(), &err);
    CHECK(plan.fits);
    use_gpus(3, (const double[]){24, 1.37, 1.37});
    CHECK_OK(make(), &err);
    CHECK(!plan.fits);
    CHECK(strstr(plan.advice, "--gpus 3,2,1") != NULL && strstr(plan.advice, "--vram") == NULL);
}

TEST(advice_for_two_gpus_holds)
{
    uint32_t count = 0;
    use_flash_next();
    for (double gib = 4; gib < 12; gib += 0.25) {
        use_two_limits(gib, 16 - gib);
        options.sequences_max = (uint32_t)(gib * 4) % 3 * 8;
        options.kv_tokens = 250000 + (uint32_t)(gib * 4) % 5 * 50000;
        options.slot_count = (uint32_t)(gib * 4) % 4 * 1000;
        CHECK_OK(make(), &err);
        struct ft_plan refused = plan;
        if (!plan.fits)
            count += check_advice(&refused);
    }
    CHECK(count > 10);
}

TEST(fused_gives_each_gpu_all_experts_of_its_layers)
{
    use_tiny();
    use_gpus(3, (const double[]){1, 1, 1});
    CHECK_OK(make(), &err);
    check_gpus(3);
    CHECK_EQ(plan.strategy, FT_STRATEGY_FUSED); /* auto found that all fit */
    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQ(plan.gpus[i].slot_end - plan.gpus[i].slot_begin,
                 (plan.gpus[i].layer_end - plan.gpus[i].layer_begin) * model.expert_count);
    options.strategy = FT_STRATEGY_HYBRID;
    options.slot_count = 4; /* no GPU is left without */
    CHECK_OK(make(), &err);
    check_gpus(3);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(plan.gpus[i].slot_end > plan.gpus[i].slot_begin);
}

TEST(more_gpus_than_layers_are_refused)
{
    static const double gib[9] = {8, 8, 8, 8, 8, 8, 8, 8, 8};
    use_tiny();
    use_gpus(8, gib);
    CHECK_OK(make(), &err);
    check_gpus(8);
    use_gpus(9, gib);
    CHECK_FAILS(make(), FT_USAGE, "the model has 8 layers", &err);
    options.strategy = FT_STRATEGY_CPU;
    options.device_given = true;
    options.device = FT_DEVICE_HOST;
    CHECK_OK(make(), &err); /* no GPU takes part */
    CHECK_EQ(plan.gpu_count, 0);
}

TEST_MAIN(
    RUN(equal_gpus_share_layers_and_slots_alike) RUN(unequal_gpus_are_filled_each) RUN(
        limits_are_for_every_gpu_or_one_by_one) RUN(each_gpu_must_fit_and_the_one_that_does_not_is_named)
        RUN(fused_gives_each_gpu_all_experts_of_its_layers) RUN(more_gpus_than_layers_are_refused) RUN(
            a_gpu_pays_for_the_scratch_of_its_kernels) RUN(quantised_dense_weights_are_named_in_the_table)
            RUN(a_plan_says_when_it_gives_less_than_was_wished) RUN(the_smallest_gpu_is_just_large_enough)
                RUN(a_cpu_only_machine_runs_everything_on_its_cores) RUN(
                    strategies_that_need_a_device_get_the_host_device) RUN(fused_has_a_slot_for_every_expert)
                    RUN(host_device_with_cpu_strategy_keeps_experts_on_the_cores)
                        RUN(contradicting_wishes_are_refused_by_name) RUN(workers_follow_the_usable_cores)
                            RUN(cards_get_as_many_slots_as_they_hold) RUN(defaults_shrink_before_a_plan_fails)
                                RUN(sequences_go_before_the_room_that_one_of_them_needs)
                                    RUN(advice_names_the_option_and_a_value_that_works)
                                        RUN(too_many_slots_are_answered_with_the_number_that_fits)
                                            RUN(what_cannot_fit_says_the_least_possible) RUN(
                                                several_options_together_are_named)
                                                RUN(sizes_of_a_refusal_have_the_unit_that_shows_them) RUN(
                                                    a_refusal_says_what_each_gpu_lacks)
                                                    RUN(the_order_of_gpus_that_would_fit_is_named) RUN(
                                                        advice_for_two_gpus_holds)
                                                        RUN(advice_is_lower_than_what_the_plan_has) RUN(
                                                            kv_tokens_are_counted_without_the_spare_pages)
                                                            RUN(hostile_sizes_overflow_into_an_error) RUN(
                                                                all_logits_size_the_workspace_for_every_row)
                                                                RUN(plans_are_pure_and_json_is_stable))
