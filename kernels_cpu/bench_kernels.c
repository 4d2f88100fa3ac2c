/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels_cpu/bench_kernels.h"

#include "kernels_cpu/kernels_internal.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define ROWS_MAX 16
#define TILE_ROWS 128 /* output rows per call, as the engine cuts experts */
#define BLOCK 128     /* fp8_block */

static const uint32_t row_counts[] = {1, 2, 4, 8, 16};
static const enum ft_format expert_formats[] = {FT_FORMAT_NVFP4, FT_FORMAT_BF16, FT_FORMAT_FP8_BLOCK,
                                                FT_FORMAT_MXFP4, FT_FORMAT_DS_FP4};
static const enum ft_format dense_formats[] = {FT_FORMAT_BF16, FT_FORMAT_F32};
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

const char *ft_bench_op_name(enum ft_bench_op op)
{
    return op == FT_BENCH_EXPERT ? "expert" : "matmul";
}

struct bank {
    uint8_t *data;
    uint64_t bytes;
};

static int bank_open(struct bank *bank, uint64_t bytes, struct ft_error *err)
{
    bank->bytes = ft_round_up(FT_MAX(bytes, 4096), 1 << 21);
    bank->data = mmap(NULL, bank->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bank->data == MAP_FAILED)
        return ft_error_set(err, FT_MEMORY,
                            "a bank of %llu bytes for measuring cannot be mapped: %s; ask for a smaller one",
                            (unsigned long long)bank->bytes, strerror(errno));
    madvise(bank->data, bank->bytes, MADV_HUGEPAGE); /* a hint; refused is as good */
    return FT_OK;
}

static void bank_close(struct bank *bank)
{
    munmap(bank->data, bank->bytes);
}

/* Random bytes, of which `keep` chooses the random bits and `set` the constant ones, 8 bytes at a time. */
static void fill(void *to, uint64_t bytes, uint64_t keep, uint64_t set)
{
    uint64_t state = 0x9e3779b97f4a7c15u ^ bytes, word;
    for (uint64_t i = 0; i < bytes; i += 8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word = (state & keep) | set;
        memcpy((uint8_t *)to + i, &word, FT_MIN(bytes - i, 8));
    }
}

/* Weights of magnitude 2^-7 .. 2, never zero or NaN where the format can say so. */
static void fill_weights(enum ft_format format, void *data, uint64_t bytes)
{
    switch (format) {
    case FT_FORMAT_F32:
        fill(data, bytes, 0x83ffffff83ffffffu, 0x3c0000003c000000u);
        break;
    case FT_FORMAT_BF16:
        fill(data, bytes, 0x83ff83ff83ff83ffu, 0x3c003c003c003c00u);
        break;
    case FT_FORMAT_FP8_BLOCK:
        fill(data, bytes, 0xb7b7b7b7b7b7b7b7u, 0x0808080808080808u);
        break;
    default:
        fill(data, bytes, UINT64_MAX, 0);
    }
}

static void fill_scales(enum ft_format format, void *scale, uint64_t bytes)
{
    if (format == FT_FORMAT_NVFP4)
        fill(scale, bytes, 0x0f0f0f0f0f0f0f0fu, 0x3030303030303030u);
    else if (format == FT_FORMAT_FP8_BLOCK)
        fill(scale, bytes, 0x007fffff007fffffu, 0x3c0000003c000000u);
    else
        fill(scale, bytes, 0x0707070707070707u, 0x7878787878787878u);
}

static void fill_expert(const struct ft_expert_layout *layout, uint8_t *blob)
{
    const float globals[3] = {0.02f, 0.02f, 0.02f};
    uint32_t scale_end = layout->global_offset == FT_NONE ? layout->bytes : layout->global_offset;
    bool scaled = layout->gate_scale_offset != FT_NONE;
    fill_weights(layout->format, blob, scaled ? layout->gate_scale_offset : layout->bytes);
    if (scaled)
        fill_scales(layout->format, blob + layout->gate_scale_offset, scale_end - layout->gate_scale_offset);
    if (layout->global_offset != FT_NONE)
        memcpy(blob + layout->global_offset, globals, sizeof globals);
}

/* ---- running threads ---- */

enum { GATE_CLOSED, GATE_OPEN, GATE_CANCELLED };

struct crew;
struct worker {
    struct crew *crew;
    uint32_t number;
    double begin_s, end_s;
    pthread_t thread;
};

/* What all threads of one measurement share. `work` does worker number of count; read only while running. */
struct crew {
    const struct ft_bench_kernels_options *options;
    void (*work)(void *context, uint32_t number, uint32_t count);
    void *context;
    uint32_t count;
    atomic_int
        gate; /* GATE_*: released by the starter once all threads exist; pairs with the workers' acquire */
    struct worker workers[FT_WORKERS_MAX];
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *worker_main(void *argument)
{
    struct worker *worker = argument;
    struct crew *crew = worker->crew;
    if (crew->options->pin)
        crew->options->pin(crew->options->pin_context, worker->number);
    int gate;
    while ((gate = atomic_load_explicit(&crew->gate, memory_order_acquire)) == GATE_CLOSED)
        sched_yield();
    if (gate == GATE_CANCELLED)
        return NULL;
    worker->begin_s = now_s();
    crew->work(crew->context, worker->number, crew->count);
    worker->end_s = now_s();
    return NULL;
}

/* Best wall time of the rounds, from the first thread's begin to the last one's end. */
static int crew_run(struct crew *crew, uint32_t count, double *best_s, struct ft_error *err)
{
    uint32_t rounds = crew->options->rounds ? crew->options->rounds : 5;
    crew->count = count;
    *best_s = INFINITY;
    for (uint32_t round = 0; round < rounds; round++) {
        double begin = INFINITY, end = 0;
        uint32_t started = 0;
        atomic_store_explicit(&crew->gate, GATE_CLOSED, memory_order_relaxed);
        for (; started < count; started++) {
            crew->workers[started] = (struct worker){.crew = crew, .number = started};
            if (pthread_create(&crew->workers[started].thread, NULL, worker_main, &crew->workers[started]))
                break;
        }
        atomic_store_explicit(&crew->gate, started == count ? GATE_OPEN : GATE_CANCELLED,
                              memory_order_release);
        for (uint32_t i = 0; i < started; i++) {
            pthread_join(crew->workers[i].thread, NULL);
            begin = fmin(begin, crew->workers[i].begin_s);
            end = fmax(end, crew->workers[i].end_s);
        }
        if (started < count)
            return ft_error_set(err, FT_SYSTEM,
                                "thread %u of %u for measuring cannot be started; ask for fewer threads",
                                started + 1, count);
        *best_s = fmin(*best_s, end - begin);
    }
    return FT_OK;
}

/* ---- the read ceiling ---- */

typedef uint64_t lanes __attribute__((vector_size(32), aligned(32)));
#define STREAMS_MAX 4

struct read_work {
    const struct bank *bank;
    uint32_t streams;
    bool prefetch;
    uint64_t sink[FT_WORKERS_MAX][8]; /* a line per thread; keeps the sums alive */
};

/* One thread sums its part of the bank as `streams` sequential streams, four accumulators each step. */
static inline __attribute__((always_inline)) uint64_t read_streams(const uint8_t *part, uint64_t stream_bytes,
                                                                   uint32_t streams, bool prefetch)
{
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    for (uint64_t i = 0; i + 256 <= stream_bytes; i += 256)
        for (uint32_t s = 0; s < streams; s++) {
            const uint8_t *at = part + s * stream_bytes + i;
            for (uint32_t line = 0; line < 256; line += 128) {
                const lanes *p = (const lanes *)(const void *)(at + line);
                if (prefetch) {
                    __builtin_prefetch(at + line + 2048, 0, 0);
                    __builtin_prefetch(at + line + 2112, 0, 0);
                }
                a += p[0];
                b += p[1];
                c += p[2];
                d += p[3];
            }
        }
    a = a + b + c + d;
    return a[0] + a[1] + a[2] + a[3];
}

static void read_part(void *context, uint32_t number, uint32_t count)
{
    struct read_work *work = context;
    uint64_t part = work->bank->bytes / count / 1024 * 1024, stream = part / work->streams;
    const uint8_t *data = work->bank->data + number * part;
    uint64_t sum;
    if (work->streams == 1)
        sum = work->prefetch ? read_streams(data, stream, 1, true) : read_streams(data, stream, 1, false);
    else
        sum = work->prefetch ? read_streams(data, stream, STREAMS_MAX, true)
                             : read_streams(data, stream, STREAMS_MAX, false);
    work->sink[number][0] += sum;
}

int ft_bench_kernels_ceiling(const struct ft_bench_kernels_options *options, double *gbs, uint32_t *threads,
                             struct ft_error *err)
{
    struct bank bank;
    struct crew *crew = calloc(1, sizeof *crew);
    struct read_work *work = calloc(1, sizeof *work);
    int status = crew && work ? bank_open(&bank, options->bank_bytes, err)
                              : ft_error_set(err, FT_MEMORY, "no memory to measure the read ceiling");
    *gbs = 0;
    *threads = 0;
    if (status == FT_OK) {
        fill(bank.data, bank.bytes, UINT64_MAX, 1);
        crew->options = options;
        crew->work = read_part;
        crew->context = work;
        work->bank = &bank;
        for (uint32_t n = 1; n <= FT_MIN(options->threads, FT_WORKERS_MAX) && status == FT_OK; n++)
            for (uint32_t pattern = 0; pattern < 4 && status == FT_OK; pattern++) {
                double seconds;
                work->streams = pattern & 1 ? STREAMS_MAX : 1;
                work->prefetch = pattern & 2;
                status = crew_run(crew, n, &seconds, err);
                double speed = (double)(bank.bytes / n / 1024 * 1024 * n) / seconds / 1e9;
                if (status == FT_OK && speed > *gbs) {
                    *gbs = speed;
                    *threads = n;
                }
            }
        bank_close(&bank);
    }
    free(crew);
    free(work);
    return status;
}

/* ---- kernels ---- */

struct kernel_work {
    struct ft_kernels kernels;
    const struct bank *bank;
    struct ft_expert_layout layout; /* EXPERT */
    uint32_t expert_count;
    struct ft_matrix dense; /* MATMUL: the whole bank */
    enum ft_bench_op op;
    uint32_t rows;
    const float *x; /* [ROWS_MAX, hidden] */
    float *scratch; /* per thread: h [ROWS_MAX, width], y [ROWS_MAX, TILE_ROWS or hidden] */
    size_t scratch_per_thread;
};

static void run_expert(const struct kernel_work *work, uint32_t e, float *h, float *y)
{
    struct ft_expert expert;
    uint32_t hidden = work->layout.hidden, width = work->layout.width;
    struct ft_rows x = {.x = work->x, .stride = hidden, .count = work->rows};
    struct ft_rows rows = {.x = h, .stride = width, .count = work->rows};
    ft_expert_view(&work->layout, work->bank->data + (size_t)e * work->layout.stride, &expert);
    for (uint32_t i = 0; i < width; i += TILE_ROWS)
        work->kernels.expert_up(&expert, i, FT_MIN(i + TILE_ROWS, width), x, h, width);
    for (uint32_t o = 0; o < hidden; o += TILE_ROWS)
        work->kernels.expert_down(&expert, o, FT_MIN(o + TILE_ROWS, hidden), rows, NULL, y, hidden);
}

/* Whole experts per thread; or tiles of the dense matrix, whose output lands in a small window of the
 * scratch. */
static void kernel_part(void *context, uint32_t number, uint32_t count)
{
    const struct kernel_work *work = context;
    float *scratch = work->scratch + number * work->scratch_per_thread;
    uint32_t total = work->op == FT_BENCH_EXPERT ? work->expert_count : work->dense.out / TILE_ROWS;
    uint32_t begin = (uint32_t)((uint64_t)total * number / count),
             end = (uint32_t)((uint64_t)total * (number + 1) / count);
    struct ft_rows x = {.x = work->x, .stride = work->dense.in, .count = work->rows};
    for (uint32_t i = begin; i < end; i++) {
        if (work->op == FT_BENCH_EXPERT) {
            run_expert(work, i, scratch, scratch + (size_t)ROWS_MAX * work->layout.width);
            continue;
        }
        struct ft_matrix tile = work->dense;
        tile.data = (const uint8_t *)work->dense.data +
                    (size_t)i * TILE_ROWS * work->dense.in * (work->dense.format == FT_FORMAT_F32 ? 4 : 2);
        tile.out = TILE_ROWS;
        work->kernels.matmul(&tile, 0, TILE_ROWS, x, NULL, scratch, TILE_ROWS);
    }
}

static double error_of(const float *got, const float *want, uint32_t n)
{
    double largest = 0, error = 0;
    for (uint32_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)want[i]));
        error = fmax(error, fabs((double)got[i] - (double)want[i]));
    }
    return largest > 0 ? error / largest : error;
}

#define SAMPLE 16 /* outputs compared with the reference */

/* Error of up and of down on the same input, the first outputs of the first row. */
static double sample_error(const struct kernel_work *work, float *scratch)
{
    struct ft_kernels ref;
    float got[SAMPLE], want[SAMPLE];
    struct ft_rows x = {.x = work->x, .stride = work->dense.in, .count = 1};
    ft_kernels_fill_ref(&ref);
    if (work->op == FT_BENCH_MATMUL) {
        work->kernels.matmul(&work->dense, 0, SAMPLE, x, NULL, got, SAMPLE);
        ref.matmul(&work->dense, 0, SAMPLE, x, NULL, want, SAMPLE);
        return error_of(got, want, SAMPLE);
    }
    struct ft_expert expert;
    uint32_t n = FT_MIN(SAMPLE, FT_MIN(work->layout.width, work->layout.hidden));
    struct ft_rows h = {.x = scratch, .count = 1};
    ft_expert_view(&work->layout, work->bank->data, &expert);
    work->kernels.expert_up(&expert, 0, work->layout.width, x, scratch, 0);
    ref.expert_up(&expert, 0, n, x, want, 0);
    double error = error_of(scratch, want, n);
    work->kernels.expert_down(&expert, 0, n, h, NULL, got, 0);
    ref.expert_down(&expert, 0, n, h, NULL, want, 0);
    return fmax(error, error_of(got, want, n));
}

/* Puts weights of the format into the bank. */
static int prepare(struct kernel_work *work, const struct ft_bench_kernels_options *options,
                   enum ft_bench_op op, enum ft_format format, struct ft_error *err)
{
    uint32_t element = format == FT_FORMAT_F32 ? 4 : 2;
    uint16_t block = format == FT_FORMAT_FP8_BLOCK ? BLOCK : 0;
    uint64_t rows = work->bank->bytes / ((uint64_t)options->hidden * element);
    work->op = op;
    work->dense = (struct ft_matrix){.data = work->bank->data,
                                     .out = (uint32_t)FT_MIN(rows, UINT32_MAX),
                                     .in = options->hidden,
                                     .format = format,
                                     .global = 1.0f};
    if (op == FT_BENCH_MATMUL) {
        fill_weights(format, work->bank->data, work->bank->bytes);
        return rows >= TILE_ROWS
                   ? FT_OK
                   : ft_error_set(err, FT_LIMIT, "a bank of %llu bytes is too small to measure rows of %u",
                                  (unsigned long long)work->bank->bytes, options->hidden);
    }
    int status = ft_expert_layout_init(&work->layout, format, options->hidden, options->width, block, block,
                                       false, FT_ACTIVATION_SILU, 0, err);
    if (status != FT_OK)
        return status;
    work->expert_count = (uint32_t)FT_MIN(work->bank->bytes / work->layout.stride, 1u << 24);
    if (work->expert_count < options->threads)
        return ft_error_set(
            err, FT_LIMIT, "a bank of %llu bytes holds %u experts of %u bytes, fewer than %u threads",
            (unsigned long long)work->bank->bytes, work->expert_count, work->layout.stride, options->threads);
    for (uint32_t e = 0; e < work->expert_count; e++)
        fill_expert(&work->layout, work->bank->data + (size_t)e * work->layout.stride);
    return FT_OK;
}

/* One (op, format, ISA, rows). */
static int measure(struct kernel_work *work, struct crew *crew, double ceiling_gbs,
                   struct ft_bench_kernels_result *result, struct ft_error *err)
{
    bool expert = work->op == FT_BENCH_EXPERT;
    uint32_t threads = FT_MIN(crew->options->threads, FT_WORKERS_MAX), tiles = work->dense.out / TILE_ROWS;
    double seconds, elements = (double)tiles * TILE_ROWS * work->dense.in;
    double bytes = elements * (work->dense.format == FT_FORMAT_F32 ? 4 : 2);
    if (expert) {
        elements = 3.0 * work->layout.hidden * work->layout.width * work->expert_count;
        bytes = (double)work->layout.bytes * work->expert_count;
    }
    int status = crew_run(crew, threads, &seconds, err);
    if (status != FT_OK)
        return status;
    *result = (struct ft_bench_kernels_result){.op = work->op,
                                               .format = work->dense.format,
                                               .isa = work->kernels.isa,
                                               .rows = work->rows,
                                               .threads = threads,
                                               .gbs = bytes / seconds / 1e9,
                                               .gflops = 2 * elements * work->rows / seconds / 1e9,
                                               .ceiling_fraction = bytes / seconds / 1e9 / ceiling_gbs,
                                               .max_error = sample_error(work, work->scratch)};
    return FT_OK;
}

/* All ISAs and row counts of one op and format. */
static int measure_format(struct kernel_work *work, struct crew *crew, double ceiling_gbs,
                          struct ft_bench_kernels_result *results, uint32_t capacity, uint32_t *count,
                          struct ft_error *err)
{
    for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++) {
        if (!ft_isa_is_available(isa) || (isa == FT_ISA_REF && !crew->options->reference))
            continue;
        int status = ft_kernels_init(&work->kernels, ft_isa_name(isa), err);
        for (size_t i = 0; status == FT_OK && i < COUNT(row_counts); i++) {
            if (*count == capacity)
                return ft_error_set(err, FT_LIMIT, "%u results are all that fit; there are more", capacity);
            work->rows = row_counts[i];
            status = measure(work, crew, ceiling_gbs, &results[*count], err);
            *count += status == FT_OK;
        }
        if (status != FT_OK)
            return status;
    }
    return FT_OK;
}

static int run_all(struct kernel_work *work, struct crew *crew, double ceiling_gbs,
                   struct ft_bench_kernels_result *results, uint32_t capacity, uint32_t *count,
                   struct ft_error *err)
{
    int status = FT_OK;
    for (size_t i = 0; status == FT_OK && i < COUNT(expert_formats) + COUNT(dense_formats); i++) {
        bool expert = i < COUNT(expert_formats);
        enum ft_format format = expert ? expert_formats[i] : dense_formats[i - COUNT(expert_formats)];
        status = prepare(work, crew->options, expert ? FT_BENCH_EXPERT : FT_BENCH_MATMUL, format, err);
        if (status == FT_OK)
            status = measure_format(work, crew, ceiling_gbs, results, capacity, count, err);
    }
    return status;
}

int ft_bench_kernels_run(const struct ft_bench_kernels_options *options, double ceiling_gbs,
                         struct ft_bench_kernels_result *results, uint32_t capacity, uint32_t *count,
                         struct ft_error *err)
{
    struct bank bank;
    struct crew *crew = calloc(1, sizeof *crew);
    size_t x_count = (size_t)ROWS_MAX * options->hidden;
    size_t scratch = (size_t)ROWS_MAX * ((size_t)options->hidden + options->width + TILE_ROWS) + 32;
    float *x = calloc(x_count, sizeof *x), *h = calloc(FT_MAX(options->threads, 1) * scratch, sizeof *h);
    int status = crew && x && h && options->threads
                     ? bank_open(&bank, options->bank_bytes, err)
                     : ft_error_set(err, FT_MEMORY, "no memory (or no thread) to measure kernels with");
    *count = 0;
    if (status == FT_OK) {
        struct kernel_work work = {.bank = &bank, .x = x, .scratch = h, .scratch_per_thread = scratch};
        crew->options = options;
        crew->work = kernel_part;
        crew->context = &work;
        fill(x, x_count * sizeof *x, 0x83ffffff83ffffffu, 0x3c0000003c000000u);
        status = run_all(&work, crew, ceiling_gbs, results, capacity, count, err);
        bank_close(&bank);
    }
    free(crew);
    free(x);
    free(h);
    return status;
}
