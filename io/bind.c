/* SPDX-License-Identifier: Apache-2.0 */
/* The walk over a model's weights; see bind_internal.h for why it runs twice. */
#include "io/bind_internal.h"
#include "io/load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BYTES_MAX (1ull << 46) /* what an address space holds */

/* What lies at the start of the arena. */
struct placed {
    struct ft_weights weights;
    _Alignas(FT_ARENA_ALIGN) struct ft_layer_weights layers[];
};

static uint64_t placed_bytes(const struct ft_model *model)
{
    return ft_round_up(sizeof(struct placed) + model->layer_count * sizeof(struct ft_layer_weights),
                       FT_ARENA_ALIGN);
}

/* A matrix or vector of a group: `prefix` of the group, then this suffix. */
struct matrix_item {
    const char *suffix;
    uint32_t out, in;
    struct ft_matrix *matrix;
    enum ft_dense_use use;
};

static int bind_matrices(struct ft_binder *b, const char *prefix, const struct matrix_item *items,
                         size_t count)
{
    char name[FT_BINDER_NAME_BYTES];
    for (size_t i = 0; i < count; i++) {
        ft_binder_join(name, prefix, items[i].suffix);
        int status = ft_binder_matrix(b, name, items[i].out, items[i].in, items[i].use, items[i].matrix);
        if (status)
            return status;
    }
    return FT_OK;
}

struct vector_item {
    const char *suffix;
    uint64_t count;
    const float **vector;
};

static int bind_vectors(struct ft_binder *b, const char *prefix, const struct vector_item *items,
                        size_t count)
{
    for (size_t i = 0; i < count; i++) {
        int status = ft_binder_vector(b, prefix, items[i].suffix, &items[i].count, 1, items[i].vector);
        if (status)
            return status;
    }
    return FT_OK;
}

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static int bind_mix(struct ft_binder *b, const char *prefix, bool inject, struct ft_mix_weights *mix)
{
    const struct ft_model *m = b->model;
    uint32_t wide = m->hc_count * m->hidden;
    const struct vector_item norm = {"hc_norm.weight", wide, &mix->norm};
    const struct matrix_item matrices[] = {
        {"input_mix_weight_down", m->hc_lowrank, wide, &mix->down, FT_USE_MIX},
        {"input_mix_weight_up", wide, m->hc_lowrank, &mix->up, FT_USE_MIX},
        {"block_inject_weight", m->hc_count, wide, &mix->inject, FT_USE_GATE},
    };
    int status = bind_vectors(b, prefix, &norm, 1);
    return status ? status : bind_matrices(b, prefix, matrices, inject ? 3 : 2);
}

static int bind_linear(struct ft_binder *b, const char *prefix, struct ft_linear_weights *w)
{
    const struct ft_model *m = b->model;
    uint32_t channels = ft_model_conv_channels(m), values = m->value_head_count * m->value_dim;
    const uint64_t conv_shape[3] = {channels, 1, m->conv_taps};
    const struct matrix_item matrices[] = {
        {"in_proj_qkv", channels, m->hidden, &w->qkv, FT_USE_LINEAR},
        {"in_proj_z", values, m->hidden, &w->z, FT_USE_LINEAR},
        {"in_proj_b", m->value_head_count, m->hidden, &w->b, FT_USE_GATE},
        {"in_proj_a", m->value_head_count, m->hidden, &w->a, FT_USE_GATE},
        {"out_proj", m->hidden, values, &w->out, FT_USE_LINEAR},
    };
    const struct vector_item vectors[] = {
        {"A_log", m->value_head_count, &w->a_log},
        {"dt_bias", m->value_head_count, &w->dt_bias},
        {"norm.weight", m->value_dim, &w->norm},
    };
    int status = bind_matrices(b, prefix, matrices, COUNT(matrices));
    if (!status)
        status = bind_vectors(b, prefix, vectors, COUNT(vectors));
    return status ? status : ft_binder_vector(b, prefix, "conv1d.weight", conv_shape, 3, &w->conv);
}

static int bind_indexer(struct ft_binder *b, const char *prefix, struct ft_attention_weights *w)
{
    const struct ft_model *m = b->model;
    const struct matrix_item matrix = {"indexer.index_qk_proj", (m->indexer_head_count + 1) * m->indexer_dim,
                                       m->hidden, &w->index_qk, FT_USE_GATE};
    const struct vector_item vectors[] = {
        {"indexer.q_layernorm.weight", m->indexer_dim, &w->index_q_norm},
        {"indexer.k_layernorm.weight", m->indexer_dim, &w->index_k_norm},
    };
    int status = bind_matrices(b, prefix, &matrix, 1);
    return status ? status : bind_vectors(b, prefix, vectors, COUNT(vectors));
}

static int bind_attention(struct ft_binder *b, const char *prefix, bool sparse,
                          struct ft_attention_weights *w)
{
    const struct ft_model *m = b->model;
    uint32_t heads = m->head_count * m->head_dim, kv = m->kv_head_count * m->head_dim;
    uint32_t queries = m->attention_gate ? 2 * heads : heads;
    const struct matrix_item matrices[] = {
        {"q_proj", queries, m->hidden, &w->q, FT_USE_ATTENTION},
        {"k_proj", kv, m->hidden, &w->k, FT_USE_ATTENTION},
        {"v_proj", kv, m->hidden, &w->v, FT_USE_ATTENTION},
        {"o_proj", m->hidden, heads, &w->o, FT_USE_ATTENTION},
    };
    const struct vector_item biases[] = {
        {"q_proj.bias", queries, &w->q_bias},
        {"k_proj.bias", kv, &w->k_bias},
        {"v_proj.bias", kv, &w->v_bias},
        {"o_proj.bias", m->hidden, &w->o_bias},
    };
    const struct vector_item norms[] = {
        {"q_norm.weight", m->head_dim, &w->q_norm},
        {"k_norm.weight", m->head_dim, &w->k_norm},
    };
    const struct vector_item sinks = {"sinks", m->head_count, &w->sinks};
    int status = bind_matrices(b, prefix, matrices, COUNT(matrices));
    if (!status && m->attention_bias)
        status = bind_vectors(b, prefix, biases, COUNT(biases));
    if (!status && m->qk_norm)
        status = bind_vectors(b, prefix, norms, COUNT(norms));
    if (!status && m->sinks)
        status = bind_vectors(b, prefix, &sinks, 1);
    return status || !sparse ? status : bind_indexer(b, prefix, w);
}

static int bind_mlp(struct ft_binder *b, const char *prefix, uint32_t width, struct ft_mlp_weights *w)
{
    const struct matrix_item matrices[] = {
        {"gate_proj", width, b->model->hidden, &w->gate, FT_USE_MLP},
        {"up_proj", width, b->model->hidden, &w->up, FT_USE_MLP},
        {"down_proj", b->model->hidden, width, &w->down, FT_USE_MLP},
    };
    return bind_matrices(b, prefix, matrices, COUNT(matrices));
}

static int bind_moe(struct ft_binder *b, const char *prefix, struct ft_layer_weights *w)
{
    const struct ft_model *m = b->model;
    const struct matrix_item router = {m->family == FT_FAMILY_GPT_OSS ? "router" : "gate", m->expert_count,
                                       m->hidden, &w->router, FT_USE_GATE};
    const struct matrix_item shared_gate = {"shared_expert_gate", 1, m->hidden, &w->shared_gate, FT_USE_GATE};
    const struct vector_item bias = {"router.bias", m->expert_count, &w->router_bias};
    char name[FT_BINDER_NAME_BYTES];
    int status = bind_matrices(b, prefix, &router, 1);
    if (!status && m->router_bias)
        status = bind_vectors(b, prefix, &bias, 1);
    if (!status && m->shared_width) {
        ft_binder_join(name, prefix, "shared_expert.");
        status = bind_mlp(b, name, m->shared_width, &w->shared);
        if (!status)
            status = bind_matrices(b, prefix, &shared_gate, 1);
    }
    return status;
}

/* The table itself stays on disk; here it is only counted. */
static int count_ple_table(struct ft_binder *b, const char *prefix)
{
    char name[200];
    for (uint32_t i = 0;; i++) {
        snprintf(name, sizeof name, "ple_embedding.ngram_embedding.shard_%u.weight", i);
        const struct ft_tensor *shard = ft_binder_find(b, prefix, name);
        if (!shard && !i)
            return ft_error_set(b->err, FT_FORMAT, "%s: tensor %s%s is missing, wanted F8_E4M3 or BF16 rows",
                                ft_checkpoint_dir(b->checkpoint), prefix, name);
        if (!shard)
            return FT_OK;
        if (b->bind)
            b->bind->sizes.ple_bytes += shard->bytes;
    }
}

static int bind_ple(struct ft_binder *b, const char *prefix, struct ft_ple_weights *w)
{
    const struct ft_model *m = b->model;
    uint32_t wide = m->hc_count * m->hidden;
    const uint64_t conv_shape[3] = {wide, 1, m->ple_taps};
    const struct matrix_item matrices[] = {
        {"key_proj", wide, m->ple_embed_dim, &w->key, FT_USE_PLE},
        {"value_proj", m->hidden, m->ple_embed_dim, &w->value, FT_USE_PLE},
    };
    const struct vector_item vectors[] = {
        {"norm_key.weight", wide, &w->norm_key},
        {"norm_query.weight", wide, &w->norm_query},
        {"norm_conv.weight", wide, &w->norm_conv},
    };
    int status = bind_matrices(b, prefix, matrices, COUNT(matrices));
    if (!status)
        status = bind_vectors(b, prefix, vectors, COUNT(vectors));
    if (!status)
        status = ft_binder_vector(b, prefix, "conv1d.weight", conv_shape, 3, &w->conv);
    return status ? status : count_ple_table(b, prefix);
}

/* Norms around the two blocks: plain, or the mixers of the residual streams. */
static int bind_residual(struct ft_binder *b, const char *prefix, struct ft_layer_weights *w)
{
    const struct vector_item norms[] = {
        {"input_layernorm.weight", b->model->hidden, &w->attention_norm},
        {"post_attention_layernorm.weight", b->model->hidden, &w->mlp_norm},
    };
    char name[FT_BINDER_NAME_BYTES];
    if (b->model->hc_count == 1)
        return bind_vectors(b, prefix, norms, COUNT(norms));
    ft_binder_join(name, prefix, "attn_hyper_connection.");
    int status = bind_mix(b, name, true, &w->attention_mix);
    ft_binder_join(name, prefix, "mlp_hyper_connection.");
    return status ? status : bind_mix(b, name, true, &w->mlp_mix);
}

/* Everything of a layer but its experts. */
static int bind_layer(struct ft_binder *b, uint32_t layer, struct ft_layer_weights *w)
{
    const struct ft_layer_spec *spec = &b->model->layers[layer];
    char prefix[64], name[FT_BINDER_NAME_BYTES];
    snprintf(prefix, sizeof prefix, "layers.%u.", layer);
    int status = bind_residual(b, prefix, w);
    if (!status && spec->ple != FT_PLE_NONE) {
        ft_binder_join(name, prefix, "ple.");
        status = bind_ple(b, name, &w->ple);
    }
    if (status)
        return status;
    bool linear = spec->attention == FT_ATTENTION_LINEAR;
    ft_binder_join(name, prefix, linear ? "linear_attn." : "self_attn.");
    status = linear ? bind_linear(b, name, &w->linear)
                    : bind_attention(b, name, spec->attention == FT_ATTENTION_SPARSE, &w->attention);
    ft_binder_join(name, prefix, "mlp.");
    if (status)
        return status;
    return spec->dense ? bind_mlp(b, name, b->model->dense_width, &w->dense) : bind_moe(b, name, w);
}

/* Embedding and head, whose bytes are reported on their own. */
static int bind_ends(struct ft_binder *b, struct ft_weights *w)
{
    const struct ft_model *m = b->model;
    uint64_t start = b->end;
    int status = ft_binder_matrix(b, "embed_tokens", m->vocab, m->hidden, FT_USE_EMBED, &w->embed);
    if (status)
        return status;
    if (w->embed.scale) /* rows are looked up, and a tied head would need a second copy of the scalars */
        return ft_error_set(b->err, FT_UNSUPPORTED, "%s: embed_tokens is %s, wanted bf16, f16 or f32",
                            ft_checkpoint_dir(b->checkpoint), ft_format_name(w->embed.format));
    uint64_t middle = b->end;
    w->head = w->embed;
    if (!m->tied && (status = ft_binder_matrix(b, "lm_head", m->vocab, m->hidden, FT_USE_HEAD, &w->head)))
        return ft_error_prepend(b->err, "tie_word_embeddings is false");
    if (b->bind) {
        b->bind->sizes.embed_bytes = middle - start;
        b->bind->sizes.head_bytes = b->end - middle;
    }
    return FT_OK;
}

static int walk(struct ft_binder *b)
{
    const struct ft_model *m = b->model;
    struct placed *placed = (struct placed *)(void *)b->block;
    struct ft_weights *w = &placed->weights;
    const struct vector_item norm = {"norm.weight", m->hidden, &w->final_norm};
    (void)ft_binder_take(b, placed_bytes(m), FT_ARENA_ALIGN);
    w->layers = placed->layers;
    int status = bind_ends(b, w);
    uint64_t start = b->end;
    if (!status)
        status = m->hc_count > 1 ? bind_mix(b, "hyper_connection_mixer.", false, &w->top_mix)
                                 : bind_vectors(b, "", &norm, 1);
    for (uint32_t i = 0; i < m->layer_count && !status; i++) {
        uint64_t before = b->end;
        status = bind_layer(b, i, &placed->layers[i]);
        if (b->bind)
            b->bind->sizes.layer_dense_bytes[i] = b->end - before;
    }
    if (b->bind)
        b->bind->sizes.dense_bytes = b->end - start;
    for (uint32_t i = 0; i < m->layer_count && !status; i++) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "layers.%u.mlp.experts", i);
        if (!m->layers[i].dense)
            status = ft_binder_experts(b, prefix, &placed->layers[i]);
    }
    return status;
}

/* The number after `prefix`, or FT_NONE when the name does not go on with "<number>.". */
static uint32_t number_after(const char *name, const char *prefix, const char **rest)
{
    size_t length = strlen(prefix);
    uint64_t number = 0;
    if (strncmp(name, prefix, length) != 0 || name[length] < '0' || name[length] > '9')
        return FT_NONE;
    for (name += length; *name >= '0' && *name <= '9'; name++)
        number = FT_MIN(number * 10 + (uint64_t)(*name - '0'), (uint64_t)FT_NONE - 1);
    *rest = name + 1;
    return *name == '.' ? (uint32_t)number : FT_NONE;
}

/*
 * Tensors that ft does not know are nobody's harm, but weights of layers or experts that the config does not
 * have say that config and weights do not belong together.
 */
static int check_extra(const struct ft_binder *b)
{
    const struct ft_model *m = b->model;
    for (uint32_t i = 0; i < ft_checkpoint_tensor_count(b->checkpoint); i++) {
        const struct ft_tensor *tensor = ft_checkpoint_tensor(b->checkpoint, i);
        const char *rest;
        uint32_t layer = number_after(tensor->name, "layers.", &rest);
        if (layer == FT_NONE)
            continue;
        if (layer >= m->layer_count)
            return ft_error_set(
                b->err, FT_FORMAT,
                "%s: tensor %s belongs to layer %u, but num_hidden_layers is %u: config.json does not "
                "fit these weights",
                ft_checkpoint_file_path(b->checkpoint, tensor->file), tensor->name, layer, m->layer_count);
        uint32_t expert = number_after(rest, "mlp.experts.", &rest);
        if (expert != FT_NONE && expert >= m->expert_count)
            return ft_error_set(
                b->err, FT_FORMAT,
                "%s: tensor %s belongs to expert %u, but num_experts is %u: config.json does not fit "
                "these weights",
                ft_checkpoint_file_path(b->checkpoint, tensor->file), tensor->name, expert, m->expert_count);
    }
    return FT_OK;
}

static int compare_parts(const void *a, const void *b)
{
    const struct ft_load_part *left = a, *right = b;
    if (left->file != right->file)
        return left->file < right->file ? -1 : 1;
    return left->offset < right->offset ? -1 : left->offset > right->offset;
}

static int list_parts(struct ft_bind *bind, char *block, struct ft_error *err)
{
    const struct ft_checkpoint *checkpoint = bind->checkpoint;
    struct ft_binder b = {.bind = bind,
                          .checkpoint = checkpoint,
                          .model = ft_checkpoint_model(checkpoint),
                          .block = block,
                          .fp8_uses = bind->fp8_uses,
                          .err = err};
    int status = walk(&b);
    if (!status)
        status = check_extra(&b);
    if (status)
        return status;
    bind->arena_bytes = FT_MIN(b.end, ARENA_BYTES_MAX + 1);
    if (b.end > ARENA_BYTES_MAX)
        return ft_error_set(err, FT_LIMIT, "%s: the weights need more than 64 TiB of memory",
                            ft_checkpoint_dir(checkpoint));
    bind->arena_bytes = ft_round_up(b.end, 4096);
    bind->sizes.dense = bind->fp8_uses ? FT_DENSE_TO_FP8 : FT_DENSE_AS_STORED;
    for (uint32_t i = 0; i < ft_checkpoint_file_count(checkpoint); i++)
        bind->sizes.file_bytes += ft_checkpoint_file_bytes(checkpoint, i);
    if (bind->part_count)
        qsort(bind->parts, bind->part_count, sizeof bind->parts[0], compare_parts);
    return ft_quantiser_begin(bind, err);
}

static int open_bind(struct ft_bind **out, const struct ft_checkpoint *checkpoint, uint32_t fp8_uses,
                     bool sizes_only, struct ft_error *err)
{
    *out = NULL;
    struct ft_bind *bind = calloc(1, sizeof *bind);
    /* The structs are filled and thrown away: only their offsets matter in this pass. */
    uint64_t block_bytes = placed_bytes(ft_checkpoint_model(checkpoint));
    char *block = aligned_alloc(FT_ARENA_ALIGN, block_bytes);
    if (!bind || !block) {
        free(bind);
        free(block);
        return ft_error_set(err, FT_MEMORY, "%s: no memory to bind weights", ft_checkpoint_dir(checkpoint));
    }
    memset(block, 0, block_bytes);
    bind->checkpoint = checkpoint;
    bind->fp8_uses = fp8_uses;
    bind->sizes_only = sizes_only;
    int status = list_parts(bind, block, err);
    free(block);
    if (status)
        ft_bind_close(bind);
    else
        *out = bind;
    return status;
}

int ft_bind_open(struct ft_bind **out, const struct ft_checkpoint *checkpoint, uint32_t fp8_uses,
                 struct ft_error *err)
{
    return open_bind(out, checkpoint, fp8_uses, false, err);
}

void ft_bind_close(struct ft_bind *bind)
{
    if (bind) {
        ft_quantiser_free(bind->quantiser);
        free(bind->parts);
    }
    free(bind);
}

const struct ft_weight_sizes *ft_bind_sizes(const struct ft_bind *bind)
{
    return &bind->sizes;
}

uint64_t ft_bind_arena_bytes(const struct ft_bind *bind)
{
    return bind->arena_bytes;
}

uint32_t ft_bind_part_count(const struct ft_bind *bind)
{
    return bind->part_count;
}

const struct ft_load_part *ft_bind_parts(const struct ft_bind *bind)
{
    return bind->parts;
}

uint64_t ft_bind_source_bytes(const struct ft_bind *bind)
{
    return bind->source_bytes;
}

const struct ft_weights *ft_bind_place(const struct ft_bind *bind, char *base)
{
    struct ft_error err;
    struct ft_binder b = {.checkpoint = bind->checkpoint,
                          .model = ft_checkpoint_model(bind->checkpoint),
                          .block = base,
                          .base = (uintptr_t)base,
                          .fp8_uses = bind->fp8_uses,
                          .err = &err};
    int status = walk(&b); /* the same headers that passed in ft_bind_open */
    FT_ASSERT_EQ(status, FT_OK);
    FT_ASSERT_EQ(ft_round_up(b.end, 4096), bind->arena_bytes);
    return &((const struct placed *)(const void *)base)->weights;
}

int ft_load_sizes(const struct ft_checkpoint *checkpoint, uint32_t fp8_uses, struct ft_weight_sizes *sizes,
                  struct ft_error *err)
{
    struct ft_bind *bind;
    int status = open_bind(&bind, checkpoint, fp8_uses, true, err);
    if (status)
        return status;
    *sizes = bind->sizes;
    ft_bind_close(bind);
    return FT_OK;
}
