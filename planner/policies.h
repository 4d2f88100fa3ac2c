/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The list of placement policies (policies.def), by name and by strategy. To add one: write
 * planner/policy_<name>.c (policy_template.c is the start), add a line to policies.def. Threads: constant
 * data.
 */
#ifndef FT_PLANNER_POLICIES_H
#define FT_PLANNER_POLICIES_H

#include "graph/policy.h"

#define X(name, text) extern const struct ft_policy ft_policy_##name;
#include "planner/policies.def"
#undef X

uint32_t ft_policies_count(void);
const struct ft_policy *ft_policies_get(uint32_t index);
const char *ft_policies_text(uint32_t index); /* what it does, one line */
/* NULL: no such policy. "safe" is found too. */
const struct ft_policy *ft_policies_find(const char *name);
/* FT_USAGE: a strategy without one. */
int ft_policies_find_for(const struct ft_policy **policy, enum ft_strategy strategy, struct ft_error *err);

#endif
