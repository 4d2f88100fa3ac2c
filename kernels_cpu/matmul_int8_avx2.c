/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__x86_64__)
#define VEC(name) name##_int8_avx2
#define EXACT(name) name##_avx2
#define DIGITS 1
#define OUTS 1
#include "kernels_cpu/vec_avx2.h"

#include "kernels_cpu/fixed_avx2.h"

#include "kernels_cpu/fixed_avx2_madd.h"

#include "kernels_cpu/matmul_body.h"
#else
/* Another architecture: the table keeps the references. */
typedef int ft_matmul_int8_avx2_absent;
#endif
