/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/policy.h"
#include "tests/test.h"

#define MOST 8

/* A layer with `active` experts 10, 20, .. and `slots` free slots. */
struct scene {
    uint32_t expert[MOST], rows[MOST], slot[MOST], expert_used[MOST];
    uint32_t slot_layer[MOST], slot_expert[MOST], slot_used[MOST];
    uint8_t busy[MOST];
    struct ft_layer_in in;
    uint8_t place[MOST], reason[MOST];
    uint32_t victim[MOST], pre_layer[MOST], pre_expert[MOST], pre_victim[MOST];
    float predicted[MOST];
    struct ft_layer_out out;
};

static void scene_init(struct scene *s, uint32_t active, uint32_t slots)
{
    memset(s, 0, sizeof *s);
    for (uint32_t i = 0; i < MOST; i++) {
        s->expert[i] = 10 * (i + 1);
        s->rows[i] = 1;
        s->slot[i] = s->slot_layer[i] = s->slot_expert[i] = s->victim[i] = FT_NONE;
        s->place[i] = FT_PLACE_CPU;
    }
    s->in = (struct ft_layer_in){
        .step = 5,
        .layer = 3,
        .active_count = active,
        .expert = s->expert,
        .rows = s->rows,
        .slot = s->slot,
        .last_used = s->expert_used,
        .has_device = true,
        .slots = {slots, s->slot_layer, s->slot_expert, s->slot_used, s->busy, 0, slots}};
    s->out = (struct ft_layer_out){.place = s->place,
                                   .reason = s->reason,
                                   .victim = s->victim,
                                   .predicted_ns = s->predicted,
                                   .prefetch_max = MOST,
                                   .prefetch_layer = s->pre_layer,
                                   .prefetch_expert = s->pre_expert,
                                   .prefetch_victim = s->pre_victim};
}

static void scene_fill(struct scene *s, uint32_t slot, uint32_t layer, uint32_t expert, uint32_t used)
{
    s->slot_layer[slot] = layer;
    s->slot_expert[slot] = expert;
    s->slot_used[slot] = used;
    for (uint32_t i = 0; i < s->in.active_count; i++)
        if (layer == s->in.layer && s->expert[i] == expert)
            s->slot[i] = slot;
}

TEST(names_are_known_and_bounded)
{
    CHECK(strcmp(ft_place_name(FT_PLACE_FETCH), "fetch") == 0);
    CHECK(strcmp(ft_place_name((enum ft_place)77), "?") == 0);
    CHECK(strcmp(ft_reason_text(FT_REASON_NO_SLOT), "no slot can be taken") == 0);
    CHECK(strcmp(ft_reason_text((enum ft_reason)200), "?") == 0);
}

TEST(safe_policy_uses_what_is_resident_and_needs_no_state)
{
    struct scene s;
    struct ft_error err;
    struct ft_policy_params params = {0};
    scene_init(&s, 3, 4);
    scene_fill(&s, 2, 3, 20, 1);
    CHECK_EQ(ft_policy_safe.abi, FT_POLICY_ABI);
    CHECK_EQ(ft_policy_safe.state_bytes(&params), 0);
    CHECK_OK(ft_policy_safe.init(NULL, &params, &err), &err);
    ft_policy_safe.decide_layer(NULL, &s.in, &s.out);
    CHECK_EQ(s.place[0], FT_PLACE_CPU);
    CHECK_EQ(s.reason[0], FT_REASON_STRATEGY);
    CHECK_EQ(s.place[1], FT_PLACE_DEVICE);
    CHECK_EQ(s.reason[1], FT_REASON_RESIDENT);
    CHECK_EQ(s.victim[1], FT_NONE);
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 0);
    s.in.has_device = false;
    ft_policy_safe.decide_layer(NULL, &s.in, &s.out);
    CHECK_EQ(s.place[1], FT_PLACE_CPU);
    CHECK_EQ(s.reason[1], FT_REASON_NO_DEVICE);
}

TEST(right_answers_are_left_alone)
{
    struct scene s;
    scene_init(&s, 3, 2);
    scene_fill(&s, 0, 3, 10, 1);
    s.place[0] = FT_PLACE_DEVICE;
    s.place[1] = s.place[2] = FT_PLACE_FETCH;
    s.victim[1] = s.victim[2] = 1; /* the same slot twice: two waves */
    s.predicted[1] = 12.5f;
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 0);
    CHECK_EQ(s.victim[2], 1);
    s.place[0] = FT_PLACE_CPU; /* resident but computed on the CPU is allowed */
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 0);
}

TEST(impossible_places_are_repaired)
{
    struct scene s;
    scene_init(&s, 4, 2);
    scene_fill(&s, 0, 3, 10, 1);
    s.place[0] = FT_PLACE_FETCH; /* resident already */
    s.victim[0] = 1;
    s.place[1] = FT_PLACE_DEVICE; /* not resident */
    s.place[2] = 9;               /* no such place */
    s.victim[3] = 1;              /* CPU takes no victim */
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 4);
    CHECK_EQ(s.place[0], FT_PLACE_DEVICE);
    CHECK_EQ(s.reason[0], FT_REASON_RESIDENT);
    CHECK_EQ(s.victim[0], FT_NONE);
    CHECK_EQ(s.place[1], FT_PLACE_CPU);
    CHECK_EQ(s.place[2], FT_PLACE_CPU);
    CHECK_EQ(s.victim[3], FT_NONE);
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 0);
}

TEST(without_staging_buffers_a_prefill_fetches_nothing)
{
    struct scene s;
    scene_init(&s, 3, 3);
    s.in.prefill = true;
    s.place[1] = FT_PLACE_FETCH;
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 0);
    s.in.no_staging = true;
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 1);
    CHECK_EQ(s.place[1], FT_PLACE_CPU);
    CHECK_EQ(s.reason[1], FT_REASON_NO_SLOT);
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 0);
}

TEST(bad_victims_get_a_slot_or_become_cpu)
{
    struct scene s;
    scene_init(&s, 3, 3);
    scene_fill(&s, 0, 3, 10, 1);
    scene_fill(&s, 1, 7, 99, 4);
    scene_fill(&s, 2, 7, 98, 2);
    s.place[0] = FT_PLACE_DEVICE;
    s.place[1] = s.place[2] = FT_PLACE_FETCH;
    s.victim[1] = 0;  /* used by this layer */
    s.victim[2] = 55; /* does not exist */
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 2);
    CHECK_EQ(s.victim[1], 2); /* the oldest */
    CHECK_EQ(s.victim[2], 1);
    s.busy[1] = s.busy[2] = 1;
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 2);
    CHECK_EQ(s.place[1], FT_PLACE_CPU);
    CHECK_EQ(s.reason[1], FT_REASON_NO_SLOT);
    CHECK_EQ(s.victim[2], FT_NONE);
}

TEST(prefill_fetches_have_no_victim_and_no_device_means_cpu)
{
    struct scene s;
    scene_init(&s, 2, 2);
    s.in.prefill = true;
    s.place[0] = FT_PLACE_FETCH;
    s.victim[0] = 1;
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 1);
    CHECK_EQ(s.place[0], FT_PLACE_FETCH);
    CHECK_EQ(s.victim[0], FT_NONE);
    s.in.has_device = false;
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 1);
    CHECK_EQ(s.place[0], FT_PLACE_CPU);
    CHECK_EQ(s.reason[0], FT_REASON_NO_DEVICE);
}

TEST(absurd_reasons_predictions_and_prefetches_are_repaired)
{
    struct scene s;
    scene_init(&s, 2, 4);
    s.reason[0] = 200;
    s.predicted[1] = NAN;
    s.out.prefetch_count = 4;
    for (uint32_t i = 0; i < 4; i++) {
        s.pre_layer[i] = 5;
        s.pre_expert[i] = i;
    }
    s.pre_victim[0] = 1;
    s.pre_victim[1] = 1; /* twice */
    s.pre_victim[2] = 3; /* fine */
    s.pre_victim[3] = 2;
    s.pre_layer[3] = FT_NONE; /* no such layer */
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), 4);
    CHECK_EQ(s.reason[0], FT_REASON_NONE);
    CHECK(s.predicted[1] == 0);
    CHECK_EQ(s.out.prefetch_count, 2);
    CHECK_EQ(s.pre_victim[1], 3);
    CHECK_EQ(s.pre_expert[1], 2);
    s.out.prefetch_count = MOST + 3; /* more than there is room for */
    for (uint32_t i = 0; i < MOST; i++)
        s.pre_victim[i] = 77;
    CHECK_EQ(ft_policy_check_answer(&s.in, &s.out), MOST + 3);
    CHECK_EQ(s.out.prefetch_count, 0);
}

TEST_MAIN(RUN(names_are_known_and_bounded) RUN(safe_policy_uses_what_is_resident_and_needs_no_state)
              RUN(right_answers_are_left_alone) RUN(impossible_places_are_repaired)
                  RUN(without_staging_buffers_a_prefill_fetches_nothing)
                      RUN(bad_victims_get_a_slot_or_become_cpu)
                          RUN(prefill_fetches_have_no_victim_and_no_device_means_cpu)
                              RUN(absurd_reasons_predictions_and_prefetches_are_repaired))
