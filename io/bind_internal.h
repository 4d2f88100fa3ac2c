/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by bind*.c: one walk over the weights of a model.
 *
 * The walk runs twice. Listing: offsets are handed out, parts are recorded, pointers count from 0. Placing:
 * the same walk over the same headers hands out the same offsets, and pointers count from the arena's base.
 */
#ifndef FT_IO_BIND_INTERNAL_H
#define FT_IO_BIND_INTERNAL_H

#include "graph/arena.h"
#include "io/bind.h"

struct ft_quantiser; /* bind_quantise.c */

struct ft_bind {
    const struct ft_checkpoint *checkpoint; /* not owned */
    struct ft_weight_sizes sizes;
    uint64_t arena_bytes, source_bytes;
    struct ft_load_part *parts; /* [part_count] */
    uint32_t part_count, part_room;
    struct ft_quantiser *quantiser; /* NULL: nothing is quantised */
    uint32_t fp8_uses;              /* mask of enum ft_dense_use: quantised */
    bool sizes_only;                /* everything is checked, but no part is recorded */
};

struct ft_binder {
    struct ft_bind *bind; /* receives parts and sizes; NULL while placing */
    const struct ft_checkpoint *checkpoint;
    const struct ft_model *model;
    char
        *block; /* struct ft_weights and its layers: scratch while listing, the arena's start while placing */
    uintptr_t base; /* address of the arena; 0 while listing */
    uint32_t fp8_uses;
    uint64_t end; /* arena bytes handed out; sticks at UINT64_MAX */
    struct ft_error *err;
};

/* The tensors that make one matrix, found and checked. */
struct ft_matrix_source {
    enum ft_format format;
    const struct ft_tensor *data, *scale, *global; /* NULL where the format has none */
    bool reciprocal;                               /* the stored global is 1 / global */
};

#define FT_BINDER_NAME_BYTES 256

/* bind_tensor.c */
/* prefix and suffix into `name` of FT_BINDER_NAME_BYTES; ours are far shorter. */
void ft_binder_join(char *name, const char *prefix, const char *suffix);
uint64_t ft_binder_take(struct ft_binder *b, uint64_t bytes, uint64_t align);
const void *ft_binder_pointer(const struct ft_binder *b, uint64_t offset);
/* The tensor `prefix` `suffix`, or NULL. */
const struct ft_tensor *ft_binder_find(const struct ft_binder *b, const char *prefix, const char *suffix);
/* The same, which must be there with this shape and one of the dtypes (bits of enum ft_dtype). */
int ft_binder_need(const struct ft_binder *b, const char *prefix, const char *suffix, uint32_t dtypes,
                   const uint64_t *shape, uint32_t rank, const struct ft_tensor **tensor);
/* Records a part; `part` has all but tensor and file. Nothing while placing. */
int ft_binder_add(struct ft_binder *b, const struct ft_tensor *tensor, struct ft_load_part part);
/* A whole floating-point tensor, or the range [from, from + bytes) of it, as f32 at `destination`. */
int ft_binder_add_f32(struct ft_binder *b, const struct ft_tensor *tensor, uint64_t from, uint64_t bytes,
                      uint64_t destination);
int ft_binder_vector(struct ft_binder *b, const char *prefix, const char *suffix, const uint64_t *shape,
                     uint32_t rank, const float **out);
/* Finds the tensors of the projection `prefix` (without ".weight") and checks them. */
int ft_binder_resolve(const struct ft_binder *b, const char *prefix, uint32_t out, uint32_t in,
                      struct ft_matrix_source *source);
/* Records the parts of a matrix at these arena offsets. */
int ft_binder_add_matrix(struct ft_binder *b, const struct ft_matrix_source *source, uint64_t data_at,
                         uint64_t scale_at, uint64_t global_at);
int ft_binder_matrix(struct ft_binder *b, const char *prefix, uint32_t out, uint32_t in,
                     enum ft_dense_use use, struct ft_matrix *matrix);
uint16_t ft_binder_block_out(const struct ft_binder *b);
uint16_t ft_binder_block_in(const struct ft_binder *b);

#define FT_DTYPES_FLOAT (1u << FT_DTYPE_F32 | 1u << FT_DTYPE_BF16 | 1u << FT_DTYPE_F16)

/* bind_apply.c: source bytes of one element type to the arena's. */
void ft_bind_convert(enum ft_load_convert kind, const char *source, uint64_t bytes, char *to);

/* bind_quantise.c */
/* Notes that the matrix [out, in], which arrives as `format` (bf16 or f32), is quantised to these places;
 * *number is what struct ft_load_part calls `quantised`. */
int ft_quantiser_add(struct ft_bind *bind, enum ft_format format, uint32_t out, uint32_t in, uint64_t data_at,
                     uint64_t scale_at, uint32_t *number, struct ft_error *err);
/* After the last add. */
int ft_quantiser_begin(struct ft_bind *bind, struct ft_error *err);
/* A piece of a part that is quantised; arguments as of ft_bind_apply, already checked. */
int ft_quantiser_apply(const struct ft_bind *bind, const struct ft_load_part *part, const char *source,
                       uint64_t from, uint64_t bytes, char *base, struct ft_error *err);
void ft_quantiser_free(struct ft_quantiser *quantiser);

/* bind_expert.c: the bank of one layer; `prefix` is "layers.N.mlp.experts". */
int ft_binder_experts(struct ft_binder *b, const char *prefix, struct ft_layer_weights *layer);

#endif
