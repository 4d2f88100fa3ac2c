/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/bench_jobs.h"
#include "jobs/frontier.h"
#include "jobs/lane_cpu.h"
#include "jobs/park.h"
#include "tests/test.h"

#include <stdatomic.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define JOBS 20000u
#define EPOCH 77u

static struct ft_clock test_clock;

static void sleep_ms(long ms)
{
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

/* Up to 60 s, so that a loaded machine does not fail us. */
static bool wait_for(_Atomic uint32_t *value, uint32_t wanted)
{
    for (int i = 0; i < 600000; i++) {
        if (atomic_load(value) >= wanted)
            return true;
        usleep(100);
    }
    return false;
}

/* ---- plain jobs ------------------------------------------------------------------------------------------------ */

struct plain {
    _Atomic uint8_t *runs; /* [JOBS] */
    _Atomic uint32_t done;
    _Atomic uint32_t faults;
    _Atomic uint32_t rooms;
    _Atomic uint32_t idles;
    _Atomic uint64_t idle_ns;
    _Atomic bool hold; /* jobs wait while this is set */
};

static void run_plain(void *ctx, uint32_t thread, struct ft_job_ref ref)
{
    struct plain *plain = ctx;
    (void)thread;
    while (atomic_load(&plain->hold))
        usleep(100);
    if (ref.epoch != EPOCH || ref.job >= JOBS || atomic_fetch_add(&plain->runs[ref.job % JOBS], 1) != 0)
        atomic_fetch_add(&plain->faults, 1);
    atomic_fetch_add(&plain->done, 1);
}

static void on_room(void *ctx, uint32_t producer)
{
    struct plain *plain = ctx;
    (void)producer;
    atomic_fetch_add(&plain->rooms, 1);
}

static void on_idle(void *ctx, uint32_t thread, uint64_t begin_ns, uint64_t end_ns)
{
    struct plain *plain = ctx;
    (void)thread;
    atomic_fetch_add(&plain->idles, 1);
    atomic_fetch_add(&plain->idle_ns, end_ns - begin_ns);
}

static struct ft_lane_cpu_options plain_options(struct plain *plain, uint32_t workers)
{
    return (struct ft_lane_cpu_options){.clock = &test_clock,
                                        .workers = workers,
                                        .producers = 1,
                                        .ring_entries = 255,
                                        .backlog_entries = 64,
                                        .spin_ns = 20000,
                                        .run = run_plain,
                                        .idle = on_idle,
                                        .room = on_room,
                                        .ctx = plain};
}

static void begin_plain(struct plain *plain)
{
    memset(plain, 0, sizeof *plain);
    plain->runs = calloc(JOBS, 1);
    if (!plain->runs)
        abort();
}

static void end_plain(struct plain *plain)
{
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < JOBS; i++)
        wrong += plain->runs[i] != 1;
    CHECK_EQ(wrong, 0);
    CHECK_EQ(plain->faults, 0);
    free((void *)plain->runs);
}

/* Pushes jobs first .. end in batches; what is refused is retried, and every other time the pusher helps. */
static void push_all(struct ft_lane_cpu *lane, uint32_t thread, uint32_t first, uint32_t end)
{
    uint32_t jobs[100], refused = 0;
    while (first < end) {
        uint32_t count = FT_MIN(end - first, 1 + first % 100);
        for (uint32_t i = 0; i < count; i++)
            jobs[i] = first + i;
        uint32_t domain = first % ft_lane_cpu_l3_domains(lane);
        uint32_t done = first % 3 ? ft_lane_cpu_push(lane, thread, jobs, count, EPOCH)
                                  : ft_lane_cpu_push_domain(lane, thread, domain, jobs, count, EPOCH);
        first += done;
        if (!done && refused++ % 2)
            ft_lane_cpu_try_run(lane, thread);
        else if (!done)
            usleep(10);
    }
    while (ft_lane_cpu_flush(lane, thread))
        usleep(10);
}

static uint64_t sum_jobs(const struct ft_lane_cpu *lane, uint32_t threads)
{
    uint64_t sum = 0;
    struct ft_lane_cpu_counters counters;
    for (uint32_t t = 0; t < threads; t++) {
        ft_lane_cpu_read_counters(lane, t, &counters);
        CHECK(counters.stolen <= counters.jobs);
        sum += counters.jobs;
    }
    return sum;
}

TEST(every_job_runs_exactly_once)
{
    static const uint32_t worker_counts[] = {1, 2, 3, 8};
    for (size_t i = 0; i < sizeof worker_counts / sizeof worker_counts[0]; i++) {
        struct ft_error err;
        struct ft_lane_cpu *lane;
        struct plain plain;
        begin_plain(&plain);
        struct ft_lane_cpu_options options = plain_options(&plain, worker_counts[i]);
        CHECK_OK(ft_lane_cpu_open(&lane, &options, &err), &err);
        REQUIRE(lane != NULL);
        CHECK_EQ(ft_lane_cpu_workers(lane), worker_counts[i]);
        ft_lane_cpu_set_active(lane, i % 2 == 0);
        push_all(lane, worker_counts[i], 0, JOBS);
        CHECK(wait_for(&plain.done, JOBS));
        CHECK_EQ(sum_jobs(lane, worker_counts[i] + 1), JOBS);
        ft_lane_cpu_close(lane);
        end_plain(&plain);
    }
}

TEST(several_l3_domains_feed_each_other)
{
    struct ft_error err;
    struct ft_topology topology;
    struct ft_lane_cpu *lane;
    struct plain plain;
    struct ft_topology_options synthetic = {.root = "/nonexistent", .synthetic = "numa:2 l3:2 core:1 pu:1"};
    CHECK_OK(ft_topology_open(&topology, &synthetic, &err), &err);
    begin_plain(&plain);
    struct ft_lane_cpu_options options = plain_options(&plain, 4);
    options.topology = &topology;
    options.producers = 2;
    CHECK_OK(ft_lane_cpu_open(&lane, &options, &err), &err);
    REQUIRE(lane != NULL);
    CHECK_EQ(ft_lane_cpu_l3_domains(lane), 4);
    push_all(lane, 4, 0, JOBS / 2);
    push_all(lane, 5, JOBS / 2, JOBS);
    CHECK(wait_for(&plain.done, JOBS));
    ft_lane_cpu_close(lane);
    ft_topology_close(&topology);
    end_plain(&plain);
}

TEST(a_full_ring_fills_the_backlog_and_room_is_told)
{
    struct ft_error err;
    struct ft_lane_cpu *lane;
    struct plain plain;
    uint32_t next = 0;
    begin_plain(&plain);
    struct ft_lane_cpu_options options = plain_options(&plain, 1);
    options.ring_entries = 1;
    options.backlog_entries = 5;
    CHECK_OK(ft_lane_cpu_open(&lane, &options, &err), &err);
    REQUIRE(lane != NULL);
    atomic_store(&plain.hold, true);
    /* One in the worker's hands (perhaps not yet), one in the ring, five in the backlog; then no more. */
    for (int i = 0; i < 1000 && next < 7; i++) {
        next += ft_lane_cpu_push(lane, 1, &next, 1, EPOCH);
        usleep(100);
    }
    CHECK_EQ(next, 7);
    CHECK_EQ(ft_lane_cpu_push(lane, 1, &next, 1, EPOCH), 0);
    CHECK_EQ(ft_lane_cpu_flush(lane, 1), 5);
    atomic_store(&plain.hold, false);
    /* A producer that only acts when it is told must get everything through. */
    for (uint32_t told = 0, left = 5; left; told++) {
        REQUIRE(wait_for(&plain.rooms, told + 1));
        left = ft_lane_cpu_flush(lane, 1);
    }
    CHECK(wait_for(&plain.done, 7));
    push_all(lane, 1, 7, JOBS / 10);
    CHECK(wait_for(&plain.done, JOBS / 10));
    for (uint32_t i = JOBS / 10; i < JOBS; i++)
        plain.runs[i] = 1;
    ft_lane_cpu_close(lane);
    end_plain(&plain);
}

TEST(jobs_left_at_close_are_dropped)
{
    struct ft_error err;
    struct ft_lane_cpu *lane;
    struct plain plain;
    uint32_t jobs[10] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    for (int i = 0; i < 50; i++) {
        begin_plain(&plain);
        struct ft_lane_cpu_options options = plain_options(&plain, 2);
        CHECK_OK(ft_lane_cpu_open(&lane, &options, &err), &err);
        REQUIRE(lane != NULL);
        CHECK_EQ(ft_lane_cpu_push(lane, 2, jobs, 10, EPOCH), 10);
        ft_lane_cpu_close(lane);
        CHECK(plain.done <= 10 && plain.faults == 0);
        free((void *)plain.runs);
    }
    ft_lane_cpu_close(NULL);
}

/* ---- idling ---------------------------------------------------------------------------------------------------- */

static double cpu_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

TEST(an_idle_lane_uses_no_cpu)
{
    for (int active = 0; active < 2; active++) {
        struct ft_error err;
        struct ft_lane_cpu *lane;
        struct plain plain;
        begin_plain(&plain);
        struct ft_lane_cpu_options options = plain_options(&plain, 4);
        CHECK_OK(ft_lane_cpu_open(&lane, &options, &err), &err);
        REQUIRE(lane != NULL);
        ft_lane_cpu_set_active(lane, active);
        push_all(lane, 4, 0, JOBS);
        CHECK(wait_for(&plain.done, JOBS));
        sleep_ms(50);
        double used_s = cpu_s();
        sleep_ms(300);
        used_s = cpu_s() - used_s;
        CHECK(used_s < 0.02 * 0.3); /* spins are bounded even while active */
        ft_lane_cpu_close(lane);
        end_plain(&plain);
    }
}

TEST(idle_time_is_reported_while_active_only)
{
    for (int active = 0; active < 2; active++) {
        struct ft_error err;
        struct ft_lane_cpu *lane;
        struct ft_lane_cpu_counters counters;
        struct plain plain;
        const uint32_t jobs[2] = {0, 1};
        begin_plain(&plain);
        struct ft_lane_cpu_options options = plain_options(&plain, 1);
        CHECK_OK(ft_lane_cpu_open(&lane, &options, &err), &err);
        REQUIRE(lane != NULL);
        sleep_ms(20); /* not active yet: not counted */
        uint64_t active_ns = ft_clock_ns(&test_clock);
        ft_lane_cpu_set_active(lane, active);
        sleep_ms(30);
        CHECK_EQ(ft_lane_cpu_push(lane, 1, jobs, 1, EPOCH), 1);
        CHECK(wait_for(&plain.done, 1));
        uint64_t end_ns = ft_clock_ns(&test_clock);
        ft_lane_cpu_read_counters(lane, 0, &counters);
        CHECK_EQ(counters.idle_ns, atomic_load(&plain.idle_ns));
        CHECK_EQ(atomic_load(&plain.idles), active);
        CHECK(!active || (counters.idle_ns >= 25000000 && counters.idle_ns <= end_ns - active_ns));
        CHECK(counters.parks >= 1 && counters.jobs == 1 && counters.stolen == 1);
        ft_lane_cpu_wake_ahead(lane);
        ft_lane_cpu_close(lane);
        free((void *)plain.runs);
    }
}

/* Job 0 pushes 1 and 2 into its worker's own ring once the test has pushed 3 and 4. */
struct two_rings {
    struct ft_lane_cpu *lane;
    _Atomic uint32_t begun, go, done;
    uint32_t order[5], pushed; /* by the worker; read once it has been joined */
};

static void run_two_rings(void *ctx, uint32_t thread, struct ft_job_ref ref)
{
    struct two_rings *t = ctx;
    const uint32_t own[2] = {1, 2};
    if (ref.job == 0) {
        atomic_store(&t->begun, 1);
        if (wait_for(&t->go, 1))
            t->pushed = ft_lane_cpu_push(t->lane, thread, own, 2, EPOCH);
    }
    t->order[atomic_load(&t->done)] = ref.job;
    atomic_fetch_add(&t->done, 1);
}

TEST(producers_may_go_before_the_workers_own_jobs)
{
    static const uint32_t own_first[5] = {0, 1, 2, 3, 4}, producers_first[5] = {0, 3, 4, 1, 2};
    const uint32_t jobs[3] = {0, 3, 4};
    if (ft_ring_entries(8) < 8) /* the tiny preset: its rings do not hold two jobs */
        return;
    for (int first = 0; first < 2; first++) {
        struct ft_error err;
        struct two_rings t = {0};
        struct plain unused = {0};
        struct ft_lane_cpu_options options = plain_options(&unused, 1);
        options.run = run_two_rings;
        options.idle = NULL;
        options.room = NULL;
        options.ctx = &t;
        options.producers_first = first;
        CHECK_OK(ft_lane_cpu_open(&t.lane, &options, &err), &err);
        REQUIRE(t.lane != NULL);
        CHECK_EQ(ft_lane_cpu_push(t.lane, 1, jobs, 1, EPOCH), 1);
        CHECK(wait_for(&t.begun, 1));
        CHECK_EQ(ft_lane_cpu_push(t.lane, 1, jobs + 1, 2, EPOCH), 2);
        atomic_store(&t.go, 1);
        CHECK(wait_for(&t.done, 5));
        ft_lane_cpu_close(t.lane);
        CHECK_EQ(t.pushed, 2);
        CHECK(memcmp(t.order, first ? producers_first : own_first, sizeof t.order) == 0);
    }
}

TEST(all_sleepers_are_woken_at_once)
{
    struct ft_error err;
    struct ft_lane_cpu *lane;
    struct ft_lane_cpu_counters before[4], after;
    struct plain plain;
    begin_plain(&plain);
    struct ft_lane_cpu_options options = plain_options(&plain, 4);
    CHECK_OK(ft_lane_cpu_open(&lane, &options, &err), &err);
    REQUIRE(lane != NULL);
    for (int i = 0; i < 60000 && ft_lane_cpu_asleep(lane) < 4; i++)
        usleep(1000);
    CHECK_EQ(ft_lane_cpu_asleep(lane), 4);
    for (uint32_t w = 0; w < 4; w++)
        ft_lane_cpu_read_counters(lane, w, &before[w]);
    ft_lane_cpu_wake_all(lane);
    /* Nobody pushed anything: each of them has looked, and parked once more. */
    uint32_t again = 0;
    for (int i = 0; i < 60000 && again < 4; i++) {
        usleep(1000);
        again = 0;
        for (uint32_t w = 0; w < 4; w++) {
            ft_lane_cpu_read_counters(lane, w, &after);
            again += after.parks > before[w].parks;
        }
    }
    CHECK_EQ(again, 4);
    ft_lane_cpu_close(lane);
    free((void *)plain.runs);
}

/* ---- graphs ---------------------------------------------------------------------------------------------------- */

#define DAG_JOBS 3000u
#define DAG_PREDS 3u

struct random_dag {
    struct ft_frontier frontier;
    uint32_t succ_begin[DAG_JOBS + 1];
    uint32_t succ[DAG_JOBS * DAG_PREDS];
    uint32_t in_degree[DAG_JOBS];
    uint32_t preds[DAG_JOBS][DAG_PREDS];
    _Atomic int32_t counter[DAG_JOBS];
    uint32_t value[DAG_JOBS]; /* not atomic: the counters must order these */
    uint32_t *todo;           /* [workers][DAG_JOBS] */
    struct ft_lane_cpu *lane;
    _Atomic uint32_t done;
    _Atomic uint32_t faults;
};

static void build_random_dag(struct random_dag *dag)
{
    uint32_t state = 12345, edge = 0;
    for (uint32_t job = 1; job < DAG_JOBS; job++)
        for (uint32_t p = 0; p < DAG_PREDS; p++) {
            state = state * 1664525u + 1013904223u;
            /* Predecessors are near, so that chains are long and fronts are wide now and then. */
            dag->preds[job][p] = job - 1 - (state >> 16) % FT_MIN(job, 100u);
            dag->in_degree[job]++;
        }
    for (uint32_t pred = 0; pred < DAG_JOBS; pred++) {
        dag->succ_begin[pred] = edge;
        for (uint32_t job = pred + 1; job < DAG_JOBS && job <= pred + 100; job++)
            for (uint32_t p = 0; p < DAG_PREDS; p++)
                if (dag->preds[job][p] == pred)
                    dag->succ[edge++] = job;
    }
    dag->succ_begin[DAG_JOBS] = edge;
    dag->frontier = (struct ft_frontier){dag->succ_begin, dag->succ, dag->counter};
}

static void run_one(struct random_dag *dag, uint32_t job, uint32_t step)
{
    if (dag->value[job] != step - 1)
        atomic_fetch_add(&dag->faults, 1);
    for (uint32_t p = 0; job && p < DAG_PREDS; p++)
        if (dag->value[dag->preds[job][p]] != step)
            atomic_fetch_add(&dag->faults, 1);
    dag->value[job] = step;
}

static void run_random_dag(void *ctx, uint32_t thread, struct ft_job_ref ref)
{
    struct random_dag *dag = ctx;
    uint32_t *todo = dag->todo + (size_t)thread * DAG_JOBS;
    uint32_t count = 1;
    todo[0] = ref.job;
    while (count) {
        uint32_t job = todo[--count];
        run_one(dag, job, ref.epoch);
        uint32_t ready = ft_frontier_complete(&dag->frontier, job, todo + count);
        count = ft_lane_cpu_offer(dag->lane, thread, todo, count + ready, ref.epoch);
        atomic_fetch_add(&dag->done, 1);
    }
}

TEST(a_job_runs_after_all_its_predecessors)
{
    static const uint32_t worker_counts[] = {1, 2, 6};
    for (size_t i = 0; i < sizeof worker_counts / sizeof worker_counts[0]; i++) {
        struct ft_error err;
        uint32_t workers = worker_counts[i], steps = 30;
        const uint32_t root = 0;
        struct random_dag *dag = calloc(1, sizeof *dag);
        REQUIRE(dag != NULL);
        dag->todo = calloc((size_t)workers * DAG_JOBS, sizeof *dag->todo);
        REQUIRE(dag->todo != NULL);
        build_random_dag(dag);
        struct ft_lane_cpu_options options = {.clock = &test_clock,
                                              .workers = workers,
                                              .producers = 1,
                                              .ring_entries = 15,
                                              .backlog_entries = 1,
                                              .spin_ns = 20000,
                                              .run = run_random_dag,
                                              .ctx = dag};
        CHECK_OK(ft_lane_cpu_open(&dag->lane, &options, &err), &err);
        REQUIRE(dag->lane != NULL);
        for (uint32_t step = 1; step <= steps; step++) {
            ft_lane_cpu_set_active(dag->lane, true);
            ft_frontier_reset(&dag->frontier, dag->in_degree, 0, DAG_JOBS);
            atomic_store(&dag->done, 0);
            CHECK_EQ(ft_lane_cpu_push(dag->lane, workers, &root, 1, step), 1);
            REQUIRE(wait_for(&dag->done, DAG_JOBS));
            ft_lane_cpu_set_active(dag->lane, false);
        }
        CHECK_EQ(dag->faults, 0);
        ft_lane_cpu_close(dag->lane);
        free(dag->todo);
        free(dag);
    }
}

TEST(bench_runs_and_counts_every_job)
{
    struct ft_error err;
    struct ft_bench_jobs_result result;
    struct ft_bench_jobs_options options = {
        .clock = &test_clock, .workers = 2, .layers = 4, .serials = 3, .tiles = 8, .steps = 20, .rounds = 2};
    CHECK_OK(ft_bench_jobs_run(&options, &result, &err), &err);
    CHECK_EQ(result.job_count, 4 * 12);
    CHECK(result.ns_per_job > 0 && result.ns_per_steal > 0 && result.wake_ns_median > 0);
    CHECK(result.steal_fraction >= 0 && result.steal_fraction <= 1);
    options.tiles = 0;
    CHECK_FAILS(ft_bench_jobs_run(&options, &result, &err), FT_USAGE, "0 tiles", &err);
}

/* ---- errors ---------------------------------------------------------------------------------------------------- */

TEST(bad_options_are_refused)
{
    struct ft_error err;
    struct ft_lane_cpu *lane;
    struct plain plain;
    memset(&plain, 0, sizeof plain);
    struct ft_lane_cpu_options options = plain_options(&plain, 0);
    CHECK_FAILS(ft_lane_cpu_open(&lane, &options, &err), FT_USAGE, "0 workers", &err);
    CHECK(lane == NULL);
    options.workers = FT_WORKERS_MAX + 1;
    CHECK_FAILS(ft_lane_cpu_open(&lane, &options, &err), FT_USAGE, "257 workers", &err);
    options.workers = 1;
    options.run = NULL;
    CHECK_FAILS(ft_lane_cpu_open(&lane, &options, &err), FT_USAGE, "run callback", &err);
    options.run = run_plain;
    options.clock = NULL;
    CHECK_FAILS(ft_lane_cpu_open(&lane, &options, &err), FT_USAGE, "clock", &err);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
static uint32_t thread_count(void)
{
    char line[256];
    unsigned count = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        sscanf(line, "Threads: %u", &count);
    if (file)
        fclose(file);
    return count;
}
#endif

TEST(a_failed_start_leaves_no_thread_behind)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    CHECK(true); /* the sanitizer's own memory does not survive the limit */
#else
    struct ft_error err;
    struct ft_lane_cpu *lane;
    struct plain plain;
    struct rlimit before, limit;
    unsigned long pages = 0;
    memset(&plain, 0, sizeof plain);
    FILE *file = fopen("/proc/self/statm", "r");
    REQUIRE(file != NULL && fscanf(file, "%lu", &pages) == 1);
    fclose(file);
    uint32_t threads = thread_count();
    getrlimit(RLIMIT_AS, &before);
    limit = before;
    limit.rlim_cur = pages * (unsigned long)sysconf(_SC_PAGESIZE) + (40ul << 20); /* stacks take 8 MiB each */
    CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    struct ft_lane_cpu_options options = plain_options(&plain, 64);
    CHECK_FAILS(ft_lane_cpu_open(&lane, &options, &err), FT_SYSTEM, "of 64 cannot be started", &err);
    setrlimit(RLIMIT_AS, &before);
    CHECK(lane == NULL);
    CHECK_EQ(thread_count(), threads);
#endif
}

int main(int argc, char **argv)
{
    (void)argv;
    ft_clock_init(&test_clock);
    RUN(every_job_runs_exactly_once)
    RUN(several_l3_domains_feed_each_other)
    RUN(a_full_ring_fills_the_backlog_and_room_is_told)
    RUN(jobs_left_at_close_are_dropped)
    RUN(an_idle_lane_uses_no_cpu)
    RUN(idle_time_is_reported_while_active_only)
    RUN(producers_may_go_before_the_workers_own_jobs)
    RUN(all_sleepers_are_woken_at_once)
    RUN(a_job_runs_after_all_its_predecessors)
    RUN(bench_runs_and_counts_every_job)
    RUN(bad_options_are_refused)
    RUN(a_failed_start_leaves_no_thread_behind)
    printf("%d checks, %d failed\n", test_checks_, test_failures_);
    return test_failures_ || !test_checks_ ? 1 : 0;
}
