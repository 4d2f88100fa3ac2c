/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16 or f32 rows as fp8_block: e4m3 codes with one f32 scale per 128 x 128 block, value = code * scale.
 *
 *   source [rows, columns] -> data [rows, columns], scale [ceil(rows / 128), ceil(columns / 128)]
 *
 * scale = max|w| / 448 of the block, so that its largest weight becomes the largest code; codes are w / scale
 * rounded to nearest, ties to even, signs of zeros kept. Blocks of zeros: codes 0, scale 1, exact. Blocks
 * whose scale would be subnormal take the smallest normal number, which keeps w / scale exact in its bits.
 * Blocks at the lower and right edge are partial. Error of a weight: at most 1/16 of itself (3 bits of
 * mantissa), or scale / 1024 where that is more.
 *
 * Every result is that of IEEE division and rounding: the same bits on every core. Threads: pure. Errors:
 * false when a NaN or an infinity is met; data and scale are then half-written.
 */
#ifndef FT_IO_QUANTISE_H
#define FT_IO_QUANTISE_H

#include "graph/types.h"

#define FT_QUANTISE_BLOCK 128u

/* format: FT_FORMAT_BF16 or FT_FORMAT_F32, source aligned to its elements. */
bool ft_quantise_fp8(const void *source, enum ft_format format, uint32_t rows, uint32_t columns,
                     uint8_t *data, float *scale);

#endif
