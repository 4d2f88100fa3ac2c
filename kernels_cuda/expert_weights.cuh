/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Expert weights on their way into the matrix units: where the three matrices of a blob lie, and how 16 bytes
 * of bf16 and mxfp4 become pairs of bf16 (nvfp4 and fp8 become f16: expert_tile.cuh). Decode (expert.cu) and
 * prefill (expert_gemm.cu) share it.
 *
 * Pairs come in the order that costs fewest instructions; activations are laid out alike. Four pairs are always
 * eight consecutive columns:
 *
 *   bf16, e4m3   (0, 1) (2, 3) (4, 5) (6, 7)
 *   e2m1         (0, 4) (1, 5) (2, 6) (3, 7)
 */
#ifndef FT_KERNELS_CUDA_EXPERT_WEIGHTS_CUH
#define FT_KERNELS_CUDA_EXPERT_WEIGHTS_CUH

#include "kernels_cuda/dense.cuh"

/* How weights are read. SLOW: element by element, shapes that 16-byte loads do not fit. */
enum ft_expert_kind { FT_EXPERT_BF16, FT_EXPERT_FP8, FT_EXPERT_NVFP4, FT_EXPERT_MXFP4, FT_EXPERT_SLOW };

/* One matrix of a blob, as a kernel wants it. */
struct ft_expert_matrix {
    const char *data, *scale;
    uint32_t out, in;
    float factor; /* of every sum */
};

/* Columns in 16 bytes. */
template <int kind> static __host__ __device__ __forceinline__ constexpr uint32_t ft_expert_run()
{
    return kind == FT_EXPERT_BF16 || kind == FT_EXPERT_SLOW ? 8u : kind == FT_EXPERT_FP8 ? 16u : 32u;
}
/* Second member of the pair that begins at its first one. */
template <int kind> static __device__ __forceinline__ constexpr uint32_t ft_expert_step()
{
    return kind == FT_EXPERT_NVFP4 || kind == FT_EXPERT_MXFP4 ? 4u : 1u;
}
/* First member of pair n of eight columns. */
template <int kind> static __device__ __forceinline__ constexpr uint32_t ft_expert_first(uint32_t n)
{
    return ft_expert_step<kind>() == 4 ? n : 2 * n;
}

/* fp4 pairs carry 2^-63: e2m1 bits read as bf16 are too small by 2^126, and no scale may overflow on the way.
 * Scales of mxfp4 beyond 2^64 become infinity. */
#define FT_EXPERT_FP4_FACTOR 0x1p63f

/* A block's fp8 scale; e is the row, k a column. */
static __device__ __forceinline__ float ft_expert_block_scale(const struct ft_expert_layout *layout,
                                                              const char *scale, uint32_t in, uint32_t row,
                                                              uint32_t k)
{
    uint32_t blocks = (in + layout->block_in - 1) / layout->block_in;
    return __ldg((const float *)scale + (uint64_t)(row / layout->block_out) * blocks + k / layout->block_in);
}

/* which: 0 gate, 1 up, 2 down. */
template <int kind>
static __device__ __forceinline__ struct ft_expert_matrix
ft_expert_matrix_of(const struct ft_expert_layout *layout, const char *blob, int which)
{
    struct ft_expert_matrix m;
    m.data = blob + (which == 0 ? layout->gate_offset : which == 1 ? layout->up_offset : layout->down_offset);
    m.scale = blob + (which == 0   ? layout->gate_scale_offset
                      : which == 1 ? layout->up_scale_offset
                                   : layout->down_scale_offset);
    m.out = which == 2 ? layout->hidden : layout->width;
    m.in = which == 2 ? layout->width : layout->hidden;
    m.factor = kind == FT_EXPERT_NVFP4 || kind == FT_EXPERT_MXFP4 ? FT_EXPERT_FP4_FACTOR : 1.0f;
    if (kind == FT_EXPERT_NVFP4)
        m.factor *= ((const float *)(blob + layout->global_offset))[which];
    return m;
}

/* The same as a view for ft_dense_element. */
static __device__ __forceinline__ struct ft_matrix
ft_expert_view_device(const struct ft_expert_layout *layout, const char *blob, int which)
{
    struct ft_expert_matrix m = ft_expert_matrix_of<FT_EXPERT_SLOW>(layout, blob, which);
    struct ft_matrix w;
    w.data = m.data;
    w.scale = m.scale;
    w.out = m.out;
    w.in = m.in;
    w.format = layout->format;
    w.global =
        layout->global_offset == FT_NONE ? 1.0f : ((const float *)(blob + layout->global_offset))[which];
    w.block_out = layout->block_out;
    w.block_in = layout->block_in;
    return w;
}

/* The bias of gate, up or down; NULL without. */
static __device__ __forceinline__ const float *ft_expert_bias(const struct ft_expert_layout *layout,
                                                              const char *blob, int which)
{
    uint32_t at = which == 0   ? layout->gate_bias_offset
                  : which == 1 ? layout->up_bias_offset
                               : layout->down_bias_offset;
    return at == FT_NONE ? NULL : (const float *)(blob + at);
}

/* gate and up of one hidden unit, biases added -> its value. Written so that NaN passes through. */
static __device__ __forceinline__ float ft_expert_activate(const struct ft_expert_layout *layout, float gate,
                                                           float up)
{
    if (layout->activation == FT_ACTIVATION_SWIGLU_OSS) {
        float limit = layout->limit;
        if (limit > 0) {
            gate = gate > limit ? limit : gate;
            up = up > limit ? limit : up < -limit ? -limit : up;
        }
        return (up + 1.0f) * gate * ft_sigmoid_device(1.702f * gate);
    }
    if (layout->activation == FT_ACTIVATION_SIGMOID)
        return ft_sigmoid_device(gate) * up;
    return ft_silu_device(gate) * up;
}

/* ---- 16 bytes to pairs ---- */

/* 16 bytes of a row and the scales that go with them. */
struct ft_expert_raw {
    uint4 data;
    uint32_t scale; /* nvfp4: two e4m3; mxfp4: one e8m0; fp8: bits of the f32 of its block */
};

/* Issues the loads of the run that begins at column k; what lies behind the row is zero. */
template <int kind>
static __device__ __forceinline__ struct ft_expert_raw ft_expert_load(const struct ft_expert_layout *layout,
                                                                      const struct ft_expert_matrix *m,
                                                                      uint32_t row, uint32_t k)
{
    struct ft_expert_raw raw = {make_uint4(0, 0, 0, 0), 0};
    constexpr uint32_t run = ft_expert_run<kind>();
    if (k >= m->in)
        return raw;
    raw.data = __ldcs((const uint4 *)m->data + (uint64_t)row * (m->in / run) + k / run);
    if (kind == FT_EXPERT_NVFP4)
        raw.scale = __ldg((const uint16_t *)m->scale + (uint64_t)row * (m->in / 32) + k / 32);
    if (kind == FT_EXPERT_MXFP4)
        raw.scale = __ldg((const uint8_t *)m->scale + (uint64_t)row * (m->in / 32) + k / 32);
    if (kind == FT_EXPERT_FP8)
        raw.scale = __float_as_uint(ft_expert_block_scale(layout, m->scale, m->in, row, k));
    return raw;
}

/* An e8m0 scale as a bf16 pair, times 2^63. */
static __device__ __forceinline__ uint32_t ft_expert_scale_pair(uint32_t scale)
{
    uint32_t bits = scale == 255 ? 0x7fffu : min(scale + 63u, 255u) << 7;
    return bits | bits << 16;
}

/* e2m1: nibbles n and n + 4 of the word: sign to bit 15, magnitude to bits 8..6 of either half. */
static __device__ __forceinline__ uint32_t ft_expert_fp4_bits(uint32_t word, uint32_t n)
{
    uint32_t sign = word << (12 - 4 * n), magnitude = n < 2 ? word << (6 - 4 * n) : word >> (4 * n - 6);
    return (sign & 0x80008000u) | (magnitude & 0x01c001c0u);
}
static __device__ __forceinline__ uint32_t ft_expert_word(uint4 v, uint32_t i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* Pairs 4 part .. 4 part + 3 of a run: columns 8 part .. 8 part + 7. */
template <int kind>
static __device__ __forceinline__ void ft_expert_pairs(const struct ft_expert_raw *raw, uint32_t part,
                                                       uint32_t pair[4])
{
    static_assert(kind == FT_EXPERT_BF16 || kind == FT_EXPERT_MXFP4, "the others become f16");
    if constexpr (kind == FT_EXPERT_BF16) {
        pair[0] = raw->data.x, pair[1] = raw->data.y, pair[2] = raw->data.z, pair[3] = raw->data.w;
    } else {
        uint32_t word = ft_expert_word(raw->data, part), scale = ft_expert_scale_pair(raw->scale);
#pragma unroll
        for (uint32_t n = 0; n < 4; n++)
            pair[n] = ft_mul_bf16_pair(ft_expert_fp4_bits(word, n), scale);
    }
}

/* ---- host: which form fits ---- */

static inline bool ft_expert_row_fits(enum ft_format format, uint32_t in, uint32_t block_in)
{
    switch (format) {
    case FT_FORMAT_BF16:
        return in % 8 == 0;
    case FT_FORMAT_FP8_BLOCK: /* a unit of 64 columns lies inside one block of scales */
        return in % 16 == 0 && (block_in % 64 == 0 || block_in >= in);
    case FT_FORMAT_NVFP4:
    case FT_FORMAT_MXFP4:
    case FT_FORMAT_DS_FP4:
        return in % 32 == 0;
    default:
        return false;
    }
}

static inline enum ft_expert_kind ft_expert_kind_of(const struct ft_expert_layout *layout)
{
    if (!ft_expert_row_fits(layout->format, layout->hidden, layout->block_in) ||
        !ft_expert_row_fits(layout->format, layout->width, layout->block_in))
        return FT_EXPERT_SLOW;
    return layout->format == FT_FORMAT_BF16        ? FT_EXPERT_BF16
           : layout->format == FT_FORMAT_FP8_BLOCK ? FT_EXPERT_FP8
           : layout->format == FT_FORMAT_NVFP4     ? FT_EXPERT_NVFP4
                                                   : FT_EXPERT_MXFP4;
}

#endif
