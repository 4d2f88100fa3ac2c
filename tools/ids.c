/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ids.h"

#include "io/file.h"
#include "io/safetensors.h"
#include "tools/text_out.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_separator(char c)
{
    return isspace((unsigned char)c) || c == ',' || c == '[' || c == ']';
}

/* Reads the id at text[*at]; digits end at a separator or at the end. */
static int parse_id(const char *text, size_t bytes, size_t *at, const char *name, uint32_t *id,
                    struct ft_error *err)
{
    size_t begin = *at;
    uint64_t value = 0;
    for (; *at < bytes && isdigit((unsigned char)text[*at]) && value < FT_NONE; *at += 1)
        value = value * 10 + (uint64_t)(text[*at] - '0');
    if (value >= FT_NONE || *at == begin || (*at < bytes && !is_separator(text[*at]))) {
        size_t shown = begin;
        while (shown < bytes && shown < begin + 20 && !is_separator(text[shown]))
            shown++;
        return ft_error_set(err, FT_USAGE, "%s: \"%.*s\" (byte %zu) is not a token id", name,
                            (int)(shown - begin), text + begin, begin);
    }
    *id = (uint32_t)value;
    return FT_OK;
}

int ft_ids_parse(const char *text, size_t bytes, const char *name, uint32_t **ids, uint32_t *count,
                 struct ft_error *err)
{
    size_t cap = 0;
    *count = 0;
    *ids = NULL;
    /* Ids are at least one digit and one separator, so half of the bytes bounds their number. */
    cap = bytes / 2 + 1;
    *ids = malloc(cap * sizeof **ids);
    if (!*ids)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for %zu ids", name, cap);
    for (size_t at = 0; at < bytes;) {
        if (is_separator(text[at])) {
            at++;
            continue;
        }
        if (parse_id(text, bytes, &at, name, &(*ids)[*count], err) != FT_OK) {
            free(*ids);
            *ids = NULL;
            *count = 0;
            return err->code;
        }
        *count += 1;
    }
    return FT_OK;
}

static int read_input_ids(const char *path, uint32_t **ids, uint32_t *count, struct ft_error *err)
{
    struct ft_arrays arrays;
    int status = ft_safetensors_read(&arrays, path, 1ull << 32, err);
    if (status != FT_OK)
        return status;
    const struct ft_array *array = ft_arrays_find(&arrays, "input_ids");
    bool good = array && array->dtype == FT_DTYPE_I32 && array->rank == 1 && array->shape[0] < FT_NONE;
    *ids = good ? malloc((array->shape[0] + 1) * sizeof **ids) : NULL;
    if (*ids) {
        memcpy(*ids, array->data, array->shape[0] * sizeof **ids);
        *count = (uint32_t)array->shape[0];
    } else {
        status = ft_error_set(err, FT_FORMAT, "%s: has no input_ids of type I32 [T]", path);
    }
    ft_arrays_fini(&arrays);
    return status;
}

int ft_ids_read(const char *wish, uint32_t **ids, uint32_t *count, struct ft_error *err)
{
    char *text = NULL;
    uint64_t bytes = 0;
    size_t length = strlen(wish);
    *ids = NULL;
    *count = 0;
    if (strspn(wish, "0123456789,[] ") == length)
        return ft_ids_parse(wish, length, "--ids", ids, count, err);
    if (length > 12 && !strcmp(wish + length - 12, ".safetensors"))
        return read_input_ids(wish, ids, count, err);
    int status = FT_OK;
    if (!strcmp(wish, "-")) {
        size_t size = 0;
        status = ft_ids_read_stdin(&text, &size, err);
        bytes = size;
    } else {
        if (access(wish, F_OK) != 0)
            return ft_error_set(err, FT_USAGE, "--ids: \"%.200s\" is neither a list of ids nor a file", wish);
        status = ft_file_read_all(wish, FT_INPUT_BYTES_MAX, &text, &bytes, err);
    }
    if (status == FT_OK)
        status = ft_ids_parse(text, bytes, wish, ids, count, err);
    free(text);
    return status;
}

int ft_ids_read_stdin(char **text, size_t *bytes, struct ft_error *err)
{
    struct ft_text all = {0};
    char part[16384];
    for (;;) {
        ssize_t got = read(STDIN_FILENO, part, sizeof part);
        if (got == 0)
            break;
        bool kept = got > 0 && all.count < FT_INPUT_BYTES_MAX && ft_text_append(&all, part, (size_t)got);
        if (!kept) {
            int why = errno;
            ft_text_fini(&all);
            if (got < 0)
                return ft_error_set(err, why == EINTR ? FT_CANCELLED : FT_IO, "standard input: %s",
                                    strerror(why));
            return ft_error_set(err, FT_LIMIT, "standard input: more than %u bytes", FT_INPUT_BYTES_MAX);
        }
    }
    *bytes = all.count;
    if (!ft_text_append(&all, "", 1)) {
        ft_text_fini(&all);
        return ft_error_set(err, FT_MEMORY, "standard input: no memory");
    }
    *text = all.bytes;
    return FT_OK;
}
