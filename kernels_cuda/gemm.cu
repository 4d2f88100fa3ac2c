/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of many rows with bf16 operands, activations in two pieces. A block computes 64 rows by 128
 * outputs in steps of 32 columns, three of which are under way; a warp computes 32 by 32, and meets each
 * weight that it reads from shared memory with both pieces.
 *
 * The matrix unit does not care which columns meet as long as both operands agree, so a lane reads 8
 * neighbouring columns (16 bytes) of a row at once and gives them to two products: no bank conflicts, no
 * shuffled layout.
 */
#include "kernels_cuda/gemm.cuh"
#include "kernels_cuda/dense.cuh"

#define TILE_ROWS 64u /* of either piece */
#define TILE 128u     /* outputs, and lines of activations: high pieces, then low ones */
#define STAGES 3u
#define THREADS 256u
#define STEP_WORDS (2 * TILE * FT_GEMM_DEPTH / 8) /* uint4 of one step: rows, then weights */

static __device__ __forceinline__ void gemm_fetch(const struct ft_gemm_product *args, uint4 *shared,
                                                  uint32_t step)
{
    uint32_t first_row = blockIdx.y * TILE_ROWS, first_out = blockIdx.x * TILE;
#pragma unroll
    for (uint32_t i = 0; i < STEP_WORDS / THREADS; i++) {
        uint32_t at = i * THREADS + threadIdx.x, line = at / (FT_GEMM_DEPTH / 8),
                 part = at % (FT_GEMM_DEPTH / 8);
        /* Lines that do not exist read the last one; what they give is not stored. */
        const uint16_t *from =
            line < TILE ? args->x + ((uint64_t)(line / TILE_ROWS) * args->rows +
                                     min(first_row + line % TILE_ROWS, args->rows - 1)) *
                                        args->columns
                        : args->w + (uint64_t)min(first_out + line - TILE, args->out - 1) * args->columns;
        ft_copy_async16(shared + (step % STAGES) * STEP_WORDS + at, from + step * FT_GEMM_DEPTH + part * 8);
    }
}

/* One step of a warp's 32 by 32 without a matrix unit: the sums lie in the same lanes. */
static __device__ __forceinline__ void gemm_step_scalar(float sum[2][4][4], const uint4 *x, const uint4 *w,
                                                        uint32_t g, uint32_t t)
{
#pragma unroll 1
    for (uint32_t pair = 0; pair < FT_GEMM_DEPTH / 2; pair++) {
        float a[4][2];
        uint32_t b[8];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t at = (i / 2 * 16 + g + i % 2 * 8) * (FT_GEMM_DEPTH / 2) + pair;
            uint32_t high = ((const uint32_t *)x)[at],
                     low = ((const uint32_t *)x)[at + TILE_ROWS * (FT_GEMM_DEPTH / 2)];
            a[i][0] = ft_bf16_low(high) + ft_bf16_low(low);
            a[i][1] = ft_bf16_high(high) + ft_bf16_high(low);
        }
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            b[i] = ((const uint32_t *)w)[(i / 2 * 8 + 2 * t + i % 2) * (FT_GEMM_DEPTH / 2) + pair];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
#pragma unroll
            for (uint32_t j = 0; j < 8; j++) {
                float *to = &sum[i / 2][j / 2][i % 2 * 2 + j % 2];
                *to += a[i][0] * ft_bf16_low(b[j]);
                *to += a[i][1] * ft_bf16_high(b[j]);
            }
    }
}

__global__ void __launch_bounds__(THREADS) gemm_kernel(const __grid_constant__ struct ft_gemm_product args)
{
    FT_SHARED_DYNAMIC(uint4, shared);
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    uint32_t warp_row = warp / 4 * 32, warp_out = warp % 4 * 32, steps = args.columns / FT_GEMM_DEPTH;
    float sum[2][4][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
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
        if constexpr (FT_DENSE_SCALAR) {
            gemm_step_scalar(sum, x + warp_row * (FT_GEMM_DEPTH / 8), w + warp_out * (FT_GEMM_DEPTH / 8), g,
                             t);
        } else {
            uint4 b[4];
#pragma unroll
            for (uint32_t n = 0; n < 4; n++)
                b[n] = w[(warp_out + n * 8 + g) * (FT_GEMM_DEPTH / 8) + t];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) { /* the low pieces first */
                uint32_t m = i & 1, line = warp_row + m * 16 + g + (i < 2 ? TILE_ROWS : 0);
                uint4 top = x[line * (FT_GEMM_DEPTH / 8) + t], low = x[(line + 8) * (FT_GEMM_DEPTH / 8) + t];
                uint32_t front[4] = {top.x, low.x, top.y, low.y}, back[4] = {top.z, low.z, top.w, low.w};
#pragma unroll
                for (uint32_t n = 0; n < 4; n++) {
                    uint32_t first[2] = {b[n].x, b[n].y}, second[2] = {b[n].z, b[n].w};
                    ft_mma_bf16(sum[m][n], front, first);
                    ft_mma_bf16(sum[m][n], back, second);
                }
            }
        }
    }
#pragma unroll
    for (uint32_t m = 0; m < 2; m++)
#pragma unroll
        for (uint32_t n = 0; n < 4; n++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t row = blockIdx.y * TILE_ROWS + warp_row + m * 16 + g + (i >> 1) * 8;
                uint32_t out = blockIdx.x * TILE + warp_out + n * 8 + 2 * t + (i & 1);
                if (row >= args.rows || out >= args.out)
                    continue;
                float *to = args.y + row * args.y_stride + out, value = sum[m][n][i] * args.scale;
                if (args.bias)
                    value += args.bias[out];
                *to = args.add ? *to + value : value;
            }
}

/* Weights [first, first + count) of any format -> bf16 [count, columns] without the matrix' global scale;
 * padding is zero. `low`: what one bf16 left over. */
__global__ void __launch_bounds__(THREADS)
    decode_kernel(const __grid_constant__ struct ft_matrix w, uint32_t first, uint32_t count,
                  uint32_t columns, bool low, uint16_t *to)
{
    uint64_t pairs = (uint64_t)count * (columns / 2), stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < pairs; i += stride) {
        uint32_t row = (uint32_t)(i / (columns / 2)), column = (uint32_t)(i % (columns / 2)) * 2;
        uint32_t piece[2][2] = {{0, 0}, {0, 0}};
        for (uint32_t e = 0; e < 2; e++)
            if (column + e < w.in)
                ft_gemm_split(ft_dense_element(&w, first + row, column + e), &piece[0][e], &piece[1][e]);
        ((uint32_t *)to)[i] = low ? piece[1][0] | piece[1][1] << 16 : piece[0][0] | piece[0][1] << 16;
    }
}

__global__ void __launch_bounds__(THREADS)
    convert_kernel(const float *x, uint64_t x_stride, uint32_t rows, uint32_t in, uint32_t columns,
                   uint16_t *to, uint64_t *stamp)
{
    if (stamp && blockIdx.x == 0 && threadIdx.x == 0)
        *stamp = ft_global_timer();
    uint64_t pairs = (uint64_t)rows * (columns / 2), stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < pairs; i += stride) {
        uint32_t row = (uint32_t)(i / (columns / 2)), column = (uint32_t)(i % (columns / 2)) * 2;
        const float *from = x + row * x_stride + column;
        ft_gemm_store(to, 2 * i, 2 * pairs, column < in ? from[0] : 0.0f, column + 1 < in ? from[1] : 0.0f);
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

int ft_gemm_convert(const struct ft_gemm_rows *to, const float *x, uint64_t x_stride, uint32_t in,
                    uint64_t *stamp, void *stream)
{
    uint32_t blocks = blocks_for(NULL, (uint64_t)to->rows * to->columns / 2);
    return FT_LAUNCH(convert_kernel, dim3(blocks), dim3(THREADS), 0, stream, x, x_stride, to->rows, in,
                     to->columns, to->x, stamp);
}

/* bf16 operands in memory. The library is taken when it is open and willing; biases are the own kernel's. */
static int multiply(const struct ft_cuda *c, const struct ft_gemm_product *args, void *stream)
{
    if (c->blas && !args->bias && ft_gemm_blas(c, args, stream))
        return 0;
    uint32_t shared = STAGES * STEP_WORDS * sizeof(uint4);
    dim3 grid((uint32_t)ft_div_up(args->out, TILE), (uint32_t)ft_div_up(args->rows, TILE_ROWS));
    return FT_LAUNCH(gemm_kernel, grid, dim3(THREADS), shared, stream, *args);
}

int ft_gemm_multiply_part(const struct ft_cuda *c, const struct ft_gemm_rows *x, const struct ft_matrix *w,
                          uint32_t begin, uint32_t count, const float *bias, float *y, uint64_t y_stride,
                          void *stream)
{
    struct ft_gemm_product args = {x->x,     (const uint16_t *)w->data + (uint64_t)begin * w->in,
                                   bias,     y,
                                   y_stride, x->rows,
                                   count,    x->columns,
                                   1.0f,     false};
    if (w->format == FT_FORMAT_BF16 && w->in == x->columns && ((uintptr_t)w->data & 15) == 0)
        return multiply(c, &args, stream);
    /* In fp4 the scale of the whole matrix is left for the end: without it one bf16 holds a weight. */
    bool two = w->format == FT_FORMAT_F32 || w->format == FT_FORMAT_FP8_BLOCK;
    struct ft_matrix bare = *w;
    uint16_t *slice = (uint16_t *)c->scratch;
    uint32_t most = (uint32_t)(FT_GEMM_WEIGHT_BYTES / (2ull * x->columns));
    int status = 0;
    if (w->format == FT_FORMAT_NVFP4) {
        args.scale = w->global;
        bare.global = 1.0f;
    }
    args.w = slice;
    for (uint32_t done = 0; done < count && status == 0; done += most) {
        args.out = FT_MIN(most, count - done);
        args.y = y + done;
        uint32_t blocks = blocks_for(c, (uint64_t)args.out * x->columns / 2);
        for (int piece = two ? 1 : 0; piece >= 0 && status == 0; piece--) {
            args.add = two && piece == 0;
            args.bias = bias && piece == 0 ? bias + done : NULL;
            status = FT_LAUNCH(decode_kernel, dim3(blocks), dim3(THREADS), 0, stream, bare, begin + done,
                               args.out, x->columns, piece == 1, slice);
            if (status == 0)
                status = multiply(c, &args, stream);
        }
    }
    return status;
}

int ft_gemm_multiply(const struct ft_cuda *c, const struct ft_gemm_rows *x, const struct ft_matrix *w,
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
