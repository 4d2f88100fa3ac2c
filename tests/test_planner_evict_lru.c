/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/evict_lru.h"
#include "tests/test.h"

#define SLOTS 6

static uint32_t layer[SLOTS], expert[SLOTS], used[SLOTS], active[2] = {4, 9}, rows[2] = {1, 1};
static uint32_t in_slot[2], last[2];
static uint8_t busy[SLOTS];
static uint64_t keys[SLOTS];
static struct ft_pick pick = {.keys = keys};

static struct ft_layer_in full_pool(void)
{
    for (uint32_t s = 0; s < SLOTS; s++) {
        layer[s] = 7;
        expert[s] = s;
        used[s] = 10;
        busy[s] = 0;
    }
    in_slot[0] = in_slot[1] = FT_NONE;
    return (struct ft_layer_in){.step = 20,
                                .layer = 3,
                                .active_count = 2,
                                .expert = active,
                                .rows = rows,
                                .slot = in_slot,
                                .last_used = last,
                                .has_device = true,
                                .slots = {SLOTS, layer, expert, used, busy, 0, SLOTS}};
}

TEST(free_slots_first_then_the_oldest_then_the_lower_index)
{
    struct ft_layer_in in = full_pool();
    used[4] = 3;
    layer[5] = expert[5] = FT_NONE;
    used[5] = 99; /* stale in a free slot */
    CHECK_EQ(ft_evict_lru_find(&in, 4, &pick), 4);
    CHECK_EQ(ft_evict_lru_victim(&pick, 0), 5);
    CHECK_EQ(ft_evict_lru_victim(&pick, 1), 4);
    CHECK_EQ(ft_evict_lru_victim(&pick, 2), 0);
    CHECK_EQ(ft_evict_lru_victim(&pick, 3), 1);
}

TEST(busy_slots_and_those_this_layer_reads_are_never_taken)
{
    struct ft_layer_in in = full_pool();
    layer[0] = 3;
    expert[0] = 9; /* active */
    in_slot[1] = 0;
    layer[1] = 3;
    expert[1] = 8; /* same layer, not active */
    used[0] = used[1] = used[2] = 1;
    busy[2] = 1;
    CHECK_EQ(ft_evict_lru_find(&in, SLOTS, &pick), 4);
    CHECK_EQ(ft_evict_lru_victim(&pick, 0), 1);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(ft_evict_lru_victim(&pick, i) != 0 && ft_evict_lru_victim(&pick, i) != 2);
}

TEST(no_slots_no_victims)
{
    struct ft_layer_in in = full_pool();
    memset(busy, 1, sizeof busy);
    CHECK_EQ(ft_evict_lru_find(&in, 3, &pick), 0);
    in.slots.count = in.slots.end = 0;
    CHECK_EQ(ft_evict_lru_find(&in, 3, &pick), 0);
    in = full_pool();
    CHECK_EQ(ft_evict_lru_find(&in, 0, &pick), 0);
}

TEST(step_numbers_at_the_end_of_their_range_do_not_wrap)
{
    struct ft_layer_in in = full_pool();
    used[3] = UINT32_MAX;
    used[0] = 0;
    CHECK_EQ(ft_evict_lru_find(&in, SLOTS, &pick), SLOTS);
    CHECK_EQ(ft_evict_lru_victim(&pick, 0), 0);
    CHECK_EQ(ft_evict_lru_victim(&pick, SLOTS - 1), 3);
}

/* Against sorting everything: random keys, every room. */
TEST(pick_equals_a_full_sort)
{
    uint64_t kept[32], all[32], state = 1;
    for (int round = 0; round < 500; round++) {
        uint32_t count = (uint32_t)(round % 33);
        for (uint32_t room = 0; room <= 32; room += 1 + (uint32_t)round % 5) {
            struct ft_pick heap = {.keys = kept, .room = room};
            for (uint32_t i = 0; i < count; i++) {
                state = state * 6364136223846793005u + 1442695040888963407u;
                uint32_t rank = (uint32_t)(state >> 60);
                all[i] = (uint64_t)rank << 32 | i;
                ft_pick_push(&heap, rank, i);
            }
            for (uint32_t i = 1; i < count; i++) /* insertion sort: the reference */
                for (uint32_t j = i; j && all[j - 1] > all[j]; j--) {
                    uint64_t swap = all[j];
                    all[j] = all[j - 1];
                    all[j - 1] = swap;
                }
            ft_pick_sort(&heap);
            CHECK_EQ(heap.count, room < count ? room : count);
            CHECK(memcmp(kept, all, heap.count * sizeof kept[0]) == 0);
        }
    }
}

/* Blocks are dismissed at once in large pools: against a plain search, one victim at a time. */
TEST(large_pools_give_the_same_victims_as_a_plain_search)
{
    enum { MOST = 300 };
    static uint32_t layers[MOST], experts[MOST], last_used[MOST], chosen[16];
    static uint8_t taken[MOST];
    static uint64_t room[16];
    struct ft_pick picked = {.keys = room};
    uint64_t state = 7;
    for (int round = 0; round < 400; round++) {
        struct ft_layer_in in = full_pool();
        uint32_t count = 250 + (uint32_t)round % 50, wanted = (uint32_t)round % 17, found = 0;
        for (uint32_t s = 0; s < count; s++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            uint32_t draw = (uint32_t)(state >> 33);
            layers[s] = draw % 5;
            experts[s] = draw / 8 % 200 == 0 ? FT_NONE : draw / 16 % 12;
            last_used[s] = draw / 64 % 3 == 0 ? draw / 256 % 8 : UINT32_MAX - draw / 256 % 3;
            taken[s] = draw / 4096 % 4 == 0;
        }
        in.slots = (struct ft_slot_view){count, layers, experts, last_used, taken, 0, count};
        for (; found < wanted; found++) { /* the reference */
            uint64_t best = UINT64_MAX;
            for (uint32_t s = 0; s < count; s++) {
                bool used_now = layers[s] == in.layer && (experts[s] == active[0] || experts[s] == active[1]);
                bool before = false;
                for (uint32_t i = 0; i < found; i++)
                    before = before || chosen[i] == s;
                uint32_t rank = experts[s] == FT_NONE        ? 0
                                : last_used[s] == UINT32_MAX ? UINT32_MAX
                                                             : last_used[s] + 1;
                uint64_t key = (uint64_t)rank << 32 | s;
                if (!taken[s] && !before && (experts[s] == FT_NONE || !used_now) && key < best)
                    best = key;
            }
            if (best == UINT64_MAX)
                break;
            chosen[found] = (uint32_t)best;
        }
        CHECK_EQ(ft_evict_lru_find(&in, wanted, &picked), found);
        for (uint32_t i = 0; i < found; i++)
            CHECK_EQ(ft_evict_lru_victim(&picked, i), chosen[i]);
    }
}

TEST_MAIN(RUN(free_slots_first_then_the_oldest_then_the_lower_index)
              RUN(busy_slots_and_those_this_layer_reads_are_never_taken) RUN(no_slots_no_victims)
                  RUN(step_numbers_at_the_end_of_their_range_do_not_wrap) RUN(pick_equals_a_full_sort)
                      RUN(large_pools_give_the_same_victims_as_a_plain_search))
