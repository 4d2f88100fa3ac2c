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

/* Adds GPU `gpu` and the memory of it that is free now, less what the driver and libraries take later.
 * FT_UNSUPPORTED and the reason when there is none; the machine is then as before. Takes part of a second
 * where there is a GPU. */
int ft_machine_probe_gpu(struct ft_machine *machine, uint32_t gpu, struct ft_error *err);
void ft_machine_probe(struct ft_machine *machine, const struct ft_topology *topology, const char *root);

#endif
