/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fills struct ft_machine with what can be known without measuring: cores, quota, memory that may be used.
 * RAM = the smaller of MemAvailable and the cgroup's limit. Bandwidths stay 0 ("not measured").
 * Reads /proc under `root` (NULL or "" = this machine; tests give a directory).
 */
#ifndef FT_TOOLS_MACHINE_PROBE_H
#define FT_TOOLS_MACHINE_PROBE_H

#include "graph/machine.h"

struct ft_topology;

void ft_machine_probe(struct ft_machine *machine, const struct ft_topology *topology, const char *root);

#endif
