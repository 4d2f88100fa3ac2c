/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Norm and rotation of queries and keys, keys and values into their pages, the indexer's queries and keys.
 *
 * One warp per (row, unit); units of a row: query heads, key heads, value heads and, in sparse layers,
 * indexer queries and the indexer key. A lane holds elements i and i + rotary_dim / 2 of its pairs, so
 * nothing crosses lanes but the sum of squares.
 *
 * Raw indexer keys: a block of `ratio` of them becomes one key when its last row comes. Several rows of one
 * block may be in one launch, so the closing warp takes rows of this step from `project` and only the rows
 * before the step from the state. Nobody else writes a slot of the state that it may still read: such a slot
 * is written by the closing warp itself, afterwards.
 */
#include "kernels_cuda/attention.cuh"

namespace
{

constexpr unsigned WARPS = 4;

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

/* y = rotated norm of x over one warp; x == y allowed. cs == NULL: no rotation. */
__device__ __forceinline__ void prepare_head(const float *x, float *y, const float *norm,
                                             const prepare_args &args, uint32_t dim, const float *cs,
                                             const float *sn, unsigned lane)
{
    float scale = 1.0f, plus = args.plus_one ? 1.0f : 0.0f;
    if (norm) {
        float sum = 0;
        for (uint32_t i = lane; i < dim; i += 32)
            sum = fmaf(x[i], x[i], sum);
        scale = 1.0f / sqrtf(ft_warp_sum(sum) / (float)dim + args.eps);
    }
    uint32_t half = cs ? args.half : 0;
    for (uint32_t i = lane; i < half; i += 32) {
        float a = x[i], b = x[i + half];
        if (norm) {
            a *= scale * (plus + norm[i]);
            b *= scale * (plus + norm[i + half]);
        }
        y[i] = a * cs[i] - b * sn[i];
        y[i + half] = b * cs[i] + a * sn[i];
    }
    for (uint32_t i = 2 * half + lane; i < dim; i += 32)
        y[i] = norm ? x[i] * (scale * (plus + norm[i])) : x[i];
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
    if (args.stamp && blockIdx.x + blockIdx.y + threadIdx.x == 0)
        *args.stamp = ft_global_timer();
    unsigned lane = threadIdx.x & 31;
    uint32_t unit = blockIdx.x * WARPS + (threadIdx.x >> 5), r = blockIdx.y, d = args.dim;
    uint32_t s = args.row_sequence[r], position = args.position[r];
    float *project = args.project + r * args.stride;
    const float *cs = args.rotary + (uint64_t)r * 2 * args.half, *sn = cs + args.half;
    if (unit < args.heads) {
        prepare_head(project + (uint64_t)unit * args.parts.query_stride,
                     args.query + ((uint64_t)r * args.heads + unit) * d, args.q_norm, args, d, cs, sn, lane);
        return;
    }
    unit -= args.heads;
    if (unit < 2 * args.kv_heads) {
        bool value = unit >= args.kv_heads;
        uint32_t head = value ? unit - args.kv_heads : unit;
        float *to = args.page[(uint64_t)s * args.pages_max + position / args.page_tokens] +
                    (value ? args.v_offset : args.k_offset) +
                    ((uint64_t)head * args.page_tokens + position % args.page_tokens) * d;
        prepare_head(project + (value ? args.parts.v : args.parts.k) + (uint64_t)head * d, to,
                     value ? NULL : args.k_norm, args, d, value ? NULL : cs, sn, lane);
        return;
    }
    unit -= 2 * args.kv_heads;
    if (!args.sparse || unit > args.index_heads)
        return;
    if (unit == args.index_heads) {
        prepare_index_key(args, r, s, lane);
        return;
    }
    float *index = project + args.parts.index + (uint64_t)unit * args.index_dim;
    prepare_head(index, index, args.index_q_norm, args, args.index_dim, cs, sn, lane);
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
    return FT_LAUNCH(prepare, dim3((units + WARPS - 1) / WARPS, args.rows), dim3(WARPS * 32), 0, stream,
                     args);
}
