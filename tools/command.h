/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What all commands of ft share: how they end, and the list of them.
 *
 * Exit codes: 0 done; 1 failed, or a check found a difference; 2 wrong use; 130 ended by Ctrl-C (128 + the
 * signal). Every failure is one line on stderr, "ft: ...". Reports go to stdout.
 */
#ifndef FT_TOOLS_COMMAND_H
#define FT_TOOLS_COMMAND_H

#include "graph/error.h"
#include "tools/options.h"

#define FT_EXIT_OK 0
#define FT_EXIT_FAILED 1
#define FT_EXIT_USAGE 2

/*           name      function     what it does */
#define FT_COMMANDS(X)                                                                                       \
    X(run, "generate text, or chat on a terminal")                                                           \
    X(logits, "compute logits, router choices and hidden states of given ids")                               \
    X(verify, "compare a checkpoint's results with its reference")                                           \
    X(plan, "say what would be where in memory, and whether it fits")                                        \
    X(tokenize, "text to ids and back")                                                                      \
    X(bench, "measure decode steps, jobs, kernels, loading, rows of PLE tables")

/* argv[0] is the first argument behind the command's name. They return the exit code. */
#define FT_COMMAND_DECLARE(name, about) int ft_command_##name(int argc, char **argv);
FT_COMMANDS(FT_COMMAND_DECLARE)
#undef FT_COMMAND_DECLARE

/* Parses, prints help when asked. False: the command is over, with *exit_code. */
bool ft_command_parse(const struct ft_option_set *set, int argc, char **argv, struct ft_option_rest *rest,
                      int *exit_code);
/* Prints the error; returns its exit code. */
int ft_command_fail(const struct ft_error *err);
/* Flushes stdout. A closed pipe ends quietly with 1, any other write error says so; else `exit_code`. */
int ft_command_finish(int exit_code);

#endif
