/* SPDX-License-Identifier: Apache-2.0 */
/* Which rows the next step computes, and what is learnt from the records of the last one. */
#include <string.h>

#include "jobs/session_internal.h"

#define RECORDS_AHEAD 16u

/* Rows that a sequence still has to compute. */
static uint32_t left(const struct ft_sequence *sequence)
{
    return sequence->phase == FT_SEQUENCE_RUNNING ? sequence->token_count - sequence->computed : 0;
}

/* A chunk ends at the prompt's last page boundary, so that a snapshot can be taken there. */
static uint32_t cut_at_boundary(const struct ft_session *session, const struct ft_sequence *sequence,
                                uint32_t rows)
{
    uint32_t page = session->plan.page_tokens;
    uint32_t boundary = (sequence->token_count - 1) / page * page;
    if (session->snapshots.count && sequence->computed < boundary && sequence->computed + rows > boundary)
        return boundary - sequence->computed;
    return rows;
}

static bool wants_all_logits(const struct ft_sequence *sequence)
{
    return sequence->capture && (sequence->capture->logits || sequence->capture->hidden);
}

static void clear_pages(struct ft_session *session, const struct ft_sequence *sequence, uint32_t rows)
{
    uint32_t page = session->plan.page_tokens;
    for (uint32_t i = sequence->computed / page; i <= (sequence->computed + rows - 1) / page; i++)
        ft_kv_clear_stale(&session->kv, sequence->pages[i]);
}

static void add_rows(struct ft_session *session, struct ft_batch *batch, uint32_t handle, uint32_t rows)
{
    struct ft_sequence *sequence = &session->sequences[handle];
    struct ft_batch_sequence *entry = &batch->sequences[batch->sequence_count];
    bool all = wants_all_logits(sequence);
    if (all)
        rows = FT_MIN(rows, session->plan.logit_rows_max - batch->logit_rows);
    if (!rows)
        return;
    clear_pages(session, sequence, rows);
    bool last = sequence->generates && sequence->computed + rows == sequence->token_count;
    entry->handle = handle;
    entry->first_row = batch->rows;
    entry->row_count = rows;
    entry->position = sequence->computed;
    entry->tokens = sequence->tokens;
    entry->token_count = sequence->token_count;
    entry->state = sequence->state;
    entry->pages = sequence->page_data;
    entry->sampling = &sequence->sampling;
    entry->capture = sequence->capture;
    entry->logit_count = all ? rows : (last && batch->logit_rows < session->plan.logit_rows_max);
    entry->sampled = FT_NONE;
    entry->failed_layer = FT_NONE;
    atomic_store_explicit(&entry->failed, FT_OK, memory_order_relaxed);
    for (uint32_t i = 0; i < rows; i++) {
        batch->token[batch->rows] = sequence->tokens[sequence->computed + i];
        batch->position[batch->rows] = sequence->computed + i;
        batch->row_sequence[batch->rows] = batch->sequence_count;
        if (i >= rows - entry->logit_count)
            batch->logit_row[batch->logit_rows++] = batch->rows;
        batch->rows++;
    }
    batch->prefill |= rows > 1;
    batch->sequence_count++;
}

/* Rows of the sequence in its next step, if that has room for them. */
static uint32_t next_rows(const struct ft_session *session, const struct ft_sequence *sequence)
{
    uint32_t rows = FT_MIN(left(sequence), session->plan.chunk_rows);
    if (!rows || sequence->in_chunk)
        return 0;
    if (wants_all_logits(sequence))
        rows = FT_MIN(rows, session->plan.logit_rows_max);
    return cut_at_boundary(session, sequence, rows);
}

/* The running sequence with the smallest order number above `after` that has such rows to compute. */
static uint32_t next_in_order(const struct ft_session *session, uint64_t after, bool decode)
{
    uint32_t found = FT_NONE;
    for (uint32_t i = 0; i < session->plan.sequences_max; i++) {
        const struct ft_sequence *sequence = &session->sequences[i];
        uint32_t rows = next_rows(session, sequence);
        if (rows && (rows == 1) == decode && sequence->order > after &&
            (found == FT_NONE || sequence->order < session->sequences[found].order))
            found = i;
    }
    return found;
}

bool ft_session_has_rows(const struct ft_session *session, bool decode)
{
    return next_in_order(session, 0, decode) != FT_NONE;
}

void ft_session_fill_batch(struct ft_session *session, struct ft_batch *batch, bool decode)
{
    uint32_t rows_max = decode ? session->plan.sequences_max : session->rows_max, handle;
    batch->rows = batch->sequence_count = batch->logit_rows = 0;
    batch->prefill = false;
    batch->layer_begin = 0;
    batch->layer_end = session->options.model->layer_count;
    batch->decode_step = (uint32_t)(session->stats.steps - session->stats.prefill_steps);
    for (uint64_t after = 0; (handle = next_in_order(session, after, decode)) != FT_NONE;) {
        struct ft_sequence *sequence = &session->sequences[handle];
        uint32_t room = rows_max - batch->rows;
        after = sequence->order;
        if (!room || batch->logit_rows == session->plan.logit_rows_max)
            break;
        add_rows(session, batch, handle,
                 cut_at_boundary(session, sequence, FT_MIN(next_rows(session, sequence), room)));
    }
}

/* ---- after the step ---- */

static void count_record(struct ft_session *session, const struct ft_trace_record *record)
{
    struct ft_session_stats *stats = &session->stats;
    double ns = (double)(record->end_ns - record->start_ns);
    if (record->kind == FT_RECORD_JOB) {
        enum ft_class class = ft_op_class(record->op);
        stats->class_ns[class] += ns;
        if (class == FT_CLASS_EXPERT)
            stats->expert_ns[record->lane] += ns;
        stats->jobs++;
    } else if (record->kind == FT_RECORD_WAIT) {
        stats->wait_ns[record->lane][record->detail] += ns;
    }
}

static void observe(struct ft_session *session, const struct ft_trace_record *record)
{
    bool link_wait = record->kind == FT_RECORD_WAIT && record->lane == FT_LANE_DEVICE &&
                     record->detail == FT_WAIT_LINK && record->layer != UINT16_MAX;
    /* Copies made ahead say nothing about the layer that they are for. */
    if ((record->kind != FT_RECORD_JOB && !link_wait) || ft_trace_is_ahead(record))
        return;
    struct ft_observation seen = {.op = record->op,
                                  .lane = record->lane,
                                  .wait = link_wait ? FT_WAIT_LINK : FT_WAIT_NONE,
                                  .layer = record->layer,
                                  .rows = record->rows,
                                  .bytes = record->bytes,
                                  .start_ns = (double)record->start_ns,
                                  .duration_ns = (double)(record->end_ns - record->start_ns),
                                  .predicted_ns = record->predicted_ns};
    session->options.policy->observe(session->step.policy_state, &seen);
}

/* A worker that had nothing to do until the end: the idle callback comes too late for this step. */
static void record_tail(struct ft_session *session, uint32_t thread, uint64_t begin_ns, uint64_t end_ns)
{
    struct ft_step *step = &session->step;
    struct ft_trace_ring *ring = &step->traces_done[thread];
    bool device = session->plan.device != FT_DEVICE_NONE;
    uint64_t last = ring->count ? ring->records[ring->count - 1].end_ns : begin_ns;
    if (last + 1000 >= end_ns)
        return;
    struct ft_trace_record *record = ft_trace_push(ring);
    if (record) {
        *record = (struct ft_trace_record){.start_ns = last,
                                           .end_ns = end_ns,
                                           .job = FT_NONE,
                                           .expert = FT_NONE,
                                           .slot = FT_NONE,
                                           .layer = FT_GRAPH_NO_LAYER,
                                           .thread = (uint16_t)thread,
                                           .kind = FT_RECORD_WAIT};
        record->lane = FT_LANE_CPU;
        record->detail = device ? FT_WAIT_DEVICE : FT_WAIT_CPU;
    }
}

/* wait_ns is filled while the records are counted. */
static void summarise(const struct ft_session *session, struct ft_step_summary *summary)
{
    const struct ft_step *step = &session->step;
    *summary = (struct ft_step_summary){.step = step->step_number,
                                        .rows = session->batch->rows,
                                        .prefill = session->batch->prefill,
                                        .duration_ns = (double)(step->end_ns - step->begin_ns),
                                        .hits = step->hits,
                                        .misses = step->misses,
                                        .fetches = step->fetches,
                                        .cpu_experts = step->cpu_experts};
}

static void call_trace(struct ft_session *session)
{
    const struct ft_step *step = &session->step;
    uint32_t count = 0, dropped = 0;
    for (uint32_t t = 0; t < step->thread_count; t++) {
        const struct ft_trace_ring *ring = &step->traces_done[t];
        if (ring->count)
            memcpy(session->records + count, ring->records, ring->count * sizeof *ring->records);
        count += ring->count;
        dropped += ring->dropped;
    }
    struct ft_trace_step trace = {.step = step->step_number,
                                  .rows = session->batch->rows,
                                  .sequences = session->batch->sequence_count,
                                  .prefill = session->batch->prefill,
                                  .layer_begin = session->batch->layer_begin,
                                  .layer_end = session->batch->layer_end,
                                  .dropped = dropped,
                                  .record_count = count,
                                  .begin_ns = step->begin_ns,
                                  .end_ns = step->end_ns,
                                  .records = session->records};
    session->options.trace(session->options.trace_context, &trace);
}

static void count_rows(struct ft_session_stats *stats, const struct ft_batch *batch, uint32_t layer_count)
{
    uint32_t decode = 0;
    if (batch->layer_end < layer_count) /* counted when their last layer is done */
        return;
    for (uint32_t i = 0; i < batch->sequence_count; i++)
        decode += batch->sequences[i].row_count == 1;
    stats->decode_rows += decode;
    stats->mixed_rows += batch->prefill ? decode : 0;
    stats->prefill_rows += batch->rows - decode;
    stats->prefill_chunks += batch->prefill;
}

void ft_session_collect_records(void *context)
{
    struct ft_session *session = context;
    struct ft_step *step = &session->step;
    struct ft_session_stats *stats = &session->stats;
    bool learns = session->options.policy->observe && !session->plan.deterministic;
    if (!session->records_pending)
        return;
    session->records_pending = false;
    for (uint32_t t = 0; t < step->thread_count; t++) {
        if (t < step->workers)
            record_tail(session, t, session->done_begin_ns, session->done_end_ns);
        const struct ft_trace_ring *ring = &step->traces_done[t];
        for (uint32_t i = 0; i < ring->count; i++) {
            const struct ft_trace_record *record = &ring->records[i];
            /* Other cores wrote these lines: each is some 100 ns away, unless it is asked for in time. */
            if (i + RECORDS_AHEAD < ring->count)
                __builtin_prefetch(record + RECORDS_AHEAD);
            count_record(session, record);
            if (record->kind == FT_RECORD_WAIT)
                session->summary.wait_ns[record->detail] += (double)(record->end_ns - record->start_ns);
            if (learns)
                observe(session, record);
        }
        stats->trace_dropped += ring->dropped;
    }
    if (session->options.policy->step_end)
        session->options.policy->step_end(step->policy_state, &session->summary);
}

void ft_session_collect(struct ft_session *session)
{
    struct ft_step *step = &session->step;
    struct ft_session_stats *stats = &session->stats;
    double ns = (double)(step->end_ns - step->begin_ns);
    ft_session_collect_records(session); /* of the step before, if nobody did */
    summarise(session, &session->summary);
    session->records_pending = true;
    session->done_begin_ns = step->begin_ns;
    session->done_end_ns = step->end_ns;
    struct ft_trace_ring *rings = step->traces;
    step->traces = step->traces_done;
    step->traces_done = rings;
    if (!step->meanwhile)
        ft_session_collect_records(session);
    stats->steps++;
    stats->prefill_steps += session->batch->prefill;
    count_rows(stats, session->batch, session->options.model->layer_count);
    *(session->batch->prefill ? &stats->prefill_ns : &stats->decode_ns) += ns;
    stats->hits += step->hits;
    stats->misses += step->misses;
    stats->fetches += step->fetches;
    stats->fetch_bytes += step->fetch_bytes;
    stats->cpu_experts += step->cpu_experts;
    stats->policy_repairs += step->repairs;
    step->repairs = 0;
    if (session->options.trace)
        call_trace(session);
}
