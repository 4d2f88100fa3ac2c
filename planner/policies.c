/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/policies.h"

#include <string.h>

static const struct {
    const struct ft_policy *policy;
    const char *text;
} list[] = {
#define X(name, text) {&ft_policy_##name, text},
#include "planner/policies.def"
#undef X
};

/* Which policy serves a strategy; to try one of your own, name it here. */
static const struct ft_policy *const policy_of_strategy[FT_STRATEGY_COUNT] = {
    [FT_STRATEGY_AUTO] = &ft_policy_auto,       [FT_STRATEGY_FUSED] = &ft_policy_fused,
    [FT_STRATEGY_OFFLOAD] = &ft_policy_offload, [FT_STRATEGY_CPU] = &ft_policy_cpu,
    [FT_STRATEGY_HYBRID] = &ft_policy_hybrid,
};

uint32_t ft_policies_count(void)
{
    return sizeof list / sizeof list[0];
}

const struct ft_policy *ft_policies_get(uint32_t index)
{
    FT_ASSERT_LT(index, ft_policies_count());
    return list[index].policy;
}

const char *ft_policies_text(uint32_t index)
{
    FT_ASSERT_LT(index, ft_policies_count());
    return list[index].text;
}

const struct ft_policy *ft_policies_find(const char *name)
{
    for (uint32_t i = 0; i < ft_policies_count(); i++)
        if (strcmp(list[i].policy->name, name) == 0)
            return list[i].policy;
    return strcmp(ft_policy_safe.name, name) == 0 ? &ft_policy_safe : NULL;
}

int ft_policies_find_for(const struct ft_policy **policy, enum ft_strategy strategy, struct ft_error *err)
{
    *policy = strategy < FT_STRATEGY_COUNT ? policy_of_strategy[strategy] : NULL;
    if (*policy)
        return FT_OK;
    return ft_error_set(err, FT_USAGE, "strategy %d has no policy", (int)strategy);
}
