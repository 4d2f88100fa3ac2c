/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/warm.h"

#include "graph/types.h"

#define LINE 64u
#define NO_CHUNK UINT32_MAX

static uint32_t generation_of(uint64_t cursor)
{
    return (uint32_t)(cursor >> 32);
}

static uint32_t all_chunks(const struct ft_warm_list *list)
{
    return atomic_load_explicit(&list->count, memory_order_relaxed) *
           atomic_load_explicit(&list->chunks, memory_order_relaxed);
}

void ft_warm_stop(struct ft_warm *warm)
{
    uint64_t before = atomic_load_explicit(&warm->cursor, memory_order_relaxed);
    if ((uint32_t)before == NO_CHUNK)
        return;
    before = atomic_exchange_explicit(&warm->cursor, before | NO_CHUNK, memory_order_relaxed);
    warm->bytes +=
        (uint64_t)FT_MIN((uint32_t)before, all_chunks(&warm->lists[generation_of(before) % FT_WARM_LISTS])) *
        FT_WARM_CHUNK;
}

void ft_warm_offer(struct ft_warm *warm, const char *const *at, uint32_t count, uint32_t bytes)
{
    ft_warm_stop(warm);
    uint32_t generation = generation_of(atomic_load_explicit(&warm->cursor, memory_order_relaxed)) + 1;
    struct ft_warm_list *list = &warm->lists[generation % FT_WARM_LISTS];
    count = FT_MIN(count, FT_WARM_MAX);
    for (uint32_t i = 0; i < count; i++)
        atomic_store_explicit(&list->at[i], (uintptr_t)at[i], memory_order_relaxed);
    atomic_store_explicit(&list->count, count, memory_order_relaxed);
    atomic_store_explicit(&list->chunks, (uint32_t)ft_div_up(bytes, FT_WARM_CHUNK), memory_order_relaxed);
    /* release: pairs with the acquire in ft_warm_run; the list is written */
    atomic_store_explicit(&warm->cursor, (uint64_t)generation << 32, memory_order_release);
}

bool ft_warm_run(struct ft_warm *warm)
{
    uint64_t cursor = atomic_load_explicit(&warm->cursor, memory_order_acquire);
    const struct ft_warm_list *list = &warm->lists[generation_of(cursor) % FT_WARM_LISTS];
    uint32_t chunk = (uint32_t)cursor, chunks = atomic_load_explicit(&list->chunks, memory_order_relaxed);
    if (chunk == NO_CHUNK || chunk >= all_chunks(list))
        return false;
    if (!atomic_compare_exchange_strong_explicit(&warm->cursor, &cursor, cursor + 1, memory_order_relaxed,
                                                 memory_order_relaxed))
        return true; /* another worker has it: look for the next one */
    uintptr_t at = atomic_load_explicit(&list->at[chunk / chunks % FT_WARM_MAX], memory_order_relaxed) +
                   (uint64_t)(chunk % chunks) * FT_WARM_CHUNK;
    for (uint32_t i = 0; i < FT_WARM_CHUNK; i += LINE)
        __builtin_prefetch((const char *)at + i, 0,
                           1); /* a level that the workers share, where there is one */
    return true;
}
