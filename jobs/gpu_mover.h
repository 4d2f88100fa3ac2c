/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a GPU and its link can do, for benchmarks and for the numbers that `auto` decides by: copies of
 * experts as the GPU lane makes them, and plain reads of device memory.
 *
 * Opening pins the expert banks; while the mover lives, sessions find them pinned. Threads: one at a time.
 */
#ifndef FT_JOBS_GPU_MOVER_H
#define FT_JOBS_GPU_MOVER_H

#include "graph/error.h"
#include "graph/model.h"
#include "graph/weights.h"

struct ft_gpu_mover;

/* link_bytes_per_s: throttle, 0 = none. FT_UNSUPPORTED without a GPU, FT_MEMORY when the banks cannot be pinned. */
int ft_gpu_mover_open(struct ft_gpu_mover **out, uint32_t gpu, const struct ft_model *model,
                      const struct ft_weights *weights, double link_bytes_per_s, struct ft_error *err);
void ft_gpu_mover_close(struct ft_gpu_mover *mover);
/* Queues the copy of `bytes` bytes of a bank; drain waits for all of them. context: the mover. */
void ft_gpu_mover_copy(void *context, const void *from, uint64_t bytes);
void ft_gpu_mover_drain(void *context);
/* Measuring is over: gives the device memory back, keeps the banks pinned. Only close may follow. */
void ft_gpu_mover_rest(struct ft_gpu_mover *mover);
/* Bytes per second of reading device memory, and of one long copy from pinned memory (the link's linear speed). */
int ft_gpu_mover_measure(struct ft_gpu_mover *mover, double *device_read, double *link_linear,
                         struct ft_error *err);

#endif
