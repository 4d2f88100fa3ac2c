/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ft bench kernels --step: where the time of one decode step goes, op by op, and which of it ran on one
 * worker only.
 *
 * Time is given to ops by sweeping over the step: while n jobs run at once, each op gets 1/n of the time of
 * each of its jobs; what is left is time in which no job ran. Alone is the part in which a job ran and every
 * other worker had nothing to do. Threads: one at a time. Errors: prepended with what was being done; nothing
 * is left behind.
 */
#ifndef FT_TOOLS_FT_BENCH_STEP_H
#define FT_TOOLS_FT_BENCH_STEP_H

#include "kernels_cpu/bench_kernels.h"

struct ft_bench_step_options {
    const char *model, *isa;
    const char *shape;  /* random weights of a shape (tools/shapes.h): one layer of each kind of attention is
                           measured  and counted as often as the shape has it; NULL = the model */
    const char *format; /* shape: of the experts; NULL = nvfp4 */
    uint32_t steps, workers;
    bool json;
};

/* Measures and prints. The read ceiling is that of the weights themselves (bench_kernels.h says why), or of a bank where they are smaller, measured as
 * `bench` says before and after the steps; the mean counts, both are printed. */
int ft_bench_step(const struct ft_bench_step_options *options, const struct ft_bench_kernels_options *bench,
                  struct ft_error *err);

#endif
