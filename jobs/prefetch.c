/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/prefetch.h"

#include "jobs/step.h"

static struct ft_prefetch *entry(struct ft_prefetches *p, uint32_t at)
{
    return &p->ring[at % FT_PREFETCH_MAX];
}

/* The ring of the GPU that has the layer. */
static struct ft_prefetches *ring_of(struct ft_step *step, uint32_t layer)
{
    return &step->prefetches[ft_slots_part_of(&step->slots, layer)];
}

static bool is_filling(const struct ft_slots *slots, const struct ft_prefetch *e)
{
    /* acquire: pairs with the release of the link; the slot's bytes and the entry's times are written */
    return atomic_load_explicit(&slots->filling[e->slot], memory_order_acquire) == e->ticket;
}

static void record(struct ft_step *step, uint32_t thread, const struct ft_prefetch *e)
{
    ft_step_record_ahead(step, thread, e->start_ns, e->end_ns, e->layer, e->expert, e->slot,
                         FT_REASON_PREFETCH);
}

void ft_prefetch_settle(struct ft_step *step, uint32_t thread)
{
    struct ft_prefetches *p = &step->prefetches[0];
    if (step->cuda) /* see ft_prefetch_arrive */
        return;
    uint32_t published = atomic_load_explicit(&p->published, memory_order_relaxed);
    /* acquire: pairs with the release in ft_prefetch_run */
    uint32_t passed = atomic_load_explicit(&p->passed, memory_order_acquire);
    for (uint32_t i = p->settled; i != published; i++)
        step->slots.busy[entry(p, i)->slot] = 0;
    for (; p->settled != passed; p->settled++)
        record(step, thread, entry(p, p->settled));
    for (uint32_t i = p->settled; i != published; i++)
        if (is_filling(&step->slots, entry(p, i)))
            step->slots.busy[entry(p, i)->slot] = 1;
}

/* A GPU hears of prefetches in layers that miss something, and only in captured steps. */
/* What is copied for a layer becomes resident in another one of the same GPU. */
static bool has_others(const struct ft_step *step, uint32_t layer)
{
    const struct ft_slots *slots = &step->slots;
    uint32_t part = ft_slots_part_of(slots, layer), count = 0;
    for (uint32_t i = 0; i < step->model->layer_count && slots->part_count > 1 && count < 2; i++)
        count += !step->model->layers[i].dense && ft_slots_part_of(slots, i) == part;
    return slots->part_count <= 1 || count == 2;
}

static bool is_offered(const struct ft_step *step, uint32_t layer)
{
    const struct ft_active *a = &step->x.active;
    bool offered = step->slots.count && !step->x.batch->prefill && (!step->cuda || step->single_wave),
         missing = false;
    for (uint32_t i = 0; i < a->count && offered && step->cuda; i++)
        missing |= a->slot[i] == FT_NONE;
    return offered && (!step->cuda || (missing && has_others(step, layer)));
}

void ft_prefetch_offer(struct ft_step *step, uint32_t layer, struct ft_layer_out *out)
{
    struct ft_prefetches *p = ring_of(step, layer);
    uint32_t published = atomic_load_explicit(&p->published, memory_order_relaxed);
    out->prefetch_layer = p->layer;
    out->prefetch_expert = p->expert;
    out->prefetch_victim = p->victim;
    out->prefetch_count = 0;
    out->prefetch_max = is_offered(step, layer) ? FT_PREFETCH_MAX - (published - p->settled) : 0;
}

/* GPU: on its way already. */
static bool is_pending(struct ft_prefetches *p, uint32_t published, uint32_t layer, uint32_t expert)
{
    for (uint32_t i = p->settled; i != published; i++)
        if (entry(p, i)->layer == layer && entry(p, i)->expert == expert)
            return true;
    return false;
}

/* The slot is the prefetch's from here on. */
static void take(struct ft_step *step, struct ft_prefetch *e)
{
    struct ft_slots *slots = &step->slots;
    if (step->cuda) {
        e->victim = ft_slots_holder(slots, e->slot);
        ft_slots_empty(slots, e->slot);
        return;
    }
    ft_slots_take(slots, e->slot, e->layer, e->expert, step->step_number, true);
    slots->filled_step[e->slot] = 0; /* not this step's: it stays when the step fails */
    slots->prefetched[e->slot] = 1;
    atomic_store_explicit(&slots->filling[e->slot], e->ticket, memory_order_relaxed);
}

void ft_prefetch_publish(struct ft_step *step, uint32_t layer_now, const struct ft_layer_out *out)
{
    struct ft_prefetches *p = ring_of(step, layer_now);
    struct ft_slots *slots = &step->slots;
    uint32_t published = atomic_load_explicit(&p->published, memory_order_relaxed), before = published;
    const struct ft_slots_part *own = &slots->parts[ft_slots_part_of(slots, layer_now)];
    for (uint32_t i = 0; i < out->prefetch_count; i++) {
        uint32_t layer = p->layer[i], expert = p->expert[i], slot = p->victim[i];
        bool exists = layer < step->model->layer_count && !step->model->layers[layer].dense &&
                      expert < step->model->expert_count;
        const struct ft_slots_part *part = &slots->parts[exists ? ft_slots_part_of(slots, layer) : 0];
        exists = exists && slot >= part->begin && slot < part->end && part == own;
        if (!exists || slots->busy[slot] || ft_slots_find(slots, layer, expert) != FT_NONE ||
            (step->cuda && is_pending(p, published, layer, expert))) {
            step->repairs += !exists;
            continue;
        }
        p->tickets = p->tickets + 1 ? p->tickets + 1 : 1;
        struct ft_prefetch *e = entry(p, published++);
        *e = (struct ft_prefetch){
            .slot = slot, .layer = layer, .expert = expert, .ticket = p->tickets, .step = step->step_number};
        take(step, e);
        p->issued++;
    }
    if (published == before)
        return;
    /* release: pairs with the acquire in ft_prefetch_run */
    atomic_store_explicit(&p->published, published, memory_order_release);
    if (!step->cuda)
        ft_park_wake(&step->link.park);
}

/* ---- a GPU: all by the driver, but for drop ---- */

uint32_t ft_prefetch_victims(struct ft_step *step, uint32_t layer, struct ft_prefetch_move *moves)
{
    struct ft_prefetches *p = ring_of(step, layer);
    uint32_t count = 0, experts = step->slots.expert_count,
             published = atomic_load_explicit(&p->published, memory_order_relaxed);
    for (uint32_t i = atomic_load_explicit(&p->passed, memory_order_relaxed); i != published; i++) {
        uint32_t victim = entry(p, i)->victim;
        if (victim != FT_NONE)
            moves[count++] = (struct ft_prefetch_move){victim / experts, victim % experts, FT_NONE};
    }
    return count;
}

uint32_t ft_prefetch_arrive(struct ft_step *step, uint32_t layer, struct ft_prefetch_move *moves)
{
    struct ft_prefetches *p = ring_of(step, layer);
    struct ft_slots *slots = &step->slots;
    uint32_t count = 0, passed = atomic_load_explicit(&p->passed, memory_order_relaxed);
    for (; p->settled != passed && entry(p, p->settled)->layer != layer; p->settled++) {
        const struct ft_prefetch *e = entry(p, p->settled);
        if (ft_slots_find(slots, e->layer, e->expert) == FT_NONE) {
            ft_slots_take(slots, e->slot, e->layer, e->expert, e->step, false);
            slots->filled_step[e->slot] = step->step_number; /* a failed step has not waited for the copy */
            slots->prefetched[e->slot] = 1;
            moves[count++] = (struct ft_prefetch_move){e->layer, e->expert, e->slot};
        } else {
            p->dropped++; /* fetched on demand since */
        }
        slots->busy[e->slot] = 0;
    }
    return count;
}

struct ft_prefetch *ft_prefetch_next(struct ft_step *step, uint32_t layer)
{
    struct ft_prefetches *p = ring_of(step, layer);
    uint32_t passed = atomic_load_explicit(&p->passed, memory_order_relaxed);
    return passed == atomic_load_explicit(&p->published, memory_order_relaxed) ? NULL : entry(p, passed);
}

void ft_prefetch_queued(struct ft_step *step, uint32_t layer, uint32_t thread)
{
    struct ft_prefetches *p = ring_of(step, layer);
    uint32_t passed = atomic_load_explicit(&p->passed, memory_order_relaxed);
    record(step, thread, entry(p, passed));
    atomic_store_explicit(&p->passed, passed + 1, memory_order_relaxed);
}

void ft_prefetch_drop(struct ft_step *step)
{
    for (uint32_t i = 0; i < step->slots.part_count; i++) {
        struct ft_prefetches *p = &step->prefetches[i];
        uint32_t published = atomic_load_explicit(&p->published, memory_order_relaxed);
        for (; p->settled != published; p->settled++) {
            step->slots.busy[entry(p, p->settled)->slot] = 0;
            p->dropped++;
        }
        atomic_store_explicit(&p->passed, published, memory_order_relaxed);
    }
}

bool ft_prefetch_use(struct ft_step *step, uint32_t slot)
{
    struct ft_slots *slots = &step->slots;
    bool filling = atomic_load_explicit(&slots->filling[slot], memory_order_acquire) != 0;
    step->prefetches[0].used += slots->prefetched[slot];
    step->prefetches[0].waited += slots->prefetched[slot] && filling;
    slots->prefetched[slot] = 0;
    return filling;
}

bool ft_prefetch_run(struct ft_step *step,
                     void (*copy)(struct ft_step *step, uint32_t layer, uint32_t expert, char *destination))
{
    struct ft_prefetches *p = &step->prefetches[0];
    uint32_t passed = atomic_load_explicit(&p->passed, memory_order_relaxed);
    if (atomic_load_explicit(&p->published, memory_order_acquire) == passed)
        return false;
    struct ft_prefetch *e = entry(p, passed);
    if (is_filling(&step->slots, e)) {
        e->start_ns = ft_clock_ns(&step->clock);
        copy(step, e->layer, e->expert, ft_slots_memory(&step->slots, e->slot));
        e->end_ns = ft_clock_ns(&step->clock);
        /* release: pairs with the acquire of whoever uses the slot */
        atomic_store_explicit(&step->slots.filling[e->slot], 0, memory_order_release);
    }
    atomic_store_explicit(&p->passed, passed + 1, memory_order_release);
    return true;
}
