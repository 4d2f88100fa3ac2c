/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__x86_64__)
#define VEC(name) name##_avx512amx
#define DIGITS 3
#define OUTS 2
#define TILES_HEADER "kernels_cpu/tiles_amx.h"
#include "kernels_cpu/vec_avx512.h"

#include "kernels_cpu/fixed_avx512.h"

#include "kernels_cpu/fixed_avx512_vnni.h"

#include "kernels_cpu/amx_tiles.h"

#include "kernels_cpu/matmul_body.h"
#else
/* Another architecture: the table keeps the references. */
typedef int ft_matmul_avx512amx_absent;
#endif
