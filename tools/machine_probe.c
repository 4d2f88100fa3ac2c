/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/machine_probe.h"

#include "jobs/lane_cuda.h"
#include "jobs/topology.h"
#include "tools/options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Copies what follows "key ... :" in the first line of root/path that begins with key; false when there is none. */
static bool find_line(const char *root, const char *path, const char *key, char *value, size_t cap)
{
    char name[512], line[512];
    bool found = false;
    snprintf(name, sizeof name, "%s%s", root, path);
    FILE *file = fopen(name, "re");
    if (!file)
        return false;
    while (!found && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, key, strlen(key)) || !colon)
            continue;
        colon += 1 + strspn(colon + 1, " \t");
        snprintf(value, cap, "%.*s", (int)strcspn(colon, "\n"), colon);
        found = true;
    }
    fclose(file);
    return found;
}

void ft_machine_probe(struct ft_machine *machine, const struct ft_topology *topology, const char *root)
{
    char value[96];
    memset(machine, 0, sizeof *machine);
    root = root ? root : "";
    if (find_line(root, "/proc/cpuinfo", "model name", value, sizeof value))
        memcpy(machine->name, value, sizeof value);
    else
        snprintf(machine->name, sizeof machine->name, "unknown CPU");
    machine->cores_visible = topology->visible_core_count;
    machine->cores_usable = topology->core_count;
    machine->quota_cores = topology->quota_cores;
    machine->device = FT_DEVICE_NONE;
    if (find_line(root, "/proc/meminfo", "MemAvailable", value, sizeof value))
        machine->ram_bytes = strtoull(value, NULL, 10) * 1024;
    uint64_t limit = topology->memory_limit_bytes;
    if (limit && (!machine->ram_bytes || limit < machine->ram_bytes))
        machine->ram_bytes = limit;
}

/* Contexts, modules and captured steps take memory beside what the plan counts. */
#define GPU_RESERVE_BYTES (UINT64_C(512) << 20)

static int probe_gpu(uint32_t gpu, uint32_t *device_count, uint64_t *usable_bytes, struct ft_error *err)
{
    struct ft_gpu_info info;
    int status = ft_lane_cuda_find(gpu, &info, err);
    if (status != FT_OK)
        return status;
    if (info.free_bytes <= GPU_RESERVE_BYTES)
        return ft_error_set(err, FT_MEMORY,
                            "GPU %u (%s): only %.2f GB are free, other programs hold the rest", gpu,
                            info.name, (double)info.free_bytes * 1e-9);
    *device_count = info.count;
    *usable_bytes = info.free_bytes - GPU_RESERVE_BYTES;
    return FT_OK;
}

int ft_machine_probe_gpus(struct ft_machine *machine, const struct ft_option_numbers *gpus,
                          struct ft_error *err)
{
    uint32_t count = FT_MIN(FT_MAX(gpus->count, 1u), (uint32_t)FT_GPUS_MAX), device_count = 0;
    uint64_t usable[FT_GPUS_MAX];
    for (uint32_t i = 0; i < count; i++) {
        int status = probe_gpu(gpus->count ? (uint32_t)gpus->items[i] : 0, &device_count, &usable[i], err);
        if (status != FT_OK)
            return status;
    }
    machine->device = FT_DEVICE_CUDA;
    machine->device_count = device_count;
    machine->device_memory_bytes = usable[0];
    machine->gpu_count = count;
    for (uint32_t i = 0; i < count; i++) {
        machine->gpu_id[i] = gpus->count ? (uint32_t)gpus->items[i] : 0;
        machine->gpu_memory_bytes[i] = usable[i];
    }
    return FT_OK;
}
