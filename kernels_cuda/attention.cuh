/* SPDX-License-Identifier: Apache-2.0 */
/* What the attention kernels share: where the parts of a row's concatenated projection lie, and how contexts
 * are cut. */
#ifndef FT_KERNELS_CUDA_ATTENTION_CUH
#define FT_KERNELS_CUDA_ATTENTION_CUH

#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

enum { FT_CUDA_NOT_SUPPORTED = 801 }; /* cudaErrorNotSupported: sizes that no kernel takes */

/* Where k, v and the indexer's part begin in a row of `project`; query_stride between heads: d, or 2 d with gates. */
struct ft_qkv_parts {
    uint32_t query_stride, k, v, index;
};
static inline struct ft_qkv_parts ft_qkv_parts_of(const struct ft_model *m)
{
    struct ft_qkv_parts parts = {};
    parts.query_stride = m->head_dim * (m->attention_gate ? 2 : 1);
    parts.k = m->head_count * parts.query_stride;
    parts.v = parts.k + m->kv_head_count * m->head_dim;
    parts.index = parts.v + m->kv_head_count * m->head_dim;
    return parts;
}

/* Sparse layers: whether a row among those of at most tokens_max tokens may have more blocks than the budget takes. */
static inline bool ft_selects(const struct ft_cuda *c, uint32_t layer, uint32_t tokens_max)
{
    const struct ft_model *m = c->model;
    return m->layers[layer].attention == FT_ATTENTION_SPARSE &&
           tokens_max / m->indexer_ratio > m->indexer_budget / m->indexer_ratio;
}

/*
 * A row's visible tokens are cut into splits that blocks work on side by side. The cut follows from the
 * number of visible tokens alone, so that a row's sums do not depend on its company: splits of 16 tokens up
 * to 256 tokens, then 16 splits up to 1024 tokens, 64 tokens a split up to 36 splits, then 256 tokens a
 * split, at most 128 splits (graph/workspace.h, where plans count their scratch). The number of splits grows
 * with the tokens; those at the end may be empty.
 */
#define FT_ATTENTION_TILE FT_GPU_ATTENTION_TILE
#define FT_ATTENTION_SPLITS_MAX FT_GPU_ATTENTION_SPLITS_MAX
static __host__ __device__ inline uint32_t ft_attention_splits(uint32_t tokens)
{
    return ft_gpu_attention_splits(tokens);
}
/* Tokens of a split: whole rows of 16 up to a tile, then whole tiles. */
static __host__ __device__ inline uint32_t ft_attention_share(uint32_t tokens, uint32_t splits)
{
    uint32_t share = (tokens + splits - 1) / splits,
             unit = share <= FT_ATTENTION_TILE ? 16 : FT_ATTENTION_TILE;
    return (share + unit - 1) / unit * unit;
}

/*
 * Bytes of c->scratch that ft_cuda_attention and ft_cuda_attention_select ask for when `rows` rows see at
 * most tokens_max tokens. With less scratch prefill batches take fewer splits and fewer rows at once; decode
 * batches (<= FT_CUDA_DECODE_ROWS) need all of it: they fail with cudaErrorNotSupported.
 */
static inline uint64_t ft_attention_scratch(const struct ft_model *m, uint32_t rows, uint32_t tokens_max)
{
    return ft_workspace_gpu_attention_bytes(m, rows, tokens_max);
}

/* Everything that both forms of attention read. */
struct ft_attend_args {
    const float *query, *project; /* [rows, heads, dim]; gate of head h of row r at project + r * stride + h *
                                     query_stride + dim */
    float *out;                   /* row r at + r * out_stride */
    uint64_t stride, out_stride;
    const float *sinks; /* [heads] or NULL */
    bool gate;
    uint32_t heads, kv_heads, group, dim, query_stride, window; /* window 0: none */
    float scale;
    uint32_t rows, sequences, pages_max, page_tokens;
    uint64_t k_offset, v_offset;
    const uint32_t *position, *row_sequence, *first_row, *row_count;
    float *const *page;
    /* sparse layers beyond their budget: [rows, select_stride] as ft_cuda_attention_select writes it; else NULL */
    const uint32_t *select;
    uint64_t select_stride;
    uint32_t ratio;
};

/* Sequences with at most this many rows in a prefill step take the decode form, the others the tiled one. */
#define FT_ATTENTION_SHORT_ROWS 4u

/* The tiled form (attention_tiled.cu): causal attention of the step's sequences with more than `short_rows` rows. */
bool ft_attention_tiled_takes(uint32_t dim);
int ft_attention_tiled(const struct ft_attend_args *args, uint32_t short_rows, void *stream);
/* The same for rows that have chosen what they see (attention_sparse.cu), where there is a tiled form. */
static inline bool ft_attention_sparse_takes(uint32_t dim)
{
    return dim == 128 || dim == 256;
}
int ft_attention_sparse(const struct ft_attend_args *args, void *stream);

#if defined(__CUDACC__) || defined(FT_CUDA_EMULATED)
/* The tokens that a row sees: those of `blocks`, then [tail_begin, position]. */
struct ft_visible {
    const uint32_t *blocks;
    uint32_t in_blocks, ratio, tail_begin, count;
};

static __device__ __forceinline__ struct ft_visible ft_visible_of(const struct ft_attend_args &a,
                                                                  uint32_t row)
{
    uint32_t tokens = a.position[row] + 1;
    struct ft_visible v = {NULL, 0, 1, 0, tokens};
    if (a.select) {
        const uint32_t *select = a.select + row * a.select_stride;
        if (select[0] != FT_NONE) {
            v.blocks = select + 1;
            v.ratio = a.ratio;
            v.in_blocks = select[0] * a.ratio;
            v.tail_begin = tokens / a.ratio * a.ratio;
        }
    } else if (a.window && tokens > a.window) {
        v.tail_begin = tokens - a.window;
    }
    v.count = v.in_blocks + tokens - v.tail_begin;
    return v;
}

static __device__ __forceinline__ uint32_t ft_visible_token(const struct ft_visible &v, uint32_t i)
{
    return i < v.in_blocks ? v.blocks[i / v.ratio] * v.ratio + i % v.ratio : v.tail_begin + (i - v.in_blocks);
}

/* sm_75 has no bf16 matrix unit: the decode form is faster there, and nothing of the others is compiled for it. */
#if !defined(FT_CUDA_EMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define FT_ATTENTION_HAS_MATRIX_UNIT false
#else
#define FT_ATTENTION_HAS_MATRIX_UNIT true
#endif

/* Where the key of a token lies. */
static __device__ __forceinline__ const float *
ft_attention_key(const struct ft_attend_args &args, uint32_t sequence, uint32_t kv_head, uint32_t token)
{
    return args.page[(uint64_t)sequence * args.pages_max + token / args.page_tokens] + args.k_offset +
           ((uint64_t)kv_head * args.page_tokens + token % args.page_tokens) * args.dim;
}
/* What the weighted sum of a row is multiplied by at last: max and sum are those of its weights, without the sink. */
static __device__ __forceinline__ float ft_attention_scale(const struct ft_attend_args &args, uint32_t head,
                                                           float max, float sum)
{
    float scale = 1.0f;
    if (args.sinks) {
        float top = fmaxf(max, args.sinks[head]);
        scale = expf(max - top);
        sum = sum * scale + expf(args.sinks[head] - top);
    }
    return scale / sum;
}
static __device__ __forceinline__ float ft_attention_gate(const struct ft_attend_args &args, uint32_t row,
                                                          uint32_t head, uint32_t i)
{
    return ft_sigmoid_device(
        args.project[row * args.stride + (uint64_t)head * args.query_stride + args.dim + i]);
}
#endif

#endif
