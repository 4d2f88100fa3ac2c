/* SPDX-License-Identifier: Apache-2.0 */
#include "graph/policy.h"

static const char *const place_names[FT_PLACE_COUNT] = {"device", "fetch", "cpu"};
static const char *const reason_texts[FT_REASON_COUNT] = {
#define FT_REASON_TEXT(name, text) text,
    FT_REASONS(FT_REASON_TEXT)
#undef FT_REASON_TEXT
};

const char *ft_place_name(enum ft_place place)
{
    return place < FT_PLACE_COUNT ? place_names[place] : "?";
}

const char *ft_reason_text(enum ft_reason reason)
{
    return reason < FT_REASON_COUNT ? reason_texts[reason] : "?";
}

/* Does one of the layer's active experts live in this slot? Experts are ascending. */
static bool is_slot_active(const struct ft_layer_in *in, uint32_t slot)
{
    if (in->slots.layer[slot] != in->layer)
        return false;
    uint32_t wanted = in->slots.expert[slot], low = 0, high = in->active_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (in->expert[middle] < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return low < in->active_count && in->expert[low] == wanted;
}

/* A slot may be taken when it lies on the layer's GPU, nobody leases or fills it and this very layer does not read it. Two fetches of one
 * layer may name the same slot: the runner makes them consecutive waves. */
static bool may_take(const struct ft_layer_in *in, uint32_t slot)
{
    return slot >= in->slots.begin && slot < in->slots.end && !in->slots.busy[slot] &&
           !is_slot_active(in, slot);
}

static bool is_victim_of(const struct ft_layer_out *out, uint32_t count, uint32_t slot)
{
    for (uint32_t i = 0; i < count; i++)
        if (out->place[i] == FT_PLACE_FETCH && out->victim[i] == slot)
            return true;
    return false;
}

/* Slow and simple: only a broken answer comes here. A free slot, else the oldest, else one given to an
 * earlier fetch of this layer (a later wave), else FT_NONE. */
static uint32_t find_victim(const struct ft_layer_in *in, const struct ft_layer_out *out, uint32_t decided)
{
    uint32_t best = FT_NONE, shared = FT_NONE;
    for (uint32_t s = in->slots.begin; s < in->slots.end; s++) {
        if (!may_take(in, s))
            continue;
        if (is_victim_of(out, decided, s)) {
            shared = shared == FT_NONE ? s : shared;
            continue;
        }
        if (in->slots.expert[s] == FT_NONE)
            return s;
        if (best == FT_NONE || in->slots.last_used[s] < in->slots.last_used[best])
            best = s;
    }
    return best != FT_NONE ? best : shared;
}

static void place_on_cpu(struct ft_layer_out *out, uint32_t i, enum ft_reason reason)
{
    out->place[i] = FT_PLACE_CPU;
    out->reason[i] = (uint8_t)reason;
    out->victim[i] = FT_NONE;
}

/* Repairs choice i, whose predecessors are already right; true when it was changed. */
static bool repair_choice(const struct ft_layer_in *in, struct ft_layer_out *out, uint32_t i)
{
    bool resident = in->slot[i] != FT_NONE, changed = false;
    if (out->reason[i] >= FT_REASON_COUNT) {
        out->reason[i] = FT_REASON_NONE;
        changed = true;
    }
    if (!(out->predicted_ns[i] >= 0)) { /* negative or not a number */
        out->predicted_ns[i] = 0;
        changed = true;
    }
    if (!in->has_device && out->place[i] != FT_PLACE_CPU) {
        place_on_cpu(out, i, FT_REASON_NO_DEVICE);
        return true;
    }
    bool nowhere = out->place[i] == FT_PLACE_FETCH && in->prefill && in->no_staging;
    if (nowhere || out->place[i] >= FT_PLACE_COUNT || (resident && out->place[i] == FT_PLACE_FETCH) ||
        (!resident && out->place[i] == FT_PLACE_DEVICE)) {
        place_on_cpu(out, i, FT_REASON_NO_SLOT);
        if (resident && in->has_device) {
            out->place[i] = FT_PLACE_DEVICE;
            out->reason[i] = FT_REASON_RESIDENT;
        }
        return true;
    }
    if (out->place[i] != FT_PLACE_FETCH || in->prefill) {
        changed |= out->victim[i] != FT_NONE;
        out->victim[i] = FT_NONE;
        return changed;
    }
    if (may_take(in, out->victim[i]))
        return changed;
    out->victim[i] = find_victim(in, out, i);
    if (out->victim[i] == FT_NONE)
        place_on_cpu(out, i, FT_REASON_NO_SLOT);
    return true;
}

/* Drops prefetches that cannot be done; returns how many. */
static uint32_t repair_prefetches(const struct ft_layer_in *in, struct ft_layer_out *out)
{
    uint32_t count = FT_MIN(out->prefetch_count, out->prefetch_max), kept = 0;
    uint32_t dropped = out->prefetch_count - count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t victim = out->prefetch_victim[i];
        bool good = in->has_device && may_take(in, victim) && !is_victim_of(out, in->active_count, victim) &&
                    out->prefetch_layer[i] < FT_LAYERS_MAX && out->prefetch_expert[i] < FT_EXPERTS_MAX;
        for (uint32_t j = 0; j < kept && good; j++)
            good = out->prefetch_victim[j] != victim;
        if (!good) {
            dropped++;
            continue;
        }
        out->prefetch_layer[kept] = out->prefetch_layer[i];
        out->prefetch_expert[kept] = out->prefetch_expert[i];
        out->prefetch_victim[kept++] = victim;
    }
    out->prefetch_count = kept;
    return dropped;
}

uint32_t ft_policy_check_answer(const struct ft_layer_in *in, struct ft_layer_out *out)
{
    uint32_t changed = 0;
    for (uint32_t i = 0; i < in->active_count; i++)
        changed += repair_choice(in, out, i);
    if (out->prefetch_count)
        changed += repair_prefetches(in, out);
    return changed;
}
