/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__x86_64__)
#include "kernels_cpu/vec_avx512.h"

#include "kernels_cpu/bench_roof_body.h"
#else
/* Another architecture: bench_roof.c has a plain loop. */
typedef int ft_bench_roof_avx512_absent;
#endif
