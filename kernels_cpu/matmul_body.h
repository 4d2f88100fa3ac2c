/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products by dot_body.h: matmul, expert_up, expert_down, mix_up, row_decode.
 *
 * A version with int8 or 16-bit activations names one with f32 accuracy (EXACT), which takes experts that these are too
 * few bits for: ft_activation_takes_int8.
 */
#include "kernels_cpu/kernels_internal.h"
#include "kernels_cpu/vec_math.h"
#include "kernels_cpu/fixed_body.h"
#include "kernels_cpu/dot_body.h"
#ifndef TILES_HEADER /* who brings tiles of its own names them */
#define TILES_HEADER "kernels_cpu/tiles_dot.h"
#endif
#include TILES_HEADER

FT_EXPERT_FUNCTIONS(VEC)
#ifdef EXACT
FT_EXPERT_FUNCTIONS(EXACT)
#endif

static void store_row(float *y, const float *values, const float *bias, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        y[i] = bias ? values[i] + bias[i] : values[i];
}

static void matmul_to(const struct ft_matrix *w, uint32_t begin, uint32_t end, const struct ft_rows *x,
                      const float *bias, const uint32_t *out_index, float *y, size_t y_stride)
{
    struct tile_panel panel;
    float out[TILE_ROWS * TILE];
    tile_panel_init(&panel);
    uint32_t step = tile_step(w, x->count);
    struct tile_span span = {begin, end};
    for (uint32_t o = begin; o < end; o += step) {
        uint32_t count = FT_MIN(end - o, step);
        for (uint32_t first = 0, rows; first < x->count; first += rows) {
            rows = tile_rows(w, x->count - first);
            tile_dots(w, o, count, span, x, first, rows, &panel, out);
            for (uint32_t r = 0; r < rows; r++)
                store_row(y + (out_index ? out_index[first + r] : first + r) * y_stride + o, out + r * TILE,
                          bias ? bias + o : NULL, count);
        }
    }
}

static void matmul(const struct ft_matrix *w, uint32_t begin, uint32_t end, struct ft_rows x,
                   const float *bias, float *y, size_t y_stride)
{
    matmul_to(w, begin, end, &x, bias, NULL, y, y_stride);
}

void VEC(ft_expert_down)(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows h,
                         const uint32_t *out_index, float *y, size_t y_stride)
{
#ifdef EXACT
    if (!ft_activation_takes_int8(expert->activation)) {
        EXACT(ft_expert_down)(expert, begin, end, h, out_index, y, y_stride);
        return;
    }
#endif
    matmul_to(&expert->down, begin, end, &h, expert->down_bias, out_index, y, y_stride);
}

/* gate[] = act(gate, up) for one row of a tile; lanes beyond count hold anything finite or not, nobody reads them. */
static void activate(const struct ft_expert *expert, uint32_t i, uint32_t count, float *gate, float *up)
{
    bool oss = expert->activation == FT_ACTIVATION_SWIGLU_OSS;
    if (expert->gate_bias)
        store_row(gate, gate, expert->gate_bias + i, count);
    if (expert->up_bias)
        store_row(up, up, expert->up_bias + i, count);
    for (uint32_t j = 0; j < count; j += VF) {
        vf g = vf_load(gate + j), u = vf_load(up + j);
        if (oss && expert->limit > 0) {
            vf limit = vf_set1(expert->limit);
            g = vf_min(limit, g); /* NaN in the second operand passes */
            u = vf_max(vf_sub(vf_zero(), limit), vf_min(limit, u));
        }
        vf s = vf_sigmoid(oss ? vf_mul(g, vf_set1(1.702f)) : g);
        if (oss)
            u = vf_add(u, vf_set1(1.0f));
        if (expert->activation != FT_ACTIVATION_SIGMOID)
            s = vf_mul(s, g);
        vf_store(gate + j, vf_mul(s, u));
    }
}

void VEC(ft_expert_up)(const struct ft_expert *expert, uint32_t begin, uint32_t end, struct ft_rows x,
                       float *h, size_t h_stride)
{
#ifdef EXACT
    if (!ft_activation_takes_int8(expert->activation)) {
        EXACT(ft_expert_up)(expert, begin, end, x, h, h_stride);
        return;
    }
#endif
    struct tile_panel panel;
    float gate[TILE_ROWS * TILE] = {0}, up[TILE_ROWS * TILE] = {0};
    tile_panel_init(&panel);
    uint32_t step = tile_step(&expert->gate, x.count);
    struct tile_span span = {begin, end};
    for (uint32_t i = begin; i < end; i += step) {
        uint32_t count = FT_MIN(end - i, step);
        for (uint32_t first = 0, rows; first < x.count; first += rows) {
            rows = tile_rows(&expert->gate, x.count - first);
            tile_dots(&expert->gate, i, count, span, &x, first, rows, &panel, gate);
            tile_dots(&expert->up, i, count, span, &x, first, rows, &panel, up);
            for (uint32_t r = 0; r < rows; r++) {
                activate(expert, i, count, gate + r * TILE, up + r * TILE);
                memcpy(h + (first + r) * h_stride + i, gate + r * TILE, count * sizeof(float));
            }
        }
    }
}

/* sum[j] += sigmoid(m[j]) u[j] for a tile; u is read only where it exists. */
static void mix_add(float *sum, const float *m, const float *u, uint32_t count)
{
    float copy[TILE] = {0};
    memcpy(copy, u, count * sizeof(float));
    for (uint32_t j = 0; j < count; j += VF)
        vf_store(sum + j, vf_fma(vf_sigmoid(vf_load(m + j)), vf_load(copy + j), vf_load(sum + j)));
}

static void mix_up(const struct ft_matrix *up, uint32_t hc_count, uint32_t hidden, uint32_t begin,
                   uint32_t end, const float *t, size_t t_stride, const float *u, size_t u_stride,
                   uint32_t rows, float *x, size_t x_stride)
{
    struct tile_panel panel;
    struct ft_rows in = {.x = t, .stride = t_stride, .count = rows};
    float m[TILE_ROWS * TILE] = {0}, share = 1.0f / (float)hc_count;
    tile_panel_init(&panel);
    uint32_t step = FT_MIN(tile_step(up, rows), TILE);
    for (uint32_t h = begin; h < end; h += step) {
        uint32_t count = FT_MIN(end - h, step);
        for (uint32_t first = 0, batch; first < rows; first += batch) {
            batch = tile_rows(up, rows - first);
            float sum[TILE_ROWS][TILE] = {{0}};
            for (uint32_t i = 0; i < hc_count; i++) {
                struct tile_span span = {i * hidden + begin, i * hidden + end};
                tile_dots(up, i * hidden + h, count, span, &in, first, batch, &panel, m);
                for (uint32_t r = 0; r < batch; r++)
                    mix_add(sum[r], m + r * TILE, u + (first + r) * u_stride + (size_t)i * hidden + h, count);
            }
            for (uint32_t r = 0; r < batch; r++)
                for (uint32_t j = 0; j < count; j++)
                    x[(first + r) * x_stride + h + j] = sum[r][j] * share;
        }
    }
}

static void row_decode(const struct ft_matrix *w, uint32_t row, float *y)
{
    if (w->format != FT_FORMAT_BF16) {
        ft_row_decode_ref(w, row, y);
        return;
    }
    const uint16_t *data = (const uint16_t *)w->data + (size_t)row * w->in;
    uint32_t i = 0;
    for (; i + VF <= w->in; i += VF)
        vf_store(y + i, vf_load_bf16(data + i));
    for (; i < w->in; i++)
        y[i] = ft_bf16_to_f32(data[i]);
}

void VEC(ft_matmul_fill)(struct ft_kernels *kernels)
{
    kernels->matmul = matmul;
    kernels->expert_up = VEC(ft_expert_up);
    kernels->expert_down = VEC(ft_expert_down);
    kernels->mix_up = mix_up;
    kernels->row_decode = row_decode;
}
