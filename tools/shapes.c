/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/shapes.h"

#include "io/checkpoint.h"
#include "io/file.h"
#include "tools/options.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROPE_THETA_DEFAULT 1e6
#define SHAPE_BYTES_MAX (16ull << 20)
#define PLE_HEAD_ROWS_MIN 100000ull

/* From tests/data/cases/shapes.json; a test compares them. */
static const struct {
    const char *name, *config;
} shapes[] = {
    {"qwen3.8-flash-next",
     "{\"model_type\": \"qwen4_exp\", \"hidden_size\": 2560, \"num_hidden_layers\": 48, "
     "\"full_attention_interval\": 4, \"vocab_size\": 248320, \"num_experts\": 512, "
     "\"num_experts_per_tok\": 10, \"moe_intermediate_size\": 640, "
     "\"shared_expert_intermediate_size\": 640, \"num_attention_heads\": 24, "
     "\"num_key_value_heads\": 2, \"head_dim\": 256, \"partial_rotary_factor\": 0.25, "
     "\"rope_theta\": 10000000, \"linear_num_key_heads\": 16, \"linear_num_value_heads\": 48, "
     "\"linear_key_head_dim\": 128, \"linear_value_head_dim\": 128, \"linear_conv_kernel_dim\": 4, "
     "\"output_gate_type\": \"sigmoid\", \"hc_count\": 4, \"hc_lowrank\": 320, \"indexer_n_heads\": 4, "
     "\"indexer_kv_heads\": 1, \"indexer_head_dim\": 128, \"indexer_budget\": 2048, "
     "\"indexer_compress_ratio\": 4, \"ple_layer_ids\": [2], \"ple_embed_dim\": 2560, "
     "\"ple_conv_kernel_size\": 4, \"ngram_size\": 3, \"heads_per_ngram\": 8, "
     "\"ngram_vocab_size_base\": 20000000, \"make_ngram_vocab_size_divisible_by\": 128, "
     "\"split_ngram_parts\": 128, \"eos_token_id\": 248044, \"rms_norm_eps\": 1e-06, "
     "\"max_position_embeddings\": 262144, "
     "\"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\"}}"},
    {"qwen3.6-35b-a3b",
     "{\"model_type\": \"qwen3_5_moe\", \"hidden_size\": 2048, \"num_hidden_layers\": 40, "
     "\"full_attention_interval\": 4, \"vocab_size\": 248320, \"num_experts\": 256, "
     "\"num_experts_per_tok\": 8, \"moe_intermediate_size\": 512, "
     "\"shared_expert_intermediate_size\": 512, \"num_attention_heads\": 16, "
     "\"num_key_value_heads\": 2, \"head_dim\": 256, \"partial_rotary_factor\": 0.25, "
     "\"linear_num_key_heads\": 16, \"linear_num_value_heads\": 32, \"linear_key_head_dim\": 128, "
     "\"linear_value_head_dim\": 128, \"linear_conv_kernel_dim\": 4, \"rms_norm_eps\": 1e-06}"},
    {"qwen3-30b-a3b",
     "{\"model_type\": \"qwen3_moe\", \"hidden_size\": 2048, \"num_hidden_layers\": 48, "
     "\"vocab_size\": 151936, \"num_experts\": 128, \"num_experts_per_tok\": 8, "
     "\"moe_intermediate_size\": 768, \"num_attention_heads\": 32, \"num_key_value_heads\": 4, "
     "\"head_dim\": 128, \"rope_theta\": 1000000, \"norm_topk_prob\": true, \"rms_norm_eps\": 1e-06}"},
    {"gpt-oss-120b",
     "{\"model_type\": \"gpt_oss\", \"hidden_size\": 2880, \"num_hidden_layers\": 36, "
     "\"vocab_size\": 201088, \"num_local_experts\": 128, \"num_experts_per_tok\": 4, "
     "\"intermediate_size\": 2880, \"num_attention_heads\": 64, \"num_key_value_heads\": 8, "
     "\"head_dim\": 64, \"sliding_window\": 128, \"rms_norm_eps\": 1e-05, \"rope_theta\": 150000, "
     "\"quantization_config\": {\"quant_method\": \"mxfp4\"}}"},
};

uint32_t ft_shapes_count(void)
{
    return FT_COUNT_OF(shapes);
}

const char *ft_shapes_name(uint32_t index)
{
    return shapes[index].name;
}

/* ---- reading ---- */

static json_t *built_in(const char *name)
{
    for (uint32_t i = 0; i < FT_COUNT_OF(shapes); i++)
        if (!strcmp(shapes[i].name, name))
            return json_loads(shapes[i].config, 0, NULL);
    return NULL;
}

/* The member NAME of a file of several shapes; takes over `root`. */
static json_t *pick_member(json_t *root, const char *file, const char *name, struct ft_error *err)
{
    char known[400] = "";
    const char *key;
    json_t *value, *found = json_object_get(root, name), *config = json_is_object(found) ? found : NULL;
    json_incref(config);
    json_object_foreach(root, key, value)
    {
        size_t at = strlen(known);
        if (json_is_object(value))
            snprintf(known + at, sizeof known - at, "%s%s", at ? ", " : "", key);
    }
    json_decref(root);
    if (!config)
        ft_error_set(err, FT_USAGE, "%s has no shape \"%s\"; it has %s", file, name,
                     known[0] ? known : "none");
    return config;
}

static json_t *read_file(const char *shape, struct ft_error *err)
{
    char path[4096], *text;
    uint64_t bytes;
    json_error_t where;
    const char *mark = strrchr(shape, '#');
    snprintf(path, sizeof path, "%.*s", mark ? (int)(mark - shape) : (int)strlen(shape), shape);
    if (!strchr(path, '/') && !strchr(path, '.') && access(path, F_OK) != 0) {
        char known[400] = "";
        for (uint32_t i = 0; i < FT_COUNT_OF(shapes); i++)
            snprintf(known + strlen(known), sizeof known - strlen(known), ", %s", shapes[i].name);
        ft_error_set(err, FT_USAGE, "no shape is called \"%s\": give %s, or a config.json", shape, known + 2);
        return NULL;
    }
    if (ft_file_read_all(path, SHAPE_BYTES_MAX, &text, &bytes, err) != FT_OK) {
        ft_error_prepend(err, "--shape wants a built-in name or a config.json");
        return NULL;
    }
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    free(text);
    if (!root) {
        ft_error_set(err, FT_FORMAT, "%s: line %d, column %d: %s", path, where.line, where.column,
                     where.text);
        return NULL;
    }
    return mark ? pick_member(root, path, mark + 1, err) : root;
}

/* ---- cuts ---- */

static void cut_number(json_t *config, const char *key, uint32_t wanted)
{
    json_t *found = json_object_get(config, key);
    if (wanted && json_is_integer(found) && json_integer_value(found) > (json_int_t)wanted)
        json_object_set_new(config, key, json_integer((json_int_t)wanted));
}

/* Layer numbers from `first` on that a model of `layers` layers does not have. */
static void cut_layer_list(json_t *config, const char *key, json_int_t first, json_int_t layers)
{
    json_t *list = json_object_get(config, key);
    for (size_t i = json_array_size(list); i-- > 0;)
        if (json_integer_value(json_array_get(list, i)) - first >= layers)
            json_array_remove(list, i);
}

static void cut_layers(json_t *config)
{
    json_int_t layers = json_integer_value(json_object_get(config, "num_hidden_layers"));
    json_t *types = json_object_get(config, "layer_types");
    cut_layer_list(config, "ple_layer_ids", 1, layers);
    cut_layer_list(config, "mlp_only_layers", 0, layers);
    while (json_is_array(types) && layers >= 0 && json_array_size(types) > (size_t)layers)
        json_array_remove(types, json_array_size(types) - 1);
}

static void cut_vocab(json_t *config)
{
    json_int_t vocab = json_integer_value(json_object_get(config, "vocab_size"));
    json_t *eos = json_object_get(config, "eos_token_id");
    if (json_is_integer(eos) && json_integer_value(eos) >= vocab)
        json_object_set_new(config, "eos_token_id", json_integer(vocab - 1));
    for (size_t i = 0; i < json_array_size(eos); i++)
        if (json_integer_value(json_array_get(eos, i)) >= vocab)
            json_array_set_new(eos, i, json_integer(vocab - 1));
}

static void apply(json_t *config, const struct ft_shape_cuts *cuts)
{
    cut_number(config, "num_hidden_layers", cuts->layers);
    cut_number(config, "num_experts", cuts->experts);
    cut_number(config, "num_local_experts", cuts->experts);
    cut_number(config, "vocab_size", cuts->vocab);
    cut_layers(config);
    cut_vocab(config);
    if (cuts->no_ple)
        json_object_del(config, "ple_layer_ids");
    bool roped = json_object_get(config, "rope_theta") || json_object_get(config, "rope_parameters") ||
                 json_object_get(config, "rope_scaling");
    if (!roped)
        json_object_set_new(config, "rope_theta", json_real(ROPE_THETA_DEFAULT));
    if (!json_object_get(config, "seed"))
        json_object_set_new(config, "seed", json_integer(0));
}

static void write_label(const char *shape, const struct ft_shape_cuts *cuts, const struct ft_model *model,
                        char *label, size_t cap)
{
    size_t at = 0;
    const char *open = " (";
    snprintf(label, cap, "%s", shape);
    at = strlen(label);
#define NOTE(on, ...)                                                                                        \
    if ((on) && at < cap) {                                                                                  \
        at += (size_t)snprintf(label + at, cap - at, "%s", open);                                            \
        at += at < cap ? (size_t)snprintf(label + at, cap - at, __VA_ARGS__) : 0;                            \
        open = ", ";                                                                                         \
    }
    NOTE(cuts->layers, "%u layers", model->layer_count)
    NOTE(cuts->experts, "%u experts", model->expert_count)
    NOTE(cuts->vocab, "vocabulary %u", model->vocab)
#undef NOTE
    if (open[0] == ',' && at < cap)
        snprintf(label + at, cap - at, ")");
}

/* NULL: err says why. */
static json_t *read_root(const char *shape, struct ft_error *err)
{
    json_t *root = built_in(shape);
    return root ? root : read_file(shape, err);
}

int ft_shapes_read(const char *shape, const struct ft_shape_cuts *cuts, struct ft_model *model, char *label,
                   size_t cap, struct ft_error *err)
{
    json_t *root = read_root(shape, err);
    if (!root)
        return err->code;
    json_t *inner = json_object_get(root, "text_config");
    if (json_is_object(root))
        apply(json_is_object(inner) ? inner : root, cuts);
    char *text = json_dumps(root, JSON_COMPACT | JSON_ENCODE_ANY);
    json_decref(root);
    int status = text ? ft_config_parse(model, text, strlen(text), shape, err)
                      : ft_error_set(err, FT_MEMORY, "no memory for the shape %s", shape);
    free(text);
    if (status == FT_OK)
        write_label(shape, cuts, model, label, cap);
    return status;
}

int ft_shapes_find_format(const char *shape, uint32_t choice, enum ft_format *format, struct ft_error *err)
{
    static const enum ft_format choices[] = {FT_FORMAT_BF16,      FT_FORMAT_NVFP4, FT_FORMAT_MXFP4,
                                             FT_FORMAT_FP8_BLOCK, FT_FORMAT_BF16,  FT_FORMAT_DS_FP4};
    static const struct {
        const char *method;
        enum ft_format format;
    } methods[] = {{"modelopt", FT_FORMAT_NVFP4},
                   {"compressed-tensors", FT_FORMAT_NVFP4},
                   {"fp8", FT_FORMAT_FP8_BLOCK},
                   {"mxfp4", FT_FORMAT_MXFP4}};
    *format = choices[choice];
    if (choice)
        return FT_OK;
    json_t *root = read_root(shape, err);
    if (!root)
        return err->code;
    json_t *inner = json_object_get(root, "text_config");
    json_t *quant = json_object_get(inner, "quantization_config");
    quant = quant ? quant : json_object_get(root, "quantization_config");
    const char *method = json_string_value(json_object_get(quant, "quant_method"));
    for (uint32_t i = 0; method && i < FT_COUNT_OF(methods); i++)
        if (!strcmp(methods[i].method, method)) /* others: ft_config_parse refuses them */
            *format = methods[i].format;
    json_decref(root);
    return FT_OK;
}

int ft_shapes_fit_ple(struct ft_model *model, uint64_t row_count, struct ft_error *err)
{
    if (model->ple_count != 1)
        return ft_error_set(err, FT_UNSUPPORTED, "a model with one PLE table is needed, this one has %u",
                            model->ple_count);
    uint32_t heads = model->ple[0].head_count;
    uint64_t each = row_count / heads;
    if (each < PLE_HEAD_ROWS_MIN)
        return ft_error_set(
            err, FT_USAGE, "the PLE table has %llu rows; make it %llu MiB at least",
            (unsigned long long)row_count,
            (unsigned long long)((PLE_HEAD_ROWS_MIN * heads * model->ple[0].row_width >> 20) + 1));
    model->ngram_vocab_base = each - each / 100; /* primes after it stay below `each` */
    model->ngram_vocab_multiple = 1;
    return ft_model_finish(model, err);
}
