/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/model.h"

#include <math.h>
#include <string.h>

/* Beyond every published model; they keep products of two sizes inside 64 bits and shapes inside 32. */
#define SIZE_MAX_HIDDEN (1u << 20)
#define SIZE_MAX_VOCAB (1u << 30)
#define SIZE_MAX_HEADS 4096u
#define SIZE_MAX_HEAD_DIM 4096u
#define SIZE_MAX_TAPS 64u
#define SIZE_MAX_TOKENS (1u << 30)
#define NGRAM_BASE_MAX (1ull << 40)
#define NGRAM_MULTIPLE_MAX (1ull << 32)

/* Offsets inside state blocks and pages are rounded to a cache line of f32, so that kernels may load aligned. */
#define LINE_ELEMENTS 16u

static const char *const family_names[FT_FAMILY_COUNT] = {"qwen3_moe", "qwen3_5_moe", "qwen4_exp", "gpt_oss"};
static const char *const attention_names[FT_ATTENTION_COUNT] = {"full", "sparse", "sliding", "linear"};

const char *ft_family_name(enum ft_family family)
{
    return (unsigned)family < FT_FAMILY_COUNT ? family_names[family] : "?";
}

const char *ft_attention_name(enum ft_attention attention)
{
    return (unsigned)attention < FT_ATTENTION_COUNT ? attention_names[attention] : "?";
}

struct range {
    const char *key; /* of config.json */
    uint64_t value, min, max;
    int code_above; /* FT_LIMIT when max is a limit of ours, FT_FORMAT when it is absurd */
};

static int check_ranges(const struct range *ranges, size_t count, struct ft_error *err)
{
    for (size_t i = 0; i < count; i++) {
        const struct range *r = &ranges[i];
        if (r->value >= r->min && r->value <= r->max)
            continue;
        return ft_error_set(err, r->value < r->min ? FT_FORMAT : r->code_above,
                            "%s is %llu (or absent), wanted a value between %llu and %llu", r->key,
                            (unsigned long long)r->value, (unsigned long long)r->min,
                            (unsigned long long)r->max);
    }
    return FT_OK;
}

static int check_real(const char *key, double value, double min, double max, struct ft_error *err)
{
    if (value >= min && value <= max) /* false for NaN */
        return FT_OK;
    return ft_error_set(err, FT_FORMAT, "%s is %g (or absent), wanted a value between %g and %g", key, value,
                        min, max);
}

static bool has_attention(const struct ft_model *model, enum ft_attention attention)
{
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].attention == attention)
            return true;
    return false;
}

static bool has_softmax_attention(const struct ft_model *model)
{
    return has_attention(model, FT_ATTENTION_FULL) || has_attention(model, FT_ATTENTION_SPARSE) ||
           has_attention(model, FT_ATTENTION_SLIDING);
}

static int check_basics(const struct ft_model *m, struct ft_error *err)
{
    const struct range ranges[] = {
        {"hidden_size", m->hidden, 1, SIZE_MAX_HIDDEN, FT_FORMAT},
        {"vocab_size", m->vocab, 1, SIZE_MAX_VOCAB, FT_FORMAT},
        {"num_hidden_layers", m->layer_count, 1, FT_LAYERS_MAX, FT_LIMIT},
        {"eos_token_id (number of entries)", m->eos_count, 0, FT_EOS_MAX, FT_LIMIT},
        {"hc_count", m->hc_count, 1, FT_HC_MAX, FT_LIMIT},
    };
    int status = check_ranges(ranges, sizeof ranges / sizeof ranges[0], err);
    if (status)
        return status;
    for (uint32_t i = 0; i < m->eos_count; i++)
        if (m->eos[i] >= m->vocab)
            return ft_error_set(err, FT_FORMAT, "eos_token_id is %u, wanted a token below vocab_size %u",
                                m->eos[i], m->vocab);
    for (uint32_t i = 0; i < m->layer_count; i++)
        if (m->layers[i].attention >= FT_ATTENTION_COUNT)
            return ft_error_set(err, FT_FORMAT, "layer_types[%u] is not a known kind of attention", i);
    if (m->hc_count > 1 && !m->hc_lowrank)
        return ft_error_set(err, FT_FORMAT, "hc_lowrank is 0 (or absent), wanted at least 1");
    if (m->hc_lowrank > SIZE_MAX_HIDDEN)
        return ft_error_set(err, FT_FORMAT, "hc_lowrank is %u, wanted at most %u", m->hc_lowrank,
                            SIZE_MAX_HIDDEN);
    return check_real("rms_norm_eps", (double)m->rms_eps, 1e-30, 1, err);
}

static int check_rotary(const struct ft_model *m, struct ft_error *err)
{
    int status = check_real("rope_theta", m->rotary_theta, 1.0000001, 1e30, err);
    if (status)
        return status;
    if (m->rotary_dim < 2 || m->rotary_dim > m->head_dim || m->rotary_dim % 2)
        return ft_error_set(
            err, FT_FORMAT,
            "head_dim %u with its partial_rotary_factor rotates %u dims, wanted an even number "
            "between 2 and head_dim",
            m->head_dim, m->rotary_dim);
    if (!m->yarn.on)
        return FT_OK;
    if ((status = check_real("factor (yarn)", m->yarn.factor, 1, 1e6, err)) ||
        (status = check_real("beta_fast (yarn)", m->yarn.beta_fast, 1e-6, 1e9, err)) ||
        (status = check_real("beta_slow (yarn)", m->yarn.beta_slow, 1e-6, 1e9, err)) ||
        (status = check_real("original_max_position_embeddings (yarn)", m->yarn.original_positions, 1, 1e12,
                             err)) ||
        (status = check_real("attention_factor (yarn)", m->yarn.attention_factor, 0, 1e6, err)))
        return status;
    return FT_OK;
}

static int check_attention(const struct ft_model *m, struct ft_error *err)
{
    const struct range ranges[] = {
        {"num_attention_heads", m->head_count, 1, SIZE_MAX_HEADS, FT_FORMAT},
        {"num_key_value_heads", m->kv_head_count, 1, m->head_count, FT_FORMAT},
        {"head_dim", m->head_dim, 1, SIZE_MAX_HEAD_DIM, FT_FORMAT},
    };
    int status;
    if (!has_softmax_attention(m))
        return FT_OK;
    if ((status = check_ranges(ranges, sizeof ranges / sizeof ranges[0], err)))
        return status;
    if (m->head_count % m->kv_head_count)
        return ft_error_set(err, FT_FORMAT,
                            "num_attention_heads %u is not a multiple of num_key_value_heads %u",
                            m->head_count, m->kv_head_count);
    if (has_attention(m, FT_ATTENTION_SLIDING) && !m->window)
        return ft_error_set(err, FT_FORMAT,
                            "sliding_window is 0 or absent, but layer_types has sliding layers");
    return check_rotary(m, err);
}

static int check_indexer(const struct ft_model *m, struct ft_error *err)
{
    const struct range ranges[] = {
        {"indexer_n_heads", m->indexer_head_count, 1, SIZE_MAX_HEADS, FT_FORMAT},
        {"indexer_head_dim", m->indexer_dim, m->rotary_dim, SIZE_MAX_HEAD_DIM, FT_FORMAT},
        {"indexer_compress_ratio", m->indexer_ratio, 1, 4096, FT_FORMAT},
        {"indexer_budget", m->indexer_budget, m->indexer_ratio, SIZE_MAX_TOKENS, FT_FORMAT},
    };
    return has_attention(m, FT_ATTENTION_SPARSE) ? check_ranges(ranges, sizeof ranges / sizeof ranges[0], err)
                                                 : FT_OK;
}

static int check_linear(const struct ft_model *m, struct ft_error *err)
{
    const struct range ranges[] = {
        {"linear_num_key_heads", m->key_head_count, 1, SIZE_MAX_HEADS, FT_FORMAT},
        {"linear_num_value_heads", m->value_head_count, m->key_head_count, SIZE_MAX_HEADS, FT_FORMAT},
        {"linear_key_head_dim", m->key_dim, 1, SIZE_MAX_HEAD_DIM, FT_FORMAT},
        {"linear_value_head_dim", m->value_dim, 1, SIZE_MAX_HEAD_DIM, FT_FORMAT},
        {"linear_conv_kernel_dim", m->conv_taps, 1, SIZE_MAX_TAPS, FT_FORMAT},
    };
    int status;
    if (!has_attention(m, FT_ATTENTION_LINEAR))
        return FT_OK;
    if ((status = check_ranges(ranges, sizeof ranges / sizeof ranges[0], err)))
        return status;
    if (m->value_head_count % m->key_head_count)
        return ft_error_set(err, FT_FORMAT,
                            "linear_num_value_heads %u is not a multiple of linear_num_key_heads %u",
                            m->value_head_count, m->key_head_count);
    if (m->output_gate != FT_ACTIVATION_SILU && m->output_gate != FT_ACTIVATION_SIGMOID)
        return ft_error_set(err, FT_UNSUPPORTED, "output_gate_type is neither silu nor sigmoid");
    return FT_OK;
}

static int check_feed_forward(const struct ft_model *m, struct ft_error *err)
{
    bool experts = false, dense = false;
    for (uint32_t i = 0; i < m->layer_count; i++) {
        experts |= !m->layers[i].dense;
        dense |= m->layers[i].dense;
    }
    const struct range expert_ranges[] = {
        {"num_experts", m->expert_count, 1, FT_EXPERTS_MAX, FT_LIMIT},
        {"num_experts_per_tok", m->topk, 1, FT_MIN(m->expert_count, FT_TOPK_MAX),
         m->topk > m->expert_count ? FT_FORMAT : FT_LIMIT},
        {m->family == FT_FAMILY_GPT_OSS ? "intermediate_size" : "moe_intermediate_size", m->expert_width, 1,
         SIZE_MAX_HIDDEN, FT_FORMAT},
        {"shared_expert_intermediate_size", m->shared_width, 0, SIZE_MAX_HIDDEN, FT_FORMAT},
    };
    const struct range dense_range = {"intermediate_size", m->dense_width, 1, SIZE_MAX_HIDDEN, FT_FORMAT};
    int status =
        experts ? check_ranges(expert_ranges, sizeof expert_ranges / sizeof expert_ranges[0], err) : FT_OK;
    if (!status && dense)
        status = check_ranges(&dense_range, 1, err);
    if (!status && m->activation == FT_ACTIVATION_SWIGLU_OSS)
        status = check_real("swiglu_limit", (double)m->swiglu_limit, 1e-6, 1e6, err);
    return status;
}

static uint64_t multiply_mod(uint64_t a, uint64_t b, uint64_t n)
{
    return (uint64_t)((unsigned __int128)a * b % n);
}

static uint64_t power_mod(uint64_t base, uint64_t exponent, uint64_t n)
{
    uint64_t result = 1;
    for (base %= n; exponent; exponent >>= 1) {
        if (exponent & 1)
            result = multiply_mod(result, base, n);
        base = multiply_mod(base, base, n);
    }
    return result;
}

/* Miller-Rabin with the first twelve primes as bases, which decides every n below 2^64 (Sorenson and Webster 2015). */
static bool is_prime(uint64_t n)
{
    static const uint8_t bases[] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};
    uint32_t twos = 0;
    if (n < 2)
        return false;
    for (size_t i = 0; i < sizeof bases; i++)
        if (n % bases[i] == 0)
            return n == bases[i];
    uint64_t odd = n - 1;
    for (; odd % 2 == 0; odd /= 2)
        twos++;
    for (size_t i = 0; i < sizeof bases; i++) {
        uint64_t x = power_mod(bases[i], odd, n);
        bool passes = x == 1 || x == n - 1;
        for (uint32_t r = 1; r < twos && !passes; r++) {
            x = multiply_mod(x, x, n);
            passes = x == n - 1;
        }
        if (!passes)
            return false;
    }
    return true;
}

static int check_ple(const struct ft_model *m, struct ft_error *err)
{
    uint64_t heads = (uint64_t)(m->ngram_size ? m->ngram_size - 1 : 0) * m->heads_per_ngram;
    const struct range ranges[] = {
        {"ple_layer_ids (number of entries)", m->ple_count, 1, FT_PLE_LAYERS_MAX, FT_LIMIT},
        {"ngram_size", m->ngram_size, 2, FT_NGRAM_MAX, FT_LIMIT},
        {"heads_per_ngram", m->heads_per_ngram, 1, FT_PLE_HEADS_MAX, FT_LIMIT},
        {"(ngram_size - 1) * heads_per_ngram", heads, 1, FT_PLE_HEADS_MAX, FT_LIMIT},
        {"ple_embed_dim", m->ple_embed_dim, 1, SIZE_MAX_HIDDEN, FT_FORMAT},
        {"ple_conv_kernel_size", m->ple_taps, 1, SIZE_MAX_TAPS, FT_FORMAT},
        {"ngram_vocab_size_base", m->ngram_vocab_base, 1, NGRAM_BASE_MAX, FT_FORMAT},
        {"make_ngram_vocab_size_divisible_by", m->ngram_vocab_multiple, 1, NGRAM_MULTIPLE_MAX, FT_FORMAT},
        {"eos_token_id (number of entries; the n-gram hash needs one)", m->eos_count, 1, FT_EOS_MAX,
         FT_LIMIT},
    };
    int status = check_ranges(ranges, sizeof ranges / sizeof ranges[0], err);
    if (status)
        return status;
    if (m->ple_embed_dim % heads)
        return ft_error_set(err, FT_FORMAT, "ple_embed_dim %u does not divide into %llu heads",
                            m->ple_embed_dim, (unsigned long long)heads);
    for (uint32_t p = 0; p < m->ple_count; p++)
        if (m->ple[p].layer >= m->layer_count || (p && m->ple[p].layer <= m->ple[p - 1].layer))
            return ft_error_set(err, FT_FORMAT,
                                "ple_layer_ids has %llu, wanted distinct numbers between 1 and "
                                "num_hidden_layers %u",
                                (unsigned long long)m->ple[p].layer + 1, m->layer_count);
    return FT_OK;
}

/* Source: the n-gram embedding of the qwen4_exp reference implementation. */
static void derive_ple(struct ft_model *m)
{
    uint64_t candidate = m->ngram_vocab_base - 1; /* the search goes on from table to table */
    for (uint32_t p = 0; p < m->ple_count; p++) {
        struct ft_ple_spec *spec = &m->ple[p];
        uint64_t total = 0;
        spec->head_count = (m->ngram_size - 1) * m->heads_per_ngram;
        spec->row_width = m->ple_embed_dim / spec->head_count;
        for (uint32_t h = 0; h < spec->head_count; h++) {
            do
                candidate++;
            while (!is_prime(candidate)); /* Bertrand: ends below 2 * candidate */
            spec->head_rows[h] = candidate;
            spec->head_offset[h] = total;
            total += candidate;
        }
        spec->row_count = ft_round_up(total, m->ngram_vocab_multiple);
        uint64_t half = FT_MAX((uint64_t)INT64_MAX / m->vocab / 2, 1u);
        for (uint32_t i = 0; i < m->ngram_size; i++) {
            uint64_t seed = m->ple_seed + 10007ull * p + FT_SPLITMIX_GAMMA * (i + 1ull);
            spec->multiplier[i] = 2 * (ft_splitmix64(seed) % half) + 1;
        }
        m->layers[spec->layer].ple = (uint8_t)p;
    }
}

int ft_model_finish(struct ft_model *model, struct ft_error *err)
{
    int status;
    if ((unsigned)model->family >= FT_FAMILY_COUNT)
        return ft_error_set(err, FT_UNSUPPORTED, "model_type \"%s\" is not supported", model->name);
    if ((status = check_basics(model, err)) || (status = check_attention(model, err)) ||
        (status = check_indexer(model, err)) || (status = check_linear(model, err)) ||
        (status = check_feed_forward(model, err)))
        return status;
    for (uint32_t i = 0; i < model->layer_count; i++)
        model->layers[i].ple = FT_PLE_NONE;
    if (model->ple_count) {
        if ((status = check_ple(model, err)))
            return status;
        derive_ple(model);
    }
    model->rotary_scale = 1;
    if (model->yarn.on)
        model->rotary_scale = model->yarn.attention_factor > 0 ? model->yarn.attention_factor
                                                               : 0.1 * log(model->yarn.factor) + 1;
    return FT_OK;
}

/* Source: YaRN (Peng et al. 2023), in the form of the reference implementation of gpt_oss. */
static double yarn_correction(const struct ft_model *model, double rotations)
{
    return (double)model->rotary_dim * log(model->yarn.original_positions / (2 * M_PI * rotations)) /
           (2 * log(model->rotary_theta));
}

void ft_model_rotary(const struct ft_model *model, double *frequencies, double *scale)
{
    double low = 0, high = 0;
    if (model->yarn.on) {
        low = yarn_correction(model, model->yarn.beta_fast);
        high = yarn_correction(model, model->yarn.beta_slow);
        if (model->yarn.truncate) {
            low = floor(low);
            high = ceil(high);
        }
        low = fmax(low, 0);
        high = fmin(high, (double)model->rotary_dim - 1);
        if (low == high)
            high += 0.001; /* as the reference does, so that the ramp stays finite */
    }
    for (uint32_t i = 0; i < model->rotary_dim / 2; i++) {
        double frequency = pow(model->rotary_theta, -2.0 * i / model->rotary_dim);
        if (model->yarn.on) {
            double t = fmin(fmax((i - low) / (high - low), 0), 1);
            frequency = frequency * (1 - t) + frequency * t / model->yarn.factor;
        }
        frequencies[i] = frequency;
    }
    *scale = model->rotary_scale;
}

void ft_model_ple_rows(const struct ft_model *model, uint32_t p, const uint32_t *history,
                       uint32_t history_count, uint64_t *rows)
{
    const struct ft_ple_spec *spec = &model->ple[p];
    uint64_t mixed = history[0] * spec->multiplier[0]; /* wraps like the reference's int64 */
    bool cut = false; /* an eos among the predecessors hides everything before it */
    for (uint32_t i = 1; i < model->ngram_size; i++) {
        uint32_t token = !cut && i < history_count ? history[i] : model->eos[0];
        cut |= token == model->eos[0];
        mixed ^= token * spec->multiplier[i];
        for (uint32_t j = 0; j < model->heads_per_ngram; j++) {
            uint32_t head = (i - 1) * model->heads_per_ngram + j;
            int64_t size = (int64_t)spec->head_rows[head];
            int64_t rest = (int64_t)mixed % size;
            rows[head] = spec->head_offset[head] + (uint64_t)(rest < 0 ? rest + size : rest);
        }
    }
}

static uint64_t take(uint64_t *count, uint64_t elements)
{
    uint64_t at = *count;
    *count += ft_round_up(elements, LINE_ELEMENTS);
    return at;
}

void ft_state_layout_init(struct ft_state_layout *layout, const struct ft_model *model)
{
    ft_state_layout_init_layers(layout, model, 0, model->layer_count);
}

void ft_state_layout_init_layers(struct ft_state_layout *layout, const struct ft_model *model, uint32_t begin,
                                 uint32_t end)
{
    memset(layout, 0xff, sizeof *layout); /* what a layer does not have is UINT64_MAX */
    layout->count = 0;
    for (uint32_t i = begin; i < end; i++) {
        if (model->layers[i].attention != FT_ATTENTION_LINEAR)
            continue;
        layout->delta_offset[i] =
            take(&layout->count, (uint64_t)model->value_head_count * model->key_dim * model->value_dim);
        layout->conv_offset[i] =
            take(&layout->count, (uint64_t)(model->conv_taps - 1) * ft_model_conv_channels(model));
    }
    for (uint32_t p = 0; p < model->ple_count; p++)
        if (model->ple[p].layer >= begin && model->ple[p].layer < end)
            layout->ple_offset[p] = take(&layout->count, (uint64_t)(model->ple_taps - 1) * model->ngram_size *
                                                             model->hc_count * model->hidden);
    for (uint32_t i = begin; i < end; i++)
        if (model->layers[i].attention == FT_ATTENTION_SPARSE)
            layout->indexer_offset[i] =
                take(&layout->count, (uint64_t)model->indexer_ratio * model->indexer_dim);
}

#ifdef FT_TINY
#define PAGE_TOKENS_MIN 8u /* page boundaries are crossed every day */
#else
#define PAGE_TOKENS_MIN 64u
#endif

void ft_kv_layout_init(struct ft_kv_layout *layout, const struct ft_model *model)
{
    ft_kv_layout_init_layers(layout, model, 0, model->layer_count);
}

void ft_kv_layout_init_layers(struct ft_kv_layout *layout, const struct ft_model *model, uint32_t begin,
                              uint32_t end)
{
    bool sparse = has_attention(model, FT_ATTENTION_SPARSE);
    memset(layout, 0xff, sizeof *layout); /* what a layer does not have is UINT64_MAX */
    layout->count = 0;
    layout->page_tokens = (uint32_t)ft_round_up(PAGE_TOKENS_MIN, sparse ? model->indexer_ratio : 1);
    uint64_t values = (uint64_t)model->kv_head_count * layout->page_tokens * model->head_dim;
    for (uint32_t i = begin; i < end; i++) {
        if (model->layers[i].attention == FT_ATTENTION_LINEAR)
            continue;
        layout->k_offset[i] = take(&layout->count, values);
        layout->v_offset[i] = take(&layout->count, values);
        if (model->layers[i].attention == FT_ATTENTION_SPARSE)
            layout->indexer_offset[i] = take(
                &layout->count, (uint64_t)(layout->page_tokens / model->indexer_ratio) * model->indexer_dim);
    }
}
