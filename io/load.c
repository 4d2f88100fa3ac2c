/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The read half of loading.
 *
 *   parts (sorted by file and offset) -> chunks: aligned ranges of at most one slot, small gaps read along
 *     loading thread: free slots -> reads in flight -> ready slots
 *     helpers:        ready slots -> ft_bind_apply -> free
 *
 * The loading thread owns the reader and does nothing else while there are helpers, so the disk never waits
 * for a conversion or for the page faults of new memory. Slots outnumber what a disk needs in flight for that
 * reason.
 */
#include "io/load.h"
#include "io/bind.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SLOT_BYTES (256u << 10) /* a read that every disk serves at full rate */
#define DEPTH 16u               /* 16 x 256 KiB: half of the usual 8 MiB of lockable memory */
#define DEPTH_MAX 256u
#define GAP_BYTES_MAX (64u << 10) /* a hole up to this is read along: cheaper than another request */
#define BLOCK 4096u
#define HELPERS_MAX 4u
#define READ_TIMEOUT_NS 60000000000ull
#define PROGRESS_NS 50000000ull

/* One read, and the range of parts it covers: from part_first at byte `from` to part_last up to byte `to`. */
struct load_chunk {
    uint64_t offset, from, to;
    uint32_t bytes, need; /* need: bytes that must arrive; the rest is alignment and may lie behind the end */
    uint32_t file;        /* of the checkpoint */
    uint32_t part_first, part_last;
};

struct load {
    const struct ft_checkpoint *checkpoint;
    struct ft_bind *bind;
    char *base; /* of the arena */
    uint32_t file_count;
    struct ft_file *files;  /* [file_count]; fd -1: has no parts */
    uint32_t *reader_files; /* [file_count] index in the reader */
    struct ft_reader *reader;
    bool direct; /* all files */

    uint32_t part; /* cursor: the next byte to plan */
    uint64_t part_from;

    char *pool; /* slot_count * slot_bytes */
    uint32_t slot_count, slot_bytes;
    struct load_chunk *chunks; /* [slot_count] */
    struct ft_read *staged;    /* [slot_count] loading thread only */
    struct ft_read_done *done; /* [slot_count] loading thread only */
    uint32_t in_flight;        /* loading thread only */
    uint64_t read_bytes;       /* loading thread only */

    /* shared with the helpers, under the lock */
    pthread_mutex_t lock;
    pthread_cond_t ready_some, freed_some;
    uint32_t *ready, ready_from, ready_count; /* [slot_count] ring */
    uint32_t *freed, freed_count;             /* [slot_count] stack */
    uint64_t applied_bytes;
    bool stop;
    int failed;
    struct ft_error failure; /* of the first that failed */
    uint32_t helper_count;
    pthread_t helpers[HELPERS_MAX];
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- planning ---- */

static uint64_t block_of(const struct ft_file *file)
{
    return FT_MAX(file->offset_align, BLOCK);
}

/*
 * The next chunk after the cursor; false when all parts are planned. A piece ends at a multiple of the part's
 * unit, so the block that an element straddles is read twice.
 */
static bool next_chunk(struct load *load, struct load_chunk *chunk)
{
    const struct ft_load_part *parts = ft_bind_parts(load->bind);
    uint32_t part_count = ft_bind_part_count(load->bind);
    while (load->part < part_count && parts[load->part].bytes == 0)
        load->part++;
    if (load->part >= part_count)
        return false;
    const struct ft_load_part *first = &parts[load->part];
    uint64_t align = block_of(&load->files[first->file]);
    *chunk = (struct load_chunk){.offset = (first->offset + load->part_from) / align * align,
                                 .from = load->part_from,
                                 .file = first->file,
                                 .part_first = load->part};
    uint64_t limit = chunk->offset + load->slot_bytes, reached = first->offset + load->part_from;
    while (load->part < part_count) {
        const struct ft_load_part *part = &parts[load->part];
        if (part->file != chunk->file || part->offset >= limit || part->offset > reached + GAP_BYTES_MAX)
            break;
        uint64_t take = FT_MIN(part->bytes, limit - part->offset);
        if (take < part->bytes)
            take = take / part->unit_bytes * part->unit_bytes;
        if (take <= load->part_from && part->bytes)
            break;
        chunk->part_last = load->part;
        chunk->to = take;
        reached = FT_MAX(reached, part->offset + take);
        load->part_from = take;
        if (take < part->bytes)
            break;
        load->part++;
        load->part_from = 0;
    }
    chunk->need = (uint32_t)(reached - chunk->offset);
    chunk->bytes = (uint32_t)ft_round_up(chunk->need, align);
    return true;
}

/* ---- applying ---- */

static void fail(struct load *load, const struct ft_error *failure)
{
    pthread_mutex_lock(&load->lock);
    if (!load->failed) {
        load->failed = failure->code;
        load->failure = *failure;
    }
    pthread_mutex_unlock(&load->lock);
}

/* Gives every part of the chunk its bytes; returns how many source bytes that were. */
static uint64_t apply_chunk(struct load *load, uint32_t slot)
{
    const struct load_chunk *chunk = &load->chunks[slot];
    const struct ft_load_part *parts = ft_bind_parts(load->bind);
    const char *bytes = load->pool + (size_t)slot * load->slot_bytes;
    uint64_t sum = 0;
    for (uint32_t p = chunk->part_first; p <= chunk->part_last; p++) {
        uint64_t from = p == chunk->part_first ? chunk->from : 0;
        uint64_t to = p == chunk->part_last ? chunk->to : parts[p].bytes;
        struct ft_error err;
        if (to > from &&
            ft_bind_apply(load->bind, &parts[p], bytes + (parts[p].offset + from - chunk->offset), from,
                          to - from, load->base, &err)) {
            fail(load, &err);
            break;
        }
        sum += to - from;
    }
    return sum;
}

static void *helper_thread(void *argument)
{
    struct load *load = argument;
    pthread_mutex_lock(&load->lock);
    for (;;) {
        while (!load->stop && load->ready_count == 0)
            pthread_cond_wait(&load->ready_some, &load->lock);
        if (load->stop)
            break;
        uint32_t slot = load->ready[load->ready_from];
        load->ready_from = (load->ready_from + 1) % load->slot_count;
        load->ready_count--;
        pthread_mutex_unlock(&load->lock);
        uint64_t applied = apply_chunk(load, slot);
        pthread_mutex_lock(&load->lock);
        load->applied_bytes += applied;
        load->freed[load->freed_count++] = slot;
        pthread_cond_signal(&load->freed_some);
    }
    pthread_mutex_unlock(&load->lock);
    return NULL;
}

/* Half of the cores that we may use; none on a single core, where the loading thread applies by itself. */
static void start_helpers(struct load *load)
{
    cpu_set_t set;
    uint32_t cores = sched_getaffinity(0, sizeof set, &set) == 0 ? (uint32_t)CPU_COUNT(&set) : 1;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (load->helper_count < FT_MIN(cores / 2, HELPERS_MAX) &&
           pthread_create(&load->helpers[load->helper_count], NULL, helper_thread, load) == 0)
        load->helper_count++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- the loading thread ---- */

static int submit_chunks(struct load *load, struct ft_error *err)
{
    uint32_t count = 0, accepted;
    pthread_mutex_lock(&load->lock);
    while (load->freed_count) {
        uint32_t slot = load->freed[load->freed_count - 1];
        struct load_chunk *chunk = &load->chunks[slot];
        if (!next_chunk(load, chunk))
            break;
        load->freed_count--;
        load->staged[count++] = (struct ft_read){.file = load->reader_files[chunk->file],
                                                 .buffer = 0,
                                                 .offset = chunk->offset,
                                                 .bytes = chunk->bytes,
                                                 .destination = load->pool + (size_t)slot * load->slot_bytes,
                                                 .tag = slot};
    }
    pthread_mutex_unlock(&load->lock);
    if (count == 0)
        return FT_OK;
    int status = ft_reader_submit(load->reader, load->staged, count, &accepted, err);
    load->in_flight += accepted;
    if (status == FT_OK)
        FT_ASSERT_EQ(accepted, count); /* the reader's depth is the number of slots */
    return status;
}

static int check_done(const struct load *load, const struct load_chunk *chunk, int64_t result,
                      struct ft_error *err)
{
    const char *path = ft_checkpoint_file_path(load->checkpoint, chunk->file);
    const struct ft_load_part *part = &ft_bind_parts(load->bind)[chunk->part_first];
    const char *tensor = ft_checkpoint_tensor(load->checkpoint, part->tensor)->name;
    if (result < 0)
        return ft_error_set(err, FT_IO, "%s: reading %u bytes at %llu (tensor %s) failed: %s", path,
                            chunk->bytes, (unsigned long long)chunk->offset, tensor, strerror((int)-result));
    if (result < chunk->need)
        return ft_error_set(
            err, FT_IO,
            "%s: ends at byte %llu, tensor %s needs it up to %llu; it had %llu bytes when it was "
            "opened: do not change a checkpoint while it is loaded",
            path, (unsigned long long)(chunk->offset + (uint64_t)result), tensor,
            (unsigned long long)(chunk->offset + chunk->need),
            (unsigned long long)load->files[chunk->file].bytes);
    return FT_OK;
}

/* Waits for at least one read and passes on all that are there. */
static int reap_chunks(struct load *load, struct ft_error *err)
{
    uint32_t count;
    int status = ft_reader_wait(load->reader, load->done, load->slot_count, 1, READ_TIMEOUT_NS, &count, err);
    load->in_flight -= count;
    for (uint32_t i = 0; i < count && status == FT_OK; i++) {
        uint32_t slot = (uint32_t)load->done[i].tag;
        status = check_done(load, &load->chunks[slot], load->done[i].result, err);
        load->read_bytes += (uint64_t)FT_MAX(load->done[i].result, 0);
    }
    if (status)
        return status;
    if (load->helper_count == 0)
        for (uint32_t i = 0; i < count; i++)
            load->applied_bytes += apply_chunk(load, (uint32_t)load->done[i].tag);
    pthread_mutex_lock(&load->lock);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = (uint32_t)load->done[i].tag;
        if (load->helper_count == 0)
            load->freed[load->freed_count++] = slot;
        else
            load->ready[(load->ready_from + load->ready_count++) % load->slot_count] = slot;
    }
    if (load->helper_count && count == 1)
        pthread_cond_signal(&load->ready_some);
    else if (load->helper_count)
        pthread_cond_broadcast(&load->ready_some);
    pthread_mutex_unlock(&load->lock);
    return FT_OK;
}

/* Waits for a helper; false when every slot is free: nothing is read, nothing is being applied. */
static bool wait_for_slot(struct load *load)
{
    bool planned_all = load->part >= ft_bind_part_count(load->bind);
    pthread_mutex_lock(&load->lock);
    uint32_t before = load->freed_count;
    bool all_free = before == load->slot_count;
    bool usable = before && !planned_all; /* freed since submit_chunks looked */
    while (!all_free && !usable && load->freed_count == before)
        pthread_cond_wait(&load->freed_some, &load->lock);
    pthread_mutex_unlock(&load->lock);
    return !all_free;
}

static int report_progress(struct load *load, const struct ft_load_options *options, uint64_t *last_ns,
                           struct ft_error *err)
{
    uint64_t now = now_ns(), total = ft_bind_source_bytes(load->bind);
    pthread_mutex_lock(&load->lock);
    uint64_t applied = load->applied_bytes;
    int failed = load->failed;
    if (failed)
        *err = load->failure;
    pthread_mutex_unlock(&load->lock);
    if (failed || !options->progress || (now - *last_ns < PROGRESS_NS && applied < total))
        return failed;
    *last_ns = now;
    if (!options->progress(options->progress_context, applied, total))
        return ft_error_set(err, FT_CANCELLED, "loading %s was cancelled at %llu of %llu MiB",
                            ft_checkpoint_dir(load->checkpoint), (unsigned long long)(applied >> 20),
                            (unsigned long long)(total >> 20));
    return FT_OK;
}

static int load_run(struct load *load, const struct ft_load_options *options, struct ft_error *err)
{
    uint64_t last_ns = 0;
    for (;;) {
        int status = submit_chunks(load, err);
        if (status == FT_OK && load->in_flight)
            status = reap_chunks(load, err);
        else if (status == FT_OK && !wait_for_slot(load))
            return report_progress(load, options, &(uint64_t){0}, err);
        bool done = false;
        if (status == FT_OK) {
            pthread_mutex_lock(&load->lock);
            done = load->freed_count == load->slot_count && load->part >= ft_bind_part_count(load->bind);
            pthread_mutex_unlock(&load->lock);
        }
        if (status == FT_OK && !done) /* the end is reported once, above */
            status = report_progress(load, options, &last_ns, err);
        if (status)
            return status;
    }
}

/* ---- opening and closing ---- */

static int load_open_files(struct load *load, struct ft_error *err)
{
    const struct ft_load_part *parts = ft_bind_parts(load->bind);
    load->direct = true;
    for (uint32_t p = 0; p < ft_bind_part_count(load->bind); p++) {
        struct ft_file *file = &load->files[parts[p].file];
        if (file->fd >= 0)
            continue;
        const char *path = ft_checkpoint_file_path(load->checkpoint, parts[p].file);
        int status = ft_file_open(file, path, true, err);
        if (status)
            return status;
        uint64_t wanted = ft_checkpoint_file_bytes(load->checkpoint, parts[p].file);
        if (file->bytes != wanted)
            return ft_error_set(err, FT_IO, "%s: has %llu bytes, it had %llu when its header was read", path,
                                (unsigned long long)file->bytes, (unsigned long long)wanted);
        if (!file->direct)
            (void)posix_fadvise(file->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
        load->direct = load->direct && file->direct;
    }
    return FT_OK;
}

static int load_alloc(struct load *load, uint32_t depth, struct ft_error *err)
{
    uint64_t align = BLOCK;
    for (uint32_t i = 0; i < load->file_count; i++)
        if (load->files[i].fd >= 0)
            align = FT_MAX(align, FT_MAX(load->files[i].memory_align, load->files[i].offset_align));
    load->slot_bytes = (uint32_t)FT_MAX(SLOT_BYTES, 2 * align);
    load->slot_count = FT_MIN(depth ? depth : DEPTH, DEPTH_MAX);
    load->chunks = calloc(load->slot_count, sizeof *load->chunks);
    load->staged = calloc(load->slot_count, sizeof *load->staged);
    load->done = calloc(load->slot_count, sizeof *load->done);
    load->ready = calloc(load->slot_count, sizeof *load->ready);
    load->freed = calloc(load->slot_count, sizeof *load->freed);
    void *pool = NULL;
    if (posix_memalign(&pool, align, (size_t)load->slot_count * load->slot_bytes))
        pool = NULL;
    load->pool = pool;
    if (!load->chunks || !load->staged || !load->done || !load->ready || !load->freed || !load->pool)
        return ft_error_set(err, FT_MEMORY, "loading: no memory for %u buffers of %u KiB", load->slot_count,
                            load->slot_bytes >> 10);
    for (uint32_t i = 0; i < load->slot_count; i++)
        load->freed[load->freed_count++] = i;
    return FT_OK;
}

static int load_open_reader(struct load *load, const struct ft_load_options *options, struct ft_error *err)
{
    struct ft_reader_options io = {.backend = options->backend,
                                   .depth = load->slot_count,
                                   .file_count_max = FT_MAX(load->file_count, 1u),
                                   .buffer = load->pool,
                                   .buffer_bytes = (uint64_t)load->slot_count * load->slot_bytes,
                                   .pread_threads = 0};
    int status = ft_reader_open(&load->reader, &io, err);
    for (uint32_t i = 0; status == FT_OK && i < load->file_count; i++)
        if (load->files[i].fd >= 0)
            status = ft_reader_add_file(load->reader, load->files[i].fd, &load->reader_files[i], err);
    return status ? ft_error_prepend(err, "loading") : FT_OK;
}

static int load_open(struct load *load, const struct ft_load_options *options, struct ft_error *err)
{
    load->file_count = ft_checkpoint_file_count(load->checkpoint);
    load->files = calloc(FT_MAX(load->file_count, 1u), sizeof *load->files);
    load->reader_files = calloc(FT_MAX(load->file_count, 1u), sizeof *load->reader_files);
    for (uint32_t i = 0; load->files && i < load->file_count; i++)
        load->files[i].fd = -1;
    if (!load->files || !load->reader_files)
        return ft_error_set(err, FT_MEMORY, "loading: no memory for %u files", load->file_count);
    int status = load_open_files(load, err);
    if (status == FT_OK)
        status = load_alloc(load, options->depth, err);
    if (status == FT_OK)
        status = load_open_reader(load, options, err);
    return status;
}

static void load_fini(struct load *load)
{
    pthread_mutex_lock(&load->lock);
    load->stop = true;
    pthread_cond_broadcast(&load->ready_some);
    pthread_mutex_unlock(&load->lock);
    for (uint32_t i = 0; i < load->helper_count; i++)
        pthread_join(load->helpers[i], NULL);
    ft_reader_close(load->reader); /* before the pool goes: reads in flight write to it */
    for (uint32_t i = 0; load->files && i < load->file_count; i++)
        if (load->files[i].fd >= 0)
            ft_file_close(&load->files[i]);
    pthread_cond_destroy(&load->freed_some);
    pthread_cond_destroy(&load->ready_some);
    pthread_mutex_destroy(&load->lock);
    free(load->files);
    free(load->reader_files);
    free(load->chunks);
    free(load->staged);
    free(load->done);
    free(load->ready);
    free(load->freed);
    free(load->pool);
}

static void write_stats(const struct load *load, uint64_t begin_ns, struct ft_load_stats *stats)
{
    *stats = (struct ft_load_stats){.bytes = load->read_bytes,
                                    .ns = now_ns() - begin_ns,
                                    .direct = load->direct,
                                    .backend = ft_reader_backend(load->reader)};
    snprintf(stats->note, sizeof stats->note, "%s", ft_reader_note(load->reader));
    size_t used = strlen(stats->note);
    if (!load->direct && used < sizeof stats->note)
        snprintf(
            stats->note + used, sizeof stats->note - used,
            "%sno O_DIRECT on this filesystem, reads go through the page cache: use a local disk (ext4, xfs)",
            used ? "; " : "");
}

/* Reads everything into an arena that is already placed. */
static int load_into(const struct ft_checkpoint *checkpoint, struct ft_bind *bind,
                     const struct ft_load_options *options, char *base, struct ft_load_stats *stats,
                     struct ft_error *err)
{
    struct load load = {.checkpoint = checkpoint, .bind = bind, .base = base};
    uint64_t begin_ns = now_ns();
    pthread_mutex_init(&load.lock, NULL);
    pthread_cond_init(&load.ready_some, NULL);
    pthread_cond_init(&load.freed_some, NULL);
    int status = load_open(&load, options, err);
    if (status == FT_OK) {
        start_helpers(&load);
        status = load_run(&load, options, err);
    }
    if (status == FT_OK && stats)
        write_stats(&load, begin_ns, stats);
    load_fini(&load);
    return status;
}

int ft_load(const struct ft_checkpoint *checkpoint, const struct ft_load_options *options,
            struct ft_loaded *loaded, struct ft_load_stats *stats, struct ft_error *err)
{
    static const struct ft_load_options defaults = {.backend = FT_IO_AUTO};
    *loaded = (struct ft_loaded){0};
    struct ft_bind *bind;
    int status = ft_bind_open(&bind, checkpoint, options ? options->fp8_uses : 0, err);
    if (status)
        return status;
    struct ft_arena arena = {0};
    status = ft_arena_init(&arena, "weights", ft_bind_arena_bytes(bind), err);
    if (status == FT_OK) {
        arena.used = ft_bind_arena_bytes(bind);
        const struct ft_weights *placed = ft_bind_place(bind, arena.base);
        status = load_into(checkpoint, bind, options ? options : &defaults, arena.base, stats, err);
        if (status == FT_OK)
            *loaded = (struct ft_loaded){.weights = *placed, .sizes = *ft_bind_sizes(bind), .arena = arena};
        else
            ft_arena_fini(&arena);
    }
    ft_bind_close(bind);
    return status;
}

void ft_loaded_fini(struct ft_loaded *loaded)
{
    ft_arena_fini(&loaded->arena);
    *loaded = (struct ft_loaded){0};
}
