/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Views of weights in memory: a matrix in one of the formats, an expert, and where an expert's parts lie in its blob.
 *
 * Ownership: a view owns nothing; it points into a weight arena, an expert bank or a slot.
 */
#ifndef FT_GRAPH_MATRIX_H
#define FT_GRAPH_MATRIX_H

#include "graph/error.h"
#include "graph/types.h"

/*
 * y = W x, W [out, in], row-major in the packing of its format:
 *   f32, bf16   data [out, in]
 *   nvfp4       data u8 [out, in/2] (low nibble = even column), scale e4m3 [out, in/16], value = e2m1 * scale * global
 *   mxfp4       data u8 [out, in/2], scale e8m0 [out, in/32], value = e2m1 * 2^(scale-127)      (ds_fp4: the same)
 *   fp8_block   data e4m3 [out, in], scale f32 [ceil(out/block_out), ceil(in/block_in)], value = e4m3 * scale
 */
struct ft_matrix {
    const void *data;
    const void *scale; /* NULL where the format has none */
    uint32_t out, in;
    enum ft_format format;
    float global;                 /* nvfp4 only, else 1 */
    uint16_t block_out, block_in; /* fp8_block only, else 0 */
};

/* Bytes of data and of scales that a matrix of this format takes; false when in/out do not fit the format. */
bool ft_matrix_bytes(enum ft_format format, uint32_t out, uint32_t in, uint16_t block_out, uint16_t block_in,
                     uint64_t *data_bytes, uint64_t *scale_bytes);

enum ft_activation {
    FT_ACTIVATION_SILU,       /* silu(gate) * up */
    FT_ACTIVATION_SWIGLU_OSS, /* gate = min(gate, limit), up = clamp(up, +-limit): (up + 1) gate sigmoid(1.702 gate) */
    FT_ACTIVATION_SIGMOID
};

/*
 * One expert as one blob of `bytes` bytes (what is fetched, evicted and counted), parts 64-byte aligned:
 *
 *   | gate data | up data | down data | gate scale | up scale | down scale | globals f32[3] | biases f32[2I + H] |
 *
 * gate, up [width, hidden]; down [hidden, width]. globals and biases only where the format or family has them.
 * Blobs lie `stride` bytes apart in a bank (a multiple of 64; the bank itself is page aligned).
 */
struct ft_expert_layout {
    enum ft_format format;
    enum ft_activation activation;
    float limit; /* swiglu clamp; 0 = none */
    uint32_t hidden, width;
    uint16_t block_out, block_in;
    bool has_bias;
    uint32_t gate_offset, up_offset, down_offset;
    uint32_t gate_scale_offset, up_scale_offset, down_scale_offset; /* FT_NONE without scales */
    uint32_t global_offset;                                         /* f32 gate, up, down; FT_NONE without */
    uint32_t gate_bias_offset, up_bias_offset, down_bias_offset;    /* f32; FT_NONE without */
    uint32_t bytes;  /* with alignment padding; one copy of this many bytes moves the expert */
    uint32_t stride; /* bytes rounded up to 64 */
};

/* Views into one blob. */
struct ft_expert {
    struct ft_matrix gate, up, down;
    const float *gate_bias, *up_bias, *down_bias; /* NULL without */
    enum ft_activation activation;
    float limit;
};

/* Fills the layout. FT_UNSUPPORTED when the sizes do not fit the format, FT_LIMIT when an expert exceeds 4 GiB. */
int ft_expert_layout_init(struct ft_expert_layout *layout, enum ft_format format, uint32_t hidden, uint32_t width,
                          uint16_t block_out, uint16_t block_in, bool has_bias, enum ft_activation activation,
                          float limit, struct ft_error *err);
/* `blob` is 64-byte aligned and holds layout->bytes bytes. */
void ft_expert_view(const struct ft_expert_layout *layout, const void *blob, struct ft_expert *expert);

#endif
