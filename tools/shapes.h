/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model without its weights: by the name of a published shape, or from a config.json.
 *
 *   NAME        a built-in shape (ft_shapes_name lists them)
 *   FILE        a config.json, read by io/config.c like any checkpoint's
 *   FILE#NAME   a file of several, {"NAME": {config}, ...}
 *
 * What published shapes leave open is filled in (rope_theta 1e6, the seed of the PLE hash 0): it changes no
 * size and no cost. Threads: one at a time. Errors: FT_USAGE for a name that is not known (with the list),
 * FT_IO, and those of ft_config_parse.
 */
#ifndef FT_TOOLS_SHAPES_H
#define FT_TOOLS_SHAPES_H

#include "graph/model.h"

struct ft_shape_cuts {
    uint32_t layers;  /* keep the first of them; 0 = all */
    uint32_t experts; /* of a layer; 0 = all */
    uint32_t vocab;   /* 0 = all */
    bool no_ple;      /* leave the PLE layers out */
};

uint32_t ft_shapes_count(void);
const char *ft_shapes_name(uint32_t index);
/* label [cap]: what to call it in a report: the name, with " (2 layers)" and the like for cuts. */
int ft_shapes_read(const char *shape, const struct ft_shape_cuts *cuts, struct ft_model *model, char *label,
                   size_t cap, struct ft_error *err);

/* What --format of a command with --shape offers: "model" (0) is the format of the published checkpoint's experts, as
 * its config says in quantization_config; without one bf16. choice: the index of a word. Errors as of ft_shapes_read. */
#define FT_SHAPE_FORMATS "model|nvfp4|mxfp4|fp8_block|bf16|ds_fp4"
int ft_shapes_find_format(const char *shape, uint32_t choice, enum ft_format *format, struct ft_error *err);

/* Makes the one PLE table of a model as large as a table of row_count rows allows: row numbers stay below it.
 * FT_UNSUPPORTED: another number of tables; FT_USAGE: fewer than 100,000 rows a hash head. */
int ft_shapes_fit_ple(struct ft_model *model, uint64_t row_count, struct ft_error *err);

#endif
