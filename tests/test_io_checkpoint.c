/* SPDX-License-Identifier: Apache-2.0 */
#include "io/checkpoint.h"
#include "tests/checkpoint_files.h"

#define SHARDED FIXTURE("qwen3_moe-bf16-sharded-tied")

static const char *const shards[3] = {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                      "model-00003-of-00003.safetensors"};

static void copy_sharded(struct scratch *s, bool with_index)
{
    scratch_init(s, NULL);
    scratch_copy(s, SHARDED, "config.json");
    for (int i = 0; i < 3; i++)
        scratch_copy(s, SHARDED, shards[i]);
    if (with_index)
        scratch_copy(s, SHARDED, "model.safetensors.index.json");
}

static void refused(struct scratch *s, int status, const char *text)
{
    struct ft_error err;
    struct ft_checkpoint *c;
    CHECK_FAILS(ft_checkpoint_open(&c, s->dir, &err), status, text, &err);
    CHECK(c == NULL);
}

static void write_index(struct scratch *s, const char *text)
{
    scratch_write(s, "model.safetensors.index.json", text, strlen(text));
}

TEST(one_file_is_opened_and_names_are_stripped)
{
    struct ft_error err;
    struct ft_checkpoint *c;
    CHECK_OK(ft_checkpoint_open(&c, FIXTURE("qwen3_moe-bf16"), &err), &err);
    REQUIRE(c);
    CHECK_EQ(ft_checkpoint_file_count(c), 1);
    CHECK_EQ(ft_checkpoint_file_bytes(c, 0), 2852096);
    CHECK(strstr(ft_checkpoint_file_path(c, 0), "qwen3_moe-bf16/model.safetensors") != NULL);
    const struct ft_tensor *t = ft_checkpoint_find(c, "layers.0.self_attn.q_proj.weight");
    REQUIRE(t);
    CHECK(t->dtype == FT_DTYPE_BF16 && t->rank == 2 && t->shape[0] == 128 && t->bytes == 128 * 128 * 2);
    CHECK(ft_checkpoint_find(c, "lm_head.weight") != NULL);
    CHECK(ft_checkpoint_find(c, "model.norm.weight") == NULL && ft_checkpoint_find(c, "") == NULL);
    for (uint32_t i = 0; i < ft_checkpoint_tensor_count(c); i++) {
        const struct ft_tensor *at = ft_checkpoint_tensor(c, i);
        CHECK(ft_checkpoint_find(c, at->name) == at);
        CHECK(at->offset + at->bytes <= ft_checkpoint_file_bytes(c, at->file));
    }
    CHECK_EQ(ft_checkpoint_model(c)->hidden, 128);
    ft_checkpoint_close(c);
}

TEST(vision_and_mtp_tensors_are_dropped)
{
    struct ft_error err;
    struct ft_checkpoint *c;
    CHECK_OK(ft_checkpoint_open(&c, FIXTURE("qwen4_exp-nvfp4-modelopt"), &err), &err);
    REQUIRE(c);
    for (uint32_t i = 0; i < ft_checkpoint_tensor_count(c); i++)
        CHECK(!strstr(ft_checkpoint_tensor(c, i)->name, "visual") &&
              !strstr(ft_checkpoint_tensor(c, i)->name, "mtp."));
    CHECK(ft_checkpoint_find(c, "embed_tokens.weight") != NULL);
    ft_checkpoint_close(c);
}

TEST(shards_are_found_with_and_without_index)
{
    struct ft_error err;
    for (int with = 0; with < 2; with++) {
        struct scratch s;
        struct ft_checkpoint *c;
        copy_sharded(&s, with);
        scratch_write(&s, "other.safetensors", "nonsense", 8); /* not a model shard */
        CHECK_OK(ft_checkpoint_open(&c, s.dir, &err), &err);
        REQUIRE(c);
        CHECK_EQ(ft_checkpoint_file_count(c), 3);
        CHECK_EQ(ft_checkpoint_tensor_count(c), 173);
        CHECK_EQ(ft_checkpoint_find(c, "norm.weight")->file, 2);
        ft_checkpoint_close(c);
        scratch_fini(&s);
    }
}

TEST(absent_shards_are_named)
{
    struct scratch s;
    copy_sharded(&s, true);
    unlink(scratch_path(&s, shards[1]));
    refused(&s, FT_IO, "1 of the 3 shards");
    refused(&s, FT_IO, "the first is model-00002-of-00003.safetensors");
    unlink(scratch_path(&s, "model.safetensors.index.json"));
    refused(&s, FT_IO,
            "shard model-00002-of-00003.safetensors is absent, although model-00001-of-00003.safetensors");
    unlink(scratch_path(&s, shards[0]));
    unlink(scratch_path(&s, shards[2]));
    refused(&s, FT_IO, "holds no model.safetensors.index.json, model.safetensors");
    unlink(scratch_path(&s, "config.json"));
    refused(&s, FT_IO, "config.json");
    scratch_fini(&s);
}

TEST(directories_that_are_not_checkpoints_are_refused)
{
    struct ft_error err;
    struct ft_checkpoint *c;
    CHECK_FAILS(ft_checkpoint_open(&c, "/nowhere/at/all", &err), FT_IO, "/nowhere/at/all", &err);
    CHECK_FAILS(ft_checkpoint_open(&c, FIXTURE("qwen3_moe-bf16") "/config.json", &err), FT_IO,
                "not a directory", &err);
}

TEST(bad_indices_are_refused)
{
    struct scratch s;
    copy_sharded(&s, false);
    write_index(&s, "{");
    refused(&s, FT_FORMAT, "index.json: line");
    write_index(&s, "[]");
    refused(&s, FT_FORMAT, "weight_map is missing");
    write_index(&s, "{\"weight_map\": 3}");
    refused(&s, FT_FORMAT, "weight_map is missing or not an object");
    write_index(&s, "{\"weight_map\": {}}");
    refused(&s, FT_FORMAT, "weight_map is empty");
    write_index(&s, "{\"weight_map\": {\"a\": 3}}");
    refused(&s, FT_FORMAT, "tensor a: its file is not a string");
    static const char *const escapes[] = {"../x.safetensors", "/etc/passwd",      "..", "",
                                          ".hidden",          "sub/x.safetensors"};
    for (size_t i = 0; i < sizeof escapes / sizeof escapes[0]; i++) {
        char text[200];
        snprintf(text, sizeof text, "{\"weight_map\": {\"a\": \"%s\"}}", escapes[i]);
        write_index(&s, text);
        refused(&s, FT_FORMAT, "wanted a plain name inside the directory");
    }
    write_index(&s, "{\"weight_map\": {\"a\": \"model-00001-of-00003.safetensors\"}}");
    refused(&s, FT_FORMAT, "tensor a should be in model-00001-of-00003.safetensors, but is nowhere");
    write_index(&s, "{\"weight_map\": {\"model.norm.weight\": \"model-00001-of-00003.safetensors\", "
                    "\"x\": \"model-00003-of-00003.safetensors\"}}");
    refused(&s, FT_FORMAT,
            "model.norm.weight should be in model-00001-of-00003.safetensors, but is in model-00003");
    write_index(&s, "{\"weight_map\": {\"a\": \"model.safetensors.index.json\"}}");
    refused(&s, FT_FORMAT, "model.safetensors.index.json");
    scratch_fini(&s);
}

TEST(a_tensor_in_two_files_is_refused)
{
    struct scratch s;
    copy_sharded(&s, false);
    scratch_copy(&s, SHARDED, shards[0]);
    char from[512];
    struct ft_error err;
    char *text;
    uint64_t bytes;
    snprintf(from, sizeof from, "%s/%s", SHARDED, shards[0]);
    CHECK_OK(ft_file_read_all(from, 1u << 30, &text, &bytes, &err), &err);
    scratch_write(&s, "model-copy.safetensors", text, bytes);
    free(text);
    refused(&s, FT_FORMAT, "is both in model-00001-of-00003.safetensors and in model-copy.safetensors");
    scratch_fini(&s);
}

TEST(names_that_differ_by_prefix_only_collide)
{
    struct scratch s;
    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    scratch_array(&s, "model.layers.0.input_layernorm.weight")->name = "norm.weight";
    scratch_save(&s);
    refused(&s, FT_FORMAT, "tensor norm.weight is both in");
    scratch_fini(&s);
}

TEST(cut_and_damaged_files_are_refused)
{
    struct ft_error err;
    struct scratch s;
    char *text;
    uint64_t bytes;
    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    CHECK_OK(ft_file_read_all(FIXTURE("qwen3_moe-bf16") "/model.safetensors", 1u << 30, &text, &bytes, &err),
             &err);
    scratch_write(&s, "model.safetensors", text, bytes - 1);
    refused(&s, FT_FORMAT, "the file is cut or its header lies");
    scratch_write(&s, "model.safetensors", text, 5000);
    refused(&s, FT_FORMAT, "header length is 19576 bytes");
    scratch_write(&s, "model.safetensors", text, 4);
    refused(&s, FT_FORMAT, "is 4 bytes long");
    scratch_write(&s, "model.safetensors", "", 0);
    refused(&s, FT_FORMAT, "is 0 bytes long");
    text[7] = 1; /* a length of 2^56 */
    scratch_write(&s, "model.safetensors", text, bytes);
    refused(&s, FT_FORMAT, "at most 100 MB");
    text[7] = 0;
    text[100] = '\xff';
    scratch_write(&s, "model.safetensors", text, bytes);
    refused(&s, FT_FORMAT, "model.safetensors: header: column");
    free(text);
    scratch_fini(&s);
}

TEST(bad_configs_stop_the_opening)
{
    struct scratch s;
    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    scratch_save(&s);
    scratch_edit_config(&s, "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 0");
    refused(&s, FT_FORMAT, "config.json: num_key_value_heads is 0");
    scratch_write(&s, "config.json", "", 0);
    refused(&s, FT_FORMAT, "config.json: line");
    scratch_fini(&s);
}

TEST_MAIN(RUN(one_file_is_opened_and_names_are_stripped) RUN(vision_and_mtp_tensors_are_dropped)
              RUN(shards_are_found_with_and_without_index) RUN(absent_shards_are_named)
                  RUN(directories_that_are_not_checkpoints_are_refused) RUN(bad_indices_are_refused)
                      RUN(a_tensor_in_two_files_is_refused) RUN(names_that_differ_by_prefix_only_collide)
                          RUN(cut_and_damaged_files_are_refused) RUN(bad_configs_stop_the_opening))
