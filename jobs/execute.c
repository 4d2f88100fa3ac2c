/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/execute.h"

#include <string.h>

#include "jobs/capture.h"
#include "jobs/session.h"

uint64_t ft_execute_scratch_count(const struct ft_model *model, uint32_t tokens)
{
    uint64_t blocks = model->indexer_ratio ? tokens / model->indexer_ratio + 1 : 0;
    return ft_round_up(2 * blocks + 2ull * model->rotary_dim + 64, 16);
}

void ft_execute_segments(const struct ft_execute *x, const struct ft_segment *segments, uint32_t count,
                         uint32_t begin, uint32_t end, struct ft_rows rows, float *y, size_t y_stride)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct ft_matrix *w = segments[i].w;
        uint32_t from = FT_MAX(begin, at), to = FT_MIN(end, at + w->out);
        if (from < to)
            x->kernels->matmul(w, from - at, to - at, rows, segments[i].bias, y + at, y_stride);
        at += w->out;
    }
}

void ft_execute_fail_row(struct ft_execute *x, uint32_t row, uint32_t layer)
{
    struct ft_batch_sequence *sequence = &x->batch->sequences[x->batch->row_sequence[row]];
    int none = 0;
    /* relaxed: read by the session after the step's end, which every job happens before */
    if (atomic_compare_exchange_strong_explicit(&sequence->failed, &none, FT_NUMERIC, memory_order_relaxed,
                                                memory_order_relaxed))
        sequence->failed_layer = layer;
}

/* ---- captures: what `ft logits` and `ft verify` look at ---- */

/* Residual elements [begin, end) of every stream, as the input of layer `block`. */
static void capture_residual(const struct ft_execute *x, uint32_t block, uint32_t begin, uint32_t end)
{
    uint32_t streams = x->model->hc_count, hidden = x->model->hidden;
    for (uint32_t r = 0; r < x->batch->rows; r++) {
        float *to = ft_capture_residual(x->model, x->batch, r, block);
        const float *from = ft_execute_at(x, x->space.residual, r, (uint64_t)streams * hidden);
        for (uint32_t i = 0; to && i < streams; i++)
            memcpy(to + i * hidden + begin, from + i * hidden + begin, (end - begin) * sizeof *to);
    }
}

/* Elements [begin, end) of the last hidden state. */
static void capture_final(const struct ft_execute *x, uint32_t begin, uint32_t end)
{
    uint32_t hidden = x->model->hidden;
    for (uint32_t l = 0; l < x->batch->logit_rows; l++) {
        float *to = ft_capture_final(x->model, x->batch, x->batch->logit_row[l]);
        if (to)
            memcpy(to + begin, ft_execute_at(x, x->space.head_x, l, hidden) + begin,
                   (end - begin) * sizeof *to);
    }
}

/* ---- residual streams ---- */

void ft_execute_add_residual(struct ft_execute *x, const float *y, size_t y_stride, uint32_t begin,
                             uint32_t end)
{
    const struct ft_model *m = x->model;
    uint32_t mixed_width = m->hc_lowrank + m->hc_count;
    uint64_t wide = (uint64_t)m->hc_count * m->hidden;
    for (uint32_t r = 0; r < x->batch->rows; r++) {
        const float *s = ft_execute_at(x, x->space.mixed, r, mixed_width) + m->hc_lowrank;
        float *residual = ft_execute_at(x, x->space.residual, r, wide);
        for (uint32_t i = 0; i < m->hc_count; i++)
            x->kernels->axpy(m->hc_count == 1 ? 1.0f : s[i], y + r * y_stride + begin,
                             residual + i * m->hidden + begin, end - begin);
    }
}

static void run_embed(struct ft_execute *x, uint32_t begin, uint32_t end)
{
    const struct ft_model *m = x->model;
    uint64_t wide = (uint64_t)m->hc_count * m->hidden;
    uint32_t half = m->rotary_dim / 2;
    end = FT_MIN(end, x->batch->rows);
    for (uint32_t r = begin; r < end; r++) {
        float *residual = ft_execute_at(x, x->space.residual, r, wide);
        x->kernels->row_decode(&x->weights->embed, x->batch->token[r], residual);
        for (uint32_t i = 1; i < m->hc_count; i++)
            memcpy(residual + i * m->hidden, residual, m->hidden * sizeof *residual);
        float *rotary = ft_execute_at(x, x->space.rotary, r, m->rotary_dim);
        for (uint32_t i = 0; i < half; i++) {
            double angle = x->batch->position[r] * x->frequencies[i];
            rotary[i] = (float)(__builtin_cos(angle) * x->rotary_scale);
            rotary[half + i] = (float)(__builtin_sin(angle) * x->rotary_scale);
        }
        float *captured = ft_capture_residual(m, x->batch, r, 0);
        if (captured)
            memcpy(captured, residual, wide * sizeof *residual);
    }
}

static const struct ft_mix_weights *mix_of(const struct ft_execute *x, enum ft_phase phase, uint32_t layer)
{
    if (phase == FT_PHASE_HEAD)
        return &x->weights->top_mix;
    const struct ft_layer_weights *w = &x->weights->layers[layer];
    return phase == FT_PHASE_ATTENTION ? &w->attention_mix : &w->mlp_mix;
}

/* Rows that the norms and mixers of a phase work on: all, or those that go to the head. */
static uint32_t phase_rows(const struct ft_execute *x, enum ft_phase phase)
{
    return phase == FT_PHASE_HEAD ? x->batch->logit_rows : x->batch->rows;
}

static void run_norm(struct ft_execute *x, enum ft_phase phase, uint32_t layer, uint32_t begin, uint32_t end)
{
    const struct ft_model *m = x->model;
    bool head = phase == FT_PHASE_HEAD, streams = m->hc_count > 1;
    uint64_t wide = (uint64_t)m->hc_count * m->hidden;
    const float *w;
    if (streams)
        w = mix_of(x, phase, layer)->norm;
    else if (head)
        w = x->weights->final_norm;
    else
        w = phase == FT_PHASE_ATTENTION ? x->weights->layers[layer].attention_norm
                                        : x->weights->layers[layer].mlp_norm;
    end = FT_MIN(end, phase_rows(x, phase));
    for (uint32_t r = begin; r < end; r++) {
        const float *from = ft_execute_at(x, x->space.residual, head ? x->batch->logit_row[r] : r, wide);
        float *to = streams ? ft_execute_at(x, x->space.normed, r, wide)
                            : ft_execute_at(x, head ? x->space.head_x : x->space.x, r, m->hidden);
        x->kernels->rms_norm(from, w, m->norm_plus_one, true, m->rms_eps, m->hc_count, m->hidden, to);
    }
}

static void run_mix_down(struct ft_execute *x, enum ft_phase phase, uint32_t layer, uint32_t begin,
                         uint32_t end)
{
    const struct ft_model *m = x->model;
    const struct ft_mix_weights *mix = mix_of(x, phase, layer);
    uint64_t wide = (uint64_t)m->hc_count * m->hidden;
    uint32_t rows = phase_rows(x, phase), width = m->hc_lowrank + m->hc_count;
    float *mixed = ft_execute_at(x, x->space.mixed, 0, 0);
    struct ft_rows in = {.x = ft_execute_at(x, x->space.normed, 0, 0), .stride = wide, .count = rows};
    struct ft_segment segments[2] = {{&mix->down, NULL}, {&mix->inject, NULL}};
    ft_execute_segments(x, segments, phase == FT_PHASE_HEAD ? 1 : 2, begin, end, in, mixed, width);
    float share = 1.0f / (float)m->hc_count; /* (W u) / n = W (u / n) */
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t o = begin; o < end; o++) {
            float v = mixed[(uint64_t)r * width + o] * share;
            mixed[(uint64_t)r * width + o] = o < m->hc_lowrank ? ft_silu(v) : 2.0f * ft_sigmoid(v);
        }
}

static void run_mix_up(struct ft_execute *x, enum ft_phase phase, uint32_t layer, uint32_t begin,
                       uint32_t end)
{
    const struct ft_model *m = x->model;
    bool head = phase == FT_PHASE_HEAD;
    x->kernels->mix_up(&mix_of(x, phase, layer)->up, m->hc_count, m->hidden, begin, end,
                       ft_execute_at(x, x->space.mixed, 0, 0), m->hc_lowrank + m->hc_count,
                       ft_execute_at(x, x->space.normed, 0, 0), (size_t)m->hc_count * m->hidden,
                       phase_rows(x, phase), ft_execute_at(x, head ? x->space.head_x : x->space.x, 0, 0),
                       m->hidden);
}

/* ---- feed-forward ---- */

static struct ft_rows x_rows(const struct ft_execute *x)
{
    return (struct ft_rows){
        .x = ft_execute_at(x, x->space.x, 0, 0), .stride = x->model->hidden, .count = x->batch->rows};
}

static struct ft_expert mlp_as_expert(const struct ft_mlp_weights *mlp, enum ft_activation activation)
{
    return (struct ft_expert){.gate = mlp->gate, .up = mlp->up, .down = mlp->down, .activation = activation};
}

static void run_mlp_up(struct ft_execute *x, const struct ft_mlp_weights *mlp, uint32_t begin, uint32_t end)
{
    struct ft_expert expert = mlp_as_expert(mlp, FT_ACTIVATION_SILU);
    x->kernels->expert_up(&expert, begin, end, x_rows(x), ft_execute_at(x, x->space.shared_h, 0, 0),
                          mlp->up.out);
}

static void run_mlp_down(struct ft_execute *x, const struct ft_mlp_weights *mlp, uint32_t begin, uint32_t end)
{
    struct ft_expert expert = mlp_as_expert(mlp, FT_ACTIVATION_SILU);
    struct ft_rows h = {
        .x = ft_execute_at(x, x->space.shared_h, 0, 0), .stride = mlp->up.out, .count = x->batch->rows};
    x->kernels->expert_down(&expert, begin, end, h, NULL, ft_execute_at(x, x->space.shared_y, 0, 0),
                            x->model->hidden);
}

/* Ids as given, weights by the logits that the router has for them. */
static void force_choice(const struct ft_execute *x, uint32_t layer, uint32_t row, const float *logits,
                         uint32_t *ids, float *weights)
{
    uint32_t k = x->model->topk;
    const uint16_t *forced = ft_routing_row(x->routing, x->batch->decode_step, layer, row);
    float max = logits[forced[0]], sum = 0;
    for (uint32_t j = 1; j < k; j++)
        max = FT_MAX(max, logits[forced[j]]);
    for (uint32_t j = 0; j < k; j++) {
        ids[j] = forced[j];
        weights[j] = __builtin_expf(logits[forced[j]] - max);
        sum += weights[j];
    }
    for (uint32_t j = 0; j < k; j++)
        weights[j] /= sum;
}

static void run_router_logits(struct ft_execute *x, uint32_t layer, uint32_t begin, uint32_t end)
{
    const struct ft_layer_weights *w = &x->weights->layers[layer];
    x->kernels->matmul(&w->router, begin, end, x_rows(x), w->router_bias,
                       ft_execute_at(x, x->space.logits_router, 0, 0), x->model->expert_count);
}

static void run_router(struct ft_execute *x, uint32_t layer)
{
    const struct ft_model *m = x->model;
    float *logits = ft_execute_at(x, x->space.logits_router, 0, 0);
    for (uint32_t r = 0; r < x->batch->rows; r++) {
        uint32_t *ids = (uint32_t *)ft_execute_at(x, x->space.topk_ids, r, m->topk);
        float *weights = ft_execute_at(x, x->space.topk_weights, r, m->topk);
        if (!ft_router_topk(logits + (uint64_t)r * m->expert_count, m->expert_count, m->topk,
                            m->topk_renormalise, m->router_softmax_chosen, ids, weights)) {
            /* The row's sequence fails; the step goes on with a harmless choice for the sake of the others. */
            ft_execute_fail_row(x, r, layer);
            for (uint32_t j = 0; j < m->topk; j++) {
                ids[j] = j;
                weights[j] = 0;
            }
        } else if (x->routing && !x->batch->prefill) {
            force_choice(x, layer, r, logits + (uint64_t)r * m->expert_count, ids, weights);
        }
        ft_capture_topk(x->model, x->batch, r, layer, ids);
    }
}

void ft_execute_foresee_given(const struct ft_execute *x, uint32_t layer, uint32_t *ids)
{
    const struct ft_model *m = x->model;
    for (uint32_t r = 0; r < x->batch->rows; r++)
        for (uint32_t j = 0; j < m->topk; j++)
            ids[r * m->topk + j] =
                ft_routing_foresee(x->routing, x->batch->decode_step, layer, r, j, m->expert_count);
}

void ft_execute_foresee(struct ft_execute *x, uint32_t layer, uint32_t *ids)
{
    const struct ft_model *m = x->model;
    float *logits = ft_execute_at(x, x->space.logits_router, 0, 0), weights[FT_TOPK_MAX];
    run_router_logits(x, layer, 0, m->expert_count);
    for (uint32_t r = 0; r < x->batch->rows; r++)
        if (!ft_router_topk(logits + (uint64_t)r * m->expert_count, m->expert_count, m->topk,
                            m->topk_renormalise, m->router_softmax_chosen, ids + r * m->topk, weights))
            memset(ids + r * m->topk, 0xff, m->topk * sizeof *ids);
    if (x->routing)
        ft_execute_foresee_given(x, layer, ids);
}

void ft_execute_expert_up(struct ft_execute *x, uint32_t layer, uint32_t active, uint32_t begin, uint32_t end)
{
    const struct ft_active *a = &x->active;
    const struct ft_expert_layout *layout = &x->weights->layers[layer].expert_layout;
    struct ft_expert expert;
    ft_expert_view(layout, a->blob[active], &expert);
    struct ft_rows in = x_rows(x);
    in.index = a->pair_row + a->pair_begin[active];
    in.count = a->rows[active];
    x->kernels->expert_up(&expert, begin, end, in,
                          ft_execute_at(x, x->space.expert_h, a->pair_begin[active], layout->width),
                          layout->width);
}

void ft_execute_expert_down(struct ft_execute *x, uint32_t layer, uint32_t active, uint32_t begin,
                            uint32_t end)
{
    const struct ft_active *a = &x->active;
    const struct ft_expert_layout *layout = &x->weights->layers[layer].expert_layout;
    struct ft_expert expert;
    ft_expert_view(layout, a->blob[active], &expert);
    struct ft_rows h = {.x = ft_execute_at(x, x->space.expert_h, a->pair_begin[active], layout->width),
                        .stride = layout->width,
                        .count = a->rows[active]};
    x->kernels->expert_down(&expert, begin, end, h, a->pair_out + a->pair_begin[active],
                            ft_execute_at(x, x->space.expert_y, 0, 0), layout->hidden);
}

/* Sums the experts' results in the order of the router's list, whoever computed them and when. */
static void run_combine(struct ft_execute *x, uint32_t layer, uint32_t begin, uint32_t end)
{
    const struct ft_model *m = x->model;
    float *sum = ft_execute_at(x, x->space.x, 0, 0); /* x of the MoE is no longer needed */
    for (uint32_t r = 0; r < x->batch->rows; r++) {
        const float *weights = ft_execute_at(x, x->space.topk_weights, r, m->topk);
        float *row = sum + (uint64_t)r * m->hidden;
        memset(row + begin, 0, (end - begin) * sizeof *row);
        for (uint32_t j = 0; j < m->topk; j++)
            x->kernels->axpy(
                weights[j], ft_execute_at(x, x->space.expert_y, (uint64_t)r * m->topk + j, m->hidden) + begin,
                row + begin, end - begin);
        if (m->shared_width)
            x->kernels->axpy(ft_sigmoid(*ft_execute_at(x, x->space.shared_gate, r, 1)),
                             ft_execute_at(x, x->space.shared_y, r, m->hidden) + begin, row + begin,
                             end - begin);
    }
    ft_execute_add_residual(x, sum, m->hidden, begin, end);
    if (layer + 1 < m->layer_count)
        capture_residual(x, layer + 1, begin, end);
}

static void run_shared_up(struct ft_execute *x, uint32_t layer, uint32_t begin, uint32_t end)
{
    const struct ft_layer_weights *w = &x->weights->layers[layer];
    run_mlp_up(x, &w->shared, begin, end);
    if (begin == 0) /* the gate is one row: it rides with the first tile */
        x->kernels->matmul(&w->shared_gate, 0, 1, x_rows(x), NULL,
                           ft_execute_at(x, x->space.shared_gate, 0, 0), 1);
}

static void run_dense_down(struct ft_execute *x, uint32_t layer, uint32_t begin, uint32_t end)
{
    run_mlp_down(x, &x->weights->layers[layer].dense, begin, end);
    ft_execute_add_residual(x, ft_execute_at(x, x->space.shared_y, 0, 0), x->model->hidden, begin, end);
    if (layer + 1 < x->model->layer_count)
        capture_residual(x, layer + 1, begin, end);
}

/* ---- PLE ---- */

static uint64_t ple_table_rows(const struct ft_execute *x, uint32_t table)
{
    return (uint64_t)table * x->space.rows;
}

void ft_execute_ple_decode(struct ft_execute *x, uint32_t table, uint32_t rows)
{
    const struct ft_ple_spec *ple = &x->model->ple[table];
    uint32_t row_bytes = ple->row_width * ft_dtype_bytes(x->ple_dtype[table]);
    const char *raw =
        (const char *)(x->buffer + x->space.ple_raw) + ple_table_rows(x, table) * x->space.ple_row_bytes;
    for (uint32_t r = 0; r < rows; r++) {
        float *e = ft_execute_at(x, x->space.ple_e, ple_table_rows(x, table) + r, x->model->ple_embed_dim);
        for (uint32_t h = 0; h < ple->head_count; h++)
            ft_ple_decode(x->ple_dtype[table], x->ple_scale[table],
                          raw + r * x->space.ple_row_bytes + h * row_bytes, ple->row_width,
                          e + (uint64_t)h * ple->row_width);
    }
}

static void run_ple_project(struct ft_execute *x, uint32_t layer, uint32_t begin, uint32_t end)
{
    const struct ft_model *m = x->model;
    const struct ft_ple_weights *w = &x->weights->layers[layer].ple;
    uint32_t table = m->layers[layer].ple, width = (m->hc_count + 1) * m->hidden;
    struct ft_segment segments[2] = {{&w->key, NULL}, {&w->value, NULL}};
    struct ft_rows in = {.x = ft_execute_at(x, x->space.ple_e, ple_table_rows(x, table), m->ple_embed_dim),
                         .stride = m->ple_embed_dim,
                         .count = x->batch->rows};
    ft_execute_segments(x, segments, 2, begin, end, in,
                        ft_execute_at(x, x->space.ple_project, ple_table_rows(x, table), width), width);
}

static void inject_sequence(struct ft_execute *x, uint32_t layer, const struct ft_batch_sequence *sequence)
{
    const struct ft_model *m = x->model;
    const struct ft_ple_weights *w = &x->weights->layers[layer].ple;
    const struct ft_kernels *k = x->kernels;
    uint32_t table = m->layers[layer].ple, wide = m->hc_count * m->hidden;
    float *u0 = ft_execute_at(x, x->space.ple_u, sequence->first_row, wide);
    float *c0 = ft_execute_at(x, x->space.ple_c, sequence->first_row, wide);
    for (uint32_t i = 0; i < sequence->row_count; i++) {
        uint32_t r = sequence->first_row + i;
        float *key = ft_execute_at(x, x->space.ple_project, ple_table_rows(x, table) + r, wide + m->hidden);
        float *u = u0 + (uint64_t)i * wide, *c = c0 + (uint64_t)i * wide;
        k->rms_norm(key, w->norm_key, true, true, m->rms_eps, m->hc_count, m->hidden, key);
        k->rms_norm(ft_execute_at(x, x->space.residual, r, wide), w->norm_query, true, true, m->rms_eps,
                    m->hc_count, m->hidden, c);
        ft_ple_gate(key, c, key + wide, m->hc_count, m->hidden, u);
        k->rms_norm(u, w->norm_conv, true, true, m->rms_eps, m->hc_count, m->hidden, c);
    }
    k->conv_silu(c0, wide, sequence->row_count, 0, wide, wide, w->conv, m->ple_taps, m->ngram_size,
                 sequence->state + x->state.ple_offset[table], c0, wide);
    for (uint32_t i = 0; i < sequence->row_count; i++) {
        float *residual = ft_execute_at(x, x->space.residual, sequence->first_row + i, wide);
        k->axpy(1.0f, c0 + (uint64_t)i * wide, u0 + (uint64_t)i * wide,
                wide); /* U + y first, as the reference */
        k->axpy(1.0f, u0 + (uint64_t)i * wide, residual, wide);
    }
}

/* ---- head ---- */

static void run_sample(struct ft_execute *x, uint32_t begin, uint32_t end)
{
    uint32_t vocab = x->model->vocab;
    end = FT_MIN(end, x->batch->logit_rows);
    for (uint32_t l = begin; l < end; l++) {
        uint32_t row = x->batch->logit_row[l];
        struct ft_batch_sequence *sequence = &x->batch->sequences[x->batch->row_sequence[row]];
        float *logits = ft_execute_at(x, x->space.logits, l, vocab);
        float *captured = ft_capture_logits(x->model, x->batch, row);
        if (captured)
            memcpy(captured, logits, vocab * sizeof *logits);
        /* Only the row of the newest token asks for a next one. */
        if (x->batch->position[row] + 1 != sequence->token_count)
            continue;
        uint32_t *index = (uint32_t *)ft_execute_at(x, x->space.sample_index, l, vocab);
        sequence->sampled = ft_sample_token(logits, vocab, sequence->sampling, sequence->tokens,
                                            sequence->token_count, sequence->token_count, index);
        if (sequence->sampled == FT_NONE)
            ft_execute_fail_row(x, row, x->model->layer_count);
    }
}

static void run_head(struct ft_execute *x, uint32_t begin, uint32_t end)
{
    struct ft_rows in = {.x = ft_execute_at(x, x->space.head_x, 0, 0),
                         .stride = x->model->hidden,
                         .count = x->batch->logit_rows};
    if (begin == 0)
        capture_final(x, 0, x->model->hidden);
    x->kernels->matmul(&x->weights->head, begin, end, in, NULL, ft_execute_at(x, x->space.logits, 0, 0),
                       x->model->vocab);
}

void ft_execute_op(struct ft_execute *x, uint32_t thread, enum ft_op op, enum ft_phase phase, uint32_t layer,
                   uint32_t begin, uint32_t end)
{
    switch (op) {
    case FT_OP_EMBED:
        run_embed(x, begin, end);
        break;
    case FT_OP_NORM:
        run_norm(x, phase, layer, begin, end);
        break;
    case FT_OP_MIX_DOWN:
        run_mix_down(x, phase, layer, begin, end);
        break;
    case FT_OP_MIX_UP:
        run_mix_up(x, phase, layer, begin, end);
        break;
    case FT_OP_PLE_PROJECT:
        run_ple_project(x, layer, begin, end);
        break;
    case FT_OP_PLE_INJECT:
        for (uint32_t s = begin; s < FT_MIN(end, x->batch->sequence_count); s++)
            inject_sequence(x, layer, &x->batch->sequences[s]);
        break;
    case FT_OP_ROUTER_LOGITS:
        run_router_logits(x, layer, begin, end);
        break;
    case FT_OP_ROUTER:
        run_router(x, layer);
        break;
    case FT_OP_SHARED_UP:
        run_shared_up(x, layer, begin, end);
        break;
    case FT_OP_SHARED_DOWN:
        run_mlp_down(x, &x->weights->layers[layer].shared, begin, end);
        break;
    case FT_OP_DENSE_UP:
        run_mlp_up(x, &x->weights->layers[layer].dense, begin, end);
        break;
    case FT_OP_DENSE_DOWN:
        run_dense_down(x, layer, begin, end);
        break;
    case FT_OP_COMBINE:
        run_combine(x, layer, begin, end);
        break;
    case FT_OP_HEAD:
        run_head(x, begin, end);
        break;
    case FT_OP_SAMPLE:
        run_sample(x, begin, end);
        break;
    default:
        ft_execute_attention_op(x, thread, op, layer, begin, end);
    }
}
