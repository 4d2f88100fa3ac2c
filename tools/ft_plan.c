/* SPDX-License-Identifier: Apache-2.0 */
/* ft plan: the memory table from headers alone, and whether it fits. */
#include "planner/plan_json.h"
#include "tools/command.h"
#include "tools/open.h"

#include <stdlib.h>
#include <string.h>

struct plan_options {
    struct ft_open_options open;
    bool json;
};

static const struct ft_option table[] = {
    {"json", NULL, "the whole plan as JSON", NULL, FT_OPTION_FLAG, offsetof(struct plan_options, json),
     FT_OPTION_NO_FIELD, 0, 0},
};

static void print_model(const struct ft_engine *engine)
{
    const struct ft_model *model = engine->model;
    char a[32], b[32];
    printf("model     %s: %u layers, hidden %u, %u experts of %s, top %u\n", ft_family_name(model->family),
           model->layer_count, model->hidden, model->expert_count,
           ft_format_name(engine->sizes.expert_format), model->topk);
    printf("machine   %s, %s\n", engine->machine.name, engine->topology.usable_reason);
    printf("strategy  %s: %s\n", ft_strategy_name(engine->plan.strategy), engine->plan.strategy_reason);
    printf("sizes     %u workers, %u KV tokens, %u sequences, %u rows a prefill step, %u expert slots\n",
           engine->plan.workers, engine->plan.page_count * engine->plan.page_tokens,
           engine->plan.sequences_max, engine->plan.chunk_rows, engine->plan.slot_count);
    printf("files     %s, of which %s PLE tables\n\n",
           ft_options_format_bytes(engine->sizes.file_bytes, a, sizeof a),
           ft_options_format_bytes(engine->sizes.ple_bytes, b, sizeof b));
}

static void print_memory(const struct ft_plan *plan)
{
    char size[32], limit[32];
    printf("%-10s %-7s %12s  %s\n", "pool", "tier", "size", "why");
    for (uint32_t i = 0; i < plan->term_count; i++) {
        const struct ft_plan_term *term = &plan->terms[i];
        printf("%-10s %-7s %12s  %s\n", ft_plan_pool_name((enum ft_plan_pool)term->pool),
               ft_tier_name((enum ft_tier)term->tier),
               ft_options_format_bytes(term->bytes, size, sizeof size), term->reason);
    }
    putchar('\n');
    for (uint32_t tier = 0; tier < FT_TIER_COUNT; tier++) {
        if (!plan->used_bytes[tier])
            continue;
        bool known = plan->limit_bytes[tier] != 0;
        printf("%-10s %12s of %s\n", ft_tier_name((enum ft_tier)tier),
               ft_options_format_bytes(plan->used_bytes[tier], size, sizeof size),
               known ? ft_options_format_bytes(plan->limit_bytes[tier], limit, sizeof limit) : "(no limit)");
    }
    printf("%s%s\n", plan->fits ? "fits" : "does not fit: ", plan->fits ? "" : plan->advice);
}

static int print_plan(const struct ft_engine *engine, bool json, struct ft_error *err)
{
    char *text = NULL;
    if (!json) {
        print_model(engine);
        print_memory(&engine->plan);
        return FT_OK;
    }
    int status = ft_plan_to_json(&engine->plan, &text, err);
    if (status == FT_OK)
        puts(text);
    free(text);
    return status;
}

int ft_command_plan(int argc, char **argv)
{
    struct plan_options options = {0};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options},
                                             ft_open_option_group(&options.open)};
    const struct ft_option_set set = {
        "ft plan",
        "--model DIR [options]",
        "Says from the headers alone what would lie where (weights by tier, state, KV, workspace, slots), "
        "whether it\n"
        "fits, and what to change when it does not. Exit code 1: it does not fit.",
        groups,
        FT_COUNT_OF(groups),
        0};
    struct ft_option_rest rest;
    struct ft_engine engine;
    struct ft_error err;
    int exit_code;
    ft_open_options_init(&options.open);
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    int status = ft_engine_plan(&engine, &options.open, &err);
    if (status != FT_OK)
        return ft_command_fail(&err);
    bool fits = engine.plan.fits;
    status = print_plan(&engine, options.json, &err);
    struct ft_error ignored; /* there is no trace to be incomplete */
    ft_engine_close(&engine, &ignored);
    if (status != FT_OK)
        return ft_command_fail(&err);
    return ft_command_finish(fits ? FT_EXIT_OK : FT_EXIT_FAILED);
}
