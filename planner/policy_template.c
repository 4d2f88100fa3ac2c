/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A place to start a policy of your own: copy this file, rename, add one line to policies.def. It fetches
 * experts that were used in the last WINDOW steps and computes the others on the CPU: an expert seen lately
 * is likely to be hit again, one seen for the first time is cheaper to compute where it lies.
 *
 * Rules (graph/policy.h): the answer depends on `in` and your own state alone; no clock, lock, allocation or
 * I/O; every choice has a reason. ft_policy_check_answer() repairs mistakes, and test_planner_policies counts
 * the repairs.
 */
#include "planner/place.h"
#include "planner/policies.h"

#define WINDOW 8u

/* `state` is zeroed memory of state_bytes(); embed struct ft_place_state first when you add fields of your own. */
static void decide_layer(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    struct ft_place_state *place = state;
    /* resident -> device, everything else -> CPU; the misses come back sorted, most recently used first */
    uint32_t misses = ft_place_begin(place, in, out, FT_REASON_STRATEGY), recent = 0;
    while (recent < misses) {
        uint32_t i = ft_pick_index(&place->misses, recent);
        if (in->last_used[i] == 0 || in->step - in->last_used[i] > WINDOW)
            break;
        recent++;
    }
    /* the first `recent` misses become fetches; those that find no slot stay on the CPU (reuse = false) */
    ft_place_fetch(place, in, out, recent, FT_REASON_SHARE, false);
}

/* Optional hooks, NULL here: observe() hears of every finished job, step_end() of every step, look_ahead() says what to copy
 * for the next layer (struct ft_place_looking has all three). */
const struct ft_policy ft_policy_template = {.abi = FT_POLICY_ABI,
                                             .name = "template",
                                             .state_bytes = ft_place_state_bytes,
                                             .init = ft_place_init,
                                             .decide_layer = decide_layer};
