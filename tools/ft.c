/* SPDX-License-Identifier: Apache-2.0 */
/* ft: finds the command and calls it. */
#include "tools/command.h"
#include "tools/interrupt.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct command {
    const char *name, *about;
    int (*run)(int argc, char **argv);
};

static const struct command commands[] = {
#define COMMAND(name, about) {#name, about, ft_command_##name},
    FT_COMMANDS(COMMAND)
#undef COMMAND
};

static void print_help(FILE *out)
{
    fprintf(out, "usage: ft COMMAND [options]\n\nRuns Mixture-of-Experts language models whose experts need "
                 "not fit on "
                 "a GPU.\n\nCommands:\n");
    for (uint32_t i = 0; i < FT_COUNT_OF(commands); i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].about);
    fprintf(out, "  %-10s %s\n  %-10s %s\n\n", "version", "print the version", "help",
            "this text; help COMMAND is COMMAND --help");
    fprintf(
        out,
        "Options of a command, their defaults and units: ft COMMAND --help. Sizes take K, M, G, T (powers of "
        "1024).\nExit codes: 0 done, 1 failed or a difference was found, 2 wrong use, 130 ended by "
        "Ctrl-C.\n");
}

/* With a standard stream closed, the next file opened would get its number, and reports would be written into it. */
static void fill_standard_streams(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_RDONLY : O_WRONLY) != fd)
            return;
}

static int refuse_command(const char *name)
{
    const char *names[FT_COUNT_OF(commands) + 2] = {"version", "help"};
    struct ft_error err;
    for (uint32_t i = 0; i < FT_COUNT_OF(commands); i++)
        names[i + 2] = commands[i].name;
    const char *closest = ft_options_find_closest(name, names, FT_COUNT_OF(names));
    ft_error_set(&err, FT_USAGE, "there is no command \"%s\"; %s%s", name,
                 closest ? "did you mean " : "ft --help lists them", closest ? closest : "");
    return ft_command_fail(&err);
}

static int dispatch(int argc, char **argv)
{
    const char *name = argv[0];
    char help[] = "--help";
    char *help_arguments[] = {help, NULL};
    bool wants_help = !strcmp(name, "help") || !strcmp(name, "--help") || !strcmp(name, "-h");
    if (!strcmp(name, "version") || !strcmp(name, "--version")) {
        printf("ft %s\n", FT_VERSION);
        return ft_command_finish(FT_EXIT_OK);
    }
    if (wants_help && argc > 1)
        name = argv[1];
    else if (wants_help) {
        print_help(stdout);
        return ft_command_finish(FT_EXIT_OK);
    }
    for (uint32_t i = 0; i < FT_COUNT_OF(commands); i++)
        if (!strcmp(commands[i].name, name))
            return wants_help ? commands[i].run(1, help_arguments) : commands[i].run(argc - 1, argv + 1);
    return refuse_command(name);
}

int main(int argc, char **argv)
{
    fill_standard_streams();
    ft_interrupt_begin();
    if (argc < 2) {
        print_help(stderr);
        return FT_EXIT_USAGE;
    }
    return dispatch(argc - 1, argv + 1);
}
