/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/generate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define FIELD(name) offsetof(struct ft_generate_options, name)
#define CHECKPOINT_DEFAULT "the checkpoint's, else "
#define EVENTS_MAX (2 * FT_SEQUENCES_MAX)

const struct ft_option ft_generate_option_table[FT_GENERATE_OPTION_COUNT] = {
    {"max-tokens", "N", "tokens to generate, at most", "512, or what the KV pool holds", FT_OPTION_U32,
     FIELD(max_tokens), FIELD(max_tokens_given), 0, 0},
    {"temperature", "X", "0: always the likeliest token (greedy)", CHECKPOINT_DEFAULT "0", FT_OPTION_F32,
     FIELD(temperature), FIELD(temperature_given), 0, 1000},
    {"top-k", "N", "sample from the N likeliest tokens; 0: all", CHECKPOINT_DEFAULT "0", FT_OPTION_U32,
     FIELD(top_k), FIELD(top_k_given), 0, 0},
    {"top-p", "X", "sample from the likeliest tokens of total probability X; 1: all", CHECKPOINT_DEFAULT "1",
     FT_OPTION_F32, FIELD(top_p), FIELD(top_p_given), 0, 1},
    {"min-p", "X", "drop tokens below X times the likeliest; 0: none", CHECKPOINT_DEFAULT "0", FT_OPTION_F32,
     FIELD(min_p), FIELD(min_p_given), 0, 1},
    {"repetition-penalty", "X", "above 1: tokens that occurred become less likely", CHECKPOINT_DEFAULT "1",
     FT_OPTION_F32, FIELD(repetition_penalty), FIELD(penalty_given), 0.001, 1000},
    {"seed", "N", "of sampling; the same seed gives the same text", "drawn", FT_OPTION_U64, FIELD(seed),
     FIELD(seed_given), 0, 0},
    {"stop", "TEXT", "end before this text (may be given again)", NULL, FT_OPTION_LIST, FIELD(stops),
     FT_OPTION_NO_FIELD, 0, 0},
};

void ft_generate_options_init(struct ft_generate_options *options)
{
    memset(options, 0, sizeof *options);
}

void ft_generate_resolve(const struct ft_generate_options *options, const struct ft_generation_config *config,
                         struct ft_sampling *sampling)
{
    sampling->temperature = config->sample ? config->temperature : 0;
    /* Whoever gives --top-p wants sampling, even where the checkpoint's own default is greedy. */
    if (options->top_p_given || options->top_k_given || options->min_p_given)
        sampling->temperature = config->temperature;
    if (options->temperature_given)
        sampling->temperature = options->temperature;
    sampling->top_k = options->top_k_given ? options->top_k : config->top_k;
    sampling->top_p = options->top_p_given ? options->top_p : config->top_p;
    sampling->min_p = options->min_p_given ? options->min_p : config->min_p;
    sampling->repetition_penalty =
        options->penalty_given ? options->repetition_penalty : config->repetition_penalty;
    sampling->seed = options->seed;
    if (!options->seed_given && sampling->temperature > 0 &&
        getrandom(&sampling->seed, sizeof sampling->seed, 0) != (ssize_t)sizeof sampling->seed)
        sampling->seed = 0;
    /* 53 bits survive readers of JSON that keep numbers as doubles. */
    if (!options->seed_given)
        sampling->seed >>= 11;
}

/* ---- replies ---- */

int ft_reply_begin(struct ft_reply *reply, struct ft_session *session, const struct ft_tokenizer *tokenizer,
                   const struct ft_request *request, const struct ft_option_list *stops, ft_text_write *write,
                   void *context, struct ft_error *err)
{
    memset(reply, 0, sizeof *reply);
    reply->session = session;
    reply->sequence = FT_NONE;
    reply->stop_ids = request->stop_ids;
    reply->stop_count = request->stop_count;
    int status = ft_text_out_begin(&reply->out, stops->items, stops->count, write, context, err);
    if (status == FT_OK)
        status = ft_tokenizer_stream_begin(&reply->stream, tokenizer, true, err);
    if (status != FT_OK)
        return status;
    status = ft_session_submit(session, request, &reply->sequence, err);
    if (status != FT_OK) {
        reply->sequence = FT_NONE;
        ft_reply_end(reply);
    }
    return status;
}

void ft_reply_end(struct ft_reply *reply)
{
    if (reply->session && reply->sequence != FT_NONE)
        ft_session_release(reply->session, reply->sequence);
    if (reply->stream.tokenizer)
        ft_tokenizer_stream_end(&reply->stream);
    memset(reply, 0, sizeof *reply);
}

static bool is_stop_id(const struct ft_reply *reply, uint32_t token)
{
    for (uint32_t i = 0; i < reply->stop_count; i++)
        if (reply->stop_ids[i] == token)
            return true;
    return false;
}

static void finish(struct ft_reply *reply, enum ft_finish why)
{
    const char *text;
    size_t bytes;
    if (reply->done)
        return;
    ft_tokenizer_stream_flush(&reply->stream, &text, &bytes);
    ft_text_out_push(&reply->out, text, bytes);
    ft_text_out_flush(&reply->out);
    reply->done = true;
    reply->finish = reply->out.stopped ? FT_FINISH_STOP : why;
}

static int take_token(struct ft_reply *reply, uint32_t token, struct ft_error *err)
{
    const char *text;
    size_t bytes;
    if (reply->out.stopped || reply->out.failed || is_stop_id(reply, token))
        return FT_OK;
    int status = ft_tokenizer_stream_push(&reply->stream, token, &text, &bytes, err);
    if (status == FT_OK && !ft_text_out_push(&reply->out, text, bytes))
        ft_session_cancel(reply->session, reply->sequence);
    return status;
}

static int take_event(struct ft_reply *reply, const struct ft_event *event, struct ft_error *err)
{
    switch (event->kind) {
    case FT_EVENT_TOKEN:
        return take_token(reply, event->token, err);
    case FT_EVENT_END:
        finish(reply, event->finish);
        break;
    case FT_EVENT_FAILED:
        snprintf(reply->message, sizeof reply->message, "%s",
                 event->message ? event->message : "the step failed");
        finish(reply, FT_FINISH_ERROR);
        break;
    }
    return FT_OK;
}

static int take_events(struct ft_reply *replies, uint32_t reply_count, const struct ft_event *events,
                       uint32_t count, struct ft_error *err)
{
    for (uint32_t e = 0; e < count; e++)
        for (uint32_t i = 0; i < reply_count; i++)
            if (replies[i].sequence == events[e].sequence) {
                int status = take_event(&replies[i], &events[e], err);
                if (status != FT_OK)
                    return status;
            }
    return FT_OK;
}

static bool all_done(const struct ft_reply *replies, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (!replies[i].done)
            return false;
    return true;
}

int ft_replies_run(struct ft_reply *replies, uint32_t count, struct ft_error *err)
{
    struct ft_event events[EVENTS_MAX];
    int status = FT_OK;
    while (status == FT_OK && !all_done(replies, count)) {
        uint32_t event_count = 0;
        bool idle = ft_session_is_idle(replies[0].session);
        status = ft_session_step(replies[0].session, events, EVENTS_MAX, &event_count, err);
        int taken = take_events(replies, count, events, status == FT_OK ? event_count : 0, err);
        if (status == FT_OK)
            status = taken;
        if (status == FT_OK && idle && !event_count)
            status = ft_error_set(err, FT_INTERNAL, "the session is idle, but a sequence has not ended");
    }
    for (uint32_t i = 0; i < count; i++)
        finish(&replies[i],
               status == FT_OK || status == FT_CANCELLED ? FT_FINISH_CANCELLED : FT_FINISH_ERROR);
    return status;
}

/* ---- ids alone ---- */

static int take_id(const struct ft_event *event, uint32_t *ids, uint32_t *count, bool *done,
                   struct ft_error *err)
{
    switch (event->kind) {
    case FT_EVENT_TOKEN:
        ids[*count] = event->token;
        *count += 1;
        break;
    case FT_EVENT_END:
        *done = true;
        break;
    case FT_EVENT_FAILED:
        return ft_error_set(err, FT_INTERNAL, "%s", event->message ? event->message : "the step failed");
    }
    return FT_OK;
}

int ft_generate_ids(struct ft_session *session, const struct ft_request *request, uint32_t *ids,
                    uint32_t *count, struct ft_error *err)
{
    struct ft_event events[EVENTS_MAX];
    uint32_t sequence, event_count;
    bool done = false;
    *count = 0;
    int status = ft_session_submit(session, request, &sequence, err);
    if (status != FT_OK)
        return status;
    while (status == FT_OK && !done) {
        event_count = 0;
        bool idle = ft_session_is_idle(session);
        status = ft_session_step(session, events, EVENTS_MAX, &event_count, err);
        for (uint32_t e = 0; status == FT_OK && e < event_count; e++)
            if (events[e].sequence == sequence)
                status = take_id(&events[e], ids, count, &done, err);
        if (status == FT_OK && idle && !event_count)
            status = ft_error_set(err, FT_INTERNAL, "the session is idle, but the sequence has not ended");
    }
    ft_session_release(session, sequence);
    return status;
}
