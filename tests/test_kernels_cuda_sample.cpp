// SPDX-License-Identifier: Apache-2.0
//
// Sampling on the GPU picks what ft_sample_token picks, over a grid of parameters; ties go to the lower id; a
// row without a finite logit fails.
extern "C" {
#include "tests/cuda_twin_dense.h"
#include "tests/test.h"
}
#include "kernels_cuda/kernels_cuda.h"
#include "tests/cuda_memory.h"

#include <algorithm>

static uint64_t random_state = 1;
static uint32_t random_u32()
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}
static float random_float()
{
    return (float)random_u32() * 0x1p-31f - 1.0f;
}

struct table {
    ft_model model = {};
    ft_cuda cuda = {};
    std::vector<ft_cuda_sampling> sampling;
    std::vector<std::vector<float>> logits;
    std::vector<std::vector<uint32_t>> recent;
};

static void add_row(table *t, const std::vector<float> &logits, float temperature, uint32_t top_k,
                    float top_p, float min_p, float penalty, const std::vector<uint32_t> &recent)
{
    ft_cuda_sampling s = {};
    s.temperature = temperature;
    s.top_k = top_k;
    s.top_p = top_p;
    s.min_p = min_p;
    s.repetition_penalty = penalty;
    s.wanted = 1;
    s.seed = random_u32();
    s.position = random_u32() % 1000;
    s.recent = recent.empty() ? NULL : cuda_memory_copy(recent.data(), recent.size());
    s.recent_count = (uint32_t)recent.size();
    t->sampling.push_back(s);
    t->logits.push_back(logits);
    t->recent.push_back(recent);
}

// Runs all rows at once; returns what was sampled. failed [rows].
static std::vector<uint32_t> run_table(table *t, uint32_t vocab, std::vector<uint32_t> *failed)
{
    uint32_t rows = (uint32_t)t->logits.size();
    ft_cuda &c = t->cuda;
    std::vector<uint32_t> logit_row(rows), nothing(rows, 12345), zero(rows, 0);
    for (uint32_t i = 0; i < rows; i++)
        logit_row[i] = rows - 1 - i;
    t->model.vocab = vocab;
    t->model.layer_count = 7;
    t->model.hc_count = t->model.hidden = 1;
    c.model = &t->model;
    c.space.logits = 0;
    c.space.sample_index = (uint64_t)rows * vocab;
    c.base = cuda_memory_alloc<float>(2ull * rows * vocab);
    for (uint32_t i = 0; i < rows; i++)
        cuda_memory_to_device(c.base + (uint64_t)i * vocab, t->logits[i].data(), vocab * sizeof(float));
    c.step.rows = c.step.logit_rows = rows;
    c.step.logit_row = cuda_memory_copy(logit_row.data(), rows);
    c.step.sampling = cuda_memory_copy(t->sampling.data(), rows);
    c.step.sampled = (uint32_t *)cuda_memory_mapped_bytes(rows * sizeof(uint32_t));
    c.step.failed = (uint32_t *)cuda_memory_mapped_bytes(rows * sizeof(uint32_t));
    memcpy(c.step.sampled, nothing.data(), rows * sizeof(uint32_t));
    memcpy(c.step.failed, zero.data(), rows * sizeof(uint32_t));
    c.multiprocessors = 4;
    CHECK_EQ(ft_cuda_sample(&c, NULL), 0);
    cuda_memory_sync("sample");
    failed->resize(rows);
    for (uint32_t i = 0; i < rows; i++)
        (*failed)[i] = c.step.failed[logit_row[i]];
    return std::vector<uint32_t>(c.step.sampled, c.step.sampled + rows);
}

static uint32_t want_of(const table &t, uint32_t row, uint32_t vocab)
{
    const ft_cuda_sampling &s = t.sampling[row];
    twin_sampling twin = {s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.top_k, s.seed, s.position};
    std::vector<float> logits = t.logits[row];
    std::vector<uint32_t> index(vocab);
    return twin_dense_sample(logits.data(), vocab, &twin, t.recent[row].data(), s.recent_count, index.data());
}

static void check_table(table *t, uint32_t vocab)
{
    std::vector<uint32_t> failed, got = run_table(t, vocab, &failed);
    for (uint32_t i = 0; i < got.size(); i++) {
        uint32_t want = want_of(*t, i, vocab);
        const ft_cuda_sampling &s = t->sampling[i];
        test_checks_++;
        if (got[i] != want || failed[i] != (want == FT_NONE ? 8u : 0u)) {
            test_failures_++;
            fprintf(stderr,
                    "vocab %u temperature %g top_k %u top_p %g min_p %g penalty %g: got %u, wanted %u; "
                    "failed %u\n",
                    vocab, s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, got[i], want,
                    failed[i]);
        }
    }
}

// Peaked as a model's, or flat: then more tokens are likely than are gathered in shared memory.
static std::vector<float> random_logits(uint32_t vocab, float width)
{
    std::vector<float> logits(vocab);
    for (float &v : logits)
        v = roundf(random_float() * width * 64) / 64; // ties occur
    logits[3] = NAN;
    logits[vocab / 2] = INFINITY;
    logits[vocab - 1] = -INFINITY;
    return logits;
}

TEST(choices_are_those_of_cores)
{
    for (uint32_t vocab : {157u, 2500u, 6001u})
        for (float width : {0.5f, 12.0f}) {
            table t;
            std::vector<float> logits = random_logits(vocab, width);
            std::vector<uint32_t> recent = {5, 9, 5, 11, vocab - 2, 0xfffffff0u};
            for (float temperature : {0.7f, 1.5f})
                for (uint32_t top_k : {0u, 1u, 40u})
                    for (float top_p : {1.0f, 0.9f, 0.0f})
                        add_row(&t, logits, temperature, top_k, top_p, top_k ? 0.0f : 0.05f,
                                top_p == 0.9f ? 1.3f : 1.0f, recent);
            add_row(&t, logits, 1.0f, vocab - 5, 0.99f, 0.0f, 1.0f, {});
            add_row(&t, logits, 1.0f, vocab + 5, 1.0f, 2.0f, 1.0f, {});
            add_row(&t, logits, 0.0f, 0, 1.0f, 0.0f, 1.0f, {});
            add_row(&t, logits, 0.0f, 0, 1.0f, 0.0f, 1.7f, recent);
            check_table(&t, vocab);
            cuda_memory_free_all();
        }
}

TEST(greedy_ties_go_to_the_lower_id)
{
    uint32_t vocab = 3000;
    table t;
    std::vector<float> logits(vocab, -1.0f);
    for (uint32_t at : {2999u, 2047u, 1700u, 77u})
        logits[at] = 4.0f;
    add_row(&t, logits, 0.0f, 0, 1.0f, 0.0f, 1.0f, {});
    std::fill(logits.begin(), logits.end(), 0.0f);
    logits[0] = -0.0f;
    add_row(&t, logits, 0.0f, 0, 1.0f, 0.0f, 1.0f, {});
    std::vector<uint32_t> failed, got = run_table(&t, vocab, &failed);
    CHECK_EQ(got[0], 77);
    CHECK_EQ(got[1], 0);
    cuda_memory_free_all();
}

TEST(rows_without_a_number_fail_and_unwanted_rows_are_left_alone)
{
    table t;
    uint32_t vocab = 64;
    add_row(&t, std::vector<float>(vocab, NAN), 0.0f, 0, 1.0f, 0.0f, 1.0f, {});
    add_row(&t, std::vector<float>(vocab, -INFINITY), 1.0f, 5, 0.5f, 0.0f, 1.2f, {1, 2});
    add_row(&t, std::vector<float>(vocab, NAN), 1.0f, 0, 1.0f, 0.0f, 1.0f, {});
    t.sampling[2].wanted = 0;
    std::vector<uint32_t> failed, got = run_table(&t, vocab, &failed);
    CHECK_EQ(got[0], FT_NONE);
    CHECK_EQ(got[1], FT_NONE);
    CHECK_EQ(got[2], 12345);
    CHECK_EQ(failed[0], 8);
    CHECK_EQ(failed[1], 8);
    CHECK_EQ(failed[2], 0);
    cuda_memory_free_all();
}

int main(int argc, char **argv)
{
    if (!cuda_memory_available()) {
        printf("skipped: no GPU\n");
        return 77;
    }
    RUN(choices_are_those_of_cores)
    RUN(greedy_ties_go_to_the_lower_id)
    RUN(rows_without_a_number_fail_and_unwanted_rows_are_left_alone)
    printf("%d checks, %d failed\n", test_checks_, test_failures_);
    return test_failures_ || !test_checks_ ? 1 : 0;
}
