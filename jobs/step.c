/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/step.h"

#include "jobs/lane_cuda.h"
#include "jobs/thread.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define END_EARLY_NS 100000u /* and a sixteenth of the step */
#define END_SPIN_NS 2000000u
#define GPU_SPIN_NS 1000000u     /* of the driver thread of a GPU, for the experts of a layer */
#define PARK_NS 100000000ull     /* bound of one sleep; every loop looks again after it */
#define FLUSH_PARK_NS 1000000ull /* while a backlog waits for room */

void ft_step_fail(struct ft_step *step, int code, const char *format, ...)
{
    int none = FT_OK;
    /* acq_rel: the session reads `failure` after it saw the end of the step, which this thread still has to release */
    if (!atomic_compare_exchange_strong_explicit(&step->failed, &none, code, memory_order_acq_rel,
                                                 memory_order_acquire))
        return;
    va_list args;
    va_start(args, format);
    char text[sizeof step->failure.message];
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ft_error_set(&step->failure, code, "%s", text);
}

struct ft_trace_record *ft_step_record(struct ft_step *step, uint32_t thread, enum ft_record_kind kind,
                                       uint64_t start_ns, uint64_t end_ns)
{
    struct ft_trace_record *record = ft_trace_push(&step->traces[thread]);
    if (record)
        *record = (struct ft_trace_record){.start_ns = start_ns,
                                           .end_ns = end_ns,
                                           .job = FT_NONE,
                                           .expert = FT_NONE,
                                           .slot = FT_NONE,
                                           .layer = FT_GRAPH_NO_LAYER,
                                           .thread = (uint16_t)thread,
                                           .kind = (uint8_t)kind};
    return record;
}

void ft_step_record_ahead(struct ft_step *step, uint32_t thread, uint64_t start_ns, uint64_t end_ns,
                          uint32_t layer, uint32_t expert, uint32_t slot, enum ft_reason reason)
{
    if (!end_ns)
        return;
    struct ft_trace_record *r = ft_step_record(step, thread, FT_RECORD_JOB, FT_MAX(start_ns, step->begin_ns),
                                               FT_MAX(end_ns, step->begin_ns));
    if (!r)
        return;
    r->thread = (uint16_t)ft_step_thread(step, FT_STEP_LINK);
    r->op = FT_OP_FETCH;
    r->lane = FT_LANE_LINK;
    r->layer = (uint16_t)layer;
    r->expert = expert;
    r->slot = slot;
    r->bytes = step->weights->layers[layer].expert_layout.bytes;
    r->detail = (uint8_t)reason;
}

/* A wait that the idle callback noted is recorded with the thread's next job: only then is it sure that the
 * step runs. */
static void record_pending_wait(struct ft_step *step, uint32_t thread)
{
    struct ft_step_wait_pending *pending = &step->pending[thread];
    if (!pending->end_ns)
        return;
    uint64_t begin = FT_MAX(pending->begin_ns, step->begin_ns);
    if (pending->end_ns > begin) {
        struct ft_trace_record *record = ft_step_record(step, thread, FT_RECORD_WAIT, begin, pending->end_ns);
        if (record) {
            uint32_t lane = atomic_load_explicit(&step->last_release, memory_order_relaxed);
            record->lane = FT_LANE_CPU;
            record->detail = (uint8_t)(lane < FT_WAIT_NONE ? lane : FT_WAIT_CPU);
        }
    }
    pending->end_ns = 0;
}

void ft_step_idle_cpu(void *context, uint32_t thread, uint64_t begin_ns, uint64_t end_ns)
{
    struct ft_step *step = context;
    if (thread >= step->workers)
        return;
    if (!step->pending[thread].end_ns)
        step->pending[thread].begin_ns = begin_ns;
    step->pending[thread].end_ns = end_ns;
}

bool ft_step_spare_cpu(void *context, uint32_t thread)
{
    (void)thread;
    return ft_warm_run(&((struct ft_step *)context)->warm);
}

void ft_step_room_cpu(void *context, uint32_t producer)
{
    struct ft_step *step = context;
    if (producer == ft_step_thread(step, FT_STEP_DEVICE))
        ft_park_wake(&step->device.park);
    else if (producer == ft_step_thread(step, FT_STEP_SESSION))
        ft_park_wake(&step->session_park);
    else if (producer == ft_step_thread(step, FT_STEP_IO))
        ft_park_wake(&step->io.park);
}

static enum ft_lane lane_of(const struct ft_step *step, uint32_t job)
{
    return ft_step_is_dynamic(step, job) ? (enum ft_lane)step->dynamic[job - step->graph->static_count].lane
                                         : (enum ft_lane)step->graph->lane[job];
}

/* A job whose counter has reached 0: CPU jobs go to todo, serial lanes are woken, inline jobs complete at once. */
static uint32_t release(struct ft_step *step, uint32_t thread, uint32_t job, enum ft_lane lane,
                        uint32_t *todo, uint32_t count)
{
    switch (lane) {
    case FT_LANE_CPU:
        FT_ASSERT_LT(count, step->todo_max);
        todo[count] = job;
        return count + 1;
    case FT_LANE_DEVICE:
        ft_park_wake(&step->device.park);
        return count;
    case FT_LANE_LINK:
        ft_park_wake(&step->link.park);
        return count;
    case FT_LANE_IO:
        return count; /* reads wait for nothing but the epoch */
    default:
        return ft_step_complete(step, thread, job, todo, count);
    }
}

#ifdef FT_CHECKS
/* What a scheduler may do at any time, done on purpose where the link has delays: its thread is off its core,
 * right after a decrement, for longer than a layer takes. */
static void lose_core(const struct ft_step *step, uint32_t thread, uint32_t job)
{
    const struct timespec pause = {.tv_nsec = 10000000};
    if (step->link_delay_ns_max && thread == ft_step_thread(step, FT_STEP_LINK) && job % 4 == 0)
        nanosleep(&pause, NULL);
}
#endif

static uint32_t decrement(struct ft_step *step, uint32_t thread, uint32_t job, uint32_t *todo, uint32_t count)
{
    /* Looked up before: at 0 a serial lane may run the job at once, and the next layer, or the next step, may
     * have another job at its place before this thread goes on. */
    enum ft_lane lane = lane_of(step, job);
#ifdef FT_CHECKS
    FT_ASSERT_LT(
        0, atomic_load_explicit(&step->counter[job], memory_order_relaxed)); /* nobody completes twice */
#endif
    bool last = ft_frontier_decrement(&step->counter[job]);
#ifdef FT_CHECKS
    if (last)
        lose_core(step, thread, job);
#endif
    return last ? release(step, thread, job, lane, todo, count) : count;
}

uint32_t ft_step_complete(struct ft_step *step, uint32_t thread, uint32_t job, uint32_t *todo, uint32_t count)
{
    const struct ft_graph *graph = step->graph;
    if (ft_step_is_dynamic(step, job)) {
        const struct ft_dynamic *d = &step->dynamic[job - graph->static_count];
        uint32_t first = graph->static_count + d->succ_begin, end = first + d->succ_count;
        uint32_t combine = d->to_combine ? graph->combine_job[d->layer] : FT_NONE;
        for (uint32_t i = first; i < end; i++)
            count = decrement(step, thread, i, todo, count);
        return combine == FT_NONE ? count : decrement(step, thread, combine, todo, count);
    }
    if (job == graph->end_job) {
        step->end_ns = ft_clock_ns(&step->clock);
        /* release: pairs with the acquire in ft_step_run; the step's results are the session's from here on */
        atomic_store_explicit(&step->finished, atomic_load_explicit(&step->epoch, memory_order_relaxed),
                              memory_order_release);
        ft_park_wake(&step->session_park);
        return count;
    }
    if (graph->op[job] == FT_OP_ROUTER)
        count = ft_step_expand(step, thread, graph->layer[job], todo, count);
    uint32_t begin = graph->succ_begin[job], end = graph->succ_begin[job + 1];
    for (uint32_t i = begin; i < end; i++)
        count = decrement(step, thread, graph->succ[i], todo, count);
    return count;
}

static uint16_t clip_u16(uint32_t value)
{
    return (uint16_t)FT_MIN(value, UINT16_MAX);
}

static void run_static(struct ft_step *step, uint32_t thread, uint32_t job, bool skip)
{
    const struct ft_graph *graph = step->graph;
    uint64_t start = ft_clock_ns(&step->clock);
    if (!skip)
        ft_execute_op(&step->x, thread, graph->op[job], graph->phase[job], graph->layer[job],
                      graph->begin[job], graph->end[job]);
    struct ft_trace_record *record =
        ft_step_record(step, thread, FT_RECORD_JOB, start, ft_clock_ns(&step->clock));
    if (!record)
        return;
    record->job = job;
    record->op = graph->op[job];
    record->lane = graph->lane[job];
    record->layer = graph->layer[job];
    record->bytes = graph->bytes[job];
    record->rows = clip_u16(step->x.batch->rows);
    record->detail = FT_REASON_FIXED_LANE;
    record->flags = skip ? 2 : 0;
}

static void execute_dynamic(struct ft_step *step, const struct ft_dynamic *d)
{
    const struct ft_active *active = &step->x.active;
    if (d->op == FT_OP_EXPERT_UP) {
        ft_execute_expert_up(&step->x, d->layer, d->active, d->begin, d->end);
    } else if (d->op == FT_OP_EXPERT_DOWN) {
        ft_execute_expert_down(&step->x, d->layer, d->active, d->begin, d->end);
    } else if (d->op == FT_OP_EXPERT_DEVICE) {
        for (uint32_t i = d->begin; i < d->end; i++) {
            ft_execute_expert_up(&step->x, d->layer, active->group[i], 0, step->model->expert_width);
            ft_execute_expert_down(&step->x, d->layer, active->group[i], 0, step->model->hidden);
        }
    }
}

static void run_dynamic(struct ft_step *step, uint32_t thread, uint32_t job, bool skip)
{
    const struct ft_dynamic *d = &step->dynamic[job - step->graph->static_count];
    const struct ft_active *active = &step->x.active;
    uint64_t start = ft_clock_ns(&step->clock);
    if (!skip)
        execute_dynamic(step, d);
    struct ft_trace_record *record =
        ft_step_record(step, thread, FT_RECORD_JOB, start, ft_clock_ns(&step->clock));
    if (!record)
        return;
    uint32_t index = d->active != FT_NONE ? d->active : active->group[d->begin];
    record->job = job + d->layer * step->graph->reserved_count;
    record->op = d->op;
    record->lane = d->lane;
    record->layer = d->layer;
    record->bytes = d->bytes;
    record->expert = active->expert[index];
    record->rows = clip_u16(active->rows[index]);
    record->detail = active->reason[index];
    record->predicted_ns = active->predicted_ns[index];
    record->flags = skip ? 2 : 0;
}

uint32_t ft_step_run_job(struct ft_step *step, uint32_t thread, uint32_t job, uint32_t *todo, uint32_t count)
{
    bool skip = atomic_load_explicit(&step->failed, memory_order_relaxed) != FT_OK;
    if (ft_step_is_dynamic(step, job))
        run_dynamic(step, thread, job, skip);
    else
        run_static(step, thread, job, skip);
    return ft_step_complete(step, thread, job, todo, count);
}

void ft_step_run_cpu(void *context, uint32_t thread, struct ft_job_ref ref)
{
    struct ft_step *step = context;
    uint32_t *todo = ft_step_todo(step, thread);
    uint32_t count = 1;
    FT_ASSERT_EQ(ref.epoch, atomic_load_explicit(&step->epoch, memory_order_relaxed));
    record_pending_wait(step, thread);
    todo[0] = ref.job;
    while (count) {
        uint32_t job = todo[--count];
        count = ft_step_run_job(step, thread, job, todo, count);
        if (count > 1) {
            atomic_store_explicit(&step->last_release, FT_LANE_CPU, memory_order_relaxed);
            count = ft_lane_cpu_offer(step->cpu, thread, todo, count, ref.epoch);
        }
    }
}

void ft_step_hand_over(struct ft_step *step, uint32_t thread, const uint32_t *jobs, uint32_t count)
{
    if (!count)
        return;
    uint32_t lane = thread == ft_step_thread(step, FT_STEP_DEVICE) ? FT_LANE_DEVICE
                    : thread == ft_step_thread(step, FT_STEP_LINK) ? FT_LANE_LINK
                    : thread == ft_step_thread(step, FT_STEP_IO)   ? FT_LANE_IO
                                                                   : FT_LANE_CPU;
    atomic_store_explicit(&step->last_release, lane, memory_order_relaxed);
    uint32_t epoch = atomic_load_explicit(&step->epoch, memory_order_relaxed);
    /* The backlog is sized for every job that can be ready at once, so the push takes them all. */
    uint32_t accepted = ft_lane_cpu_push(step->cpu, thread, jobs, count, epoch);
    FT_ASSERT_EQ(accepted, count);
}

static bool counter_is_zero(const struct ft_step *step, uint32_t job)
{
    /* acquire: pairs with the release in ft_frontier_decrement of the last predecessor */
    return atomic_load_explicit(&step->counter[job], memory_order_acquire) == 0;
}

/* One sleep of a service thread, at most bound_ns; shorter while its backlog waits for room. True: woken. */
static bool doze(struct ft_step *step, uint32_t thread, struct ft_park *park, uint32_t ticket,
                 uint64_t bound_ns)
{
    bool backlog = ft_lane_cpu_flush(step->cpu, thread) != 0;
    return ft_park_wait(park, ticket, backlog ? FLUSH_PARK_NS : bound_ns);
}

bool ft_step_wait_job(struct ft_step *step, uint32_t thread, struct ft_serial *serial, uint32_t job,
                      enum ft_wait cause)
{
    if (counter_is_zero(step, job))
        return true;
    uint64_t start = ft_clock_ns(&step->clock);
    /* A GPU stands still while its driver is woken: that one looks longer. */
    uint64_t spin_ns = step->cuda ? GPU_SPIN_NS : FT_STEP_SPIN_NS;
    bool ready = false;
    while (!ready && ft_clock_ns(&step->clock) - start < spin_ns) {
        ft_park_pause();
        ready = counter_is_zero(step, job);
    }
    while (!ready) {
        if (atomic_load_explicit(&step->stop, memory_order_acquire))
            return false;
        uint32_t ticket = ft_park_prepare(&serial->park);
        ready = counter_is_zero(step, job);
        if (ready) {
            ft_park_cancel(&serial->park);
            break;
        }
        doze(step, thread, &serial->park, ticket, PARK_NS);
        ready = counter_is_zero(step, job);
    }
    if (step->cuda) /* the driver waits, not the GPU: that one has stamps of its own */
        return true;
    struct ft_trace_record *record =
        ft_step_record(step, thread, FT_RECORD_WAIT, start, ft_clock_ns(&step->clock));
    if (record) {
        bool dynamic = ft_step_is_dynamic(step, job);
        const struct ft_dynamic *d = dynamic ? &step->dynamic[job - step->graph->static_count] : NULL;
        record->job = dynamic ? job + d->layer * step->graph->reserved_count : job;
        record->op = dynamic ? d->op : step->graph->op[job];
        record->layer = dynamic ? d->layer : step->graph->layer[job];
        record->lane = (uint8_t)lane_of(step, job);
        record->detail = (uint8_t)cause;
    }
    return true;
}

static bool wait_epoch(struct ft_step *step, uint32_t thread, struct ft_serial *serial,
                       const _Atomic uint32_t *flag, uint64_t spin_ns, uint64_t woken_spin_ns, uint32_t *seen)
{
    uint64_t start = ft_clock_ns(&step->clock);
    bool woken = false;
    for (;;) {
        /* acquire: pairs with the release in ft_step_run; graph, batch and counters are set */
        uint32_t epoch = atomic_load_explicit(flag, memory_order_acquire);
        if (epoch != *seen) {
            *seen = epoch;
            return true;
        }
        if (atomic_load_explicit(&step->stop, memory_order_acquire))
            return false;
        if (ft_clock_ns(&step->clock) - start < spin_ns) {
            /* Woken by the session, which may stand behind us on the same core: let it pass. */
            if (woken)
                (void)sched_yield();
            else
                ft_park_pause();
            continue;
        }
        uint32_t ticket = ft_park_prepare(&serial->park);
        if (atomic_load_explicit(flag, memory_order_acquire) != *seen ||
            atomic_load_explicit(&step->stop, memory_order_acquire)) {
            ft_park_cancel(&serial->park);
            continue;
        }
        /* The step that we wait for may not begin before jobs of this one, which found no room, are in the rings. */
        woken = doze(step, thread, &serial->park, ticket, 10 * PARK_NS);
        if (woken) {
            start = ft_clock_ns(&step->clock);
            spin_ns = woken_spin_ns;
        }
    }
}

bool ft_step_wait_epoch(struct ft_step *step, uint32_t thread, struct ft_serial *serial, uint64_t spin_ns,
                        uint64_t woken_spin_ns, uint32_t *seen)
{
    return wait_epoch(step, thread, serial, &step->epoch, spin_ns, woken_spin_ns, seen);
}

bool ft_step_wait_io_epoch(struct ft_step *step, uint32_t thread, struct ft_serial *serial, uint64_t spin_ns,
                           uint64_t woken_spin_ns, uint32_t *seen)
{
    return wait_epoch(step, thread, serial, &step->io_epoch, spin_ns, woken_spin_ns, seen);
}

static void begin(struct ft_step *step, const struct ft_graph *graph, struct ft_batch *batch)
{
    step->graph = graph;
    step->x.batch = batch;
    ft_execute_use(&step->x, ft_execute_set_of(batch));
    for (uint32_t i = 0; i < graph->static_count; i++)
        atomic_store_explicit(&step->counter[i], graph->in_degree[i], memory_order_relaxed);
    for (uint32_t i = 0; i < step->thread_count; i++)
        step->traces[i].count = step->traces[i].dropped = 0;
    atomic_store_explicit(&step->failed, FT_OK, memory_order_relaxed);
    step->step_number++;
    step->hits = step->misses = step->fetches = step->cpu_experts = 0;
    step->fetch_bytes = 0;
    step->dynamic_count = step->wave_count = 0;
    step->begin_ns = step->end_ns = ft_clock_ns(&step->clock);
    bool dense_on_cpu = step->plan->device == FT_DEVICE_NONE;
    bool experts_on_cpu = step->cpu_experts_last && !(step->cuda && batch->prefill);
    ft_lane_cpu_set_active(step->cpu, dense_on_cpu || experts_on_cpu);
}

/* Jobs without predecessors: CPU jobs to the workers; the serial lanes find theirs. */
static void start_jobs(struct ft_step *step)
{
    const struct ft_graph *graph = step->graph;
    uint32_t thread = ft_step_thread(step, FT_STEP_SESSION);
    uint32_t *todo = ft_step_todo(step, thread), count = 0;
    for (uint32_t i = 0; i < graph->static_count && count < step->todo_max; i++)
        if (graph->in_degree[i] == 0 && graph->lane[i] == FT_LANE_CPU)
            todo[count++] = i;
    ft_step_hand_over(step, thread, todo, count);
}

/* When the session's thread begins to look for the end without sleeping, and for how long: from a sleep it comes back
 * some 50 us late, in which the GPU stands still. */
static uint64_t spin_from(const struct ft_step *step, uint64_t *spin_ns)
{
    bool known = step->spins_for_end && !step->x.batch->prefill && step->last_rows == step->x.batch->rows;
    uint64_t early = FT_MIN(step->last_ns / 16 + END_EARLY_NS, END_SPIN_NS / 2);
    *spin_ns = known && step->last_ns ? 2 * early : 0;
    return step->begin_ns + (step->last_ns > early ? step->last_ns - early : 0);
}

static void note_duration(struct ft_step *step)
{
    if (step->x.batch->prefill)
        return;
    step->last_ns = step->end_ns - step->begin_ns;
    step->last_rows = step->x.batch->rows;
}

/* The watchdog counts the time that this thread saw pass. No sleep here is longer than PARK_NS; a longer gap
 * is time in which nobody could work (Ctrl-Z, a frozen container) and proves nothing about a lane. */
static bool wait_end(struct ft_step *step, uint32_t epoch, uint64_t timeout_ns)
{
    uint32_t thread = ft_step_thread(step, FT_STEP_SESSION);
    uint64_t last = step->begin_ns, waited = 0, spin_ns, from = spin_from(step, &spin_ns);
    for (;;) {
        /* acquire: pairs with the release at the end job */
        if (atomic_load_explicit(&step->finished, memory_order_acquire) == epoch)
            return true;
        uint64_t now = ft_clock_ns(&step->clock);
        waited += FT_MIN(now - last, 2 * PARK_NS);
        last = now;
        if (waited > timeout_ns)
            return false;
        /* not where a read is to be submitted: with few cores its thread waits for this one's */
        if (!step->graph->io_count && now - step->begin_ns < FT_STEP_SPIN_NS / 4) {
            ft_park_pause();
            continue;
        }
        if (now >= from && now - from < spin_ns) {
            ft_park_pause();
            continue;
        }
        uint32_t ticket = ft_park_prepare(&step->session_park);
        if (atomic_load_explicit(&step->finished, memory_order_acquire) == epoch) {
            ft_park_cancel(&step->session_park);
            return true;
        }
        doze(step, thread, &step->session_park, ticket,
             spin_ns && now < from ? FT_MIN(from - now, PARK_NS) : PARK_NS);
    }
}

int ft_step_run(struct ft_step *step, const struct ft_graph *graph, struct ft_batch *batch,
                uint64_t timeout_ns, struct ft_error *err)
{
    begin(step, graph, batch);
    step->looks_ahead = ft_look_ahead_wants(step, batch);
    uint32_t epoch = atomic_load_explicit(&step->epoch, memory_order_relaxed) + 1;
    atomic_store_explicit(&step->learning, step->meanwhile && step->meanwhile_learns, memory_order_relaxed);
    /* release: pairs with the acquire in wait_epoch */
    atomic_store_explicit(&step->epoch, epoch, memory_order_release);
    if (graph->io_count)
        atomic_store_explicit(&step->io_epoch, epoch, memory_order_release);
    if (graph->device_count)
        ft_park_wake(&step->device.park);
    if (graph->io_count)
        ft_park_wake(&step->io.park);
    start_jobs(step);
    /* While a GPU computes the dense part of the first layer: whoever has fallen asleep since the step before
     * is there for that layer's experts. */
    if (step->cuda && step->cpu_experts_last && !batch->prefill)
        ft_lane_cpu_wake_all(step->cpu);
    if (step->meanwhile)
        step->meanwhile(step->meanwhile_context);
    /* release: pairs with the acquire in ft_step_expand; the policy's state is written */
    atomic_store_explicit(&step->learning, false, memory_order_release);
    if (!wait_end(step, epoch, timeout_ns))
        return ft_error_set(
            err, FT_TIMEOUT,
            "a step of %u rows did not end within %.1f s: a lane is stuck; the session cannot go on",
            batch->rows, (double)timeout_ns * 1e-9);
    /* The next step is probably near, and its read is late by whatever the io thread needs to wake up. Only
     * this thread has work now. */
    if (graph->io_count && step->io_ahead_ns)
        ft_park_wake(&step->io.park);
    int failed = atomic_load_explicit(&step->failed, memory_order_acquire);
    note_duration(step);
    if (step->slots.count) {
        if (failed != FT_OK) {
            ft_slots_forget_step(&step->slots, step->step_number);
            if (step->cuda) { /* its own map still has what is forgotten */
                ft_prefetch_drop(step);
                ft_lane_cuda_map_changed(step->cuda);
            }
            ft_look_ahead_drop(step);
        } else {
            ft_slots_release(&step->slots, step->x.active.slot, step->x.active.count);
        }
        ft_prefetch_settle(step, ft_step_thread(step, FT_STEP_SESSION));
        ft_look_ahead_settle(step, ft_step_thread(step, FT_STEP_SESSION));
    }
    /* A prefill that pauses says nothing about the decode step behind it. */
    if (!batch->prefill || !step->cuda)
        step->cpu_experts_last = step->cpu_experts > 0;
    if (failed != FT_OK)
        *err = step->failure;
    return failed;
}

int ft_serial_start(struct ft_serial *serial, const char *name, void *(*run)(void *), void *context,
                    struct ft_error *err)
{
    int error = ft_thread_start(&serial->thread, run, context);
    if (error)
        return ft_error_set(
            err, FT_SYSTEM,
            "cannot start the %s thread: %s; raise the process limit (ulimit -u, pids.max) or the "
            "limit of address space (ulimit -v)",
            name, strerror(error));
    serial->started = true;
    (void)pthread_setname_np(serial->thread, name);
    return FT_OK;
}

bool ft_serial_join(struct ft_serial *serial, uint64_t timeout_ns)
{
    if (!serial->started)
        return true;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + timeout_ns;
    until.tv_sec += (time_t)(ns / 1000000000u);
    until.tv_nsec = (long)(ns % 1000000000u);
    serial->started = pthread_timedjoin_np(serial->thread, NULL, &until) != 0;
    return !serial->started;
}
