/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results against a reference: how far values are apart, which choices differ.
 *
 * Errors are relative to the largest reference value of the whole tensor: max |a - b| / max |b|. What is not
 * a number on either side is infinitely far. Pure; threads: any.
 */
#ifndef FT_TOOLS_VERIFY_H
#define FT_TOOLS_VERIFY_H

#include "graph/model.h"
#include "io/safetensors.h"

/* A reference in memory; pointers into `arrays`. Absent tensors are NULL, except ids and logits. */
struct ft_reference {
    struct ft_arrays arrays;
    uint32_t rows, greedy_count;
    const int32_t *ids;                     /* [rows] */
    const float *logits;                    /* [rows, vocab] */
    const int32_t *topk;                    /* [layer_count, rows, k], ascending */
    const int32_t *greedy;                  /* [greedy_count] */
    const float *hidden[FT_LAYERS_MAX + 1]; /* [rows, nH], the last one [rows, H] */
};
/* FT_FORMAT names the tensor, what was found and what the model wants. */
int ft_reference_open(struct ft_reference *reference, const char *path, const struct ft_model *model,
                      struct ft_error *err);
void ft_reference_close(struct ft_reference *reference);

double ft_verify_error(const float *values, const float *reference, uint64_t count);
/* Rows of [rows, k] that are not equal. */
uint32_t ft_verify_count_rows(const int32_t *values, const int32_t *reference, uint32_t rows, uint32_t k);

#endif
