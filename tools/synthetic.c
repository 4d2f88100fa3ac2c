/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/synthetic.h"

#include "jobs/topology.h"
#include "tools/options.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PIECE_BYTES (4ull << 20) /* of a dense matrix, at a time */
#define FP8_BLOCK 128u

/* Random words of which `keep` chooses the random bits and `set` the constant ones. */
struct pattern {
    uint64_t keep, set;
};

/* f32 vectors: the exponent is fixed, the sign and the mantissa are random. */
static const struct pattern around_zero = {0x807fffff807fffff, 0x3d0000003d000000};     /* +-[1/32, 1/16) */
static const struct pattern taps = {0x807fffff807fffff, 0x3e8000003e800000};            /* +-[1/4, 1/2) */
static const struct pattern from_one = {0x007fffff007fffff, 0x3f8000003f800000};        /* [1, 2) */
static const struct pattern below_minus_two = {0x007fffff007fffff, 0xc0000000c0000000}; /* (-4, -2] */

struct piece {
    char *to;
    uint64_t bytes;
    struct pattern pattern;
};

/* A section of an expert's blob. */
struct section {
    uint32_t offset;
    uint64_t bytes;
    struct pattern pattern;
};

#define SECTIONS_MAX 10u

struct recipe {
    struct section sections[SECTIONS_MAX];
    uint32_t count;
    float globals[3];
    uint32_t global_offset; /* FT_NONE without */
};

/* Runs twice over the same code: with a counting arena (addresses are NULL), then with the real one. Errors stick. */
struct maker {
    const struct ft_model *model;
    enum ft_format format;
    enum ft_dense dense;
    struct ft_arena *arena;
    struct piece *pieces; /* [piece_count] while filling */
    uint32_t piece_count, piece_max;
    struct ft_weight_sizes sizes;
    int status;
    struct ft_error *err;
};

/* ---- patterns of weights ---- */

/* log2 of 1 / (rms sqrt(in)): what values of that root mean square must be scaled with. */
static double log2_scale(double rms, uint32_t in)
{
    return -log2(rms * sqrt((double)in));
}

static int scale_exponent(double rms, uint32_t in)
{
    return (int)lrint(log2_scale(rms, in));
}

static struct pattern repeat16(uint32_t keep, uint32_t set)
{
    return (struct pattern){keep * 0x0001000100010001u, set * 0x0001000100010001u};
}

static struct pattern repeat8(uint32_t keep, uint32_t set)
{
    return (struct pattern){keep * 0x0101010101010101u, set * 0x0101010101010101u};
}

static struct pattern repeat32(uint32_t keep, uint32_t set)
{
    return (struct pattern){keep * 0x0000000100000001u, set * 0x0000000100000001u};
}

/* Root mean squares: a mantissa in [1, 2): 1.53; the eight e2m1 magnitudes: 2.93. */
#define RMS_MANTISSA 1.53
#define RMS_E2M1 2.93

static struct pattern bf16_pattern(uint32_t in)
{
    return repeat16(0x807f, (uint32_t)(127 + scale_exponent(RMS_MANTISSA, in)) << 7);
}

static struct pattern data_pattern(enum ft_format format, uint32_t in)
{
    if (format == FT_FORMAT_BF16)
        return bf16_pattern(in);
    if (format == FT_FORMAT_FP8_BLOCK) /* exponents 1, 3, 5, 7 of bias 7: rms 0.79, never NaN */
        return repeat8(0xb7, 0x08);
    return (struct pattern){UINT64_MAX, 0}; /* every e2m1 code is a number */
}

static struct pattern scale_pattern(enum ft_format format, uint32_t in)
{
    if (format == FT_FORMAT_NVFP4)
        return repeat8(0x07, 0x38); /* e4m3 in [1, 1.875], rms 1.45 */
    if (format == FT_FORMAT_FP8_BLOCK)
        return repeat32(0x007fffff, (uint32_t)(127 + scale_exponent(0.79 * RMS_MANTISSA, in)) << 23);
    /* e8m0: 2^e or 2^(e + 1), rms 1.58; e + 127 is even, so that the lowest bit can be random */
    int even = 2 * (int)lrint((127 + log2_scale(1.58 * RMS_E2M1, in)) / 2);
    return repeat8(0x01, (uint32_t)even);
}

static float global_of(uint32_t in)
{
    return (float)(1 / (1.45 * RMS_E2M1 * sqrt((double)in)));
}

static void add_section(struct recipe *recipe, uint32_t offset, uint64_t bytes, struct pattern pattern)
{
    if (offset != FT_NONE && bytes)
        recipe->sections[recipe->count++] = (struct section){offset, bytes, pattern};
}

static void make_recipe(const struct ft_expert_layout *l, struct recipe *recipe)
{
    const uint32_t outs[] = {l->width, l->width, l->hidden}, ins[] = {l->hidden, l->hidden, l->width};
    const uint32_t data[] = {l->gate_offset, l->up_offset, l->down_offset};
    const uint32_t scales[] = {l->gate_scale_offset, l->up_scale_offset, l->down_scale_offset};
    const uint32_t biases[] = {l->gate_bias_offset, l->up_bias_offset, l->down_bias_offset};
    *recipe = (struct recipe){.global_offset = l->global_offset};
    for (uint32_t i = 0; i < 3; i++) {
        uint64_t data_bytes = 0, scale_bytes = 0;
        ft_matrix_bytes(l->format, outs[i], ins[i], l->block_out, l->block_in, &data_bytes, &scale_bytes);
        add_section(recipe, data[i], data_bytes, data_pattern(l->format, ins[i]));
        add_section(recipe, scales[i], scale_bytes, scale_pattern(l->format, ins[i]));
        add_section(recipe, biases[i], outs[i] * sizeof(float), around_zero);
        recipe->globals[i] = global_of(ins[i]);
    }
}

/* ---- placing ---- */

static void *place(struct maker *k, uint64_t bytes)
{
    void *at = NULL;
    if (k->status == FT_OK)
        k->status = ft_arena_push(k->arena, bytes, 1, &at, k->err);
    return at;
}

static void add_piece(struct maker *k, char *to, uint64_t bytes, struct pattern pattern)
{
    uint64_t count = ft_div_up(bytes, PIECE_BYTES);
    for (uint64_t i = 0; i < count; i++) {
        if (k->pieces && k->status == FT_OK) {
            FT_ASSERT_LT(k->piece_count, k->piece_max);
            k->pieces[k->piece_count] =
                (struct piece){to + i * PIECE_BYTES, FT_MIN(PIECE_BYTES, bytes - i * PIECE_BYTES), pattern};
        }
        k->piece_count++;
    }
}

static void put_stored(struct maker *k, struct ft_matrix *matrix, uint32_t out, uint32_t in)
{
    uint64_t bytes = 2ull * out * in;
    char *at = place(k, bytes);
    *matrix = (struct ft_matrix){.data = at, .out = out, .in = in, .format = FT_FORMAT_BF16, .global = 1};
    add_piece(k, at, bytes, bf16_pattern(in));
}

/* A matrix that FT_DENSE_TO_FP8 quantises; what it leaves alone (enum ft_dense_use) is put_stored. */
static void put_matrix(struct maker *k, struct ft_matrix *matrix, uint32_t out, uint32_t in)
{
    uint64_t data_bytes = 0, scale_bytes = 0;
    if (k->dense != FT_DENSE_TO_FP8) {
        put_stored(k, matrix, out, in);
        return;
    }
    *matrix = (struct ft_matrix){.out = out,
                                 .in = in,
                                 .format = FT_FORMAT_FP8_BLOCK,
                                 .global = 1,
                                 .block_out = FP8_BLOCK,
                                 .block_in = FP8_BLOCK};
    ft_matrix_bytes(FT_FORMAT_FP8_BLOCK, out, in, FP8_BLOCK, FP8_BLOCK, &data_bytes, &scale_bytes);
    char *data = place(k, data_bytes), *scale = place(k, scale_bytes);
    matrix->data = data;
    matrix->scale = scale;
    add_piece(k, data, data_bytes, data_pattern(FT_FORMAT_FP8_BLOCK, in));
    add_piece(k, scale, scale_bytes, scale_pattern(FT_FORMAT_FP8_BLOCK, in));
}

static void put_vector(struct maker *k, const float **vector, uint64_t count, struct pattern pattern)
{
    char *at = place(k, count * sizeof(float));
    *vector = (const float *)(const void *)at;
    add_piece(k, at, count * sizeof(float), pattern);
}

/* A norm's weight scales by 1 + w or by w. */
static void put_norm(struct maker *k, const float **norm, uint64_t count, bool plus_one)
{
    put_vector(k, norm, count, plus_one ? around_zero : from_one);
}

static void put_mix(struct maker *k, struct ft_mix_weights *mix, bool inject)
{
    const struct ft_model *m = k->model;
    uint32_t wide = m->hc_count * m->hidden;
    put_norm(k, &mix->norm, wide, m->norm_plus_one);
    put_matrix(k, &mix->down, m->hc_lowrank, wide);
    put_matrix(k, &mix->up, wide, m->hc_lowrank);
    if (inject)
        put_stored(k, &mix->inject, m->hc_count, wide);
}

static void put_linear(struct maker *k, struct ft_linear_weights *w)
{
    const struct ft_model *m = k->model;
    uint32_t channels = ft_model_conv_channels(m), values = m->value_head_count * m->value_dim;
    put_matrix(k, &w->qkv, channels, m->hidden);
    put_matrix(k, &w->z, values, m->hidden);
    put_stored(k, &w->b, m->value_head_count, m->hidden);
    put_stored(k, &w->a, m->value_head_count, m->hidden);
    put_matrix(k, &w->out, m->hidden, values);
    put_vector(k, &w->conv, (uint64_t)channels * m->conv_taps, taps);
    put_vector(k, &w->a_log, m->value_head_count, from_one);
    put_vector(k, &w->dt_bias, m->value_head_count,
               below_minus_two); /* the state decays by 5 - 60% a token */
    put_norm(k, &w->norm, m->value_dim, false);
}

static void put_attention(struct maker *k, struct ft_attention_weights *w, bool sparse)
{
    const struct ft_model *m = k->model;
    uint32_t heads = m->head_count * m->head_dim, kv = m->kv_head_count * m->head_dim;
    uint32_t queries = m->attention_gate ? 2 * heads : heads;
    put_matrix(k, &w->q, queries, m->hidden);
    put_matrix(k, &w->k, kv, m->hidden);
    put_matrix(k, &w->v, kv, m->hidden);
    put_matrix(k, &w->o, m->hidden, heads);
    if (m->attention_bias) {
        put_vector(k, &w->q_bias, queries, around_zero);
        put_vector(k, &w->k_bias, kv, around_zero);
        put_vector(k, &w->v_bias, kv, around_zero);
        put_vector(k, &w->o_bias, m->hidden, around_zero);
    }
    if (m->qk_norm) {
        put_norm(k, &w->q_norm, m->head_dim, m->norm_plus_one);
        put_norm(k, &w->k_norm, m->head_dim, m->norm_plus_one);
    }
    if (m->sinks)
        put_vector(k, &w->sinks, m->head_count, taps);
    if (sparse) {
        put_stored(k, &w->index_qk, (m->indexer_head_count + 1) * m->indexer_dim, m->hidden);
        put_norm(k, &w->index_q_norm, m->indexer_dim, true);
        put_norm(k, &w->index_k_norm, m->indexer_dim, true);
    }
}

static void put_ple(struct maker *k, struct ft_ple_weights *w)
{
    const struct ft_model *m = k->model;
    uint32_t wide = m->hc_count * m->hidden;
    put_matrix(k, &w->key, wide, m->ple_embed_dim);
    put_matrix(k, &w->value, m->hidden, m->ple_embed_dim);
    put_norm(k, &w->norm_key, wide, true);
    put_norm(k, &w->norm_query, wide, true);
    put_norm(k, &w->norm_conv, wide, true);
    put_vector(k, &w->conv, (uint64_t)wide * m->ple_taps, taps);
}

static void put_mlp(struct maker *k, struct ft_mlp_weights *w, uint32_t width)
{
    put_matrix(k, &w->gate, width, k->model->hidden);
    put_matrix(k, &w->up, width, k->model->hidden);
    put_matrix(k, &w->down, k->model->hidden, width);
}

/* Everything of a layer but its experts. */
static void put_layer(struct maker *k, uint32_t layer, struct ft_layer_weights *w)
{
    const struct ft_model *m = k->model;
    const struct ft_layer_spec *spec = &m->layers[layer];
    if (m->hc_count > 1) {
        put_mix(k, &w->attention_mix, true);
        put_mix(k, &w->mlp_mix, true);
    } else {
        put_norm(k, &w->attention_norm, m->hidden, m->norm_plus_one);
        put_norm(k, &w->mlp_norm, m->hidden, m->norm_plus_one);
    }
    if (spec->ple != FT_PLE_NONE)
        put_ple(k, &w->ple);
    if (spec->attention == FT_ATTENTION_LINEAR)
        put_linear(k, &w->linear);
    else
        put_attention(k, &w->attention, spec->attention == FT_ATTENTION_SPARSE);
    if (spec->dense) {
        put_mlp(k, &w->dense, m->dense_width);
        return;
    }
    put_stored(k, &w->router, m->expert_count, m->hidden);
    if (m->router_bias)
        put_vector(k, &w->router_bias, m->expert_count, around_zero);
    if (m->shared_width) {
        put_mlp(k, &w->shared, m->shared_width);
        put_stored(k, &w->shared_gate, 1, m->hidden);
    }
}

static void put_bank(struct maker *k, struct ft_layer_weights *w)
{
    const struct ft_model *m = k->model;
    uint16_t block = k->format == FT_FORMAT_FP8_BLOCK ? FP8_BLOCK : 0;
    bool has_bias = m->expert_bias && k->format != FT_FORMAT_DS_FP4;
    if (k->status != FT_OK)
        return;
    k->status = ft_expert_layout_init(&w->expert_layout, k->format, m->hidden, m->expert_width, block, block,
                                      has_bias, m->activation, m->swiglu_limit, k->err);
    if (k->status != FT_OK)
        return;
    uint64_t bytes = (uint64_t)w->expert_layout.stride * m->expert_count;
    uint64_t past = k->arena->used % 4096; /* banks are page aligned: a link may copy by pages */
    if (past)
        (void)place(k, 4096 - past);
    w->experts = place(k, bytes);
    k->sizes.expert_bytes_max = FT_MAX(k->sizes.expert_bytes_max, w->expert_layout.stride);
    k->sizes.expert_total_bytes += bytes;
    k->sizes.moe_layer_count++;
    k->sizes.expert_format = k->format;
}

/* One pass. `layers` [layer_count] is written; with the real arena it lies in it. */
static void put_all(struct maker *k, struct ft_weights *w, struct ft_layer_weights *layers)
{
    const struct ft_model *m = k->model;
    uint64_t start = k->arena->used;
    k->sizes = (struct ft_weight_sizes){.expert_format = k->format, .dense = k->dense};
    k->piece_count = 0;
    w->layers = layers;
    put_stored(k, &w->embed, m->vocab, m->hidden);
    k->sizes.embed_bytes = k->arena->used - start;
    start = k->arena->used;
    w->head = w->embed;
    if (!m->tied)
        put_matrix(k, &w->head, m->vocab, m->hidden);
    k->sizes.head_bytes = k->arena->used - start;
    start = k->arena->used;
    if (m->hc_count > 1)
        put_mix(k, &w->top_mix, false);
    else
        put_norm(k, &w->final_norm, m->hidden, m->norm_plus_one);
    for (uint32_t i = 0; i < m->layer_count; i++) {
        uint64_t before = k->arena->used;
        put_layer(k, i, &layers[i]);
        k->sizes.layer_dense_bytes[i] = k->arena->used - before;
    }
    k->sizes.dense_bytes = k->arena->used - start;
    for (uint32_t i = 0; i < m->layer_count; i++)
        if (!m->layers[i].dense)
            put_bank(k, &layers[i]);
}

/* The counting pass. *bytes of the arena, without the layers' structs. */
static int count_all(const struct ft_model *model, enum ft_format format, enum ft_dense dense,
                     struct ft_weight_sizes *sizes, uint64_t *bytes, uint32_t *pieces, struct ft_error *err)
{
    struct ft_arena counting;
    struct ft_weights weights = {0};
    struct ft_layer_weights *layers = calloc(model->layer_count + 1ull, sizeof *layers);
    if (!layers)
        return ft_error_set(err, FT_MEMORY, "no memory for %u layers", model->layer_count);
    ft_arena_count(&counting, "weights");
    struct maker k = {
        .model = model, .format = format, .dense = dense, .arena = &counting, .status = FT_OK, .err = err};
    if (format == FT_FORMAT_F32 || format >= FT_FORMAT_COUNT)
        k.status = ft_error_set(err, FT_UNSUPPORTED, "experts are not made in %s", ft_format_name(format));
    put_all(&k, &weights, layers);
    free(layers);
    *sizes = k.sizes;
    *bytes = counting.used + 2ull * 4096 * (model->layer_count + 1ull);
    *pieces = k.piece_count;
    return k.status;
}

int ft_synthetic_sizes(const struct ft_model *model, enum ft_format format, enum ft_dense dense,
                       struct ft_weight_sizes *sizes, struct ft_error *err)
{
    uint64_t bytes;
    uint32_t pieces;
    return count_all(model, format, dense, sizes, &bytes, &pieces, err);
}

/* ---- filling ---- */

typedef uint64_t lanes __attribute__((vector_size(32)));
#define STREAMS 4u

static uint64_t split_mix(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Sixteen xorshift64 generators side by side (Marsaglia, "Xorshift RNGs", 2003), seeded by splitmix64. */
static void fill(char *to, uint64_t bytes, struct pattern pattern, uint64_t seed)
{
    lanes state[STREAMS];
    uint64_t at = 0;
    for (uint32_t s = 0; s < STREAMS; s++)
        for (uint32_t i = 0; i < 4; i++)
            state[s][i] = split_mix(&seed) | 1; /* xorshift must not start at 0 */
    while (at < bytes)
        for (uint32_t s = 0; s < STREAMS && at < bytes; s++, at += sizeof(lanes)) {
            state[s] ^= state[s] << 13;
            state[s] ^= state[s] >> 7;
            state[s] ^= state[s] << 17;
            lanes word = (state[s] & pattern.keep) | pattern.set;
            memcpy(to + at, &word, FT_MIN(bytes - at, sizeof word));
        }
}

struct filling {
    const struct ft_synthetic_options *options;
    const struct ft_model *model;
    const struct ft_weights *weights;
    const struct piece *pieces;
    const struct recipe *recipes; /* [layer_count] */
    const char *base;             /* of the arena: places seed the numbers */
    uint32_t piece_count;
    uint64_t work_count; /* pieces, then experts of all layers (dense layers too: nothing to do) */
    _Atomic uint64_t next;
    _Atomic bool cancelled;
};

struct filler {
    struct filling *filling;
    uint32_t number;
    pthread_t thread;
};

static void fill_at(const struct filling *f, char *to, uint64_t bytes, struct pattern pattern)
{
    fill(to, bytes, pattern, f->options->seed * 0x9e3779b97f4a7c15u + (uint64_t)(to - f->base));
}

/* Layer by layer in turn: whoever writes a page first gives it its place. A machine whose memory is of two speeds
 * (a second socket, which a virtual machine does not show) has some of each in every layer then. */
static void fill_expert(const struct filling *f, uint64_t index)
{
    uint32_t layer = (uint32_t)(index % f->model->layer_count);
    uint64_t expert = index / f->model->layer_count;
    const struct ft_layer_weights *w = &f->weights->layers[layer];
    const struct recipe *recipe = &f->recipes[layer];
    if (f->model->layers[layer].dense)
        return;
    char *blob = (char *)(uintptr_t)w->experts + expert * w->expert_layout.stride;
    for (uint32_t i = 0; i < recipe->count; i++)
        fill_at(f, blob + recipe->sections[i].offset, recipe->sections[i].bytes, recipe->sections[i].pattern);
    if (recipe->global_offset != FT_NONE)
        memcpy(blob + recipe->global_offset, recipe->globals, sizeof recipe->globals);
}

static void *fill_main(void *argument)
{
    const struct filler *filler = argument;
    struct filling *f = filler->filling;
    if (f->options->topology)
        (void)ft_topology_bind(f->options->topology, filler->number % f->options->topology->core_count);
    for (;;) {
        /* relaxed: only the number matters; results are the starter's after the join */
        uint64_t i = atomic_fetch_add_explicit(&f->next, 1, memory_order_relaxed);
        if (i >= f->work_count)
            return NULL;
        if (f->options->go_on && !f->options->go_on()) {
            atomic_store_explicit(&f->cancelled, true, memory_order_relaxed);
            return NULL;
        }
        if (i < f->piece_count)
            fill_at(f, f->pieces[i].to, f->pieces[i].bytes, f->pieces[i].pattern);
        else
            fill_expert(f, i - f->piece_count);
    }
}

/* As many threads as can be started; one is enough. */
static int run_fillers(struct filling *f, uint32_t threads, uint32_t *started, struct ft_error *err)
{
    struct filler *fillers = calloc(threads, sizeof *fillers);
    if (!fillers)
        return ft_error_set(err, FT_MEMORY, "no memory for %u threads", threads);
    *started = 0;
    for (; *started < threads; ++*started) {
        fillers[*started] = (struct filler){.filling = f, .number = *started};
        if (pthread_create(&fillers[*started].thread, NULL, fill_main, &fillers[*started]))
            break;
    }
    for (uint32_t i = 0; i < *started; i++)
        pthread_join(fillers[i].thread, NULL);
    free(fillers);
    if (!*started)
        return ft_error_set(err, FT_SYSTEM, "no thread can be started to fill the weights");
    if (atomic_load_explicit(&f->cancelled, memory_order_relaxed))
        return ft_error_set(err, FT_CANCELLED, "interrupted");
    return FT_OK;
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int fill_all(const struct maker *k, const struct ft_synthetic_options *options,
                    const struct ft_weights *weights, struct ft_synthetic_stats *stats, struct ft_error *err)
{
    const struct ft_model *m = k->model;
    struct recipe *recipes = calloc(m->layer_count + 1ull, sizeof *recipes);
    if (!recipes)
        return ft_error_set(err, FT_MEMORY, "no memory for %u layers", m->layer_count);
    for (uint32_t i = 0; i < m->layer_count; i++)
        if (!m->layers[i].dense)
            make_recipe(&weights->layers[i].expert_layout, &recipes[i]);
    struct filling f = {.options = options,
                        .model = m,
                        .weights = weights,
                        .pieces = k->pieces,
                        .recipes = recipes,
                        .base = k->arena->base,
                        .piece_count = k->piece_count,
                        .work_count = k->piece_count + (uint64_t)m->layer_count * m->expert_count};
    uint32_t threads = options->threads    ? options->threads
                       : options->topology ? options->topology->core_count
                                           : 1;
    double begin = now_s();
    int status = run_fillers(&f, threads, &stats->threads, err);
    stats->seconds = now_s() - begin;
    stats->bytes = k->arena->used;
    free(recipes);
    return status;
}

int ft_synthetic_make(const struct ft_model *model, const struct ft_synthetic_options *options,
                      struct ft_loaded *loaded, struct ft_synthetic_stats *stats, struct ft_error *err)
{
    uint64_t bytes, struct_bytes = model->layer_count * sizeof(struct ft_layer_weights) + FT_ARENA_ALIGN;
    struct maker k = {.model = model, .format = options->format, .dense = options->dense, .err = err};
    struct ft_layer_weights *layers = NULL;
    *loaded = (struct ft_loaded){0};
    *stats = (struct ft_synthetic_stats){0};
    int status = count_all(model, options->format, options->dense, &k.sizes, &bytes, &k.piece_max, err);
    if (status == FT_OK)
        status = ft_arena_init(&loaded->arena, "synthetic weights", bytes + struct_bytes, err);
    if (status != FT_OK)
        return status;
    k.arena = &loaded->arena;
    k.pieces = malloc((k.piece_max + 1ull) * sizeof *k.pieces);
    k.status = k.pieces ? FT_ARENA_PUSH(k.arena, model->layer_count, &layers, err)
                        : ft_error_set(err, FT_MEMORY, "no memory to list what to fill");
    if (k.status == FT_OK)
        put_all(&k, &loaded->weights, layers);
    status = k.status;
    if (status == FT_OK)
        status = fill_all(&k, options, &loaded->weights, stats, err);
    loaded->sizes = k.sizes;
    free(k.pieces);
    if (status != FT_OK)
        ft_loaded_fini(loaded);
    return status;
}
