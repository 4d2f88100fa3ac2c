/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a checkpoint of real size takes to open: 48 layers of 512 experts in the modelopt NVFP4 naming, as
 * sparse files (headers and index are real, the data are holes).
 *
 *   bench_io_checkpoint            makes it in a temporary directory, measures, removes it
 *   bench_io_checkpoint DIR        makes it in DIR, measures, and leaves it there for `ft plan --model DIR`
 */
#include "io/checkpoint.h"
#include "io/load.h"
#include "tests/test.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SHARD_BYTES_MAX 5000000000ull
#define LAYERS 48u
#define EXPERTS 512u
#define HIDDEN 2560u
#define WIDTH 640u
#define STREAMS 4u
#define ROUNDS 5

struct spec {
    char name[112];
    enum ft_dtype dtype;
    uint32_t rank, shard;
    uint64_t shape[3], bytes;
};

static struct spec *specs;
static uint32_t spec_count, spec_room, shard_count;

static void add(enum ft_dtype dtype, uint32_t rank, uint64_t a, uint64_t b, uint64_t c, const char *format,
                ...)
{
    va_list list;
    if (spec_count == spec_room) {
        spec_room = spec_room ? 2 * spec_room : 1024;
        specs = realloc(specs, spec_room * sizeof *specs);
        if (!specs)
            abort();
    }
    struct spec *spec = &specs[spec_count++];
    *spec = (struct spec){.dtype = dtype, .rank = rank, .shape = {a, b, c}};
    spec->bytes = ft_dtype_bytes(dtype);
    for (uint32_t i = 0; i < rank; i++)
        spec->bytes *= spec->shape[i];
    int at = snprintf(spec->name, sizeof spec->name, "model.language_model.");
    va_start(list, format);
    vsnprintf(spec->name + at, sizeof spec->name - (size_t)at, format, list);
    va_end(list);
}

static void add_matrix(uint64_t out, uint64_t in, const char *prefix, const char *name)
{
    add(FT_DTYPE_BF16, 2, out, in, 0, "%s%s.weight", prefix, name);
}

static void add_vector(uint64_t count, const char *prefix, const char *name)
{
    add(FT_DTYPE_BF16, 1, count, 0, 0, "%s%s", prefix, name);
}

static void add_mix(const char *prefix, const char *name, bool inject)
{
    char full[80];
    snprintf(full, sizeof full, "%s%s.", prefix, name);
    add_vector(STREAMS * HIDDEN, full, "hc_norm.weight");
    add_matrix(320, STREAMS * HIDDEN, full, "input_mix_weight_down");
    add_matrix(STREAMS * HIDDEN, 320, full, "input_mix_weight_up");
    if (inject)
        add_matrix(STREAMS, STREAMS * HIDDEN, full, "block_inject_weight");
}

static void add_linear(const char *prefix)
{
    char full[80];
    snprintf(full, sizeof full, "%slinear_attn.", prefix);
    add_matrix(8192, HIDDEN, full, "in_proj_qkv");
    add_matrix(4096, HIDDEN, full, "in_proj_z");
    add_matrix(32, HIDDEN, full, "in_proj_b");
    add_matrix(32, HIDDEN, full, "in_proj_a");
    add_matrix(HIDDEN, 4096, full, "out_proj");
    add(FT_DTYPE_BF16, 3, 8192, 1, 4, "%sconv1d.weight", full);
    add_vector(32, full, "A_log");
    add_vector(32, full, "dt_bias");
    add_vector(128, full, "norm.weight");
}

static void add_attention(const char *prefix)
{
    char full[80];
    snprintf(full, sizeof full, "%sself_attn.", prefix);
    add_matrix(24 * 256 * 2, HIDDEN, full, "q_proj");
    add_matrix(2 * 256, HIDDEN, full, "k_proj");
    add_matrix(2 * 256, HIDDEN, full, "v_proj");
    add_matrix(HIDDEN, 24 * 256, full, "o_proj");
    add_vector(256, full, "q_norm.weight");
    add_vector(256, full, "k_norm.weight");
    add_matrix(5 * 128, HIDDEN, full, "indexer.index_qk_proj");
    add_vector(128, full, "indexer.q_layernorm.weight");
    add_vector(128, full, "indexer.k_layernorm.weight");
}

static void add_ple(const char *prefix)
{
    char full[80];
    snprintf(full, sizeof full, "%sple.", prefix);
    add_matrix(STREAMS * HIDDEN, HIDDEN, full, "key_proj");
    add_matrix(HIDDEN, HIDDEN, full, "value_proj");
    add_vector(STREAMS * HIDDEN, full, "norm_key.weight");
    add_vector(STREAMS * HIDDEN, full, "norm_query.weight");
    add_vector(STREAMS * HIDDEN, full, "norm_conv.weight");
    add(FT_DTYPE_BF16, 3, STREAMS * HIDDEN, 1, 4, "%sconv1d.weight", full);
    add(FT_DTYPE_I64, 1, 3, 0, 0, "%sple_embedding.layer_multipliers", full);
    for (int i = 0; i < 16; i++)
        add(FT_DTYPE_F8_E4M3, 2, 20000256, 160, 0, "%sple_embedding.ngram_embedding.shard_%d.weight", full,
            i);
    add(FT_DTYPE_F32, 0, 0, 0, 0, "%sple_embedding.ngram_embedding.weight_scale", full);
}

static void add_moe(const char *prefix)
{
    static const char *const names[3] = {"gate_proj", "up_proj", "down_proj"};
    add_matrix(EXPERTS, HIDDEN, prefix, "mlp.gate");
    add_matrix(1, HIDDEN, prefix, "mlp.shared_expert_gate");
    for (int which = 0; which < 3; which++)
        add(FT_DTYPE_BF16, 2, which == 2 ? HIDDEN : WIDTH, which == 2 ? WIDTH : HIDDEN, 0,
            "%smlp.shared_expert.%s.weight", prefix, names[which]);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        for (int which = 0; which < 3; which++) {
            uint64_t out = which == 2 ? HIDDEN : WIDTH, in = which == 2 ? WIDTH : HIDDEN;
            char full[80];
            snprintf(full, sizeof full, "%smlp.experts.%u.%s", prefix, e, names[which]);
            add(FT_DTYPE_U8, 2, out, in / 2, 0, "%s.weight", full);
            add(FT_DTYPE_F8_E4M3, 2, out, in / 16, 0, "%s.weight_scale", full);
            add(FT_DTYPE_F32, 0, 0, 0, 0, "%s.weight_scale_2", full);
            add(FT_DTYPE_F32, 0, 0, 0, 0, "%s.input_scale", full);
        }
    }
}

static void list_tensors(void)
{
    add_matrix(248320, HIDDEN, "", "embed_tokens");
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        char prefix[40];
        snprintf(prefix, sizeof prefix, "layers.%u.", layer);
        add_mix(prefix, "attn_hyper_connection", true);
        add_mix(prefix, "mlp_hyper_connection", true);
        if (layer == 1)
            add_ple(prefix);
        if (layer % 4 == 3)
            add_attention(prefix);
        else
            add_linear(prefix);
        add_moe(prefix);
    }
    add_mix("", "hyper_connection_mixer", false);
    add_matrix(248320, HIDDEN, "", "lm_head");
    snprintf(specs[spec_count - 1].name, sizeof specs->name, "lm_head.weight");
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < spec_count; i++) {
        if (bytes && bytes + specs[i].bytes > SHARD_BYTES_MAX) {
            bytes = 0;
            shard_count++;
        }
        specs[i].shard = shard_count;
        bytes += specs[i].bytes;
    }
    shard_count++;
}

/* As published writers do: wide element types first, then by name. */
static int compare_in_shards(const void *a, const void *b)
{
    const struct spec *left = a, *right = b;
    uint64_t left_bytes = ft_dtype_bytes(left->dtype), right_bytes = ft_dtype_bytes(right->dtype);
    if (left->shard != right->shard)
        return left->shard < right->shard ? -1 : 1;
    if (left_bytes != right_bytes)
        return left_bytes > right_bytes ? -1 : 1;
    return strcmp(left->name, right->name);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct spec *)a)->name, ((const struct spec *)b)->name);
}

static FILE *create(const char *dir, const char *format, uint32_t shard)
{
    char path[600], name[100];
    snprintf(name, sizeof name, format, shard + 1, shard_count);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "wbe");
    if (!file) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(1);
    }
    return file;
}

/* The specs [from, to) of one shard; the bytes of its header come back. 0 when the filesystem takes no such file. */
static uint64_t write_shard(const char *dir, uint32_t from, uint32_t to)
{
    FILE *file = create(dir, "model-%05u-of-%05u.safetensors", specs[from].shard);
    uint64_t at = 0;
    fwrite("01234567{\"__metadata__\":{\"format\":\"pt\"}", 1, 39, file);
    for (uint32_t i = from; i < to; i++) {
        fprintf(file, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", specs[i].name, ft_dtype_name(specs[i].dtype));
        for (uint32_t d = 0; d < specs[i].rank; d++)
            fprintf(file, d ? ",%llu" : "%llu", (unsigned long long)specs[i].shape[d]);
        fprintf(file, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                (unsigned long long)(at + specs[i].bytes));
        at += specs[i].bytes;
    }
    fputc('}', file);
    while (ftell(file) % 8)
        fputc(' ', file);
    uint64_t bytes = (uint64_t)ftell(file);
    char length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (char)((bytes - 8) >> 8 * i);
    rewind(file);
    fwrite(length, 1, 8, file);
    fflush(file);
    bool sparse = ftruncate(fileno(file), (off_t)(bytes + at)) == 0;
    return fclose(file) == 0 && sparse ? bytes : 0;
}

static void write_config(const char *dir)
{
    FILE *file = create(dir, "config.json", 0);
    fprintf(
        file,
        "{\"model_type\":\"qwen4_exp\",\"text_config\":{\"model_type\":\"qwen4_exp_text\",\"attention_bias\":"
        "false,"
        "\"dtype\":\"bfloat16\",\"eos_token_id\":248044,\"hc_count\":4,\"hc_lowrank\":320,\"head_dim\":256,"
        "\"heads_per_ngram\":8,\"hidden_act\":\"silu\",\"hidden_size\":%u,\"indexer_budget\":2048,"
        "\"indexer_compress_ratio\":4,\"indexer_head_dim\":128,\"indexer_kv_heads\":1,\"indexer_n_heads\":4,"
        "\"layer_types\":[",
        HIDDEN);
    for (uint32_t i = 0; i < LAYERS; i++)
        fprintf(file, "%s\"%s\"", i ? "," : "", i % 4 == 3 ? "qwen_sparse_attention" : "linear_attention");
    fprintf(
        file,
        "],\"linear_conv_kernel_dim\":4,\"linear_key_head_dim\":128,\"linear_num_key_heads\":16,"
        "\"linear_num_value_heads\":32,\"linear_value_head_dim\":128,\"make_ngram_vocab_size_divisible_by\":"
        "128,"
        "\"max_position_embeddings\":262144,\"moe_intermediate_size\":%u,\"ngram_size\":3,"
        "\"ngram_vocab_size_base\":20000000,\"norm_topk_prob\":true,\"num_attention_heads\":24,"
        "\"num_experts\":%u,\"num_experts_per_tok\":10,\"num_hidden_layers\":%u,\"num_key_value_heads\":2,"
        "\"output_gate_type\":\"sigmoid\",\"ple_conv_kernel_size\":4,\"ple_embed_dim\":%u,\"ple_layer_ids\":["
        "2],"
        "\"rms_norm_eps\":1e-06,\"rope_parameters\":{\"partial_rotary_factor\":0.25,\"rope_theta\":10000000."
        "0,"
        "\"rope_type\":\"default\"},\"seed\":1234,\"shared_expert_intermediate_size\":%u,"
        "\"split_ngram_parts\":16,\"tie_word_embeddings\":false,\"vocab_size\":248320},"
        "\"quantization_config\":{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\",\"group_size\":16}}",
        WIDTH, EXPERTS, LAYERS, HIDDEN, WIDTH);
    fclose(file);
}

static uint64_t write_index(const char *dir)
{
    FILE *file = create(dir, "model.safetensors.index.json", 0);
    fprintf(file, "{\n  \"metadata\": {\n    \"total_size\": 1\n  },\n  \"weight_map\": {");
    qsort(specs, spec_count, sizeof *specs, compare_names);
    for (uint32_t i = 0; i < spec_count; i++)
        fprintf(file, "%s\n    \"%s\": \"model-%05u-of-%05u.safetensors\"", i ? "," : "", specs[i].name,
                specs[i].shard + 1, shard_count);
    fprintf(file, "\n  }\n}\n");
    uint64_t bytes = (uint64_t)ftell(file);
    fclose(file);
    return bytes;
}

static bool make_checkpoint(const char *dir)
{
    uint64_t header_bytes = 0;
    list_tensors();
    write_config(dir);
    qsort(specs, spec_count, sizeof *specs, compare_in_shards);
    for (uint32_t from = 0, to; from < spec_count; from = to) {
        for (to = from; to < spec_count && specs[to].shard == specs[from].shard;)
            to++;
        uint64_t bytes = write_shard(dir, from, to);
        if (!bytes)
            return false;
        header_bytes += bytes;
    }
    uint64_t index_bytes = write_index(dir);
    printf("%u tensors in %u shards, headers %.1f MB, index %.1f MB\n", spec_count, shard_count,
           (double)header_bytes / 1e6, (double)index_bytes / 1e6);
    return true;
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void measure(const char *dir)
{
    double open_s = 1e9, sizes_s = 1e9, close_s = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        struct ft_checkpoint *checkpoint;
        struct ft_weight_sizes sizes;
        struct ft_error err;
        double start = now_s();
        CHECK_OK(ft_checkpoint_open(&checkpoint, dir, &err), &err);
        REQUIRE(checkpoint);
        double opened = now_s();
        CHECK_OK(ft_load_sizes(checkpoint, 0, &sizes, &err), &err);
        double sized = now_s();
        CHECK_EQ(ft_checkpoint_tensor_count(checkpoint), spec_count);
        CHECK_EQ(sizes.moe_layer_count, LAYERS);
        ft_checkpoint_close(checkpoint);
        open_s = fmin(open_s, opened - start);
        sizes_s = fmin(sizes_s, sized - opened);
        close_s = fmin(close_s, now_s() - sized);
    }
    printf("best of %d: open %.3f s, sizes %.3f s, close %.3f s\n", ROUNDS, open_s, sizes_s, close_s);
}

static void remove_checkpoint(const char *path)
{
    char file[600];
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        unlink(file);
    }
    if (dir)
        closedir(dir);
    rmdir(path);
}

int main(int argc, char **argv)
{
    char temporary[] = "/tmp/ft_bench_XXXXXX";
    const char *dir = argc > 1 ? argv[1] : mkdtemp(temporary);
    if (argc > 1)
        mkdir(dir, 0777);
    bool made = dir && make_checkpoint(dir);
    if (made)
        measure(dir);
    else
        printf("skipped: the filesystem holds no sparse files of %llu bytes\n", SHARD_BYTES_MAX);
    if (argc < 2 && dir)
        remove_checkpoint(dir);
    free(specs);
    return !made ? 77 : test_failures_ || !test_checks_;
}
