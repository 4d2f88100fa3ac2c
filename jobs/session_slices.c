/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the next step computes: a token of every sequence that decodes, or layers of a chunk of prompt rows.
 *
 * With experts in host memory a chunk costs what it costs to move all of them, seconds where a decode step takes
 * milliseconds, and a smaller chunk costs the same. So a chunk does not get shorter while others decode, it
 * pauses between layers:
 *
 *   chunk    |layer 0|              |layer 1|              |layer 2, 3|
 *   decode            |step|step|step|       |step|step|step|          |step ..
 *
 * Only the residual streams (with the rotary table) live longer than a layer; decode rows have activations of
 * their own (struct ft_activations), so a pause costs nothing but the graph of the next slice.
 *
 * Pace. Let u be the usual time of such a decode step while no prompt waits, t its time now, and s the time of
 * slices. After k steps decoding has a share r of its rate when k t + s <= k u / r. So each decode step lets the
 * chunk have u / r - t (and at least t / 2, or a chunk might never end), and a slice has as many layers as are
 * expected to fit what was saved up; if not even one does, there is another decode step. Times are those of whole
 * calls, as the session saw them: nothing about the machine is assumed, but for a first slice of one layer.
 */
#include "jobs/session_internal.h"

#define RATE_KEPT 0.55  /* r: half, and what estimates may be wrong by */
#define ALONE_STEPS 64u /* an average over about so many */
#define LAYER_SLICES 2u

/* ---- the chunk ---- */

void ft_session_end_chunk(struct ft_session *session)
{
    struct ft_chunk *chunk = &session->chunk;
    if (!chunk->active)
        return;
    chunk->active = false;
    for (uint32_t i = 0; i < chunk->batch.sequence_count; i++) {
        struct ft_sequence *sequence = &session->sequences[chunk->batch.sequences[i].handle];
        sequence->in_chunk = false;
        if (sequence->released)
            ft_session_free_sequence(session, sequence);
    }
}

void ft_session_leave_chunk(struct ft_session *session, uint32_t handle)
{
    const struct ft_batch *batch = &session->chunk.batch;
    bool others = false;
    for (uint32_t i = 0; i < batch->sequence_count; i++) {
        struct ft_batch_sequence *row = &batch->sequences[i];
        if (row->handle == handle)
            row->capture = NULL; /* the caller's, and the caller has done with it */
        others |= session->sequences[row->handle].phase == FT_SEQUENCE_RUNNING;
    }
    if (!others)
        ft_session_end_chunk(session);
}

static void begin_chunk(struct ft_session *session)
{
    struct ft_chunk *chunk = &session->chunk;
    ft_session_fill_batch(session, &chunk->batch, false);
    chunk->active = true;
    chunk->next_layer = 0;
    session->pace.layer.count = 0;
    for (uint32_t i = 0; i < chunk->batch.sequence_count; i++)
        session->sequences[chunk->batch.sequences[i].handle].in_chunk = true;
}

/* ---- the pace ---- */

/* Layers of the next slice, 0: the sequences that decode are next. */
static uint32_t slice_layers(const struct ft_session *session, uint32_t left)
{
    const struct ft_pace *pace = &session->pace;
    if (!session->chunk.active) /* its layers were never timed: one is tried */
        return pace->credit_ns >= 0;
    if (pace->credit_ns < pace->layer.ns)
        return 0;
    double fit = pace->layer.ns > 0 ? pace->credit_ns / pace->layer.ns : 1;
    return fit < left ? FT_MAX((uint32_t)fit, 1u) : left;
}

static void learn(struct ft_pace_mean *mean, double ns, uint32_t count_max)
{
    mean->count = FT_MIN(mean->count + 1, count_max);
    mean->ns = mean->count == 1 ? ns : mean->ns + (ns - mean->ns) / mean->count;
}

static void after_decode(struct ft_session *session, double ns)
{
    struct ft_pace *pace = &session->pace;
    struct ft_pace_mean *alone = &pace->alone[session->decode.rows];
    bool prompts = session->chunk.active || ft_session_has_rows(session, false);
    if (!prompts)
        learn(alone, ns, ALONE_STEPS);
    double usual_ns = alone->count ? alone->ns : ns;
    pace->credit_ns += FT_MAX(usual_ns / RATE_KEPT - ns, ns / 2);
    if (!prompts) /* nothing is saved up for a prompt to come, but a debt is paid */
        pace->credit_ns = FT_MIN(pace->credit_ns, 0);
}

static void after_slice(struct ft_session *session, double ns)
{
    struct ft_pace *pace = &session->pace;
    const struct ft_batch *batch = &session->chunk.batch;
    uint32_t layers = batch->layer_end - batch->layer_begin;
    learn(&pace->layer, ns / layers, LAYER_SLICES);
    pace->credit_ns = ft_session_has_rows(session, true) ? pace->credit_ns - ns : 0;
}

void ft_session_keep_pace(struct ft_session *session, double ns)
{
    const struct ft_batch *batch = session->batch;
    bool slice = batch == &session->chunk.batch;
    if (session->plan.deterministic) /* a layer counts as much as the chunk has from a decode step */
        ns = slice ? (batch->layer_end - batch->layer_begin) * (1 / RATE_KEPT - 1) : 1;
    if (slice)
        after_slice(session, ns);
    else
        after_decode(session, ns);
}

/* ---- the choice ---- */

static bool choose_chunk(struct ft_session *session, uint32_t layers)
{
    struct ft_chunk *chunk = &session->chunk;
    if (!chunk->active)
        begin_chunk(session);
    chunk->batch.layer_begin = chunk->next_layer;
    chunk->batch.layer_end = chunk->next_layer + layers;
    session->batch = &chunk->batch;
    return true;
}

/* A policy that repeats a recorded run knows what the next step was. */
static bool find_recorded(const struct ft_session *session, uint32_t left, uint32_t *layers)
{
    const struct ft_policy *policy = session->options.policy;
    struct ft_policy_step was;
    if (!policy->find_step ||
        !policy->find_step(session->step.policy_state, session->step.step_number + 1, &was))
        return false;
    uint32_t first = session->options.model->layer_count - left;
    bool possible = !was.prefill || (was.layer_begin == first && was.layer_end > first &&
                                     was.layer_end <= session->options.model->layer_count);
    *layers = was.prefill ? was.layer_end - was.layer_begin : 0;
    return possible;
}

bool ft_session_choose(struct ft_session *session)
{
    const struct ft_chunk *chunk = &session->chunk;
    bool decodes = ft_session_has_rows(session, true),
         prompts = chunk->active || ft_session_has_rows(session, false);
    uint32_t left = session->options.model->layer_count - (chunk->active ? chunk->next_layer : 0);
    uint32_t layers = prompts ? left : 0;
    if (prompts && decodes && !find_recorded(session, left, &layers))
        layers = slice_layers(session, left);
    if (layers)
        return choose_chunk(session, layers);
    if (decodes)
        ft_session_fill_batch(session, &session->decode, true);
    session->batch = &session->decode;
    return decodes;
}
