/* SPDX-License-Identifier: Apache-2.0 */
/* What workers warm: every chunk once, the likeliest first, nothing behind a stop; also while lists change under them. */
#include <pthread.h>

#include "graph/types.h"
#include "jobs/warm.h"
#include "tests/test.h"

#define EXPERT_BYTES (5 * FT_WARM_CHUNK - 100)

static char bank[4][EXPERT_BYTES];
static const char *const experts[4] = {bank[0], bank[1], bank[2], bank[3]};

TEST(every_chunk_is_taken_once_until_the_layer_comes)
{
    static struct ft_warm warm;
    CHECK(!ft_warm_run(&warm));
    ft_warm_stop(&warm);
    ft_warm_offer(&warm, experts, 3, EXPERT_BYTES);
    for (uint32_t i = 0; i < 15; i++)
        CHECK(ft_warm_run(&warm));
    CHECK(!ft_warm_run(&warm));
    ft_warm_stop(&warm);
    CHECK_EQ(warm.bytes, 15 * FT_WARM_CHUNK);
    ft_warm_offer(&warm, experts, 4, EXPERT_BYTES);
    CHECK(ft_warm_run(&warm) && ft_warm_run(&warm));
    ft_warm_stop(&warm);
    ft_warm_stop(&warm);
    CHECK(!ft_warm_run(&warm));
    CHECK_EQ(warm.bytes, 17 * FT_WARM_CHUNK);
    ft_warm_offer(&warm, experts, 0, EXPERT_BYTES);
    CHECK(!ft_warm_run(&warm));
}

TEST(what_goes_beyond_the_room_is_left_out)
{
    static struct ft_warm warm;
    const char *many[FT_WARM_MAX + 5];
    uint32_t taken = 0;
    for (uint32_t i = 0; i < FT_WARM_MAX + 5; i++)
        many[i] = bank[0];
    ft_warm_offer(&warm, many, FT_WARM_MAX + 5, FT_WARM_CHUNK);
    while (ft_warm_run(&warm))
        taken++;
    CHECK_EQ(taken, FT_WARM_MAX);
}

static struct ft_warm shared;
static _Atomic bool over;

static void *take_all(void *argument)
{
    uint64_t *taken = argument;
    while (!atomic_load(&over))
        *taken += ft_warm_run(&shared);
    return NULL;
}

TEST(lists_may_change_under_the_workers)
{
    pthread_t threads[3];
    uint64_t taken[3] = {0}, offered = 0;
    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, take_all, &taken[i]), 0);
    for (uint32_t i = 0; i < 20000 || (!shared.bytes && i < 100000000); i++) {
        ft_warm_offer(&shared, experts + i % 3, 1 + i % 2, EXPERT_BYTES);
        offered += 5 * (1 + i % 2);
        if (i % 7 == 0)
            ft_warm_stop(&shared);
    }
    ft_warm_stop(&shared);
    atomic_store(&over, true);
    for (uint32_t i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    CHECK(shared.bytes <= offered * FT_WARM_CHUNK);
    CHECK(shared.bytes <= (taken[0] + taken[1] + taken[2]) * FT_WARM_CHUNK);
    CHECK(shared.bytes > 0);
}

TEST_MAIN(RUN(every_chunk_is_taken_once_until_the_layer_comes) RUN(what_goes_beyond_the_room_is_left_out)
              RUN(lists_may_change_under_the_workers))
