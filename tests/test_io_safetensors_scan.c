/* SPDX-License-Identifier: Apache-2.0 */
/* The scanner of headers and indices against a JSON library that reads the same texts: whole ones and damaged ones. */
#include "io/safetensors.h"
#include "io/shard_index.h"
#include "tests/checkpoint_files.h"

#include <jansson.h>

static bool whole(const json_t *value)
{
    return json_is_integer(value) && json_integer_value(value) >= 0;
}

static bool good_entry(const json_t *entry, uint64_t data_bytes)
{
    const json_t *dtype = json_object_get(entry, "dtype"), *shape = json_object_get(entry, "shape"),
                 *range = json_object_get(entry, "data_offsets");
    uint64_t count, bytes, sizes[8];
    if (!json_is_string(dtype) || !json_is_array(shape) || json_array_size(shape) > 8 ||
        json_array_size(range) != 2 || !whole(json_array_get(range, 0)) || !whole(json_array_get(range, 1)))
        return false;
    for (size_t i = 0; i < json_array_size(shape); i++) {
        if (!whole(json_array_get(shape, i)))
            return false;
        sizes[i] = (uint64_t)json_integer_value(json_array_get(shape, i));
    }
    uint64_t from = (uint64_t)json_integer_value(json_array_get(range, 0)),
             to = (uint64_t)json_integer_value(json_array_get(range, 1));
    if (from > to || to > data_bytes || !ft_shape_count(sizes, (uint32_t)json_array_size(shape), &count))
        return false;
    for (enum ft_dtype d = 0; d < FT_DTYPE_COUNT; d++)
        if (strcmp(ft_dtype_name(d), json_string_value(dtype)) == 0)
            return ft_mul_u64(count, ft_dtype_bytes(d), &bytes) && bytes == to - from;
    return true;
}

static bool overlaps(json_t *root, const char *name, const json_t *range)
{
    const char *key;
    json_t *value;
    json_int_t from = json_integer_value(json_array_get(range, 0)),
               to = json_integer_value(json_array_get(range, 1));
    json_object_foreach(root, key, value)
    {
        const json_t *other = json_object_get(value, "data_offsets");
        json_int_t other_from = json_integer_value(json_array_get(other, 0)),
                   other_to = json_integer_value(json_array_get(other, 1));
        if (strcmp(key, name) != 0 && strcmp(key, "__metadata__") != 0 && from < to &&
            other_from < other_to && from < other_to && other_from < to)
            return true;
    }
    return false;
}

static bool good_header(json_t *root, uint64_t data_bytes)
{
    const char *key;
    json_t *value;
    if (!json_is_object(root))
        return false;
    json_object_foreach(root, key, value)
    {
        if (strcmp(key, "__metadata__") != 0 && !good_entry(value, data_bytes))
            return false;
    }
    json_object_foreach(root, key, value)
    {
        if (strcmp(key, "__metadata__") != 0 && overlaps(root, key, json_object_get(value, "data_offsets")))
            return false;
    }
    return true;
}

static void compare_tensors(const struct ft_safetensors *st, json_t *root, uint64_t data_start)
{
    size_t metadata = json_object_get(root, "__metadata__") ? 1 : 0;
    CHECK_EQ(st->count + metadata, json_object_size(root));
    for (uint32_t i = 0; i < st->count; i++) {
        const struct ft_tensor *tensor = &st->tensors[i];
        const json_t *entry = json_object_get(root, tensor->name);
        const json_t *shape = json_object_get(entry, "shape"),
                     *range = json_object_get(entry, "data_offsets");
        const char *dtype = json_string_value(json_object_get(entry, "dtype"));
        REQUIRE(dtype);
        CHECK(tensor->dtype == FT_DTYPE_COUNT || strcmp(ft_dtype_name(tensor->dtype), dtype) == 0);
        CHECK_EQ(tensor->rank, json_array_size(shape));
        for (uint32_t k = 0; k < tensor->rank; k++)
            CHECK_EQ(tensor->shape[k], json_integer_value(json_array_get(shape, k)));
        CHECK_EQ(tensor->offset, data_start + (uint64_t)json_integer_value(json_array_get(range, 0)));
        CHECK_EQ(tensor->offset + tensor->bytes,
                 data_start + (uint64_t)json_integer_value(json_array_get(range, 1)));
    }
}

/* Both readers on `file` (8 bytes of length, then the header); true when they accept it. */
static bool compare_header(const char *file, uint64_t header_bytes, uint64_t data_bytes)
{
    struct ft_error err;
    struct ft_safetensors st;
    json_error_t where;
    int status = ft_safetensors_parse(&st, file, 8 + header_bytes, 8 + header_bytes + data_bytes, "x", &err);
    json_t *root = json_loadb(file + 8, header_bytes, JSON_REJECT_DUPLICATES, &where);
    bool wanted = root && good_header(root, data_bytes);
    /* Of numbers with a fraction only the form is checked: one that overflows is nobody's harm. */
    bool comparable = root || !strstr(where.text, "real number overflow");
    if (comparable && (status == FT_OK) != wanted) {
        CHECK_EQ(status == FT_OK, wanted); /* the two readers differ */
        fprintf(stderr, "  %s | %s\n  %.*s\n", status ? err.message : "accepted", root ? "" : where.text,
                (int)FT_MIN(header_bytes, 2000u), file + 8);
    }
    CHECK(status == FT_OK || status == FT_FORMAT);
    if (status == FT_OK && wanted)
        compare_tensors(&st, root, 8 + header_bytes);
    if (status == FT_OK)
        ft_safetensors_close(&st);
    json_decref(root);
    return status == FT_OK;
}

static bool compare_index(const char *text, uint64_t bytes)
{
    struct ft_error err;
    struct ft_shard_index index;
    json_error_t where;
    const char *key;
    json_t *value;
    int status = ft_shard_index_parse(&index, text, bytes, "x", &err);
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    json_t *map = json_object_get(root, "weight_map");
    bool wanted = json_object_size(map) > 0, comparable = root || !strstr(where.text, "real number overflow");
    json_object_foreach(map, key, value)
    {
        const char *file = json_string_value(value);
        wanted &= file && file[0] && file[0] != '.' && !strchr(file, '/');
    }
    if (comparable && (status == FT_OK) != wanted) {
        CHECK_EQ(status == FT_OK, wanted); /* the two readers differ */
        fprintf(stderr, "  %s | %s\n  %.*s\n", status ? err.message : "accepted", root ? "" : where.text,
                (int)FT_MIN(bytes, 2000u), text);
    }
    if (status == FT_OK && wanted) {
        uint32_t i = 0;
        CHECK_EQ(index.count, json_object_size(map));
        json_object_foreach(map, key, value)
        {
            const struct ft_shard_entry *entry = &index.entries[i++];
            const struct ft_name *file = &index.files.names[entry->file];
            CHECK(ft_json_string_is(entry->name, key));
            CHECK(ft_json_string_is((struct ft_json_string){file->text, file->bytes},
                                    json_string_value(value)));
        }
    }
    if (status == FT_OK)
        ft_shard_index_fini(&index);
    json_decref(root);
    return status == FT_OK;
}

static uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

/* One to three changes: a byte replaced, put in or taken out, a piece said twice. Returns the new length. */
static uint64_t mutate(char *text, uint64_t bytes, uint64_t room, uint64_t *state)
{
    static const char interesting[] =
        "{}[]\",:\\u0123456789-+.eE \n\t/tfnabD8\x01\x1f\x7f\x80\xc3\xa9\xed\xff";
    for (uint32_t changes = 1 + next_random(state) % 3; changes && bytes > 2; changes--) {
        uint64_t at = next_random(state) % bytes, length = 1 + next_random(state) % 12;
        char c = interesting[next_random(state) % (sizeof interesting - 1)];
        length = FT_MIN(length, bytes - at);
        switch (next_random(state) % 4) {
        case 0:
            text[at] = c;
            break;
        case 1:
            memmove(text + at, text + at + length, bytes - at - length);
            bytes -= length;
            break;
        case 2:
            if (bytes + 1 > room)
                break;
            memmove(text + at + 1, text + at, bytes - at);
            text[at] = c;
            bytes++;
            break;
        default:
            if (bytes + length > room)
                break;
            memmove(text + at + length, text + at, bytes - at);
            bytes += length;
        }
    }
    return bytes;
}

static void put_length(char *file, uint64_t bytes)
{
    for (uint32_t i = 0; i < 8; i++)
        file[i] = (char)(bytes >> 8 * i);
}

static const char *const headers[] = {
    "{}",
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
    "{\"__metadata__\":{\"format\":\"pt\",\"n\":{\"x\":[1,-2,3.5e-7,null,true,false,\"\\\"\\\\\\/"
    "\\b\\f\\n\\r\\t\"]}},"
    "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]},"
    "\"a\":{\"data_offsets\":[0,8],\"other\":[[],{}],\"shape\":[],\"dtype\":\"I64\"}}  ",
    "{\"\\u00e9\\ud83d\\ude00 \xc3\xa9\xf0\x9f\x98\x80\":{\"dtype\":\"\\u0055\\u0038\",\"shape\":[ 3 , 1 ],\n"
    "\"data_offsets\":[0,3]},\"\":{\"dtype\":\"X\",\"shape\":[-0],\"data_offsets\":[3,9]}}",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[9223372036854775807,0],\"data_offsets\":[40,40]},"
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[1,1,1,1,1,1,1,4],\"data_offsets\":[32,40],\"x\":-"
    "9223372036854775808}}",
};

TEST(damaged_headers_are_judged_alike)
{
    char file[2048];
    uint64_t state = 1;
    uint32_t accepted = 0, refused = 0;
    for (uint32_t h = 0; h < sizeof headers / sizeof headers[0]; h++) {
        uint64_t bytes = strlen(headers[h]);
        memcpy(file + 8, headers[h], bytes);
        put_length(file, bytes);
        CHECK(compare_header(file, bytes, 40));
        for (uint32_t i = 0; i < 3000; i++) {
            memcpy(file + 8, headers[h], bytes);
            uint64_t changed = mutate(file + 8, bytes, sizeof file - 8, &state);
            put_length(file, changed);
            if (compare_header(file, changed, 40))
                accepted++;
            else
                refused++;
        }
    }
    CHECK(accepted > 300 && refused > 3000); /* the changes are neither all harmless nor all deadly */
}

static void compare_file(const char *path)
{
    struct ft_error err;
    char *file;
    uint64_t bytes, length = 0, state = 7;
    CHECK_OK(ft_file_read_all(path, 1u << 30, &file, &bytes, &err), &err);
    for (int i = 7; i >= 0; i--)
        length = length << 8 | (unsigned char)file[i];
    CHECK(compare_header(file, length, bytes - 8 - length));
    char *changed = malloc(8 + length + 64);
    REQUIRE(changed);
    for (uint32_t i = 0; i < 40; i++) {
        memcpy(changed, file, 8 + length);
        uint64_t now = mutate(changed + 8, length, length + 64, &state);
        put_length(changed, now);
        compare_header(changed, now, bytes - 8 - length);
    }
    free(changed);
    free(file);
}

TEST(headers_of_the_fixtures_are_read_alike)
{
    static const char *const files[] = {
        FIXTURE("gpt_oss-mxfp4") "/model.safetensors",
        FIXTURE("qwen3_5_moe-bf16") "/model.safetensors",
        FIXTURE("qwen3_moe-bf16") "/model.safetensors",
        FIXTURE("qwen3_moe-bf16-sharded-tied") "/model-00002-of-00003.safetensors",
        FIXTURE("qwen3_moe-fp8_block") "/model.safetensors",
        FIXTURE("qwen3_moe-nvfp4-compressed_tensors") "/model.safetensors",
        FIXTURE("qwen4_exp-bf16") "/model.safetensors",
        FIXTURE("qwen4_exp-nvfp4-modelopt") "/model-00001-of-00002.safetensors",
        FIXTURE("qwen4_exp-nvfp4-modelopt") "/model-00002-of-00002.safetensors",
    };
    for (uint32_t i = 0; i < sizeof files / sizeof files[0]; i++)
        compare_file(files[i]);
}

TEST(indices_are_read_alike)
{
    static const char small[] = "{\"metadata\": {\"total_size\": 12.5, \"x\": [null]}, \"weight_map\": {\n"
                                "\"a\\u00e9\": \"m-1.safetensors\", \"b\xc3\xa9\": \"m-2.safetensors\", "
                                "\"c\": \"m\\u002d1.safetensors\"}}\n";
    static const char *const fixtures[] = {FIXTURE("qwen3_moe-bf16-sharded-tied"),
                                           FIXTURE("qwen4_exp-nvfp4-modelopt")};
    char text[1024];
    uint64_t state = 3, bytes = sizeof small - 1;
    uint32_t accepted = 0;
    CHECK(compare_index(small, bytes));
    for (uint32_t i = 0; i < 6000; i++) {
        memcpy(text, small, bytes);
        accepted += compare_index(text, mutate(text, bytes, sizeof text, &state));
    }
    CHECK(accepted > 300 && accepted < 5000);
    for (uint32_t i = 0; i < 2; i++) {
        struct ft_error err;
        char path[512], *file;
        snprintf(path, sizeof path, "%s/model.safetensors.index.json", fixtures[i]);
        CHECK_OK(ft_file_read_all(path, 1u << 30, &file, &bytes, &err), &err);
        CHECK(compare_index(file, bytes));
        free(file);
    }
}

static void faulty(const char *text, const char *message)
{
    struct ft_error err;
    struct ft_json_scan s;
    ft_json_scan_init(&s, text, strlen(text));
    CHECK(!ft_json_scan_skip(&s) || !ft_json_scan_end(&s));
    CHECK(!ft_json_scan_skip(&s)); /* a fault sticks */
    CHECK_FAILS(ft_json_scan_report(&s, "x", true, &err), FT_FORMAT, message, &err);
    ft_json_scan_fini(&s);
}

TEST(faults_say_what_and_where)
{
    faulty("{\"a\":\n tru}", "x: line 2, column 2 (byte 7): a value was expected");
    faulty("{\"a\":1,\"a\":2}", "line 1, column 8 (byte 7): duplicate key");
    faulty("{\"a\":1", "(byte 6): the text ends too early");
    faulty("{\"a\" 1}", "':' expected");
    faulty("{1:1}", "a key in quotes was expected");
    faulty("{\"a\":1,}", "a key in quotes was expected");
    faulty("[1 2]", "',' or ']' expected");
    faulty("[1,]", "a value was expected");
    faulty("[1]]", "something follows");
    faulty("[01]", "begins with 0");
    faulty("[1.]", "a digit was expected");
    faulty("[9223372036854775808]", "too big integer");
    faulty("[-9223372036854775809]", "too big negative integer");
    faulty("[99999999999999999999999999999999]", "too big integer");
    faulty("[\"\\x\"]", "unknown escape");
    faulty("[\"\\u12g4\"]", "four hex digits");
    faulty("[\"\\u0000\"]", "\\u0000");
    faulty("[\"\\ud800\"]", "lone surrogate");
    faulty("[\"\\ud800\\u0041\"]", "lone surrogate");
    faulty("[\"\\udc00\"]", "lone surrogate");
    faulty("[\"0123456789\xc0\xaf\"]", "not UTF-8");
    faulty("[\"0123456789\n\"]", "control character");
    faulty("[\"0123456789", "ends too early");
    faulty("\"\\", "ends too early");
    char deep[FT_JSON_DEPTH_MAX + 3] = {0};
    memset(deep, '[', FT_JSON_DEPTH_MAX + 1);
    faulty(deep, "nested too deep");
}

TEST_MAIN(RUN(damaged_headers_are_judged_alike) RUN(headers_of_the_fixtures_are_read_alike)
              RUN(indices_are_read_alike) RUN(faults_say_what_and_where))
