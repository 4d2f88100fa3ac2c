/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/matrix.h"

#include <string.h>

bool ft_matrix_bytes(enum ft_format format, uint32_t out, uint32_t in, uint16_t block_out, uint16_t block_in,
                     uint64_t *data_bytes, uint64_t *scale_bytes)
{
    uint64_t elements = (uint64_t)out * in;
    *scale_bytes = 0;
    switch (format) {
    case FT_FORMAT_F32:
        return ft_mul_u64(elements, 4, data_bytes);
    case FT_FORMAT_BF16:
        return ft_mul_u64(elements, 2, data_bytes);
    case FT_FORMAT_NVFP4:
        *data_bytes = elements / 2;
        *scale_bytes = elements / 16;
        return in % 16 == 0;
    case FT_FORMAT_MXFP4:
    case FT_FORMAT_DS_FP4:
        *data_bytes = elements / 2;
        *scale_bytes = elements / 32;
        return in % 32 == 0;
    case FT_FORMAT_FP8_BLOCK:
        if (!block_out || !block_in)
            return false;
        *data_bytes = elements;
        *scale_bytes = ft_div_up(out, block_out) * ft_div_up(in, block_in) * 4;
        return true;
    default:
        return false;
    }
}

/* Places one part at the end of the blob. */
static uint32_t place(uint64_t *end, uint64_t bytes)
{
    uint64_t at = *end;
    if (!bytes)
        return FT_NONE;
    *end = ft_round_up(at + bytes, 64);
    return at > UINT32_MAX ? FT_NONE : (uint32_t)at;
}

int ft_expert_layout_init(struct ft_expert_layout *layout, enum ft_format format, uint32_t hidden, uint32_t width,
                          uint16_t block_out, uint16_t block_in, bool has_bias, enum ft_activation activation,
                          float limit, struct ft_error *err)
{
    uint64_t up_data, up_scale, down_data, down_scale, end = 0;
    *layout = (struct ft_expert_layout){.format = format, .activation = activation, .limit = limit, .hidden = hidden,
                                        .width = width, .block_out = block_out, .block_in = block_in,
                                        .has_bias = has_bias};
    if (!hidden || !width || !ft_matrix_bytes(format, width, hidden, block_out, block_in, &up_data, &up_scale) ||
        !ft_matrix_bytes(format, hidden, width, block_out, block_in, &down_data, &down_scale))
        return ft_error_set(err, FT_UNSUPPORTED,
                            "expert of width %u on hidden size %u cannot be held as %s: both must be multiples of %u",
                            width, hidden, ft_format_name(format), format == FT_FORMAT_NVFP4 ? 16u : 32u);
    if (up_data > UINT32_MAX / 4 || down_data > UINT32_MAX / 4)
        return ft_error_set(err, FT_LIMIT, "expert of width %u on hidden size %u is larger than 4 GiB", width, hidden);
    layout->gate_offset = place(&end, up_data);
    layout->up_offset = place(&end, up_data);
    layout->down_offset = place(&end, down_data);
    layout->gate_scale_offset = place(&end, up_scale);
    layout->up_scale_offset = place(&end, up_scale);
    layout->down_scale_offset = place(&end, down_scale);
    layout->global_offset = place(&end, format == FT_FORMAT_NVFP4 ? 3 * sizeof(float) : 0);
    layout->gate_bias_offset = place(&end, has_bias ? width * sizeof(float) : 0);
    layout->up_bias_offset = place(&end, has_bias ? width * sizeof(float) : 0);
    layout->down_bias_offset = place(&end, has_bias ? hidden * sizeof(float) : 0);
    if (end > UINT32_MAX - 64)
        return ft_error_set(err, FT_LIMIT, "expert of width %u on hidden size %u is larger than 4 GiB", width, hidden);
    layout->bytes = (uint32_t)end;
    layout->stride = (uint32_t)end;
    return FT_OK;
}

static const void *part(const void *blob, uint32_t offset)
{
    return offset == FT_NONE ? NULL : (const char *)blob + offset;
}

static struct ft_matrix matrix_view(const struct ft_expert_layout *layout, const void *blob, uint32_t data,
                                    uint32_t scale, uint32_t which)
{
    bool down = which == 2;
    struct ft_matrix matrix = {.data = part(blob, data),
                               .scale = part(blob, scale),
                               .out = down ? layout->hidden : layout->width,
                               .in = down ? layout->width : layout->hidden,
                               .format = layout->format,
                               .global = 1.0f,
                               .block_out = layout->block_out,
                               .block_in = layout->block_in};
    if (layout->global_offset != FT_NONE)
        memcpy(&matrix.global, (const char *)blob + layout->global_offset + 4 * which, sizeof matrix.global);
    return matrix;
}

void ft_expert_view(const struct ft_expert_layout *layout, const void *blob, struct ft_expert *expert)
{
    *expert = (struct ft_expert){
        .gate = matrix_view(layout, blob, layout->gate_offset, layout->gate_scale_offset, 0),
        .up = matrix_view(layout, blob, layout->up_offset, layout->up_scale_offset, 1),
        .down = matrix_view(layout, blob, layout->down_offset, layout->down_scale_offset, 2),
        .gate_bias = part(blob, layout->gate_bias_offset),
        .up_bias = part(blob, layout->up_bias_offset),
        .down_bias = part(blob, layout->down_bias_offset),
        .activation = layout->activation,
        .limit = layout->limit,
    };
}
