/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The demo model for tests of the session: its prompts with their greedy continuations, and an engine whose
 * session is opened again with another policy, watchdog or number of workers while the weights stay loaded.
 */
#ifndef FT_TESTS_FIXTURE_SESSION_H
#define FT_TESTS_FIXTURE_SESSION_H

#include "tests/fixture.h"

#include <jansson.h>

#define TINY_DIR FT_DATA_DIR "/ft-tiny"
#define PROMPTS_MAX 64u

struct prompts {
    uint32_t count;
    uint32_t *ids[PROMPTS_MAX], id_count[PROMPTS_MAX];
    uint32_t *want[PROMPTS_MAX], want_count[PROMPTS_MAX]; /* greedy, from the reference implementation */
};

static inline uint32_t prompts_read_ids(const json_t *array, uint32_t **ids)
{
    size_t count = json_array_size(array);
    *ids = calloc(count + 1, sizeof **ids);
    for (size_t i = 0; i < count && *ids; i++)
        (*ids)[i] = (uint32_t)json_integer_value(json_array_get(array, i));
    return (uint32_t)count;
}

static inline bool prompts_read(struct prompts *p)
{
    json_error_t error;
    json_t *root = json_load_file(TINY_DIR "/reference.json", 0, &error);
    json_t *list = json_object_get(root, "prompts");
    memset(p, 0, sizeof *p);
    for (size_t i = 0; i < json_array_size(list) && p->count < PROMPTS_MAX; i++) {
        json_t *prompt = json_array_get(list, i);
        p->id_count[p->count] = prompts_read_ids(json_object_get(prompt, "prompt_ids"), &p->ids[p->count]);
        p->want_count[p->count] = prompts_read_ids(json_object_get(prompt, "greedy_ids"), &p->want[p->count]);
        p->count++;
    }
    json_decref(root);
    return p->count > 5;
}

static inline void prompts_free(struct prompts *p)
{
    for (uint32_t i = 0; i < p->count; i++) {
        free(p->ids[i]);
        free(p->want[i]);
    }
}

static inline struct ft_request prompts_request(const struct prompts *p, uint32_t i)
{
    return (struct ft_request){.prompt = p->ids[i],
                               .prompt_count = p->id_count[i],
                               .max_tokens = p->want_count[i],
                               .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1}};
}

/* The first few: each runs many times, and with a sanitizer ten times slower. */
static inline bool prompts_read_some(struct prompts *p)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    uint32_t few = 2;
#else
    uint32_t few = 4;
#endif
    bool good = prompts_read(p);
    for (; p->count > few; p->count--) {
        free(p->ids[p->count - 1]);
        free(p->want[p->count - 1]);
    }
    return good;
}

/* So many at a time; each must say what the reference says. */
static inline void prompts_check_texts(struct ft_session *session, const struct prompts *p, uint32_t together)
{
    static uint32_t tokens[FT_SEQUENCES_MAX][256], counts[FT_SEQUENCES_MAX];
    struct ft_error err;
    for (uint32_t first = 0; first < p->count; first += together) {
        uint32_t handles[8], count = FT_MIN(together, p->count - first);
        memset(counts, 0, sizeof counts);
        for (uint32_t i = 0; i < count; i++) {
            struct ft_request request = prompts_request(p, first + i);
            CHECK_OK(ft_session_submit(session, &request, &handles[i], &err), &err);
        }
        CHECK_EQ(fixture_drain(session, tokens, counts), 0);
        for (uint32_t i = 0; i < count; i++) {
            CHECK_EQ(counts[handles[i]], p->want_count[first + i]);
            CHECK(memcmp(tokens[handles[i]], p->want[first + i], counts[handles[i]] * sizeof(uint32_t)) == 0);
            ft_session_release(session, handles[i]);
        }
    }
}

/* What a session may be opened with instead of what the engine chose. */
struct session_change {
    const struct ft_policy *policy;
    const void *extra;
    uint64_t step_timeout_ns, link_delay_ns, seed;
    void (*trace)(void *context, const struct ft_trace_step *step);
    void *trace_context;
    bool always_looks; /* router look-ahead in every decode step; else in none */
};

/* Closes the engine's session and opens it again; weights, tables and plan stay. */
static inline int session_reopen(struct ft_engine *engine, const struct session_change *change,
                                 struct ft_error *err)
{
    struct ft_session_options options = {.model = engine->model,
                                         .weights = &engine->loaded.weights,
                                         .ple = engine->tables,
                                         .plan = &engine->plan,
                                         .policy = change->policy ? change->policy : engine->policy,
                                         .policy_params = {.model = engine->model,
                                                           .machine = &engine->machine,
                                                           .fetch_share = engine->plan.fetch_share,
                                                           .slot_count = engine->plan.slot_count,
                                                           .deterministic = engine->plan.deterministic,
                                                           .no_look_ahead = !change->policy && !change->always_looks,
                                                           .always_looks = change->always_looks,
                                                           .extra = change->extra},
                                         .topology = &engine->topology,
                                         .link_delay_ns_max = change->link_delay_ns,
                                         .seed = change->seed,
                                         .trace = change->trace,
                                         .trace_context = change->trace_context,
                                         .step_timeout_ns = change->step_timeout_ns};
    ft_session_close(engine->session);
    engine->session = NULL;
    return ft_session_open(&engine->session, &options, err);
}

/* The demo model on the host device, hybrid, one prompt at a time and three: every text is the reference's. `check`, if
 * there is one, looks at the session in the end. */
static inline struct ft_session_stats prompts_run(const struct session_change *change, uint32_t slots, uint32_t workers,
                                                  const struct prompts *p,
                                                  void (*check)(const struct ft_session *session))
{
    struct fixture_config config = {.strategy = FT_STRATEGY_HYBRID,
                                    .device = FT_DEVICE_HOST,
                                    .workers = workers,
                                    .sequences = 4,
                                    .slots = slots,
                                    .share = 0.5};
    struct ft_session_stats stats = {0};
    struct ft_engine engine;
    struct ft_error err;
    CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
    CHECK_OK(session_reopen(&engine, change, &err), &err);
    if (engine.session) {
        prompts_check_texts(engine.session, p, 1);
        prompts_check_texts(engine.session, p, 3);
        if (check)
            check(engine.session);
        ft_session_stats(engine.session, &stats);
    }
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    return stats;
}

static inline uint64_t random_next(uint64_t *state)
{
    /* xorshift64: Marsaglia, "Xorshift RNGs", 2003; the state must not be 0 */
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static inline uint32_t random_below(uint64_t *state, uint32_t limit)
{
    return (uint32_t)((random_next(state) >> 16) % limit);
}

#endif
