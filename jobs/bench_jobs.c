/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/bench_jobs.h"

#include "graph/trace.h"

#include "graph/arena.h"
#include "jobs/frontier.h"
#include "jobs/lane_cpu.h"
#include "jobs/park.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUND_TIMEOUT_NS 60000000000ull
#define SPIN_NS 20000u
#define STEAL_JOBS 200000u
#define WAKES 31u

/* ---- a whole step ---------------------------------------------------------------------------------------------- */

struct worker_state {
    _Alignas(64) uint32_t *todo; /* [job_count] */
    uint64_t jobs;               /* run in this round */
};

struct dag {
    struct ft_frontier frontier;
    uint32_t *in_degree; /* [job_count] */
    uint32_t job_count;
    struct worker_state *workers; /* [workers] */
    struct ft_lane_cpu *lane;
    uint32_t steps_left; /* owned by whoever runs the last job of a step */
    struct ft_park done_park;
    _Atomic bool done;
};

static uint32_t jobs_per_layer(const struct ft_bench_jobs_options *options)
{
    return options->serials + options->tiles + 1;
}

/* Successors of job `at` of a layer: [*first, *first + count). */
static uint32_t successors(const struct ft_bench_jobs_options *options, uint32_t layer, uint32_t at,
                           uint32_t *first)
{
    uint32_t base = layer * jobs_per_layer(options);
    *first = base + at + 1;
    if (at + 1 < options->serials)
        return 1;
    if (at < options->serials)
        return options->tiles;
    if (at < options->serials + options->tiles) {
        *first = base + options->serials + options->tiles;
        return 1;
    }
    return layer + 1 < options->layers ? 1 : 0;
}

static void fill_edges(const struct ft_bench_jobs_options *options, struct dag *dag, uint32_t *succ_begin,
                       uint32_t *succ)
{
    uint32_t job = 0, edge = 0;
    for (uint32_t layer = 0; layer < options->layers; layer++)
        for (uint32_t at = 0; at < jobs_per_layer(options); at++, job++) {
            uint32_t first, count = successors(options, layer, at, &first);
            succ_begin[job] = edge;
            for (uint32_t i = 0; i < count; i++) {
                succ[edge++] = first + i;
                dag->in_degree[first + i]++;
            }
        }
    succ_begin[job] = edge;
}

static int build_dag(struct ft_arena *arena, const struct ft_bench_jobs_options *options, struct dag *dag,
                     struct ft_error *err)
{
    uint32_t *succ_begin, *succ;
    uint32_t edges = options->layers * (options->serials + 2 * options->tiles);
    memset(dag, 0, sizeof *dag);
    dag->job_count = options->layers * jobs_per_layer(options);
    int status = FT_ARENA_PUSH(arena, dag->job_count + 1, &succ_begin, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, edges, &succ, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, dag->job_count, &dag->in_degree, err);
    if (status == FT_OK)
        status = ft_arena_push(arena, dag->job_count, sizeof *dag->frontier.counter,
                               (void **)&dag->frontier.counter, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, options->workers, &dag->workers, err);
    for (uint32_t w = 0; w < options->workers && status == FT_OK; w++) {
        uint32_t *todo;
        status = FT_ARENA_PUSH(arena, dag->job_count, &todo, err);
        if (status == FT_OK && !ft_arena_is_counting(arena))
            dag->workers[w].todo = todo;
    }
    if (status != FT_OK || ft_arena_is_counting(arena))
        return status;
    dag->frontier.succ_begin = succ_begin;
    dag->frontier.succ = succ;
    ft_park_init(&dag->done_park);
    fill_edges(options, dag, succ_begin, succ);
    return FT_OK;
}

/* The last job of a step starts the next one, so that no step waits for the thread that measures. */
static uint32_t end_step(struct dag *dag, uint32_t *todo)
{
    if (--dag->steps_left == 0) {
        atomic_store_explicit(&dag->done, true, memory_order_release);
        ft_park_wake(&dag->done_park);
        return 0;
    }
    ft_frontier_reset(&dag->frontier, dag->in_degree, 0, dag->job_count);
    todo[0] = 0;
    return 1;
}

static void run_dag(void *ctx, uint32_t thread, struct ft_job_ref ref)
{
    struct dag *dag = ctx;
    struct worker_state *state = &dag->workers[thread];
    uint32_t *todo = state->todo;
    uint32_t count = 1, last = dag->job_count - 1;
    uint64_t jobs = 0;
    todo[0] = ref.job;
    while (count) {
        uint32_t job = todo[--count];
        jobs++;
        if (job == last) {
            state->jobs += jobs; /* before the round may end */
            jobs = 0;
            count += end_step(dag, todo + count);
            continue;
        }
        count += ft_frontier_complete(&dag->frontier, job, todo + count);
        if (count > 1)
            count = ft_lane_cpu_offer(dag->lane, thread, todo, count, ref.epoch);
    }
    state->jobs += jobs;
}

static bool wait_done(struct dag *dag, const struct ft_clock *clock)
{
    uint64_t end_ns = ft_clock_ns(clock) + ROUND_TIMEOUT_NS;
    while (!atomic_load_explicit(&dag->done, memory_order_acquire)) {
        uint32_t ticket = ft_park_prepare(&dag->done_park);
        if (atomic_load_explicit(&dag->done, memory_order_acquire)) {
            ft_park_cancel(&dag->done_park);
            return true;
        }
        ft_park_wait(&dag->done_park, ticket, 1000000000ull);
        if (ft_clock_ns(clock) > end_ns)
            return false;
    }
    return true;
}

static uint64_t sum_stolen(const struct ft_lane_cpu *lane)
{
    uint64_t sum = 0;
    struct ft_lane_cpu_counters counters;
    for (uint32_t w = 0; w < ft_lane_cpu_workers(lane); w++) {
        ft_lane_cpu_read_counters(lane, w, &counters);
        sum += counters.stolen;
    }
    return sum;
}

static int run_round(const struct ft_bench_jobs_options *options, struct dag *dag, double *ns_per_job,
                     double *steal_fraction, struct ft_error *err)
{
    const uint32_t first = 0;
    struct ft_lane_cpu_options lane_options = {.topology = options->topology,
                                               .clock = options->clock,
                                               .workers = options->workers,
                                               .producers = 1,
                                               .ring_entries = options->tiles * 2,
                                               .backlog_entries = 4,
                                               .spin_ns = SPIN_NS,
                                               .run = run_dag,
                                               .ctx = dag};
    int status = ft_lane_cpu_open(&dag->lane, &lane_options, err);
    if (status != FT_OK)
        return status;
    ft_frontier_reset(&dag->frontier, dag->in_degree, 0, dag->job_count);
    for (uint32_t w = 0; w < options->workers; w++)
        dag->workers[w].jobs = 0;
    dag->steps_left = options->steps;
    atomic_store(&dag->done, false);
    ft_lane_cpu_set_active(dag->lane, true);
    uint64_t start_ns = ft_clock_ns(options->clock);
    ft_lane_cpu_push(dag->lane, options->workers, &first, 1, 1);
    bool done = wait_done(dag, options->clock);
    uint64_t end_ns = ft_clock_ns(options->clock);
    uint64_t jobs = 0, wanted = (uint64_t)dag->job_count * options->steps, stolen = sum_stolen(dag->lane);
    ft_lane_cpu_close(dag->lane);
    for (uint32_t w = 0; w < options->workers; w++)
        jobs += dag->workers[w].jobs;
    if (!done)
        return ft_error_set(err, FT_TIMEOUT, "scheduler bench: %llu of %llu jobs ran in 60 s",
                            (unsigned long long)jobs, (unsigned long long)wanted);
    if (jobs != wanted)
        return ft_error_set(err, FT_INTERNAL, "scheduler bench: %llu jobs ran, wanted %llu",
                            (unsigned long long)jobs, (unsigned long long)wanted);
    *ns_per_job = (double)(end_ns - start_ns) / (double)jobs;
    *steal_fraction = (double)stolen / (double)jobs;
    return FT_OK;
}

static int measure_dag(const struct ft_bench_jobs_options *options, struct dag *dag,
                       struct ft_bench_jobs_result *result, struct ft_error *err)
{
    for (uint32_t round = 0; round < options->rounds; round++) {
        double ns = 0, fraction = 0;
        int status = run_round(options, dag, &ns, &fraction, err);
        if (status != FT_OK)
            return status;
        bool steals = fraction >= 0.1, best_steals = result->steal_fraction >= 0.1;
        if (round == 0 || steals > best_steals || (steals == best_steals && ns < result->ns_per_job)) {
            result->ns_per_job = ns;
            result->steal_fraction = fraction;
        }
    }
    result->job_count = dag->job_count;
    return FT_OK;
}

/* ---- steals and wake-ups: one worker that owns nothing ---------------------------------------------------------- */

struct probe {
    const struct ft_clock *clock;
    _Alignas(64) _Atomic uint64_t jobs; /* written by the worker */
    _Atomic uint64_t started_ns;
};

static void run_probe(void *ctx, uint32_t thread, struct ft_job_ref ref)
{
    struct probe *probe = ctx;
    (void)thread;
    if (ref.epoch)
        atomic_store_explicit(&probe->started_ns, ft_clock_ns(probe->clock), memory_order_relaxed);
    uint64_t jobs = atomic_load_explicit(&probe->jobs, memory_order_relaxed) + 1;
    /* release: pairs with the acquire in wait_jobs; started_ns comes first. */
    atomic_store_explicit(&probe->jobs, jobs, memory_order_release);
}

static bool wait_jobs(struct probe *probe, uint64_t jobs)
{
    uint64_t end_ns = ft_clock_ns(probe->clock) + ROUND_TIMEOUT_NS;
    while (atomic_load_explicit(&probe->jobs, memory_order_acquire) < jobs) {
        struct timespec pause = {0, 20000};
        nanosleep(&pause, NULL); /* the worker may need this very core */
        if (ft_clock_ns(probe->clock) > end_ns)
            return false;
    }
    return true;
}

/* The caller fills its ring while the worker empties it: every job crosses from one core to another. */
static double measure_steals(struct ft_lane_cpu *lane, struct probe *probe)
{
    uint32_t jobs[64] = {0};
    uint64_t before = atomic_load(&probe->jobs);
    uint64_t start_ns = ft_clock_ns(probe->clock);
    for (uint32_t pushed = 0; pushed < STEAL_JOBS;) {
        uint32_t done = ft_lane_cpu_push(lane, 1, jobs, FT_MIN(64u, STEAL_JOBS - pushed), 0);
        pushed += done;
        for (int i = 0; !done && i < 16; i++)
            ft_park_pause();
    }
    while (ft_lane_cpu_flush(lane, 1))
        ft_park_pause();
    bool done = wait_jobs(probe, before + STEAL_JOBS);
    return done ? (double)(ft_clock_ns(probe->clock) - start_ns) / STEAL_JOBS : 0;
}

static int compare_double(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static bool measure_wakes(struct ft_lane_cpu *lane, struct probe *probe, struct ft_bench_jobs_result *result)
{
    double ns[WAKES];
    for (uint32_t i = 0; i < WAKES; i++) {
        const uint32_t job = 0;
        struct timespec pause = {0, 500000}; /* long enough for the worker to park: the lane is not active */
        nanosleep(&pause, NULL);
        uint64_t before = atomic_load(&probe->jobs);
        uint64_t start_ns = ft_clock_ns(probe->clock);
        ft_lane_cpu_push(lane, 1, &job, 1, 1);
        if (!wait_jobs(probe, before + 1))
            return false;
        ns[i] = (double)(int64_t)(atomic_load(&probe->started_ns) - start_ns);
    }
    qsort(ns, WAKES, sizeof ns[0], compare_double);
    result->wake_ns_min = ns[0];
    result->wake_ns_median = ns[WAKES / 2];
    return true;
}

static int measure_probe(const struct ft_bench_jobs_options *options, struct ft_bench_jobs_result *result,
                         struct ft_error *err)
{
    struct probe probe = {.clock = options->clock};
    struct ft_lane_cpu *lane;
    struct ft_lane_cpu_options lane_options = {.clock = options->clock,
                                               .workers = 1,
                                               .producers = 1,
                                               .ring_entries = 1023,
                                               .backlog_entries = 64,
                                               .spin_ns = SPIN_NS,
                                               .run = run_probe,
                                               .ctx = &probe};
    int status = ft_lane_cpu_open(&lane, &lane_options, err);
    if (status != FT_OK)
        return status;
    ft_lane_cpu_set_active(lane, true);
    for (uint32_t round = 0; round < options->rounds; round++) {
        double ns = measure_steals(lane, &probe);
        if (round == 0 || ns < result->ns_per_steal)
            result->ns_per_steal = ns;
    }
    ft_lane_cpu_set_active(lane, false);
    bool done = measure_wakes(lane, &probe, result) && result->ns_per_steal > 0;
    ft_lane_cpu_close(lane);
    return done ? FT_OK
                : ft_error_set(err, FT_TIMEOUT, "scheduler bench: a worker did not take a job for 60 s");
}

#define TRACE_RECORDS 4096u /* 256 KiB: a step's records of one worker */
#define TRACE_ROUNDS 200u

/* What a job pays for its record; the best of the rounds. */
static bool measure_trace(const struct ft_clock *clock, struct ft_bench_jobs_result *result)
{
    struct ft_trace_ring ring = {.capacity = TRACE_RECORDS};
    ring.records = calloc(TRACE_RECORDS, sizeof *ring.records);
    if (!ring.records)
        return false;
    for (uint32_t round = 0; round < TRACE_ROUNDS; round++) {
        uint64_t begin = ft_clock_ns(clock);
        ring.count = 0;
        for (uint32_t i = 0; i < TRACE_RECORDS; i++) {
            uint64_t start = ft_clock_ns(clock), end = ft_clock_ns(clock);
            struct ft_trace_record *record = ft_trace_push(&ring);
            *record =
                (struct ft_trace_record){.start_ns = start, .end_ns = end, .job = i, .bytes = i, .rows = 1};
        }
        double ns = (double)(ft_clock_ns(clock) - begin) / TRACE_RECORDS;
        if (round == 0 || ns < result->trace_ns_per_job)
            result->trace_ns_per_job = ns;
    }
    free(ring.records);
    return true;
}

int ft_bench_jobs_run(const struct ft_bench_jobs_options *options, struct ft_bench_jobs_result *result,
                      struct ft_error *err)
{
    struct ft_arena arena;
    struct dag dag;
    memset(result, 0, sizeof *result);
    uint64_t per_layer = (uint64_t)options->serials + 2ull * options->tiles + 1;
    if (!options->clock || !options->workers || !options->layers || !options->serials || !options->tiles ||
        !options->steps || !options->rounds || per_layer * options->layers > 1u << 24)
        return ft_error_set(
            err, FT_USAGE,
            "scheduler bench: %u workers, %u layers, %u serials, %u tiles, %u steps, %u rounds; wanted "
            "at least 1 of each and at most 2^24 edges",
            options->workers, options->layers, options->serials, options->tiles, options->steps,
            options->rounds);
    ft_arena_count(&arena, "scheduler bench");
    int status = build_dag(&arena, options, &dag, err);
    if (status == FT_OK)
        status = ft_arena_init(&arena, "scheduler bench", arena.used, err);
    if (status != FT_OK)
        return status;
    status = build_dag(&arena, options, &dag, err);
    if (status == FT_OK)
        status = measure_dag(options, &dag, result, err);
    if (status == FT_OK)
        status = measure_probe(options, result, err);
    if (status == FT_OK && !measure_trace(options->clock, result))
        status = ft_error_set(err, FT_MEMORY, "scheduler bench: no memory for a trace ring");
    ft_arena_fini(&arena);
    return status;
}
