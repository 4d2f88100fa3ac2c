/* SPDX-License-Identifier: Apache-2.0 */
/* Picks a version of every op once, by what the core can do. */
#include "kernels_cpu/kernels_internal.h"

#include <string.h>

static const char *const names[FT_ISA_COUNT] = {"ref", "avx2", "avx512"};

const char *ft_isa_name(enum ft_isa isa)
{
    return (unsigned)isa < FT_ISA_COUNT ? names[isa] : "?";
}

bool ft_isa_is_available(enum ft_isa isa)
{
    switch (isa) {
    case FT_ISA_REF:
        return true;
#if defined(__x86_64__)
    case FT_ISA_AVX2:
        /* Every core with AVX2 has F16C; compilers differ in whether they know the word, so it is not asked.
         */
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case FT_ISA_AVX512:
        return ft_isa_is_available(FT_ISA_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq");
#endif
    default:
        return false;
    }
}

static void fill(struct ft_kernels *kernels, enum ft_isa isa)
{
    ft_kernels_fill_ref(kernels);
#if defined(__x86_64__)
    if (isa == FT_ISA_AVX2)
        ft_kernels_fill_avx2(kernels);
    if (isa == FT_ISA_AVX512)
        ft_kernels_fill_avx512(kernels);
#endif
    kernels->isa = isa;
}

int ft_kernels_init(struct ft_kernels *kernels, const char *wanted, struct ft_error *err)
{
    char have[64] = "";
    enum ft_isa best = FT_ISA_REF;
    for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++) {
        if (!ft_isa_is_available(isa))
            continue;
        best = isa;
        strcat(strcat(have, have[0] ? ", " : ""), names[isa]);
        if (wanted && strcmp(wanted, names[isa]) == 0) {
            fill(kernels, isa);
            return FT_OK;
        }
    }
    if (wanted && wanted[0])
        return ft_error_set(err, FT_UNSUPPORTED,
                            "CPU kernels \"%s\" cannot run here: this core has %s; leave the choice "
                            "automatic or name one of these",
                            wanted, have);
    fill(kernels, best);
    return FT_OK;
}

#if defined(__x86_64__)
void ft_kernels_fill_avx2(struct ft_kernels *kernels)
{
    ft_matmul_fill_avx2(kernels);
    ft_attention_fill_avx2(kernels);
    ft_delta_fill_avx2(kernels);
    ft_elementwise_fill_avx2(kernels);
}

void ft_kernels_fill_avx512(struct ft_kernels *kernels)
{
    ft_matmul_fill_avx512(kernels);
    ft_attention_fill_avx512(kernels);
    ft_delta_fill_avx512(kernels);
    ft_elementwise_fill_avx512(kernels);
}
#endif
