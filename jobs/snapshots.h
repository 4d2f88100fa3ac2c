/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Snapshots: recurrent state cannot be rolled back, so copies of it are kept at page boundaries.
 *
 * One snapshot = the tokens up to a boundary, a copy of the sequence's state block at that point, and
 * references to the (full, read-only) KV pages before it. A sequence goes back to one after a failed step,
 * and a new sequence whose prompt begins with a snapshot's tokens starts from it. Kept in host RAM under the
 * plan's limit; the least recently used go first.
 *
 * Threads: one at a time, between steps. Sizes fixed at init.
 */
#ifndef FT_JOBS_SNAPSHOTS_H
#define FT_JOBS_SNAPSHOTS_H

#include "graph/arena.h"
#include "jobs/kv.h"

struct ft_snapshot {
    uint32_t token_count; /* a multiple of page_tokens; 0 = free entry */
    uint64_t last_used;
    float *state;     /* [state_count] */
    uint32_t *tokens; /* [token_count] */
    uint32_t *pages;  /* [token_count / page_tokens] */
};

struct ft_snapshots {
    struct ft_snapshot *entries; /* [count] */
    uint32_t count, tokens_max;
    uint64_t state_count, clock, taken, used;
};

/* As many entries as fit into `bytes`. */
int ft_snapshots_init(struct ft_snapshots *snapshots, struct ft_arena *arena, uint64_t bytes,
                      uint64_t state_count, uint32_t tokens_max, uint32_t page_tokens, struct ft_error *err);
/* Copies (state lies where the pages of `kv` lie); replaces an entry with the same tokens, else a free one,
 * else the least recently used. */
void ft_snapshots_take(struct ft_snapshots *snapshots, struct ft_kv *kv, const uint32_t *tokens,
                       uint32_t token_count, const float *state, const uint32_t *pages);
/* The longest entry that is a prefix of tokens[0, token_count), or NULL. */
struct ft_snapshot *ft_snapshots_find(struct ft_snapshots *snapshots, const uint32_t *tokens,
                                      uint32_t token_count);
/* Drops the least recently used entry to free pages, never `keep`; false when there is none. */
bool ft_snapshots_drop_one(struct ft_snapshots *snapshots, struct ft_kv *kv, const struct ft_snapshot *keep);

#endif
