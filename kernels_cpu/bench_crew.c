/* SPDX-License-Identifier: Apache-2.0 */
/* Banks of random data, and threads that are timed together. */
#include "kernels_cpu/bench_internal.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define HUGE_PAGE_BYTES (2ull << 20)
#define FLUSH_BYTES_DEFAULT (4ull << 20) /* when the size of the second-level cache is not known */

int ft_bench_bank_open(struct ft_bench_bank *bank, uint64_t bytes, enum ft_bench_pages pages,
                       struct ft_error *err)
{
    bank->bytes = ft_round_up(FT_MAX(bytes, 4096u), HUGE_PAGE_BYTES);
    bank->mapped =
        mmap(NULL, bank->bytes + HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bank->mapped == MAP_FAILED)
        return ft_error_set(err, FT_MEMORY,
                            "a bank of %llu bytes for measuring cannot be mapped: %s; ask for a smaller one",
                            (unsigned long long)bank->bytes, strerror(errno));
    uintptr_t skip = (HUGE_PAGE_BYTES - (uintptr_t)bank->mapped % HUGE_PAGE_BYTES) % HUGE_PAGE_BYTES;
    bank->data = bank->mapped + skip;
    /* A hint: refused where the kernel has no huge pages; ft_bench_bank_huge_share tells what came of it. */
    (void)madvise(bank->mapped, bank->bytes + HUGE_PAGE_BYTES,
                  pages == FT_BENCH_PAGES_HUGE ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return FT_OK;
}

void ft_bench_bank_close(struct ft_bench_bank *bank)
{
    munmap(bank->mapped, bank->bytes + HUGE_PAGE_BYTES);
}

double ft_bench_bank_huge_share(const struct ft_bench_bank *bank)
{
    FILE *file = fopen("/proc/self/smaps", "r");
    char line[512];
    uint64_t begin = (uintptr_t)bank->data, end = begin + bank->bytes, huge = 0;
    bool inside = false, found = false;
    while (file && fgets(line, sizeof line, file)) {
        unsigned long long from, to, kib;
        if (sscanf(line, "%llx-%llx ", &from, &to) == 2)
            inside = from < end && to > begin;
        else if (inside && sscanf(line, "AnonHugePages: %llu kB", &kib) == 1) {
            huge += kib << 10;
            found = true;
        }
    }
    if (file)
        fclose(file);
    return found ? FT_MIN((double)huge / (double)bank->bytes, 1.0) : -1;
}

void ft_bench_fill(void *to, uint64_t bytes, uint64_t keep, uint64_t set, uint64_t seed)
{
    uint64_t state = 0x9e3779b97f4a7c15u ^ (seed * 0xbf58476d1ce4e5b9u + 1), word;
    for (uint64_t i = 0; i < bytes; i += 8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word = (state & keep) | set;
        memcpy((uint8_t *)to + i, &word, FT_MIN(bytes - i, 8));
    }
}

/* ---- threads ---- */

enum { GATE_CLOSED, GATE_OPEN, GATE_CANCELLED };

struct worker {
    struct ft_bench_crew *crew;
    uint32_t number;
    double begin_s, end_s, cpu_s;
    pthread_t thread;
};

/* What all threads of one measurement share. */
struct ft_bench_crew {
    const struct ft_bench_kernels_options *options;
    void (*work)(void *context, uint32_t number, uint32_t count);
    void *context;
    uint32_t count;
    uint64_t *flush; /* [flush_words] read by every thread */
    uint64_t flush_words;
    _Atomic uint64_t flush_sum; /* keeps the reads alive */
    atomic_int
        gate; /* GATE_*: released by the starter once all threads exist; pairs with the workers' acquire */
    atomic_uint ready; /* threads that have flushed: release; pairs with the starter's acquire */
    struct worker workers[FT_WORKERS_MAX];
};

static double now_s(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void flush_cache(struct ft_bench_crew *crew)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < crew->flush_words; i += 8) /* one word a line */
        sum += crew->flush[i];
    atomic_fetch_add_explicit(&crew->flush_sum, sum, memory_order_relaxed);
}

static void *worker_main(void *argument)
{
    struct worker *worker = argument;
    struct ft_bench_crew *crew = worker->crew;
    if (crew->options->pin)
        crew->options->pin(crew->options->pin_context, worker->number);
    flush_cache(crew);
    atomic_fetch_add_explicit(&crew->ready, 1, memory_order_release);
    int gate;
    while ((gate = atomic_load_explicit(&crew->gate, memory_order_acquire)) == GATE_CLOSED)
        sched_yield();
    if (gate == GATE_CANCELLED)
        return NULL;
    worker->begin_s = now_s(CLOCK_MONOTONIC);
    worker->cpu_s = now_s(CLOCK_THREAD_CPUTIME_ID);
    crew->work(crew->context, worker->number, crew->count);
    worker->cpu_s = now_s(CLOCK_THREAD_CPUTIME_ID) - worker->cpu_s;
    worker->end_s = now_s(CLOCK_MONOTONIC);
    return NULL;
}

static int run_round(struct ft_bench_crew *crew, double *seconds, struct ft_error *err)
{
    double begin = INFINITY, end = 0;
    uint32_t started = 0;
    atomic_store_explicit(&crew->gate, GATE_CLOSED, memory_order_relaxed);
    atomic_store_explicit(&crew->ready, 0, memory_order_relaxed);
    for (; started < crew->count; started++) {
        crew->workers[started] = (struct worker){.crew = crew, .number = started};
        if (pthread_create(&crew->workers[started].thread, NULL, worker_main, &crew->workers[started]))
            break;
    }
    while (started == crew->count && atomic_load_explicit(&crew->ready, memory_order_acquire) < crew->count)
        sched_yield();
    atomic_store_explicit(&crew->gate, started == crew->count ? GATE_OPEN : GATE_CANCELLED,
                          memory_order_release);
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(crew->workers[i].thread, NULL);
        begin = fmin(begin, crew->workers[i].begin_s);
        end = fmax(end, crew->workers[i].end_s);
    }
    *seconds = end - begin;
    return started == crew->count
               ? FT_OK
               : ft_error_set(err, FT_SYSTEM,
                              "thread %u of %u for measuring cannot be started; ask for fewer threads",
                              started + 1, crew->count);
}

int ft_bench_crew_open(struct ft_bench_crew **out, const struct ft_bench_kernels_options *options,
                       struct ft_error *err)
{
    struct ft_bench_crew *crew = calloc(1, sizeof *crew);
    long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    uint64_t bytes = cache > 0 ? 2 * (uint64_t)cache : FLUSH_BYTES_DEFAULT;
    *out = NULL;
    if (crew)
        crew->flush = malloc(bytes);
    if (!crew || !crew->flush || !options->threads) {
        ft_bench_crew_close(crew);
        return ft_error_set(err, FT_MEMORY, "no memory (or no thread) to measure kernels with");
    }
    crew->options = options;
    crew->flush_words = bytes / 8;
    ft_bench_fill(crew->flush, bytes, UINT64_MAX, 1, 0);
    *out = crew;
    return FT_OK;
}

void ft_bench_crew_close(struct ft_bench_crew *crew)
{
    if (crew)
        free(crew->flush);
    free(crew);
}

int ft_bench_crew_run(struct ft_bench_crew *crew, uint32_t threads, uint32_t rounds,
                      void (*work)(void *context, uint32_t number, uint32_t count), void *context,
                      double *best_s, struct ft_error *err)
{
    crew->count = FT_MIN(threads, FT_WORKERS_MAX);
    crew->work = work;
    crew->context = context;
    *best_s = INFINITY;
    for (uint32_t round = 0; round < rounds; round++) {
        double seconds;
        int status = run_round(crew, &seconds, err);
        if (status != FT_OK)
            return status;
        *best_s = fmin(*best_s, seconds);
    }
    return FT_OK;
}

double ft_bench_crew_cpu_s(const struct ft_bench_crew *crew)
{
    return crew->workers[0].cpu_s;
}
