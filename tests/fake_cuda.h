/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A CUDA runtime double: device memory is memory, a stream is a thread that runs its queue in order, captured graphs are
 * lists, kernels run through tests/cuda_emulator.h. Faults and delays are injected by call name.
 *
 * Several devices. As a real driver does, calls refuse streams and events of another device than the current one, and
 * copies but those between peers refuse memory of another device than the stream's. Device memory is then mapped twice:
 * copies use the second mapping, kernels the first, of which only the pages of the device whose kernels run can be
 * touched. So a kernel that reads or writes another device's memory, or a host that touches any, dies; and kernels of
 * different devices never run at the same time.
 */
#ifndef FT_TESTS_FAKE_CUDA_H
#define FT_TESTS_FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

#define FAKE_GPUS_MAX 8

#ifdef __cplusplus
extern "C" {
#endif

struct fake_cuda_options {
    int device_count;     /* 0 = no GPU */
    int driver_version;   /* 0 = no driver */
    int major, minor;
    size_t memory_bytes;  /* of one GPU */
    size_t pinned_bytes;  /* limit of pinned memory */
    int no_memops;        /* cuStreamWriteValue32 is not offered */
    uint64_t copy_delay_ns_max, kernel_delay_ns_max; /* random delays before each copy or kernel */
    uint64_t seed;
    int major_of[FAKE_GPUS_MAX];         /* where one differs from `major`; 0 = it does not */
    size_t memory_of[FAKE_GPUS_MAX];     /* where one differs from memory_bytes */
    int no_peers;                        /* no device can address another's memory */
};
void fake_cuda_init(const struct fake_cuda_options *options);
/* The call of that name fails with `error` at its `nth` call from now (1 = the next); once. name "kernel" or "copy": one
 * that runs on a stream: the error is sticky, as on a GPU, and nothing runs any more. "lost copy": it does not happen, and
 * nobody is told. "peer copy": one between two devices. Every name may end in "@1": of device 1 alone (the current one
 * of a call, the stream's of what runs). NULL clears. */
void fake_cuda_fail(const char *name, uint32_t nth, int error);
/* The nth copy ("copy") or kernel ("kernel") that runs on a stream from now stops there for `ns`; UINT64_MAX: until
 * fake_cuda_init, which nobody should call while streams live. NULL clears. */
void fake_cuda_stall(const char *name, uint32_t nth, uint64_t ns);
/* Calls of that name since init. */
uint32_t fake_cuda_calls(const char *name);
/* Bytes and pieces that were not given back; streams, events and graphs still alive. */
struct fake_cuda_live {
    size_t device_bytes, pinned_bytes, registered, streams, events, graphs;
};
void fake_cuda_live(struct fake_cuda_live *live);

#ifdef __cplusplus
}
#endif
#endif
