/* SPDX-License-Identifier: Apache-2.0 */
#include "jobs/look_ahead.h"

#include <string.h>

#include "jobs/step.h"

static struct ft_landings *landings_of(struct ft_step *step, uint32_t layer)
{
    return &step->landings[ft_slots_part_of(&step->slots, layer)];
}

static struct ft_landing_order *order_at(struct ft_landings *l, uint32_t at)
{
    return &l->ring[at % FT_LANDINGS_MAX];
}

int ft_look_ahead_init(struct ft_step *step, struct ft_arena *arena, bool looks, uint32_t pairs_max,
                       struct ft_error *err)
{
    struct ft_foresight *f = &step->foresight;
    const struct ft_slots *slots = &step->slots;
    *f = (struct ft_foresight){.layer = FT_NONE};
    for (uint32_t i = 0; i < slots->part_count; i++) {
        struct ft_landings *l = &step->landings[i];
        l->count = slots->parts[i].landing_count;
        for (uint32_t j = 0; j < l->count; j++)
            l->landing[j] = (struct ft_landing){.blob = slots->parts[i].end - slots->parts[i].begin + j,
                                                .layer = FT_NONE,
                                                .order = UINT32_MAX};
    }
    int status = FT_ARENA_PUSH(arena, looks ? pairs_max : 0, &f->expert, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, looks ? pairs_max : 0, &f->slot, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, looks ? pairs_max : 0, &f->ids, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, FT_LANDINGS_MAX, &f->chosen, err);
    if (status == FT_OK)
        status = FT_ARENA_PUSH(arena, looks ? slots->expert_count : 0, &f->mark, err);
    return status;
}

bool ft_look_ahead_wants(const struct ft_step *step, const struct ft_batch *batch)
{
    return step->plan->device != FT_DEVICE_NONE && step->foresight.mark && !batch->prefill &&
           step->policy->looks_ahead && step->policy->looks_ahead(step->policy_state);
}

uint32_t ft_look_ahead_target(const struct ft_step *step, uint32_t layer)
{
    const struct ft_slots *slots = &step->slots;
    return ft_model_next_experts(step->model, layer, slots->parts[ft_slots_part_of(slots, layer)].layer_end);
}

/* ---- expander ---- */

/* Each foreseen expert once: the first choices of all rows, then the second ones. */
static void list_foreseen(struct ft_step *step, const uint32_t *ids)
{
    struct ft_foresight *f = &step->foresight;
    uint32_t rows = step->x.batch->rows, k = step->model->topk;
    f->stamp = f->stamp + 1 ? f->stamp + 1 : 1;
    f->count = 0;
    for (uint32_t j = 0; j < k; j++)
        for (uint32_t r = 0; r < rows; r++) {
            uint32_t expert = ids[r * k + j];
            if (expert >= step->slots.expert_count || f->mark[expert] == f->stamp)
                continue;
            f->mark[expert] = f->stamp;
            f->expert[f->count] = expert;
            f->slot[f->count++] = ft_slots_find(&step->slots, f->layer, expert);
        }
    f->seen += f->count;
}

static bool is_free(struct ft_landings *l, const struct ft_landing *landing)
{
    /* acquire: pairs with the release of the link; it has done with the buffer */
    uint32_t passed = atomic_load_explicit(&l->passed, memory_order_acquire);
    return landing->layer == FT_NONE && (int32_t)(passed - landing->order) > 0 &&
           !atomic_load_explicit(&landing->ticket, memory_order_acquire);
}

static void place_order(struct ft_step *step, uint32_t part, uint32_t at, uint32_t expert)
{
    struct ft_foresight *f = &step->foresight;
    struct ft_landings *l = &step->landings[part];
    struct ft_landing *landing = l->landing;
    while (!is_free(l, landing))
        landing++;
    l->tickets = l->tickets + 1 ? l->tickets + 1 : 1;
    landing->layer = f->layer;
    landing->expert = expert;
    landing->order = at;
    atomic_store_explicit(&landing->ticket, step->cuda ? 0 : l->tickets, memory_order_relaxed);
    *order_at(l, at) =
        (struct ft_landing_order){.landing = (uint32_t)(landing - l->landing),
                                  .ticket = l->tickets,
                                  .layer = f->layer,
                                  .expert = expert,
                                  .destination = ft_slots_blob(&step->slots, part, landing->blob)};
    f->ordered++;
}

static void order_copies(struct ft_step *step, uint32_t layer)
{
    struct ft_foresight *f = &step->foresight;
    uint32_t part = ft_slots_part_of(&step->slots, layer), room = 0;
    struct ft_landings *l = &step->landings[part];
    const struct ft_expert_layout *layout = &step->weights->layers[f->layer].expert_layout;
    uint32_t published = atomic_load_explicit(&l->published, memory_order_relaxed), before = published;
    for (uint32_t i = 0; i < l->count; i++)
        room += is_free(l, &l->landing[i]);
    room = FT_MIN(room, FT_LANDINGS_MAX - (published - l->settled));
    if (!room)
        return;
    const struct ft_foreseen foreseen = {.step = step->step_number,
                                         .layer = f->layer,
                                         .from = layer,
                                         .count = f->count,
                                         .expert = f->expert,
                                         .slot = f->slot,
                                         .room = room,
                                         .now_ns = ft_step_policy_now(step),
                                         .expert_bytes = layout->bytes,
                                         .format = layout->format};
    uint32_t count = step->policy->look_ahead(step->policy_state, &foreseen, f->chosen);
    step->repairs += count > room;
    for (uint32_t i = 0; i < FT_MIN(count, room); i++) {
        uint32_t at = f->chosen[i];
        if (at >= f->count || f->slot[at] != FT_NONE) {
            step->repairs++;
            continue;
        }
        f->slot[at] = 0; /* not twice */
        place_order(step, part, published++, f->expert[at]);
    }
    if (published == before)
        return;
    /* release: pairs with the acquire in ft_look_ahead_run */
    atomic_store_explicit(&l->published, published, memory_order_release);
    if (!step->cuda)
        ft_park_wake(&step->link.park);
}

/* What the workers will probably compute: as many of the likeliest that neither a slot nor a copy has as they compute in
 * this layer, and one more. */
static void offer_to_workers(struct ft_step *step)
{
    const struct ft_foresight *f = &step->foresight;
    const struct ft_active *a = &step->x.active;
    const struct ft_layer_weights *w = &step->weights->layers[f->layer];
    const char *at[FT_WARM_MAX];
    uint32_t count = 0, most = 0;
    for (uint32_t i = 0; i < a->count; i++)
        most += a->place[i] == FT_PLACE_CPU;
    most = most ? FT_MIN(most + 1, FT_WARM_MAX) : 0;
    for (uint32_t i = 0; i < f->count && count < most; i++)
        if (f->slot[i] == FT_NONE)
            at[count++] = w->experts + (uint64_t)w->expert_layout.stride * f->expert[i];
    if (count)
        ft_warm_offer(&step->warm, at, count, w->expert_layout.bytes);
}

void ft_look_ahead_order(struct ft_step *step, uint32_t layer, const uint32_t *ids)
{
    struct ft_foresight *f = &step->foresight;
    f->layer = ft_look_ahead_target(step, layer);
    if (f->layer == FT_NONE)
        return;
    list_foreseen(step, ids);
    order_copies(step, layer);
    offer_to_workers(step);
}

static struct ft_landing *find(struct ft_landings *l, uint32_t layer, uint32_t expert)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (l->landing[i].layer == layer && l->landing[i].expert == expert)
            return &l->landing[i];
    return NULL;
}

void ft_look_ahead_mark(struct ft_step *step, uint32_t layer)
{
    struct ft_foresight *f = &step->foresight;
    struct ft_active *a = &step->x.active;
    struct ft_landings *l = landings_of(step, layer);
    bool foreseen = f->layer == layer;
    memset(a->ahead, 0, a->count);
    if (!foreseen)
        return;
    for (uint32_t i = 0; i < a->count; i++) {
        f->right += f->mark[a->expert[i]] == f->stamp;
        a->ahead[i] = a->slot[i] == FT_NONE && find(l, layer, a->expert[i]);
    }
    f->layer = FT_NONE;
}

_Atomic uint32_t *ft_look_ahead_land(struct ft_step *step, uint32_t layer, uint32_t expert, uint32_t slot,
                                     uint32_t *ticket)
{
    struct ft_landing *landing = find(landings_of(step, layer), layer, expert);
    uint32_t blob = step->slots.blob[slot];
    step->slots.blob[slot] = landing->blob;
    landing->blob = blob;
    landing->layer = FT_NONE; /* its ticket stands until the copy is there */
    step->foresight.landed++;
    *ticket = atomic_load_explicit(&landing->ticket, memory_order_acquire);
    return &landing->ticket;
}

void ft_look_ahead_end(struct ft_step *step, uint32_t layer)
{
    struct ft_landings *l = landings_of(step, layer);
    for (uint32_t i = 0; i < l->count; i++)
        if (l->landing[i].layer != FT_NONE) {
            l->landing[i].layer = FT_NONE;
            atomic_store_explicit(&l->landing[i].ticket, 0, memory_order_relaxed);
        }
}

static void record(struct ft_step *step, uint32_t thread, const struct ft_landing_order *order)
{
    ft_step_record_ahead(step, thread, order->start_ns, order->end_ns, order->layer, order->expert, FT_NONE,
                         FT_REASON_FORESEEN);
}

void ft_look_ahead_settle(struct ft_step *step, uint32_t thread)
{
    for (uint32_t i = 0; i < step->slots.part_count; i++) {
        struct ft_landings *l = &step->landings[i];
        /* acquire: pairs with the release in ft_look_ahead_run */
        uint32_t passed = atomic_load_explicit(&l->passed, memory_order_acquire);
        for (; l->settled != passed; l->settled++)
            record(step, thread, order_at(l, l->settled));
    }
}

void ft_look_ahead_drop(struct ft_step *step)
{
    for (uint32_t i = 0; i < step->slots.part_count; i++) {
        struct ft_landings *l = &step->landings[i];
        for (uint32_t j = 0; j < l->count; j++) {
            l->landing[j].layer = FT_NONE;
            atomic_store_explicit(&l->landing[j].ticket, 0, memory_order_relaxed);
        }
        if (!step->cuda)
            continue;
        l->settled = atomic_load_explicit(&l->published,
                                          memory_order_relaxed); /* the driver waits for the next step */
        atomic_store_explicit(&l->passed, l->settled, memory_order_relaxed);
    }
    step->foresight.layer = FT_NONE;
}

/* ---- link ---- */

struct ft_landing_order *ft_look_ahead_next(struct ft_step *step, uint32_t layer)
{
    struct ft_landings *l = landings_of(step, layer);
    uint32_t passed = atomic_load_explicit(&l->passed, memory_order_relaxed);
    return passed == atomic_load_explicit(&l->published, memory_order_relaxed) ? NULL : order_at(l, passed);
}

void ft_look_ahead_queued(struct ft_step *step, uint32_t layer, uint32_t thread)
{
    struct ft_landings *l = landings_of(step, layer);
    uint32_t passed = atomic_load_explicit(&l->passed, memory_order_relaxed);
    record(step, thread, order_at(l, passed));
    l->settled = passed + 1;
    atomic_store_explicit(&l->passed, passed + 1, memory_order_relaxed);
}

bool ft_look_ahead_is_waiting(const struct ft_step *step)
{
    const struct ft_landings *l = &step->landings[0];
    return atomic_load_explicit(&l->published, memory_order_acquire) !=
           atomic_load_explicit(&l->passed, memory_order_relaxed);
}

bool ft_look_ahead_run(struct ft_step *step,
                       void (*copy)(struct ft_step *step, uint32_t layer, uint32_t expert, char *destination))
{
    struct ft_landings *l = &step->landings[0];
    uint32_t passed = atomic_load_explicit(&l->passed, memory_order_relaxed);
    if (atomic_load_explicit(&l->published, memory_order_acquire) == passed)
        return false;
    struct ft_landing_order *order = order_at(l, passed);
    struct ft_landing *landing = &l->landing[order->landing];
    if (atomic_load_explicit(&landing->ticket, memory_order_acquire) == order->ticket) {
        order->start_ns = ft_clock_ns(&step->clock);
        copy(step, order->layer, order->expert, order->destination);
        order->end_ns = ft_clock_ns(&step->clock);
        /* release: pairs with the acquire of whoever uses the buffer */
        atomic_store_explicit(&landing->ticket, 0, memory_order_release);
    }
    atomic_store_explicit(&l->passed, passed + 1, memory_order_release);
    return true;
}
