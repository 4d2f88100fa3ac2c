/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures the kernels of this core against what its memory and its arithmetic can deliver.
 *
 * Everything is read from one bank of random data (no zeros, no NaN), larger than the last-level cache and
 * made of distinct pages, in a random order of experts; the second-level caches are flushed between rounds,
 * so that every pass comes from memory. GB = 1e9 bytes. GB/s are those of the best of several rounds: other
 * programs only make a round slower. From 8 rows on a pass covers less of the bank (a quarter at least),
 * because arithmetic limits it.
 *
 * The ceiling is a plain read of the same bytes in the same order: memory of one machine may be of two speeds by
 * address (seen in virtual machines: 50 and 88 GB/s) and by time (98 GB/s in one minute, 173 in the next). So every
 * round of a kernel lies between two reads, and its fraction is its GB/s / the mean of theirs; the median of the rounds'
 * fractions is reported. Above 2 rows, where memory is seldom the limit, there is one read before all rounds and one
 * after them. A sweep at the beginning finds how many threads and which access pattern read fastest.
 *
 * The ISAs are those of the dispatch table that this core has: a new one appears by itself.
 *
 * Threads: the functions start and join `threads` threads of their own; call them from one thread at a time.
 * Ownership: the bank lives only inside a call.
 */
#ifndef FT_BENCH_KERNELS_H
#define FT_BENCH_KERNELS_H

#include "kernels_cpu/kernels_cpu.h"

struct ft_bench_kernels_result;
struct ft_bench_roof;

struct ft_bench_kernels_options {
    uint32_t threads;              /* usable cores */
    uint64_t bank_bytes;           /* several times the last-level cache */
    uint32_t hidden, width;        /* of the experts */
    uint32_t rounds;               /* 0 = 5 */
    bool reference;                /* measure the references too (slow) */
    const char *isa, *op, *format; /* only these, by name, with commas between them; NULL = all */
    uint32_t rows;                 /* only this number of rows (and 1, to compare with); 0 = all */
    /* Called with each result as soon as it is there; NULL = not wanted. False: errno says why nobody hears it, and the
     * measurement ends. */
    bool (*tell)(void *context, const struct ft_bench_kernels_result *result);
    /* Called once before them; NULL = not wanted. */
    bool (*tell_roof)(void *context, const struct ft_bench_roof *roof);
    void *tell_context;
    void (*pin)(void *context, uint32_t worker); /* called first in each thread; NULL = threads float */
    void *pin_context;
};

/* op: what a pass does, and with how many rows it is measured */
#define FT_BENCH_OPS(X)                                                                                      \
    X(EXPERT, "expert")       /* gate, up and down of whole experts, in tiles as a decode step has them */   \
    X(MATMUL, "matmul")       /* dense matrices */                                                           \
    X(MIX_UP, "mix_up")       /* hyper-connection mixers */                                                  \
    X(ATTENTION, "attention") /* one query over 1024 tokens of keys and values */                            \
    X(SCORES, "index_scores") /* one query over 4096 indexer blocks */                                       \
    X(DELTA, "delta_rule")    /* one token: states are read and written */

enum ft_bench_op {
#define FT_BENCH_OP_ENUM(name, text) FT_BENCH_##name,
    FT_BENCH_OPS(FT_BENCH_OP_ENUM)
#undef FT_BENCH_OP_ENUM
        FT_BENCH_OP_COUNT
};

/* What the machine can do, measured in the same run. */
struct ft_bench_roof {
    uint32_t point_count;
    uint32_t point_threads[64]; /* [point_count] the sweep: 1, 2, 3, 4, 6, 8, 12 ... and all */
    double point_gbs[64];       /* read by plain sums, the best of four access patterns */
    double ceiling_gbs;         /* the best point */
    uint32_t ceiling_threads;
    uint32_t ceiling_pattern;         /* of the best point: a number of the implementation */
    double peak_gflops[FT_ISA_COUNT]; /* f32 multiply-adds of all threads at this vector width; 0 = not
                                         measured */
};

struct ft_bench_kernels_result {
    enum ft_bench_op op;
    enum ft_format format;
    enum ft_isa isa;
    uint32_t rows, threads;
    double gbs, gflops; /* of the best round */
    double ceiling_gbs; /* the best of the reads around this kernel's rounds */
    /* Median of the rounds' GB/s / mean of the reads before and after; gbs / ceiling_gbs only where memory keeps its
     * speed. */
    double ceiling_fraction;
    double peak_fraction; /* gflops / the f32 peak of the ISA's width; 0 = not measured. Integer kernels may
                             pass 1 */
    double times_one_row; /* time / time of 1 row, for the same weights; 0 = 1 row was not measured */
    double max_error;     /* largest |result - reference| / largest |reference|, in a sample of all rows */
};

/* One row through nvfp4 experts in small pages and in huge pages, in turn, by one thread; the best ISA. */
struct ft_bench_pages_result {
    enum ft_isa isa;
    double small_gbs, huge_gbs;
    double small_share, huge_share; /* of the bank that really lies in huge pages; -1 = not known */
    bool hugetlb;                   /* whether a page of the reserved pool (hugetlbfs) could be mapped */
};

/* Memory that somebody reads; it stays theirs. */
struct ft_bench_region {
    const void *data;
    uint64_t bytes;
};

/* The fastest plain read of all regions one after the other, by all threads together or fewer of them. Regions
 * that are smaller than bank_bytes together would stay in caches: a bank of that size is read instead. */
int ft_bench_read_ceiling(const struct ft_bench_kernels_options *options,
                          const struct ft_bench_region *regions, uint32_t region_count, double *gbs,
                          struct ft_error *err);
/* The names and sizes of the options, before anything is measured. FT_USAGE: a name that nobody has, or nothing matches;
 * FT_UNSUPPORTED: an ISA that this core lacks, a size that a format cannot have. */
int ft_bench_kernels_check(const struct ft_bench_kernels_options *options, struct ft_error *err);
/* The roof, then every (op, format, ISA, rows) in the same bank. FT_LIMIT when the results do not fit into `capacity`;
 * FT_USAGE as ft_bench_kernels_check. */
int ft_bench_kernels_run(const struct ft_bench_kernels_options *options, struct ft_bench_roof *roof,
                         struct ft_bench_kernels_result *results, uint32_t capacity, uint32_t *count,
                         struct ft_error *err);
int ft_bench_kernels_pages(const struct ft_bench_kernels_options *options,
                           struct ft_bench_pages_result *result, struct ft_error *err);

const char *ft_bench_op_name(enum ft_bench_op op); /* "expert" */

#endif
