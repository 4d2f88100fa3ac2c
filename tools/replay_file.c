/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay_file.h"

#include "io/file.h"

#include <stdlib.h>
#include <string.h>

#define TRACE_BYTES_MAX (16ull << 30)

/* What one pass over the frames finds: choices of all steps, records of the largest. */
static int count_choices(const struct ft_trace_reader *opened, struct ft_trace_record **records,
                         uint32_t *cap, uint64_t *choices, uint64_t *steps, struct ft_error *err)
{
    struct ft_trace_reader reader = *opened;
    struct ft_trace_step step;
    bool more = true;
    int status;
    while ((status = ft_trace_reader_next(&reader, &step, NULL, 0, &more, err)) == FT_OK && more)
        *cap = FT_MAX(*cap, step.record_count);
    if (status != FT_OK)
        return status;
    *records = malloc((*cap + 1ull) * sizeof **records);
    if (!*records)
        return ft_error_set(err, FT_MEMORY, "no memory for %u trace records", *cap);
    reader = *opened;
    while ((status = ft_trace_reader_next(&reader, &step, *records, *cap, &more, err)) == FT_OK && more) {
        *choices += ft_replay_count(&step);
        ++*steps;
    }
    return status;
}

static int copy_choices(struct ft_replay *replay, const struct ft_trace_reader *opened, struct ft_error *err)
{
    struct ft_trace_record *records = NULL;
    struct ft_trace_reader reader = *opened;
    struct ft_trace_step step;
    uint32_t cap = 0;
    uint64_t choices = 0, steps = 0;
    bool more = true;
    int status = count_choices(opened, &records, &cap, &choices, &steps, err);
    if (status == FT_OK) {
        replay->choices = calloc(choices + 1, sizeof *replay->choices);
        replay->steps = calloc(steps + 1, sizeof *replay->steps);
        if (!replay->choices || !replay->steps)
            status = ft_error_set(err, FT_MEMORY, "no memory for %llu choices", (unsigned long long)choices);
    }
    while (status == FT_OK && more) {
        status = ft_trace_reader_next(&reader, &step, records, cap, &more, err);
        if (status == FT_OK && more)
            ft_replay_append(replay, &step);
    }
    free(records);
    return status == FT_OK ? ft_replay_sort(replay, err) : status;
}

static int check_header(const struct ft_trace_header *header, const struct ft_model *model,
                        struct ft_error *err)
{
    if (header->layer_count != model->layer_count || header->expert_count != model->expert_count ||
        header->topk != model->topk)
        return ft_error_set(err, FT_MISMATCH,
                            "recorded with %u layers, %u experts, top %u; this model has %u, %u, top %u",
                            header->layer_count, header->expert_count, header->topk, model->layer_count,
                            model->expert_count, model->topk);
    return FT_OK;
}

int ft_replay_file_read(struct ft_replay *replay, const char *path, const struct ft_model *model,
                        struct ft_error *err)
{
    char *data = NULL;
    uint64_t bytes = 0;
    memset(replay, 0, sizeof *replay);
    int status = ft_file_read_all(path, TRACE_BYTES_MAX, &data, &bytes, err);
    if (status != FT_OK)
        return ft_error_prepend(err, "--replay");
    struct ft_trace_reader *reader = malloc(sizeof *reader);
    status =
        reader ? ft_trace_reader_open(reader, data, bytes, err) : ft_error_set(err, FT_MEMORY, "no memory");
    if (status == FT_OK)
        status = check_header(&reader->header, model, err);
    if (status == FT_OK)
        status = copy_choices(replay, reader, err);
    free(reader);
    free(data);
    if (status != FT_OK) {
        ft_replay_file_fini(replay);
        ft_error_prepend(err, "--replay %s", path);
    }
    return status;
}

void ft_replay_file_fini(struct ft_replay *replay)
{
    free(replay->choices);
    free(replay->steps);
    memset(replay, 0, sizeof *replay);
}
