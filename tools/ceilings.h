/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this machine can move and compute, measured on the very weights that a benchmark uses: the yardstick
 * of its bounds. Each figure is the better of two rounds, because other programs only make a round slower.
 *
 *   cpu_read     plain sums over the experts, best of 1, 2, 4 .. all usable cores, with and without prefetching
 *   device_read  host device: one core's read; a GPU: what its lane measured (options.device_read_bytes_per_s)
 *   link         whole experts, RAM -> device, one after the other, by the mover
 *   cpu_expert   whole experts at 1 row, all workers
 *   both_*       experts on all workers while the mover copies
 *
 * 0 = not measured (no device, no mover). Experts are taken in a random order from all layers. Threads:
 * starts and joins its own; call from one thread. Errors: FT_MEMORY, FT_SYSTEM.
 */
#ifndef FT_TOOLS_CEILINGS_H
#define FT_TOOLS_CEILINGS_H

#include "graph/model.h"
#include "graph/weights.h"

struct ft_topology;

/* How bytes get to the device. The host device's is a copy into RAM; a GPU's is its copy stream. */
struct ft_mover {
    void *context;
    /* Copies, or queues the copy; called by one thread. */
    void (*copy)(void *context, const void *from, uint64_t bytes);
    void (*drain)(void *context); /* returns when all copies are done; NULL: copy waits itself */
};

struct ft_ceilings_options {
    const struct ft_model *model;
    const struct ft_weights *weights;
    const struct ft_topology *topology;
    const char *isa; /* NULL = the best */
    enum ft_device device;
    uint32_t workers; /* of the plan */
    bool pin;
    bool experts_only;              /* no plain reads: cpu_read and device_read stay 0 */
    double seconds;                 /* of one round; both_* take twice as long */
    double link_bytes_per_s;        /* throttle of the host device; 0 = none */
    double device_read_bytes_per_s; /* GPU: as measured elsewhere; 0 = not known */
    const struct ft_mover *mover;   /* NULL: a copy into RAM for the host device, none for a GPU */
};

struct ft_ceilings {
    double cpu_read_bytes_per_s;
    uint32_t cpu_read_threads; /* that reached it */
    double device_read_bytes_per_s;
    double link_bytes_per_s;
    double cpu_expert_bytes_per_s;
    double both_cpu_bytes_per_s, both_link_bytes_per_s;
    double link_linear_bytes_per_s; /* one long copy; measured by the caller, 0 = not */
};

int ft_ceilings_measure(const struct ft_ceilings_options *options, struct ft_ceilings *ceilings,
                        struct ft_error *err);

#endif
