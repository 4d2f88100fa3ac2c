/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bind half of loading: from a checkpoint's headers to a list of parts and the place of every weight.
 *
 *   ft_bind_open     checks that every needed tensor is there with the right shape and dtype, decides the format of
 *                    every matrix from its own tensors, lays out the arena, lists the parts. Reads no tensor data.
 *   ft_bind_place    writes struct ft_weights and its layers into the arena, pointing into the arena
 *   ft_bind_apply    puts bytes that were read where they belong, converting and checking them
 *
 * Arena (offsets from its page-aligned base):
 *
 * | struct ft_weights | layers [layer_count] | dense: matrices and f32 vectors, 64-byte aligned | bank of layer 0 | ...
 *
 * Banks are page aligned. Gaps between parts stay as they were mapped (zero). Order: place first, then apply
 * (a part may fill the `global` field of a matrix inside the placed structs), then copy struct ft_weights
 * from the base.
 *
 * A matrix of bf16, f16 or f32 whose use is in fp8_uses (mask of enum ft_dense_use) has the place of its
 * fp8_block form alone; the bands of rows that are under way (as many as reads in flight touch) are the only
 * memory beside the arena.
 *
 * A part is one contiguous range of a file. Parts are sorted by (file, offset) and do not overlap in the
 * source; many are adjacent and some are 2 or 4 bytes long (scalar scales), so read runs of them with one
 * request, not one by one.
 *
 * Threads: read-only after open; ft_bind_apply may run at the same time for different pieces.
 */
#ifndef FT_IO_BIND_H
#define FT_IO_BIND_H

#include "graph/weights.h"
#include "io/checkpoint.h"

/* How bytes of a part become bytes in the arena. */
enum ft_load_convert {
    FT_LOAD_COPY,
    FT_LOAD_BF16_TO_F32,
    FT_LOAD_F16_TO_F32,
    FT_LOAD_F32_RECIPROCAL, /* global scales that are stored as their inverse */
    FT_LOAD_BF16_RECIPROCAL,
    FT_LOAD_CONVERT_COUNT
};

/* What is looked for while bytes pass: NaN and Inf of this element type. */
enum ft_load_check {
    FT_LOAD_CHECK_NONE, /* packed e2m1: every bit pattern is a number */
    FT_LOAD_CHECK_F32,
    FT_LOAD_CHECK_BF16,
    FT_LOAD_CHECK_F16,
    FT_LOAD_CHECK_E4M3,
    FT_LOAD_CHECK_E8M0,
    FT_LOAD_CHECK_COUNT
};

struct ft_load_part {
    uint64_t offset;          /* source: from the start of the file */
    uint64_t bytes;           /* source bytes */
    uint64_t destination;     /* offset in the arena */
    uint64_t destination_odd; /* rows 1, 3, 5 ... go here when row_bytes is set */
    uint32_t
        row_bytes;   /* source bytes of one row; rows alternate between the two destinations. 0 = one place */
    uint32_t file;   /* of the checkpoint */
    uint32_t tensor; /* of the checkpoint, for messages */
    uint8_t unit_bytes; /* pieces begin and end at multiples of this inside the part: 1, 2 or 4 */
    uint8_t convert;    /* enum ft_load_convert */
    uint8_t check;      /* enum ft_load_check */
    uint32_t quantised; /* 1 + number of the matrix that it is quantised to; 0: placed as it is */
};

struct ft_bind;

/* FT_FORMAT naming tensor, file, found and wanted; FT_UNSUPPORTED for mixed formats; nothing is left on failure. */
int ft_bind_open(struct ft_bind **out, const struct ft_checkpoint *checkpoint, uint32_t fp8_uses,
                 struct ft_error *err);
void ft_bind_close(struct ft_bind *bind);

const struct ft_weight_sizes *ft_bind_sizes(const struct ft_bind *bind);
uint64_t ft_bind_arena_bytes(const struct ft_bind *bind);
uint32_t ft_bind_part_count(const struct ft_bind *bind);
const struct ft_load_part *
ft_bind_parts(const struct ft_bind *bind);                 /* [part_count], sorted by (file, offset) */
uint64_t ft_bind_source_bytes(const struct ft_bind *bind); /* sum over the parts */

/* `base` is page aligned, zeroed, of ft_bind_arena_bytes; returns the struct ft_weights at its start. */
const struct ft_weights *ft_bind_place(const struct ft_bind *bind, char *base);

/*
 * Source bytes [from, from + bytes) of the part are at `source` (any alignment); both are multiples of
 * unit_bytes. Any order, any split; of a part that is quantised every byte exactly once: its rows gather in
 * bands of 128, and who brings the last byte of a band quantises it. FT_NUMERIC naming the tensor and the
 * element when NaN or Inf is met.
 */
int ft_bind_apply(const struct ft_bind *bind, const struct ft_load_part *part, const void *source,
                  uint64_t from, uint64_t bytes, char *base, struct ft_error *err);

/* ft_load_sizes() of io/load.h is implemented by bind.c: open, copy the sizes, close. */

#endif
