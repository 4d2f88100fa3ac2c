/* SPDX-License-Identifier: Apache-2.0 */
#include "io/file.h"
#include "io/rows.h"
#include "io_refusal.h"
#include "test.h"

#include <fcntl.h>
#include <time.h>

#define ROW_BYTES 160u
#define ROW_COUNT 20000u
#define SECOND 1000000000ull

static char path_[64];

static uint64_t random_next(uint64_t *x)
{
    *x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
    return *x;
}

static void make_table(const char *path, uint64_t bytes)
{
    uint64_t x = 88172645463325252u;
    unsigned char *content = malloc(bytes);
    struct ft_error err;
    for (uint64_t i = 0; i < bytes; i++)
        content[i] = (unsigned char)random_next(&x);
    if (ft_file_write_all(path, content, bytes, &err))
        abort();
    free(content);
}

static void make_tables(void)
{
    snprintf(path_, sizeof path_, "test_io_rows.%ld", (long)getpid());
    make_table(path_, (uint64_t)ROW_BYTES * ROW_COUNT + 33); /* and a torn row behind the last */
}

static void remove_tables(void)
{
    unlink(path_);
}

/* Batches of random rows, with duplicates, neighbours and straddling rows, against pread. */
static void check_batches(const char *path, uint32_t row_bytes, uint64_t row_count,
                          enum ft_rows_backend backend, enum ft_io_backend io_backend, uint32_t rows_max)
{
    struct ft_error err;
    struct ft_row_tables *tables;
    struct ft_row_reader *reader;
    int fd = open(path, O_RDONLY);
    REQUIRE(fd >= 0);
    CHECK_OK(ft_row_tables_open_file(&tables, path, row_bytes, &err), &err);
    CHECK_EQ(ft_row_table_row_count(tables, 0), row_count);
    CHECK_EQ(ft_row_table_row_bytes(tables, 0), row_bytes);
    CHECK_EQ(ft_row_tables_bytes(tables), row_count * row_bytes);
    struct ft_row_reader_options options = {
        .backend = backend, .io_backend = io_backend, .rows_max = rows_max};
    CHECK_OK(ft_row_reader_open(&reader, tables, &options, &err), &err);
    struct ft_row_want *wants = calloc(rows_max, sizeof *wants);
    unsigned char *got = calloc(rows_max, row_bytes), *wanted = malloc(row_bytes);
    uint64_t x = 1234567, distinct_max = 0, wanted_sum = 0;
    int wrong = 0;
    for (uint32_t batch = 0; batch < 30; batch++) {
        uint32_t count = batch == 0 ? 0 : batch == 1 ? rows_max : (uint32_t)(random_next(&x) % rows_max) + 1;
        for (uint32_t i = 0; i < count; i++) {
            uint64_t row = random_next(&x) % row_count;
            if (i && random_next(&x) % 4 == 0)
                row = wants[random_next(&x) % i].row; /* a duplicate */
            if (i && random_next(&x) % 4 == 0)
                row = FT_MIN(wants[i - 1].row + 1, row_count - 1); /* a neighbour */
            if (random_next(&x) % 16 == 0)
                row = random_next(&x) % 2 ? 0 : row_count - 1;
            wants[i] = (struct ft_row_want){.row = row, .destination = got + (size_t)i * row_bytes};
        }
        memset(got, 0xee, (size_t)count * row_bytes);
        CHECK_OK(ft_row_reader_submit(reader, wants, count, &err), &err);
        for (uint32_t look = 0; batch % 3 && look < 100000; look++) /* some batches come in while we look */
            if (ft_row_reader_poll(reader, batch % 3 == 1 ? 0 : 20000))
                break;
        CHECK_OK(ft_row_reader_wait(reader, 10 * SECOND, &err), &err);
        for (uint32_t i = 0; i < count; i++)
            wrong += pread(fd, wanted, row_bytes, (off_t)(wants[i].row * row_bytes)) != (ssize_t)row_bytes ||
                     memcmp(wanted, got + (size_t)i * row_bytes, row_bytes) != 0;
        wanted_sum += count;
        distinct_max += count;
    }
    CHECK_EQ(wrong, 0);
    struct ft_row_stats stats;
    ft_row_reader_stats(reader, &stats);
    CHECK_EQ(stats.batches, 30);
    CHECK_EQ(stats.rows_wanted, wanted_sum);
    if (backend == FT_ROWS_DISK)
        CHECK(stats.rows_distinct <= distinct_max && stats.reads <= stats.rows_distinct && stats.reads > 0);
    ft_row_reader_close(reader);
    ft_row_tables_close(tables);
    close(fd);
    free(wants);
    free(got);
    free(wanted);
}

TEST(random_rows_equal_pread_on_every_backend)
{
    for (int backend = FT_ROWS_DISK; backend <= FT_ROWS_RAM; backend++)
        for (int io = FT_IO_AUTO; io < FT_IO_BACKEND_COUNT; io += 2) {
            check_batches(path_, ROW_BYTES, ROW_COUNT, (enum ft_rows_backend)backend, (enum ft_io_backend)io,
                          16);
            check_batches(path_, ROW_BYTES, ROW_COUNT, (enum ft_rows_backend)backend, (enum ft_io_backend)io,
                          1);
            /* more reads than slots: they go on while waiting */
            check_batches(path_, ROW_BYTES, ROW_COUNT, (enum ft_rows_backend)backend, (enum ft_io_backend)io,
                          3000);
        }
}

TEST(long_odd_and_tiny_rows_are_whole)
{
    static const uint32_t sizes[] = {1, 7, 511, 4095, 4097, 40000, 100001};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        check_batches(path_, sizes[i], ((uint64_t)ROW_BYTES * ROW_COUNT + 33) / sizes[i], FT_ROWS_DISK,
                      FT_IO_AUTO, 64);
}

TEST(tmpfs_works_with_or_without_direct_reads)
{
    char path[64];
    snprintf(path, sizeof path, "/dev/shm/test_io_rows.%ld", (long)getpid());
    if (access("/dev/shm", W_OK) != 0)
        return;
    make_table(path, 1000 * 100);
    check_batches(path, 100, 1000, FT_ROWS_DISK, FT_IO_AUTO, 64);
    check_batches(path, 100, 1000, FT_ROWS_DISK, FT_IO_PREAD, 64);
    check_batches(path, 100, 1000, FT_ROWS_RAM, FT_IO_AUTO, 64);
    unlink(path);
}

TEST(looking_alone_brings_the_rows_in)
{
    struct ft_error err;
    struct ft_row_tables *tables;
    CHECK_OK(ft_row_tables_open_file(&tables, path_, ROW_BYTES, &err), &err);
    for (int io = FT_IO_AUTO; io < FT_IO_BACKEND_COUNT; io += 2) {
        struct ft_row_reader *reader;
        struct ft_row_reader_options options = {.rows_max = 4, .io_backend = (enum ft_io_backend)io};
        unsigned char got[ROW_BYTES], wanted[ROW_BYTES];
        struct ft_row_want want = {.row = 4321, .destination = got};
        CHECK_OK(ft_row_reader_open(&reader, tables, &options, &err), &err);
        CHECK(ft_row_reader_poll(reader, 0)); /* nothing to look for */
        CHECK_OK(ft_row_reader_submit(reader, &want, 1, &err), &err);
        bool there = false;
        for (uint32_t look = 0; look < 10000 && !there; look++) {
            there = ft_row_reader_poll(reader, 0);
            if (!there)
                nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        CHECK(there);
        CHECK_OK(ft_row_reader_wait(reader, 0, &err), &err); /* has nothing left to wait for */
        int fd = open(path_, O_RDONLY);
        CHECK_EQ(pread(fd, wanted, ROW_BYTES, 4321 * ROW_BYTES), ROW_BYTES);
        close(fd);
        CHECK(memcmp(wanted, got, ROW_BYTES) == 0);
        ft_row_reader_close(reader);
    }
    ft_row_tables_close(tables);
}

TEST(equal_and_neighbouring_rows_share_a_read)
{
    struct ft_error err;
    struct ft_row_tables *tables;
    struct ft_row_reader *reader;
    struct ft_row_stats stats;
    unsigned char got[64][ROW_BYTES];
    struct ft_row_want wants[64];
    CHECK_OK(ft_row_tables_open_file(&tables, path_, ROW_BYTES, &err), &err);
    struct ft_row_reader_options options = {.rows_max = 64};
    CHECK_OK(ft_row_reader_open(&reader, tables, &options, &err), &err);
    for (uint32_t i = 0; i < 64; i++)
        wants[i] = (struct ft_row_want){.row = 5000, .destination = got[i]};
    CHECK_OK(ft_row_reader_submit(reader, wants, 64, &err), &err);
    CHECK_OK(ft_row_reader_wait(reader, SECOND * 10, &err), &err);
    ft_row_reader_stats(reader, &stats);
    CHECK_EQ(stats.rows_distinct, 1);
    CHECK_EQ(stats.reads, 1);
    CHECK(memcmp(got[0], got[63], ROW_BYTES) == 0);
    for (uint32_t i = 0; i < 64; i++) /* backwards, 10 KiB in a row */
        wants[i].row = 6063 - i;
    CHECK_OK(ft_row_reader_submit(reader, wants, 64, &err), &err);
    CHECK_OK(ft_row_reader_wait(reader, SECOND * 10, &err), &err);
    ft_row_reader_stats(reader, &stats);
    CHECK_EQ(stats.rows_distinct, 65);
    CHECK_EQ(stats.reads, 2);
    CHECK(stats.read_bytes >= 64 * ROW_BYTES + ROW_BYTES && stats.read_bytes < 64 * 1024);
    ft_row_reader_close(reader);
    ft_row_tables_close(tables);
}

TEST(wrong_calls_are_refused_and_harmless)
{
    struct ft_error err;
    struct ft_row_tables *tables;
    struct ft_row_reader *reader;
    unsigned char got[3][ROW_BYTES];
    struct ft_row_want wants[3] = {{.row = 1, .destination = got[0]},
                                   {.row = ROW_COUNT, .destination = got[1]}};
    CHECK_FAILS(ft_row_tables_open_file(&tables, path_, 1u << 30, &err), FT_FORMAT, "hold no row", &err);
    CHECK_FAILS(ft_row_tables_open_file(&tables, path_, 0, &err), FT_FORMAT, "hold no row", &err);
    CHECK_FAILS(ft_row_tables_open_file(&tables, "/nowhere", 4, &err), FT_IO, "/nowhere", &err);
    CHECK_OK(ft_row_tables_open_file(&tables, path_, ROW_BYTES, &err), &err);
    struct ft_row_reader_options options = {.rows_max = 0};
    CHECK_FAILS(ft_row_reader_open(&reader, tables, &options, &err), FT_USAGE, "0 rows", &err);
    for (int backend = 0; backend < 2; backend++) {
        options = (struct ft_row_reader_options){.backend = (enum ft_rows_backend)backend, .rows_max = 2};
        CHECK_OK(ft_row_reader_open(&reader, tables, &options, &err), &err);
        CHECK_FAILS(ft_row_reader_wait(reader, SECOND, &err), FT_INTERNAL, "no batch", &err);
        wants[1].row = ROW_COUNT;
        CHECK_FAILS(ft_row_reader_submit(reader, wants, 2, &err), FT_INTERNAL, "row 20000 of table 0", &err);
        CHECK_FAILS(ft_row_reader_submit(reader, wants, 3, &err), FT_LIMIT, "at most 2", &err);
        wants[1].row = UINT64_MAX;
        CHECK_FAILS(ft_row_reader_submit(reader, wants, 2, &err), FT_INTERNAL, "of table 0", &err);
        wants[1] = (struct ft_row_want){.row = ROW_COUNT - 1, .table = 9, .destination = got[1]};
        CHECK_FAILS(ft_row_reader_submit(reader, wants, 2, &err), FT_INTERNAL, "table 9", &err);
        wants[1].table = 0;
        CHECK_OK(ft_row_reader_submit(reader, wants, 2, &err), &err);
        CHECK_FAILS(ft_row_reader_submit(reader, wants, 2, &err), FT_INTERNAL, "in flight", &err);
        CHECK_OK(ft_row_reader_wait(reader, SECOND * 10, &err), &err);
        ft_row_reader_close(reader);
    }
    ft_row_tables_close(tables);
}

TEST(a_file_cut_while_open_is_named_and_the_reader_goes_on)
{
    struct ft_error err;
    struct ft_row_tables *tables;
    struct ft_row_reader *reader;
    char path[80];
    unsigned char got[2][ROW_BYTES];
    snprintf(path, sizeof path, "%s.cut", path_);
    for (int io = FT_IO_AUTO; io < FT_IO_BACKEND_COUNT; io += 2) {
        make_table(path, ROW_BYTES * 1000);
        CHECK_OK(ft_row_tables_open_file(&tables, path, ROW_BYTES, &err), &err);
        struct ft_row_reader_options options = {.io_backend = (enum ft_io_backend)io, .rows_max = 8};
        CHECK_OK(ft_row_reader_open(&reader, tables, &options, &err), &err);
        CHECK_EQ(truncate(path, ROW_BYTES * 500 + 7), 0);
        struct ft_row_want wants[2] = {{.row = 2, .destination = got[0]},
                                       {.row = 900, .destination = got[1]}};
        for (int i = 0; i < 3; i++) {
            CHECK_OK(ft_row_reader_submit(reader, wants, 2, &err), &err);
            CHECK_FAILS(ft_row_reader_wait(reader, SECOND * 10, &err), FT_IO, "row 900 of table 0", &err);
            CHECK(strstr(err.message, path) && strstr(err.message, "160000"));
            wants[1].row = 499;
            CHECK_OK(ft_row_reader_submit(reader, wants, 2, &err), &err);
            CHECK_OK(ft_row_reader_wait(reader, SECOND * 10, &err), &err);
            wants[1].row = 900;
        }
        options.backend = FT_ROWS_RAM;
        struct ft_row_reader *ram;
        CHECK_FAILS(ft_row_reader_open(&ram, tables, &options, &err), FT_IO, "shorter", &err);
        ft_row_reader_close(reader);
        ft_row_tables_close(tables);
    }
    unlink(path);
}

/* A bound of nothing: some batches come too late, none of them spoils a later one. */
TEST(a_late_batch_is_forgotten_and_later_ones_are_right)
{
    struct ft_error err;
    struct ft_row_tables *tables;
    struct ft_row_reader *reader;
    static unsigned char got[256][ROW_BYTES], wanted[ROW_BYTES];
    struct ft_row_want wants[256];
    int fd = open(path_, O_RDONLY), late = 0, wrong = 0;
    uint64_t x = 99;
    CHECK_OK(ft_row_tables_open_file(&tables, path_, ROW_BYTES, &err), &err);
    for (int io = FT_IO_AUTO; io < FT_IO_BACKEND_COUNT; io += 2) {
        struct ft_row_reader_options options = {.io_backend = (enum ft_io_backend)io, .rows_max = 256};
        CHECK_OK(ft_row_reader_open(&reader, tables, &options, &err), &err);
        for (int batch = 0; batch < 100; batch++) {
            memset(got, 0xee, sizeof got);
            for (uint32_t i = 0; i < 256; i++)
                wants[i] = (struct ft_row_want){.row = random_next(&x) % ROW_COUNT, .destination = got[i]};
            CHECK_OK(ft_row_reader_submit(reader, wants, 256, &err), &err);
            int status = ft_row_reader_wait(reader, batch % 2 ? 10 * SECOND : 0, &err);
            CHECK(status == FT_OK || (status == FT_TIMEOUT && batch % 2 == 0));
            late += status == FT_TIMEOUT;
            for (uint32_t i = 0; status == FT_OK && i < 256; i++)
                wrong += pread(fd, wanted, ROW_BYTES, (off_t)(wants[i].row * ROW_BYTES)) != ROW_BYTES ||
                         memcmp(wanted, got[i], ROW_BYTES) != 0;
        }
        ft_row_reader_close(reader);
    }
    CHECK_EQ(wrong, 0);
    CHECK(late > 0);
    ft_row_tables_close(tables);
    close(fd);
}

static int child_reads_rows(void)
{
    struct ft_error err;
    struct ft_row_tables *tables;
    struct ft_row_reader *reader;
    struct ft_row_reader_options options = {.rows_max = 8};
    CHECK_OK(ft_row_tables_open_file(&tables, path_, ROW_BYTES, &err), &err);
    CHECK_OK(ft_row_reader_open(&reader, tables, &options, &err), &err);
    CHECK_EQ(ft_row_reader_backend(reader), FT_IO_PREAD);
    CHECK(strstr(ft_row_reader_note(reader), "io_uring refused"));
    ft_row_reader_close(reader);
    ft_row_tables_close(tables);
    check_batches(path_, ROW_BYTES, ROW_COUNT, FT_ROWS_DISK, FT_IO_AUTO, 64);
    return test_failures_ != 0;
}

static int child_reads_rows_through_the_cache(void)
{
    struct ft_error err;
    struct ft_row_tables *tables;
    struct ft_row_reader *reader;
    struct ft_row_reader_options options = {.rows_max = 8};
    CHECK_OK(ft_row_tables_open_file(&tables, path_, ROW_BYTES, &err), &err);
    CHECK_OK(ft_row_reader_open(&reader, tables, &options, &err), &err);
    CHECK(strstr(ft_row_reader_note(reader), "no O_DIRECT"));
    ft_row_reader_close(reader);
    ft_row_tables_close(tables);
    check_batches(path_, ROW_BYTES, ROW_COUNT, FT_ROWS_DISK, FT_IO_AUTO, 64);
    check_batches(path_, ROW_BYTES, ROW_COUNT, FT_ROWS_RAM, FT_IO_AUTO, 64);
    return test_failures_ != 0;
}

TEST(refused_rings_and_direct_reads_cost_nothing_but_speed)
{
    int cached = run_in_child(refuse_direct, EINVAL, child_reads_rows_through_the_cache);
    CHECK(cached == 0 || cached == 77);
    int code = run_in_child(refuse_io_uring, EPERM, child_reads_rows);
    CHECK(code == 0 || code == 77);
}

/* ---- checkpoints ---- */

/* Every table of the checkpoint: sampled rows against pread of the shard tensors. */
static void check_checkpoint(const char *name, enum ft_dtype dtype, uint32_t row_bytes, uint64_t row_count)
{
    struct ft_error err;
    char dir[512];
    struct ft_checkpoint *checkpoint;
    struct ft_row_tables *tables;
    snprintf(dir, sizeof dir, "%s/%s", FT_DATA_DIR, name);
    CHECK_OK(ft_checkpoint_open(&checkpoint, dir, &err), &err);
    CHECK_OK(ft_row_tables_open(&tables, checkpoint, &err), &err);
    REQUIRE(ft_row_tables_count(tables) == 1);
    CHECK_EQ(ft_row_table_dtype(tables, 0), dtype);
    CHECK_EQ(ft_row_table_row_bytes(tables, 0), row_bytes);
    CHECK_EQ(ft_row_table_row_count(tables, 0), row_count);
    CHECK(dtype == FT_DTYPE_BF16 ? ft_row_table_scale(tables, 0) == 1.0f
                                 : ft_row_table_scale(tables, 0) > 0 && ft_row_table_scale(tables, 0) < 1.0f);
    for (int backend = 0; backend < 2; backend++) {
        struct ft_row_reader *reader;
        struct ft_row_reader_options options = {.backend = (enum ft_rows_backend)backend, .rows_max = 512};
        CHECK_OK(ft_row_reader_open(&reader, tables, &options, &err), &err);
        unsigned char got[512][64], wanted[64];
        struct ft_row_want wants[512];
        uint64_t x = 5, per_shard = row_count / 4;
        int wrong = 0;
        for (uint32_t i = 0; i < 512; i++) /* the ends of each shard, then anywhere */
            wants[i] = (struct ft_row_want){.row = i < 8 ? i / 2 * per_shard + (i % 2 ? per_shard - 1 : 0)
                                                         : random_next(&x) % row_count,
                                            .destination = got[i]};
        CHECK_OK(ft_row_reader_submit(reader, wants, 512, &err), &err);
        CHECK_OK(ft_row_reader_wait(reader, SECOND * 10, &err), &err);
        for (uint32_t i = 0; i < 512; i++) {
            char tensor_name[128];
            snprintf(tensor_name, sizeof tensor_name,
                     "layers.1.ple.ple_embedding.ngram_embedding.shard_%u.weight",
                     (unsigned)(wants[i].row / per_shard));
            const struct ft_tensor *tensor = ft_checkpoint_find(checkpoint, tensor_name);
            REQUIRE(tensor);
            int fd = open(ft_checkpoint_file_path(checkpoint, tensor->file), O_RDONLY);
            wrong +=
                pread(fd, wanted, row_bytes,
                      (off_t)(tensor->offset + wants[i].row % per_shard * row_bytes)) != (ssize_t)row_bytes ||
                memcmp(wanted, got[i], row_bytes) != 0;
            close(fd);
        }
        CHECK_EQ(wrong, 0);
        ft_row_reader_close(reader);
    }
    ft_row_tables_close(tables);
    ft_checkpoint_close(checkpoint);
}

TEST(tables_of_checkpoints_equal_their_tensors)
{
    check_checkpoint("ft-tiny", FT_DTYPE_F8_E4M3, 32, 4 * 16096);
    check_checkpoint("fixtures/qwen4_exp-bf16", FT_DTYPE_BF16, 32, 4 * 1088);
    check_checkpoint("fixtures/qwen4_exp-nvfp4-modelopt", FT_DTYPE_F8_E4M3, 16, 4 * 1088);
}

TEST(a_checkpoint_without_tables_has_none)
{
    struct ft_error err;
    struct ft_checkpoint *checkpoint;
    struct ft_row_tables *tables;
    CHECK_OK(ft_checkpoint_open(&checkpoint, FT_DATA_DIR "/fixtures/qwen3_moe-bf16", &err), &err);
    CHECK_OK(ft_row_tables_open(&tables, checkpoint, &err), &err);
    CHECK_EQ(ft_row_tables_count(tables), 0);
    CHECK_EQ(ft_row_tables_bytes(tables), 0);
    struct ft_row_reader *reader;
    for (int backend = 0; backend < 2; backend++) {
        struct ft_row_reader_options options = {.backend = (enum ft_rows_backend)backend, .rows_max = 1};
        CHECK_OK(ft_row_reader_open(&reader, tables, &options, &err), &err);
        CHECK_OK(ft_row_reader_submit(reader, NULL, 0, &err), &err);
        CHECK_OK(ft_row_reader_wait(reader, SECOND, &err), &err);
        ft_row_reader_close(reader);
    }
    ft_row_tables_close(tables);
    ft_checkpoint_close(checkpoint);
}

/* Copies a checkpoint, changes some bytes of a tensor or its name in the header, and opens its tables. */
static int open_changed(const char *find, const char *replace, const char *poke, struct ft_error *err)
{
    char command[1024], dir[96], path[160];
    char *text;
    uint64_t bytes;
    struct ft_checkpoint *checkpoint;
    struct ft_row_tables *tables = NULL;
    snprintf(dir, sizeof dir, "%s.dir", path_);
    snprintf(command, sizeof command,
             "rm -rf %s && cp -rL '%s/fixtures/qwen4_exp-nvfp4-modelopt' %s && chmod -R u+w %s", dir,
             FT_DATA_DIR, dir, dir);
    if (system(command) != 0)
        abort();
    snprintf(path, sizeof path, "%s/model-00002-of-00002.safetensors", dir);
    if (find) {
        if (ft_file_read_all(path, 1u << 26, &text, &bytes, err))
            abort();
        char *at = memmem(text, bytes, find, strlen(find));
        if (!at)
            abort();
        memcpy(at, replace, strlen(replace));
        if (ft_file_write_all(path, text, bytes, err))
            abort();
        free(text);
    }
    int status = ft_checkpoint_open(&checkpoint, dir, err);
    if (status == FT_OK) {
        if (poke) {
            const struct ft_tensor *tensor = ft_checkpoint_find(checkpoint, poke);
            int fd = open(ft_checkpoint_file_path(checkpoint, tensor->file), O_WRONLY);
            static const unsigned char ones[2] = {0x80, 0x7f};
            if (pwrite(fd, ones, 2, (off_t)tensor->offset) != 2)
                abort();
            close(fd);
        }
        status = ft_row_tables_open(&tables, checkpoint, err);
        ft_row_tables_close(tables);
        ft_checkpoint_close(checkpoint);
    }
    snprintf(command, sizeof command, "rm -rf %s", dir);
    if (system(command) != 0)
        abort();
    return status;
}

TEST(tables_that_do_not_fit_the_model_are_refused_by_name)
{
#define PLE "layers.1.ple.ple_embedding."
    struct ft_error err;
    CHECK_OK(open_changed(NULL, NULL, NULL, &err), &err);
    CHECK_FAILS(open_changed(NULL, NULL, PLE "ngram_heads_offsets", &err), FT_FORMAT, "ngram_heads_offsets",
                &err);
    CHECK_FAILS(open_changed(NULL, NULL, PLE "ngram_heads_vocab_sizes", &err), FT_FORMAT, "vocab_sizes",
                &err);
    CHECK_FAILS(open_changed(NULL, NULL, PLE "layer_multipliers", &err), FT_FORMAT, "layer_multipliers",
                &err);
    CHECK_FAILS(open_changed(NULL, NULL, PLE "ngram_embedding.weight_scale", &err), FT_NUMERIC,
                "weight_scale", &err);
    CHECK(open_changed("ngram_embedding.shard_0.", "ngram_embedding.shard_7.", NULL, &err) == FT_FORMAT);
    CHECK(open_changed("ngram_embedding.shard_3.", "ngram_embedding.shard_9.", NULL, &err) == FT_FORMAT);
    CHECK(open_changed("ngram_embedding.weight_scale", "ngram_embedding.weight_scald", NULL, &err) ==
          FT_FORMAT);
    CHECK(open_changed("ngram_heads_vocab_sizes\":{\"dtype\":\"I64\"",
                       "ngram_heads_vocab_sizes\":{\"dtype\":\"F32\"", NULL, &err) == FT_FORMAT);
#undef PLE
}

TEST_MAIN(make_tables(); RUN(random_rows_equal_pread_on_every_backend) RUN(long_odd_and_tiny_rows_are_whole)
              RUN(tmpfs_works_with_or_without_direct_reads) RUN(equal_and_neighbouring_rows_share_a_read)
                  RUN(looking_alone_brings_the_rows_in) RUN(wrong_calls_are_refused_and_harmless)
                      RUN(a_file_cut_while_open_is_named_and_the_reader_goes_on)
                          RUN(a_late_batch_is_forgotten_and_later_ones_are_right)
                              RUN(refused_rings_and_direct_reads_cost_nothing_but_speed)
                                  RUN(tables_of_checkpoints_equal_their_tensors)
                                      RUN(a_checkpoint_without_tables_has_none)
                                          RUN(tables_that_do_not_fit_the_model_are_refused_by_name)
                                              remove_tables();)
