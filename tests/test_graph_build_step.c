/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/graph.h"
#include "tests/test.h"

/* A small qwen4_exp: linear, sparse and dense layers, PLE, shared expert. */
static void make_model(struct ft_model *m)
{
    *m = (struct ft_model){.family = FT_FAMILY_QWEN4_EXP,
                           .hidden = 128,
                           .vocab = 320,
                           .layer_count = 4,
                           .rms_eps = 1e-6f,
                           .norm_plus_one = true,
                           .head_count = 4,
                           .kv_head_count = 2,
                           .head_dim = 32,
                           .attention_gate = true,
                           .qk_norm = true,
                           .rotary_dim = 16,
                           .rotary_theta = 1e5,
                           .rotary_scale = 1,
                           .indexer_head_count = 4,
                           .indexer_dim = 32,
                           .indexer_budget = 16,
                           .indexer_ratio = 4,
                           .key_head_count = 2,
                           .value_head_count = 4,
                           .key_dim = 32,
                           .value_dim = 32,
                           .conv_taps = 4,
                           .expert_count = 16,
                           .topk = 4,
                           .expert_width = 64,
                           .shared_width = 64,
                           .dense_width = 96,
                           .hc_count = 4,
                           .hc_lowrank = 16,
                           .ple_count = 1,
                           .ple_embed_dim = 128,
                           .ple_taps = 4,
                           .ngram_size = 3,
                           .heads_per_ngram = 4};
    for (uint32_t i = 0; i < 4; i++)
        m->layers[i] = (struct ft_layer_spec){.attention = i == 3 ? FT_ATTENTION_SPARSE : FT_ATTENTION_LINEAR,
                                              .dense = i == 2,
                                              .ple = i == 1 ? 0 : 0xff};
    m->ple[0] = (struct ft_ple_spec){.layer = 1, .head_count = 8, .row_width = 16, .row_count = 5000};
}

static int build(struct ft_graph *graph, struct ft_arena *arena, const struct ft_model *m,
                 struct ft_shape shape, uint32_t tiles, enum ft_lane dense, struct ft_error *err)
{
    struct ft_tiling tiling = {.tiles_max = tiles, .tile_bytes_min = 1024};
    for (uint32_t op = 0; op < FT_OP_COUNT; op++)
        tiling.lane_of_op[op] = op == FT_OP_PLE_READ ? FT_LANE_IO : (uint8_t)dense;
    return ft_graph_create(graph, arena, m, &shape, &tiling, err);
}

TEST(every_shape_gives_a_sound_graph)
{
    struct ft_model m;
    struct ft_error err;
    make_model(&m);
    for (uint32_t rows = 1; rows <= 64; rows *= 4)
        for (uint32_t sequences = 1; sequences <= rows; sequences *= 4)
            for (uint32_t tiles = 1; tiles <= 16; tiles *= 4)
                for (int lane = FT_LANE_CPU; lane <= FT_LANE_DEVICE; lane++)
                    for (uint32_t logits = 0; logits <= 1; logits++) {
                        struct ft_graph graph;
                        struct ft_arena arena;
                        struct ft_shape shape = {rows, sequences, logits, rows > sequences, 0, 0};
                        CHECK_OK(build(&graph, &arena, &m, shape, tiles, (enum ft_lane)lane, &err), &err);
                        CHECK_OK(ft_graph_check(&graph, &err), &err);
                        ft_arena_fini(&arena);
                    }
}

TEST(tiles_of_an_op_cover_its_axis_exactly_once)
{
    struct ft_model m;
    struct ft_error err;
    struct ft_graph graph;
    struct ft_arena arena;
    make_model(&m);
    struct ft_shape shape = {8, 2, 2, true, 0, 0};
    REQUIRE(build(&graph, &arena, &m, shape, 5, FT_LANE_CPU, &err) == FT_OK);
    uint32_t tiled = 0;
    for (uint32_t i = 0; i < graph.static_count;) {
        uint32_t j = i, at = 0;
        while (j < graph.static_count && graph.op[j] == graph.op[i] && graph.layer[j] == graph.layer[i] &&
               graph.phase[j] == graph.phase[i]) {
            if (graph.op[i] != FT_OP_JOIN && graph.begin[j] == at)
                at = graph.end[j];
            else if (graph.op[i] != FT_OP_JOIN)
                CHECK_EQ(graph.begin[j], at);
            j++;
        }
        tiled += j - i > 1;
        if (graph.op[i] == FT_OP_MIX_UP || graph.op[i] == FT_OP_ATTN_OUT || graph.op[i] == FT_OP_COMBINE)
            CHECK_EQ(at, m.hidden);
        if (graph.op[i] == FT_OP_ROUTER_LOGITS)
            CHECK(at == m.expert_count && j - i > 1); /* 4 KiB of weights, tiles of 1 KiB */
        if (graph.op[i] == FT_OP_HEAD)
            CHECK_EQ(at, m.vocab);
        if (graph.op[i] == FT_OP_LINEAR_PROJECT)
            CHECK_EQ(at, 2 * 2 * 32 + 4 * 32 + 4 * 32 + 8);
        i = j;
    }
    CHECK(tiled > 10);
    ft_arena_fini(&arena);
}

TEST(ple_reads_start_at_once_and_experts_have_reserved_ids)
{
    struct ft_model m;
    struct ft_error err;
    struct ft_graph graph;
    struct ft_arena arena;
    make_model(&m);
    REQUIRE(build(&graph, &arena, &m, (struct ft_shape){1, 1, 1, false, 0, 0}, 4, FT_LANE_DEVICE, &err) ==
            FT_OK);
    REQUIRE(graph.io_count == 1);
    CHECK_EQ(graph.in_degree[graph.io_jobs[0]], 0);
    CHECK_EQ(graph.op[graph.io_jobs[0]], FT_OP_PLE_READ);
    CHECK_EQ(graph.reserved_begin[2], FT_NONE); /* dense layer */
    CHECK_EQ(graph.router_job[2], FT_NONE);
    CHECK_EQ(graph.reserved_begin[3], graph.static_count + 3 * graph.reserved_count);
    CHECK(graph.reserved_count >= 4 * 3);
    for (uint32_t i = 1; i < graph.device_count; i++)
        CHECK(graph.device_jobs[i] > graph.device_jobs[i - 1]);
    CHECK_EQ(graph.op[graph.combine_tile[0]], FT_OP_COMBINE);
    CHECK_EQ(graph.op[graph.combine_job[0]], FT_OP_JOIN);
    CHECK_EQ(graph.in_degree[graph.combine_job[0]], 2); /* router and shared expert */
    ft_arena_fini(&arena);
}

TEST(impossible_shapes_are_refused)
{
    struct ft_model m;
    struct ft_error err;
    struct ft_graph graph;
    struct ft_arena arena;
    make_model(&m);
    CHECK_FAILS(build(&graph, &arena, &m, (struct ft_shape){0, 1, 0, false, 0, 0}, 1, FT_LANE_CPU, &err),
                FT_LIMIT, "0 rows", &err);
    CHECK_FAILS(build(&graph, &arena, &m, (struct ft_shape){2, 3, 0, false, 0, 0}, 1, FT_LANE_CPU, &err),
                FT_LIMIT, "3 sequences", &err);
    CHECK_FAILS(build(&graph, &arena, &m, (struct ft_shape){2, 1, 3, true, 0, 0}, 4, FT_LANE_CPU, &err),
                FT_LIMIT, "3 logit rows", &err);
    CHECK_FAILS(build(&graph, &arena, &m, (struct ft_shape){2, 1, 1, true, 2, 2}, 4, FT_LANE_CPU, &err),
                FT_LIMIT, "layers 2 to 2", &err);
    CHECK_FAILS(build(&graph, &arena, &m, (struct ft_shape){2, 1, 1, true, 0, 5}, 4, FT_LANE_CPU, &err),
                FT_LIMIT, "layers 0 to 5", &err);
}

/* Jobs and weights of the layers' ops, the embedding and the head; joins and ends come once a slice. */
static void count(const struct ft_graph *graph, uint32_t *jobs, uint64_t *bytes, uint32_t *heads)
{
    for (uint32_t i = 0; i < graph->static_count; i++) {
        *jobs += graph->op[i] != FT_OP_JOIN && graph->op[i] != FT_OP_END;
        *bytes += graph->bytes[i];
        *heads += graph->op[i] == FT_OP_HEAD;
    }
}

TEST(slices_have_the_jobs_of_the_whole_step_between_them)
{
    struct ft_model m;
    struct ft_error err;
    struct ft_graph graph;
    struct ft_arena arena;
    make_model(&m);
    for (int lane = FT_LANE_CPU; lane <= FT_LANE_DEVICE; lane++)
        for (uint32_t layers = 1; layers <= m.layer_count; layers++) {
            uint32_t jobs = 0, whole_jobs = 0, heads = 0, whole_heads = 0, slices = 0;
            uint64_t bytes = 0, whole_bytes = 0;
            struct ft_shape shape = {.rows = 8, .sequences = 2, .logit_rows = 2, .prefill = true};
            REQUIRE(build(&graph, &arena, &m, shape, 5, (enum ft_lane)lane, &err) == FT_OK);
            CHECK_EQ(graph.shape.layer_end, m.layer_count);
            count(&graph, &whole_jobs, &whole_bytes, &whole_heads);
            ft_arena_fini(&arena);
            for (uint32_t at = 0; at < m.layer_count; at += layers, slices++) {
                shape.layer_begin = at;
                shape.layer_end = FT_MIN(at + layers, m.layer_count);
                CHECK_OK(build(&graph, &arena, &m, shape, 5, (enum ft_lane)lane, &err), &err);
                CHECK_OK(ft_graph_check(&graph, &err), &err);
                count(&graph, &jobs, &bytes, &heads);
                for (uint32_t i = 0; i < graph.static_count; i++)
                    CHECK(graph.layer[i] == FT_GRAPH_NO_LAYER ||
                          (graph.layer[i] >= at && graph.layer[i] < shape.layer_end));
                for (uint32_t i = 0; i < m.layer_count; i++) {
                    bool within = i >= at && i < shape.layer_end;
                    CHECK_EQ(graph.router_job[i] != FT_NONE, within && !m.layers[i].dense);
                }
                ft_arena_fini(&arena);
            }
            CHECK_EQ(slices, ft_div_up(m.layer_count, layers));
            CHECK_EQ(jobs, whole_jobs);
            CHECK_EQ(bytes, whole_bytes);
            CHECK_EQ(heads, whole_heads);
        }
}

/* Experts are cut by how many there are for the workers; whatever they are cut into, tiles cover them once and fit into the
 * range that is reserved for a layer. */
TEST(experts_are_cut_for_the_workers_and_covered_once)
{
    struct ft_expert_layout layout;
    struct ft_error err;
    struct ft_model m = {.topk = 10, .expert_count = 512};
    uint32_t ups, downs, last_ups, last_downs;
    CHECK_OK(
        ft_expert_layout_init(&layout, FT_FORMAT_NVFP4, 2560, 640, 0, 0, false, FT_ACTIVATION_SILU, 0, &err),
        &err);
    struct ft_tiling two = ft_graph_tiling_of(2), many = ft_graph_tiling_of(14), one = ft_graph_tiling_of(1);
    ft_graph_expert_tiles(&two, &layout, 10, false, &ups, &downs);
    CHECK(ups == 1 && downs == 1);
    ft_graph_expert_tiles(&one, &layout, 1, true, &ups, &downs);
    CHECK(ups == 1 && downs == 1);
    ft_graph_expert_tiles(&many, &layout, 7, false, &ups, &downs);
    CHECK(ups == 5 && downs == 8);
    ft_graph_expert_tiles(&many, &layout, 7, true, &last_ups, &last_downs);
    CHECK(last_ups == ups && last_downs > downs); /* what a layer ends with is small */
    for (uint32_t experts = 1; experts <= 10; experts++) {
        ft_graph_expert_tiles(&many, &layout, experts, false, &ups, &downs);
        ft_graph_expert_tiles(&many, &layout, experts, true, &last_ups, &last_downs);
        uint32_t jobs = (experts - 1) * (ups + downs + 1) + last_ups + last_downs + 1;
        CHECK(jobs <= ft_graph_reserved_count(&m, 1, many.tiles_max));
        uint32_t begin, end = 0;
        for (uint32_t t = 0, at = 0; t < downs; t++, at = end) {
            ft_graph_tile_range(layout.hidden, downs, t, &begin, &end);
            CHECK(begin == at && end > begin && begin % 8 == 0);
        }
        CHECK_EQ(end, layout.hidden);
    }
}

TEST(a_cycle_is_found)
{
    struct ft_model m;
    struct ft_error err;
    struct ft_graph graph;
    struct ft_arena arena;
    make_model(&m);
    REQUIRE(build(&graph, &arena, &m, (struct ft_shape){1, 1, 1, false, 0, 0}, 1, FT_LANE_CPU, &err) ==
            FT_OK);
    graph.in_degree[3]++;
    CHECK_FAILS(ft_graph_check(&graph, &err), FT_INTERNAL, "can run", &err);
    ft_arena_fini(&arena);
}

TEST_MAIN(RUN(every_shape_gives_a_sound_graph) RUN(tiles_of_an_op_cover_its_axis_exactly_once)
              RUN(ple_reads_start_at_once_and_experts_have_reserved_ids) RUN(impossible_shapes_are_refused)
                  RUN(slices_have_the_jobs_of_the_whole_step_between_them)
                      RUN(experts_are_cut_for_the_workers_and_covered_once) RUN(a_cycle_is_found))
