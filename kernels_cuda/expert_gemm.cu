/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts of a long batch: a grouped product on the matrix units. A group is the pairs of one expert; a tile
 * is up to 64 of its pairs by two panels of 64 weight rows, which for the up kernel are the gate and the up
 * projection of the same hidden units, so that the activation stays in registers.
 *
 *   grid (panels of outputs, tiles of pairs): groups_bound + pairs / 64 tiles are enough for any list; a block
 *   finds its tile by counting, and those that are left over end.
 *
 * Weights are decoded on the way to shared memory, which is exact (scales of fp8 blocks are applied to sums). nvfp4
 * and fp8 become f16, and so do their activations, which share a power of two (gemm.cuh): 2^-12 of each is lost, where
 * one bf16 would lose 2^-9 and flip the choices of the routers behind. bf16 and mxfp4 reach further than f16: they meet
 * two bf16 pieces of an activation, its upper 16 bits and those of the rest, which lose 2^-16. The next step's loads
 * are under way while the matrix units work. Within runs of eight columns both sides have the same order
 * (expert_weights.cuh, expert_stage.cuh).
 *
 * Tiles of up to 32 pairs give every warp a row fragment of its own, and skip the pair fragments that are
 * empty.
 */
#include "kernels_cuda/expert_args.cuh"
#include "kernels_cuda/expert_tile.cuh"

#define THREADS 256u
#define TILE_PAIRS 64u
#define PANEL 64u                 /* weight rows of one panel */
#define STEP 64u                  /* columns in shared memory at a time */
#define ROW_WORDS (STEP / 2 + 4u) /* 4-byte words of a row; padded: 8 rows fall into different banks */
#define X_EIGHTS (TILE_PAIRS * STEP / 8 / THREADS)
#define PANELS 2u

/* Pieces of an activation. */
template <int kind> static __host__ __device__ __forceinline__ constexpr uint32_t pieces()
{
    return ft_stage_is_f16<kind>() ? 1u : 2u;
}

struct tile {
    uint32_t group, first, count; /* pairs [first, first + count) of the list */
};

/* Tile `wanted` of the list; false: there are fewer. All threads; `shared` [11]. */
static __device__ bool find_tile(const struct ft_cuda_list *list, uint32_t wanted, struct tile *tile,
                                 uint32_t *shared)
{
    uint32_t groups = __ldg(list->group_count), each = (groups + THREADS - 1) / THREADS,
             lane = threadIdx.x & 31;
    uint32_t first = min(threadIdx.x * each, groups), end = min(first + each, groups), own = 0;
    for (uint32_t i = first; i < end; i++)
        own += (list->pair_begin[i + 1] - list->pair_begin[i] + TILE_PAIRS - 1) / TILE_PAIRS;
    uint32_t sum = own; /* inclusive scan over the warp, then over the warps */
    for (unsigned step = 1; step < 32; step <<= 1) {
        uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == 31)
        shared[threadIdx.x >> 5] = sum;
    if (threadIdx.x == 0)
        shared[8] = FT_NONE;
    __syncthreads();
    uint32_t before = sum - own;
    for (uint32_t w = 0; w < threadIdx.x >> 5; w++)
        before += shared[w];
    if (wanted >= before && wanted - before < own)
        for (uint32_t i = first; i < end; i++) {
            uint32_t begin = list->pair_begin[i], pairs = list->pair_begin[i + 1] - begin;
            uint32_t tiles = (pairs + TILE_PAIRS - 1) / TILE_PAIRS, at = wanted - before;
            if (at < tiles) {
                shared[8] = i;
                shared[9] = begin + at * TILE_PAIRS;
                shared[10] = min(pairs - at * TILE_PAIRS, TILE_PAIRS);
                break;
            }
            before += tiles;
        }
    __syncthreads();
    tile->group = shared[8];
    tile->first = shared[9];
    tile->count = shared[10];
    return tile->group != FT_NONE;
}

/* ---- activations ---- */

/* Eight columns of f32 from `k`; zeros behind the row. */
static __device__ __forceinline__ void load_eight(float v[8], const float *row, uint32_t k, uint32_t in)
{
    if (k + 8 <= in && (in & 3) == 0) {
        float4 low = __ldg((const float4 *)(row + k)), high = __ldg((const float4 *)(row + k) + 1);
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        v[i] = k + i < in ? row[k + i] : 0.0f;
}

/* The pieces of eight columns. In bf16 an infinite one gives NaN. */
template <int kind>
static __device__ __forceinline__ void split_eight(const float v[8], float power, uint4 piece[pieces<kind>()])
{
    uint32_t upper[4], lower[4];
#pragma unroll
    for (uint32_t n = 0; n < 4; n++) {
        uint32_t first = ft_expert_first<kind>(n), second = first + ft_expert_step<kind>();
        if constexpr (ft_stage_is_f16<kind>()) {
            upper[n] = ft_to_f16_pair(v[first] * power, v[second] * power);
            continue;
        }
        uint32_t a = __float_as_uint(v[first]), b = __float_as_uint(v[second]);
        upper[n] = __byte_perm(a, b, 0x7632);
        lower[n] = __byte_perm(__float_as_uint(v[first] - __uint_as_float(a & 0xffff0000u)),
                               __float_as_uint(v[second] - __uint_as_float(b & 0xffff0000u)), 0x7632);
    }
    piece[0] = make_uint4(upper[0], upper[1], upper[2], upper[3]);
    if constexpr (!ft_stage_is_f16<kind>())
        piece[1] = make_uint4(lower[0], lower[1], lower[2], lower[3]);
}

/* ---- weights ---- */

/* 16-byte runs that one thread loads per step. */
template <int kind> static __device__ __forceinline__ constexpr uint32_t runs_per_thread()
{
    return PANELS * PANEL * STEP / ft_expert_run<kind>() / THREADS;
}

/* Where run i of this thread lies: panel row, and column within the step. */
template <int kind>
static __device__ __forceinline__ void place_of_run(uint32_t i, uint32_t *row, uint32_t *k)
{
    constexpr uint32_t runs = STEP / ft_expert_run<kind>();
    uint32_t at = i * THREADS + threadIdx.x;
    *row = at / runs;
    *k = at % runs * ft_expert_run<kind>();
}

/* The pairs of part `part`; fp8 without its block's scale. scale: the run's, as f16 (nvfp4). */
template <int kind>
static __device__ __forceinline__ uint4 decode_eight(const struct ft_expert_raw *raw, uint32_t part,
                                                     uint32_t scale)
{
    uint32_t pair[4];
    tile_pairs<kind>(pair, raw, part, scale);
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

/* Both panels of a block: where their rows begin. */
struct panels {
    struct ft_expert_matrix m[PANELS];
    uint32_t row0[PANELS];
};

/* By value, field by field: a pointer to one of two would send both to local memory. */
static __device__ __forceinline__ struct ft_expert_matrix panel_matrix(const struct panels *p, bool second)
{
    struct ft_expert_matrix m = p->m[0];
    m.data = second ? p->m[1].data : m.data;
    m.scale = second ? p->m[1].scale : m.scale;
    return m;
}

template <int kind>
static __device__ __forceinline__ struct ft_expert_raw
load_run(const struct ft_expert_layout *layout, const struct panels *p, uint32_t row, uint32_t k)
{
    bool second = row >= PANEL;
    uint32_t at = min((second ? p->row0[1] : p->row0[0]) + row % PANEL, p->m[0].out - 1);
    struct ft_expert_matrix m = panel_matrix(p, second);
    return ft_expert_load<kind>(layout, &m, at, k);
}

/* ---- the product ---- */

/*
 * A warp's part of the tile: pairs from pair0, two fragments of 16; rows from row0 of either panel, two
 * fragments of 8. Wide tiles: warp w has pairs (w & 1) * 32 .., rows (w >> 1) * 16 ..; others: all pairs,
 * rows 8 w .. in one fragment.
 */
struct warp_part {
    uint32_t pair0, row0, pair_fragments, row_fragments;
};
static __device__ __forceinline__ struct warp_part warp_part_of(uint32_t count)
{
    uint32_t warp = threadIdx.x >> 5;
    struct warp_part part = {0, warp * 8, count > 16 ? 2u : 1u, 1};
    if (count > 32) {
        part.pair0 = (warp & 1) * 32;
        part.row0 = (warp >> 1) * 16;
        part.pair_fragments = count <= part.pair0 ? 0u : count - part.pair0 > 16 ? 2u : 1u;
        part.row_fragments = 2;
    }
    return part;
}

/* sum[panel][pairs / 16][rows / 8][4] */
struct sums {
    float v[PANELS][2][2][4];
};

/* One step of one panel: the pieces of x against its rows. */
template <int kind>
static __device__ __forceinline__ void multiply_panel(float v[2][2][4], const struct warp_part *part,
                                                      const uint32_t *x, const uint32_t *w)
{
#pragma unroll
    for (uint32_t k = 0; k < STEP / 2; k += 8) {
        uint32_t b[2][2];
#pragma unroll
        for (uint32_t j = 0; j < 2; j++)
            if (j < part->row_fragments) {
                const uint32_t *from = w + j * 8 * ROW_WORDS + k;
                b[j][0] = from[0], b[j][1] = from[4];
            }
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            if (i >= part->pair_fragments)
                continue;
#pragma unroll
            for (uint32_t piece = 0; piece < pieces<kind>(); piece++) {
                const uint32_t *from = x + (piece * TILE_PAIRS + i * 16) * ROW_WORDS + k;
                uint32_t a[4] = {from[0], from[8 * ROW_WORDS], from[4], from[8 * ROW_WORDS + 4]};
#pragma unroll
                for (uint32_t j = 0; j < 2; j++)
                    if (j < part->row_fragments)
                        tile_mma<kind>(v[i][j], a, b[j]);
            }
        }
    }
}

/* scale [PANELS * PANEL]: of every row in this step, fp8. */
template <int kind>
static __device__ __forceinline__ void multiply_step(struct sums *sum, const struct warp_part *part,
                                                     const uint32_t *x, const uint32_t *w, const float *scale)
{
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    x += (part->pair0 + g) * ROW_WORDS + t;
    w += (part->row0 + g) * ROW_WORDS + t;
    if (!part->pair_fragments)
        return;
#pragma unroll
    for (uint32_t p = 0; p < PANELS; p++) {
        if (kind != FT_EXPERT_FP8) {
            multiply_panel<kind>(sum->v[p], part, x, w + p * PANEL * ROW_WORDS);
            continue;
        }
        float v[2][2][4] = {};
        multiply_panel<kind>(v, part, x, w + p * PANEL * ROW_WORDS);
#pragma unroll
        for (uint32_t e = 0; e < 16; e++) {
            uint32_t i = e >> 3, j = e >> 2 & 1, row = min(part->row0 + j * 8, PANEL - 8) + 2 * t + (e & 1);
            sum->v[p][i][j][e & 3] = fmaf(v[i][j][e & 3], scale[p * PANEL + row], sum->v[p][i][j][e & 3]);
        }
    }
}

/* What a block holds of one step. */
template <int kind> struct step_memory {
    uint4 x[pieces<kind>() * TILE_PAIRS * ROW_WORDS / 4], w[PANELS * PANEL * ROW_WORDS / 4];
    float scale[PANELS * PANEL];
    uint32_t found[12];
};

template <int kind>
static __device__ __forceinline__ void store_step(struct step_memory<kind> *to, float power,
                                                  const float x[X_EIGHTS][8], const struct ft_expert_raw *raw,
                                                  uint32_t rows)
{
    uint32_t *shared_x = (uint32_t *)to->x, *shared_w = (uint32_t *)to->w;
#pragma unroll
    for (uint32_t i = 0; i < X_EIGHTS; i++) {
        uint32_t at = i * THREADS + threadIdx.x, row = at / (STEP / 8);
        uint4 piece[pieces<kind>()];
        if (row >= rows)
            continue;
        split_eight<kind>(x[i], power, piece);
#pragma unroll
        for (uint32_t p = 0; p < pieces<kind>(); p++)
            *(uint4 *)(shared_x + (p * TILE_PAIRS + row) * ROW_WORDS + at % (STEP / 8) * 4) = piece[p];
    }
#pragma unroll
    for (uint32_t i = 0; i < runs_per_thread<kind>(); i++) {
        uint32_t row, k;
        place_of_run<kind>(i, &row, &k);
        uint32_t scale = kind == FT_EXPERT_NVFP4 ? ft_e4m3_to_f16_pair(raw[i].scale) : 0;
#pragma unroll
        for (uint32_t part = 0; part < ft_expert_run<kind>() / 8; part++)
            *(uint4 *)(shared_w + row * ROW_WORDS + k / 2 + part * 4) =
                decode_eight<kind>(&raw[i], part, scale);
        if (kind == FT_EXPERT_FP8 && k == 0)
            to->scale[row] = __uint_as_float(raw[i].scale);
    }
}

/* Sums of a tile over all columns. index NULL: rows of `from` are those of the list. */
template <int kind>
static __device__ __forceinline__ void multiply_tile(struct sums *sum, const struct ft_expert_layout *layout,
                                                     const struct panels *p, const struct tile *tile,
                                                     const float *from, const uint32_t *index, float power,
                                                     struct step_memory<kind> *memory)
{
    constexpr uint32_t runs = runs_per_thread<kind>();
    uint32_t in = p->m[0].in, rows = (tile->count + 15) / 16 * 16;
    struct warp_part part = warp_part_of(tile->count);
    const float *x_row[X_EIGHTS];
    float x[X_EIGHTS][8];
    struct ft_expert_raw raw[runs];
#pragma unroll
    for (uint32_t i = 0; i < X_EIGHTS; i++) { /* rows behind the tile read its last one */
        uint32_t row = min((i * THREADS + threadIdx.x) / (STEP / 8), tile->count - 1) + tile->first;
        x_row[i] = from + (uint64_t)(index ? index[row] : row) * in;
    }
    for (uint32_t k0 = 0; k0 < in + STEP; k0 += STEP) {
        if (k0) { /* what was loaded a step ago */
            __syncthreads();
            store_step<kind>(memory, power, x, raw, rows);
            __syncthreads();
        }
        if (k0 < in) {
#pragma unroll
            for (uint32_t i = 0; i < X_EIGHTS; i++)
                if ((i * THREADS + threadIdx.x) / (STEP / 8) < rows)
                    load_eight(x[i], x_row[i], k0 + (i * THREADS + threadIdx.x) % (STEP / 8) * 8, in);
#pragma unroll
            for (uint32_t i = 0; i < runs; i++) {
                uint32_t row, k;
                place_of_run<kind>(i, &row, &k);
                raw[i] = load_run<kind>(layout, p, row, k0 + k);
            }
        }
        if (k0)
            multiply_step<kind>(sum, &part, (const uint32_t *)memory->x, (const uint32_t *)memory->w,
                                memory->scale);
    }
}

/* Calls use(pair within the tile, row within a panel, sums of panel 0 and 1). */
template <class Use>
static __device__ __forceinline__ void for_each_sum(const struct sums *sum, uint32_t count, Use use)
{
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    struct warp_part part = warp_part_of(count);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
#pragma unroll
        for (uint32_t j = 0; j < 2; j++)
#pragma unroll
            for (uint32_t e = 0; e < 4; e++)
                if (i < part.pair_fragments && j < part.row_fragments)
                    use(part.pair0 + i * 16 + g + (e >> 1) * 8, part.row0 + j * 8 + 2 * t + (e & 1),
                        sum->v[0][i][j][e], sum->v[1][i][j][e]);
}

template <int kind>
static __device__ __forceinline__ void aim_panels(struct panels *p, const struct ft_expert_layout *layout,
                                                  const char *blob, bool down)
{
#pragma unroll
    for (uint32_t i = 0; i < PANELS; i++) {
        int which = down ? 2 : (int)i;
        p->m[i] = ft_expert_matrix_of<kind>(layout, blob, which);
        p->row0[i] = down ? (blockIdx.x * PANELS + i) * PANEL : blockIdx.x * PANEL;
    }
}

template <int kind>
static __global__ void __launch_bounds__(THREADS, 2) gemm_up_kernel(struct ft_expert_args a)
{
    FT_SHARED(struct step_memory<kind>, memory, 1);
    struct tile tile;
    struct panels p;
    struct sums sum = {};
    if (a.stamp && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *a.stamp = ft_global_timer();
    if (!find_tile(&a.list, blockIdx.y, &tile, memory->found))
        return;
    const char *blob = a.list.blob[tile.group];
    aim_panels<kind>(&p, &a.layout, blob, false);
    uint32_t x_top = ft_stage_is_f16<kind>() ? a.scale->x_top : 0, size = 0;
    float unit_x = ft_stage_is_f16<kind>() ? ft_gemm_unit(x_top) : 1.0f;
    multiply_tile<kind>(&sum, &a.layout, &p, &tile, a.x, a.list.pair_row, ft_gemm_power(x_top), memory);
    const float gate_factor = p.m[0].factor * tile_factor<kind>() * unit_x,
                up_factor = p.m[1].factor * tile_factor<kind>() * unit_x;
    const float *gate_bias = ft_expert_bias(&a.layout, blob, 0),
                *up_bias = ft_expert_bias(&a.layout, blob, 1);
    for_each_sum(&sum, tile.count, [&](uint32_t pair, uint32_t row, float gate, float up) {
        uint32_t unit = p.row0[0] + row;
        if (pair >= tile.count || unit >= a.layout.width)
            return;
        gate = fmaf(gate, gate_factor, gate_bias ? gate_bias[unit] : 0.0f);
        up = fmaf(up, up_factor, up_bias ? up_bias[unit] : 0.0f);
        float value = ft_expert_activate(&a.layout, gate, up);
        a.h[(uint64_t)(tile.first + pair) * a.layout.width + unit] = value;
        size = max(size, ft_gemm_size(value));
    });
    if (ft_stage_is_f16<kind>())
        ft_gemm_raise(&a.scale->w_top[0], size);
}

template <int kind>
static __global__ void __launch_bounds__(THREADS, 2) gemm_down_kernel(struct ft_expert_args a)
{
    FT_SHARED(struct step_memory<kind>, memory, 1);
    struct tile tile;
    struct panels p;
    struct sums sum = {};
    if (!find_tile(&a.list, blockIdx.y, &tile, memory->found))
        return;
    const char *blob = a.list.blob[tile.group];
    aim_panels<kind>(&p, &a.layout, blob, true);
    uint32_t h_top = ft_stage_is_f16<kind>() ? a.scale->w_top[0] : 0;
    float unit_h = ft_stage_is_f16<kind>() ? ft_gemm_unit(h_top) : 1.0f;
    multiply_tile<kind>(&sum, &a.layout, &p, &tile, a.h, NULL, ft_gemm_power(h_top), memory);
    const float *bias = ft_expert_bias(&a.layout, blob, 2);
    for_each_sum(&sum, tile.count, [&](uint32_t pair, uint32_t row, float first, float second) {
        if (pair >= tile.count)
            return;
        float *y = a.y + (uint64_t)a.list.pair_out[tile.first + pair] * a.layout.hidden;
        float value[PANELS] = {first, second};
#pragma unroll
        for (uint32_t i = 0; i < PANELS; i++) {
            uint32_t out = p.row0[i] + row;
            if (out < a.layout.hidden)
                y[out] =
                    fmaf(value[i], p.m[i].factor * tile_factor<kind>() * unit_h, bias ? bias[out] : 0.0f);
        }
    });
}

template <int kind>
static int launch_gemm(const struct ft_expert_args *a, uint32_t rows, uint32_t groups_bound,
                       uint32_t pairs_bound, void *stream)
{
    uint32_t tiles = groups_bound + pairs_bound / TILE_PAIRS;
    dim3 up((a->layout.width + PANEL - 1) / PANEL, tiles);
    dim3 down((a->layout.hidden + PANELS * PANEL - 1) / (PANELS * PANEL), tiles);
    int error = 0;
    if (ft_stage_is_f16<kind>())
        error = ft_gemm_measure(a->x, a->layout.hidden, rows, a->layout.hidden, a->scale, NULL, stream);
    if (error)
        return error;
    error = FT_LAUNCH(gemm_up_kernel<kind>, up, dim3(THREADS), 0, stream, *a);
    return error ? error : FT_LAUNCH(gemm_down_kernel<kind>, down, dim3(THREADS), 0, stream, *a);
}

int ft_expert_gemm(const struct ft_expert_args *a, uint32_t rows, uint32_t groups_bound, uint32_t pairs_bound,
                   void *stream)
{
    switch (ft_expert_kind_of(&a->layout)) {
    case FT_EXPERT_BF16:
        return launch_gemm<FT_EXPERT_BF16>(a, rows, groups_bound, pairs_bound, stream);
    case FT_EXPERT_FP8:
        return launch_gemm<FT_EXPERT_FP8>(a, rows, groups_bound, pairs_bound, stream);
    case FT_EXPERT_NVFP4:
        return launch_gemm<FT_EXPERT_NVFP4>(a, rows, groups_bound, pairs_bound, stream);
    case FT_EXPERT_MXFP4:
        return launch_gemm<FT_EXPERT_MXFP4>(a, rows, groups_bound, pairs_bound, stream);
    default:      /* shapes that 16-byte loads do not fit: element by element, by ft_cuda_experts */
        return 1; /* cudaErrorInvalidValue */
    }
}
