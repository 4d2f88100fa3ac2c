/* SPDX-License-Identifier: Apache-2.0 */
#include "io/tokenizer.h"
#include "io/utf8.h"
#include "tests/test.h"

#include <jansson.h>
#include <pthread.h>
#include <time.h>

#define TOKENIZERS FT_DATA_DIR "/fixtures/tokenizers/"
static const char *const fixtures[] = {"qwen2", "qwen3_5", "llama3", "o200k", "gpt2", "added-tokens"};
#define FIXTURE_COUNT (sizeof fixtures / sizeof *fixtures)

static struct ft_tokenizer *open_fixture(const char *name)
{
    struct ft_error err = {0};
    struct ft_tokenizer *tokenizer = NULL;
    char path[512];
    snprintf(path, sizeof path, TOKENIZERS "%s/tokenizer.json", name);
    CHECK_OK(ft_tokenizer_open(&tokenizer, path, &err), &err);
    return tokenizer;
}

static bool equal_ids(const uint32_t *ids, uint32_t count, const json_t *wanted)
{
    if (json_array_size(wanted) != count)
        return false;
    for (uint32_t i = 0; i < count; i++)
        if (json_integer_value(json_array_get(wanted, i)) != (json_int_t)ids[i])
            return false;
    return true;
}

static void show_ids(const char *what, const uint32_t *ids, uint32_t count)
{
    fprintf(stderr, "  %s:", what);
    for (uint32_t i = 0; i < count; i++)
        fprintf(stderr, " %u", ids[i]);
    fprintf(stderr, "\n");
}

static void check_encode(const struct ft_tokenizer *tokenizer, const json_t *text, bool special,
                         const json_t *wanted)
{
    struct ft_error err = {0};
    uint32_t *ids, count;
    CHECK_OK(ft_tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text), special, &ids,
                                 &count, &err),
             &err);
    bool equal = equal_ids(ids, count, wanted);
    CHECK(equal);
    if (!equal) {
        fprintf(stderr, "  text (special tokens %d): %.200s\n", special, json_string_value(text));
        show_ids("got", ids, count);
    }
    free(ids);
}

/* Decodes at once and as a stream; both must give the text. */
static void check_decode(const struct ft_tokenizer *tokenizer, const uint32_t *ids, uint32_t count, bool skip,
                         const char *wanted, size_t wanted_bytes)
{
    struct ft_error err = {0};
    struct ft_tokenizer_stream stream;
    const char *part;
    char *text = NULL, *joined = malloc(wanted_bytes + 64);
    size_t bytes = 0, part_bytes, joined_bytes = 0;
    CHECK_OK(ft_tokenizer_decode(tokenizer, ids, count, skip, &text, &bytes, &err), &err);
    CHECK(bytes == wanted_bytes && memcmp(text, wanted, bytes) == 0);
    if (bytes != wanted_bytes || memcmp(text, wanted, bytes) != 0)
        fprintf(stderr, "  got %s\n  wanted %s\n", text, wanted);
    free(text);
    CHECK_OK(ft_tokenizer_stream_begin(&stream, tokenizer, skip, &err), &err);
    for (uint32_t i = 0; i <= count; i++) {
        if (i < count)
            CHECK_OK(ft_tokenizer_stream_push(&stream, ids[i], &part, &part_bytes, &err), &err);
        else
            ft_tokenizer_stream_flush(&stream, &part, &part_bytes);
        CHECK_EQ(ft_utf8_valid_bytes(part, part_bytes), part_bytes);
        if (joined_bytes + part_bytes <= wanted_bytes)
            memcpy(joined + joined_bytes, part, part_bytes);
        joined_bytes += part_bytes;
    }
    CHECK(joined_bytes == wanted_bytes && memcmp(joined, wanted, wanted_bytes) == 0);
    ft_tokenizer_stream_end(&stream);
    free(joined);
}

static uint32_t *read_ids(const json_t *list, uint32_t *count)
{
    *count = (uint32_t)json_array_size(list);
    uint32_t *ids = malloc((*count + 1) * sizeof *ids);
    for (uint32_t i = 0; i < *count; i++)
        ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    return ids;
}

TEST(every_reference_vector_is_equal)
{
    for (size_t f = 0; f < FIXTURE_COUNT; f++) {
        char path[512];
        snprintf(path, sizeof path, TOKENIZERS "%s/vectors.json", fixtures[f]);
        json_t *vectors = json_load_file(path, JSON_ALLOW_NUL, NULL);
        struct ft_tokenizer *tokenizer = open_fixture(fixtures[f]);
        REQUIRE(tokenizer && json_is_array(vectors));
        CHECK_EQ(json_array_size(vectors), 116);
        int before = test_failures_;
        for (size_t i = 0; i < json_array_size(vectors); i++) {
            const json_t *v = json_array_get(vectors, i), *text = json_object_get(v, "text");
            const json_t *decoded = json_object_get(v, "decoded"), *skip = json_object_get(v, "decoded_skip");
            uint32_t count, *ids = read_ids(json_object_get(v, "ids"), &count);
            check_encode(tokenizer, text, true, json_object_get(v, "ids"));
            check_encode(tokenizer, text, false, json_object_get(v, "ids_special_as_text"));
            check_decode(tokenizer, ids, count, false, json_string_value(decoded),
                         json_string_length(decoded));
            check_decode(tokenizer, ids, count, true, json_string_value(skip), json_string_length(skip));
            free(ids);
        }
        if (test_failures_ != before)
            fprintf(stderr, "  in %s\n", fixtures[f]);
        ft_tokenizer_close(tokenizer);
        json_decref(vectors);
    }
}

TEST(prompts_and_answers_of_the_small_model_are_equal)
{
    struct ft_error err = {0};
    struct ft_tokenizer *tokenizer;
    json_t *reference = json_load_file(FT_DATA_DIR "/ft-tiny/reference.json", 0, NULL);
    CHECK_OK(ft_tokenizer_open(&tokenizer, FT_DATA_DIR "/ft-tiny/tokenizer.json", &err), &err);
    REQUIRE(tokenizer && reference);
    const json_t *prompts = json_object_get(reference, "prompts");
    CHECK(json_array_size(prompts) > 3);
    for (size_t i = 0; i < json_array_size(prompts); i++) {
        const json_t *p = json_array_get(prompts, i), *text = json_object_get(p, "greedy_text");
        uint32_t count, *ids = read_ids(json_object_get(p, "greedy_ids"), &count);
        check_encode(tokenizer, json_object_get(p, "prompt"), true, json_object_get(p, "prompt_ids"));
        check_decode(tokenizer, ids, count, true, json_string_value(text), json_string_length(text));
        free(ids);
    }
    CHECK_EQ(ft_tokenizer_vocab_count(tokenizer), 4096);
    CHECK_EQ(ft_tokenizer_find_token(tokenizer, "<|im_end|>"), 2);
    CHECK_EQ(ft_tokenizer_find_token(tokenizer, "<|im_end"), FT_NONE);
    CHECK_EQ(ft_tokenizer_find_token(tokenizer, ""), FT_NONE);
    CHECK(ft_tokenizer_is_special(tokenizer, 2));
    CHECK(!ft_tokenizer_is_special(tokenizer, 3) && !ft_tokenizer_is_special(tokenizer, FT_NONE));
    CHECK_EQ(ft_tokenizer_find_bos(tokenizer), FT_NONE);
    ft_tokenizer_close(tokenizer);
    json_decref(reference);
}

static uint64_t random_state = 88172645463325252u;
static uint32_t random_below(uint32_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 33) % n;
}

static void check_bytes_survive(const struct ft_tokenizer *tokenizer, const char *text, size_t bytes)
{
    struct ft_error err = {0};
    uint32_t *ids, count, token_bytes;
    size_t at = 0;
    bool same = true;
    CHECK_OK(ft_tokenizer_encode(tokenizer, text, bytes, true, &ids, &count, &err), &err);
    for (uint32_t i = 0; i < count && same; i++) {
        const char *token = ft_tokenizer_get_token_bytes(tokenizer, ids[i], &token_bytes);
        same = at + token_bytes <= bytes && memcmp(token, text + at, token_bytes) == 0;
        at += token_bytes;
    }
    CHECK(same && at == bytes);
    free(ids);
}

TEST(any_bytes_survive_encoding)
{
    struct ft_tokenizer *gpt2 = open_fixture("gpt2"), *qwen2 = open_fixture("qwen2");
    REQUIRE(gpt2 && qwen2);
    check_bytes_survive(gpt2,
                        "a\xff\xfe"
                        "b \xc3",
                        6);
    check_bytes_survive(gpt2, "\xed\xa0\x80\xf4\x90\x80\x80\xc0\x80<|im_end|>\xe2\x82", 21);
    check_bytes_survive(gpt2, "\0\0a\0", 4);
    for (int round = 0; round < 2000; round++) {
        char text[64];
        size_t bytes = random_below(sizeof text);
        for (size_t i = 0; i < bytes; i++)
            text[i] = (char)(random_below(3) ? random_below(256) : random_below(128));
        check_bytes_survive(gpt2, text, bytes);
        /* with NFC: below U+0300 nothing changes */
        for (size_t i = 0; i < bytes; i++)
            text[i] = (char)((uint8_t)text[i] >= 0xcc ? 0xff : text[i]);
        check_bytes_survive(qwen2, text, bytes);
    }
    ft_tokenizer_close(gpt2);
    ft_tokenizer_close(qwen2);
}

TEST(stream_never_cuts_a_character_and_replaces_what_is_ill_formed)
{
    struct ft_error err = {0};
    struct ft_tokenizer *tokenizer = open_fixture("gpt2");
    REQUIRE(tokenizer);
    /* One id per byte, from the alphabet: any sequence of bytes can come from a model. */
    uint32_t byte_ids[256], token_bytes;
    for (uint32_t id = 0; id < ft_tokenizer_vocab_count(tokenizer); id++) {
        const char *token = ft_tokenizer_get_token_bytes(tokenizer, id, &token_bytes);
        if (token_bytes == 1)
            byte_ids[(uint8_t)token[0]] = id;
    }
    static const struct {
        const char *raw, *text;
    } cases[] = {{"\xf0\x9f\x99\x82", "\xf0\x9f\x99\x82"},
                 {"\xf0\x9f\x99", "\xef\xbf\xbd"},
                 {"\xf0\x9fx", "\xef\xbf\xbdx"},
                 {"\xe2\x82\xe2\x82\xac", "\xef\xbf\xbd\xe2\x82\xac"},
                 {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd"},
                 {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
                 {"\x80z\xff", "\xef\xbf\xbdz\xef\xbf\xbd"}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        uint32_t ids[16], count = (uint32_t)strlen(cases[c].raw);
        for (uint32_t i = 0; i < count; i++)
            ids[i] = byte_ids[(uint8_t)cases[c].raw[i]];
        check_decode(tokenizer, ids, count, false, cases[c].text, strlen(cases[c].text));
    }
    for (int round = 0; round < 500; round++) { /* at once = in parts, for random ids */
        uint32_t ids[40], count = random_below(40);
        char *text;
        size_t bytes;
        for (uint32_t i = 0; i < count; i++)
            ids[i] = random_below(2) ? byte_ids[random_below(256)] : random_below(1500);
        CHECK_OK(ft_tokenizer_decode(tokenizer, ids, count, false, &text, &bytes, &err), &err);
        check_decode(tokenizer, ids, count, false, text, bytes);
        free(text);
    }
    ft_tokenizer_close(tokenizer);
}

TEST(ids_outside_the_vocabulary_are_named)
{
    struct ft_error err = {0};
    struct ft_tokenizer *tokenizer = open_fixture("gpt2");
    struct ft_tokenizer_stream stream;
    const char *part;
    char *text;
    size_t bytes;
    uint32_t ids[] = {5, 1502};
    REQUIRE(tokenizer);
    CHECK_FAILS(ft_tokenizer_decode(tokenizer, ids, 2, false, &text, &bytes, &err), FT_LIMIT,
                "token id 1502 is outside the tokenizer's vocabulary of 1502", &err);
    CHECK(text == NULL);
    CHECK_OK(ft_tokenizer_stream_begin(&stream, tokenizer, false, &err), &err);
    CHECK_FAILS(ft_tokenizer_stream_push(&stream, FT_NONE, &part, &bytes, &err), FT_LIMIT, "4294967295",
                &err);
    ft_tokenizer_stream_end(&stream);
    ft_tokenizer_close(tokenizer);
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Quadratic behaviour would take minutes; the bound leaves room for sanitizers on a busy machine. */
TEST(long_texts_of_every_kind_finish_quickly)
{
    static const char *const units[] = {"a",
                                        " ",
                                        "\n",
                                        " \n",
                                        "ab",
                                        "1",
                                        "A",
                                        "!",
                                        "<",
                                        "<|im_start|>",
                                        "\xff",
                                        "\xcc\x81\xcc\x96",
                                        "\xe4\xb8\x80",
                                        " x",
                                        "'",
                                        "\xcc\x81",
                                        "\t",
                                        "aA"};
    const size_t bytes = (size_t)1 << 20;
    char *text = malloc(bytes);
    for (size_t f = 0; f < FIXTURE_COUNT; f++) {
        struct ft_tokenizer *tokenizer = open_fixture(fixtures[f]);
        REQUIRE(tokenizer && text);
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            struct ft_error err = {0};
            uint32_t *ids, count;
            size_t unit_bytes = strlen(units[u]);
            for (size_t i = 0; i < bytes; i++)
                text[i] = units[u][i % unit_bytes];
            text[bytes - 1] = 'x';
            double start = now_s();
            CHECK_OK(ft_tokenizer_encode(tokenizer, text, bytes, true, &ids, &count, &err), &err);
            CHECK(now_s() - start < 20);
            if (getenv("FT_TEST_TIMES"))
                fprintf(stderr, "%s \"%s\": %.3f s\n", fixtures[f], units[u], now_s() - start);
            free(ids);
        }
        ft_tokenizer_close(tokenizer);
    }
    free(text);
}

static void *encode_often(void *argument)
{
    const struct ft_tokenizer *tokenizer = argument;
    static const char text[] = "<|im_start|>user\nDon't hurry 123 h\xc3\xa9llo<|im_end|>\n";
    struct ft_error err = {0};
    uint32_t *first = NULL, first_count = 0;
    for (int i = 0; i < 200; i++) {
        uint32_t *ids, count;
        if (ft_tokenizer_encode(tokenizer, text, sizeof text - 1, true, &ids, &count, &err) != FT_OK)
            break;
        if (first && (count != first_count || memcmp(ids, first, count * sizeof *ids) != 0))
            first_count = 0;
        if (!first) {
            first = ids;
            first_count = count;
        } else
            free(ids);
    }
    free(first);
    return (void *)(uintptr_t)first_count;
}

TEST(many_threads_encode_with_one_tokenizer)
{
    struct ft_tokenizer *tokenizer = open_fixture("qwen3_5");
    pthread_t threads[4];
    void *counts[4];
    REQUIRE(tokenizer);
    for (size_t i = 0; i < 4; i++)
        REQUIRE(pthread_create(&threads[i], NULL, encode_often, tokenizer) == 0);
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], &counts[i]);
    for (size_t i = 0; i < 4; i++)
        CHECK(counts[i] != NULL && counts[i] == counts[0]);
    ft_tokenizer_close(tokenizer);
}

/*
 * A tiny tokenizer by hand. Vocabulary: the bytes a-d, space (\u0120), an apostrophe, and merges as given;
 * keys that a case sets replace these.
 */
#define PIECES "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}"
#define VOCAB                                                                                                \
    "\"vocab\": {\"a\": 0, \"b\": 1, \"c\": 2, \"d\": 3, \"\\u0120\": 4, \"ab\": 5, \"bc\": 6, \"abc\": 7}"
#define MODEL "\"model\": {\"type\": \"BPE\", " VOCAB ", \"merges\": [\"b c\", [\"a\", \"b\"], \"a bc\"]}"

static struct ft_tokenizer *parse(const char *json)
{
    struct ft_error err = {0};
    struct ft_tokenizer *tokenizer = NULL;
    CHECK_OK(ft_tokenizer_parse(&tokenizer, json, strlen(json), "tiny", &err), &err);
    return tokenizer;
}

/* Checks the ids of a text, given as text: "5 2". */
static void check_tiny(const struct ft_tokenizer *tokenizer, const char *text, bool special,
                       const char *wanted)
{
    struct ft_error err = {0};
    uint32_t *ids = NULL, count = 0;
    char got[256] = "";
    size_t at = 0;
    CHECK_OK(ft_tokenizer_encode(tokenizer, text, strlen(text), special, &ids, &count, &err), &err);
    for (uint32_t i = 0; i < count && at < sizeof got; i++)
        at += (size_t)snprintf(got + at, sizeof got - at, i ? " %u" : "%u", ids[i]);
    CHECK(strcmp(got, wanted) == 0);
    if (strcmp(got, wanted) != 0)
        fprintf(stderr, "  \"%s\" gave %s, wanted %s\n", text, got, wanted);
    free(ids);
}

TEST(merges_go_by_rank_and_then_from_the_left)
{
    struct ft_tokenizer *tokenizer = parse("{" PIECES "," MODEL "}");
    REQUIRE(tokenizer);
    check_tiny(tokenizer, "abc", true, "7"); /* b c, then a bc */
    check_tiny(tokenizer, "ab", true, "5");
    check_tiny(tokenizer, "abab", true, "5 5");
    check_tiny(tokenizer, "abcd abc", true, "7 3 4 7");
    ft_tokenizer_close(tokenizer);
}

TEST(ignore_merges_takes_whole_pieces_first)
{
    struct ft_tokenizer *tokenizer =
        parse("{" PIECES ", \"model\": {\"ignore_merges\": true, " VOCAB ", \"merges\": [\"a b\"]}}");
    REQUIRE(tokenizer);
    check_tiny(tokenizer, "abc", true, "7");
    check_tiny(tokenizer, "abcd", true, "5 2 3");
    ft_tokenizer_close(tokenizer);
}

TEST(bytes_without_a_token_become_unk_or_are_named)
{
    struct ft_error err = {0};
    uint32_t *ids, count;
    struct ft_tokenizer *plain = parse("{" PIECES "," MODEL "}");
    struct ft_tokenizer *unk =
        parse("{" PIECES ", \"model\": {\"unk_token\": \"d\", " VOCAB ", \"merges\": [\"a b\"]}}");
    struct ft_tokenizer *fused =
        parse("{" PIECES ", \"model\": {\"unk_token\": \"d\", \"fuse_unk\": true, " VOCAB
              ", \"merges\": [\"a b\"]}}");
    REQUIRE(plain && unk && fused);
    CHECK_FAILS(ft_tokenizer_encode(plain, "abz", 3, true, &ids, &count, &err), FT_FORMAT, "byte 0x7a", &err);
    CHECK(ids == NULL && count == 0);
    check_tiny(unk, "abzza", true, "5 3 3 0");
    check_tiny(fused, "abzza", true, "5 3 0");
    ft_tokenizer_close(plain);
    ft_tokenizer_close(unk);
    ft_tokenizer_close(fused);
}

TEST(prefix_space_is_added_once_to_each_text)
{
    struct ft_tokenizer *tokenizer =
        parse("{\"pre_tokenizer\": {\"type\": \"ByteLevel\"}," MODEL
              ", \"added_tokens\": [{\"id\": 9, \"content\": \"<x>\", \"special\": true}]}");
    REQUIRE(tokenizer);
    check_tiny(tokenizer, "ab", true, "4 5");
    check_tiny(tokenizer, " ab", true, "4 5");
    check_tiny(tokenizer, "<x>ab", true, "9 4 5");
    check_tiny(tokenizer, "", true, "");
    ft_tokenizer_close(tokenizer);
}

TEST(added_tokens_follow_their_flags)
{
    struct ft_tokenizer *tokenizer =
        parse("{" PIECES "," MODEL ", \"added_tokens\": ["
              "{\"id\": 10, \"content\": \"ca\", \"special\": true},"
              "{\"id\": 11, \"content\": \"cab\", \"normalized\": false},"
              "{\"id\": 12, \"content\": \"dd\", \"single_word\": true},"
              "{\"id\": 13, \"content\": \"<l>\", \"lstrip\": true, \"special\": true},"
              "{\"id\": 14, \"content\": \"<r>\", \"rstrip\": true, \"special\": true},"
              "{\"id\": 15, \"content\": \"\", \"special\": true}]}");
    REQUIRE(tokenizer);
    check_tiny(tokenizer, "cac", true, "10 2");
    check_tiny(tokenizer, "cac", false, "2 0 2"); /* special tokens are text */
    check_tiny(tokenizer, "cab", true, "11");     /* the longest one */
    check_tiny(tokenizer, "cab", false, "11");    /* not special: found all the same */
    check_tiny(tokenizer, "dd a", true, "12 4 0");
    check_tiny(tokenizer, "ddd", true, "3 3 3");
    check_tiny(tokenizer, "a  <l> b", true, "0 13 4 1");
    check_tiny(tokenizer, "a <r>  <l> b", true, "0 4 14 13 4 1");
    CHECK_EQ(ft_tokenizer_vocab_count(tokenizer), 15);
    ft_tokenizer_close(tokenizer);
}

TEST(split_removes_isolates_and_inverts)
{
#define SPLIT(pattern, behavior, invert)                                                                     \
    "{\"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", "                \
    "\"pattern\": " pattern ", \"behavior\": \"" behavior "\", \"invert\": " invert                          \
    "}, {\"type\": \"ByteLevel\", \"add_prefix_space\": "                                                    \
    "false, \"use_regex\": false}]}," MODEL "}"
    static const struct {
        const char *json, *wanted;
    } cases[] = {{SPLIT("{\"String\": \"b\"}", "Isolated", "false"), "0 1 2 4 0 1 2"},
                 {SPLIT("{\"String\": \"b\"}", "Removed", "false"), "0 2 4 0 2"},
                 {SPLIT("{\"String\": \"b\"}", "Removed", "true"), "1 1"},
                 {SPLIT("{\"String\": \"\"}", "Removed", "false"), "0 1 2 4 0 1 2"},
                 {SPLIT("{\"Regex\": \"\\\\s\"}", "Removed", "false"), "7 7"},
                 {SPLIT("{\"Regex\": \"c*\"}", "Isolated", "false"), "0 1 2 4 0 1 2"}, /* empty matches cut */
                 {SPLIT("{\"Regex\": \"(?i)BC|\\\\W\"}", "Isolated", "false"), "0 6 4 0 6"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ft_tokenizer *tokenizer = parse(cases[i].json);
        REQUIRE(tokenizer);
        check_tiny(tokenizer, "abc abc", true, cases[i].wanted);
        ft_tokenizer_close(tokenizer);
    }
}

TEST(bos_of_the_template_is_told_and_not_added)
{
    struct ft_tokenizer *tokenizer = parse(
        "{" PIECES "," MODEL ", \"post_processor\": {\"type\": \"Sequence\", \"processors\": [{\"type\": "
        "\"ByteLevel\"}, {\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": "
        "\"abc\", "
        "\"type_id\": 0}}, {\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}]}]}}");
    REQUIRE(tokenizer);
    CHECK_EQ(ft_tokenizer_find_bos(tokenizer), 7);
    check_tiny(tokenizer, "a", true, "0");
    ft_tokenizer_close(tokenizer);
}

static void check_refused(const char *json, int status, const char *text)
{
    struct ft_error err = {0};
    struct ft_tokenizer *tokenizer = (struct ft_tokenizer *)1;
    CHECK_FAILS(ft_tokenizer_parse(&tokenizer, json, strlen(json), "tiny", &err), status, text, &err);
    CHECK(tokenizer == NULL && strncmp(err.message, "tiny: ", 6) == 0);
}

TEST(other_kinds_of_tokenizers_are_refused_by_name)
{
    check_refused("{" PIECES ", \"model\": {\"type\": \"WordPiece\"}}", FT_UNSUPPORTED, "WordPiece");
    check_refused("{" PIECES ", \"model\": {\"type\": \"Unigram\", \"vocab\": []}}", FT_UNSUPPORTED,
                  "Unigram");
    check_refused("{" PIECES ", \"model\": {" VOCAB ", \"merges\": [], \"byte_fallback\": true}}",
                  FT_UNSUPPORTED, "byte_fallback");
    check_refused("{" PIECES ", \"model\": {" VOCAB ", \"merges\": [], \"dropout\": 0.1}}", FT_UNSUPPORTED,
                  "dropout");
    check_refused("{" PIECES ", \"model\": {" VOCAB ", \"merges\": [], \"end_of_word_suffix\": \"</w>\"}}",
                  FT_UNSUPPORTED, "end_of_word_suffix");
    check_refused("{" PIECES "," MODEL ", \"normalizer\": {\"type\": \"Lowercase\"}}", FT_UNSUPPORTED,
                  "Lowercase");
    check_refused("{" PIECES "," MODEL ", \"decoder\": {\"type\": \"Metaspace\"}}", FT_UNSUPPORTED,
                  "Metaspace");
    check_refused("{" PIECES "," MODEL ", \"post_processor\": {\"type\": \"BertProcessing\"}}",
                  FT_UNSUPPORTED, "BertProcessing");
    check_refused("{" MODEL "}", FT_UNSUPPORTED, "ByteLevel");
    check_refused("{\"pre_tokenizer\": {\"type\": \"Whitespace\"}," MODEL "}", FT_UNSUPPORTED, "Whitespace");
    check_refused(
        "{\"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"ByteLevel\"}, "
        "{\"type\": \"ByteLevel\"}]}," MODEL "}",
        FT_UNSUPPORTED, "after ByteLevel");
}

TEST(regular_expressions_that_mean_something_else_are_refused)
{
    static const struct {
        const char *json, *text;
        int status;
    } cases[] = {{SPLIT("{\"Regex\": \"a{1,3}+\"}", "Isolated", "false"), "{}+", FT_UNSUPPORTED},
                 {SPLIT("{\"Regex\": \"[a&&b]\"}", "Isolated", "false"), "&&", FT_UNSUPPORTED},
                 {SPLIT("{\"Regex\": \"[a[b]]\"}", "Isolated", "false"), "inside a class", FT_UNSUPPORTED},
                 {SPLIT("{\"Regex\": \"\\\\h\"}", "Isolated", "false"), "\\h", FT_UNSUPPORTED},
                 {SPLIT("{\"Regex\": \"(a)\\\\1\"}", "Isolated", "false"), "\\1", FT_UNSUPPORTED},
                 {SPLIT("{\"Regex\": \"(*COMMIT)\"}", "Isolated", "false"), "verb", FT_UNSUPPORTED},
                 {SPLIT("{\"Regex\": \"(?R)\"}", "Isolated", "false"), "group", FT_UNSUPPORTED},
                 {SPLIT("{\"Regex\": \"a(?i)b\"}", "Isolated", "false"), "group", FT_UNSUPPORTED},
                 {SPLIT("{\"Regex\": \"a\\\\\"}", "Isolated", "false"), "backslash", FT_UNSUPPORTED},
                 {SPLIT("{\"Regex\": \"(a\"}", "Isolated", "false"), "cannot be compiled", FT_FORMAT},
                 {SPLIT("{\"Regex\": \"[a\"}", "Isolated", "false"), "cannot be compiled", FT_FORMAT},
                 {SPLIT("{\"Other\": \"a\"}", "Isolated", "false"), "Regex", FT_FORMAT},
                 {SPLIT("{\"String\": \"a\"}", "MergedWithNext", "false"), "MergedWithNext", FT_UNSUPPORTED}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_refused(cases[i].json, cases[i].status, cases[i].text);
}

TEST(hostile_files_get_a_clear_error)
{
    struct ft_error err = {0};
    struct ft_tokenizer *tokenizer;
    check_refused("", FT_FORMAT, "not JSON");
    check_refused("[]", FT_FORMAT, "the file is an array");
    check_refused("{}", FT_FORMAT, "model is nothing");
    check_refused("{\"model\": 3}", FT_FORMAT, "model is an integer");
    check_refused("{\"model\": {\"vocab\": [], \"merges\": []}}", FT_FORMAT, "model.vocab is an array");
    check_refused("{\"model\": {\"vocab\": {}}}", FT_FORMAT, "model.merges is nothing");
    check_refused("{" PIECES ", \"model\": {\"vocab\": {\"a\": -1}, \"merges\": []}}", FT_FORMAT, "\"a\"");
    check_refused("{" PIECES ", \"model\": {\"vocab\": {\"a\": 4294967295}, \"merges\": []}}", FT_LIMIT,
                  "2097151");
    check_refused("{" PIECES ", \"model\": {\"vocab\": {\"a\": 2097152}, \"merges\": []}}", FT_LIMIT,
                  "2097152");
    check_refused("{" PIECES ", \"model\": {\"vocab\": {\"a\": 0, \"b\": 0}, \"merges\": []}}", FT_FORMAT,
                  "two tokens");
    check_refused("{" PIECES ", \"model\": {" VOCAB ", \"merges\": [\"a b c\"]}}", FT_FORMAT, "merge 0");
    check_refused("{" PIECES ", \"model\": {" VOCAB ", \"merges\": [\"a b\", [\"a\"]]}}", FT_FORMAT,
                  "merge 1");
    check_refused("{" PIECES ", \"model\": {" VOCAB ", \"merges\": [\"a d\"]}}", FT_FORMAT,
                  "the merged token");
    check_refused("{" PIECES ", \"model\": {" VOCAB ", \"merges\": [\"a z\"]}}", FT_FORMAT, "a part");
    check_refused("{" PIECES "," MODEL ", \"added_tokens\": [7]}", FT_FORMAT, "added_tokens[0].content");
    check_refused("{" PIECES "," MODEL ", \"added_tokens\": [{\"id\": 0, \"content\": \"<x>\"}]}", FT_FORMAT,
                  "two tokens");
    check_refused("{" PIECES "," MODEL ", \"added_tokens\": [{\"content\": \"<x>\"}]}", FT_FORMAT, "<x>");
    check_refused("{" PIECES "," MODEL
                  ", \"added_tokens\": [{\"id\": 9, \"content\": \"x\", \"lstrip\": 1}]}",
                  FT_FORMAT, "added_tokens[0]: lstrip");
    CHECK_FAILS(ft_tokenizer_open(&tokenizer, "/nonexistent/tokenizer.json", &err), FT_IO, "/nonexistent",
                &err);
    CHECK_FAILS(ft_tokenizer_open(&tokenizer, "/", &err), FT_IO, "is a directory, wanted a regular file",
                &err);
    CHECK(tokenizer == NULL);
}

TEST(an_explosive_regular_expression_gives_up)
{
    struct ft_error err = {0};
    uint32_t *ids, count;
    char text[64];
    struct ft_tokenizer *tokenizer = parse(SPLIT("{\"Regex\": \"(a+)+(a+)+[bc]\"}", "Isolated", "false"));
    REQUIRE(tokenizer);
    memset(text, 'a', sizeof text);
    CHECK_FAILS(ft_tokenizer_encode(tokenizer, text, sizeof text, true, &ids, &count, &err), FT_LIMIT,
                "gives up on this text", &err);
    ft_tokenizer_close(tokenizer);
}

TEST_MAIN(RUN(every_reference_vector_is_equal) RUN(prompts_and_answers_of_the_small_model_are_equal) RUN(
    any_bytes_survive_encoding) RUN(stream_never_cuts_a_character_and_replaces_what_is_ill_formed)
              RUN(ids_outside_the_vocabulary_are_named) RUN(long_texts_of_every_kind_finish_quickly)
                  RUN(many_threads_encode_with_one_tokenizer) RUN(merges_go_by_rank_and_then_from_the_left)
                      RUN(ignore_merges_takes_whole_pieces_first)
                          RUN(bytes_without_a_token_become_unk_or_are_named)
                              RUN(prefix_space_is_added_once_to_each_text)
                                  RUN(added_tokens_follow_their_flags) RUN(split_removes_isolates_and_inverts)
                                      RUN(bos_of_the_template_is_told_and_not_added)
                                          RUN(other_kinds_of_tokenizers_are_refused_by_name)
                                              RUN(regular_expressions_that_mean_something_else_are_refused)
                                                  RUN(hostile_files_get_a_clear_error)
                                                      RUN(an_explosive_regular_expression_gives_up))
