/* SPDX-License-Identifier: Apache-2.0 */
/* Slots, KV pages and snapshots. */
#include "jobs/slots.h"
#include "jobs/snapshots.h"
#include "tests/test.h"

static void make_slots(struct ft_slots *slots, struct ft_arena *arena, uint32_t count)
{
    struct ft_error err;
    ft_arena_count(arena, "slots");
    CHECK_OK(ft_slots_init(slots, arena, arena, count, 100, 2, 4, &err), &err);
    uint64_t bytes = arena->used;
    CHECK_OK(ft_arena_init(arena, "slots", bytes, &err), &err);
    CHECK_OK(ft_slots_init(slots, arena, arena, count, 100, 2, 4, &err), &err);
}

TEST(a_taken_slot_holds_the_new_expert_and_forgets_the_old)
{
    struct ft_slots slots;
    struct ft_arena arena;
    make_slots(&slots, &arena, 2);
    CHECK_EQ(ft_slots_find(&slots, 1, 3), FT_NONE);
    ft_slots_take(&slots, 0, 1, 3, 7, true);
    CHECK_EQ(ft_slots_find(&slots, 1, 3), 0);
    CHECK_EQ(slots.busy[0], 1);
    uint32_t generation = slots.generation[0];
    uint32_t list[2] = {0, FT_NONE};
    ft_slots_release(&slots, list, 2);
    CHECK_EQ(slots.busy[0], 0);
    ft_slots_take(&slots, 0, 0, 2, 8, true);
    CHECK_EQ(ft_slots_find(&slots, 1, 3), FT_NONE);
    CHECK_EQ(ft_slots_find(&slots, 0, 2), 0);
    CHECK_EQ(slots.generation[0], generation + 1);
    CHECK_EQ((uintptr_t)ft_slots_memory(&slots, 1) % 64, 0);
    ft_arena_fini(&arena);
}

TEST(a_failed_step_loses_what_it_fetched_and_nothing_else)
{
    struct ft_slots slots;
    struct ft_arena arena;
    make_slots(&slots, &arena, 2);
    ft_slots_take(&slots, 0, 0, 1, 5, true);
    ft_slots_take(&slots, 1, 0, 2, 6, true);
    ft_slots_forget_step(&slots, 6);
    CHECK_EQ(ft_slots_find(&slots, 0, 1), 0);
    CHECK_EQ(ft_slots_find(&slots, 0, 2), FT_NONE);
    CHECK_EQ(slots.busy[0] + slots.busy[1], 0);
    ft_arena_fini(&arena);
}

TEST(last_use_is_remembered_per_expert)
{
    struct ft_slots slots;
    struct ft_arena arena;
    make_slots(&slots, &arena, 1);
    CHECK_EQ(ft_slots_touch(&slots, 1, 2, 9), 0);
    CHECK_EQ(ft_slots_touch(&slots, 1, 2, 12), 9);
    CHECK_EQ(ft_slots_touch(&slots, 0, 2, 12), 0);
    CHECK_EQ(ft_slots_last_use(&slots, 1, 2), 12);
    CHECK_EQ(ft_slots_last_use(&slots, 1, 2), 12);
    CHECK_EQ(ft_slots_last_use(&slots, 1, 1), 0);
    ft_arena_fini(&arena);
}

TEST(a_borrowed_slot_is_busy_and_no_younger)
{
    struct ft_slots slots;
    struct ft_arena arena;
    uint32_t slot = 1;
    make_slots(&slots, &arena, 2);
    ft_slots_take(&slots, slot, 0, 2, 5, false);
    ft_slots_release(&slots, &slot, 1);
    ft_slots_borrow(&slots, slot);
    CHECK_EQ(slots.busy[slot], 1);
    CHECK_EQ(slots.last_used[slot], 5);
    ft_slots_release(&slots, &slot, 1);
    CHECK_EQ(slots.busy[slot], 0);
    CHECK_EQ(ft_slots_find(&slots, 0, 2), slot);
    ft_arena_fini(&arena);
}

struct pools {
    struct ft_arena arena;
    struct ft_kv kv;
    struct ft_snapshots snapshots;
};

static void make_pools(struct pools *p, uint32_t pages, uint64_t snapshot_bytes, uint64_t state)
{
    struct ft_error err;
    struct ft_model model = {.hidden = 32,
                             .layer_count = 1,
                             .head_count = 1,
                             .kv_head_count = 1,
                             .head_dim = 8,
                             .hc_count = 1,
                             .layers = {{.attention = FT_ATTENTION_FULL, .ple = FT_PLE_NONE}}};
    for (int pass = 0; pass < 2; pass++) {
        uint64_t bytes = p->arena.used;
        if (pass == 0)
            ft_arena_count(&p->arena, "pools");
        else
            CHECK_OK(ft_arena_init(&p->arena, "pools", bytes, &err), &err);
        CHECK_OK(ft_kv_init(&p->kv, &p->arena, &p->arena, &ft_memory_host, &model, pages, &err), &err);
        CHECK_OK(ft_snapshots_init(&p->snapshots, &p->arena, snapshot_bytes, state,
                                   pages * p->kv.layout.page_tokens, p->kv.layout.page_tokens, &err),
                 &err);
    }
}

TEST(pages_are_shared_by_reference_and_zeroed_before_they_are_used_again)
{
    struct pools p;
    make_pools(&p, 3, 0, 0);
    uint32_t a = ft_kv_try_alloc(&p.kv), b = ft_kv_try_alloc(&p.kv), c = ft_kv_try_alloc(&p.kv);
    CHECK(a != b && b != c && a != c);
    CHECK_EQ(ft_kv_try_alloc(&p.kv), FT_NONE);
    ft_kv_page(&p.kv, b)[5] = NAN;
    ft_kv_reference(&p.kv, b);
    ft_kv_release(&p.kv, b);
    CHECK_EQ(ft_kv_try_alloc(&p.kv), FT_NONE);
    ft_kv_release(&p.kv, b);
    CHECK_EQ(ft_kv_try_alloc(&p.kv), b);
    CHECK(isnan(ft_kv_page(&p.kv, b)[5])); /* handing out touches nothing */
    ft_kv_clear_stale(&p.kv, b);
    CHECK(ft_kv_page(&p.kv, b)[5] == 0);
    ft_kv_page(&p.kv, b)[5] = 3;
    ft_kv_clear_stale(&p.kv, b); /* in use: what its owner wrote stays */
    CHECK(ft_kv_page(&p.kv, b)[5] == 3);
    ft_arena_fini(&p.arena);
}

TEST(the_longest_prefix_snapshot_is_found_and_holds_its_pages)
{
    struct pools p;
    make_pools(&p, 8, 1 << 16, 4);
    uint32_t page = p.kv.layout.page_tokens, tokens[4096], pages[3];
    float state[4] = {1, 2, 3, 4};
    REQUIRE(3 * page <= 4096 && p.snapshots.count >= 2);
    for (uint32_t i = 0; i < 3 * page; i++)
        tokens[i] = i * 7 % 50;
    for (uint32_t i = 0; i < 3; i++)
        pages[i] = ft_kv_try_alloc(&p.kv);
    ft_snapshots_take(&p.snapshots, &p.kv, tokens, page, state, pages);
    state[0] = 10;
    ft_snapshots_take(&p.snapshots, &p.kv, tokens, 2 * page, state, pages);
    CHECK_EQ(p.kv.references[pages[0]], 3);
    CHECK_EQ(p.kv.references[pages[1]], 2);
    struct ft_snapshot *found = ft_snapshots_find(&p.snapshots, tokens, 3 * page);
    REQUIRE(found != NULL);
    CHECK_EQ(found->token_count, 2 * page);
    CHECK(found->state[0] == 10);
    found = ft_snapshots_find(&p.snapshots, tokens, 2 * page - 1);
    REQUIRE(found != NULL);
    CHECK_EQ(found->token_count, page);
    tokens[0]++;
    CHECK(ft_snapshots_find(&p.snapshots, tokens, 3 * page) == NULL);
    for (uint32_t i = 0; i < 3; i++)
        ft_kv_release(&p.kv, pages[i]);
    CHECK_EQ(p.kv.free_count, 6);
    CHECK(ft_snapshots_drop_one(&p.snapshots, &p.kv, NULL));
    CHECK(ft_snapshots_drop_one(&p.snapshots, &p.kv, NULL));
    CHECK(!ft_snapshots_drop_one(&p.snapshots, &p.kv, NULL));
    CHECK_EQ(p.kv.free_count, 8);
    ft_arena_fini(&p.arena);
}

TEST(the_least_recently_used_snapshot_makes_room)
{
    struct pools p;
    make_pools(&p, 8, 0, 0);
    ft_arena_fini(&p.arena);
    make_pools(&p, 8, 2 * (sizeof(struct ft_snapshot) + 8 * p.kv.layout.page_tokens * 4 + 64 + 64), 4);
    REQUIRE(p.snapshots.count == 2);
    uint32_t page = p.kv.layout.page_tokens, tokens[3][512], pages[1];
    float state[4] = {0};
    REQUIRE(page <= 512);
    pages[0] = ft_kv_try_alloc(&p.kv);
    for (uint32_t k = 0; k < 3; k++) {
        for (uint32_t i = 0; i < page; i++)
            tokens[k][i] = k;
        if (k == 2)
            CHECK(ft_snapshots_find(&p.snapshots, tokens[0], page) != NULL); /* touch the first */
        ft_snapshots_take(&p.snapshots, &p.kv, tokens[k], page, state, pages);
    }
    CHECK(ft_snapshots_find(&p.snapshots, tokens[0], page) != NULL);
    CHECK(ft_snapshots_find(&p.snapshots, tokens[1], page) == NULL);
    CHECK(ft_snapshots_find(&p.snapshots, tokens[2], page) != NULL);
    CHECK_EQ(p.kv.references[pages[0]], 3);
    ft_arena_fini(&p.arena);
}

TEST_MAIN(RUN(a_taken_slot_holds_the_new_expert_and_forgets_the_old)
              RUN(a_failed_step_loses_what_it_fetched_and_nothing_else) RUN(last_use_is_remembered_per_expert)
                  RUN(a_borrowed_slot_is_busy_and_no_younger)
                      RUN(pages_are_shared_by_reference_and_zeroed_before_they_are_used_again)
                          RUN(the_longest_prefix_snapshot_is_found_and_holds_its_pages)
                              RUN(the_least_recently_used_snapshot_makes_room))
