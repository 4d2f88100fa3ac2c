/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The placement policy: the only way in which jobs/ asks where experts run, and planner/ hears what happened.
 *
 * A policy is pure: const arrays in, choices out, over state that the caller owns (state_bytes, 64-byte aligned,
 * zeroed before init). No clock, lock, allocation, I/O or device call. The engine and the simulator call the same
 * functions. Threads: one call at a time per state; calls come from whatever thread completed the router's job.
 * Every choice carries a reason.
 */
#ifndef FT_GRAPH_POLICY_H
#define FT_GRAPH_POLICY_H

#include "graph/machine.h"
#include "graph/model.h"
#include "graph/op.h"

#define FT_POLICY_ABI 3u

enum ft_place {
    FT_PLACE_DEVICE, /* resident in a slot: the device computes it */
    FT_PLACE_FETCH,  /* copy into a slot, then the device computes it */
    FT_PLACE_CPU,    /* the CPU lanes compute it from RAM */
    FT_PLACE_COUNT
};
const char *ft_place_name(enum ft_place place);

/*            name         text */
#define FT_REASONS(X)                                                                                                  \
    X(NONE, "none")                                                                                                    \
    X(RESIDENT, "resident in a slot")                                                                                  \
    X(STRATEGY, "the strategy places every miss here")                                                                 \
    X(SHARE, "within the share to fetch")                                                                              \
    X(SHARE_REST, "beyond the share to fetch")                                                                         \
    X(NO_SLOT, "no slot can be taken")                                                                                 \
    X(NO_DEVICE, "there is no device")                                                                                 \
    X(EARLIEST, "ends first by the cost model")                                                                        \
    X(STAGED, "prefill: staged for this chunk only")                                                                   \
    X(REPLAY, "as recorded in the trace")                                                                              \
    X(FIXED_LANE, "the op has one lane in this plan")                                                                  \
    X(PREFETCH, "copied ahead for a later layer")                                                                      \
    X(FORESEEN, "copied ahead: the next router will probably choose it")                                               \
    X(PROBE, "tried to learn what it costs now")

enum ft_reason {
#define FT_REASON_ENUM(name, text) FT_REASON_##name,
    FT_REASONS(FT_REASON_ENUM)
#undef FT_REASON_ENUM
        FT_REASON_COUNT
};
const char *ft_reason_text(enum ft_reason reason);

/* The slots of the pool, as seen by eviction. Arrays [count]. With several GPUs each has a range of the pool, and what a
 * layer fetches must lie on the layer's own GPU: [begin, end) are the slots that may be taken. */
struct ft_slot_view {
    uint32_t count;
    const uint32_t *layer, *expert; /* FT_NONE when the slot is free */
    const uint32_t *last_used;      /* step number of the last use */
    const uint8_t *busy;            /* leased or filling: may not be taken */
    uint32_t begin, end;
};

/* What is known when a layer's router has run. Arrays [active_count], experts ascending. */
struct ft_layer_in {
    uint32_t step, layer;
    uint32_t active_count;
    const uint32_t *expert;
    const uint32_t *rows;      /* rows routed to the expert, >= 1 */
    const uint32_t *slot;      /* slot that holds it, or FT_NONE */
    const uint32_t *last_used; /* step of the last use of the expert in this layer; 0 = never */
    const uint8_t *ahead;      /* 1: a copy of it is on its way, or there: to fetch it costs the link nothing more; NULL:
                                  none is */
    bool prefill;              /* fetched experts go to the staging buffers, not to slots */
    bool no_staging;           /* there are none: nothing can be fetched in prefill */
    bool has_device;
    uint32_t expert_bytes;
    enum ft_format format;
    double now_ns; /* since the session's clock started; 0: nothing may depend on it */
    /* by the cost model, ns from now until the lane has finished what it was given */
    double cpu_busy_ns, link_busy_ns, device_busy_ns;
    struct ft_slot_view slots;
};

/* Whether a copy of active expert i was made ahead for this layer. */
static inline bool ft_layer_is_ahead(const struct ft_layer_in *in, uint32_t i)
{
    return in->ahead && in->ahead[i];
}

/* The answer. Arrays are the caller's, [active_count]; prefetch arrays [prefetch_max]. A prefetch is a copy into a slot
 * that may be taken (not busy, no victim of this answer), made when the link has nothing else to do; from then on the
 * expert counts as resident (on a GPU: once a later layer's fetches stand behind the copy). prefetch_max may be 0: in
 * prefill, while earlier prefetches wait, and on a GPU in a layer that misses nothing. With several GPUs: only of layers
 * of the same GPU. */
struct ft_layer_out {
    uint8_t *place;   /* enum ft_place; DEVICE only where slot != FT_NONE, FETCH only where it is FT_NONE */
    uint8_t *reason;  /* enum ft_reason */
    uint32_t *victim; /* FETCH outside prefill: the slot to take (free or evictable), else FT_NONE */
    float *predicted_ns; /* end of the expert's work from now; 0 = no prediction */
    uint32_t prefetch_max, prefetch_count;
    uint32_t *prefetch_layer, *prefetch_expert, *prefetch_victim;
};

/* Router look-ahead: what the router of a later layer would choose if it were given the input of the layer that has just
 * chosen. Arrays [count]. */
struct ft_foreseen {
    uint32_t step, layer, from; /* the later layer; the one that has just chosen */
    uint32_t count;
    const uint32_t *expert; /* distinct, the likeliest first */
    const uint32_t *slot;   /* slot that holds it, or FT_NONE */
    uint32_t room;          /* copies that may be ordered */
    double now_ns;          /* as in struct ft_layer_in */
    uint32_t expert_bytes;
    enum ft_format format;
};

/* One finished job, or one wait of the device for the link, for correcting estimates. Those of a step come after it,
 * in no order, before its step_end. */
struct ft_observation {
    enum ft_op op;
    enum ft_lane lane;
    enum ft_wait wait; /* NONE: a job */
    uint32_t layer, rows;
    uint64_t bytes;
    double start_ns; /* since the session's clock started: places the jobs of a layer beside each other */
    double duration_ns, predicted_ns;
};

struct ft_step_summary {
    uint32_t step, rows;
    bool prefill;
    double duration_ns;
    double wait_ns[FT_WAIT_COUNT];
    uint32_t hits, misses, fetches, cpu_experts;
};

/* A recorded step: layers [layer_begin, layer_end) of prompt rows, or a decode step. */
struct ft_policy_step {
    uint32_t step, layer_begin, layer_end;
    bool prefill;
};

struct ft_policy_params {
    const struct ft_model *model;
    const struct ft_machine *machine;
    double fetch_share;   /* hybrid: share of the misses to fetch, 0..1 */
    uint32_t slot_count;
    bool deterministic;   /* corrections and guard frozen */
    bool no_prefetch;     /* idle time of the link stays idle */
    bool no_look_ahead;   /* the next layer's router is not asked */
    bool always_looks;    /* ... is asked in every step, and a copy goes ahead whether that pays or not; not with
                             deterministic */
    const void *extra;    /* policy's own input, e.g. recorded placements; outlives the state */
};

struct ft_policy {
    uint32_t abi; /* FT_POLICY_ABI */
    const char *name;
    /* bytes of state for these params */
    uint64_t (*state_bytes)(const struct ft_policy_params *params);
    int (*init)(void *state, const struct ft_policy_params *params, struct ft_error *err);
    void (*decide_layer)(void *state, const struct ft_layer_in *in, struct ft_layer_out *out);
    void (*observe)(void *state, const struct ft_observation *observation); /* may be NULL */
    void (*step_end)(void *state, const struct ft_step_summary *summary);   /* may be NULL */
    /* May be NULL. Called between two decisions while the lanes are at work on the first: time for what the next one
     * would have to do while they wait. slots: as the next layer will see them. */
    void (*prepare)(void *state, const struct ft_slot_view *slots, uint32_t step);
    /* May both be NULL. looks_ahead: between steps; whether the next decode step asks the next layers' routers, for
     * look_ahead, if there is one, and for the workers, who warm their caches with what is left.
     * look_ahead: when the jobs of the layer that has just chosen are under way; writes the indices of the experts to be
     * copied ahead, distinct and without a slot, to `chosen` [room], in the order of the copies, and returns how many.
     * They land in buffers of their own: nothing is evicted, and what the layer does not ask for is thrown away. */
    bool (*looks_ahead)(const void *state);
    uint32_t (*look_ahead)(void *state, const struct ft_foreseen *foreseen, uint32_t *chosen);
    /* A policy that repeats given choices: how many it could not repeat so far. NULL for the others. Called between
     * steps. */
    uint64_t (*departures)(const void *state);
    /* Of such a policy: what step number `step` was; false: that is not known. May be NULL. Called between steps. */
    bool (*find_step)(const void *state, uint32_t step, struct ft_policy_step *found);
};

/* The safe default: resident -> device; missing -> CPU. Needs no state. */
extern const struct ft_policy ft_policy_safe;

/* Repairs an answer that breaks the rules above (a wrong policy must not crash the engine); returns how many choices
 * were changed. Broken FETCH without a possible victim becomes CPU. */
uint32_t ft_policy_check_answer(const struct ft_layer_in *in, struct ft_layer_out *out);

#endif
