/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the driver thread share: a step as it sees it, and what they ask of each other.
 *
 *   lane_cuda_driver.c     errors, waits, the walk, the router of a layer and the copies behind it
 *   lane_cuda_captured.c   captured decode steps; from GPU to GPU
 *   lane_cuda_launched.c   steps that are launched kernel by kernel: groups of experts, what callers want to see
 *   lane_cuda_stream.c     prefill: layers streamed ahead of their routers
 */
#ifndef FT_JOBS_LANE_CUDA_DRIVE_H
#define FT_JOBS_LANE_CUDA_DRIVE_H

#include "jobs/lane_cuda_internal.h"

/* One step as the driver sees it. */
struct ft_drive {
    struct ft_lane_cuda *first, *lane; /* lane: the GPU at hand, this thread's current one */
    struct ft_lane_cuda *before;       /* of a step that has gone on to another GPU: the one before it */
    struct ft_lane_cuda *launched;     /* of a captured step: the last GPU that has its graph */
    struct ft_step *step;
    struct ft_batch *batch;
    struct ft_cuda *c; /* lane->running */
    uint32_t thread, epoch, tokens, link_taken;
    bool captured;
    /* Prefill that uses nearly all experts streams whole layers through the staging pairs, ahead of the router. */
    bool streaming;
    uint32_t layer_begin, layer_end; /* of this step */
    bool streams_ahead;              /* the link has nothing to do but the layer behind this slice */
    uint32_t waves;                  /* of the layer at hand, launch path */
    bool layer_on_cpu;               /* the layer at hand has experts on the CPU */
};

static inline bool ft_drive_is_broken(const struct ft_drive *d)
{
    return ft_cuda_is_broken(d->first);
}

static inline bool ft_drive_is_raised(const uint32_t *flag, uint32_t epoch)
{
    /* acquire: pairs with the GPU's st.release.sys; what the flag announces may be read */
    return (int32_t)(__atomic_load_n(flag, __ATOMIC_ACQUIRE) - epoch) >= 0;
}

static inline void ft_drive_raise(uint32_t *flag, uint32_t value)
{
    /* release: pairs with ld.acquire.sys on the GPU */
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

static inline uint32_t *ft_drive_flag(uint32_t *flags, uint32_t index)
{
    return flags + (uint64_t)index * FT_CUDA_FLAG_STRIDE;
}

static inline int ft_drive_copy_in(struct ft_lane_cuda *lane, void *to, const void *from, uint64_t bytes)
{
    return ft_cuda_copy_throttled(lane, lane->throttle, lane->options.link_bytes_per_s, to, from, bytes);
}

static inline uint32_t ft_drive_published(const struct ft_step *step)
{
    return atomic_load_explicit(&step->link_published, memory_order_acquire);
}

/* lane_cuda_driver.c: an error fails the step and breaks the session. False: it is broken, now or before. */
bool ft_drive_try(struct ft_drive *d, int error, const char *what);
/* The GPU at hand is now this one. */
void ft_drive_use(struct ft_drive *d, struct ft_lane_cuda *lane);
/* Until a flag of the GPU at hand holds the step's epoch; `what` is said when it does not come. */
bool ft_drive_wait_flag(struct ft_drive *d, const uint32_t *flag, const char *what);
int ft_drive_copy_expert(struct ft_lane_cuda *lane, const struct ft_dynamic *d);
/* Records and completes a fetch or a group: the GPU keeps their order by itself. */
void ft_drive_complete_link(struct ft_drive *d, uint32_t index, uint64_t start);

/* lane_cuda_captured.c */
bool ft_drive_is_captured(const struct ft_drive *d);
void ft_drive_begin_captured(struct ft_drive *d);
void ft_drive_launch_captured(struct ft_drive *d);
struct ft_lane_cuda *ft_drive_lane_before(const struct ft_drive *d, const struct ft_lane_cuda *lane);
bool ft_drive_begins_gpu(const struct ft_drive *d, uint32_t layer); /* one behind the first */
/* The residual streams to the next GPU. */
void ft_drive_hand_over(struct ft_drive *d, struct ft_lane_cuda *from, struct ft_lane_cuda *to);

/* lane_cuda_launched.c: a layer up to its router; then its fetches and groups in the order in which they were made. */
void ft_drive_launch_front(struct ft_drive *d, uint32_t layer);
void ft_drive_run_waves(struct ft_drive *d, uint32_t layer);
/* Whether a sequence wants to see activations (ft verify, ft logits); `block`: the residual before that layer. */
bool ft_drive_wants_capture(const struct ft_batch *batch);
void ft_drive_capture_residual(struct ft_drive *d, uint32_t block);
void ft_drive_capture_topk(struct ft_drive *d, uint32_t layer);
void ft_drive_capture_head(struct ft_drive *d);

/* lane_cuda_stream.c: what the slots do not hold of a layer, into its staging buffer. */
void ft_drive_stream_layer(struct ft_drive *d, uint32_t layer);
/* While the GPU computes the last layer of a slice: pieces of the next layer. */
void ft_drive_stream_ahead(struct ft_drive *d);
/* Where an expert of a streamed layer lies. */
const char *ft_drive_staged_blob(const struct ft_drive *d, uint32_t layer, uint32_t expert);

#endif
