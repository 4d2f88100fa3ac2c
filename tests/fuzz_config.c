/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a config.json: seeds in tests/data/fuzz/config. What is accepted must be usable. */
#include "io/checkpoint.h"

#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct ft_model model;
    static struct ft_state_layout state;
    static struct ft_kv_layout kv;
    struct ft_error err;
    if (ft_config_parse(&model, (const char *)data, bytes, "fuzz", &err) != FT_OK)
        return 0;
    double *frequencies = malloc((model.rotary_dim / 2 + 1) * sizeof *frequencies), scale;
    uint64_t rows[FT_PLE_HEADS_MAX];
    const uint32_t history[FT_NGRAM_MAX] = {model.vocab - 1, 1, 0, model.vocab / 2};
    ft_model_rotary(&model, frequencies, &scale);
    for (uint32_t i = 0; i < model.rotary_dim / 2; i++)
        if (!isfinite(frequencies[i]))
            abort();
    free(frequencies);
    for (uint32_t p = 0; p < model.ple_count; p++) {
        ft_model_ple_rows(&model, p, history, model.ngram_size, rows);
        for (uint32_t h = 0; h < model.ple[p].head_count; h++)
            if (rows[h] >= model.ple[p].row_count)
                abort();
    }
    ft_state_layout_init(&state, &model);
    ft_kv_layout_init(&kv, &model);
    if (kv.page_tokens == 0)
        abort();
    return 0;
}
