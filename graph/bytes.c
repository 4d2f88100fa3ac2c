/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/bytes.h"

#include <stdio.h>

const char *ft_bytes_format(uint64_t bytes, char *text, size_t cap)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    uint32_t unit = 0;
    for (; value >= 1024 && unit + 1 < sizeof units / sizeof *units; unit++)
        value /= 1024;
    snprintf(text, cap, "%.*f %s", !unit ? 0 : value < 100 ? 2 : 1, value, units[unit]);
    return text;
}
