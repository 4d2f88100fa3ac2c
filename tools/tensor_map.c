/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/tensor_map.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t spec_bytes(const struct ft_tensor_spec *spec)
{
    uint64_t bytes = ft_dtype_bytes(spec->dtype);
    for (uint32_t i = 0; i < spec->rank; i++)
        bytes *= spec->shape[i];
    return bytes;
}

/* The header as safetensors wants it, padded with spaces so that data begins at a multiple of 64; malloc'ed. */
static char *make_header(const struct ft_tensor_spec *specs, uint32_t count, uint64_t *bytes,
                         uint64_t *data_bytes)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (!out)
        return NULL;
    *data_bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        fprintf(out, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? "," : "{", specs[i].name,
                ft_dtype_name(specs[i].dtype));
        for (uint32_t d = 0; d < specs[i].rank; d++)
            fprintf(out, d ? ",%" PRIu64 : "%" PRIu64, specs[i].shape[d]);
        uint64_t end = *data_bytes + spec_bytes(&specs[i]);
        fprintf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", *data_bytes, end);
        *data_bytes = end;
    }
    fputc('}', out);
    fflush(out);
    for (uint64_t pad = ft_round_up(8 + size, 64) - 8 - size; pad; pad--)
        fputc(' ', out);
    bool bad = fclose(out) != 0;
    if (bad) {
        free(text);
        return NULL;
    }
    *bytes = size;
    return text;
}

static int map_part(struct ft_tensor_map *map, struct ft_error *err)
{
    /* Another process may write the same file: each has a part of its own, the last commit stays. One of the same
     * name is left of a process that was killed. */
    (void)unlink(map->part);
    map->fd = open(map->part, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (map->fd < 0)
        return ft_error_set(err, FT_IO, "%s: cannot be created: %s", map->part, strerror(errno));
    int refused = posix_fallocate(map->fd, 0, (off_t)map->bytes);
    if (refused)
        return ft_error_set(err, FT_IO, "%s: no room for %" PRIu64 " bytes: %s", map->path, map->bytes,
                            strerror(refused));
    void *base = mmap(NULL, map->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, map->fd, 0);
    if (base == MAP_FAILED)
        return ft_error_set(err, FT_IO, "%s: cannot be mapped: %s", map->part, strerror(errno));
    map->base = base;
    return FT_OK;
}

int ft_tensor_map_create(struct ft_tensor_map *map, const char *path, const struct ft_tensor_spec *specs,
                         uint32_t count, struct ft_error *err)
{
    struct stat info;
    uint64_t header_bytes = 0, data_bytes = 0;
    memset(map, 0, sizeof *map);
    if (!stat(path, &info) && !S_ISREG(info.st_mode))
        return ft_error_set(err, FT_IO, "%s: is not a regular file", path);
    char *header = make_header(specs, count, &header_bytes, &data_bytes);
    map->fd = -1;
    map->path = strdup(path);
    if (!header || !map->path || asprintf(&map->part, "%s.part.%ld", path, (long)getpid()) < 0) {
        map->part = NULL;
        free(header);
        ft_tensor_map_abandon(map);
        return ft_error_set(err, FT_MEMORY, "%s: no memory for the header", path);
    }
    map->data_offset = 8 + header_bytes;
    map->bytes = map->data_offset + data_bytes;
    int status = map_part(map, err);
    if (status == FT_OK) {
        memcpy(map->base, &header_bytes, 8);
        memcpy(map->base + 8, header, header_bytes);
    } else {
        ft_tensor_map_abandon(map);
    }
    free(header);
    return status;
}

void *ft_tensor_map_data(const struct ft_tensor_map *map, const struct ft_tensor_spec *specs, uint32_t index)
{
    uint64_t offset = map->data_offset;
    for (uint32_t i = 0; i < index; i++)
        offset += spec_bytes(&specs[i]);
    return map->base + offset;
}

static void release(struct ft_tensor_map *map)
{
    if (map->base)
        munmap(map->base, map->bytes);
    if (map->path && map->fd >= 0)
        close(map->fd);
    free(map->path);
    free(map->part);
    memset(map, 0, sizeof *map);
}

int ft_tensor_map_commit(struct ft_tensor_map *map, struct ft_error *err)
{
    bool bad = msync(map->base, map->bytes, MS_SYNC) != 0 || fsync(map->fd) != 0 ||
               rename(map->part, map->path) != 0;
    if (bad) {
        ft_error_set(err, FT_IO, "%s: %s", map->path, strerror(errno));
        ft_tensor_map_abandon(map);
        return err->code;
    }
    release(map);
    return FT_OK;
}

void ft_tensor_map_abandon(struct ft_tensor_map *map)
{
    if (map->part && map->fd >= 0)
        unlink(map->part);
    release(map);
}
