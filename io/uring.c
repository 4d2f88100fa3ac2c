/* SPDX-License-Identifier: Apache-2.0 */
#include "io/uring.h"
#include "io/pread_pool.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define DEPTH_MAX 4096u
#define PROBE_TIMEOUT_NS 2000000000ull /* a ring that cannot finish a no-op in this time is not used */
#define CLOSE_TIMEOUT_NS                                                                                     \
    60000000000ull                  /* reads in flight write to the caller's memory: close waits for them */
#define FIXED_BYTES_MIN (64u << 10) /* a smaller registration is not worth its name */
#define SUBMIT_RETRIES_MAX 100u

struct reader_file {
    int fd;
    bool direct;
    uint64_t bytes;
};

struct ft_reader {
    enum ft_io_backend backend;
    uint32_t depth, in_flight;
    uint32_t file_count, file_count_max;
    struct reader_file *files; /* [file_count_max] */
    char note[256];

    struct ft_pread_pool *pool;      /* pread backend */
    struct ft_read_progress *staged; /* [depth] pread: one batch on its way to the pool */

    struct io_uring ring; /* uring backend */
    bool ring_open, fixed_files, broken;
    bool ring_defers; /* completions come in when this thread enters the kernel */
    bool ring_tells;  /* ... and a flag in memory says when that is worth it: looking costs no system call */
    const char *fixed_buffer; /* registered range */
    uint64_t fixed_bytes;
    bool fixed_whole;               /* all of the caller's buffer is registered */
    struct ft_read_progress *slots; /* [depth] */
    uint32_t *slots_free;           /* [depth] stack */
    uint32_t slots_free_count;
    uint32_t queued; /* entries prepared and not yet taken by the kernel */
};

const char *ft_io_backend_name(enum ft_io_backend backend)
{
    static const char *const names[FT_IO_BACKEND_COUNT] = {"auto", "io_uring", "pread"};
    return backend < FT_IO_BACKEND_COUNT ? names[backend] : "?";
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static struct __kernel_timespec timespec_of(uint64_t ns)
{
    return (struct __kernel_timespec){.tv_sec = (long long)(ns / 1000000000u),
                                      .tv_nsec = (long long)(ns % 1000000000u)};
}

/* ---- opening a ring ---- */

/* Newest first: what an older kernel does not know is EINVAL. */
static int ring_setup(struct ft_reader *reader)
{
    static const unsigned flag_sets[] = {
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
#endif
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_COOP_TASKRUN)
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN,
#endif
        0,
    };
    int status = -EINVAL;
    for (size_t i = 0; i < sizeof flag_sets / sizeof flag_sets[0] && status == -EINVAL; i++) {
        struct io_uring_params params = {.flags = flag_sets[i]};
        status = io_uring_queue_init_params(reader->depth, &reader->ring, &params);
#ifdef IORING_SETUP_DEFER_TASKRUN
        reader->ring_defers = flag_sets[i] & IORING_SETUP_DEFER_TASKRUN;
        reader->ring_tells = flag_sets[i] & IORING_SETUP_TASKRUN_FLAG;
#endif
    }
    reader->ring_open = status == 0;
    return status;
}

static bool sysctl_disables_uring(void)
{
    int fd = open("/proc/sys/kernel/io_uring_disabled", O_RDONLY | O_CLOEXEC);
    char value = '0';
    if (fd >= 0) {
        if (read(fd, &value, 1) != 1)
            value = '0';
        close(fd);
    }
    return value != '0';
}

/* One line: what refused, what is done instead, how to allow it. */
static void note_refusal(struct ft_reader *reader, int number)
{
    const char *why, *remedy;
    if (number == EPERM && sysctl_disables_uring()) {
        why = "sysctl kernel.io_uring_disabled forbids it";
        remedy = "sysctl -w kernel.io_uring_disabled=0";
    } else if (number == EPERM || number == EACCES) {
        why = "a seccomp filter (the default of containers) or a security module forbids it";
        remedy = "run the container with a seccomp profile that allows io_uring_setup, io_uring_enter and "
                 "io_uring_register";
    } else if (number == ENOMEM) {
        why = "the limit on locked memory is too low";
        remedy = "raise ulimit -l";
    } else if (number == ETIME) {
        why = "a ring was made but does not finish a no-op";
        remedy = "ask the sandbox's vendor, or use the pread backend by choice";
    } else {
        why = "the kernel lacks it";
        remedy = "use Linux 5.6 or newer with io_uring built in";
    }
    snprintf(reader->note, sizeof reader->note, "io_uring refused (%s): %s; reading by pread. Remedy: %s",
             strerror(number), why, remedy);
}

/* Does the kernel know the reads that are submitted? io_uring_get_probe_ring would hide why it could not ask. */
static int ring_probe_reads(struct ft_reader *reader)
{
    enum { OPS = 256 }; /* an opcode has 8 bits */
    struct io_uring_probe *probe = calloc(1, sizeof *probe + OPS * sizeof probe->ops[0]);
    if (!probe)
        return -ENOMEM;
    int status = io_uring_register_probe(&reader->ring, probe, OPS);
    bool can_read = status >= 0 && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                    io_uring_opcode_supported(probe, IORING_OP_READ_FIXED);
    free(probe);
    if (can_read)
        return 0;
    return status < 0 && status != -EINVAL ? status : -ENOSYS;
}

/* A ring that was granted may still do nothing (sandboxes): one no-op must come back in bounded time. */
static int ring_probe(struct ft_reader *reader)
{
    int refused = ring_probe_reads(reader);
    if (refused)
        return refused;
    struct io_uring_sqe *entry = io_uring_get_sqe(&reader->ring);
    if (!entry)
        return -EINVAL;
    io_uring_prep_nop(entry);
    io_uring_sqe_set_data64(entry, UINT64_MAX);
    int submitted = io_uring_submit(&reader->ring);
    if (submitted < 0)
        return submitted;
    uint64_t deadline = now_ns() + PROBE_TIMEOUT_NS;
    for (;;) {
        uint64_t now = now_ns();
        struct io_uring_cqe *done = NULL;
        struct __kernel_timespec left = timespec_of(now < deadline ? deadline - now : 0);
        int status = io_uring_wait_cqe_timeout(&reader->ring, &done, &left);
        if (status == 0) {
            io_uring_cqe_seen(&reader->ring, done);
            return 0;
        }
        if (status != -EINTR && status != -EAGAIN)
            return status;
    }
}

/*
 * Locked memory is short (8 MiB is common): when the whole buffer is refused, its first half is tried, and so
 * on. Reads that lie in the registered part use it, the others do without.
 */
static void ring_register_buffer(struct ft_reader *reader, const struct ft_reader_options *options)
{
    int status = 0;
    for (uint64_t bytes = options->buffer_bytes; bytes; bytes /= 2) {
        if (bytes < FIXED_BYTES_MIN && bytes != options->buffer_bytes)
            break;
        struct iovec range = {.iov_base = options->buffer, .iov_len = (size_t)bytes};
        status = io_uring_register_buffers(&reader->ring, &range, 1);
        if (status == 0) {
            reader->fixed_buffer = options->buffer;
            reader->fixed_bytes = bytes;
            reader->fixed_whole = bytes == options->buffer_bytes;
            break;
        }
        if (status != -ENOMEM && status != -EPERM)
            break;
    }
    if (!reader->fixed_whole)
        snprintf(reader->note, sizeof reader->note,
                 "registered %llu of %llu KiB of read buffers (%s): a little more CPU time per read. Remedy: "
                 "raise "
                 "ulimit -l",
                 (unsigned long long)(reader->fixed_bytes >> 10),
                 (unsigned long long)(options->buffer_bytes >> 10), strerror(-status));
}

/* An empty table, filled file by file; where it is refused plain descriptors do. */
static void ring_register_files(struct ft_reader *reader)
{
    int *none = malloc(reader->file_count_max * sizeof *none);
    if (!none)
        return;
    for (uint32_t i = 0; i < reader->file_count_max; i++)
        none[i] = -1;
    reader->fixed_files = io_uring_register_files(&reader->ring, none, reader->file_count_max) == 0;
    free(none);
}

static int ring_open(struct ft_reader *reader, const struct ft_reader_options *options)
{
    int status = ring_setup(reader);
    if (status == 0)
        status = ring_probe(reader);
    if (status) {
        if (reader->ring_open)
            io_uring_queue_exit(&reader->ring);
        reader->ring_open = false;
        note_refusal(reader, -status);
        return status;
    }
    ring_register_files(reader);
    if (options->buffer && options->buffer_bytes)
        ring_register_buffer(reader, options);
    reader->backend = FT_IO_URING;
    return 0;
}

/* FT_IO_BACKEND lets a test, or a user with a broken kernel, choose without touching every command's options. */
static enum ft_io_backend backend_of(const struct ft_reader_options *options)
{
    const char *forced = options->backend == FT_IO_AUTO ? getenv("FT_IO_BACKEND") : NULL;
    for (int b = FT_IO_URING; forced && b < FT_IO_BACKEND_COUNT; b++)
        if (strcmp(forced, ft_io_backend_name((enum ft_io_backend)b)) == 0)
            return (enum ft_io_backend)b;
    return options->backend;
}

static int reader_alloc(struct ft_reader *reader, struct ft_error *err)
{
    reader->files = calloc(reader->file_count_max, sizeof *reader->files);
    reader->slots = calloc(reader->depth, sizeof *reader->slots);
    reader->staged = calloc(reader->depth, sizeof *reader->staged);
    reader->slots_free = calloc(reader->depth, sizeof *reader->slots_free);
    if (!reader->files || !reader->slots || !reader->staged || !reader->slots_free)
        return ft_error_set(err, FT_MEMORY, "reader: no memory for a depth of %u and %u files", reader->depth,
                            reader->file_count_max);
    for (uint32_t i = 0; i < reader->depth; i++)
        reader->slots_free[reader->slots_free_count++] = reader->depth - 1 - i;
    return FT_OK;
}

static int reader_choose(struct ft_reader *reader, const struct ft_reader_options *options,
                         struct ft_error *err)
{
    enum ft_io_backend wanted = backend_of(options);
    if (wanted != FT_IO_PREAD && ring_open(reader, options) == 0)
        return FT_OK;
    if (wanted == FT_IO_URING)
        return ft_error_set(err, FT_SYSTEM, "%s (or choose the pread backend)", reader->note);
    reader->backend = FT_IO_PREAD;
    if (wanted == FT_IO_PREAD)
        snprintf(reader->note, sizeof reader->note, "reading by pread, as asked");
    return ft_pread_pool_open(&reader->pool, reader->depth, options->pread_threads, err);
}

int ft_reader_open(struct ft_reader **out, const struct ft_reader_options *options, struct ft_error *err)
{
    *out = NULL;
    if (options->depth == 0 || options->depth > DEPTH_MAX || options->file_count_max == 0)
        return ft_error_set(err, FT_USAGE,
                            "reader: depth %u and %u files; wanted a depth of 1 to %u and a file",
                            options->depth, options->file_count_max, DEPTH_MAX);
    struct ft_reader *reader = calloc(1, sizeof *reader);
    if (!reader)
        return ft_error_set(err, FT_MEMORY, "reader: no memory");
    reader->depth = options->depth;
    reader->file_count_max = options->file_count_max;
    int status = reader_alloc(reader, err);
    if (status == FT_OK)
        status = reader_choose(reader, options, err);
    if (status) {
        ft_reader_close(reader);
        return status;
    }
    *out = reader;
    return FT_OK;
}

void ft_reader_close(struct ft_reader *reader)
{
    if (!reader)
        return;
    uint64_t deadline = now_ns() + CLOSE_TIMEOUT_NS;
    while (reader->ring_open && reader->in_flight > 0 && !reader->broken && now_ns() < deadline) {
        struct ft_read_done done[16];
        struct ft_error err;
        uint32_t count;
        int status = ft_reader_wait(reader, done, 16, 1, 1000000000u, &count, &err);
        if (status != FT_OK && status != FT_TIMEOUT)
            break;
    }
    if (reader->ring_open)
        io_uring_queue_exit(&reader->ring);
    ft_pread_pool_close(reader->pool);
    free(reader->files);
    free(reader->slots);
    free(reader->staged);
    free(reader->slots_free);
    free(reader);
}

int ft_reader_add_file(struct ft_reader *reader, int fd, uint32_t *file, struct ft_error *err)
{
    *file = FT_NONE;
    if (reader->file_count == reader->file_count_max)
        return ft_error_set(err, FT_LIMIT, "reader: %u files are open, that is its limit",
                            reader->file_count);
    struct stat info;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fstat(fd, &info) != 0)
        return ft_error_set(err, FT_IO, "reader: descriptor %d: %s", fd, strerror(errno));
    if (reader->fixed_files) {
        int status = io_uring_register_files_update(&reader->ring, reader->file_count, &fd, 1);
        if (status < 0)
            return ft_error_set(err, FT_SYSTEM, "reader: descriptor %d cannot be registered: %s", fd,
                                strerror(-status));
    }
    reader->files[reader->file_count] = (struct reader_file){
        .fd = fd, .direct = (flags & O_DIRECT) != 0, .bytes = (uint64_t)FT_MAX(info.st_size, 0)};
    *file = reader->file_count++;
    return FT_OK;
}

/* ---- submitting and reaping on a ring ---- */

static bool in_fixed_buffer(const struct ft_reader *reader, const void *destination, uint64_t bytes)
{
    uintptr_t at = (uintptr_t)destination, base = (uintptr_t)reader->fixed_buffer;
    return reader->fixed_bytes && at >= base && at - base <= reader->fixed_bytes &&
           bytes <= reader->fixed_bytes - (at - base);
}

/* The submission queue holds depth entries and at most depth reads are in flight, so an entry is always there. */
static void ring_prepare(struct ft_reader *reader, uint32_t slot, uint32_t file)
{
    const struct ft_read_progress *progress = &reader->slots[slot];
    struct io_uring_sqe *entry = io_uring_get_sqe(&reader->ring);
    FT_ASSERT_TRUE(entry);
    int fd = reader->fixed_files ? (int)file : progress->fd;
    void *destination = ft_read_progress_destination(progress);
    uint32_t bytes = ft_read_progress_bytes(progress);
    if (progress->read.buffer == 0 && in_fixed_buffer(reader, destination, bytes))
        io_uring_prep_read_fixed(entry, fd, destination, bytes, ft_read_progress_offset(progress), 0);
    else
        io_uring_prep_read(entry, fd, destination, bytes, ft_read_progress_offset(progress));
    if (reader->fixed_files)
        io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(entry, slot);
    reader->queued++;
}

static int ring_flush(struct ft_reader *reader, struct ft_error *err)
{
    uint32_t retries = 0;
    while (reader->queued) {
        int taken = io_uring_submit(&reader->ring);
        if (taken > 0)
            reader->queued -= FT_MIN((uint32_t)taken, reader->queued);
        else if ((taken == -EINTR || taken == -EAGAIN || taken == -EBUSY || taken == 0) &&
                 ++retries <= SUBMIT_RETRIES_MAX)
            (void)nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL); /* the kernel is short of memory */
        else {
            reader->broken =
                true; /* what was prepared may still be submitted later: nothing can be trusted */
            return ft_error_set(err, FT_SYSTEM, "io_uring: submitting failed: %s",
                                taken == -EEXIST ? "the ring belongs to the thread that opened it"
                                                 : strerror(-taken));
        }
    }
    return FT_OK;
}

static uint32_t ring_reap(struct ft_reader *reader, struct ft_read_done *done, uint32_t cap)
{
    uint32_t count = 0;
    struct io_uring_cqe *entry;
    while (count < cap && io_uring_peek_cqe(&reader->ring, &entry) == 0) {
        uint32_t slot = (uint32_t)io_uring_cqe_get_data64(entry);
        int64_t outcome = entry->res, result;
        io_uring_cqe_seen(&reader->ring, entry);
        struct ft_read_progress *progress = &reader->slots[slot];
        if (!ft_read_progress_step(progress, outcome, &result)) {
            ring_prepare(reader, slot, progress->read.file);
            continue;
        }
        done[count++] = (struct ft_read_done){.tag = progress->read.tag, .result = result};
        reader->slots_free[reader->slots_free_count++] = slot;
        reader->in_flight--;
    }
    return count;
}

static int ring_wait(struct ft_reader *reader, struct ft_read_done *done, uint32_t cap, uint32_t wanted,
                     uint64_t timeout_ns, uint32_t *count, struct ft_error *err)
{
    uint64_t begin = now_ns();
    for (;;) {
        *count += ring_reap(reader, done + *count, cap - *count);
        int status = ring_flush(reader, err); /* rests of short reads */
        if (status || *count >= wanted)
            return status;
        uint64_t passed = now_ns() - begin;
        if (passed >= timeout_ns)
            return ft_error_set(err, FT_TIMEOUT, "io_uring: %u of %u reads finished in %llu ms", *count,
                                wanted, (unsigned long long)(timeout_ns / 1000000u));
        struct __kernel_timespec left = timespec_of(timeout_ns - passed);
        struct io_uring_cqe *entry = NULL;
        status = io_uring_wait_cqes(&reader->ring, &entry, wanted - *count, &left, NULL);
        if (status != 0 && status != -ETIME && status != -EINTR && status != -EAGAIN) {
            reader->broken = true;
            return ft_error_set(err, FT_SYSTEM, "io_uring: waiting failed: %s",
                                status == -EEXIST ? "the ring belongs to the thread that opened it"
                                                  : strerror(-status));
        }
    }
}

/* ---- both backends ---- */

static int check_read(const struct ft_reader *reader, const struct ft_read *read, struct ft_error *err)
{
    if (read->file >= reader->file_count || read->bytes == 0 || read->bytes > INT32_MAX ||
        read->offset > INT64_MAX - (uint64_t)INT32_MAX)
        return ft_error_set(err, FT_INTERNAL,
                            "reader: file %u of %u, offset %llu, %u bytes is no possible read", read->file,
                            reader->file_count, (unsigned long long)read->offset, read->bytes);
    return FT_OK;
}

int ft_reader_submit(struct ft_reader *reader, const struct ft_read *reads, uint32_t count,
                     uint32_t *accepted, struct ft_error *err)
{
    *accepted = 0;
    if (reader->broken)
        return ft_error_set(err, FT_SYSTEM,
                            "io_uring: an earlier call failed, the reader must be opened again");
    uint32_t room = FT_MIN(count, reader->depth - reader->in_flight);
    for (uint32_t i = 0; i < room; i++) { /* all or nothing is queued */
        int status = check_read(reader, &reads[i], err);
        if (status)
            return status;
    }
    for (uint32_t i = 0; i < room; i++) {
        const struct reader_file *file = &reader->files[reads[i].file];
        struct ft_read_progress *progress = &reader->staged[i];
        uint32_t slot = FT_NONE;
        if (reader->backend == FT_IO_URING) {
            slot = reader->slots_free[--reader->slots_free_count];
            progress = &reader->slots[slot];
        }
        ft_read_progress_init(progress, &reads[i], file->fd, file->direct, file->bytes);
        if (slot != FT_NONE)
            ring_prepare(reader, slot, reads[i].file);
    }
    reader->in_flight += room;
    *accepted = room;
    if (reader->backend == FT_IO_URING)
        return ring_flush(reader, err);
    ft_pread_pool_submit(reader->pool, reader->staged, room);
    return FT_OK;
}

int ft_reader_wait(struct ft_reader *reader, struct ft_read_done *done, uint32_t cap, uint32_t wanted,
                   uint64_t timeout_ns, uint32_t *count, struct ft_error *err)
{
    *count = 0;
    if (reader->broken)
        return ft_error_set(err, FT_SYSTEM,
                            "io_uring: an earlier call failed, the reader must be opened again");
    wanted = FT_MIN(FT_MIN(wanted, cap), reader->in_flight);
    if (reader->backend == FT_IO_URING) {
        if ((wanted == 0 || timeout_ns == 0) && reader->in_flight && reader->ring_defers &&
            !reader->ring_tells)
            (void)io_uring_get_events(&reader->ring); /* else completions wait for the next blocking call */
        return ring_wait(reader, done, cap, wanted, timeout_ns, count, err);
    }
    int status = ft_pread_pool_wait(reader->pool, done, cap, wanted, timeout_ns, count, err);
    reader->in_flight -= *count;
    return status;
}

enum ft_io_backend ft_reader_backend(const struct ft_reader *reader)
{
    return reader->backend;
}

bool ft_reader_has_fixed_buffers(const struct ft_reader *reader)
{
    return reader->fixed_whole;
}

const char *ft_reader_note(const struct ft_reader *reader)
{
    return reader->note;
}
