/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists the experts of a layer that lie in slots: pairs (row, place in its top-k list) of one expert become
 * one group, so that its weights are read once for all its rows. Groups stand in the order of their first
 * pair, pairs of a group in ascending order: the list depends on nothing but the ids and the slot map.
 */
#ifndef FT_KERNELS_CUDA_GROUPING_CUH
#define FT_KERNELS_CUDA_GROUPING_CUH

#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

/* Pairs of a decode step: all that its rows can have. */
#define FT_GROUP_PAIRS_MAX (FT_CUDA_DECODE_ROWS * FT_TOPK_MAX)

enum ft_group_which {
    FT_GROUP_RESIDENT, /* every pair whose expert has a slot; on_cpu is set for the others */
    FT_GROUP_FETCHED   /* pairs with on_cpu set whose expert has a slot by now; it is cleared */
};

/* Shared memory of one block. */
struct ft_grouping {
    union {
        struct {
            uint32_t slot[FT_GROUP_PAIRS_MAX];  /* FT_NONE: not listed */
            uint32_t count[FT_GROUP_PAIRS_MAX]; /* pairs of the group that begins here, else 0 */
        } pair;
        struct {
            uint32_t count[FT_EXPERTS_MAX], first[FT_EXPERTS_MAX];
        } expert;
    };
    uint32_t missing, group_count, pair_count;
};

struct ft_group_args {
    const uint32_t *ids;     /* [pairs] */
    const uint32_t *slot_of; /* [experts] of the layer */
    uint32_t pairs, topk, experts;
    enum ft_group_which which;
    uint32_t *on_cpu; /* [pairs] */
    const char *slots;
    uint64_t slot_bytes;
    struct ft_cuda_list list;
};

static inline struct ft_group_args ft_group_args_of(const struct ft_cuda *c, uint32_t layer,
                                                    enum ft_group_which which)
{
    struct ft_group_args a;
    a.ids = (const uint32_t *)(c->base + c->space.topk_ids);
    a.experts = c->model->expert_count;
    a.slot_of = c->exchange.slot_of + (uint64_t)layer * a.experts;
    a.topk = c->model->topk;
    a.pairs = c->step.rows * a.topk;
    a.which = which;
    a.on_cpu = c->exchange.on_cpu;
    a.slots = c->exchange.slots;
    a.slot_bytes = c->exchange.slot_bytes;
    a.list = which == FT_GROUP_FETCHED ? c->exchange.fetched_list : c->exchange.resident;
    return a;
}

/* The slot of pair p if the list wants it; keeps on_cpu and the count of what is missing. */
static __device__ __forceinline__ uint32_t ft_group_slot(const struct ft_group_args *a, uint32_t p,
                                                         struct ft_grouping *g)
{
    if (a->which == FT_GROUP_FETCHED && !a->on_cpu[p])
        return FT_NONE;
    uint32_t slot = a->slot_of[a->ids[p]];
    a->on_cpu[p] = slot == FT_NONE;
    if (slot == FT_NONE)
        atomicAdd(&g->missing, 1u);
    return slot;
}

static __device__ __forceinline__ void ft_group_begin(const struct ft_group_args *a, struct ft_grouping *g,
                                                      uint32_t group, uint32_t begin, uint32_t slot,
                                                      uint32_t count)
{
    a->list.blob[group] = a->slots + slot * a->slot_bytes;
    a->list.pair_begin[group] = begin;
    atomicAdd(&g->group_count, 1u);
    atomicAdd(&g->pair_count, count);
}

/* A thread per pair, which looks at all the others. */
static __device__ void ft_group_few(const struct ft_group_args *a, struct ft_grouping *g)
{
    const uint32_t *slots = g->pair.slot;
    for (uint32_t p = threadIdx.x; p < a->pairs; p += blockDim.x)
        g->pair.slot[p] = ft_group_slot(a, p, g);
    __syncthreads();
    for (uint32_t p = threadIdx.x; p < a->pairs; p += blockDim.x) {
        uint32_t slot = slots[p], before = 0, all = 0;
        for (uint32_t q = 0; slot != FT_NONE && q < a->pairs; q++) {
            bool same = slots[q] == slot;
            all += same;
            before += same && q < p;
        }
        g->pair.count[p] = before ? 0 : all;
    }
    __syncthreads();
    for (uint32_t p = threadIdx.x; p < a->pairs; p += blockDim.x) {
        uint32_t slot = slots[p], group = 0, begin = 0, before = 0, leader = p;
        if (slot == FT_NONE)
            continue;
        for (uint32_t q = p; q-- > 0;)
            if (slots[q] == slot) {
                before++;
                leader = q;
            }
        for (uint32_t q = 0; q < leader; q++) {
            group += g->pair.count[q] != 0;
            begin += g->pair.count[q];
        }
        a->list.pair_row[begin + before] = p / a->topk;
        a->list.pair_out[begin + before] = p;
        if (leader == p)
            ft_group_begin(a, g, group, begin, slot, g->pair.count[p]);
    }
}

/* A thread per expert, which looks at all pairs: batches that are longer than a decode step. */
static __device__ void ft_group_many(const struct ft_group_args *a, struct ft_grouping *g)
{
    uint32_t *count = g->expert.count, *first = g->expert.first;
    for (uint32_t e = threadIdx.x; e < a->experts; e += blockDim.x) {
        count[e] = 0;
        first[e] = FT_NONE;
    }
    __syncthreads();
    for (uint32_t p = threadIdx.x; p < a->pairs; p += blockDim.x)
        if (ft_group_slot(a, p, g) != FT_NONE) {
            atomicAdd(&count[a->ids[p]], 1u);
            atomicMin(&first[a->ids[p]], p);
        }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < a->experts; e += blockDim.x) {
        uint32_t group = 0, begin = 0;
        if (!count[e])
            continue;
        for (uint32_t other = 0; other < a->experts; other++)
            if (first[other] < first[e]) {
                group++;
                begin += count[other];
            }
        ft_group_begin(a, g, group, begin, a->slot_of[e], count[e]);
        for (uint32_t p = first[e], end = begin + count[e]; begin < end; p++)
            if (a->ids[p] == e) {
                a->list.pair_row[begin] = p / a->topk;
                a->list.pair_out[begin++] = p;
            }
    }
}

/* One row: its pairs are groups of one, list place j in lane j < topk <= 32. One warp; returns the pairs without a
 * slot in every lane. */
static __device__ __forceinline__ uint32_t ft_group_one_row(const struct ft_group_args *a, uint32_t id,
                                                            bool listed)
{
    uint32_t lane = threadIdx.x & 31;
    if (listed && a->which == FT_GROUP_FETCHED)
        listed = __ldcg(a->on_cpu + lane) != 0;
    uint32_t slot = listed ? __ldcg(a->slot_of + id) : FT_NONE;
    uint32_t found = __ballot_sync(0xffffffffu, slot != FT_NONE), all = __ballot_sync(0xffffffffu, listed);
    uint32_t group = (uint32_t)__popc(found & ((1u << lane) - 1)), count = (uint32_t)__popc(found);
    if (listed)
        a->on_cpu[lane] = slot == FT_NONE;
    if (slot != FT_NONE) {
        a->list.blob[group] = a->slots + slot * a->slot_bytes;
        a->list.pair_begin[group] = group;
        a->list.pair_row[group] = 0;
        a->list.pair_out[group] = lane;
    }
    if (lane == 0) {
        *a->list.group_count = count;
        a->list.pair_begin[count] = count;
    }
    return (uint32_t)__popc(all) - count;
}

/* Fills the list; g->missing = pairs without a slot. All threads of the block; ends with a barrier. */
static __device__ void ft_group_pairs(const struct ft_group_args *a, struct ft_grouping *g)
{
    if (threadIdx.x == 0)
        g->missing = g->group_count = g->pair_count = 0;
    __syncthreads();
    if (a->pairs <= FT_GROUP_PAIRS_MAX)
        ft_group_few(a, g);
    else
        ft_group_many(a, g);
    __syncthreads();
    if (threadIdx.x == 0) {
        *a->list.group_count = g->group_count;
        a->list.pair_begin[g->group_count] = g->pair_count;
    }
    __syncthreads();
}

#endif
