/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Router look-ahead: when a layer has chosen its experts, the router of the next layer with experts is given the same
 * input, and what it would choose and no slot holds may be copied while the link has nothing else to do.
 *
 * A copy goes to a landing buffer, which is a blob of the pool that no slot has. When the next layer asks for the
 * expert, that is a fetch like any other, with a victim; but instead of a copy, slot and landing buffer exchange their
 * blobs. So the slots hold after every layer what they would hold without look-ahead: a copy that nobody asks for evicts
 * nothing, and a recorded placement can be repeated without look-ahead.
 *
 *   layer j    order    foreseen -> policy -> landing buffers that are free: expert, ticket; order -> ring    (release)
 *   link       host: no demand fetch there: copies the oldest order whose ticket still stands, ticket = 0
 *              GPU: the driver queues the copies behind those of layer j and their flag
 *   layer k    mark     active experts that have landed, or will before the layer's own copies: in->ahead
 *              land     fetches of these: blobs change places; the host's link copies what it has not copied yet,
 *                       on a GPU the flag of layer k stands behind the copy
 *              end      what was not asked for: ticket = 0
 *
 * A landing buffer is free when its ticket is 0 and the link has passed its last order. The victim's old blob, which it
 * has then, was read by layers that are done, as that of any fetch's victim.
 *
 * What is foreseen and goes neither to a slot nor over the link, the workers may bring into their caches while they have
 * nothing to do (jobs/warm.h).
 *
 * Decode steps alone; on a GPU captured ones. With several GPUs each has landing buffers of its own, and only layers of
 * the same GPU are looked at.
 *
 * Threads: expander = whoever completes a router, or the session between steps, one at a time; link = the link lane (a
 * GPU's driver is both). Nothing is allocated after init; no errors.
 */
#ifndef FT_JOBS_LOOK_AHEAD_H
#define FT_JOBS_LOOK_AHEAD_H

#include <stdatomic.h>

#include "jobs/slots.h"

struct ft_step;
struct ft_batch;

struct ft_landing {
    uint32_t blob;          /* of its part of the pool */
    uint32_t layer, expert; /* what was ordered and may be asked for; layer FT_NONE: nothing */
    uint32_t order;         /* its last order */
    _Atomic uint32_t ticket; /* of the copy that is on its way, 0 = none */
};

/* The landing buffers of one part of the pool. */
struct ft_landings {
    uint32_t count;
    struct ft_landing landing[FT_LANDINGS_MAX];
    struct ft_landing_order {
        uint32_t landing, ticket, layer, expert;
        char *destination;
        uint64_t start_ns, end_ns; /* of the copy, by the link; 0 = a demand fetch made it, or nobody did */
    } ring[FT_LANDINGS_MAX];
    uint32_t settled; /* expander: orders before it are recorded */
    uint32_t tickets; /* expander: last one given, never 0 */
    _Alignas(64) _Atomic uint32_t published; /* written by the expander */
    _Alignas(64) _Atomic uint32_t passed;    /* written by the link */
};

/* What is foreseen of one layer. Arrays [rows k], mark [expert_count]. */
struct ft_foresight {
    uint32_t layer; /* FT_NONE: nothing is known */
    uint32_t count, stamp;
    uint32_t *expert, *slot, *chosen;
    uint32_t *ids; /* for whoever asks the router on the host */
    uint32_t *mark; /* stamp of the layer that the expert was foreseen for */
    uint64_t seen, right;     /* experts foreseen, and of these those that were asked for */
    uint64_t ordered, landed; /* copies, and of these those that served a fetch */
};

/* looks: whether the session may. pairs_max: pairs of (row, place in its list) that a decode step may have. */
int ft_look_ahead_init(struct ft_step *step, struct ft_arena *arena, bool looks, uint32_t pairs_max,
                       struct ft_error *err);
/* Session's thread, before a step: whether this one looks ahead. */
bool ft_look_ahead_wants(const struct ft_step *step, const struct ft_batch *batch);
/* The layer that the router of `layer` may look at; FT_NONE = none. */
uint32_t ft_look_ahead_target(const struct ft_step *step, uint32_t layer);
/* Expander, when the jobs of `layer` are under way. ids [rows, k]: what the router of its target would choose, FT_NONE
 * where that is not known. */
void ft_look_ahead_order(struct ft_step *step, uint32_t layer, const uint32_t *ids);
/* Expander: fills active.ahead. */
void ft_look_ahead_mark(struct ft_step *step, uint32_t layer);
/* Expander: the slot has just been given to the expert, and gets the blob where it landed. The copy is still on its way
 * as long as the returned word holds *ticket, which is not 0 then. */
_Atomic uint32_t *ft_look_ahead_land(struct ft_step *step, uint32_t layer, uint32_t expert, uint32_t slot,
                                     uint32_t *ticket);
/* Expander, behind the layer's last fetch. */
void ft_look_ahead_end(struct ft_step *step, uint32_t layer);
/* Expander, or the session between steps: `thread` records the copies that are done, in its own ring, as the link's. */
void ft_look_ahead_settle(struct ft_step *step, uint32_t thread);
/* Session's thread, after a failed step: nobody waits for anything. */
void ft_look_ahead_drop(struct ft_step *step);

/* GPU, driver: the next copy to queue, NULL = none; done: start_ns and end_ns are set. */
struct ft_landing_order *ft_look_ahead_next(struct ft_step *step, uint32_t layer);
void ft_look_ahead_queued(struct ft_step *step, uint32_t layer, uint32_t thread);

/* Link lane of the host device. */
bool ft_look_ahead_is_waiting(const struct ft_step *step);
/* Copies for one order, if there is one. False: there is none. */
bool ft_look_ahead_run(struct ft_step *step,
                       void (*copy)(struct ft_step *step, uint32_t layer, uint32_t expert, char *destination));

#endif
