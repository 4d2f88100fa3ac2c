/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ft run: options, and what prompts and the interactive chat share: tokenizer, chat template, sampling,
 * engine.
 *
 * Threads: one at a time. The tokenizer comes first, because the number of prompt tokens goes into the plan.
 */
#ifndef FT_TOOLS_RUN_H
#define FT_TOOLS_RUN_H

#include "io/chat.h"
#include "tools/generate.h"
#include "tools/open.h"
#include "tools/summary.h"

struct ft_run_options {
    struct ft_open_options open;
    struct ft_generate_options generate;
    struct ft_option_list prompts;
    const char *system;
    bool chat, special_tokens, json;
};

struct ft_run {
    const struct ft_run_options *options;
    char dir[4096];
    struct ft_tokenizer *tokenizer;
    struct ft_chat chat; /* valid when chatting */
    struct ft_generation_config config;
    struct ft_sampling sampling;
    struct ft_engine engine;
    struct ft_summary summary;
    int write_errno; /* of stdout; 0 = none */
};

/* Tokenizer, template when `chat`, sampling. No engine yet; the demo model is announced here. */
int ft_run_begin(struct ft_run *run, const struct ft_run_options *options, bool chat, struct ft_error *err);
/* The engine, with a KV pool for `sequences` of tokens_each where the user left it open. */
int ft_run_open_engine(struct ft_run *run, uint64_t tokens_each, uint32_t sequences, struct ft_error *err);
/* Tokens to generate behind a prompt when `sequences` share the KV pool: --max-tokens, or what there is room for. */
uint32_t ft_run_max_tokens(const struct ft_run *run, uint32_t prompt_count, uint32_t sequences);
/* Closes everything. FT_IO when the trace is incomplete. */
int ft_run_end(struct ft_run *run, struct ft_error *err);
/* ft_text_write to stdout, flushed; context is an int that keeps the errno of a failure. */
bool ft_run_write_stdout(void *context, const char *text, size_t bytes);

#endif
