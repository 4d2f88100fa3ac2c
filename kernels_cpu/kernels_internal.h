/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of kernels_cpu/ share: decode tables and one filler per ISA. Not for other folders.
 */
#ifndef FT_KERNELS_INTERNAL_H
#define FT_KERNELS_INTERNAL_H

#include "kernels_cpu/kernels_cpu.h"

/* Set by ft_kernels_init, the same for the whole process: weights that one row reads are asked for past the
 * outer caches. */
extern bool ft_read_once_hint;
extern const float ft_e4m3_values[256];
extern const float ft_e2m1_values[16];

/* Element (o, i) of a matrix in any format, exact in double. */
double ft_matrix_element(const struct ft_matrix *w, uint32_t o, uint32_t i);

static inline const float *ft_rows_get(const struct ft_rows *rows, uint32_t r)
{
    return rows->x + (rows->index ? rows->index[r] : r) * rows->stride;
}

/* Fills every function of the table. */
void ft_kernels_fill_ref(struct ft_kernels *kernels);

/* Parts of a table, one per file. They exist only where the compiler targets x86-64. */
void ft_matmul_fill_avx2(struct ft_kernels *kernels);
void ft_matmul_fill_avxvnni(struct ft_kernels *kernels);
void ft_matmul_fill_int8_avx2(struct ft_kernels *kernels);
void ft_matmul_fill_int8_avxvnni(struct ft_kernels *kernels);
void ft_matmul_fill_avx512(struct ft_kernels *kernels);
void ft_matmul_fill_avx512vnni(struct ft_kernels *kernels);
void ft_matmul_fill_avx512amx(struct ft_kernels *kernels);
void ft_matmul_fill_int8_avx512vnni(struct ft_kernels *kernels);
void ft_matmul_fill_int16_avx512vnni(struct ft_kernels *kernels);
void ft_attention_fill_avx2(struct ft_kernels *kernels);
void ft_attention_fill_avx512(struct ft_kernels *kernels);
void ft_delta_fill_avx2(struct ft_kernels *kernels);
void ft_delta_fill_avx512(struct ft_kernels *kernels);
void ft_elementwise_fill_avx2(struct ft_kernels *kernels);
void ft_elementwise_fill_avx512(struct ft_kernels *kernels);

/* Experts of the version with a given VEC, EXACT (ft_kernels.expert_up, expert_down). */
#define FT_EXPERT_FUNCTIONS(version)                                                                         \
    void version(ft_expert_up)(const struct ft_expert *expert, uint32_t begin, uint32_t end,                 \
                               struct ft_rows x, float *h, size_t h_stride);                                 \
    void version(ft_expert_down)(const struct ft_expert *expert, uint32_t begin, uint32_t end,               \
                                 struct ft_rows h, const uint32_t *out_index, float *y, size_t y_stride);

/* The references that fast versions fall back to for sizes that do not fill their vectors. */
void ft_attention_row_ref(const struct ft_attention_row *args);
void ft_delta_rule_ref(const struct ft_delta_args *args);
void ft_row_decode_ref(const struct ft_matrix *w, uint32_t row, float *y);

#endif
