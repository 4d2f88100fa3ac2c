/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults of a step, and what is left of the engine afterwards: reads that fail, policies that answer
 * nonsense, lanes that are stuck, slow links with hardly any slot, interrupts and cancels, prompts that end
 * on every kind of boundary. Whatever happens, a text that comes out is the reference's.
 */
#include "jobs/session_internal.h"
#include "tests/fixture_session.h"
#include "tests/io_refusal.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define EVENTS_MAX (2 * FT_SEQUENCES_MAX)
#define TABLE_FILE "model-00001-of-00002.safetensors"

/* Small outside, so that the arrays of a test stay off the stack. */
static uint32_t tokens[FT_SEQUENCES_MAX][256], counts[FT_SEQUENCES_MAX];

static void forget_texts(void)
{
    memset(tokens, 0, sizeof tokens);
    memset(counts, 0, sizeof counts);
}

static bool is_text(const struct prompts *p, uint32_t prompt, uint32_t handle)
{
    return counts[handle] == p->want_count[prompt] &&
           memcmp(tokens[handle], p->want[prompt], p->want_count[prompt] * sizeof(uint32_t)) == 0;
}

/* One step; tokens are appended, failures and ends counted. */
static int step_once(struct ft_session *session, uint32_t *failed, uint32_t *ended, struct ft_error *err)
{
    struct ft_event events[EVENTS_MAX];
    uint32_t count;
    int status = ft_session_step(session, events, EVENTS_MAX, &count, err);
    for (uint32_t i = 0; status == FT_OK && i < count; i++) {
        if (events[i].kind == FT_EVENT_TOKEN)
            tokens[events[i].sequence][counts[events[i].sequence]++] = events[i].token;
        *failed += events[i].kind == FT_EVENT_FAILED;
        *ended += events[i].kind == FT_EVENT_END;
        if (events[i].kind == FT_EVENT_FAILED)
            ft_error_set(err, FT_INTERNAL, "%s", events[i].message);
    }
    return status;
}

/* All prompts through `together` handles; every text must be the reference's. */
static void check_all_texts(struct ft_session *session, const struct prompts *p, uint32_t together)
{
    struct ft_error err;
    for (uint32_t first = 0; first < p->count; first += together) {
        uint32_t handles[8], count = FT_MIN(together, p->count - first);
        forget_texts();
        for (uint32_t i = 0; i < count; i++) {
            struct ft_request request = prompts_request(p, first + i);
            CHECK_OK(ft_session_submit(session, &request, &handles[i], &err), &err);
        }
        CHECK_EQ(fixture_drain(session, tokens, counts), 0);
        for (uint32_t i = 0; i < count; i++) {
            CHECK(is_text(p, first + i, handles[i]));
            ft_session_release(session, handles[i]);
        }
    }
}

static const struct fixture_config cpu = {.strategy = FT_STRATEGY_CPU, .workers = 1, .sequences = 8};
static const struct fixture_config offload = {
    .strategy = FT_STRATEGY_OFFLOAD, .device = FT_DEVICE_HOST, .workers = 1, .sequences = 4};
static const struct fixture_config hybrid = {.strategy = FT_STRATEGY_HYBRID,
                                             .device = FT_DEVICE_HOST,
                                             .workers = 1,
                                             .sequences = 4,
                                             .slots = 12,
                                             .share = 0.5};

/* ---- reads that fail ---- */

struct copy {
    char dir[64], table[160];
    char *bytes; /* of the file with the tables */
    size_t count;
};

static bool copy_make(struct copy *copy)
{
    static const char *const names[] = {"config.json", "model.safetensors.index.json", TABLE_FILE,
                                        "model-00002-of-00002.safetensors"};
    snprintf(copy->dir, sizeof copy->dir, "/tmp/ft-step-XXXXXX");
    if (!mkdtemp(copy->dir))
        return false;
    for (uint32_t i = 0; i < FT_COUNT_OF(names); i++) {
        char from[4200], to[160];
        snprintf(from, sizeof from, "%s/%s", TINY_DIR, names[i]);
        snprintf(to, sizeof to, "%s/%s", copy->dir, names[i]);
        FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
        struct stat info;
        if (!in || !out || fstat(fileno(in), &info))
            return false;
        size_t count = (size_t)info.st_size;
        char *bytes = malloc(count);
        bool good = bytes && fread(bytes, 1, count, in) == count && fwrite(bytes, 1, count, out) == count;
        fclose(in);
        good = fclose(out) == 0 && good;
        if (!strcmp(names[i], TABLE_FILE)) {
            copy->bytes = bytes;
            copy->count = count;
            memcpy(copy->table, to, sizeof to);
        } else {
            free(bytes);
        }
        if (!good)
            return false;
    }
    return true;
}

static bool copy_mend(const struct copy *copy)
{
    int fd = open(copy->table, O_WRONLY);
    bool good = fd >= 0 && pwrite(fd, copy->bytes, copy->count, 0) == (ssize_t)copy->count;
    if (fd >= 0)
        close(fd);
    return good;
}

static void copy_remove(struct copy *copy)
{
    static const char *const names[] = {"config.json", "model.safetensors.index.json", TABLE_FILE,
                                        "model-00002-of-00002.safetensors"};
    for (uint32_t i = 0; i < FT_COUNT_OF(names); i++) {
        char path[160];
        snprintf(path, sizeof path, "%s/%s", copy->dir, names[i]);
        unlink(path);
    }
    rmdir(copy->dir);
    free(copy->bytes);
}

/* The file with the PLE tables is cut short under a running engine, then mended. */
static void lose_tables(const struct fixture_config *config)
{
    struct copy copy = {.bytes = NULL};
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    uint32_t handles[3], failed = 0, ended = 0;
    REQUIRE(prompts_read(&p));
    REQUIRE(copy_make(&copy));
    CHECK_OK(fixture_open(&engine, copy.dir, config, &err), &err);
    REQUIRE(engine.session != NULL);
    forget_texts();
    for (uint32_t i = 0; i < 2; i++) {
        struct ft_request request = prompts_request(&p, 6 + i);
        CHECK_OK(ft_session_submit(engine.session, &request, &handles[i], &err), &err);
        for (int s = 0; s < 4; s++)
            CHECK_OK(step_once(engine.session, &failed, &ended, &err), &err);
    }
    CHECK_EQ(failed + ended, 0);
    CHECK(truncate(copy.table, 8192) == 0);
    /* The second prompt may be half done: then one step fails the first sequence, and another one the second. */
    for (int s = 0; s < 100 && !ft_session_is_idle(engine.session); s++)
        CHECK_OK(step_once(engine.session, &failed, &ended, &err), &err);
    CHECK_EQ(failed, 2);
    CHECK(strstr(err.message, TABLE_FILE) != NULL);
    struct ft_session_stats stats;
    ft_session_stats(engine.session, &stats);
    CHECK(stats.failed_steps == 1 || stats.failed_steps == 2);
    CHECK(ft_session_is_idle(engine.session));
    CHECK(copy_mend(&copy));
    struct ft_request later = prompts_request(&p, 1);
    CHECK_OK(ft_session_submit(engine.session, &later, &handles[2], &err), &err);
    for (uint32_t i = 0; i < 2; i++)
        CHECK_OK(ft_session_resume(engine.session, handles[i], &err), &err);
    CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
    CHECK(is_text(&p, 6, handles[0]));
    CHECK(is_text(&p, 7, handles[1]));
    CHECK(is_text(&p, 1, handles[2]));
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    copy_remove(&copy);
    prompts_free(&p);
}

TEST(a_failed_table_read_fails_its_step_and_sequences_resume_when_it_is_mended)
{
    struct fixture_config config = cpu;
    lose_tables(&config);
    config = hybrid;
    lose_tables(&config);
}

/* ---- a policy that answers nonsense ---- */

struct nonsense {
    uint64_t random, calls;
};

static uint64_t nonsense_bytes(const struct ft_policy_params *params)
{
    (void)params;
    return sizeof(struct nonsense);
}

static int nonsense_init(void *state, const struct ft_policy_params *params, struct ft_error *err)
{
    (void)params;
    (void)err;
    ((struct nonsense *)state)->random = 88172645463325252ull;
    return FT_OK;
}

static void nonsense_decide(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    struct nonsense *own = state;
    own->calls++;
    for (uint32_t i = 0; i < in->active_count; i++) {
        uint64_t r = random_next(&own->random);
        out->place[i] = (uint8_t)(r % 8 ? r >> 8 & 3 : r >> 8);
        out->reason[i] = (uint8_t)(r >> 16);
        out->victim[i] = r >> 24 & 1 ? (uint32_t)(r >> 32) : (uint32_t)(r >> 32) % (in->slots.count + 1);
        out->predicted_ns[i] = r >> 25 & 1 ? NAN : (float)(int32_t)(r >> 28);
    }
    out->prefetch_count = random_below(&own->random, 3) ? 0 : 1000; /* no room for one was given */
}

static const struct ft_policy nonsense = {.abi = FT_POLICY_ABI,
                                          .name = "nonsense",
                                          .state_bytes = nonsense_bytes,
                                          .init = nonsense_init,
                                          .decide_layer = nonsense_decide};

static void count_bad_records(void *context, const struct ft_trace_step *step)
{
    uint32_t *bad = context;
    for (uint32_t i = 0; i < step->record_count; i++) {
        const struct ft_trace_record *r = &step->records[i];
        *bad += r->kind == FT_RECORD_CHOICE &&
                (r->place >= FT_PLACE_COUNT || r->detail >= FT_REASON_COUNT || !(r->predicted_ns >= 0));
        *bad += r->end_ns < r->start_ns;
    }
}

TEST(a_policy_that_answers_nonsense_is_repaired_and_changes_no_text)
{
    struct prompts p;
    struct ft_error err;
    REQUIRE(prompts_read(&p));
    for (uint32_t run = 0; run < 3; run++) {
        struct ft_engine engine;
        struct fixture_config config = run ? hybrid : cpu;
        uint32_t bad = 0;
        config.slots = run ? (run == 1 ? 12 : 1) : 0;
        CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
        CHECK_OK(session_reopen(&engine,
                                &(struct session_change){.policy = &nonsense,
                                                         .link_delay_ns = 20000,
                                                         .seed = 3,
                                                         .trace = count_bad_records,
                                                         .trace_context = &bad},
                                &err),
                 &err);
        REQUIRE(engine.session != NULL);
        check_all_texts(engine.session, &p, 4);
        struct ft_session_stats stats;
        ft_session_stats(engine.session, &stats);
        CHECK(stats.policy_repairs > 0);
        CHECK_EQ(stats.failed_steps, 0);
        CHECK_EQ(bad, 0);
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
    prompts_free(&p);
}

TEST(a_policy_with_another_abi_is_refused)
{
    struct ft_error err;
    struct ft_engine engine;
    struct ft_policy old = nonsense;
    old.abi = FT_POLICY_ABI + 1;
    CHECK_OK(fixture_open(&engine, TINY_DIR, &cpu, &err), &err);
    CHECK_FAILS(session_reopen(&engine, &(struct session_change){.policy = &old}, &err), FT_USAGE,
                "nonsense has ABI", &err);
    CHECK(engine.session == NULL);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
}

/* ---- a lane that is stuck ---- */

static void sleepy_decide(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    struct timespec second = {.tv_sec = 1};
    ((struct nonsense *)state)->calls++;
    nanosleep(&second, NULL);
    ft_policy_safe.decide_layer(NULL, in, out);
}

static const struct ft_policy sleepy = {.abi = FT_POLICY_ABI,
                                        .name = "sleepy",
                                        .state_bytes = nonsense_bytes,
                                        .init = nonsense_init,
                                        .decide_layer = sleepy_decide};

static double seconds_since(const struct timespec *start)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - start->tv_sec) + 1e-9 * (double)(now.tv_nsec - start->tv_nsec);
}

/* In a child, because what a stuck lane may still touch is left behind on purpose. Returns what is wrong. */
static int time_out(const struct fixture_config *config)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    struct ft_event events[EVENTS_MAX];
    uint32_t count, handles[2];
    struct timespec start;
    if (!prompts_read(&p) || fixture_open(&engine, TINY_DIR, config, &err) != FT_OK)
        return 1;
    struct session_change change = {.policy = &sleepy, .step_timeout_ns = 100000000u};
    if (session_reopen(&engine, &change, &err) != FT_OK)
        return 2;
    for (uint32_t i = 0; i < 2; i++) {
        struct ft_request request = prompts_request(&p, i);
        if (ft_session_submit(engine.session, &request, &handles[i], &err) != FT_OK)
            return 3;
    }
    clock_gettime(CLOCK_MONOTONIC, &start);
    if (ft_session_step(engine.session, events, EVENTS_MAX, &count, &err) != FT_OK || count != 2)
        return 4;
    if (seconds_since(&start) > 0.9)
        return 5; /* the watchdog came late */
    for (uint32_t i = 0; i < count; i++)
        if (events[i].kind != FT_EVENT_FAILED || !strstr(events[i].message, "a lane is stuck"))
            return 6;
    for (int again = 0; again < 2; again++)
        if (ft_session_step(engine.session, events, EVENTS_MAX, &count, &err) != FT_TIMEOUT || count ||
            !strstr(err.message, "a lane is stuck"))
            return 7;
    struct ft_request late = prompts_request(&p, 2);
    uint32_t handle;
    if (ft_session_resume(engine.session, handles[0], &err) != FT_TIMEOUT ||
        ft_session_submit(engine.session, &late, &handle, &err) != FT_TIMEOUT)
        return 8;
    ft_session_release(engine.session, handles[1]);
    /* The lane wakes up while everything is taken down, and once more behind that. */
    if (ft_engine_close(&engine, &err) != FT_OK || seconds_since(&start) > 20)
        return 9;
    struct timespec pause = {.tv_sec = 3};
    nanosleep(&pause, NULL);
    prompts_free(&p);
    return 0;
}

TEST(a_stuck_lane_becomes_an_error_and_close_comes_back)
{
    static const struct fixture_config *const configs[] = {&cpu, &offload};
    for (uint32_t i = 0; i < 2; i++) {
        int status = -1;
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            alarm(60); /* a hang is a failure, not a wait */
            _exit(time_out(configs[i]));
        }
        CHECK(child > 0 && waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status));
        CHECK_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
    }
}

static void slow_decide(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    struct timespec pause = {.tv_nsec = 30000000};
    ((struct nonsense *)state)->calls++;
    nanosleep(&pause, NULL);
    ft_policy_safe.decide_layer(NULL, in, out);
}

static const struct ft_policy slow = {.abi = FT_POLICY_ABI,
                                      .name = "slow",
                                      .state_bytes = nonsense_bytes,
                                      .init = nonsense_init,
                                      .decide_layer = slow_decide};

/* Three tokens, a quarter of a second each, under a watchdog of 2 s. Returns what is wrong. */
static int run_slowly(void)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    uint32_t handle;
    if (!prompts_read(&p) || fixture_open(&engine, TINY_DIR, &offload, &err) != FT_OK)
        return 1;
    struct session_change change = {.policy = &slow, .step_timeout_ns = 2000000000u};
    if (session_reopen(&engine, &change, &err) != FT_OK)
        return 2;
    struct ft_request request = prompts_request(&p, 0);
    request.max_tokens = 3;
    if (ft_session_submit(engine.session, &request, &handle, &err) != FT_OK)
        return 3;
    forget_texts();
    if (fixture_drain(engine.session, tokens, counts))
        return 4;
    if (counts[handle] != 3 || memcmp(tokens[handle], p.want[0], 3 * sizeof(uint32_t)) != 0)
        return 5;
    return ft_engine_close(&engine, &err) == FT_OK ? 0 : 6;
}

/* Ctrl-Z, a coffee, fg: time in which nobody could work is no sign of a dead lane. */
TEST(the_watchdog_does_not_count_time_in_which_the_process_was_stopped)
{
    struct timespec before = {.tv_nsec = 600000000}, stopped = {.tv_sec = 3};
    int status = -1;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        _exit(run_slowly());
    }
    REQUIRE(child > 0);
    nanosleep(&before, NULL);
    CHECK(kill(child, SIGSTOP) == 0);
    nanosleep(&stopped, NULL);
    CHECK(kill(child, SIGCONT) == 0);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
}

/* ---- refused ways to read ---- */

/* All texts, and somebody said what is slower than it could be. */
static int read_the_slow_way(void)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    int failures = test_failures_;
    if (!prompts_read(&p) || fixture_open(&engine, TINY_DIR, &hybrid, &err) != FT_OK)
        return 1;
    if (!engine.load.note[0] || !ft_session_note(engine.session)[0])
        return 2;
    printf("     note: %s\n", ft_session_note(engine.session));
    check_all_texts(engine.session, &p, 4);
    return ft_engine_close(&engine, &err) != FT_OK || test_failures_ != failures ? 3 : 0;
}

TEST(where_io_uring_or_direct_reads_are_refused_a_note_says_so_and_the_texts_are_the_same)
{
    int uring = run_in_child(refuse_io_uring, EPERM, read_the_slow_way);
    int missing = run_in_child(refuse_io_uring, ENOSYS, read_the_slow_way);
    int direct = run_in_child(refuse_direct, EINVAL, read_the_slow_way);
    if (uring == 77 || missing == 77 || direct == 77)
        printf("     skipped in part: no seccomp filter may be installed here\n");
    CHECK(uring == 0 || uring == 77);
    CHECK(missing == 0 || missing == 77);
    CHECK(direct == 0 || direct == 77);
}

/* ---- leases ---- */

/* Three slots, up to 16 experts a layer, fetches that end when they like. Test builds fill a slot with NaN
 * before it is filled again, so a reader of a slot that was taken too early would show in the text. */
TEST(three_slots_and_random_link_delays_change_no_text)
{
    struct prompts p;
    struct ft_error err;
    REQUIRE(prompts_read(&p));
    for (uint32_t run = 0; run < 3; run++) {
        struct ft_engine engine;
        struct fixture_config config = run == 2 ? hybrid : offload;
        config.slots = 3;
        config.chunk = 5;
        config.link_delay_us = 200;
        config.workers = run ? 2 : 1;
        CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
        REQUIRE(engine.session != NULL);
        check_all_texts(engine.session, &p, 4);
        struct ft_session_stats stats;
        ft_session_stats(engine.session, &stats);
        CHECK(stats.fetches > 1000);
        CHECK_EQ(stats.policy_repairs, 0);
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
    prompts_free(&p);
}

/* Test builds take the link's thread off its core right after it made a device group ready (jobs/step.c): the
 * group, its layer and the next router may be over when it goes on, and the group's place may hold a CPU job
 * by then. */
TEST(a_link_thread_that_loses_its_core_completes_nothing_twice)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    REQUIRE(prompts_read(&p));
    struct fixture_config config = hybrid;
    config.slots = 60;
    config.share = 0.1;
    config.link_delay_us = 1;
    config.workers = 2;
    CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
    REQUIRE(engine.session != NULL);
    check_all_texts(engine.session, &p, 4);
    struct ft_session_stats stats;
    ft_session_stats(engine.session, &stats);
    CHECK(stats.fetches > 100 && stats.cpu_experts > 100);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    prompts_free(&p);
}

/* ---- captures and limits ---- */

TEST(captured_logits_do_not_depend_on_the_chunk_and_name_the_sampled_token)
{
    struct prompts p;
    struct ft_error err;
    REQUIRE(prompts_read(&p));
    uint32_t rows = p.id_count[2] + p.want_count[2] - 1, vocab = 0;
    float *logits[3] = {NULL};
    static const uint32_t chunks[] = {128, 5, 1};
    for (uint32_t run = 0; run < 3; run++) {
        struct ft_engine engine;
        struct fixture_config config = cpu;
        config.all_logits = true;
        config.chunk = chunks[run];
        config.sequences = run == 2 ? 1 : 8;
        CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
        REQUIRE(engine.session != NULL);
        vocab = engine.model->vocab;
        logits[run] = calloc((size_t)rows * vocab, sizeof(float));
        struct ft_capture capture = {.row_count = rows, .logits = logits[run]};
        struct ft_request request = prompts_request(&p, 2);
        request.capture = &capture;
        uint32_t handle;
        forget_texts();
        CHECK_OK(ft_session_submit(engine.session, &request, &handle, &err), &err);
        CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
        CHECK(is_text(&p, 2, handle));
        for (uint32_t t = 0; t < counts[handle]; t++) {
            const float *row = logits[run] + (size_t)(p.id_count[2] - 1 + t) * vocab;
            uint32_t best = 0;
            for (uint32_t v = 1; v < vocab; v++)
                best = row[v] > row[best] ? v : best;
            CHECK_EQ(best, tokens[handle][t]);
        }
        CHECK(fixture_error(logits[run], logits[0], (uint64_t)rows * vocab) < 1e-4);
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
    for (uint32_t run = 0; run < 3; run++)
        free(logits[run]);
    prompts_free(&p);
}

TEST(requests_beyond_the_limits_leave_nothing_behind)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    struct ft_event events[2];
    uint32_t handle, handles[4], count, stops[FT_STOP_IDS_MAX + 1] = {0};
    float row[1];
    REQUIRE(prompts_read(&p));
    CHECK_OK(fixture_open(&engine, TINY_DIR, &offload, &err), &err);
    REQUIRE(engine.session != NULL);
    uint32_t pages = engine.session->kv.free_count, page = engine.plan.page_tokens;
    CHECK_EQ(pages, engine.plan.page_count);
    struct ft_request request = prompts_request(&p, 0);
    request.stop_ids = stops;
    request.stop_count = FT_STOP_IDS_MAX + 1;
    CHECK_FAILS(ft_session_submit(engine.session, &request, &handle, &err), FT_LIMIT, "stop tokens", &err);
    request.stop_count = 0;
    struct ft_capture capture = {.row_count = 1, .logits = row};
    request.capture = &capture;
    CHECK_FAILS(ft_session_submit(engine.session, &request, &handle, &err), FT_USAGE, "all_logits", &err);
    request.capture = NULL;
    request.max_tokens = pages * page - request.prompt_count + 1;
    CHECK_FAILS(ft_session_submit(engine.session, &request, &handle, &err), FT_LIMIT, "--kv-tokens", &err);
    request.max_tokens = UINT32_MAX;
    CHECK_FAILS(ft_session_submit(engine.session, &request, &handle, &err), FT_LIMIT, "--kv-tokens", &err);
    /* The whole pool for one; another waits; and then there is room again. */
    request.max_tokens = pages * page - request.prompt_count;
    CHECK_OK(ft_session_submit(engine.session, &request, &handles[0], &err), &err);
    CHECK_EQ(engine.session->kv.free_count, 0);
    request = prompts_request(&p, 0);
    CHECK_FAILS(ft_session_submit(engine.session, &request, &handle, &err), FT_LIMIT, "room for 0 more",
                &err);
    CHECK_FAILS(ft_session_step(engine.session, events, 2, &count, &err), FT_USAGE, "events", &err);
    ft_session_release(engine.session, handles[0]);
    CHECK_EQ(engine.session->kv.free_count, pages);
    check_all_texts(engine.session, &p, 4);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    prompts_free(&p);
}

/* ---- interrupts and cancels ---- */

static void *interrupt_later(void *session)
{
    struct timespec pause = {.tv_nsec = 3000000};
    nanosleep(&pause, NULL);
    ft_session_interrupt(session);
    return NULL;
}

TEST(an_interrupt_stops_between_steps_and_the_text_goes_on_after_it)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    REQUIRE(prompts_read(&p));
    struct fixture_config config = hybrid;
    config.link_delay_us = 50;
    CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
    REQUIRE(engine.session != NULL);
    for (uint32_t round = 0; round < 5; round++) {
        uint32_t handles[2], failed = 0, ended = 0, interrupts = 0;
        pthread_t thread;
        forget_texts();
        for (uint32_t i = 0; i < 2; i++) {
            struct ft_request request = prompts_request(&p, 6 + i);
            CHECK_OK(ft_session_submit(engine.session, &request, &handles[i], &err), &err);
        }
        CHECK_EQ(pthread_create(&thread, NULL, interrupt_later, engine.session), 0);
        for (uint32_t steps = 0; ended < 2 && steps < 1000; steps++) {
            int status = step_once(engine.session, &failed, &ended, &err);
            CHECK(status == FT_OK || status == FT_CANCELLED);
            interrupts += status == FT_CANCELLED;
            if (status == FT_CANCELLED)
                ft_session_clear_interrupt(engine.session);
        }
        pthread_join(thread, NULL);
        ft_session_clear_interrupt(engine.session);
        CHECK_EQ(failed, 0);
        CHECK(interrupts <= 1);
        for (uint32_t i = 0; i < 2; i++) {
            CHECK(is_text(&p, 6 + i, handles[i]));
            ft_session_release(engine.session, handles[i]);
        }
    }
    ft_session_interrupt(engine.session);
    uint32_t none = 0;
    for (int again = 0; again < 2; again++)
        CHECK_FAILS(step_once(engine.session, &none, &none, &err), FT_CANCELLED, "interrupted", &err);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    prompts_free(&p);
}

TEST(a_sequence_cancelled_in_the_middle_ends_alone)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    struct ft_event events[EVENTS_MAX];
    REQUIRE(prompts_read(&p));
    CHECK_OK(fixture_open(&engine, TINY_DIR, &hybrid, &err), &err);
    REQUIRE(engine.session != NULL);
    uint32_t handles[3], cancelled = 0, count;
    bool released = false;
    forget_texts();
    for (uint32_t i = 0; i < 3; i++) {
        struct ft_request request = prompts_request(&p, 6 + i);
        CHECK_OK(ft_session_submit(engine.session, &request, &handles[i], &err), &err);
    }
    for (uint32_t steps = 0; !ft_session_is_idle(engine.session) && steps < 1000; steps++) {
        if (counts[handles[1]] == 5)
            ft_session_cancel(engine.session, handles[1]);
        if (counts[handles[2]] == 9 && !released) {
            ft_session_release(engine.session, handles[2]); /* while it runs: no event comes any more */
            released = true;
        }
        CHECK_OK(ft_session_step(engine.session, events, EVENTS_MAX, &count, &err), &err);
        for (uint32_t i = 0; i < count; i++) {
            if (events[i].kind == FT_EVENT_TOKEN)
                tokens[events[i].sequence][counts[events[i].sequence]++] = events[i].token;
            cancelled += events[i].finish == FT_FINISH_CANCELLED;
            if (events[i].finish == FT_FINISH_CANCELLED)
                CHECK_EQ(events[i].sequence, handles[1]);
            CHECK(!released || events[i].sequence != handles[2]);
        }
    }
    CHECK_EQ(cancelled, 1);
    CHECK_EQ(counts[handles[1]], 5);
    CHECK(memcmp(tokens[handles[1]], p.want[7], 5 * sizeof(uint32_t)) == 0);
    CHECK_EQ(counts[handles[2]], 9);
    CHECK(is_text(&p, 6, handles[0]));
    ft_session_cancel(engine.session, handles[0]); /* ended: nothing happens */
    CHECK(ft_session_is_idle(engine.session));
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    prompts_free(&p);
}

/* A handle is free again as soon as it is released, whatever the others do. */
/* ThreadSanitizer makes each of them a second of work, and sees a race in few as well as in many. */
#ifdef __SANITIZE_THREAD__
#define SHORT_SEQUENCES 40u
#else
#define SHORT_SEQUENCES 200u
#endif
TEST(many_short_sequences_go_through_four_handles)
{
    struct prompts p;
    struct ft_error err;
    struct ft_engine engine;
    REQUIRE(prompts_read(&p));
    CHECK_OK(fixture_open(&engine, TINY_DIR, &hybrid, &err), &err);
    REQUIRE(engine.session != NULL);
    uint32_t prompt_of[4] = {FT_NONE, FT_NONE, FT_NONE, FT_NONE}, submitted = 0, done = 0;
    uint32_t wanted[4] = {0}, failed = 0, ended = 0;
    forget_texts();
    for (uint32_t steps = 0; done < SHORT_SEQUENCES && steps < 5000; steps++) {
        struct ft_request request = prompts_request(&p, submitted % p.count);
        request.max_tokens = 1 + submitted % 7;
        uint32_t handle;
        while (submitted < SHORT_SEQUENCES &&
               ft_session_submit(engine.session, &request, &handle, &err) == FT_OK) {
            prompt_of[handle] = submitted % p.count;
            wanted[handle] = request.max_tokens;
            counts[handle] = 0;
            submitted++;
            request = prompts_request(&p, submitted % p.count);
            request.max_tokens = 1 + submitted % 7;
        }
        CHECK_OK(step_once(engine.session, &failed, &ended, &err), &err);
        for (uint32_t h = 0; h < 4; h++) {
            if (prompt_of[h] == FT_NONE || counts[h] < wanted[h])
                continue;
            CHECK_EQ(counts[h], wanted[h]);
            CHECK(memcmp(tokens[h], p.want[prompt_of[h]], wanted[h] * sizeof(uint32_t)) == 0);
            ft_session_release(engine.session, h);
            prompt_of[h] = FT_NONE;
            done++;
        }
    }
    CHECK_EQ(done, SHORT_SEQUENCES);
    CHECK_EQ(ended, SHORT_SEQUENCES);
    CHECK_EQ(failed, 0);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
    prompts_free(&p);
}

/* ---- boundaries ---- */

/* Prompts that end just before, at and after a page, in chunks that do and do not divide it: one text. */
TEST(prompts_at_page_boundaries_give_one_text_for_every_chunk)
{
    static const uint32_t lengths[] = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129};
    static const uint32_t chunks[] = {200, 5, 16, 63, 64, 65};
    enum { LENGTHS = 10, NEW = 12 };
    static uint32_t want[LENGTHS][NEW];
    struct prompts p;
    struct ft_error err;
    REQUIRE(prompts_read(&p));
    uint32_t prompt[129];
    for (uint32_t i = 0; i < 129; i++)
        prompt[i] = p.want[6 + i / 40][i % 40 % p.want_count[6 + i / 40]];
    for (uint32_t c = 0; c < FT_COUNT_OF(chunks); c++) {
        struct ft_engine engine;
        struct fixture_config config = c % 2 ? hybrid : cpu;
        config.chunk = chunks[c];
        CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
        REQUIRE(engine.session != NULL);
        for (uint32_t i = 0; i < LENGTHS; i++) {
            struct ft_request request = {.prompt = prompt,
                                         .prompt_count = lengths[i],
                                         .max_tokens = NEW,
                                         .sampling = {.top_p = 1, .repetition_penalty = 1},
                                         .reuse_prefix = c >= 3};
            uint32_t handle;
            forget_texts();
            CHECK_OK(ft_session_submit(engine.session, &request, &handle, &err), &err);
            CHECK_EQ(fixture_drain(engine.session, tokens, counts), 0);
            CHECK_EQ(counts[handle], NEW);
            if (!c)
                memcpy(want[i], tokens[handle], sizeof want[i]);
            if (memcmp(want[i], tokens[handle], sizeof want[i]))
                fprintf(stderr, "chunk %u, prompt of %u tokens\n", chunks[c], lengths[i]);
            CHECK(memcmp(want[i], tokens[handle], sizeof want[i]) == 0);
            ft_session_release(engine.session, handle);
        }
        CHECK_OK(ft_engine_close(&engine, &err), &err);
    }
    prompts_free(&p);
}

TEST_MAIN(
    RUN(a_failed_table_read_fails_its_step_and_sequences_resume_when_it_is_mended)
        RUN(a_policy_that_answers_nonsense_is_repaired_and_changes_no_text)
            RUN(a_policy_with_another_abi_is_refused) RUN(a_stuck_lane_becomes_an_error_and_close_comes_back)
                RUN(the_watchdog_does_not_count_time_in_which_the_process_was_stopped)
                    RUN(where_io_uring_or_direct_reads_are_refused_a_note_says_so_and_the_texts_are_the_same)
                        RUN(three_slots_and_random_link_delays_change_no_text)
                            RUN(a_link_thread_that_loses_its_core_completes_nothing_twice)
                                RUN(captured_logits_do_not_depend_on_the_chunk_and_name_the_sampled_token)
                                    RUN(requests_beyond_the_limits_leave_nothing_behind)
                                        RUN(an_interrupt_stops_between_steps_and_the_text_goes_on_after_it)
                                            RUN(a_sequence_cancelled_in_the_middle_ends_alone)
                                                RUN(many_short_sequences_go_through_four_handles) RUN(
                                                    prompts_at_page_boundaries_give_one_text_for_every_chunk))
