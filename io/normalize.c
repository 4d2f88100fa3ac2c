/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Unicode normalisation form C. utf8proc supplies decomposition and composition; the canonical ordering in
 * between is ours, because utf8proc's exchange sort takes quadratic time on a long run of combining marks
 * (hostile text).
 */
#include "io/tokenizer_internal.h"
#include "io/utf8.h"

#include <utf8proc.h>

#include <stdlib.h>
#include <string.h>

/* Nothing below U+0300 combines with what is before it, and nothing below it composes differently. */
static bool is_plain(const char *text, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if ((uint8_t)text[i] >= 0xcc)
            return false;
    return true;
}

static uint8_t combining_class(int32_t c)
{
    return (uint8_t)utf8proc_get_property(c)->combining_class;
}

/* Stable counting sort of a run of marks by combining class; `spare` has room for the run. */
static void sort_run(int32_t *run, size_t count, int32_t *spare)
{
    size_t start[257] = {0};
    for (size_t i = 0; i < count; i++)
        start[combining_class(run[i]) + 1]++;
    for (size_t class = 0; class < 256; class ++)
        start[class + 1] += start[class];
    for (size_t i = 0; i < count; i++)
        spare[start[combining_class(run[i])]++] = run[i];
    memcpy(run, spare, count * sizeof *run);
}

static void order_marks(int32_t *chars, size_t count, int32_t *spare)
{
    for (size_t at = 0; at < count;) {
        size_t end = at;
        bool sorted = true;
        uint8_t last = 0, class = 0;
        while (end < count && (class = combining_class(chars[end])) != 0) {
            sorted &= class >= last;
            last = class;
            end++;
        }
        if (!sorted)
            sort_run(chars + at, end - at, spare);
        at = end + 1;
    }
}

/* Canonical decomposition; `chars` has room for `capacity`. Returns the count, or 0 when it does not fit. */
static size_t decompose(const char *text, size_t bytes, int32_t *chars, size_t capacity)
{
    size_t count = 0;
    int boundary = 0;
    for (size_t at = 0; at < bytes; at += (size_t)ft_utf8_next(text + at, bytes - at)) {
        utf8proc_ssize_t room = (utf8proc_ssize_t)(capacity - count);
        utf8proc_ssize_t n = utf8proc_decompose_char((int32_t)ft_utf8_codepoint(text + at), chars + count,
                                                     room, UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, &boundary);
        if (n < 0 || n > room)
            return 0;
        count += (size_t)n;
    }
    return count;
}

static int encode(const int32_t *chars, size_t count, char **out, size_t *out_bytes)
{
    uint8_t unit[4];
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++)
        bytes += (size_t)utf8proc_encode_char(chars[i], unit);
    char *text = malloc(bytes + 1);
    if (!text)
        return FT_MEMORY;
    size_t at = 0;
    for (size_t i = 0; i < count; i++)
        at += (size_t)utf8proc_encode_char(chars[i], (uint8_t *)text + at);
    text[at] = 0;
    *out = text;
    *out_bytes = bytes;
    return FT_OK;
}

int ft_normalize_nfc(const char *text, size_t bytes, char **out, size_t *out_bytes, struct ft_error *err)
{
    *out = NULL;
    if (is_plain(text, bytes))
        return FT_OK;
    /* A character of 2 bytes gives at most 3 code points, one of 3 bytes at most 4. Four more: utf8proc may
     * write ahead. */
    size_t capacity = 2 * bytes + 4;
    int32_t *chars = malloc(capacity * sizeof *chars);
    int32_t *spare = malloc(capacity * sizeof *spare);
    int status = chars && spare ? FT_OK : FT_MEMORY;
    if (status == FT_OK) {
        size_t count = decompose(text, bytes, chars, capacity);
        order_marks(chars, count, spare);
        utf8proc_ssize_t composed =
            utf8proc_normalize_utf32(chars, (utf8proc_ssize_t)count, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
        status = count == 0 || composed <= 0 ? FT_INTERNAL : encode(chars, (size_t)composed, out, out_bytes);
    }
    free(chars);
    free(spare);
    if (status == FT_INTERNAL)
        return ft_error_set(err, status, "a text of %zu bytes could not be normalised (NFC)", bytes);
    return status == FT_OK ? FT_OK : ft_error_set(err, status, "no memory to normalise %zu bytes", bytes);
}
