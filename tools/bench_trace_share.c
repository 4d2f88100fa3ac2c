/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench_trace_share.h"

#include "graph/arena.h"
#include "jobs/session_internal.h"
#include "planner/plan_make.h"
#include "tools/machine_probe.h"
#include "tools/trace_file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WARM_STEPS 10u
#define PROMPT_TOKENS 16u

/* Small, and all layers share one layer's weights, which then stay in the caches: steps are short, so that
 * tracing weighs more than in any real model of so many layers. */
static void describe(struct ft_model *model, uint32_t layers)
{
    *model = (struct ft_model){.family = FT_FAMILY_QWEN3_MOE,
                               .name = "synthetic",
                               .hidden = 1024,
                               .vocab = 4096,
                               .layer_count = layers,
                               .rms_eps = 1e-6f,
                               .head_count = 16,
                               .kv_head_count = 4,
                               .head_dim = 64,
                               .qk_norm = true,
                               .rotary_dim = 64,
                               .rotary_theta = 1e6,
                               .expert_count = 32,
                               .topk = 4,
                               .expert_width = 384,
                               .topk_renormalise = true,
                               .activation = FT_ACTIVATION_SILU,
                               .hc_count = 1};
}

struct synthetic {
    struct ft_model model;
    struct ft_weights weights;
    struct ft_arena arena;
    struct ft_layer_weights layers[FT_LAYERS_MAX];
};

static float random_unit(uint64_t *state) /* -1 .. 1 */
{
    /* xorshift64: Marsaglia, "Xorshift RNGs", 2003 */
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (float)((double)(*state >> 11) / (double)(1ull << 52) - 1);
}

static int push_matrix(struct synthetic *s, struct ft_matrix *matrix, uint32_t out, uint32_t in,
                       struct ft_error *err)
{
    uint16_t *data;
    uint64_t state = 0x9e3779b97f4a7c15ull + out;
    float scale = 1.7f / sqrtf((float)in);
    int status = ft_arena_push(&s->arena, (uint64_t)out * in, sizeof *data, (void **)&data, err);
    *matrix = (struct ft_matrix){.data = data, .out = out, .in = in, .format = FT_FORMAT_BF16, .global = 1};
    for (uint64_t i = 0; status == FT_OK && !ft_arena_is_counting(&s->arena) && i < (uint64_t)out * in; i++)
        data[i] = ft_f32_to_bf16(random_unit(&state) * scale);
    return status;
}

static int push_ones(struct synthetic *s, const float **vector, uint32_t count, struct ft_error *err)
{
    float *data;
    int status = FT_ARENA_PUSH(&s->arena, count, &data, err);
    for (uint32_t i = 0; status == FT_OK && !ft_arena_is_counting(&s->arena) && i < count; i++)
        data[i] = 1;
    *vector = data;
    return status;
}

static int push_experts(struct synthetic *s, struct ft_layer_weights *w, struct ft_error *err)
{
    const struct ft_model *m = &s->model;
    uint16_t *bank;
    uint64_t state = 77;
    int status = ft_expert_layout_init(&w->expert_layout, FT_FORMAT_BF16, m->hidden, m->expert_width, 0, 0,
                                       false, m->activation, 0, err);
    uint64_t count = (uint64_t)w->expert_layout.stride * m->expert_count / sizeof *bank;
    if (status == FT_OK)
        status = ft_arena_push(&s->arena, count, sizeof *bank, (void **)&bank, err);
    if (status != FT_OK || ft_arena_is_counting(&s->arena))
        return status;
    for (uint64_t i = 0; i < count; i++)
        bank[i] = ft_f32_to_bf16(random_unit(&state) * 0.06f);
    w->experts = (const char *)bank;
    return FT_OK;
}

/* Run twice, counting and real. */
static int push_weights(struct synthetic *s, struct ft_error *err)
{
    const struct ft_model *m = &s->model;
    struct ft_layer_weights *w = &s->layers[0];
    uint32_t width = m->head_count * m->head_dim, kv = m->kv_head_count * m->head_dim;
    int status = push_matrix(s, &s->weights.embed, m->vocab, m->hidden, err);
#define PUSH(call)                                                                                           \
    if (status == FT_OK)                                                                                     \
    status = call
    PUSH(push_matrix(s, &s->weights.head, m->vocab, m->hidden, err));
    PUSH(push_ones(s, &s->weights.final_norm, m->hidden, err));
    PUSH(push_ones(s, &w->attention_norm, m->hidden, err));
    PUSH(push_ones(s, &w->mlp_norm, m->hidden, err));
    PUSH(push_matrix(s, &w->attention.q, width, m->hidden, err));
    PUSH(push_matrix(s, &w->attention.k, kv, m->hidden, err));
    PUSH(push_matrix(s, &w->attention.v, kv, m->hidden, err));
    PUSH(push_matrix(s, &w->attention.o, m->hidden, width, err));
    PUSH(push_ones(s, &w->attention.q_norm, m->head_dim, err));
    PUSH(push_ones(s, &w->attention.k_norm, m->head_dim, err));
    PUSH(push_matrix(s, &w->router, m->expert_count, m->hidden, err));
    PUSH(push_experts(s, w, err));
#undef PUSH
    for (uint32_t i = 1; i < m->layer_count; i++)
        s->layers[i] = *w;
    s->weights.layers = s->layers;
    return status;
}

static int synthetic_init(struct synthetic *s, uint32_t layers, struct ft_error *err)
{
    describe(&s->model, layers);
    int status = ft_model_finish(&s->model, err);
    ft_arena_count(&s->arena, "synthetic model");
    if (status == FT_OK)
        status = push_weights(s, err);
    if (status == FT_OK)
        status = ft_arena_init(&s->arena, "synthetic model", s->arena.used, err);
    return status == FT_OK ? push_weights(s, err) : status;
}

static int make_plan(const struct ft_trace_share_options *o, const struct synthetic *s, struct ft_plan *plan,
                     struct ft_error *err)
{
    const struct ft_layer_weights *w = &s->layers[0];
    struct ft_machine machine;
    struct ft_weight_sizes sizes = {.dense_bytes = s->arena.used,
                                    .expert_bytes_max = w->expert_layout.stride,
                                    .expert_total_bytes =
                                        (uint64_t)w->expert_layout.stride * s->model.expert_count,
                                    .moe_layer_count = s->model.layer_count,
                                    .expert_format = FT_FORMAT_BF16};
    struct ft_plan_options wishes = {.strategy = FT_STRATEGY_CPU,
                                     .workers = o->workers,
                                     .slot_rate = -1,
                                     .fetch_share = -1,
                                     .kv_tokens = PROMPT_TOKENS + WARM_STEPS + FT_TRACE_WAYS * o->steps + 64,
                                     .sequences_max = 1};
    ft_machine_probe(&machine, o->topology, NULL);
    return ft_plan_make(&s->model, &sizes, &machine, &wishes, plan, err);
}

/* ---- the steps ---- */

struct samples {
    struct ft_session *session;
    struct ft_trace_file file;
    double *step_ns[FT_TRACE_WAYS], *records, *file_ns; /* [steps] each */
    uint64_t callback_ns;
};

static void write_step(void *context, const struct ft_trace_step *step)
{
    struct samples *samples = context;
    uint64_t begin = ft_session_now_ns(samples->session);
    ft_trace_file_step(&samples->file, step);
    samples->callback_ns = ft_session_now_ns(samples->session) - begin;
}

/* Rings without room take no record; with room again from the next step on. */
static void set_way(struct ft_session *session, enum ft_trace_way way, uint32_t capacity)
{
    for (uint32_t t = 0; t < session->step.thread_count; t++)
        session->step.traces[t].capacity = way == FT_TRACE_BARE ? 0 : capacity;
    session->options.trace = way == FT_TRACE_FILE ? write_step : NULL;
}

static int one_step(struct samples *samples, double *ns, struct ft_error *err)
{
    struct ft_event events[2 * FT_SEQUENCES_MAX];
    uint32_t count;
    uint64_t begin = ft_session_now_ns(samples->session);
    int status = ft_session_step(samples->session, events, 2 * FT_SEQUENCES_MAX, &count, err);
    *ns = (double)(ft_session_now_ns(samples->session) - begin);
    for (uint32_t i = 0; status == FT_OK && i < count; i++)
        if (events[i].kind == FT_EVENT_FAILED)
            status = ft_error_set(err, FT_INTERNAL, "trace share: a step failed: %s", events[i].message);
    return status;
}

static int run_steps(struct samples *samples, uint32_t steps, struct ft_error *err)
{
    struct ft_session *session = samples->session;
    uint32_t sequence, capacity = session->step.traces[0].capacity;
    uint32_t prompt[PROMPT_TOKENS];
    double ignored;
    for (uint32_t i = 0; i < PROMPT_TOKENS; i++)
        prompt[i] = 17 * i + 3;
    struct ft_request request = {
        .prompt = prompt,
        .prompt_count = PROMPT_TOKENS,
        .max_tokens = WARM_STEPS + FT_TRACE_WAYS * steps + 1,
        .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 3}};
    int status = ft_session_submit(session, &request, &sequence, err);
    set_way(session, FT_TRACE_RECORDS, capacity);
    for (uint32_t i = 0; status == FT_OK && i < WARM_STEPS; i++)
        status = one_step(samples, &ignored, err);
    for (uint32_t i = 0; status == FT_OK && i < FT_TRACE_WAYS * steps; i++) {
        uint32_t at = i / FT_TRACE_WAYS;
        enum ft_trace_way way = (enum ft_trace_way)((i + at) % FT_TRACE_WAYS); /* each way in each place */
        set_way(session, way, capacity);
        status = one_step(samples, &samples->step_ns[way][at], err);
        if (way != FT_TRACE_FILE)
            continue;
        samples->file_ns[at] = (double)samples->callback_ns;
        for (uint32_t t = 0; t < session->step.thread_count; t++)
            samples->records[at] += session->step.traces[t].count;
    }
    set_way(session, FT_TRACE_RECORDS, capacity);
    if (status == FT_OK && samples->file.failure.code != FT_OK) {
        *err = samples->file.failure;
        status = err->code;
    }
    return status;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, uint32_t count)
{
    qsort(values, count, sizeof *values, compare_doubles);
    return values[count / 2];
}

static void summarise(const struct ft_trace_share_options *o, struct samples *samples,
                      struct ft_trace_share *share)
{
    for (uint32_t way = 0; way < FT_TRACE_WAYS; way++)
        share->step_ns[way] = median(samples->step_ns[way], o->steps);
    share->records_per_step = median(samples->records, o->steps);
    share->file_ns = median(samples->file_ns, o->steps);
    double step = share->step_ns[FT_TRACE_FILE];
    share->records_share = share->records_per_step * o->ns_per_record / o->workers / step;
    share->file_share = share->file_ns / step;
    share->measured_share = (step - share->step_ns[FT_TRACE_BARE]) / step;
}

static int open_session(const struct ft_trace_share_options *o, const struct synthetic *s,
                        const struct ft_plan *plan, struct samples *samples, struct ft_error *err)
{
    struct ft_session_options options = {.model = &s->model,
                                         .weights = &s->weights,
                                         .plan = plan,
                                         .topology = o->topology,
                                         .pin = true,
                                         .trace = write_step,
                                         .trace_context = samples};
    int status = ft_session_open(&samples->session, &options, err);
    if (status != FT_OK)
        return status;
    struct ft_trace_header *header = calloc(1, sizeof *header);
    if (!header)
        return ft_error_set(err, FT_MEMORY, "no memory for the trace's header");
    ft_session_trace_header(samples->session, header);
    ft_trace_file_begin(&samples->file, header);
    free(header);
    return FT_OK;
}

static int measure(const struct ft_trace_share_options *o, const struct synthetic *s, const char *path,
                   struct ft_trace_share *share, struct ft_error *err)
{
    struct samples samples = {0};
    struct ft_plan plan;
    struct ft_error ignored;
    double *values = calloc(((uint64_t)FT_TRACE_WAYS + 2) * o->steps, sizeof *values);
    int status = values ? make_plan(o, s, &plan, err) : ft_error_set(err, FT_MEMORY, "no memory for samples");
    for (uint32_t way = 0; way < FT_TRACE_WAYS; way++)
        samples.step_ns[way] = values + (uint64_t)way * o->steps;
    samples.records = values + (uint64_t)FT_TRACE_WAYS * o->steps;
    samples.file_ns = samples.records + o->steps;
    if (status == FT_OK)
        status = ft_trace_file_open(&samples.file, path, err);
    if (status == FT_OK)
        status = open_session(o, s, &plan, &samples, err);
    if (status == FT_OK)
        status = run_steps(&samples, o->steps, err);
    if (status == FT_OK)
        summarise(o, &samples, share);
    ft_session_close(samples.session);
    ft_trace_file_close(&samples.file, &ignored);
    free(values);
    return status;
}

int ft_bench_trace_share(const struct ft_trace_share_options *options, struct ft_trace_share *share,
                         struct ft_error *err)
{
    const char *folder = getenv("TMPDIR");
    char path[4096];
    struct synthetic *s = calloc(1, sizeof *s);
    memset(share, 0, sizeof *share);
    if (!s)
        return ft_error_set(err, FT_MEMORY, "no memory for a synthetic model");
    snprintf(path, sizeof path, "%s/ft-trace-share-XXXXXX", folder && folder[0] ? folder : "/tmp");
    int fd = mkstemp(path);
    int status = fd >= 0 ? synthetic_init(s, options->layers, err)
                         : ft_error_set(err, FT_IO, "%s: cannot be made; set TMPDIR", path);
    if (status == FT_OK)
        status = measure(options, s, path, share, err);
    if (fd >= 0) {
        close(fd);
        unlink(path);
    }
    ft_arena_fini(&s->arena);
    free(s);
    return status;
}
