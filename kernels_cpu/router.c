/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing: experts by router logits, blocks by indexer scores. */
#include "kernels_cpu/kernels_internal.h"

#include <math.h>
#include <string.h>

/* Ids of the k highest logits, descending; the lower id comes first among equals because ids are met in order. */
static void top_ids(const float *logits, uint32_t count, uint32_t k, uint32_t *ids)
{
    uint32_t held = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (held == k && !(logits[i] > logits[ids[k - 1]]))
            continue;
        uint32_t at = held < k ? held++ : k - 1;
        for (; at > 0 && logits[ids[at - 1]] < logits[i]; at--)
            ids[at] = ids[at - 1];
        ids[at] = i;
    }
}

bool ft_router_topk(const float *logits, uint32_t expert_count, uint32_t k, bool renormalise,
                    bool softmax_chosen, uint32_t *ids, float *weights)
{
    double all = 0, chosen = 0;
    float max = -INFINITY;
    for (uint32_t i = 0; i < expert_count; i++) {
        if (isnan(logits[i]))
            return false;
        max = logits[i] > max ? logits[i] : max;
    }
    if (!isfinite(max)) /* the softmax would be NaN */
        return false;
    top_ids(logits, expert_count, k, ids);
    for (uint32_t j = 0; j < k; j++) {
        weights[j] = expf(logits[ids[j]] - max);
        chosen += (double)weights[j];
    }
    if (!renormalise && !softmax_chosen)
        for (uint32_t i = 0; i < expert_count; i++)
            all += (double)expf(logits[i] - max);
    else
        all = chosen; /* the sum over all cancels */
    for (uint32_t j = 0; j < k; j++)
        weights[j] = (float)((double)weights[j] / all);
    return true;
}

/* Unsigned keys in the order of the floats; -0 and +0 are one key, NaN is above infinity. */
static uint32_t order_key(float value)
{
    uint32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

void ft_select_topk(const float *scores, uint32_t n, uint32_t k, uint32_t *out, uint32_t *scratch)
{
    if (!k)
        return;
    for (uint32_t i = 0; i < n; i++)
        scratch[i] = order_key(scores[i]);
    /* The k-th highest key, eight bits at a time: among keys that share the prefix, the bin where the rank falls. */
    uint32_t prefix = 0, rank = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint32_t bins[256] = {0}, bin = 255;
        uint32_t mask = shift == 24 ? 0 : UINT32_MAX << (shift + 8);
        for (uint32_t i = 0; i < n; i++)
            if ((scratch[i] & mask) == prefix)
                bins[scratch[i] >> shift & 255]++;
        for (; bin && bins[bin] < rank; bin--)
            rank -= bins[bin];
        prefix |= bin << shift;
    }
    /* `rank` keys equal to the threshold still fit: the lowest indices. */
    uint32_t held = 0;
    for (uint32_t i = 0; i < n && held < k; i++) {
        bool equal = scratch[i] == prefix && rank;
        rank -= equal;
        if (equal || scratch[i] > prefix)
            out[held++] = i;
    }
}
