/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the rows of PLE tables lie: shared by io/row_tables.c (opens and checks) and io/rows.c (reads).
 * A table is cut by rows into shards, in order; a row lies whole in one shard, a shard whole in one file.
 */
#ifndef FT_IO_ROWS_INTERNAL_H
#define FT_IO_ROWS_INTERNAL_H

#include "io/file.h"
#include "io/rows.h"

struct ft_row_shard {
    uint64_t first_row, row_count;
    uint64_t offset; /* of first_row, from the start of the file */
    uint32_t file;   /* index into files */
};

struct ft_row_table {
    uint64_t row_count;
    uint32_t row_bytes;
    uint32_t shard_first, shard_count; /* range of shards */
    enum ft_dtype dtype;
    float scale; /* value of an element = stored value * scale */
};

struct ft_row_tables {
    uint32_t table_count, shard_count, file_count;
    struct ft_row_table *tables; /* [table_count] */
    struct ft_row_shard *shards; /* [shard_count] */
    struct ft_file *files;       /* [file_count], direct where possible */
    char **paths;                /* [file_count] */
};

/* The shard that holds the row; the row is in range. */
const struct ft_row_shard *ft_row_table_shard(const struct ft_row_tables *tables, uint32_t table,
                                              uint64_t row);

#endif
