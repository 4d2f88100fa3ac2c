/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the GPUs as the session sees it: arenas, and struct ft_memory. With several GPUs a block of KV or
 * state lies in parts:
 *
 *   reserved addresses   | block 0: part 0 part 1 | block 1: part 0 part 1 | ..       nothing is mapped there
 *   GPU 0                  part 0 of block 0, of block 1, ..
 *   GPU 1                  part 1 of block 0, of block 1, ..
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "jobs/lane_cuda_internal.h"

static struct ft_lane_cuda *lane_at(struct ft_lane_cuda *lane, uint32_t at)
{
    while (at--)
        lane = lane->next;
    return lane;
}

int ft_lane_cuda_arena(struct ft_lane_cuda *lane, uint32_t at, struct ft_arena *arena, enum ft_tier tier,
                       uint64_t bytes, struct ft_error *err)
{
    bool device = tier == FT_TIER_DEVICE;
    lane = lane_at(lane, at);
    *arena = (struct ft_arena){.name = device ? "device" : "pinned"};
    bytes = FT_MAX(bytes, (uint64_t)FT_ARENA_ALIGN);
    int status = ft_cuda_check(lane, ft_cuda_use(lane), err, "choosing it");
    if (status == FT_OK)
        status = ft_cuda_alloc(lane, tier, bytes,
                               !device                  ? "exchanged activations"
                               : ft_cuda_is_chain(lane) ? "expert slots and staging buffers"
                                                        : "expert slots, KV cache and state",
                               (void **)&arena->base, err);
    arena->bytes = status == FT_OK ? bytes : 0;
    return status;
}

int ft_lane_cuda_reserve(struct ft_lane_cuda *lane, struct ft_arena *arena, uint64_t bytes,
                         struct ft_error *err)
{
    *arena = (struct ft_arena){.name = "reserved"};
    bytes = ft_round_up(FT_MAX(bytes, (uint64_t)FT_ARENA_ALIGN), 4096);
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return ft_error_set(err, FT_MEMORY, "cannot reserve %llu MiB of addresses: %s; raise ulimit -v",
                            (unsigned long long)(bytes >> 20), strerror(errno));
    lane->reserved = base;
    lane->reserved_bytes = bytes;
    arena->base = base;
    arena->bytes = bytes;
    return FT_OK;
}

int ft_lane_cuda_spread(struct ft_lane_cuda *lane, enum ft_cuda_spread which, void *base, uint64_t bytes,
                        uint32_t count, const uint64_t *part_bytes, struct ft_error *err)
{
    static const char *const names[] = {"the KV cache", "sequence state"};
    uint64_t begin = 0;
    int status = FT_OK;
    lane->blocks[which] = (struct ft_cuda_blocks){.base = base, .bytes = bytes, .count = base ? count : 0};
    for (struct ft_lane_cuda *l = lane; l && status == FT_OK; l = l->next, part_bytes++) {
        struct ft_cuda_parts *parts = &l->parts[which];
        *parts = (struct ft_cuda_parts){.begin = begin, .bytes = *part_bytes};
        begin += *part_bytes;
        status = ft_cuda_check(l, ft_cuda_use(l), err, "choosing it");
        if (status == FT_OK)
            status = ft_cuda_alloc(l, FT_TIER_DEVICE, count * *part_bytes, names[which],
                                   (void **)&parts->memory, err);
    }
    FT_ASSERT_EQ(status == FT_OK ? begin : bytes, bytes);
    return status;
}

/* ---- one GPU ---- */

/* Of sequences and snapshots, between steps. What fails here fails the next step: going on with half a state
 * would be a wrong text. */
static void zero_on(struct ft_lane_cuda *lane, void *at, uint64_t bytes)
{
    if (ft_cuda_is_broken(lane)) /* the stream may never end */
        return;
    int error = ft_cuda_use(lane); /* the caller may be another thread than the opener */
    if (!error)
        error = (int)cudaMemsetAsync(at, 0, bytes, lane->compute);
    if (!error)
        error = (int)cudaStreamSynchronize(lane->compute);
    if (error)
        ft_cuda_break(lane, error, "clearing state");
}

static void copy_on(struct ft_lane_cuda *lane, void *to, const void *from, uint64_t bytes)
{
    if (ft_cuda_is_broken(lane))
        return;
    int error = ft_cuda_use(lane);
    if (!error)
        error = (int)cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, lane->compute);
    if (!error)
        error = (int)cudaStreamSynchronize(lane->compute);
    if (error)
        ft_cuda_break(lane, error, "copying state");
}

/* ---- several ---- */

static const struct ft_cuda_blocks *blocks_of(const struct ft_lane_cuda *first, const void *at)
{
    for (uint32_t i = 0; i < FT_CUDA_SPREAD_COUNT; i++) {
        const struct ft_cuda_blocks *b = &first->blocks[i];
        if (b->base && (const char *)at >= b->base && (const char *)at < b->base + b->bytes * b->count)
            return b;
    }
    return NULL;
}

void *ft_cuda_part_of(const struct ft_lane_cuda *lane, enum ft_cuda_spread which, void *block)
{
    const struct ft_cuda_blocks *blocks = &lane->first->blocks[which];
    if (!ft_cuda_is_chain(lane) || !blocks->base || !block)
        return block;
    uint64_t index = (uint64_t)((char *)block - blocks->base) / blocks->bytes;
    return lane->parts[which].memory + index * lane->parts[which].bytes;
}

/* Whose memory a slot or a staging buffer is; the first when it is nobody's. */
static struct ft_lane_cuda *owner_of(struct ft_lane_cuda *first, const void *at)
{
    for (struct ft_lane_cuda *lane = first; lane; lane = lane->next)
        for (uint32_t i = 0; i < lane->device_block_count; i++) {
            const char *begin = lane->device_blocks[i];
            if ((const char *)at >= begin && (const char *)at < begin + lane->device_bytes[i])
                return lane;
        }
    return first;
}

/* Walks the parts of `bytes` bytes from `at` on. host: the other side, moved along; NULL = zeroes. */
static void walk_parts(struct ft_lane_cuda *first, const struct ft_cuda_blocks *blocks, const char *at,
                       char *host, bool into, uint64_t bytes)
{
    uint32_t which = (uint32_t)(blocks - first->blocks);
    for (uint64_t done = 0; done < bytes;) {
        uint64_t from = (uint64_t)(at - blocks->base) + done, block = from / blocks->bytes,
                 inside = from % blocks->bytes, step = 0;
        for (struct ft_lane_cuda *lane = first; lane && !step; lane = lane->next) {
            const struct ft_cuda_parts *p = &lane->parts[which];
            if (inside < p->begin || inside >= p->begin + p->bytes)
                continue;
            char *device = p->memory + block * p->bytes + (inside - p->begin);
            step = FT_MIN(p->begin + p->bytes - inside, bytes - done);
            if (!host)
                zero_on(lane, device, step);
            else if (into)
                copy_on(lane, device, host + done, step);
            else
                copy_on(lane, host + done, device, step);
        }
        FT_ASSERT_LT(0, step);
        done += step;
    }
}

static void memory_zero(void *context, void *at, uint64_t bytes)
{
    struct ft_lane_cuda *first = context;
    const struct ft_cuda_blocks *blocks = blocks_of(first, at);
    if (blocks)
        walk_parts(first, blocks, at, NULL, true, bytes);
    else
        zero_on(owner_of(first, at), at, bytes);
}

/* One side is the host's. */
static void memory_copy(void *context, void *to, const void *from, uint64_t bytes)
{
    struct ft_lane_cuda *first = context;
    const struct ft_cuda_blocks *into = blocks_of(first, to), *out_of = blocks_of(first, from);
    if (into)
        walk_parts(first, into, to, (char *)(uintptr_t)from, true, bytes);
    else if (out_of)
        walk_parts(first, out_of, from, to, false, bytes);
    else
        copy_on(owner_of(first, to), to, from, bytes);
}

const struct ft_memory ft_cuda_memory = {.is_device = true, .zero = memory_zero, .copy = memory_copy};
