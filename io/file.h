/* SPDX-License-Identifier: Apache-2.0 */
/* Opening files for reading, direct where the filesystem allows it, and reading small ones whole. */
#ifndef FT_IO_FILE_H
#define FT_IO_FILE_H

#include "graph/error.h"
#include "graph/types.h"

struct ft_file {
    int fd;
    bool direct;              /* opened with O_DIRECT */
    uint32_t memory_align;    /* of buffers; 1 when not direct */
    uint32_t offset_align;    /* of offsets and lengths; 1 when not direct */
    uint64_t bytes;
};

/* O_DIRECT with alignment from statx(STATX_DIOALIGN) (else 4096), falling back to buffered reads where it is refused
 * or where a probe read fails. Directories, sockets, unreadable and missing files are errors that say so. */
int ft_file_open(struct ft_file *file, const char *path, bool want_direct, struct ft_error *err);
void ft_file_close(struct ft_file *file);
/* Whole file, NUL-terminated, malloc'ed; refuses files above `bytes_max`. */
int ft_file_read_all(const char *path, uint64_t bytes_max, char **text, uint64_t *bytes, struct ft_error *err);
/* Atomically replaces `path` (temporary file, fsync, rename). */
int ft_file_write_all(const char *path, const void *data, uint64_t bytes, struct ft_error *err);

#endif
