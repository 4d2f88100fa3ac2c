/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/text_out.h"

#include <stdlib.h>
#include <string.h>

int ft_text_out_begin(struct ft_text_out *out, const char *const *stops, uint32_t stop_count,
                      ft_text_write *write, void *context, struct ft_error *err)
{
    for (uint32_t i = 0; i < stop_count; i++) {
        size_t bytes = strlen(stops[i]);
        if (!bytes)
            return ft_error_set(err, FT_USAGE, "--stop: a stop string must not be empty");
        if (bytes > FT_TEXT_STOP_BYTES_MAX)
            return ft_error_set(err, FT_USAGE, "--stop: %zu bytes, at most %u are possible", bytes,
                                FT_TEXT_STOP_BYTES_MAX);
    }
    memset(out, 0, sizeof *out);
    out->stops = stops;
    out->stop_count = stop_count;
    out->write = write;
    out->context = context;
    return FT_OK;
}

static void emit(struct ft_text_out *out, size_t bytes)
{
    if (bytes && !out->failed)
        out->failed = !out->write(out->context, out->held, bytes);
    memmove(out->held, out->held + bytes, out->held_bytes - bytes);
    out->held_bytes -= (uint32_t)bytes;
}

/* Where the earliest stop string begins in the held bytes; held_bytes when there is none. */
static size_t find_stop(const struct ft_text_out *out)
{
    size_t first = out->held_bytes;
    for (uint32_t i = 0; i < out->stop_count; i++) {
        const char *found = memmem(out->held, out->held_bytes, out->stops[i], strlen(out->stops[i]));
        if (found)
            first = FT_MIN(first, (size_t)(found - out->held));
    }
    return first;
}

/* Bytes at the end of the held ones that may be the beginning of a stop string. */
static size_t stop_tail(const struct ft_text_out *out)
{
    size_t longest = 0;
    for (uint32_t i = 0; i < out->stop_count; i++) {
        size_t most = FT_MIN(strlen(out->stops[i]) - 1, (size_t)out->held_bytes);
        for (size_t n = most; n > longest; n--)
            if (!memcmp(out->held + out->held_bytes - n, out->stops[i], n)) {
                longest = n;
                break;
            }
    }
    return longest;
}

/* Bytes in front of `end` that are the beginning of a UTF-8 character whose rest has not come (0 .. 3). */
static size_t utf8_tail(const char *text, size_t end)
{
    for (size_t n = 1; n <= 3 && n <= end; n++) {
        unsigned char c = (unsigned char)text[end - n];
        if ((c & 0xc0) == 0x80)
            continue;
        size_t wanted = c >= 0xf0 && c < 0xf8 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
        return c < 0xf8 && wanted > n ? n : 0;
    }
    return 0;
}

static void settle(struct ft_text_out *out)
{
    size_t stop = find_stop(out);
    if (stop < out->held_bytes) {
        emit(out, stop);
        out->held_bytes = 0;
        out->stopped = true;
        return;
    }
    size_t certain = out->held_bytes - stop_tail(out);
    emit(out, certain - utf8_tail(out->held, certain));
}

bool ft_text_out_push(struct ft_text_out *out, const char *text, size_t bytes)
{
    while (bytes && !out->stopped && !out->failed) {
        /* After settling at most a stop string less a byte, and 3 bytes of a character, are held: there is room. */
        size_t part = FT_MIN(bytes, sizeof out->held - out->held_bytes);
        memcpy(out->held + out->held_bytes, text, part);
        out->held_bytes += (uint32_t)part;
        text += part;
        bytes -= part;
        settle(out);
    }
    return !out->stopped && !out->failed;
}

void ft_text_out_flush(struct ft_text_out *out)
{
    emit(out, out->held_bytes);
}

bool ft_text_append(void *context, const char *bytes, size_t count)
{
    struct ft_text *text = context;
    if (count > text->cap - text->count) {
        size_t cap = 2 * text->cap + count + 64;
        char *grown = realloc(text->bytes, cap);
        if (!grown)
            return false;
        text->bytes = grown;
        text->cap = cap;
    }
    memcpy(text->bytes + text->count, bytes, count);
    text->count += count;
    return true;
}

void ft_text_fini(struct ft_text *text)
{
    free(text->bytes);
    memset(text, 0, sizeof *text);
}
