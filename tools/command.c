/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/command.h"

#include "tools/interrupt.h"

#include <errno.h>
#include <signal.h>
#include <string.h>

bool ft_command_parse(const struct ft_option_set *set, int argc, char **argv, struct ft_option_rest *rest,
                      int *exit_code)
{
    struct ft_error err;
    if (ft_options_parse(set, argc, argv, rest, &err) != FT_OK) {
        *exit_code = ft_command_fail(&err);
        return false;
    }
    if (rest->help) {
        ft_options_print_help(set, stdout);
        *exit_code = ft_command_finish(FT_EXIT_OK);
        return false;
    }
    return true;
}

int ft_command_fail(const struct ft_error *err)
{
    int signal_number = ft_interrupt_signal();
    fflush(stdout);
    if (err->code == FT_CANCELLED && signal_number) {
        fprintf(stderr, "ft: interrupted\n");
        return 128 + signal_number;
    }
    fprintf(stderr, "ft: %s\n", err->message);
    return err->code == FT_USAGE ? FT_EXIT_USAGE : FT_EXIT_FAILED;
}

int ft_command_finish(int exit_code)
{
    errno = 0;
    bool bad = fflush(stdout) != 0 || ferror(stdout);
    if (!bad)
        return exit_code;
    /* An earlier write may have failed and this flush had nothing to do: then errno says nothing. */
    if (errno && errno != EPIPE)
        fprintf(stderr, "ft: standard output: %s\n", strerror(errno));
    return exit_code == FT_EXIT_OK ? FT_EXIT_FAILED : exit_code;
}
