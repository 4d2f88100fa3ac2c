/* SPDX-License-Identifier: Apache-2.0 */
#include "io/file.h"
#include "io/pread_pool.h"
#include "io/read_progress.h"
#include "io/uring.h"
#include "io_refusal.h"
#include "test.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define FILE_BYTES (1000u * 1000u + 17u)
#define BUFFER_BYTES (256u << 10)
#define SECOND 1000000000ull

static char path_[64];
static unsigned char content_[FILE_BYTES];

static void make_file(void)
{
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i < FILE_BYTES; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        content_[i] = (unsigned char)x;
    }
    snprintf(path_, sizeof path_, "test_io_uring.%ld", (long)getpid());
    FILE *file = fopen(path_, "wb");
    if (!file || fwrite(content_, 1, FILE_BYTES, file) != FILE_BYTES || fclose(file) != 0)
        abort();
}

/* Reads the whole file in pieces of `piece` bytes and compares; returns the number of wrong pieces. */
static int read_everything(enum ft_io_backend backend, bool direct, uint32_t depth, uint32_t piece,
                           bool registered)
{
    struct ft_error err;
    struct ft_file file;
    struct ft_reader *reader;
    uint32_t index, wrong = 0;
    char *buffer = aligned_alloc(4096, BUFFER_BYTES);
    struct ft_reader_options options = {.backend = backend,
                                        .depth = depth,
                                        .file_count_max = 2,
                                        .buffer = registered ? buffer : NULL,
                                        .buffer_bytes = registered ? BUFFER_BYTES : 0};
    if (ft_file_open(&file, path_, direct, &err) || ft_reader_open(&reader, &options, &err) ||
        ft_reader_add_file(reader, file.fd, &index, &err)) {
        fprintf(stderr, "%s\n", err.message);
        return 1000;
    }
    uint32_t slots = BUFFER_BYTES / piece, in_flight = 0;
    uint64_t next = 0, total = (FILE_BYTES + piece - 1) / piece, finished = 0;
    while (finished < total) {
        struct ft_read reads[256];
        uint32_t count = 0, accepted = 0;
        while (count < 256 && in_flight + count < slots && next + count < total) {
            reads[count] = (struct ft_read){.file = index,
                                            .buffer = registered ? 0 : FT_NONE,
                                            .offset = (next + count) * piece,
                                            .bytes = piece,
                                            .destination = buffer + (next + count) % slots * piece,
                                            .tag = next + count};
            count++;
        }
        /* pieces are compared in order of submission: a slot must be free again before it is reused */
        if (count && in_flight == 0) {
            if (ft_reader_submit(reader, reads, count, &accepted, &err))
                return 2000;
            next += accepted, in_flight += accepted;
        }
        struct ft_read_done done[64];
        if (ft_reader_wait(reader, done, 64, 1, 10 * SECOND, &count, &err))
            return 3000;
        for (uint32_t i = 0; i < count; i++) {
            uint64_t from = done[i].tag * piece, bytes = FT_MIN(piece, FILE_BYTES - from);
            wrong += done[i].result != (int64_t)bytes ||
                     memcmp(content_ + from, buffer + done[i].tag % slots * piece, bytes) != 0;
        }
        in_flight -= count, finished += count;
    }
    ft_reader_close(reader);
    ft_file_close(&file);
    free(buffer);
    return (int)wrong;
}

static bool have_uring(void)
{
    struct ft_error err;
    struct ft_reader *reader;
    struct ft_reader_options options = {.backend = FT_IO_URING, .depth = 4, .file_count_max = 1};
    bool have = ft_reader_open(&reader, &options, &err) == FT_OK;
    if (have)
        ft_reader_close(reader);
    return have;
}

TEST(every_byte_arrives_on_both_backends_direct_and_buffered)
{
    static const uint32_t depths[] = {1, 3, 16, 64}, pieces[] = {4096, 16384, 65536};
    for (int backend = FT_IO_AUTO; backend < FT_IO_BACKEND_COUNT; backend++) {
        if (backend == FT_IO_URING && !have_uring())
            continue;
        for (int d = 0; d < 4; d++)
            for (int p = 0; p < 3; p++)
                for (int flags = 0; flags < 4; flags++)
                    CHECK_EQ(read_everything((enum ft_io_backend)backend, flags & 1, depths[d], pieces[p],
                                             flags & 2),
                             0);
    }
}

TEST(submit_takes_no_more_than_depth)
{
    for (int backend = FT_IO_AUTO; backend < FT_IO_BACKEND_COUNT; backend += 2) {
        struct ft_error err;
        struct ft_file file;
        struct ft_reader *reader;
        char buffer[8][64];
        uint32_t index, accepted, count, total = 0;
        struct ft_reader_options options = {
            .backend = (enum ft_io_backend)backend, .depth = 3, .file_count_max = 1};
        CHECK_OK(ft_file_open(&file, path_, false, &err), &err);
        CHECK_OK(ft_reader_open(&reader, &options, &err), &err);
        CHECK_OK(ft_reader_add_file(reader, file.fd, &index, &err), &err);
        CHECK_FAILS(ft_reader_add_file(reader, file.fd, &count, &err), FT_LIMIT, "limit", &err);
        struct ft_read reads[8];
        for (uint32_t i = 0; i < 8; i++)
            reads[i] = (struct ft_read){.file = index,
                                        .buffer = FT_NONE,
                                        .offset = i * 64,
                                        .bytes = 64,
                                        .destination = buffer[i],
                                        .tag = i};
        CHECK_OK(ft_reader_submit(reader, reads, 8, &accepted, &err), &err);
        CHECK_EQ(accepted, 3);
        CHECK_OK(ft_reader_submit(reader, reads + 3, 5, &accepted, &err), &err);
        CHECK_EQ(accepted, 0);
        while (total < 3) { /* more is wanted than is in flight: it returns all the same */
            struct ft_read_done done[8];
            CHECK_OK(ft_reader_wait(reader, done, 8, 8, 5 * SECOND, &count, &err), &err);
            for (uint32_t i = 0; i < count; i++) {
                CHECK_EQ(done[i].result, 64);
                CHECK(memcmp(buffer[done[i].tag], content_ + done[i].tag * 64, 64) == 0);
            }
            total += count;
        }
        struct ft_read bad = reads[0];
        bad.file = 7;
        CHECK_FAILS(ft_reader_submit(reader, &bad, 1, &accepted, &err), FT_INTERNAL, "file 7", &err);
        ft_reader_close(reader);
        ft_file_close(&file);
    }
}

TEST(reads_at_and_past_the_end_are_short)
{
    for (int backend = FT_IO_AUTO; backend < FT_IO_BACKEND_COUNT; backend += 2) {
        struct ft_error err;
        struct ft_file file;
        struct ft_reader *reader;
        char *buffer = aligned_alloc(4096, 8192);
        uint32_t index, accepted, count;
        struct ft_reader_options options = {
            .backend = (enum ft_io_backend)backend, .depth = 4, .file_count_max = 1};
        CHECK_OK(ft_file_open(&file, path_, true, &err), &err);
        CHECK_OK(ft_reader_open(&reader, &options, &err), &err);
        CHECK_OK(ft_reader_add_file(reader, file.fd, &index, &err), &err);
        static const uint64_t offsets[] = {FILE_BYTES / 4096 * 4096, (FILE_BYTES / 4096 + 1) * 4096};
        for (int i = 0; i < 2; i++) {
            struct ft_read read = {
                .file = index, .buffer = FT_NONE, .offset = offsets[i], .bytes = 4096, .destination = buffer};
            struct ft_read_done done;
            CHECK_OK(ft_reader_submit(reader, &read, 1, &accepted, &err), &err);
            CHECK_OK(ft_reader_wait(reader, &done, 1, 1, 5 * SECOND, &count, &err), &err);
            CHECK_EQ(count, 1);
            CHECK_EQ(done.result, i == 0 ? FILE_BYTES % 4096 : 0);
        }
        ft_reader_close(reader);
        ft_file_close(&file);
        free(buffer);
    }
}

/* A pipe has no offset: pread says ESPIPE; io_uring would wait for the writer, which is what the timeout is for. */
TEST(errors_come_back_as_errno_and_waits_are_bounded)
{
    struct ft_error err;
    struct ft_reader *reader;
    char byte;
    int ends[2];
    uint32_t index, accepted, count;
    REQUIRE(pipe(ends) == 0);
    struct ft_reader_options options = {.backend = FT_IO_PREAD, .depth = 4, .file_count_max = 1};
    struct ft_read read = {.file = 0, .buffer = FT_NONE, .bytes = 1, .destination = &byte};
    struct ft_read_done done;
    CHECK_OK(ft_reader_open(&reader, &options, &err), &err);
    CHECK_OK(ft_reader_add_file(reader, ends[0], &index, &err), &err);
    CHECK_OK(ft_reader_submit(reader, &read, 1, &accepted, &err), &err);
    CHECK_OK(ft_reader_wait(reader, &done, 1, 1, 5 * SECOND, &count, &err), &err);
    CHECK_EQ(done.result, -ESPIPE);
    ft_reader_close(reader);
    if (have_uring()) {
        options.backend = FT_IO_URING;
        CHECK_OK(ft_reader_open(&reader, &options, &err), &err);
        CHECK_OK(ft_reader_add_file(reader, ends[0], &index, &err), &err);
        CHECK_OK(ft_reader_submit(reader, &read, 1, &accepted, &err), &err);
        CHECK_FAILS(ft_reader_wait(reader, &done, 1, 1, SECOND / 50, &count, &err), FT_TIMEOUT, "0 of 1",
                    &err);
        CHECK_FAILS(ft_reader_wait(reader, &done, 1, 1, 0, &count, &err), FT_TIMEOUT, "0 of 1", &err);
        CHECK_EQ(write(ends[1], "x", 1), 1);
        CHECK_OK(ft_reader_wait(reader, &done, 1, 1, 5 * SECOND, &count, &err), &err);
        CHECK(done.result == 1 && byte == 'x');
        ft_reader_close(reader);
    }
    close(ends[0]);
    close(ends[1]);
}

TEST(impossible_options_are_refused)
{
    struct ft_error err;
    struct ft_reader *reader;
    struct ft_reader_options options = {.depth = 0, .file_count_max = 1};
    CHECK_FAILS(ft_reader_open(&reader, &options, &err), FT_USAGE, "depth 0", &err);
    options = (struct ft_reader_options){.depth = 1u << 20, .file_count_max = 1};
    CHECK_FAILS(ft_reader_open(&reader, &options, &err), FT_USAGE, "depth 1048576", &err);
}

TEST(progress_completes_short_reads_and_bounds_retries)
{
    struct ft_read_progress progress;
    struct ft_read read = {.offset = 8192, .bytes = 65536};
    int64_t result = 0;
    /* buffered: goes on from the very byte */
    ft_read_progress_init(&progress, &read, 0, false, 1u << 20);
    CHECK(!ft_read_progress_step(&progress, 1000, &result));
    CHECK_EQ(ft_read_progress_offset(&progress), 9192);
    CHECK_EQ(ft_read_progress_bytes(&progress), 64536);
    CHECK(ft_read_progress_step(&progress, 64536, &result) && result == 65536);
    /* direct: goes on from the block */
    ft_read_progress_init(&progress, &read, 0, true, 1u << 20);
    CHECK(!ft_read_progress_step(&progress, 5000, &result));
    CHECK_EQ(ft_read_progress_offset(&progress), 8192 + 4096);
    CHECK(ft_read_progress_step(&progress, 904, &result) && result == 5000); /* nothing new: the end */
    /* up to the known end of the file it is complete at once */
    ft_read_progress_init(&progress, &read, 0, true, 8192 + 5000);
    CHECK(ft_read_progress_step(&progress, 5000, &result) && result == 5000);
    /* interrupted: again, not for ever */
    ft_read_progress_init(&progress, &read, 0, true, 1u << 20);
    CHECK(!ft_read_progress_step(&progress, -EINTR, &result));
    CHECK(!ft_read_progress_step(&progress, -EAGAIN, &result));
    CHECK_EQ(ft_read_progress_offset(&progress), 8192);
    int steps = 0;
    while (!ft_read_progress_step(&progress, -EAGAIN, &result) && steps < 1000)
        steps++;
    CHECK(steps < 1000 && result == -EAGAIN);
    ft_read_progress_init(&progress, &read, 0, true, 1u << 20);
    CHECK(ft_read_progress_step(&progress, -EIO, &result) && result == -EIO);
}

/* ---- refusal ---- */

static int refused_number_;

static int child_falls_back(void)
{
    struct ft_error err;
    struct ft_reader *reader;
    struct ft_reader_options options = {.backend = FT_IO_AUTO, .depth = 8, .file_count_max = 1};
    CHECK_OK(ft_reader_open(&reader, &options, &err), &err);
    CHECK_EQ(ft_reader_backend(reader), FT_IO_PREAD);
    const char *note = ft_reader_note(reader);
    CHECK(strstr(note, "io_uring refused") && strstr(note, strerror(refused_number_)) &&
          strstr(note, "Remedy"));
    CHECK(!strchr(note, '\n'));
    if (refused_number_ == EPERM)
        CHECK(strstr(note, "seccomp") || strstr(note, "sysctl"));
    ft_reader_close(reader);
    CHECK_EQ(read_everything(FT_IO_AUTO, true, 16, 16384, true), 0);
    options.backend = FT_IO_URING;
    CHECK_FAILS(ft_reader_open(&reader, &options, &err), FT_SYSTEM, "io_uring refused", &err);
    return test_failures_ != 0;
}

TEST(refused_ring_falls_back_to_pread_and_says_why)
{
    static const int numbers[] = {EPERM, ENOSYS, EINVAL, ENOMEM};
    for (int i = 0; i < 4; i++) {
        refused_number_ = numbers[i];
        int code = run_in_child(refuse_io_uring, numbers[i], child_falls_back);
        CHECK(code == 0 || code == 77);
    }
    /* The reason is the refusal, not an old kernel. */
    refused_number_ = EPERM;
    int code = run_in_child(refuse_io_uring_register, EPERM, child_falls_back);
    CHECK(code == 0 || code == 77);
}

/* Root is not bound by the limit: the child gives up its rights first. */
static int lower_memlock(int bytes)
{
    struct rlimit limit = {.rlim_cur = (rlim_t)bytes, .rlim_max = (rlim_t)bytes};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0)
        return -1;
    return geteuid() == 0 ? setuid(65534) : 0;
}

static int child_registers_less(void)
{
    struct ft_error err;
    struct ft_reader *reader;
    char *buffer = aligned_alloc(4096, 4u << 20);
    struct ft_reader_options options = {
        .backend = FT_IO_AUTO, .depth = 8, .file_count_max = 1, .buffer = buffer, .buffer_bytes = 4u << 20};
    CHECK_OK(ft_reader_open(&reader, &options, &err), &err);
    if (ft_reader_backend(reader) == FT_IO_URING) {
        CHECK(!ft_reader_has_fixed_buffers(reader));
        CHECK(strstr(ft_reader_note(reader), "ulimit -l"));
    }
    ft_reader_close(reader);
    free(buffer);
    CHECK_EQ(read_everything(FT_IO_AUTO, true, 16, 16384, true), 0);
    return test_failures_ != 0;
}

TEST(short_memlock_means_fewer_registered_buffers_not_failure)
{
    CHECK_EQ(chmod(path_, 0644), 0);
    static const int limits[] = {2 << 20, 100 << 10, 0};
    for (int i = 0; i < 3; i++) {
        int code = run_in_child(lower_memlock, limits[i], child_registers_less);
        CHECK(code == 0 || code == 77);
    }
}

TEST(environment_chooses_the_backend_when_options_do_not)
{
    struct ft_error err;
    struct ft_reader *reader;
    struct ft_reader_options options = {.backend = FT_IO_AUTO, .depth = 8, .file_count_max = 1};
    setenv("FT_IO_BACKEND", "pread", 1);
    CHECK_OK(ft_reader_open(&reader, &options, &err), &err);
    CHECK_EQ(ft_reader_backend(reader), FT_IO_PREAD);
    ft_reader_close(reader);
    unsetenv("FT_IO_BACKEND");
}

static void *use_from_another_thread(void *reader)
{
    static char byte[64];
    struct ft_error err = {0};
    struct ft_read read = {.file = 0, .buffer = FT_NONE, .bytes = 64, .destination = byte};
    uint32_t accepted;
    int status = ft_reader_submit(reader, &read, 1, &accepted, &err);
    CHECK(status == FT_OK || strstr(err.message, "thread that opened it")); /* older kernels do not mind */
    return NULL;
}

TEST(another_thread_gets_an_error_not_a_hang)
{
    struct ft_error err;
    struct ft_reader *reader;
    struct ft_file file;
    uint32_t index;
    pthread_t thread;
    struct ft_reader_options options = {.backend = FT_IO_AUTO, .depth = 8, .file_count_max = 1};
    CHECK_OK(ft_file_open(&file, path_, false, &err), &err);
    CHECK_OK(ft_reader_open(&reader, &options, &err), &err);
    CHECK_OK(ft_reader_add_file(reader, file.fd, &index, &err), &err);
    REQUIRE(pthread_create(&thread, NULL, use_from_another_thread, reader) == 0);
    pthread_join(thread, NULL);
    ft_reader_close(reader);
    ft_file_close(&file);
}

static void remove_file(void)
{
    unlink(path_);
}

TEST_MAIN(make_file();
          RUN(every_byte_arrives_on_both_backends_direct_and_buffered) RUN(submit_takes_no_more_than_depth)
              RUN(reads_at_and_past_the_end_are_short) RUN(errors_come_back_as_errno_and_waits_are_bounded)
                  RUN(impossible_options_are_refused) RUN(progress_completes_short_reads_and_bounds_retries)
                      RUN(refused_ring_falls_back_to_pread_and_says_why)
                          RUN(short_memlock_means_fewer_registered_buffers_not_failure)
                              RUN(environment_chooses_the_backend_when_options_do_not)
                                  RUN(another_thread_gets_an_error_not_a_hang) remove_file();)
