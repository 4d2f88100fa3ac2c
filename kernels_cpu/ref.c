/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reference of every op: readable, accumulates in double, takes every shape and format. Fast versions are
 * compared with these; on cores without AVX2 they are what runs.
 */
#include "kernels_cpu/kernels_internal.h"

#include <math.h>
#include <string.h>

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static double dot_row(const struct ft_matrix *w, uint32_t o, const float *x)
{
    double sum = 0;
    for (uint32_t i = 0; i < w->in; i++)
        sum += ft_matrix_element(w, o, i) * (double)x[i];
    return sum;
}

static double dot_double(const float *a, const float *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

static void matmul(const struct ft_matrix *w, uint32_t begin, uint32_t end, struct ft_rows x,
                   const float *bias, float *y, size_t y_stride)
{
    for (uint32_t r = 0; r < x.count; r++)
        for (uint32_t o = begin; o < end; o++)
            y[r * y_stride + o] = (float)(dot_row(w, o, ft_rows_get(&x, r)) + (bias ? (double)bias[o] : 0.0));
}

static double activate(const struct ft_expert *expert, double gate, double up)
{
    switch (expert->activation) {
    case FT_ACTIVATION_SWIGLU_OSS: {
        double limit = (double)expert->limit;
        if (limit > 0) { /* written so that NaN passes through */
            gate = gate > limit ? limit : gate;
            up = up > limit ? limit : up < -limit ? -limit : up;
        }
        return (up + 1) * gate * sigmoid(1.702 * gate);
    }
    case FT_ACTIVATION_SIGMOID:
        return sigmoid(gate) * up;
    default:
        return gate * sigmoid(gate) * up;
    }
}

static void expert_up(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows x,
                      float *h, size_t h_stride)
{
    for (uint32_t r = 0; r < x.count; r++)
        for (uint32_t i = begin; i < end; i++) {
            const float *row = ft_rows_get(&x, r);
            double gate = dot_row(&expert->gate, i, row), up = dot_row(&expert->up, i, row);
            if (expert->gate_bias)
                gate += (double)expert->gate_bias[i];
            if (expert->up_bias)
                up += (double)expert->up_bias[i];
            h[r * h_stride + i] = (float)activate(expert, gate, up);
        }
}

static void expert_down(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows h,
                        const uint32_t *out_index, float *y, size_t y_stride)
{
    for (uint32_t r = 0; r < h.count; r++)
        for (uint32_t o = begin; o < end; o++) {
            double sum = dot_row(&expert->down, o, ft_rows_get(&h, r));
            if (expert->down_bias)
                sum += (double)expert->down_bias[o];
            y[(out_index ? out_index[r] : r) * y_stride + o] = (float)sum;
        }
}

void ft_row_decode_ref(const struct ft_matrix *w, uint32_t row, float *y)
{
    for (uint32_t i = 0; i < w->in; i++)
        y[i] = (float)ft_matrix_element(w, row, i);
}

static void rms_norm(const float *x, const float *w, bool plus_one, bool w_per_group, float eps,
                     uint32_t groups, uint32_t n, float *y)
{
    for (uint32_t g = 0; g < groups; g++) {
        const float *in = x + (size_t)g * n, *weight = w + (w_per_group ? (size_t)g * n : 0);
        double scale = 1.0 / sqrt(dot_double(in, in, n) / n + (double)eps);
        for (uint32_t i = 0; i < n; i++)
            y[(size_t)g * n + i] =
                (float)((double)in[i] * scale * ((plus_one ? 1.0 : 0.0) + (double)weight[i]));
    }
}

static void mix_up(const struct ft_matrix *up, uint32_t hc_count, uint32_t hidden, uint32_t begin,
                   uint32_t end, const float *t, size_t t_stride, const float *u, size_t u_stride,
                   uint32_t rows, float *x, size_t x_stride)
{
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t h = begin; h < end; h++) {
            double sum = 0;
            for (uint32_t i = 0; i < hc_count; i++)
                sum += sigmoid(dot_row(up, i * hidden + h, t + r * t_stride)) *
                       (double)u[r * u_stride + (size_t)i * hidden + h];
            x[r * x_stride + h] = (float)(sum / hc_count);
        }
}

static void rotate(float *x, const float *cs, const float *sn, uint32_t half)
{
    for (uint32_t i = 0; i < half; i++) {
        double a = (double)x[i], b = (double)x[i + half], c = (double)cs[i], s = (double)sn[i];
        x[i] = (float)(a * c - b * s);
        x[i + half] = (float)(b * c + a * s);
    }
}

static const float *key_of(const struct ft_attention_row *args, uint64_t offset, uint32_t token)
{
    const struct ft_kv_view *kv = &args->kv;
    return kv->pages[token / kv->page_tokens] + offset +
           ((size_t)args->kv_head * kv->page_tokens + token % kv->page_tokens) * kv->head_dim;
}

/* Calls `visit` for every visible token in ascending order. */
static void for_each_token(const struct ft_attention_row *args, void (*visit)(void *context, uint32_t token),
                           void *context)
{
    for (uint32_t b = 0; args->blocks && b < args->block_count; b++)
        for (uint32_t i = 0; i < args->block_tokens; i++)
            visit(context, args->blocks[b] * args->block_tokens + i);
    for (uint64_t t = args->tail_begin; t <= args->position; t++)
        visit(context, (uint32_t)t);
}

#define DIMS_AT_ONCE 256

struct attention_sum {
    const struct ft_attention_row *args;
    uint32_t head, dim_begin, dim_count; /* output elements being summed */
    double max, weight, value[DIMS_AT_ONCE];
};

static double score_of(const struct attention_sum *sum, uint32_t token)
{
    uint32_t d = sum->args->kv.head_dim;
    return dot_double(sum->args->q + (size_t)sum->head * d, key_of(sum->args, sum->args->kv.k_offset, token),
                      d) *
           (double)sum->args->scale;
}

static void visit_max(void *context, uint32_t token)
{
    struct attention_sum *sum = context;
    sum->max = fmax(sum->max, score_of(sum, token));
}

static void visit_weight(void *context, uint32_t token)
{
    struct attention_sum *sum = context;
    double weight = exp(score_of(sum, token) - sum->max);
    const float *v = key_of(sum->args, sum->args->kv.v_offset, token) + sum->dim_begin;
    sum->weight += weight;
    for (uint32_t i = 0; i < sum->dim_count; i++)
        sum->value[i] += weight * (double)v[i];
}

void ft_attention_row_ref(const struct ft_attention_row *args)
{
    uint32_t dims = args->kv.head_dim;
    for (uint32_t g = 0; g < args->group; g++) {
        struct attention_sum sum = {.args = args, .head = g, .max = -INFINITY};
        for_each_token(args, visit_max, &sum);
        if (args->sinks)
            sum.max = fmax(sum.max, (double)args->sinks[g]);
        for (; sum.dim_begin < dims; sum.dim_begin += DIMS_AT_ONCE) {
            float *out = args->out + (size_t)g * dims + sum.dim_begin;
            sum.dim_count = FT_MIN(dims - sum.dim_begin, DIMS_AT_ONCE);
            sum.weight = args->sinks ? exp((double)args->sinks[g] - sum.max) : 0.0;
            memset(sum.value, 0, sizeof sum.value);
            for_each_token(args, visit_weight, &sum);
            /* Nothing visible and no sink: zero, not 0 / 0. */
            for (uint32_t i = 0; i < sum.dim_count; i++)
                out[i] = sum.weight == 0 ? 0.0f : (float)(sum.value[i] / sum.weight);
        }
    }
}

static void index_scores(const float *q, uint32_t head_count, uint32_t dim, float *const *pages,
                         uint64_t offset, uint32_t page_blocks, uint32_t block_count, float *out)
{
    for (uint32_t b = 0; b < block_count; b++) {
        const float *key = pages[b / page_blocks] + offset + (size_t)(b % page_blocks) * dim;
        double sum = 0;
        for (uint32_t h = 0; h < head_count; h++) {
            double score = dot_double(q + (size_t)h * dim, key, dim);
            sum += score < 0 ? 0.0 : score; /* relu that lets NaN through */
        }
        out[b] = (float)(sum / sqrt((double)dim));
    }
}

static void conv_silu(const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                      uint32_t channels, const float *w, uint32_t taps, uint32_t dilation, float *tail,
                      float *y, size_t y_stride)
{
    uint32_t depth = (taps - 1) * dilation;
    for (uint32_t c = begin; c < end; c++)
        for (uint32_t r = 0; r < rows; r++) {
            float current = x[r * x_stride + c]; /* read first: y may be x */
            double sum = (double)w[(size_t)c * taps + taps - 1] * (double)current;
            for (uint32_t j = 0; j + 1 < taps; j++)
                sum += (double)w[(size_t)c * taps + j] * (double)tail[(size_t)j * dilation * channels + c];
            for (uint32_t i = 0; i + 1 < depth; i++)
                tail[(size_t)i * channels + c] = tail[(size_t)(i + 1) * channels + c];
            if (depth)
                tail[(size_t)(depth - 1) * channels + c] = current;
            y[r * y_stride + c] = (float)(sum * sigmoid(sum));
        }
}

/* One token of one value head; the recurrence of the gated delta rule as published for gated DeltaNet. */
static void delta_token(const struct ft_delta_args *args, uint32_t row, uint32_t head)
{
    uint32_t dk = args->key_dim, dv = args->value_dim,
             key_head = head / (args->value_heads / args->key_heads);
    const float *q = args->qkv + row * args->qkv_stride + (size_t)key_head * dk;
    const float *k = q + (size_t)args->key_heads * dk;
    const float *v =
        args->qkv + row * args->qkv_stride + 2 * (size_t)args->key_heads * dk + (size_t)head * dv;
    const float *z = args->z + row * args->z_stride + (size_t)head * dv;
    float *state = args->state + (size_t)head * dk * dv,
          *out = args->out + row * args->out_stride + (size_t)head * dv;
    double q_scale = 1 / sqrt(dot_double(q, q, dk) + 1e-6) / sqrt((double)dk);
    double k_scale = 1 / sqrt(dot_double(k, k, dk) + 1e-6);
    double beta = sigmoid((double)args->b[row * args->b_stride + head]);
    double a = (double)args->a[row * args->a_stride + head] + (double)args->dt_bias[head];
    double decay = exp(-exp((double)args->a_log[head]) * (a > 30 ? a : log1p(exp(a))));
    double squares = 0;
    for (uint32_t j = 0; j < dv; j++) {
        double prediction = 0, sum = 0;
        for (uint32_t i = 0; i < dk; i++)
            prediction += (double)state[(size_t)i * dv + j] * decay * (double)k[i] * k_scale;
        double d = beta * ((double)v[j] - prediction);
        for (uint32_t i = 0; i < dk; i++) {
            double s = (double)state[(size_t)i * dv + j] * decay + (double)k[i] * k_scale * d;
            state[(size_t)i * dv + j] = (float)s;
            sum += s * (double)q[i] * q_scale;
        }
        out[j] = (float)sum;
        squares += sum * sum;
    }
    double scale = 1 / sqrt(squares / dv + (double)args->eps);
    for (uint32_t j = 0; j < dv; j++) {
        double gate = sigmoid((double)z[j]) * (args->gate == FT_ACTIVATION_SILU ? (double)z[j] : 1.0);
        out[j] = (float)((double)out[j] * scale * (double)args->norm[j] * gate);
    }
}

void ft_delta_rule_ref(const struct ft_delta_args *args)
{
    for (uint32_t head = args->head_begin; head < args->head_end; head++)
        for (uint32_t row = 0; row < args->rows; row++)
            delta_token(args, row, head);
}

static void axpy(float s, const float *x, float *y, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = (float)((double)y[i] + (double)s * (double)x[i]);
}

static float dot(const float *a, const float *b, uint32_t n)
{
    return (float)dot_double(a, b, n);
}

void ft_kernels_fill_ref(struct ft_kernels *kernels)
{
    *kernels = (struct ft_kernels){.isa = FT_ISA_REF,
                                   .matmul = matmul,
                                   .expert_up = expert_up,
                                   .expert_down = expert_down,
                                   .row_decode = ft_row_decode_ref,
                                   .rms_norm = rms_norm,
                                   .mix_up = mix_up,
                                   .rotate = rotate,
                                   .attention_row = ft_attention_row_ref,
                                   .index_scores = index_scores,
                                   .conv_silu = conv_silu,
                                   .delta_rule = ft_delta_rule_ref,
                                   .axpy = axpy,
                                   .dot = dot};
}
