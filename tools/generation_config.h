/* SPDX-License-Identifier: Apache-2.0 */
/*
 * generation_config.json of a checkpoint: sampling defaults and the ids that end a reply.
 *
 * do_sample false means greedy; without do_sample a temperature means sampling. Without the file: greedy, and
 * the eos ids of config.json. Threads: none. Errors: FT_FORMAT naming file and key.
 */
#ifndef FT_TOOLS_GENERATION_CONFIG_H
#define FT_TOOLS_GENERATION_CONFIG_H

#include "graph/error.h"
#include "graph/types.h"

struct ft_generation_config {
    bool found;
    bool sample;       /* as the file wants it */
    float temperature; /* 1 when not stated */
    uint32_t top_k;    /* 0 = off */
    float top_p;       /* 1 = off */
    float min_p, repetition_penalty;
    uint32_t eos[FT_EOS_MAX], eos_count;
};

int ft_generation_config_read(struct ft_generation_config *config, const char *dir, struct ft_error *err);

#endif
