/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which handshake the driver and this GPU agree on. Both forms of raising a flag behind copies are tried with
 * a litmus test (the device waits for a flag and checks the payload that it announces, then answers; the host
 * the same way back); the fastest that never fails is kept. x86 hides ordering mistakes of the host, not
 * those of the device.
 */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "jobs/lane_cuda_internal.h"

#define ROUNDS 2000u /* of either kind */
#define ROUNDS_AT_ONCE 100u
#define TRY_NS 100000000u
#define ROUND_LIMIT_NS 2000000000ull
#define CUDA_VERSION_ASKED 12000u

/* The driver's own entry point: the runtime has no such call. NULL when the driver does not offer it. */
static ft_stream_write_32 find_write_32(void)
{
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function,
                                                         CUDA_VERSION_ASKED, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    ft_stream_write_32 write;
    memcpy(&write, &function, sizeof write); /* an object pointer is not a function pointer in C */
    return write;
}

int ft_cuda_raise_behind_copies(struct ft_lane_cuda *lane, uint32_t *flag, uint32_t value)
{
    if (lane->handshake == FT_HANDSHAKE_MEMOP)
        return (int)lane->write_32(lane->copy, (uintptr_t)flag, value, 0);
    return ft_cuda_raise(flag, value, lane->copy);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static bool wait_value(const uint32_t *flag, uint32_t value)
{
    uint64_t start = now_ns();
    for (uint32_t polls = 1; __atomic_load_n(flag, __ATOMIC_ACQUIRE) != value; polls++) {
        ft_park_pause();
        if (polls % 4096 == 0 && now_ns() - start > ROUND_LIMIT_NS)
            return false;
    }
    return true;
}

int ft_cuda_litmus_open(struct ft_lane_cuda *lane, struct ft_cuda_litmus *l, struct ft_error *err)
{
    char *block = NULL, *device = NULL;
    int status =
        ft_cuda_alloc(lane, FT_TIER_RAM, FT_CUDA_FLAG_STRIDE * 16, "the litmus test", (void **)&block, err);
    if (status == FT_OK)
        status = ft_cuda_alloc(lane, FT_TIER_DEVICE, FT_CUDA_FLAG_STRIDE * 8, "the litmus test",
                               (void **)&device, err);
    if (status != FT_OK)
        return status;
    l->to = (uint32_t *)block;
    l->back = l->to + FT_CUDA_FLAG_STRIDE;
    l->payload = l->back + FT_CUDA_FLAG_STRIDE;
    l->answer = l->payload + FT_CUDA_FLAG_STRIDE;
    l->bad = (uint32_t *)device;
    l->copied = l->bad + FT_CUDA_FLAG_STRIDE;
    lane->write_32 = find_write_32();
    return FT_OK;
}

double ft_cuda_litmus_run(struct ft_lane_cuda *lane, const struct ft_cuda_litmus *l,
                          enum ft_handshake handshake, bool copies, uint32_t rounds)
{
    uint32_t wrong = 0, device_wrong = 0;
    bool alive = true;
    if (handshake == FT_HANDSHAKE_MEMOP && !lane->write_32)
        return -1;
    memset(l->to, 0, FT_CUDA_FLAG_STRIDE * 16);
    lane->handshake = handshake;
    if (cudaMemsetAsync(l->bad, 0, FT_CUDA_FLAG_STRIDE * 8, lane->compute) != cudaSuccess ||
        cudaStreamSynchronize(lane->compute) != cudaSuccess || /* the copy stream writes there, too */
        ft_cuda_litmus(l->to, copies ? l->copied : l->payload, l->answer, l->back, rounds, l->bad,
                       lane->compute)) {
        (void)cudaGetLastError();
        return -1;
    }
    uint64_t start = now_ns();
    for (uint32_t i = 1; i <= rounds && alive; i++) {
        __atomic_store_n(l->payload, i, __ATOMIC_RELAXED);
        alive = (!copies || cudaMemcpyAsync(l->copied, l->payload, 4, cudaMemcpyHostToDevice, lane->copy) ==
                                cudaSuccess) &&
                !ft_cuda_raise_behind_copies(lane, l->to, i) && wait_value(l->back, i);
        wrong += __atomic_load_n(l->answer, __ATOMIC_RELAXED) != i;
    }
    double us = (double)(now_ns() - start) * 1e-3 / rounds;
    if (!alive) /* let the kernel go: the last round's value raises every one */
        __atomic_store_n(l->to, rounds, __ATOMIC_RELEASE);
    bool ended = cudaStreamSynchronize(lane->copy) == cudaSuccess &&
                 cudaStreamSynchronize(lane->compute) == cudaSuccess &&
                 cudaMemcpy(&device_wrong, l->bad, 4, cudaMemcpyDeviceToHost) == cudaSuccess;
    (void)cudaGetLastError();
    return ended && alive && !wrong && !device_wrong ? us : -1;
}

/* The price of a round, and the proof that a flag does not overtake a copy; negative when it does not work.
 * Where a round is slow, fewer do: opening should not take seconds. */
static double try_handshake(struct ft_lane_cuda *lane, const struct ft_cuda_litmus *l,
                            enum ft_handshake handshake)
{
    uint64_t start = now_ns();
    double least = -1;
    for (uint32_t done = 0; done < ROUNDS && (!done || now_ns() - start < TRY_NS); done += ROUNDS_AT_ONCE) {
        double us = ft_cuda_litmus_run(lane, l, handshake, false, ROUNDS_AT_ONCE);
        if (us <= 0 || ft_cuda_litmus_run(lane, l, handshake, true, ROUNDS_AT_ONCE) <= 0)
            return -1;
        least = least < 0 ? us : FT_MIN(least, us);
    }
    return least;
}

/* In front of what is in the note already. */
static void add_note(struct ft_lane_cuda *lane, const char *name)
{
    char before[sizeof lane->note];
    memcpy(before, lane->note, sizeof before);
    char layers[48] = "";
    if (ft_cuda_is_chain(lane))
        snprintf(layers, sizeof layers, "layers %u to %u, ", lane->layer_begin, lane->layer_end - 1);
    snprintf(lane->note, sizeof lane->note, "GPU %d (%.60s): %s%s, %.1f us a round%s%.120s", lane->gpu,
             lane->info.name, layers, name, lane->rendezvous_us, before[0] ? "; " : "", before);
}

int ft_cuda_choose_handshake(struct ft_lane_cuda *lane, struct ft_error *err)
{
    enum ft_handshake wanted = lane->options.handshake;
    struct ft_cuda_litmus l;
    double us[FT_HANDSHAKE_COUNT] = {-1, -1, -1, -1};
    int status = ft_cuda_litmus_open(lane, &l, err);
    if (status != FT_OK)
        return status;
    if (wanted == FT_HANDSHAKE_AUTO || wanted == FT_HANDSHAKE_MEMOP)
        us[FT_HANDSHAKE_MEMOP] = try_handshake(lane, &l, FT_HANDSHAKE_MEMOP);
    if (wanted == FT_HANDSHAKE_AUTO || wanted == FT_HANDSHAKE_KERNEL)
        us[FT_HANDSHAKE_KERNEL] = try_handshake(lane, &l, FT_HANDSHAKE_KERNEL);
    bool memop = us[FT_HANDSHAKE_MEMOP] > 0, kernel = us[FT_HANDSHAKE_KERNEL] > 0;
    static const char *const names[] = {"none", "stream memory operation", "flag kernel",
                                        "launch per segment"};
    if ((wanted == FT_HANDSHAKE_MEMOP && !memop) || (wanted == FT_HANDSHAKE_KERNEL && !kernel))
        return ft_error_set(
            err, FT_UNSUPPORTED,
            "GPU %d: the handshake by %s does not work with this driver: give --handshake auto or launch",
            lane->gpu, names[wanted]);
    lane->handshake = FT_HANDSHAKE_LAUNCH;
    if (wanted == FT_HANDSHAKE_LAUNCH) {
        lane->rendezvous_us = 0;
    } else if (memop && (!kernel || us[FT_HANDSHAKE_MEMOP] <= us[FT_HANDSHAKE_KERNEL])) {
        lane->handshake = FT_HANDSHAKE_MEMOP;
        lane->rendezvous_us = us[FT_HANDSHAKE_MEMOP];
    } else if (kernel) {
        lane->handshake = FT_HANDSHAKE_KERNEL;
        lane->rendezvous_us = us[FT_HANDSHAKE_KERNEL];
    }
    add_note(lane, names[lane->handshake]);
    return FT_OK;
}
