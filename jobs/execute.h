/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each op does: from (op, layer, range) to kernel calls on the step's buffers. No scheduling here.
 *
 * Threads: any number of jobs of one step at once, as the graph allows; `thread` picks the caller's scratch.
 */
#ifndef FT_JOBS_EXECUTE_H
#define FT_JOBS_EXECUTE_H

#include "graph/graph.h"
#include "graph/routing.h"
#include "graph/weights.h"
#include "graph/workspace.h"
#include "jobs/batch.h"
#include "kernels_cpu/kernels_cpu.h"

/* Experts that the layer at hand uses, grouped: written when its router has run, read by the layer's expert
 * jobs. One layer is in this stage at a time. */
struct ft_active {
    uint32_t count;       /* active experts */
    uint32_t *expert;     /* [count] ascending */
    uint32_t *rows;       /* [count] */
    uint32_t *pair_begin; /* [count + 1] into pairs */
    uint32_t *pair_row;   /* [rows k] row of x */
    uint32_t *pair_out;   /* [rows k] row of expert_y: row * k + place in the top-k list */
    uint32_t *slot;       /* [count] or FT_NONE */
    uint32_t *last_used;  /* [count] */
    uint8_t *place, *reason;
    uint8_t *ahead; /* [count] copied ahead */
    uint32_t *victim;
    uint32_t *evicted; /* [count] fetched: what the victim held, layer * expert_count + expert, or FT_NONE */
    float *predicted_ns;
    const void **blob; /* [count] where the expert's weights are read: bank, slot or staging */
    uint32_t *awaited; /* [count] active indices whose prefetch was not finished */
    uint32_t *group;   /* [count] active indices in the order of the device's groups */
};

/* Activations of a step's rows. Decode rows have a set of their own, so that a prefill may pause between two layers:
 * its residual streams stay in the other set. A plan for one sequence has one set. */
enum ft_set { FT_SET_PREFILL, FT_SET_DECODE, FT_SET_COUNT };
struct ft_activations {
    struct ft_workspace space;
    float *buffer; /* [space.count] */
};

struct ft_execute {
    const struct ft_model *model;
    const struct ft_weights *weights;
    const struct ft_kernels *kernels;
    const struct ft_routing *routing; /* replaces the router's choice in decode steps; NULL = none */
    struct ft_state_layout state;
    struct ft_kv_layout kv;
    struct ft_activations sets[FT_SET_COUNT];
    struct ft_workspace space; /* of the running step: one of the sets */
    float *buffer;
    double *frequencies; /* [rotary_dim / 2] */
    double rotary_scale;
    float **scratch; /* [threads] of scratch_count f32 */
    uint64_t scratch_count;
    struct ft_active active;
    struct ft_batch *batch; /* of the running step */
    enum ft_dtype ple_dtype[FT_PLE_LAYERS_MAX];
    float ple_scale[FT_PLE_LAYERS_MAX];
};

/* f32 elements that one thread's scratch needs when sequences may hold `tokens` tokens. */
uint64_t ft_execute_scratch_count(const struct ft_model *model, uint32_t tokens);

/* One tile of a static op of a layer (FT_OP_EMBED .. FT_OP_SAMPLE and router_logits, except ple_read and the
 * expert ops). */
void ft_execute_op(struct ft_execute *x, uint32_t thread, enum ft_op op, enum ft_phase phase, uint32_t layer,
                   uint32_t begin, uint32_t end);
/* One tile of one active expert of `layer`. */
void ft_execute_expert_up(struct ft_execute *x, uint32_t layer, uint32_t active, uint32_t begin,
                          uint32_t end);
void ft_execute_expert_down(struct ft_execute *x, uint32_t layer, uint32_t active, uint32_t begin,
                            uint32_t end);
/* What the router of `layer` would choose if it were given the rows that another layer's router has just had; ids [rows,
 * k], FT_NONE for a row that is not a number. Given routing has an answer of its own. Overwrites the router's logits. */
void ft_execute_foresee(struct ft_execute *x, uint32_t layer, uint32_t *ids);
/* The answer of the given routing. */
void ft_execute_foresee_given(const struct ft_execute *x, uint32_t layer, uint32_t *ids);
/* Decodes rows already read into ple_raw: io thread, before the read job completes. */
void ft_execute_ple_decode(struct ft_execute *x, uint32_t table, uint32_t rows);

/* Parts in other files of the folder. */
void ft_execute_attention_op(struct ft_execute *x, uint32_t thread, enum ft_op op, uint32_t layer,
                             uint32_t begin, uint32_t end);

static inline enum ft_set ft_execute_set_of(const struct ft_batch *batch)
{
    return batch->prefill ? FT_SET_PREFILL : FT_SET_DECODE;
}

/* Between steps: what the next one works on. */
static inline void ft_execute_use(struct ft_execute *x, enum ft_set set)
{
    x->space = x->sets[set].space;
    x->buffer = x->sets[set].buffer;
}

static inline float *ft_execute_at(const struct ft_execute *x, uint64_t offset, uint64_t row, uint64_t width)
{
    return x->buffer + offset + row * width;
}

/* One segment of a concatenated output range: outputs [*at, *at + w->out) of a stage are those of w. Computes
 * what falls into [begin, end) and moves *at on. */
struct ft_segment {
    const struct ft_matrix *w;
    const float *bias;
};
void ft_execute_segments(const struct ft_execute *x, const struct ft_segment *segments, uint32_t count,
                         uint32_t begin, uint32_t end, struct ft_rows rows, float *y, size_t y_stride);
/* y rows [batch rows, H] of an output projection are added to the residual streams for [begin, end). */
void ft_execute_add_residual(struct ft_execute *x, const float *y, size_t y_stride, uint32_t begin,
                             uint32_t end);
/* Marks the sequence of a row as failed. */
void ft_execute_fail_row(struct ft_execute *x, uint32_t row, uint32_t layer);

#endif
