/* SPDX-License-Identifier: Apache-2.0 */
/* For tests: a temporary checkpoint directory, made from a fixture and then broken on purpose. */
#ifndef FT_TESTS_CHECKPOINT_FILES_H
#define FT_TESTS_CHECKPOINT_FILES_H

#include "io/file.h"
#include "io/safetensors.h"
#include "tests/test.h"

#include <dirent.h>
#include <unistd.h>

#define FIXTURE(name) FT_DATA_DIR "/fixtures/" name

struct scratch {
    char dir[64];
    char path[512];         /* of the last file asked for */
    struct ft_arrays model; /* arrays of the fixture's model.safetensors, to be changed and written */
};

static inline const char *scratch_path(struct scratch *s, const char *file)
{
    snprintf(s->path, sizeof s->path, "%s/%s", s->dir, file);
    return s->path;
}

static inline void scratch_write(struct scratch *s, const char *file, const void *data, uint64_t bytes)
{
    struct ft_error err;
    CHECK_OK(ft_file_write_all(scratch_path(s, file), data, bytes, &err), &err);
}

static inline void scratch_copy(struct scratch *s, const char *fixture, const char *file)
{
    struct ft_error err;
    char from[512], *text = NULL;
    uint64_t bytes = 0;
    snprintf(from, sizeof from, "%s/%s", fixture, file);
    CHECK_OK(ft_file_read_all(from, 1u << 30, &text, &bytes, &err), &err);
    scratch_write(s, file, text ? text : "", bytes);
    free(text);
}

/* Makes the directory; with a fixture, copies its config.json and reads its model.safetensors. */
static inline void scratch_init(struct scratch *s, const char *fixture)
{
    struct ft_error err;
    char from[512];
    *s = (struct scratch){.dir = "/tmp/ft_test_XXXXXX"};
    CHECK(mkdtemp(s->dir) != NULL);
    if (!fixture)
        return;
    scratch_copy(s, fixture, "config.json");
    snprintf(from, sizeof from, "%s/model.safetensors", fixture);
    CHECK_OK(ft_safetensors_read(&s->model, from, 1u << 30, &err), &err);
}

static inline struct ft_array *scratch_array(struct scratch *s, const char *name)
{
    for (uint32_t i = 0; i < s->model.count; i++)
        if (strcmp(s->model.items[i].name, name) == 0)
            return &s->model.items[i];
    test_failures_++;
    fprintf(stderr, "no array %s in the fixture\n", name);
    abort();
}

static inline void scratch_drop(struct scratch *s, const char *name)
{
    *scratch_array(s, name) = s->model.items[--s->model.count];
}

static inline void scratch_save(struct scratch *s)
{
    struct ft_error err;
    CHECK_OK(ft_safetensors_write(scratch_path(s, "model.safetensors"), s->model.items, s->model.count, &err),
             &err);
}

/* Replaces the first `from` in config.json. */
static inline void scratch_edit_config(struct scratch *s, const char *from, const char *to)
{
    struct ft_error err;
    char *text = NULL, *changed;
    uint64_t bytes = 0;
    CHECK_OK(ft_file_read_all(scratch_path(s, "config.json"), 1u << 20, &text, &bytes, &err), &err);
    char *at = text ? strstr(text, from) : NULL;
    CHECK(at != NULL);
    if (at && (changed = malloc(bytes + strlen(to) + 1))) {
        int length = sprintf(changed, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
        scratch_write(s, "config.json", changed, (uint64_t)length);
        free(changed);
    }
    free(text);
}

static inline void scratch_fini(struct scratch *s)
{
    DIR *dir = opendir(s->dir);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlink(scratch_path(s, entry->d_name));
    if (dir)
        closedir(dir);
    CHECK_EQ(rmdir(s->dir), 0);
    ft_arrays_fini(&s->model);
}

#endif
