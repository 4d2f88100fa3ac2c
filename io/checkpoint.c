/* SPDX-License-Identifier: Apache-2.0 */
#include "io/checkpoint.h"
#include "io/file.h"
#include "io/name_set.h"
#include "io/safetensors.h"
#include "io/shard_index.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONFIG_BYTES_MAX (16ull << 20)
#define INDEX_BYTES_MAX (256ull << 20)
#define INDEX_NAME "model.safetensors.index.json"

struct ft_checkpoint {
    char *dir;
    struct ft_model model;
    char **files;                   /* [file_count] names inside dir */
    char **paths;                   /* [file_count] */
    struct ft_safetensors *headers; /* [file_count]; only their name pools live on */
    uint32_t file_count;
    struct ft_tensor *tensors; /* [tensor_count], by file and offset */
    uint32_t tensor_count;
    struct ft_name_set names; /* of the tensors, with the same numbers */
};

/* While opening. */
struct index {
    char *text;
    struct ft_shard_index shards; /* empty when the checkpoint has no index */
};

static char *join_path(const char *dir, const char *file)
{
    size_t bytes = strlen(dir) + strlen(file) + 2;
    char *path = malloc(bytes);
    if (path)
        snprintf(path, bytes, "%s/%s", dir, file);
    return path;
}

static int out_of_memory(const struct ft_checkpoint *c, struct ft_error *err)
{
    return ft_error_set(err, FT_MEMORY, "%s: no memory for the list of tensors",
                        c->dir ? c->dir : "checkpoint");
}

static bool file_exists(const struct ft_checkpoint *c, const char *file)
{
    char *path = join_path(c->dir, file);
    bool exists = path && access(path, F_OK) == 0;
    free(path);
    return exists;
}

/* A file of the directory whole. */
static int read_text(const struct ft_checkpoint *c, const char *file, uint64_t bytes_max, char **text,
                     uint64_t *bytes, struct ft_error *err)
{
    char *path = join_path(c->dir, file);
    if (!path)
        return out_of_memory(c, err);
    int status = ft_file_read_all(path, bytes_max, text, bytes, err);
    free(path);
    return status;
}

static int read_config(struct ft_checkpoint *c, struct ft_error *err)
{
    char *text, *path;
    uint64_t bytes;
    int status = read_text(c, "config.json", CONFIG_BYTES_MAX, &text, &bytes, err);
    if (status)
        return ft_error_prepend(err, "checkpoint %s", c->dir);
    path = join_path(c->dir, "config.json");
    status = path ? ft_config_parse(&c->model, text, bytes, path, err) : out_of_memory(c, err);
    free(path);
    free(text);
    return status;
}

static int add_file(struct ft_checkpoint *c, const char *name, size_t bytes, struct ft_error *err)
{
    char **files = realloc(c->files, (c->file_count + 1) * sizeof *files);
    if (!files)
        return out_of_memory(c, err);
    c->files = files;
    files[c->file_count] = strndup(name, bytes);
    if (!files[c->file_count])
        return out_of_memory(c, err);
    c->file_count++;
    return FT_OK;
}

static int compare_strings(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The files of the index, in order of name; every one must be there. */
static int list_index_files(struct ft_checkpoint *c, const struct ft_shard_index *index, struct ft_error *err)
{
    uint32_t absent = 0, first_absent = 0;
    int status = FT_OK;
    for (uint32_t i = 0; i < index->files.count && !status; i++)
        status = add_file(c, index->files.names[i].text, index->files.names[i].bytes, err);
    if (status)
        return status;
    qsort(c->files, c->file_count, sizeof c->files[0], compare_strings);
    for (uint32_t i = c->file_count; i-- > 0;) {
        if (!file_exists(c, c->files[i])) {
            first_absent = i;
            absent++;
        }
    }
    if (absent)
        return ft_error_set(
            err, FT_IO, "%s: %u of the %u shards that %s names are absent, the first is %s: download them",
            c->dir, absent, c->file_count, INDEX_NAME, c->files[first_absent]);
    return FT_OK;
}

static int read_index(struct ft_checkpoint *c, struct index *index, struct ft_error *err)
{
    uint64_t bytes;
    int status = read_text(c, INDEX_NAME, INDEX_BYTES_MAX, &index->text, &bytes, err);
    if (status)
        return status;
    char *path = join_path(c->dir, INDEX_NAME);
    status =
        path ? ft_shard_index_parse(&index->shards, index->text, bytes, path, err) : out_of_memory(c, err);
    free(path);
    return status ? status : list_index_files(c, &index->shards, err);
}

/* Without an index the names themselves tell how many shards there are: model-00001-of-00003.safetensors. */
static int check_shard_numbers(const struct ft_checkpoint *c, struct ft_error *err)
{
    for (uint32_t i = 0; i < c->file_count; i++) {
        unsigned number, total;
        int end = 0;
        char wanted[64];
        if (sscanf(c->files[i], "model-%5u-of-%5u.safetensors%n", &number, &total, &end) != 2 || !end ||
            c->files[i][end] || total > 99999)
            continue;
        for (unsigned k = 1; k <= total; k++) {
            snprintf(wanted, sizeof wanted, "model-%05u-of-%05u.safetensors", k, total);
            if (!file_exists(c, wanted))
                return ft_error_set(err, FT_IO, "%s: shard %s is absent, although %s is there: download it",
                                    c->dir, wanted, c->files[i]);
        }
        return FT_OK; /* all shards of one set: one member tells for all */
    }
    return FT_OK;
}

static int scan_files(struct ft_checkpoint *c, struct ft_error *err)
{
    int status = FT_OK;
    DIR *dir = opendir(c->dir);
    if (!dir)
        return ft_error_set(err, FT_IO, "%s: cannot list: %s", c->dir, strerror(errno));
    for (struct dirent *entry; !status && (entry = readdir(dir));)
        if (fnmatch("model*.safetensors", entry->d_name, 0) == 0)
            status = add_file(c, entry->d_name, strlen(entry->d_name), err);
    closedir(dir);
    if (status)
        return status;
    if (!c->file_count)
        return ft_error_set(err, FT_IO, "%s: holds no %s, model.safetensors or model-*.safetensors", c->dir,
                            INDEX_NAME);
    qsort(c->files, c->file_count, sizeof c->files[0], compare_strings);
    return check_shard_numbers(c, err);
}

static int list_files(struct ft_checkpoint *c, struct index *index, struct ft_error *err)
{
    if (file_exists(c, INDEX_NAME))
        return read_index(c, index, err);
    if (file_exists(c, "model.safetensors"))
        return add_file(c, "model.safetensors", strlen("model.safetensors"), err);
    return scan_files(c, err);
}

static int open_headers(struct ft_checkpoint *c, struct ft_error *err)
{
    c->paths = calloc(c->file_count, sizeof c->paths[0]);
    c->headers = calloc(c->file_count, sizeof c->headers[0]);
    if (!c->paths || !c->headers)
        return out_of_memory(c, err);
    for (uint32_t i = 0; i < c->file_count; i++) {
        c->paths[i] = join_path(c->dir, c->files[i]);
        if (!c->paths[i])
            return out_of_memory(c, err);
        int status = ft_safetensors_open(&c->headers[i], c->paths[i], err);
        if (status)
            return status;
    }
    return FT_OK;
}

/* Takes the prefix off; false for what a text model does not use. */
static bool strip_prefix(struct ft_name *name)
{
    static const char *const dropped[] = {"model.visual.", "mtp."};
    static const char *const prefixes[] = {"model.language_model.", "model."};
    for (size_t i = 0; i < 2; i++)
        if (name->bytes >= strlen(dropped[i]) && memcmp(name->text, dropped[i], strlen(dropped[i])) == 0)
            return false;
    for (size_t i = 0; i < 2; i++) {
        uint32_t length = (uint32_t)strlen(prefixes[i]);
        if (name->bytes >= length && memcmp(name->text, prefixes[i], length) == 0) {
            name->text += length;
            name->bytes -= length;
            break;
        }
    }
    return true;
}

static int add_tensor(struct ft_checkpoint *c, const struct ft_tensor *tensor, uint32_t file,
                      struct ft_error *err)
{
    struct ft_name name = {.text = tensor->name, .bytes = (uint32_t)strlen(tensor->name)};
    if (!strip_prefix(&name))
        return FT_OK;
    uint32_t number = ft_name_set_add(&c->names, name); /* there is room */
    if (number != c->tensor_count)
        return ft_error_set(err, FT_FORMAT, "%s: tensor %s is both in %s and in %s", c->dir, name.text,
                            c->files[c->tensors[number].file], c->files[file]);
    struct ft_tensor *own = &c->tensors[c->tensor_count++];
    *own = *tensor;
    own->name = name.text; /* its NUL is still there */
    own->file = file;
    return FT_OK;
}

static int collect_tensors(struct ft_checkpoint *c, struct ft_error *err)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < c->file_count; i++)
        total += c->headers[i].count;
    if (total > UINT32_MAX / 8)
        return ft_error_set(err, FT_LIMIT, "%s: has %llu tensors", c->dir, (unsigned long long)total);
    c->tensors = malloc((total + 1) * sizeof c->tensors[0]);
    if (!c->tensors || !ft_name_set_reserve(&c->names, total))
        return out_of_memory(c, err);
    for (uint32_t i = 0; i < c->file_count; i++) {
        int status = FT_OK;
        for (uint32_t k = 0; k < c->headers[i].count && !status; k++)
            status = add_tensor(c, &c->headers[i].tensors[k], i, err);
        if (status)
            return status;
        free(c->headers[i].tensors);
        c->headers[i].tensors = NULL;
    }
    return FT_OK;
}

/* Every tensor that the index names lies where the index says. */
static int check_index(const struct ft_checkpoint *c, const struct ft_shard_index *index,
                       struct ft_error *err)
{
    for (uint32_t i = 0; i < index->count; i++) {
        const struct ft_shard_entry *entry = &index->entries[i];
        const struct ft_name *wanted = &index->files.names[entry->file];
        struct ft_name name = {.text = entry->name.text, .bytes = entry->name.bytes};
        if (!strip_prefix(&name))
            continue;
        uint32_t number = ft_name_set_find(&c->names, name);
        const char *found = number == FT_NONE ? NULL : c->files[c->tensors[number].file];
        if (found && strlen(found) == wanted->bytes && memcmp(found, wanted->text, wanted->bytes) == 0)
            continue;
        return ft_error_set(err, FT_FORMAT, "%s/%s: tensor %.*s should be in %.*s, but is %s%s", c->dir,
                            INDEX_NAME, (int)FT_MIN(entry->name.bytes, 300u), entry->name.text,
                            (int)FT_MIN(wanted->bytes, 300u), wanted->text, found ? "in " : "nowhere",
                            found ? found : "");
    }
    return FT_OK;
}

static int open_all(struct ft_checkpoint *c, const char *dir, struct index *index, struct ft_error *err)
{
    struct stat info;
    int status;
    c->dir = strdup(dir);
    if (!c->dir)
        return out_of_memory(c, err);
    if (stat(dir, &info))
        return ft_error_set(err, FT_IO, "checkpoint %s: %s", dir, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return ft_error_set(
            err, FT_IO, "checkpoint %s: is not a directory, wanted one with config.json and *.safetensors",
            dir);
    if ((status = read_config(c, err)) || (status = list_files(c, index, err)) ||
        (status = open_headers(c, err)) || (status = collect_tensors(c, err)))
        return status;
    return check_index(c, &index->shards, err);
}

int ft_checkpoint_open(struct ft_checkpoint **out, const char *dir, struct ft_error *err)
{
    struct index index = {0};
    *out = NULL;
    struct ft_checkpoint *c = calloc(1, sizeof *c);
    if (!c)
        return ft_error_set(err, FT_MEMORY, "checkpoint %s: no memory", dir);
    int status = open_all(c, dir, &index, err);
    ft_shard_index_fini(&index.shards);
    free(index.text);
    if (status)
        ft_checkpoint_close(c);
    else
        *out = c;
    return status;
}

void ft_checkpoint_close(struct ft_checkpoint *c)
{
    if (!c)
        return;
    for (uint32_t i = 0; i < c->file_count; i++) {
        free(c->files[i]);
        if (c->paths)
            free(c->paths[i]);
        if (c->headers)
            ft_safetensors_close(&c->headers[i]);
    }
    free(c->files);
    free(c->paths);
    free(c->headers);
    free(c->tensors);
    ft_name_set_fini(&c->names);
    free(c->dir);
    free(c);
}

const struct ft_model *ft_checkpoint_model(const struct ft_checkpoint *checkpoint)
{
    return &checkpoint->model;
}

const char *ft_checkpoint_dir(const struct ft_checkpoint *checkpoint)
{
    return checkpoint->dir;
}

uint32_t ft_checkpoint_file_count(const struct ft_checkpoint *checkpoint)
{
    return checkpoint->file_count;
}

const char *ft_checkpoint_file_path(const struct ft_checkpoint *checkpoint, uint32_t file)
{
    FT_ASSERT_LT(file, checkpoint->file_count);
    return checkpoint->paths[file];
}

uint64_t ft_checkpoint_file_bytes(const struct ft_checkpoint *checkpoint, uint32_t file)
{
    FT_ASSERT_LT(file, checkpoint->file_count);
    return checkpoint->headers[file].file_bytes;
}

uint32_t ft_checkpoint_tensor_count(const struct ft_checkpoint *checkpoint)
{
    return checkpoint->tensor_count;
}

const struct ft_tensor *ft_checkpoint_tensor(const struct ft_checkpoint *checkpoint, uint32_t index)
{
    FT_ASSERT_LT(index, checkpoint->tensor_count);
    return &checkpoint->tensors[index];
}

const struct ft_tensor *ft_checkpoint_find(const struct ft_checkpoint *checkpoint, const char *name)
{
    uint32_t index =
        ft_name_set_find(&checkpoint->names, (struct ft_name){.text = name, .bytes = (uint32_t)strlen(name)});
    return index == FT_NONE ? NULL : &checkpoint->tensors[index];
}
