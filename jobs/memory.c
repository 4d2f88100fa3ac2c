/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/memory.h"

#include <string.h>

static void zero(void *context, void *at, uint64_t bytes)
{
    (void)context;
    if (bytes) /* a model may have no KV layer, and so no pages */
        memset(at, 0, bytes);
}

static void copy(void *context, void *to, const void *from, uint64_t bytes)
{
    (void)context;
    memcpy(to, from, bytes);
}

const struct ft_memory ft_memory_host = {.zero = zero, .copy = copy};
