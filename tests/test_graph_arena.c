/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/arena.h"
#include "tests/test.h"

TEST(counting_gives_the_size_that_filling_needs)
{
    struct ft_error err;
    struct ft_arena arena;
    uint32_t *a;
    double *b;
    uint64_t counted = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 0)
            ft_arena_count(&arena, "test");
        else
            CHECK_OK(ft_arena_init(&arena, "test", counted, &err), &err);
        CHECK_OK(FT_ARENA_PUSH(&arena, 7, &a, &err), &err);
        CHECK_OK(FT_ARENA_PUSH(&arena, 3, &b, &err), &err);
        counted = arena.used;
        CHECK_EQ(a == NULL, pass == 0);
    }
    CHECK_EQ((uintptr_t)b % FT_ARENA_ALIGN, 0);
    CHECK_EQ(a[6], 0);
    ft_arena_fini(&arena);
}

TEST(arena_refuses_more_than_it_has)
{
    struct ft_error err;
    struct ft_arena arena;
    char *p;
    CHECK_OK(ft_arena_init(&arena, "small", 4096, &err), &err);
    CHECK_FAILS(FT_ARENA_PUSH(&arena, 4097, &p, &err), FT_MEMORY, "small arena", &err);
    CHECK(p == NULL);
    CHECK_OK(FT_ARENA_PUSH(&arena, 4096, &p, &err), &err);
    CHECK_FAILS(FT_ARENA_PUSH(&arena, 1, &p, &err), FT_MEMORY, "0 of 4096 left", &err);
    CHECK_FAILS(ft_arena_push(&arena, UINT64_MAX / 2, 16, (void **)&p, &err), FT_MEMORY, "overflows", &err);
    ft_arena_reset(&arena);
    CHECK_OK(FT_ARENA_PUSH(&arena, 4096, &p, &err), &err);
    ft_arena_fini(&arena);
    CHECK_FAILS(ft_arena_init(&arena, "huge", UINT64_MAX, &err), FT_MEMORY, "not a possible size", &err);
}

TEST(error_text_is_cut_and_prepended)
{
    struct ft_error err;
    char text[2000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    CHECK_EQ(ft_error_set(&err, FT_IO, "%s", text), FT_IO);
    CHECK_EQ(strlen(err.message), sizeof err.message - 1);
    CHECK(strcmp(err.message + sizeof err.message - 4, "...") == 0);
    ft_error_set(&err, FT_FORMAT, "inner");
    CHECK_EQ(ft_error_prepend(&err, "outer %d", 7), FT_FORMAT);
    CHECK(strcmp(err.message, "outer 7: inner") == 0);
    CHECK(strcmp(ft_status_name(FT_FORMAT), "FORMAT") == 0);
}

TEST_MAIN(RUN(counting_gives_the_size_that_filling_needs) RUN(arena_refuses_more_than_it_has)
              RUN(error_text_is_cut_and_prepended))
