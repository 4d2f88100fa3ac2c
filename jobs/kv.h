/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Paged KV cache: a pool of pages with reference counts, so that sequences and snapshots share full pages.
 * A page that is not full belongs to one sequence. Threads: one at a time, between steps. Nothing allocates
 * after init.
 */
#ifndef FT_JOBS_KV_H
#define FT_JOBS_KV_H

#include "graph/arena.h"
#include "graph/model.h"
#include "jobs/memory.h"

struct ft_kv {
    struct ft_kv_layout layout;
    uint32_t page_count, free_count;
    float *memory; /* [page_count, layout.count], in `place` */
    const struct ft_memory *place;
    uint32_t *references; /* [page_count] */
    uint8_t *stale;       /* [page_count]; 1: still holds what an earlier owner left */
    uint32_t *free_list;  /* [free_count] */
};

/* Pages come from `pages` (the same arena as `arena`, or a device's). */
int ft_kv_init(struct ft_kv *kv, struct ft_arena *arena, struct ft_arena *pages,
               const struct ft_memory *place, const struct ft_model *model, uint32_t page_count,
               struct ft_error *err);
/* A page with one reference; FT_NONE when the pool is empty. A request takes all its pages at once and may
 * never reach most of them, so they are not zeroed here. */
uint32_t ft_kv_try_alloc(struct ft_kv *kv);
/* Before a step writes into a page: zeroes it if nobody did since it was handed out. A kernel that looks past
 * the last token of a page meets zeros, not the NaN of an earlier owner. */
void ft_kv_clear_stale(struct ft_kv *kv, uint32_t page);
void ft_kv_reference(struct ft_kv *kv, uint32_t page);
void ft_kv_release(struct ft_kv *kv, uint32_t page);
static inline float *ft_kv_page(const struct ft_kv *kv, uint32_t page)
{
    return kv->memory + kv->layout.count * page;
}
static inline uint32_t ft_kv_pages_for(const struct ft_kv *kv, uint32_t tokens)
{
    return (uint32_t)ft_div_up(tokens, kv->layout.page_tokens);
}

#endif
