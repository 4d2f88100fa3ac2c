/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One file in the safetensors format: its header, and small files whole.
 *
 *   | u64 n, little endian | JSON header, n bytes | tensor data, data_offsets count from here |
 *
 * Checked: n against the file and 100 MB; names, dtypes, shapes, offsets; bytes = shape x dtype; ranges
 * inside the file that do not overlap. Holes and trailing bytes are tolerated. Duplicate keys are refused.
 * Source of the format: the safetensors project's format description.
 */
#ifndef FT_IO_SAFETENSORS_H
#define FT_IO_SAFETENSORS_H

#include "io/checkpoint.h"

#define FT_SAFETENSORS_HEADER_MAX 100000000ull /* bytes; the format's own limit */

/* Header of one file. Names are as stored, prefix included. A dtype that ft does not know is FT_DTYPE_COUNT:
 * that is an error only for who needs the tensor. Owns its arrays. */
struct ft_safetensors {
    struct ft_tensor *tensors; /* [count], in the order of their offsets; `file` is 0 */
    uint32_t count;
    uint64_t file_bytes;
    char *names; /* pool behind tensors[].name */
};

/* Reads and checks the header of `path`; on failure nothing is left allocated. */
int ft_safetensors_open(struct ft_safetensors *st, const char *path, struct ft_error *err);
/* The same from memory: `data` holds the first `bytes` of a file of `file_bytes`, at least the whole header
 * (the fuzzer's entry). `path` is for messages. */
int ft_safetensors_parse(struct ft_safetensors *st, const char *data, uint64_t bytes, uint64_t file_bytes,
                         const char *path, struct ft_error *err);
void ft_safetensors_close(struct ft_safetensors *st);

/* A named array in memory. */
struct ft_array {
    const char *name;
    enum ft_dtype dtype;
    uint32_t rank;
    uint64_t shape[8];
    const void *data; /* row-major, little endian */
};

/* Writes the arrays to `path`, replacing it atomically. FT_FORMAT for an array without name or with an
 * impossible shape. */
int ft_safetensors_write(const char *path, const struct ft_array *arrays, uint32_t count,
                         struct ft_error *err);

/* Every array of a file in memory. Owns `block`; data of each array is 8-byte aligned. */
struct ft_arrays {
    struct ft_array *items; /* [count] */
    uint32_t count;
    struct ft_safetensors header;
    void *block;
};
/* Refuses files above `bytes_max`, and dtypes that ft does not know. */
int ft_safetensors_read(struct ft_arrays *arrays, const char *path, uint64_t bytes_max, struct ft_error *err);
const struct ft_array *ft_arrays_find(const struct ft_arrays *arrays, const char *name); /* or NULL */
void ft_arrays_fini(struct ft_arrays *arrays);

/* Elements of a shape, and their bytes; false on overflow. */
bool ft_shape_count(const uint64_t *shape, uint32_t rank, uint64_t *count);
/* "[64, 128]" into text. */
void ft_shape_print(const uint64_t *shape, uint32_t rank, char *text, size_t text_bytes);

#endif
