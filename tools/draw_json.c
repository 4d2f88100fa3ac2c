/* SPDX-License-Identifier: Apache-2.0 */
/* Written as it goes: a prefill step has more records than one wants to hold as JSON objects. Names of the
 * project are plain words; the few texts from outside are escaped here. */
#include "tools/draw_internal.h"

static void put_text(FILE *out, const char *text)
{
    fputc('"', out);
    for (const unsigned char *at = (const unsigned char *)text; *at; at++) {
        if (*at == '"' || *at == '\\')
            fprintf(out, "\\%c", *at);
        else if (*at < ' ')
            fprintf(out, "\\u%04x", *at);
        else
            fputc(*at <= '~' ? *at : '?', out);
    }
    fputc('"', out);
}

/* JSON readers commonly hold integers in 64 signed bits; a time or size beyond that is nonsense anyway. */
static unsigned long long whole(uint64_t value)
{
    return FT_MIN(value, (uint64_t)INT64_MAX);
}

/* An id, or null. */
static void put_id(FILE *out, const char *key, uint32_t id)
{
    if (id == FT_NONE)
        fprintf(out, ", \"%s\": null", key);
    else
        fprintf(out, ", \"%s\": %u", key, id);
}

static void put_graph_job(const struct ft_graph *graph, FILE *out, uint32_t i)
{
    fprintf(out, "    {\"job\": %u, \"op\": \"%s\", \"class\": \"%s\", \"lane\": \"%s\"", i,
            ft_op_name((enum ft_op)graph->op[i]), ft_class_name(ft_op_class((enum ft_op)graph->op[i])),
            ft_lane_name((enum ft_lane)graph->lane[i]));
    put_id(out, "layer", graph->layer[i] < FT_LAYERS_MAX ? graph->layer[i] : FT_NONE);
    fprintf(out,
            ", \"begin\": %u, \"end\": %u, \"bytes\": %llu, \"flops\": %llu, \"in_degree\": %d, "
            "\"successors\": [",
            graph->begin[i], graph->end[i], whole(graph->bytes[i]), whole(graph->flops[i]),
            graph->in_degree[i]);
    for (uint32_t s = graph->succ_begin[i]; s < graph->succ_begin[i + 1]; s++)
        fprintf(out, "%s%u", s == graph->succ_begin[i] ? "" : ", ", graph->succ[s]);
    fputs("]}", out);
}

static void put_graph(const struct ft_draw *draw, FILE *out)
{
    const struct ft_graph *graph = draw->graph;
    const char *lead = "\n";
    fputs("{\n  \"kind\": \"graph\",\n  \"title\": ", out);
    put_text(out, draw->title ? draw->title : "");
    fprintf(out,
            ",\n  \"rows\": %u,\n  \"sequences\": %u,\n  \"static_count\": %u,\n  \"edge_count\": %u,\n"
            "  \"reserved_count\": %u,\n  \"layer_count\": %u,\n  \"jobs\": [",
            graph->shape.rows, graph->shape.sequences, graph->static_count, graph->edge_count,
            graph->reserved_count, graph->layer_count);
    for (uint32_t i = 0; i < graph->static_count; i++) {
        if (!ft_draw_wants(draw, graph->layer[i]))
            continue;
        fputs(lead, out);
        put_graph_job(graph, out, i);
        lead = ",\n";
    }
    fputs("\n  ]\n}\n", out);
}

static void put_record(const struct ft_trace_record *record, FILE *out)
{
    static const char *const kinds[] = {
        [FT_RECORD_JOB] = "job", [FT_RECORD_WAIT] = "wait", [FT_RECORD_CHOICE] = "choice"};
    fprintf(out, "    {\"kind\": \"%s\", \"start_ns\": %llu, \"end_ns\": %llu, \"thread\": %u",
            kinds[record->kind], whole(record->start_ns), whole(record->end_ns), record->thread);
    put_id(out, "layer", record->layer < FT_LAYERS_MAX ? record->layer : FT_NONE);
    put_id(out, "job", record->job);
    if (record->kind == FT_RECORD_WAIT) {
        fprintf(out, ", \"cause\": \"%s\"}", ft_wait_name((enum ft_wait)record->detail));
        return;
    }
    put_id(out, "expert", record->expert);
    fprintf(out, ", \"op\": \"%s\", \"lane\": \"%s\", \"rows\": %u, \"bytes\": %llu, \"reason\": \"%s\"",
            ft_op_name((enum ft_op)record->op), ft_lane_name((enum ft_lane)record->lane), record->rows,
            whole(record->bytes), ft_reason_text((enum ft_reason)record->detail));
    /* a prediction from a file may be anything; JSON has no infinity */
    if (record->predicted_ns > 0 && record->predicted_ns < 1e18f)
        fprintf(out, ", \"predicted_ns\": %.9g", (double)record->predicted_ns);
    if (record->kind == FT_RECORD_CHOICE) {
        fprintf(out, ", \"place\": \"%s\"", ft_place_name((enum ft_place)record->place));
        put_id(out, "slot", record->slot);
    } else
        fprintf(out, ", \"stolen\": %s, \"skipped\": %s", record->flags & 1 ? "true" : "false",
                record->flags & 2 ? "true" : "false");
    fputs("}", out);
}

static void put_step(const struct ft_draw *draw, FILE *out)
{
    const struct ft_trace_step *step = draw->step;
    const struct ft_trace_header *header = draw->header;
    uint32_t threads = ft_draw_thread_count(draw);
    char name[32];
    fputs("{\n  \"kind\": \"step\"", out);
    if (header) {
        const char *const texts[][2] = {{"model", header->model},
                                        {"strategy", header->strategy},
                                        {"device", header->device},
                                        {"isa", header->isa}};
        for (int i = 0; i < 4; i++) {
            fprintf(out, ",\n  \"%s\": ", texts[i][0]);
            put_text(out, texts[i][1]);
        }
        fprintf(out,
                ",\n  \"layer_count\": %u,\n  \"expert_count\": %u,\n  \"topk\": %u,\n  \"workers\": %u,\n"
                "  \"slot_count\": %u,\n  \"expert_bytes\": %llu",
                header->layer_count, header->expert_count, header->topk, header->workers, header->slot_count,
                whole(header->expert_bytes));
    }
    fprintf(
        out,
        ",\n  \"step\": %u,\n  \"rows\": %u,\n  \"sequences\": %u,\n  \"prefill\": %s,\n  \"dropped\": %u,\n"
        "  \"layer_begin\": %u,\n  \"layer_end\": %u,\n  \"begin_ns\": %llu,\n  \"end_ns\": %llu,\n  "
        "\"threads\": [",
        step->step, step->rows, step->sequences, step->prefill ? "true" : "false", step->dropped,
        step->layer_begin, step->layer_end, whole(step->begin_ns), whole(step->end_ns));
    for (uint32_t thread = 0; thread < threads; thread++) {
        ft_draw_thread_name(draw, thread, name, sizeof name);
        fputs(thread ? ", " : "", out);
        put_text(out, name);
    }
    fputs("],\n  \"records\": [", out);
    const char *lead = "\n";
    for (uint32_t i = 0; i < step->record_count; i++) {
        if (!ft_draw_wants(draw, step->records[i].layer))
            continue;
        fputs(lead, out);
        put_record(&step->records[i], out);
        lead = ",\n";
    }
    fputs("\n  ]\n}\n", out);
}

int ft_draw_json(const struct ft_draw *draw, FILE *out, struct ft_error *err)
{
    if (draw->step)
        put_step(draw, out);
    else
        put_graph(draw, out);
    return ft_draw_finish(out, err);
}
