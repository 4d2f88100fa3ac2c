/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ring: bounded FIFO queue with one producer (the owner) and any number of consumers, the owner included.
 * Taking from another thread's ring is work stealing.
 *
 *     consumers' line        owner's line         constant        entries[size]
 *     [ head ............ ]  [ tail ........... ] [ size, mask ]  [job epoch][job epoch]...
 *
 * Holds size - 1 entries (one stays free to tell full from empty). Lock-free for everybody.
 * Two versions behind this header: ring.c wraps Concurrency Kit's ck_ring; ring_c11.c (-DFT_C11_RING) says
 * the same in C11 atomics, because ck's inline assembly is opaque to ThreadSanitizer. Ownership: the caller
 * provides the memory (64-byte aligned) and frees it. No errors but "full" and "empty". Ordering: what the
 * owner wrote before a push is visible to whoever pops that entry.
 */
#ifndef FT_JOBS_RING_H
#define FT_JOBS_RING_H

#include <stdbool.h>
#include <stdint.h>

/* A job of one step; the epoch tells entries of an earlier (failed) step from those of this one. */
struct ft_job_ref {
    uint32_t job;
    uint32_t epoch;
};

struct ft_ring;

#ifdef FT_TINY
#define FT_RING_ENTRIES_MAX 2u /* full and empty paths run all the time */
#else
#define FT_RING_ENTRIES_MAX (1u << 20)
#endif

/* The size that a request for `entries` gets: a power of two in 2 .. FT_RING_ENTRIES_MAX, at least `entries`
 * + 1 where the maximum allows it. */
uint32_t ft_ring_entries(uint32_t entries);
/* Memory for a ring of `size` (from ft_ring_entries). */
uint64_t ft_ring_bytes(uint32_t size);
/* memory: ft_ring_bytes(size), 64-byte aligned. */
struct ft_ring *ft_ring_init(void *memory, uint32_t size);

/* Owner only. False: full. */
bool ft_ring_try_push_spmc(struct ft_ring *ring, struct ft_job_ref entry);
/* Owner only: jobs[0 .. count) of one epoch, in order, published at once. Returns how many fitted. */
uint32_t ft_ring_push_many_spmc(struct ft_ring *ring, const uint32_t *jobs, uint32_t count, uint32_t epoch);
/* Anybody. False: empty. */
bool ft_ring_try_pop_spmc(struct ft_ring *ring, struct ft_job_ref *entry);
/* Anybody; a snapshot. */
uint32_t ft_ring_count(const struct ft_ring *ring);

#endif
