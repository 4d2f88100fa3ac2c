/* SPDX-License-Identifier: Apache-2.0 */
/* Picks a version of every op once, by what the core can do. */
#include "kernels_cpu/kernels_internal.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* AVX-512 BF16 (vdpbf16ps) has no version: f32 accuracy takes three pieces of every activation, 12 of it for
 * 128 columns of bf16 weights where f32 takes 8 multiply-adds, at 0.60 and 0.51 cycles each on Zen 5. */
static const char *const names[FT_ISA_COUNT] = {
    "ref",       "avx2",          "avx2vnni",       "avx512", "avx512vnni", "avx512amx", "avx512vnni-int16",
    "avx2-int8", "avx2vnni-int8", "avx512vnni-int8"};

bool ft_read_once_hint;

const char *ft_isa_name(enum ft_isa isa)
{
    return (unsigned)isa < FT_ISA_COUNT ? names[isa] : "?";
}

bool ft_isa_is_int8(enum ft_isa isa)
{
    return isa == FT_ISA_AVX2_INT8 || isa == FT_ISA_AVX2VNNI_INT8 || isa == FT_ISA_AVX512VNNI_INT8;
}

bool ft_isa_rounds(enum ft_isa isa)
{
    return ft_isa_is_int8(isa) || isa == FT_ISA_AVX512VNNI_INT16;
}

double ft_isa_fixed_steps(enum ft_isa isa)
{
    return ft_isa_is_int8(isa) ? 127 : isa == FT_ISA_AVX512VNNI_INT16 ? 127.0 * 257 : 0x1p22;
}

#if defined(__x86_64__)
/* Asked of the core itself: compilers differ in whether they know the word. */
static bool has_avx_vnni(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

/* Tiles, bf16 on them and f16 vectors; the kernel saves tiles (XCR0), and lets this process have them, which
 * it wants to be asked for. Asking twice does no harm. */
static bool has_amx(void)
{
    unsigned a, b, c, d, low, high;
    const unsigned tile = 1u << 24, bf16 = 1u << 22, f16 = 1u << 23, tile_states = 3u << 17,
                   os_saves = 1u << 27;
    const long request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, of asm/prctl.h */
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & os_saves) || !__get_cpuid_count(7, 0, &a, &b, &c, &d) ||
        (d & (tile | bf16 | f16)) != (tile | bf16 | f16))
        return false;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & tile_states) == tile_states && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

bool ft_isa_is_available(enum ft_isa isa)
{
    switch (isa) {
    case FT_ISA_REF:
        return true;
#if defined(__x86_64__)
    case FT_ISA_AVX2:
    case FT_ISA_AVX2_INT8:
        /* Every core with AVX2 has F16C; compilers differ in whether they know the word, so it is not asked. */
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case FT_ISA_AVX2VNNI:
    case FT_ISA_AVX2VNNI_INT8:
        return ft_isa_is_available(FT_ISA_AVX2) && has_avx_vnni();
    case FT_ISA_AVX512:
        return ft_isa_is_available(FT_ISA_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq");
    case FT_ISA_AVX512VNNI:
    case FT_ISA_AVX512VNNI_INT16:
    case FT_ISA_AVX512VNNI_INT8:
        return ft_isa_is_available(FT_ISA_AVX512) && __builtin_cpu_supports("avx512vnni") &&
               __builtin_cpu_supports("avx512vbmi");
    case FT_ISA_AVX512AMX:
        return ft_isa_is_available(FT_ISA_AVX512VNNI) && has_amx();
#endif
    default:
        return false;
    }
}

static void fill(struct ft_kernels *kernels, enum ft_isa isa)
{
    ft_kernels_fill_ref(kernels);
#if defined(__x86_64__)
    bool avx512 = isa == FT_ISA_AVX512 || isa == FT_ISA_AVX512VNNI || isa == FT_ISA_AVX512AMX ||
                  isa == FT_ISA_AVX512VNNI_INT16 || isa == FT_ISA_AVX512VNNI_INT8;
    if (avx512) {
        ft_attention_fill_avx512(kernels);
        ft_delta_fill_avx512(kernels);
        ft_elementwise_fill_avx512(kernels);
    } else if (isa != FT_ISA_REF) {
        ft_attention_fill_avx2(kernels);
        ft_delta_fill_avx2(kernels);
        ft_elementwise_fill_avx2(kernels);
    }
    static void (*const matmul_fill[FT_ISA_COUNT])(struct ft_kernels *) = {
        [FT_ISA_AVX2] = ft_matmul_fill_avx2,
        [FT_ISA_AVX2VNNI] = ft_matmul_fill_avxvnni,
        [FT_ISA_AVX512] = ft_matmul_fill_avx512,
        [FT_ISA_AVX512VNNI] = ft_matmul_fill_avx512vnni,
        [FT_ISA_AVX512AMX] = ft_matmul_fill_avx512amx,
        [FT_ISA_AVX512VNNI_INT16] = ft_matmul_fill_int16_avx512vnni,
        [FT_ISA_AVX2_INT8] = ft_matmul_fill_int8_avx2,
        [FT_ISA_AVX2VNNI_INT8] = ft_matmul_fill_int8_avxvnni,
        [FT_ISA_AVX512VNNI_INT8] = ft_matmul_fill_int8_avx512vnni};
    if (matmul_fill[isa])
        matmul_fill[isa](kernels);
#endif
    kernels->isa = isa;
}

/* Whether weights that are read once are asked for past the outer caches: measured on Zen 5 (2 to 4% more); a
 * Xeon with tiles read half as fast with it. */
static bool is_amd(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

int ft_kernels_init(struct ft_kernels *kernels, const char *wanted, struct ft_error *err)
{
    ft_read_once_hint = is_amd();
    char have[192] = "", all[192] = "";
    bool known = false;
    enum ft_isa best = FT_ISA_REF;
    for (enum ft_isa isa = 0; isa < FT_ISA_COUNT; isa++) {
        strcat(strcat(all, all[0] ? ", " : ""), names[isa]);
        known |= wanted && strcmp(wanted, names[isa]) == 0;
        if (!ft_isa_is_available(isa))
            continue;
        /* Tiles win from about five rows on; a single row of packed weights takes twice as long on them, and
         * any number of rows has to go the same way. Whoever reads long prompts on cores asks for them. */
        if (!ft_isa_rounds(isa) && isa != FT_ISA_AVX512AMX)
            best = isa;
        strcat(strcat(have, have[0] ? ", " : ""), names[isa]);
        if (wanted && strcmp(wanted, names[isa]) == 0) {
            fill(kernels, isa);
            return FT_OK;
        }
    }
    if (wanted && wanted[0] && !known)
        return ft_error_set(err, FT_USAGE, "no CPU kernels are called \"%s\": they are %s", wanted, all);
    if (wanted && wanted[0])
        return ft_error_set(err, FT_UNSUPPORTED,
                            "CPU kernels \"%s\" cannot run here: this core has %s; leave the choice "
                            "automatic or name one of these",
                            wanted, have);
    fill(kernels, best);
    return FT_OK;
}
