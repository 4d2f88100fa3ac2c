/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the GPU lane share. */
#ifndef FT_JOBS_LANE_CUDA_INTERNAL_H
#define FT_JOBS_LANE_CUDA_INTERNAL_H

#include <cuda_runtime_api.h>

#include "graph/error.h"
#include "jobs/lane_cuda.h"
#include "jobs/step.h"
#include "kernels_cuda/kernels_cuda.h"

#define FT_CUDA_GRAPHS_MAX 48u
#define FT_CUDA_BLOCKS_MAX 64u

/* Where the arrays of struct ft_cuda_step lie in the block that is copied to the device before a step. */
struct ft_cuda_inputs {
    uint64_t token, position, row_sequence, logit_row, first_row, row_count, epoch, looks_ahead, state, page, sampling,
        bytes;
};

/* A captured decode step. */
struct ft_cuda_capture {
    uint32_t rows, logit_rows, tokens; /* tokens: bound of the context */
    cudaGraphExec_t exec;              /* NULL = empty */
    uint32_t nodes;
    uint64_t last_used;
};

/* The host's ends of the flags and messages of struct ft_cuda_exchange: the same memory, writable. */
struct ft_cuda_host_ends {
    uint32_t *fetched, *computed, *ple, *abort, *move_count;
    uint32_t *forced; /* NULL without given routing */
    struct ft_cuda_move *moves;
};

/* Lists of the launch path: built in pinned memory, copied to the device in stream order. */
struct ft_cuda_host_lists {
    const char **blob;
    uint32_t *pair_begin, *pair_row, *pair_out, *counts, *on_cpu;
    struct ft_cuda_list device;
    uint32_t *device_counts; /* [waves] */
    uint32_t waves_max;
};

/* What a step's rows need of their own, as struct ft_activations: a paused prefill leaves its streams and inputs here
 * while decode steps, whose captures hold pointers to the other set, use that one. */
struct ft_cuda_set {
    struct ft_workspace space;
    float *base;
    struct ft_cuda_inputs inputs;
    char *inputs_host, *inputs_device;
    uint32_t *failed, *sampled, *recent_device;
    uint32_t rows_max;
    const float *host_ple;
};

typedef cudaError_t (*ft_stream_write_32)(cudaStream_t stream, uintptr_t address, uint32_t value,
                                          unsigned flags);

/* Blocks that lie in parts on several GPUs. */
struct ft_cuda_blocks {
    char *base; /* reserved addresses; NULL = none */
    uint64_t bytes;
    uint32_t count;
};

/* One GPU's parts of them: its bytes [begin, begin + bytes) of every block, back to back. */
struct ft_cuda_parts {
    char *memory;
    uint64_t begin, bytes;
};

/* One GPU. What stands under "the chain" is used in the first lane only. */
struct ft_lane_cuda {
    int gpu;
    struct ft_gpu_info info;
    cudaStream_t compute, copy;
    /* the chain */
    struct ft_lane_cuda *first, *next; /* first: this one, unless it has joined another */
    struct ft_memory memory;
    struct ft_cuda_blocks blocks[FT_CUDA_SPREAD_COUNT];
    void *reserved; /* their addresses */
    uint64_t reserved_bytes;
    uint64_t watchdog_ns;
    bool broken; /* written by the driver in a step, by the session's thread between steps */
    int broken_gpu;
    char broken_by[160]; /* the first failure */
    char notes[2048];

    uint32_t layer_begin, layer_end;
    cudaEvent_t handed; /* behind the copy of the residual to the next GPU */
    bool peer;          /* ... which goes there directly */
    struct ft_model
        *angles; /* not the first GPU: for ft_cuda_embed, which has rotary angles to make and no embedding */
    struct ft_cuda_parts parts[FT_CUDA_SPREAD_COUNT];
    uint64_t device_bytes[FT_CUDA_BLOCKS_MAX];
    void *device_blocks[FT_CUDA_BLOCKS_MAX], *pinned_blocks[FT_CUDA_BLOCKS_MAX],
        *registered[FT_LAYERS_MAX + 1];
    uint32_t device_block_count, pinned_block_count, registered_count;
    bool banks_pinned, embed_mapped;

    struct ft_step *step;
    struct ft_lane_cuda_options options;
    struct ft_weights weights; /* device pointers */
    struct ft_layer_weights *layers;
    struct ft_cuda_set sets[FT_SET_COUNT];
    struct ft_cuda c;       /* with the set of the running step */
    struct ft_cuda running; /* with the counts of the step at hand */
    struct ft_cuda_host_ends host;
    struct ft_cuda_inputs inputs;
    char *inputs_host, *inputs_device;
    uint32_t *recent_device; /* [logit_rows_max, recent_max] */
    uint32_t recent_max;
    struct ft_cuda_host_lists lists;
    uint32_t *throttle; /* device: state of the link throttle */

    enum ft_handshake handshake;
    ft_stream_write_32 write_32; /* NULL: not offered by the driver */
    double rendezvous_us;
    struct ft_cuda_capture captures[FT_CUDA_GRAPHS_MAX];
    uint64_t capture_clock;
    const struct ft_cuda_capture *capture; /* of the step at hand */
    bool map_dirty;                        /* slot_of on the device differs from the host's map */
    uint32_t *map_host;                    /* pinned [layer_count, expert_count]: slot_of on its way */
    cudaEvent_t staged[2], grouped[2], last_group;
    uint32_t staging_wave; /* of the layer at hand: which staging buffer */
    uint32_t *staged_at;   /* [2, expert_count] place in the staging buffer, FT_NONE: resident */
    /* What a buffer holds: experts [0, staged_next) of a layer, as far as they had no slot, in so many places. It stays
     * when a prefill pauses. */
    uint32_t staged_layer[2], staged_next[2], staged_places[2];
    cudaEvent_t
        ahead[2]; /* pieces of the layer behind a slice, on their way: the older one is ahead_count % 2 */
    uint32_t ahead_count;
    uint64_t last_stamp;     /* end of its step before, GPU clock */
    uint64_t done_ns;        /* when the driver saw that its part of the step was done */
    int64_t clock_offset_ns; /* host clock - GPU clock, least seen */
    bool clock_known;
    char note[384];
};

static inline bool ft_cuda_is_broken(const struct ft_lane_cuda *lane)
{
    return lane->first->broken;
}
static inline bool ft_cuda_is_chain(const struct ft_lane_cuda *lane)
{
    return lane->first->next != NULL;
}
/* Makes the lane's GPU the calling thread's. */
static inline int ft_cuda_use(const struct ft_lane_cuda *lane)
{
    return (int)cudaSetDevice(lane->gpu);
}

#define FT_CUDA_TRY(lane, call, err, what) ft_cuda_check((lane), (int)(call), (err), (what))

/* FT_OK for cudaSuccess; else FT_MEMORY (out of memory) or FT_SYSTEM, naming what failed and the CUDA error. */
int ft_cuda_check(const struct ft_lane_cuda *lane, int error, struct ft_error *err, const char *what);
/* lane_cuda_memory.c: a block's part on the lane's GPU; the block itself when there is one GPU. */
void *ft_cuda_part_of(const struct ft_lane_cuda *lane, enum ft_cuda_spread which, void *block);
extern const struct ft_memory ft_cuda_memory; /* without its context */
/* lane_cuda_driver.c: the driver thread; context: the first lane. */
void *ft_cuda_drive(void *context);
/* The GPU cannot be used any more: the first cause is kept. error 0: `what` says all. */
void ft_cuda_break(struct ft_lane_cuda *lane, int error, const char *what);
/* Device or pinned memory that lives as long as the lane; zeroed. */
int ft_cuda_alloc(struct ft_lane_cuda *lane, enum ft_tier tier, uint64_t bytes, const char *what, void **out,
                  struct ft_error *err);
/* Queues a host-to-device copy on the copy stream. link_bytes_per_s: plays a link of that rate with the state
 * `throttle` (ft_cuda_throttle_begin), 0 = none. */
int ft_cuda_copy_throttled(struct ft_lane_cuda *lane, uint32_t *throttle, double link_bytes_per_s, void *to,
                           const void *from, uint64_t bytes);
/* lane_cuda_weights.c: copies dense weights, pins banks. */
int ft_cuda_upload_weights(struct ft_lane_cuda *lane, struct ft_error *err);
void ft_cuda_pin_banks(struct ft_lane_cuda *lane, const struct ft_model *model,
                       const struct ft_weights *weights);
/* lane_cuda_step.c: the block of inputs, the launches of a step, captures. */
int ft_cuda_make_buffers(struct ft_lane_cuda *lane, struct ft_error *err);
/* Before a step is begun: what it works on. */
void ft_cuda_use_set(struct ft_lane_cuda *lane, enum ft_set set);
/* Bound of the context of the batch's rows: a power of two, at least 256. */
uint32_t ft_cuda_tokens_bound(const struct ft_batch *batch);
/* Writes the step's inputs into pinned memory, queues the copy of what the repetition penalty looks at. */
int ft_cuda_fill_inputs(struct ft_lane_cuda *lane, const struct ft_batch *batch, uint32_t epoch);
/* Queues the copy of the inputs, for a step of these counts. */
int ft_cuda_copy_inputs(struct ft_lane_cuda *lane);
/* Launches of one layer up to its router (included), and of the parts around the layers. c: counts of this step. */
/* What the first kernels of a step make: the embedding and the rotary angles, on GPUs but the first those alone. */
int ft_cuda_launch_begin(const struct ft_lane_cuda *lane, const struct ft_cuda *c);
int ft_cuda_launch_front(const struct ft_cuda *c, uint32_t layer, uint32_t tokens, bool captured,
                         void *stream);
int ft_cuda_launch_head(const struct ft_cuda *c, void *stream);
/* The captured graph for a decode batch; captured on first use. */
int ft_cuda_find_capture(struct ft_lane_cuda *lane, uint32_t rows, uint32_t logit_rows, uint32_t tokens,
                         struct ft_cuda_capture **capture, struct ft_error *err);
void ft_cuda_drop_captures(struct ft_lane_cuda *lane);
/* lane_cuda_flags.c: litmus test and choice of the handshake. */
struct ft_cuda_litmus {
    uint32_t *to, *back, *payload, *answer; /* mapped, a line apart */
    uint32_t *bad, *copied;                 /* device */
};
/* Memory that lives as long as the lane; also looks for the driver's stream memory operation. */
int ft_cuda_litmus_open(struct ft_lane_cuda *lane, struct ft_cuda_litmus *litmus, struct ft_error *err);
/* `rounds` (below 2^31) times: a payload, a flag behind it, the device's answer. copies: the payload is
 * copied to the device, as experts are; else the device reads it where it lies. Microseconds per round;
 * negative when the handshake is not offered, when any round was wrong or came too late. */
double ft_cuda_litmus_run(struct ft_lane_cuda *lane, const struct ft_cuda_litmus *litmus,
                          enum ft_handshake handshake, bool copies, uint32_t rounds);
int ft_cuda_choose_handshake(struct ft_lane_cuda *lane, struct ft_error *err);
/* Raises a flag behind everything queued on the copy stream. */
int ft_cuda_raise_behind_copies(struct ft_lane_cuda *lane, uint32_t *flag, uint32_t value);
/* lane_cuda_trace.c: GPU stamps of the step to trace records. */
void ft_cuda_record_stamps(struct ft_lane_cuda *lane, uint64_t done_ns);

#endif
