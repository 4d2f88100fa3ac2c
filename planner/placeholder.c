/* SPDX-License-Identifier: Apache-2.0 */
extern int ft_planner_is_empty;
int ft_planner_is_empty;
