/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The job graph of one step shape, as parallel arrays with CSR successor lists. Built once per shape, then
 * read-only.
 *
 * Ids: [0, static_count) are the jobs known in advance. Each layer with experts also owns a reserved range of
 * reserved_count ids; its jobs exist only when the layer's router has run and the policy has answered (struct
 * ft_dynamic in jobs/step.h describes them).
 *
 *   embed -> [mix_down.. -> mix_up..] -> project.. -> delta.. | prepare -> select.. -> attn.. -> out..
 *         -> [mix] -> router_logits.. -> router -> { reserved: fetch -> expert_device ;
 *                  |                                           expert_up.. -> expert_down.. } -> combine.. ... -> end
 *                  `-> shared_up.. -> shared_down.. ------------------------------------------^
 *
 * A slice of a step (struct ft_shape) has the jobs of its layers alone: without embed when it does not begin at
 * layer 0, without the head when it does not reach the last layer.
 *
 * Between two stages with several tiles stands a join (lane inline): the last tile to finish releases all
 * tiles of the next stage, so edges stay tiles + tiles instead of tiles x tiles.
 */
#ifndef FT_GRAPH_GRAPH_H
#define FT_GRAPH_GRAPH_H

#include "graph/arena.h"
#include "graph/model.h"
#include "graph/op.h"
#include "graph/weights.h"

/* Capacity of a step: actual rows and sequences of a step may be smaller. */
struct ft_shape {
    uint32_t rows;       /* tokens in the step */
    uint32_t sequences;  /* sequences in the step */
    uint32_t logit_rows; /* rows that go through the head */
    bool prefill;        /* some sequence brings more than one row */
    /* The layers of the step: [layer_begin, layer_end); layer_end 0 = to the last one. A slice of a step begins
     * with the residual streams that the slice before left, and only the last one has a head. */
    uint32_t layer_begin, layer_end;
};

/* How stages are cut. */
struct ft_tiling {
    uint32_t tiles_max;              /* of one stage: about 2 x workers; 1 when the device runs the stage */
    uint32_t tile_bytes_min;         /* weights per tile below which cutting costs more than it saves */
    uint8_t lane_of_op[FT_OP_COUNT]; /* enum ft_lane: CPU or DEVICE for dense ops, IO for ple_read */
};

#define FT_GRAPH_NO_LAYER UINT16_MAX
#define FT_GRAPH_CONV_CHANNELS 16u /* channels of one unit of linear_conv: a cache line of f32 */
enum ft_phase { FT_PHASE_ATTENTION, FT_PHASE_MLP, FT_PHASE_HEAD };

struct ft_graph {
    struct ft_shape shape;
    uint32_t static_count, reserved_count /* per layer with experts */, job_count, edge_count, layer_count;
    /* [static_count] */
    uint8_t *op, *lane;
    uint8_t *phase;        /* enum ft_phase: which of a layer's norms and mixers this is */
    uint16_t *layer;       /* layer, or FT_GRAPH_NO_LAYER */
    uint32_t *begin, *end; /* range of the op's axis */
    uint64_t *bytes;       /* weights read */
    uint64_t *flops;       /* for shape.rows rows */
    int32_t *in_degree;    /* combine: without the reserved jobs, with one for the router's answer */
    uint32_t *succ_begin;  /* [static_count + 1] */
    uint32_t *succ;        /* [edge_count] */
    /* [layer_count] */
    uint32_t *router_job;     /* FT_NONE in a dense layer */
    uint32_t *combine_job;    /* join in front of the layer's combine tiles: what experts' jobs release */
    uint32_t *combine_tile;   /* first combine tile of the layer: before it the device runs the layer's expert
                                 groups */
    uint32_t *reserved_begin; /* first id of the reserved range, FT_NONE in a dense layer */
    uint32_t end_job;
    /* jobs of the serial lanes in graph order: what the device and io lanes walk. [device_count], [io_count] */
    uint32_t *device_jobs, device_count;
    uint32_t *io_jobs, io_count;
};

/* Fills `graph` inside `arena` (counting arenas welcome: then only the counts of `graph` are set). Dense
 * weights are counted as bf16. Errors: FT_LIMIT when the shape has no rows, no layers or more jobs than 32-bit ids. */
int ft_graph_build(struct ft_graph *graph, struct ft_arena *arena, const struct ft_model *model,
                   const struct ft_shape *shape, const struct ft_tiling *tiling, struct ft_error *err);
/* Counts, maps an arena of that size and fills it. The arena is the caller's to end; empty on failure. */
int ft_graph_create(struct ft_graph *graph, struct ft_arena *arena, const struct ft_model *model,
                    const struct ft_shape *shape, const struct ft_tiling *tiling, struct ft_error *err);
/* Longest possible in-order check: acyclic, in-degrees right, every job reaches the end. FT_INTERNAL names
 * the job. */
int ft_graph_check(const struct ft_graph *graph, struct ft_error *err);

/* Upper bound of reserved jobs of one layer for `rows` rows. */
uint32_t ft_graph_reserved_count(const struct ft_model *model, uint32_t rows, uint32_t tiles_max);
/* Number of tiles of `units` units (of `unit_bytes` each) under a tiling. */
uint32_t ft_graph_tile_count(uint64_t units, uint64_t unit_bytes, uint32_t tiles_max,
                             uint32_t tile_bytes_min);
/* How a plan cuts for this many workers. */
struct ft_tiling ft_graph_tiling_of(uint32_t workers);
/* Into how many tiles an expert on the CPU is cut, whose layer computes `experts` of them there. */
void ft_graph_expert_tiles(const struct ft_tiling *tiling, const struct ft_expert_layout *layout,
                           uint32_t experts, bool is_last, uint32_t *ups, uint32_t *downs);
/* Tile t of `tiles` of `units` outputs: [*begin, *end), 8-aligned. */
void ft_graph_tile_range(uint32_t units, uint32_t tiles, uint32_t t, uint32_t *begin, uint32_t *end);

#endif
