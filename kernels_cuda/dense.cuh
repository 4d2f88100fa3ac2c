/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense products for up to 16 rows, as device code that kernels of several files build on: a warp computes 16
 * outputs of a matrix in any format for all rows, reading the weights once.
 *
 * The matrix units do the products. Weights of every format but f32 are exact in bf16 (e2m1 times an e4m3 or
 * e8m0 scale too), and an activation is exactly the sum of three bf16 pieces of 8 bits each, so W x is three
 * products of bf16 matrices with f32 sums: f32 arithmetic without f32 multiplications.
 *
 *   mma m16n8k16:  A = weights (16 outputs: a tile), B = pieces of activations (8 columns), D = sums
 *   piece p of row r is column 3 r + p, so 2 rows fit into 8 columns, 5 into 16, 8 into 24, 16 into 48
 *   lane = 4 g + t: loads 16 bytes of weight rows g and g + 8 at a time and meets column g of the pieces
 *
 * Columns of the matrix are walked in units of 128. Within a unit the matrix unit sums; a unit's sum is then
 * added to an f32 register (the matrix unit cuts bits off long sums, additions round). `warps_k` warps share
 * the columns of a tile: unit u belongs to warp u % warps_k, and the warps' sums are added in ascending
 * order. So an output's bits depend on the matrix and on warps_k alone: not on the rows beside it, not on how
 * the columns are cut into chunks.
 *
 * Order of calls, by all threads of a block (see dense.cu for a kernel):
 *   ft_dense_load      first unit's weights on their way before anything is waited for (optional)
 *   ft_dense_stage     activations -> shared memory, in pieces; __syncthreads
 *   ft_dense_multiply  unit by unit: weights times activations -> `sum` registers of the warp
 *   ft_dense_put       sum -> shared memory; __syncthreads
 *   ft_dense_total     output o of row r: read by whoever stores it
 */
#ifndef FT_KERNELS_CUDA_DENSE_CUH
#define FT_KERNELS_CUDA_DENSE_CUH

#include "graph/matrix.h"
#include "kernels_cuda/device.h"

#define FT_DENSE_UNIT 128u
#define FT_DENSE_TILE 16u /* outputs of a warp */
#define FT_DENSE_ROWS 16u

/* How weights are read: FT_DENSE_ANY decodes element by element (f32, and shapes that 16-byte loads do not fit). */
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

/* Groups of 8 piece columns that `rows` rows take, of those that kernels are made for. */
static inline uint32_t ft_dense_columns(uint32_t rows)
{
    return rows <= 2 ? 1 : rows <= 5 ? 2 : rows <= 8 ? 3 : 6;
}

/* Elements that 16 bytes hold. */
template <int kind> static __host__ __device__ __forceinline__ constexpr unsigned ft_dense_run()
{
    return kind == FT_DENSE_BF16 ? 8 : kind == FT_DENSE_FP8 ? 16 : 32;
}
/* 16-byte loads of one weight row by one lane in a unit. */
template <int kind> static __device__ __forceinline__ constexpr unsigned ft_dense_loads()
{
    return kind == FT_DENSE_ANY ? 1 : FT_DENSE_UNIT / 4 / ft_dense_run<kind>();
}

/* 16-byte words of one row's `columns` activations (a multiple of 128). FT_DENSE_ANY: plain f32. Else three
 * piece columns; each is padded so that two of them lie in different halves of the banks. */
static __host__ __device__ inline uint32_t ft_dense_piece_words(uint32_t columns)
{
    return columns / 8 + 4;
}
static __host__ __device__ inline uint32_t ft_dense_row_words(int kind, uint32_t columns)
{
    return kind == FT_DENSE_ANY ? columns / 4 : 3 * ft_dense_piece_words(columns);
}

struct ft_dense_x {
    uint4 *words;                          /* shared memory [rows, row_words] */
    uint32_t row_words, piece_words, rows; /* piece_words: a third of row_words */
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

/*
 * Where run `run` of 8 columns lies in a piece column: unit by unit, load by load, eight by eight of a load,
 * lane t by lane t, so that a warp reads what it multiplies side by side.
 */
template <int kind> static __device__ __forceinline__ uint32_t ft_dense_word_of(uint32_t run)
{
    constexpr uint32_t parts = ft_dense_run<kind>() / 8;
    uint32_t part = run % parts, t = run / parts % 4, load = run / (4 * parts);
    return (load * parts + part) * 4 + t;
}

/* Run `run` of a row's words; piece_words from one piece to the next. */
template <int kind>
static __device__ __forceinline__ void ft_dense_store_run(uint4 *row, uint32_t piece_words, uint32_t run,
                                                          const float v[8])
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
            row[j * piece_words + ft_dense_word_of<kind>(run)] =
                make_uint4(words[j][0], words[j][1], words[j][2], words[j][3]);
    }
}

/* Half of a run, columns 4 half .. 4 half + 3 of it: where ft_dense_place keeps the order. */
template <int kind>
static __device__ __forceinline__ void ft_dense_store_half(uint4 *row, uint32_t piece_words, uint32_t run,
                                                           uint32_t half, const float v[4])
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
            ((uint2 *)(row + j * piece_words + ft_dense_word_of<kind>(run)))[half] = make_uint2(
                __byte_perm(piece[0][j], piece[1][j], 0x7632), __byte_perm(piece[2][j], piece[3][j], 0x7632));
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
    constexpr uint32_t at_once = 2; /* runs on their way */
    uint32_t runs = (x->end - x->begin + FT_DENSE_UNIT - 1) / FT_DENSE_UNIT * (FT_DENSE_UNIT / 8);
    for (uint32_t i = threadIdx.x; i < x->rows * runs; i += at_once * blockDim.x) {
        float v[at_once][8];
#pragma unroll
        for (uint32_t b = 0; b < at_once; b++) {
            uint32_t at = i + b * blockDim.x, column = x->begin + at % runs * 8;
#pragma unroll
            for (unsigned e = 0; e < 8; e++)
                v[b][e] = 0.0f;
            if (at < x->rows * runs && column < in)
                source(at / runs, column, v[b]);
        }
#pragma unroll
        for (uint32_t b = 0; b < at_once; b++) {
            uint32_t at = i + b * blockDim.x;
            if (at < x->rows * runs)
                ft_dense_store_run<kind>(x->words + at / runs * x->row_words, x->piece_words, at % runs,
                                         v[b]);
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

/* Where this lane finds its weights: row g of the tile's first half and row g of its second. */
struct ft_dense_weights {
    const char *data[2];            /* of the lane's rows: its 16 bytes of the first load */
    const char *scale[2];           /* fp4: scales of the lane's row; fp8: of the row's blocks */
    const struct ft_matrix *any[2]; /* the matrix, and the lane's row in it */
    uint32_t row[2];
    uint32_t in, block_in;
};

/* Half `half` of the tile is outputs [first, first + 8) of w; outputs beyond the last are read as the last one. */
template <int kind>
static __device__ __forceinline__ void ft_dense_aim_half(struct ft_dense_weights *to, unsigned half,
                                                         const struct ft_matrix *w, uint32_t first)
{
    uint32_t row = min(first + (threadIdx.x >> 2 & 7), w->out - 1), t = threadIdx.x & 3;
    to->in = w->in;
    to->row[half] = row;
    to->any[half] = w;
    const char *data = (const char *)w->data + t * 16, *scale = (const char *)w->scale;
    if (kind == FT_DENSE_BF16) {
        to->data[half] = data + (uint64_t)row * w->in * 2;
    } else if (kind == FT_DENSE_FP8) {
        uint32_t blocks = (w->in + w->block_in - 1) / w->block_in;
        to->data[half] = data + (uint64_t)row * w->in;
        to->scale[half] = scale + (uint64_t)(row / w->block_out) * blocks * 4;
        to->block_in = w->block_in;
    } else if (kind == FT_DENSE_NVFP4 || kind == FT_DENSE_MXFP4) {
        to->data[half] = data + (uint64_t)row * (w->in / 2);
        to->scale[half] = scale + (uint64_t)row * (w->in / (kind == FT_DENSE_NVFP4 ? 16 : 32));
    }
}
/* The tile is outputs [first, first + 16) of w. */
template <int kind>
static __device__ __forceinline__ void ft_dense_aim(struct ft_dense_weights *to, const struct ft_matrix *w,
                                                    uint32_t first)
{
    ft_dense_aim_half<kind>(to, 0, w, first);
    ft_dense_aim_half<kind>(to, 1, w, first + 8);
}

/* One unit's weights as they lie in memory. */
template <int kind> struct ft_dense_raw {
    uint4 data[2][ft_dense_loads<kind>()];
    uint32_t scale[2];
};

/* Issues the loads of a unit; columns behind the matrix read as zero. */
template <int kind>
static __device__ __forceinline__ void ft_dense_load(struct ft_dense_raw<kind> *raw,
                                                     const struct ft_dense_weights *w, uint32_t unit)
{
    if (kind == FT_DENSE_ANY)
        return;
    constexpr unsigned run = ft_dense_run<kind>(), loads = ft_dense_loads<kind>();
    uint32_t t = threadIdx.x & 3, begin = unit * FT_DENSE_UNIT;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint4 *from = (const uint4 *)(w->data[half] + (uint64_t)unit * (FT_DENSE_UNIT / run * 16));
        if (begin + FT_DENSE_UNIT <= w->in) {
#pragma unroll
            for (unsigned i = 0; i < loads; i++)
                raw->data[half][i] = __ldcs(from + i * 4);
        } else {
#pragma unroll
            for (unsigned i = 0; i < loads; i++)
                raw->data[half][i] =
                    begin + (i * 4 + t) * run < w->in ? __ldcs(from + i * 4) : make_uint4(0, 0, 0, 0);
        }
        raw->scale[half] = 0;
        if (kind == FT_DENSE_NVFP4 && begin + t * 32 < w->in)
            raw->scale[half] = __ldcs((const uint16_t *)(w->scale[half] + begin / 16 + t * 2));
        if (kind == FT_DENSE_MXFP4 && begin + t * 32 < w->in)
            raw->scale[half] = __ldcs((const uint8_t *)(w->scale[half] + begin / 32 + t));
        if (kind == FT_DENSE_FP8 && begin < w->in) /* a unit lies inside one block */
            raw->scale[half] = __float_as_uint(__ldg((const float *)w->scale[half] + begin / w->block_in));
    }
}

/* Asks for a unit's weights to come into L2. */
template <int kind>
static __device__ __forceinline__ void ft_dense_prefetch(const struct ft_dense_weights *w, uint32_t unit)
{
    if (kind == FT_DENSE_ANY)
        return;
    constexpr unsigned run = ft_dense_run<kind>(), bytes = FT_DENSE_UNIT / run * 16; /* of a row */
    constexpr unsigned lines = bytes > 128 ? bytes / 128 : 1;
    uint32_t t = threadIdx.x & 3;
    if (t >= lines || unit * FT_DENSE_UNIT + t * (128 / 16 * run) >= w->in)
        return;
#pragma unroll
    for (int half = 0; half < 2; half++)
        ft_prefetch_l2(w->data[half] + (uint64_t)unit * bytes + t * (128 - 16));
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

/* As ft_dense_multiply, with f32 multiplications: lane (g, t) sums its own columns of outputs g and g + 8 for
 * one row after the other; the four lanes' sum goes to the place of the row's first piece. */
template <int kind, int cols>
static __device__ __forceinline__ void ft_dense_multiply_scalar(float sum[cols][4],
                                                                const struct ft_dense_raw<kind> *raw,
                                                                const struct ft_dense_x *x, uint32_t unit)
{
    constexpr unsigned parts = ft_dense_run<kind>() / 8, loads = ft_dense_loads<kind>();
    uint32_t t = threadIdx.x & 3, piece_words = x->piece_words;
    const uint4 *row = x->words + (unit * FT_DENSE_UNIT - x->begin) / 8 + t;
#pragma unroll 1
    for (uint32_t r = 0; r < x->rows; r++, row += x->row_words) {
        float part[2] = {0.0f, 0.0f};
#pragma unroll
        for (unsigned i = 0; i < loads * parts; i++) {
            uint4 a = row[i * 4], b = row[piece_words + i * 4], c = row[2 * piece_words + i * 4];
            uint32_t high[4] = {a.x, a.y, a.z, a.w}, middle[4] = {b.x, b.y, b.z, b.w},
                     low[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t pair[4];
                ft_dense_pairs<kind>(raw->data[half][i / parts], i % parts, raw->scale[half], pair);
#pragma unroll
                for (unsigned p = 0; p < 4; p++) {
                    float v = ft_bf16_low(high[p]) + (ft_bf16_low(middle[p]) + ft_bf16_low(low[p]));
                    float w = ft_bf16_high(high[p]) + (ft_bf16_high(middle[p]) + ft_bf16_high(low[p]));
                    part[half] += ft_bf16_low(pair[p]) * v;
                    part[half] += ft_bf16_high(pair[p]) * w;
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float value = part[half];
            value += __shfl_xor_sync(0xffffffffu, value, 1);
            value += __shfl_xor_sync(0xffffffffu, value, 2);
            if (kind == FT_DENSE_FP8)
                value *= __uint_as_float(raw->scale[half]);
#pragma unroll
            for (unsigned c = 0; c < cols; c++)
#pragma unroll
                for (unsigned j = 0; j < 2; j++)
                    if (c * 8 + 2 * t + j == 3 * r)
                        sum[c][2 * half + (int)j] += value;
        }
    }
}

/* sum[c][0..1]: output g, piece columns 8 c + 2 t and the next; sum[c][2..3]: output g + 8. */
template <int kind, int cols>
static __device__ __forceinline__ void ft_dense_multiply(float sum[cols][4],
                                                         const struct ft_dense_raw<kind> *raw,
                                                         const struct ft_dense_x *x, uint32_t unit)
{
    if constexpr (FT_DENSE_SCALAR) {
        ft_dense_multiply_scalar<kind, cols>(sum, raw, x, unit);
        return;
    }
    constexpr unsigned parts = ft_dense_run<kind>() / 8, loads = ft_dense_loads<kind>();
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint4 *column[cols];
    float part_sum[cols][4];
#pragma unroll
    for (unsigned c = 0; c < cols;
         c++) { /* columns that do not exist read the last one: nobody looks at their sums */
        column[c] = x->words + min(c * 8 + g, x->rows * 3 - 1) * x->piece_words +
                    (unit * FT_DENSE_UNIT - x->begin) / 8 + t;
#pragma unroll
        for (int j = 0; j < 4; j++)
            part_sum[c][j] = 0.0f;
    }
#pragma unroll
    for (unsigned i = 0; i < loads; i++)
#pragma unroll
        for (unsigned part = 0; part < parts; part++) {
            uint32_t a[2][4];
            ft_dense_pairs<kind>(raw->data[0][i], part, raw->scale[0], a[0]);
            ft_dense_pairs<kind>(raw->data[1][i], part, raw->scale[1], a[1]);
            uint32_t front[4] = {a[0][0], a[1][0], a[0][1], a[1][1]};
            uint32_t back[4] = {a[0][2], a[1][2], a[0][3], a[1][3]};
#pragma unroll
            for (unsigned c = 0; c < cols; c++) {
                uint4 b = column[c][(i * parts + part) * 4];
                uint32_t b_front[2] = {b.x, b.y}, b_back[2] = {b.z, b.w};
                ft_mma_bf16(part_sum[c], front, b_front);
                ft_mma_bf16(part_sum[c], back, b_back);
            }
        }
#pragma unroll
    for (unsigned c = 0; c < cols; c++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            sum[c][j] +=
                kind == FT_DENSE_FP8 ? part_sum[c][j] * __uint_as_float(raw->scale[j >> 1]) : part_sum[c][j];
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

/* As ft_dense_multiply for FT_DENSE_ANY: sum[half][r] is this lane's share of row r, output g + 8 half. */
static __device__ __forceinline__ void ft_dense_multiply_any(float sum[2][FT_DENSE_ROWS],
                                                             const struct ft_dense_weights *w,
                                                             const struct ft_dense_x *x, uint32_t unit)
{
    uint32_t t = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; half++)
        for (unsigned i = 0; i < FT_DENSE_UNIT / 16; i++) {
            uint32_t column = unit * FT_DENSE_UNIT + i * 16 + t * 4;
            float v[4] = {0, 0, 0, 0};
            const float *direct = (const float *)w->any[half]->data + (uint64_t)w->row[half] * w->in + column;
            if (w->any[half]->format == FT_FORMAT_F32 && column + 4 <= w->in &&
                ((uintptr_t)direct & 15) == 0) {
                float4 four = __ldcs((const float4 *)direct);
                v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
            } else {
                for (unsigned e = 0; e < 4; e++)
                    if (column + e < w->in)
                        v[e] = ft_dense_element(w->any[half], w->row[half], column + e);
            }
            const float *from = (const float *)x->words + (column - x->begin);
#pragma unroll
            for (unsigned r = 0; r < FT_DENSE_ROWS; r++)
                if (r < x->rows) {
                    float4 a = *(const float4 *)(from + (uint64_t)r * x->row_words * 4);
                    sum[half][r] += (v[0] * a.x + v[1] * a.y) + (v[2] * a.z + v[3] * a.w);
                }
        }
}

/* ---- a warp's walk ---- */

/* What a warp adds up while it walks. */
template <int kind, int cols> struct ft_dense_sums {
    float sum[kind == FT_DENSE_ANY ? 2 : cols][kind == FT_DENSE_ANY ? FT_DENSE_ROWS : 4];
};
template <int kind, int cols>
static __device__ __forceinline__ void ft_dense_clear(struct ft_dense_sums<kind, cols> *s)
{
#pragma unroll
    for (int c = 0; c < (kind == FT_DENSE_ANY ? 2 : cols); c++)
#pragma unroll
        for (unsigned i = 0; i < (kind == FT_DENSE_ANY ? FT_DENSE_ROWS : 4); i++)
            s->sum[c][i] = 0.0f;
}

/* The first unit of this warp among columns from `begin` on: units u = warp_k (mod warps_k). */
static __device__ __forceinline__ uint32_t ft_dense_first(uint32_t begin, uint32_t warp_k, uint32_t warps_k)
{
    uint32_t unit = begin / FT_DENSE_UNIT, ahead = (warp_k + warps_k - unit % warps_k) % warps_k;
    return unit + ahead;
}

/* ---- the block's sums ---- */

/* Floats of shared memory that ft_dense_put fills, per warp. */
static __host__ __device__ constexpr uint32_t ft_dense_put_count(int kind, int cols)
{
    return FT_DENSE_TILE * (kind == FT_DENSE_ANY ? FT_DENSE_ROWS : 8 * (uint32_t)cols);
}

/*
 * A warp's sums to `put`: shared memory [blockDim / 32, 16 outputs, piece columns (FT_DENSE_ANY: rows)]. All
 * warps' places are apart; call __syncthreads before ft_dense_total, and again before the next put. `factor`:
 * of the matrices of the tile's halves (ft_dense_factor).
 */
template <int kind, int cols>
static __device__ __forceinline__ void ft_dense_put(const struct ft_dense_sums<kind, cols> *s,
                                                    const float factor[2], float *put)
{
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    put += (threadIdx.x >> 5) * ft_dense_put_count(kind, cols);
#pragma unroll
    for (unsigned half = 0; half < 2; half++) {
        float *row = put + (g + 8 * half) * (ft_dense_put_count(kind, cols) / FT_DENSE_TILE);
        if constexpr (kind == FT_DENSE_ANY) {
#pragma unroll
            for (unsigned r = 0; r < FT_DENSE_ROWS; r++) { /* the four lanes of an output */
                float value = s->sum[half][r];
                value += __shfl_xor_sync(0xffffffffu, value, 1);
                value += __shfl_xor_sync(0xffffffffu, value, 2);
                if (t == r % 4)
                    row[r] = value;
            }
        } else {
#pragma unroll
            for (unsigned c = 0; c < cols; c++)
#pragma unroll
                for (unsigned j = 0; j < 2; j++)
                    row[c * 8 + 2 * t + j] = kind == FT_DENSE_NVFP4 ? s->sum[c][2 * half + j] * factor[half]
                                                                    : s->sum[c][2 * half + j];
        }
    }
}
/* What the sums of a matrix lack: its global scale, and what ft_dense_pairs left out. */
template <int kind> static __device__ __forceinline__ float ft_dense_factor(const struct ft_matrix *w)
{
    return kind == FT_DENSE_NVFP4 ? w->global * 256.0f : 1.0f;
}

/*
 * The sum of output `output` (0 .. 15) for `row`. The tile's warps are first_warp .. first_warp + warps_k -
 * 1, in ascending order of warp_k.
 */
template <int kind, int cols>
static __device__ __forceinline__ float ft_dense_total(const float *put, uint32_t first_warp,
                                                       uint32_t warps_k, uint32_t output, uint32_t row)
{
    constexpr uint32_t count = ft_dense_put_count(kind, cols);
    put += first_warp * count + output * (count / FT_DENSE_TILE) + (kind == FT_DENSE_ANY ? row : 3 * row);
    float sum = 0.0f;
    for (uint32_t i = 0; i < warps_k; i++, put += count)
        sum += kind == FT_DENSE_ANY ? put[0] : (put[2] + put[1]) + put[0]; /* the smallest piece first */
    return sum;
}

#endif
