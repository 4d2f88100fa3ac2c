/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/test.h"
#include "tools/text_out.h"

struct seen {
    char text[512]; /* what came, pieces separated by | */
    bool closed;
};

static bool see(void *context, const char *text, size_t bytes)
{
    struct seen *seen = context;
    if (seen->closed)
        return false;
    strncat(seen->text, text, bytes);
    strcat(seen->text, "|");
    return true;
}

static void begin(struct ft_text_out *out, struct seen *seen, const char *const *stops, uint32_t count)
{
    struct ft_error err;
    memset(seen, 0, sizeof *seen);
    CHECK_OK(ft_text_out_begin(out, stops, count, see, seen, &err), &err);
}

static bool push(struct ft_text_out *out, const char *text)
{
    return ft_text_out_push(out, text, strlen(text));
}

TEST(text_without_stops_goes_out_at_once)
{
    struct ft_text_out out;
    struct seen seen;
    begin(&out, &seen, NULL, 0);
    CHECK(push(&out, "one ") && push(&out, "two"));
    CHECK(!strcmp(seen.text, "one |two|"));
    ft_text_out_flush(&out);
    CHECK(!strcmp(seen.text, "one |two|"));
}

TEST(beginning_of_a_stop_string_is_held_back)
{
    const char *const stops[] = {"world"};
    struct ft_text_out out;
    struct seen seen;
    begin(&out, &seen, stops, 1);
    CHECK(push(&out, "Hello wor"));
    CHECK(!strcmp(seen.text, "Hello |"));
    CHECK(push(&out, "th"));
    CHECK(!strcmp(seen.text, "Hello |worth|"));
    CHECK(push(&out, " w"));
    ft_text_out_flush(&out);
    CHECK(!strcmp(seen.text, "Hello |worth| |w|"));
    CHECK(!out.stopped);
}

TEST(stop_string_over_three_tokens_ends_the_text)
{
    const char *const stops[] = {"</end>", "XYZ"};
    struct ft_text_out out;
    struct seen seen;
    begin(&out, &seen, stops, 2);
    CHECK(push(&out, "a<"));
    CHECK(push(&out, "/en"));
    CHECK(!push(&out, "d> more"));
    CHECK(out.stopped);
    CHECK(!push(&out, "and more"));
    ft_text_out_flush(&out);
    CHECK(!strcmp(seen.text, "a|"));
}

TEST(earliest_of_several_stop_strings_wins)
{
    const char *const stops[] = {"cd", "bc"};
    struct ft_text_out out;
    struct seen seen;
    begin(&out, &seen, stops, 2);
    CHECK(!push(&out, "abcd"));
    CHECK(!strcmp(seen.text, "a|"));
}

TEST(repeating_prefix_is_found)
{
    const char *const stops[] = {"aab"};
    struct ft_text_out out;
    struct seen seen;
    begin(&out, &seen, stops, 1);
    for (int i = 0; i < 5; i++)
        CHECK(push(&out, "a"));
    CHECK(!push(&out, "b"));
    CHECK(!strcmp(seen.text, "a|a|a|"));
}

TEST(characters_are_never_split)
{
    struct ft_text_out out;
    struct seen seen;
    begin(&out, &seen, NULL, 0);
    CHECK(push(&out, "x\xf0\x9f"));
    CHECK(!strcmp(seen.text, "x|"));
    CHECK(push(&out, "\x98"));
    CHECK(!strcmp(seen.text, "x|"));
    CHECK(push(&out, "\x80y"));
    CHECK(!strcmp(seen.text, "x|\xf0\x9f\x98\x80y|"));
    CHECK(push(&out, "\xc3"));
    ft_text_out_flush(&out); /* it will not be completed: nothing is lost */
    CHECK(!strcmp(seen.text, "x|\xf0\x9f\x98\x80y|\xc3|"));
}

TEST(stop_string_of_wide_characters_is_found_across_a_split)
{
    const char *const stops[] = {"\xe2\x82\xac\xe2\x82\xac"};
    struct ft_text_out out;
    struct seen seen;
    begin(&out, &seen, stops, 1);
    CHECK(push(&out, "a\xe2\x82"));
    CHECK(push(&out, "\xac\xe2"));
    CHECK(!strcmp(seen.text, "a|"));
    CHECK(!push(&out, "\x82\xac!"));
    CHECK(!strcmp(seen.text, "a|"));
}

TEST(long_text_in_one_push_passes_whole)
{
    const char *const stops[] = {"zz"};
    struct ft_text_out out;
    struct ft_text text = {0};
    struct ft_error err;
    char long_text[5000];
    memset(long_text, 'q', sizeof long_text);
    CHECK_OK(ft_text_out_begin(&out, stops, 1, ft_text_append, &text, &err), &err);
    CHECK(ft_text_out_push(&out, long_text, sizeof long_text));
    CHECK(!ft_text_out_push(&out, "zz", 2));
    CHECK_EQ(text.count, sizeof long_text);
    ft_text_fini(&text);
}

TEST(closed_reader_ends_the_text)
{
    struct ft_text_out out;
    struct seen seen;
    begin(&out, &seen, NULL, 0);
    seen.closed = true;
    CHECK(!push(&out, "abc"));
    CHECK(out.failed && !out.stopped);
}

TEST(impossible_stop_strings_are_refused)
{
    char long_stop[FT_TEXT_STOP_BYTES_MAX + 2];
    const char *stops[] = {""};
    struct ft_text_out out;
    struct seen seen;
    struct ft_error err;
    CHECK_FAILS(ft_text_out_begin(&out, stops, 1, see, &seen, &err), FT_USAGE, "--stop", &err);
    memset(long_stop, 'a', sizeof long_stop - 1);
    long_stop[sizeof long_stop - 1] = '\0';
    stops[0] = long_stop;
    CHECK_FAILS(ft_text_out_begin(&out, stops, 1, see, &seen, &err), FT_USAGE, "at most 256", &err);
}

TEST_MAIN(RUN(text_without_stops_goes_out_at_once) RUN(beginning_of_a_stop_string_is_held_back)
              RUN(stop_string_over_three_tokens_ends_the_text) RUN(earliest_of_several_stop_strings_wins)
                  RUN(repeating_prefix_is_found) RUN(characters_are_never_split)
                      RUN(stop_string_of_wide_characters_is_found_across_a_split)
                          RUN(long_text_in_one_push_passes_whole) RUN(closed_reader_ends_the_text)
                              RUN(impossible_stop_strings_are_refused))
