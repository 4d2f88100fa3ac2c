/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/policy_replay.h"

#include "planner/policies.h"

#include <stdlib.h>

struct replay_state {
    const struct ft_replay *replay;
    uint64_t departures;
};

uint64_t ft_replay_count(const struct ft_trace_step *step)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < step->record_count; i++)
        count += step->records[i].kind == FT_RECORD_CHOICE;
    return count;
}

void ft_replay_append(struct ft_replay *replay, const struct ft_trace_step *step)
{
    if (replay->steps)
        replay->steps[replay->step_count++] = (struct ft_policy_step){.step = step->step,
                                                                      .layer_begin = step->layer_begin,
                                                                      .layer_end = step->layer_end,
                                                                      .prefill = step->prefill != 0};
    for (uint32_t i = 0; i < step->record_count; i++) {
        const struct ft_trace_record *record = &step->records[i];
        if (record->kind == FT_RECORD_CHOICE)
            replay->choices[replay->count++] = (struct ft_replay_choice){.step = step->step,
                                                                         .layer = record->layer,
                                                                         .expert = record->expert,
                                                                         .slot = record->slot,
                                                                         .place = record->place};
    }
}

static int compare(const void *left, const void *right)
{
    const struct ft_replay_choice *a = left, *b = right;
    if (a->step != b->step)
        return a->step < b->step ? -1 : 1;
    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    return a->expert < b->expert ? -1 : a->expert > b->expert;
}

int ft_replay_sort(struct ft_replay *replay, struct ft_error *err)
{
    if (replay->count)
        qsort(replay->choices, replay->count, sizeof *replay->choices, compare);
    for (uint64_t i = 1; i < replay->count; i++)
        if (compare(&replay->choices[i - 1], &replay->choices[i]) == 0)
            return ft_error_set(err, FT_FORMAT,
                                "replay: step %u, layer %u has two choices for expert %u: the trace "
                                "holds more than one run",
                                replay->choices[i].step, replay->choices[i].layer, replay->choices[i].expert);
    return FT_OK;
}

/* Step numbers ascend, and few are missing. */
static bool find_step(const void *state, uint32_t step, struct ft_policy_step *found)
{
    const struct ft_replay *replay = ((const struct replay_state *)state)->replay;
    uint64_t low = 0, high = replay->step_count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (replay->steps[middle].step < step)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == replay->step_count || replay->steps[low].step != step)
        return false;
    *found = replay->steps[low];
    return true;
}

uint64_t ft_replay_departures(const void *state)
{
    return ((const struct replay_state *)state)->departures;
}

static uint64_t state_bytes(const struct ft_policy_params *params)
{
    (void)params;
    return sizeof(struct replay_state);
}

static int init(void *state, const struct ft_policy_params *params, struct ft_error *err)
{
    struct replay_state *own = state;
    if (!params->extra)
        return ft_error_set(err, FT_USAGE, "policy replay: it needs a recorded trace (--replay TRACE)");
    own->replay = params->extra;
    own->departures = 0;
    return FT_OK;
}

static const struct ft_replay_choice *find(const struct ft_replay *replay, uint32_t step, uint32_t layer,
                                           uint32_t expert)
{
    struct ft_replay_choice wanted = {.step = step, .layer = layer, .expert = expert};
    uint64_t low = 0, high = replay->count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (compare(&replay->choices[middle], &wanted) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low < replay->count && compare(&replay->choices[low], &wanted) == 0;
    return found ? &replay->choices[low] : NULL;
}

/* Can the recorded choice be made now? */
static bool is_possible(const struct ft_layer_in *in, uint32_t i, const struct ft_replay_choice *choice)
{
    if (choice->place == FT_PLACE_CPU)
        return true;
    if (!in->has_device)
        return false;
    if (choice->place == FT_PLACE_DEVICE)
        return in->slot[i] != FT_NONE;
    if (in->slot[i] != FT_NONE)
        return false;
    if (in->prefill)
        return !in->no_staging;
    return choice->slot >= in->slots.begin && choice->slot < in->slots.end && !in->slots.busy[choice->slot];
}

static void decide_layer(void *state, const struct ft_layer_in *in, struct ft_layer_out *out)
{
    struct replay_state *own = state;
    ft_policy_safe.decide_layer(NULL, in, out);
    for (uint32_t i = 0; i < in->active_count; i++) {
        const struct ft_replay_choice *choice = find(own->replay, in->step, in->layer, in->expert[i]);
        if (!choice || !is_possible(in, i, choice)) {
            own->departures++;
            continue;
        }
        out->place[i] = choice->place;
        out->reason[i] = FT_REASON_REPLAY;
        out->victim[i] = choice->place == FT_PLACE_FETCH && !in->prefill ? choice->slot : FT_NONE;
    }
    /* a slot that this layer reads cannot be taken: the common check knows the rule and repairs the answer */
    own->departures += ft_policy_check_answer(in, out);
}

const struct ft_policy ft_policy_replay = {.abi = FT_POLICY_ABI,
                                           .name = "replay",
                                           .state_bytes = state_bytes,
                                           .init = init,
                                           .decide_layer = decide_layer,
                                           .departures = ft_replay_departures,
                                           .find_step = find_step};
