/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tokenizer's files share: the constant tables (struct ft_tokenizer) and the scratch of one encode
 * call (struct ft_encoder).
 *
 *   tokenizer_load.c   JSON -> tables          pretokenize.c    Split and ByteLevel: text -> pieces
 *   vocabulary.c       tokens by id and text   regex.c          PCRE2; regex_syntax.c: Ruby's syntax -> PCRE2's
 *   bpe.c              merges, piece -> ids    added_tokens.c   tries, matching
 *   normalize.c        NFC                     tokenizer.c      encode; tokenizer_decode.c: decode, stream
 *
 * Ownership: everything a struct points to belongs to it, unless marked "borrowed".
 */
#ifndef FT_IO_TOKENIZER_INTERNAL_H
#define FT_IO_TOKENIZER_INTERNAL_H

#include "io/tokenizer.h"

#define FT_SPLITS_MAX 16

/* What a token id is; 0 = no token has this id. */
enum ft_token_flags {
    FT_TOKEN_MODEL = 1,   /* in the BPE vocabulary */
    FT_TOKEN_ADDED = 2,   /* in added_tokens */
    FT_TOKEN_SPECIAL = 4, /* an added token with special: true */
    FT_TOKEN_LITERAL = 8, /* its text has characters outside the byte alphabet: decoded as written */
    FT_TOKEN_SINGLE_WORD = 16,
    FT_TOKEN_LSTRIP = 32,
    FT_TOKEN_RSTRIP = 64,
};

/* Tokens by id and by text. The pool holds raw bytes (the byte alphabet already undone). */
struct ft_vocabulary {
    uint32_t count;         /* largest id + 1 */
    uint32_t id_capacity;   /* of the three arrays by id; all zero from count on */
    uint32_t *token_offset; /* [count] in pool */
    uint32_t *token_bytes;  /* [count] */
    uint8_t *token_flags;   /* [count] enum ft_token_flags */
    char *pool;             /* [pool_capacity] */
    size_t pool_bytes, pool_capacity;
    uint32_t
        *slots; /* [slot_count] open addressing over ids, FT_NONE = empty; key = (bytes, literal or not) */
    uint32_t slot_count; /* a power of two, more than twice the tokens */
    uint32_t token_bytes_max;
};

struct ft_merge {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX = empty slot */
    uint32_t rank, id;
};

struct ft_bpe {
    struct ft_merge *merges; /* [merge_slots] open addressing, at most half full */
    uint32_t merge_slots;    /* a power of two */
    uint32_t byte_ids[256];  /* FT_NONE: the vocabulary lacks this byte */
    uint32_t unk_id;         /* or FT_NONE */
    bool fuse_unk, ignore_merges;
};

/* Trie over byte strings; node 0 is the root. */
struct ft_token_trie {
    uint32_t node_count, node_capacity;
    uint32_t *node_token; /* [node_capacity] id or FT_NONE */
    uint64_t *edge_keys;  /* [edge_slots] node << 8 | byte, UINT64_MAX = empty */
    uint32_t *edge_nodes; /* [edge_slots] */
    uint32_t edge_slots;  /* a power of two, at most half full */
    bool starts[256];     /* does any string start with this byte */
};

struct ft_regex; /* a compiled PCRE2 pattern */
struct ft_regex_scratch;

enum ft_split_kind { FT_SPLIT_REGEX, FT_SPLIT_STRING, FT_SPLIT_BYTE_LEVEL };

/* One pre-tokenizer; the last one is always BYTE_LEVEL, and the only one of that kind. */
struct ft_split {
    enum ft_split_kind kind;
    struct ft_regex *regex; /* REGEX, and BYTE_LEVEL with its own regex, else NULL */
    char *string;           /* STRING [string_bytes], else NULL */
    size_t string_bytes;
    bool removed;          /* behaviour Removed, else Isolated */
    bool invert;           /* what lies between matches counts as the match */
    bool add_prefix_space; /* BYTE_LEVEL */
};

struct ft_tokenizer {
    struct ft_vocabulary vocabulary;
    struct ft_bpe bpe;
    struct ft_token_trie written, normalized; /* added tokens found before and after normalisation */
    struct ft_split splits[FT_SPLITS_MAX];
    uint32_t split_count;
    uint32_t bos_id; /* or FT_NONE */
    bool nfc;
};

/* Scratch of one ft_tokenizer_encode call. */
struct ft_encoder {
    const struct ft_tokenizer *tokenizer; /* borrowed */
    struct ft_error *err;                 /* borrowed */
    uint32_t *ids;                        /* [capacity] */
    uint32_t count, capacity;
    struct ft_bpe_scratch {
        size_t symbol_capacity;
        uint32_t *symbol_id, *symbol_previous, *symbol_next; /* [symbol_capacity] */
        uint64_t *heap_key;                                  /* [2 * symbol_capacity] rank << 32 | position */
        uint32_t *heap_id;                                   /* [2 * symbol_capacity] */
    } bpe;
    struct ft_regex_scratch *regex; /* made on first use, else NULL */
    bool special_tokens;
};

/* vocabulary.c; `text` is a token as tokenizer.json writes it, `raw` its bytes. */
int ft_vocabulary_init(struct ft_vocabulary *vocabulary, size_t token_count, struct ft_error *err);
void ft_vocabulary_fini(struct ft_vocabulary *vocabulary);
int ft_vocabulary_add(struct ft_vocabulary *vocabulary, const char *text, size_t bytes, uint32_t id,
                      uint8_t flags, struct ft_error *err);
uint32_t ft_vocabulary_find(const struct ft_vocabulary *vocabulary, const char *text, size_t bytes);
uint32_t ft_vocabulary_find_raw(const struct ft_vocabulary *vocabulary, const char *raw, size_t bytes,
                                bool literal);

/* bpe.c; ranks are positions in the file, and a pair given twice keeps its last rank. */
int ft_bpe_init(struct ft_bpe *bpe, const struct ft_vocabulary *vocabulary, size_t merge_count,
                struct ft_error *err);
void ft_bpe_fini(struct ft_bpe *bpe);
void ft_bpe_add_merge(struct ft_bpe *bpe, uint32_t left, uint32_t right, uint32_t rank, uint32_t id);
int ft_bpe_encode_piece(struct ft_encoder *encoder, const char *piece, size_t bytes);
void ft_bpe_scratch_fini(struct ft_bpe_scratch *scratch);

/* added_tokens.c; of two equal strings the first one stays. */
int ft_token_trie_init(struct ft_token_trie *trie, size_t total_bytes, struct ft_error *err);
void ft_token_trie_fini(struct ft_token_trie *trie);
void ft_token_trie_add(struct ft_token_trie *trie, const char *text, size_t bytes, uint32_t id);
typedef int (*ft_gap_fn)(struct ft_encoder *encoder, const char *text, size_t bytes);
/* Appends the ids of the tokens found in text and hands the text between them to `gap`, in order. */
int ft_token_trie_split(struct ft_encoder *encoder, const struct ft_token_trie *trie, const char *text,
                        size_t bytes, ft_gap_fn gap);

/* regex.c, regex_syntax.c; patterns are in the Ruby syntax that tokenizer.json uses. */
int ft_regex_compile(struct ft_regex **out, const char *pattern, size_t bytes, struct ft_error *err);
void ft_regex_free(struct ft_regex *regex);
/* Finds the first match in text[bytes] from `from` on; *found = false when there is none. */
int ft_regex_search(const struct ft_regex *regex, struct ft_regex_scratch **scratch, const char *text,
                    size_t bytes, size_t from, bool *found, size_t *start, size_t *end, struct ft_error *err);
void ft_regex_scratch_free(struct ft_regex_scratch *scratch);
int ft_regex_translate(const char *pattern, size_t bytes, char **out, size_t *out_bytes,
                       struct ft_error *err);

/* pretokenize.c: cuts normalised text into pieces and appends their ids. */
int ft_pretokenize_gpt2(struct ft_regex **out, struct ft_error *err); /* ByteLevel's own regex */
int ft_pretokenize(struct ft_encoder *encoder, const char *text, size_t bytes);

/* normalize.c; *out [*out_bytes] is malloc'ed for the caller, or NULL when the text is in NFC already. */
int ft_normalize_nfc(const char *text, size_t bytes, char **out, size_t *out_bytes, struct ft_error *err);

/* tokenizer.c */
int ft_encoder_push(struct ft_encoder *encoder, uint32_t id);

/* tokenizer_load.c; fills a zeroed tokenizer, which the caller closes on failure too. */
int ft_tokenizer_load(struct ft_tokenizer *tokenizer, const char *json, size_t bytes, struct ft_error *err);

#endif
