/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Byte pair encoding of one piece: a doubly linked list of symbols and a heap of possible merges, ordered by
 * rank and then by position. An entry goes stale when one of its symbols was merged meanwhile; it is then
 * skipped when popped (the pair now there makes another token), as the reference implementation does. O(n log
 * n). Source: Sennrich et al. 2016; the order of merges of the `tokenizers` library.
 */
#include "io/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

static struct ft_merge *find_merge(const struct ft_bpe *bpe, uint64_t pair)
{
    uint64_t h = pair * 0x9e3779b97f4a7c15u;
    uint32_t at = (uint32_t)((h ^ h >> 29) >> 20) & (bpe->merge_slots - 1);
    while (bpe->merges[at].pair != pair && bpe->merges[at].pair != UINT64_MAX)
        at = (at + 1) & (bpe->merge_slots - 1);
    return &bpe->merges[at];
}

int ft_bpe_init(struct ft_bpe *bpe, const struct ft_vocabulary *vocabulary, size_t merge_count,
                struct ft_error *err)
{
    memset(bpe, 0, sizeof *bpe);
    bpe->unk_id = FT_NONE;
    if (merge_count > 4 * (size_t)FT_TOKENIZER_VOCAB_MAX)
        return ft_error_set(err, FT_LIMIT, "the model has %zu merges; at most %u can be read", merge_count,
                            4 * FT_TOKENIZER_VOCAB_MAX);
    bpe->merge_slots = 16;
    while (bpe->merge_slots < 2 * merge_count)
        bpe->merge_slots *= 2;
    bpe->merges = malloc(bpe->merge_slots * sizeof *bpe->merges);
    if (!bpe->merges)
        return ft_error_set(err, FT_MEMORY, "no memory for %zu merges", merge_count);
    memset(bpe->merges, 0xff, bpe->merge_slots * sizeof *bpe->merges);
    for (uint32_t byte = 0; byte < 256; byte++) {
        char raw = (char)byte;
        uint32_t id = ft_vocabulary_find_raw(vocabulary, &raw, 1, false);
        bpe->byte_ids[byte] = id != FT_NONE && vocabulary->token_flags[id] & FT_TOKEN_MODEL ? id : FT_NONE;
    }
    return FT_OK;
}

void ft_bpe_fini(struct ft_bpe *bpe)
{
    free(bpe->merges);
    memset(bpe, 0, sizeof *bpe);
}

void ft_bpe_add_merge(struct ft_bpe *bpe, uint32_t left, uint32_t right, uint32_t rank, uint32_t id)
{
    uint64_t pair = (uint64_t)left << 32 | right;
    *find_merge(bpe, pair) = (struct ft_merge){.pair = pair, .rank = rank, .id = id};
}

void ft_bpe_scratch_fini(struct ft_bpe_scratch *scratch)
{
    free(scratch->symbol_id);
    free(scratch->symbol_previous);
    free(scratch->symbol_next);
    free(scratch->heap_key);
    free(scratch->heap_id);
    memset(scratch, 0, sizeof *scratch);
}

static int reserve_symbols(struct ft_bpe_scratch *s, size_t count, struct ft_error *err)
{
    if (count <= s->symbol_capacity)
        return FT_OK;
    size_t want = count < 128 ? 128 : count + count / 2;
    ft_bpe_scratch_fini(s);
    s->symbol_id = malloc(want * sizeof *s->symbol_id);
    s->symbol_previous = malloc(want * sizeof *s->symbol_previous);
    s->symbol_next = malloc(want * sizeof *s->symbol_next);
    s->heap_key = malloc(2 * want * sizeof *s->heap_key);
    s->heap_id = malloc(2 * want * sizeof *s->heap_id);
    if (!s->symbol_id || !s->symbol_previous || !s->symbol_next || !s->heap_key || !s->heap_id) {
        ft_bpe_scratch_fini(s);
        return ft_error_set(err, FT_MEMORY, "no memory to merge a piece of %zu bytes", count);
    }
    s->symbol_capacity = want;
    return FT_OK;
}

/* The heap never outgrows 2 * symbols: it starts with one entry per neighbouring pair, and each of the fewer
 * than `symbols` merges takes one entry and puts at most two. */
static void heap_push(struct ft_bpe_scratch *s, size_t *heap_count, uint64_t key, uint32_t id)
{
    size_t at = (*heap_count)++;
    while (at > 0 && s->heap_key[(at - 1) / 2] > key) {
        s->heap_key[at] = s->heap_key[(at - 1) / 2];
        s->heap_id[at] = s->heap_id[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    s->heap_key[at] = key;
    s->heap_id[at] = id;
}

static void heap_pop(struct ft_bpe_scratch *s, size_t *heap_count)
{
    size_t count = --*heap_count, at = 0;
    uint64_t key = s->heap_key[count];
    uint32_t id = s->heap_id[count];
    for (size_t child = 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && s->heap_key[child + 1] < s->heap_key[child])
            child++;
        if (s->heap_key[child] >= key)
            break;
        s->heap_key[at] = s->heap_key[child];
        s->heap_id[at] = s->heap_id[child];
        at = child;
    }
    s->heap_key[at] = key;
    s->heap_id[at] = id;
}

static void push_pair(const struct ft_bpe *bpe, struct ft_bpe_scratch *s, size_t *heap_count, uint32_t left,
                      uint32_t right)
{
    const struct ft_merge *merge = find_merge(bpe, (uint64_t)s->symbol_id[left] << 32 | s->symbol_id[right]);
    if (merge->pair != UINT64_MAX)
        heap_push(s, heap_count, (uint64_t)merge->rank << 32 | left, merge->id);
}

static void merge_symbols(const struct ft_bpe *bpe, struct ft_bpe_scratch *s, uint32_t symbol_count)
{
    size_t heap_count = 0;
    for (uint32_t i = 0; i + 1 < symbol_count; i++)
        push_pair(bpe, s, &heap_count, i, i + 1);
    while (heap_count > 0) {
        uint32_t left = (uint32_t)s->heap_key[0], id = s->heap_id[0];
        heap_pop(s, &heap_count);
        uint32_t right = s->symbol_next[left];
        if (s->symbol_id[left] == FT_NONE || right == FT_NONE)
            continue;
        const struct ft_merge *merge =
            find_merge(bpe, (uint64_t)s->symbol_id[left] << 32 | s->symbol_id[right]);
        if (merge->pair == UINT64_MAX || merge->id != id)
            continue; /* stale */
        uint32_t after = s->symbol_next[right], before = s->symbol_previous[left];
        s->symbol_id[left] = id;
        s->symbol_id[right] = FT_NONE; /* gone: entries that start here are stale */
        s->symbol_next[left] = after;
        if (after != FT_NONE) {
            s->symbol_previous[after] = left;
            push_pair(bpe, s, &heap_count, left, after);
        }
        if (before != FT_NONE)
            push_pair(bpe, s, &heap_count, before, left);
    }
}

/* One symbol per byte; a byte without a token is unk_token, and with fuse_unk a run of them is one. */
static int make_symbols(struct ft_encoder *encoder, const char *piece, size_t bytes, uint32_t *symbol_count)
{
    const struct ft_bpe *bpe = &encoder->tokenizer->bpe;
    struct ft_bpe_scratch *s = &encoder->bpe;
    uint32_t count = 0;
    bool after_unk = false;
    for (size_t i = 0; i < bytes; i++) {
        uint32_t id = bpe->byte_ids[(uint8_t)piece[i]];
        bool unk = id == FT_NONE;
        if (unk && bpe->unk_id == FT_NONE)
            return ft_error_set(
                encoder->err, FT_FORMAT,
                "byte 0x%02x of the text has no token in the vocabulary, and the model names no "
                "unk_token; remove it from the text or complete tokenizer.json",
                (uint8_t)piece[i]);
        if (!unk || !after_unk || !bpe->fuse_unk) {
            s->symbol_id[count] = unk ? bpe->unk_id : id;
            s->symbol_previous[count] = count ? count - 1 : FT_NONE;
            s->symbol_next[count] = count + 1;
            count++;
        }
        after_unk = unk;
    }
    s->symbol_next[count - 1] = FT_NONE;
    *symbol_count = count;
    return FT_OK;
}

int ft_bpe_encode_piece(struct ft_encoder *encoder, const char *piece, size_t bytes)
{
    const struct ft_tokenizer *tokenizer = encoder->tokenizer;
    struct ft_bpe_scratch *s = &encoder->bpe;
    uint32_t symbol_count = 0;
    if (bytes == 0)
        return FT_OK;
    if (tokenizer->bpe.ignore_merges) {
        uint32_t id = ft_vocabulary_find_raw(&tokenizer->vocabulary, piece, bytes, false);
        if (id != FT_NONE && tokenizer->vocabulary.token_flags[id] & FT_TOKEN_MODEL)
            return ft_encoder_push(encoder, id);
    }
    if (reserve_symbols(s, bytes, encoder->err) != FT_OK ||
        make_symbols(encoder, piece, bytes, &symbol_count) != FT_OK)
        return encoder->err->code;
    merge_symbols(&tokenizer->bpe, s, symbol_count);
    for (uint32_t at = 0; at != FT_NONE; at = s->symbol_next[at])
        if (ft_encoder_push(encoder, s->symbol_id[at]) != FT_OK)
            return encoder->err->code;
    return FT_OK;
}
