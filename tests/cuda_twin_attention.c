/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cuda_twin_attention.h"

#include <stdlib.h>

#include "jobs/execute.h"

void cuda_twin_run(const struct cuda_twin *twin, enum ft_op op, uint32_t layer)
{
    struct ft_kernels kernels;
    struct ft_error err;
    if (ft_kernels_init(&kernels, "ref", &err) != FT_OK)
        abort();
    struct ft_execute x = {.model = twin->model,
                           .weights = twin->weights,
                           .kernels = &kernels,
                           .space = twin->space,
                           .buffer = twin->buffer,
                           .frequencies = twin->frequencies,
                           .rotary_scale = twin->rotary_scale};
    ft_state_layout_init(&x.state, twin->model);
    ft_kv_layout_init(&x.kv, twin->model);
    x.scratch_count = ft_execute_scratch_count(twin->model, twin->tokens_max);
    float *scratch = calloc(x.scratch_count, sizeof *scratch);
    x.scratch = &scratch;
    struct ft_batch batch = {.rows = twin->rows, .sequence_count = twin->sequences};
    batch.position = calloc(twin->rows, sizeof *batch.position);
    batch.row_sequence = calloc(twin->rows, sizeof *batch.row_sequence);
    batch.sequences = calloc(twin->sequences, sizeof *batch.sequences);
    if (!scratch || !batch.position || !batch.row_sequence || !batch.sequences)
        abort();
    for (uint32_t s = 0; s < twin->sequences; s++) {
        struct ft_batch_sequence *sequence = &batch.sequences[s];
        sequence->first_row = twin->first_row[s];
        sequence->row_count = twin->row_count[s];
        sequence->position = twin->position[s];
        sequence->state = twin->state[s];
        sequence->pages = twin->pages + (uint64_t)s * twin->pages_max;
        for (uint32_t i = 0; i < sequence->row_count; i++) {
            batch.position[sequence->first_row + i] = sequence->position + i;
            batch.row_sequence[sequence->first_row + i] = s;
        }
    }
    x.batch = &batch;
    uint32_t end = UINT32_MAX;
    if (op == FT_OP_PLE_PROJECT)
        end = (twin->model->hc_count + 1) * twin->model->hidden;
    ft_execute_op(&x, 0, op, FT_PHASE_ATTENTION, layer, 0, end);
    free(scratch);
    free(batch.position);
    free(batch.row_sequence);
    free(batch.sequences);
}
