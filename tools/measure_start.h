/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What strategy auto decides by, measured when an engine opens: whole experts on the workers, whole experts
 * over the link, both at once. Takes about a second with a GPU, less than a tenth of one with the host device
 * (short rounds there: its figures are a memcpy's), pinning of the banks aside, which the session needs
 * anyway.
 *
 * Threads: starts and joins its own (tools/ceilings.h). Ownership: a GPU's mover stays with the caller; it
 * keeps the banks pinned and is closed after the session.
 */
#ifndef FT_TOOLS_MEASURE_START_H
#define FT_TOOLS_MEASURE_START_H

#include "graph/plan.h"
#include "graph/weights.h"

struct ft_gpu_mover;
struct ft_topology;

struct ft_measure_options {
    const struct ft_model *model;
    const struct ft_weights *weights;
    const struct ft_topology *topology;
    const struct ft_plan *plan;
    enum ft_format format;   /* of the experts */
    const char *isa;         /* NULL = the best */
    double link_bytes_per_s; /* throttle, 0 = none */
    uint32_t gpu;
    bool pin;
};

/* Whether the plan wants it: strategy auto, not deterministic, rates not known yet. */
bool ft_measure_wanted(const struct ft_plan *plan, const struct ft_machine *machine);
/* Fills the rates of link and experts in `machine`, which stays as it was on failure. *mover: NULL without a GPU. */
int ft_measure_start(const struct ft_measure_options *options, struct ft_machine *machine,
                     struct ft_gpu_mover **mover, struct ft_error *err);

#endif
