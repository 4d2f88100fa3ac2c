/* SPDX-License-Identifier: Apache-2.0 */
/* ft verify with a reference.json: prompts with the ids that greedy decoding must give. */
#ifndef FT_TOOLS_FT_VERIFY_JSON_H
#define FT_TOOLS_FT_VERIFY_JSON_H

#include "tools/open.h"

struct ft_verify_options {
    struct ft_open_options open;
    const char *reference;
    double tolerance;
    bool json;
};

/* {"prompts": [{"prompt", "prompt_ids", "greedy_ids", "clear_margin"}, ...]}; prints the report; *good = all equal. */
int ft_verify_json(const struct ft_verify_options *options, const char *path, bool *good,
                   struct ft_error *err);

#endif
