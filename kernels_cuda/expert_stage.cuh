/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Activations of a decode step on their way into the matrix units: each is the sum of three pieces, which
 * take a column each. route writes those of x to the workspace, once for all experts (router.cu); down makes
 * those of h in shared memory (expert.cu). Either way a row is
 *
 *   [unit] { [run / 8][3 pieces][4 lanes t][4 pairs] u32, f16: power of two, 3 words unused }
 *
 * padded to an odd number of half bank rows (64 bytes): pieces of neighbouring rows fall into different
 * banks; with units of 4 runs, a run being the columns of 16 bytes of weights. Two ways:
 *
 *   f16 (nvfp4, fp8)    e2m1 times an e4m3 scale has 6 significant bits between 2^-10 and 2688, e4m3 4 between
 *                       2^-9 and 448: f16 holds them, and few instructions make them. f16 reaches less far than
 *                       an activation may, so those of a unit share a power of two that brings the largest below
 *                       2^15; pieces are 11 bits, the second 2^11 and the third 2^22 times as large as they
 *                       count. What is lost lies 2^-60 below the unit's largest. A unit's sum is multiplied by
 *                       its power of two.
 *   bf16 (bf16, mxfp4)  weights in bf16 (expert_weights.cuh), pieces of 8 bits: exactly the activation.
 */
#ifndef FT_KERNELS_CUDA_EXPERT_STAGE_CUH
#define FT_KERNELS_CUDA_EXPERT_STAGE_CUH

#include "kernels_cuda/expert_weights.cuh"

template <int kind> static __host__ __device__ __forceinline__ constexpr bool ft_stage_is_f16()
{
    return kind == FT_EXPERT_NVFP4 || kind == FT_EXPERT_FP8;
}
static __host__ __device__ __forceinline__ uint32_t ft_stage_units(uint32_t in, uint32_t run)
{
    return (in + 4 * run - 1) / (4 * run);
}
/* u32 of a unit, the last four of which begin with the power of two (f16). */
template <int kind> static __host__ __device__ __forceinline__ constexpr uint32_t ft_stage_unit_words()
{
    return ft_expert_run<kind>() / 8 * 48 + (ft_stage_is_f16<kind>() ? 4 : 0);
}
/* u32 of a row: never more than ft_workspace_staged_words. */
template <int kind> static __host__ __device__ __forceinline__ uint32_t ft_stage_words(uint32_t in)
{
    return (ft_stage_units(in, ft_expert_run<kind>()) * ft_stage_unit_words<kind>() + 15) / 32 * 32 + 16;
}

/* The three bf16 pieces of eight columns, pair by pair. */
template <int kind>
static __device__ __forceinline__ void ft_stage_split_bf16(uint32_t out[3][4], const float v[8])
{
#pragma unroll
    for (uint32_t n = 0; n < 4; n++) {
        uint32_t low[3], high[3];
        ft_dense_split(v[ft_expert_first<kind>(n)], low);
        ft_dense_split(v[ft_expert_first<kind>(n) + ft_expert_step<kind>()], high);
#pragma unroll
        for (uint32_t p = 0; p < 3; p++)
            out[p][n] = __byte_perm(low[p], high[p], 0x7632);
    }
}

/*
 * The three f16 pieces of eight columns. The lanes that hold a unit side by side (run / 2 of them) call it
 * together, with the whole warp. Returns the power of two that the first piece is to be multiplied by: that
 * of the unit's largest, whose exponent is 255 when the unit has an infinity or a NaN: these stand in the
 * first piece alone.
 */
template <int kind>
static __device__ __forceinline__ float ft_stage_split_f16(uint32_t out[3][4], const float v[8])
{
    uint32_t top = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        top = max(top, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int step = (int)ft_expert_run<kind>() / 4; step > 0; step >>= 1)
        top = max(top, __shfl_xor_sync(0xffffffffu, top, step));
    bool finite = top < 0x7f800000u;
    top = max(top >> 23, 37u); /* every power below is a number that f32 has */
    float scale = __uint_as_float((268 - top) << 23);
#pragma unroll
    for (uint32_t n = 0; n < 4; n++) {
        float low = v[ft_expert_first<kind>(n)] * scale,
              high = v[ft_expert_first<kind>(n) + ft_expert_step<kind>()] * scale;
#pragma unroll
        for (uint32_t p = 0; p < 3; p++) {
            out[p][n] = p == 0 || finite ? ft_to_f16_pair(low, high) : 0;
            low = (low - ft_f16_low(out[p][n])) * 0x1p11f;
            high = (high - ft_f16_high(out[p][n])) * 0x1p11f;
        }
    }
    return __uint_as_float((top - 14) << 23);
}

/* A row of x [in] to `to`, by all threads of the block; in: a multiple of 8. */
template <int kind>
static __device__ __forceinline__ void ft_stage_row(uint32_t *to, const float *x, uint32_t in)
{
    constexpr uint32_t run = ft_expert_run<kind>(), parts = run / 8;
    uint32_t units = ft_stage_units(in, run), eights = units * (run / 2);
    for (uint32_t begin = 0; begin < eights; begin += blockDim.x) {
        uint32_t i = begin + threadIdx.x, out[3][4];
        uint32_t unit = i / (run / 2), t = i / parts % 4, part = i % parts;
        float4 low = make_float4(0, 0, 0, 0), high = low;
        if (i * 8 < in) {
            low = __ldcg((const float4 *)x + 2 * i);
            high = __ldcg((const float4 *)x + 2 * i + 1);
        }
        float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if constexpr (ft_stage_is_f16<kind>()) {
            float one = ft_stage_split_f16<kind>(out, v);
            if (i < eights && t + part == 0)
                *(float *)(to + (unit + 1) * ft_stage_unit_words<kind>() - 4) = one;
        } else {
            ft_stage_split_bf16<kind>(out, v);
        }
        if (i < eights)
#pragma unroll
            for (uint32_t p = 0; p < 3; p++)
                *(uint4 *)(to + unit * ft_stage_unit_words<kind>() + (part * 3 + p) * 16 + t * 4) =
                    make_uint4(out[p][0], out[p][1], out[p][2], out[p][3]);
    }
}

#endif
