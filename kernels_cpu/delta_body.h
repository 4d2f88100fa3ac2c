/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gated delta rule over the words of vec_*.h. Columns of the state do not depend on each other, so the
 * state is taken in strips of STRIP vectors, each through all rows while it lies in the nearest cache. A row
 * passes over its strip twice: S^T k, then the update fused with S^T q.
 */
#include "kernels_cpu/kernels_internal.h"
#include "kernels_cpu/vec_math.h"

#include <math.h>

#define STRIP 4
#define ROWS_AT_ONCE 64 /* rows whose scalars are kept on the stack */

/* What a row of a head needs besides its vectors. */
struct delta_row {
    const float *q, *k, *v;
    float *out;
    float q_scale, k_scale, beta, decay;
};

static void row_init(struct delta_row *row, const struct ft_delta_args *args, uint32_t r, uint32_t head)
{
    uint32_t dk = args->key_dim, key_head = head / (args->value_heads / args->key_heads);
    const float *qkv = args->qkv + r * args->qkv_stride;
    row->q = qkv + (size_t)key_head * dk;
    row->k = row->q + (size_t)args->key_heads * dk;
    row->v = qkv + 2 * (size_t)args->key_heads * dk + (size_t)head * args->value_dim;
    row->out = args->out + r * args->out_stride + (size_t)head * args->value_dim;
    row->q_scale = 1.0f / (sqrtf(vf_dot(row->q, row->q, dk) + 1e-6f) * sqrtf((float)dk));
    row->k_scale = 1.0f / sqrtf(vf_dot(row->k, row->k, dk) + 1e-6f);
    row->beta = ft_sigmoid(args->b[r * args->b_stride + head]);
    float a = args->a[r * args->a_stride + head] + args->dt_bias[head];
    float softplus = a > 30 ? a : log1pf(expf(a));
    row->decay = expf(-expf(args->a_log[head]) * softplus);
}

/* One row through `width` vectors of columns; width is a constant. */
static inline __attribute__((always_inline)) void strip_row(const struct delta_row *row, float *state,
                                                            uint32_t dk, uint32_t dv, uint32_t column,
                                                            uint32_t width)
{
    vf d[STRIP], o[STRIP], decay = vf_set1(row->decay);
    for (uint32_t j = 0; j < width; j++)
        d[j] = o[j] = vf_zero();
    for (uint32_t i = 0; i < dk; i++) {
        vf k = vf_set1(row->k[i] * row->k_scale);
        for (uint32_t j = 0; j < width; j++)
            d[j] = vf_fma(vf_load(state + (size_t)i * dv + j * VF), k, d[j]);
    }
    for (uint32_t j = 0; j < width; j++)
        d[j] = vf_mul(vf_set1(row->beta), vf_fnma(decay, d[j], vf_load(row->v + column + j * VF)));
    for (uint32_t i = 0; i < dk; i++) {
        vf k = vf_set1(row->k[i] * row->k_scale), q = vf_set1(row->q[i] * row->q_scale);
        for (uint32_t j = 0; j < width; j++) {
            float *at = state + (size_t)i * dv + j * VF;
            vf s = vf_fma(k, d[j], vf_mul(vf_load(at), decay));
            vf_store(at, s);
            o[j] = vf_fma(s, q, o[j]);
        }
    }
    for (uint32_t j = 0; j < width; j++)
        vf_store(row->out + column + j * VF, o[j]);
}

static void run_strips(const struct ft_delta_args *args, const struct delta_row *rows, uint32_t count,
                       uint32_t head)
{
    uint32_t dk = args->key_dim, dv = args->value_dim, column = 0;
    float *state = args->state + (size_t)head * dk * dv;
    for (; column + STRIP * VF <= dv; column += STRIP * VF)
        for (uint32_t r = 0; r < count; r++)
            strip_row(&rows[r], state + column, dk, dv, column, STRIP);
    for (; column < dv; column += VF)
        for (uint32_t r = 0; r < count; r++)
            strip_row(&rows[r], state + column, dk, dv, column, 1);
}

/* out = rms(out) * norm * act(z) */
static void gate_row(const struct ft_delta_args *args, const struct delta_row *row, uint32_t r, uint32_t head)
{
    uint32_t dv = args->value_dim;
    const float *z = args->z + r * args->z_stride + (size_t)head * dv;
    vf scale = vf_set1(1.0f / sqrtf(vf_dot(row->out, row->out, dv) / (float)dv + args->eps));
    for (uint32_t j = 0; j < dv; j += VF) {
        vf x = vf_load(z + j), gate = vf_sigmoid(x);
        if (args->gate == FT_ACTIVATION_SILU)
            gate = vf_mul(gate, x);
        vf value = vf_mul(vf_mul(vf_load(row->out + j), scale), vf_load(args->norm + j));
        vf_store(row->out + j, vf_mul(value, gate));
    }
}

static void delta_rule(const struct ft_delta_args *args)
{
    struct delta_row rows[ROWS_AT_ONCE];
    if (args->value_dim % VF) {
        ft_delta_rule_ref(args);
        return;
    }
    for (uint32_t head = args->head_begin; head < args->head_end; head++)
        for (uint32_t first = 0; first < args->rows; first += ROWS_AT_ONCE) {
            uint32_t count = FT_MIN(args->rows - first, ROWS_AT_ONCE);
            for (uint32_t r = 0; r < count; r++)
                row_init(&rows[r], args, first + r, head);
            run_strips(args, rows, count, head);
            for (uint32_t r = 0; r < count; r++)
                gate_row(args, &rows[r], first + r, head);
        }
}

void VEC(ft_delta_fill)(struct ft_kernels *kernels)
{
    kernels->delta_rule = delta_rule;
}
