/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jobs/session_internal.h"

static const char *const finish_names[] = {"none", "stop", "length", "cancelled", "error"};

const char *ft_finish_name(enum ft_finish finish)
{
    return finish <= FT_FINISH_ERROR ? finish_names[finish] : "?";
}

/* ---- pages and state ---- */

void ft_session_free_pages(struct ft_session *session, struct ft_sequence *sequence)
{
    for (uint32_t i = 0; i < sequence->page_count; i++)
        ft_kv_release(&session->kv, sequence->pages[i]);
    sequence->page_count = 0;
}

static uint32_t alloc_page(struct ft_session *session, const struct ft_snapshot *keep)
{
    uint32_t page = ft_kv_try_alloc(&session->kv);
    while (page == FT_NONE && ft_snapshots_drop_one(&session->snapshots, &session->kv, keep))
        page = ft_kv_try_alloc(&session->kv);
    return page;
}

/* Pages of a snapshot first (shared), then fresh ones for everything the request may write. */
static int take_pages(struct ft_session *session, struct ft_sequence *sequence,
                      const struct ft_snapshot *reuse, struct ft_error *err)
{
    struct ft_kv *kv = &session->kv;
    uint32_t wanted = ft_kv_pages_for(kv, sequence->token_max);
    uint32_t shared = reuse ? reuse->token_count / kv->layout.page_tokens : 0;
    sequence->page_count = 0;
    for (uint32_t i = 0; i < wanted; i++) {
        uint32_t page;
        if (i < shared) {
            page = reuse->pages[i];
            ft_kv_reference(kv, page);
        } else {
            page = alloc_page(session, reuse);
        }
        if (page == FT_NONE) {
            uint32_t had = sequence->page_count;
            ft_session_free_pages(session, sequence);
            return ft_error_set(
                err, FT_LIMIT,
                "the KV pool has room for %u more tokens and this request needs %u: wait for a running "
                "sequence to end, ask for fewer tokens, or raise --kv-tokens (now %u)",
                had * kv->layout.page_tokens, sequence->token_max, kv->page_count * kv->layout.page_tokens);
        }
        sequence->pages[i] = page;
        sequence->page_data[i] = ft_kv_page(kv, page);
        sequence->page_count++;
    }
    return FT_OK;
}

static void load_state(struct ft_session *session, struct ft_sequence *sequence,
                       const struct ft_snapshot *from)
{
    uint64_t bytes = session->step.x.state.count * sizeof(float);
    sequence->computed = from ? from->token_count : 0;
    if (!bytes)
        return;
    const struct ft_memory *place = session->kv.place;
    if (from)
        place->copy(place->context, sequence->state, from->state, bytes);
    else
        place->zero(place->context, sequence->state, bytes);
}

bool ft_session_rollback(struct ft_session *session, struct ft_sequence *sequence)
{
    struct ft_snapshot *to = ft_snapshots_find(&session->snapshots, sequence->tokens, sequence->computed);
    load_state(session, sequence, to);
    /* Pages that will be written again must not be somebody else's. */
    for (uint32_t i = sequence->computed / session->plan.page_tokens; i < sequence->page_count; i++) {
        if (session->kv.references[sequence->pages[i]] == 1)
            continue;
        uint32_t page = alloc_page(session, to);
        if (page == FT_NONE)
            return false;
        ft_kv_release(&session->kv, sequence->pages[i]);
        sequence->pages[i] = page;
        sequence->page_data[i] = ft_kv_page(&session->kv, page);
    }
    return true;
}

/* ---- submitting ---- */

static int check_request(const struct ft_session *session, const struct ft_request *request,
                         struct ft_error *err)
{
    uint32_t vocab = session->options.model->vocab, page = session->plan.page_tokens;
    uint64_t tokens = (uint64_t)request->prompt_count + request->max_tokens;
    uint64_t pool = (uint64_t)session->plan.page_count * page;
    if (!request->prompt_count)
        return ft_error_set(err, FT_USAGE, "the prompt is empty: give at least one token");
    for (uint32_t i = 0; i < request->prompt_count; i++)
        if (request->prompt[i] >= vocab)
            return ft_error_set(err, FT_USAGE, "token %u of the prompt is %u, and the vocabulary has %u ids",
                                i, request->prompt[i], vocab);
    if (ft_div_up(tokens, page) * page > pool)
        return ft_error_set(
            err, FT_LIMIT,
            "a prompt of %u tokens and up to %u new ones do not fit the KV pool of %llu tokens: raise "
            "--kv-tokens to %llu or more, or lower --max-tokens",
            request->prompt_count, request->max_tokens, (unsigned long long)pool,
            (unsigned long long)(ft_div_up(tokens, page) * page));
    if (request->assumed_count && (request->assumed_count >= request->prompt_count || request->reuse_prefix))
        return ft_error_set(
            err, FT_USAGE,
            "%u of %u prompt tokens were to be taken as computed: the last one must be computed, "
            "and reuse_prefix must be off",
            request->assumed_count, request->prompt_count);
    if (request->stop_count > FT_STOP_IDS_MAX)
        return ft_error_set(err, FT_LIMIT, "%u stop tokens were given, at most %u are possible",
                            request->stop_count, FT_STOP_IDS_MAX);
    if (request->capture && request->capture->logits &&
        session->plan.logit_rows_max < session->plan.chunk_rows)
        return ft_error_set(err, FT_USAGE, "logits of every row need a plan made with all_logits");
    return FT_OK;
}

static int alloc_sequence(struct ft_sequence *sequence, const struct ft_session *session,
                          const struct ft_request *request, struct ft_error *err)
{
    uint32_t token_max = request->prompt_count + request->max_tokens;
    uint32_t pages = ft_kv_pages_for(&session->kv, token_max);
    *sequence = (struct ft_sequence){.state = sequence->state,
                                     .token_max = token_max,
                                     .token_count = request->prompt_count,
                                     .prompt_count = request->prompt_count,
                                     .sampling = request->sampling,
                                     .stop_count = request->stop_count,
                                     .generates = request->max_tokens > 0,
                                     .capture = request->capture};
    sequence->tokens = malloc(token_max * sizeof *sequence->tokens);
    sequence->pages = malloc(pages * sizeof *sequence->pages);
    sequence->page_data = malloc(pages * sizeof *sequence->page_data);
    if (!sequence->tokens || !sequence->pages || !sequence->page_data)
        return ft_error_set(err, FT_MEMORY, "no memory for a sequence of %u tokens", token_max);
    memcpy(sequence->tokens, request->prompt, request->prompt_count * sizeof *sequence->tokens);
    if (request->stop_count)
        memcpy(sequence->stop_ids, request->stop_ids, request->stop_count * sizeof *sequence->stop_ids);
    return FT_OK;
}

/* A stuck lane may still read the tokens and pages of its step; they are left behind like the lane itself. */
void ft_session_free_sequence(struct ft_session *session, struct ft_sequence *sequence)
{
    if (session->broken) {
        sequence->phase = FT_SEQUENCE_FREE;
        return;
    }
    ft_session_free_pages(session, sequence);
    free(sequence->tokens);
    free(sequence->pages);
    free(sequence->page_data);
    *sequence = (struct ft_sequence){.state = sequence->state};
}

static int refuse_broken(const struct ft_session *session, struct ft_error *err)
{
    if (!session->broken)
        return FT_OK;
    *err = session->broken_error;
    return err->code;
}

int ft_session_submit(struct ft_session *session, const struct ft_request *request, uint32_t *sequence,
                      struct ft_error *err)
{
    int status = refuse_broken(session, err);
    if (status == FT_OK)
        status = check_request(session, request, err);
    if (status != FT_OK)
        return status;
    uint32_t handle = 0;
    while (handle < session->plan.sequences_max && session->sequences[handle].phase != FT_SEQUENCE_FREE)
        handle++;
    if (handle == session->plan.sequences_max)
        return ft_error_set(err, FT_LIMIT,
                            "all %u sequences are in use: wait for one to end, or raise --sequences",
                            session->plan.sequences_max);
    struct ft_sequence *new = &session->sequences[handle];
    status = alloc_sequence(new, session, request, err);
    struct ft_snapshot *reuse = NULL;
    if (status == FT_OK && request->reuse_prefix && !request->capture)
        reuse = ft_snapshots_find(&session->snapshots, request->prompt, request->prompt_count - 1);
    if (status == FT_OK)
        status = take_pages(session, new, reuse, err);
    if (status != FT_OK) {
        ft_session_free_sequence(session, new);
        return status;
    }
    load_state(session, new, reuse);
    new->reused = new->computed;
    if (request->assumed_count)
        ft_session_assume(session, new, handle, request->assumed_count);
    session->snapshots.used += reuse != NULL;
    new->order = ++session->order_clock;
    new->submit_ns = ft_session_now_ns(session);
    new->phase = FT_SEQUENCE_RUNNING;
    *sequence = handle;
    return FT_OK;
}

/* ---- stepping ---- */

static void emit(struct ft_event *events, uint32_t cap, uint32_t *count, struct ft_event event)
{
    FT_ASSERT_LT(*count, cap);
    events[(*count)++] = event;
}

static void emit_end(struct ft_session *session, uint32_t handle, enum ft_finish finish,
                     struct ft_event *events, uint32_t cap, uint32_t *count)
{
    session->sequences[handle].phase = FT_SEQUENCE_ENDED;
    emit(events, cap, count, (struct ft_event){.kind = FT_EVENT_END, .finish = finish, .sequence = handle});
}

static void fail_sequence(struct ft_session *session, uint32_t handle, const char *message,
                          struct ft_event *events, uint32_t cap, uint32_t *count)
{
    struct ft_sequence *sequence = &session->sequences[handle];
    snprintf(sequence->message, sizeof sequence->message, "%.500s", message);
    sequence->phase = FT_SEQUENCE_FAILED;
    if (!session->broken)
        (void)ft_session_rollback(session, sequence); /* resume tries again, and says when no page is left */
    emit(events, cap, count,
         (struct ft_event){.kind = FT_EVENT_FAILED,
                           .finish = FT_FINISH_ERROR,
                           .sequence = handle,
                           .message = sequence->message});
}

static void numeric_message(const struct ft_session *session, const struct ft_batch_sequence *row, char *text,
                            size_t bytes)
{
    if (row->failed_layer < session->options.model->layer_count)
        snprintf(
            text, bytes,
            "the router of layer %u got values that are not numbers: the weights or the state are damaged "
            "(`ft verify` finds the first layer that departs)",
            row->failed_layer);
    else
        snprintf(text, bytes,
                 "no logit is a number: the weights or the state are damaged (`ft verify` tells where)");
}

static bool is_stop(const struct ft_sequence *sequence, uint32_t token)
{
    for (uint32_t i = 0; i < sequence->stop_count; i++)
        if (sequence->stop_ids[i] == token)
            return true;
    return false;
}

/* A sequence's rows are computed: snapshot at a boundary, new token, end. */
static void advance(struct ft_session *session, const struct ft_batch_sequence *row, struct ft_event *events,
                    uint32_t cap, uint32_t *count)
{
    struct ft_sequence *sequence = &session->sequences[row->handle];
    sequence->computed += row->row_count;
    uint32_t page = session->plan.page_tokens, prompt_boundary = (sequence->prompt_count - 1) / page * page;
    if (sequence->computed % page == 0 && sequence->computed >= prompt_boundary && !sequence->assumed)
        ft_snapshots_take(&session->snapshots, &session->kv, sequence->tokens, sequence->computed,
                          sequence->state, sequence->pages);
    /* A capture makes every row ask for logits, also where nothing is to be generated. */
    if (row->sampled != FT_NONE && sequence->generates) {
        uint64_t now = ft_session_now_ns(session);
        if (!sequence->first_token_ns)
            sequence->first_token_ns = now;
        sequence->last_token_ns = now;
        sequence->tokens[sequence->token_count++] = row->sampled;
        emit(events, cap, count,
             (struct ft_event){.kind = FT_EVENT_TOKEN,
                               .sequence = row->handle,
                               .token = row->sampled,
                               .position = sequence->token_count - 1});
        if (is_stop(sequence, row->sampled))
            emit_end(session, row->handle, FT_FINISH_STOP, events, cap, count);
        else if (sequence->token_count == sequence->token_max)
            emit_end(session, row->handle, FT_FINISH_LENGTH, events, cap, count);
    } else if (sequence->computed == sequence->token_count && !sequence->generates) {
        emit_end(session, row->handle, FT_FINISH_LENGTH, events, cap, count);
    }
}

/* All of them: while one has not failed, the chunk goes on for its sake. */
static bool has_failed(const struct ft_batch *batch)
{
    for (uint32_t i = 0; i < batch->sequence_count; i++)
        if (!atomic_load_explicit(&batch->sequences[i].failed, memory_order_relaxed))
            return false;
    return true;
}

static void finish_step(struct ft_session *session, int status, const struct ft_error *failure,
                        struct ft_event *events, uint32_t cap, uint32_t *count)
{
    session->stats.failed_steps += status != FT_OK;
    const struct ft_batch *batch = session->batch;
    if (batch == &session->chunk.batch) {
        session->chunk.next_layer = batch->layer_end;
        if (status == FT_OK && batch->layer_end < session->options.model->layer_count && !has_failed(batch))
            return;
        ft_session_end_chunk(session);
    }
    for (uint32_t i = 0; i < batch->sequence_count; i++) {
        const struct ft_batch_sequence *row = &batch->sequences[i];
        if (session->sequences[row->handle].phase != FT_SEQUENCE_RUNNING) {
            continue; /* left the chunk between two slices */
        } else if (status != FT_OK) {
            fail_sequence(session, row->handle, failure->message, events, cap, count);
        } else if (atomic_load_explicit(&row->failed, memory_order_relaxed)) {
            char text[256];
            numeric_message(session, row, text, sizeof text);
            fail_sequence(session, row->handle, text, events, cap, count);
        } else {
            advance(session, row, events, cap, count);
        }
    }
}

static void end_cancelled(struct ft_session *session, struct ft_event *events, uint32_t cap, uint32_t *count)
{
    for (uint32_t i = 0; i < session->plan.sequences_max; i++)
        if (session->sequences[i].phase == FT_SEQUENCE_CANCELLING)
            emit_end(session, i, FT_FINISH_CANCELLED, events, cap, count);
}

int ft_session_step(struct ft_session *session, struct ft_event *events, uint32_t cap, uint32_t *count,
                    struct ft_error *err)
{
    *count = 0;
    if (refuse_broken(session, err) != FT_OK)
        return err->code;
    if (cap < 2 * session->plan.sequences_max)
        return ft_error_set(err, FT_USAGE, "room for %u events was given, %u are needed", cap,
                            2 * session->plan.sequences_max);
    if (atomic_load_explicit(&session->interrupted, memory_order_relaxed))
        return ft_error_set(err, FT_CANCELLED, "interrupted");
    uint64_t start = ft_session_now_ns(session);
    end_cancelled(session, events, cap, count);
    if (!ft_session_choose(session))
        return FT_OK;
    const struct ft_graph *graph;
    int status = ft_session_graph(session, session->batch, &graph, err);
    if (status != FT_OK)
        return status;
    uint64_t timeout = session->options.step_timeout_ns;
    if (!timeout)
        timeout = 60000000000ull + 2000000000ull * session->batch->rows;
    struct ft_error failure;
    ft_error_clear(&failure);
    status = ft_step_run(&session->step, graph, session->batch, timeout, &failure);
    if (status == FT_TIMEOUT && session->step.finished != session->step.epoch) {
        session->broken = true;
        session->broken_error = failure;
    } else {
        ft_session_collect(session);
        ft_session_keep_pace(session, (double)(ft_session_now_ns(session) - start));
    }
    finish_step(session, status, &failure, events, cap, count);
    return FT_OK;
}

bool ft_session_is_idle(const struct ft_session *session)
{
    for (uint32_t i = 0; i < session->plan.sequences_max; i++) {
        enum ft_sequence_phase phase = session->sequences[i].phase;
        if (phase == FT_SEQUENCE_RUNNING || phase == FT_SEQUENCE_CANCELLING)
            return false;
    }
    return true;
}

void ft_session_cancel(struct ft_session *session, uint32_t sequence)
{
    FT_ASSERT_LT(sequence, session->plan.sequences_max);
    struct ft_sequence *s = &session->sequences[sequence];
    if (s->phase != FT_SEQUENCE_RUNNING && s->phase != FT_SEQUENCE_FAILED)
        return;
    s->phase = FT_SEQUENCE_CANCELLING;
    if (s->in_chunk)
        ft_session_leave_chunk(session, sequence);
}

void ft_session_release(struct ft_session *session, uint32_t sequence)
{
    FT_ASSERT_LT(sequence, session->plan.sequences_max);
    struct ft_sequence *s = &session->sequences[sequence];
    if (s->phase == FT_SEQUENCE_FREE || s->released)
        return;
    bool running = s->phase == FT_SEQUENCE_RUNNING;
    s->phase = FT_SEQUENCE_ENDED;
    if (s->in_chunk && running)
        ft_session_leave_chunk(session, sequence);
    s->released = s->in_chunk;
    if (!s->released)
        ft_session_free_sequence(session, s);
}

int ft_session_resume(struct ft_session *session, uint32_t sequence, struct ft_error *err)
{
    FT_ASSERT_LT(sequence, session->plan.sequences_max);
    struct ft_sequence *s = &session->sequences[sequence];
    if (s->phase != FT_SEQUENCE_FAILED)
        return ft_error_set(err, FT_USAGE, "sequence %u has not failed", sequence);
    if (refuse_broken(session, err) != FT_OK)
        return err->code;
    if (!ft_session_rollback(session, s))
        return ft_error_set(err, FT_LIMIT, "no KV page is free for a private copy: raise --kv-tokens");
    s->phase = FT_SEQUENCE_RUNNING;
    return FT_OK;
}

void ft_session_interrupt(struct ft_session *session)
{
    atomic_store_explicit(&session->interrupted, true, memory_order_relaxed);
}

void ft_session_clear_interrupt(struct ft_session *session)
{
    atomic_store_explicit(&session->interrupted, false, memory_order_relaxed);
}

/* ---- looking ---- */

void ft_session_sequence_info(const struct ft_session *session, uint32_t sequence,
                              struct ft_sequence_info *info)
{
    FT_ASSERT_LT(sequence, session->plan.sequences_max);
    const struct ft_sequence *s = &session->sequences[sequence];
    *info = (struct ft_sequence_info){.prompt_count = s->prompt_count,
                                      .token_count = s->token_count,
                                      .reused_count = s->reused,
                                      .computed_count = s->computed,
                                      .submit_ns = s->submit_ns,
                                      .first_token_ns = s->first_token_ns,
                                      .last_token_ns = s->last_token_ns,
                                      .tokens = s->tokens};
}

void ft_session_stats(const struct ft_session *session, struct ft_session_stats *stats)
{
    /* One thread at a time calls a session: nothing runs now, and what is read here changes no answer. */
    ft_session_collect_records((void *)(uintptr_t)session);
    *stats = session->stats;
    stats->snapshots_taken = session->snapshots.taken;
    stats->snapshots_used = session->snapshots.used;
    stats->prefetches = stats->prefetches_used = stats->prefetches_waited = 0;
    stats->prefetches_wasted = session->step.slots.prefetches_wasted;
    for (uint32_t i = 0; i < session->step.slots.part_count; i++) {
        const struct ft_prefetches *p = &session->step.prefetches[i];
        stats->prefetches += p->issued;
        stats->prefetches_used += p->used;
        stats->prefetches_waited += p->waited;
        stats->prefetches_wasted += p->dropped;
    }
    const struct ft_foresight *f = &session->step.foresight;
    stats->foreseen = f->seen;
    stats->foreseen_right = f->right;
    stats->copied_ahead = f->ordered;
    stats->copied_ahead_used = f->landed;
    stats->warmed_bytes = session->step.warm.bytes;
    if (session->options.policy->departures)
        stats->departures = session->options.policy->departures(session->step.policy_state);
    for (uint32_t i = 0; i < session->step.workers; i++) {
        struct ft_lane_cpu_counters counters;
        ft_lane_cpu_read_counters(session->step.cpu, i, &counters);
        stats->stolen += counters.stolen;
    }
    if (session->step.rows)
        ft_row_reader_stats(session->step.rows, &stats->ple);
}

void ft_session_layer_stats(const struct ft_session *session, uint32_t layer, uint64_t *hits,
                            uint64_t *misses)
{
    FT_ASSERT_LT(layer, session->options.model->layer_count);
    *hits = session->step.layer_hits[layer];
    *misses = session->step.layer_misses[layer];
}

uint32_t ft_session_slot_count(const struct ft_session *session)
{
    return session->step.slots.count;
}

uint64_t ft_session_now_ns(const struct ft_session *session)
{
    return ft_clock_ns(&session->step.clock);
}

enum ft_isa ft_session_isa(const struct ft_session *session)
{
    return session->kernels.isa;
}

const char *ft_session_note(const struct ft_session *session)
{
    return session->note;
}
