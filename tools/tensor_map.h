/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A safetensors file that is written through memory: results go straight from the engine into the page cache,
 * so that logits of a long text need no buffer of their own.
 *
 *   create:  FILE.part.PID = [u64 header bytes][header JSON, padded][tensor 0][tensor 1]...   space reserved, then mapped
 *   commit:  written back and renamed to FILE
 *   abandon: FILE.part.PID is removed
 *
 * Tensors lie in the given order without gaps. Space is reserved before anything is computed: a full disk is
 * an error of create, never a SIGBUS later. Errors: FT_IO naming the file. Threads: one at a time.
 */
#ifndef FT_TOOLS_TENSOR_MAP_H
#define FT_TOOLS_TENSOR_MAP_H

#include "graph/error.h"
#include "graph/types.h"

struct ft_tensor_spec {
    char name[32];
    enum ft_dtype dtype; /* F32 or I32 */
    uint32_t rank;
    uint64_t shape[4];
};

struct ft_tensor_map {
    char *path, *part; /* malloc'ed */
    int fd;
    char *base;
    uint64_t bytes;       /* of the file */
    uint64_t data_offset; /* of tensor 0; a multiple of 64 */
};

int ft_tensor_map_create(struct ft_tensor_map *map, const char *path, const struct ft_tensor_spec *specs,
                         uint32_t count, struct ft_error *err);
/* Data of tensor `index` of the specs given to create. */
void *ft_tensor_map_data(const struct ft_tensor_map *map, const struct ft_tensor_spec *specs, uint32_t index);
int ft_tensor_map_commit(struct ft_tensor_map *map, struct ft_error *err);
void ft_tensor_map_abandon(struct ft_tensor_map *map); /* a zeroed or committed map: nothing */

#endif
