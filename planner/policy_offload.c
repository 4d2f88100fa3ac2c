/* SPDX-License-Identifier: Apache-2.0 */
/* offload: every missing expert is fetched, in waves when there are more misses than slots. The CPU computes
 * one only when every slot is busy or read by this very layer. */
#include "planner/place.h"
#include "planner/policies.h"

static void decide_layer(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    uint32_t misses = ft_place_begin(state, in, out, FT_REASON_STRATEGY);
    ft_place_fetch(state, in, out, misses, FT_REASON_STRATEGY, true);
}

const struct ft_policy ft_policy_offload = {.abi = FT_POLICY_ABI,
                                            .name = "offload",
                                            .state_bytes = ft_place_state_bytes,
                                            .init = ft_place_init,
                                            .decide_layer = decide_layer,
                                            .prepare = ft_place_prepare};
