/* SPDX-License-Identifier: Apache-2.0 */
extern int ft_io_is_empty;
int ft_io_is_empty;
