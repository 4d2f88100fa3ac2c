/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ft_verify_json.h"

#include "io/file.h"
#include "tools/generate.h"
#include "tools/json_out.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define REFERENCE_BYTES_MAX (64u << 20)
#define PROMPTS_MAX 4096u

struct prompt {
    const char *text; /* of the JSON tree */
    uint32_t *ids, id_count, *greedy, greedy_count;
    uint32_t *got, got_count, equal_count;
};

static int read_ids(const json_t *item, const char *path, size_t index, const char *key, uint32_t **ids,
                    uint32_t *count, struct ft_error *err)
{
    const json_t *list = json_object_get(item, key);
    size_t length = json_array_size(list);
    if (!json_is_array(list) || length > UINT32_MAX / 8)
        return ft_error_set(err, FT_FORMAT, "%s: prompts[%zu].%s is not a list of ids", path, index, key);
    *ids = calloc(length + 1, sizeof **ids);
    if (!*ids)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for %zu ids", path, length);
    for (size_t i = 0; i < length; i++) {
        const json_t *id = json_array_get(list, i);
        json_int_t value = json_integer_value(id);
        if (!json_is_integer(id) || value < 0 || value >= (json_int_t)FT_NONE)
            return ft_error_set(err, FT_FORMAT, "%s: prompts[%zu].%s[%zu] is not a token id", path, index,
                                key, i);
        (*ids)[i] = (uint32_t)value;
    }
    *count = (uint32_t)length;
    return FT_OK;
}

static int read_prompt(struct prompt *prompt, const json_t *item, const char *path, size_t index,
                       struct ft_error *err)
{
    const char *text = json_string_value(json_object_get(item, "prompt"));
    prompt->text = text ? text : "";
    int status = read_ids(item, path, index, "prompt_ids", &prompt->ids, &prompt->id_count, err);
    if (status == FT_OK)
        status = read_ids(item, path, index, "greedy_ids", &prompt->greedy, &prompt->greedy_count, err);
    if (status != FT_OK)
        return status;
    prompt->got = calloc(prompt->greedy_count + 1ull, sizeof *prompt->got);
    return prompt->got ? FT_OK : ft_error_set(err, FT_MEMORY, "%s: no memory", path);
}

static void free_prompts(struct prompt *prompts, size_t count)
{
    for (size_t i = 0; prompts && i < count; i++) {
        free(prompts[i].ids);
        free(prompts[i].greedy);
        free(prompts[i].got);
    }
    free(prompts);
}

static int run_prompts(const struct ft_verify_options *options, struct prompt *prompts, size_t count,
                       struct ft_error *err)
{
    struct ft_engine engine;
    struct ft_error close_err;
    struct ft_open_options open = options->open;
    uint64_t longest = 0;
    for (size_t i = 0; i < count; i++)
        longest = FT_MAX(longest, (uint64_t)prompts[i].id_count + prompts[i].greedy_count);
    ft_open_options_want_kv(&open, longest, 1);
    int status = ft_engine_open(&engine, &open, err);
    if (status != FT_OK)
        return status;
    for (size_t i = 0; i < count && status == FT_OK; i++) {
        struct prompt *p = &prompts[i];
        struct ft_request request = {.prompt = p->ids,
                                     .prompt_count = p->id_count,
                                     .max_tokens = p->greedy_count,
                                     .sampling = {.top_p = 1, .repetition_penalty = 1}};
        status = ft_generate_ids(engine.session, &request, p->got, &p->got_count, err);
        while (p->equal_count < p->got_count && p->got[p->equal_count] == p->greedy[p->equal_count])
            p->equal_count++;
    }
    if (ft_engine_close(&engine, &close_err) != FT_OK && status == FT_OK) {
        *err = close_err;
        status = err->code;
    }
    return status;
}

static size_t report_text(const struct prompt *prompts, size_t count)
{
    size_t equal = 0;
    for (size_t i = 0; i < count; i++) {
        bool same = prompts[i].equal_count == prompts[i].greedy_count;
        equal += same;
        printf("%-9s %3u of %3u tokens  ", same ? "equal" : "DIFFERENT", prompts[i].equal_count,
               prompts[i].greedy_count);
        for (const char *c = prompts[i].text; *c && c < prompts[i].text + 72; c++)
            putchar(*c == '\n' ? ' ' : *c);
        putchar('\n');
    }
    printf("greedy   %zu of %zu prompts equal\n%s\n", equal, count, equal == count ? "ok" : "DIFFERENT");
    return equal;
}

static size_t report_json(const struct ft_verify_options *options, const struct prompt *prompts, size_t count)
{
    struct ft_json json;
    size_t equal = 0;
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    ft_json_text(&json, "model", options->open.model);
    ft_json_open(&json, '[', "prompts");
    for (size_t i = 0; i < count; i++) {
        bool same = prompts[i].equal_count == prompts[i].greedy_count;
        equal += same;
        ft_json_open(&json, '{', NULL);
        ft_json_text(&json, "prompt", prompts[i].text);
        ft_json_u64(&json, "greedy_equal_count", prompts[i].equal_count);
        ft_json_u64(&json, "greedy_count", prompts[i].greedy_count);
        ft_json_bool(&json, "greedy_equal", same);
        ft_json_ids(&json, "ids", prompts[i].got, prompts[i].got_count);
        ft_json_close(&json, '}');
    }
    ft_json_close(&json, ']');
    ft_json_bool(&json, "greedy_equal", equal == count);
    ft_json_bool(&json, "ok", equal == count);
    ft_json_close(&json, '}');
    ft_json_end(&json);
    return equal;
}

static int verify_list(const struct ft_verify_options *options, const json_t *list, const char *path,
                       bool *good, struct ft_error *err)
{
    size_t count = json_array_size(list);
    if (!count || count > PROMPTS_MAX)
        return ft_error_set(err, FT_FORMAT, "%s: wanted a list \"prompts\" of 1 .. %u prompts", path,
                            PROMPTS_MAX);
    struct prompt *prompts = calloc(count, sizeof *prompts);
    int status = prompts ? FT_OK : ft_error_set(err, FT_MEMORY, "%s: no memory", path);
    for (size_t i = 0; status == FT_OK && i < count; i++)
        status = read_prompt(&prompts[i], json_array_get(list, i), path, i, err);
    if (status == FT_OK)
        status = run_prompts(options, prompts, count, err);
    if (status == FT_OK)
        *good = (options->json ? report_json(options, prompts, count) : report_text(prompts, count)) == count;
    free_prompts(prompts, count);
    return status;
}

int ft_verify_json(const struct ft_verify_options *options, const char *path, bool *good,
                   struct ft_error *err)
{
    char *text = NULL;
    uint64_t bytes = 0;
    json_error_t where;
    int status = ft_file_read_all(path, REFERENCE_BYTES_MAX, &text, &bytes, err);
    if (status != FT_OK)
        return status;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    free(text);
    if (!root)
        return ft_error_set(err, FT_FORMAT, "%s: line %d: %s", path, where.line, where.text);
    status = verify_list(options, json_object_get(root, "prompts"), path, good, err);
    json_decref(root);
    return status;
}
