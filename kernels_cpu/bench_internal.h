/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the kernel benchmark share: banks of random data, a crew of threads that are timed
 * together, and the loops that show what the hardware can do. Not for other folders.
 */
#ifndef FT_BENCH_INTERNAL_H
#define FT_BENCH_INTERNAL_H

#include "kernels_cpu/bench_kernels.h"

#include <stdatomic.h>

/* ---- banks: anonymous memory, every page written, so that every page is a page of its own ---- */

enum ft_bench_pages { FT_BENCH_PAGES_HUGE, FT_BENCH_PAGES_SMALL }; /* asked for by madvise */

struct ft_bench_bank {
    uint8_t *data; /* 2 MiB aligned */
    uint64_t bytes;
    uint8_t *mapped;
};

int ft_bench_bank_open(struct ft_bench_bank *bank, uint64_t bytes, enum ft_bench_pages pages,
                       struct ft_error *err);
void ft_bench_bank_close(struct ft_bench_bank *bank);
/* Share of the bank that lies in huge pages, from /proc/self/smaps; -1 = not known. */
double ft_bench_bank_huge_share(const struct ft_bench_bank *bank);

/* Random bytes, of which `keep` chooses the random bits and `set` the constant ones, 8 bytes at a time. */
void ft_bench_fill(void *to, uint64_t bytes, uint64_t keep, uint64_t set, uint64_t seed);

/* ---- threads ---- */

struct ft_bench_crew;

int ft_bench_crew_open(struct ft_bench_crew **out, const struct ft_bench_kernels_options *options,
                       struct ft_error *err);
void ft_bench_crew_close(struct ft_bench_crew *crew);
/* Best wall time of the rounds, from the first thread's begin to the last one's end. Before each round every
 * thread reads twice its second-level cache, so that nothing of the round before is left in it. */
int ft_bench_crew_run(struct ft_bench_crew *crew, uint32_t threads, uint32_t rounds,
                      void (*work)(void *context, uint32_t number, uint32_t count), void *context,
                      double *best_s, struct ft_error *err);

/* Time that the first thread of the last round was on a core. */
double ft_bench_crew_cpu_s(const struct ft_bench_crew *crew);

/* ---- the hardware ---- */

enum ft_roof_pattern {
    FT_ROOF_ONE_STREAM,
    FT_ROOF_FOUR_STREAMS,
    FT_ROOF_ONE_STREAM_AHEAD,
    FT_ROOF_FOUR_STREAMS_AHEAD,
    FT_ROOF_PATTERN_COUNT
};

struct ft_roof {
    uint64_t (*read)(const uint8_t *part, uint64_t bytes, enum ft_roof_pattern pattern); /* a sum */
    double (*fma)(uint32_t rounds, float *sink); /* flops done; NULL = not measured */
};
extern const struct ft_roof ft_roof_avx2, ft_roof_avx512;

/* One plain read of all regions, one after the other, each thread a part of the whole: with the threads and the access
 * pattern that were best in the sweep of `roof`. */
int ft_bench_read(struct ft_bench_crew *crew, const struct ft_bench_roof *roof,
                  const struct ft_bench_region *regions, uint32_t region_count, double *gbs,
                  struct ft_error *err);

/* The sweep over a bank, which it fills, and the peaks. */
int ft_bench_roof(struct ft_bench_crew *crew, const struct ft_bench_kernels_options *options,
                  const struct ft_bench_bank *bank, struct ft_bench_roof *roof, struct ft_error *err);

/* What rounds reached of reads around them: the median of gbs[i] / mean(reads[i], reads[i + 1]), or, where !paired, of
 * gbs[i] / mean(reads[0], reads[rounds]). gbs [rounds] is overwritten; reads [rounds + 1]. */
double ft_bench_ceiling_fraction(double *gbs, const double *reads, uint32_t rounds, bool paired);

/* ---- cases: one op on one format (bench_cases.c) ---- */

#define FT_BENCH_ROWS_MAX 64u

struct ft_bench_case {
    enum ft_bench_op op;
    enum ft_format format;
    const struct ft_kernels *kernels;
    const struct ft_bench_bank *bank;
    uint32_t hidden, width, rows, threads;
    /* The bank is cut into units; each is read once per pass. */
    uint64_t unit_stride, unit_bytes; /* apart; read (and written) by the op */
    double unit_macs;                 /* multiply-adds for one row */
    uint32_t unit_count;
    uint32_t *order;                 /* [unit_count] a random order, as experts come */
    struct ft_bench_region *regions; /* [unit_count] the memory of units in this order */
    struct ft_expert_layout layout;
    uint32_t ups, downs; /* tiles of an expert */
    const float *x;      /* [FT_BENCH_ROWS_MAX, x_width] */
    float *scratch;      /* [threads, scratch_stride] */
    size_t scratch_stride;
    uint32_t pass_units; /* units of one pass */
};

uint32_t ft_bench_case_count(void);
void ft_bench_case_get(uint32_t index, enum ft_bench_op *op, enum ft_format *format);
bool ft_bench_op_has_rows(enum ft_bench_op op); /* whether more rows share one read of the weights */
uint64_t ft_bench_case_x_count(const struct ft_bench_kernels_options *options);
uint64_t ft_bench_case_scratch_count(const struct ft_bench_kernels_options *options); /* per thread */
/* Sizes of the case alone; FT_UNSUPPORTED when the format cannot have them. */
int ft_bench_case_size(struct ft_bench_case *c, struct ft_error *err);
/* Sizes of the case and data in the bank. Call fini, also after a failure, if the case was zero in what this fills. */
int ft_bench_case_prepare(struct ft_bench_case *c, uint64_t seed, struct ft_error *err);
void ft_bench_case_fini(struct ft_bench_case *c);
/* A ft_bench_crew_run work: this thread's share of a pass. */
void ft_bench_case_pass(void *context, uint32_t number, uint32_t count);
/* Largest |result - reference| / largest |reference| over a sample of outputs, some of every row, of the first unit,
 * which is computed as in a pass. */
int ft_bench_case_error(const struct ft_bench_case *c, double *error, struct ft_error *err);

#endif
