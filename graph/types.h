/* SPDX-License-Identifier: Apache-2.0 */
/* Words that every layer shares: element types, weight formats, tiers, lanes, strategies, limits. */
#ifndef FT_GRAPH_TYPES_H
#define FT_GRAPH_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FT_NONE UINT32_MAX /* "no such index" for every 32-bit index of the project */

/* Hard limits of fixed-size arrays; a checkpoint beyond one is refused by name. */
#define FT_LAYERS_MAX 256
#define FT_EXPERTS_MAX 2048
#define FT_TOPK_MAX 64
#define FT_PLE_LAYERS_MAX 8
#define FT_PLE_HEADS_MAX 64
#define FT_NGRAM_MAX 8
#define FT_EOS_MAX 16
#define FT_HC_MAX 16
#define FT_WORKERS_MAX 256
#define FT_SEQUENCES_MAX 256
#define FT_GPUS_MAX 32

/* Element type of a tensor as stored in a checkpoint. */
enum ft_dtype {
    FT_DTYPE_F32,
    FT_DTYPE_F16,
    FT_DTYPE_BF16,
    FT_DTYPE_F8_E4M3,
    FT_DTYPE_U8,
    FT_DTYPE_I8,
    FT_DTYPE_I32,
    FT_DTYPE_I64,
    FT_DTYPE_BOOL,
    FT_DTYPE_COUNT
};

/* How a weight matrix is held in memory. Sources of the layouts: the published checkpoints (README, glossary). */
enum ft_format {
    FT_FORMAT_F32,
    FT_FORMAT_BF16,
    FT_FORMAT_NVFP4,     /* e2m1 pairs (low nibble = even index), e4m3 scale per 16, one f32 per projection */
    FT_FORMAT_FP8_BLOCK, /* e4m3, f32 scale per block_out x block_in block */
    FT_FORMAT_MXFP4,     /* e2m1 pairs, e8m0 scale per 32 */
    FT_FORMAT_DS_FP4,    /* mxfp4 without biases */
    FT_FORMAT_COUNT
};

enum ft_tier { FT_TIER_DEVICE, FT_TIER_RAM, FT_TIER_DISK, FT_TIER_COUNT };

/* A lane is one serial executor, or a group of equal ones that steal from each other (the CPU workers). */
enum ft_lane {
    FT_LANE_CPU,    /* pinned workers */
    FT_LANE_DEVICE, /* compute stream of a GPU, or the host device */
    FT_LANE_LINK,   /* copy stream: RAM -> device */
    FT_LANE_IO,     /* disk reads */
    FT_LANE_INLINE, /* costs nothing: run by whoever completes the last predecessor */
    FT_LANE_COUNT
};

enum ft_device { FT_DEVICE_NONE, FT_DEVICE_HOST, FT_DEVICE_CUDA, FT_DEVICE_COUNT };

/* How a GPU step and its driver thread meet. */
enum ft_handshake {
    FT_HANDSHAKE_AUTO,
    FT_HANDSHAKE_MEMOP,  /* captured step; the copy stream raises the flag by a stream memory operation */
    FT_HANDSHAKE_KERNEL, /* captured step; the copy stream raises the flag by a one-thread kernel */
    FT_HANDSHAKE_LAUNCH, /* nothing captured: the driver launches segment after segment */
    FT_HANDSHAKE_COUNT
};

/* As the user names it. In a plan AUTO means: not every expert fits the device, policy_auto chooses per layer; where
 * all fit the plan says FUSED, without a device CPU. */
enum ft_strategy {
    FT_STRATEGY_AUTO,    /* per layer what ends first */
    FT_STRATEGY_FUSED,   /* every expert resident on the device */
    FT_STRATEGY_OFFLOAD, /* fetch every missing expert */
    FT_STRATEGY_CPU,     /* compute every missing expert on the CPU */
    FT_STRATEGY_HYBRID,  /* a given share fetched, the rest on the CPU */
    FT_STRATEGY_COUNT
};

const char *ft_dtype_name(enum ft_dtype dtype);    /* "BF16", as in safetensors headers */
uint32_t ft_dtype_bytes(enum ft_dtype dtype);      /* bytes per element */
const char *ft_format_name(enum ft_format format); /* "nvfp4" */
const char *ft_lane_name(enum ft_lane lane);       /* "cpu" */
const char *ft_tier_name(enum ft_tier tier);       /* "ram" */
const char *ft_device_name(enum ft_device device); /* "host" */
const char *ft_strategy_name(enum ft_strategy strategy);
bool ft_strategy_find(const char *name, enum ft_strategy *strategy); /* false: no such name */
bool ft_device_find(const char *name, enum ft_device *device);

#define FT_MIN(a, b) ((a) < (b) ? (a) : (b))
#define FT_MAX(a, b) ((a) > (b) ? (a) : (b))

/* a / b rounded up; b > 0. */
static inline uint64_t ft_div_up(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

/* a rounded up to a multiple of b; b > 0; the caller knows that it fits. */
static inline uint64_t ft_round_up(uint64_t a, uint64_t b)
{
    return ft_div_up(a, b) * b;
}

/* The mixing function of splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. */
#define FT_SPLITMIX_GAMMA 0x9e3779b97f4a7c15ull
static inline uint64_t ft_splitmix64(uint64_t x)
{
    x += FT_SPLITMIX_GAMMA;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* Checked arithmetic for sizes that come from files: false on overflow. */
static inline bool ft_mul_u64(uint64_t a, uint64_t b, uint64_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

static inline bool ft_add_u64(uint64_t a, uint64_t b, uint64_t *sum)
{
    return !__builtin_add_overflow(a, b, sum);
}

#endif
