/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recorded routing: a safetensors file with trace.0, trace.1, .. [tokens, layers, topk] U8, one for each
 * text. Row r of the routing is trace.<r>; the steps are the tokens of the shortest. Ownership:
 * ft_routing_free. Errors: FT_IO, FT_FORMAT, FT_USAGE when it was recorded from a model of other sizes.
 */
#ifndef FT_TOOLS_ROUTING_FILE_H
#define FT_TOOLS_ROUTING_FILE_H

#include "graph/error.h"
#include "graph/model.h"
#include "graph/routing.h"

/* At most rows_max rows. */
int ft_routing_file_read(const char *path, const struct ft_model *model, uint32_t rows_max,
                         struct ft_routing *routing, struct ft_error *err);

#endif
