/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the session share. */
#ifndef FT_JOBS_SESSION_INTERNAL_H
#define FT_JOBS_SESSION_INTERNAL_H

#include "jobs/session.h"
#include "jobs/snapshots.h"
#include "jobs/step.h"

#define FT_GRAPH_CACHE 64u /* a sliced prefill has a graph for every range of layers */
#define FT_STOP_IDS_MAX 32u

enum ft_sequence_phase {
    FT_SEQUENCE_FREE,
    FT_SEQUENCE_RUNNING,
    FT_SEQUENCE_CANCELLING, /* END comes with the next step call */
    FT_SEQUENCE_ENDED,
    FT_SEQUENCE_FAILED
};

struct ft_sequence {
    enum ft_sequence_phase phase;
    uint64_t order;   /* of submission */
    uint32_t *tokens; /* [token_max], malloc'ed at submit */
    uint32_t token_count, token_max, prompt_count, computed, reused;
    uint32_t *pages;   /* [page_count] indices into the pool */
    float **page_data; /* [page_count] */
    uint32_t page_count;
    float *state; /* [state count] */
    struct ft_sampling sampling;
    uint32_t stop_ids[FT_STOP_IDS_MAX], stop_count;
    bool generates;
    bool assumed;  /* part of its state is made up: no snapshot of it */
    bool in_chunk; /* has rows in the chunk that is being computed */
    bool
        released; /* its handle becomes free when the chunk ends, which still writes to its pages and state */
    const struct ft_capture *capture;
    uint64_t submit_ns, first_token_ns, last_token_ns;
    char message[512];
};

/* Rows of prompts that are computed together, in one step or slice by slice. Between slices the session is in no
 * way busy: sequences come, go and decode. */
struct ft_chunk {
    struct ft_batch batch;
    bool active;
    uint32_t next_layer; /* first one that is not computed */
};

/* Shares time between a chunk and the sequences that decode meanwhile; see jobs/session_slices.c. */
struct ft_pace_mean {
    double ns;
    uint32_t count; /* of what it is the mean; 0 = not known */
};
struct ft_pace {
    struct ft_pace_mean
        *alone; /* [sequences_max + 1] time of a decode step of so many rows, no prompt waiting */
    struct ft_pace_mean layer; /* of the chunk at hand */
    double credit_ns;          /* time that the chunk may take; negative: it took too much */
};

struct ft_graph_entry {
    struct ft_graph graph;
    struct ft_arena arena;
    uint64_t last_used; /* 0 = empty */
};

struct ft_session {
    struct ft_session_options options;
    struct ft_plan plan;
    struct ft_weights weights; /* the top; a lane left behind must not look for it on a stack that is gone */
    struct ft_kernels kernels;
    struct ft_arena arena;
    struct ft_arena pinned, device[FT_GPUS_MAX], spread; /* with a GPU; owned by `cuda` */
    struct ft_lane_cuda *cuda;                           /* NULL without a GPU */
    struct ft_step step;
    struct ft_kv kv;
    struct ft_snapshots snapshots;
    struct ft_sequence *sequences; /* [sequences_max] */
    struct ft_chunk chunk;
    struct ft_batch decode;
    struct ft_batch *batch; /* of the running or the last step: one of the two */
    struct ft_pace pace;
    struct ft_graph_entry graphs[FT_GRAPH_CACHE];
    uint64_t graph_clock, order_clock;
    uint32_t rows_max, static_max, reserved_max;
    /* The last step: its records may be read while the next one runs (GPU, and a policy that does not learn). */
    bool records_pending;
    uint64_t done_begin_ns, done_end_ns;
    struct ft_step_summary summary;
    struct ft_trace_record *records; /* all rings of a step, for the trace callback */
    uint64_t record_max;
    struct ft_session_stats stats;
    _Atomic bool interrupted;
    bool broken;
    struct ft_error broken_error;
    char note[2048];
};

/* While a session is opened (session_pools.c): all that it holds, sized by the plan. What a failure leaves is the caller's
 * to close. */
int ft_session_make_pools(struct ft_session *session, struct ft_error *err);
/* The graph for a batch, built and cached on first use of its shape. */
int ft_session_graph(struct ft_session *session, const struct ft_batch *batch, const struct ft_graph **graph,
                     struct ft_error *err);
/* Whether some sequence waits that decodes (its next piece has one row), or with a prompt (more), and is not in the
 * chunk. */
bool ft_session_has_rows(const struct ft_session *session, bool decode);
/* The next rows of all of them, in order of submission, as far as they fit; of all layers. */
void ft_session_fill_batch(struct ft_session *session, struct ft_batch *batch, bool decode);
/* Chooses session->batch and its layers; false: nothing to do. */
bool ft_session_choose(struct ft_session *session);
/* After a step that took `ns`, from call to return. */
void ft_session_keep_pace(struct ft_session *session, double ns);
/* The chunk is done with: its sequences may be in steps again, or be freed. */
void ft_session_end_chunk(struct ft_session *session);
/* A sequence of the chunk was cancelled: nobody looks at its rows any more. Ends the chunk that has no other. */
void ft_session_leave_chunk(struct ft_session *session, uint32_t handle);
void ft_session_free_sequence(struct ft_session *session, struct ft_sequence *sequence);
/* After a step: totals, observations, trace callback. With a GPU the records wait for the next step to run. */
void ft_session_collect(struct ft_session *session);
/* The records of the last step, if they still wait. context: the session. */
void ft_session_collect_records(void *context);
/* Back to the last snapshot, or to the start. False: no page left for a private copy. */
bool ft_session_rollback(struct ft_session *session, struct ft_sequence *sequence);
/* The first `count` tokens of a new sequence as if computed: random keys, values and state (jobs/session_bench.c). */
void ft_session_assume(struct ft_session *session, struct ft_sequence *sequence, uint32_t handle,
                       uint32_t count);
void ft_session_free_pages(struct ft_session *session, struct ft_sequence *sequence);

#endif
