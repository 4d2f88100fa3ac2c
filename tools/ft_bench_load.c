/* SPDX-License-Identifier: Apache-2.0 */
#include "io/bench_io.h"
#include "tools/command.h"
#include "tools/ft_bench.h"
#include "tools/interrupt.h"
#include "tools/json_out.h"
#include "tools/open.h"

#include <stddef.h>

struct options {
    struct ft_open_options open;
    uint32_t rounds, depth;
    bool json;
};

#define FIELD(name) offsetof(struct options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"model", "DIR", "checkpoint directory", "the demo model", FT_OPTION_STRING, FIELD(open.model), 0, 0},
    {"io", "auto|uring|pread", "how files are read", NULL, FT_OPTION_CHOICE, FIELD(open.io), 0, 0},
    {"depth", "N", "reads in flight", "the loader's own", FT_OPTION_U32, FIELD(depth), 1, 4096},
    {"rounds", "N", "loads; the best counts", NULL, FT_OPTION_U32, FIELD(rounds), 1, 1000},
    {"json", NULL, "report as JSON", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};

static bool go_on(void *context, uint64_t done, uint64_t total)
{
    (void)context;
    (void)done;
    (void)total;
    return !ft_interrupt_signal();
}

static void print_report(const struct options *options, const char *dir, const struct ft_bench_load *result)
{
    char text[32];
    struct ft_json json;
    const struct ft_load_stats *stats = &result->stats;
    if (!options->json) {
        printf("load   %s in %.3f s: %.2f GB/s (%s%s)\n",
               ft_options_format_bytes(stats->bytes, text, sizeof text), (double)stats->ns / 1e9,
               result->load_bytes_per_s / 1e9, ft_io_backend_name(stats->backend),
               stats->direct ? ", direct" : ", buffered");
        printf("plain  sequential O_DIRECT read of the same files: %.2f GB/s; loading reaches %.0f%%\n",
               result->plain_bytes_per_s / 1e9, result->fraction * 100);
        if (stats->note[0])
            printf("note: %s\n", stats->note);
        return;
    }
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    ft_json_text(&json, "model", dir);
    ft_json_u64(&json, "bytes", stats->bytes);
    ft_json_f64(&json, "seconds", (double)stats->ns / 1e9);
    ft_json_f64(&json, "gbs", result->load_bytes_per_s / 1e9);
    ft_json_f64(&json, "plain_gbs", result->plain_bytes_per_s / 1e9);
    ft_json_f64(&json, "fraction", result->fraction);
    ft_json_text(&json, "backend", ft_io_backend_name(stats->backend));
    ft_json_bool(&json, "direct", stats->direct);
    ft_json_text(&json, "note", stats->note);
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

int ft_command_bench_load(int argc, char **argv)
{
    struct options options = {.rounds = 3};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options}};
    const struct ft_option_set set = {"ft bench load",
                                      "--model DIR [options]",
                                      "Loads the weights as ft run does, beside a plain read of the same "
                                      "files; the page cache is dropped first.",
                                      groups,
                                      1,
                                      0};
    struct ft_checkpoint *checkpoint = NULL;
    struct ft_bench_load best;
    struct ft_option_rest rest;
    struct ft_error err;
    char dir[4096];
    int exit_code;
    ft_open_options_init(&options.open);
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    struct ft_load_options load = {
        .backend = (enum ft_io_backend)options.open.io, .depth = options.depth, .progress = go_on};
    int status = ft_engine_find_dir(&options.open, dir, sizeof dir, &err);
    if (status == FT_OK)
        status = ft_checkpoint_open(&checkpoint, dir, &err);
    if (status == FT_OK)
        status = ft_bench_load(checkpoint, &load, options.rounds, &best, &err);
    if (checkpoint)
        ft_checkpoint_close(checkpoint);
    if (status != FT_OK)
        return ft_command_fail(&err);
    print_report(&options, dir, &best);
    return ft_command_finish(FT_EXIT_OK);
}
