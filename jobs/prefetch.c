/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/prefetch.h"

#include "jobs/step.h"

static struct ft_prefetch *entry(struct ft_prefetches *p, uint32_t at)
{
    return &p->ring[at % FT_PREFETCH_MAX];
}

static bool is_filling(const struct ft_slots *slots, const struct ft_prefetch *e)
{
    /* acquire: pairs with the release of the link; the slot's bytes and the entry's times are written */
    return atomic_load_explicit(&slots->filling[e->slot], memory_order_acquire) == e->ticket;
}

/* The copy as the link's job. What was copied between two steps is shown at the begin of the second. */
static void record(struct ft_step *step, uint32_t thread, const struct ft_prefetch *e)
{
    if (!e->end_ns)
        return;
    struct ft_trace_record *r = ft_step_record(
        step, thread, FT_RECORD_JOB, FT_MAX(e->start_ns, step->begin_ns), FT_MAX(e->end_ns, step->begin_ns));
    if (!r)
        return;
    r->thread = (uint16_t)ft_step_thread(step, FT_STEP_LINK);
    r->op = FT_OP_FETCH;
    r->lane = FT_LANE_LINK;
    r->layer = (uint16_t)e->layer;
    r->expert = e->expert;
    r->slot = e->slot;
    r->bytes = step->weights->layers[e->layer].expert_layout.bytes;
    r->detail = FT_REASON_PREFETCH;
}

void ft_prefetch_settle(struct ft_step *step, uint32_t thread)
{
    struct ft_prefetches *p = &step->prefetches;
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

void ft_prefetch_offer(struct ft_step *step, struct ft_layer_out *out)
{
    struct ft_prefetches *p = &step->prefetches;
    uint32_t published = atomic_load_explicit(&p->published, memory_order_relaxed);
    out->prefetch_layer = p->layer;
    out->prefetch_expert = p->expert;
    out->prefetch_victim = p->victim;
    out->prefetch_count = 0;
    out->prefetch_max = step->slots.count && !step->x.batch->prefill && !step->cuda
                            ? FT_PREFETCH_MAX - (published - p->settled)
                            : 0;
}

void ft_prefetch_publish(struct ft_step *step, const struct ft_layer_out *out)
{
    struct ft_prefetches *p = &step->prefetches;
    struct ft_slots *slots = &step->slots;
    uint32_t published = atomic_load_explicit(&p->published, memory_order_relaxed), before = published;
    for (uint32_t i = 0; i < out->prefetch_count; i++) {
        uint32_t layer = p->layer[i], expert = p->expert[i], slot = p->victim[i];
        bool exists = layer < step->model->layer_count && !step->model->layers[layer].dense &&
                      expert < step->model->expert_count;
        if (!exists || slots->busy[slot] || ft_slots_find(slots, layer, expert) != FT_NONE) {
            step->repairs += !exists;
            continue;
        }
        ft_slots_take(slots, slot, layer, expert, step->step_number, true);
        slots->filled_step[slot] = 0; /* not this step's: it stays when the step fails */
        slots->prefetched[slot] = 1;
        p->tickets = p->tickets + 1 ? p->tickets + 1 : 1;
        *entry(p, published++) =
            (struct ft_prefetch){.slot = slot, .layer = layer, .expert = expert, .ticket = p->tickets};
        atomic_store_explicit(&slots->filling[slot], p->tickets, memory_order_relaxed);
        p->issued++;
    }
    if (published == before)
        return;
    /* release: pairs with the acquire in ft_prefetch_run */
    atomic_store_explicit(&p->published, published, memory_order_release);
    ft_park_wake(&step->link.park);
}

bool ft_prefetch_use(struct ft_step *step, uint32_t slot)
{
    struct ft_slots *slots = &step->slots;
    bool filling = atomic_load_explicit(&slots->filling[slot], memory_order_acquire) != 0;
    step->prefetches.used += slots->prefetched[slot];
    step->prefetches.waited += slots->prefetched[slot] && filling;
    slots->prefetched[slot] = 0;
    return filling;
}

bool ft_prefetch_run(struct ft_step *step,
                     void (*copy)(struct ft_step *step, uint32_t layer, uint32_t expert, char *destination))
{
    struct ft_prefetches *p = &step->prefetches;
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
