/* SPDX-License-Identifier: Apache-2.0 */
/* Runs one op of jobs/execute*.c, with the reference kernels, on given buffers: what the CUDA kernels are
 * compared with. A C interface for C++ tests (jobs/batch.h uses C11 atomics). */
#ifndef FT_TESTS_CUDA_TWIN_ATTENTION_H
#define FT_TESTS_CUDA_TWIN_ATTENTION_H

#include "graph/graph.h"
#include "graph/model.h"
#include "graph/weights.h"
#include "graph/workspace.h"

struct cuda_twin {
    const struct ft_model *model;
    const struct ft_weights *weights;
    struct ft_workspace space;
    float *buffer; /* [space.count] */
    double *frequencies;
    double rotary_scale;
    uint32_t rows, sequences, tokens_max;
    const uint32_t *first_row, *row_count, *position; /* [sequences]; position of the first row */
    float **state;                                    /* [sequences] */
    float *const *pages;                              /* [sequences, pages_max] */
    uint32_t pages_max;
};

/* The whole range of the op, over all units. */
void cuda_twin_run(const struct cuda_twin *twin, enum ft_op op, uint32_t layer);

#endif
