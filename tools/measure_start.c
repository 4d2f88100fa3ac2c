/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/measure_start.h"

#include "jobs/gpu_mover.h"
#include "tools/ceilings.h"

/* Of one round; there are eight of them. The longer one has dozens of experts for each of 16 workers. */
#define SECONDS_GPU 0.1
#define SECONDS_HOST 0.01

bool ft_measure_wanted(const struct ft_plan *plan, const struct ft_machine *machine)
{
    bool known = machine->cpu_overlap_bytes_per_s > 0 && machine->link_overlap_bytes_per_s > 0;
    return plan->strategy == FT_STRATEGY_AUTO && plan->device != FT_DEVICE_NONE && !plan->deterministic &&
           !known;
}

int ft_measure_start(const struct ft_measure_options *o, struct ft_machine *machine,
                     struct ft_gpu_mover **mover, struct ft_error *err)
{
    bool gpu = o->plan->device == FT_DEVICE_CUDA;
    struct ft_ceilings c;
    *mover = NULL;
    int status =
        gpu ? ft_gpu_mover_open(mover, o->gpu, o->model, o->weights, o->link_bytes_per_s, err) : FT_OK;
    if (status != FT_OK)
        return status;
    const struct ft_mover copies = {*mover, ft_gpu_mover_copy, ft_gpu_mover_drain};
    const struct ft_ceilings_options options = {.model = o->model,
                                                .weights = o->weights,
                                                .topology = o->topology,
                                                .isa = o->isa,
                                                .device = o->plan->device,
                                                .workers = o->plan->workers,
                                                .pin = o->pin,
                                                .experts_only = true,
                                                .seconds = gpu ? SECONDS_GPU : SECONDS_HOST,
                                                .link_bytes_per_s = o->link_bytes_per_s,
                                                .mover = gpu ? &copies : NULL};
    status = ft_ceilings_measure(&options, &c, err);
    if (gpu)
        ft_gpu_mover_rest(*mover);
    if (status != FT_OK)
        return status;
    machine->cpu_expert_bytes_per_s[o->format] = c.cpu_expert_bytes_per_s;
    machine->link_bytes_per_s = c.link_bytes_per_s;
    machine->cpu_overlap_bytes_per_s = c.both_cpu_bytes_per_s;
    machine->link_overlap_bytes_per_s = c.both_link_bytes_per_s;
    return FT_OK;
}
