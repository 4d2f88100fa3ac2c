/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one place that joins checkpoint, sizes, machine, plan, policy, weights and session.
 *
 *   DIR -> checkpoint (headers) -> sizes --.
 *   topology -> machine --------------------+-> plan (fits?) -> tables, weights (progress) -> session
 *   --replay, --strategy -> policy --------'
 *
 * Strategy auto measures link and CPU between weights and session (tools/measure_start.h).
 *
 * ft_engine_plan stops after the plan (no weight is read); ft_engine_open goes on. Ownership: the engine owns
 * everything it names; close ends it in reverse order and is safe on a half-open or zeroed engine.
 * Threads: one at a time. Errors: prepended with what was being done; nothing is left half-made.
 */
#ifndef FT_TOOLS_OPEN_H
#define FT_TOOLS_OPEN_H

#include "graph/plan.h"
#include "io/checkpoint.h"
#include "io/load.h"
#include "io/rows.h"
#include "jobs/session.h"
#include "jobs/topology.h"
#include "planner/policy_replay.h"
#include "tools/options.h"
#include "tools/trace_file.h"

enum ft_prefetch_wish { FT_PREFETCH_AUTO, FT_PREFETCH_ON, FT_PREFETCH_OFF };

struct ft_open_options {
    const char *model; /* directory; NULL = the demo model */
    struct ft_plan_options plan;
    /* as parsed; resolved into `plan` */
    uint32_t strategy, device;
    bool cache_auto;                     /* say so: slots fill the device, the default */
    uint32_t handshake;                  /* enum ft_handshake */
    struct ft_option_numbers gpus, vram; /* none named: GPU 0; one limit: for every GPU */
    bool device_given, snapshot_given;
    uint32_t ple_backend; /* 0 disk, 1 ram */
    uint32_t dense;       /* enum ft_dense */
    uint32_t
        fp8_uses; /* measurements: quantise these (enum ft_dense_use), accepted or not; 0 = as `dense` says */
    uint32_t io;  /* enum ft_io_backend */
    const char *replay, *trace, *isa;
    bool
        assume_gpu; /* plans only: --device cuda with --vram on a machine without a GPU supposes as many as are named */
    double link_gbs, link_delay_us;
    bool pin, quiet;
    uint32_t prefetch, look_ahead; /* enum ft_prefetch_wish */
};

#define FT_OPEN_OPTION_COUNT 31u
extern const struct ft_option ft_open_option_table[FT_OPEN_OPTION_COUNT];
void ft_open_options_init(struct ft_open_options *options);
/* The group of engine options for a command's option set; options is the target. */
struct ft_option_group ft_open_option_group(struct ft_open_options *options);

#define FT_KV_TOKENS_MAX 1000000000u /* of --kv-tokens */
/* Where the user left it open: a KV pool (at most the largest) and sequences for that many of tokens_each. */
void ft_open_options_want_kv(struct ft_open_options *options, uint64_t tokens_each, uint32_t sequences);

struct ft_engine {
    char dir[4096];
    struct ft_checkpoint *checkpoint;
    const struct ft_model *model;          /* of the checkpoint */
    struct ft_weight_sizes dense_sizes[2]; /* by enum ft_dense: as stored, as fp8 */
    struct ft_weight_sizes sizes;          /* the one that the plan chose */
    bool has_topology, is_loaded;
    struct ft_topology topology;
    struct ft_machine machine;
    struct ft_plan plan;
    struct ft_replay replay; /* --replay: input of the replay policy */
    const struct ft_policy *policy;
    struct ft_row_tables *tables; /* NULL without PLE */
    struct ft_loaded loaded;
    const struct ft_weights *weights; /* loaded's, or those given */
    const struct ft_routing *routing; /* as given; NULL = the router's own choices */
    bool owns_tables;
    struct ft_load_stats load;
    struct ft_gpu_mover *mover; /* measured for strategy auto; keeps the banks pinned. NULL = not */
    struct ft_trace_file trace;
    struct ft_session *session;
};

/* --model, or the demo model: $FT_DEMO_MODEL, else next to the executable. Says on stderr when the demo is taken. */
int ft_engine_find_dir(const struct ft_open_options *options, char *dir, size_t cap, struct ft_error *err);
/* Headers, machine and plan. The plan may say that it does not fit. */
int ft_engine_plan(struct ft_engine *engine, const struct ft_open_options *options, struct ft_error *err);
/* The same and then everything up to a session that can step. FT_MEMORY with advice when the plan does not fit. */
int ft_engine_open(struct ft_engine *engine, const struct ft_open_options *options, struct ft_error *err);
/* What an engine may be given instead of a checkpoint. All of it stays the caller's and outlives the engine. */
struct ft_engine_parts {
    const struct ft_model *model;
    const struct ft_weight_sizes *sizes;
    const struct ft_weight_sizes
        *fp8_sizes;                   /* of the same model with --dense fp8; NULL = there is no choice */
    const struct ft_machine *machine; /* as an earlier plan found it, before the weights took their memory;
                                         NULL = as it is now */
    const struct ft_weights *weights; /* not needed for a plan */
    struct ft_row_tables *tables;     /* NULL without PLE */
    const struct ft_routing *routing; /* NULL = the router's own choices */
};
/* The same two with parts: what is said of the model's directory in the options does not count. */
int ft_engine_plan_parts(struct ft_engine *engine, const struct ft_open_options *options,
                         const struct ft_engine_parts *parts, struct ft_error *err);
int ft_engine_open_parts(struct ft_engine *engine, const struct ft_open_options *options,
                         const struct ft_engine_parts *parts, struct ft_error *err);
/* Ends the trace too: FT_IO when it is incomplete (the only failure). */
int ft_engine_close(struct ft_engine *engine, struct ft_error *err);

#endif
