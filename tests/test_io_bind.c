/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/arena.h"
#include "io/bind.h"
#include "io/load.h"
#include "io/quantise.h"
#include "tests/checkpoint_files.h"

#include <fcntl.h>

static const char *const fixtures[] = {
    FIXTURE("gpt_oss-mxfp4"),
    FIXTURE("qwen3_5_moe-bf16"),
    FIXTURE("qwen3_moe-bf16"),
    FIXTURE("qwen3_moe-bf16-sharded-tied"),
    FIXTURE("qwen3_moe-fp8_block"),
    FIXTURE("qwen3_moe-nvfp4-compressed_tensors"),
    FIXTURE("qwen4_exp-bf16"),
    FIXTURE("qwen4_exp-nvfp4-modelopt"),
    FIXTURE("qwen3_5_moe-fused-bf16"),
    FIXTURE("qwen3_5_moe-fused-fp8_block"),
    FIXTURE("qwen3_moe-dense-layers"),
    FIXTURE("qwen3_moe-mixed-formats"),
    FIXTURE("qwen3_moe-fp8_block-edges"),
    FIXTURE("gpt_oss-mxfp4-variant"),
    FIXTURE("qwen4_exp-eos-list"),
    FT_DATA_DIR "/ft-tiny",
};

static uint32_t fp8_uses; /* how the next checkpoint is bound */
static bool backwards;    /* its pieces come last first */

/* A checkpoint bound and read with plain pread. */
struct bound {
    struct ft_checkpoint *checkpoint;
    struct ft_bind *bind;
    struct ft_arena arena;
    const struct ft_weights *w;
};

static void bound_fini(struct bound *b)
{
    ft_arena_fini(&b->arena);
    ft_bind_close(b->bind);
    ft_checkpoint_close(b->checkpoint);
}

/* Applies a part in pieces of `units` units, from a buffer that is unaligned on purpose. */
static int read_part(struct bound *b, const struct ft_load_part *part, uint64_t units, struct ft_error *err)
{
    int fd = open(ft_checkpoint_file_path(b->checkpoint, part->file), O_RDONLY);
    char *buffer = malloc(part->bytes + 1);
    int status = FT_OK;
    CHECK_EQ(pread(fd, buffer + 1, part->bytes, (off_t)part->offset), part->bytes);
    uint64_t step = units * part->unit_bytes, pieces = ft_div_up(part->bytes, step);
    for (uint64_t i = 0; i < pieces && !status; i++) {
        uint64_t from = (backwards ? pieces - 1 - i : i) * step, bytes = FT_MIN(step, part->bytes - from);
        status = ft_bind_apply(b->bind, part, buffer + 1 + from, from, bytes, b->arena.base, err);
    }
    free(buffer);
    close(fd);
    return status;
}

static int bound_open(struct bound *b, const char *dir, uint64_t units, struct ft_error *err)
{
    *b = (struct bound){0};
    int status = ft_checkpoint_open(&b->checkpoint, dir, err);
    if (!status)
        status = ft_bind_open(&b->bind, b->checkpoint, fp8_uses, err);
    if (!status)
        status = ft_arena_init(&b->arena, "model", ft_bind_arena_bytes(b->bind), err);
    if (status) {
        bound_fini(b);
        return status;
    }
    b->w = ft_bind_place(b->bind, b->arena.base);
    const struct ft_load_part *parts = ft_bind_parts(b->bind);
    for (uint32_t i = 0; i < ft_bind_part_count(b->bind) && !status; i++)
        status = read_part(b, &parts[i], units, err);
    if (status)
        bound_fini(b);
    return status;
}

static float from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Raw bytes of a tensor, to be freed. */
static void *raw(const struct bound *b, const char *name)
{
    const struct ft_tensor *t = ft_checkpoint_find(b->checkpoint, name);
    if (!t) {
        fprintf(stderr, "no tensor %s\n", name);
        abort();
    }
    int fd = open(ft_checkpoint_file_path(b->checkpoint, t->file), O_RDONLY);
    void *data = malloc(t->bytes + 1);
    CHECK_EQ(pread(fd, data, t->bytes, (off_t)t->offset), t->bytes);
    close(fd);
    return data;
}

static void check_same(const struct bound *b, const char *name, const void *got, uint64_t from,
                       uint64_t bytes)
{
    char *want = raw(b, name);
    CHECK_EQ(memcmp(want + from, got, bytes), 0);
    free(want);
}

static void check_vector(const struct bound *b, const char *name, const float *got, uint32_t count)
{
    uint16_t *want = raw(b, name);
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < count; i++)
        wrong += from_bf16(want[i]) != got[i];
    CHECK_EQ(wrong, 0);
    free(want);
}

TEST(parts_are_sorted_disjoint_and_inside_files_and_arena)
{
    for (size_t f = 0; f < sizeof fixtures / sizeof fixtures[0]; f++) {
        struct ft_error err;
        struct ft_checkpoint *checkpoint;
        struct ft_bind *bind = NULL;
        CHECK_OK(ft_checkpoint_open(&checkpoint, fixtures[f], &err), &err);
        CHECK_OK(ft_bind_open(&bind, checkpoint, 0, &err), &err);
        REQUIRE(bind);
        const struct ft_load_part *p = ft_bind_parts(bind);
        uint64_t sum = 0, arena = ft_bind_arena_bytes(bind);
        uint32_t bad = 0;
        CHECK(ft_bind_part_count(bind) > 50);
        for (uint32_t i = 0; i < ft_bind_part_count(bind); i++) {
            const struct ft_tensor *t = ft_checkpoint_tensor(checkpoint, p[i].tensor);
            uint64_t grow = p[i].unit_bytes == 2 && p[i].convert != FT_LOAD_COPY ? 2 : 1;
            sum += p[i].bytes;
            bad += p[i].offset < t->offset || p[i].offset + p[i].bytes > t->offset + t->bytes;
            bad += p[i].file != t->file || p[i].bytes % p[i].unit_bytes != 0 || !p[i].bytes;
            bad += p[i].destination + (p[i].row_bytes ? p[i].bytes / 2 : p[i].bytes) * grow > arena;
            bad += p[i].row_bytes && p[i].bytes % (2 * p[i].row_bytes) != 0;
            if (i && p[i].file == p[i - 1].file)
                bad += p[i].offset < p[i - 1].offset + p[i - 1].bytes;
            else if (i)
                bad += p[i].file < p[i - 1].file;
        }
        CHECK_EQ(bad, 0);
        CHECK_EQ(sum, ft_bind_source_bytes(bind));
        ft_bind_close(bind);
        ft_checkpoint_close(checkpoint);
    }
}

/* Every byte of the arena is written by at most one part: apply marks of 0xff-free data into a counting arena. */
TEST(destinations_do_not_overlap)
{
    for (size_t f = 0; f < sizeof fixtures / sizeof fixtures[0]; f++) {
        struct ft_error err;
        struct ft_checkpoint *checkpoint;
        struct ft_bind *bind = NULL;
        CHECK_OK(ft_checkpoint_open(&checkpoint, fixtures[f], &err), &err);
        CHECK_OK(ft_bind_open(&bind, checkpoint, 0, &err), &err);
        REQUIRE(bind);
        const struct ft_load_part *p = ft_bind_parts(bind);
        uint8_t *seen = calloc(1, ft_bind_arena_bytes(bind));
        uint64_t twice = 0;
        for (uint32_t i = 0; i < ft_bind_part_count(bind); i++) {
            uint64_t grow = p[i].unit_bytes == 2 && p[i].convert != FT_LOAD_COPY ? 2 : 1;
            uint64_t bytes = p[i].bytes * grow / (p[i].row_bytes ? 2 : 1);
            for (uint64_t k = 0; k < bytes; k++) {
                twice += seen[p[i].destination + k]++;
                if (p[i].row_bytes)
                    twice += seen[p[i].destination_odd + k]++;
            }
        }
        CHECK_EQ(twice, 0);
        free(seen);
        ft_bind_close(bind);
        ft_checkpoint_close(checkpoint);
    }
}

TEST(bf16_weights_arrive_as_they_are_stored)
{
    struct ft_error err;
    struct bound b;
    struct ft_expert expert;
    REQUIRE(bound_open(&b, FIXTURE("qwen4_exp-bf16"), 5, &err) == FT_OK);
    const struct ft_layer_weights *l0 = &b.w->layers[0], *l1 = &b.w->layers[1], *l3 = &b.w->layers[3];
    check_same(&b, "embed_tokens.weight", b.w->embed.data, 0, 320 * 128 * 2);
    check_same(&b, "lm_head.weight", b.w->head.data, 0, 320 * 128 * 2);
    CHECK(b.w->final_norm == NULL && l0->attention_norm == NULL);
    check_vector(&b, "hyper_connection_mixer.hc_norm.weight", b.w->top_mix.norm, 512);
    CHECK(b.w->top_mix.inject.data == NULL && b.w->top_mix.up.in == 16 && b.w->top_mix.up.out == 512);
    check_vector(&b, "layers.0.linear_attn.conv1d.weight", l0->linear.conv, 256 * 4);
    check_vector(&b, "layers.0.linear_attn.A_log", l0->linear.a_log, 4);
    check_same(&b, "layers.0.linear_attn.in_proj_qkv.weight", l0->linear.qkv.data, 0, 256 * 128 * 2);
    CHECK(l0->attention.q.data == NULL && l0->ple.key.data == NULL);
    check_vector(&b, "layers.1.ple.norm_conv.weight", l1->ple.norm_conv, 512);
    check_same(&b, "layers.1.ple.key_proj.weight", l1->ple.key.data, 0, 512 * 128 * 2);
    CHECK_EQ(l3->attention.q.out, 256);
    CHECK_EQ(l3->attention.index_qk.out, 160);
    check_vector(&b, "layers.3.self_attn.indexer.k_layernorm.weight", l3->attention.index_k_norm, 32);
    check_same(&b, "layers.3.mlp.shared_expert_gate.weight", l3->shared_gate.data, 0, 256);
    ft_expert_view(&l3->expert_layout, l3->experts + 7ull * l3->expert_layout.stride, &expert);
    check_same(&b, "layers.3.mlp.experts.7.up_proj.weight", expert.up.data, 0, 64 * 128 * 2);
    check_same(&b, "layers.3.mlp.experts.7.down_proj.weight", expert.down.data, 0, 64 * 128 * 2);
    CHECK_EQ((uintptr_t)l3->experts % 4096, 0);
    CHECK_EQ(ft_bind_sizes(b.bind)->ple_bytes, 4352 * 16 * 2);
    CHECK_EQ(ft_bind_sizes(b.bind)->moe_layer_count, 4);
    CHECK_EQ(ft_bind_sizes(b.bind)->expert_total_bytes, 4 * 16 * 3 * 64 * 128 * 2);
    CHECK_EQ(ft_bind_sizes(b.bind)->embed_bytes, 320 * 128 * 2);
    bound_fini(&b);
}

TEST(nvfp4_globals_are_stored_or_inverted_as_the_naming_says)
{
    struct ft_error err;
    struct bound b;
    struct ft_expert expert;
    float *global;
    REQUIRE(bound_open(&b, FIXTURE("qwen4_exp-nvfp4-modelopt"), 3, &err) == FT_OK);
    const struct ft_layer_weights *l = &b.w->layers[2];
    ft_expert_view(&l->expert_layout, l->experts + 15ull * l->expert_layout.stride, &expert);
    CHECK_EQ(expert.down.format, FT_FORMAT_NVFP4);
    check_same(&b, "layers.2.mlp.experts.15.down_proj.weight", expert.down.data, 0, 128 * 32);
    check_same(&b, "layers.2.mlp.experts.15.gate_proj.weight_scale", expert.gate.scale, 0, 64 * 8);
    global = raw(&b, "layers.2.mlp.experts.15.down_proj.weight_scale_2");
    CHECK(expert.down.global == *global && *global > 0);
    free(global);
    bound_fini(&b);
    REQUIRE(bound_open(&b, FIXTURE("qwen3_moe-nvfp4-compressed_tensors"), 1000, &err) == FT_OK);
    l = &b.w->layers[1];
    ft_expert_view(&l->expert_layout, l->experts + 3ull * l->expert_layout.stride, &expert);
    global = raw(&b, "layers.1.mlp.experts.3.up_proj.weight_global_scale");
    CHECK(expert.up.global == 1 / *global && *global > 0);
    free(global);
    check_same(&b, "layers.1.mlp.experts.3.up_proj.weight_packed", expert.up.data, 0, 64 * 64);
    bound_fini(&b);
}

TEST(fp8_blocks_keep_their_scales)
{
    struct ft_error err;
    struct bound b;
    struct ft_expert expert;
    REQUIRE(bound_open(&b, FIXTURE("qwen3_moe-fp8_block"), 7, &err) == FT_OK);
    const struct ft_layer_weights *l = &b.w->layers[2];
    CHECK_EQ(l->attention.o.format, FT_FORMAT_FP8_BLOCK);
    CHECK_EQ(l->attention.o.block_in, 128);
    check_same(&b, "layers.2.self_attn.o_proj.weight", l->attention.o.data, 0, 256 * 128);
    check_same(&b, "layers.2.self_attn.o_proj.weight_scale_inv", l->attention.o.scale, 0, 8);
    ft_expert_view(&l->expert_layout, l->experts + 1ull * l->expert_layout.stride, &expert);
    check_same(&b, "layers.2.mlp.experts.1.down_proj.weight_scale_inv", expert.down.scale, 0, 16);
    check_same(&b, "layers.2.mlp.experts.1.gate_proj.weight", expert.gate.data, 0, 192 * 256);
    bound_fini(&b);
}

TEST(interleaved_rows_are_dealt_to_gate_and_up)
{
    struct ft_error err;
    const uint64_t splits[] = {1, 7, 1u << 20};
    for (size_t s = 0; s < 3; s++) {
        struct bound b;
        struct ft_expert expert;
        REQUIRE(bound_open(&b, FIXTURE("gpt_oss-mxfp4"), splits[s], &err) == FT_OK);
        const struct ft_layer_weights *l = &b.w->layers[1];
        uint8_t *blocks = raw(&b, "layers.1.mlp.experts.gate_up_proj_blocks");
        uint8_t *scales = raw(&b, "layers.1.mlp.experts.gate_up_proj_scales");
        uint16_t *bias = raw(&b, "layers.1.mlp.experts.gate_up_proj_bias");
        uint32_t e = 5, wrong = 0;
        ft_expert_view(&l->expert_layout, l->experts + (uint64_t)e * l->expert_layout.stride, &expert);
        for (uint32_t row = 0; row < 64; row++) {
            uint64_t even = (e * 128ull + 2 * row), odd = even + 1;
            wrong += memcmp((const char *)expert.gate.data + row * 64, blocks + even * 64, 64) != 0;
            wrong += memcmp((const char *)expert.up.data + row * 64, blocks + odd * 64, 64) != 0;
            wrong += memcmp((const char *)expert.gate.scale + row * 4, scales + even * 4, 4) != 0;
            wrong += memcmp((const char *)expert.up.scale + row * 4, scales + odd * 4, 4) != 0;
            wrong +=
                expert.gate_bias[row] != from_bf16(bias[even]) || expert.up_bias[row] != from_bf16(bias[odd]);
        }
        CHECK_EQ(wrong, 0);
        check_same(&b, "layers.1.mlp.experts.down_proj_blocks", expert.down.data, e * 128 * 32, 128 * 32);
        uint16_t *down_bias = raw(&b, "layers.1.mlp.experts.down_proj_bias");
        CHECK(expert.down_bias[127] == from_bf16(down_bias[e * 128 + 127]));
        check_vector(&b, "layers.1.self_attn.sinks", l->attention.sinks, 4);
        check_vector(&b, "layers.1.mlp.router.bias", l->router_bias, 8);
        check_vector(&b, "layers.1.self_attn.o_proj.bias", l->attention.o_bias, 128);
        free(blocks);
        free(scales);
        free(bias);
        free(down_bias);
        bound_fini(&b);
    }
}

TEST(tied_head_is_the_embedding)
{
    struct ft_error err;
    struct bound b;
    REQUIRE(bound_open(&b, FIXTURE("qwen3_moe-bf16-sharded-tied"), 1000, &err) == FT_OK);
    CHECK(b.w->head.data == b.w->embed.data && b.w->head.out == 320);
    CHECK_EQ(ft_bind_sizes(b.bind)->head_bytes, 0);
    check_vector(&b, "norm.weight", b.w->final_norm, 128);
    bound_fini(&b);
}

static void check_refused(struct scratch *s, int status, const char *text)
{
    struct ft_error err;
    struct bound b;
    scratch_save(s);
    CHECK_FAILS(bound_open(&b, s->dir, 1000, &err), status, text, &err);
}

/* Moves the experts of every layer into fused tensors, [E, 2I, H] and [E, H, I]. */
static void fuse_experts(struct scratch *s, uint32_t layers, uint32_t experts, void **blocks)
{
    char name[128];
    const uint64_t width = 64, hidden = 128, bytes = width * hidden * 2;
    struct ft_array *items = calloc(s->model.count + 2 * layers, sizeof *items);
    static char names[8][2][64];
    uint32_t count = 0;
    for (uint32_t l = 0; l < layers; l++) {
        char *up = blocks[2 * l] = malloc(experts * 2 * bytes);
        char *down = blocks[2 * l + 1] = malloc(experts * bytes);
        for (uint32_t e = 0; e < experts; e++) {
            static const char *const parts[3] = {"gate", "up", "down"};
            for (uint32_t k = 0; k < 3; k++) {
                snprintf(name, sizeof name, "model.layers.%u.mlp.experts.%u.%s_proj.weight", l, e, parts[k]);
                memcpy(k == 2 ? down + e * bytes : up + (2 * e + k) * bytes, scratch_array(s, name)->data,
                       bytes);
            }
        }
        snprintf(names[l][0], 64, "model.layers.%u.mlp.experts.gate_up_proj", l);
        snprintf(names[l][1], 64, "model.layers.%u.mlp.experts.down_proj", l);
        items[count++] = (struct ft_array){names[l][0], FT_DTYPE_BF16, 3, {experts, 2 * width, hidden}, up};
        items[count++] = (struct ft_array){names[l][1], FT_DTYPE_BF16, 3, {experts, hidden, width}, down};
    }
    for (uint32_t i = 0; i < s->model.count; i++)
        if (!strstr(s->model.items[i].name, ".experts."))
            items[count++] = s->model.items[i];
    free(s->model.items);
    s->model.items = items;
    s->model.count = count;
}

TEST(fused_experts_equal_single_ones)
{
    struct ft_error err;
    struct scratch s;
    struct bound single, fused;
    void *blocks[8];
    scratch_init(&s, FIXTURE("qwen3_5_moe-bf16"));
    fuse_experts(&s, 4, 16, blocks);
    scratch_save(&s);
    REQUIRE(bound_open(&single, FIXTURE("qwen3_5_moe-bf16"), 1000, &err) == FT_OK);
    CHECK_OK(bound_open(&fused, s.dir, 9, &err), &err);
    REQUIRE(fused.w);
    for (uint32_t l = 0; l < 4; l++)
        CHECK_EQ(memcmp(single.w->layers[l].experts, fused.w->layers[l].experts,
                        16ull * single.w->layers[l].expert_layout.stride),
                 0);
    bound_fini(&single);
    bound_fini(&fused);
    for (uint32_t i = 0; i < 8; i++)
        free(blocks[i]);
    scratch_fini(&s);
}

/* gate, up and down of an expert are thirds of the fused data, and so are their scales: blocks of 32 x 20 on
 * [64, 48] and [48, 32]. */
TEST(fused_fp8_experts_keep_their_scales)
{
    struct ft_error err;
    struct bound b;
    REQUIRE(bound_open(&b, FIXTURE("qwen3_5_moe-fused-fp8_block"), 7, &err) == FT_OK);
    const struct ft_layer_weights *w = &b.w->layers[1];
    CHECK(w->expert_layout.format == FT_FORMAT_FP8_BLOCK && w->expert_layout.block_out == 32 &&
          w->expert_layout.block_in == 20);
    for (uint32_t e = 0; e < 5; e++) {
        struct ft_expert expert;
        ft_expert_view(&w->expert_layout, w->experts + (uint64_t)e * w->expert_layout.stride, &expert);
        check_same(&b, "layers.1.mlp.experts.gate_up_proj", expert.gate.data, (2 * e) * 1536ull, 1536);
        check_same(&b, "layers.1.mlp.experts.gate_up_proj", expert.up.data, (2 * e + 1) * 1536ull, 1536);
        check_same(&b, "layers.1.mlp.experts.down_proj", expert.down.data, e * 1536ull, 1536);
        check_same(&b, "layers.1.mlp.experts.gate_up_proj_scale_inv", expert.gate.scale, (2 * e) * 12ull, 12);
        check_same(&b, "layers.1.mlp.experts.gate_up_proj_scale_inv", expert.up.scale, (2 * e + 1) * 12ull,
                   12);
        check_same(&b, "layers.1.mlp.experts.down_proj_scale_inv", expert.down.scale, e * 16ull, 16);
    }
    bound_fini(&b);
}

TEST(fused_experts_that_cannot_be_read_are_named)
{
    struct scratch s;
    const char *up = "model.layers.1.mlp.experts.gate_up_proj";
    scratch_init(&s, FIXTURE("qwen3_5_moe-fused-fp8_block"));
    scratch_array(&s, "model.layers.1.mlp.experts.gate_up_proj_scale_inv")->shape[1] = 3;
    check_refused(&s, FT_FORMAT, "gate_up_proj_scale_inv is F32 [5, 3, 3], wanted F32 or BF16 [5, 2, 3]");
    scratch_drop(&s, "model.layers.1.mlp.experts.gate_up_proj_scale_inv");
    check_refused(&s, FT_FORMAT, "gate_up_proj_scale_inv is missing, wanted F32 or BF16 [5, 2, 3]");
    scratch_array(&s, up)->dtype = FT_DTYPE_U8;
    check_refused(&s, FT_UNSUPPORTED, "gate_up_proj is U8: fused experts are read as BF16");
    scratch_array(&s, up)->name = "model.layers.1.mlp.experts.gate_up_proj_packed";
    check_refused(&s, FT_UNSUPPORTED, "gate_up_proj_packed: fused experts are read as BF16");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("qwen3_5_moe-fused-fp8_block")); /* a block across gate and up */
    scratch_edit_config(&s, "32,\n   20", "64,\n   20");
    for (uint32_t i = 0; i < s.model.count; i++)
        if (strstr(s.model.items[i].name, "_scale_inv"))
            s.model.items[i].shape[1] = 1;
    check_refused(&s, FT_UNSUPPORTED, "a block of 64 rows would hold rows of gate and of up");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("qwen3_5_moe-fused-bf16"));
    scratch_array(&s, "model.language_model.layers.0.mlp.experts.down_proj")->dtype = FT_DTYPE_F16;
    check_refused(&s, FT_UNSUPPORTED, "down_proj is F16: all experts of a layer must have one format");
    scratch_fini(&s);
}

TEST(layers_may_have_different_formats)
{
    static const enum ft_format formats[5] = {FT_FORMAT_BF16, FT_FORMAT_NVFP4, FT_FORMAT_NVFP4,
                                              FT_FORMAT_FP8_BLOCK, FT_FORMAT_F32};
    struct ft_error err;
    struct bound b;
    uint64_t largest = 0;
    REQUIRE(bound_open(&b, FIXTURE("qwen3_moe-mixed-formats"), 1000, &err) == FT_OK);
    for (uint32_t i = 0; i < 5; i++) {
        CHECK_EQ(b.w->layers[i].expert_layout.format, formats[i]);
        largest = FT_MAX(largest, b.w->layers[i].expert_layout.stride);
    }
    CHECK(b.w->layers[2].attention.q.format == FT_FORMAT_FP8_BLOCK &&
          b.w->layers[1].attention.q.format == FT_FORMAT_BF16);
    CHECK_EQ(ft_bind_sizes(b.bind)->expert_bytes_max, largest);
    bound_fini(&b);
}

TEST(f16_matrices_become_f32_and_f16_vectors_too)
{
    struct ft_error err;
    struct scratch s;
    struct bound b;
    static const uint16_t halves[8] = {0x3c00, 0xc000, 0x0001, 0x8000, 0x7bff, 0x3555, 0x0400, 0x83ff};
    static const float floats[8] = {
        1, -2, 0x1p-24f, -0.0f, 65504, 0.333251953125f, 0x1p-14f, -1023 * 0x1p-24f};
    uint16_t *router = malloc(16 * 128 * 2), *norm = malloc(128 * 2);
    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    for (uint32_t i = 0; i < 16 * 128; i++)
        router[i] = norm[i % 128] = halves[i % 8];
    scratch_array(&s, "model.layers.0.mlp.gate.weight")->data = router;
    scratch_array(&s, "model.layers.0.mlp.gate.weight")->dtype = FT_DTYPE_F16;
    scratch_array(&s, "model.norm.weight")->data = norm;
    scratch_array(&s, "model.norm.weight")->dtype = FT_DTYPE_F16;
    scratch_save(&s);
    CHECK_OK(bound_open(&b, s.dir, 3, &err), &err);
    REQUIRE(b.w);
    CHECK_EQ(b.w->layers[0].router.format, FT_FORMAT_F32);
    const float *values = b.w->layers[0].router.data;
    for (uint32_t i = 0; i < 128; i++) {
        CHECK(values[i] == floats[i % 8] && !signbit(values[i]) == !signbit(floats[i % 8]));
        CHECK(b.w->final_norm[i] == floats[i % 8]);
    }
    bound_fini(&b);
    free(router);
    free(norm);
    scratch_fini(&s);
}

/* 64 x 128 of f16 or f32: both gather as f32, whatever order and size the pieces have. */
static void check_gathered(enum ft_dtype dtype, const void *weights, const float *values)
{
    struct ft_error err;
    struct scratch s;
    struct bound b;
    uint8_t data[64 * 128];
    float scale;
    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    struct ft_array *k = scratch_array(&s, "model.layers.0.self_attn.k_proj.weight");
    REQUIRE(k->shape[0] == 64 && k->shape[1] == 128);
    k->data = weights;
    k->dtype = dtype;
    scratch_save(&s);
    CHECK(ft_quantise_fp8(values, FT_FORMAT_F32, 64, 128, data, &scale));
    fp8_uses = FT_FP8_USES;
    for (int back = 0; back < 2; back++) {
        backwards = back;
        CHECK_OK(bound_open(&b, s.dir, back ? 77 : 3, &err), &err);
        REQUIRE(b.w);
        const struct ft_matrix *got = &b.w->layers[0].attention.k;
        CHECK_EQ(got->format, FT_FORMAT_FP8_BLOCK);
        CHECK(memcmp(got->data, data, sizeof data) == 0);
        CHECK(*(const float *)got->scale == scale);
        CHECK_EQ(b.w->layers[0].router.format, FT_FORMAT_BF16);
        bound_fini(&b);
    }
    fp8_uses = 0;
    backwards = false;
    scratch_fini(&s);
}

TEST(f16_and_f32_matrices_are_quantised_from_their_values)
{
    static float floats[64 * 128], halves_as_floats[64 * 128];
    static uint16_t halves[64 * 128];
    for (uint32_t i = 0; i < 64 * 128; i++) {
        uint32_t exponent = 1 + i * 7 % 29, mantissa = i * 2654435761u >> 22;
        halves[i] = (uint16_t)((i % 3 ? 0 : 0x8000) | exponent << 10 | mantissa);
        halves_as_floats[i] = ldexpf((float)(1024 + mantissa) * (i % 3 ? 1 : -1), (int)exponent - 25);
        floats[i] = halves_as_floats[i] * 1.2345678e-3f;
    }
    check_gathered(FT_DTYPE_F16, halves, halves_as_floats);
    check_gathered(FT_DTYPE_F32, floats, floats);
}

/* A load that is given up midway leaves bands that wait for their last byte. */
TEST(half_a_band_is_freed_with_the_bind)
{
    struct ft_error err;
    struct ft_checkpoint *checkpoint;
    struct ft_bind *bind;
    struct ft_arena arena;
    CHECK_OK(ft_checkpoint_open(&checkpoint, FIXTURE("qwen4_exp-bf16"), &err), &err);
    CHECK_OK(ft_bind_open(&bind, checkpoint, FT_FP8_USES, &err), &err);
    CHECK_OK(ft_arena_init(&arena, "model", ft_bind_arena_bytes(bind), &err), &err);
    (void)ft_bind_place(bind, arena.base);
    const struct ft_load_part *parts = ft_bind_parts(bind);
    uint32_t halves = 0;
    for (uint32_t i = 0; i < ft_bind_part_count(bind); i++) {
        char *zeros = parts[i].quantised ? calloc(1, parts[i].bytes) : NULL;
        if (zeros)
            CHECK_OK(ft_bind_apply(bind, &parts[i], zeros, 2, parts[i].bytes - 2, arena.base, &err), &err);
        halves += zeros != NULL;
        free(zeros);
    }
    CHECK(halves > 10);
    ft_bind_close(bind);
    ft_arena_fini(&arena);
    ft_checkpoint_close(checkpoint);
}

/* What must be refused, and by which words. */
TEST(missing_and_misshapen_tensors_are_named)
{
    struct scratch s;
    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    scratch_array(&s, "model.layers.1.self_attn.k_proj.weight")->shape[0] = 32;
    scratch_array(&s, "model.layers.1.self_attn.k_proj.weight")->shape[1] = 256;
    check_refused(&s, FT_FORMAT, "tensor layers.1.self_attn.k_proj.weight is BF16 [32, 256], wanted");
    scratch_drop(&s, "model.layers.1.self_attn.k_proj.weight");
    check_refused(&s, FT_FORMAT, "tensor layers.1.self_attn.k_proj.weight is missing, wanted");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    scratch_array(&s, "model.norm.weight")->dtype = FT_DTYPE_U8;
    scratch_array(&s, "model.norm.weight")->shape[0] = 128;
    check_refused(&s, FT_FORMAT, "tensor norm.weight is U8 [128], wanted F32 or F16 or BF16 [128]");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    scratch_drop(&s, "lm_head.weight");
    check_refused(&s, FT_FORMAT, "tie_word_embeddings is false");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("qwen4_exp-bf16"));
    for (int i = 0; i < 4; i++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.1.ple.ple_embedding.ngram_embedding.shard_%d.weight", i);
        scratch_drop(&s, name);
    }
    check_refused(&s, FT_FORMAT, "shard_0.weight is missing");
    scratch_fini(&s);
}

TEST(damaged_scales_are_named)
{
    struct scratch s;
    struct ft_array *a;
    scratch_init(&s, FIXTURE("qwen3_moe-nvfp4-compressed_tensors"));
    a = scratch_array(&s, "model.layers.0.mlp.experts.2.up_proj.weight_global_scale");
    a->rank = 0;
    scratch_save(&s); /* [] is as good as [1] */
    struct ft_error err;
    struct bound b;
    CHECK_OK(bound_open(&b, s.dir, 1000, &err), &err);
    bound_fini(&b);
    float zero = 0, nan = NAN;
    const void *good = a->data;
    a->data = &zero;
    check_refused(&s, FT_NUMERIC, "experts.2.up_proj.weight_global_scale: element 0 is zero");
    a->data = &nan;
    check_refused(&s, FT_NUMERIC, "experts.2.up_proj.weight_global_scale: element 0 is not a finite number");
    a->data = good;
    a->rank = 1;
    a->shape[0] = 0;
    check_refused(&s, FT_FORMAT, "weight_global_scale is F32 [0], wanted F32 or BF16 [] or [1]");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("qwen3_moe-fp8_block"));
    a = scratch_array(&s, "model.layers.0.self_attn.q_proj.weight_scale_inv");
    a->shape[0] = 2;
    a->shape[1] = 1;
    check_refused(&s, FT_FORMAT, "q_proj.weight_scale_inv is F32 [2, 1], wanted F32 or BF16 [1, 2]");
    scratch_drop(&s, "model.layers.0.self_attn.q_proj.weight_scale_inv");
    check_refused(&s, FT_FORMAT, "q_proj.weight_scale_inv is missing");
    scratch_fini(&s);
}

/* One error for each way in which block formats and sizes disagree. */
TEST(blocks_that_do_not_fit_are_named)
{
    struct scratch s;
    scratch_init(&s, FIXTURE("qwen3_moe-nvfp4-compressed_tensors"));
    scratch_edit_config(&s, "\"moe_intermediate_size\": 64", "\"moe_intermediate_size\": 40");
    scratch_array(&s, "model.layers.0.mlp.experts.0.gate_proj.weight_packed")->shape[0] = 40;
    scratch_array(&s, "model.layers.0.mlp.experts.0.gate_proj.weight_scale")->shape[0] = 40;
    check_refused(&s, FT_UNSUPPORTED, "expert of width 40 on hidden size 128 cannot be held as nvfp4");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("qwen3_moe-nvfp4-compressed_tensors"));
    scratch_array(&s, "model.layers.1.mlp.experts.3.down_proj.weight_scale")->shape[1] = 2;
    check_refused(&s, FT_FORMAT,
                  "experts.3.down_proj.weight_scale is F8_E4M3 [128, 2], wanted F8_E4M3 [128, 4]");
    scratch_drop(&s, "model.layers.1.mlp.experts.3.down_proj.weight_scale");
    check_refused(&s, FT_FORMAT, "experts.3.down_proj.weight_scale is missing, wanted F8_E4M3 [128, 4]");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("gpt_oss-mxfp4"));
    scratch_array(&s, "model.layers.2.mlp.experts.down_proj_scales")->shape[2] = 1;
    check_refused(&s, FT_FORMAT, "down_proj_scales is U8 [8, 128, 1], wanted U8 [8, 128, 2]");
    scratch_drop(&s, "model.layers.2.mlp.experts.down_proj_scales");
    check_refused(&s, FT_FORMAT, "down_proj_scales is missing");
    scratch_edit_config(&s, "\"intermediate_size\": 64", "\"intermediate_size\": 48");
    check_refused(&s, FT_UNSUPPORTED, "intermediate_size 48 do not fit mxfp4, wanted multiples of 32");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("qwen3_moe-fp8_block"));
    scratch_edit_config(&s, "   128,\n   128", "   64,\n   128");
    check_refused(&s, FT_FORMAT, "weight_scale_inv is F32 [1, 2], wanted F32 or BF16 [2, 2]");
    scratch_fini(&s);
}

TEST(not_finite_values_are_found_wherever_they_are)
{
    static const struct {
        const char *fixture, *name;
        uint32_t byte;
        uint8_t values[2];
        uint32_t bytes;
        const char *text;
    } cases[] = {
        {FIXTURE("qwen3_moe-bf16"),
         "model.layers.0.input_layernorm.weight",
         34,
         {0xc0, 0x7f},
         2,
         "element 17 is not"},
        {FIXTURE("qwen3_moe-bf16"),
         "model.embed_tokens.weight",
         2000,
         {0x80, 0xff},
         2,
         "element 1000 is not"},
        {FIXTURE("qwen3_moe-bf16"),
         "model.layers.2.mlp.experts.15.down_proj.weight",
         0,
         {0x80, 0x7f},
         2,
         "element 0"},
        {FIXTURE("qwen3_moe-fp8_block"),
         "model.layers.0.self_attn.v_proj.weight",
         99,
         {0xff},
         1,
         "element 99 is not"},
        {FIXTURE("qwen3_moe-fp8_block"),
         "model.layers.0.self_attn.v_proj.weight_scale_inv",
         6,
         {0x80, 0x7f},
         2,
         "element 1 is not"},
        {FIXTURE("gpt_oss-mxfp4"),
         "model.layers.0.mlp.experts.down_proj_scales",
         700,
         {0xff},
         1,
         "element 700 is not"},
        {FIXTURE("gpt_oss-mxfp4"),
         "model.layers.3.mlp.experts.gate_up_proj_bias",
         2 * 1001,
         {0xc1, 0x7f},
         2,
         "element 1001 is not"},
        {FIXTURE("qwen3_moe-nvfp4-compressed_tensors"),
         "model.layers.0.mlp.experts.0.up_proj.weight_scale",
         12,
         {0x7f},
         1,
         "element 12 is not"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct scratch s;
        scratch_init(&s, cases[i].fixture);
        struct ft_array *a = scratch_array(&s, cases[i].name);
        char *bytes = (char *)s.model.block + ((const char *)a->data - (const char *)s.model.block);
        memcpy(bytes + cases[i].byte, cases[i].values, cases[i].bytes);
        check_refused(&s, FT_NUMERIC, cases[i].text);
        check_refused(&s, FT_NUMERIC, cases[i].name + strlen("model."));
        scratch_fini(&s);
    }
}

TEST(mixed_formats_in_a_layer_are_refused)
{
    struct scratch s;
    float *wide = calloc(64 * 128, sizeof *wide);
    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    struct ft_array *a = scratch_array(&s, "model.layers.1.mlp.experts.4.up_proj.weight");
    a->dtype = FT_DTYPE_F32;
    a->data = wide;
    check_refused(&s, FT_UNSUPPORTED,
                  "layers.1.mlp.experts.4.up_proj is f32, but layers.1.mlp.experts.0.gate_proj");
    scratch_fini(&s);
    free(wide);
}

TEST(weights_beyond_the_config_are_refused)
{
    struct scratch s;
    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    scratch_edit_config(&s, "\"num_local_experts\": 16", "\"num_local_experts\": 8");
    for (uint32_t i = 0; i < s.model.count;
         i++) /* a router of 8, so that only the experts speak against it */
        if (strstr(s.model.items[i].name, "mlp.gate.weight"))
            s.model.items[i].shape[0] = 8;
    check_refused(&s, FT_FORMAT, "but num_experts is 8");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    scratch_edit_config(&s, "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    check_refused(&s, FT_FORMAT, "belongs to layer 2, but num_hidden_layers is 2");
    scratch_fini(&s);

    scratch_init(&s, FIXTURE("gpt_oss-mxfp4"));
    scratch_edit_config(&s, "\"hidden_size\": 128", "\"hidden_size\": 120");
    check_refused(&s, FT_FORMAT, "[320, 120]");
    scratch_fini(&s);
}

TEST(dense_layers_have_no_experts)
{
    struct ft_error err;
    struct scratch s;
    struct bound b;
    char *zero = calloc(1, 96 * 128 * 2);
    scratch_init(&s, FIXTURE("qwen3_moe-bf16"));
    scratch_edit_config(&s, "\"mlp_only_layers\": []", "\"mlp_only_layers\": [1]");
    check_refused(&s, FT_FORMAT,
                  "tensor layers.1.mlp.gate_proj.weight is missing, wanted F32 or F16 or BF16 [96, 128]");
    static const char *const names[3] = {"model.layers.1.mlp.gate_proj.weight",
                                         "model.layers.1.mlp.up_proj.weight",
                                         "model.layers.1.mlp.down_proj.weight"};
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s.model.count; i++)
        if (!strstr(s.model.items[i].name, "layers.1.mlp."))
            s.model.items[kept++] = s.model.items[i];
    for (uint32_t i = 0; i < 3; i++)
        s.model.items[kept++] =
            (struct ft_array){names[i], FT_DTYPE_BF16, 2, {i == 2 ? 128 : 96, i == 2 ? 96 : 128}, zero};
    s.model.count = kept;
    scratch_save(&s);
    CHECK_OK(bound_open(&b, s.dir, 1000, &err), &err);
    REQUIRE(b.w);
    CHECK(b.w->layers[1].experts == NULL && b.w->layers[1].router.data == NULL);
    CHECK_EQ(b.w->layers[1].dense.gate.out, 96);
    CHECK_EQ(ft_bind_sizes(b.bind)->moe_layer_count, 2);
    bound_fini(&b);
    free(zero);
    scratch_fini(&s);
}

TEST(sizes_of_the_small_real_model)
{
    struct ft_error err;
    struct ft_checkpoint *checkpoint;
    struct ft_weight_sizes sizes;
    CHECK_OK(ft_checkpoint_open(&checkpoint, FT_DATA_DIR "/ft-tiny", &err), &err);
    REQUIRE(checkpoint);
    CHECK_OK(ft_load_sizes(checkpoint, 0, &sizes, &err), &err);
    CHECK_EQ(sizes.expert_format, FT_FORMAT_NVFP4);
    CHECK_EQ(sizes.expert_bytes_max, 3 * 64 * 256 / 2 + 3 * 64 * 256 / 16 + 64);
    CHECK_EQ(sizes.expert_total_bytes, 8 * 32 * sizes.expert_bytes_max);
    CHECK_EQ(sizes.ple_bytes, 4 * 16096 * 32);
    CHECK_EQ(sizes.file_bytes, 11654238 + 8926452);
    CHECK_EQ(sizes.embed_bytes, 4096 * 256 * 2);
    CHECK_EQ(sizes.moe_layer_count, 8);
    ft_checkpoint_close(checkpoint);
}

TEST_MAIN(RUN(parts_are_sorted_disjoint_and_inside_files_and_arena) RUN(destinations_do_not_overlap) RUN(
    bf16_weights_arrive_as_they_are_stored) RUN(nvfp4_globals_are_stored_or_inverted_as_the_naming_says)
              RUN(fp8_blocks_keep_their_scales) RUN(interleaved_rows_are_dealt_to_gate_and_up)
                  RUN(tied_head_is_the_embedding) RUN(fused_experts_equal_single_ones)
                      RUN(fused_fp8_experts_keep_their_scales)
                          RUN(fused_experts_that_cannot_be_read_are_named)
                              RUN(layers_may_have_different_formats)
                                  RUN(f16_matrices_become_f32_and_f16_vectors_too)
                                      RUN(f16_and_f32_matrices_are_quantised_from_their_values)
                                          RUN(half_a_band_is_freed_with_the_bind)
                                              RUN(missing_and_misshapen_tensors_are_named)
                                                  RUN(damaged_scales_are_named)
                                                      RUN(blocks_that_do_not_fit_are_named)
                                                          RUN(not_finite_values_are_found_wherever_they_are)
                                                              RUN(mixed_formats_in_a_layer_are_refused)
                                                                  RUN(weights_beyond_the_config_are_refused)
                                                                      RUN(dense_layers_have_no_experts)
                                                                          RUN(sizes_of_the_small_real_model))
