/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/draw_internal.h"

static const char *ink(enum ft_class class)
{
    return class == FT_CLASS_ROUTER || class == FT_CLASS_FETCH ? "white" : "black";
}

static void put_head(FILE *out, const char *title)
{
    fputs("digraph step {\n  rankdir=TB;\n  label=\"", out);
    ft_draw_put_dot(out, title);
    fputs("\";\n  labelloc=t;\n  node [shape=box, style=filled, fontname=\"sans-serif\", fontsize=10];\n",
          out);
}

static void put_colours(FILE *out, enum ft_op op)
{
    fprintf(out, "fillcolor=\"%s\", fontcolor=%s", ft_draw_class_colour(ft_op_class(op)),
            ink(ft_op_class(op)));
}

static void put_graph_nodes(const struct ft_draw *draw, FILE *out)
{
    const struct ft_graph *graph = draw->graph;
    for (uint32_t i = 0; i < graph->static_count; i++) {
        enum ft_op op = (enum ft_op)graph->op[i];
        if (!ft_draw_wants(draw, graph->layer[i]))
            continue;
        fprintf(out, "  j%u [label=\"%s", i, ft_op_name(op));
        if (graph->layer[i] < FT_LAYERS_MAX)
            fprintf(out, " L%u", graph->layer[i]);
        fprintf(out, "\\n[%u, %u) %s", graph->begin[i], graph->end[i],
                ft_lane_name((enum ft_lane)graph->lane[i]));
        if (graph->bytes[i])
            fprintf(out, "\\n%.1f KB", (double)graph->bytes[i] / 1e3);
        fputs("\", ", out);
        put_colours(out, op);
        fputs("];\n", out);
    }
}

/* The reserved range of a layer stands between its router and its combine; its jobs exist only in a running step. */
static void put_reserved(const struct ft_draw *draw, FILE *out)
{
    const struct ft_graph *graph = draw->graph;
    for (uint32_t layer = 0; layer < graph->layer_count; layer++) {
        if (graph->router_job[layer] == FT_NONE || !ft_draw_wants(draw, layer))
            continue;
        fprintf(out,
                "  r%u [label=\"experts L%u\\nat most %u jobs, filled after the router\", style=dashed];\n",
                layer, layer, graph->reserved_count);
        fprintf(out, "  j%u -> r%u [style=dashed];\n  r%u -> j%u [style=dashed];\n", graph->router_job[layer],
                layer, layer, graph->combine_job[layer]);
    }
}

static void put_graph_edges(const struct ft_draw *draw, FILE *out)
{
    const struct ft_graph *graph = draw->graph;
    for (uint32_t i = 0; i < graph->static_count; i++) {
        if (!ft_draw_wants(draw, graph->layer[i]))
            continue;
        for (uint32_t s = graph->succ_begin[i]; s < graph->succ_begin[i + 1]; s++)
            if (ft_draw_wants(draw, graph->layer[graph->succ[s]]))
                fprintf(out, "  j%u -> j%u;\n", i, graph->succ[s]);
    }
}

/* A trace knows no edges: one column per thread, in the order in which the thread recorded its jobs. */
static void put_thread(const struct ft_draw *draw, FILE *out, uint32_t thread)
{
    uint32_t last = FT_NONE;
    char name[32];
    ft_draw_thread_name(draw, thread, name, sizeof name);
    fprintf(out, "  subgraph cluster_t%u {\n    label=\"", thread);
    ft_draw_put_dot(out, name);
    fputs("\";\n", out);
    for (uint32_t i = 0; i < draw->step->record_count; i++) {
        const struct ft_trace_record *record = &draw->step->records[i];
        if (record->thread != thread || record->kind != FT_RECORD_JOB || !ft_draw_wants(draw, record->layer))
            continue;
        fprintf(out, "    n%u [label=\"%s", i, ft_op_name((enum ft_op)record->op));
        if (record->layer < FT_LAYERS_MAX)
            fprintf(out, " L%u", record->layer);
        if (record->expert != FT_NONE)
            fprintf(out, " e%u", record->expert);
        fprintf(out, "\\n%.1f us\", ", (double)(record->end_ns - record->start_ns) / 1e3);
        put_colours(out, (enum ft_op)record->op);
        fputs("];\n", out);
        if (last != FT_NONE)
            fprintf(out, "    n%u -> n%u;\n", last, i);
        last = i;
    }
    fputs("  }\n", out);
}

int ft_draw_dot(const struct ft_draw *draw, FILE *out, struct ft_error *err)
{
    char title[256];
    if (draw->step) {
        uint32_t threads = ft_draw_thread_count(draw);
        ft_draw_step_title(draw, title, sizeof title);
        put_head(out, title);
        for (uint32_t thread = 0; thread < threads; thread++)
            put_thread(draw, out, thread);
    } else {
        put_head(out, draw->title ? draw->title : "graph");
        put_graph_nodes(draw, out);
        put_reserved(draw, out);
        put_graph_edges(draw, out);
    }
    fputs("}\n", out);
    return ft_draw_finish(out, err);
}
