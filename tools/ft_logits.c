/* SPDX-License-Identifier: Apache-2.0 */
/* ft logits: logits, router choices and hidden states of given ids, as a safetensors file. */
#include "tools/command.h"
#include "tools/generate.h"
#include "tools/ids.h"
#include "tools/json_out.h"
#include "tools/open.h"
#include "tools/summary.h"
#include "tools/tensor_map.h"

#include <stdlib.h>
#include <string.h>

struct logits_options {
    struct ft_open_options open;
    const char *ids, *out;
    bool hidden, json;
};

#define FIELD(name) offsetof(struct logits_options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"ids", "LIST|FILE", "token ids: 1,2,3, a file with them, a reference.safetensors, or - (stdin)", "",
     FT_OPTION_STRING, FIELD(ids), 0, 0},
    {"out", "FILE", "safetensors file to write", "", FT_OPTION_STRING, FIELD(out), 0, 0},
    {"hidden", NULL, "write the residual between the layers too", NULL, FT_OPTION_FLAG, FIELD(hidden), 0, 0},
    {"json", NULL, "report as JSON on stdout", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};

/* logits, router_topk, then hidden.0 .. hidden.<layers>; returns their number. */
static uint32_t describe(const struct ft_model *model, uint32_t rows, bool hidden,
                         struct ft_tensor_spec *specs)
{
    uint32_t count = 0;
    specs[count++] = (struct ft_tensor_spec){"logits", FT_DTYPE_F32, 2, {rows, model->vocab}};
    specs[count++] =
        (struct ft_tensor_spec){"router_topk", FT_DTYPE_I32, 3, {model->layer_count, rows, model->topk}};
    for (uint32_t i = 0; hidden && i <= model->layer_count; i++) {
        uint64_t width = (uint64_t)model->hidden * (i < model->layer_count ? model->hc_count : 1);
        struct ft_tensor_spec *spec = &specs[count++];
        *spec = (struct ft_tensor_spec){"", FT_DTYPE_F32, 2, {rows, width}};
        snprintf(spec->name, sizeof spec->name, "hidden.%u", i);
    }
    return count;
}

static int compute(const struct ft_engine *engine, const struct logits_options *options, const uint32_t *ids,
                   uint32_t count, struct ft_error *err)
{
    struct ft_tensor_map map;
    struct ft_tensor_spec *specs = calloc(FT_LAYERS_MAX + 3, sizeof *specs);
    if (!specs)
        return ft_error_set(err, FT_MEMORY, "no memory for the list of tensors");
    uint32_t tensors = describe(engine->model, count, options->hidden, specs);
    int status = ft_tensor_map_create(&map, options->out, specs, tensors, err);
    if (status == FT_OK) {
        struct ft_capture capture = {.row_count = count,
                                     .logits = ft_tensor_map_data(&map, specs, 0),
                                     .topk = ft_tensor_map_data(&map, specs, 1),
                                     .hidden = options->hidden ? ft_tensor_map_data(&map, specs, 2) : NULL};
        struct ft_request request = {.prompt = ids,
                                     .prompt_count = count,
                                     .sampling = {.top_p = 1, .repetition_penalty = 1},
                                     .capture = &capture};
        uint32_t none[1], none_count;
        status = ft_generate_ids(engine->session, &request, none, &none_count, err);
        if (status == FT_OK)
            status = ft_tensor_map_commit(&map, err);
        else
            ft_tensor_map_abandon(&map);
    }
    free(specs);
    return status;
}

static void report(const struct ft_engine *engine, const struct logits_options *options, uint32_t count)
{
    struct ft_summary summary = {.sequence_count = 1, .prompt_tokens = count};
    if (!options->open.quiet)
        ft_summary_print(&summary, engine, stderr);
    if (!options->json)
        return;
    struct ft_json json;
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    ft_json_text(&json, "model", engine->dir);
    ft_json_text(&json, "out", options->out);
    ft_json_u64(&json, "tokens", count);
    ft_summary_write_json(&summary, engine, &json, "summary");
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

static int run(struct logits_options *options, struct ft_error *err)
{
    struct ft_engine engine;
    struct ft_error close_err;
    uint32_t *ids = NULL, count = 0;
    int status = ft_ids_read(options->ids, &ids, &count, err);
    if (status == FT_OK && !count)
        status = ft_error_set(err, FT_USAGE, "--ids: there is no id in \"%.200s\"", options->ids);
    options->open.plan.all_logits = true;
    ft_open_options_want_kv(&options->open, count, 1);
    if (status == FT_OK)
        status = ft_engine_open(&engine, &options->open, err);
    if (status != FT_OK) {
        free(ids);
        return status;
    }
    status = compute(&engine, options, ids, count, err);
    if (status == FT_OK)
        report(&engine, options, count);
    free(ids);
    if (ft_engine_close(&engine, &close_err) != FT_OK && status == FT_OK) {
        *err = close_err;
        status = err->code;
    }
    return status;
}

int ft_command_logits(int argc, char **argv)
{
    struct logits_options options = {0};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options},
                                             ft_open_option_group(&options.open)};
    const struct ft_option_set set = {"ft logits",
                                      "--model DIR --ids 1,2,3 --out F.safetensors [options]",
                                      "Runs the ids through the model and writes logits (F32 [T, vocab]), "
                                      "router_topk (I32 [layers, T, k], ids\n"
                                      "ascending) and with --hidden the residual before each layer "
                                      "(hidden.<i>, F32 [T, streams x hidden]) and what\n"
                                      "goes to the head (the last one, [T, hidden]).",
                                      groups,
                                      FT_COUNT_OF(groups),
                                      0};
    struct ft_option_rest rest;
    struct ft_error err;
    int exit_code;
    ft_open_options_init(&options.open);
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    int status = FT_OK;
    if (!options.ids)
        status = ft_error_set(&err, FT_USAGE, "ft logits needs --ids: a list such as 1,2,3, or a file");
    else if (!options.out)
        status = ft_error_set(&err, FT_USAGE, "ft logits needs --out FILE");
    else
        status = run(&options, &err);
    return status == FT_OK ? ft_command_finish(FT_EXIT_OK) : ft_command_fail(&err);
}
