/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/clock.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define CALIBRATE_NS 10000000ull

uint64_t ft_clock_system_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

#if defined(__x86_64__)
/* The kernel watches the TSC and leaves it when it misbehaves; a paravirtual clock is built on a good TSC. */
static bool kernel_trusts_tsc(void)
{
    char name[32] = "";
    FILE *file = fopen("/sys/devices/system/clocksource/clocksource0/current_clocksource", "r");
    if (!file)
        return true; /* no sysfs in this container: the CPUID bit decides */
    if (!fgets(name, sizeof name, file))
        name[0] = '\0';
    fclose(file);
    return strncmp(name, "tsc", 3) == 0 || strncmp(name, "kvm-clock", 9) == 0 ||
           strncmp(name, "hyperv", 6) == 0;
}

static bool tsc_is_invariant(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(0x80000007u, &a, &b, &c, &d) && (d & (1u << 8)) != 0;
}

/* One (ticks, ns) pair. The read that took least time was not interrupted. */
static void read_pair(uint64_t *ticks, uint64_t *ns)
{
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < 32; i++) {
        uint64_t before = ft_clock_ticks();
        uint64_t now = ft_clock_system_ns();
        uint64_t after = ft_clock_ticks();
        if (after - before < best) {
            best = after - before;
            *ticks = before + best / 2;
            *ns = now;
        }
    }
}

/* A hypervisor may trap rdtsc; then it costs microseconds and the system clock is the better one. */
static bool ticks_are_cheap(void)
{
    uint64_t start = ft_clock_system_ns();
    uint64_t sum = 0;
    for (int i = 0; i < 64; i++)
        sum += ft_clock_ticks();
    __asm__ volatile("" ::"r"(sum));
    return ft_clock_system_ns() - start < 64 * 200;
}

static bool cheap_at_least_once(void)
{
    for (int i = 0; i < 8; i++)
        if (ticks_are_cheap())
            return true;
    return false;
}

static void calibrate(struct ft_clock *clock)
{
    uint64_t ticks = 0, ns = 0;
    if (!tsc_is_invariant() || !kernel_trusts_tsc() || !cheap_at_least_once())
        return;
    read_pair(&clock->base_ticks, &clock->base_ns);
    struct timespec pause = {0, (long)CALIBRATE_NS};
    nanosleep(&pause, NULL);
    read_pair(&ticks, &ns);
    if (ticks > clock->base_ticks && ns > clock->base_ns)
        clock->ns_per_tick_q32 =
            (uint64_t)(((unsigned __int128)(ns - clock->base_ns) << 32) / (ticks - clock->base_ticks));
}
#elif defined(__aarch64__)
static void calibrate(struct ft_clock *clock)
{
    uint64_t hz;
    __asm__ volatile("mrs %0, cntfrq_el0" : "=r"(hz));
    if (hz < 1000000) /* firmware forgot to set it */
        return;
    clock->base_ticks = ft_clock_ticks();
    clock->base_ns = ft_clock_system_ns();
    clock->ns_per_tick_q32 = (uint64_t)(((unsigned __int128)1000000000ull << 32) / hz);
}
#else
static void calibrate(struct ft_clock *clock)
{
    (void)clock;
}
#endif

void ft_clock_init(struct ft_clock *clock)
{
    memset(clock, 0, sizeof *clock);
    calibrate(clock);
}
