/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a machine is, as far as decisions need it: executors, memories, links, and what they were measured to do.
 * 0 in a measured field means "not measured". Read from a profile later; recorded machines are test data.
 */
#ifndef FT_GRAPH_MACHINE_H
#define FT_GRAPH_MACHINE_H

#include "graph/op.h"
#include "graph/types.h"

struct ft_machine {
    char name[96];
    /* CPU lanes */
    uint32_t cores_visible, cores_usable, workers;
    double quota_cores; /* 0 = no quota */
    double cpu_read_bytes_per_s;                         /* ceiling, all workers */
    double cpu_expert_bytes_per_s[FT_FORMAT_COUNT];      /* expert kernel, 1 row, all workers */
    /* device */
    enum ft_device device;
    uint32_t device_count;
    uint64_t device_memory_bytes; /* free for us, of one device; 0 = none */
    /* several GPUs, in the order in which they have the layers; 0 or 1: device_memory_bytes says all */
    uint32_t gpu_count;
    uint32_t gpu_id[FT_GPUS_MAX]; /* as the CUDA runtime counts them */
    uint64_t gpu_memory_bytes[FT_GPUS_MAX];
    double device_read_bytes_per_s;
    double link_bytes_per_s; /* RAM -> device */
    double link_latency_ns;
    double cpu_overlap_bytes_per_s, link_overlap_bytes_per_s; /* both at once */
    /* memory and disk */
    uint64_t ram_bytes; /* usable: MemAvailable, cgroup limit, whichever is smaller */
    double disk_read_bytes_per_s;
    double disk_latency_ns;
    /* fixed costs */
    double job_ns, steal_ns, wake_ns, rendezvous_ns;
};

#endif
