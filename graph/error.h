/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors of the whole project.
 *
 * A function that can fail returns int (FT_OK or one of the codes below) and takes `struct ft_error *err` as its
 * last parameter (never NULL). The message is written once, where the facts are known: it names the thing, what
 * was found, what was wanted and the way out. On the way up context may be prepended. Only tools/ prints.
 * Threads: a struct ft_error belongs to one thread at a time.
 */
#ifndef FT_GRAPH_ERROR_H
#define FT_GRAPH_ERROR_H

#include <stddef.h>

/*            name         code text */
#define FT_ERRORS(X)                                                                                                   \
    X(OK, 0, "ok")                                                                                                     \
    X(USAGE, 1, "wrong use of a command or an option")                                                                 \
    X(IO, 2, "a file or device could not be read or written")                                                          \
    X(FORMAT, 3, "a file is not what its format says")                                                                 \
    X(UNSUPPORTED, 4, "understood, but not supported")                                                                 \
    X(MEMORY, 5, "not enough memory, or a pool is full")                                                               \
    X(LIMIT, 6, "a limit set at start is reached")                                                                     \
    X(SYSTEM, 7, "the operating system refused a call")                                                                \
    X(TIMEOUT, 8, "a wait reached its bound")                                                                          \
    X(CANCELLED, 9, "cancelled by the user")                                                                           \
    X(NUMERIC, 10, "a result is not a number")                                                                         \
    X(INTERNAL, 11, "a mistake of our own")                                                                            \
    X(MISMATCH, 12, "a result departs from its reference")

enum ft_status {
#define FT_ERROR_ENUM(name, code, text) FT_##name = code,
    FT_ERRORS(FT_ERROR_ENUM)
#undef FT_ERROR_ENUM
};
#define FT_ERR(name) FT_##name

struct ft_error {
    int code;
    char message[1024]; /* always terminated; cut with "..." when too long */
};

/* Sets code and message; returns code, so that `return ft_error_set(err, FT_IO, "...")` reads well. */
int ft_error_set(struct ft_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Puts "text: " in front of the message; returns err->code. */
int ft_error_prepend(struct ft_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));
void ft_error_clear(struct ft_error *err);
const char *ft_status_name(int code); /* "FORMAT" */
const char *ft_status_text(int code);

/* For our own mistakes only; prints both values and aborts. */
void ft_assert_fail(const char *file, int line, const char *expression, long long left, long long right)
    __attribute__((noreturn, cold));
#define FT_ASSERT_OP(a, op, b)                                                                                         \
    do {                                                                                                               \
        long long left_ = (long long)(a), right_ = (long long)(b);                                                     \
        if (!(left_ op right_))                                                                                        \
            ft_assert_fail(__FILE__, __LINE__, #a " " #op " " #b, left_, right_);                                      \
    } while (0)
#define FT_ASSERT_EQ(a, b) FT_ASSERT_OP(a, ==, b)
#define FT_ASSERT_LT(a, b) FT_ASSERT_OP(a, <, b)
#define FT_ASSERT_LE(a, b) FT_ASSERT_OP(a, <=, b)
#define FT_ASSERT_TRUE(a) FT_ASSERT_OP(!!(a), ==, 1)

#endif
