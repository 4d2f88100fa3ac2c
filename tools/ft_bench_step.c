/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ft_bench_step.h"

#include "tools/interrupt.h"
#include "tools/json_out.h"
#include "tools/open.h"
#include "tools/shapes.h"
#include "tools/synthetic.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WARM_STEPS 4u
#define PROMPT_TOKENS 16u
#define ALONE_SHARE_WANTED 0.02

/* Rows of the table: an op in one kind of layer. */
enum group { GROUP_ENDS, GROUP_LINEAR, GROUP_SOFTMAX, GROUP_COUNT };
static const char *const group_names[GROUP_COUNT] = {"-", "linear", "full"};
#define ROW_COUNT ((uint32_t)FT_OP_COUNT * GROUP_COUNT)

/* What a step reads: experts and all else. They lie apart, and memory need not be of one speed. */
enum part { PART_DENSE, PART_EXPERTS, PART_COUNT };
static enum part part_of(uint32_t row)
{
    enum ft_op op = (enum ft_op)(row / GROUP_COUNT);
    return op == FT_OP_EXPERT_UP || op == FT_OP_EXPERT_DOWN ? PART_EXPERTS : PART_DENSE;
}

struct cell {
    double jobs, busy_ns, wall_ns, alone_ns, bytes;
    uint32_t threads, at_once; /* workers that ran it; the most jobs of it at the same time */
};

struct step_cells {
    double step_ns, nothing_ns; /* of the step; while no job ran */
    struct cell cells[ROW_COUNT];
};

struct event {
    uint64_t at_ns;
    uint32_t row;
    bool end;
};

struct collector {
    const struct ft_model *model;
    struct step_cells *steps; /* [cap] */
    uint32_t count, cap, skip;
    struct event *events; /* [event_cap] */
    uint64_t event_cap;
    bool short_of_memory;
};

struct report {
    char model[192];
    uint32_t workers, steps, layers[GROUP_COUNT]; /* measured layers */
    double factor[GROUP_COUNT];                   /* how many each stands for */
    struct step_cells typical;                    /* lower quartiles, factors applied; step = their sum */
    double measured_ns;                           /* lower quartile of the steps as they were, no factors */
    double bytes[PART_COUNT];                     /* of the typical step */
    double before_gbs[PART_COUNT], after_gbs[PART_COUNT],
        ceiling_gbs[PART_COUNT]; /* a plain read of the same memory before and after the steps; their mean */
    double ceiling_ns, alone_ns;
};

static enum group group_of(const struct ft_model *model, uint32_t layer)
{
    if (layer >= model->layer_count)
        return GROUP_ENDS;
    return model->layers[layer].attention == FT_ATTENTION_LINEAR ? GROUP_LINEAR : GROUP_SOFTMAX;
}

/* ---- one step ---- */

static int compare_events(const void *a, const void *b)
{
    const struct event *x = a, *y = b;
    if (x->at_ns != y->at_ns)
        return x->at_ns < y->at_ns ? -1 : 1;
    return (int)y->end - (int)x->end; /* what ends makes room first */
}

/* Gives every moment of the step to the ops that ran then. */
static void sweep(struct step_cells *s, struct event *events, uint64_t count, uint64_t begin_ns,
                  uint64_t end_ns)
{
    uint32_t active[ROW_COUNT] = {0}, rows[ROW_COUNT], row_count = 0, total = 0;
    uint64_t now = begin_ns;
    qsort(events, count, sizeof *events, compare_events);
    for (uint64_t i = 0; i <= count; i++) {
        uint64_t next = i < count ? events[i].at_ns : end_ns;
        double passed = next > now ? (double)(next - now) : 0;
        now = FT_MAX(now, next);
        if (!total)
            s->nothing_ns += passed;
        for (uint32_t r = 0; r < row_count; r++) {
            struct cell *cell = &s->cells[rows[r]];
            cell->wall_ns += passed * active[rows[r]] / FT_MAX(total, 1u);
            if (total == 1 && active[rows[r]])
                cell->alone_ns += passed;
        }
        if (i == count)
            break;
        uint32_t row = events[i].row;
        if (events[i].end) {
            active[row]--;
            total--;
            continue;
        }
        bool listed = false;
        for (uint32_t r = 0; r < row_count; r++)
            listed |= rows[r] == row;
        if (!listed)
            rows[row_count++] = row;
        active[row]++;
        total++;
        s->cells[row].at_once = FT_MAX(s->cells[row].at_once, active[row]);
    }
}

static void take_step(void *context, const struct ft_trace_step *step)
{
    struct collector *c = context;
    if (step->prefill || c->count == c->cap || c->skip) {
        c->skip -= c->skip && !step->prefill;
        return;
    }
    if (2ull * step->record_count > c->event_cap) {
        struct event *events = realloc(c->events, 2ull * step->record_count * sizeof *events);
        c->short_of_memory |= !events;
        if (!events)
            return;
        c->events = events;
        c->event_cap = 2ull * step->record_count;
    }
    struct step_cells *s = &c->steps[c->count++];
    uint64_t count = 0, threads[ROW_COUNT] = {0};
    s->step_ns = (double)(step->end_ns - step->begin_ns);
    for (uint32_t i = 0; i < step->record_count; i++) {
        const struct ft_trace_record *r = &step->records[i];
        if (r->kind != FT_RECORD_JOB || r->lane != FT_LANE_CPU)
            continue;
        uint32_t row = r->op * GROUP_COUNT + group_of(c->model, r->layer);
        s->cells[row].jobs++;
        s->cells[row].busy_ns += (double)(r->end_ns - r->start_ns);
        s->cells[row].bytes += (double)r->bytes;
        threads[row] |= 1ull << r->thread % 64;
        c->events[count++] = (struct event){r->start_ns, row, false};
        c->events[count++] = (struct event){r->end_ns, row, true};
    }
    for (uint32_t row = 0; row < ROW_COUNT; row++)
        s->cells[row].threads = (uint32_t)__builtin_popcountll(threads[row]);
    sweep(s, c->events, count, step->begin_ns, step->end_ns);
}

/* ---- all steps ---- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Lower quartile of one field of struct step_cells over all steps: other programs only make a job slower. */
static double quartile(const struct collector *c, size_t field, double *values)
{
    for (uint32_t i = 0; i < c->count; i++)
        values[i] = *(const double *)(const void *)((const char *)&c->steps[i] + field);
    qsort(values, c->count, sizeof *values, compare_doubles);
    return values[c->count / 4];
}

/* How many layers every measured one of a group stands for; time without a job grows with all of them. */
static double factor_of_all(const struct report *report)
{
    double measured = 0, meant = 0;
    for (uint32_t g = GROUP_LINEAR; g < GROUP_COUNT; g++) {
        measured += report->layers[g];
        meant += report->layers[g] * report->factor[g];
    }
    return measured > 0 ? meant / measured : 1;
}

static void summarise_row(const struct collector *c, uint32_t row, double factor, double *values,
                          struct cell *to)
{
    size_t at = offsetof(struct step_cells, cells) + row * sizeof(struct cell);
    to->jobs = factor * quartile(c, at + offsetof(struct cell, jobs), values);
    to->busy_ns = factor * quartile(c, at + offsetof(struct cell, busy_ns), values);
    to->wall_ns = factor * quartile(c, at + offsetof(struct cell, wall_ns), values);
    to->alone_ns = factor * quartile(c, at + offsetof(struct cell, alone_ns), values);
    to->bytes = factor * quartile(c, at + offsetof(struct cell, bytes), values);
    for (uint32_t i = 0; i < c->count; i++) {
        to->threads = FT_MAX(to->threads, c->steps[i].cells[row].threads);
        to->at_once = FT_MAX(to->at_once, c->steps[i].cells[row].at_once);
    }
}

static int summarise(const struct collector *c, struct report *report, struct ft_error *err)
{
    struct step_cells *typical = &report->typical;
    double *values = calloc(c->count, sizeof *values);
    if (!values)
        return ft_error_set(err, FT_MEMORY, "no memory for the report of a step");
    report->steps = c->count;
    typical->nothing_ns =
        factor_of_all(report) * quartile(c, offsetof(struct step_cells, nothing_ns), values);
    report->measured_ns = quartile(c, offsetof(struct step_cells, step_ns), values);
    typical->step_ns = typical->nothing_ns;
    for (uint32_t row = 0; row < ROW_COUNT; row++) {
        summarise_row(c, row, report->factor[row % GROUP_COUNT], values, &typical->cells[row]);
        typical->step_ns += typical->cells[row].wall_ns;
        report->bytes[part_of(row)] += typical->cells[row].bytes;
        report->alone_ns += typical->cells[row].alone_ns;
    }
    free(values);
    return FT_OK;
}

/* ---- running ---- */

static int decode(struct ft_session *session, const struct ft_bench_step_options *options, uint32_t vocab,
                  struct ft_error *err)
{
    uint32_t prompt[PROMPT_TOKENS], sequence, count;
    struct ft_event *events = calloc(2 * FT_SEQUENCES_MAX, sizeof *events);
    for (uint32_t i = 0; i < PROMPT_TOKENS; i++)
        prompt[i] = (uint32_t)((i + 3ull) * 2654435761u % vocab);
    struct ft_request request = {.prompt = prompt,
                                 .prompt_count = PROMPT_TOKENS,
                                 .max_tokens = options->steps + WARM_STEPS + 1,
                                 .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1}};
    int status = events ? ft_session_submit(session, &request, &sequence, err)
                        : ft_error_set(err, FT_MEMORY, "no memory for events");
    while (status == FT_OK && !ft_session_is_idle(session)) {
        status = ft_session_step(session, events, 2 * FT_SEQUENCES_MAX, &count, err);
        for (uint32_t i = 0; status == FT_OK && i < count; i++)
            if (events[i].kind == FT_EVENT_FAILED)
                status = ft_error_set(err, FT_NUMERIC, "a step failed: %s", events[i].message);
        if (status == FT_OK && ft_interrupt_signal())
            status = ft_error_set(err, FT_CANCELLED, "interrupted");
    }
    free(events);
    return status;
}

static int run_session(const struct ft_bench_step_options *options, const struct ft_engine *engine,
                       struct collector *collector, struct ft_error *err)
{
    struct ft_session *session = NULL;
    struct ft_session_options o = {.model = engine->model,
                                   .weights = engine->weights,
                                   .ple = engine->tables,
                                   .plan = &engine->plan,
                                   .topology = &engine->topology,
                                   .isa = options->isa,
                                   .pin = true,
                                   .trace = take_step,
                                   .trace_context = collector};
    int status = ft_session_open(&session, &o, err);
    if (status == FT_OK)
        status = decode(session, options, engine->model->vocab, err);
    if (session)
        ft_session_close(session);
    if (status == FT_OK && collector->short_of_memory)
        status = ft_error_set(err, FT_MEMORY, "no memory for the records of a step");
    if (status == FT_OK && !collector->count)
        status = ft_error_set(err, FT_INTERNAL, "no decode step was traced");
    return status;
}

static void init_open(struct ft_open_options *open, const struct ft_bench_step_options *options)
{
    ft_open_options_init(open);
    open->model = options->model;
    open->quiet = options->json;
    open->strategy = FT_STRATEGY_CPU;
    open->isa = options->isa;
    open->plan.workers = options->workers;
    open->plan.sequences_max = 1;
    open->plan.kv_tokens = options->steps + WARM_STEPS + PROMPT_TOKENS + 64;
}

static int find_format(const char *name, const char *shape, enum ft_format *format, struct ft_error *err)
{
    if (!name)
        return ft_shapes_find_format(shape, 0, format, err);
    for (uint32_t f = 0; f < FT_FORMAT_COUNT; f++) {
        *format = (enum ft_format)f;
        if (strcmp(ft_format_name(*format), name) == 0)
            return FT_OK;
    }
    return ft_error_set(err, FT_USAGE, "no format is called \"%s\"", name);
}

/* A shape reduced to one layer of each kind, without PLE; how many each stands for. */
static int read_shape(const char *shape, struct ft_model *model, struct report *report, struct ft_error *err)
{
    const struct ft_shape_cuts cuts = {.no_ple = true};
    uint32_t kept = 0, first[GROUP_COUNT], count[GROUP_COUNT] = {0};
    int status = ft_shapes_read(shape, &cuts, model, report->model, sizeof report->model, err);
    if (status != FT_OK)
        return status;
    for (uint32_t i = 0; i < model->layer_count; i++) {
        enum group g = group_of(model, i);
        if (!count[g]++)
            first[g] = i;
    }
    for (uint32_t g = GROUP_LINEAR; g < GROUP_COUNT; g++)
        if (count[g]) {
            report->factor[g] = count[g];
            model->layers[kept++] = model->layers[first[g]]; /* in ascending order: first[g] >= kept */
        }
    model->layer_count = kept;
    model->tied = true; /* one table of the vocabulary is enough: only the head reads it all */
    return FT_OK;
}

/* The banks of experts, in the order of memory, and what lies between them. */
struct regions {
    struct ft_bench_region at[PART_COUNT][FT_LAYERS_MAX + 1];
    uint32_t count[PART_COUNT];
};

static int compare_regions(const void *a, const void *b)
{
    const struct ft_bench_region *left = a, *right = b;
    return left->data < right->data ? -1 : left->data > right->data;
}

static void find_regions(const struct ft_model *model, const struct ft_loaded *loaded,
                         struct regions *regions)
{
    struct ft_bench_region *banks = regions->at[PART_EXPERTS];
    const char *at = loaded->arena.base, *end = at + loaded->arena.used;
    uint32_t count = 0;
    for (uint32_t i = 0; i < model->layer_count; i++) {
        const struct ft_layer_weights *w = &loaded->weights.layers[i];
        if (w->experts)
            banks[count++] =
                (struct ft_bench_region){w->experts, (uint64_t)w->expert_layout.stride * model->expert_count};
    }
    qsort(banks, count, sizeof *banks, compare_regions);
    regions->count[PART_EXPERTS] = count;
    for (uint32_t i = 0; i <= count; i++) {
        const char *next = i < count ? banks[i].data : end;
        if (next > at)
            regions->at[PART_DENSE][regions->count[PART_DENSE]++] =
                (struct ft_bench_region){at, (uint64_t)(next - at)};
        at = i < count ? next + banks[i].bytes : end;
    }
}

/* What a plain read of the weights reaches, gbs [PART_COUNT]. */
static int measure_ceilings(const struct ft_bench_kernels_options *bench, const struct ft_model *model,
                            const struct ft_loaded *loaded, double *gbs, struct ft_error *err)
{
    struct regions *regions = calloc(1, sizeof *regions);
    int status = regions ? FT_OK : ft_error_set(err, FT_MEMORY, "no memory for the places of the weights");
    if (regions)
        find_regions(model, loaded, regions);
    for (uint32_t p = 0; p < PART_COUNT && status == FT_OK; p++)
        status = ft_bench_read_ceiling(bench, regions->at[p], regions->count[p], &gbs[p], err);
    free(regions);
    return status;
}

/* Runs steps on an engine that is open, or planned and given weights. */
static int measure_steps(const struct ft_bench_step_options *options, const struct ft_engine *engine,
                         struct report *report, struct ft_error *err)
{
    const struct ft_model *m = engine->model;
    struct collector c = {.model = m, .cap = options->steps, .skip = WARM_STEPS};
    report->workers = engine->plan.workers;
    for (uint32_t i = 0; i < m->layer_count; i++)
        report->layers[group_of(m, i)]++;
    size_t at = strlen(report->model);
    snprintf(report->model + at, sizeof report->model - at, "%s%s: H %u, E %u, k %u, I %u, %s", m->name,
             at ? ")" : "", m->hidden, m->expert_count, m->topk, m->expert_width,
             ft_format_name(engine->sizes.expert_format));
    c.steps = calloc(c.cap, sizeof *c.steps);
    int status = c.steps ? run_session(options, engine, &c, err)
                         : ft_error_set(err, FT_MEMORY, "no memory for %u steps", c.cap);
    if (status == FT_OK)
        status = summarise(&c, report, err);
    free(c.steps);
    free(c.events);
    return status;
}

/* The read ceiling, the steps, and the ceiling again, whose mean counts: the speed of memory may change meanwhile. */
static int measure_engine(const struct ft_bench_step_options *options,
                          const struct ft_bench_kernels_options *bench, const struct ft_engine *engine,
                          const struct ft_loaded *loaded, struct report *report, struct ft_error *err)
{
    int status = measure_ceilings(bench, engine->model, loaded, report->before_gbs, err);
    if (status == FT_OK)
        status = measure_steps(options, engine, report, err);
    if (status == FT_OK)
        status = measure_ceilings(bench, engine->model, loaded, report->after_gbs, err);
    for (uint32_t p = 0; p < PART_COUNT; p++)
        report->ceiling_gbs[p] = (report->before_gbs[p] + report->after_gbs[p]) / 2;
    return status;
}

static int measure_shape(const struct ft_bench_step_options *options,
                         const struct ft_bench_kernels_options *bench, struct report *report,
                         struct ft_error *err)
{
    struct ft_open_options open;
    struct ft_engine engine;
    struct ft_weight_sizes sizes;
    struct ft_loaded loaded = {0};
    struct ft_synthetic_options synthetic = {.seed = 1, .threads = options->workers};
    struct ft_synthetic_stats stats;
    struct ft_error ignored;
    bool planned = false;
    struct ft_model *model = malloc(sizeof *model);
    int status = model ? find_format(options->format, options->shape, &synthetic.format, err)
                       : ft_error_set(err, FT_MEMORY, "no memory for a model");
    if (status == FT_OK)
        status = read_shape(options->shape, model, report, err);
    if (status == FT_OK)
        status = ft_synthetic_sizes(model, synthetic.format, FT_DENSE_AS_STORED, &sizes, err);
    if (status == FT_OK) {
        snprintf(report->model + strlen(report->model), sizeof report->model - strlen(report->model), " (");
        init_open(&open, options);
        status = ft_engine_plan_parts(&engine, &open,
                                      &(struct ft_engine_parts){.model = model, .sizes = &sizes}, err);
        planned = status == FT_OK;
    }
    if (status == FT_OK && !engine.plan.fits)
        status = ft_error_set(err, FT_MEMORY, "the shape does not fit: %s", engine.plan.advice);
    if (status == FT_OK)
        status = ft_synthetic_make(model, &synthetic, &loaded, &stats, err);
    if (status == FT_OK) {
        engine.weights = &loaded.weights;
        status = measure_engine(options, bench, &engine, &loaded, report, err);
    }
    if (planned)
        ft_engine_close(&engine, &ignored);
    ft_loaded_fini(&loaded);
    free(model);
    return status;
}

static int measure(const struct ft_bench_step_options *options, const struct ft_bench_kernels_options *bench,
                   struct report *report, struct ft_error *err)
{
    struct ft_open_options open;
    struct ft_engine engine;
    for (uint32_t g = 0; g < GROUP_COUNT; g++)
        report->factor[g] = 1;
    if (options->shape)
        return measure_shape(options, bench, report, err);
    init_open(&open, options);
    int status = ft_engine_open(&engine, &open, err);
    if (status != FT_OK)
        return status;
    struct ft_error ignored;
    status = measure_engine(options, bench, &engine, &engine.loaded, report, err);
    ft_engine_close(&engine, &ignored);
    return status;
}

/* ---- the report ---- */

/* A row is single threaded when no two of its jobs ever ran at once although there were workers for it. */
static bool is_single(const struct report *report, const struct cell *cell)
{
    return report->workers > 1 && cell->at_once == 1;
}

static void print_text(const struct report *report)
{
    const struct step_cells *typical = &report->typical;
    printf("model    %s; %.0f linear and %.0f full layers%s\n", report->model,
           report->layers[GROUP_LINEAR] * report->factor[GROUP_LINEAR],
           report->layers[GROUP_SOFTMAX] * report->factor[GROUP_SOFTMAX],
           report->factor[GROUP_LINEAR] > 1 || report->factor[GROUP_SOFTMAX] > 1
               ? " (one of each measured, the others counted)"
               : "");
    printf(
        "step     %.3f ms with %u workers (sum of the ops' lower quartiles over %u steps; as measured, lower "
        "quartile: %.3f ms%s)\n",
        typical->step_ns / 1e6, report->workers, report->steps, report->measured_ns / 1e6,
        report->factor[GROUP_LINEAR] > 1 || report->factor[GROUP_SOFTMAX] > 1 ? ", one layer of each kind"
                                                                              : "");
    printf("bytes    %.1f MB of experts, %.1f MB else = %.3f ms at a plain read (%.2f and %.2f "
           "GB/s): the step takes %.2f x that\n",
           report->bytes[PART_EXPERTS] / 1e6, report->bytes[PART_DENSE] / 1e6, report->ceiling_ns / 1e6,
           report->ceiling_gbs[PART_EXPERTS], report->ceiling_gbs[PART_DENSE],
           typical->step_ns / report->ceiling_ns);
    printf("memory   before the steps %.2f and %.2f GB/s, after them %.2f and %.2f; their means count\n",
           report->before_gbs[PART_EXPERTS], report->before_gbs[PART_DENSE], report->after_gbs[PART_EXPERTS],
           report->after_gbs[PART_DENSE]);
    printf("%-16s %-7s %7s %8s %8s %10s %7s %7s %9s %8s\n", "op", "layers", "jobs", "workers", "at once",
           "time us", "share", "alone", "MB", "GB/s");
    for (uint32_t row = 0; row < ROW_COUNT; row++) {
        const struct cell *c = &typical->cells[row];
        if (c->jobs == 0)
            continue;
        double alone = report->workers > 1 ? c->alone_ns / typical->step_ns : 0;
        printf("%-16s %-7s %7.0f %8u %8u %10.1f %6.1f%% %6.2f%% %9.2f %8.2f%s%s\n",
               ft_op_name((enum ft_op)(row / GROUP_COUNT)), group_names[row % GROUP_COUNT], c->jobs,
               c->threads, c->at_once, c->wall_ns / 1e3, 100 * c->wall_ns / typical->step_ns, 100 * alone,
               c->bytes / 1e6, c->bytes / c->wall_ns, is_single(report, c) ? "  single" : "",
               is_single(report, c) && alone > ALONE_SHARE_WANTED ? ", above 2%" : "");
    }
    printf("%-16s %-7s %7s %8s %8s %10.1f %6.1f%%\n", "no job", "-", "", "", "", typical->nothing_ns / 1e3,
           100 * typical->nothing_ns / typical->step_ns);
    if (report->workers > 1)
        printf("one worker alone: %.1f%% of the step\n", 100 * report->alone_ns / typical->step_ns);
}

static void print_json(const struct report *report)
{
    struct ft_json json;
    const struct step_cells *typical = &report->typical;
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    ft_json_text(&json, "model", report->model);
    ft_json_u64(&json, "workers", report->workers);
    ft_json_u64(&json, "steps", report->steps);
    ft_json_f64(&json, "step_us", typical->step_ns / 1e3);
    ft_json_f64(&json, "measured_us", report->measured_ns / 1e3);
    ft_json_f64(&json, "bytes", report->bytes[PART_DENSE] + report->bytes[PART_EXPERTS]);
    ft_json_f64(&json, "expert_bytes", report->bytes[PART_EXPERTS]);
    ft_json_f64(&json, "ceiling_gbs", report->ceiling_gbs[PART_DENSE]);
    ft_json_f64(&json, "expert_ceiling_gbs", report->ceiling_gbs[PART_EXPERTS]);
    ft_json_f64(&json, "ceiling_before_gbs", report->before_gbs[PART_DENSE]);
    ft_json_f64(&json, "ceiling_after_gbs", report->after_gbs[PART_DENSE]);
    ft_json_f64(&json, "expert_ceiling_before_gbs", report->before_gbs[PART_EXPERTS]);
    ft_json_f64(&json, "expert_ceiling_after_gbs", report->after_gbs[PART_EXPERTS]);
    ft_json_f64(&json, "times_ceiling", typical->step_ns / report->ceiling_ns);
    ft_json_f64(&json, "no_job_us", typical->nothing_ns / 1e3);
    ft_json_f64(&json, "alone_us", report->alone_ns / 1e3);
    ft_json_open(&json, '[', "ops");
    for (uint32_t row = 0; row < ROW_COUNT; row++) {
        const struct cell *c = &typical->cells[row];
        if (c->jobs == 0)
            continue;
        ft_json_open(&json, '{', NULL);
        ft_json_text(&json, "op", ft_op_name((enum ft_op)(row / GROUP_COUNT)));
        ft_json_text(&json, "layers", group_names[row % GROUP_COUNT]);
        ft_json_f64(&json, "jobs", c->jobs);
        ft_json_u64(&json, "workers", c->threads);
        ft_json_u64(&json, "at_once", c->at_once);
        ft_json_f64(&json, "us", c->wall_ns / 1e3);
        ft_json_f64(&json, "share", c->wall_ns / typical->step_ns);
        ft_json_f64(&json, "alone_us", c->alone_ns / 1e3);
        ft_json_f64(&json, "bytes", c->bytes);
        ft_json_bool(&json, "single", is_single(report, c));
        ft_json_close(&json, '}');
    }
    ft_json_close(&json, ']');
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

int ft_bench_step(const struct ft_bench_step_options *options, const struct ft_bench_kernels_options *bench,
                  struct ft_error *err)
{
    struct report *report = calloc(1, sizeof *report);
    int status = report ? measure(options, bench, report, err)
                        : ft_error_set(err, FT_MEMORY, "no memory for the report of a step");
    if (status == FT_OK) {
        for (uint32_t p = 0; p < PART_COUNT; p++)
            if (report->bytes[p] > 0)
                report->ceiling_ns += report->bytes[p] / report->ceiling_gbs[p];
        (options->json ? print_json : print_text)(report);
    }
    free(report);
    return status;
}
