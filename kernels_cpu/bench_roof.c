/* SPDX-License-Identifier: Apache-2.0 */
/* What the machine can do: a sweep of plain reads over thread counts, and the peak of multiply-adds. */
#include "kernels_cpu/bench_internal.h"

#include <stdlib.h>
#include <string.h>

#define FMA_ROUNDS 400000u /* some milliseconds */

static uint64_t read_plain(const uint8_t *part, uint64_t bytes, enum ft_roof_pattern pattern)
{
    const uint64_t *words = (const uint64_t *)(const void *)part;
    uint64_t sum[4] = {0};
    (void)pattern;
    for (uint64_t i = 0; i + 4 <= bytes / 8; i += 4)
        for (uint32_t j = 0; j < 4; j++)
            sum[j] += words[i + j];
    return sum[0] + sum[1] + sum[2] + sum[3];
}

static const struct ft_roof roof_plain = {read_plain, NULL};

/* The loops of an ISA: those of its vector width, told by its name; other ISAs of this core are as wide as AVX2. */
static const struct ft_roof *roof_of(enum ft_isa isa)
{
#if defined(__x86_64__)
    bool wide = strncmp(ft_isa_name(isa), "avx512", 6) == 0 || strncmp(ft_isa_name(isa), "amx", 3) == 0;
    if (wide && ft_isa_is_available(FT_ISA_AVX512))
        return &ft_roof_avx512;
    if (isa != FT_ISA_REF && ft_isa_is_available(FT_ISA_AVX2))
        return &ft_roof_avx2;
#endif
    (void)isa;
    return &roof_plain;
}

struct read_work {
    const struct ft_bench_region
        *regions; /* read one after the other; each thread has its part of the whole */
    uint32_t region_count;
    uint64_t bytes; /* of all regions */
    const struct ft_roof *roof;
    enum ft_roof_pattern pattern;
    struct {
        uint64_t sum, bytes; /* keeps the sums alive; read in the last round */
        char pad[48];        /* one writer per line */
    } sink[FT_WORKERS_MAX];
};

static void read_part(void *context, uint32_t number, uint32_t count)
{
    struct read_work *work = context;
    uint64_t begin = work->bytes / count * number, at = 0;
    uint64_t end = number + 1 < count ? begin + work->bytes / count : work->bytes, bytes = 0;
    for (uint32_t i = 0; i < work->region_count; at += work->regions[i++].bytes) {
        uint64_t from = FT_MAX(begin, at), to = FT_MIN(end, at + work->regions[i].bytes);
        if (from >= to)
            continue;
        const uint8_t *data = (const uint8_t *)work->regions[i].data + (from - at);
        uint64_t skip = FT_MIN((64 - (uintptr_t)data % 64) % 64, to - from); /* to the first whole line */
        uint64_t whole = (to - from - skip) / 1024 * 1024;
        work->sink[number].sum += work->roof->read(data + skip, whole, work->pattern);
        bytes += whole;
    }
    work->sink[number].bytes = bytes;
}

/* Best of several rounds. */
static int run_read(struct ft_bench_crew *crew, struct read_work *work, uint32_t threads, uint32_t rounds,
                    double *gbs, struct ft_error *err)
{
    double seconds;
    uint64_t bytes = 0;
    int status = ft_bench_crew_run(crew, threads, rounds, read_part, work, &seconds, err);
    for (uint32_t i = 0; i < threads; i++)
        bytes += work->sink[i].bytes;
    if (status == FT_OK)
        *gbs = (double)bytes / seconds / 1e9;
    return status;
}

/* 1, 2, 3, 4, 6, 8, 12, 16 ... and the last one. */
static uint32_t next_point(uint32_t threads, uint32_t last)
{
    uint32_t power = 1;
    while (2 * power <= threads)
        power *= 2;
    uint32_t next = threads < 4 ? threads + 1 : threads + power / 2;
    return threads < last ? FT_MIN(next, last) : last + 1;
}

static int sweep_reads(struct ft_bench_crew *crew, const struct ft_bench_kernels_options *options,
                       struct read_work *work, struct ft_bench_roof *roof, struct ft_error *err)
{
    uint32_t last = FT_MIN(options->threads, FT_WORKERS_MAX), rounds = options->rounds ? options->rounds : 5;
    for (uint32_t n = 1; n <= last; n = next_point(n, last)) {
        uint32_t at = roof->point_count++;
        FT_ASSERT_LT(at, 64u);
        roof->point_threads[at] = n;
        for (uint32_t p = 0; p < FT_ROOF_PATTERN_COUNT; p++) {
            double gbs;
            work->pattern = (enum ft_roof_pattern)p;
            int status = run_read(crew, work, n, rounds, &gbs, err);
            if (status != FT_OK)
                return status;
            roof->point_gbs[at] = FT_MAX(roof->point_gbs[at], gbs);
            if (gbs > roof->ceiling_gbs) {
                roof->ceiling_gbs = gbs;
                roof->ceiling_threads = n;
                roof->ceiling_pattern = p;
            }
        }
    }
    return FT_OK;
}

struct fma_work {
    const struct ft_roof *roof;
    struct {
        double flops;
        float sink;
        char pad[52]; /* one writer per line */
    } thread[FT_WORKERS_MAX];
};

static void fma_part(void *context, uint32_t number, uint32_t count)
{
    struct fma_work *work = context;
    (void)count;
    work->thread[number].sink = 0.1f;
    work->thread[number].flops = work->roof->fma(FMA_ROUNDS, &work->thread[number].sink);
}

static int measure_peaks(struct ft_bench_crew *crew, const struct ft_bench_kernels_options *options,
                         struct ft_bench_roof *roof, struct ft_error *err)
{
    uint32_t threads = FT_MIN(options->threads, FT_WORKERS_MAX),
             rounds = options->rounds ? options->rounds : 5;
    struct fma_work *work = calloc(1, sizeof *work);
    int status = work ? FT_OK : ft_error_set(err, FT_MEMORY, "no memory to measure the arithmetic peak");
    for (enum ft_isa isa = 0; isa < FT_ISA_COUNT && status == FT_OK; isa++) {
        double seconds;
        work->roof = roof_of(isa);
        if (!ft_isa_is_available(isa) || !work->roof->fma)
            continue;
        status = ft_bench_crew_run(crew, threads, rounds, fma_part, work, &seconds, err);
        if (status == FT_OK)
            roof->peak_gflops[isa] = work->thread[0].flops * threads / seconds / 1e9;
    }
    free(work);
    return status;
}

/* The widest loops read at least as fast as any other; memory is the limit, not the instruction. */
static const struct ft_roof *widest(void)
{
    return ft_isa_is_available(FT_ISA_AVX512) ? roof_of(FT_ISA_AVX512) : roof_of(FT_ISA_AVX2);
}

static int read_work_create(struct read_work **out, const struct ft_bench_region *regions,
                            uint32_t region_count, struct ft_error *err)
{
    struct read_work *work = *out = calloc(1, sizeof *work);
    if (!work)
        return ft_error_set(err, FT_MEMORY, "no memory to measure the read ceiling");
    work->regions = regions;
    work->region_count = region_count;
    for (uint32_t i = 0; i < region_count; i++)
        work->bytes += regions[i].bytes;
    work->roof = widest();
    return FT_OK;
}

/* The sweep alone, over all regions; peaks stay 0. */
static int read_sweep(struct ft_bench_crew *crew, const struct ft_bench_kernels_options *options,
                      const struct ft_bench_region *regions, uint32_t region_count,
                      struct ft_bench_roof *roof, struct ft_error *err)
{
    struct read_work *work;
    *roof = (struct ft_bench_roof){0};
    int status = read_work_create(&work, regions, region_count, err);
    if (status == FT_OK)
        status = sweep_reads(crew, options, work, roof, err);
    free(work);
    return status;
}

int ft_bench_read(struct ft_bench_crew *crew, const struct ft_bench_roof *roof,
                  const struct ft_bench_region *regions, uint32_t region_count, double *gbs,
                  struct ft_error *err)
{
    struct read_work *work;
    int status = read_work_create(&work, regions, region_count, err);
    if (status == FT_OK) {
        work->pattern = (enum ft_roof_pattern)roof->ceiling_pattern;
        status = run_read(crew, work, roof->ceiling_threads, 1, gbs, err);
    }
    free(work);
    return status;
}

int ft_bench_roof(struct ft_bench_crew *crew, const struct ft_bench_kernels_options *options,
                  const struct ft_bench_bank *bank, struct ft_bench_roof *roof, struct ft_error *err)
{
    struct ft_bench_region region = {bank->data, bank->bytes};
    ft_bench_fill(bank->data, bank->bytes, UINT64_MAX, 1, 0);
    int status = read_sweep(crew, options, &region, 1, roof, err);
    return status == FT_OK ? measure_peaks(crew, options, roof, err) : status;
}

int ft_bench_read_ceiling(const struct ft_bench_kernels_options *options,
                          const struct ft_bench_region *regions, uint32_t region_count, double *gbs,
                          struct ft_error *err)
{
    struct ft_bench_crew *crew;
    struct ft_bench_roof roof = {0};
    struct ft_bench_bank bank = {0};
    int status = ft_bench_crew_open(&crew, options, err);
    if (status != FT_OK)
        return status;
    struct ft_bench_region own = {0};
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < region_count; i++)
        bytes += regions[i].bytes;
    if (bytes < options->bank_bytes) {
        status = ft_bench_bank_open(&bank, options->bank_bytes, FT_BENCH_PAGES_HUGE, err);
        if (status != FT_OK) {
            ft_bench_crew_close(crew);
            return status;
        }
        ft_bench_fill(bank.data, bank.bytes, UINT64_MAX, 1, 0);
        own = (struct ft_bench_region){bank.data, bank.bytes};
    }
    status = read_sweep(crew, options, own.data ? &own : regions, own.data ? 1 : region_count, &roof, err);
    if (own.data)
        ft_bench_bank_close(&bank);
    ft_bench_crew_close(crew);
    *gbs = roof.ceiling_gbs;
    return status;
}
