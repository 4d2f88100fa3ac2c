/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plan as JSON text, for people and for diff: keys always in the same order, one line each, sizes in bytes,
 * every decision with its reason. Two plans differ in text exactly where they differ in content. Ownership:
 * *text is the caller's, free() it. Errors: FT_MEMORY.
 */
#ifndef FT_PLANNER_PLAN_JSON_H
#define FT_PLANNER_PLAN_JSON_H

#include "graph/plan.h"

/* smallest: two plans of ft_plan_smallest_gpu, by enum ft_dense, of which their memory is told; NULL = none. */
int ft_plan_to_json(const struct ft_plan *plan, const struct ft_plan *smallest, char **text,
                    struct ft_error *err);

#endif
