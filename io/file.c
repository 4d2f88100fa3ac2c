/* SPDX-License-Identifier: Apache-2.0 */
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ALIGN_DEFAULT 4096u  /* right for every disk whose filesystem does not say */
#define ALIGN_MAX (1u << 20) /* a filesystem that asks for more is read through the page cache */

static bool is_power_of_2(uint32_t n)
{
    return n && (n & (n - 1)) == 0;
}

static const char *kind_of(mode_t mode)
{
    if (S_ISDIR(mode))
        return "a directory";
    if (S_ISSOCK(mode))
        return "a socket";
    if (S_ISFIFO(mode))
        return "a pipe";
    return S_ISCHR(mode) || S_ISBLK(mode) ? "a device" : "of an unknown kind";
}

/* Alignment as the kernel states it; false when it says that there is no direct I/O on this file. */
static bool direct_alignment(int fd, uint32_t *memory_align, uint32_t *offset_align)
{
    *memory_align = *offset_align = ALIGN_DEFAULT;
#ifdef STATX_DIOALIGN
    struct statx info;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN)) {
        *memory_align = info.stx_dio_mem_align;
        *offset_align = info.stx_dio_offset_align;
    }
#else
    (void)fd; /* headers before Linux 6.1 */
#endif
    return is_power_of_2(*memory_align) && *memory_align <= ALIGN_MAX && is_power_of_2(*offset_align) &&
           *offset_align <= ALIGN_MAX;
}

/*
 * Some filesystems accept the flag and refuse the read, or serve something else: one block is read both ways
 * and compared before the descriptor is trusted.
 */
static bool direct_probe(const struct ft_file *direct, int buffered_fd)
{
    size_t bytes = direct->offset_align;
    void *block = NULL, *plain = NULL;
    bool good = false;
    if (posix_memalign(&block, FT_MAX(direct->memory_align, 64u), bytes) == 0 &&
        posix_memalign(&plain, 64, bytes) == 0) {
        ssize_t got = pread(direct->fd, block, bytes, 0), wanted = pread(buffered_fd, plain, bytes, 0);
        good = got >= 0 && got == wanted && memcmp(block, plain, (size_t)got) == 0;
    }
    free(block);
    free(plain);
    return good;
}

static void file_try_direct(struct ft_file *file, const char *path)
{
    struct ft_file direct = {.direct = true, .bytes = file->bytes};
    direct.fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (direct.fd < 0)
        return;
    struct stat info;
    if (fstat(direct.fd, &info) == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size == file->bytes &&
        direct_alignment(direct.fd, &direct.memory_align, &direct.offset_align) &&
        direct_probe(&direct, file->fd)) {
        close(file->fd);
        *file = direct;
        return;
    }
    close(direct.fd);
}

int ft_file_open(struct ft_file *file, const char *path, bool want_direct, struct ft_error *err)
{
    *file = (struct ft_file){.fd = -1};
    struct stat info;
    if (stat(path, &info) != 0)
        return ft_error_set(err, FT_IO, "%s: cannot be opened: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) /* before open(), which would hang on a pipe */
        return ft_error_set(err, FT_IO, "%s: is %s, wanted a regular file", path, kind_of(info.st_mode));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return ft_error_set(err, FT_IO, "%s: cannot be opened: %s", path, strerror(errno));
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size < 0) {
        close(fd);
        return ft_error_set(err, FT_IO, "%s: changed its kind while it was opened", path);
    }
    *file = (struct ft_file){.fd = fd, .memory_align = 1, .offset_align = 1, .bytes = (uint64_t)info.st_size};
    if (want_direct)
        file_try_direct(file, path);
    return FT_OK;
}

void ft_file_close(struct ft_file *file)
{
    if (file->fd >= 0)
        close(file->fd);
    file->fd = -1;
}

static int read_all_from(const struct ft_file *file, const char *path, char *text, struct ft_error *err)
{
    for (uint64_t done = 0; done < file->bytes;) {
        ssize_t got = pread(file->fd, text + done, FT_MIN(file->bytes - done, 1u << 30), (off_t)done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return ft_error_set(err, FT_IO, "%s: read at %llu failed: %s", path, (unsigned long long)done,
                                strerror(errno));
        if (got == 0)
            return ft_error_set(err, FT_IO, "%s: ends at byte %llu, it had %llu when it was opened", path,
                                (unsigned long long)done, (unsigned long long)file->bytes);
        done += (uint64_t)got;
    }
    return FT_OK;
}

int ft_file_read_all(const char *path, uint64_t bytes_max, char **text, uint64_t *bytes, struct ft_error *err)
{
    *text = NULL;
    *bytes = 0;
    struct ft_file file;
    int status = ft_file_open(&file, path, false, err);
    if (status)
        return status;
    char *whole = NULL;
    if (file.bytes > bytes_max || file.bytes >= SIZE_MAX)
        status = ft_error_set(err, FT_LIMIT, "%s: %llu bytes, at most %llu are read", path,
                              (unsigned long long)file.bytes, (unsigned long long)bytes_max);
    else if (!(whole = malloc((size_t)file.bytes + 1)))
        status = ft_error_set(err, FT_MEMORY, "%s: no memory for %llu bytes", path,
                              (unsigned long long)file.bytes);
    else
        status = read_all_from(&file, path, whole, err);
    if (status == FT_OK) {
        whole[file.bytes] = '\0';
        *text = whole;
        *bytes = file.bytes;
    } else {
        free(whole);
    }
    ft_file_close(&file);
    return status;
}

static bool write_full(int fd, const char *data, uint64_t bytes)
{
    while (bytes) {
        ssize_t put = write(fd, data, FT_MIN(bytes, 1u << 30));
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return false;
        data += put;
        bytes -= (uint64_t)put;
    }
    return true;
}

/* The new name is durable only once its directory is; a filesystem that cannot sync directories is not an error. */
static void sync_directory_of(const char *path)
{
    char *copy = strdup(path);
    if (!copy)
        return;
    char *slash = strrchr(copy, '/');
    if (slash)
        slash[slash == copy] = '\0';
    int fd = open(slash ? copy : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
    free(copy);
}

int ft_file_write_all(const char *path, const void *data, uint64_t bytes, struct ft_error *err)
{
    char *temporary = NULL;
    if (asprintf(&temporary, "%s.new.%ld", path, (long)getpid()) < 0)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for a file name", path);
    /* Exclusive: a leftover of a crashed process with our number is removed, somebody else's symlink is not
     * followed. */
    (void)unlink(temporary);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    int status = FT_OK;
    if (fd < 0) {
        status = ft_error_set(err, FT_IO, "%s: cannot be created: %s", temporary, strerror(errno));
    } else {
        bool good = write_full(fd, data, bytes) && fsync(fd) == 0;
        int number = errno;
        if (close(fd) != 0 && good) {
            good = false;
            number = errno;
        }
        if (good && rename(temporary, path) != 0) {
            good = false;
            number = errno;
        }
        if (!good) {
            status = ft_error_set(err, FT_IO, "%s: writing %llu bytes failed: %s", path,
                                  (unsigned long long)bytes, strerror(number));
            (void)unlink(temporary);
        } else {
            sync_directory_of(path);
        }
    }
    free(temporary);
    return status;
}
