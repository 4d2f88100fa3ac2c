/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/gpu_mover.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "jobs/lane_cuda_internal.h"

#define SLOTS 64u                      /* copies land in turn in that many places */
#define READ_BYTES (UINT64_C(4) << 30) /* several times any L2 */
#define LINEAR_BYTES (UINT64_C(1) << 30)
#define ROUNDS 5u

struct ft_gpu_mover {
    struct ft_lane_cuda *lane; /* only its streams and memory are used */
    char *slots;
    uint64_t slot_bytes;
    uint32_t next;
    uint32_t *throttle;
    double link_bytes_per_s;
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int ft_gpu_mover_open(struct ft_gpu_mover **out, uint32_t gpu, const struct ft_model *model,
                      const struct ft_weights *weights, double link_bytes_per_s, struct ft_error *err)
{
    *out = NULL;
    struct ft_gpu_mover *mover = calloc(1, sizeof *mover);
    if (!mover)
        return ft_error_set(err, FT_MEMORY, "no memory to measure GPU %u", gpu);
    int status = ft_lane_cuda_open(&mover->lane, gpu, err);
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (!model->layers[i].dense)
            mover->slot_bytes = FT_MAX(mover->slot_bytes, (uint64_t)weights->layers[i].expert_layout.stride);
    mover->link_bytes_per_s = link_bytes_per_s;
    if (status == FT_OK)
        status = ft_cuda_alloc(mover->lane, FT_TIER_DEVICE, SLOTS * mover->slot_bytes, "measuring the link",
                               (void **)&mover->slots, err);
    if (status == FT_OK)
        status = ft_cuda_alloc(mover->lane, FT_TIER_DEVICE, 64, "measuring the link",
                               (void **)&mover->throttle, err);
    if (status == FT_OK) {
        ft_cuda_pin_banks(mover->lane, model, weights);
        if (!mover->lane->banks_pinned)
            status = ft_error_set(err, FT_MEMORY, "%s", mover->lane->note);
    }
    if (status != FT_OK) {
        ft_gpu_mover_close(mover);
        return status;
    }
    *out = mover;
    return FT_OK;
}

void ft_gpu_mover_close(struct ft_gpu_mover *mover)
{
    if (!mover)
        return;
    if (mover->lane)
        ft_lane_cuda_close(mover->lane);
    free(mover);
}

void ft_gpu_mover_copy(void *context, const void *from, uint64_t bytes)
{
    struct ft_gpu_mover *mover = context;
    char *to = mover->slots + mover->slot_bytes * (mover->next++ % SLOTS);
    (void)ft_cuda_copy_throttled(mover->lane, mover->throttle, mover->link_bytes_per_s, to, from,
                                 FT_MIN(bytes, mover->slot_bytes));
    /* Not further ahead than the slots: a queue without end would be measured by its drain alone. */
    if (mover->next % SLOTS == 0)
        (void)cudaStreamSynchronize(mover->lane->copy);
}

void ft_gpu_mover_drain(void *context)
{
    struct ft_gpu_mover *mover = context;
    (void)cudaStreamSynchronize(mover->lane->copy);
}

void ft_gpu_mover_rest(struct ft_gpu_mover *mover)
{
    struct ft_lane_cuda *lane = mover->lane;
    (void)cudaStreamSynchronize(lane->copy);
    for (uint32_t i = 0; i < lane->device_block_count; i++)
        if (lane->device_blocks[i] == mover->slots) {
            lane->device_blocks[i] = lane->device_blocks[--lane->device_block_count];
            (void)cudaFree(mover->slots);
            break;
        }
    mover->slots = NULL;
}

/* Best of some rounds: seconds of one read of the buffer, or of one copy. */
static int time_reads(struct ft_gpu_mover *mover, void *device, const void *host, uint64_t bytes,
                      double *best, struct ft_error *err)
{
    struct ft_lane_cuda *lane = mover->lane;
    int status = FT_OK;
    *best = 0;
    for (uint32_t i = 0; i <= ROUNDS && status == FT_OK; i++) {
        double begin = now_s();
        int error =
            host ? (int)cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, lane->copy)
                 : ft_cuda_read(device, bytes, lane->info.multiprocessors * 8, mover->throttle, lane->copy);
        if (!error)
            error = (int)cudaStreamSynchronize(lane->copy);
        double seconds = now_s() - begin;
        status = ft_cuda_check(lane, error, err, host ? "measuring the link" : "measuring device memory");
        if (i && (*best == 0 || seconds < *best)) /* the first one warms up */
            *best = seconds;
    }
    return status;
}

int ft_gpu_mover_measure(struct ft_gpu_mover *mover, double *device_read, double *link_linear,
                         struct ft_error *err)
{
    struct ft_lane_cuda *lane = mover->lane;
    void *device = NULL, *host = NULL;
    double seconds = 0;
    size_t free_bytes = 0, total_bytes = 0;
    *device_read = *link_linear = 0;
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    uint64_t read_bytes = FT_MIN(READ_BYTES, (uint64_t)free_bytes / 4),
             linear_bytes = FT_MIN(LINEAR_BYTES, read_bytes);
    int status = FT_CUDA_TRY(lane, cudaMalloc(&device, read_bytes), err, "a buffer to measure with");
    if (status == FT_OK)
        status = FT_CUDA_TRY(lane, cudaMemset(device, 0x5a, read_bytes), err, "a buffer to measure with");
    if (status == FT_OK)
        status = time_reads(mover, device, NULL, read_bytes, &seconds, err);
    if (status == FT_OK)
        *device_read = (double)read_bytes / seconds;
    if (status == FT_OK)
        status = FT_CUDA_TRY(lane, cudaHostAlloc(&host, linear_bytes, cudaHostAllocPortable), err,
                             "a pinned buffer");
    if (status == FT_OK) {
        for (uint64_t i = 0; i < linear_bytes / 8; i++)
            ((uint64_t *)host)[i] = i * 0x9e3779b97f4a7c15u;
        status = time_reads(mover, device, host, linear_bytes, &seconds, err);
    }
    if (status == FT_OK)
        *link_linear = (double)linear_bytes / seconds;
    if (host)
        (void)cudaFreeHost(host);
    if (device)
        (void)cudaFree(device);
    return status;
}
