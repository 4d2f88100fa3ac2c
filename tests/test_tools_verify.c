/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/test.h"

#include "tools/json_out.h"
#include "tools/verify.h"

TEST(error_is_relative_to_the_largest_reference)
{
    const float reference[] = {1, -4, 2}, values[] = {1, -4, 2.2f};
    CHECK_NEAR(ft_verify_error(reference, reference, 3), 0, 0);
    CHECK_NEAR(ft_verify_error(values, reference, 3), 0.05, 1e-6);
    CHECK_NEAR(ft_verify_error(values, reference, 0), 0, 0);
}

TEST(what_is_not_a_number_is_infinitely_far)
{
    const float good[] = {1, 2}, nan_value[] = {1, NAN}, infinite[] = {1, INFINITY}, zero[] = {0, 0};
    CHECK(isinf(ft_verify_error(nan_value, good, 2)));
    CHECK(isinf(ft_verify_error(good, nan_value, 2)));
    CHECK(isinf(ft_verify_error(infinite, good, 2)));
    CHECK(isinf(ft_verify_error(infinite, infinite, 2)));
    CHECK(isinf(ft_verify_error(good, zero, 2)));
    CHECK_NEAR(ft_verify_error(zero, zero, 2), 0, 0);
}

TEST(rows_that_differ_are_counted_once)
{
    const int32_t a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 2, 4, 3, 5, 6};
    CHECK_EQ(ft_verify_count_rows(a, a, 3, 2), 0);
    CHECK_EQ(ft_verify_count_rows(a, b, 3, 2), 1);
}

TEST(json_is_valid_whatever_the_text)
{
    char *text = NULL;
    size_t bytes = 0;
    const uint32_t ids[] = {1, 2};
    FILE *out = open_memstream(&text, &bytes);
    struct ft_json json;
    ft_json_begin(&json, out);
    ft_json_open(&json, '{', NULL);
    ft_json_text(&json, "a\"b", "x\\y\n\x01\x7f\xff\xc3(\xed\xa0\x80\xe2\x82\xac");
    ft_json_ids(&json, "ids", ids, 2);
    ft_json_f64(&json, "nan", NAN);
    ft_json_open(&json, '[', "empty");
    ft_json_close(&json, ']');
    ft_json_bool(&json, "yes", true);
    ft_json_null(&json, "none");
    ft_json_i64(&json, "minus", -1);
    ft_json_close(&json, '}');
    ft_json_end(&json);
    fclose(out);
    const char *wanted =
        "{\n  \"a\\\"b\": \"x\\\\y\\n\\u0001\\u007f\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd\xef\xbf\xbd"
        "\xef\xbf\xbd\xe2\x82\xac\",\n  \"ids\": [1, 2],\n  \"nan\": null,\n  \"empty\": [],\n"
        "  \"yes\": true,\n  \"none\": null,\n  \"minus\": -1\n}\n";
    CHECK(!strcmp(text, wanted));
    free(text);
}

TEST_MAIN(RUN(error_is_relative_to_the_largest_reference) RUN(what_is_not_a_number_is_infinitely_far)
              RUN(rows_that_differ_are_counted_once) RUN(json_is_valid_whatever_the_text))
