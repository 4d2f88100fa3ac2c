/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Norm and rotation of queries and keys, keys and values into their pages, the indexer's queries and keys.
 *
 * One warp per (row, unit); units of a row: query heads, key heads, value heads and, in sparse layers,
 * indexer queries and the indexer key. A lane reads the partners of its elements too, so that nothing crosses
 * lanes but the sum of squares and everything is read at once.
 *
 * Raw indexer keys: a block of `ratio` of them becomes one key when its last row comes. Several rows of one
 * block may be in one launch, so the closing warp takes rows of this step from `project` and only the rows
 * before the step from the state. Nobody else writes a slot of the state that it may still read: such a slot
 * is written by the closing warp itself, afterwards.
 */
#include "kernels_cuda/attention.cuh"

namespace
{

constexpr unsigned WARPS = 4, SLOTS = 8, DIM_MAX = 32 * SLOTS; /* elements of a head per lane */

struct prepare_args {
    float *project, *query;
    uint64_t stride;
    const float *rotary;                                        /* [rows, rotary_dim] */
    const float *q_norm, *k_norm, *index_q_norm, *index_k_norm; /* NULL: no norm */
    bool plus_one, sparse;
    float eps, rotary_scale;
    uint32_t rows, heads, kv_heads, dim, half, page_tokens, pages_max;
    uint32_t index_heads, index_dim, ratio;
    ft_qkv_parts parts;
    uint64_t k_offset, v_offset, index_offset, raw_offset;
    const uint32_t *position, *row_sequence, *first_row, *row_count;
    float *const *page, *const *state;
    const double *frequencies;
    uint64_t *stamp;
};

/* The element that i is rotated with; i itself beyond the rotated ones. */
__device__ __forceinline__ uint32_t partner_of(uint32_t i, uint32_t half)
{
    return i < half ? i + half : i < 2 * half ? i - half : i;
}

/* Norm weights of a lane's elements and of their partners: 1 without a norm. */
struct head_weights {
    float own[SLOTS], other[SLOTS];
};

__device__ __forceinline__ void load_weights(const prepare_args &args, const float *norm, uint32_t dim,
                                             unsigned lane, head_weights &w)
{
    float plus = args.plus_one ? 1.0f : 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < SLOTS; j++) {
        uint32_t i = lane + 32 * j;
        w.own[j] = norm && i < dim ? plus + norm[i] : 1.0f;
        w.other[j] = norm && i < dim ? plus + norm[partner_of(i, args.half)] : 1.0f;
    }
}

/* y = rotated norm of x over one warp; x == y allowed. rotary: cos and sin of the row, NULL: no rotation. */
__device__ __forceinline__ void prepare_head(const float *x, float *y, const head_weights &w, bool normed,
                                             const prepare_args &args, uint32_t dim, const float *rotary,
                                             unsigned lane)
{
    float own[SLOTS], other[SLOTS], cs[SLOTS], sn[SLOTS], sum = 0;
    uint32_t half = rotary ? args.half : 0;
#pragma unroll
    for (uint32_t j = 0; j < SLOTS; j++) {
        uint32_t i = lane + 32 * j, angle = i < half ? i : i - half;
        bool turned = i < 2 * half && i < dim;
        own[j] = i < dim ? x[i] : 0.0f;
        other[j] = turned ? x[partner_of(i, half)] : 0.0f;
        cs[j] = turned ? rotary[angle] : 1.0f;
        sn[j] = turned ? rotary[half + angle] : 0.0f;
        sum = fmaf(own[j], own[j], sum);
    }
    sum = ft_warp_sum(sum); /* every lane has read */
    float scale = normed ? 1.0f / sqrtf(sum / (float)dim + args.eps) : 1.0f;
#pragma unroll
    for (uint32_t j = 0; j < SLOTS; j++) {
        uint32_t i = lane + 32 * j;
        float a = own[j] * (scale * w.own[j]), b = other[j] * (scale * w.other[j]);
        if (i < dim)
            y[i] = i < half ? a * cs[j] - b * sn[j] : a * cs[j] + b * sn[j];
    }
}

/* cos and sin of an angle of many turns: reduced in double, then in f32. */
__device__ __forceinline__ void turn(double angle, float scale, float *cs, float *sn)
{
    const double turn_length = 6.283185307179586476925;
    float rest = (float)(angle - rint(angle / turn_length) * turn_length);
    *cs = cosf(rest) * scale;
    *sn = sinf(rest) * scale;
}

/* The raw key of row r (of sequence s), and the block that it may close. */
__device__ void prepare_index_key(const prepare_args &args, uint32_t r, uint32_t s, unsigned lane)
{
    uint32_t first = args.first_row[s], last = first + args.row_count[s] - 1, ratio = args.ratio,
             dim = args.index_dim;
    uint32_t position = args.position[r], begin = args.position[first], end = args.position[last];
    uint32_t slot = position % ratio,
             carried = begin % ratio; /* slots of the state that the first block may need */
    const float *project =
        args.project + args.parts.index + (uint64_t)args.index_heads * dim; /* row 0's raw key */
    float *raw = args.state[s] + args.raw_offset;
    bool closes = slot == ratio - 1, in_first = position / ratio == begin / ratio;
    if (closes) {
        uint32_t block = position / ratio, page_blocks = args.page_tokens / ratio;
        float *key = args.page[(uint64_t)s * args.pages_max + block / page_blocks] + args.index_offset +
                     (uint64_t)(block % page_blocks) * dim;
        uint32_t old = in_first ? carried : 0;
        for (uint32_t i = lane; i < dim; i += 32) {
            float sum = 0;
            for (uint32_t t = 0; t < ratio; t++)
                sum +=
                    t < old ? raw[(uint64_t)t * dim + i] : project[(r - (ratio - 1 - t)) * args.stride + i];
            key[i] = sum / (float)ratio;
        }
        __syncwarp(); /* below, lanes read what others wrote */
        float sum = 0, plus = args.plus_one ? 1.0f : 0.0f;
        for (uint32_t i = lane; i < dim; i += 32)
            sum = fmaf(key[i], key[i], sum);
        float scale = args.index_k_norm ? 1.0f / sqrtf(ft_warp_sum(sum) / (float)dim + args.eps) : 1.0f;
        uint32_t half = args.half;
        for (uint32_t i = lane; i < half; i += 32) {
            float a = key[i], b = key[i + half], cs, sn;
            if (args.index_k_norm) {
                a *= scale * (plus + args.index_k_norm[i]);
                b *= scale * (plus + args.index_k_norm[i + half]);
            }
            turn((double)block * ratio * args.frequencies[i], args.rotary_scale, &cs, &sn);
            key[i] = a * cs - b * sn;
            key[i + half] = b * cs + a * sn;
        }
        for (uint32_t i = 2 * half + lane; i < dim; i += 32)
            if (args.index_k_norm)
                key[i] *= scale * (plus + args.index_k_norm[i]);
    }
    /* The state ends up with the newest raw key of every slot. */
    bool newest = end - position < ratio;
    if (newest && (in_first || slot >= carried))
        for (uint32_t i = lane; i < dim; i += 32)
            raw[(uint64_t)slot * dim + i] = project[r * args.stride + i];
    if (closes && in_first)
        for (uint32_t t = 0; t < carried; t++) { /* read above by this very lane: now it may be overwritten */
            uint32_t newer = end - (end + ratio - t) % ratio;
            if (newer > position && newer <= end)
                for (uint32_t i = lane; i < dim; i += 32)
                    raw[(uint64_t)t * dim + i] = project[(first + newer - begin) * args.stride + i];
        }
}

/* Grid (groups of WARPS units, rows). */
__global__ void __launch_bounds__(WARPS * 32) prepare(prepare_args args)
{
    ft_begin_next();
    unsigned lane = threadIdx.x & 31;
    uint32_t unit = blockIdx.x * WARPS + (threadIdx.x >> 5), r = blockIdx.y, dim = args.dim;
    uint32_t s = args.row_sequence[r], position = args.position[r];
    float *project = args.project + r * args.stride, *from = project, *to = NULL;
    const float *norm = args.q_norm, *rotary = args.rotary + (uint64_t)r * 2 * args.half;
    uint32_t others = args.heads + 2 * args.kv_heads; /* units in front of the indexer's */
    bool raw_key = unit == others + args.index_heads;
    if (unit < args.heads) {
        from += (uint64_t)unit * args.parts.query_stride;
        to = args.query + ((uint64_t)r * args.heads + unit) * dim;
    } else if (unit < others) {
        bool value = unit >= args.heads + args.kv_heads;
        uint32_t head = unit - args.heads - (value ? args.kv_heads : 0);
        from += (value ? args.parts.v : args.parts.k) + (uint64_t)head * dim;
        to = args.page[(uint64_t)s * args.pages_max + position / args.page_tokens] +
             (value ? args.v_offset : args.k_offset) +
             ((uint64_t)head * args.page_tokens + position % args.page_tokens) * dim;
        norm = value ? NULL : args.k_norm;
        rotary = value ? NULL : rotary;
    } else if (!raw_key) {
        dim = args.index_dim;
        from += args.parts.index + (uint64_t)(unit - others) * dim;
        to = from;
        norm = args.index_q_norm;
    }
    head_weights w;
    load_weights(args, norm, raw_key ? 0 : dim, lane, w);
    ft_wait_previous();
    if (args.stamp && blockIdx.x + blockIdx.y + threadIdx.x == 0)
        *args.stamp = ft_global_timer();
    if (unit >= others && (!args.sparse || unit > others + args.index_heads))
        return;
    if (raw_key)
        prepare_index_key(args, r, s, lane);
    else
        prepare_head(from, to, w, norm != NULL, args, dim, rotary, lane);
}

} // namespace

int ft_cuda_attention_prepare(const struct ft_cuda *c, uint32_t layer, void *stream)
{
    const struct ft_model *m = c->model;
    const struct ft_attention_weights *w = &c->weights->layers[layer].attention;
    prepare_args args = {};
    args.project = c->base + c->space.project;
    args.stride = c->space.project_width;
    args.query = c->base + c->space.query;
    args.rotary = c->base + c->space.rotary;
    args.q_norm = w->q_norm;
    args.k_norm = w->k_norm;
    args.index_q_norm = w->index_q_norm;
    args.index_k_norm = w->index_k_norm;
    args.plus_one = m->norm_plus_one;
    args.sparse = m->layers[layer].attention == FT_ATTENTION_SPARSE;
    args.eps = m->rms_eps;
    args.rotary_scale = c->rotary_scale;
    args.rows = c->step.rows;
    args.heads = m->head_count;
    args.kv_heads = m->kv_head_count;
    args.dim = m->head_dim;
    args.half = m->rotary_dim / 2;
    args.page_tokens = c->kv.page_tokens;
    args.pages_max = c->step.pages_max;
    args.index_heads = m->indexer_head_count;
    args.index_dim = m->indexer_dim;
    args.ratio = m->indexer_ratio;
    args.parts = ft_qkv_parts_of(m);
    args.k_offset = c->kv.k_offset[layer];
    args.v_offset = c->kv.v_offset[layer];
    args.index_offset = c->kv.indexer_offset[layer];
    args.raw_offset = c->state.indexer_offset[layer];
    args.position = c->step.position;
    args.row_sequence = c->step.row_sequence;
    args.first_row = c->step.first_row;
    args.row_count = c->step.row_count;
    args.page = c->step.page;
    args.state = c->step.state;
    args.frequencies = c->frequencies;
    args.stamp = ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_ATTEND);
    uint32_t units = args.heads + 2 * args.kv_heads + (args.sparse ? args.index_heads + 1 : 0);
    if (args.dim > DIM_MAX || args.index_dim > DIM_MAX)
        return FT_CUDA_NOT_SUPPORTED;
    return FT_LAUNCH_NEXT(prepare, dim3((units + WARPS - 1) / WARPS, args.rows), dim3(WARPS * 32), 0, stream,
                          args);
}
