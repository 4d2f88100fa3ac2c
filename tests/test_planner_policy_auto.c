/* SPDX-License-Identifier: Apache-2.0 */
/*
 * auto against fixed shares on a simulated machine that is not the one it was told of: routing with the
 * locality of real traffic, LRU slots, a link and CPU lanes with fixed costs, contention and noise. The truth
 * is computed here, from other formulas than the policy's.
 */
#include "planner/policies.h"
#include "planner/routing.h"
#include "tests/test.h"

#define EXPERTS 64u
#define TOPK 8u
#define LAYERS 12u
#define STEPS 480u
#define SLOTS (LAYERS * 20u)
#define EXPERT_BYTES 2764864u

/* What the machine really does. */
struct truth {
    double cpu, link;           /* bytes per s, alone */
    double cpu_both, link_both; /* share of it that is left while the other lane works */
    double cpu_fixed, link_fixed;
    double noise;
    uint32_t slow_from; /* layers from here on take `slow` times as long on both lanes; 0 = none */
    double slow;
};

struct result {
    double layer_ns;        /* mean of a layer, second half of the steps */
    double early_ns;        /* the same, layers 50 .. 250 */
    double fetched, missed; /* second half */
    uint32_t probes, repairs;
    uint32_t ahead, ahead_most; /* copies ahead: second half, and the most of one layer */
};

/* Room that the policy gets for copies ahead, and the device's time between two layers. */
static uint32_t ahead_max;
static double gap_ns = 300000;
static bool no_prefetch;
static bool prepares;        /* between two layers, as a GPU lane does */
static double ahead_cost_ns; /* that each copy ahead adds to its step, uncounted */

struct sim {
    const struct ft_policy *policy;
    void *state;
    struct truth truth;
    uint32_t slot_layer[SLOTS], slot_expert[SLOTS], slot_used[SLOTS], used[LAYERS][EXPERTS];
    uint8_t busy[SLOTS];
    uint64_t random;
    double now;
    struct result result;
};

static struct ft_model model = {.expert_count = EXPERTS, .topk = TOPK, .layer_count = LAYERS};
static struct ft_routing routing;
static struct ft_error err;

static double random_unit(struct sim *s)
{
    /* xorshift64: Marsaglia, "Xorshift RNGs", 2003 */
    s->random ^= s->random << 13;
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    return (double)(s->random >> 11) / 9007199254740992.0;
}

static void tell(struct sim *s, enum ft_op op, enum ft_lane lane, uint32_t layer, double from, double to)
{
    struct ft_observation o = {.op = op,
                               .lane = lane,
                               .wait = FT_WAIT_NONE,
                               .layer = layer,
                               .rows = 1,
                               .bytes = op == FT_OP_POLICY ? 0 : EXPERT_BYTES,
                               .start_ns = from,
                               .duration_ns = to - from};
    if (s->policy->observe)
        s->policy->observe(s->state, &o);
}

/* Both lanes begin together at full speed less what the other takes; when one is done the other speeds up. */
static double run_layer(struct sim *s, uint32_t layer, uint32_t fetched, uint32_t on_cpu)
{
    const struct truth *t = &s->truth;
    double wobble[2] = {1 + t->noise * (2 * random_unit(s) - 1), 1 + t->noise * (2 * random_unit(s) - 1)};
    double link = fetched * (double)EXPERT_BYTES / t->link * 1e9 * wobble[0];
    double cpu = on_cpu * (double)EXPERT_BYTES / t->cpu * 1e9 * wobble[1];
    if (t->slow_from && layer >= t->slow_from) {
        link *= t->slow;
        cpu *= t->slow;
    }
    double link_end = link, cpu_end = cpu;
    if (fetched && on_cpu) {
        double link_both = link / t->link_both, cpu_both = cpu / t->cpu_both;
        double first = FT_MIN(link_both, cpu_both);
        link_end = first + (link_both - first) * t->link_both;
        cpu_end = first + (cpu_both - first) * t->cpu_both;
    }
    link_end += fetched ? t->link_fixed : 0;
    cpu_end += on_cpu ? t->cpu_fixed : 0;
    tell(s, FT_OP_POLICY, FT_LANE_DEVICE, layer, s->now - 5000, s->now);
    for (uint32_t i = 1; i <= fetched; i++)
        tell(s, FT_OP_FETCH, FT_LANE_LINK, layer, s->now, s->now + link_end * i / fetched);
    for (uint32_t i = 1; i <= on_cpu; i++)
        tell(s, FT_OP_EXPERT_DOWN, FT_LANE_CPU, layer, s->now, s->now + cpu_end * i / on_cpu);
    return FT_MAX(link_end, cpu_end);
}

static void run_router(struct sim *s, uint32_t step, uint32_t layer, struct ft_step_summary *summary)
{
    uint32_t expert[TOPK], rows[TOPK], slot[TOPK], last[TOPK], victim[TOPK], count = 0;
    uint8_t place[TOPK], reason[TOPK];
    float predicted[TOPK];
    const uint16_t *ids = ft_routing_row(&routing, step - 1, layer, 0);
    for (uint32_t e = 0; e < EXPERTS; e++)
        for (uint32_t k = 0; k < TOPK; k++)
            if (ids[k] == e)
                expert[count++] = e;
    memset(s->busy, 0, sizeof s->busy);
    for (uint32_t i = 0; i < count; i++) {
        rows[i] = 1;
        last[i] = s->used[layer][expert[i]];
        s->used[layer][expert[i]] = step;
        slot[i] = FT_NONE;
        for (uint32_t j = 0; j < SLOTS; j++)
            if (s->slot_layer[j] == layer && s->slot_expert[j] == expert[i]) {
                slot[i] = j;
                s->slot_used[j] = step;
                s->busy[j] = 1;
            }
    }
    struct ft_layer_in in = {
        .step = step,
        .layer = layer,
        .active_count = count,
        .expert = expert,
        .rows = rows,
        .slot = slot,
        .last_used = last,
        .has_device = true,
        .expert_bytes = EXPERT_BYTES,
        .format = FT_FORMAT_NVFP4,
        .slots = {SLOTS, s->slot_layer, s->slot_expert, s->slot_used, s->busy, 0, SLOTS}};
    uint32_t ahead_layer[TOPK], ahead_expert[TOPK], ahead_victim[TOPK];
    struct ft_layer_out out = {.place = place,
                               .reason = reason,
                               .victim = victim,
                               .predicted_ns = predicted,
                               .prefetch_max = ahead_max,
                               .prefetch_layer = ahead_layer,
                               .prefetch_expert = ahead_expert,
                               .prefetch_victim = ahead_victim};
    s->policy->decide_layer(s->state, &in, &out);
    s->result.repairs += ft_policy_check_answer(&in, &out);
    uint32_t fetched = 0, on_cpu = 0;
    bool probe = false;
    for (uint32_t i = 0; i < count; i++) {
        fetched += place[i] == FT_PLACE_FETCH;
        on_cpu += place[i] == FT_PLACE_CPU;
        probe |= reason[i] == FT_REASON_PROBE;
        if (place[i] != FT_PLACE_FETCH)
            continue;
        s->slot_layer[victim[i]] = layer;
        s->slot_expert[victim[i]] = expert[i];
        s->slot_used[victim[i]] = step;
    }
    for (uint32_t i = 0; i < out.prefetch_count; i++) {
        bool computed_here = false;
        for (uint32_t j = 0; j < count; j++)
            computed_here |= place[j] == FT_PLACE_CPU && expert[j] == ahead_expert[i];
        CHECK(computed_here && ahead_layer[i] == layer);
        CHECK(s->slot_used[ahead_victim[i]] < step);
        s->slot_layer[ahead_victim[i]] = layer;
        s->slot_expert[ahead_victim[i]] = ahead_expert[i];
        s->slot_used[ahead_victim[i]] = step;
    }
    if (prepares && s->policy->prepare)
        s->policy->prepare(s->state, &in.slots, step);
    s->result.ahead += step > STEPS / 2 ? out.prefetch_count : 0;
    s->result.ahead_most = FT_MAX(s->result.ahead_most, out.prefetch_count);
    summary->misses += fetched + on_cpu;
    summary->fetches += fetched;
    s->result.probes += probe;
    double ns = run_layer(s, layer, fetched, on_cpu);
    s->now += ns + gap_ns + out.prefetch_count * ahead_cost_ns;
    uint32_t at = (step - 1) * LAYERS + layer;
    s->result.early_ns += at >= 50 && at < 250 ? ns : 0;
    if (step > STEPS / 2) {
        s->result.layer_ns += ns / (STEPS / 2 * LAYERS);
        s->result.fetched += fetched;
        s->result.missed += fetched + on_cpu;
    }
}

static struct result simulate(const struct ft_policy *policy, const struct ft_machine *believed,
                              const struct truth *truth, double share, bool deterministic)
{
    struct ft_policy_params params = {.model = &model,
                                      .machine = believed,
                                      .fetch_share = share,
                                      .slot_count = SLOTS,
                                      .deterministic = deterministic,
                                      .no_prefetch = no_prefetch};
    struct sim *s = calloc(1, sizeof *s);
    uint64_t bytes = ft_round_up(policy->state_bytes(&params), 64);
    void *state = aligned_alloc(64, bytes);
    if (!s || !state) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    s->policy = policy;
    s->state = state;
    memset(s->state, 0, bytes);
    s->truth = *truth;
    s->random = 88172645463325252u;
    s->now = 1e6;
    memset(s->slot_layer, 0xff, sizeof s->slot_layer);
    memset(s->slot_expert, 0xff, sizeof s->slot_expert);
    CHECK_OK(policy->init(s->state, &params, &err), &err);
    for (uint32_t step = 1; step <= STEPS; step++) {
        struct ft_step_summary summary = {.step = step, .rows = 1};
        double begin = s->now;
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            run_router(s, step, layer, &summary);
        summary.duration_ns = s->now - begin;
        if (policy->step_end)
            policy->step_end(s->state, &summary);
    }
    struct result result = s->result;
    result.early_ns /= 200;
    free(s->state);
    free(s);
    return result;
}

static const struct ft_machine told = {.link_bytes_per_s = 50e9,
                                       .link_overlap_bytes_per_s = 45e9,
                                       .cpu_expert_bytes_per_s = {[FT_FORMAT_NVFP4] = 60e9},
                                       .cpu_overlap_bytes_per_s = 54e9};
/* What `told` says, with the fixed costs that the policy assumes. */
static const struct truth as_told = {60e9, 50e9, 0.9, 0.9, 15000, 9000, 0, 0, 1};

static struct truth changed(double cpu, double link, double both, double fixed, double noise)
{
    struct truth t = as_told;
    t.cpu *= cpu;
    t.link *= link;
    t.cpu_both *= both;
    t.link_both *= both;
    t.cpu_fixed *= fixed;
    t.link_fixed *= fixed;
    t.noise = noise;
    return t;
}

static void make_routing(void)
{
    const struct ft_routing_options options = {.step_count = STEPS,
                                               .layer_count = LAYERS,
                                               .row_count = 1,
                                               .topk = TOPK,
                                               .expert_count = EXPERTS,
                                               .seed = FT_ROUTING_SEED};
    if (!routing.ids)
        CHECK_OK(ft_routing_generate(&options, &routing, &err), &err);
}

/* The best of the shares 0, 1/8 .. 1, each for a whole run with its own cache. */
static struct result best_share(const struct truth *truth, double *share)
{
    struct result best = {0};
    for (uint32_t i = 0; i <= TOPK; i++) {
        struct result r = simulate(&ft_policy_hybrid, &told, truth, (double)i / TOPK, false);
        if (i && r.layer_ns >= best.layer_ns)
            continue;
        best = r;
        *share = (double)i / TOPK;
    }
    return best;
}

/* early: how much slower than the best share after 50 layers; 0 = a lane is found out later, by probes. */
static void compare(const char *name, const struct ft_machine *believed, const struct truth *truth,
                    double early)
{
    double share = 0;
    struct result best = best_share(truth, &share),
                  mine = simulate(&ft_policy_auto, believed, truth, 0, false);
    printf("     %-34s best share %.3f %7.1f us, auto %7.1f us (%+.1f%%), layers 50..250 %7.1f us, fetched "
           "%.0f%%, %u probes\n",
           name, share, best.layer_ns / 1e3, mine.layer_ns / 1e3, 100 * (mine.layer_ns / best.layer_ns - 1),
           mine.early_ns / 1e3, 100 * mine.fetched / mine.missed, mine.probes);
    CHECK_EQ(mine.repairs, 0);
    CHECK(mine.layer_ns <= best.layer_ns * 1.03);
    CHECK(!(early > 0) || mine.early_ns <= best.early_ns * early);
}

TEST(a_true_belief_is_as_good_as_the_best_share)
{
    make_routing();
    compare("as told", &told, &as_told, 1.03);
    struct truth t = changed(1, 1, 1, 1, 0.3);
    compare("as told, 30% noise", &told, &t, 1.05);
}

TEST(a_wrong_belief_is_corrected)
{
    static const struct {
        const char *name;
        double cpu, link, both, fixed, noise;
    } cases[] = {{"CPU 60 times slower", 1 / 60.0, 1, 1, 1, 0},
                 {"CPU 60 times slower, noise", 1 / 60.0, 1, 1, 1, 0.3},
                 {"CPU 4 times slower", 0.25, 1, 1, 1, 0.1},
                 {"CPU 3 times faster", 3, 1, 1, 1, 0.1},
                 {"link 10 times slower", 1, 0.1, 1, 1, 0},
                 {"link 10 times slower, noise", 1, 0.1, 1, 1, 0.3},
                 {"link 3 times faster", 1, 3, 1, 1, 0.1},
                 {"equal rates", 50.0 / 60, 1, 1, 1, 0.1},
                 {"contention halves both", 1, 1, 0.5, 1, 0.1},
                 {"fixed costs 8 times higher", 1, 1, 1, 8, 0.1},
                 {"no fixed costs", 1, 1, 1, 0, 0.1}};
    make_routing();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct truth t = changed(cases[i].cpu, cases[i].link, cases[i].both, cases[i].fixed, cases[i].noise);
        compare(cases[i].name, &told, &t, 1.2);
    }
}

/* Banks in memory of two speeds: what a probe in a fast layer says does not hold for the others. */
TEST(layers_of_different_speed_do_not_mislead)
{
    make_routing();
    for (uint32_t from = 1; from <= 10; from += 3) {
        struct truth t = changed(1, 1, 0.75, 1, 0.1);
        char name[64];
        t.slow_from = from;
        t.slow = 2.2;
        snprintf(name, sizeof name, "%u of %u layers 2.2 times faster", from, LAYERS);
        compare(name, &told, &t, 0);
    }
}

TEST(a_belief_that_shuns_a_lane_is_found_out)
{
    struct ft_machine slow_cpu = told, slow_link = told;
    make_routing();
    slow_cpu.cpu_expert_bytes_per_s[FT_FORMAT_NVFP4] /= 60;
    slow_cpu.cpu_overlap_bytes_per_s /= 60;
    slow_link.link_bytes_per_s /= 10;
    slow_link.link_overlap_bytes_per_s /= 10;
    compare("told a CPU 60 times too slow", &slow_cpu, &as_told, 0);
    compare("told a link 10 times too slow", &slow_link, &as_told, 0);
}

TEST(nothing_measured_is_no_obstacle)
{
    static const struct ft_machine unknown;
    struct truth t = changed(0.1, 0.5, 1, 1, 0.1);
    make_routing();
    compare("nothing measured", &unknown, &as_told, 1.1);
    compare("nothing measured, slow CPU", &unknown, &t, 1.1);
}

TEST(deterministic_runs_neither_learn_nor_probe)
{
    struct truth slow = changed(1 / 60.0, 1, 1, 1, 0.2);
    make_routing();
    struct result first = simulate(&ft_policy_auto, &told, &as_told, 0, true),
                  second = simulate(&ft_policy_auto, &told, &slow, 0, true);
    CHECK_EQ(first.probes + second.probes, 0);
    CHECK(first.fetched == second.fetched && first.missed == second.missed);
    CHECK(second.layer_ns > 5 * first.layer_ns); /* it was told wrong, and kept to it */
}

/* The GPU's side of it is left out: copies ahead are there at the next use. */
TEST(the_links_idle_time_makes_experts_of_the_cpu_resident)
{
    make_routing();
    ahead_max = TOPK;
    no_prefetch = true;
    struct result without = simulate(&ft_policy_auto, &told, &as_told, 0, false);
    no_prefetch = false;
    struct result with = simulate(&ft_policy_auto, &told, &as_told, 0, false);
    printf("     misses in %u steps %.0f, with %u copies ahead %.0f; at most %u a layer\n", STEPS / 2,
           without.missed, with.ahead, with.missed, with.ahead_most);
    CHECK_EQ(without.ahead, 0);
    CHECK(with.ahead > 0);
    CHECK(with.missed < 0.96 * without.missed);
    CHECK(with.layer_ns < without.layer_ns);
    CHECK_EQ(with.repairs + without.repairs, 0);
    /* 55 us a copy and more: one fits into the gap, none, or it is not known */
    gap_ns = 75000;
    struct result one = simulate(&ft_policy_auto, &told, &as_told, 0, false);
    CHECK(one.ahead > 0 && one.ahead_most <= 2); /* 2: the CPU ended later than the link */
    gap_ns = 10000;
    struct result none = simulate(&ft_policy_auto, &told, &as_told, 0, false);
    CHECK(none.ahead < one.ahead / 10);
    gap_ns = 300000;
    CHECK_EQ(simulate(&ft_policy_auto, &told, &as_told, 0, true).ahead, 0);
    ahead_max = 0;
}

/* They are believed to cost nothing; when steps are longer with them, they end but for a trial now and then. */
TEST(copies_ahead_that_cost_time_come_to_an_end)
{
    make_routing();
    ahead_max = TOPK;
    uint32_t free_of_charge = simulate(&ft_policy_auto, &told, &as_told, 0, false).ahead;
    ahead_cost_ns = 50000;
    uint32_t costly = simulate(&ft_policy_auto, &told, &as_told, 0, false).ahead;
    printf("     %u copies ahead in %u steps, %u when each costs 50 us\n", free_of_charge, STEPS / 2, costly);
    CHECK(free_of_charge > 0 && costly < free_of_charge / 5);
    ahead_cost_ns = 0;
    ahead_max = 0;
}

/* Every expert in turn: none is used again before it is pushed out. */
TEST(what_is_not_used_again_is_not_copied_ahead)
{
    struct ft_routing locality;
    uint16_t *ids = malloc(sizeof *ids * STEPS * LAYERS * TOPK);
    make_routing();
    locality = routing;
    REQUIRE(ids != NULL);
    for (uint32_t step = 0; step < STEPS; step++)
        for (uint32_t i = 0; i < LAYERS * TOPK; i++)
            ids[step * LAYERS * TOPK + i] = (uint16_t)((step * TOPK + i % TOPK) % EXPERTS);
    routing.ids = ids;
    ahead_max = TOPK;
    struct result r = simulate(&ft_policy_auto, &told, &as_told, 0, false);
    printf("     %u copies ahead where nothing is used again\n", r.ahead);
    CHECK(r.ahead < STEPS / 2 * LAYERS / 10);
    ahead_max = 0;
    routing = locality;
    free(ids);
}

/* Victims found ahead of time are those that would have been found in time. */
TEST(what_is_prepared_changes_no_choice)
{
    make_routing();
    for (ahead_max = 0; ahead_max <= TOPK; ahead_max += TOPK) {
        struct result in_time = simulate(&ft_policy_auto, &told, &as_told, 0, false);
        prepares = true;
        struct result prepared = simulate(&ft_policy_auto, &told, &as_told, 0, false);
        prepares = false;
        CHECK(in_time.missed > 0 && in_time.missed == prepared.missed);
        CHECK(in_time.fetched == prepared.fetched && in_time.layer_ns == prepared.layer_ns);
        CHECK_EQ(in_time.ahead, prepared.ahead);
        CHECK_EQ(prepared.repairs, 0);
    }
    ahead_max = 0;
}

TEST_MAIN(RUN(a_true_belief_is_as_good_as_the_best_share) RUN(a_wrong_belief_is_corrected)
              RUN(layers_of_different_speed_do_not_mislead) RUN(a_belief_that_shuns_a_lane_is_found_out)
                  RUN(nothing_measured_is_no_obstacle) RUN(deterministic_runs_neither_learn_nor_probe)
                      RUN(the_links_idle_time_makes_experts_of_the_cpu_resident)
                          RUN(copies_ahead_that_cost_time_come_to_an_end)
                              RUN(what_is_not_used_again_is_not_copied_ahead)
                                  RUN(what_is_prepared_changes_no_choice) ft_routing_free(&routing);)
