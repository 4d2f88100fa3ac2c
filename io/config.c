/* SPDX-License-Identifier: Apache-2.0 */
/* config.json of the four families -> struct ft_model. Ranges are checked by ft_model_finish, types here. */
#include "io/checkpoint.h"

#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The inner config (text_config) is asked first, the outer one only where the caller says so. */
struct reader {
    const json_t *inner, *outer;
    const json_t *rope; /* rope_parameters, else rope_scaling, else NULL */
    const char *name;   /* of the file, for messages */
    struct ft_error *err;
};

static const struct {
    const char *model_type;
    enum ft_family family;
} model_types[] = {
    {"qwen3_moe", FT_FAMILY_QWEN3_MOE},          {"qwen3_5_moe", FT_FAMILY_QWEN3_5_MOE},
    {"qwen3_5_moe_text", FT_FAMILY_QWEN3_5_MOE}, {"qwen4_exp", FT_FAMILY_QWEN4_EXP},
    {"qwen4_exp_text", FT_FAMILY_QWEN4_EXP},     {"gpt_oss", FT_FAMILY_GPT_OSS},
};

/* NULL when the key is absent or null: both mean "not stated" in published configs. */
static const json_t *find(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

static int refuse(struct reader *r, int code, const char *key, const json_t *found, const char *wanted)
{
    char *text = json_dumps(found, JSON_ENCODE_ANY | JSON_COMPACT);
    ft_error_set(r->err, code, "%s: %s is %.100s%s, wanted %s", r->name, key, text ? text : "unreadable",
                 text && strlen(text) > 100 ? "..." : "", wanted);
    free(text);
    return code;
}

static int require(struct reader *r, const json_t *value, const char *key, const char *wanted)
{
    return value ? FT_OK
                 : ft_error_set(r->err, FT_FORMAT, "%s: %s is missing, wanted %s", r->name, key, wanted);
}

/* A whole number below 2^63; *out keeps its value when the key is absent. */
static int read_u64_value(struct reader *r, const json_t *value, const char *key, uint64_t *out)
{
    if (!value)
        return FT_OK;
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return refuse(r, FT_FORMAT, key, value, "a whole number that is not negative");
    *out = (uint64_t)json_integer_value(value);
    return FT_OK;
}

static int read_u32_value(struct reader *r, const json_t *value, const char *key, uint32_t *out)
{
    uint64_t wide = *out;
    int status = read_u64_value(r, value, key, &wide);
    if (status)
        return status;
    if (wide > INT32_MAX)
        return refuse(r, FT_FORMAT, key, value, "a whole number below 2^31");
    *out = (uint32_t)wide;
    return FT_OK;
}

static int read_u32(struct reader *r, const char *key, uint32_t *out)
{
    return read_u32_value(r, find(r->inner, key), key, out);
}

static int need_u32(struct reader *r, const char *key, uint32_t *out)
{
    const json_t *value = find(r->inner, key);
    int status = require(r, value, key, "a whole number");
    return status ? status : read_u32_value(r, value, key, out);
}

static int need_u64(struct reader *r, const char *key, uint64_t *out)
{
    const json_t *value = find(r->inner, key);
    int status = require(r, value, key, "a whole number");
    return status ? status : read_u64_value(r, value, key, out);
}

static int read_bool_value(struct reader *r, const json_t *value, const char *key, bool *out)
{
    if (!value)
        return FT_OK;
    if (!json_is_boolean(value))
        return refuse(r, FT_FORMAT, key, value, "true or false");
    *out = json_is_true(value);
    return FT_OK;
}

static int read_bool(struct reader *r, const char *key, bool *out)
{
    return read_bool_value(r, find(r->inner, key), key, out);
}

static int read_real_value(struct reader *r, const json_t *value, const char *key, double *out)
{
    if (!value)
        return FT_OK;
    if (!json_is_number(value))
        return refuse(r, FT_FORMAT, key, value, "a number");
    *out = json_number_value(value);
    return FT_OK;
}

/* One of `count` words; *index keeps its value when the key is absent. */
static int read_word(struct reader *r, const json_t *value, const char *key, const char *const *words,
                     uint32_t count, const char *wanted, uint32_t *index)
{
    if (!value)
        return FT_OK;
    if (!json_is_string(value))
        return refuse(r, FT_FORMAT, key, value, wanted);
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(json_string_value(value), words[i]) == 0) {
            *index = i;
            return FT_OK;
        }
    }
    return refuse(r, FT_UNSUPPORTED, key, value, wanted);
}

struct u32_key {
    const char *key;
    uint32_t *out;
};

static int need_u32_list(struct reader *r, const struct u32_key *keys, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        int status = need_u32(r, keys[i].key, keys[i].out);
        if (status)
            return status;
    }
    return FT_OK;
}

static int read_family(struct reader *r, struct ft_model *m)
{
    const json_t *value = find(r->inner, "model_type");
    if (!value)
        value = find(r->outer, "model_type");
    const char *supported = "qwen3_moe, qwen3_5_moe, qwen4_exp (also with _text) or gpt_oss";
    int status = require(r, value, "model_type", supported);
    if (status)
        return status;
    if (!json_is_string(value))
        return refuse(r, FT_FORMAT, "model_type", value, supported);
    for (size_t i = 0; i < sizeof model_types / sizeof model_types[0]; i++) {
        if (strcmp(json_string_value(value), model_types[i].model_type) == 0) {
            m->family = model_types[i].family;
            snprintf(m->name, sizeof m->name, "%s", model_types[i].model_type);
            return FT_OK;
        }
    }
    return refuse(r, FT_UNSUPPORTED, "model_type", value, supported);
}

/* What a family fixes, and its defaults for keys that may be absent. */
static void set_family_defaults(struct ft_model *m)
{
    bool oss = m->family == FT_FAMILY_GPT_OSS, plain = m->family == FT_FAMILY_QWEN3_MOE;
    m->hc_count = 1;
    m->norm_plus_one = m->attention_gate = !oss && !plain;
    m->qk_norm = !oss;
    m->attention_bias = m->sinks = m->router_bias = m->expert_bias = m->router_softmax_chosen = oss;
    m->topk_renormalise = !oss && !plain;
    m->activation = oss ? FT_ACTIVATION_SWIGLU_OSS : FT_ACTIVATION_SILU;
    m->swiglu_limit = oss ? 7.0f : 0.0f;
    m->output_gate = FT_ACTIVATION_SILU;
}

static int read_eos(struct reader *r, struct ft_model *m)
{
    const json_t *value = find(r->inner, "eos_token_id");
    if (!value)
        value = find(r->outer, "eos_token_id");
    if (!json_is_array(value)) {
        m->eos_count = value ? 1 : 0;
        return read_u32_value(r, value, "eos_token_id", &m->eos[0]);
    }
    if (json_array_size(value) > FT_EOS_MAX)
        return refuse(r, FT_LIMIT, "eos_token_id", value, "at most 16 tokens");
    m->eos_count = (uint32_t)json_array_size(value);
    for (uint32_t i = 0; i < m->eos_count; i++) {
        int status = read_u32_value(r, json_array_get(value, i), "eos_token_id", &m->eos[i]);
        if (status)
            return status;
    }
    return FT_OK;
}

static int read_basics(struct reader *r, struct ft_model *m)
{
    static const char *const acts[] = {"silu"};
    const struct u32_key keys[] = {
        {"hidden_size", &m->hidden},
        {"vocab_size", &m->vocab},
        {"num_hidden_layers", &m->layer_count},
    };
    double eps = 0;
    uint32_t act = 0;
    const json_t *tied = find(r->inner, "tie_word_embeddings");
    int status;
    if ((status = need_u32_list(r, keys, sizeof keys / sizeof keys[0])) ||
        (status = read_u32(r, "max_position_embeddings", &m->position_max)) ||
        (status = read_real_value(r, find(r->inner, "rms_norm_eps"), "rms_norm_eps", &eps)) ||
        (status = read_word(r, find(r->inner, "hidden_act"), "hidden_act", acts, 1, "silu", &act)) ||
        (status = read_bool_value(r, tied ? tied : find(r->outer, "tie_word_embeddings"),
                                  "tie_word_embeddings", &m->tied)) ||
        (status = read_eos(r, m)))
        return status;
    if (m->layer_count > FT_LAYERS_MAX)
        return refuse(r, FT_LIMIT, "num_hidden_layers", find(r->inner, "num_hidden_layers"), "at most 256");
    m->rms_eps = (float)eps;
    return FT_OK;
}

static int read_layer_type(struct reader *r, struct ft_model *m, uint32_t layer, const json_t *value)
{
    static const char *const words[] = {"full_attention", "qwen_sparse_attention", "sliding_attention",
                                        "linear_attention"};
    static const uint8_t kinds[] = {FT_ATTENTION_FULL, FT_ATTENTION_SPARSE, FT_ATTENTION_SLIDING,
                                    FT_ATTENTION_LINEAR};
    static const uint32_t allowed[FT_FAMILY_COUNT] = {
        [FT_FAMILY_QWEN3_MOE] = 1u << FT_ATTENTION_FULL,
        [FT_FAMILY_QWEN3_5_MOE] = 1u << FT_ATTENTION_FULL | 1u << FT_ATTENTION_LINEAR,
        [FT_FAMILY_QWEN4_EXP] =
            1u << FT_ATTENTION_FULL | 1u << FT_ATTENTION_SPARSE | 1u << FT_ATTENTION_LINEAR,
        [FT_FAMILY_GPT_OSS] = 1u << FT_ATTENTION_FULL | 1u << FT_ATTENTION_SLIDING,
    };
    const char *wanted =
        "a layer type of this family (full_attention, qwen_sparse_attention, sliding_attention or "
        "linear_attention)";
    uint32_t index = 0;
    int status = read_word(r, value, "layer_types", words, 4, wanted, &index);
    if (status)
        return status;
    if (!(allowed[m->family] >> kinds[index] & 1))
        return refuse(r, FT_UNSUPPORTED, "layer_types", value, wanted);
    m->layers[layer].attention = kinds[index];
    return FT_OK;
}

static uint8_t default_attention(const struct ft_model *m, uint32_t layer, uint32_t full_interval)
{
    if (m->family == FT_FAMILY_GPT_OSS)
        return layer % 2 == 0 ? FT_ATTENTION_SLIDING : FT_ATTENTION_FULL;
    if (m->family == FT_FAMILY_QWEN3_MOE)
        return FT_ATTENTION_FULL;
    return (layer + 1) % full_interval == 0 ? FT_ATTENTION_FULL : FT_ATTENTION_LINEAR;
}

static int read_layer_types(struct reader *r, struct ft_model *m)
{
    const json_t *types = find(r->inner, "layer_types");
    const json_t *interval_value = find(r->inner, "full_attention_interval");
    uint32_t interval = 4;
    int status = read_u32_value(r, interval_value, "full_attention_interval", &interval);
    if (status)
        return status;
    if (!interval)
        return refuse(r, FT_FORMAT, "full_attention_interval", interval_value, "at least 1");
    if (types && (!json_is_array(types) || json_array_size(types) != m->layer_count))
        return refuse(r, FT_FORMAT, "layer_types", types, "a list of one word per layer (num_hidden_layers)");
    for (uint32_t i = 0; i < m->layer_count; i++) {
        m->layers[i] =
            (struct ft_layer_spec){.attention = default_attention(m, i, interval), .ple = FT_PLE_NONE};
        if (types && (status = read_layer_type(r, m, i, json_array_get(types, i))))
            return status;
        /* In this family full attention goes through the indexer, whatever the layer is called. */
        if (m->family == FT_FAMILY_QWEN4_EXP && m->layers[i].attention == FT_ATTENTION_FULL &&
            find(r->inner, "indexer_n_heads"))
            m->layers[i].attention = FT_ATTENTION_SPARSE;
    }
    return FT_OK;
}

static int read_yarn(struct reader *r, struct ft_model *m)
{
    static const char *const refused[] = {"mscale", "mscale_all_dim"};
    const json_t *original = find(r->rope, "original_max_position_embeddings");
    int status;
    m->yarn.on = m->yarn.truncate = true;
    m->yarn.beta_fast = 32;
    m->yarn.beta_slow = 1;
    m->yarn.original_positions = m->position_max;
    if (!original)
        original = find(r->inner, "original_max_position_embeddings");
    for (size_t i = 0; i < 2; i++)
        if (find(r->rope, refused[i]))
            return refuse(r, FT_UNSUPPORTED, refused[i], find(r->rope, refused[i]),
                          "attention_factor instead");
    if ((status = read_real_value(r, find(r->rope, "factor"), "factor", &m->yarn.factor)) ||
        (status = read_real_value(r, find(r->rope, "beta_fast"), "beta_fast", &m->yarn.beta_fast)) ||
        (status = read_real_value(r, find(r->rope, "beta_slow"), "beta_slow", &m->yarn.beta_slow)) ||
        (status = read_real_value(r, find(r->rope, "attention_factor"), "attention_factor",
                                  &m->yarn.attention_factor)) ||
        (status =
             read_real_value(r, original, "original_max_position_embeddings", &m->yarn.original_positions)))
        return status;
    return read_bool_value(r, find(r->rope, "truncate"), "truncate", &m->yarn.truncate);
}

static int read_rotary(struct reader *r, struct ft_model *m)
{
    static const char *const types[] = {"default", "mrope", "yarn"};
    const json_t *type = find(r->rope, "rope_type");
    const json_t *theta = find(r->rope, "rope_theta");
    const json_t *partial = find(r->rope, "partial_rotary_factor");
    double factor = m->family == FT_FAMILY_QWEN3_5_MOE ? 0.25 : 1;
    uint32_t index = 0;
    int status;
    if (r->rope && !json_is_object(r->rope))
        return refuse(r, FT_FORMAT, "rope_parameters", r->rope, "an object");
    type = type ? type : find(r->rope, "type"); /* older configs */
    theta = theta ? theta : find(r->inner, "rope_theta");
    partial = partial ? partial : find(r->inner, "partial_rotary_factor");
    if ((status = require(r, theta, "rope_theta", "a number")) ||
        (status = read_real_value(r, theta, "rope_theta", &m->rotary_theta)) ||
        (status = read_real_value(r, partial, "partial_rotary_factor", &factor)) ||
        (status = read_word(r, type, "rope_type", types, 3, "default or yarn", &index)))
        return status;
    if (!(factor > 0 && factor <= 1))
        return refuse(r, FT_FORMAT, "partial_rotary_factor", partial, "a number above 0 and at most 1");
    if (factor < 1 && !m->norm_plus_one)
        return refuse(r, FT_UNSUPPORTED, "partial_rotary_factor", partial, "1 in this family");
    m->rotary_dim = (uint32_t)(m->head_dim * factor);
    return index == 2 ? read_yarn(r, m) : FT_OK;
}

static int read_attention(struct reader *r, struct ft_model *m)
{
    bool use_window = false;
    int status;
    const struct u32_key keys[] = {
        {"num_attention_heads", &m->head_count},
        {"num_key_value_heads", &m->kv_head_count},
    };
    if ((status = need_u32_list(r, keys, sizeof keys / sizeof keys[0])))
        return status;
    m->head_dim = m->head_count ? m->hidden / m->head_count : 0;
    if ((status = read_u32(r, "head_dim", &m->head_dim)) ||
        (status = read_bool(r, "attention_bias", &m->attention_bias)) ||
        (status = read_bool(r, "use_sliding_window", &use_window)))
        return status;
    if (m->family == FT_FAMILY_GPT_OSS && (status = read_u32(r, "sliding_window", &m->window)))
        return status;
    if (m->attention_gate && (status = read_bool(r, "attn_output_gate", &m->attention_gate)))
        return status;
    if (use_window && m->family != FT_FAMILY_GPT_OSS && find(r->inner, "sliding_window"))
        return refuse(r, FT_UNSUPPORTED, "use_sliding_window", find(r->inner, "use_sliding_window"),
                      "false in this family");
    return read_rotary(r, m);
}

static int read_linear(struct reader *r, struct ft_model *m)
{
    static const char *const acts[] = {"silu", "sigmoid"};
    const struct u32_key keys[] = {
        {"linear_num_key_heads", &m->key_head_count}, {"linear_num_value_heads", &m->value_head_count},
        {"linear_key_head_dim", &m->key_dim},         {"linear_value_head_dim", &m->value_dim},
        {"linear_conv_kernel_dim", &m->conv_taps},
    };
    uint32_t act = 0; /* hidden_act, which is silu */
    int status = read_word(r, find(r->inner, "output_gate_type"), "output_gate_type", acts, 2,
                           "silu or sigmoid", &act);
    m->output_gate = act ? FT_ACTIVATION_SIGMOID : FT_ACTIVATION_SILU;
    for (uint32_t i = 0; i < m->layer_count && !status; i++)
        if (m->layers[i].attention == FT_ATTENTION_LINEAR)
            return need_u32_list(r, keys, sizeof keys / sizeof keys[0]);
    return status;
}

static int read_indexer(struct reader *r, struct ft_model *m)
{
    const struct u32_key keys[] = {
        {"indexer_n_heads", &m->indexer_head_count},
        {"indexer_head_dim", &m->indexer_dim},
        {"indexer_budget", &m->indexer_budget},
        {"indexer_compress_ratio", &m->indexer_ratio},
    };
    uint32_t kv_heads = 1;
    int status = read_u32(r, "indexer_kv_heads", &kv_heads);
    if (status)
        return status;
    if (kv_heads != 1)
        return refuse(r, FT_UNSUPPORTED, "indexer_kv_heads", find(r->inner, "indexer_kv_heads"), "1");
    for (uint32_t i = 0; i < m->layer_count; i++)
        if (m->layers[i].attention == FT_ATTENTION_SPARSE)
            return need_u32_list(r, keys, sizeof keys / sizeof keys[0]);
    return FT_OK;
}

static int read_dense_layers(struct reader *r, struct ft_model *m)
{
    const json_t *only = find(r->inner, "mlp_only_layers");
    const json_t *step_value = find(r->inner, "decoder_sparse_step");
    uint32_t step = 1;
    int status = read_u32_value(r, step_value, "decoder_sparse_step", &step);
    if (!status)
        status = read_u32(r, "intermediate_size", &m->dense_width);
    if (status)
        return status;
    if (!step)
        return refuse(r, FT_FORMAT, "decoder_sparse_step", step_value, "at least 1");
    if (only && !json_is_array(only))
        return refuse(r, FT_FORMAT, "mlp_only_layers", only, "a list of layers");
    for (uint32_t i = 0; i < m->layer_count; i++)
        m->layers[i].dense = (i + 1) % step != 0;
    for (size_t i = 0; i < json_array_size(only); i++) {
        uint32_t layer = FT_NONE;
        if ((status = read_u32_value(r, json_array_get(only, i), "mlp_only_layers", &layer)))
            return status;
        if (layer >= m->layer_count)
            return refuse(r, FT_FORMAT, "mlp_only_layers", only, "layers from 0, below num_hidden_layers");
        m->layers[layer].dense = true;
    }
    return FT_OK;
}

static int read_feed_forward(struct reader *r, struct ft_model *m)
{
    bool oss = m->family == FT_FAMILY_GPT_OSS;
    const char *experts = find(r->inner, "num_experts") ? "num_experts" : "num_local_experts";
    const char *topk =
        oss && !find(r->inner, "num_experts_per_tok") ? "experts_per_token" : "num_experts_per_tok";
    const struct u32_key keys[] = {
        {experts, &m->expert_count},
        {topk, &m->topk},
        {oss ? "intermediate_size" : "moe_intermediate_size", &m->expert_width},
    };
    double limit = (double)m->swiglu_limit;
    int status = need_u32_list(r, keys, sizeof keys / sizeof keys[0]);
    if (status)
        return status;
    if (oss) {
        status = read_real_value(r, find(r->inner, "swiglu_limit"), "swiglu_limit", &limit);
        m->swiglu_limit = (float)limit;
        return status;
    }
    if ((status = read_bool(r, "norm_topk_prob", &m->topk_renormalise)))
        return status;
    return m->family == FT_FAMILY_QWEN3_MOE
               ? read_dense_layers(r, m)
               : need_u32(r, "shared_expert_intermediate_size", &m->shared_width);
}

static int read_ple_layers(struct reader *r, struct ft_model *m)
{
    const json_t *ids = find(r->inner, "ple_layer_ids");
    if (ids && !json_is_array(ids))
        return refuse(r, FT_FORMAT, "ple_layer_ids", ids, "a list of layers counted from 1");
    if (json_array_size(ids) > FT_PLE_LAYERS_MAX)
        return refuse(r, FT_LIMIT, "ple_layer_ids", ids, "at most 8 layers");
    for (uint32_t i = 0; i < json_array_size(ids); i++) {
        uint32_t id = 0, at = m->ple_count;
        int status = read_u32_value(r, json_array_get(ids, i), "ple_layer_ids", &id);
        if (status)
            return status;
        if (id < 1 || id > m->layer_count)
            return refuse(r, FT_FORMAT, "ple_layer_ids", ids,
                          "layers counted from 1, up to num_hidden_layers");
        for (; at > 0 && m->ple[at - 1].layer > id - 1; at--) /* ascending order gives the PLE index */
            m->ple[at].layer = m->ple[at - 1].layer;
        m->ple[at].layer = id - 1;
        m->ple_count++;
    }
    return FT_OK;
}

static int read_ple(struct reader *r, struct ft_model *m)
{
    const struct u32_key keys[] = {
        {"ngram_size", &m->ngram_size},
        {"heads_per_ngram", &m->heads_per_ngram},
        {"ple_embed_dim", &m->ple_embed_dim},
        {"ple_conv_kernel_size", &m->ple_taps},
    };
    const json_t *seed = find(r->inner, "seed");
    int status = read_ple_layers(r, m);
    if (status || !m->ple_count)
        return status;
    if ((status = need_u32_list(r, keys, sizeof keys / sizeof keys[0])) ||
        (status = need_u64(r, "ngram_vocab_size_base", &m->ngram_vocab_base)) ||
        (status = need_u64(r, "make_ngram_vocab_size_divisible_by", &m->ngram_vocab_multiple)) ||
        (status = read_u32(r, "split_ngram_parts", &m->ple_shards)) ||
        (status = require(r, seed, "seed", "a whole number")))
        return status;
    if (!json_is_integer(seed))
        return refuse(r, FT_FORMAT, "seed", seed, "a whole number");
    m->ple_seed = (uint64_t)json_integer_value(seed);
    return FT_OK;
}

static int read_streams(struct reader *r, struct ft_model *m)
{
    const struct u32_key keys[] = {{"hc_count", &m->hc_count}, {"hc_lowrank", &m->hc_lowrank}};
    int status = need_u32_list(r, keys, 2);
    if (status)
        return status;
    if (m->hc_count ==
        1) /* 1 means "ordinary residual" in struct ft_model, which this family does not have */
        return refuse(r, FT_UNSUPPORTED, "hc_count", find(r->inner, "hc_count"), "at least 2");
    return read_ple(r, m);
}

static int read_quantisation(struct reader *r, struct ft_model *m)
{
    static const char *const methods[] = {"modelopt", "compressed-tensors", "fp8", "mxfp4"};
    const json_t *quant = find(r->inner, "quantization_config");
    uint32_t method = 0, block[2] = {0, 0};
    int status;
    quant = quant ? quant : find(r->outer, "quantization_config");
    if (!quant)
        return FT_OK;
    if (!json_is_object(quant))
        return refuse(r, FT_FORMAT, "quantization_config", quant, "an object");
    if ((status = read_word(r, find(quant, "quant_method"), "quant_method", methods, 4,
                            "modelopt, compressed-tensors, fp8 or mxfp4", &method)))
        return status;
    const json_t *size = find(quant, "weight_block_size");
    if (!size)
        return FT_OK;
    if (!json_is_array(size) || json_array_size(size) != 2)
        return refuse(r, FT_FORMAT, "weight_block_size", size, "two whole numbers");
    for (uint32_t i = 0; i < 2; i++) {
        if ((status = read_u32_value(r, json_array_get(size, i), "weight_block_size", &block[i])))
            return status;
        if (!block[i] || block[i] > UINT16_MAX)
            return refuse(r, FT_FORMAT, "weight_block_size", size, "two whole numbers between 1 and 65535");
    }
    m->block_out = (uint16_t)block[0];
    m->block_in = (uint16_t)block[1];
    return FT_OK;
}

static int read_model(struct reader *r, struct ft_model *m)
{
    int status;
    if ((status = read_family(r, m)))
        return status;
    set_family_defaults(m);
    if ((status = read_basics(r, m)) || (status = read_layer_types(r, m)) ||
        (status = read_attention(r, m)) || (status = read_feed_forward(r, m)) ||
        (status = read_quantisation(r, m)))
        return status;
    if (m->norm_plus_one && (status = read_linear(r, m)))
        return status;
    if (m->family != FT_FAMILY_QWEN4_EXP)
        return FT_OK;
    status = read_indexer(r, m);
    return status ? status : read_streams(r, m);
}

int ft_config_parse(struct ft_model *model, const char *json, size_t bytes, const char *name,
                    struct ft_error *err)
{
    json_error_t where;
    *model = (struct ft_model){.family = FT_FAMILY_COUNT};
    json_t *root = json_loadb(json, bytes, JSON_REJECT_DUPLICATES, &where);
    if (!root)
        return ft_error_set(err, FT_FORMAT, "%s: line %d, column %d: %s", name, where.line, where.column,
                            where.text);
    struct reader r = {.inner = root, .outer = root, .name = name, .err = err};
    const json_t *text = find(root, "text_config");
    int status = FT_OK;
    if (!json_is_object(root))
        status = ft_error_set(err, FT_FORMAT, "%s: is not a JSON object", name);
    else if (text && !json_is_object(text))
        status = refuse(&r, FT_FORMAT, "text_config", text, "an object");
    if (!status) {
        r.inner = text ? text : root;
        r.rope = find(r.inner, "rope_parameters");
        if (!r.rope)
            r.rope = find(r.inner, "rope_scaling");
        status = read_model(&r, model);
        if (!status && (status = ft_model_finish(model, err)))
            ft_error_prepend(err, "%s", name);
    }
    json_decref(root);
    return status;
}
