/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One sequence decodes (A), and while it does a prompt comes (B), whose prefill then runs slice by slice. For tests
 * on any device; what every step was is read from the session after it.
 */
#ifndef FT_TESTS_SLICED_SESSION_H
#define FT_TESTS_SLICED_SESSION_H

#include "jobs/session_internal.h"
#include "tests/fixture_session.h"

#define SLICED_STEPS_MAX 1024u
#define A_PROMPT 12u
#ifndef A_TOKENS
#define A_TOKENS 60u
#endif
#define A_BEFORE 5u /* tokens of A before B comes */

struct sliced_step {
    bool prefill;
    uint32_t rows, layer_begin, layer_end;
    uint64_t slots; /* of a decode step: what the slots hold, hits and misses, as one number */
};

struct sliced_run {
    struct sliced_step steps[SLICED_STEPS_MAX];
    uint32_t step_count;
    uint32_t tokens[FT_SEQUENCES_MAX][256], counts[FT_SEQUENCES_MAX];
    bool failed[FT_SEQUENCES_MAX], ended[FT_SEQUENCES_MAX];
    enum ft_finish finish[FT_SEQUENCES_MAX];
    uint32_t a, b;
};

/* The prompt of a fixture's reference. */
struct sliced_prompt {
    uint32_t ids[256], count, greedy[256], greedy_count, vocab;
};

static inline bool sliced_prompt_read(struct sliced_prompt *p, const char *dir)
{
    struct ft_arrays arrays;
    struct ft_error err;
    char path[4200];
    snprintf(path, sizeof path, "%s/reference.safetensors", dir);
    if (ft_safetensors_read(&arrays, path, 1u << 30, &err) != FT_OK) {
        CHECK_OK(err.code, &err);
        return false;
    }
    const struct ft_array *ids = ft_arrays_find(&arrays, "input_ids"),
                          *greedy = ft_arrays_find(&arrays, "greedy");
    p->count = (uint32_t)FT_MIN(ids->shape[0], 256u);
    p->greedy_count = (uint32_t)FT_MIN(greedy->shape[0], 256u);
    p->vocab = (uint32_t)ft_arrays_find(&arrays, "logits")->shape[1];
    memcpy(p->ids, ids->data, p->count * sizeof *p->ids);
    memcpy(p->greedy, greedy->data, p->greedy_count * sizeof *p->greedy);
    ft_arrays_fini(&arrays);
    return true;
}

/* FNV-1a over 32-bit words. */
static inline uint64_t sliced_mix(uint64_t hash, uint32_t word)
{
    return (hash ^ word) * 0x100000001b3u;
}

/* Which experts the slots hold and in which order they were used; hits and misses of the step. */
static inline uint64_t sliced_slots(const struct ft_session *session)
{
    const struct ft_slots *slots = &session->step.slots;
    uint64_t hash = sliced_mix(sliced_mix(0xcbf29ce484222325u, session->step.hits), session->step.misses);
    for (uint32_t i = 0; i < slots->count; i++) {
        uint32_t older = 0; /* step numbers differ between runs, their order does not */
        for (uint32_t j = 0; j < slots->count; j++)
            older += slots->last_used[j] < slots->last_used[i];
        hash = sliced_mix(sliced_mix(sliced_mix(hash, slots->layer[i]), slots->expert[i]), older);
    }
    return hash;
}

/* One call; notes the step and its events. */
static inline void sliced_step(struct ft_session *session, struct sliced_run *run)
{
    static struct ft_event events[2 * FT_SEQUENCES_MAX];
    struct ft_error err;
    uint32_t count = 0, before = session->step.step_number;
    CHECK_OK(ft_session_step(session, events, 2 * FT_SEQUENCES_MAX, &count, &err), &err);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t h = events[i].sequence;
        if (events[i].kind == FT_EVENT_TOKEN && run->counts[h] < 256)
            run->tokens[h][run->counts[h]++] = events[i].token;
        run->failed[h] |= events[i].kind == FT_EVENT_FAILED;
        if (events[i].kind == FT_EVENT_END) {
            run->ended[h] = true;
            run->finish[h] = events[i].finish;
        }
    }
    if (session->step.step_number == before || run->step_count == SLICED_STEPS_MAX)
        return;
    const struct ft_batch *batch = session->batch;
    run->steps[run->step_count++] = (struct sliced_step){.prefill = batch->prefill,
                                                         .rows = batch->rows,
                                                         .layer_begin = batch->layer_begin,
                                                         .layer_end = batch->layer_end,
                                                         .slots = batch->prefill ? 0 : sliced_slots(session)};
}

static inline void sliced_drain(struct ft_session *session, struct sliced_run *run)
{
    while (!ft_session_is_idle(session) && run->step_count < SLICED_STEPS_MAX)
        sliced_step(session, run);
    CHECK(ft_session_is_idle(session));
}

static inline struct ft_request sliced_request(const uint32_t *ids, uint32_t count, uint32_t max_tokens)
{
    return (struct ft_request){.prompt = ids,
                               .prompt_count = count,
                               .max_tokens = max_tokens,
                               .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1}};
}

/* A is submitted and has its first tokens. */
static inline void sliced_begin(struct ft_session *session, const struct sliced_prompt *p,
                                struct sliced_run *run)
{
    struct ft_error err;
    struct ft_request a = sliced_request(p->ids, A_PROMPT, A_TOKENS);
    memset(run, 0, sizeof *run);
    CHECK_OK(ft_session_submit(session, &a, &run->a, &err), &err);
    while (run->counts[run->a] < A_BEFORE && !run->failed[run->a] && run->step_count < SLICED_STEPS_MAX)
        sliced_step(session, run);
}

/* B is submitted. */
static inline void sliced_come(struct ft_session *session, const struct sliced_prompt *p,
                               struct sliced_run *run, uint32_t max_tokens, const struct ft_capture *capture)
{
    struct ft_error err;
    struct ft_request b = sliced_request(p->ids, p->count, max_tokens);
    b.capture = capture;
    CHECK_OK(ft_session_submit(session, &b, &run->b, &err), &err);
}

/* Steps until B's chunk is half done. False: it came and went as a whole. */
static inline bool sliced_pause(struct ft_session *session, struct sliced_run *run)
{
    for (uint32_t i = 0; i < 1000; i++) {
        sliced_step(session, run);
        if (session->chunk.active)
            return true;
    }
    return false;
}

/* Slices of a prefill follow each other without gaps from the first layer to the last. Returns in how many chunks
 * there were decode steps in between; there are none where the time for all slices was saved up. */
static inline uint32_t sliced_check(const struct sliced_run *run, uint32_t layers)
{
    uint32_t next = 0, sliced = 0, between = 0;
    for (uint32_t i = 0; i < run->step_count; i++) {
        const struct sliced_step *s = &run->steps[i];
        if (!s->prefill) { /* also those between two chunks */
            CHECK_EQ(s->layer_begin, 0);
            CHECK_EQ(s->layer_end, layers);
            between += next > 0;
            continue;
        }
        CHECK_EQ(s->layer_begin, next);
        CHECK(s->layer_end > s->layer_begin && s->layer_end <= layers);
        sliced += s->layer_end == layers && between > 0;
        next = s->layer_end % layers;
        between = next ? between : 0;
    }
    CHECK_EQ(next, 0);
    return sliced;
}

#endif
