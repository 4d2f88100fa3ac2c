/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__x86_64__)
#include "kernels_cpu/vec_avx512.h"

#include "kernels_cpu/attention_body.h"
#else
/* Another architecture: the table keeps the references. */
typedef int ft_attention_avx512_absent;
#endif
