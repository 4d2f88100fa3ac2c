/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/test.h"
#include "tools/options.h"

struct sample {
    bool flag, pin, count_given;
    uint32_t count, mode;
    uint64_t seed, bytes;
    double share;
    float heat;
    const char *path;
    struct ft_option_list list;
    struct ft_option_numbers gpus, limits;
};

#define FIELD(name) offsetof(struct sample, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"flag", NULL, "a flag", NULL, FT_OPTION_FLAG, FIELD(flag), 0, 0},
    {"no-pin", NULL, "clears", NULL, FT_OPTION_CLEAR, FIELD(pin), 0, 0},
    {"max-tokens", "N", "a count", NULL, FT_OPTION_U32, offsetof(struct sample, count),
     offsetof(struct sample, count_given), 1, 1000},
    {"seed", "N", "a seed", "random", FT_OPTION_U64, FIELD(seed), 0, 0},
    {"vram", "BYTES", "a size", NULL, FT_OPTION_BYTES, FIELD(bytes), 0, 0},
    {"gpus", "N,..", "numbers", NULL, FT_OPTION_U32_LIST, FIELD(gpus), 0, 1023},
    {"limits", "BYTES,..", "sizes", NULL, FT_OPTION_BYTES_LIST, FIELD(limits), 0, 0},
    {"share", "X", "a share", NULL, FT_OPTION_F64, FIELD(share), 0, 1},
    {"temperature", "X", "heat", NULL, FT_OPTION_F32, FIELD(heat), 0, 0},
    {"model", "DIR", "a path", NULL, FT_OPTION_STRING, FIELD(path), 0, 0},
    {"stop", "TEXT", "many", NULL, FT_OPTION_LIST, FIELD(list), 0, 0},
    {"strategy", "auto|cpu|hybrid", "one of", NULL, FT_OPTION_CHOICE, FIELD(mode), 0, 0},
};

static int parse(struct sample *sample, struct ft_option_rest *rest, struct ft_error *err, int argc,
                 char **argv)
{
    struct ft_option_group group = {"Options", table, FT_COUNT_OF(table), sample};
    struct ft_option_set set = {"ft test", "[options] [TEXT]", "About.", &group, 1, 1};
    memset(sample, 0, sizeof *sample);
    sample->pin = true;
    sample->count = 7;
    return ft_options_parse(&set, argc, argv, rest, err);
}
#define PARSE(...)                                                                                           \
    parse(&sample, &rest, &err, (int)(sizeof((char *[]){__VA_ARGS__}) / sizeof(char *)),                     \
          (char *[]){__VA_ARGS__})

TEST(every_kind_is_parsed)
{
    struct sample sample;
    struct ft_option_rest rest;
    struct ft_error err;
    CHECK_OK(PARSE("--flag", "--no-pin", "--max-tokens", "12", "--seed=18446744073709551615", "--vram",
                   "1.5G", "--share", "0.25", "--temperature=-1", "--model", "a=b", "--stop", "x", "--stop",
                   "", "--strategy", "hybrid", "words"),
             &err);
    CHECK(sample.flag && !sample.pin && sample.count_given);
    CHECK_EQ(sample.count, 12);
    CHECK(sample.seed == UINT64_MAX);
    CHECK_EQ(sample.bytes, 3ull << 29);
    CHECK_NEAR(sample.share, 0.25, 0);
    CHECK_NEAR(sample.heat, -1, 0);
    CHECK(!strcmp(sample.path, "a=b"));
    CHECK_EQ(sample.list.count, 2);
    CHECK_EQ(sample.mode, 2);
    CHECK_EQ(rest.count, 1);
    CHECK(!strcmp(rest.items[0], "words"));
}

TEST(defaults_stay_when_nothing_is_given)
{
    struct sample sample;
    struct ft_option_rest rest;
    struct ft_error err;
    CHECK_OK(PARSE("-"), &err);
    CHECK_EQ(sample.count, 7);
    CHECK(sample.pin && !sample.count_given);
    CHECK_EQ(rest.count, 1); /* a lone dash is an argument */
}

TEST(two_dashes_end_the_options)
{
    struct sample sample;
    struct ft_option_rest rest;
    struct ft_error err;
    CHECK_OK(PARSE("--", "--flag"), &err);
    CHECK(!sample.flag);
    CHECK_EQ(rest.count, 1);
}

TEST(unknown_options_name_the_closest)
{
    struct sample sample;
    struct ft_option_rest rest;
    struct ft_error err;
    CHECK_FAILS(PARSE("--max-token", "1"), FT_USAGE, "did you mean --max-tokens?", &err);
    CHECK_FAILS(PARSE("--temp=1"), FT_USAGE, "did you mean --temperature?", &err);
    CHECK_FAILS(PARSE("--quite-another-thing"), FT_USAGE, "ft test --help", &err);
    CHECK_FAILS(PARSE("-x"), FT_USAGE, "unknown option -x", &err);
}

TEST(bad_values_are_refused_by_name)
{
    struct sample sample;
    struct ft_option_rest rest;
    struct ft_error err;
    CHECK_FAILS(PARSE("--max-tokens", "ten"), FT_USAGE, "--max-tokens: \"ten\"", &err);
    CHECK_FAILS(PARSE("--max-tokens", "-1"), FT_USAGE, "whole number", &err);
    CHECK_FAILS(PARSE("--max-tokens", "0"), FT_USAGE, "outside 1 .. 1000", &err);
    CHECK_FAILS(PARSE("--max-tokens", "99999999999"), FT_USAGE, "too large", &err);
    CHECK_FAILS(PARSE("--seed", "18446744073709551616"), FT_USAGE, "too large", &err);
    CHECK_FAILS(PARSE("--vram", "8Q"), FT_USAGE, "a size such as", &err);
    CHECK_FAILS(PARSE("--share", "nan"), FT_USAGE, "not a number", &err);
    CHECK_FAILS(PARSE("--share", "1.5"), FT_USAGE, "outside 0 .. 1", &err);
    CHECK_FAILS(PARSE("--strategy", "fast"), FT_USAGE, "none of auto|cpu|hybrid", &err);
    CHECK_FAILS(PARSE("--flag=yes"), FT_USAGE, "takes no value", &err);
    CHECK_FAILS(PARSE("--model"), FT_USAGE, "needs a value (DIR)", &err);
    CHECK_FAILS(PARSE("--model", "--flag"), FT_USAGE, "needs a value", &err);
    CHECK_FAILS(PARSE("a", "b"), FT_USAGE, "unexpected argument \"b\"", &err);
}

TEST(sizes_have_units)
{
    uint64_t bytes = 0;
    CHECK(ft_options_parse_bytes("0", &bytes) && bytes == 0);
    CHECK(ft_options_parse_bytes("8G", &bytes) && bytes == 8ull << 30);
    CHECK(ft_options_parse_bytes("512MiB", &bytes) && bytes == 512ull << 20);
    CHECK(ft_options_parse_bytes("64k", &bytes) && bytes == 65536);
    CHECK(ft_options_parse_bytes("10B", &bytes) && bytes == 10);
    CHECK(!ft_options_parse_bytes("", &bytes));
    CHECK(!ft_options_parse_bytes("-1G", &bytes));
    CHECK(!ft_options_parse_bytes("1e9", &bytes));
    CHECK(!ft_options_parse_bytes("99999999T", &bytes));
    CHECK(!ft_options_parse_bytes("1GG", &bytes));
}

TEST(help_prints_defaults)
{
    struct sample sample = {.count = 7, .bytes = 1u << 20, .pin = true};
    struct ft_option_group group = {"Options", table, FT_COUNT_OF(table), &sample};
    struct ft_option_set set = {"ft test", "[options]", "About.", &group, 1, 0};
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    ft_options_print_help(&set, out);
    fclose(out);
    CHECK(strstr(text, "--max-tokens N") && strstr(text, "[default: 7]"));
    CHECK(strstr(text, "[default: random]") && strstr(text, "[default: 1.00 MiB]"));
    CHECK(strstr(text, "[default: auto]"));
    free(text);
}

TEST(help_wins_over_everything_after_it)
{
    struct sample sample;
    struct ft_option_rest rest;
    struct ft_error err;
    CHECK_OK(PARSE("--help", "--nonsense"), &err);
    CHECK(rest.help);
}

TEST(lists_of_numbers_and_sizes_are_parsed)
{
    static struct sample sample;
    struct ft_option_rest rest;
    struct ft_error err;
    CHECK_OK(PARSE("--gpus", "3,0,12", "--limits=12G,1.5M"), &err);
    CHECK_EQ(sample.gpus.count, 3);
    CHECK(sample.gpus.items[0] == 3 && sample.gpus.items[1] == 0 && sample.gpus.items[2] == 12);
    CHECK_EQ(sample.limits.count, 2);
    CHECK(sample.limits.items[0] == 12ull << 30 && sample.limits.items[1] == 3ull << 19);
    CHECK_OK(PARSE("--gpus", "1", "--gpus", "2"), &err); /* the last one counts */
    CHECK(sample.gpus.count == 1 && sample.gpus.items[0] == 2);
    CHECK_FAILS(PARSE("--gpus", "0,,1"), FT_USAGE, "0 or 0,1", &err);
    CHECK_FAILS(PARSE("--gpus", "0,"), FT_USAGE, "0 or 0,1", &err);
    CHECK_FAILS(PARSE("--gpus", ""), FT_USAGE, "0 or 0,1", &err);
    CHECK_FAILS(PARSE("--gpus", "0,x"), FT_USAGE, "0 or 0,1", &err);
    CHECK_FAILS(PARSE("--gpus", "0,2000"), FT_USAGE, "--gpus", &err);
    CHECK_FAILS(PARSE("--limits", "12G,8Q"), FT_USAGE, "12G,24G", &err);
}

TEST_MAIN(RUN(lists_of_numbers_and_sizes_are_parsed) RUN(every_kind_is_parsed)
              RUN(defaults_stay_when_nothing_is_given) RUN(two_dashes_end_the_options)
                  RUN(unknown_options_name_the_closest) RUN(bad_values_are_refused_by_name)
                      RUN(sizes_have_units) RUN(help_prints_defaults) RUN(help_wins_over_everything_after_it))
