/* SPDX-License-Identifier: Apache-2.0 */
/* offload: every missing expert is fetched, in waves when there are more misses than slots. The CPU computes
 * one only when every slot is busy or read by this very layer. */
#include "planner/place.h"
#include "planner/policies.h"

static void decide_layer(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    struct ft_place_looking *looking = state;
    uint32_t misses = ft_place_begin(&looking->place, in, out, FT_REASON_STRATEGY);
    ft_place_fetch(&looking->place, in, out, misses, FT_REASON_STRATEGY, true);
    ft_ahead_decided(&looking->ahead, in, out);
}

const struct ft_policy ft_policy_offload = {.abi = FT_POLICY_ABI,
                                            .name = "offload",
                                            .state_bytes = ft_place_looking_bytes,
                                            .init = ft_place_looking_init,
                                            .decide_layer = decide_layer,
                                            .observe = ft_place_looking_observe,
                                            .step_end = ft_place_looking_step_end,
                                            .prepare = ft_place_prepare,
                                            .looks_ahead = ft_place_looks_ahead,
                                            .look_ahead = ft_place_look_ahead};
