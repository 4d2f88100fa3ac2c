/* SPDX-License-Identifier: Apache-2.0 */
/* Files that the commands read and write: traces, tensors, ids, sampling defaults, the machine's memory. */
#include "tests/test.h"

#include "io/safetensors.h"
#include "jobs/topology.h"
#include "tools/generate.h"
#include "tools/generation_config.h"
#include "tools/ids.h"
#include "tools/machine_probe.h"
#include "tools/replay_file.h"
#include "tools/tensor_map.h"
#include "tools/trace_file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <signal.h>
#include <unistd.h>

static char folder[64];

static const char *in_folder(const char *name)
{
    static char path[4][160];
    static int turn;
    char *to = path[turn++ % 4];
    snprintf(to, sizeof path[0], "%s/%s", folder, name);
    return to;
}

/* Where this process keeps `name` until it is whole. */
static const char *part_of(const char *name)
{
    char part[64];
    snprintf(part, sizeof part, "%s.part.%ld", name, (long)getpid());
    return in_folder(part);
}

static void write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    if (file) {
        fputs(text, file);
        fclose(file);
    }
}

static void fill_header(struct ft_trace_header *header)
{
    memset(header, 0, sizeof *header);
    snprintf(header->model, sizeof header->model, "test");
    header->layer_count = 2;
    header->expert_count = 8;
    header->topk = 2;
    header->thread_count = 1;
}

static void write_steps(struct ft_trace_file *file, uint32_t count)
{
    struct ft_trace_record records[2] = {
        {.kind = FT_RECORD_CHOICE, .layer = 1, .expert = 3, .slot = 5, .place = FT_PLACE_FETCH},
        {.kind = FT_RECORD_JOB, .start_ns = 1, .end_ns = 2, .expert = FT_NONE}};
    for (uint32_t i = 0; i < count; i++) {
        struct ft_trace_step step = {
            .step = i, .rows = 1, .sequences = 1, .record_count = 2, .records = records};
        ft_trace_file_step(file, &step);
    }
}

TEST(trace_is_read_back_as_placements)
{
    struct ft_trace_file file;
    struct ft_trace_header header;
    struct ft_replay replay;
    struct ft_model model = {.layer_count = 2, .expert_count = 8, .topk = 2};
    struct ft_error err;
    const char *path = in_folder("trace");
    fill_header(&header);
    CHECK_OK(ft_trace_file_open(&file, path, &err), &err);
    ft_trace_file_begin(&file, &header);
    write_steps(&file, 3);
    CHECK_OK(ft_trace_file_close(&file, &err), &err);
    CHECK_OK(ft_replay_file_read(&replay, path, &model, &err), &err);
    REQUIRE(replay.count == 3);
    CHECK_EQ(replay.choices[2].step, 2);
    CHECK_EQ(replay.choices[2].expert, 3);
    CHECK_EQ(replay.choices[2].place, FT_PLACE_FETCH);
    ft_replay_file_fini(&replay);
    model.expert_count = 9;
    CHECK_FAILS(ft_replay_file_read(&replay, path, &model, &err), FT_MISMATCH, "this model has 2, 9", &err);
    CHECK_FAILS(ft_replay_file_read(&replay, in_folder("none"), &model, &err), FT_IO, "--replay", &err);
}

TEST(trace_that_hits_a_limit_ends_with_its_last_whole_frame)
{
    struct ft_trace_file file;
    struct ft_trace_header header;
    struct ft_replay replay;
    struct ft_model model = {.layer_count = 2, .expert_count = 8, .topk = 2};
    struct rlimit limit, old;
    struct ft_error err;
    struct stat info;
    const char *path = in_folder("cut");
    fill_header(&header);
    CHECK_OK(ft_trace_file_open(&file, path, &err), &err);
    ft_trace_file_begin(&file, &header);
    write_steps(&file, 2);
    uint64_t whole = file.bytes;
    /* A file size limit in the middle of the third frame stands in for a full disk. */
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    limit = old;
    limit.rlim_cur = whole + 20;
    setrlimit(RLIMIT_FSIZE, &limit);
    write_steps(&file, 3);
    setrlimit(RLIMIT_FSIZE, &old);
    CHECK_FAILS(ft_trace_file_close(&file, &err), FT_IO, "ends after 2 steps", &err);
    CHECK(stat(path, &info) == 0 && (uint64_t)info.st_size == whole);
    CHECK_OK(ft_replay_file_read(&replay, path, &model, &err), &err);
    CHECK_EQ(replay.count, 2);
    ft_replay_file_fini(&replay);
}

TEST(trace_without_frames_is_removed)
{
    struct ft_trace_file file;
    struct ft_error err;
    const char *path = in_folder("unused");
    CHECK_OK(ft_trace_file_open(&file, path, &err), &err);
    CHECK_OK(ft_trace_file_close(&file, &err), &err);
    CHECK(access(path, F_OK) != 0);
    CHECK_OK(ft_trace_file_close(&file, &err), &err); /* a second close does nothing */
}

TEST(tensor_map_is_a_safetensors_file)
{
    const struct ft_tensor_spec specs[] = {{"a", FT_DTYPE_F32, 2, {2, 3}}, {"b", FT_DTYPE_I32, 1, {5}}};
    struct ft_tensor_map map;
    struct ft_arrays arrays;
    struct ft_error err;
    const char *path = in_folder("map.safetensors");
    CHECK_OK(ft_tensor_map_create(&map, path, specs, 2, &err), &err);
    CHECK(access(path, F_OK) != 0); /* nothing under the name before it is complete */
    ((float *)ft_tensor_map_data(&map, specs, 0))[5] = 1.5f;
    ((int32_t *)ft_tensor_map_data(&map, specs, 1))[4] = -7;
    CHECK_OK(ft_tensor_map_commit(&map, &err), &err);
    REQUIRE(ft_safetensors_read(&arrays, path, 1u << 20, &err) == FT_OK);
    const struct ft_array *a = ft_arrays_find(&arrays, "a"), *b = ft_arrays_find(&arrays, "b");
    REQUIRE(a && b);
    CHECK_EQ(a->shape[1], 3);
    CHECK_NEAR(((const float *)a->data)[5], 1.5, 0);
    CHECK_EQ(((const int32_t *)b->data)[4], -7);
    ft_arrays_fini(&arrays);
}

TEST(abandoned_tensor_map_leaves_nothing)
{
    const struct ft_tensor_spec spec = {"a", FT_DTYPE_F32, 1, {16}};
    struct ft_tensor_map map;
    struct ft_error err;
    CHECK_OK(ft_tensor_map_create(&map, in_folder("gone"), &spec, 1, &err), &err);
    CHECK(access(part_of("gone"), F_OK) == 0);
    ft_tensor_map_abandon(&map);
    CHECK(access(part_of("gone"), F_OK) != 0);
    ft_tensor_map_abandon(&map);
    CHECK_FAILS(ft_tensor_map_create(&map, in_folder("no/such"), &spec, 1, &err), FT_IO, "no/such", &err);
    CHECK_FAILS(ft_tensor_map_create(&map, folder, &spec, 1, &err), FT_IO, "not a regular file", &err);
}

TEST(tensor_map_without_room_fails_before_any_work)
{
    const struct ft_tensor_spec spec = {"a", FT_DTYPE_F32, 1, {1u << 20}};
    struct ft_tensor_map map;
    struct rlimit limit, old;
    struct ft_error err;
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    limit = old;
    limit.rlim_cur = 65536;
    setrlimit(RLIMIT_FSIZE, &limit);
    CHECK_FAILS(ft_tensor_map_create(&map, in_folder("big"), &spec, 1, &err), FT_IO, "no room for", &err);
    setrlimit(RLIMIT_FSIZE, &old);
    CHECK(access(part_of("big"), F_OK) != 0);
}

static void check_ids(const char *text, uint32_t wanted)
{
    struct ft_error err;
    uint32_t *ids = NULL, count = 99;
    CHECK_OK(ft_ids_parse(text, strlen(text), "test", &ids, &count, &err), &err);
    CHECK_EQ(count, wanted);
    for (uint32_t i = 0; ids && i < count; i++)
        CHECK_EQ(ids[i], i + 1);
    free(ids);
}

TEST(ids_come_in_every_usual_form)
{
    struct ft_error err;
    uint32_t *ids = NULL, count;
    check_ids("1,2,3", 3);
    check_ids("[1, 2,\n 3]\n", 3);
    check_ids("1\n2\n", 2);
    check_ids("1", 1);
    check_ids("", 0);
    check_ids("[]", 0);
    CHECK_FAILS(ft_ids_parse("1,-2", 4, "test", &ids, &count, &err), FT_USAGE, "\"-2\" (byte 2)", &err);
    CHECK_FAILS(ft_ids_parse("1,2x", 4, "test", &ids, &count, &err), FT_USAGE, "\"2x\"", &err);
    CHECK_FAILS(ft_ids_parse("4294967295", 10, "test", &ids, &count, &err), FT_USAGE, "not a token id", &err);
    CHECK(!ids && count == 0);
    write_text(in_folder("list"), "[1, 2]");
    CHECK_OK(ft_ids_read(in_folder("list"), &ids, &count, &err), &err);
    CHECK_EQ(count, 2);
    free(ids);
}

static void read_config(const char *text, struct ft_generation_config *config)
{
    struct ft_error err;
    write_text(in_folder("generation_config.json"), text);
    write_text(in_folder("config.json"), "{\"eos_token_id\": 9}");
    CHECK_OK(ft_generation_config_read(config, folder, &err), &err);
}

TEST(sampling_defaults_follow_the_checkpoint)
{
    struct ft_generation_config config;
    struct ft_generate_options options;
    struct ft_sampling sampling;
    read_config("{\"eos_token_id\": [2, 0], \"do_sample\": false, \"temperature\": 0.7, \"top_p\": 0.9}",
                &config);
    CHECK_EQ(config.eos_count, 2);
    ft_generate_options_init(&options);
    ft_generate_resolve(&options, &config, &sampling);
    CHECK_NEAR(sampling.temperature, 0, 0);
    options.top_k = 5;
    options.top_k_given = true; /* whoever asks for top-k wants sampling */
    ft_generate_resolve(&options, &config, &sampling);
    CHECK_NEAR(sampling.temperature, 0.7f, 0);
    CHECK_NEAR(sampling.top_p, 0.9f, 0);
    CHECK_EQ(sampling.top_k, 5);
    options.temperature_given = true; /* 0 given by the user wins over everything */
    ft_generate_resolve(&options, &config, &sampling);
    CHECK_NEAR(sampling.temperature, 0, 0);
    read_config("{\"temperature\": 0.5, \"top_k\": 20}", &config);
    ft_generate_options_init(&options);
    ft_generate_resolve(&options, &config, &sampling);
    CHECK_NEAR(sampling.temperature, 0.5f, 0);
    CHECK_EQ(sampling.top_k, 20);
    CHECK_EQ(config.eos_count, 1); /* of config.json */
}

TEST(broken_generation_config_is_named)
{
    struct ft_generation_config config;
    struct ft_error err;
    write_text(in_folder("generation_config.json"), "{\"eos_token_id\": 1, \"temperature\": \"hot\"}");
    CHECK_FAILS(ft_generation_config_read(&config, folder, &err), FT_FORMAT, "temperature is not a number",
                &err);
    write_text(in_folder("generation_config.json"), "{\"top_p\": 3}");
    CHECK_FAILS(ft_generation_config_read(&config, folder, &err), FT_FORMAT, "outside 0 .. 1", &err);
    write_text(in_folder("generation_config.json"), "{");
    CHECK_FAILS(ft_generation_config_read(&config, folder, &err), FT_FORMAT, "generation_config.json", &err);
    unlink(in_folder("generation_config.json"));
    CHECK_OK(ft_generation_config_read(&config, folder, &err), &err);
    CHECK(!config.found && !config.sample);
}

TEST(memory_is_the_smaller_of_what_is_free_and_the_limit)
{
    static struct ft_topology topology;
    struct ft_machine machine;
    mkdir(in_folder("proc"), 0777);
    write_text(in_folder("proc/meminfo"), "MemTotal:  100 kB\nMemAvailable:    2048 kB\n");
    write_text(in_folder("proc/cpuinfo"), "processor\t: 0\nmodel name\t: Test CPU\n");
    topology.core_count = 3;
    ft_machine_probe(&machine, &topology, folder);
    CHECK_EQ(machine.ram_bytes, 2048 * 1024);
    CHECK(!strcmp(machine.name, "Test CPU"));
    CHECK_EQ(machine.cores_usable, 3);
    topology.memory_limit_bytes = 1 << 20;
    ft_machine_probe(&machine, &topology, folder);
    CHECK_EQ(machine.ram_bytes, 1 << 20);
    ft_machine_probe(&machine, &topology, "/nonexistent");
    CHECK_EQ(machine.ram_bytes, 1 << 20);
    CHECK(!strcmp(machine.name, "unknown CPU"));
}

static int all(int argc, char **argv)
{
    (void)argv;
    RUN(trace_is_read_back_as_placements)
    RUN(trace_that_hits_a_limit_ends_with_its_last_whole_frame)
    RUN(trace_without_frames_is_removed)
    RUN(tensor_map_is_a_safetensors_file)
    RUN(abandoned_tensor_map_leaves_nothing)
    RUN(tensor_map_without_room_fails_before_any_work)
    RUN(ids_come_in_every_usual_form)
    RUN(sampling_defaults_follow_the_checkpoint)
    RUN(broken_generation_config_is_named)
    RUN(memory_is_the_smaller_of_what_is_free_and_the_limit)
    printf("%d checks, %d failed\n", test_checks_, test_failures_);
    return test_failures_ || !test_checks_ ? 1 : 0;
}

int main(int argc, char **argv)
{
    char command[96];
    snprintf(folder, sizeof folder, "/tmp/ft-test-tools-XXXXXX");
    if (!mkdtemp(folder))
        return 1;
    int code = all(argc, argv);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) == 0 ? code : 1;
}
