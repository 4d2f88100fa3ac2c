/* SPDX-License-Identifier: Apache-2.0 */
#include "io/rows.h"
#include "jobs/clock.h"
#include "tools/command.h"
#include "tools/ft_bench.h"
#include "tools/interrupt.h"
#include "tools/json_out.h"
#include "tools/open.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WAIT_NS_MAX 10000000000ull
#define PART_BYTES (1u << 20)

struct options {
    const char *model, *file;
    uint64_t bytes, seed;
    uint32_t row_bytes, rows, batches, io;
    bool json;
};

#define FIELD(name) offsetof(struct options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"model", "DIR", "read the PLE tables of this checkpoint", "a file of its own", FT_OPTION_STRING,
     FIELD(model), 0, 0},
    {"file", "F", "read this file as a table; created, and removed again, when it is not there",
     "a temporary file in $TMPDIR", FT_OPTION_STRING, FIELD(file), 0, 0},
    {"bytes", "BYTES", "size of a created file", NULL, FT_OPTION_BYTES, FIELD(bytes), 0, 0},
    {"row-bytes", "N", "bytes of a row of a file", NULL, FT_OPTION_U32, FIELD(row_bytes), 1, 65536},
    {"rows", "N", "random rows of a batch (16 a token in the real model)", NULL, FT_OPTION_U32, FIELD(rows),
     1, 65536},
    {"batches", "N", "batches to read", NULL, FT_OPTION_U32, FIELD(batches), 1, 1e7},
    {"io", "auto|uring|pread", "how files are read", NULL, FT_OPTION_CHOICE, FIELD(io), 0, 0},
    {"seed", "N", "of the random rows", NULL, FT_OPTION_U64, FIELD(seed), 0, 0},
    {"json", NULL, "report as JSON", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};

struct result {
    double latency_ns_mean, latency_ns_p50, latency_ns_p99, latency_ns_min;
    uint64_t total_ns;
    struct ft_row_stats stats;
    enum ft_io_backend backend;
    uint64_t table_bytes;
    char note[256];
};

/* splitmix64 (Steele, Lea, Flood 2014) */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

/* ---- the file ---- */

static int fill_file(int fd, const char *path, uint64_t bytes, struct ft_error *err)
{
    uint64_t state = 1;
    uint64_t *part = malloc(PART_BYTES);
    int status = part ? FT_OK : ft_error_set(err, FT_MEMORY, "no memory to write %s", path);
    for (uint64_t done = 0; done < bytes && status == FT_OK;) {
        for (uint32_t i = 0; i < PART_BYTES / sizeof *part; i++)
            part[i] = next_random(&state);
        ssize_t wrote = write(fd, part, FT_MIN(bytes - done, (uint64_t)PART_BYTES));
        if (wrote <= 0)
            status = ft_error_set(err, FT_IO, "%s: %s", path,
                                  wrote ? strerror(errno) : "nothing could be written");
        else
            done += (uint64_t)wrote;
        if (ft_interrupt_signal())
            status = ft_error_set(err, FT_CANCELLED, "interrupted");
    }
    free(part);
    if (status == FT_OK && fsync(fd) != 0)
        status = ft_error_set(err, FT_IO, "%s: %s", path, strerror(errno));
    /* What was just written must come from the disk when it is read. */
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    return status;
}

/* Creates `path` (a template for mkostemp when `temporary`); on failure it is not there. */
static int create_file(char *path, bool temporary, uint64_t bytes, struct ft_error *err)
{
    int fd =
        temporary ? mkostemp(path, O_CLOEXEC) : open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return ft_error_set(err, FT_IO, "%s: cannot be created: %s", path, strerror(errno));
    int status = fill_file(fd, path, bytes, err);
    close(fd);
    if (status != FT_OK)
        unlink(path);
    return status;
}

/* ---- the measurement ---- */

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void draw_rows(struct ft_row_want *wants, uint32_t count, const struct ft_row_tables *tables,
                      char *buffer, uint32_t stride, uint64_t *state)
{
    uint32_t table_count = ft_row_tables_count(tables);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t which = i % table_count;
        wants[i] = (struct ft_row_want){.row = next_random(state) % ft_row_table_row_count(tables, which),
                                        .destination = buffer + (size_t)i * stride,
                                        .table = which};
    }
}

static int read_batches(const struct options *options, const struct ft_row_tables *tables,
                        struct ft_row_reader *reader, struct ft_row_want *wants, char *buffer,
                        uint32_t stride, uint64_t *latency_ns, struct ft_error *err)
{
    struct ft_clock clock;
    uint64_t state = options->seed;
    ft_clock_init(&clock);
    for (uint32_t i = 0; i < options->batches; i++) {
        draw_rows(wants, options->rows, tables, buffer, stride, &state);
        uint64_t begin = ft_clock_ns(&clock);
        int status = ft_row_reader_submit(reader, wants, options->rows, err);
        if (status == FT_OK)
            status = ft_row_reader_wait(reader, WAIT_NS_MAX, err);
        latency_ns[i] = ft_clock_ns(&clock) - begin;
        if (status == FT_OK && ft_interrupt_signal())
            status = ft_error_set(err, FT_CANCELLED, "interrupted");
        if (status != FT_OK)
            return status;
    }
    return FT_OK;
}

static void summarise(struct result *result, uint64_t *latency_ns, uint32_t count)
{
    qsort(latency_ns, count, sizeof *latency_ns, compare_u64);
    for (uint32_t i = 0; i < count; i++)
        result->total_ns += latency_ns[i];
    result->latency_ns_mean = (double)result->total_ns / count;
    result->latency_ns_min = (double)latency_ns[0];
    result->latency_ns_p50 = (double)latency_ns[count / 2];
    result->latency_ns_p99 = (double)latency_ns[(uint32_t)((uint64_t)count * 99 / 100)];
}

static int measure(const struct options *options, const struct ft_row_tables *tables, struct result *result,
                   struct ft_error *err)
{
    struct ft_row_reader_options reader_options = {
        .backend = FT_ROWS_DISK, .io_backend = (enum ft_io_backend)options->io, .rows_max = options->rows};
    struct ft_row_reader *reader;
    uint32_t stride = 1;
    for (uint32_t i = 0; i < ft_row_tables_count(tables); i++)
        stride = FT_MAX(stride, ft_row_table_row_bytes(tables, i));
    int status = ft_row_reader_open(&reader, tables, &reader_options, err);
    if (status != FT_OK)
        return status;
    struct ft_row_want *wants = calloc(options->rows, sizeof *wants);
    char *buffer = calloc(options->rows, stride);
    uint64_t *latency_ns = calloc(options->batches, sizeof *latency_ns);
    if (wants && buffer && latency_ns)
        status = read_batches(options, tables, reader, wants, buffer, stride, latency_ns, err);
    else
        status = ft_error_set(err, FT_MEMORY, "no memory for batches of %u rows", options->rows);
    if (status == FT_OK) {
        summarise(result, latency_ns, options->batches);
        ft_row_reader_stats(reader, &result->stats);
        result->backend = ft_row_reader_backend(reader);
        result->table_bytes = ft_row_tables_bytes(tables);
        snprintf(result->note, sizeof result->note, "%s", ft_row_reader_note(reader));
    }
    free(latency_ns);
    free(buffer);
    free(wants);
    ft_row_reader_close(reader);
    return status;
}

static int measure_model(const struct options *options, struct result *result, struct ft_error *err)
{
    struct ft_checkpoint *checkpoint;
    struct ft_row_tables *tables;
    int status = ft_checkpoint_open(&checkpoint, options->model, err);
    if (status != FT_OK)
        return status;
    if (!ft_checkpoint_model(checkpoint)->ple_count)
        status =
            ft_error_set(err, FT_UNSUPPORTED, "%s: this model has no PLE tables; --file measures without one",
                         options->model);
    else
        status = ft_row_tables_open(&tables, checkpoint, err);
    if (status == FT_OK) {
        status = measure(options, tables, result, err);
        ft_row_tables_close(tables);
    }
    ft_checkpoint_close(checkpoint);
    return status;
}

static int measure_file(const struct options *options, struct result *result, struct ft_error *err)
{
    char path[4096];
    struct ft_row_tables *tables;
    const char *folder = getenv("TMPDIR");
    bool created = !options->file || access(options->file, F_OK) != 0;
    if (options->file)
        snprintf(path, sizeof path, "%s", options->file);
    else
        snprintf(path, sizeof path, "%s/ft-bench-ple-XXXXXX", folder && folder[0] ? folder : "/tmp");
    int status = created ? create_file(path, !options->file, options->bytes, err) : FT_OK;
    if (status != FT_OK)
        return status;
    status = ft_row_tables_open_file(&tables, path, options->row_bytes, err);
    if (status == FT_OK) {
        status = measure(options, tables, result, err);
        ft_row_tables_close(tables);
    }
    if (created)
        unlink(path);
    return status;
}

/* ---- the report ---- */

static void print_text(const struct options *options, const struct result *result)
{
    char size[32];
    double seconds = FT_MAX(1.0, (double)result->total_ns) / 1e9;
    printf("%u batches of %u rows from %s (%s)\n", options->batches, options->rows,
           ft_options_format_bytes(result->table_bytes, size, sizeof size),
           ft_io_backend_name(result->backend));
    printf("batch  %.1f us (best %.1f, median %.1f, 99%% below %.1f)\n", result->latency_ns_mean / 1e3,
           result->latency_ns_min / 1e3, result->latency_ns_p50 / 1e3, result->latency_ns_p99 / 1e3);
    printf("reads  %.0f per s, %.1f MB/s\n", (double)result->stats.reads / seconds,
           (double)result->stats.read_bytes / seconds / 1e6);
    if (result->note[0])
        printf("note: %s\n", result->note);
}

static void print_json(const struct options *options, const struct result *result)
{
    struct ft_json json;
    double seconds = FT_MAX(1.0, (double)result->total_ns) / 1e9;
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    ft_json_u64(&json, "table_bytes", result->table_bytes);
    ft_json_u64(&json, "batches", options->batches);
    ft_json_u64(&json, "rows", options->rows);
    ft_json_f64(&json, "batch_us_mean", result->latency_ns_mean / 1e3);
    ft_json_f64(&json, "batch_us_min", result->latency_ns_min / 1e3);
    ft_json_f64(&json, "batch_us_p50", result->latency_ns_p50 / 1e3);
    ft_json_f64(&json, "batch_us_p99", result->latency_ns_p99 / 1e3);
    ft_json_f64(&json, "rows_per_s", (double)result->stats.rows_wanted / seconds);
    ft_json_f64(&json, "reads_per_s", (double)result->stats.reads / seconds);
    ft_json_f64(&json, "read_bytes_per_s", (double)result->stats.read_bytes / seconds);
    ft_json_text(&json, "backend", ft_io_backend_name(result->backend));
    ft_json_text(&json, "note", result->note);
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

int ft_bench_ple(int argc, char **argv)
{
    struct options options = {
        .bytes = 256ull << 20, .row_bytes = 160, .rows = 16, .batches = 2000, .seed = 1};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options}};
    const struct ft_option_set set = {
        "ft bench ple",
        "[--model DIR | --file F] [options]",
        "Reads batches of random rows in place from disk, as a decode step does.",
        groups,
        1,
        0};
    struct result result = {0};
    struct ft_option_rest rest;
    struct ft_error err;
    int exit_code;
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    int status;
    if (options.model && options.file)
        status = ft_error_set(&err, FT_USAGE, "give either --model or --file");
    else if (options.bytes < options.row_bytes)
        status = ft_error_set(&err, FT_USAGE, "--bytes: a table needs one row of %u bytes at least",
                              options.row_bytes);
    else
        status = (options.model ? measure_model : measure_file)(&options, &result, &err);
    if (status != FT_OK)
        return ft_command_fail(&err);
    (options.json ? print_json : print_text)(&options, &result);
    return ft_command_finish(FT_EXIT_OK);
}
