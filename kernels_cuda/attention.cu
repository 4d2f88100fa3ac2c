/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of single rows over the paged context: the decode form, and what no other form takes.
 *
 * A block takes one split of one row's visible tokens for up to 16 query heads that share a KV head: K and V
 * are read once for all of them. Tiles of 64 tokens: scores (8 lanes a token, two tokens at once), softmax
 * update by one warp a head, then the weighted sum of V (a thread owns four dims of every head). Splits write
 * unnormalised sums with their maximum and weight; the row's last block, or a second kernel where splits are
 * many, merges them in ascending order, with the same arithmetic either way. Splits: attention.cuh. Online
 * softmax as in Milakov and Gimelshein (2018); splits as in flash-decoding.
 */
#include "kernels_cuda/attention.cuh"

namespace
{

constexpr unsigned THREADS = 256, WARPS = THREADS / 32, TILE = FT_ATTENTION_TILE, DIM_MAX = 256;
constexpr unsigned MERGE_INLINE = 36; /* most splits that the last block merges itself */
constexpr unsigned COUNTERS = 64, RED_HEADS = 4;

struct row_args {
    ft_attend_args a;
    uint32_t chunks;      /* of heads per KV head */
    uint32_t short_rows;  /* 0: z of the grid = row; else z = sequence * short_rows + place, longer sequences
                             left out */
    uint32_t split_limit; /* splits a row takes at most */
    float *partial;       /* [z, heads, split_limit, dim] */
    float2 *weight;       /* [z, heads, split_limit]: maximum, sum of weights */
    uint32_t *counters;   /* NULL: merged by the second kernel */
};

/* Row of a z of the grid, or FT_NONE. */
__device__ __forceinline__ uint32_t row_of(const row_args &args, uint32_t z)
{
    if (!args.short_rows)
        return z;
    uint32_t s = z / args.short_rows, i = z % args.short_rows, count = args.a.row_count[s];
    return count <= args.short_rows && i < count ? args.a.first_row[s] + i : FT_NONE;
}

__device__ __forceinline__ uint32_t splits_of(const row_args &args, uint32_t tokens)
{
    return min(ft_attention_splits(tokens), args.split_limit);
}

/* One warp: weight of every split of (z, head) in the sum, divided by the sum of all weights. scaled [splits]. */
__device__ __forceinline__ void weigh_splits(const row_args &args, uint64_t index, uint32_t head,
                                             uint32_t splits, float *scaled, unsigned lane)
{
    const float2 *weight = args.weight + index * args.split_limit;
    float max = args.a.sinks ? args.a.sinks[head] : -INFINITY, sum = 0;
    for (uint32_t i = lane; i < splits; i += 32)
        max = fmaxf(max, __ldcg(&weight[i].x));
    max = ft_warp_max(max);
    for (uint32_t i = lane; i < splits; i += 32) {
        float factor = expf(__ldcg(&weight[i].x) - max);
        sum = fmaf(factor, __ldcg(&weight[i].y), sum);
        scaled[i] = factor;
    }
    sum = ft_warp_sum(sum);
    if (args.a.sinks)
        sum += expf(args.a.sinks[head] - max);
    for (uint32_t i = lane; i < splits; i += 32)
        scaled[i] /= sum;
}

/* Four dims of the merged and gated result. */
__device__ __forceinline__ void merge_dims(const row_args &args, uint64_t index, uint32_t row, uint32_t head,
                                           uint32_t splits, const float *scaled, uint32_t at)
{
    const float *partial = args.partial + index * args.split_limit * args.a.dim + at;
    float4 sum = make_float4(0, 0, 0, 0), gate = make_float4(1, 1, 1, 1);
    if (args.a.gate)
        gate = make_float4(
            ft_attention_gate(args.a, row, head, at), ft_attention_gate(args.a, row, head, at + 1),
            ft_attention_gate(args.a, row, head, at + 2), ft_attention_gate(args.a, row, head, at + 3));
#pragma unroll 16
    for (uint32_t i = 0; i < splits; i++) {
        float4 part = __ldcg((const float4 *)(partial + (uint64_t)i * args.a.dim));
        sum.x = fmaf(scaled[i], part.x, sum.x);
        sum.y = fmaf(scaled[i], part.y, sum.y);
        sum.z = fmaf(scaled[i], part.z, sum.z);
        sum.w = fmaf(scaled[i], part.w, sum.w);
    }
    sum = make_float4(sum.x * gate.x, sum.y * gate.y, sum.z * gate.z, sum.w * gate.w);
    *(float4 *)(args.a.out + row * args.a.out_stride + (uint64_t)head * args.a.dim + at) = sum;
}

/* Shared memory of a block, in floats: offsets follow from G and the head's dims. */
template <int G> struct room {
    static constexpr unsigned PITCH = G % 8 ? G : G + 4; /* of a token's weights: spreads the banks */
    static constexpr unsigned SCORES = G * (TILE + 1);
    static constexpr unsigned WEIGHTS = TILE * PITCH;
    static size_t bytes(uint32_t dim)
    {
        return 2 * TILE * sizeof(float *) +
               (G * dim + WEIGHTS + RED_HEADS * THREADS * 4 + SCORES + 3 * G) * sizeof(float);
    }
};

/* Where the keys of a tile lie; tokens beyond the end repeat the last one. */
__device__ __forceinline__ void find_keys(const ft_attend_args &a, const ft_visible &v, uint32_t sequence,
                                          uint32_t kv_head, uint32_t begin, uint32_t end, unsigned i,
                                          const float **keys)
{
    uint32_t token = ft_visible_token(v, min(begin + i, end - 1));
    keys[i] = ft_attention_key(a, sequence, kv_head, token);
}

/* Scores of the tile's tokens for G heads -> scores[g][token]; -inf beyond `count`. D 0: dims known at run time. */
template <int G, int D>
__device__ __forceinline__ void score_tile(const float *q, const float *const *keys, uint32_t count,
                                           uint32_t dim, float scale, float *scores)
{
    unsigned lane = threadIdx.x & 31, sub = lane & 7, first = (threadIdx.x >> 5) * 8 + (lane >> 3) * 2;
    const float *k0 = keys[first], *k1 = keys[first + 1];
    float sum[2][G] = {};
#pragma unroll(G <= 4 ? 8 : 4)
    for (uint32_t at = 4 * sub; at < (D ? D : dim); at += 32) {
        float4 a = *(const float4 *)(k0 + at), b = *(const float4 *)(k1 + at);
#pragma unroll
        for (int g = 0; g < G; g++) {
            float4 x = *(const float4 *)(q + (uint32_t)g * (D ? D : dim) + at);
            sum[0][g] = fmaf(x.w, a.w, fmaf(x.z, a.z, fmaf(x.y, a.y, fmaf(x.x, a.x, sum[0][g]))));
            sum[1][g] = fmaf(x.w, b.w, fmaf(x.z, b.z, fmaf(x.y, b.y, fmaf(x.x, b.x, sum[1][g]))));
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int g = 0; g < G; g++) {
            float s = sum[i][g];
            for (int step = 1; step < 8; step <<= 1)
                s += __shfl_xor_sync(0xffffffffu, s, step);
            if (sub == 0)
                scores[(uint32_t)g * (TILE + 1) + first + i] = first + i < count ? s * scale : -INFINITY;
        }
}

/* Running maximum and weight of every head; scores become weights [token][PITCH]; factor: of the sums so far. */
template <int G>
__device__ __forceinline__ void update_softmax(const float *scores, float *weights, float *max, float *sum,
                                               float *factor)
{
    unsigned lane = threadIdx.x & 31;
    for (unsigned g = threadIdx.x >> 5; g < G; g += WARPS) {
        float a = scores[g * (TILE + 1) + lane], b = scores[g * (TILE + 1) + lane + 32];
        float old = max[g], now = fmaxf(old, ft_warp_max(fmaxf(a, b)));
        float base = now == -INFINITY ? 0.0f : now; /* nothing but -inf: weights 0, not NaN */
        float wa = expf(a - base), wb = expf(b - base), both = ft_warp_sum(wa + wb);
        weights[lane * room<G>::PITCH + g] = wa;
        weights[(lane + 32) * room<G>::PITCH + g] = wb;
        __syncwarp(); /* all lanes have read the old maximum */
        if (lane == 0) {
            float shrink = expf(old - base);
            factor[g] = shrink;
            sum[g] = fmaf(sum[g], shrink, both);
            max[g] = now;
        }
        __syncwarp();
    }
}

template <int G>
__device__ __forceinline__ void add_values(const float *weights, const float *const *keys, uint64_t to_value,
                                           uint32_t count, uint32_t first, uint32_t step, uint32_t at,
                                           float4 (&acc)[G])
{
#pragma unroll(G <= 4 ? 8 : 4)
    for (uint32_t t = first; t < count; t += step) {
        float4 v = *(const float4 *)(keys[t] + to_value + at);
        const float *w = weights + t * room<G>::PITCH;
#pragma unroll
        for (int g = 0; g < G; g++) {
            acc[g].x = fmaf(w[g], v.x, acc[g].x);
            acc[g].y = fmaf(w[g], v.y, acc[g].y);
            acc[g].z = fmaf(w[g], v.z, acc[g].z);
            acc[g].w = fmaf(w[g], v.w, acc[g].w);
        }
    }
}

/* Grid (KV heads * chunks of G heads, splits, rows). */
template <int G, int D> __global__ void __launch_bounds__(THREADS) attend_rows(row_args args)
{
    FT_SHARED_DYNAMIC(float *, memory);
    FT_SHARED(uint32_t, last, 1);
    const ft_attend_args &a = args.a;
    const uint32_t dim = D ? D : a.dim, z = blockIdx.z, row = row_of(args, z);
    ft_begin_next();
    if (a.select) /* written by the kernel in front */
        ft_wait_previous();
    if (row == FT_NONE) {
        ft_wait_previous();
        return;
    }
    ft_visible v = ft_visible_of(a, row);
    uint32_t splits = splits_of(args, v.count), split = blockIdx.y;
    if (split >= splits) {
        ft_wait_previous();
        return;
    }
    const float **keys = (const float **)memory; /* two tiles */
    float *q = (float *)(keys + 2 * TILE), *red = q + G * dim, *weights = red + RED_HEADS * THREADS * 4;
    float *scores = weights + room<G>::WEIGHTS, *max = scores + room<G>::SCORES, *sum = max + G,
          *factor = sum + G;
    uint32_t kv_head = blockIdx.x / args.chunks, chunk = blockIdx.x % args.chunks;
    uint32_t head0 = kv_head * a.group + chunk * G, heads = min((uint32_t)G, a.group - chunk * G);
    uint32_t sequence = a.row_sequence[row];
    uint32_t share = ft_attention_share(v.count, splits);
    uint32_t begin = min(split * share, v.count), end = min(begin + share, v.count);
    if (threadIdx.x < G) {
        max[threadIdx.x] = -INFINITY;
        sum[threadIdx.x] = 0;
    }
    if (threadIdx.x < TILE && begin < end)
        find_keys(a, v, sequence, kv_head, begin, end, threadIdx.x, keys);
    __syncthreads();
    /* Keys and values come to L2 side by side, those of earlier steps even while the kernel in front still
     * runs: a line of this step's tokens is only asked for, not read. */
    const uint32_t lines = min(TILE, end - begin) * (dim / 32);
    for (uint32_t i = threadIdx.x; i < lines; i += THREADS) {
        const float *line = keys[i / (dim / 32)] + i % (dim / 32) * 32;
        ft_prefetch_l2(line);
        ft_prefetch_l2(line + (a.v_offset - a.k_offset));
    }
    if (!a.select)
        ft_wait_previous();
    for (uint32_t i = 4 * threadIdx.x; i < G * dim; i += 4 * THREADS) /* heads that do not exist: zero */
        *(float4 *)(q + i) = i < heads * dim
                                 ? *(const float4 *)(a.query + ((uint64_t)row * a.heads + head0) * dim + i)
                                 : make_float4(0, 0, 0, 0);
    __syncthreads();
    const uint32_t quads = dim / 4, groups = THREADS / quads, mine = threadIdx.x / quads,
                   at = threadIdx.x % quads * 4;
    float4 acc[G];
#pragma unroll
    for (int g = 0; g < G; g++)
        acc[g] = make_float4(0, 0, 0, 0);
    for (uint32_t t = begin; t < end; t += TILE) {
        const float **here = keys + ((t - begin) / TILE & 1) * TILE, **there = keys + TILE - (here - keys);
        uint32_t count = min(TILE, end - t);
        score_tile<G, D>(q, here, count, dim, a.scale, scores);
        __syncthreads();
        update_softmax<G>(scores, weights, max, sum, factor);
        if (threadIdx.x >= THREADS - TILE && t + TILE < end)
            find_keys(a, v, sequence, kv_head, t + TILE, end, threadIdx.x - (THREADS - TILE), there);
        __syncthreads();
#pragma unroll
        for (int g = 0; g < G; g++) {
            float f = factor[g];
            acc[g] = make_float4(acc[g].x * f, acc[g].y * f, acc[g].z * f, acc[g].w * f);
        }
        if (mine < groups)
            add_values<G>(weights, here, a.v_offset - a.k_offset, count, mine, groups, at, acc);
    }
    /* Sums over the thread groups, four heads at a time; then out, or to the partial sums. */
    uint64_t first_index = (uint64_t)z * a.heads + head0;
#pragma unroll
    for (int g0 = 0; g0 < G; g0 += (int)RED_HEADS) {
        __syncthreads();
#pragma unroll
        for (int g = g0; g < G && g < g0 + (int)RED_HEADS; g++)
            ((float4 *)red)[(uint32_t)(g - g0) * THREADS + threadIdx.x] = acc[g];
        __syncthreads();
        for (uint32_t unit = threadIdx.x; unit < RED_HEADS * quads; unit += THREADS) {
            uint32_t g = (uint32_t)g0 + unit / quads, place = unit % quads;
            if (g >= heads)
                continue;
            float4 total = make_float4(0, 0, 0, 0);
            for (uint32_t i = 0; i < groups; i++) {
                float4 part = ((float4 *)red)[(g - (uint32_t)g0) * THREADS + i * quads + place];
                total = make_float4(total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w);
            }
            uint32_t head = head0 + g;
            if (splits > 1) {
                uint64_t index = (first_index + g) * args.split_limit + split;
                *(float4 *)(args.partial + index * dim + 4 * place) = total;
                if (place == 0)
                    args.weight[index] = make_float2(max[g], sum[g]);
                continue;
            }
            float scale = ft_attention_scale(a, head, max[g], sum[g]);
            float result[4] = {total.x * scale, total.y * scale, total.z * scale, total.w * scale};
            for (uint32_t i = 0; i < 4; i++)
                if (a.gate)
                    result[i] *= ft_attention_gate(a, row, head, 4 * place + i);
            *(float4 *)(a.out + row * a.out_stride + (uint64_t)head * dim + 4 * place) =
                make_float4(result[0], result[1], result[2], result[3]);
        }
    }
    if (splits == 1 || !args.counters)
        return;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence(); /* the block's sums, which the barrier hands to this thread */
        uint32_t *counter = args.counters + z * gridDim.x + blockIdx.x;
        last[0] = atomicAdd(counter, 1u) == splits - 1;
        if (last[0])
            *counter = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last[0])
        return;
    float *scaled = red; /* [heads, splits] */
    for (uint32_t g = threadIdx.x >> 5; g < heads; g += WARPS)
        weigh_splits(args, first_index + g, head0 + g, splits, scaled + g * MERGE_INLINE, threadIdx.x & 31);
    __syncthreads();
    for (uint32_t unit = threadIdx.x; unit < heads * quads; unit += THREADS) {
        uint32_t g = unit / quads;
        merge_dims(args, first_index + g, row, head0 + g, splits, scaled + g * MERGE_INLINE,
                   unit % quads * 4);
    }
}

/* Grid (heads, rows), one warp or two: merges what attend_rows left. */
__global__ void __launch_bounds__(DIM_MAX / 4) merge_rows(row_args args)
{
    FT_SHARED(float, scaled, FT_ATTENTION_SPLITS_MAX);
    ft_begin_next();
    ft_wait_previous();
    uint32_t head = blockIdx.x, z = blockIdx.y, row = row_of(args, z);
    if (row == FT_NONE)
        return;
    uint32_t splits = splits_of(args, ft_visible_of(args.a, row).count);
    if (splits == 1)
        return;
    uint64_t index = (uint64_t)z * args.a.heads + head;
    if (threadIdx.x < 32)
        weigh_splits(args, index, head, splits, scaled, threadIdx.x);
    __syncthreads();
    if (4 * threadIdx.x < args.a.dim)
        merge_dims(args, index, row, head, splits, scaled, 4 * threadIdx.x);
}

template <int G, int D> int launch_dim(const row_args &args, dim3 grid, void *stream)
{
    size_t shared = room<G>::bytes(args.a.dim);
    int status = shared > 48 * 1024 ? FT_SHARED_LIMIT((attend_rows<G, D>), shared) : 0;
    return status ? status : FT_LAUNCH_NEXT((attend_rows<G, D>), grid, dim3(THREADS), shared, stream, args);
}

template <int G> int launch_group(const row_args &args, dim3 grid, void *stream)
{
    switch (args.a.dim) {
    case 64:
        return launch_dim<G, 64>(args, grid, stream);
    case 128:
        return launch_dim<G, 128>(args, grid, stream);
    case 256:
        return launch_dim<G, 256>(args, grid, stream);
    default:
        return launch_dim<G, 0>(args, grid, stream);
    }
}

int launch_rows(const row_args &args, uint32_t splits, uint32_t depth, void *stream)
{
    dim3 grid(args.a.kv_heads * args.chunks, splits, depth);
    uint32_t heads = (args.a.group + args.chunks - 1) / args.chunks;
    if (heads == 1)
        return launch_group<1>(args, grid, stream);
    if (heads == 2)
        return launch_group<2>(args, grid, stream);
    if (heads <= 4)
        return launch_group<4>(args, grid, stream);
    if (heads <= 8)
        return launch_group<8>(args, grid, stream);
    if (heads <= 12)
        return launch_group<12>(args, grid, stream);
    return launch_group<16>(args, grid, stream);
}

/* The decode form over `depth` rows or places; tokens: bound of what a row sees. */
int attend(const struct ft_cuda *c, row_args args, uint32_t depth, uint32_t tokens, void *stream)
{
    const ft_attend_args &a = args.a;
    uint32_t wanted = ft_attention_splits(tokens), splits = wanted;
    uint64_t split_bytes = (uint64_t)depth * a.heads * (a.dim + 2) * sizeof(float);
    if (splits > 1 && split_bytes * splits > c->scratch_bytes)
        splits = (uint32_t)FT_MAX(c->scratch_bytes / split_bytes, 1);
    bool decode = c->step.rows <= FT_CUDA_DECODE_ROWS;
    if (decode && splits < wanted)
        return FT_CUDA_NOT_SUPPORTED;
    if (!decode) /* enough blocks to fill the device twice */
        splits = FT_MIN(
            splits, (uint32_t)ft_div_up(4ull * FT_MAX(c->multiprocessors, 1), (uint64_t)a.kv_heads * depth));
    args.split_limit = splits;
    args.chunks = (a.group + 15) / 16;
    /* Few blocks: up to four heads each, K and V then come from L2 several times. Sums stay the same. */
    if ((uint64_t)a.kv_heads * args.chunks * splits * depth < 2ull * c->multiprocessors)
        args.chunks = (a.group + 3) / 4;
    args.partial = (float *)c->scratch;
    args.weight = (float2 *)(args.partial + (uint64_t)depth * a.heads * splits * a.dim);
    bool inside = splits <= MERGE_INLINE && (uint64_t)a.kv_heads * args.chunks * depth <= COUNTERS;
    args.counters = inside ? c->exchange.counters : NULL;
    int status = launch_rows(args, splits, depth, stream);
    if (status || splits == 1 || inside)
        return status;
    return FT_LAUNCH_NEXT(merge_rows, dim3(a.heads, depth), dim3(DIM_MAX / 4), 0, stream, args);
}

} // namespace

int ft_cuda_attention(const struct ft_cuda *c, uint32_t layer, uint32_t tokens_max, void *stream)
{
    const struct ft_model *m = c->model;
    enum ft_attention kind = (enum ft_attention)m->layers[layer].attention;
    row_args args = {};
    ft_attend_args &a = args.a;
    ft_qkv_parts parts = ft_qkv_parts_of(m);
    a.query = c->base + c->space.query;
    a.project = c->base + c->space.project;
    a.out = c->base + c->space.attention;
    a.stride = c->space.project_width;
    a.out_stride = c->space.attention_width;
    a.sinks = c->weights->layers[layer].attention.sinks;
    a.gate = m->attention_gate;
    a.heads = m->head_count;
    a.kv_heads = m->kv_head_count;
    a.group = m->head_count / m->kv_head_count;
    a.dim = m->head_dim;
    a.query_stride = parts.query_stride;
    a.window = kind == FT_ATTENTION_SLIDING ? m->window : 0;
    a.scale = (float)(1.0 / sqrt((double)m->head_dim));
    a.rows = c->step.rows;
    a.sequences = c->step.sequences;
    a.pages_max = c->step.pages_max;
    a.page_tokens = c->kv.page_tokens;
    a.k_offset = c->kv.k_offset[layer];
    a.v_offset = c->kv.v_offset[layer];
    a.position = c->step.position;
    a.row_sequence = c->step.row_sequence;
    a.first_row = c->step.first_row;
    a.row_count = c->step.row_count;
    a.page = c->step.page;
    if (a.dim % 4 || a.dim > DIM_MAX)
        return FT_CUDA_NOT_SUPPORTED;
    uint32_t tokens = tokens_max;
    if (a.window)
        tokens = FT_MIN(tokens, a.window);
    if (ft_selects(c, layer, tokens_max)) {
        a.select = (const uint32_t *)(c->base + c->space.select);
        a.select_stride = c->space.select_max + 1;
        a.ratio = m->indexer_ratio;
        tokens = FT_MIN(tokens, m->indexer_budget + m->indexer_ratio - 1);
    }
    bool tiled = a.rows > FT_CUDA_DECODE_ROWS && ft_attention_tiled_takes(a.dim);
    if (tiled && a.select && ft_attention_sparse_takes(a.dim))
        return ft_attention_sparse(&a, stream);
    if (!tiled || a.select)
        return attend(c, args, a.rows, tokens, stream);
    int status = ft_attention_tiled(&a, FT_ATTENTION_SHORT_ROWS, stream);
    if (status || a.sequences == 1)
        return status;
    args.short_rows = FT_ATTENTION_SHORT_ROWS;
    return attend(c, args, a.sequences * FT_ATTENTION_SHORT_ROWS, tokens, stream);
}

uint64_t ft_cuda_attention_scratch_bytes(const struct ft_model *model, uint32_t rows, uint32_t tokens_max)
{
    return ft_attention_scratch(model, rows, tokens_max);
}
