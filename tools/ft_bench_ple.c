/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ft bench ple: rows of a PLE table in place on disk.
 *
 * First the rows alone: latency of a batch, every row compared with what was written. Then the engine: the
 * demo model decodes with its hash tables stretched over the whole file, so that every step reads random rows
 * of it, and the trace tells how much of each read the step had to wait for:
 *
 *   step begins   read submitted              last row seen     first PLE job starts
 *        |----late-----|----------read--------------|---pick-up-----|
 *        |-----------layers before------------|------exposed--------|     (exposed is not below 0)
 *
 * The wait that no engine could avoid is max(0, read - layers before); what exceeds it is `over`, and 20 us
 * of it are allowed. Being late, decoding rows and picking up the job are ours, so they are not part of
 * `read`.
 */
#include "io/bench_io.h"
#include "tools/command.h"
#include "tools/ft_bench.h"
#include "tools/interrupt.h"
#include "tools/json_out.h"
#include "tools/open.h"
#include "tools/shapes.h"

#include <stdlib.h>
#include <string.h>

#define ALLOWANCE_NS 20000.0
#define WARM_STEPS 16u

struct options {
    const char *model, *file;
    uint64_t bytes;
    uint32_t row_bytes, rows, batches, steps, workers, io;
    bool keep, json;
};

#define FIELD(name) offsetof(struct options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"model", "DIR", "checkpoint whose engine is run on the file", "the demo model", FT_OPTION_STRING,
     FIELD(model), 0, 0},
    {"file", "F", "the table; made when it is not there", "ft-bench-ple.table in $TMPDIR or /tmp",
     FT_OPTION_STRING, FIELD(file), 0, 0},
    {"bytes", "BYTES", "size of the table", NULL, FT_OPTION_BYTES, FIELD(bytes), 0, 0},
    {"row-bytes", "N", "rows alone: bytes of a row", NULL, FT_OPTION_U32, FIELD(row_bytes), 1, 65536},
    {"rows", "N", "rows alone: rows of a batch (16 a token in the real model)", NULL, FT_OPTION_U32,
     FIELD(rows), 1, 65536},
    {"batches", "N", "rows alone: batches", NULL, FT_OPTION_U32, FIELD(batches), 1, 1e7},
    {"steps", "N", "engine: decode steps", NULL, FT_OPTION_U32, FIELD(steps), 1, 4000},
    {"workers", "N", "engine: CPU workers", "one per usable core", FT_OPTION_U32, FIELD(workers), 1,
     FT_WORKERS_MAX},
    {"io", "auto|uring|pread", "how files are read", NULL, FT_OPTION_CHOICE, FIELD(io), 0, 0},
    {"keep", NULL, "leave a table that was made for the next time", NULL, FT_OPTION_FLAG, FIELD(keep), 0, 0},
    {"json", NULL, "report as JSON", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};

/* One decode step as the trace shows it. */
struct sample {
    double late_ns, read_ns, pickup_ns, before_ns, exposed_ns, over_ns;
};
#define FIELDS (sizeof(struct sample) / sizeof(double))

struct exposure {
    struct sample *samples; /* [cap] */
    uint32_t count, cap, skip, ple_layer;
};

struct report {
    struct ft_bench_ple rows;
    struct sample p50, p90, p99; /* field by field */
    uint32_t steps, within;      /* steps whose exposed wait is within the bound */
};

static bool show(void *context, uint64_t done, uint64_t total)
{
    (void)context;
    (void)done;
    (void)total;
    return !ft_interrupt_signal();
}

/* ---- the engine on the file ---- */

static void take_step(void *context, const struct ft_trace_step *step)
{
    struct exposure *e = context;
    uint64_t layer0_end = step->begin_ns, ple_start = UINT64_MAX, read_begin = 0, read_end = 0;
    if (step->prefill || e->count == e->cap || e->skip) {
        e->skip -= e->skip && !step->prefill;
        return;
    }
    for (uint32_t i = 0; i < step->record_count; i++) {
        const struct ft_trace_record *r = &step->records[i];
        if (r->kind != FT_RECORD_JOB)
            continue;
        if (r->op == FT_OP_PLE_READ) {
            read_begin = r->start_ns;
            read_end = r->end_ns;
        } else if (r->layer < e->ple_layer || r->op == FT_OP_EMBED) {
            layer0_end = FT_MAX(layer0_end, r->end_ns);
        } else if (r->op == FT_OP_PLE_PROJECT) {
            ple_start = FT_MIN(ple_start, r->start_ns);
        }
    }
    if (!read_end || ple_start == UINT64_MAX)
        return;
    struct sample *s = &e->samples[e->count++];
    s->late_ns = (double)(read_begin - step->begin_ns);
    s->read_ns = (double)(read_end - read_begin);
    s->pickup_ns = (double)(ple_start - read_end);
    s->before_ns = (double)(layer0_end - step->begin_ns);
    s->exposed_ns = ple_start > layer0_end ? (double)(ple_start - layer0_end) : 0;
    s->over_ns = s->exposed_ns - FT_MAX(0.0, s->read_ns - s->before_ns);
}

static int decode(struct ft_session *session, const struct options *options, struct ft_error *err)
{
    static const uint32_t prompt[] = {41, 1384, 223, 19};
    struct ft_event *events = calloc(2 * FT_SEQUENCES_MAX, sizeof *events);
    uint32_t sequence, count;
    struct ft_request request = {
        .prompt = prompt,
        .prompt_count = FT_COUNT_OF(prompt),
        .max_tokens = options->steps + WARM_STEPS + 1, /* the first comes with the prompt */
        .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 5}};
    int status = events ? ft_session_submit(session, &request, &sequence, err)
                        : ft_error_set(err, FT_MEMORY, "no memory for events");
    while (status == FT_OK && !ft_session_is_idle(session)) {
        status = ft_session_step(session, events, 2 * FT_SEQUENCES_MAX, &count, err);
        for (uint32_t i = 0; status == FT_OK && i < count; i++)
            if (events[i].kind == FT_EVENT_FAILED)
                status = ft_error_set(err, FT_IO, "a step failed: %s", events[i].message);
        if (status == FT_OK && ft_interrupt_signal())
            status = ft_error_set(err, FT_CANCELLED, "interrupted");
    }
    free(events);
    return status;
}

static int run_session(const struct options *options, const char *path, struct ft_engine *engine,
                       struct ft_model *model, struct exposure *exposure, struct ft_error *err)
{
    struct ft_row_tables *tables = NULL;
    struct ft_session *session = NULL;
    int status = ft_row_tables_open_file(&tables, path, model->ple[0].row_width, err);
    if (status == FT_OK)
        status = ft_shapes_fit_ple(model, ft_row_table_row_count(tables, 0), err);
    struct ft_session_options o = {.model = model,
                                   .weights = &engine->loaded.weights,
                                   .ple = tables,
                                   .plan = &engine->plan,
                                   .topology = &engine->topology,
                                   .ple_io = (enum ft_io_backend)options->io,
                                   .pin = true,
                                   .trace = take_step,
                                   .trace_context = exposure};
    if (status == FT_OK)
        status = ft_session_open(&session, &o, err);
    if (status == FT_OK)
        status = decode(session, options, err);
    if (session)
        ft_session_close(session);
    ft_row_tables_close(tables);
    return status;
}

static int measure_engine(const struct options *options, const char *path, struct exposure *exposure,
                          struct ft_error *err)
{
    struct ft_open_options open;
    struct ft_engine engine;
    ft_open_options_init(&open);
    open.model = options->model;
    open.quiet = options->json;
    open.strategy = FT_STRATEGY_CPU;
    open.plan.workers = options->workers;
    open.plan.sequences_max = 1;
    open.plan.kv_tokens = options->steps + WARM_STEPS + 128;
    int status = ft_engine_open(&engine, &open, err);
    if (status != FT_OK)
        return status;
    struct ft_model *model = malloc(sizeof *model);
    exposure->samples = calloc(options->steps, sizeof *exposure->samples);
    if (!model || !exposure->samples)
        status = ft_error_set(err, FT_MEMORY, "no memory for %u steps", options->steps);
    else if (engine.model->ple_count != 1)
        status = ft_error_set(err, FT_UNSUPPORTED, "%s: a model with one PLE table is needed", engine.dir);
    if (status == FT_OK) {
        *model = *engine.model;
        exposure->cap = options->steps;
        exposure->skip = WARM_STEPS;
        exposure->ple_layer = model->ple[0].layer;
        status = run_session(options, path, &engine, model, exposure, err);
    }
    free(model);
    struct ft_error ignored;
    ft_engine_close(&engine, &ignored);
    return status;
}

/* ---- the report ---- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Field by field: what half, 90% and 99% of the steps are below. */
static int summarise(const struct exposure *e, struct report *report, struct ft_error *err)
{
    double *values = calloc(FT_MAX(e->count, 1u), sizeof *values);
    if (!values || !e->count) {
        free(values);
        return ft_error_set(err, FT_INTERNAL, "no decode step was traced");
    }
    report->steps = e->count;
    for (uint32_t f = 0; f < FIELDS; f++) {
        for (uint32_t i = 0; i < e->count; i++)
            values[i] = ((const double *)&e->samples[i])[f];
        qsort(values, e->count, sizeof *values, compare_doubles);
        ((double *)&report->p50)[f] = values[e->count / 2];
        ((double *)&report->p90)[f] = values[(uint64_t)e->count * 90 / 100];
        ((double *)&report->p99)[f] = values[(uint64_t)e->count * 99 / 100];
    }
    for (uint32_t i = 0; i < e->count; i++)
        report->within += e->samples[i].over_ns <= ALLOWANCE_NS;
    free(values);
    return FT_OK;
}

static const char *const field_texts[FIELDS] = {"step begins, read is submitted",
                                                "read, to the last row",
                                                "to the first PLE job",
                                                "layers before it",
                                                "exposed wait",
                                                "over max(0, read - layers before)"};
static const char *const field_keys[FIELDS] = {"late_us",          "read_us",    "pickup_us",
                                               "layers_before_us", "exposed_us", "over_us"};

static void print_text(const struct options *options, const struct report *r)
{
    char size[32];
    printf("table   %s of written random bytes, read by %s%s\n",
           ft_options_format_bytes(r->rows.file_bytes, size, sizeof size),
           ft_io_backend_name(r->rows.backend),
           r->rows.direct ? ", direct" : ", BUFFERED: may be answered from memory");
    printf("rows    %u batches of %u: median %.0f us, 99%% below %.0f us, %llu rows verified\n",
           options->batches, options->rows, r->rows.latency_p50_s * 1e6, r->rows.latency_p99_s * 1e6,
           (unsigned long long)r->rows.rows_verified);
    printf("depth   ");
    for (uint32_t i = 0; i < FT_BENCH_DEPTHS; i++)
        printf("%u: %.0fk  ", 1u << i, r->rows.curve_iops[i] / 1e3);
    printf("(4 KiB reads per s)\n");
    printf("engine  %u decode steps, us:          median      90%%      99%%\n", r->steps);
    for (uint32_t f = 0; f < FIELDS; f++)
        printf("        %-32s%8.1f %8.1f %8.1f\n", field_texts[f], ((const double *)&r->p50)[f] / 1e3,
               ((const double *)&r->p90)[f] / 1e3, ((const double *)&r->p99)[f] / 1e3);
    printf("        %.1f%% of the steps are at most 20 us over\n", 100.0 * r->within / r->steps);
    if (r->rows.note[0])
        printf("note: %s\n", r->rows.note);
}

static void print_json(const struct options *options, const struct report *r)
{
    struct ft_json json;
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    ft_json_u64(&json, "table_bytes", r->rows.file_bytes);
    ft_json_text(&json, "backend", ft_io_backend_name(r->rows.backend));
    ft_json_bool(&json, "direct", r->rows.direct);
    ft_json_u64(&json, "rows_per_batch", options->rows);
    ft_json_u64(&json, "rows_verified", r->rows.rows_verified);
    ft_json_f64(&json, "batch_us_p50", r->rows.latency_p50_s * 1e6);
    ft_json_f64(&json, "batch_us_p99", r->rows.latency_p99_s * 1e6);
    ft_json_open(&json, '[', "iops_4k_depth_1_2_4_8_16_32_64");
    for (uint32_t i = 0; i < FT_BENCH_DEPTHS; i++)
        ft_json_f64(&json, NULL, r->rows.curve_iops[i]);
    ft_json_close(&json, ']');
    ft_json_u64(&json, "steps", r->steps);
    for (uint32_t f = 0; f < FIELDS; f++) {
        ft_json_open(&json, '{', field_keys[f]);
        ft_json_f64(&json, "p50", ((const double *)&r->p50)[f] / 1e3);
        ft_json_f64(&json, "p90", ((const double *)&r->p90)[f] / 1e3);
        ft_json_f64(&json, "p99", ((const double *)&r->p99)[f] / 1e3);
        ft_json_close(&json, '}');
    }
    ft_json_f64(&json, "within_20us", (double)r->within / r->steps);
    ft_json_text(&json, "note", r->rows.note);
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

static int measure(const struct options *options, struct report *report, struct ft_error *err)
{
    char path[4096];
    const char *folder = getenv("TMPDIR");
    struct exposure exposure = {0};
    if (options->file)
        snprintf(path, sizeof path, "%s", options->file);
    else
        snprintf(path, sizeof path, "%s/ft-bench-ple.table", folder && folder[0] ? folder : "/tmp");
    struct ft_bench_ple_options rows = {.path = path,
                                        .file_bytes = options->bytes,
                                        .row_bytes = options->row_bytes,
                                        .rows_per_step = options->rows,
                                        .steps = options->batches,
                                        .backend = (enum ft_io_backend)options->io,
                                        .keep = true,
                                        .progress = show};
    int status = ft_bench_ple(&rows, &report->rows, err);
    if (status == FT_OK)
        status = measure_engine(options, path, &exposure, err);
    if (status == FT_OK)
        status = summarise(&exposure, report, err);
    free(exposure.samples);
    if (report->rows.made && !options->keep)
        (void)remove(path);
    return status;
}

int ft_command_bench_ple(int argc, char **argv)
{
    struct options options = {
        .bytes = 4ull << 30, .row_bytes = 160, .rows = 16, .batches = 2000, .steps = 1000};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options}};
    const struct ft_option_set set = {
        "ft bench ple",
        "[--file F] [options]",
        "Reads random rows in place from a large table on disk, alone and under the engine's decode steps.",
        groups,
        1,
        0};
    struct report report = {0};
    struct ft_option_rest rest;
    struct ft_error err;
    int exit_code;
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    if (measure(&options, &report, &err) != FT_OK)
        return ft_command_fail(&err);
    (options.json ? print_json : print_text)(&options, &report);
    return ft_command_finish(FT_EXIT_OK);
}
