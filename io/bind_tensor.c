/* SPDX-License-Identifier: Apache-2.0 */
/* Finding and checking tensors, and the parts of vectors and matrices. */
#include "io/bind_internal.h"
#include "io/quantise.h"
#include "io/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_DEFAULT 128u /* of fp8_block, when the config does not state weight_block_size */

uint16_t ft_binder_block_out(const struct ft_binder *b)
{
    return (uint16_t)(b->model->block_out ? b->model->block_out : BLOCK_DEFAULT);
}

uint16_t ft_binder_block_in(const struct ft_binder *b)
{
    return (uint16_t)(b->model->block_in ? b->model->block_in : BLOCK_DEFAULT);
}

void ft_binder_join(char *name, const char *prefix, const char *suffix)
{
    size_t before = strlen(prefix), after = strlen(suffix); /* copied: this runs a million times */
    FT_ASSERT_LT(before + after, FT_BINDER_NAME_BYTES);
    memcpy(name, prefix, before);
    memcpy(name + before, suffix, after + 1);
}

uint64_t ft_binder_take(struct ft_binder *b, uint64_t bytes, uint64_t align)
{
    uint64_t at, padded;
    /* Sizes come from files: instead of wrapping, the end sticks at a value that no arena has. */
    if (!ft_add_u64(b->end, align - 1, &padded) || !ft_add_u64(at = padded / align * align, bytes, &b->end)) {
        b->end = UINT64_MAX;
        return 0;
    }
    return at;
}

const void *ft_binder_pointer(const struct ft_binder *b, uint64_t offset)
{
    return (const void *)(b->base + (uintptr_t)offset); /* while listing the value only says "there is one" */
}

const struct ft_tensor *ft_binder_find(const struct ft_binder *b, const char *prefix, const char *suffix)
{
    char name[FT_BINDER_NAME_BYTES];
    ft_binder_join(name, prefix, suffix);
    return ft_checkpoint_find(b->checkpoint, name);
}

/* "BF16 or F32" */
static void print_dtypes(uint32_t dtypes, char *text, size_t bytes)
{
    size_t at = 0;
    text[0] = '\0';
    for (uint32_t d = 0; d < FT_DTYPE_COUNT && at < bytes; d++)
        if (dtypes >> d & 1)
            at += (size_t)snprintf(text + at, bytes - at, "%s%s", at ? " or " : "",
                                   ft_dtype_name((enum ft_dtype)d));
}

static int refuse_tensor(const struct ft_binder *b, const struct ft_tensor *tensor, uint32_t dtypes,
                         const char *wanted_shape)
{
    char found[200], wanted[64];
    ft_shape_print(tensor->shape, tensor->rank, found, sizeof found);
    print_dtypes(dtypes, wanted, sizeof wanted);
    return ft_error_set(b->err, FT_FORMAT, "%s: tensor %s is %s %s, wanted %s %s",
                        ft_checkpoint_file_path(b->checkpoint, tensor->file), tensor->name,
                        tensor->dtype == FT_DTYPE_COUNT ? "of an unknown dtype,"
                                                        : ft_dtype_name(tensor->dtype),
                        found, wanted, wanted_shape);
}

static bool has_dtype(const struct ft_tensor *tensor, uint32_t dtypes)
{
    return tensor->dtype < FT_DTYPE_COUNT && (dtypes >> tensor->dtype & 1);
}

int ft_binder_need(const struct ft_binder *b, const char *prefix, const char *suffix, uint32_t dtypes,
                   const uint64_t *shape, uint32_t rank, const struct ft_tensor **tensor)
{
    char wanted[200], names[64];
    *tensor = ft_binder_find(b, prefix, suffix);
    if (*tensor && has_dtype(*tensor, dtypes) && (*tensor)->rank == rank &&
        memcmp((*tensor)->shape, shape, rank * sizeof *shape) == 0)
        return FT_OK;
    ft_shape_print(shape, rank, wanted, sizeof wanted);
    if (*tensor)
        return refuse_tensor(b, *tensor, dtypes, wanted);
    print_dtypes(dtypes, names, sizeof names);
    return ft_error_set(b->err, FT_FORMAT, "%s: tensor %s%s is missing, wanted %s %s",
                        ft_checkpoint_dir(b->checkpoint), prefix, suffix, names, wanted);
}

/* One number: shape [] or [1]. */
static int need_scalar(const struct ft_binder *b, const char *prefix, const char *suffix,
                       const struct ft_tensor **tensor)
{
    const uint32_t dtypes = 1u << FT_DTYPE_F32 | 1u << FT_DTYPE_BF16;
    *tensor = ft_binder_find(b, prefix, suffix);
    if (!*tensor)
        return ft_error_set(b->err, FT_FORMAT, "%s: tensor %s%s is missing, wanted F32 or BF16 [] or [1]",
                            ft_checkpoint_dir(b->checkpoint), prefix, suffix);
    if (!has_dtype(*tensor, dtypes) || (*tensor)->rank > 1 ||
        ((*tensor)->rank == 1 && (*tensor)->shape[0] != 1))
        return refuse_tensor(b, *tensor, dtypes, "[] or [1]");
    return FT_OK;
}

int ft_binder_add(struct ft_binder *b, const struct ft_tensor *tensor, struct ft_load_part part)
{
    struct ft_bind *bind = b->bind;
    if (!bind || !part.bytes || bind->sizes_only)
        return FT_OK;
    if (bind->part_count == bind->part_room) {
        uint32_t room = bind->part_room ? bind->part_room * 2 : 1024;
        struct ft_load_part *parts =
            room > UINT32_MAX / 4 ? NULL : realloc(bind->parts, (size_t)room * sizeof *parts);
        if (!parts)
            return ft_error_set(b->err, FT_MEMORY, "%s: no memory for the list of %u parts",
                                ft_checkpoint_dir(b->checkpoint), room);
        bind->parts = parts;
        bind->part_room = room;
    }
    part.offset += tensor->offset;
    part.file = tensor->file;
    part.tensor = (uint32_t)(tensor - ft_checkpoint_tensor(b->checkpoint, 0));
    bind->parts[bind->part_count++] = part;
    bind->source_bytes += part.bytes;
    return FT_OK;
}

/* How an element type is checked, and what it is converted by when f32 is wanted. */
static void set_dtype(struct ft_load_part *part, enum ft_dtype dtype, bool to_f32)
{
    part->unit_bytes = (uint8_t)ft_dtype_bytes(dtype);
    switch (dtype) {
    case FT_DTYPE_F32:
        part->check = FT_LOAD_CHECK_F32;
        break;
    case FT_DTYPE_BF16:
        part->check = FT_LOAD_CHECK_BF16;
        part->convert = to_f32 ? FT_LOAD_BF16_TO_F32 : FT_LOAD_COPY;
        break;
    case FT_DTYPE_F16:
        part->check = FT_LOAD_CHECK_F16;
        part->convert = to_f32 ? FT_LOAD_F16_TO_F32 : FT_LOAD_COPY;
        break;
    case FT_DTYPE_F8_E4M3:
        part->check = FT_LOAD_CHECK_E4M3;
        break;
    default: /* packed e2m1 */
        part->check = FT_LOAD_CHECK_NONE;
        break;
    }
}

int ft_binder_add_f32(struct ft_binder *b, const struct ft_tensor *tensor, uint64_t from, uint64_t bytes,
                      uint64_t destination)
{
    struct ft_load_part part = {.offset = from, .bytes = bytes, .destination = destination};
    set_dtype(&part, tensor->dtype, true);
    return ft_binder_add(b, tensor, part);
}

int ft_binder_vector(struct ft_binder *b, const char *prefix, const char *suffix, const uint64_t *shape,
                     uint32_t rank, const float **out)
{
    const struct ft_tensor *tensor;
    uint64_t count = 0;
    int status = ft_binder_need(b, prefix, suffix, FT_DTYPES_FLOAT, shape, rank, &tensor);
    if (status)
        return status;
    (void)ft_shape_count(shape, rank, &count); /* equal to the tensor's, which the header check has counted */
    uint64_t at = ft_binder_take(b, count * sizeof(float), FT_ARENA_ALIGN);
    *out = ft_binder_pointer(b, at);
    return ft_binder_add_f32(b, tensor, 0, tensor->bytes, at);
}

static int resolve_nvfp4(const struct ft_binder *b, const char *prefix, bool packed, uint32_t out,
                         uint32_t in, struct ft_matrix_source *source)
{
    const uint64_t data_shape[2] = {out, in / 2}, scale_shape[2] = {out, in / 16};
    int status;
    source->format = FT_FORMAT_NVFP4;
    source->reciprocal = packed; /* compressed-tensors stores 1 / global */
    if (in % 16)
        return ft_error_set(b->err, FT_UNSUPPORTED,
                            "%s: %s is nvfp4 with %u columns, wanted a multiple of 16",
                            ft_checkpoint_dir(b->checkpoint), prefix, in);
    if ((status = ft_binder_need(b, prefix, packed ? ".weight_packed" : ".weight", 1u << FT_DTYPE_U8,
                                 data_shape, 2, &source->data)) ||
        (status = ft_binder_need(b, prefix, ".weight_scale", 1u << FT_DTYPE_F8_E4M3, scale_shape, 2,
                                 &source->scale)))
        return status;
    return need_scalar(b, prefix, packed ? ".weight_global_scale" : ".weight_scale_2", &source->global);
}

static int resolve_fp8(const struct ft_binder *b, const char *prefix, uint32_t out, uint32_t in,
                       struct ft_matrix_source *source)
{
    const uint64_t data_shape[2] = {out, in};
    const uint64_t scale_shape[2] = {ft_div_up(out, ft_binder_block_out(b)),
                                     ft_div_up(in, ft_binder_block_in(b))};
    source->format = FT_FORMAT_FP8_BLOCK;
    int status = ft_binder_need(b, prefix, ".weight", 1u << FT_DTYPE_F8_E4M3, data_shape, 2, &source->data);
    return status ? status
                  : ft_binder_need(b, prefix, ".weight_scale_inv", 1u << FT_DTYPE_F32 | 1u << FT_DTYPE_BF16,
                                   scale_shape, 2, &source->scale);
}

int ft_binder_resolve(const struct ft_binder *b, const char *prefix, uint32_t out, uint32_t in,
                      struct ft_matrix_source *source)
{
    const uint64_t shape[2] = {out, in};
    const struct ft_tensor *packed = ft_binder_find(b, prefix, ".weight_packed");
    const struct ft_tensor *plain = ft_binder_find(b, prefix, ".weight");
    *source = (struct ft_matrix_source){0};
    if (packed && plain)
        return ft_error_set(b->err, FT_UNSUPPORTED,
                            "%s: %s has both .weight and .weight_packed: which one holds?",
                            ft_checkpoint_dir(b->checkpoint), prefix);
    if (packed || (plain && plain->dtype == FT_DTYPE_U8))
        return resolve_nvfp4(b, prefix, packed != NULL, out, in, source);
    if (plain && plain->dtype == FT_DTYPE_F8_E4M3)
        return resolve_fp8(b, prefix, out, in, source);
    int status = ft_binder_need(b, prefix, ".weight", FT_DTYPES_FLOAT, shape, 2, &source->data);
    if (status)
        return status;
    source->format = source->data->dtype == FT_DTYPE_BF16 ? FT_FORMAT_BF16 : FT_FORMAT_F32;
    return FT_OK;
}

static int add_global(struct ft_binder *b, const struct ft_matrix_source *source, uint64_t global_at)
{
    bool bf16 = source->global->dtype == FT_DTYPE_BF16;
    struct ft_load_part part = {.bytes = source->global->bytes, .destination = global_at};
    set_dtype(&part, source->global->dtype, true);
    if (source->reciprocal)
        part.convert = bf16 ? FT_LOAD_BF16_RECIPROCAL : FT_LOAD_F32_RECIPROCAL;
    return ft_binder_add(b, source->global, part);
}

int ft_binder_add_matrix(struct ft_binder *b, const struct ft_matrix_source *source, uint64_t data_at,
                         uint64_t scale_at, uint64_t global_at)
{
    struct ft_load_part part = {.bytes = source->data->bytes, .destination = data_at};
    set_dtype(&part, source->data->dtype, source->format == FT_FORMAT_F32);
    int status = ft_binder_add(b, source->data, part);
    if (!status && source->scale) {
        part = (struct ft_load_part){.bytes = source->scale->bytes, .destination = scale_at};
        set_dtype(&part, source->scale->dtype, source->format == FT_FORMAT_FP8_BLOCK);
        status = ft_binder_add(b, source->scale, part);
    }
    return status || !source->global ? status : add_global(b, source, global_at);
}

/* The parts of a matrix that is quantised while it is loaded. */
static int add_quantised(struct ft_binder *b, const struct ft_matrix_source *source, uint32_t out,
                         uint32_t in, uint64_t data_at, uint64_t scale_at)
{
    struct ft_load_part part = {.bytes = source->data->bytes, .destination = data_at};
    set_dtype(&part, source->data->dtype, source->format == FT_FORMAT_F32);
    if (!b->bind || b->bind->sizes_only || !part.bytes)
        return FT_OK;
    int status =
        ft_quantiser_add(b->bind, source->format, out, in, data_at, scale_at, &part.quantised, b->err);
    return status ? status : ft_binder_add(b, source->data, part);
}

int ft_binder_matrix(struct ft_binder *b, const char *prefix, uint32_t out, uint32_t in,
                     enum ft_dense_use use, struct ft_matrix *matrix)
{
    struct ft_matrix_source source;
    uint64_t data_bytes, scale_bytes, scale_at = 0;
    int status = ft_binder_resolve(b, prefix, out, in, &source);
    if (status)
        return status;
    bool plain = source.format == FT_FORMAT_BF16 || source.format == FT_FORMAT_F32;
    bool quantise = plain && (b->fp8_uses & FT_FP8_USES) >> use & 1,
         fp8 = source.format == FT_FORMAT_FP8_BLOCK;
    enum ft_format format = quantise ? FT_FORMAT_FP8_BLOCK : source.format;
    *matrix = (struct ft_matrix){.out = out,
                                 .in = in,
                                 .format = format,
                                 .global = 1,
                                 .block_out = quantise ? FT_QUANTISE_BLOCK
                                              : fp8    ? ft_binder_block_out(b)
                                                       : 0,
                                 .block_in = quantise ? FT_QUANTISE_BLOCK
                                             : fp8    ? ft_binder_block_in(b)
                                                      : 0};
    if (!ft_matrix_bytes(format, out, in, matrix->block_out, matrix->block_in, &data_bytes, &scale_bytes))
        return ft_error_set(b->err, FT_UNSUPPORTED, "%s: %s of %u x %u cannot be held as %s",
                            ft_checkpoint_dir(b->checkpoint), prefix, out, in, ft_format_name(format));
    uint64_t data_at = ft_binder_take(b, data_bytes, FT_ARENA_ALIGN);
    matrix->data = ft_binder_pointer(b, data_at);
    if (scale_bytes) {
        scale_at = ft_binder_take(b, scale_bytes, FT_ARENA_ALIGN);
        matrix->scale = ft_binder_pointer(b, scale_at);
    }
    if (quantise)
        return add_quantised(b, &source, out, in, data_at, scale_at);
    return ft_binder_add_matrix(b, &source, data_at, scale_at,
                                (uint64_t)((char *)&matrix->global - b->block));
}
