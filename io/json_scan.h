/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads a JSON text (RFC 8259) from left to right without building anything: for headers and indices of
 * hundreds of thousands of entries, where a tree of objects costs ten times the reading. Small files
 * (config.json and the like) are read with the JSON library.
 *
 *     ft_json_scan_begin(s, '{', &object);
 *     while (ft_json_scan_key(s, &object, &key))
 *         if (key is wanted) ft_json_scan_string(s, &value); else ft_json_scan_skip(s);
 *     if (s->fault) return ...
 *
 * Strict: UTF-8 and escapes are checked (no U+0000, no lone surrogates), duplicate keys of any object are
 * refused, so are integers outside 64 bits with sign, nesting beyond FT_JSON_DEPTH_MAX, and anything after
 * the root (ft_json_scan_end). Of numbers with a fraction or an exponent only the form is checked.
 *
 * The first fault sticks: whatever is called later returns false and moves nothing. Strings point into the
 * text, or into the scanner's memory where they had escapes: both last until ft_json_scan_fini. Threads: one.
 */
#ifndef FT_IO_JSON_SCAN_H
#define FT_IO_JSON_SCAN_H

#include "graph/error.h"
#include "io/name_set.h"

#define FT_JSON_DEPTH_MAX 64u

struct ft_json_scan {
    const char *text; /* not owned */
    uint64_t bytes, at;
    const char *fault; /* what is wrong, at `fault_at`; NULL while nothing is */
    uint64_t fault_at;
    bool out_of_memory; /* is the fault */
    uint32_t depth, object_count;
    char *decoded; /* strings that had escapes, [bytes], made for the first of them */
    uint64_t decoded_bytes;
    struct ft_name_set keys; /* of objects; the group is the object's number */
};

/* Where the scan is inside an object or a list. */
struct ft_json_inside {
    uint32_t object, known_seen; /* bits of known keys */
    bool begun;                  /* a member has been read */
    char close;
};

struct ft_json_string {
    const char *text; /* no NUL at the end */
    uint32_t bytes;
};

/* Texts above 1 GiB are a fault. */
void ft_json_scan_init(struct ft_json_scan *s, const char *text, uint64_t bytes);
void ft_json_scan_fini(struct ft_json_scan *s);

/* The first character of the next value, or '\0' at the end (and after a fault). */
char ft_json_scan_peek(struct ft_json_scan *s);
/* Enters the object or list whose '{' or '[' is next. */
bool ft_json_scan_begin(struct ft_json_scan *s, char open, struct ft_json_inside *inside);
/* The next key of an object, with its ':'; false after the last one. The value must be read or skipped. */
bool ft_json_scan_key(struct ft_json_scan *s, struct ft_json_inside *inside, struct ft_json_string *key);
/* The same for an object of a few known keys (at most 32), which is faster: *which is the number of the key
 * in `known`, or FT_NONE for another one. */
bool ft_json_scan_known_key(struct ft_json_scan *s, struct ft_json_inside *inside, const char *const *known,
                            uint32_t count, uint32_t *which);
/* Is there another element in a list? It must be read or skipped. */
bool ft_json_scan_element(struct ft_json_scan *s, struct ft_json_inside *inside);

bool ft_json_scan_string(struct ft_json_scan *s, struct ft_json_string *string);
/* A number; *whole tells whether it is an integer from 0 (to INT64_MAX), then *value is it. */
bool ft_json_scan_number(struct ft_json_scan *s, uint64_t *value, bool *whole);
bool ft_json_scan_skip(struct ft_json_scan *s); /* any value */
/* Nothing but white space may follow. */
bool ft_json_scan_end(struct ft_json_scan *s);

bool ft_json_string_is(struct ft_json_string string, const char *text);

/* Writes the fault: "WHAT: column 7 (line 2, byte 30): TEXT", or "WHAT: line 2, column 7 (byte 30): TEXT"
 * when the text is of many lines. Columns and lines count from 1, columns and bytes in bytes, bytes from 0.
 */
int ft_json_scan_report(const struct ft_json_scan *s, const char *what, bool lines, struct ft_error *err);

#endif
