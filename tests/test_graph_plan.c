/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/plan.h"
#include "tests/test.h"

static struct ft_model model;

/* A plan by hand: two layers, no device. */
static struct ft_plan good_plan(void)
{
    struct ft_plan plan = {.strategy = FT_STRATEGY_CPU,
                           .workers = 2,
                           .page_tokens = 64,
                           .page_count = 4,
                           .sequences_max = 2,
                           .chunk_rows = 16,
                           .logit_rows_max = 2,
                           .tiling = {.tiles_max = 4, .tile_bytes_min = 65536},
                           .term_count = 2,
                           .fits = true};
    model = (struct ft_model){.layer_count = 2};
    plan.tiling.lane_of_op[FT_OP_PLE_READ] = FT_LANE_IO;
    plan.terms[0] = (struct ft_plan_term){.pool = FT_POOL_DENSE, .tier = FT_TIER_RAM, .bytes = 100};
    plan.terms[1] = (struct ft_plan_term){.pool = FT_POOL_PLE, .tier = FT_TIER_DISK, .bytes = 50};
    plan.used_bytes[FT_TIER_RAM] = 100;
    plan.used_bytes[FT_TIER_DISK] = 50;
    plan.limit_bytes[FT_TIER_RAM] = 100;
    return plan;
}

TEST(a_consistent_plan_passes)
{
    struct ft_error err;
    struct ft_plan plan = good_plan();
    CHECK_OK(ft_plan_check(&plan, &model, &err), &err);
    plan.limit_bytes[FT_TIER_RAM] = 99;
    plan.fits = false;
    snprintf(plan.advice, sizeof plan.advice, "buy a byte");
    CHECK_OK(ft_plan_check(&plan, &model, &err), &err);
    CHECK(strcmp(ft_plan_pool_name(FT_POOL_STAGING), "staging") == 0);
    CHECK(strcmp(ft_plan_pool_name(FT_POOL_PLE), "ple") == 0);
    CHECK(strcmp(ft_plan_pool_name((enum ft_plan_pool)99), "?") == 0);
}

#define BREAKS(statement, text)                                                                              \
    do {                                                                                                     \
        struct ft_plan plan = good_plan();                                                                   \
        statement;                                                                                           \
        CHECK_FAILS(ft_plan_check(&plan, &model, &err), FT_INTERNAL, text, &err);                            \
    } while (0)

TEST(every_inconsistency_is_named)
{
    struct ft_error err;
    BREAKS(plan.strategy = FT_STRATEGY_COUNT, "does not exist");
    BREAKS(plan.strategy = FT_STRATEGY_AUTO, "without a device");
    BREAKS(plan.strategy = FT_STRATEGY_OFFLOAD, "without a device");
    BREAKS(plan.workers = 0, "0 workers");
    BREAKS(plan.sequences_max = 1000, "1000 sequences");
    BREAKS(plan.chunk_rows = 0, "chunk of 0 rows");
    BREAKS(plan.page_count = 1, "1 KV pages");
    BREAKS(plan.fetch_share = NAN, "fetch share");
    BREAKS(plan.slot_count = 3, "3 slots");
    BREAKS(plan.tiling.tiles_max = 0, "tiles_max 0");
    BREAKS(plan.tiling.lane_of_op[FT_OP_ROUTER] = FT_LANE_DEVICE, "router has lane device");
    BREAKS(plan.tiling.lane_of_op[FT_OP_ROUTER] = 77, "lane 77");
    BREAKS(plan.tiling.lane_of_op[FT_OP_PLE_READ] = FT_LANE_CPU, "wanted io");
    BREAKS(plan.terms[1].pool = FT_POOL_DENSE, "doubled");
    BREAKS(plan.terms[0].bytes = 99, "add up to 99");
    BREAKS(plan.terms[0].bytes = plan.used_bytes[FT_TIER_RAM] = 101, "says that it fits");
    BREAKS(plan.term_count = 100, "100 terms");
    BREAKS(plan.limit_bytes[FT_TIER_RAM] = 1; plan.fits = false, "no advice");
    BREAKS(plan.strategy = FT_STRATEGY_HYBRID; plan.device = FT_DEVICE_HOST, "hybrid with 0 slots");
}

TEST(the_host_device_lives_in_ram)
{
    struct ft_error err;
    struct ft_plan plan = good_plan();
    plan.device = FT_DEVICE_HOST;
    plan.terms[0].tier = FT_TIER_DEVICE;
    plan.used_bytes[FT_TIER_DEVICE] = 100;
    CHECK_OK(ft_plan_check(&plan, &model, &err), &err);
    plan.used_bytes[FT_TIER_RAM] = 0;
    CHECK_FAILS(ft_plan_check(&plan, &model, &err), FT_INTERNAL, "ram terms add up to 100", &err);
}

TEST_MAIN(RUN(a_consistent_plan_passes) RUN(every_inconsistency_is_named) RUN(the_host_device_lives_in_ram))
