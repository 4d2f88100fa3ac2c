/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/ring.h"
#include "tests/test.h"

static struct ft_ring *make_ring(uint32_t entries, uint32_t *size)
{
    *size = ft_ring_entries(entries);
    uint64_t bytes = (ft_ring_bytes(*size) + 63) / 64 * 64;
    void *memory = aligned_alloc(64, bytes);
    if (!memory)
        abort();
    memset(memory, 0xa5, bytes); /* init must not rely on zeroes */
    return ft_ring_init(memory, *size);
}

TEST(sizes_are_powers_of_two_that_hold_the_request)
{
    for (uint32_t entries = 0; entries < 3000; entries = entries * 2 + 1) {
        uint32_t size = ft_ring_entries(entries);
        CHECK(size >= 2 && (size & (size - 1)) == 0 && size <= FT_RING_ENTRIES_MAX);
        CHECK(size == FT_RING_ENTRIES_MAX || size - 1 >= entries);
    }
    CHECK_EQ(ft_ring_entries(UINT32_MAX), FT_RING_ENTRIES_MAX);
}

TEST(entries_come_out_in_order_with_their_epoch)
{
    uint32_t size, next = 0, out = 0;
    struct ft_ring *ring = make_ring(7, &size);
    struct ft_job_ref ref;
    CHECK(!ft_ring_try_pop_spmc(ring, &ref));
    for (int round = 0; round < 1000; round++) {
        uint32_t pushed = 0;
        while (ft_ring_try_push_spmc(ring, (struct ft_job_ref){next, next ^ 0x5555u})) {
            next++;
            pushed++;
        }
        CHECK_EQ(ft_ring_count(ring), size - 1); /* full */
        for (uint32_t i = 0; i < pushed && i < 1 + (uint32_t)round % size; i++) {
            REQUIRE(ft_ring_try_pop_spmc(ring, &ref));
            CHECK_EQ(ref.job, out);
            CHECK_EQ(ref.epoch, out ^ 0x5555u);
            out++;
        }
    }
    free(ring);
}

TEST(a_batch_is_cut_where_the_ring_is_full)
{
    uint32_t size, jobs[20];
    struct ft_ring *ring = make_ring(7, &size);
    struct ft_job_ref ref;
    for (uint32_t i = 0; i < 20; i++)
        jobs[i] = 100 + i;
    CHECK_EQ(ft_ring_push_many_spmc(ring, jobs, 0, 1), 0);
    CHECK_EQ(ft_ring_push_many_spmc(ring, jobs, 20, 1), size - 1);
    CHECK_EQ(ft_ring_push_many_spmc(ring, jobs, 20, 1), 0);
    CHECK(!ft_ring_try_push_spmc(ring, (struct ft_job_ref){1, 1}));
    CHECK(ft_ring_try_pop_spmc(ring, &ref) && ref.job == 100 && ref.epoch == 1);
    CHECK_EQ(ft_ring_push_many_spmc(ring, jobs + 19, 1, 2), 1); /* wraps around */
    for (uint32_t i = 1; i < size - 1; i++)
        CHECK(ft_ring_try_pop_spmc(ring, &ref) && ref.job == 100 + i);
    CHECK(ft_ring_try_pop_spmc(ring, &ref) && ref.job == 119 && ref.epoch == 2);
    CHECK(!ft_ring_try_pop_spmc(ring, &ref));
    CHECK_EQ(ft_ring_count(ring), 0);
    free(ring);
}

TEST_MAIN(RUN(sizes_are_powers_of_two_that_hold_the_request) RUN(entries_come_out_in_order_with_their_epoch)
              RUN(a_batch_is_cut_where_the_ring_is_full))
