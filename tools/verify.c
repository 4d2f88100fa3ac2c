/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/verify.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define REFERENCE_BYTES_MAX (8ull << 30)

double ft_verify_error(const float *values, const float *reference, uint64_t count)
{
    double worst = 0, largest = 0;
    for (uint64_t i = 0; i < count; i++) {
        double distance = fabs((double)values[i] - (double)reference[i]);
        if (!isfinite(distance))
            return INFINITY;
        worst = fmax(worst, distance);
        largest = fmax(largest, fabs((double)reference[i]));
    }
    return worst == 0 ? 0 : worst / largest; /* all-zero reference: anything else is infinitely far */
}

uint32_t ft_verify_count_rows(const int32_t *values, const int32_t *reference, uint32_t rows, uint32_t k)
{
    uint32_t different = 0;
    for (uint32_t r = 0; r < rows; r++)
        different += memcmp(values + (uint64_t)r * k, reference + (uint64_t)r * k, k * sizeof *values) != 0;
    return different;
}

/* Data of tensor `name`, checked; *data stays NULL when it is absent and not needed. */
static int find_data(const struct ft_reference *reference, const char *path, const char *name, bool needed,
                     enum ft_dtype dtype, const uint64_t *shape, uint32_t rank, const void **data,
                     struct ft_error *err)
{
    char found[96], wanted[96];
    const struct ft_array *array = ft_arrays_find(&reference->arrays, name);
    if (!array && !needed)
        return FT_OK;
    if (!array)
        return ft_error_set(err, FT_FORMAT, "%s: has no tensor %s", path, name);
    bool same = array->rank == rank && array->dtype == dtype;
    for (uint32_t i = 0; same && i < rank; i++)
        same = array->shape[i] == shape[i];
    if (!same) {
        ft_shape_print(array->shape, array->rank, found, sizeof found);
        ft_shape_print(shape, rank, wanted, sizeof wanted);
        return ft_error_set(err, FT_FORMAT, "%s: %s is %s %s, wanted %s %s for this model", path, name,
                            ft_dtype_name(array->dtype), found, ft_dtype_name(dtype), wanted);
    }
    *data = array->data;
    return FT_OK;
}

static int find_hidden(struct ft_reference *reference, const char *path, const struct ft_model *model,
                       struct ft_error *err)
{
    int status = FT_OK;
    for (uint32_t i = 0; i <= model->layer_count && status == FT_OK; i++) {
        char name[32];
        uint64_t width = (uint64_t)model->hidden * (i < model->layer_count ? model->hc_count : 1);
        const void *data = NULL;
        snprintf(name, sizeof name, "hidden.%u", i);
        status = find_data(reference, path, name, false, FT_DTYPE_F32, (uint64_t[]){reference->rows, width},
                           2, &data, err);
        reference->hidden[i] = data;
    }
    return status;
}

/* A list of ids of any length: its length from the file. */
static int find_list(const struct ft_reference *reference, const char *path, const char *name, bool needed,
                     uint32_t vocab, const int32_t **ids, uint32_t *count, struct ft_error *err)
{
    const struct ft_array *array = ft_arrays_find(&reference->arrays, name);
    uint64_t length = array && array->rank == 1 ? array->shape[0] : 0;
    const void *data = NULL;
    int status = find_data(reference, path, name, needed, FT_DTYPE_I32, &length, 1, &data, err);
    if (status != FT_OK || !data)
        return status;
    *ids = data;
    if (length > 1u << 30 || (needed && !length))
        return ft_error_set(err, FT_FORMAT, "%s: %s has %llu ids", path, name, (unsigned long long)length);
    *count = (uint32_t)length;
    for (uint32_t i = 0; i < *count; i++)
        if ((*ids)[i] < 0 || (uint32_t)(*ids)[i] >= vocab)
            return ft_error_set(err, FT_FORMAT, "%s: %s[%u] is %d, the model's vocabulary has %u", path, name,
                                i, (*ids)[i], vocab);
    return FT_OK;
}

static int find_all(struct ft_reference *reference, const char *path, const struct ft_model *model,
                    struct ft_error *err)
{
    const void *logits = NULL, *topk = NULL;
    int status =
        find_list(reference, path, "input_ids", true, model->vocab, &reference->ids, &reference->rows, err);
    uint64_t rows = reference->rows;
    if (status == FT_OK)
        status = find_list(reference, path, "greedy", false, model->vocab, &reference->greedy,
                           &reference->greedy_count, err);
    if (status == FT_OK)
        status = find_data(reference, path, "logits", true, FT_DTYPE_F32, (uint64_t[]){rows, model->vocab}, 2,
                           &logits, err);
    if (status == FT_OK)
        status = find_data(reference, path, "router_topk", false, FT_DTYPE_I32,
                           (uint64_t[]){model->layer_count, rows, model->topk}, 3, &topk, err);
    if (status == FT_OK)
        status = find_hidden(reference, path, model, err);
    reference->logits = logits;
    reference->topk = topk;
    return status;
}

int ft_reference_open(struct ft_reference *reference, const char *path, const struct ft_model *model,
                      struct ft_error *err)
{
    memset(reference, 0, sizeof *reference);
    int status = ft_safetensors_read(&reference->arrays, path, REFERENCE_BYTES_MAX, err);
    if (status != FT_OK)
        return status;
    status = find_all(reference, path, model, err);
    if (status != FT_OK)
        ft_reference_close(reference);
    return status;
}

void ft_reference_close(struct ft_reference *reference)
{
    ft_arrays_fini(&reference->arrays);
    memset(reference, 0, sizeof *reference);
}
