/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a model is: the sizes and switches of a checkpoint's config.json, for all four families.
 *
 * io/config.c fills it from JSON; ft_model_finish() derives and checks the rest. Plain data: copy it freely.
 * Source of the maths: the families' published reference implementations; README names them.
 */
#ifndef FT_GRAPH_MODEL_H
#define FT_GRAPH_MODEL_H

#include "graph/error.h"
#include "graph/matrix.h"
#include "graph/types.h"

enum ft_family { FT_FAMILY_QWEN3_MOE, FT_FAMILY_QWEN3_5_MOE, FT_FAMILY_QWEN4_EXP, FT_FAMILY_GPT_OSS, FT_FAMILY_COUNT };

enum ft_attention {
    FT_ATTENTION_FULL,
    FT_ATTENTION_SPARSE,  /* full attention over the blocks an indexer picks */
    FT_ATTENTION_SLIDING, /* a query sees itself and the window - 1 tokens before it */
    FT_ATTENTION_LINEAR,  /* gated delta rule */
    FT_ATTENTION_COUNT
};

struct ft_layer_spec {
    uint8_t attention; /* enum ft_attention */
    bool dense;        /* an ordinary MLP of width dense_width instead of experts */
    uint8_t ple;       /* index into ple[], or 0xff */
};

#define FT_PLE_NONE 0xffu

/* One table of per-layer embeddings by hashed n-grams. */
struct ft_ple_spec {
    uint32_t layer; /* from 0 */
    uint32_t head_count;
    uint32_t row_width;                     /* elements of one row */
    uint64_t row_count;                     /* padded rows of the table */
    uint64_t head_rows[FT_PLE_HEADS_MAX];   /* a prime each */
    uint64_t head_offset[FT_PLE_HEADS_MAX]; /* first row of the head */
    uint64_t multiplier[FT_NGRAM_MAX];
};

struct ft_model {
    enum ft_family family;
    char name[64]; /* model_type as found */
    uint32_t hidden, vocab, layer_count;
    uint32_t position_max; /* max_position_embeddings; 0 = not stated */
    float rms_eps;
    bool norm_plus_one; /* norms scale by 1 + w */
    bool tied;          /* lm_head is the embedding */
    uint32_t eos[FT_EOS_MAX], eos_count; /* eos_token_id of the text config, in order */

    /* attention */
    uint32_t head_count, kv_head_count, head_dim;
    bool attention_gate; /* q_proj holds query and gate per head; output times sigmoid(gate) */
    bool qk_norm, attention_bias, sinks;
    uint32_t window; /* sliding_window; 0 = none */
    /* rotary: the first rotary_dim dims, pairs (i, i + rotary_dim/2), frequency i, cos and sin times rotary_scale */
    uint32_t rotary_dim;
    double rotary_theta, rotary_scale;
    struct {
        bool on, truncate;
        double factor, beta_fast, beta_slow, original_positions, attention_factor; /* attention_factor 0 = absent */
    } yarn;
    /* indexer of sparse attention */
    uint32_t indexer_head_count, indexer_dim, indexer_budget, indexer_ratio;

    /* linear attention */
    uint32_t key_head_count, value_head_count, key_dim, value_dim, conv_taps;
    enum ft_activation output_gate; /* SILU or SIGMOID */

    /* feed-forward */
    uint32_t expert_count, topk, expert_width;
    uint32_t shared_width; /* 0 = no shared expert */
    uint32_t dense_width;  /* intermediate_size, for dense layers; 0 = none */
    bool topk_renormalise;      /* weights of the chosen sum to 1 (softmax over all first) */
    bool router_softmax_chosen; /* gpt_oss: softmax over the chosen k only */
    bool router_bias, expert_bias;
    enum ft_activation activation;
    float swiglu_limit;

    /* residual streams (hyper-connections); 1 = ordinary residual */
    uint32_t hc_count, hc_lowrank;

    /* PLE */
    uint32_t ple_count, ple_embed_dim, ple_taps, ngram_size, heads_per_ngram;
    uint64_t ngram_vocab_base, ngram_vocab_multiple, ple_seed;
    uint32_t ple_shards; /* split_ngram_parts as stated; the headers decide */
    struct ft_ple_spec ple[FT_PLE_LAYERS_MAX];

    /* quantisation as stated by the config; the tensors' own names and types decide */
    uint16_t block_out, block_in; /* weight_block_size; 0 = not stated */

    struct ft_layer_spec layers[FT_LAYERS_MAX];
};

/*
 * Derives what follows from the config (PLE tables, defaults) and refuses impossible values, naming the key:
 * FT_FORMAT for zero or absurd sizes, FT_LIMIT beyond the limits of types.h, FT_UNSUPPORTED for what ft lacks.
 */
int ft_model_finish(struct ft_model *model, struct ft_error *err);
const char *ft_family_name(enum ft_family family);
const char *ft_attention_name(enum ft_attention attention);

/* Rotary frequencies [rotary_dim / 2] in radians per position, and the factor on cos and sin (YaRN included). */
void ft_model_rotary(const struct ft_model *model, double *frequencies, double *scale);

/* Rows of the PLE table `p` for one token: history[0] = the token, history[i] = i tokens before it; history_count
 * may be shorter than ngram_size at the start of a sequence. rows [head_count]. */
void ft_model_ple_rows(const struct ft_model *model, uint32_t p, const uint32_t *history, uint32_t history_count,
                       uint64_t *rows);

/* The next layer with experts in (layer, end), FT_NONE = none. */
static inline uint32_t ft_model_next_experts(const struct ft_model *model, uint32_t layer, uint32_t end)
{
    for (uint32_t next = layer + 1; next < end; next++)
        if (!model->layers[next].dense)
            return next;
    return FT_NONE;
}

/* Numbers that several layers need. */
static inline uint32_t ft_model_conv_channels(const struct ft_model *model)
{
    return 2 * model->key_head_count * model->key_dim + model->value_head_count * model->value_dim;
}

static inline bool ft_model_is_recurrent(const struct ft_model *model)
{
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].attention == FT_ATTENTION_LINEAR || model->layers[i].ple != FT_PLE_NONE)
            return true;
    return false;
}

/*
 * Where one sequence's state lies, in f32 elements of one flat block (what a snapshot copies):
 *   per linear layer: S [value_head_count, key_dim, value_dim], then convolution tail [conv_taps - 1, channels]
 *   per PLE layer: columns [(ple_taps - 1) * ngram_size, hc_count * hidden]
 *   per sparse layer: raw indexer keys of the partial block [indexer_ratio, indexer_dim]
 * The last ngram_size - 1 tokens are part of the sequence's token list, not of this block.
 */
struct ft_state_layout {
    uint64_t count;                            /* elements of the whole block */
    uint64_t delta_offset[FT_LAYERS_MAX];      /* linear layers */
    uint64_t conv_offset[FT_LAYERS_MAX];       /* linear layers */
    uint64_t ple_offset[FT_PLE_LAYERS_MAX];    /* PLE tables */
    uint64_t indexer_offset[FT_LAYERS_MAX];    /* sparse layers */
};
void ft_state_layout_init(struct ft_state_layout *layout, const struct ft_model *model);
/* The part of layers [begin, end), as a GPU that has only those keeps it; the counts of parts add up to the whole. */
void ft_state_layout_init_layers(struct ft_state_layout *layout, const struct ft_model *model, uint32_t begin,
                                 uint32_t end);

/*
 * One page of the paged KV cache holds page_tokens tokens of one sequence for every attention layer that keeps KV,
 * in f32 elements:
 *   per such layer: K [kv_head_count, page_tokens, head_dim], V the same, and for sparse layers the finished
 *                   (averaged, normed, rotated) indexer keys [page_tokens / indexer_ratio, indexer_dim]
 * page_tokens is a multiple of indexer_ratio, so a page boundary is always a block boundary.
 */
struct ft_kv_layout {
    uint32_t page_tokens;
    uint64_t count; /* elements of one page */
    uint64_t k_offset[FT_LAYERS_MAX], v_offset[FT_LAYERS_MAX], indexer_offset[FT_LAYERS_MAX];
};
void ft_kv_layout_init(struct ft_kv_layout *layout, const struct ft_model *model);
/* As above. page_tokens is that of the whole model. */
void ft_kv_layout_init_layers(struct ft_kv_layout *layout, const struct ft_model *model, uint32_t begin, uint32_t end);

#endif
