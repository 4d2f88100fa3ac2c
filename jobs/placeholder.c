/* SPDX-License-Identifier: Apache-2.0 */
extern int ft_jobs_is_empty;
int ft_jobs_is_empty;
