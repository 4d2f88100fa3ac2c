/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/capture.h"

#include "jobs/session.h"

static const struct ft_capture *capture_of(const struct ft_batch *batch, uint32_t row, uint32_t *position)
{
    const struct ft_capture *capture = batch->sequences[batch->row_sequence[row]].capture;
    *position = batch->position[row];
    return capture && *position < capture->row_count ? capture : NULL;
}

float *ft_capture_residual(const struct ft_model *model, const struct ft_batch *batch, uint32_t row,
                           uint32_t block)
{
    uint32_t position;
    const struct ft_capture *capture = capture_of(batch, row, &position);
    if (!capture || !capture->hidden)
        return NULL;
    return capture->hidden +
           ((uint64_t)block * capture->row_count + position) * model->hc_count * model->hidden;
}

float *ft_capture_final(const struct ft_model *model, const struct ft_batch *batch, uint32_t row)
{
    uint32_t position;
    const struct ft_capture *capture = capture_of(batch, row, &position);
    if (!capture || !capture->hidden)
        return NULL;
    uint64_t blocks = (uint64_t)model->layer_count * capture->row_count * model->hc_count * model->hidden;
    return capture->hidden + blocks + (uint64_t)position * model->hidden;
}

float *ft_capture_logits(const struct ft_model *model, const struct ft_batch *batch, uint32_t row)
{
    uint32_t position;
    const struct ft_capture *capture = capture_of(batch, row, &position);
    return capture && capture->logits ? capture->logits + (uint64_t)position * model->vocab : NULL;
}

void ft_capture_topk(const struct ft_model *model, const struct ft_batch *batch, uint32_t row, uint32_t layer,
                     const uint32_t *ids)
{
    uint32_t position, k = model->topk;
    const struct ft_capture *capture = capture_of(batch, row, &position);
    if (!capture || !capture->topk)
        return;
    int32_t *to = capture->topk + ((uint64_t)layer * capture->row_count + position) * k;
    for (uint32_t i = 0; i < k; i++) { /* insertion sort: k is small */
        int32_t id = ids ? (int32_t)ids[i] : -1;
        uint32_t j = i;
        for (; j > 0 && to[j - 1] > id; j--)
            to[j] = to[j - 1];
        to[j] = id;
    }
}
