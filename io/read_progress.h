/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a read does after each attempt: finished, or which bytes to ask for next. Shared by both backends of
 * io/uring.h, pure, so that short reads and interruptions are tested without a disk that produces them.
 *
 * A direct read that ends inside a block cannot go on from there: the next attempt begins at the block, and
 * the file has ended when it brings nothing new. Threads: an object belongs to whoever runs the read.
 */
#ifndef FT_IO_READ_PROGRESS_H
#define FT_IO_READ_PROGRESS_H

#include "io/uring.h"

#define FT_READ_BLOCK 4096u      /* restart boundary of direct reads: a multiple of every block size met */
#define FT_READ_RETRIES_MAX 100u /* attempts without progress (EINTR, EAGAIN) before the errno is reported */

struct ft_read_progress {
    struct ft_read read;
    uint64_t file_bytes; /* end of the file when it was added: a read up to there is complete */
    uint64_t from;       /* where the current attempt begins, relative to read.offset */
    uint64_t done;       /* bytes in place */
    uint32_t retries;
    int fd;
    bool direct;
};

void ft_read_progress_init(struct ft_read_progress *progress, const struct ft_read *read, int fd, bool direct,
                           uint64_t file_bytes);
/* Takes the outcome of an attempt (bytes or -errno); true when the read is over and *result is final. */
bool ft_read_progress_step(struct ft_read_progress *progress, int64_t outcome, int64_t *result);

/* The attempt to make next. */
static inline void *ft_read_progress_destination(const struct ft_read_progress *progress)
{
    return (char *)progress->read.destination + progress->from;
}

static inline uint64_t ft_read_progress_offset(const struct ft_read_progress *progress)
{
    return progress->read.offset + progress->from;
}

static inline uint32_t ft_read_progress_bytes(const struct ft_read_progress *progress)
{
    return (uint32_t)(progress->read.bytes - progress->from);
}

#endif
