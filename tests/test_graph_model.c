/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/model.h"
#include "tests/test.h"

#include <time.h>

/* The real qwen4_exp: 48 layers, (linear, linear, linear, sparse) x 12, PLE at layer 1 (counted from 0). */
static struct ft_model real_model(void)
{
    struct ft_model m = {
        .family = FT_FAMILY_QWEN4_EXP,
        .name = "qwen4_exp",
        .hidden = 2560,
        .vocab = 248320,
        .layer_count = 48,
        .rms_eps = 1e-6f,
        .norm_plus_one = true,
        .eos = {248044},
        .eos_count = 1,
        .head_count = 24,
        .kv_head_count = 2,
        .head_dim = 256,
        .attention_gate = true,
        .qk_norm = true,
        .rotary_dim = 64,
        .rotary_theta = 1e7,
        .indexer_head_count = 4,
        .indexer_dim = 128,
        .indexer_budget = 512,
        .indexer_ratio = 16,
        .key_head_count = 16,
        .value_head_count = 32,
        .key_dim = 128,
        .value_dim = 128,
        .conv_taps = 4,
        .output_gate = FT_ACTIVATION_SIGMOID,
        .expert_count = 512,
        .topk = 10,
        .expert_width = 640,
        .shared_width = 640,
        .topk_renormalise = true,
        .hc_count = 4,
        .hc_lowrank = 320,
        .ple_count = 1,
        .ple_embed_dim = 2560,
        .ple_taps = 4,
        .ngram_size = 3,
        .heads_per_ngram = 8,
        .ngram_vocab_base = 20000000,
        .ngram_vocab_multiple = 128,
        .ple_seed = 1234,
    };
    for (uint32_t i = 0; i < m.layer_count; i++)
        m.layers[i].attention = i % 4 == 3 ? FT_ATTENTION_SPARSE : FT_ATTENTION_LINEAR;
    m.ple[0].layer = 1;
    return m;
}

/* gpt_oss as its fixture has it. */
static struct ft_model oss_model(void)
{
    struct ft_model m = {
        .family = FT_FAMILY_GPT_OSS,
        .name = "gpt_oss",
        .hidden = 128,
        .vocab = 320,
        .layer_count = 4,
        .rms_eps = 1e-5f,
        .eos = {2},
        .eos_count = 1,
        .head_count = 4,
        .kv_head_count = 2,
        .head_dim = 32,
        .attention_bias = true,
        .sinks = true,
        .window = 8,
        .rotary_dim = 32,
        .rotary_theta = 150000,
        .yarn = {.on = true,
                 .truncate = false,
                 .factor = 32,
                 .beta_fast = 32,
                 .beta_slow = 1,
                 .original_positions = 4096},
        .expert_count = 8,
        .topk = 4,
        .expert_width = 64,
        .router_softmax_chosen = true,
        .router_bias = true,
        .expert_bias = true,
        .activation = FT_ACTIVATION_SWIGLU_OSS,
        .swiglu_limit = 7,
        .hc_count = 1,
    };
    for (uint32_t i = 0; i < m.layer_count; i++)
        m.layers[i].attention = i % 2 ? FT_ATTENTION_FULL : FT_ATTENTION_SLIDING;
    return m;
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

TEST(ple_of_the_real_config_has_the_published_constants)
{
    struct ft_error err;
    struct ft_model m = real_model();
    uint64_t rows[FT_PLE_HEADS_MAX];
    const uint32_t history[3] = {3, 2, 1}; /* tokens 1, 2, 3 in reading order */
    CHECK_OK(ft_model_finish(&m, &err), &err);
    const struct ft_ple_spec *ple = &m.ple[0];
    CHECK_EQ(ple->head_count, 16);
    CHECK_EQ(ple->row_width, 160);
    CHECK_EQ(ple->multiplier[0], 23703573157769);
    CHECK_EQ(ple->multiplier[1], 20109073645365);
    CHECK_EQ(ple->multiplier[2], 8052911324071);
    CHECK_EQ(ple->head_rows[0], 20000003);
    CHECK_EQ(ple->head_rows[1], 20000023);
    CHECK_EQ(ple->head_rows[2], 20000033);
    CHECK_EQ(ple->head_offset[0], 0);
    CHECK_EQ(ple->head_offset[2], 20000003 + 20000023);
    CHECK_EQ(ple->row_count % 128, 0);
    CHECK(ple->row_count >= ple->head_offset[15] + ple->head_rows[15] &&
          ple->row_count < ple->head_offset[15] + ple->head_rows[15] + 128);
    ft_model_ple_rows(&m, 0, history, 3, rows);
    CHECK_EQ(rows[0], 14605717);
    CHECK_EQ(rows[1], 24410875);
    CHECK_EQ(rows[2], 49313567);
    CHECK_EQ(m.layers[0].ple, FT_PLE_NONE);
    CHECK_EQ(m.layers[1].ple, 0);
}

TEST(primes_are_the_next_ones_and_continue_from_table_to_table)
{
    struct ft_error err;
    struct ft_model m = real_model();
    m.ple_count = 3;
    m.ple[1].layer = 5;
    m.ple[2].layer = 47;
    double start = now_ms();
    CHECK_OK(ft_model_finish(&m, &err), &err);
    CHECK(now_ms() - start < 50);
    uint64_t candidate = m.ngram_vocab_base - 1;
    for (uint32_t i = 0; i < 48; i++) {
        bool prime;
        do { /* plain trial division as the reference */
            prime = ++candidate > 1;
            for (uint64_t q = 2; prime && q * q <= candidate; q++)
                prime = candidate % q != 0;
        } while (!prime);
        CHECK_EQ(m.ple[i / 16].head_rows[i % 16], candidate);
    }
    CHECK(m.ple[1].multiplier[0] != m.ple[0].multiplier[0]);
    CHECK_EQ(m.layers[47].ple, 2);
    /* the largest base that is accepted is quick, too */
    m = real_model();
    m.ngram_vocab_base = 1ull << 40;
    start = now_ms();
    CHECK_OK(ft_model_finish(&m, &err), &err);
    CHECK_EQ(m.ple[0].head_rows[0], 1099511627791);
    CHECK(now_ms() - start < 200);
    /* and so are the smallest primes */
    m.ngram_vocab_base = 1;
    CHECK_OK(ft_model_finish(&m, &err), &err);
    CHECK_EQ(m.ple[0].head_rows[0], 2);
    CHECK_EQ(m.ple[0].head_rows[15], 53);
}

TEST(hash_does_not_look_across_an_eos)
{
    struct ft_error err;
    struct ft_model m = real_model();
    uint64_t rows[FT_PLE_HEADS_MAX], other[FT_PLE_HEADS_MAX];
    CHECK_OK(ft_model_finish(&m, &err), &err);
    const uint32_t eos = m.eos[0];
    const uint32_t alone[1] = {3}, padded[3] = {3, eos, eos}, hidden[3] = {3, eos, 77}, self[3] = {eos, 5, 6};
    const uint32_t other_self[3] = {eos, 5, 7}, pair[2] = {3, 2}, pair_padded[3] = {3, 2, eos};
    ft_model_ple_rows(&m, 0, alone, 1, rows);
    ft_model_ple_rows(&m, 0, padded, 3, other);
    CHECK_EQ(memcmp(rows, other, 16 * sizeof rows[0]), 0);
    ft_model_ple_rows(&m, 0, hidden, 3, other);
    CHECK_EQ(memcmp(rows, other, 16 * sizeof rows[0]), 0);
    ft_model_ple_rows(&m, 0, pair, 2, rows);
    ft_model_ple_rows(&m, 0, pair_padded, 3, other);
    CHECK_EQ(memcmp(rows, other, 16 * sizeof rows[0]), 0);
    /* the token itself being eos hides nothing */
    ft_model_ple_rows(&m, 0, self, 3, rows);
    ft_model_ple_rows(&m, 0, other_self, 3, other);
    CHECK_EQ(memcmp(rows, other, 8 * sizeof rows[0]), 0); /* order 2 sees the same pair */
    CHECK(memcmp(rows + 8, other + 8, 8 * sizeof rows[0]) != 0);
    for (uint32_t h = 0; h < 16; h++)
        CHECK(rows[h] >= m.ple[0].head_offset[h] &&
              rows[h] < m.ple[0].head_offset[h] + m.ple[0].head_rows[h]);
}

TEST(floor_modulus_is_right_for_negative_hashes)
{
    struct ft_error err;
    struct ft_model m = real_model();
    uint64_t rows[FT_PLE_HEADS_MAX];
    uint32_t negative = 0;
    CHECK_OK(ft_model_finish(&m, &err), &err);
    m.ple[0].multiplier[0] =
        0xC000000000000001ull; /* derived ones never wrap: vocab_size x multiplier < 2^63 */
    m.ple[0].multiplier[1] = 0x8000000000012345ull;
    for (uint32_t t = 0; t < 64; t++) {
        const uint32_t history[3] = {t % 4, t / 4 % 4, t / 16};
        ft_model_ple_rows(&m, 0, history, 3, rows);
        uint64_t mixed = history[0] * m.ple[0].multiplier[0] ^ history[1] * m.ple[0].multiplier[1];
        int64_t value = (int64_t)mixed, size = (int64_t)m.ple[0].head_rows[3];
        negative += value < 0;
        CHECK_EQ(rows[3] - m.ple[0].head_offset[3], ((__int128)value % size + size) % size);
    }
    CHECK(negative > 5);
}

TEST(rotary_without_yarn_is_powers_of_theta)
{
    struct ft_error err;
    struct ft_model m = real_model();
    double frequencies[128], scale;
    CHECK_OK(ft_model_finish(&m, &err), &err);
    ft_model_rotary(&m, frequencies, &scale);
    CHECK_NEAR(scale, 1, 0);
    CHECK_NEAR(frequencies[0], 1, 0);
    CHECK_NEAR(frequencies[16], pow(1e7, -0.5), 1e-18);
    CHECK_NEAR(frequencies[31], 1.6548170999431814e-07, 1e-20);
}

/* Numbers of the Python reference (tests/reference_forward.py) for the gpt_oss fixture. */
TEST(yarn_equals_the_reference)
{
    struct ft_error err;
    static const struct {
        uint32_t index;
        double smooth, truncated;
    } wanted[] = {
        {0, 1, 1},
        {1, 0.47478205547690072, 0.47478205547690072},
        {2, 0.22541800020287084, 0.22541800020287084},
        {3, 0.10702442147781144, 0.10702442147781144},
        {4, 0.050813274815461475, 0.050813274815461475},
        {5, 0.019335001126540359, 0.01945096754405793},
        {6, 0.0067949594897322189, 0.0070157139105043878},
        {7, 0.0020937923789696887, 0.002277271936341833},
        {8, 0.00045648391922324086, 0.0005809475019311124},
        {9, 3.8308812373753384e-05, 3.8308812373753384e-05},
        {10, 1.818833668168956e-05, 1.818833668168956e-05},
        {11, 8.6354958754384803e-06, 8.6354958754384803e-06},
        {12, 4.0999784818029804e-06, 4.0999784818029804e-06},
        {13, 1.9465962110014815e-06, 1.9465962110014815e-06},
        {14, 9.242089502428302e-07, 9.242089502428302e-07},
        {15, 4.3879782508643959e-07, 4.3879782508643959e-07},
    };
    struct ft_model m = oss_model();
    double frequencies[128], scale;
    CHECK_OK(ft_model_finish(&m, &err), &err);
    ft_model_rotary(&m, frequencies, &scale);
    CHECK_NEAR(scale, 0.1 * log(32) + 1, 1e-15);
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        CHECK_NEAR(frequencies[wanted[i].index] / wanted[i].smooth, 1, 1e-12);
    m.yarn.truncate = true;
    m.yarn.attention_factor = 1.25;
    CHECK_OK(ft_model_finish(&m, &err), &err);
    ft_model_rotary(&m, frequencies, &scale);
    CHECK_NEAR(scale, 1.25, 0);
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        CHECK_NEAR(frequencies[wanted[i].index] / wanted[i].truncated, 1, 1e-12);
}

TEST(yarn_with_equal_bounds_stays_finite)
{
    struct ft_error err;
    struct ft_model m = oss_model();
    double frequencies[128], scale;
    m.yarn.beta_fast = m.yarn.beta_slow = 1;
    CHECK_OK(ft_model_finish(&m, &err), &err);
    ft_model_rotary(&m, frequencies, &scale);
    for (uint32_t i = 0; i < 16; i++)
        CHECK(isfinite(frequencies[i]) && frequencies[i] > 0);
}

TEST(state_layout_by_hand)
{
    struct ft_error err;
    struct ft_model m = real_model();
    struct ft_state_layout s;
    CHECK_OK(ft_model_finish(&m, &err), &err);
    ft_state_layout_init(&s, &m);
    const uint64_t delta = 32 * 128 * 128, conv = 3 * (2 * 16 * 128 + 32 * 128), linear = delta + conv;
    CHECK_EQ(s.delta_offset[0], 0);
    CHECK_EQ(s.conv_offset[0], delta);
    CHECK_EQ(s.delta_offset[1], linear);
    CHECK_EQ(s.delta_offset[3], -1);
    CHECK_EQ(s.delta_offset[4], 3 * linear);
    CHECK_EQ(s.conv_offset[46], 35 * linear + delta);
    CHECK_EQ(s.ple_offset[0], 36 * linear);
    CHECK_EQ(s.ple_offset[1], -1);
    CHECK_EQ(s.indexer_offset[0], -1);
    CHECK_EQ(s.indexer_offset[3], 36 * linear + 9 * 4 * 2560);
    CHECK_EQ(s.indexer_offset[7], 36 * linear + 9 * 4 * 2560 + 16 * 128);
    CHECK_EQ(s.count, 36 * linear + 9 * 4 * 2560 + 12 * 16 * 128);
    m = oss_model();
    CHECK_OK(ft_model_finish(&m, &err), &err);
    ft_state_layout_init(&s, &m);
    CHECK_EQ(s.count, 0);
    CHECK(!ft_model_is_recurrent(&m));
}

#ifdef FT_TINY
#define PAGE_TOKENS 8
#else
#define PAGE_TOKENS 64
#endif

TEST(kv_layout_by_hand)
{
    struct ft_error err;
    struct ft_model m = real_model();
    struct ft_kv_layout kv;
    CHECK_OK(ft_model_finish(&m, &err), &err);
    ft_kv_layout_init(&kv, &m);
    const uint64_t page = FT_MAX(PAGE_TOKENS, 16), values = 2 * page * 256, keys = page / 16 * 128;
    CHECK_EQ(kv.page_tokens, page);
    CHECK_EQ(kv.k_offset[0], -1);
    CHECK_EQ(kv.k_offset[3], 0);
    CHECK_EQ(kv.v_offset[3], values);
    CHECK_EQ(kv.indexer_offset[3], 2 * values);
    CHECK_EQ(kv.k_offset[7], 2 * values + keys);
    CHECK_EQ(kv.count, 12 * (2 * values + keys));
    m.indexer_ratio = 3; /* a page is a whole number of blocks */
    ft_kv_layout_init(&kv, &m);
    CHECK_EQ(kv.page_tokens, PAGE_TOKENS == 64 ? 66 : 9);
    m.indexer_ratio = 100;
    ft_kv_layout_init(&kv, &m);
    CHECK_EQ(kv.page_tokens, 100);
    m = oss_model();
    ft_kv_layout_init(&kv, &m);
    CHECK_EQ(kv.page_tokens, PAGE_TOKENS);
    CHECK_EQ(kv.count, 4 * 2 * 2 * PAGE_TOKENS * 32);
    CHECK_EQ(kv.indexer_offset[0], -1);
}

TEST(layouts_of_parts_add_up_and_hold_only_their_layers)
{
    struct ft_error err;
    struct ft_model m = real_model();
    struct ft_state_layout s, part;
    struct ft_kv_layout kv, pages;
    static const uint32_t cut[] = {0, 1, 5, 24, 47, 48};
    CHECK_OK(ft_model_finish(&m, &err), &err);
    ft_state_layout_init(&s, &m);
    ft_kv_layout_init(&kv, &m);
    uint64_t states = 0, values = 0;
    for (uint32_t i = 0; i < 5; i++) {
        ft_state_layout_init_layers(&part, &m, cut[i], cut[i + 1]);
        ft_kv_layout_init_layers(&pages, &m, cut[i], cut[i + 1]);
        CHECK_EQ(pages.page_tokens, kv.page_tokens);
        for (uint32_t layer = 0; layer < m.layer_count; layer++) {
            bool own = layer >= cut[i] && layer < cut[i + 1];
            CHECK_EQ(part.delta_offset[layer] != UINT64_MAX, own && s.delta_offset[layer] != UINT64_MAX);
            CHECK_EQ(part.indexer_offset[layer] != UINT64_MAX, own && s.indexer_offset[layer] != UINT64_MAX);
            CHECK_EQ(pages.v_offset[layer] != UINT64_MAX, own && kv.v_offset[layer] != UINT64_MAX);
        }
        CHECK_EQ(part.ple_offset[0] != UINT64_MAX, m.ple[0].layer >= cut[i] && m.ple[0].layer < cut[i + 1]);
        states += part.count;
        values += pages.count;
    }
    CHECK_EQ(states, s.count);
    CHECK_EQ(values, kv.count);
}

/* Changes one field of a good model and expects words. */
#define REFUSED(change, status, text)                                                                        \
    do {                                                                                                     \
        struct ft_error err;                                                                                 \
        struct ft_model m = real_model();                                                                    \
        change;                                                                                              \
        CHECK_FAILS(ft_model_finish(&m, &err), status, text, &err);                                          \
    } while (0)

TEST(impossible_values_are_refused_by_key)
{
    REFUSED(m.hidden = 0, FT_FORMAT, "hidden_size is 0");
    REFUSED(m.hidden = UINT32_MAX, FT_FORMAT, "hidden_size is 4294967295");
    REFUSED(m.vocab = 0, FT_FORMAT, "vocab_size");
    REFUSED(m.layer_count = 0, FT_FORMAT, "num_hidden_layers");
    REFUSED(m.layer_count = 257, FT_LIMIT, "num_hidden_layers is 257");
    REFUSED(m.rms_eps = 0, FT_FORMAT, "rms_norm_eps");
    REFUSED(m.rms_eps = NAN, FT_FORMAT, "rms_norm_eps");
    REFUSED(m.eos[0] = 248320, FT_FORMAT, "eos_token_id is 248320");
    REFUSED(m.head_count = 0, FT_FORMAT, "num_attention_heads");
    REFUSED(m.kv_head_count = 5, FT_FORMAT, "not a multiple of num_key_value_heads 5");
    REFUSED(m.kv_head_count = 25, FT_FORMAT, "num_key_value_heads is 25");
    REFUSED(m.head_dim = 0, FT_FORMAT, "head_dim");
    REFUSED(m.rotary_dim = 63, FT_FORMAT, "rotates 63 dims");
    REFUSED(m.rotary_dim = 258, FT_FORMAT, "rotates 258 dims");
    REFUSED(m.rotary_theta = 0, FT_FORMAT, "rope_theta");
    REFUSED(m.rotary_theta = INFINITY, FT_FORMAT, "rope_theta");
    REFUSED(m.indexer_dim = 32, FT_FORMAT, "indexer_head_dim is 32");
    REFUSED(m.indexer_budget = 8, FT_FORMAT, "indexer_budget");
    REFUSED(m.indexer_ratio = 0, FT_FORMAT, "indexer_compress_ratio");
    REFUSED(m.value_head_count = 24, FT_FORMAT, "not a multiple of linear_num_key_heads");
    REFUSED(m.conv_taps = 0, FT_FORMAT, "linear_conv_kernel_dim");
    REFUSED(m.expert_count = 4096, FT_LIMIT, "num_experts is 4096");
    REFUSED(m.topk = 0, FT_FORMAT, "num_experts_per_tok");
    REFUSED(m.topk = 65, FT_LIMIT, "num_experts_per_tok is 65");
    REFUSED(m.topk = 513, FT_FORMAT, "num_experts_per_tok is 513");
    REFUSED(m.expert_width = 0, FT_FORMAT, "moe_intermediate_size");
    REFUSED(m.layers[0].dense = true, FT_FORMAT, "intermediate_size");
    REFUSED(m.hc_count = 17, FT_LIMIT, "hc_count");
    REFUSED(m.hc_lowrank = 0, FT_FORMAT, "hc_lowrank");
    REFUSED(m.ngram_size = 1, FT_FORMAT, "ngram_size");
    REFUSED(m.ngram_size = 9, FT_LIMIT, "ngram_size");
    REFUSED(m.heads_per_ngram = 64, FT_LIMIT, "heads_per_ngram");
    REFUSED(m.ple_embed_dim = 2561, FT_FORMAT, "ple_embed_dim");
    REFUSED(m.ngram_vocab_base = UINT64_MAX, FT_FORMAT, "ngram_vocab_size_base");
    REFUSED(m.ngram_vocab_multiple = 0, FT_FORMAT, "make_ngram_vocab_size_divisible_by");
    REFUSED(m.ple[0].layer = 48, FT_FORMAT, "ple_layer_ids has 49");
    REFUSED((m.ple_count = 2, m.ple[1].layer = 1), FT_FORMAT, "ple_layer_ids has 2");
    REFUSED(m.eos_count = 0, FT_FORMAT, "the n-gram hash needs one");
    REFUSED((m = oss_model(), m.window = 0), FT_FORMAT, "sliding_window");
    REFUSED((m = oss_model(), m.yarn.factor = 0), FT_FORMAT, "factor (yarn)");
    REFUSED((m = oss_model(), m.yarn.original_positions = NAN), FT_FORMAT,
            "original_max_position_embeddings");
    REFUSED((m = oss_model(), m.swiglu_limit = 0), FT_FORMAT, "swiglu_limit");
    REFUSED((m = oss_model(), m.expert_width = 0), FT_FORMAT, "intermediate_size is 0");
}

TEST_MAIN(RUN(layouts_of_parts_add_up_and_hold_only_their_layers)
              RUN(ple_of_the_real_config_has_the_published_constants)
                  RUN(primes_are_the_next_ones_and_continue_from_table_to_table)
                      RUN(hash_does_not_look_across_an_eos) RUN(floor_modulus_is_right_for_negative_hashes)
                          RUN(rotary_without_yarn_is_powers_of_theta) RUN(yarn_equals_the_reference)
                              RUN(yarn_with_equal_bounds_stays_finite) RUN(state_layout_by_hand)
                                  RUN(kv_layout_by_hand) RUN(impossible_values_are_refused_by_key))
