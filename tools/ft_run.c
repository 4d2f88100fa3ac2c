/* SPDX-License-Identifier: Apache-2.0 */
/* ft run: prompts to text, all prompts decoded together. */
#include "tools/run.h"

#include "tools/command.h"
#include "tools/ft_chat.h"
#include "tools/ids.h"
#include "tools/json_out.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIELD(name) offsetof(struct ft_run_options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"prompt", "TEXT", "a prompt; given again: all are decoded together", "the argument, else stdin",
     FT_OPTION_LIST, FIELD(prompts), 0, 0},
    {"chat", NULL, "a prompt is what a user says; the model answers", NULL, FT_OPTION_FLAG, FIELD(chat), 0,
     0},
    {"system", "TEXT", "chat: the system message", "none", FT_OPTION_STRING, FIELD(system), 0, 0},
    {"special-tokens", NULL, "prompts may name special tokens, such as <|im_start|>", NULL, FT_OPTION_FLAG,
     FIELD(special_tokens), 0, 0},
    {"json", NULL, "results as JSON on stdout: an object, or an array for several prompts", NULL,
     FT_OPTION_FLAG, FIELD(json), 0, 0},
};

/* One prompt and what became of it. */
struct item {
    uint32_t *ids, id_count;
    struct ft_text text; /* empty when it went to stdout as it came */
    uint32_t *new_ids, new_count;
    struct ft_sequence_info info; /* times; its tokens pointer is stale */
    enum ft_finish finish;
    char message[512];
};

struct batch {
    struct ft_run run;
    struct item *items; /* [count] */
    uint32_t count;
};

/* ---- prompts to ids ---- */

static int encode_plain(const struct ft_run *run, const char *text, size_t bytes, struct item *item,
                        struct ft_error *err)
{
    uint32_t bos = ft_tokenizer_find_bos(run->tokenizer);
    int status = ft_tokenizer_encode(run->tokenizer, text, bytes, run->options->special_tokens, &item->ids,
                                     &item->id_count, err);
    if (status != FT_OK || bos == FT_NONE || (item->id_count && item->ids[0] == bos))
        return status;
    uint32_t *grown = realloc(item->ids, (item->id_count + 1ull) * sizeof *grown);
    if (!grown)
        return ft_error_set(err, FT_MEMORY, "no memory for the prompt's ids");
    memmove(grown + 1, grown, item->id_count * sizeof *grown);
    grown[0] = bos;
    item->ids = grown;
    item->id_count++;
    return FT_OK;
}

static int encode_chat(const struct ft_run *run, const char *text, size_t bytes, struct item *item,
                       struct ft_error *err)
{
    struct ft_chat_message messages[2];
    const char *system = run->options->system;
    uint32_t count = 0;
    if (system)
        messages[count++] = (struct ft_chat_message){"system", system, strlen(system)};
    messages[count++] = (struct ft_chat_message){"user", text, bytes};
    return ft_chat_encode(&run->chat, messages, count,
                          run->options->special_tokens ? FT_CHAT_SPECIAL_TOKENS : 0, &item->ids,
                          &item->id_count, err);
}

static int encode(const struct ft_run *run, const char *text, size_t bytes, struct item *item,
                  struct ft_error *err)
{
    if (!bytes)
        return ft_error_set(err, FT_USAGE,
                            "the prompt is empty: give one as an argument, with --prompt, or on stdin");
    return (run->options->chat ? encode_chat : encode_plain)(run, text, bytes, item, err);
}

static int encode_stdin(const struct ft_run *run, struct item *item, struct ft_error *err)
{
    char *text;
    size_t bytes;
    int status = ft_ids_read_stdin(&text, &bytes, err);
    if (status != FT_OK)
        return status;
    /* The newline that echo and editors put at the end is not meant. */
    if (bytes && text[bytes - 1] == '\n')
        bytes--;
    status = encode(run, text, bytes, item, err);
    free(text);
    return status;
}

static int encode_all(struct batch *batch, struct ft_error *err)
{
    const struct ft_option_list *prompts = &batch->run.options->prompts;
    batch->count = FT_MAX(prompts->count, 1u);
    batch->items = calloc(batch->count, sizeof *batch->items);
    if (!batch->items)
        return ft_error_set(err, FT_MEMORY, "no memory for %u prompts", batch->count);
    if (!prompts->count)
        return encode_stdin(&batch->run, &batch->items[0], err);
    int status = FT_OK;
    for (uint32_t i = 0; i < batch->count && status == FT_OK; i++)
        status = encode(&batch->run, prompts->items[i], strlen(prompts->items[i]), &batch->items[i], err);
    return status;
}

/* ---- generation ---- */

static int begin_reply(struct batch *batch, struct item *item, struct ft_reply *reply, uint32_t together,
                       bool stream, struct ft_error *err)
{
    struct ft_run *run = &batch->run;
    struct ft_request request = {.prompt = item->ids,
                                 .prompt_count = item->id_count,
                                 .max_tokens = ft_run_max_tokens(run, item->id_count, together),
                                 .sampling = run->sampling,
                                 .stop_ids = run->config.eos,
                                 .stop_count = run->config.eos_count};
    return ft_reply_begin(reply, run->engine.session, run->tokenizer, &request, &run->options->generate.stops,
                          stream ? ft_run_write_stdout : ft_text_append,
                          stream ? (void *)&run->write_errno : &item->text, err);
}

static void keep_result(struct batch *batch, struct item *item, const struct ft_reply *reply)
{
    struct ft_sequence_info *info = &item->info;
    ft_session_sequence_info(batch->run.engine.session, reply->sequence, info);
    item->new_count = info->token_count - info->prompt_count;
    item->new_ids = malloc((item->new_count + 1ull) * sizeof *item->new_ids);
    if (item->new_ids)
        memcpy(item->new_ids, info->tokens + info->prompt_count, item->new_count * sizeof *item->new_ids);
    else
        item->new_count = 0;
    item->finish = reply->finish;
    memcpy(item->message, reply->message, sizeof item->message);
    ft_summary_add(&batch->run.summary, info);
}

/* Runs items [first, first + together). */
static int run_wave(struct batch *batch, uint32_t first, uint32_t together, bool stream, struct ft_error *err)
{
    struct ft_reply *replies = calloc(together, sizeof *replies);
    uint32_t begun = 0;
    int status = replies ? FT_OK : ft_error_set(err, FT_MEMORY, "no memory for %u replies", together);
    while (begun < together && status == FT_OK) {
        status = begin_reply(batch, &batch->items[first + begun], &replies[begun], together, stream, err);
        begun += status == FT_OK;
    }
    if (status == FT_OK)
        status = ft_replies_run(replies, together, err);
    for (uint32_t i = 0; i < begun; i++) {
        if (status == FT_OK || status == FT_CANCELLED)
            keep_result(batch, &batch->items[first + i], &replies[i]);
        ft_reply_end(&replies[i]);
    }
    free(replies);
    return status;
}

static int generate_all(struct batch *batch, bool stream, struct ft_error *err)
{
    uint32_t wave = FT_MAX(batch->run.engine.plan.sequences_max, 1u);
    int status = FT_OK;
    for (uint32_t i = 0; i < batch->count && status == FT_OK; i += wave)
        status = run_wave(batch, i, FT_MIN(wave, batch->count - i), stream, err);
    return status;
}

/* ---- results ---- */

static void write_result(const struct batch *batch, const struct item *item, struct ft_json *json)
{
    const struct ft_run *run = &batch->run;
    const struct ft_sequence_info *info = &item->info;
    double decode_ns = (double)(info->last_token_ns - info->first_token_ns);
    ft_json_open(json, '{', NULL);
    ft_json_bytes(json, "text", item->text.bytes ? item->text.bytes : "", item->text.count);
    ft_json_ids(json, "ids", item->new_ids, item->new_count);
    ft_json_text(json, "finish", ft_finish_name(item->finish));
    if (item->message[0])
        ft_json_text(json, "error", item->message);
    ft_json_u64(json, "prompt_tokens", item->id_count);
    ft_json_u64(json, "new_tokens", item->new_count);
    ft_json_f64(json, "temperature", run->sampling.temperature > 0 ? (double)run->sampling.temperature : 0);
    ft_json_u64(json, "seed", run->sampling.seed);
    ft_json_f64(json, "ttft_ms",
                info->first_token_ns ? (double)(info->first_token_ns - info->submit_ns) / 1e6 : 0);
    ft_json_f64(json, "decode_tok_s",
                item->new_count > 1 && decode_ns > 0 ? (item->new_count - 1) / decode_ns * 1e9 : 0);
    if (batch->count == 1)
        ft_summary_write_json(&run->summary, &run->engine, json, "summary");
    ft_json_close(json, '}');
}

static void print_json(const struct batch *batch)
{
    struct ft_json json;
    ft_json_begin(&json, stdout);
    if (batch->count > 1)
        ft_json_open(&json, '[', NULL);
    for (uint32_t i = 0; i < batch->count; i++)
        write_result(batch, &batch->items[i], &json);
    if (batch->count > 1)
        ft_json_close(&json, ']');
    ft_json_end(&json);
}

static void print_text(const struct batch *batch, bool streamed)
{
    if (streamed) {
        putchar('\n');
        return;
    }
    for (uint32_t i = 0; i < batch->count; i++) {
        fwrite(batch->items[i].text.bytes ? batch->items[i].text.bytes : "", 1, batch->items[i].text.count,
               stdout);
        fputs(i + 1 < batch->count ? "\n\n" : "\n", stdout);
    }
}

static int report(const struct batch *batch, bool streamed, struct ft_error *err)
{
    const struct ft_run *run = &batch->run;
    if (run->write_errno == EPIPE)
        return FT_OK; /* nobody reads any more: ft_command_finish ends quietly */
    if (run->write_errno)
        return ft_error_set(err, FT_IO, "standard output: %s", strerror(run->write_errno));
    (run->options->json ? (void)print_json(batch) : print_text(batch, streamed));
    errno = 0;
    if (fflush(stdout) != 0 && errno != EPIPE)
        return ft_error_set(err, FT_IO, "standard output: %s", strerror(errno));
    if (!run->options->open.quiet)
        ft_summary_print(&run->summary, &run->engine, stderr);
    for (uint32_t i = 0; i < batch->count; i++)
        if (batch->items[i].message[0])
            return ft_error_set(err, FT_INTERNAL, "prompt %u: %s", i + 1, batch->items[i].message);
    return FT_OK;
}

/* ---- the command ---- */

/* Nothing breaks there, but the text degrades and the time grows with the square: worth a line. */
static void note_long_prompts(const struct batch *batch)
{
    uint32_t most = batch->run.engine.model->position_max, longest = 0;
    for (uint32_t i = 0; i < batch->count; i++)
        longest = FT_MAX(longest, batch->items[i].id_count);
    if (most && longest > most && !batch->run.options->open.quiet)
        fprintf(stderr,
                "ft: note: a prompt has %u tokens, the model was made for %u (max_position_embeddings)\n",
                longest, most);
}

static int run_batch(struct batch *batch, const struct ft_run_options *options, struct ft_error *err)
{
    uint64_t longest = 0;
    int status = ft_run_begin(&batch->run, options, options->chat, err);
    if (status == FT_OK)
        status = encode_all(batch, err);
    if (status != FT_OK)
        return status;
    for (uint32_t i = 0; i < batch->count; i++)
        longest = FT_MAX(longest, (uint64_t)batch->items[i].id_count);
    longest += options->generate.max_tokens_given ? options->generate.max_tokens : FT_REPLY_TOKENS_DEFAULT;
    status = ft_run_open_engine(&batch->run, longest, batch->count, err);
    if (status != FT_OK)
        return status;
    note_long_prompts(batch);
    bool stream = batch->count == 1 && !options->json;
    status = generate_all(batch, stream, err);
    if (status != FT_OK && status != FT_CANCELLED)
        return status;
    struct ft_error report_err;
    int reported = report(batch, stream, &report_err);
    if (status == FT_OK && reported != FT_OK)
        *err = report_err;
    return status == FT_OK ? reported : status;
}

static int run_command(const struct ft_run_options *options)
{
    struct batch batch = {0};
    struct ft_error err, close_err;
    int status = run_batch(&batch, options, &err);
    if (ft_run_end(&batch.run, &close_err) != FT_OK && status == FT_OK) {
        err = close_err;
        status = err.code;
    }
    for (uint32_t i = 0; batch.items && i < batch.count; i++) {
        free(batch.items[i].ids);
        free(batch.items[i].new_ids);
        ft_text_fini(&batch.items[i].text);
    }
    free(batch.items);
    return status == FT_OK ? ft_command_finish(FT_EXIT_OK) : ft_command_fail(&err);
}

int ft_command_run(int argc, char **argv)
{
    struct ft_run_options options = {0};
    const struct ft_option_group groups[] = {
        {"Prompts", table, FT_COUNT_OF(table), &options},
        {"Generation", ft_generate_option_table, FT_GENERATE_OPTION_COUNT, &options.generate},
        ft_open_option_group(&options.open)};
    const struct ft_option_set set = {"ft run",
                                      "[options] [PROMPT]",
                                      "Continues the prompt (or answers it, with --chat) and prints the text "
                                      "as it comes. Without a prompt: a chat\n"
                                      "when stdin is a terminal, else stdin is the prompt (one newline at "
                                      "its end is dropped). Without --model: the\n"
                                      "demo model. Sampling follows the checkpoint's generation_config.json "
                                      "where no option is given (do_sample false:\ngreedy); --top-k, --top-p "
                                      "or --min-p alone switch sampling on. A summary goes to stderr.",
                                      groups,
                                      FT_COUNT_OF(groups),
                                      1};
    struct ft_option_rest rest;
    struct ft_error err;
    int exit_code;
    ft_open_options_init(&options.open);
    ft_generate_options_init(&options.generate);
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    if (rest.count && options.prompts.count) {
        ft_error_set(&err, FT_USAGE, "give the prompt either as an argument or with --prompt");
        return ft_command_fail(&err);
    }
    if (rest.count)
        options.prompts.items[options.prompts.count++] = rest.items[0];
    if (options.system && !options.chat && (options.prompts.count || !isatty(STDIN_FILENO))) {
        ft_error_set(&err, FT_USAGE, "--system needs --chat");
        return ft_command_fail(&err);
    }
    if (!options.prompts.count && isatty(STDIN_FILENO) && !options.json)
        return ft_chat_main(&options);
    return run_command(&options);
}
