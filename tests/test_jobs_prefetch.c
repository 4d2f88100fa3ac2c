/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prefetched experts: a policy that copies ahead what the next layer used a step ago. Whatever the link's
 * delays, the texts are the reference's, and every prefetch is accounted for.
 */
#include "jobs/session_internal.h"
#include "tests/fixture_session.h"

/* What each layer used in the step before. */
struct memory {
    uint32_t layer_count, topk, count[FT_LAYERS_MAX];
    uint32_t expert[FT_LAYERS_MAX][FT_TOPK_MAX];
    uint64_t random;
};

static uint64_t memory_bytes(const struct ft_policy_params *params)
{
    (void)params;
    return sizeof(struct memory);
}

static int memory_init(void *state, const struct ft_policy_params *params, struct ft_error *err)
{
    struct memory *m = state;
    (void)err;
    m->layer_count = params->model->layer_count;
    m->topk = params->model->topk;
    m->random = 99;
    return FT_OK;
}

static bool is_active(const struct ft_layer_in *in, uint32_t slot)
{
    for (uint32_t i = 0; i < in->active_count; i++)
        if (in->slot[i] == slot)
            return true;
    return false;
}

/* The oldest slot that may be taken and is not in taken [count]. */
static uint32_t oldest(const struct ft_layer_in *in, const uint32_t *taken, uint32_t count)
{
    uint32_t best = FT_NONE;
    for (uint32_t s = 0; s < in->slots.count; s++) {
        bool free = !in->slots.busy[s] && !is_active(in, s);
        for (uint32_t i = 0; i < count && free; i++)
            free = taken[i] != s;
        if (free && (best == FT_NONE || in->slots.last_used[s] < in->slots.last_used[best]))
            best = s;
    }
    return best;
}

static bool is_resident(const struct ft_layer_in *in, uint32_t layer, uint32_t expert)
{
    for (uint32_t s = 0; s < in->slots.count; s++)
        if (in->slots.layer[s] == layer && in->slots.expert[s] == expert)
            return true;
    return false;
}

static void ask_ahead(struct memory *m, const struct ft_layer_in *in, struct ft_layer_out *out,
                      uint32_t *taken, uint32_t count)
{
    uint32_t next = (in->layer + 1) % m->layer_count;
    for (uint32_t i = 0; i < m->count[next] && out->prefetch_count < out->prefetch_max; i++) {
        uint32_t victim = oldest(in, taken, count);
        if (victim == FT_NONE || is_resident(in, next, m->expert[next][i]))
            continue;
        taken[count++] = victim;
        out->prefetch_layer[out->prefetch_count] = next;
        out->prefetch_expert[out->prefetch_count] = m->expert[next][i];
        out->prefetch_victim[out->prefetch_count++] = victim;
    }
}

/* Misses: odd experts are fetched (decode), the others go to the CPU. */
static void decide_ahead(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    struct memory *m = state;
    uint32_t taken[FT_TOPK_MAX + FT_PREFETCH_MAX + 64], count = 0;
    ft_policy_safe.decide_layer(NULL, in, out);
    CHECK(!in->prefill || out->prefetch_max == 0);
    CHECK(out->prefetch_max <= FT_PREFETCH_MAX);
    if (in->prefill)
        return;
    for (uint32_t i = 0; i < in->active_count && count < 64; i++) {
        uint32_t victim = in->slot[i] == FT_NONE && in->expert[i] % 2 ? oldest(in, taken, count) : FT_NONE;
        if (victim == FT_NONE)
            continue;
        out->place[i] = FT_PLACE_FETCH;
        out->reason[i] = FT_REASON_STRATEGY;
        out->victim[i] = taken[count++] = victim;
    }
    ask_ahead(m, in, out, taken, count);
    m->count[in->layer] = FT_MIN(in->active_count, (uint32_t)FT_TOPK_MAX);
    memcpy(m->expert[in->layer], in->expert, m->count[in->layer] * sizeof(uint32_t));
}

static const struct ft_policy ahead = {.abi = FT_POLICY_ABI,
                                       .name = "ahead",
                                       .state_bytes = memory_bytes,
                                       .init = memory_init,
                                       .decide_layer = decide_ahead};

/* Asks for anything at all: most of it cannot be done. */
static void decide_wildly(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    struct memory *m = state;
    ft_policy_safe.decide_layer(NULL, in, out);
    uint32_t count = FT_MIN(out->prefetch_max, 8u);
    for (uint32_t i = 0; i < count; i++) {
        out->prefetch_layer[i] = random_below(&m->random, 2 * m->layer_count);
        out->prefetch_expert[i] = random_below(&m->random, 200);
        out->prefetch_victim[i] = random_below(&m->random, in->slots.count + 2);
    }
    out->prefetch_count = out->prefetch_max ? out->prefetch_max + random_below(&m->random, 3) : 0;
}

static const struct ft_policy wild = {.abi = FT_POLICY_ABI,
                                      .name = "wild",
                                      .state_bytes = memory_bytes,
                                      .init = memory_init,
                                      .decide_layer = decide_wildly};

struct seen {
    uint64_t copies, with_slot;
};

static void look(void *context, const struct ft_trace_step *step)
{
    struct seen *seen = context;
    for (uint32_t i = 0; i < step->record_count; i++) {
        const struct ft_trace_record *r = &step->records[i];
        if (r->kind != FT_RECORD_JOB || r->op != FT_OP_FETCH || r->detail != FT_REASON_PREFETCH)
            continue;
        seen->copies++;
        seen->with_slot += r->slot != FT_NONE && r->lane == FT_LANE_LINK && r->end_ns >= r->start_ns;
    }
}

static struct ft_session_stats run(const struct ft_policy *policy, uint32_t slots, uint32_t workers,
                                   uint64_t delay_ns, const struct prompts *p, struct seen *seen)
{
    struct session_change change = {
        .policy = policy, .link_delay_ns = delay_ns, .seed = 7, .trace = look, .trace_context = seen};
    return prompts_run(&change, slots, workers, p, NULL);
}

TEST(texts_are_right_whatever_the_delays_and_every_prefetch_is_accounted_for)
{
    static const uint64_t delays[] = {0, 30000, 400000};
    struct prompts p;
    uint64_t waited = 0, wasted = 0;
    REQUIRE(prompts_read_some(&p));
    for (uint32_t i = 0; i < 6; i++) {
        struct seen seen = {0};
        uint32_t slots = i % 2 ? 24 : 60;
        struct ft_session_stats stats = run(&ahead, slots, 1 + i % 2, delays[i / 2], &p, &seen);
        CHECK(stats.prefetches > 20);
        CHECK(stats.prefetches_used > 0);
        CHECK(stats.prefetches_used + stats.prefetches_wasted <= stats.prefetches);
        CHECK(stats.prefetches - stats.prefetches_used - stats.prefetches_wasted <= slots);
        CHECK(stats.prefetches_waited <= stats.prefetches_used);
        CHECK(seen.copies > 0 && seen.copies <= stats.prefetches);
        CHECK_EQ(seen.with_slot, seen.copies);
        CHECK_EQ(stats.policy_repairs, 0);
        CHECK(stats.fetches > 0);
        waited += stats.prefetches_waited;
        wasted += stats.prefetches_wasted;
        printf("slots %u, delay %llu us: %llu ahead, %llu used, %llu waited for, %llu wasted\n", slots,
               (unsigned long long)(delays[i / 2] / 1000), (unsigned long long)stats.prefetches,
               (unsigned long long)stats.prefetches_used, (unsigned long long)stats.prefetches_waited,
               (unsigned long long)stats.prefetches_wasted);
    }
    CHECK(waited > 0);
    CHECK(wasted > 0);
    prompts_free(&p);
}

TEST(prefetches_that_cannot_be_done_are_dropped)
{
    struct prompts p;
    struct seen seen = {0};
    REQUIRE(prompts_read_some(&p));
    struct ft_session_stats stats = run(&wild, 16, 1, 50000, &p, &seen);
    CHECK(stats.policy_repairs > 0);
    CHECK(stats.prefetches > 0);
    prompts_free(&p);
}

TEST(a_policy_that_does_not_prefetch_has_none)
{
    struct prompts p;
    struct seen seen = {0};
    REQUIRE(prompts_read_some(&p));
    struct ft_session_stats stats = run(NULL, 16, 1, 0, &p, &seen);
    CHECK_EQ(stats.prefetches + stats.prefetches_used + stats.prefetches_wasted, 0);
    CHECK_EQ(seen.copies, 0);
    prompts_free(&p);
}

/* ---- the states alone, with a link that moves when it is told to ---- */

static uint32_t copied; /* layer * 100 + expert of the last copy; 0 = none */

static void note_copy(struct ft_step *step, uint32_t layer, uint32_t expert, char *destination)
{
    (void)step;
    (void)destination;
    copied = layer * 100 + expert;
}

TEST(a_slot_that_fills_is_kept_through_a_failed_step_and_a_fetch_may_overtake)
{
    static struct ft_model model = {.layer_count = 3, .expert_count = 4};
    static struct ft_layer_weights layers[3];
    struct ft_weights weights = {.layers = layers};
    struct ft_batch batch = {0};
    struct ft_trace_record records[16];
    struct ft_trace_ring rings[FT_STEP_THREADS] = {{.records = records, .capacity = 16}};
    struct ft_step *step = aligned_alloc(64, ft_round_up(sizeof *step, 64));
    struct ft_layer_out out = {0};
    struct ft_arena arena;
    struct ft_error err;
    REQUIRE(step != NULL);
    memset(step, 0, sizeof *step);
    step->model = &model;
    step->weights = &weights;
    step->x.batch = &batch;
    step->traces = rings;
    step->step_number = 5;
    ft_clock_init(&step->clock);
    ft_park_init(&step->link.park);
    ft_arena_count(&arena, "slots");
    CHECK_OK(ft_slots_init(&step->slots, &arena, &arena, 3, 64, 3, 4, &err), &err);
    CHECK_OK(ft_arena_init(&arena, "slots", arena.used, &err), &err);
    CHECK_OK(ft_slots_init(&step->slots, &arena, &arena, 3, 64, 3, 4, &err), &err);
    struct ft_slots *slots = &step->slots;
    ft_prefetch_offer(step, 0, &out);
    CHECK_EQ(out.prefetch_max, FT_PREFETCH_MAX);
    for (uint32_t i = 0; i < 2; i++) {
        out.prefetch_layer[i] = 1 + i;
        out.prefetch_expert[i] = 3;
        out.prefetch_victim[i] = i;
    }
    out.prefetch_count = 2;
    ft_prefetch_publish(step, 0, &out);
    ft_slots_forget_step(slots, 5); /* the step fails: leases end, but the copies are still to come */
    ft_prefetch_settle(step, 0);
    CHECK_EQ(slots->busy[0] + slots->busy[1], 2);
    CHECK_EQ(ft_slots_find(slots, 1, 3), 0);
    CHECK_EQ(ft_slots_find(slots, 2, 3), 1);
    CHECK(ft_prefetch_use(step, 1)); /* used while it fills: a fetch overtakes and makes the copy */
    atomic_store(&slots->filling[1], 0);
    CHECK(ft_prefetch_run(step, note_copy));
    CHECK_EQ(copied, 103);
    copied = 0;
    ft_prefetch_settle(step, 0);
    CHECK_EQ(slots->busy[0] + slots->busy[1], 0);
    CHECK_EQ(rings[0].count, 1); /* the copy */
    /* The slot is taken again while the overtaken entry still stands in the ring: it must not copy any more. */
    out.prefetch_layer[0] = 0;
    out.prefetch_expert[0] = 1;
    out.prefetch_victim[0] = 1;
    out.prefetch_count = 1;
    ft_prefetch_publish(step, 0, &out);
    CHECK(ft_prefetch_run(step, note_copy));
    CHECK_EQ(copied, 0);
    CHECK(atomic_load(&slots->filling[1]) != 0);
    CHECK(ft_prefetch_run(step, note_copy));
    CHECK_EQ(copied, 1);
    CHECK(!ft_prefetch_run(step, note_copy));
    ft_prefetch_settle(step, 0);
    ft_prefetch_offer(step, 0, &out);
    CHECK_EQ(out.prefetch_max, FT_PREFETCH_MAX);
    CHECK_EQ(step->prefetches[0].issued, 3);
    CHECK_EQ(step->prefetches[0].used, 1);
    CHECK_EQ(step->prefetches[0].waited, 1);
    /* Full: no room until the link moves. */
    for (uint32_t i = 0; i < 2 * FT_PREFETCH_MAX; i++) {
        ft_prefetch_offer(step, 0, &out);
        if (!out.prefetch_max)
            break;
        atomic_store(&slots->filling[2], 0);
        slots->busy[2] = 0;
        out.prefetch_layer[0] = 0;
        out.prefetch_expert[0] = 2 + i % 2;
        out.prefetch_victim[0] = 2;
        out.prefetch_count = 1;
        ft_prefetch_publish(step, 0, &out);
    }
    CHECK_EQ(out.prefetch_max, 0);
    CHECK_EQ(step->prefetches[0].issued, 3 + FT_PREFETCH_MAX);
    batch.prefill = true;
    while (ft_prefetch_run(step, note_copy))
        continue;
    ft_prefetch_settle(step, 0);
    ft_prefetch_offer(step, 0, &out);
    CHECK_EQ(out.prefetch_max, 0); /* prefill leaves the slots alone */
    CHECK_EQ(slots->prefetches_wasted, FT_PREFETCH_MAX - 1);
    ft_arena_fini(&arena);
    free(step);
}

/* ---- a GPU's side: nothing here asks for a GPU, only for a step that has one ---- */

TEST(what_a_gpu_gets_ahead_is_resident_behind_a_later_layers_flag_only)
{
    static struct ft_model model = {.layer_count = 3, .expert_count = 4};
    static struct ft_layer_weights layers[3];
    static char gpu; /* never looked into */
    struct ft_weights weights = {.layers = layers};
    struct ft_batch batch = {0};
    struct ft_trace_record records[16];
    struct ft_trace_ring rings[FT_STEP_THREADS] = {{.records = records, .capacity = 16}};
    struct ft_step *step = aligned_alloc(64, ft_round_up(sizeof *step, 64));
    struct ft_prefetch_move moves[FT_PREFETCH_MAX];
    struct ft_layer_out out = {0};
    struct ft_arena arena;
    struct ft_error err;
    uint32_t active_slot[2] = {FT_NONE, 1};
    REQUIRE(step != NULL);
    memset(step, 0, sizeof *step);
    step->model = &model;
    step->weights = &weights;
    step->x.batch = &batch;
    step->x.active.slot = active_slot;
    step->x.active.count = 2;
    step->traces = rings;
    step->step_number = 5;
    step->cuda = (struct ft_lane_cuda *)(void *)&gpu;
    ft_clock_init(&step->clock);
    ft_arena_count(&arena, "slots");
    CHECK_OK(ft_slots_init(&step->slots, &arena, &arena, 3, 64, 3, 4, &err), &err);
    CHECK_OK(ft_arena_init(&arena, "slots", arena.used, &err), &err);
    CHECK_OK(ft_slots_init(&step->slots, &arena, &arena, 3, 64, 3, 4, &err), &err);
    struct ft_slots *slots = &step->slots;
    struct ft_prefetches *p = &step->prefetches[0];
    ft_prefetch_offer(step, 0, &out);
    CHECK_EQ(out.prefetch_max, 0); /* not a captured step */
    step->single_wave = true;
    active_slot[0] = 0;
    ft_prefetch_offer(step, 0, &out);
    CHECK_EQ(out.prefetch_max, 0); /* all resident: the GPU reads no moves */
    active_slot[0] = FT_NONE;
    ft_prefetch_offer(step, 0, &out);
    CHECK_EQ(out.prefetch_max, FT_PREFETCH_MAX);
    ft_slots_take(slots, 0, 2, 1, 4, false); /* the victim: expert 1 of layer 2 */
    slots->busy[0] = 0;
    out.prefetch_layer[0] = out.prefetch_layer[1] = 1;
    out.prefetch_expert[0] = 3;
    out.prefetch_expert[1] = 3; /* twice: the second is dropped */
    out.prefetch_victim[0] = 0;
    out.prefetch_victim[1] = 1;
    out.prefetch_count = 2;
    ft_prefetch_publish(step, 0, &out);
    CHECK_EQ(p->issued, 1);
    CHECK_EQ(ft_slots_find(slots, 2, 1),
             FT_NONE); /* the victim is gone at once, the other is not there yet */
    CHECK_EQ(ft_slots_find(slots, 1, 3), FT_NONE);
    CHECK_EQ(slots->busy[0], 1);
    CHECK_EQ(ft_prefetch_victims(step, 0, moves), 1);
    CHECK(moves[0].layer == 2 && moves[0].expert == 1 && moves[0].slot == FT_NONE);
    CHECK_EQ(ft_prefetch_arrive(step, 2, moves), 0); /* not queued yet */
    struct ft_prefetch *e = ft_prefetch_next(step, 0);
    REQUIRE(e != NULL);
    CHECK(e->slot == 0 && e->layer == 1 && e->expert == 3);
    ft_prefetch_queued(step, 0, 0);
    CHECK(ft_prefetch_next(step, 0) == NULL);
    CHECK_EQ(ft_prefetch_victims(step, 0, moves), 0); /* told once */
    ft_prefetch_settle(step, 0);
    CHECK_EQ(slots->busy[0], 1);
    step->step_number = 6;
    CHECK_EQ(ft_prefetch_arrive(step, 1, moves), 0); /* its own layer: the lists are made */
    CHECK_EQ(ft_prefetch_arrive(step, 2, moves), 1);
    CHECK(moves[0].layer == 1 && moves[0].expert == 3 && moves[0].slot == 0);
    CHECK_EQ(ft_slots_find(slots, 1, 3), 0);
    CHECK_EQ(slots->busy[0], 0);
    CHECK_EQ(slots->last_used[0], 5);
    CHECK(!ft_prefetch_use(step, 0));
    CHECK_EQ(p->used, 1);
    ft_slots_forget_step(slots, 6); /* the step that made it resident fails: nobody waited for the copy */
    CHECK_EQ(ft_slots_find(slots, 1, 3), FT_NONE);
    /* One that is fetched on demand meanwhile, and one that a failed step drops. */
    out.prefetch_layer[0] = 0;
    out.prefetch_layer[1] = 2;
    out.prefetch_expert[0] = out.prefetch_expert[1] = 2;
    out.prefetch_victim[0] = 0;
    out.prefetch_victim[1] = 1;
    out.prefetch_count = 2;
    ft_prefetch_publish(step, 0, &out);
    ft_prefetch_queued(step, 0, 0);
    ft_slots_take(slots, 2, 0, 2, 6, false);
    CHECK_EQ(ft_prefetch_arrive(step, 1, moves), 0);
    CHECK_EQ(slots->busy[0], 0);
    CHECK_EQ(ft_slots_find(slots, 0, 2), 2);
    CHECK_EQ(p->dropped, 1);
    CHECK_EQ(slots->busy[1], 1);
    ft_prefetch_drop(step);
    CHECK_EQ(slots->busy[1], 0);
    CHECK_EQ(p->dropped, 2);
    CHECK(ft_prefetch_next(step, 0) == NULL);
    ft_prefetch_offer(step, 0, &out);
    CHECK_EQ(out.prefetch_max, FT_PREFETCH_MAX);
    ft_arena_fini(&arena);
    free(step);
}

TEST_MAIN(RUN(what_a_gpu_gets_ahead_is_resident_behind_a_later_layers_flag_only)
              RUN(a_slot_that_fills_is_kept_through_a_failed_step_and_a_fetch_may_overtake)
                  RUN(texts_are_right_whatever_the_delays_and_every_prefetch_is_accounted_for)
                      RUN(prefetches_that_cannot_be_done_are_dropped)
                          RUN(a_policy_that_does_not_prefetch_has_none))
