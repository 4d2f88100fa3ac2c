/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The convolution's tail of a linear layer moves on: state columns [taps - 1, channels] become the last taps
 * - 1 inputs of the convolution, counted from the step's last row. Any kernel that runs after the delta rule
 * may do it with spare blocks; thread `first` of `count` threads calls it once.
 */
#ifndef FT_KERNELS_CUDA_LINEAR_CUH
#define FT_KERNELS_CUDA_LINEAR_CUH

#include "kernels_cuda/device.h"
#include "kernels_cuda/kernels_cuda.h"

struct ft_tail_args {
    const float *project; /* row r at + r * stride: q|k|v before the convolution */
    uint64_t stride;
    float *const *state; /* [sequences] */
    uint64_t offset;     /* of the tail in a state */
    const uint32_t *first_row, *row_count;
    uint32_t sequences, channels, taps;
};

static inline struct ft_tail_args ft_tail_args_of(const struct ft_cuda *c, uint32_t layer)
{
    struct ft_tail_args args = {};
    args.project = c->base + c->space.project;
    args.stride = c->space.project_width;
    args.state = c->step.state;
    args.offset = c->state.conv_offset[layer];
    args.first_row = c->step.first_row;
    args.row_count = c->step.row_count;
    args.sequences = c->step.sequences;
    args.channels = ft_model_conv_channels(c->model);
    args.taps = c->model->conv_taps;
    return args;
}

static __device__ __forceinline__ void ft_tail_move(const struct ft_tail_args &args, uint32_t first,
                                                    uint32_t count)
{
    uint32_t depth = args.taps - 1, all = args.sequences * args.channels;
    for (uint32_t i = first; i < all; i += count) {
        uint32_t s = i / args.channels, channel = i % args.channels, rows = args.row_count[s];
        float *tail = args.state[s] + args.offset + channel;
        const float *x = args.project + args.first_row[s] * args.stride + channel;
        for (uint32_t j = 0; j < depth;
             j++) { /* reads lie above the writes: ascending order is safe in place */
            uint32_t from = rows + j;
            tail[(uint64_t)j * args.channels] =
                from < depth ? tail[(uint64_t)from * args.channels] : x[(from - depth) * args.stride];
        }
    }
}

#endif
