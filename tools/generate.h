/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sampling options of the generating commands, and the loop that turns a session's events into text.
 *
 * A reply is one sequence on its way to a reader: ids from the session, decoded token by token, cut at stop
 * strings. Ownership: prompts, stop ids and stop strings are the caller's until ft_reply_end. Threads: one at
 * a time.
 */
#ifndef FT_TOOLS_GENERATE_H
#define FT_TOOLS_GENERATE_H

#include "io/tokenizer.h"
#include "jobs/session.h"
#include "tools/generation_config.h"
#include "tools/options.h"
#include "tools/text_out.h"

struct ft_generate_options {
    float temperature, top_p, min_p, repetition_penalty;
    uint32_t top_k, max_tokens;
    uint64_t seed;
    bool temperature_given, top_p_given, min_p_given, top_k_given, penalty_given, seed_given,
        max_tokens_given;
    struct ft_option_list stops;
};
#define FT_GENERATE_OPTION_COUNT 8u
extern const struct ft_option ft_generate_option_table[FT_GENERATE_OPTION_COUNT];
void ft_generate_options_init(struct ft_generate_options *options);
/* Options over the checkpoint's own defaults; a seed is drawn when none is given and sampling needs one. */
void ft_generate_resolve(const struct ft_generate_options *options, const struct ft_generation_config *config,
                         struct ft_sampling *sampling);

#define FT_REPLY_TOKENS_DEFAULT 512u

struct ft_reply {
    struct ft_session *session;
    uint32_t sequence; /* FT_NONE: not submitted */
    const uint32_t *stop_ids;
    uint32_t stop_count;
    struct ft_tokenizer_stream stream;
    struct ft_text_out out;
    bool done;
    enum ft_finish finish;
    char message[512]; /* of a failure */
};

/* request: stop_ids, sampling, prompt filled by the caller. On failure nothing is left submitted. */
int ft_reply_begin(struct ft_reply *reply, struct ft_session *session, const struct ft_tokenizer *tokenizer,
                   const struct ft_request *request, const struct ft_option_list *stops, ft_text_write *write,
                   void *context, struct ft_error *err);
/*
 * Steps until every reply is done. FT_CANCELLED after an interrupt: what is certain has gone out, replies
 * that were not done have finish CANCELLED. A failed sequence does not fail the call: see `message`.
 */
int ft_replies_run(struct ft_reply *replies, uint32_t count, struct ft_error *err);
/* Runs one sequence to its end and keeps its new ids [cap >= request->max_tokens]. FT_CANCELLED after an
 * interrupt; a failed sequence is an error. */
int ft_generate_ids(struct ft_session *session, const struct ft_request *request, uint32_t *ids,
                    uint32_t *count, struct ft_error *err);
void ft_reply_end(
    struct ft_reply *reply); /* releases the sequence; safe when begin failed on a zeroed reply */

#endif
