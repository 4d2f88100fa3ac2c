/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

int ft_trace_file_open(struct ft_trace_file *file, const char *path, struct ft_error *err)
{
    struct stat info;
    memset(file, 0, sizeof *file);
    /* Not blocking: a pipe that nobody reads would hold up the start. Frames are written in full, though. */
    file->fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    if (file->fd < 0)
        return ft_error_set(err, FT_IO, "--trace %s: %s", path,
                            errno == ENXIO ? "is a pipe that nobody reads" : strerror(errno));
    (void)fcntl(file->fd, F_SETFL, O_WRONLY);
    file->path = path;
    file->regular = !fstat(file->fd, &info) && S_ISREG(info.st_mode);
    int status = FT_OK;
    if (file->regular && flock(file->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        status = ft_error_set(err, FT_IO, "--trace %s: another process writes it: name another file", path);
    else if (file->regular && ftruncate(file->fd, 0) != 0)
        status = ft_error_set(err, FT_IO, "--trace %s: %s", path, strerror(errno));
    if (status == FT_OK)
        return FT_OK;
    close(file->fd);
    *file = (struct ft_trace_file){.fd = -1};
    return status;
}

static void fail(struct ft_trace_file *file, const char *why)
{
    ft_error_set(&file->failure, FT_IO, "--trace %s: %s; the trace ends after %u steps", file->path, why,
                 file->step_count);
    /* A frame that is half there would make readers refuse the whole file. */
    if (file->regular && ftruncate(file->fd, (off_t)file->bytes) != 0)
        ft_error_prepend(&file->failure, "could not be cut back");
}

static bool reserve(struct ft_trace_file *file, uint64_t bytes)
{
    if (bytes <= file->cap)
        return true;
    char *grown = realloc(file->buffer, bytes);
    if (!grown)
        return false;
    file->buffer = grown;
    file->cap = bytes;
    return true;
}

static void write_frame(struct ft_trace_file *file, uint64_t bytes)
{
    for (uint64_t done = 0; done < bytes;) {
        ssize_t wrote = write(file->fd, file->buffer + done, bytes - done);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0) {
            fail(file, wrote ? strerror(errno) : "nothing could be written");
            return;
        }
        done += (uint64_t)wrote;
    }
    file->bytes += bytes;
}

void ft_trace_file_begin(struct ft_trace_file *file, const struct ft_trace_header *header)
{
    uint64_t magic = ft_trace_encode_magic(NULL, 0);
    uint64_t bytes = magic + ft_trace_encode_header(header, NULL, 0);
    if (!reserve(file, bytes)) {
        fail(file, "out of memory");
        return;
    }
    ft_trace_encode_magic(file->buffer, file->cap);
    ft_trace_encode_header(header, file->buffer + magic, file->cap - magic);
    write_frame(file, bytes);
}

void ft_trace_file_step(void *context, const struct ft_trace_step *step)
{
    struct ft_trace_file *file = context;
    if (file->failure.code != FT_OK)
        return;
    uint64_t bytes = ft_trace_encode_step(step, NULL, 0);
    if (!reserve(file, bytes)) {
        fail(file, "out of memory");
        return;
    }
    ft_trace_encode_step(step, file->buffer, file->cap);
    write_frame(file, bytes);
    if (file->failure.code == FT_OK)
        file->step_count++;
}

int ft_trace_file_close(struct ft_trace_file *file, struct ft_error *err)
{
    if (!file->path)
        return FT_OK;
    /* Delayed allocation: some filesystems tell that they are full only here. */
    if (file->failure.code == FT_OK && file->regular && file->bytes && fsync(file->fd) != 0)
        fail(file, strerror(errno));
    if (file->regular && !file->bytes)
        unlink(file->path);
    if (close(file->fd) != 0 && file->failure.code == FT_OK)
        fail(file, strerror(errno));
    free(file->buffer);
    int status = file->failure.code;
    if (status != FT_OK)
        *err = file->failure;
    memset(file, 0, sizeof *file);
    return status;
}
