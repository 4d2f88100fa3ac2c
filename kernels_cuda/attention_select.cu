/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which blocks a row of a sparse layer sees: scores of all complete blocks, then the exact top k, ties to the
 * lower index, written in ascending order. As index_scores and ft_select_topk of kernels_cpu.
 *
 * Decode: blocks of a grid share a row's scores, the last one to finish picks. Prefill: a block does whole
 * rows, one after another, in a slot of the scratch. Radix select on order-preserving keys, eight bits at a
 * time.
 */
#include "kernels_cuda/attention.cuh"

namespace
{

constexpr unsigned THREADS = 512, WARPS = THREADS / 32,
                   CHUNK = WARPS * 8; /* blocks scored by one pass of a block */
constexpr unsigned ROWS_AT_ONCE = 264, COUNTERS = 64, HELD_MAX = 4096; /* keys of a row in shared memory */

struct select_args {
    const float *query; /* row r at + r * stride: [heads, dim] normed and rotated */
    uint64_t stride;
    uint32_t heads, dim, ratio, top, rows, page_blocks, pages_max;
    uint64_t index_offset;
    const uint32_t *position, *row_sequence;
    float *const *page;
    uint32_t *select; /* [rows, select_stride]: count, blocks */
    uint64_t select_stride;
    float *scores; /* [gridDim.y, blocks_max] */
    uint64_t blocks_max;
    uint32_t *counters; /* NULL: one block a row */
};

/* Unsigned keys in the order of the floats; -0 and +0 are one key, NaN is above infinity. */
__device__ __forceinline__ uint32_t order_key(float value)
{
    uint32_t bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ const float *key_of(const select_args &args, uint32_t sequence, uint32_t block)
{
    return args.page[(uint64_t)sequence * args.pages_max + block / args.page_blocks] + args.index_offset +
           (uint64_t)(block % args.page_blocks) * args.dim;
}

/* Keys of the block's first chunk come to L2 while the kernel in front still runs: all but the newest were
 * written by earlier steps, and that one is only asked for, not read. */
__device__ __forceinline__ void prefetch_keys(const select_args &args)
{
    uint32_t r = blockIdx.y, blocks = (args.position[r] + 1) / args.ratio, lines = (args.dim + 31) / 32;
    if (blocks <= args.top)
        return;
    for (uint32_t i = threadIdx.x; i < CHUNK * lines; i += THREADS) {
        uint32_t block = blockIdx.x * CHUNK + i / lines;
        if (block < blocks)
            ft_prefetch_l2(key_of(args, args.row_sequence[r], block) + i % lines * 32);
    }
}

/* Scores of blocks [begin, begin + CHUNK): eight lanes a key, two keys at once. QUADS: float4 of a key per lane. */
template <int QUADS>
__device__ void score_chunk(const select_args &args, const float *q, uint32_t sequence, uint32_t begin,
                            uint32_t blocks, float *scores)
{
    unsigned lane = threadIdx.x & 31, sub = lane & 7;
    uint32_t mine = begin + (threadIdx.x >> 5) * 8 + (lane >> 3) * 2;
    float4 key[2][QUADS];
    for (uint32_t i = 0; i < 2; i++) {
        const float *from = key_of(args, sequence, min(mine + i, blocks - 1));
        for (int j = 0; j < QUADS; j++) {
            uint32_t at = 4 * sub + 32 * (uint32_t)j;
            key[i][j] = at < args.dim ? *(const float4 *)(from + at) : make_float4(0, 0, 0, 0);
        }
    }
    float total[2] = {};
    for (uint32_t h = 0; h < args.heads; h++) {
        float sum[2] = {};
        for (int j = 0; j < QUADS; j++) {
            uint32_t at = min(4 * sub + 32 * (uint32_t)j, args.dim - 4); /* beyond the end the key is 0 */
            float4 x = *(const float4 *)(q + h * args.dim + at);
            for (int i = 0; i < 2; i++) {
                sum[i] = fmaf(x.x, key[i][j].x, sum[i]);
                sum[i] = fmaf(x.y, key[i][j].y, sum[i]);
                sum[i] = fmaf(x.z, key[i][j].z, sum[i]);
                sum[i] = fmaf(x.w, key[i][j].w, sum[i]);
            }
        }
        for (int i = 0; i < 2; i++) {
            for (int step = 1; step < 8; step <<= 1)
                sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
            total[i] += sum[i] < 0 ? 0.0f : sum[i]; /* relu that lets NaN through */
        }
    }
    if (sub < 2 && mine + sub < blocks)
        scores[mine + sub] = (sub ? total[1] : total[0]) / sqrtf((float)args.dim);
}

/* The keys of a row: in shared memory where they fit, else made anew from the scores. */
struct row_keys {
    const float *scores;
    const uint32_t *held; /* NULL: not in shared memory */
    __device__ __forceinline__ uint32_t operator[](uint32_t i) const
    {
        return held ? held[i] : order_key(__ldcg(scores + i));
    }
};

/* Bins of the keys that share `prefix` under `mask`. Where one bin takes most of a warp (ties), one lane adds. */
__device__ void count_bins(const row_keys &keys, uint32_t n, uint32_t mask, uint32_t prefix, int shift,
                           uint32_t *bins)
{
    for (uint32_t i = threadIdx.x; i < 256; i += THREADS)
        bins[i] = 0;
    __syncthreads();
    unsigned lane = threadIdx.x & 31;
    for (uint32_t base = threadIdx.x - lane; base < n; base += THREADS) {
        uint32_t i = base + lane, bin = 256;
        if (i < n) {
            uint32_t key = keys[i];
            if ((key & mask) == prefix)
                bin = key >> shift & 255;
        }
        uint32_t first = __shfl_sync(0xffffffffu, bin, 0);
        unsigned same = __ballot_sync(0xffffffffu, bin == first);
        if (lane == 0 && bin < 256)
            atomicAdd(bins + bin, (uint32_t)__popc(same));
        else if (bin != first && bin < 256)
            atomicAdd(bins + bin, 1u);
    }
    __syncthreads();
}

/* Warp 0: the bin in which the rank-th highest lies; found[0] = bin, found[1] = rank within it. */
__device__ void find_bin(const uint32_t *bins, uint32_t rank, uint32_t *found)
{
    if (threadIdx.x < 32) {
        uint32_t lane = threadIdx.x, own = 0;
        for (uint32_t i = 0; i < 8; i++)
            own += bins[8 * lane + i];
        uint32_t from_here = own; /* keys in the bins of this lane and of those above */
        for (uint32_t step = 1; step < 32; step <<= 1) {
            uint32_t more = __shfl_down_sync(0xffffffffu, from_here, step);
            from_here += lane + step < 32 ? more : 0;
        }
        uint32_t above = from_here - own;
        if (above < rank && rank <= from_here) {
            uint32_t bin = 8 * lane + 7, left = rank - above;
            for (; bins[bin] < left; bin--)
                left -= bins[bin];
            found[0] = bin;
            found[1] = left;
        }
    }
    __syncthreads();
}

/* The k highest of n scores -> out, ascending. All threads of the block. */
__device__ void pick(const float *scores, uint32_t *room, uint32_t n, uint32_t k, uint32_t *out)
{
    FT_SHARED(uint32_t, bins, 256);
    FT_SHARED(uint32_t, found, 2);
    FT_SHARED(uint32_t, higher, WARPS + 1);
    FT_SHARED(uint32_t, equal, WARPS + 1);
    row_keys keys = {scores, n <= HELD_MAX ? room : NULL};
    if (keys.held)
        for (uint32_t i = threadIdx.x; i < n; i += THREADS)
            room[i] = order_key(__ldcg(scores + i)); /* others read them behind a barrier of count_bins */
    uint32_t prefix = 0, rank = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        count_bins(keys, n, shift == 24 ? 0 : 0xffffffffu << (shift + 8), prefix, shift, bins);
        find_bin(bins, rank, found);
        prefix |= found[0] << shift;
        rank = found[1];
    }
    /* Every warp has a run of consecutive indices: counts first, then places. `rank` keys equal to the
     * threshold fit. */
    unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5, below = (1u << lane) - 1;
    uint32_t run = (n + WARPS * 32 - 1) / (WARPS * 32) * 32, begin = min(warp * run, n),
             end = min(begin + run, n);
    uint32_t high_count = 0, equal_count = 0;
    for (uint32_t base = begin; base < end; base += 32) {
        uint32_t key = base + lane < end ? keys[base + lane] : 0;
        bool in = base + lane < end;
        high_count += (uint32_t)__popc(__ballot_sync(0xffffffffu, in && key > prefix));
        equal_count += (uint32_t)__popc(__ballot_sync(0xffffffffu, in && key == prefix));
    }
    if (lane == 0) {
        higher[warp] = high_count;
        equal[warp] = equal_count;
    }
    __syncthreads();
    uint32_t high_before = 0, equal_before = 0;
    for (unsigned w = 0; w < warp; w++) {
        high_before += higher[w];
        equal_before += equal[w];
    }
    for (uint32_t base = begin; base < end; base += 32) {
        uint32_t key = base + lane < end ? keys[base + lane] : 0;
        bool in = base + lane < end;
        unsigned highs = __ballot_sync(0xffffffffu, in && key > prefix);
        unsigned equals = __ballot_sync(0xffffffffu, in && key == prefix);
        uint32_t my_equals = equal_before + (uint32_t)__popc(equals & below);
        bool taken = (highs >> lane & 1) || ((equals >> lane & 1) && my_equals < rank);
        if (taken)
            out[high_before + (uint32_t)__popc(highs & below) + min(my_equals, rank)] = base + lane;
        high_before += (uint32_t)__popc(highs);
        equal_before += (uint32_t)__popc(equals);
    }
    __syncthreads(); /* shared memory is used again for the next row */
}

/* Grid (chunks of a row or 1, rows or slots). Dynamic shared memory: [heads, dim]. */
template <int QUADS> __global__ void __launch_bounds__(THREADS) select_blocks(select_args args)
{
    FT_SHARED_DYNAMIC(float, q);
    FT_SHARED(uint32_t, last, 1);
    FT_SHARED(uint32_t, room, HELD_MAX);
    ft_begin_next();
    if (args.counters)
        prefetch_keys(args);
    ft_wait_previous();
    float *scores = args.scores + blockIdx.y * args.blocks_max;
    for (uint32_t r = blockIdx.y; r < args.rows; r += gridDim.y) {
        uint32_t blocks = (args.position[r] + 1) / args.ratio, chunks = (blocks + CHUNK - 1) / CHUNK;
        uint32_t *select = args.select + r * args.select_stride;
        bool all = blocks <= args.top;
        if (blockIdx.x == 0 && threadIdx.x == 0)
            select[0] = all ? FT_NONE : args.top;
        if (all || args.top == 0 || blockIdx.x >= chunks)
            continue;
        for (uint32_t i = threadIdx.x; i < args.heads * args.dim; i += THREADS)
            q[i] = args.query[r * args.stride + i];
        __syncthreads();
        for (uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x)
            score_chunk<QUADS>(args, q, args.row_sequence[r], chunk * CHUNK, blocks, scores);
        __syncthreads();
        if (args.counters && chunks > 1) {
            if (threadIdx.x == 0) {
                __threadfence(); /* the block's scores, which the barrier hands to this thread */
                last[0] = atomicAdd(args.counters + r, 1u) == chunks - 1;
                if (last[0])
                    args.counters[r] = 0;
                __threadfence();
            }
            __syncthreads();
            if (!last[0])
                continue;
        }
        pick(scores, room, blocks, args.top, select + 1);
    }
}

template <int QUADS> int launch(const select_args &args, dim3 grid, size_t shared, void *stream)
{
    int status = shared > 28 * 1024 ? FT_SHARED_LIMIT(select_blocks<QUADS>, shared) : 0;
    return status ? status : FT_LAUNCH_NEXT(select_blocks<QUADS>, grid, dim3(THREADS), shared, stream, args);
}

} // namespace

int ft_cuda_attention_select(const struct ft_cuda *c, uint32_t layer, uint32_t tokens_max, void *stream)
{
    const struct ft_model *m = c->model;
    if (!ft_selects(c, layer, tokens_max))
        return 0;
    select_args args = {};
    args.query = c->base + c->space.project + ft_qkv_parts_of(m).index;
    args.stride = c->space.project_width;
    args.heads = m->indexer_head_count;
    args.dim = m->indexer_dim;
    args.ratio = m->indexer_ratio;
    args.top = m->indexer_budget / m->indexer_ratio;
    args.rows = c->step.rows;
    args.page_blocks = c->kv.page_tokens / m->indexer_ratio;
    args.pages_max = c->step.pages_max;
    args.index_offset = c->kv.indexer_offset[layer];
    args.position = c->step.position;
    args.row_sequence = c->step.row_sequence;
    args.page = c->step.page;
    args.select = (uint32_t *)(c->base + c->space.select);
    args.select_stride = c->space.select_max + 1;
    args.scores = (float *)c->scratch;
    args.blocks_max = tokens_max / m->indexer_ratio;
    uint64_t slots = c->scratch ? c->scratch_bytes / (args.blocks_max * sizeof(float)) : 0;
    bool decode = args.rows <= FT_CUDA_DECODE_ROWS;
    if (slots < (decode ? args.rows : 1) || args.dim % 4 || args.dim > 256)
        return FT_CUDA_NOT_SUPPORTED;
    uint64_t at_once = FT_MIN(slots, (uint64_t)FT_MIN(args.rows, ROWS_AT_ONCE));
    dim3 grid(1, (unsigned)at_once);
    if (decode) {
        static_assert(FT_CUDA_DECODE_ROWS <= COUNTERS, "a counter a row");
        grid = dim3((unsigned)ft_div_up(args.blocks_max, CHUNK), args.rows);
        args.counters = c->exchange.counters;
    }
    size_t shared = (size_t)args.heads * args.dim * sizeof(float);
    if (args.dim <= 32)
        return launch<1>(args, grid, shared, stream);
    if (args.dim <= 64)
        return launch<2>(args, grid, shared, stream);
    if (args.dim <= 128)
        return launch<4>(args, grid, shared, stream);
    return launch<8>(args, grid, shared, stream);
}
