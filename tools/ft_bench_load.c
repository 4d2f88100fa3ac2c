/* SPDX-License-Identifier: Apache-2.0 */
#include "io/load.h"
#include "tools/command.h"
#include "tools/ft_bench.h"
#include "tools/interrupt.h"
#include "tools/json_out.h"
#include "tools/open.h"

#include <fcntl.h>
#include <stddef.h>
#include <unistd.h>

struct options {
    struct ft_open_options open;
    uint32_t rounds, depth;
    bool cold, json;
};

#define FIELD(name) offsetof(struct options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"model", "DIR", "checkpoint directory", "the demo model", FT_OPTION_STRING, FIELD(open.model), 0, 0},
    {"io", "auto|uring|pread", "how files are read", NULL, FT_OPTION_CHOICE, FIELD(open.io), 0, 0},
    {"depth", "N", "reads in flight", "the loader's own", FT_OPTION_U32, FIELD(depth), 1, 4096},
    {"rounds", "N", "loads; the best counts", NULL, FT_OPTION_U32, FIELD(rounds), 1, 1000},
    {"cold", NULL, "drop the files from the page cache before each load", NULL, FT_OPTION_FLAG, FIELD(cold),
     0, 0},
    {"json", NULL, "report as JSON", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};

static bool go_on(void *context, uint64_t done, uint64_t total)
{
    (void)context;
    (void)done;
    (void)total;
    return !ft_interrupt_signal();
}

/* Asks the kernel to forget clean pages of the files; reads with O_DIRECT pass the cache by anyway. */
static void drop_cache(const struct ft_checkpoint *checkpoint)
{
    for (uint32_t i = 0; i < ft_checkpoint_file_count(checkpoint); i++) {
        int fd = open(ft_checkpoint_file_path(checkpoint, i), O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

static int measure(const struct options *options, const struct ft_checkpoint *checkpoint,
                   struct ft_load_stats *best, struct ft_error *err)
{
    struct ft_load_options load = {
        .backend = (enum ft_io_backend)options->open.io, .depth = options->depth, .progress = go_on};
    for (uint32_t i = 0; i < options->rounds; i++) {
        struct ft_loaded loaded;
        struct ft_load_stats stats;
        if (options->cold)
            drop_cache(checkpoint);
        int status = ft_load(checkpoint, &load, &loaded, &stats, err);
        if (status != FT_OK)
            return status;
        ft_loaded_fini(&loaded);
        if (!i || stats.ns < best->ns)
            *best = stats;
    }
    return FT_OK;
}

static void print_report(const struct options *options, const char *dir, const struct ft_load_stats *best)
{
    char text[32];
    struct ft_json json;
    double gbs = (double)best->bytes / FT_MAX(1.0, (double)best->ns);
    if (!options->json) {
        printf("%s in %.3f s: %.2f GB/s (%s%s)\n", ft_options_format_bytes(best->bytes, text, sizeof text),
               (double)best->ns / 1e9, gbs, ft_io_backend_name(best->backend),
               best->direct ? ", direct" : ", buffered");
        if (best->note[0])
            printf("note: %s\n", best->note);
        return;
    }
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    ft_json_text(&json, "model", dir);
    ft_json_u64(&json, "bytes", best->bytes);
    ft_json_f64(&json, "seconds", (double)best->ns / 1e9);
    ft_json_f64(&json, "gbs", gbs);
    ft_json_text(&json, "backend", ft_io_backend_name(best->backend));
    ft_json_bool(&json, "direct", best->direct);
    ft_json_text(&json, "note", best->note);
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

int ft_bench_load(int argc, char **argv)
{
    struct options options = {.rounds = 3};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options}};
    const struct ft_option_set set = {"ft bench load",
                                      "--model DIR [options]",
                                      "Loads the weights as ft run does, and lets go of them.",
                                      groups,
                                      1,
                                      0};
    struct ft_checkpoint *checkpoint = NULL;
    struct ft_load_stats best;
    struct ft_option_rest rest;
    struct ft_error err;
    char dir[4096];
    int exit_code;
    ft_open_options_init(&options.open);
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    int status = ft_engine_find_dir(&options.open, dir, sizeof dir, &err);
    if (status == FT_OK)
        status = ft_checkpoint_open(&checkpoint, dir, &err);
    if (status == FT_OK)
        status = measure(&options, checkpoint, &best, &err);
    if (checkpoint)
        ft_checkpoint_close(checkpoint);
    if (status != FT_OK)
        return ft_command_fail(&err);
    print_report(&options, dir, &best);
    return ft_command_finish(FT_EXIT_OK);
}
