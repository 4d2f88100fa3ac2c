/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__x86_64__)
#include "kernels_cpu/vec_avx2.h"

#include "kernels_cpu/delta_body.h"
#else
/* Another architecture: the table keeps the references. */
typedef int ft_delta_avx2_absent;
#endif
