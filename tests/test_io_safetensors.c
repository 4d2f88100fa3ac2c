/* SPDX-License-Identifier: Apache-2.0 */
#include "io/safetensors.h"
#include "tests/checkpoint_files.h"

#include <sys/stat.h>

/* A file in memory: length, header text, `data_bytes` of zeros. */
static int parse(const char *header, uint64_t data_bytes, struct ft_safetensors *st, struct ft_error *err)
{
    static char file[4096];
    uint64_t length = strlen(header);
    memset(file, 0, sizeof file);
    for (uint32_t i = 0; i < 8; i++)
        file[i] = (char)(length >> 8 * i);
    memcpy(file + 8, header, length);
    return ft_safetensors_parse(st, file, 8 + length, 8 + length + data_bytes, "a.safetensors", err);
}

static void refused(const char *header, uint64_t data_bytes, const char *text)
{
    struct ft_error err;
    struct ft_safetensors st;
    CHECK_FAILS(parse(header, data_bytes, &st, &err), FT_FORMAT, text, &err);
    CHECK(st.tensors == NULL && st.names == NULL && st.count == 0);
}

TEST(good_headers_are_read_in_order_of_offset)
{
    struct ft_error err;
    struct ft_safetensors st;
    CHECK_OK(parse("{\"__metadata__\":{\"format\":\"pt\"},"
                   "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]},"
                   "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[8,8]},"
                   "\"a\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
                   "\"odd\":{\"dtype\":\"F8_E5M2\",\"shape\":[3],\"data_offsets\":[40,43]}}   ",
                   50, &st, &err),
             &err);
    REQUIRE(st.count == 4);
    CHECK(strcmp(st.tensors[0].name, "a") == 0);
    CHECK_EQ(st.tensors[0].rank, 0);
    CHECK(strcmp(st.tensors[1].name, "empty") == 0);
    CHECK(strcmp(st.tensors[2].name, "b") == 0);
    CHECK_EQ(st.tensors[2].shape[1], 3);
    CHECK_EQ(st.tensors[2].bytes, 24);
    CHECK_EQ(st.tensors[2].offset - st.tensors[0].offset, 8);
    CHECK_EQ(st.tensors[3].dtype, FT_DTYPE_COUNT); /* unknown, kept: only who needs it may complain */
    ft_safetensors_close(&st);
    CHECK_OK(parse("{}", 0, &st, &err), &err);
    CHECK_EQ(st.count, 0);
    ft_safetensors_close(&st);
}

TEST(lying_lengths_are_refused)
{
    struct ft_error err;
    struct ft_safetensors st;
    char file[64] = {0};
    CHECK_FAILS(ft_safetensors_parse(&st, file, 0, 0, "p", &err), FT_FORMAT, "too short", &err);
    CHECK_FAILS(ft_safetensors_parse(&st, file, 7, 7, "p", &err), FT_FORMAT, "is 7 bytes long", &err);
    CHECK_FAILS(ft_safetensors_parse(&st, file, 64, 64, "p", &err), FT_FORMAT, "header length is 0", &err);
    file[0] = 57; /* 8 + 57 > 64 */
    CHECK_FAILS(ft_safetensors_parse(&st, file, 64, 64, "p", &err), FT_FORMAT, "wanted 2 to 56", &err);
    memset(file, 0xff, 8);
    CHECK_FAILS(ft_safetensors_parse(&st, file, 64, 64, "p", &err), FT_FORMAT, "at most 100 MB", &err);
    memset(file, 0, 8);
    file[3] = 6; /* 100663296 > 100000000 */
    CHECK_FAILS(ft_safetensors_parse(&st, file, 64, 1ull << 40, "p", &err), FT_FORMAT, "at most 100 MB",
                &err);
    memset(file, 0, 8);
    file[0] = 60; /* the caller gave less than the header */
    CHECK_FAILS(ft_safetensors_parse(&st, file, 64, 1000, "p", &err), FT_FORMAT, "is cut", &err);
}

TEST(bad_json_is_refused)
{
    refused("[]", 0, "not a JSON object");
    refused("{\"a\":", 0, "a.safetensors: header: column");
    refused("{\"a\":1}", 0, "tensor a: its header entry is not an object");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
            "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
            4, "duplicate");
    refused("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
            "duplicate");
}

TEST(bad_shapes_and_ranges_are_refused)
{
    refused("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor a: dtype is missing");
    refused("{\"a\":{\"dtype\":5,\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
            "dtype is missing or not a string");
    refused("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "shape is missing");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4,
            "not a whole number from 0");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}", 4,
            "not a whole number from 0");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
            "more than 8");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775808],\"data_offsets\":[0,4]}}", 4,
            "too big integer");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775807],\"data_offsets\":[0,4]}}", 4,
            "more than");
    refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 4,
            "64 bits");
    refused("{\"a\":{\"dtype\":\"X\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 4,
            "64 bits");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4,
            "span 4 bytes, but F32 [2] needs 8");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets is not a pair");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 8,
            "data_offsets is not a pair");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 8,
            "data_offsets is not a pair");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 8,
            "data_offsets is not a pair");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4.0]}}", 8,
            "data_offsets is not a pair");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 3, "holds 3 bytes of data");
    refused("{\"a\":{\"dtype\":\"X\",\"shape\":[1],\"data_offsets\":[0,9223372036854775807]}}", 3,
            "holds 3 bytes");
}

TEST(overlapping_tensors_are_refused_by_name)
{
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
            "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
            12, "tensors a and b overlap");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
            "\"z\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]},"
            "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
            12, "tensors a and b overlap");
}

TEST(written_arrays_are_read_back)
{
    struct ft_error err;
    struct scratch s;
    struct ft_arrays back;
    const float floats[6] = {1, 2, 3, 4, 5, -6};
    const uint8_t bytes[3] = {7, 8, 9};
    const int64_t number = -5;
    const struct ft_array arrays[] = {
        {"logits \"x\" \xc3\xa9", FT_DTYPE_F32, 2, {2, 3}, floats},
        {"bytes", FT_DTYPE_U8, 1, {3}, bytes},
        {"none", FT_DTYPE_F32, 1, {0}, NULL},
        {"number", FT_DTYPE_I64, 0, {0}, &number},
    };
    scratch_init(&s, NULL);
    CHECK_OK(ft_safetensors_write(scratch_path(&s, "x.safetensors"), arrays, 4, &err), &err);
    CHECK_OK(ft_safetensors_read(&back, s.path, 1000, &err), &err);
    CHECK_EQ(back.count, 4);
    const struct ft_array *a = ft_arrays_find(&back, "logits \"x\" \xc3\xa9");
    REQUIRE(a);
    CHECK_EQ(a->shape[1], 3);
    CHECK_EQ(memcmp(a->data, floats, sizeof floats), 0);
    CHECK_EQ((uintptr_t)a->data % 8, 0);
    CHECK_EQ(memcmp(ft_arrays_find(&back, "bytes")->data, bytes, 3), 0);
    CHECK_EQ(*(const int64_t *)ft_arrays_find(&back, "number")->data,
             -5); /* aligned, although the file is not */
    CHECK(ft_arrays_find(&back, "other") == NULL);
    ft_arrays_fini(&back);
    CHECK_FAILS(ft_safetensors_read(&back, s.path, 100, &err), FT_LIMIT, "x.safetensors", &err);
    CHECK_FAILS(ft_safetensors_read(&back, "/nowhere/x", 100, &err), FT_IO, "/nowhere/x", &err);
    scratch_fini(&s);
}

TEST(impossible_arrays_are_not_written)
{
    struct ft_error err;
    struct scratch s;
    const float one = 1;
    const struct ft_array twice[] = {{"a", FT_DTYPE_F32, 0, {0}, &one}, {"a", FT_DTYPE_F32, 0, {0}, &one}};
    const struct ft_array nameless = {"", FT_DTYPE_F32, 0, {0}, &one},
                          deep = {"a", FT_DTYPE_F32, 9, {0}, &one};
    const struct ft_array huge = {"a", FT_DTYPE_F32, 2, {1ull << 40, 1ull << 40}, &one};
    const struct ft_array latin = {"\xe9", FT_DTYPE_F32, 0, {0}, &one};
    scratch_init(&s, NULL);
    const char *path = scratch_path(&s, "x.safetensors");
    CHECK_FAILS(ft_safetensors_write(path, twice, 2, &err), FT_FORMAT, "array a is there twice", &err);
    CHECK_FAILS(ft_safetensors_write(path, &nameless, 1, &err), FT_FORMAT, "cannot be written", &err);
    CHECK_FAILS(ft_safetensors_write(path, &deep, 1, &err), FT_FORMAT, "array a cannot be written", &err);
    CHECK_FAILS(ft_safetensors_write(path, &huge, 1, &err), FT_FORMAT, "array a cannot be written", &err);
    CHECK_FAILS(ft_safetensors_write(path, &latin, 1, &err), FT_FORMAT, "not UTF-8", &err);
    CHECK(access(path, F_OK) != 0);
    CHECK_FAILS(ft_safetensors_write("/nowhere/x", twice, 1, &err), FT_IO, "/nowhere/x", &err);
    scratch_fini(&s);
}

TEST(files_that_are_not_files_are_refused)
{
    struct ft_error err;
    struct scratch s;
    struct ft_safetensors st;
    scratch_init(&s, NULL);
    CHECK_FAILS(ft_safetensors_open(&st, s.dir, &err), FT_IO, "a directory", &err);
    CHECK_FAILS(ft_safetensors_open(&st, scratch_path(&s, "absent"), &err), FT_IO, "absent", &err);
    CHECK_EQ(mkfifo(scratch_path(&s, "pipe"), 0600), 0);
    CHECK_FAILS(ft_safetensors_open(&st, s.path, &err), FT_IO, "a pipe", &err);
    scratch_write(&s, "short", "abc", 3);
    CHECK_FAILS(ft_safetensors_open(&st, s.path, &err), FT_FORMAT, "too short", &err);
    scratch_fini(&s);
}

TEST(reference_files_are_readable)
{
    struct ft_error err;
    struct ft_arrays arrays;
    CHECK_OK(ft_safetensors_read(&arrays, FIXTURE("qwen3_moe-bf16") "/reference.safetensors", 1u << 26, &err),
             &err);
    const struct ft_array *logits = ft_arrays_find(&arrays, "logits"),
                          *ids = ft_arrays_find(&arrays, "input_ids");
    REQUIRE(logits && ids);
    CHECK_EQ(logits->rank, 2);
    CHECK_EQ(logits->shape[0], ids->shape[0]);
    CHECK_EQ(logits->shape[1], 320);
    ft_arrays_fini(&arrays);
}

TEST_MAIN(RUN(good_headers_are_read_in_order_of_offset) RUN(lying_lengths_are_refused)
              RUN(bad_json_is_refused) RUN(bad_shapes_and_ranges_are_refused)
                  RUN(overlapping_tensors_are_refused_by_name) RUN(written_arrays_are_read_back)
                      RUN(impossible_arrays_are_not_written) RUN(files_that_are_not_files_are_refused)
                          RUN(reference_files_are_readable))
