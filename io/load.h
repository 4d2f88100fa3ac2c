/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a checkpoint to weights in memory, in two halves:
 *
 *   bind  headers -> a list of parts (file range -> place in memory, with a conversion) and the sizes; checks that
 *         every needed tensor is there with the right shape and dtype, and warns about none that is not needed
 *   read  the parts, in parallel, by io_uring with O_DIRECT through a registered bounce pool (or the pread pool)
 *
 * Memory: one "dense" block (matrices in their own bits or quantised, vectors as f32) and one bank of experts per
 * layer, inside one arena owned by struct ft_loaded. PLE tables stay on disk (io/rows.h).
 */
#ifndef FT_IO_LOAD_H
#define FT_IO_LOAD_H

#include "graph/arena.h"
#include "graph/weights.h"
#include "io/checkpoint.h"
#include "io/uring.h"

/* Sizes from headers alone; the same checks as loading. fp8_uses: as below. */
int ft_load_sizes(const struct ft_checkpoint *checkpoint, uint32_t fp8_uses, struct ft_weight_sizes *sizes,
                  struct ft_error *err);

struct ft_load_options {
    enum ft_io_backend backend;  /* AUTO: io_uring, else pread */
    uint32_t depth;              /* reads in flight; 0 = default */
    uint32_t fp8_uses;           /* mask of enum ft_dense_use: quantised to fp8_block; 0 = all as stored */
    /* Called from the loading thread now and then, and once at the end; NULL = none. Return false to cancel. */
    bool (*progress)(void *context, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_context;
};

struct ft_load_stats {
    uint64_t bytes;   /* read from disk */
    uint64_t ns;      /* wall clock */
    bool direct;      /* O_DIRECT was in use for all files */
    enum ft_io_backend backend;
    char note[256];   /* why a slower way was taken and the remedy; empty when none was */
};

struct ft_loaded {
    struct ft_weights weights;
    struct ft_weight_sizes sizes;
    struct ft_arena arena; /* owns everything the weights point to */
};

/* On failure nothing is left allocated. NaN/Inf in matrices or scales is found here and named (f32/bf16 vectors and
 * scales are checked while they are converted or copied). */
int ft_load(const struct ft_checkpoint *checkpoint, const struct ft_load_options *options, struct ft_loaded *loaded,
            struct ft_load_stats *stats, struct ft_error *err);
void ft_loaded_fini(struct ft_loaded *loaded);

#endif
