/* SPDX-License-Identifier: Apache-2.0 */
extern int ft_kernels_cpu_is_empty;
int ft_kernels_cpu_is_empty;
