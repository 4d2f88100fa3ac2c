/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/topology.h"

#include "jobs/cgroup.h"

#include <errno.h>
#include <hwloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* hwloc 2.9 asks with ever larger masks until it gets an answer: where a sandbox forbids the question it
 * would never end. */
static int check_affinity_call(struct ft_error *err)
{
    unsigned char mask[8192]; /* 65536 CPUs */
    if (syscall(SYS_sched_getaffinity, 0, sizeof mask, mask) < 0)
        return ft_error_set(
            err, FT_SYSTEM,
            "the CPUs of this process cannot be read (sched_getaffinity: %s): a seccomp filter or a "
            "sandbox forbids it; allow that call",
            strerror(errno));
    return FT_OK;
}

static int load(hwloc_topology_t *handle, const struct ft_topology_options *options, struct ft_error *err)
{
    if (!options->synthetic && check_affinity_call(err) != FT_OK)
        return err->code;
    if (hwloc_topology_init(handle) != 0)
        return ft_error_set(err, FT_SYSTEM, "hwloc cannot start: %s", strerror(errno));
    /* Only cores, caches and NUMA nodes matter: looking for devices costs most of the load time. */
    hwloc_topology_set_all_types_filter(*handle, HWLOC_TYPE_FILTER_KEEP_NONE);
    hwloc_topology_set_type_filter(*handle, HWLOC_OBJ_CORE, HWLOC_TYPE_FILTER_KEEP_ALL);
    hwloc_topology_set_type_filter(*handle, HWLOC_OBJ_PACKAGE, HWLOC_TYPE_FILTER_KEEP_ALL);
    hwloc_topology_set_type_filter(*handle, HWLOC_OBJ_L3CACHE, HWLOC_TYPE_FILTER_KEEP_ALL);
    /* NUMA nodes smaller than a package hang on groups. */
    hwloc_topology_set_type_filter(*handle, HWLOC_OBJ_GROUP, HWLOC_TYPE_FILTER_KEEP_STRUCTURE);
    /* Count cores outside of our cpuset too: the reason shown to the user starts with the whole machine. */
    hwloc_topology_set_flags(*handle, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
    if (options->synthetic && hwloc_topology_set_synthetic(*handle, options->synthetic) != 0) {
        hwloc_topology_destroy(*handle);
        return ft_error_set(err, FT_USAGE,
                            "\"%s\" is not an hwloc synthetic topology; wanted e.g. \"core:4 pu:2\"",
                            options->synthetic);
    }
    if (hwloc_topology_load(*handle) != 0) {
        hwloc_topology_destroy(*handle);
        return ft_error_set(err, FT_SYSTEM, "hwloc cannot read this machine's topology: %s; is /sys mounted?",
                            strerror(errno));
    }
    return FT_OK;
}

/* The hardware threads that we may run on: cpuset (hwloc's "allowed") AND affinity mask. */
static int find_allowed(hwloc_topology_t handle, const struct ft_topology_options *options,
                        hwloc_bitmap_t allowed, struct ft_error *err)
{
    hwloc_bitmap_copy(allowed, hwloc_topology_get_allowed_cpuset(handle));
    hwloc_bitmap_t affinity = hwloc_bitmap_alloc();
    if (!affinity)
        return ft_error_set(err, FT_MEMORY, "no memory for a CPU mask");
    if (options->affinity) {
        if (hwloc_bitmap_list_sscanf(affinity, options->affinity) != 0) {
            hwloc_bitmap_free(affinity);
            return ft_error_set(err, FT_USAGE, "\"%s\" is not a CPU list; wanted e.g. \"0-3,8\"",
                                options->affinity);
        }
        hwloc_bitmap_and(allowed, allowed, affinity);
    } else if (!options->synthetic && hwloc_get_cpubind(handle, affinity, HWLOC_CPUBIND_PROCESS) == 0) {
        /* PROCESS: a thread that is pinned already must not make the machine look small. */
        hwloc_bitmap_and(allowed, allowed, affinity);
    }
    hwloc_bitmap_free(affinity);
    if (hwloc_bitmap_iszero(allowed))
        return ft_error_set(err, FT_USAGE, "the affinity mask %s leaves no CPU of this machine",
                            options->affinity ? options->affinity : "of this process");
    return FT_OK;
}

/* What a core's domain is called by hwloc; a machine that shows no L3 (a VM) is divided by package. */
static uint64_t domain_key(hwloc_topology_t handle, hwloc_obj_t core)
{
    hwloc_obj_t l3 = hwloc_get_ancestor_obj_by_type(handle, HWLOC_OBJ_L3CACHE, core);
    if (l3)
        return l3->logical_index;
    hwloc_obj_t package = hwloc_get_ancestor_obj_by_type(handle, HWLOC_OBJ_PACKAGE, core);
    return (1ull << 32) + (package ? package->logical_index : 0);
}

static void set_core(struct ft_topology *topology, hwloc_topology_t handle, hwloc_obj_t object,
                     unsigned os_cpu, uint64_t *last_key)
{
    struct ft_topology_core *core = &topology->cores[topology->core_count];
    uint64_t key = domain_key(handle, object);
    /* hwloc's logical order walks the tree, so the cores of one domain come in one run. */
    if (topology->core_count == 0 || key != *last_key)
        topology->l3_domain_count++;
    *last_key = key;
    int node = hwloc_bitmap_first(object->nodeset);
    core->os_cpu = os_cpu;
    core->l3_domain = topology->l3_domain_count - 1;
    core->numa_node = node < 0 ? 0 : (uint32_t)node;
    topology->core_count++;
}

/* Counts the allowed cores and keeps the first core_max of them, one hardware thread each. */
static void collect_cores(struct ft_topology *topology, hwloc_topology_t handle, hwloc_const_bitmap_t allowed,
                          uint32_t core_max)
{
    uint64_t last_key = 0;
    /* A machine that shows no cores (some VMs) has only hardware threads. */
    int depth = hwloc_get_type_or_below_depth(handle, HWLOC_OBJ_CORE);
    unsigned count = hwloc_get_nbobjs_by_depth(handle, depth);
    topology->core_count = 0;
    topology->l3_domain_count = 0;
    topology->allowed_core_count = 0;
    for (unsigned i = 0; i < count; i++) {
        hwloc_obj_t object = hwloc_get_obj_by_depth(handle, depth, i);
        int cpu = -1;
        do
            cpu = hwloc_bitmap_next(object->cpuset, cpu);
        while (cpu >= 0 && !hwloc_bitmap_isset(allowed, (unsigned)cpu));
        if (cpu < 0)
            continue;
        topology->allowed_core_count++;
        if (topology->core_count < core_max)
            set_core(topology, handle, object, (unsigned)cpu, &last_key);
    }
    topology->visible_core_count = count;
    topology->visible_cpu_count = (uint32_t)hwloc_bitmap_weight(hwloc_topology_get_complete_cpuset(handle));
}

static void write_reason(struct ft_topology *topology)
{
    char quota[32] = "none";
    if (topology->quota_cores > 0)
        snprintf(quota, sizeof quota, "%.2f", topology->quota_cores);
    snprintf(topology->usable_reason, sizeof topology->usable_reason,
             "%u cores visible, affinity %u, quota %s -> %u usable", topology->visible_core_count,
             topology->allowed_core_count, quota, topology->core_count);
}

int ft_topology_open(struct ft_topology *topology, const struct ft_topology_options *options,
                     struct ft_error *err)
{
    static const struct ft_topology_options real;
    struct ft_cgroup_limits limits;
    hwloc_topology_t handle;
    memset(topology, 0, sizeof *topology);
    if (!options)
        options = &real;
    int status = load(&handle, options, err);
    if (status != FT_OK)
        return status;
    hwloc_bitmap_t allowed = hwloc_bitmap_alloc();
    status = allowed ? find_allowed(handle, options, allowed, err)
                     : ft_error_set(err, FT_MEMORY, "no memory for a CPU mask");
    if (status == FT_OK) {
        ft_cgroup_read(options->root, &limits);
        topology->quota_cores = limits.quota_cores;
        topology->memory_limit_bytes = limits.memory_bytes;
        /* Rounded down: one thread above the quota gets all of them throttled. */
        uint32_t core_max = FT_WORKERS_MAX;
        if (limits.quota_cores > 0 && limits.quota_cores < (double)FT_WORKERS_MAX)
            core_max = limits.quota_cores < 1 ? 1 : (uint32_t)limits.quota_cores;
        collect_cores(topology, handle, allowed, core_max);
        topology->may_pin =
            !options->synthetic && core_max >= FT_MIN(topology->allowed_core_count, FT_WORKERS_MAX);
        write_reason(topology);
        topology->handle = handle;
    } else {
        hwloc_topology_destroy(handle);
    }
    hwloc_bitmap_free(allowed);
    return status;
}

void ft_topology_close(struct ft_topology *topology)
{
    if (topology->handle)
        hwloc_topology_destroy((hwloc_topology_t)topology->handle);
    topology->handle = NULL;
}

int ft_topology_workers(const struct ft_topology *topology, bool device_present, uint32_t requested,
                        uint32_t *workers, struct ft_error *err)
{
    uint32_t usable = topology->core_count;
    if (requested > usable)
        return ft_error_set(
            err, FT_USAGE,
            "%u threads were asked for, but only %u cores are usable (%s); ask for at most %u, or leave "
            "the count out",
            requested, usable, topology->usable_reason, usable);
    *workers = requested ? requested : usable - (device_present && usable > 2 ? 1 : 0);
    return FT_OK;
}

uint32_t ft_topology_service_core(const struct ft_topology *topology, uint32_t workers, uint32_t index)
{
    uint32_t spare = topology->core_count > workers ? topology->core_count - workers : 0;
    if (topology->core_count < FT_TOPOLOGY_SERVICE_CORES_MIN || index >= spare)
        return FT_NONE;
    return workers + index;
}

bool ft_topology_bind(const struct ft_topology *topology, uint32_t core)
{
    if (!topology->may_pin || core >= topology->core_count)
        return false;
    hwloc_bitmap_t cpu = hwloc_bitmap_alloc();
    if (!cpu)
        return false;
    hwloc_bitmap_only(cpu, topology->cores[core].os_cpu);
    int status = hwloc_set_cpubind((hwloc_topology_t)topology->handle, cpu, HWLOC_CPUBIND_THREAD);
    hwloc_bitmap_free(cpu);
    return status == 0;
}

void ft_topology_read_throttle(const char *root, struct ft_topology_throttle *throttle)
{
    struct ft_cgroup_limits limits;
    ft_cgroup_read(root, &limits);
    throttle->nr_periods = limits.nr_periods;
    throttle->nr_throttled = limits.nr_throttled;
}
