/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prefill on the CPU reads an expert once per chunk: its tiles compute all rows that chose it, and the bytes
 * of its tiles, as the trace counts them, add up to one expert.
 */
#include "tests/fixture.h"

#include <unistd.h>

#define EXPERTS_MAX 64u

struct reads {
    const struct ft_engine *engine;
    uint32_t prefill_steps, experts_seen, experts_of_many_rows;
};

struct expert_reads {
    uint64_t bytes[2]; /* up, down */
    uint32_t rows, tiles[2];
};

static void check_layer(struct reads *reads, const struct ft_trace_step *step, uint32_t layer)
{
    const struct ft_model *m = reads->engine->model;
    const struct ft_expert_layout *l = &reads->engine->weights->layers[layer].expert_layout;
    struct expert_reads experts[EXPERTS_MAX] = {0};
    uint32_t pairs = 0;
    for (uint32_t i = 0; i < step->record_count; i++) {
        const struct ft_trace_record *r = &step->records[i];
        bool down = r->op == FT_OP_EXPERT_DOWN;
        if (r->kind != FT_RECORD_JOB || r->layer != layer || (r->op != FT_OP_EXPERT_UP && !down))
            continue;
        REQUIRE(r->expert < m->expert_count);
        struct expert_reads *e = &experts[r->expert];
        if (e->rows)
            CHECK_EQ(e->rows, r->rows); /* every tile takes all rows of the expert */
        e->rows = r->rows;
        e->bytes[down] += r->bytes;
        e->tiles[down]++;
    }
    for (uint32_t e = 0; e < m->expert_count; e++) {
        uint64_t bytes = experts[e].bytes[0] + experts[e].bytes[1];
        uint32_t tiles = experts[e].tiles[0] + experts[e].tiles[1];
        if (!tiles)
            continue;
        pairs += experts[e].rows;
        CHECK(experts[e].tiles[0] && experts[e].tiles[1]);
        CHECK(bytes <= l->bytes && bytes + tiles >= l->bytes); /* each tile rounds down */
        reads->experts_seen++;
        reads->experts_of_many_rows += experts[e].rows > 8;
    }
    CHECK_EQ(pairs, step->rows * m->topk);
}

static void take_step(void *context, const struct ft_trace_step *step)
{
    struct reads *reads = context;
    if (!step->prefill)
        return;
    reads->prefill_steps++;
    CHECK_EQ(step->dropped, 0);
    for (uint32_t layer = 0; layer < reads->engine->model->layer_count; layer++)
        check_layer(reads, step, layer);
}

static void check_prefill(const char *dir, uint32_t workers, uint32_t chunk, uint32_t tokens)
{
    struct ft_error err;
    struct ft_engine engine;
    struct ft_session *session;
    struct reads reads = {.engine = &engine};
    uint32_t prompt[256], sequence;
    struct fixture_config config = {.strategy = FT_STRATEGY_CPU,
                                    .device = FT_DEVICE_NONE,
                                    .workers = workers,
                                    .chunk = chunk,
                                    .sequences = 1};
    REQUIRE(fixture_open(&engine, dir, &config, &err) == FT_OK);
    struct ft_session_options options = {.model = engine.model,
                                         .weights = engine.weights,
                                         .ple = engine.tables,
                                         .plan = &engine.plan,
                                         .topology = &engine.topology,
                                         .trace = take_step,
                                         .trace_context = &reads};
    CHECK_OK(ft_session_open(&session, &options, &err), &err);
    for (uint32_t i = 0; i < tokens; i++)
        prompt[i] = 3 + i * 37 % (engine.model->vocab - 3);
    struct ft_request request = {.prompt = prompt,
                                 .prompt_count = tokens,
                                 .max_tokens = 2,
                                 .sampling = {.top_p = 1, .repetition_penalty = 1}};
    CHECK_OK(ft_session_submit(session, &request, &sequence, &err), &err);
    CHECK_EQ(fixture_drain(session, NULL, NULL), 0);
    CHECK(reads.prefill_steps >= tokens / chunk && reads.experts_seen > 0);
    CHECK(chunk < 32 || reads.experts_of_many_rows > 0);
    CHECK(ft_session_close(session));
    CHECK_OK(ft_engine_close(&engine, &err), &err);
}

TEST(each_expert_is_read_once_per_chunk)
{
    static const char *const dirs[] = {FT_DATA_DIR "/fixtures/qwen4_exp-nvfp4-modelopt",
                                       FT_DATA_DIR "/fixtures/qwen3_moe-fp8_block", FT_DATA_DIR "/ft-tiny"};
    static const uint32_t chunks[] = {64, 16};
    for (uint32_t d = 0; d < 3; d++)
        for (uint32_t workers = 1; workers <= (uint32_t)FT_MIN(sysconf(_SC_NPROCESSORS_ONLN), 2); workers++)
            for (uint32_t c = 0; c < 2; c++)
                check_prefill(dirs[d], workers, chunks[c], 128);
}

TEST_MAIN(RUN(each_expert_is_read_once_per_chunk))
