/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the two files of ft bench decode share: ft_bench_decode.c has the command and all that comes before the rows (plans,
 * weights, routing, ceilings), decode_rows.c runs one strategy: session, warm slots, steps, bounds.
 *
 * Threads: the caller's. Ownership: struct ft_decode_bench is the command's. Errors: those of the engine, with the strategy
 * in front.
 */
#ifndef FT_TOOLS_DECODE_BENCH_H
#define FT_TOOLS_DECODE_BENCH_H

#include "jobs/gpu_mover.h"
#include "planner/routing.h"
#include "tools/decode_report.h"
#include "tools/open.h"
#include "tools/shapes.h"

/* As parsed; see the command's --help. */
struct ft_decode_options {
    const char *shape, *routing, *ple_file, *trace, *isa;
    struct ft_shape_cuts cuts;
    uint32_t chunk, prompt, beside, format, dense, strategy, device, slots, batch, context, steps, warmup,
        workers, io;
    double cache_rate, link_gbs, share, ceiling_seconds, device_gbs;
    uint64_t seed, ple_bytes;
    bool device_given, chunk_given, beside_given, compare, prefill, json, pin;
    uint32_t prefetch, look_ahead; /* enum ft_prefetch_wish */
    double foresight;
    struct ft_option_numbers gpus;
};

struct ft_decode_bench {
    const struct ft_decode_options *options;
    struct ft_model model;
    enum ft_format format; /* of the experts */
    struct ft_weight_sizes sizes;
    struct ft_machine machine; /* before the weights took memory; then with what was measured */
    enum ft_device device;     /* of --compare, when none is asked for */
    struct ft_topology topology;
    bool has_topology;
    struct ft_gpu_mover *gpu; /* NULL without a GPU; keeps the banks pinned from session to session */
    bool abandoned;           /* steps failed: weights, routing and table stay for a lane that may be stuck */
    struct ft_row_tables *tables; /* NULL without PLE */
    struct ft_loaded loaded;
    struct ft_routing routing;
    struct ft_routing_options generator; /* step_count 0: the routing is recorded */
    double *step_s;                      /* [steps] */
    struct ft_event *events;             /* [2 FT_SEQUENCES_MAX] */
    struct ft_decode_report report;
};

/* False: a signal has come. */
bool ft_decode_go_on(void);
/* Tokens that a sequence may generate: with --prefill also beside the prompt and after it. */
uint32_t ft_decode_max_tokens(const struct ft_decode_options *options);
void ft_decode_open_options(const struct ft_decode_bench *bench, enum ft_strategy strategy,
                            struct ft_open_options *open);
/* measured: with what the ceilings have told of the machine. */
struct ft_engine_parts ft_decode_parts(const struct ft_decode_bench *bench, bool measured);
int ft_decode_run_row(struct ft_decode_bench *bench, enum ft_strategy strategy, struct ft_decode_row *row,
                      struct ft_error *err);

#endif
