/* SPDX-License-Identifier: Apache-2.0 */
/* The attention ops: projections, delta rule, paged attention with indexer, output projection. */
#include <string.h>

#include "jobs/execute.h"

/* Where the parts of the concatenated projection of a full or sparse layer begin. */
struct qkv_parts {
    uint32_t k, v, index, width;
    uint32_t query_stride; /* between heads: d, or 2 d with a gate per head */
};

static struct qkv_parts parts_of(const struct ft_model *m)
{
    uint32_t stride = m->head_dim * (m->attention_gate ? 2 : 1);
    struct qkv_parts parts = {.query_stride = stride, .k = m->head_count * stride};
    parts.v = parts.k + m->kv_head_count * m->head_dim;
    parts.index = parts.v + m->kv_head_count * m->head_dim;
    return parts;
}

static struct ft_rows batch_rows(const struct ft_execute *x, uint64_t offset, uint64_t stride)
{
    return (struct ft_rows){.x = ft_execute_at(x, offset, 0, 0), .stride = stride, .count = x->batch->rows};
}

static void run_attn_project(struct ft_execute *x, uint32_t layer, uint32_t begin, uint32_t end)
{
    const struct ft_attention_weights *w = &x->weights->layers[layer].attention;
    struct ft_segment segments[4] = {
        {&w->q, w->q_bias}, {&w->k, w->k_bias}, {&w->v, w->v_bias}, {&w->index_qk, NULL}};
    uint32_t count = x->model->layers[layer].attention == FT_ATTENTION_SPARSE ? 4 : 3;
    ft_execute_segments(x, segments, count, begin, end, batch_rows(x, x->space.x, x->model->hidden),
                        ft_execute_at(x, x->space.project, 0, 0), x->space.project_width);
}

static void run_linear_project(struct ft_execute *x, uint32_t layer, uint32_t begin, uint32_t end)
{
    const struct ft_linear_weights *w = &x->weights->layers[layer].linear;
    struct ft_segment segments[4] = {{&w->qkv, NULL}, {&w->z, NULL}, {&w->b, NULL}, {&w->a, NULL}};
    ft_execute_segments(x, segments, 4, begin, end, batch_rows(x, x->space.x, x->model->hidden),
                        ft_execute_at(x, x->space.project, 0, 0), x->space.project_width);
}

/* Units [begin, end) = sequence * units_per_sequence + unit; calls are merged per sequence. */
static void run_linear_conv(struct ft_execute *x, uint32_t layer, uint32_t begin, uint32_t end)
{
    const struct ft_model *m = x->model;
    uint32_t channels = ft_model_conv_channels(m);
    uint32_t units = (uint32_t)ft_div_up(channels, FT_GRAPH_CONV_CHANNELS);
    end = FT_MIN(end, x->batch->sequence_count * units);
    while (begin < end) {
        const struct ft_batch_sequence *sequence = &x->batch->sequences[begin / units];
        uint32_t stop = FT_MIN(end, (begin / units + 1) * units);
        uint32_t from = begin % units * FT_GRAPH_CONV_CHANNELS;
        uint32_t to = FT_MIN(channels, from + (stop - begin) * FT_GRAPH_CONV_CHANNELS);
        x->kernels->conv_silu(ft_execute_at(x, x->space.project, sequence->first_row, x->space.project_width),
                              x->space.project_width, sequence->row_count, from, to, channels,
                              x->weights->layers[layer].linear.conv, m->conv_taps, 1,
                              sequence->state + x->state.conv_offset[layer],
                              ft_execute_at(x, x->space.conv, sequence->first_row, channels), channels);
        begin = stop;
    }
}

static void run_linear_delta(struct ft_execute *x, uint32_t layer, uint32_t begin, uint32_t end)
{
    const struct ft_model *m = x->model;
    const struct ft_linear_weights *w = &x->weights->layers[layer].linear;
    uint32_t heads = m->value_head_count, channels = ft_model_conv_channels(m);
    uint32_t values = heads * m->value_dim;
    end = FT_MIN(end, x->batch->sequence_count * heads);
    while (begin < end) {
        const struct ft_batch_sequence *sequence = &x->batch->sequences[begin / heads];
        uint32_t stop = FT_MIN(end, (begin / heads + 1) * heads);
        const float *project =
            ft_execute_at(x, x->space.project, sequence->first_row, x->space.project_width);
        struct ft_delta_args args = {
            .qkv = ft_execute_at(x, x->space.conv, sequence->first_row, channels),
            .qkv_stride = channels,
            .z = project + channels,
            .b = project + channels + values,
            .a = project + channels + values + heads,
            .z_stride = x->space.project_width,
            .b_stride = x->space.project_width,
            .a_stride = x->space.project_width,
            .a_log = w->a_log,
            .dt_bias = w->dt_bias,
            .norm = w->norm,
            .state = sequence->state + x->state.delta_offset[layer],
            .out = ft_execute_at(x, x->space.attention, sequence->first_row, x->space.attention_width),
            .out_stride = x->space.attention_width,
            .rows = sequence->row_count,
            .head_begin = begin % heads,
            .head_end = begin % heads + (stop - begin),
            .key_heads = m->key_head_count,
            .value_heads = heads,
            .key_dim = m->key_dim,
            .value_dim = m->value_dim,
            .eps = m->rms_eps,
            .gate = m->output_gate,
        };
        x->kernels->delta_rule(&args);
        begin = stop;
    }
}

/* Norm (where the family has it) and rotation of one head in place. */
static void prepare_head(const struct ft_execute *x, float *head, const float *norm, uint32_t dim,
                         const float *rotary)
{
    uint32_t half = x->model->rotary_dim / 2;
    if (norm)
        x->kernels->rms_norm(head, norm, x->model->norm_plus_one, false, x->model->rms_eps, 1, dim, head);
    x->kernels->rotate(head, rotary, rotary + half, half);
}

/* A block of raw indexer keys is complete: average, norm, rotate at the block's first position, store in its page. */
static void finish_block(struct ft_execute *x, uint32_t layer, const struct ft_batch_sequence *sequence,
                         uint32_t block, const float *raw, float *scratch)
{
    const struct ft_model *m = x->model;
    uint32_t half = m->rotary_dim / 2, dim = m->indexer_dim, ratio = m->indexer_ratio;
    uint32_t page_blocks = x->kv.page_tokens / ratio;
    float *key = sequence->pages[block / page_blocks] + x->kv.indexer_offset[layer] +
                 (uint64_t)(block % page_blocks) * dim;
    for (uint32_t i = 0; i < dim; i++) {
        float sum = 0;
        for (uint32_t t = 0; t < ratio; t++)
            sum += raw[(uint64_t)t * dim + i];
        key[i] = sum / (float)ratio;
    }
    for (uint32_t i = 0; i < half; i++) {
        double angle = (double)block * ratio * x->frequencies[i];
        scratch[i] = (float)(__builtin_cos(angle) * x->rotary_scale);
        scratch[half + i] = (float)(__builtin_sin(angle) * x->rotary_scale);
    }
    prepare_head(x, key, x->weights->layers[layer].attention.index_k_norm, dim, scratch);
}

static void prepare_indexer(struct ft_execute *x, uint32_t layer, const struct ft_batch_sequence *sequence,
                            float *index, uint32_t position, const float *rotary, float *scratch)
{
    const struct ft_model *m = x->model;
    const struct ft_attention_weights *w = &x->weights->layers[layer].attention;
    float *raw = sequence->state + x->state.indexer_offset[layer];
    uint32_t dim = m->indexer_dim, ratio = m->indexer_ratio;
    for (uint32_t h = 0; h < m->indexer_head_count; h++)
        prepare_head(x, index + (uint64_t)h * dim, w->index_q_norm, dim, rotary);
    memcpy(raw + (uint64_t)(position % ratio) * dim, index + (uint64_t)m->indexer_head_count * dim,
           dim * sizeof *raw);
    if (position % ratio == ratio - 1)
        finish_block(x, layer, sequence, position / ratio, raw, scratch);
}

/* Normed and rotated queries to `query`, keys and values to the pages. */
static void prepare_row(struct ft_execute *x, uint32_t layer, const struct ft_batch_sequence *sequence,
                        uint32_t row, float *scratch)
{
    const struct ft_model *m = x->model;
    const struct ft_attention_weights *w = &x->weights->layers[layer].attention;
    struct qkv_parts parts = parts_of(m);
    uint32_t d = m->head_dim, position = x->batch->position[row];
    float *project = ft_execute_at(x, x->space.project, row, x->space.project_width);
    float *query = ft_execute_at(x, x->space.query, row, (uint64_t)m->head_count * d);
    const float *rotary = ft_execute_at(x, x->space.rotary, row, m->rotary_dim);
    float *page = sequence->pages[position / x->kv.page_tokens];
    for (uint32_t h = 0; h < m->head_count; h++) {
        memcpy(query + (uint64_t)h * d, project + (uint64_t)h * parts.query_stride, d * sizeof *query);
        prepare_head(x, query + (uint64_t)h * d, w->q_norm, d, rotary);
    }
    for (uint32_t h = 0; h < m->kv_head_count; h++) {
        uint64_t at = ((uint64_t)h * x->kv.page_tokens + position % x->kv.page_tokens) * d;
        float *key = page + x->kv.k_offset[layer] + at;
        memcpy(key, project + parts.k + (uint64_t)h * d, d * sizeof *key);
        prepare_head(x, key, w->k_norm, d, rotary);
        memcpy(page + x->kv.v_offset[layer] + at, project + parts.v + (uint64_t)h * d, d * sizeof *key);
    }
    if (m->layers[layer].attention == FT_ATTENTION_SPARSE)
        prepare_indexer(x, layer, sequence, project + parts.index, position, rotary, scratch);
}

static void run_attn_prepare(struct ft_execute *x, uint32_t thread, uint32_t layer, uint32_t begin,
                             uint32_t end)
{
    end = FT_MIN(end, x->batch->sequence_count);
    for (uint32_t s = begin; s < end; s++) {
        const struct ft_batch_sequence *sequence = &x->batch->sequences[s];
        for (uint32_t i = 0; i < sequence->row_count; i++)
            prepare_row(x, layer, sequence, sequence->first_row + i, x->scratch[thread]);
    }
}

/* select = count, then ascending blocks; count FT_NONE: everything is visible. */
static void run_attn_select(struct ft_execute *x, uint32_t thread, uint32_t layer, uint32_t begin,
                            uint32_t end)
{
    const struct ft_model *m = x->model;
    struct qkv_parts parts = parts_of(m);
    uint32_t top = m->indexer_budget / m->indexer_ratio;
    end = FT_MIN(end, x->batch->rows);
    for (uint32_t r = begin; r < end; r++) {
        const struct ft_batch_sequence *sequence = &x->batch->sequences[x->batch->row_sequence[r]];
        uint32_t *select = (uint32_t *)ft_execute_at(x, x->space.select, r, x->space.select_max + 1);
        uint32_t blocks = (x->batch->position[r] + 1) / m->indexer_ratio;
        select[0] = FT_NONE;
        if (blocks <= top)
            continue;
        float *scores = x->scratch[thread];
        x->kernels->index_scores(ft_execute_at(x, x->space.project, r, x->space.project_width) + parts.index,
                                 m->indexer_head_count, m->indexer_dim, sequence->pages,
                                 x->kv.indexer_offset[layer], x->kv.page_tokens / m->indexer_ratio, blocks,
                                 scores);
        ft_select_topk(scores, blocks, top, select + 1, (uint32_t *)(scores + blocks));
        select[0] = top;
    }
}

static void attend(struct ft_execute *x, uint32_t layer, uint32_t row, uint32_t kv_head)
{
    const struct ft_model *m = x->model;
    const struct ft_batch_sequence *sequence = &x->batch->sequences[x->batch->row_sequence[row]];
    struct qkv_parts parts = parts_of(m);
    uint32_t d = m->head_dim, group = m->head_count / m->kv_head_count, first = kv_head * group;
    uint32_t position = x->batch->position[row], attention = m->layers[layer].attention;
    const float *sinks = x->weights->layers[layer].attention.sinks;
    float *out = ft_execute_at(x, x->space.attention, row, x->space.attention_width) + (uint64_t)first * d;
    struct ft_attention_row args = {
        .kv = {sequence->pages, x->kv.k_offset[layer], x->kv.v_offset[layer], x->kv.page_tokens,
               m->kv_head_count, d},
        .q = ft_execute_at(x, x->space.query, row, (uint64_t)m->head_count * d) + (uint64_t)first * d,
        .out = out,
        .sinks = sinks ? sinks + first : NULL,
        .position = position,
        .kv_head = kv_head,
        .group = group,
        .scale = (float)(1.0 / __builtin_sqrt(d)),
    };
    if (attention == FT_ATTENTION_SPARSE) {
        const uint32_t *select =
            (const uint32_t *)ft_execute_at(x, x->space.select, row, x->space.select_max + 1);
        if (select[0] != FT_NONE) {
            args.blocks = select + 1;
            args.block_count = select[0];
            args.block_tokens = m->indexer_ratio;
            args.tail_begin = (position + 1) / m->indexer_ratio * m->indexer_ratio;
        }
    } else if (attention == FT_ATTENTION_SLIDING && position + 1 > m->window) {
        args.tail_begin = position + 1 - m->window;
    }
    x->kernels->attention_row(&args);
    if (!m->attention_gate)
        return;
    const float *project = ft_execute_at(x, x->space.project, row, x->space.project_width);
    for (uint32_t h = 0; h < group; h++) {
        const float *gate = project + (uint64_t)(first + h) * parts.query_stride + d;
        for (uint32_t i = 0; i < d; i++)
            out[(uint64_t)h * d + i] *= ft_sigmoid(gate[i]);
    }
}

static void run_attn_out(struct ft_execute *x, uint32_t layer, uint32_t begin, uint32_t end)
{
    const struct ft_layer_weights *w = &x->weights->layers[layer];
    bool linear = x->model->layers[layer].attention == FT_ATTENTION_LINEAR;
    float *y = ft_execute_at(x, x->space.x, 0, 0); /* the attention's input is no longer needed */
    x->kernels->matmul(linear ? &w->linear.out : &w->attention.o, begin, end,
                       batch_rows(x, x->space.attention, x->space.attention_width),
                       linear ? NULL : w->attention.o_bias, y, x->model->hidden);
    ft_execute_add_residual(x, y, x->model->hidden, begin, end);
}

void ft_execute_attention_op(struct ft_execute *x, uint32_t thread, enum ft_op op, uint32_t layer,
                             uint32_t begin, uint32_t end)
{
    switch (op) {
    case FT_OP_LINEAR_PROJECT:
        run_linear_project(x, layer, begin, end);
        break;
    case FT_OP_LINEAR_CONV:
        run_linear_conv(x, layer, begin, end);
        break;
    case FT_OP_LINEAR_DELTA:
        run_linear_delta(x, layer, begin, end);
        break;
    case FT_OP_ATTN_PROJECT:
        run_attn_project(x, layer, begin, end);
        break;
    case FT_OP_ATTN_PREPARE:
        run_attn_prepare(x, thread, layer, begin, end);
        break;
    case FT_OP_ATTN_SELECT:
        run_attn_select(x, thread, layer, begin, end);
        break;
    case FT_OP_ATTN: {
        uint32_t kv_heads = x->model->kv_head_count;
        end = FT_MIN(end, x->batch->rows * kv_heads);
        for (uint32_t unit = begin; unit < end; unit++)
            attend(x, layer, unit / kv_heads, unit % kv_heads);
        break;
    }
    case FT_OP_ATTN_OUT:
        run_attn_out(x, layer, begin, end);
        break;
    default:
        FT_ASSERT_EQ(op, FT_OP_ATTN_OUT);
    }
}
