/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Banks of experts, from the three ways in which checkpoints store them:
 *
 *   one by one   experts.<e>.{gate,up,down}_proj in any format of a projection
 *   fused        experts.gate_up_proj [E, 2I, H] (gate rows, then up rows), experts.down_proj [E, H, I]: float,
 *                or e4m3 with experts.{gate_up,down}_proj_scale_inv [E, blocks, blocks]
 *   mxfp4        experts.{gate_up,down}_proj_{blocks,scales,bias}; gate and up rows interleaved (even rows gate)
 *
 * A layer has one format; layers may differ. Blocks of 16 or 32 inputs must divide the rows; the blocks of
 * fp8_block may be partial at the edges. A scale that is NaN or Inf is a damaged checkpoint and refused while
 * it is read (FT_NUMERIC, bind_apply.c); subnormal scales and zeros are numbers.
 */
#include "io/bind_internal.h"

#include <stdio.h>

/* Hands out the bank; *bank is its arena offset. */
static int take_bank(struct ft_binder *b, struct ft_layer_weights *layer, enum ft_format format,
                     bool has_bias, uint64_t *bank)
{
    const struct ft_model *m = b->model;
    bool fp8 = format == FT_FORMAT_FP8_BLOCK;
    int status = ft_expert_layout_init(&layer->expert_layout, format, m->hidden, m->expert_width,
                                       fp8 ? ft_binder_block_out(b) : 0, fp8 ? ft_binder_block_in(b) : 0,
                                       has_bias, m->activation, m->swiglu_limit, b->err);
    if (status)
        return ft_error_prepend(b->err, "%s", ft_checkpoint_dir(b->checkpoint));
    uint64_t bytes = (uint64_t)layer->expert_layout.stride * m->expert_count;
    *bank = ft_binder_take(b, bytes, 4096);
    layer->experts = ft_binder_pointer(b, *bank);
    if (b->bind) {
        struct ft_weight_sizes *sizes = &b->bind->sizes;
        if (!sizes->moe_layer_count++)
            sizes->expert_format = format;
        sizes->expert_bytes_max = FT_MAX(sizes->expert_bytes_max, layer->expert_layout.stride);
        sizes->expert_total_bytes += bytes;
    }
    return FT_OK;
}

/* Where a part of the layout lies in the arena; parts that the format lacks are never asked for. */
static uint64_t at(uint64_t blob, uint32_t offset)
{
    return offset == FT_NONE ? blob : blob + offset;
}

static int add_projection(struct ft_binder *b, const struct ft_layer_weights *layer, const char *prefix,
                          uint32_t e, uint32_t which, uint64_t blob)
{
    static const char *const names[3] = {"gate_proj", "up_proj", "down_proj"};
    const struct ft_expert_layout *l = &layer->expert_layout;
    const uint32_t data[3] = {l->gate_offset, l->up_offset, l->down_offset};
    const uint32_t scale[3] = {l->gate_scale_offset, l->up_scale_offset, l->down_scale_offset};
    struct ft_matrix_source source;
    char name[160];
    snprintf(name, sizeof name, "%s.%u.%s", prefix, e, names[which]);
    int status = ft_binder_resolve(b, name, which == 2 ? l->hidden : l->width,
                                   which == 2 ? l->width : l->hidden, &source);
    if (status)
        return status;
    if (source.format != l->format)
        return ft_error_set(
            b->err, FT_UNSUPPORTED,
            "%s: %s is %s, but %s.0.gate_proj is %s: all experts of a layer must have one format",
            ft_checkpoint_dir(b->checkpoint), name, ft_format_name(source.format), prefix,
            ft_format_name(l->format));
    return ft_binder_add_matrix(b, &source, at(blob, data[which]), at(blob, scale[which]),
                                at(blob, l->global_offset) + 4ull * which);
}

static int bind_one_by_one(struct ft_binder *b, const char *prefix, struct ft_layer_weights *layer)
{
    struct ft_matrix_source first;
    uint64_t bank;
    char name[160];
    snprintf(name, sizeof name, "%s.0.gate_proj", prefix);
    int status = ft_binder_resolve(b, name, b->model->expert_width, b->model->hidden, &first);
    if (!status)
        status = take_bank(b, layer, first.format, false, &bank);
    if (status || !b->bind)
        return status;
    for (uint32_t e = 0; e < b->model->expert_count; e++)
        for (uint32_t which = 0; which < 3; which++)
            if ((status = add_projection(b, layer, prefix, e, which,
                                         bank + (uint64_t)e * layer->expert_layout.stride)))
                return status;
    return FT_OK;
}

/* ---- fused ---- */

#define FUSED_WANTED                                                                                         \
    "fused experts are read as BF16, F16, F32, or F8_E4M3 with a _scale_inv per block; other formats are "   \
    "read one expert at a time (experts.<e>.gate_proj, up_proj, down_proj)"

/* One fused tensor [E, out, in]; scale only with fp8_block: [E, blocks of out, blocks of in]. */
struct fused {
    const struct ft_tensor *data, *scale;
    enum ft_format format;
};

static int need_fused(const struct ft_binder *b, const char *prefix, const char *suffix, uint32_t out,
                      uint32_t in, struct fused *fused)
{
    const uint32_t fp8 = 1u << FT_DTYPE_F8_E4M3;
    const uint64_t shape[3] = {b->model->expert_count, out, in};
    const uint64_t scale_shape[3] = {b->model->expert_count, ft_div_up(out, ft_binder_block_out(b)),
                                     ft_div_up(in, ft_binder_block_in(b))};
    char name[64];
    const struct ft_tensor *found = ft_binder_find(b, prefix, suffix);
    if (found && found->dtype < FT_DTYPE_COUNT && !((FT_DTYPES_FLOAT | fp8) >> found->dtype & 1))
        return ft_error_set(b->err, FT_UNSUPPORTED, "%s: tensor %s is %s: " FUSED_WANTED,
                            ft_checkpoint_file_path(b->checkpoint, found->file), found->name,
                            ft_dtype_name(found->dtype));
    *fused = (struct fused){0};
    int status = ft_binder_need(b, prefix, suffix, FT_DTYPES_FLOAT | fp8, shape, 3, &fused->data);
    if (status)
        return status;
    fused->format = fused->data->dtype == FT_DTYPE_BF16 ? FT_FORMAT_BF16 : FT_FORMAT_F32;
    if (fused->data->dtype != FT_DTYPE_F8_E4M3)
        return FT_OK;
    fused->format = FT_FORMAT_FP8_BLOCK;
    snprintf(name, sizeof name, "%s_scale_inv", suffix);
    return ft_binder_need(b, prefix, name, 1u << FT_DTYPE_F32 | 1u << FT_DTYPE_BF16, scale_shape, 3,
                          &fused->scale);
}

/* Share `index` of `count` equal ones of a fused tensor: to a matrix whose data and scales lie there. */
static int add_fused(struct ft_binder *b, const struct fused *fused, uint64_t index, uint64_t count,
                     uint64_t data_at, uint64_t scale_at)
{
    uint64_t bytes = fused->data->bytes / count;
    struct ft_load_part part = {
        .offset = index * bytes, .bytes = bytes, .destination = data_at, .unit_bytes = 1};
    if (fused->format == FT_FORMAT_F32)
        return ft_binder_add_f32(b, fused->data, index * bytes, bytes, data_at);
    part.check = FT_LOAD_CHECK_E4M3;
    if (fused->format == FT_FORMAT_BF16) {
        part.unit_bytes = 2;
        part.check = FT_LOAD_CHECK_BF16;
    }
    int status = ft_binder_add(b, fused->data, part);
    if (status || !fused->scale)
        return status;
    bytes = fused->scale->bytes / count;
    return ft_binder_add_f32(b, fused->scale, index * bytes, bytes, scale_at);
}

static int check_fused(const struct ft_binder *b, const struct fused *up, const struct fused *down)
{
    if (up->format != down->format)
        return ft_error_set(b->err, FT_UNSUPPORTED,
                            "%s: %s is %s, but %s is %s: all experts of a layer must have one format",
                            ft_checkpoint_dir(b->checkpoint), up->data->name, ft_dtype_name(up->data->dtype),
                            down->data->name, ft_dtype_name(down->data->dtype));
    if (up->scale && b->model->expert_width % ft_binder_block_out(b))
        return ft_error_set(
            b->err, FT_UNSUPPORTED,
            "%s: %s: a block of %u rows would hold rows of gate and of up, because "
            "moe_intermediate_size is %u; wanted a multiple of the block, or experts one by one",
            ft_checkpoint_dir(b->checkpoint), up->scale->name, ft_binder_block_out(b),
            b->model->expert_width);
    return FT_OK;
}

static int bind_fused(struct ft_binder *b, const char *prefix, struct ft_layer_weights *layer)
{
    const struct ft_model *m = b->model;
    const struct ft_expert_layout *l = &layer->expert_layout;
    struct fused up, down;
    uint64_t bank;
    int status;
    if ((status = need_fused(b, prefix, ".gate_up_proj", 2 * m->expert_width, m->hidden, &up)) ||
        (status = need_fused(b, prefix, ".down_proj", m->hidden, m->expert_width, &down)) ||
        (status = check_fused(b, &up, &down)) || (status = take_bank(b, layer, up.format, false, &bank)))
        return status;
    for (uint64_t e = 0, count = m->expert_count; e < count; e++) {
        uint64_t blob = bank + e * l->stride;
        if ((status = add_fused(b, &up, 2 * e, 2 * count, blob + l->gate_offset,
                                at(blob, l->gate_scale_offset))) ||
            (status = add_fused(b, &up, 2 * e + 1, 2 * count, blob + l->up_offset,
                                at(blob, l->up_scale_offset))) ||
            (status = add_fused(b, &down, e, count, blob + l->down_offset, at(blob, l->down_scale_offset))))
            return status;
    }
    return FT_OK;
}

/* Fused experts in a form that is not read: said by name instead of "experts.0.gate_proj is missing". */
static int refuse_other_fused(const struct ft_binder *b, const char *prefix)
{
    static const char *const names[] = {".gate_up_proj.weight", ".gate_up_proj.weight_packed",
                                        ".gate_up_proj_packed", ".gate_up_proj_blocks",
                                        ".gate_up_proj.weight_scale"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (ft_binder_find(b, prefix, names[i]))
            return ft_error_set(b->err, FT_UNSUPPORTED, "%s: tensor %s%s: " FUSED_WANTED,
                                ft_checkpoint_dir(b->checkpoint), prefix, names[i]);
    return FT_OK;
}

/* ---- mxfp4 ---- */

struct mxfp4_tensors {
    const struct ft_tensor *up_data, *up_scale, *up_bias, *down_data, *down_scale, *down_bias;
};

static int need_mxfp4(const struct ft_binder *b, const char *prefix, struct mxfp4_tensors *t)
{
    const struct ft_model *m = b->model;
    const uint64_t e = m->expert_count, h = m->hidden, w = m->expert_width, u8 = 1u << FT_DTYPE_U8;
    const uint64_t up[4] = {e, 2 * w, h / 32, 16}, down[4] = {e, h, w / 32, 16};
    int status;
    if (ft_binder_find(b, prefix, ".gate_up_proj"))
        return ft_error_set(
            b->err, FT_UNSUPPORTED,
            "%s: %s.gate_up_proj: experts of this family are supported as mxfp4 (_blocks and _scales) "
            "only",
            ft_checkpoint_dir(b->checkpoint), prefix);
    if (h % 32 || w % 32)
        return ft_error_set(
            b->err, FT_UNSUPPORTED,
            "%s: hidden_size %u and intermediate_size %u do not fit mxfp4, wanted multiples of 32",
            ft_checkpoint_dir(b->checkpoint), m->hidden, m->expert_width);
    if ((status = ft_binder_need(b, prefix, ".gate_up_proj_blocks", (uint32_t)u8, up, 4, &t->up_data)) ||
        (status = ft_binder_need(b, prefix, ".gate_up_proj_scales", (uint32_t)u8, up, 3, &t->up_scale)) ||
        (status = ft_binder_need(b, prefix, ".down_proj_blocks", (uint32_t)u8, down, 4, &t->down_data)) ||
        (status = ft_binder_need(b, prefix, ".down_proj_scales", (uint32_t)u8, down, 3, &t->down_scale)))
        return status;
    if (!m->expert_bias)
        return FT_OK;
    status = ft_binder_need(b, prefix, ".gate_up_proj_bias", FT_DTYPES_FLOAT, up, 2, &t->up_bias);
    return status ? status
                  : ft_binder_need(b, prefix, ".down_proj_bias", FT_DTYPES_FLOAT, down, 2, &t->down_bias);
}

/* Expert e's share of an interleaved tensor: even rows to `even`, odd rows to `odd`. */
static int add_interleaved(struct ft_binder *b, const struct ft_tensor *tensor, uint32_t e, uint64_t rows,
                           struct ft_load_part part, uint64_t even, uint64_t odd)
{
    part.bytes = tensor->bytes / b->model->expert_count;
    part.offset = e * part.bytes;
    part.row_bytes = (uint32_t)(part.bytes / rows);
    part.destination = even;
    part.destination_odd = odd;
    return ft_binder_add(b, tensor, part);
}

static int add_bias_mxfp4(struct ft_binder *b, const struct mxfp4_tensors *t,
                          const struct ft_expert_layout *l, uint32_t e, uint64_t blob)
{
    static const struct ft_load_part kinds[FT_DTYPE_COUNT] = {
        [FT_DTYPE_F32] = {.unit_bytes = 4, .check = FT_LOAD_CHECK_F32},
        [FT_DTYPE_BF16] = {.unit_bytes = 2, .check = FT_LOAD_CHECK_BF16, .convert = FT_LOAD_BF16_TO_F32},
        [FT_DTYPE_F16] = {.unit_bytes = 2, .check = FT_LOAD_CHECK_F16, .convert = FT_LOAD_F16_TO_F32},
    };
    uint64_t down_bytes = t->down_bias->bytes / b->model->expert_count;
    int status = add_interleaved(b, t->up_bias, e, 2ull * l->width, kinds[t->up_bias->dtype],
                                 blob + l->gate_bias_offset, blob + l->up_bias_offset);
    return status
               ? status
               : ft_binder_add_f32(b, t->down_bias, e * down_bytes, down_bytes, blob + l->down_bias_offset);
}

static int add_expert_mxfp4(struct ft_binder *b, const struct mxfp4_tensors *t,
                            const struct ft_expert_layout *l, uint32_t e, uint64_t blob)
{
    const struct ft_load_part data = {.unit_bytes = 1, .check = FT_LOAD_CHECK_NONE};
    const struct ft_load_part scale = {.unit_bytes = 1, .check = FT_LOAD_CHECK_E8M0};
    struct ft_load_part down_data = data, down_scale = scale;
    int status;
    down_data.bytes = t->down_data->bytes / b->model->expert_count;
    down_data.offset = e * down_data.bytes;
    down_data.destination = blob + l->down_offset;
    down_scale.bytes = t->down_scale->bytes / b->model->expert_count;
    down_scale.offset = e * down_scale.bytes;
    down_scale.destination = blob + l->down_scale_offset;
    if ((status = add_interleaved(b, t->up_data, e, 2ull * l->width, data, blob + l->gate_offset,
                                  blob + l->up_offset)) ||
        (status = add_interleaved(b, t->up_scale, e, 2ull * l->width, scale, blob + l->gate_scale_offset,
                                  blob + l->up_scale_offset)) ||
        (status = ft_binder_add(b, t->down_data, down_data)) ||
        (status = ft_binder_add(b, t->down_scale, down_scale)))
        return status;
    return l->has_bias ? add_bias_mxfp4(b, t, l, e, blob) : FT_OK;
}

static int bind_mxfp4(struct ft_binder *b, const char *prefix, struct ft_layer_weights *layer)
{
    struct mxfp4_tensors tensors = {0};
    uint64_t bank;
    int status = need_mxfp4(b, prefix, &tensors);
    if (!status)
        status = take_bank(b, layer, FT_FORMAT_MXFP4, b->model->expert_bias, &bank);
    for (uint32_t e = 0; e < b->model->expert_count && !status; e++)
        status = add_expert_mxfp4(b, &tensors, &layer->expert_layout, e,
                                  bank + (uint64_t)e * layer->expert_layout.stride);
    return status;
}

int ft_binder_experts(struct ft_binder *b, const char *prefix, struct ft_layer_weights *layer)
{
    if (b->model->family == FT_FAMILY_GPT_OSS)
        return bind_mxfp4(b, prefix, layer);
    if (ft_binder_find(b, prefix, ".gate_up_proj"))
        return bind_fused(b, prefix, layer);
    int status = refuse_other_fused(b, prefix);
    return status ? status : bind_one_by_one(b, prefix, layer);
}
