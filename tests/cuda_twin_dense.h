/* SPDX-License-Identifier: Apache-2.0 */
/* The dense ops of a step as cores run them (jobs/execute.c, reference arithmetic), callable from C++. */
#ifndef FT_TESTS_CUDA_TWIN_DENSE_H
#define FT_TESTS_CUDA_TWIN_DENSE_H

#include "graph/graph.h"
#include "graph/model.h"
#include "graph/op.h"
#include "graph/weights.h"
#include "graph/workspace.h"

#ifdef __cplusplus
extern "C" {
#endif

struct twin_dense {
    const struct ft_model *model;
    const struct ft_weights *weights;
    struct ft_workspace space;
    float *buffer; /* [space.count] */
    double *frequencies, rotary_scale;
    uint32_t rows, logit_rows;
    uint32_t *token, *position, *logit_row; /* [rows], [rows], [logit_rows] */
};

/* Runs elements [0, end) of the op's axis. */
void twin_dense_run(const struct twin_dense *twin, enum ft_op op, enum ft_phase phase, uint32_t layer,
                    uint32_t end);

struct twin_sampling {
    float temperature, top_p, min_p, repetition_penalty;
    uint32_t top_k;
    uint64_t seed, position;
};
/* ft_sample_token. */
uint32_t twin_dense_sample(float *logits, uint32_t vocab, const struct twin_sampling *sampling,
                           const uint32_t *recent, uint32_t recent_count, uint32_t *index);
uint16_t twin_dense_bf16(float value);

#ifdef __cplusplus
}
#endif
#endif
