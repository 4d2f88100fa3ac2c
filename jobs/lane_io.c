/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The io lane: one thread that owns the row reader (io_uring wants a single issuer). As soon as a step begins
 * it reads all PLE rows of all its tokens in one batch, while the other lanes compute the first layers.
 */
#include "jobs/step.h"

#define JOIN_NS 5000000000ull

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

static void read_step(struct ft_step *step, uint32_t thread)
{
    const struct ft_graph *graph = step->graph;
    uint32_t count = graph->io_count, wanted = 0, rows = step->x.batch->rows;
    struct ft_error err;
    for (uint32_t i = 0; i < count; i++)
        wanted = want_rows(step, step->model->layers[graph->layer[graph->io_jobs[i]]].ple, wanted);
    uint64_t start = ft_clock_ns(&step->clock);
    int status = ft_row_reader_submit(step->rows, step->wants, wanted, &err);
    if (status == FT_OK)
        status = ft_row_reader_wait(step->rows, step->io_timeout_ns, &err);
    uint64_t end = ft_clock_ns(&step->clock);
    if (status != FT_OK)
        ft_step_fail(step, status, "%s", err.message);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t job = graph->io_jobs[i], table = step->model->layers[graph->layer[job]].ple;
        if (status == FT_OK)
            ft_execute_ple_decode(&step->x, table, rows);
        /* The read alone, from the submission to the last row: waking up, row numbers and decoding are ours.
         */
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
        ft_step_hand_over(step, thread, todo, ft_step_complete(step, thread, job, todo, 0));
    }
}

static void *io_main(void *context)
{
    struct ft_step *step = context;
    uint32_t thread = ft_step_thread(step, FT_STEP_IO), seen = 0;
    /* The reader is made by the thread that uses it. */
    int status = ft_row_reader_open(&step->rows, step->ple, &step->row_options, &step->io_open_error);
    atomic_store_explicit(&step->io_opened, status == FT_OK ? 1 : 2, memory_order_release);
    ft_park_wake(&step->session_park);
    if (status != FT_OK)
        return NULL;
    while (ft_step_wait_epoch(step, thread, &step->io, &seen))
        if (step->graph->io_count)
            read_step(step, thread);
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
