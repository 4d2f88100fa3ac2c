/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fills struct ft_machine with what can be known without measuring: cores, quota, memory that may be used.
 * RAM = the smaller of MemAvailable and the cgroup's limit. Bandwidths stay 0 ("not measured").
 * Reads /proc under `root` (NULL or "" = this machine; tests give a directory).
 */
#ifndef FT_TOOLS_MACHINE_PROBE_H
#define FT_TOOLS_MACHINE_PROBE_H

#include "graph/error.h"
#include "graph/machine.h"

struct ft_topology;

struct ft_option_numbers;

/* Adds the GPUs of the list (none named: GPU 0) and the memory of each that is free now, less what the driver
 * and libraries take later. FT_UNSUPPORTED and the reason when one cannot be used; the machine is then as
 * before. Takes part of a second for each GPU. */
int ft_machine_probe_gpus(struct ft_machine *machine, const struct ft_option_numbers *gpus,
                          struct ft_error *err);
void ft_machine_probe(struct ft_machine *machine, const struct ft_topology *topology, const char *root);

#endif
