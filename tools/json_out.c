/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/json_out.h"

#include <math.h>
#include <string.h>

void ft_json_begin(struct ft_json *json, FILE *out)
{
    json->out = out;
    json->depth = 0;
    json->first = true;
}

void ft_json_end(struct ft_json *json)
{
    fputc('\n', json->out);
}

/* Length of the well-formed UTF-8 character at text (1 .. 4), or 0. */
static size_t utf8_length(const unsigned char *text, size_t bytes)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    unsigned char c = text[0];
    size_t length = c < 0x80                ? 1
                    : c >= 0xc2 && c < 0xe0 ? 2
                    : c >= 0xe0 && c < 0xf0 ? 3
                    : c >= 0xf0 && c < 0xf5 ? 4
                                            : 0;
    if (!length || length > bytes)
        return 0;
    uint32_t point = length == 1 ? c : c & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
        point = point << 6 | (text[i] & 0x3fu);
    }
    bool surrogate = point >= 0xd800 && point < 0xe000;
    return point < least[length] || surrogate || point > 0x10ffff ? 0 : length;
}

static void write_string(FILE *out, const char *text, size_t bytes)
{
    fputc('"', out);
    for (size_t i = 0; i < bytes;) {
        const unsigned char *at = (const unsigned char *)text + i;
        size_t length = utf8_length(at, bytes - i);
        if (*at == '"' || *at == '\\')
            fprintf(out, "\\%c", *at);
        else if (*at == '\n')
            fputs("\\n", out);
        else if (*at < 0x20 || *at == 0x7f)
            fprintf(out, "\\u%04x", *at);
        else if (length)
            fwrite(at, 1, length, out);
        else
            fputs("\xef\xbf\xbd", out);
        i += length ? length : 1;
    }
    fputc('"', out);
}

static void begin_member(struct ft_json *json, const char *key)
{
    if (!json->first)
        fputc(',', json->out);
    if (json->depth)
        fprintf(json->out, "\n%*s", (int)(2 * json->depth), "");
    json->first = false;
    if (key) {
        write_string(json->out, key, strlen(key));
        fputs(": ", json->out);
    }
}

void ft_json_open(struct ft_json *json, char bracket, const char *key)
{
    begin_member(json, key);
    fputc(bracket, json->out);
    json->depth++;
    json->first = true;
}

void ft_json_close(struct ft_json *json, char bracket)
{
    json->depth--;
    if (!json->first)
        fprintf(json->out, "\n%*s", (int)(2 * json->depth), "");
    fputc(bracket, json->out);
    json->first = false;
}

void ft_json_bytes(struct ft_json *json, const char *key, const char *text, size_t bytes)
{
    begin_member(json, key);
    write_string(json->out, text, bytes);
}

void ft_json_text(struct ft_json *json, const char *key, const char *text)
{
    ft_json_bytes(json, key, text, strlen(text));
}

void ft_json_u64(struct ft_json *json, const char *key, uint64_t value)
{
    begin_member(json, key);
    fprintf(json->out, "%llu", (unsigned long long)value);
}

void ft_json_i64(struct ft_json *json, const char *key, int64_t value)
{
    begin_member(json, key);
    fprintf(json->out, "%lld", (long long)value);
}

void ft_json_f64(struct ft_json *json, const char *key, double value)
{
    begin_member(json, key);
    if (isfinite(value))
        fprintf(json->out, "%.9g", value);
    else
        fputs("null", json->out);
}

void ft_json_bool(struct ft_json *json, const char *key, bool value)
{
    begin_member(json, key);
    fputs(value ? "true" : "false", json->out);
}

void ft_json_null(struct ft_json *json, const char *key)
{
    begin_member(json, key);
    fputs("null", json->out);
}

void ft_json_ids(struct ft_json *json, const char *key, const uint32_t *ids, uint32_t count)
{
    begin_member(json, key);
    fputc('[', json->out);
    for (uint32_t i = 0; i < count; i++)
        fprintf(json->out, i ? ", %u" : "%u", ids[i]);
    fputc(']', json->out);
}
