/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes JSON as it goes: nothing is built in memory, keys keep their order, text is always valid.
 *
 *     ft_json_open(&json, '{', NULL); ft_json_u64(&json, "workers", 2); ft_json_close(&json, '}');
 *
 * `key` is NULL inside arrays and for the outermost value. Ill-formed UTF-8 becomes U+FFFD, a number that is
 * not finite becomes null. Threads: one at a time. Write errors stay with the stream (ferror).
 */
#ifndef FT_TOOLS_JSON_OUT_H
#define FT_TOOLS_JSON_OUT_H

#include "graph/types.h"

#include <stdio.h>

struct ft_json {
    FILE *out;
    uint32_t depth;
    bool first; /* no member yet at this depth */
};

void ft_json_begin(struct ft_json *json, FILE *out);
void ft_json_end(struct ft_json *json);                                 /* the last newline */
void ft_json_open(struct ft_json *json, char bracket, const char *key); /* '{' or '[' */
void ft_json_close(struct ft_json *json, char bracket);                 /* '}' or ']' */
void ft_json_text(struct ft_json *json, const char *key, const char *text);
void ft_json_bytes(struct ft_json *json, const char *key, const char *text, size_t bytes);
void ft_json_u64(struct ft_json *json, const char *key, uint64_t value);
void ft_json_i64(struct ft_json *json, const char *key, int64_t value);
void ft_json_f64(struct ft_json *json, const char *key, double value);
void ft_json_bool(struct ft_json *json, const char *key, bool value);
void ft_json_null(struct ft_json *json, const char *key);
void ft_json_ids(struct ft_json *json, const char *key, const uint32_t *ids, uint32_t count);

#endif
