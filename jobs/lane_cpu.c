/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/lane_cpu.h"

#include "graph/arena.h"
#include "jobs/park.h"
#include "jobs/thread.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* Insurance only: nothing waits for it, and it is what an idle worker costs (one look per second). */
#define PARK_TIMEOUT_NS 1000000000ull
/* Looks before a worker calls itself idle and reads the clock; one to three microseconds. */
#define QUICK_LOOKS 16
#define PAUSES_PER_LOOK 4

/* A ring as one thread sees it. */
struct source {
    struct ft_ring *ring;
    uint32_t owner;
};

/* Jobs that did not fit into the rings of a producer: a private FIFO. */
struct backlog {
    struct ft_job_ref *entries; /* [backlog_entries] */
    uint32_t first;
    uint32_t count;
};

struct counters {
    _Atomic uint64_t jobs, stolen, spins, parks, wakes, idle_ns; /* written by the thread itself */
};

struct thread {
    _Alignas(64) struct counters counters;
    /* Read by workers that take from this producer's rings, written by the producer. */
    _Alignas(64) _Atomic uint32_t backlog_count;
    /* Constant after open, except for the producer's own `backlog` and `next_domain`. */
    _Alignas(64) struct ft_lane_cpu *lane;
    struct source *sources; /* [source_count] its own ring first, then by distance */
    struct ft_ring **rings; /* [domain_count] where it pushes; a worker has the same ring everywhere */
    struct backlog backlog;
    uint32_t id;
    uint32_t domain;
    uint32_t next_domain;
    pthread_t handle;
};

struct ft_lane_cpu {
    struct ft_lane_cpu_options options;
    struct ft_arena arena; /* holds everything, this struct included */
    uint32_t thread_count;
    uint32_t domain_count;
    uint32_t source_count;
    struct thread *threads;                 /* [thread_count] workers first */
    struct ft_park *parks;                  /* [domain_count] */
    uint32_t *domain_node;                  /* [domain_count] NUMA node */
    _Alignas(64) _Atomic uint32_t spinning; /* workers in a registered spin; written at its start and end */
    _Alignas(64) _Atomic uint64_t active_since; /* ns; 0: not active */
    _Atomic bool stop;
};

static void add(_Atomic uint64_t *counter, uint64_t amount)
{
    /* One writer: no locked operation; readers get a snapshot. */
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + amount,
                          memory_order_relaxed);
}

/* ---- taking ---------------------------------------------------------------------------------------------------- */

static void tell_room(struct ft_lane_cpu *lane, uint32_t owner)
{
    if (owner < lane->options.workers || !lane->options.room)
        return;
    /* Pairs with the fence in push_producer: either we see its backlog, or it sees the room that we made. */
    ft_park_fence(&lane->parks[0]);
    if (atomic_load_explicit(&lane->threads[owner].backlog_count, memory_order_relaxed))
        lane->options.room(lane->options.ctx, owner);
}

static bool take(struct thread *self, struct ft_job_ref *ref)
{
    struct ft_lane_cpu *lane = self->lane;
    for (uint32_t i = 0; i < lane->source_count; i++) {
        const struct source *source = &self->sources[i];
        if (!ft_ring_try_pop_spmc(source->ring, ref))
            continue;
        add(&self->counters.jobs, 1);
        if (source->owner != self->id) {
            add(&self->counters.stolen, 1);
            tell_room(lane, source->owner);
        }
        return true;
    }
    return false;
}

static bool work_is_left(const struct thread *self)
{
    for (uint32_t i = 0; i < self->lane->source_count; i++)
        if (ft_ring_count(self->sources[i].ring))
            return true;
    return false;
}

/* ---- waking ---------------------------------------------------------------------------------------------------- */

/* After something was published: wakes at most one sleeper, the nearest first; nobody when a spinner will see it. */
static void wake_one(struct thread *self, uint32_t domain)
{
    struct ft_lane_cpu *lane = self->lane;
    /* Pairs with the fences in ft_park_prepare and after a spin: either we see them, or their look sees the work. */
    ft_park_fence(&lane->parks[domain]);
    for (uint32_t i = 0; i < lane->domain_count; i++) {
        struct ft_park *park = &lane->parks[(domain + i) % lane->domain_count];
        if (!ft_park_waiters(park))
            continue;
        if (atomic_load_explicit(&lane->spinning, memory_order_relaxed))
            return;
        /* Not woken: a wake is on its way already, or the sleeper has just left and looks by itself. One is enough. */
        if (ft_park_wake(park))
            add(&self->counters.wakes, 1);
        return;
    }
}

void ft_lane_cpu_wake_ahead(struct ft_lane_cpu *lane)
{
    for (uint32_t i = 0; i < lane->domain_count; i++)
        if (ft_park_wake(&lane->parks[i]))
            return;
}

void ft_lane_cpu_wake_all(struct ft_lane_cpu *lane)
{
    for (uint32_t i = 0; i < lane->domain_count; i++)
        if (ft_park_waiters(&lane->parks[i]))
            ft_park_wake_all(&lane->parks[i]);
}

void ft_lane_cpu_set_active(struct ft_lane_cpu *lane, bool active)
{
    uint64_t since = 0;
    if (active && atomic_load_explicit(&lane->active_since, memory_order_relaxed))
        return;
    if (active)
        since = ft_clock_ns(lane->options.clock) | 1;
    atomic_store_explicit(&lane->active_since, since, memory_order_relaxed);
}

static uint64_t active_since(const struct ft_lane_cpu *lane)
{
    return atomic_load_explicit(&lane->active_since, memory_order_relaxed);
}

static bool must_stop(const struct ft_lane_cpu *lane)
{
    return atomic_load_explicit(&lane->stop, memory_order_acquire);
}

/* ---- idling ---------------------------------------------------------------------------------------------------- */

static bool look_again(struct thread *self, uint32_t looks, struct ft_job_ref *ref)
{
    for (uint32_t i = 0; i < looks; i++) {
        for (int pause = 0; pause < PAUSES_PER_LOOK; pause++)
            ft_park_pause();
        if (take(self, ref))
            return true;
    }
    return false;
}

static bool use_spare_time(struct thread *self)
{
    const struct ft_lane_cpu_options *options = &self->lane->options;
    return options->spare && options->spare(options->ctx, self->id);
}

/* Bounded by spin_ns, and over as soon as the lane is no longer active. */
static bool spin(struct thread *self, struct ft_job_ref *ref)
{
    struct ft_lane_cpu *lane = self->lane;
    if (!lane->options.spin_ns || !active_since(lane))
        return false;
    bool found = false;
    uint64_t end_ns = ft_clock_ns(lane->options.clock) + lane->options.spin_ns;
    atomic_fetch_add(&lane->spinning, 1);
    while (!found && active_since(lane) && !must_stop(lane) && ft_clock_ns(lane->options.clock) < end_ns)
        found = use_spare_time(self) ? take(self, ref) : look_again(self, 1, ref);
    /* Whoever skipped a wake because of us is served either by the look in ft_park_prepare's protocol, or by
     * the check for left work when we found something. */
    atomic_fetch_sub(&lane->spinning, 1);
    ft_park_fence(&lane->parks[self->domain]);
    return found;
}

static bool sleep_or_take(struct thread *self, struct ft_job_ref *ref)
{
    struct ft_park *park = &self->lane->parks[self->domain];
    uint32_t ticket = ft_park_prepare(park);
    bool found = take(self, ref);
    if (found || must_stop(self->lane)) {
        ft_park_cancel(park);
        return found;
    }
    add(&self->counters.parks, 1);
    ft_park_wait(park, ticket, PARK_TIMEOUT_NS);
    return take(self, ref);
}

static void account_idle(struct thread *self, uint64_t begin_ns)
{
    struct ft_lane_cpu *lane = self->lane;
    uint64_t since = active_since(lane), end_ns = ft_clock_ns(lane->options.clock);
    begin_ns = FT_MAX(begin_ns, since);
    if (!since || begin_ns >= end_ns)
        return;
    add(&self->counters.idle_ns, end_ns - begin_ns);
    if (lane->options.idle)
        lane->options.idle(lane->options.ctx, self->id, begin_ns, end_ns);
}

/* Nothing was found at the first look. False: the lane stops. */
static bool idle_until_work(struct thread *self, struct ft_job_ref *ref)
{
    struct ft_lane_cpu *lane = self->lane;
    if (look_again(self, QUICK_LOOKS, ref))
        return true;
    uint64_t begin_ns = ft_clock_ns(lane->options.clock);
    bool found = false;
    add(&self->counters.spins, 1);
    while (!found && !must_stop(lane))
        found = spin(self, ref) || sleep_or_take(self, ref);
    account_idle(self, begin_ns);
    if (found && work_is_left(self))
        wake_one(self, self->domain);
    return found;
}

static void *worker_main(void *argument)
{
    struct thread *self = argument;
    const struct ft_lane_cpu_options *options = &self->lane->options;
    char name[16];
    struct ft_job_ref ref;
    snprintf(name, sizeof name, "ft-cpu-%u", self->id % 10000u);
    pthread_setname_np(pthread_self(), name);
    /* More workers than cores: they share, and floating shares better than two pinned to one core. */
    if (options->topology && options->workers <= options->topology->core_count)
        ft_topology_bind(options->topology, self->id);
    while (!must_stop(self->lane))
        if (take(self, &ref) || idle_until_work(self, &ref))
            options->run(options->ctx, self->id, ref);
    return NULL;
}

/* ---- pushing --------------------------------------------------------------------------------------------------- */

static void set_backlog_count(struct thread *self, uint32_t count)
{
    self->backlog.count = count;
    atomic_store_explicit(&self->backlog_count, count, memory_order_relaxed);
}

/* Moves jobs of the backlog into the rings. True when something moved. */
static bool drain(struct thread *self)
{
    struct ft_lane_cpu *lane = self->lane;
    uint32_t capacity = lane->options.backlog_entries, full = 0, count = self->backlog.count;
    while (count && full < lane->domain_count) {
        struct ft_ring *ring = self->rings[self->next_domain];
        if (ft_ring_try_push_spmc(ring, self->backlog.entries[self->backlog.first])) {
            self->backlog.first = (self->backlog.first + 1) % capacity;
            count--;
            full = 0;
        } else {
            full++;
        }
        self->next_domain = (self->next_domain + 1) % lane->domain_count;
    }
    bool moved = count != self->backlog.count;
    if (moved)
        set_backlog_count(self, count);
    return moved;
}

static uint32_t keep_in_backlog(struct thread *self, const uint32_t *jobs, uint32_t count, uint32_t epoch)
{
    uint32_t capacity = self->lane->options.backlog_entries;
    uint32_t kept = FT_MIN(count, capacity - self->backlog.count);
    for (uint32_t i = 0; i < kept; i++)
        self->backlog.entries[(self->backlog.first + self->backlog.count + i) % capacity] =
            (struct ft_job_ref){jobs[i], epoch};
    if (kept)
        set_backlog_count(self, self->backlog.count + kept);
    return kept;
}

/* Deals a batch out over the domains from next_domain on; what one ring cannot take is offered to the others. */
static uint32_t deal(struct thread *self, const uint32_t *jobs, uint32_t count, uint32_t epoch)
{
    struct ft_lane_cpu *lane = self->lane;
    uint32_t share = (uint32_t)ft_div_up(count, lane->domain_count), done = 0;
    for (uint32_t i = 0; i < lane->domain_count && done < count; i++) {
        done += ft_ring_push_many_spmc(self->rings[self->next_domain], jobs + done,
                                       FT_MIN(share, count - done), epoch);
        self->next_domain = (self->next_domain + 1) % lane->domain_count;
    }
    for (uint32_t i = 0; i < lane->domain_count && done < count; i++)
        done += ft_ring_push_many_spmc(self->rings[i], jobs + done, count - done, epoch);
    return done;
}

/* domain FT_NONE: deal out. */
static uint32_t push_producer(struct thread *self, uint32_t domain, const uint32_t *jobs, uint32_t count,
                              uint32_t epoch)
{
    struct ft_lane_cpu *lane = self->lane;
    bool moved = drain(self);
    uint32_t done = 0;
    if (!self->backlog.count) /* else the rings are full, and older jobs go first */
        done = domain == FT_NONE ? deal(self, jobs, count, epoch)
                                 : ft_ring_push_many_spmc(self->rings[domain], jobs, count, epoch);
    uint32_t kept = keep_in_backlog(self, jobs + done, count - done, epoch);
    if (moved || done)
        wake_one(self, domain == FT_NONE ? self->domain : domain);
    if (kept) {
        /* Workers may have emptied the rings between our look and the store of backlog_count; then none of
         * them has told us about the room, and nobody would. Pairs with the fence in tell_room. */
        ft_park_fence(&lane->parks[0]);
        if (drain(self))
            wake_one(self, self->domain);
    }
    return done + kept;
}

uint32_t ft_lane_cpu_push_domain(struct ft_lane_cpu *lane, uint32_t thread, uint32_t l3_domain,
                                 const uint32_t *jobs, uint32_t count, uint32_t epoch)
{
    struct thread *self = &lane->threads[thread];
    if (thread >= lane->options.workers)
        return push_producer(self, l3_domain, jobs, count, epoch);
    uint32_t done = ft_ring_push_many_spmc(self->rings[0], jobs, count, epoch);
    if (done)
        wake_one(self, self->domain);
    return done;
}

uint32_t ft_lane_cpu_push(struct ft_lane_cpu *lane, uint32_t thread, const uint32_t *jobs, uint32_t count,
                          uint32_t epoch)
{
    return ft_lane_cpu_push_domain(lane, thread, FT_NONE, jobs, count, epoch);
}

uint32_t ft_lane_cpu_offer(struct ft_lane_cpu *lane, uint32_t thread, uint32_t *todo, uint32_t count,
                           uint32_t epoch)
{
    if (count <= 1)
        return count;
    uint32_t done = ft_lane_cpu_push(lane, thread, todo + 1, count - 1, epoch);
    if (done)
        memmove(todo + 1, todo + 1 + done, (count - 1 - done) * sizeof *todo);
    return count - done;
}

uint32_t ft_lane_cpu_flush(struct ft_lane_cpu *lane, uint32_t thread)
{
    struct thread *self = &lane->threads[thread];
    if (self->backlog.count && drain(self))
        wake_one(self, self->domain);
    return self->backlog.count;
}

bool ft_lane_cpu_try_run(struct ft_lane_cpu *lane, uint32_t thread)
{
    struct ft_job_ref ref;
    if (!take(&lane->threads[thread], &ref))
        return false;
    lane->options.run(lane->options.ctx, thread, ref);
    return true;
}

/* ---- life cycle ------------------------------------------------------------------------------------------------ */

static uint32_t domains_of(const struct ft_lane_cpu_options *options)
{
    if (!options->topology)
        return 1;
    uint32_t used = FT_MIN(options->workers, options->topology->core_count), count = 1;
    for (uint32_t i = 0; i < used; i++)
        count = FT_MAX(count, options->topology->cores[i].l3_domain + 1);
    return count;
}

/* Hands out all memory; run twice, counting and real. Pointers are stored only in the second pass. */
static int lay_out(struct ft_arena *arena, const struct ft_lane_cpu_options *options,
                   struct ft_lane_cpu **out, struct ft_error *err)
{
    uint32_t domains = domains_of(options), threads = options->workers + options->producers;
    uint32_t sources = options->workers + options->producers * domains;
    uint32_t ring_size = ft_ring_entries(options->ring_entries);
    struct ft_lane_cpu *lane,
        head = {
            .options = *options, .thread_count = threads, .domain_count = domains, .source_count = sources};
    int status = FT_ARENA_PUSH(arena, 1, &lane, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, threads, &head.threads, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, domains, &head.parks, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, domains, &head.domain_node, err);
    for (uint32_t t = 0; t < threads && status == FT_OK; t++) {
        struct thread thread = {.lane = lane, .id = t};
        bool worker = t < options->workers;
        status = FT_ARENA_PUSH(arena, sources, &thread.sources, err);
        if (status == FT_OK)
            status = FT_ARENA_PUSH(arena, domains, &thread.rings, err);
        if (status == FT_OK && !worker)
            status = FT_ARENA_PUSH(arena, options->backlog_entries, &thread.backlog.entries, err);
        for (uint32_t d = 0; d < (worker ? 1 : domains) && status == FT_OK; d++) {
            void *memory;
            status = ft_arena_push(arena, ft_ring_bytes(ring_size), 1, &memory, err);
            if (status == FT_OK && memory)
                thread.rings[d] = ft_ring_init(memory, ring_size);
        }
        if (status == FT_OK && !ft_arena_is_counting(arena))
            head.threads[t] = thread;
    }
    if (status != FT_OK || ft_arena_is_counting(arena))
        return status;
    *lane = head;
    *out = lane;
    return FT_OK;
}

static void place_threads(struct ft_lane_cpu *lane)
{
    const struct ft_topology *topology = lane->options.topology;
    for (uint32_t d = 0; d < lane->domain_count; d++)
        ft_park_init(&lane->parks[d]);
    for (uint32_t w = 0; w < lane->options.workers; w++) {
        struct thread *worker = &lane->threads[w];
        if (topology) {
            const struct ft_topology_core *core = &topology->cores[w % topology->core_count];
            worker->domain = core->l3_domain;
            lane->domain_node[core->l3_domain] = core->numa_node;
        }
        for (uint32_t d = 1; d < lane->domain_count; d++)
            worker->rings[d] = worker->rings[0];
    }
    for (uint32_t p = lane->options.workers; p < lane->thread_count; p++)
        lane->threads[p].domain = lane->threads[p].next_domain = p % lane->domain_count;
}

/* 0 same L3, 1 same NUMA node, 2 anywhere. */
static uint32_t distance(const struct ft_lane_cpu *lane, uint32_t a, uint32_t b)
{
    return a == b ? 0 : lane->domain_node[a] == lane->domain_node[b] ? 1 : 2;
}

/* Rings of other workers, or of producers, that are `far` away. Everybody starts with its next neighbour, so
 * that thieves do not all begin at the same ring. */
static uint32_t list_sources(struct thread *self, uint32_t far, bool producers, uint32_t count)
{
    const struct ft_lane_cpu *lane = self->lane;
    uint32_t threads = lane->thread_count, workers = lane->options.workers;
    for (uint32_t i = self->id < workers ? 1 : 0; i < threads; i++) {
        const struct thread *other = &lane->threads[(self->id + i) % threads];
        bool produces = other->id >= workers;
        for (uint32_t d = 0; d < lane->domain_count && produces == producers; d++)
            if ((produces || d == other->domain) && distance(lane, self->domain, d) == far)
                self->sources[count++] = (struct source){other->rings[d], other->id};
    }
    return count;
}

static void order_sources(struct thread *self)
{
    struct ft_lane_cpu *lane = self->lane;
    bool first = lane->options.producers_first;
    uint32_t count = 0;
    for (uint32_t far = 0; far <= 2 && first; far++)
        count = list_sources(self, far, true, count);
    if (self->id < lane->options.workers)
        self->sources[count++] = (struct source){self->rings[0], self->id};
    for (uint32_t far = 0; far <= 2; far++) {
        count = list_sources(self, far, false, count);
        if (!first)
            count = list_sources(self, far, true, count);
    }
    FT_ASSERT_EQ(count, lane->source_count);
}

static void stop_workers(struct ft_lane_cpu *lane, uint32_t started)
{
    atomic_store(&lane->stop, true);
    for (uint32_t d = 0; d < lane->domain_count; d++)
        ft_park_wake_all(&lane->parks[d]);
    for (uint32_t w = 0; w < started; w++)
        pthread_join(lane->threads[w].handle, NULL);
}

static int start_workers(struct ft_lane_cpu *lane, struct ft_error *err)
{
    sigset_t all, before;
    int refused = 0;
    uint32_t started = 0;
    /* Signals belong to the main program's threads; workers inherit this mask. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < lane->options.workers && !refused) {
        struct thread *worker = &lane->threads[started];
        refused = ft_thread_start(&worker->handle, worker_main, worker);
        started += !refused;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!refused)
        return FT_OK;
    stop_workers(lane, started);
    return ft_error_set(err, FT_SYSTEM,
                        "worker thread %u of %u cannot be started: %s; lower the thread count or raise "
                        "the process limit (ulimit -u, pids.max) or the limit of address space (ulimit -v)",
                        started + 1, lane->options.workers, strerror(refused));
}

static int check_options(const struct ft_lane_cpu_options *options, struct ft_error *err)
{
    if (options->workers < 1 || options->workers > FT_WORKERS_MAX)
        return ft_error_set(err, FT_USAGE, "CPU lane with %u workers; wanted 1 to %d", options->workers,
                            FT_WORKERS_MAX);
    if (options->producers > FT_WORKERS_MAX)
        return ft_error_set(err, FT_USAGE, "CPU lane with %u producers; wanted at most %d",
                            options->producers, FT_WORKERS_MAX);
    if (!options->run || !options->clock)
        return ft_error_set(err, FT_USAGE, "CPU lane without a %s", options->run ? "clock" : "run callback");
    return FT_OK;
}

int ft_lane_cpu_open(struct ft_lane_cpu **lane, const struct ft_lane_cpu_options *options,
                     struct ft_error *err)
{
    struct ft_arena arena;
    *lane = NULL;
    int status = check_options(options, err);
    if (status != FT_OK)
        return status;
    ft_arena_count(&arena, "CPU lane");
    status = lay_out(&arena, options, lane, err);
    if (status != FT_OK)
        return status;
    status = ft_arena_init(&arena, "CPU lane", arena.used, err);
    if (status != FT_OK)
        return status;
    status = lay_out(&arena, options, lane, err);
    if (status == FT_OK) {
        (*lane)->arena = arena;
        place_threads(*lane);
        for (uint32_t t = 0; t < (*lane)->thread_count; t++)
            order_sources(&(*lane)->threads[t]);
        status = start_workers(*lane, err);
    }
    if (status != FT_OK) {
        ft_arena_fini(&arena);
        *lane = NULL;
    }
    return status;
}

void ft_lane_cpu_close(struct ft_lane_cpu *lane)
{
    if (!lane)
        return;
    stop_workers(lane, lane->options.workers);
    struct ft_arena arena = lane->arena; /* the lane lies inside */
    ft_arena_fini(&arena);
}

uint32_t ft_lane_cpu_asleep(const struct ft_lane_cpu *lane)
{
    uint32_t count = 0;
    for (uint32_t d = 0; d < lane->domain_count; d++)
        count += ft_park_asleep(&lane->parks[d]);
    return count;
}

uint32_t ft_lane_cpu_idle(const struct ft_lane_cpu *lane)
{
    return atomic_load_explicit(&lane->spinning, memory_order_relaxed) + ft_lane_cpu_asleep(lane);
}

uint32_t ft_lane_cpu_workers(const struct ft_lane_cpu *lane)
{
    return lane->options.workers;
}

uint32_t ft_lane_cpu_l3_domains(const struct ft_lane_cpu *lane)
{
    return lane->domain_count;
}

void ft_lane_cpu_read_counters(const struct ft_lane_cpu *lane, uint32_t thread,
                               struct ft_lane_cpu_counters *counters)
{
    const struct counters *from = &lane->threads[thread].counters;
    counters->jobs = atomic_load_explicit(&from->jobs, memory_order_relaxed);
    counters->stolen = atomic_load_explicit(&from->stolen, memory_order_relaxed);
    counters->spins = atomic_load_explicit(&from->spins, memory_order_relaxed);
    counters->parks = atomic_load_explicit(&from->parks, memory_order_relaxed);
    counters->wakes = atomic_load_explicit(&from->wakes, memory_order_relaxed);
    counters->idle_ns = atomic_load_explicit(&from->idle_ns, memory_order_relaxed);
}
