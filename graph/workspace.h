/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Activations of one step: which buffers exist and where they lie in one block, in f32 elements. The planner
 * counts it, jobs/ allocates it. R = rows, all row-major, row stride = the second size unless stated.
 */
#ifndef FT_GRAPH_WORKSPACE_H
#define FT_GRAPH_WORKSPACE_H

#include "graph/model.h"

#ifdef __cplusplus /* GPU kernels call the counting functions */
extern "C" {
#endif

struct ft_workspace {
    uint32_t rows, sequences, logit_rows;
    uint32_t project_width;   /* widest concatenated projection of any layer */
    uint32_t attention_width; /* widest input of an output projection */
    uint32_t select_max;      /* blocks of one row's selection */
    uint64_t residual;        /* [R, n H] */
    uint64_t normed;          /* u [R, n H] */
    uint64_t mixed;           /* [R, lowrank + n]: t, then s */
    uint64_t x;               /* [R, H] input of attention or MoE */
    uint64_t project;         /* [R, project_width] */
    uint64_t conv;            /* [R, channels] */
    uint64_t query;           /* [R, heads * head_dim] */
    uint64_t attention;       /* [R, attention_width] */
    uint64_t select;          /* u32 [R, select_max + 1]: count, then ascending block numbers */
    uint64_t logits_router;   /* [R, E] */
    uint64_t topk_ids;        /* u32 [R, k] */
    uint64_t topk_weights;    /* [R, k] */
    uint64_t staged;          /* u32 [min(R, 16), ft_workspace_staged_words], slack: for a GPU */
    uint64_t expert_h;        /* [R k, I] grouped by expert */
    uint64_t expert_y;        /* [R k, H] at row * k + position in the top-k list */
    uint64_t shared_h;        /* [R, max(shared width, dense width)] */
    uint64_t shared_y;        /* [R, H] */
    uint64_t shared_gate;     /* [R] */
    uint64_t ple_raw;         /* bytes [ple_count, R, heads, row bytes], 64-byte aligned start */
    uint64_t ple_row_bytes;   /* bytes of one token in ple_raw (all heads) */
    uint64_t ple_e;           /* [ple_count, R, embed] */
    uint64_t ple_project;     /* [ple_count, R, n H + H]: key, value */
    uint64_t ple_u;           /* [R, n H] */
    uint64_t ple_c;           /* [R, n H] */
    uint64_t rotary;          /* [R, rotary_dim]: cos [rotary_dim / 2], then sin, of the row's position */
    uint64_t head_x;          /* [logit rows, H] */
    uint64_t logits;          /* [logit rows, vocab] */
    uint64_t sample_index;    /* u32 [logit rows, vocab] */
    uint64_t count;           /* elements of the whole block */
};
void ft_workspace_init(struct ft_workspace *workspace, const struct ft_model *model, uint32_t rows,
                       uint32_t sequences, uint32_t logit_rows);
/* What the host keeps beside a GPU that runs the dense ops: PLE rows of every row, and the buffers of the
 * CPU's experts (x, topk_ids, topk_weights, expert_h, expert_y) for `expert_rows` rows. The other offsets are
 * 0 and unused. */
void ft_workspace_init_host(struct ft_workspace *workspace, const struct ft_model *model, uint32_t rows,
                            uint32_t expert_rows);

/*
 * What kernels_cuda asks for beside the activations (struct ft_cuda, scratch). The sizes follow from how its
 * kernels are cut, which is stated here so that a plan can count them without a GPU in reach.
 */
#define FT_GPU_DECODE_ROWS 16u /* larger steps take the prefill forms */
#define FT_GPU_UNIT 128u       /* columns that a decode form walks at a time */
#define FT_GPU_MIX_SHARES 2u   /* that a decode mixer cuts a stream into, at most */
#define FT_GPU_DEPTH 32u       /* prefill: columns of a tile, activations are padded to it */
#define FT_GPU_WEIGHT_BYTES (32ull * 1024 * 1024) /* prefill: slice of decoded weights */
#define FT_GPU_SCALE_BYTES 64u /* prefill: scales of a product */
#define FT_GPU_TOKENS_MIN 256u                    /* bounds of contexts are powers of two from here on */

/* u32 behind the last staged row that kernels may read, and never look at. */
#define FT_WORKSPACE_STAGED_SLACK 2560u
/* u32 of a row of a decode step's `in` activations in three 16-bit pieces, with padding and the powers of two
 * of units of 64 columns: no format of kernels_cuda/expert_stage.cuh needs more. */
static inline uint64_t ft_workspace_staged_words(uint64_t in)
{
    return ft_round_up(in, FT_GPU_UNIT) / 2 * 3 + ft_div_up(in, 16) + 48;
}

/* Partial sums of the mixers and, of prefill steps: a slice of weights, the widest f32 rows, the widest
 * input in two bf16 pieces. */
uint64_t ft_workspace_gpu_dense_bytes(const struct ft_model *model, uint32_t rows);
/* Partial sums of attention, scores of the indexer, for rows that see at most tokens_max tokens. */
uint64_t ft_workspace_gpu_attention_bytes(const struct ft_model *model, uint32_t rows, uint32_t tokens_max);
/* Both in one block, as a lane with a KV pool of kv_tokens makes it. */
uint64_t ft_workspace_gpu_bytes(const struct ft_model *model, uint32_t rows, uint64_t kv_tokens);

#if defined(__CUDACC__)
#define FT_GPU_AND_HOST __host__ __device__
#else
#define FT_GPU_AND_HOST
#endif
/*
 * A row's visible tokens are cut into splits that blocks work on side by side. The cut follows from the
 * number of visible tokens alone, so that a row's sums do not depend on its company: tiles of 64 tokens, at
 * most 16 splits up to 64 tiles, then 4 tiles a split, at most 128 splits.
 */
#define FT_GPU_ATTENTION_TILE 64u
#define FT_GPU_ATTENTION_SPLITS_MAX 128u
static FT_GPU_AND_HOST inline uint32_t ft_gpu_attention_splits(uint32_t tokens)
{
    uint32_t few = (tokens + 15) / 16, some = (tokens + 63) / 64, many = (tokens + 255) / 256;
    if (few <= 16)
        return few ? few : 1;
    if (many > 36)
        return many < FT_GPU_ATTENTION_SPLITS_MAX ? many : FT_GPU_ATTENTION_SPLITS_MAX;
    return some < 16 ? 16 : some < 36 ? some : 36;
}
/* Widest f32 row of the prefill forms: one stream, or the hidden values of a dense MLP. */
static inline uint64_t ft_gpu_widest_row(const struct ft_model *model)
{
    return FT_MAX(model->hidden, model->dense_width);
}
/* f32 of a row of a decode mixer's partial sums: 16-byte loads. */
static inline uint32_t ft_gpu_mix_stride(const struct ft_model *model)
{
    return (uint32_t)ft_round_up(model->hc_lowrank + model->hc_count, 4);
}

#ifdef __cplusplus
}
#endif
#endif
