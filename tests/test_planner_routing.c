/* SPDX-License-Identifier: Apache-2.0 */
/* The generator's hit rates, and the counters against searches that try everything. */
#include "planner/routing.h"

#include "tests/test.h"

#define LAYERS 3u

static bool generate(const struct ft_routing_options *options, struct ft_routing *routing)
{
    struct ft_error err;
    int status = ft_routing_generate(options, routing, &err);
    CHECK_EQ(status, FT_OK);
    return status == FT_OK;
}

/* Hit rate of an LRU with `slots` per layer over the last 800 of 1200 steps of the main model's experts. */
static double hit_rate(const struct ft_routing *routing, uint32_t slots)
{
    struct ft_routing_count count;
    struct ft_error err;
    CHECK_OK(ft_routing_lru(routing, 512, slots * routing->layer_count, NULL, 400, 800, &count, &err), &err);
    CHECK_EQ(count.active, 800 * routing->layer_count * 10);
    return 1 - (double)count.misses / (double)count.active;
}

TEST(hit_rates_follow_the_curve_that_was_asked_for)
{
    const struct ft_routing_options options = {1200, LAYERS, 1, 10, 512, FT_ROUTING_SEED};
    const struct {
        uint32_t slots;
        double rate;
    } curve[] = {{11, 0.13}, {78, 0.39}, {93, 0.43}, {186, 0.62}, {279, 0.72}, {372, 0.79}};
    struct ft_routing routing;
    if (!generate(&options, &routing))
        return;
    for (size_t i = 0; i < sizeof curve / sizeof curve[0]; i++) {
        double rate = hit_rate(&routing, curve[i].slots);
        printf("     %u slots per layer: %.2f%%\n", curve[i].slots, rate * 100);
        CHECK_NEAR(rate, curve[i].rate, 0.01);
    }
    ft_routing_free(&routing);
}

TEST(other_seeds_and_layer_counts_hit_as_often)
{
    for (uint64_t seed = 2; seed < 5; seed++) {
        const struct ft_routing_options options = {1200, 1 + (uint32_t)seed % 3, 1, 10, 512, seed};
        struct ft_routing routing;
        if (!generate(&options, &routing))
            return;
        CHECK_NEAR(hit_rate(&routing, 78), 0.39, 0.015);
        ft_routing_free(&routing);
    }
}

TEST(rows_hold_distinct_experts_in_range)
{
    const struct ft_routing_options options = {50, 4, 3, 8, 9, 7};
    struct ft_routing routing;
    if (!generate(&options, &routing))
        return;
    for (uint32_t i = 0; i < 50 * 4 * 3; i++)
        for (uint32_t j = 0; j < 8; j++) {
            CHECK(routing.ids[i * 8 + j] < 9);
            for (uint32_t before = 0; before < j; before++)
                CHECK(routing.ids[i * 8 + j] != routing.ids[i * 8 + before]);
        }
    ft_routing_free(&routing);
}

TEST(the_same_seed_gives_the_same_routing)
{
    const struct ft_routing_options options = {20, 2, 2, 4, 64, 99};
    struct ft_routing a, b;
    if (!generate(&options, &a) || !generate(&options, &b))
        return;
    CHECK(memcmp(a.ids, b.ids, 20 * 2 * 2 * 4 * sizeof *a.ids) == 0);
    ft_routing_free(&a);
    ft_routing_free(&b);
}

TEST(warm_slots_start_at_the_hit_rate_that_they_keep)
{
    const struct ft_routing_options options = {400, LAYERS, 1, 10, 512, 3};
    uint32_t layer[LAYERS * 78], expert[LAYERS * 78];
    struct ft_routing_warm warm = {.layer = layer, .expert = expert};
    struct ft_routing routing;
    struct ft_routing_count cold, warmed;
    struct ft_error err;
    CHECK_OK(ft_routing_generate(&options, &routing, &err), &err);
    CHECK_OK(ft_routing_list_warm(&options, LAYERS * 78, &warm, &err), &err);
    CHECK_EQ(warm.count, LAYERS * 78);
    CHECK_OK(ft_routing_lru(&routing, 512, LAYERS * 78, NULL, 0, 3, &cold, &err), &err);
    CHECK_OK(ft_routing_lru(&routing, 512, LAYERS * 78, &warm, 0, 400, &warmed, &err), &err);
    CHECK(cold.misses > cold.active * 8 / 10);
    CHECK_NEAR(1 - (double)warmed.misses / (double)warmed.active, 0.39, 0.015);
    ft_routing_free(&routing);
}

/* Share of what is foreseen at place j of a list of 4 (FT_NONE: at any) that comes true. */
static double share_foreseen(struct ft_routing *routing, uint32_t place)
{
    uint64_t right = 0, all = 0;
    for (uint32_t step = 0; step < routing->step_count; step++)
        for (uint32_t layer = 0; layer < routing->layer_count; layer++)
            for (uint32_t j = 0; j < 4; j++) {
                uint32_t expert = ft_routing_foresee(routing, step, layer, 0, j, 256);
                CHECK(expert < 256);
                CHECK_EQ(expert, ft_routing_foresee(routing, step, layer, 0, j, 256));
                if (place != FT_NONE && place != j)
                    continue;
                right += expert == ft_routing_row(routing, step, layer, 0)[j];
                all++;
            }
    return (double)right / (double)all;
}

TEST(what_is_foreseen_comes_as_often_as_is_said)
{
    struct ft_error err;
    struct ft_routing routing;
    const struct ft_routing_options options = {400, 8, 1, 4, 256, 5};
    CHECK_OK(ft_routing_generate(&options, &routing, &err), &err);
    CHECK_NEAR(share_foreseen(&routing, FT_NONE), 0, 0.01); /* 1 of 256 by chance */
    routing.foresight = FT_FORESIGHT;
    CHECK_NEAR(share_foreseen(&routing, FT_NONE), 0.70, 0.02);
    CHECK_NEAR(share_foreseen(&routing, 0), 0.89, 0.02); /* as measured with the demo model */
    CHECK_NEAR(share_foreseen(&routing, 1), 0.79, 0.03);
    CHECK_NEAR((share_foreseen(&routing, 2) + share_foreseen(&routing, 3)) / 2, 0.55, 0.03);
    routing.foresight = 1;
    CHECK_NEAR(share_foreseen(&routing, FT_NONE), 1, 0);
    ft_routing_free(&routing);
}

TEST(impossible_routing_is_refused)
{
    const struct ft_routing_options options = {10, 1, 1, 9, 8, 1};
    struct ft_routing routing;
    struct ft_routing_count count;
    struct ft_error err;
    CHECK_EQ(ft_routing_generate(&options, &routing, &err), FT_USAGE);
    const uint16_t ids[] = {7};
    routing = (struct ft_routing){1, 1, 1, 1, ids, 0};
    CHECK_EQ(ft_routing_lru(&routing, 7, 1, NULL, 0, 1, &count, &err), FT_USAGE);
    CHECK_EQ(ft_routing_belady(&routing, 7, 1, NULL, 0, 1, &count, &err), FT_USAGE);
}

/* ---- against brute force ---- */

#define SMALL_STEPS 7u
#define SMALL_EXPERTS 3u /* of a layer */

/* LRU as a list, most recent first, for one layer of one expert a step: no ties. */
static uint64_t list_lru(const struct ft_routing *routing, uint32_t slots)
{
    uint32_t list[64], count = 0;
    uint64_t misses = 0;
    for (uint32_t step = 0; step < routing->step_count; step++) {
        uint32_t id = routing->ids[step], at = 0;
        while (at < count && list[at] != id)
            at++;
        misses += at == count;
        if (at == count)
            count++;
        memmove(list + 1, list, at * sizeof *list);
        list[0] = id;
        count = FT_MIN(count, slots);
    }
    return misses;
}

TEST(lru_misses_are_those_of_a_list)
{
    for (uint64_t seed = 0; seed < 20; seed++)
        for (uint32_t slots = 1; slots < 9; slots++) {
            const struct ft_routing_options options = {60, 1, 1, 1, 8, seed};
            struct ft_routing routing;
            struct ft_routing_count count;
            struct ft_error err;
            if (!generate(&options, &routing))
                return;
            CHECK_OK(ft_routing_lru(&routing, 8, slots, NULL, 0, 60, &count, &err), &err);
            CHECK_EQ(count.active, 60);
            CHECK_EQ(count.misses, list_lru(&routing, slots));
            ft_routing_free(&routing);
        }
}

/* Layers and rows with ties, one miss at a time: misses come in the order of their last use, the latest
 * first; each takes the slot of the oldest step, the lower one first; what the layer uses stays. Enough slots
 * that none is taken twice in a layer. */
static uint64_t slow_lru(const struct ft_routing *routing, uint32_t slots)
{
    uint32_t id[64], age[64] = {0}, seen[4][16] = {{0}}; /* step + 1 of the last use, 0 = never or free */
    uint64_t misses = 0;
    for (uint32_t group = 0; group < routing->step_count * routing->layer_count; group++) {
        uint32_t layer = group % routing->layer_count, step = group / routing->layer_count;
        bool missing[16] = {false}, used[16] = {false}, taken[64] = {false};
        for (uint32_t i = 0; i < routing->row_count * routing->topk; i++)
            used[ft_routing_row(routing, step, layer, i / routing->topk)[i % routing->topk]] = true;
        memcpy(missing, used, sizeof used);
        for (uint32_t s = 0; s < slots; s++)
            if (age[s] && id[s] / 100 == layer && used[id[s] % 100]) {
                missing[id[s] % 100] = false;
                taken[s] = true;
                age[s] = step + 1;
            }
        for (;;) {
            uint32_t latest = FT_NONE, oldest = FT_NONE;
            for (uint32_t e = 0; e < 16; e++)
                if (missing[e] && (latest == FT_NONE || seen[layer][e] > seen[layer][latest]))
                    latest = e;
            if (latest == FT_NONE)
                break;
            for (uint32_t s = 0; s < slots; s++)
                if (!taken[s] && (oldest == FT_NONE || age[s] < age[oldest]))
                    oldest = s;
            misses++;
            missing[latest] = false;
            taken[oldest] = true;
            id[oldest] = layer * 100 + latest;
            age[oldest] = step + 1;
        }
        for (uint32_t e = 0; e < 16; e++)
            seen[layer][e] = used[e] ? step + 1 : seen[layer][e];
    }
    return misses;
}

TEST(lru_of_layers_and_rows_breaks_ties_as_the_engine_does)
{
    for (uint64_t seed = 0; seed < 20; seed++)
        for (uint32_t slots = 12; slots < 60; slots += 7) {
            const struct ft_routing_options options = {60, 3, 2, 4, 16, seed};
            struct ft_routing routing;
            struct ft_routing_count count;
            struct ft_error err;
            if (!generate(&options, &routing))
                return;
            CHECK_OK(ft_routing_lru(&routing, 16, slots, NULL, 0, 60, &count, &err), &err);
            CHECK_EQ(count.misses, slow_lru(&routing, slots));
            ft_routing_free(&routing);
        }
}

/* The fewest misses from (step, layer) `group` on with the residents as a bit set, trying every subset to keep. */
static uint32_t fewest(const struct ft_routing *routing, uint32_t group, uint32_t residents, uint32_t slots,
                       int32_t *memo)
{
    uint32_t layer = group % routing->layer_count, step = group / routing->layer_count, used = 0;
    if (step == routing->step_count)
        return 0;
    int32_t *known = &memo[group << 6 | residents];
    if (*known >= 0)
        return (uint32_t)*known;
    for (uint32_t row = 0; row < routing->row_count; row++)
        for (uint32_t j = 0; j < routing->topk; j++)
            used |= 1u << (layer * SMALL_EXPERTS + ft_routing_row(routing, step, layer, row)[j]);
    uint32_t misses = (uint32_t)__builtin_popcount(used & ~residents), all = used | residents,
             best = UINT32_MAX;
    for (uint32_t kept = all;; kept = (kept - 1) & all) {
        if ((uint32_t)__builtin_popcount(kept) <= slots)
            best = FT_MIN(best, fewest(routing, group + 1, kept, slots, memo));
        if (!kept)
            break;
    }
    *known = (int32_t)(best + misses);
    return best + misses;
}

TEST(belady_misses_are_the_fewest_possible)
{
    static int32_t memo[SMALL_STEPS * 2 << 6];
    for (uint64_t seed = 0; seed < 30; seed++)
        for (uint32_t slots = 0; slots <= 6; slots++) {
            const struct ft_routing_options options = {
                SMALL_STEPS, 2, 1 + (uint32_t)seed % 2, 1 + (uint32_t)seed / 2 % 2, SMALL_EXPERTS, seed};
            uint32_t layer[] = {1, 0}, expert[] = {2, 1};
            struct ft_routing_warm warm = {FT_MIN((uint32_t)seed % 3, slots), layer, expert};
            uint32_t residents = (warm.count > 0 ? 1u << 5 : 0) | (warm.count > 1 ? 1u << 1 : 0);
            struct ft_routing routing;
            struct ft_routing_count count, lru;
            struct ft_error err;
            if (!generate(&options, &routing))
                return;
            memset(memo, 0xff, sizeof memo);
            CHECK_OK(ft_routing_belady(&routing, SMALL_EXPERTS, slots, &warm, 0, SMALL_STEPS, &count, &err),
                     &err);
            CHECK_OK(ft_routing_lru(&routing, SMALL_EXPERTS, slots, &warm, 0, SMALL_STEPS, &lru, &err), &err);
            CHECK_EQ(count.misses, fewest(&routing, 0, residents, slots, memo));
            CHECK_EQ(count.active, lru.active);
            CHECK(count.misses <= lru.misses);
            ft_routing_free(&routing);
        }
}

TEST(only_the_window_is_counted)
{
    const struct ft_routing_options options = {40, 2, 2, 3, 16, 5};
    struct ft_routing routing;
    struct ft_routing_count all, head, tail, active;
    struct ft_error err;
    if (!generate(&options, &routing))
        return;
    CHECK_OK(ft_routing_lru(&routing, 16, 12, NULL, 0, 40, &all, &err), &err);
    CHECK_OK(ft_routing_lru(&routing, 16, 12, NULL, 0, 15, &head, &err), &err);
    CHECK_OK(ft_routing_lru(&routing, 16, 12, NULL, 15, 25, &tail, &err), &err);
    ft_routing_count_active(&routing, 15, 25, &active);
    CHECK_EQ(head.misses + tail.misses, all.misses);
    CHECK_EQ(head.active + tail.active, all.active);
    CHECK_EQ(active.active, tail.active);
    ft_routing_free(&routing);
}

TEST_MAIN(RUN(hit_rates_follow_the_curve_that_was_asked_for) RUN(other_seeds_and_layer_counts_hit_as_often)
              RUN(rows_hold_distinct_experts_in_range) RUN(the_same_seed_gives_the_same_routing)
                  RUN(warm_slots_start_at_the_hit_rate_that_they_keep)
                      RUN(what_is_foreseen_comes_as_often_as_is_said) RUN(impossible_routing_is_refused)
                          RUN(lru_misses_are_those_of_a_list)
                              RUN(lru_of_layers_and_rows_breaks_ties_as_the_engine_does)
                                  RUN(belady_misses_are_the_fewest_possible) RUN(only_the_window_is_counted))
