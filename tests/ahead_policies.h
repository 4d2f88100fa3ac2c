/* SPDX-License-Identifier: Apache-2.0 */
/* Policies that copy experts ahead as often as they may: `keeping` for their next use in the same layer, `foreseeing`
 * what the next layer's router would choose; `wild` asks for what cannot be done as well. */
#ifndef FT_TESTS_AHEAD_POLICIES_H
#define FT_TESTS_AHEAD_POLICIES_H

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

/* Fetched are the misses that were copied ahead, and odd ones. */
static void decide_foreseeing(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    uint32_t taken[FT_TOPK_MAX * 2], count = 0;
    (void)state;
    ft_policy_safe.decide_layer(NULL, in, out);
    for (uint32_t i = 0; i < in->active_count; i++) {
        CHECK(!in->ahead[i] || (in->slot[i] == FT_NONE && !in->prefill));
        uint32_t victim = in->slot[i] == FT_NONE && !in->prefill && count < FT_TOPK_MAX * 2 &&
                                  (in->ahead[i] || in->expert[i] % 2)
                              ? oldest(in, taken, count)
                              : FT_NONE;
        if (victim == FT_NONE)
            continue;
        out->place[i] = FT_PLACE_FETCH;
        out->reason[i] = FT_REASON_STRATEGY;
        out->victim[i] = taken[count++] = victim;
    }
}

static bool always_looks(const void *state)
{
    (void)state;
    return true;
}

static uint32_t look_for_all(void *state, const struct ft_foreseen *foreseen, uint32_t *chosen)
{
    uint32_t count = 0;
    (void)state;
    CHECK(foreseen->room > 0 && foreseen->layer > foreseen->from);
    for (uint32_t i = 0; i < foreseen->count; i++)
        for (uint32_t j = 0; j < i; j++)
            CHECK(foreseen->expert[i] != foreseen->expert[j]);
    for (uint32_t i = 0; i < foreseen->count && count < foreseen->room; i++)
        if (foreseen->slot[i] == FT_NONE)
            chosen[count++] = i;
    return count;
}

static const struct ft_policy foreseeing = {.abi = FT_POLICY_ABI,
                                            .name = "foreseeing",
                                            .state_bytes = no_state,
                                            .init = nothing_to_init,
                                            .decide_layer = decide_foreseeing,
                                            .looks_ahead = always_looks,
                                            .look_ahead = look_for_all};

/* Experts that do not exist, that are in slots, the same one twice, more than there is room for. */
static uint32_t look_wildly(void *state, const struct ft_foreseen *foreseen, uint32_t *chosen)
{
    uint64_t *random = state;
    for (uint32_t i = 0; i < foreseen->room; i++) {
        *random = ft_splitmix64(*random);
        chosen[i] = (uint32_t)(*random >> 33) % (foreseen->count + 2);
    }
    return foreseen->room + (uint32_t)(*random % 3);
}

static const struct ft_policy wild = {.abi = FT_POLICY_ABI,
                                      .name = "wild",
                                      .state_bytes = no_state,
                                      .init = nothing_to_init,
                                      .decide_layer = decide_foreseeing,
                                      .looks_ahead = always_looks,
                                      .look_ahead = look_wildly};

#endif
