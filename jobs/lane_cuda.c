/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing the GPU lane: device, memory, buffers of the exchange. */
#include "jobs/lane_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "jobs/lane_cuda_internal.h"

#define ARCH_MIN 75u

int ft_cuda_check(const struct ft_lane_cuda *lane, int error, struct ft_error *err, const char *what)
{
    if (error == cudaSuccess)
        return FT_OK;
    (void)cudaGetLastError(); /* or the next call would report it again */
    bool memory = error == cudaErrorMemoryAllocation;
    return ft_error_set(err, memory ? FT_MEMORY : FT_SYSTEM, "GPU %d: %s: %s (%s)%s", lane ? lane->gpu : 0,
                        what, cudaGetErrorString((cudaError_t)error), cudaGetErrorName((cudaError_t)error),
                        memory ? ": state less with --vram, or raise the memlock limit (ulimit -l)" : "");
}

void ft_cuda_break(struct ft_lane_cuda *lane, int error, const char *what)
{
    struct ft_lane_cuda *first = lane->first;
    if (!first->broken) {
        snprintf(first->broken_by, sizeof first->broken_by, "%s%s%.100s", what, error ? ": " : "",
                 error ? cudaGetErrorString((cudaError_t)error) : "");
        first->broken_gpu = lane->gpu;
    }
    first->broken = true;
}

int ft_lane_cuda_find(uint32_t gpu, struct ft_gpu_info *info, struct ft_error *err)
{
    int driver = 0, count = 0;
    struct cudaDeviceProp *properties;
    memset(info, 0, sizeof *info);
    cudaError_t error = cudaDriverGetVersion(&driver);
    if (error != cudaSuccess || driver == 0)
        return ft_error_set(err, FT_UNSUPPORTED,
                            "no NVIDIA driver answers: install it (nvidia-smi must list the GPU), or use "
                            "--device host or none");
    error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess)
        (void)cudaGetLastError();
    if (error == cudaErrorInsufficientDriver)
        return ft_error_set(
            err, FT_UNSUPPORTED,
            "the NVIDIA driver supports CUDA %d.%d, this build needs a newer one: update the driver, or use "
            "--device host or none",
            driver / 1000, driver % 1000 / 10);
    if (error != cudaSuccess || count == 0)
        return ft_error_set(
            err, FT_UNSUPPORTED, "the NVIDIA driver shows no GPU (%s): use --device host or none",
            error == cudaSuccess ? "CUDA_VISIBLE_DEVICES may hide it" : cudaGetErrorString(error));
    info->count = (uint32_t)count;
    if (gpu >= info->count)
        return ft_error_set(err, FT_USAGE, "--gpus %u: there are %u GPUs, numbered from 0", gpu, info->count);
    properties = malloc(sizeof *properties);
    if (!properties)
        return ft_error_set(err, FT_MEMORY, "no memory to look at GPU %u", gpu);
    error = cudaGetDeviceProperties(properties, (int)gpu);
    if (error == cudaSuccess) {
        snprintf(info->name, sizeof info->name, "%.90s", properties->name);
        info->major = (uint32_t)properties->major;
        info->minor = (uint32_t)properties->minor;
        info->multiprocessors = (uint32_t)properties->multiProcessorCount;
        info->total_bytes = properties->totalGlobalMem;
    }
    free(properties);
    if (error != cudaSuccess)
        return ft_error_set(err, FT_SYSTEM, "GPU %u: cannot be asked for its properties: %s", gpu,
                            cudaGetErrorString(error));
    if (info->major * 10 + info->minor < ARCH_MIN)
        return ft_error_set(
            err, FT_UNSUPPORTED,
            "GPU %u (%s) has compute capability %u.%u, ft needs 7.5 or newer: use --device host or none", gpu,
            info->name, info->major, info->minor);
    size_t free_bytes = 0, total_bytes = 0;
    error = cudaSetDevice((int)gpu);
    if (error == cudaSuccess)
        error = cudaMemGetInfo(&free_bytes, &total_bytes);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return ft_error_set(err, FT_UNSUPPORTED, "GPU %u (%s) cannot be used: %s", gpu, info->name,
                            cudaGetErrorString(error));
    }
    info->free_bytes = free_bytes;
    return FT_OK;
}

/* ---- memory ---- */

int ft_cuda_copy_throttled(struct ft_lane_cuda *lane, uint32_t *throttle, double link_bytes_per_s, void *to,
                           const void *from, uint64_t bytes)
{
    bool throttled = link_bytes_per_s > 0;
    int error = throttled ? ft_cuda_throttle_begin(throttle, lane->copy) : 0;
    if (!error)
        error = (int)cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, lane->copy);
    if (!error && throttled)
        error =
            ft_cuda_throttle_end(throttle, (uint64_t)((double)bytes / link_bytes_per_s * 1e9), lane->copy);
    return error;
}

int ft_cuda_alloc(struct ft_lane_cuda *lane, enum ft_tier tier, uint64_t bytes, const char *what, void **out,
                  struct ft_error *err)
{
    bool device = tier == FT_TIER_DEVICE;
    uint32_t *count = device ? &lane->device_block_count : &lane->pinned_block_count;
    *out = NULL;
    if (!bytes)
        return FT_OK;
    FT_ASSERT_LT(*count, FT_CUDA_BLOCKS_MAX);
    cudaError_t error = device ? cudaMalloc(out, bytes)
                               : cudaHostAlloc(out, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess && error != cudaErrorMemoryAllocation && device)
        return ft_cuda_check(lane, (int)error, err, what);
    if (error != cudaSuccess) {
        size_t free_bytes = 0, total_bytes = 0;
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&free_bytes, &total_bytes);
        if (device)
            return ft_error_set(
                err, FT_MEMORY,
                "GPU %d: %.2f GB for %s do not fit (%.2f of %.2f GB are free): lower --moe-cache-size, "
                "--kv-tokens or --chunk, or state less with --vram",
                lane->gpu, (double)bytes * 1e-9, what, (double)free_bytes * 1e-9, (double)total_bytes * 1e-9);
        return ft_error_set(
            err, FT_MEMORY,
            "%.2f MB of pinned memory for %s were refused (%s): raise the memlock limit (ulimit -l)",
            (double)bytes * 1e-6, what, cudaGetErrorString(error));
    }
    if (device)
        lane->device_bytes[*count] = bytes;
    (device ? lane->device_blocks : lane->pinned_blocks)[(*count)++] = *out;
    if (device)
        error = cudaMemset(*out, 0, bytes);
    else
        memset(*out, 0, bytes);
    return ft_cuda_check(lane, (int)error, err, what);
}

const struct ft_memory *ft_lane_cuda_memory(const struct ft_lane_cuda *lane)
{
    return &lane->memory;
}

void ft_lane_cuda_map_changed(struct ft_lane_cuda *lane)
{
    for (; lane; lane = lane->next)
        lane->map_dirty = true;
}

const char *ft_lane_cuda_note(const struct ft_lane_cuda *lane)
{
    return lane->next ? lane->notes : lane->note;
}

/* ---- opening and closing ---- */

int ft_lane_cuda_open(struct ft_lane_cuda **out, uint32_t gpu, struct ft_error *err)
{
    struct ft_gpu_info info;
    *out = NULL;
    int status = ft_lane_cuda_find(gpu, &info, err);
    if (status != FT_OK)
        return status;
    struct ft_lane_cuda *lane = calloc(1, sizeof *lane);
    if (!lane)
        return ft_error_set(err, FT_MEMORY, "no memory for the GPU lane");
    lane->gpu = (int)gpu;
    lane->info = info;
    lane->first = lane;
    lane->memory = ft_cuda_memory;
    lane->memory.context = lane;
    /* Polling, not blocking: waits inside a step are the driver's own, outside they are short. */
    status = FT_CUDA_TRY(lane, cudaStreamCreateWithFlags(&lane->compute, cudaStreamNonBlocking), err,
                         "a compute stream");
    if (status == FT_OK)
        status = FT_CUDA_TRY(lane, cudaStreamCreateWithFlags(&lane->copy, cudaStreamNonBlocking), err,
                             "a copy stream");
    for (uint32_t i = 0; i < 2 && status == FT_OK; i++) {
        status = FT_CUDA_TRY(lane, cudaEventCreateWithFlags(&lane->staged[i], cudaEventDisableTiming), err,
                             "an event");
        if (status == FT_OK)
            status = FT_CUDA_TRY(lane, cudaEventCreateWithFlags(&lane->grouped[i], cudaEventDisableTiming),
                                 err, "an event");
        if (status == FT_OK)
            status = FT_CUDA_TRY(lane, cudaEventCreateWithFlags(&lane->ahead[i], cudaEventDisableTiming), err,
                                 "an event");
    }
    if (status == FT_OK)
        status = FT_CUDA_TRY(lane, cudaEventCreateWithFlags(&lane->last_group, cudaEventDisableTiming), err,
                             "an event");
    if (status == FT_OK)
        status = FT_CUDA_TRY(lane, cudaEventCreateWithFlags(&lane->handed, cudaEventDisableTiming), err,
                             "an event");
    if (status != FT_OK) {
        ft_lane_cuda_close(lane);
        return status;
    }
    *out = lane;
    return FT_OK;
}

/* Copies between the two go directly where the machine can; elsewhere the driver takes them through the host. */
static void join_peers(struct ft_lane_cuda *from, const struct ft_lane_cuda *to)
{
    int can = 0;
    cudaError_t error = cudaDeviceCanAccessPeer(&can, from->gpu, to->gpu);
    if (error == cudaSuccess && can && ft_cuda_use(from) == 0)
        error = cudaDeviceEnablePeerAccess(to->gpu, 0);
    from->peer = can && (error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled);
    (void)cudaGetLastError();
}

int ft_lane_cuda_join(struct ft_lane_cuda *lane, uint32_t gpu, struct ft_error *err)
{
    struct ft_lane_cuda *last = lane, *new;
    while (last->next)
        last = last->next;
    int status = ft_lane_cuda_open(&new, gpu, err);
    if (status != FT_OK)
        return status;
    new->first = lane;
    last->next = new;
    join_peers(last, new);
    return FT_OK;
}

static void close_one(struct ft_lane_cuda *lane)
{
    (void)ft_cuda_use(lane);
    if (lane->compute)
        (void)cudaStreamSynchronize(lane->compute);
    if (lane->copy)
        (void)cudaStreamSynchronize(lane->copy);
    ft_cuda_drop_captures(lane);
    for (uint32_t i = 0; i < 2; i++) {
        if (lane->staged[i])
            (void)cudaEventDestroy(lane->staged[i]);
        if (lane->grouped[i])
            (void)cudaEventDestroy(lane->grouped[i]);
        if (lane->ahead[i])
            (void)cudaEventDestroy(lane->ahead[i]);
    }
    if (lane->last_group)
        (void)cudaEventDestroy(lane->last_group);
    if (lane->handed)
        (void)cudaEventDestroy(lane->handed);
    for (uint32_t i = 0; i < lane->registered_count; i++)
        (void)cudaHostUnregister(lane->registered[i]);
    for (uint32_t i = 0; i < lane->device_block_count; i++)
        (void)cudaFree(lane->device_blocks[i]);
    for (uint32_t i = 0; i < lane->pinned_block_count; i++)
        (void)cudaFreeHost(lane->pinned_blocks[i]);
    if (lane->copy)
        (void)cudaStreamDestroy(lane->copy);
    if (lane->compute)
        (void)cudaStreamDestroy(lane->compute);
    (void)cudaGetLastError();
    if (lane->reserved)
        (void)munmap(lane->reserved, lane->reserved_bytes);
    free(lane->layers);
    free(lane->staged_at);
    free(lane->angles);
    free(lane);
}

void ft_lane_cuda_close(struct ft_lane_cuda *lane)
{
    /* Nobody's stream may end behind memory of another that is gone: activations go from GPU to GPU. */
    for (struct ft_lane_cuda *l = lane; l; l = l->next) {
        (void)ft_cuda_use(l);
        if (l->compute)
            (void)cudaStreamSynchronize(l->compute);
    }
    for (struct ft_lane_cuda *next; lane; lane = next) {
        next = lane->next;
        close_one(lane);
    }
}
