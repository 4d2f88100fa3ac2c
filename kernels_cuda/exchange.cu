/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What passes between the device and its driver thread: waits, the end of a step, gathers from host memory;
 * and the two measurements behind them (read ceiling, litmus of the flags).
 *
 * One thread of one block polls or reads a mapped word; the others get what it found through shared memory.
 * Every wait ends when the driver raises `abort`.
 */
#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

#include "kernels_cuda/grouping.cuh"

#define WAIT_THREADS 128
#define MOVES_AT_ONCE 128
#define POLLS_PER_ABORT 1000u
#define LITMUS_PATIENCE_NS 2000000000ull

static __device__ __forceinline__ bool is_raised(const uint32_t *flag, uint32_t epoch)
{
    return (int32_t)(ft_load_acquire_system(flag) - epoch) >= 0;
}

/* One thread. Acquire: pairs with the driver's release store, or the copy stream's write behind its copies.
 * False: the driver has given up. */
static __device__ bool wait_for(const uint32_t *flag, const uint32_t *abort, uint32_t epoch)
{
    for (uint32_t polls = 1; !is_raised(flag, epoch); polls++)
        if (polls % POLLS_PER_ABORT == 0 && is_raised(abort, epoch))
            return false;
    return true;
}

/* Whether any pair waits for the host; all threads call it. `any` [1] in shared memory. */
static __device__ bool has_pairs_on_cpu(const uint32_t *on_cpu, uint32_t pairs, uint32_t *any)
{
    if (threadIdx.x == 0)
        *any = 0;
    __syncthreads();
    for (uint32_t p = threadIdx.x; p < pairs; p += blockDim.x)
        if (__ldcg(on_cpu + p))
            *any = 1; /* all writers write the same */
    __syncthreads();
    return *any != 0;
}

struct wait_args {
    struct ft_cuda_exchange exchange;
    struct ft_group_args group; /* of the fetched experts */
    const uint32_t *epoch;
    uint32_t layer;
    uint64_t *begin_stamp, *end_stamp;
};

/* The moves in the order of the driver's answer: a later one may take what an earlier one gave. */
static __device__ void apply_moves(const struct wait_args *a, uint32_t count, uint4 *held)
{
    const struct ft_cuda_exchange *x = &a->exchange;
    const uint4 *moves = (const uint4 *)(x->moves + (uint64_t)a->layer * x->moves_max);
    for (uint32_t first = 0; first < count; first += MOVES_AT_ONCE) {
        uint32_t n = min(count - first, (uint32_t)MOVES_AT_ONCE);
        for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
            held[i] = __ldcv(moves + first + i); /* mapped: each word is read once, by one thread */
        __syncthreads();
        if (threadIdx.x == 0)
            for (uint32_t i = 0; i < n; i++) { /* x layer, y expert, z slot, w victim */
                if (held[i].w != FT_NONE)
                    x->slot_of[held[i].w] = FT_NONE;
                x->slot_of[(uint64_t)held[i].x * a->group.experts + held[i].y] = held[i].z;
            }
        __syncthreads();
    }
}

static __global__ void wait_fetched_kernel(struct wait_args a)
{
    FT_SHARED(uint4, held, MOVES_AT_ONCE);
    FT_SHARED(uint32_t, word, 2);
    FT_SHARED(struct ft_grouping, grouping, 1);
    const struct ft_cuda_exchange *x = &a.exchange;
    ft_wait_previous();
    if (threadIdx.x == 0 && a.begin_stamp)
        *a.begin_stamp = ft_global_timer();
    if (has_pairs_on_cpu(x->on_cpu, a.group.pairs, word)) {
        if (threadIdx.x == 0) {
            bool answered =
                wait_for(x->fetched + (uint64_t)a.layer * FT_CUDA_FLAG_STRIDE, x->abort, *a.epoch);
            uint32_t count = answered ? __ldcv(x->move_count + a.layer) : 0;
            word[1] = min(count, x->moves_max);
        }
        __syncthreads();
        apply_moves(&a, word[1], held);
        ft_group_pairs(&a.group, grouping);
    } else if (threadIdx.x == 0) {
        *x->fetched_list.group_count = 0;
        x->fetched_list.pair_begin[0] = 0;
    }
    ft_begin_next(); /* not before: blocks beside this one would keep the kernels of the copy stream waiting */
    if (threadIdx.x == 0 && a.end_stamp)
        *a.end_stamp = ft_global_timer();
}

static __global__ void wait_computed_kernel(struct wait_args a)
{
    FT_SHARED(uint32_t, word, 1);
    ft_begin_next(); /* combine alone: its few blocks leave room for the kernels of the copy stream */
    ft_wait_previous();
    if (threadIdx.x == 0 && a.begin_stamp)
        *a.begin_stamp = ft_global_timer();
    bool any = has_pairs_on_cpu(a.exchange.on_cpu, a.group.pairs, word);
    if (threadIdx.x == 0 && any)
        wait_for(a.exchange.computed + (uint64_t)a.layer * FT_CUDA_FLAG_STRIDE, a.exchange.abort, *a.epoch);
}

/* ---- waits of a step of one row ----
 *
 * Two warps. The first does everything while the kernel in front still runs: on_cpu was there when this one
 * began, and nothing that the kernel in front reads or writes is touched (expert_args.cuh). The second waits
 * for that kernel's end, which is when the waiting begins that the stamps tell of.
 */
#define ONE_ROW_THREADS 64
#define ONE_ROW_TOPK 32u

/* True in the second warp, which has nothing else to do. */
static __device__ __forceinline__ bool stamp_beside(uint64_t *stamp)
{
    if (threadIdx.x < 32)
        return false;
    ft_wait_previous();
    if (threadIdx.x == 32 && stamp)
        *stamp = ft_global_timer();
    return true;
}

/* First warp: whether any pair waits for the host. */
static __device__ __forceinline__ bool has_pair_on_cpu(const uint32_t *on_cpu, uint32_t pairs)
{
    return __any_sync(0xffffffffu, threadIdx.x < pairs && __ldcg(on_cpu + threadIdx.x) != 0);
}

/* First warp: as apply_moves; the first 32 are read together with their count. */
static __device__ void apply_moves_of_row(const struct wait_args *a, bool answered)
{
    const struct ft_cuda_exchange *x = &a->exchange;
    const uint4 *moves = (const uint4 *)(x->moves + (uint64_t)a->layer * x->moves_max);
    uint32_t lane = threadIdx.x, count = 0;
    uint4 held = make_uint4(0, 0, 0, 0);
    if (answered) {
        count = lane == 0 ? __ldcv(x->move_count + a->layer) : 0;
        held = lane < x->moves_max ? __ldcv(moves + lane) : held;
    }
    count = min(__shfl_sync(0xffffffffu, count, 0), x->moves_max);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t from = i % 32;
        if (i && !from)
            held = i + lane < count ? __ldcv(moves + i + lane) : held;
        uint32_t layer = __shfl_sync(0xffffffffu, held.x, (int)from);
        uint32_t expert = __shfl_sync(0xffffffffu, held.y, (int)from);
        uint32_t slot = __shfl_sync(0xffffffffu, held.z, (int)from);
        uint32_t victim = __shfl_sync(0xffffffffu, held.w, (int)from);
        if (lane)
            continue;
        if (victim != FT_NONE)
            x->slot_of[victim] = FT_NONE;
        x->slot_of[(uint64_t)layer * a->group.experts + expert] = slot;
    }
    __syncwarp();
}

static __global__ void wait_fetched_row_kernel(struct wait_args a)
{
    const struct ft_cuda_exchange *x = &a.exchange;
    uint32_t lane = threadIdx.x, answered = 0, epoch = *a.epoch;
    if (stamp_beside(a.begin_stamp))
        return;
    if (has_pair_on_cpu(x->on_cpu, a.group.pairs)) {
        if (lane == 0)
            answered = wait_for(x->fetched + (uint64_t)a.layer * FT_CUDA_FLAG_STRIDE, x->abort, epoch);
        apply_moves_of_row(&a, __shfl_sync(0xffffffffu, answered, 0) != 0);
        bool listed = lane < a.group.pairs;
        ft_group_one_row(&a.group, listed ? __ldcg(a.group.ids + lane) : 0, listed);
    } else if (lane == 0) {
        *x->fetched_list.group_count = 0;
        x->fetched_list.pair_begin[0] = 0;
    }
    ft_wait_previous();
    ft_begin_next(); /* not before: blocks beside this one would keep the kernels of the copy stream waiting */
    if (lane == 0 && a.end_stamp)
        *a.end_stamp = ft_global_timer();
}

static __global__ void wait_computed_row_kernel(struct wait_args a)
{
    uint32_t epoch = *a.epoch;
    ft_begin_next();
    if (stamp_beside(a.begin_stamp))
        return;
    if (has_pair_on_cpu(a.exchange.on_cpu, a.group.pairs) && threadIdx.x == 0)
        wait_for(a.exchange.computed + (uint64_t)a.layer * FT_CUDA_FLAG_STRIDE, a.exchange.abort, epoch);
    __syncwarp();
    ft_wait_previous();
}

static struct wait_args wait_args_of(const struct ft_cuda *c, uint32_t layer, enum ft_cuda_stamp begin)
{
    struct wait_args a = {};
    a.exchange = c->exchange;
    a.group = ft_group_args_of(c, layer, FT_GROUP_FETCHED);
    a.epoch = c->step.epoch;
    a.layer = layer;
    a.begin_stamp = ft_cuda_stamp_of(c, layer, begin);
    a.end_stamp = ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_FETCHED);
    return a;
}

/* A row whose list is no longer than a warp. */
static bool is_one_row(const struct ft_cuda *c)
{
    return c->step.rows == 1 && c->model->topk <= ONE_ROW_TOPK;
}

extern "C" int ft_cuda_wait_fetched(const struct ft_cuda *c, uint32_t layer, void *stream)
{
    struct wait_args a = wait_args_of(c, layer, FT_CUDA_STAMP_WAIT_FETCHED);
    if (is_one_row(c))
        return FT_LAUNCH_NEXT(wait_fetched_row_kernel, dim3(1), dim3(ONE_ROW_THREADS), 0, stream, a);
    return FT_LAUNCH_NEXT(wait_fetched_kernel, dim3(1), dim3(WAIT_THREADS), 0, stream, a);
}

extern "C" int ft_cuda_wait_computed(const struct ft_cuda *c, uint32_t layer, void *stream)
{
    struct wait_args a = wait_args_of(c, layer, FT_CUDA_STAMP_WAIT_COMPUTED);
    if (is_one_row(c))
        return FT_LAUNCH_NEXT(wait_computed_row_kernel, dim3(1), dim3(ONE_ROW_THREADS), 0, stream, a);
    return FT_LAUNCH_NEXT(wait_computed_kernel, dim3(1), dim3(32), 0, stream, a);
}

/* ---- end of a step ---- */

#define END_THREADS 256u

/* The last stamp is taken here; all of them go to the host at once. */
static __global__ void __launch_bounds__(END_THREADS)
    end_kernel(uint32_t *done, const uint32_t *epoch, uint64_t *stamp, const uint64_t *stamps,
               uint64_t *host_stamps, uint32_t stamp_count)
{
    ft_wait_previous();
    if (stamp && threadIdx.x == 0)
        *stamp = ft_global_timer();
    __syncthreads();
    for (uint32_t i = threadIdx.x; host_stamps && i < stamp_count; i += END_THREADS)
        host_stamps[i] = stamps[i];
    __syncthreads();
    if (threadIdx.x == 0)
        ft_store_release_system(done, *epoch); /* pairs with the driver's acquire load */
}

extern "C" int ft_cuda_end(const struct ft_cuda *c, void *stream)
{
    uint64_t *stamp = ft_cuda_stamp_of(c, c->model->layer_count, FT_CUDA_STAMP_END);
    return FT_LAUNCH_NEXT(end_kernel, dim3(1), dim3(END_THREADS), 0, stream, c->exchange.done, c->step.epoch,
                          stamp, c->stamps, c->host_stamps, ft_cuda_stamp_count(c->model->layer_count));
}

/* ---- gather ---- */

#define GATHER_THREADS 512u
#define GATHER_FLIGHT 4u /* loads of 16 bytes under way per thread */
#define GATHER_CHUNK (GATHER_THREADS * GATHER_FLIGHT)

/* Blocks walk chunks of 32 KB over all blobs, so that few blobs and many keep the same number of reads under way. */
static __global__ void __launch_bounds__(GATHER_THREADS)
    gather_kernel(const char *const *from, char *const *to, uint32_t count, uint64_t units)
{
    uint64_t chunks = (units + GATHER_CHUNK - 1) / GATHER_CHUNK;
    for (uint64_t chunk = blockIdx.x; chunk < chunks * count; chunk += gridDim.x) {
        uint64_t blob = chunk / chunks, first = chunk % chunks * GATHER_CHUNK + threadIdx.x;
        const uint4 *in = (const uint4 *)from[blob];
        uint4 *out = (uint4 *)to[blob];
        uint4 held[GATHER_FLIGHT];
#pragma unroll
        for (uint32_t i = 0; i < GATHER_FLIGHT; i++)
            if (first + i * GATHER_THREADS < units)
                held[i] = __ldcs(in + first + i * GATHER_THREADS);
#pragma unroll
        for (uint32_t i = 0; i < GATHER_FLIGHT; i++)
            if (first + i * GATHER_THREADS < units)
                out[first + i * GATHER_THREADS] = held[i];
    }
}

extern "C" int ft_cuda_gather(const char *const *from, char *const *to, uint32_t count, uint64_t bytes,
                              uint32_t blocks, void *stream)
{
    if (!count || !bytes || !blocks)
        return 0;
    return FT_LAUNCH(gather_kernel, dim3(blocks), dim3(GATHER_THREADS), 0, stream, from, to, count,
                     bytes / 16);
}

/* ---- read ceiling ---- */

static __global__ void __launch_bounds__(GATHER_THREADS)
    read_kernel(const uint4 *data, uint64_t units, uint32_t *sink)
{
    uint32_t sum = 0;
    for (uint64_t chunk = blockIdx.x; chunk * GATHER_CHUNK < units; chunk += gridDim.x) {
        uint64_t first = chunk * GATHER_CHUNK + threadIdx.x;
        uint4 held[GATHER_FLIGHT];
#pragma unroll
        for (uint32_t i = 0; i < GATHER_FLIGHT; i++)
            held[i] = first + i * GATHER_THREADS < units ? __ldcs(data + first + i * GATHER_THREADS)
                                                         : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (uint32_t i = 0; i < GATHER_FLIGHT; i++)
            sum += held[i].x + held[i].y + held[i].z + held[i].w;
    }
    for (int step = 16; step > 0; step >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if ((threadIdx.x & 31) == 0 && sum)
        atomicAdd(sink, sum); /* the sum of all words: the reads cannot be left out */
}

extern "C" int ft_cuda_read(const void *data, uint64_t bytes, uint32_t blocks, uint32_t *sink, void *stream)
{
    return FT_LAUNCH(read_kernel, dim3(blocks ? blocks : 1), dim3(GATHER_THREADS), 0, stream,
                     (const uint4 *)data, bytes / 16, sink);
}

/* ---- litmus ---- */

static __global__ void litmus_kernel(uint32_t *to, const uint32_t *payload, uint32_t *answer, uint32_t *back,
                                     uint32_t rounds, uint32_t *bad)
{
    uint32_t errors = 0;
    for (uint32_t i = 1; i <= rounds; i++) {
        uint64_t begin = ft_global_timer();
        for (uint32_t polls = 1; (int32_t)(ft_load_acquire_system(to) - i) < 0; polls++)
            if (polls % POLLS_PER_ABORT == 0 && ft_global_timer() - begin > LITMUS_PATIENCE_NS) {
                *bad += rounds - i + 1; /* the host is gone: the rounds that are left count as errors */
                return;
            }
        errors += *payload != i; /* a plain load, as the kernels read what a flag announces */
        *answer = i;
        ft_store_release_system(back, i);
    }
    *bad += errors;
}

extern "C" int ft_cuda_litmus(uint32_t *to, const uint32_t *payload, uint32_t *answer, uint32_t *back,
                              uint32_t rounds, uint32_t *bad, void *stream)
{
    return FT_LAUNCH(litmus_kernel, dim3(1), dim3(1), 0, stream, to, payload, answer, back, rounds, bad);
}
