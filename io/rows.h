/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of PLE tables, read in place from disk: the table never comes to memory (disk backend), or is loaded once
 * (ram backend).
 *
 * One batch per step: the caller gives row numbers for all tables and tokens of the step, `ft_rows_submit` removes
 * duplicates, maps rows to aligned blocks (merging neighbours) and submits all reads at once; `ft_rows_wait`
 * delivers the raw rows. Threads: one reader object belongs to the io thread.
 */
#ifndef FT_IO_ROWS_H
#define FT_IO_ROWS_H

#include "io/checkpoint.h"
#include "io/uring.h"

enum ft_rows_backend { FT_ROWS_DISK, FT_ROWS_RAM };

struct ft_row_tables; /* where every PLE table of a checkpoint lies: shards, dtype, scale; owns descriptors */
struct ft_row_reader;

/* Checks shards against the model: row width, total rows, dtype (F8_E4M3 with scale, or BF16), stored hash
 * constants (layer_multipliers, ngram_heads_vocab_sizes, ngram_heads_offsets) equal to the derived ones. */
int ft_row_tables_open(struct ft_row_tables **out, const struct ft_checkpoint *checkpoint, struct ft_error *err);
/* A single raw table in one file (for `ft bench ple`): e4m3 with a scale of 1/64, rows of row_bytes elements. */
int ft_row_tables_open_file(struct ft_row_tables **out, const char *path, uint32_t row_bytes, struct ft_error *err);
void ft_row_tables_close(struct ft_row_tables *tables);
uint32_t ft_row_tables_count(const struct ft_row_tables *tables);
uint64_t ft_row_tables_bytes(const struct ft_row_tables *tables);
uint32_t ft_row_table_row_bytes(const struct ft_row_tables *tables, uint32_t table);
uint64_t ft_row_table_row_count(const struct ft_row_tables *tables, uint32_t table);
enum ft_dtype ft_row_table_dtype(const struct ft_row_tables *tables, uint32_t table);
float ft_row_table_scale(const struct ft_row_tables *tables, uint32_t table);

struct ft_row_reader_options {
    enum ft_rows_backend backend;
    enum ft_io_backend io_backend;
    uint32_t rows_max; /* most rows in one batch; sizes every buffer at open: nothing is allocated later */
};
int ft_row_reader_open(struct ft_row_reader **out, const struct ft_row_tables *tables,
                       const struct ft_row_reader_options *options, struct ft_error *err);
void ft_row_reader_close(struct ft_row_reader *reader);

/* One wanted row and where its raw bytes go (row_bytes of the table). */
struct ft_row_want {
    uint64_t row;
    void *destination;
    uint32_t table;
};
/* Submits a batch; the wants array stays the caller's and must live until wait returns. Only one batch in flight. */
int ft_row_reader_submit(struct ft_row_reader *reader, const struct ft_row_want *wants, uint32_t count,
                         struct ft_error *err);
/* Takes what comes in within wait_ns (0: only looks). True: there is no use in looking again, every row is there, or
 * not every read is submitted yet, or something broke; ft_row_reader_wait ends the batch in any case. */
bool ft_row_reader_poll(struct ft_row_reader *reader, uint64_t wait_ns);
/* Waits (bounded) until every row of the batch is delivered. On error the batch is drained and forgotten. */
int ft_row_reader_wait(struct ft_row_reader *reader, uint64_t timeout_ns, struct ft_error *err);

struct ft_row_stats {
    uint64_t batches, rows_wanted, rows_distinct, reads, read_bytes;
};
void ft_row_reader_stats(const struct ft_row_reader *reader, struct ft_row_stats *stats);
const char *ft_row_reader_note(const struct ft_row_reader *reader); /* backend, and why if slower; "" when all is well */
enum ft_io_backend ft_row_reader_backend(const struct ft_row_reader *reader);

#endif
