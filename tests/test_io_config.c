/* SPDX-License-Identifier: Apache-2.0 */
#include "io/checkpoint.h"
#include "tests/checkpoint_files.h"

#include <jansson.h>

static char *read_config(const char *dir)
{
    struct ft_error err;
    char path[512], *text = NULL;
    uint64_t bytes;
    snprintf(path, sizeof path, "%s/config.json", dir);
    CHECK_OK(ft_file_read_all(path, 1u << 20, &text, &bytes, &err), &err);
    return text;
}

/* A fixture's config with keys replaced: `changes` is an object merged into the inner config; a key whose
 * value is "__drop" is removed. */
static int parse_changed(const char *fixture, const char *changes, struct ft_model *model,
                         struct ft_error *err)
{
    char *text = read_config(fixture), *merged;
    json_error_t where;
    json_t *root = json_loads(text, 0, &where), *change = json_loads(changes, 0, &where), *value;
    json_t *inner = json_object_get(root, "text_config");
    const char *key;
    if (!change) {
        fprintf(stderr, "bad test: %s: %s\n", changes, where.text);
        abort();
    }
    inner = inner ? inner : root;
    json_object_foreach(change, key, value)
    {
        if (json_is_string(value) && strcmp(json_string_value(value), "__drop") == 0)
            json_object_del(inner, key);
        else
            json_object_set(inner, key, value);
    }
    merged = json_dumps(root, 0);
    int status = ft_config_parse(model, merged, strlen(merged), "config.json", err);
    json_decref(root);
    json_decref(change);
    free(text);
    free(merged);
    return status;
}

#define QWEN3 FIXTURE("qwen3_moe-bf16")
#define QWEN35 FIXTURE("qwen3_5_moe-bf16")
#define QWEN4 FIXTURE("qwen4_exp-bf16")
#define OSS FIXTURE("gpt_oss-mxfp4")

static struct ft_model good(const char *fixture, const char *changes)
{
    struct ft_error err;
    struct ft_model m;
    CHECK_OK(parse_changed(fixture, changes, &m, &err), &err);
    return m;
}

static void refused(const char *fixture, const char *changes, int status, const char *text)
{
    struct ft_error err;
    struct ft_model m;
    CHECK_FAILS(parse_changed(fixture, changes, &m, &err), status, text, &err);
}

TEST(qwen3_moe_is_read)
{
    struct ft_model m = good(QWEN3, "{}");
    CHECK_EQ(m.family, FT_FAMILY_QWEN3_MOE);
    CHECK(strcmp(m.name, "qwen3_moe") == 0);
    CHECK(m.hidden == 128 && m.vocab == 320 && m.layer_count == 3 && m.position_max == 512);
    CHECK(m.rms_eps == 1e-6f && !m.norm_plus_one && !m.tied && m.eos_count == 1 && m.eos[0] == 2);
    CHECK(m.head_count == 4 && m.kv_head_count == 2 && m.head_dim == 32 && !m.attention_gate && m.qk_norm);
    CHECK(!m.attention_bias && !m.sinks && m.window == 0 && m.rotary_dim == 32 && m.rotary_theta == 1e6);
    CHECK(!m.yarn.on && m.rotary_scale == 1);
    CHECK(m.expert_count == 16 && m.topk == 4 && m.expert_width == 64 && m.shared_width == 0);
    CHECK(m.topk_renormalise && !m.router_softmax_chosen && !m.router_bias && !m.expert_bias);
    CHECK(m.activation == FT_ACTIVATION_SILU && m.hc_count == 1 && m.ple_count == 0);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(m.layers[i].attention == FT_ATTENTION_FULL && !m.layers[i].dense &&
              m.layers[i].ple == FT_PLE_NONE);
    CHECK(good(FIXTURE("qwen3_moe-bf16-sharded-tied"), "{}").tied);
    m = good(FIXTURE("qwen3_moe-fp8_block"), "{}");
    CHECK(m.block_out == 128 && m.block_in == 128);
}

TEST(qwen3_5_moe_is_read)
{
    struct ft_model m = good(QWEN35, "{}");
    CHECK_EQ(m.family, FT_FAMILY_QWEN3_5_MOE);
    CHECK(m.norm_plus_one && m.attention_gate && m.qk_norm && m.rotary_dim == 16); /* rope_parameters wins */
    CHECK(m.key_head_count == 2 && m.value_head_count == 4 && m.key_dim == 32 && m.value_dim == 32 &&
          m.conv_taps == 4);
    CHECK(m.output_gate == FT_ACTIVATION_SILU && m.shared_width == 64 && m.topk_renormalise);
    CHECK(m.layers[2].attention == FT_ATTENTION_LINEAR && m.layers[3].attention == FT_ATTENTION_FULL);
}

TEST(qwen4_exp_is_read_flat_and_nested)
{
    static const char *const dirs[] = {QWEN4, FIXTURE("qwen4_exp-nvfp4-modelopt")};
    for (size_t i = 0; i < 2; i++) {
        struct ft_model m = good(dirs[i], "{}");
        CHECK_EQ(m.family, FT_FAMILY_QWEN4_EXP);
        CHECK(m.hc_count == 4 && m.hc_lowrank == 16 && m.output_gate == FT_ACTIVATION_SIGMOID);
        CHECK(m.layers[3].attention == FT_ATTENTION_SPARSE && m.layers[0].attention == FT_ATTENTION_LINEAR);
        CHECK(m.indexer_head_count == 4 && m.indexer_dim == 32 && m.indexer_budget == 16 &&
              m.indexer_ratio == 4);
        CHECK(m.ple_count == 1 && m.ple[0].layer == 1 && m.layers[1].ple == 0 && m.ple_seed == 1234);
        CHECK(m.ple_embed_dim == 128 && m.ple_taps == 4 && m.ngram_size == 3 && m.heads_per_ngram == 4);
        CHECK(m.ngram_vocab_base == 500 && m.ngram_vocab_multiple == 128 && m.ple_shards == 4);
        CHECK(m.ple[0].head_rows[0] == 503 && m.ple[0].row_count == 4352 && m.ple[0].row_width == 16);
    }
}

TEST(gpt_oss_is_read)
{
    struct ft_model m = good(OSS, "{}");
    CHECK_EQ(m.family, FT_FAMILY_GPT_OSS);
    CHECK(m.attention_bias && m.sinks && m.window == 8 && !m.qk_norm && !m.norm_plus_one &&
          !m.attention_gate);
    CHECK(m.layers[0].attention == FT_ATTENTION_SLIDING && m.layers[1].attention == FT_ATTENTION_FULL);
    CHECK(m.expert_count == 8 && m.expert_width == 64 && m.router_bias && m.expert_bias &&
          m.router_softmax_chosen);
    CHECK(m.activation == FT_ACTIVATION_SWIGLU_OSS && m.swiglu_limit == 7.0f);
    CHECK(m.yarn.on && !m.yarn.truncate && m.yarn.factor == 32 && m.yarn.beta_fast == 32 &&
          m.yarn.beta_slow == 1);
    CHECK(m.yarn.original_positions == 4096 && m.yarn.attention_factor == 0);
    CHECK_NEAR(m.rotary_scale, 0.1 * log(32) + 1, 1e-12);
}

TEST(defaults_fill_absent_keys)
{
    CHECK(!good(QWEN3, "{\"norm_topk_prob\": \"__drop\"}").topk_renormalise); /* of this family */
    CHECK(good(QWEN35, "{\"norm_topk_prob\": \"__drop\"}").topk_renormalise);
    CHECK_EQ(good(QWEN3, "{\"head_dim\": \"__drop\"}").head_dim, 32);
    struct ft_model m = good(QWEN35, "{\"rope_parameters\": {\"rope_theta\": 100}}");
    CHECK_EQ(m.rotary_dim, 8); /* the outer factor, 0.25 */
    m = good(QWEN35,
             "{\"rope_parameters\": \"__drop\", \"partial_rotary_factor\": null, \"rope_theta\": 10000}");
    CHECK(m.rotary_dim == 8 && m.rotary_theta == 10000);
    m = good(QWEN4, "{\"rope_parameters\": {\"rope_theta\": 100}, \"indexer_head_dim\": 64}");
    CHECK_EQ(m.rotary_dim, 32); /* factor absent everywhere: 1 */
    m = good(QWEN4, "{\"layer_types\": \"__drop\", \"output_gate_type\": null}");
    CHECK(m.layers[2].attention == FT_ATTENTION_LINEAR && m.layers[3].attention == FT_ATTENTION_SPARSE);
    CHECK_EQ(m.output_gate, FT_ACTIVATION_SILU);
    m = good(QWEN35, "{\"layer_types\": \"__drop\", \"full_attention_interval\": 2}");
    CHECK(m.layers[1].attention == FT_ATTENTION_FULL && m.layers[2].attention == FT_ATTENTION_LINEAR);
    m = good(QWEN4, "{\"layer_types\": [\"linear_attention\", \"full_attention\", \"linear_attention\", "
                    "\"qwen_sparse_attention\"]}");
    CHECK(m.layers[1].attention == FT_ATTENTION_SPARSE && m.layers[3].attention == FT_ATTENTION_SPARSE);
    m = good(OSS, "{\"layer_types\": \"__drop\"}");
    CHECK(m.layers[0].attention == FT_ATTENTION_SLIDING && m.layers[3].attention == FT_ATTENTION_FULL);
    m = good(QWEN4, "{\"ple_layer_ids\": \"__drop\"}");
    CHECK(m.ple_count == 0 && m.layers[1].ple == FT_PLE_NONE);
}

TEST(keys_are_found_in_all_their_places)
{
    struct ft_model m =
        good(QWEN3, "{\"rope_parameters\": \"__drop\", \"rope_theta\": 5000.5, \"rope_scaling\": "
                    "{\"type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 128}}");
    CHECK(m.rotary_theta == 5000.5 && m.yarn.on && m.yarn.truncate && m.yarn.factor == 4);
    CHECK(m.yarn.original_positions == 128 && m.yarn.beta_fast == 32 && m.yarn.beta_slow == 1);
    m = good(QWEN3, "{\"rope_theta\": 7}"); /* the inner key wins */
    CHECK(m.rotary_theta == 1e6);
    m = good(OSS, "{\"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 150000, \"factor\": 2.0, "
                  "\"attention_factor\": 1.5}, \"swiglu_limit\": 6.5, \"num_experts_per_tok\": null, "
                  "\"experts_per_token\": 2}");
    CHECK(m.rotary_scale == 1.5 && m.yarn.original_positions == 512 && m.swiglu_limit == 6.5f && m.topk == 2);
    m = good(QWEN3, "{\"eos_token_id\": [7, 2, 9], \"num_experts\": 16, \"num_local_experts\": null}");
    CHECK(m.eos_count == 3 && m.eos[0] == 7 && m.eos[2] == 9 && m.expert_count == 16);
    m = good(QWEN3, "{\"eos_token_id\": null}");
    CHECK_EQ(m.eos_count, 0);
    m = good(QWEN3, "{\"mlp_only_layers\": [0], \"decoder_sparse_step\": 2}");
    CHECK(m.layers[0].dense && !m.layers[1].dense && m.layers[2].dense && m.dense_width == 96);
    m = good(QWEN4, "{\"ple_layer_ids\": [3, 1]}"); /* ascending order gives the index */
    CHECK(m.ple_count == 2 && m.ple[0].layer == 0 && m.ple[1].layer == 2);
    CHECK(m.ple[0].head_rows[0] == 503 && m.ple[1].head_rows[0] > m.ple[0].head_rows[7]);
    m = good(FIXTURE("qwen4_exp-nvfp4-modelopt"), "{\"tie_word_embeddings\": true}");
    CHECK(m.tied);
}

TEST(outer_keys_hold_where_the_inner_config_is_silent)
{
    struct ft_error err;
    struct ft_model m;
    char *text = read_config(FIXTURE("qwen4_exp-nvfp4-modelopt"));
    json_t *root = json_loads(text, 0, NULL), *inner = json_object_get(root, "text_config");
    json_object_del(inner, "tie_word_embeddings");
    json_object_del(inner, "model_type");
    json_object_set_new(root, "tie_word_embeddings", json_true());
    json_object_set_new(root, "quantization_config",
                        json_pack("{s:s, s:[ii]}", "quant_method", "fp8", "weight_block_size", 64, 32));
    char *merged = json_dumps(root, 0);
    CHECK_OK(ft_config_parse(&m, merged, strlen(merged), "config.json", &err), &err);
    CHECK(m.tied && m.block_out == 64 && m.block_in == 32 && strcmp(m.name, "qwen4_exp") == 0);
    free(merged);
    json_object_set_new(inner, "tie_word_embeddings", json_false()); /* the inner value wins */
    merged = json_dumps(root, 0);
    CHECK_OK(ft_config_parse(&m, merged, strlen(merged), "config.json", &err), &err);
    CHECK(!m.tied);
    free(merged);
    json_decref(root);
    free(text);
}

TEST(unknown_models_and_features_are_refused_by_name)
{
    refused(QWEN3, "{\"model_type\": \"llama\"}", FT_UNSUPPORTED,
            "model_type is \"llama\", wanted qwen3_moe");
    refused(QWEN3, "{\"model_type\": \"llama\"}", FT_UNSUPPORTED, "gpt_oss");
    refused(QWEN3, "{\"model_type\": 3}", FT_FORMAT, "model_type is 3");
    refused(QWEN3, "{\"model_type\": null}", FT_FORMAT, "model_type is missing");
    refused(QWEN3, "{\"hidden_act\": \"gelu\"}", FT_UNSUPPORTED, "hidden_act is \"gelu\", wanted silu");
    refused(QWEN35, "{\"output_gate_type\": \"tanh\"}", FT_UNSUPPORTED, "output_gate_type is \"tanh\"");
    refused(QWEN3, "{\"quantization_config\": {\"quant_method\": \"gptq\"}}", FT_UNSUPPORTED, "\"gptq\"");
    refused(QWEN3, "{\"rope_parameters\": {\"rope_type\": \"llama3\", \"rope_theta\": 1e4}}", FT_UNSUPPORTED,
            "rope_type is \"llama3\"");
    refused(QWEN3, "{\"use_sliding_window\": true, \"sliding_window\": 5}", FT_UNSUPPORTED,
            "use_sliding_window");
    refused(QWEN3, "{\"partial_rotary_factor\": 0.5}", FT_UNSUPPORTED, "partial_rotary_factor");
    refused(QWEN3, "{\"layer_types\": [\"full_attention\", \"linear_attention\", \"full_attention\"]}",
            FT_UNSUPPORTED, "layer_types is \"linear_attention\"");
    refused(QWEN4, "{\"indexer_kv_heads\": 2}", FT_UNSUPPORTED, "indexer_kv_heads is 2");
    refused(QWEN4, "{\"hc_count\": 1}", FT_UNSUPPORTED, "hc_count is 1");
    refused(
        OSS,
        "{\"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 1e4, \"factor\": 2, \"mscale\": 1}}",
        FT_UNSUPPORTED, "mscale");
}

TEST(wrong_types_and_values_are_refused_by_key)
{
    refused(QWEN3, "{\"hidden_size\": \"128\"}", FT_FORMAT, "hidden_size is \"128\", wanted a whole number");
    refused(QWEN3, "{\"hidden_size\": 128.0}", FT_FORMAT, "hidden_size is 128.0");
    refused(QWEN3, "{\"hidden_size\": -1}", FT_FORMAT, "hidden_size is -1");
    refused(QWEN3, "{\"hidden_size\": 0}", FT_FORMAT, "hidden_size is 0");
    refused(QWEN3, "{\"hidden_size\": null}", FT_FORMAT, "hidden_size is missing");
    refused(QWEN3, "{\"hidden_size\": 4611686018427387904}", FT_FORMAT, "hidden_size is 4611686018427387904");
    refused(QWEN3, "{\"num_hidden_layers\": 100000}", FT_LIMIT,
            "num_hidden_layers is 100000, wanted at most 256");
    refused(QWEN3, "{\"num_hidden_layers\": true}", FT_FORMAT, "num_hidden_layers is true");
    refused(QWEN3, "{\"num_attention_heads\": 0}", FT_FORMAT, "num_attention_heads is 0");
    refused(QWEN3, "{\"num_key_value_heads\": 3}", FT_FORMAT, "num_key_value_heads 3");
    refused(QWEN3, "{\"head_dim\": 33}", FT_FORMAT, "head_dim 33");
    refused(QWEN3, "{\"num_experts_per_tok\": 17}", FT_FORMAT, "num_experts_per_tok is 17");
    refused(QWEN3, "{\"num_local_experts\": 9999}", FT_LIMIT, "num_experts is 9999");
    refused(QWEN3, "{\"rms_norm_eps\": \"1e-6\"}", FT_FORMAT, "rms_norm_eps is \"1e-6\"");
    refused(QWEN3, "{\"rms_norm_eps\": null}", FT_FORMAT, "rms_norm_eps is 0");
    refused(QWEN3, "{\"rms_norm_eps\": 1e300}", FT_FORMAT, "rms_norm_eps");
    refused(QWEN3, "{\"tie_word_embeddings\": 1}", FT_FORMAT,
            "tie_word_embeddings is 1, wanted true or false");
    refused(QWEN3, "{\"eos_token_id\": -1}", FT_FORMAT, "eos_token_id is -1");
    refused(QWEN3, "{\"eos_token_id\": [1, \"x\"]}", FT_FORMAT, "eos_token_id is \"x\"");
    refused(QWEN3, "{\"eos_token_id\": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}", FT_LIMIT, "at most 16");
    refused(QWEN3, "{\"eos_token_id\": 320}", FT_FORMAT, "eos_token_id is 320");
    refused(QWEN3, "{\"layer_types\": [\"full_attention\"]}", FT_FORMAT, "one word per layer");
    refused(QWEN3, "{\"layer_types\": \"full_attention\"}", FT_FORMAT, "one word per layer");
    refused(QWEN3, "{\"decoder_sparse_step\": 0}", FT_FORMAT, "decoder_sparse_step is 0");
    refused(QWEN3, "{\"mlp_only_layers\": [3]}", FT_FORMAT, "mlp_only_layers");
    refused(QWEN3, "{\"mlp_only_layers\": 3}", FT_FORMAT, "mlp_only_layers is 3");
    refused(QWEN3, "{\"rope_parameters\": [1]}", FT_FORMAT, "rope_parameters is [1]");
    refused(QWEN3, "{\"rope_parameters\": {}}", FT_FORMAT, "rope_theta is missing");
    refused(QWEN3, "{\"rope_parameters\": {\"rope_theta\": -5}}", FT_FORMAT, "rope_theta is -5");
    refused(QWEN3, "{\"quantization_config\": 5}", FT_FORMAT, "quantization_config is 5");
    refused(QWEN3, "{\"quantization_config\": {\"weight_block_size\": [128]}}", FT_FORMAT,
            "weight_block_size is [128]");
    refused(QWEN3, "{\"quantization_config\": {\"weight_block_size\": [0, 128]}}", FT_FORMAT,
            "weight_block_size");
    refused(QWEN3, "{\"quantization_config\": {\"weight_block_size\": [128, 65536]}}", FT_FORMAT,
            "weight_block_size");
    refused(QWEN35, "{\"full_attention_interval\": 0}", FT_FORMAT, "full_attention_interval is 0");
    refused(QWEN35, "{\"partial_rotary_factor\": 0, \"rope_parameters\": {\"rope_theta\": 100}}", FT_FORMAT,
            "partial_rotary_factor is 0");
    refused(QWEN35, "{\"shared_expert_intermediate_size\": null}", FT_FORMAT,
            "shared_expert_intermediate_size");
    refused(QWEN35, "{\"linear_conv_kernel_dim\": 0}", FT_FORMAT, "linear_conv_kernel_dim is 0");
    refused(QWEN35, "{\"linear_num_value_heads\": 3}", FT_FORMAT, "linear_num_value_heads 3");
    refused(QWEN4, "{\"ple_layer_ids\": [0]}", FT_FORMAT,
            "ple_layer_ids is [0], wanted layers counted from 1");
    refused(QWEN4, "{\"ple_layer_ids\": [5]}", FT_FORMAT, "ple_layer_ids is [5]");
    refused(QWEN4, "{\"ple_layer_ids\": [2, 2]}", FT_FORMAT, "distinct");
    refused(QWEN4, "{\"ple_layer_ids\": [1,1,1,1,1,1,1,1,1]}", FT_LIMIT, "at most 8 layers");
    refused(QWEN4, "{\"seed\": 1.5}", FT_FORMAT, "seed is 1.5");
    refused(QWEN4, "{\"ngram_vocab_size_base\": 9223372036854775807}", FT_FORMAT, "ngram_vocab_size_base");
    refused(QWEN4, "{\"ngram_size\": 0}", FT_FORMAT, "ngram_size is 0");
    refused(QWEN4, "{\"indexer_compress_ratio\": 0}", FT_FORMAT, "indexer_compress_ratio is 0");
    refused(QWEN4, "{\"hc_lowrank\": 0}", FT_FORMAT, "hc_lowrank is 0");
    refused(OSS, "{\"sliding_window\": null}", FT_FORMAT, "sliding_window");
    refused(OSS, "{\"swiglu_limit\": -1}", FT_FORMAT, "swiglu_limit");
}

TEST(text_that_is_not_a_config_is_refused)
{
    struct ft_error err;
    struct ft_model m;
    CHECK_FAILS(ft_config_parse(&m, "", 0, "c", &err), FT_FORMAT, "c: line", &err);
    CHECK_FAILS(ft_config_parse(&m, "[]", 2, "c", &err), FT_FORMAT, "c: is not a JSON object", &err);
    CHECK_FAILS(ft_config_parse(&m, "{\"a\":1,\"a\":2}", 13, "c", &err), FT_FORMAT, "duplicate", &err);
    CHECK_FAILS(ft_config_parse(&m, "{\"text_config\":3}", 17, "c", &err), FT_FORMAT, "text_config is 3",
                &err);
    CHECK_FAILS(ft_config_parse(&m, "{}", 2, "c", &err), FT_FORMAT, "model_type is missing", &err);
}

TEST_MAIN(RUN(qwen3_moe_is_read) RUN(qwen3_5_moe_is_read) RUN(qwen4_exp_is_read_flat_and_nested)
              RUN(gpt_oss_is_read) RUN(defaults_fill_absent_keys) RUN(keys_are_found_in_all_their_places)
                  RUN(outer_keys_hold_where_the_inner_config_is_silent)
                      RUN(unknown_models_and_features_are_refused_by_name)
                          RUN(wrong_types_and_values_are_refused_by_key)
                              RUN(text_that_is_not_a_config_is_refused))
