/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/clock.h"
#include "jobs/park.h"
#include "tests/test.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define SLEEPERS 3
#define TOKENS 20000

/* A heap of tokens: whoever takes one counts it. The park must never leave tokens and sleepers together. */
struct pool {
    struct ft_park park;
    _Atomic int tokens;
    _Atomic int taken;
    _Atomic int timeouts;
};

static bool take_token(struct pool *pool)
{
    int tokens = atomic_load(&pool->tokens);
    while (tokens > 0)
        if (atomic_compare_exchange_weak(&pool->tokens, &tokens, tokens - 1)) {
            atomic_fetch_add(&pool->taken, 1);
            return true;
        }
    return false;
}

static void *sleeper_main(void *argument)
{
    struct pool *pool = argument;
    while (atomic_load(&pool->taken) < TOKENS) {
        if (take_token(pool))
            continue;
        uint32_t ticket = ft_park_prepare(&pool->park);
        if (take_token(pool) || atomic_load(&pool->taken) >= TOKENS) {
            ft_park_cancel(&pool->park);
        } else if (!ft_park_wait(&pool->park, ticket, 5000000000ull)) {
            atomic_fetch_add(&pool->timeouts, 1);
        }
        if (atomic_load(&pool->tokens) > 0)
            ft_park_wake(&pool->park); /* the next of the tree */
    }
    ft_park_wake_all(&pool->park);
    return NULL;
}

TEST(no_wake_is_lost)
{
    struct pool pool = {.tokens = 0};
    pthread_t threads[SLEEPERS];
    ft_park_init(&pool.park);
    for (int i = 0; i < SLEEPERS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, sleeper_main, &pool), 0);
    for (int i = 0; i < TOKENS; i++) {
        atomic_fetch_add(&pool.tokens, 1);
        ft_park_wake(&pool.park);
        if (i % 100 == 99) { /* let everybody fall asleep now and then */
            struct timespec pause = {0, 200000};
            nanosleep(&pause, NULL);
        }
    }
    for (int i = 0; i < SLEEPERS; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(pool.taken, TOKENS);
    CHECK_EQ(pool.timeouts, 0);
    CHECK_EQ(ft_park_waiters(&pool.park), 0);
}

TEST(every_wait_is_bounded)
{
    struct ft_park park;
    ft_park_init(&park);
    uint32_t ticket = ft_park_prepare(&park);
    CHECK_EQ(ft_park_waiters(&park), 1);
    uint64_t start_ns = ft_clock_system_ns();
    CHECK(!ft_park_wait(&park, ticket, 20000000));
    uint64_t took_ns = ft_clock_system_ns() - start_ns;
    CHECK(took_ns >= 20000000 && took_ns < 2000000000);
    CHECK_EQ(ft_park_waiters(&park), 0);
}

TEST(a_wake_between_prepare_and_wait_is_kept)
{
    struct ft_park park;
    ft_park_init(&park);
    CHECK(!ft_park_wake(&park)); /* nobody there: nothing is remembered */
    uint32_t ticket = ft_park_prepare(&park);
    CHECK(ft_park_wake(&park));
    CHECK(!ft_park_wake(&park)); /* one is on its way already */
    CHECK(ft_park_wait(&park, ticket, 10000000000ull));
    ticket = ft_park_prepare(&park);
    ft_park_cancel(&park);
    CHECK(!ft_park_wake(&park));
    ticket = ft_park_prepare(&park);
    CHECK(!ft_park_wait(&park, ticket, 1000000)); /* the wakes of the past are over */
}

TEST(waking_nobody_is_cheap)
{
    struct ft_park park;
    uint64_t best_ns = UINT64_MAX;
    ft_park_init(&park);
    for (int round = 0; round < 20; round++) {
        uint64_t start_ns = ft_clock_system_ns();
        for (int i = 0; i < 1000; i++)
            ft_park_wake(&park);
        uint64_t ns = ft_clock_system_ns() - start_ns;
        best_ns = ns < best_ns ? ns : best_ns;
    }
    CHECK(best_ns / 1000 < 1000); /* a system call per wake would not be */
}

TEST(clock_follows_the_system_clock)
{
    struct ft_clock clock;
    ft_clock_init(&clock);
    uint64_t last_ns = ft_clock_ns(&clock);
    uint64_t off_ns_min = UINT64_MAX;
    for (int i = 0; i < 50; i++) {
        struct timespec pause = {0, 2000000};
        nanosleep(&pause, NULL);
        uint64_t system_ns = ft_clock_system_ns(), now_ns = ft_clock_ns(&clock);
        CHECK(now_ns > last_ns);
        last_ns = now_ns;
        uint64_t off_ns = now_ns > system_ns ? now_ns - system_ns : system_ns - now_ns;
        off_ns_min = off_ns < off_ns_min ? off_ns : off_ns_min;
    }
    CHECK(off_ns_min < 100000);
    struct ft_clock slow = {0};
    uint64_t system_ns = ft_clock_system_ns();
    CHECK(ft_clock_ns(&slow) >= system_ns);
}

TEST_MAIN(RUN(no_wake_is_lost) RUN(every_wait_is_bounded) RUN(a_wake_between_prepare_and_wait_is_kept)
              RUN(waking_nobody_is_cheap) RUN(clock_follows_the_system_clock))
