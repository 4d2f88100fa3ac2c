/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Activations of one step: which buffers exist and where they lie in one block, in f32 elements. The planner
 * counts it, jobs/ allocates it. R = rows, all row-major, row stride = the second size unless stated.
 */
#ifndef FT_GRAPH_WORKSPACE_H
#define FT_GRAPH_WORKSPACE_H

#include "graph/model.h"

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

#endif
