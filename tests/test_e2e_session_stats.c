/* SPDX-License-Identifier: Apache-2.0 */
/* What the session counts. */
#include "jobs/session_internal.h"
#include "tests/fixture_session.h"

static void one_step(struct ft_session *session)
{
    struct ft_event events[2 * FT_SEQUENCES_MAX];
    struct ft_error err;
    uint32_t count;
    CHECK_OK(ft_session_step(session, events, 2 * FT_SEQUENCES_MAX, &count, &err), &err);
}

TEST(a_prompt_beside_a_decode_row_counts_when_its_last_layer_is_done)
{
    struct fixture_config config = {.strategy = FT_STRATEGY_CPU, .workers = 1, .sequences = 2, .chunk = 8};
    static const uint32_t ids[10] = {41, 1384, 223, 19, 41, 1384, 223, 19, 7, 8};
    struct ft_engine engine;
    struct ft_session_stats stats;
    struct ft_error err;
    uint32_t first, second;
    CHECK_OK(fixture_open(&engine, TINY_DIR, &config, &err), &err);
    REQUIRE(engine.session != NULL);
    struct ft_request request = {.prompt = ids,
                                 .prompt_count = 4,
                                 .max_tokens = 20,
                                 .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1}};
    CHECK_OK(ft_session_submit(engine.session, &request, &first, &err), &err);
    one_step(engine.session); /* the prompt */
    one_step(engine.session); /* one token */
    ft_session_stats(engine.session, &stats);
    CHECK_EQ(stats.prefill_rows, 4);
    CHECK_EQ(stats.decode_rows, 1);
    CHECK_EQ(stats.mixed_rows, 0);
    request.prompt_count = 10;
    CHECK_OK(ft_session_submit(engine.session, &request, &second, &err), &err);
    one_step(engine.session); /* the first slice of the second's first chunk: 8 of its rows, one layer */
    ft_session_stats(engine.session, &stats);
    CHECK_EQ(stats.decode_rows, 1);
    CHECK_EQ(stats.prefill_rows, 4); /* rows count when their last layer is done */
    CHECK_EQ(stats.prefill_steps, 2);
    CHECK_EQ(stats.prefill_chunks, 1);
    CHECK_EQ(fixture_drain(engine.session, NULL, NULL), 0);
    ft_session_stats(engine.session, &stats);
    /* the last token of each text is never computed */
    CHECK_EQ(stats.prefill_rows, 4 + 10);
    CHECK_EQ(stats.prefill_chunks, 3);
    CHECK(stats.prefill_steps > 3);
    CHECK_EQ(stats.decode_rows, 19 + 19);
    CHECK_EQ(stats.mixed_rows, 0);
    CHECK_OK(ft_engine_close(&engine, &err), &err);
}

TEST_MAIN(RUN(a_prompt_beside_a_decode_row_counts_when_its_last_layer_is_done))
