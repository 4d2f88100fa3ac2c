/* SPDX-License-Identifier: Apache-2.0 */
#include "io/utf8.h"

#include <string.h>

/* How many bytes follow a lead byte, and the range of the first of them (the later ones are 80..BF). */
static int lead(uint8_t byte, uint8_t *low, uint8_t *high)
{
    *low = byte == 0xe0 ? 0xa0 : byte == 0xf0 ? 0x90 : 0x80;
    *high = byte == 0xed ? 0x9f : byte == 0xf4 ? 0x8f : 0xbf;
    if (byte >= 0xc2 && byte <= 0xdf)
        return 1;
    if (byte >= 0xe0 && byte <= 0xef)
        return 2;
    if (byte >= 0xf0 && byte <= 0xf4)
        return 3;
    return -1;
}

int ft_utf8_next(const char *text, size_t bytes)
{
    const uint8_t *s = (const uint8_t *)text;
    uint8_t low, high;
    if (s[0] < 0x80)
        return 1;
    int follow = lead(s[0], &low, &high);
    if (follow < 0)
        return -1;
    for (int i = 1; i <= follow; i++) {
        if ((size_t)i >= bytes)
            return 0;
        if (s[i] < low || s[i] > high)
            return -i;
        low = 0x80;
        high = 0xbf;
    }
    return follow + 1;
}

size_t ft_utf8_valid_bytes(const char *text, size_t bytes)
{
    size_t at = 0;
    while (at < bytes) {
        int n = ft_utf8_next(text + at, bytes - at);
        if (n <= 0)
            break;
        at += (size_t)n;
    }
    return at;
}

uint32_t ft_utf8_codepoint(const char *text)
{
    const uint8_t *s = (const uint8_t *)text;
    if (s[0] < 0x80)
        return s[0];
    if (s[0] < 0xe0)
        return (uint32_t)(s[0] & 0x1f) << 6 | (s[1] & 0x3f);
    if (s[0] < 0xf0)
        return (uint32_t)(s[0] & 0x0f) << 12 | (uint32_t)(s[1] & 0x3f) << 6 | (s[2] & 0x3f);
    return (uint32_t)(s[0] & 0x07) << 18 | (uint32_t)(s[1] & 0x3f) << 12 | (uint32_t)(s[2] & 0x3f) << 6 |
           (s[3] & 0x3f);
}

size_t ft_utf8_previous(const char *text, size_t end)
{
    size_t at = end - 1;
    while (at > 0 && ((uint8_t)text[at] & 0xc0) == 0x80)
        at--;
    return at;
}

size_t ft_utf8_copy_lossy(const char *text, size_t bytes, bool final, char *out, size_t *held_bytes)
{
    size_t at = 0, written = 0;
    *held_bytes = 0;
    while (at < bytes) {
        int n = ft_utf8_next(text + at, bytes - at);
        if (n > 0) {
            memcpy(out + written, text + at, (size_t)n);
            written += (size_t)n;
            at += (size_t)n;
            continue;
        }
        if (n == 0 && !final) {
            *held_bytes = bytes - at;
            break;
        }
        memcpy(out + written, "\xef\xbf\xbd", 3);
        written += 3;
        at += n == 0 ? bytes - at : (size_t)-n;
    }
    return written;
}

bool ft_utf8_is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
           c == 0x3000;
}
