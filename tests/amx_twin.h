/* SPDX-License-Identifier: Apache-2.0 */
/* The AMX kernels over tiles in plain C, for cores without AMX (but with AVX-512 VNNI): the same arithmetic. */
#ifndef FT_AMX_TWIN_H
#define FT_AMX_TWIN_H

#include "kernels_cpu/kernels_cpu.h"

/* As ft_kernels_init with "avx512amx"; the twin where the core has no AMX. False where it cannot run either. */
bool amx_twin_init(struct ft_kernels *kernels, struct ft_error *err);

#endif
