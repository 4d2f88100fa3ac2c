/* SPDX-License-Identifier: Apache-2.0 */
/* ft bench decode on a tiny shape: its JSON is read back and must agree with itself; the bounds by hand. */
#include "tools/decode_bounds.h"
#include "tools/ft_bench.h"

#include "tests/test.h"

#include <fcntl.h>
#include <jansson.h>
#include <unistd.h>

#define SHAPE FT_DATA_DIR "/fixtures/qwen4_exp-bf16/config.json"
#define TINY FT_DATA_DIR "/ft-tiny/config.json"
#define TRACE FT_DATA_DIR "/ft-tiny/routing_trace.safetensors"
#define ARGS_MAX 40u

static char folder[] = "/tmp/ft-test-bench-decode-XXXXXX";

/* Runs the command with one of the streams in a file; *text is malloc'ed. */
static int run_stream(int stream, const char *const *arguments, char **text)
{
    char path[256], copies[ARGS_MAX][512], *argv[ARGS_MAX + 1] = {0};
    int argc = 0;
    for (; arguments[argc]; argc++) {
        snprintf(copies[argc], sizeof copies[argc], "%s", arguments[argc]);
        argv[argc] = copies[argc];
    }
    snprintf(path, sizeof path, "%s/out", folder);
    fflush(stdout);
    int kept = dup(stream), file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    dup2(file, stream);
    int code = ft_command_bench_decode(argc, argv);
    fflush(stdout);
    dup2(kept, stream);
    close(kept);
    off_t bytes = lseek(file, 0, SEEK_END);
    *text = calloc(1, (size_t)bytes + 1);
    if (*text && pread(file, *text, (size_t)bytes, 0) != bytes)
        (*text)[0] = '\0';
    close(file);
    return code;
}

static int run_command(const char *const *arguments, char **text)
{
    return run_stream(1, arguments, text);
}

static void check_refused(const char *const *arguments, const char *wanted)
{
    char *text;
    CHECK_EQ(run_stream(2, arguments, &text), 2);
    CHECK(text && strstr(text, wanted));
    free(text);
}

static json_t *run_json(const char *const *arguments)
{
    char *text;
    json_error_t where;
    CHECK_EQ(run_command(arguments, &text), 0);
    json_t *root = text ? json_loads(text, 0, &where) : NULL;
    if (!root)
        fprintf(stderr, "%d: %s\n", where.line, where.text);
    CHECK(root != NULL);
    free(text);
    return root;
}

static double number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_number(value))
        fprintf(stderr, "%s is missing\n", key);
    CHECK(json_is_number(value));
    return json_number_value(value);
}

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    CHECK(text != NULL);
    return text ? text : "";
}

/* What must hold for every row, whatever the machine does. Numbers are printed with 9 digits. */
static void check_row(const json_t *root, const json_t *row)
{
    double tok_s = number(row, "tok_s"), batch = number(row, "batch"),
           misses = number(row, "misses_per_step");
    double distinct = number(row, "distinct_experts_per_step"), expert = number(root, "expert_bytes");
    const json_t *bytes = json_object_get(row, "bytes_per_step");
    CHECK(!strcmp(text_of(row, "weights"), "synthetic weights"));
    CHECK_NEAR(tok_s, batch / number(row, "step_ms_mean") * 1e3, tok_s * 1e-6);
    CHECK_NEAR(number(row, "tok_s_median"), batch / number(row, "step_ms_median") * 1e3, tok_s * 1e-3);
    CHECK(number(row, "step_ms_min") <= number(row, "step_ms_median"));
    CHECK_NEAR(number(row, "hit_rate"), (distinct - misses) / distinct, 1e-6);
    CHECK_NEAR(number(row, "cpu_experts_per_step") + number(row, "fetches_per_step"), misses, 1e-6);
    CHECK_NEAR(number(row, "fetch_bytes_per_step"),
               (number(row, "fetches_per_step") - number(row, "copied_ahead_used_per_step")) * expert,
               1e-3 * expert);
    CHECK_NEAR(number(bytes, "missing_experts"), misses * expert, 1e-3 * expert);
    CHECK_NEAR(number(bytes, "resident_experts"), (distinct - misses) * expert, 1e-3 * expert);
    CHECK(number(bytes, "dense") > 0 && number(bytes, "state") > 0 && number(bytes, "kv") > 0);
    CHECK(number(row, "bound_tok_s") >= number(row, "serial_tok_s") && number(row, "serial_tok_s") > 0);
    CHECK_NEAR(number(row, "reached"), tok_s / number(row, "bound_tok_s"), 1e-6);
    CHECK_EQ((int)number(row, "policy_repairs"), 0);
    double ms = 0;
    const char *class;
    json_t *value;
    json_object_foreach(json_object_get(row, "ms_by_class"), class, value)
    {
        CHECK(json_number_value(value) >= 0);
        ms += json_number_value(value);
    }
    CHECK(ms > 0);
}

TEST(rows_of_all_strategies_agree_with_themselves)
{
    const char *const arguments[] = {"--shape",
                                     SHAPE,
                                     "--json",
                                     "--compare",
                                     "--moe-cache-rate",
                                     "0.5",
                                     "--context",
                                     "40",
                                     "--steps",
                                     "30",
                                     "--warmup",
                                     "10",
                                     "--batch",
                                     "2",
                                     "--no-pin",
                                     "--workers",
                                     "1",
                                     "--ceiling-seconds",
                                     "0.01",
                                     NULL};
    json_t *root = run_json(arguments), *rows = json_object_get(root, "rows"), *row;
    size_t i;
    CHECK_EQ(json_array_size(rows), 4);
    CHECK(!strcmp(text_of(root, "weights"), "synthetic weights"));
    CHECK(strstr(text_of(root, "command"), "ft bench decode --shape ") != NULL);
    CHECK_EQ(strlen(text_of(root, "date")), 20);
    json_array_foreach(rows, i, row)
    {
        const char *strategy = text_of(row, "strategy");
        double misses = number(row, "misses_per_step");
        check_row(root, row);
        CHECK_EQ((int)number(row, "slots"), 32);
        bool lands =
            strcmp(strategy, "cpu") != 0; /* in a buffer that is no slot; four layers of equal parts */
        CHECK_EQ((int)number(row, "landing_buffers"), lands ? 2 : 0);
        CHECK_EQ((int)number(row, "warm_slots"), lands ? 28 : 32);
        CHECK(number(row, "distinct_experts_per_step") > 16 &&
              number(row, "distinct_experts_per_step") <= 32);
        CHECK(number(row, "belady_misses_per_step") < number(row, "lru_misses_per_step"));
        CHECK(misses > number(row, "belady_misses_per_step"));
        if (!strcmp(strategy, "offload")) {
            CHECK_NEAR(misses, number(row, "lru_misses_per_step"), 1e-9); /* the replay is the engine */
            CHECK_NEAR(number(row, "fetches_per_step"), misses, 1e-9);
        }
        if (!strcmp(strategy, "cpu"))
            CHECK_NEAR(number(row, "cpu_experts_per_step"), misses, 1e-9);
    }
    json_decref(root);
}

TEST(every_expert_resident_misses_nothing)
{
    const char *const arguments[] = {"--shape",           SHAPE,  "--json",   "--strategy", "fused",
                                     "--steps",           "10",   "--no-pin", "--format",   "bf16",
                                     "--ceiling-seconds", "0.01", NULL};
    json_t *root = run_json(arguments), *row = json_array_get(json_object_get(root, "rows"), 0);
    check_row(root, row);
    CHECK_NEAR(number(row, "hit_rate"), 1, 0);
    CHECK_NEAR(number(row, "belady_misses_per_step"), 0, 0);
    CHECK(!strcmp(text_of(row, "format"), "bf16"));
    json_decref(root);
}

TEST(without_a_device_every_expert_runs_on_the_cpu)
{
    const char *const arguments[] = {
        "--shape", SHAPE,      "--json",    "--strategy",        "cpu",  "--steps",
        "10",      "--no-pin", "--prefill", "--context",         "150",  "--batch",
        "3",       "--format", "mxfp4",     "--ceiling-seconds", "0.01", NULL};
    json_t *root = run_json(arguments), *row = json_array_get(json_object_get(root, "rows"), 0);
    check_row(root, row);
    CHECK_NEAR(number(row, "hit_rate"), 0, 0);
    CHECK_NEAR(number(row, "cpu_experts_per_step"), number(row, "distinct_experts_per_step"), 1e-9);
    CHECK(!strcmp(text_of(row, "device"), "none"));
    const json_t *prefill = json_object_get(row, "prefill");
    CHECK_EQ((int)number(prefill, "rows"), 150); /* the context, when nothing else is asked for */
    CHECK_EQ((int)number(prefill, "chunks"), 2);
    CHECK(json_is_null(json_object_get(prefill, "link_bound_s")));
    json_decref(root);
}

TEST(strategy_cpu_has_no_bound_of_a_link)
{
    const char *const arguments[] = {
        "--shape",   SHAPE,        "--json", "--strategy",        "cpu",  "--device",
        "host",      "--steps",    "5",      "--context",         "40",   "--no-pin",
        "--prefill", "--link-gbs", "0.1",    "--ceiling-seconds", "0.01", NULL};
    json_t *root = run_json(arguments), *row = json_array_get(json_object_get(root, "rows"), 0);
    const json_t *prefill = json_object_get(row, "prefill");
    CHECK(!strcmp(text_of(row, "device"), "host"));
    CHECK(json_is_null(json_object_get(prefill, "link_bound_s")));
    CHECK(json_is_null(json_object_get(prefill, "of_link_bound")));
    json_decref(root);
    char *text;
    const char *const plain[] = {"--shape",    SHAPE, "--strategy",        "cpu",  "--device", "host",
                                 "--steps",    "5",   "--context",         "40",   "--no-pin", "--prefill",
                                 "--link-gbs", "0.1", "--ceiling-seconds", "0.01", NULL};
    CHECK_EQ(run_command(plain, &text), 0);
    CHECK(text && strstr(text, "prefill alone: 40 rows") && !strstr(text, "of the link's bound"));
    free(text);
}

TEST(a_prompt_is_read_alone_and_beside_sequences_that_decode)
{
    const char *const arguments[] = {
        "--shape", SHAPE,     "--json",   "--strategy",       "offload", "--steps",           "40",
        "--batch", "2",       "--no-pin", "--moe-cache-rate", "0.4",     "--prefill",         "--prompt",
        "100",     "--chunk", "128",      "--link-gbs",       "0.1",     "--ceiling-seconds", "0.01",
        NULL};
    json_t *root = run_json(arguments), *row = json_array_get(json_object_get(root, "rows"), 0);
    const json_t *prefill = json_object_get(row, "prefill");
    check_row(root, row);
    CHECK_EQ((int)number(row, "batch"), 2);
    CHECK_EQ((int)number(prefill, "rows"), 100);
    CHECK_EQ((int)number(prefill, "chunks"), 1);
    CHECK_NEAR(number(prefill, "alone_rows_s") * number(prefill, "alone_s"), 100, 1e-4);
    /* 4 layers of 16 experts, less those in slots, in one chunk over a link of 0.1 GB/s, played exactly */
    double bound = (64 - number(row, "slots")) * number(root, "expert_bytes") / 0.1e9;
    CHECK_NEAR(number(prefill, "link_bound_s"), bound, 0.2 * bound); /* by the link's measured speed */
    CHECK(number(prefill, "alone_s") >= 0.99 * bound);
    CHECK_NEAR(number(prefill, "of_link_bound"), number(prefill, "link_bound_s") / number(prefill, "alone_s"),
               1e-6);
    CHECK(json_is_true(json_object_get(prefill, "beside_whole")));
    CHECK_EQ((int)number(prefill, "beside_rows"), 100);
    CHECK(number(prefill, "slices") >= 1 && number(prefill, "slices") <= 4);
    CHECK(number(prefill, "beside_tokens") > 0);
    CHECK_NEAR(number(prefill, "rate_kept"), number(prefill, "beside_tok_s") / number(row, "tok_s"), 1e-6);
    CHECK(number(prefill, "gap_ms_max") > 0 && number(prefill, "after_tok_s") > 0);
    CHECK(number(prefill, "hit_rate_after") > 0 && number(prefill, "hit_rate_kept") > 0.8);
    json_decref(root);
}

TEST(recorded_routing_and_a_ple_table_are_used)
{
    char table[300];
    snprintf(table, sizeof table, "%s/table", folder);
    const char *const arguments[] = {"--shape",
                                     TINY,
                                     "--json",
                                     "--strategy",
                                     "offload",
                                     "--steps",
                                     "40",
                                     "--no-pin",
                                     "--routing",
                                     TRACE,
                                     "--batch",
                                     "2",
                                     "--moe-cache-rate",
                                     "0.25",
                                     "--ple-file",
                                     table,
                                     "--ple-bytes",
                                     "32M",
                                     "--ceiling-seconds",
                                     "0.01",
                                     NULL};
    for (int again = 0; again < 2; again++) { /* the table is made, then found */
        json_t *root = run_json(arguments), *row = json_array_get(json_object_get(root, "rows"), 0);
        check_row(root, row);
        CHECK(strstr(text_of(root, "routing"), "recorded") != NULL);
        CHECK(!strcmp(text_of(root, "ple"), table));
        CHECK_EQ((int)number(row, "warm_slots"), 0);
        CHECK_NEAR(number(row, "misses_per_step"), number(row, "lru_misses_per_step"), 1e-9);
        CHECK(number(row, "hit_rate") > 0.2); /* real routing has locality */
        json_decref(root);
    }
    CHECK_EQ(access(table, F_OK), 0);
    unlink(table);
}

TEST(text_says_that_the_weights_are_synthetic)
{
    const char *const arguments[] = {"--shape", SHAPE,      "--strategy",        "hybrid", "--steps",
                                     "5",       "--no-pin", "--ceiling-seconds", "0.01",   NULL};
    char *text;
    CHECK_EQ(run_command(arguments, &text), 0);
    CHECK(text && strstr(text, "SYNTHETIC WEIGHTS"));
    CHECK(text && strstr(text, "PLE off"));
    CHECK(text && strstr(text, "bound, Belady's misses"));
    free(text);
}

TEST(wrong_use_is_refused)
{
    const char *const unknown[] = {"--shape", "qwen9", NULL};
    const char *const traced[] = {"--shape", SHAPE, "--compare", "--trace", "/tmp/none/t", NULL};
    const char *const other[] = {"--shape", SHAPE, "--routing", TRACE, NULL};
    char *text;
    CHECK_EQ(run_command(unknown, &text), 2);
    free(text);
    CHECK_EQ(run_command(traced, &text), 2);
    free(text);
    CHECK_EQ(run_command(other, &text), 2); /* recorded from 8 layers, this shape has 4 */
    free(text);
}

TEST(a_share_is_for_strategy_hybrid)
{
    const char *const alone[] = {"--shape", SHAPE, "--strategy", "offload", "--hybrid-share", "0.5", NULL};
    const char *const compared[] = {
        "--shape",  SHAPE, "--json",           "--compare", "--hybrid-share",    "0.25",
        "--steps",  "5",   "--moe-cache-rate", "0.5",       "--ceiling-seconds", "0.01",
        "--no-pin", NULL};
    check_refused(alone, "--hybrid-share is the share");
    json_t *root = run_json(compared), *rows = json_object_get(root, "rows");
    CHECK_EQ(json_array_size(rows), 4);
    CHECK(!strcmp(text_of(json_array_get(rows, 2), "strategy"), "hybrid"));
    CHECK_NEAR(number(json_array_get(rows, 2), "fetch_share"), 0.25, 1e-9);
    CHECK_NEAR(number(json_array_get(rows, 0), "fetch_share"), 1, 0); /* offload: all */
    json_decref(root);
}

TEST(options_of_a_prompt_need_the_prompt)
{
    static const char *const options[] = {"--prompt", "--chunk", "--beside"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char wanted[64];
        const char *const arguments[] = {"--shape", SHAPE, "--steps", "1", options[i], "64", NULL};
        snprintf(wanted, sizeof wanted, "%s is about the prompt that --prefill reads", options[i]);
        check_refused(arguments, wanted);
    }
}

/* ---- bounds ---- */

TEST(bounds_are_bytes_over_bandwidths)
{
    const struct ft_ceilings c = {.cpu_read_bytes_per_s = 100,
                                  .device_read_bytes_per_s = 1000,
                                  .link_bytes_per_s = 50,
                                  .cpu_expert_bytes_per_s = 80,
                                  .both_cpu_bytes_per_s = 60,
                                  .both_link_bytes_per_s = 20};
    struct ft_decode_traffic t = {.dense = 700, .state = 50, .kv = 50};
    ft_decode_traffic_experts(&t, 10, 30, 10);
    CHECK_NEAR(t.resident, 200, 0);
    CHECK_NEAR(t.missing, 100, 0);
    struct ft_decode_bound bound = ft_decode_bound(&t, &c, FT_STRATEGY_OFFLOAD, FT_DEVICE_HOST);
    CHECK_NEAR(bound.serial_s, 1.1 + 2, 1e-12); /* what is fetched is read by the device too */
    CHECK_NEAR(bound.overlap_s, 2, 1e-12);
    bound = ft_decode_bound(&t, &c, FT_STRATEGY_CPU, FT_DEVICE_CUDA);
    CHECK_NEAR(bound.serial_s, 1 + 1.25, 1e-12);
    CHECK_NEAR(bound.overlap_s, 1.25, 1e-12);
    bound = ft_decode_bound(&t, &c, FT_STRATEGY_HYBRID, FT_DEVICE_HOST);
    CHECK_NEAR(bound.serial_s, 1.025 + 1.25, 1e-12);
    bound = ft_decode_bound(&t, &c, FT_STRATEGY_CPU, FT_DEVICE_NONE);
    CHECK_NEAR(bound.serial_s, 8 + 300.0 / 80, 1e-12);
    CHECK_NEAR(bound.overlap_s, 11, 1e-12);
    const struct ft_ceilings unknown = {.cpu_read_bytes_per_s = 100};
    CHECK_NEAR(ft_decode_bound(&t, &unknown, FT_STRATEGY_OFFLOAD, FT_DEVICE_CUDA).serial_s, 0, 0);
}

TEST(keys_are_counted_as_far_as_attention_looks)
{
    static struct ft_model model = {.layer_count = 3,
                                    .kv_head_count = 2,
                                    .head_dim = 8,
                                    .window = 100,
                                    .indexer_budget = 64,
                                    .indexer_ratio = 4,
                                    .indexer_dim = 16};
    const struct ft_weight_sizes sizes = {.dense_bytes = 1000, .embed_bytes = 300, .head_bytes = 400};
    struct ft_decode_traffic t;
    model.layers[0].attention = FT_ATTENTION_FULL;
    model.layers[1].attention = FT_ATTENTION_SLIDING;
    model.layers[2].attention = FT_ATTENTION_SPARSE;
    for (uint32_t i = 0; i < 3; i++)
        model.layers[i].ple = FT_PLE_NONE;
    ft_decode_traffic_init(&t, &model, &sizes, 2, 1000, 4);
    CHECK_NEAR(t.dense, 1400, 0);
    CHECK_NEAR(t.kv, 2 * 4 * (32 * (1000 + 100 + 67) + 1000 / 4 * 16), 0);
}

int main(int argc, char **argv)
{
    (void)argv;
    if (!mkdtemp(folder))
        return 1;
    RUN(rows_of_all_strategies_agree_with_themselves)
    RUN(every_expert_resident_misses_nothing)
    RUN(without_a_device_every_expert_runs_on_the_cpu)
    RUN(strategy_cpu_has_no_bound_of_a_link)
    RUN(a_prompt_is_read_alone_and_beside_sequences_that_decode)
    RUN(recorded_routing_and_a_ple_table_are_used)
    RUN(text_says_that_the_weights_are_synthetic)
    RUN(wrong_use_is_refused)
    RUN(a_share_is_for_strategy_hybrid)
    RUN(options_of_a_prompt_need_the_prompt)
    RUN(bounds_are_bytes_over_bandwidths)
    RUN(keys_are_counted_as_far_as_attention_looks)
    char path[300];
    snprintf(path, sizeof path, "%s/out", folder);
    unlink(path);
    rmdir(folder);
    printf("%d checks, %d failed\n", test_checks_, test_failures_);
    return test_failures_ || !test_checks_ ? 1 : 0;
}
