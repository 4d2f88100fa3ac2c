/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The io lane: one thread that owns the row reader (io_uring wants a single issuer). As soon as a step begins
 * it reads all PLE rows of all its tokens in one batch, while the other lanes compute the first layers.
 *
 *   end of the step before    step begins       about the usual time      last row
 *   woken, spins (bounded)    submits, sleeps   spins (bounded)           runs the first PLE job itself
 *
 * Every sleep that ends on the step's critical path costs a wake-up (10 to 60 us on a virtual machine), so
 * the thread tries to be awake just before it is needed. It spins only where that takes no core from work:
 * between steps, for io_ahead_ns at most, when only the session has work; during a read, for io_spin_ns at
 * most, when there are more cores than workers and a worker sleeps. (Spinning during a read with two workers
 * on two cores made layers before it 40% slower.) An engine without steps lets it sleep.
 */
#include "jobs/step.h"

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define JOIN_NS 5000000000ull
#define WAKE_NS 20000u       /* what a timed sleep may end too late */
#define SLICE_NS 100000u     /* the shortest that Linux grants */
#define SCHED_ATTR_BYTES 56u /* second version of the kernel's struct */

/* Usual time of a read and how far it departs from it, both smoothed: Jacobson, "Congestion avoidance and
 * control", 1988, with its gains of 1/8 and 1/4. */
struct pace {
    uint64_t mean_ns, deviation_ns;
};

/* Wanted rows of one table for every token of the step; returns how many. */
static uint32_t want_rows(struct ft_step *step, uint32_t table, uint32_t at)
{
    const struct ft_batch *batch = step->x.batch;
    const struct ft_ple_spec *ple = &step->model->ple[table];
    uint32_t row_bytes = ft_row_table_row_bytes(step->ple, table);
    char *raw = (char *)(step->x.buffer + step->x.space.ple_raw) +
                (uint64_t)table * step->x.space.rows * step->x.space.ple_row_bytes;
    for (uint32_t r = 0; r < batch->rows; r++) {
        const uint32_t *tokens = batch->sequences[batch->row_sequence[r]].tokens;
        uint32_t history[FT_NGRAM_MAX], count = FT_MIN(step->model->ngram_size, batch->position[r] + 1);
        uint64_t rows[FT_PLE_HEADS_MAX];
        for (uint32_t i = 0; i < count; i++)
            history[i] = tokens[batch->position[r] - i];
        ft_model_ple_rows(step->model, table, history, count, rows);
        for (uint32_t h = 0; h < ple->head_count; h++)
            step->wants[at++] =
                (struct ft_row_want){.row = rows[h],
                                     .table = table,
                                     .destination = raw + r * step->x.space.ple_row_bytes + h * row_bytes};
    }
    return at;
}

static void learn(struct pace *pace, uint64_t ns)
{
    int64_t off = (int64_t)ns - (int64_t)pace->mean_ns;
    uint64_t distance = (uint64_t)(off < 0 ? -off : off);
    pace->mean_ns = (uint64_t)((int64_t)pace->mean_ns + off / 8);
    pace->deviation_ns = pace->deviation_ns - pace->deviation_ns / 4 + distance / 4;
}

/* Sleeps until the rows may be there, looks for them for a while if some worker waits too, sleeps again. */
static int await_rows(struct ft_step *step, const struct pace *pace, struct ft_error *err)
{
    uint64_t early = 2 * pace->deviation_ns + WAKE_NS;
    bool there = step->io_spin_ns == 0 || ft_row_reader_backend(step->rows) != FT_IO_URING;
    if (!there && pace->mean_ns > early)
        there = ft_row_reader_poll(step->rows, pace->mean_ns - early);
    uint64_t end = ft_clock_ns(&step->clock) + step->io_spin_ns;
    while (!there && ft_lane_cpu_asleep(step->cpu) && ft_clock_ns(&step->clock) < end) {
        ft_park_pause();
        there = ft_row_reader_poll(step->rows, 0);
    }
    return ft_row_reader_wait(step->rows, step->io_timeout_ns, err);
}

/* Jobs that wait for the rows. A worker without work has left a core free: then this thread, which is awake,
 * runs one job itself while the worker wakes up. Its successors are the workers' again. */
static void start_ready(struct ft_step *step, uint32_t thread, uint32_t *todo, uint32_t count)
{
    if (count == 0 || ft_lane_cpu_idle(step->cpu) == 0) {
        ft_step_hand_over(step, thread, todo, count);
        return;
    }
    uint32_t own = todo[--count];
    if (count)
        ft_step_hand_over(step, thread, todo, count);
    else
        ft_lane_cpu_wake_ahead(step->cpu);
    ft_step_hand_over(step, thread, todo, ft_step_run_job(step, thread, own, todo, 0));
}

static void read_step(struct ft_step *step, uint32_t thread, struct pace *pace)
{
    const struct ft_graph *graph = step->graph;
    uint32_t count = graph->io_count, wanted = 0, rows = step->x.batch->rows;
    struct ft_error err;
    for (uint32_t i = 0; i < count; i++)
        wanted = want_rows(step, step->model->layers[graph->layer[graph->io_jobs[i]]].ple, wanted);
    uint64_t start = ft_clock_ns(&step->clock);
    int status = ft_row_reader_submit(step->rows, step->wants, wanted, &err);
    if (status == FT_OK)
        status = await_rows(step, pace, &err);
    uint64_t end = ft_clock_ns(&step->clock);
    learn(pace, end - start);
    if (status != FT_OK)
        ft_step_fail(step, status, "%s", err.message);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t job = graph->io_jobs[i], table = step->model->layers[graph->layer[job]].ple;
        if (status == FT_OK)
            ft_execute_ple_decode(&step->x, table, rows);
        /* The read alone, from the submission to the last row: waking up, row numbers and decoding are ours. */
        struct ft_trace_record *record = ft_step_record(step, thread, FT_RECORD_JOB, start, end);
        if (record) {
            record->job = job;
            record->op = FT_OP_PLE_READ;
            record->lane = FT_LANE_IO;
            record->layer = graph->layer[job];
            record->bytes = (uint64_t)rows * step->model->ple[table].head_count *
                            ft_row_table_row_bytes(step->ple, table);
            record->rows = (uint16_t)FT_MIN(rows, UINT16_MAX);
            record->detail = FT_REASON_FIXED_LANE;
        }
        uint32_t *todo = ft_step_todo(step, thread);
        start_ready(step, thread, todo, ft_step_complete(step, thread, job, todo, 0));
    }
}

/* The shortest time slice (and timers that are on time): the scheduler lets a thread with a short slice
 * interrupt one with a long slice, such as a worker that spins. Linux 6.12 and newer; elsewhere it changes
 * nothing. */
static void ask_for_short_slice(void)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
        uint32_t util_min, util_max;
    } attr;
    _Static_assert(sizeof attr == SCHED_ATTR_BYTES, "layout of struct sched_attr");
    (void)prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul);
    if (syscall(SYS_sched_getattr, 0, &attr, SCHED_ATTR_BYTES, 0) == 0 && attr.policy == 0) {
        attr.runtime = SLICE_NS;
        (void)syscall(SYS_sched_setattr, 0, &attr, 0);
    }
}

static void *io_main(void *context)
{
    struct ft_step *step = context;
    uint32_t thread = ft_step_thread(step, FT_STEP_IO), seen = 0;
    struct pace pace = {0, 0};
    ask_for_short_slice();
    /* The reader is made by the thread that uses it. */
    int status = ft_row_reader_open(&step->rows, step->ple, &step->row_options, &step->io_open_error);
    atomic_store_explicit(&step->io_opened, status == FT_OK ? 1 : 2, memory_order_release);
    ft_park_wake(&step->session_park);
    if (status != FT_OK)
        return NULL;
    while (ft_step_wait_io_epoch(step, thread, &step->io, 0, step->io_ahead_ns, &seen))
        read_step(step, thread, &pace);
    ft_row_reader_close(step->rows);
    return NULL;
}

int ft_lane_io_open(struct ft_step *step, struct ft_error *err)
{
    if (!step->ple)
        return FT_OK;
    int status = ft_serial_start(&step->io, "ft-io", io_main, step, err);
    while (status == FT_OK) {
        int opened = atomic_load_explicit(&step->io_opened, memory_order_acquire);
        if (opened == 2) {
            *err = step->io_open_error;
            status = err->code;
        } else if (opened == 1) {
            break;
        } else {
            uint32_t ticket = ft_park_prepare(&step->session_park);
            if (atomic_load_explicit(&step->io_opened, memory_order_acquire))
                ft_park_cancel(&step->session_park);
            else
                ft_park_wait(&step->session_park, ticket, 10000000u);
        }
    }
    if (status != FT_OK)
        ft_lane_io_close(step);
    return status;
}

void ft_lane_io_close(struct ft_step *step)
{
    /* release: pairs with the acquire in ft_step_wait_epoch; the session has read the reader's note before
     * the reader goes */
    atomic_store_explicit(&step->stop, true, memory_order_release);
    ft_park_wake_all(&step->io.park);
    ft_serial_join(&step->io, JOIN_NS);
}
