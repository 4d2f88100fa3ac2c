/* SPDX-License-Identifier: Apache-2.0 */
/* What a step launches: the block of inputs, the launches of a layer, and captured graphs of decode steps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jobs/lane_cuda_internal.h"

#define TOKENS_BOUND_MIN FT_GPU_TOKENS_MIN
#define COUNTER_COUNT 64u

/* ---- buffers ---- */

static uint64_t place(uint64_t *at, uint64_t count, uint64_t size)
{
    uint64_t offset = *at;
    *at += ft_round_up(count * size, 64);
    return offset;
}

static void lay_out_inputs(struct ft_cuda_inputs *inputs, const struct ft_lane_cuda_options *o, uint32_t rows)
{
    uint64_t at = 0;
    inputs->token = place(&at, rows, 4);
    inputs->position = place(&at, rows, 4);
    inputs->row_sequence = place(&at, rows, 4);
    inputs->logit_row = place(&at, o->logit_rows_max, 4);
    inputs->first_row = place(&at, o->sequences_max, 4);
    inputs->row_count = place(&at, o->sequences_max, 4);
    inputs->epoch = place(&at, 1, 4);
    inputs->looks_ahead = place(&at, 1, 4);
    inputs->state = place(&at, o->sequences_max, sizeof(float *));
    inputs->page = place(&at, (uint64_t)o->sequences_max * o->pages_max, sizeof(float *));
    inputs->sampling = place(&at, o->logit_rows_max, sizeof(struct ft_cuda_sampling));
    inputs->bytes = at;
}

static void point_inputs(struct ft_lane_cuda *lane)
{
    const struct ft_cuda_inputs *in = &lane->inputs;
    char *base = lane->inputs_device;
    struct ft_cuda_step *s = &lane->c.step;
    s->token = (const uint32_t *)(base + in->token);
    s->position = (const uint32_t *)(base + in->position);
    s->row_sequence = (const uint32_t *)(base + in->row_sequence);
    s->logit_row = (const uint32_t *)(base + in->logit_row);
    s->first_row = (const uint32_t *)(base + in->first_row);
    s->row_count = (const uint32_t *)(base + in->row_count);
    s->epoch = (const uint32_t *)(base + in->epoch);
    s->looks_ahead = (const uint32_t *)(base + in->looks_ahead);
    s->state = (float *const *)(base + in->state);
    s->page = (float *const *)(base + in->page);
    s->sampling = (const struct ft_cuda_sampling *)(base + in->sampling);
    s->pages_max = lane->options.pages_max;
}

static int make_inputs(struct ft_lane_cuda *lane, struct ft_cuda_set *set, uint32_t rows,
                       struct ft_error *err)
{
    const struct ft_lane_cuda_options *o = &lane->options;
    set->rows_max = rows;
    lay_out_inputs(&set->inputs, o, rows);
    int status =
        ft_cuda_alloc(lane, FT_TIER_RAM, set->inputs.bytes, "step inputs", (void **)&set->inputs_host, err);
    if (status == FT_OK)
        status = ft_cuda_alloc(lane, FT_TIER_DEVICE, set->inputs.bytes, "step inputs",
                               (void **)&set->inputs_device, err);
    if (status == FT_OK)
        status =
            ft_cuda_alloc(lane, FT_TIER_RAM, (uint64_t)rows * 4, "row states", (void **)&set->failed, err);
    if (status == FT_OK)
        status = ft_cuda_alloc(lane, FT_TIER_RAM, (uint64_t)FT_MAX(o->logit_rows_max, 1u) * 4,
                               "sampled tokens", (void **)&set->sampled, err);
    lane->recent_max = lane->options.pages_max * lane->step->plan->page_tokens;
    if (status == FT_OK && !lane->next) /* who has the head samples */
        status = ft_cuda_alloc(lane, FT_TIER_DEVICE, (uint64_t)o->logit_rows_max * lane->recent_max * 4,
                               "recent tokens", (void **)&set->recent_device, err);
    return status;
}

/* The activations of `rows` rows and their inputs. */
static int make_set(struct ft_lane_cuda *lane, enum ft_set which, uint32_t rows, struct ft_error *err)
{
    struct ft_cuda_set *set = &lane->sets[which];
    const struct ft_activations *host = &lane->step->x.sets[which];
    uint32_t logit_rows = lane->next ? 0 : lane->options.logit_rows_max; /* the last GPU has the head */
    ft_workspace_init(&set->space, lane->step->model, rows, lane->options.sequences_max,
                      FT_MIN(logit_rows, which == FT_SET_DECODE ? rows : UINT32_MAX));
    set->host_ple = host->buffer + host->space.ple_e;
    int status = ft_cuda_alloc(lane, FT_TIER_DEVICE, set->space.count * sizeof(float), "activations",
                               (void **)&set->base, err);
    return status == FT_OK ? make_inputs(lane, set, rows, err) : status;
}

static int make_sets(struct ft_lane_cuda *lane, struct ft_error *err)
{
    uint32_t rows = ft_plan_decode_rows(lane->step->plan);
    int status = make_set(lane, FT_SET_PREFILL, lane->options.rows_max, err);
    if (status == FT_OK && rows)
        status = make_set(lane, FT_SET_DECODE, rows, err);
    else
        lane->sets[FT_SET_DECODE] = lane->sets[FT_SET_PREFILL];
    return status;
}

void ft_cuda_use_set(struct ft_lane_cuda *lane, enum ft_set which)
{
    const struct ft_cuda_set *set = &lane->sets[which];
    struct ft_cuda *c = &lane->c;
    lane->inputs = set->inputs;
    lane->inputs_host = set->inputs_host;
    lane->inputs_device = set->inputs_device;
    lane->recent_device = set->recent_device;
    c->space = set->space;
    c->base = set->base;
    c->step.failed = set->failed;
    c->step.sampled = set->sampled;
    c->exchange.rows_max = set->rows_max;
    c->exchange.host_ple = set->host_ple;
    point_inputs(lane);
}

static int make_list(struct ft_lane_cuda *lane, struct ft_cuda_list *list, uint32_t groups, uint32_t pairs,
                     struct ft_error *err)
{
    char *block = NULL;
    uint64_t at = 0;
    uint64_t count = place(&at, 1, 4), blob = place(&at, groups, sizeof(char *)),
             begin = place(&at, groups + 1ull, 4);
    uint64_t row = place(&at, pairs, 4), out = place(&at, pairs, 4);
    int status = ft_cuda_alloc(lane, FT_TIER_DEVICE, at, "expert lists", (void **)&block, err);
    if (status != FT_OK)
        return status;
    *list = (struct ft_cuda_list){.group_count = (uint32_t *)(block + count),
                                  .blob = (const char **)(block + blob),
                                  .pair_begin = (uint32_t *)(block + begin),
                                  .pair_row = (uint32_t *)(block + row),
                                  .pair_out = (uint32_t *)(block + out),
                                  .groups_max = groups,
                                  .pairs_max = pairs};
    return FT_OK;
}

static int make_host_lists(struct ft_lane_cuda *lane, struct ft_error *err)
{
    const struct ft_model *m = lane->step->model;
    struct ft_cuda_host_lists *h = &lane->lists;
    uint32_t groups = FT_MAX(m->expert_count, 1u), pairs = lane->options.rows_max * FT_MAX(m->topk, 1u);
    char *block = NULL;
    uint64_t at = 0;
    h->waves_max = groups + 1;
    uint64_t blob = place(&at, groups, sizeof(char *)), begin = place(&at, groups + 1ull, 4),
             row = place(&at, pairs, 4);
    uint64_t out = place(&at, pairs, 4), counts = place(&at, h->waves_max, 4), on_cpu = place(&at, pairs, 4);
    int status = ft_cuda_alloc(lane, FT_TIER_RAM, at, "expert lists", (void **)&block, err);
    if (status == FT_OK)
        status = make_list(lane, &h->device, groups, pairs, err);
    if (status == FT_OK)
        status = ft_cuda_alloc(lane, FT_TIER_DEVICE, h->waves_max * 4ull, "expert lists",
                               (void **)&h->device_counts, err);
    if (status != FT_OK)
        return status;
    h->blob = (const char **)(block + blob);
    h->pair_begin = (uint32_t *)(block + begin);
    h->pair_row = (uint32_t *)(block + row);
    h->pair_out = (uint32_t *)(block + out);
    h->counts = (uint32_t *)(block + counts);
    h->on_cpu = (uint32_t *)(block + on_cpu);
    return FT_OK;
}

/* One pinned block for everything that both sides poll or read. */
static int make_exchange(struct ft_lane_cuda *lane, struct ft_error *err)
{
    const struct ft_model *m = lane->step->model;
    struct ft_cuda_exchange *e = &lane->c.exchange;
    struct ft_execute *x = &lane->step->x;
    uint32_t layers = m->layer_count, rows = lane->options.rows_max, k = FT_MAX(m->topk, 1u);
    uint32_t decode = FT_MIN(rows, FT_CUDA_DECODE_ROWS);
    uint64_t line = FT_CUDA_FLAG_STRIDE * 4ull, at = 0;
    char *block = NULL;
    e->moves_max = decode * k + 64;
    uint64_t routed = place(&at, layers, line), fetched = place(&at, layers, line),
             computed = place(&at, layers, line);
    uint64_t ple = place(&at, m->ple_count, line), done = place(&at, 1, line), stop = place(&at, 1, line);
    uint64_t ids = place(&at, (uint64_t)layers * rows * k, 4), missing = place(&at, layers, 4);
    uint64_t move_count = place(&at, layers, 4);
    uint64_t moves = place(&at, (uint64_t)layers * e->moves_max, sizeof(struct ft_cuda_move));
    bool looks = lane->step->foresight.mark != NULL;
    uint64_t foreseen = place(&at, looks ? layers : 0, line),
             foreseen_ids = place(&at, looks ? (uint64_t)layers * decode * k : 0, 4);
    uint64_t forced = place(&at, x->routing ? (uint64_t)layers * decode * k : 0, 4);
    uint64_t stamps = place(&at, ft_cuda_stamp_count(layers), 8);
    int status = ft_cuda_alloc(lane, FT_TIER_RAM, at, "flags and router results", (void **)&block, err);
    if (status == FT_OK)
        status = ft_cuda_alloc(lane, FT_TIER_DEVICE, (uint64_t)layers * FT_MAX(m->expert_count, 1u) * 4,
                               "the slot map", (void **)&e->slot_of, err);
    if (status == FT_OK)
        status = ft_cuda_alloc(lane, FT_TIER_RAM, (uint64_t)layers * FT_MAX(m->expert_count, 1u) * 4,
                               "the slot map", (void **)&lane->map_host, err);
    if (status == FT_OK)
        status =
            ft_cuda_alloc(lane, FT_TIER_DEVICE, (uint64_t)rows * k * 4, "places", (void **)&e->on_cpu, err);
    if (status == FT_OK)
        status =
            ft_cuda_alloc(lane, FT_TIER_DEVICE, COUNTER_COUNT * 4, "counters", (void **)&e->counters, err);
    if (status == FT_OK)
        status = ft_cuda_alloc(lane, FT_TIER_DEVICE, ft_cuda_stamp_count(layers) * sizeof(uint64_t),
                               "time stamps", (void **)&lane->c.stamps, err);
    if (status == FT_OK && looks)
        status = ft_cuda_alloc(lane, FT_TIER_DEVICE, (uint64_t)decode * m->expert_count * sizeof(float),
                               "the router look-ahead", (void **)&e->foreseen_logits, err);
    if (status == FT_OK)
        status = make_list(lane, &e->resident, decode * k, decode * k, err);
    if (status == FT_OK)
        status = make_list(lane, &e->fetched_list, decode * k, decode * k, err);
    if (status != FT_OK)
        return status;
    e->routed = (uint32_t *)(block + routed);
    e->fetched = lane->host.fetched = (uint32_t *)(block + fetched);
    e->computed = lane->host.computed = (uint32_t *)(block + computed);
    e->ple = lane->host.ple = (uint32_t *)(block + ple);
    e->done = (uint32_t *)(block + done);
    e->abort = lane->host.abort = (uint32_t *)(block + stop);
    e->ids = (uint32_t *)(block + ids);
    e->missing = (uint32_t *)(block + missing);
    e->move_count = lane->host.move_count = (uint32_t *)(block + move_count);
    e->moves = lane->host.moves = (struct ft_cuda_move *)(block + moves);
    e->foreseen = looks ? (uint32_t *)(block + foreseen) : NULL;
    e->foreseen_ids = looks ? (uint32_t *)(block + foreseen_ids) : NULL;
    e->layer_end = lane->layer_end;
    e->forced_ids = lane->host.forced = x->routing ? (uint32_t *)(block + forced) : NULL;
    lane->c.host_stamps = (uint64_t *)(block + stamps);
    e->host_x = ft_execute_at(x, x->space.x, 0, 0);
    e->host_y = ft_execute_at(x, x->space.expert_y, 0, 0);
    /* Slots are numbered over all GPUs, their blobs are not. */
    const struct ft_slots *slots = &lane->step->slots;
    const struct ft_slots_part *part = &slots->parts[ft_slots_part_of(slots, lane->layer_begin)];
    e->slots = part->memory;
    e->slot_bytes = lane->step->slots.slot_bytes;
    return FT_OK;
}

static int make_workspace(struct ft_lane_cuda *lane, struct ft_error *err)
{
    const struct ft_model *m = lane->step->model;
    struct ft_cuda *c = &lane->c;
    double *frequencies = NULL;
    uint32_t half = FT_MAX(m->rotary_dim / 2, 1u);
    c->scratch_bytes = ft_workspace_gpu_bytes(
        m, lane->options.rows_max, (uint64_t)lane->options.pages_max * lane->step->plan->page_tokens);
    int status = make_sets(lane, err);
    if (status == FT_OK)
        status = ft_cuda_alloc(lane, FT_TIER_DEVICE, c->scratch_bytes, "prefill workspace",
                               (void **)&c->scratch, err);
    if (status == FT_OK)
        status =
            ft_cuda_alloc(lane, FT_TIER_DEVICE, half * sizeof(double), "rotary", (void **)&frequencies, err);
    if (status == FT_OK)
        status = FT_CUDA_TRY(
            lane,
            cudaMemcpy(frequencies, lane->step->x.frequencies, half * sizeof(double), cudaMemcpyHostToDevice),
            err, "copying rotary frequencies");
    c->frequencies = frequencies;
    c->rotary_scale = (float)lane->step->x.rotary_scale;
    return status;
}

static int make_angles(struct ft_lane_cuda *lane, struct ft_error *err)
{
    if (lane->first == lane)
        return FT_OK;
    lane->angles = malloc(sizeof *lane->angles);
    if (!lane->angles)
        return ft_error_set(err, FT_MEMORY, "no memory for GPU %d's view of the model", lane->gpu);
    *lane->angles = *lane->step->model;
    lane->angles->hidden = 0; /* no embedding */
    return FT_OK;
}

int ft_cuda_make_buffers(struct ft_lane_cuda *lane, struct ft_error *err)
{
    struct ft_cuda *c = &lane->c;
    c->model = lane->step->model;
    c->weights = &lane->weights;
    ft_state_layout_init_layers(&c->state, c->model, lane->layer_begin, lane->layer_end);
    ft_kv_layout_init_layers(&c->kv, c->model, lane->layer_begin, lane->layer_end);
    c->multiprocessors = lane->info.multiprocessors;
    int status = make_angles(lane, err);
    if (status == FT_OK)
        status = make_workspace(lane, err);
    if (status == FT_OK)
        status = make_exchange(lane, err);
    if (status == FT_OK)
        status = make_host_lists(lane, err);
    if (status == FT_OK)
        status = ft_cuda_alloc(lane, FT_TIER_DEVICE, 64, "the link throttle", (void **)&lane->throttle, err);
    lane->map_dirty = true;
    if (status == FT_OK)
        ft_cuda_use_set(lane, FT_SET_DECODE);
    return status;
}

/* ---- inputs ---- */

uint32_t ft_cuda_tokens_bound(const struct ft_batch *batch)
{
    uint32_t most = 0, bound = TOKENS_BOUND_MIN;
    for (uint32_t r = 0; r < batch->rows; r++)
        most = FT_MAX(most, batch->position[r] + 1);
    while (bound < most)
        bound *= 2;
    return bound;
}

static int fill_sampling(struct ft_lane_cuda *lane, const struct ft_batch *batch,
                         struct ft_cuda_sampling *out)
{
    int error = 0;
    for (uint32_t l = 0; l < batch->logit_rows; l++) {
        uint32_t row = batch->logit_row[l];
        const struct ft_batch_sequence *s = &batch->sequences[batch->row_sequence[row]];
        const struct ft_sampling *p = s->sampling;
        uint32_t *recent = lane->recent_device + (uint64_t)l * lane->recent_max;
        out[l] = (struct ft_cuda_sampling){.temperature = p->temperature,
                                           .top_p = p->top_p,
                                           .min_p = p->min_p,
                                           .repetition_penalty = p->repetition_penalty,
                                           .top_k = p->top_k,
                                           .wanted = batch->position[row] + 1 == s->token_count,
                                           .seed = p->seed,
                                           .position = s->token_count,
                                           .recent = recent};
        if (p->repetition_penalty == 1 || !out[l].wanted)
            continue;
        out[l].recent_count = FT_MIN(s->token_count, lane->recent_max);
        if (!error)
            error = (int)cudaMemcpyAsync(recent, s->tokens, out[l].recent_count * 4ull,
                                         cudaMemcpyHostToDevice, lane->compute);
    }
    return error;
}

/* Given routing of a decode step: [layers, rows, k]. */
static void fill_forced(struct ft_lane_cuda *lane, const struct ft_batch *batch)
{
    const struct ft_routing *routing = lane->step->x.routing;
    uint32_t k = lane->step->model->topk, *to = lane->host.forced;
    for (uint32_t layer = 0; layer < lane->step->model->layer_count; layer++)
        for (uint32_t r = 0; r < batch->rows; r++) {
            const uint16_t *ids = ft_routing_row(routing, batch->decode_step, layer, r);
            for (uint32_t j = 0; j < k; j++)
                *to++ = ids[j];
        }
}

int ft_cuda_fill_inputs(struct ft_lane_cuda *lane, const struct ft_batch *batch, uint32_t epoch)
{
    const struct ft_cuda_inputs *in = &lane->inputs;
    char *base = lane->inputs_host;
    uint32_t *first = (uint32_t *)(base + in->first_row), *count = (uint32_t *)(base + in->row_count);
    float **state = (float **)(base + in->state), **page = (float **)(base + in->page);
    memcpy(base + in->token, batch->token, batch->rows * 4ull);
    memcpy(base + in->position, batch->position, batch->rows * 4ull);
    memcpy(base + in->row_sequence, batch->row_sequence, batch->rows * 4ull);
    memcpy(base + in->logit_row, batch->logit_row, batch->logit_rows * 4ull);
    memcpy(base + in->epoch, &epoch, 4);
    memcpy(base + in->looks_ahead, &(uint32_t){lane->step->looks_ahead}, 4);
    for (uint32_t s = 0; s < batch->sequence_count; s++) {
        const struct ft_batch_sequence *sequence = &batch->sequences[s];
        uint32_t pages = (sequence->position + sequence->row_count - 1) / lane->step->plan->page_tokens + 1;
        first[s] = sequence->first_row;
        count[s] = sequence->row_count;
        state[s] = ft_cuda_part_of(lane, FT_CUDA_SPREAD_STATE, sequence->state);
        for (uint32_t p = 0; p < pages; p++)
            page[(uint64_t)s * lane->options.pages_max + p] =
                ft_cuda_part_of(lane, FT_CUDA_SPREAD_KV, sequence->pages[p]);
    }
    for (uint32_t r = 0; r < batch->rows; r++)
        lane->c.step.failed[r] = 0;
    for (uint32_t l = 0; l < batch->logit_rows; l++)
        lane->c.step.sampled[l] = FT_NONE;
    if (lane->host.forced && !batch->prefill && batch->rows <= FT_CUDA_DECODE_ROWS)
        fill_forced(lane, batch);
    return lane->next ? 0 : fill_sampling(lane, batch, (struct ft_cuda_sampling *)(base + in->sampling));
}

int ft_cuda_copy_inputs(struct ft_lane_cuda *lane)
{
    return (int)cudaMemcpyAsync(lane->inputs_device, lane->inputs_host, lane->inputs.bytes,
                                cudaMemcpyHostToDevice, lane->compute);
}

/* ---- launches ---- */

#define RUN(call)                                                                                            \
    if (!error)                                                                                              \
    error = (call)

int ft_cuda_launch_begin(const struct ft_lane_cuda *lane, const struct ft_cuda *c)
{
    if (lane->first == lane)
        return ft_cuda_embed(c, lane->compute);
    struct ft_cuda angles = *c;
    angles.model = lane->angles;
    return ft_cuda_embed(&angles, lane->compute);
}

int ft_cuda_launch_front(const struct ft_cuda *c, uint32_t layer, uint32_t tokens, bool captured,
                         void *stream)
{
    const struct ft_layer_spec *spec = &c->model->layers[layer];
    int error = 0;
    if (spec->ple != FT_PLE_NONE) {
        RUN(ft_cuda_ple_arrive(c, spec->ple, captured, stream));
        RUN(ft_cuda_ple_inject(c, layer, stream));
    }
    RUN(ft_cuda_mix(c, FT_PHASE_ATTENTION, layer, stream));
    RUN(ft_cuda_attention_project(c, layer, stream));
    if (spec->attention == FT_ATTENTION_LINEAR) {
        RUN(ft_cuda_linear_attention(c, layer, stream));
    } else {
        RUN(ft_cuda_attention_prepare(c, layer, stream));
        if (spec->attention == FT_ATTENTION_SPARSE)
            RUN(ft_cuda_attention_select(c, layer, tokens, stream));
        RUN(ft_cuda_attention(c, layer, tokens, stream));
    }
    RUN(ft_cuda_attention_out(c, layer, stream));
    RUN(ft_cuda_mix(c, FT_PHASE_MLP, layer, stream));
    if (spec->dense) {
        RUN(ft_cuda_dense_mlp(c, layer, stream));
    } else {
        /* A captured route writes the CPU's input itself, and only when it is needed. */
        if (!captured && c->exchange.host_x)
            RUN((int)cudaMemcpyAsync(c->exchange.host_x, c->base + c->space.x,
                                     (uint64_t)c->step.rows * c->model->hidden * sizeof(float),
                                     cudaMemcpyDeviceToHost, (cudaStream_t)stream));
        RUN(ft_cuda_route(c, layer, captured, stream));
    }
    return error;
}

int ft_cuda_launch_head(const struct ft_cuda *c, void *stream)
{
    int error = 0;
    if (c->step.logit_rows) {
        RUN(ft_cuda_mix(c, FT_PHASE_HEAD, 0, stream));
        RUN(ft_cuda_head(c, stream));
        RUN(ft_cuda_sample(c, stream));
    }
    RUN(ft_cuda_end(c, stream));
    return error;
}

/* Everything behind the router of a captured step. */
static int launch_back(const struct ft_lane_cuda *lane, const struct ft_cuda *c, uint32_t layer, void *stream)
{
    const struct ft_model *m = c->model;
    uint32_t groups = FT_MIN(c->step.rows * m->topk, m->expert_count);
    bool fused = lane->step->plan->strategy == FT_STRATEGY_FUSED;
    int error = 0;
    RUN(ft_cuda_experts(c, layer, &c->exchange.resident, groups, c->step.rows, m->shared_width != 0,
                        ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_RESIDENT), stream));
    if (!fused) {
        RUN(ft_cuda_wait_fetched(c, layer, stream));
        RUN(ft_cuda_experts(c, layer, &c->exchange.fetched_list, groups, c->step.rows, false,
                            ft_cuda_stamp_of(c, layer, FT_CUDA_STAMP_FETCHED), stream));
        RUN(ft_cuda_wait_computed(c, layer, stream));
    }
    RUN(ft_cuda_combine(c, layer, !fused, stream));
    return error;
}

/* What a GPU but the first waits for in the stream is behind its inputs, and what it hands on behind its layers. */
static int launch_all(struct ft_lane_cuda *lane, const struct ft_cuda *c, uint32_t tokens)
{
    int error = 0;
    if (lane->first == lane) {
        RUN(ft_cuda_copy_inputs(lane));
        RUN(ft_cuda_launch_begin(lane, c));
    }
    for (uint32_t i = lane->layer_begin; i < lane->layer_end; i++) {
        RUN(ft_cuda_launch_front(c, i, tokens, true, lane->compute));
        if (!c->model->layers[i].dense)
            RUN(launch_back(lane, c, i, lane->compute));
    }
    if (!lane->next)
        RUN(ft_cuda_launch_head(c, lane->compute));
    return error;
}
#undef RUN

/* ---- captures ---- */

static int capture(struct ft_lane_cuda *lane, struct ft_cuda_capture *entry, struct ft_error *err)
{
    struct ft_cuda c = lane->c;
    cudaGraph_t graph = NULL;
    size_t nodes = 0;
    c.step.rows = c.step.sequences = entry->rows;
    c.step.logit_rows = entry->logit_rows;
    int status = FT_CUDA_TRY(lane, cudaStreamBeginCapture(lane->compute, cudaStreamCaptureModeThreadLocal),
                             err, "beginning a capture");
    if (status != FT_OK)
        return status;
    int error = launch_all(lane, &c, entry->tokens);
    cudaError_t end = cudaStreamEndCapture(lane->compute, &graph);
    status = ft_cuda_check(lane, error ? error : (int)end, err, "capturing a decode step");
    if (status == FT_OK)
        status = FT_CUDA_TRY(lane, cudaGraphGetNodes(graph, NULL, &nodes), err, "counting nodes");
    if (status == FT_OK)
        status = FT_CUDA_TRY(lane, cudaGraphInstantiate(&entry->exec, graph, 0), err,
                             "instantiating a decode step");
    if (status == FT_OK)
        status =
            FT_CUDA_TRY(lane, cudaGraphUpload(entry->exec, lane->compute), err, "uploading a decode step");
    if (graph)
        (void)cudaGraphDestroy(graph);
    entry->nodes = (uint32_t)nodes;
    return status;
}

static void drop(struct ft_cuda_capture *entry)
{
    if (entry->exec)
        (void)cudaGraphExecDestroy(entry->exec);
    memset(entry, 0, sizeof *entry);
}

int ft_cuda_find_capture(struct ft_lane_cuda *lane, uint32_t rows, uint32_t logit_rows, uint32_t tokens,
                         struct ft_cuda_capture **found, struct ft_error *err)
{
    struct ft_cuda_capture *oldest = &lane->captures[0];
    for (uint32_t i = 0; i < FT_CUDA_GRAPHS_MAX; i++) {
        struct ft_cuda_capture *entry = &lane->captures[i];
        if (entry->exec && entry->rows == rows && entry->logit_rows == logit_rows &&
            entry->tokens == tokens) {
            entry->last_used = ++lane->capture_clock;
            *found = entry;
            return FT_OK;
        }
        if (entry->last_used < oldest->last_used)
            oldest = entry;
    }
    drop(oldest);
    oldest->rows = rows;
    oldest->logit_rows = logit_rows;
    oldest->tokens = tokens;
    int status = capture(lane, oldest, err);
    if (status != FT_OK) {
        drop(oldest);
        return status;
    }
    oldest->last_used = ++lane->capture_clock;
    *found = oldest;
    return FT_OK;
}

void ft_cuda_drop_captures(struct ft_lane_cuda *lane)
{
    for (uint32_t i = 0; i < FT_CUDA_GRAPHS_MAX; i++)
        drop(&lane->captures[i]);
}
