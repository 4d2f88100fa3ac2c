/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host device: a thread that stands in for a GPU's compute stream and one that stands in for its copy
 * stream. Same slots, same fetch jobs, same order of work as a GPU lane; the arithmetic is kernels_cpu's. An
 * optional throttle gives the link a chosen bandwidth, and random delays shake the order of events in tests.
 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "jobs/step.h"

#define JOIN_NS 5000000000ull

/* Why a device job waits: fetched experts wait for the link, combine for CPU experts, PLE for the disk. */
static enum ft_wait cause_of(enum ft_op op)
{
    switch (op) {
    case FT_OP_EXPERT_DEVICE:
        return FT_WAIT_LINK;
    case FT_OP_PLE_PROJECT:
    case FT_OP_PLE_INJECT:
        return FT_WAIT_IO;
    default:
        return FT_WAIT_CPU;
    }
}

static bool device_job(struct ft_step *step, uint32_t thread, uint32_t job, enum ft_op op)
{
    if (!ft_step_wait_job(step, thread, &step->device, job, cause_of(op)))
        return false;
    uint32_t *todo = ft_step_todo(step, thread);
    ft_step_hand_over(step, thread, todo, ft_step_run_job(step, thread, job, todo, 0));
    return true;
}

/* The groups of the layer whose router this thread ran just before, in the order in which they were made. */
static bool device_groups(struct ft_step *step, uint32_t thread)
{
    uint32_t first = step->wave_first, end = first + step->wave_count;
    for (uint32_t i = first; i < end; i++)
        if (step->dynamic[i].op == FT_OP_EXPERT_DEVICE &&
            !device_job(step, thread, step->graph->static_count + i, FT_OP_EXPERT_DEVICE))
            return false;
    return true;
}

/* The rows that the router had are still there. */
static void look_ahead(struct ft_step *step, uint32_t layer)
{
    uint32_t target = ft_look_ahead_target(step, layer);
    if (target == FT_NONE)
        return;
    ft_execute_foresee(&step->x, target, step->foresight.ids);
    ft_look_ahead_order(step, layer, step->foresight.ids);
}

static void *device_main(void *context)
{
    struct ft_step *step = context;
    uint32_t thread = ft_step_thread(step, FT_STEP_DEVICE), seen = 0;
    while (ft_step_wait_epoch(step, thread, &step->device, FT_STEP_SPIN_NS, 0, &seen)) {
        const struct ft_graph *graph = step->graph;
        uint32_t count = graph->device_count;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t job = graph->device_jobs[i], layer = graph->layer[job];
            if (layer != FT_GRAPH_NO_LAYER && graph->combine_tile[layer] == job &&
                !device_groups(step, thread))
                return NULL;
            if (!device_job(step, thread, job, graph->op[job]))
                return NULL;
            if (graph->op[job] == FT_OP_ROUTER && step->looks_ahead)
                look_ahead(step, layer);
        }
    }
    return NULL;
}

static uint64_t random_next(uint64_t *state)
{
    /* xorshift64: Marsaglia, "Xorshift RNGs", 2003 */
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void sleep_until(const struct ft_step *step, uint64_t until_ns)
{
    for (;;) {
        uint64_t now = ft_clock_ns(&step->clock);
        if (now >= until_ns || atomic_load_explicit(&step->stop, memory_order_acquire))
            return;
        uint64_t left = FT_MIN(until_ns - now, 100000000u);
        struct timespec time = {.tv_sec = 0, .tv_nsec = (long)left};
        nanosleep(&time, NULL);
    }
}

static void copy_expert(struct ft_step *step, uint32_t layer, uint32_t expert, char *destination)
{
    const struct ft_layer_weights *w = &step->weights->layers[layer];
    uint64_t bytes = w->expert_layout.bytes, start = ft_clock_ns(&step->clock), wanted = 0;
#ifdef FT_CHECKS
    memset(destination, 0xff, bytes); /* readers of the slot's last owner would meet NaN */
#endif
    memcpy(destination, w->experts + (uint64_t)w->expert_layout.stride * expert, bytes);
    if (step->link_bytes_per_s > 0)
        wanted = (uint64_t)((double)bytes / step->link_bytes_per_s * 1e9);
    if (step->link_delay_ns_max)
        wanted += random_next(&step->link_random) % (step->link_delay_ns_max + 1);
    if (wanted)
        sleep_until(step, start + wanted);
}

static void fetch(struct ft_step *step, const struct ft_dynamic *d)
{
    /* Only this thread ends a copy made ahead: where one is awaited, it is either done or not begun. */
    if (d->awaits && (!d->ticket || atomic_load_explicit(d->awaits, memory_order_relaxed) != d->ticket))
        return;
    copy_expert(step, d->layer, step->x.active.expert[d->active], d->destination);
    if (d->awaits) /* release: pairs with the acquire of whoever uses the memory */
        atomic_store_explicit(d->awaits, 0, memory_order_release);
}

/* Copies in the order in which they were asked for. Before a copy it waits until the slot's last reader is
 * done. Copies ahead only when no fetch is asked for. */
static void *link_main(void *context)
{
    struct ft_step *step = context;
    uint32_t thread = ft_step_thread(step, FT_STEP_LINK), taken = 0;
    for (;;) {
        /* acquire: pairs with the release of the expander */
        if (atomic_load_explicit(&step->link_published, memory_order_acquire) == taken) {
            if (atomic_load_explicit(&step->stop, memory_order_acquire))
                return NULL;
            if (ft_look_ahead_run(step, copy_expert) || ft_prefetch_run(step, copy_expert))
                continue;
            uint32_t ticket = ft_park_prepare(&step->link.park);
            if (atomic_load_explicit(&step->link_published, memory_order_acquire) != taken ||
                ft_prefetch_is_waiting(&step->prefetches[0]) || ft_look_ahead_is_waiting(step) ||
                atomic_load_explicit(&step->stop, memory_order_acquire))
                ft_park_cancel(&step->link.park);
            else
                ft_park_wait(&step->link.park, ticket, 1000000000u);
            continue;
        }
        uint32_t index = step->link_jobs[taken++ % step->link_max];
        uint32_t job = step->graph->static_count + index;
        if (!ft_step_wait_job(step, thread, &step->link, job, FT_WAIT_DEVICE))
            return NULL;
        struct ft_dynamic d = step->dynamic[index];
        uint64_t start = ft_clock_ns(&step->clock);
        bool skip = atomic_load_explicit(&step->failed, memory_order_relaxed) != FT_OK;
        if (!skip)
            fetch(step, &d);
        struct ft_trace_record *record =
            ft_step_record(step, thread, FT_RECORD_JOB, start, ft_clock_ns(&step->clock));
        if (record) {
            record->job = job + d.layer * step->graph->reserved_count;
            record->op = FT_OP_FETCH;
            record->lane = FT_LANE_LINK;
            record->layer = d.layer;
            record->bytes = d.bytes;
            record->expert = step->x.active.expert[d.active];
            record->rows = (uint16_t)FT_MIN(step->x.active.rows[d.active], UINT16_MAX);
            record->slot = d.slot;
            record->detail = step->x.active.reason[d.active];
            record->flags = skip ? 2 : 0;
        }
        uint32_t *todo = ft_step_todo(step, thread);
        ft_step_hand_over(step, thread, todo, ft_step_complete(step, thread, job, todo, 0));
    }
}

int ft_lane_host_open(struct ft_step *step, struct ft_error *err)
{
    if (step->plan->device != FT_DEVICE_HOST)
        return FT_OK;
    int status = ft_serial_start(&step->device, "ft-device", device_main, step, err);
    if (status == FT_OK)
        status = ft_serial_start(&step->link, "ft-link", link_main, step, err);
    if (status != FT_OK)
        ft_lane_host_close(step);
    return status;
}

void ft_lane_host_close(struct ft_step *step)
{
    /* release: pairs with the acquire of whoever looks at it; what close has read may be freed from here on */
    atomic_store_explicit(&step->stop, true, memory_order_release);
    ft_park_wake_all(&step->device.park);
    ft_park_wake_all(&step->link.park);
    ft_serial_join(&step->device, JOIN_NS);
    ft_serial_join(&step->link, JOIN_NS);
}
