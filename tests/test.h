/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The project's own asserts for tests. A test program is a list of functions named by behaviour:
 *
 *     TEST(arena_refuses_more_than_it_has) { ... CHECK(x == y); CHECK_EQ(a, b); CHECK_OK(call(..., &err), &err); }
 *     TEST_MAIN(RUN(arena_refuses_more_than_it_has) RUN(...))
 *
 * A failed check prints file, line and values, is counted, and the test goes on (REQUIRE stops the test
 * function). Exit code 0 = all passed, 1 = a check failed or nothing was checked, 77 = skipped.
 */
#ifndef FT_TESTS_TEST_H
#define FT_TESTS_TEST_H

#include "graph/error.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int test_failures_;
static int test_checks_;

#define TEST(name) static void name(void)
#define RUN(name)                                                                                            \
    do {                                                                                                     \
        int before_ = test_failures_;                                                                        \
        if (argc < 2 || strstr(#name, argv[1])) {                                                            \
            name();                                                                                          \
            printf("%s %s\n", test_failures_ == before_ ? "ok  " : "FAIL", #name);                           \
            fflush(stdout);                                                                                  \
        }                                                                                                    \
    } while (0);
#define TEST_MAIN(runs)                                                                                      \
    int main(int argc, char **argv)                                                                          \
    {                                                                                                        \
        (void)argv;                                                                                          \
        runs printf("%d checks, %d failed\n", test_checks_, test_failures_);                                 \
        return test_failures_ || !test_checks_ ? 1 : 0;                                                      \
    }
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        test_checks_++;                                                                                      \
        if (!(condition)) {                                                                                  \
            test_failures_++;                                                                                \
            fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition);                           \
        }                                                                                                    \
    } while (0)
#define REQUIRE(condition)                                                                                   \
    do {                                                                                                     \
        test_checks_++;                                                                                      \
        if (!(condition)) {                                                                                  \
            test_failures_++;                                                                                \
            fprintf(stderr, "%s:%d: REQUIRE(%s)\n", __FILE__, __LINE__, #condition);                         \
            return;                                                                                          \
        }                                                                                                    \
    } while (0)
#define CHECK_EQ(a, b)                                                                                       \
    do {                                                                                                     \
        long long left_ = (long long)(a), right_ = (long long)(b);                                           \
        test_checks_++;                                                                                      \
        if (left_ != right_) {                                                                               \
            test_failures_++;                                                                                \
            fprintf(stderr, "%s:%d: %s = %lld, %s = %lld\n", __FILE__, __LINE__, #a, left_, #b, right_);     \
        }                                                                                                    \
    } while (0)
#define CHECK_NEAR(a, b, tolerance)                                                                          \
    do {                                                                                                     \
        double left_ = (double)(a), right_ = (double)(b);                                                    \
        test_checks_++;                                                                                      \
        if (!(fabs(left_ - right_) <= (tolerance))) {                                                        \
            test_failures_++;                                                                                \
            fprintf(stderr, "%s:%d: %s = %.9g, %s = %.9g\n", __FILE__, __LINE__, #a, left_, #b, right_);     \
        }                                                                                                    \
    } while (0)
/* The call must succeed; its message is shown when it does not. */
#define CHECK_OK(call, err)                                                                                  \
    do {                                                                                                     \
        test_checks_++;                                                                                      \
        if ((call) != FT_OK) {                                                                               \
            test_failures_++;                                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, (err)->message);                   \
        }                                                                                                    \
    } while (0)
/* The call must fail with this code, and its message must contain the text. */
#define CHECK_FAILS(call, status, text, err)                                                                 \
    do {                                                                                                     \
        int code_ = (call);                                                                                  \
        test_checks_++;                                                                                      \
        if (code_ != (status) || !strstr((err)->message, (text))) {                                          \
            test_failures_++;                                                                                \
            fprintf(stderr, "%s:%d: %s gave %s \"%s\", wanted %s with \"%s\"\n", __FILE__, __LINE__, #call,  \
                    ft_status_name(code_), code_ == FT_OK ? "" : (err)->message, ft_status_name(status),     \
                    (text));                                                                                 \
        }                                                                                                    \
    } while (0)

#endif
