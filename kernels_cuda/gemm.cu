/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of many rows with f16 operands. A block computes 128 rows by 128 outputs in steps of 32 columns,
 * three of which are under way; a warp computes 64 by 32.
 *
 * The matrix unit does not care which columns meet as long as both operands agree, so a lane reads 8
 * neighbouring columns (16 bytes) of a row at once and gives them to two products: no bank conflicts, no
 * shuffled layout.
 */
#include "kernels_cuda/gemm.cuh"
#include "kernels_cuda/dense.cuh"

#define TILE 128u /* rows, and outputs */
#define STAGES 3u
#define THREADS 256u
#define STEP_WORDS (2 * TILE * FT_GEMM_DEPTH / 8) /* uint4 of one step: rows, then weights */

static __device__ __forceinline__ void gemm_fetch(const struct ft_gemm_product *args, uint4 *shared,
                                                  uint32_t step)
{
    uint32_t first_row = blockIdx.y * TILE, first_out = blockIdx.x * TILE;
#pragma unroll
    for (uint32_t i = 0; i < STEP_WORDS / THREADS; i++) {
        uint32_t at = i * THREADS + threadIdx.x, line = at / (FT_GEMM_DEPTH / 8),
                 part = at % (FT_GEMM_DEPTH / 8);
        /* Lines that do not exist read the last one; what they give is not stored. */
        const uint16_t *from =
            line < TILE ? args->x + (uint64_t)min(first_row + line, args->rows - 1) * args->columns
                        : args->w + (uint64_t)min(first_out + line - TILE, args->out - 1) * args->columns;
        ft_copy_async16(shared + (step % STAGES) * STEP_WORDS + at, from + step * FT_GEMM_DEPTH + part * 8);
    }
}

__global__ void __launch_bounds__(THREADS) gemm_kernel(const __grid_constant__ struct ft_gemm_product args)
{
    FT_SHARED_DYNAMIC(uint4, shared);
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    uint32_t warp_row = warp / 4 * 64, warp_out = warp % 4 * 32, steps = args.columns / FT_GEMM_DEPTH;
    float sum[4][4][4];
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[m][n][i] = 0.0f;
    for (uint32_t step = 0; step + 1 < STAGES; step++) {
        if (step < steps)
            gemm_fetch(&args, shared, step);
        ft_copy_async_commit();
    }
    for (uint32_t step = 0; step < steps; step++) {
        ft_copy_async_wait<STAGES - 2>();
        __syncthreads(); /* this step has arrived for all, and all are done with the buffer that is filled next */
        if (step + STAGES - 1 < steps)
            gemm_fetch(&args, shared, step + STAGES - 1);
        ft_copy_async_commit();
        const uint4 *x = shared + (step % STAGES) * STEP_WORDS, *w = x + TILE * (FT_GEMM_DEPTH / 8);
        uint4 b[4];
#pragma unroll
        for (uint32_t n = 0; n < 4; n++)
            b[n] = w[(warp_out + n * 8 + g) * (FT_GEMM_DEPTH / 8) + t];
#pragma unroll
        for (uint32_t m = 0; m < 4; m++) {
            uint32_t line = warp_row + m * 16 + g;
            uint4 top = x[line * (FT_GEMM_DEPTH / 8) + t], low = x[(line + 8) * (FT_GEMM_DEPTH / 8) + t];
            uint32_t front[4] = {top.x, low.x, top.y, low.y}, back[4] = {top.z, low.z, top.w, low.w};
#pragma unroll
            for (uint32_t n = 0; n < 4; n++) {
                uint32_t first[2] = {b[n].x, b[n].y}, second[2] = {b[n].z, b[n].w};
                ft_mma_f16(sum[m][n], front, first);
                ft_mma_f16(sum[m][n], back, second);
            }
        }
    }
    float alpha = args.scale->alpha;
#pragma unroll
    for (uint32_t m = 0; m < 4; m++)
#pragma unroll
        for (uint32_t n = 0; n < 4; n++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t row = blockIdx.y * TILE + warp_row + m * 16 + g + (i >> 1) * 8;
                uint32_t out = blockIdx.x * TILE + warp_out + n * 8 + 2 * t + (i & 1);
                if (row >= args.rows || out >= args.out)
                    continue;
                float *to = args.y + row * args.y_stride + out, value = sum[m][n][i] * alpha;
                if (args.bias)
                    value += args.bias[out];
                *to = value;
            }
}

__global__ void __launch_bounds__(THREADS) clear_kernel(struct ft_gemm_scale *scale, uint64_t *stamp)
{
    if (threadIdx.x)
        return;
    if (stamp)
        *stamp = ft_global_timer();
    struct ft_gemm_scale cleared = {};
    *scale = cleared;
}

__global__ void __launch_bounds__(THREADS)
    top_kernel(const float *x, uint64_t x_stride, uint32_t rows, uint32_t in, struct ft_gemm_scale *scale)
{
    uint32_t size = 0;
    bool by_four = in % 4 == 0 && x_stride % 4 == 0 && ((uintptr_t)x & 15) == 0;
    uint32_t wide = by_four ? in / 4 : in;
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (uint64_t)rows * wide;
         i += stride) {
        const float *from = x + i / wide * x_stride;
        if (by_four) {
            float4 v = ((const float4 *)from)[i % wide];
            size = max(max(size, max(ft_gemm_size(v.x), ft_gemm_size(v.y))),
                       max(ft_gemm_size(v.z), ft_gemm_size(v.w)));
        } else {
            size = max(size, ft_gemm_size(from[i % wide]));
        }
    }
    ft_gemm_raise(&scale->x_top, size);
}

__global__ void __launch_bounds__(THREADS)
    convert_kernel(const float *x, uint64_t x_stride, uint32_t rows, uint32_t in, uint32_t columns,
                   const struct ft_gemm_scale *scale, uint16_t *to)
{
    float power = ft_gemm_power(scale->x_top);
    uint64_t pairs = (uint64_t)rows * (columns / 2), stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < pairs; i += stride) {
        uint32_t row = (uint32_t)(i / (columns / 2)), column = (uint32_t)(i % (columns / 2)) * 2;
        const float *from = x + row * x_stride + column;
        ((uint32_t *)to)[i] =
            ft_to_f16_pair(column < in ? from[0] * power : 0.0f, column + 1 < in ? from[1] * power : 0.0f);
    }
}

/* ---- weights ---- */

/* Weights [first, first + count) of a matrix, without the scale of the whole matrix. */
struct weight_slice {
    struct ft_matrix w;
    uint32_t first, count, columns, turn;
    struct ft_gemm_scale *scale;
};

/* Rows of bf16 without padding, which are read eight at a time. */
static __host__ __device__ __forceinline__ bool is_plain(const struct weight_slice *s)
{
    return s->w.format == FT_FORMAT_BF16 && s->w.in == s->columns && ((uintptr_t)s->w.data & 15) == 0;
}

static __device__ __forceinline__ uint32_t size_of_pair(uint32_t pair)
{
    return max(ft_gemm_size(ft_bf16_low(pair)), ft_gemm_size(ft_bf16_high(pair)));
}

__global__ void __launch_bounds__(THREADS) weight_top_kernel(const __grid_constant__ struct weight_slice s)
{
    uint32_t size = 0;
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x, at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (is_plain(&s)) {
        const uint4 *from = (const uint4 *)((const uint16_t *)s.w.data + (uint64_t)s.first * s.w.in);
        for (uint64_t i = at; i < (uint64_t)s.count * (s.columns / 8); i += stride) {
            uint4 v = from[i];
            size = max(max(size, max(size_of_pair(v.x), size_of_pair(v.y))),
                       max(size_of_pair(v.z), size_of_pair(v.w)));
        }
    } else {
        for (uint64_t i = at; i < (uint64_t)s.count * s.w.in; i += stride)
            size = max(size, ft_gemm_size(ft_dense_element(&s.w, s.first + (uint32_t)(i / s.w.in),
                                                           (uint32_t)(i % s.w.in))));
    }
    ft_gemm_raise(&s.scale->w_top[s.turn], size);
}

static __device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float power)
{
    return ft_to_f16_pair(ft_bf16_low(pair) * power, ft_bf16_high(pair) * power);
}

/* -> f16 [count, columns], padding is zero; and what the sums of a product are to be multiplied by. */
__global__ void __launch_bounds__(THREADS)
    weight_kernel(const __grid_constant__ struct weight_slice s, float factor, uint16_t *to)
{
    uint32_t top = s.scale->w_top[s.turn];
    float power = ft_gemm_power(top);
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x, at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at == 0) {
        s.scale->alpha = ft_gemm_unit(s.scale->x_top) * ft_gemm_unit(top) * factor;
        s.scale->w_top[s.turn ^ 1] = 0;
    }
    if (is_plain(&s)) {
        const uint4 *from = (const uint4 *)((const uint16_t *)s.w.data + (uint64_t)s.first * s.w.in);
        for (uint64_t i = at; i < (uint64_t)s.count * (s.columns / 8); i += stride) {
            uint4 v = from[i];
            ((uint4 *)to)[i] = make_uint4(scaled_pair(v.x, power), scaled_pair(v.y, power),
                                          scaled_pair(v.z, power), scaled_pair(v.w, power));
        }
        return;
    }
    for (uint64_t i = at; i < (uint64_t)s.count * (s.columns / 2); i += stride) {
        uint32_t row = (uint32_t)(i / (s.columns / 2)), column = (uint32_t)(i % (s.columns / 2)) * 2;
        float v[2] = {0, 0};
        for (uint32_t e = 0; e < 2; e++)
            if (column + e < s.w.in)
                v[e] = ft_dense_element(&s.w, s.first + row, column + e) * power;
        ((uint32_t *)to)[i] = ft_to_f16_pair(v[0], v[1]);
    }
}

__global__ void __launch_bounds__(THREADS) residual_kernel(float *residual, const float *s, uint64_t s_stride,
                                                           uint32_t streams, uint32_t hidden, const float *y)
{
    uint32_t row = blockIdx.y, h = blockIdx.x * blockDim.x + threadIdx.x;
    if (h >= hidden)
        return;
    float value = y[(uint64_t)row * hidden + h];
    for (uint32_t i = 0; i < streams; i++)
        residual[((uint64_t)row * streams + i) * hidden + h] +=
            streams == 1 ? value : s[row * s_stride + i] * value;
}

static uint32_t blocks_for(const struct ft_cuda *c, uint64_t threads)
{
    uint64_t most = 16ull * (c ? c->multiprocessors : 128);
    return (uint32_t)FT_MAX(1, FT_MIN(ft_div_up(threads, THREADS), most));
}

int ft_gemm_measure(const float *x, uint64_t x_stride, uint32_t rows, uint32_t in,
                    struct ft_gemm_scale *scale, uint64_t *stamp, void *stream)
{
    int status = FT_LAUNCH(clear_kernel, dim3(1), dim3(32), 0, stream, scale, stamp);
    return status ? status
                  : FT_LAUNCH(top_kernel, dim3(blocks_for(NULL, (uint64_t)rows * in / 4)), dim3(THREADS), 0,
                              stream, x, x_stride, rows, in, scale);
}

int ft_gemm_convert(const struct ft_gemm_rows *to, const float *x, uint64_t x_stride, uint32_t in,
                    uint64_t *stamp, void *stream)
{
    uint32_t blocks = blocks_for(NULL, (uint64_t)to->rows * to->columns / 2);
    int status = ft_gemm_measure(x, x_stride, to->rows, in, to->scale, stamp, stream);
    return status ? status
                  : FT_LAUNCH(convert_kernel, dim3(blocks), dim3(THREADS), 0, stream, x, x_stride, to->rows,
                              in, to->columns, to->scale, to->x);
}

/* The library is taken when it is open and willing; biases are the own kernel's. */
static int multiply(const struct ft_cuda *c, const struct ft_gemm_product *args, void *stream)
{
    if (c->blas && !args->bias && ft_gemm_blas(c, args, stream))
        return 0;
    uint32_t shared = STAGES * STEP_WORDS * sizeof(uint4);
    dim3 grid((uint32_t)ft_div_up(args->out, TILE), (uint32_t)ft_div_up(args->rows, TILE));
    return FT_LAUNCH(gemm_kernel, grid, dim3(THREADS), shared, stream, *args);
}

int ft_gemm_multiply_part(const struct ft_cuda *c, struct ft_gemm_rows *x, const struct ft_matrix *w,
                          uint32_t begin, uint32_t count, const float *bias, float *y, uint64_t y_stride,
                          void *stream)
{
    struct weight_slice slice = {*w, 0, 0, x->columns, 0, x->scale};
    struct ft_gemm_product args = {
        x->x, (const uint16_t *)c->scratch, x->scale, NULL, NULL, y_stride, x->rows, 0, x->columns};
    uint32_t most = (uint32_t)(FT_GEMM_WEIGHT_BYTES / (2ull * x->columns));
    float factor = 1.0f;
    int status = 0;
    if (w->format == FT_FORMAT_NVFP4) {
        factor = w->global;
        slice.w.global = 1.0f;
    }
    for (uint32_t done = 0; done < count && status == 0; done += most, x->turn ^= 1) {
        slice.first = begin + done;
        slice.count = args.out = FT_MIN(most, count - done);
        slice.turn = x->turn;
        args.y = y + done;
        args.bias = bias ? bias + done : NULL;
        dim3 blocks(blocks_for(c, (uint64_t)slice.count * x->columns / 8));
        status = FT_LAUNCH(weight_top_kernel, blocks, dim3(THREADS), 0, stream, slice);
        if (status == 0)
            status = FT_LAUNCH(weight_kernel, blocks, dim3(THREADS), 0, stream, slice, factor,
                               (uint16_t *)c->scratch);
        if (status == 0)
            status = multiply(c, &args, stream);
    }
    return status;
}

int ft_gemm_multiply(const struct ft_cuda *c, struct ft_gemm_rows *x, const struct ft_matrix *w,
                     const float *bias, float *y, uint64_t y_stride, void *stream)
{
    return ft_gemm_multiply_part(c, x, w, 0, w->out, bias, y, y_stride, stream);
}

int ft_gemm_add_residual(const struct ft_cuda *c, const float *y, void *stream)
{
    const struct ft_model *m = c->model;
    uint64_t s_stride = m->hc_lowrank + m->hc_count;
    dim3 grid((uint32_t)ft_div_up(m->hidden, THREADS), c->step.rows);
    return FT_LAUNCH(residual_kernel, grid, dim3(THREADS), 0, stream, c->base + c->space.residual,
                     c->base + c->space.mixed + m->hc_lowrank, s_stride, m->hc_count, m->hidden, y);
}
