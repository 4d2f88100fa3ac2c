/* SPDX-License-Identifier: Apache-2.0 */
/* ft tokenize: text on stdin to ids on stdout, and back. */
#include "io/tokenizer.h"
#include "tools/command.h"
#include "tools/ids.h"
#include "tools/json_out.h"
#include "tools/open.h"

#include <stdlib.h>
#include <string.h>

struct tokenize_options {
    struct ft_open_options open; /* only its model is used */
    bool special_tokens, decode, skip_special, json;
};

#define FIELD(name) offsetof(struct tokenize_options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"model", "DIR", "directory with a tokenizer.json", "the demo model", FT_OPTION_STRING, FIELD(open.model),
     0, 0},
    {"special-tokens", NULL, "the text may name special tokens, such as <|im_start|>", NULL, FT_OPTION_FLAG,
     FIELD(special_tokens), 0, 0},
    {"decode", NULL, "ids on stdin (a JSON array, or separated by commas or spaces), text on stdout", NULL,
     FT_OPTION_FLAG, FIELD(decode), 0, 0},
    {"skip-special", NULL, "with --decode: leave special tokens out", NULL, FT_OPTION_FLAG,
     FIELD(skip_special), 0, 0},
    {"json", NULL, "with --decode: the text as a JSON string (ids are JSON anyway)", NULL, FT_OPTION_FLAG,
     FIELD(json), 0, 0},
};

static int decode(const struct ft_tokenizer *tokenizer, const struct tokenize_options *options,
                  const char *input, size_t input_bytes, struct ft_error *err)
{
    uint32_t *ids = NULL, count = 0;
    char *text = NULL;
    size_t bytes = 0;
    int status = ft_ids_parse(input, input_bytes, "standard input", &ids, &count, err);
    if (status == FT_OK)
        status = ft_tokenizer_decode(tokenizer, ids, count, options->skip_special, &text, &bytes, err);
    if (status == FT_OK && options->json) {
        struct ft_json json;
        ft_json_begin(&json, stdout);
        ft_json_bytes(&json, NULL, text, bytes);
        ft_json_end(&json);
    } else if (status == FT_OK) {
        fwrite(text, 1, bytes, stdout);
    }
    free(text);
    free(ids);
    return status;
}

static int encode(const struct ft_tokenizer *tokenizer, const struct tokenize_options *options,
                  const char *input, size_t input_bytes, struct ft_error *err)
{
    uint32_t *ids = NULL, count = 0;
    int status =
        ft_tokenizer_encode(tokenizer, input, input_bytes, options->special_tokens, &ids, &count, err);
    if (status == FT_OK) {
        struct ft_json json;
        ft_json_begin(&json, stdout);
        ft_json_ids(&json, NULL, ids, count);
        ft_json_end(&json);
    }
    free(ids);
    return status;
}

static int tokenize(const struct tokenize_options *options, struct ft_error *err)
{
    char dir[4096], path[4200];
    struct ft_tokenizer *tokenizer = NULL;
    char *input = NULL;
    size_t bytes = 0;
    int status = ft_engine_find_dir(&options->open, dir, sizeof dir, err);
    if (status != FT_OK)
        return status;
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    status = ft_tokenizer_open(&tokenizer, path, err);
    if (status == FT_OK)
        status = ft_ids_read_stdin(&input, &bytes, err);
    if (status == FT_OK)
        status = (options->decode ? decode : encode)(tokenizer, options, input, bytes, err);
    free(input);
    ft_tokenizer_close(tokenizer);
    return status;
}

int ft_command_tokenize(int argc, char **argv)
{
    struct tokenize_options options = {0};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options}};
    const struct ft_option_set set = {
        "ft tokenize",
        "[options] < TEXT",
        "Reads text on standard input, every byte of it, and prints its token ids as a "
        "JSON array; --decode goes the\nother way.",
        groups,
        1,
        0};
    struct ft_option_rest rest;
    struct ft_error err;
    int exit_code;
    ft_open_options_init(&options.open);
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    if (tokenize(&options, &err) != FT_OK)
        return ft_command_fail(&err);
    return ft_command_finish(FT_EXIT_OK);
}
