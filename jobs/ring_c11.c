/* SPDX-License-Identifier: Apache-2.0 */
/* The twin of ring.c for ThreadSanitizer; see ring.h. */
#ifdef FT_C11_RING
#include "jobs/ring.h"

#include <stdatomic.h>

struct ft_ring {
    _Alignas(64) _Atomic uint32_t head; /* written by whoever pops */
    _Alignas(64) _Atomic uint32_t tail; /* written by the owner */
    _Alignas(64) uint32_t mask;         /* constant */
    /* Atomic, because a slow thief may read an entry that the owner overwrites; its exchange on head then fails. */
    _Alignas(64) _Atomic uint64_t entries[];
};

static uint64_t pack(uint32_t job, uint32_t epoch)
{
    return (uint64_t)epoch << 32 | job;
}

uint32_t ft_ring_entries(uint32_t entries)
{
    uint32_t size = 2;
    while (size < FT_RING_ENTRIES_MAX && size - 1 < entries)
        size *= 2;
    return size;
}

uint64_t ft_ring_bytes(uint32_t size)
{
    return sizeof(struct ft_ring) + (uint64_t)size * sizeof(uint64_t);
}

struct ft_ring *ft_ring_init(void *memory, uint32_t size)
{
    struct ft_ring *ring = memory;
    atomic_init(&ring->head, 0);
    atomic_init(&ring->tail, 0);
    ring->mask = size - 1;
    return ring;
}

bool ft_ring_try_push_spmc(struct ft_ring *ring, struct ft_job_ref entry)
{
    return ft_ring_push_many_spmc(ring, &entry.job, 1, entry.epoch) == 1;
}

uint32_t ft_ring_push_many_spmc(struct ft_ring *ring, const uint32_t *jobs, uint32_t count, uint32_t epoch)
{
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    /* acquire: pairs with the exchange in try_pop; the entry has been copied out before we overwrite it. */
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    uint32_t free_count = ring->mask - (tail - head);
    uint32_t fitting = count < free_count ? count : free_count;
    for (uint32_t i = 0; i < fitting; i++)
        atomic_store_explicit(&ring->entries[(tail + i) & ring->mask], pack(jobs[i], epoch),
                              memory_order_relaxed);
    /* release: pairs with the acquire of tail in try_pop. */
    if (fitting)
        atomic_store_explicit(&ring->tail, tail + fitting, memory_order_release);
    return fitting;
}

bool ft_ring_try_pop_spmc(struct ft_ring *ring, struct ft_job_ref *entry)
{
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    for (;;) {
        /* acquire: pairs with the release in push_many. Read after head, so that tail is never behind it. */
        uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
        if (head == tail)
            return false;
        uint64_t value = atomic_load_explicit(&ring->entries[head & ring->mask], memory_order_relaxed);
        /* release: our copy is done before the owner sees the place free. */
        if (atomic_compare_exchange_weak_explicit(&ring->head, &head, head + 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            *entry = (struct ft_job_ref){(uint32_t)value, (uint32_t)(value >> 32)};
            return true;
        }
    }
}

uint32_t ft_ring_count(const struct ft_ring *ring)
{
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    return (atomic_load_explicit(&ring->tail, memory_order_acquire) - head) & ring->mask;
}
#else
typedef int ft_ring_is_in_ring_c; /* an empty translation unit is not C */
#endif
