/* SPDX-License-Identifier: Apache-2.0 */
#include "io/bench_io.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define PLAIN_BYTES (1u << 20)
#define WRITE_BYTES (4u << 20)
#define SPARE_BYTES (256ull << 20) /* left free on the disk */
#define CURVE_SECONDS 0.1
#define CURVE_ROUNDS 3u /* the best counts: other guests of the disk only make it slower */
#define CURVE_BLOCK 4096u
#define CURVE_DEPTH_MAX (1u << (FT_BENCH_DEPTHS - 1))
#define STEP_TIMEOUT_NS 10000000000ull

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void drop_cache(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

/* ---- loading ---- */

static int plain_read_file(const char *path, char *buffer, uint64_t *bytes, struct ft_error *err)
{
    struct ft_file file;
    int status = ft_file_open(&file, path, true, err);
    if (status)
        return status;
    for (uint64_t at = 0; at < file.bytes && status == FT_OK;) {
        ssize_t got = pread(file.fd, buffer, PLAIN_BYTES, (off_t)at);
        if (got > 0)
            at += (uint64_t)got;
        else if (got == 0 || errno != EINTR)
            status = ft_error_set(err, FT_IO, "%s: read at %llu failed: %s", path, (unsigned long long)at,
                                  got == 0 ? "the file became shorter" : strerror(errno));
    }
    *bytes += file.bytes;
    ft_file_close(&file);
    return status;
}

static void drop_all(const struct ft_checkpoint *checkpoint)
{
    for (uint32_t i = 0; i < ft_checkpoint_file_count(checkpoint); i++)
        drop_cache(ft_checkpoint_file_path(checkpoint, i));
}

static int plain_round(const struct ft_checkpoint *checkpoint, char *buffer, struct ft_bench_load *result,
                       struct ft_error *err)
{
    drop_all(checkpoint);
    uint64_t bytes = 0;
    double begin = now_s();
    for (uint32_t i = 0; i < ft_checkpoint_file_count(checkpoint); i++) {
        int status = plain_read_file(ft_checkpoint_file_path(checkpoint, i), buffer, &bytes, err);
        if (status)
            return status;
    }
    result->plain_bytes = bytes;
    result->plain_bytes_per_s = FT_MAX(result->plain_bytes_per_s, (double)bytes / (now_s() - begin));
    return FT_OK;
}

static int load_round(const struct ft_checkpoint *checkpoint, const struct ft_load_options *options,
                      struct ft_bench_load *result, struct ft_error *err)
{
    struct ft_loaded loaded;
    struct ft_load_stats stats;
    drop_all(checkpoint);
    int status = ft_load(checkpoint, options, &loaded, &stats, err);
    if (status)
        return status;
    ft_loaded_fini(&loaded);
    double rate = (double)stats.bytes / (1e-9 * (double)stats.ns);
    if (rate > result->load_bytes_per_s) {
        result->load_bytes = stats.bytes;
        result->load_bytes_per_s = rate;
        result->stats = stats;
    }
    return FT_OK;
}

int ft_bench_load(const struct ft_checkpoint *checkpoint, const struct ft_load_options *options,
                  uint32_t rounds, struct ft_bench_load *result, struct ft_error *err)
{
    *result = (struct ft_bench_load){0};
    void *buffer = NULL;
    if (posix_memalign(&buffer, PLAIN_BYTES, PLAIN_BYTES))
        return ft_error_set(err, FT_MEMORY, "bench load: no memory for a buffer");
    memset(buffer, 0, PLAIN_BYTES);
    int status = FT_OK;
    for (uint32_t i = 0; i < (rounds ? rounds : 3) && status == FT_OK; i++) {
        status = plain_round(checkpoint, buffer, result, err);
        if (status == FT_OK)
            status = load_round(checkpoint, options, result, err);
    }
    if (status == FT_OK)
        result->fraction = result->load_bytes_per_s / result->plain_bytes_per_s;
    free(buffer);
    return status;
}

/* ---- a table whose rows can be checked ---- */

/* splitmix64 (Steele, Lea, Flood 2014): a row is the stream that begins at its number. */
static uint64_t mix_next(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

static void fill_row(unsigned char *row, uint32_t row_bytes, uint64_t number)
{
    uint64_t state = number * 0xD1342543DE82EF95ull + row_bytes;
    for (uint32_t i = 0; i < row_bytes; i += 8) {
        uint64_t word = mix_next(&state);
        memcpy(row + i, &word, FT_MIN(8u, row_bytes - i));
    }
    for (uint32_t i = 0; i < row_bytes; i++)
        if ((row[i] & 0x7f) == 0x7f)
            row[i]--; /* not NaN as e4m3: the engine can run on such a table */
}

static int check_space(const char *path, uint64_t bytes, struct ft_error *err)
{
    char *dir = strdup(path);
    if (!dir)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for its name", path);
    char *slash = strrchr(dir, '/');
    if (slash)
        slash[slash == dir] = '\0';
    struct statvfs info;
    int status = FT_OK;
    if (statvfs(slash ? dir : ".", &info) != 0) {
        status = ft_error_set(err, FT_IO, "%s: %s", slash ? dir : ".", strerror(errno));
    } else {
        uint64_t available = (uint64_t)info.f_bavail * info.f_frsize;
        if (available < SPARE_BYTES || available - SPARE_BYTES < bytes)
            status = ft_error_set(
                err, FT_IO,
                "%s: the table takes %llu MiB (and %llu MiB are left free), the disk has %llu MiB: "
                "name a path on another disk or a smaller table",
                path, (unsigned long long)(bytes >> 20), (unsigned long long)(SPARE_BYTES >> 20),
                (unsigned long long)(available >> 20));
    }
    free(dir);
    return status;
}

static int write_rows(int fd, const struct ft_bench_ple_options *options, uint64_t row_count,
                      unsigned char *buffer, struct ft_error *err)
{
    uint64_t per_buffer = FT_MAX(WRITE_BYTES / options->row_bytes, 1u),
             total = row_count * options->row_bytes;
    for (uint64_t row = 0; row < row_count; row += per_buffer) {
        uint64_t count = FT_MIN(per_buffer, row_count - row), bytes = count * options->row_bytes;
        for (uint64_t i = 0; i < count; i++)
            fill_row(buffer + i * options->row_bytes, options->row_bytes, row + i);
        for (uint64_t done = 0; done < bytes;) {
            ssize_t put = write(fd, buffer + done, bytes - done);
            if (put > 0)
                done += (uint64_t)put;
            else if (put == 0 || errno != EINTR)
                return ft_error_set(err, FT_IO, "%s: write failed: %s", options->path, strerror(errno));
        }
        if (options->progress &&
            !options->progress(options->progress_context, row * options->row_bytes + bytes, total))
            return ft_error_set(err, FT_CANCELLED, "%s: writing was cancelled", options->path);
    }
    if (fsync(fd) != 0)
        return ft_error_set(err, FT_IO, "%s: fsync failed: %s", options->path, strerror(errno));
    return FT_OK;
}

/* A file of the right length whose first and last row are ours is taken as it is; every row read is checked anyway. */
static bool table_is_there(const struct ft_bench_ple_options *options, uint64_t row_count, unsigned char *row)
{
    int fd = open(options->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    struct stat info;
    uint32_t bytes = options->row_bytes;
    bool good = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size == row_count * bytes;
    for (int i = 0; i < 2 && good; i++) {
        uint64_t number = i ? row_count - 1 : 0;
        fill_row(row + bytes, bytes, number);
        good = pread(fd, row, bytes, (off_t)(number * bytes)) == (ssize_t)bytes &&
               memcmp(row, row + bytes, bytes) == 0;
    }
    close(fd);
    return good;
}

/* A file without a name in the table's folder, where the file system has such: whoever is killed while it writes leaves
 * nothing. Otherwise the table by its name. -1: errno. A file that is not ours is never overwritten. */
static int create_table(const char *path, bool *nameless)
{
    char folder[4096] = ".";
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) + 1 : 0;
    if (slash && length < sizeof folder) {
        memcpy(folder, path, length);
        folder[length] = '\0';
    }
    *nameless = length < sizeof folder && access(path, F_OK) != 0;
    int fd = *nameless ? open(folder, O_WRONLY | O_TMPFILE | O_CLOEXEC, 0644) : -1;
    if (fd >= 0)
        return fd;
    *nameless = false;
    return open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
}

static int name_table(const char *path, int fd, struct ft_error *err)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (linkat(AT_FDCWD, link, AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0)
        return FT_OK;
    return ft_error_set(err, FT_IO, "%s: the table cannot be given its name: %s", path, strerror(errno));
}

static int make_table(const struct ft_bench_ple_options *options, uint64_t row_count, bool *made,
                      struct ft_error *err)
{
    *made = false;
    unsigned char *buffer = malloc(FT_MAX(WRITE_BYTES, 2 * (size_t)options->row_bytes));
    if (!buffer)
        return ft_error_set(err, FT_MEMORY, "bench ple: no memory for a buffer");
    int status = FT_OK;
    if (!table_is_there(options, row_count, buffer)) {
        status = check_space(options->path, row_count * options->row_bytes, err);
        bool nameless;
        int fd = status ? -1 : create_table(options->path, &nameless);
        if (fd >= 0) {
            *made = !nameless;
            status = write_rows(fd, options, row_count, buffer, err);
            if (status == FT_OK && nameless)
                status = name_table(options->path, fd, err);
            *made |= status == FT_OK;
            close(fd);
        } else if (status == FT_OK) {
            status =
                ft_error_set(err, FT_IO, "%s: cannot be made: %s%s", options->path, strerror(errno),
                             errno == EEXIST ? " and is not this table: remove it or name another path" : "");
        }
    }
    free(buffer);
    return status;
}

/* ---- reading rows as steps do ---- */

static int compare_doubles(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static int verify_step(const struct ft_bench_ple_options *options, const struct ft_row_want *wants,
                       unsigned char *wanted, struct ft_error *err)
{
    for (uint32_t i = 0; i < options->rows_per_step; i++) {
        fill_row(wanted, options->row_bytes, wants[i].row);
        if (memcmp(wanted, wants[i].destination, options->row_bytes) != 0)
            return ft_error_set(err, FT_MISMATCH,
                                "%s: row %llu is not what was written: the disk, its driver or ft "
                                "is wrong",
                                options->path, (unsigned long long)wants[i].row);
    }
    return FT_OK;
}

#define STEPS_BETWEEN_LOOKS 16u /* of whether the caller still wants this */

static int run_steps(const struct ft_bench_ple_options *options, struct ft_row_reader *reader,
                     struct ft_row_want *wants, unsigned char *wanted, double *latencies,
                     struct ft_bench_ple *result, struct ft_error *err)
{
    uint64_t state = 42;
    double sum = 0;
    for (uint32_t step = 0; step < options->steps; step++) {
        for (uint32_t i = 0; i < options->rows_per_step; i++)
            wants[i].row = mix_next(&state) % result->row_count;
        if (options->progress && step % STEPS_BETWEEN_LOOKS == 0 &&
            !options->progress(options->progress_context, options->file_bytes, options->file_bytes))
            return ft_error_set(err, FT_CANCELLED, "%s: reading was cancelled", options->path);
        double begin = now_s();
        int status = ft_row_reader_submit(reader, wants, options->rows_per_step, err);
        if (status == FT_OK)
            status = ft_row_reader_wait(reader, STEP_TIMEOUT_NS, err);
        latencies[step] = now_s() - begin;
        if (status == FT_OK)
            status = verify_step(options, wants, wanted, err);
        if (status)
            return status;
        result->rows_verified += options->rows_per_step;
        sum += latencies[step];
    }
    qsort(latencies, options->steps, sizeof *latencies, compare_doubles);
    result->latency_p50_s = latencies[options->steps / 2];
    result->latency_p99_s = latencies[(uint64_t)options->steps * 99 / 100];
    result->latency_max_s = latencies[options->steps - 1];
    result->latency_mean_s = sum / options->steps;
    return FT_OK;
}

static int measure_steps(const struct ft_bench_ple_options *options, const struct ft_row_tables *tables,
                         struct ft_bench_ple *result, struct ft_error *err)
{
    struct ft_row_reader *reader = NULL;
    struct ft_row_reader_options reader_options = {
        .backend = FT_ROWS_DISK, .io_backend = options->backend, .rows_max = options->rows_per_step};
    int status = ft_row_reader_open(&reader, tables, &reader_options, err);
    if (status)
        return status;
    struct ft_row_want *wants = calloc(options->rows_per_step, sizeof *wants);
    unsigned char *rows = malloc(((size_t)options->rows_per_step + 1) * options->row_bytes);
    double *latencies = calloc(options->steps, sizeof *latencies);
    if (!wants || !rows || !latencies) {
        status = ft_error_set(err, FT_MEMORY, "bench ple: no memory for %u steps of %u rows", options->steps,
                              options->rows_per_step);
    } else {
        for (uint32_t i = 0; i < options->rows_per_step; i++)
            wants[i].destination = rows + ((size_t)i + 1) * options->row_bytes;
        status = run_steps(options, reader, wants, rows, latencies, result, err);
    }
    ft_row_reader_stats(reader, &result->rows);
    result->backend = ft_row_reader_backend(reader);
    snprintf(result->note, sizeof result->note, "%s", ft_row_reader_note(reader));
    ft_row_reader_close(reader);
    free(wants);
    free(rows);
    free(latencies);
    return status;
}

/* ---- the disk's own curve ---- */

static int curve_point(struct ft_reader *reader, char *buffer, uint32_t depth, uint64_t block_count,
                       double *iops, struct ft_error *err)
{
    uint64_t state = depth, finished = 0;
    double begin = now_s(), passed = 0;
    struct ft_read_done done[CURVE_DEPTH_MAX];
    uint32_t count = depth, in_flight = 0, accepted;
    for (uint32_t i = 0; i < depth; i++)
        done[i].tag = i;
    while (count || in_flight) { /* a finished slot is sent out again until time is up */
        struct ft_read reads[CURVE_DEPTH_MAX];
        bool more = passed < CURVE_SECONDS;
        for (uint32_t i = 0; i < count && more; i++)
            reads[i] = (struct ft_read){.offset = mix_next(&state) % block_count * CURVE_BLOCK,
                                        .bytes = CURVE_BLOCK,
                                        .destination = buffer + done[i].tag * CURVE_BLOCK,
                                        .tag = done[i].tag};
        int status = count && more ? ft_reader_submit(reader, reads, count, &accepted, err) : FT_OK;
        in_flight += more ? count : 0;
        count = 0;
        if (status == FT_OK && in_flight)
            status = ft_reader_wait(reader, done, depth, 1, STEP_TIMEOUT_NS, &count, err);
        if (status)
            return status;
        for (uint32_t i = 0; i < count; i++)
            if (done[i].result != CURVE_BLOCK)
                return ft_error_set(err, FT_IO, "a random read of 4 KiB gave %lld",
                                    (long long)done[i].result);
        in_flight -= count;
        finished += count;
        passed = now_s() - begin;
    }
    *iops = (double)finished / passed;
    return FT_OK;
}

static int measure_curve(const struct ft_bench_ple_options *options, const char *path,
                         struct ft_bench_ple *result, struct ft_error *err)
{
    struct ft_file file;
    struct ft_reader *reader = NULL;
    void *buffer = NULL;
    uint32_t index;
    int status = ft_file_open(&file, path, true, err);
    if (status)
        return status;
    result->direct = file.direct;
    if (posix_memalign(&buffer, FT_MAX(file.memory_align, 4096u), CURVE_DEPTH_MAX * CURVE_BLOCK))
        status = ft_error_set(err, FT_MEMORY, "bench ple: no memory for %u blocks", CURVE_DEPTH_MAX);
    else if (file.offset_align > CURVE_BLOCK || file.bytes < CURVE_BLOCK)
        status = ft_error_set(err, FT_UNSUPPORTED, "%s: a block of %u bytes cannot be read alone", path,
                              CURVE_BLOCK);
    struct ft_reader_options io = {.backend = options->backend,
                                   .depth = CURVE_DEPTH_MAX,
                                   .file_count_max = 1,
                                   .buffer = buffer,
                                   .buffer_bytes = CURVE_DEPTH_MAX * CURVE_BLOCK,
                                   .pread_threads = 8};
    if (status == FT_OK)
        status = ft_reader_open(&reader, &io, err);
    if (status == FT_OK)
        status = ft_reader_add_file(reader, file.fd, &index, err);
    for (uint32_t i = 0; i < FT_BENCH_DEPTHS * CURVE_ROUNDS && status == FT_OK; i++) {
        double iops = 0, *best = &result->curve_iops[i / CURVE_ROUNDS];
        status = curve_point(reader, buffer, 1u << i / CURVE_ROUNDS, file.bytes / CURVE_BLOCK, &iops, err);
        *best = FT_MAX(*best, iops);
    }
    ft_reader_close(reader); /* before the buffer goes */
    free(buffer);
    ft_file_close(&file);
    return status ? ft_error_prepend(err, "%s", path) : FT_OK;
}

int ft_bench_ple(const struct ft_bench_ple_options *given, struct ft_bench_ple *result, struct ft_error *err)
{
    struct ft_bench_ple_options options = *given;
    options.file_bytes = options.file_bytes ? options.file_bytes : 4ull << 30;
    options.row_bytes = options.row_bytes ? options.row_bytes : 160;
    options.rows_per_step = options.rows_per_step ? options.rows_per_step : 16;
    options.steps = options.steps ? options.steps : 2000;
    *result = (struct ft_bench_ple){.row_count = options.file_bytes / options.row_bytes};
    result->file_bytes = result->row_count * options.row_bytes;
    if (result->row_count == 0)
        return ft_error_set(err, FT_USAGE, "bench ple: a table of %llu bytes holds no row of %u",
                            (unsigned long long)options.file_bytes, options.row_bytes);
    struct ft_row_tables *tables = NULL;
    int status = make_table(&options, result->row_count, &result->made, err);
    if (status == FT_OK) {
        drop_cache(options.path);
        status = ft_row_tables_open_file(&tables, options.path, options.row_bytes, err);
    }
    if (status == FT_OK)
        status = measure_steps(&options, tables, result, err);
    if (status == FT_OK)
        status = measure_curve(&options, options.path, result, err);
    ft_row_tables_close(tables);
    if (result->made && (status || !options.keep))
        (void)unlink(options.path);
    return status;
}
