/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Picking tokens: the choices of ft_sample_token (kernels_cpu/sample.c) without its sorted heap.
 *
 * Kernel 1, many blocks a row: best token and number of finite logits of a slice. Kernel 2, one block a row:
 * greedy rows are done at once. Others need the best tokens up to a count (top-k) or a mass (top-p), and then
 * the token at which the running mass passes a random share. All three are the same question: the largest
 * rank T such that the tokens of rank >= T hold at least so much; it is answered bit by bit, with a sum over
 * the block a bit. A rank is the logit's bits in ascending order, then the inverted id, so that equal logits
 * rank by ascending id and every rank is unique.
 *
 * Masses are integers (weights times 2^43): their sums depend on no order. Tokens of weight >= 2^-20 are
 * gathered in shared memory; nearly always the answer lies among them, and the vocabulary is not read again.
 */
#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

#ifdef FT_CUDA_EMULATED
#define THREADS 128u /* each a fiber */
#else
#define THREADS 1024u
#endif
#define SLICE_THREADS 256u
#define SLICES_MAX 256u
#define SLICE_WORDS 3u /* u32 of a slice's result: ordered logit, inverted id, finite logits */
#define GATHERED_MAX 4096u

struct sample_args {
    float *logits;   /* [rows, vocab] */
    uint32_t *index; /* [rows, vocab]: slices' results, then bits of tokens seen, then weights */
    const struct ft_cuda_sampling *sampling;
    const uint32_t *logit_row;
    uint32_t *sampled, *failed;
    uint32_t vocab, slices, layers;
    uint64_t *stamp;
};

/* A finite logit's bits in ascending order, above 0; both zeros alike. */
static __device__ __forceinline__ uint32_t sample_order(float logit)
{
    uint32_t bits = __float_as_uint(logit == 0 ? 0.0f : logit);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
static __device__ __forceinline__ bool sample_is_finite(float logit)
{
    return (__float_as_uint(logit) & 0x7f800000u) != 0x7f800000u;
}
static __device__ __forceinline__ uint64_t sample_rank(float logit, uint32_t id)
{
    return (uint64_t)sample_order(logit) << 32 | (uint32_t)~id;
}

static __device__ __forceinline__ uint64_t sample_warp_max(uint64_t value)
{
    for (int step = 16; step > 0; step >>= 1) {
        uint64_t other = __shfl_xor_sync(0xffffffffu, value, step);
        value = other > value ? other : value;
    }
    return value;
}
static __device__ __forceinline__ uint64_t sample_warp_sum(uint64_t value)
{
    for (int step = 16; step > 0; step >>= 1)
        value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}
/* Over the block, in every thread; scratch [33]. */
static __device__ __forceinline__ uint64_t sample_block(uint64_t value, bool is_sum, uint64_t *scratch)
{
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    value = is_sum ? sample_warp_sum(value) : sample_warp_max(value);
    __syncthreads();
    if (lane == 0)
        scratch[warp] = value;
    __syncthreads();
    if (warp == 0) {
        value = lane < warps ? scratch[lane] : 0;
        value = is_sum ? sample_warp_sum(value) : sample_warp_max(value);
        if (lane == 0)
            scratch[32] = value;
    }
    __syncthreads();
    return scratch[32];
}

/* Best rank (0: none) and finite logits of ids [begin, end). */
static __device__ __forceinline__ void sample_best(const float *logits, uint32_t begin, uint32_t end,
                                                   uint64_t *best, uint32_t *count, uint64_t *scratch)
{
    uint64_t rank = 0, finite = 0;
#pragma unroll 4
    for (uint32_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
        float logit = logits[i];
        uint64_t mine = sample_is_finite(logit) ? sample_rank(logit, i) : 0;
        rank = mine > rank ? mine : rank;
        finite += mine != 0;
    }
    *best = sample_block(rank, false, scratch);
    *count = (uint32_t)sample_block(finite, true, scratch);
}

__global__ void __launch_bounds__(SLICE_THREADS) slice_kernel(const __grid_constant__ struct sample_args args)
{
    FT_SHARED(uint64_t, scratch, 33);
    ft_begin_next();
    ft_wait_previous();
    if (args.stamp && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *args.stamp = ft_global_timer();
    if (!args.sampling[blockIdx.y].wanted)
        return;
    uint32_t width = (args.vocab + args.slices - 1) / args.slices, begin = blockIdx.x * width, count;
    uint64_t best;
    sample_best(args.logits + (uint64_t)blockIdx.y * args.vocab, begin, min(begin + width, args.vocab), &best,
                &count, scratch);
    if (threadIdx.x == 0) {
        uint32_t *to = args.index + (uint64_t)blockIdx.y * args.vocab + blockIdx.x * SLICE_WORDS;
        to[0] = (uint32_t)(best >> 32);
        to[1] = (uint32_t)best;
        to[2] = count;
    }
}

/* Each distinct token of `recent` once. */
static __device__ __forceinline__ void sample_penalise(float *logits, uint32_t vocab,
                                                       const struct ft_cuda_sampling *s, uint32_t *seen)
{
    for (uint32_t i = threadIdx.x; i < (vocab + 31) / 32; i += blockDim.x)
        seen[i] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < s->recent_count; i += blockDim.x) {
        uint32_t t = s->recent[i];
        if (t < vocab && !(atomicOr(&seen[t / 32], 1u << t % 32) >> t % 32 & 1))
            logits[t] = logits[t] > 0 ? logits[t] / s->repetition_penalty : logits[t] * s->repetition_penalty;
    }
    __syncthreads();
}

/* As the CPU's: two rounds of splitmix64 of (seed, position). */
static __device__ __forceinline__ uint64_t sample_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Tokens that a search looks at: those gathered, or all ids of a range. */
struct sample_pool {
    const float *logits, *weights; /* [vocab] */
    const uint32_t *ids;           /* [count] in shared memory; NULL: begin .. begin + count - 1 */
    uint32_t begin, count;
    uint64_t cut; /* lowest rank that takes part */
    float floor;  /* lowest weight that has a mass */
    bool by_id;   /* ranks are ids alone */
};

enum sample_measure { MEASURE_COUNT, MEASURE_MASS };

static __device__ __forceinline__ uint64_t sample_mass(float weight)
{
    return (uint64_t)((double)weight * 0x1p43);
}

/* What the tokens of rank >= `rank` hold. */
static __device__ __forceinline__ uint64_t sample_measure(const struct sample_pool *pool,
                                                          enum sample_measure measure, uint64_t rank,
                                                          uint64_t *scratch)
{
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i < pool->count; i += blockDim.x) {
        uint32_t id = pool->ids ? pool->ids[i] : pool->begin + i;
        float logit = pool->logits[id], weight = pool->weights[id];
        if (!sample_is_finite(logit))
            continue;
        uint64_t mine = pool->by_id ? id : sample_rank(logit, id);
        if (mine >= rank && mine >= pool->cut)
            sum += measure == MEASURE_COUNT ? 1 : weight >= pool->floor ? sample_mass(weight) : 0;
    }
    return sample_block(sum, true, scratch);
}

/* The largest rank with measure >= wanted, or > wanted when `more`; `high`: no rank is above it. 0 when there
 * is none. */
static __device__ __forceinline__ uint64_t sample_search(const struct sample_pool *pool,
                                                         enum sample_measure measure, double wanted,
                                                         bool more, uint64_t high, uint64_t *scratch)
{
    uint64_t rank = 0;
    for (uint64_t bit = pool->by_id ? 1ull << 31 : 1ull << 63; bit; bit >>= 1) {
        uint64_t next = rank | bit;
        if (next > high)
            continue;
        double held = (double)sample_measure(pool, measure, next, scratch);
        if (more ? held > wanted : held >= wanted)
            rank = next;
    }
    return rank;
}

/* Weights of all tokens, and the ids of the likely ones; gathered [GATHERED_MAX]. Returns how many are likely. */
static __device__ __forceinline__ uint32_t sample_weigh(const float *logits, float *weights, uint32_t vocab,
                                                        float best, float temperature, uint32_t *gathered,
                                                        uint32_t *gathered_count)
{
    if (threadIdx.x == 0)
        *gathered_count = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) {
        float logit = logits[i], weight = 0;
        if (sample_is_finite(logit))
            weight = (float)exp(((double)logit - (double)best) / (double)temperature);
        weights[i] = weight;
        if (weight >= 0x1p-20f) {
            uint32_t place = atomicAdd(gathered_count, 1u);
            if (place < GATHERED_MAX)
                gathered[place] = i;
        }
    }
    __syncthreads();
    return *gathered_count;
}

/* The token at which the running mass of the pool passes the random share. */
static __device__ __forceinline__ uint32_t sample_draw(const struct sample_pool *pool,
                                                       const struct ft_cuda_sampling *s, uint64_t high,
                                                       uint64_t *scratch)
{
    double share = (double)(sample_mix(sample_mix(s->seed) ^ s->position) >> 11) * 0x1p-53;
    double total = (double)sample_measure(pool, MEASURE_MASS, 0, scratch);
    uint64_t rank = sample_search(pool, MEASURE_MASS, share * total, true, high, scratch);
    return pool->by_id ? (uint32_t)rank : ~(uint32_t)rank;
}

/* All of temperature > 0. `best`: the highest rank; `finite`: how many logits are numbers. */
static __device__ __forceinline__ uint32_t sample_random(const float *logits, float *weights, uint32_t vocab,
                                                         const struct ft_cuda_sampling *s, uint64_t best,
                                                         uint32_t finite, uint32_t *gathered,
                                                         uint32_t *gathered_count, uint64_t *scratch)
{
    uint32_t id = ~(uint32_t)best;
    uint32_t likely =
        sample_weigh(logits, weights, vocab, logits[id], s->temperature, gathered, gathered_count);
    float floor = (float)fmin((double)s->min_p, 1.0);
    double top_p = s->top_p < 1.0f ? fmax((double)s->top_p, 0.0) : 1.0;
    uint32_t top_k = s->top_k ? min(s->top_k, finite) : finite;
    struct sample_pool all = {logits, weights, NULL, 0, vocab, 0, 0.0f, false}, pool = all;
    if (top_k == finite && top_p >= 1) { /* nothing is sorted: the CPU walks from the highest id down */
        all.floor = floor;
        all.by_id = true;
        return sample_draw(&all, s, vocab - 1, scratch);
    }
    if (likely <= GATHERED_MAX) {
        pool.ids = gathered;
        pool.count = likely;
    }
    if (top_k < finite) {
        if (pool.count < top_k)
            pool = all;
        pool.cut = sample_search(&pool, MEASURE_COUNT, (double)top_k, false, best, scratch);
    }
    if (top_p < 1) {
        /* Of the tokens that top-k left, or of all. */
        double mass = (double)sample_measure(top_k < finite ? &pool : &all, MEASURE_MASS, 0, scratch) * top_p;
        if (pool.ids && (double)sample_measure(&pool, MEASURE_MASS, 0, scratch) < mass)
            pool = all;
        uint64_t cut = sample_search(&pool, MEASURE_MASS, mass, false, best, scratch);
        pool.cut = cut > pool.cut ? cut : pool.cut;
    }
    pool.floor = floor;
    return sample_draw(&pool, s, best, scratch);
}

__global__ void __launch_bounds__(THREADS) sample_kernel(const __grid_constant__ struct sample_args args)
{
    FT_SHARED(uint64_t, scratch, 33);
    FT_SHARED(uint32_t, gathered, GATHERED_MAX);
    FT_SHARED(uint32_t, gathered_count, 1);
    ft_begin_next();
    ft_wait_previous();
    struct ft_cuda_sampling s = args.sampling[blockIdx.x];
    if (!s.wanted)
        return;
    float *logits = args.logits + (uint64_t)blockIdx.x * args.vocab;
    uint32_t *index = args.index + (uint64_t)blockIdx.x * args.vocab, finite, token = FT_NONE;
    uint64_t best = 0, count = 0;
    if (s.repetition_penalty != 1.0f && s.repetition_penalty > 0) {
        sample_penalise(logits, args.vocab, &s, index);
        sample_best(logits, 0, args.vocab, &best, &finite, scratch);
    } else {
        for (uint32_t i = threadIdx.x; i < args.slices; i += blockDim.x) {
            const uint32_t *slice = index + i * SLICE_WORDS;
            uint64_t rank = (uint64_t)slice[0] << 32 | slice[1];
            best = rank > best ? rank : best;
            count += slice[2];
        }
        best = sample_block(best, false, scratch);
        finite = (uint32_t)sample_block(count, true, scratch);
    }
    if (finite) {
        token = ~(uint32_t)best;
        if (s.temperature > 0) /* index becomes the weights: all slices were read before the sums above */
            token = sample_random(logits, (float *)index, args.vocab, &s, best, finite, gathered,
                                  gathered_count, scratch);
    }
    if (threadIdx.x > 0)
        return;
    args.sampled[blockIdx.x] = token;
    uint32_t *failed = args.failed + args.logit_row[blockIdx.x];
    if (token == FT_NONE && *failed == 0)
        *failed = args.layers + 1;
}

int ft_cuda_sample(const struct ft_cuda *c, void *stream)
{
    uint32_t vocab = c->model->vocab, rows = c->step.logit_rows;
    struct sample_args args = {
        c->base + c->space.logits, (uint32_t *)(c->base + c->space.sample_index), c->step.sampling,
        c->step.logit_row, c->step.sampled, c->step.failed, vocab,
        /* a slice's result needs room in the row's index, and a slice is worth a block */
        FT_MAX(1u, FT_MIN(SLICES_MAX, FT_MIN(vocab / SLICE_WORDS, vocab / 1024))), c->model->layer_count,
        ft_cuda_stamp_of(c, c->model->layer_count, FT_CUDA_STAMP_SAMPLE)};
    int status = FT_LAUNCH_NEXT(slice_kernel, dim3(args.slices, rows), dim3(SLICE_THREADS), 0, stream, args);
    return status ? status : FT_LAUNCH_NEXT(sample_kernel, dim3(rows), dim3(THREADS), 0, stream, args);
}
