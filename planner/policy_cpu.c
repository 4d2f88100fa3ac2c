/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: every missing expert is computed on the CPU lanes; what happens to be resident runs on the device. What is foreseen
 * is left to the workers, who warm their caches with it. */
#include "planner/place.h"
#include "planner/policies.h"

static void decide_layer(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    ft_place_begin(&((struct ft_place_looking *)state)->place, in, out, FT_REASON_STRATEGY);
}

const struct ft_policy ft_policy_cpu = {.abi = FT_POLICY_ABI,
                                        .name = "cpu",
                                        .state_bytes = ft_place_looking_bytes,
                                        .init = ft_place_looking_init,
                                        .decide_layer = decide_layer,
                                        .observe = ft_place_looking_observe,
                                        .step_end = ft_place_looking_step_end,
                                        .looks_ahead = ft_place_looks_ahead};
