/* SPDX-License-Identifier: Apache-2.0 */
/* The GPU lane of a build without a CUDA toolkit: says so. */
#include "jobs/gpu_mover.h"
#include "jobs/lane_cuda.h"

#include <stddef.h>
#include <string.h>

int ft_lane_cuda_find(uint32_t gpu, struct ft_gpu_info *info, struct ft_error *err)
{
    (void)gpu;
    memset(info, 0, sizeof *info);
    return ft_error_set(err, FT_UNSUPPORTED,
                        "this build has no CUDA lane (it was made without a CUDA toolkit): use --device host "
                        "or --device none; "
                        "ft plan needs no GPU where --vram says how large it is");
}

int ft_lane_cuda_open(struct ft_lane_cuda **out, uint32_t gpu, struct ft_error *err)
{
    struct ft_gpu_info info;
    *out = NULL;
    return ft_lane_cuda_find(gpu, &info, err);
}

/* What follows is never reached: no lane was opened. */
int ft_lane_cuda_join(struct ft_lane_cuda *lane, uint32_t gpu, struct ft_error *err)
{
    (void)lane, (void)gpu;
    return ft_error_set(err, FT_INTERNAL, "there is no CUDA lane");
}

int ft_lane_cuda_arena(struct ft_lane_cuda *lane, uint32_t at, struct ft_arena *arena, enum ft_tier tier,
                       uint64_t bytes, struct ft_error *err)
{
    (void)lane, (void)at, (void)arena, (void)tier, (void)bytes;
    return ft_error_set(err, FT_INTERNAL, "there is no CUDA lane");
}

int ft_lane_cuda_reserve(struct ft_lane_cuda *lane, struct ft_arena *arena, uint64_t bytes,
                         struct ft_error *err)
{
    (void)lane, (void)arena, (void)bytes;
    return ft_error_set(err, FT_INTERNAL, "there is no CUDA lane");
}

int ft_lane_cuda_spread(struct ft_lane_cuda *lane, enum ft_cuda_spread which, void *base, uint64_t bytes,
                        uint32_t count, const uint64_t *part_bytes, struct ft_error *err)
{
    (void)lane, (void)which, (void)base, (void)bytes, (void)count, (void)part_bytes;
    return ft_error_set(err, FT_INTERNAL, "there is no CUDA lane");
}

const struct ft_memory *ft_lane_cuda_memory(const struct ft_lane_cuda *lane)
{
    (void)lane;
    return &ft_memory_host;
}

int ft_lane_cuda_start(struct ft_lane_cuda *lane, struct ft_step *step,
                       const struct ft_lane_cuda_options *options, struct ft_error *err)
{
    (void)lane, (void)step, (void)options;
    return ft_error_set(err, FT_INTERNAL, "there is no CUDA lane");
}

void ft_lane_cuda_stop(struct ft_lane_cuda *lane)
{
    (void)lane;
}

void ft_lane_cuda_close(struct ft_lane_cuda *lane)
{
    (void)lane;
}

void ft_lane_cuda_map_changed(struct ft_lane_cuda *lane)
{
    (void)lane;
}

const char *ft_lane_cuda_note(const struct ft_lane_cuda *lane)
{
    (void)lane;
    return "";
}

int ft_gpu_mover_open(struct ft_gpu_mover **out, uint32_t gpu, const struct ft_model *model,
                      const struct ft_weights *weights, double link_bytes_per_s, struct ft_error *err)
{
    struct ft_gpu_info info;
    (void)model, (void)weights, (void)link_bytes_per_s;
    *out = NULL;
    return ft_lane_cuda_find(gpu, &info, err);
}

void ft_gpu_mover_close(struct ft_gpu_mover *mover)
{
    (void)mover;
}

void ft_gpu_mover_copy(void *context, const void *from, uint64_t bytes)
{
    (void)context, (void)from, (void)bytes;
}

void ft_gpu_mover_drain(void *context)
{
    (void)context;
}

void ft_gpu_mover_rest(struct ft_gpu_mover *mover)
{
    (void)mover;
}

int ft_gpu_mover_measure(struct ft_gpu_mover *mover, double *device_read, double *link_linear,
                         struct ft_error *err)
{
    (void)mover;
    *device_read = *link_linear = 0;
    return ft_error_set(err, FT_INTERNAL, "there is no CUDA lane");
}
