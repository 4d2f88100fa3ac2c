/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The interactive chat of ft run. The conversation is kept as ids: what was computed once stays a prefix of
 * the next prompt, so that the session can start from its last snapshot.
 */
#include "tools/ft_chat.h"

#include "tools/command.h"
#include "tools/interrupt.h"
#include "tools/run.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct conversation {
    struct ft_run run;
    uint32_t *ids, count, cap;        /* everything said so far, ready for the next message */
    uint32_t *newline, newline_count; /* ids of "\n", what stands behind <|im_end|> */
    char *line;
    size_t line_cap;
};

static int append(struct conversation *talk, const uint32_t *ids, uint32_t count, struct ft_error *err)
{
    if (count > talk->cap - talk->count) {
        uint32_t cap = 2 * talk->cap + count + 256;
        uint32_t *grown = realloc(talk->ids, cap * sizeof *grown);
        if (!grown)
            return ft_error_set(err, FT_MEMORY, "no memory for the conversation");
        talk->ids = grown;
        talk->cap = cap;
    }
    if (count)
        memcpy(talk->ids + talk->count, ids, count * sizeof *ids);
    talk->count += count;
    return FT_OK;
}

/* Adds what the user said, and the beginning of the reply. */
static int append_message(struct conversation *talk, const char *text, size_t bytes, struct ft_error *err)
{
    const struct ft_run_options *options = talk->run.options;
    struct ft_chat_message messages[2];
    uint32_t message_count = 0, count = 0, *ids = NULL;
    bool first = talk->count == 0;
    if (first && options->system)
        messages[message_count++] =
            (struct ft_chat_message){"system", options->system, strlen(options->system)};
    messages[message_count++] = (struct ft_chat_message){"user", text, bytes};
    int status = ft_chat_encode(&talk->run.chat, messages, message_count,
                                options->special_tokens ? FT_CHAT_SPECIAL_TOKENS : 0, &ids, &count, err);
    /* Only the beginning of a conversation has the template's prefix. */
    bool drop = !first && count && talk->run.chat.prefix_id != FT_NONE && ids[0] == talk->run.chat.prefix_id;
    if (status == FT_OK)
        status = append(talk, ids + drop, count - drop, err);
    free(ids);
    return status;
}

/* Adds what the model said, whole or cut short, and closes its message. */
static int append_reply(struct conversation *talk, const struct ft_sequence_info *info, struct ft_error *err)
{
    const struct ft_generation_config *config = &talk->run.config;
    uint32_t count = info->token_count - info->prompt_count;
    const uint32_t *ids = info->tokens + info->prompt_count;
    for (uint32_t i = 0; count && i < config->eos_count; i++)
        if (ids[count - 1] == config->eos[i]) {
            count--;
            break;
        }
    int status = append(talk, ids, count, err);
    if (status == FT_OK)
        status = append(talk, &talk->run.chat.end_id, 1, err);
    return status == FT_OK ? append(talk, talk->newline, talk->newline_count, err) : status;
}

static int reply(struct conversation *talk, struct ft_error *err)
{
    struct ft_run *run = &talk->run;
    struct ft_reply answer = {0};
    struct ft_sequence_info info;
    struct ft_request request = {.prompt = talk->ids,
                                 .prompt_count = talk->count,
                                 .max_tokens = ft_run_max_tokens(run, talk->count, 1),
                                 .sampling = run->sampling,
                                 .stop_ids = run->config.eos,
                                 .stop_count = run->config.eos_count,
                                 .reuse_prefix = true};
    int status = ft_reply_begin(&answer, run->engine.session, run->tokenizer, &request,
                                &run->options->generate.stops, ft_run_write_stdout, &run->write_errno, err);
    if (status != FT_OK)
        return status;
    status = ft_replies_run(&answer, 1, err);
    if (status == FT_CANCELLED && ft_interrupt_signal()) {
        ft_interrupt_clear();
        fputs(" [stopped]", stdout);
        status = FT_OK;
    }
    fputs("\n", stdout);
    fflush(stdout);
    if (answer.message[0])
        fprintf(stderr, "ft: %s\n", answer.message);
    if (answer.out.failed)
        status = ft_error_set(err, FT_IO, "standard output: %s", strerror(run->write_errno));
    if (status == FT_OK) {
        ft_session_sequence_info(run->engine.session, answer.sequence, &info);
        ft_summary_add(&run->summary, &info);
        status = append_reply(talk, &info, err);
    }
    ft_reply_end(&answer);
    return status;
}

/* Waits for input; false: a signal came. */
static bool wait_for_input(void)
{
    struct pollfd wanted[2] = {{.fd = STDIN_FILENO, .events = POLLIN},
                               {.fd = ft_interrupt_fd(), .events = POLLIN}};
    while (!ft_interrupt_signal())
        if (poll(wanted, 2, -1) > 0 && wanted[0].revents)
            return true;
    return false;
}

/* Reads a line without its newline; false at the end of input or after Ctrl-C pressed twice. */
static bool read_line(struct conversation *talk, size_t *bytes)
{
    for (bool warned = false;; warned = true) {
        fputs("> ", stdout);
        fflush(stdout);
        if (wait_for_input()) {
            ssize_t got = getline(&talk->line, &talk->line_cap, stdin);
            if (got > 0) {
                *bytes = (size_t)got - (talk->line[got - 1] == '\n');
                return true;
            }
            warned = !ft_interrupt_signal(); /* the end of input, unless the read was interrupted */
        }
        ft_interrupt_clear();
        clearerr(stdin);
        if (warned) {
            putchar('\n');
            return false;
        }
        fputs("\n(Ctrl-C again or /exit leaves)\n", stdout);
    }
}

static void print_commands(void)
{
    puts("/exit leaves, /reset forgets the conversation, Ctrl-C stops a reply.");
}

static int talk_on(struct conversation *talk, struct ft_error *err)
{
    int status = FT_OK;
    size_t bytes;
    /* A line that stdio has read ahead would not be seen by poll. */
    setvbuf(stdin, NULL, _IONBF, 0);
    print_commands();
    while (status == FT_OK && read_line(talk, &bytes)) {
        talk->line[bytes] = '\0';
        uint32_t before = talk->count;
        if (!strcmp(talk->line, "/exit") || !strcmp(talk->line, "/quit"))
            break;
        if (!strcmp(talk->line, "/reset")) {
            talk->count = 0;
            puts("(forgotten)");
            continue;
        }
        if (!bytes || talk->line[0] == '/') {
            print_commands();
            continue;
        }
        status = append_message(talk, talk->line, bytes, err);
        if (status == FT_OK)
            status = reply(talk, err);
        /* A message for which there is no room ends the turn, not the chat. */
        if (status == FT_LIMIT || status == FT_USAGE) {
            fprintf(stderr, "ft: %s (/reset makes room)\n", err->message);
            talk->count = before;
            status = FT_OK;
        }
    }
    return status;
}

static int chat(struct conversation *talk, const struct ft_run_options *options, struct ft_error *err)
{
    int status = ft_run_begin(&talk->run, options, true, err);
    if (status == FT_OK)
        status = ft_tokenizer_encode(talk->run.tokenizer, "\n", 1, false, &talk->newline,
                                     &talk->newline_count, err);
    if (status == FT_OK)
        status = ft_run_open_engine(&talk->run, 0, 1, err);
    if (status == FT_OK)
        status = talk_on(talk, err);
    if (talk->run.engine.session && talk->run.summary.sequence_count && !options->open.quiet)
        ft_summary_print(&talk->run.summary, &talk->run.engine, stderr);
    return status;
}

int ft_chat_main(const struct ft_run_options *options)
{
    struct conversation talk;
    struct ft_error err, close_err;
    memset(&talk, 0, sizeof talk);
    int status = chat(&talk, options, &err);
    if (ft_run_end(&talk.run, &close_err) != FT_OK && status == FT_OK) {
        err = close_err;
        status = err.code;
    }
    free(talk.ids);
    free(talk.newline);
    free(talk.line);
    return status == FT_OK ? ft_command_finish(FT_EXIT_OK) : ft_command_fail(&err);
}
