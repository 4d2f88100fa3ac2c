/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a router's choice to jobs: group rows by expert, ask the policy, fill the layer's reserved range.
 *
 *   CPU      up tiles -> join -> down tiles ----------------------------.
 *   device   group 0: experts in slots -------------------------------- +-> combine join
 *            wave w: fetches -> group w (waits for all its fetches) ----'
 *
 * Waves. Decode: a fetch fills a slot. Slots may be fewer than missing experts; then a slot is filled again
 * in a later wave, and that wave's fetches wait for the group before it. Prefill: fetched experts land in two
 * staging buffers in turn; the fetches of wave w wait for group w - 2, which read the same buffer. What the
 * slots hold, and in which order it was used, is afterwards what decode steps left.
 */
#include <sched.h>
#include <string.h>

#include "jobs/step.h"

#define TOLD_LOOKS 64u /* between two offers of the core */

/* ---- grouping ---- */

/* Active experts ascending, with the rows of each in row order. O(rows k + experts). */
static void group_rows(struct ft_step *step)
{
    struct ft_active *a = &step->x.active;
    const struct ft_model *m = step->model;
    uint32_t rows = step->x.batch->rows, k = m->topk;
    const uint32_t *ids = step->router_ids
                              ? step->router_ids
                              : (const uint32_t *)ft_execute_at(&step->x, step->x.space.topk_ids, 0, 0);
    uint32_t *of_expert = a->group; /* [expert_count] scratch: first counts, then active index */
    memset(of_expert, 0, m->expert_count * sizeof *of_expert);
    for (uint32_t i = 0; i < rows * k; i++)
        of_expert[ids[i]]++;
    a->count = 0;
    uint32_t at = 0;
    for (uint32_t e = 0; e < m->expert_count; e++) {
        if (!of_expert[e])
            continue;
        uint32_t i = a->count++;
        a->expert[i] = e;
        a->rows[i] = of_expert[e];
        a->pair_begin[i] = at;
        at += of_expert[e];
        of_expert[e] = a->pair_begin[i]; /* next free pair of the expert */
    }
    a->pair_begin[a->count] = at;
    for (uint32_t i = 0; i < rows * k; i++) {
        uint32_t pair = of_expert[ids[i]]++;
        a->pair_row[pair] = i / k;
        a->pair_out[pair] = i;
    }
}

/* ---- the policy's answer ---- */

/* A GPU computes all experts of a prefill step (its rows would keep the CPU busy for long); in a captured
 * decode step every fetch of a layer needs a slot of its own. */
static void suit_gpu(struct ft_step *step, bool prefill)
{
    struct ft_active *a = &step->x.active;
    for (uint32_t i = 0; i < a->count; i++) {
        if (prefill && a->place[i] == FT_PLACE_CPU) {
            a->place[i] = FT_PLACE_FETCH;
            a->reason[i] = FT_REASON_STAGED;
        }
        if (!step->single_wave || prefill || a->place[i] != FT_PLACE_FETCH)
            continue;
        bool taken = step->slots.busy[a->victim[i]];
        for (uint32_t j = 0; j < i && !taken; j++)
            taken = a->place[j] == FT_PLACE_FETCH && a->victim[j] == a->victim[i];
        if (taken) {
            a->place[i] = FT_PLACE_CPU;
            a->reason[i] = FT_REASON_NO_SLOT;
            a->victim[i] = FT_NONE;
        }
    }
}

static void decide(struct ft_step *step, uint32_t layer, struct ft_layer_out *out)
{
    struct ft_active *a = &step->x.active;
    const struct ft_expert_layout *layout = &step->weights->layers[layer].expert_layout;
    bool prefill = step->x.batch->prefill;
    for (uint32_t i = 0; i < a->count; i++) {
        a->slot[i] = ft_slots_find(&step->slots, layer, a->expert[i]);
        a->last_used[i] = prefill ? ft_slots_last_use(&step->slots, layer, a->expert[i])
                                  : ft_slots_touch(&step->slots, layer, a->expert[i], step->step_number);
        a->victim[i] = FT_NONE;
        a->predicted_ns[i] = 0;
        a->reason[i] = FT_REASON_NONE;
        a->place[i] = FT_PLACE_CPU;
        if (a->slot[i] == FT_NONE)
            continue;
        if (prefill)
            ft_slots_borrow(&step->slots, a->slot[i]);
        else
            ft_slots_lease(&step->slots, a->slot[i], step->step_number);
    }
    ft_look_ahead_mark(step, layer);
    struct ft_layer_in in = {.step = step->step_number,
                             .layer = layer,
                             .active_count = a->count,
                             .expert = a->expert,
                             .rows = a->rows,
                             .slot = a->slot,
                             .last_used = a->last_used,
                             .ahead = a->ahead,
                             .prefill = prefill,
                             .no_staging = !step->plan->staging_experts,
                             .has_device = step->plan->device != FT_DEVICE_NONE,
                             .expert_bytes = layout->bytes,
                             .format = layout->format,
                             .now_ns = ft_step_policy_now(step)};
    *out = (struct ft_layer_out){
        .place = a->place, .reason = a->reason, .victim = a->victim, .predicted_ns = a->predicted_ns};
    ft_prefetch_offer(step, layer, out);
    ft_slots_view(&step->slots, layer, &in.slots);
    step->policy->decide_layer(step->policy_state, &in, out);
    step->repairs += ft_policy_check_answer(&in, out);
    if (step->cuda)
        suit_gpu(step, prefill);
}

static void record_choices(struct ft_step *step, uint32_t thread, uint32_t layer)
{
    const struct ft_active *a = &step->x.active;
    uint64_t now = ft_clock_ns(&step->clock);
    for (uint32_t i = 0; i < a->count; i++) {
        struct ft_trace_record *record = ft_step_record(step, thread, FT_RECORD_CHOICE, now, now);
        if (!record)
            return;
        record->layer = (uint16_t)layer;
        record->op = FT_OP_ROUTER;
        record->expert = a->expert[i];
        record->rows = (uint16_t)FT_MIN(a->rows[i], UINT16_MAX);
        record->place = a->place[i];
        record->detail = a->reason[i];
        record->slot = a->place[i] == FT_PLACE_FETCH ? a->victim[i] : a->slot[i];
        record->predicted_ns = a->predicted_ns[i];
    }
}

/* The time from the router's end to jobs being ready: grouping, policy, filling, wake-ups. */
static void record_policy(struct ft_step *step, uint32_t thread, uint32_t layer, uint64_t start)
{
    struct ft_trace_record *record =
        ft_step_record(step, thread, FT_RECORD_JOB, start, ft_clock_ns(&step->clock));
    if (!record)
        return;
    record->op = FT_OP_POLICY;
    record->lane = thread < step->workers ? FT_LANE_CPU : FT_LANE_DEVICE;
    record->layer = (uint16_t)layer;
    record->rows = (uint16_t)FT_MIN(step->x.batch->rows, UINT16_MAX);
    record->detail = FT_REASON_FIXED_LANE;
}

/* ---- filling the reserved range ---- */

struct filler {
    struct ft_step *step;
    uint32_t layer, releases; /* jobs that release the combine join */
    const struct ft_expert_layout *layout;
};

static struct ft_dynamic *add(struct filler *f, enum ft_op op, enum ft_lane lane, int32_t in_degree)
{
    struct ft_step *step = f->step;
    FT_ASSERT_LT(step->dynamic_count, step->graph->reserved_count);
    uint32_t index = step->dynamic_count++;
    struct ft_dynamic *d = &step->dynamic[index];
    *d = (struct ft_dynamic){.op = (uint8_t)op,
                             .lane = (uint8_t)lane,
                             .layer = (uint16_t)f->layer,
                             .active = FT_NONE,
                             .slot = FT_NONE};
    atomic_store_explicit(&step->counter[step->graph->static_count + index], in_degree, memory_order_relaxed);
    return d;
}

/* `tiles` tiles of `units` outputs, 8-aligned. */
static void add_tiles(struct filler *f, enum ft_op op, uint32_t active, uint32_t units, uint32_t tiles,
                      int32_t in_degree, uint32_t succ_begin, uint32_t succ_count, uint64_t bytes)
{
    bool last = op == FT_OP_EXPERT_DOWN;
    for (uint32_t t = 0; t < tiles; t++) {
        struct ft_dynamic *d = add(f, op, FT_LANE_CPU, in_degree);
        d->active = active;
        ft_graph_tile_range(units, tiles, t, &d->begin, &d->end);
        d->succ_begin = succ_begin;
        d->succ_count = succ_count;
        d->bytes = bytes * (d->end - d->begin) / units;
        d->to_combine = last;
        f->releases += last;
    }
}

/* Up tiles, join, down tiles of one expert. Ready up tiles go to todo. */
static uint32_t add_cpu_expert(struct filler *f, uint32_t active, uint32_t cpu_experts, bool is_last,
                               uint32_t *todo, uint32_t count)
{
    const struct ft_expert_layout *layout = f->layout;
    struct ft_step *step = f->step;
    uint64_t up_bytes = (uint64_t)layout->bytes * 2 / 3, down_bytes = layout->bytes - up_bytes;
    uint32_t ups, downs;
    ft_graph_expert_tiles(&step->plan->tiling, layout, cpu_experts, is_last, &ups, &downs);
    uint32_t first = step->dynamic_count, join = first + ups, down = join + (ups > 1);
    add_tiles(f, FT_OP_EXPERT_UP, active, layout->width, ups, 0, ups > 1 ? join : down, ups > 1 ? 1 : downs,
              up_bytes);
    if (ups > 1) {
        struct ft_dynamic *d = add(f, FT_OP_JOIN, FT_LANE_INLINE, (int32_t)ups);
        d->succ_begin = down;
        d->succ_count = downs;
    }
    add_tiles(f, FT_OP_EXPERT_DOWN, active, layout->hidden, downs, 1, 0, 0, down_bytes);
    for (uint32_t i = 0; i < ups; i++) {
        FT_ASSERT_LT(count, step->todo_max);
        todo[count++] = step->graph->static_count + first + i;
    }
    return count;
}

/* One group of experts on the device; [begin, end) of active.group. */
static uint32_t add_group(struct filler *f, uint32_t begin, uint32_t end, int32_t in_degree)
{
    struct ft_dynamic *d = add(f, FT_OP_EXPERT_DEVICE, FT_LANE_DEVICE, in_degree);
    d->begin = begin;
    d->end = end;
    d->bytes = (uint64_t)f->layout->bytes * (end - begin);
    d->to_combine = true;
    f->releases++;
    return f->step->dynamic_count - 1;
}

/* Experts whose prefetch was not finished when they were asked for: fetches that copy what is not there yet.
 * They come first, so that the link's order is the device's. Returns the new count of members; *published is
 * moved on. */
static uint32_t add_awaited(struct filler *f, const uint32_t *awaited, uint32_t count, uint32_t members,
                            uint32_t *published)
{
    struct ft_step *step = f->step;
    struct ft_active *a = &step->x.active;
    uint32_t begin = members, first = step->dynamic_count;
    for (uint32_t i = 0; i < count; i++) {
        struct ft_dynamic *d = add(f, FT_OP_FETCH, FT_LANE_LINK, 0);
        d->active = awaited[i];
        d->slot = a->slot[awaited[i]];
        d->awaits = &step->slots.filling[d->slot];
        d->ticket = atomic_load_explicit(d->awaits, memory_order_acquire);
        d->destination = ft_slots_memory(&step->slots, d->slot);
        d->bytes = f->layout->bytes;
        d->succ_begin = first + count;
        d->succ_count = 1;
        step->link_jobs[(*published)++ % step->link_max] = step->dynamic_count - 1;
        a->group[members++] = awaited[i];
    }
    add_group(f, begin, members, (int32_t)count);
    return members;
}

/* The device walks groups in order, and they need not lie side by side: wave_first/count tell it all dynamic
 * ids to scan. */
static void add_waves(struct filler *f, uint32_t layer)
{
    struct ft_step *step = f->step;
    struct ft_active *a = &step->x.active;
    bool staged = step->x.batch->prefill;
    uint32_t members = 0, published = atomic_load_explicit(&step->link_published, memory_order_relaxed);
    uint32_t before[2] = {FT_NONE, FT_NONE}; /* dynamic indices of the last and the second last group */
    uint32_t *awaited = a->awaited, awaited_count = 0;
    char *const *staging = ft_step_staging(step, layer);
    for (uint32_t i = 0; i < a->count; i++) {
        if (a->place[i] != FT_PLACE_DEVICE)
            continue;
        if (ft_prefetch_use(step, a->slot[i]))
            awaited[awaited_count++] = i;
        else
            a->group[members++] = i;
    }
    if (members)
        before[0] = add_group(f, 0, members, 0);
    if (awaited_count) {
        members = add_awaited(f, awaited, awaited_count, members, &published);
        before[1] = before[0];
        before[0] = step->dynamic_count - 1;
    }
    uint32_t wave = 0, next = 0;
    while (next < a->count) {
        /* Members of this wave: until the staging buffer is full, or a slot comes that is taken in this layer
         * already. */
        uint32_t begin = members, first_fetch = step->dynamic_count, taken = 0;
        bool reuses = false;
        for (; next < a->count; next++) {
            if (a->place[next] != FT_PLACE_FETCH)
                continue;
            bool busy = !staged && step->slots.busy[a->victim[next]];
            if (staged ? taken == step->plan->staging_experts : busy && taken)
                break;
            reuses |= busy;
            a->group[members++] = next;
            taken++;
            if (staged) {
                a->blob[next] = staging[wave % 2] + step->staging_stride * (taken - 1);
            } else {
                uint32_t slot = a->victim[next];
                a->evicted[next] = ft_slots_holder(&step->slots, slot);
                ft_slots_take(&step->slots, slot, layer, a->expert[next], step->step_number, !busy);
                a->ahead[next] &= !busy; /* blobs that this layer reads stay where they are */
                a->slot[next] = slot;
                a->blob[next] = ft_slots_memory(&step->slots, slot);
            }
        }
        if (!taken)
            break;
        uint32_t wait_for = staged ? (wave >= 2 ? before[1] : FT_NONE) : (reuses ? before[0] : FT_NONE);
        for (uint32_t i = begin; i < members; i++) {
            struct ft_dynamic *d = add(f, FT_OP_FETCH, FT_LANE_LINK, wait_for == FT_NONE ? 0 : 1);
            uint32_t active = a->group[i];
            d->active = active;
            d->slot = staged ? FT_NONE : a->slot[active];
            d->victim = staged ? FT_NONE : a->evicted[active];
            d->bytes = a->ahead[active] ? 0 : f->layout->bytes;
            if (a->ahead[active]) {
                d->awaits = ft_look_ahead_land(step, layer, a->expert[active], d->slot, &d->ticket);
                a->blob[active] = ft_slots_memory(&step->slots, d->slot);
            }
            d->destination = (char *)(uintptr_t)a->blob[active];
            d->succ_begin = first_fetch + taken; /* the group made next */
            d->succ_count = 1;
            step->link_jobs[published++ % step->link_max] = step->dynamic_count - 1;
        }
        if (wait_for != FT_NONE) {
            step->dynamic[wait_for].succ_begin = first_fetch;
            step->dynamic[wait_for].succ_count = taken;
        }
        before[1] = before[0];
        before[0] = add_group(f, begin, members, (int32_t)taken);
        wave++;
    }
    /* release: pairs with the acquire of the link lane; the jobs and their counters are written */
    atomic_store_explicit(&step->link_published, published, memory_order_release);
}

static void count_places(struct ft_step *step, uint32_t layer, uint32_t expert_bytes)
{
    const struct ft_active *a = &step->x.active;
    uint32_t cpu = 0, fetch = 0, resident = 0, copies = 0;
    for (uint32_t i = 0; i < a->count; i++) {
        cpu += a->place[i] == FT_PLACE_CPU;
        fetch += a->place[i] == FT_PLACE_FETCH;
        copies += a->place[i] == FT_PLACE_FETCH && !a->ahead[i];
        resident += a->place[i] == FT_PLACE_DEVICE;
    }
    step->cpu_experts += cpu;
    step->fetches += fetch;
    step->fetch_bytes += (uint64_t)copies * expert_bytes;
    if (step->plan->device != FT_DEVICE_NONE) {
        step->hits += resident;
        step->misses += a->count - resident;
        step->layer_hits[layer] += resident;
        step->layer_misses[layer] += a->count - resident;
    }
}

/* The router still holds its own count of the join, so it cannot fall to 0 before the jobs made so far are
 * added; none of them may be handed over before. */
static void hold_combine(struct filler *f)
{
    struct ft_step *step = f->step;
    atomic_fetch_add_explicit(&step->counter[step->graph->combine_job[f->layer]], (int32_t)f->releases,
                              memory_order_relaxed);
    f->releases = 0;
}

/* The session's thread tells the policy of the step before while the first layer is computed; that is rarely
 * late. It waits for nobody itself, so this ends, but it may need this core. */
static void wait_until_told(struct ft_step *step)
{
    for (uint32_t looks = 1; atomic_load_explicit(&step->learning, memory_order_acquire); looks++)
        if (looks % TOLD_LOOKS)
            ft_park_pause();
        else
            (void)sched_yield();
}

uint32_t ft_step_expand(struct ft_step *step, uint32_t thread, uint32_t layer, uint32_t *todo, uint32_t count)
{
    struct ft_active *a = &step->x.active;
    const struct ft_layer_weights *w = &step->weights->layers[layer];
    struct filler f = {.step = step, .layer = layer, .layout = &w->expert_layout};
    uint64_t start = ft_clock_ns(&step->clock);
    struct ft_layer_out out;
    wait_until_told(step);
    ft_warm_stop(&step->warm);
    if (step->slots.count) { /* the layer before is combined: its leases end */
        ft_slots_release(&step->slots, a->slot, a->count);
        ft_prefetch_settle(step, thread);
        ft_look_ahead_settle(step, thread);
    }
    group_rows(step);
    decide(step, layer, &out);
    record_choices(step, thread, layer);
    count_places(step, layer, w->expert_layout.bytes);
    step->dynamic_count = 0;
    uint32_t cpu_experts = 0, ready = count;
    for (uint32_t i = 0; i < a->count; i++) {
        cpu_experts += a->place[i] == FT_PLACE_CPU;
        a->blob[i] = w->experts + (uint64_t)w->expert_layout.stride * a->expert[i];
        if (a->place[i] == FT_PLACE_DEVICE)
            a->blob[i] = ft_slots_memory(&step->slots, a->slot[i]);
    }
    if (cpu_experts && step->plan->device != FT_DEVICE_NONE)
        ft_lane_cpu_set_active(step->cpu, true);
    for (uint32_t i = 0, added = 0; i < a->count; i++) {
        if (a->place[i] != FT_PLACE_CPU)
            continue;
        ready = add_cpu_expert(&f, i, cpu_experts, ++added == cpu_experts, todo, ready);
        if (added == 1 && cpu_experts > 1 && step->cuda) { /* workers begin while the rest is being made */
            hold_combine(&f);
            ft_step_hand_over(step, thread, todo + count, ready - count);
            ready = count;
        }
    }
    step->wave_first = step->dynamic_count;
    if (step->plan->device != FT_DEVICE_NONE)
        add_waves(&f, layer);
    step->wave_count = step->dynamic_count - step->wave_first;
    ft_look_ahead_end(step, layer);
    hold_combine(&f);
    if (step->wave_count)
        ft_park_wake(&step->link.park);
    if (out.prefetch_count)
        ft_prefetch_publish(step, layer, &out);
    record_policy(step, thread, layer, start);
    return ready;
}
