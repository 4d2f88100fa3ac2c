/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of the router look-ahead pays: how many copies fit into the link's idle time behind each layer's own.
 *
 *   free   when the link will have made all copies that were ordered: a queue of which each takes as long as the others
 *   next   when the next layer with experts will decide: end of this one (copies, or experts of the CPU) + rest
 *   rest   from the end of a layer's last expert to the next decision, a moving average per layer
 *   each   of one copy, as measured on opening, else from copies that a layer waited for. That is rough: copies take `own`
 *          times as long, and the device sees the last one `late` behind the queue's end; both are learned where the
 *          device waited
 *   stretch  how much longer copies made ahead must be thought to take, beside which workers read the same memory, so that
 *          eleven layers of twelve find them done
 *   p      share of the copies made ahead that are asked for
 *
 * n copies go ahead when n each stretch <= next - free. A copy that is still on its way when the next layer asks stands in
 * front of that layer's own, and where it ends is not well known: on an H200 steps with 2.3 copies a layer took 11.7 ms,
 * those with 3.2, which had more of them used, 12.8 (in turn, 60 of each). Without a clock, or before a layer's rest is
 * known, its gap stands for next - free: from the end of its copies to the next decision, a moving average. With p below
 * FT_AHEAD_HITS_MIN, or where steps with look-ahead are longer than those without (planner/trial.h), it is left for a
 * while.
 *
 * Over some 700 layers each of four traces of an H200 the device saw a layer's own copies where the queue has them, but
 * for 4 to 7 us (median), and as well when the rate measured on opening was off by a third.
 *
 * Part of a policy's state. Threads: one at a time. Nothing is allocated; no errors.
 */
#ifndef FT_PLANNER_AHEAD_H
#define FT_PLANNER_AHEAD_H

#include "graph/policy.h"
#include "planner/trial.h"

#define FT_AHEAD_HITS_MIN 0.25

struct ft_ahead_layer {
    double gap, rest; /* ns; 0 = not known */
    /* of the running step: */
    double asked, begin, end;  /* of the decision: its begin and end, 0 = not heard of; of its copies */
    double computed_end;       /* of its experts on the CPU; 0 = none heard of */
    bool waited;               /* the device waited for them: `end` is when they ended, not later */
    uint32_t fetched, ordered; /* copies of its own; copies made ahead for it */
    uint32_t computed;         /* experts of the CPU */
    uint32_t front;            /* ... once it has decided */
    double bytes;              /* of its own copies */
    double each, busy;         /* ns of one copy, before `own`; of the queue in front of its own */
    double link_end;           /* of the copies it needs, as the queue has it; 0 = it needs none */
};

struct ft_ahead {
    struct ft_trial trial;
    bool never, always, frozen; /* as the params say */
    bool measured;              /* the link, before: ns_per_byte stays */
    double ns_per_byte;         /* of copies */
    double hits;                /* p */
    double own, stretch;        /* see above */
    double late_ns;             /* issue and flag of copies */
    uint32_t queue_known;       /* layers that these were learned from */
    double cpu_ns;              /* of an expert of the CPU beside others; 0 = not known */
    /* now, by the session's clock; 0 = not known */
    double free_ns, behind_ns; /* the queue's end; how much of it nobody has waited for */
    double layer_end_ns;       /* of the layer that has decided last */
    uint32_t layer_count;
    struct ft_ahead_layer *layers; /* [layer_count] */
    /* the last layer of the step before that was heard of: its gap ends with this step's first one */
    uint32_t open_layer;
    double open_end, open_last; /* of its copies; of its last expert; 0 = none */
};

/* Layers to keep notes of. */
uint32_t ft_ahead_layers(const struct ft_policy_params *params);
/* layers [ft_ahead_layers(params)], zeroed. */
void ft_ahead_init(struct ft_ahead *ahead, const struct ft_policy_params *params, struct ft_ahead_layer *layers);
bool ft_ahead_looks(const struct ft_ahead *ahead);
/* Before a layer's answer: ns until the link has made the copies that were ordered before. */
double ft_ahead_link_busy(const struct ft_ahead *ahead, const struct ft_layer_in *in);
/* ... and from there until the device has seen `fetched` copies that a decode step's layer orders now; 0: not known. */
double ft_ahead_link_ns(const struct ft_ahead *ahead, const struct ft_layer_in *in, uint32_t fetched);
/* After a layer's answer. */
void ft_ahead_decided(struct ft_ahead *ahead, const struct ft_layer_in *in, const struct ft_layer_out *out);
/* A policy's look_ahead: the likeliest ones, as many as pay. */
uint32_t ft_ahead_choose(struct ft_ahead *ahead, const struct ft_foreseen *foreseen, uint32_t *chosen);
void ft_ahead_observe(struct ft_ahead *ahead, const struct ft_observation *observation);
void ft_ahead_step_end(struct ft_ahead *ahead, const struct ft_step_summary *summary);

#endif
