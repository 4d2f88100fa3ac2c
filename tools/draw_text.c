/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/draw_internal.h"

#include <stdlib.h>
#include <string.h>

/* What one op of one layer did on one lane. */
struct cell {
    uint64_t bytes, flops, busy_ns;
    uint32_t jobs, rows;
};

struct table {
    struct cell cells[FT_DRAW_LAYERS][FT_OP_COUNT][FT_LANE_COUNT];
    uint64_t wait_ns[FT_DRAW_LAYERS][FT_WAIT_COUNT];
    uint32_t chosen[FT_DRAW_LAYERS][FT_PLACE_COUNT];
    uint32_t ahead[FT_DRAW_LAYERS], all_ahead; /* experts copied ahead for the layer */
    struct cell classes[FT_CLASS_COUNT];
    uint64_t waits[FT_WAIT_COUNT];
    uint32_t places[FT_PLACE_COUNT];
};

static void add(struct cell *cell, uint64_t bytes, uint64_t flops, uint64_t busy_ns)
{
    cell->jobs++;
    cell->bytes += bytes;
    cell->flops += flops;
    cell->busy_ns += busy_ns;
}

static void count_graph(struct table *table, const struct ft_draw *draw)
{
    const struct ft_graph *graph = draw->graph;
    for (uint32_t i = 0; i < graph->static_count; i++) {
        if (!ft_draw_wants(draw, graph->layer[i]))
            continue;
        uint32_t layer = ft_draw_layer_index(graph->layer[i]);
        add(&table->cells[layer][graph->op[i]][graph->lane[i]], graph->bytes[i], graph->flops[i], 0);
        add(&table->classes[ft_op_class((enum ft_op)graph->op[i])], graph->bytes[i], graph->flops[i], 0);
    }
}

static void count_step(struct table *table, const struct ft_draw *draw)
{
    for (uint32_t i = 0; i < draw->step->record_count; i++) {
        const struct ft_trace_record *record = &draw->step->records[i];
        uint32_t layer = ft_draw_layer_index(record->layer);
        uint64_t ns = record->end_ns - record->start_ns;
        if (!ft_draw_wants(draw, record->layer))
            continue;
        if (record->kind == FT_RECORD_JOB) {
            struct cell *cell = &table->cells[layer][record->op][record->lane];
            add(cell, record->bytes, 0, ns);
            cell->rows = FT_MAX(cell->rows, record->rows);
            bool ahead = ft_trace_is_ahead(record);
            table->ahead[layer] += ahead;
            table->all_ahead += ahead;
            add(&table->classes[ft_op_class((enum ft_op)record->op)], record->bytes, 0, ns);
        } else if (record->kind == FT_RECORD_WAIT) {
            table->wait_ns[layer][record->detail] += ns;
            table->waits[record->detail] += ns;
        } else {
            table->chosen[layer][record->place]++;
            table->places[record->place]++;
        }
    }
}

static bool has_any(const struct table *table, uint32_t layer)
{
    for (uint32_t op = 0; op < FT_OP_COUNT; op++)
        for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++)
            if (table->cells[layer][op][lane].jobs)
                return true;
    for (uint32_t wait = 0; wait < FT_WAIT_COUNT; wait++)
        if (table->wait_ns[layer][wait])
            return true;
    return table->chosen[layer][FT_PLACE_DEVICE] + table->chosen[layer][FT_PLACE_FETCH] +
               table->chosen[layer][FT_PLACE_CPU] >
           0;
}

static void put_waits(FILE *out, const uint64_t *wait_ns)
{
    const char *lead = "  waited for:";
    for (uint32_t wait = 0; wait < FT_WAIT_COUNT; wait++)
        if (wait_ns[wait]) {
            fprintf(out, "%s %s %.1f us", lead,
                    wait == FT_WAIT_NONE ? "nothing" : ft_wait_name((enum ft_wait)wait),
                    (double)wait_ns[wait] / 1e3);
            lead = ",";
        }
}

static void put_layer(FILE *out, const struct table *table, uint32_t layer, bool recorded)
{
    if (layer == FT_DRAW_OUTSIDE)
        fputs("outside layers", out);
    else
        fprintf(out, "layer %u", layer);
    const uint32_t *chosen = table->chosen[layer];
    if (chosen[FT_PLACE_DEVICE] + chosen[FT_PLACE_FETCH] + chosen[FT_PLACE_CPU])
        fprintf(out, "  experts: %u resident, %u fetched, %u on the CPU", chosen[FT_PLACE_DEVICE],
                chosen[FT_PLACE_FETCH], chosen[FT_PLACE_CPU]);
    if (table->ahead[layer])
        fprintf(out, "; %u copied ahead", table->ahead[layer]);
    put_waits(out, table->wait_ns[layer]);
    fputc('\n', out);
    for (uint32_t op = 0; op < FT_OP_COUNT; op++)
        for (uint32_t lane = 0; lane < FT_LANE_COUNT; lane++) {
            const struct cell *cell = &table->cells[layer][op][lane];
            if (!cell->jobs)
                continue;
            fprintf(out, "  %-16s %-7s %6u %12.1f", ft_op_name((enum ft_op)op),
                    ft_lane_name((enum ft_lane)lane), cell->jobs, (double)cell->bytes / 1e3);
            if (recorded)
                fprintf(out, " %12.1f %6u\n", (double)cell->busy_ns / 1e3, cell->rows);
            else
                fprintf(out, " %12.3f\n", (double)cell->flops / 1e6);
        }
}

static void put_totals(FILE *out, const struct table *table, bool recorded)
{
    fputs("total by class\n", out);
    for (uint32_t class = 0; class < FT_CLASS_COUNT; class ++) {
        const struct cell *cell = &table->classes[class];
        if (cell->jobs)
            fprintf(out, "  %-24s %6u %12.1f %12.*f\n", ft_class_name((enum ft_class) class), cell->jobs,
                    (double)cell->bytes / 1e3, recorded ? 1 : 3,
                    recorded ? (double)cell->busy_ns / 1e3 : (double)cell->flops / 1e6);
    }
    if (!recorded)
        return;
    fprintf(out, "  experts: %u resident, %u fetched, %u on the CPU; %u copied ahead\n",
            table->places[FT_PLACE_DEVICE], table->places[FT_PLACE_FETCH], table->places[FT_PLACE_CPU],
            table->all_ahead);
    put_waits(out, table->waits);
    fputc('\n', out);
}

int ft_draw_text(const struct ft_draw *draw, FILE *out, struct ft_error *err)
{
    bool recorded = draw->step != NULL;
    char title[256];
    struct table *table = calloc(1, sizeof *table);
    if (!table)
        return ft_error_set(err, FT_MEMORY, "no memory for a table of %zu bytes", sizeof *table);
    if (recorded) {
        count_step(table, draw);
        ft_draw_step_title(draw, title, sizeof title);
        fprintf(out, "%s\n\n  %-16s %-7s %6s %12s %12s %6s\n", title, "op", "lane", "jobs", "KB", "busy us",
                "rows");
    } else {
        const struct ft_graph *graph = draw->graph;
        count_graph(table, draw);
        fprintf(out, "%s: %u jobs, %u edges, %u ids reserved per layer\n\n  %-16s %-7s %6s %12s %12s\n",
                draw->title ? draw->title : "graph", graph->static_count, graph->edge_count,
                graph->reserved_count, "op", "lane", "tiles", "KB", "MFLOP");
    }
    for (uint32_t layer = 0; layer < FT_DRAW_LAYERS; layer++)
        if (has_any(table, layer))
            put_layer(out, table, layer, recorded);
    put_totals(out, table, recorded);
    free(table);
    return ft_draw_finish(out, err);
}
