/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A checkpoint directory seen through its headers: config.json as a model, every tensor of every shard by name.
 *
 * Opening reads headers only (fast, whatever the size of the shards) and checks them: lengths, shapes, offsets that
 * overlap, leave the file or do not match dtype x shape, duplicate names, shards that the index names and that are
 * absent. Names are stored without the prefixes `model.` / `model.language_model.`; tensors under `model.visual.` and
 * `mtp.` are dropped. Threads: after opening, read-only and shared by all.
 */
#ifndef FT_IO_CHECKPOINT_H
#define FT_IO_CHECKPOINT_H

#include "graph/error.h"
#include "graph/model.h"
#include "graph/weights.h"

struct ft_tensor {
    const char *name; /* prefix stripped */
    enum ft_dtype dtype;
    uint32_t rank;
    uint64_t shape[8];
    uint64_t bytes;
    uint64_t offset; /* from the start of the file */
    uint32_t file;   /* index into the checkpoint's files */
};

struct ft_checkpoint;

/* Opens DIR: config.json, then shards by model.safetensors.index.json, or model.safetensors, or every
 * model*.safetensors when there is no index. */
int ft_checkpoint_open(struct ft_checkpoint **out, const char *dir, struct ft_error *err);
void ft_checkpoint_close(struct ft_checkpoint *checkpoint);

const struct ft_model *ft_checkpoint_model(const struct ft_checkpoint *checkpoint);
const char *ft_checkpoint_dir(const struct ft_checkpoint *checkpoint);
uint32_t ft_checkpoint_file_count(const struct ft_checkpoint *checkpoint);
const char *ft_checkpoint_file_path(const struct ft_checkpoint *checkpoint, uint32_t file);
uint64_t ft_checkpoint_file_bytes(const struct ft_checkpoint *checkpoint, uint32_t file);
uint32_t ft_checkpoint_tensor_count(const struct ft_checkpoint *checkpoint);
const struct ft_tensor *ft_checkpoint_tensor(const struct ft_checkpoint *checkpoint, uint32_t index);
const struct ft_tensor *ft_checkpoint_find(const struct ft_checkpoint *checkpoint, const char *name); /* or NULL */

/* Parses config.json text into a model (the fuzzer's entry). */
int ft_config_parse(struct ft_model *model, const char *json, size_t bytes, const char *name, struct ft_error *err);

#endif
