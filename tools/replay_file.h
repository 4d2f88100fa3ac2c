/* SPDX-License-Identifier: Apache-2.0 */
/*
 * --replay TRACE: the placements of a recorded trace, as input of the replay policy.
 *
 * Errors: FT_IO, FT_FORMAT for what is not a trace, FT_MISMATCH when it was recorded with another model's
 * sizes. Ownership: the choices belong to the struct until ft_replay_file_fini. Threads: one at a time.
 */
#ifndef FT_TOOLS_REPLAY_FILE_H
#define FT_TOOLS_REPLAY_FILE_H

#include "graph/model.h"
#include "planner/policy_replay.h"

int ft_replay_file_read(struct ft_replay *replay, const char *path, const struct ft_model *model,
                        struct ft_error *err);
void ft_replay_file_fini(struct ft_replay *replay); /* a zeroed struct is fine */

#endif
