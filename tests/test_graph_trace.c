/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/trace.h"
#include "tests/test.h"

#include <dirent.h>

#define RECORDS 5

static struct ft_trace_header header = {.model = "qwen4_exp",
                                        .strategy = "hybrid",
                                        .device = "host",
                                        .isa = "avx2",
                                        .layer_count = 4,
                                        .expert_count = 8,
                                        .topk = 2,
                                        .workers = 2,
                                        .slot_count = 6,
                                        .thread_count = 3,
                                        .expert_bytes = 2764812};
static struct ft_trace_record records[RECORDS];

static struct ft_trace_step make_step(uint32_t number)
{
    snprintf(header.thread_names[0], 16, "worker 0");
    snprintf(header.thread_names[1], 16, "worker 1");
    snprintf(header.thread_names[2], 16, "device");
    for (uint32_t i = 0; i < RECORDS; i++)
        records[i] = (struct ft_trace_record){.start_ns = 1000 + i,
                                              .end_ns = 1u << (11 + i),
                                              .bytes = UINT64_C(0x123456789a) + i,
                                              .job = 7 + i,
                                              .expert = FT_NONE,
                                              .predicted_ns = 1.5f,
                                              .slot = 3,
                                              .layer = (uint16_t)(i % 4),
                                              .thread = (uint16_t)(i % 3),
                                              .rows = 65535,
                                              .kind = (uint8_t)(i % 3),
                                              .op = FT_OP_EXPERT_UP,
                                              .lane = FT_LANE_LINK,
                                              .detail = FT_WAIT_IO,
                                              .place = FT_PLACE_CPU,
                                              .flags = 1};
    records[4].layer = UINT16_MAX;
    return (struct ft_trace_step){.step = number,
                                  .rows = 2,
                                  .sequences = 1,
                                  .prefill = 1,
                                  .dropped = 4,
                                  .record_count = RECORDS,
                                  .begin_ns = 900,
                                  .end_ns = 99999,
                                  .layer_begin = 1,
                                  .layer_end = 4,
                                  .records = records};
}

/* A file with two steps and an unknown frame between them, in a block of exactly its size (so that asan sees
 * over-reads). */
static uint8_t *make_file(uint64_t *bytes)
{
    static const uint8_t unknown[] = {9, 0, 0, 0, 0, 0, 0, 0, 0xc5, 0x9d, 0x1c, 0x81}; /* kind 9, empty */
    struct ft_trace_step first = make_step(1), second = make_step(2);
    uint64_t sizes[4] = {ft_trace_encode_magic(NULL, 0), ft_trace_encode_header(&header, NULL, 0),
                         ft_trace_encode_step(&first, NULL, 0), ft_trace_encode_step(&second, NULL, 0)};
    *bytes = sizes[0] + sizes[1] + sizes[2] + sizeof unknown + sizes[3];
    uint8_t *file = malloc(*bytes), *at = file;
    CHECK_EQ(ft_trace_encode_magic(at, sizes[0]), sizes[0]);
    at += sizes[0];
    CHECK_EQ(ft_trace_encode_header(&header, at, sizes[1]), sizes[1]);
    at += sizes[1];
    CHECK_EQ(ft_trace_encode_step(&first, at, sizes[2]), sizes[2]);
    at += sizes[2];
    memcpy(at, unknown, sizeof unknown);
    at += sizeof unknown;
    CHECK_EQ(ft_trace_encode_step(&second, at, sizes[3]), sizes[3]);
    CHECK_EQ(at + sizes[3] - file, *bytes);
    return file;
}

/* Reads everything; returns the first error. */
static int read_all(const uint8_t *file, uint64_t bytes, uint32_t *steps, struct ft_error *err)
{
    struct ft_trace_reader reader;
    struct ft_trace_step step;
    struct ft_trace_record out[RECORDS];
    bool more = true;
    *steps = 0;
    int status = ft_trace_reader_open(&reader, file, bytes, err);
    while (status == FT_OK && more) {
        status = ft_trace_reader_next(&reader, &step, out, RECORDS, &more, err);
        *steps += status == FT_OK && more;
    }
    return status;
}

TEST(what_was_written_is_read_back)
{
    struct ft_error err;
    struct ft_trace_reader reader;
    struct ft_trace_step step, wanted = make_step(1);
    struct ft_trace_record out[RECORDS];
    uint64_t bytes;
    bool more;
    uint8_t *file = make_file(&bytes);
    CHECK_EQ(sizeof(struct ft_trace_record), 64);
    CHECK_OK(ft_trace_reader_open(&reader, file, bytes, &err), &err);
    CHECK(memcmp(&reader.header, &header, sizeof header) == 0);
    CHECK_OK(ft_trace_reader_next(&reader, &step, NULL, 0, &more, &err), &err);
    CHECK_EQ(step.record_count, RECORDS);
    CHECK(step.records == NULL && more);
    CHECK_OK(ft_trace_reader_open(&reader, file, bytes, &err), &err);
    CHECK_FAILS(ft_trace_reader_next(&reader, &step, out, RECORDS - 1, &more, &err), FT_LIMIT,
                "has room for 4", &err);
    CHECK_OK(ft_trace_reader_next(&reader, &step, out, RECORDS, &more, &err), &err);
    CHECK(memcmp(out, records, sizeof out) == 0);
    wanted.records = step.records = NULL;
    CHECK(memcmp(&step, &wanted, sizeof step) == 0);
    CHECK_OK(ft_trace_reader_next(&reader, &step, out, RECORDS, &more, &err), &err);
    CHECK(more);
    CHECK_EQ(step.step, 2);
    CHECK_OK(ft_trace_reader_next(&reader, &step, out, RECORDS, &more, &err), &err);
    CHECK(!more);
    free(file);
}

TEST(too_small_buffers_are_not_written)
{
    struct ft_trace_step step = make_step(1);
    uint8_t buffer[4096];
    memset(buffer, 0x5a, sizeof buffer);
    uint64_t needed = ft_trace_encode_step(&step, buffer, 0);
    CHECK_EQ(ft_trace_encode_step(&step, buffer, needed - 1), needed);
    CHECK_EQ(ft_trace_encode_header(&header, buffer, 10), 144 + 3 * 16 + 12);
    CHECK_EQ(ft_trace_encode_magic(buffer, 11), 12);
    for (size_t i = 0; i < sizeof buffer; i++)
        CHECK_EQ(buffer[i], 0x5a);
}

TEST(every_cut_is_an_error_or_a_shorter_trace)
{
    struct ft_error err;
    uint64_t bytes;
    uint32_t steps;
    uint8_t *file = make_file(&bytes);
    CHECK_OK(read_all(file, bytes, &steps, &err), &err);
    CHECK_EQ(steps, 2);
    uint32_t clean = 0;
    for (uint64_t cut = 0; cut < bytes; cut++) {
        uint8_t *copy = malloc(cut ? cut : 1);
        memcpy(copy, file, cut);
        if (read_all(copy, cut, &steps, &err) == FT_OK)
            clean++;
        else
            CHECK_EQ(err.code, FT_FORMAT);
        CHECK(steps < 2);
        free(copy);
    }
    CHECK_EQ(clean, 3); /* after the header, after step 1, after the unknown frame */
    free(file);
}

TEST(every_flipped_bit_is_found)
{
    struct ft_error err;
    uint64_t bytes;
    uint32_t steps, unnoticed = 0;
    uint8_t *file = make_file(&bytes);
    for (uint64_t bit = 0; bit < bytes * 8; bit++) {
        file[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        unnoticed += read_all(file, bytes, &steps, &err) == FT_OK;
        file[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
    /* A kind is outside the checksum: flipping it makes the frame unknown, which is skipped. */
    CHECK(unnoticed <= 3 * 32);
    free(file);
}

static uint32_t fnv(const uint8_t *data, uint64_t bytes)
{
    uint32_t hash = 2166136261u;
    for (uint64_t i = 0; i < bytes; i++)
        hash = (hash ^ data[i]) * 16777619u;
    return hash;
}

/* Changes one payload byte of the frame at `frame` and signs it again. */
static void patch(uint8_t *file, uint64_t frame, uint64_t byte, uint8_t value)
{
    uint32_t length;
    memcpy(&length, file + frame + 4, 4);
    file[frame + 8 + byte] = value;
    uint32_t sum = fnv(file + frame + 8, length);
    memcpy(file + frame + 8 + length, &sum, 4);
}

TEST(signed_nonsense_is_refused)
{
    struct ft_error err;
    static const struct {
        bool in_step;
        uint32_t byte;
        uint8_t value;
        const char *text;
    } cases[] = {
        {false, 63, 'x', "model in the header"},
        {false, 79, 'x', "strategy in the header"},
        {false, 113, 9, "layers and"},
        {false, 132, 200, "names 200 threads"},
        {false, 144 + 15, 'x', "thread name"},
        {true, 12, 2, "neither prefill nor decode"},
        {true, 20, 77, "announces 77 records"},
        {true, 24 + 7, 1, "ends before"},
        {true, 40, 9, "layers 9 to 4"},
        {true, 44 + 2, 1, "layers 1 to 65540"},
        {true, 48 + 46, 3, "field out of range"},
        {true, 48 + 47, 200, "field out of range"},
        {true, 48 + 48, 5, "field out of range"},
        {true, 48 + 49, 99, "field out of range"},
        {true, 48 + 50, 3, "field out of range"},
        {true, 48 + 7, 1, "field out of range"},
        {true, 48 + 41, 2, "field out of range"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint64_t bytes;
        uint32_t steps;
        uint8_t *file = make_file(&bytes);
        uint64_t step_frame = 12 + 144 + 3 * 16 + 12;
        patch(file, cases[i].in_step ? step_frame : 12, cases[i].byte, cases[i].value);
        CHECK_FAILS(read_all(file, bytes, &steps, &err), FT_FORMAT, cases[i].text, &err);
        free(file);
    }
}

TEST(other_files_and_schemas_are_refused)
{
    struct ft_error err;
    struct ft_trace_reader reader;
    uint64_t bytes;
    uint32_t steps;
    uint8_t *file = make_file(&bytes);
    CHECK_FAILS(ft_trace_reader_open(&reader, "{}", 2, &err), FT_FORMAT, "not a trace file", &err);
    CHECK_FAILS(ft_trace_reader_open(&reader, file, 12, &err), FT_FORMAT, "before a header", &err);
    file[8] = 1;
    CHECK_FAILS(ft_trace_reader_open(&reader, file, bytes, &err), FT_UNSUPPORTED, "schema 1", &err);
    file[8] = 2;
    file[12] = 2;
    CHECK_FAILS(read_all(file, bytes, &steps, &err), FT_FORMAT, "a step before a header", &err);
    free(file);
}

TEST(ring_drops_the_newest_and_counts)
{
    struct ft_trace_record room[2];
    struct ft_trace_ring ring = {.records = room, .capacity = 2};
    CHECK_EQ(sizeof ring, 64);
    CHECK(ft_trace_push(&ring) == &room[0]);
    CHECK(ft_trace_push(&ring) == &room[1]);
    CHECK(ft_trace_push(&ring) == NULL);
    CHECK_EQ(ring.dropped, 1);
}

TEST(fuzz_seeds_never_crash)
{
    struct ft_error err;
    uint32_t seen = 0, steps;
    DIR *dir = opendir(FT_DATA_DIR "/fuzz/trace");
    REQUIRE(dir != NULL);
    for (struct dirent *entry; (entry = readdir(dir));) {
        char path[512];
        snprintf(path, sizeof path, "%s/fuzz/trace/%s", FT_DATA_DIR, entry->d_name);
        FILE *stream = entry->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (!stream)
            continue;
        uint8_t *data = malloc(1 << 20);
        size_t bytes = fread(data, 1, 1 << 20, stream);
        fclose(stream);
        seen += 1;
        read_all(data, bytes, &steps, &err);
        free(data);
    }
    closedir(dir);
    CHECK(seen >= 3);
}

TEST_MAIN(RUN(what_was_written_is_read_back) RUN(too_small_buffers_are_not_written)
              RUN(every_cut_is_an_error_or_a_shorter_trace) RUN(every_flipped_bit_is_found)
                  RUN(signed_nonsense_is_refused) RUN(other_files_and_schemas_are_refused)
                      RUN(ring_drops_the_newest_and_counts) RUN(fuzz_seeds_never_crash))
