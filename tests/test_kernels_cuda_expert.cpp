// SPDX-License-Identifier: Apache-2.0
//
// Router, experts, combine and the exchange with the driver against the CPU's reference, over tables of
// shapes. Runs emulated, or on a GPU when nvcc compiles it.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

extern "C" {
#include "graph/graph.h"
#include "graph/workspace.h"
#include "kernels_cpu/kernels_cpu.h"
double ft_matrix_element(const struct ft_matrix *w, uint32_t o, uint32_t i);
}
#include "kernels_cuda/kernels_cuda.h"
#include "tests/cuda_memory.h"
#include "tests/test.h"

namespace
{

uint64_t random_state = 1;
uint32_t random_u32()
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}
float random_float()
{
    return (float)random_u32() * 0x1p-31f - 1.0f;
}
std::vector<float> random_floats(size_t n)
{
    std::vector<float> x(n);
    for (float &v : x)
        v = random_float();
    return x;
}

ft_kernels reference()
{
    ft_kernels kernels;
    ft_error err;
    CHECK_OK(ft_kernels_init(&kernels, "ref", &err), &err);
    return kernels;
}

bool close_enough(float got, double want, double tolerance)
{
    return std::isnan(want) ? std::isnan(got) : std::fabs((double)got - want) <= tolerance + 1e-37;
}
// Counts one check; prints the first few misses.
void check_close(float got, double want, double tolerance, const char *what, size_t at)
{
    test_checks_++;
    if (close_enough(got, want, tolerance))
        return;
    if (test_failures_++ < 20)
        fprintf(stderr, "%s [%zu]: got %.9g, wanted %.9g within %.3g\n", what, at, (double)got, want,
                tolerance);
}

// ---- weights ----

// Random codes without NaN, moderate scales, into memory that a view points to.
void fill_matrix(const ft_matrix *w)
{
    uint64_t data_bytes = 0, scale_bytes = 0;
    CHECK(ft_matrix_bytes(w->format, w->out, w->in, w->block_out, w->block_in, &data_bytes, &scale_bytes));
    uint8_t *data = (uint8_t *)const_cast<void *>(w->data), *scale = (uint8_t *)const_cast<void *>(w->scale);
    for (uint64_t i = 0; i < data_bytes; i++) {
        data[i] = (uint8_t)random_u32();
        if (w->format == FT_FORMAT_FP8_BLOCK && (data[i] & 127) == 127)
            data[i] = 1;
    }
    for (uint64_t i = 0; w->format == FT_FORMAT_BF16 && i < data_bytes / 2; i++)
        ((uint16_t *)(void *)data)[i] = ft_f32_to_bf16(random_float());
    for (uint64_t i = 0; w->format == FT_FORMAT_F32 && i < data_bytes / 4; i++)
        ((float *)(void *)data)[i] = random_float();
    for (uint64_t i = 0; w->format == FT_FORMAT_FP8_BLOCK && i < scale_bytes / 4; i++)
        ((float *)(void *)scale)[i] = random_float() * 0.01f;
    for (uint64_t i = 0; w->format != FT_FORMAT_FP8_BLOCK && i < scale_bytes; i++)
        scale[i] = (uint8_t)(w->format == FT_FORMAT_NVFP4 ? random_u32() % 80 : 122 + random_u32() % 6);
}

struct host_matrix {
    std::vector<char> data, scale;
    ft_matrix host, device;
};
// A dense matrix on both sides.
host_matrix make_matrix(ft_format format, uint32_t out, uint32_t in)
{
    host_matrix m;
    uint64_t data_bytes = 0, scale_bytes = 0;
    uint16_t block = format == FT_FORMAT_FP8_BLOCK ? 128 : 0;
    CHECK(ft_matrix_bytes(format, out, in, block, block, &data_bytes, &scale_bytes));
    m.data.resize(data_bytes + 64);
    m.scale.resize(scale_bytes + 64);
    m.host =
        ft_matrix{m.data.data(), scale_bytes ? m.scale.data() : nullptr, out, in, format, 1.0f, block, block};
    fill_matrix(&m.host);
    m.device = m.host;
    m.device.data = cuda_memory_copy(m.data.data(), m.data.size());
    if (scale_bytes)
        m.device.scale = cuda_memory_copy(m.scale.data(), m.scale.size());
    return m;
}

struct shape {
    ft_format format;
    uint32_t hidden, width;
    uint16_t block;
    bool bias;
    ft_activation activation;
    float limit;
    uint16_t block_out; // 0: as `block`
};

// ---- a layer on both sides ----

struct options {
    uint32_t rows = 1, experts = 8, topk = 2, shared = 0, streams = 1, layers = 2, layer = 1;
    bool renormalise = true, softmax_chosen = false, router_bias = false;
    ft_format dense = FT_FORMAT_BF16;
};

struct world {
    options o;
    shape s;
    ft_model model = {};
    ft_layer_weights layers[2] = {};
    ft_weights weights = {};
    ft_cuda c = {};
    ft_kernels ref = reference();
    host_matrix router, gate, up, down, shared_gate;
    std::vector<float> router_bias, x;
    std::vector<char> bank; // expert e at e * stride
    uint32_t epoch = 7;

    uint64_t stride() const
    {
        return weights.layers[o.layer].expert_layout.stride;
    }
    uint32_t pairs() const
    {
        return o.rows * o.topk;
    }
    ft_expert expert(uint32_t e) const
    {
        ft_expert view;
        ft_expert_view(&weights.layers[o.layer].expert_layout, bank.data() + e * stride(), &view);
        return view;
    }
    std::vector<float> read(uint64_t offset, size_t count) const
    {
        return cuda_memory_read(c.base + offset, count);
    }
    std::vector<uint32_t> read_u32(uint64_t offset, size_t count) const
    {
        return cuda_memory_read((const uint32_t *)(c.base + offset), count);
    }
    void write(uint64_t offset, const void *from, size_t bytes)
    {
        cuda_memory_to_device(c.base + offset, from, bytes);
    }
};

template <class T> T *mapped(size_t count)
{
    T *p = (T *)cuda_memory_mapped_bytes(count * sizeof(T));
    memset((void *)p, 0, count * sizeof(T));
    return p;
}
template <class T> T *zeros(size_t count)
{
    std::vector<T> none(count);
    return cuda_memory_copy(none.data(), count);
}

ft_cuda_list make_list(uint32_t groups, uint32_t pairs)
{
    ft_cuda_list list;
    list.group_count = zeros<uint32_t>(1);
    list.blob = zeros<const char *>(groups + 1);
    list.pair_begin = zeros<uint32_t>(groups + 2);
    list.pair_row = zeros<uint32_t>(pairs + 1);
    list.pair_out = zeros<uint32_t>(pairs + 1);
    list.groups_max = groups;
    list.pairs_max = pairs;
    return list;
}

void make_exchange(world *w)
{
    ft_cuda_exchange *x = &w->c.exchange;
    uint32_t layers = w->o.layers, pairs = w->pairs();
    x->routed = mapped<uint32_t>(layers * FT_CUDA_FLAG_STRIDE);
    x->fetched = mapped<uint32_t>(layers * FT_CUDA_FLAG_STRIDE);
    x->computed = mapped<uint32_t>(layers * FT_CUDA_FLAG_STRIDE);
    x->done = mapped<uint32_t>(1);
    x->abort = mapped<uint32_t>(1);
    x->ids = mapped<uint32_t>(layers * pairs);
    x->missing = mapped<uint32_t>(layers);
    x->host_x = mapped<float>((size_t)w->o.rows * w->s.hidden);
    x->host_y = mapped<float>((size_t)pairs * w->s.hidden);
    x->move_count = mapped<uint32_t>(layers);
    x->moves_max = 300;
    x->moves = mapped<ft_cuda_move>(layers * x->moves_max);
    x->rows_max = w->o.rows;
    std::vector<uint32_t> none(layers * w->o.experts, FT_NONE);
    x->slot_of = cuda_memory_copy(none.data(), none.size());
    x->slots = zeros<char>(64);
    x->slot_bytes = 64;
    x->on_cpu = zeros<uint32_t>(pairs);
    x->counters = zeros<uint32_t>(64);
    x->resident = make_list(std::min(pairs, w->o.experts), pairs);
    x->fetched_list = make_list(std::min(pairs, w->o.experts), pairs);
    *x->routed = *x->fetched = *x->computed = 0; // layer 0: must stay so
    w->c.step.failed = mapped<uint32_t>(w->o.rows);
    w->c.step.epoch = cuda_memory_copy(&w->epoch, 1);
}

void make_bank(world *w)
{
    ft_layer_weights *layer = &w->layers[w->o.layer];
    ft_error err;
    CHECK_OK(ft_expert_layout_init(&layer->expert_layout, w->s.format, w->s.hidden, w->s.width,
                                   w->s.block_out ? w->s.block_out : w->s.block, w->s.block, w->s.bias,
                                   w->s.activation, w->s.limit, &err),
             &err);
    w->bank.assign(w->stride() * w->o.experts, 0);
    const ft_expert_layout *l = &layer->expert_layout;
    for (uint32_t e = 0; e < w->o.experts; e++) {
        char *blob = w->bank.data() + e * w->stride();
        for (uint32_t i = 0; l->global_offset != FT_NONE && i < 3; i++)
            ((float *)(void *)(blob + l->global_offset))[i] = 0.02f + 0.1f * (float)i;
        for (uint32_t i = 0; l->has_bias && i < w->s.width; i++) {
            ((float *)(void *)(blob + l->gate_bias_offset))[i] = random_float();
            ((float *)(void *)(blob + l->up_bias_offset))[i] = random_float();
        }
        for (uint32_t i = 0; l->has_bias && i < w->s.hidden; i++)
            ((float *)(void *)(blob + l->down_bias_offset))[i] = random_float();
        ft_expert view = w->expert(e);
        fill_matrix(&view.gate);
        fill_matrix(&view.up);
        fill_matrix(&view.down);
    }
}

world *make_world(const shape &s, const options &o)
{
    world *w = new world;
    w->o = o;
    w->s = s;
    ft_model *m = &w->model;
    m->hidden = s.hidden;
    m->vocab = 16;
    m->layer_count = o.layers;
    m->expert_count = o.experts;
    m->topk = o.topk;
    m->expert_width = s.width;
    m->shared_width = o.shared;
    m->topk_renormalise = o.renormalise;
    m->router_softmax_chosen = o.softmax_chosen;
    m->hc_count = o.streams;
    m->hc_lowrank = o.streams > 1 ? 5 : 0;
    w->weights.layers = w->layers;
    make_bank(w);
    ft_layer_weights *layer = &w->layers[o.layer];
    w->router = make_matrix(o.dense, o.experts, s.hidden);
    layer->router = w->router.device;
    if (o.router_bias) {
        w->router_bias = random_floats(o.experts);
        layer->router_bias = cuda_memory_copy(w->router_bias.data(), o.experts);
    }
    if (o.shared) {
        w->gate = make_matrix(o.dense, o.shared, s.hidden);
        w->up = make_matrix(o.dense, o.shared, s.hidden);
        w->down = make_matrix(o.dense, s.hidden, o.shared);
        w->shared_gate = make_matrix(FT_FORMAT_BF16, 1, s.hidden);
        layer->shared.gate = w->gate.device;
        layer->shared.up = w->up.device;
        layer->shared.down = w->down.device;
        layer->shared_gate = w->shared_gate.device;
    }
    w->c.model = m;
    w->c.weights = &w->weights;
    ft_workspace_init(&w->c.space, m, o.rows, 1, 1);
    std::vector<float> poison(w->c.space.count + 64, NAN);
    w->c.base = cuda_memory_copy(poison.data(), poison.size());
    w->c.step.rows = o.rows;
    w->c.multiprocessors = 4;
    w->c.scratch_bytes = ft_cuda_scratch_bytes(m, o.rows);
    w->c.scratch = zeros<char>(w->c.scratch_bytes + 256);
    w->c.stamps = mapped<uint64_t>(o.layers * FT_CUDA_STAMP_LAYER_COUNT + FT_CUDA_STAMP_STEP_COUNT);
    w->x = random_floats((size_t)o.rows * s.hidden);
    w->write(w->c.space.x, w->x.data(), w->x.size() * 4);
    make_exchange(w);
    return w;
}

void end_world(world *w)
{
    delete w;
    cuda_memory_free_all();
}

// ---- lists, as the CPU makes them ----

struct host_list {
    std::vector<uint32_t> expert, pair_begin, pair_row, pair_out;
};
// Groups in the order of their first pair; pairs that `wanted` refuses are left out.
host_list group(const std::vector<uint32_t> &ids, uint32_t topk, const std::function<bool(uint32_t)> &wanted)
{
    host_list list;
    for (uint32_t p = 0; p < ids.size(); p++) {
        if (!wanted(p) || std::count(list.expert.begin(), list.expert.end(), ids[p]))
            continue;
        list.expert.push_back(ids[p]);
        list.pair_begin.push_back((uint32_t)list.pair_row.size());
        for (uint32_t q = p; q < ids.size(); q++)
            if (ids[q] == ids[p] && wanted(q)) {
                list.pair_row.push_back(q / topk);
                list.pair_out.push_back(q);
            }
    }
    list.pair_begin.push_back((uint32_t)list.pair_row.size());
    return list;
}

// The list on the device; experts lie in a bank there.
ft_cuda_list upload(const world *w, const host_list &list, uint32_t spare_groups)
{
    ft_cuda_list d = make_list((uint32_t)list.expert.size() + spare_groups, (uint32_t)list.pair_row.size());
    const char *bank = cuda_memory_copy(w->bank.data(), w->bank.size());
    uint32_t count = (uint32_t)list.expert.size();
    std::vector<const char *> blob;
    for (uint32_t e : list.expert)
        blob.push_back(bank + e * w->stride());
    cuda_memory_to_device(d.group_count, &count, 4);
    cuda_memory_to_device(d.blob, blob.data(), blob.size() * sizeof blob[0]);
    cuda_memory_to_device(d.pair_begin, list.pair_begin.data(), list.pair_begin.size() * 4);
    cuda_memory_to_device(d.pair_row, list.pair_row.data(), list.pair_row.size() * 4);
    cuda_memory_to_device(d.pair_out, list.pair_out.data(), list.pair_out.size() * 4);
    return d;
}

enum pattern { SAME, DISTINCT, RANDOM };
std::vector<uint32_t> make_ids(const world *w, pattern how)
{
    std::vector<uint32_t> ids;
    for (uint32_t r = 0; r < w->o.rows; r++)
        for (uint32_t j = 0; j < w->o.topk; j++) {
            uint32_t e = how == SAME ? j : (r * w->o.topk + j) % w->o.experts;
            while (how == RANDOM) { // uneven: low experts more often; no expert twice in a row
                e = random_u32() % (random_u32() % w->o.experts + 1);
                if (!std::count(ids.end() - j, ids.end(), e))
                    break;
            }
            ids.push_back(e);
        }
    return ids;
}

// ---- experts ----

// What f32 (or bf16) arithmetic of relative precision eps may make of one expert on one row.
struct bounds {
    std::vector<double> h_error, y_error;
    std::vector<float> h, y;
};
double magnitude(const ft_matrix *m, uint32_t o, const float *x, const std::vector<double> *error)
{
    double sum = 0;
    for (uint32_t i = 0; i < m->in; i++)
        sum += std::fabs(ft_matrix_element(m, o, i)) * (error ? (*error)[i] : std::fabs((double)x[i]));
    return sum;
}
bounds expert_bounds(const world *w, uint32_t e, const float *x, double eps)
{
    bounds b;
    ft_expert v = w->expert(e);
    b.h.resize(w->s.width);
    b.y.resize(w->s.hidden);
    ft_rows in = {x, nullptr, w->s.hidden, 1}, mid = {b.h.data(), nullptr, w->s.width, 1};
    w->ref.expert_up(&v, 0, w->s.width, in, b.h.data(), w->s.width);
    w->ref.expert_down(&v, 0, w->s.hidden, mid, nullptr, b.y.data(), w->s.hidden);
    std::vector<float> gate(w->s.width), up(w->s.width);
    w->ref.matmul(&v.gate, 0, w->s.width, in, v.gate_bias, gate.data(), w->s.width);
    w->ref.matmul(&v.up, 0, w->s.width, in, v.up_bias, up.data(), w->s.width);
    for (uint32_t i = 0; i < w->s.width; i++) {
        double g = eps * (magnitude(&v.gate, i, x, nullptr) + 1),
               u = eps * (magnitude(&v.up, i, x, nullptr) + 1);
        b.h_error.push_back(1.8 * g * (std::fabs((double)up[i]) + 1 + u) +
                            u * (std::fabs((double)gate[i]) + g) + 2 * eps * std::fabs((double)b.h[i]));
    }
    for (uint32_t o = 0; o < w->s.hidden; o++)
        b.y_error.push_back(magnitude(&v.down, o, nullptr, &b.h_error) +
                            eps * (magnitude(&v.down, o, b.h.data(), nullptr) + 1));
    return b;
}

// Runs the list of `ids` and compares every row of expert_y. NaN rows of x must give NaN, and only they.
// What the experts of a decode step read is there when route has run.
void run_route(world *w)
{
    if (w->o.rows <= FT_CUDA_DECODE_ROWS)
        CHECK_EQ(ft_cuda_route(&w->c, w->o.layer, false, nullptr), 0);
    cuda_memory_sync("route");
}

void check_experts(world *w, const std::vector<uint32_t> &ids, double eps, bool with_shared)
{
    host_list list = group(ids, w->o.topk, [](uint32_t) { return true; });
    ft_cuda_list d = upload(w, list, 3);
    uint64_t *stamp = mapped<uint64_t>(1);
    std::vector<float> shared_h = random_floats((size_t)w->o.rows * w->o.shared);
    run_route(w);
    if (w->o.shared)
        w->write(w->c.space.shared_h, shared_h.data(), shared_h.size() * 4);
    CHECK_EQ(ft_cuda_experts(&w->c, w->o.layer, &d, d.groups_max, w->o.rows, with_shared, stamp, nullptr), 0);
    cuda_memory_sync("experts");
    CHECK(*stamp != 0);
    std::vector<float> y = w->read(w->c.space.expert_y, (size_t)w->pairs() * w->s.hidden);
    std::vector<float> h = w->read(w->c.space.expert_h, (size_t)w->pairs() * w->s.width);
    for (uint32_t at = 0; at < ids.size(); at++) { // in the order of the list, as expert_h
        uint32_t p = list.pair_out[at];
        bounds b = expert_bounds(w, ids[p], w->x.data() + (size_t)(p / w->o.topk) * w->s.hidden, eps);
        for (uint32_t i = 0; i < w->s.width; i++)
            check_close(h[(size_t)at * w->s.width + i], (double)b.h[i], b.h_error[i], "expert_h", i);
        for (uint32_t i = 0; i < w->s.hidden; i++)
            check_close(y[(size_t)p * w->s.hidden + i], (double)b.y[i], b.y_error[i],
                        ft_format_name(w->s.format), i);
    }
    if (!with_shared || !w->o.shared)
        return;
    std::vector<float> got = w->read(w->c.space.shared_y, (size_t)w->o.rows * w->s.hidden), want = got;
    ft_rows rows = {shared_h.data(), nullptr, w->o.shared, w->o.rows};
    w->ref.matmul(&w->down.host, 0, w->s.hidden, rows, nullptr, want.data(), w->s.hidden);
    for (size_t i = 0; i < got.size(); i++)
        check_close(got[i], (double)want[i],
                    eps * (magnitude(&w->down.host, (uint32_t)(i % w->s.hidden),
                                     shared_h.data() + i / w->s.hidden * w->o.shared, nullptr) +
                           1),
                    "shared_y", i);
}

constexpr double F32 = 2.5e-7, TWO_PIECES = 2.5e-5,
                 ONE_F16 = 2.6e-4; // activations as one bf16 would need 1.2e-2
double prefill_eps(const shape &s)
{
    return s.format == FT_FORMAT_NVFP4 || s.format == FT_FORMAT_FP8_BLOCK ? ONE_F16 : TWO_PIECES;
}

const shape shapes[] = {
    {FT_FORMAT_BF16, 64, 32, 0, false, FT_ACTIVATION_SILU, 0, 0},
    {FT_FORMAT_BF16, 200, 72, 0, false, FT_ACTIVATION_SILU, 0, 0},
    {FT_FORMAT_BF16, 30, 21, 0, false, FT_ACTIVATION_SILU, 0, 0}, // slow form
    {FT_FORMAT_NVFP4, 64, 32, 0, false, FT_ACTIVATION_SILU, 0, 0},
    {FT_FORMAT_NVFP4, 416, 96, 0, false, FT_ACTIVATION_SILU, 0, 0},
    {FT_FORMAT_NVFP4, 80, 48, 0, false, FT_ACTIVATION_SILU, 0, 0}, // slow form
    {FT_FORMAT_FP8_BLOCK, 192, 64, 64, false, FT_ACTIVATION_SILU, 0, 0},
    {FT_FORMAT_FP8_BLOCK, 208, 144, 128, false, FT_ACTIVATION_SILU, 0, 0}, // partial blocks
    {FT_FORMAT_FP8_BLOCK, 192, 80, 64, false, FT_ACTIVATION_SILU, 0, 24},  // tiles across blocks of rows
    {FT_FORMAT_FP8_BLOCK, 100, 50, 24, false, FT_ACTIVATION_SILU, 0, 0},   // slow form, partial blocks
    {FT_FORMAT_MXFP4, 96, 64, 0, true, FT_ACTIVATION_SWIGLU_OSS, 7, 0},
    {FT_FORMAT_MXFP4, 288, 160, 0, true, FT_ACTIVATION_SWIGLU_OSS, 0.5f, 0},
    {FT_FORMAT_DS_FP4, 160, 96, 0, false, FT_ACTIVATION_SILU, 0, 0},
};

TEST(decode_experts_equal_reference_for_every_format_and_grouping)
{
    const uint32_t row_counts[] = {1, 2, 4, 8, 16};
    for (const shape &s : shapes)
        for (size_t n = 0; n < 5; n++)
            for (int how = SAME; how <= RANDOM; how++) {
                options o;
                o.rows = row_counts[n];
                o.experts = 8;
                o.shared = how == RANDOM ? 40 : 0;
                world *w = make_world(s, o);
                check_experts(w, make_ids(w, (pattern)how), F32, true);
                end_world(w);
            }
}

TEST(decode_experts_equal_reference_at_the_main_models_width)
{
    options o;
    o.experts = 2;
    world *w = make_world({FT_FORMAT_NVFP4, 2560, 640, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
    check_experts(w, {1, 0}, F32, false);
    end_world(w);
}

TEST(prefill_experts_equal_reference_for_every_format)
{
    const uint32_t row_counts[] = {17, 70, 200};
    for (const shape &s : shapes)
        for (uint32_t n = 0; n < 3; n++) {
            if (n == 2 && s.format != FT_FORMAT_NVFP4)
                continue;
            options o;
            o.rows = row_counts[n];
            o.experts = n == 0 ? 40 : 5;
            world *w = make_world(s, o);
            check_experts(w, make_ids(w, n == 1 ? SAME : RANDOM), prefill_eps(s), false);
            end_world(w);
        }
}

TEST(a_rows_bits_do_not_depend_on_the_rows_beside_it)
{
    for (const shape &s : shapes) {
        options many, one;
        many.rows = 16;
        many.shared = one.shared = 24;
        world *w = make_world(s, many);
        std::vector<uint32_t> ids = make_ids(w, RANDOM);
        ft_cuda_list d = upload(w, group(ids, 2, [](uint32_t) { return true; }), 0);
        CHECK_EQ(ft_cuda_route(&w->c, 1, false, nullptr), 0);
        CHECK_EQ(ft_cuda_experts(&w->c, 1, &d, d.groups_max, 16, true, nullptr, nullptr), 0);
        cuda_memory_sync("16 rows");
        std::vector<float> y = w->read(w->c.space.expert_y, (size_t)32 * s.hidden),
                           shared = w->read(w->c.space.shared_y, (size_t)16 * s.hidden),
                           logits = w->read(w->c.space.logits_router, 16 * 8);
        for (uint32_t r : {0u, 7u, 15u}) { // the same weights, row r alone
            world alone = *w;
            alone.o.rows = alone.c.step.rows = 1;
            alone.write(alone.c.space.x, w->x.data() + (size_t)r * s.hidden, s.hidden * 4);
            std::vector<uint32_t> own(ids.begin() + 2 * r, ids.begin() + 2 * r + 2);
            ft_cuda_list l = upload(&alone, group(own, 2, [](uint32_t) { return true; }), 0);
            CHECK_EQ(ft_cuda_route(&alone.c, 1, false, nullptr), 0);
            CHECK_EQ(ft_cuda_experts(&alone.c, 1, &l, l.groups_max, 1, true, nullptr, nullptr), 0);
            cuda_memory_sync("1 row");
            std::vector<float> y1 = alone.read(w->c.space.expert_y, (size_t)2 * s.hidden),
                               shared1 = alone.read(w->c.space.shared_y, s.hidden),
                               logits1 = alone.read(w->c.space.logits_router, 8);
            CHECK(!memcmp(y1.data(), y.data() + (size_t)2 * r * s.hidden, y1.size() * 4));
            CHECK(!memcmp(shared1.data(), shared.data() + (size_t)r * s.hidden, shared1.size() * 4));
            CHECK(!memcmp(logits1.data(), logits.data() + (size_t)r * 8, logits1.size() * 4));
        }
        end_world(w);
    }
}

TEST(an_empty_list_leaves_experts_alone_and_computes_the_shared_one)
{
    for (uint32_t rows : {2u, 20u})
        for (uint32_t bound : {0u, 3u}) {
            options o;
            o.rows = rows;
            o.shared = 24;
            world *w = make_world(shapes[3], o);
            std::vector<float> shared_h = random_floats(rows * 24), zero((size_t)w->pairs() * w->s.hidden);
            w->write(w->c.space.shared_h, shared_h.data(), shared_h.size() * 4);
            w->write(w->c.space.expert_y, zero.data(), zero.size() * 4);
            ft_cuda_list d = make_list(3, 6);
            CHECK_EQ(ft_cuda_experts(&w->c, 1, &d, bound, rows, true, nullptr, nullptr), 0);
            cuda_memory_sync("empty list");
            CHECK(w->read(w->c.space.expert_y, zero.size()) == zero);
            std::vector<float> got = w->read(w->c.space.shared_y, (size_t)rows * w->s.hidden), want = got;
            ft_rows in = {shared_h.data(), nullptr, 24, rows};
            w->ref.matmul(&w->down.host, 0, w->s.hidden, in, nullptr, want.data(), w->s.hidden);
            for (size_t i = 0; i < got.size(); i++)
                check_close(got[i], (double)want[i], rows > 16 ? 0.2 : 1e-4, "shared_y", i);
            end_world(w);
        }
}

TEST(nan_stays_in_its_row)
{
    for (uint32_t rows : {3u, 20u})
        for (const shape &s : {shapes[0], shapes[2], shapes[3], shapes[7], shapes[10]}) {
            options o;
            o.rows = rows;
            world *w = make_world(s, o);
            w->x[s.hidden + 5] = NAN;
            w->write(w->c.space.x, w->x.data(), w->x.size() * 4);
            check_experts(w, make_ids(w, SAME), rows > 16 ? prefill_eps(s) : F32, false);
            end_world(w);
        }
}

TEST(nan_codes_and_scales_are_nan)
{
    for (const shape &s : {shapes[6], shapes[9], shapes[4], shapes[5], shapes[11]})
        for (uint32_t rows : {1u, 20u}) {
            options o;
            o.rows = rows;
            world *w = make_world(s, o);
            ft_expert v = w->expert(0);
            if (s.format == FT_FORMAT_FP8_BLOCK)
                ((uint8_t *)const_cast<void *>(v.down.data))[3 * s.width + 2] = 0xff;
            else
                ((uint8_t *)const_cast<void *>(
                    v.down.scale))[3 * (s.width / (s.format == FT_FORMAT_NVFP4 ? 16 : 32))] =
                    s.format == FT_FORMAT_NVFP4 ? 0x7f : 0xff;
            std::vector<uint32_t> ids = make_ids(w, SAME);
            run_route(w);
            ft_cuda_list d = upload(w, group(ids, 2, [](uint32_t) { return true; }), 0);
            CHECK_EQ(ft_cuda_experts(&w->c, 1, &d, d.groups_max, rows, false, nullptr, nullptr), 0);
            cuda_memory_sync("NaN weights");
            std::vector<float> y = w->read(w->c.space.expert_y, (size_t)w->pairs() * s.hidden);
            for (uint32_t p = 0; p < w->pairs(); p++)
                for (uint32_t i = 0; i < s.hidden; i++)
                    CHECK_EQ(std::isnan(y[(size_t)p * s.hidden + i]), p % 2 == 0 && i == 3);
            end_world(w);
        }
}

// ---- router ----

// What ft_router_topk makes of the device's own logits, so that ids must be equal.
void check_choice(world *w, const std::vector<float> &logits, const uint32_t *forced)
{
    uint32_t k = w->o.topk, experts = w->o.experts;
    std::vector<uint32_t> ids = w->read_u32(w->c.space.topk_ids, w->pairs()), want(k);
    std::vector<float> weights = w->read(w->c.space.topk_weights, w->pairs()), want_weights(k);
    for (uint32_t r = 0; r < w->o.rows; r++) {
        const float *row = logits.data() + (size_t)r * experts;
        bool ok = ft_router_topk(row, experts, k, w->o.renormalise, w->o.softmax_chosen, want.data(),
                                 want_weights.data());
        CHECK_EQ(w->c.step.failed[r], ok ? 0u : 1 + w->o.layer);
        double sum = 0;
        for (uint32_t j = 0; ok && forced && j < k; j++) {
            want[j] = forced[r * k + j];
            want_weights[j] = std::exp(row[want[j]] - row[forced[r * k]]);
            sum += (double)want_weights[j];
        }
        for (uint32_t j = 0; j < k; j++) {
            if (!ok) {
                want[j] = j;
                want_weights[j] = 0;
            } else if (forced) {
                want_weights[j] = (float)((double)want_weights[j] / sum);
            }
            CHECK_EQ(ids[r * k + j], want[j]);
            check_close(weights[r * k + j], (double)want_weights[j], 2e-6 * (double)want_weights[j], "weight",
                        j);
            CHECK_EQ(w->c.exchange.ids[w->o.layer * w->pairs() + r * k + j], want[j]);
        }
    }
}

void check_route(world *w, double eps, const uint32_t *forced)
{
    uint32_t rows = w->o.rows, experts = w->o.experts;
    CHECK_EQ(ft_cuda_route(&w->c, w->o.layer, false, nullptr), 0);
    cuda_memory_sync("route");
    std::vector<float> logits = w->read(w->c.space.logits_router, (size_t)rows * experts), want = logits;
    ft_rows in = {w->x.data(), nullptr, w->s.hidden, rows};
    w->ref.matmul(&w->router.host, 0, experts, in, w->router_bias.empty() ? nullptr : w->router_bias.data(),
                  want.data(), experts);
    for (size_t i = 0; i < logits.size(); i++)
        if (!std::isinf(want[i]) || want[i] != logits[i])
            check_close(logits[i], (double)want[i],
                        eps * (magnitude(&w->router.host, (uint32_t)(i % experts),
                                         w->x.data() + i / experts * w->s.hidden, nullptr) +
                               1),
                        "logit", i);
    check_choice(w, logits, forced);
    CHECK_EQ(w->c.exchange.routed[w->o.layer * FT_CUDA_FLAG_STRIDE], w->epoch);
    CHECK_EQ(w->c.exchange.routed[0], 0);
    CHECK(*ft_cuda_stamp_of(&w->c, w->o.layer, FT_CUDA_STAMP_ROUTE) != 0);
    for (uint32_t counter : cuda_memory_read(w->c.exchange.counters, 64))
        CHECK_EQ(counter, 0);
    if (!w->o.shared)
        return;
    std::vector<float> h = w->read(w->c.space.shared_h, (size_t)rows * w->o.shared),
                       gate = w->read(w->c.space.shared_gate, rows), want_h = h, want_gate = gate;
    ft_expert shared = {};
    shared.gate = w->gate.host;
    shared.up = w->up.host;
    shared.activation = FT_ACTIVATION_SILU;
    w->ref.expert_up(&shared, 0, w->o.shared, in, want_h.data(), w->o.shared);
    w->ref.matmul(&w->shared_gate.host, 0, 1, in, nullptr, want_gate.data(), 1);
    for (size_t i = 0; i < h.size(); i++) {
        const float *x = w->x.data() + i / w->o.shared * w->s.hidden;
        uint32_t unit = (uint32_t)(i % w->o.shared);
        double g = magnitude(&w->gate.host, unit, x, nullptr) + 1,
               u = magnitude(&w->up.host, unit, x, nullptr) + 1;
        check_close(h[i], (double)want_h[i], 4 * eps * g * u, "shared_h", i);
    }
    for (size_t i = 0; i < gate.size(); i++)
        check_close(gate[i], (double)want_gate[i],
                    eps * (magnitude(&w->shared_gate.host, 0, w->x.data() + i * w->s.hidden, nullptr) + 1),
                    "gate", i);
}

TEST(router_equals_reference_over_shapes_and_weightings)
{
    const struct {
        uint32_t rows, experts, topk, shared, hidden;
        bool renormalise, chosen, bias;
        ft_format dense;
    } table[] = {
        {1, 512, 10, 64, 320, true, false, false, FT_FORMAT_BF16},
        {2, 8, 2, 0, 64, false, false, false, FT_FORMAT_BF16},
        {3, 32, 4, 0, 96, false, true, true, FT_FORMAT_BF16},
        {4, 128, 8, 24, 64, true, false, true, FT_FORMAT_F32},
        {5, 60, 6, 17, 64, true, false, false, FT_FORMAT_FP8_BLOCK},
        {8, 33, 33, 8, 64, false, false, false, FT_FORMAT_BF16},
        {16, 512, 10, 32, 64, true, false, false, FT_FORMAT_BF16},
        {1, 600, 40, 0, 64, false, false, true, FT_FORMAT_BF16},
        {2, 1, 1, 5, 30, true, false, false, FT_FORMAT_BF16},
        {11, 513, 3, 9, 64, true, false, false, FT_FORMAT_BF16},
        {17, 64, 4, 32, 64, true, false, true, FT_FORMAT_BF16},
        {90, 128, 8, 0, 64, false, true, false, FT_FORMAT_BF16},
    };
    for (const auto &t : table) {
        options o;
        o.rows = t.rows, o.experts = t.experts, o.topk = t.topk, o.shared = t.shared;
        o.renormalise = t.renormalise, o.softmax_chosen = t.chosen, o.router_bias = t.bias, o.dense = t.dense;
        world *w = make_world({FT_FORMAT_BF16, t.hidden, 16, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
        check_route(w, t.rows > 16 ? 8e-3 : F32, nullptr);
        end_world(w);
    }
}

TEST(router_gives_ties_to_the_lower_id)
{
    for (uint32_t experts : {40u, 512u, 700u})
        for (uint32_t rows : {1u, 4u}) {
            options o;
            o.rows = rows, o.experts = experts, o.topk = 10, o.router_bias = true;
            world *w = make_world({FT_FORMAT_BF16, 64, 16, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
            std::fill(w->x.begin(), w->x.end(), 0.0f); // logits are the biases: few values, both zeros
            w->write(w->c.space.x, w->x.data(), w->x.size() * 4);
            for (uint32_t e = 0; e < experts; e++)
                w->router_bias[e] = e % 7 == 3   ? -0.0f
                                    : e % 5 == 1 ? 0.5f * (float)(e % 3)
                                    : e % 2      ? 0.0f
                                                 : -INFINITY;
            w->layers[1].router_bias = cuda_memory_copy(w->router_bias.data(), experts);
            check_route(w, F32, nullptr);
            end_world(w);
        }
}

TEST(router_fails_a_row_that_is_not_a_number_and_no_other)
{
    for (uint32_t rows : {4u, 20u})
        for (uint32_t experts : {64u, 600u}) {
            options o;
            o.rows = rows, o.experts = experts, o.topk = 6, o.shared = 16;
            world *w = make_world({FT_FORMAT_BF16, 64, 16, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
            w->x[64 * 2 + 9] = NAN;
            w->write(w->c.space.x, w->x.data(), w->x.size() * 4);
            check_route(w, rows > 16 ? 8e-3 : F32, nullptr);
            CHECK_EQ(w->c.step.failed[2], 2);
            end_world(w);
        }
    options o;
    o.router_bias = true;
    world *w = make_world(shapes[0], o);
    std::vector<float> infinite(o.experts, -INFINITY);
    w->layers[1].router_bias = cuda_memory_copy(infinite.data(), infinite.size());
    CHECK_EQ(ft_cuda_route(&w->c, 1, false, nullptr), 0);
    cuda_memory_sync("route");
    CHECK_EQ(w->c.step.failed[0], 2);
    end_world(w);
}

TEST(router_obeys_forced_ids)
{
    options o;
    o.rows = 3, o.experts = 50, o.topk = 4, o.renormalise = false;
    world *w = make_world({FT_FORMAT_BF16, 64, 16, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
    std::vector<uint32_t> forced(2 * 12, 999);
    for (uint32_t i = 0; i < 12; i++)
        forced[12 + i] = (i * 7 + 3) % 50;
    w->c.exchange.forced_ids = cuda_memory_copy(forced.data(), forced.size());
    check_route(w, F32, forced.data() + 12);
    end_world(w);
}

// ---- look-ahead ----

// Layer 0 is given layer 1's experts and router, and layer 1 another bias: what is foreseen of layer 1 differs from what
// layer 0 chooses.
void check_foreseen(world *w)
{
    uint32_t rows = w->o.rows, experts = w->o.experts, k = w->o.topk, zero = 0, one = 1;
    std::vector<float> bias(experts), weights(k);
    std::vector<uint32_t> want(k);
    for (float &b : bias)
        b = random_float();
    w->layers[0] = w->layers[1];
    w->layers[1].router_bias = cuda_memory_copy(bias.data(), bias.size());
    ft_cuda_exchange *x = &w->c.exchange;
    x->foreseen = mapped<uint32_t>(2 * FT_CUDA_FLAG_STRIDE);
    x->foreseen_ids = mapped<uint32_t>((size_t)2 * w->pairs());
    x->foreseen_logits = zeros<float>((size_t)rows * experts);
    x->layer_end = 2;
    std::fill(x->foreseen, x->foreseen + 2 * FT_CUDA_FLAG_STRIDE, 0u);
    w->c.step.looks_ahead = cuda_memory_copy(&zero, 1);
    CHECK_EQ(ft_cuda_route(&w->c, 0, true, nullptr), 0); // not wanted
    cuda_memory_sync("route");
    CHECK_EQ(x->foreseen[0], 0);
    CHECK_EQ(x->routed[0], w->epoch);
    std::vector<uint32_t> alone = w->read_u32(w->c.space.topk_ids, w->pairs());
    w->c.step.looks_ahead = cuda_memory_copy(&one, 1);
    CHECK_EQ(ft_cuda_route(&w->c, 1, true, nullptr), 0); // nothing behind
    CHECK_EQ(ft_cuda_route(&w->c, 0, true, nullptr), 0);
    cuda_memory_sync("route");
    CHECK_EQ(x->foreseen[0], w->epoch);
    CHECK_EQ(x->foreseen[FT_CUDA_FLAG_STRIDE], 0);
    CHECK(w->read_u32(w->c.space.topk_ids, w->pairs()) == alone);
    std::vector<float> logits = cuda_memory_read(x->foreseen_logits, (size_t)rows * experts), exact = logits;
    ft_rows in = {w->x.data(), nullptr, w->s.hidden, rows};
    w->ref.matmul(&w->router.host, 0, experts, in, bias.data(), exact.data(), experts);
    for (size_t i = 0; i < logits.size(); i++)
        check_close(logits[i], (double)exact[i],
                    F32 * (magnitude(&w->router.host, (uint32_t)(i % experts),
                                     w->x.data() + i / experts * w->s.hidden, nullptr) +
                           1),
                    "foreseen logit", i);
    for (uint32_t r = 0; r < rows; r++) {
        CHECK(ft_router_topk(logits.data() + (size_t)r * experts, experts, k, true, false, want.data(), weights.data()));
        CHECK(std::equal(want.begin(), want.end(), x->foreseen_ids + (size_t)r * k));
    }
    for (uint32_t counter : cuda_memory_read(x->counters, 64))
        CHECK_EQ(counter, 0);
}

TEST(route_foresees_the_choice_of_the_next_router)
{
    const struct {
        uint32_t rows, experts, topk, shared;
    } table[] = {{1, 512, 10, 64}, {1, 60, 6, 0},    {2, 128, 8, 24}, {3, 33, 33, 8},
                 {4, 32, 4, 0},    {16, 512, 10, 5}, {7, 600, 40, 0}, {8, 1, 1, 16}};
    for (const auto &t : table) {
        options o;
        o.rows = t.rows, o.experts = t.experts, o.topk = t.topk, o.shared = t.shared;
        world *w = make_world({FT_FORMAT_BF16, 64, 16, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
        check_foreseen(w);
        end_world(w);
    }
    // A row that is not a number: nothing is foreseen for it, and its neighbours are left alone.
    options o;
    o.rows = 3, o.experts = 50, o.topk = 4;
    world *w = make_world({FT_FORMAT_BF16, 64, 16, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
    check_foreseen(w);
    float nan = NAN;
    cuda_memory_to_device(w->c.base + w->c.space.x + 64 + 7, &nan, sizeof nan);
    CHECK_EQ(ft_cuda_route(&w->c, 0, true, nullptr), 0);
    cuda_memory_sync("route");
    for (uint32_t j = 0; j < 12; j++)
        CHECK((w->c.exchange.foreseen_ids[j] == FT_NONE) == (j / 4 == 1));
    end_world(w);
}

// ---- slot map ----

// `share` of 4 experts has a slot.
std::vector<uint32_t> make_slots(world *w, uint32_t share)
{
    std::vector<uint32_t> slot_of(2 * w->o.experts, FT_NONE);
    for (uint32_t i = 0; i < slot_of.size(); i++)
        if (random_u32() % 4 < share)
            slot_of[i] = (i * 37 + 5) % 5000; // distinct: 37 and 5000 have no common factor
    cuda_memory_to_device(w->c.exchange.slot_of, slot_of.data(), slot_of.size() * 4);
    return slot_of;
}

void check_list(const world *w, const ft_cuda_list *d, const host_list &want,
                const std::vector<uint32_t> &slot_of)
{
    uint32_t groups = cuda_memory_read(d->group_count, 1)[0];
    CHECK_EQ(groups, want.expert.size());
    if (groups != want.expert.size())
        return;
    std::vector<uint32_t> begin = cuda_memory_read(d->pair_begin, groups + 1);
    CHECK(begin == want.pair_begin);
    CHECK(cuda_memory_read(d->pair_row, want.pair_row.size()) == want.pair_row);
    CHECK(cuda_memory_read(d->pair_out, want.pair_out.size()) == want.pair_out);
    std::vector<const char *> blob = cuda_memory_read((const char *const *)d->blob, groups);
    for (uint32_t g = 0; g < groups; g++)
        CHECK(blob[g] == w->c.exchange.slots +
                             slot_of[w->o.layer * w->o.experts + want.expert[g]] * w->c.exchange.slot_bytes);
}

TEST(resolve_lists_resident_experts_and_reports_the_others)
{
    for (uint32_t rows : {1u, 2u, 7u, 16u, 120u})
        for (uint32_t share : {0u, 2u, 4u}) {
            options o;
            o.rows = rows, o.experts = 24, o.topk = 10;
            world *w = make_world({FT_FORMAT_BF16, 64, 16, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
            std::vector<uint32_t> slot_of = make_slots(w, share);
            CHECK_EQ(ft_cuda_route(&w->c, 1, true, nullptr), 0);
            cuda_memory_sync("resolve");
            std::vector<uint32_t> ids = w->read_u32(w->c.space.topk_ids, w->pairs());
            auto resident = [&](uint32_t p) { return slot_of[24 + ids[p]] != FT_NONE; };
            check_list(w, &w->c.exchange.resident, group(ids, 10, resident), slot_of);
            std::vector<uint32_t> on_cpu = cuda_memory_read(w->c.exchange.on_cpu, w->pairs());
            uint32_t missing = 0;
            for (uint32_t p = 0; p < w->pairs(); p++) {
                CHECK_EQ(on_cpu[p], !resident(p));
                missing += !resident(p);
            }
            CHECK_EQ(w->c.exchange.missing[1], missing);
            CHECK_EQ(w->c.exchange.missing[0], 0);
            CHECK_EQ(w->c.exchange.routed[FT_CUDA_FLAG_STRIDE], w->epoch);
            for (size_t i = 0; i < w->x.size(); i++)
                CHECK(w->c.exchange.host_x[i] == (missing ? w->x[i] : 0.0f));
            end_world(w);
        }
}

// ---- waits ----

// Runs `launch` while another thread does `act` after a while.
void run_beside(const std::function<int()> &launch, const std::function<void()> &act)
{
    std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        act();
    });
    CHECK_EQ(launch(), 0);
    cuda_memory_sync("wait");
    other.join();
}

void raise(uint32_t *flag, uint32_t value)
{
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

TEST(wait_fetched_applies_moves_and_lists_what_came)
{
    for (uint32_t rows : {1u, 5u, 16u}) {
        options o;
        o.rows = rows, o.experts = 40, o.topk = 10;
        world *w = make_world({FT_FORMAT_BF16, 64, 16, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
        std::vector<uint32_t> slot_of = make_slots(w, 2);
        CHECK_EQ(ft_cuda_route(&w->c, 1, true, nullptr), 0);
        cuda_memory_sync("resolve");
        std::vector<uint32_t> ids = w->read_u32(w->c.space.topk_ids, w->pairs()), want = slot_of, before;
        before = cuda_memory_read(w->c.exchange.on_cpu, w->pairs());
        std::vector<ft_cuda_move> moves;
        auto move = [&](uint32_t layer, uint32_t expert, uint32_t slot, uint32_t victim) {
            moves.push_back({layer, expert, slot, victim});
            if (victim != FT_NONE)
                want[victim] = FT_NONE;
            want[layer * 40 + expert] = slot;
        };
        // Two in three missing experts come: into free slots, and into slots of layer 0.
        uint32_t n = 0, victim = 0;
        std::vector<uint32_t> seen;
        for (uint32_t p = 0; p < w->pairs(); p++) {
            if (!before[p] || std::count(seen.begin(), seen.end(), ids[p]))
                continue;
            seen.push_back(ids[p]);
            if (n++ % 3 == 2)
                continue;
            while (n % 2 && victim < 40 && want[victim] == FT_NONE)
                victim++;
            if (n % 2 && victim < 40)
                move(1, ids[p], want[victim], victim);
            else
                move(1, ids[p], 6000 + n, FT_NONE);
        }
        // Ahead of their layer; the second takes what the first had got, the third fills the slot anew.
        move(0, 39, 7000, FT_NONE);
        move(0, 38, 7000, 39);
        move(0, 39, 7001, FT_NONE);
        CHECK(n > 0);
        memcpy((void *)const_cast<ft_cuda_move *>(w->c.exchange.moves + w->c.exchange.moves_max),
               moves.data(), moves.size() * sizeof moves[0]);
        *const_cast<uint32_t *>(w->c.exchange.move_count + 1) = 0; // the count comes with the flag
        run_beside([&] { return ft_cuda_wait_fetched(&w->c, 1, nullptr); },
                   [&] {
                       *const_cast<volatile uint32_t *>(w->c.exchange.move_count + 1) =
                           (uint32_t)moves.size();
                       raise(w->c.exchange.fetched + FT_CUDA_FLAG_STRIDE, w->epoch);
                   });
        CHECK(cuda_memory_read(w->c.exchange.slot_of, want.size()) == want);
        auto came = [&](uint32_t p) { return before[p] && want[40 + ids[p]] != FT_NONE; };
        check_list(w, &w->c.exchange.fetched_list, group(ids, 10, came), want);
        std::vector<uint32_t> after = cuda_memory_read(w->c.exchange.on_cpu, w->pairs());
        for (uint32_t p = 0; p < w->pairs(); p++)
            CHECK_EQ(after[p], before[p] && !came(p));
        CHECK(*ft_cuda_stamp_of(&w->c, 1, FT_CUDA_STAMP_FETCHED) >=
              *ft_cuda_stamp_of(&w->c, 1, FT_CUDA_STAMP_WAIT_FETCHED));
        CHECK(*ft_cuda_stamp_of(&w->c, 1, FT_CUDA_STAMP_FETCHED) != 0);
        end_world(w);
    }
}

TEST(wait_fetched_applies_more_moves_than_it_holds_at_once)
{
    options o;
    o.experts = 300, o.topk = 1;
    world *w = make_world({FT_FORMAT_BF16, 64, 16, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
    std::vector<uint32_t> want(600, FT_NONE), set = {1};
    cuda_memory_to_device(w->c.exchange.on_cpu, set.data(), 4);
    std::vector<uint32_t> id = {299};
    w->write(w->c.space.topk_ids, id.data(), 4);
    for (uint32_t i = 0; i < 300; i++) {
        const_cast<ft_cuda_move *>(w->c.exchange.moves)[300 + i] = {1, i, 2 * i, FT_NONE};
        want[300 + i] = 2 * i;
    }
    *const_cast<uint32_t *>(w->c.exchange.move_count + 1) = 300;
    raise(w->c.exchange.fetched + FT_CUDA_FLAG_STRIDE, w->epoch + 3); // a later epoch counts as raised
    CHECK_EQ(ft_cuda_wait_fetched(&w->c, 1, nullptr), 0);
    cuda_memory_sync("wait");
    CHECK(cuda_memory_read(w->c.exchange.slot_of, 600) == want);
    CHECK_EQ(cuda_memory_read(w->c.exchange.fetched_list.group_count, 1)[0], 1);
    end_world(w);
}

TEST(waits_do_not_wait_when_nothing_is_missing)
{
    options o;
    world *w = make_world(shapes[0], o);
    uint32_t stale = 5;
    cuda_memory_to_device(w->c.exchange.fetched_list.group_count, &stale, 4);
    *const_cast<uint32_t *>(w->c.exchange.move_count + 1) = 1;
    CHECK_EQ(ft_cuda_wait_fetched(&w->c, 1, nullptr), 0); // the flag is down: would hang
    CHECK_EQ(ft_cuda_wait_computed(&w->c, 1, nullptr), 0);
    cuda_memory_sync("wait");
    CHECK_EQ(cuda_memory_read(w->c.exchange.fetched_list.group_count, 1)[0], 0);
    CHECK_EQ(cuda_memory_read(w->c.exchange.slot_of, 1)[0], FT_NONE);
    end_world(w);
}

TEST(waits_give_up_when_the_driver_does)
{
    options o;
    world *w = make_world(shapes[0], o);
    std::vector<uint32_t> set(w->pairs(), 1), id(w->pairs(), 1);
    cuda_memory_to_device(w->c.exchange.on_cpu, set.data(), set.size() * 4);
    w->write(w->c.space.topk_ids, id.data(), id.size() * 4);
    *const_cast<uint32_t *>(w->c.exchange.move_count + 1) = 1;
    raise(w->c.exchange.abort, w->epoch - 1); // an earlier step's
    run_beside([&] { return ft_cuda_wait_fetched(&w->c, 1, nullptr); },
               [&] { raise(w->c.exchange.abort, w->epoch); });
    CHECK_EQ(cuda_memory_read(w->c.exchange.fetched_list.group_count, 1)[0], 0);
    CHECK(cuda_memory_read(w->c.exchange.on_cpu, set.size()) == set);
    CHECK_EQ(ft_cuda_wait_computed(&w->c, 1, nullptr), 0);
    cuda_memory_sync("wait");
    end_world(w);
}

TEST(wait_computed_waits_for_its_layers_flag)
{
    options o;
    world *w = make_world(shapes[0], o);
    uint32_t set = 1;
    cuda_memory_to_device(w->c.exchange.on_cpu + 1, &set, 4);
    bool raised = false;
    run_beside(
        [&] {
            int error = ft_cuda_wait_computed(&w->c, 1, nullptr);
            cuda_memory_sync("wait");
            CHECK(__atomic_load_n(&raised, __ATOMIC_ACQUIRE));
            return error;
        },
        [&] {
            raise(w->c.exchange.computed, w->epoch); // layer 0's
            raise(w->c.exchange.computed + FT_CUDA_FLAG_STRIDE, w->epoch - 1);
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
            __atomic_store_n(&raised, true, __ATOMIC_RELEASE);
            raise(w->c.exchange.computed + FT_CUDA_FLAG_STRIDE, w->epoch);
        });
    end_world(w);
}

TEST(end_raises_done)
{
    world *w = make_world(shapes[0], options());
    CHECK_EQ(ft_cuda_end(&w->c, nullptr), 0);
    cuda_memory_sync("end");
    CHECK_EQ(*w->c.exchange.done, w->epoch);
    CHECK(w->c.stamps[2 * FT_CUDA_STAMP_LAYER_COUNT + FT_CUDA_STAMP_END] != 0);
    end_world(w);
}

// ---- combine ----

TEST(combine_equals_reference_whoever_computed)
{
    const struct {
        uint32_t rows, topk, shared, streams, hidden;
        bool cpu;
    } table[] = {{1, 10, 16, 4, 320, true},
                 {3, 2, 0, 1, 100, false},
                 {16, 8, 16, 1, 129, true},
                 {40, 3, 0, 2, 64, false}};
    for (const auto &t : table) {
        options o;
        o.rows = t.rows, o.topk = t.topk, o.shared = t.shared, o.streams = t.streams, o.experts = 16;
        world *w = make_world({FT_FORMAT_BF16, t.hidden, 16, 0, false, FT_ACTIVATION_SILU, 0, 0}, o);
        uint32_t pairs = w->pairs(), h = t.hidden, wide = h * t.streams, mixed_width = 5 + t.streams;
        std::vector<float> y = random_floats((size_t)pairs * h), host_y((size_t)pairs * h, NAN), device_y = y,
                           weights = random_floats(pairs), shared = random_floats((size_t)t.rows * h),
                           gate = random_floats(t.rows), residual = random_floats((size_t)t.rows * wide),
                           mixed = random_floats((size_t)t.rows * mixed_width);
        std::vector<uint32_t> on_cpu(pairs, t.cpu ? 0 : 1); // without any_cpu nobody looks
        for (uint32_t p = 0; t.cpu && p < pairs; p += 1 + random_u32() % 3) {
            on_cpu[p] = 1;
            std::copy_n(y.begin() + (size_t)p * h, h, host_y.begin() + (size_t)p * h);
            std::fill_n(device_y.begin() + (size_t)p * h, h, NAN);
        }
        cuda_memory_to_device(w->c.exchange.on_cpu, on_cpu.data(), pairs * 4);
        memcpy(const_cast<float *>(w->c.exchange.host_y), host_y.data(), host_y.size() * 4);
        w->write(w->c.space.expert_y, device_y.data(), device_y.size() * 4);
        w->write(w->c.space.topk_weights, weights.data(), weights.size() * 4);
        w->write(w->c.space.residual, residual.data(), residual.size() * 4);
        if (t.shared) {
            w->write(w->c.space.shared_y, shared.data(), shared.size() * 4);
            w->write(w->c.space.shared_gate, gate.data(), gate.size() * 4);
        }
        if (t.streams > 1)
            w->write(w->c.space.mixed, mixed.data(), mixed.size() * 4);
        CHECK_EQ(ft_cuda_combine(&w->c, 1, t.cpu, nullptr), 0);
        cuda_memory_sync("combine");
        std::vector<float> got = w->read(w->c.space.residual, residual.size());
        for (uint32_t r = 0; r < t.rows; r++)
            for (uint32_t i = 0; i < h; i++) {
                double sum = 0;
                for (uint32_t j = 0; j < t.topk; j++)
                    sum += (double)weights[r * t.topk + j] * (double)y[(size_t)(r * t.topk + j) * h + i];
                if (t.shared)
                    sum += (double)shared[(size_t)r * h + i] / (1 + std::exp(-(double)gate[r]));
                for (uint32_t s = 0; s < t.streams; s++) {
                    size_t at = (size_t)r * wide + s * h + i;
                    double factor = t.streams == 1 ? 1 : (double)mixed[r * mixed_width + 5 + s];
                    check_close(got[at], (double)residual[at] + factor * sum, 1e-5, "residual", at);
                }
            }
        CHECK(*ft_cuda_stamp_of(&w->c, 1, FT_CUDA_STAMP_COMBINE) != 0);
        end_world(w);
    }
}

// ---- copies and measurements ----

TEST(gather_copies_every_byte_and_no_more)
{
    for (uint64_t bytes : {16ull, 4096ull, 32768ull, 100016ull})
        for (uint32_t count : {1u, 3u}) {
            std::vector<const char *> from(count);
            std::vector<char *> to(count);
            std::vector<std::vector<char>> content(count);
            for (uint32_t i = 0; i < count; i++) {
                char *source = mapped<char>(bytes);
                for (uint64_t j = 0; j < bytes; j++)
                    source[j] = (char)random_u32();
                content[i].assign(source, source + bytes);
                content[i].resize(bytes + 16, 0); // what lies behind stays
                from[i] = source;
                to[i] = zeros<char>(bytes + 16);
            }
            const char *const *from_device = cuda_memory_copy(from.data(), count);
            char *const *to_device = cuda_memory_copy(to.data(), count);
            CHECK_EQ(ft_cuda_gather(from_device, to_device, count, bytes, 5, nullptr), 0);
            cuda_memory_sync("gather");
            for (uint32_t i = 0; i < count; i++)
                CHECK(cuda_memory_read((const char *)to[i], bytes + 16) == content[i]);
            cuda_memory_free_all();
        }
}

TEST(read_sums_every_word)
{
    std::vector<uint32_t> words(40004);
    uint32_t sum = 0;
    for (uint32_t &w : words)
        sum += w = random_u32();
    uint32_t *sink = zeros<uint32_t>(1);
    CHECK_EQ(ft_cuda_read(cuda_memory_copy(words.data(), words.size()), words.size() * 4, 3, sink, nullptr),
             0);
    cuda_memory_sync("read");
    CHECK_EQ(cuda_memory_read(sink, 1)[0], sum);
    cuda_memory_free_all();
}

TEST(litmus_answers_every_round)
{
    const uint32_t rounds = 200;
    uint32_t *to = mapped<uint32_t>(32), *payload = mapped<uint32_t>(32), *answer = mapped<uint32_t>(32),
             *back = mapped<uint32_t>(32), *bad = zeros<uint32_t>(1), wrong = 0;
    std::thread host([&] {
        for (uint32_t i = 1; i <= rounds; i++) {
            *(volatile uint32_t *)payload = i == 50 ? 0 : i; // one lie
            raise(to, i);
            while (__atomic_load_n(back, __ATOMIC_ACQUIRE) != i)
                std::this_thread::yield();
            wrong += *(volatile uint32_t *)answer != i;
        }
    });
    CHECK_EQ(ft_cuda_litmus(to, payload, answer, back, rounds, bad, nullptr), 0);
    cuda_memory_sync("litmus");
    host.join();
    CHECK_EQ(wrong, 0);
    CHECK_EQ(cuda_memory_read(bad, 1)[0], 1);
    cuda_memory_free_all();
}

} // namespace

int main(int argc, char **argv)
{
    if (!cuda_memory_available()) {
        printf("no GPU\n");
        const char *required = getenv("FT_REQUIRE_GPU");
        return required && *required == '1' ? 1 : 77;
    }
    RUN(decode_experts_equal_reference_for_every_format_and_grouping)
    RUN(decode_experts_equal_reference_at_the_main_models_width)
    RUN(prefill_experts_equal_reference_for_every_format)
    RUN(a_rows_bits_do_not_depend_on_the_rows_beside_it)
    RUN(an_empty_list_leaves_experts_alone_and_computes_the_shared_one)
    RUN(nan_stays_in_its_row)
    RUN(nan_codes_and_scales_are_nan)
    RUN(router_equals_reference_over_shapes_and_weightings)
    RUN(router_gives_ties_to_the_lower_id)
    RUN(router_fails_a_row_that_is_not_a_number_and_no_other)
    RUN(router_obeys_forced_ids) RUN(route_foresees_the_choice_of_the_next_router)
    RUN(resolve_lists_resident_experts_and_reports_the_others)
    RUN(wait_fetched_applies_moves_and_lists_what_came)
    RUN(wait_fetched_applies_more_moves_than_it_holds_at_once)
    RUN(waits_do_not_wait_when_nothing_is_missing)
    RUN(waits_give_up_when_the_driver_does)
    RUN(wait_computed_waits_for_its_layers_flag)
    RUN(end_raises_done)
    RUN(combine_equals_reference_whoever_computed)
    RUN(gather_copies_every_byte_and_no_more)
    RUN(read_sums_every_word)
    RUN(litmus_answers_every_round)
    printf("%d checks, %d failed\n", test_checks_, test_failures_);
    return test_failures_ || !test_checks_ ? 1 : 0;
}
