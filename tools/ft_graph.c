/* SPDX-License-Identifier: Apache-2.0 */
/* ft-graph: looks at the graph of a step, before it runs (--model) or after it ran (--trace). */
#include "io/file.h"
#include "tools/draw.h"
#include "tools/open.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TRACE_BYTES_MAX (UINT64_C(4) << 30)
#define EXIT_USAGE 2

struct dump_options {
    const char *model, *trace, *layers, *out;
    uint32_t format, strategy, device, workers, rows, step;
    bool device_given, rows_given, step_given;
};

#define FIELD(name) offsetof(struct dump_options, name), FT_OPTION_NO_FIELD
#define GIVEN(name, flag) offsetof(struct dump_options, name), offsetof(struct dump_options, flag)

static const struct ft_option source_table[] = {
    {"trace", "FILE", "a recorded step (ft run --trace FILE writes one)", "", FT_OPTION_STRING, FIELD(trace),
     0, 0},
    {"step", "N", "number of the recorded step", "the last one", FT_OPTION_U32, GIVEN(step, step_given), 0,
     0},
    {"model", "DIR", "the graph that would run a step of this checkpoint", "", FT_OPTION_STRING, FIELD(model),
     0, 0},
    {"rows", "N", "with --model: tokens of one sequence in the step", NULL, FT_OPTION_U32,
     GIVEN(rows, rows_given), 1, 65536},
    {"strategy", "auto|fused|offload|cpu|hybrid", "with --model: where experts run", NULL, FT_OPTION_CHOICE,
     FIELD(strategy), 0, 0},
    {"device", "none|host", "with --model: the device of the plan", "as the strategy needs", FT_OPTION_CHOICE,
     GIVEN(device, device_given), 0, 0},
    {"workers", "N", "with --model: CPU workers", "as the plan says", FT_OPTION_U32, FIELD(workers), 1,
     FT_WORKERS_MAX},
};
static const struct ft_option output_table[] = {
    {"format", "text|json|dot|svg",
     "text: table per layer; json: everything; dot: for Graphviz; svg: schedule of a trace, or lanes of a "
     "graph",
     NULL, FT_OPTION_CHOICE, FIELD(format), 0, 0},
    {"layers", "A-B", "only these layers (A alone: one layer); zooms the picture of a trace",
     "all; svg of a model: 0-1", FT_OPTION_STRING, FIELD(layers), 0, 0},
    {"out", "FILE", "where to write", "standard output", FT_OPTION_STRING, FIELD(out), 0, 0},
};
static const char *const formats[] = {"text", "json", "dot", "svg"};

static int fail(const struct ft_error *err)
{
    fflush(stdout);
    fprintf(stderr, "ft-graph: %s\n", err->message);
    return err->code == FT_USAGE ? EXIT_USAGE : EXIT_FAILURE;
}

/* "3" or "3-7" */
static int parse_layers(const char *text, struct ft_draw *draw, struct ft_error *err)
{
    char *end = NULL;
    if (!text)
        return FT_OK;
    errno = 0;
    unsigned long first = strtoul(text, &end, 10), last = first;
    bool good = end != text && text[0] >= '0' && text[0] <= '9';
    if (good && *end == '-') {
        const char *second = end + 1;
        good = *second >= '0' && *second <= '9';
        last = good ? strtoul(second, &end, 10) : 0;
    }
    if (!good || *end || errno || last < first || last >= FT_LAYERS_MAX)
        return ft_error_set(err, FT_USAGE, "--layers \"%s\": give a layer or a range below %u, like 3 or 0-3",
                            text, FT_LAYERS_MAX);
    draw->layers_given = true;
    draw->layer_first = (uint32_t)first;
    draw->layer_last = (uint32_t)last;
    return FT_OK;
}

/* ---- output ---- */

/* Layers that are not there would give an empty picture. */
static int check_layers(const struct ft_draw *draw, struct ft_error *err)
{
    uint32_t count = draw->graph ? draw->graph->layer_count : draw->header->layer_count;
    if (!draw->layers_given || draw->layer_first < count)
        return FT_OK;
    return ft_error_set(err, FT_USAGE, "--layers: there is no layer %u, the model has %u (from 0)",
                        draw->layer_first, count);
}

/* A file that was begun and could not be finished is removed; devices and pipes are not. */
static int write_out(const struct ft_draw *draw, const struct dump_options *options, struct ft_error *err)
{
    ft_draw_function *function = ft_draw_find(formats[options->format]);
    if (check_layers(draw, err) != FT_OK)
        return err->code;
    if (!options->out) {
        int status = function(draw, stdout, err);
        return status == FT_OK ? FT_OK : ft_error_prepend(err, "standard output");
    }
    FILE *out = fopen(options->out, "wb");
    struct stat stat;
    if (!out)
        return ft_error_set(err, FT_IO, "%s: %s", options->out, strerror(errno));
    bool regular = fstat(fileno(out), &stat) == 0 && S_ISREG(stat.st_mode);
    int status = function(draw, out, err);
    if (fclose(out) != 0 && status == FT_OK)
        status = ft_error_set(err, FT_IO, "the output could not be written: %s", strerror(errno));
    if (status != FT_OK) {
        if (regular)
            unlink(options->out);
        ft_error_prepend(err, "%s", options->out);
    }
    return status;
}

/* ---- a recorded step ---- */

/* Finds the wanted step; the reader stands in front of it afterwards. A trace that was cut (a run that was
 * killed) still has its whole steps. */
static int find_step(struct ft_trace_reader *reader, const struct dump_options *options,
                     struct ft_trace_step *found, struct ft_error *err)
{
    struct ft_trace_step step;
    uint64_t place = 0;
    uint32_t seen = 0, first = 0, last = 0;
    bool more = true, matched = false;
    int status = FT_OK;
    while (more && !(options->step_given && matched)) {
        uint64_t before = reader->at;
        status = ft_trace_reader_next(reader, &step, NULL, 0, &more, err);
        if (status != FT_OK)
            break;
        if (!more)
            continue;
        first = seen++ ? first : step.step;
        last = step.step;
        if (options->step_given && step.step != options->step)
            continue;
        matched = true;
        place = before;
        *found = step;
    }
    if (status != FT_OK && !matched)
        return status;
    if (status != FT_OK)
        fprintf(stderr, "ft-graph: %s; showing the last whole step\n", err->message);
    if (!seen)
        return ft_error_set(err, FT_FORMAT, "the trace holds no step");
    if (!matched)
        return ft_error_set(err, FT_USAGE, "--step %u: the trace holds %u steps, %u to %u", options->step,
                            seen, first, last);
    reader->at = place;
    return FT_OK;
}

static int dump_trace(const struct dump_options *options, struct ft_draw *draw, struct ft_error *err)
{
    char *data = NULL;
    uint64_t bytes = 0;
    struct ft_trace_step step;
    struct ft_trace_record *records = NULL;
    bool more;
    int status = ft_file_read_all(options->trace, TRACE_BYTES_MAX, &data, &bytes, err);
    if (status != FT_OK)
        return status;
    struct ft_trace_reader *reader = malloc(sizeof *reader);
    status =
        reader ? ft_trace_reader_open(reader, data, bytes, err) : ft_error_set(err, FT_MEMORY, "no memory");
    if (status == FT_OK)
        status = find_step(reader, options, &step, err);
    if (status == FT_OK) {
        uint32_t count = FT_MAX(step.record_count, 1u);
        records = malloc(count * sizeof *records);
        status = records ? ft_trace_reader_next(reader, &step, records, count, &more, err)
                         : ft_error_set(err, FT_MEMORY, "no memory for %u records", count);
    }
    if (status != FT_OK)
        ft_error_prepend(err, "%s", options->trace);
    else {
        draw->header = &reader->header;
        draw->step = &step;
        status = write_out(draw, options, err);
    }
    free(records);
    free(reader);
    free(data);
    return status;
}

/* ---- a compiled graph ---- */

static int build_graph(struct ft_graph *graph, struct ft_arena *arena, const struct ft_engine *engine,
                       uint32_t rows, struct ft_error *err)
{
    struct ft_shape shape = {.rows = rows, .sequences = 1, .logit_rows = 1, .prefill = rows > 1};
    int status = ft_graph_create(graph, arena, engine->model, &shape, &engine->plan.tiling, err);
    if (status == FT_OK)
        status = ft_graph_check(graph, err);
    if (status != FT_OK)
        ft_arena_fini(arena);
    return status;
}

static int dump_model(const struct dump_options *options, struct ft_draw *draw, struct ft_error *err)
{
    struct ft_open_options open;
    struct ft_engine engine;
    struct ft_graph graph;
    struct ft_arena arena;
    struct ft_error ignored;
    char title[192];
    ft_open_options_init(&open);
    open.model = options->model;
    open.strategy = options->strategy;
    open.device = options->device;
    open.device_given = options->device_given;
    open.plan.workers = options->workers;
    open.quiet = true;
    int status = ft_engine_plan(&engine, &open, err);
    if (status != FT_OK)
        return status;
    status = build_graph(&graph, &arena, &engine, options->rows, err);
    if (status == FT_OK) {
        snprintf(title, sizeof title, "%s, strategy %s, device %s, %u workers: step of %u row%s",
                 engine.model->name, ft_strategy_name(engine.plan.strategy),
                 ft_device_name(engine.plan.device), engine.plan.workers, options->rows,
                 options->rows == 1 ? "" : "s");
        draw->graph = &graph;
        draw->title = title;
        status = write_out(draw, options, err);
        ft_arena_fini(&arena);
    }
    ft_engine_close(&engine, &ignored); /* no trace was opened that could be incomplete */
    return status;
}

/* ---- commands ---- */

static int check_source(const struct dump_options *options, struct ft_error *err)
{
    if (!options->trace == !options->model)
        return ft_error_set(err, FT_USAGE, "dump: give either --trace FILE or --model DIR");
    if (options->trace &&
        (options->rows_given || options->strategy || options->device_given || options->workers))
        return ft_error_set(
            err, FT_USAGE,
            "dump: --rows, --strategy, --device and --workers go with --model: a trace has its own");
    if (options->model && options->step_given)
        return ft_error_set(err, FT_USAGE, "dump: --step goes with --trace");
    return FT_OK;
}

static int command_dump(int argc, char **argv)
{
    struct dump_options options = {.rows = 1};
    const struct ft_option_group groups[] = {{"What", source_table, FT_COUNT_OF(source_table), &options},
                                             {"How", output_table, FT_COUNT_OF(output_table), &options}};
    const struct ft_option_set set = {
        "ft-graph dump",
        "(--trace FILE | --model DIR) [options]",
        "Shows the jobs of a step: as recorded, with times and waits, or as compiled, with tiles and "
        "dependencies.\n"
        "  ft-graph dump --trace run.trace                          where the time of the last step went\n"
        "  ft-graph dump --trace run.trace --format svg --out s.svg  the same as a picture\n"
        "  ft-graph dump --model DIR --layers 0 --format dot        dependencies of layer 0, for Graphviz",
        groups,
        FT_COUNT_OF(groups),
        0};
    struct ft_option_rest rest;
    struct ft_draw draw = {0};
    struct ft_error err;
    int status = ft_options_parse(&set, argc, argv, &rest, &err);
    if (status == FT_OK && rest.help) {
        ft_options_print_help(&set, stdout);
        return fflush(stdout) == 0 && !ferror(stdout) ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    if (status == FT_OK)
        status = check_source(&options, &err);
    if (status == FT_OK)
        status = parse_layers(options.layers, &draw, &err);
    if (status == FT_OK)
        status = options.trace ? dump_trace(&options, &draw, &err) : dump_model(&options, &draw, &err);
    return status == FT_OK ? EXIT_SUCCESS : fail(&err);
}

static void print_help(FILE *out)
{
    fputs("usage: ft-graph COMMAND [options]\n\nLooks at the job graph of a step.\n\nCommands:\n"
          "  dump       a step as text, JSON, Graphviz dot or SVG: from a trace, or as a model would run it\n"
          "  version    print the version\n"
          "  help       this text; help dump is dump --help\n\n"
          "Exit codes: 0 done, 1 failed, 2 wrong use.\n",
          out);
}

int main(int argc, char **argv)
{
    static char help_option[] = "--help";
    static char *help_argv[] = {help_option, NULL};
    const char *name = argc > 1 ? argv[1] : "";
    signal(SIGXFSZ, SIG_IGN); /* ulimit -f is a failed write, and the part written is removed */
    if (strcmp(name, "dump") == 0)
        return command_dump(argc - 2, argv + 2);
    if (strcmp(name, "version") == 0 || strcmp(name, "--version") == 0) {
        puts("ft-graph " FT_VERSION);
    } else if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        if (argc > 2 && strcmp(argv[2], "dump") == 0)
            return command_dump(1, help_argv);
        print_help(stdout);
    } else {
        if (!name[0])
            print_help(stderr);
        else
            fprintf(stderr, "ft-graph: there is no command \"%s\"; ft-graph --help lists them\n", name);
        return EXIT_USAGE;
    }
    if (fflush(stdout) == 0 && !ferror(stdout))
        return EXIT_SUCCESS;
    fprintf(stderr, "ft-graph: standard output could not be written\n");
    return EXIT_FAILURE;
}
