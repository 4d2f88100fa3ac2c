/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/routing_file.h"

#include "io/safetensors.h"

#include <stdio.h>
#include <stdlib.h>

#define BYTES_MAX (1ull << 30)

static const struct ft_array *find_trace(const struct ft_arrays *arrays, uint32_t index)
{
    char name[32];
    snprintf(name, sizeof name, "trace.%u", index);
    return ft_arrays_find(arrays, name);
}

static int check_trace(const char *path, const struct ft_array *trace, const struct ft_model *model,
                       struct ft_error *err)
{
    if (trace->dtype != FT_DTYPE_U8 || trace->rank != 3 || !trace->shape[0] || trace->shape[0] > UINT32_MAX)
        return ft_error_set(err, FT_FORMAT, "%s: %s is not U8 [tokens, layers, topk]", path, trace->name);
    if (trace->shape[1] != model->layer_count || trace->shape[2] != model->topk)
        return ft_error_set(
            err, FT_USAGE,
            "%s: recorded from %llu layers with %llu experts a token; this model has %u and %u", path,
            (unsigned long long)trace->shape[1], (unsigned long long)trace->shape[2], model->layer_count,
            model->topk);
    return FT_OK;
}

static void interleave(const struct ft_arrays *arrays, struct ft_routing *routing, uint16_t *ids)
{
    uint64_t layers = routing->layer_count, rows = routing->row_count, k = routing->topk;
    for (uint64_t row = 0; row < rows; row++) {
        const uint8_t *from = find_trace(arrays, (uint32_t)row)->data;
        for (uint64_t i = 0; i < routing->step_count * layers; i++)
            for (uint64_t j = 0; j < k; j++)
                ids[(i * rows + row) * k + j] = from[i * k + j];
    }
}

int ft_routing_file_read(const char *path, const struct ft_model *model, uint32_t rows_max,
                         struct ft_routing *routing, struct ft_error *err)
{
    struct ft_arrays arrays;
    const struct ft_array *trace;
    *routing =
        (struct ft_routing){.step_count = UINT32_MAX, .layer_count = model->layer_count, .topk = model->topk};
    int status = ft_safetensors_read(&arrays, path, BYTES_MAX, err);
    if (status != FT_OK)
        return status;
    while (status == FT_OK && routing->row_count < rows_max &&
           (trace = find_trace(&arrays, routing->row_count))) {
        status = check_trace(path, trace, model, err);
        routing->step_count = (uint32_t)FT_MIN((uint64_t)routing->step_count, trace->shape[0]);
        routing->row_count++;
    }
    if (status == FT_OK && !routing->row_count)
        status = ft_error_set(err, FT_FORMAT, "%s: has no array trace.0", path);
    if (status == FT_OK) {
        uint64_t rows = (uint64_t)routing->step_count * routing->layer_count * routing->row_count;
        uint16_t *ids = malloc(rows * routing->topk * sizeof *ids);
        routing->ids = ids;
        if (ids)
            interleave(&arrays, routing, ids);
        else
            status = ft_error_set(err, FT_MEMORY, "%s: no memory for its routing", path);
    }
    ft_arrays_fini(&arrays);
    return status;
}
