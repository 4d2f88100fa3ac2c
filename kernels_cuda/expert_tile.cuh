/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A warp's tile of an expert's decode step: 16 weight rows times the pieces of a few activation rows, on the
 * matrix units. A = weights, exact in the unit's format; B = pieces (expert_stage.cuh), three columns a row,
 * so up to 2 rows fit the unit's 8 columns and 5 rows 16.
 *
 * A unit is what a quad's 16-byte loads side by side hold. Its sum is added to an f32 register: the matrix
 * unit cuts bits off long sums, additions round. The order depends on the matrix alone: not on the rows
 * beside a row.
 *
 *   lane = 4 g + t: 16 bytes of weight rows g and g + 8 from column (unit * 4 + t) * run; piece column g of B
 */
#ifndef FT_KERNELS_CUDA_EXPERT_TILE_CUH
#define FT_KERNELS_CUDA_EXPERT_TILE_CUH

#include "kernels_cuda/expert_args.cuh"
#include "kernels_cuda/expert_stage.cuh"

#define TILE 16u /* weight rows of a warp's tile */

/* e2m1 bits moved into f16 are too small by 2^14; bf16 pairs carry ft_expert_matrix_of's factor. */
template <int kind> static __device__ __forceinline__ constexpr float tile_factor()
{
    return kind == FT_EXPERT_NVFP4 ? 0x1p14f / FT_EXPERT_FP4_FACTOR : 1.0f;
}

/* ---- a warp's tile ---- */

/* Where the two halves of a warp's 16 weight rows lie, row g and row g + 8 of lane 4 g + t: its run of a
 * unit. The run of unit i from there stands 4 i runs behind. */
struct tile_rows {
    const uint4 *data[2];
    const char *scale[2]; /* fp4: of the run; fp8: of the row's blocks */
    uint32_t left;        /* units of this lane from there on that lie inside the row and the warp's share */
    float unit, blocks;   /* fp8: number of the unit, blocks of scales per unit */
};

/* A warp's share is units [begin, end). */
template <int kind>
static __device__ __forceinline__ void
aim(struct tile_rows *w, uint32_t half, const struct ft_expert_layout *layout,
    const struct ft_expert_matrix *m, uint32_t row, uint32_t begin, uint32_t end)
{
    constexpr uint32_t run = ft_expert_run<kind>();
    uint32_t t = threadIdx.x & 3, runs = m->in / run, last = min(runs > t ? (runs - t + 3) / 4 : 0, end);
    uint64_t first = (uint64_t)row * runs + t + begin * 4;
    w->data[half] = (const uint4 *)m->data + first;
    w->scale[half] = m->scale;
    if (kind == FT_EXPERT_NVFP4 || kind == FT_EXPERT_MXFP4)
        w->scale[half] += first * (kind == FT_EXPERT_NVFP4 ? 2 : 1);
    if (kind == FT_EXPERT_FP8) {
        w->scale[half] +=
            (uint64_t)(row / layout->block_out) * ((m->in + layout->block_in - 1) / layout->block_in) * 4;
        w->unit = (float)begin + 0.125f; /* ft_expert_row_fits: no block begins or ends inside a unit */
        w->blocks = (float)(4 * run) / (float)layout->block_in;
    }
    w->left = last > begin ? last - begin : 0;
}
template <int kind> static __device__ __forceinline__ void advance(struct tile_rows *w, uint32_t units)
{
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        w->data[half] += units * 4;
        if (kind == FT_EXPERT_NVFP4 || kind == FT_EXPERT_MXFP4)
            w->scale[half] += units * (kind == FT_EXPERT_NVFP4 ? 8 : 4);
    }
    w->unit += (float)units;
    w->left = w->left > units ? w->left - units : 0;
}

/* Asks for unit i of both rows; what lies behind the share is zero and unread. */
template <int kind>
static __device__ __forceinline__ void ask_unit(struct ft_expert_raw raw[2], const struct tile_rows *w,
                                                uint32_t i)
{
    bool exists = i < w->left;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        raw[half].data = make_uint4(0, 0, 0, 0);
        raw[half].scale = 0;
        if (exists) {
            raw[half].data = ft_load_stream16(w->data[half] + i * 4);
            if (kind == FT_EXPERT_NVFP4)
                raw[half].scale = __ldg((const uint16_t *)w->scale[half] + i * 4);
            if (kind == FT_EXPERT_MXFP4)
                raw[half].scale = __ldg((const uint8_t *)w->scale[half] + i * 4);
            if (kind == FT_EXPERT_FP8)
                raw[half].scale =
                    __ldg((const uint32_t *)w->scale[half] + (uint32_t)((w->unit + (float)i) * w->blocks));
        }
    }
}
/* Asks for the first `flight` units. */
template <int kind, int flight>
static __device__ __forceinline__ void ask(struct ft_expert_raw raw[flight][2], const struct tile_rows *w)
{
#pragma unroll
    for (uint32_t i = 0; i < flight; i++)
        ask_unit<kind>(raw[i], w, i);
}

/* The eight nibbles of a word as f16 pairs (n, n + 4), times the pair `scale`. A byte holds sign and
 * magnitude where the upper byte of an f16 has them. */
static __device__ __forceinline__ void nibbles_to_f16(uint32_t pair[4], uint32_t word, uint32_t scale)
{
    uint32_t odd = (word & 0x80808080u) | (word >> 3 & 0x0e0e0e0eu);
    uint32_t even = (word << 4 & 0x80808080u) | (word << 1 & 0x0e0e0e0eu);
    pair[0] = ft_mul_f16_pair(__byte_perm(even, 0, 0x2404), scale);
    pair[1] = ft_mul_f16_pair(__byte_perm(odd, 0, 0x2404), scale);
    pair[2] = ft_mul_f16_pair(even & 0xff00ff00u, scale);
    pair[3] = ft_mul_f16_pair(odd & 0xff00ff00u, scale);
}

/* Pairs 4 part .. 4 part + 3 of a run in the tile's format; scale: the run's, as f16 (nvfp4). */
template <int kind>
static __device__ __forceinline__ void tile_pairs(uint32_t pair[4], const struct ft_expert_raw *raw,
                                                  uint32_t part, uint32_t scale)
{
    if constexpr (kind == FT_EXPERT_NVFP4) {
        nibbles_to_f16(pair, ft_expert_word(raw->data, part),
                       __byte_perm(scale, 0, part >> 1 ? 0x3232 : 0x1010));
    } else if constexpr (kind == FT_EXPERT_FP8) {
#pragma unroll
        for (uint32_t n = 0; n < 4; n++) {
            uint32_t word = ft_expert_word(raw->data, 2 * part + n / 2);
            pair[n] = ft_e4m3_to_f16_pair(n % 2 ? word >> 16 : word);
        }
    } else {
        ft_expert_pairs<kind>(raw, part, pair);
    }
}

template <int kind>
static __device__ __forceinline__ void tile_mma(float sum[4], const uint32_t a[4], const uint32_t b[2])
{
    if constexpr (ft_stage_is_f16<kind>())
        ft_mma_f16(sum, a, b);
    else
        ft_mma_bf16(sum, a, b);
}

/* sum[c] = a unit of both rows times the pieces in `column`: the front halves of all parts and the back
 * halves are two chains. */
template <int kind, int tiles>
static __device__ __forceinline__ void multiply_unit(float sum[tiles][4], const struct ft_expert_raw raw[2],
                                                     const uint32_t *const column[tiles], uint32_t at)
{
    constexpr uint32_t parts = ft_expert_run<kind>() / 8;
    float back_sum[tiles][4];
    uint32_t scale[2] = {0, 0};
#pragma unroll
    for (int c = 0; c < tiles; c++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            sum[c][j] = back_sum[c][j] = 0.0f;
    if (kind == FT_EXPERT_NVFP4) {
        scale[0] = ft_e4m3_to_f16_pair(raw[0].scale);
        scale[1] = ft_e4m3_to_f16_pair(raw[1].scale);
    }
#pragma unroll
    for (uint32_t part = 0; part < parts; part++) {
        uint32_t a[2][4];
        tile_pairs<kind>(a[0], &raw[0], part, scale[0]);
        tile_pairs<kind>(a[1], &raw[1], part, scale[1]);
        uint32_t front[4] = {a[0][0], a[1][0], a[0][1], a[1][1]};
        uint32_t back[4] = {a[0][2], a[1][2], a[0][3], a[1][3]};
#pragma unroll
        for (int c = 0; c < tiles; c++) {
            uint4 b = *(const uint4 *)(column[c] + at + part * 48);
            uint32_t b_front[2] = {b.x, b.y}, b_back[2] = {b.z, b.w};
            tile_mma<kind>(sum[c], front, b_front);
            tile_mma<kind>(back_sum[c], back, b_back);
        }
    }
#pragma unroll
    for (int c = 0; c < tiles; c++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            sum[c][j] += back_sum[c][j];
}

/* Where a lane finds its columns of B: column g of every tile (from lane t's words on), and the powers of two
 * of the rows that columns 2 t and 2 t + 1 belong to. */
template <int tiles> struct tile_columns {
    const uint32_t *column[tiles];
    const float *power[tiles][2];
};

/* row(r): the first unit of staged row r of the `rows`; columns that do not exist read the last row's: their
 * sums are not looked at. */
template <int kind, int tiles, class Row>
static __device__ __forceinline__ void aim_columns(struct tile_columns<tiles> *b, uint32_t rows, Row row)
{
    constexpr uint32_t unit_words = ft_stage_unit_words<kind>();
    uint32_t g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
#pragma unroll
    for (uint32_t c = 0; c < tiles; c++) {
        uint32_t at = min(c * 8 + g, rows * 3 - 1);
        b->column[c] = row(at / 3) + at % 3 * 16 + t * 4;
#pragma unroll
        for (uint32_t j = 0; j < 2; j++)
            b->power[c][j] = (const float *)(row(min(c * 8 + 2 * t + j, rows * 3 - 1) / 3) + unit_words - 4);
    }
}

/* sum[c] += a unit's sums, times what its columns and rows (fp8) carry. */
template <int kind, int tiles>
static __device__ __forceinline__ void add_unit(float sum[tiles][4], const float unit[tiles][4],
                                                const struct ft_expert_raw raw[2],
                                                const struct tile_columns<tiles> *b, uint32_t number)
{
    float scale[2] = {1.0f, 1.0f};
    if (kind == FT_EXPERT_FP8) { /* one block per unit: lane t 0 always lies inside the row */
        int first = (int)(threadIdx.x & 28);
        scale[0] = __uint_as_float(__shfl_sync(0xffffffffu, raw[0].scale, first));
        scale[1] = __uint_as_float(__shfl_sync(0xffffffffu, raw[1].scale, first));
    }
#pragma unroll
    for (int c = 0; c < tiles; c++) {
        float power[2] = {1.0f, 1.0f};
        if (ft_stage_is_f16<kind>()) {
            power[0] = b->power[c][0][number * ft_stage_unit_words<kind>()];
            power[1] = b->power[c][1][number * ft_stage_unit_words<kind>()];
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float value = kind == FT_EXPERT_FP8 ? unit[c][j] * scale[j >> 1] : unit[c][j];
            sum[c][j] = ft_stage_is_f16<kind>() ? fmaf(value, power[j & 1], sum[c][j]) : sum[c][j] + value;
        }
    }
}

/* sum[c] += the tile's rows times the pieces, over `units` units; fragments of ft_mma_bf16. `raw` holds the
 * first `flight` units already. Moves `w` and `b` on. */
template <int kind, int tiles, int flight>
static __device__ __forceinline__ void multiply(float sum[tiles][4], struct ft_expert_raw raw[flight][2],
                                                struct tile_rows *w, uint32_t units,
                                                struct tile_columns<tiles> *b)
{
    constexpr uint32_t unit_words = ft_stage_unit_words<kind>();
    for (uint32_t first = 0; first < units; first += flight) {
        advance<kind>(w, flight);
#pragma unroll
        for (uint32_t i = 0; i < flight; i++) {
            if (first + i >= units)
                break;
            float unit[tiles][4];
            multiply_unit<kind, tiles>(unit, raw[i], b->column, i * unit_words);
            add_unit<kind, tiles>(sum, unit, raw[i], b, i);
            if (first + i + flight < units)
                ask_unit<kind>(raw[i], w, i);
        }
#pragma unroll
        for (int c = 0; c < tiles; c++) {
            b->column[c] += flight * unit_words;
            b->power[c][0] += flight * unit_words;
            b->power[c][1] += flight * unit_words;
        }
    }
}

/* The same without a loop, for up to `most` units, which is `flight` or one more: five are what a warp of the
 * up kernel has of a row of 2560 fp4 columns. */
template <int kind, int tiles, int flight, int most>
static __device__ __forceinline__ void
multiply_short(float sum[tiles][4], struct ft_expert_raw raw[flight][2], const struct tile_rows *w,
               uint32_t units, const struct tile_columns<tiles> *b)
{
#pragma unroll
    for (uint32_t i = 0; i < most; i++) {
        if (i >= units)
            break;
        float unit[tiles][4];
        multiply_unit<kind, tiles>(unit, raw[i % flight], b->column, i * ft_stage_unit_words<kind>());
        add_unit<kind, tiles>(sum, unit, raw[i % flight], b, i);
        if (i == 0 && most > flight)
            ask_unit<kind>(raw[0], w, flight);
    }
}

/* A warp's sums to `put` [16 weight rows][8 tiles]. */
template <int tiles> static __device__ __forceinline__ void put_sums(float *put, const float sum[tiles][4])
{
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int c = 0; c < tiles; c++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            put[(g + (j >> 1) * 8) * (8 * tiles) + c * 8 + 2 * t + (j & 1)] = sum[c][j];
}
/* The three pieces of row r of weight row i, the smallest first. */
template <int kind, int tiles>
static __device__ __forceinline__ float take_sum(const float *put, uint32_t i, uint32_t r)
{
    const float *from = put + i * (8 * tiles) + 3 * r;
    if (ft_stage_is_f16<kind>())
        return fmaf(fmaf(from[2], 0x1p-11f, from[1]), 0x1p-11f, from[0]);
    return from[2] + from[1] + from[0];
}

#endif
