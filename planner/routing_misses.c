/* SPDX-License-Identifier: Apache-2.0 */
/* What a pool of slots makes of given routing: the LRU of the engine, and the best that anybody could do. */
#include <stdlib.h>
#include <string.h>

#include "planner/policies.h"
#include "planner/routing.h"

/* Distinct experts of one (step, layer), ascending, into active [FT_EXPERTS_MAX]; returns how many. */
static uint32_t list_active(const struct ft_routing *routing, uint32_t step, uint32_t layer, uint32_t *active)
{
    bool used[FT_EXPERTS_MAX] = {false};
    uint32_t count = 0, end = 0;
    for (uint32_t row = 0; row < routing->row_count; row++) {
        const uint16_t *ids = ft_routing_row(routing, step, layer, row);
        for (uint32_t j = 0; j < routing->topk; j++) {
            used[ids[j]] = true;
            end = FT_MAX(end, ids[j] + 1u);
        }
    }
    for (uint32_t e = 0; e < end; e++)
        if (used[e])
            active[count++] = e;
    return count;
}

void ft_routing_count_active(const struct ft_routing *routing, uint32_t first, uint32_t steps,
                             struct ft_routing_count *count)
{
    uint32_t active[FT_EXPERTS_MAX];
    *count = (struct ft_routing_count){0};
    for (uint32_t step = first; step < first + steps; step++)
        for (uint32_t layer = 0; layer < routing->layer_count; layer++)
            count->active += list_active(routing, step, layer, active);
}

static int check(const struct ft_routing *routing, uint32_t expert_count, const struct ft_routing_warm *warm,
                 uint32_t slot_count, struct ft_error *err)
{
    uint64_t rows = (uint64_t)routing->step_count * routing->layer_count * routing->row_count;
    for (uint64_t i = 0; i < rows * routing->topk; i++)
        if (routing->ids[i] >= expert_count || expert_count > FT_EXPERTS_MAX)
            return ft_error_set(err, FT_USAGE, "the routing names expert %u, and there are %u",
                                routing->ids[i], expert_count);
    for (uint32_t i = 0; warm && i < warm->count; i++)
        if (warm->layer[i] >= routing->layer_count || warm->expert[i] >= expert_count || i >= slot_count)
            return ft_error_set(err, FT_USAGE,
                                "warm expert %u (layer %u, expert %u) has no place in %u slots", i,
                                warm->layer[i], warm->expert[i], slot_count);
    return FT_OK;
}

/* ---- LRU ---- */

struct lru {
    uint32_t *layer, *expert, *last_used; /* [slot_count] */
    uint8_t *busy;                        /* [slot_count] leased by the layer at hand */
    uint32_t *map;                        /* [layer_count, expert_count] slot or FT_NONE */
    uint32_t *used_step;                  /* [layer_count, expert_count] step of the last use, 0 = never */
    void *policy_state;
    uint32_t slot_count, expert_count;
};

static void lru_free(struct lru *lru)
{
    free(lru->layer);
    free(lru->expert);
    free(lru->last_used);
    free(lru->busy);
    free(lru->map);
    free(lru->used_step);
    free(lru->policy_state);
}

static int lru_init(struct lru *lru, uint32_t layer_count, uint32_t expert_count, uint32_t slot_count,
                    struct ft_error *err)
{
    uint64_t experts = (uint64_t)layer_count * expert_count, slots = slot_count + 1ull;
    const struct ft_policy_params params = {.slot_count = slot_count, .fetch_share = 1};
    uint64_t state_bytes = ft_round_up(ft_policy_offload.state_bytes(&params), 64);
    *lru = (struct lru){.layer = malloc(slots * sizeof(uint32_t)),
                        .expert = malloc(slots * sizeof(uint32_t)),
                        .last_used = calloc(slots, sizeof(uint32_t)),
                        .busy = calloc(slots, 1),
                        .map = malloc(experts * sizeof(uint32_t)),
                        .used_step = calloc(experts, sizeof(uint32_t)),
                        .policy_state = aligned_alloc(64, state_bytes),
                        .slot_count = slot_count,
                        .expert_count = expert_count};
    if (!lru->layer || !lru->expert || !lru->last_used || !lru->busy || !lru->map || !lru->used_step ||
        !lru->policy_state)
        return ft_error_set(err, FT_MEMORY, "no memory to replay %u slots", slot_count);
    memset(lru->layer, 0xff, slots * sizeof(uint32_t));
    memset(lru->expert, 0xff, slots * sizeof(uint32_t));
    memset(lru->map, 0xff, experts * sizeof(uint32_t));
    memset(lru->policy_state, 0, state_bytes);
    return ft_policy_offload.init(lru->policy_state, &params, err);
}

static void lru_take(struct lru *lru, uint32_t slot, uint32_t layer, uint32_t expert, uint32_t step)
{
    if (lru->expert[slot] != FT_NONE)
        lru->map[(uint64_t)lru->layer[slot] * lru->expert_count + lru->expert[slot]] = FT_NONE;
    lru->layer[slot] = layer;
    lru->expert[slot] = expert;
    lru->last_used[slot] = step;
    lru->map[(uint64_t)layer * lru->expert_count + expert] = slot;
}

/* One layer as the step runner does it (jobs/expand.c), with the policy that the engine runs. Returns the misses. */
static uint32_t lru_layer(struct lru *lru, uint32_t layer, const uint32_t *active, uint32_t count,
                          uint32_t step)
{
    uint32_t slot[FT_EXPERTS_MAX], last_used[FT_EXPERTS_MAX], rows[FT_EXPERTS_MAX], victim[FT_EXPERTS_MAX];
    uint8_t place[FT_EXPERTS_MAX], reason[FT_EXPERTS_MAX];
    float predicted[FT_EXPERTS_MAX];
    uint32_t misses = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t expert = (uint64_t)layer * lru->expert_count + active[i];
        slot[i] = lru->map[expert];
        last_used[i] = lru->used_step[expert];
        rows[i] = 1;
        lru->used_step[expert] = step;
        misses += slot[i] == FT_NONE;
        if (slot[i] != FT_NONE) {
            lru->last_used[slot[i]] = step;
            lru->busy[slot[i]] = 1;
        }
    }
    const struct ft_layer_in in = {.step = step,
                                   .layer = layer,
                                   .active_count = count,
                                   .expert = active,
                                   .rows = rows,
                                   .slot = slot,
                                   .last_used = last_used,
                                   .has_device = true,
                                   .slots = {.count = lru->slot_count,
                                             .layer = lru->layer,
                                             .expert = lru->expert,
                                             .last_used = lru->last_used,
                                             .busy = lru->busy,
                                             .end = lru->slot_count}};
    struct ft_layer_out out = {.place = place, .reason = reason, .victim = victim, .predicted_ns = predicted};
    ft_policy_offload.decide_layer(lru->policy_state, &in, &out);
    for (uint32_t i = 0; i < count; i++) {
        if (slot[i] != FT_NONE)
            lru->busy[slot[i]] = 0;
        if (place[i] == FT_PLACE_FETCH)
            lru_take(lru, victim[i], layer, active[i], step);
    }
    return misses;
}

int ft_routing_lru(const struct ft_routing *routing, uint32_t expert_count, uint32_t slot_count,
                   const struct ft_routing_warm *warm, uint32_t first, uint32_t steps,
                   struct ft_routing_count *count, struct ft_error *err)
{
    struct lru lru = {0};
    uint32_t active[FT_EXPERTS_MAX];
    *count = (struct ft_routing_count){0};
    int status = check(routing, expert_count, warm, slot_count, err);
    if (status == FT_OK)
        status = lru_init(&lru, routing->layer_count, expert_count, slot_count, err);
    for (uint32_t i = 0; status == FT_OK && warm && i < warm->count; i++)
        lru_take(&lru, i, warm->layer[i], warm->expert[i], 0);
    for (uint32_t step = 0; status == FT_OK && step < first + steps; step++)
        for (uint32_t layer = 0; layer < routing->layer_count; layer++) {
            uint32_t listed = list_active(routing, step, layer, active);
            uint32_t misses = lru_layer(&lru, layer, active, listed, step + 1);
            count->active += step >= first ? listed : 0;
            count->misses += step >= first ? misses : 0;
        }
    lru_free(&lru);
    return status;
}

/* ---- Belady ---- */

/*
 * Uses are numbered over the whole replay; next[u] is the number of the same expert's next use. The residents
 * form a heap by next use, farthest on top. An expert that is touched gets a new entry; the old one stays
 * behind and is recognised by a next use that is not the expert's any more.
 */
struct belady {
    uint32_t *active; /* [uses] layer * expert_count + expert, in order of time */
    uint32_t *begin;  /* [groups + 1] first use of each (step, layer) */
    uint32_t *next;   /* [uses] UINT32_MAX - 1 = never again */
    uint32_t *wanted; /* [experts] next use of a resident; FT_NONE = not resident */
    uint64_t *heap;   /* [uses + warm] next use << 32 | expert */
    uint64_t heap_count;
    uint32_t use_count, group_count, resident_count;
};

#define NEVER (UINT32_MAX - 1)

static void heap_push(struct belady *b, uint64_t key)
{
    uint64_t at = b->heap_count++;
    for (; at && b->heap[(at - 1) / 2] < key; at = (at - 1) / 2)
        b->heap[at] = b->heap[(at - 1) / 2];
    b->heap[at] = key;
}

static uint64_t heap_pop(struct belady *b)
{
    uint64_t top = b->heap[0], last = b->heap[--b->heap_count], at = 0;
    for (;;) {
        uint64_t child = 2 * at + 1;
        if (child + 1 < b->heap_count && b->heap[child + 1] > b->heap[child])
            child++;
        if (child >= b->heap_count || b->heap[child] <= last)
            break;
        b->heap[at] = b->heap[child];
        at = child;
    }
    b->heap[at] = last;
    return top;
}

static void keep(struct belady *b, uint32_t expert, uint32_t next)
{
    b->resident_count += b->wanted[expert] == FT_NONE;
    b->wanted[expert] = next;
    heap_push(b, (uint64_t)next << 32 | expert);
}

static void drop_farthest(struct belady *b)
{
    for (;;) {
        uint64_t key = heap_pop(b);
        uint32_t expert = (uint32_t)key;
        if (b->wanted[expert] != (uint32_t)(key >> 32))
            continue;
        b->wanted[expert] = FT_NONE;
        b->resident_count--;
        return;
    }
}

static void belady_free(struct belady *b)
{
    free(b->active);
    free(b->begin);
    free(b->next);
    free(b->wanted);
    free(b->heap);
}

/* Lists all uses, then their next ones from the back; `wanted` ends as each expert's first use. */
static int belady_list(struct belady *b, const struct ft_routing *routing, uint32_t expert_count,
                       uint32_t warm, uint32_t steps, struct ft_error *err)
{
    struct ft_routing_count all;
    uint32_t listed[FT_EXPERTS_MAX];
    uint64_t experts = (uint64_t)routing->layer_count * expert_count;
    ft_routing_count_active(routing, 0, steps, &all);
    if (all.active >= NEVER)
        return ft_error_set(err, FT_LIMIT, "%u steps use experts more than 2^32 times", steps);
    b->use_count = (uint32_t)all.active;
    b->group_count = steps * routing->layer_count;
    b->active = malloc((all.active + 1) * sizeof *b->active);
    b->next = malloc((all.active + 1) * sizeof *b->next);
    b->begin = malloc((b->group_count + 1ull) * sizeof *b->begin);
    b->wanted = malloc(experts * sizeof *b->wanted);
    b->heap = malloc((all.active + warm + 1) * sizeof *b->heap);
    if (!b->active || !b->next || !b->begin || !b->wanted || !b->heap)
        return ft_error_set(err, FT_MEMORY, "no memory to look ahead over %u steps", steps);
    uint32_t at = 0;
    for (uint32_t group = 0; group < b->group_count; group++) {
        uint32_t layer = group % routing->layer_count;
        uint32_t count = list_active(routing, group / routing->layer_count, layer, listed);
        b->begin[group] = at;
        for (uint32_t i = 0; i < count; i++)
            b->active[at++] = layer * expert_count + listed[i];
    }
    b->begin[b->group_count] = at;
    for (uint64_t e = 0; e < experts; e++)
        b->wanted[e] = NEVER;
    while (at-- > 0) {
        b->next[at] = b->wanted[b->active[at]];
        b->wanted[b->active[at]] = at;
    }
    return FT_OK;
}

static void belady_warm(struct belady *b, uint64_t experts, uint32_t expert_count,
                        const struct ft_routing_warm *warm)
{
    /* The first uses are parked in the heap's order of arrival before `wanted` is emptied. */
    for (uint32_t i = 0; warm && i < warm->count; i++) {
        uint32_t expert = warm->layer[i] * expert_count + warm->expert[i];
        heap_push(b, (uint64_t)b->wanted[expert] << 32 | expert);
    }
    for (uint64_t e = 0; e < experts; e++)
        b->wanted[e] = FT_NONE;
    for (uint64_t i = 0; i < b->heap_count; i++) {
        uint32_t expert = (uint32_t)b->heap[i];
        b->resident_count += b->wanted[expert] == FT_NONE;
        b->wanted[expert] = (uint32_t)(b->heap[i] >> 32);
    }
}

int ft_routing_belady(const struct ft_routing *routing, uint32_t expert_count, uint32_t slot_count,
                      const struct ft_routing_warm *warm, uint32_t first, uint32_t steps,
                      struct ft_routing_count *count, struct ft_error *err)
{
    struct belady b = {0};
    *count = (struct ft_routing_count){0};
    int status = check(routing, expert_count, warm, slot_count, err);
    if (status == FT_OK)
        status = belady_list(&b, routing, expert_count, warm ? warm->count : 0, first + steps, err);
    if (status == FT_OK)
        belady_warm(&b, (uint64_t)routing->layer_count * expert_count, expert_count, warm);
    for (uint32_t group = 0; status == FT_OK && group < b.group_count; group++) {
        bool counted = group / routing->layer_count >= first;
        for (uint32_t u = b.begin[group]; u < b.begin[group + 1]; u++) {
            count->active += counted;
            count->misses += counted && b.wanted[b.active[u]] == FT_NONE;
            keep(&b, b.active[u], b.next[u]);
        }
        while (b.resident_count > slot_count)
            drop_farthest(&b);
    }
    belady_free(&b);
    return status;
}
