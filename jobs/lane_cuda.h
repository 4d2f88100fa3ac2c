/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPU lane: a driver thread, and of every GPU a compute stream and a copy stream.
 *
 * A decode step is one captured CUDA graph per (rows, logit rows, context bucket); the policy stays on the
 * host. Per layer:
 *
 *   GPU     .. mix attention mix route | resident experts | wait fetched | fetched experts | wait computed | combine ..
 *                                      |routed                     ^fetched                         ^computed
 *   driver                             `-> policy -> moves, copies-'                                |
 *   workers                                `-> expert tiles ----------------------------------------'
 *
 * Larger steps, steps whose rows are captured by a caller, and --handshake launch are launched segment by
 * segment by the driver, which waits for the router's ids between route and experts.
 *
 * Several GPUs are a chain of lanes with consecutive layers each; the first stands for all of them. A step is
 * strictly sequential over the layers, so one driver thread serves them in order. A decode step is one captured
 * graph per GPU, launched when the GPU before it has all its flags:
 *
 *   GPU 0   inputs embed | graph: layers 0 .. 23 | residual -> GPU 1, event, end
 *   GPU 1   inputs angles .................. wait for event | graph: layers 24 .. 47, head, sample, end
 *
 * The residual streams go from GPU to GPU by cudaMemcpyPeerAsync, which works with and without peer access. Flags
 * and messages (struct ft_cuda_exchange), slot map, lists, activations, captures are each GPU's own, and so are
 * the experts' slots and staging buffers. KV pages and recurrent states lie in parts: each GPU has what belongs
 * to its layers. For the session they are blocks at addresses that nothing is mapped at (ft_lane_cuda_reserve);
 * struct ft_memory and the lane find the parts.
 *
 * A prefill may pause between layers: its next slice is another step, and decode steps come in between. Both have
 * activations and inputs of their own (struct ft_cuda_set); streams, lists, flags and scratch are shared, since a
 * step ends before the next one begins. What outlives a slice on the link are at most two pieces of the layer
 * behind it, and what a staging buffer holds.
 *
 * The table of flags, with writers, fences and readers, is in kernels_cuda/kernels_cuda.h (struct
 * ft_cuda_exchange).
 *
 * CUDA runtime calls inside a step: cudaGraphLaunch, cudaMemcpyAsync, cudaEventRecord, cudaStreamWaitEvent,
 * cudaStreamQuery, kernel launches, cuStreamWriteValue32; with several GPUs also cudaSetDevice and
 * cudaMemcpyPeerAsync. Outside a step: everything else.
 *
 * Errors: FT_UNSUPPORTED (no driver, no GPU, GPU too old) and FT_MEMORY name what was asked and the option to
 * lower. A GPU that fails in a step fails the step's sequences and breaks the session. Threads: all functions
 * but the driver's own from the session's thread.
 */
#ifndef FT_JOBS_LANE_CUDA_H
#define FT_JOBS_LANE_CUDA_H

#include "graph/arena.h"
#include "graph/machine.h"
#include "graph/weights.h"
#include "jobs/memory.h"

struct ft_lane_cuda;
struct ft_step;
struct ft_topology;

struct ft_lane_cuda_options {
    const struct ft_weights *weights; /* the host's */
    uint32_t rows_max, sequences_max, logit_rows_max;
    uint32_t pages_max; /* of one sequence */
    enum ft_handshake handshake;
    double link_bytes_per_s;            /* throttle; 0 = none */
    const struct ft_topology *topology; /* NULL: the driver thread floats */
    uint64_t watchdog_ns;               /* bound of every wait for the GPU in a step; 0 = 20 s */
};

struct ft_gpu_info {
    char name[96];
    uint32_t count; /* GPUs that the driver shows */
    uint32_t major, minor, multiprocessors;
    uint64_t free_bytes, total_bytes;
};

/* What GPU `gpu` is. FT_UNSUPPORTED when this build, the driver or the machine has none. */
int ft_lane_cuda_find(uint32_t gpu, struct ft_gpu_info *info, struct ft_error *err);
int ft_lane_cuda_open(struct ft_lane_cuda **out, uint32_t gpu, struct ft_error *err);
/* Another GPU behind those that the lane has. */
int ft_lane_cuda_join(struct ft_lane_cuda *lane, uint32_t gpu, struct ft_error *err);
/* An arena of the memory of the lane's GPU number `at` (0 = the first), or of pinned host memory, zeroed; the lane
 * owns it. */
int ft_lane_cuda_arena(struct ft_lane_cuda *lane, uint32_t at, struct ft_arena *arena, enum ft_tier tier,
                       uint64_t bytes, struct ft_error *err);
/* Several GPUs: addresses without memory, for blocks that lie in parts. The lane owns them. */
int ft_lane_cuda_reserve(struct ft_lane_cuda *lane, struct ft_arena *arena, uint64_t bytes,
                         struct ft_error *err);
/* What blocks that lie in parts hold. */
enum ft_cuda_spread { FT_CUDA_SPREAD_KV, FT_CUDA_SPREAD_STATE, FT_CUDA_SPREAD_COUNT };
/* `count` blocks of `bytes` bytes at reserved addresses from `base` on lie in parts; part_bytes [GPUs] of a block,
 * which add up to it, in the order of the GPUs. Takes the parts' memory, zeroed. */
int ft_lane_cuda_spread(struct ft_lane_cuda *lane, enum ft_cuda_spread which, void *base, uint64_t bytes,
                        uint32_t count, const uint64_t *part_bytes, struct ft_error *err);
const struct ft_memory *ft_lane_cuda_memory(const struct ft_lane_cuda *lane);
/* Uploads the dense weights, pins the expert banks, probes the handshakes, starts the driver thread. */
int ft_lane_cuda_start(struct ft_lane_cuda *lane, struct ft_step *step,
                       const struct ft_lane_cuda_options *options, struct ft_error *err);
/* Stops the driver thread and waits for the streams. step->device.started stays true when it, or the GPU, is
 * stuck: then the lane must not be closed. */
void ft_lane_cuda_stop(struct ft_lane_cuda *lane);
void ft_lane_cuda_close(struct ft_lane_cuda *lane);
/* The slots were filled between steps, not by the lane. */
void ft_lane_cuda_map_changed(struct ft_lane_cuda *lane);
/* One line: GPU, handshake in use and its price, what is not as fast as it could be. */
const char *ft_lane_cuda_note(const struct ft_lane_cuda *lane);

#endif
