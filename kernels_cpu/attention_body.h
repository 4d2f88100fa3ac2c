/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of one query over the words of vec_*.h: softmax in one pass over keys in blocks of KEYS, keeping
 * the running maximum and sum (Milakov and Gimelshein 2018; Dao et al. 2022). The visible tokens in ascending
 * order are cut into blocks of KEYS from the first one, so the result depends on which tokens are visible,
 * never on pages, prefill chunks or what else is computed.
 */
#include "kernels_cpu/kernels_internal.h"
#include "kernels_cpu/vec_math.h"

#include <math.h>

#define KEYS 64
#define GROUP 16 /* heads at a time */

struct attention {
    const struct ft_attention_row *args;
    const float *q;
    float *out;
    uint32_t heads, key_count;
    const float *k[KEYS], *v[KEYS];
    float weight[GROUP][KEYS]; /* scores, then their exponentials */
    float max[GROUP], sum[GROUP];
};

/* Scores of 4 heads for 2 keys; heads and keys beyond the last repeat it. */
static void score_keys(struct attention *a, uint32_t head, uint32_t key)
{
    uint32_t dim = a->args->kv.head_dim, last = a->heads - 1, key2 = FT_MIN(key + 1, a->key_count - 1);
    const float *q[4], *k0 = a->k[key], *k1 = a->k[key2];
    vf acc0[4], acc1[4];
    for (uint32_t h = 0; h < 4; h++) {
        q[h] = a->q + (size_t)FT_MIN(head + h, last) * dim;
        acc0[h] = acc1[h] = vf_zero();
    }
    for (uint32_t i = 0; i < dim; i += VF) {
        vf x0 = vf_load(k0 + i), x1 = vf_load(k1 + i);
        for (uint32_t h = 0; h < 4; h++) {
            vf y = vf_load(q[h] + i);
            acc0[h] = vf_fma(x0, y, acc0[h]);
            acc1[h] = vf_fma(x1, y, acc1[h]);
        }
    }
    for (uint32_t h = 0; h < 4 && head + h <= last; h++) {
        a->weight[head + h][key] = vf_sum(acc0[h]) * a->args->scale;
        if (key2 > key)
            a->weight[head + h][key2] = vf_sum(acc1[h]) * a->args->scale;
    }
}

/* out[0 .. width * VF) of `heads` heads: out * old + sum over keys of weight * v. Both counts are constants. */
static inline __attribute__((always_inline)) void add_values(struct attention *a, uint32_t head,
                                                             uint32_t heads, uint32_t dim_begin,
                                                             uint32_t width, const float *old)
{
    vf acc[4][2];
    float *out = a->out + (size_t)head * a->args->kv.head_dim + dim_begin;
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t j = 0; j < width; j++)
            acc[h][j] =
                vf_mul(vf_load(out + (size_t)h * a->args->kv.head_dim + j * VF), vf_set1(old[head + h]));
    for (uint32_t t = 0; t < a->key_count; t++)
        for (uint32_t h = 0; h < heads; h++) {
            vf p = vf_set1(a->weight[head + h][t]);
            for (uint32_t j = 0; j < width; j++)
                acc[h][j] = vf_fma(p, vf_load(a->v[t] + dim_begin + j * VF), acc[h][j]);
        }
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t j = 0; j < width; j++)
            vf_store(out + (size_t)h * a->args->kv.head_dim + j * VF, acc[h][j]);
}

static void add_all_values(struct attention *a, const float *old)
{
    for (uint32_t i = 0; i < a->args->kv.head_dim; i += 2 * VF) {
        bool pair = i + 2 * VF <= a->args->kv.head_dim;
        uint32_t h = 0;
        for (; h + 4 <= a->heads; h += 4)
            if (pair)
                add_values(a, h, 4, i, 2, old);
            else
                add_values(a, h, 4, i, 1, old);
        for (; h < a->heads; h++)
            if (pair)
                add_values(a, h, 1, i, 2, old);
            else
                add_values(a, h, 1, i, 1, old);
    }
}

/* Takes the gathered keys into the running softmax. */
static void flush_keys(struct attention *a)
{
    float old[GROUP];
    if (!a->key_count)
        return;
    for (uint32_t h = 0; h < a->heads; h += 4)
        for (uint32_t t = 0; t < a->key_count; t += 2)
            score_keys(a, h, t);
    for (uint32_t h = 0; h < a->heads; h++) {
        float max = a->max[h];
        for (uint32_t t = 0; t < a->key_count; t++)
            max = a->weight[h][t] > max ? a->weight[h][t] : max;
        for (uint32_t t = a->key_count; t < KEYS; t++)
            a->weight[h][t] = -INFINITY;
        vf sum = vf_zero();
        for (uint32_t t = 0; t < KEYS; t += VF) {
            vf p = vf_exp(vf_sub(vf_load(a->weight[h] + t), vf_set1(max)));
            vf_store(a->weight[h] + t, p);
            sum = vf_add(sum, p);
        }
        old[h] = expf(a->max[h] - max);
        a->sum[h] = a->sum[h] * old[h] + vf_sum(sum);
        a->max[h] = max;
    }
    add_all_values(a, old);
    a->key_count = 0;
}

/* Gathers tokens [begin, end), page by page. */
static void add_tokens(struct attention *a, uint64_t begin, uint64_t end)
{
    const struct ft_kv_view *kv = &a->args->kv;
    while (begin < end) {
        uint64_t page = begin / kv->page_tokens, at = begin % kv->page_tokens;
        uint64_t stop = FT_MIN(end, (page + 1) * kv->page_tokens);
        const float *k =
            kv->pages[page] + kv->k_offset + ((size_t)a->args->kv_head * kv->page_tokens + at) * kv->head_dim;
        const float *v =
            kv->pages[page] + kv->v_offset + ((size_t)a->args->kv_head * kv->page_tokens + at) * kv->head_dim;
        for (; begin < stop; begin++, k += kv->head_dim, v += kv->head_dim) {
            a->k[a->key_count] = k;
            a->v[a->key_count] = v;
            if (++a->key_count == KEYS)
                flush_keys(a);
        }
    }
}

/* Divides by the sum, to which a sink adds its share. */
static void finish_head(struct attention *a, uint32_t h, const float *sink)
{
    uint32_t dim = a->args->kv.head_dim;
    float *out = a->out + (size_t)h * dim, scale = 1, sum = a->sum[h];
    if (sink) {
        float max = a->max[h] > *sink ? a->max[h] : *sink;
        scale = expf(a->max[h] - max);
        sum = sum * scale + expf(*sink - max);
    }
    if (sum == 0) /* nothing visible and no sink: zero, not 0 / 0 */
        return;
    for (uint32_t i = 0; i < dim; i += VF)
        vf_store(out + i, vf_div(vf_mul(vf_load(out + i), vf_set1(scale)), vf_set1(sum)));
}

static void attention_row(const struct ft_attention_row *args)
{
    struct attention a;
    uint32_t dim = args->kv.head_dim;
    if (dim % VF) {
        ft_attention_row_ref(args);
        return;
    }
    a.args = args;
    for (uint32_t head = 0; head < args->group; head += GROUP) {
        a.heads = FT_MIN(args->group - head, GROUP);
        a.q = args->q + (size_t)head * dim;
        a.out = args->out + (size_t)head * dim;
        a.key_count = 0;
        memset(a.out, 0, (size_t)a.heads * dim * sizeof(float));
        for (uint32_t h = 0; h < a.heads; h++) {
            /* Finite, so that a first block of scores -infinity does not become NaN by itself. */
            a.max[h] = -3e38f;
            a.sum[h] = 0;
        }
        for (uint32_t b = 0; args->blocks && b < args->block_count; b++)
            add_tokens(&a, (uint64_t)args->blocks[b] * args->block_tokens,
                       ((uint64_t)args->blocks[b] + 1) * args->block_tokens);
        add_tokens(&a, args->tail_begin, (uint64_t)args->position + 1);
        flush_keys(&a);
        for (uint32_t h = 0; h < a.heads; h++)
            finish_head(&a, h, args->sinks ? args->sinks + head + h : NULL);
    }
}

static void index_scores(const float *q, uint32_t head_count, uint32_t dim, float *const *pages,
                         uint64_t offset, uint32_t page_blocks, uint32_t block_count, float *out)
{
    float scale = 1.0f / sqrtf((float)dim);
    for (uint32_t b = 0; b < block_count; b++) {
        const float *key = pages[b / page_blocks] + offset + (size_t)(b % page_blocks) * dim;
        float sum = 0;
        for (uint32_t h = 0; h < head_count; h++) {
            float score = vf_dot(q + (size_t)h * dim, key, dim);
            sum += score < 0 ? 0.0f : score; /* relu that lets NaN through */
        }
        out[b] = sum * scale;
    }
}

void VEC(ft_attention_fill)(struct ft_kernels *kernels)
{
    kernels->attention_row = attention_row;
    kernels->index_scores = index_scores;
}
