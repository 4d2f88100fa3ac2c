/* SPDX-License-Identifier: Apache-2.0 */
/* How many copies go ahead: what fits into the link's idle time, and none where they are not used or steps grow longer. */
#include "planner/ahead.h"
#include "tests/test.h"

#define LAYERS 4u
#define EXPERTS 16u
#define EACH 50000.0 /* ns of a copy */

static struct ft_model model = {.layer_count = LAYERS, .expert_count = EXPERTS, .topk = 8};
static struct ft_machine machine = {.link_bytes_per_s = 1e6 * 1e9 / EACH};
static struct ft_ahead_layer layers[LAYERS];
static struct ft_ahead ahead;
static double now;

static void begin_on(const struct ft_machine *on, bool never, bool always, bool deterministic)
{
    struct ft_policy_params params = {.model = &model,
                                      .machine = on,
                                      .no_look_ahead = never,
                                      .always_looks = always,
                                      .deterministic = deterministic};
    memset(layers, 0, sizeof layers);
    CHECK_EQ(ft_ahead_layers(&params), LAYERS);
    ft_ahead_init(&ahead, &params, layers);
    now = 1e6;
}

static void begin(bool never, bool always, bool deterministic)
{
    begin_on(&machine, never, always, deterministic);
}

static void tell(enum ft_op op, enum ft_wait wait, uint32_t layer, double from, double to)
{
    struct ft_observation o = {.op = op,
                               .lane = wait ? FT_LANE_DEVICE : FT_LANE_LINK,
                               .wait = wait,
                               .layer = layer,
                               .start_ns = from,
                               .duration_ns = to - from};
    ft_ahead_observe(&ahead, &o);
}

/* A layer whose experts are not in slots has decided at `now_ns`. Arrays [count]. */
static void decide(uint32_t layer, uint32_t count, const uint8_t *is_ahead, uint8_t *place, double now_ns)
{
    uint32_t expert[24], slot[24], victim[24];
    float predicted[24];
    for (uint32_t i = 0; i < count; i++) {
        expert[i] = i;
        slot[i] = FT_NONE;
    }
    struct ft_layer_in in = {.layer = layer,
                             .active_count = count,
                             .expert = expert,
                             .slot = slot,
                             .ahead = is_ahead,
                             .has_device = true,
                             .expert_bytes = 1000000,
                             .now_ns = now_ns};
    struct ft_layer_out out = {.place = place, .victim = victim, .predicted_ns = predicted};
    ft_ahead_decided(&ahead, &in, &out);
}

/* Layer `from` + 1 is foreseen at `now_ns`: slot [count] of its experts. */
static uint32_t foresee(uint32_t from, uint32_t count, const uint32_t *slot, uint32_t room, double now_ns,
                        uint32_t *chosen)
{
    uint32_t expert[8];
    for (uint32_t i = 0; i < count; i++)
        expert[i] = i;
    struct ft_foreseen f = {.layer = from + 1,
                            .from = from,
                            .count = count,
                            .expert = expert,
                            .slot = slot,
                            .room = room,
                            .now_ns = now_ns,
                            .expert_bytes = 1000000};
    return ft_ahead_choose(&ahead, &f, chosen);
}

static const uint32_t no_slots[3] = {FT_NONE, FT_NONE, FT_NONE};

/* What each layer foresees: 8 experts, the first of which is in a slot. */
static uint32_t choose(uint32_t from, uint32_t room, uint32_t *chosen)
{
    const uint32_t slot[8] = {7, FT_NONE, FT_NONE, FT_NONE, FT_NONE, FT_NONE, FT_NONE, FT_NONE};
    return foresee(from, 8, slot, room, 0, chosen);
}

/*
 * A step of layers with 3 copies of their own, `gap` ns between these and the next layer's decision; of what was copied
 * ahead each `good`-th is used. Returns the copies ahead behind layer 1.
 */
static uint32_t step(double gap, uint32_t good, double ahead_costs)
{
    double start[LAYERS], duration = 0;
    uint32_t copied = 0, behind_1 = 0, chosen[8];
    static uint32_t copies;
    for (uint32_t l = 0; l < LAYERS; l++) {
        uint8_t place[8], is_ahead[8] = {0};
        for (uint32_t i = 0; i < copied && i < 5; i++)
            is_ahead[i] = good && ++copies % good == 0;
        for (uint32_t i = 0; i < 8; i++)
            place[i] = i >= 5 || is_ahead[i] ? FT_PLACE_FETCH : FT_PLACE_CPU;
        decide(l, 8, is_ahead, place, 0);
        copied = l + 1 < LAYERS && ft_ahead_looks(&ahead) ? choose(l, 8, chosen) : 0;
        for (uint32_t i = 0; i < copied; i++)
            CHECK_EQ(chosen[i], i + 1); /* likeliest first, and not what a slot holds */
        behind_1 = l == 1 ? copied : behind_1;
        start[l] = now;
        duration += 3 * EACH + gap + copied * ahead_costs;
        now += 3 * EACH + gap;
    }
    for (uint32_t l = 0; l < LAYERS; l++) {
        tell(FT_OP_POLICY, FT_WAIT_NONE, l, start[l] - 1000, start[l]);
        tell(FT_OP_EXPERT_DEVICE, FT_WAIT_LINK, l, start[l] + 10000, start[l] + 3 * EACH);
    }
    struct ft_step_summary summary = {.rows = 1, .duration_ns = duration};
    ft_ahead_step_end(&ahead, &summary);
    return behind_1;
}

TEST(as_many_copies_go_ahead_as_fit_into_the_links_idle_time)
{
    begin(false, false, false);
    CHECK_EQ(step(2.2 * EACH, 1, 0), 0); /* nothing is known of the gaps */
    uint32_t last = 0;
    for (uint32_t i = 0; i < 200; i++)
        last = ft_ahead_looks(&ahead) ? step(2.2 * EACH, 1, 0) : (step(2.2 * EACH, 1, 0), last);
    CHECK_EQ(last, 2); /* a third one would not be done when the next layer asks */
    begin(false, false, false);
    for (uint32_t i = 0; i < 8; i++)
        last = step(0.3 * EACH, 2, 0);
    CHECK_EQ(last, 0); /* no idle time */
}

TEST(a_link_that_was_not_measured_is_learned)
{
    uint32_t last = 0;
    begin_on(NULL, false, false, false);
    for (uint32_t i = 0; i < 6; i++)
        last = step(5.4 * EACH, 2, 0);
    CHECK(last >= 2 && last <= 4); /* 12 GB/s would be 83 us for a copy */
    for (uint32_t i = 0; i < 90; i++)
        last = ft_ahead_looks(&ahead) ? step(5.4 * EACH, 2, 0) : (step(5.4 * EACH, 2, 0), last);
    CHECK_EQ(last, 5);
}

TEST(copies_that_nobody_asks_for_come_to_an_end_and_are_tried_again)
{
    begin(false, false, false);
    uint32_t looks = 0, last = 0;
    for (uint32_t i = 0; i < 300; i++) {
        bool on = ft_ahead_looks(&ahead);
        looks += on;
        last = on ? i : last;
        step(3 * EACH, 0, 0);
    }
    CHECK(looks < 100);
    CHECK(last > 60); /* another attempt */
}

TEST(copies_that_make_steps_longer_come_to_an_end)
{
    begin(false, false, false);
    uint32_t looks = 0;
    for (uint32_t i = 0; i < 60; i++)
        step(3 * EACH, 1, 40000);
    for (uint32_t i = 0; i < 10; i++) {
        looks += ft_ahead_looks(&ahead);
        step(3 * EACH, 1, 40000);
    }
    CHECK_EQ(looks, 0);
}

TEST(wishes_are_obeyed)
{
    uint32_t chosen[8];
    begin(true, true, false);
    CHECK(!ft_ahead_looks(&ahead));
    begin(false, false, true); /* deterministic: nothing is learned */
    CHECK(!ft_ahead_looks(&ahead));
    begin(false, true, true);
    CHECK(!ft_ahead_looks(&ahead));
    CHECK_EQ(choose(0, 8, chosen), 0);
    begin(false, true, false);
    CHECK_EQ(choose(0, 8, chosen), 1);
    for (uint32_t i = 0; i < 300; i++)
        step(0, 0, 90000);
    CHECK(ft_ahead_looks(&ahead));
    CHECK_EQ(choose(0, 1, chosen), 1);
}

/* ---- the queue of the link, against one that really takes `each` ---- */

struct link {
    double each, late, free; /* ns; when it has done all that was ordered */
};

/* A decode step of layers with `own` copies and `computed` experts of the CPU (40 us each) and 100 us from a layer's last
 * expert to the next decision. Returns how many copies that were made ahead were still on their way when their layer decided.
 */
static uint32_t timed_step(struct link *link, uint32_t own, uint32_t computed)
{
    double asked[LAYERS], seen[LAYERS], cpu_end[LAYERS];
    uint32_t copied = 0, unfinished = 0;
    for (uint32_t l = 0; l < LAYERS; l++) {
        uint32_t count = own + computed + copied, chosen[3];
        uint8_t place[24], is_ahead[24] = {0};
        for (uint32_t i = 0; i < count; i++) {
            is_ahead[i] = i >= own + computed;
            place[i] = i < own || is_ahead[i] ? FT_PLACE_FETCH : FT_PLACE_CPU;
        }
        asked[l] = now;
        unfinished += link->free > now;
        decide(l, count, is_ahead, place, now);
        link->free = fmax(link->free, now) + own * link->each;
        seen[l] = link->free + link->late;
        cpu_end[l] = now + computed * 40000.0;
        double end = fmax(copied || own ? seen[l] : 0, cpu_end[l]);
        now += 15000;
        copied = 0;
        if (l + 1 < LAYERS && ft_ahead_looks(&ahead)) {
            copied = foresee(l, 3, no_slots, 3, now, chosen);
            link->free = fmax(link->free, now) + copied * link->each;
        }
        now = fmax(end, now) + 100000;
    }
    for (uint32_t l = 0; l < LAYERS; l++) {
        tell(FT_OP_POLICY, FT_WAIT_NONE, l, asked[l], asked[l] + 8000);
        tell(FT_OP_EXPERT_DEVICE, FT_WAIT_LINK, l, asked[l] + 10000, fmax(seen[l], asked[l] + 15000));
        struct ft_observation o = {.op = FT_OP_EXPERT_DOWN,
                                   .lane = FT_LANE_CPU,
                                   .layer = l,
                                   .start_ns = cpu_end[l] - 10000,
                                   .duration_ns = 10000};
        if (computed)
            ft_ahead_observe(&ahead, &o);
    }
    struct ft_step_summary summary = {.rows = 1, .duration_ns = 1e6};
    ft_ahead_step_end(&ahead, &summary);
    return unfinished;
}

TEST(the_queue_learns_what_copies_take)
{
    static const double factors[] = {0.7, 1, 1.6};
    for (uint32_t i = 0; i < 3; i++) {
        struct link link = {.each = factors[i] * EACH, .late = 40000};
        struct ft_layer_in in = {.expert_bytes = 1000000};
        begin(false, false, false);
        for (uint32_t s = 0; s < 400; s++)
            (void)timed_step(&link, 1 + s % 2, 2);
        in.now_ns = now;
        CHECK_NEAR(ft_ahead_link_ns(&ahead, &in, 1), link.late + link.each, 6000);
        CHECK_NEAR(ft_ahead_link_ns(&ahead, &in, 2), link.late + 2 * link.each, 8000);
        in.now_ns = 0; /* nothing may depend on the time */
        CHECK(ft_ahead_link_ns(&ahead, &in, 1) == 0 && ft_ahead_link_busy(&ahead, &in) == 0);
    }
}

/* What one step teaches changes the next a little: steps of many copies would otherwise swing from one extreme to the
 * other. */
TEST(the_queue_settles_with_many_copies_too)
{
    struct link link = {.each = 1.1 * EACH, .late = 30000};
    struct ft_layer_in in = {.expert_bytes = 1000000};
    double least = INFINITY, most = 0;
    begin(false, false, false);
    for (uint32_t s = 0; s < 600; s++) {
        (void)timed_step(&link, 11 + s % 3, 4);
        in.now_ns = now;
        if (s < 400)
            continue;
        least = fmin(least, ft_ahead_link_ns(&ahead, &in, 12));
        most = fmax(most, ft_ahead_link_ns(&ahead, &in, 12));
    }
    CHECK_NEAR(least, link.late + 12 * link.each, 0.04 * 12 * link.each);
    CHECK_NEAR(most, link.late + 12 * link.each, 0.04 * 12 * link.each);
}

TEST(copies_ahead_are_done_when_the_next_layer_asks)
{
    struct link link = {.each = 1.3 * EACH, .late = 30000};
    uint32_t unfinished = 0, layers_seen = 0, chosen[8];
    begin(false, false, false);
    for (uint32_t s = 0; s < 600; s++) {
        uint32_t still = timed_step(&link, s % 3, 1 + s % 4);
        unfinished += s >= 300 ? still : 0;
        layers_seen += s >= 300 ? LAYERS : 0;
    }
    CHECK(unfinished * 5 <= layers_seen);
    /* What was ordered a moment ago is not done yet; later it is. */
    ahead.always = true;
    CHECK_EQ(foresee(0, 1, no_slots, 1, now, chosen), 1);
    struct ft_layer_in in = {.expert_bytes = 1000000, .now_ns = now + 10000};
    CHECK_NEAR(ft_ahead_link_busy(&ahead, &in), link.each - 10000, 8000);
    in.now_ns = now + 2 * link.each;
    CHECK(ft_ahead_link_busy(&ahead, &in) == 0);
}

TEST_MAIN(RUN(as_many_copies_go_ahead_as_fit_into_the_links_idle_time)
              RUN(a_link_that_was_not_measured_is_learned)
                  RUN(copies_that_nobody_asks_for_come_to_an_end_and_are_tried_again)
                      RUN(copies_that_make_steps_longer_come_to_an_end) RUN(wishes_are_obeyed)
                          RUN(the_queue_learns_what_copies_take) RUN(the_queue_settles_with_many_copies_too)
                              RUN(copies_ahead_are_done_when_the_next_layer_asks))
