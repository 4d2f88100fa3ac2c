/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights of a model that nobody trained: random numbers in memory, in the layout that loading a checkpoint
 * gives.
 *
 * For measuring speed. Every byte is its own: pages are distinct and written, so that caches, links and
 * prefetchers meet what they meet with real weights. Codes are valid (no NaN), matrices have rows of norm
 * about 1, so that activations stay finite over any number of layers. Dense matrices are bf16, or fp8_block
 * where loading with FT_DENSE_TO_FP8 would quantise them; vectors f32, experts in the format asked for. The
 * numbers depend on the seed alone, not on the number of threads.
 *
 * Ownership: *loaded is the caller's (ft_loaded_fini). Threads: starts and joins `threads` of its own.
 * Errors: FT_UNSUPPORTED when the sizes do not fit the format, FT_MEMORY; nothing is left half-made.
 */
#ifndef FT_TOOLS_SYNTHETIC_H
#define FT_TOOLS_SYNTHETIC_H

#include "io/load.h"

struct ft_topology;

struct ft_synthetic_options {
    enum ft_format format; /* of the experts: bf16, nvfp4, mxfp4, fp8_block, ds_fp4 */
    enum ft_dense dense;   /* FT_DENSE_AS_STORED or FT_DENSE_TO_FP8 */
    uint64_t seed;
    uint32_t threads;                   /* 0 = usable cores */
    const struct ft_topology *topology; /* threads are pinned to its cores; NULL = they float */
    bool (*go_on)(void); /* asked between pieces of a few MiB; false cancels (FT_CANCELLED). NULL = always */
};

struct ft_synthetic_stats {
    uint64_t bytes;
    double seconds;
    uint32_t threads;
};

/* What ft_synthetic_make will make; no memory is touched. */
int ft_synthetic_sizes(const struct ft_model *model, enum ft_format format, enum ft_dense dense,
                       struct ft_weight_sizes *sizes, struct ft_error *err);
int ft_synthetic_make(const struct ft_model *model, const struct ft_synthetic_options *options,
                      struct ft_loaded *loaded, struct ft_synthetic_stats *stats, struct ft_error *err);

#endif
