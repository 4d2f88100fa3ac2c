/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the weights of a model are. io/ fills it, jobs/ and kernels read it; nobody writes it after loading.
 * Vectors (norms, biases, convolutions, A_log, sinks) are f32 whatever the checkpoint stores; matrices keep their
 * own bits, unless they are quantised on the way (enum ft_dense). Pointers that a layer or family does not have are NULL (a matrix: data == NULL).
 */
#ifndef FT_GRAPH_WEIGHTS_H
#define FT_GRAPH_WEIGHTS_H

#include "graph/matrix.h"
#include "graph/model.h"

/* Hyper-connection mixer: norm [n H]; down [lowrank, nH]; up [nH, lowrank]; inject [n, nH] (top mixer: none). */
struct ft_mix_weights {
    const float *norm;
    struct ft_matrix down, up, inject;
};

struct ft_attention_weights {
    struct ft_matrix q, k, v, o;
    const float *q_bias, *k_bias, *v_bias, *o_bias;
    const float *q_norm, *k_norm; /* [head_dim] */
    const float *sinks;           /* [head_count] */
    struct ft_matrix index_qk;    /* [(indexer_head_count + 1) * indexer_dim, H] */
    const float *index_q_norm, *index_k_norm; /* [indexer_dim] */
};

struct ft_linear_weights {
    struct ft_matrix qkv, z, b, a, out;
    const float *conv;    /* [channels, conv_taps] */
    const float *a_log;   /* [value_head_count] */
    const float *dt_bias; /* [value_head_count] */
    const float *norm;    /* [value_dim] */
};

struct ft_ple_weights {
    struct ft_matrix key, value; /* [n H, embed], [H, embed] */
    const float *norm_key, *norm_query, *norm_conv; /* [n H] */
    const float *conv;                              /* [n H, taps] */
};

struct ft_mlp_weights { /* shared expert or dense layer */
    struct ft_matrix gate, up, down;
};

struct ft_layer_weights {
    const float *attention_norm, *mlp_norm; /* [H]; NULL with hyper-connections */
    struct ft_mix_weights attention_mix, mlp_mix;
    struct ft_attention_weights attention;
    struct ft_linear_weights linear;
    struct ft_ple_weights ple;
    struct ft_matrix router; /* [E, H] */
    const float *router_bias;
    struct ft_mlp_weights shared;
    struct ft_matrix shared_gate; /* [1, H] */
    struct ft_mlp_weights dense;
    struct ft_expert_layout expert_layout; /* valid when the layer has experts */
    const char *experts;                   /* bank of the layer: expert e at experts + e * expert_layout.stride */
};

struct ft_weights {
    struct ft_matrix embed, head;
    const float *final_norm;      /* [H]; NULL with hyper-connections */
    struct ft_mix_weights top_mix;
    struct ft_layer_weights *layers; /* [layer_count] */
};

/* How dense matrices that the checkpoint stores in bf16, f16 or f32 are held. */
enum ft_dense {
    FT_DENSE_AS_STORED, /* in their own bits */
    FT_DENSE_TO_FP8,    /* quantised to fp8_block while they are loaded (io/quantise.h) */
    FT_DENSE_AUTO    /* a wish, resolved before loading: as stored where that fits, else fp8 */
};

/* What a dense matrix is for, as far as quantising tells them apart. Masks hold 1u << use. */
enum ft_dense_use {
    FT_USE_MIX,       /* mixers of the residual streams */
    FT_USE_LINEAR,    /* linear attention */
    FT_USE_ATTENTION, /* softmax attention */
    FT_USE_MLP,       /* shared experts, dense layers */
    FT_USE_PLE,       /* projections of per-layer embeddings */
    FT_USE_HEAD,
    FT_USE_GATE,      /* what decides: routers, indexers, gates, decays, injection: few rows, never quantised */
    FT_USE_EMBED      /* single rows are read, a GPU holds none of it unless the head is tied: never quantised */
};
/* What FT_DENSE_TO_FP8 quantises: everything of many rows. */
#define FT_FP8_USES 0x3fu
/*
 * Those of them that alone change no fixture's logits by more than 2% of the largest: none. The three bits of
 * mantissa of e4m3 are a noise of 2.6% of every product (root mean square), whatever the scales, and routers that
 * choose other experts multiply it. tests/test_e2e_dense_fp8.c measures it; tests/results/dense-fp8.md has the table.
 */
#define FT_FP8_USES_ACCEPTED 0u

/* What a model weighs, known from headers alone. */
struct ft_weight_sizes {
    uint64_t dense_bytes;       /* everything but experts, embedding, head and PLE tables */
    uint64_t layer_dense_bytes[FT_LAYERS_MAX]; /* of which each layer's own; all 0: not known, alike */
    uint64_t embed_bytes;       /* token embedding */
    uint64_t head_bytes;        /* 0 when tied */
    uint64_t expert_bytes_max;  /* largest expert stride over the layers */
    uint64_t expert_total_bytes; /* all experts of all layers */
    uint64_t ple_bytes;         /* all PLE tables, on disk */
    uint64_t file_bytes;        /* all shards */
    uint32_t moe_layer_count;
    enum ft_dense dense;        /* AS_STORED or TO_FP8: what dense_bytes and head_bytes stand for */
    enum ft_format expert_format; /* of the first layer with experts */
};

#endif
