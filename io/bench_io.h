/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measurements behind `ft bench load` and `ft bench ple`: how near loading comes to the disk, and what
 * reading the rows of a step costs. They use the very code that the engine uses (io/load.h, io/rows.h,
 * io/uring.h).
 *
 * Threads: the caller's, plus those of loading. Errors: as in the modules measured; FT_IO names what is short
 * on disk.
 */
#ifndef FT_IO_BENCH_IO_H
#define FT_IO_BENCH_IO_H

#include "io/load.h"
#include "io/rows.h"

struct ft_bench_load {
    uint64_t plain_bytes, load_bytes;           /* read from disk by each */
    double plain_bytes_per_s, load_bytes_per_s; /* best of the rounds */
    double fraction;                            /* load / plain */
    struct ft_load_stats stats;                 /* of the best load */
};

/*
 * Plain = the checkpoint's files from end to end, one thread, O_DIRECT, 1 MiB per pread. Load = ft_load,
 * memory given back after each round. The page cache is dropped before each. Rounds alternate; 0 = 3.
 */
int ft_bench_load(const struct ft_checkpoint *checkpoint, const struct ft_load_options *options,
                  uint32_t rounds, struct ft_bench_load *result, struct ft_error *err);

struct ft_bench_ple_options {
    const char *path;       /* of the table; made when it is absent or another one */
    uint64_t file_bytes;    /* 0 = 4 GiB: beyond the caches of most disks */
    uint32_t row_bytes;     /* 0 = 160 */
    uint32_t rows_per_step; /* 0 = 16 */
    uint32_t steps;         /* 0 = 2000 */
    enum ft_io_backend backend;
    bool keep; /* leave the file for the next time */
    bool (*progress)(void *context, uint64_t done_bytes,
                     uint64_t total_bytes); /* while writing, then now and then; false = cancel */
    void *progress_context;
};

#define FT_BENCH_DEPTHS 7u /* 1, 2, 4 ... 64 */

struct ft_bench_ple {
    uint64_t file_bytes, row_count;
    uint64_t rows_verified; /* each row read is compared with what was written */
    struct ft_row_stats rows;
    double latency_p50_s, latency_p99_s, latency_max_s,
        latency_mean_s;                 /* of a step's rows: submit to delivered */
    double curve_iops[FT_BENCH_DEPTHS]; /* 4 KiB random reads at depth 2^i */
    enum ft_io_backend backend;
    bool direct, made; /* made: the table was written by this call */
    char note[512];
};

/* FT_MISMATCH when a row is not what was written. A table made by this call is removed on failure. */
int ft_bench_ple(const struct ft_bench_ple_options *options, struct ft_bench_ple *result,
                 struct ft_error *err);

#endif
