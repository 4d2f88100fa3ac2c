/* SPDX-License-Identifier: Apache-2.0 */
#ifndef FT_C11_RING
#include "jobs/ring.h"

#include <ck_ring.h>

CK_RING_PROTOTYPE(job_ref, ft_job_ref)

struct ft_ring {
    _Alignas(64) struct ck_ring ring;
    _Alignas(64) struct ft_job_ref entries[];
};

uint32_t ft_ring_entries(uint32_t entries)
{
    uint32_t size = 2;
    while (size < FT_RING_ENTRIES_MAX && size - 1 < entries)
        size *= 2;
    return size;
}

uint64_t ft_ring_bytes(uint32_t size)
{
    return sizeof(struct ft_ring) + (uint64_t)size * sizeof(struct ft_job_ref);
}

struct ft_ring *ft_ring_init(void *memory, uint32_t size)
{
    struct ft_ring *ring = memory;
    ck_ring_init(&ring->ring, size);
    return ring;
}

bool ft_ring_try_push_spmc(struct ft_ring *ring, struct ft_job_ref entry)
{
    return ck_ring_enqueue_spmc_job_ref(&ring->ring, ring->entries, &entry);
}

uint32_t ft_ring_push_many_spmc(struct ft_ring *ring, const uint32_t *jobs, uint32_t count, uint32_t epoch)
{
    /* ck enqueues one entry at a time. Publishing each on its own would send the tail's cache line to every
     * thief and back once per entry, so this is ck_ring_enqueue_spmc with the loop moved inside: same loads,
     * same fence, one store of the tail. */
    unsigned int mask = ring->ring.mask;
    unsigned int tail = ring->ring.p_tail;
    unsigned int free_count = mask - (tail - ck_pr_load_uint(&ring->ring.c_head));
    uint32_t fitting = count < free_count ? count : free_count;
    for (uint32_t i = 0; i < fitting; i++)
        ring->entries[(tail + i) & mask] = (struct ft_job_ref){jobs[i], epoch};
    if (fitting) {
        ck_pr_fence_store();
        ck_pr_store_uint(&ring->ring.p_tail, tail + fitting);
    }
    return fitting;
}

bool ft_ring_try_pop_spmc(struct ft_ring *ring, struct ft_job_ref *entry)
{
    return ck_ring_dequeue_spmc_job_ref(&ring->ring, ring->entries, entry);
}

uint32_t ft_ring_count(const struct ft_ring *ring)
{
    return ck_ring_size(&ring->ring);
}
#else
typedef int ft_ring_is_in_ring_c11; /* an empty translation unit is not C */
#endif
