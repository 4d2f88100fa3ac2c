/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hostile tokenizer.json: a file that parses must encode and decode without a crash, and what it encodes must
 * decode. Input: the JSON, then perhaps a NUL byte and the text to encode. Seeds: tests/data/fuzz/tokenizer,
 * words for -dict: tests/data/fuzz/tokenizer.dict.
 */
#include "io/tokenizer.h"
#include "io/utf8.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void demand(bool condition)
{
    if (!condition)
        abort();
}

static void round_trip(const struct ft_tokenizer *tokenizer, const char *text, size_t bytes, bool special)
{
    struct ft_error err;
    struct ft_tokenizer_stream stream;
    uint32_t *ids, count;
    char *decoded;
    const char *part;
    size_t decoded_bytes, part_bytes, at = 0;
    if (ft_tokenizer_encode(tokenizer, text, bytes, special, &ids, &count, &err) != FT_OK) {
        demand(ids == NULL && err.message[0]);
        return;
    }
    demand(ft_tokenizer_decode(tokenizer, ids, count, special, &decoded, &decoded_bytes, &err) == FT_OK);
    demand(ft_utf8_valid_bytes(decoded, decoded_bytes) == decoded_bytes);
    demand(ft_tokenizer_stream_begin(&stream, tokenizer, special, &err) == FT_OK);
    for (uint32_t i = 0; i <= count; i++) {
        if (i < count)
            demand(ft_tokenizer_stream_push(&stream, ids[i], &part, &part_bytes, &err) == FT_OK);
        else
            ft_tokenizer_stream_flush(&stream, &part, &part_bytes);
        demand(part_bytes <= decoded_bytes - at && memcmp(decoded + at, part, part_bytes) == 0);
        at += part_bytes;
    }
    demand(at == decoded_bytes);
    ft_tokenizer_stream_end(&stream);
    free(decoded);
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char usual[] =
        "<|im_start|>ab abc  don't\n\n12 \xc3\xa9\xcc\x81 \xe4\xb8\x80\xff\xed\xa0\x80<x> \xf0\x9f";
    struct ft_error err;
    struct ft_tokenizer *tokenizer;
    const uint8_t *end = size ? memchr(data, 0, size) : NULL;
    size_t json_bytes = end ? (size_t)(end - data) : size;
    size_t text_bytes = end ? size - json_bytes - 1 : 0;
    if (text_bytes > 256)
        text_bytes = 256;
    if (ft_tokenizer_parse(&tokenizer, (const char *)data, json_bytes, "fuzz", &err) != FT_OK) {
        demand(tokenizer == NULL && err.message[0]);
        return 0;
    }
    round_trip(tokenizer, usual, sizeof usual - 1, true);
    round_trip(tokenizer, usual, sizeof usual - 1, false);
    if (text_bytes)
        round_trip(tokenizer, (const char *)end + 1, text_bytes, true);
    uint32_t found = ft_tokenizer_find_token(tokenizer, "ab");
    demand(found == FT_NONE || found < ft_tokenizer_vocab_count(tokenizer));
    ft_tokenizer_close(tokenizer);
    return 0;
}
