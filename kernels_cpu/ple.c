/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic of per-layer embeddings: rows of the table to f32, and the gate on the residual streams. */
#include "kernels_cpu/kernels_internal.h"

#include <math.h>

void ft_ple_gate(const float *k, const float *q, const float *v, uint32_t hc_count, uint32_t hidden,
                 float *out)
{
    for (uint32_t i = 0; i < hc_count; i++) {
        const float *ki = k + (size_t)i * hidden, *qi = q + (size_t)i * hidden;
        double sum = 0;
        for (uint32_t h = 0; h < hidden; h++)
            sum += (double)ki[h] * (double)qi[h];
        double u = sum / sqrt((double)hidden), root = sqrt(fabs(u) < 1e-6 ? 1e-6 : fabs(u));
        if (u == 0)
            root = 0; /* sign(0) is 0 */
        float gate = (float)(1.0 / (1.0 + exp(u < 0 ? root : -root)));
        for (uint32_t h = 0; h < hidden; h++)
            out[(size_t)i * hidden + h] = gate * v[h];
    }
}

void ft_ple_decode(enum ft_dtype dtype, float scale, const void *row, uint32_t width, float *out)
{
    if (dtype == FT_DTYPE_BF16)
        for (uint32_t i = 0; i < width; i++)
            out[i] = ft_bf16_to_f32(((const uint16_t *)row)[i]);
    else
        for (uint32_t i = 0; i < width; i++)
            out[i] = ft_e4m3_values[((const uint8_t *)row)[i]] * scale;
}
