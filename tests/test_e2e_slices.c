/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A prefill that pauses between layers while another sequence decodes: the same bits as in one go, for every family,
 * strategy and chunk; slots as decoding left them; cancelling, failing and replaying in between.
 */
#include "tests/sliced_session.h"

#include <time.h>
#include <unistd.h>

static const char *const fixtures[] = {"qwen3_moe-bf16", "qwen4_exp-bf16",         "qwen4_exp-nvfp4-modelopt",
                                       "gpt_oss-mxfp4",  "qwen3_moe-dense-layers", "qwen3_5_moe-bf16"};

static const struct {
    enum ft_strategy strategy;
    enum ft_device device;
} ways[] = {{FT_STRATEGY_CPU, FT_DEVICE_NONE},    {FT_STRATEGY_CPU, FT_DEVICE_HOST},
            {FT_STRATEGY_FUSED, FT_DEVICE_HOST},  {FT_STRATEGY_OFFLOAD, FT_DEVICE_HOST},
            {FT_STRATEGY_HYBRID, FT_DEVICE_HOST}, {FT_STRATEGY_AUTO, FT_DEVICE_HOST}};

static struct sliced_prompt prompt;
static struct sliced_run run, other;

static struct fixture_config config_of(uint32_t way, uint32_t chunk)
{
    return (struct fixture_config){.strategy = ways[way].strategy,
                                   .device = ways[way].device,
                                   .workers = 1 + chunk % 2,
                                   .chunk = chunk,
                                   .slots = way > 2 ? 11 : 0,
                                   .sequences = 4,
                                   .share = 0.5,
                                   .all_logits = true};
}

static bool open_fixture(struct ft_engine *engine, const char *name, const struct fixture_config *config)
{
    char dir[4096];
    struct ft_error err;
    snprintf(dir, sizeof dir, "%s/fixtures/%s", FT_DATA_DIR, name);
    int status = fixture_open(engine, dir, config, &err);
    CHECK_OK(status, &err);
    return status == FT_OK && sliced_prompt_read(&prompt, dir);
}

static void close_engine(struct ft_engine *engine)
{
    struct ft_error err;
    CHECK_OK(ft_engine_close(engine, &err), &err);
}

/* What B leaves behind, all of it. */
struct outputs {
    struct ft_capture capture;
    size_t logits, hidden, topk; /* elements */
};

static void outputs_make(struct outputs *out, const struct ft_model *m)
{
    out->logits = (size_t)prompt.count * m->vocab;
    out->hidden = (size_t)(m->layer_count + 1) * prompt.count * m->hc_count * m->hidden;
    out->topk = (size_t)m->layer_count * prompt.count * m->topk;
    out->capture = (struct ft_capture){.row_count = prompt.count,
                                       .logits = calloc(out->logits, sizeof(float)),
                                       .hidden = calloc(out->hidden, sizeof(float)),
                                       .topk = calloc(out->topk, sizeof(int32_t))};
}

static void outputs_free(struct outputs *out)
{
    free(out->capture.logits);
    free(out->capture.hidden);
    free(out->capture.topk);
}

static bool outputs_equal(const struct outputs *a, const struct outputs *b)
{
    return !memcmp(a->capture.logits, b->capture.logits, a->logits * sizeof(float)) &&
           !memcmp(a->capture.hidden, b->capture.hidden, a->hidden * sizeof(float)) &&
           !memcmp(a->capture.topk, b->capture.topk, a->topk * sizeof(int32_t));
}

static bool same_text(const struct sliced_run *x, uint32_t i, const struct sliced_run *y, uint32_t j)
{
    return x->counts[i] == y->counts[j] && !memcmp(x->tokens[i], y->tokens[j], x->counts[i] * 4);
}

/* B alone, then A alone, then B beside A, in one session each. */
static void check_way(const char *name, uint32_t way, uint32_t chunk, bool deterministic)
{
    struct ft_engine engine;
    struct ft_error err;
    struct outputs alone, beside;
    struct fixture_config config = config_of(way, chunk);
    config.deterministic = deterministic;
    config.link_delay_us = way > 2 && chunk == 17 ? 40 : 0;
    int before = test_failures_;
    if (!open_fixture(&engine, name, &config))
        return;
    const struct ft_model *m = engine.model;
    outputs_make(&alone, m);
    outputs_make(&beside, m);
    memset(&other, 0, sizeof other);
    sliced_come(engine.session, &prompt, &other, prompt.greedy_count, &alone.capture);
    sliced_drain(engine.session, &other);
    CHECK_EQ(sliced_check(&other, m->layer_count), 0); /* nobody decodes: in one go */
    uint32_t b = other.b;
    CHECK_EQ(other.counts[b], prompt.greedy_count);
    CHECK(!memcmp(other.tokens[b], prompt.greedy, prompt.greedy_count * 4));
    CHECK_OK(session_reopen(&engine, &(struct session_change){0}, &err), &err);
    sliced_begin(engine.session, &prompt, &other);
    sliced_drain(engine.session, &other);
    CHECK_OK(session_reopen(&engine, &(struct session_change){0}, &err), &err);
    sliced_begin(engine.session, &prompt, &run);
    sliced_come(engine.session, &prompt, &run, prompt.greedy_count, &beside.capture);
    sliced_drain(engine.session, &run);
    CHECK(sliced_check(&run, m->layer_count) >= 1);
    CHECK(same_text(&run, run.a, &other, other.a));
    CHECK_EQ(run.counts[run.b], prompt.greedy_count);
    CHECK(!memcmp(run.tokens[run.b], prompt.greedy, prompt.greedy_count * 4));
    CHECK(outputs_equal(&alone, &beside));
    if (test_failures_ != before)
        fprintf(stderr, "%s, strategy %s, chunk %u\n", name, ft_strategy_name(config.strategy), chunk);
    outputs_free(&alone);
    outputs_free(&beside);
    close_engine(&engine);
}

TEST(a_sliced_prefill_has_the_bits_of_a_whole_one)
{
    for (uint32_t f = 0; f < FT_COUNT_OF(fixtures); f++)
        for (uint32_t way = 0; way < FT_COUNT_OF(ways); way++) {
            check_way(fixtures[f], way, 128, false);
            check_way(fixtures[f], way, 17, way % 2);
        }
}

/* Offload evicts by age alone: with a prompt in between or without, decode steps find and leave the same. */
TEST(a_prefill_leaves_slots_and_their_ages_as_decoding_left_them)
{
    struct ft_error err;
    struct ft_engine engine;
    for (uint32_t f = 0; f < FT_COUNT_OF(fixtures); f++) {
        struct fixture_config config = config_of(3, 128);
        config.slots = 23;
        if (!open_fixture(&engine, fixtures[f], &config))
            continue;
        CHECK_OK(session_reopen(&engine, &(struct session_change){0}, &err), &err); /* every slot is the cache's */
        sliced_begin(engine.session, &prompt, &other);
        sliced_drain(engine.session, &other);
        CHECK_OK(session_reopen(&engine, &(struct session_change){0}, &err), &err);
        sliced_begin(engine.session, &prompt, &run);
        for (uint32_t i = 0; i < 3; i++) { /* one prompt after the other, none of which decodes */
            sliced_come(engine.session, &prompt, &run, 0, NULL);
            while (!run.ended[run.b] && run.step_count < SLICED_STEPS_MAX)
                sliced_step(engine.session, &run);
            run.ended[run.b] = false;
            ft_session_release(engine.session, run.b);
        }
        sliced_drain(engine.session, &run);
        CHECK(sliced_check(&run, engine.model->layer_count) >= 1);
        uint32_t decodes = 0;
        for (uint32_t i = 0, j = 0; i < run.step_count; i++) {
            if (run.steps[i].prefill)
                continue;
            while (j < other.step_count && other.steps[j].prefill)
                j++;
            REQUIRE(j < other.step_count);
            CHECK_EQ(run.steps[i].slots, other.steps[j++].slots);
            decodes++;
        }
        CHECK_EQ(decodes, A_TOKENS - 1);
        close_engine(&engine);
    }
}

TEST(a_whole_prefill_leaves_the_slots_alone)
{
    struct ft_engine engine;
    struct fixture_config config = config_of(3, 128);
    config.slots = 23;
    REQUIRE(open_fixture(&engine, "qwen4_exp-bf16", &config));
    sliced_begin(engine.session, &prompt, &run);
    ft_session_cancel(engine.session, run.a);
    sliced_drain(engine.session, &run);
    engine.session->step.hits = engine.session->step.misses = 0;
    uint64_t before = sliced_slots(engine.session);
    sliced_come(engine.session, &prompt, &run, 0, NULL);
    sliced_drain(engine.session, &run);
    CHECK(engine.session->step.hits > 0 && engine.session->step.misses > 0);
    engine.session->step.hits = engine.session->step.misses = 0;
    CHECK_EQ(sliced_slots(engine.session), before);
    close_engine(&engine);
}

TEST(a_prompt_cancelled_between_slices_ends_at_once_and_leaves_nothing)
{
    struct ft_engine engine;
    struct fixture_config config = config_of(3, 128);
    REQUIRE(open_fixture(&engine, "qwen4_exp-bf16", &config));
    sliced_begin(engine.session, &prompt, &other);
    sliced_drain(engine.session, &other);
    ft_session_release(engine.session, other.a);
    sliced_begin(engine.session, &prompt, &run);
    uint32_t pages = engine.session->kv.free_count;
    sliced_come(engine.session, &prompt, &run, 4, NULL);
    REQUIRE(sliced_pause(engine.session, &run));
    ft_session_cancel(engine.session, run.b);
    CHECK(!engine.session->chunk.active); /* nobody else had rows in it */
    sliced_step(engine.session, &run);
    CHECK(run.ended[run.b] && run.finish[run.b] == FT_FINISH_CANCELLED);
    ft_session_release(engine.session, run.b);
    CHECK_EQ(engine.session->kv.free_count, pages);
    /* released while it runs, without a call to cancel */
    sliced_come(engine.session, &prompt, &run, 4, NULL);
    REQUIRE(sliced_pause(engine.session, &run));
    ft_session_release(engine.session, run.b);
    CHECK_EQ(engine.session->kv.free_count, pages);
    sliced_come(engine.session, &prompt, &run, prompt.greedy_count, NULL);
    sliced_drain(engine.session, &run);
    CHECK(same_text(&run, run.a, &other, other.a));
    CHECK(!memcmp(run.tokens[run.b], prompt.greedy, prompt.greedy_count * 4));
    close_engine(&engine);
}

TEST(a_prompt_cancelled_beside_another_one_leaves_when_their_chunk_ends)
{
    struct ft_engine engine;
    struct ft_error err;
    struct outputs out;
    uint32_t c;
    struct fixture_config config = config_of(4, 128);
    config.sequences = 3;
    REQUIRE(open_fixture(&engine, "qwen4_exp-bf16", &config));
    outputs_make(&out, engine.model);
    sliced_begin(engine.session, &prompt, &run);
    sliced_come(engine.session, &prompt, &run, 4, &out.capture);
    struct ft_request request = sliced_request(prompt.ids, prompt.count, prompt.greedy_count);
    CHECK_OK(ft_session_submit(engine.session, &request, &c, &err), &err);
    REQUIRE(sliced_pause(engine.session, &run));
    CHECK_EQ(engine.session->chunk.batch.sequence_count, 2);
    ft_session_cancel(engine.session, run.b);
    CHECK(engine.session->chunk.active);
    memset(out.capture.hidden, 0x5a, out.hidden * sizeof(float)); /* the caller's again */
    sliced_step(engine.session, &run);
    CHECK(run.ended[run.b] && run.finish[run.b] == FT_FINISH_CANCELLED);
    ft_session_release(engine.session, run.b);
    if (engine.session->chunk.active) { /* its pages are written to until the chunk ends */
        request.max_tokens = 1;
        CHECK_FAILS(ft_session_submit(engine.session, &request, &c, &err), FT_LIMIT, "--sequences", &err);
    }
    sliced_drain(engine.session, &run);
    CHECK_EQ(run.counts[c], prompt.greedy_count);
    CHECK(!memcmp(run.tokens[c], prompt.greedy, prompt.greedy_count * 4));
    CHECK_EQ(run.counts[run.b], 0);
    uint32_t touched = 0;
    for (size_t i = 0; i < out.hidden * sizeof(float); i++)
        touched += ((const char *)out.capture.hidden)[i] != 0x5a;
    CHECK_EQ(touched, 0);
    CHECK_EQ(engine.session->sequences[run.b].phase, FT_SEQUENCE_FREE);
    CHECK_OK(ft_session_submit(engine.session, &request, &c, &err), &err);
    outputs_free(&out);
    close_engine(&engine);
}

/* While a token's embedding is not a number, whoever reads it fails. */
static uint16_t *embedding_of(const struct ft_engine *engine, uint32_t token)
{
    return (uint16_t *)(uintptr_t)engine->loaded.weights.embed.data + (size_t)token * engine->model->hidden;
}

/* `other` has what A says alone; in `run` A decodes and B's prompt pauses between two slices. */
static bool open_paused(struct ft_engine *engine, const struct fixture_config *config)
{
    if (!open_fixture(engine, "qwen4_exp-bf16", config))
        return false;
    sliced_begin(engine->session, &prompt, &other);
    sliced_drain(engine->session, &other);
    ft_session_release(engine->session, other.a);
    sliced_begin(engine->session, &prompt, &run);
    sliced_come(engine->session, &prompt, &run, prompt.greedy_count, NULL);
    return sliced_pause(engine->session, &run);
}

TEST(a_decode_step_that_fails_between_slices_fails_only_those_who_decode)
{
    struct ft_engine engine;
    struct ft_error err;
    struct ft_sequence_info info;
    struct fixture_config config = config_of(3, 128);
    REQUIRE(open_paused(&engine, &config));
    ft_session_sequence_info(engine.session, run.a, &info);
    uint16_t *row = embedding_of(&engine, info.tokens[info.token_count - 1]), saved = row[3];
    row[3] = 0x7fc0;
    while (!run.failed[run.a] && run.step_count < SLICED_STEPS_MAX && !run.counts[run.b])
        sliced_step(engine.session, &run);
    row[3] = saved;
    CHECK(run.failed[run.a] && !run.failed[run.b]);
    CHECK(engine.session->chunk.active || run.counts[run.b]);
    uint32_t had = run.counts[run.a];
    CHECK_OK(ft_session_resume(engine.session, run.a, &err), &err);
    sliced_drain(engine.session, &run);
    CHECK_EQ(run.counts[run.b], prompt.greedy_count);
    CHECK(!memcmp(run.tokens[run.b], prompt.greedy, prompt.greedy_count * 4));
    /* resumed, A goes on where its text had ended */
    CHECK_EQ(run.counts[run.a], other.counts[other.a]);
    CHECK(had >= A_BEFORE && same_text(&run, run.a, &other, other.a));
    close_engine(&engine);
}

TEST(a_slice_that_fails_fails_only_its_prompts)
{
    struct ft_engine engine;
    struct ft_error err;
    struct fixture_config config = config_of(4, 128);
    REQUIRE(open_paused(&engine, &config));
    /* the residual streams of one row, as they lie between two slices */
    const struct ft_activations *set = &engine.session->step.x.sets[FT_SET_PREFILL];
    set->buffer[set->space.residual + 3] = NAN;
    while (!run.failed[run.b] && !run.ended[run.a] && run.step_count < SLICED_STEPS_MAX)
        sliced_step(engine.session, &run);
    CHECK(run.failed[run.b] && !run.failed[run.a]);
    CHECK(!engine.session->chunk.active);
    CHECK_EQ(run.counts[run.b], 0);
    CHECK_OK(ft_session_resume(engine.session, run.b, &err), &err);
    sliced_drain(engine.session, &run);
    CHECK(same_text(&run, run.a, &other, other.a));
    CHECK_EQ(run.counts[run.b], prompt.greedy_count);
    CHECK(!memcmp(run.tokens[run.b], prompt.greedy, prompt.greedy_count * 4));
    close_engine(&engine);
}

/* Twice the reference prompt: longer than a page. */
static uint32_t submit_long(struct ft_session *session, bool reuse)
{
    static uint32_t ids[2 * FT_COUNT_OF(prompt.ids)];
    struct ft_error err;
    uint32_t handle = 0;
    memcpy(ids, prompt.ids, prompt.count * sizeof *ids);
    memcpy(ids + prompt.count, prompt.ids, prompt.count * sizeof *ids);
    struct ft_request request = sliced_request(ids, 2 * prompt.count - 5, 8);
    request.reuse_prefix = reuse;
    CHECK_OK(ft_session_submit(session, &request, &handle, &err), &err);
    return handle;
}

TEST(a_snapshot_taken_beside_decoding_is_reused)
{
    struct ft_engine engine;
    struct ft_error err;
    struct ft_session_stats stats;
    struct fixture_config config = config_of(3, 128);
    REQUIRE(open_fixture(&engine, "qwen4_exp-bf16", &config));
    memset(&other, 0, sizeof other);
    other.b = submit_long(engine.session, false);
    sliced_drain(engine.session, &other);
    CHECK_OK(session_reopen(&engine, &(struct session_change){0}, &err), &err);
    sliced_begin(engine.session, &prompt, &run);
    run.b = submit_long(engine.session, false);
    sliced_drain(engine.session, &run);
    CHECK(sliced_check(&run, engine.model->layer_count) >= 1);
    CHECK(same_text(&run, run.b, &other, other.b));
    ft_session_release(engine.session, run.b);
    run.counts[run.b] = 0;
    run.b = submit_long(engine.session, true);
    sliced_drain(engine.session, &run);
    CHECK(same_text(&run, run.b, &other, other.b));
    ft_session_stats(engine.session, &stats);
    CHECK(stats.snapshots_taken > 0 && stats.snapshots_used == 1);
    close_engine(&engine);
}

static bool same_steps(const struct sliced_run *x, const struct sliced_run *y)
{
    bool same = x->step_count == y->step_count;
    for (uint32_t i = 0; same && i < x->step_count; i++)
        same = x->steps[i].prefill == y->steps[i].prefill && x->steps[i].rows == y->steps[i].rows &&
               x->steps[i].layer_begin == y->steps[i].layer_begin &&
               x->steps[i].layer_end == y->steps[i].layer_end && x->steps[i].slots == y->steps[i].slots;
    return same;
}

static void run_pair(struct ft_engine *engine, struct sliced_run *to)
{
    sliced_begin(engine->session, &prompt, to);
    sliced_come(engine->session, &prompt, to, prompt.greedy_count, NULL);
    sliced_drain(engine->session, to);
}

TEST(deterministic_slices_do_not_depend_on_time)
{
    struct ft_engine engine;
    struct ft_error err;
    struct fixture_config config = config_of(4, 33);
    config.deterministic = true;
    REQUIRE(open_fixture(&engine, "qwen4_exp-bf16", &config));
    run_pair(&engine, &other);
    CHECK(sliced_check(&other, engine.model->layer_count) >= 1);
    for (uint32_t i = 0; i < 4; i++) {
        CHECK_OK(session_reopen(&engine,
                                &(struct session_change){.link_delay_ns = (i + 1) * 60000, .seed = i}, &err),
                 &err);
        run_pair(&engine, &run);
        CHECK(same_steps(&run, &other));
        CHECK(same_text(&run, run.a, &other, other.a) && same_text(&run, run.b, &other, other.b));
    }
    close_engine(&engine);
}

TEST(a_replay_repeats_the_recorded_slices)
{
    struct ft_engine engine;
    struct ft_session_stats stats;
    char path[] = "/tmp/ft_slices_XXXXXX";
    int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    close(fd);
    struct fixture_config config = config_of(4, 33);
    config.trace = path;
    config.link_delay_us = 30;
    REQUIRE(open_fixture(&engine, "qwen4_exp-bf16", &config));
    run_pair(&engine, &other);
    CHECK(sliced_check(&other, engine.model->layer_count) >= 1);
    close_engine(&engine);
    config.trace = NULL;
    config.replay = path;
    for (uint32_t i = 0; i < 4; i++) {
        config.link_delay_us = i * 50; /* measured times would cut other slices */
        REQUIRE(open_fixture(&engine, "qwen4_exp-bf16", &config));
        run_pair(&engine, &run);
        ft_session_stats(engine.session, &stats);
        CHECK_EQ(stats.departures, 0);
        CHECK(same_steps(&run, &other));
        CHECK(same_text(&run, run.a, &other, other.a) && same_text(&run, run.b, &other, other.b));
        close_engine(&engine);
    }
    unlink(path);
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A link so slow that it alone takes time: the whole bank costs many decode steps. */
TEST(decoding_keeps_about_half_of_its_rate_beside_a_prompt)
{
    struct ft_engine engine;
    struct fixture_config config = config_of(3, 128);
    config.slots = 23;
    config.link_gbs = 0.05;
    REQUIRE(open_fixture(&engine, "qwen4_exp-bf16", &config));
    sliced_begin(engine.session, &prompt, &run);
    double begin = now_s();
    uint32_t from = run.counts[run.a];
    while (run.counts[run.a] < from + 12)
        sliced_step(engine.session, &run);
    double before = 12 / (now_s() - begin);
    from = run.counts[run.a];
    sliced_come(engine.session, &prompt, &run, 0, NULL);
    begin = now_s();
    while (!run.ended[run.b] && !run.ended[run.a])
        sliced_step(engine.session, &run);
    double during = (run.counts[run.a] - from) / (now_s() - begin);
    printf("     %.1f tokens/s before, %.1f beside a prompt: %.0f%%, %u tokens\n", before, during,
           100 * during / before, run.counts[run.a] - from);
    CHECK(!run.ended[run.a]);
    CHECK(during > 0.35 * before); /* half, but for a loaded machine and the misses of other tokens */
    close_engine(&engine);
}

TEST_MAIN(RUN(a_sliced_prefill_has_the_bits_of_a_whole_one)
              RUN(a_prefill_leaves_slots_and_their_ages_as_decoding_left_them)
                  RUN(a_whole_prefill_leaves_the_slots_alone)
                      RUN(a_prompt_cancelled_between_slices_ends_at_once_and_leaves_nothing)
                          RUN(a_prompt_cancelled_beside_another_one_leaves_when_their_chunk_ends)
                              RUN(a_decode_step_that_fails_between_slices_fails_only_those_who_decode)
                                  RUN(a_slice_that_fails_fails_only_its_prompts)
                                      RUN(a_snapshot_taken_beside_decoding_is_reused)
                                          RUN(deterministic_slices_do_not_depend_on_time)
                                              RUN(a_replay_repeats_the_recorded_slices)
                                                  RUN(decoding_keeps_about_half_of_its_rate_beside_a_prompt))
