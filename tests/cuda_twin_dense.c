/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cuda_twin_dense.h"

#include <stdlib.h>

#include "jobs/execute.h"

void twin_dense_run(const struct twin_dense *twin, enum ft_op op, enum ft_phase phase, uint32_t layer,
                    uint32_t end)
{
    struct ft_kernels kernels;
    struct ft_error err;
    struct ft_batch_sequence sequence = {.row_count = twin->rows};
    uint32_t *row_sequence = calloc(twin->space.rows, sizeof *row_sequence);
    struct ft_batch batch = {.rows = twin->rows,
                             .sequence_count = 1,
                             .logit_rows = twin->logit_rows,
                             .token = twin->token,
                             .position = twin->position,
                             .row_sequence = row_sequence,
                             .logit_row = twin->logit_row,
                             .sequences = &sequence};
    if (ft_kernels_init(&kernels, "ref", &err) != FT_OK || !row_sequence)
        abort();
    struct ft_execute x = {.model = twin->model,
                           .weights = twin->weights,
                           .kernels = &kernels,
                           .space = twin->space,
                           .buffer = twin->buffer,
                           .frequencies = twin->frequencies,
                           .rotary_scale = twin->rotary_scale,
                           .batch = &batch};
    ft_execute_op(&x, 0, op, phase, layer, 0, end);
    free(row_sequence);
}

uint32_t twin_dense_sample(float *logits, uint32_t vocab, const struct twin_sampling *s,
                           const uint32_t *recent, uint32_t recent_count, uint32_t *index)
{
    struct ft_sampling sampling = {.temperature = s->temperature,
                                   .top_k = s->top_k,
                                   .top_p = s->top_p,
                                   .min_p = s->min_p,
                                   .repetition_penalty = s->repetition_penalty,
                                   .seed = s->seed};
    return ft_sample_token(logits, vocab, &sampling, recent, recent_count, s->position, index);
}

uint16_t twin_dense_bf16(float value)
{
    return ft_f32_to_bf16(value);
}
