/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A hybrid run is recorded once, 50 sequences with the logits of all their rows; then it is replayed 20
 * times, in new sessions with other link delays and one or two workers: 1,000 sequences, every logit the same
 * bits.
 */
#include "jobs/session_internal.h"
#include "tests/fixture_session.h"

#include <time.h>
#include <unistd.h>

#define SEQUENCES 50u
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SESSIONS 2u /* ten times slower each */
#else
#define SESSIONS 20u
#endif
#define TOKENS_MAX 12u

struct recorded {
    uint32_t rows;
    float *logits; /* [rows, vocab] */
};

static struct ft_request request_at(const struct prompts *p, uint32_t i)
{
    struct ft_request request = prompts_request(p, i % p->count);
    request.max_tokens = FT_MIN(request.max_tokens, TOKENS_MAX);
    /* Half of them sampled: the draw, too, must be the same. */
    if (i % 2)
        request.sampling = (struct ft_sampling){
            .temperature = 0.8f, .top_p = 0.95f, .repetition_penalty = 1, .seed = 1000 + i};
    return request;
}

static uint32_t rows_of(const struct ft_request *request)
{
    return request->prompt_count + request->max_tokens - 1;
}

/* Pairs of sequences run together, so that the batch has more than one shape. */
static void run_pair(struct ft_session *session, const struct prompts *p, uint32_t first, uint32_t vocab,
                     struct recorded *out)
{
    struct ft_capture captures[2];
    struct ft_error err;
    uint32_t handles[2];
    for (uint32_t i = 0; i < 2; i++) {
        struct ft_request request = request_at(p, first + i);
        captures[i] = (struct ft_capture){.row_count = out[i].rows, .logits = out[i].logits};
        memset(out[i].logits, 0, (size_t)out[i].rows * vocab * sizeof(float));
        request.capture = &captures[i];
        CHECK_OK(ft_session_submit(session, &request, &handles[i], &err), &err);
    }
    CHECK_EQ(fixture_drain(session, NULL, NULL), 0);
    for (uint32_t i = 0; i < 2; i++)
        ft_session_release(session, handles[i]);
}

static struct fixture_config config_for(uint32_t workers)
{
    return (struct fixture_config){.strategy = FT_STRATEGY_HYBRID,
                                   .device = FT_DEVICE_HOST,
                                   .workers = workers,
                                   .sequences = 2,
                                   .slots = 40,
                                   .share = 0.5,
                                   .all_logits = true};
}

static void record(const struct prompts *p, const char *path, struct recorded *first, uint32_t *vocab)
{
    struct ft_error err;
    struct ft_engine engine;
    struct fixture_config config = config_for(1);
    config.trace = path;
    CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
    REQUIRE(engine.session != NULL);
    *vocab = engine.model->vocab;
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        struct ft_request request = request_at(p, i);
        first[i].rows = rows_of(&request);
        first[i].logits = malloc((size_t)first[i].rows * *vocab * sizeof(float));
        REQUIRE(first[i].logits != NULL);
    }
    for (uint32_t i = 0; i < SEQUENCES; i += 2)
        run_pair(engine.session, p, i, *vocab, &first[i]);
    struct ft_session_stats stats;
    ft_session_stats(engine.session, &stats);
    CHECK(stats.fetches > 1000 && stats.cpu_experts > 1000 && stats.hits > 1000);
    CHECK_EQ(stats.trace_dropped, 0);
    printf("recorded: %llu steps, %llu hits, %llu fetches, %llu experts on the CPU\n",
           (unsigned long long)stats.steps, (unsigned long long)stats.hits, (unsigned long long)stats.fetches,
           (unsigned long long)stats.cpu_experts);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
}

/* One session: all sequences again. Returns how many had the same bits. */
static uint32_t replay(struct ft_engine *engine, const struct prompts *p, const struct recorded *first,
                       uint32_t vocab, uint64_t seed)
{
    struct ft_error err;
    uint32_t same = 0, rows_max = 0;
    struct session_change change = {
        .extra = &engine->replay, .link_delay_ns = seed % 3 * 15000, .seed = seed};
    int status = session_reopen(engine, &change, &err);
    CHECK_OK(status, &err);
    if (status != FT_OK)
        return 0;
    for (uint32_t i = 0; i < SEQUENCES; i++)
        rows_max = FT_MAX(rows_max, first[i].rows);
    struct recorded now[2];
    for (uint32_t i = 0; i < 2; i++)
        now[i].logits = malloc((size_t)rows_max * vocab * sizeof(float));
    for (uint32_t i = 0; now[0].logits && now[1].logits && i < SEQUENCES; i += 2) {
        now[0].rows = first[i].rows;
        now[1].rows = first[i + 1].rows;
        run_pair(engine->session, p, i, vocab, now);
        for (uint32_t k = 0; k < 2; k++)
            same +=
                memcmp(now[k].logits, first[i + k].logits, (size_t)now[k].rows * vocab * sizeof(float)) == 0;
    }
    free(now[0].logits);
    free(now[1].logits);
    CHECK_EQ(ft_replay_departures(engine->session->step.policy_state), 0);
    return same;
}

TEST(a_thousand_replayed_sequences_have_the_recorded_bits)
{
    struct prompts p;
    struct ft_error err;
    struct recorded first[SEQUENCES] = {{0}};
    uint32_t vocab = 0, same = 0, workers_max = sysconf(_SC_NPROCESSORS_ONLN) > 1 ? 2 : 1;
    char path[] = "/tmp/ft-replay-XXXXXX";
    int fd = mkstemp(path);
    REQUIRE(fd >= 0 && prompts_read(&p));
    close(fd);
    record(&p, path, first, &vocab);
    for (uint32_t workers = 1; workers <= 2; workers++) {
        struct ft_engine engine;
        struct fixture_config config = config_for(FT_MIN(workers, workers_max));
        config.replay = path;
        CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
        REQUIRE(engine.session != NULL);
        for (uint32_t s = 0; s < SESSIONS / 2; s++)
            same += replay(&engine, &p, first, vocab, 1 + workers * SESSIONS + s);
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
    printf("replayed: %u of %u sequences with the same bits\n", same, SESSIONS * SEQUENCES);
    CHECK_EQ(same, SESSIONS * SEQUENCES);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        free(first[i].logits);
    unlink(path);
    prompts_free(&p);
}

TEST_MAIN(RUN(a_thousand_replayed_sequences_have_the_recorded_bits))
