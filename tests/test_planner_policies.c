/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/policies.h"
#include "planner/policy_replay.h"
#include "tests/test.h"

#define EXPERTS 24
#define SLOTS 12

struct scene {
    uint32_t active[EXPERTS], rows[EXPERTS], slot[EXPERTS], last[EXPERTS];
    uint32_t slot_layer[SLOTS], slot_expert[SLOTS], slot_used[SLOTS];
    uint8_t busy[SLOTS], ahead[EXPERTS];
    struct ft_layer_in in;
};

struct answer {
    uint8_t place[EXPERTS], reason[EXPERTS];
    uint32_t victim[EXPERTS];
    float predicted[EXPERTS];
    uint32_t prefetch[3][4];
    struct ft_layer_out out;
};

static struct ft_model model = {.expert_count = EXPERTS, .topk = 4};
static struct ft_machine machine;
static _Alignas(64) uint8_t memory[1 << 16];
static struct ft_error err;

static void answer_init(struct answer *a)
{
    memset(a, 0xa5, sizeof *a); /* a policy must write everything */
    a->out = (struct ft_layer_out){.place = a->place,
                                   .reason = a->reason,
                                   .victim = a->victim,
                                   .predicted_ns = a->predicted,
                                   .prefetch_max = 4,
                                   .prefetch_layer = a->prefetch[0],
                                   .prefetch_expert = a->prefetch[1],
                                   .prefetch_victim = a->prefetch[2]};
}

/* `active` experts 0, 1, .. of layer 2, `slots` free slots. */
static void scene_init(struct scene *s, uint32_t active, uint32_t slots)
{
    memset(s, 0, sizeof *s);
    for (uint32_t i = 0; i < EXPERTS; i++) {
        s->active[i] = i;
        s->rows[i] = 1;
        s->slot[i] = FT_NONE;
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        s->slot_layer[i] = s->slot_expert[i] = FT_NONE;
    s->in = (struct ft_layer_in){
        .step = 50,
        .layer = 2,
        .active_count = active,
        .expert = s->active,
        .rows = s->rows,
        .slot = s->slot,
        .last_used = s->last,
        .has_device = true,
        .expert_bytes = 4096,
        .slots = {slots, s->slot_layer, s->slot_expert, s->slot_used, s->busy, 0, slots}};
}

static void scene_fill(struct scene *s, uint32_t slot, uint32_t layer, uint32_t expert, uint32_t used)
{
    s->slot_layer[slot] = layer;
    s->slot_expert[slot] = expert;
    s->slot_used[slot] = used;
    for (uint32_t i = 0; i < s->in.active_count; i++)
        if (layer == s->in.layer && s->active[i] == expert)
            s->slot[i] = slot;
}

static void start(const struct ft_policy *policy, double share, const void *extra)
{
    struct ft_policy_params params = {
        .model = &model, .machine = &machine, .fetch_share = share, .slot_count = SLOTS, .extra = extra};
    CHECK(policy->state_bytes(&params) <= sizeof memory);
    memset(memory, 0, sizeof memory);
    CHECK_OK(policy->init(memory, &params, &err), &err);
}

static void decide(const struct ft_policy *policy, const struct scene *s, struct answer *a)
{
    answer_init(a);
    policy->decide_layer(memory, &s->in, &a->out);
}

static uint32_t count_place(const struct answer *a, uint32_t active, enum ft_place place)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < active; i++)
        count += a->place[i] == place;
    return count;
}

TEST(policies_are_found_by_name_and_strategy)
{
    const struct ft_policy *policy;
    for (uint32_t i = 0; i < ft_policies_count(); i++) {
        policy = ft_policies_get(i);
        CHECK_EQ(policy->abi, FT_POLICY_ABI);
        CHECK(ft_policies_find(policy->name) == policy);
        CHECK(strlen(ft_policies_text(i)) > 10);
    }
    CHECK(ft_policies_find("safe") == &ft_policy_safe);
    CHECK(ft_policies_find("nonsense") == NULL);
    CHECK_OK(ft_policies_find_for(&policy, FT_STRATEGY_HYBRID, &err), &err);
    CHECK(ft_policies_find(policy->name) ==
          policy); /* any policy of the list: README says how to put yours there */
    CHECK_OK(ft_policies_find_for(&policy, FT_STRATEGY_AUTO, &err), &err);
    CHECK(policy == &ft_policy_auto);
    CHECK_FAILS(ft_policies_find_for(&policy, FT_STRATEGY_COUNT, &err), FT_USAGE, "has no policy", &err);
}

TEST(offload_fetches_every_miss_into_the_oldest_slots)
{
    struct scene s;
    struct answer a;
    scene_init(&s, 3, 3);
    scene_fill(&s, 0, 2, 1, 5);
    scene_fill(&s, 1, 7, 9, 40);
    scene_fill(&s, 2, 7, 8, 30);
    s.last[2] = 45; /* more recently used than expert 0: it gets the better victim */
    start(&ft_policy_offload, 0, NULL);
    decide(&ft_policy_offload, &s, &a);
    CHECK_EQ(a.place[1], FT_PLACE_DEVICE);
    CHECK_EQ(a.reason[1], FT_REASON_RESIDENT);
    CHECK_EQ(a.place[0], FT_PLACE_FETCH);
    CHECK_EQ(a.place[2], FT_PLACE_FETCH);
    CHECK_EQ(a.reason[2], FT_REASON_STRATEGY);
    CHECK_EQ(a.victim[2], 2);
    CHECK_EQ(a.victim[0], 1);
    CHECK_EQ(a.out.prefetch_count, 0);
}

TEST(with_one_slot_offload_fetches_in_waves)
{
    struct scene s;
    struct answer a;
    scene_init(&s, 4, 1);
    start(&ft_policy_offload, 0, NULL);
    decide(&ft_policy_offload, &s, &a);
    CHECK_EQ(count_place(&a, 4, FT_PLACE_FETCH), 4);
    for (uint32_t i = 0; i < 4; i++)
        CHECK_EQ(a.victim[i], 0);
    CHECK_EQ(ft_policy_check_answer(&s.in, &a.out), 0);
    scene_fill(&s, 0, 2, 3, 1); /* the only slot holds an expert that this layer reads */
    decide(&ft_policy_offload, &s, &a);
    CHECK_EQ(a.place[3], FT_PLACE_DEVICE);
    CHECK_EQ(count_place(&a, 4, FT_PLACE_CPU), 3);
    CHECK_EQ(a.reason[0], FT_REASON_NO_SLOT);
    s.slot[3] = FT_NONE;
    s.slot_layer[0] = 5;
    s.busy[0] = 1;
    decide(&ft_policy_offload, &s, &a);
    CHECK_EQ(count_place(&a, 4, FT_PLACE_CPU), 4);
    start(&ft_policy_hybrid, 1, NULL); /* hybrid has the CPU as a way out: no waves */
    s.busy[0] = 0;
    decide(&ft_policy_hybrid, &s, &a);
    CHECK_EQ(count_place(&a, 4, FT_PLACE_FETCH), 1);
    CHECK_EQ(ft_policy_check_answer(&s.in, &a.out), 0);
}

TEST(prefill_stages_and_takes_no_slot)
{
    struct scene s;
    struct answer a;
    scene_init(&s, 4, 4);
    s.in.prefill = true;
    memset(s.busy, 1, sizeof s.busy);
    const struct ft_policy *policies[] = {&ft_policy_offload, &ft_policy_fused, &ft_policy_hybrid};
    for (int p = 0; p < 3; p++) {
        start(policies[p], 1, NULL);
        decide(policies[p], &s, &a);
        CHECK_EQ(count_place(&a, 4, FT_PLACE_FETCH), 4);
        CHECK_EQ(a.victim[0], FT_NONE);
        CHECK_EQ(a.reason[0], FT_REASON_STAGED);
    }
}

TEST(without_a_device_all_is_cpu)
{
    struct scene s;
    struct answer a;
    scene_init(&s, 5, 0);
    s.in.has_device = false;
    struct ft_replay nothing = {0};
    for (uint32_t p = 0; p < ft_policies_count(); p++) {
        start(ft_policies_get(p), 0.7, &nothing);
        decide(ft_policies_get(p), &s, &a);
        CHECK_EQ(count_place(&a, 5, FT_PLACE_CPU), 5);
        CHECK_EQ(a.reason[0], FT_REASON_NO_DEVICE);
    }
}

TEST(cpu_computes_misses_and_uses_what_is_resident)
{
    struct scene s;
    struct answer a;
    scene_init(&s, 3, 4);
    scene_fill(&s, 1, 2, 2, 3);
    start(&ft_policy_cpu, 1, NULL);
    decide(&ft_policy_cpu, &s, &a);
    CHECK_EQ(count_place(&a, 3, FT_PLACE_CPU), 2);
    CHECK_EQ(a.reason[0], FT_REASON_STRATEGY);
    CHECK_EQ(a.place[2], FT_PLACE_DEVICE);
}

/* The integer neighbour with the smaller maximum, by trying every x. */
static double end_of(double share, uint32_t fetched, uint32_t misses)
{
    double link = fetched ? fetched / share : 0,
           cpu = misses > fetched ? (misses - fetched) / (1 - share) : 0;
    return link > cpu ? link : cpu;
}

TEST(hybrid_fetches_the_share_that_ends_first)
{
    struct scene s;
    struct answer a;
    static const double shares[] = {0, 0.1, 0.2776, 1.0 / 3, 0.5, 0.62, 0.9, 0.999, 1};
    for (size_t f = 0; f < sizeof shares / sizeof shares[0]; f++)
        for (uint32_t misses = 0; misses <= SLOTS; misses++) {
            scene_init(&s, misses, SLOTS);
            start(&ft_policy_hybrid, shares[f], NULL);
            decide(&ft_policy_hybrid, &s, &a);
            uint32_t fetched = count_place(&a, misses, FT_PLACE_FETCH);
            for (uint32_t x = 0; x <= misses; x++)
                CHECK(end_of(shares[f], fetched, misses) <= end_of(shares[f], x, misses) * (1 + 1e-12));
        }
    scene_init(&s, 6, SLOTS); /* the published box: 2 would take 7.2 on the link, 1 leaves 6.9 to the CPU */
    start(&ft_policy_hybrid, 8.41 / 30.3, NULL);
    decide(&ft_policy_hybrid, &s, &a);
    CHECK_EQ(count_place(&a, 6, FT_PLACE_FETCH), 1);
}

TEST(hybrid_fetches_the_most_recently_used)
{
    struct scene s;
    struct answer a;
    scene_init(&s, 6, SLOTS);
    s.last[4] = 49;
    s.last[1] = 48;
    s.last[5] = 48;
    s.last[0] = 2;
    start(&ft_policy_hybrid, 0.34, NULL);
    decide(&ft_policy_hybrid, &s, &a);
    CHECK_EQ(count_place(&a, 6, FT_PLACE_FETCH), 2);
    CHECK_EQ(a.place[4], FT_PLACE_FETCH);
    CHECK_EQ(a.place[1], FT_PLACE_FETCH); /* a tie goes to the lower expert */
    CHECK_EQ(a.reason[1], FT_REASON_SHARE);
    CHECK_EQ(a.reason[5], FT_REASON_SHARE_REST);
}

/* What was copied ahead costs the link nothing: it is fetched besides the share, and whatever the costs say. */
TEST(what_was_copied_ahead_is_fetched)
{
    struct scene s;
    struct answer a;
    const struct ft_policy *policies[] = {&ft_policy_hybrid, &ft_policy_auto, &ft_policy_offload};
    for (uint32_t p = 0; p < 3; p++)
        for (uint32_t misses = 3; misses <= SLOTS; misses++) {
            scene_init(&s, misses, SLOTS);
            s.in.ahead = s.ahead;
            s.ahead[1] = 1;
            s.ahead[misses - 1] = 1;
            start(policies[p], 0, NULL);
            decide(policies[p], &s, &a);
            CHECK_EQ(a.place[1], FT_PLACE_FETCH);
            CHECK_EQ(a.place[misses - 1], FT_PLACE_FETCH);
            if (p == 0)
                CHECK_EQ(count_place(&a, misses, FT_PLACE_FETCH), 2);
            CHECK_EQ(ft_policy_check_answer(&s.in, &a.out), 0);
        }
}

TEST(template_fetches_what_was_used_lately)
{
    struct scene s;
    struct answer a;
    scene_init(&s, 4, SLOTS);
    s.last[1] = 45;
    s.last[2] = 20;
    start(&ft_policy_template, 0, NULL);
    decide(&ft_policy_template, &s, &a);
    CHECK_EQ(count_place(&a, 4, FT_PLACE_FETCH), 1);
    CHECK_EQ(a.place[1], FT_PLACE_FETCH);
}

TEST(replay_repeats_and_counts_departures)
{
    struct scene s;
    struct answer a;
    struct ft_trace_record records[5] = {
        {.kind = FT_RECORD_CHOICE, .layer = 2, .expert = 2, .place = FT_PLACE_CPU, .slot = FT_NONE},
        {.kind = FT_RECORD_JOB, .layer = 2, .expert = 0},
        {.kind = FT_RECORD_CHOICE, .layer = 2, .expert = 0, .place = FT_PLACE_FETCH, .slot = 3},
        {.kind = FT_RECORD_CHOICE, .layer = 2, .expert = 1, .place = FT_PLACE_DEVICE, .slot = 0},
        {.kind = FT_RECORD_CHOICE, .layer = 3, .expert = 0, .place = FT_PLACE_CPU, .slot = FT_NONE}};
    struct ft_trace_step step = {.step = 50, .record_count = 5, .records = records};
    struct ft_replay_choice choices[8];
    struct ft_replay replay = {.choices = choices};
    CHECK_EQ(ft_replay_count(&step), 4);
    ft_replay_append(&replay, &step);
    CHECK_EQ(replay.count, 4);
    CHECK_OK(ft_replay_sort(&replay, &err), &err);
    scene_init(&s, 3, 4);
    scene_fill(&s, 0, 2, 1, 1);
    start(&ft_policy_replay, 0, &replay);
    decide(&ft_policy_replay, &s, &a);
    CHECK_EQ(a.place[0], FT_PLACE_FETCH);
    CHECK_EQ(a.victim[0], 3);
    CHECK_EQ(a.reason[0], FT_REASON_REPLAY);
    CHECK_EQ(a.place[1], FT_PLACE_DEVICE);
    CHECK_EQ(a.place[2], FT_PLACE_CPU);
    CHECK_EQ(ft_replay_departures(memory), 0);
    s.busy[3] = 1;       /* the recorded victim cannot be taken */
    s.slot[1] = FT_NONE; /* recorded as resident, missing now */
    decide(&ft_policy_replay, &s, &a);
    CHECK_EQ(a.place[0], FT_PLACE_CPU);
    CHECK_EQ(a.place[1], FT_PLACE_CPU);
    CHECK_EQ(ft_replay_departures(memory), 2);
    s.in.step = 51; /* not in the trace at all */
    decide(&ft_policy_replay, &s, &a);
    CHECK_EQ(ft_replay_departures(memory), 5);
    CHECK_EQ(ft_policy_replay.departures(memory), 5);
    ft_replay_append(&replay, &step);
    CHECK_FAILS(ft_replay_sort(&replay, &err), FT_FORMAT, "two choices for expert 0", &err);
    struct ft_policy_params params = {0};
    CHECK_FAILS(ft_policy_replay.init(memory, &params, &err), FT_USAGE, "--replay", &err);
}

TEST(replay_knows_the_layers_of_recorded_steps)
{
    struct ft_policy_step steps[4], found;
    struct ft_replay replay = {.steps = steps};
    const struct ft_trace_step recorded[] = {{.step = 3, .prefill = 1, .layer_begin = 0, .layer_end = 2},
                                             {.step = 4, .layer_begin = 0, .layer_end = 5},
                                             {.step = 7, .prefill = 1, .layer_begin = 2, .layer_end = 5}};
    for (uint32_t i = 0; i < 3; i++)
        ft_replay_append(&replay, &recorded[i]);
    CHECK_EQ(replay.step_count, 3);
    start(&ft_policy_replay, 0, &replay);
    for (uint32_t i = 0; i < 3; i++) {
        REQUIRE(ft_policy_replay.find_step(memory, recorded[i].step, &found));
        CHECK_EQ(found.prefill, recorded[i].prefill);
        CHECK_EQ(found.layer_begin, recorded[i].layer_begin);
        CHECK_EQ(found.layer_end, recorded[i].layer_end);
    }
    CHECK(!ft_policy_replay.find_step(memory, 2, &found));
    CHECK(!ft_policy_replay.find_step(memory, 5, &found));
    CHECK(!ft_policy_replay.find_step(memory, 8, &found));
    replay.step_count = 0;
    CHECK(!ft_policy_replay.find_step(memory, 3, &found));
}

static uint64_t random_state = 88172645463325252u;
static uint32_t random_below(uint32_t bound)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 33) % bound;
}

static void random_scene(struct scene *s)
{
    scene_init(s, 0, random_below(SLOTS + 1));
    uint32_t active = 0;
    for (uint32_t e = 0; e < EXPERTS; e++)
        if (random_below(3) == 0)
            s->active[active++] = e;
    s->in.active_count = active;
    s->in.prefill = random_below(4) == 0;
    s->in.has_device = random_below(8) != 0;
    s->in.no_staging = random_below(3) == 0;
    for (uint32_t i = 0; i < active; i++) {
        s->rows[i] = 1 + random_below(5);
        s->last[i] = random_below(50);
    }
    if (random_below(2)) { /* one GPU of several has the layer: the other slots are not its */
        s->in.slots.begin = random_below(s->in.slots.count + 1);
        s->in.slots.end = s->in.slots.begin + random_below(s->in.slots.count - s->in.slots.begin + 1);
    }
    for (uint32_t i = 0; i < s->in.slots.count; i++) {
        bool own = i >= s->in.slots.begin && i < s->in.slots.end;
        uint32_t layer = random_below(4) + (own ? 0 : 4), expert = random_below(EXPERTS);
        bool twice = false;
        for (uint32_t j = 0; j < i; j++)
            twice = twice || (s->slot_layer[j] == layer && s->slot_expert[j] == expert);
        s->busy[i] = random_below(4) == 0;
        if (random_below(4) && !twice)
            scene_fill(s, i, layer, expert, random_below(50));
    }
    s->in.ahead = random_below(2) ? s->ahead : NULL;
    for (uint32_t i = 0; i < active; i++)
        s->ahead[i] = s->slot[i] == FT_NONE && !s->in.prefill && s->in.has_device && random_below(3) == 0;
}

TEST(random_layers_need_no_repair_and_the_same_input_gives_the_same_output)
{
    struct scene s, kept;
    struct answer first, second;
    struct ft_replay nothing = {0};
    for (uint32_t p = 0; p < ft_policies_count(); p++) {
        const struct ft_policy *policy = ft_policies_get(p);
        for (int round = 0; round < 3000; round++) {
            random_scene(&s);
            kept = s;
            start(policy, random_below(11) / 10.0, &nothing);
            decide(policy, &s, &first);
            decide(policy, &s, &second);
            CHECK(memcmp(&s, &kept, sizeof s) == 0); /* inputs are const */
            uint32_t n = s.in.active_count;
            CHECK(memcmp(first.place, second.place, n) == 0 && memcmp(first.reason, second.reason, n) == 0);
            CHECK(memcmp(first.victim, second.victim, n * sizeof first.victim[0]) == 0);
            for (uint32_t i = 0; i < n; i++)
                CHECK(first.reason[i] != FT_REASON_NONE);
            CHECK_EQ(ft_policy_check_answer(&s.in, &first.out), 0);
        }
    }
}

/* Layers of two GPUs in turn, with the pauses between them: what is kept of one GPU's slots is not used for the other. */
TEST(a_layer_takes_only_slots_of_its_own_gpu)
{
    struct scene s;
    struct answer a;
    struct ft_replay nothing = {0};
    for (uint32_t p = 0; p < ft_policies_count(); p++) {
        const struct ft_policy *policy = ft_policies_get(p);
        start(policy, 1, &nothing);
        uint32_t fetched = 0;
        for (uint32_t step = 1; step < 40; step++)
            for (uint32_t gpu = 0; gpu < 2; gpu++) {
                uint32_t half = SLOTS / 2;
                scene_init(&s, 3, SLOTS);
                s.in.step = 100 + step;
                for (uint32_t i = 0; i < SLOTS; i++)
                    scene_fill(&s, i, 8 + i / half, i, 50 + random_below(40));
                struct ft_slot_view view = s.in.slots;
                view.begin = gpu * half;
                view.end = view.begin + half;
                if (policy->prepare && random_below(2))
                    policy->prepare(memory, &view, s.in.step - 1);
                s.in.slots = view;
                s.in.layer = 8 + gpu;
                for (uint32_t i = 0; i < 3; i++) {
                    s.active[i] = EXPERTS - 3 + i;
                    s.last[i] = s.in.step - 1;
                }
                decide(policy, &s, &a);
                uint32_t oldest = view.begin;
                for (uint32_t i = view.begin; i < view.end; i++)
                    if (s.slot_used[i] < s.slot_used[oldest])
                        oldest = i;
                bool has_oldest = false;
                for (uint32_t i = 0; i < 3; i++) {
                    if (a.place[i] != FT_PLACE_FETCH)
                        continue;
                    fetched++;
                    has_oldest |= a.victim[i] == oldest;
                    CHECK(a.victim[i] >= view.begin && a.victim[i] < view.end);
                }
                CHECK(has_oldest || count_place(&a, 3, FT_PLACE_FETCH) == 0);
                CHECK_EQ(ft_policy_check_answer(&s.in, &a.out), 0);
                if (policy == &ft_policy_offload) { /* a victim of the other GPU is repaired */
                    a.victim[0] = (1 - gpu) * half;
                    CHECK_EQ(ft_policy_check_answer(&s.in, &a.out), 1);
                    CHECK(a.victim[0] >= view.begin && a.victim[0] < view.end);
                }
            }
        if (policy == &ft_policy_offload || policy == &ft_policy_hybrid)
            CHECK(fetched > 100);
    }
}

TEST_MAIN(RUN(a_layer_takes_only_slots_of_its_own_gpu) RUN(policies_are_found_by_name_and_strategy) RUN(
    offload_fetches_every_miss_into_the_oldest_slots) RUN(with_one_slot_offload_fetches_in_waves)
              RUN(prefill_stages_and_takes_no_slot) RUN(without_a_device_all_is_cpu) RUN(
                  cpu_computes_misses_and_uses_what_is_resident) RUN(hybrid_fetches_the_share_that_ends_first)
                  RUN(hybrid_fetches_the_most_recently_used) RUN(what_was_copied_ahead_is_fetched)
                      RUN(template_fetches_what_was_used_lately) RUN(replay_repeats_and_counts_departures)
                          RUN(replay_knows_the_layers_of_recorded_steps)
                              RUN(random_layers_need_no_repair_and_the_same_input_gives_the_same_output))
