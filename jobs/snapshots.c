/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/snapshots.h"

#include <string.h>

#define ENTRIES_MAX 256u

int ft_snapshots_init(struct ft_snapshots *snapshots, struct ft_arena *arena, uint64_t bytes,
                      uint64_t state_count, uint32_t tokens_max, uint32_t page_tokens, struct ft_error *err)
{
    uint32_t pages_max = tokens_max / page_tokens;
    uint64_t entry_bytes = ft_round_up(state_count * sizeof(float), FT_ARENA_ALIGN) +
                           ft_round_up(tokens_max * sizeof(uint32_t), FT_ARENA_ALIGN) +
                           ft_round_up(pages_max * sizeof(uint32_t), FT_ARENA_ALIGN) +
                           sizeof(struct ft_snapshot);
    *snapshots = (struct ft_snapshots){.state_count = state_count, .tokens_max = tokens_max};
    snapshots->count = pages_max ? (uint32_t)FT_MIN(bytes / entry_bytes, ENTRIES_MAX) : 0;
    int status = FT_ARENA_PUSH(arena, snapshots->count, &snapshots->entries, err);
    for (uint32_t i = 0; status == FT_OK && i < snapshots->count; i++) {
        struct ft_snapshot entry = {0};
        status = FT_ARENA_PUSH(arena, state_count, &entry.state, err);
        if (status == FT_OK)
            status = FT_ARENA_PUSH(arena, tokens_max, &entry.tokens, err);
        if (status == FT_OK)
            status = FT_ARENA_PUSH(arena, pages_max, &entry.pages, err);
        if (status == FT_OK && !ft_arena_is_counting(arena))
            snapshots->entries[i] = entry;
    }
    return status;
}

static void drop(struct ft_snapshot *entry, struct ft_kv *kv)
{
    uint32_t pages = entry->token_count / kv->layout.page_tokens;
    for (uint32_t i = 0; i < pages; i++)
        ft_kv_release(kv, entry->pages[i]);
    entry->token_count = 0;
}

static bool is_prefix(const struct ft_snapshot *entry, const uint32_t *tokens, uint32_t token_count)
{
    return entry->token_count && entry->token_count <= token_count &&
           memcmp(entry->tokens, tokens, entry->token_count * sizeof *tokens) == 0;
}

void ft_snapshots_take(struct ft_snapshots *snapshots, struct ft_kv *kv, const uint32_t *tokens,
                       uint32_t token_count, const float *state, const uint32_t *pages)
{
    struct ft_snapshot *into = NULL;
    if (!token_count || token_count > snapshots->tokens_max)
        return;
    for (uint32_t i = 0; i < snapshots->count; i++) {
        struct ft_snapshot *entry = &snapshots->entries[i];
        if (entry->token_count == token_count && is_prefix(entry, tokens, token_count)) {
            entry->last_used = ++snapshots->clock;
            return; /* the same tokens have the same state */
        }
        if (!into || (into->token_count && (!entry->token_count || entry->last_used < into->last_used)))
            into = entry;
    }
    if (!into)
        return;
    if (into->token_count)
        drop(into, kv);
    into->token_count = token_count;
    into->last_used = ++snapshots->clock;
    memcpy(into->tokens, tokens, token_count * sizeof *tokens);
    if (snapshots->state_count)
        kv->place->copy(kv->place->context, into->state, state, snapshots->state_count * sizeof *state);
    for (uint32_t i = 0; i < token_count / kv->layout.page_tokens; i++) {
        into->pages[i] = pages[i];
        ft_kv_reference(kv, pages[i]);
    }
    snapshots->taken++;
}

struct ft_snapshot *ft_snapshots_find(struct ft_snapshots *snapshots, const uint32_t *tokens,
                                      uint32_t token_count)
{
    struct ft_snapshot *best = NULL;
    for (uint32_t i = 0; i < snapshots->count; i++) {
        struct ft_snapshot *entry = &snapshots->entries[i];
        if (is_prefix(entry, tokens, token_count) && (!best || entry->token_count > best->token_count))
            best = entry;
    }
    if (best)
        best->last_used = ++snapshots->clock;
    return best;
}

bool ft_snapshots_drop_one(struct ft_snapshots *snapshots, struct ft_kv *kv, const struct ft_snapshot *keep)
{
    struct ft_snapshot *oldest = NULL;
    for (uint32_t i = 0; i < snapshots->count; i++) {
        struct ft_snapshot *entry = &snapshots->entries[i];
        if (entry != keep && entry->token_count && (!oldest || entry->last_used < oldest->last_used))
            oldest = entry;
    }
    if (!oldest)
        return false;
    drop(oldest, kv);
    return true;
}
