/* SPDX-License-Identifier: Apache-2.0 */
/* The measurements of ft bench, one file each (ft_bench_<name>.c). They return the exit code. */
#ifndef FT_TOOLS_FT_BENCH_H
#define FT_TOOLS_FT_BENCH_H

#define FT_BENCHES(X)                                                                                        \
    X(decode, "decode steps of a model's shape, with synthetic weights, against the machine's bounds")       \
    X(jobs, "what the scheduler costs: ns per job, per steal, per wake")                                     \
    X(kernels, "speed of the CPU kernels against the machine's read ceiling")                                \
    X(load, "reading a checkpoint's weights from disk into memory")                                          \
    X(ple, "reading rows of a PLE table from disk")

#define FT_BENCH_DECLARE(name, about) int ft_command_bench_##name(int argc, char **argv);
FT_BENCHES(FT_BENCH_DECLARE)
#undef FT_BENCH_DECLARE

#endif
