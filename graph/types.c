/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/types.h"

#include <string.h>

static const char *const dtype_names[FT_DTYPE_COUNT] = {"F32", "F16", "BF16", "F8_E4M3", "U8",
                                                        "I8",  "I32", "I64",  "BOOL"};
static const uint32_t dtype_bytes[FT_DTYPE_COUNT] = {4, 2, 2, 1, 1, 1, 4, 8, 1};
static const char *const format_names[FT_FORMAT_COUNT] = {"f32", "bf16", "nvfp4", "fp8_block", "mxfp4", "ds_fp4"};
static const char *const lane_names[FT_LANE_COUNT] = {"cpu", "device", "link", "io", "inline"};
static const char *const tier_names[FT_TIER_COUNT] = {"device", "ram", "disk"};
static const char *const device_names[FT_DEVICE_COUNT] = {"none", "host", "cuda"};
static const char *const strategy_names[FT_STRATEGY_COUNT] = {"auto", "fused", "offload", "cpu", "hybrid"};

const char *ft_dtype_name(enum ft_dtype dtype)
{
    return dtype < FT_DTYPE_COUNT ? dtype_names[dtype] : "?";
}

uint32_t ft_dtype_bytes(enum ft_dtype dtype)
{
    return dtype < FT_DTYPE_COUNT ? dtype_bytes[dtype] : 0;
}

const char *ft_format_name(enum ft_format format)
{
    return format < FT_FORMAT_COUNT ? format_names[format] : "?";
}

const char *ft_lane_name(enum ft_lane lane)
{
    return lane < FT_LANE_COUNT ? lane_names[lane] : "?";
}

const char *ft_tier_name(enum ft_tier tier)
{
    return tier < FT_TIER_COUNT ? tier_names[tier] : "?";
}

const char *ft_device_name(enum ft_device device)
{
    return device < FT_DEVICE_COUNT ? device_names[device] : "?";
}

const char *ft_strategy_name(enum ft_strategy strategy)
{
    return strategy < FT_STRATEGY_COUNT ? strategy_names[strategy] : "?";
}

static bool name_find(const char *const *names, uint32_t count, const char *name, uint32_t *index)
{
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(names[i], name) == 0) {
            *index = i;
            return true;
        }
    }
    return false;
}

bool ft_strategy_find(const char *name, enum ft_strategy *strategy)
{
    uint32_t index;
    if (!name_find(strategy_names, FT_STRATEGY_COUNT, name, &index))
        return false;
    *strategy = (enum ft_strategy)index;
    return true;
}

bool ft_device_find(const char *name, enum ft_device *device)
{
    uint32_t index;
    if (!name_find(device_names, FT_DEVICE_COUNT, name, &index))
        return false;
    *device = (enum ft_device)index;
    return true;
}
