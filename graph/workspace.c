/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/workspace.h"

#define ALIGN_ELEMENTS 16u /* 64 bytes: a cache line, and what the vector kernels like best */
/* Rows of a PLE table are f8 or bf16; which one only the shards know, so room is made for the wider. */
#define PLE_ELEMENT_BYTES_MAX 2u

/* Room for `count` elements; returns where they begin. */
static uint64_t reserve(struct ft_workspace *workspace, uint64_t count)
{
    uint64_t offset = workspace->count;
    workspace->count += ft_round_up(count, ALIGN_ELEMENTS);
    return offset;
}

static bool has_attention(const struct ft_model *model, enum ft_attention kind)
{
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].attention == kind)
            return true;
    return false;
}

static void find_widths(struct ft_workspace *workspace, const struct ft_model *model)
{
    bool linear = has_attention(model, FT_ATTENTION_LINEAR),
         sparse = has_attention(model, FT_ATTENTION_SPARSE);
    bool softmax =
        sparse || has_attention(model, FT_ATTENTION_FULL) || has_attention(model, FT_ATTENTION_SLIDING);
    if (linear) {
        uint32_t value_width = model->value_head_count * model->value_dim;
        workspace->project_width = ft_model_conv_channels(model) + value_width + 2 * model->value_head_count;
        workspace->attention_width = value_width;
    }
    if (softmax) {
        uint32_t query_width = model->head_count * model->head_dim;
        uint32_t width =
            query_width * (model->attention_gate ? 2 : 1) + 2 * model->kv_head_count * model->head_dim;
        if (sparse)
            width += (model->indexer_head_count + 1) * model->indexer_dim;
        workspace->project_width = FT_MAX(workspace->project_width, width);
        workspace->attention_width = FT_MAX(workspace->attention_width, query_width);
    }
    if (sparse)
        workspace->select_max = model->indexer_budget / FT_MAX(model->indexer_ratio, 1u);
    for (uint32_t p = 0; p < model->ple_count; p++) {
        uint64_t bytes = (uint64_t)model->ple[p].head_count * model->ple[p].row_width * PLE_ELEMENT_BYTES_MAX;
        workspace->ple_row_bytes = FT_MAX(workspace->ple_row_bytes, bytes);
    }
}

void ft_workspace_init(struct ft_workspace *workspace, const struct ft_model *model, uint32_t rows,
                       uint32_t sequences, uint32_t logit_rows)
{
    uint64_t r = rows, h = model->hidden, n = FT_MAX(model->hc_count, 1u), nh = n * h;
    uint64_t picks = r * model->topk, tables = model->ple_count, ple = tables ? 1 : 0;
    *workspace = (struct ft_workspace){.rows = rows, .sequences = sequences, .logit_rows = logit_rows};
    find_widths(workspace, model);
    workspace->residual = reserve(workspace, r * nh);
    workspace->normed = reserve(workspace, r * nh);
    workspace->mixed = reserve(workspace, n > 1 ? r * (model->hc_lowrank + n) : 0);
    workspace->x = reserve(workspace, r * h);
    workspace->project = reserve(workspace, r * workspace->project_width);
    workspace->conv =
        reserve(workspace, has_attention(model, FT_ATTENTION_LINEAR) ? r * ft_model_conv_channels(model) : 0);
    workspace->query = reserve(workspace, r * model->head_count * model->head_dim);
    workspace->attention = reserve(workspace, r * workspace->attention_width);
    workspace->select = reserve(workspace, r * (workspace->select_max + 1));
    workspace->logits_router = reserve(workspace, r * model->expert_count);
    workspace->topk_ids = reserve(workspace, picks);
    workspace->topk_weights = reserve(workspace, picks);
    uint64_t staged =
        FT_MIN(r, FT_GPU_DECODE_ROWS) * ft_workspace_staged_words(h) + FT_WORKSPACE_STAGED_SLACK;
    workspace->staged = reserve(workspace, model->topk ? staged : 0);
    workspace->expert_h = reserve(workspace, picks * model->expert_width);
    workspace->expert_y = reserve(workspace, picks * h);
    workspace->shared_h = reserve(workspace, r * FT_MAX(model->shared_width, model->dense_width));
    workspace->shared_y = reserve(workspace, r * h);
    workspace->shared_gate = reserve(workspace, r);
    workspace->ple_raw = reserve(workspace, ft_div_up(tables * r * workspace->ple_row_bytes, 4));
    workspace->ple_e = reserve(workspace, tables * r * model->ple_embed_dim);
    workspace->ple_project = reserve(workspace, tables * r * (nh + h));
    workspace->ple_u = reserve(workspace, ple * r * nh);
    workspace->ple_c = reserve(workspace, ple * r * nh);
    workspace->rotary = reserve(workspace, r * model->rotary_dim);
    workspace->head_x = reserve(workspace, (uint64_t)logit_rows * h);
    workspace->logits = reserve(workspace, (uint64_t)logit_rows * model->vocab);
    workspace->sample_index = reserve(workspace, (uint64_t)logit_rows * model->vocab);
}

void ft_workspace_init_host(struct ft_workspace *workspace, const struct ft_model *model, uint32_t rows,
                            uint32_t expert_rows)
{
    uint64_t tables = model->ple_count, picks = (uint64_t)expert_rows * model->topk;
    *workspace = (struct ft_workspace){.rows = rows};
    find_widths(workspace, model);
    workspace->x = reserve(workspace, (uint64_t)expert_rows * model->hidden);
    workspace->topk_ids = reserve(workspace, picks);
    workspace->topk_weights = reserve(workspace, picks);
    workspace->expert_h = reserve(workspace, picks * model->expert_width);
    workspace->expert_y = reserve(workspace, picks * model->hidden);
    workspace->ple_raw = reserve(workspace, ft_div_up(tables * rows * workspace->ple_row_bytes, 4));
    workspace->ple_e = reserve(workspace, tables * rows * model->ple_embed_dim);
}

uint64_t ft_workspace_gpu_dense_bytes(const struct ft_model *m, uint32_t rows)
{
    /* partial sums of every share, and its sum of squares */
    uint64_t few = (uint64_t)m->hc_count * FT_GPU_MIX_SHARES * FT_GPU_DECODE_ROWS *
                   (ft_gpu_mix_stride(m) + 1) * sizeof(float);
    if (rows <= FT_GPU_DECODE_ROWS)
        return few;
    uint64_t in = FT_MAX((uint64_t)m->hc_count * m->hidden, (uint64_t)m->head_count * m->head_dim);
    in = FT_MAX(in, (uint64_t)m->value_head_count * m->value_dim);
    in = FT_MAX(in, FT_MAX(m->dense_width, m->shared_width));
    in = FT_MAX(in, FT_MAX(m->ple_embed_dim, m->hc_lowrank));
    uint64_t many = FT_GPU_WEIGHT_BYTES + ft_round_up(rows * ft_gpu_widest_row(m), 64) * sizeof(float) +
                    ft_round_up(rows * ft_round_up(in, FT_GPU_DEPTH), 32) * sizeof(uint16_t) +
                    FT_GPU_SCALE_BYTES;
    return FT_MAX(few, many);
}

uint64_t ft_workspace_gpu_attention_bytes(const struct ft_model *m, uint32_t rows, uint32_t tokens_max)
{
    uint64_t r = FT_MIN(rows, FT_GPU_DECODE_ROWS), splits = ft_gpu_attention_splits(tokens_max);
    uint64_t partials = splits > 1 ? r * m->head_count * splits * (m->head_dim + 2) * 4 : 0;
    uint64_t blocks = m->indexer_ratio ? tokens_max / m->indexer_ratio : 0;
    uint64_t scores = rows > r && blocks ? 264 * blocks * 4 : r * blocks * 4;
    return ft_round_up(FT_MAX(partials, scores), 256);
}

uint64_t ft_workspace_gpu_bytes(const struct ft_model *m, uint32_t rows, uint64_t kv_tokens)
{
    uint32_t bound = FT_GPU_TOKENS_MIN;
    while (bound < kv_tokens && bound < 1u << 31)
        bound *= 2;
    return FT_MAX(ft_workspace_gpu_dense_bytes(m, rows), ft_workspace_gpu_attention_bytes(m, rows, bound));
}
