/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/routing.h"

#include <stdlib.h>
#include <string.h>

/* Depths up to `end` (in 512ths of the experts) from where the last band ended, drawn with this weight.
 * Fitted by drawing 60,000 tokens of 10 distinct depths and scaling each weight by wanted / seen until the
 * curve stood still; the weights differ from the steps of the curve because the depths of a token are
 * distinct. */
static const struct {
    double end, weight;
} bands[] = {
    {11, 0.13570},  {78, 0.26061},  {93, 0.03931},  {186, 0.18858},
    {279, 0.09882}, {372, 0.06916}, {512, 0.20783},
};
#define BANDS (sizeof bands / sizeof bands[0])
#define FITTED_EXPERTS 512.0

static uint64_t random_next(uint64_t *state)
{
    uint64_t random = ft_splitmix64(*state);
    *state += FT_SPLITMIX_GAMMA;
    return random;
}

static double random_unit(uint64_t *state)
{
    return (double)(random_next(state) >> 11) * 0x1p-53;
}

/* ---- the generator ---- */

static void shuffle(uint16_t *list, uint32_t count, uint64_t *random)
{
    for (uint32_t i = 0; i < count; i++)
        list[i] = (uint16_t)i;
    for (uint32_t i = count; i > 1; i--) {
        uint32_t j = (uint32_t)(random_next(random) % i);
        uint16_t kept = list[i - 1];
        list[i - 1] = list[j];
        list[j] = kept;
    }
}

static uint32_t draw_depth(uint32_t expert_count, uint64_t *random)
{
    double total = 0, at, begin = 0;
    for (size_t b = 0; b < BANDS; b++)
        total += bands[b].weight;
    at = random_unit(random) * total;
    size_t b = 0;
    for (; b + 1 < BANDS && at >= bands[b].weight; b++) {
        at -= bands[b].weight;
        begin = bands[b].end;
    }
    double depth = begin + (bands[b].end - begin) * at / bands[b].weight;
    return FT_MIN((uint32_t)(depth * expert_count / FITTED_EXPERTS), expert_count - 1);
}

/* topk distinct experts of the stack, which then go to its top in the order drawn. */
static void draw_row(uint16_t *stack, const struct ft_routing_options *o, uint64_t *random, uint16_t *ids)
{
    bool drawn[FT_EXPERTS_MAX] = {false}; /* by depth */
    for (uint32_t j = 0; j < o->topk;) {
        uint32_t depth = draw_depth(o->expert_count, random);
        if (drawn[depth])
            continue;
        drawn[depth] = true;
        ids[j++] = stack[depth];
    }
    uint32_t to = o->expert_count;
    for (uint32_t from = o->expert_count; from-- > 0;) /* the others keep their order, below */
        if (!drawn[from])
            stack[--to] = stack[from];
    memcpy(stack, ids, o->topk * sizeof *ids);
}

/* The most recent experts of one layer, rows taking turns; [share] written, most recent first. */
static void list_recent(const uint16_t *stacks, const struct ft_routing_options *o, uint32_t share,
                        uint32_t *recent)
{
    bool listed[FT_EXPERTS_MAX] = {false};
    uint32_t count = 0;
    for (uint32_t depth = 0; depth < o->expert_count; depth++)
        for (uint32_t row = 0; row < o->row_count; row++) {
            uint16_t expert = stacks[(uint64_t)row * o->expert_count + depth];
            if (listed[expert] || count == share)
                continue;
            listed[expert] = true;
            recent[count++] = expert;
        }
}

/* stacks [layer, row, expert_count] -> the same share of the slots for each layer, layers taking turns. */
static int fill_warm(const uint16_t *stacks, const struct ft_routing_options *o, uint32_t slot_count,
                     struct ft_routing_warm *warm, struct ft_error *err)
{
    uint32_t share = FT_MIN(slot_count / o->layer_count, o->expert_count);
    uint32_t *recent = malloc(((uint64_t)share * o->layer_count + 1) * sizeof *recent);
    if (!recent)
        return ft_error_set(err, FT_MEMORY, "no memory to list %u warm experts", slot_count);
    for (uint32_t layer = 0; layer < o->layer_count; layer++)
        list_recent(stacks + (uint64_t)layer * o->row_count * o->expert_count, o, share,
                    recent + (uint64_t)layer * share);
    warm->count = 0;
    for (uint32_t i = share; i-- > 0;)
        for (uint32_t layer = 0; layer < o->layer_count; layer++) {
            warm->layer[warm->count] = layer;
            warm->expert[warm->count++] = recent[(uint64_t)layer * share + i];
        }
    free(recent);
    return FT_OK;
}

static int check_options(const struct ft_routing_options *o, struct ft_error *err)
{
    if (o->step_count && o->layer_count && o->row_count && o->topk && o->topk <= o->expert_count &&
        o->topk <= FT_TOPK_MAX && o->expert_count <= FT_EXPERTS_MAX)
        return FT_OK;
    return ft_error_set(err, FT_USAGE,
                        "routing of %u steps, %u layers, %u rows with %u of %u experts a row is not possible "
                        "(at most %u of %u experts)",
                        o->step_count, o->layer_count, o->row_count, o->topk, o->expert_count, FT_TOPK_MAX,
                        FT_EXPERTS_MAX);
}

/* stacks [layer, row, expert_count] before step 0; NULL: no memory. */
static uint16_t *make_stacks(const struct ft_routing_options *o, uint64_t *random)
{
    uint64_t count = (uint64_t)o->layer_count * o->row_count;
    uint16_t *stacks = malloc(count * o->expert_count * sizeof *stacks);
    for (uint64_t i = 0; stacks && i < count; i++)
        shuffle(stacks + i * o->expert_count, o->expert_count, random);
    return stacks;
}

int ft_routing_generate(const struct ft_routing_options *options, struct ft_routing *routing,
                        struct ft_error *err)
{
    const struct ft_routing_options *o = options;
    *routing = (struct ft_routing){0};
    int status = check_options(o, err);
    if (status != FT_OK)
        return status;
    uint64_t stack_count = (uint64_t)o->layer_count * o->row_count, random = o->seed;
    uint64_t draws = stack_count * o->step_count;
    uint16_t *stacks = make_stacks(o, &random), *ids = malloc(draws * o->topk * sizeof *ids);
    if (!stacks || !ids) {
        free(stacks);
        free(ids);
        return ft_error_set(err, FT_MEMORY, "no memory for the routing of %u steps", o->step_count);
    }
    for (uint64_t i = 0; i < draws; i++)
        draw_row(stacks + i % stack_count * o->expert_count, o, &random, ids + i * o->topk);
    free(stacks);
    *routing = (struct ft_routing){.step_count = o->step_count,
                                   .layer_count = o->layer_count,
                                   .row_count = o->row_count,
                                   .topk = o->topk,
                                   .ids = ids};
    return FT_OK;
}

int ft_routing_list_warm(const struct ft_routing_options *options, uint32_t slot_count,
                         struct ft_routing_warm *warm, struct ft_error *err)
{
    uint64_t random = options->seed;
    warm->count = 0;
    int status = check_options(options, err);
    if (status != FT_OK)
        return status;
    uint16_t *stacks = make_stacks(options, &random);
    status = stacks ? fill_warm(stacks, options, slot_count, warm, err)
                    : ft_error_set(err, FT_MEMORY, "no memory to list warm experts");
    free(stacks);
    return status;
}

void ft_routing_free(struct ft_routing *routing)
{
    free((void *)(uintptr_t)routing->ids);
    *routing = (struct ft_routing){0};
}
