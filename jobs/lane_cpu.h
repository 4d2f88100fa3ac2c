/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CPU lane: the pool of pinned workers that steal from each other.
 *
 *     thread ids      0 .. W-1 workers          W .. W+P-1 producers (session, host device, link, io, ...)
 *     rings           one per worker            one per producer and L3 domain
 *     a worker looks  its own ring, then rings of the same L3, of the same NUMA node, anywhere
 *     nothing there   bounded spin (only while active), then park; one park per L3 domain
 *
 * Every thread pushes to its own ring only, so rings have one producer. A push wakes at most one sleeper; a
 * worker that comes back from idling and leaves work behind wakes the next: wake-ups spread as a tree and
 * pushers pay for one. Order: FIFO per ring, none between rings.
 *
 * Ring full: a worker is told how many jobs fitted and runs the rest itself. A producer's rest goes to its
 * private backlog ([backlog_entries] at open). Only the producer drains it: at its next push, or by
 * ft_lane_cpu_flush. So a producer must not sleep for good on a result while its backlog holds jobs. It
 * either flushes in its bounded wait loop, or is told by the `room` callback (called by a worker that made
 * room while a backlog existed), or calls ft_lane_cpu_try_run and works itself.
 *
 * Ownership: the lane copies the options; topology, clock and ctx must outlive it. Jobs still queued at close
 * are dropped: finish the step first. Threads: each function says who may call it. No allocation after open;
 * system calls after open: futex only. Errors: open only (FT_MEMORY, FT_SYSTEM, FT_USAGE), nothing left
 * behind.
 */
#ifndef FT_JOBS_LANE_CPU_H
#define FT_JOBS_LANE_CPU_H

#include "graph/error.h"
#include "graph/types.h"
#include "jobs/clock.h"
#include "jobs/ring.h"
#include "jobs/topology.h"

struct ft_lane_cpu;

struct ft_lane_cpu_options {
    const struct ft_topology *topology; /* may be NULL: one L3 domain, nothing is pinned */
    const struct ft_clock *clock;
    uint32_t workers;         /* 1 .. FT_WORKERS_MAX; more than there are cores works, but slowly */
    uint32_t producers;       /* threads that push but are not workers */
    uint32_t ring_entries;    /* jobs that one ring holds (rounded up) */
    uint32_t backlog_entries; /* jobs that a producer's private backlog holds */
    uint64_t spin_ns;         /* bound of one spin before parking, while active; 0 = park at once */
    /* Jobs that producers pushed go before those that workers made ready: what a whole group of jobs waits
     * for before what only one of them made possible. */
    bool producers_first;

    /* Runs one job. thread: the worker's id (or the producer's, from ft_lane_cpu_try_run). May push. */
    void (*run)(void *ctx, uint32_t thread, struct ft_job_ref ref);
    /* Optional: `thread` had nothing to do from begin_ns to end_ns while the lane was active. Called by it. */
    void (*idle)(void *ctx, uint32_t thread, uint64_t begin_ns, uint64_t end_ns);
    /* Optional: a worker that looks for jobs while the lane is active may do something useful, for about a microsecond.
     * False: there is nothing. */
    bool (*spare)(void *ctx, uint32_t thread);
    /* Optional: a worker took a job from the ring of `producer`, which has a backlog. Must not block. */
    void (*room)(void *ctx, uint32_t producer);
    void *ctx;
};

struct ft_lane_cpu_counters {
    uint64_t jobs;    /* entries taken and handed to run */
    uint64_t stolen;  /* of these, from a ring of another thread */
    uint64_t spins;   /* searches that went past the first look */
    uint64_t parks;   /* times slept */
    uint64_t wakes;   /* sleepers woken by this thread */
    uint64_t idle_ns; /* as reported to `idle` */
};

int ft_lane_cpu_open(struct ft_lane_cpu **lane, const struct ft_lane_cpu_options *options,
                     struct ft_error *err);
/* Stops and joins the workers; each finishes the job in its hands. NULL is fine. */
void ft_lane_cpu_close(struct ft_lane_cpu *lane);

/* By `thread` itself. Returns how many of jobs[0 .. count) were accepted, in order: for a worker those in its
 * ring (it runs the rest itself), for a producer those in its rings or backlog (fewer than count: the backlog
 * is full, try again later or run them through ft_lane_cpu_try_run). Producers deal a batch out over the L3
 * domains. */
uint32_t ft_lane_cpu_push(struct ft_lane_cpu *lane, uint32_t thread, const uint32_t *jobs, uint32_t count,
                          uint32_t epoch);
/* As push, but a producer's jobs go to the ring of this L3 domain. (Workers own a ring in their own domain only.) */
uint32_t ft_lane_cpu_push_domain(struct ft_lane_cpu *lane, uint32_t thread, uint32_t l3_domain,
                                 const uint32_t *jobs, uint32_t count, uint32_t epoch);
/* By a worker or producer: keeps todo[0], pushes todo[1 .. count) and moves what did not fit to the front.
 * Returns how many are left in todo (>= 1 when count >= 1). */
uint32_t ft_lane_cpu_offer(struct ft_lane_cpu *lane, uint32_t thread, uint32_t *todo, uint32_t count,
                           uint32_t epoch);
/* By the producer itself. Returns how many jobs its backlog still holds. */
uint32_t ft_lane_cpu_flush(struct ft_lane_cpu *lane, uint32_t thread);
/* By any thread of the lane: takes one job from anywhere and runs it as `thread`. False: none there. */
bool ft_lane_cpu_try_run(struct ft_lane_cpu *lane, uint32_t thread);

/* By anybody: whether the current or the next layer has CPU jobs. Only then do workers spin before they park. */
void ft_lane_cpu_set_active(struct ft_lane_cpu *lane, bool active);
/* By anybody: wakes one sleeper ahead of the jobs that are about to come. */
void ft_lane_cpu_wake_ahead(struct ft_lane_cpu *lane);
/* By anybody: wakes every sleeper: work for all of them is near, and woken one by another they would come
 * some 40 us apart. */
void ft_lane_cpu_wake_all(struct ft_lane_cpu *lane);

/* By anybody, snapshots: workers that sleep and that nobody is waking, so that each leaves a core free; and
 * those together with workers that look for work. */
uint32_t ft_lane_cpu_asleep(const struct ft_lane_cpu *lane);
uint32_t ft_lane_cpu_idle(const struct ft_lane_cpu *lane);
uint32_t ft_lane_cpu_workers(const struct ft_lane_cpu *lane);
uint32_t ft_lane_cpu_l3_domains(const struct ft_lane_cpu *lane);
/* By anybody; a snapshot. thread: worker or producer. */
void ft_lane_cpu_read_counters(const struct ft_lane_cpu *lane, uint32_t thread,
                               struct ft_lane_cpu_counters *counters);

#endif
