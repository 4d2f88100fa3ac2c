/* SPDX-License-Identifier: Apache-2.0 */
#include "io/file.h"
#include "test.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static char dir_[64] = "test_io_file.XXXXXX";

static const char *in_dir(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", dir_, name);
    return path;
}

TEST(what_is_written_is_read_back)
{
    struct ft_error err;
    char *text;
    uint64_t bytes;
    CHECK_OK(ft_file_write_all(in_dir("a"), "hello", 5, &err), &err);
    CHECK_OK(ft_file_read_all(in_dir("a"), 5, &text, &bytes, &err), &err);
    CHECK(bytes == 5 && strcmp(text, "hello") == 0);
    free(text);
    CHECK_OK(ft_file_write_all(in_dir("a"), "", 0, &err), &err); /* replaces */
    CHECK_OK(ft_file_read_all(in_dir("a"), 5, &text, &bytes, &err), &err);
    CHECK(bytes == 0 && text[0] == '\0');
    free(text);
    CHECK_FAILS(ft_file_write_all(in_dir("none/a"), "x", 1, &err), FT_IO, "none/a", &err);
    CHECK_OK(ft_file_write_all(in_dir("big"), "0123456789", 10, &err), &err);
    CHECK_FAILS(ft_file_read_all(in_dir("big"), 9, &text, &bytes, &err), FT_LIMIT, "10 bytes", &err);
    CHECK(text == NULL);
}

TEST(a_failed_write_leaves_the_old_file_and_no_other)
{
    struct ft_error err;
    char *text;
    uint64_t bytes;
    CHECK_EQ(mkdir(in_dir("sub"), 0755), 0);
    CHECK_OK(ft_file_write_all(in_dir("sub/keep"), "old", 3, &err), &err);
    CHECK_EQ(mkdir(in_dir("sub/target"), 0755), 0);
    CHECK_FAILS(ft_file_write_all(in_dir("sub/target"), "new", 3, &err), FT_IO, "target", &err);
    CHECK_EQ(rmdir(in_dir("sub/target")), 0);
    CHECK_OK(ft_file_read_all(in_dir("sub/keep"), 9, &text, &bytes, &err), &err);
    CHECK(strcmp(text, "old") == 0);
    free(text);
    CHECK_EQ(unlink(in_dir("sub/keep")), 0);
    CHECK_EQ(rmdir(in_dir("sub")), 0); /* empty: no temporary file is left */
}

TEST(what_is_no_regular_file_is_refused_by_name)
{
    struct ft_error err;
    struct ft_file file;
    CHECK_FAILS(ft_file_open(&file, dir_, true, &err), FT_IO, "a directory", &err);
    CHECK_FAILS(ft_file_open(&file, in_dir("missing"), true, &err), FT_IO, "No such file", &err);
    CHECK_FAILS(ft_file_open(&file, "/dev/null", true, &err), FT_IO, "a device", &err);
    CHECK_EQ(mkfifo(in_dir("fifo"), 0600), 0);
    CHECK_FAILS(ft_file_open(&file, in_dir("fifo"), true, &err), FT_IO, "a pipe", &err);
    CHECK_EQ(unlink(in_dir("fifo")), 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.90s", in_dir("socket"));
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK_EQ(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    CHECK_FAILS(ft_file_open(&file, in_dir("socket"), false, &err), FT_IO, "a socket", &err);
    close(fd);
    CHECK_EQ(unlink(in_dir("socket")), 0);
    CHECK_EQ(file.fd, -1);
}

TEST(unreadable_files_say_so)
{
    struct ft_error err;
    struct ft_file file;
    if (geteuid() == 0)
        return; /* root reads everything */
    CHECK_OK(ft_file_write_all(in_dir("secret"), "x", 1, &err), &err);
    CHECK_EQ(chmod(in_dir("secret"), 0), 0);
    CHECK_FAILS(ft_file_open(&file, in_dir("secret"), true, &err), FT_IO, "Permission denied", &err);
    CHECK_EQ(unlink(in_dir("secret")), 0);
}

TEST(alignment_is_a_power_of_two_or_one)
{
    struct ft_error err;
    struct ft_file file;
    char block[10000] = {1, 2, 3};
    CHECK_OK(ft_file_write_all(in_dir("data"), block, sizeof block, &err), &err);
    CHECK_OK(ft_file_open(&file, in_dir("data"), true, &err), &err);
    CHECK_EQ(file.bytes, sizeof block);
    CHECK(file.memory_align && (file.memory_align & (file.memory_align - 1)) == 0);
    CHECK(file.offset_align && (file.offset_align & (file.offset_align - 1)) == 0);
    CHECK(file.direct ? file.offset_align >= 512 : file.offset_align == 1 && file.memory_align == 1);
    if (file.direct) { /* what it promises holds in the middle of the file */
        void *buffer = aligned_alloc(4096, 4096);
        CHECK_EQ(pread(file.fd, buffer, file.offset_align, (off_t)file.offset_align), file.offset_align);
        free(buffer);
    }
    ft_file_close(&file);
    CHECK_OK(ft_file_open(&file, in_dir("data"), false, &err), &err);
    CHECK(!file.direct && file.offset_align == 1);
    ft_file_close(&file);
    ft_file_close(&file); /* twice is harmless */
    CHECK_OK(ft_file_write_all(in_dir("empty"), "", 0, &err), &err);
    CHECK_OK(ft_file_open(&file, in_dir("empty"), true, &err), &err);
    CHECK_EQ(file.bytes, 0);
    ft_file_close(&file);
}

/* /proc and tmpfs before Linux 6.6 refuse O_DIRECT; the file opens all the same. */
TEST(a_filesystem_without_direct_reads_is_read_through_the_cache)
{
    struct ft_error err;
    struct ft_file file;
    CHECK_OK(ft_file_open(&file, "/proc/self/status", true, &err), &err);
    CHECK(!file.direct && file.offset_align == 1);
    ft_file_close(&file);
    char path[64];
    snprintf(path, sizeof path, "/dev/shm/test_io_file.%ld", (long)getpid());
    if (ft_file_write_all(path, "0123", 4, &err) != FT_OK)
        return; /* no tmpfs here */
    CHECK_OK(ft_file_open(&file, path, true, &err), &err);
    char back[4096] __attribute__((aligned(4096)));
    CHECK_EQ(pread(file.fd, back, file.direct ? sizeof back : 4, 0), 4);
    ft_file_close(&file);
    unlink(path);
}

static void make_dir(void)
{
    if (!mkdtemp(dir_))
        abort();
}

static void remove_dir(void)
{
    static const char *const names[] = {"a", "big", "data", "empty"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        unlink(in_dir(names[i]));
    CHECK_EQ(rmdir(dir_), 0); /* nothing else was left */
}

TEST_MAIN(make_dir(); RUN(what_is_written_is_read_back) RUN(a_failed_write_leaves_the_old_file_and_no_other)
              RUN(what_is_no_regular_file_is_refused_by_name) RUN(unreadable_files_say_so)
                  RUN(alignment_is_a_power_of_two_or_one)
                      RUN(a_filesystem_without_direct_reads_is_read_through_the_cache) remove_dir();)
