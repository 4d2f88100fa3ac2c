/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Token ids and texts as users bring them: "1,2,3", "[1, 2, 3]", one a line; files and standard input whole.
 * Errors: FT_USAGE for what is not an id (with its place), FT_IO for unreadable files. Threads: none.
 */
#ifndef FT_TOOLS_IDS_H
#define FT_TOOLS_IDS_H

#include "graph/error.h"
#include "graph/types.h"

#define FT_INPUT_BYTES_MAX (64u << 20)

/* *ids [*count] is malloc'ed; count may be 0. `name` stands in messages. */
int ft_ids_parse(const char *text, size_t bytes, const char *name, uint32_t **ids, uint32_t *count,
                 struct ft_error *err);
/* `wish` is a list, "-" (stdin), a safetensors file with input_ids, or a text file with a list. */
int ft_ids_read(const char *wish, uint32_t **ids, uint32_t *count, struct ft_error *err);
/* All of standard input, malloc'ed and terminated. FT_LIMIT above FT_INPUT_BYTES_MAX. */
int ft_ids_read_stdin(char **text, size_t *bytes, struct ft_error *err);

#endif
