/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Picking a token. Order of the filters: repetition penalty, temperature, top-k, top-p (of what top-k left),
 * min-p. Candidates live in a heap of token ids inside index_scratch: the best are taken one by one, so a
 * full sort of the vocabulary is never paid.
 */
#include "kernels_cpu/kernels_internal.h"

#include <math.h>
#include <string.h>

/* Each distinct token of `recent` once; `seen` is a bit set of the vocabulary. */
static void penalise(float *logits, uint32_t vocab, float penalty, const uint32_t *recent, uint32_t count,
                     uint32_t *seen)
{
    memset(seen, 0, ft_div_up(vocab, 32) * sizeof *seen);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t t = recent[i];
        if (t >= vocab || (seen[t / 32] >> t % 32 & 1))
            continue;
        seen[t / 32] |= 1u << t % 32;
        logits[t] = logits[t] > 0 ? logits[t] / penalty : logits[t] * penalty;
    }
}

/* Uniform in [0, 1) from (seed, position): two rounds of splitmix64 (Steele, Lea and Flood 2014). */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static double uniform(uint64_t seed, uint64_t position)
{
    return (double)(mix(mix(seed) ^ position) >> 11) * 0x1p-53;
}

static bool is_better(const float *logits, uint32_t a, uint32_t b)
{
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift_down(const float *logits, uint32_t *heap, uint32_t count, uint32_t at)
{
    for (;;) {
        uint32_t best = at, left = 2 * at + 1, right = left + 1, id;
        if (left < count && is_better(logits, heap[left], heap[best]))
            best = left;
        if (right < count && is_better(logits, heap[right], heap[best]))
            best = right;
        if (best == at)
            return;
        id = heap[at];
        heap[at] = heap[best];
        heap[best] = id;
        at = best;
    }
}

typedef float quad __attribute__((vector_size(16)));
typedef int32_t quad_bits __attribute__((vector_size(16)));

static inline quad_bits load_bits(const float *at)
{
    quad_bits bits;
    memcpy(&bits, at, sizeof bits);
    return bits;
}

/* The first of the largest finite logits, or FT_NONE: 16 at a time, because greedy decoding waits for it. */
static uint32_t find_best(const float *logits, uint32_t vocab)
{
    const quad_bits exponent = {0x7f800000, 0x7f800000, 0x7f800000, 0x7f800000};
    const quad lowest = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    quad best[4] = {lowest, lowest, lowest, lowest};
    float max = -INFINITY;
    uint32_t i = 0;
    for (; i + 16 <= vocab; i += 16)
        for (uint32_t j = 0; j < 4; j++) {
            quad_bits bits = load_bits(logits + i + 4 * j), finite = (bits & exponent) != exponent;
            quad value = (quad)((bits & finite) | ((quad_bits)lowest & ~finite));
            quad_bits above = value > best[j];
            best[j] = (quad)(((quad_bits)value & above) | ((quad_bits)best[j] & ~above));
        }
    for (uint32_t j = 0; j < 16; j++)
        max = best[j / 4][j % 4] > max ? best[j / 4][j % 4] : max;
    for (; i < vocab; i++)
        max = isfinite(logits[i]) && logits[i] > max ? logits[i] : max;
    if (max == -INFINITY)
        return FT_NONE;
    const quad wanted = {max, max, max, max};
    for (i = 0; i + 16 <= vocab; i += 16) {
        quad_bits same = {0};
        for (uint32_t j = 0; j < 4; j++)
            same |= (quad)load_bits(logits + i + 4 * j) == wanted;
        if (same[0] | same[1] | same[2] | same[3])
            break;
    }
    while (logits[i] != max)
        i++;
    return i;
}

/* Puts finite candidates into ids; returns their count and the best one. */
static uint32_t collect(const float *logits, uint32_t vocab, uint32_t *ids, uint32_t *best)
{
    uint32_t count = 0;
    *best = FT_NONE;
    for (uint32_t i = 0; i < vocab; i++) {
        if (!isfinite(logits[i]))
            continue;
        if (*best == FT_NONE || logits[i] > logits[*best])
            *best = i;
        ids[count++] = i;
    }
    return count;
}

/* Sorts the best `wanted` of ids to the end of ids, best last, stopping early once their weights reach
 * `mass`. Returns how many are sorted. */
static uint32_t sort_best(const float *logits, uint32_t *ids, uint32_t count, uint32_t wanted, float max,
                          float temperature, double mass)
{
    uint32_t left = count, taken = 0;
    double sum = 0;
    for (uint32_t i = count / 2; i-- > 0;)
        sift_down(logits, ids, count, i);
    while (taken < wanted && left && (taken == 0 || sum < mass)) {
        uint32_t id = ids[0];
        ids[0] = ids[--left];
        ids[left] = id;
        sift_down(logits, ids, left, 0);
        sum += exp(((double)logits[id] - (double)max) / (double)temperature);
        taken++;
    }
    return taken;
}

/* The candidate where the running weight of list[0], list[step], ... passes `share` of their total; weights
 * below `floor` do not count. list points at the best candidate, whose weight is 1. */
static uint32_t draw(const float *weights, const uint32_t *list, uint32_t count, double top_p, double floor,
                     double share)
{
    double total = 0, mass = 0, at = 0;
    uint32_t kept = 0, last = list[count - 1];
    for (uint32_t i = count; i-- > 0;)
        mass += (double)weights[list[i]];
    for (uint32_t i = count; i-- > 0 && (kept == 0 || total < top_p * mass); kept++)
        total += (double)weights[list[i]];
    total = 0;
    for (uint32_t i = count; i-- > count - kept;)
        total += (double)weights[list[i]] < floor ? 0.0 : (double)weights[list[i]];
    for (uint32_t i = count; i-- > count - kept;) {
        double weight = (double)weights[list[i]];
        if (weight < floor || weight == 0)
            continue;
        at += weight;
        last = list[i];
        if (at > share * total)
            break;
    }
    return last;
}

uint32_t ft_sample_token(float *logits, uint32_t vocab, const struct ft_sampling *sampling,
                         const uint32_t *recent, uint32_t recent_count, uint64_t position,
                         uint32_t *index_scratch)
{
    uint32_t best, count, sorted;
    double total = 0;
    if (sampling->repetition_penalty != 1.0f && sampling->repetition_penalty > 0)
        penalise(logits, vocab, sampling->repetition_penalty, recent, recent_count, index_scratch);
    if (!(sampling->temperature > 0))
        return find_best(logits, vocab);
    count = collect(logits, vocab, index_scratch, &best);
    if (best == FT_NONE)
        return best;
    float max = logits[best], temperature = sampling->temperature;
    double top_p = sampling->top_p < 1.0f ? fmax((double)sampling->top_p, 0.0) : 1.0;
    uint32_t top_k = sampling->top_k ? FT_MIN(sampling->top_k, count) : count;
    double mass = INFINITY; /* of the sorted part; without top-k the nucleus bounds it */
    if (top_k == count && top_p < 1) {
        for (uint32_t i = 0; i < count; i++)
            total += exp(((double)logits[index_scratch[i]] - (double)max) / (double)temperature);
        mass = top_p * total;
        top_p = 1;
    }
    bool sort = top_k < count || mass < INFINITY;
    sorted = sort ? sort_best(logits, index_scratch, count, top_k, max, temperature, mass) : count;
    const uint32_t *list = index_scratch + (count - sorted);
    for (uint32_t i = 0; i < sorted; i++)
        logits[list[i]] = (float)exp(((double)logits[list[i]] - (double)max) / (double)temperature);
    return draw(logits, list, sorted, top_p, FT_MIN((double)sampling->min_p, 1.0),
                uniform(sampling->seed, position));
}
