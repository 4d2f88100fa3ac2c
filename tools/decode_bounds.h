/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast a decode step could be: bytes that it must read and move, over what the machine reads and moves.
 *
 *   device bytes   dense weights and head once, recurrent state read and written and keys and values read per row,
 *                  experts found in slots, and those fetched (the device reads them too)
 *   missing bytes  the others, by the mover of the strategy:
 *                    offload, fused   link alone
 *                    cpu              CPU experts alone
 *                    hybrid, auto     both at once, as measured together
 *   serial         device bytes / device bandwidth + missing bytes / mover: nothing overlaps
 *   overlap        the larger of the two: everything overlaps. No run of this strategy with these misses is faster.
 *
 * Without a device the CPU does all: serial = dense at the read ceiling and experts at the speed of the
 * kernels, overlap = every byte at the read ceiling. Threads: pure.
 */
#ifndef FT_TOOLS_DECODE_BOUNDS_H
#define FT_TOOLS_DECODE_BOUNDS_H

#include "graph/model.h"
#include "graph/weights.h"
#include "tools/ceilings.h"

/* Bytes of one step; per step, so fractions occur. */
struct ft_decode_traffic {
    double dense;    /* weights that every step reads, head included */
    double state;    /* recurrent state, read and written */
    double kv;       /* keys, values and indexer keys */
    double resident; /* experts in slots */
    double missing;  /* other experts */
};

struct ft_decode_bound {
    double serial_s, overlap_s; /* of one step; 0 = a bandwidth that it needs was not measured */
};

/* Fills all but resident and missing. context: tokens before the one computed; element: bytes of one element
 * of the KV cache and of the state. */
void ft_decode_traffic_init(struct ft_decode_traffic *traffic, const struct ft_model *model,
                            const struct ft_weight_sizes *sizes, uint32_t batch, double context,
                            uint32_t element);
/* Splits the distinct experts of a step. */
void ft_decode_traffic_experts(struct ft_decode_traffic *traffic, double expert_bytes, double active,
                               double misses);
struct ft_decode_bound ft_decode_bound(const struct ft_decode_traffic *traffic,
                                       const struct ft_ceilings *ceilings, enum ft_strategy strategy,
                                       enum ft_device device);

#endif
