/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A batch, from wants to bytes:
 *
 *   wants -> items sorted by (file, offset) -> reads: runs of items whose blocks touch, at most one slot long
 *         -> slots of the registered buffer, all at once or as slots become free -> rows copied to destinations
 *
 * Equal rows become neighbours by the sort, so they share a read and need no table of their own.
 */
#include "io/rows_internal.h"

#include "graph/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SLOTS_MAX 128u             /* reads in flight: disks reach their full rate between 64 and 128 */
#define SLOT_BYTES_MIN (32u << 10) /* longest merged read, unless one row is longer */
#define POOL_BYTES_MAX (4u << 20)  /* half of the usual 8 MiB of lockable memory */
#define RAM_CHUNK_BYTES (1u << 20)
#define RAM_DEPTH 8u
#define STALE_TIMEOUT_NS 1000000000ull

/* One wanted row, by where it lies. */
struct row_item {
    uint64_t offset;
    uint32_t file;
    uint32_t want;
};

struct row_read {
    uint64_t offset;
    uint32_t file, bytes;
    uint32_t item_first, item_count;
};

struct ft_row_reader {
    const struct ft_row_tables *tables;
    enum ft_rows_backend backend;
    struct ft_reader *reader; /* NULL: ram backend after loading */
    uint32_t rows_max;
    char note[512];
    enum ft_io_backend io_backend;
    struct ft_row_stats stats;

    /* the batch */
    const struct ft_row_want *wants;
    uint32_t want_count;
    bool pending;
    struct row_item *items, *scratch; /* [rows_max] */
    struct row_read *reads;           /* [rows_max] */
    uint32_t read_count, read_next;   /* reads[0 .. read_next) are submitted */
    uint32_t in_flight;
    uint32_t generation; /* completions of a forgotten batch are told apart by it */
    int failed;          /* first failure of the batch; its message: */
    struct ft_error failure;

    /* bounce slots */
    char *pool; /* slot_count * slot_bytes */
    uint32_t slot_bytes, slot_count, slots_free_count;
    uint32_t *slots_free;      /* [slot_count] stack */
    uint32_t *slot_read;       /* [slot_count] index into reads */
    struct ft_read *staged;    /* [slot_count] */
    struct ft_read_done *done; /* [slot_count] */

    /* ram backend */
    char **shard_base; /* [shard_count] first row of the shard, in ram */
    struct ft_arena ram;
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- planning a batch ---- */

static bool item_before(const struct row_item *a, const struct row_item *b)
{
    return a->file != b->file ? a->file < b->file : a->offset < b->offset;
}

/* Merge sort: qsort may allocate, and nothing may between submit and wait. */
static void sort_items(struct row_item *items, struct row_item *scratch, uint32_t count)
{
    struct row_item *from = items, *to = scratch;
    for (uint32_t width = 1; width < count; width *= 2) {
        for (uint32_t low = 0; low < count; low += 2 * width) {
            uint32_t middle = FT_MIN(low + width, count), high = FT_MIN(low + 2 * width, count);
            uint32_t a = low, b = middle;
            for (uint32_t i = low; i < high; i++)
                to[i] = a < middle && (b == high || !item_before(&from[b], &from[a])) ? from[a++] : from[b++];
        }
        struct row_item *swap = from;
        from = to;
        to = swap;
    }
    if (from != items)
        memcpy(items, from, count * sizeof *items);
}

static uint32_t row_bytes_of(const struct ft_row_reader *reader, const struct row_item *item)
{
    return reader->tables->tables[reader->wants[item->want].table].row_bytes;
}

static void plan_reads(struct ft_row_reader *reader)
{
    reader->read_count = reader->read_next = 0;
    struct row_read *read = NULL;
    for (uint32_t i = 0; i < reader->want_count; i++) {
        const struct row_item *item = &reader->items[i];
        uint64_t align = reader->tables->files[item->file].offset_align;
        uint64_t from = item->offset / align * align;
        uint64_t to = ft_round_up(item->offset + row_bytes_of(reader, item), align);
        bool same = i > 0 && !item_before(&reader->items[i - 1], item);
        reader->stats.rows_distinct += !same;
        /* touching blocks only: a gap would cost bytes, and a second read in flight costs next to nothing */
        if (read && read->file == item->file && from <= read->offset + read->bytes &&
            to - read->offset <= reader->slot_bytes) {
            read->bytes = (uint32_t)FT_MAX(read->bytes, to - read->offset);
            read->item_count++;
            continue;
        }
        read = &reader->reads[reader->read_count++];
        *read = (struct row_read){.offset = from,
                                  .file = item->file,
                                  .bytes = (uint32_t)(to - from),
                                  .item_first = i,
                                  .item_count = 1};
    }
}

static int check_wants(const struct ft_row_reader *reader, const struct ft_row_want *wants, uint32_t count,
                       struct ft_error *err)
{
    if (reader->pending)
        return ft_error_set(err, FT_INTERNAL, "rows: a batch is in flight already");
    if (count > reader->rows_max)
        return ft_error_set(err, FT_LIMIT, "rows: a batch of %u rows, at most %u were announced", count,
                            reader->rows_max);
    for (uint32_t i = 0; i < count; i++) {
        if (wants[i].table >= reader->tables->table_count)
            return ft_error_set(err, FT_INTERNAL, "rows: table %u of %u", wants[i].table,
                                reader->tables->table_count);
        if (wants[i].row >= reader->tables->tables[wants[i].table].row_count)
            return ft_error_set(err, FT_INTERNAL, "rows: row %llu of table %u, which has %llu rows",
                                (unsigned long long)wants[i].row, wants[i].table,
                                (unsigned long long)reader->tables->tables[wants[i].table].row_count);
    }
    return FT_OK;
}

/* ---- reading a batch ---- */

/* Submits what has a slot, with one call. */
static int pump(struct ft_row_reader *reader, struct ft_error *err)
{
    uint32_t count = 0;
    while (reader->read_next < reader->read_count && reader->slots_free_count) {
        const struct row_read *read = &reader->reads[reader->read_next];
        uint32_t slot = reader->slots_free[--reader->slots_free_count];
        reader->slot_read[slot] = reader->read_next++;
        reader->staged[count++] =
            (struct ft_read){.file = read->file,
                             .buffer = 0,
                             .offset = read->offset,
                             .bytes = read->bytes,
                             .destination = reader->pool + (size_t)slot * reader->slot_bytes,
                             .tag = (uint64_t)reader->generation << 32 | slot};
        reader->stats.read_bytes += read->bytes;
    }
    reader->stats.reads += count;
    reader->in_flight += count;
    uint32_t accepted = 0;
    int status = count ? ft_reader_submit(reader->reader, reader->staged, count, &accepted, err) : FT_OK;
    if (status == FT_OK)
        FT_ASSERT_EQ(accepted, count); /* the reader's depth is the number of slots */
    return status;
}

static void fail_read(struct ft_row_reader *reader, const struct row_read *read, const struct row_item *item,
                      int64_t result)
{
    if (reader->failed)
        return;
    const struct ft_row_want *want = &reader->wants[item->want];
    const char *path = reader->tables->paths[read->file];
    if (result < 0)
        reader->failed =
            ft_error_set(&reader->failure, FT_IO, "%s: row %llu of table %u, %u bytes at %llu: %s", path,
                         (unsigned long long)want->row, want->table, read->bytes,
                         (unsigned long long)read->offset, strerror((int)-result));
    else
        reader->failed =
            ft_error_set(&reader->failure, FT_IO,
                         "%s: row %llu of table %u lies at byte %llu, but the file ends at %llu; it had %llu "
                         "bytes when opened",
                         path, (unsigned long long)want->row, want->table, (unsigned long long)item->offset,
                         (unsigned long long)(read->offset + (uint64_t)result),
                         (unsigned long long)reader->tables->files[read->file].bytes);
}

static void deliver(struct ft_row_reader *reader, const struct ft_read_done *done)
{
    uint32_t slot = (uint32_t)done->tag;
    reader->slots_free[reader->slots_free_count++] = slot;
    if ((uint32_t)(done->tag >> 32) != reader->generation)
        return; /* of a batch that was given up */
    reader->in_flight--;
    const struct row_read *read = &reader->reads[reader->slot_read[slot]];
    const char *bytes = reader->pool + (size_t)slot * reader->slot_bytes;
    for (uint32_t i = 0; i < read->item_count; i++) {
        const struct row_item *item = &reader->items[read->item_first + i];
        uint64_t at = item->offset - read->offset;
        uint32_t row_bytes = row_bytes_of(reader, item);
        if (done->result < 0 || at + row_bytes > (uint64_t)done->result) {
            fail_read(reader, read, item, done->result);
            return;
        }
        memcpy(reader->wants[item->want].destination, bytes + at, row_bytes);
    }
}

static int reap(struct ft_row_reader *reader, uint32_t wanted, uint64_t timeout_ns, struct ft_error *err)
{
    uint32_t count;
    int status =
        ft_reader_wait(reader->reader, reader->done, reader->slot_count, wanted, timeout_ns, &count, err);
    for (uint32_t i = 0; i < count; i++)
        deliver(reader, &reader->done[i]);
    return status;
}

/* Reads of a batch that was given up still own their slots. */
static int drain_stale(struct ft_row_reader *reader, struct ft_error *err)
{
    uint32_t stale = reader->slot_count - reader->slots_free_count;
    if (stale == 0)
        return FT_OK;
    int status = reap(reader, stale, STALE_TIMEOUT_NS, err);
    return status ? ft_error_prepend(err, "rows: reads of an earlier batch have not come back") : FT_OK;
}

static void forget_batch(struct ft_row_reader *reader)
{
    reader->generation++;
    reader->in_flight = 0;
    reader->pending = false;
}

int ft_row_reader_submit(struct ft_row_reader *reader, const struct ft_row_want *wants, uint32_t count,
                         struct ft_error *err)
{
    int status = check_wants(reader, wants, count, err);
    if (status == FT_OK && reader->backend == FT_ROWS_DISK)
        status = drain_stale(reader, err);
    if (status)
        return status;
    reader->wants = wants;
    reader->want_count = count;
    reader->failed = FT_OK;
    reader->stats.batches++;
    reader->stats.rows_wanted += count;
    if (reader->backend == FT_ROWS_DISK) {
        for (uint32_t i = 0; i < count; i++) {
            const struct ft_row_shard *shard =
                ft_row_table_shard(reader->tables, wants[i].table, wants[i].row);
            uint64_t row_bytes = reader->tables->tables[wants[i].table].row_bytes;
            reader->items[i] =
                (struct row_item){.offset = shard->offset + (wants[i].row - shard->first_row) * row_bytes,
                                  .file = shard->file,
                                  .want = i};
        }
        sort_items(reader->items, reader->scratch, count);
        plan_reads(reader);
        status = pump(reader, err);
    }
    if (status)
        forget_batch(reader);
    else
        reader->pending = true;
    return status;
}

static void copy_from_ram(struct ft_row_reader *reader)
{
    for (uint32_t i = 0; i < reader->want_count; i++) {
        const struct ft_row_want *want = &reader->wants[i];
        const struct ft_row_shard *shard = ft_row_table_shard(reader->tables, want->table, want->row);
        uint64_t row_bytes = reader->tables->tables[want->table].row_bytes;
        memcpy(want->destination,
               reader->shard_base[shard - reader->tables->shards] +
                   (want->row - shard->first_row) * row_bytes,
               row_bytes);
    }
}

bool ft_row_reader_poll(struct ft_row_reader *reader, uint64_t wait_ns)
{
    struct ft_error err;
    if (!reader->pending || !reader->in_flight || reader->read_next < reader->read_count)
        return true;
    int status = reap(reader, wait_ns ? reader->in_flight : 0, wait_ns, &err);
    /* what broke is met again by the wait, which reports it */
    return (status != FT_OK && status != FT_TIMEOUT) || !reader->in_flight;
}

int ft_row_reader_wait(struct ft_row_reader *reader, uint64_t timeout_ns, struct ft_error *err)
{
    if (!reader->pending)
        return ft_error_set(err, FT_INTERNAL, "rows: there is no batch to wait for");
    if (reader->backend == FT_ROWS_RAM) {
        copy_from_ram(reader);
        reader->pending = false;
        return FT_OK;
    }
    int status = FT_OK;
    uint64_t begin = now_ns();
    while (status == FT_OK && reader->in_flight) {
        uint64_t passed = now_ns() - begin;
        bool last = reader->failed || reader->read_next == reader->read_count;
        uint32_t wanted = last ? reader->in_flight : FT_MAX(reader->in_flight / 2, 1u);
        status = reap(reader, wanted, passed < timeout_ns ? timeout_ns - passed : 0, err);
        if (status == FT_OK && !reader->failed)
            status = pump(reader, err);
    }
    forget_batch(reader);
    if (reader->failed) {
        *err = reader->failure;
        return reader->failed;
    }
    return status ? ft_error_prepend(err, "rows") : FT_OK;
}

/* ---- opening ---- */

static uint64_t chunk_align(const struct ft_file *file)
{
    return FT_MAX(file->offset_align, 4096u);
}

/* Where shard `s` begins and ends in its file, widened to whole pages. */
static void shard_range(const struct ft_row_tables *tables, uint32_t table, uint32_t s, uint64_t *from,
                        uint64_t *to)
{
    const struct ft_row_shard *shard = &tables->shards[s];
    uint64_t align = chunk_align(&tables->files[shard->file]);
    *from = shard->offset / align * align;
    *to = ft_round_up(shard->offset + shard->row_count * tables->tables[table].row_bytes, align);
}

/* Reads one shard's pages to `base`, several chunks in flight. */
static int ram_load_shard(struct ft_row_reader *reader, uint32_t table, uint32_t s, char *base,
                          struct ft_error *err)
{
    const struct ft_row_tables *tables = reader->tables;
    const struct ft_row_shard *shard = &tables->shards[s];
    uint64_t from, to, need = shard->offset + shard->row_count * tables->tables[table].row_bytes;
    shard_range(tables, table, s, &from, &to);
    uint64_t next = from, left = ft_div_up(to - from, RAM_CHUNK_BYTES);
    while (left) {
        struct ft_read reads[RAM_DEPTH];
        struct ft_read_done done[RAM_DEPTH];
        uint32_t count = 0, accepted;
        for (uint64_t at = next; at < to && count < RAM_DEPTH; at += RAM_CHUNK_BYTES)
            reads[count++] = (struct ft_read){.file = shard->file,
                                              .buffer = FT_NONE,
                                              .offset = at,
                                              .bytes = (uint32_t)FT_MIN(RAM_CHUNK_BYTES, to - at),
                                              .destination = base + (at - from),
                                              .tag = at};
        int status = ft_reader_submit(reader->reader, reads, count, &accepted, err);
        next += (uint64_t)accepted * RAM_CHUNK_BYTES;
        if (status == FT_OK)
            status = ft_reader_wait(reader->reader, done, RAM_DEPTH, 1, 60000000000ull, &count, err);
        if (status)
            return ft_error_prepend(err, "%s", tables->paths[shard->file]);
        for (uint32_t i = 0; i < count; i++) {
            uint64_t end = FT_MIN(FT_MIN(done[i].tag + RAM_CHUNK_BYTES, to), need);
            if (done[i].result < 0 || done[i].tag + (uint64_t)done[i].result < end)
                return ft_error_set(err, FT_IO, "%s: table %u at byte %llu: %s", tables->paths[shard->file],
                                    table, (unsigned long long)done[i].tag,
                                    done[i].result < 0 ? strerror((int)-done[i].result)
                                                       : "the file is shorter than when it was opened");
        }
        left -= count;
    }
    return FT_OK;
}

static int ram_load(struct ft_row_reader *reader, struct ft_error *err)
{
    const struct ft_row_tables *tables = reader->tables;
    uint64_t from, to, bytes = 0;
    for (uint32_t t = 0; t < tables->table_count; t++)
        for (uint32_t i = 0; i < tables->tables[t].shard_count; i++) {
            shard_range(tables, t, tables->tables[t].shard_first + i, &from, &to);
            bytes += to - from;
        }
    int status = ft_arena_init(&reader->ram, "PLE table", bytes, err);
    for (uint32_t t = 0; status == FT_OK && t < tables->table_count; t++)
        for (uint32_t i = 0; status == FT_OK && i < tables->tables[t].shard_count; i++) {
            uint32_t s = tables->tables[t].shard_first + i;
            void *base;
            shard_range(tables, t, s, &from, &to);
            status = ft_arena_push(&reader->ram, to - from, 1, &base, err);
            if (status == FT_OK && to > from) {
                reader->shard_base[s] = (char *)base + (tables->shards[s].offset - from);
                status = ram_load_shard(reader, t, s, base, err);
            }
        }
    ft_reader_close(reader->reader);
    reader->reader = NULL;
    return status;
}

static int disk_alloc(struct ft_row_reader *reader, struct ft_error *err)
{
    const struct ft_row_tables *tables = reader->tables;
    uint64_t align = 4096, span = SLOT_BYTES_MIN;
    for (uint32_t i = 0; i < tables->file_count; i++)
        align = FT_MAX(align, FT_MAX(tables->files[i].memory_align, tables->files[i].offset_align));
    for (uint32_t i = 0; i < tables->table_count; i++)
        span = FT_MAX(span, ft_round_up(tables->tables[i].row_bytes, align) + align);
    if (span > INT32_MAX)
        return ft_error_set(err, FT_LIMIT, "rows: a row of %llu bytes is too long", (unsigned long long)span);
    reader->slot_bytes = (uint32_t)ft_round_up(span, align);
    uint32_t fit = POOL_BYTES_MAX / reader->slot_bytes;
    reader->slot_count = FT_MAX(FT_MIN(FT_MIN(fit, SLOTS_MAX), reader->rows_max), 1u);
    reader->items = calloc(reader->rows_max, sizeof *reader->items);
    reader->scratch = calloc(reader->rows_max, sizeof *reader->scratch);
    reader->reads = calloc(reader->rows_max, sizeof *reader->reads);
    reader->slots_free = calloc(reader->slot_count, sizeof *reader->slots_free);
    reader->slot_read = calloc(reader->slot_count, sizeof *reader->slot_read);
    reader->staged = calloc(reader->slot_count, sizeof *reader->staged);
    reader->done = calloc(reader->slot_count, sizeof *reader->done);
    void *pool = NULL;
    bool got_pool = posix_memalign(&pool, align, (size_t)reader->slot_count * reader->slot_bytes) == 0;
    reader->pool = got_pool ? pool : NULL;
    if (!reader->items || !reader->scratch || !reader->reads || !reader->slots_free || !reader->slot_read ||
        !reader->staged || !reader->done || !got_pool)
        return ft_error_set(err, FT_MEMORY, "rows: no memory for batches of %u rows", reader->rows_max);
    memset(reader->pool, 0,
           (size_t)reader->slot_count * reader->slot_bytes); /* no page fault in the first batch */
    for (uint32_t i = 0; i < reader->slot_count; i++)
        reader->slots_free[reader->slots_free_count++] = reader->slot_count - 1 - i;
    return FT_OK;
}

/* The reader's note, and files that go through the page cache. */
static void write_note(struct ft_row_reader *reader)
{
    snprintf(reader->note, sizeof reader->note, "%s", ft_reader_note(reader->reader));
    for (uint32_t i = 0; i < reader->tables->file_count; i++)
        if (!reader->tables->files[i].direct) {
            size_t used = strlen(reader->note);
            snprintf(reader->note + used, sizeof reader->note - used,
                     "%s%s: its filesystem has no O_DIRECT, reads go through the page cache",
                     used ? "; " : "", reader->tables->paths[i]);
            break;
        }
}

static int reader_start(struct ft_row_reader *reader, const struct ft_row_reader_options *options,
                        struct ft_error *err)
{
    const struct ft_row_tables *tables = reader->tables;
    int status = FT_OK;
    if (reader->backend == FT_ROWS_DISK) {
        status = disk_alloc(reader, err);
    } else {
        reader->shard_base = calloc(FT_MAX(tables->shard_count, 1u), sizeof *reader->shard_base);
        if (!reader->shard_base)
            status = ft_error_set(err, FT_MEMORY, "rows: no memory for %u shards", tables->shard_count);
    }
    if (status)
        return status;
    struct ft_reader_options io = {.backend = options->io_backend,
                                   .depth = reader->backend == FT_ROWS_DISK ? reader->slot_count : RAM_DEPTH,
                                   .file_count_max = FT_MAX(tables->file_count, 1u),
                                   .buffer = reader->pool,
                                   .buffer_bytes = (uint64_t)reader->slot_count * reader->slot_bytes,
                                   .pread_threads = reader->backend == FT_ROWS_DISK ? 8 : 4};
    status = ft_reader_open(&reader->reader, &io, err);
    for (uint32_t i = 0; status == FT_OK && i < tables->file_count; i++) {
        uint32_t file;
        status = ft_reader_add_file(reader->reader, tables->files[i].fd, &file, err);
        if (status == FT_OK)
            FT_ASSERT_EQ(file, i);
    }
    if (status)
        return ft_error_prepend(err, "rows");
    reader->io_backend = ft_reader_backend(reader->reader);
    write_note(reader);
    return reader->backend == FT_ROWS_RAM ? ram_load(reader, err) : FT_OK;
}

int ft_row_reader_open(struct ft_row_reader **out, const struct ft_row_tables *tables,
                       const struct ft_row_reader_options *options, struct ft_error *err)
{
    *out = NULL;
    if (options->rows_max == 0 || options->rows_max > 1u << 24)
        return ft_error_set(err, FT_USAGE, "rows: batches of %u rows; wanted 1 to %u", options->rows_max,
                            1u << 24);
    struct ft_row_reader *reader = calloc(1, sizeof *reader);
    if (!reader)
        return ft_error_set(err, FT_MEMORY, "rows: no memory");
    reader->tables = tables;
    reader->backend = options->backend;
    reader->rows_max = options->rows_max;
    int status = reader_start(reader, options, err);
    if (status) {
        ft_row_reader_close(reader);
        return status;
    }
    *out = reader;
    return FT_OK;
}

void ft_row_reader_close(struct ft_row_reader *reader)
{
    if (!reader)
        return;
    ft_reader_close(reader->reader); /* first: reads in flight write to the pool */
    ft_arena_fini(&reader->ram);
    free(reader->shard_base);
    free(reader->items);
    free(reader->scratch);
    free(reader->reads);
    free(reader->slots_free);
    free(reader->slot_read);
    free(reader->staged);
    free(reader->done);
    free(reader->pool);
    free(reader);
}

void ft_row_reader_stats(const struct ft_row_reader *reader, struct ft_row_stats *stats)
{
    *stats = reader->stats;
}

const char *ft_row_reader_note(const struct ft_row_reader *reader)
{
    return reader->note;
}

enum ft_io_backend ft_row_reader_backend(const struct ft_row_reader *reader)
{
    return reader->io_backend;
}
