/* SPDX-License-Identifier: Apache-2.0 */
#include "io/shard_index.h"

#include <stdlib.h>
#include <string.h>

static int refuse_file(struct ft_json_string tensor, struct ft_json_string file, const char *path,
                       struct ft_error *err)
{
    return ft_error_set(
        err, FT_FORMAT, "%s: tensor %.*s: its file is \"%.*s\", wanted a plain name inside the directory",
        path, (int)FT_MIN(tensor.bytes, 200u), tensor.text, (int)FT_MIN(file.bytes, 200u), file.text);
}

static int add_entry(struct ft_shard_index *index, struct ft_json_string tensor, struct ft_json_string file,
                     const char *path, struct ft_error *err)
{
    if (!file.bytes || file.text[0] == '.' || memchr(file.text, '/', file.bytes))
        return refuse_file(tensor, file, path, err);
    if (index->count == index->room) {
        uint32_t room = index->room ? 2 * index->room : 256;
        struct ft_shard_entry *entries = realloc(index->entries, room * sizeof *entries);
        if (!entries)
            return ft_error_set(err, FT_MEMORY, "%s: no memory for %u tensors", path, room);
        index->entries = entries;
        index->room = room;
    }
    uint32_t number = ft_name_set_add(&index->files, (struct ft_name){file.text, file.bytes, 0});
    if (number == FT_NONE)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for the list of files", path);
    index->entries[index->count++] = (struct ft_shard_entry){tensor, number};
    return FT_OK;
}

static int parse_map(struct ft_shard_index *index, const char *path, struct ft_error *err)
{
    struct ft_json_scan *s = &index->scan;
    struct ft_json_inside map;
    struct ft_json_string tensor, file;
    int status = FT_OK;
    if (!ft_json_scan_begin(s, '{', &map))
        return FT_OK; /* the fault is the scanner's to tell */
    while (!status && ft_json_scan_key(s, &map, &tensor)) {
        char next = ft_json_scan_peek(s);
        if (next && next != '"')
            return ft_error_set(err, FT_FORMAT, "%s: tensor %.*s: its file is not a string", path,
                                (int)FT_MIN(tensor.bytes, 200u), tensor.text);
        if (ft_json_scan_string(s, &file))
            status = add_entry(index, tensor, file, path, err);
    }
    return status;
}

static int parse_index(struct ft_shard_index *index, const char *path, struct ft_error *err)
{
    struct ft_json_scan *s = &index->scan;
    struct ft_json_inside root;
    struct ft_json_string key;
    int status = FT_OK;
    bool is_map = false, is_object = ft_json_scan_peek(s) == '{';
    if (is_object)
        ft_json_scan_begin(s, '{', &root);
    while (is_object && !status && ft_json_scan_key(s, &root, &key)) {
        if (!ft_json_string_is(key, "weight_map") || ft_json_scan_peek(s) != '{') {
            ft_json_scan_skip(s);
            continue;
        }
        is_map = true;
        status = parse_map(index, path, err);
    }
    if (status)
        return status;
    if (is_object)
        ft_json_scan_end(s);
    if (s->fault)
        return ft_json_scan_report(s, path, true, err);
    if (!is_map)
        return ft_error_set(err, FT_FORMAT, "%s: weight_map is missing or not an object", path);
    if (!index->count)
        return ft_error_set(err, FT_FORMAT, "%s: weight_map is empty", path);
    return FT_OK;
}

int ft_shard_index_parse(struct ft_shard_index *index, const char *text, uint64_t bytes, const char *path,
                         struct ft_error *err)
{
    *index = (struct ft_shard_index){0};
    ft_json_scan_init(&index->scan, text, bytes);
    /* A guess that saves growing step by step; when there is no memory, adding a key will say so. */
    (void)ft_name_set_reserve(&index->scan.keys, bytes / 128);
    int status = parse_index(index, path, err);
    if (status)
        ft_shard_index_fini(index);
    return status;
}

void ft_shard_index_fini(struct ft_shard_index *index)
{
    free(index->entries);
    ft_name_set_fini(&index->files);
    ft_json_scan_fini(&index->scan);
    *index = (struct ft_shard_index){0};
}
