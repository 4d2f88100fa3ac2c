/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Why not ck_ec: it has no "wake one" (ck_ec_inc wakes every sleeper of the event count, the opposite of a
 * tree), it writes the shared counter on every increment even when nobody sleeps (a locked instruction per
 * push, on a line that all pushers fight for), and its inline assembly is opaque to ThreadSanitizer.
 *
 * The argument that no wake-up is lost. All operations on the three words are sequentially consistent.
 *  - Sleeper: waiters += 1; ticket = epoch; pending = 0; look for work; sleep while epoch == ticket.
 *  - Waker: publish; fence; read waiters.
 * If the waker reads no sleeper, the sleeper's `waiters += 1` is later in the total order and its look for
 * work sees what was published. If it reads pending == 1, then some sleeper will clear pending after that,
 * and looks for work after clearing. That such a sleeper exists: the waker that set pending also moved the
 * epoch; a sleeper that read its ticket before cannot sleep, and one that read it after clears pending after
 * the set (ticket comes first).
 */
#include "jobs/park.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000ull

/* Orders what came before against the loads that follow; both sides need one (on aarch64 a plain load may
 * pass the store half of a locked update). */
void ft_park_fence(struct ft_park *park)
{
#ifdef __SANITIZE_THREAD__
    /* ThreadSanitizer knows no stand-alone fence (the compiler refuses it); a no-op update orders as well. */
    atomic_fetch_add(&park->waiters, 0);
#else
    (void)park;
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

void ft_park_init(struct ft_park *park)
{
    atomic_init(&park->epoch, 0);
    atomic_init(&park->waiters, 0);
    atomic_init(&park->pending, 0);
}

uint32_t ft_park_prepare(struct ft_park *park)
{
    atomic_fetch_add(&park->waiters, 1);
    uint32_t ticket = atomic_load(&park->epoch);
    atomic_store(&park->pending, 0);
    ft_park_fence(park);
    return ticket;
}

static void leave(struct ft_park *park)
{
    atomic_fetch_sub(&park->waiters, 1);
    /* Only now: the caller looks for work after this, so a waker that still saw 1 is served by that look. */
    atomic_store(&park->pending, 0);
    ft_park_fence(park);
}

void ft_park_cancel(struct ft_park *park)
{
    leave(park);
}

bool ft_park_wait(struct ft_park *park, uint32_t ticket, uint64_t timeout_ns)
{
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    uint64_t ns = (uint64_t)deadline.tv_nsec + timeout_ns % NS_PER_S;
    deadline.tv_sec += (time_t)(timeout_ns / NS_PER_S + ns / NS_PER_S);
    deadline.tv_nsec = (long)(ns % NS_PER_S);
    bool woken = true;
    while (atomic_load(&park->epoch) == ticket) {
        /* BITSET takes an absolute deadline, so that signals do not stretch the bound. EINTR and EAGAIN: look again. */
        long status = syscall(SYS_futex, &park->epoch, FUTEX_WAIT_BITSET_PRIVATE, ticket, &deadline, NULL,
                              FUTEX_BITSET_MATCH_ANY);
        if (status == -1 && errno == ETIMEDOUT) {
            woken = atomic_load(&park->epoch) != ticket;
            break;
        }
    }
    leave(park);
    return woken;
}

bool ft_park_wake(struct ft_park *park)
{
    ft_park_fence(park);
    if (!atomic_load_explicit(&park->waiters, memory_order_relaxed) ||
        atomic_load_explicit(&park->pending, memory_order_relaxed))
        return false;
    if (atomic_exchange(&park->pending, 1))
        return false;
    atomic_fetch_add(&park->epoch, 1);
    syscall(SYS_futex, &park->epoch, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    return true;
}

void ft_park_wake_all(struct ft_park *park)
{
    atomic_fetch_add(&park->epoch, 1);
    syscall(SYS_futex, &park->epoch, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

uint32_t ft_park_asleep(const struct ft_park *park)
{
    uint32_t waiters = ft_park_waiters(park);
    uint32_t waking = atomic_load_explicit(&park->pending, memory_order_relaxed);
    return waiters > waking ? waiters - waking : 0;
}

uint32_t ft_park_waiters(const struct ft_park *park)
{
    return atomic_load_explicit(&park->waiters, memory_order_relaxed);
}
