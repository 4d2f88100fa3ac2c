/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Topology: which cores this process may really use.
 *
 *     cores of the machine  ->  AND affinity mask (taskset)  ->  AND cpuset  ->  one hardware thread per core
 *                           ->  at most floor(cgroup CPU quota), at least 1   =  usable cores
 *
 * hwloc ignores the affinity mask and the quota by default; one thread above the quota throttles every thread
 * of a step, and a sibling hardware thread shares the vector units. The quota is the smallest of the whole
 * cgroup path: v1 cpu.cfs_quota_us / cpu.cfs_period_us, v2 cpu.max, hybrid layouts included. A file that is
 * missing or not what the kernel writes counts as "no limit": a container without /proc must still start.
 *
 * Units: quota in cores (1.5 = 150 ms of CPU time per 100 ms), memory in bytes.
 * Ownership: the caller owns the struct; ft_topology_close frees what hangs on it.
 * Threads: read-only after open; ft_topology_bind may be called by any thread at any time.
 * Errors: FT_SYSTEM when hwloc cannot describe the machine, FT_USAGE for a thread count above the usable
 * cores. Slow (milliseconds): call it once at start.
 */
#ifndef FT_JOBS_TOPOLOGY_H
#define FT_JOBS_TOPOLOGY_H

#include "graph/error.h"
#include "graph/types.h"

/* From here on service threads (device driver, io, server) may have cores of their own; below they float. */
#define FT_TOPOLOGY_SERVICE_CORES_MIN 8u

struct ft_topology_core {
    uint32_t os_cpu;    /* the kernel's number of the one hardware thread that we use */
    uint32_t l3_domain; /* dense from 0; cores of one domain share an L3 cache */
    uint32_t numa_node; /* the kernel's number */
};

struct ft_topology {
    uint32_t core_count;        /* usable: what a worker may be placed on; >= 1 */
    uint32_t l3_domain_count;   /* of the usable cores; >= 1 */
    uint32_t visible_cpu_count; /* hardware threads of the machine */
    uint32_t visible_core_count;
    uint32_t allowed_core_count; /* after affinity and cpuset, before the quota */
    double quota_cores;          /* 0: no quota */
    uint64_t memory_limit_bytes; /* smallest memory limit of the cgroup path; 0: none */
    /* False when a quota, not a mask, holds us back: the cores are then shared with other containers, and
     * pinning every one of them to the first cores would pile them up. Workers then float. */
    bool may_pin;
    char usable_reason[160];                       /* "2 cores visible, affinity 2, quota 1.00 -> 1 usable" */
    struct ft_topology_core cores[FT_WORKERS_MAX]; /* [core_count] neighbours first: ordered by L3 domain */
    void *handle;                                  /* hwloc's, opaque */
};

/* NULL fields mean the real machine; the others are for tests and recorded machines. */
struct ft_topology_options {
    const char *root;      /* prefix of /proc and /sys for the cgroup files; NULL or "/" = this machine */
    const char *synthetic; /* an hwloc synthetic description, "pack:2 l3:2 core:4 pu:2" */
    const char *affinity;  /* CPU list that replaces the affinity mask, "0-3,8" */
};

/* What the CPU controller of our cgroup counted; all 0 when there is none. For a warning when throttled grows. */
struct ft_topology_throttle {
    uint64_t nr_periods;
    uint64_t nr_throttled;
};

/* options may be NULL. */
int ft_topology_open(struct ft_topology *topology, const struct ft_topology_options *options,
                     struct ft_error *err);
void ft_topology_close(struct ft_topology *topology);

/* How many workers to start: `requested`, or (0 = auto) every usable core but one for the driver thread when
 * a device is present and there are more than 2. FT_USAGE when more are requested than usable. */
int ft_topology_workers(const struct ft_topology *topology, bool device_present, uint32_t requested,
                        uint32_t *workers, struct ft_error *err);
/* The core of service thread `index` when `workers` cores are taken; FT_NONE: let it float. */
uint32_t ft_topology_service_core(const struct ft_topology *topology, uint32_t workers, uint32_t index);
/* Pins the calling thread to cores[core]. False (nothing changed) when refused or when !may_pin: never fatal. */
bool ft_topology_bind(const struct ft_topology *topology, uint32_t core);
/* root as in the options. */
void ft_topology_read_throttle(const char *root, struct ft_topology_throttle *throttle);

#endif
