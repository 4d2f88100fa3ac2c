/* SPDX-License-Identifier: Apache-2.0 */
/* The demo model: its greedy texts, determinism, replay, snapshots, failures. */
#include "graph/trace.h"
#include "tests/fixture.h"

#include <jansson.h>
#include <unistd.h>

#define DIR FT_DATA_DIR "/ft-tiny"
#define PROMPTS_MAX 64

struct prompts {
    uint32_t count, max_new;
    uint32_t *ids[PROMPTS_MAX], id_count[PROMPTS_MAX];
    uint32_t *want[PROMPTS_MAX], want_count[PROMPTS_MAX];
};

static uint32_t read_ids(const json_t *array, uint32_t **ids)
{
    size_t count = json_array_size(array);
    *ids = malloc((count + 1) * sizeof **ids);
    for (size_t i = 0; i < count; i++)
        (*ids)[i] = (uint32_t)json_integer_value(json_array_get(array, i));
    return (uint32_t)count;
}

static bool prompts_read(struct prompts *p)
{
    json_error_t error;
    json_t *root = json_load_file(DIR "/reference.json", 0, &error);
    json_t *list = json_object_get(root, "prompts");
    memset(p, 0, sizeof *p);
    for (size_t i = 0; i < json_array_size(list) && p->count < PROMPTS_MAX; i++) {
        json_t *prompt = json_array_get(list, i);
        p->id_count[p->count] = read_ids(json_object_get(prompt, "prompt_ids"), &p->ids[p->count]);
        p->want_count[p->count] = read_ids(json_object_get(prompt, "greedy_ids"), &p->want[p->count]);
        p->count++;
    }
    json_decref(root);
    return p->count > 5;
}

static void prompts_free(struct prompts *p)
{
    for (uint32_t i = 0; i < p->count; i++) {
        free(p->ids[i]);
        free(p->want[i]);
    }
}

static struct ft_request request_for(const struct prompts *p, uint32_t i)
{
    return (struct ft_request){.prompt = p->ids[i],
                               .prompt_count = p->id_count[i],
                               .max_tokens = p->want_count[i],
                               .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1}};
}

static const struct fixture_config cpu = {.strategy = FT_STRATEGY_CPU, .workers = 1, .sequences = 8};

TEST(greedy_texts_of_every_prompt_are_equal_for_every_strategy)
{
    struct prompts p;
    REQUIRE(prompts_read(&p));
    static const enum ft_strategy strategies[] = {FT_STRATEGY_CPU, FT_STRATEGY_FUSED, FT_STRATEGY_OFFLOAD,
                                                  FT_STRATEGY_HYBRID};
    for (uint32_t s = 0; s < 4; s++) {
        struct ft_error err;
        struct ft_engine engine;
        struct fixture_config config = cpu;
        config.strategy = strategies[s];
        config.device = s ? FT_DEVICE_HOST : FT_DEVICE_NONE;
        config.share = 0.5;
        CHECK_OK(fixture_open(&engine, DIR, &config, &err), &err);
        for (uint32_t i = 0; i < p.count; i++) {
            uint32_t tokens[FT_SEQUENCES_MAX][256] = {{0}}, counts[FT_SEQUENCES_MAX] = {0}, sequence;
            struct ft_request request = request_for(&p, i);
            CHECK_OK(ft_session_submit(engine.session, &request, &sequence, &err), &err);
            CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
            CHECK_EQ(counts[sequence], p.want_count[i]);
            CHECK(memcmp(tokens[sequence], p.want[i], p.want_count[i] * 4) == 0);
            ft_session_release(engine.session, sequence);
        }
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
    prompts_free(&p);
}

/* Four prompts at once, sampled, with seeds: the text of each is what it is alone. */
TEST(sampled_text_is_the_same_alone_and_batched_and_with_any_workers)
{
    struct prompts p;
    struct ft_error err;
    REQUIRE(prompts_read(&p));
    uint32_t alone[4][64] = {{0}};
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    static const enum ft_strategy ways[] = {FT_STRATEGY_CPU, FT_STRATEGY_OFFLOAD, FT_STRATEGY_HYBRID};
    for (uint32_t run = 0; run < 6; run++) {
        struct ft_engine engine;
        struct fixture_config config = cpu;
        config.deterministic = true;
        config.workers = run % 2 && cores > 1 ? 2 : 1;
        config.strategy = ways[run / 2];
        config.device = run / 2 ? FT_DEVICE_HOST : FT_DEVICE_NONE;
        config.share = 0.4;
        CHECK_OK(fixture_open(&engine, DIR, &config, &err), &err);
        uint32_t tokens[FT_SEQUENCES_MAX][256] = {{0}}, counts[FT_SEQUENCES_MAX] = {0}, handles[4];
        for (uint32_t i = 0; i < 4; i++) {
            struct ft_request request = request_for(&p, i);
            request.max_tokens = 24;
            request.sampling = (struct ft_sampling){
                .temperature = 0.9f, .top_p = 0.95f, .top_k = 50, .repetition_penalty = 1.1f, .seed = 7 + i};
            CHECK_OK(ft_session_submit(engine.session, &request, &handles[i], &err), &err);
            if (run == 0) /* alone: one after another */
                CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
        }
        CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
        for (uint32_t i = 0; i < 4; i++) {
            CHECK_EQ(counts[handles[i]], 24);
            if (run == 0)
                memcpy(alone[i], tokens[handles[i]], 24 * 4);
            CHECK(memcmp(alone[i], tokens[handles[i]], 24 * 4) == 0);
        }
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
    CHECK(memcmp(alone[0], alone[1], 24 * 4) != 0);
    prompts_free(&p);
}

/* A long prompt, then the same with another tail: the second starts from a snapshot and says the same as without. */
TEST(a_shared_prefix_is_reused_from_a_snapshot_and_changes_nothing)
{
    struct prompts p;
    struct ft_error err;
    REQUIRE(prompts_read(&p));
    uint32_t prompt[200], text[2][16];
    for (uint32_t i = 0; i < 200; i++)
        prompt[i] = p.ids[1][i % p.id_count[1]] + i % 3;
    for (int reuse = 0; reuse < 2; reuse++) {
        struct ft_engine engine;
        CHECK_OK(fixture_open(&engine, DIR, &cpu, &err), &err);
        for (int turn = 0; turn < 2; turn++) {
            uint32_t tokens[FT_SEQUENCES_MAX][256] = {{0}}, counts[FT_SEQUENCES_MAX] = {0}, sequence;
            struct ft_request request = {.prompt = prompt,
                                         .prompt_count = turn ? 200 : 190,
                                         .max_tokens = 16,
                                         .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1},
                                         .reuse_prefix = reuse};
            CHECK_OK(ft_session_submit(engine.session, &request, &sequence, &err), &err);
            CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
            struct ft_sequence_info info;
            ft_session_sequence_info(engine.session, sequence, &info);
            CHECK_EQ(info.reused_count > 0, reuse && turn);
            CHECK_EQ(info.reused_count % engine.plan.page_tokens, 0);
            if (turn)
                memcpy(text[reuse], tokens[sequence], sizeof text[reuse]);
            ft_session_release(engine.session, sequence);
        }
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
    CHECK(memcmp(text[0], text[1], sizeof text[0]) == 0);
    prompts_free(&p);
}

TEST(bad_requests_are_refused_with_the_way_out)
{
    struct ft_error err;
    struct ft_engine engine;
    uint32_t ids[3] = {1, 5000, 2}, sequence;
    CHECK_OK(fixture_open(&engine, DIR, &cpu, &err), &err);
    struct ft_request request = {.prompt = ids, .prompt_count = 0, .max_tokens = 1};
    CHECK_FAILS(ft_session_submit(engine.session, &request, &sequence, &err), FT_USAGE, "empty", &err);
    request.prompt_count = 3;
    CHECK_FAILS(ft_session_submit(engine.session, &request, &sequence, &err), FT_USAGE,
                "token 1 of the prompt is 5000, and the vocabulary has 4096", &err);
    ids[1] = 2;
    request.max_tokens = 100000;
    CHECK_FAILS(ft_session_submit(engine.session, &request, &sequence, &err), FT_LIMIT, "--kv-tokens", &err);
    request.max_tokens = 10;
    for (uint32_t i = 0; i < 8; i++)
        CHECK_OK(ft_session_submit(engine.session, &request, &sequence, &err), &err);
    CHECK_FAILS(ft_session_submit(engine.session, &request, &sequence, &err), FT_LIMIT, "--sequences", &err);
    ft_session_cancel(engine.session, 3);
    uint32_t counts[FT_SEQUENCES_MAX] = {0}, tokens[FT_SEQUENCES_MAX][256];
    CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
    CHECK_EQ(counts[3], 0);
    CHECK_EQ(counts[4], 10);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
}

/* A damaged embedding row fails the sequence that uses the token, and no other; mended, it resumes and ends well. */
TEST(a_sequence_that_is_not_a_number_fails_alone_and_resumes)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    REQUIRE(prompts_read(&p));
    CHECK_OK(fixture_open(&engine, DIR, &cpu, &err), &err);
    REQUIRE(engine.loaded.weights.embed.format == FT_FORMAT_BF16);
    uint32_t hidden = engine.model->hidden, damaged = p.ids[0][2], good = 2, bad = 0;
    for (uint32_t i = 0; i < p.id_count[good]; i++)
        REQUIRE(p.ids[good][i] != damaged);
    for (uint32_t i = 0; i < p.want_count[good]; i++)
        REQUIRE(p.want[good][i] != damaged);
    uint16_t *row = (uint16_t *)(uintptr_t)engine.loaded.weights.embed.data + (size_t)damaged * hidden;
    uint16_t before = row[7];
    row[7] = 0x7fc0;
    uint32_t tokens[FT_SEQUENCES_MAX][256] = {{0}}, counts[FT_SEQUENCES_MAX] = {0}, handles[2];
    struct ft_request requests[2] = {request_for(&p, good), request_for(&p, bad)};
    for (uint32_t i = 0; i < 2; i++)
        CHECK_OK(ft_session_submit(engine.session, &requests[i], &handles[i], &err), &err);
    CHECK_FAILS(ft_session_resume(engine.session, handles[0], &err), FT_USAGE, "has not failed", &err);
    CHECK_EQ(fixture_drain(engine.session, tokens, counts), 1);
    CHECK_EQ(counts[handles[0]], p.want_count[good]);
    CHECK(memcmp(tokens[handles[0]], p.want[good], p.want_count[good] * 4) == 0);
    CHECK_EQ(counts[handles[1]], 0);
    row[7] = before;
    CHECK_OK(ft_session_resume(engine.session, handles[1], &err), &err);
    CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
    CHECK_EQ(counts[handles[1]], p.want_count[bad]);
    CHECK(memcmp(tokens[handles[1]], p.want[bad], p.want_count[bad] * 4) == 0);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    prompts_free(&p);
}

/* One recorded run, then the same placements again and again: every token, every time. */
TEST(a_recorded_trace_replays_to_the_same_bits)
{
    struct prompts p;
    struct ft_error err;
    REQUIRE(prompts_read(&p));
    char path[] = "/tmp/ft-replay-XXXXXX";
    int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    close(fd);
    struct fixture_config config = cpu;
    config.strategy = FT_STRATEGY_HYBRID;
    config.device = FT_DEVICE_HOST;
    config.share = 0.5;
    config.slots = 40;
    config.trace = path;
    uint32_t first[64] = {0}, first_count = 0;
    for (uint32_t run = 0; run < 4; run++) {
        struct ft_engine engine;
        if (run) {
            config.trace = NULL;
            config.replay = path;
            config.link_delay_us = 30;
        }
        CHECK_OK(fixture_open(&engine, DIR, &config, &err), &err);
        uint32_t tokens[FT_SEQUENCES_MAX][256] = {{0}}, counts[FT_SEQUENCES_MAX] = {0}, sequence;
        struct ft_request request = request_for(&p, 1);
        CHECK_OK(ft_session_submit(engine.session, &request, &sequence, &err), &err);
        CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
        struct ft_session_stats stats;
        ft_session_stats(engine.session, &stats);
        CHECK(stats.fetches > 0 && stats.cpu_experts > 0);
        CHECK_EQ(stats.policy_repairs, 0);
        CHECK_EQ(stats.departures, 0);
        if (!run) {
            first_count = counts[sequence];
            memcpy(first, tokens[sequence], first_count * 4);
        }
        CHECK_EQ(counts[sequence], first_count);
        CHECK(memcmp(first, tokens[sequence], first_count * 4) == 0);
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
    /* Another prompt is another run: its routers choose other experts, and the stats say so. */
    struct ft_engine engine;
    CHECK_OK(fixture_open(&engine, DIR, &config, &err), &err);
    struct ft_request request = request_for(&p, 2);
    uint32_t sequence;
    CHECK_OK(ft_session_submit(engine.session, &request, &sequence, &err), &err);
    CHECK_EQ(fixture_drain(engine.session, NULL, NULL), 0);
    struct ft_session_stats stats;
    ft_session_stats(engine.session, &stats);
    CHECK(stats.departures > 0);
    CHECK(stats.departures <= stats.hits + stats.misses);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    unlink(path);
    prompts_free(&p);
}

TEST_MAIN(RUN(greedy_texts_of_every_prompt_are_equal_for_every_strategy)
              RUN(sampled_text_is_the_same_alone_and_batched_and_with_any_workers)
                  RUN(a_shared_prefix_is_reused_from_a_snapshot_and_changes_nothing)
                      RUN(bad_requests_are_refused_with_the_way_out)
                          RUN(a_sequence_that_is_not_a_number_fails_alone_and_resumes)
                              RUN(a_recorded_trace_replays_to_the_same_bits))
