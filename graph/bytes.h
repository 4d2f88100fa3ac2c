/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes as people read them. */
#ifndef FT_GRAPH_BYTES_H
#define FT_GRAPH_BYTES_H

#include "graph/types.h"

#define FT_BYTES_TEXT 32u /* room for any size */

/* "1.50 GiB" into text [cap], which is returned: the largest unit (1024 of the one before) of which there is one. */
const char *ft_bytes_format(uint64_t bytes, char *text, size_t cap);

#endif
