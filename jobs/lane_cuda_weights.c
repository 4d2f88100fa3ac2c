/* SPDX-License-Identifier: Apache-2.0 */
/* Dense weights into device memory, expert banks into pinned memory. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "jobs/lane_cuda_internal.h"

#define BOUNCE_BYTES (32u << 20)
#define ALIGN 256u /* of every tensor on the device: what vector loads and copies like best */

/* Walks the weights twice: first to count, then to copy. */
struct upload {
    struct ft_lane_cuda *lane;
    char *bounce; /* pinned [BOUNCE_BYTES] */
    char *base;   /* NULL while counting */
    uint64_t used;
    int error;
};

static void *put(struct upload *u, const void *from, uint64_t bytes)
{
    if (!from || !bytes)
        return NULL;
    char *to = u->base ? u->base + u->used : NULL;
    /* Through a buffer: a source of which a part is registered (pages that it shares with a bank) is refused. */
    for (uint64_t at = 0; to && at < bytes && !u->error; at += BOUNCE_BYTES) {
        uint64_t some = FT_MIN(bytes - at, (uint64_t)BOUNCE_BYTES);
        memcpy(u->bounce, (const char *)from + at, some);
        u->error = (int)cudaMemcpy(to + at, u->bounce, some, cudaMemcpyHostToDevice);
    }
    u->used += ft_round_up(bytes, ALIGN);
    return to;
}

static void put_vector(struct upload *u, const float **vector, uint64_t count)
{
    *vector = put(u, *vector, count * sizeof(float));
}

static void put_matrix(struct upload *u, struct ft_matrix *m)
{
    uint64_t data = 0, scale = 0;
    if (!m->data)
        return;
    bool fits = ft_matrix_bytes(m->format, m->out, m->in, m->block_out, m->block_in, &data, &scale);
    FT_ASSERT_EQ(fits, true); /* checked when it was loaded */
    m->data = put(u, m->data, data);
    m->scale = put(u, m->scale, scale);
}

static void put_mix(struct upload *u, struct ft_mix_weights *mix, const struct ft_model *m)
{
    put_vector(u, &mix->norm, (uint64_t)m->hc_count * m->hidden);
    put_matrix(u, &mix->down);
    put_matrix(u, &mix->up);
    put_matrix(u, &mix->inject);
}

static void put_mlp(struct upload *u, struct ft_mlp_weights *mlp)
{
    put_matrix(u, &mlp->gate);
    put_matrix(u, &mlp->up);
    put_matrix(u, &mlp->down);
}

static void put_attention(struct upload *u, struct ft_attention_weights *w, const struct ft_model *m)
{
    put_matrix(u, &w->q);
    put_matrix(u, &w->k);
    put_matrix(u, &w->v);
    put_matrix(u, &w->o);
    put_vector(u, &w->q_bias, w->q.out);
    put_vector(u, &w->k_bias, w->k.out);
    put_vector(u, &w->v_bias, w->v.out);
    put_vector(u, &w->o_bias, w->o.out);
    put_vector(u, &w->q_norm, m->head_dim);
    put_vector(u, &w->k_norm, m->head_dim);
    put_vector(u, &w->sinks, m->head_count);
    put_matrix(u, &w->index_qk);
    put_vector(u, &w->index_q_norm, m->indexer_dim);
    put_vector(u, &w->index_k_norm, m->indexer_dim);
}

static void put_linear(struct upload *u, struct ft_linear_weights *w, const struct ft_model *m)
{
    put_matrix(u, &w->qkv);
    put_matrix(u, &w->z);
    put_matrix(u, &w->b);
    put_matrix(u, &w->a);
    put_matrix(u, &w->out);
    put_vector(u, &w->conv, (uint64_t)ft_model_conv_channels(m) * m->conv_taps);
    put_vector(u, &w->a_log, m->value_head_count);
    put_vector(u, &w->dt_bias, m->value_head_count);
    put_vector(u, &w->norm, m->value_dim);
}

static void put_ple(struct upload *u, struct ft_ple_weights *w, const struct ft_model *m)
{
    uint64_t wide = (uint64_t)m->hc_count * m->hidden;
    put_matrix(u, &w->key);
    put_matrix(u, &w->value);
    put_vector(u, &w->norm_key, wide);
    put_vector(u, &w->norm_query, wide);
    put_vector(u, &w->norm_conv, wide);
    put_vector(u, &w->conv, wide * m->ple_taps);
}

static void put_all(struct upload *u, struct ft_weights *w, struct ft_layer_weights *layers)
{
    const struct ft_model *m = u->lane->step->model;
    const struct ft_weights *from = u->lane->options.weights;
    const struct ft_lane_cuda *lane = u->lane;
    bool tied = from->head.data == from->embed.data;
    *w = (struct ft_weights){.layers = layers};
    if (lane->first == lane) {
        w->embed = from->embed;
        if (!lane->embed_mapped)
            put_matrix(u, &w->embed);
    }
    if (!lane->next) {
        w->head = from->head;
        w->final_norm = from->final_norm;
        w->top_mix = from->top_mix;
        if (tied && lane->first == lane)
            w->head = w->embed;
        else
            put_matrix(u, &w->head);
        put_vector(u, &w->final_norm, m->hidden);
        put_mix(u, &w->top_mix, m);
    }
    for (uint32_t i = lane->layer_begin; i < lane->layer_end; i++) {
        struct ft_layer_weights *l = &layers[i];
        *l = from->layers[i];
        put_vector(u, &l->attention_norm, m->hidden);
        put_vector(u, &l->mlp_norm, m->hidden);
        put_mix(u, &l->attention_mix, m);
        put_mix(u, &l->mlp_mix, m);
        put_attention(u, &l->attention, m);
        put_linear(u, &l->linear, m);
        put_ple(u, &l->ple, m);
        put_matrix(u, &l->router);
        put_vector(u, &l->router_bias, m->expert_count);
        put_mlp(u, &l->shared);
        put_matrix(u, &l->shared_gate);
        put_mlp(u, &l->dense);
    }
}

/* The embedding is read a row at a time: unless the head of the same GPU needs it too, the GPU reads it where it
 * lies. */
static void map_embedding(struct ft_lane_cuda *lane)
{
    const struct ft_weights *w = lane->options.weights;
    const struct ft_matrix *m = &w->embed;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), data = 0, scale = 0;
    if (lane->first != lane || (w->head.data == m->data && !lane->next) ||
        !ft_matrix_bytes(m->format, m->out, m->in, m->block_out, m->block_in, &data, &scale) || scale)
        return;
    uintptr_t begin = (uintptr_t)m->data / page * page;
    uint64_t bytes = ft_round_up((uintptr_t)m->data + data - begin, page);
    if (cudaHostRegister((void *)begin, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped) !=
        cudaSuccess) {
        (void)cudaGetLastError();
        return;
    }
    lane->registered[lane->registered_count++] = (void *)begin;
    lane->embed_mapped = true;
}

int ft_cuda_upload_weights(struct ft_lane_cuda *lane, struct ft_error *err)
{
    map_embedding(lane);
    struct upload u = {.lane = lane};
    put_all(&u, &lane->weights, lane->layers);
    int status = ft_cuda_alloc(lane, FT_TIER_DEVICE, u.used, "dense weights", (void **)&u.base, err);
    if (status != FT_OK)
        return status;
    status = FT_CUDA_TRY(lane, cudaHostAlloc((void **)&u.bounce, BOUNCE_BYTES, cudaHostAllocPortable), err,
                         "a pinned buffer to copy weights through");
    if (status != FT_OK)
        return status;
    u.used = 0;
    put_all(&u, &lane->weights, lane->layers);
    (void)cudaFreeHost(u.bounce);
    return ft_cuda_check(lane, u.error, err, "copying the dense weights to the GPU");
}

/* One registration per layer: a single one of 512 GiB or more always fails. What cannot be pinned is copied
 * from pageable memory, at a fraction of the speed; the note says so. */
void ft_cuda_pin_banks(struct ft_lane_cuda *lane, const struct ft_model *m, const struct ft_weights *weights)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), pinned = 0;
    lane->banks_pinned = true;
    for (uint32_t i = 0; i < m->layer_count && lane->banks_pinned; i++) {
        const struct ft_layer_weights *w = &weights->layers[i];
        if (m->layers[i].dense || !w->experts)
            continue;
        uintptr_t begin = (uintptr_t)w->experts / page * page;
        uintptr_t end = (uintptr_t)w->experts + (uint64_t)w->expert_layout.stride * m->expert_count;
        uint64_t bytes = ft_round_up(end - begin, page);
        cudaError_t error =
            cudaHostRegister((void *)begin, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
        if (error == cudaSuccess) {
            lane->registered[lane->registered_count++] = (void *)begin;
            pinned += bytes;
            continue;
        }
        (void)cudaGetLastError();
        if (error == cudaErrorHostMemoryAlreadyRegistered) /* by somebody who keeps it pinned */
            continue;
        lane->banks_pinned = false;
        snprintf(lane->note, sizeof lane->note,
                 "experts could not be pinned (%s after %.1f GB): fetches are slow; raise the memlock limit "
                 "(ulimit -l)",
                 cudaGetErrorString(error), (double)pinned * 1e-9);
    }
}
