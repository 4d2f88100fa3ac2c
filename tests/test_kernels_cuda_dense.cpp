// SPDX-License-Identifier: Apache-2.0
//
// Embedding, mixers and dense projections on the GPU against the ops of cores in reference arithmetic, over
// models of even and odd sizes, all weight formats, one and several streams, decode and prefill rows. Decode
// rows must have the same bits whatever rows are beside them.
extern "C" {
#include "tests/cuda_twin_dense.h"
#include "tests/test.h"
}
#include "kernels_cuda/kernels_cuda.h"
#include "kernels_cuda/linear.cuh"
#include "tests/cuda_memory.h"

#include <algorithm>
#include <string>

static uint64_t random_state = 1;
static uint32_t random_u32()
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}
static float random_float()
{
    return (float)random_u32() * 0x1p-31f - 1.0f;
}

// Matrices and vectors exist twice: on the host for the reference, on the device for the kernels.
struct twins {
    std::vector<void *> host;
    ~twins()
    {
        for (void *p : host)
            free(p);
        cuda_memory_free_all();
    }
    char *bytes(uint64_t count)
    {
        void *p = aligned_alloc(64, (count + 64) / 64 * 64);
        host.push_back(p);
        return (char *)p;
    }
};

static void fill_matrix(ft_matrix *w, char *data, char *scale, uint64_t data_bytes, uint64_t scale_bytes)
{
    float size = 2 / sqrtf((float)w->in); // outputs of about the inputs' size
    for (uint64_t i = 0; i < data_bytes; i++)
        data[i] = (char)random_u32();
    for (uint64_t i = 0; w->format == FT_FORMAT_F32 && i < data_bytes / 4; i++)
        ((float *)data)[i] = random_float() * size;
    for (uint64_t i = 0; w->format == FT_FORMAT_BF16 && i < data_bytes / 2; i++)
        ((uint16_t *)data)[i] = twin_dense_bf16(random_float() * size);
    for (uint64_t i = 0; w->format == FT_FORMAT_FP8_BLOCK && i < data_bytes; i++)
        if ((data[i] & 127) == 127)
            data[i] = 1;
    for (uint64_t i = 0; w->format == FT_FORMAT_FP8_BLOCK && i < scale_bytes / 4; i++)
        ((float *)scale)[i] = random_float() * 0.01f;
    for (uint64_t i = 0; w->format != FT_FORMAT_FP8_BLOCK && i < scale_bytes; i++)
        scale[i] = (char)(w->format == FT_FORMAT_NVFP4 ? random_u32() % 80 : 120 + random_u32() % 8);
    w->global = w->format == FT_FORMAT_NVFP4 ? 0.37f : 1.0f;
}

static void make_matrix(twins *t, ft_format format, uint32_t out, uint32_t in, uint16_t block,
                        ft_matrix *host, ft_matrix *device)
{
    uint64_t data_bytes = 0, scale_bytes = 0;
    if ((format == FT_FORMAT_NVFP4 && in % 16) || (format == FT_FORMAT_MXFP4 && in % 32))
        format = FT_FORMAT_BF16;
    *host = {};
    host->out = out;
    host->in = in;
    host->format = format;
    host->block_out = host->block_in = format == FT_FORMAT_FP8_BLOCK ? block : 0;
    ft_matrix_bytes(format, out, in, host->block_out, host->block_in, &data_bytes, &scale_bytes);
    char *data = t->bytes(data_bytes), *scale = scale_bytes ? t->bytes(scale_bytes) : NULL;
    fill_matrix(host, data, scale, data_bytes, scale_bytes);
    host->data = data;
    host->scale = scale;
    *device = *host;
    device->data = cuda_memory_copy(data, data_bytes);
    device->scale = scale ? cuda_memory_copy(scale, scale_bytes) : NULL;
}

static void make_vector(twins *t, uint32_t count, const float **host, const float **device)
{
    float *v = (float *)t->bytes(count * sizeof(float));
    for (uint32_t i = 0; i < count; i++)
        v[i] = random_float();
    *host = v;
    *device = cuda_memory_copy(v, count);
}

struct shape {
    const char *name;
    uint32_t streams, hidden, lowrank, heads, dim, dense;
    ft_format format; // of all but mixers and embedding
    uint16_t block;
    bool bias;
    uint32_t multiprocessors;
};
static const shape SHAPES[] = {
    {"bf16, four streams", 4, 128, 48, 4, 32, 160, FT_FORMAT_BF16, 0, false, 132},
    {"bf16, long rows", 2, 576, 520, 5, 128, 136, FT_FORMAT_BF16, 0, false, 3},
    {"f32, odd sizes", 3, 37, 13, 3, 19, 29, FT_FORMAT_F32, 0, true, 2},
    {"bf16, odd sizes", 4, 37, 13, 3, 19, 29, FT_FORMAT_BF16, 0, true, 5},
    {"f32, one stream", 1, 136, 0, 2, 32, 72, FT_FORMAT_F32, 0, true, 4},
    {"bf16, one stream", 1, 200, 0, 3, 40, 104, FT_FORMAT_BF16, 0, true, 2},
    {"fp8 in blocks of 128", 2, 272, 40, 5, 48, 144, FT_FORMAT_FP8_BLOCK, 128, false, 3},
    {"fp8 in blocks of 32", 1, 96, 0, 3, 32, 80, FT_FORMAT_FP8_BLOCK, 32, true, 3},
    {"nvfp4", 2, 160, 32, 4, 96, 160, FT_FORMAT_NVFP4, 0, false, 2},
    {"nvfp4 in odd halves", 1, 48, 0, 3, 16, 80, FT_FORMAT_NVFP4, 0, true, 2},
    {"mxfp4", 1, 160, 0, 4, 96, 160, FT_FORMAT_MXFP4, 0, true, 3},
};

constexpr uint32_t ROWS_MAX = 130, VOCAB = 157;

struct rig {
    twins memory;
    ft_model model = {};
    ft_weights host = {}, device = {};
    std::vector<ft_layer_weights> host_layers, device_layers;
    ft_cuda cuda = {};
    twin_dense twin = {};
    std::vector<float> start; // the workspace before an op
    std::vector<double> frequencies;
    std::vector<uint32_t> token, position, logit_row;
    std::vector<float> tail;
};

static void make_mix(rig *r, const shape &s, bool inject, ft_mix_weights *host, ft_mix_weights *device)
{
    uint32_t wide = s.streams * s.hidden;
    ft_format format = s.format == FT_FORMAT_F32 ? FT_FORMAT_F32 : FT_FORMAT_BF16;
    make_vector(&r->memory, wide, &host->norm, &device->norm);
    make_matrix(&r->memory, format, s.lowrank, wide, 0, &host->down, &device->down);
    make_matrix(&r->memory, format, wide, s.lowrank, 0, &host->up, &device->up);
    if (inject)
        make_matrix(&r->memory, format, s.streams, wide, 0, &host->inject, &device->inject);
}

static void make_model(rig *r, const shape &s)
{
    ft_model &m = r->model;
    m.hidden = s.hidden;
    m.vocab = VOCAB;
    m.layer_count = 3;
    m.rms_eps = 1e-6f;
    m.norm_plus_one = s.streams > 1;
    m.head_count = s.heads;
    m.kv_head_count = 1;
    m.head_dim = s.dim;
    m.attention_gate = s.streams > 1;
    m.rotary_dim = 8;
    m.indexer_head_count = 2;
    m.indexer_dim = 12;
    m.indexer_ratio = 4;
    m.indexer_budget = 16;
    m.key_head_count = 1;
    m.value_head_count = s.heads;
    m.key_dim = 10;
    m.value_dim = s.dim;
    m.conv_taps = 4;
    m.output_gate = s.streams == 4 ? FT_ACTIVATION_SIGMOID : FT_ACTIVATION_SILU;
    m.expert_count = 4;
    m.topk = 2;
    m.expert_width = 16;
    m.dense_width = s.dense;
    m.hc_count = s.streams;
    m.hc_lowrank = s.lowrank;
    for (auto &layer : m.layers)
        layer.ple = FT_PLE_NONE;
    m.layers[0].attention = FT_ATTENTION_LINEAR;
    m.layers[1].attention = FT_ATTENTION_SPARSE;
    m.layers[2].attention = FT_ATTENTION_FULL;
    m.layers[2].dense = true;
}

static void make_linear(rig *r, const shape &s, ft_layer_weights *host, ft_layer_weights *device)
{
    uint32_t values = s.heads * s.dim, channels = ft_model_conv_channels(&r->model);
    ft_linear_weights &h = host->linear, &d = device->linear;
    make_matrix(&r->memory, s.format, channels, s.hidden, s.block, &h.qkv, &d.qkv);
    make_matrix(&r->memory, s.format, values, s.hidden, s.block, &h.z, &d.z);
    make_matrix(&r->memory, FT_FORMAT_BF16, s.heads, s.hidden, 0, &h.b, &d.b);
    make_matrix(&r->memory, FT_FORMAT_BF16, s.heads, s.hidden, 0, &h.a, &d.a);
    make_matrix(&r->memory, s.format, s.hidden, values, s.block, &h.out, &d.out);
    make_vector(&r->memory, s.dim, &h.norm, &d.norm);
}

static void make_attention(rig *r, const shape &s, ft_layer_weights *host, ft_layer_weights *device)
{
    ft_attention_weights &h = host->attention, &d = device->attention;
    uint32_t q = s.heads * s.dim, wide_q = q * (r->model.attention_gate ? 2 : 1),
             index = 3 * r->model.indexer_dim;
    make_matrix(&r->memory, s.format, wide_q, s.hidden, s.block, &h.q, &d.q);
    make_matrix(&r->memory, s.format, s.dim, s.hidden, s.block, &h.k, &d.k);
    make_matrix(&r->memory, s.format, s.dim, s.hidden, s.block, &h.v, &d.v);
    make_matrix(&r->memory, s.format, s.hidden, q, s.block, &h.o, &d.o);
    make_matrix(&r->memory, FT_FORMAT_BF16, index, s.hidden, 0, &h.index_qk, &d.index_qk);
    if (s.bias) {
        make_vector(&r->memory, wide_q, &h.q_bias, &d.q_bias);
        make_vector(&r->memory, s.dim, &h.k_bias, &d.k_bias);
        make_vector(&r->memory, s.dim, &h.v_bias, &d.v_bias);
        make_vector(&r->memory, s.hidden, &h.o_bias, &d.o_bias);
    }
}

static void make_weights(rig *r, const shape &s)
{
    r->host_layers.resize(3);
    r->device_layers.resize(3);
    r->host.layers = r->host_layers.data();
    r->device.layers = r->device_layers.data();
    make_matrix(&r->memory, s.format, VOCAB, s.hidden, s.block, &r->host.embed, &r->device.embed);
    make_matrix(&r->memory, s.format, VOCAB, s.hidden, s.block, &r->host.head, &r->device.head);
    if (s.streams == 1)
        make_vector(&r->memory, s.hidden, &r->host.final_norm, &r->device.final_norm);
    else
        make_mix(r, s, false, &r->host.top_mix, &r->device.top_mix);
    for (uint32_t i = 0; i < 3; i++) {
        ft_layer_weights *h = &r->host_layers[i], *d = &r->device_layers[i];
        if (s.streams == 1) {
            make_vector(&r->memory, s.hidden, &h->attention_norm, &d->attention_norm);
            make_vector(&r->memory, s.hidden, &h->mlp_norm, &d->mlp_norm);
        } else {
            make_mix(r, s, true, &h->attention_mix, &d->attention_mix);
            make_mix(r, s, true, &h->mlp_mix, &d->mlp_mix);
        }
    }
    make_linear(r, s, &r->host_layers[0], &r->device_layers[0]);
    make_attention(r, s, &r->host_layers[1], &r->device_layers[1]);
    make_attention(r, s, &r->host_layers[2], &r->device_layers[2]);
    ft_layer_weights *h = &r->host_layers[2], *d = &r->device_layers[2];
    make_matrix(&r->memory, s.format, s.dense, s.hidden, s.block, &h->dense.gate, &d->dense.gate);
    make_matrix(&r->memory, s.format, s.dense, s.hidden, s.block, &h->dense.up, &d->dense.up);
    make_matrix(&r->memory, s.format, s.hidden, s.dense, s.block, &h->dense.down, &d->dense.down);
}

static void make_step(rig *r, const shape &s)
{
    ft_cuda &c = r->cuda;
    uint32_t half = r->model.rotary_dim / 2, zero[1] = {0}, count[1] = {ROWS_MAX};
    for (uint32_t i = 0; i < ROWS_MAX; i++) {
        r->token.push_back(random_u32() % VOCAB);
        r->position.push_back(random_u32() % 200000);
        r->logit_row.push_back((i * 7 + 1) % ROWS_MAX);
    }
    for (uint32_t i = 0; i < half; i++)
        r->frequencies.push_back(pow(1e4, -(double)i / half));
    c.model = &r->model;
    c.weights = &r->device;
    ft_workspace_init(&c.space, &r->model, ROWS_MAX, 1, ROWS_MAX);
    c.base = cuda_memory_alloc<float>(c.space.count);
    ft_state_layout_init(&c.state, &r->model);
    c.frequencies = cuda_memory_copy(r->frequencies.data(), half);
    c.rotary_scale = 1.25f;
    c.multiprocessors = s.multiprocessors;
    c.scratch_bytes = ft_cuda_scratch_bytes(&r->model, ROWS_MAX);
    c.scratch = cuda_memory_alloc<char>(c.scratch_bytes);
    c.step.token = cuda_memory_copy(r->token.data(), ROWS_MAX);
    c.step.position = cuda_memory_copy(r->position.data(), ROWS_MAX);
    c.step.first_row = cuda_memory_copy(zero, 1);
    c.step.row_count = cuda_memory_copy(count, 1);
    c.step.sequences = 1;
    std::vector<float> state(r->cuda.state.count);
    float *on_device = cuda_memory_copy(state.data(), state.size());
    c.step.state = cuda_memory_copy(&on_device, 1);
    r->start.resize(c.space.count);
    for (float &v : r->start)
        v = random_float();
    r->twin = {&r->model,
               &r->host,
               c.space,
               NULL,
               r->frequencies.data(),
               1.25,
               0,
               0,
               r->token.data(),
               r->position.data(),
               r->logit_row.data()};
}

static void rig_open(rig *r, const shape &s)
{
    make_model(r, s);
    make_weights(r, s);
    make_step(r, s);
}

// One op of the GPU beside the ops of cores that it stands for.
struct op_case {
    const char *name;
    int (*launch)(const ft_cuda *c);
    void (*reference)(rig *r);
    uint64_t ft_workspace::*output;
    bool streams_only, one_stream_only;
};

static int launch_embed(const ft_cuda *c)
{
    return ft_cuda_embed(c, NULL);
}
static int launch_mix(const ft_cuda *c)
{
    return ft_cuda_mix(c, FT_PHASE_ATTENTION, 0, NULL);
}
static int launch_mix_mlp(const ft_cuda *c)
{
    return ft_cuda_mix(c, FT_PHASE_MLP, 1, NULL);
}
static int launch_mix_head(const ft_cuda *c)
{
    return ft_cuda_mix(c, FT_PHASE_HEAD, 0, NULL);
}
static int launch_project_linear(const ft_cuda *c)
{
    return ft_cuda_attention_project(c, 0, NULL);
}
static int launch_project_sparse(const ft_cuda *c)
{
    return ft_cuda_attention_project(c, 1, NULL);
}
static int launch_project_full(const ft_cuda *c)
{
    return ft_cuda_attention_project(c, 2, NULL);
}
static int launch_out_linear(const ft_cuda *c)
{
    return ft_cuda_attention_out(c, 0, NULL);
}
static int launch_out_sparse(const ft_cuda *c)
{
    return ft_cuda_attention_out(c, 1, NULL);
}
static int launch_dense(const ft_cuda *c)
{
    return ft_cuda_dense_mlp(c, 2, NULL);
}
static int launch_head(const ft_cuda *c)
{
    return ft_cuda_head(c, NULL);
}

static void twin_mix(rig *r, ft_phase phase, uint32_t layer)
{
    const ft_model &m = r->model;
    twin_dense_run(&r->twin, FT_OP_NORM, phase, layer, ROWS_MAX);
    if (m.hc_count == 1)
        return;
    twin_dense_run(&r->twin, FT_OP_MIX_DOWN, phase, layer,
                   m.hc_lowrank + (phase == FT_PHASE_HEAD ? 0 : m.hc_count));
    twin_dense_run(&r->twin, FT_OP_MIX_UP, phase, layer, m.hidden);
}
static void twin_embed(rig *r)
{
    twin_dense_run(&r->twin, FT_OP_EMBED, FT_PHASE_ATTENTION, 0, ROWS_MAX);
}
static void twin_mix_attention(rig *r)
{
    twin_mix(r, FT_PHASE_ATTENTION, 0);
}
static void twin_mix_mlp(rig *r)
{
    twin_mix(r, FT_PHASE_MLP, 1);
}
static void twin_mix_head(rig *r)
{
    twin_mix(r, FT_PHASE_HEAD, 0);
}
static void twin_project_linear(rig *r)
{
    twin_dense_run(&r->twin, FT_OP_LINEAR_PROJECT, FT_PHASE_ATTENTION, 0, UINT32_MAX);
}
static void twin_project_sparse(rig *r)
{
    twin_dense_run(&r->twin, FT_OP_ATTN_PROJECT, FT_PHASE_ATTENTION, 1, UINT32_MAX);
}
static void twin_project_full(rig *r)
{
    twin_dense_run(&r->twin, FT_OP_ATTN_PROJECT, FT_PHASE_ATTENTION, 2, UINT32_MAX);
}
static void twin_out_sparse(rig *r)
{
    twin_dense_run(&r->twin, FT_OP_ATTN_OUT, FT_PHASE_ATTENTION, 1, r->model.hidden);
}
static void twin_out_linear(rig *r)
{
    twin_dense_run(&r->twin, FT_OP_ATTN_OUT, FT_PHASE_ATTENTION, 0, r->model.hidden);
}
static void twin_dense_mlp(rig *r)
{
    twin_dense_run(&r->twin, FT_OP_DENSE_UP, FT_PHASE_MLP, 2, r->model.dense_width);
    twin_dense_run(&r->twin, FT_OP_DENSE_DOWN, FT_PHASE_MLP, 2, r->model.hidden);
}
static void twin_head(rig *r)
{
    twin_dense_run(&r->twin, FT_OP_HEAD, FT_PHASE_HEAD, 0, VOCAB);
}

static const op_case OPS[] = {
    {"embed", launch_embed, twin_embed, &ft_workspace::residual, false, false},
    {"rotary", launch_embed, twin_embed, &ft_workspace::rotary, false, false},
    {"mix", launch_mix, twin_mix_attention, &ft_workspace::x, false, false},
    {"mix u", launch_mix, twin_mix_attention, &ft_workspace::normed, true, false},
    {"mix t, s", launch_mix, twin_mix_attention, &ft_workspace::mixed, true, false},
    {"mix mlp", launch_mix_mlp, twin_mix_mlp, &ft_workspace::x, false, false},
    {"mix head", launch_mix_head, twin_mix_head, &ft_workspace::head_x, false, false},
    {"project linear", launch_project_linear, twin_project_linear, &ft_workspace::project, false, false},
    {"project sparse", launch_project_sparse, twin_project_sparse, &ft_workspace::project, false, false},
    {"project full", launch_project_full, twin_project_full, &ft_workspace::project, false, false},
    {"out linear", launch_out_linear, twin_out_linear, &ft_workspace::residual, false, false},
    {"out sparse", launch_out_sparse, twin_out_sparse, &ft_workspace::residual, false, false},
    {"dense mlp", launch_dense, twin_dense_mlp, &ft_workspace::residual, false, false},
    {"head", launch_head, twin_head, &ft_workspace::logits, false, false},
};

// Elements of a row of a buffer, and how many of them the op may have written.
static uint64_t row_width(const rig *r, uint64_t ft_workspace::*buffer)
{
    const ft_model &m = r->model;
    const ft_workspace &space = r->cuda.space;
    if (buffer == &ft_workspace::residual || buffer == &ft_workspace::normed)
        return (uint64_t)m.hc_count * m.hidden;
    if (buffer == &ft_workspace::rotary)
        return m.rotary_dim;
    if (buffer == &ft_workspace::mixed)
        return m.hc_lowrank + m.hc_count;
    if (buffer == &ft_workspace::project)
        return space.project_width;
    if (buffer == &ft_workspace::logits)
        return m.vocab;
    return m.hidden;
}

static std::vector<float> run_device(rig *r, const op_case &op, uint32_t rows,
                                     const std::vector<float> &start)
{
    ft_cuda &c = r->cuda;
    uint32_t count[1] = {rows};
    std::vector<uint32_t> logit_row;
    for (uint32_t i = 0; i < rows; i++)
        logit_row.push_back(r->logit_row[i] % ROWS_MAX);
    cuda_memory_to_device(c.base, start.data(), start.size() * sizeof(float));
    c.step.logit_row = cuda_memory_copy(logit_row.data(), rows);
    c.step.row_count = cuda_memory_copy(count, 1);
    c.step.rows = c.step.logit_rows = rows;
    CHECK_EQ(op.launch(&c), 0);
    cuda_memory_sync(op.name);
    uint64_t width = row_width(r, op.output);
    return cuda_memory_read(c.base + c.space.*op.output, rows * width);
}

static std::vector<float> run_reference(rig *r, const op_case &op, uint32_t rows,
                                        const std::vector<float> &start)
{
    std::vector<float> buffer = start;
    r->twin.buffer = buffer.data();
    r->twin.rows = r->twin.logit_rows = rows;
    op.reference(r);
    uint64_t width = row_width(r, op.output);
    const float *from = buffer.data() + r->cuda.space.*op.output;
    return std::vector<float>(from, from + rows * width);
}

// Errors are measured against the largest value of the output: sums of random signs have elements near zero.
static void compare(const std::string &what, const std::vector<float> &got, const std::vector<float> &want,
                    double tolerance)
{
    double largest = 0, worst = 0;
    for (float v : want)
        if (isfinite(v))
            largest = std::max(largest, fabs((double)v));
    uint64_t unlike = 0;
    for (size_t i = 0; i < want.size(); i++) {
        if (isnan(want[i]) || isnan(got[i]))
            unlike += isnan(want[i]) != isnan(got[i]);
        else
            worst = std::max(worst, fabs((double)got[i] - (double)want[i]));
    }
    test_checks_++;
    if (worst <= tolerance * largest && !unlike && largest > 0)
        return;
    test_failures_++;
    fprintf(stderr, "%s: error %.3g of %.3g, %llu elements are NaN in one alone\n", what.c_str(), worst,
            largest, (unsigned long long)unlike);
}

static std::string label(const shape &s, const op_case &op, uint32_t rows)
{
    return std::string(s.name) + ", " + op.name + ", " + std::to_string(rows) + " rows";
}

TEST(ops_agree_with_the_reference)
{
    for (const shape &s : SHAPES) {
        rig r;
        rig_open(&r, s);
        for (const op_case &op : OPS) {
            if (op.streams_only && s.streams == 1)
                continue;
            for (uint32_t rows : {1u, 2u, 3u, 8u, 16u, 17u, 64u, 130u}) {
                if (rows > 17 && s.multiprocessors != 2)
                    continue; // the emulator is slow
                bool exact = op.launch == launch_embed;
                compare(label(s, op, rows), run_device(&r, op, rows, r.start),
                        run_reference(&r, op, rows, r.start),
                        exact                         ? 1e-6
                        : rows <= FT_CUDA_DECODE_ROWS ? 3e-6
                                                      : 1e-3); // f16 operands
            }
        }
    }
}

TEST(a_decode_row_has_the_same_bits_alone_and_in_company)
{
    for (const shape &s : SHAPES) {
        rig r;
        rig_open(&r, s);
        for (const op_case &op : OPS) {
            if (op.streams_only && s.streams == 1)
                continue;
            std::vector<float> all = run_device(&r, op, 16, r.start);
            for (uint32_t rows : {1u, 5u, 9u}) {
                std::vector<float> some = run_device(&r, op, rows, r.start);
                test_checks_++;
                if (memcmp(some.data(), all.data(), some.size() * sizeof(float))) {
                    test_failures_++;
                    fprintf(stderr, "%s: other bits than among 16\n", label(s, op, rows).c_str());
                }
            }
        }
    }
}

TEST(a_row_that_is_not_a_number_spoils_itself_alone)
{
    for (const shape &s : SHAPES) {
        rig r;
        rig_open(&r, s);
        for (uint32_t rows : {3u, 17u}) {
            if (rows == 17 && s.multiprocessors != 2)
                continue;
            for (const op_case &op : OPS) {
                if (op.launch == launch_embed || op.streams_only)
                    continue;
                const ft_workspace &space = r.cuda.space;
                std::vector<float> start = r.start;
                bool mix =
                    op.launch == launch_mix || op.launch == launch_mix_mlp || op.launch == launch_mix_head;
                uint64_t wide = (uint64_t)s.streams * s.hidden;
                if (mix)
                    start[space.residual + (op.launch == launch_mix_head ? r.logit_row[1] : 1) * wide + 5] =
                        NAN;
                else
                    start[space.x + s.hidden + 5] = start[space.head_x + s.hidden + 5] =
                        start[space.attention + space.attention_width + 5] = NAN;
                std::vector<float> got = run_device(&r, op, rows, start),
                                   clean = run_device(&r, op, rows, r.start);
                std::vector<float> want = run_reference(&r, op, rows, start);
                compare(label(s, op, rows) + ", NaN", got, want,
                        rows <= FT_CUDA_DECODE_ROWS ? 3e-6 : 1e-3); // f16 operands
                uint64_t width = row_width(&r, op.output);
                CHECK(!memcmp(got.data(), clean.data(), width * sizeof(float)));
                CHECK(!memcmp(got.data() + 2 * width, clean.data() + 2 * width, width * sizeof(float)));
                CHECK(isnan(got[width]));
            }
        }
    }
}

// NaN among the weights and scales, infinity among the activations.
TEST(weights_that_are_not_numbers_show)
{
    shape s = SHAPES[0];
    rig r;
    rig_open(&r, s);
    for (ft_format format :
         {FT_FORMAT_F32, FT_FORMAT_BF16, FT_FORMAT_FP8_BLOCK, FT_FORMAT_NVFP4, FT_FORMAT_MXFP4}) {
        ft_matrix host, device;
        make_matrix(&r.memory, format, 24, 256, 128, &host, &device);
        char *data = (char *)host.data, *scale = (char *)host.scale;
        uint32_t bytes = format == FT_FORMAT_F32 ? 4 : format == FT_FORMAT_BF16 ? 2 : 1;
        if (format == FT_FORMAT_NVFP4)
            scale[9 * 16 + 3] = 0x7f;
        else if (format == FT_FORMAT_MXFP4)
            scale[9 * 8 + 3] = (char)0xff;
        else
            memset(data + (9 * 256 + 77) * bytes, 0x7f, bytes); // 0x7f7f.. is a number in f32 and bf16
        if (format == FT_FORMAT_F32 || format == FT_FORMAT_BF16)
            data[(9 * 256 + 77) * bytes + bytes - 2] = (char)0xff;
        uint64_t data_bytes, scale_bytes;
        ft_matrix_bytes(format, 24, 256, host.block_out, host.block_in, &data_bytes, &scale_bytes);
        device.data = cuda_memory_copy(data, data_bytes);
        device.scale = scale ? cuda_memory_copy(scale, scale_bytes) : NULL;
        std::vector<float> x(2 * 256, 0.5f);
        ft_cuda_segment segment = {&device, NULL};
        float *y = cuda_memory_alloc<float>(48);
        CHECK_EQ(ft_cuda_project(&r.cuda, &segment, 1, cuda_memory_copy(x.data(), x.size()), 256, 2, y, 24,
                                 NULL, NULL),
                 0);
        cuda_memory_sync("project");
        std::vector<float> got = cuda_memory_read(y, 48);
        for (uint32_t i = 0; i < 48; i++)
            CHECK(isnan(got[i]) == (i % 24 == 9));
        x[3] = INFINITY;
        CHECK_EQ(ft_cuda_project(&r.cuda, &segment, 1, cuda_memory_copy(x.data(), x.size()), 256, 2, y, 24,
                                 NULL, NULL),
                 0);
        cuda_memory_sync("project");
        got = cuda_memory_read(y, 48);
        for (uint32_t i = 0; i < 24; i++)
            CHECK(!isfinite(got[i]) && isfinite(got[24 + i]) == (i != 9));
    }
}

// Depth 3 of the convolution's tail: the last inputs of the step, behind what is left of those before.
TEST(the_convolutions_tail_moves_on_with_the_out_projection)
{
    rig r;
    rig_open(&r, SHAPES[0]);
    uint32_t channels = ft_model_conv_channels(&r.model), depth = r.model.conv_taps - 1;
    for (uint32_t rows : {1u, 2u, 17u}) {
        std::vector<float> state(r.cuda.state.count);
        for (float &v : state)
            v = random_float();
        float *device = cuda_memory_copy(state.data(), state.size());
        r.cuda.step.state = cuda_memory_copy(&device, 1);
        run_device(&r, OPS[10], rows, r.start);
        std::vector<float> got = cuda_memory_read(device, state.size());
        uint64_t at = r.cuda.state.conv_offset[0];
        const float *project = r.start.data() + r.cuda.space.project;
        bool same = true;
        for (uint32_t j = 0; j < depth; j++)
            for (uint32_t c = 0; c < channels; c++) {
                uint32_t from = rows + j;
                float want = from < depth
                                 ? state[at + from * channels + c]
                                 : project[(uint64_t)(from - depth) * r.cuda.space.project_width + c];
                same = same && got[at + j * channels + c] == want;
            }
        CHECK(same);
    }
}

int main(int argc, char **argv)
{
    if (!cuda_memory_available()) {
        printf("skipped: no GPU\n");
        return 77;
    }
    RUN(ops_agree_with_the_reference)
    RUN(a_decode_row_has_the_same_bits_alone_and_in_company)
    RUN(a_row_that_is_not_a_number_spoils_itself_alone)
    RUN(weights_that_are_not_numbers_show)
    RUN(the_convolutions_tail_moves_on_with_the_out_projection)
    printf("%d checks, %d failed\n", test_checks_, test_failures_);
    return test_failures_ || !test_checks_ ? 1 : 0;
}
