/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of a step on one GPU: one op, one launcher, one .cu file. The GPU twin of jobs/execute.c: an op reads
 * and writes the same buffers of the workspace (graph/workspace.h) at the same offsets, in device memory.
 *
 * A launcher only enqueues kernels on `stream` (a cudaStream_t) and returns the CUDA error of the launch, 0 = none. It
 * allocates nothing, waits for nothing and depends on host values only through struct ft_cuda and its arguments, so
 * every launcher may be captured into a CUDA graph; what changes from step to step is read from device memory (struct
 * ft_cuda_step). Sizes known at launch: c->step.rows, .sequences, .logit_rows, and the context bound given to attention.
 *
 * Arithmetic: weights in their own bits, activations f32, products and sums f32 (batches of many rows: bf16 operands
 * on the matrix units, an activation being the sum of two, f32 sums). A row's result must not depend on the other rows of the call as long as both batches
 * are decode batches (<= FT_CUDA_DECODE_ROWS rows).
 *
 * Pointers: device memory, unless "mapped": pinned host memory at an address that is valid on both sides. Only one
 * thread of a grid polls or reads mapped memory in a loop; everybody else gets it through shared or device memory.
 *
 * Threads: a struct ft_cuda belongs to the driver thread of its GPU.
 */
#ifndef FT_KERNELS_CUDA_KERNELS_CUDA_H
#define FT_KERNELS_CUDA_KERNELS_CUDA_H

#include "graph/graph.h"
#include "graph/model.h"
#include "graph/weights.h"
#include "graph/workspace.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Up to here an op takes its decode form (weights read once for all rows, one kernel per op); above, its prefill form
 * (matrix units). */
#define FT_CUDA_DECODE_ROWS FT_GPU_DECODE_ROWS
#define FT_CUDA_FLAG_STRIDE 32u /* u32 between two flags: a line of 128 bytes each */

/* Kinds of GPU time stamps of a layer, in the order in which their kernels run: each is written by one thread when the
 * kernel of that name begins. The end of a part is the begin of the next one. */
enum ft_cuda_stamp {
    FT_CUDA_STAMP_PLE,
    FT_CUDA_STAMP_MIX,
    FT_CUDA_STAMP_PROJECT,
    FT_CUDA_STAMP_ATTEND,
    FT_CUDA_STAMP_OUT,
    FT_CUDA_STAMP_MIX_MLP,
    FT_CUDA_STAMP_ROUTE,
    FT_CUDA_STAMP_RESIDENT,
    FT_CUDA_STAMP_WAIT_FETCHED, /* begin of the wait */
    FT_CUDA_STAMP_FETCHED,      /* its end */
    FT_CUDA_STAMP_WAIT_COMPUTED,
    FT_CUDA_STAMP_COMBINE,
    FT_CUDA_STAMP_LAYER_COUNT,
    /* stamps of the step stand behind those of all layers: index layer_count * FT_CUDA_STAMP_LAYER_COUNT + ... */
    FT_CUDA_STAMP_BEGIN = 0,
    FT_CUDA_STAMP_HEAD,
    FT_CUDA_STAMP_SAMPLE,
    FT_CUDA_STAMP_END,
    FT_CUDA_STAMP_STEP_COUNT
};

/* The rows of the running step. Counts are the capture's; arrays are filled before the step begins. */
struct ft_cuda_step {
    uint32_t rows, sequences, logit_rows;
    const uint32_t *token, *position, *row_sequence; /* [rows] */
    const uint32_t *logit_row;                       /* [logit_rows] */
    const uint32_t *first_row, *row_count;           /* [sequences] */
    float *const *state;                             /* [sequences] blocks of struct ft_state_layout */
    float *const *page;                              /* [sequences, pages_max] pages of struct ft_kv_layout */
    uint32_t pages_max;
    const uint32_t *epoch; /* [1] number of the step: the value that its flags take */
    const uint32_t *looks_ahead; /* [1] not 0: route looks ahead in this step */
    uint32_t *failed;      /* mapped [rows]: 0, or 1 + the first layer in which the row was not a number (layer_count: head) */
    /* sampling, [logit_rows] each: parameters, and the tokens that the repetition penalty looks at */
    const struct ft_cuda_sampling *sampling;
    uint32_t *sampled; /* mapped [logit_rows] */
};

/* As struct ft_sampling of kernels_cpu, plus what the device cannot look up. */
struct ft_cuda_sampling {
    float temperature, top_p, min_p, repetition_penalty;
    uint32_t top_k;
    uint32_t wanted; /* 0: no token is asked of this row */
    uint64_t seed, position;
    const uint32_t *recent; /* [recent_count] */
    uint32_t recent_count;
};

/* Experts to compute, grouped: weights of a group are read once for its rows. Device memory; counts too, because the
 * device itself finds out which experts are resident. */
struct ft_cuda_list {
    uint32_t *group_count;              /* [1] */
    const char **blob;                  /* [groups_max] expert blobs (struct ft_expert_layout), 64-byte aligned */
    uint32_t *pair_begin;               /* [groups_max + 1] into the pairs; steps of one row: group g has pair g */
    uint32_t *pair_row, *pair_out;      /* [pairs_max] row of x; row of expert_y: row * k + place in the top-k list */
    uint32_t groups_max, pairs_max;
};

/* One line of the host's answer: (layer, expert) moves into a slot with this blob, whose holder was `victim` (layer * E + expert). */
struct ft_cuda_move {
    uint32_t layer, expert, slot, victim; /* victim FT_NONE: the slot was free */
};

/*
 * What the device and the driver thread tell each other in a decode step, per layer. Flags hold the epoch of the step
 * that raised them: nothing is reset, "raised" means (int32_t)(flag - epoch) >= 0.
 *
 *   flag      writer                                   fence before                reader
 *   routed    route, one thread of its last block      st.release.sys              driver, acquire load
 *   fetched   copy stream (write behind the copies);   stream order;               wait_fetched, one thread, ld.acquire.sys
 *             driver when nothing is fetched           release store
 *   computed  driver, when the CPU experts are done    release store               wait_computed, one thread, ld.acquire.sys
 *   ple       driver, when the rows are in memory      release store               ple_arrive, one thread, ld.acquire.sys
 *   foreseen  route, one thread of the last block of   st.release.sys              driver, acquire load
 *             the look-ahead's
 *   done      sample or end, one thread                st.release.sys              driver, acquire load
 *   abort     driver, when it gives up                 release store               every waiting thread
 */
struct ft_cuda_exchange {
    uint32_t *routed, *fetched, *computed; /* mapped [layer_count * FT_CUDA_FLAG_STRIDE] */
    uint32_t *ple;                         /* mapped [ple_count * FT_CUDA_FLAG_STRIDE] */
    uint32_t *done, *abort;                /* mapped [1] */
    uint32_t *ids;                         /* mapped [layer_count, rows_max * k]: the layer's top-k ids, in top-k order */
    uint32_t *missing;                     /* mapped [layer_count]: pairs whose expert is not resident */
    float *host_x;                         /* mapped [rows_max, H]: input of the experts, written when something is missing */
    const float *host_y;                   /* mapped [rows_max * k, H]: results of CPU experts */
    const float *host_ple;                 /* mapped [ple_count, rows_max, embed]: decoded rows */
    const uint32_t *move_count;            /* mapped [layer_count] */
    const struct ft_cuda_move *moves;      /* mapped [layer_count, moves_max] */
    uint32_t moves_max, rows_max;
    /* router look-ahead; NULL: the session has none */
    uint32_t *foreseen;       /* mapped [layer_count * FT_CUDA_FLAG_STRIDE] */
    uint32_t *foreseen_ids;   /* mapped [layer_count, decode rows * k]: what the router of the next layer with experts
                                 would choose for this layer's rows; FT_NONE where they are not numbers */
    float *foreseen_logits;   /* device [decode rows, E] */
    uint32_t layer_end;       /* of this GPU: the look-ahead ends there */
    /* forced routing of benchmarks: ids [layer_count, rows, k] that replace the router's choice; NULL = none. Mapped or
     * device. */
    const uint32_t *forced_ids;

    uint32_t *slot_of;  /* device [layer_count, E]: blob of the slot or FT_NONE */
    const char *slots;  /* device: blob i at slots + i * slot_bytes */
    uint64_t slot_bytes;
    uint32_t *on_cpu;   /* device [rows_max * k]: 1 = the pair's result comes from host_y */
    uint32_t *counters; /* device [64]: "last block" counters of kernels; zero before and after each launch */
    struct ft_cuda_list resident, fetched_list;
};

struct ft_cuda {
    const struct ft_model *model;
    const struct ft_weights *weights; /* the struct is the host's, its pointers are device memory; layers[].experts unused */
    struct ft_workspace space;
    float *base; /* device [space.count]; offsets of `space` */
    struct ft_state_layout state;
    struct ft_kv_layout kv;
    const double *frequencies; /* device [rotary_dim / 2] */
    float rotary_scale;
    struct ft_cuda_step step;
    struct ft_cuda_exchange exchange;
    /* [ft_cuda_stamp_count], NULL = none. Kernels stamp device memory, since a store to the host's would hold up the
     * kernel behind; ft_cuda_end copies them to host_stamps, mapped memory. */
    uint64_t *stamps, *host_stamps;
    uint32_t multiprocessors;
    void *blas; /* of ft_cuda_matmul's prefill form: opaque, NULL = own kernels only */
    char *scratch; /* device, for prefill forms: bf16 copies of activations and decoded weights */
    uint64_t scratch_bytes;
};

static inline uint32_t ft_cuda_stamp_count(uint32_t layer_count)
{
    return layer_count * (uint32_t)FT_CUDA_STAMP_LAYER_COUNT + (uint32_t)FT_CUDA_STAMP_STEP_COUNT;
}
static inline uint64_t *ft_cuda_stamp_of(const struct ft_cuda *c, uint32_t layer, enum ft_cuda_stamp stamp)
{
    return c->stamps ? c->stamps + (uint64_t)layer * FT_CUDA_STAMP_LAYER_COUNT + (uint32_t)stamp : NULL;
}

/* ---- embed.cu ---- */
/* token -> n equal streams in residual; cos and sin of every row's position in rotary. */
int ft_cuda_embed(const struct ft_cuda *c, void *stream);

/* ---- mix.cu: norm and hyper-connection mixer ---- */
/* residual -> x and s (mixed), or head_x for FT_PHASE_HEAD (rows = logit rows, taken through logit_row). Families
 * without streams: one norm kernel. With streams and decode rows: two kernels (norm + down + inject; up + mix). */
int ft_cuda_mix(const struct ft_cuda *c, enum ft_phase phase, uint32_t layer, void *stream);

/* ---- dense.cu ---- */
/* One output range of a concatenated projection. */
struct ft_cuda_segment {
    const struct ft_matrix *w;
    const float *bias; /* device or NULL */
};
/* y[r][o] = W x_r (+ bias), outputs of the segments side by side, row r at y + r * y_stride. All formats. `stamp` may be
 * NULL. */
int ft_cuda_project(const struct ft_cuda *c, const struct ft_cuda_segment *segments, uint32_t count, const float *x,
                    uint64_t x_stride, uint32_t rows, float *y, uint64_t y_stride, uint64_t *stamp, void *stream);
/* The projections of an attention layer of either kind, x -> project. */
int ft_cuda_attention_project(const struct ft_cuda *c, uint32_t layer, void *stream);
/* attention -> out projection; the result is added to the residual streams (times s). Linear layers: the convolution's
 * tail moves on. */
int ft_cuda_attention_out(const struct ft_cuda *c, uint32_t layer, void *stream);
/* Dense MLP of the layer, added to the residual. */
int ft_cuda_dense_mlp(const struct ft_cuda *c, uint32_t layer, void *stream);
/* head_x -> logits. */
int ft_cuda_head(const struct ft_cuda *c, void *stream);
/* Opens and closes the library handle behind c->blas; 0 or an error, then c->blas stays NULL and own kernels work. */
int ft_cuda_blas_open(struct ft_cuda *c);
void ft_cuda_blas_close(struct ft_cuda *c);
/* Bytes of c->scratch that prefill forms need for `rows` rows. */
uint64_t ft_cuda_scratch_bytes(const struct ft_model *model, uint32_t rows);

/* ---- linear.cu: gated delta rule ---- */
/* project (q|k|v|z|b|a) -> attention [rows, Vd]: o / rms(o) w act(z) of every value head. Convolution and SiLU on the way
 * in; the state S is updated, the tail of the convolution is not (see attention_out). Decode: reads S and the tail before
 * the kernel in front has ended: no kernel of a step may write them before this one. */
int ft_cuda_linear_attention(const struct ft_cuda *c, uint32_t layer, void *stream);
/* Moves the convolution's tail of every sequence on to the step's last rows: called by ft_cuda_attention_out. */
int ft_cuda_linear_tail(const struct ft_cuda *c, uint32_t layer, void *stream);

/* ---- attention.cu ---- */
/* Norm, rotary, gate kept in project; query -> query, key and value -> pages; indexer keys of finished blocks -> pages. */
int ft_cuda_attention_prepare(const struct ft_cuda *c, uint32_t layer, void *stream);
/* Sparse layers: select [rows, select_max + 1]. Nothing is launched when tokens_max fits the budget. */
int ft_cuda_attention_select(const struct ft_cuda *c, uint32_t layer, uint32_t tokens_max, void *stream);
/* Bytes of c->scratch that attention and select need when `rows` rows see at most tokens_max tokens. */
uint64_t ft_cuda_attention_scratch_bytes(const struct ft_model *model, uint32_t rows, uint32_t tokens_max);
/* query, pages -> attention [rows, heads d], gated. tokens_max: bound of position + 1 over the rows. */
int ft_cuda_attention(const struct ft_cuda *c, uint32_t layer, uint32_t tokens_max, void *stream);

/* ---- ple.cu ---- */
/* Waits for the flag (decode graphs) when `wait`, then copies the table's rows from host_ple to ple_e. */
int ft_cuda_ple_arrive(const struct ft_cuda *c, uint32_t table, bool wait, void *stream);
/* ple_e -> key and value projections -> gate, convolution -> residual; state columns move on. */
int ft_cuda_ple_inject(const struct ft_cuda *c, uint32_t layer, void *stream);

/* ---- router.cu ---- */
/*
 * x -> router logits, top-k ids and weights (topk_ids, topk_weights); shared expert's hidden values and gate when the
 * model has one (shared_h, shared_gate); decode: x in the pieces that the experts multiply (staged). ids go to exchange.ids. `resolve`: looks every pair up in slot_of, fills
 * exchange.resident, sets on_cpu for the others, writes missing, host_x when any is missing, then raises `routed`.
 * Without resolve: raises `routed` only. A row with NaN logits: failed, ids 0..k-1, weights 0.
 * Equal logits: the lower id first; ids in descending order of logit. Weights as ft_router_topk of kernels_cpu.
 */
int ft_cuda_route(const struct ft_cuda *c, uint32_t layer, bool resolve, void *stream);

/* ---- expert.cu ---- */
/* The experts of a list: x (decode: staged, by route) -> expert_h -> expert_y [pair_out]. groups_bound, rows_bound: limits known at launch (groups;
 * rows of one group). with_shared: the shared expert's down projection rides along: shared_h -> shared_y. All five
 * formats and both activations, biases. */
int ft_cuda_experts(const struct ft_cuda *c, uint32_t layer, const struct ft_cuda_list *list, uint32_t groups_bound,
                    uint32_t rows_bound, bool with_shared, uint64_t *stamp, void *stream);

/* ---- combine.cu ---- */
/* Sum of expert_y (or host_y where on_cpu) in top-k order with the router's weights, plus sigmoid(gate) shared_y; added
 * to the residual streams. any_cpu false: host_y is not looked at. */
int ft_cuda_combine(const struct ft_cuda *c, uint32_t layer, bool any_cpu, void *stream);

/* ---- exchange.cu ---- */
/* One block. Waits until `fetched` is raised (only when something is missing), applies the layer's moves to slot_of,
 * clears on_cpu of pairs that were fetched and lists them in exchange.fetched_list. */
int ft_cuda_wait_fetched(const struct ft_cuda *c, uint32_t layer, void *stream);
/* One thread: waits until `computed` is raised, when the layer has pairs on the CPU. */
int ft_cuda_wait_computed(const struct ft_cuda *c, uint32_t layer, void *stream);
/* Raises `done` and writes the last stamp. */
int ft_cuda_end(const struct ft_cuda *c, void *stream);
/* Gathers blobs from mapped host memory into slots: from[i] -> to[i], `bytes` each (a multiple of 16), `blocks` blocks. */
int ft_cuda_gather(const char *const *from, char *const *to, uint32_t count, uint64_t bytes, uint32_t blocks, void *stream);
/* One thread writes a flag with st.release.sys: behind the copies of a copy stream. */
int ft_cuda_raise(uint32_t *flag, uint32_t value, void *stream);
/* Plays a slower link: begin notes the time in `state` (device [16], the GPU's clock), end lets the stream go on only `ns`
 * after it. One thread each. */
int ft_cuda_throttle_begin(uint32_t *state, void *stream);
int ft_cuda_throttle_end(uint32_t *state, uint64_t ns, void *stream);
/* Reads `bytes` bytes; the device's read ceiling is measured with it. sink [1]. */
int ft_cuda_read(const void *data, uint64_t bytes, uint32_t blocks, uint32_t *sink, void *stream);
/* Litmus of the flags: `rounds` times waits for *to >= i, checks that payload holds i, answers with *back = i. Errors are
 * counted in *bad. Host side in jobs/lane_cuda_flags.c. Mapped, but bad and a copied payload (device). */
int ft_cuda_litmus(uint32_t *to, const uint32_t *payload, uint32_t *answer, uint32_t *back, uint32_t rounds, uint32_t *bad,
                   void *stream);

/* ---- sample.cu ---- */
/* logits -> sampled, per ft_sample_token of kernels_cpu (same random numbers, same ties). */
int ft_cuda_sample(const struct ft_cuda *c, void *stream);

#ifdef __cplusplus
}
#endif
#endif
