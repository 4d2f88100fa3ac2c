/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic on cores. One readable reference per op (accumulates in double), fast versions beside it, picked
 * once by ft_kernels_init into a table of functions.
 *
 * Every version of every op is **batch invariant**: a row's result has the same bits whatever other rows are in the
 * call, however the rows are grouped, and however the output range is tiled. The order of accumulation along the
 * inner dimension is fixed per (ISA, format). Deterministic runs rest on this.
 *
 * Activations are f32. Strides are in elements. Pointers do not alias unless stated. No function allocates, locks,
 * prints or fails: shapes were checked when the model was loaded. Threads: all functions are pure, any thread.
 */
#ifndef FT_KERNELS_CPU_H
#define FT_KERNELS_CPU_H

#include "graph/matrix.h"
#include "graph/model.h"

/* In ascending order of preference; those that round activations to int8 or 16 bits, and AMX (slower with a single row of
 * packed weights, faster with many), are used only when named. */
enum ft_isa {
    FT_ISA_REF,
    FT_ISA_AVX2,
    FT_ISA_AVX2VNNI,        /* AVX2 and AVX-VNNI */
    FT_ISA_AVX512,          /* F, BW, VL, DQ */
    FT_ISA_AVX512VNNI,      /* with VNNI and VBMI */
    FT_ISA_AVX512AMX,       /* with FP16 and the matrix unit (tiles of bf16) too */
    FT_ISA_AVX512VNNI_INT16, /* activations of packed e2m1 in 16 bits: errors of 1e-5 instead of 1e-6 */
    FT_ISA_AVX2_INT8,       /* experts of packed e2m1 with int8 activations: errors of 1e-2 instead of 1e-6 */
    FT_ISA_AVX2VNNI_INT8,
    FT_ISA_AVX512VNNI_INT8,
    FT_ISA_COUNT
};

/* Rows of activations: row r is x + (index ? index[r] : r) * stride. */
struct ft_rows {
    const float *x;
    const uint32_t *index; /* [count] or NULL */
    size_t stride;
    uint32_t count;
};

/* Paged keys and values of one sequence in one layer. pages[t / page_tokens] is the page of token t; K of head h at
 * pages[..] + k_offset + (h * page_tokens + t % page_tokens) * head_dim, V likewise from v_offset. */
struct ft_kv_view {
    float *const *pages;
    uint64_t k_offset, v_offset;
    uint32_t page_tokens, kv_head_count, head_dim;
};

/* Attention of one row (one query token) over the heads of one KV head group. */
struct ft_attention_row {
    struct ft_kv_view kv;
    const float *q;      /* [group, head_dim]: normed and rotated queries of the heads that share the KV head */
    float *out;          /* [group, head_dim] */
    const float *sinks;  /* [group] or NULL */
    const uint32_t *blocks; /* sparse: ascending block numbers visible besides the tail, or NULL = all */
    uint32_t block_count, block_tokens; /* a block covers tokens [b * block_tokens, +block_tokens) */
    uint32_t tail_begin; /* sparse: tokens [tail_begin, position] are visible too; dense: first visible token */
    uint32_t position;   /* of the query; keys 0..position exist */
    uint32_t kv_head, group;
    float scale;
};

/* Gated delta rule over consecutive rows of one sequence, for value heads [head_begin, head_end).
 * qkv rows are the convolved and activated q|k|v channels; q, k not yet normalised. */
struct ft_delta_args {
    const float *qkv;    /* row r at qkv + r * qkv_stride: q [key_heads, key_dim] | k | v [value_heads, value_dim] */
    size_t qkv_stride;
    const float *z, *b, *a; /* row r at + r * gate_stride: z [value_heads, value_dim], b, a [value_heads] */
    size_t z_stride, b_stride, a_stride;
    const float *a_log, *dt_bias, *norm; /* [value_heads], [value_heads], [value_dim] */
    float *state;        /* [value_heads, key_dim, value_dim], read and written for the given heads */
    float *out;          /* row r at out + r * out_stride: [value_heads, value_dim] */
    size_t out_stride;
    uint32_t rows, head_begin, head_end;
    uint32_t key_heads, value_heads, key_dim, value_dim;
    float eps;
    enum ft_activation gate; /* SILU or SIGMOID */
};

struct ft_sampling {
    float temperature;        /* <= 0: greedy */
    uint32_t top_k;           /* 0 = off */
    float top_p;              /* >= 1 = off */
    float min_p;              /* <= 0 = off */
    float repetition_penalty; /* 1 = off; applied to logits of tokens in `recent` (positive divided, negative multiplied) */
    uint64_t seed;
};

struct ft_kernels {
    enum ft_isa isa;

    /* y[r][o] = sum_i W[o][i] x[r][i] (+ bias[o]) for o in [begin, end); y row r at y + r * y_stride, index o. */
    void (*matmul)(const struct ft_matrix *w, uint32_t begin, uint32_t end, struct ft_rows x, const float *bias,
                   float *y, size_t y_stride);
    /* h[r][i] = act(gate_i . x_r (+b), up_i . x_r (+b)) for i in [begin, end) of the expert's width. */
    void (*expert_up)(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows x, float *h,
                      size_t h_stride);
    /* y[out_index ? out_index[r] : r][o] = down_o . h_r (+b) for o in [begin, end) of hidden. */
    void (*expert_down)(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows h,
                        const uint32_t *out_index, float *y, size_t y_stride);
    /* One row of a matrix as f32: y[i] = W[row][i] (embedding). */
    void (*row_decode)(const struct ft_matrix *w, uint32_t row, float *y);
    /* y = x / sqrt(mean(x^2) + eps) * (plus_one ? 1 + w : w), over each of `groups` groups of n elements; x == y allowed;
     * w [groups * n] when w_per_group, else [n] shared by all groups. */
    void (*rms_norm)(const float *x, const float *w, bool plus_one, bool w_per_group, float eps, uint32_t groups,
                     uint32_t n, float *y);
    /* Hyper-connection mix for hidden range [begin, end): x[h] = mean_i sigmoid(W_up[i H + h] . t) u[i H + h];
     * t [lowrank], u [n H]; x row r at x + r * x_stride, index h. */
    void (*mix_up)(const struct ft_matrix *up, uint32_t hc_count, uint32_t hidden, uint32_t begin, uint32_t end,
                   const float *t, size_t t_stride, const float *u, size_t u_stride, uint32_t rows, float *x,
                   size_t x_stride);
    /* Rotates pairs (i, i + half) of x[0 .. 2 half) in place; cs [half] cos, sn [half] sin (scaled). */
    void (*rotate)(float *x, const float *cs, const float *sn, uint32_t half);
    void (*attention_row)(const struct ft_attention_row *args);
    /* Indexer scores of blocks [0, block_count) for one query: out[b] = sum_h relu(q_h . key_b) / sqrt(dim).
     * key_b at pages[b / page_blocks] + offset + (b % page_blocks) * dim. */
    void (*index_scores)(const float *q, uint32_t head_count, uint32_t dim, float *const *pages, uint64_t offset,
                         uint32_t page_blocks, uint32_t block_count, float *out);
    /* Causal depthwise convolution + SiLU over consecutive rows of one sequence, channels [begin, end).
     * x row r at x + r * x_stride (index = channel). tail [(taps - 1) * dilation, channels] holds the rows before the
     * first one, oldest first, and is updated. w [channels, taps]; tap taps-1 is the current row. y may equal x only if
     * the strides are equal. */
    void (*conv_silu)(const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end, uint32_t channels,
                      const float *w, uint32_t taps, uint32_t dilation, float *tail, float *y, size_t y_stride);
    void (*delta_rule)(const struct ft_delta_args *args);
    /* y[i] += s * x[i] */
    void (*axpy)(float s, const float *x, float *y, uint32_t n);
    float (*dot)(const float *a, const float *b, uint32_t n);
};

/* Picks the fastest version with f32 accuracy that this core has, or `wanted` (a name of ft_isa_name; NULL or "" =
 * automatic). FT_UNSUPPORTED names the ISA and what the core has; FT_USAGE: nobody has that name. */
int ft_kernels_init(struct ft_kernels *kernels, const char *wanted, struct ft_error *err);
const char *ft_isa_name(enum ft_isa isa);
bool ft_isa_is_available(enum ft_isa isa);
bool ft_isa_is_int8(enum ft_isa isa); /* activations of packed e2m1 are rounded to int8 */
bool ft_isa_rounds(enum ft_isa isa);  /* ... or to 16 bits: less exact than f32, only for who asks */
/* The largest whole number that stands for the largest of 16 activations of packed e2m1: 127 for int8. */
double ft_isa_fixed_steps(enum ft_isa isa);
/* Whether versions with int8 activations use them for experts of this kind. Not for gpt_oss's clamped gates, which magnify
 * rounding: one of its fixtures departed by 2.8e-2 of the largest logit, with exact sums too, and with 16 bits by 2.7e-4. */
static inline bool ft_activation_takes_int8(enum ft_activation activation)
{
    return activation != FT_ACTIVATION_SWIGLU_OSS;
}

/* ---- ops that are cheap and have one version (written for the compiler to vectorise) ---- */

/* Top k of E logits: ids in descending order of score (ties to the lower id), and their weights:
 * softmax over all E then optionally renormalised, or softmax over the chosen k. NaN logits: returns false. */
bool ft_router_topk(const float *logits, uint32_t expert_count, uint32_t k, bool renormalise, bool softmax_chosen,
                    uint32_t *ids, float *weights);
/* The k highest of n scores, ties to the lower index, written in ascending index order. k <= n. scratch [n]. */
void ft_select_topk(const float *scores, uint32_t n, uint32_t k, uint32_t *out, uint32_t *scratch);
/* PLE gate of one row: K, Q already normed, n streams of H: u_i = <K_i, Q_i> / sqrt(H),
 * a_i = sigmoid(sign(u) sqrt(max(|u|, 1e-6))), out_i = a_i V. */
void ft_ple_gate(const float *k, const float *q, const float *v, uint32_t hc_count, uint32_t hidden, float *out);
/* One PLE row of FP8 (e4m3 * scale) or BF16 (scale ignored) to f32. */
void ft_ple_decode(enum ft_dtype dtype, float scale, const void *row, uint32_t width, float *out);

/*
 * Picks a token. logits [vocab] is overwritten (used as scratch). recent [recent_count]: prompt and generated tokens.
 * The random number depends on (seed, position) alone, so the choice is the same alone or batched.
 * index_scratch [vocab]. Returns FT_NONE when no logit is finite.
 */
uint32_t ft_sample_token(float *logits, uint32_t vocab, const struct ft_sampling *sampling, const uint32_t *recent,
                         uint32_t recent_count, uint64_t position, uint32_t *index_scratch);

float ft_bf16_to_f32(uint16_t bits);
uint16_t ft_f32_to_bf16(float value);      /* round to nearest even */
float ft_f16_to_f32(uint16_t bits);
float ft_e4m3_to_f32(uint8_t bits);        /* 0x7f, 0xff: NaN */
float ft_e8m0_to_f32(uint8_t bits);        /* 2^(bits - 127); 255: NaN */
float ft_e2m1_to_f32(uint8_t nibble);
static inline float ft_sigmoid(float x)
{
    return 1.0f / (1.0f + __builtin_expf(-x));
}
static inline float ft_silu(float x)
{
    return x * ft_sigmoid(x);
}

#endif
