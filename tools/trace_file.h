/* SPDX-License-Identifier: Apache-2.0 */
/*
 * --trace FILE: frames of finished steps, appended between steps in the session's thread.
 *
 *     open (creates FILE, so that a bad path fails before the load) -> begin (header) -> step* -> close
 *
 * A write that fails ends the trace, not the run: the file is cut back to its last whole frame, later steps
 * are not written, and close reports the failure. A file to which no frame was written is removed. Ownership:
 * path is the caller's and lives longer. Threads: one at a time.
 */
#ifndef FT_TOOLS_TRACE_FILE_H
#define FT_TOOLS_TRACE_FILE_H

#include "graph/trace.h"

struct ft_trace_file {
    const char *path;
    int fd;
    bool regular;   /* may be cut back and removed */
    uint64_t bytes; /* of whole frames */
    uint32_t step_count;
    char *buffer; /* one frame */
    uint64_t cap;
    struct ft_error failure; /* the first write error; code FT_OK = none */
};

int ft_trace_file_open(struct ft_trace_file *file, const char *path, struct ft_error *err);
/* Reports through `failure`, as steps do. */
void ft_trace_file_begin(struct ft_trace_file *file, const struct ft_trace_header *header);
/* Fits struct ft_session_options: context is the struct ft_trace_file. */
void ft_trace_file_step(void *context, const struct ft_trace_step *step);
/* FT_IO when the trace is not complete. Safe on a zeroed struct (path NULL). */
int ft_trace_file_close(struct ft_trace_file *file, struct ft_error *err);

#endif
