/* SPDX-License-Identifier: Apache-2.0 */
/* Ids back to text: all at once, and as a stream that holds back what may still become a character. */
#include "io/tokenizer.h"
#include "io/tokenizer_internal.h"
#include "io/utf8.h"

#include <stdlib.h>
#include <string.h>

static int check_id(const struct ft_tokenizer *tokenizer, uint32_t id, struct ft_error *err)
{
    uint32_t count = tokenizer->vocabulary.count;
    if (id < count)
        return FT_OK;
    return ft_error_set(err, FT_LIMIT, "token id %u is outside the tokenizer's vocabulary of %u tokens", id,
                        count);
}

/* What an id contributes; 0 bytes for one that is skipped or unknown. */
static const char *token_text(const struct ft_tokenizer *tokenizer, uint32_t id, bool skip_special,
                              uint32_t *bytes)
{
    const char *text = ft_tokenizer_get_token_bytes(tokenizer, id, bytes);
    if (skip_special && ft_tokenizer_is_special(tokenizer, id))
        *bytes = 0;
    return text;
}

int ft_tokenizer_decode(const struct ft_tokenizer *tokenizer, const uint32_t *ids, uint32_t count,
                        bool skip_special, char **text, size_t *bytes, struct ft_error *err)
{
    uint32_t token_bytes;
    size_t raw_bytes = 0, held_bytes;
    *text = NULL;
    *bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (check_id(tokenizer, ids[i], err) != FT_OK)
            return err->code;
        token_text(tokenizer, ids[i], skip_special, &token_bytes);
        raw_bytes += token_bytes;
    }
    char *raw = malloc(raw_bytes + 1);
    if (!raw)
        return ft_error_set(err, FT_MEMORY, "no memory for %zu bytes of text", raw_bytes);
    raw_bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        const char *token = token_text(tokenizer, ids[i], skip_special, &token_bytes);
        memcpy(raw + raw_bytes, token, token_bytes);
        raw_bytes += token_bytes;
    }
    raw[raw_bytes] = 0;
    if (ft_utf8_valid_bytes(raw, raw_bytes) == raw_bytes) {
        *text = raw;
        *bytes = raw_bytes;
        return FT_OK;
    }
    *text = malloc(3 * raw_bytes + 1);
    if (*text) {
        *bytes = ft_utf8_copy_lossy(raw, raw_bytes, true, *text, &held_bytes);
        (*text)[*bytes] = 0;
    }
    free(raw);
    return *text ? FT_OK : ft_error_set(err, FT_MEMORY, "no memory for %zu bytes of text", 3 * raw_bytes);
}

int ft_tokenizer_stream_begin(struct ft_tokenizer_stream *stream, const struct ft_tokenizer *tokenizer,
                              bool skip_special, struct ft_error *err)
{
    size_t raw_bytes = (size_t)tokenizer->vocabulary.token_bytes_max + 3;
    *stream = (struct ft_tokenizer_stream){.tokenizer = tokenizer, .skip_special = skip_special};
    stream->text = malloc(3 * raw_bytes);
    stream->raw = malloc(raw_bytes);
    if (stream->text && stream->raw)
        return FT_OK;
    ft_tokenizer_stream_end(stream);
    return ft_error_set(err, FT_MEMORY, "no memory for a text stream of %zu bytes", 4 * raw_bytes);
}

int ft_tokenizer_stream_push(struct ft_tokenizer_stream *stream, uint32_t id, const char **text,
                             size_t *bytes, struct ft_error *err)
{
    uint32_t token_bytes;
    size_t held_bytes;
    *text = stream->text;
    *bytes = 0;
    if (check_id(stream->tokenizer, id, err) != FT_OK)
        return err->code;
    const char *token = token_text(stream->tokenizer, id, stream->skip_special, &token_bytes);
    memcpy(stream->raw + stream->held_bytes, token, token_bytes);
    size_t raw_bytes = stream->held_bytes + token_bytes;
    *bytes = ft_utf8_copy_lossy(stream->raw, raw_bytes, false, stream->text, &held_bytes);
    memmove(stream->raw, stream->raw + raw_bytes - held_bytes, held_bytes);
    stream->held_bytes = (uint32_t)held_bytes;
    return FT_OK;
}

void ft_tokenizer_stream_flush(struct ft_tokenizer_stream *stream, const char **text, size_t *bytes)
{
    size_t held_bytes;
    *text = stream->text;
    *bytes = ft_utf8_copy_lossy(stream->raw, stream->held_bytes, true, stream->text, &held_bytes);
    stream->held_bytes = 0;
}

void ft_tokenizer_stream_end(struct ft_tokenizer_stream *stream)
{
    free(stream->text);
    free(stream->raw);
    memset(stream, 0, sizeof *stream);
}
