/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of many rows of one sequence, all of whose visible tokens are a run: causal, with or without a
 * window.
 *
 * A block takes 64 consecutive rows and one head, a warp 16 of the rows. Keys come 32 at a time: K and V are
 * rounded to bf16 on their way to shared memory; scores and the weighted sum run on the matrix unit with f32
 * sums, the softmax is online (as in FlashAttention-2). K lies [key][dim], 16-byte pieces swizzled by the
 * key; V lies in words of two keys [key pair][dim], so that both are read as fragments without bank
 * conflicts. 64 KB of shared memory for heads of 256.
 */
#include "kernels_cuda/attention.cuh"

namespace
{

constexpr uint32_t SM75_SHARED_MAX = 64 * 1024; /* every later one offers more */

constexpr unsigned ROWS = 64, KEYS = 32, WARPS = 4, THREADS = WARPS * 32;

struct tile_args {
    ft_attend_args a;
    uint32_t short_rows;
};

/* The 64 rows of a block: sequence, first row of the tile, rows in it. */
struct tile {
    uint32_t sequence, row, rows;
};

__device__ __forceinline__ tile tile_of(const tile_args &args, uint32_t index)
{
    tile t = {FT_NONE, 0, 0};
    for (uint32_t s = 0; s < args.a.sequences; s++) {
        uint32_t count = args.a.row_count[s], tiles = count > args.short_rows ? (count + ROWS - 1) / ROWS : 0;
        if (index < tiles) {
            t.sequence = s;
            t.row = args.a.first_row[s] + index * ROWS;
            t.rows = min(ROWS, count - index * ROWS);
            break;
        }
        index -= tiles;
    }
    return t;
}

/* Word `word` (two elements) of a row of bf16, its 16-byte pieces swizzled. */
template <int D> __device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t word)
{
    return row * (D / 2) + (((word >> 2) ^ (row & 7)) << 2 | (word & 3));
}
/* Word (key pair, dim) of V. */
template <int D> __device__ __forceinline__ uint32_t value_word(uint32_t pair, uint32_t dim)
{
    return pair * D + (dim ^ (pair & 3) << 3);
}

template <int D>
__device__ __forceinline__ void load_queries(const ft_attend_args &a, const tile &t, uint32_t head,
                                             uint32_t *q)
{
    for (uint32_t i = threadIdx.x; i < ROWS * D / 4; i += THREADS) {
        uint32_t r = i / (D / 4), quad = i % (D / 4);
        float4 x = *(const float4 *)(a.query + ((uint64_t)(t.row + min(r, t.rows - 1)) * a.heads + head) * D +
                                     4 * quad);
        *(uint2 *)(q + swizzled<D>(r, 2 * quad)) =
            make_uint2(ft_to_bf16_pair(x.x, x.y), ft_to_bf16_pair(x.z, x.w));
    }
}

/* Keys [begin, begin + KEYS); those from `end` on repeat the last one: they are masked. */
template <int D>
__device__ __forceinline__ void load_tile(const ft_attend_args &a, uint32_t sequence, uint32_t kv_head,
                                          uint32_t begin, uint32_t end, uint32_t *k, uint32_t *v)
{
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < KEYS * D / 4; i += THREADS) {
        uint32_t key = i / (D / 4), quad = i % (D / 4);
        float4 x =
            *(const float4 *)(ft_attention_key(a, sequence, kv_head, min(begin + key, end - 1)) + 4 * quad);
        *(uint2 *)(k + swizzled<D>(key, 2 * quad)) =
            make_uint2(ft_to_bf16_pair(x.x, x.y), ft_to_bf16_pair(x.z, x.w));
    }
    uint64_t to_value = a.v_offset - a.k_offset;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < KEYS / 2 * D / 4; i += THREADS) {
        uint32_t pair = i / (D / 4), quad = i % (D / 4), token = begin + 2 * pair;
        float4 x = *(const float4 *)(ft_attention_key(a, sequence, kv_head, min(token, end - 1)) + to_value +
                                     4 * quad);
        float4 y = *(const float4 *)(ft_attention_key(a, sequence, kv_head, min(token + 1, end - 1)) +
                                     to_value + 4 * quad);
        *(uint4 *)(v + value_word<D>(pair, 4 * quad)) =
            make_uint4(ft_to_bf16_pair(x.x, y.x), ft_to_bf16_pair(x.y, y.y), ft_to_bf16_pair(x.z, y.z),
                       ft_to_bf16_pair(x.w, y.w));
    }
}

/* Scores of the warp's 16 rows and 32 keys: s[n] = fragment of keys 8 n .. + 7. */
template <int D>
__device__ __forceinline__ void score(const uint32_t *q, const uint32_t *k, unsigned lane,
                                      float (&s)[KEYS / 8][4])
{
    unsigned g = lane >> 2, t = lane & 3, row = (threadIdx.x >> 5) * 16 + g;
#pragma unroll
    for (unsigned n = 0; n < KEYS / 8; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll 4
    for (unsigned step = 0; step < D / 16; step++) {
        uint32_t a[4] = {q[swizzled<D>(row, 8 * step + t)], q[swizzled<D>(row + 8, 8 * step + t)],
                         q[swizzled<D>(row, 8 * step + 4 + t)], q[swizzled<D>(row + 8, 8 * step + 4 + t)]};
#pragma unroll
        for (unsigned n = 0; n < KEYS / 8; n++) {
            uint32_t b[2] = {k[swizzled<D>(8 * n + g, 8 * step + t)],
                             k[swizzled<D>(8 * n + g, 8 * step + 4 + t)]};
            ft_mma_bf16(s[n], a, b);
        }
    }
}

/* Masks, scales and turns the scores of one row (half 0: row g, 1: row g + 8) into weights; returns the
 * factor of the sums so far. All four lanes of a quad hold parts of the row. */
__device__ __forceinline__ float soften(float (&s)[KEYS / 8][4], unsigned half, uint32_t begin,
                                        uint32_t position, uint32_t window, float scale, unsigned t,
                                        float &max, float &sum)
{
    float top = -INFINITY;
#pragma unroll
    for (unsigned n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (unsigned c = 0; c < 2; c++) {
            uint32_t key = begin + 8 * n + 2 * t + c;
            bool seen = key <= position && (!window || key + window > position);
            float &x = s[n][2 * half + c];
            x = seen ? x * scale : -INFINITY;
            top = fmaxf(top, x);
        }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    float now = fmaxf(max, top), base = now == -INFINITY ? 0.0f : now, factor = expf(max - base), added = 0;
#pragma unroll
    for (unsigned n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (unsigned c = 0; c < 2; c++) {
            float &x = s[n][2 * half + c];
            x = expf(x - base);
            added += x;
        }
    added += __shfl_xor_sync(0xffffffffu, added, 1);
    added += __shfl_xor_sync(0xffffffffu, added, 2);
    max = now;
    sum = fmaf(sum, factor, added);
    return factor;
}

/* Grid (tiles of rows, heads). Dynamic shared memory: Q [64, D], K [32, D], V [16, D] words, all bf16. */
template <int D> __global__ void __launch_bounds__(THREADS) attend_tile(tile_args args)
{
    if (!FT_ATTENTION_HAS_MATRIX_UNIT)
        return;
    FT_SHARED_DYNAMIC(uint32_t, q);
    const ft_attend_args &a = args.a;
    uint32_t *k = q + ROWS * D / 2, *v = k + KEYS * D / 2;
    tile t = tile_of(args, gridDim.x - 1 - blockIdx.x); /* the longest ones first */
    if (t.sequence == FT_NONE)
        return;
    uint32_t head = blockIdx.y, kv_head = head / a.group;
    unsigned lane = threadIdx.x & 31, g = lane >> 2, quad = lane & 3, warp_row = (threadIdx.x >> 5) * 16;
    uint32_t first = a.position[t.row], end = first + t.rows; /* tokens that the last row sees */
    uint32_t begin = a.window && first + 1 > a.window ? (first + 1 - a.window) / KEYS * KEYS : 0;
    uint32_t position[2] = {first + min(warp_row + g, t.rows - 1), first + min(warp_row + g + 8, t.rows - 1)};
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, o[D / 8][4];
#pragma unroll
    for (unsigned n = 0; n < D / 8; n++)
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0;
    load_queries<D>(a, t, head, q);
    for (uint32_t at = begin; at < end; at += KEYS) {
        load_tile<D>(a, t.sequence, kv_head, at, end, k, v);
        __syncthreads();
        float s[KEYS / 8][4];
        score<D>(q, k, lane, s);
        float factor[2];
#pragma unroll
        for (unsigned half = 0; half < 2; half++)
            factor[half] = soften(s, half, at, position[half], a.window, a.scale, quad, max[half], sum[half]);
#pragma unroll
        for (unsigned n = 0; n < D / 8; n++) {
            o[n][0] *= factor[0];
            o[n][1] *= factor[0];
            o[n][2] *= factor[1];
            o[n][3] *= factor[1];
        }
#pragma unroll
        for (unsigned step = 0; step < KEYS / 16; step++) {
            uint32_t p[4] = {ft_to_bf16_pair(s[2 * step][0], s[2 * step][1]),
                             ft_to_bf16_pair(s[2 * step][2], s[2 * step][3]),
                             ft_to_bf16_pair(s[2 * step + 1][0], s[2 * step + 1][1]),
                             ft_to_bf16_pair(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
            for (unsigned n = 0; n < D / 8; n++) {
                uint32_t b[2] = {v[value_word<D>(8 * step + quad, 8 * n + g)],
                                 v[value_word<D>(8 * step + 4 + quad, 8 * n + g)]};
                ft_mma_bf16(o[n], p, b);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (unsigned half = 0; half < 2; half++) {
        uint32_t i = warp_row + g + 8 * half, row = t.row + i;
        if (i >= t.rows)
            continue;
        float scale = ft_attention_scale(a, head, max[half], sum[half]);
        float *out = a.out + row * a.out_stride + (uint64_t)head * D;
#pragma unroll
        for (unsigned n = 0; n < D / 8; n++) {
            uint32_t dim = 8 * n + 2 * quad;
            float x = o[n][2 * half] * scale, y = o[n][2 * half + 1] * scale;
            if (a.gate) {
                x *= ft_attention_gate(a, row, head, dim);
                y *= ft_attention_gate(a, row, head, dim + 1);
            }
            *(float2 *)(out + dim) = make_float2(x, y);
        }
    }
}

template <int D> int launch(const tile_args &args, void *stream)
{
    size_t shared = (ROWS + 2 * KEYS) * D * 2;
    dim3 grid((args.a.rows + ROWS - 1) / ROWS + args.a.sequences - 1, args.a.heads);
    int status = shared > 48 * 1024 ? FT_SHARED_LIMIT(attend_tile<D>, shared) : 0;
    return status ? status : FT_LAUNCH(attend_tile<D>, grid, dim3(THREADS), shared, stream, args);
}

} // namespace

bool ft_attention_tiled_takes(uint32_t dim)
{
    return (dim == 64 || dim == 128 || dim == 256) && ft_shared_max() > SM75_SHARED_MAX;
}

int ft_attention_tiled(const struct ft_attend_args *a, uint32_t short_rows, void *stream)
{
    tile_args args = {*a, short_rows};
    if (a->dim == 64)
        return launch<64>(args, stream);
    if (a->dim == 128)
        return launch<128>(args, stream);
    return launch<256>(args, stream);
}
