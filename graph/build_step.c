/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Builds the job graph of one step shape.
 *
 * The builder runs twice over the same code: first it counts jobs and edges, then it fills arrays of exactly
 * that size. It thinks in stages: a stage is one op of one layer cut into tiles; `after` connects it to what
 * must be finished first.
 */
#include "graph/graph.h"

#define TILE_BYTES_MIN 65536u

/* The jobs of one stage, as a contiguous id range; count 0 = nothing to wait for. */
struct stage {
    uint32_t first, count;
};

struct builder {
    struct ft_graph *graph;
    const struct ft_model *model;
    const struct ft_tiling *tiling;
    struct ft_shape shape;
    enum ft_phase phase;
    bool filling;
    uint32_t jobs, edges;
    uint32_t *from, *to; /* [edge_count] while filling */
};

static void edge(struct builder *b, uint32_t from, uint32_t to)
{
    if (b->filling) {
        b->from[b->edges] = from;
        b->to[b->edges] = to;
        b->graph->in_degree[to]++;
    }
    b->edges++;
}

static uint32_t job(struct builder *b, enum ft_op op, uint32_t layer, uint32_t begin, uint32_t end,
                    uint64_t bytes, uint64_t flops)
{
    uint32_t id = b->jobs++;
    struct ft_graph *graph = b->graph;
    if (b->filling) {
        graph->op[id] = (uint8_t)op;
        graph->lane[id] = op == FT_OP_JOIN || op == FT_OP_END ? FT_LANE_INLINE : b->tiling->lane_of_op[op];
        graph->phase[id] = (uint8_t)b->phase;
        graph->layer[id] = (uint16_t)layer;
        graph->begin[id] = begin;
        graph->end[id] = end;
        graph->bytes[id] = bytes;
        graph->flops[id] = flops;
    }
    return id;
}

/* Everything of `before` precedes everything of `after`; a join in between when both have several jobs. */
static void connect(struct builder *b, struct stage before, struct stage after)
{
    if (before.count > 1 && after.count > 1) {
        uint32_t join = job(b, FT_OP_JOIN, FT_GRAPH_NO_LAYER, 0, 0, 0, 0);
        for (uint32_t i = 0; i < before.count; i++)
            edge(b, before.first + i, join);
        before = (struct stage){join, 1};
    }
    for (uint32_t i = 0; i < before.count; i++)
        for (uint32_t j = 0; j < after.count; j++)
            edge(b, before.first + i, after.first + j);
}

uint32_t ft_graph_tile_count(uint64_t units, uint64_t unit_bytes, uint32_t tiles_max, uint32_t tile_bytes_min)
{
    uint64_t tiles = tile_bytes_min ? units * unit_bytes / tile_bytes_min : units;
    tiles = FT_MIN(tiles, FT_MIN((uint64_t)tiles_max, units));
    return (uint32_t)FT_MAX(tiles, 1u);
}

struct ft_tiling ft_graph_tiling_of(uint32_t workers)
{
    return (struct ft_tiling){.tiles_max = workers > 1 ? 2 * workers : 1, .tile_bytes_min = TILE_BYTES_MIN};
}

/*
 * In shares of H = tiles_max / 2, about the workers: 5 H / 2 tiles of up projections, 4 H of down projections, H
 * more for the last expert. Up tiles come first (the lane takes what was pushed after the router before what
 * workers made ready), so they may be large: whoever finds none left has down tiles of earlier experts to do
 * while the last up tiles end. The layer ends with down tiles, so those are small, and those of the last expert
 * smaller. Together at most 7.5 H + 2 experts: see ft_graph_reserved_count.
 */
void ft_graph_expert_tiles(const struct ft_tiling *tiling, const struct ft_expert_layout *layout,
                           uint32_t experts, bool is_last, uint32_t *ups, uint32_t *downs)
{
    uint64_t up_bytes = (uint64_t)layout->bytes * 2 / 3, down_bytes = layout->bytes - up_bytes;
    uint64_t up_blocks = ft_div_up(layout->width, 8), down_blocks = ft_div_up(layout->hidden, 8);
    uint32_t half = tiling->tiles_max / 2, least = tiling->tile_bytes_min;
    uint32_t up_share = (uint32_t)ft_div_up(5ull * half / 2, experts),
             down_share = (uint32_t)ft_div_up(4ull * half, experts) + (is_last ? half : 0);
    *ups = ft_graph_tile_count(up_blocks, ft_div_up(up_bytes, up_blocks), FT_MAX(up_share, 1u), least);
    *downs = ft_graph_tile_count(down_blocks, ft_div_up(down_bytes, down_blocks), FT_MAX(down_share, 1u),
                                 is_last ? FT_MAX(least / 2, 1u) : least);
}

void ft_graph_tile_range(uint32_t units, uint32_t tiles, uint32_t t, uint32_t *begin, uint32_t *end)
{
    uint64_t blocks = ft_div_up(units, 8);
    *begin = (uint32_t)(blocks * t / tiles) * 8;
    *end = FT_MIN((uint32_t)(blocks * (t + 1) / tiles) * 8, units);
}

/* `units` of the op's axis, cut into tiles whose borders are multiples of `grain`. unit_cost is the time of a
 * unit, in bytes that could be read in it. */
static struct stage stage_of_cost(struct builder *b, enum ft_op op, uint32_t layer, uint32_t units,
                                  uint32_t grain, uint64_t unit_bytes, uint64_t unit_flops,
                                  uint64_t unit_cost)
{
    struct stage made = {b->jobs, 0};
    uint32_t blocks = (uint32_t)ft_div_up(units, grain);
    uint32_t max = b->tiling->lane_of_op[op] == FT_LANE_CPU ? b->tiling->tiles_max : 1;
    uint32_t tiles = ft_graph_tile_count(blocks, unit_cost * grain, max, b->tiling->tile_bytes_min);
    for (uint32_t i = 0; i < tiles; i++) {
        uint32_t begin = (uint32_t)((uint64_t)blocks * i / tiles) * grain;
        uint32_t end = FT_MIN((uint32_t)((uint64_t)blocks * (i + 1) / tiles) * grain, units);
        uint64_t count = end - begin;
        job(b, op, layer, begin, end, count * unit_bytes, count * unit_flops);
        made.count++;
    }
    return made;
}

/* A core does about this many operations while it reads a byte. */
#define FLOPS_PER_BYTE 4u
/* What one dot product costs beside its bytes: summing the lanes, storing, and in mixers a sigmoid. Measured
 * with rows of 32 to 64 columns. */
#define DOT_COST_BYTES 128u
#define SIGMOID_DOT_COST_BYTES 384u

static struct stage stage(struct builder *b, enum ft_op op, uint32_t layer, uint32_t units, uint32_t grain,
                          uint64_t unit_bytes, uint64_t unit_flops)
{
    return stage_of_cost(b, op, layer, units, grain, unit_bytes, unit_flops,
                         FT_MAX(unit_bytes, unit_flops / FLOPS_PER_BYTE));
}

/* A stage whose unit is `dots` outputs of a bf16 matrix with `in` columns. */
static struct stage stage_of_dots(struct builder *b, enum ft_op op, uint32_t layer, uint32_t units,
                                  uint32_t dots, uint32_t in, uint32_t rows, uint32_t dot_cost)
{
    uint64_t bytes = 2ull * dots * in, flops = 2ull * dots * in * rows;
    uint64_t cost = FT_MAX(bytes, flops / FLOPS_PER_BYTE) + (uint64_t)dots * rows * dot_cost;
    return stage_of_cost(b, op, layer, units, 8, bytes, flops, cost);
}

static struct stage project(struct builder *b, enum ft_op op, uint32_t layer, uint32_t outputs, uint32_t in,
                            uint32_t rows, struct stage before)
{
    struct stage made = stage_of_dots(b, op, layer, outputs, 1, in, rows, DOT_COST_BYTES);
    connect(b, before, made);
    return made;
}

/* Norm of the residual, then (hyper-connections) the mixer: leaves x and s. */
static struct stage build_mix(struct builder *b, uint32_t layer, uint32_t rows, bool top, struct stage before)
{
    const struct ft_model *m = b->model;
    uint32_t wide = m->hc_count * m->hidden;
    struct stage norm = stage(b, FT_OP_NORM, layer, rows, 1, 4ull * wide, 6ull * wide);
    connect(b, before, norm);
    if (m->hc_count == 1)
        return norm;
    struct stage down =
        project(b, FT_OP_MIX_DOWN, layer, m->hc_lowrank + (top ? 0 : m->hc_count), wide, rows, norm);
    struct stage up = stage_of_dots(b, FT_OP_MIX_UP, layer, m->hidden, m->hc_count, m->hc_lowrank, rows,
                                    SIGMOID_DOT_COST_BYTES);
    connect(b, down, up);
    return up;
}

static struct stage build_ple(struct builder *b, uint32_t layer, struct stage before)
{
    const struct ft_model *m = b->model;
    const struct ft_ple_spec *ple = &m->ple[m->layers[layer].ple];
    uint32_t rows = b->shape.rows, wide = m->hc_count * m->hidden;
    uint64_t raw = (uint64_t)ple->head_count * ple->row_width * rows;
    struct stage read = {job(b, FT_OP_PLE_READ, layer, 0, rows, raw, 0), 1};
    struct stage keys = project(b, FT_OP_PLE_PROJECT, layer, wide + m->hidden, m->ple_embed_dim, rows, read);
    struct stage inject =
        stage(b, FT_OP_PLE_INJECT, layer, b->shape.sequences, 1, 16ull * wide * rows, 20ull * wide * rows);
    connect(b, keys, inject);
    connect(b, before, inject);
    return inject;
}

static struct stage build_linear(struct builder *b, uint32_t layer, struct stage before)
{
    const struct ft_model *m = b->model;
    uint32_t rows = b->shape.rows, sequences = b->shape.sequences;
    uint32_t channels = ft_model_conv_channels(m), values = m->value_head_count * m->value_dim;
    uint64_t state = 4ull * m->key_dim * m->value_dim;
    struct stage projected = project(b, FT_OP_LINEAR_PROJECT, layer,
                                     channels + values + 2 * m->value_head_count, m->hidden, rows, before);
    struct stage conv =
        stage(b, FT_OP_LINEAR_CONV, layer, sequences * (uint32_t)ft_div_up(channels, FT_GRAPH_CONV_CHANNELS),
              1, 4ull * FT_GRAPH_CONV_CHANNELS * m->conv_taps * 2,
              2ull * FT_GRAPH_CONV_CHANNELS * m->conv_taps * rows);
    connect(b, projected, conv);
    struct stage delta =
        stage(b, FT_OP_LINEAR_DELTA, layer, sequences * m->value_head_count, 1, state * 2, state * 2 * rows);
    connect(b, conv, delta);
    return project(b, FT_OP_ATTN_OUT, layer, m->hidden, values, rows, delta);
}

static struct stage build_attention(struct builder *b, uint32_t layer, struct stage before)
{
    const struct ft_model *m = b->model;
    bool sparse = m->layers[layer].attention == FT_ATTENTION_SPARSE;
    uint32_t rows = b->shape.rows, queries = m->head_count * m->head_dim;
    uint32_t outputs = queries * (m->attention_gate ? 2 : 1) + 2 * m->kv_head_count * m->head_dim +
                       (sparse ? (m->indexer_head_count + 1) * m->indexer_dim : 0);
    struct stage last = project(b, FT_OP_ATTN_PROJECT, layer, outputs, m->hidden, rows, before);
    struct stage prepare =
        stage(b, FT_OP_ATTN_PREPARE, layer, b->shape.sequences, 1, 8ull * outputs, 8ull * outputs);
    connect(b, last, prepare);
    last = prepare;
    if (sparse) {
        uint64_t scores = (uint64_t)m->indexer_head_count * m->indexer_dim *
                          (m->indexer_budget / FT_MAX(m->indexer_ratio, 1u));
        struct stage select = stage(b, FT_OP_ATTN_SELECT, layer, rows, 1, 4 * scores, 2 * scores);
        connect(b, last, select);
        last = select;
    }
    /* The context length is not part of the shape: one unit is taken as a page of keys and values. */
    struct stage attend = stage(b, FT_OP_ATTN, layer, rows * m->kv_head_count, 1, 512ull * m->head_dim,
                                512ull * m->head_dim * (m->head_count / m->kv_head_count));
    connect(b, last, attend);
    return project(b, FT_OP_ATTN_OUT, layer, m->hidden, queries, rows, attend);
}

static struct stage build_mlp(struct builder *b, enum ft_op up_op, enum ft_op down_op, uint32_t layer,
                              uint32_t width, struct stage before)
{
    struct stage up = project(b, up_op, layer, width, 2 * b->model->hidden, b->shape.rows, before);
    return project(b, down_op, layer, b->model->hidden, width, b->shape.rows, up);
}

static struct stage build_moe(struct builder *b, uint32_t layer, struct stage before)
{
    const struct ft_model *m = b->model;
    uint32_t rows = b->shape.rows;
    struct stage logits = project(b, FT_OP_ROUTER_LOGITS, layer, m->expert_count, m->hidden, rows, before);
    struct stage route = {job(b, FT_OP_ROUTER, layer, 0, rows, 0, (uint64_t)m->expert_count * rows), 1};
    connect(b, logits, route);
    struct stage shared = {0, 0};
    if (m->shared_width)
        shared = build_mlp(b, FT_OP_SHARED_UP, FT_OP_SHARED_DOWN, layer, m->shared_width, before);
    struct stage join = {job(b, FT_OP_JOIN, layer, 0, 0, 0, 0), 1};
    edge(b, route.first, join.first);
    connect(b, shared, join);
    struct stage combine =
        stage(b, FT_OP_COMBINE, layer, m->hidden, 16, 4ull * (m->topk + m->hc_count) * rows,
              2ull * (m->topk + m->hc_count) * rows);
    connect(b, join, combine);
    if (b->filling) {
        b->graph->router_job[layer] = route.first;
        b->graph->combine_job[layer] = join.first;
        b->graph->combine_tile[layer] = combine.first;
    }
    return combine;
}

static struct stage build_layer(struct builder *b, uint32_t layer, struct stage before)
{
    const struct ft_layer_spec *spec = &b->model->layers[layer];
    if (spec->ple != FT_PLE_NONE)
        before = build_ple(b, layer, before);
    b->phase = FT_PHASE_ATTENTION;
    before = build_mix(b, layer, b->shape.rows, false, before);
    before = spec->attention == FT_ATTENTION_LINEAR ? build_linear(b, layer, before)
                                                    : build_attention(b, layer, before);
    b->phase = FT_PHASE_MLP;
    before = build_mix(b, layer, b->shape.rows, false, before);
    if (spec->dense)
        return build_mlp(b, FT_OP_DENSE_UP, FT_OP_DENSE_DOWN, layer, b->model->dense_width, before);
    return build_moe(b, layer, before);
}

static void build_all(struct builder *b)
{
    const struct ft_model *m = b->model;
    struct stage last = {0, 0};
    if (!b->shape.layer_begin)
        last = stage(b, FT_OP_EMBED, FT_GRAPH_NO_LAYER, b->shape.rows, 1, 4ull * m->hidden * m->hc_count, 0);
    for (uint32_t layer = b->shape.layer_begin; layer < b->shape.layer_end; layer++)
        last = build_layer(b, layer, last);
    b->phase = FT_PHASE_HEAD;
    if (b->shape.logit_rows && b->shape.layer_end == m->layer_count) {
        last = build_mix(b, FT_GRAPH_NO_LAYER, b->shape.logit_rows, true, last);
        last = project(b, FT_OP_HEAD, FT_GRAPH_NO_LAYER, m->vocab, m->hidden, b->shape.logit_rows, last);
        struct stage sample =
            stage(b, FT_OP_SAMPLE, FT_GRAPH_NO_LAYER, b->shape.logit_rows, 1, 8ull * m->vocab, 0);
        connect(b, last, sample);
        last = sample;
    }
    struct stage end = {job(b, FT_OP_END, FT_GRAPH_NO_LAYER, 0, 0, 0, 0), 1};
    connect(b, last, end);
    if (b->filling)
        b->graph->end_job = end.first;
}

/* Edge pairs -> CSR, by counting; the order of a job's successors is the order in which edges were made. */
static void build_csr(struct ft_graph *graph, const uint32_t *from, const uint32_t *to)
{
    for (uint32_t e = 0; e < graph->edge_count; e++)
        graph->succ_begin[from[e] + 1]++;
    for (uint32_t i = 0; i < graph->static_count; i++)
        graph->succ_begin[i + 1] += graph->succ_begin[i];
    /* Filling from the back leaves succ_begin[i] at the start of i's list again. */
    for (uint32_t e = graph->edge_count; e-- > 0;)
        graph->succ[--graph->succ_begin[from[e] + 1]] = to[e];
    for (uint32_t i = 0; i < graph->static_count; i++)
        graph->succ_begin[i] = graph->succ_begin[i + 1];
    graph->succ_begin[graph->static_count] = graph->edge_count;
}

static void list_lane(const struct ft_graph *graph, enum ft_lane lane, uint32_t *jobs, uint32_t *count)
{
    *count = 0;
    for (uint32_t i = 0; i < graph->static_count; i++)
        if (graph->lane[i] == lane)
            jobs[(*count)++] = i;
}

uint32_t ft_graph_reserved_count(const struct ft_model *model, uint32_t rows, uint32_t tiles_max)
{
    uint64_t active = FT_MIN((uint64_t)rows * model->topk, model->expert_count);
    /* per expert at most: up and down tiles (together at most 2 (2 tiles_max + active)), a join, a fetch, a group */
    return (uint32_t)(2 * (2ull * tiles_max + active) + 3 * active + 2);
}

static int push_arrays(struct ft_graph *g, struct ft_arena *arena, struct ft_error *err)
{
    int status = FT_ARENA_PUSH(arena, g->static_count, &g->op, err);
#define PUSH(count, pointer)                                                                                 \
    if (status == FT_OK)                                                                                     \
    status = FT_ARENA_PUSH(arena, count, pointer, err)
    PUSH(g->static_count, &g->lane);
    PUSH(g->static_count, &g->phase);
    PUSH(g->static_count, &g->layer);
    PUSH(g->static_count, &g->begin);
    PUSH(g->static_count, &g->end);
    PUSH(g->static_count, &g->bytes);
    PUSH(g->static_count, &g->flops);
    PUSH(g->static_count, &g->in_degree);
    PUSH(g->static_count + 1, &g->succ_begin);
    PUSH(g->edge_count, &g->succ);
    PUSH(g->layer_count, &g->router_job);
    PUSH(g->layer_count, &g->combine_job);
    PUSH(g->layer_count, &g->combine_tile);
    PUSH(g->layer_count, &g->reserved_begin);
    PUSH(g->static_count, &g->device_jobs);
    PUSH(g->static_count, &g->io_jobs);
#undef PUSH
    return status;
}

int ft_graph_build(struct ft_graph *graph, struct ft_arena *arena, const struct ft_model *model,
                   const struct ft_shape *shape, const struct ft_tiling *tiling, struct ft_error *err)
{
    *graph = (struct ft_graph){.shape = *shape, .layer_count = model->layer_count};
    if (!shape->rows || !shape->sequences || shape->sequences > shape->rows ||
        shape->logit_rows > shape->rows)
        return ft_error_set(err, FT_LIMIT,
                            "a step of %u rows, %u sequences and %u logit rows is not possible", shape->rows,
                            shape->sequences, shape->logit_rows);
    if (!graph->shape.layer_end)
        graph->shape.layer_end = model->layer_count;
    if (graph->shape.layer_begin >= graph->shape.layer_end || graph->shape.layer_end > model->layer_count)
        return ft_error_set(err, FT_LIMIT, "a step of layers %u to %u is not possible: the model has %u",
                            graph->shape.layer_begin, graph->shape.layer_end, model->layer_count);
    struct builder b = {.graph = graph, .model = model, .tiling = tiling, .shape = graph->shape};
    build_all(&b);
    graph->static_count = b.jobs;
    graph->edge_count = b.edges;
    graph->reserved_count =
        model->expert_count ? ft_graph_reserved_count(model, shape->rows, tiling->tiles_max) : 0;
    uint64_t jobs = b.jobs + (uint64_t)graph->reserved_count * model->layer_count;
    if (jobs >= FT_NONE)
        return ft_error_set(err, FT_LIMIT, "a step of %u rows has %llu jobs, more than 32-bit ids",
                            shape->rows, (unsigned long long)jobs);
    graph->job_count = (uint32_t)jobs;
    int status = push_arrays(graph, arena, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, graph->edge_count, &b.from, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, graph->edge_count, &b.to, err);
    if (status != FT_OK || ft_arena_is_counting(arena))
        return status;
    for (uint32_t layer = 0; layer < model->layer_count; layer++) {
        graph->router_job[layer] = graph->combine_job[layer] = graph->combine_tile[layer] = FT_NONE;
        graph->reserved_begin[layer] =
            model->layers[layer].dense ? FT_NONE : graph->static_count + layer * graph->reserved_count;
    }
    b.filling = true;
    b.jobs = b.edges = 0;
    build_all(&b);
    FT_ASSERT_EQ(b.jobs, graph->static_count);
    FT_ASSERT_EQ(b.edges, graph->edge_count);
    build_csr(graph, b.from, b.to);
    list_lane(graph, FT_LANE_DEVICE, graph->device_jobs, &graph->device_count);
    list_lane(graph, FT_LANE_IO, graph->io_jobs, &graph->io_count);
    return FT_OK;
}

int ft_graph_create(struct ft_graph *graph, struct ft_arena *arena, const struct ft_model *model,
                    const struct ft_shape *shape, const struct ft_tiling *tiling, struct ft_error *err)
{
    struct ft_arena counting;
    ft_arena_count(&counting, "graph");
    *arena = (struct ft_arena){.name = "graph"};
    int status = ft_graph_build(graph, &counting, model, shape, tiling, err);
    if (status == FT_OK)
        status = ft_arena_init(arena, "graph", counting.used, err);
    if (status == FT_OK)
        status = ft_graph_build(graph, arena, model, shape, tiling, err);
    if (status != FT_OK)
        ft_arena_fini(arena);
    return status;
}

int ft_graph_check(const struct ft_graph *graph, struct ft_error *err)
{
    struct ft_arena arena;
    int32_t *left;
    uint32_t *queue, head = 0, tail = 0;
    int status = ft_arena_init(&arena, "graph check", graph->static_count * 8ull + 4 * FT_ARENA_ALIGN, err);
    if (status != FT_OK)
        return status;
    status = FT_ARENA_PUSH(&arena, graph->static_count, &left, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(&arena, graph->static_count, &queue, err);
    for (uint32_t i = 0; status == FT_OK && i < graph->static_count; i++) {
        left[i] = graph->in_degree[i];
        if (!left[i])
            queue[tail++] = i;
    }
    while (status == FT_OK && head < tail) {
        uint32_t id = queue[head++];
        uint32_t begin = graph->succ_begin[id], end = graph->succ_begin[id + 1];
        if (begin == end && id != graph->end_job)
            status =
                ft_error_set(err, FT_INTERNAL, "job %u (%s) leads nowhere", id, ft_op_name(graph->op[id]));
        for (uint32_t s = begin; s < end; s++)
            if (--left[graph->succ[s]] == 0)
                queue[tail++] = graph->succ[s];
    }
    if (status == FT_OK && (tail != graph->static_count || queue[tail - 1] != graph->end_job))
        status = ft_error_set(err, FT_INTERNAL, "%u of %u jobs can run, the last is %u and the end is %u",
                              tail, graph->static_count, tail ? queue[tail - 1] : FT_NONE, graph->end_job);
    ft_arena_fini(&arena);
    return status;
}
