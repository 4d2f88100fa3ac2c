/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast prompts are read, and what that costs the sequences that decode meanwhile: a prompt alone; the same
 * prompt beside running sequences, until it is read or these have made steps_max tokens each; these alone again.
 * Threads: those of the session.
 */
#ifndef FT_TOOLS_BENCH_PREFILL_H
#define FT_TOOLS_BENCH_PREFILL_H

#include "jobs/session.h"

struct ft_bench_prefill_options {
    uint32_t prompt_tokens, vocab;
    uint32_t batch;     /* sequences that decode */
    uint32_t steps_max; /* beside the prompt */
    uint32_t steps;     /* after it */
    uint64_t seed;      /* of the prompt's tokens */
    bool (*go_on)(void);
};

struct ft_bench_prefill {
    uint32_t prompt_tokens; /* 0: not measured */
    /* alone: the better of two rounds, time of whole calls */
    uint64_t chunks;
    double alone_s;
    /* beside */
    uint64_t slices, tokens /* of all sequences that decode */;
    double beside_s, gap_s_max /* between two tokens of a sequence */;
    uint32_t rows; /* of the prompt, computed; those of a chunk that is not ended do not count */
    bool whole;    /* false: it was not read to its end */
    /* after */
    double after_s; /* of `steps` decode steps */
    uint64_t after_hits, after_misses;
};

/* A prompt of the session that does nothing else. */
int ft_bench_prefill_alone(struct ft_session *session, const struct ft_bench_prefill_options *options,
                           struct ft_bench_prefill *out, struct ft_error *err);
/* Beside `batch` sequences that decode already, and after it. */
int ft_bench_prefill_beside(struct ft_session *session, const struct ft_bench_prefill_options *options,
                            struct ft_bench_prefill *out, struct ft_error *err);

#endif
