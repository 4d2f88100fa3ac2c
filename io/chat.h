/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chat prompts of the ChatML family, rendered to token ids without a template engine:
 *
 *   [prefix] <|im_start|> role \n content <|im_end|> \n   for each message   <|im_start|> assistant \n
 *
 * The family is recognised by the markers in the checkpoint's template: chat_template.jinja, else
 * chat_template in tokenizer_config.json (a string, or a list of {name, template}, of which "default"
 * counts). Any other family is an error that names it. The prefix is bos_token (a string or an object with
 * "content"), if the template mentions it. What a template may do beyond that (default system prompts, tools,
 * reasoning blocks) is not done: the messages are all there is.
 *
 * Control tokens go in as ids, and "role \n content" is encoded as one piece of plain text: characters that
 * spell a special token stay characters, so no text can end its own message or start another one. For text
 * that spells none, the ids are those of the whole rendered text.
 *
 * Ownership: the chat borrows the tokenizer, which must outlive it. Threads: constant once open, as the
 * tokenizer. Errors: FT_IO, FT_FORMAT, FT_UNSUPPORTED (another family, or none), FT_USAGE (a role that is no
 * word), FT_LIMIT.
 */
#ifndef FT_IO_CHAT_H
#define FT_IO_CHAT_H

#include "graph/error.h"
#include "graph/types.h"
#include "io/tokenizer.h"

struct ft_chat {
    const struct ft_tokenizer *tokenizer;
    uint32_t prefix_id; /* bos, or FT_NONE */
    uint32_t start_id;  /* <|im_start|> */
    uint32_t end_id;    /* <|im_end|> */
};

struct ft_chat_message {
    const char *role;    /* letters, digits, _ and -: "system", "user", "assistant", "tool" */
    const char *content; /* [content_bytes], any bytes */
    size_t content_bytes;
};

enum ft_chat_flags {
    FT_CHAT_SPECIAL_TOKENS = 1, /* special tokens spelled in contents are tokens: for trusted text only */
    FT_CHAT_NO_REPLY = 2,       /* leave out the beginning of the assistant's reply at the end */
};

/* What needs closing: nothing. `directory` is the checkpoint's. */
int ft_chat_open(struct ft_chat *chat, const char *directory, const struct ft_tokenizer *tokenizer,
                 struct ft_error *err);

/* *ids [*count] is allocated with malloc for the caller; NULL on failure. */
int ft_chat_encode(const struct ft_chat *chat, const struct ft_chat_message *messages, uint32_t message_count,
                   unsigned flags, uint32_t **ids, uint32_t *count, struct ft_error *err);

/* The ids that end a reply: eos_token_id (one or a list) of generation_config.json, else of config.json's
 * text_config, else of config.json itself. eos [FT_EOS_MAX]; *count is 0 when no file names one. */
int ft_chat_read_eos(const char *directory, uint32_t eos[FT_EOS_MAX], uint32_t *count, struct ft_error *err);

#endif
