/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prefetches: copies of experts of later layers into slots, made when the link has nothing else to do.
 *
 *   expander  publish: takes the victim's slot, ticket -> filling[slot], entry -> ring          (release)
 *   link      no demand fetch there: copies the oldest entry whose ticket still stands, filling[slot] = 0
 *             a demand fetch for a slot that is still filling: copies it at once (the entry then finds another
 *             ticket, or none), or finds that the copy has just ended
 *   expander  settle: entries that the link has passed leave the ring; slots that fill are busy, the others free
 *
 * So a demand fetch waits for one copy at most, the one in flight. The slot map names the new expert from the
 * moment of the publish: what is resident follows from decisions alone, never from timing. A prefetch goes on
 * when its step has ended or failed: its source is the bank, which does not change.
 *
 * Threads: expander = whoever completes a router, or the session between steps, one at a time; link = the
 * link lane. Nothing is allocated; no errors.
 *
 * A GPU keeps a slot map of its own and reads slots while the driver, which is expander and link in one, only
 * queues copies. Order does what flags and tickets do above; of a captured step:
 *
 *   layer j   publish: the victim's slot is emptied; moves of layer j: victim -> no slot.
 *             copy stream: demand copies of j, flag j, copies of the prefetches
 *             The GPU drops the victims before it routes j + 1, and in layer j nobody uses them.
 *   layer k   the next one that fetches on demand: the copies are in front of flag k, so the moves of layer k,
 *             which are read behind it, may name the new holders. Only then is the expert resident, for the
 *             host, too; until then its slot is busy and holds nothing.
 *
 * Several GPUs have a ring each, since each has a map and a copy stream of its own: layer k is one of the same
 * GPU.
 *
 * A step that fails drops what is on its way: the slots are free, and whatever is copied into them next goes
 * through the same stream.
 */
#ifndef FT_JOBS_PREFETCH_H
#define FT_JOBS_PREFETCH_H

#include <stdatomic.h>

#include "jobs/slots.h"

#define FT_PREFETCH_MAX 8u /* waiting or in flight; a power of two */

struct ft_prefetch {
    uint32_t slot, layer, expert, ticket;
    uint64_t start_ns, end_ns; /* of the copy, by the link; 0 = a demand fetch made it */
    uint32_t victim; /* GPU: layer * expert_count + expert that the slot held, FT_NONE: it was free */
    uint32_t step;   /* GPU: that asked for it */
};

struct ft_prefetches {
    struct ft_prefetch ring[FT_PREFETCH_MAX];
    uint32_t settled; /* expander: entries before it are done with */
    uint32_t tickets; /* expander: last one given, never 0 */
    /* room for the policy's answer */
    uint32_t layer[FT_PREFETCH_MAX], expert[FT_PREFETCH_MAX], victim[FT_PREFETCH_MAX];
    uint64_t issued, used, waited;           /* waited: of those used, still filling at their first use */
    uint64_t dropped;                        /* GPU: copied, but never resident */
    _Alignas(64) _Atomic uint32_t published; /* written by the expander */
    _Alignas(64) _Atomic uint32_t passed;    /* written by the link */
};

struct ft_step;
struct ft_layer_out;

/* Before the policy is asked: what was copied is settled, and the answer gets room (none in prefill). */
void ft_prefetch_offer(struct ft_step *step, uint32_t layer, struct ft_layer_out *out);
/* After the own fetches of layer_now: takes slots and publishes what the policy asked for and still makes sense.
 * With several GPUs only layers of the same one do: the others do not hear of moves in this layer. */
void ft_prefetch_publish(struct ft_step *step, uint32_t layer_now, const struct ft_layer_out *out);
/* After leases have ended. `thread` records the copies that are done, in its own trace ring, as the link's. */
void ft_prefetch_settle(struct ft_step *step, uint32_t thread);
/* Counts the first use of a prefetched expert. True: its slot is still filling. */
bool ft_prefetch_use(struct ft_step *step, uint32_t slot);

/* GPU, driver: one line of the device's slot map; slot FT_NONE: it has none any more. */
struct ft_prefetch_move {
    uint32_t layer, expert, slot;
};
/* GPU, driver: the victims of what was published for this layer; [FT_PREFETCH_MAX]. Returns how many. */
uint32_t ft_prefetch_victims(struct ft_step *step, uint32_t layer, struct ft_prefetch_move *moves);
/* GPU, driver, in a layer whose flag stands behind the copies of earlier layers: makes those resident. What
 * belongs to this very layer waits for the next one: its lists are made. [FT_PREFETCH_MAX]; returns how many. */
uint32_t ft_prefetch_arrive(struct ft_step *step, uint32_t layer, struct ft_prefetch_move *moves);
/* GPU, driver: the next copy to queue, NULL = none; queued: start_ns and end_ns are set, `thread` records it. */
struct ft_prefetch *ft_prefetch_next(struct ft_step *step, uint32_t layer);
void ft_prefetch_queued(struct ft_step *step, uint32_t layer, uint32_t thread);
/* GPU, session's thread, after a failed step: nothing is on its way any more. */
void ft_prefetch_drop(struct ft_step *step);
/* Link lane. */
static inline bool ft_prefetch_is_waiting(const struct ft_prefetches *p)
{
    return atomic_load_explicit(&p->published, memory_order_acquire) !=
           atomic_load_explicit(&p->passed, memory_order_relaxed);
}
/* Link lane: copies one entry, if there is one. False: there is none. */
bool ft_prefetch_run(struct ft_step *step,
                     void (*copy)(struct ft_step *step, uint32_t layer, uint32_t expert, char *destination));

#endif
