/* SPDX-License-Identifier: Apache-2.0 */
/* ft plan: the memory table from headers alone, and whether it fits. */
#include "planner/plan_json.h"
#include "planner/plan_make.h"
#include "tools/command.h"
#include "tools/open.h"
#include "tools/shapes.h"
#include "tools/synthetic.h"

#include <stdlib.h>
#include <string.h>

struct plan_options {
    struct ft_open_options open;
    const char *shape;
    uint32_t format;
    bool json;
};

static const struct ft_option table[] = {
    {"shape", "NAME|FILE", "a published shape, a config.json, or FILE#NAME, instead of a checkpoint",
     "not given", FT_OPTION_STRING, offsetof(struct plan_options, shape), FT_OPTION_NO_FIELD, 0, 0},
    {"format", FT_SHAPE_FORMATS, "of the experts of --shape; model: of its checkpoint", NULL,
     FT_OPTION_CHOICE, offsetof(struct plan_options, format), FT_OPTION_NO_FIELD, 0, 0},
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
           engine->plan.workers, ft_plan_kv_tokens(&engine->plan), engine->plan.sequences_max,
           engine->plan.chunk_rows, engine->plan.slot_count);
    printf("files     %s, of which %s PLE tables\n\n",
           ft_options_format_bytes(engine->sizes.file_bytes, a, sizeof a),
           ft_options_format_bytes(engine->sizes.ple_bytes, b, sizeof b));
}

/* What each of several GPUs holds. */
static void print_gpus(const struct ft_plan *plan)
{
    static const enum ft_plan_pool pools[] = {FT_POOL_DENSE, FT_POOL_EMBED,    FT_POOL_HEAD,
                                              FT_POOL_SLOTS, FT_POOL_KV,       FT_POOL_STAGING,
                                              FT_POOL_STATE, FT_POOL_WORKSPACE};
    char size[32], limit[32];
    if (plan->gpu_count < 2)
        return;
    printf("%-5s %-9s %6s", "GPU", "layers", "slots");
    for (uint32_t p = 0; p < FT_COUNT_OF(pools); p++)
        printf(" %10s", ft_plan_pool_name(pools[p]));
    printf(" %10s\n", "together");
    for (uint32_t i = 0; i < plan->gpu_count; i++) {
        const struct ft_plan_gpu *gpu = &plan->gpus[i];
        char layers[24];
        snprintf(layers, sizeof layers, "%u-%u", gpu->layer_begin, gpu->layer_end - 1);
        printf("%-5u %-9s %6u", gpu->id, layers, gpu->slot_end - gpu->slot_begin);
        for (uint32_t p = 0; p < FT_COUNT_OF(pools); p++)
            printf(" %10s", ft_options_format_bytes(gpu->pool_bytes[pools[p]], size, sizeof size));
        printf(" %10s of %s\n", ft_options_format_bytes(gpu->used_bytes, size, sizeof size),
               gpu->limit_bytes ? ft_options_format_bytes(gpu->limit_bytes, limit, sizeof limit)
                                : "(no limit)");
    }
    putchar('\n');
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
    print_gpus(plan);
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

static void print_smallest(const struct ft_plan *smallest)
{
    const struct ft_plan *stored = &smallest[FT_DENSE_AS_STORED], *fp8 = &smallest[FT_DENSE_TO_FP8];
    char a[32], b[32];
    bool runs = (FT_FP8_USES & ~FT_FP8_USES_ACCEPTED) == 0;
    printf(
        "smallest GPU for %u KV tokens: %s free as stored, %s with --dense fp8%s (offload, %u slots, %u %s, "
        "%u rows a prefill step)\n",
        ft_plan_kv_tokens(fp8), ft_options_format_bytes(stored->limit_bytes[FT_TIER_DEVICE], a, sizeof a),
        ft_options_format_bytes(fp8->limit_bytes[FT_TIER_DEVICE], b, sizeof b),
        runs ? "" : ", which is not accurate enough to run", fp8->slot_count, fp8->sequences_max,
        fp8->sequences_max == 1 ? "sequence" : "sequences", fp8->chunk_rows);
}

/* smallest [2], by enum ft_dense: for the KV tokens that the plan above it has. */
static int find_smallest(const struct ft_engine *engine, const struct ft_plan_options *options,
                         struct ft_plan *smallest, struct ft_error *err)
{
    struct ft_plan_options wishes = *options;
    int status = FT_OK;
    wishes.kv_tokens = ft_plan_kv_tokens(&engine->plan);
    for (uint32_t dense = 0; dense < 2 && status == FT_OK; dense++)
        status = ft_plan_smallest_gpu(engine->model, &engine->dense_sizes[dense], &engine->machine, &wishes,
                                      &smallest[dense], err);
    return status;
}

static int print_plan(const struct ft_engine *engine, const struct plan_options *options,
                      struct ft_error *err)
{
    char *text = NULL;
    struct ft_plan smallest[2];
    bool experts = engine->sizes.moe_layer_count > 0;
    int status = experts ? find_smallest(engine, &options->open.plan, smallest, err) : FT_OK;
    if (status != FT_OK)
        return status;
    if (!options->json) {
        print_model(engine);
        print_memory(&engine->plan);
        if (experts)
            print_smallest(smallest);
        return FT_OK;
    }
    status = ft_plan_to_json(&engine->plan, experts ? smallest : NULL, &text, err);
    if (status == FT_OK)
        puts(text);
    free(text);
    return status;
}

/* The plan of a shape, as ft bench decode would make its weights. */
static int plan_shape(struct ft_engine *engine, const struct plan_options *options, struct ft_model *model,
                      struct ft_error *err)
{
    const struct ft_shape_cuts all = {0};
    struct ft_weight_sizes sizes[2];
    char label[128];
    if (options->open.model)
        return ft_error_set(err, FT_USAGE, "--model and --shape both say what to plan: give one of them");
    enum ft_format format;
    int status = ft_shapes_read(options->shape, &all, model, label, sizeof label, err);
    if (status == FT_OK)
        status = ft_shapes_find_format(options->shape, options->format, &format, err);
    for (uint32_t dense = 0; dense < 2 && status == FT_OK; dense++)
        status = ft_synthetic_sizes(model, format, (enum ft_dense)dense, &sizes[dense], err);
    const struct ft_engine_parts parts = {.model = model, .sizes = &sizes[0], .fp8_sizes = &sizes[1]};
    return status == FT_OK ? ft_engine_plan_parts(engine, &options->open, &parts, err) : status;
}

int ft_command_plan(int argc, char **argv)
{
    static struct ft_model model; /* of --shape; the engine only points to it */
    struct plan_options options = {0};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options},
                                             ft_open_option_group(&options.open)};
    const struct ft_option_set set = {
        "ft plan",
        "--model DIR | --shape NAME [options]",
        "Says from the headers alone what would lie where (weights by tier, state, KV, workspace, slots), "
        "whether it\n"
        "fits, what to change when it does not, and the smallest GPU that the model runs on. With --device "
        "cuda\n"
        "--vram BYTES it plans for a GPU that this machine need not have, with --vram 12G,24G for two. Exit "
        "code "
        "1: it\n"
        "does not fit.",
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
    options.open.assume_gpu = true;
    int status =
        options.shape ? plan_shape(&engine, &options, &model, &err)
        : options.format
            ? ft_error_set(
                  &err, FT_USAGE,
                  "--format is that of a shape's experts, a checkpoint has its own: give --shape, or "
                  "leave it out")
            : ft_engine_plan(&engine, &options.open, &err);
    if (status != FT_OK)
        return ft_command_fail(&err);
    bool fits = engine.plan.fits;
    status = print_plan(&engine, &options, &err);
    struct ft_error ignored; /* there is no trace to be incomplete */
    ft_engine_close(&engine, &ignored);
    if (status != FT_OK)
        return ft_command_fail(&err);
    return ft_command_finish(fits ? FT_EXIT_OK : FT_EXIT_FAILED);
}
