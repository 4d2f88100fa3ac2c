/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What tracing takes of a step: a synthetic model of 48 small layers, made in memory with random weights,
 * decodes through a real session. Steps alternate between three ways, so that other load falls on all of them
 * alike:
 *
 *   bare      trace rings without room: no record is written (clocks are still read)
 *   records   every job and wait leaves its record, as always
 *   file      and each step's frame is written to a file, as with --trace
 *
 * Units: ns. Threads: called by one thread; starts and stops its own lanes. Errors: those of ft_session_open
 * and of the file.
 */
#ifndef FT_TOOLS_BENCH_TRACE_SHARE_H
#define FT_TOOLS_BENCH_TRACE_SHARE_H

#include "graph/error.h"
#include "jobs/topology.h"

enum ft_trace_way { FT_TRACE_BARE, FT_TRACE_RECORDS, FT_TRACE_FILE, FT_TRACE_WAYS };

struct ft_trace_share_options {
    const struct ft_topology *topology;
    uint32_t workers, layers;
    uint32_t steps;       /* of each way */
    double ns_per_record; /* two clock reads and a record: ft_bench_jobs_result.trace_ns_per_job */
};

struct ft_trace_share {
    double step_ns[FT_TRACE_WAYS]; /* medians, from the call of the step to its return */
    double records_per_step;       /* of all threads, median */
    double file_ns;                /* in the trace callback, median */
    double records_share;          /* records_per_step * ns_per_record / threads that write them / step */
    double file_share;             /* file_ns / step */
    double measured_share; /* (file - bare) / file; other load is a part of it, so it may be negative */
};

int ft_bench_trace_share(const struct ft_trace_share_options *options, struct ft_trace_share *share,
                         struct ft_error *err);

#endif
