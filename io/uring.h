/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading files at depth: io_uring with registered files and buffers, or a small pread pool where it is refused.
 * The only file that includes liburing is io/uring.c.
 *
 * Threads: one reader belongs to one thread, which creates, submits and reaps (single issuer). The pread backend has
 * its own helper threads behind the same calls. Close waits for reads in flight (a minute at most).
 * The environment variable FT_IO_BACKEND (io_uring, pread) decides where the options say FT_IO_AUTO.
 */
#ifndef FT_IO_URING_H
#define FT_IO_URING_H

#include "graph/error.h"
#include "graph/types.h"

enum ft_io_backend { FT_IO_AUTO, FT_IO_URING, FT_IO_PREAD, FT_IO_BACKEND_COUNT };
const char *ft_io_backend_name(enum ft_io_backend backend);

/* One read. `bytes` and `offset` obey the file's alignment when it was opened direct. */
struct ft_read {
    uint32_t file;   /* index given by ft_reader_add_file */
    uint32_t buffer; /* index of a registered buffer that holds `destination`, or FT_NONE */
    uint64_t offset;
    uint32_t bytes;
    void *destination;
    uint64_t tag; /* comes back in the completion */
};

struct ft_read_done {
    uint64_t tag;
    int64_t result; /* bytes read, or -errno */
};

struct ft_reader_options {
    enum ft_io_backend backend;
    uint32_t depth; /* most reads in flight */
    uint32_t file_count_max;
    void *buffer;          /* registered as one fixed buffer (index 0) when memlock allows; NULL = none */
    uint64_t buffer_bytes;
    uint32_t pread_threads; /* pread backend; 0 = 4 */
};

struct ft_reader;
int ft_reader_open(struct ft_reader **out, const struct ft_reader_options *options, struct ft_error *err);
void ft_reader_close(struct ft_reader *reader);
/* fd stays the caller's and must outlive the reader. */
int ft_reader_add_file(struct ft_reader *reader, int fd, uint32_t *file, struct ft_error *err);
/* Queues up to count reads and submits them with one system call; *accepted <= count says how many had room. */
int ft_reader_submit(struct ft_reader *reader, const struct ft_read *reads, uint32_t count, uint32_t *accepted,
                     struct ft_error *err);
/* Reaps up to `cap` completions; waits until at least `wanted` are there or timeout_ns has passed (FT_TIMEOUT).
 * wanted = 0 only looks. */
int ft_reader_wait(struct ft_reader *reader, struct ft_read_done *done, uint32_t cap, uint32_t wanted,
                   uint64_t timeout_ns, uint32_t *count, struct ft_error *err);
enum ft_io_backend ft_reader_backend(const struct ft_reader *reader);
bool ft_reader_has_fixed_buffers(const struct ft_reader *reader);
/* Why the backend is not io_uring, or buffers are not registered, and how to allow it; "" when all is well. */
const char *ft_reader_note(const struct ft_reader *reader);

#endif
