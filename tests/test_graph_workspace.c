/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/workspace.h"
#include "tests/test.h"

/* The published shape of the main model: every buffer is in use. */
static struct ft_model flash_next(void)
{
    struct ft_model model = {.hidden = 2560,
                             .vocab = 248320,
                             .layer_count = 48,
                             .head_count = 24,
                             .kv_head_count = 2,
                             .head_dim = 256,
                             .attention_gate = true,
                             .rotary_dim = 64,
                             .indexer_head_count = 4,
                             .indexer_dim = 128,
                             .indexer_budget = 2048,
                             .indexer_ratio = 4,
                             .key_head_count = 16,
                             .value_head_count = 48,
                             .key_dim = 128,
                             .value_dim = 128,
                             .conv_taps = 4,
                             .expert_count = 512,
                             .topk = 10,
                             .expert_width = 640,
                             .shared_width = 640,
                             .hc_count = 4,
                             .hc_lowrank = 320,
                             .ple_count = 1,
                             .ple_embed_dim = 2560,
                             .ple_taps = 4,
                             .ngram_size = 3};
    for (uint32_t i = 0; i < model.layer_count; i++)
        model.layers[i] = (struct ft_layer_spec){
            .attention = (uint8_t)(i % 4 == 3 ? FT_ATTENTION_SPARSE : FT_ATTENTION_LINEAR),
            .ple = FT_PLE_NONE};
    model.layers[1].ple = 0;
    model.ple[0] = (struct ft_ple_spec){.layer = 1, .head_count = 16, .row_width = 160};
    return model;
}

/* Every offset with the room that its comment in workspace.h promises. */
static void check_regions(const struct ft_workspace *w, const struct ft_model *m)
{
    uint64_t r = w->rows, l = w->logit_rows, h = m->hidden, n = m->hc_count > 1 ? m->hc_count : 1, nh = n * h;
    uint64_t hc = n > 1, ple = m->ple_count > 0;
    const uint64_t regions[][2] = {
        {w->residual, r * nh},
        {w->normed, r * nh},
        {w->mixed, hc * r * (m->hc_lowrank + n)},
        {w->x, r * h},
        {w->project, r * w->project_width},
        {w->conv, r * ft_model_conv_channels(m)},
        {w->query, r * m->head_count * m->head_dim},
        {w->attention, r * w->attention_width},
        {w->select, r * (w->select_max + 1)},
        {w->logits_router, r * m->expert_count},
        {w->topk_ids, r * m->topk},
        {w->topk_weights, r * m->topk},
        {w->staged,
         m->topk ? (r < 16 ? r : 16) * ft_workspace_staged_words(h) + FT_WORKSPACE_STAGED_SLACK : 0},
        {w->expert_h, r * m->topk * m->expert_width},
        {w->expert_y, r * m->topk * h},
        {w->shared_h, r * (m->shared_width > m->dense_width ? m->shared_width : m->dense_width)},
        {w->shared_y, r * h},
        {w->shared_gate, r},
        {w->ple_raw, (m->ple_count * r * w->ple_row_bytes + 3) / 4},
        {w->ple_e, m->ple_count * r * m->ple_embed_dim},
        {w->ple_project, m->ple_count * r * (nh + h)},
        {w->ple_u, ple * r * nh},
        {w->ple_c, ple * r * nh},
        {w->rotary, r * m->rotary_dim},
        {w->head_x, l * h},
        {w->logits, l * m->vocab},
        {w->sample_index, l * m->vocab},
    };
    size_t count = sizeof regions / sizeof regions[0];
    for (size_t i = 0; i < count; i++) {
        uint64_t end = i + 1 < count ? regions[i + 1][0] : w->count;
        CHECK_EQ(regions[i][0] % 16, 0);
        CHECK(regions[i][0] + regions[i][1] <= end);
        CHECK(end - regions[i][0] < regions[i][1] + 16);
    }
}

TEST(every_buffer_has_its_documented_size_and_alignment)
{
    struct ft_model model = flash_next();
    struct ft_workspace workspace;
    static const uint32_t rows[] = {1, 2, 3, 7, 16, 63, 128};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ft_workspace_init(&workspace, &model, rows[i], 2, i % 2 ? rows[i] : 1);
        CHECK_EQ(workspace.rows, rows[i]);
        CHECK_EQ(workspace.project_width, 16480); /* linear: 10240 + 6144 + 96; sparse: 12288 + 1024 + 640 */
        CHECK_EQ(workspace.attention_width, 6144);
        CHECK_EQ(workspace.select_max, 512);
        CHECK_EQ(workspace.ple_row_bytes, 16 * 160 * 2);
        check_regions(&workspace, &model);
    }
}

/* The published main shape, counted by hand. */
TEST(a_gpu_needs_scratch_for_its_prefill_forms)
{
    struct ft_model model = flash_next();
    uint64_t few = 4 * 2 * 16 * 325 * 4; /* 4 streams of 2 shares, 16 rows, 320 + 4 sums and one of squares */
    CHECK_EQ(ft_workspace_gpu_dense_bytes(&model, 1), few);
    CHECK_EQ(ft_workspace_gpu_dense_bytes(&model, 16), few);
    CHECK_EQ(ft_workspace_gpu_dense_bytes(&model, 17), (32 << 20) + 17 * (2560 * 4 + 10240 * 2) + 64);
    CHECK_EQ(ft_workspace_gpu_attention_bytes(&model, 1, 256), 24 * 16 * 258 * 4);
    CHECK_EQ(ft_workspace_gpu_attention_bytes(&model, 16, 8192), 16 * 24 * 36 * 258 * 4);
    CHECK_EQ(ft_workspace_gpu_attention_bytes(&model, 17, 1 << 20), 264ull * (1 << 18) * 4);
    CHECK_EQ(ft_workspace_gpu_bytes(&model, 8, 8193), 8ull * 24 * 64 * 258 * 4);
    CHECK_EQ(ft_workspace_gpu_bytes(&model, 512, 8192), (32 << 20) + 512 * (2560 * 4 + 10240 * 2) + 64);
}

TEST(a_plain_model_pays_for_nothing_it_lacks)
{
    struct ft_model model = {.hidden = 64,
                             .vocab = 100,
                             .layer_count = 2,
                             .head_count = 4,
                             .kv_head_count = 2,
                             .head_dim = 16,
                             .expert_count = 8,
                             .topk = 2,
                             .expert_width = 32,
                             .dense_width = 96};
    struct ft_workspace workspace;
    for (uint32_t i = 0; i < 2; i++)
        model.layers[i] = (struct ft_layer_spec){.attention = FT_ATTENTION_FULL, .ple = FT_PLE_NONE};
    ft_workspace_init(&workspace, &model, 5, 1, 5);
    check_regions(&workspace, &model);
    CHECK_EQ(workspace.project_width, 64 + 64);
    CHECK_EQ(workspace.select_max, 0);
    CHECK_EQ(workspace.mixed, workspace.x);
    CHECK_EQ(workspace.conv, workspace.query);
    CHECK_EQ(workspace.ple_raw, workspace.rotary);
}

TEST_MAIN(RUN(a_gpu_needs_scratch_for_its_prefill_forms)
              RUN(every_buffer_has_its_documented_size_and_alignment)
                  RUN(a_plain_model_pays_for_nothing_it_lacks))
