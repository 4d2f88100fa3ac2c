/* SPDX-License-Identifier: Apache-2.0 */
#include "io/tokenizer.h"
#include "io/file.h"
#include "io/tokenizer_internal.h"
#include "io/utf8.h"

#include <stdlib.h>
#include <string.h>

#define JSON_BYTES_MAX ((size_t)512 << 20)

int ft_tokenizer_parse(struct ft_tokenizer **out, const char *json, size_t bytes, const char *name,
                       struct ft_error *err)
{
    *out = NULL;
    struct ft_tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (!tokenizer)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for a tokenizer", name);
    if (ft_tokenizer_load(tokenizer, json, bytes, err) != FT_OK) {
        ft_tokenizer_close(tokenizer);
        return ft_error_prepend(err, "%s", name);
    }
    *out = tokenizer;
    return FT_OK;
}

int ft_tokenizer_open(struct ft_tokenizer **out, const char *path, struct ft_error *err)
{
    char *json;
    uint64_t bytes;
    *out = NULL;
    if (ft_file_read_all(path, JSON_BYTES_MAX, &json, &bytes, err) != FT_OK)
        return err->code;
    int status = ft_tokenizer_parse(out, json, bytes, path, err);
    free(json);
    return status;
}

void ft_tokenizer_close(struct ft_tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    for (uint32_t i = 0; i < tokenizer->split_count; i++) {
        ft_regex_free(tokenizer->splits[i].regex);
        free(tokenizer->splits[i].string);
    }
    ft_token_trie_fini(&tokenizer->written);
    ft_token_trie_fini(&tokenizer->normalized);
    ft_bpe_fini(&tokenizer->bpe);
    ft_vocabulary_fini(&tokenizer->vocabulary);
    free(tokenizer);
}

int ft_encoder_push(struct ft_encoder *encoder, uint32_t id)
{
    if (encoder->count == encoder->capacity) {
        uint32_t want =
            encoder->capacity ? 2 * encoder->capacity : 64; /* ids <= bytes of text: no overflow */
        uint32_t *ids = realloc(encoder->ids, want * sizeof *ids);
        if (!ids)
            return ft_error_set(encoder->err, FT_MEMORY, "no memory for %u token ids", want);
        encoder->ids = ids;
        encoder->capacity = want;
    }
    encoder->ids[encoder->count++] = id;
    return FT_OK;
}

/* Text between the added tokens that are found as written. */
static int encode_gap(struct ft_encoder *encoder, const char *text, size_t bytes)
{
    const struct ft_tokenizer *tokenizer = encoder->tokenizer;
    char *normalized = NULL;
    if (tokenizer->nfc && ft_normalize_nfc(text, bytes, &normalized, &bytes, encoder->err) != FT_OK)
        return encoder->err->code;
    int status = ft_token_trie_split(encoder, &tokenizer->normalized, normalized ? normalized : text, bytes,
                                     ft_pretokenize);
    free(normalized);
    return status;
}

static int encode_text(struct ft_encoder *encoder, const char *text, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        size_t valid = ft_utf8_valid_bytes(text + at, bytes - at);
        if (ft_token_trie_split(encoder, &encoder->tokenizer->written, text + at, valid, encode_gap) != FT_OK)
            return encoder->err->code;
        at += valid;
        size_t start = at;
        for (int n = 0; at < bytes && (n = ft_utf8_next(text + at, bytes - at)) <= 0;)
            at += n < 0 ? (size_t)-n : bytes - at;
        if (ft_bpe_encode_piece(encoder, text + start, at - start) != FT_OK)
            return encoder->err->code;
    }
    return FT_OK;
}

int ft_tokenizer_encode(const struct ft_tokenizer *tokenizer, const char *text, size_t bytes,
                        bool special_tokens, uint32_t **ids, uint32_t *count, struct ft_error *err)
{
    *ids = NULL;
    *count = 0;
    if (bytes > FT_TOKENIZER_TEXT_BYTES_MAX)
        return ft_error_set(err, FT_LIMIT, "a text of %zu bytes is to be encoded; at most %zu at once", bytes,
                            FT_TOKENIZER_TEXT_BYTES_MAX);
    struct ft_encoder encoder = {.tokenizer = tokenizer, .err = err, .special_tokens = special_tokens};
    int status = encode_text(&encoder, text, bytes);
    if (status == FT_OK && !encoder.ids && !(encoder.ids = malloc(sizeof *encoder.ids)))
        status = ft_error_set(err, FT_MEMORY, "no memory for token ids");
    ft_bpe_scratch_fini(&encoder.bpe);
    ft_regex_scratch_free(encoder.regex);
    if (status != FT_OK) {
        free(encoder.ids);
        return status;
    }
    *ids = encoder.ids;
    *count = encoder.count;
    return FT_OK;
}

uint32_t ft_tokenizer_vocab_count(const struct ft_tokenizer *tokenizer)
{
    return tokenizer->vocabulary.count;
}

uint32_t ft_tokenizer_find_token(const struct ft_tokenizer *tokenizer, const char *text)
{
    return ft_vocabulary_find(&tokenizer->vocabulary, text, strlen(text));
}

bool ft_tokenizer_is_special(const struct ft_tokenizer *tokenizer, uint32_t id)
{
    return id < tokenizer->vocabulary.count && tokenizer->vocabulary.token_flags[id] & FT_TOKEN_SPECIAL;
}

const char *ft_tokenizer_get_token_bytes(const struct ft_tokenizer *tokenizer, uint32_t id, uint32_t *bytes)
{
    const struct ft_vocabulary *vocabulary = &tokenizer->vocabulary;
    bool known = id < vocabulary->count && vocabulary->token_flags[id];
    *bytes = known ? vocabulary->token_bytes[id] : 0;
    return known ? vocabulary->pool + vocabulary->token_offset[id] : "";
}

uint32_t ft_tokenizer_find_bos(const struct ft_tokenizer *tokenizer)
{
    return tokenizer->bos_id;
}
