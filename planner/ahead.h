/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of the router look-ahead pays: how many copies fit into the link's idle time behind each layer's own.
 *
 *   gap    from the end of a layer's copies to the next layer's decision, a moving average per layer
 *   each   of one copy, as measured on opening, else from copies that a layer waited for
 *   p      share of the copies made ahead that are asked for
 *
 * n copies go ahead when they end within gap + p each: a copy that is not done when the next layer asks costs that layer
 * what is left of it, and saves it a whole one with probability p. With p below FT_AHEAD_HITS_MIN, or where steps with
 * look-ahead are longer than those without (planner/trial.h), it is left for a while.
 *
 * Part of a policy's state. Threads: one at a time. Nothing is allocated; no errors.
 */
#ifndef FT_PLANNER_AHEAD_H
#define FT_PLANNER_AHEAD_H

#include "graph/policy.h"
#include "planner/trial.h"

#define FT_AHEAD_HITS_MIN 0.25

struct ft_ahead_layer {
    double gap; /* ns; 0 = not known */
    /* of the running step: */
    double begin, end;         /* of the decision, 0 = not heard of; of its copies */
    bool waited;               /* the device waited for them: `end` is when they ended, not later */
    uint32_t fetched, ordered; /* copies of its own; copies made ahead for it */
    double bytes;              /* of its own copies */
};

struct ft_ahead {
    struct ft_trial trial;
    bool never, always, frozen; /* as the params say */
    bool measured;              /* the link, before: ns_per_byte stays */
    double ns_per_byte;         /* of copies */
    double hits;                /* p */
    uint32_t layer_count;
    struct ft_ahead_layer *layers; /* [layer_count] */
    /* the last layer of the step before that was heard of: its gap ends with this step's first one */
    uint32_t open_layer;
    double open_end; /* 0 = none */
};

/* Layers to keep notes of. */
uint32_t ft_ahead_layers(const struct ft_policy_params *params);
/* layers [ft_ahead_layers(params)], zeroed. */
void ft_ahead_init(struct ft_ahead *ahead, const struct ft_policy_params *params, struct ft_ahead_layer *layers);
bool ft_ahead_looks(const struct ft_ahead *ahead);
/* After a layer's answer. */
void ft_ahead_decided(struct ft_ahead *ahead, const struct ft_layer_in *in, const struct ft_layer_out *out);
/* A policy's look_ahead: the likeliest ones, as many as pay. */
uint32_t ft_ahead_choose(struct ft_ahead *ahead, const struct ft_foreseen *foreseen, uint32_t *chosen);
void ft_ahead_observe(struct ft_ahead *ahead, const struct ft_observation *observation);
void ft_ahead_step_end(struct ft_ahead *ahead, const struct ft_step_summary *summary);

#endif
