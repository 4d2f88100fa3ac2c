// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels of linear attention, softmax attention and per-layer embeddings against jobs/execute*.c
// with the reference kernels, on the same buffers: every launcher over a table of shapes and batches. Runs
// emulated, or on a GPU.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

extern "C" {
#include "tests/cuda_twin_attention.h"
}
#include "kernels_cuda/attention.cuh"
#include "kernels_cuda/kernels_cuda.h"
#include "kernels_cuda/linear.cuh"
#include "tests/cuda_memory.h"

static int checks, failures;
static const char *at_case = "";
#define CHECK(condition, ...)                                                                                \
    do {                                                                                                     \
        checks++;                                                                                            \
        if (!(condition)) {                                                                                  \
            failures++;                                                                                      \
            fprintf(stderr, "%s:%d: [%s] %s: ", __FILE__, __LINE__, at_case, #condition);                    \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fprintf(stderr, "\n");                                                                           \
        }                                                                                                    \
    } while (0)

static std::mt19937 random_bits(20260);

static void fill(float *to, size_t count, float scale)
{
    std::normal_distribution<float> normal(0.0f, scale);
    for (size_t i = 0; i < count; i++)
        to[i] = normal(random_bits);
}

// Largest difference, relative to the largest reference; NaN in either counts as infinite.
static double difference(const float *a, const float *reference, size_t count)
{
    double worst = 0, top = 1e-30;
    for (size_t i = 0; i < count; i++) {
        double d = std::fabs((double)a[i] - (double)reference[i]);
        if (!(d <= worst))
            worst = std::isnan(d) ? INFINITY : d;
        top = std::fmax(top, std::fabs((double)reference[i]));
    }
    return worst / top;
}

struct part {
    uint32_t position, rows; // of one sequence
};

// A model of one layer, its weights, a batch, and everything twice: host (the twin's) and device.
struct world {
    ft_model model{};
    ft_weights weights{}, device_weights{};
    ft_layer_weights layer{}, device_layer{};
    ft_workspace space{};
    ft_state_layout state_layout{};
    ft_kv_layout kv{};
    std::vector<float> buffer;
    std::vector<double> frequencies;
    double rotary_scale = 1.25;
    std::vector<part> parts;
    std::vector<uint32_t> first_row, row_count, position, row_position, row_sequence;
    std::vector<std::vector<float>> state, page;
    std::vector<float *> state_at, page_at, device_state, device_page;
    std::vector<std::vector<float>> vectors; // storage of weights
    uint32_t rows = 0, pages_max = 0, tokens_max = 0;
    cuda_twin twin{};
    ft_cuda cuda{};

    // Storage of a weight vector.
    const float *host_vector(size_t count, float scale)
    {
        vectors.emplace_back(count);
        fill(vectors.back().data(), count, scale);
        return vectors.back().data();
    }

    void batch(const std::vector<part> &list)
    {
        parts = list;
        for (const part &p : parts) {
            first_row.push_back(rows);
            row_count.push_back(p.rows);
            position.push_back(p.position);
            for (uint32_t i = 0; i < p.rows; i++) {
                row_position.push_back(p.position + i);
                row_sequence.push_back((uint32_t)row_count.size() - 1);
            }
            rows += p.rows;
            tokens_max = std::max(tokens_max, p.position + p.rows);
        }
    }

    // After model and batch: buffers, states and pages with random contents, NaN where nothing has been
    // written yet.
    void build()
    {
        uint32_t sequences = (uint32_t)parts.size();
        ft_workspace_init(&space, &model, rows + 3, sequences, sequences);
        ft_state_layout_init(&state_layout, &model);
        ft_kv_layout_init(&kv, &model);
        buffer.resize(space.count);
        fill(buffer.data(), buffer.size(), 1.0f);
        frequencies.resize(model.rotary_dim / 2 + 1);
        for (uint32_t i = 0; i < model.rotary_dim / 2; i++)
            frequencies[i] = std::pow(1e4, -2.0 * i / model.rotary_dim);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t i = 0; i < model.rotary_dim / 2; i++) {
                float *rotary = buffer.data() + space.rotary + (uint64_t)r * model.rotary_dim;
                rotary[i] = (float)(std::cos(row_position[r] * frequencies[i]) * rotary_scale);
                rotary[model.rotary_dim / 2 + i] =
                    (float)(std::sin(row_position[r] * frequencies[i]) * rotary_scale);
            }
        pages_max = (uint32_t)ft_div_up(tokens_max, kv.page_tokens) + 1;
        for (uint32_t s = 0; s < sequences; s++) {
            state.emplace_back(state_layout.count);
            fill(state.back().data(), state_layout.count, 0.5f);
            for (uint32_t p = 0; p < pages_max; p++) {
                page.emplace_back(kv.count);
                std::vector<float> &to = page.back();
                fill(to.data(), to.size(), 1.0f);
                if (model.layers[0].attention == FT_ATTENTION_LINEAR)
                    continue;
                uint32_t end = parts[s].position + parts[s].rows;
                for (uint32_t h = 0; h < model.kv_head_count; h++)
                    for (uint32_t t = 0; t < kv.page_tokens; t++)
                        if (p * kv.page_tokens + t >= end)
                            for (uint32_t i = 0; i < model.head_dim; i++) {
                                uint64_t at = ((uint64_t)h * kv.page_tokens + t) * model.head_dim + i;
                                to[kv.k_offset[0] + at] = to[kv.v_offset[0] + at] = NAN;
                            }
            }
        }
        for (auto &s : state)
            state_at.push_back(s.data());
        for (auto &p : page)
            page_at.push_back(p.data());
        weights.layers = &layer;
        twin = {&model,
                &weights,
                space,
                buffer.data(),
                frequencies.data(),
                rotary_scale,
                rows,
                sequences,
                tokens_max,
                first_row.data(),
                row_count.data(),
                position.data(),
                state_at.data(),
                page_at.data(),
                pages_max};
    }

    static const float *copy_vector(const float *host, size_t count)
    {
        return host ? cuda_memory_copy(host, count) : nullptr;
    }

    // The device's side as the host's is now.
    void to_device()
    {
        uint32_t sequences = (uint32_t)parts.size();
        const ft_model &m = model;
        device_layer = layer;
        ft_attention_weights &a = device_layer.attention;
        a.q_norm = copy_vector(a.q_norm, m.head_dim);
        a.k_norm = copy_vector(a.k_norm, m.head_dim);
        a.sinks = copy_vector(a.sinks, m.head_count);
        a.index_q_norm = copy_vector(a.index_q_norm, m.indexer_dim);
        a.index_k_norm = copy_vector(a.index_k_norm, m.indexer_dim);
        ft_linear_weights &l = device_layer.linear;
        l.conv = copy_vector(l.conv, (size_t)ft_model_conv_channels(&m) * m.conv_taps);
        l.a_log = copy_vector(l.a_log, m.value_head_count);
        l.dt_bias = copy_vector(l.dt_bias, m.value_head_count);
        l.norm = copy_vector(l.norm, m.value_dim);
        ft_ple_weights &p = device_layer.ple;
        size_t wide = (size_t)m.hc_count * m.hidden;
        p.norm_key = copy_vector(p.norm_key, wide);
        p.norm_query = copy_vector(p.norm_query, wide);
        p.norm_conv = copy_vector(p.norm_conv, wide);
        p.conv = copy_vector(p.conv, wide * m.ple_taps);
        for (ft_matrix *matrix : {&p.key, &p.value})
            if (matrix->data)
                matrix->data =
                    cuda_memory_copy((const float *)matrix->data, (size_t)matrix->out * matrix->in);
        device_weights.layers = &device_layer;
        device_state.clear();
        device_page.clear();
        for (auto &s : state)
            device_state.push_back(cuda_memory_copy(s.data(), s.size()));
        for (auto &g : page)
            device_page.push_back(cuda_memory_copy(g.data(), g.size()));
        cuda = {};
        cuda.model = &model;
        cuda.weights = &device_weights;
        cuda.space = space;
        cuda.base = cuda_memory_copy(buffer.data(), buffer.size());
        cuda.state = state_layout;
        cuda.kv = kv;
        cuda.frequencies = cuda_memory_copy(frequencies.data(), frequencies.size());
        cuda.rotary_scale = (float)rotary_scale;
        cuda.step.rows = rows;
        cuda.step.sequences = sequences;
        cuda.step.position = cuda_memory_copy(row_position.data(), rows);
        cuda.step.row_sequence = cuda_memory_copy(row_sequence.data(), rows);
        cuda.step.first_row = cuda_memory_copy(first_row.data(), sequences);
        cuda.step.row_count = cuda_memory_copy(row_count.data(), sequences);
        cuda.step.state = cuda_memory_copy(device_state.data(), device_state.size());
        cuda.step.page = cuda_memory_copy(device_page.data(), device_page.size());
        cuda.step.pages_max = pages_max;
        std::vector<uint32_t> zero(64, 0);
        cuda.exchange.counters = cuda_memory_copy(zero.data(), zero.size());
        cuda.multiprocessors = 132;
        cuda.scratch_bytes = std::max(ft_cuda_attention_scratch_bytes(&model, rows, tokens_max),
                                      model.ple_count ? ft_cuda_scratch_bytes(&model, rows) : 0);
        cuda.scratch = cuda_memory_alloc<char>(cuda.scratch_bytes + 1);
        std::vector<char> dirt(cuda.scratch_bytes + 1, (char)0xff); // NaN: nobody may read what nobody wrote
        cuda_memory_to_device(cuda.scratch, dirt.data(), dirt.size());
    }

    std::vector<float> device_buffer() const
    {
        return cuda_memory_read(cuda.base, buffer.size());
    }

    void check_rows(const std::vector<float> &device, uint64_t offset, uint64_t stride, uint64_t width,
                    double bound, const char *what) const
    {
        double worst = 0;
        for (uint32_t r = 0; r < rows; r++)
            worst = std::fmax(worst, difference(device.data() + offset + r * stride,
                                                buffer.data() + offset + r * stride, width));
        CHECK(worst <= bound, "%s: %g, at most %g", what, worst, bound);
    }

    void check_state(uint64_t offset, uint64_t count, double bound, const char *what) const
    {
        for (size_t s = 0; s < state.size(); s++) {
            std::vector<float> device = cuda_memory_read(device_state[s] + offset, count);
            double d = difference(device.data(), state[s].data() + offset, count);
            CHECK(d <= bound, "%s of sequence %zu: %g, at most %g", what, s, d, bound);
        }
    }

    void check_counters() const
    {
        for (uint32_t v : cuda_memory_read(cuda.exchange.counters, 64))
            CHECK(v == 0, "counter left at %u", v);
    }
};

static void run(int status, const char *what)
{
    CHECK(status == 0, "%s returned %d", what, status);
    cuda_memory_sync(what);
}

typedef std::vector<part> batch;
static const batch decode_1 = {{37, 1}}, decode_2 = {{0, 1}, {129, 1}}, decode_3 = {{5, 1}, {63, 1}, {64, 1}};
static batch decode_of(uint32_t count, uint32_t stride)
{
    batch list;
    for (uint32_t i = 0; i < count; i++)
        list.push_back({i * stride + i % 3, 1});
    return list;
}

// ---- linear attention ----

struct linear_shape {
    uint32_t key_heads, value_heads, key_dim, value_dim, taps;
};

static void set_linear(world &w, const linear_shape &shape)
{
    ft_model &m = w.model;
    m.layer_count = 1;
    m.hidden = 32;
    m.hc_count = 1;
    m.rms_eps = 1e-6f;
    m.layers[0].attention = FT_ATTENTION_LINEAR;
    m.layers[0].ple = FT_PLE_NONE;
    m.key_head_count = shape.key_heads;
    m.value_head_count = shape.value_heads;
    m.key_dim = shape.key_dim;
    m.value_dim = shape.value_dim;
    m.conv_taps = shape.taps;
    m.output_gate = shape.taps == 4 ? FT_ACTIVATION_SIGMOID : FT_ACTIVATION_SILU;
    w.layer.linear.conv = w.host_vector((size_t)ft_model_conv_channels(&m) * shape.taps, 0.6f);
    w.layer.linear.a_log = w.host_vector(shape.value_heads, 0.5f);
    w.layer.linear.dt_bias = w.host_vector(shape.value_heads, 0.5f);
    w.layer.linear.norm = w.host_vector(shape.value_dim, 0.5f);
}

static double sigmoid(double x)
{
    return 1 / (1 + std::exp(-x));
}

// o, with norm and gate where they are the delta rule's, in double, from the twin's convolved rows; the state
// must still be the old one.
static std::vector<double> outputs(const world &w)
{
    const ft_model &m = w.model;
    uint32_t dk = m.key_dim, dv = m.value_dim, heads = m.value_head_count,
             channels = ft_model_conv_channels(&m);
    std::vector<double> out((size_t)w.rows * heads * dv);
    for (size_t s = 0; s < w.parts.size(); s++)
        for (uint32_t head = 0; head < heads; head++) {
            const float *from = w.state[s].data() + w.state_layout.delta_offset[0] + (size_t)head * dk * dv;
            std::vector<double> state(from, from + (size_t)dk * dv);
            for (uint32_t r = w.first_row[s]; r < w.first_row[s] + w.row_count[s]; r++) {
                const float *conv = w.buffer.data() + w.space.conv + (uint64_t)r * channels;
                const float *project =
                    w.buffer.data() + w.space.project + (uint64_t)r * w.space.project_width;
                const float *q = conv + head / (heads / m.key_head_count) * dk,
                            *k = q + m.key_head_count * dk;
                const float *v = conv + 2 * m.key_head_count * dk + head * dv;
                double qq = 1e-6, kk = 1e-6;
                for (uint32_t i = 0; i < dk; i++) {
                    qq += (double)q[i] * q[i];
                    kk += (double)k[i] * k[i];
                }
                double b = project[channels + heads * dv + head],
                       a = project[channels + heads * dv + heads + head];
                double beta = sigmoid(b);
                double decay = std::exp(-std::exp((double)w.layer.linear.a_log[head]) *
                                        std::log1p(std::exp(a + w.layer.linear.dt_bias[head])));
                for (uint32_t j = 0; j < dv; j++) {
                    double prediction = 0, sum = 0;
                    for (uint32_t i = 0; i < dk; i++)
                        prediction += (state[i * dv + j] *= decay) * k[i] / std::sqrt(kk);
                    for (uint32_t i = 0; i < dk; i++) {
                        state[i * dv + j] += k[i] / std::sqrt(kk) * beta * (v[j] - prediction);
                        sum += state[i * dv + j] * q[i] / std::sqrt(qq * dk);
                    }
                    out[((size_t)r * heads + head) * dv + j] = sum;
                }
                double *o = out.data() + ((size_t)r * heads + head) * dv, square = 0;
                const float *z = project + channels + (size_t)head * dv;
                for (uint32_t j = 0; j < dv; j++)
                    square += o[j] * o[j];
                for (uint32_t j = 0; j < dv; j++)
                    o[j] *= 1 / std::sqrt(square / dv + m.rms_eps) * w.layer.linear.norm[j] * sigmoid(z[j]) *
                            (m.output_gate == FT_ACTIVATION_SILU ? z[j] : 1);
            }
        }
    return out;
}

static void linear_attention_equals_the_cpu(const char *name, const linear_shape &shape, const batch &list)
{
    at_case = name;
    world w;
    set_linear(w, shape);
    w.batch(list);
    w.build();
    for (uint32_t r = 0; r < w.rows; r++) // one gate beyond the range where exp overflows
        w.buffer[w.space.project + (uint64_t)r * w.space.project_width + w.space.project_width - 1] =
            r % 2 ? 95.0f : -95.0f;
    w.to_device();
    run(ft_cuda_linear_attention(&w.cuda, 0, nullptr), "linear_attention");
    run(ft_cuda_linear_tail(&w.cuda, 0, nullptr), "linear_tail");
    cuda_twin_run(&w.twin, FT_OP_LINEAR_CONV, 0);
    std::vector<double> expected = outputs(w);
    std::vector<float> device = w.device_buffer();
    uint64_t width = (uint64_t)shape.value_heads * shape.value_dim;
    for (uint32_t r = 0; r < w.rows; r++) {
        std::vector<float> reference(expected.begin() + r * width, expected.begin() + (r + 1) * width);
        double d = difference(device.data() + w.space.attention + r * w.space.attention_width,
                              reference.data(), width);
        CHECK(d <= 2e-5, "o of row %u: %g", r, d);
    }
    cuda_twin_run(&w.twin, FT_OP_LINEAR_DELTA, 0);
    uint64_t state = (uint64_t)shape.value_heads * shape.key_dim * shape.value_dim;
    w.check_state(w.state_layout.delta_offset[0], state, 2e-5, "S");
    w.check_state(w.state_layout.conv_offset[0],
                  (uint64_t)(shape.taps - 1) * ft_model_conv_channels(&w.model), 0, "tail");
    cuda_memory_free_all();
}

static void linear_attention_of_every_shape()
{
    const linear_shape main = {2, 6, 128, 128, 4}, small = {2, 4, 32, 32, 4}, odd = {3, 3, 20, 36, 3},
                       wide = {1, 2, 256, 64, 2}, middle = {2, 2, 64, 64, 4}, sliced = {1, 3, 64, 160, 6};
    linear_attention_equals_the_cpu("linear, 1 row", main, decode_1);
    linear_attention_equals_the_cpu("linear, 3 sequences", main, decode_3);
    linear_attention_equals_the_cpu("linear, 16 sequences", small, decode_of(16, 7));
    linear_attention_equals_the_cpu("linear, chunk of 2 and of 9 within a decode batch", small,
                                    {{4, 2}, {0, 9}});
    linear_attention_equals_the_cpu("linear, odd sizes", odd, decode_of(8, 3));
    linear_attention_equals_the_cpu("linear, key heads of 256", wide, decode_2);
    linear_attention_equals_the_cpu("linear, heads wider than a block, 6 taps", sliced, {{3, 1}, {0, 8}});
    linear_attention_equals_the_cpu("linear, prefill of 17", main, {{0, 17}});
    linear_attention_equals_the_cpu("linear, prefill of 64", middle, {{11, 64}});
    linear_attention_equals_the_cpu("linear, mixed step", small, {{3, 1}, {9, 20}, {70, 1}, {0, 2}});
    linear_attention_equals_the_cpu("linear, odd sizes, prefill", odd, {{3, 19}, {9, 1}});
    linear_attention_equals_the_cpu("linear, key heads of 256, prefill", wide, {{3, 18}});
}

// ---- softmax attention ----

struct attention_shape {
    enum ft_attention kind;
    uint32_t heads, kv_heads, dim, rotary;
    bool gate, norm, plus_one, sinks;
    uint32_t window, index_heads, index_dim, budget, ratio;
};

static void set_attention(world &w, const attention_shape &shape)
{
    ft_model &m = w.model;
    m.layer_count = 1;
    m.hidden = 32;
    m.hc_count = 1;
    m.rms_eps = 1e-6f;
    m.layers[0].attention = (uint8_t)shape.kind;
    m.layers[0].ple = FT_PLE_NONE;
    m.head_count = shape.heads;
    m.kv_head_count = shape.kv_heads;
    m.head_dim = shape.dim;
    m.rotary_dim = shape.rotary;
    m.attention_gate = shape.gate;
    m.norm_plus_one = shape.plus_one;
    m.window = shape.window;
    m.indexer_head_count = shape.index_heads;
    m.indexer_dim = shape.index_dim;
    m.indexer_budget = shape.budget;
    m.indexer_ratio = shape.ratio;
    ft_attention_weights &a = w.layer.attention;
    if (shape.norm) {
        a.q_norm = w.host_vector(shape.dim, 0.4f);
        a.k_norm = w.host_vector(shape.dim, 0.4f);
    }
    if (shape.sinks)
        a.sinks = w.host_vector(shape.heads, 2.0f);
    if (shape.kind == FT_ATTENTION_SPARSE) {
        a.index_q_norm = w.host_vector(shape.index_dim, 0.4f);
        a.index_k_norm = w.host_vector(shape.index_dim, 0.4f);
    }
}

static void preparation_equals_the_cpu(world &w, const attention_shape &shape)
{
    w.to_device();
    run(ft_cuda_attention_prepare(&w.cuda, 0, nullptr), "attention_prepare");
    cuda_twin_run(&w.twin, FT_OP_ATTN_PREPARE, 0);
    std::vector<float> device = w.device_buffer();
    uint64_t width = (uint64_t)shape.heads * shape.dim;
    w.check_rows(device, w.space.query, width, width, 2e-6, "query");
    w.check_rows(device, w.space.project, w.space.project_width, w.space.project_width, 2e-6,
                 "project (indexer queries)");
    for (size_t s = 0; s < w.parts.size(); s++)
        for (uint32_t p = 0; p < w.pages_max; p++) {
            std::vector<float> host = w.page[s * w.pages_max + p];
            std::vector<float> mine = cuda_memory_read(w.device_page[s * w.pages_max + p], host.size());
            for (size_t i = 0; i < host.size(); i++)
                if (std::isnan(host[i]) && std::isnan(mine[i])) // never written on either side
                    host[i] = mine[i] = 0;
            double d = difference(mine.data(), host.data(), host.size());
            CHECK(d <= 2e-6, "page %u of sequence %zu: %g", p, s, d);
        }
    if (shape.kind == FT_ATTENTION_SPARSE)
        w.check_state(w.state_layout.indexer_offset[0], (uint64_t)shape.ratio * shape.index_dim, 0,
                      "raw indexer keys");
}

// Small whole numbers, so that sums are exact on both sides and many scores are equal, most often 0.
static void make_scores_exact(world &w, const attention_shape &shape)
{
    std::uniform_int_distribution<int> number(-1, 1);
    for (uint32_t r = 0; r < w.rows; r++) {
        float *index = w.buffer.data() + w.space.project + (uint64_t)r * w.space.project_width +
                       ft_qkv_parts_of(&w.model).index;
        for (uint32_t i = 0; i < shape.index_heads * shape.index_dim; i++)
            index[i] = (float)number(random_bits) * (i % 5 == 0 ? 1.0f : 0.0f);
    }
    for (auto &page : w.page)
        for (uint32_t i = 0; i < w.kv.page_tokens / shape.ratio * shape.index_dim; i++)
            page[w.kv.indexer_offset[0] + i] = (float)number(random_bits);
}

static void attention_equals_the_cpu(const char *name, const attention_shape &shape, const batch &list)
{
    at_case = name;
    world w;
    set_attention(w, shape);
    w.batch(list);
    w.build();
    preparation_equals_the_cpu(w, shape);
    if (shape.kind == FT_ATTENTION_SPARSE)
        make_scores_exact(w, shape);
    w.to_device(); // the twin's prepared buffers: only this op's difference is measured
    run(ft_cuda_attention_select(&w.cuda, 0, w.tokens_max, nullptr), "attention_select");
    bool selected = ft_selects(&w.cuda, 0, w.tokens_max);
    if (shape.kind == FT_ATTENTION_SPARSE) {
        cuda_twin_run(&w.twin, FT_OP_ATTN_SELECT, 0);
        std::vector<float> device = w.device_buffer();
        for (uint32_t r = 0; selected && r < w.rows; r++) {
            const uint32_t *mine =
                (const uint32_t *)(device.data() + w.space.select) + r * (w.space.select_max + 1);
            const uint32_t *host =
                (const uint32_t *)(w.buffer.data() + w.space.select) + r * (w.space.select_max + 1);
            CHECK(mine[0] == host[0], "row %u selects %u, not %u", r, mine[0], host[0]);
            if (host[0] != FT_NONE)
                CHECK(!memcmp(mine, host, (host[0] + 1) * sizeof *host), "row %u selects other blocks", r);
        }
    }
    run(ft_cuda_attention(&w.cuda, 0, w.tokens_max, nullptr), "attention");
    cuda_twin_run(&w.twin, FT_OP_ATTN, 0);
    bool tiled = w.rows > FT_CUDA_DECODE_ROWS && ft_attention_tiled_takes(shape.dim) &&
                 (!selected || ft_attention_sparse_takes(shape.dim));
    w.check_rows(w.device_buffer(), w.space.attention, w.space.attention_width,
                 (uint64_t)shape.heads * shape.dim, tiled ? 2e-2 : 5e-6,
                 tiled ? "attention in tiles" : "attention");
    w.check_counters();
    cuda_memory_free_all();
}

static void attention_of_every_shape()
{
    const enum ft_attention full = FT_ATTENTION_FULL, sparse = FT_ATTENTION_SPARSE,
                            sliding = FT_ATTENTION_SLIDING;
    //                         kind  heads kv dim  rot gate   norm   plus   sinks  window index heads, dim,
    //                         budget, ratio
    const attention_shape main = {sparse, 24, 2, 256, 64, true, true, true, false, 0, 4, 128, 64, 4};
    const attention_shape plain = {full, 8, 4, 128, 128, false, true, false, false, 0, 0, 0, 0, 0};
    const attention_shape gated = {full, 3, 1, 256, 64, true, true, true, false, 0, 0, 0, 0, 0};
    const attention_shape single = {full, 2, 2, 64, 64, false, false, false, false, 0, 0, 0, 0, 0};
    const attention_shape sinks = {sliding, 8, 1, 64, 64, false, false, false, true, 40, 0, 0, 0, 0};
    const attention_shape sinks_full = {full, 8, 1, 64, 64, false, false, false, true, 0, 0, 0, 0, 0};
    const attention_shape tiny = {sparse, 4, 2, 32, 8, true, true, true, false, 0, 4, 32, 16, 4};
    const attention_shape blocks_of_6 = {sparse, 10, 2, 64, 32, true, true, true, false, 0, 3, 48, 36, 6};
    const attention_shape wide = {sparse, 34, 2, 128, 32, false, true, true, true, 0, 4, 128, 512, 4};
    const attention_shape group_5 = {full, 5, 1, 128, 32, true, false, false, false, 0, 0, 0, 0, 0};
    const attention_shape group_20 = {full, 20, 1, 32, 32, false, true, false, true, 0, 0, 0, 0, 0};
    attention_equals_the_cpu("sparse, below the budget", main, {{0, 1}, {50, 1}});
    attention_equals_the_cpu("sparse, around the budget", main,
                             {{62, 1}, {63, 1}, {66, 1}, {67, 1}, {68, 1}, {71, 1}});
    attention_equals_the_cpu("sparse, beyond the budget", main, {{300, 1}});
    attention_equals_the_cpu("sparse, thousands of blocks", tiny, {{17003, 1}, {17, 1}, {1500, 1}});
    attention_equals_the_cpu("sparse, 16 sequences", tiny, decode_of(16, 9));
    attention_equals_the_cpu("sparse, blocks of 6", blocks_of_6, decode_of(8, 11));
    attention_equals_the_cpu("sparse, short chunks cross blocks", blocks_of_6, {{4, 5}, {12, 6}, {35, 5}});
    attention_equals_the_cpu("sparse, prefill from 0", tiny, {{0, 40}});
    attention_equals_the_cpu("sparse, prefill within a block", tiny, {{29, 33}, {7, 1}, {90, 2}});
    attention_equals_the_cpu("sparse, prefill beyond the budget", main, {{70, 17}});
    attention_equals_the_cpu("sparse, prefill below the budget", main, {{2, 17}});
    attention_equals_the_cpu("sparse, prefill of several sequences", main, {{70, 13}, {2, 3}, {131, 2}});
    attention_equals_the_cpu("sparse, prefill, tokens of many tiles, 17 heads a group, sinks", wide,
                             {{700, 19}, {510, 9}});
    attention_equals_the_cpu("full, 1 row", plain, decode_1);
    attention_equals_the_cpu("full, 3 rows", gated, decode_3);
    attention_equals_the_cpu("full, 16 rows", plain, decode_of(16, 13));
    attention_equals_the_cpu("full, splits merged by the last block", single, {{1300, 1}, {70, 1}, {0, 1}});
    attention_equals_the_cpu("full, splits merged by a kernel", single, {{9300, 1}, {700, 1}});
    attention_equals_the_cpu("full, more counters than there are", plain, decode_of(16, 20));
    attention_equals_the_cpu("full, sinks, splits", sinks_full, {{200, 1}, {5, 1}});
    attention_equals_the_cpu("full, group of 5", group_5, decode_of(8, 21));
    attention_equals_the_cpu("full, group of 20", group_20, decode_2);
    attention_equals_the_cpu("sliding, sinks", sinks, decode_of(8, 12));
    attention_equals_the_cpu("full, prefill of 17", plain, {{0, 17}});
    attention_equals_the_cpu("full, prefill goes on at 33", gated, {{33, 64}});
    attention_equals_the_cpu("full, prefill of 70 with sinks", sinks_full, {{5, 70}});
    attention_equals_the_cpu("sliding, prefill", sinks, {{50, 64}});
    attention_equals_the_cpu("sliding, prefill of 130 from 0", sinks, {{0, 130}});
    attention_equals_the_cpu("mixed step", plain, {{90, 1}, {3, 20}, {64, 1}, {11, 3}, {0, 6}});
    attention_equals_the_cpu("mixed step, dims without tiles", group_20, {{90, 1}, {3, 20}});
}

// A row's bits are the same alone and among others, whatever the context bound of the launch.
static void a_row_does_not_depend_on_its_company(const char *name, const attention_shape &shape,
                                                 const batch &list)
{
    at_case = name;
    world w;
    set_attention(w, shape);
    w.batch(list);
    w.build();
    cuda_twin_run(&w.twin, FT_OP_ATTN_PREPARE, 0);
    w.to_device();
    run(ft_cuda_attention_select(&w.cuda, 0, w.tokens_max, nullptr), "attention_select");
    run(ft_cuda_attention(&w.cuda, 0, w.tokens_max, nullptr), "attention");
    std::vector<float> together = w.device_buffer();
    uint64_t stride = w.space.attention_width, bytes = (uint64_t)shape.heads * shape.dim * sizeof(float);
    for (uint32_t r = 0; r < w.rows; r++) {
        world one; // the same contents in row 0 of a batch of one
        one.model = w.model;
        one.layer = w.layer;
        one.batch({list[r]});
        one.build();
        one.state[0] = w.state[r];
        for (uint32_t p = 0; p < one.pages_max; p++)
            one.page[p] = w.page[(size_t)r * w.pages_max + p];
        memcpy(one.buffer.data() + one.space.query,
               w.buffer.data() + w.space.query + r * shape.heads * shape.dim, bytes);
        memcpy(one.buffer.data() + one.space.project,
               w.buffer.data() + w.space.project + r * w.space.project_width,
               w.space.project_width * sizeof(float));
        one.to_device();
        run(ft_cuda_attention_select(&one.cuda, 0, one.tokens_max, nullptr), "attention_select");
        run(ft_cuda_attention(&one.cuda, 0, one.tokens_max, nullptr), "attention");
        std::vector<float> alone = one.device_buffer();
        CHECK(!memcmp(alone.data() + one.space.attention, together.data() + w.space.attention + r * stride,
                      bytes),
              "row %u differs in a batch of %u", r, w.rows);
    }
    cuda_memory_free_all();
}

static void rows_do_not_depend_on_their_company()
{
    a_row_does_not_depend_on_its_company(
        "company, full", {FT_ATTENTION_FULL, 4, 2, 64, 64, false, true, false, true, 0, 0, 0, 0, 0},
        {{9300, 1}, {900, 1}, {130, 1}, {3, 1}});
    a_row_does_not_depend_on_its_company(
        "company, sparse", {FT_ATTENTION_SPARSE, 4, 2, 32, 8, true, true, true, false, 0, 4, 32, 64, 4},
        {{700, 1}, {69, 1}, {2, 1}});
}

// ---- per-layer embeddings ----

struct ple_shape {
    uint32_t streams, hidden, embed, taps, dilation;
};

#ifdef FT_CUDA_EMULATED
// Stands in for dense.cu's projection where that is not linked; f32 weights.
extern "C" __attribute__((weak)) int ft_cuda_project(const struct ft_cuda *,
                                                     const struct ft_cuda_segment *segments, uint32_t count,
                                                     const float *x, uint64_t x_stride, uint32_t rows,
                                                     float *y, uint64_t y_stride, uint64_t *, void *)
{
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t i = 0, at = 0; i < count; i++)
            for (uint32_t o = 0; o < segments[i].w->out; o++, at++) {
                double sum = 0;
                for (uint32_t j = 0; j < segments[i].w->in; j++)
                    sum += (double)((const float *)segments[i].w->data)[(size_t)o * segments[i].w->in + j] *
                           (double)x[r * x_stride + j];
                y[r * y_stride + at] = (float)sum;
            }
    return 0;
}
#endif

static void embeddings_equal_the_cpu(const char *name, const ple_shape &shape, const batch &list, bool wait)
{
    at_case = name;
    world w;
    ft_model &m = w.model;
    m.layer_count = 2;
    m.hidden = shape.hidden;
    m.hc_count = shape.streams;
    m.rms_eps = 1e-6f;
    m.norm_plus_one = true;
    m.layers[0].attention = m.layers[1].attention = FT_ATTENTION_LINEAR;
    m.layers[0].ple = 1; // of two tables: offsets of the second one
    m.layers[1].ple = FT_PLE_NONE;
    m.ple_count = 2;
    m.ple_embed_dim = shape.embed;
    m.ple_taps = shape.taps;
    m.ngram_size = shape.dilation;
    m.key_head_count = m.value_head_count = 1;
    m.key_dim = m.value_dim = 4;
    m.conv_taps = 2;
    size_t wide = (size_t)shape.streams * shape.hidden;
    ft_ple_weights &p = w.layer.ple;
    p.norm_key = w.host_vector(wide, 0.4f);
    p.norm_query = w.host_vector(wide, 0.4f);
    p.norm_conv = w.host_vector(wide, 0.4f);
    p.conv = w.host_vector(wide * shape.taps, 0.5f);
    p.key = {w.host_vector(wide * shape.embed, 0.2f),
             nullptr,
             (uint32_t)wide,
             shape.embed,
             FT_FORMAT_F32,
             1.0f,
             0,
             0};
    p.value = {w.host_vector((size_t)shape.hidden * shape.embed, 0.2f),
               nullptr,
               shape.hidden,
               shape.embed,
               FT_FORMAT_F32,
               1.0f,
               0,
               0};
    w.batch(list);
    w.build();
    for (size_t s = 0; s < list.size(); s++)
        if (list[s].position == 0)
            memset(w.state[s].data(), 0, w.state[s].size() * sizeof(float));
    w.to_device();
    uint32_t epoch = 7, rows_max = w.rows + 2;
    float *host_ple = (float *)cuda_memory_mapped_bytes(2ull * rows_max * shape.embed * sizeof(float));
    const float *e = w.buffer.data() + w.space.ple_e + (uint64_t)w.space.rows * shape.embed;
    memcpy(host_ple + (uint64_t)rows_max * shape.embed, e, (size_t)w.rows * shape.embed * sizeof(float));
    uint32_t *flags = (uint32_t *)cuda_memory_mapped_bytes(3 * FT_CUDA_FLAG_STRIDE * sizeof(uint32_t));
    memset(flags, 0, 3 * FT_CUDA_FLAG_STRIDE * sizeof(uint32_t));
    flags[FT_CUDA_FLAG_STRIDE] = wait ? epoch : 0;
    w.cuda.exchange.host_ple = host_ple;
    w.cuda.exchange.rows_max = rows_max;
    w.cuda.exchange.ple = flags;
    w.cuda.exchange.abort = flags + 2 * FT_CUDA_FLAG_STRIDE;
    w.cuda.step.epoch = cuda_memory_copy(&epoch, 1);
    std::vector<float> nothing((size_t)w.rows * shape.embed, NAN);
    cuda_memory_to_device(w.cuda.base + w.space.ple_e + (uint64_t)w.space.rows * shape.embed, nothing.data(),
                          nothing.size() * sizeof(float));
    run(ft_cuda_ple_arrive(&w.cuda, 1, wait, nullptr), "ple_arrive");
    std::vector<float> device = w.device_buffer();
    w.check_rows(device, w.space.ple_e + (uint64_t)w.space.rows * shape.embed, shape.embed, shape.embed, 0,
                 "ple_e");
    run(ft_cuda_ple_inject(&w.cuda, 0, nullptr), "ple_inject");
    cuda_twin_run(&w.twin, FT_OP_PLE_PROJECT, 0);
    cuda_twin_run(&w.twin, FT_OP_PLE_INJECT, 0);
#ifdef FT_CUDA_EMULATED
    const double bound = 2e-5;
#else // a GPU's projection of many rows multiplies bf16
    const double bound = w.rows > FT_CUDA_DECODE_ROWS ? 1e-2 : 2e-5;
#endif
    w.check_rows(w.device_buffer(), w.space.residual, wide, wide, bound, "residual");
    w.check_state(w.state_layout.ple_offset[1], (uint64_t)(shape.taps - 1) * shape.dilation * wide, bound,
                  "columns");
    cuda_memory_free_all();
}

static void embeddings_of_every_shape()
{
    const ple_shape main = {4, 128, 64, 4, 3}, odd = {2, 100, 36, 3, 2}, wide = {3, 300, 32, 2, 3};
    embeddings_equal_the_cpu("ple, start of a sequence", main, {{0, 1}}, true);
    embeddings_equal_the_cpu("ple, 3 sequences", main, decode_3, true);
    embeddings_equal_the_cpu("ple, 16 sequences", odd, decode_of(16, 3), true);
    embeddings_equal_the_cpu("ple, chunks within a decode batch", odd, {{0, 5}, {7, 2}}, true);
    embeddings_equal_the_cpu("ple, streams wider than a block", wide, decode_2, false);
    embeddings_equal_the_cpu("ple, prefill of 17 from 0", main, {{0, 17}}, false);
    embeddings_equal_the_cpu("ple, mixed step", odd, {{4, 1}, {9, 20}, {0, 2}, {3, 1}}, false);
}

int main(int argc, char **argv)
{
    if (!cuda_memory_available()) {
        printf("skipped: no GPU\n");
        return 77;
    }
    struct {
        const char *name;
        void (*test)();
    } tests[] = {{"linear_attention_of_every_shape", linear_attention_of_every_shape},
                 {"attention_of_every_shape", attention_of_every_shape},
                 {"rows_do_not_depend_on_their_company", rows_do_not_depend_on_their_company},
                 {"embeddings_of_every_shape", embeddings_of_every_shape}};
    for (auto &t : tests) {
        if (argc > 1 && !strstr(t.name, argv[1]))
            continue;
        int before = failures;
        t.test();
#ifdef FT_CUDA_EMULATED
        ft_emulated_reversed = true; // what depends on the order of blocks differs now
        t.test();
        ft_emulated_reversed = false;
#endif
        printf("%s %s\n", failures == before ? "ok  " : "FAIL", t.name);
        fflush(stdout);
    }
    printf("%d checks, %d failed\n", checks, failures);
    return failures || !checks ? 1 : 0;
}
