/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where KV pages, recurrent states, slots and staging buffers lie, and how bytes get there: plain memory, or
 * a GPU's. Both functions return when the bytes are in place. Threads: one at a time, between steps.
 */
#ifndef FT_JOBS_MEMORY_H
#define FT_JOBS_MEMORY_H

#include "graph/types.h"

struct ft_memory {
    void *context;
    bool is_device; /* the host must not touch it */
    void (*zero)(void *context, void *at, uint64_t bytes);
    void (*copy)(void *context, void *to, const void *from,
                 uint64_t bytes); /* either side may be the host's */
};

extern const struct ft_memory ft_memory_host;

#endif
