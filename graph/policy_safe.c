/* SPDX-License-Identifier: Apache-2.0 */
/* The policy that needs nothing and is never wrong: what is resident runs on the device, what is missing on
 * the CPU. */
#include "graph/policy.h"

static uint64_t state_bytes(const struct ft_policy_params *params)
{
    (void)params;
    return 0;
}

static int init(void *state, const struct ft_policy_params *params, struct ft_error *err)
{
    (void)state;
    (void)params;
    (void)err;
    return FT_OK;
}

static void decide_layer(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    (void)state;
    out->prefetch_count = 0;
    for (uint32_t i = 0; i < in->active_count; i++) {
        bool on_device = in->has_device && in->slot[i] != FT_NONE;
        out->place[i] = on_device ? FT_PLACE_DEVICE : FT_PLACE_CPU;
        out->reason[i] = on_device        ? FT_REASON_RESIDENT
                         : in->has_device ? FT_REASON_STRATEGY
                                          : FT_REASON_NO_DEVICE;
        out->victim[i] = FT_NONE;
        out->predicted_ns[i] = 0;
    }
}

const struct ft_policy ft_policy_safe = {.abi = FT_POLICY_ABI,
                                         .name = "safe",
                                         .state_bytes = state_bytes,
                                         .init = init,
                                         .decide_layer = decide_layer};
