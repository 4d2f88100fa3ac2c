/* SPDX-License-Identifier: Apache-2.0 */
/* Norm, rotary, convolution and small vector ops over the words of vec_*.h. */
#include "kernels_cpu/kernels_internal.h"
#include "kernels_cpu/vec_math.h"

#include <math.h>

static void rms_norm(const float *x, const float *w, bool plus_one, bool w_per_group, float eps,
                     uint32_t groups, uint32_t n, float *y)
{
    float one = plus_one ? 1.0f : 0.0f;
    for (uint32_t g = 0; g < groups; g++) {
        const float *in = x + (size_t)g * n, *weight = w + (w_per_group ? (size_t)g * n : 0);
        float *out = y + (size_t)g * n, scale = 1.0f / sqrtf(vf_dot(in, in, n) / (float)n + eps);
        uint32_t i = 0;
        for (; i + VF <= n; i += VF)
            vf_store(out + i, vf_mul(vf_mul(vf_load(in + i), vf_set1(scale)),
                                     vf_add(vf_load(weight + i), vf_set1(one))));
        for (; i < n; i++)
            out[i] = in[i] * scale * (weight[i] + one);
    }
}

static void rotate(float *x, const float *cs, const float *sn, uint32_t half)
{
    uint32_t i = 0;
    for (; i + VF <= half; i += VF) {
        vf a = vf_load(x + i), b = vf_load(x + half + i), c = vf_load(cs + i), s = vf_load(sn + i);
        vf_store(x + i, vf_sub(vf_mul(a, c), vf_mul(b, s)));
        vf_store(x + half + i, vf_add(vf_mul(b, c), vf_mul(a, s)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cs[i] - b * sn[i];
        x[half + i] = b * cs[i] + a * sn[i];
    }
}

/* Channels [begin, begin + lanes) of all rows, lanes <= VF. The history is a ring in a local copy, so that y
 * may be x. */
#define HISTORY 32
static void conv_lanes(const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t lanes,
                       uint32_t channels, const float *w, uint32_t taps, uint32_t dilation, float *tail,
                       float *y, size_t y_stride)
{
    float history[HISTORY][VF], weights[HISTORY + 1][VF], value[VF] = {0};
    uint32_t depth = (taps - 1) * dilation;
    size_t bytes = lanes * sizeof(float);
    memset(weights, 0, (size_t)taps * sizeof weights[0]);
    memset(history, 0, (size_t)depth * sizeof history[0]);
    for (uint32_t j = 0; j < taps; j++)
        for (uint32_t c = 0; c < lanes; c++)
            weights[j][c] = w[(size_t)(begin + c) * taps + j];
    for (uint32_t i = 0; i < depth; i++)
        memcpy(history[i], tail + (size_t)i * channels + begin, bytes);
    uint32_t oldest = 0; /* place of the row `depth` before the current one */
    for (uint32_t r = 0; r < rows; r++) {
        memcpy(value, x + r * x_stride + begin, bytes);
        vf current = vf_load(value), sum = vf_mul(current, vf_load(weights[taps - 1]));
        for (uint32_t j = 0, at = oldest; j + 1 < taps; j++) {
            sum = vf_fma(vf_load(history[at]), vf_load(weights[j]), sum);
            at = at + dilation >= depth ? at + dilation - depth : at + dilation;
        }
        vf_store(value, vf_mul(sum, vf_sigmoid(sum)));
        memcpy(y + r * y_stride + begin, value, bytes);
        if (depth) {
            vf_store(history[oldest], current);
            oldest = oldest + 1 == depth ? 0 : oldest + 1;
        }
    }
    for (uint32_t i = 0; i < depth; i++)
        memcpy(tail + (size_t)i * channels + begin, history[(oldest + i) % depth], bytes);
}

static void conv_silu(const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                      uint32_t channels, const float *w, uint32_t taps, uint32_t dilation, float *tail,
                      float *y, size_t y_stride)
{
    if ((uint64_t)(taps - 1) * dilation > HISTORY) {
        struct ft_kernels ref;
        ft_kernels_fill_ref(&ref);
        ref.conv_silu(x, x_stride, rows, begin, end, channels, w, taps, dilation, tail, y, y_stride);
        return;
    }
    uint32_t c = begin;
    for (; c + VF <= end; c += VF)
        conv_lanes(x, x_stride, rows, c, VF, channels, w, taps, dilation, tail, y, y_stride);
    if (c < end)
        conv_lanes(x, x_stride, rows, c, end - c, channels, w, taps, dilation, tail, y, y_stride);
}

static void axpy(float s, const float *x, float *y, uint32_t n)
{
    uint32_t i = 0;
    for (; i + VF <= n; i += VF)
        vf_store(y + i, vf_fma(vf_set1(s), vf_load(x + i), vf_load(y + i)));
    for (; i < n; i++)
        y[i] = __builtin_fmaf(s, x[i], y[i]);
}

static float dot(const float *a, const float *b, uint32_t n)
{
    return vf_dot(a, b, n);
}

void VEC(ft_elementwise_fill)(struct ft_kernels *kernels)
{
    kernels->rms_norm = rms_norm;
    kernels->rotate = rotate;
    kernels->conv_silu = conv_silu;
    kernels->axpy = axpy;
    kernels->dot = dot;
}
