/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense products for up to 16 rows, as device code that kernels of several files build on: a block computes a
 * tile of outputs of a matrix in any format for all rows, reading the weights once.
 *
 * The matrix units do the products. Weights of every format but f32 are exact in bf16 (e2m1 times an e4m3 or
 * e8m0 scale too), and an activation is exactly the sum of three bf16 pieces of 8 bits each, so W x is three
 * products of bf16 matrices with f32 sums: f32 arithmetic without f32 multiplications, and the cost hardly
 * grows with the rows.
 *
 *   mma m16n8k16:  A = activations (16 rows), B = weights (8 outputs: a "column tile"), D = sums
 *   lane = 4 g + t: loads 16 bytes of weight row g at a time and meets pieces of the activation rows g and g
 * + 8
 *
 * Columns are walked in units of 128. Within a unit the matrix unit sums; a unit's sum is then added to an
 * f32 register (the matrix unit cuts bits off long sums, additions round). `warps_k` warps share the columns
 * of a tile: unit u belongs to warp u % warps_k, and the warps' sums are added in ascending order. So an
 * output's bits depend on the matrix and on warps_k alone: not on the rows beside it, not on the tile, not on
 * how the columns are cut into chunks.
 *
 * Order of calls, by all threads of a block (see dense.cu for a kernel):
 *   ft_dense_load     first unit's weights on their way before anything is waited for (optional)
 *   ft_dense_stage    activations -> shared memory, in pieces; __syncthreads
 *   ft_dense_walk     weights times activations -> `sum` registers of the warp
 *   ft_dense_put      sum -> shared memory; __syncthreads
 *   ft_dense_total    output o of row r: read by whoever stores it
 */
#ifndef FT_KERNELS_CUDA_DENSE_CUH
#define FT_KERNELS_CUDA_DENSE_CUH

#include "graph/matrix.h"
#include "kernels_cuda/device.h"

#define FT_DENSE_UNIT 128u
#define FT_DENSE_ROWS 16u
/* Floats of shared memory that ft_dense_put fills, per warp and column tile. */
#define FT_DENSE_PUT_COUNT (8u * FT_DENSE_ROWS)

/* How weights are read: FT_DENSE_ANY decodes element by element (f32, and shapes that 16-byte loads do not
 * fit). */
enum ft_dense_kind { FT_DENSE_BF16, FT_DENSE_FP8, FT_DENSE_NVFP4, FT_DENSE_MXFP4, FT_DENSE_ANY };

static inline enum ft_dense_kind ft_dense_kind_of(const struct ft_matrix *w)
{
    bool aligned = ((uintptr_t)w->data & 15) == 0;
    switch (w->format) {
    case FT_FORMAT_BF16:
        return aligned && w->in % 8 == 0 ? FT_DENSE_BF16 : FT_DENSE_ANY;
    case FT_FORMAT_FP8_BLOCK:
        return aligned && w->in % 16 == 0 && (w->block_in % FT_DENSE_UNIT == 0 || w->block_in >= w->in)
                   ? FT_DENSE_FP8
                   : FT_DENSE_ANY;
    case FT_FORMAT_NVFP4:
        return aligned && w->in % 32 == 0 && ((uintptr_t)w->scale & 1) == 0 ? FT_DENSE_NVFP4 : FT_DENSE_ANY;
    case FT_FORMAT_MXFP4:
    case FT_FORMAT_DS_FP4:
        return aligned ? FT_DENSE_MXFP4 : FT_DENSE_ANY;
    default:
        return FT_DENSE_ANY;
    }
}

/* ---- activations in shared memory ---- */

/* 16-byte words between two rows of `columns` activations (a multiple of 128). A run of 8 columns takes three
 * words (one a piece); padded so that the rows of a fragment fall into different banks. FT_DENSE_ANY: plain
 * f32. */
static __host__ __device__ inline uint32_t ft_dense_row_words(int kind, uint32_t columns)
{
    if (kind == FT_DENSE_ANY)
        return columns / 4;
    uint32_t words = columns / 8 * 3, wanted = kind == FT_DENSE_BF16 ? 4 : 1;
    return words + ((wanted - words % 8) & 7);
}

struct ft_dense_x {
    uint4 *words; /* shared memory [rows, row_words] */
    uint32_t row_words, rows;
    uint32_t begin, end; /* columns held; begin a multiple of 128, end too unless it is the last chunk's */
};

/* x = high + middle + low, exactly, each of 8 significant bits; infinity and NaN stand in `high` alone. */
static __device__ __forceinline__ void ft_dense_split(float x, uint32_t piece[3])
{
    uint32_t bits = __float_as_uint(x);
    piece[0] = bits & 0xffff0000u;
    if ((bits & 0x7f800000u) == 0x7f800000u) {
        piece[0] |= bits & 0x007fffffu ? 0x00400000u : 0u;
        piece[1] = piece[2] = 0;
        return;
    }
    float rest = x - __uint_as_float(piece[0]);
    piece[1] = __float_as_uint(rest) & 0xffff0000u;
    piece[2] = __float_as_uint(rest - __uint_as_float(piece[1]));
}

/* Order of the 8 columns of a run in its words: fp4 takes nibbles 16 bits apart into one pair. */
template <int kind> static __device__ __forceinline__ constexpr unsigned ft_dense_place(unsigned i)
{
    return kind == FT_DENSE_NVFP4 || kind == FT_DENSE_MXFP4 ? (i >> 1) + (i & 1) * 4 : i;
}

/* Run `run` of a row's words. */
template <int kind>
static __device__ __forceinline__ void ft_dense_store_run(uint4 *row, uint32_t run, const float v[8])
{
    if constexpr (kind == FT_DENSE_ANY) {
        float4 *to = (float4 *)(row + run * 2);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        uint32_t words[3][4];
#pragma unroll
        for (unsigned p = 0; p < 4; p++) {
            uint32_t low[3], high[3];
            ft_dense_split(v[ft_dense_place<kind>(2 * p)], low);
            ft_dense_split(v[ft_dense_place<kind>(2 * p + 1)], high);
#pragma unroll
            for (unsigned j = 0; j < 3; j++)
                words[j][p] = __byte_perm(low[j], high[j], 0x7632);
        }
#pragma unroll
        for (unsigned j = 0; j < 3; j++)
            row[run * 3 + j] = make_uint4(words[j][0], words[j][1], words[j][2], words[j][3]);
    }
}

/* Half of a run, columns 4 half .. 4 half + 3 of it: where ft_dense_place keeps the order. */
template <int kind>
static __device__ __forceinline__ void ft_dense_store_half(uint4 *row, uint32_t run, uint32_t half,
                                                           const float v[4])
{
    static_assert(kind == FT_DENSE_ANY || ft_dense_place<kind>(1) == 1, "columns in ascending order");
    if constexpr (kind == FT_DENSE_ANY) {
        ((float4 *)row)[run * 2 + half] = make_float4(v[0], v[1], v[2], v[3]);
    } else {
        uint32_t piece[4][3];
#pragma unroll
        for (unsigned i = 0; i < 4; i++)
            ft_dense_split(v[i], piece[i]);
#pragma unroll
        for (unsigned j = 0; j < 3; j++)
            ((uint2 *)(row + run * 3 + j))[half] = make_uint2(__byte_perm(piece[0][j], piece[1][j], 0x7632),
                                                              __byte_perm(piece[2][j], piece[3][j], 0x7632));
    }
}

/*
 * source(row, column, v): 8 activations of `row` from `column` (a multiple of 8) to v; called for columns <
 * in only, and must fill all 8 (zeros behind `in`). Columns between `in` and the end of the unit become
 * zeros. All threads call it.
 */
template <int kind, class Source>
static __device__ __forceinline__ void ft_dense_stage(const struct ft_dense_x *x, uint32_t in, Source source)
{
    uint32_t runs = (x->end - x->begin + FT_DENSE_UNIT - 1) / FT_DENSE_UNIT * (FT_DENSE_UNIT / 8);
    for (uint32_t i = threadIdx.x; i < x->rows * runs; i += 2 * blockDim.x) {
        float v[2][8]; /* two runs on their way at once */
#pragma unroll
        for (uint32_t b = 0; b < 2; b++) {
            uint32_t at = i + b * blockDim.x, column = x->begin + at % runs * 8;
#pragma unroll
            for (unsigned e = 0; e < 8; e++)
                v[b][e] = 0.0f;
            if (at < x->rows * runs && column < in)
                source(at / runs, column, v[b]);
        }
#pragma unroll
        for (uint32_t b = 0; b < 2; b++) {
            uint32_t at = i + b * blockDim.x;
            if (at < x->rows * runs)
                ft_dense_store_run<kind>(x->words + at / runs * x->row_words, at % runs, v[b]);
        }
    }
}

/* Rows of f32 in global memory as a source. */
struct ft_dense_rows_source {
    const float *x;
    uint64_t stride;
    uint32_t in;
    const uint32_t *index; /* row r is x + index[r] * stride; NULL: r */
    __device__ void operator()(uint32_t row, uint32_t column, float v[8]) const
    {
        const float *from = x + (index ? index[row] : row) * stride + column;
        if (column + 8 <= in && ((uintptr_t)from & 15) == 0) {
            float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
            v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
            return;
        }
        for (unsigned i = 0; i < 8; i++)
            v[i] = column + i < in ? from[i] : 0.0f;
    }
};

/* ---- weights ---- */

/* Elements that 16 bytes hold. */
template <int kind> static __device__ __forceinline__ constexpr unsigned ft_dense_run()
{
    return kind == FT_DENSE_BF16 ? 8 : kind == FT_DENSE_FP8 ? 16 : 32;
}
/* 16-byte loads of one lane in a unit. */
template <int kind> static __device__ __forceinline__ constexpr unsigned ft_dense_loads()
{
    return kind == FT_DENSE_ANY ? 1 : FT_DENSE_UNIT / 4 / ft_dense_run<kind>();
}

/* Where this lane finds its weights: row g of every column tile. */
template <int tiles> struct ft_dense_weights {
    const char *data[tiles];  /* of the lane's row */
    const char *scale[tiles]; /* fp4: scales of the lane's row; fp8: of the blocks of the tile's output 2 t */
    const char *scale_next[tiles];      /* fp8: of output 2 t + 1 */
    const struct ft_matrix *any[tiles]; /* FT_DENSE_ANY: the matrix, and the lane's row */
    uint32_t row[tiles];
    uint32_t in, block_in;
};

/* Column tile `tile` of `to` is outputs [first, first + 8) of w; outputs beyond the last are read as the last
 * one. */
template <int kind, int tiles>
static __device__ __forceinline__ void ft_dense_aim(struct ft_dense_weights<tiles> *to, unsigned tile,
                                                    const struct ft_matrix *w, uint32_t first)
{
    uint32_t lane = threadIdx.x & 31, row = min(first + (lane >> 2), w->out - 1);
    to->in = w->in;
    to->row[tile] = row;
    to->any[tile] = w;
    const char *data = (const char *)w->data, *scale = (const char *)w->scale;
    if (kind == FT_DENSE_BF16) {
        to->data[tile] = data + (uint64_t)row * w->in * 2;
    } else if (kind == FT_DENSE_FP8) {
        uint32_t blocks = (w->in + w->block_in - 1) / w->block_in, output = first + 2 * (lane & 3);
        to->data[tile] = data + (uint64_t)row * w->in;
        to->scale[tile] = scale + (uint64_t)(min(output, w->out - 1) / w->block_out) * blocks * 4;
        to->scale_next[tile] = scale + (uint64_t)(min(output + 1, w->out - 1) / w->block_out) * blocks * 4;
        to->block_in = w->block_in;
    } else if (kind == FT_DENSE_NVFP4 || kind == FT_DENSE_MXFP4) {
        to->data[tile] = data + (uint64_t)row * (w->in / 2);
        to->scale[tile] = scale + (uint64_t)row * (w->in / (kind == FT_DENSE_NVFP4 ? 16 : 32));
    }
}

/* One unit's weights as they lie in memory. */
template <int kind, int tiles> struct ft_dense_raw {
    uint4 data[tiles][ft_dense_loads<kind>()];
    uint32_t scale[tiles], scale_next[tiles];
};

/* Issues the loads of a unit; columns behind the matrix read as zero. */
template <int kind, int tiles>
static __device__ __forceinline__ void ft_dense_load(struct ft_dense_raw<kind, tiles> *raw,
                                                     const struct ft_dense_weights<tiles> *w, uint32_t unit)
{
    if (kind == FT_DENSE_ANY)
        return;
    constexpr unsigned run = ft_dense_run<kind>(), loads = ft_dense_loads<kind>();
    uint32_t t = threadIdx.x & 3, begin = unit * FT_DENSE_UNIT;
#pragma unroll
    for (int n = 0; n < tiles; n++) {
#pragma unroll
        for (unsigned i = 0; i < loads; i++) {
            uint32_t column = begin + i * 4 * run + t * run;
            raw->data[n][i] = make_uint4(0, 0, 0, 0);
            if (column < w->in)
                raw->data[n][i] = __ldcs((const uint4 *)(w->data[n] + (uint64_t)(column / run) * 16));
        }
        raw->scale[n] = 0;
        if (kind == FT_DENSE_NVFP4 && begin + t * 32 < w->in)
            raw->scale[n] = __ldcs((const uint16_t *)(w->scale[n] + begin / 16 + t * 2));
        if (kind == FT_DENSE_MXFP4 && begin + t * 32 < w->in)
            raw->scale[n] = __ldcs((const uint8_t *)(w->scale[n] + begin / 32 + t));
        if (kind == FT_DENSE_FP8 && begin < w->in) { /* a unit lies inside one block */
            uint32_t block = begin / w->block_in;
            raw->scale[n] = __float_as_uint(__ldg((const float *)w->scale[n] + block));
            raw->scale_next[n] = __float_as_uint(__ldg((const float *)w->scale_next[n] + block));
        }
    }
}

/* Asks for a unit's weights to come into L2. */
template <int kind, int tiles>
static __device__ __forceinline__ void ft_dense_prefetch(const struct ft_dense_weights<tiles> *w,
                                                         uint32_t unit)
{
    if (kind == FT_DENSE_ANY)
        return;
    constexpr unsigned run = ft_dense_run<kind>(), bytes = FT_DENSE_UNIT / run * 16; /* of a row */
    constexpr unsigned lines = bytes > 128 ? bytes / 128 : 1;
    uint32_t t = threadIdx.x & 3, column = unit * FT_DENSE_UNIT + t * (128 / 16 * run);
    if (t >= lines || column >= w->in)
        return;
#pragma unroll
    for (int n = 0; n < tiles; n++)
        ft_prefetch_l2(w->data[n] + (uint64_t)(column / run) * 16);
}

/* The bf16 pairs of 8 weights (run `part` of the 16 bytes) in the order of the staged activations. Exact. */
template <int kind>
static __device__ __forceinline__ void ft_dense_pairs(uint4 raw, unsigned part, uint32_t scale,
                                                      uint32_t pair[4])
{
    if (kind == FT_DENSE_BF16) {
        pair[0] = raw.x, pair[1] = raw.y, pair[2] = raw.z, pair[3] = raw.w;
    } else if (kind == FT_DENSE_FP8) {
        /* Sign and magnitude move into the places of a bf16, whose exponent is then too small by 120. */
        uint32_t word[2] = {part ? raw.z : raw.x, part ? raw.w : raw.y};
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            uint32_t bytes = __byte_perm(word[i >> 1], 0, i & 1 ? 0x3424 : 0x1404);
            uint32_t bits = (bytes & 0x80008000u) | (bytes >> 4 & 0x07f007f0u);
            pair[i] = ft_mul_bf16_pair(bits, 0x7b807b80u); /* 2^120 */
            if ((bytes & 0x00007f00u) == 0x00007f00u)      /* 0x7f is NaN, not 480 */
                pair[i] |= 0x00007fffu;
            if ((bytes & 0x7f000000u) == 0x7f000000u)
                pair[i] |= 0x7fff0000u;
        }
    } else if (kind == FT_DENSE_NVFP4 || kind == FT_DENSE_MXFP4) {
        uint32_t word = part == 0 ? raw.x : part == 1 ? raw.y : part == 2 ? raw.z : raw.w, factor;
        if (kind ==
            FT_DENSE_NVFP4) { /* e4m3 * 2^118: with the 2^-126 of the bits below, 2^-8 is left for the end */
            factor = __float_as_uint(ft_e4m3(scale >> (part >> 1) * 8 & 0xffu) * 0x1p118f) >> 16;
            factor |= factor << 16;
        } else {
            factor = __float_as_uint(ft_e8m0(scale)) >> 16;
            factor |= factor << 16;
        }
#pragma unroll
        for (unsigned i = 0; i < 4; i++) { /* nibbles i and i + 4 */
            uint32_t sign = i < 3 ? word << (12 - 4 * i) : word,
                     magnitude = i < 2 ? word << (6 - 4 * i) : word >> (4 * i - 6);
            uint32_t bits = (sign & 0x80008000u) | (magnitude & 0x01c001c0u);
            if (kind == FT_DENSE_MXFP4)
                bits = ft_mul_bf16_pair(bits, 0x7e807e80u); /* 2^126 */
            pair[i] = ft_mul_bf16_pair(bits, factor);
        }
    }
}

/* Without a bf16 matrix unit (sm_75) the same sums come from f32 multiplications. */
#ifndef FT_DENSE_SCALAR
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define FT_DENSE_SCALAR 1
#else
#define FT_DENSE_SCALAR 0
#endif
#endif

/* As ft_dense_multiply, with f32 multiplications: lane (g, t) sums its own columns of output g for one row
 * after the other; the four lanes' sum then goes to the lane that keeps the row. */
template <int kind, int tiles, bool wide>
static __device__ __forceinline__ void ft_dense_multiply_scalar(float sum[][4],
                                                                const struct ft_dense_raw<kind, tiles> *raw,
                                                                const struct ft_dense_x *x, uint32_t unit)
{
    constexpr unsigned run = ft_dense_run<kind>(), loads = ft_dense_loads<kind>();
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint4 *row = x->words + (unit * FT_DENSE_UNIT - x->begin) / 8 * 3;
#pragma unroll 1
    for (uint32_t r = 0; r < x->rows; r++, row += x->row_words) {
        float part[tiles];
#pragma unroll
        for (int n = 0; n < tiles; n++)
            part[n] = 0.0f;
#pragma unroll
        for (unsigned i = 0; i < loads * (run / 8); i++) {
            const uint4 *from = row + ((i / (run / 8) * 4 + t) * (run / 8) + i % (run / 8)) * 3;
            uint4 a = from[0], b = from[1], c = from[2];
            uint32_t high[4] = {a.x, a.y, a.z, a.w}, middle[4] = {b.x, b.y, b.z, b.w},
                     low[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
            for (int n = 0; n < tiles; n++) {
                uint32_t pair[4];
                ft_dense_pairs<kind>(raw->data[n][i / (run / 8)], i % (run / 8), raw->scale[n], pair);
#pragma unroll
                for (unsigned p = 0; p < 4; p++) {
                    float v = ft_bf16_low(high[p]) + (ft_bf16_low(middle[p]) + ft_bf16_low(low[p]));
                    float w = ft_bf16_high(high[p]) + (ft_bf16_high(middle[p]) + ft_bf16_high(low[p]));
                    part[n] += ft_bf16_low(pair[p]) * v;
                    part[n] += ft_bf16_high(pair[p]) * w;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < tiles; n++) {
            float value = part[n];
            value += __shfl_xor_sync(0xffffffffu, value, 1);
            value += __shfl_xor_sync(0xffffffffu, value, 2);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float mine = __shfl_sync(0xffffffffu, value, (int)(8 * t + 4 * (unsigned)c));
                if (kind == FT_DENSE_FP8)
                    mine *= __uint_as_float(c ? raw->scale_next[n] : raw->scale[n]);
                if (g == r % 8 && r < 8)
                    sum[n][c] += mine;
                if (wide && g == r % 8 && r >= 8)
                    sum[n][2 + c] += mine;
            }
        }
    }
}

/* sum[n][0..1]: row g, outputs 2t and 2t + 1 of column tile n; sum[n][2..3]: row g + 8 (`wide` only). */
template <int kind, int tiles, bool wide>
static __device__ __forceinline__ void ft_dense_multiply(float sum[][4],
                                                         const struct ft_dense_raw<kind, tiles> *raw,
                                                         const struct ft_dense_x *x, uint32_t unit)
{
    if constexpr (FT_DENSE_SCALAR) {
        ft_dense_multiply_scalar<kind, tiles, wide>(sum, raw, x, unit);
        return;
    }
    constexpr unsigned run = ft_dense_run<kind>(), loads = ft_dense_loads<kind>();
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    uint32_t at = (unit * FT_DENSE_UNIT - x->begin) / 8 * 3;
    /* Rows that do not exist read the last one: what they add up is not looked at. */
    const uint4 *top = x->words + min(g, x->rows - 1) * x->row_words + at;
    const uint4 *low = x->words + min(g + 8, x->rows - 1) * x->row_words + at;
    float large[tiles][4], small[tiles][4];
#pragma unroll
    for (int n = 0; n < tiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            large[n][i] = small[n][i] = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < loads; i++)
#pragma unroll
        for (unsigned part = 0; part < run / 8; part++) {
            uint32_t pair[tiles][4];
#pragma unroll
            for (int n = 0; n < tiles; n++)
                ft_dense_pairs<kind>(raw->data[n][i], part, raw->scale[n], pair[n]);
#pragma unroll
            for (int j = 2; j >= 0; j--) { /* the smallest piece first */
                unsigned word = ((i * 4 + t) * (run / 8) + part) * 3 + (unsigned)j;
                uint4 a = top[word], b = wide ? low[word] : make_uint4(0, 0, 0, 0);
                uint32_t front[4] = {a.x, b.x, a.y, b.y}, back[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
                for (int n = 0; n < tiles; n++) {
                    ft_mma_bf16(j ? small[n] : large[n], front, &pair[n][0]);
                    ft_mma_bf16(j ? small[n] : large[n], back, &pair[n][2]);
                }
            }
        }
#pragma unroll
    for (int n = 0; n < tiles; n++)
#pragma unroll
        for (int i = 0; i < (wide ? 4 : 2); i++) {
            float part = large[n][i] + small[n][i];
            if (kind == FT_DENSE_FP8)
                part *= __uint_as_float(i & 1 ? raw->scale_next[n] : raw->scale[n]);
            sum[n][i] += part;
        }
}

/* One weight of any format. */
static __device__ inline float ft_dense_element(const struct ft_matrix *w, uint32_t row, uint32_t column)
{
    uint64_t at = (uint64_t)row * w->in + column;
    const uint8_t *bytes = (const uint8_t *)w->data, *scale = (const uint8_t *)w->scale;
    switch (w->format) {
    case FT_FORMAT_F32:
        return ((const float *)w->data)[at];
    case FT_FORMAT_BF16:
        return ft_bf16(((const uint16_t *)w->data)[at]);
    case FT_FORMAT_FP8_BLOCK: {
        uint64_t blocks = (w->in + w->block_in - 1) / w->block_in;
        return ft_e4m3(bytes[at]) *
               ((const float *)w->scale)[row / w->block_out * blocks + column / w->block_in];
    }
    case FT_FORMAT_NVFP4:
        return ft_e2m1(bytes[at / 2] >> (at % 2 * 4) & 15u) * ft_e4m3(scale[at / 16]) * w->global;
    default:
        return ft_e2m1(bytes[at / 2] >> (at % 2 * 4) & 15u) * ft_e8m0(scale[at / 32]);
    }
}

/* As ft_dense_multiply for FT_DENSE_ANY: sum[n][r] is this lane's share of row r, output g. */
template <int tiles>
static __device__ __forceinline__ void ft_dense_multiply_any(float (*sum)[FT_DENSE_ROWS],
                                                             const struct ft_dense_weights<tiles> *w,
                                                             const struct ft_dense_x *x, uint32_t unit)
{
    uint32_t t = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < tiles; n++)
        for (unsigned i = 0; i < FT_DENSE_UNIT / 16; i++) {
            uint32_t column = unit * FT_DENSE_UNIT + i * 16 + t * 4;
            float v[4] = {0, 0, 0, 0};
            const float *direct = (const float *)w->any[n]->data + (uint64_t)w->row[n] * w->in + column;
            if (w->any[n]->format == FT_FORMAT_F32 && column + 4 <= w->in && ((uintptr_t)direct & 15) == 0) {
                float4 four = __ldcs((const float4 *)direct);
                v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
            } else {
                for (unsigned e = 0; e < 4; e++)
                    if (column + e < w->in)
                        v[e] = ft_dense_element(w->any[n], w->row[n], column + e);
            }
            const float *from = (const float *)x->words + (column - x->begin);
#pragma unroll
            for (unsigned r = 0; r < FT_DENSE_ROWS; r++)
                if (r < x->rows) {
                    float4 a = *(const float4 *)(from + (uint64_t)r * x->row_words * 4);
                    sum[n][r] += (v[0] * a.x + v[1] * a.y) + (v[2] * a.z + v[3] * a.w);
                }
        }
}

/* ---- a warp's walk ---- */

/* What a warp adds up while it walks. */
template <int kind, int tiles> struct ft_dense_sums {
    float sum[tiles][kind == FT_DENSE_ANY ? FT_DENSE_ROWS : 4];
};
template <int kind, int tiles>
static __device__ __forceinline__ void ft_dense_clear(struct ft_dense_sums<kind, tiles> *s)
{
#pragma unroll
    for (int n = 0; n < tiles; n++)
#pragma unroll
        for (unsigned i = 0; i < (kind == FT_DENSE_ANY ? FT_DENSE_ROWS : 4); i++)
            s->sum[n][i] = 0.0f;
}

/*
 * Adds the products of this warp's units among the columns that x holds: units u = warp_k (mod warps_k). On
 * entry `raw` holds the first of them (ft_dense_load of ft_dense_first), on return the first one behind x, if
 * `more`.
 */
static __device__ __forceinline__ uint32_t ft_dense_first(uint32_t begin, uint32_t warp_k, uint32_t warps_k)
{
    uint32_t unit = begin / FT_DENSE_UNIT, ahead = (warp_k + warps_k - unit % warps_k) % warps_k;
    return unit + ahead;
}
template <int kind, int tiles, bool wide>
static __device__ __forceinline__ void
ft_dense_walk(struct ft_dense_sums<kind, tiles> *s, struct ft_dense_raw<kind, tiles> *raw,
              const struct ft_dense_weights<tiles> *w, const struct ft_dense_x *x, uint32_t warp_k,
              uint32_t warps_k)
{
    uint32_t end = (x->end + FT_DENSE_UNIT - 1) / FT_DENSE_UNIT;
    for (uint32_t unit = ft_dense_first(x->begin, warp_k, warps_k); unit < end; unit += warps_k) {
        if constexpr (kind == FT_DENSE_ANY) {
            ft_dense_multiply_any<tiles>(s->sum, w, x, unit);
        } else if constexpr (tiles < 4) {
            struct ft_dense_raw<kind, tiles> now = *raw;
            ft_dense_load<kind, tiles>(raw, w, unit + warps_k);
            ft_dense_multiply<kind, tiles, wide>(s->sum, &now, x, unit);
        } else { /* two units at once would not fit into the registers */
            ft_dense_multiply<kind, tiles, wide>(s->sum, raw, x, unit);
            ft_dense_load<kind, tiles>(raw, w, unit + warps_k);
        }
    }
}

/*
 * The same with `flight` units on their way: on entry raw[i] holds unit first + i warps_k. Units from `stop`
 * on are not asked for (they are another block's).
 */
template <int kind, int tiles, int flight>
static __device__ __forceinline__ void ft_dense_load_all(struct ft_dense_raw<kind, tiles> raw[flight],
                                                         const struct ft_dense_weights<tiles> *w,
                                                         uint32_t first, uint32_t warps_k, uint32_t stop)
{
#pragma unroll
    for (uint32_t i = 0; i < flight; i++)
        if (first + i * warps_k < stop)
            ft_dense_load<kind, tiles>(&raw[i], w, first + i * warps_k);
}
template <int kind, int tiles, bool wide, int flight>
static __device__ __forceinline__ void
ft_dense_walk_flight(struct ft_dense_sums<kind, tiles> *s, struct ft_dense_raw<kind, tiles> raw[flight],
                     const struct ft_dense_weights<tiles> *w, const struct ft_dense_x *x, uint32_t warp_k,
                     uint32_t warps_k, uint32_t stop)
{
    uint32_t end = (x->end + FT_DENSE_UNIT - 1) / FT_DENSE_UNIT;
    for (uint32_t unit = ft_dense_first(x->begin, warp_k, warps_k); unit < end; unit += warps_k) {
        if constexpr (kind == FT_DENSE_ANY) {
            ft_dense_multiply_any<tiles>(s->sum, w, x, unit);
        } else {
            struct ft_dense_raw<kind, tiles> now = raw[0];
#pragma unroll
            for (int i = 0; i + 1 < flight; i++)
                raw[i] = raw[i + 1];
            if (unit + flight * warps_k < stop)
                ft_dense_load<kind, tiles>(&raw[flight - 1], w, unit + flight * warps_k);
            ft_dense_multiply<kind, tiles, wide>(s->sum, &now, x, unit);
        }
    }
}

/* ---- the block's sums ---- */

/*
 * A warp's sums to `put`: shared memory [blockDim / 32, tiles, 8 outputs, 16 rows]. All warps' places are
 * apart; call
 * __syncthreads before ft_dense_total, and again before the next put. `w`: the matrix of each column tile
 * (its global scale is applied here).
 */
template <int kind, int tiles, bool wide>
static __device__ __forceinline__ void ft_dense_put(const struct ft_dense_sums<kind, tiles> *s,
                                                    const struct ft_dense_weights<tiles> *w, float *put)
{
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    put += (threadIdx.x >> 5) * (tiles * FT_DENSE_PUT_COUNT);
#pragma unroll
    for (int n = 0; n < tiles; n++, put += FT_DENSE_PUT_COUNT) {
        if constexpr (kind == FT_DENSE_ANY) {
#pragma unroll
            for (unsigned r = 0; r < FT_DENSE_ROWS; r++) { /* the four lanes of an output row */
                float value = s->sum[n][r];
                value += __shfl_xor_sync(0xffffffffu, value, 1);
                value += __shfl_xor_sync(0xffffffffu, value, 2);
                if (t == r % 4)
                    put[g * FT_DENSE_ROWS + r] = value;
            }
        } else {
            float scale = kind == FT_DENSE_NVFP4 ? w->any[n]->global * 256.0f : 1.0f;
#pragma unroll
            for (unsigned i = 0; i < (wide ? 4 : 2); i++)
                put[(2 * t + (i & 1)) * FT_DENSE_ROWS + g + (i >> 1) * 8] = s->sum[n][i] * scale;
        }
    }
}

/*
 * The sum of output `output` of column tile `tile` for `row`. The tile's warps are first_warp .. first_warp +
 * warps_k - 1, in ascending order of warp_k.
 */
static __device__ __forceinline__ float ft_dense_total(const float *put, int tiles, uint32_t first_warp,
                                                       uint32_t warps_k, uint32_t tile, uint32_t output,
                                                       uint32_t row)
{
    put +=
        ((uint64_t)first_warp * (uint32_t)tiles + tile) * FT_DENSE_PUT_COUNT + output * FT_DENSE_ROWS + row;
    float sum = put[0];
    for (uint32_t i = 1; i < warps_k; i++)
        sum += put[(uint64_t)i * (uint32_t)tiles * FT_DENSE_PUT_COUNT];
    return sum;
}

#endif
