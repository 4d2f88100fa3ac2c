/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cutting text into the pieces that BPE merges in. Each pre-tokenizer of the list cuts the pieces of the one
 * before, and sees nothing around a piece (look-ahead ends with it). Pieces go on depth first, so no list of
 * them is kept.
 */
#include "io/tokenizer_internal.h"
#include "io/utf8.h"

#include <stdlib.h>
#include <string.h>

int ft_pretokenize_gpt2(struct ft_regex **out, struct ft_error *err)
{
    static const char pattern[] =
        "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    return ft_regex_compile(out, pattern, sizeof pattern - 1, err);
}

static int cut(struct ft_encoder *encoder, uint32_t step, const char *text, size_t bytes);

/* Hands text[start, end) to the next step, unless it is what this step removes. */
static int pass_on(struct ft_encoder *encoder, uint32_t step, const char *text, size_t start, size_t end,
                   bool match)
{
    const struct ft_split *split = &encoder->tokenizer->splits[step];
    if (start >= end || (split->removed && match != split->invert))
        return FT_OK;
    return cut(encoder, step + 1, text + start, end - start);
}

static int find_next(struct ft_encoder *encoder, const struct ft_split *split, const char *text, size_t bytes,
                     size_t from, bool *found, size_t *start, size_t *end)
{
    if (split->kind != FT_SPLIT_STRING)
        return ft_regex_search(split->regex, &encoder->regex, text, bytes, from, found, start, end,
                               encoder->err);
    /* An empty string is found everywhere, as an empty regex is. */
    const char *hit = memmem(text + from, bytes - from, split->string, split->string_bytes);
    *found = hit != NULL;
    if (hit) {
        *start = (size_t)(hit - text);
        *end = *start + split->string_bytes;
    }
    return FT_OK;
}

/* Matches and what lies between them are pieces. An empty match cuts the text where it is, except right after
 * another match, where it is passed over. */
static int cut_by_matches(struct ft_encoder *encoder, uint32_t step, const char *text, size_t bytes)
{
    const struct ft_split *split = &encoder->tokenizer->splits[step];
    size_t done = 0, from = 0, last_end = SIZE_MAX, start = 0, end = 0;
    while (from <= bytes) {
        bool found;
        if (find_next(encoder, split, text, bytes, from, &found, &start, &end) != FT_OK)
            return encoder->err->code;
        if (!found)
            break;
        if (start == end && end == last_end) {
            from = end < bytes ? end + (size_t)ft_utf8_next(text + end, bytes - end) : bytes + 1;
            continue;
        }
        from = last_end = end;
        if (pass_on(encoder, step, text, done, start, false) != FT_OK ||
            pass_on(encoder, step, text, start, end, true) != FT_OK)
            return encoder->err->code;
        done = end;
    }
    return pass_on(encoder, step, text, done, bytes, false);
}

static int cut_byte_level(struct ft_encoder *encoder, uint32_t step, const char *text, size_t bytes)
{
    const struct ft_split *split = &encoder->tokenizer->splits[step];
    char *prefixed = NULL;
    if (split->add_prefix_space && text[0] != ' ') {
        prefixed = malloc(bytes + 1);
        if (!prefixed)
            return ft_error_set(encoder->err, FT_MEMORY, "no memory for a text of %zu bytes", bytes);
        prefixed[0] = ' ';
        memcpy(prefixed + 1, text, bytes++);
        text = prefixed;
    }
    int status =
        split->regex ? cut_by_matches(encoder, step, text, bytes) : cut(encoder, step + 1, text, bytes);
    free(prefixed);
    return status;
}

static int cut(struct ft_encoder *encoder, uint32_t step, const char *text, size_t bytes)
{
    if (step == encoder->tokenizer->split_count)
        return ft_bpe_encode_piece(encoder, text, bytes);
    if (encoder->tokenizer->splits[step].kind == FT_SPLIT_BYTE_LEVEL)
        return cut_byte_level(encoder, step, text, bytes);
    return cut_by_matches(encoder, step, text, bytes);
}

int ft_pretokenize(struct ft_encoder *encoder, const char *text, size_t bytes)
{
    return bytes ? cut(encoder, 0, text, bytes) : FT_OK;
}
