/* SPDX-License-Identifier: Apache-2.0 */
/* The interactive chat: what ft run does on a terminal without a prompt. */
#ifndef FT_TOOLS_FT_CHAT_H
#define FT_TOOLS_FT_CHAT_H

struct ft_run_options;

/* Returns the exit code. */
int ft_chat_main(const struct ft_run_options *options);

#endif
