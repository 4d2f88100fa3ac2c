/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of one step: which tokens, at which positions, of which sequences. Filled by the session between
 * steps, read-only inside a step but for the fields marked "out". A batch may take several steps, one after the
 * other, each with the layers that follow (slices); its activations stay where they are between them.
 */
#ifndef FT_JOBS_BATCH_H
#define FT_JOBS_BATCH_H

#include <stdatomic.h>

#include "graph/types.h"
#include "kernels_cpu/kernels_cpu.h"

struct ft_capture;

struct ft_batch_sequence {
    uint32_t handle;               /* of the session */
    uint32_t first_row, row_count; /* its rows are consecutive */
    uint32_t position;             /* of the first row */
    const uint32_t *tokens;        /* [token_count] all tokens so far, prompt and generated */
    uint32_t token_count;
    float *state;        /* struct ft_state_layout; NULL when the model has none */
    float *const *pages; /* [..] of struct ft_kv_layout */
    const struct ft_sampling *sampling;
    const struct ft_capture *capture;
    uint32_t logit_count;  /* of its last rows, these go to the head; 0: no token wanted yet */
    uint32_t sampled;      /* out: token of the last logit row, FT_NONE */
    _Atomic int failed;    /* out: FT_NUMERIC when a row of this sequence is not a number */
    uint32_t failed_layer; /* out */
};

struct ft_batch {
    uint32_t rows, sequence_count, logit_rows;
    uint32_t layer_begin, layer_end;     /* layers of the step; not all of them: a slice of a prefill */
    bool prefill;                        /* some sequence brings more than one row */
    uint32_t decode_step;                /* steps without prefill rows before this one, since open */
    uint32_t *token;                     /* [rows] */
    uint32_t *position;                  /* [rows] */
    uint32_t *row_sequence;              /* [rows] index into sequences */
    uint32_t *logit_row;                 /* [logit_rows] row number */
    struct ft_batch_sequence *sequences; /* [sequence_count] */
};

#endif
