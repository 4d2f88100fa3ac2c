/* SPDX-License-Identifier: Apache-2.0 */
/* What the hardware can do, written once per vector width: a loop that only reads, a loop that only
 * multiplies and adds. Included after vec_*.h. */
#include "kernels_cpu/bench_internal.h"

typedef uint64_t lanes __attribute__((vector_size(4 * VF), aligned(4 * VF)));

/* Sums `streams` sequential streams of one part, two lines of each per step, four accumulators. */
static inline __attribute__((always_inline)) uint64_t read_streams(const uint8_t *part, uint64_t stream_bytes,
                                                                   uint32_t streams, bool prefetch)
{
    lanes sum[4] = {0};
    uint64_t total = 0;
    for (uint64_t i = 0; i + 256 <= stream_bytes; i += 256)
        for (uint32_t s = 0; s < streams; s++) {
            const uint8_t *at = part + s * stream_bytes + i;
            if (prefetch)
                for (uint32_t line = 0; line < 256; line += 64)
                    __builtin_prefetch(at + line + 2048, 0, 0);
            for (uint32_t j = 0; j < 256 / (4 * VF); j++)
                sum[j % 4] += *(const lanes *)(const void *)(at + (size_t)j * 4 * VF);
        }
    sum[0] += sum[1] + sum[2] + sum[3];
    for (uint32_t i = 0; i < VF / 2; i++)
        total += sum[0][i];
    return total;
}

static uint64_t roof_read(const uint8_t *part, uint64_t bytes, enum ft_roof_pattern pattern)
{
    uint64_t quarter = bytes / 4 / 256 * 256;
    switch (pattern) {
    case FT_ROOF_ONE_STREAM:
        return read_streams(part, 4 * quarter, 1, false);
    case FT_ROOF_FOUR_STREAMS:
        return read_streams(part, quarter, 4, false);
    case FT_ROOF_ONE_STREAM_AHEAD:
        return read_streams(part, 4 * quarter, 1, true);
    default:
        return read_streams(part, quarter, 4, true);
    }
}

/* 12 chains hide the latency of two units; every chain converges, so values stay finite. Returns flops done. */
#define CHAINS 12
static double roof_fma(uint32_t rounds, float *sink)
{
    vf chain[CHAINS], factor = vf_set1(0.75f), term = vf_set1(*sink);
    for (uint32_t c = 0; c < CHAINS; c++)
        chain[c] = vf_set1((float)c);
    for (uint32_t i = 0; i < rounds; i++)
#pragma GCC unroll 12
        for (uint32_t c = 0; c < CHAINS; c++)
            chain[c] = vf_fma(chain[c], factor, term);
    for (uint32_t c = 1; c < CHAINS; c++)
        chain[0] = vf_add(chain[0], chain[c]);
    float values[VF];
    vf_store(values, chain[0]);
    for (uint32_t i = 0; i < VF; i++)
        *sink += values[i];
    return 2.0 * CHAINS * VF * rounds;
}

const struct ft_roof VEC(ft_roof) = {roof_read, roof_fma};
