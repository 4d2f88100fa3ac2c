/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/amx_twin.h"

#include <stdio.h>

#if defined(__x86_64__)
#define VEC(name) name##_amx_twin
#define DIGITS 3
#define OUTS 2
#define TILES_HEADER "kernels_cpu/tiles_amx.h"
void ft_matmul_fill_amx_twin(struct ft_kernels *kernels);
#include "kernels_cpu/vec_avx512.h"

#include "kernels_cpu/fixed_avx512.h"

#include "kernels_cpu/fixed_avx512_vnni.h"

#include "tests/amx_twin_tiles.h"

#include "kernels_cpu/matmul_body.h"
#endif

static void tell(const char *what)
{
    static const char *told;
    if (told != what)
        fprintf(stderr, "avx512amx: %s\n", what);
    told = what;
}

bool amx_twin_init(struct ft_kernels *kernels, struct ft_error *err)
{
    if (ft_isa_is_available(FT_ISA_AVX512AMX)) {
        tell("this core has it");
        return ft_kernels_init(kernels, ft_isa_name(FT_ISA_AVX512AMX), err) == FT_OK;
    }
#if defined(__x86_64__)
    if (ft_isa_is_available(FT_ISA_AVX512VNNI)) {
        tell("this core has no AMX, tiles are in C");
        if (ft_kernels_init(kernels, ft_isa_name(FT_ISA_AVX512VNNI), err) != FT_OK)
            return false;
        ft_matmul_fill_amx_twin(kernels);
        kernels->isa = FT_ISA_AVX512AMX;
        return true;
    }
#endif
    (void)kernels;
    (void)err;
    tell("skipped, this core has neither AMX nor AVX-512 VNNI for its twin");
    return false;
}
