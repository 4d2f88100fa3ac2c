/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text of one sequence on its way to the reader: bytes in as tokens bring them, text out as soon as it is
 * certain.
 *
 *   push("Hello wor") -> "Hello "   stop string "world": "wor" may begin it, so "Hello " goes out, "wor" waits
 *   push("th")        -> "worth"    it did not: everything goes out
 *
 * Held back: the longest tail that may be the beginning of a stop string, and an incomplete UTF-8 character.
 * A stop string ends the text in front of it; what follows is dropped. Ownership: stop strings are the
 * caller's and live longer; `held` belongs to the struct. Threads: one at a time. Errors: FT_USAGE for an
 * empty or too long stop string.
 */
#ifndef FT_TOOLS_TEXT_OUT_H
#define FT_TOOLS_TEXT_OUT_H

#include "graph/error.h"
#include "graph/types.h"

#define FT_TEXT_STOP_BYTES_MAX 256u

/* Returns false when nobody reads any more (closed pipe) or the bytes cannot be kept. */
typedef bool ft_text_write(void *context, const char *text, size_t bytes);

struct ft_text_out {
    const char *const *stops; /* [stop_count] */
    uint32_t stop_count;
    ft_text_write *write;
    void *context;
    bool stopped; /* a stop string was found */
    bool failed;  /* write returned false */
    uint32_t held_bytes;
    char held[2 * FT_TEXT_STOP_BYTES_MAX + 8];
};

int ft_text_out_begin(struct ft_text_out *out, const char *const *stops, uint32_t stop_count,
                      ft_text_write *write, void *context, struct ft_error *err);
/* Returns false once the text has ended (stopped or failed): generate no more. */
bool ft_text_out_push(struct ft_text_out *out, const char *text, size_t bytes);
/* No more text will come: what was held back goes out. */
void ft_text_out_flush(struct ft_text_out *out);

/* A growing string, for texts that are printed later. write = ft_text_append. */
struct ft_text {
    char *bytes; /* malloc'ed, not terminated; NULL while empty */
    size_t count, cap;
};
bool ft_text_append(void *text, const char *bytes, size_t count);
void ft_text_fini(struct ft_text *text);

#endif
