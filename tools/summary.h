/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a run cost, as text on stderr or as a JSON object: load, first token, prompt and decode speed, thread
 * time by class, experts by lane, waiting by who and for what, hits and misses of the expert slots.
 *
 * Time by class is a sum over threads, so it can exceed the wall clock; shares are of all thread time,
 * waiting included. Threads: one at a time.
 */
#ifndef FT_TOOLS_SUMMARY_H
#define FT_TOOLS_SUMMARY_H

#include "tools/json_out.h"
#include "tools/open.h"

struct ft_summary {
    uint32_t sequence_count, prompt_tokens, reused_tokens, new_tokens;
    double first_token_ns; /* submit to first token, the slowest sequence; 0 = none came */
};

/* Adds one finished sequence. */
void ft_summary_add(struct ft_summary *summary, const struct ft_sequence_info *info);
void ft_summary_print(const struct ft_summary *summary, const struct ft_engine *engine, FILE *out);
void ft_summary_write_json(const struct ft_summary *summary, const struct ft_engine *engine,
                           struct ft_json *json, const char *key);

#endif
