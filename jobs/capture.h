/* SPDX-License-Identifier: Apache-2.0 */
/* Where a step's rows land in the buffers of struct ft_capture (jobs/session.h), for every device that fills
 * them. Each returns NULL, or does nothing, when nobody asked for that row. Any thread; rows do not overlap.
 */
#ifndef FT_JOBS_CAPTURE_H
#define FT_JOBS_CAPTURE_H

#include "jobs/execute.h"

/* Residual before layer `block`: [hc_count * hidden]. */
float *ft_capture_residual(const struct ft_model *model, const struct ft_batch *batch, uint32_t row,
                           uint32_t block);
/* The last hidden state: [hidden]. */
float *ft_capture_final(const struct ft_model *model, const struct ft_batch *batch, uint32_t row);
/* [vocab] */
float *ft_capture_logits(const struct ft_model *model, const struct ft_batch *batch, uint32_t row);
/* Notes the router's picks, ids [topk], in ascending order; ids = NULL: a dense layer, -1 each. */
void ft_capture_topk(const struct ft_model *model, const struct ft_batch *batch, uint32_t row, uint32_t layer,
                     const uint32_t *ids);

#endif
