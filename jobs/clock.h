/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clock: nanoseconds of CLOCK_MONOTONIC, read from the core's own counter in a few nanoseconds.
 *
 *     ns = base_ns + (ticks - base_ticks) * ns_per_tick_q32 / 2^32
 *
 * x86-64: rdtsc, only when it is invariant and the kernel itself trusts it; calibrated once against
 * CLOCK_MONOTONIC for about 10 ms (0.6 ppm at worst in 12 calibrations). aarch64: cntvct_el0, whose frequency
 * is architectural. Otherwise clock_gettime (20-30 ns through the vDSO). Threads: read-only after init, share
 * it freely. No errors: the fallback always works.
 */
#ifndef FT_JOBS_CLOCK_H
#define FT_JOBS_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

struct ft_clock {
    uint64_t ns_per_tick_q32; /* 32.32 fixed point; 0: clock_gettime */
    uint64_t base_ticks;
    uint64_t base_ns;
};

void ft_clock_init(struct ft_clock *clock);
/* The slow way: clock_gettime(CLOCK_MONOTONIC). */
uint64_t ft_clock_system_ns(void);

static inline uint64_t ft_clock_ticks(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return 0;
#endif
}

static inline uint64_t ft_clock_ns(const struct ft_clock *clock)
{
    if (!clock->ns_per_tick_q32)
        return ft_clock_system_ns();
    /* Signed: the counter of another core may read a little less than base_ticks. 128 bits: 64 overflow in 4 s. */
    int64_t ticks = (int64_t)(ft_clock_ticks() - clock->base_ticks);
    return clock->base_ns + (uint64_t)(((__int128)ticks * (__int128)clock->ns_per_tick_q32) >> 32);
}

#endif
