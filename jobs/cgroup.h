/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Control groups: the CPU quota, the memory limit and the throttle counters that hold for this process.
 *
 * Where our groups are mounted comes from <root>/proc/self/mountinfo (else the usual places), which groups we
 * are in from <root>/proc/self/cgroup. Every level from ours up to the mount point counts; the smallest limit
 * wins. v1, v2 and hybrid layouts are read together, since a machine may have the CPU controller in either.
 *     v1  cpu.cfs_quota_us (-1: none) / cpu.cfs_period_us    memory.limit_in_bytes
 *     v2  cpu.max "quota period", "max period"               memory.max
 * Source: Documentation/admin-guide/cgroup-v1/ and cgroup-v2.rst of the Linux kernel.
 * Units: cores, bytes. Errors: none; a file that is missing or malformed counts as "no limit".
 */
#ifndef FT_JOBS_CGROUP_H
#define FT_JOBS_CGROUP_H

#include <stdint.h>

struct ft_cgroup_limits {
    double quota_cores;    /* 0: none */
    uint64_t memory_bytes; /* 0: none */
    /* From the level that was throttled most: the quota often sits on a parent. */
    uint64_t nr_periods;
    uint64_t nr_throttled;
};

/* root: prefix of /proc and /sys; NULL or "/" for this machine. */
void ft_cgroup_read(const char *root, struct ft_cgroup_limits *limits);

#endif
