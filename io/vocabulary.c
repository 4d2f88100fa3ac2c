/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens by id and by text, with the byte-level alphabet undone: "\u0120the" is kept as " the". */
#include "io/tokenizer_internal.h"
#include "io/utf8.h"

#include <stdlib.h>
#include <string.h>

/*
 * GPT-2's alphabet writes each byte as one printable character: printable Latin-1 stands for itself, and the
 * other 68 bytes, in order, are U+0100 onwards. Returns the byte, or -1 for a character outside of the
 * alphabet.
 */
static int byte_of_codepoint(uint32_t c)
{
    if ((c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || (c >= 0xae && c <= 0xff))
        return (int)c;
    if (c < 0x100 || c > 0x143)
        return -1;
    uint32_t n = c - 0x100;
    return n <= 0x20 ? (int)n : n <= 0x42 ? (int)(n - 0x21 + 0x7f) : 0xad;
}

/* Writes the raw bytes of a token to `raw` (at most `bytes`); true when it is literal, that is, taken as written. */
static bool undo_alphabet(const char *text, size_t bytes, char *raw, size_t *raw_bytes)
{
    size_t written = 0;
    for (size_t at = 0; at < bytes;) {
        int n = ft_utf8_next(text + at, bytes - at);
        int byte = n > 0 ? byte_of_codepoint(ft_utf8_codepoint(text + at)) : -1;
        if (byte < 0) {
            memcpy(raw, text, bytes);
            *raw_bytes = bytes;
            return true;
        }
        raw[written++] = (char)byte;
        at += (size_t)n;
    }
    *raw_bytes = written;
    return false;
}

static uint32_t hash_bytes(const char *raw, size_t bytes, bool literal)
{
    uint64_t h = 0xcbf29ce484222325u ^ (literal ? 0x9e37u : 0);
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ (uint8_t)raw[i]) * 0x100000001b3u; /* FNV-1a */
    h ^= h >> 32;
    return (uint32_t)(h * 0x9e3779b97f4a7c15u >> 32);
}

/* The slot that holds the key, or the empty one where it belongs. */
static uint32_t *find_slot(const struct ft_vocabulary *v, const char *raw, size_t bytes, bool literal)
{
    uint32_t at = hash_bytes(raw, bytes, literal) & (v->slot_count - 1);
    for (;; at = (at + 1) & (v->slot_count - 1)) {
        uint32_t id = v->slots[at];
        if (id == FT_NONE ||
            (v->token_bytes[id] == bytes && !!(v->token_flags[id] & FT_TOKEN_LITERAL) == literal &&
             memcmp(v->pool + v->token_offset[id], raw, bytes) == 0))
            return &v->slots[at];
    }
}

int ft_vocabulary_init(struct ft_vocabulary *v, size_t token_count, struct ft_error *err)
{
    memset(v, 0, sizeof *v);
    if (token_count > FT_TOKENIZER_VOCAB_MAX)
        return ft_error_set(err, FT_LIMIT, "the vocabulary has %zu tokens; at most %u can be read",
                            token_count, FT_TOKENIZER_VOCAB_MAX);
    v->slot_count = 16;
    while (v->slot_count <= 2 * token_count)
        v->slot_count *= 2;
    v->slots = malloc(v->slot_count * sizeof *v->slots);
    v->pool = malloc(4096);
    if (!v->slots || !v->pool) {
        ft_vocabulary_fini(v);
        return ft_error_set(err, FT_MEMORY, "no memory for a vocabulary of %zu tokens", token_count);
    }
    v->pool_capacity = 4096;
    memset(v->slots, 0xff, v->slot_count * sizeof *v->slots);
    return FT_OK;
}

void ft_vocabulary_fini(struct ft_vocabulary *v)
{
    free(v->token_offset);
    free(v->token_bytes);
    free(v->token_flags);
    free(v->pool);
    free(v->slots);
    memset(v, 0, sizeof *v);
}

static int reserve_id(struct ft_vocabulary *v, uint32_t id, struct ft_error *err)
{
    if (id < v->id_capacity)
        return FT_OK;
    uint32_t old = v->id_capacity, want = old ? old : 1024;
    while (want <= id)
        want *= 2;
    uint32_t *offset = realloc(v->token_offset, want * sizeof *offset);
    v->token_offset = offset ? offset : v->token_offset;
    uint32_t *bytes = realloc(v->token_bytes, want * sizeof *bytes);
    v->token_bytes = bytes ? bytes : v->token_bytes;
    uint8_t *flags = realloc(v->token_flags, want * sizeof *flags);
    v->token_flags = flags ? flags : v->token_flags;
    if (!offset || !bytes || !flags)
        return ft_error_set(err, FT_MEMORY, "no memory for %u token ids", want);
    memset(offset + old, 0, (want - old) * sizeof *offset);
    memset(bytes + old, 0, (want - old) * sizeof *bytes);
    memset(flags + old, 0, (want - old) * sizeof *flags);
    v->id_capacity = want;
    return FT_OK;
}

static int reserve_pool(struct ft_vocabulary *v, size_t bytes, struct ft_error *err)
{
    size_t want = v->pool_capacity;
    while (want - v->pool_bytes < bytes)
        want *= 2;
    if (want > UINT32_MAX)
        return ft_error_set(err, FT_LIMIT, "the vocabulary's texts exceed 4 GiB");
    char *pool = want == v->pool_capacity ? v->pool : realloc(v->pool, want);
    if (!pool)
        return ft_error_set(err, FT_MEMORY, "no memory for %zu bytes of token texts", want);
    v->pool = pool;
    v->pool_capacity = want;
    return FT_OK;
}

int ft_vocabulary_add(struct ft_vocabulary *v, const char *text, size_t bytes, uint32_t id, uint8_t flags,
                      struct ft_error *err)
{
    if (id >= FT_TOKENIZER_VOCAB_MAX)
        return ft_error_set(err, FT_LIMIT, "token \"%.64s\" has id %u%s; ids up to %u can be read", text, id,
                            id == FT_NONE - 1 ? " or more" : "", FT_TOKENIZER_VOCAB_MAX - 1);
    if (reserve_id(v, id, err) != FT_OK || reserve_pool(v, bytes, err) != FT_OK)
        return err->code;
    char *raw = v->pool + v->pool_bytes;
    size_t raw_bytes;
    bool literal = undo_alphabet(text, bytes, raw, &raw_bytes);
    uint32_t *slot = find_slot(v, raw, raw_bytes, literal);
    if (*slot == id) {
        v->token_flags[id] |= flags;
        return FT_OK;
    }
    if (*slot != FT_NONE)
        return ft_error_set(err, FT_FORMAT, "token \"%.64s\" has two ids, %u and %u", text, *slot, id);
    if (v->token_flags[id])
        return ft_error_set(err, FT_FORMAT, "id %u belongs to two tokens, the second one is \"%.64s\"", id,
                            text);
    *slot = id;
    v->token_offset[id] = (uint32_t)v->pool_bytes;
    v->token_bytes[id] = (uint32_t)raw_bytes;
    v->token_flags[id] = (uint8_t)(flags | (literal ? FT_TOKEN_LITERAL : 0));
    v->pool_bytes += raw_bytes;
    if (v->count <= id)
        v->count = id + 1;
    if (v->token_bytes_max < raw_bytes)
        v->token_bytes_max = (uint32_t)raw_bytes;
    return FT_OK;
}

uint32_t ft_vocabulary_find_raw(const struct ft_vocabulary *v, const char *raw, size_t bytes, bool literal)
{
    return *find_slot(v, raw, bytes, literal);
}

uint32_t ft_vocabulary_find(const struct ft_vocabulary *v, const char *text, size_t bytes)
{
    char small[256], *raw = small;
    size_t raw_bytes;
    if (bytes > sizeof small) {
        if (bytes > 4 * (size_t)v->token_bytes_max) /* at most 2 bytes of text per raw byte, or literal */
            return FT_NONE;
        raw = malloc(bytes);
        if (!raw)
            return FT_NONE;
    }
    bool literal = undo_alphabet(text, bytes, raw, &raw_bytes);
    uint32_t id = ft_vocabulary_find_raw(v, raw, raw_bytes, literal);
    if (raw != small)
        free(raw);
    return id;
}
