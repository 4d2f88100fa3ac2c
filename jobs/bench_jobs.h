/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the scheduler itself costs: a synthetic step of empty jobs through the real lane, rings and counters.
 *
 *     layer:  serial -> serial -> ... -> tile x tiles -> join -> next layer
 *
 * ns_per_job counts everything that a step does: counters set back, decrements, rings, steals, waiting.
 * Units: ns. Threads: called by one thread; starts and stops its own lanes. Errors: those of
 * ft_lane_cpu_open, FT_TIMEOUT when the lane does not finish, FT_INTERNAL when a job ran twice or never.
 */
#ifndef FT_JOBS_BENCH_JOBS_H
#define FT_JOBS_BENCH_JOBS_H

#include "graph/error.h"
#include "jobs/clock.h"
#include "jobs/topology.h"

struct ft_bench_jobs_options {
    const struct ft_topology *topology; /* may be NULL */
    const struct ft_clock *clock;
    uint32_t workers;
    uint32_t layers;  /* e.g. 48 */
    uint32_t serials; /* serial jobs of a layer, >= 1 */
    uint32_t tiles;   /* jobs that fan out and join, >= 1 */
    uint32_t steps;   /* per round */
    uint32_t rounds;  /* the best round counts */
};

struct ft_bench_jobs_result {
    uint32_t job_count; /* of a step */
    double ns_per_job;  /* wall time of a round / jobs; best round, of those with >= 10% stolen if there are
                           any */
    double steal_fraction; /* of that round: jobs taken from another thread's ring / jobs */
    double ns_per_steal;   /* wall time per job when every job is taken from another thread's ring */
    double wake_ns_min;    /* from the push to the first instruction of the job, worker parked */
    double wake_ns_median;
    double trace_ns_per_job; /* two clock reads and one record into a trace ring, as the step runner does per
                                job */
};

int ft_bench_jobs_run(const struct ft_bench_jobs_options *options, struct ft_bench_jobs_result *result,
                      struct ft_error *err);

#endif
