/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frontier: which jobs of a graph become ready when one completes. The counting half of every runner; who
 * runs the ready jobs is the caller's business.
 *
 *     succ[succ_begin[j] .. succ_begin[j+1])  = jobs that wait for j
 *     counter[k]                              = predecessors of k that have not completed yet in this step
 *
 * A worker's loop (no job that it can run itself ever goes through a ring; see ft_lane_cpu_offer):
 *
 *     todo[0] = job, count = 1
 *     while (count) {
 *         job = todo[--count]; run(job);
 *         count += ft_frontier_complete(&frontier, job, todo + count);
 *         if (count > 1) count = ft_lane_cpu_offer(lane, thread, todo, count, epoch);
 *     }
 *
 * todo of [job_count] is always enough: a job is in one list at a time.
 * Ordering: everything written by the jobs before their complete() is visible to the job that becomes ready.
 * Threads: complete by any thread, once per job and step. Reset by one thread between steps.
 */
#ifndef FT_JOBS_FRONTIER_H
#define FT_JOBS_FRONTIER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct ft_frontier {
    const uint32_t *succ_begin; /* [job_count + 1] */
    const uint32_t *succ;       /* [succ_begin[job_count]] */
    _Atomic int32_t *counter;   /* [job_count] */
};

/* One predecessor is done; true for the last. Whoever gets true has seen what all of them wrote. */
static inline bool ft_frontier_decrement(_Atomic int32_t *counter)
{
    /* Acquire: pairs with the release half of the other predecessors' decrements. A counter of 1 means that
     * we are the only one left, so no locked operation is needed: most edges of a fan-out end here.
     * Release: pairs with the acquire of a lane that waits for the counter itself to be 0. */
    if (atomic_load_explicit(counter, memory_order_acquire) == 1) {
        atomic_store_explicit(counter, 0, memory_order_release);
        return true;
    }
    return atomic_fetch_sub_explicit(counter, 1, memory_order_acq_rel) == 1;
}

/* Writes the jobs that became ready to ready[] (room for the out-degree of job) and returns how many. */
static inline uint32_t ft_frontier_complete(const struct ft_frontier *frontier, uint32_t job, uint32_t *ready)
{
    uint32_t count = 0;
    uint32_t end = frontier->succ_begin[job + 1];
    for (uint32_t i = frontier->succ_begin[job]; i < end; i++) {
        uint32_t next = frontier->succ[i];
        if (ft_frontier_decrement(&frontier->counter[next]))
            ready[count++] = next;
    }
    return count;
}

/* counter[first .. first + count) = in_degree[...]; before the step's first push (the push publishes it). */
static inline void ft_frontier_reset(const struct ft_frontier *frontier, const uint32_t *in_degree,
                                     uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < first + count; i++)
        atomic_store_explicit(&frontier->counter[i], (int32_t)in_degree[i], memory_order_relaxed);
}

#endif
