/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures the kernels of this core against what its memory can deliver.
 *
 * Everything is read from one bank of random data, larger than the last-level cache and made of distinct
 * pages, so that every pass comes from memory. GB = 1e9 bytes. Each number is the best of several rounds:
 * other programs only make a round slower.
 *
 * Threads: the functions start and join `threads` threads of their own; call them from one thread at a time.
 * Ownership: the bank lives only inside a call.
 */
#ifndef FT_BENCH_KERNELS_H
#define FT_BENCH_KERNELS_H

#include "kernels_cpu/kernels_cpu.h"

struct ft_bench_kernels_options {
    uint32_t threads;                            /* usable cores */
    uint64_t bank_bytes;                         /* several times the last-level cache */
    uint32_t hidden, width;                      /* of the experts */
    uint32_t rounds;                             /* 0 = 5 */
    bool reference;                              /* measure the references too (slow) */
    void (*pin)(void *context, uint32_t worker); /* called first in each thread; NULL = threads float */
    void *pin_context;
};

enum ft_bench_op { FT_BENCH_EXPERT, FT_BENCH_MATMUL };

struct ft_bench_kernels_result {
    enum ft_bench_op op; /* EXPERT: gate, up and down of whole experts; MATMUL: one large dense matrix */
    enum ft_format format;
    enum ft_isa isa;
    uint32_t rows, threads;
    double gbs, gflops;
    double ceiling_fraction; /* gbs / the read ceiling given */
    double max_error; /* largest |result - reference| / largest |reference|, over a sample of outputs */
};

/* Read bandwidth by plain sums, best of 1 .. options->threads threads and of several access patterns. */
int ft_bench_kernels_ceiling(const struct ft_bench_kernels_options *options, double *gbs, uint32_t *threads,
                             struct ft_error *err);

/* Every (op, format, ISA, rows). `ceiling_gbs` from above. FT_LIMIT when the results do not fit into
 * `capacity`. */
int ft_bench_kernels_run(const struct ft_bench_kernels_options *options, double ceiling_gbs,
                         struct ft_bench_kernels_result *results, uint32_t capacity, uint32_t *count,
                         struct ft_error *err);

const char *ft_bench_op_name(enum ft_bench_op op); /* "expert" */

#endif
