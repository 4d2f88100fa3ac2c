/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/decode_bounds.h"

/* Tokens of the context that one attention layer looks at. */
static double visible(const struct ft_model *m, enum ft_attention attention, double context)
{
    if (attention == FT_ATTENTION_SLIDING)
        return FT_MIN(context, (double)m->window);
    if (attention == FT_ATTENTION_SPARSE) /* blocks of the budget and the block that is not full */
        return FT_MIN(context, (double)m->indexer_budget + (double)m->indexer_ratio - 1);
    return context;
}

/* Elements that one row reads of the KV cache in one layer. */
static double layer_kv(const struct ft_model *m, enum ft_attention attention, double context)
{
    if (attention == FT_ATTENTION_LINEAR)
        return 0;
    double elements = 2.0 * m->kv_head_count * m->head_dim * visible(m, attention, context);
    if (attention == FT_ATTENTION_SPARSE && m->indexer_ratio)
        elements += context / m->indexer_ratio * m->indexer_dim;
    return elements;
}

void ft_decode_traffic_init(struct ft_decode_traffic *traffic, const struct ft_model *model,
                            const struct ft_weight_sizes *sizes, uint32_t batch, double context,
                            uint32_t element)
{
    struct ft_state_layout state;
    double kv = 0;
    ft_state_layout_init(&state, model);
    for (uint32_t i = 0; i < model->layer_count; i++)
        kv += layer_kv(model, (enum ft_attention)model->layers[i].attention, context);
    *traffic = (struct ft_decode_traffic){
        .dense = (double)sizes->dense_bytes + (double)(model->tied ? sizes->embed_bytes : sizes->head_bytes),
        .state = 2.0 * (double)state.count * element * batch,
        .kv = kv * element * batch};
}

void ft_decode_traffic_experts(struct ft_decode_traffic *traffic, double expert_bytes, double active,
                               double misses)
{
    traffic->missing = misses * expert_bytes;
    traffic->resident = (active - misses) * expert_bytes;
}

/* Bytes per s of what brings in missing experts, and the share of them that the device computes. */
static double mover_rate(const struct ft_ceilings *c, enum ft_strategy strategy, double *fetched)
{
    double both = c->both_cpu_bytes_per_s + c->both_link_bytes_per_s;
    switch (strategy) {
    case FT_STRATEGY_CPU:
        *fetched = 0;
        return c->cpu_expert_bytes_per_s;
    case FT_STRATEGY_HYBRID:
    case FT_STRATEGY_AUTO:
        *fetched = both > 0 ? c->both_link_bytes_per_s / both : 0;
        return both;
    default:
        *fetched = 1;
        return c->link_bytes_per_s;
    }
}

static struct ft_decode_bound bound_without_device(const struct ft_decode_traffic *traffic,
                                                   const struct ft_ceilings *c)
{
    double steady = traffic->dense + traffic->state + traffic->kv,
           experts = traffic->resident + traffic->missing;
    if (!(c->cpu_read_bytes_per_s > 0) || !(c->cpu_expert_bytes_per_s > 0))
        return (struct ft_decode_bound){0};
    return (struct ft_decode_bound){steady / c->cpu_read_bytes_per_s + experts / c->cpu_expert_bytes_per_s,
                                    (steady + experts) / c->cpu_read_bytes_per_s};
}

struct ft_decode_bound ft_decode_bound(const struct ft_decode_traffic *traffic, const struct ft_ceilings *c,
                                       enum ft_strategy strategy, enum ft_device device)
{
    double fetched, mover = mover_rate(c, strategy, &fetched);
    if (device == FT_DEVICE_NONE)
        return bound_without_device(traffic, c);
    if (!(c->device_read_bytes_per_s > 0) || (traffic->missing > 0 && !(mover > 0)))
        return (struct ft_decode_bound){0};
    double read =
        traffic->dense + traffic->state + traffic->kv + traffic->resident + fetched * traffic->missing;
    double computes = read / c->device_read_bytes_per_s;
    double moves = traffic->missing > 0 ? traffic->missing / mover : 0;
    return (struct ft_decode_bound){computes + moves, FT_MAX(computes, moves)};
}
