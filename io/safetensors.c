/* SPDX-License-Identifier: Apache-2.0 */
#include "io/safetensors.h"
#include "io/file.h"
#include "io/json_scan.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RANK_MAX 8u

bool ft_shape_count(const uint64_t *shape, uint32_t rank, uint64_t *count)
{
    bool fits = true, empty = false;
    *count = 1;
    for (uint32_t i = 0; i < rank; i++) {
        empty |= shape[i] == 0;
        fits &= ft_mul_u64(*count, shape[i], count);
    }
    if (empty) /* a zero makes the product zero, whatever the other factors are */
        *count = 0;
    return fits || empty;
}

void ft_shape_print(const uint64_t *shape, uint32_t rank, char *text, size_t text_bytes)
{
    size_t at = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < rank && at < text_bytes; i++)
        at += (size_t)snprintf(text + at, text_bytes - at, "%s%llu", i ? ", " : "[",
                               (unsigned long long)shape[i]);
    if (at < text_bytes)
        snprintf(text + at, text_bytes - at, "%s", rank ? "]" : "[]");
}

static enum ft_dtype find_dtype(struct ft_json_string name)
{
    for (enum ft_dtype d = 0; d < FT_DTYPE_COUNT; d++)
        if (ft_json_string_is(name, ft_dtype_name(d)))
            return d;
    return FT_DTYPE_COUNT;
}

/* Where a header lies, how far it has been read, and what is said about it in messages. */
struct source {
    const char *path;
    uint64_t data_start, file_bytes;
    struct ft_json_scan scan;
    struct ft_error *err;
};

static int refuse(const struct source *s, const char *name, const char *what)
{
    return ft_error_set(s->err, FT_FORMAT, "%s: tensor %s: %s", s->path, name, what);
}

/* What a tensor's object says, before it is judged: only the last thing read may be wrong in its form. */
struct entry {
    bool has_dtype, has_shape, has_range;
    enum ft_dtype dtype;
    uint32_t shape_count, range_count; /* FT_NONE when an element is not a whole number from 0 */
    uint64_t shape[RANK_MAX], range[2];
};

/* A list of whole numbers, the first `room` of them into `values`. Any other value is passed over. */
static bool scan_list(struct ft_json_scan *scan, uint64_t *values, uint32_t room, bool *is_list,
                      uint32_t *count)
{
    struct ft_json_inside list;
    bool all_whole = true;
    *count = 0;
    *is_list = ft_json_scan_peek(scan) == '[';
    if (!*is_list)
        return ft_json_scan_skip(scan);
    if (!ft_json_scan_begin(scan, '[', &list))
        return false;
    while (ft_json_scan_element(scan, &list)) {
        char next = ft_json_scan_peek(scan);
        uint64_t value = 0;
        bool whole = false;
        if (next == '-' || (next >= '0' && next <= '9'))
            ft_json_scan_number(scan, &value, &whole);
        else
            ft_json_scan_skip(scan);
        all_whole &= whole;
        if (*count < room)
            values[*count] = value;
        ++*count;
    }
    if (!all_whole && *count <= room)
        *count = FT_NONE;
    return !scan->fault;
}

static bool scan_dtype(struct ft_json_scan *scan, struct entry *entry)
{
    struct ft_json_string name;
    entry->has_dtype = ft_json_scan_peek(scan) == '"';
    if (!entry->has_dtype)
        return ft_json_scan_skip(scan);
    if (!ft_json_scan_string(scan, &name))
        return false;
    entry->dtype = find_dtype(name);
    return true;
}

static bool scan_entry(struct ft_json_scan *scan, struct entry *entry)
{
    static const char *const known[] = {"dtype", "shape", "data_offsets"};
    struct ft_json_inside object;
    uint32_t which;
    if (!ft_json_scan_begin(scan, '{', &object))
        return false;
    while (ft_json_scan_known_key(scan, &object, known, 3, &which)) {
        if (which == 0)
            scan_dtype(scan, entry);
        else if (which == 1)
            scan_list(scan, entry->shape, RANK_MAX, &entry->has_shape, &entry->shape_count);
        else if (which == 2)
            scan_list(scan, entry->range, 2, &entry->has_range, &entry->range_count);
        else
            ft_json_scan_skip(scan);
    }
    return !scan->fault;
}

static int judge_shape(const struct source *s, const struct entry *entry, struct ft_tensor *tensor)
{
    if (!entry->has_shape)
        return refuse(s, tensor->name, "shape is missing or not a list");
    if (entry->shape_count == FT_NONE)
        return refuse(s, tensor->name, "shape has an entry that is not a whole number from 0");
    if (entry->shape_count > RANK_MAX)
        return refuse(s, tensor->name, "shape has more than 8 dimensions");
    tensor->rank = entry->shape_count;
    memcpy(tensor->shape, entry->shape, entry->shape_count * sizeof entry->shape[0]);
    return FT_OK;
}

static int judge_range(const struct source *s, const struct entry *entry, struct ft_tensor *tensor)
{
    uint64_t data_bytes = s->file_bytes - s->data_start;
    if (!entry->has_range || entry->range_count != 2 || entry->range[1] < entry->range[0])
        return refuse(s, tensor->name,
                      "data_offsets is not a pair [begin, end] of whole numbers with begin <= end");
    if (entry->range[1] > data_bytes)
        return ft_error_set(
            s->err, FT_FORMAT,
            "%s: tensor %s: data_offsets end at %llu, but the file holds %llu bytes of data: the file "
            "is cut or its header lies; download it again",
            s->path, tensor->name, (unsigned long long)entry->range[1], (unsigned long long)data_bytes);
    tensor->offset = s->data_start + entry->range[0];
    tensor->bytes = entry->range[1] - entry->range[0];
    return FT_OK;
}

static int judge_entry(const struct source *s, const struct entry *entry, struct ft_tensor *tensor)
{
    uint64_t count, bytes;
    char shape[200];
    int status;
    if (!entry->has_dtype)
        return refuse(s, tensor->name, "dtype is missing or not a string");
    tensor->dtype = entry->dtype;
    if ((status = judge_shape(s, entry, tensor)) || (status = judge_range(s, entry, tensor)))
        return status;
    if (!ft_shape_count(tensor->shape, tensor->rank, &count))
        return refuse(s, tensor->name, "the number of elements of its shape does not fit 64 bits");
    if (tensor->dtype == FT_DTYPE_COUNT) /* its size is not ours to know */
        return FT_OK;
    bool fits = ft_mul_u64(count, ft_dtype_bytes(tensor->dtype), &bytes);
    if (fits && bytes == tensor->bytes)
        return FT_OK;
    ft_shape_print(tensor->shape, tensor->rank, shape, sizeof shape);
    return ft_error_set(s->err, FT_FORMAT,
                        "%s: tensor %s: data_offsets span %llu bytes, but %s %s needs %s%llu", s->path,
                        tensor->name, (unsigned long long)tensor->bytes, ft_dtype_name(tensor->dtype), shape,
                        fits ? "" : "more than ", (unsigned long long)(fits ? bytes : UINT64_MAX));
}

static int compare_offsets(const void *a, const void *b)
{
    const struct ft_tensor *left = a, *right = b;
    if (left->offset != right->offset)
        return left->offset < right->offset ? -1 : 1;
    if (left->bytes != right->bytes) /* empty tensors first, so that they never seem to overlap */
        return left->bytes < right->bytes ? -1 : 1;
    return strcmp(left->name, right->name);
}

/* Writers put tensors in the order of their offsets: looking is cheaper than sorting. */
static void sort_by_offset(struct ft_safetensors *st)
{
    for (uint32_t i = 1; i < st->count; i++) {
        if (compare_offsets(&st->tensors[i - 1], &st->tensors[i]) > 0) {
            qsort(st->tensors, st->count, sizeof st->tensors[0], compare_offsets);
            return;
        }
    }
}

static int check_overlap(const struct source *s, const struct ft_safetensors *st)
{
    const struct ft_tensor *last = NULL;
    for (uint32_t i = 0; i < st->count; i++) {
        const struct ft_tensor *tensor = &st->tensors[i];
        if (!tensor->bytes)
            continue;
        if (last && tensor->offset < last->offset + last->bytes)
            return ft_error_set(s->err, FT_FORMAT, "%s: tensors %s and %s overlap in the file", s->path,
                                last->name, tensor->name);
        last = tensor;
    }
    return FT_OK;
}

static struct ft_tensor *new_tensor(struct ft_safetensors *st, uint32_t *room)
{
    if (st->count == *room) {
        uint32_t larger = *room ? 2 * *room : 64;
        struct ft_tensor *tensors = realloc(st->tensors, larger * sizeof *tensors);
        if (!tensors)
            return NULL;
        st->tensors = tensors;
        *room = larger;
    }
    st->tensors[st->count] = (struct ft_tensor){0};
    return &st->tensors[st->count];
}

static int parse_entry(struct source *s, struct ft_tensor *tensor)
{
    struct entry entry = {.dtype = FT_DTYPE_COUNT};
    char next = ft_json_scan_peek(&s->scan);
    if (next && next != '{')
        return refuse(s, tensor->name, "its header entry is not an object");
    return scan_entry(&s->scan, &entry) ? judge_entry(s, &entry, tensor) : FT_OK;
}

/* Faults of the scan are left for the caller to report. */
static int parse_entries(struct ft_safetensors *st, struct source *s)
{
    struct ft_json_inside object;
    struct ft_json_string key;
    uint32_t room = 0;
    char *name = st->names;
    ft_json_scan_begin(&s->scan, '{', &object);
    while (ft_json_scan_key(&s->scan, &object, &key)) {
        if (ft_json_string_is(key, "__metadata__")) {
            ft_json_scan_skip(&s->scan);
            continue;
        }
        struct ft_tensor *tensor = new_tensor(st, &room);
        if (!tensor)
            return ft_error_set(s->err, FT_MEMORY, "%s: no memory for %u tensors", s->path, st->count);
        tensor->name = memcpy(name, key.text, key.bytes);
        name[key.bytes] = '\0';
        name += key.bytes + 1;
        int status = parse_entry(s, tensor);
        if (status)
            return status;
        st->count++;
    }
    return FT_OK;
}

static int parse_header(struct ft_safetensors *st, struct source *s)
{
    struct ft_json_scan *scan = &s->scan;
    char what[500];
    /* A name with its two quotes is longer than the name with its NUL; pages that are not used cost nothing. */
    st->names = malloc(scan->bytes);
    if (!st->names)
        return ft_error_set(s->err, FT_MEMORY, "%s: no memory for names of %llu bytes", s->path,
                            (unsigned long long)scan->bytes);
    char next = ft_json_scan_peek(scan);
    if (next && next != '{')
        return ft_error_set(s->err, FT_FORMAT, "%s: header is not a JSON object", s->path);
    int status = parse_entries(st, s);
    if (status)
        return status;
    if (!ft_json_scan_end(scan)) {
        snprintf(what, sizeof what, "%s: header", s->path);
        return ft_json_scan_report(scan, what, false, s->err);
    }
    sort_by_offset(st);
    return check_overlap(s, st);
}

static int header_length(const unsigned char *first8, uint64_t file_bytes, const char *path, uint64_t *length,
                         struct ft_error *err)
{
    *length = 0;
    for (int i = 7; i >= 0; i--)
        *length = *length << 8 | first8[i];
    if (*length > FT_SAFETENSORS_HEADER_MAX)
        return ft_error_set(err, FT_FORMAT,
                            "%s: header length is %llu bytes, wanted at most 100 MB: not a safetensors file",
                            path, (unsigned long long)*length);
    if (*length < 2 || *length > file_bytes - 8)
        return ft_error_set(
            err, FT_FORMAT,
            "%s: header length is %llu bytes, wanted 2 to %llu (what the file holds): the file is cut "
            "or not a safetensors file",
            path, (unsigned long long)*length, (unsigned long long)(file_bytes - 8));
    return FT_OK;
}

static int too_short(const char *path, uint64_t file_bytes, struct ft_error *err)
{
    return ft_error_set(err, FT_FORMAT, "%s: is %llu bytes long, too short for a safetensors file", path,
                        (unsigned long long)file_bytes);
}

int ft_safetensors_parse(struct ft_safetensors *st, const char *data, uint64_t bytes, uint64_t file_bytes,
                         const char *path, struct ft_error *err)
{
    uint64_t length;
    *st = (struct ft_safetensors){.file_bytes = file_bytes};
    if (file_bytes < 8 || bytes < 8)
        return too_short(path, file_bytes, err);
    int status = header_length((const unsigned char *)data, file_bytes, path, &length, err);
    if (status)
        return status;
    if (length > bytes - 8)
        return ft_error_set(err, FT_FORMAT, "%s: header of %llu bytes is cut", path,
                            (unsigned long long)length);
    struct source source = {.path = path, .data_start = 8 + length, .file_bytes = file_bytes, .err = err};
    ft_json_scan_init(&source.scan, data + 8, length);
    status = parse_header(st, &source);
    ft_json_scan_fini(&source.scan);
    if (status)
        ft_safetensors_close(st);
    return status;
}

/* Exactly `bytes` from `offset`. */
static int read_exactly(int fd, void *buffer, uint64_t bytes, uint64_t offset, const char *path,
                        struct ft_error *err)
{
    for (uint64_t done = 0; done < bytes;) {
        ssize_t got = pread(fd, (char *)buffer + done, bytes - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return ft_error_set(err, FT_IO, "%s: cannot read: %s", path, strerror(errno));
        if (got == 0)
            return ft_error_set(err, FT_IO, "%s: ends early, %llu bytes were wanted at offset %llu", path,
                                (unsigned long long)bytes, (unsigned long long)offset);
        done += (uint64_t)got;
    }
    return FT_OK;
}

static int read_header(struct ft_safetensors *st, const struct ft_file *file, const char *path,
                       struct ft_error *err)
{
    unsigned char first8[8];
    uint64_t length;
    int status;
    if (file->bytes < 8)
        return too_short(path, file->bytes, err);
    if ((status = read_exactly(file->fd, first8, 8, 0, path, err)) ||
        (status = header_length(first8, file->bytes, path, &length, err)))
        return status;
    char *data = malloc(8 + length);
    if (!data)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for a header of %llu bytes", path,
                            (unsigned long long)length);
    status = read_exactly(file->fd, data, 8 + length, 0, path, err);
    if (!status)
        status = ft_safetensors_parse(st, data, 8 + length, file->bytes, path, err);
    free(data);
    return status;
}

int ft_safetensors_open(struct ft_safetensors *st, const char *path, struct ft_error *err)
{
    struct ft_file file;
    *st = (struct ft_safetensors){0};
    int status = ft_file_open(&file, path, false, err);
    if (status)
        return status;
    status = read_header(st, &file, path, err);
    ft_file_close(&file);
    return status;
}

void ft_safetensors_close(struct ft_safetensors *st)
{
    free(st->tensors);
    free(st->names);
    *st = (struct ft_safetensors){0};
}

static int array_bytes(const struct ft_array *array, uint64_t *bytes, struct ft_error *err)
{
    uint64_t count;
    if (!array->name || !array->name[0] || array->dtype >= FT_DTYPE_COUNT || array->rank > RANK_MAX ||
        !ft_shape_count(array->shape, array->rank, &count) ||
        !ft_mul_u64(count, ft_dtype_bytes(array->dtype), bytes) || *bytes > (1ull << 50))
        return ft_error_set(err, FT_FORMAT,
                            "array %s cannot be written: no name, unknown dtype or impossible shape",
                            array->name ? array->name : "(none)");
    return FT_OK;
}

/* *root owns the header; the data bytes of all arrays come back in *total. */
static int build_header(const struct ft_array *arrays, uint32_t count, json_t *root, uint64_t *total,
                        struct ft_error *err)
{
    *total = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes;
        int status = array_bytes(&arrays[i], &bytes, err);
        if (status)
            return status;
        if (json_object_get(root, arrays[i].name))
            return ft_error_set(err, FT_FORMAT, "array %s is there twice", arrays[i].name);
        json_t *shape = json_array();
        for (uint32_t k = 0; k < arrays[i].rank; k++)
            json_array_append_new(shape, json_integer((json_int_t)arrays[i].shape[k]));
        json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", ft_dtype_name(arrays[i].dtype), "shape",
                                  shape, "data_offsets", (json_int_t)*total, (json_int_t)(*total + bytes));
        if (!entry || json_object_set_new(root, arrays[i].name, entry))
            return ft_error_set(err, FT_FORMAT, "array %s: its name is not UTF-8 (or there is no memory)",
                                arrays[i].name);
        *total += bytes;
    }
    return FT_OK;
}

int ft_safetensors_write(const char *path, const struct ft_array *arrays, uint32_t count,
                         struct ft_error *err)
{
    uint64_t data_bytes;
    json_t *root = json_object();
    int status = build_header(arrays, count, root, &data_bytes, err);
    char *header = status ? NULL : json_dumps(root, JSON_COMPACT);
    json_decref(root);
    if (status)
        return status;
    uint64_t text_bytes = header ? strlen(header) : 0;
    uint64_t header_bytes = ft_round_up(text_bytes, 8); /* data starts aligned; the format pads with spaces */
    char *file = header ? malloc(8 + header_bytes + data_bytes) : NULL;
    if (!file) {
        free(header);
        return ft_error_set(err, FT_MEMORY, "%s: no memory for %llu bytes", path,
                            (unsigned long long)data_bytes);
    }
    for (uint32_t i = 0; i < 8; i++)
        file[i] = (char)(header_bytes >> 8 * i);
    memset(file + 8, ' ', header_bytes);
    memcpy(file + 8, header, text_bytes);
    free(header);
    char *at = file + 8 + header_bytes;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = 0;
        (void)array_bytes(&arrays[i], &bytes, err); /* held above */
        if (bytes)
            memcpy(at, arrays[i].data, bytes);
        at += bytes;
    }
    status = ft_file_write_all(path, file, (uint64_t)(at - file), err);
    free(file);
    return status;
}

/* Copies tensors to aligned places: offsets in a file may be odd. */
static int copy_arrays(struct ft_arrays *arrays, const char *file, const char *path, struct ft_error *err)
{
    uint64_t total = 8;
    for (uint32_t i = 0; i < arrays->header.count; i++)
        total += ft_round_up(arrays->header.tensors[i].bytes, 8);
    arrays->items = calloc(arrays->header.count + 1, sizeof arrays->items[0]);
    arrays->block = malloc(total);
    if (!arrays->items || !arrays->block)
        return ft_error_set(err, FT_MEMORY, "%s: no memory for %llu bytes", path, (unsigned long long)total);
    char *at = arrays->block;
    for (uint32_t i = 0; i < arrays->header.count; i++) {
        const struct ft_tensor *tensor = &arrays->header.tensors[i];
        struct ft_array *item = &arrays->items[arrays->count++];
        if (tensor->dtype == FT_DTYPE_COUNT)
            return ft_error_set(err, FT_UNSUPPORTED, "%s: array %s has a dtype that ft does not know", path,
                                tensor->name);
        *item =
            (struct ft_array){.name = tensor->name, .dtype = tensor->dtype, .rank = tensor->rank, .data = at};
        memcpy(item->shape, tensor->shape, sizeof item->shape);
        memcpy(at, file + tensor->offset, tensor->bytes);
        at += ft_round_up(tensor->bytes, 8);
    }
    return FT_OK;
}

int ft_safetensors_read(struct ft_arrays *arrays, const char *path, uint64_t bytes_max, struct ft_error *err)
{
    char *file;
    uint64_t bytes;
    *arrays = (struct ft_arrays){0};
    int status = ft_file_read_all(path, bytes_max, &file, &bytes, err);
    if (status)
        return status;
    status = ft_safetensors_parse(&arrays->header, file, bytes, bytes, path, err);
    if (!status)
        status = copy_arrays(arrays, file, path, err);
    free(file);
    if (status)
        ft_arrays_fini(arrays);
    return status;
}

const struct ft_array *ft_arrays_find(const struct ft_arrays *arrays, const char *name)
{
    for (uint32_t i = 0; i < arrays->count; i++)
        if (strcmp(arrays->items[i].name, name) == 0)
            return &arrays->items[i];
    return NULL;
}

void ft_arrays_fini(struct ft_arrays *arrays)
{
    free(arrays->items);
    free(arrays->block);
    ft_safetensors_close(&arrays->header);
    *arrays = (struct ft_arrays){0};
}
