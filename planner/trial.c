/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/trial.h"

#include "graph/types.h"

#define FREE 1.02       /* of the time without: noise shall not decide */
#define SETTLE 1u       /* steps behind a change that still show what was before */
#define PAUSE_FIRST 64u /* steps until the next trial */
#define PAUSE_LAST 4096u
#define CLEAR 0.95 /* of the time without: sure enough for a longer pause */

enum { WITH, WITHOUT, DECIDED };

void ft_trial_init(struct ft_trial *trial, uint32_t skip)
{
    *trial = (struct ft_trial){.on = true, .phase = WITH, .skip = skip, .pause = PAUSE_FIRST};
}

static void begin(struct ft_trial *trial, uint8_t phase, bool on)
{
    trial->phase = phase;
    trial->on = on;
    trial->skip = SETTLE;
    trial->count = 0;
}

static void restart(struct ft_trial *trial)
{
    begin(trial, WITH, true);
    trial->round = 0;
}

static void decide(struct ft_trial *trial, bool on, uint32_t times)
{
    begin(trial, DECIDED, on);
    trial->left = FT_MIN(times * trial->pause, PAUSE_LAST);
    trial->pause = FT_MIN(2 * trial->left, PAUSE_LAST);
}

void ft_trial_reject(struct ft_trial *trial)
{
    decide(trial, false, 1);
}

static double median(double *ns)
{
    for (uint32_t i = 1; i < FT_TRIAL_STEPS * FT_TRIAL_ROUNDS; i++)
        for (uint32_t j = i; j > 0 && ns[j] < ns[j - 1]; j--) {
            double swap = ns[j];
            ns[j] = ns[j - 1];
            ns[j - 1] = swap;
        }
    return ns[FT_TRIAL_STEPS * FT_TRIAL_ROUNDS / 2];
}

void ft_trial_step(struct ft_trial *trial, uint32_t rows, double ns)
{
    if (rows != trial->rows) {
        uint32_t skip = trial->skip;
        restart(trial);
        trial->skip = FT_MAX(skip, trial->skip);
        trial->rows = rows;
    }
    if (trial->skip) {
        trial->skip--;
        return;
    }
    if (trial->phase == DECIDED) {
        if (--trial->left == 0)
            restart(trial);
        return;
    }
    trial->ns[trial->phase == WITH][trial->round * FT_TRIAL_STEPS + trial->count++] = ns;
    if (trial->count < FT_TRIAL_STEPS)
        return;
    if (trial->phase == WITH) {
        begin(trial, WITHOUT, false);
        return;
    }
    if (++trial->round < FT_TRIAL_ROUNDS) {
        begin(trial, WITH, true);
        return;
    }
    double with = median(trial->ns[1]), without = median(trial->ns[0]);
    decide(trial, with < FREE * without, with < CLEAR * without ? 4 : 1);
}
