/* SPDX-License-Identifier: Apache-2.0 */
/* One producer, several thieves, the producer itself takes some: every entry exactly once, FIFO as each one
 * sees it. */
#include "jobs/ring.h"
#include "tests/test.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#if defined(FT_TINY) || defined(FT_C11_RING)
#define ENTRIES 300000u
#else
#define ENTRIES 3000000u
#endif
#define THIEVES 3
/* One epoch per block, so that batches of a block share it and a torn entry shows. */
#define BLOCK 64u
#define EPOCH_OF(job) ((job) / BLOCK * 2654435761u)

struct run {
    struct ft_ring *ring;
    uint32_t count;
    _Atomic uint8_t *seen; /* [count] */
    _Atomic uint32_t taken;
    _Atomic uint32_t faults;
};

/* `next` is the smallest sequence number that this taker may still see. */
static void check_entry(struct run *run, struct ft_job_ref ref, uint32_t *next)
{
    bool good = ref.job < run->count && ref.epoch == EPOCH_OF(ref.job) && ref.job >= *next;
    if (!good || atomic_fetch_add_explicit(&run->seen[ref.job % run->count], 1, memory_order_relaxed) != 0)
        atomic_fetch_add(&run->faults, 1);
    *next = ref.job + 1;
    atomic_fetch_add_explicit(&run->taken, 1, memory_order_relaxed);
}

static void *thief_main(void *argument)
{
    struct run *run = argument;
    struct ft_job_ref ref;
    uint32_t next = 0, idle = 0;
    while (atomic_load_explicit(&run->taken, memory_order_relaxed) < run->count) {
        if (ft_ring_try_pop_spmc(run->ring, &ref)) {
            check_entry(run, ref, &next);
            idle = 0;
        } else if (++idle > 100) {
            sched_yield();
        }
    }
    return NULL;
}

static void produce(struct run *run)
{
    struct ft_job_ref ref;
    uint32_t next = 0;
    for (uint32_t job = 0; job < run->count;) {
        if (ft_ring_try_push_spmc(run->ring, (struct ft_job_ref){job, EPOCH_OF(job)}))
            job++;
        else if (job % 3 == 0 && ft_ring_try_pop_spmc(run->ring, &ref))
            check_entry(run, ref, &next);
        else
            sched_yield();
    }
}

static void produce_batches(struct run *run)
{
    uint32_t jobs[BLOCK];
    for (uint32_t job = 0; job < run->count;) {
        uint32_t count = BLOCK - job % BLOCK;
        count = count < run->count - job ? count : run->count - job;
        for (uint32_t i = 0; i < count; i++)
            jobs[i] = job + i;
        uint32_t done = ft_ring_push_many_spmc(run->ring, jobs, count, EPOCH_OF(job));
        job += done;
        if (!done)
            sched_yield();
    }
}

static void run_size(uint32_t entries, bool batches)
{
    pthread_t threads[THIEVES];
    struct run run = {.count = entries < 2 ? ENTRIES / 10 : ENTRIES};
    uint32_t size = ft_ring_entries(entries), missing = 0;
    void *memory = aligned_alloc(64, (ft_ring_bytes(size) + 63) / 64 * 64);
    run.seen = calloc(run.count, 1);
    REQUIRE(memory != NULL && run.seen != NULL);
    run.ring = ft_ring_init(memory, size);
    for (int i = 0; i < THIEVES; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, thief_main, &run), 0);
    if (batches)
        produce_batches(&run);
    else
        produce(&run);
    for (int i = 0; i < THIEVES; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < run.count; i++)
        missing += run.seen[i] != 1;
    CHECK_EQ(missing, 0);
    CHECK_EQ(run.faults, 0);
    CHECK_EQ(run.taken, run.count);
    free((void *)run.seen);
    free(memory);
}

TEST(every_entry_once_and_in_order_through_a_ring_of_2)
{
    run_size(1, false);
}

TEST(every_entry_once_and_in_order_through_a_ring_of_8)
{
    run_size(7, false);
}

TEST(every_entry_once_and_in_order_through_a_ring_of_1024)
{
    run_size(1023, false);
}

TEST(every_entry_once_and_in_order_when_pushed_in_batches)
{
    run_size(255, true);
}

TEST_MAIN(RUN(every_entry_once_and_in_order_through_a_ring_of_2)
              RUN(every_entry_once_and_in_order_through_a_ring_of_8)
                  RUN(every_entry_once_and_in_order_through_a_ring_of_1024)
                      RUN(every_entry_once_and_in_order_when_pushed_in_batches))
