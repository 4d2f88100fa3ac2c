/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 20,000 random steps: submit, cancel, release, resume, interrupt and step in any order, with random prompts,
 * strategies and failing steps, over pools that are too small. After every session each page is back, and
 * within a session the counts of pages add up.
 */
#include "jobs/session_internal.h"
#include "tests/fixture_session.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SESSIONS 6u /* ten times slower each */
#else
#define SESSIONS 25u
#endif
#define STEPS 800u /* of each session; slices of prompts are steps, too */
#define HANDLES 6u
#define KV_TOKENS 512u
#define EVENTS_MAX (2 * FT_SEQUENCES_MAX)

enum known { KNOWN_FREE, KNOWN_RUNNING, KNOWN_CANCELLING, KNOWN_ENDED, KNOWN_FAILED };

struct model_of_session {
    enum known phase[HANDLES];
    uint32_t prompt_of[HANDLES]; /* FT_NONE: a random prompt, no reference */
    uint32_t got[HANDLES];
    uint64_t random;
    uint32_t refused, tokens, ends, failures, resumes;
};

static uint16_t *damaged_row; /* of the embedding: while it is not a number, whoever reads it fails */
static uint16_t damaged_before;
static uint32_t damaged_token;

static void damage(bool on)
{
    damaged_row[3] = on ? 0x7fc0 : damaged_before;
}

static void submit(struct ft_session *session, struct model_of_session *m, const struct prompts *p)
{
    uint32_t ids[300], handle = 0, prompt = random_below(&m->random, p->count);
    struct ft_error err;
    struct ft_request request = prompts_request(p, prompt);
    uint32_t kind = random_below(&m->random, 4);
    if (kind) { /* common beginnings, so that snapshots are found */
        uint32_t count = 1 + random_below(&m->random, kind == 1 ? 300 : 80), fork = count;
        if (random_below(&m->random, 2))
            fork = random_below(&m->random, count);
        for (uint32_t i = 0; i < count; i++)
            ids[i] = i < fork ? p->want[6][i % p->want_count[6]] : random_below(&m->random, 4096);
        if (random_below(&m->random, 6) == 0)
            ids[random_below(&m->random, count)] = damaged_token;
        request.prompt = ids;
        request.prompt_count = count;
        request.max_tokens = random_below(&m->random, 60);
        request.sampling.temperature = random_below(&m->random, 2) ? 0.9f : 0;
        request.sampling.seed = m->random;
        prompt = FT_NONE;
    }
    request.reuse_prefix = random_below(&m->random, 2);
    int status = ft_session_submit(session, &request, &handle, &err);
    if (status == FT_OK) {
        CHECK(handle < HANDLES && m->phase[handle] == KNOWN_FREE);
        m->phase[handle] = KNOWN_RUNNING;
        m->prompt_of[handle] = prompt;
        m->got[handle] = 0;
    } else {
        CHECK_EQ(status, FT_LIMIT);
        CHECK(strstr(err.message, "--kv-tokens") || strstr(err.message, "--sequences"));
        m->refused++;
    }
}

static void take_event(struct model_of_session *m, const struct prompts *p, const struct ft_event *event)
{
    uint32_t h = event->sequence;
    CHECK(h < HANDLES);
    CHECK(m->phase[h] == KNOWN_RUNNING || (m->phase[h] == KNOWN_CANCELLING && event->kind == FT_EVENT_END));
    if (event->kind == FT_EVENT_TOKEN) {
        m->tokens++;
        uint32_t at = m->got[h]++;
        if (m->prompt_of[h] != FT_NONE)
            CHECK(at < p->want_count[m->prompt_of[h]] && p->want[m->prompt_of[h]][at] == event->token);
    } else if (event->kind == FT_EVENT_END) {
        CHECK_EQ(event->finish == FT_FINISH_CANCELLED, m->phase[h] == KNOWN_CANCELLING);
        m->phase[h] = KNOWN_ENDED;
        m->ends++;
    } else {
        CHECK(strstr(event->message, "not numbers") != NULL);
        m->phase[h] = KNOWN_FAILED;
        m->failures++;
    }
}

static void step(struct ft_session *session, struct model_of_session *m, const struct prompts *p)
{
    struct ft_event events[EVENTS_MAX];
    struct ft_error err;
    uint32_t count;
    bool interrupted = random_below(&m->random, 20) == 0;
    if (interrupted)
        ft_session_interrupt(session);
    damage(random_below(&m->random, 4) == 0);
    int status = ft_session_step(session, events, EVENTS_MAX, &count, &err);
    damage(false);
    CHECK_EQ(status, interrupted ? FT_CANCELLED : FT_OK);
    ft_session_clear_interrupt(session);
    for (uint32_t i = 0; status == FT_OK && i < count; i++)
        take_event(m, p, &events[i]);
}

static void disturb(struct ft_session *session, struct model_of_session *m)
{
    struct ft_error err;
    uint32_t h = random_below(&m->random, HANDLES), what = random_below(&m->random, 8);
    if (what == 0) {
        ft_session_cancel(session, h);
        if (m->phase[h] == KNOWN_RUNNING || m->phase[h] == KNOWN_FAILED)
            m->phase[h] = KNOWN_CANCELLING;
    } else if (what == 1 || m->phase[h] == KNOWN_ENDED) {
        ft_session_release(session, h);
        m->phase[h] = KNOWN_FREE;
    } else if (what < 5) {
        int status = ft_session_resume(session, h, &err);
        if (m->phase[h] != KNOWN_FAILED) {
            CHECK_EQ(status, FT_USAGE);
        } else if (status == FT_OK) {
            m->phase[h] = KNOWN_RUNNING;
            m->resumes++;
        } else {
            CHECK_EQ(status, FT_LIMIT);
        }
    }
}

/* Every page is free, or counted once for each sequence and each snapshot that holds it. */
static void check_pages(const struct ft_session *session)
{
    static uint32_t held[1024];
    const struct ft_kv *kv = &session->kv;
    uint32_t wrong = 0, used = 0;
    REQUIRE(kv->page_count <= FT_COUNT_OF(held));
    memset(held, 0, sizeof held);
    for (uint32_t i = 0; i < session->plan.sequences_max; i++)
        for (uint32_t k = 0; k < session->sequences[i].page_count; k++)
            held[session->sequences[i].pages[k]]++;
    for (uint32_t i = 0; i < session->snapshots.count; i++) {
        const struct ft_snapshot *s = &session->snapshots.entries[i];
        for (uint32_t k = 0; k < s->token_count / kv->layout.page_tokens; k++)
            held[s->pages[k]]++;
    }
    for (uint32_t i = 0; i < kv->page_count; i++) {
        wrong += held[i] != kv->references[i];
        used += held[i] != 0;
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(used + kv->free_count, kv->page_count);
}

/* Everything is released: one request may have the whole pool, and the reference text still comes. */
static void check_end(struct ft_session *session, const struct prompts *p)
{
    static uint32_t tokens[FT_SEQUENCES_MAX][256], counts[FT_SEQUENCES_MAX];
    struct ft_error err;
    uint32_t handle;
    for (uint32_t h = 0; h < HANDLES; h++)
        ft_session_release(session, h);
    check_pages(session);
    struct ft_request request = prompts_request(p, 1);
    request.max_tokens = session->plan.page_count * session->plan.page_tokens - request.prompt_count;
    CHECK_OK(ft_session_submit(session, &request, &handle, &err), &err);
    CHECK_EQ(session->kv.free_count, 0);
    ft_session_release(session, handle);
    CHECK_EQ(session->kv.free_count, session->plan.page_count);
    request = prompts_request(p, 1);
    memset(counts, 0, sizeof counts);
    CHECK_OK(ft_session_submit(session, &request, &handle, &err), &err);
    CHECK_EQ(fixture_drain(session, tokens, counts), 0);
    CHECK_EQ(counts[handle], p->want_count[1]);
    CHECK(memcmp(tokens[handle], p->want[1], p->want_count[1] * sizeof(uint32_t)) == 0);
}

static void run_session(uint32_t number, const struct prompts *p, struct model_of_session *m)
{
    static const enum ft_strategy strategies[] = {FT_STRATEGY_CPU, FT_STRATEGY_OFFLOAD, FT_STRATEGY_HYBRID,
                                                  FT_STRATEGY_FUSED};
    static const uint32_t chunks[] = {6, 7, 16, 33, 64, 100};
    struct ft_error err;
    struct ft_engine engine;
    m->random = 0x9e3779b97f4a7c15ull * (number + 1);
    enum ft_strategy strategy = strategies[random_below(&m->random, 4)];
    struct fixture_config config = {.strategy = strategy,
                                    .device = strategy == FT_STRATEGY_CPU ? FT_DEVICE_NONE : FT_DEVICE_HOST,
                                    .workers = 1 + random_below(&m->random, 2),
                                    .chunk = chunks[random_below(&m->random, 6)],
                                    .sequences = HANDLES,
                                    .share = 0.4,
                                    .ram_tables = random_below(&m->random, 2)};
    if (strategy == FT_STRATEGY_OFFLOAD || strategy == FT_STRATEGY_HYBRID) {
        config.slots = 1 + random_below(&m->random, 60);
        config.link_delay_us = random_below(&m->random, 30);
    }
    CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
    REQUIRE(engine.session != NULL);
    /* A pool that few requests fill: made smaller than any option allows for. */
    engine.plan.page_count = FT_MAX(HANDLES, KV_TOKENS / engine.plan.page_tokens);
    CHECK_OK(session_reopen(&engine,
                            &(struct session_change){.link_delay_ns = (uint64_t)(config.link_delay_us * 1e3),
                                                     .seed = number},
                            &err),
             &err);
    REQUIRE(engine.session != NULL);
    REQUIRE(engine.loaded.weights.embed.format == FT_FORMAT_BF16);
    damaged_token = 3000;
    damaged_row = (uint16_t *)(uintptr_t)engine.loaded.weights.embed.data +
                  (size_t)damaged_token * engine.model->hidden;
    damaged_before = damaged_row[3];
    for (uint32_t s = 0; s < STEPS; s++) {
        while (random_below(&m->random, 3) == 0)
            submit(engine.session, m, p);
        step(engine.session, m, p);
        while (random_below(&m->random, 3) == 0)
            disturb(engine.session, m);
        if (s % 16 == 0)
            check_pages(engine.session);
    }
    check_end(engine.session, p);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    memset(m->phase, 0, sizeof m->phase);
}

TEST(twenty_thousand_random_steps_leave_every_page_and_every_text_right)
{
    struct prompts p;
    struct model_of_session m = {.random = 1};
    REQUIRE(prompts_read(&p));
    for (uint32_t i = 0; i < SESSIONS; i++) {
        int before = test_failures_;
        run_session(i, &p, &m);
        if (test_failures_ != before)
            fprintf(stderr, "in session %u\n", i);
    }
    printf("%u tokens, %u ends, %u failures, %u resumes, %u refused\n", m.tokens, m.ends, m.failures,
           m.resumes, m.refused);
    CHECK(m.tokens > 40 * SESSIONS && m.ends > 10 * SESSIONS && m.refused > 10 * SESSIONS);
    CHECK(m.failures > SESSIONS / 2 && m.resumes > SESSIONS / 4);
    prompts_free(&p);
}

TEST_MAIN(RUN(twenty_thousand_random_steps_leave_every_page_and_every_text_right))
