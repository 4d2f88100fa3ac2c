/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/kv.h"

int ft_kv_init(struct ft_kv *kv, struct ft_arena *arena, struct ft_arena *pages,
               const struct ft_memory *place, const struct ft_model *model, uint32_t page_count,
               struct ft_error *err)
{
    *kv = (struct ft_kv){.page_count = page_count, .place = place};
    ft_kv_layout_init(&kv->layout, model);
    uint64_t elements;
    if (!ft_mul_u64(kv->layout.count, page_count, &elements))
        return ft_error_set(err, FT_MEMORY, "KV pool of %u pages overflows: lower --kv-tokens", page_count);
    int status = FT_ARENA_PUSH(pages, elements, &kv->memory, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, page_count, &kv->references, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, page_count, &kv->stale, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, page_count, &kv->free_list, err);
    if (status != FT_OK || ft_arena_is_counting(arena))
        return status;
    /* Low pages first: memory that no sequence ever reaches is never touched. */
    for (uint32_t i = 0; i < page_count; i++)
        kv->free_list[i] = page_count - 1 - i;
    kv->free_count = page_count;
    return FT_OK;
}

uint32_t ft_kv_try_alloc(struct ft_kv *kv)
{
    if (!kv->free_count)
        return FT_NONE;
    uint32_t page = kv->free_list[--kv->free_count];
    kv->references[page] = 1;
    kv->stale[page] = 1;
    return page;
}

void ft_kv_clear_stale(struct ft_kv *kv, uint32_t page)
{
    if (!kv->stale[page])
        return;
    kv->place->zero(kv->place->context, ft_kv_page(kv, page), kv->layout.count * sizeof(float));
    kv->stale[page] = 0;
}

void ft_kv_reference(struct ft_kv *kv, uint32_t page)
{
    kv->references[page]++;
}

void ft_kv_release(struct ft_kv *kv, uint32_t page)
{
    FT_ASSERT_LT(0, kv->references[page]);
    if (--kv->references[page] == 0)
        kv->free_list[kv->free_count++] = page;
}
