/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hybrid: the published rule. A given share f of the m misses is fetched, most recently used experts first,
 * the rest is computed on the CPU. Link and CPU work at rates p : c = f : (1 - f), so fetching x of m takes
 * max(x / p, (m - x) / c): x is the integer neighbour of f m where that is smaller. At a tie the larger x: a
 * fetched expert may be hit again. What the router look-ahead has copied costs neither of them anything and is
 * fetched besides.
 */
#include "planner/place.h"
#include "planner/policies.h"

static uint32_t share_of(double share, uint32_t misses)
{
    if (!(share > 0))
        return 0;
    if (share >= 1)
        return misses;
    uint32_t below = (uint32_t)(share * misses), above = FT_MIN(below + 1, misses);
    double rest_below = (misses - below) / (1 - share), rest_above = (misses - above) / (1 - share);
    double end_below = FT_MAX(below / share, rest_below), end_above = FT_MAX(above / share, rest_above);
    return end_above <= end_below ? above : below;
}

static void decide_layer(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    struct ft_place_looking *looking = state;
    struct ft_place_state *place = &looking->place;
    uint32_t misses = ft_place_begin(place, in, out, FT_REASON_SHARE_REST), ahead = place->ahead_count;
    ft_place_put_ahead_first(place, in);
    ft_place_fetch(place, in, out, ahead + share_of(place->params.fetch_share, misses - ahead),
                   FT_REASON_SHARE, false);
    ft_ahead_decided(&looking->ahead, in, out);
}

const struct ft_policy ft_policy_hybrid = {.abi = FT_POLICY_ABI,
                                           .name = "hybrid",
                                           .state_bytes = ft_place_looking_bytes,
                                           .init = ft_place_looking_init,
                                           .decide_layer = decide_layer,
                                           .observe = ft_place_looking_observe,
                                           .step_end = ft_place_looking_step_end,
                                           .prepare = ft_place_prepare,
                                           .looks_ahead = ft_place_looks_ahead,
                                           .look_ahead = ft_place_look_ahead};
