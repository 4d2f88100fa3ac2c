/* SPDX-License-Identifier: Apache-2.0 */
#include "io/chat.h"
#include "io/file.h"
#include "io/tokenizer_internal.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CONFIG_BYTES_MAX ((size_t)16 << 20)
#define WAY_OUT "use ft run --prompt without --chat, and write the prompt's markers yourself"

/* ---- the checkpoint's files ---- */

static int read_file(const char *directory, const char *name, char **text, uint64_t *bytes,
                     struct ft_error *err)
{
    char path[4096];
    *text = NULL;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, name) >= sizeof path)
        return ft_error_set(err, FT_LIMIT, "the path %.64s.../%s is too long", directory, name);
    if (access(path, F_OK) != 0 && errno == ENOENT)
        return FT_OK;
    return ft_file_read_all(path, CONFIG_BYTES_MAX, text, bytes, err);
}

/* *root is NULL when there is no such file; an object otherwise. */
static int read_json(const char *directory, const char *name, json_t **root, struct ft_error *err)
{
    json_error_t where;
    char *text;
    uint64_t bytes;
    *root = NULL;
    int status = read_file(directory, name, &text, &bytes, err);
    if (status != FT_OK || !text)
        return status;
    *root = json_loadb(text, bytes, 0, &where);
    free(text);
    if (!*root)
        return ft_error_set(err, FT_FORMAT, "%s/%s is not JSON: line %d: %s", directory, name, where.line,
                            where.text);
    if (json_is_object(*root))
        return FT_OK;
    json_decref(*root);
    *root = NULL;
    return ft_error_set(err, FT_FORMAT, "%s/%s is not a JSON object", directory, name);
}

/* ---- which family ---- */

/* Markers of other families. They are looked for first: some of these use <|im_start|> or <|im_end|> as well. */
static const struct {
    const char *marker, *family;
} other_families[] = {
    {"<|start_header_id|>", "Llama 3"},
    {"<|header_start|>", "Llama 4"},
    {"<|channel|>", "Harmony (gpt-oss)"},
    {"<|start|>", "Harmony (gpt-oss)"},
    {"<|im_sep|>", "Phi-4"},
    {"<|im_middle|>", "Kimi"},
    {"[INST]", "Mistral / Llama 2"},
    {"<start_of_turn>", "Gemma"},
    {"<\xef\xbd\x9cUser\xef\xbd\x9c>", "DeepSeek"},
    {"[gMASK]", "GLM"},
    {"<|START_OF_TURN_TOKEN|>", "Command R"},
    {"<|start_of_role|>", "Granite"},
    {"<|end_of_turn|>", "OpenChat"},
    {"<|user|>", "Phi-3 / Zephyr"},
    {"### Instruction", "Alpaca"},
    {"USER:", "Vicuna"},
};

static int check_family(const char *template, const char *directory, struct ft_error *err)
{
    for (size_t i = 0; i < sizeof other_families / sizeof *other_families; i++)
        if (strstr(template, other_families[i].marker))
            return ft_error_set(
                err, FT_UNSUPPORTED,
                "%s: the chat template is of the %s family (it has %s); only ChatML (<|im_start|>, "
                "<|im_end|>) is rendered: " WAY_OUT,
                directory, other_families[i].family, other_families[i].marker);
    if (strstr(template, "<|im_start|>") && strstr(template, "<|im_end|>"))
        return FT_OK;
    return ft_error_set(
        err, FT_UNSUPPORTED,
        "%s: the chat template is of an unknown family (no <|im_start|> and <|im_end|> in it); only "
        "ChatML is rendered: " WAY_OUT,
        directory);
}

/* The template's text, borrowed from the config; NULL when there is none. */
static const char *template_of_config(const json_t *config)
{
    const json_t *template = json_object_get(config, "chat_template"), *entry;
    const char *found = json_string_value(template);
    size_t i;
    if (json_is_array(template))
        json_array_foreach(template, i, entry)
        {
            const char *name = json_string_value(json_object_get(entry, "name"));
            const char *text = json_string_value(json_object_get(entry, "template"));
            if (text && ((name && strcmp(name, "default") == 0) || json_array_size(template) == 1))
                found = text;
        }
    return found;
}

/* A token that must be there as a special one, else its characters would be plain text to the model. */
static int find_special(const struct ft_tokenizer *tokenizer, const char *text, uint32_t *id,
                        struct ft_error *err)
{
    *id = ft_tokenizer_find_token(tokenizer, text);
    if (*id != FT_NONE && ft_tokenizer_is_special(tokenizer, *id))
        return FT_OK;
    return ft_error_set(err, FT_FORMAT,
                        "the chat template needs the special token %.64s, which tokenizer.json %s", text,
                        *id == FT_NONE ? "lacks" : "does not mark as special");
}

static int find_tokens(struct ft_chat *chat, const char *template, const json_t *config, struct ft_error *err)
{
    if (find_special(chat->tokenizer, "<|im_start|>", &chat->start_id, err) != FT_OK ||
        find_special(chat->tokenizer, "<|im_end|>", &chat->end_id, err) != FT_OK)
        return err->code;
    const json_t *bos = json_object_get(config, "bos_token");
    if (json_is_object(bos))
        bos = json_object_get(bos, "content");
    if (!strstr(template, "bos_token") || !json_is_string(bos))
        return FT_OK;
    return find_special(chat->tokenizer, json_string_value(bos), &chat->prefix_id, err);
}

int ft_chat_open(struct ft_chat *chat, const char *directory, const struct ft_tokenizer *tokenizer,
                 struct ft_error *err)
{
    char *file;
    uint64_t bytes;
    json_t *config;
    *chat = (struct ft_chat){
        .tokenizer = tokenizer, .prefix_id = FT_NONE, .start_id = FT_NONE, .end_id = FT_NONE};
    if (read_json(directory, "tokenizer_config.json", &config, err) != FT_OK)
        return err->code;
    int status = read_file(directory, "chat_template.jinja", &file, &bytes, err);
    if (status == FT_OK) {
        const char *template = file ? file : template_of_config(config);
        if (!template)
            status = ft_error_set(err, FT_UNSUPPORTED,
                                  "%s has no chat template (no chat_template.jinja, and no chat_template in "
                                  "tokenizer_config.json): " WAY_OUT,
                                  directory);
        else
            status = check_family(template, directory, err);
        if (status == FT_OK && find_tokens(chat, template, config, err) != FT_OK)
            status = ft_error_prepend(err, "%s", directory);
    }
    free(file);
    json_decref(config);
    return status;
}

/* ---- rendering ---- */

struct ids {
    uint32_t *ids; /* [count] */
    uint32_t count, capacity;
};

static int append(struct ids *list, const uint32_t *ids, uint32_t count, struct ft_error *err)
{
    if (count > list->capacity - list->count) {
        uint64_t want = ((uint64_t)list->count + count) * 3 / 2 + 64;
        uint32_t *grown = want > UINT32_MAX ? NULL : realloc(list->ids, want * sizeof *grown);
        if (!grown)
            return ft_error_set(err, FT_MEMORY, "no memory for %llu token ids", (unsigned long long)want);
        list->ids = grown;
        list->capacity = (uint32_t)want;
    }
    if (count)
        memcpy(list->ids + list->count, ids, count * sizeof *ids);
    list->count += count;
    return FT_OK;
}

static int append_text(struct ids *list, const struct ft_chat *chat, const char *text, size_t bytes,
                       bool special, struct ft_error *err)
{
    uint32_t *ids, count;
    if (ft_tokenizer_encode(chat->tokenizer, text, bytes, special, &ids, &count, err) != FT_OK)
        return err->code;
    int status = append(list, ids, count, err);
    free(ids);
    return status;
}

/* A role is ours or an API client's: a word, so that it cannot carry a line break into the frame. */
static int check_role(const char *role, uint32_t index, struct ft_error *err)
{
    size_t bytes = strspn(role, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-");
    if (bytes > 0 && bytes <= 64 && !role[bytes])
        return FT_OK;
    return ft_error_set(
        err, FT_USAGE,
        "message %u has the role \"%.64s\"; a role is a word like system, user, assistant or tool", index,
        role);
}

static int append_message(struct ids *list, const struct ft_chat *chat, const struct ft_chat_message *message,
                          uint32_t index, unsigned flags, struct ft_error *err)
{
    if (check_role(message->role, index, err) != FT_OK)
        return err->code;
    if (message->content_bytes > FT_TOKENIZER_TEXT_BYTES_MAX)
        return ft_error_set(err, FT_LIMIT, "message %u has %zu bytes; at most %zu can be encoded", index,
                            message->content_bytes, FT_TOKENIZER_TEXT_BYTES_MAX);
    /* One text, because the regex may join the line break with what follows it. */
    size_t role_bytes = strlen(message->role), bytes = role_bytes + 1 + message->content_bytes;
    char *text = malloc(bytes);
    if (!text)
        return ft_error_set(err, FT_MEMORY, "no memory for message %u of %zu bytes", index, bytes);
    memcpy(text, message->role, role_bytes);
    text[role_bytes] = '\n';
    if (message->content_bytes)
        memcpy(text + role_bytes + 1, message->content, message->content_bytes);
    int status = append(list, &chat->start_id, 1, err);
    if (status == FT_OK)
        status = append_text(list, chat, text, bytes, flags & FT_CHAT_SPECIAL_TOKENS, err);
    if (status == FT_OK)
        status = append(list, &chat->end_id, 1, err);
    if (status == FT_OK)
        status = append_text(list, chat, "\n", 1, false, err);
    free(text);
    return status;
}

int ft_chat_encode(const struct ft_chat *chat, const struct ft_chat_message *messages, uint32_t message_count,
                   unsigned flags, uint32_t **ids, uint32_t *count, struct ft_error *err)
{
    static const char reply[] = "assistant\n";
    struct ids list = {0};
    *ids = NULL;
    *count = 0;
    int status = append(&list, &chat->prefix_id, chat->prefix_id != FT_NONE, err);
    for (uint32_t i = 0; status == FT_OK && i < message_count; i++)
        status = append_message(&list, chat, &messages[i], i, flags, err);
    if (status == FT_OK && !(flags & FT_CHAT_NO_REPLY)) {
        status = append(&list, &chat->start_id, 1, err);
        if (status == FT_OK)
            status = append_text(&list, chat, reply, sizeof reply - 1, false, err);
    }
    if (status == FT_OK && !list.ids && !(list.ids = malloc(sizeof *list.ids)))
        status = ft_error_set(err, FT_MEMORY, "no memory for token ids");
    if (status != FT_OK) {
        free(list.ids);
        return status;
    }
    *ids = list.ids;
    *count = list.count;
    return FT_OK;
}

/* ---- where a reply ends ---- */

static int read_eos(const json_t *value, const char *directory, const char *name, uint32_t *eos,
                    uint32_t *count, struct ft_error *err)
{
    size_t size = json_is_array(value) ? json_array_size(value) : 1;
    if (size > FT_EOS_MAX)
        return ft_error_set(err, FT_LIMIT, "%s/%s: eos_token_id lists %zu ids; at most %d are read",
                            directory, name, size, FT_EOS_MAX);
    for (size_t i = 0; i < size; i++) {
        const json_t *entry = json_is_array(value) ? json_array_get(value, i) : value;
        json_int_t id = json_integer_value(entry);
        if (!json_is_integer(entry) || id < 0 || id >= FT_NONE)
            return ft_error_set(err, FT_FORMAT,
                                "%s/%s: eos_token_id is neither a token id nor a list of token ids",
                                directory, name);
        eos[i] = (uint32_t)id;
    }
    *count = (uint32_t)size;
    return FT_OK;
}

int ft_chat_read_eos(const char *directory, uint32_t eos[FT_EOS_MAX], uint32_t *count, struct ft_error *err)
{
    static const char *const names[] = {"generation_config.json", "config.json"};
    int status = FT_OK;
    *count = 0;
    for (size_t i = 0; status == FT_OK && *count == 0 && i < 2; i++) {
        json_t *root;
        if (read_json(directory, names[i], &root, err) != FT_OK)
            return err->code;
        const json_t *value = json_object_get(json_object_get(root, "text_config"), "eos_token_id");
        if (!value || json_is_null(value))
            value = json_object_get(root, "eos_token_id");
        if (value && !json_is_null(value))
            status = read_eos(value, directory, names[i], eos, count, err);
        json_decref(root);
    }
    if (status != FT_OK)
        *count = 0;
    return status;
}
