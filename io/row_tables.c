/* SPDX-License-Identifier: Apache-2.0 */
#include "io/rows_internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SHARDS_MAX 65536u /* of one table: a header cannot make us count for ever */

void ft_row_tables_close(struct ft_row_tables *tables)
{
    if (!tables)
        return;
    for (uint32_t i = 0; i < tables->file_count; i++) {
        ft_file_close(&tables->files[i]);
        free(tables->paths[i]);
    }
    free(tables->files);
    free(tables->paths);
    free(tables->shards);
    free(tables->tables);
    free(tables);
}

static struct ft_row_tables *tables_alloc(uint32_t table_count, uint32_t shard_count, uint32_t file_count)
{
    struct ft_row_tables *tables = calloc(1, sizeof *tables);
    if (!tables)
        return NULL;
    tables->tables = calloc(FT_MAX(table_count, 1u), sizeof *tables->tables);
    tables->shards = calloc(FT_MAX(shard_count, 1u), sizeof *tables->shards);
    tables->files = calloc(FT_MAX(file_count, 1u), sizeof *tables->files);
    tables->paths = calloc(FT_MAX(file_count, 1u), sizeof *tables->paths);
    if (tables->tables && tables->shards && tables->files && tables->paths)
        return tables;
    ft_row_tables_close(tables);
    return NULL;
}

/* Opens the file unless an earlier shard lies in it; arrays have room. */
static int tables_add_file(struct ft_row_tables *tables, const char *path, uint32_t *file,
                           struct ft_error *err)
{
    for (uint32_t i = 0; i < tables->file_count; i++)
        if (strcmp(tables->paths[i], path) == 0) {
            *file = i;
            return FT_OK;
        }
    char *copy = strdup(path);
    if (!copy)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for its name", path);
    int status = ft_file_open(&tables->files[tables->file_count], path, true, err);
    if (status) {
        free(copy);
        return status;
    }
    tables->paths[tables->file_count] = copy;
    *file = tables->file_count++;
    return FT_OK;
}

/* ---- checking a checkpoint's table ---- */

#define PLE_PREFIX "layers.%u.ple.ple_embedding."

/* Reads a small tensor whole; `bytes` is what the caller has room for and what the tensor must have. */
static int read_tensor(const struct ft_checkpoint *checkpoint, const struct ft_tensor *tensor, void *out,
                       uint64_t bytes, struct ft_error *err)
{
    const char *path = ft_checkpoint_file_path(checkpoint, tensor->file);
    struct ft_file file;
    int status = ft_file_open(&file, path, false, err);
    if (status)
        return status;
    uint64_t done = 0;
    while (done < bytes && status == FT_OK) {
        ssize_t got = pread(file.fd, (char *)out + done, bytes - done, (off_t)(tensor->offset + done));
        if (got > 0)
            done += (uint64_t)got;
        else if (got == 0 || errno != EINTR)
            status = ft_error_set(err, FT_IO, "%s: tensor %s at byte %llu: %s", path, tensor->name,
                                  (unsigned long long)(tensor->offset + done),
                                  got == 0 ? "the file ends before it" : strerror(errno));
    }
    ft_file_close(&file);
    return status;
}

/* A stored constant must be what the config derives: else the hashes would read other rows than in training. */
static int check_constants(const struct ft_checkpoint *checkpoint, uint32_t layer, const char *what,
                           const uint64_t *wanted, uint32_t count, struct ft_error *err)
{
    char name[160];
    snprintf(name, sizeof name, PLE_PREFIX "%s", layer, what);
    const struct ft_tensor *tensor = ft_checkpoint_find(checkpoint, name);
    if (!tensor)
        return FT_OK; /* derived values need no copy */
    const char *path = ft_checkpoint_file_path(checkpoint, tensor->file);
    if (tensor->dtype != FT_DTYPE_I64 || tensor->rank != 1 || tensor->shape[0] != count ||
        tensor->bytes != count * sizeof(uint64_t))
        return ft_error_set(err, FT_FORMAT, "%s: tensor %s is %s with %llu bytes, wanted I64 [%u]", path,
                            name, ft_dtype_name(tensor->dtype), (unsigned long long)tensor->bytes, count);
    uint64_t stored[FT_PLE_HEADS_MAX + FT_NGRAM_MAX];
    int status = read_tensor(checkpoint, tensor, stored, tensor->bytes, err);
    for (uint32_t i = 0; status == FT_OK && i < count; i++)
        if (stored[i] != wanted[i])
            status = ft_error_set(
                err, FT_FORMAT,
                "%s: tensor %s holds %lld at [%u], the config gives %lld: config.json belongs to "
                "another checkpoint",
                path, name, (long long)stored[i], i, (long long)wanted[i]);
    return status;
}

static int read_scale(const struct ft_checkpoint *checkpoint, uint32_t layer, float *scale,
                      struct ft_error *err)
{
    char name[160];
    snprintf(name, sizeof name, PLE_PREFIX "ngram_embedding.weight_scale", layer);
    const struct ft_tensor *tensor = ft_checkpoint_find(checkpoint, name);
    if (!tensor)
        return ft_error_set(err, FT_FORMAT, "%s: tensor %s is missing; a table in F8_E4M3 needs it",
                            ft_checkpoint_dir(checkpoint), name);
    const char *path = ft_checkpoint_file_path(checkpoint, tensor->file);
    bool bf16 = tensor->dtype == FT_DTYPE_BF16;
    bool single = tensor->rank == 0 || (tensor->rank == 1 && tensor->shape[0] == 1);
    if ((!bf16 && tensor->dtype != FT_DTYPE_F32) || !single || tensor->bytes != (bf16 ? 2u : 4u))
        return ft_error_set(err, FT_FORMAT, "%s: tensor %s is %s with %llu bytes, wanted one F32 or BF16",
                            path, name, ft_dtype_name(tensor->dtype), (unsigned long long)tensor->bytes);
    uint32_t bits = 0;
    int status = read_tensor(checkpoint, tensor, &bits, tensor->bytes, err);
    if (status)
        return status;
    if (bf16)
        bits <<= 16;
    memcpy(scale, &bits, sizeof *scale);
    if (!isfinite(*scale))
        return ft_error_set(err, FT_NUMERIC, "%s: tensor %s is %g", path, name, (double)*scale);
    return FT_OK;
}

static const struct ft_tensor *find_shard(const struct ft_checkpoint *checkpoint, uint32_t layer,
                                          uint32_t shard)
{
    char name[160];
    snprintf(name, sizeof name, PLE_PREFIX "ngram_embedding.shard_%u.weight", layer, shard);
    return ft_checkpoint_find(checkpoint, name);
}

static uint32_t count_shards(const struct ft_checkpoint *checkpoint, uint32_t layer)
{
    uint32_t count = 0;
    while (count < SHARDS_MAX && find_shard(checkpoint, layer, count))
        count++;
    return count;
}

/* One shard's tensor against the table so far. */
static int check_shard(const struct ft_checkpoint *checkpoint, const struct ft_tensor *tensor,
                       const struct ft_ple_spec *spec, const struct ft_row_table *table, struct ft_error *err)
{
    const char *path = ft_checkpoint_file_path(checkpoint, tensor->file);
    if (tensor->dtype != FT_DTYPE_F8_E4M3 && tensor->dtype != FT_DTYPE_BF16)
        return ft_error_set(err, FT_UNSUPPORTED, "%s: tensor %s is %s, wanted F8_E4M3 or BF16", path,
                            tensor->name, ft_dtype_name(tensor->dtype));
    if (table->shard_count && tensor->dtype != table->dtype)
        return ft_error_set(err, FT_FORMAT, "%s: tensor %s is %s, the shards before it are %s", path,
                            tensor->name, ft_dtype_name(tensor->dtype), ft_dtype_name(table->dtype));
    uint64_t bytes;
    if (tensor->rank != 2 || tensor->shape[1] != spec->row_width)
        return ft_error_set(err, FT_FORMAT,
                            "%s: tensor %s has rows of %llu elements (rank %u), wanted [rows, %u]", path,
                            tensor->name, (unsigned long long)(tensor->rank == 2 ? tensor->shape[1] : 0),
                            tensor->rank, spec->row_width);
    if (!ft_mul_u64(tensor->shape[0], (uint64_t)spec->row_width * ft_dtype_bytes(tensor->dtype), &bytes) ||
        bytes != tensor->bytes)
        return ft_error_set(err, FT_FORMAT, "%s: tensor %s has %llu bytes for %llu rows", path, tensor->name,
                            (unsigned long long)tensor->bytes, (unsigned long long)tensor->shape[0]);
    uint64_t end;
    if (!ft_add_u64(tensor->offset, bytes, &end) || end > ft_checkpoint_file_bytes(checkpoint, tensor->file))
        return ft_error_set(err, FT_FORMAT, "%s: tensor %s ends beyond the file", path, tensor->name);
    return FT_OK;
}

static int tables_add(struct ft_row_tables *tables, const struct ft_checkpoint *checkpoint,
                      const struct ft_ple_spec *spec, struct ft_error *err)
{
    struct ft_row_table *table = &tables->tables[tables->table_count];
    *table = (struct ft_row_table){.shard_first = tables->shard_count, .scale = 1.0f};
    const struct ft_tensor *tensor;
    int status = FT_OK;
    while (status == FT_OK && table->shard_count < SHARDS_MAX &&
           (tensor = find_shard(checkpoint, spec->layer, table->shard_count)) != NULL) {
        struct ft_row_shard *shard = &tables->shards[tables->shard_count];
        status = check_shard(checkpoint, tensor, spec, table, err);
        if (status == FT_OK)
            status =
                tables_add_file(tables, ft_checkpoint_file_path(checkpoint, tensor->file), &shard->file, err);
        if (status)
            return status;
        shard->first_row = table->row_count;
        shard->row_count = tensor->shape[0];
        shard->offset = tensor->offset;
        table->dtype = tensor->dtype;
        table->row_bytes = spec->row_width * ft_dtype_bytes(tensor->dtype);
        table->row_count += shard->row_count; /* bytes fit the files, so rows cannot overflow */
        table->shard_count++;
        tables->shard_count++;
    }
    if (table->shard_count == 0)
        return ft_error_set(err, FT_FORMAT,
                            "%s: tensor " PLE_PREFIX
                            "ngram_embedding.shard_0.weight is missing; layer %u has a PLE "
                            "table by the config",
                            ft_checkpoint_dir(checkpoint), spec->layer, spec->layer);
    if (table->row_count != spec->row_count)
        return ft_error_set(
            err, FT_FORMAT,
            "%s: the PLE table of layer %u has %llu rows in %u shards, the config gives %llu: a shard "
            "is missing or config.json belongs to another checkpoint",
            ft_checkpoint_dir(checkpoint), spec->layer, (unsigned long long)table->row_count,
            table->shard_count, (unsigned long long)spec->row_count);
    if (table->dtype == FT_DTYPE_F8_E4M3)
        status = read_scale(checkpoint, spec->layer, &table->scale, err);
    if (status == FT_OK)
        tables->table_count++;
    return status;
}

int ft_row_tables_open(struct ft_row_tables **out, const struct ft_checkpoint *checkpoint,
                       struct ft_error *err)
{
    *out = NULL;
    const struct ft_model *model = ft_checkpoint_model(checkpoint);
    uint32_t shard_count = 0;
    for (uint32_t p = 0; p < model->ple_count; p++)
        shard_count += count_shards(checkpoint, model->ple[p].layer);
    struct ft_row_tables *tables = tables_alloc(model->ple_count, shard_count,
                                                FT_MIN(shard_count, ft_checkpoint_file_count(checkpoint)));
    if (!tables)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for %u table shards",
                            ft_checkpoint_dir(checkpoint), shard_count);
    int status = FT_OK;
    for (uint32_t p = 0; status == FT_OK && p < model->ple_count; p++) {
        const struct ft_ple_spec *spec = &model->ple[p];
        status = tables_add(tables, checkpoint, spec, err);
        if (status == FT_OK)
            status = check_constants(checkpoint, spec->layer, "layer_multipliers", spec->multiplier,
                                     model->ngram_size, err);
        if (status == FT_OK)
            status = check_constants(checkpoint, spec->layer, "ngram_heads_vocab_sizes", spec->head_rows,
                                     spec->head_count, err);
        if (status == FT_OK)
            status = check_constants(checkpoint, spec->layer, "ngram_heads_offsets", spec->head_offset,
                                     spec->head_count, err);
    }
    if (status) {
        ft_row_tables_close(tables);
        return status;
    }
    *out = tables;
    return FT_OK;
}

int ft_row_tables_open_file(struct ft_row_tables **out, const char *path, uint32_t row_bytes,
                            struct ft_error *err)
{
    *out = NULL;
    struct ft_row_tables *tables = tables_alloc(1, 1, 1);
    if (!tables)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for its table", path);
    uint32_t file;
    int status = tables_add_file(tables, path, &file, err);
    if (status == FT_OK && (row_bytes == 0 || tables->files[0].bytes < row_bytes))
        status = ft_error_set(err, FT_FORMAT, "%s: %llu bytes hold no row of %u bytes", path,
                              (unsigned long long)tables->files[0].bytes, row_bytes);
    if (status) {
        ft_row_tables_close(tables);
        return status;
    }
    uint64_t row_count = tables->files[0].bytes / row_bytes;
    tables->tables[0] = (struct ft_row_table){.row_count = row_count,
                                              .row_bytes = row_bytes,
                                              .shard_count = 1,
                                              .dtype = FT_DTYPE_F8_E4M3,
                                              .scale = 1.0f / 64};
    tables->shards[0] = (struct ft_row_shard){.row_count = row_count};
    tables->table_count = tables->shard_count = 1;
    *out = tables;
    return FT_OK;
}

/* ---- questions ---- */

const struct ft_row_shard *ft_row_table_shard(const struct ft_row_tables *tables, uint32_t table,
                                              uint64_t row)
{
    const struct ft_row_table *t = &tables->tables[table];
    uint32_t low = t->shard_first, high = t->shard_first + t->shard_count - 1;
    while (low < high) { /* the last shard that begins at or before the row */
        uint32_t middle = low + (high - low + 1) / 2;
        if (tables->shards[middle].first_row <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return &tables->shards[low];
}

uint32_t ft_row_tables_count(const struct ft_row_tables *tables)
{
    return tables->table_count;
}

uint64_t ft_row_tables_bytes(const struct ft_row_tables *tables)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < tables->table_count; i++)
        bytes += tables->tables[i].row_count * tables->tables[i].row_bytes;
    return bytes;
}

uint32_t ft_row_table_row_bytes(const struct ft_row_tables *tables, uint32_t table)
{
    return tables->tables[table].row_bytes;
}

uint64_t ft_row_table_row_count(const struct ft_row_tables *tables, uint32_t table)
{
    return tables->tables[table].row_count;
}

enum ft_dtype ft_row_table_dtype(const struct ft_row_tables *tables, uint32_t table)
{
    return tables->tables[table].dtype;
}

float ft_row_table_scale(const struct ft_row_tables *tables, uint32_t table)
{
    return tables->tables[table].scale;
}
