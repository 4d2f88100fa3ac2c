/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench_prefill.h"

#include <stdlib.h>

#define EVENTS_MAX (2 * FT_SEQUENCES_MAX)
#define ROUNDS 2u /* alone: the first one finds no page touched and no graph built */

/* What one call brought. */
struct called {
    uint32_t tokens;
    bool ended; /* the prompt's sequence */
};

static int call(struct ft_session *session, uint32_t prompt, struct called *got, struct ft_error *err)
{
    struct ft_event events[EVENTS_MAX];
    uint32_t count;
    *got = (struct called){0};
    int status = ft_session_step(session, events, EVENTS_MAX, &count, err);
    for (uint32_t i = 0; status == FT_OK && i < count; i++) {
        got->tokens += events[i].kind == FT_EVENT_TOKEN;
        got->ended |= events[i].kind == FT_EVENT_END && events[i].sequence == prompt;
        if (events[i].kind == FT_EVENT_FAILED)
            status = ft_error_set(err, FT_NUMERIC, "a step failed: %s", events[i].message);
    }
    return status;
}

static int submit(struct ft_session *session, const struct ft_bench_prefill_options *o, uint64_t salt,
                  uint32_t *handle, struct ft_error *err)
{
    uint32_t *ids = malloc(o->prompt_tokens * sizeof *ids);
    if (!ids)
        return ft_error_set(err, FT_MEMORY, "no memory for a prompt of %u tokens", o->prompt_tokens);
    for (uint64_t i = 0; i < o->prompt_tokens; i++)
        ids[i] = (uint32_t)((i * 2246822519u + salt * 40503u + o->seed) % o->vocab);
    const struct ft_request request = {
        .prompt = ids, .prompt_count = o->prompt_tokens, .sampling = {.top_p = 1, .repetition_penalty = 1}};
    int status = ft_session_submit(session, &request, handle, err);
    free(ids);
    return status;
}

static int check_go_on(const struct ft_bench_prefill_options *o, struct ft_error *err)
{
    return !o->go_on || o->go_on() ? FT_OK : ft_error_set(err, FT_CANCELLED, "interrupted");
}

int ft_bench_prefill_alone(struct ft_session *session, const struct ft_bench_prefill_options *o,
                           struct ft_bench_prefill *out, struct ft_error *err)
{
    struct ft_session_stats before, after;
    int status = FT_OK;
    out->prompt_tokens = o->prompt_tokens;
    for (uint32_t round = 0; status == FT_OK && round < ROUNDS; round++) {
        uint32_t handle = 0;
        struct called got = {0};
        ft_session_stats(session, &before);
        status = submit(session, o, round, &handle, err);
        uint64_t begin = ft_session_now_ns(session);
        while (status == FT_OK && !got.ended) {
            status = call(session, handle, &got, err);
            if (status == FT_OK)
                status = check_go_on(o, err);
        }
        double seconds = (double)(ft_session_now_ns(session) - begin) * 1e-9;
        if (status != FT_OK)
            break;
        ft_session_stats(session, &after);
        ft_session_release(session, handle);
        out->chunks = after.prefill_chunks - before.prefill_chunks;
        out->alone_s = round && out->alone_s < seconds ? out->alone_s : seconds;
    }
    return status;
}

/* Until the prompt is read or the others have made their steps. */
static int run_beside(struct ft_session *session, const struct ft_bench_prefill_options *o, uint32_t handle,
                      struct ft_bench_prefill *out, struct ft_error *err)
{
    struct called got = {0};
    uint64_t begin = ft_session_now_ns(session), last = begin, now = begin, steps = 0;
    int status = FT_OK;
    while (status == FT_OK && !got.ended && steps < o->steps_max) {
        status = call(session, handle, &got, err);
        now = ft_session_now_ns(session);
        if (status == FT_OK)
            status = check_go_on(o, err);
        if (!got.tokens)
            continue;
        out->tokens += got.tokens;
        out->gap_s_max = FT_MAX(out->gap_s_max, (double)(now - last) * 1e-9);
        last = now;
        steps++;
    }
    out->gap_s_max = FT_MAX(out->gap_s_max, (double)(now - last) * 1e-9);
    out->beside_s = (double)(now - begin) * 1e-9;
    out->whole = got.ended;
    return status;
}

static int run_after(struct ft_session *session, const struct ft_bench_prefill_options *o,
                     struct ft_bench_prefill *out, struct ft_error *err)
{
    struct ft_session_stats before, after;
    struct called got;
    int status = FT_OK;
    ft_session_stats(session, &before);
    uint64_t begin = ft_session_now_ns(session);
    for (uint32_t i = 0; status == FT_OK && i < o->steps; i++) {
        status = call(session, FT_NONE, &got, err);
        if (status == FT_OK && got.tokens != o->batch)
            status = ft_error_set(err, FT_INTERNAL, "a step behind the prompt brought %u tokens, wanted %u",
                                  got.tokens, o->batch);
    }
    out->after_s = (double)(ft_session_now_ns(session) - begin) * 1e-9;
    ft_session_stats(session, &after);
    out->after_hits = after.hits - before.hits;
    out->after_misses = after.misses - before.misses;
    return status;
}

int ft_bench_prefill_beside(struct ft_session *session, const struct ft_bench_prefill_options *o,
                            struct ft_bench_prefill *out, struct ft_error *err)
{
    struct ft_session_stats before, after;
    struct ft_sequence_info info;
    uint32_t handle = 0;
    ft_session_stats(session, &before);
    int status = submit(session, o, ROUNDS, &handle, err);
    if (status == FT_OK)
        status = run_beside(session, o, handle, out, err);
    if (status != FT_OK)
        return status;
    ft_session_stats(session, &after);
    ft_session_sequence_info(session, handle, &info);
    out->slices = after.prefill_steps - before.prefill_steps;
    out->rows = info.computed_count;
    ft_session_release(session, handle);
    return run_after(session, o, out, err);
}
