/* SPDX-License-Identifier: Apache-2.0 */
#include "io/tokenizer_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static int read_stream(FILE *file, const char *path, size_t bytes_max, char **out, size_t *bytes,
                       struct ft_error *err)
{
    struct stat info;
    if (fstat(fileno(file), &info) != 0)
        return ft_error_set(err, FT_IO, "%s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return ft_error_set(err, FT_IO, "%s is not a regular file", path);
    if ((uint64_t)info.st_size > bytes_max)
        return ft_error_set(err, FT_LIMIT, "%s has %lld bytes; at most %zu are read", path,
                            (long long)info.st_size, bytes_max);
    size_t size = (size_t)info.st_size;
    char *text = malloc(size + 1);
    if (!text)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for its %zu bytes", path, size);
    size_t got = fread(text, 1, size, file);
    if (got != size) {
        free(text);
        return ft_error_set(err, FT_IO, "%s: read %zu of %zu bytes", path, got, size);
    }
    text[size] = 0;
    *out = text;
    *bytes = size;
    return FT_OK;
}

int ft_text_file_read(const char *path, size_t bytes_max, bool optional, char **out, size_t *bytes,
                      struct ft_error *err)
{
    *out = NULL;
    *bytes = 0;
    struct stat info;
    if (stat(path, &info) == 0 &&
        S_ISFIFO(info.st_mode)) /* before it is opened, which would wait for a writer */
        return ft_error_set(err, FT_IO, "%s: is a pipe, wanted a regular file", path);
    FILE *file = fopen(path, "rbe");
    if (!file) {
        if (optional && errno == ENOENT)
            return FT_OK;
        return ft_error_set(err, FT_IO, "%s: %s", path, strerror(errno));
    }
    int status = read_stream(file, path, bytes_max, out, bytes, err);
    fclose(file);
    return status;
}
