/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The step runner: one pass over a graph by all lanes.
 *
 *   session thread           begin: counters = in-degrees, epoch + 1, first jobs -> ring; then sleeps until the end job
 *   CPU workers              take jobs from rings, run them, release successors
 *   serial lanes             (device, link, io) walk their jobs in order; a job's dependency counter is its flag: the
 *                            walker waits for 0, whoever brings it to 0 wakes the walker
 *   who completes a router   asks the policy and fills the layer's reserved range (jobs/expand.c)
 *
 * Flags of the host device (what a GPU lane keeps in mapped memory):
 *   flag        writer                         fence               reader                       reset
 *   epoch       session, at step begin         release store       acquire load, serial lanes   never (counts up)
 *   io_epoch    session, likewise, when the    release store       acquire load, io lane        never (epoch)
 *               step has reads: no other one waits for the io lane, which must not look at it
 *   counter     completer of a predecessor     acq_rel fetch_sub   acquire load, walker         session, step begin
 *   published   expander (link jobs)           release store       acquire load, link lane      never (counts up)
 *   finished    completer of the end job       release store       acquire load, session        never (epoch)
 *
 * Threads: 0 .. W-1 CPU workers, then session, device, link, io. Each has its own trace ring. Nothing is
 * allocated, locked or logged between begin and end.
 */
#ifndef FT_JOBS_STEP_H
#define FT_JOBS_STEP_H

#include <pthread.h>
#include <stdatomic.h>

#include "graph/graph.h"
#include "graph/plan.h"
#include "graph/trace.h"
#include "io/rows.h"
#include "jobs/clock.h"
#include "jobs/execute.h"
#include "jobs/frontier.h"
#include "jobs/lane_cpu.h"
#include "jobs/look_ahead.h"
#include "jobs/park.h"
#include "jobs/prefetch.h"
#include "jobs/slots.h"
#include "jobs/warm.h"

#define FT_STEP_SPIN_NS 20000u /* of service threads before they park */

enum ft_step_thread { FT_STEP_SESSION, FT_STEP_DEVICE, FT_STEP_LINK, FT_STEP_IO, FT_STEP_THREADS };

/* A job of a layer's reserved range. Ids inside the runner: static_count + index; the range is shared by the
 * layers, because only one of them is between its router and its combine at a time. Trace ids add layer *
 * reserved_count. */
struct ft_dynamic {
    uint8_t op, lane;
    bool to_combine; /* releases the layer's combine join */
    uint16_t layer;
    uint32_t begin, end;             /* tile; expert_device: range of active.group */
    uint32_t active;                 /* active index; FT_NONE for groups */
    uint32_t succ_begin, succ_count; /* indices of dynamic jobs that wait for it */
    uint32_t slot;                   /* fetch: what it fills; FT_NONE = staging */
    /* fetch of what was copied ahead: there is something left to copy only while *awaits is `ticket`, and not 0 */
    _Atomic uint32_t *awaits;
    uint32_t ticket;
    char *destination; /* fetch */
    uint64_t bytes;
    uint32_t victim; /* fetch: layer * expert_count + expert that the slot held, FT_NONE = it was free */
};

struct ft_serial {
    struct ft_park park;
    pthread_t thread;
    bool started;
};

struct ft_step_wait_pending {
    uint64_t begin_ns, end_ns;
    char pad[48];
};

struct ft_step {
    const struct ft_plan *plan;
    const struct ft_model *model;
    const struct ft_weights *weights;
    struct ft_clock clock;
    struct ft_lane_cpu *cpu;
    uint32_t workers, thread_count;
    struct ft_execute x;
    struct ft_slots slots;
    struct ft_prefetches prefetches[FT_GPUS_MAX]; /* by part of the slots */
    struct ft_landings landings[FT_GPUS_MAX];
    struct ft_foresight foresight;
    struct ft_warm warm;
    char *staging[FT_GPUS_MAX][2];                /* by part of the slots: [staging_experts] blobs each */
    uint64_t staging_stride;
    const struct ft_policy *policy;
    void *policy_state;

    /* the running step */
    const struct ft_graph *graph;
    _Atomic int32_t *counter; /* [static jobs max + reserved max] */
    struct ft_dynamic *dynamic;
    uint32_t dynamic_count;
    uint32_t wave_first,
        wave_count; /* dynamic indices of the layer's device groups: written and read by the device */
    uint32_t *todo; /* [thread_count, todo_max] */
    uint32_t todo_max;
    uint32_t step_number;
    bool looks_ahead;
    uint64_t begin_ns, end_ns;
    uint32_t hits, misses, fetches, cpu_experts, repairs;
    uint64_t fetch_bytes;
    uint64_t *layer_hits, *layer_misses; /* [layer_count] since open, of a device's slots */
    /* a GPU: */
    struct ft_lane_cuda *cuda;  /* NULL = none */
    const uint32_t *router_ids; /* [rows, k] of the layer at hand; NULL = the workspace's */
    bool single_wave;           /* what finds no slot of its own in the layer's first wave goes to the CPU */
    bool cpu_experts_last;      /* the layer before had CPU experts: keep workers awake */

    /* shared flags, a line each */
    _Alignas(64) _Atomic uint32_t epoch;
    _Atomic uint32_t io_epoch; /* of the last step that has reads */
    _Alignas(64) _Atomic uint32_t finished;
    _Alignas(64) _Atomic uint32_t link_published;
    uint32_t *link_jobs; /* [link_max] dynamic indices, used as a ring */
    uint32_t link_max;
    _Alignas(64) _Atomic int failed;            /* status of the first failure of this step */
    _Alignas(64) _Atomic uint32_t last_release; /* lane that last made CPU jobs ready */
    _Alignas(64) _Atomic bool stop;
    struct ft_error failure;

    struct ft_park session_park;
    struct ft_serial device, link, io;
    struct ft_trace_ring *traces; /* [thread_count] of the running step */
    struct ft_trace_ring
        *traces_done; /* [thread_count] of the step before; the same as traces without a GPU */
    /* Called by the session's thread while a step runs; NULL = nothing to do. */
    void (*meanwhile)(void *context);
    void *meanwhile_context;
    /* The policy hears of the step before in `meanwhile`: it is not asked until then. */
    bool meanwhile_learns;
    /* Set at the begin of a step, cleared when `meanwhile` has returned. */
    _Alignas(64) _Atomic bool learning;
    struct ft_step_wait_pending *pending; /* [thread_count] */

    /* host device */
    double link_bytes_per_s;
    uint64_t link_delay_ns_max;
    uint64_t link_random;

    /* io lane */
    const struct ft_row_tables *ple;
    struct ft_row_reader *rows;
    struct ft_row_want *wants;
    uint64_t io_timeout_ns;
    uint64_t
        io_ahead_ns; /* the io thread is woken between steps and spins so long for the next; 0 = it is not */
    bool spins_for_end;  /* the session's thread looks for the end of a decode step around the time it took before */
    uint64_t last_ns;    /* of the decode step before with the same rows; 0 = none */
    uint32_t last_rows;
    uint64_t io_spin_ns; /* bound of its spin for the end of a read; 0 = it sleeps */
    struct ft_row_reader_options row_options;
    struct ft_error io_open_error;
    _Atomic int io_opened; /* 0 not yet, 1 yes, 2 failed */
};

/* Runs one step of `graph` over `batch`; blocks until the end job or the timeout. FT_OK also when sequences
 * of the batch failed (their own flags say so); a failed step returns the failure's code and err tells it.
 * FT_TIMEOUT: some lane is dead or stuck; the runner must not be used again. */
int ft_step_run(struct ft_step *step, const struct ft_graph *graph, struct ft_batch *batch,
                uint64_t timeout_ns, struct ft_error *err);

/* ---- for the lanes ---- */

/* First failure wins. Any thread. */
void ft_step_fail(struct ft_step *step, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Runs one job as `thread` (record, execute, complete) and appends to todo what became ready for CPU lanes;
 * returns the new count of todo. */
uint32_t ft_step_run_job(struct ft_step *step, uint32_t thread, uint32_t job, uint32_t *todo, uint32_t count);
/* Completes a job that the caller ran and recorded itself. */
uint32_t ft_step_complete(struct ft_step *step, uint32_t thread, uint32_t job, uint32_t *todo,
                          uint32_t count);
/* Service threads: hands CPU jobs to the workers. */
void ft_step_hand_over(struct ft_step *step, uint32_t thread, const uint32_t *jobs, uint32_t count);
/* Service threads: waits (bounded spin, then park) until the job's counter is 0, recording the wait. False:
 * stopping. */
bool ft_step_wait_job(struct ft_step *step, uint32_t thread, struct ft_serial *serial, uint32_t job,
                      enum ft_wait cause);
/* Waits for an epoch other than `seen`; returns it. Spins for spin_ns, then parks; woken without a new epoch
 * it spins for woken_spin_ns, yielding. False: stopping. */
bool ft_step_wait_epoch(struct ft_step *step, uint32_t thread, struct ft_serial *serial, uint64_t spin_ns,
                        uint64_t woken_spin_ns, uint32_t *seen);
/* The same for the io lane: a step that has reads. */
bool ft_step_wait_io_epoch(struct ft_step *step, uint32_t thread, struct ft_serial *serial, uint64_t spin_ns,
                           uint64_t woken_spin_ns, uint32_t *seen);
struct ft_trace_record *ft_step_record(struct ft_step *step, uint32_t thread, enum ft_record_kind kind,
                                       uint64_t start_ns, uint64_t end_ns);
/* A copy that was made ahead, as the link's job; end_ns 0: nobody made it. What was copied between two steps is shown at
 * the begin of the second. slot may be FT_NONE. */
void ft_step_record_ahead(struct ft_step *step, uint32_t thread, uint64_t start_ns, uint64_t end_ns,
                          uint32_t layer, uint32_t expert, uint32_t slot, enum ft_reason reason);
static inline char *const *ft_step_staging(const struct ft_step *step, uint32_t layer)
{
    return step->staging[ft_slots_part_of(&step->slots, layer)];
}
/* What a policy may know of the time. */
static inline double ft_step_policy_now(const struct ft_step *step)
{
    return step->plan->deterministic ? 0 : (double)ft_clock_ns(&step->clock);
}
static inline bool ft_step_is_dynamic(const struct ft_step *step, uint32_t job)
{
    return job >= step->graph->static_count;
}
static inline uint32_t *ft_step_todo(struct ft_step *step, uint32_t thread)
{
    return step->todo + (uint64_t)thread * step->todo_max;
}
static inline uint32_t ft_step_thread(const struct ft_step *step, enum ft_step_thread which)
{
    return step->workers + which;
}
/* jobs/expand.c: after the layer's router: policy, reserved range, link jobs. Appends ready CPU jobs to todo. */
uint32_t ft_step_expand(struct ft_step *step, uint32_t thread, uint32_t layer, uint32_t *todo,
                        uint32_t count);
/* Callback of the CPU lane. */
void ft_step_run_cpu(void *context, uint32_t thread, struct ft_job_ref ref);
void ft_step_idle_cpu(void *context, uint32_t thread, uint64_t begin_ns, uint64_t end_ns);
bool ft_step_spare_cpu(void *context, uint32_t thread);
void ft_step_room_cpu(void *context, uint32_t producer);

/* jobs/lane_host.c, jobs/lane_io.c: start and stop the service threads that the plan needs. */
int ft_lane_host_open(struct ft_step *step, struct ft_error *err);
void ft_lane_host_close(struct ft_step *step);
int ft_lane_io_open(struct ft_step *step, struct ft_error *err);
void ft_lane_io_close(struct ft_step *step);
/* Joins a service thread, for at most `timeout_ns`; a thread that does not come back is left behind. */
bool ft_serial_join(struct ft_serial *serial, uint64_t timeout_ns);
int ft_serial_start(struct ft_serial *serial, const char *name, void *(*run)(void *), void *context,
                    struct ft_error *err);

#endif
