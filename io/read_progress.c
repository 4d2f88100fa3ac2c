/* SPDX-License-Identifier: Apache-2.0 */
#include "io/read_progress.h"

#include <errno.h>

void ft_read_progress_init(struct ft_read_progress *progress, const struct ft_read *read, int fd, bool direct,
                           uint64_t file_bytes)
{
    *progress =
        (struct ft_read_progress){.read = *read, .file_bytes = file_bytes, .fd = fd, .direct = direct};
}

bool ft_read_progress_step(struct ft_read_progress *progress, int64_t outcome, int64_t *result)
{
    if (outcome == -EINTR || outcome == -EAGAIN) {
        *result = outcome;
        return ++progress->retries > FT_READ_RETRIES_MAX;
    }
    if (outcome < 0) {
        *result = outcome;
        return true;
    }
    uint64_t reached = progress->from + (uint64_t)outcome;
    bool advanced = reached > progress->done;
    progress->done = FT_MAX(progress->done, reached);
    *result = (int64_t)progress->done;
    if (!advanced || progress->done >= progress->read.bytes)
        return true;
    if (progress->read.offset + progress->done >= progress->file_bytes)
        return true;
    /* read.offset is aligned when direct, so a multiple of the block relative to it keeps offset and memory aligned */
    progress->from = progress->direct ? progress->done / FT_READ_BLOCK * FT_READ_BLOCK : progress->done;
    progress->retries = 0;
    return false;
}
