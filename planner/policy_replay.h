/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay: answers what a recorded trace says for (step, layer, expert). The trace's FT_RECORD_CHOICE records
 * are copied into an array that is sorted once; ft_policy_params.extra points to the struct below and
 * outlives the state.
 *
 * Where the trace says nothing, or something impossible now (resident then, missing now; a slot that is
 * busy), the answer is the safe one and the departure is counted: a replay with departures != 0 is not the
 * recorded run. A prefill beside decode steps is cut by measured times; its recorded slices are repeated, too.
 * Ownership: the arrays are the caller's. Threads: as any policy.
 */
#ifndef FT_PLANNER_POLICY_REPLAY_H
#define FT_PLANNER_POLICY_REPLAY_H

#include "graph/policy.h"
#include "graph/trace.h"

struct ft_replay_choice {
    uint32_t step, layer, expert, slot;
    uint8_t place;
};

struct ft_replay {
    struct ft_replay_choice *choices; /* [count], sorted by step, layer, expert */
    uint64_t count;
    struct ft_policy_step *steps; /* [step_count] ascending, or NULL: which layers each step had */
    uint64_t step_count;
};

/* Choices in one recorded step: what to allocate. */
uint64_t ft_replay_count(const struct ft_trace_step *step);
/* Appends one step and its choices; the caller has room for ft_replay_count more, and for a step unless steps is NULL. */
void ft_replay_append(struct ft_replay *replay, const struct ft_trace_step *step);
/* After the last append. FT_FORMAT when one expert has two choices in one layer of a step. May allocate (qsort). */
int ft_replay_sort(struct ft_replay *replay, struct ft_error *err);
/* Choices that could not be repeated so far, from the policy's state. */
uint64_t ft_replay_departures(const void *state);

#endif
