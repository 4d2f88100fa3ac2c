/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fixture opened for end-to-end tests: the engine in one configuration, the reference outputs, and a few
 * ways to run.
 */
#ifndef FT_TESTS_FIXTURE_H
#define FT_TESTS_FIXTURE_H

#include "io/safetensors.h"
#include "tests/test.h"
#include "tools/open.h"

/* Checkpoints under fixtures/ that have a reference. */
#define FIXTURE_NAMES                                                                                        \
    "qwen3_moe-bf16", "qwen3_moe-bf16-sharded-tied", "qwen3_moe-nvfp4-compressed_tensors",                   \
        "qwen3_moe-fp8_block", "qwen4_exp-bf16", "qwen4_exp-nvfp4-modelopt", "qwen3_5_moe-bf16",             \
        "gpt_oss-mxfp4", "qwen3_5_moe-fused-bf16", "qwen3_5_moe-fused-fp8_block", "qwen3_moe-dense-layers",  \
        "qwen3_moe-mixed-formats", "qwen3_moe-fp8_block-edges", "gpt_oss-mxfp4-variant",                     \
        "qwen4_exp-eos-list"

struct fixture_config {
    enum ft_strategy strategy;
    enum ft_device device;
    uint32_t workers, chunk, slots, sequences;
    double share, link_gbs, link_delay_us;
    const char *isa, *trace, *replay;
    uint32_t fp8_uses; /* dense matrices to quantise, enum ft_dense_use */
    bool all_logits, deterministic, ram_tables;
    enum ft_handshake handshake; /* of a GPU */
    uint32_t gpus;               /* 0, 1, .. that many; 0 = GPU 0 */
};

static int fixture_open(struct ft_engine *engine, const char *dir, const struct fixture_config *config,
                        struct ft_error *err)
{
    struct ft_open_options options;
    ft_open_options_init(&options);
    options.model = dir;
    options.strategy = config->strategy;
    options.device = config->device;
    options.device_given = true;
    options.plan.workers = config->workers;
    options.plan.chunk_rows = config->chunk;
    options.plan.slot_count = config->slots;
    options.plan.sequences_max = config->sequences;
    options.plan.kv_tokens = 1024;
    options.plan.all_logits = config->all_logits;
    options.plan.deterministic = config->deterministic;
    options.plan.fetch_share = config->strategy == FT_STRATEGY_HYBRID ? config->share : -1;
    options.plan.snapshot_bytes = 1 << 20;
    options.snapshot_given = true;
    options.ple_backend = config->ram_tables;
    options.link_gbs = config->link_gbs;
    options.link_delay_us = config->link_delay_us;
    options.isa = config->isa;
    options.trace = config->trace;
    options.replay = config->replay;
    options.handshake = config->handshake;
    options.gpus.count = config->gpus;
    for (uint32_t i = 0; i < config->gpus; i++)
        options.gpus.items[i] = i;
    options.fp8_uses = config->fp8_uses;
    options.quiet = true;
    options.pin = false;
    return ft_engine_open(engine, &options, err);
}

/* Runs until nothing is queued; appends each sequence's new tokens to out[handle] (when out is not NULL).
 * Returns the number of failed sequences. */
static inline uint32_t fixture_drain(struct ft_session *session, uint32_t out[][256], uint32_t *counts)
{
    struct ft_error err;
    struct ft_event *events = malloc(2 * FT_SEQUENCES_MAX * sizeof *events);
    uint32_t failed = 0, count;
    while (!ft_session_is_idle(session)) {
        int status = ft_session_step(session, events, 2 * FT_SEQUENCES_MAX, &count, &err);
        CHECK_OK(status, &err);
        if (status != FT_OK)
            break;
        for (uint32_t i = 0; i < count; i++) {
            if (events[i].kind == FT_EVENT_TOKEN && out)
                out[events[i].sequence][counts[events[i].sequence]++] = events[i].token;
            if (events[i].kind == FT_EVENT_FAILED) {
                fprintf(stderr, "sequence %u failed: %s\n", events[i].sequence, events[i].message);
                failed++;
            }
        }
    }
    free(events);
    return failed;
}

static inline double fixture_error(const float *got, const float *want, uint64_t count)
{
    double scale = 0, worst = 0;
    for (uint64_t i = 0; i < count; i++)
        scale = fmax(scale, fabs((double)want[i]));
    for (uint64_t i = 0; i < count; i++) {
        double error = fabs((double)got[i] - (double)want[i]);
        if (!(error <= worst))
            worst = error; /* NaN sticks */
    }
    return worst / scale;
}

#endif
