/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Park: where a thread sleeps until there is work. An event count over a futex.
 *
 *     sleeper                                   waker
 *     ticket = ft_park_prepare(park)            publish the work
 *     look for work again                       ft_park_wake(park)
 *       found:  ft_park_cancel(park)
 *       none:   ft_park_wait(park, ticket, ns)
 *
 * No wake-up is lost: either the second look sees the work or the wake sees the sleeper.
 * ft_park_wake wakes one sleeper, and does nothing while an earlier wake is still on its way. Sleepers of one
 * park are therefore interchangeable, and whoever comes back (from wait, or through cancel) must look at all
 * the work; when it leaves some behind, it wakes the next. Waking is a fence and a load when nobody sleeps.
 * Threads: any number of sleepers and wakers. Every wait has a bound; spurious returns are possible.
 */
#ifndef FT_JOBS_PARK_H
#define FT_JOBS_PARK_H

#include <stdbool.h>
#include <stdint.h>

struct ft_park {
    _Alignas(64) _Atomic uint32_t epoch; /* the futex; wakers add 1 */
    _Atomic uint32_t waiters;            /* between prepare and the end of wait, or cancel */
    _Atomic uint32_t pending;            /* 1: a wake is on its way; sleepers clear it */
};

void ft_park_init(struct ft_park *park);
uint32_t ft_park_prepare(struct ft_park *park);
void ft_park_cancel(struct ft_park *park);
/* False when timeout_ns passed without a wake. */
bool ft_park_wait(struct ft_park *park, uint32_t ticket, uint64_t timeout_ns);
/* The fence of ft_park_wake alone, for a waker that publishes once and then looks at the waiters of several parks. */
void ft_park_fence(struct ft_park *park);
/* True when a sleeper was woken (that costs a system call). */
bool ft_park_wake(struct ft_park *park);
/* Wakes every sleeper whatever is pending (end of life, change of state). */
void ft_park_wake_all(struct ft_park *park);
/* How many sleep or are about to; a snapshot, for counters and for skipping work that only matters to sleepers. */
uint32_t ft_park_waiters(const struct ft_park *park);
/* The same without one who is being woken: it may still wait for its core. */
uint32_t ft_park_asleep(const struct ft_park *park);
/* One step of a bounded spin: tells the core that we wait. */
static inline void ft_park_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    /* `yield` is a no-op on most cores; isb really waits some tens of cycles. */
    __asm__ volatile("isb" ::: "memory");
#endif
}

#endif
