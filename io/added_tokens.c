/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding added tokens in text: leftmost start, then the longest, never overlapping, as the reference does. A
 * match that its conditions reject (a special token when these are plain text, single_word inside a word) is
 * skipped as a whole: no other token is looked for inside of it. That too is the reference's behaviour.
 */
#include "io/tokenizer_internal.h"
#include "io/utf8.h"

#include <utf8proc.h>

#include <stdlib.h>
#include <string.h>

int ft_token_trie_init(struct ft_token_trie *trie, size_t total_bytes, struct ft_error *err)
{
    memset(trie, 0, sizeof *trie);
    if (total_bytes > (size_t)64 << 20)
        return ft_error_set(err, FT_LIMIT, "added tokens have %zu bytes of text; 64 MiB can be read",
                            total_bytes);
    trie->edge_slots = 16;
    while (trie->edge_slots < 2 * total_bytes)
        trie->edge_slots *= 2;
    trie->node_capacity = (uint32_t)total_bytes + 1;
    trie->node_token = malloc(trie->node_capacity * sizeof *trie->node_token);
    trie->edge_keys = malloc(trie->edge_slots * sizeof *trie->edge_keys);
    trie->edge_nodes = malloc(trie->edge_slots * sizeof *trie->edge_nodes);
    if (!trie->node_token || !trie->edge_keys || !trie->edge_nodes) {
        ft_token_trie_fini(trie);
        return ft_error_set(err, FT_MEMORY, "no memory for %zu bytes of added tokens", total_bytes);
    }
    memset(trie->edge_keys, 0xff, trie->edge_slots * sizeof *trie->edge_keys);
    trie->node_token[0] = FT_NONE;
    trie->node_count = 1;
    return FT_OK;
}

void ft_token_trie_fini(struct ft_token_trie *trie)
{
    free(trie->node_token);
    free(trie->edge_keys);
    free(trie->edge_nodes);
    memset(trie, 0, sizeof *trie);
}

/* The edge slot of a key, or the empty one where it belongs. */
static uint32_t find_edge(const struct ft_token_trie *trie, uint32_t node, char byte)
{
    uint64_t key = (uint64_t)node << 8 | (uint8_t)byte;
    uint32_t at = (uint32_t)(key * 0x9e3779b97f4a7c15u >> 32) & (trie->edge_slots - 1);
    while (trie->edge_keys[at] != key && trie->edge_keys[at] != UINT64_MAX)
        at = (at + 1) & (trie->edge_slots - 1);
    return at;
}

void ft_token_trie_add(struct ft_token_trie *trie, const char *text, size_t bytes, uint32_t id)
{
    uint32_t node = 0;
    if (bytes == 0)
        return;
    trie->starts[(uint8_t)text[0]] = true;
    for (size_t i = 0; i < bytes; i++) {
        uint32_t edge = find_edge(trie, node, text[i]);
        if (trie->edge_keys[edge] == UINT64_MAX) {
            FT_ASSERT_LT(trie->node_count, trie->node_capacity);
            trie->edge_keys[edge] = (uint64_t)node << 8 | (uint8_t)text[i];
            trie->edge_nodes[edge] = trie->node_count;
            trie->node_token[trie->node_count++] = FT_NONE;
        }
        node = trie->edge_nodes[edge];
    }
    if (trie->node_token[node] == FT_NONE)
        trie->node_token[node] = id;
}

/* The longest token that starts at text[0], or FT_NONE. */
static uint32_t match_longest(const struct ft_token_trie *trie, const char *text, size_t bytes,
                              size_t *match_bytes)
{
    uint32_t node = 0, found = FT_NONE;
    for (size_t i = 0; i < bytes; i++) {
        uint32_t edge = find_edge(trie, node, text[i]);
        if (trie->edge_keys[edge] == UINT64_MAX)
            break;
        node = trie->edge_nodes[edge];
        if (trie->node_token[node] != FT_NONE) {
            found = trie->node_token[node];
            *match_bytes = i + 1;
        }
    }
    return found;
}

/* A word character as \w means it: alphabetic, mark, decimal number, connector punctuation, joiner. */
static bool is_word(uint32_t c)
{
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default: /* joiners, and the circled letters, symbols that are alphabetic */
        return c == 0x200c || c == 0x200d || (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) ||
               (c >= 0x1f150 && c <= 0x1f169) || (c >= 0x1f170 && c <= 0x1f189);
    }
}

static bool stands_alone(const char *text, size_t bytes, size_t start, size_t end)
{
    if (start > 0 && is_word(ft_utf8_codepoint(text + ft_utf8_previous(text, start))))
        return false;
    return end == bytes || !is_word(ft_utf8_codepoint(text + end));
}

static size_t strip_left(const char *text, size_t start, size_t floor)
{
    while (start > floor) {
        size_t previous = ft_utf8_previous(text, start);
        if (!ft_utf8_is_space(ft_utf8_codepoint(text + previous)))
            break;
        start = previous;
    }
    return start;
}

static size_t strip_right(const char *text, size_t bytes, size_t end)
{
    while (end < bytes && ft_utf8_is_space(ft_utf8_codepoint(text + end)))
        end += (size_t)ft_utf8_next(text + end, bytes - end);
    return end;
}

int ft_token_trie_split(struct ft_encoder *encoder, const struct ft_token_trie *trie, const char *text,
                        size_t bytes, ft_gap_fn gap)
{
    const uint8_t *token_flags = encoder->tokenizer->vocabulary.token_flags;
    size_t done = 0, match_bytes = 0;
    for (size_t at = 0; at < bytes;) {
        uint32_t id = trie->starts[(uint8_t)text[at]]
                          ? match_longest(trie, text + at, bytes - at, &match_bytes)
                          : FT_NONE;
        if (id == FT_NONE) {
            at++;
            continue;
        }
        size_t start = at, end = at + match_bytes;
        at = end;
        uint8_t flags = token_flags[id];
        if (flags & FT_TOKEN_SPECIAL && !encoder->special_tokens)
            continue;
        if (flags & FT_TOKEN_SINGLE_WORD && !stands_alone(text, bytes, start, end))
            continue;
        if (flags & FT_TOKEN_LSTRIP)
            start = strip_left(text, start, done);
        if (flags & FT_TOKEN_RSTRIP)
            end = strip_right(text, bytes, end);
        if (done < start && gap(encoder, text + done, start - done) != FT_OK)
            return encoder->err->code;
        if (ft_encoder_push(encoder, id) != FT_OK)
            return encoder->err->code;
        done = end > done ? end : done; /* after rstrip a match may lie in what is stripped already */
    }
    return done < bytes ? gap(encoder, text + done, bytes - done) : FT_OK;
}
