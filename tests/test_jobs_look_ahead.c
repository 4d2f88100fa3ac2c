/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Router look-ahead on the host device: whatever the link's delays, the texts are the reference's, slots hold what they
 * would hold without it, and a landing buffer is never given away while a copy may still write to it.
 */
#include "jobs/session_internal.h"
#include "tests/ahead_policies.h"
#include "tests/fixture_session.h"

struct seen {
    uint64_t copies;
};

static void look(void *context, const struct ft_trace_step *step)
{
    struct seen *seen = context;
    for (uint32_t i = 0; i < step->record_count; i++) {
        const struct ft_trace_record *r = &step->records[i];
        if (r->kind != FT_RECORD_JOB || r->op != FT_OP_FETCH || r->detail != FT_REASON_FORESEEN)
            continue;
        seen->copies++;
        CHECK(r->lane == FT_LANE_LINK && r->end_ns >= r->start_ns && r->bytes > 0 && r->layer > 0);
    }
}

/* Every slot that the map names holds its expert. */
static void check_slots(const struct ft_session *session)
{
    const struct ft_slots *slots = &session->step.slots;
    for (uint32_t e = 0; e < slots->layer_count * slots->expert_count; e++) {
        const struct ft_layer_weights *w = &session->options.weights->layers[e / slots->expert_count];
        if (slots->map[e] != FT_NONE)
            CHECK(memcmp(ft_slots_memory(slots, slots->map[e]),
                         w->experts + (uint64_t)w->expert_layout.stride * (e % slots->expert_count),
                         w->expert_layout.bytes) == 0);
    }
}

static struct ft_session_stats run(const struct ft_policy *policy, uint32_t slots, uint32_t workers,
                                   uint64_t delay_ns, const struct prompts *p, struct seen *seen)
{
    struct session_change change = {
        .policy = policy, .link_delay_ns = delay_ns, .seed = 7, .trace = look, .trace_context = seen};
    return prompts_run(&change, slots, workers, p, check_slots);
}

TEST(texts_are_right_whatever_the_delays)
{
    static const uint64_t delays[] = {0, 30000, 400000};
    struct prompts p;
    REQUIRE(prompts_read_some(&p));
    for (uint32_t i = 0; i < 6; i++) {
        struct seen seen = {0};
        uint32_t slots = i % 2 ? 40 : 150;
        struct ft_session_stats stats = run(&foreseeing, slots, 1 + i % 2, delays[i / 2], &p, &seen);
        printf("slots %u, delay %llu us: %llu foreseen, %llu right, %llu ordered, %llu copied, %llu used\n",
               slots, (unsigned long long)(delays[i / 2] / 1000), (unsigned long long)stats.foreseen,
               (unsigned long long)stats.foreseen_right, (unsigned long long)stats.copied_ahead,
               (unsigned long long)seen.copies, (unsigned long long)stats.copied_ahead_used);
        CHECK_EQ(stats.policy_repairs, 0);
        CHECK(stats.foreseen_right * 2 > stats.foreseen); /* the demo model's routers are alike */
        CHECK(stats.copied_ahead > 20 && seen.copies <= stats.copied_ahead);
        CHECK(stats.copied_ahead_used > 0 &&
              stats.copied_ahead_used <= FT_MIN(stats.copied_ahead, stats.fetches));
    }
    prompts_free(&p);
}

TEST(a_policy_that_asks_for_nonsense_changes_no_text)
{
    struct prompts p;
    struct seen seen = {0};
    REQUIRE(prompts_read_some(&p));
    struct ft_session_stats stats = run(&wild, 80, 1, 50000, &p, &seen);
    CHECK(stats.policy_repairs > 0);
    CHECK(stats.copied_ahead > 0);
    prompts_free(&p);
}

/* offload, which asks the same slots in either case. */
static struct ft_session_stats run_offload(bool looks, const struct prompts *p)
{
    struct fixture_config config = {.strategy = FT_STRATEGY_OFFLOAD,
                                    .device = FT_DEVICE_HOST,
                                    .slots = looks ? 88 : 83}; /* five are landing buffers */
    struct ft_session_stats stats = {0};
    struct ft_engine engine;
    struct ft_error err;
    CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
    CHECK_OK(session_reopen(&engine, &(struct session_change){.always_looks = looks}, &err), &err);
    if (engine.session) {
        CHECK_EQ(ft_session_slot_count(engine.session), 83);
        prompts_check_texts(engine.session, p, 1);
        ft_session_stats(engine.session, &stats);
    }
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    return stats;
}

TEST(slots_hold_what_they_would_hold_without_it)
{
    struct prompts p;
    REQUIRE(prompts_read_some(&p));
    struct ft_session_stats with = run_offload(true, &p), without = run_offload(false, &p);
    CHECK(with.copied_ahead_used > 100);
    CHECK_EQ(with.hits, without.hits);
    CHECK_EQ(with.misses, without.misses);
    CHECK_EQ(with.fetches, without.fetches);
    CHECK(with.fetch_bytes < without.fetch_bytes);
    prompts_free(&p);
}

/* ---- the states alone, with a link that moves when it is told to ---- */

static char *copied_to;
static uint32_t copied;

static void note_copy(struct ft_step *step, uint32_t layer, uint32_t expert, char *destination)
{
    (void)step;
    copied = layer * 100 + expert;
    copied_to = destination;
}

struct bench {
    struct ft_plan plan;
    struct ft_model model;
    struct ft_layer_weights layers[4];
    struct ft_weights weights;
    struct ft_batch batch;
    struct ft_trace_record records[32];
    struct ft_trace_ring rings[FT_STEP_THREADS];
    uint32_t expert[4], slot[4];
    uint8_t ahead[4], place[4];
    struct ft_arena arena;
    struct ft_step *step;
};

static int push(struct bench *b, struct ft_error *err)
{
    struct ft_slots_part part = {.layer_end = 4, .end = 4, .landing_count = 2};
    struct ft_arena *blobs = &b->arena;
    int status = ft_slots_init_parts(&b->step->slots, &b->arena, &blobs, &part, 1, 64, 4, 8, err);
    return status == FT_OK ? ft_look_ahead_init(b->step, &b->arena, true, 4, err) : status;
}

static void begin(struct bench *b)
{
    struct ft_error err;
    memset(b, 0, sizeof *b);
    b->model.layer_count = 4;
    b->model.expert_count = 8;
    b->model.topk = 2;
    b->weights.layers = b->layers;
    b->batch.rows = 1;
    b->rings[0] = (struct ft_trace_ring){.records = b->records, .capacity = 32};
    b->step = aligned_alloc(64, ft_round_up(sizeof *b->step, 64));
    REQUIRE(b->step != NULL);
    memset(b->step, 0, sizeof *b->step);
    b->step->model = &b->model;
    b->step->weights = &b->weights;
    b->step->x.batch = &b->batch;
    b->step->traces = b->rings;
    b->step->policy = &foreseeing;
    b->step->x.active.expert = b->expert;
    b->step->x.active.slot = b->slot;
    b->step->x.active.ahead = b->ahead;
    b->step->x.active.place = b->place;
    ft_clock_init(&b->step->clock);
    b->step->plan = &b->plan;
    ft_park_init(&b->step->link.park);
    ft_arena_count(&b->arena, "slots");
    CHECK_OK(push(b, &err), &err);
    CHECK_OK(ft_arena_init(&b->arena, "slots", b->arena.used, &err), &err);
    CHECK_OK(push(b, &err), &err);
}

static void end(struct bench *b)
{
    ft_arena_fini(&b->arena);
    free(b->step);
}

/* One active expert, which no slot holds. */
static bool mark(struct bench *b, uint32_t layer, uint32_t expert)
{
    b->step->x.active.count = 1;
    b->expert[0] = expert;
    b->slot[0] = FT_NONE;
    ft_look_ahead_mark(b->step, layer);
    return b->ahead[0];
}

TEST(a_landing_buffer_is_free_when_the_link_has_passed_its_order_and_nobody_awaits_it)
{
    static struct bench b;
    begin(&b);
    struct ft_step *step = b.step;
    const uint32_t first[2] = {3, 5}, second[2] = {6, 7}, unknown[2] = {FT_NONE, 8};
    uint32_t ticket;
    CHECK_EQ(ft_look_ahead_target(step, 2), 3);
    CHECK_EQ(ft_look_ahead_target(step, 3), FT_NONE);
    ft_look_ahead_order(step, 0, first);
    CHECK_EQ(step->foresight.ordered, 2);
    CHECK(mark(&b, 1, 5)); /* ordered, not begun */
    char *victim = ft_slots_memory(&step->slots, 2), *landing = ft_slots_blob(&step->slots, 0, 5);
    ft_slots_take(&step->slots, 2, 1, 5, 1, false);
    _Atomic uint32_t *awaits = ft_look_ahead_land(step, 1, 5, 2, &ticket);
    CHECK(ft_slots_memory(&step->slots, 2) == landing && ticket != 0 && atomic_load(awaits) == ticket);
    ft_look_ahead_end(step, 1); /* nobody asked for expert 3 */
    ft_look_ahead_order(step, 1, second);
    CHECK_EQ(step->foresight.ordered, 2); /* no buffer is free */
    CHECK(ft_look_ahead_is_waiting(step));
    copied = 0;
    CHECK(ft_look_ahead_run(step, note_copy));
    CHECK_EQ(copied, 0); /* of expert 3 nobody wants a copy any more */
    CHECK(ft_look_ahead_run(step, note_copy));
    CHECK_EQ(copied, 105);
    CHECK(copied_to == landing);
    CHECK_EQ(atomic_load(awaits), 0);
    CHECK(!ft_look_ahead_run(step, note_copy) && !ft_look_ahead_is_waiting(step));
    ft_look_ahead_settle(step, 0);
    CHECK_EQ(b.rings[0].count, 1);
    /* Now both are free; one of them has the victim's old blob. */
    ft_look_ahead_order(step, 1, second);
    CHECK_EQ(step->foresight.ordered, 4);
    bool to_victim = false;
    while (ft_look_ahead_run(step, note_copy))
        to_victim |= copied_to == victim;
    CHECK(to_victim);
    ft_look_ahead_settle(step, 0);
    CHECK(mark(&b, 2, 7));
    CHECK(!mark(&b, 2, 7)); /* what was foreseen is asked once */
    ft_look_ahead_end(step, 2);
    ft_look_ahead_order(step, 2, unknown);
    CHECK_EQ(step->foresight.ordered, 4);
    /* A failed step: orders that nobody has begun are dropped. */
    ft_look_ahead_order(step, 2, first);
    CHECK_EQ(step->foresight.ordered, 6);
    ft_look_ahead_drop(step);
    copied = 0;
    while (ft_look_ahead_run(step, note_copy))
        continue;
    CHECK_EQ(copied, 0);
    CHECK(!mark(&b, 3, 3));
    end(&b);
}

TEST_MAIN(RUN(texts_are_right_whatever_the_delays) RUN(a_policy_that_asks_for_nonsense_changes_no_text)
              RUN(slots_hold_what_they_would_hold_without_it)
                  RUN(a_landing_buffer_is_free_when_the_link_has_passed_its_order_and_nobody_awaits_it))
