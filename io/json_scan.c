/* SPDX-License-Identifier: Apache-2.0 */
#include "io/json_scan.h"
#include "io/utf8.h"

#include <stdlib.h>
#include <string.h>

#define TEXT_BYTES_MAX (1ull << 30)

static bool fail_at(struct ft_json_scan *s, uint64_t at, const char *fault)
{
    if (!s->fault) {
        s->fault = fault;
        s->fault_at = at;
    }
    return false;
}

static bool fail(struct ft_json_scan *s, const char *fault)
{
    return fail_at(s, s->at, s->at < s->bytes ? fault : "the text ends too early");
}

static bool fail_memory(struct ft_json_scan *s)
{
    s->out_of_memory |= !s->fault;
    return fail_at(s, s->at, "no memory");
}

void ft_json_scan_init(struct ft_json_scan *s, const char *text, uint64_t bytes)
{
    *s = (struct ft_json_scan){.text = text, .bytes = bytes};
    if (bytes > TEXT_BYTES_MAX) /* lengths of strings and numbers of objects fit 32 bits */
        fail_at(s, 0, "the text is longer than 1 GiB");
}

void ft_json_scan_fini(struct ft_json_scan *s)
{
    free(s->decoded);
    ft_name_set_fini(&s->keys);
    *s = (struct ft_json_scan){0};
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* The byte at the scan, or '\0' at the end: no token has a NUL, so the two need not be told apart. */
static char here(const struct ft_json_scan *s)
{
    return s->at < s->bytes ? s->text[s->at] : '\0';
}

char ft_json_scan_peek(struct ft_json_scan *s)
{
    if (s->fault)
        return '\0';
    for (;; s->at++) {
        char c = here(s);
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t')
            return c;
    }
}

static bool take(struct ft_json_scan *s, char wanted, const char *fault)
{
    if (ft_json_scan_peek(s) != wanted)
        return fail(s, fault);
    s->at++;
    return true;
}

bool ft_json_scan_begin(struct ft_json_scan *s, char open, struct ft_json_inside *inside)
{
    *inside = (struct ft_json_inside){.object = s->object_count++, .close = open == '{' ? '}' : ']'};
    if (!take(s, open, open == '{' ? "an object was expected" : "a list was expected"))
        return false;
    if (++s->depth > FT_JSON_DEPTH_MAX)
        return fail_at(s, s->at - 1, "nested too deep, wanted at most 64 levels");
    return true;
}

bool ft_json_scan_element(struct ft_json_scan *s, struct ft_json_inside *inside)
{
    char c = ft_json_scan_peek(s);
    if (s->fault)
        return false;
    if (c == inside->close) {
        s->at++;
        s->depth--;
        return false;
    }
    if (inside->begun && !take(s, ',', inside->close == '}' ? "',' or '}' expected" : "',' or ']' expected"))
        return false;
    inside->begun = true; /* after a comma the caller reads a value, and a closing bracket is none */
    return true;
}

static bool scan_key_text(struct ft_json_scan *s, struct ft_json_inside *inside, struct ft_json_string *key,
                          uint64_t *from)
{
    if (!ft_json_scan_element(s, inside))
        return false;
    if (ft_json_scan_peek(s) != '"')
        return fail(s, "a key in quotes was expected");
    *from = s->at;
    return ft_json_scan_string(s, key) && take(s, ':', "':' expected");
}

/* The key that began at `from` is the first of its text in its object. */
static bool check_unique(struct ft_json_scan *s, const struct ft_json_inside *inside,
                         struct ft_json_string key, uint64_t from)
{
    uint32_t count = s->keys.count;
    uint32_t number = ft_name_set_add(&s->keys, (struct ft_name){key.text, key.bytes, inside->object});
    if (number == FT_NONE)
        return fail_memory(s);
    return number == count || fail_at(s, from, "duplicate key of an object");
}

bool ft_json_scan_key(struct ft_json_scan *s, struct ft_json_inside *inside, struct ft_json_string *key)
{
    uint64_t from;
    return scan_key_text(s, inside, key, &from) && check_unique(s, inside, *key, from);
}

bool ft_json_scan_known_key(struct ft_json_scan *s, struct ft_json_inside *inside, const char *const *known,
                            uint32_t count, uint32_t *which)
{
    struct ft_json_string key;
    uint64_t from;
    if (!scan_key_text(s, inside, &key, &from))
        return false;
    for (*which = 0; *which < count; ++*which) {
        if (!ft_json_string_is(key, known[*which]))
            continue;
        bool seen = inside->known_seen >> *which & 1;
        inside->known_seen |= 1u << *which;
        return !seen || fail_at(s, from, "duplicate key of an object");
    }
    *which = FT_NONE;
    return check_unique(s, inside, key, from);
}

/* Bytes from `at` that stand for themselves: neither quote, backslash, control character nor non-ASCII. */
static uint64_t plain_bytes(const struct ft_json_scan *s, uint64_t at)
{
    const uint64_t ones = 0x0101010101010101ull, highs = ones << 7;
    uint64_t start = at, word;
    for (; s->bytes - at >= 8; at += 8) {
        memcpy(&word, s->text + at, 8);
        uint64_t quote = word ^ ones * '"', slash = word ^ ones * '\\';
        /* The high bit of a byte is set where subtracting borrowed: where quote or slash is 0, or word < 0x20. */
        if ((((quote - ones) | (slash - ones) | (word - ones * 0x20)) & ~word & highs) | (word & highs))
            break;
    }
    for (; at < s->bytes; at++) {
        unsigned char c = (unsigned char)s->text[at];
        if (c < 0x20 || c == '"' || c == '\\' || c >= 0x80)
            break;
    }
    return at - start;
}

/* Passes plain and non-ASCII characters up to a quote or a backslash. */
static bool pass_characters(struct ft_json_scan *s)
{
    for (;;) {
        s->at += plain_bytes(s, s->at);
        char c = here(s);
        if (c == '"' || c == '\\')
            return true;
        if (s->at >= s->bytes)
            return fail(s, "");
        if ((unsigned char)c < 0x80)
            return fail(s, "a control character inside a string");
        int length = ft_utf8_next(s->text + s->at, s->bytes - s->at);
        if (length <= 0)
            return fail(s, "a string is not UTF-8");
        s->at += (uint64_t)length;
    }
}

/* Four hex digits. */
static bool scan_hex(struct ft_json_scan *s, uint32_t *code)
{
    *code = 0;
    for (int i = 0; i < 4; i++, s->at++) {
        char c = here(s), lower = (char)(c | 0x20);
        if (is_digit(c))
            *code = *code << 4 | (uint32_t)(c - '0');
        else if (lower >= 'a' && lower <= 'f')
            *code = *code << 4 | (uint32_t)(lower - 'a' + 10);
        else
            return fail(s, "\\u wants four hex digits");
    }
    return true;
}

/* What follows "\u", pairs of surrogates as one character. */
static bool scan_unicode(struct ft_json_scan *s, uint32_t *code)
{
    uint32_t low;
    uint64_t from = s->at - 2;
    if (!scan_hex(s, code))
        return false;
    if (*code == 0)
        return fail_at(s, from, "\\u0000 inside a string");
    if (*code < 0xd800 || *code > 0xdfff)
        return true;
    if (*code > 0xdbff || s->bytes - s->at < 2 || memcmp(s->text + s->at, "\\u", 2) != 0)
        return fail_at(s, from, "a lone surrogate inside a string");
    s->at += 2;
    if (!scan_hex(s, &low))
        return false;
    if (low < 0xdc00 || low > 0xdfff)
        return fail_at(s, from, "a lone surrogate inside a string");
    *code = 0x10000 + ((*code - 0xd800) << 10) + (low - 0xdc00);
    return true;
}

static uint32_t put_utf8(char *out, uint32_t code)
{
    uint32_t bytes = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char leads[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (uint32_t i = bytes; i-- > 1; code >>= 6)
        out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)(leads[bytes] | code);
    return bytes;
}

/* The escape whose backslash is next, as UTF-8 at the end of `decoded`. */
static bool scan_escape(struct ft_json_scan *s)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    s->at++;
    char c = here(s);
    const char *found = c ? strchr(from, c) : NULL;
    uint32_t code = found ? (uint32_t)to[found - from] : 0;
    if (!found && c != 'u')
        return fail(s, "an unknown escape inside a string");
    s->at++;
    if (!found && !scan_unicode(s, &code))
        return false;
    s->decoded_bytes += put_utf8(s->decoded + s->decoded_bytes, code);
    return true;
}

/* The rest of a string that began at `from` and has its first backslash at the scan. */
static bool scan_escaped(struct ft_json_scan *s, uint64_t from, struct ft_json_string *string)
{
    /* What an escape stands for is never longer than the escape, so one block holds all decoded strings. */
    if (!s->decoded && !(s->decoded = malloc(s->bytes)))
        return fail_memory(s);
    uint64_t start = s->decoded_bytes;
    for (;;) {
        memcpy(s->decoded + s->decoded_bytes, s->text + from, s->at - from);
        s->decoded_bytes += s->at - from;
        if (here(s) == '"')
            break;
        if (!scan_escape(s))
            return false;
        from = s->at;
        if (!pass_characters(s))
            return false;
    }
    s->at++;
    *string = (struct ft_json_string){s->decoded + start, (uint32_t)(s->decoded_bytes - start)};
    return true;
}

bool ft_json_scan_string(struct ft_json_scan *s, struct ft_json_string *string)
{
    if (!take(s, '"', "a string was expected"))
        return false;
    uint64_t from = s->at;
    if (!pass_characters(s))
        return false;
    if (here(s) == '\\')
        return scan_escaped(s, from, string);
    *string = (struct ft_json_string){s->text + from, (uint32_t)(s->at - from)};
    s->at++;
    return true;
}

static bool pass_digits(struct ft_json_scan *s)
{
    if (!is_digit(here(s)))
        return fail(s, "a digit was expected");
    while (is_digit(here(s)))
        s->at++;
    return true;
}

bool ft_json_scan_number(struct ft_json_scan *s, uint64_t *value, bool *whole)
{
    bool negative = ft_json_scan_peek(s) == '-', fits = true;
    uint64_t from = s->at, number = 0;
    if (s->fault)
        return false;
    s->at += negative;
    uint64_t digits = s->at;
    if (!pass_digits(s))
        return false;
    if (s->text[digits] == '0' && s->at - digits > 1)
        return fail_at(s, digits, "a number begins with 0");
    for (uint64_t i = digits; i < s->at && fits; i++) {
        uint64_t digit = (uint64_t)(s->text[i] - '0');
        fits = number <= ((uint64_t)INT64_MAX + negative - digit) / 10;
        number = number * 10 + digit;
    }
    bool integer = true;
    if (here(s) == '.') {
        integer = false;
        s->at++;
        if (!pass_digits(s))
            return false;
    }
    if (here(s) == 'e' || here(s) == 'E') {
        integer = false;
        s->at++;
        s->at += here(s) == '+' || here(s) == '-';
        if (!pass_digits(s))
            return false;
    }
    if (integer && !fits)
        return fail_at(s, from, negative ? "too big negative integer" : "too big integer");
    *whole = integer && (!negative || number == 0);
    *value = number;
    return true;
}

static bool skip_word(struct ft_json_scan *s, const char *word)
{
    size_t length = strlen(word);
    if (s->bytes - s->at < length || memcmp(s->text + s->at, word, length) != 0)
        return fail(s, "a value was expected");
    s->at += length;
    return true;
}

/* Recursive: the depth is bounded by begin. */
bool ft_json_scan_skip(struct ft_json_scan *s)
{
    struct ft_json_inside inside;
    struct ft_json_string string;
    uint64_t value;
    bool whole;
    char c = ft_json_scan_peek(s);
    switch (c) {
    case '"':
        return ft_json_scan_string(s, &string);
    case '{':
        if (ft_json_scan_begin(s, '{', &inside))
            while (ft_json_scan_key(s, &inside, &string) && ft_json_scan_skip(s))
                ;
        return !s->fault;
    case '[':
        if (ft_json_scan_begin(s, '[', &inside))
            while (ft_json_scan_element(s, &inside) && ft_json_scan_skip(s))
                ;
        return !s->fault;
    case 't':
        return skip_word(s, "true");
    case 'f':
        return skip_word(s, "false");
    case 'n':
        return skip_word(s, "null");
    default:
        return c == '-' || is_digit(c) ? ft_json_scan_number(s, &value, &whole)
                                       : fail(s, "a value was expected");
    }
}

bool ft_json_scan_end(struct ft_json_scan *s)
{
    (void)ft_json_scan_peek(s);
    return !s->fault && (s->at == s->bytes || fail(s, "something follows the end of the object"));
}

bool ft_json_string_is(struct ft_json_string string, const char *text)
{
    return strlen(text) == string.bytes && memcmp(string.text, text, string.bytes) == 0;
}

int ft_json_scan_report(const struct ft_json_scan *s, const char *what, bool lines, struct ft_error *err)
{
    unsigned long long line = 1, column = 1, byte = s->fault_at;
    if (s->out_of_memory)
        return ft_error_set(err, FT_MEMORY, "%s: no memory to read its %llu bytes", what,
                            (unsigned long long)s->bytes);
    for (uint64_t i = 0; i < s->fault_at; i++) {
        column = s->text[i] == '\n' ? 1 : column + 1;
        line += s->text[i] == '\n';
    }
    if (lines)
        return ft_error_set(err, FT_FORMAT, "%s: line %llu, column %llu (byte %llu): %s", what, line, column,
                            byte, s->fault);
    return ft_error_set(err, FT_FORMAT, "%s: column %llu (line %llu, byte %llu): %s", what, column, line,
                        byte, s->fault);
}
