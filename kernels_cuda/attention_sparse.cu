/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of many rows each of which sees tokens of its own choice (sparse layers beyond their budget), on the matrix
 * units.
 *
 * A block takes one row and up to 16 query heads that share a KV head: they are the rows of the products. Tokens come
 * 128 at a time, in two phases. Scores: a warp takes 32 of the tokens, all dims. Values: a warp takes all tokens, a
 * quarter of the dims. K and V go from the pages straight to registers, whole lines at a time: the matrix unit does not
 * care which dims (which tokens) meet, as long as both operands agree, so a lane's 16 or 32 bytes are dims of the same
 * product. Queries and keys are f16 there (norms keep them small), weights and values bf16, sums f32; the softmax is
 * online. The order of a row's sums depends on what it sees alone.
 */
#include "kernels_cuda/attention.cuh"

namespace
{

constexpr unsigned WARPS = 4, THREADS = WARPS * 32, KEYS = 128, SHARE = KEYS / WARPS, HEADS = 16;
constexpr unsigned PITCH = KEYS / 2 + 4; /* words of a head's weights: rows fall into different banks */

struct sparse_args {
    ft_attend_args a;
    uint32_t chunks, heads; /* of query heads per KV head; of a chunk */
};

/* Where the keys of the tile that begins at token `begin` lie: one thread a token; those from the end on repeat the last
 * one, and are masked. */
__device__ __forceinline__ const float *key_of(const ft_attend_args &a, const ft_visible &v,
                                               uint32_t sequence, uint32_t kv_head, uint32_t begin)
{
    uint32_t token = ft_visible_token(v, min(begin + threadIdx.x, v.count - 1));
    return ft_attention_key(a, sequence, kv_head, token);
}

/*
 * Queries as fragments: word e of lane (g, t) in step 2 i + half holds dims 32 i + 8 t + 4 half + (e / 2) * 2 .. + 1 of
 * head g + 8 (e % 2).
 */
template <int D>
__device__ __forceinline__ void load_queries(const ft_attend_args &a, uint32_t row, uint32_t head0,
                                             uint32_t heads, uint32_t *q)
{
    for (uint32_t i = threadIdx.x; i < D / 16 * 32 * 4; i += THREADS) {
        uint32_t step = i / 128, lane = i / 4 % 32, e = i % 4, head = lane / 4 + 8 * (e % 2);
        uint32_t dim = step / 2 * 32 + lane % 4 * 8 + step % 2 * 4 + e / 2 * 2;
        float2 x = make_float2(0, 0);
        if (head < heads)
            x = *(const float2 *)(a.query + ((uint64_t)row * a.heads + head0 + head) * D + dim);
        q[i] = ft_to_f16_pair(x.x, x.y);
    }
}

/* s[n] = scores of keys 8 n .. + 7 of the warp's 32. */
template <int D>
__device__ __forceinline__ void score(const uint32_t *q, const float *const *keys, unsigned lane,
                                      float (&s)[SHARE / 8][4])
{
    const float *from[SHARE / 8];
#pragma unroll
    for (unsigned n = 0; n < SHARE / 8; n++) {
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
        from[n] = keys[8 * n + lane / 4] + lane % 4 * 8;
    }
#pragma unroll 2
    for (unsigned i = 0; i < D / 32; i++) {
        float4 k[SHARE / 8][2];
#pragma unroll
        for (unsigned n = 0; n < SHARE / 8; n++) {
            k[n][0] = *(const float4 *)(from[n] + 32 * i);
            k[n][1] = *(const float4 *)(from[n] + 32 * i + 4);
        }
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            uint4 x = *(const uint4 *)(q + ((2 * i + half) * 32 + lane) * 4);
            uint32_t a[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (unsigned n = 0; n < SHARE / 8; n++) {
                float4 v = k[n][half];
                uint32_t b[2] = {ft_to_f16_pair(v.x, v.y), ft_to_f16_pair(v.z, v.w)};
                ft_mma_f16(s[n], a, b);
            }
        }
    }
}

/* o += weights [16 heads, KEYS] times a quarter of the dims. Column c of fragment (m, j) is dim 32 m + 4 c + j. */
template <int D>
__device__ __forceinline__ void add_values(const uint32_t *weights, const float *const *keys,
                                           uint64_t to_value, unsigned lane, float (&o)[D / 32][4])
{
    unsigned g = lane / 4, t = lane % 4;
#pragma unroll 2
    for (unsigned step = 0; step < KEYS / 16; step++) {
        const uint32_t *w = weights + g * PITCH + step * 8 + t;
        uint32_t a[4] = {w[0], w[8 * PITCH], w[4], w[8 * PITCH + 4]};
        const float *from[4];
#pragma unroll
        for (unsigned e = 0; e < 4; e++)
            from[e] = keys[step * 16 + 2 * t + (e & 1) + (e >> 1) * 8] + to_value + 4 * g;
#pragma unroll
        for (unsigned m = 0; m < D / WARPS / 32; m++) {
            float4 v[4];
#pragma unroll
            for (unsigned e = 0; e < 4; e++)
                v[e] = *(const float4 *)(from[e] + 32 * m);
            uint32_t b[4][2] = {{ft_to_bf16_pair(v[0].x, v[1].x), ft_to_bf16_pair(v[2].x, v[3].x)},
                                {ft_to_bf16_pair(v[0].y, v[1].y), ft_to_bf16_pair(v[2].y, v[3].y)},
                                {ft_to_bf16_pair(v[0].z, v[1].z), ft_to_bf16_pair(v[2].z, v[3].z)},
                                {ft_to_bf16_pair(v[0].w, v[1].w), ft_to_bf16_pair(v[2].w, v[3].w)}};
#pragma unroll
            for (unsigned j = 0; j < 4; j++)
                ft_mma_bf16(o[m * 4 + j], a, b[j]);
        }
    }
}

/* What a block's warps tell each other. */
struct shared_row {
    const float *keys[2][KEYS];
    float top[2][WARPS][HEADS], sum[WARPS][HEADS];
    uint32_t weights[2][HEADS * PITCH];
};

/* Grid (rows, KV heads * chunks). Dynamic shared memory: queries, D / 16 steps of 128 words. */
template <int D> __global__ void __launch_bounds__(THREADS, 4) attend_sparse(sparse_args args)
{
    if (!FT_ATTENTION_HAS_MATRIX_UNIT)
        return;
    FT_SHARED_DYNAMIC(uint32_t, q);
    FT_SHARED(struct shared_row, shared, 1);
    const ft_attend_args &a = args.a;
    uint32_t row = blockIdx.x, kv_head = blockIdx.y / args.chunks, chunk = blockIdx.y % args.chunks;
    uint32_t first = chunk * args.heads, heads = min(args.heads, a.group - first),
             head0 = kv_head * a.group + first;
    uint32_t sequence = a.row_sequence[row];
    unsigned warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    ft_visible v = ft_visible_of(a, row);
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, o[D / 32][4];
#pragma unroll
    for (unsigned n = 0; n < D / 32; n++)
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0;
    load_queries<D>(a, row, head0, heads, q);
    shared->keys[0][threadIdx.x] = key_of(a, v, sequence, kv_head, 0);
    __syncthreads();
    for (uint32_t at = 0, turn = 0; at < v.count; at += KEYS, turn ^= 1) {
        float s[SHARE / 8][4], top[2] = {-INFINITY, -INFINITY}, factor[2];
        score<D>(q, shared->keys[turn] + warp * SHARE, lane, s);
#pragma unroll
        for (unsigned n = 0; n < SHARE / 8; n++)
#pragma unroll
            for (unsigned c = 0; c < 4; c++) {
                bool seen = at + warp * SHARE + 8 * n + 2 * t + (c & 1) < v.count;
                s[n][c] = seen ? s[n][c] * a.scale : -INFINITY;
                top[c >> 1] = fmaxf(top[c >> 1], s[n][c]);
            }
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
            top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
            if (t == 0)
                shared->top[turn][warp][g + 8 * half] = top[half];
        }
        __syncthreads(); /* every warp is done with the tile before */
        if (at + KEYS < v.count)
            shared->keys[turn ^ 1][threadIdx.x] = key_of(a, v, sequence, kv_head, at + KEYS);
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            float now = max[half], added = 0;
#pragma unroll
            for (unsigned w = 0; w < WARPS; w++)
                now = fmaxf(now, shared->top[turn][w][g + 8 * half]);
            float base = now == -INFINITY ? 0.0f : now; /* nothing but -inf: weights 0, not NaN */
            factor[half] = expf(max[half] - base);
            uint32_t *to = shared->weights[turn] + (g + 8 * half) * PITCH + warp * (SHARE / 2) + t;
#pragma unroll
            for (unsigned n = 0; n < SHARE / 8; n++) {
                float x = expf(s[n][2 * half] - base), y = expf(s[n][2 * half + 1] - base);
                added += x + y;
                to[4 * n] = ft_to_bf16_pair(x, y);
            }
            sum[half] = fmaf(sum[half], factor[half], added);
            max[half] = now;
        }
        __syncthreads();
#pragma unroll
        for (unsigned n = 0; n < D / 32; n++) {
            o[n][0] *= factor[0];
            o[n][1] *= factor[0];
            o[n][2] *= factor[1];
            o[n][3] *= factor[1];
        }
        add_values<D>(shared->weights[turn], shared->keys[turn], a.v_offset - a.k_offset + warp * (D / WARPS),
                      lane, o);
    }
#pragma unroll
    for (unsigned half = 0; half < 2; half++) {
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
        if (t == 0)
            shared->sum[warp][g + 8 * half] = sum[half];
    }
    __syncthreads();
#pragma unroll
    for (unsigned half = 0; half < 2; half++) {
        uint32_t i = g + 8 * half, head = head0 + i;
        if (i >= heads)
            continue;
        float weight = shared->sum[0][i] + shared->sum[1][i] + shared->sum[2][i] + shared->sum[3][i];
        float scale = ft_attention_scale(a, head, max[half], weight);
        float *out = a.out + row * a.out_stride + (uint64_t)head * D;
#pragma unroll
        for (unsigned m = 0; m < D / WARPS / 32; m++)
#pragma unroll
            for (unsigned c = 0; c < 2; c++) {
                uint32_t dim = warp * (D / WARPS) + 32 * m + 8 * t + 4 * c;
                float y[4];
#pragma unroll
                for (unsigned j = 0; j < 4; j++) {
                    y[j] = o[m * 4 + j][2 * half + c] * scale;
                    if (a.gate)
                        y[j] *= ft_attention_gate(a, row, head, dim + j);
                }
                *(float4 *)(out + dim) = make_float4(y[0], y[1], y[2], y[3]);
            }
    }
}

template <int D> int launch(const sparse_args &args, void *stream)
{
    return FT_LAUNCH(attend_sparse<D>, dim3(args.a.rows, args.a.kv_heads * args.chunks), dim3(THREADS),
                     D / 16 * 128 * 4, stream, args);
}

} // namespace

int ft_attention_sparse(const struct ft_attend_args *a, void *stream)
{
    sparse_args args = {*a, (a->group + HEADS - 1) / HEADS, 0};
    args.heads = (a->group + args.chunks - 1) / args.chunks;
    return a->dim == 128 ? launch<128>(args, stream) : launch<256>(args, stream);
}
