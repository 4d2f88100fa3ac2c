/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pictures and tables of a step: a compiled graph (what will be done) or a recorded step (what was done, and
 * when).
 *
 *   text  table per layer and totals by class
 *   dot   jobs as nodes, edges as they are (recorded: order per thread)
 *   json  everything, for other programs
 *   svg   recorded: a schedule, one row per thread, time to the right
 *         compiled: one row per lane, dependency depth to the right
 *
 * Exactly one of graph and step is set. Text of a trace is never trusted: it is escaped, and numbers are
 * bounded. Ownership: everything in struct ft_draw is the caller's. Threads: one at a time. Errors: FT_IO
 * when the stream refused bytes (it is flushed here), FT_MEMORY.
 */
#ifndef FT_TOOLS_DRAW_H
#define FT_TOOLS_DRAW_H

#include "graph/graph.h"
#include "graph/trace.h"

#include <stdio.h>

struct ft_draw {
    const char *title; /* of a compiled graph: model and shape */
    const struct ft_graph *graph;
    const struct ft_trace_header *header;
    const struct ft_trace_step *step;
    bool layers_given;                /* false: everything */
    uint32_t layer_first, layer_last; /* both included */
};

typedef int ft_draw_function(const struct ft_draw *draw, FILE *out, struct ft_error *err);
ft_draw_function ft_draw_text, ft_draw_json, ft_draw_dot, ft_draw_svg;
/* "text", "json", "dot", "svg"; NULL: no such format. */
ft_draw_function *ft_draw_find(const char *format);

#endif
