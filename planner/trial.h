/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A habit on trial: it is kept for some steps and left for some, in turn, so that what else changes meanwhile meets both;
 * it goes on only where its steps were hardly longer. Then it is tried again, ever less often, and later where it made
 * steps clearly shorter. For what is believed to be free while it happens and to pay later, and may not be free where
 * nothing counts it: a copy ahead on a link, say, delays the small reads and writes of a GPU that cross it.
 *
 * Threads: one at a time. Nothing is allocated; no errors.
 */
#ifndef FT_PLANNER_TRIAL_H
#define FT_PLANNER_TRIAL_H

#include <stdbool.h>
#include <stdint.h>

#define FT_TRIAL_STEPS 4u  /* in a row of one kind that count */
#define FT_TRIAL_ROUNDS 3u /* of both kinds; compared are the medians */

struct ft_trial {
    bool on; /* whether the next step keeps the habit */
    uint8_t phase;
    uint32_t rows, skip, count, round, left, pause;
    double ns[2][FT_TRIAL_STEPS * FT_TRIAL_ROUNDS]; /* without, with */
};

/* On from the first step; the first `skip` are not looked at. */
void ft_trial_init(struct ft_trial *trial, uint32_t skip);
/* It is known to bring nothing: off until the next trial. */
void ft_trial_reject(struct ft_trial *trial);
/* A step has ended. Steps of other rows cannot be compared: the trial begins anew. */
void ft_trial_step(struct ft_trial *trial, uint32_t rows, double ns);

#endif
