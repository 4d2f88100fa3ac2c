/* SPDX-License-Identifier: Apache-2.0 */
/* A policy that copies experts ahead in every layer that misses some. */
#ifndef FT_TESTS_GPU_KEEPING_H
#define FT_TESTS_GPU_KEEPING_H

#include "graph/policy.h"
#include "tests/test.h"

static uint64_t no_state(const struct ft_policy_params *params)
{
    (void)params;
    return 64;
}

static int nothing_to_init(void *state, const struct ft_policy_params *params, struct ft_error *err)
{
    (void)state;
    (void)params;
    (void)err;
    return FT_OK;
}

/* The oldest slot that may be taken and is not in taken [count]. */
static uint32_t oldest(const struct ft_layer_in *in, const uint32_t *taken, uint32_t count)
{
    uint32_t best = FT_NONE;
    for (uint32_t s = in->slots.begin; s < in->slots.end; s++) {
        bool free = !in->slots.busy[s];
        for (uint32_t i = 0; i < in->active_count && free; i++)
            free = in->slot[i] != s;
        for (uint32_t i = 0; i < count && free; i++)
            free = taken[i] != s;
        if (free && (best == FT_NONE || in->slots.last_used[s] < in->slots.last_used[best]))
            best = s;
    }
    return best;
}

/* Every other miss is fetched; the others are computed on the CPU, and copied ahead for their next use. */
static void decide_keeping(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    uint32_t taken[FT_TOPK_MAX * 2], count = 0;
    (void)state;
    ft_policy_safe.decide_layer(NULL, in, out);
    CHECK(!in->prefill || out->prefetch_max == 0);
    for (uint32_t i = 0; i < in->active_count && !in->prefill && count < FT_TOPK_MAX; i++) {
        uint32_t victim = in->slot[i] == FT_NONE ? oldest(in, taken, count) : FT_NONE;
        if (victim == FT_NONE)
            continue;
        if (in->expert[i] % 2) {
            out->place[i] = FT_PLACE_FETCH;
            out->reason[i] = FT_REASON_STRATEGY;
            out->victim[i] = victim;
        } else if (out->prefetch_count < out->prefetch_max) {
            out->prefetch_layer[out->prefetch_count] = in->layer;
            out->prefetch_expert[out->prefetch_count] = in->expert[i];
            out->prefetch_victim[out->prefetch_count++] = victim;
        } else {
            continue;
        }
        taken[count++] = victim;
    }
}

static const struct ft_policy keeping = {.abi = FT_POLICY_ABI,
                                         .name = "keeping",
                                         .state_bytes = no_state,
                                         .init = nothing_to_init,
                                         .decide_layer = decide_keeping};

#endif
