/* SPDX-License-Identifier: Apache-2.0 */
/* ft bench: finds the measurement and calls it. */
#include "tools/ft_bench.h"

#include "tools/command.h"

#include <stdio.h>
#include <string.h>

struct bench {
    const char *name, *about;
    int (*run)(int argc, char **argv);
};

static const struct bench benches[] = {
#define BENCH(name, about) {#name, about, ft_command_bench_##name},
    FT_BENCHES(BENCH)
#undef BENCH
};

static void print_help(FILE *out)
{
    fprintf(out,
            "usage: ft bench WHAT [options]\n\nMeasures one part of the engine on this machine.\n\nWhat:\n");
    for (uint32_t i = 0; i < FT_COUNT_OF(benches); i++)
        fprintf(out, "  %-10s %s\n", benches[i].name, benches[i].about);
    fprintf(out, "\nOptions: ft bench WHAT --help. GB = 1e9 bytes. Other programs make numbers worse, never "
                 "better.\n");
}

int ft_command_bench(int argc, char **argv)
{
    const char *names[FT_COUNT_OF(benches)];
    struct ft_error err;
    if (!argc) {
        print_help(stderr);
        return FT_EXIT_USAGE;
    }
    if (!strcmp(argv[0], "--help") || !strcmp(argv[0], "-h")) {
        print_help(stdout);
        return ft_command_finish(FT_EXIT_OK);
    }
    for (uint32_t i = 0; i < FT_COUNT_OF(benches); i++) {
        names[i] = benches[i].name;
        if (!strcmp(argv[0], benches[i].name))
            return benches[i].run(argc - 1, argv + 1);
    }
    const char *closest = ft_options_find_closest(argv[0], names, FT_COUNT_OF(benches));
    ft_error_set(&err, FT_USAGE, "ft bench cannot measure \"%s\"; %s%s", argv[0],
                 closest ? "did you mean " : "ft bench --help lists what it can", closest ? closest : "");
    return ft_command_fail(&err);
}
