/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Warming: while workers have nothing to do between two layers, the experts that they will probably compute in the next
 * one come from memory into the caches, so that the layer finds them nearer. What they bring depends on what the router
 * look-ahead foresees; a wrong guess costs nothing but the read. 14 workers beside an H200, four ways in turn within one
 * process, some 160 steps of each: steps of strategies auto and cpu 3% shorter; reading instead of prefetching, chunks of
 * 8 or 16 KB: 0.3 to 3% and 3.5 to 4%. It is not more because with all of it in its own cache a worker would take 75 us
 * instead of 135 for arithmetic alone (105 brought by another one, 92 by itself), and because a core brings no more than
 * 5 GB/s. Tiles of its own for each worker, which it brings and takes itself, cost in jobs what they gained.
 *
 *   expander   offer: list of another generation, cursor = its first chunk       stop: cursor = behind every chunk
 *   worker     run: takes one chunk by moving the cursor on, and prefetches it   (about a microsecond)
 *
 * A worker that was stopped in the middle may read a list that is being made anew: it then prefetches what need not be
 * there, which has no effect.
 *
 * Threads: expander = whoever completes a router, one at a time; workers at any time. No errors.
 */
#ifndef FT_JOBS_WARM_H
#define FT_JOBS_WARM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define FT_WARM_MAX 32u       /* experts of a list */
#define FT_WARM_CHUNK 8192u   /* bytes that a worker takes at once */
#define FT_WARM_LISTS 4u

struct ft_warm_list {
    _Atomic uint32_t count, chunks; /* experts; chunks of each */
    _Atomic uintptr_t at[FT_WARM_MAX];
};

struct ft_warm {
    struct ft_warm_list lists[FT_WARM_LISTS]; /* generation modulo their number */
    uint64_t bytes;                           /* expander: taken by workers so far */
    _Alignas(64) _Atomic uint64_t cursor;     /* generation << 32 | next chunk */
};

/* at [count] experts of `bytes` bytes each, the likeliest first; what goes beyond FT_WARM_MAX is left out. */
void ft_warm_offer(struct ft_warm *warm, const char *const *at, uint32_t count, uint32_t bytes);
/* The layer's jobs are there. */
void ft_warm_stop(struct ft_warm *warm);
/* Worker. False: nothing to do. */
bool ft_warm_run(struct ft_warm *warm);

#endif
