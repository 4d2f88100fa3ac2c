/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arena: one block of memory with one stated lifetime (model, plan, graph, step, scratch).
 *
 * Sized by a count pass: run the code that fills the arena once with a counting arena (ft_arena_count), then again
 * with a real one of exactly that size. Counting arenas return NULL; code that fills arrays must therefore compute
 * all sizes before it writes. Every piece is 64-byte aligned and zeroed.
 * Threads: one owner at a time. Errors: FT_MEMORY naming the arena, its size and what was asked.
 */
#ifndef FT_GRAPH_ARENA_H
#define FT_GRAPH_ARENA_H

#include "graph/error.h"
#include "graph/types.h"

struct ft_arena {
    char *base;       /* NULL while counting */
    uint64_t bytes;   /* capacity; UINT64_MAX while counting */
    uint64_t used;    /* what has been given out, alignment included */
    const char *name; /* the lifetime, for messages; static string */
};

#define FT_ARENA_ALIGN 64u

/* A counting arena: hands out NULL and adds up. */
void ft_arena_count(struct ft_arena *arena, const char *name);
/* Maps `bytes` of zeroed pages. Large arenas ask for transparent huge pages. */
int ft_arena_init(struct ft_arena *arena, const char *name, uint64_t bytes, struct ft_error *err);
void ft_arena_fini(struct ft_arena *arena);
/* count * size bytes, zeroed; *out is NULL while counting (and when count is 0). FT_MEMORY when it does not fit. */
int ft_arena_push(struct ft_arena *arena, uint64_t count, uint64_t size, void **out, struct ft_error *err);
/* Forgets everything; memory given out before is invalid (and is zeroed again when pushed). */
void ft_arena_reset(struct ft_arena *arena);
static inline bool ft_arena_is_counting(const struct ft_arena *arena)
{
    return arena->base == NULL;
}

#define FT_ARENA_PUSH(arena, count, pointer, err)                                                                      \
    ft_arena_push((arena), (count), sizeof **(pointer), (void **)(pointer), (err))

#endif
