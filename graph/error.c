/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void mark_cut(char *message, size_t bytes, int wanted)
{
    if (wanted >= (int)bytes)
        memcpy(message + bytes - 4, "...", 4);
}

int ft_error_set(struct ft_error *err, int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    err->code = code;
    mark_cut(err->message, sizeof err->message, vsnprintf(err->message, sizeof err->message, format, args));
    va_end(args);
    return code;
}

int ft_error_prepend(struct ft_error *err, const char *format, ...)
{
    char context[sizeof err->message];
    char rest[sizeof err->message];
    va_list args;
    va_start(args, format);
    vsnprintf(context, sizeof context, format, args);
    va_end(args);
    memcpy(rest, err->message, sizeof rest);
    mark_cut(err->message, sizeof err->message,
             snprintf(err->message, sizeof err->message, "%.500s: %.1000s", context, rest));
    return err->code;
}

void ft_error_clear(struct ft_error *err)
{
    err->code = FT_OK;
    err->message[0] = '\0';
}

const char *ft_status_name(int code)
{
    switch (code) {
#define FT_ERROR_NAME(name, value, text)                                                                               \
    case value:                                                                                                        \
        return #name;
        FT_ERRORS(FT_ERROR_NAME)
#undef FT_ERROR_NAME
    default:
        return "?";
    }
}

const char *ft_status_text(int code)
{
    switch (code) {
#define FT_ERROR_TEXT(name, value, text)                                                                               \
    case value:                                                                                                        \
        return text;
        FT_ERRORS(FT_ERROR_TEXT)
#undef FT_ERROR_TEXT
    default:
        return "unknown status";
    }
}

void ft_assert_fail(const char *file, int line, const char *expression, long long left, long long right)
{
    fprintf(stderr, "%s:%d: assertion failed: %s (left %lld, right %lld)\n", file, line, expression, left, right);
    abort();
}
