/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Byte-level BPE tokenizer, read from a checkpoint's tokenizer.json.
 *
 *   text --cut at invalid UTF-8--> runs
 *     run --added tokens as written--> gaps --NFC--> --added tokens as normalised--> gaps
 *       gap --Split / ByteLevel regex--> pieces --bytes--> --merges by rank--> ids
 *
 * Read: model BPE (merges as "a b" or ["a", "b"], ignore_merges, unk_token, fuse_unk), pre-tokenizers Split
 * (Regex or String; behaviour Isolated or Removed) and ByteLevel (add_prefix_space, use_regex), normalizer
 * NFC, decoder ByteLevel (or none, which is taken as ByteLevel), added tokens with special, normalized,
 * single_word, lstrip, rstrip. Anything else (WordPiece, Unigram, byte_fallback, other normalizers...) is
 * refused by its name.
 *
 * Bytes. Any byte string can be encoded: a maximal run of invalid UTF-8 is one piece of its own, mapped to
 * byte tokens and merged without a regex, so that with a full byte vocabulary the concatenated
 * ft_tokenizer_get_token_bytes of the ids are the text again (after NFC, and but for add_prefix_space, lstrip
 * and rstrip). A byte without a token becomes unk_token when the model names one, otherwise encoding fails
 * naming the byte. Decoded *text* is always valid UTF-8: what is ill-formed becomes U+FFFD, as in the
 * reference implementation.
 *
 * Beginning-of-sequence tokens (post_processor TemplateProcessing) are never added by encode:
 * ft_tokenizer_find_bos tells the id and the caller decides, so that a prompt which has one already does not
 * get two.
 *
 * Limits: ids below FT_TOKENIZER_VOCAB_MAX, texts of at most FT_TOKENIZER_TEXT_BYTES_MAX, bounded steps of
 * the regex engine. Encoding takes O(n log n) in the longest piece. Threads: an open tokenizer is constant;
 * every function that takes it const may be called from many threads at once. Errors: FT_IO, FT_FORMAT (not
 * what the format says), FT_UNSUPPORTED (understood, refused by name), FT_LIMIT, FT_MEMORY. Source: the
 * byte-level alphabet and regex of GPT-2 (Radford et al. 2019); behaviour of the `tokenizers` library.
 */
#ifndef FT_IO_TOKENIZER_H
#define FT_IO_TOKENIZER_H

#include "graph/error.h"
#include "graph/types.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FT_TOKENIZER_VOCAB_MAX (1u << 21)
#define FT_TOKENIZER_TEXT_BYTES_MAX ((size_t)64 << 20)

struct ft_tokenizer;

/* `path` names the tokenizer.json itself. *out is NULL on failure. */
int ft_tokenizer_open(struct ft_tokenizer **out, const char *path, struct ft_error *err);
/* The same from memory; `name` stands in for the path in messages. */
int ft_tokenizer_parse(struct ft_tokenizer **out, const char *json, size_t bytes, const char *name,
                       struct ft_error *err);
void ft_tokenizer_close(struct ft_tokenizer *tokenizer); /* NULL is fine */

/*
 * *ids [*count] is allocated with malloc and belongs to the caller (never NULL on success, NULL on failure).
 * Without `special_tokens` the characters of special added tokens are plain text; other added tokens always
 * match.
 */
int ft_tokenizer_encode(const struct ft_tokenizer *tokenizer, const char *text, size_t bytes,
                        bool special_tokens, uint32_t **ids, uint32_t *count, struct ft_error *err);

/* *text [*bytes] is valid UTF-8 plus a terminating 0, allocated with malloc for the caller. An id that no
 * token has gives nothing when it is below the vocabulary size, and FT_LIMIT from there on. */
int ft_tokenizer_decode(const struct ft_tokenizer *tokenizer, const uint32_t *ids, uint32_t count,
                        bool skip_special, char **text, size_t *bytes, struct ft_error *err);

/* Largest id + 1, added tokens included (a model's logits may have more rows: padding). */
uint32_t ft_tokenizer_vocab_count(const struct ft_tokenizer *tokenizer);
/* Id of a token by its text in tokenizer.json ("<|im_end|>", "\u0120the"), or FT_NONE. */
uint32_t ft_tokenizer_find_token(const struct ft_tokenizer *tokenizer, const char *text);
bool ft_tokenizer_is_special(const struct ft_tokenizer *tokenizer, uint32_t id); /* false for an unknown id */
/* The raw bytes that a token stands for, perhaps half a character; lives as long as the tokenizer. Unknown: 0 bytes. */
const char *ft_tokenizer_get_token_bytes(const struct ft_tokenizer *tokenizer, uint32_t id, uint32_t *bytes);
/* The token that TemplateProcessing puts before a single sequence, or FT_NONE. */
uint32_t ft_tokenizer_find_bos(const struct ft_tokenizer *tokenizer);

/*
 * Streaming decode: ids in, text out as soon as whole characters are known. The concatenated texts of all
 * pushes and of the flush are exactly what ft_tokenizer_decode gives for all ids. No allocation between begin
 * and end. One stream belongs to one thread at a time; the tokenizer must outlive it.
 */
struct ft_tokenizer_stream {
    const struct ft_tokenizer *tokenizer;
    char *text;          /* [(3 + longest token) * 3], the last call's output */
    char *raw;           /* [3 + longest token] */
    uint32_t held_bytes; /* 0..3, at raw[0]: a character whose rest has not come yet */
    bool skip_special;
};
int ft_tokenizer_stream_begin(struct ft_tokenizer_stream *stream, const struct ft_tokenizer *tokenizer,
                              bool skip_special, struct ft_error *err);
/* *text [*bytes], perhaps 0 bytes, not terminated, is valid until the next call on this stream. */
int ft_tokenizer_stream_push(struct ft_tokenizer_stream *stream, uint32_t id, const char **text,
                             size_t *bytes, struct ft_error *err);
/* What was held back can no longer be completed: it becomes U+FFFD. The stream can be used again. */
void ft_tokenizer_stream_flush(struct ft_tokenizer_stream *stream, const char **text, size_t *bytes);
void ft_tokenizer_stream_end(struct ft_tokenizer_stream *stream);

#endif
