/* SPDX-License-Identifier: Apache-2.0 */
/* fused: every expert has a slot and is loaded before the first step. An expert that is missing all the same
 * (a start that was cut short, a slot lost to a failed copy) is fetched once, into a free slot; there is
 * always one, so this is offload by another name: a name of its own keeps traces and logs honest. */
#include "planner/place.h"
#include "planner/policies.h"

static void decide_layer(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    uint32_t misses = ft_place_begin(state, in, out, FT_REASON_STRATEGY);
    if (misses)
        ft_place_fetch(state, in, out, misses, FT_REASON_STRATEGY, true);
}

const struct ft_policy ft_policy_fused = {.abi = FT_POLICY_ABI,
                                          .name = "fused",
                                          .state_bytes = ft_place_state_bytes,
                                          .init = ft_place_init,
                                          .decide_layer = decide_layer};
