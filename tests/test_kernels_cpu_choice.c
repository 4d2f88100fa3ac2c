/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing and decoding: router, block selection, sampling, PLE, number formats. */
#include "kernels_cpu/kernels_cpu.h"
#include "tests/test.h"

static uint64_t random_state = 9;

static uint32_t random_u32(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

TEST(number_formats_follow_their_formulas)
{
    for (unsigned b = 0; b < 256; b++) {
        int e = b >> 3 & 15, m = b & 7;
        double want = (b & 128 ? -1 : 1) * (e ? ldexp(1 + m / 8.0, e - 7) : ldexp(m / 8.0, -6));
        double got = (double)ft_e4m3_to_f32((uint8_t)b);
        CHECK((b & 127) == 127 ? isnan(got) : got == want && !signbit(got) == !(b & 128));
        got = (double)ft_e8m0_to_f32((uint8_t)b);
        CHECK(b == 255 ? isnan(got) : got == ldexp(1, (int)b - 127));
    }
    for (unsigned b = 0; b < 16; b++) {
        int e = b >> 1 & 3, m = b & 1;
        double want = (b & 8 ? -1 : 1) * (e ? ldexp(1 + m / 2.0, e - 1) : m / 2.0);
        CHECK((double)ft_e2m1_to_f32((uint8_t)b) == want);
    }
    for (unsigned b = 0; b < 65536; b++) {
        int e = b >> 10 & 31, m = b & 1023;
        double want = (b & 0x8000 ? -1 : 1) * (e ? ldexp(1 + m / 1024.0, e - 15) : ldexp(m / 1024.0, -14));
        double got = (double)ft_f16_to_f32((uint16_t)b);
        CHECK(e == 31 ? (m ? isnan(got) : isinf(got)) : got == want);
        float wide = ft_bf16_to_f32((uint16_t)b);
        CHECK(isnan(wide) ? isnan(ft_bf16_to_f32(ft_f32_to_bf16(wide))) : ft_f32_to_bf16(wide) == b);
    }
    CHECK_EQ(ft_f32_to_bf16(1.00390625f), 0x3f80);            /* half way: to even, down */
    CHECK_EQ(ft_f32_to_bf16(1.01171875f), 0x3f82);            /* half way: to even, up */
    CHECK_EQ(ft_f32_to_bf16(1.0039064f), 0x3f81);             /* just above */
    CHECK_EQ(ft_f32_to_bf16(3.4028234663852886e38f), 0x7f80); /* beyond the largest */
}

TEST(router_prefers_the_lower_id_among_equals)
{
    const float logits[8] = {1, 3, 2, 3, 0, 3, 2, -1};
    uint32_t ids[5];
    float weights[5];
    CHECK(ft_router_topk(logits, 8, 5, true, false, ids, weights));
    const uint32_t want[5] = {1, 3, 5, 2, 6};
    CHECK(memcmp(ids, want, sizeof want) == 0);
    double sum = 0, all = 0;
    for (int i = 0; i < 5; i++)
        sum += (double)weights[i];
    CHECK_NEAR(sum, 1, 1e-6);
    CHECK_NEAR(weights[0] / weights[3], exp(1), 1e-5);
    CHECK(ft_router_topk(logits, 8, 5, false, false, ids, weights));
    for (int i = 0; i < 8; i++)
        all += exp((double)logits[i]);
    for (int i = 0; i < 5; i++)
        CHECK_NEAR(weights[i], exp((double)logits[ids[i]]) / all, 1e-7);
    CHECK(ft_router_topk(logits, 8, 2, false, true, ids, weights));
    CHECK_NEAR(weights[0], 0.5, 1e-7);
    CHECK(ft_router_topk(logits, 8, 1, false, true, ids, weights));
    CHECK(weights[0] == 1);
}

TEST(router_refuses_nan_and_infinity_and_takes_masked_logits)
{
    float logits[4] = {1, NAN, 2, 3}, weights[4];
    uint32_t ids[4];
    CHECK(!ft_router_topk(logits, 4, 2, true, false, ids, weights));
    logits[1] = INFINITY;
    CHECK(!ft_router_topk(logits, 4, 2, true, false, ids, weights));
    logits[1] = -INFINITY;
    CHECK(ft_router_topk(logits, 4, 4, true, false, ids, weights));
    CHECK_EQ(ids[3], 1);
    CHECK(weights[3] == 0);
    for (int i = 0; i < 4; i++)
        logits[i] = -INFINITY;
    CHECK(!ft_router_topk(logits, 4, 2, true, false, ids, weights));
}

TEST(select_topk_equals_a_stable_sort)
{
    for (uint32_t round = 0; round < 300; round++) {
        uint32_t n = 1 + random_u32() % 200, k = random_u32() % (n + 1), out[201], scratch[200], held = 0;
        float scores[200];
        bool chosen[200] = {false};
        for (uint32_t i = 0; i < n; i++)
            scores[i] = round % 3 == 0 ? (float)(random_u32() % 4) - 1 : ((float)random_u32() - 2e9f) * 1e-5f;
        scores[n / 2] = -0.0f; /* equal to +0 */
        for (uint32_t j = 0; j < k; j++) {
            uint32_t best = FT_NONE;
            for (uint32_t i = 0; i < n; i++)
                if (!chosen[i] && (best == FT_NONE || scores[i] > scores[best]))
                    best = i;
            chosen[best] = true;
        }
        out[k] = 12345;
        ft_select_topk(scores, n, k, out, scratch);
        for (uint32_t i = 0; i < n; i++)
            if (chosen[i])
                CHECK_EQ(out[held++], i);
        CHECK_EQ(out[k], 12345);
    }
}

static uint32_t sample(const float *logits, uint32_t vocab, const struct ft_sampling *sampling,
                       uint64_t position)
{
    float copy[128];
    uint32_t scratch[128];
    memcpy(copy, logits, vocab * sizeof(float));
    return ft_sample_token(copy, vocab, sampling, NULL, 0, position, scratch);
}

TEST(greedy_takes_the_lowest_of_the_largest_and_skips_what_is_not_finite)
{
    struct ft_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
    const float logits[6] = {NAN, 1, 5, 5, INFINITY, -INFINITY}, none[2] = {NAN, -INFINITY};
    CHECK_EQ(sample(logits, 6, &greedy, 0), 2);
    for (uint32_t vocab = 1; vocab < 100; vocab++) { /* ties, signed zeros, infinities and NaN anywhere */
        static const float values[8] = {0, -0.0f, -1, -2, INFINITY, -INFINITY, NAN, 3};
        float many[100];
        uint32_t want = FT_NONE;
        for (uint32_t i = 0; i < vocab; i++) {
            many[i] = values[(vocab * 7919u + i * 104729u) / 13 % (vocab % 3 ? 7 : 8)];
            if (isfinite(many[i]) && (want == FT_NONE || many[i] > many[want]))
                want = i;
        }
        CHECK_EQ(sample(many, vocab, &greedy, 0), want);
    }
    CHECK_EQ(sample(none, 2, &greedy, 0), FT_NONE);
    greedy.temperature = 1;
    CHECK_EQ(sample(none, 2, &greedy, 0), FT_NONE);
    greedy.temperature = 1e-30f;
    for (uint64_t p = 0; p < 100; p++) {
        uint32_t t = sample(logits, 6, &greedy, p);
        CHECK(t == 2 || t == 3);
    }
}

/* Share of each of 8 tokens over many positions. */
static void shares(const struct ft_sampling *sampling, const float *logits, double *share)
{
    enum { DRAWS = 40000 };
    for (int i = 0; i < 8; i++)
        share[i] = 0;
    for (uint64_t p = 0; p < DRAWS; p++)
        share[sample(logits, 8, sampling, p)] += 1.0 / DRAWS;
}

TEST(sampling_follows_the_filtered_distribution)
{
    /* probabilities 0.4 0.3 0.15 0.1 0.05, shuffled, and three impossible tokens */
    const double p[8] = {0.1, 0, 0.4, 0.05, 0, 0.3, 0.15, 0};
    float logits[8];
    double got[8];
    for (int i = 0; i < 8; i++)
        logits[i] = p[i] > 0 ? 3 + (float)log(p[i]) : -INFINITY;
    static const struct {
        uint32_t top_k;
        float top_p, min_p;
        double want[8];
    } table[] = {
        {0, 1, 0, {0.1, 0, 0.4, 0.05, 0, 0.3, 0.15, 0}},
        {2, 1, 0, {0, 0, 0.4 / 0.7, 0, 0, 0.3 / 0.7, 0, 0}},
        {100, 1, 0, {0.1, 0, 0.4, 0.05, 0, 0.3, 0.15, 0}},
        {0, 0.8f, 0, {0, 0, 0.4 / 0.85, 0, 0, 0.3 / 0.85, 0.15 / 0.85, 0}},
        {0, 0.0f, 0, {0, 0, 1, 0, 0, 0, 0, 0}},
        {3, 0.5f, 0, {0, 0, 0.4 / 0.7, 0, 0, 0.3 / 0.7, 0, 0}},
        {0, 1, 0.2f, {0.1 / 0.95, 0, 0.4 / 0.95, 0, 0, 0.3 / 0.95, 0.15 / 0.95, 0}},
        {0, 0.99f, 0.5f, {0, 0, 0.4 / 0.7, 0, 0, 0.3 / 0.7, 0, 0}},
        {0, 1, 2.0f, {0, 0, 1, 0, 0, 0, 0, 0}},
        {1, 1, 0, {0, 0, 1, 0, 0, 0, 0, 0}},
    };
    for (size_t s = 0; s < sizeof table / sizeof table[0]; s++) {
        struct ft_sampling sampling = {.temperature = 1,
                                       .top_k = table[s].top_k,
                                       .top_p = table[s].top_p,
                                       .min_p = table[s].min_p,
                                       .repetition_penalty = 1,
                                       .seed = 7};
        shares(&sampling, logits, got);
        for (int i = 0; i < 8; i++)
            CHECK_NEAR(got[i], table[s].want[i], table[s].want[i] > 0 ? 0.012 : 0);
    }
    struct ft_sampling hot = {.temperature = 2, .top_p = 1, .repetition_penalty = 1, .seed = 3};
    double total = 0;
    shares(&hot, logits, got);
    for (int i = 0; i < 8; i++)
        total += sqrt(p[i]);
    for (int i = 0; i < 8; i++)
        CHECK_NEAR(got[i], sqrt(p[i]) / total, 0.012);
}

TEST(sampling_depends_on_seed_and_position_alone)
{
    float logits[64];
    for (int i = 0; i < 64; i++)
        logits[i] = (float)(random_u32() % 100) * 0.01f;
    struct ft_sampling a = {.temperature = 1, .top_p = 0.9f, .repetition_penalty = 1, .seed = 5}, b = a;
    b.seed = 6;
    uint32_t differ = 0, moved = 0;
    for (uint64_t p = 0; p < 200; p++) {
        uint32_t first = sample(logits, 64, &a, p);
        CHECK_EQ(first, sample(logits, 64, &a, p));
        differ += first != sample(logits, 64, &b, p);
        moved += first != sample(logits, 64, &a, p + 1);
    }
    CHECK(differ > 100 && moved > 100);
}

TEST(repetition_penalty_counts_each_token_once)
{
    float logits[4] = {2.0f, -1.0f, 1.5f, 0.9f};
    const uint32_t recent[] = {0, 0, 1, 0, 99}; /* 99 is outside the vocabulary */
    uint32_t scratch[4];
    struct ft_sampling sampling = {.top_p = 1, .repetition_penalty = 2};
    CHECK_EQ(ft_sample_token(logits, 4, &sampling, recent, 5, 0, scratch), 2);
    CHECK_NEAR(logits[0], 1.0, 0);
    CHECK_NEAR(logits[1], -2.0, 0);
    CHECK_NEAR(logits[3], 0.9, 1e-6);
}

TEST(ple_gate_and_rows_follow_their_formulas)
{
    const float k[6] = {1, 2, 3, 0, 0, 0}, q[6] = {-1, 0.5f, 2, 1, 1, 1}, v[3] = {1, -2, 4};
    float out[6], row[4];
    double u = (-1 + 1 + 6) / sqrt(3), gate = 1 / (1 + exp(-sqrt(u)));
    ft_ple_gate(k, q, v, 2, 3, out);
    for (int i = 0; i < 3; i++) {
        CHECK_NEAR(out[i], gate * (double)v[i], 1e-6);
        CHECK_NEAR(out[3 + i], 0.5 * (double)v[i], 1e-6);
    }
    const float minus[3] = {-1e-9f, 0, 0}, one[3] = {1, 0, 0};
    ft_ple_gate(minus, one, v, 1, 3, out); /* the root is taken of at least 1e-6 */
    CHECK_NEAR(out[0], 1 / (1 + exp(1e-3)), 1e-7);
    const uint8_t e4m3[4] = {0x38, 0xb8, 0x7f, 1};
    ft_ple_decode(FT_DTYPE_F8_E4M3, 3, e4m3, 4, row);
    CHECK(row[0] == 3 && row[1] == -3 && isnan(row[2]) && row[3] == 3.0f / 512);
    const uint16_t bf16[2] = {0x3f80, 0xc000};
    ft_ple_decode(FT_DTYPE_BF16, 3, bf16, 2, row);
    CHECK(row[0] == 1 && row[1] == -2);
}

TEST_MAIN(RUN(number_formats_follow_their_formulas) RUN(router_prefers_the_lower_id_among_equals)
              RUN(router_refuses_nan_and_infinity_and_takes_masked_logits)
                  RUN(select_topk_equals_a_stable_sort)
                      RUN(greedy_takes_the_lowest_of_the_largest_and_skips_what_is_not_finite)
                          RUN(sampling_follows_the_filtered_distribution)
                              RUN(sampling_depends_on_seed_and_position_alone)
                                  RUN(repetition_penalty_counts_each_token_once)
                                      RUN(ple_gate_and_rows_follow_their_formulas))
