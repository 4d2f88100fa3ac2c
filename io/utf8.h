/* SPDX-License-Identifier: Apache-2.0 */
/*
 * UTF-8 as the Unicode standard defines it (table 3-7: no overlong forms, no surrogates, nothing above
 * U+10FFFF).
 *
 * An ill-formed sequence is cut by the standard's "maximal subpart" practice, so that replacing each cut by
 * one U+FFFD gives what browsers and the field's reference tokenizers give. Pure functions; no allocation,
 * any thread.
 */
#ifndef FT_IO_UTF8_H
#define FT_IO_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Looks at the first character of text[bytes], bytes >= 1:
 *   n > 0   a well-formed character of n bytes
 *   n < 0   -n bytes that can never become one (one U+FFFD)
 *   0       all bytes are the beginning of a character whose rest is missing (at most 3 bytes)
 */
int ft_utf8_next(const char *text, size_t bytes);

/* Bytes of the longest well-formed prefix. */
size_t ft_utf8_valid_bytes(const char *text, size_t bytes);

/* The code point of a well-formed character. */
uint32_t ft_utf8_codepoint(const char *text);

/* Start of the character that ends at text[end], end >= 1, in well-formed text. */
size_t ft_utf8_previous(const char *text, size_t end);

/*
 * Copies text to out and writes U+FFFD for what is ill-formed; returns the bytes written, at most 3 * bytes.
 * An unfinished character at the end is left out and counted in *held_bytes (0..3), or replaced when `final`.
 */
size_t ft_utf8_copy_lossy(const char *text, size_t bytes, bool final, char *out, size_t *held_bytes);

/* Unicode's White_Space property. */
bool ft_utf8_is_space(uint32_t codepoint);

#endif
