/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: every missing expert is computed on the CPU lanes; what happens to be resident runs on the device. */
#include "planner/place.h"
#include "planner/policies.h"

static void decide_layer(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    ft_place_begin(state, in, out, FT_REASON_STRATEGY);
}

const struct ft_policy ft_policy_cpu = {.abi = FT_POLICY_ABI,
                                        .name = "cpu",
                                        .state_bytes = ft_place_state_bytes,
                                        .init = ft_place_init,
                                        .decide_layer = decide_layer};
