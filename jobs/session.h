/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's public C API: sequences in, tokens out, one step at a time.
 *
 *     open -> { submit* -> step -> events }* -> close
 *
 * A session owns the worker threads, lanes, pools (KV pages, recurrent state, slots, snapshots) and the
 * workspace; every size is fixed by the plan at open, nothing is allocated inside a step. Weights, tables,
 * model, plan, policy and topology stay the caller's and must outlive the session.
 *
 * Threads: all calls of one session come from one thread at a time, except ft_session_interrupt, which may be
 * called from any thread or signal handler. Errors: a failed step fails exactly its own sequences (an event
 * each, with the text); their state returns to their last snapshot and they may be resumed or cancelled. A
 * failing slice fails the sequences of its chunk, a failing decode step those that decode.
 * ft_session_step itself fails only when the session as a whole is broken.
 */
#ifndef FT_JOBS_SESSION_H
#define FT_JOBS_SESSION_H

#include "graph/error.h"
#include "graph/plan.h"
#include "graph/policy.h"
#include "graph/routing.h"
#include "graph/trace.h"
#include "graph/weights.h"
#include "io/rows.h"
#include "kernels_cpu/kernels_cpu.h"

struct ft_topology;
struct ft_session;

struct ft_session_options {
    const struct ft_model *model;
    const struct ft_weights *weights;
    const struct ft_row_tables *ple; /* NULL when the model has none */
    const struct ft_plan *plan;
    const struct ft_policy *policy; /* NULL = the safe default */
    struct ft_policy_params policy_params;
    const struct ft_topology *topology;
    const char *isa; /* kernels to force; NULL = the best */
    enum ft_io_backend ple_io;
    bool pin; /* pin workers to cores */
    /* host device: play a slower link */
    double link_bytes_per_s;    /* 0 = as fast as memory */
    uint64_t link_delay_ns_max; /* random delay per fetch, 0 = none */
    uint64_t seed;              /* of the random delays */
    uint32_t gpu;               /* which GPU, as the CUDA runtime counts them; several: the plan names them */
    enum ft_handshake handshake;
    /* Called between steps with the records of the step just done; NULL = none. */
    void (*trace)(void *context, const struct ft_trace_step *step);
    void *trace_context;
    uint64_t step_timeout_ns;         /* watchdog of one step; 0 = 60 s + what the sizes ask for */
    const struct ft_routing *routing; /* obeyed in decode steps instead of the router; NULL = none */
};

int ft_session_open(struct ft_session **out, const struct ft_session_options *options, struct ft_error *err);
/* False: a lane is stuck, after FT_TIMEOUT of a step. It is left behind with the session's memory and may
 * still read what the session was opened with: that must not be freed any more. */
bool ft_session_close(struct ft_session *session);
/* Names of the threads that write trace rings, for the trace header; lane count of names as filled. */
void ft_session_trace_header(const struct ft_session *session, struct ft_trace_header *header);

/* What to keep of a sequence's rows, for verification. Buffers are the caller's, rows = positions [0, row_count). */
struct ft_capture {
    uint32_t row_count;
    float
        *logits; /* [row_count, vocab] or NULL; needs a plan with all_logits (logit_rows_max >= chunk_rows) */
    int32_t *topk; /* [layer_count, row_count, k] ascending ids, or NULL (dense layers: -1) */
    float *hidden; /* [layer_count + 1] blocks, block i at hidden + i * row_count * hc_count * hidden:
                      residual before layer i as [row_count, n H]; the last block as [row_count, H] after the
                      final norm or mixer; or NULL */
};

struct ft_request {
    const uint32_t *prompt; /* [prompt_count], copied */
    uint32_t prompt_count;
    uint32_t max_tokens; /* tokens to generate, >= 0; 0 = prefill only */
    struct ft_sampling sampling;
    const uint32_t *stop_ids; /* [stop_count], copied; generation ends after one of them (it is reported) */
    uint32_t stop_count;
    bool reuse_prefix;                /* start from the longest snapshot that is a prefix of the prompt */
    const struct ft_capture *capture; /* NULL = none; outlives the sequence */
    /* For benchmarks: this many tokens of the prompt (fewer than all) count as computed already, with random
     * numbers for their keys, values and state. Not together with reuse_prefix. */
    uint32_t assumed_count;
};

/* Queues a sequence; *sequence is its handle until its END or FAILED event was delivered and
 * ft_session_release was called. FT_USAGE: empty prompt or an id out of range (named). FT_LIMIT: prompt +
 * max_tokens beyond the KV pool (the message names --kv-tokens), or no free sequence (names --sequences). */
int ft_session_submit(struct ft_session *session, const struct ft_request *request, uint32_t *sequence,
                      struct ft_error *err);

enum ft_event_kind { FT_EVENT_TOKEN, FT_EVENT_END, FT_EVENT_FAILED };
enum ft_finish { FT_FINISH_NONE, FT_FINISH_STOP, FT_FINISH_LENGTH, FT_FINISH_CANCELLED, FT_FINISH_ERROR };
const char *ft_finish_name(enum ft_finish finish); /* "stop", "length", "cancelled", "error" */

struct ft_event {
    enum ft_event_kind kind;
    enum ft_finish finish;
    uint32_t sequence;
    uint32_t token;      /* TOKEN: the new token */
    uint32_t position;   /* TOKEN: its index in the sequence, prompt included */
    const char *message; /* FAILED: valid until the next call */
};

/* Runs one step over the queued sequences and fills events [cap] (cap >= 2 x sequences_max). *count = 0 and FT_OK
 * when nothing is queued, and also after a step that brought no event. FT_CANCELLED after ft_session_interrupt.
 *
 * A step is one token of every sequence that decodes, or rows of prompts (a chunk, plan.chunk_rows at most). While
 * sequences decode, a chunk runs in slices, a few layers each, with decode steps in between: these keep at least
 * about half of the rate that they had before, by measured times, and the chunk gets what is left. With a plan
 * made --deterministic a slice is one layer, followed by one decode step; a policy that repeats a recorded run
 * repeats its slices. What a step computes, and so every text, does not depend on the slices. */
int ft_session_step(struct ft_session *session, struct ft_event *events, uint32_t cap, uint32_t *count,
                    struct ft_error *err);
bool ft_session_is_idle(const struct ft_session *session);
/* Ends a sequence early; its END event (cancelled) comes with the next step call. When its rows are in a chunk with
 * rows of others, which is half done, then they are computed to the end without anybody looking at them: released,
 * its handle and pages become free with the end of that chunk. */
void ft_session_cancel(struct ft_session *session, uint32_t sequence);
/* For benchmarks and known traffic: fills free slots with experts as if earlier steps had used them, those
 * used longest ago first. layer, expert [count]; what is resident already is skipped, and so is what finds no
 * free slot (on its layer's GPU). *filled = slots filled. Between steps only. FT_USAGE: no such layer or expert. */
int ft_session_warm_slots(struct ft_session *session, const uint32_t *layer, const uint32_t *expert,
                          uint32_t count, uint32_t *filled, struct ft_error *err);
/* Frees the handle; a running sequence is cancelled first. Its prefix snapshots stay for reuse. */
void ft_session_release(struct ft_session *session, uint32_t sequence);
/* After FT_EVENT_FAILED: continue from the last snapshot; what was generated after it is computed again. */
int ft_session_resume(struct ft_session *session, uint32_t sequence, struct ft_error *err);
/* Async-signal-safe: the running step drains and every later step returns FT_CANCELLED until ft_session_clear. */
void ft_session_interrupt(struct ft_session *session);
void ft_session_clear_interrupt(struct ft_session *session);

struct ft_sequence_info {
    uint32_t prompt_count, token_count /* prompt and generated */,
        reused_count /* prompt tokens taken from a snapshot */;
    uint32_t computed_count;                           /* tokens whose state is in the pools */
    uint64_t submit_ns, first_token_ns, last_token_ns; /* session clock; 0 = not yet */
    const uint32_t *tokens;                            /* [token_count], valid until the next call */
};
void ft_session_sequence_info(const struct ft_session *session, uint32_t sequence,
                              struct ft_sequence_info *info);

/* Totals since open. Lane time by class: sum over threads, so workers in parallel add up. */
struct ft_session_stats {
    /* prefill_steps: steps with prompt rows, every slice is one; prefill_chunks: those that were the last of their
     * rows. Rows count when their last layer is done. */
    uint64_t steps, prefill_steps, prefill_chunks;
    /* A decode row is its sequence's only row of the step. mixed_rows of them rode in steps with prefill
     * rows: the speed of pure decoding is (decode_rows - mixed_rows) / decode_ns. */
    uint64_t prefill_rows, decode_rows, mixed_rows;
    double prefill_ns, decode_ns; /* wall clock of steps with and without prefill rows */
    double class_ns[FT_CLASS_COUNT];
    double expert_ns[FT_LANE_COUNT];              /* experts by lane */
    double wait_ns[FT_LANE_COUNT][FT_WAIT_COUNT]; /* who waited (lane), for what */
    uint64_t hits, misses, fetches, fetch_bytes, cpu_experts, policy_repairs;
    uint64_t prefetches, prefetches_used, prefetches_waited, prefetches_wasted; /* waited: of those used */
    /* Router look-ahead: experts foreseen, those of them that were asked for, copies, those that served a fetch. */
    uint64_t foreseen, foreseen_right, copied_ahead, copied_ahead_used;
    uint64_t warmed_bytes; /* brought into the workers' caches while they had nothing to do */
    uint64_t
        departures; /* choices of a replayed trace that could not be repeated; 0 = the recorded run so far */
    uint64_t jobs, stolen, trace_dropped;
    uint64_t snapshots_taken, snapshots_used, failed_steps;
    struct ft_row_stats ple;
};
void ft_session_stats(const struct ft_session *session, struct ft_session_stats *stats);
/* Active experts of one layer that were in a slot, and that were not, since open; both 0 without a device. */
void ft_session_layer_stats(const struct ft_session *session, uint32_t layer, uint64_t *hits,
                            uint64_t *misses);
/* Expert slots of the cache: those of the plan, less the landing buffers of the router look-ahead. */
uint32_t ft_session_slot_count(const struct ft_session *session);
uint64_t ft_session_now_ns(const struct ft_session *session);
enum ft_isa ft_session_isa(const struct ft_session *session);
const char *ft_session_note(
    const struct ft_session *session); /* degraded io and the like, one line; "" when all is well */

#endif
