/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokenizer.json's patterns are Ruby's (Oniguruma with its default syntax). Most of it means the same to
 * PCRE2. What does not is rewritten here:
 *
 *   \s \S   Unicode's White_Space (PCRE2 adds U+180E)
 *   \w \W   letters, letter numbers, marks, decimal digits, connectors (PCRE2 leaves marks and connectors out)
 *   \v      vertical tab (PCRE2: any vertical space)
 *   \uHHHH  a code point
 *
 * or refused by name, so that a pattern never silently cuts text differently: set operations and nested
 * classes, {n,m}+ (greedy twice in Ruby, possessive in PCRE2), options in mid-pattern, (?m), back references,
 * verbs, recursion, callouts, conditions and escapes outside of a known list.
 */
#include "io/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#define SPACES                                                                                               \
    "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define NOT_SPACES                                                                                           \
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}!-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{"  \
    "2027}"                                                                                                  \
    "\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}"
#define WORDS "\\p{L}\\p{Nl}\\p{M}\\p{Nd}\\p{Pc}"

#define PATTERN_BYTES_MAX ((size_t)16 << 10)
#define GROWTH_MAX 128 /* output bytes per input byte: NOT_SPACES for two */

struct translation {
    const char *pattern;
    size_t bytes, at;
    char *out; /* [GROWTH_MAX * bytes + 1] */
    size_t out_bytes;
    bool in_class;
    struct ft_error *err;
};

static void put(struct translation *t, const char *text, size_t bytes)
{
    memcpy(t->out + t->out_bytes, text, bytes);
    t->out_bytes += bytes;
}

static void put_text(struct translation *t, const char *text)
{
    put(t, text, strlen(text));
}

/* Copies `bytes` of the pattern, as many as there are. */
static void copy(struct translation *t, size_t bytes)
{
    if (bytes > t->bytes - t->at)
        bytes = t->bytes - t->at;
    put(t, t->pattern + t->at, bytes);
    t->at += bytes;
}

static int refuse(struct translation *t, const char *what)
{
    return ft_error_set(
        t->err, FT_UNSUPPORTED,
        "the regular expression has %s at byte %zu, which this reader does not know: \"%.200s\"", what, t->at,
        t->pattern);
}

static bool ahead(const struct translation *t, const char *text)
{
    size_t bytes = strlen(text);
    return t->bytes - t->at >= bytes && memcmp(t->pattern + t->at, text, bytes) == 0;
}

/* A class of characters, with brackets unless it stands in a class already. */
static void put_class(struct translation *t, const char *members, bool negated)
{
    if (!t->in_class)
        put_text(t, negated ? "[^" : "[");
    put_text(t, members);
    if (!t->in_class)
        put_text(t, "]");
    t->at += 2;
}

static int translate_u(struct translation *t)
{
    size_t digits = 0;
    while (digits < 4 && t->at + 2 + digits < t->bytes &&
           strchr("0123456789abcdefABCDEF", t->pattern[t->at + 2 + digits]) && t->pattern[t->at + 2 + digits])
        digits++;
    if (digits != 4)
        return refuse(t, "an incomplete \\u");
    put_text(t, "\\x{");
    put(t, t->pattern + t->at + 2, 4);
    put_text(t, "}");
    t->at += 6;
    return FT_OK;
}

static int translate_escape(struct translation *t)
{
    if (t->at + 1 >= t->bytes)
        return refuse(t, "a lone backslash");
    char c = t->pattern[t->at + 1];
    if (c == 's')
        put_class(t, SPACES, false);
    else if (c == 'S')
        put_class(t, t->in_class ? NOT_SPACES : SPACES, true);
    else if (c == 'w')
        put_class(t, WORDS, false);
    else if (c == 'W' && !t->in_class)
        put_class(t, WORDS, true);
    else if (c == 'v') {
        put_text(t, "\\x0b");
        t->at += 2;
    } else if (c == 'u')
        return translate_u(t);
    else if (c == 'p' || c == 'P' || c == 'x') {
        copy(t, 2);
        if (ahead(t, "{")) {
            const char *close = memchr(t->pattern + t->at, '}', t->bytes - t->at);
            copy(t, close ? (size_t)(close - (t->pattern + t->at)) + 1 : t->bytes);
        } else
            copy(t, c == 'x' ? 0 : 1);
    } else if (c != 0 && strchr("dDrntfabBAze", c))
        copy(t, 2);
    else if ((uint8_t)c >= 0x80 || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') ||
             (c >= 'a' && c <= 'z') || !c) {
        char what[] = "the escape \\?";
        what[sizeof what - 2] = (uint8_t)c < 0x20 || (uint8_t)c >= 0x7f ? '?' : c;
        return refuse(t, what);
    } else
        copy(t, 2);
    return FT_OK;
}

static int translate_in_class(struct translation *t)
{
    if (ahead(t, "&&"))
        return refuse(t, "the set operation &&");
    if (ahead(t, "[:")) {
        const char *close = memmem(t->pattern + t->at, t->bytes - t->at, ":]", 2);
        if (!close)
            return refuse(t, "an open [:");
        copy(t, (size_t)(close - (t->pattern + t->at)) + 2);
        return FT_OK;
    }
    if (ahead(t, "["))
        return refuse(t, "a class inside a class");
    if (ahead(t, "]"))
        t->in_class = false;
    copy(t, 1);
    return FT_OK;
}

/* "(?": groups, look-around and i, x options for a group; options on their own only at the start. */
static int translate_group(struct translation *t)
{
    size_t start = t->at;
    t->at += 2;
    if (ahead(t, ":") || ahead(t, "=") || ahead(t, "!") || ahead(t, ">") || ahead(t, "<=") ||
        ahead(t, "<!")) {
        t->at = start;
        copy(t, 3);
        return FT_OK;
    }
    while (t->at < t->bytes && strchr("ix-", t->pattern[t->at]) && t->pattern[t->at])
        t->at++;
    bool known = t->at > start + 2 && (ahead(t, ":") || (ahead(t, ")") && start == 0));
    size_t bytes = t->at - start;
    t->at = start;
    if (!known)
        return refuse(t, "a group of another kind than (?: (?= (?! (?> (?<= (?<! (?i: ");
    copy(t, bytes + 1);
    return FT_OK;
}

static int translate_outside(struct translation *t)
{
    if (ahead(t, "(*"))
        return refuse(t, "a verb (*");
    if (ahead(t, "(?"))
        return translate_group(t);
    if (ahead(t, "}+"))
        return refuse(t, "the quantifier {}+");
    if (ahead(t, "{,"))
        return refuse(t, "the quantifier {,n}");
    if (ahead(t, "[")) {
        copy(t, 1);
        if (ahead(t, "^"))
            copy(t, 1);
        if (ahead(t, "]"))
            return refuse(t, "an empty class");
        t->in_class = true;
        return FT_OK;
    }
    copy(t, 1);
    return FT_OK;
}

int ft_regex_translate(const char *pattern, size_t bytes, char **out, size_t *out_bytes, struct ft_error *err)
{
    *out = NULL;
    if (bytes > PATTERN_BYTES_MAX)
        return ft_error_set(err, FT_LIMIT, "a regular expression has %zu bytes; at most %zu can be read",
                            bytes, PATTERN_BYTES_MAX);
    struct translation t = {
        .pattern = pattern, .bytes = bytes, .err = err, .out = malloc(GROWTH_MAX * bytes + 1)};
    if (!t.out)
        return ft_error_set(err, FT_MEMORY, "no memory for a regular expression of %zu bytes", bytes);
    int status = FT_OK;
    while (status == FT_OK && t.at < bytes) {
        if (pattern[t.at] == '\\')
            status = translate_escape(&t);
        else
            status = t.in_class ? translate_in_class(&t) : translate_outside(&t);
    }
    if (status != FT_OK) {
        free(t.out);
        return status;
    }
    *out = t.out;
    *out_bytes = t.out_bytes;
    return FT_OK;
}
