/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__x86_64__)
#define VEC(name) name##_int16_avx512vnni
#define EXACT(name) name##_avx512vnni
#define DIGITS 2
#define OUTS 2
#include "kernels_cpu/vec_avx512.h"

#include "kernels_cpu/fixed_avx512.h"

#include "kernels_cpu/fixed_avx512_vnni.h"

#include "kernels_cpu/matmul_body.h"
#else
/* Another architecture: the table keeps the references. */
typedef int ft_matmul_int16_avx512vnni_absent;
#endif
