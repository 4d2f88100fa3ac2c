/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sessions on a GPU for tests that disturb them: one engine per strategy stays loaded, its session is opened
 * again and again; a few prompts and their greedy continuations, learnt from an undisturbed run.
 *
 * At most 16 rows a step: then a row's result does not depend on who shares its step.
 */
#ifndef FT_TESTS_GPU_SESSION_H
#define FT_TESTS_GPU_SESSION_H

#include "jobs/lane_cuda_internal.h"
#include "jobs/session_internal.h"
#include "tests/fixture_session.h"
#include "tests/gpu_needed.h"

#include <time.h>

#ifdef FT_FAKE_CUDA
#include "tests/fake_cuda.h"
#endif

#define PROMPTS 6u
#define PROMPT_MAX 24u
#define NEW 6u
#define SEQUENCES 8u
#define EVENTS_MAX (2 * FT_SEQUENCES_MAX)
#define DRAIN_S 60.0

static const uint32_t prompt_count[PROMPTS] = {1, 5, 8, 13, 17, 23};
static uint32_t prompt_ids[PROMPTS][PROMPT_MAX], want[PROMPTS][NEW];

/* What a drained session said. */
struct said {
    uint32_t tokens[FT_SEQUENCES_MAX][64], count[FT_SEQUENCES_MAX];
    uint32_t failed, ended, cancelled, steps;
    bool failed_handle[FT_SEQUENCES_MAX];
    char message[512]; /* of the last failure */
};
static struct said said;

static inline double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#ifdef FT_FAKE_CUDA
static const struct fake_cuda_options good_gpu = {.device_count = 1,
                                                  .driver_version = 13000,
                                                  .major = 9,
                                                  .memory_bytes = 1ull << 30,
                                                  .pinned_bytes = 1ull << 30,
                                                  .seed = 1};

static inline void check_nothing_is_left(void)
{
    struct fake_cuda_live live;
    fake_cuda_live(&live);
    CHECK_EQ(live.device_bytes, 0);
    CHECK_EQ(live.pinned_bytes, 0);
    CHECK_EQ(live.registered, 0);
    CHECK_EQ(live.streams, 0);
    CHECK_EQ(live.events, 0);
    CHECK_EQ(live.graphs, 0);
}
#endif

/* A GPU as good as new; no session may be open. */
static inline void begin_gpu(void)
{
#ifdef FT_FAKE_CUDA
    check_nothing_is_left();
    fake_cuda_init(&good_gpu);
#endif
}

static inline bool can_run(void)
{
#ifdef FT_FAKE_CUDA
    fake_cuda_init(&good_gpu);
#endif
    need_gpu();
    uint64_t random = 88172645463325252u;
    for (uint32_t p = 0; p < PROMPTS; p++)
        for (uint32_t i = 0; i < prompt_count[p]; i++)
            prompt_ids[p][i] = 3 + random_below(&random, 300); /* the fixtures have 320 ids */
    return true;
}

static inline int engine_open(struct ft_engine *engine, const char *fixture, enum ft_strategy strategy,
                              enum ft_device device, uint32_t slots, struct ft_error *err)
{
    char dir[4096];
    struct fixture_config config = {
        .strategy = strategy,
        .device = device,
        .workers = 2,
        .chunk = 8,
        .slots = strategy == FT_STRATEGY_OFFLOAD || strategy == FT_STRATEGY_HYBRID ? slots : 0,
        .sequences = SEQUENCES,
        .share = 0.5,
        .deterministic = true};
    snprintf(dir, sizeof dir, "%s/fixtures/%s", FT_DATA_DIR, fixture);
    return fixture_open(engine, dir, &config, err);
}

struct change {
    enum ft_handshake handshake;
    uint32_t gpu;
    const struct ft_policy *policy;
    uint64_t step_timeout_ns, watchdog_ns;
    bool timed; /* may depend on measured time; else deterministic */
};

/* Closes the engine's session, which must be possible, and opens it again. */
static inline int reopen(struct ft_engine *engine, const struct change *change, struct ft_error *err)
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
                                                           .deterministic = !change->timed},
                                         .topology = &engine->topology,
                                         .gpu = change->gpu,
                                         .handshake = change->handshake,
                                         .step_timeout_ns = change->step_timeout_ns};
    CHECK(ft_session_close(engine->session));
    engine->session = NULL;
    int status = ft_session_open(&engine->session, &options, err);
    if (status == FT_OK && change->watchdog_ns && engine->session->cuda)
        engine->session->cuda->watchdog_ns = change->watchdog_ns;
    return status;
}

static inline struct ft_request request_of(uint32_t prompt, uint32_t max_tokens)
{
    return (struct ft_request){.prompt = prompt_ids[prompt],
                               .prompt_count = prompt_count[prompt],
                               .max_tokens = max_tokens,
                               .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1}};
}

static inline uint32_t submit(struct ft_session *session, uint32_t prompt, uint32_t max_tokens)
{
    struct ft_error err;
    uint32_t handle = 0;
    struct ft_request request = request_of(prompt, max_tokens);
    CHECK_OK(ft_session_submit(session, &request, &handle, &err), &err);
    said.count[handle] = 0;
    said.failed_handle[handle] = false;
    return handle;
}

/* One step; its events are added to what was said. */
static inline int step_once(struct ft_session *session, struct ft_error *err)
{
    struct ft_event events[EVENTS_MAX];
    uint32_t count;
    int status = ft_session_step(session, events, EVENTS_MAX, &count, err);
    said.steps++;
    for (uint32_t i = 0; status == FT_OK && i < count; i++) {
        uint32_t h = events[i].sequence;
        if (events[i].kind == FT_EVENT_TOKEN && said.count[h] < 64)
            said.tokens[h][said.count[h]++] = events[i].token;
        said.ended += events[i].kind == FT_EVENT_END;
        said.cancelled += events[i].finish == FT_FINISH_CANCELLED;
        if (events[i].kind == FT_EVENT_FAILED) {
            said.failed++;
            said.failed_handle[h] = true;
            snprintf(said.message, sizeof said.message, "%.500s", events[i].message);
        }
    }
    return status;
}

/* Until nothing is queued; never longer than DRAIN_S. */
static inline void drain(struct ft_session *session)
{
    struct ft_error err;
    double begin = seconds();
    while (!ft_session_is_idle(session) && seconds() - begin < DRAIN_S) {
        int status = step_once(session, &err);
        CHECK_OK(status, &err);
        if (status != FT_OK)
            return;
    }
    CHECK(ft_session_is_idle(session));
}

static inline bool is_text(uint32_t handle, uint32_t prompt, uint32_t tokens)
{
    bool same = said.count[handle] == tokens && memcmp(said.tokens[handle], want[prompt], tokens * 4) == 0;
    for (uint32_t i = 0; i < tokens && !same; i++)
        fprintf(stderr, "prompt %u, token %u: %u, wanted %u; %u tokens, failed: %s\n", prompt, i,
                i < said.count[handle] ? said.tokens[handle][i] : 0, want[prompt][i], said.count[handle],
                said.failed_handle[handle] ? said.message : "no");
    return same;
}

/* Every prompt alone: what the undisturbed session says. */
static inline void learn(struct ft_session *session)
{
    for (uint32_t p = 0; p < PROMPTS; p++) {
        memset(&said, 0, sizeof said);
        uint32_t handle = submit(session, p, NEW);
        drain(session);
        CHECK_EQ(said.failed, 0);
        CHECK_EQ(said.count[handle], NEW);
        memcpy(want[p], said.tokens[handle], sizeof want[p]);
        ft_session_release(session, handle);
    }
}

/* Some prompts together; each must say what it said alone. */
static inline void check_texts(struct ft_session *session, uint32_t first, uint32_t count)
{
    uint32_t handles[PROMPTS];
    memset(&said, 0, sizeof said);
    for (uint32_t i = 0; i < count; i++)
        handles[i] = submit(session, first + i, NEW);
    drain(session);
    CHECK_EQ(said.failed, 0);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(is_text(handles[i], first + i, NEW));
        ft_session_release(session, handles[i]);
    }
}

/* Between steps: each GPU's slot map is the host's for its own layers, and every slot that a map names is its GPU's and
 * holds its expert. */
static inline void check_maps(const struct ft_session *session)
{
    const struct ft_slots *slots = &session->step.slots;
    uint64_t experts = (uint64_t)slots->layer_count * slots->expert_count;
    uint32_t *map = malloc(experts * sizeof *map);
    char *held = malloc(slots->slot_bytes);
    REQUIRE(map && held);
    for (const struct ft_lane_cuda *lane = session->cuda; lane; lane = lane->next) {
        const struct ft_slots_part *part = &slots->parts[ft_slots_part_of(slots, lane->layer_begin)];
        uint64_t first = (uint64_t)lane->layer_begin * slots->expert_count,
                 end = (uint64_t)lane->layer_end * slots->expert_count;
        if (lane->map_dirty)
            continue;
        CHECK_EQ(ft_cuda_use(lane), 0);
        CHECK_EQ(cudaMemcpy(map, lane->c.exchange.slot_of, experts * sizeof *map, cudaMemcpyDeviceToHost), 0);
        for (uint64_t e = first; e < end; e++) {
            const struct ft_layer_weights *w = &session->options.weights->layers[e / slots->expert_count];
            uint32_t slot = slots->map[e];
            CHECK_EQ(map[e], slot == FT_NONE ? FT_NONE : slots->blob[slot]);
            if (slot == FT_NONE)
                continue;
            CHECK(slot >= part->begin && slot < part->end);
            CHECK_EQ(cudaMemcpy(held, ft_slots_memory(slots, slot), w->expert_layout.bytes, cudaMemcpyDeviceToHost),
                     0);
            CHECK(memcmp(held, w->experts + (uint64_t)w->expert_layout.stride * (e % slots->expert_count),
                         w->expert_layout.bytes) == 0);
        }
    }
    free(map);
    free(held);
}

/* Every prompt alone says what it said before; `check` looks at the session after each step. */
static inline void check_steps(struct ft_session *session, void (*check)(const struct ft_session *session))
{
    struct ft_error err;
    for (uint32_t p = 0; p < PROMPTS; p++) {
        memset(&said, 0, sizeof said);
        uint32_t handle = submit(session, p, NEW);
        while (!ft_session_is_idle(session) && !said.failed) {
            CHECK_OK(step_once(session, &err), &err);
            check(session);
        }
        CHECK(is_text(handle, p, NEW));
        ft_session_release(session, handle);
    }
}

#endif
