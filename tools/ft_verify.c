/* SPDX-License-Identifier: Apache-2.0 */
/* ft verify: results of a checkpoint against its reference.safetensors or reference.json. */
#include "tools/command.h"
#include "tools/ft_verify_json.h"
#include "tools/generate.h"
#include "tools/json_out.h"
#include "tools/open.h"
#include "tools/verify.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIELD(name) offsetof(struct ft_verify_options, name), FT_OPTION_NO_FIELD
static const struct ft_option table[] = {
    {"reference", "FILE",
     "safetensors with input_ids, logits, router_topk, hidden.<i>, greedy; or JSON with prompts",
     "DIR/reference.safetensors, else DIR/reference.json", FT_OPTION_STRING, FIELD(reference), 0, 0},
    {"tol", "X", "largest error, as a share of the largest reference value", NULL, FT_OPTION_F64,
     FIELD(tolerance), 0, 1e9},
    {"json", NULL, "report as JSON on stdout", NULL, FT_OPTION_FLAG, FIELD(json), 0, 0},
};

/* What was computed, and how it compares. */
struct verification {
    struct ft_reference reference;
    float *logits, *hidden;
    int32_t *topk;
    uint32_t *greedy, greedy_count;
    double logits_error, hidden_error[FT_LAYERS_MAX + 1]; /* < 0: not in the reference */
    uint32_t router_different[FT_LAYERS_MAX];             /* rows; of layers with experts */
    uint32_t router_rows_different, greedy_equal_count;
    uint32_t first_departure; /* index of hidden.<i>, or FT_NONE */
    bool good;
};

static uint64_t hidden_elements(const struct ft_model *model, uint32_t rows)
{
    uint64_t layers = (uint64_t)model->layer_count * model->hc_count + 1;
    return layers * rows * model->hidden;
}

static int allocate(struct verification *v, const struct ft_model *model, struct ft_error *err)
{
    uint64_t rows = v->reference.rows;
    v->logits = malloc(rows * model->vocab * sizeof *v->logits);
    v->hidden = malloc(hidden_elements(model, v->reference.rows) * sizeof *v->hidden);
    v->topk = malloc((uint64_t)model->layer_count * rows * FT_MAX(model->topk, 1u) * sizeof *v->topk);
    v->greedy = malloc((v->reference.greedy_count + 1ull) * sizeof *v->greedy);
    if (!v->logits || !v->hidden || !v->topk || !v->greedy)
        return ft_error_set(err, FT_MEMORY, "no memory for the results of %u rows", v->reference.rows);
    return FT_OK;
}

static void free_all(struct verification *v)
{
    free(v->logits);
    free(v->hidden);
    free(v->topk);
    free(v->greedy);
    ft_reference_close(&v->reference);
}

static int compute(struct verification *v, struct ft_session *session, struct ft_error *err)
{
    struct ft_capture capture = {
        .row_count = v->reference.rows, .logits = v->logits, .topk = v->topk, .hidden = v->hidden};
    struct ft_request request = {.prompt = (const uint32_t *)v->reference.ids,
                                 .prompt_count = v->reference.rows,
                                 .max_tokens = v->reference.greedy_count,
                                 .sampling = {.top_p = 1, .repetition_penalty = 1},
                                 .capture = &capture};
    return ft_generate_ids(session, &request, v->greedy, &v->greedy_count, err);
}

static void compare_hidden(struct verification *v, const struct ft_model *model, double tolerance)
{
    v->first_departure = FT_NONE;
    const float *at = v->hidden;
    for (uint32_t i = 0; i <= model->layer_count; i++) {
        uint64_t count =
            (uint64_t)v->reference.rows * model->hidden * (i < model->layer_count ? model->hc_count : 1);
        const float *reference = v->reference.hidden[i];
        v->hidden_error[i] = reference ? ft_verify_error(at, reference, count) : -1;
        if (v->first_departure == FT_NONE && v->hidden_error[i] > tolerance)
            v->first_departure = i;
        at += count;
    }
}

static void compare(struct verification *v, const struct ft_model *model, double tolerance)
{
    uint32_t rows = v->reference.rows;
    compare_hidden(v, model, tolerance);
    v->logits_error = ft_verify_error(v->logits, v->reference.logits, (uint64_t)rows * model->vocab);
    for (uint32_t i = 0; v->reference.topk && i < model->layer_count; i++) {
        uint64_t at = (uint64_t)i * rows * model->topk;
        if (!model->layers[i].dense)
            v->router_different[i] =
                ft_verify_count_rows(v->topk + at, v->reference.topk + at, rows, model->topk);
        v->router_rows_different += v->router_different[i];
    }
    while (v->greedy_equal_count < v->greedy_count && v->greedy_equal_count < v->reference.greedy_count &&
           v->greedy[v->greedy_equal_count] == (uint32_t)v->reference.greedy[v->greedy_equal_count])
        v->greedy_equal_count++;
    v->good = v->logits_error <= tolerance && v->first_departure == FT_NONE && !v->router_rows_different &&
              v->greedy_equal_count == v->reference.greedy_count;
}

/* ---- reports ---- */

static void print_layers(const struct verification *v, const struct ft_model *model)
{
    printf("%-8s %-10s %-12s %s\n", "hidden", "after", "error", "router rows that differ");
    for (uint32_t i = 0; i <= model->layer_count; i++) {
        const char *after =
            i ? ft_attention_name((enum ft_attention)model->layers[i - 1].attention) : "embedding";
        if (v->hidden_error[i] < 0)
            printf("%-8u %-10s %-12s", i, after, "-");
        else
            printf("%-8u %-10s %-12.2e", i, after, v->hidden_error[i]);
        if (i && v->reference.topk && !model->layers[i - 1].dense)
            printf(" %u of %u", v->router_different[i - 1], v->reference.rows);
        putchar('\n');
    }
}

static void print_text(const struct verification *v, const struct ft_engine *engine, double tolerance)
{
    const struct ft_model *model = engine->model;
    print_layers(v, model);
    printf("logits   error %.2e (tolerance %.1e)\n", v->logits_error, tolerance);
    if (v->reference.topk)
        printf("router   %s\n", v->router_rows_different ? "DIFFERENT" : "equal");
    else
        printf("router   not in the reference\n");
    printf("greedy   %u of %u tokens equal\n", v->greedy_equal_count, v->reference.greedy_count);
    if (v->first_departure == 0)
        printf("first departure: the embedding\n");
    else if (v->first_departure != FT_NONE)
        printf("first departure: layer %u (%s)\n", v->first_departure - 1,
               ft_attention_name((enum ft_attention)model->layers[v->first_departure - 1].attention));
    else
        printf("first departure: none\n");
    printf("%s\n", v->good ? "ok" : "DIFFERENT");
}

static void print_json(const struct verification *v, const struct ft_engine *engine, double tolerance)
{
    struct ft_json json;
    ft_json_begin(&json, stdout);
    ft_json_open(&json, '{', NULL);
    ft_json_text(&json, "model", engine->dir);
    ft_json_u64(&json, "tokens", v->reference.rows);
    ft_json_f64(&json, "tolerance", tolerance);
    ft_json_f64(&json, "logits_error", v->logits_error);
    ft_json_open(&json, '[', "hidden_error");
    for (uint32_t i = 0; i <= engine->model->layer_count; i++)
        ft_json_f64(&json, NULL, v->hidden_error[i] < 0 ? NAN : v->hidden_error[i]);
    ft_json_close(&json, ']');
    if (v->first_departure == FT_NONE)
        ft_json_null(&json, "first_departure");
    else /* -1: the embedding */
        ft_json_i64(&json, "first_departure", (int64_t)v->first_departure - 1);
    if (v->reference.topk)
        ft_json_bool(&json, "router_equal", !v->router_rows_different);
    else
        ft_json_null(&json, "router_equal");
    ft_json_u64(&json, "router_rows_different", v->router_rows_different);
    ft_json_bool(&json, "greedy_equal", v->greedy_equal_count == v->reference.greedy_count);
    ft_json_u64(&json, "greedy_equal_count", v->greedy_equal_count);
    ft_json_u64(&json, "greedy_count", v->reference.greedy_count);
    ft_json_bool(&json, "ok", v->good);
    ft_json_close(&json, '}');
    ft_json_end(&json);
}

/* ---- the command ---- */

/* The plan must know how many rows the reference has, so it is read first; its model comes from the headers. */
static int open_reference(struct verification *v, const struct ft_verify_options *options, const char *path,
                          struct ft_error *err)
{
    struct ft_checkpoint *checkpoint;
    int status = ft_checkpoint_open(&checkpoint, options->open.model, err);
    if (status != FT_OK)
        return status;
    status = ft_reference_open(&v->reference, path, ft_checkpoint_model(checkpoint), err);
    ft_checkpoint_close(checkpoint);
    return status;
}

static int verify_tensors(struct ft_verify_options *options, const char *path, bool *good,
                          struct ft_error *err)
{
    struct verification v;
    struct ft_engine engine;
    memset(&v, 0, sizeof v);
    int status = open_reference(&v, options, path, err);
    if (status != FT_OK)
        return status;
    ft_open_options_want_kv(&options->open, (uint64_t)v.reference.rows + v.reference.greedy_count, 1);
    options->open.plan.all_logits = true;
    status = ft_engine_open(&engine, &options->open, err);
    if (status == FT_OK) {
        struct ft_error close_err;
        status = allocate(&v, engine.model, err);
        if (status == FT_OK)
            status = compute(&v, engine.session, err);
        if (status == FT_OK) {
            compare(&v, engine.model, options->tolerance);
            (options->json ? print_json : print_text)(&v, &engine, options->tolerance);
        }
        if (ft_engine_close(&engine, &close_err) != FT_OK && status == FT_OK) {
            *err = close_err;
            status = err->code;
        }
    }
    *good = v.good;
    free_all(&v);
    return status;
}

static bool ends_with(const char *text, const char *end)
{
    size_t bytes = strlen(text), end_bytes = strlen(end);
    return bytes >= end_bytes && !strcmp(text + bytes - end_bytes, end);
}

static int verify(struct ft_verify_options *options, bool *good, struct ft_error *err)
{
    char dir[4096], path[4200];
    int status = ft_engine_find_dir(&options->open, dir, sizeof dir, err);
    if (status != FT_OK)
        return status;
    options->open.model = dir;
    if (options->reference) {
        snprintf(path, sizeof path, "%s", options->reference);
    } else {
        snprintf(path, sizeof path, "%s/reference.safetensors", dir);
        if (access(path, F_OK) != 0)
            snprintf(path, sizeof path, "%s/reference.json", dir);
        if (access(path, F_OK) != 0 && access(dir, F_OK) == 0)
            return ft_error_set(
                err, FT_IO,
                "%s: has neither reference.safetensors nor reference.json; name one with --reference", dir);
    }
    if (ends_with(path, ".json"))
        return ft_verify_json(options, path, good, err);
    return verify_tensors(options, path, good, err);
}

int ft_command_verify(int argc, char **argv)
{
    struct ft_verify_options options = {.tolerance = 1e-4};
    const struct ft_option_group groups[] = {{"Options", table, FT_COUNT_OF(table), &options},
                                             ft_open_option_group(&options.open)};
    const struct ft_option_set set = {
        "ft verify",
        "--model DIR [options]",
        "Computes what the reference holds and compares: errors per layer and the first layer that departs, "
        "router\n"
        "choices, greedy continuation. Exit code 1: something is out of tolerance.",
        groups,
        FT_COUNT_OF(groups),
        0};
    struct ft_option_rest rest;
    struct ft_error err;
    bool good = false;
    int exit_code;
    ft_open_options_init(&options.open);
    if (!ft_command_parse(&set, argc, argv, &rest, &exit_code))
        return exit_code;
    if (verify(&options, &good, &err) != FT_OK)
        return ft_command_fail(&err);
    return ft_command_finish(good ? FT_EXIT_OK : FT_EXIT_FAILED);
}
