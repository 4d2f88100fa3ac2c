/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.safetensors.index.json: which file of a checkpoint holds which tensor.
 *
 *   {"metadata": {...}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors", ...}}
 *
 * Keys beside weight_map are passed over. Refused: anything that is not JSON, duplicate keys, a map that is
 * absent or empty, file names that are not plain names inside the directory.
 * Source of the format: the index that the field's reference implementation writes for sharded checkpoints.
 */
#ifndef FT_IO_SHARD_INDEX_H
#define FT_IO_SHARD_INDEX_H

#include "graph/error.h"
#include "io/json_scan.h"

struct ft_shard_entry {
    struct ft_json_string name; /* of the tensor, as stored */
    uint32_t file;
};

struct ft_shard_index {
    struct ft_shard_entry
        *entries; /* [count], in the order of the file; names point into `scan` and its text */
    uint32_t count, room;
    struct ft_name_set files; /* distinct files, in the order in which they are first named */
    struct ft_json_scan scan;
};

/* `text` must outlive the index; `path` is for messages (the fuzzer's entry). Nothing is left on failure. */
int ft_shard_index_parse(struct ft_shard_index *index, const char *text, uint64_t bytes, const char *path,
                         struct ft_error *err);
void ft_shard_index_fini(struct ft_shard_index *index);

#endif
